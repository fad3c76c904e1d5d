"""TokenSource: the tokens of a run, and which of them pass the filters."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from activation_extraction.common.choices import ROLES
from activation_extraction.dataset.open_shards import OpenShards, as_os_errors
from activation_extraction.dataset.options import BatchOptions
from activation_extraction.dataset.token_batch import (
    ByHook,
    TokenBatch,
    concatenated,
    copy_rows,
    empty_batch,
)
from activation_extraction.dataset.windows import Block, Chunk
from activation_extraction.store.shard_reader import begin_rows

LEAST_GAP = 2**21  # bytes that are read rather than left out between two tokens


class FoundTokens(NamedTuple):
    """All tokens of some chunks, one after the other, without activations. samples: the number of
    each one's sample in the run. wanted: whether each passes the filters, but for its norm."""

    chunks: Sequence[Chunk]
    tokens: TokenBatch
    samples: np.ndarray
    wanted: np.ndarray


@dataclass(frozen=True)
class Span(Chunk):
    """A part of a chunk. at: the number of its first token among the tokens found."""

    at: int


@dataclass(frozen=True)
class TokenSource:
    """What batches of one run are made of: its shards, and the complete options.

    mask: bool (samples,), the samples that are wanted; None for all.
    """

    shards: OpenShards
    options: BatchOptions
    mask: np.ndarray | None = None

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what is stored."""
        files = "".join(f"{folder}/{commit.sha256}\n" for folder, commit in self.shards.shards)
        return hashlib.sha256(files.encode()).hexdigest()

    @property
    def row_bytes(self) -> int:
        """The bytes of one token at the hooks in memory."""
        return self.shards.row_bytes(self.options.hooks)

    def columns(self, names: Sequence[str], sample_idx: np.ndarray) -> dict[str, np.ndarray]:
        """Returns columns of the table of samples for some samples, as objects. Raises OSError."""
        columns = self.shards.columns(dict.fromkeys(["sample_idx", *names]))
        indices, rows = self._ascending
        found = rows[np.searchsorted(indices, sample_idx)]
        return {name: columns[name][found] for name in names}

    @cached_property
    def _ascending(self) -> tuple[np.ndarray, np.ndarray]:
        """Every `sample_idx`, ascending, and the row of each in the table of all samples."""
        indices = self.shards.columns(["sample_idx"])["sample_idx"].astype(np.int64)
        rows = np.argsort(indices)
        return indices[rows], rows

    def of(self, samples: np.ndarray) -> "TokenSource":
        """Returns the same source, but only with tokens of the samples with these numbers."""
        mask = np.isin(np.arange(self.shards.firsts[-1]), samples)
        return replace(self, mask=mask if self.mask is None else mask & self.mask)

    def whole(self, shard: int) -> Chunk:
        """Returns all tokens of a shard."""
        return Chunk(shard, 0, self.shards.commits[shard].tokens)

    def chunks(self) -> list[Chunk]:
        """Returns the shards that have samples which are wanted."""
        firsts = self.shards.firsts
        return [
            self.whole(shard)
            for shard, _ in enumerate(self.shards.commits)
            if self.mask is None or self.mask[firsts[shard] : firsts[shard + 1]].any()
        ]

    def by_shard(self, samples: np.ndarray) -> Iterator[list[Chunk]]:
        """Yields the tokens of the samples with these numbers, which ascend, from shard to shard:
        samples that lie side by side are one chunk. Raises OSError."""
        shards = np.searchsorted(self.shards.firsts, samples, "right") - 1
        for shard in np.unique(shards).tolist():
            numbers = samples[shards == shard] - self.shards.firsts[shard]
            offsets = self.shards.get(shard).offsets
            yield [
                Chunk(shard, int(offsets[each[0]]), int(offsets[each[-1] + 1]))
                for each in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
            ]

    def tokens(self, chunks: Sequence[Chunk]) -> FoundTokens:
        """Returns all tokens of some chunks, and which of them are wanted. Raises OSError."""
        each, samples = zip(*map(self._tokens, chunks), strict=True)
        tokens, samples = concatenated(each), np.concatenate(samples)
        wanted = tokens.position >= self.options.skip_first
        if self.mask is not None:
            wanted &= self.mask[samples]
        if self.options.roles is not None:
            wanted &= np.isin(tokens.role, [ROLES.index(role) for role in self.options.roles])
        return FoundTokens(chunks, tokens, samples, wanted)

    def _tokens(self, chunk: Chunk) -> tuple[TokenBatch, np.ndarray]:
        span = chunk.start, chunk.stop
        with as_os_errors():
            reader = self.shards.get(chunk.shard)
            token_ids, position = reader.tokens(*span)
            labels = reader.labels(*span)
        if self.options.roles is not None and "role" not in labels:
            folder, commit = self.shards.shards[chunk.shard]
            raise OSError(f"{self.shards.url}: {folder}/{commit.file} has no roles")
        samples = np.searchsorted(reader.offsets, np.arange(*span), "right") - 1
        shared = token_ids, reader.sample_idx[samples], position
        hooks = ByHook[np.ndarray]({}, self.shards.hooks.aliases)
        tokens = TokenBatch(hooks, *shared, labels.get("role"), labels.get("turn"))
        return tokens, self.shards.firsts[chunk.shard] + samples

    def with_activations(self, found: FoundTokens, rows: np.ndarray) -> Block:
        """Returns these tokens with their activations. Raises OSError.

        Activations are views of the file where that is possible. Encoded ones are decoded to the
        dtype of the result. What lies between tokens that are far apart is not read.
        """
        if not len(rows):
            return Block(found.tokens, rows)
        hooks, names, dtype = self.shards.hooks, self.options.hooks, self.options.dtype
        spans = self._spans(found.chunks, np.sort(rows))
        waiting = []
        with as_os_errors():
            for span in spans:
                reader, place = self.shards.get(span.shard), (span.start, span.stop)
                asked = {n: begin_rows(reader, n, hooks[n], place, dtype) for n in names}
                waiting.append((span.at, len(span), asked))
            parts = []
            for at, tokens, asked in waiting:
                values = {name: wait() for name, wait in asked.items()}
                part = found.tokens.map(itemgetter(slice(at, at + tokens)))
                parts.append(replace(part, activations=ByHook(values, hooks.aliases)))
        firsts = np.array([span.at for span in spans])
        kept = np.cumsum([0, *map(len, spans)])  # where each begins among those that are read
        of_span = np.searchsorted(firsts, rows, "right") - 1
        return Block(concatenated(parts), rows - firsts[of_span] + kept[of_span])

    def _spans(self, chunks: Sequence[Chunk], rows: np.ndarray) -> list["Span"]:
        """What to read of some chunks for these of their tokens, which ascend."""
        begins = np.cumsum([0, *map(len, chunks)])
        of_chunk = np.searchsorted(begins, rows, "right") - 1
        widest = max((self.shards.row_bytes([name]) for name in self.options.hooks), default=0)
        apart = (np.diff(of_chunk) != 0) | (np.diff(rows) * widest > LEAST_GAP)
        cuts = np.flatnonzero(apart)
        spans = []
        for first, last in zip([0, *cuts + 1], [*cuts, len(rows) - 1], strict=True):
            chunk, begin = chunks[of_chunk[first]], int(begins[of_chunk[first]])
            at, stop = int(rows[first]), int(rows[last]) + 1
            offset = chunk.start - begin
            spans.append(Span(chunk.shard, at + offset, stop + offset, at))
        return spans

    def are_small(self, block: Block) -> np.ndarray:
        """Returns whether the norms of each row of a block are within the limits."""
        if not len(block.rows):  # nothing has been read
            return np.ones(0, bool)
        small = np.ones(len(block.tokens), bool)
        for hook, limit in self.options.max_norm.items():
            small &= np.linalg.norm(block.tokens[hook].astype(np.float32), axis=1) <= limit
        return small[block.rows]

    def take(self, tokens: TokenBatch, rows: np.ndarray) -> TokenBatch:
        """Returns the tokens with these numbers as a batch of its own. Raises OSError."""
        dtypes: dict[str, str] = {}
        if self.options.dtype is not None:
            floats = [name for name in self.options.hooks if self.shards.hooks[name].activations]
            dtypes = dict.fromkeys(floats, self.options.dtype)
        batch = empty_batch(tokens, len(rows), dtypes)
        copy_rows(tokens, rows, batch)
        if names := self.options.columns:
            batch = replace(batch, columns=self.columns(names, batch.sample_idx))
        return batch
