"""Documents -> samples: tokenises documents, cuts or splits them, and keeps cursors.

Documents are tokenised in chunks. A cursor is the state of the documents before a chunk plus the
number of samples to skip within it. A run that continues leaves out the samples that are stored.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.common.late_imports import transformers
from activation_extraction.common.log import log
from activation_extraction.text.batch import Cursor, Sample, StoredSample
from activation_extraction.text.documents import Document
from activation_extraction.text.mixture import Documents
from activation_extraction.text.rows import TEMPLATE, Content
from activation_extraction.text.token_choice import TokenChoice

CHUNK_ROWS = 64
CHARACTERS_PER_TOKEN = 16  # ordinary text has fewer
MARKER_CHARACTERS = 64  # such tokens as <|object_ref_start|> have fewer
PIECE_CHARACTERS = 2**18  # of a long text, whose tokens are only counted
PREVIEW_CHARACTERS = 200
TOKENIZER_JSON = "tokenizer.json"
# Of many scripts, with marks, digits, spaces and forms that a normaliser changes: where tokenizers
# differ in how they split words, they differ in one of these.
PROBES = (
    "The 1,234.5 words'll end\n\n  here\t\tin  CODE_x[0];\r\n",
    "déjà vu, nai\u0308ve Straße ﬁn Å x\u0332y",
    "tiếng Việt tie\u0302\u0301ng",
    "русский язык, й и\u0306, українська",
    "ελληνικά, ά α\u0301",
    "مُحَمَّد العَرَبِيَّة ١٢٣",
    "עִבְרִית שָׁלוֹם",
    "हिन्दी विकिपीडिया १२३",
    "বাংলা ভাষা",
    "தமிழ் மொழி",
    "తెలుగు ಕನ್ನಡ മലയാളം සිංහල",
    "ภาษาไทย ที่นี่ น้ำ",
    "ພາສາລາວ ភាសាខ្មែរ မြန်မာဘာသာ བོད་སྐད་",
    "中文，漢字。日本語 か\u3099 カタカナ 한국어 각",
    "ქართული հայերեն አማርኛ ᠮᠣᠩᠭᠣᠯ",
    "👩🏽‍💻❤️ 🇫🇷 ∑∞ ½ ① Ａ１",
)


class ChangedDataError(RunError):
    """The data set gives another row for a sample that is stored."""


@dataclass(frozen=True)
class SampleForm:
    """How documents become samples.

    length: the most tokens of a sample. split: whether a longer document becomes several samples;
    it is cut otherwise. overlap: how many tokens at the start of a piece, but of the first one, are
    those at the end of the piece before; they are read as context, and never kept.
    """

    length: int
    split: bool = False
    overlap: int = 0
    choice: TokenChoice = TokenChoice()

    @property
    def everything(self) -> bool:
        """Whether all tokens of all samples are kept, unless a row says which."""
        return self.choice.everything and not self.overlap

    def pieces(self, tokens: int) -> list[range]:
        """Returns the tokens of each sample of a document."""
        if not self.split or tokens <= self.length:
            return [range(min(tokens, self.length))]
        starts = range(0, tokens - self.overlap, self.length - self.overlap)
        return [range(start, min(start + self.length, tokens)) for start in starts]


class Limits(NamedTuple):
    """The most samples of a worker, and the most tokens that they keep; None for no limit."""

    max_samples: int | None
    max_tokens: int | None

    def reached(self, samples: int, tokens: int) -> bool:
        """Returns whether so many samples, or tokens, are enough."""
        have = (samples, self.max_samples), (tokens, self.max_tokens)
        return any(most is not None and count >= most for count, most in have)


@dataclass(frozen=True)
class Tokens:
    """The first tokens of a document, and how many it has. labels: as of the Sample.

    starts: where each begins in the text, in characters; None for token ids.
    """

    ids: np.ndarray
    total: int
    starts: np.ndarray | None = None
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)


def load_tokenizer(files: Iterable[Path], model_path: str, vocab_size: int) -> Tokenizer:
    """Loads the tokenizer in tokenizer.json, or what transformers makes of the other files.

    files: the model's files for its tokenizer, with config.json beside them. model_path: names the
    model in messages. A line says where transformers would not follow tokenizer.json. Raises
    InputError if a file is missing or broken, or belongs to a model with another vocabulary.
    """
    path = tokenizer_file(files, model_path)
    own = pretrained(path)
    tokenizer: Tokenizer = own.backend_tokenizer
    if path.name == TOKENIZER_JSON:
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises no other type
            message = f"{path}: the tokenizer cannot be loaded: {one_line(error)}"
            raise InputError(message) from error
        if (probe := _first_difference(tokenizer, own.backend_tokenizer)) is not None:
            other = f"{type(own).__name__} of transformers makes other tokens of {probe!r}"
            log.info("token ids are those of %s; %s", path, other)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise InputError(
            f"{path}: the tokenizer has token id {largest}, but vocab_size in config.json is "
            f"{vocab_size}; put the model's own tokenizer there"
        )
    return tokenizer


def tokenizer_file(files: Iterable[Path], model_path: str) -> Path:
    """Returns the file that the vocabulary is read from. Raises InputError if one is missing."""
    paths = {path.name: path for path in files}
    for name in ("vocab.json", "merges.txt"):
        if TOKENIZER_JSON not in paths and name not in paths:
            raise InputError(
                f"--model_path {model_path}: has no {name}; a tokenizer is read from "
                f"{TOKENIZER_JSON}, or from vocab.json with merges.txt"
            )
    return paths.get(TOKENIZER_JSON) or paths["vocab.json"]


def _first_difference(tokenizer: Tokenizer, other: Tokenizer) -> str | None:
    """Returns the first probe of which two tokenizers make other tokens; None if there is none."""
    both = tokenizer, other
    added = {token.content for each in both for token in each.get_added_tokens_decoder().values()}
    for probe in (*PROBES, *sorted(added)):
        ids, others = (each.encode(probe, add_special_tokens=False).ids for each in both)
        if ids != others:
            return probe
    return None


@lru_cache(1)
def pretrained(path: Path) -> Any:
    """Returns the tokenizer of transformers beside a file. Raises InputError."""
    loader = transformers().AutoTokenizer
    try:
        return loader.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers does not say what it raises
        raise InputError(f"{path}: the tokenizer cannot be loaded: {one_line(error)}") from error


def samples(
    documents: Documents,
    tokenizer: Tokenizer | None,
    form: SampleForm,
    max_samples: int | None = None,
    start: Cursor | None = None,
    max_tokens: int | None = None,
    stored: Mapping[int, StoredSample] = MappingProxyType({}),
    until: int | None = None,
) -> Iterator[Sample]:
    """Yields the samples of one worker that are not stored.

    tokenizer: None if documents are token ids. start: a cursor from an earlier iteration over the
    same data. stored: by `sample_idx`. until: the number of the first sample that is not read.
    Stops after `max_samples` samples, or once the samples keep `max_tokens` tokens: the last one is
    cut to end there. Both count from the beginning of the data, with stored samples as they are
    stored. A document without a single token gives no sample, and its row counts as empty; the row
    of one that the tokenizer cannot take cannot be used. Raises ChangedDataError if a stored sample
    now comes from another row.
    """
    limits = Limits(max_samples, max_tokens)
    here = start or Cursor(0)
    if here.stream:
        documents.restore(here.stream)
    pieces = _pieces(documents, tokenizer, form, here, max_samples)
    number, tokens = here.samples, here.tokens
    while not limits.reached(number, tokens) and number != until:
        piece = next(pieces, None)
        if piece is None:
            return
        here = Cursor(*piece.position, tokens)
        sample_idx = documents.worker.sample_idx(number)
        if (known := stored.get(sample_idx)) is None:
            sample = _sample(sample_idx, piece, form, here, limits)
            tokens += sample.num_kept
            yield sample
        else:
            if dict(known.row) != piece.row:
                raise ChangedDataError(
                    f"sample {sample_idx}: was stored from row {json.dumps(dict(known.row))}, but "
                    f"the data set now gives it row {json.dumps(piece.row)}",
                    remedy="the data set has changed: restore it, or give another --output_dir",
                )
            tokens += known.tokens
        number += 1
    # What was read on does not count.
    documents.counts.skipped, documents.counts.empty = here.skipped_rows, here.empty_rows


class _Piece(NamedTuple):
    """A document, or a piece of one. number: of the piece in the document. row: as of the Sample.

    position: the fields of the cursor that continues here, up to `stream`.
    """

    document: Document
    tokens: Tokens
    number: int
    span: range
    row: dict[str, Any]
    position: tuple[int, int, int, int, dict[str, Any]]


def _pieces(
    documents: Documents,
    tokenizer: Tokenizer | None,
    form: SampleForm,
    start: Cursor,
    max_samples: int | None,
) -> Iterator[_Piece]:
    """Yields what becomes a sample each, from `start` on. It reads ahead, but not for more samples
    than `max_samples`."""
    number = start.samples - start.skip
    rows, counts = iter(documents), documents.counts
    while True:
        state, begin = documents.state(), number
        wanted = CHUNK_ROWS if max_samples is None else min(CHUNK_ROWS, max_samples - number)
        chunk, failure = _read(rows, wanted)
        skipped, empty = counts.skipped, counts.empty
        found = [document for document in chunk if document is not None]
        tokens = _tokens(tokenizer, [document.content for document in found], form)
        for document, each in zip(found, tokens, strict=True):
            if isinstance(each, str):
                counts.reject(document.where, each)
                continue
            if not len(each.ids):
                counts.empty += 1
                continue
            # Rows are also counted here, after all rows of the chunk have been read.
            skipped_rows = document.skipped_rows + counts.skipped - skipped
            empty_rows = document.empty_rows + counts.empty - empty
            for item, span in enumerate(form.pieces(each.total)):
                if number >= start.samples:
                    own = {"piece": item, "start": span.start} if form.split else {}
                    position = number, number - begin, skipped_rows, empty_rows, state
                    yield _Piece(document, each, item, span, {**document.row, **own}, position)
                number += 1
        if failure is not None:
            raise failure
        if len(chunk) < wanted:
            return


def _read(
    rows: Iterator[Document | None], count: int
) -> tuple[list[Document | None], RunError | None]:
    """Reads up to `count` rows; returns those before an error, and the error."""
    chunk: list[Document | None] = []
    try:
        for document in islice(rows, count):
            chunk.append(document)
    except RunError as error:
        return chunk, error
    return chunk, None


def _sample(
    sample_idx: int, piece: _Piece, form: SampleForm, here: Cursor, limits: Limits
) -> Sample:
    """Makes the sample of one piece of a document, cut where the limit of tokens is reached.

    What comes after a token does not change its activations.
    """
    document, tokens, span = piece.document, piece.tokens, piece.span
    content, part = document.content, slice(span.start, span.stop)
    ids, labels = tokens.ids[part], {name: values[part] for name, values in tokens.labels.items()}
    kept = _kept(sample_idx, piece, form, ids, labels)
    count, stop = len(ids if kept is None else kept), len(ids)
    if limits.max_tokens is not None and count > limits.max_tokens - here.tokens:
        count = limits.max_tokens - here.tokens
        kept = None if kept is None else kept[:count]
        stop = count if kept is None else int(kept[-1]) + 1
    after = Cursor(here.samples + 1, here.skip + 1, *piece.position[2:], here.tokens + count)
    followed = form.split and not limits.reached(after.samples, after.tokens)
    cut = 0 if followed else tokens.total - span.start - stop  # the next piece has the rest
    stop = stop if count else 0
    at = 0 if tokens.starts is None or not piece.number else int(tokens.starts[span.start])
    return Sample(
        sample_idx=sample_idx,
        token_ids=ids[:stop],
        text_preview=content.text[at : at + PREVIEW_CHARACTERS],
        doc_id=document.doc_id,
        cursor=here,
        next_cursor=after,
        row=piece.row,
        cut=cut,
        columns=document.columns,
        labels={name: values[:stop] for name, values in labels.items()},
        kept=kept,
    )


def _kept(
    sample_idx: int,
    piece: _Piece,
    form: SampleForm,
    ids: np.ndarray,
    labels: Mapping[str, np.ndarray],
) -> np.ndarray | None:
    """Returns the positions of the tokens that a sample keeps; None for all."""
    mask = piece.document.content.mask
    if form.everything and mask is None:
        return None
    part = slice(piece.span.start, piece.span.stop)
    allowed = np.ones(len(ids), bool) if mask is None else mask[part].copy()
    allowed[: form.overlap if piece.number else 0] = False
    return form.choice.kept(sample_idx, ids, labels, allowed)


def _tokens(
    tokenizer: Tokenizer | None, contents: Sequence[Content], form: SampleForm
) -> list[Tokens | str]:
    """The tokens of each document, or why it cannot be tokenised."""
    if tokenizer is None:
        given = [content.token_ids for content in contents]
        return [Tokens(ids, len(ids)) for ids in given if ids is not None]
    return _tokenise(tokenizer, contents, None if form.split else form.length)


def _tokenise(
    tokenizer: Tokenizer, contents: Sequence[Content], most: int | None
) -> list[Tokens | str]:
    """Returns the first `most` tokens of each text, or why it cannot be tokenised.

    most: None for all of them. Only the beginning of a very long text is kept. That gives the same
    tokens as the whole text, except in the last two words and in a marker at its end, which the cut
    may have changed. If those are needed, the whole text is tokenised at once; otherwise its tokens
    are only counted.
    """
    try:
        return _tokenise_all(tokenizer, contents, most)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the tokenizer's native code is no Exception
        if len(contents) == 1:
            return [f"the tokenizer cannot take it: {one_line(error):.200}"]
        return [_tokenise(tokenizer, [content], most)[0] for content in contents]


def _tokenise_all(
    tokenizer: Tokenizer, contents: Sequence[Content], most: int | None
) -> list[Tokens | str]:
    enough = None if most is None else CHARACTERS_PER_TOKEN * most + MARKER_CHARACTERS
    texts = [content.text for content in contents]
    encoded = tokenizer.encode_batch([text[:enough] for text in texts], add_special_tokens=False)
    tokens: list[Tokens | str] = []
    for content, encoding in zip(contents, encoded, strict=True):
        text, total = content.text, len(encoding.ids)
        if most is not None and enough is not None and len(text) > enough:
            if _reaches_the_end(encoding, most):
                encoding = tokenizer.encode(text, add_special_tokens=False)
                total = len(encoding.ids)
            else:
                total = max(_count(tokenizer, text), most)
        ids = np.asarray(encoding.ids[:most], np.int32)
        starts, labels = None, {}
        if content.spans or most is None:
            offsets = np.asarray(encoding.offsets[:most], np.int32).reshape(-1, 2)
            starts, labels = offsets[:, 0], _labels(content, offsets)
        tokens.append(Tokens(ids, total, starts, labels))
    return tokens


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


def _reaches_the_end(encoding: Encoding, max_tokens: int) -> bool:
    """Whether the first `max_tokens` tokens reach into the last two words, or a marker's length."""
    words, offsets = encoding.word_ids, encoding.offsets
    return (
        len(words) < max_tokens
        or (words[max_tokens - 1] or 0) >= (words[-1] or 0) - 1
        or offsets[max_tokens - 1][1] > offsets[-1][1] - MARKER_CHARACTERS
    )


def _count(tokenizer: Tokenizer, text: str) -> int:
    """Counts the tokens of a long text. It is tokenised in pieces, which takes less memory.

    A piece ends with a line, where Qwen's words end, too; so the count is exact unless a piece has
    no end of a line, or whitespace follows it: each of these may add a token.
    """
    pieces, start = [], 0
    while start < len(text):
        stop = start + PIECE_CHARACTERS
        if stop < len(text):
            stop = (text.rfind("\n", start, stop) + 1) or stop
        pieces.append(text[start:stop])
        start = stop
    encoded = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    return sum(len(encoding) for encoding in encoded)
