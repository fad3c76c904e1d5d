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
        urls_phrase = without_secrets(" and ".join(run.url for run in runs))
        for run in runs[1:]:
            data_files_of_runs = runs[0].data_files, run.data_files
            for setting_name, first_value, other_value in runs[0].identity.other_samples(
                run.identity, *data_files_of_runs
            ):
                message = (
                    f"{runs[0].url} and {run.url}: their samples are not those of the same data: "
                    f"{setting_name} is {shown(first_value, other_value)} in one and "
                    f"{shown(other_value, first_value)} in the other"
                )
                raise ValueError(without_secrets(message))
        row_tables = [_row_table(run, str(run_index)) for run_index, run in enumerate(runs)]
        joined_table = reduce(
            lambda left_table, right_table: left_table.join(right_table, "row", join_type="inner"),
            row_tables,
        )
        # Indices of the common samples in each run, int64 (runs, samples). A column is one sample.
        # Columns have the order of the first run.
        self._sample_indices = np.stack(joined_table.sort_by("0").drop_columns("row").columns)
        if not len(self):
            raise ValueError(f"{urls_phrase}: no row of the data set has a sample in each of them")
        self.unpaired_samples = tuple(len(run) - len(self) for run in runs)
        sample_token_counts_of_runs = [run.shards.columns(["tokens"])["tokens"] for run in runs]
        # For each run, an array with the token count of each sample that all runs have.
        common_token_counts_of_runs = [
            token_counts_of_run[sample_indices].astype(int)
            for token_counts_of_run, sample_indices in zip(
                sample_token_counts_of_runs, self._sample_indices, strict=True
            )
        ]
        for run, num_left_out_samples, token_counts_of_run in zip(
            runs, self.unpaired_samples, common_token_counts_of_runs, strict=True
        ):
            if num_left_out_samples:
                left_out_samples_phrase = counted(num_left_out_samples, "sample")
                num_left_out_tokens = run.tokens - token_counts_of_run.sum()
                left_out_tokens_phrase = counted(num_left_out_tokens, "token")
                log.warning(
                    "%s: %s (%s) left out: not all runs have them",
                    run.url,
                    left_out_samples_phrase,
                    left_out_tokens_phrase,
                )
        if any(
            run.identity.kept_tokens != runs[0].identity.kept_tokens
            or (token_counts_of_run != common_token_counts_of_runs[0]).any()
            for run, token_counts_of_run in zip(runs, common_token_counts_of_runs, strict=True)
        ):
            log.warning(
                "%s: store different tokens of the same samples; only those that all have are read",
                urls_phrase,
            )

    def __len__(self) -> int:
        return self._sample_indices.shape[1]

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
        runs_and_hook_names = list(zip(self.runs, hooks, strict=True))
        bytes_per_token = sum(
            run.shards.bytes_per_token(hook_names) for run, hook_names in runs_and_hook_names
        )
        are_all_runs_local = all(run.shards.is_local for run in self.runs)
        num_buffer_tokens = options.buffer or default_buffer(
            options, sum(map(len, hooks)), bytes_per_token, are_all_runs_local
        )
        hook_names_with_limits = (
            set(options.max_norm) if isinstance(options.max_norm, Mapping) else set()
        )
        read_hook_names_with_limits = set[str]()
        token_sources = list[TokenSource]()
        for run, hook_names in runs_and_hook_names:
            norm_limits_of_run = options.max_norm
            canonical_name_by_alias = run.hooks.canonical_name_by_alias
            if isinstance(norm_limits_of_run, Mapping):
                norm_limits_of_run = {
                    hook_name: norm_limit
                    for hook_name, norm_limit in norm_limits_of_run.items()
                    if canonical_name_by_alias.get(hook_name, hook_name) in hook_names
                }
                read_hook_names_with_limits |= norm_limits_of_run.keys()
            sample_filter_of_run = (
                options.where if callable(options.where) or not token_sources else None
            )
            options_of_run = dict(
                hooks=hook_names,
                buffer=num_buffer_tokens,
                max_norm=norm_limits_of_run,
                where=sample_filter_of_run,
            )
            token_sources.append(run.source(replace(options, **options_of_run)))
        for hook_name in hook_names_with_limits - read_hook_names_with_limits:
            raise ValueError(f"max_norm: hook {hook_name!r} is not read")
        token_sources[0] = token_sources[0].of(self._sample_indices[0])
        return Batches(
            token_sources, make_batch, partial(aligned_reader, token_sources, self._sample_indices)
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
        hook_names_of_runs = [run.hooks.chosen(run.url, hooks) for run in self.runs]
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
        self.hooks: ByHook[int] = _joined_hooks([run.hooks for run in runs])
        self.dtypes: ByHook[np.dtype] = _joined_hooks([run.dtypes for run in runs])
        super().__init__(*runs)

    @cached_property
    def statistics(self) -> ByHook[HookStatistics]:
        """Statistics of every hook of all runs, by the name of the hook.

        Each hook belongs to exactly one of the runs. Its statistics cover all tokens of this run,
        also the tokens that another run lacks.
        """
        return _joined_hooks([run.statistics for run in self.runs])

    @cached_property
    def samples(self) -> pyarrow.Table:
        """The table of the samples that all runs have, with the columns of the first run.

        The column `tokens` contains the number of tokens that the first run stores of a sample,
        which may be larger than the number of tokens that all runs have.
        """
        return self.runs[0].samples.take(self._sample_indices[0])

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
            [hook_name for hook_name in chosen_hook_names if hook_name in run.hooks]
            for run in self.runs
        ]
        batch_options = BatchOptions(size, **options)
        if (sample_filter := batch_options.where) is not None:
            sample_mask = as_mask(
                sample_filter(self.samples) if callable(sample_filter) else sample_filter, len(self)
            )
            sample_mask_of_first_run = np.isin(
                np.arange(len(self.runs[0])), self._sample_indices[0][sample_mask]
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
        sample_indices_of_runs = self._sample_indices[:, index].tolist()
        samples = [
            run[sample_index_in_run]
            for run, sample_index_in_run in zip(self.runs, sample_indices_of_runs, strict=True)
        ]
        common_positions = reduce(np.intersect1d, (sample.position for sample in samples))
        first_sample, *other_samples = (
            _at_positions(sample, common_positions) for sample in samples
        )
        for run, other_sample in zip(self.runs[1:], other_samples, strict=True):
            _check_same_tokens((self.runs[0].url, run.url), first_sample, other_sample)
        return _joined([first_sample, *other_samples])


def aligned_reader(token_sources: Sequence[TokenSource], sample_indices: np.ndarray) -> ReadChunk:
    """Returns a function that reads a chunk, and keeps the tokens that all runs have.

    If a run other than the first stores pickles, the tokens of a whole shard of the first run are
    aligned at once. Aligning each chunk of the shard alone would decompress the pickles of the
    other run again for every chunk.

    Args:
        token_sources: The TokenSource of each run. The `sample_mask` of the first TokenSource tells
            which samples are read.
        sample_indices: Indices of the common samples in each run, int64 (runs, samples). A column
            is one sample. Columns have the order of the first run.

    Returns:
        A function that takes a chunk of the first run (consecutive tokens of a shard), and returns
        a tuple with a block for each run. Item i of the blocks' `wanted_token_indices` refers to
        the same token in all blocks, and this token passes the filters of all runs.
    """
    first_token_source, *other_token_sources = token_sources
    wanted_sample_mask = np.asarray(first_token_source.sample_mask)[sample_indices[0]]
    wanted_sample_indices = sample_indices[:, wanted_sample_mask]
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
            wanted_sample_indices[0], [first_sample_index, last_sample_index + 1]
        )
        partner_blocks = [
            _partners(
                first_token_source,
                token_source,
                first_run_tokens,
                wanted_sample_indices[[0, run_index], start_column:stop_column],
            )
            for run_index, token_source in enumerate(other_token_sources, 1)
        ]
        return first_run_tokens, partner_blocks

    def read(chunk: Chunk) -> tuple[Block, ...]:
        aligned_chunk = first_token_source.whole(chunk.shard_index) if needs_whole_shards else chunk
        first_run_tokens, partner_blocks = align(aligned_chunk)
        start_in_aligned_chunk = chunk.start_token_index - aligned_chunk.start_token_index
        stop_in_aligned_chunk = start_in_aligned_chunk + len(chunk)
        in_all_runs_token_mask = np.all(
            [
                partner_block.wanted_token_indices[start_in_aligned_chunk:stop_in_aligned_chunk]
                >= 0
                for partner_block in partner_blocks
            ],
            axis=0,
        )
        common_token_indices = start_in_aligned_chunk + np.flatnonzero(in_all_runs_token_mask)
        first_run_block = first_token_source.with_activations(
            first_run_tokens, common_token_indices
        )
        within_max_norm_token_mask = first_token_source.within_max_norm_token_mask(first_run_block)
        blocks_of_runs = (
            first_run_block,
            *(
                Block(
                    partner_block.token_batch,
                    partner_block.wanted_token_indices[common_token_indices],
                )
                for partner_block in partner_blocks
            ),
        )
        return tuple(
            Block(
                block_of_run.token_batch,
                block_of_run.wanted_token_indices[within_max_norm_token_mask],
            )
            for block_of_run in blocks_of_runs
        )

    return read


