"""Loads a checkpoint's tokenizer, and turns the texts of documents into token ids.

samples.py makes samples of these.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.tokenizer_files import MERGES, WHOLE, WORDS, vocabulary_file
from activation_extraction.text.pretrained import pretrained
from activation_extraction.text.rows import TEMPLATE, Content

PIECE_CHARACTERS = 2**16  # of a long text
PIECES_AT_ONCE = 64  # of all texts; what the tokenizer makes of them takes 100 bytes per token
# No word of Qwen's tokenizers goes on over a space after a word, or from a new line to the next:
# where a text may be cut, and the two sides of such a cut.
WORD_ENDS = {r"(?<=\S)(?= )": ("a", " b"), r"(?<=\n)(?=\S)": ("a\n", "b")}


@dataclass(frozen=True)
class Tokens:
    """The first tokens of a document, and how many it has. labels: as of the Sample, but of all its
    tokens.

    starts: where each begins in the text, in characters; None where nobody asks for that.
    """

    ids: np.ndarray
    total: int
    starts: np.ndarray | None = None
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of the tokens that a text gets in front of its own ones and after them.

    template: how messages and metadata.json show it, such as "text + <|endoftext|>".
    """

    front: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    template: str = ""

    def __len__(self) -> int:
        return len(self.front) + len(self.end)

    def around(self, tokens: Tokens, characters: int) -> Tokens:
        """Returns the tokens of a text with these around them. characters: of the text."""
        before, after = (np.array(ids, np.int32) for ids in (self.front, self.end))
        ids, starts = np.concatenate([before, tokens.ids, after]), tokens.starts
        if starts is not None:
            places = np.zeros_like(before), starts, np.full_like(after, characters)
            starts = np.concatenate(places)
        return replace(tokens, ids=ids, total=tokens.total + len(self), starts=starts)


def special_tokens_of(tokenizer: Tokenizer) -> SpecialTokens:
    """Returns what a tokenizer adds to a text: its post-processor is tried on a text of one token.

    Raises InputError if that repeats the text or leaves it out.
    """
    if tokenizer.post_processor is None:
        return SpecialTokens()
    text = Tokenizer(models.WordLevel({"text": 0}, "text")).encode("text")
    whole = tokenizer.post_processor.process(text)
    if whole.special_tokens_mask.count(0) != 1:
        raise InputError(
            "--special_tokens tokenizer: the post_processor in the model's tokenizer.json repeats "
            "texts or leaves them out; give --special_tokens none, which adds no tokens"
        )
    place, ids = whole.special_tokens_mask.index(0), tuple(whole.ids)
    parts = [tokenizer.id_to_token(each) or str(each) for each in ids]
    parts[place] = "text"
    return SpecialTokens(ids[:place], ids[place + 1 :], " + ".join(parts) if ids[1:] else "")


def load_tokenizer(files: Iterable[Path], where: str, vocab_size: int) -> Any:
    """Loads the tokenizer of a model or adapter.

    Args:
        files: The checkpoint's files for its tokenizer, with config.json beside them.
        where: The checkpoint's flag and path, for messages.
        vocab_size: The number of token ids that the model has.

    Returns:
        An object of transformers. Its `backend_tokenizer` neither cuts nor pads.

    Raises:
        InputError: A file is missing or broken, or belongs to a model with another vocabulary.
    """
    files = list(files)
    path = vocabulary_file(files)
    if path is None:
        missing = MERGES if WORDS in {file.name for file in files} else WORDS
        raise InputError(
            f"{where}: has no {missing}; a tokenizer is read from {WHOLE}, or from {WORDS} with "
            f"{MERGES}"
        )
    loaded = pretrained(path)
    tokenizer: Tokenizer = loaded.backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True).values()
    largest = max((*vocabulary, *tokenizer.encode("").ids), default=-1)  # with special tokens
    if largest >= vocab_size:
        raise InputError(
            f"{path}: the tokenizer has token id {largest}, but vocab_size in config.json is "
            f"{vocab_size}; put the model's own tokenizer there, or give the model that has it"
        )
    return loaded


def same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Returns whether two tokenizers give every text the same token ids.

    False may also mean that they do, but are written differently.
    """
    return _what_decides_ids(one) == _what_decides_ids(other)


def _what_decides_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    state: dict[str, Any] = json.loads(tokenizer.to_str(), object_hook=_without_defaults)
    for name in ("version", "truncation", "padding", "decoder", "post_processor"):
        state.pop(name, None)
    state["in front and at the end"] = [tokenizer.encode(text).ids for text in ("", "x")]
    state["split"] = tokenizer.encode_special_tokens
    if not tokenizer.encode_special_tokens:
        for token in state.get("added_tokens", ()):
            token.pop("special", None)
    return state


def _without_defaults(part: dict[str, Any]) -> dict[str, Any]:
    """Leaves out of a tokenizer's JSON the settings that are off or change no token id."""
    return {
        name: value
        for name, value in part.items()
        if not (value is None or value is False or value == "" or name == "trim_offsets")
    }


