"""Renders conversations by a model's chat template, and finds out what each part of them is.

The template is the checkpoint's own, or one that the user gives; transformers renders it. It has to
write every turn as a block, <|im_start|>ROLE, a new line, the content and <|im_end|>, as those of
Qwen do. A role is found by the blocks: the text of a message may not hold these two markers, and
the blocks have to be those of the messages, so no content can pass for another role.

The header of a block, and what stands between blocks, is "template"; <|im_end|> belongs to the
block. Where the template marks thinking, a block that begins with <think> is "thinking" up to
</think> and the new lines after it. Tool messages are "tool", also where a template puts several of
them into one block of the user.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from activation_extraction.common.choices import ROLES
from activation_extraction.common.errors import InputError, one_line
from activation_extraction.text.rows import (
    TEMPLATE,
    Columns,
    Content,
    Span,
    UnusableRowError,
    arc_prompt,
    column_of,
    is_arc_task,
    valid,
)

START, END = "<|im_start|>", "<|im_end|>"
BLOCK = re.compile(r"<\|im_start\|>([^\n]*)\n(.*?)<\|im_end\|>", re.DOTALL)
THINK, THOUGHT = "<think>", "</think>"
THINKING = re.compile(r"<think>.*?</think>\n{0,2}", re.DOTALL)
SPEAKERS = {  # of `conversations`, and other spellings of the same roles
    "human": "user",
    "gpt": "assistant",
    "developer": "system",
    "observation": "tool",
    "function": "tool",
}
ONCE = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
# Arguments of transformers' apply_chat_template that are not for the template.
RESERVED = {
    *("conversation", "messages", "tools", "chat_template", "continue_final_message", "tokenize"),
    *("sanitize_control_tokens", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}
# A run that continues on another day would render other text.
NO_DATE = """\
{%- macro strftime_now(format) %}
{{- raise_exception("it asks for today's date; --chat_template_args can give it one") }}
{%- endmacro %}{{ '' }}"""


@dataclass(frozen=True)
class ChatTemplate:
    """A template, and the tokenizer of transformers that renders it.

    source: Jinja. where: names it in messages. arguments: what the template is given besides the
    messages.
    """

    tokenizer: Any
    source: str
    where: str
    arguments: Mapping[str, Any]

    @classmethod
    def load(
        cls, tokenizer: Any, model_path: str, file: str | None, arguments: Mapping[str, Any]
    ) -> "ChatTemplate":
        """Takes the template of a file, or else the tokenizer's own.

        Raises InputError if there is none, or if it does not write blocks.
        """
        where = f"--chat_template {file}" if file else f"--model_path {model_path}"
        if file is not None:
            try:
                source = Path(file).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise InputError(f"{where}: cannot be read: {one_line(error)}") from error
        else:
            try:
                source = tokenizer.get_chat_template()
            except ValueError as error:
                raise InputError(
                    f"{where}: has no chat template; give one with --chat_template FILE"
                ) from error
        template = cls(tokenizer, source, where, arguments)
        for name in RESERVED & arguments.keys():
            raise InputError(f"--chat_template_args {name}: is no argument of a template")
        for name in arguments:
            if name != "add_generation_prompt" and name not in source:
                raise InputError(f"--chat_template_args {name}: {where} does not mention it")
        try:
            if template.content(ONCE) != template.content(ONCE):
                raise InputError(f"{where}: renders the same conversation in different ways")
        except UnusableRowError as error:
            raise InputError(f"{where}: cannot render a conversation: {error}") from error
        return template

    @property
    def digest(self) -> str:
        """SHA-256 of the template and its arguments."""
        content = json.dumps([self.source, dict(self.arguments)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def marks_thinking(self) -> bool:
        return THINK in self.source or THOUGHT in self.source

    def content(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None
    ) -> Content:
        """Renders messages. Raises UnusableRowError if that fails, or if roles would be unclear."""
        _refuse_markers([messages, tools])
        if self.marks_thinking:
            _check_thinking(messages)
        text = self._render(messages, tools)
        if START not in text:
            raise UnusableRowError(f"the template writes no turns that begin with {START}")
        blocks = list(BLOCK.finditer(text))
        end = blocks[-1].end() if blocks else 0
        if text.count(START) - len(blocks) != text.count(START, end) or text.count(START, end) > 1:
            raise UnusableRowError(f"the template writes no blocks of {START} and {END}")
        if text.count(END) != len(blocks):  # a text that ends within one, and the template's ">"
            raise UnusableRowError(f"rendered, it holds another {END} than those of its turns")
        headers = [block[1].strip() for block in blocks]
        roles = _roles_of(headers, [message["role"] for message in messages])
        return Content(text, list(self._spans(text, blocks, roles)))

    def _render(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None) -> str:
        try:
            try:
                return self._rendered(messages, tools)
            except Exception:
                # Some templates take the arguments of a call as an object alone, some data sets
                # have them as JSON.
                objects = [_with_objects(message) for message in messages]
                if objects == messages:
                    raise
                _refuse_markers(objects)
                return self._rendered(objects, tools)
        except UnusableRowError:
            raise
        except Exception as error:  # a template may raise anything
            raise UnusableRowError(
                f"the chat template refuses it: {one_line(error):.200}"
            ) from error

    def _rendered(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=NO_DATE + self.source if "strftime_now" in self.source else self.source,
            tokenize=False,
            **self.arguments,
        )
        return valid(text)

    def _spans(
        self, text: str, blocks: Sequence[re.Match[str]], roles: Sequence[str]
    ) -> Iterator[Span]:
        yield Span(0, TEMPLATE, 0)
        for turn, (block, role) in enumerate(zip(blocks, roles, strict=True)):
            start = block.start(2)
            yield Span(block.start(), TEMPLATE, turn)
            if role == "assistant" and self.marks_thinking:
                if thinking := THINKING.match(block[2]):
                    yield Span(start, ROLES.index("thinking"), turn)
                    start += thinking.end()
            yield Span(start, ROLES.index(role), turn)
            yield Span(block.end(), TEMPLATE, turn)
        if (opened := text.find(START, block.end())) >= 0:
            yield Span(opened, TEMPLATE, len(blocks))


def _roles_of(headers: Sequence[str], roles: Sequence[str]) -> list[str]:
    """The role of each block. Raises UnusableRowError unless the blocks are those of the messages.

    A template may begin with a system block of its own, and put tool messages that follow each
    other into one block, which is the user's in some templates.
    """
    merged = [
        role for role, group in groupby(roles) for _ in (range(1) if role == "tool" else group)
    ]
    for expected in (merged, list(roles)):
        if len(headers) == len(expected) + 1 and roles[0] != "system":
            expected = ["system", *expected]
        allowed = {"tool": ("tool", "user"), "system": ("system", "developer")}
        if len(headers) == len(expected) and all(
            header in allowed.get(role, (role,))
            for header, role in zip(headers, expected, strict=True)
        ):
            return expected
    raise UnusableRowError(
        f"the template's blocks ({', '.join(headers)}) are not those of its messages "
        f"({', '.join(roles)})"
    )


def _refuse_markers(value: Any) -> None:
    """Raises UnusableRowError where a text in it holds what begins or ends a turn."""
    for text in _texts(value):
        for marker in (START, END):
            if marker in text:
                raise UnusableRowError(f"its text holds {marker}, which would end a turn")


def _texts(value: Any) -> Iterator[str]:
    """All text in a value; that of the parts of a content also in one, as it is rendered."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        parts = [each.get("text") for each in value if isinstance(each, Mapping)]
        yield "".join(part for part in parts if isinstance(part, str))
        for each in value:
            yield from _texts(each)


