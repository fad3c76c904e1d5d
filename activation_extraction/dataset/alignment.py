"""What batches are made of: the tokens of one run, or those that all of several runs have.

Samples are the same that come from the same row of the data set; their tokens are the same at the
same position. The chunks of the first run are read in its order. The tables of samples say where
the others have the same tokens, which are then read wherever they lie.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, reduce
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow

from activation_extraction.common.visible import without_secrets
from activation_extraction.dataset.open_shards import IN_FLIGHT, OpenShards
from activation_extraction.dataset.options import BatchOptions
from activation_extraction.dataset.token_batch import TokenBatch, concatenated
from activation_extraction.dataset.token_source import FoundTokens, TokenSource
from activation_extraction.dataset.windows import Block, Chunk, Windows, cut, share, shuffled

LARGEST_READ = 8 * 2**20  # bytes of a chunk: in a bucket of each hook, else of all
LEAST_READ = 2 * 2**20  # in a bucket, of each hook: whole MiB are read
CHUNKS_IN_BUFFER, LEAST_CHUNKS = 32, 8  # at least, so that tokens are mixed well
NO_ALIGNMENT = np.zeros((1, 0), np.int64)

T = TypeVar("T")
# Tokens of the first run, the numbers of those that all runs have, and these in each other run.
Aligned = tuple[FoundTokens, np.ndarray, list[Block]]


def samples_in_all(runs: Sequence[OpenShards]) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns which samples all runs have, and how many tokens each run stores of its samples.

    The first array is int64 (runs, samples): the number of each such sample in each run, in the
    order of the first one. Raises ValueError where two samples of a run come from the same row, or
    no row is in all runs; OSError for a table that is damaged.
    """
    tables = [_numbers_by_row(shards, f"run{n}") for n, shards in enumerate(runs)]
    every = reduce(lambda a, b: a.join(b, "row", join_type="inner", use_threads=False), tables)
    if not len(every):
        urls = " and ".join(without_secrets(shards.url) for shards in runs)
        raise ValueError(f"{urls}: no row of the data set has a sample in each of them")
    numbers = every.sort_by("run0").select([f"run{n}" for n, _ in enumerate(runs)])
    tokens = [shards.columns(["tokens"])["tokens"].astype(np.int64) for shards in runs]
    return np.stack([column.to_numpy() for column in numbers.columns]), tokens


def _numbers_by_row(shards: OpenShards, name: str) -> pyarrow.Table:
    """The number of every sample that has a row, in a column of this name, beside its row as JSON,
    which includes the piece and start of a piece of a document."""
    rows = [
        None if row is None else json.dumps(row, sort_keys=True)
        for row in shards.columns(["row"])["row"]
    ]
    columns = {"row": pyarrow.array(rows, pyarrow.large_string()), name: np.arange(len(rows))}
    table = pyarrow.table(columns).drop_null()
    first = table.group_by("row", use_threads=False).aggregate([(name, "min")])[f"{name}_min"]
    if len(first) < len(table):
        again = np.setdiff1d(table[name].to_numpy(), first.to_numpy())[0]
        raise ValueError(
            f"{without_secrets(shards.url)}: sample {again} has the row of another sample"
        )
    return table


