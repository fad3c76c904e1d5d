"""Documents -> samples: tokenising in the background, with a cursor at every sample.

Documents are tokenised in chunks. A cursor is the stream's state before a chunk plus the number of
samples to skip within it, so that continuing from any sample re-reads one chunk at most.
"""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from activation_extraction.documents import DocumentStream
from activation_extraction.errors import InputError
from activation_extraction.packing import Cursor, Sample

CHUNK_ROWS = 64
PREVIEW_CHARACTERS = 200
T = TypeVar("T")


def load_tokenizer(folder: Path, vocab_size: int) -> PreTrainedTokenizerBase:
    """The checkpoint's own tokenizer. Raises InputError when it is broken or of another model."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{folder}: the tokenizer cannot be loaded: {reason}") from error
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= vocab_size:
        raise InputError(
            f"{folder}: the tokenizer has token id {largest}, "
            f"config.json has vocab_size {vocab_size}"
        )
    return tokenizer


def samples(
    documents: DocumentStream,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    max_samples: int | None = None,
    rank: int = 0,
    world: int = 1,
    start: Cursor | None = None,
) -> Iterator[Sample]:
    """The samples of one worker: documents cut to their first `max_tokens` tokens.

    Sample n of worker r of w has `sample_idx` n * w + r. Stops after sample `max_samples` - 1.
    `start` is a cursor of an earlier iteration over the same data.
    """
    number = skip = 0
    if start is not None:
        documents.restore(start["stream"])
        number, skip = start["samples"] - start["skip"], start["skip"]
    first = number + skip
    rows = iter(documents)
    while True:
        state = documents.state()
        chunk = list(islice(rows, CHUNK_ROWS))
        if not chunk:
            return
        kept = [document for document in chunk if document is not None]
        encoded = (
            tokenizer([d.text for d in kept], add_special_tokens=False)["input_ids"] if kept else []
        )
        tokenised = [(d, ids[:max_tokens]) for d, ids in zip(kept, encoded, strict=True) if ids]
        for offset, (document, ids) in enumerate(tokenised):
            if max_samples is not None and number >= max_samples:
                return
            if number >= first:
                yield Sample(
                    sample_idx=number * world + rank,
                    token_ids=np.asarray(ids, np.int32),
                    text_preview=document.text[:PREVIEW_CHARACTERS],
                    doc_id=document.doc_id,
                    cursor={"samples": number, "skip": offset, "stream": state},
                    next_cursor={"samples": number + 1, "skip": offset + 1, "stream": state},
                )
            number += 1


def prefetch(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yields the items of an iterator that a background thread keeps `depth` ahead.

    An exception in the iterator is raised here, in its turn.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as worker:
        pending = deque(worker.submit(next, items, None) for _ in range(depth))
        while (item := pending.popleft().result()) is not None:
            pending.append(worker.submit(next, items, None))
            yield item
