"""Reads the conversation of a row and renders it as a text with a model's chat template.

MessagesColumn reads messages and tools from the columns of a row, and converts them to the format
of transformers. Data sets write messages in several formats: OpenAI's keys, ShareGPT's keys, JSON
in a text column, or Arrow structs with null for missing keys. ChatTemplate then renders the
messages with transformers, and checks that the rendered conversation contains the text of each
message. The template comes from the model, the adapter or --chat_template. roles.py finds the role
of each character.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.log import activity
from activation_extraction.text.roles import (
    END,
    END_THINK,
    START,
    THINK,
    refuse_markers,
    require_texts,
    role_spans,
)
from activation_extraction.text.rows import (
    Columns,
    Content,
    UnusableRowError,
    column_of,
    without_surrogates,
)
from activation_extraction.text.structs import without_nulls

# Other name of a role, for example in ShareGPT's format -> the name in MESSAGE_ROLES.
ROLE_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "developer": "system",
    "observation": "tool",
    "function": "tool",
}
MESSAGE_ROLES = ("system", "user", "assistant", "tool")
# Parameters of transformers' apply_chat_template that --chat_template_args may set, because
# templates use them as variables.
TEMPLATE_PARAMETERS = {"add_generation_prompt", "documents"}
# A conversation and a tool that each template must render at the start of a run.
TRIAL_MESSAGES = [
    {"role": "user", "content": "a question"},
    {"role": "assistant", "content": "an answer"},
]
TRIAL_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {}},
    },
}
# Jinja source that makes a template fail if it asks for today's date, by replacing transformers'
# function strftime_now. With the date, a run that continues on another day would render other text.
DATE_REJECTION = """\
{%- macro strftime_now(format) %}
{{- raise_exception("it asks for today's date; --chat_template_args can give it one") }}
{%- endmacro %}{{ '' }}"""


@dataclass(frozen=True)
class MessagesColumn:
    """Reads conversations from a column of messages, and from the column `tools` if a row has it.

    Attributes:
        activity_phrase: Words that precede the position of a row in the log if the run makes no
            progress while the row is read (see `Reader`).
        column_name: Name of the column of messages.
        template: Chat template that renders the messages.
    """

    activity_phrase: ClassVar = "rendering the chat template of"
    column_name: str
    template: "ChatTemplate"

    @property
    def columns(self) -> Columns:
        return Columns((self.column_name,), ("tools",))

    def can_read(self, row: Mapping[str, Any]) -> bool:
        return self.column_name in row

    def read(self, row: Mapping[str, Any]) -> Content | None:
        """Returns the conversation of a row, rendered with the chat template.

        Args:
            row: The columns of the row by name.

        Returns:
            The rendered conversation; None if the row has no messages.

        Raises:
            UnusableRowError: If the messages are not a list of objects, if the tools are not a
                list, or if the conversation cannot be rendered.
        """
        row_messages = _decoded_json(
            without_nulls(column_of(row, self.column_name, "--messages_column"))
        )
        if row_messages is None or row_messages == []:
            return None
        is_message_list = isinstance(row_messages, list)
        if not is_message_list or not all(isinstance(message, dict) for message in row_messages):
            raise UnusableRowError(
                f"--messages_column {self.column_name}: expected a list of messages, found "
                f"{type(row_messages).__name__} {row_messages!r:.40}"
            )
        tool_definitions = _decoded_json(without_nulls(row.get("tools")))
        if tool_definitions is not None and not isinstance(tool_definitions, list):
            raise UnusableRowError(
                f"its tools are {type(tool_definitions).__name__}, expected a list"
            )
        messages_for_template = [_converted_message(message) for message in row_messages]
        return self.template.content(messages_for_template, tool_definitions or None)


def _decoded_json(value: Any) -> Any:
    """Decodes messages or tools, which some data sets store as JSON text.

    Args:
        value: The value of a column in one row.

    Returns:
        The decoded value if `value` is JSON text, and None if it is an empty text. Any other value
        is returned unchanged, including text that is not JSON.
    """
    if isinstance(value, str) and value.strip():
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return None if value == "" else value


def _converted_message(row_message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message in the format of transformers, with a single text as its content.

    Keys whose value is null are kept, because transformers decides whether the template gets them.

    Args:
        row_message: The message in the format of the data set.

    Raises:
        UnusableRowError: If the role of the message is unknown, or if its content is not text.
    """
    message_for_template = dict(row_message)
    if message_for_template.get("role") is None and "from" in message_for_template:
        message_for_template["role"] = message_for_template.pop("from")
        message_content = message_for_template.pop("value", None)
        message_for_template["content"] = "" if message_content is None else message_content
    for thinking_key in ("thinking", "reasoning"):
        thinking_text = message_for_template.get(thinking_key)
        if thinking_text is not None and message_for_template.get("reasoning_content") is None:
            message_for_template["reasoning_content"] = thinking_text
    message_role = message_for_template.get("role")
    if isinstance(message_role, str):
        message_role = ROLE_ALIASES.get(message_role, message_role)
    if message_role not in MESSAGE_ROLES:
        raise UnusableRowError(
            f"a message has the role {message_role!r:.40}, expected system, user, assistant or tool"
        )
    message_for_template["role"] = message_role
    if message_for_template.get("content") is not None:
        message_for_template["content"] = _content_text(message_for_template["content"])
    return _with_converted_arguments(message_for_template, _as_object)


