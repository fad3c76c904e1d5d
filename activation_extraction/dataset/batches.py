"""Batches of tokens: an iterator with an exact state, which can be copied to other processes.

A TokenSource has the tokens of a run in chunks, and says which of them a worker reads, in which
order. Batches are shuffled in bounded memory by windows of tokens out of many shards (windows.py).
"""

import hashlib
import json
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from operator import attrgetter
from typing import Any

import numpy as np

from activation_extraction.common.choices import ROLES
from activation_extraction.common.errors import RunError
from activation_extraction.common.visible import counted
from activation_extraction.dataset.open_shards import OpenShards, value_of
from activation_extraction.dataset.token_batch import ByHook, TokenBatch, copy_rows, empty_batch
from activation_extraction.dataset.windows import Block, Chunk, Plan, Position, Window, Windows
from activation_extraction.store.commit import Commit
from activation_extraction.store.shard import TableRow
from activation_extraction.store.shard_reader import ShardReader, read_by_ranges

CHUNK_BYTES = 8 * 2**20  # the most that is read at once
CHUNKS_IN_BUFFER = 64  # at least, so that the chunks on their way add little to the buffer
LEAST_CHUNK_BYTES, LEAST_CHUNKS = 2**18, 16  # but no smaller chunks, and yet so many in the buffer
REQUESTS = 4  # to a bucket at the same time


@dataclass(frozen=True)
class BatchOptions:
    """The arguments of `ActivationDataset.batches`, checked and complete."""

    size: int
    hooks: tuple[str, ...]
    shuffle: int | None
    buffer: int
    skip_first: int
    max_norm: Mapping[str, float]
    dtype: str | None
    worker: int
    workers: int
    roles: tuple[str, ...] | None = None
    where: str | None = None  # a digest of the mask
    columns: tuple[str, ...] = ()


def as_mask(mask: Any, samples: int) -> np.ndarray:
    """Returns a mask over so many samples as an array. Raises ValueError for anything else."""
    found = values = np.asarray(mask)
    if found.dtype == object or not found.size:  # of pandas or pyarrow, where null is possible
        values = np.array([v for v in found.flat if isinstance(v, bool | np.bool_)], bool)
    if values.dtype != bool or not values.shape == found.shape == (samples,):
        raise ValueError(
            f"where: {found.dtype}, shape {found.shape}: expected true or false, never null, for "
            f"each of {counted(samples, 'sample')}"
        )
    return values


def digest_of_mask(mask: np.ndarray) -> str:
    """Returns the SHA-256 of a mask."""
    return hashlib.sha256(np.packbits(mask).tobytes()).hexdigest()


