"""Names the files of a tokenizer, for runs that tokenise and for readers that decode tokens."""

from collections.abc import Iterable
from pathlib import Path

WHOLE, WORDS, MERGES = VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "merges.txt")
# All files that determine how text is tokenised.
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
)


def vocabulary_file(files: Iterable[Path]) -> Path | None:
    """Returns the file from which to read a tokenizer's vocabulary.

    Args:
        files: The files of a folder.

    Returns:
        tokenizer.json if there is one, otherwise vocab.json if there is merges.txt as well. None
        if neither holds.
    """
    paths = {path.name: path for path in files}
    if WHOLE in paths:
        return paths[WHOLE]
    return paths[WORDS] if {WORDS, MERGES} <= paths.keys() else None
