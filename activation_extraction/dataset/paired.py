"""Reads the tokens that several runs over the same data have in common.

`PairedRuns`, the result of `paired`, reads batches of the same tokens from two runs. `JoinedRuns`,
the result of `ActivationDataset.join`, is one dataset with the hooks of all runs.

Samples of two runs count as the same sample if they come from the same row of the data set. Tokens
of two runs count as the same token if they have the same position in the same sample. A run stores
the position of a row, for example a file name and a line number, which may be equal in different
data sets. Runs whose metadata records different data sets are therefore rejected with ValueError.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial, reduce
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow

from activation_extraction.common.log import log
from activation_extraction.common.visible import counted, without_secrets
from activation_extraction.dataset.batches import Batches
from activation_extraction.dataset.token_batch import (
    Block,
    ByHook,
    SampleActivations,
    Samples,
    TokenBatch,
    TokenPair,
    concatenate_batches,
)
from activation_extraction.dataset.token_source import (
    BatchOptions,
    ChunkTokens,
    ReadChunk,
    TokenSource,
    as_mask,
    default_buffer,
)
from activation_extraction.dataset.windows import Chunk
from activation_extraction.store.resume import shown
from activation_extraction.store.statistics import HookStatistics

if TYPE_CHECKING:  # dataset.py imports this module, so a real import would be circular
    from activation_extraction.dataset.dataset import ActivationDataset


class AlignedRuns:
    """Several runs over the same data, reduced to the tokens that all of the runs store.

    `len()` of an AlignedRuns is the number of samples that all runs have.

    Args:
        *runs: Datasets of the runs.

    Attributes:
        runs: Datasets of the runs, in the order of the arguments.
        unpaired_samples: Tuple with a number for each run: the number of its samples that at least
            one other run lacks.

    Raises:
        ValueError: If the runs have no row in common, if two samples of one run come from the same
            row, or if the metadata shows that the samples of the runs come from different data or
            were made in different ways.
    """

    def __init__(self, *runs: "ActivationDataset") -> None:
        self.runs = runs
        urls_phrase = without_secrets(" and ".join(dataset.url for dataset in runs))
        for dataset in runs[1:]:
            data_files_of_runs = runs[0].data_files, dataset.data_files
            for setting_name, first_value, other_value in runs[0].identity.other_samples(
                dataset.identity, *data_files_of_runs
            ):
                message = (
                    f"{runs[0].url} and {dataset.url}: their samples are not those of the same "
                    f"data: {setting_name} is {shown(first_value, other_value)} in one and "
                    f"{shown(other_value, first_value)} in the other"
                )
                raise ValueError(without_secrets(message))
        row_tables = [_row_table(dataset, str(run_index)) for run_index, dataset in enumerate(runs)]
        joined_table = reduce(
            lambda left_table, right_table: left_table.join(right_table, "row", join_type="inner"),
            row_tables,
        )
        # Indices of the common samples in each run, int64 (runs, samples). Each column is a sample,
        # and the columns have the order of the first run.
        self._sample_indices_of_runs = np.stack(
            joined_table.sort_by("0").drop_columns("row").columns
        )
        if not len(self):
            raise ValueError(f"{urls_phrase}: no row of the data set has a sample in each of them")
        self.unpaired_samples = tuple(len(dataset) - len(self) for dataset in runs)
        sample_token_counts_of_runs = [
            dataset.shards.columns(["tokens"])["tokens"] for dataset in runs
        ]
        # For each run, an array with its token count of each sample that all runs have.
        common_sample_token_counts_of_runs = [
            token_counts_of_run[sample_indices].astype(int)
            for token_counts_of_run, sample_indices in zip(
                sample_token_counts_of_runs, self._sample_indices_of_runs, strict=True
            )
        ]
        for dataset, num_left_out_samples, token_counts_of_run in zip(
            runs, self.unpaired_samples, common_sample_token_counts_of_runs, strict=True
        ):
            if num_left_out_samples:
                left_out_samples_phrase = counted(num_left_out_samples, "sample")
                num_left_out_tokens = dataset.tokens - token_counts_of_run.sum()
                left_out_tokens_phrase = counted(num_left_out_tokens, "token")
                log.warning(
                    "%s: %s (%s) left out: not all runs have them",
                    dataset.url,
                    left_out_samples_phrase,
                    left_out_tokens_phrase,
                )
        if any(
            dataset.identity.kept_tokens != runs[0].identity.kept_tokens
            or (token_counts_of_run != common_sample_token_counts_of_runs[0]).any()
            for dataset, token_counts_of_run in zip(
                runs, common_sample_token_counts_of_runs, strict=True
            )
        ):
            log.warning(
                "%s: store different tokens of the same samples; only those that all have are read",
                urls_phrase,
            )

    def __len__(self) -> int:
        return self._sample_indices_of_runs.shape[1]

    def _batches(
        self, make_batch: Any, hooks: Sequence[list[str]], options: BatchOptions
    ) -> Batches[Any]:
        """Returns batches of the tokens that all runs have.

        Args:
            make_batch: Function that takes a list with a TokenBatch of each run, and returns the
                batch to yield.
            hooks: For each run, the canonical names of the hooks to read.
            options: Options of the batches. If `where` is a mask, it has a boolean for each sample
                of the first run. If it is a function, it is called for every run with the table
                `samples` of the run.

        Raises:
            ValueError: If an option is invalid for these runs.
        """
        datasets_and_hook_names = list(zip(self.runs, hooks, strict=True))
        bytes_per_token = sum(
            dataset.shards.bytes_per_token(hook_names)
            for dataset, hook_names in datasets_and_hook_names
        )
        are_all_runs_local = all(dataset.shards.is_local for dataset in self.runs)
        num_buffer_tokens = options.buffer or default_buffer(
            options, sum(map(len, hooks)), bytes_per_token, are_all_runs_local
        )
        hook_names_with_unused_max_norm = (
            set(options.max_norm) if isinstance(options.max_norm, Mapping) else set()
        )
        token_sources = list[TokenSource]()
        for dataset, hook_names in datasets_and_hook_names:
            max_norm_of_run = options.max_norm
            canonical_name_by_alias = dataset.hooks.canonical_name_by_alias
            if isinstance(options.max_norm, Mapping):
                max_norm_by_hook_name = {
                    hook_name: norm_limit
                    for hook_name, norm_limit in options.max_norm.items()
                    if canonical_name_by_alias.get(hook_name, hook_name) in hook_names
                }
                hook_names_with_unused_max_norm -= max_norm_by_hook_name.keys()
                max_norm_of_run = max_norm_by_hook_name
            sample_filter_of_run = (
                options.where if callable(options.where) or not token_sources else None
            )
            batch_options_of_run = replace(
                options,
                hooks=hook_names,
                buffer=num_buffer_tokens,
                max_norm=max_norm_of_run,
                where=sample_filter_of_run,
            )
            token_sources.append(dataset.source(batch_options_of_run))
        for hook_name in hook_names_with_unused_max_norm:
            raise ValueError(f"max_norm: hook {hook_name!r} is not read")
        token_sources[0] = token_sources[0].of(self._sample_indices_of_runs[0])
        return Batches(
            token_sources,
            make_batch,
            partial(aligned_reader, token_sources, self._sample_indices_of_runs),
        )


class PairedRuns(AlignedRuns):
    """Two runs over the same data that are read side by side, as `paired` returns them.

    `len()` of a PairedRuns is the number of samples that both runs have.

    Args:
        *runs: Datasets of the two runs.

    Attributes:
        runs: Datasets of the two runs, in the order in which `paired` was called with them.
        unpaired_samples: Tuple with a number for each run: the number of its samples that the other
            run lacks.

    Raises:
        ValueError: If the runs have no row in common, if two samples of one run come from the same
            row, or if the metadata shows that the samples of the runs come from different data or
            were made in different ways.
    """

    def batches(self, size: int, hooks: Any = None, **options: Any) -> Batches[TokenPair]:
        """Returns an iterator over the tokens that both runs have, as pairs of batches.

        Row t of every array of a pair belongs to the same token. The tokens have the order of the
        first run. Tokens that fail the filters in one of the runs are left out.

        Args:
            size: Number of tokens in each batch of a pair; the last pair may have fewer.
            hooks: Names of the hooks to read in both runs, or globs. None for all hooks of both
                datasets. To read different hooks in the two runs, pass datasets to `paired` that
                were opened with different hooks.
            **options: Any other fields of BatchOptions. If `where` is a mask, it has a boolean for
                each sample of the first run. If it is a function, it is called for each run with
                the table `samples` of the run.

        Returns:
            An iterator that yields a TokenPair, a batch of each run, at each step.

        Raises:
            ValueError: If an argument is invalid for these runs.
        """
        hook_names_of_runs = [dataset.hooks.chosen(dataset.url, hooks) for dataset in self.runs]
        return self._batches(TokenPair._make, hook_names_of_runs, BatchOptions(size, **options))


class JoinedRuns(AlignedRuns, Samples):
    """Several runs over the same data, each with other hooks, as one sequence of samples.

    `ActivationDataset.join` returns it. The sequence contains the samples and tokens that all runs
    have, in the order of the first run.

    Args:
        *runs: Datasets of the runs.

    Attributes:
        hooks: Width of every hook of all runs, by the name of the hook. The width of a hook with
            codes is the number of features.
        dtypes: Dtype of every hook of all runs, by the name of the hook.
        runs: Datasets of the runs, in the order of the arguments.
        unpaired_samples: Tuple with a number for each run: the number of its samples that at least
            one other run lacks.

    Raises:
        ValueError: If two runs have a hook of the same name, if the runs have no row in common, if
            two samples of one run come from the same row, or if the metadata shows that the samples
            of the runs come from different data or were made in different ways.
    """

    def __init__(self, *runs: "ActivationDataset") -> None:
        self.hooks: ByHook[int] = _joined_hooks([dataset.hooks for dataset in runs])
        self.dtypes: ByHook[np.dtype] = _joined_hooks([dataset.dtypes for dataset in runs])
        super().__init__(*runs)

    @cached_property
    def statistics(self) -> ByHook[HookStatistics]:
        """Statistics of every hook of all runs, by the name of the hook.

        Each hook belongs to exactly one of the runs. Its statistics cover all tokens of this run,
        also the tokens that another run lacks.
        """
        return _joined_hooks([dataset.statistics for dataset in self.runs])

    @cached_property
    def samples(self) -> pyarrow.Table:
        """The table of the samples that all runs have, with the columns of the first run.

        The column `tokens` contains the number of tokens that the first run stores of a sample,
        which may be larger than the number of tokens that all runs have.
        """
        return self.runs[0].samples.take(self._sample_indices_of_runs[0])

    def join(self, other: Any) -> "JoinedRuns":
        """Returns a dataset that also has the hooks of another run (see `ActivationDataset.join`).

        Args:
            other: The other run: an ActivationDataset, or the URL of a run.

        Raises:
            ValueError: If a hook of the other run is in this dataset, if no row has a sample in
                each of the runs, if two samples of the other run come from the same row, or if the
                metadata shows that the samples of the runs come from different data or were made in
                different ways. If `other` is a URL, also if there is no run at the URL.
            OSError: If a file of the other run is damaged, missing or cut short.
        """
        return JoinedRuns(*self.runs, self.runs[0].opened(other))

    def batches(self, size: int, hooks: Any = None, **options: Any) -> Batches[TokenBatch]:
        """Returns an iterator over the tokens that all runs have, with the hooks of all runs.

        Tokens that fail the filters in one of the runs are left out. All arrays of a batch except
        for the activations come from the first run.

        Args:
            size: Number of tokens in a batch; the last batch may have fewer.
            hooks: Names of the hooks to read, or globs. None for all hooks.
            **options: Any other fields of BatchOptions. If `where` is a mask, it has a boolean for
                each sample of this dataset. If it is a function, it is called with the table
                `samples` of this dataset.

        Returns:
            An iterator that yields a TokenBatch at each step.

        Raises:
            ValueError: If an argument is invalid for these runs.
        """
        chosen_hook_names = self.hooks.chosen("the joined runs", hooks)
        hook_names_of_runs = [
            [hook_name for hook_name in chosen_hook_names if hook_name in dataset.hooks]
            for dataset in self.runs
        ]
        batch_options = BatchOptions(size, **options)
        if (sample_filter := batch_options.where) is not None:
            sample_mask = as_mask(
                sample_filter(self.samples) if callable(sample_filter) else sample_filter, len(self)
            )
            sample_mask_of_first_run = np.isin(
                np.arange(len(self.runs[0])), self._sample_indices_of_runs[0][sample_mask]
            )
            batch_options = replace(batch_options, where=sample_mask_of_first_run)
        return self._batches(_joined, hook_names_of_runs, batch_options)

    def _sample(self, index: int) -> SampleActivations:
        """Returns a sample with the hooks of all runs and the tokens that all runs have.

        Args:
            index: Index of the sample in this dataset, which contains only samples that all runs
                have.

        Raises:
            ValueError: If two runs have different ids for the same token.
        """
        indices_of_sample_in_runs = self._sample_indices_of_runs[:, index].tolist()
        samples = [
            dataset[sample_index_in_run]
            for dataset, sample_index_in_run in zip(
                self.runs, indices_of_sample_in_runs, strict=True
            )
        ]
        common_positions = reduce(np.intersect1d, (sample.position for sample in samples))
        first_sample, *other_samples = (
            _at_positions(sample, common_positions) for sample in samples
        )
        for dataset, other_sample in zip(self.runs[1:], other_samples, strict=True):
            _check_same_tokens((self.runs[0].url, dataset.url), first_sample, other_sample)
        return _joined([first_sample, *other_samples])


def aligned_reader(
    token_sources: Sequence[TokenSource], sample_indices_of_runs: np.ndarray
) -> ReadChunk:
    """Returns a function that reads a chunk, and keeps the tokens that all runs have.

    If a run other than the first stores pickles, the tokens of a whole shard of the first run are
    aligned at once. Aligning each chunk of the shard alone would decompress the pickles of the
    other run again for every chunk.

    Args:
        token_sources: The TokenSource of each run. The `sample_mask` of the first TokenSource tells
            which samples are read.
        sample_indices_of_runs: Indices of the common samples in each run, int64 (runs, samples).
            Each column is a sample, and the columns have the order of the first run.

    Returns:
        A function that takes a chunk of the first run (consecutive tokens of a shard), and returns
        a tuple with a `Block` for each run: tokens with their activations, and the indices of the
        wanted tokens among them. Item i of the blocks' `wanted_token_indices` refers to
        the same token in all blocks, and this token passes the filters of all runs.
    """
    first_token_source, *other_token_sources = token_sources
    wanted_sample_mask = np.asarray(first_token_source.sample_mask)[sample_indices_of_runs[0]]
    wanted_sample_indices_of_runs = sample_indices_of_runs[:, wanted_sample_mask]
    needs_whole_shards = not all(
        token_source.shards.can_read_ranges for token_source in other_token_sources
    )

    # If whole shards are aligned, all chunks of a shard need the same result, so the last result is
    # kept. Otherwise no result is kept.
    @lru_cache(int(needs_whole_shards))
    def align(chunk: Chunk) -> tuple[ChunkTokens, list[Block]]:
        first_run_tokens = first_token_source.tokens([chunk])
        first_sample_index, last_sample_index = first_run_tokens.sample_indices[[0, -1]]
        start_column, stop_column = np.searchsorted(
            wanted_sample_indices_of_runs[0], [first_sample_index, last_sample_index + 1]
        )
        token_blocks_of_other_runs = [
            _find_in_other_run(
                first_token_source,
                token_source,
                first_run_tokens,
                wanted_sample_indices_of_runs[[0, run_index], start_column:stop_column],
            )
            for run_index, token_source in enumerate(other_token_sources, 1)
        ]
        return first_run_tokens, token_blocks_of_other_runs

    def read(chunk: Chunk) -> tuple[Block, ...]:
        chunk_to_align = (
            first_token_source.whole(chunk.shard_index) if needs_whole_shards else chunk
        )
        first_run_tokens, token_blocks_of_other_runs = align(chunk_to_align)
        start_in_alignment = chunk.start_token_index - chunk_to_align.start_token_index
        stop_in_alignment = start_in_alignment + len(chunk)
        in_all_runs_token_mask = np.all(
            [
                token_block_of_other_run.wanted_token_indices[start_in_alignment:stop_in_alignment]
                >= 0
                for token_block_of_other_run in token_blocks_of_other_runs
            ],
            axis=0,
        )
        common_token_indices = start_in_alignment + np.flatnonzero(in_all_runs_token_mask)
        token_block_of_first_run = first_token_source.with_activations(
            first_run_tokens, common_token_indices
        )
        within_max_norm_token_mask = first_token_source.within_max_norm_token_mask(
            token_block_of_first_run
        )
        token_blocks_of_runs = (
            token_block_of_first_run,
            *(
                Block(
                    token_block_of_other_run.token_batch,
                    token_block_of_other_run.wanted_token_indices[common_token_indices],
                )
                for token_block_of_other_run in token_blocks_of_other_runs
            ),
        )
        return tuple(
            Block(
                token_block_of_run.token_batch,
                token_block_of_run.wanted_token_indices[within_max_norm_token_mask],
            )
            for token_block_of_run in token_blocks_of_runs
        )

    return read


def _find_in_other_run(
    first_token_source: TokenSource,
    other_token_source: TokenSource,
    first_run_tokens: ChunkTokens,
    sample_pairs: np.ndarray,
) -> Block:
    """Finds tokens of the first run in another run, and reads them from the other run.

    Args:
        first_token_source: TokenSource of the first run.
        other_token_source: TokenSource of the other run.
        first_run_tokens: Tokens of the first run, without their activations.
        sample_pairs: Indices of the samples to search for these tokens, int64 (2, samples). Row 0
            contains the indices of the samples in the first run, and row 1 contains the indices of
            the same samples in the other run.

    Returns:
        A `Block`, which consists of a batch of tokens and of indices into this batch.
            token_batch: Tokens of the other run, with their activations. If none of the tokens is
                found, a placeholder to which no index refers.
            wanted_token_indices: For each token of `first_run_tokens`, the index of the same token
                in `token_batch`. The index is -1 if the other run lacks the token, or if the token
                fails a filter of one of the runs. Only the filter `max_norm` of the first run is
                not applied here.

    Raises:
        ValueError: If a token has a different id in the other run.
    """
    sample_indices_in_first_run, sample_indices_in_other_run = sample_pairs[
        :, np.argsort(sample_pairs[1])
    ]
    # Each token gets an integer as its key. The upper 32 bits are the index of the token's sample
    # in the first run, and the lower 32 bits are the token's position. Tokens of the two runs are
    # the same if their keys are equal.
    first_run_token_keys = (
        first_run_tokens.sample_indices << 32 | first_run_tokens.token_batch.position
    )
    token_indices_in_other_batch = np.full(len(first_run_token_keys), -1)
    other_run_batches = list[TokenBatch]()
    for chunks_of_shard in other_token_source.by_shard(sample_indices_in_other_run):
        other_run_tokens = other_token_source.tokens(chunks_of_shard)
        first_run_sample_indices_of_tokens = sample_indices_in_first_run[
            np.searchsorted(sample_indices_in_other_run, other_run_tokens.sample_indices)
        ]
        other_run_token_keys = (
            first_run_sample_indices_of_tokens << 32 | other_run_tokens.token_batch.position
        )
        _, token_indices_in_first_run, token_indices_in_other_run = np.intersect1d(
            first_run_token_keys,
            other_run_token_keys,
            return_indices=True,
        )
        common_batches = (
            first_run_tokens.token_batch.map(itemgetter(token_indices_in_first_run)),
            other_run_tokens.token_batch.map(itemgetter(token_indices_in_other_run)),
        )
        _check_same_tokens(
            (first_token_source.shards.url, other_token_source.shards.url), *common_batches
        )
        wanted_token_mask = (
            first_run_tokens.wanted_token_mask[token_indices_in_first_run]
            & other_run_tokens.wanted_token_mask[token_indices_in_other_run]
        )
        token_block_of_other_run = other_token_source.with_activations(
            other_run_tokens, token_indices_in_other_run[wanted_token_mask]
        )
        if (
            within_max_norm_token_mask := other_token_source.within_max_norm_token_mask(
                token_block_of_other_run
            )
        ).any():
            token_indices_in_other_batch[
                token_indices_in_first_run[wanted_token_mask][within_max_norm_token_mask]
            ] = token_block_of_other_run.wanted_token_indices[within_max_norm_token_mask] + sum(
                map(len, other_run_batches)
            )
            other_run_batches.append(token_block_of_other_run.token_batch)
    return Block(
        concatenate_batches(other_run_batches or [first_run_tokens.token_batch]),
        token_indices_in_other_batch,
    )


def _check_same_tokens(urls: Sequence[str], *batches_or_samples: Any) -> None:
    """Raises ValueError if the ids of a token differ between two runs.

    Args:
        urls: URLs of the two runs.
        *batches_or_samples: A TokenBatch or a SampleActivations of each of the two runs. Token i of
            both comes from the same row of the data set, and has the same position in its sample.
    """
    first_batch_or_sample, other_batch_or_sample = batches_or_samples
    different_token_mask = first_batch_or_sample.token_ids != other_batch_or_sample.token_ids
    for token_index in np.flatnonzero(different_token_mask).tolist():
        difference_phrase = " but ".join(
            f"{batch_or_sample.token_ids[token_index]} in sample "
            f"{_sample_number_of_token(batch_or_sample, token_index)} of {run_url}"
            for run_url, batch_or_sample in zip(urls, batches_or_samples, strict=True)
        )
        position = first_batch_or_sample.position[token_index]
        message = f"the token at position {position} of the same row is {difference_phrase}"
        raise ValueError(without_secrets(message))


def _sample_number_of_token(batch_or_sample: Any, token_index: int) -> int:
    """Returns the number (`sample_idx`) of the sample that a token belongs to.

    Args:
        batch_or_sample: A TokenBatch, which has a number for each token, or a SampleActivations,
            which has one number for all tokens.
        token_index: Index of the token in `batch_or_sample`.
    """
    sample_numbers_of_tokens = np.broadcast_to(
        batch_or_sample.sample_idx, batch_or_sample.token_ids.shape
    )
    return int(sample_numbers_of_tokens[token_index])


def _joined_hooks(values_of_runs: Sequence[ByHook[Any]]) -> ByHook[Any]:
    """Merges mappings from the hooks of several runs into one mapping, with all aliases.

    Args:
        values_of_runs: For each run, a mapping from the names of its hooks to values of any type.

    Returns:
        A mapping from the names of the hooks of all runs to their values. It also accepts the other
        names of hooks (aliases) that the runs record.

    Raises:
        ValueError: If two runs have a hook of the same name.
    """
    joined_value_by_hook = ByHook[Any]({})
    for value_by_hook in values_of_runs:
        for hook_name in filter(joined_value_by_hook.__contains__, value_by_hook):
            raise ValueError(f"hook {hook_name!r} is in more than one of the runs")
        joined_value_by_hook.update(value_by_hook)
        joined_value_by_hook.canonical_name_by_alias.update(value_by_hook.canonical_name_by_alias)
    return joined_value_by_hook


def _joined(batches_or_samples: Sequence[Any]) -> Any:
    """Returns one batch or sample with the hooks of all runs.

    Args:
        batches_or_samples: A TokenBatch of each run, or a SampleActivations of each run, with the
            same tokens. The result contains the activations of all runs. All of its other arrays,
            such as the token ids, come from the first run.
    """
    joined_activations = _joined_hooks(
        [batch_or_sample.activations for batch_or_sample in batches_or_samples]
    )
    return replace(batches_or_samples[0], activations=joined_activations)


def _at_positions(sample: SampleActivations, positions: np.ndarray) -> SampleActivations:
    """Returns a sample reduced to its tokens at some positions.

    Args:
        sample: Sample to select tokens from.
        positions: Positions in the sample of the tokens to keep, int32 (n,).
    """
    kept_token_mask = np.isin(sample.position, positions)
    kept_values_by_field_name: dict[str, Any] = {
        field_name: array[kept_token_mask]
        for field_name, array in vars(sample).items()
        if isinstance(array, np.ndarray)
    }
    return replace(
        sample,
        activations=sample.activations.map(itemgetter(kept_token_mask)),
        **kept_values_by_field_name,
    )


def _row_table(dataset: "ActivationDataset", index_column: str) -> pyarrow.Table:
    """Returns a table that tells from which position in the data set each sample of a run comes.

    Args:
        dataset: Dataset of the run.
        index_column: Name of the column of the result that contains the indices of the samples.

    Returns:
        A table with a row for each sample whose position `row` (see SampleActivations) is stored.
        The column "row" contains this position as JSON. The pieces of a document have different
        positions. The column `index_column` contains the index of the sample in the run, int64.

    Raises:
        ValueError: If two samples of the run have the same position.
    """
    sample_index_by_row_json = dict[str, int]()
    for sample_index, row_position in enumerate(dataset.shards.columns(["row"])["row"]):
        if row_position is None:
            continue
        if (
            sample_index_by_row_json.setdefault(
                json.dumps(row_position, sort_keys=True), sample_index
            )
            != sample_index
        ):
            url = without_secrets(dataset.url)
            raise ValueError(f"{url}: sample {sample_index} has the row of another sample")
    schema = pyarrow.schema({"row": pyarrow.string(), index_column: pyarrow.int64()})
    return pyarrow.table(
        [[*sample_index_by_row_json], [*sample_index_by_row_json.values()]], schema=schema
    )