def _partners(
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
    # One integer for each token. Its upper 32 bits are the index of the token's sample in the first
    # run, and its lower 32 bits are the token's position.
    packed_sample_and_position_of_token = (
        first_run_tokens.sample_indices << 32 | first_run_tokens.token_batch.position
    )
    partner_index_of_token = np.full(len(packed_sample_and_position_of_token), -1)
    partner_batches = list[TokenBatch]()
    for chunks_of_shard in other_token_source.by_shard(sample_indices_in_other_run):
        other_run_tokens = other_token_source.tokens(chunks_of_shard)
        sample_indices_of_tokens = sample_indices_in_first_run[
            np.searchsorted(sample_indices_in_other_run, other_run_tokens.sample_indices)
        ]
        packed_sample_and_position_of_other_token = (
            sample_indices_of_tokens << 32 | other_run_tokens.token_batch.position
        )
        _, token_indices_in_first_run, token_indices_in_other_run = np.intersect1d(
            packed_sample_and_position_of_token,
            packed_sample_and_position_of_other_token,
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
        partner_block = other_token_source.with_activations(
            other_run_tokens, token_indices_in_other_run[wanted_token_mask]
        )
        if (
            within_max_norm_token_mask := other_token_source.within_max_norm_token_mask(
                partner_block
            )
        ).any():
            partner_index_of_token[
                token_indices_in_first_run[wanted_token_mask][within_max_norm_token_mask]
            ] = partner_block.wanted_token_indices[within_max_norm_token_mask] + sum(
                map(len, partner_batches)
            )
            partner_batches.append(partner_block.token_batch)
    return Block(
        concatenate_batches(partner_batches or [first_run_tokens.token_batch]),
        partner_index_of_token,
    )


def _check_same_tokens(urls: Sequence[str], *tokens_of_runs: Any) -> None:
    """Raises ValueError if the ids of a token differ between two runs.

    Args:
        urls: URLs of the two runs.
        *tokens_of_runs: A TokenBatch or a SampleActivations of each of the two runs. Token i of
            both comes from the same row of the data set, and has the same position in its sample.
    """
    tokens_of_first_run, tokens_of_other_run = tokens_of_runs
    for token_index in np.flatnonzero(
        tokens_of_first_run.token_ids != tokens_of_other_run.token_ids
    ):
        difference_phrase = " but ".join(
            f"{run_tokens.token_ids[token_index]} in sample "
            f"{np.broadcast_to(run_tokens.sample_idx, run_tokens.token_ids.shape)[token_index]} "
            f"of {run_url}"
            for run_url, run_tokens in zip(urls, tokens_of_runs, strict=True)
        )
        position = tokens_of_first_run.position[token_index]
        message = f"the token at position {position} of the same row is {difference_phrase}"
        raise ValueError(without_secrets(message))


def _joined_hooks(values_of_runs: Sequence[ByHook[Any]]) -> ByHook[Any]:
    """Merges mappings from the hooks of several runs into one mapping, with all aliases.

    Args:
        values_of_runs: For each run, a mapping from the names of its hooks to values of any type.

    Returns:
        A mapping with the hooks and aliases of all runs.

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


def _joined(tokens_of_runs: Sequence[Any]) -> Any:
    """Returns one batch or sample with the hooks of all runs.

    Args:
        tokens_of_runs: A TokenBatch of each run, or a SampleActivations of each run, with the same
            tokens. The result contains the activations of all runs. All of its other arrays, such
            as the token ids, come from the first run.
    """
    joined_activations = _joined_hooks(
        [tokens_of_run.activations for tokens_of_run in tokens_of_runs]
    )
    return replace(tokens_of_runs[0], activations=joined_activations)


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


def _row_table(run: "ActivationDataset", index_column: str) -> pyarrow.Table:
    """Returns a table that tells from which row of the data set each sample of a run comes.

    Args:
        run: Dataset of the run.
        index_column: Name of the column of the result that contains the indices of the samples.

    Returns:
        A table with a row for each sample whose `row` (see SampleActivations) is stored. The column
        "row" contains this `row` as JSON, which differs between the pieces of a document. The
        column `index_column` contains the index of the sample in the run, int64.

    Raises:
        ValueError: If two samples of the run come from the same row.
    """
    sample_index_by_row_json = dict[str, int]()
    for sample_index, row_position in enumerate(run.shards.columns(["row"])["row"]):
        if row_position is None:
            continue
        if (
            sample_index_by_row_json.setdefault(
                json.dumps(row_position, sort_keys=True), sample_index
            )
            != sample_index
        ):
            url = without_secrets(run.url)
            raise ValueError(f"{url}: sample {sample_index} has the row of another sample")
    schema = pyarrow.schema({"row": pyarrow.string(), index_column: pyarrow.int64()})
    return pyarrow.table(
        [[*sample_index_by_row_json], [*sample_index_by_row_json.values()]], schema=schema
    )
