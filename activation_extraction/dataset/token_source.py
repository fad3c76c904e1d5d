"""TokenSource: reads the tokens of one run with their activations, and filters them.

BatchOptions are the arguments with which a user calls `batches`. A TokenSource reads chunks, which
are consecutive tokens of a shard. batches.py makes batches of them, and paired.py aligns the tokens
of several sources.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
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
    copy_wanted_tokens,
    empty_batch,
)
from activation_extraction.dataset.windows import Chunk

# Type of a function that takes a chunk of the first run, and returns a block of each run.
ReadChunk = Callable[[Chunk], tuple[Block, ...]]
# Unwanted tokens between two wanted tokens are skipped only if there are more than this number of
# bytes from one wanted token to the next, at the hook with the most bytes per token. Otherwise they
# are read with the wanted tokens in one range, which saves a request.
MIN_SKIPPED_BYTES = 2**21
BUFFER_BATCHES = 64  # largest number of batches in the default buffer of a local run
BUFFER_BYTES = 2**30  # largest number of bytes in the default buffer
# Bytes per hook in the default buffer if the run is in a bucket: ORDERED_BYTES if tokens stay in
# order, SHUFFLED_BYTES if they are shuffled. With many hooks, BUFFER_BYTES limits the buffer.
ORDERED_BYTES = 2**26
SHUFFLED_BYTES = 2**28
# Dtypes to which activations can be converted.
FLOATING = "float16", "bfloat16", "float32", "float64"


@dataclass(frozen=True)
class BatchOptions:
    """The arguments of the methods `batches` of a run, of paired runs and of joined runs.

    Attributes:
        size: Number of tokens in a batch; the last batch may have fewer.
        hooks: Names of the hooks to read, or globs. None for all hooks of the dataset; with an
            empty list, batches have no activations.
        shuffle: Seed for the order of the tokens. None for the order of the shards.
        buffer: Number of tokens that are kept in memory, and shuffled there if `shuffle` is given.
            It must be at least two batches. None for a default, which takes at most 1 GiB of memory
            unless two batches need more. The default is 64 batches if the run is in a local folder.
            If the run is in a bucket, the default is the number of tokens that fit in 256 MiB for
            each hook if `shuffle` is given, or in 64 MiB for each hook if tokens stay in order.
            Reading takes memory in addition to the buffer: about 300 MiB if the run is in a bucket,
            and the size of up to two decompressed pickles if the run stores pickles.
        skip_first: Number of tokens to leave out at the start of every sample.
        max_norm: Largest Euclidean norm of the activations of a token at a hook. Tokens with a
            larger norm at any of the hooks are left out. A number is the limit for all hooks; a
            mapping from names of hooks to numbers sets limits for these hooks only. None for no
            limit.
        dtype: Dtype of the activations in batches: float16, bfloat16, float32 or float64. None for
            the dtype of the dataset.
        worker: Number of this process, from 0, if several processes read different tokens of the
            run. 0 if there is only this process.
        workers: Number of processes that read the run. The workers of a PyTorch DataLoader are not
            counted, because they divide the tokens of their process by themselves.
        where: Mask of the samples whose tokens are read: an array or a list with a boolean for each
            row of the table `samples` of the dataset. It may also be a function that takes this
            table and returns the mask, such as
            `lambda table: pyarrow.compute.equal(table["split"], "test")`. None for all samples.
        roles: Roles in a conversation, such as ["assistant"], whose tokens are read. None for all
            tokens.
        columns: Names of columns of the table `samples`, such as ["doc_id", "label"]. A batch then
            contains their values for every token, in its attribute `columns`.

    Raises:
        ValueError: If a value is invalid for every run, such as a negative size.
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
        norm_limits = (
            self.max_norm.values() if isinstance(self.max_norm, Mapping) else [self.max_norm]
        )
        has_invalid_seed = isinstance(self.shuffle, bool) or (self.shuffle or 0) < 0
        is_buffer_too_small = self.buffer is not None and self.buffer < 2 * self.size
        expected_workers_text = f"expected 0 to {self.workers - 1}, of {self.workers} workers"
        for is_invalid, message in (
            (self.size < 1, f"size {self.size}: expected 1 or more tokens"),
            (
                is_buffer_too_small,
                f"buffer {self.buffer}: it must hold two batches of {self.size} tokens",
            ),
            (self.skip_first < 0, f"skip_first {self.skip_first}: expected 0 or more tokens"),
            (not 0 <= self.worker < self.workers, f"worker {self.worker}: {expected_workers_text}"),
            (has_invalid_seed, f"shuffle {self.shuffle}: expected a seed, 0 or larger, or None"),
            (
                self.dtype is not None and floating_name(self.dtype) is None,
                f"dtype {self.dtype!r:.40}: expected {', '.join(FLOATING)}",
            ),
            (
                not all(norm_limit is None or norm_limit >= 0 for norm_limit in norm_limits),
                f"max_norm {self.max_norm}: expected 0 or more",
            ),
        ):
            if is_invalid:
                raise ValueError(message)

    @property
    def filters(self) -> list[str]:
        """The options that leave out tokens, as texts for messages, such as "skip_first=4"."""
        filter_names = "skip_first", "max_norm", "roles"
        value_by_filter = {filter_name: getattr(self, filter_name) for filter_name in filter_names}
        filter_texts = [
            f"{filter_name}={filter_value!r}"
            for filter_name, filter_value in value_by_filter.items()
            if filter_value
        ]
        if self.where is not None:
            filter_texts.append("where")
        return filter_texts

    @property
    def setting(self) -> dict[str, Any]:
        """All options by name, except for `columns`.

        The choice and the order of the tokens depend on these options, but not on `columns`.
        """
        return {
            option_name: option_value
            for option_name, option_value in asdict(self).items()
            if option_name != "columns"
        }


