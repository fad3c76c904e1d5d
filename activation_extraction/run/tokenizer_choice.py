"""Chooses the tokenizer and the chat templates of a run, from its model or from its adapter.

An adapter that was trained with additional tokens or with another chat template comes with a
tokenizer. The adapter's tokenizer is chosen if it gives other token ids than the model's tokenizer.
The adapter's chat templates are chosen if they differ from the model's.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.log import log
from activation_extraction.common.tokenizer_files import vocabulary_file
from activation_extraction.model.repository import Repository, read_json
from activation_extraction.text.tokenizer import load_tokenizer, same_ids

# Files of chat templates by the name of the template. If one of these files exists, the files in
# TEMPLATE_SETTINGS are ignored.
TEMPLATE_FILES = {
    "default": "chat_template.jinja",
    "tool_use": "additional_chat_templates/tool_use.jinja",
}
# JSON files whose key `chat_template` may contain chat templates. Only models that also take images
# have the second file.
TEMPLATE_SETTINGS = ("tokenizer_config.json", "chat_template.json")


class ChosenTokenizer(NamedTuple):
    """The tokenizer of a run.

    Attributes:
        repository: The files of the model or the adapter, from which the tokenizer is read.
        pretrained_tokenizer: The tokenizer object of transformers, which renders chat templates.
    """

    repository: Repository
    pretrained_tokenizer: Any

    @property
    def backend(self) -> Tokenizer:
        """The object of the package `tokenizers`, which turns text into token ids."""
        return self.pretrained_tokenizer.backend_tokenizer


class ChosenTemplates(NamedTuple):
    """The chat templates of a run.

    Attributes:
        repository: The files of the model or the adapter, from which the templates are read.
        jinja_source_by_template_name: The Jinja source of each template by its name, "default" or
            "tool_use". Empty if there is no template.
    """

    repository: Repository
    jinja_source_by_template_name: Mapping[str, str]


def choose_tokenizer(
    model_repository: Repository, adapter_repository: Repository | None, vocabulary_size: int
) -> ChosenTokenizer:
    """Returns the tokenizer of a run: the adapter's or the model's.

    The adapter's tokenizer is returned if it gives other token ids than the model's tokenizer, or
    if the model has no tokenizer. Otherwise, the model's tokenizer is returned.

    Args:
        model_repository: The files of the model.
        adapter_repository: The files of the LoRA adapter. None without an adapter.
        vocabulary_size: The number of token ids that the model has.

    Raises:
        InputError: If a tokenizer cannot be read, or if it has more token ids than the model.
    """
    if adapter_repository is None or vocabulary_file(adapter_repository.tokenizer_files()) is None:
        return _load(model_repository, vocabulary_size)
    adapter_tokenizer = _load(adapter_repository, vocabulary_size)
    if vocabulary_file(model_repository.tokenizer_files()) is not None:
        model_tokenizer = _load(model_repository, vocabulary_size)
        if same_ids(adapter_tokenizer.backend, model_tokenizer.backend):
            return model_tokenizer
    log.info(
        "tokenizer: that of %s, which differs from the model's", adapter_repository.flag_with_value
    )
    return adapter_tokenizer


def _load(repository: Repository, vocabulary_size: int) -> ChosenTokenizer:
    tokenizer_files = repository.tokenizer_files()
    return ChosenTokenizer(
        repository, load_tokenizer(tokenizer_files, repository.flag_with_value, vocabulary_size)
    )


def choose_templates(
    model_repository: Repository, adapter_repository: Repository | None
) -> ChosenTemplates:
    """Returns the adapter's chat templates if they differ from the model's, otherwise the model's.

    If the adapter has no chat templates, the model's are returned.

    Args:
        model_repository: The files of the model.
        adapter_repository: The files of the LoRA adapter. None without an adapter.

    Raises:
        InputError: If a file with a chat template cannot be read.
    """
    chat_templates_of_model = templates_in(model_repository)
    if adapter_repository is not None:
        chat_templates_of_adapter = templates_in(adapter_repository)
        if chat_templates_of_adapter and chat_templates_of_adapter != chat_templates_of_model:
            log.info(
                "chat template: that of %s, which differs from the model's",
                adapter_repository.flag_with_value,
            )
            return ChosenTemplates(adapter_repository, chat_templates_of_adapter)
    return ChosenTemplates(model_repository, chat_templates_of_model)


def templates_in(repository: Repository) -> dict[str, str]:
    """Returns the chat templates of a repository.

    Args:
        repository: The files of a model or an adapter.

    Returns:
        The Jinja source of each template by its name, which is "default" or, for conversations with
        tools, "tool_use". Templates with other names are ignored. Empty if there is no template.

    Raises:
        InputError: If a file with a template cannot be read.
    """
    jinja_source_by_template_name: dict[str, str] = {}
    for template_name, file_name in TEMPLATE_FILES.items():
        if (template_path := repository.find(file_name)) is not None:
            try:
                jinja_source_by_template_name[template_name] = template_path.read_text(
                    encoding="utf-8"
                )
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"{template_path}: cannot be read: {one_line(error)}") from error
    for file_name in TEMPLATE_SETTINGS:
        if (
            not jinja_source_by_template_name
            and (template_path := repository.find(file_name)) is not None
        ):
            template_or_templates = read_json(template_path).get("chat_template")
            try:
                if isinstance(template_or_templates, list):
                    stored_template_by_name = {
                        named_template["name"]: named_template["template"]
                        for named_template in template_or_templates
                    }
                elif isinstance(template_or_templates, dict):
                    stored_template_by_name = template_or_templates
                else:
                    stored_template_by_name = {"default": template_or_templates}
                for template_name in TEMPLATE_FILES:
                    if jinja_source := stored_template_by_name.get(template_name):
                        if not isinstance(jinja_source, str):
                            raise TypeError("a template is not text")
                        jinja_source_by_template_name[template_name] = jinja_source
            except (KeyError, TypeError) as error:
                raise InputError(
                    f"{template_path}: chat_template is neither text nor a list of templates "
                    "with names"
                ) from error
    return jinja_source_by_template_name
