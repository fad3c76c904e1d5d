"""Loads the tokenizer of a model or adapter, and compares tokenizers.

transformers decides which tokens are special and how they are treated: it reads tokenizer.json and
the settings and lists of tokens beside it. The words come from tokenizer.json alone, because some
classes of transformers replace them by words of their own, which are not those of every model that
names the class. tokens.py turns texts into token ids.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.late_imports import transformers
from activation_extraction.common.log import log
from activation_extraction.common.tokenizer_files import MERGES, WHOLE, WORDS, vocabulary_file

# Parts of tokenizer.json that change no token id of a text, or are compared by what they do.
NOT_COMPARED = ("version", "truncation", "padding", "decoder", "post_processor")


def load_tokenizer(files: Iterable[Path], where: str, vocab_size: int) -> Any:
    """Loads the tokenizer of a model or adapter.

    Args:
        files: The checkpoint's files for its tokenizer, with config.json beside them.
        where: The checkpoint's flag and path, for messages.
        vocab_size: The number of token ids that the model has.

    Returns:
        The tokenizer as an object of transformers. Its `backend_tokenizer` neither cuts nor pads.

    Raises:
        InputError: If a file is missing or broken, or if the tokenizer has token ids that the model
            does not have.
    """
    files = list(files)
    path = vocabulary_file(files)
    if path is None:
        missing = MERGES if WORDS in {file.name for file in files} else WORDS
        raise InputError(
            f"{where}: has no {missing}; a tokenizer is read from {WHOLE}, or from {WORDS} with "
            f"{MERGES}"
        )
    tokenizer = read_pretrained(path)
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    vocabulary = backend.get_vocab(with_added_tokens=True).values()
    special_ids = backend.encode("").ids
    largest = max((*vocabulary, *special_ids), default=-1)
    if largest >= vocab_size:
        raise InputError(
            f"{path}: the tokenizer has token id {largest}, but vocab_size in config.json is "
            f"{vocab_size}; put the model's own tokenizer there, or give the model that has it"
        )
    return tokenizer


def read_pretrained(path: Path) -> Any:
    """Reads the tokenizer of a folder. No code of the folder is run.

    Args:
        path: The vocabulary file, with the other files of the tokenizer beside it.

    Returns:
        The tokenizer as an object of transformers. Its `backend_tokenizer` makes the token ids.

    Raises:
        InputError: If the tokenizer cannot be loaded.
    """
    library = transformers()
    options = {"local_files_only": True, "trust_remote_code": False}
    try:
        if path.name != WHOLE:
            return library.AutoTokenizer.from_pretrained(path.parent, **options)
        words = read_tokenizer(path)
        try:
            tokenizer = library.AutoTokenizer.from_pretrained(path.parent, **options)
            backend = tokenizer.backend_tokenizer
        except Exception as error:  # its class is unknown, or is code of the folder
            tokenizer = library.PreTrainedTokenizerFast.from_pretrained(path.parent, **options)
            log.warning(
                "%s: read without the class that is named beside it: %s", path, one_line(error)
            )
            return tokenizer
    except InputError:
        raise
    except Exception as error:  # transformers does not say what it raises
        raise _load_error(path, error) from error
    if type(tokenizer) is not library.PreTrainedTokenizerFast:
        _replace_words(backend, words, tokenizer.init_kwargs.get("add_prefix_space"))
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer.json alone, without the settings beside it.

    Raises:
        InputError: If the file cannot be read.
    """
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no other type
        raise _load_error(path, error) from error


def _replace_words(tokenizer: Tokenizer, words: Tokenizer, prefix_space: bool | None) -> None:
    """Gives a tokenizer the words of another one; its special tokens stay as they are.

    Args:
        tokenizer: The tokenizer that is changed.
        words: The tokenizer whose normalizer, pre-tokenizer, model and decoder are taken.
        prefix_space: Whether words get a space in front of them; None if no setting says so.
    """
    if prefix_space is not None:
        for byte_level in _byte_levels(words):
            byte_level.add_prefix_space = prefix_space
    tokenizer.normalizer = words.normalizer
    tokenizer.pre_tokenizer = words.pre_tokenizer
    tokenizer.model = words.model
    tokenizer.decoder = words.decoder


def _byte_levels(tokenizer: Tokenizer) -> list[pre_tokenizers.ByteLevel]:
    """Returns the steps that turn words into bytes; changing one changes the tokenizer."""
    pre_tokenizer: Any = tokenizer.pre_tokenizer
    is_sequence = isinstance(pre_tokenizer, pre_tokenizers.Sequence)
    steps: list[Any] = [*pre_tokenizer] if is_sequence else [pre_tokenizer]  # type: ignore[misc]
    return [step for step in steps if isinstance(step, pre_tokenizers.ByteLevel)]


def _load_error(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: the tokenizer cannot be loaded: {one_line(error)}")


def same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Returns whether two tokenizers give every text the same token ids.

    False does not prove that they differ: two tokenizers can be written differently and do the
    same.
    """
    return _id_settings(one) == _id_settings(other)


def _id_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns all that determines the token ids of a text, in a form that can be compared."""
    settings: dict[str, Any] = json.loads(tokenizer.to_str(), object_hook=_without_defaults)
    for name in NOT_COMPARED:
        settings.pop(name, None)
    settings["special tokens around"] = [tokenizer.encode(text).ids for text in ("", "x")]
    splits_special_tokens = tokenizer.encode_special_tokens
    settings["special tokens split"] = splits_special_tokens
    if not splits_special_tokens:  # then special and other added tokens are treated alike
        for token in settings.get("added_tokens", ()):
            token.pop("special", None)
    return settings


def _without_defaults(part: dict[str, Any]) -> dict[str, Any]:
    """Returns an object of tokenizer.json without settings that are off or change no token id."""
    return {
        name: value
        for name, value in part.items()
        if not (value is None or value is False or value == "" or name == "trim_offsets")
    }
