"""Renders conversations by a model's chat template, and finds the role of every character.

The template is the checkpoint's own, or one that the user gives; transformers renders it. Every
message's text has to be in the rendering. messages.py reads the messages of a row.

Qwen's templates write every turn as a block: <|im_start|>ROLE, a new line, the content and
<|im_end|>. A role is found by the blocks: the text of a message may not hold these two markers, and
the blocks have to be those of the messages, so no content can pass for another role. Tokens have no
roles where a template writes no such blocks.

The header of a block, and what stands between blocks, is "template"; <|im_end|> belongs to the
block. Where the template marks thinking, a block that begins with <think> is "thinking" up to
</think> and the new lines after it. Tool messages are "tool", also where a template puts several of
them into one block of the user.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from activation_extraction.common.choices import ROLES
from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.log import activity
from activation_extraction.text.rows import TEMPLATE, Content, Span, UnusableRowError, valid

START, END = "<|im_start|>", "<|im_end|>"
TURN_BLOCK = re.compile(r"<\|im_start\|>([^\n]*)\n(.*?)<\|im_end\|>", re.DOTALL)
MARKS = THINK, THOUGHT = "<think>", "</think>"
THINKING = re.compile(r"<think>.*?</think>\n{0,2}", re.DOTALL)
ONCE = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {}},
    },
}
# What transformers' apply_chat_template passes on to the template, of its own arguments.
PASSED_ON = {"add_generation_prompt", "documents"}
# A run that continues on another day would render other text.
NO_DATE = """\
{%- macro strftime_now(format) %}
{{- raise_exception("it asks for today's date; --chat_template_args can give it one") }}
{%- endmacro %}{{ '' }}"""
Turn = tuple[str, list[dict[str, Any]]]  # the role of a block, and its messages


@dataclass(frozen=True)
class ChatTemplate:
    """Templates, and the tokenizer of transformers that renders them.

    sources: Jinja, by name: "default" and, for conversations with tools, "tool_use", or only one of
    them. where: names them in messages. arguments: what they are given besides the messages.
    """

    tokenizer: Any
    sources: Mapping[str, str]
    where: str
    arguments: Mapping[str, Any]

    @classmethod
    def of_file(cls, tokenizer: Any, file: str, arguments: Mapping[str, Any]) -> "ChatTemplate":
        """Takes the template in a file, which --chat_template names.

        Raises InputError if it cannot be read, or does not take the arguments.
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
        """Takes the templates of a model or adapter, named `where` in messages.

        Raises InputError if it has none, or they do not take the arguments.
        """
        if not sources:
            raise InputError(f"{where}: has no chat template; give one with --chat_template FILE")
        return cls._checked(tokenizer, sources, where, arguments)

    @classmethod
    def _checked(
        cls, tokenizer: Any, sources: Mapping[str, str], where: str, arguments: Mapping[str, Any]
    ) -> "ChatTemplate":
        taken = {"messages", *tokenizer.apply_chat_template.__annotations__} - PASSED_ON
        for name in arguments:
            if name in taken:
                raise InputError(f"--chat_template_args {name}: is no argument of a template")
            if name != "add_generation_prompt" and not any(name in s for s in sources.values()):
                raise InputError(f"--chat_template_args {name}: {where} does not mention it")
        return cls(tokenizer, sources, where, arguments)

    def check(self) -> None:
        """Raises InputError unless the templates render a conversation, always in the same way, and
        all or none of them write turns between markers."""
        if len({START in source for source in self.sources.values()}) > 1:
            raise InputError(
                f"{self.where}: of its templates default and tool_use, one writes turns between "
                f"{START} and {END} and the other does not; expected both or neither"
            )
        for name in self.sources:
            tools = [LOOK] if name == "tool_use" else None
            try:
                with activity(f"rendering the chat template of {self.where}"):
                    same = self.content(ONCE, tools) == self.content(ONCE, tools)
            except UnusableRowError as error:
                raise InputError(f"{self.where}: cannot render a conversation: {error}") from error
            if not same:
                raise InputError(f"{self.where}: renders the same conversation in different ways")

    @property
    def digest(self) -> str:
        """SHA-256 of the templates and their arguments."""
        default, *others = self.sources.values()
        content = json.dumps([default, dict(self.arguments), *others], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def has_roles(self) -> bool:
        """Whether its turns are blocks between markers, so that every token has a role."""
        return any(START in source for source in self.sources.values())

    @cached_property
    def marks_thinking(self) -> bool:
        return any(mark in source for mark in MARKS for source in self.sources.values())

    def content(
        self, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None
    ) -> Content:
        """Renders messages, whose contents are text, null or missing.

        Raises UnusableRowError if that fails, if the rendering lacks the text of a message, or if
        roles would be unclear.
        """
        if self.has_roles:
            _refuse([messages, tools], (START, END), "its text holds {}, which would end a turn")
        for message in messages if self.marks_thinking else ():
            # The marks could end the thinking early, or look like it.
            if message.get("reasoning_content"):
                texts = [message["reasoning_content"], message.get("content")]
                _refuse(texts, MARKS, "a message has its thinking apart, and {} in its text")
        text = self._render(messages, tools)
        if not self.has_roles:
            try:
                self._require(messages, text, 0, len(text))
            except UnusableRowError:
                # Some templates put the system's text first, wherever its message is.
                ordered = sorted(messages, key=lambda message: message["role"] != "system")
                self._require(ordered, text, 0, len(text))
            return Content(text)
        if START not in text:
            raise UnusableRowError(f"the template writes no turns that begin with {START}")
        blocks = list(TURN_BLOCK.finditer(text))
        end = blocks[-1].end() if blocks else 0
        if text.count(START) - len(blocks) != text.count(START, end) or text.count(START, end) > 1:
            raise UnusableRowError(f"the template writes no blocks of {START} and {END}")
        if text.count(END) != len(blocks):  # a text that ends within one, and the template's ">"
            raise UnusableRowError(f"rendered, it holds another {END} than those of its turns")
        turns = _turns_of([block[1].strip() for block in blocks], messages)
        return Content(text, list(self._spans(text, blocks, turns)))

    def _render(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None) -> str:
        try:
            return self._rendered(messages, tools)
        except Exception as error:  # a template may raise anything
            with suppress(Exception):  # some take the arguments of a call as text alone
                as_text = [with_arguments(message, _as_text) for message in messages]
                if as_text != messages:
                    return self._rendered(as_text, tools)
            raise UnusableRowError(
                f"the chat template refuses it: {one_line(error):.200}"
            ) from error

    def _rendered(self, messages: Sequence[dict[str, Any]], tools: list[Any] | None) -> str:
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise ValueError("the model names one for conversations with tools, tool_use, alone")
        source = self.sources[name]
        text: str = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            chat_template=NO_DATE + source if "strftime_now" in source else source,
            tokenize=False,
            **self.arguments,
        )
        return valid(text)

    def _require(
        self, messages: Iterable[Mapping[str, Any]], text: str, start: int, end: int
    ) -> None:
        """Raises UnusableRowError unless text[start:end] has the texts of messages, in order.

        A template may trim them, and may leave out thinking; it may also write them as JSON.
        """
        for message in messages:
            for said in self._texts_of(message):
                found, size = text.find(said, start, end), len(said)
                if found < 0:
                    encoded = json.dumps(said, ensure_ascii=False)[1:-1]
                    found, size = text.find(encoded, start, end), len(encoded)
                if found < 0:
                    raise UnusableRowError(
                        f"the chat template leaves out text of the role {message['role']}: "
                        f"{said!r:.40}"
                    )
                start = found + size

    def _texts_of(self, message: Mapping[str, Any]) -> list[str]:
        """The texts of a message that a template has to write: before and after its thinking."""
        text = valid(message.get("content") or "")
        before, mark, after = text.partition(THOUGHT)
        if not (mark and self.marks_thinking and message["role"] == "assistant"):
            return [text.strip()]
        before, mark, _ = before.partition(THINK)
        return [before.strip() if mark else "", after.strip()]

    def _spans(
        self, text: str, blocks: Sequence[re.Match[str]], turns: Sequence[Turn]
    ) -> Iterator[Span]:
        yield Span(0, TEMPLATE, 0)
        for turn, (block, (role, messages)) in enumerate(zip(blocks, turns, strict=True)):
            start = block.start(2)
            yield Span(block.start(), TEMPLATE, turn)
            if role == "assistant" and self.marks_thinking:
                if thinking := THINKING.match(block[2]):
                    yield Span(start, ROLES.index("thinking"), turn)
                    start += thinking.end()
            self._require(messages, text, start, block.end(2))
            yield Span(start, ROLES.index(role), turn)
            yield Span(block.end(), TEMPLATE, turn)
        if (opened := text.find(START, block.end())) >= 0:
            yield Span(opened, TEMPLATE, len(blocks))