class ChunkTokens(NamedTuple):
    """All tokens of some chunks (`Chunk`) of a shard in order, without their activations.

    Attributes:
        shard_index: Index of the shard among the shards of the run, from 0.
        token_indices: Index of each token in the shard, ascending, int64 (tokens,).
        token_batch: The tokens, as a batch without activations.
        sample_indices: For each token, the index of its sample in the run, int64 (tokens,).
        wanted_token_mask: Whether each token passes the filters except `max_norm`, bool (tokens,).
            Norms are compared with `max_norm` when the activations are read.
    """

    shard_index: int
    token_indices: np.ndarray
    token_batch: TokenBatch
    sample_indices: np.ndarray
    wanted_token_mask: np.ndarray


@dataclass(frozen=True)
class TokenSource:
    """Reads and filters the tokens of one run for batches.

    The methods that read raise OSError if a shard is damaged.

    Attributes:
        shards: Shards of the run.
        options: Options of the batches, adapted to this run: `hooks` is a tuple of canonical names,
            `max_norm` is a dict from canonical names to limits, `buffer` is a number of tokens,
            `dtype` is the name of a dtype or None, `where` is the digest of a mask or None, `roles`
            is a tuple in the order of ROLES or None, and `columns` is a tuple.
        sample_mask: Whether the tokens of each sample of the run are wanted, bool (samples,). None
            if the tokens of all samples are wanted.
    """

    shards: OpenShards
    options: BatchOptions
    sample_mask: np.ndarray | None = None

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the JSON files of all shards, which differs if the stored data differ."""
        commit_list_text = "".join(
            f"{folder_name}/{commit.sha256}\n"
            for folder_name, commit in self.shards.folder_names_and_commits
        )
        return hashlib.sha256(commit_list_text.encode()).hexdigest()

    @property
    def bytes_per_token(self) -> int:
        """The number of bytes of memory for the values of a token at all hooks that are read."""
        return self.shards.bytes_per_token(self.options.hooks)

    def columns(self, names: Sequence[str], sample_idx: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the values that columns of the table of samples contain for some samples.

        Args:
            names: Names of the columns.
            sample_idx: Numbers (`sample_idx`) of the samples, int64 (n,).

        Returns:
            The values by the name of the column, arrays of objects (n,).
        """
        columns_by_name = self.shards.columns(dict.fromkeys(["sample_idx", *names]))
        all_sample_numbers, sorting_indices = self._sample_numbers_and_order
        sample_indices = sorting_indices[
            np.searchsorted(all_sample_numbers, sample_idx, sorter=sorting_indices)
        ]
        return {column_name: columns_by_name[column_name][sample_indices] for column_name in names}

    @cached_property
    def _sample_numbers_and_order(self) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of all samples, and the indices that sort them, both int64 (samples,)."""
        all_sample_numbers = self.shards.columns(["sample_idx"])["sample_idx"].astype(np.int64)
        return all_sample_numbers, np.argsort(all_sample_numbers)

    def of(self, sample_indices: np.ndarray) -> "TokenSource":
        """Returns a source that reads the tokens of some samples only.

        Args:
            sample_indices: Indices of the samples in the run.
        """
        sample_count = self.shards.first_sample_indices_of_shards[-1]
        sample_mask = np.isin(np.arange(sample_count), sample_indices)
        if self.sample_mask is not None:
            sample_mask &= self.sample_mask
        return replace(self, sample_mask=sample_mask)

    def whole(self, shard_index: int) -> Chunk:
        """Returns a chunk that contains all tokens of a shard.

        Args:
            shard_index: Index of the shard among the shards of the run, from 0.
        """
        return Chunk(shard_index, 0, self.shards.commits[shard_index].tokens)

    def chunks(self) -> list[Chunk]:
        """Returns a chunk for each shard that is to be read, with all tokens of the shard.

        Shards in which `sample_mask` selects no sample are left out.
        """
        return [
            self.whole(shard_index)
            for shard_index, (first_sample_index, stop_sample_index) in enumerate(
                pairwise(self.shards.first_sample_indices_of_shards)
            )
            if self.sample_mask is None
            or self.sample_mask[first_sample_index:stop_sample_index].any()
        ]

    def by_shard(self, sample_indices: np.ndarray) -> Iterator[list[Chunk]]:
        """Yields chunks that contain all tokens of some samples, shard by shard.

        Args:
            sample_indices: Indices of the samples in the run, ascending.

        Yields:
            A list of the chunks of a shard. Samples that are adjacent in the shard form one chunk.
        """
        shard_indices_of_samples = (
            np.searchsorted(self.shards.first_sample_indices_of_shards, sample_indices, "right") - 1
        )
        for shard_index in np.unique(shard_indices_of_samples).tolist():
            sample_indices_in_shard = (
                sample_indices[shard_indices_of_samples == shard_index]
                - self.shards.first_sample_indices_of_shards[shard_index]
            )
            with as_os_errors():
                sample_offsets = self.shards.get(shard_index).sample_offsets
            yield [
                Chunk(
                    shard_index,
                    int(sample_offsets[adjacent_sample_indices[0]]),
                    int(sample_offsets[adjacent_sample_indices[-1] + 1]),
                )
                for adjacent_sample_indices in np.split(
                    sample_indices_in_shard,
                    np.flatnonzero(np.diff(sample_indices_in_shard) != 1) + 1,
                )
            ]

    def tokens(self, chunks: Sequence[Chunk]) -> ChunkTokens:
        """Reads all tokens of some chunks of one shard, and applies the filters except `max_norm`.

        Args:
            chunks: Chunks of the shard, in ascending order.

        Returns:
            All tokens of the chunks, and whether each token passes the filters.
        """
        return self._begin_tokens(chunks)()

    def _begin_tokens(self, chunks: Sequence[Chunk]) -> Callable[[], ChunkTokens]:
        """Begins to read all tokens of some chunks of one shard, without their activations.

        Args:
            chunks: Chunks (ranges of consecutive tokens) of the shard, in ascending order.

        Returns:
            A function that waits for the tokens and returns them.
        """
        shard_index = chunks[0].shard_index
        first_token_index = chunks[0].start_token_index
        stop_token_index = chunks[-1].stop_token_index
        token_indices_in_shard = np.concatenate(
            [np.arange(chunk.start_token_index, chunk.stop_token_index) for chunk in chunks]
        )
        with as_os_errors():
            shard_reader = self.shards.get(shard_index)
            wait_for_fields = shard_reader.begin_tokens(first_token_index, stop_token_index)

        def wait() -> ChunkTokens:
            sample_indices_of_tokens = (
                np.searchsorted(shard_reader.sample_offsets, token_indices_in_shard, "right") - 1
            )
            sample_numbers_of_tokens = shard_reader.sample_numbers[sample_indices_of_tokens]
            with as_os_errors():
                values_of_token_range_by_field = wait_for_fields()
            no_activations = ByHook[np.ndarray](
                {}, self.shards.stored_hook_by_name.canonical_name_by_alias
            )
            values_by_field: dict[str, Any] = {
                field_name: values_of_token_range[token_indices_in_shard - first_token_index]
                for field_name, values_of_token_range in values_of_token_range_by_field.items()
            }
            batch_without_activations = TokenBatch(
                no_activations, sample_idx=sample_numbers_of_tokens, **values_by_field
            )
            sample_indices_of_tokens += self.shards.first_sample_indices_of_shards[shard_index]
            wanted_token_mask = batch_without_activations.position >= self.options.skip_first
            if self.sample_mask is not None:
                wanted_token_mask &= self.sample_mask[sample_indices_of_tokens]
            if self.options.roles is not None:
                wanted_token_mask &= np.isin(
                    values_by_field["role"], [*map(ROLES.index, self.options.roles)]
                )
            return ChunkTokens(
                shard_index,
                token_indices_in_shard,
                batch_without_activations,
                sample_indices_of_tokens,
                wanted_token_mask,
            )

        return wait

    def with_activations(self, chunk_tokens: ChunkTokens, wanted_indices: np.ndarray) -> Block:
        """Reads the activations of some tokens, and returns the tokens with their activations.

        If the file is mapped into memory and the activations are not encoded, the activations are
        views of the file. Encoded activations are decoded to the dtype of the options. Unwanted
        tokens between two wanted tokens are read as well, unless the two wanted tokens are more
        than MIN_SKIPPED_BYTES bytes apart.

        Args:
            chunk_tokens: All tokens of some chunks of a shard, without their activations.
            wanted_indices: Indices into `chunk_tokens` of the wanted tokens, int64 (n,).

        Returns:
            A block of all tokens that were read, also unwanted ones. Its `wanted_token_indices` are
            the indices of the wanted tokens in the block, in the order of `wanted_indices`.
        """
        hook_names = self.options.hooks
        bytes_per_token_of_largest_hook = max(
            (self.shards.bytes_per_token([hook_name]) for hook_name in hook_names), default=0
        )
        ascending_indices = np.sort(wanted_indices)
        range_break_mask = (
            np.diff(ascending_indices) * bytes_per_token_of_largest_hook > MIN_SKIPPED_BYTES
        )
        # Tokens that are adjacent in `chunk_tokens` may belong to different chunks, and then need
        # not be adjacent in the shard.
        range_break_mask |= np.diff(chunk_tokens.token_indices[ascending_indices]) != np.diff(
            ascending_indices
        )
        wanted_index_arrays = np.split(ascending_indices, np.flatnonzero(range_break_mask) + 1)
        # For each range, the indices into `chunk_tokens` of all tokens in the range.
        read_index_arrays = [
            np.arange(*_range_of(wanted_indices_in_range))
            for wanted_indices_in_range in wanted_index_arrays
        ]
        token_ranges = [
            _range_of(chunk_tokens.token_indices[read_indices_in_range])
            for read_indices_in_range in read_index_arrays
        ]
        activations = self._begin_activations(chunk_tokens.shard_index, token_ranges)()
        indices_of_read_tokens = np.concatenate(read_index_arrays)
        batch_without_activations = chunk_tokens.token_batch.map(itemgetter(indices_of_read_tokens))
        token_batch = replace(batch_without_activations, activations=activations)
        return Block(token_batch, np.searchsorted(indices_of_read_tokens, wanted_indices))

    def _begin_activations(
        self, shard_index: int, token_ranges: Sequence[tuple[int, int]]
    ) -> Callable[[], ByHook[np.ndarray]]:
        """Begins to read the activations of ranges of tokens at the hooks that `options` selects.

        Args:
            shard_index: Index of the shard among the shards of the run, from 0.
            token_ranges: For each range, a tuple of the index of its first token in the shard and
                the index after its last token.

        Returns:
            A function that waits for the activations and returns them by hook. The array of a hook
            contains the activations of all ranges, one range after the other.
        """
        stored_hook_by_name = self.shards.stored_hook_by_name
        dtype = self.options.dtype
        with as_os_errors():
            shard_reader = self.shards.get(shard_index)
            wait_functions_by_hook_name = {
                hook_name: [
                    stored_hook_by_name[hook_name].begin_rows(shard_reader, *token_range, dtype)
                    for token_range in token_ranges
                ]
                for hook_name in self.options.hooks
            }

        def wait() -> ByHook[np.ndarray]:
            with as_os_errors():
                values_by_hook = {
                    hook_name: _concatenate([wait_for_range() for wait_for_range in wait_functions])
                    for hook_name, wait_functions in wait_functions_by_hook_name.items()
                }
            return ByHook(values_by_hook, stored_hook_by_name.canonical_name_by_alias)

        return wait

    def _all_of(self, chunk: Chunk) -> TokenBatch:
        """Reads all tokens of a chunk and, at the same time, the activations of these tokens."""
        wait_for_tokens = self._begin_tokens([chunk])
        wait_for_activations = self._begin_activations(
            chunk.shard_index, [(chunk.start_token_index, chunk.stop_token_index)]
        )
        return replace(wait_for_tokens().token_batch, activations=wait_for_activations())

    def whole_tokens(self, chunks: Sequence[Chunk]) -> TokenBatch:
        """Returns all tokens of some chunks as one batch, without applying the filters.

        Args:
            chunks: Chunks of any shards, in the order of the batch.
        """
        batches = [self._all_of(chunk) for chunk in chunks]
        blocks = [Block(batch, np.arange(len(batch))) for batch in batches]
        return self.take(blocks, 0, sum(len(block.wanted_token_indices) for block in blocks))

    def reader(self) -> ReadChunk:
        """Returns a function that reads and filters the chunks of this run.

        Returns:
            A function that takes a chunk (consecutive tokens of a shard) and returns a tuple with
            one `Block`: the tokens that were read, with their activations. It is a tuple because
            the function for paired runs returns a block for each run. The `wanted_token_indices` of
            the block are the indices, in the block, of the tokens that pass all filters, including
            `max_norm`.
        """
        options = self.options
        has_token_filters = (
            bool(options.skip_first or options.roles) or self.sample_mask is not None
        )

        def read(chunk: Chunk) -> tuple[Block, ...]:
            # The tokens are read first if they determine which activations are read.
            if has_token_filters:
                chunk_tokens = self.tokens([chunk])
                token_block = self.with_activations(
                    chunk_tokens, np.flatnonzero(chunk_tokens.wanted_token_mask)
                )
            else:
                batch = self._all_of(chunk)
                token_block = Block(batch, np.arange(len(batch)))
            return (
                Block(
                    token_block.token_batch,
                    token_block.wanted_token_indices[self.within_max_norm_token_mask(token_block)],
                ),
            )

        return read

    def within_max_norm_token_mask(self, block: Block) -> np.ndarray:
        """Returns, for each wanted token of a block, whether its norms are at most `max_norm`.

        Args:
            block: Block whose `wanted_token_indices` select the wanted tokens, with the activations
                of all hooks for which `max_norm` contains a limit.

        Returns:
            Whether the norms of each wanted token are within the limits at all hooks, bool
            (wanted tokens,).
        """
        within_max_norm_mask_of_block = np.ones(len(block.token_batch), bool)
        for hook_name, max_norm in self.options.max_norm.items():
            within_max_norm_mask_of_block &= (
                np.linalg.norm(block.token_batch[hook_name].astype(np.float32), axis=1) <= max_norm
            )
        return within_max_norm_mask_of_block[block.wanted_token_indices]

    def take(self, blocks: Sequence[Block], start: int, stop: int) -> TokenBatch:
        """Copies some of the wanted tokens of blocks into a new batch, and returns the batch.

        Args:
            blocks: Blocks, in the order of their tokens.
            start: Index of the first token to copy, counted over the wanted tokens
                (`wanted_token_indices`) of all blocks.
            stop: Index after the last token to copy.

        Raises:
            ValueError: If a value is too large for the dtype of the batch.
        """
        stored_hook_by_name = self.shards.stored_hook_by_name
        options = self.options
        requested_dtype_by_hook = {
            hook_name: options.dtype
            for hook_name in options.hooks
            if options.dtype and stored_hook_by_name[hook_name].values_are_activations
        }
        batch = empty_batch(blocks[0].token_batch, stop - start, requested_dtype_by_hook)
        num_preceding_tokens = 0  # number of wanted tokens in earlier blocks
        for token_block in blocks:
            copy_start_in_wanted_tokens = max(start - num_preceding_tokens, 0)
            copy_stop_in_wanted_tokens = max(stop - num_preceding_tokens, 0)
            taken_token_indices = token_block.wanted_token_indices[
                copy_start_in_wanted_tokens:copy_stop_in_wanted_tokens
            ]
            if len(taken_token_indices):
                first_token_index_in_batch = max(num_preceding_tokens - start, 0)
                # NumPy's warning about overflow is switched off, because it does not cover every
                # conversion: NumPy warns if float32 values overflow float16, but not if bfloat16
                # values do. For both, ValueError is raised below.
                with np.errstate(over="ignore"):
                    copy_wanted_tokens(
                        Block(token_block.token_batch, taken_token_indices),
                        np.arange(
                            first_token_index_in_batch,
                            first_token_index_in_batch + len(taken_token_indices),
                        ),
                        batch,
                    )
            num_preceding_tokens += len(token_block.wanted_token_indices)
        for hook_name in requested_dtype_by_hook:
            batch_values = batch[hook_name]
            was_converted_to_float16 = (
                stored_hook_by_name[hook_name].user_dtype != batch_values.dtype == np.float16
            )
            if was_converted_to_float16 and overflows(batch_values):
                raise ValueError(
                    f"hook {hook_name!r}: float16 ends at 65504, before its largest values; "
                    'read them with dtype="bfloat16" or "float32"'
                )
        values_by_hook = {
            hook_name: stored_hook_by_name[hook_name].for_user(stored_values)
            for hook_name, stored_values in batch.items()
        }
        batch = replace(
            batch, activations=ByHook(values_by_hook, stored_hook_by_name.canonical_name_by_alias)
        )
        if column_names := options.columns:
            batch = replace(batch, columns=self.columns(column_names, batch.sample_idx))
        return batch


def _concatenate(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the concatenation of arrays. A single array is returned without a copy."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _range_of(ascending_numbers: np.ndarray) -> tuple[int, int]:
    """Returns the smallest range that contains some ascending numbers.

    Returns:
        A tuple of the first number and the last number plus 1; (0, 0) if there are no numbers.
    """
    return (
        (int(ascending_numbers[0]), int(ascending_numbers[-1]) + 1)
        if len(ascending_numbers)
        else (0, 0)
    )


def overflows(values: np.ndarray) -> bool:
    """Returns whether values include infinity or NaN, for example after a conversion to float16.

    Args:
        values: Values in float16, of any shape.
    """
    return bool(values.size) and bool((values.view(np.uint16) & 0x7FFF).max() >= 0x7C00)


def floating_name(dtype: Any) -> str | None:
    """Returns the name of a dtype if activations can be converted to this dtype.

    The names of these dtypes are listed in FLOATING.

    Args:
        dtype: Name of a dtype, or an object that `np.dtype` accepts, such as `np.float32`. None for
            no dtype.

    Returns:
        The name. None if `dtype` is None, or if activations cannot be converted to it.
    """
    matching_dtype_names = [
        dtype_name for dtype_name in FLOATING if dtype is not None and np.dtype(dtype_name) == dtype
    ]
    return matching_dtype_names[0] if matching_dtype_names else None


def default_buffer(
    options: BatchOptions, hook_count: int, bytes_per_token: int, is_local: bool
) -> int:
    """Returns the default of BatchOptions.buffer, which is a number of tokens to keep in memory.

    Args:
        options: Options of the batches.
        hook_count: Number of hooks that are read.
        bytes_per_token: Bytes of memory for the values of a token at all these hooks.
        is_local: Whether the files are on this machine. If they are in a bucket, large ranges of
            every hook are read, so that the buffer has to be larger.
    """
    buffer_bytes_per_hook = ORDERED_BYTES if options.shuffle is None else SHUFFLED_BYTES
    buffer_bytes = (
        BUFFER_BYTES if is_local else min(buffer_bytes_per_hook * max(hook_count, 1), BUFFER_BYTES)
    )
    num_buffer_tokens = buffer_bytes // max(bytes_per_token, 1)
    return max(
        min(BUFFER_BATCHES * options.size, num_buffer_tokens) if is_local else num_buffer_tokens,
        2 * options.size,
    )


def as_mask(mask: Any, sample_count: int) -> np.ndarray:
    """Returns a user's mask of samples as a NumPy array, bool (sample_count,).

    Args:
        mask: A boolean for each sample: a list, or an array of NumPy, pandas or pyarrow.
        sample_count: Number of samples.

    Raises:
        ValueError: If the length of the mask is not `sample_count`, or if the mask contains nulls
            or values that are no booleans.
    """
    mask_array = np.asarray(mask)
    boolean_mask = mask_array
    # np.asarray converts an array of pandas or pyarrow that may contain nulls to the dtype object,
    # and an empty list to the dtype float64.
    if mask_array.dtype == object or not mask_array.size:
        boolean_mask = np.array(
            [element for element in mask_array.flat if isinstance(element, bool | np.bool_)], bool
        )
    are_all_elements_booleans = (
        boolean_mask.dtype == bool and boolean_mask.shape == mask_array.shape
    )
    if not are_all_elements_booleans or mask_array.shape != (sample_count,):
        raise ValueError(
            f"where: {mask_array.dtype}, shape {mask_array.shape}: expected true or "
            f"false, never null, for each of {counted(sample_count, 'sample')}"
        )
    return boolean_mask
