"""TokenSource: reads the tokens of one run with their activations, and filters them.

BatchOptions are the arguments of a user for batches of tokens. batches.py makes batches of the
chunks that a TokenSource reads, and paired.py aligns the tokens of several sources.
"""

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

# Function that takes a chunk of the first run, and returns a block of each run.
Read = Callable[[Chunk], tuple[Block, ...]]
LEAST_GAP = 2**21  # most bytes between two wanted tokens that are read together with them
# The default buffer has at most this number of batches (for local runs) and of bytes.
BUFFER_BATCHES = 64
BUFFER_BYTES = 2**30
# If the run is in a bucket, the default buffer has at most this number of bytes for each hook.
ORDERED_BYTES = 2**26  # bytes of the buffer if tokens are not shuffled
SHUFFLED_BYTES = 2**28  # bytes of the buffer if tokens are shuffled
FLOATING = "float16", "bfloat16", "float32", "float64"  # dtypes to which activations are converted


@dataclass(frozen=True)
class BatchOptions:
    """The arguments of `batches`, for one run, for paired and for joined runs.

    Attributes:
        size: Number of tokens in a batch; the last batch may have fewer.
        hooks: Names of the hooks to read, or globs. None for all hooks of the dataset; with an
            empty list, batches have no activations.
        shuffle: Seed for the order of the tokens. None for the order of the shards.
        buffer: Number of tokens that are kept in memory and shuffled there, at least two batches.
            None for 64 batches if the run is local, otherwise for 256 MiB of each hook (64 MiB if
            tokens stay in order), but at most 1 GiB. Further memory holds the ranges that are being
            read from a bucket (about 300 MiB, in ranges of 2 to 16 MiB), and up to two pickles,
            which are decompressed whole.
        skip_first: Number of tokens to leave out at the start of every sample.
        max_norm: Largest norm of the activations: tokens with a larger norm at any of the hooks are
            left out. A mapping contains a limit for each hook that it names. None for no limit.
        dtype: Dtype of the activations in batches: float16, bfloat16, float32 or float64. None for
            the dtype of the dataset.
        worker: Number of the share to read, from 0.
        workers: Number of shares. Shares do not overlap. The workers of a PyTorch DataLoader divide
            a share further by themselves.
        where: Mask of the samples whose tokens are read: an array or a list with a boolean for each
            row of the table `samples` of the dataset. Or a function that takes the table and
            returns the mask, such as `lambda table: pyarrow.compute.equal(table["split"], "test")`.
            None for all samples.
        roles: Roles in a conversation, such as ["assistant"], whose tokens are read. None for all
            tokens.
        columns: Names of columns of the table `samples`, such as ["doc_id", "label"]. A batch then
            contains their values for every token, in its attribute `columns`.

    A TokenSource has complete options: `hooks` holds canonical names, `max_norm` a limit by hook,
    `dtype` a name, and `where` a digest of the mask.

    Raises:
        ValueError: A value makes no sense for any run.
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
        for wrong, message in (
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
                raise ValueError(message)

    @property
    def filters(self) -> list[str]:
        """The options that leave out tokens, as texts for messages."""
        values = {name: getattr(self, name) for name in ("skip_first", "max_norm", "roles")}
        filters = [f"{name}={value!r}" for name, value in values.items() if value]
        if self.where is not None:
            filters.append("where")
        return filters

    @property
    def setting(self) -> dict[str, Any]:
        """All options by name, except for `columns`.

        The choice and the order of the tokens depend on these options, and not on `columns`.
        """
        return {name: option for name, option in asdict(self).items() if name != "columns"}


class ShardTokens(NamedTuple):
    """All tokens of some chunks of a shard, one after the other, without activations.

    Attributes:
        shard: Number of the shard.
        at: Index of each token in the shard, ascending, int64 (tokens,).
        tokens: The tokens.
        samples: Number in the run of each token's sample, int64 (tokens,).
        wanted: Whether each token passes the filters, bool (tokens,). Norms, which need the
            activations, are not compared yet.
    """

    shard: int
    at: np.ndarray
    tokens: TokenBatch
    samples: np.ndarray
    wanted: np.ndarray


@dataclass(frozen=True)
class TokenSource:
    """The tokens of one run from which batches are made.

    The methods that read raise OSError if a shard is damaged.

    Attributes:
        shards: Shards of the run.
        options: Complete options (see BatchOptions).
        mask: Samples whose tokens are wanted, bool (samples,). None for all.
    """

    shards: OpenShards
    options: BatchOptions
    mask: np.ndarray | None = None

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the stored shards, which differs for other data."""
        files = "".join(f"{folder}/{commit.sha256}\n" for folder, commit in self.shards.shards)
        return hashlib.sha256(files.encode()).hexdigest()

    @property
    def row_bytes(self) -> int:
        """The number of bytes of memory for the values of a token at all hooks that are read."""
        return self.shards.row_bytes(self.options.hooks)

    def columns(self, names: Sequence[str], sample_idx: np.ndarray) -> dict[str, np.ndarray]:
        """Returns columns of the table of samples for some samples.

        Args:
            names: Names of the columns.
            sample_idx: Numbers (`sample_idx`) of the samples, int64 (n,).

        Returns:
            The values by the name of the column, arrays of objects (n,).
        """
        columns = self.shards.columns(dict.fromkeys(["sample_idx", *names]))
        all_numbers, ascending = self._sample_idx
        rows = ascending[np.searchsorted(all_numbers, sample_idx, sorter=ascending)]
        return {name: columns[name][rows] for name in names}

    @cached_property
    def _sample_idx(self) -> tuple[np.ndarray, np.ndarray]:
        """The `sample_idx` of all samples, and the indices that sort them, int64 (samples,)."""
        numbers = self.shards.columns(["sample_idx"])["sample_idx"].astype(np.int64)
        return numbers, np.argsort(numbers)

    def of(self, samples: np.ndarray) -> "TokenSource":
        """Returns a source with the tokens of some samples only.

        Args:
            samples: Numbers of the samples in the run.
        """
        mask = np.isin(np.arange(self.shards.firsts[-1]), samples)
        return replace(self, mask=mask if self.mask is None else mask & self.mask)

    def whole(self, shard: int) -> Chunk:
        """Returns the chunk with all tokens of a shard.

        Args:
            shard: Number of the shard, from 0.
        """
        return Chunk(shard, 0, self.shards.commits[shard].tokens)

    def chunks(self) -> list[Chunk]:
        """Returns the chunks of all shards that contain a wanted sample, each a whole shard."""
        firsts = self.shards.firsts
        return [
            self.whole(shard)
            for shard, _ in enumerate(self.shards.commits)
            if self.mask is None or self.mask[firsts[shard] : firsts[shard + 1]].any()
        ]

    def by_shard(self, samples: np.ndarray) -> Iterator[list[Chunk]]:
        """Yields the chunks of some samples, shard by shard.

        Args:
            samples: Numbers of the samples in the run, ascending.

        Yields:
            The chunks of a shard. Samples that lie side by side are one chunk.
        """
        shards = np.searchsorted(self.shards.firsts, samples, "right") - 1
        for shard in np.unique(shards).tolist():
            numbers = samples[shards == shard] - self.shards.firsts[shard]
            with as_os_errors():
                offsets = self.shards.get(shard).offsets
            yield [
                Chunk(shard, int(offsets[group[0]]), int(offsets[group[-1] + 1]))
                for group in np.split(numbers, np.flatnonzero(np.diff(numbers) != 1) + 1)
            ]

    def tokens(self, chunks: Sequence[Chunk]) -> ShardTokens:
        """Returns all tokens of some chunks of one shard, and which of them pass the filters.

        Args:
            chunks: Chunks of the shard, in its order.
        """
        return self._begin_tokens(chunks)()

    def _begin_tokens(self, chunks: Sequence[Chunk]) -> Callable[[], ShardTokens]:
        """Asks for all tokens of some chunks of one shard, and returns a function that waits.

        Args:
            chunks: Chunks of the shard, in its order.

        Returns:
            A function that waits for the tokens and returns them.
        """
        shard = chunks[0].shard
        start = chunks[0].start
        stop = chunks[-1].stop
        at = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
        with as_os_errors():
            reader = self.shards.get(shard)
            arrays = reader.begin_tokens(start, stop)

        def wait() -> ShardTokens:
            samples = np.searchsorted(reader.offsets, at, "right") - 1
            sample_idx = reader.sample_idx[samples]
            with as_os_errors():
                token_fields = arrays()
            hooks = ByHook[np.ndarray]({}, self.shards.hooks.aliases)
            shared: dict[str, Any] = {
                name: values[at - start] for name, values in token_fields.items()
            }
            tokens = TokenBatch(hooks, sample_idx=sample_idx, **shared)
            samples += self.shards.firsts[shard]
            wanted = tokens.position >= self.options.skip_first
            if self.mask is not None:
                wanted &= self.mask[samples]
            if self.options.roles is not None:
                wanted &= np.isin(shared["role"], [*map(ROLES.index, self.options.roles)])
            return ShardTokens(shard, at, tokens, samples, wanted)

        return wait

    def with_activations(self, shard_tokens: ShardTokens, rows: np.ndarray) -> Block:
        """Returns tokens with their activations.

        Activations are views of the file if it is mapped into memory and they are not encoded.
        Encoded activations are decoded to the dtype of the options. Bytes between tokens that are
        far apart are not read.

        Args:
            shard_tokens: Tokens of a shard.
            rows: Indices into `shard_tokens` of the tokens to return, int64 (n,).

        Returns:
            A block whose rows are these tokens, in the order of `rows`.
        """
        names = self.options.hooks
        widest = max((self.shards.row_bytes([name]) for name in names), default=0)
        ascending = np.sort(rows)
        apart = np.diff(ascending) * widest > LEAST_GAP
        # Tokens of different chunks may lie apart in the shard.
        apart |= np.diff(shard_tokens.at[ascending]) != np.diff(ascending)
        groups = np.split(ascending, np.flatnonzero(apart) + 1)
        parts = [np.arange(*_span(group)) for group in groups]
        spans = [_span(shard_tokens.at[part]) for part in parts]
        activations = self._begin_activations(shard_tokens.shard, spans)()
        read = np.concatenate(parts)
        tokens = shard_tokens.tokens.map(itemgetter(read))
        tokens = replace(tokens, activations=activations)
        return Block(tokens, np.searchsorted(read, rows))

    def _begin_activations(
        self, shard: int, spans: Sequence[tuple[int, int]]
    ) -> Callable[[], ByHook[np.ndarray]]:
        """Asks for activations of tokens at the hooks of the options.

        Args:
            shard: Number of the shard, from 0.
            spans: First token and exclusive end of each range of tokens in the shard.

        Returns:
            A function that waits for the activations and returns them, one range after the other.
        """
        hooks = self.shards.hooks
        dtype = self.options.dtype
        with as_os_errors():
            reader = self.shards.get(shard)
            reads = {
                name: [hooks[name].begin_rows(reader, *span, dtype) for span in spans]
                for name in self.options.hooks
            }

        def wait() -> ByHook[np.ndarray]:
            with as_os_errors():
                values = {
                    name: _concatenate([wait_for_span() for wait_for_span in of_hook])
                    for name, of_hook in reads.items()
                }
            return ByHook(values, hooks.aliases)

        return wait

    def _all_of(self, chunk: Chunk) -> TokenBatch:
        """Returns all tokens of a chunk with their activations, which are read at the same time."""
        begun_tokens = self._begin_tokens([chunk])
        begun_activations = self._begin_activations(chunk.shard, [(chunk.start, chunk.stop)])
        return replace(begun_tokens().tokens, activations=begun_activations())

    def whole_tokens(self, chunks: Sequence[Chunk]) -> TokenBatch:
        """Returns all tokens of some chunks as one batch, also those that do not pass the filters.

        Args:
            chunks: Chunks of any shards, in the order of the batch.
        """
        batches = [self._all_of(chunk) for chunk in chunks]
        blocks = [Block(batch, np.arange(len(batch))) for batch in batches]
        return self.take(blocks, 0, sum(len(block.rows) for block in blocks))

    def reader(self) -> Read:
        """Returns the function with which batches of this run alone read chunks.

        Returns:
            A function that reads a chunk and returns a tuple of one block. The rows of the block
            are the tokens of the chunk that pass all filters, including limits of norms.
        """
        options = self.options
        chooses_tokens = bool(options.skip_first or options.roles) or self.mask is not None

        def read(chunk: Chunk) -> tuple[Block, ...]:
            if chooses_tokens:  # which activations to read follows from the tokens
                tokens = self.tokens([chunk])
                block = self.with_activations(tokens, np.flatnonzero(tokens.wanted))
            else:
                batch = self._all_of(chunk)
                block = Block(batch, np.arange(len(batch)))
            return (Block(block.tokens, block.rows[self.are_small(block)]),)

        return read

    def are_small(self, block: Block) -> np.ndarray:
        """Returns for each row of a block whether its norms are within the limits, bool (rows,).

        Args:
            block: Block of tokens, with the activations of all hooks that have a limit.
        """
        small = np.ones(len(block.tokens), bool)
        for hook, limit in self.options.max_norm.items():
            small &= np.linalg.norm(block.tokens[hook].astype(np.float32), axis=1) <= limit
        return small[block.rows]

    def take(self, blocks: Sequence[Block], start: int, stop: int) -> TokenBatch:
        """Returns some rows of consecutive blocks as a batch that has its own memory.

        Args:
            blocks: Blocks of tokens.
            start: First row to take, counted over all blocks.
            stop: Row after the last one.

        Raises:
            ValueError: A value is too large for the dtype of the batch.
        """
        hooks = self.shards.hooks
        options = self.options
        dtypes = {
            name: options.dtype
            for name in options.hooks
            if options.dtype and hooks[name].are_activations
        }
        batch = empty_batch(blocks[0].tokens, stop - start, dtypes)
        first = 0  # number of rows in the blocks before this one
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
    """Returns the concatenation of arrays. A single array is returned without a copy."""
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _span(numbers: np.ndarray) -> tuple[int, int]:
    """Returns the range that ascending numbers span, as its first number and its exclusive end.

    Both are 0 if there are no numbers.
    """
    return (int(numbers[0]), int(numbers[-1]) + 1) if len(numbers) else (0, 0)


