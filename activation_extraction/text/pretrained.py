"""Loads the tokenizer in the folder of a model or adapter.

transformers decides which tokens are special and how they are treated: it reads tokenizer.json and
the settings and lists of tokens beside it. The words come from tokenizer.json alone, because the
classes of transformers have words of their own, which are not those of every model that names them.
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.late_imports import transformers
from activation_extraction.common.log import log
from activation_extraction.common.tokenizer_files import WHOLE


def pretrained(path: Path) -> Any:
    """Returns the tokenizer of a folder as an object of transformers.

    Its `backend_tokenizer` makes the token ids. No code of the folder is run.

    Args:
        path: The folder's vocabulary file, with its other files beside it.

    Raises:
        InputError: The tokenizer cannot be loaded.
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
        raise _broken(path, error) from error
    if type(tokenizer) is not library.PreTrainedTokenizerFast:
        _take_words(backend, words, tokenizer.init_kwargs.get("add_prefix_space"))
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer.json alone. Raises InputError."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no other type
        raise _broken(path, error) from error


def _take_words(tokenizer: Tokenizer, words: Tokenizer, prefix_space: bool | None) -> None:
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
    """Returns the steps that turn words into bytes; to change one changes the tokenizer."""
    whole: Any = tokenizer.pre_tokenizer
    several = isinstance(whole, pre_tokenizers.Sequence)
    steps: list[Any] = [*whole] if several else [whole]  # type: ignore[misc]
    return [step for step in steps if isinstance(step, pre_tokenizers.ByteLevel)]


def _broken(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: the tokenizer cannot be loaded: {one_line(error)}")
