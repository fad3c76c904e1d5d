"""Turns the contents of documents into tokens: token ids, and the role and turn of each token.

A long text is tokenised in pieces, which needs less memory and uses more threads. It is only cut
where the cut changes no token. `SpecialTokens` are the tokens that the model's tokenizer adds to a
text. samples.py makes samples from the tokens, and tokenizer.py loads the tokenizer.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise, product

import numpy as np
from tokenizers import Encoding, Tokenizer, models

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.text.rows import TEMPLATE, Content

PIECE_CHARACTERS = 2**16  # the smallest length of a piece of a long text
# The number of pieces that are tokenised together. It is limited because the tokenizer's results
# take 100 bytes per token.
PIECES_AT_ONCE = 64
# Patterns of positions where a text might be cut -> texts to try before and after such a cut. No
# word of Qwen's and Llama 3's tokenizers extends over the end of a word before a space, or over the
# end of a line. Words of other tokenizers may.
CUTS = {
    r"(?<=\S)(?= )": (
        ["a", "1", "1234", ".", "!!", "'", "é", "a\u0301", "中", "🙂", "a_", "a\n b"],
        [" ", " b", "  b", "    ", "  \n", " \n\nb", " 1", " 's", " .\n", " \u0301", " \tb", " 中"],
    ),
    r"(?<=\n)(?=\S)": (
        ["\n", "a\n", "a\n\n", "a\n\n\n", "a \n", "a\n \n", ".\n", ".\n\n", "a\r\n\r\n", "\t\n"],
        ["b", "1", "123", ".", "'s", "_", "é", "\u0301", "中", "🙂", "b c\n"],
    ),
}


@dataclass(frozen=True)
class Tokens:
    """The tokens of a document, or its first ones.

    Attributes:
        ids: Token ids, int32 (tokens,).
        total: The number of tokens of the whole document.
        starts: Offset in characters at which each token begins in the text, int32 (tokens,); None
            if it was not computed.
        labels: Labels of all tokens of the document by name, int32 (total,) each: "role", an index
            into ROLES, and "turn". Empty for other documents than conversations.
    """

    ids: np.ndarray
    total: int
    starts: np.ndarray | None = None
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class SpecialTokens:
    """The special tokens that a text gets around it.

    Attributes:
        front: Ids of the tokens in front of the text.
        end: Ids of the tokens after the text.
        template: How messages and metadata.json show them, such as "text + <|endoftext|>"; "" if
            there are none.
    """

    front: tuple[int, ...] = ()
    end: tuple[int, ...] = ()
    template: str = ""

    def __len__(self) -> int:
        return len(self.front) + len(self.end)

    def around(self, tokens: Tokens, characters: int) -> Tokens:
        """Returns the tokens of a text with the special tokens around them.

        Args:
            tokens: The tokens of a text, without labels.
            characters: The number of characters of the text.
        """
        front, end = np.array(self.front, np.int32), np.array(self.end, np.int32)
        ids = np.concatenate([front, tokens.ids, end])
        starts = tokens.starts
        if starts is not None:
            starts = np.concatenate([np.zeros_like(front), starts, np.full_like(end, characters)])
        return replace(tokens, ids=ids, total=tokens.total + len(self), starts=starts)


def special_tokens_of(tokenizer: Tokenizer) -> SpecialTokens:
    """Returns the special tokens that a tokenizer adds to a text.

    Its post-processor is tried on a text of one token.

    Raises:
        InputError: If the post-processor repeats the text or leaves it out.
    """
    if tokenizer.post_processor is None:
        return SpecialTokens()
    text = Tokenizer(models.WordLevel({"text": 0}, "text")).encode("text")
    processed = tokenizer.post_processor.process(text)
    if processed.special_tokens_mask.count(0) != 1:
        raise InputError(
            "--special_tokens tokenizer: the post_processor in the model's tokenizer.json repeats "
            "texts or leaves them out; give --special_tokens none, which adds no tokens"
        )
    index, ids = processed.special_tokens_mask.index(0), tuple(processed.ids)
    if len(ids) == 1:
        return SpecialTokens()
    names = [tokenizer.id_to_token(token_id) or str(token_id) for token_id in ids]
    names[index] = "text"
    return SpecialTokens(ids[:index], ids[index + 1 :], " + ".join(names))


def tokenise(
    tokenizer: Tokenizer | None,
    contents: Sequence[Content],
    most: int | None,
    cuts: re.Pattern[str] | None,
) -> list[Tokens | str]:
    """Turns the contents of documents into tokens, without special tokens.

    Args:
        tokenizer: The tokenizer; None if all contents are token ids.
        contents: The contents.
        most: The largest number of tokens to keep of a document, from its beginning. None to keep
            all tokens, and to compute where each token begins in the text.
        cuts: The `safe_cuts` of the tokenizer; None if texts must stay whole.

    Returns:
        For each content, its tokens, or a text with the reason why the tokenizer fails on it.
    """
    if tokenizer is None:
        id_lists = [content.token_ids for content in contents]
        return [Tokens(ids, len(ids)) for ids in id_lists if ids is not None]
    try:
        return [*_tokenise_all(tokenizer, contents, most, cuts)]
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the tokenizer's native code is no Exception
        if len(contents) == 1:
            return [f"the tokenizer cannot take it: {one_line(error):.200}"]
        return [tokenise(tokenizer, [content], most, cuts)[0] for content in contents]


def _tokenise_all(
    tokenizer: Tokenizer,
    contents: Sequence[Content],
    most: int | None,
    cuts: re.Pattern[str] | None,
) -> list[Tokens]:
    """Does the work of `tokenise` for texts. Raises any exception if one of the texts fails."""
    pieces = [_pieces(content.text, cuts) for content in contents]
    texts: list[str] = []
    for content, pieces_of_content in zip(contents, pieces, strict=True):
        texts += [content.text[piece] for piece in pieces_of_content]
    with_offsets = most is None or any(content.spans for content in contents)
    # Tokenising without offsets takes a third of the time.
    encode = tokenizer.encode_batch if with_offsets else tokenizer.encode_batch_fast

    def encode_lazily() -> Iterator[Encoding]:
        for start in range(0, len(texts), PIECES_AT_ONCE):
            yield from encode(texts[start : start + PIECES_AT_ONCE], add_special_tokens=False)

    encodings = encode_lazily()
    return [
        _joined(content, pieces_of_content, encodings, most, with_offsets)
        for content, pieces_of_content in zip(contents, pieces, strict=True)
    ]


def _joined(
    content: Content,
    pieces: Sequence[slice],
    encodings: Iterator[Encoding],
    most: int | None,
    with_offsets: bool,
) -> Tokens:
    """Returns the tokens of a content, joined from the tokens of its pieces.

    Args:
        content: The content.
        pieces: The slice of the content's text for each piece.
        encodings: The tokenizer's results for the pieces of this content and of the contents after
            it. One result is taken from the iterator for each piece of this content.
        most: The largest number of tokens to keep, from the beginning; None to keep all.
        with_offsets: Whether the tokenizer has computed offsets.
    """
    ids, offsets = [], []
    for piece, encoding in zip(pieces, islice(encodings, len(pieces)), strict=True):
        ids.append(np.asarray(encoding.ids, np.int32))
        if with_offsets:
            offsets.append(piece.start + np.asarray(encoding.offsets, np.int32).reshape(-1, 2))
    total = sum(map(len, ids))
    first_ids = np.concatenate(ids)[:most].copy()  # a copy, so that the other ids are freed
    if not with_offsets:
        return Tokens(first_ids, total)
    all_offsets = np.concatenate(offsets)
    return Tokens(first_ids, total, all_offsets[:most, 0], _labels(content, all_offsets))


def safe_cuts(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    """Returns a pattern of the positions where cutting a text does not change its tokens.

    A tokenizer tokenises each word by itself. So this function checks, with the texts in CUTS,
    whether a text has the same words in two pieces as in one. Texts of Llama 2's tokenizers, for
    example, must stay whole, because they get a prefix and are not split into words. Added tokens
    may contain spaces or take the spaces beside them; the pattern excludes such positions.

    Args:
        tokenizer: The tokenizer. Checking takes about 10 ms.

    Returns:
        A pattern that matches the empty text where a text may be cut. None if texts must stay
        whole.
    """
    harmless = []
    for pattern, (endings, beginnings) in CUTS.items():
        pairs = product(endings, beginnings)
        if all(_keeps_words(tokenizer, left, right) for left, right in pairs):
            harmless.append(pattern)
    if not harmless:
        return None
    cuts = f"(?:{'|'.join(harmless)})"
    forbidden = ""
    for token in tokenizer.get_added_tokens_decoder().values():
        if token.rstrip:
            forbidden += f"(?<!{re.escape(token.content)})"
        if token.lstrip:
            forbidden += f"(?!{re.escape(token.content)})"
        for inside in re.finditer(cuts, token.content):
            before, after = token.content[: inside.start()], token.content[inside.start() :]
            forbidden += f"(?!(?<={re.escape(before)}){re.escape(after)})"
    return re.compile(cuts + forbidden)


def _keeps_words(tokenizer: Tokenizer, left: str, right: str) -> bool:
    """Returns whether a text has the same words in two pieces as in one.

    Args:
        tokenizer: The tokenizer, which splits texts into words.
        left: The text before the cut.
        right: The text after the cut.
    """
    return _words(tokenizer, left + right) == _words(tokenizer, left) + _words(tokenizer, right)


def _words(tokenizer: Tokenizer, text: str) -> list[str]:
    """Returns the words of a text without added tokens, as the tokenizer's model gets them."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    if tokenizer.pre_tokenizer is None:
        return [text]
    return [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def _pieces(text: str, cuts: re.Pattern[str] | None) -> list[slice]:
    """Returns the slice of a text for each of its pieces; a short text is a single piece.

    Args:
        text: The text.
        cuts: Pattern of the positions where the text may be cut; None if it must stay whole.
    """
    ends = [0]
    while ends[-1] < len(text) or len(ends) == 1:
        cut = None if cuts is None else cuts.search(text, ends[-1] + PIECE_CHARACTERS)
        ends.append(len(text) if cut is None else cut.end())
    return [slice(start, end) for start, end in pairwise(ends)]


def _labels(content: Content, offsets: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the role and turn of each token.

    A token that begins in the template's text and ends in a message belongs to the message.

    Args:
        content: The content.
        offsets: Offsets in characters at which each token begins and ends, int32 (tokens, 2).

    Returns:
        "role" and "turn", int32 (tokens,) each; no labels for a content without spans.
    """
    if not content.spans:
        return {}
    starts, roles, turns = np.array(content.spans, np.int32).T
    last_characters = np.maximum(offsets[:, 1] - 1, offsets[:, 0])
    first = np.searchsorted(starts, offsets[:, 0], "right") - 1
    last = np.searchsorted(starts, last_characters, "right") - 1
    spans = np.where(roles[first] == TEMPLATE, last, first)
    return {"role": roles[spans], "turn": turns[spans]}
