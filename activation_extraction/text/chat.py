"""Reads the conversation of a row and renders it by a model's chat template.

The module follows the order of the work. MessagesColumn reads messages and tools from their
columns. Data sets spell messages in several ways (OpenAI's form, ShareGPT's form, JSON in a text
column, objects of Arrow with null for missing keys), which are converted to the form that
transformers takes. ChatTemplate renders them with transformers, by the checkpoint's template or by
the template of --chat_template, and checks that the rendering contains the text of each message.
roles.py then finds the role of each character.
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
    refuse_marks,
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

# Other spellings of the roles, such as ShareGPT's and OpenAI's.
ROLE_ALIASES = {
    "human": "user",
    "gpt": "assistant",
    "developer": "system",
    "observation": "tool",
    "function": "tool",
}
MESSAGE_ROLES = ("system", "user", "assistant", "tool")
# Parameters of transformers' apply_chat_template that it hands on to the template.
TEMPLATE_PARAMETERS = {"add_generation_prompt", "documents"}
# A conversation and a tool, with which templates are tried.
TRIAL = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
TRIAL_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {}},
    },
}
# Replaces transformers' function that returns today's date to templates, because a run that
# continues on another day would render other text.
NO_DATE = """\
{%- macro strftime_now(format) %}
{{- raise_exception("it asks for today's date; --chat_template_args can give it one") }}
{%- endmacro %}{{ '' }}"""


@dataclass(frozen=True)
class MessagesColumn:
    """Reads conversations: messages from a column, and tools from the column `tools` if present.

    Attributes:
        name: The name of the column of messages.
        template: The template that renders the messages.
    """

    activity: ClassVar = "rendering the chat template of"
    name: str
    template: "ChatTemplate"

    @property
    def columns(self) -> Columns:
        return Columns((self.name,), ("tools",))

    def can_read(self, row: Mapping[str, Any]) -> bool:
        return self.name in row

    def read(self, row: Mapping[str, Any]) -> Content | None:
        """Returns the rendered conversation of a row; None if it has no messages.

        Raises:
            UnusableRowError: If the messages or tools have another form, or cannot be rendered.
        """
        messages = _decoded(without_nulls(column_of(row, self.name, "--messages_column")))
        if messages is None or messages == []:
            return None
        if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
            raise UnusableRowError(
                f"--messages_column {self.name}: expected a list of messages, found "
                f"{type(messages).__name__} {messages!r:.40}"
            )
        tools = _decoded(without_nulls(row.get("tools")))
        if tools is not None and not isinstance(tools, list):
            raise UnusableRowError(f"its tools are {type(tools).__name__}, expected a list")
        return self.template.content([_message(item) for item in messages], tools or None)


def _decoded(column: Any) -> Any:
    """Decodes messages or tools, which some data sets store as JSON text.

    Returns:
        The decoded JSON; None for an empty text; any other value unchanged, including text that is
        not JSON.
    """
    if isinstance(column, str) and column.strip():
        try:
            return json.loads(column)
        except (ValueError, RecursionError):
            return column
    return None if column == "" else column


def _message(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a message in the form that transformers takes, with a single text as its content.

    Keys that are null stay null: transformers decides what the template sees of them.

    Args:
        stored: The message as the data set spells it.

    Raises:
        UnusableRowError: If its role is unknown, or if its content is not text.
    """
    message = dict(stored)
    if message.get("role") is None and "from" in message:
        message["role"] = message.pop("from")
        content = message.pop("value", None)
        message["content"] = "" if content is None else content
    for spelling in ("thinking", "reasoning"):
        thinking = message.get(spelling)
        if thinking is not None and message.get("reasoning_content") is None:
            message["reasoning_content"] = thinking
    role = message.get("role")
    if isinstance(role, str):
        role = ROLE_ALIASES.get(role, role)
    if role not in MESSAGE_ROLES:
        raise UnusableRowError(
            f"a message has the role {role!r:.40}, expected system, user, assistant or tool"
        )
    message["role"] = role
    if message.get("content") is not None:
        message["content"] = _content_text(message["content"])
    return _with_arguments(message, _as_object)