@dataclass(frozen=True)
class TokenSource:
    """What batches are made of: the shards of a run. local: whether they are files here. mask: bool
    (samples,), the samples that are wanted; None for all."""

    shards: OpenShards
    local: bool
    mask: np.ndarray | None = None

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what is stored."""
        files = "".join(f"{folder}/{commit.sha256}\n" for folder, commit in self.shards.shards)
        return hashlib.sha256(files.encode()).hexdigest()

    @cached_property
    def _rows(self) -> tuple[np.ndarray, list[TableRow]]:
        """Every `sample_idx`, ascending, and the row of each in the table of samples."""
        rows = sorted(self.shards.rows(), key=attrgetter("sample_idx"))
        return np.array([row.sample_idx for row in rows], np.int64), rows

    def columns(self, names: Sequence[str], sample_idx: np.ndarray) -> dict[str, np.ndarray]:
        """Returns columns of the table of samples for some samples, as objects. Raises OSError."""
        indices, rows = self._rows
        found = np.searchsorted(indices, sample_idx).clip(max=len(indices) - 1)
        if (indices[found] != sample_idx).any():
            raise OSError(f"{self.shards.url}: a table of samples is of others than its shard")
        columns = {}
        for name in names:
            columns[name] = np.empty(len(found), object)
            columns[name][:] = [value_of(rows[number], name) for number in found]
        return columns

    @cached_property
    def _firsts(self) -> list[int]:
        """The number of samples before each shard."""
        return [0, *accumulate(commit.count for commit in self._commits)]

    def _mask_of(self, shard: int) -> np.ndarray | None:
        """Which samples of a shard are wanted; None for all."""
        return None if self.mask is None else self.mask[slice(*self._firsts[shard : shard + 2])]

    def dtypes(self, options: BatchOptions) -> dict[str, str]:
        """Returns the dtype of the result, by hook, where it may not be as stored."""
        if options.dtype is None:
            return {}
        hooks = [name for name in options.hooks if not self.shards.hooks[name].integers]
        return dict.fromkeys(hooks, options.dtype)

    @property
    def _commits(self) -> list[Commit]:
        return [commit for _, commit in self.shards.shards]

    def plan(self, options: BatchOptions, part: int, parts: int) -> Plan:
        """What one of a DataLoader's workers reads; (0, 1) stands for a process without them.

        Workers share chunks, or whole pickles, which they then read in chunks as well.
        """
        size, seed = self._chunk_size(options), options.shuffle
        chunks = [
            Chunk(number, 0, commit.tokens)
            for number, commit in enumerate(self._commits)
            if (mask := self._mask_of(number)) is None or mask.any()
        ]
        by_ranges = all(map(read_by_ranges, self._commits))
        if by_ranges:
            chunks = _cut(chunks, size)
        chunks = _shuffled(chunks, seed)
        chunks = _share(chunks, options.worker, options.workers)
        chunks = _share(chunks, part, parts)
        if by_ranges:
            read = partial(self._read, options, self.shards.get)
            return Plan(chunks, read, 1 if self.local else REQUESTS)
        chunks = [piece for each in chunks for piece in _shuffled(_cut([each], size), seed, each)]
        unpack = lru_cache(1)(partial(self.shards.open, hooks=options.hooks))
        return Plan(chunks, partial(self._read, options, unpack), 1)

    def _chunk_size(self, options: BatchOptions) -> int:
        row = self.shards.row_bytes(options.hooks)
        least = min(LEAST_CHUNK_BYTES // row, options.buffer // LEAST_CHUNKS)
        fitting = min(CHUNK_BYTES // row, max(options.buffer // CHUNKS_IN_BUFFER, least))
        return max(fitting, 1)

    def _read(
        self, options: BatchOptions, opened: Callable[[int], ShardReader], chunk: Chunk
    ) -> Block:
        """The tokens of a chunk that may be wanted, from the first to the last of them.

        Activations are views of the file where that is possible.
        """
        reader, span = opened(chunk.shard), (chunk.start, chunk.stop)
        try:
            token_ids, position = reader.tokens(*span)
            labels = reader.labels(*span)
            samples = np.searchsorted(reader.offsets, np.arange(*span), "right") - 1
            wanted = position >= options.skip_first
            if (mask := self._mask_of(chunk.shard)) is not None:
                wanted &= mask[samples]
            if options.roles is not None:
                if "role" not in labels:
                    folder, commit = self.shards.shards[chunk.shard]
                    raise RunError(f"{self.shards.url}: {folder}/{commit.file} has no roles")
                wanted &= np.isin(labels["role"], [ROLES.index(role) for role in options.roles])
            rows = np.flatnonzero(wanted)
            first, stop = (int(rows[0]), int(rows[-1]) + 1) if len(rows) else (0, 0)
            span = chunk.start + first, chunk.start + stop
            activations = {hook: reader.rows(hook, *span) for hook in options.hooks}
        except RunError as error:
            raise OSError(str(error)) from error
        within = slice(first, stop)
        labels = {name: values[within] for name, values in labels.items()}
        tokens = TokenBatch(
            ByHook(activations, self.shards.hooks.aliases),
            token_ids[within],
            reader.sample_idx[samples[within]],
            position[within],
            role=labels.get("role"),
            turn=labels.get("turn"),
        )
        rows = rows - first
        return Block(tokens, rows[_small(tokens, options.max_norm)[rows]])


def _small(tokens: TokenBatch, max_norm: Mapping[str, float]) -> np.ndarray:
    """Whether the norms of each token are within the limits."""
    small = np.ones(len(tokens), bool)
    for hook, limit in max_norm.items():
        small &= np.linalg.norm(tokens[hook].astype(np.float32), axis=1) <= limit
    return small


def _shuffled(chunks: list[Chunk], seed: int | None, within: Chunk | None = None) -> list[Chunk]:
    """The chunks in the order of a seed; None keeps theirs. within: what they are pieces of."""
    if seed is None:
        return chunks
    key = [seed] if within is None else [seed, within.shard, within.start]
    return [chunks[i] for i in np.random.default_rng(key).permutation(len(chunks))]


def _share(chunks: list[Chunk], worker: int, workers: int) -> list[Chunk]:
    """Every n-th chunk; where there are too few chunks, they are cut."""
    if len(chunks) < workers:
        chunks = [piece for each in chunks for piece in _cut([each], -(-len(each) // workers))]
    return chunks[worker::workers]


def _cut(chunks: Sequence[Chunk], size: int) -> list[Chunk]:
    """The chunks in pieces of `size` tokens; the last one of each may be shorter."""
    return [
        Chunk(chunk.shard, at, min(at + size, chunk.stop))
        for chunk in chunks
        for at in range(chunk.start, chunk.stop, size)
    ]


class Batches(Iterator[TokenBatch]):
    """Batches of tokens; the last one may be shorter. `state` and `restore` are exact.

    It goes over the data once. A copy in another process starts where this one stands.
    """

    def __init__(
        self, source: TokenSource, options: BatchOptions, position: Position | None = None
    ) -> None:
        self._source = source
        self._options = options
        self._position = position or Position()
        self._windows: Generator[Window, None, None] | None = None
        self._window: Window | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Batches, (self._source, self._options, self._position)

    def state(self) -> dict[str, Any]:
        """Returns where the iteration stands, as plain JSON values."""
        return {**self._setting(), **asdict(self._position)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken.

        Raises ValueError when the state is of other data, or of batches with other arguments.
        """
        content = dict(state)
        for name, expected in self._setting().items():
            if (found := content.pop(name, None)) != expected:
                raise ValueError(
                    f"the state is of other batches: its {name} is {found!r}, not {expected!r}"
                )
        self.close()
        self._position = Position(**content)

    def _setting(self) -> dict[str, Any]:
        """Everything on which the order of the tokens depends."""
        part, parts = _loader_worker()
        options = json.loads(json.dumps(asdict(self._options)))
        del options["columns"]
        return {"data": self._source.fingerprint, **options, "part": part, "parts": parts}

    def again(self) -> "Batches":
        """Returns the same batches from the start."""
        return Batches(self._source, self._options)

    def close(self) -> None:
        """Ends the reading ahead and frees the buffer."""
        if self._windows is not None:
            self._windows.close()
        self._windows = self._window = None

    def torch(self) -> Any:
        """Returns a PyTorch IterableDataset of the same batches as tensors, for a DataLoader or a
        loop.

        A loop in this process goes on where the batches stand. Give a DataLoader `batch_size=None`;
        each of its workers reads its own share of the data, from the start.
        """
        from torch.utils.data import IterableDataset, get_worker_info

        class TorchBatches(IterableDataset):
            def __init__(self, batches: Batches) -> None:
                self._batches = batches

            def __iter__(self) -> Iterator[TokenBatch]:
                own = self._batches if get_worker_info() is None else self._batches.again()
                return (batch.torch() for batch in own)

            def __reduce__(self) -> tuple[Any, ...]:  # such a class cannot be pickled by its name
                return Batches.torch, (self._batches,)

        return TorchBatches(self)

    def jax(self) -> Iterator[TokenBatch]:
        """Returns the same batches as JAX arrays."""
        return (batch.jax() for batch in self)

    def __next__(self) -> TokenBatch:
        if self._window is None:
            self._window = self._next_window()
        window, taken = self._window, self._position.taken
        rows = window.order[taken : taken + self._options.size]
        batch = empty_batch(window.memory, len(rows), self._source.dtypes(self._options))
        copy_rows(window.memory, rows, batch)
        if names := self._options.columns:
            batch = replace(batch, columns=self._source.columns(names, batch.sample_idx))
        taken += len(batch)
        if taken < len(window.order):
            self._position = replace(self._position, taken=taken)
        else:
            self._window, self._position = None, window.end
        return batch

    def _next_window(self) -> Window:
        """The window at the position. Raises StopIteration after the last one."""
        options = self._options
        if self._windows is None:
            plan = self._source.plan(options, *_loader_worker())
            most = options.buffer // 2 // options.size * options.size
            self._windows = Windows(plan, most, options.shuffle).beginning(self._position)
        try:
            return next(self._windows)
        except BaseException:
            self.close()  # so that the next call tries again
            raise


def _loader_worker() -> tuple[int, int]:
    """Number and count of PyTorch's DataLoader workers; (0, 1) outside of them."""
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    return (0, 1) if info is None else (info.id, info.num_workers)
