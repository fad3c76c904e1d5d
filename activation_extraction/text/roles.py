"""Finds the role and the turn of every character of a rendered conversation.

chat.py renders conversations. tokens.py turns the spans of this module into labels of tokens.

Qwen's templates write every turn as a block: <|im_start|>ROLE, a newline, the content and
<|im_end|>. The blocks show the roles, so no message may contain these two markers, and the blocks
must be those of the messages. That way no content can pass for another role. A template that writes
no such blocks gives text without roles.

The header of a block and the text between blocks have the role "template"; <|im_end|> belongs to
the role of its block. If the template marks thinking, a block that begins with <think> has the role
"thinking" up to </think> and the newlines after it. Tool messages have the role "tool", even in a
template that writes several of them into one block of the user.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

from activation_extraction.common.choices import ROLES
from activation_extraction.text.rows import TEMPLATE, Span, UnusableRowError, without_surrogates

START, END = "<|im_start|>", "<|im_end|>"
BLOCK = re.compile(r"<\|im_start\|>([^\n]*)\n(.*?)<\|im_end\|>", re.DOTALL)
THINK, END_THINK = "<think>", "</think>"
THINKING = re.compile(r"<think>.*?</think>\n{0,2}", re.DOTALL)
# The headers that a template may write for a role, where they are not the role's own name.
HEADERS = {"tool": ("tool", "user"), "system": ("system", "developer")}


class Turn(NamedTuple):
    """A block of a rendered conversation.

    Attributes:
        role: The role of the block's content.
        messages: The messages in the block: usually one, several if their role is "tool", and none
            for a system prompt that the template adds.
    """

    role: str
    messages: list[dict[str, Any]]


def role_spans(text: str, messages: Sequence[dict[str, Any]], marks_thinking: bool) -> list[Span]:
    """Returns the role and turn of each stretch of a rendered conversation.

    Args:
        text: The conversation as the template renders it.
        messages: The messages that were rendered, whose texts contain neither START nor END.
        marks_thinking: Whether the template writes thinking between THINK and END_THINK.

    Returns:
        Spans that together cover the text.

    Raises:
        UnusableRowError: If the text does not consist of blocks, if the blocks are not those of the
            messages, or if a block lacks the text of one of its messages.
    """
    blocks = _blocks(text)
    headers = [block[1].strip() for block in blocks]
    spans = [Span(0, TEMPLATE, 0)]
    end = 0
    for number, (block, turn) in enumerate(zip(blocks, _turns(headers, messages), strict=True)):
        start, end = block.start(2), block.end()
        spans.append(Span(block.start(), TEMPLATE, number))
        if turn.role == "assistant" and marks_thinking:
            if thinking := THINKING.match(block[2]):
                spans.append(Span(start, ROLES.index("thinking"), number))
                start += thinking.end()
        require_texts(turn.messages, marks_thinking, text, start, block.end(2))
        spans.append(Span(start, ROLES.index(turn.role), number))
        spans.append(Span(end, TEMPLATE, number))
    generation_prompt = text.find(START, end)
    if generation_prompt >= 0:
        spans.append(Span(generation_prompt, TEMPLATE, len(blocks)))
    return spans


def _blocks(text: str) -> list[re.Match[str]]:
    """Returns the blocks of a text: group 1 is the header, group 2 the content.

    After the last block, one more START may open the turn that a model would generate.

    Raises:
        UnusableRowError: If START or END occurs anywhere else, or if there is no START.
    """
    if START not in text:
        raise UnusableRowError(f"the template writes no turns that begin with {START}")
    blocks = list(BLOCK.finditer(text))
    end = blocks[-1].end() if blocks else 0
    starts_after_blocks = text.count(START, end)
    if text.count(START) - len(blocks) != starts_after_blocks or starts_after_blocks > 1:
        raise UnusableRowError(f"the template writes no blocks of {START} and {END}")
    # A message that ends in "<|im_end|" would make one with a ">" that the template writes next.
    if text.count(END) != len(blocks):
        raise UnusableRowError(f"rendered, it holds another {END} than those of its turns")
    return blocks


def _turns(headers: Sequence[str], messages: Sequence[dict[str, Any]]) -> list[Turn]:
    """Returns the turn of each block.

    A template may begin with a system block of its own. It may write consecutive tool messages into
    one block, whose header is "user" in some templates.

    Args:
        headers: The header of each block.
        messages: The messages of the conversation.

    Raises:
        UnusableRowError: If the blocks are not those of the messages.
    """
    separate = [Turn(message["role"], [message]) for message in messages]
    merged: list[Turn] = []
    for role, group in groupby(messages, itemgetter("role")):
        if role == "tool":
            merged.append(Turn(role, list(group)))
        else:
            merged += [Turn(role, [message]) for message in group]
    for turns in (merged, separate):
        if len(headers) == len(turns) + 1 and messages[0]["role"] != "system":
            turns = [Turn("system", []), *turns]
        if len(headers) == len(turns) and all(
            header in HEADERS.get(turn.role, (turn.role,))
            for header, turn in zip(headers, turns, strict=True)
        ):
            return turns
    raise UnusableRowError(
        f"the template's blocks ({', '.join(headers)}) are not those of its messages "
        f"({', '.join(turn.role for turn in separate)})"
    )


def require_texts(
    messages: Iterable[Mapping[str, Any]],
    marks_thinking: bool,
    text: str,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """Checks that a rendering contains the texts of messages, in order.

    A template may trim a text, write it as JSON, or leave out thinking.

    Args:
        messages: The messages.
        marks_thinking: Whether the template writes thinking between THINK and END_THINK.
        text: The rendered conversation.
        start: Offset in characters at which the search begins.
        stop: Offset in characters at which the search ends; None for the end of the text.

    Raises:
        UnusableRowError: If a text is missing.
    """
    for message in messages:
        for part in _required_texts(message, marks_thinking):
            offset, size = text.find(part, start, stop), len(part)
            if offset < 0:
                as_json = json.dumps(part, ensure_ascii=False)[1:-1]
                offset, size = text.find(as_json, start, stop), len(as_json)
            if offset < 0:
                raise UnusableRowError(
                    f"the chat template leaves out text of the role {message['role']}: {part!r:.40}"
                )
            start = offset + size


def _required_texts(message: Mapping[str, Any], marks_thinking: bool) -> list[str]:
    """Returns the texts of a message that a template has to write: those around its thinking."""
    text = without_surrogates(message.get("content") or "")
    before, end_mark, after = text.partition(END_THINK)
    if not (end_mark and marks_thinking and message["role"] == "assistant"):
        return [text.strip()]
    before, mark, _ = before.partition(THINK)
    # Without <think>, everything up to </think> is thinking.
    return [before.strip() if mark else "", after.strip()]


def refuse_marks(content: Any, marks: Iterable[str], reason: str) -> None:
    """Checks that no text in a conversation, or in a part of it, contains a marker.

    Args:
        content: A text, or lists and objects of texts. The keys of objects are checked as well.
        marks: The markers, such as START.
        reason: The message of the error, with {} in the place of the marker.

    Raises:
        UnusableRowError: If a text contains a marker.
    """
    for text in _texts(content):
        for mark in marks:
            if mark in text:
                raise UnusableRowError(reason.format(mark))


def _texts(content: Any) -> Iterator[str]:
    """Yields all texts in nested lists and objects, including the keys of objects."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        for key, entry in content.items():
            yield str(key)
            yield from _texts(entry)
    elif isinstance(content, list | tuple):
        for entry in content:
            yield from _texts(entry)