def _content_text(content: Any) -> str:
    """Returns the text of a message's content.

    In OpenAI's format, the content may be a list of parts. Their texts are joined without a
    separator, as templates that accept parts join them.

    Args:
        content: The content of the message: a text, or a list of parts.

    Raises:
        UnusableRowError: If the content, or a part of it, is not text.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UnusableRowError(f"a message's content is {type(content).__name__}, expected text")
    part_texts = []
    for content_part in content:
        if not isinstance(content_part, dict) or content_part.get("type") != "text":
            content_part_type = (
                content_part.get("type")
                if isinstance(content_part, dict)
                else type(content_part).__name__
            )
            raise UnusableRowError(
                f"a message has a part of type {content_part_type!r:.40}, expected text"
            )
        if not isinstance(content_part.get("text"), str):
            raise UnusableRowError("a message has a part of type text that contains no text")
        part_texts.append(content_part["text"])
    return "".join(part_texts)


def _with_converted_arguments(
    message: Mapping[str, Any], convert: Callable[[Any], Any]
) -> dict[str, Any]:
    """Returns a message with the arguments of its tool calls converted.

    A tool call contains the arguments under the key `arguments`. In OpenAI's format, this key is
    not in the call itself, but in an object under the call's key `function`.

    Args:
        message: The message.
        convert: Function that takes the arguments of a call and returns them converted.
    """

    def convert_call(tool_call: Any) -> Any:
        if not isinstance(tool_call, dict):
            return tool_call
        converted_call = dict(tool_call)
        if "arguments" in tool_call:
            converted_call["arguments"] = convert(tool_call["arguments"])
        if "function" in tool_call:
            converted_call["function"] = convert_call(tool_call["function"])
        return converted_call

    if not isinstance(message.get("tool_calls"), list):
        return dict(message)
    return {
        **message,
        "tool_calls": [convert_call(tool_call) for tool_call in message["tool_calls"]],
    }


def _as_object(arguments: Any) -> Any:
    """Decodes the arguments of a tool call if they are the JSON text of an object.

    Other arguments are returned unchanged.
    """
    if not isinstance(arguments, str):
        return arguments
    try:
        decoded_arguments = json.loads(arguments)
    except ValueError:
        return arguments
    return decoded_arguments if isinstance(decoded_arguments, dict) else arguments


def _as_text(arguments: Any) -> Any:
    """Encodes the arguments of a tool call as JSON text if they are an object.

    Other arguments are returned unchanged.
    """
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


@dataclass(frozen=True)
class ChatTemplate:
    """The chat templates of a run, and the tokenizer of transformers that renders them.

    Attributes:
        tokenizer: The tokenizer, an object of transformers.
        jinja_source_by_template_name: Jinja source of each template by its name. The names are
            "default", "tool_use" (for conversations with tools), or both.
        template_flag_phrase: The flag from which the templates come, with its value, for messages,
            such as "--chat_template x.jinja". The value names a file with a template, a model or an
            adapter.
        value_by_argument: Values of --chat_template_args by name, which are variables of the
            templates besides messages and tools.
    """

    tokenizer: Any
    jinja_source_by_template_name: Mapping[str, str]
    template_flag_phrase: str
    value_by_argument: Mapping[str, Any]

    @classmethod
    def of_file(cls, tokenizer: Any, file: str, arguments: Mapping[str, Any]) -> "ChatTemplate":
        """Returns the chat template that is in a file.

        Args:
            tokenizer: The tokenizer, an object of transformers.
            file: Value of --chat_template, which is the path of the file.
            arguments: Values of --chat_template_args by name.

        Raises:
            InputError: If the file cannot be read, if an argument is reserved for transformers, or
                if the template does not mention one of `arguments`. add_generation_prompt need not
                be mentioned.
        """
        template_flag_phrase = f"--chat_template {file}"
        try:
            jinja_source_by_template_name = {"default": Path(file).read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"{template_flag_phrase}: cannot be read: {one_line(error)}"
            ) from error
        return cls._checked_template(
            tokenizer, jinja_source_by_template_name, template_flag_phrase, arguments
        )

    @classmethod
    def of_model(
        cls,
        tokenizer: Any,
        jinja_source_by_template_name: Mapping[str, str],
        template_flag_phrase: str,
        arguments: Mapping[str, Any],
    ) -> "ChatTemplate":
        """Returns the templates of a model or adapter.

        Args:
            tokenizer: The tokenizer, an object of transformers.
            jinja_source_by_template_name: Jinja source of each template by its name, "default" or
                "tool_use". Empty if the model has no template.
            template_flag_phrase: Flag and path of the model or adapter, for error messages.
            arguments: Values of --chat_template_args by name.

        Raises:
            InputError: If there is no template, if an argument is reserved for transformers, or if
                an argument other than add_generation_prompt occurs in none of the templates.
        """
        if not jinja_source_by_template_name:
            raise InputError(
                f"{template_flag_phrase}: has no chat template; give one with --chat_template FILE"
            )
        return cls._checked_template(
            tokenizer, jinja_source_by_template_name, template_flag_phrase, arguments
        )

    @classmethod
    def _checked_template(
        cls,
        tokenizer: Any,
        jinja_source_by_template_name: Mapping[str, str],
        template_flag_phrase: str,
        arguments: Mapping[str, Any],
    ) -> "ChatTemplate":
        """Returns a ChatTemplate, after checking that its templates can use the arguments.

        Args:
            tokenizer: The tokenizer, an object of transformers.
            jinja_source_by_template_name: Jinja source of each template by its name, "default" or
                "tool_use".
            template_flag_phrase: Flag and path of the templates, for error messages.
            arguments: Values of --chat_template_args by name.

        Raises:
            InputError: If an argument is reserved for transformers, or if none of the templates
                mentions it. add_generation_prompt need not be mentioned.
        """
        parameter_names = {"messages", *tokenizer.apply_chat_template.__annotations__}
        for argument_name in arguments:
            if argument_name in parameter_names - TEMPLATE_PARAMETERS:
                raise InputError(
                    f"--chat_template_args {argument_name}: is no argument of a template"
                )
            is_argument_mentioned = any(
                argument_name in template_source
                for template_source in jinja_source_by_template_name.values()
            )
            if argument_name != "add_generation_prompt" and not is_argument_mentioned:
                raise InputError(
                    f"--chat_template_args {argument_name}: {template_flag_phrase} does not "
                    "mention it"
                )
        return cls(tokenizer, jinja_source_by_template_name, template_flag_phrase, arguments)

    def check(self) -> None:
        """Renders a short conversation with each template, to find faulty templates.

        Raises:
            InputError: If a template cannot render the conversation, or renders it differently the
                second time. Also if there are two templates, "default" and "tool_use", of which
                only one writes turns between <|im_start|> and <|im_end|>. The roles of tokens are
                found by these markers, so either all conversations or none must have them.
        """
        template_sources = self.jinja_source_by_template_name.values()
        if len({START in template_source for template_source in template_sources}) > 1:
            raise InputError(
                f"{self.template_flag_phrase}: of its templates default and tool_use, one writes "
                f"turns between {START} and {END} and the other does not; expected both or neither"
            )
        for template_name in self.jinja_source_by_template_name:
            trial_tools = [TRIAL_TOOL] if template_name == "tool_use" else None
            try:
                with activity(f"rendering the chat template of {self.template_flag_phrase}"):
                    renders_identically = self.content(TRIAL_MESSAGES, trial_tools) == self.content(
                        TRIAL_MESSAGES, trial_tools
                    )
            except UnusableRowError as error:
                raise InputError(
                    f"{self.template_flag_phrase}: cannot render a conversation: {error}"
                ) from error
            if not renders_identically:
                raise InputError(
                    f"{self.template_flag_phrase}: renders the same conversation in different ways"
                )

    @property
    def digest(self) -> str:
        """The SHA-256 of the templates and of --chat_template_args, in hexadecimal."""
        first_template_source, *other_template_sources = self.jinja_source_by_template_name.values()
        templates_json = json.dumps(
            [first_template_source, dict(self.value_by_argument), *other_template_sources],
            sort_keys=True,
        )
        return hashlib.sha256(templates_json.encode()).hexdigest()

    @cached_property
    def has_roles(self) -> bool:
        """Whether the templates write turns between <|im_start|> and <|im_end|>.

        The roles of tokens are found by these markers, so tokens have roles only if this is true.
        """
        template_sources = self.jinja_source_by_template_name.values()
        return any(START in template_source for template_source in template_sources)

    @cached_property
    def marks_thinking(self) -> bool:
        """Whether the templates write thinking between <think> and </think>."""
        for template_source in self.jinja_source_by_template_name.values():
            if THINK in template_source or END_THINK in template_source:
                return True
        return False

    def content(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None
    ) -> Content:
        """Renders a conversation, and checks the rendered text.

        Args:
            messages: Messages in the format of transformers, as MessagesColumn converts them. The
                content of each message is text, null or missing.
            tools: The tools that the assistant may call; None for no tools.

        Returns:
            The rendered text. It comes with the roles of its characters if the templates write
            turns between <|im_start|> and <|im_end|>.

        Raises:
            UnusableRowError: If the template fails, if the rendered text lacks the text of a
                message, or if the roles of characters would be ambiguous, for example because a
                message contains <|im_end|>.
        """
        if self.has_roles:
            error_message_format = "its text contains {}, which would end a turn"
            refuse_markers([messages, tools], (START, END), error_message_format)
        if self.marks_thinking:
            self._refuse_marked_thinking(messages)
        rendered_text = self._rendered_text(messages, tools)
        if self.has_roles:
            return Content(rendered_text, role_spans(rendered_text, messages, self.marks_thinking))
        try:
            require_texts(messages, self.marks_thinking, rendered_text)
        except UnusableRowError:
            # Some templates write the system message first, wherever it is in the conversation.
            messages_with_system_first = sorted(
                messages, key=lambda message: message["role"] != "system"
            )
            require_texts(messages_with_system_first, self.marks_thinking, rendered_text)
        return Content(rendered_text)

    def _refuse_marked_thinking(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Checks that messages with thinking in `reasoning_content` contain no <think> or </think>.

        The template writes the value of the key `reasoning_content` between <think> and </think>.
        If the value or the content of the message contained these markers as well, the thinking
        could end early, or other text could look like thinking.

        Args:
            messages: The messages in the format of transformers.

        Raises:
            UnusableRowError: If a message has the key `reasoning_content`, and its thinking or its
                content contains <think> or </think>.
        """
        error_message_format = "a message has its thinking apart, and {} in its text"
        for message in messages:
            if message.get("reasoning_content"):
                thinking_and_content = [message["reasoning_content"], message.get("content")]
                refuse_markers(thinking_and_content, (THINK, END_THINK), error_message_format)

    def _rendered_text(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None) -> str:
        """Returns the rendered text of a conversation.

        The first attempt passes the arguments of tool calls as objects. Some templates only accept
        text, so a second attempt passes the arguments as JSON text.

        Args:
            messages: The messages in the format of transformers.
            tools: The tools that the assistant may call; None for no tools.

        Raises:
            UnusableRowError: If the template raises an error in both attempts.
        """
        try:
            return self._apply_template(messages, tools)
        except Exception as error:  # a template may raise any exception
            with suppress(Exception):
                messages_with_text_arguments = [
                    _with_converted_arguments(message, _as_text) for message in messages
                ]
                if messages_with_text_arguments != messages:
                    return self._apply_template(messages_with_text_arguments, tools)
            raise UnusableRowError(
                f"the chat template refuses it: {one_line(error):.200}"
            ) from error

    def _apply_template(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None) -> str:
        """Renders a conversation with transformers, which may raise any exception.

        Args:
            messages: The messages in the format of transformers.
            tools: The tools that the assistant may call; None for no tools.

        Returns:
            The rendered text.
        """
        template_name = (
            "tool_use" if tools and "tool_use" in self.jinja_source_by_template_name else "default"
        )
        if template_name not in self.jinja_source_by_template_name:
            raise ValueError("its only template is for conversations with tools, tool_use")
        template_source = self.jinja_source_by_template_name[template_name]
        if "strftime_now" in template_source:
            template_source = DATE_REJECTION + template_source
        rendered_text: str = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=template_source,
            tokenize=False,
            **self.value_by_argument,
        )
        return without_surrogates(rendered_text)
