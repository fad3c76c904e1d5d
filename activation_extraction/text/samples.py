"""Documents -> samples: tokenises documents, cuts them to --max_seq_length, and keeps cursors.

Documents are tokenised in chunks. A cursor is the state of the stream before a chunk plus the
number of samples to skip within it, so continuing from any sample reads at most one chunk twice.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Encoding, Tokenizer

from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.common.late_imports import transformers
from activation_extraction.text.batch import Cursor, Sample
from activation_extraction.text.documents import Document, DocumentStream

CHUNK_ROWS = 64
CHARACTERS_PER_TOKEN = 16  # ordinary text has fewer
PIECE_CHARACTERS = 2**18  # of a long text, whose tokens are only counted
PREVIEW_CHARACTERS = 200


class Tokens(NamedTuple):
    """The first token ids of a document, and how many more it has."""

    ids: list[int]
    cut: int


def load_tokenizer(files: Iterable[Path], model_path: str, vocab_size: int) -> Tokenizer:
    """Loads the tokenizer that transformers makes of a model's files.

    files: the model's files for its tokenizer, with config.json beside them. model_path: names the
    model in messages. Raises InputError if a file is missing or broken, or belongs to a model with
    another vocabulary.
    """
    paths = {path.name: path for path in files}
    for name in ("vocab.json", "merges.txt"):
        if "tokenizer.json" not in paths and name not in paths:
            raise InputError(
                f"--model_path {model_path}: has no {name}; a tokenizer is read from "
                "tokenizer.json, or from vocab.json with merges.txt"
            )
    path = paths.get("tokenizer.json") or paths["vocab.json"]
    loader = transformers().AutoTokenizer
    try:
        loaded = loader.from_pretrained(path.parent, local_files_only=True, trust_remote_code=False)
        tokenizer: Tokenizer = loaded.backend_tokenizer
    except Exception as error:  # transformers does not say what it raises
        raise InputError(f"{path}: the tokenizer cannot be loaded: {one_line(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise InputError(
            f"{path}: the tokenizer has token id {largest}, but vocab_size in config.json is "
            f"{vocab_size}; put the model's own tokenizer there"
        )
    return tokenizer


def samples(
    documents: DocumentStream,
    tokenizer: Tokenizer,
    max_tokens: int,
    max_samples: int | None = None,
    start: Cursor | None = None,
) -> Iterator[Sample]:
    """Yields the samples of one worker: its documents, each cut to its first `max_tokens` tokens.

    Stops after `max_samples` samples, counted from the beginning. start: a cursor from an earlier
    iteration over the same data. A document without a single token gives no sample, and its row
    counts as empty; the row of one that the tokenizer cannot take cannot be used.
    """
    number = first = 0
    if start is not None:
        documents.restore(start.stream)
        number, first = start.samples - start.skip, start.samples
    rows = iter(documents)
    while True:
        state, begin = documents.state(), number
        wanted = CHUNK_ROWS if max_samples is None else min(CHUNK_ROWS, max_samples - number)
        if wanted <= 0:
            return
        chunk, failure = _read(rows, wanted)
        skipped, empty = documents.skipped_rows, documents.empty_rows
        found = [document for document in chunk if document is not None]
        tokens = _tokenise(tokenizer, [document.text for document in found], max_tokens)
        for document, each in zip(found, tokens, strict=True):
            if isinstance(each, str):
                documents.reject(document.where, each)
            elif not each.ids:
                documents.empty_rows += 1
            else:
                if number >= first:
                    # Rows are also counted here, after all rows of the chunk have been read.
                    skipped_rows = document.skipped_rows + documents.skipped_rows - skipped
                    empty_rows = document.empty_rows + documents.empty_rows - empty
                    cursor = Cursor(number, number - begin, skipped_rows, empty_rows, state)
                    yield _sample(documents.worker.sample_idx(number), document, each, cursor)
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


def _sample(sample_idx: int, document: Document, tokens: Tokens, cursor: Cursor) -> Sample:
    return Sample(
        sample_idx=sample_idx,
        token_ids=np.asarray(tokens.ids, np.int32),
        text_preview=document.text[:PREVIEW_CHARACTERS],
        doc_id=document.doc_id,
        cursor=cursor,
        next_cursor=replace(cursor, samples=cursor.samples + 1, skip=cursor.skip + 1),
        row=document.row,
        cut=tokens.cut,
    )


def _tokenise(tokenizer: Tokenizer, texts: list[str], max_tokens: int) -> list[Tokens | str]:
    """Returns the first `max_tokens` token ids of each text, or why it cannot be tokenised.

    Only the beginning of a very long text is kept. That gives the same tokens as the whole text,
    except in the last two words, which the cut may have changed. If those are needed, the whole
    text is tokenised at once; otherwise its tokens are only counted.
    """
    try:
        return _tokenise_all(tokenizer, texts, max_tokens)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic of the tokenizer's native code is no Exception
        if len(texts) == 1:
            return [f"the tokenizer cannot take it: {one_line(error):.200}"]
        return [_tokenise(tokenizer, [text], max_tokens)[0] for text in texts]


def _tokenise_all(
    tokenizer: Tokenizer, texts: Sequence[str], max_tokens: int
) -> list[Tokens | str]:
    enough = CHARACTERS_PER_TOKEN * max_tokens
    found = tokenizer.encode_batch([text[:enough] for text in texts], add_special_tokens=False)
    tokens: list[Tokens | str] = []
    for text, encoding in zip(texts, found, strict=True):
        if len(text) <= enough:
            total = len(encoding.ids)
        elif _reaches_the_end(encoding, max_tokens):
            encoding = tokenizer.encode(text, add_special_tokens=False)
            total = len(encoding.ids)
        else:
            total = _count(tokenizer, text)
        tokens.append(Tokens(encoding.ids[:max_tokens], max(total - max_tokens, 0)))
    return tokens


def _reaches_the_end(encoding: Encoding, max_tokens: int) -> bool:
    """Whether the first `max_tokens` tokens reach into the last two words."""
    words = encoding.word_ids
    return len(words) < max_tokens or (words[max_tokens - 1] or 0) >= (words[-1] or 0) - 1


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
    found = tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
    return sum(len(encoding) for encoding in found)
