"""Names the files of a tokenizer, for runs that make token ids and readers that show their text."""

from collections.abc import Iterable
from pathlib import Path

WHOLE, WORDS, MERGES = VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "merges.txt")
# Every file that decides how text is tokenised.
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
)


def vocabulary_file(files: Iterable[Path]) -> Path | None:
    """Returns the file that a tokenizer's vocabulary is read from; None if it is not complete.

    Args:
        files: Files of one folder.
    """
    paths = {path.name: path for path in files}
    if WHOLE in paths:
        return paths[WHOLE]
    return paths[WORDS] if {WORDS, MERGES} <= paths.keys() else None