def _content_text(content: Any) -> str:
    """Returns the text of a message's content.

    The texts of several parts are joined without a separator, as templates for parts join them.

    Raises:
        UnusableRowError: If the content, or a part of it, is not text.
    """
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UnusableRowError(f"a message has a part of type {kind!r:.40}, expected text")
        if not isinstance(part.get("text"), str):
            raise UnusableRowError("a message has a part of text without its text")
    if not isinstance(content, str | list):
        raise UnusableRowError(f"a message's content is {type(content).__name__}, expected text")
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _with_arguments(message: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns a message with the arguments of its tool calls converted.

    A call has its arguments at its top level or in its `function`.

    Args:
        message: The message.
        convert: Returns the converted arguments of a call.
    """

    def converted(call: Any) -> Any:
        if not isinstance(call, dict):
            return call
        changed = dict(call)
        if "arguments" in call:
            changed["arguments"] = convert(call["arguments"])
        if "function" in call:
            changed["function"] = converted(call["function"])
        return changed

    if not isinstance(message.get("tool_calls"), list):
        return dict(message)
    return {**message, "tool_calls": [converted(call) for call in message["tool_calls"]]}


def _as_object(arguments: Any) -> Any:
    """Returns the arguments of a call as an object if they are the JSON text of one.

    Other text stays as it is: the template writes it as it does for transformers.
    """
    try:
        decoded = json.loads(arguments) if isinstance(arguments, str) else None
    except ValueError:
        return arguments
    return decoded if isinstance(decoded, dict) else arguments


def _as_text(arguments: Any) -> Any:
    """Returns the arguments of a call as JSON text if they are an object."""
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


@dataclass(frozen=True)
class ChatTemplate:
    """The chat templates of a run, and the tokenizer of transformers that renders them.

    Attributes:
        tokenizer: The tokenizer, an object of transformers.
        sources: Jinja sources by name: "default" and, for conversations with tools, "tool_use", or
            only one of the two.
        where: The flag and path of the templates, for messages.
        arguments: Arguments of the templates besides messages and tools.
    """

    tokenizer: Any
    sources: Mapping[str, str]
    where: str
    arguments: Mapping[str, Any]

    @classmethod
    def of_file(cls, tokenizer: Any, file: str, arguments: Mapping[str, Any]) -> "ChatTemplate":
        """Returns the template in a file.

        Args:
            tokenizer: The tokenizer, an object of transformers.
            file: Value of --chat_template: the path of the file.
            arguments: Values of --chat_template_args by name.

        Raises:
            InputError: If the file cannot be read, or if the template does not take the arguments.
        """
        where = f"--chat_template {file}"
        try:
            sources = {"default": Path(file).read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{where}: cannot be read: {one_line(error)}") from error
        return cls._checked(tokenizer, sources, where, arguments)

    @classmethod
    def of_model(
        cls, tokenizer: Any, sources: Mapping[str, str], where: str, arguments: Mapping[str, Any]
    ) -> "ChatTemplate":
        """Returns the templates of a model or adapter.

        Args:
            tokenizer: The tokenizer, an object of transformers.
            sources: Jinja sources by name, as in the class; empty if the model has none.
            where: The flag and path of the model or adapter, for messages.
            arguments: Values of --chat_template_args by name.

        Raises:
            InputError: If there is no template, or if the templates do not take the arguments.
        """
        if not sources:
            raise InputError(f"{where}: has no chat template; give one with --chat_template FILE")
        return cls._checked(tokenizer, sources, where, arguments)

    @classmethod
    def _checked(
        cls, tokenizer: Any, sources: Mapping[str, str], where: str, arguments: Mapping[str, Any]
    ) -> "ChatTemplate":
        parameters = {"messages", *tokenizer.apply_chat_template.__annotations__}
        for name in arguments:
            if name in parameters - TEMPLATE_PARAMETERS:
                raise InputError(f"--chat_template_args {name}: is no argument of a template")
            is_mentioned = any(name in source for source in sources.values())
            if name != "add_generation_prompt" and not is_mentioned:
                raise InputError(f"--chat_template_args {name}: {where} does not mention it")
        return cls(tokenizer, sources, where, arguments)

    def check(self) -> None:
        """Tries the templates on a conversation.

        Raises:
            InputError: If a template cannot render the conversation or renders it differently the
                second time, or if only one of two templates writes turns between markers.
        """
        if len({START in source for source in self.sources.values()}) > 1:
            raise InputError(
                f"{self.where}: of its templates default and tool_use, one writes turns between "
                f"{START} and {END} and the other does not; expected both or neither"
            )
        for name in self.sources:
            tools = [TRIAL_TOOL] if name == "tool_use" else None
            try:
                with activity(f"rendering the chat template of {self.where}"):
                    is_same = self.content(TRIAL, tools) == self.content(TRIAL, tools)
            except UnusableRowError as error:
                raise InputError(f"{self.where}: cannot render a conversation: {error}") from error
            if not is_same:
                raise InputError(f"{self.where}: renders the same conversation in different ways")

    @property
    def digest(self) -> str:
        """The SHA-256 of the templates and their arguments."""
        first, *others = self.sources.values()
        content = json.dumps([first, dict(self.arguments), *others], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def has_roles(self) -> bool:
        """Whether turns are blocks between START and END, so that each token has a role."""
        return any(START in source for source in self.sources.values())

    @cached_property
    def marks_thinking(self) -> bool:
        """Whether the templates write thinking between <think> and </think>."""
        marks = (THINK, END_THINK)
        return any(mark in source for mark in marks for source in self.sources.values())

    def content(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None
    ) -> Content:
        """Renders a conversation.

        Args:
            messages: Messages as `MessagesColumn` reads them; contents are text, null or missing.
            tools: The tools that the assistant may call; None for none.

        Returns:
            The text, with spans of roles if `has_roles`.

        Raises:
            UnusableRowError: If the template fails, if the rendering lacks the text of a message,
                or if the roles would be ambiguous.
        """
        if self.has_roles:
            reason = "its text holds {}, which would end a turn"
            refuse_marks([messages, tools], (START, END), reason)
        if self.marks_thinking:
            self._refuse_marked_thinking(messages)
        text = self._render(messages, tools)
        if self.has_roles:
            return Content(text, role_spans(text, messages, self.marks_thinking))
        try:
            require_texts(messages, self.marks_thinking, text)
        except UnusableRowError:
            # Some templates write the system's text first, wherever its message is.
            ordered = sorted(messages, key=lambda message: message["role"] != "system")
            require_texts(ordered, self.marks_thinking, text)
        return Content(text)

    def _refuse_marked_thinking(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Checks that messages with separate thinking contain no marks of thinking.

        Such a mark could end the thinking early, or make other text look like thinking.

        Raises:
            UnusableRowError: If a message contains both.
        """
        reason = "a message has its thinking apart, and {} in its text"
        for message in messages:
            if message.get("reasoning_content"):
                texts = [message["reasoning_content"], message.get("content")]
                refuse_marks(texts, (THINK, END_THINK), reason)

    def _render(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None) -> str:
        """Returns the rendered text.

        The arguments of tool calls are objects at first. Some templates only accept text, so a
        second attempt passes the arguments as text.

        Raises:
            UnusableRowError: If the template raises an error for both.
        """
        try:
            return self._apply(messages, tools)
        except Exception as error:  # a template may raise anything
            with suppress(Exception):
                as_text = [_with_arguments(message, _as_text) for message in messages]
                if as_text != messages:
                    return self._apply(as_text, tools)
            raise UnusableRowError(
                f"the chat template refuses it: {one_line(error):.200}"
            ) from error

    def _apply(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None) -> str:
        """Returns the text that transformers renders, or raises any exception."""
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise ValueError("the model names one for conversations with tools, tool_use, alone")
        source = self.sources[name]
        if "strftime_now" in source:
            source = NO_DATE + source
        text: str = self.tokenizer.apply_chat_template(
            messages, tools=tools, chat_template=source, tokenize=False, **self.arguments
        )
        return without_surrogates(text)
