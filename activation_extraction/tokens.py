"""Documents -> samples: tokenising in the background, with a cursor at every sample.

Documents are tokenised in chunks. A cursor is the stream's state before a chunk plus the number of
samples to skip within it, so that continuing from any sample re-reads one chunk at most.
"""

import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from activation_extraction.documents import Document, DocumentStream
from activation_extraction.errors import InputError, RunError
from activation_extraction.packing import Cursor, Sample
from activation_extraction.weights import Checkpoint

CHUNK_ROWS = 64
PREVIEW_CHARACTERS = 200
# How Qwen2 splits text before byte-level BPE (the pattern in its tokenizer.json).
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
T = TypeVar("T")


def load_tokenizer(checkpoint: Checkpoint, vocab_size: int) -> Tokenizer:
    """The checkpoint's own tokenizer, from tokenizer.json or else vocab.json and merges.txt.

    Raises InputError when it is missing, broken or of another model.
    """
    path = checkpoint.find("tokenizer.json")
    try:
        if path is not None:
            tokenizer = Tokenizer.from_file(str(path))
        else:
            path = checkpoint.find("vocab.json")
            if path is None:
                raise InputError(
                    f"--model_path {checkpoint.model_path}: has neither tokenizer.json nor "
                    "vocab.json with merges.txt"
                )
            tokenizer = _from_vocabulary(checkpoint)
    except InputError:
        raise
    except Exception as error:  # what the tokenizers library raises has no narrower type
        raise InputError(f"{path}: the tokenizer cannot be loaded: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
    if largest >= vocab_size:
        raise InputError(
            f"{path}: the tokenizer has token id {largest}, config.json has vocab_size {vocab_size}"
        )
    return tokenizer


def _from_vocabulary(checkpoint: Checkpoint) -> Tokenizer:
    """A tokenizer from the files that older checkpoints have instead of tokenizer.json."""
    vocabulary, merges = checkpoint.file("vocab.json"), checkpoint.file("merges.txt")
    tokenizer = qwen2_tokenizer(models.BPE.from_file(str(vocabulary), str(merges)))
    settings = checkpoint.find("tokenizer_config.json")
    if settings is not None:
        added = json.loads(settings.read_text()).get("added_tokens_decoder", {})
        for _, token in sorted(added.items(), key=lambda item: int(item[0])):
            add = tokenizer.add_special_tokens if token["special"] else tokenizer.add_tokens
            add([AddedToken(**token)])
    return tokenizer


def qwen2_tokenizer(model: models.Model) -> Tokenizer:
    """A byte-level tokenizer that normalises and splits text as Qwen2's tokenizer.json says."""
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def samples(
    documents: DocumentStream,
    tokenizer: Tokenizer,
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
        chunk: list[Document | None] = []
        failure: RunError | None = None
        try:
            chunk.extend(islice(rows, CHUNK_ROWS))
        except RunError as error:
            failure = error
        kept = [document for document in chunk if document is not None]
        encoded = tokenizer.encode_batch([d.text for d in kept], add_special_tokens=False)
        tokenised = [(d, e.ids[:max_tokens]) for d, e in zip(kept, encoded, strict=True) if e.ids]
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
        if failure is not None:
            raise failure
        if len(chunk) < CHUNK_ROWS:
            return


def prefetch(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yields the items of an iterator that a background thread keeps `depth` ahead.

    An exception in the iterator is raised here, in its turn.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="prefetch") as worker:
        pending = deque(worker.submit(next, items, None) for _ in range(depth))
        while (item := pending.popleft().result()) is not None:
            pending.append(worker.submit(next, items, None))
            yield item
