"""Loads the tokenizer of a model from its files. samples.py applies it to documents."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from activation_extraction.cli.errors import InputError

# How Qwen2 splits text before byte-level BPE (the pattern in its tokenizer.json).
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def load_tokenizer(files: Iterable[Path], model_path: str, vocab_size: int) -> Tokenizer:
    """Loads a tokenizer from tokenizer.json, or else from vocab.json and merges.txt.

    files: the model's files for its tokenizer. model_path: names the model in messages. Raises
    InputError if a file is missing or broken, or belongs to a model with another vocabulary.
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
        tokenizer = (
            Tokenizer.from_file(str(path))
            if path.name == "tokenizer.json"
            else _from_vocabulary(path, paths["merges.txt"], paths.get("tokenizer_config.json"))
        )
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise InputError(f"{path}: the tokenizer cannot be loaded: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise InputError(
            f"{path}: the tokenizer has token id {largest}, but vocab_size in config.json is "
            f"{vocab_size}; put the model's own tokenizer there"
        )
    return tokenizer


def _from_vocabulary(vocabulary: Path, merges: Path, settings: Path | None) -> Tokenizer:
    """A tokenizer from the files that older checkpoints have instead of tokenizer.json."""
    tokenizer = qwen2_tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    if settings is not None:
        added = json.loads(settings.read_text()).get("added_tokens_decoder", {})
        for _, token in sorted(added.items(), key=lambda item: int(item[0])):
            add = tokenizer.add_special_tokens if token["special"] else tokenizer.add_tokens
            add([AddedToken(**token)])
    return tokenizer


def qwen2_tokenizer(model: models.Model) -> Tokenizer:
    """A byte-level tokenizer that normalises and splits text like Qwen2's tokenizer.json."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
