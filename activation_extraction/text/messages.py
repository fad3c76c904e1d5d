"""Reads the messages and tools of a row as chat templates take them.

Data sets spell them in several ways: OpenAI's, ShareGPT's, as JSON in a column, and as Arrow's
objects, which have null for the keys that they lack. chat.py renders what this module returns.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from activation_extraction.common.choices import ROLES
from activation_extraction.text.chat import ChatTemplate, with_arguments
from activation_extraction.text.rows import (
    Columns,
    Content,
    UnusableRowError,
    arc_prompt,
    column_of,
    is_arc_task,
    without_nulls,
)

SPEAKERS = {  # of `conversations`, and other spellings of the same roles
    "human": "user",
    "gpt": "assistant",
    "developer": "system",
    "observation": "tool",
    "function": "tool",
}


@dataclass(frozen=True)
class MessagesColumn:
    """Reads the messages of a column, with the tools of a column `tools`.

    A row of ARC-AGI without such a column is a message of the user.
    """

    doing: ClassVar = "rendering the chat template of"
    name: str
    template: ChatTemplate

    @property
    def columns(self) -> Columns:
        return Columns((self.name,), ("tools", "train", "test"))

    def read(self, row: Mapping[str, Any]) -> Content | None:
        """Raises UnusableRowError."""
        if self.name not in row and is_arc_task(row):
            return self.template.content([{"role": "user", "content": arc_prompt(row)}])
        given = _parsed(without_nulls(column_of(row, self.name, "--messages_column")))
        if given is None or (isinstance(given, list) and not given):
            return None
        if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
            raise UnusableRowError(
                f"--messages_column {self.name}: expected a list of messages, found "
                f"{type(given).__name__} {given!r:.40}"
            )
        tools = _parsed(without_nulls(row.get("tools")))
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
    """Returns a message as transformers takes it, with text as its content if it has any.

    Keys that are null stay: transformers decides what the template sees of them.

    Raises:
        UnusableRowError: Its role is unknown, or its content is no text.
    """
    message = dict(given)
    if message.get("role") is None and "from" in message:
        message["role"], content = message.pop("from"), message.pop("value", None)
        message["content"] = "" if content is None else content
    for spelling in ("thinking", "reasoning"):
        thinking = message.get(spelling)
        if thinking is not None and message.get("reasoning_content") is None:
            message["reasoning_content"] = thinking
    role = message.get("role")
    role = SPEAKERS.get(role, role) if isinstance(role, str) else role
    if role not in ROLES[1:] or role == "thinking":
        raise UnusableRowError(
            f"a message has the role {role!r:.40}, expected system, user, assistant or tool"
        )
    if message.get("content") is not None:
        message["content"] = _text_of(message["content"])
    return with_arguments({**message, "role": role}, _as_object)


def _text_of(content: Any) -> str:
    """The text of a content; that of several parts is joined, as templates for parts join it."""
    for part in content if isinstance(content, list) else []:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise UnusableRowError(f"a message has a part of type {kind!r:.40}, expected text")
        if not isinstance(part.get("text"), str):
            raise UnusableRowError("a message has a part of text without its text")
    if not isinstance(content, str | list):
        raise UnusableRowError(f"a message's content is {type(content).__name__}, expected text")
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def _as_object(arguments: Any) -> Any:
    """The arguments of a call as an object, if they are the JSON text of one.

    Other text stays as it is: the template writes it as it does for transformers.
    """
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else None
    except ValueError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
