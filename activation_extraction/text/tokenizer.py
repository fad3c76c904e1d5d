"""Loads the tokenizer of a model from its files. samples.py applies it to documents."""

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.late_imports import transformers


def load_tokenizer(files: Iterable[Path], model_path: str, vocab_size: int) -> Tokenizer:
    """Loads the tokenizer that transformers makes of a model's files.

    files: the model's files for its tokenizer, with config.json beside them. model_path: names the
    model in messages. Raises InputError if a file is missing or broken, or belongs to a model with
    another vocabulary.
    """
    paths = {path.name: path for path in files}
    for name in ("vocab.json", "merges.txt"):
        if "tokenizer.json" not in paths and name not in paths:
            raise InputError(
                f"--model_path {model_path}: has no {name}; a tokenizer is read from "
                "tokenizer.json, or from vocab.json with merges.txt"
            )
    path = paths.get("tokenizer.json") or paths["vocab.json"]
    try:
        tokenizer: Tokenizer = (
            transformers()
            .AutoTokenizer.from_pretrained(
                path.parent, local_files_only=True, trust_remote_code=False
            )
            .backend_tokenizer
        )
    except Exception as error:  # transformers does not say what it raises
        raise InputError(f"{path}: the tokenizer cannot be loaded: {one_line(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise InputError(
            f"{path}: the tokenizer has token id {largest}, but vocab_size in config.json is "
            f"{vocab_size}; put the model's own tokenizer there"
        )
    return tokenizer
