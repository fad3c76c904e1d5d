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
from itertools import pairwise
from operator import itemgetter
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow

from activation_extraction.common.visible import without_secrets
from activation_extraction.dataset.open_shards import OpenShards
from activation_extraction.dataset.options import BatchOptions
from activation_extraction.dataset.token_batch import TokenBatch, copy_rows, empty_batch
from activation_extraction.dataset.token_source import ChunkTokens, TokenSource
from activation_extraction.dataset.windows import Block, Chunk, Windows, cut, share, shuffled

LARGEST_READ = 8 * 2**20  # the most that is read at once
CHUNKS_IN_BUFFER = 64  # at least, so that the chunks on their way add little to the buffer
LEAST_CHUNK_BYTES, LEAST_CHUNKS = 2**18, 16  # but no smaller chunks, and yet so many in the buffer
REQUESTS = 4  # to a bucket at the same time
DIGEST = 16  # bytes of the SHA-256 of a row that stand for it
NO_ALIGNMENT = np.zeros((1, 0), np.int64)

T = TypeVar("T")
# Tokens of the first run, the numbers of those that all runs have, and these in each other run.
Aligned = tuple[ChunkTokens, np.ndarray, list[Block]]


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
    """The number of every sample that has a row, in a column of this name, beside a digest of its
    row, which includes the piece and start of a piece of a document."""
    texts = [json.dumps(row, sort_keys=True) for row in shards.columns(["row"])["row"]]
    rows = [
        None if text == "null" else hashlib.sha256(text.encode()).digest()[:DIGEST]
        for text in texts
    ]
    columns = {"row": pyarrow.array(rows, pyarrow.binary()), name: np.arange(len(rows))}
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
        row = max(sum(source.row_bytes for source in self.sources), 1)
        least = min(LEAST_CHUNK_BYTES // row, options.buffer // LEAST_CHUNKS)
        fitting = min(LARGEST_READ // row, max(options.buffer // CHUNKS_IN_BUFFER, least))
        size, seed = max(fitting, 1), options.shuffle
        by_ranges = all(source.shards.by_ranges for source in self.sources)
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

        one_by_one = not by_ranges or all(source.shards.local for source in self.sources)
        most = options.buffer // 2 // options.size * options.size
        return Windows(chunks, read, 1 if one_by_one else REQUESTS, most, seed)

    def take(self, memory: tuple[TokenBatch, ...], rows: np.ndarray) -> T:
        """Returns the tokens with these numbers, of all runs. Raises OSError."""
        runs = zip(self.sources, memory, strict=True)
        return self.form([source.take(tokens, rows) for source, tokens in runs])

    @cached_property
    def _partner(self) -> np.ndarray:
        """The number of every sample of the first run in each other run, int64 (runs, samples); -1
        if it has none there, or is not wanted."""
        partner = np.full((len(self.numbers) - 1, self.sources[0].shards.firsts[-1]), -1, np.int64)
        partner[:, self.numbers[0]] = self.numbers[1:]
        if (mask := self.sources[0].mask) is not None:
            partner[:, ~mask] = -1
        return partner

    def _align(self, chunk: Chunk) -> Aligned:
        """The tokens of a chunk of the first run that pass the filters in every run."""
        found = self.sources[0].tokens(chunk)
        partners = [self._partners(run, found) for run in range(1, len(self.sources))]
        rows = reduce(np.intersect1d, [at for at, _ in partners], np.flatnonzero(found.wanted))
        others = [Block(b.tokens, b.rows[np.searchsorted(at, rows)]) for at, b in partners]
        return found, rows, others

    def _partners(self, run: int, found: ChunkTokens) -> tuple[np.ndarray, Block]:
        """Returns which tokens of a chunk another run has and lets through, and its block of them.

        They are read in that run's order, samples that lie next to each other there at once.
        Raises ValueError if the id of a token differs.
        """
        source = self.sources[run]
        first = self.sources[0].shards.firsts[found.chunk.shard]
        partner = self._partner[run - 1][first + found.samples]
        keys = _keys(partner, found.tokens.position)  # negative without a partner
        order = np.argsort(keys)
        theirs = np.unique(partner[partner >= 0])
        shards = np.searchsorted(source.shards.firsts, theirs, "right") - 1
        apart = (np.diff(theirs, prepend=-2) != 1) | (np.diff(shards, prepend=-1) != 0)
        parts: list[tuple[np.ndarray, Block]] = []
        for begin, end in pairwise([*np.flatnonzero(apart).tolist(), len(theirs)]):
            shard = int(shards[begin])
            number = int(theirs[begin]) - source.shards.firsts[shard]
            span = source.shards.get(shard).offsets[[number, number + end - begin]]
            stretch = source.tokens(Chunk(shard, *map(int, span)))
            sought = _keys(source.shards.firsts[shard] + stretch.samples, stretch.tokens.position)
            place = np.searchsorted(keys, sought, sorter=order).clip(max=len(keys) - 1)
            rows = np.flatnonzero(keys[order[place]] == sought)
            at = order[place[rows]]
            self._compare(run, found.tokens, at, stretch.tokens, rows)
            wanted = found.wanted[at] & stretch.wanted[rows]
            block = source.with_activations(stretch, rows[wanted])
            if (small := source.are_small(block)).any():
                parts.append((at[wanted][small], Block(block.tokens, block.rows[small])))
        if not parts:
            return order[:0], Block(found.tokens, order[:0])
        at, block = np.concatenate([at for at, _ in parts]), _concatenated([b for _, b in parts])
        order = np.argsort(at)
        return at[order], Block(block.tokens, block.rows[order])

    def _blocks(self, aligned: Aligned, chunk: Chunk) -> tuple[Block, ...]:
        """The tokens of a chunk, of every run, with their activations."""
        found, rows, others = aligned
        start, source = found.chunk.start, self.sources[0]
        here = slice(*np.searchsorted(rows, [chunk.start - start, chunk.stop - start]))
        if not len(rows[here]):
            return tuple(Block(found.tokens, rows[:0]) for _ in self.sources)
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


def _keys(sample: np.ndarray, position: np.ndarray) -> np.ndarray:
    """A number for each token, from the number of its sample and its position."""
    return sample.astype(np.int64) * 2**32 + position


def _concatenated(blocks: Sequence[Block]) -> Block:
    """The rows of all blocks; a single one is not copied."""
    if len(blocks) == 1:
        return blocks[0]
    whole, filled = empty_batch(blocks[0].tokens, sum(len(block.rows) for block in blocks)), 0
    for tokens, rows in blocks:
        copy_rows(tokens, rows, whole.map(itemgetter(slice(filled, filled + len(rows)))))
        filled += len(rows)
    return Block(whole, np.arange(filled))