def _check_thinking(messages: Iterable[Mapping[str, Any]]) -> None:
    """Raises UnusableRowError where a message has its thinking apart and the marks in its text:
    it could end the thinking early, or look like it."""
    for message in messages:
        if message.get("reasoning_content"):
            for text in _texts([message["reasoning_content"], message.get("content")]):
                for mark in (THINK, THOUGHT):
                    if mark in text:
                        raise UnusableRowError(
                            f"a message has its thinking apart, and {mark} in its text"
                        )


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """The message with the arguments of its tool calls as objects, where they are JSON."""

    def convert(call: Any) -> Any:
        if isinstance(call, dict) and isinstance(call.get("function"), dict):
            return {**call, "function": convert(call["function"])}
        if isinstance(call, dict) and isinstance(call.get("arguments"), str):
            try:
                return {**call, "arguments": json.loads(call["arguments"])}
            except ValueError:
                return call
        return call

    if not isinstance(message.get("tool_calls"), list):
        return message
    return {**message, "tool_calls": [convert(call) for call in message["tool_calls"]]}


@dataclass(frozen=True)
class MessagesColumn:
    """Reads the messages of a column, with the tools of a column `tools`.

    A row of ARC-AGI without such a column is a message of the user.
    """

    name: str
    template: ChatTemplate

    @property
    def columns(self) -> Columns:
        return Columns((self.name,), ("tools", "train", "test"))

    def read(self, row: Mapping[str, Any]) -> Content | None:
        """Raises UnusableRowError."""
        if self.name not in row and is_arc_task(row):
            return self.template.content([{"role": "user", "content": arc_prompt(row)}])
        given = _parsed(column_of(row, self.name, "--messages_column"))
        if given is None or (isinstance(given, list) and not given):
            return None
        if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
            raise UnusableRowError(
                f"--messages_column {self.name}: expected a list of messages, found "
                f"{type(given).__name__} {given!r:.40}"
            )
        tools = _parsed(row.get("tools"))
        if tools is not None and not isinstance(tools, list):
            raise UnusableRowError(f"its tools are {type(tools).__name__}, expected a list")
        return self.template.content([_message(each) for each in given], tools or None)


def _parsed(value: Any) -> Any:
    """Messages or tools, which some data sets have as JSON."""
    if isinstance(value, str) and value.strip():
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return None if value == "" else value


def _message(given: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates take it. Raises UnusableRowError.

    Parquet gives every message all the keys that any has, so those without a value are left out.
    """
    message = {key: value for key, value in given.items() if value is not None}
    if "from" in message and "role" not in message:
        message["role"], message["content"] = message.pop("from"), message.pop("value", "")
    for spelling in ("thinking", "reasoning"):
        if spelling in message and "reasoning_content" not in message:
            message["reasoning_content"] = message[spelling]
    role = message.get("role")
    role = SPEAKERS.get(role, role) if isinstance(role, str) else role
    if role not in ROLES[1:] or role == "thinking":
        raise UnusableRowError(
            f"a message has the role {role!r:.40}, expected system, user, assistant or tool"
        )
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UnusableRowError(f"a message has a part of type {kind!r:.40}, expected text")
        if not isinstance(part.get("text"), str):
            raise UnusableRowError("a message has a part of text without its text")
    if not isinstance(content, str | list | None):
        raise UnusableRowError(f"a message's content is {type(content).__name__}, expected text")
    return {**message, "role": role}
