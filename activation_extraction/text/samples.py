"""Documents -> samples: tokenises documents, cuts them to --max_seq_length, and keeps cursors.

Documents are tokenised in chunks. A cursor is the state of the stream before a chunk plus the
number of samples to skip within it, so continuing from any sample reads at most one chunk twice.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

import numpy as np
from tokenizers import Tokenizer

from activation_extraction.cli.errors import RunError
from activation_extraction.text.batch import Cursor, Sample
from activation_extraction.text.documents import Document, DocumentStream

CHUNK_ROWS = 64
CHARACTERS_PER_TOKEN = 16  # ordinary text has fewer
PREVIEW_CHARACTERS = 200


def samples(
    documents: DocumentStream,
    tokenizer: Tokenizer,
    max_tokens: int,
    max_samples: int | None = None,
    start: Cursor | None = None,
) -> Iterator[Sample]:
    """The samples of one worker: its documents, each cut to its first `max_tokens` tokens.

    Stops after `max_samples` samples, counted from the beginning. start: a cursor from an earlier
    iteration over the same data. A document without a single token gives no sample.
    """
    number = skip = 0
    if start is not None:
        documents.restore(start.stream)
        number, skip = start.samples - start.skip, start.skip
    first = number + skip
    rows = iter(documents)
    while True:
        state = documents.state()
        wanted = CHUNK_ROWS if max_samples is None else min(CHUNK_ROWS, max_samples - number)
        if wanted <= 0:
            return
        count, read, failure = _read(rows, documents, wanted)
        texts = [document.text for document, _ in read]
        tokenised = [
            (document, skipped, ids)
            for (document, skipped), ids in zip(
                read, _encode(tokenizer, texts, max_tokens), strict=True
            )
            if ids
        ]
        for offset, (document, skipped, ids) in enumerate(tokenised):
            if number >= first:
                cursor = Cursor(number, offset, skipped, state)
                yield Sample(
                    sample_idx=documents.worker.sample_idx(number),
                    token_ids=np.asarray(ids, np.int32),
                    text_preview=document.text[:PREVIEW_CHARACTERS],
                    doc_id=document.doc_id,
                    cursor=cursor,
                    next_cursor=replace(cursor, samples=number + 1, skip=offset + 1),
                )
            number += 1
        if failure is not None:
            raise failure
        if count < wanted:
            return


def _read(
    rows: Iterator[Document | None], documents: DocumentStream, count: int
) -> tuple[int, list[tuple[Document, int]], RunError | None]:
    """Reads up to `count` rows; returns how many there were, their documents, and any error.

    Each document comes with the number of rows that had been skipped by then. After an error the
    rows before it are still returned.
    """
    read = 0
    found: list[tuple[Document, int]] = []
    try:
        for document in islice(rows, count):
            read += 1
            if document is not None:
                found.append((document, documents.skipped_rows))
    except RunError as error:
        return read, found, error
    return read, found, None


def _encode(tokenizer: Tokenizer, texts: list[str], max_tokens: int) -> list[list[int]]:
    """The first `max_tokens` token ids of each text.

    Only the beginning of a very long text is tokenised. That gives the same tokens as the whole
    text, except in the last two words, which the cut may have changed. If those are needed, the
    whole text is tokenised.
    """
    enough = CHARACTERS_PER_TOKEN * max_tokens
    found = tokenizer.encode_batch([text[:enough] for text in texts], add_special_tokens=False)
    for i, text in enumerate(texts):
        if len(text) > enough:
            words = found[i].word_ids
            if len(words) < max_tokens or (words[max_tokens - 1] or 0) >= (words[-1] or 0) - 1:
                found[i] = tokenizer.encode(text, add_special_tokens=False)
    return [encoding.ids[:max_tokens] for encoding in found]
