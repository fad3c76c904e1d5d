"""Names the files of a tokenizer in a folder or repository of a model.

text/tokenizer.py loads a tokenizer from these files for a run. dataset/features.py loads one to
decode stored tokens.
"""

from collections.abc import Iterable
from pathlib import Path

# The vocabulary of a tokenizer is in tokenizer.json, or in the two files vocab.json and merges.txt.
TOKENIZER_JSON = "tokenizer.json"
VOCAB_JSON = "vocab.json"
MERGES_TXT = "merges.txt"
VOCABULARY_FILES = (TOKENIZER_JSON, VOCAB_JSON, MERGES_TXT)
# All files that determine the token ids of a text.
TOKENIZER_FILES = (
    *VOCABULARY_FILES,
    "tokenizer_config.json",
    "added_tokens.json",
    "special_tokens_map.json",
)


def vocabulary_file(files: Iterable[Path]) -> Path | None:
    """Returns the file from which to read a tokenizer's vocabulary.

    Args:
        files: The paths of the files in a folder.

    Returns:
        The path of tokenizer.json if there is such a file. Otherwise the path of vocab.json if
        there are vocab.json and merges.txt. Otherwise None.
    """
    path_by_name = {path.name: path for path in files}
    if TOKENIZER_JSON in path_by_name:
        return path_by_name[TOKENIZER_JSON]
    if VOCAB_JSON in path_by_name and MERGES_TXT in path_by_name:
        return path_by_name[VOCAB_JSON]
    return None
