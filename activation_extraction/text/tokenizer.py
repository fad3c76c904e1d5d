"""Loads the tokenizer of a model or adapter, and compares tokenizers.

transformers decides which tokens are special and how they are treated, for which it reads all files
of the tokenizer. The vocabulary and the rules for splitting texts into words come from
tokenizer.json alone. The reason is that some tokenizer classes of transformers replace these rules
by their own, although some models that name such a class have other rules in tokenizer.json.
tokens.py turns texts into token ids.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.late_imports import transformers
from activation_extraction.common.log import log
from activation_extraction.common.tokenizer_files import (
    MERGES_TXT,
    TOKENIZER_JSON,
    VOCAB_JSON,
    vocabulary_file,
)

# Keys of tokenizer.json that are not compared: they change no token id of a text, or `_id_settings`
# compares their effect instead.
KEYS_NOT_COMPARED = ("version", "truncation", "padding", "decoder", "post_processor")


def load_tokenizer(files: Iterable[Path], origin: str, vocab_size: int) -> Any:
    """Loads the tokenizer of a model or adapter.

    Args:
        files: Files of the checkpoint's tokenizer. config.json must be in the same folder.
        origin: Flag and path of the checkpoint, for messages.
        vocab_size: The number of token ids of the model.

    Returns:
        The tokenizer as an object of transformers. Its `backend_tokenizer`, an object of the
        library tokenizers, neither cuts nor pads texts.

    Raises:
        InputError: If a file is missing or damaged, or if the tokenizer has token ids that the
            model does not have.
    """
    tokenizer_files = list(files)
    vocabulary_path = vocabulary_file(tokenizer_files)
    if vocabulary_path is None:
        missing_file_name = (
            MERGES_TXT
            if VOCAB_JSON in {tokenizer_file.name for tokenizer_file in tokenizer_files}
            else VOCAB_JSON
        )
        raise InputError(
            f"{origin}: has no {missing_file_name}; a tokenizer is read from {TOKENIZER_JSON}, "
            f"or from {VOCAB_JSON} with {MERGES_TXT}"
        )
    pretrained_tokenizer = read_pretrained(vocabulary_path)
    backend_tokenizer: Tokenizer = pretrained_tokenizer.backend_tokenizer
    backend_tokenizer.no_truncation()
    backend_tokenizer.no_padding()
    vocabulary_token_ids = backend_tokenizer.get_vocab(with_added_tokens=True).values()
    special_token_ids = backend_tokenizer.encode("").ids
    largest_token_id = max((*vocabulary_token_ids, *special_token_ids), default=-1)
    if largest_token_id >= vocab_size:
        raise InputError(
            f"{vocabulary_path}: the tokenizer has token id {largest_token_id}, but vocab_size "
            f"in config.json is {vocab_size}; put the model's own tokenizer there, or "
            "give the model that has it"
        )
    return pretrained_tokenizer


def read_pretrained(path: Path) -> Any:
    """Reads the tokenizer in a folder, without running code from the folder.

    Args:
        path: The path of tokenizer.json or vocab.json. The other files of the tokenizer must be in
            the same folder.

    Returns:
        The tokenizer as an object of transformers. Its `backend_tokenizer`, an object of the
        library tokenizers, turns texts into token ids.

    Raises:
        InputError: If the tokenizer cannot be loaded.
    """
    transformers_library = transformers()
    load_options = {"local_files_only": True, "trust_remote_code": False}
    try:
        if path.name != TOKENIZER_JSON:
            return transformers_library.AutoTokenizer.from_pretrained(path.parent, **load_options)
        file_tokenizer = read_tokenizer(path)
        try:
            pretrained_tokenizer = transformers_library.AutoTokenizer.from_pretrained(
                path.parent, **load_options
            )
            backend_tokenizer = pretrained_tokenizer.backend_tokenizer
        except Exception as error:  # the tokenizer's class is unknown, or is code in the folder
            pretrained_tokenizer = transformers_library.PreTrainedTokenizerFast.from_pretrained(
                path.parent, **load_options
            )
            log.warning(
                "%s: read without the class that is named beside it: %s", path, one_line(error)
            )
            return pretrained_tokenizer
    except InputError:
        raise
    except Exception as error:  # transformers may raise any exception
        raise _load_error(path, error) from error
    if type(pretrained_tokenizer) is not transformers_library.PreTrainedTokenizerFast:
        adds_prefix_space = pretrained_tokenizer.init_kwargs.get("add_prefix_space")
        _replace_words(backend_tokenizer, file_tokenizer, adds_prefix_space)
    return pretrained_tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer.json without the other files of the tokenizer.

    Args:
        path: The local path of tokenizer.json.

    Raises:
        InputError: If the file cannot be read.
    """
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise _load_error(path, error) from error


