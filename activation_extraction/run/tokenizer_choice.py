"""Chooses the tokenizer and the chat template of a run: those of the model, or of its adapter.

An adapter that was trained with further tokens, or with another chat template, is stored with its
own tokenizer. Where that gives other token ids than the model's tokenizer, or has another chat
template, the adapter needs its own.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.log import log
from activation_extraction.common.tokenizer_files import vocabulary_file
from activation_extraction.model.repository import Repository, read_json
from activation_extraction.text.tokenizer import load_tokenizer, same_ids

# Name of a chat template -> its file. Where one of these files is there, TEMPLATE_SETTINGS do not
# count.
TEMPLATE_FILES = {
    "default": "chat_template.jinja",
    "tool_use": "additional_chat_templates/tool_use.jinja",
}
# JSON files with chat templates as settings. Models that also take images have the second one.
TEMPLATE_SETTINGS = ("tokenizer_config.json", "chat_template.json")


class ChosenTokenizer(NamedTuple):
    """The tokenizer of a run.

    Attributes:
        home: The model or adapter that it is read from.
        pretrained: The object of transformers, which renders chat templates.
    """

    home: Repository
    pretrained: Any

    @property
    def backend(self) -> Tokenizer:
        """Returns the object that makes token ids."""
        return self.pretrained.backend_tokenizer


class ChosenTemplates(NamedTuple):
    """The chat templates of a run.

    Attributes:
        home: The model or adapter that they are read from.
        sources: Jinja source by template name, "default" or "tool_use". Empty if there is none.
    """

    home: Repository
    sources: Mapping[str, str]


def choose_tokenizer(
    model: Repository, adapter: Repository | None, vocabulary: int
) -> ChosenTokenizer:
    """Returns the adapter's tokenizer if it gives other token ids, otherwise the model's.

    Args:
        model: The files of the model.
        adapter: The files of its adapter; None without one.
        vocabulary: The number of token ids that the model has.

    Raises:
        InputError: A tokenizer cannot be read, or has more token ids than the model.
    """
    if adapter is None or vocabulary_file(adapter.tokenizer_files()) is None:
        return _load(model, vocabulary)
    of_adapter = _load(adapter, vocabulary)
    if vocabulary_file(model.tokenizer_files()) is not None:
        of_model = _load(model, vocabulary)
        if same_ids(of_adapter.backend, of_model.backend):
            return of_model
    log.info("tokenizer: that of %s, which differs from the model's", adapter.where)
    return of_adapter


def _load(repository: Repository, vocabulary: int) -> ChosenTokenizer:
    files = repository.tokenizer_files()
    return ChosenTokenizer(repository, load_tokenizer(files, repository.where, vocabulary))


def choose_templates(model: Repository, adapter: Repository | None) -> ChosenTemplates:
    """Returns the adapter's chat templates if it has others, otherwise the model's.

    Args:
        model: The files of the model.
        adapter: The files of its adapter; None without one.

    Raises:
        InputError: A file with a template cannot be read.
    """
    of_model = templates_in(model)
    if adapter is not None:
        of_adapter = templates_in(adapter)
        if of_adapter and of_adapter != of_model:
            log.info("chat template: that of %s, which differs from the model's", adapter.where)
            return ChosenTemplates(adapter, of_adapter)
    return ChosenTemplates(model, of_model)


def templates_in(repository: Repository) -> dict[str, str]:
    """Returns the Jinja source of a repository's chat templates by name; empty without any.

    Only "default" and, for conversations with tools, "tool_use" are looked for.
    """
    found = {}
    for name, file in TEMPLATE_FILES.items():
        if (path := repository.find(file)) is not None:
            try:
                found[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"{path}: cannot be read: {one_line(error)}") from error
    for file in TEMPLATE_SETTINGS:
        if not found and (path := repository.find(file)) is not None:
            templates = read_json(path).get("chat_template")
            try:
                if isinstance(templates, list):
                    templates = {entry["name"]: entry["template"] for entry in templates}
                elif not isinstance(templates, dict):
                    templates = {"default": templates}
                found = {name: templates[name] for name in TEMPLATE_FILES if templates.get(name)}
                if not all(isinstance(source, str) for source in found.values()):
                    raise TypeError("a template is not text")
            except (KeyError, TypeError) as error:
                raise InputError(
                    f"{path}: chat_template is neither text nor a list of templates with names"
                ) from error
    return found
