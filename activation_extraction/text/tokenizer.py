"""Loads a checkpoint's tokenizer, and turns the texts of documents into token ids.

samples.py makes samples of these.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.late_imports import transformers
from activation_extraction.text.rows import TEMPLATE, Content

PIECE_CHARACTERS = 2**16  # of a long text
PIECES_AT_ONCE = 64  # of all texts; what the tokenizer makes of them takes 100 bytes per token
# No word of Qwen's tokenizers goes on over a space after a word, or from a new line to the next.
WORD_END = re.compile(r"(?<=\S)(?= )|(?<=\n)(?=\S)")


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


def load_tokenizer(files: Iterable[Path], model_path: str, vocab_size: int) -> Tokenizer:
    """Loads the tokenizer in tokenizer.json, or what transformers makes of the other files.

    files: the model's files for its tokenizer, with config.json beside them. model_path: names the
    model in messages. Raises InputError if a file is missing or broken, or belongs to a model with
    another vocabulary.
    """
    path = tokenizer_file(files, model_path)
    if path.name == "tokenizer.json":
        tokenizer = read_tokenizer(path)
    else:
        tokenizer = pretrained(path).backend_tokenizer
    tokenizer.no_truncation()
    tokenizer.no_padding()
    vocabulary = tokenizer.get_vocab(with_added_tokens=True).values()
    largest = max((*vocabulary, *tokenizer.encode("").ids), default=-1)  # with special tokens
    if largest >= vocab_size:
        raise InputError(
            f"{path}: the tokenizer has token id {largest}, but vocab_size in config.json is "
            f"{vocab_size}; put the model's own tokenizer there"
        )
    return tokenizer


def read_tokenizer(path: Path) -> Tokenizer:
    """Reads a tokenizer.json. Raises InputError."""
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises no other type
        raise _broken(path, error) from error


def tokenizer_file(files: Iterable[Path], model_path: str) -> Path:
    """Returns the file that the vocabulary is read from. Raises InputError if one is missing."""
    paths = {path.name: path for path in files}
    if own := paths.get("tokenizer.json"):
        return own
    for name in ("vocab.json", "merges.txt"):
        if name not in paths:
            raise InputError(
                f"--model_path {model_path}: has no {name}; a tokenizer is read from "
                "tokenizer.json, or from vocab.json with merges.txt"
            )
    return paths["vocab.json"]


@lru_cache(1)
def pretrained(path: Path) -> Any:
    """Returns the tokenizer of transformers beside a file. Raises InputError."""
    loader = transformers().AutoTokenizer
    try:
        return loader.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers does not say what it raises
        raise _broken(path, error) from error


def _broken(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: the tokenizer cannot be loaded: {one_line(error)}")


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
    pieces = [_pieces(content.text) for content in contents]
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
        total, starts, labels = sum(map(len, ids)), None, {}
        if with_offsets:
            of_tokens = np.concatenate(offsets)
            starts, labels = of_tokens[:most, 0], _labels(content, of_tokens)
        first = np.concatenate(ids)[:most].copy()  # of a long text, the rest is not needed
        tokens.append(Tokens(first, total, starts, labels))
    return tokens


def _pieces(text: str) -> list[slice]:
    """Cuts a long text where words end. Its pieces take less memory together, and more threads."""
    ends = [0]
    while ends[-1] < len(text) or len(ends) == 1:
        found = WORD_END.search(text, ends[-1] + PIECE_CHARACTERS)
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