def _turns_of(headers: Sequence[str], messages: Sequence[dict[str, Any]]) -> list[Turn]:
    """The turn of each block. Raises UnusableRowError unless the blocks are those of the messages.

    A template may begin with a system block of its own, and put tool messages that follow each
    other into one block, which is the user's in some templates.
    """
    alone: list[Turn] = [(message["role"], [message]) for message in messages]
    merged: list[Turn] = []
    for role, group in groupby(messages, itemgetter("role")):
        said = list(group)
        merged += [(role, said)] if role == "tool" else [(role, [each]) for each in said]
    for expected in (merged, alone):
        if len(headers) == len(expected) + 1 and alone[0][0] != "system":
            expected = [("system", []), *expected]
        allowed = {"tool": ("tool", "user"), "system": ("system", "developer")}
        if len(headers) == len(expected) and all(
            header in allowed.get(role, (role,))
            for header, (role, _) in zip(headers, expected, strict=True)
        ):
            return expected
    raise UnusableRowError(
        f"the template's blocks ({', '.join(headers)}) are not those of its messages "
        f"({', '.join(role for role, _ in alone)})"
    )


def with_arguments(message: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns a message with the arguments of its tool calls converted.

    A call has them itself, or in its `function`.
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


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, dict) else arguments


def _refuse(value: Any, marks: Iterable[str], why: str) -> None:
    for text in _texts(value):
        for mark in marks:
            if mark in text:
                raise UnusableRowError(why.format(mark))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
