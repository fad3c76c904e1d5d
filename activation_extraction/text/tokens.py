"""Documents -> samples: tokenising in the background, with a cursor at every sample.

Documents are tokenised in chunks. A cursor is the stream's state before a chunk plus the number of
samples to skip within it, so that continuing from any sample re-reads one chunk at most.
"""

import json
import queue
import threading
from collections.abc import Callable, Iterator
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

from activation_extraction.cli.errors import InputError, RunError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.text.documents import Document, DocumentStream
from activation_extraction.text.packing import Cursor, Sample

CHUNK_ROWS = 64
CHARACTERS_PER_TOKEN = 16  # more than any text of words has
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
    start: Cursor | None = None,
) -> Iterator[Sample]:
    """The samples of one worker: documents cut to their first `max_tokens` tokens.

    Stops after `max_samples` of them. `start` is a cursor of an earlier iteration over the same
    data. A cursor's `skipped_rows` counts the rows that were skipped before its sample.
    """
    number = skip = 0
    if start is not None:
        documents.restore(start["stream"])
        number, skip = start["samples"] - start["skip"], start["skip"]
    first = number + skip
    rows = iter(documents)
    while True:
        state = documents.state()
        wanted = CHUNK_ROWS if max_samples is None else min(CHUNK_ROWS, max_samples - number)
        if wanted <= 0:
            return
        chunk: list[tuple[Document | None, int]] = []
        failure: RunError | None = None
        try:
            for document in islice(rows, wanted):
                chunk.append((document, documents.skipped_rows))
        except RunError as error:
            failure = error
        kept = [(document, skipped) for document, skipped in chunk if document is not None]
        encoded = _encode(tokenizer, [document.text for document, _ in kept], max_tokens)
        tokenised = [(*pair, ids) for pair, ids in zip(kept, encoded, strict=True) if ids]
        for offset, (document, skipped, ids) in enumerate(tokenised):
            if number >= first:
                place = {"skipped_rows": skipped, "stream": state}
                yield Sample(
                    sample_idx=documents.worker.sample_idx(number),
                    token_ids=np.asarray(ids, np.int32),
                    text_preview=document.text[:PREVIEW_CHARACTERS],
                    doc_id=document.doc_id,
                    cursor={"samples": number, "skip": offset, **place},
                    next_cursor={"samples": number + 1, "skip": offset + 1, **place},
                )
            number += 1
        if failure is not None:
            raise failure
        if len(chunk) < wanted:
            return


def _encode(tokenizer: Tokenizer, texts: list[str], max_tokens: int) -> list[list[int]]:
    """The first `max_tokens` token ids of every text.

    Of a very long text only a beginning is tokenised. Its tokens are those of the whole text up to
    the last two words, which the cut may have changed; when they are needed, the whole is done.
    """
    enough = CHARACTERS_PER_TOKEN * max_tokens
    found = tokenizer.encode_batch([text[:enough] for text in texts], add_special_tokens=False)
    for i, text in enumerate(texts):
        if len(text) > enough:
            words = found[i].word_ids
            if len(words) < max_tokens or (words[max_tokens - 1] or 0) >= (words[-1] or 0) - 1:
                found[i] = tokenizer.encode(text, add_special_tokens=False)
    return [encoding.ids[:max_tokens] for encoding in found]


class Prefetch(Iterator[T]):
    """The items of an iterator, which a background thread keeps up to `depth` ahead.

    An exception in the iterator is raised here, in its turn. While waiting, `stopped` is asked
    several times a second; when it says so the iteration ends.
    """

    def __init__(
        self, items: Iterator[T], depth: int, stopped: Callable[[], object] = lambda: False
    ) -> None:
        self.stopped = stopped
        self._head: T | None = None
        self._ready: queue.Queue[tuple[T | None, Exception | None]] = queue.Queue(depth)
        threading.Thread(target=self._run, args=(items,), name="prefetch", daemon=True).start()

    def _run(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                self._ready.put((item, None))
        except Exception as error:
            self._ready.put((None, error))
        self._ready.put((None, None))

    @property
    def ready(self) -> int:
        """How many items wait."""
        return self._ready.qsize()

    def peek(self) -> T | None:
        """The next item, which stays the next one; None at the end."""
        self._head = next(self, None)
        return self._head

    def __next__(self) -> T:
        if self._head is not None:
            item, self._head = self._head, None
            return item
        while not self.stopped():
            try:
                found, error = self._ready.get(timeout=0.2)
            except queue.Empty:
                continue
            if error is not None:
                raise error
            if found is None:
                self._ready.put((None, None))  # for whoever asks again
                break
            return found
        raise StopIteration