def overflows(values: np.ndarray) -> bool:
    """Returns whether any of these float16 values is NaN or infinite."""
    return bool(values.size) and bool((values.view(np.uint16) & 0x7FFF).max() >= 0x7C00)


def floating_name(dtype: Any) -> str | None:
    """Returns the name of a dtype in FLOATING, to which activations can be converted.

    Args:
        dtype: Name of a dtype, or anything that NumPy compares with one.

    Returns:
        The name; None if `dtype` is None or any other dtype.
    """
    names = [name for name in FLOATING if dtype is not None and np.dtype(name) == dtype]
    return names[0] if names else None


def default_buffer(options: BatchOptions, hooks: int, row: int, local: bool) -> int:
    """Returns the default of BatchOptions.buffer: a number of tokens to keep in memory.

    Args:
        options: Options of the batches.
        hooks: Number of hooks that are read.
        row: Bytes of a token at all these hooks.
        local: Whether the files are on this machine. If they are in a bucket, large ranges of every
            hook are read, so that the buffer has to be larger.
    """
    of_each_hook = ORDERED_BYTES if options.shuffle is None else SHUFFLED_BYTES
    most = BUFFER_BYTES if local else min(of_each_hook * max(hooks, 1), BUFFER_BYTES)
    tokens = most // max(row, 1)
    return max(min(BUFFER_BATCHES * options.size, tokens) if local else tokens, 2 * options.size)


def as_mask(mask: Any, samples: int) -> np.ndarray:
    """Returns a user's mask of samples as an array, bool (samples,).

    Args:
        mask: Boolean for each sample: a list, or an array of NumPy, pandas or pyarrow.
        samples: Number of samples.

    Raises:
        ValueError: The length of the mask is not `samples`, or the mask contains nulls or values
            that are no booleans.
    """
    array = values = np.asarray(mask)
    # Arrays of pandas and pyarrow that may contain nulls have the dtype object here, and an empty
    # list has the dtype float64.
    if array.dtype == object or not array.size:
        values = np.array(
            [value for value in array.flat if isinstance(value, bool | np.bool_)], bool
        )
    if values.dtype != bool or not values.shape == array.shape == (samples,):
        raise ValueError(
            f"where: {array.dtype}, shape {array.shape}: expected true or false, never null, for "
            f"each of {counted(samples, 'sample')}"
        )
    return values
