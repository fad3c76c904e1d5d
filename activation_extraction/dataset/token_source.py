"""BatchOptions: what batches are asked for, of a run or of several that are read as one.
TokenSource: the tokens of a run, and which of them pass the filters."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.common.choices import ROLES
from activation_extraction.common.visible import counted
from activation_extraction.dataset.open_shards import OpenShards, as_os_errors
from activation_extraction.dataset.token_batch import (
    Block,
    ByHook,
    TokenBatch,
    copy_rows,
    empty_batch,
)
from activation_extraction.dataset.windows import Chunk

Read = Callable[[Chunk], tuple[Block, ...]]  # a block of each run for a chunk of the first one
LEAST_GAP = 2**21  # bytes that are read rather than left out between two tokens
BUFFER_BATCHES, BUFFER_BYTES = 64, 2**30  # the default buffer, whichever is less
ORDERED_BYTES, SHUFFLED_BYTES = 2**26, 2**28  # of each hook, from elsewhere than this machine
FLOATING = "float16", "bfloat16", "float32", "float64"  # dtypes that activations are read as


@dataclass(frozen=True)
class BatchOptions:
    """What batches of tokens are made of, in `batches` of one run, of paired and of joined runs.

    size: the tokens of a batch; the last one may have fewer.

    hooks: names of the hooks to read, or globs. By default, all hooks of the dataset are read; with
    an empty list, batches have no activations.

    shuffle: a seed for the order of the tokens, or None for the order of the shards.

    buffer: the number of tokens that are kept in memory and shuffled there, by default 64 batches;
    from a bucket 256 MiB of each hook, or 64 MiB if nothing is shuffled; and at most 1 GiB. What is
    on its way from there comes on top, about 300 MiB in ranges of 2 to 16 MiB, and so do up to two
    pickles, which are unpacked whole.

    skip_first: the number of tokens to leave out at the start of every sample.

    max_norm: a number; tokens with a larger norm at any of the hooks are left out. A mapping gives
    the limit at each hook that it names. Only activations have norms.

    dtype: of activations in the result, float16, bfloat16, float32 or float64; by default, that of
    the dataset.

    worker, workers: which one of how many shares to read. Shares do not overlap. The workers of a
    PyTorch DataLoader divide a share further by themselves.

    where: a boolean for each row of the dataset's `samples`, as an array or a list, or a function
    that gets this table and returns them, such as
    `lambda table: pyarrow.compute.equal(table["split"], "test")`. Only tokens of samples with true
    are read.

    roles: roles in a conversation, such as ["assistant"]. Only their tokens are read.

    columns: names of columns of `samples`, such as ["doc_id", "label"]. A batch then has their
    values for every token.

    Raises ValueError for values that make no sense for any run. A TokenSource has the options
    complete: hooks by their canonical names, a limit for each hook in `max_norm`, the name of the
    dtype, and of `where` a digest of its mask.
    """

    size: int
    hooks: Any = None
    shuffle: int | None = None
    buffer: Any = None
    skip_first: int = 0
    max_norm: Any = None
    dtype: Any = None
    worker: int = 0
    workers: int = 1
    where: Any = None
    roles: Any = None
    columns: Any = ()

    def __post_init__(self) -> None:
        limits = self.max_norm.values() if isinstance(self.max_norm, Mapping) else [self.max_norm]
        no_seed = isinstance(self.shuffle, bool) or (self.shuffle or 0) < 0
        no_buffer = self.buffer is not None and self.buffer < 2 * self.size
        workers = f"expected 0 to {self.workers - 1}, of {self.workers} workers"
        for wrong, told in (
            (self.size < 1, f"size {self.size}: expected 1 or more tokens"),
            (no_buffer, f"buffer {self.buffer}: it must hold two batches of {self.size} tokens"),
            (self.skip_first < 0, f"skip_first {self.skip_first}: expected 0 or more tokens"),
            (not 0 <= self.worker < self.workers, f"worker {self.worker}: {workers}"),
            (no_seed, f"shuffle {self.shuffle}: expected a seed, 0 or larger, or None"),
            (
                self.dtype is not None and floating_name(self.dtype) is None,
                f"dtype {self.dtype!r:.40}: expected {', '.join(FLOATING)}",
            ),
            (
                not all(limit is None or limit >= 0 for limit in limits),
                f"max_norm {self.max_norm}: expected 0 or more",
            ),
        ):
            if wrong:
                raise ValueError(told)

    @property
    def filters(self) -> list[str]:
        """The arguments that leave out tokens."""
        given = {name: getattr(self, name) for name in ("skip_first", "max_norm", "roles")}
        found = [f"{name}={value!r}" for name, value in given.items() if value]
        return found + ["where"] * (self.where is not None)

    @property
    def setting(self) -> dict[str, Any]:
        """All that the order of the tokens depends on."""
        return {name: value for name, value in asdict(self).items() if name != "columns"}


class FoundTokens(NamedTuple):
    """All tokens of some chunks of a shard, one after the other, without activations. at: where
    each one lies in the shard. samples: the number of each one's sample in the run. wanted: whether
    each passes the filters, but for its norm."""

    shard: int
    at: np.ndarray
    tokens: TokenBatch
    samples: np.ndarray
    wanted: np.ndarray


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
        every, ascending = self._sample_idx
        found = ascending[np.searchsorted(every, sample_idx, sorter=ascending)]
        return {name: columns[name][found] for name in names}

    @cached_property
    def _sample_idx(self) -> tuple[np.ndarray, np.ndarray]:
        """The `sample_idx` of all samples, and what sorts them."""
        every = self.shards.columns(["sample_idx"])["sample_idx"].astype(np.int64)
        return every, np.argsort(every)

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
            with as_os_errors():
                offsets = self.shards.get(shard).offsets
            yield [
                Chunk(shard, int(offsets[each[0]]), int(offsets[each[-1] + 1]))
                for each in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
            ]

    def tokens(self, chunks: Sequence[Chunk]) -> FoundTokens:
        """Returns all tokens of some chunks of a shard, in its order, and which of them are wanted.
        Raises OSError."""
        shard = chunks[0].shard
        start = chunks[0].start
        stop = chunks[-1].stop
        at = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
        with as_os_errors():
            reader = self.shards.get(shard)
            arrays = reader.tokens(start, stop)
            samples = np.searchsorted(reader.offsets, at, "right") - 1
            sample_idx = reader.sample_idx[samples]
        hooks = ByHook[np.ndarray]({}, self.shards.hooks.aliases)
        shared: dict[str, Any] = {name: values[at - start] for name, values in arrays.items()}
        tokens = TokenBatch(hooks, sample_idx=sample_idx, **shared)
        samples += self.shards.firsts[shard]
        wanted = tokens.position >= self.options.skip_first
        if self.mask is not None:
            wanted &= self.mask[samples]
        if self.options.roles is not None:
            wanted &= np.isin(shared["role"], [*map(ROLES.index, self.options.roles)])
        return FoundTokens(shard, at, tokens, samples, wanted)

    def with_activations(self, found: FoundTokens, rows: np.ndarray) -> Block:
        """Returns these tokens with their activations. Raises OSError.

        Activations are views of the file where that is possible. Encoded ones are decoded to the
        dtype of the result. What lies between tokens that are far apart is not read.
        """
        hooks = self.shards.hooks
        names = self.options.hooks
        dtype = self.options.dtype
        widest = max((self.shards.row_bytes([name]) for name in names), default=0)
        ascending = np.sort(rows)
        apart = np.diff(ascending) * widest > LEAST_GAP
        apart |= np.diff(found.at[ascending]) != np.diff(ascending)  # others are not found there
        parts = [np.arange(*_span(p)) for p in np.split(ascending, np.flatnonzero(apart) + 1)]
        with as_os_errors():
            reader = self.shards.get(found.shard)
            spans = [_span(found.at[part]) for part in parts]
            reads = {
                name: [hooks[name].begin_rows(reader, *span, dtype) for span in spans]
                for name in names
            }
            values = {name: _concatenate([wait() for wait in reads[name]]) for name in names}
        read = np.concatenate(parts)
        tokens = found.tokens.map(itemgetter(read))
        tokens = replace(tokens, activations=ByHook(values, hooks.aliases))
        return Block(tokens, np.searchsorted(read, rows))

    def whole_tokens(self, chunks: Sequence[Chunk]) -> TokenBatch:
        """Returns all tokens of some chunks as one batch, also those that the filters leave out.
        Raises OSError."""
        every = [self.tokens([chunk]) for chunk in chunks]
        blocks = [self.with_activations(found, np.arange(len(found.at))) for found in every]
        return self.take(blocks, 0, sum(len(block.rows) for block in blocks))

    def reader(self) -> Read:
        """Returns what reads the tokens of a chunk that pass the filters."""

        def read(chunk: Chunk) -> tuple[Block, ...]:
            found = self.tokens([chunk])
            block = self.with_activations(found, np.flatnonzero(found.wanted))
            return (Block(block.tokens, block.rows[self.are_small(block)]),)

        return read

    def are_small(self, block: Block) -> np.ndarray:
        """Returns whether the norms of each row of a block are within the limits."""
        small = np.ones(len(block.tokens), bool)
        for hook, limit in self.options.max_norm.items():
            small &= np.linalg.norm(block.tokens[hook].astype(np.float32), axis=1) <= limit
        return small[block.rows]

    def take(self, blocks: Sequence[Block], start: int, stop: int) -> TokenBatch:
        """Returns tokens `start` to `stop`, counted over the rows of some blocks, as a batch of its
        own. Raises OSError, and ValueError for values beyond the dtype of the result."""
        hooks, options = self.shards.hooks, self.options
        dtypes = {
            n: options.dtype for n in options.hooks if options.dtype and hooks[n].are_activations
        }
        batch, first = empty_batch(blocks[0].tokens, stop - start, dtypes), 0
        for tokens, rows in blocks:
            part = rows[max(start - first, 0) : max(stop - first, 0)]
            if len(part):
                at = max(first - start, 0)
                with np.errstate(over="ignore"):  # NumPy would warn of float32 alone
                    copy_rows(Block(tokens, part), np.arange(at, at + len(part)), batch)
            first += len(rows)
        for name in dtypes:
            if hooks[name].dtype != batch[name].dtype == np.float16 and overflows(batch[name]):
                raise ValueError(
                    f"hook {name!r}: float16 ends at 65504, before its largest values; read them "
                    'with dtype="bfloat16" or "float32"'
                )
        values = {name: hooks[name].for_user(rows) for name, rows in batch.items()}
        batch = replace(batch, activations=ByHook(values, hooks.aliases))
        if names := options.columns:
            batch = replace(batch, columns=self.columns(names, batch.sample_idx))
        return batch


def _concatenate(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns arrays as one; a single array is not copied."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _span(numbers: np.ndarray) -> tuple[int, int]:
    """The first of some ascending numbers, and the one after the last; an empty span of none."""
    return (int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else (0, 0)


def overflows(values: np.ndarray) -> bool:
    """Returns whether a value of float16 is NaN or infinite."""
    return bool(values.size) and bool((values.view(np.uint16) & 0x7FFF).max() >= 0x7C00)


def floating_name(dtype: Any) -> str | None:
    """Returns the name of a dtype that activations can be read as; None for None and any other."""
    names = [name for name in FLOATING if dtype is not None and np.dtype(name) == dtype]
    return names[0] if names else None


def default_buffer(options: BatchOptions, hooks: int, row: int, local: bool) -> int:
    """Returns how many tokens, of `row` bytes at so many hooks, are kept in memory for batches.

    local: of files on this machine; from elsewhere, large ranges are read of every hook.
    """
    of_each_hook = ORDERED_BYTES if options.shuffle is None else SHUFFLED_BYTES
    most = BUFFER_BYTES if local else min(of_each_hook * max(hooks, 1), BUFFER_BYTES)
    tokens = most // max(row, 1)
    return max(min(BUFFER_BATCHES * options.size, tokens) if local else tokens, 2 * options.size)


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
