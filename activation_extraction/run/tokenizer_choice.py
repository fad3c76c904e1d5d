"""Chooses the tokenizer and the chat template of a run from its model or its adapter.

An adapter that was trained with additional tokens, or with another chat template, comes with its
own tokenizer. The adapter's tokenizer is chosen if it gives other token ids than the model's, and
the adapter's chat templates are chosen if they differ from the model's.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.log import log
from activation_extraction.common.tokenizer_files import vocabulary_file
from activation_extraction.model.repository import Repository, read_json
from activation_extraction.text.tokenizer import load_tokenizer, same_ids

# Name of a chat template -> its file. If one of these files exists, TEMPLATE_SETTINGS are ignored.
TEMPLATE_FILES = {
    "default": "chat_template.jinja",
    "tool_use": "additional_chat_templates/tool_use.jinja",
}
# JSON files with chat templates in their setting `chat_template`. Only models that also take images
# have the second file.
TEMPLATE_SETTINGS = ("tokenizer_config.json", "chat_template.json")


class ChosenTokenizer(NamedTuple):
    """The tokenizer of a run.

    Attributes:
        home: The model or adapter from which it is read.
        pretrained: The tokenizer object of transformers, which renders chat templates.
    """

    home: Repository
    pretrained: Any

    @property
    def backend(self) -> Tokenizer:
        """The object of the package tokenizers, which turns text into token ids."""
        return self.pretrained.backend_tokenizer


class ChosenTemplates(NamedTuple):
    """The chat templates of a run.

    Attributes:
        home: The model or adapter from which they are read.
        sources: The Jinja source by the name of the template, "default" or "tool_use". Empty if
            there is no template.
    """

    home: Repository
    sources: Mapping[str, str]


def choose_tokenizer(
    model: Repository, adapter: Repository | None, vocabulary: int
) -> ChosenTokenizer:
    """Returns the adapter's tokenizer if it gives other token ids, otherwise the model's.

    Args:
        model: The files of the model.
        adapter: The files of its adapter. None without an adapter.
        vocabulary: The number of token ids that the model has.

    Raises:
        InputError: A tokenizer cannot be read, or has more token ids than the model.
    """
    if adapter is None or vocabulary_file(adapter.tokenizer_files()) is None:
        return _load(model, vocabulary)
    adapter_tokenizer = _load(adapter, vocabulary)
    if vocabulary_file(model.tokenizer_files()) is not None:
        model_tokenizer = _load(model, vocabulary)
        if same_ids(adapter_tokenizer.backend, model_tokenizer.backend):
            return model_tokenizer
    log.info("tokenizer: that of %s, which differs from the model's", adapter.where)
    return adapter_tokenizer


def _load(repository: Repository, vocabulary: int) -> ChosenTokenizer:
    files = repository.tokenizer_files()
    return ChosenTokenizer(repository, load_tokenizer(files, repository.where, vocabulary))


def choose_templates(model: Repository, adapter: Repository | None) -> ChosenTemplates:
    """Returns the adapter's chat templates if it has any that differ, otherwise the model's.

    Args:
        model: The files of the model.
        adapter: The files of its adapter. None without an adapter.

    Raises:
        InputError: A file with a template cannot be read.
    """
    model_templates = templates_in(model)
    if adapter is not None:
        adapter_templates = templates_in(adapter)
        if adapter_templates and adapter_templates != model_templates:
            log.info("chat template: that of %s, which differs from the model's", adapter.where)
            return ChosenTemplates(adapter, adapter_templates)
    return ChosenTemplates(model, model_templates)


def templates_in(repository: Repository) -> dict[str, str]:
    """Returns the chat templates of a repository.

    Args:
        repository: The files of a model or an adapter.

    Returns:
        The Jinja source by the name of the template: "default" and, for conversations with tools,
        "tool_use". Other templates are ignored. Empty if there is none.

    Raises:
        InputError: A file with a template cannot be read.
    """
    sources: dict[str, str] = {}
    for name, file in TEMPLATE_FILES.items():
        if (path := repository.find(file)) is not None:
            try:
                sources[name] = path.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"{path}: cannot be read: {one_line(error)}") from error
    for file in TEMPLATE_SETTINGS:
        if not sources and (path := repository.find(file)) is not None:
            templates = read_json(path).get("chat_template")
            try:
                if isinstance(templates, list):
                    templates = {entry["name"]: entry["template"] for entry in templates}
                elif not isinstance(templates, dict):
                    templates = {"default": templates}
                sources = {name: templates[name] for name in TEMPLATE_FILES if templates.get(name)}
                if not all(isinstance(source, str) for source in sources.values()):
                    raise TypeError("a template is not text")
            except (KeyError, TypeError) as error:
                raise InputError(
                    f"{path}: chat_template is neither text nor a list of templates with names"
                ) from error
    return sources
