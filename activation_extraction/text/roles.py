"""Finds the role and the turn of every character of a rendered conversation.

chat.py renders conversations. tokens.py turns the spans of this module into labels of tokens.

Qwen's templates write every turn as a block: <|im_start|>ROLE, a newline, the content and
<|im_end|>. The roles are read from the blocks. So that no content can be taken for another role,
messages must not contain these two markers, and the blocks must agree with the messages. If a
template writes no such blocks, its text has no roles.

The header of a block and the text between blocks have the role "template". <|im_end|> has the role
of its block. If the template marks thinking and a block begins with <think>, the text up to
</think> has the role "thinking", together with the newlines after it. Tool messages have the role
"tool", even if a template writes several of them into one block of the user.
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
# Role of a message -> headers of blocks that a template may write for it. The header of any other
# role is its name.
HEADERS = {"tool": ("tool", "user"), "system": ("system", "developer")}


class Turn(NamedTuple):
    """A turn of a conversation, which the template writes as one block.

    Attributes:
        role: The role of the turn's content.
        messages: The messages in the turn. This is usually one message. There may be several if
            their role is "tool". There is no message if the turn is a system prompt that the
            template adds.
    """

    role: str
    messages: list[dict[str, Any]]


def role_spans(text: str, messages: Sequence[dict[str, Any]], marks_thinking: bool) -> list[Span]:
    """Returns spans with the role and turn of each character of a rendered conversation.

    A rendered conversation consists of blocks. A block begins with <|im_start|> and a header, and
    ends with <|im_end|>. It contains one message, several results of tools, or a system prompt that
    the template adds.

    Args:
        text: The conversation as the template renders it.
        messages: The messages that were rendered. They contain neither <|im_start|> nor <|im_end|>.
        marks_thinking: Whether the template writes thinking between <think> and </think>.

    Returns:
        The spans, which together cover the text.

    Raises:
        UnusableRowError: If the text does not consist of blocks, if the blocks do not agree with
            the messages, or if a block lacks the text of one of its messages.
    """
    block_matches = _blocks(text)
    block_headers = [block_match[1].strip() for block_match in block_matches]
    turns_of_blocks = _turns(block_headers, messages)
    text_spans = [Span(0, TEMPLATE, 0)]
    for turn_number, (block_match, (turn_role, turn_messages)) in enumerate(
        zip(block_matches, turns_of_blocks, strict=True)
    ):
        content_start_offset = block_match.start(2)
        content_end_offset = block_match.end(2)
        text_spans.append(Span(block_match.start(), TEMPLATE, turn_number))
        if turn_role == "assistant" and marks_thinking:
            if thinking_match := THINKING.match(block_match[2]):
                text_spans.append(Span(content_start_offset, ROLES.index("thinking"), turn_number))
                content_start_offset += thinking_match.end()
        require_texts(turn_messages, marks_thinking, text, content_start_offset, content_end_offset)
        text_spans.append(Span(content_start_offset, ROLES.index(turn_role), turn_number))
        text_spans.append(Span(block_match.end(), TEMPLATE, turn_number))
    offset_after_blocks = block_matches[-1].end() if block_matches else 0
    prompt_start_offset = text.find(START, offset_after_blocks)
    if prompt_start_offset >= 0:  # the template opens the turn that a model would generate
        text_spans.append(Span(prompt_start_offset, TEMPLATE, len(block_matches)))
    return text_spans


def _blocks(text: str) -> list[re.Match[str]]:
    """Returns the blocks of a rendered conversation.

    A block is the text from an <|im_start|> to the next <|im_end|>. Its first line is the header,
    such as "user", and the other lines are the content.

    After the last block, one more <|im_start|> may open the turn that a model would generate.

    Returns:
        A match for each block. Group 1 of the match is the header, and group 2 is the content.

    Raises:
        UnusableRowError: If <|im_start|> or <|im_end|> occurs anywhere else, or if there is no
            <|im_start|>.
    """
    if START not in text:
        raise UnusableRowError(f"the template writes no turns that begin with {START}")
    block_matches = list(BLOCK.finditer(text))
    offset_after_blocks = block_matches[-1].end() if block_matches else 0
    num_start_markers_after_blocks = text.count(START, offset_after_blocks)
    if (
        text.count(START) - len(block_matches) != num_start_markers_after_blocks
        or num_start_markers_after_blocks > 1
    ):
        raise UnusableRowError(f"the template writes no blocks of {START} and {END}")
    # If a message ends in "<|im_end|" and the template writes ">" after it, the text contains an
    # <|im_end|> that does not end a block.
    if text.count(END) != len(block_matches):
        raise UnusableRowError(f"its rendered text contains {END} elsewhere than at a turn's end")
    return block_matches


def _turns(headers: Sequence[str], messages: Sequence[dict[str, Any]]) -> list[Turn]:
    """Finds the messages that a template has written as each block.

    A block is <|im_start|>, a header, the content and <|im_end|>. A template may add a system block
    at the beginning. It may write consecutive tool messages into one block, whose header is "user"
    in some templates.

    Args:
        headers: The header of each block, such as "user".
        messages: The messages of the conversation, with the keys `role` and `content`.

    Returns:
        A turn for each block: its role and its messages (see `Turn`).

    Raises:
        UnusableRowError: If the blocks do not agree with the messages.
    """
    separate_turns = [Turn(message["role"], [message]) for message in messages]
    merged_turns: list[Turn] = []  # consecutive tool messages are in the same turn
    for role, consecutive_messages in groupby(messages, itemgetter("role")):
        if role == "tool":
            merged_turns.append(Turn(role, list(consecutive_messages)))
        else:
            merged_turns += [Turn(role, [message]) for message in consecutive_messages]
    for possible_turns in (merged_turns, separate_turns):
        if len(headers) == len(possible_turns) + 1 and messages[0]["role"] != "system":
            possible_turns = [Turn("system", []), *possible_turns]
        if _headers_agree(headers, possible_turns):
            return possible_turns
    raise UnusableRowError(
        f"the template's blocks ({', '.join(headers)}) do not agree with the roles of the messages "
        f"({', '.join(turn.role for turn in separate_turns)})"
    )


def _headers_agree(headers: Sequence[str], turns: Sequence[Turn]) -> bool:
    """Returns whether the headers of blocks agree with the roles of turns.

    A header agrees with a role if a chat template may write it for a turn of this role. `HEADERS`
    lists the headers of some roles. The only header of any other role is the role itself.

    Args:
        headers: The header of each block of a rendered conversation, such as "user".
        turns: The turns of the conversation. If there are more or fewer turns than headers, the
            result is False.
    """
    if len(headers) != len(turns):
        return False
    return all(
        block_header in HEADERS.get(turn.role, (turn.role,))
        for block_header, turn in zip(headers, turns, strict=True)
    )


def require_texts(
    messages: Iterable[Mapping[str, Any]],
    marks_thinking: bool,
    text: str,
    start: int = 0,
    stop: int | None = None,
) -> None:
    """Checks that a rendered conversation contains the texts of its messages, in order.

    A template may remove the spaces around a text, write a text as JSON and, if `marks_thinking` is
    true, leave out the thinking of the assistant. These changes are accepted.

    Args:
        messages: The messages whose texts are checked.
        marks_thinking: Whether the template writes thinking between <think> and </think>.
        text: The rendered conversation.
        start: Offset in characters at which the search begins.
        stop: Offset in characters at which the search ends; None for the end of the text.

    Raises:
        UnusableRowError: If a text is missing.
    """
    search_start_offset = start
    for message in messages:
        for required_text in _required_texts(message, marks_thinking):
            json_escaped_text = json.dumps(required_text, ensure_ascii=False)[1:-1]
            for text_spelling in (required_text, json_escaped_text):
                spelling_start_offset = text.find(text_spelling, search_start_offset, stop)
                if spelling_start_offset >= 0:
                    search_start_offset = spelling_start_offset + len(text_spelling)
                    break
            else:
                raise UnusableRowError(
                    f"the chat template leaves out text of the role {message['role']}: "
                    f"{required_text!r:.40}"
                )


def _required_texts(message: Mapping[str, Any], marks_thinking: bool) -> list[str]:
    """Returns the texts of a message that a template must write.

    Args:
        message: The message.
        marks_thinking: Whether the template writes thinking between <think> and </think>.

    Returns:
        The texts, without spaces around them. If the template marks thinking and an assistant's
        message contains thinking, these are two texts: the text before the thinking, which may be
        empty, and the text after it. The thinking itself is not returned, because a template may
        leave it out. In all other cases, the text of the message is the only element.
    """
    message_text = without_surrogates(message.get("content") or "")
    text_before_end_marker, end_marker, text_after_thinking = message_text.partition(END_THINK)
    if not (end_marker and marks_thinking and message["role"] == "assistant"):
        return [message_text.strip()]
    text_before_thinking, start_marker, _ = text_before_end_marker.partition(THINK)
    # If the text contains </think> without <think>, it begins with the thinking, so that there is
    # no text before the thinking.
    return [text_before_thinking.strip() if start_marker else "", text_after_thinking.strip()]


def refuse_markers(content: Any, template_markers: Iterable[str], message: str) -> None:
    """Checks that no text in a conversation, or in a part of it, contains a marker.

    Args:
        content: A text, or nested lists and objects with texts. The keys of objects are checked as
            well.
        template_markers: Markers that chat templates write, such as <|im_start|> or <think>.
        message: The error message, in which {} stands for the marker.

    Raises:
        UnusableRowError: If a text contains a marker.
    """
    for content_text in _texts(content):
        for template_marker in template_markers:
            if template_marker in content_text:
                raise UnusableRowError(message.format(template_marker))


def _texts(content: Any) -> Iterator[str]:
    """Yields all texts in nested lists and objects, including the keys of objects."""
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        for object_key, nested_content in content.items():
            yield str(object_key)
            yield from _texts(nested_content)
    elif isinstance(content, list | tuple):
        for content_part in content:
            yield from _texts(content_part)