def tokenise(
    tokenizer: Tokenizer | None, contents: Sequence[Content], most: int | None
) -> list[Tokens | str]:
    """Returns the first `most` tokens of each document, or why it cannot be tokenised.

    tokenizer: None if the documents are token ids. most: None for all tokens, and where each
    begins.
    """
    if tokenizer is None:
        given = [content.token_ids for content in contents]
        return [Tokens(ids, len(ids)) for ids in given if ids is not None]
    try:
        return _tokenise_all(tokenizer, contents, most)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the tokenizer's native code is no Exception
        if len(contents) == 1:
            return [f"the tokenizer cannot take it: {one_line(error):.200}"]
        return [tokenise(tokenizer, [content], most)[0] for content in contents]


def _tokenise_all(
    tokenizer: Tokenizer, contents: Sequence[Content], most: int | None
) -> list[Tokens | str]:
    cuts = None
    if any(len(content.text) > PIECE_CHARACTERS for content in contents):
        cuts = _cuts(tokenizer)
    pieces = [_pieces(content.text, cuts) for content in contents]
    asked = zip(contents, pieces, strict=True)
    texts = [content.text[span] for content, own in asked for span in own]
    with_offsets = most is None or any(content.spans for content in contents)
    # Without offsets it takes a third of the time.
    encode = tokenizer.encode_batch if with_offsets else tokenizer.encode_batch_fast
    groups = (texts[n : n + PIECES_AT_ONCE] for n in range(0, len(texts), PIECES_AT_ONCE))
    encoded = (each for group in groups for each in encode(group, add_special_tokens=False))
    tokens: list[Tokens | str] = []
    for content, own in zip(contents, pieces, strict=True):
        ids, offsets = [], []
        for span, each in zip(own, encoded, strict=False):
            ids.append(np.asarray(each.ids, np.int32))
            if with_offsets:
                offsets.append(span.start + np.asarray(each.offsets, np.int32).reshape(-1, 2))
        total = sum(map(len, ids))
        starts = None
        labels = {}
        if with_offsets:
            of_tokens = np.concatenate(offsets)
            starts, labels = of_tokens[:most, 0], _labels(content, of_tokens)
        first = np.concatenate(ids)[:most].copy()  # of a long text, the rest is not needed
        tokens.append(Tokens(first, total, starts, labels))
    return tokens


def _cuts(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Returns where a text may be cut so that its pieces have the tokens of the whole.

    A tokenizer may put a space in front of every text, and an added token may take the spaces
    beside it or have some in it. None if a text must stay whole.
    """

    def ids_of(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    allowed = [
        cut
        for cut, (left, right) in WORD_ENDS.items()
        if ids_of(left) + ids_of(right) == ids_of(left + right)
    ]
    if not allowed:
        return None
    ends = f"(?:{'|'.join(allowed)})"
    forbidden = ""
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.rstrip:
            forbidden += f"(?<!{re.escape(token.content)})"
        if token.lstrip:
            forbidden += f"(?!{re.escape(token.content)})"
        for inside in re.finditer(ends, token.content):
            before, after = token.content[: inside.start()], token.content[inside.start() :]
            forbidden += f"(?!(?<={re.escape(before)}){re.escape(after)})"
    return re.compile(ends + forbidden)


def _pieces(text: str, cuts: re.Pattern[str] | None) -> list[slice]:
    """Cuts a long text. Its pieces take less memory together, and more threads.

    Args:
        text: A text of any length.
        cuts: Where it may be cut; None if it must stay whole.
    """
    ends = [0]
    while ends[-1] < len(text) or len(ends) == 1:
        found = cuts.search(text, ends[-1] + PIECE_CHARACTERS) if cuts is not None else None
        ends.append(found.end() if found else len(text))
    return [slice(*each) for each in pairwise(ends)]


def _labels(content: Content, offsets: np.ndarray) -> dict[str, np.ndarray]:
    """The role and turn of each token; none without spans. offsets: in characters, (tokens, 2).

    A token that begins in the template's text and ends in a message belongs to the message.
    """
    if not content.spans:
        return {}
    starts, roles, turns = np.array(content.spans, np.int32).T
    first = np.searchsorted(starts, offsets[:, 0], "right") - 1
    last = np.searchsorted(starts, np.maximum(offsets[:, 1] - 1, offsets[:, 0]), "right") - 1
    spans = np.where(roles[first] == TEMPLATE, last, first)
    return {"role": roles[spans], "turn": turns[spans]}