def _replace_words(tokenizer: Tokenizer, source: Tokenizer, prefix_space: bool | None) -> None:
    """Makes a tokenizer split texts into words, and words into tokens, as another tokenizer does.

    The special tokens of the tokenizer do not change.

    Args:
        tokenizer: The tokenizer to change.
        source: The tokenizer whose normalizer, pre-tokenizer, model and decoder are used.
        prefix_space: Whether a space is added in front of a text. None to keep the setting of
            `source`.
    """
    if prefix_space is not None:
        for byte_level_component in _byte_levels(source):
            byte_level_component.add_prefix_space = prefix_space
    tokenizer.normalizer = source.normalizer
    tokenizer.pre_tokenizer = source.pre_tokenizer
    tokenizer.model = source.model
    tokenizer.decoder = source.decoder


def _byte_levels(tokenizer: Tokenizer) -> list[pre_tokenizers.ByteLevel]:
    """Returns the components of a tokenizer's pre-tokenizer that turn words into bytes.

    The returned objects belong to the tokenizer, so changing one of them changes the tokenizer.
    """
    pre_tokenizer: Any = tokenizer.pre_tokenizer
    pre_tokenizer_components: list[Any] = [pre_tokenizer]
    if isinstance(pre_tokenizer, pre_tokenizers.Sequence):
        # mypy does not know that a sequence of pre-tokenizers can be iterated (type: ignore).
        pre_tokenizer_components = [*pre_tokenizer]  # type: ignore[misc]
    return [
        pre_tokenizer_component
        for pre_tokenizer_component in pre_tokenizer_components
        if isinstance(pre_tokenizer_component, pre_tokenizers.ByteLevel)
    ]


def _load_error(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: the tokenizer cannot be loaded: {one_line(error)}")


def same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Returns whether the settings of two tokenizers show that all texts get the same token ids.

    If the settings differ, the result is False, although the tokenizers may still give all texts
    the same token ids.

    Args:
        one: The first tokenizer.
        other: The second tokenizer.
    """
    return _id_settings(one) == _id_settings(other)


def _id_settings(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the names and values of the tokenizer's settings that determine token ids."""
    settings_that_determine_ids: dict[str, Any] = json.loads(
        tokenizer.to_str(), object_hook=_effective_settings
    )
    for setting_name in KEYS_NOT_COMPARED:
        settings_that_determine_ids.pop(setting_name, None)
    settings_that_determine_ids["special tokens around"] = [
        tokenizer.encode(trial_text).ids for trial_text in ("", "x")
    ]
    splits_special_tokens = tokenizer.encode_special_tokens
    settings_that_determine_ids["special tokens split"] = splits_special_tokens
    # If the tokenizer does not split special tokens, it recognises all added tokens in a text in
    # the same way. So the ids do not depend on which added tokens are marked as special.
    if not splits_special_tokens:
        for added_token in settings_that_determine_ids.get("added_tokens", ()):
            added_token.pop("special", None)
    return settings_that_determine_ids


def _effective_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Returns a JSON object of tokenizer.json without settings that have no effect on token ids.

    Such settings are `trim_offsets`, which changes only the offsets of tokens, and all settings
    whose values are null, false or an empty text, because these settings are turned off.

    Args:
        settings: The settings in the object by name.
    """
    effective_setting_by_name = {}
    for setting_name, setting in settings.items():
        is_setting_off = setting is None or setting is False or setting == ""
        if not is_setting_off and setting_name != "trim_offsets":
            effective_setting_by_name[setting_name] = setting
    return effective_setting_by_name