@dataclass(frozen=True)
class AlignedSource(Generic[T]):
    """The tokens that one run, or all of several runs, have and let through.

    form: makes one result of a batch of each run. numbers: of several runs, see `samples_in_all`.
    """

    sources: tuple[TokenSource, ...]
    form: Callable[[Sequence[TokenBatch]], T]
    numbers: np.ndarray = field(default_factory=lambda: NO_ALIGNMENT)

    @property
    def options(self) -> BatchOptions:
        """The options of the first run, which decide the order."""
        return self.sources[0].options

    @property
    def setting(self) -> dict[str, Any]:
        """All that the order of the tokens depends on."""
        each = "\n".join(source.fingerprint for source in self.sources)
        others = [source.options.setting for source in self.sources[1:]]
        data = hashlib.sha256(each.encode()).hexdigest()
        return {"data": data, **self.options.setting, "others": others}

    @property
    def filters(self) -> list[str]:
        """The arguments that leave out tokens in any of the runs."""
        return list(dict.fromkeys(text for s in self.sources for text in s.options.filters))

    def windows(self, part: int, parts: int) -> Windows:
        """Returns what one of a DataLoader's workers reads; (0, 1) is a process without them.

        Workers share chunks of the first run, or its whole pickles, which they then read in chunks
        as well. If another run has pickles, tokens are aligned by whole shards of the first, since
        every alignment unpacks all pickles that it needs.
        """
        first, options = self.sources[0], self.options
        hooks = max(sum(len(source.options.hooks) for source in self.sources), 1)
        row = max(sum(source.row_bytes for source in self.sources), 1)
        local = all(source.shards.local for source in self.sources)
        by_ranges = all(source.shards.by_ranges for source in self.sources)
        size = LARGEST_READ * (1 if local else hooks) // row
        least = 1 if local else min(LEAST_READ * hooks // row, options.buffer // LEAST_CHUNKS)
        size = max(min(size, options.buffer // CHUNKS_IN_BUFFER), least, 1)
        seed = options.shuffle
        chunks = cut(first.chunks(), size) if by_ranges else first.chunks()
        chunks = share(shuffled(chunks, seed), options.worker, options.workers)
        chunks = share(chunks, part, parts)
        if not by_ranges:
            chunks = [
                piece
                for each in chunks
                for piece in shuffled(cut([each], size), seed, each.shard, each.start)
            ]
        whole = not all(source.shards.by_ranges for source in self.sources[1:])
        align = lru_cache(1)(self._align) if whole else self._align

        def read(chunk: Chunk) -> tuple[Block, ...]:
            return self._blocks(align(first.whole(chunk.shard) if whole else chunk), chunk)

        ahead = 1 if local or not by_ranges else max(IN_FLIGHT // hooks, 2)
        most = options.buffer // 2 // options.size * options.size
        return Windows(chunks, read, ahead, most, seed)

    def take(self, memory: tuple[TokenBatch, ...], rows: np.ndarray) -> T:
        """Returns the tokens with these numbers, of all runs. Raises OSError."""
        runs = zip(self.sources, memory, strict=True)
        return self.form([source.take(tokens, rows) for source, tokens in runs])

    @cached_property
    def _pairs(self) -> list[np.ndarray]:
        """The column of `numbers` that every sample of each run is in; -1 if it is in none, or is
        not wanted of the first run."""
        found = []
        for source, numbers in zip(self.sources, self.numbers, strict=True):
            pairs = np.full(source.shards.firsts[-1], -1, np.int64)
            pairs[numbers] = np.arange(len(numbers))
            found.append(pairs)
        if (mask := self.sources[0].mask) is not None:
            found[0][~mask] = -1
        return found

    def _align(self, chunk: Chunk) -> Aligned:
        """The tokens of a chunk of the first run that all runs have and let through."""
        ours = self.sources[0].tokens([chunk])
        found = [self._partners(run, ours) for run in range(1, len(self.sources))]
        rows = reduce(np.intersect1d, [at for at, _ in found], np.flatnonzero(ours.wanted))
        return ours, rows, [Block(b.tokens, b.rows[np.searchsorted(at, rows)]) for at, b in found]

    def _partners(self, run: int, ours: FoundTokens) -> tuple[np.ndarray, Block]:
        """Returns which tokens of the first run another run has and lets through, ascending, and
        its block of them. Raises ValueError if the id of a token differs."""
        source, parts = self.sources[run], list[tuple[np.ndarray, Block]]()
        pairs = np.unique(self._pairs[0][ours.samples])
        keys = _keys(self._pairs[0], ours)
        for chunks in source.by_shard(np.sort(self.numbers[run, pairs[pairs >= 0]])):
            theirs = source.tokens(chunks)
            their_keys = _keys(self._pairs[run], theirs)
            _, at, row = np.intersect1d(keys, their_keys, return_indices=True)
            self._compare(run, ours.tokens, at, theirs.tokens, row)
            wanted = ours.wanted[at] & theirs.wanted[row]
            block = source.with_activations(theirs, row[wanted])
            if (small := source.are_small(block)).any():
                parts.append((at[wanted][small], Block(block.tokens, block.rows[small])))
        if not parts:
            return pairs[:0], Block(ours.tokens, pairs[:0])
        at = np.concatenate([each for each, _ in parts])
        begins = np.cumsum([0, *(len(block.tokens) for _, block in parts)])
        row = np.concatenate([b.rows + n for (_, b), n in zip(parts, begins[:-1], strict=True)])
        order = np.argsort(at)
        return at[order], Block(concatenated([block.tokens for _, block in parts]), row[order])

    def _blocks(self, aligned: Aligned, chunk: Chunk) -> tuple[Block, ...]:
        """The tokens of a chunk, of every run, with their activations."""
        found, rows, others = aligned
        start, source = found.chunks[0].start, self.sources[0]
        here = slice(*np.searchsorted(rows, [chunk.start - start, chunk.stop - start]))
        first = source.with_activations(found, rows[here])
        small = source.are_small(first)
        blocks = [first, *(Block(tokens, at[here]) for tokens, at in others)]
        return tuple(Block(tokens, at[small]) for tokens, at in blocks)

    def _compare(
        self, run: int, ours: TokenBatch, at: np.ndarray, theirs: TokenBatch, row: np.ndarray
    ) -> None:
        different = np.flatnonzero(ours.token_ids[at] != theirs.token_ids[row])
        if len(different):
            i, j = at[different[0]], row[different[0]]
            told = (
                f"sample {ours.sample_idx[i]} of {self.sources[0].shards.url} and sample "
                f"{theirs.sample_idx[j]} of {self.sources[run].shards.url} come from the same row, "
                f"but the token at position {ours.position[i]} is {ours.token_ids[i]} in one and "
                f"{theirs.token_ids[j]} in the other"
            )
            raise ValueError(without_secrets(told))


def _keys(pairs: np.ndarray, found: FoundTokens) -> np.ndarray:
    """A number for each token, from the pair of its sample and its position; negative without a
    pair."""
    return pairs[found.samples] * 2**32 + found.tokens.position
