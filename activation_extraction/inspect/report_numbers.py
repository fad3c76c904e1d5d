"""Computes the numbers of a report, from some of the stored tokens and the times of the shards.

The numbers are based on a selection of tokens (`TokenSelection`), which is read from shards that
are spread over the whole run. The number of selected tokens is limited, so that reports of large
and small runs take about the same time and memory. report.jinja makes a page of the numbers. On the
page, a sample of the run is called "document", and the selection of tokens is called "sample".
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.inspect.status import shard_seconds
from activation_extraction.store.run_log import Commit
from activation_extraction.store.sample_table import stored_samples
from activation_extraction.store.statistics import HookStatistics, Sums, sums_of
from activation_extraction.text.sample_facts import StoredSample

READ_BYTES = 1e9  # approximate bytes of activations to read, which limits the time of a report
BATCH_BYTES = 2**24  # approximate bytes of activations to read at a time, which limits the memory
MIN_TOKENS = 1000  # number of tokens to read even if they exceed READ_BYTES, as quantiles need many
MAX_TOKENS = 200_000  # largest number of tokens to read, even if READ_BYTES allows more
# The number of shards to read is limited by SHARD_BYTES and SHARDS, because a shard in the pickle
# format is read completely.
SHARD_BYTES = 8e9  # approximate limit on the total decompressed bytes of all shards that are read
SHARDS = 128  # largest number of shards from which a report reads tokens
MAX_NORM = 1e16  # a token with a larger norm is taken as damaged

# A token is an outlier if its norm exceeds this multiple of the median norm of all selected tokens
# at the hook. A dimension is an outlier if its root mean square exceeds this multiple of the median
# root mean square of all dimensions of the hook.
OUTLIER = 10.0
LEVELS = (0.01, 0.25, 0.5, 0.75, 0.99, 1.0)  # probabilities of the quantiles of norms
MEDIAN = 2  # index of the median in LEVELS
OTHER = "other hooks"  # name of the kind of all hooks whose names contain no layer
# `equal_tokens_with_largest_norms` considers this number of tokens at a hook: the tokens with the
# largest norms. It counts tokens with the same id together.
NUM_LARGEST_NORMS = 200
BINS = 120  # largest number of bins in the chart of the throughput
# Smallest mean number of shards per bin in the chart of the throughput, for the host with the most
# shards. It limits the number of bins: with fewer shards per bin, the chart would jump, because
# shards are often committed at the same time. If the host has fewer shards than this number, there
# is a single bin.
SHARDS_PER_BIN = 4


@dataclass(frozen=True)
class TokenSelection:
    """The tokens on which a report is based, in stored order, and their samples.

    Attributes:
        samples: The samples of the run that contain the tokens.
        sample_indices: The index in `samples` of each token's sample, int64 (tokens,).
        token_ids: The token ids, int32 (tokens,).
        positions: The position of each token in its sample, from 0, int32 (tokens,).
        norms_by_hook: The Euclidean norms of the tokens' activations, float64 (tokens,), by the
            name of the hook.
        sums_by_hook: The sums from which the statistics of these tokens are computed, by the name
            of the hook.
        read_shard_count: The number of shards from which the tokens were read.
    """

    samples: Sequence[StoredSample]
    sample_indices: np.ndarray
    token_ids: np.ndarray
    positions: np.ndarray
    norms_by_hook: Mapping[str, np.ndarray]
    sums_by_hook: Mapping[str, Sums]
    read_shard_count: int

    @cached_property
    def position_ranges(self) -> dict[int, np.ndarray]:
        """The tokens in each range of positions: 0, 1, 2, 3, 4–7, 8–15 and so on.

        A dict: first position of a range -> indices, into the array `positions`, of the tokens
        whose position is in the range. Ranges without tokens are left out.
        """
        first_positions_of_ranges = np.array(
            [0, 1, 2, 3, *(2**exponent for exponent in range(2, 31))]
        )
        range_numbers_of_tokens = (
            np.searchsorted(first_positions_of_ranges, self.positions, "right") - 1
        )
        return {
            int(first_positions_of_ranges[range_number]): np.flatnonzero(
                range_numbers_of_tokens == range_number
            )
            for range_number in np.unique(range_numbers_of_tokens)
        }

    def around(self, token_index: int, max_neighbours: int) -> slice:
        """Returns the range of indices of a token and its neighbours in the same sample.

        Args:
            token_index: The index of the token in `token_ids`.
            max_neighbours: The largest number of neighbours on each side. There are fewer near the
                ends of the sample. Neighbours beyond a token that is not stored are left out.
        """
        start_token_index = max(token_index - max_neighbours, 0)
        stop_token_index = min(token_index + max_neighbours + 1, len(self.positions))
        # The difference between position and index is equal for two tokens if no token is missing
        # between them.
        position_minus_index = self.positions[start_token_index:stop_token_index] - np.arange(
            start_token_index, stop_token_index
        )
        no_token_missing_mask = (
            position_minus_index == position_minus_index[token_index - start_token_index]
        )
        same_sample_mask = (
            self.sample_indices[start_token_index:stop_token_index]
            == self.sample_indices[token_index]
        )
        neighbour_mask = no_token_missing_mask & same_sample_mask
        return slice(
            start_token_index + int(neighbour_mask.argmax()),
            stop_token_index - int(neighbour_mask[::-1].argmax()),
        )


def select_tokens(dataset: ActivationDataset, hooks: Sequence[str]) -> TokenSelection:
    """Reads some samples of a run, from shards that are spread over the whole run.

    From each chosen shard, a random sequence of consecutive samples is read, which is the same in
    every report on the same run.

    Args:
        dataset: The run. It must contain at least one token.
        hooks: The names of the hooks at which the tokens' activations are read. They must be hooks
            with activations.

    Returns:
        The tokens of these samples, with the norms of their activations at each hook and the sums
        for statistics.

    Raises:
        OSError: If a shard cannot be read, or contains activations that are NaN or huge.
        ValueError: If the chosen samples contain no tokens.
    """
    bytes_per_token = max(dataset.shards.bytes_per_token(hooks), 1)
    num_tokens_to_read = int(np.clip(READ_BYTES // bytes_per_token, MIN_TOKENS, MAX_TOKENS))
    shard_commits = [commit for _, commit in dataset.shards.folder_names_and_commits]
    mean_shard_bytes = max(sum(commit.unpacked for commit in shard_commits) / len(shard_commits), 1)
    num_shards_to_read = min(
        int(np.clip(SHARD_BYTES / mean_shard_bytes, 1, SHARDS)), len(shard_commits)
    )
    shard_indices = np.linspace(0, len(shard_commits) - 1, num_shards_to_read, dtype=int).tolist()
    num_samples_to_read_per_shard = max(
        num_tokens_to_read * len(dataset) // dataset.tokens // len(shard_indices), 1
    )
    first_sample_indices_of_shards = np.cumsum([0, *(commit.count for commit in shard_commits)])
    chosen_sample_mask = np.zeros(len(dataset), bool)
    chosen_samples: list[StoredSample] = []  # only samples with stored tokens
    for shard_index in shard_indices:
        max_first_sample_index_in_shard = max(
            shard_commits[shard_index].count - num_samples_to_read_per_shard, 0
        )
        first_chosen_sample_index_in_shard = int(
            np.random.default_rng(shard_index).integers(max_first_sample_index_in_shard + 1)
        )
        first_chosen_sample_index = (
            first_sample_indices_of_shards[shard_index] + first_chosen_sample_index_in_shard
        )
        stop_sample_index = min(
            first_chosen_sample_index + num_samples_to_read_per_shard,
            first_sample_indices_of_shards[shard_index + 1],
        )
        chosen_sample_mask[first_chosen_sample_index:stop_sample_index] = True
        sample_table = dataset.shards.read_sample_table(shard_index).slice(
            first_chosen_sample_index_in_shard, num_samples_to_read_per_shard
        )
        chosen_samples += [
            stored_sample
            for stored_sample in stored_samples(sample_table)
            if stored_sample.num_kept_tokens
        ]
    tokens_per_batch = int(np.clip(BATCH_BYTES // bytes_per_token, 1, num_tokens_to_read))
    norms_by_hook: dict[str, list[np.ndarray]] = {hook_name: [] for hook_name in hooks}
    sums_by_hook = {hook_name: Sums.zeros(dataset.hooks[hook_name]) for hook_name in hooks}
    sample_numbers_of_batches: list[np.ndarray] = []
    token_ids_of_batches: list[np.ndarray] = []
    positions_of_batches: list[np.ndarray] = []
    token_batches = dataset.batches(
        tokens_per_batch, hooks, buffer=4 * tokens_per_batch, where=chosen_sample_mask
    )
    for token_batch in tqdm(token_batches, "reading", unit=" batches", disable=None):
        for hook_name, activations in token_batch.items():
            token_norms = np.linalg.norm(activations.astype(np.float64), axis=1)
            damaged_token_mask = ~(token_norms < MAX_NORM)  # this condition is also true for NaN
            sample_numbers_of_damaged_tokens = token_batch.sample_idx[damaged_token_mask]
            if len(sample_numbers_of_damaged_tokens):
                raise OSError(
                    f"{dataset.url}: sample {sample_numbers_of_damaged_tokens[0]}, {hook_name}: "
                    "NaN or huge values"
                )
            norms_by_hook[hook_name].append(token_norms)
            batch_sums = sums_of(
                activations.__getitem__, activations.shape[1], token_batch.position
            )
            sums_by_hook[hook_name] = sums_by_hook[hook_name].merge(batch_sums)
        sample_numbers_of_batches.append(token_batch.sample_idx)
        token_ids_of_batches.append(token_batch.token_ids)
        positions_of_batches.append(token_batch.position)
    if not sample_numbers_of_batches:
        raise ValueError(f"{dataset.url}: the sampled shards hold no tokens")
    # Whether each token belongs to another sample than the token before it. False for the first
    # token, which has no token before it.
    sample_change_mask = (
        np.diff(np.concatenate(sample_numbers_of_batches), prepend=sample_numbers_of_batches[0][0])
        != 0
    )
    return TokenSelection(
        samples=chosen_samples,
        sample_indices=np.cumsum(sample_change_mask),
        token_ids=np.concatenate(token_ids_of_batches),
        positions=np.concatenate(positions_of_batches),
        norms_by_hook={
            hook_name: np.concatenate(hook_norms) for hook_name, hook_norms in norms_by_hook.items()
        },
        sums_by_hook=sums_by_hook,
        read_shard_count=len(shard_indices),
    )


class HookReport:
    """The numbers of one hook in the report.

    Args:
        selection: The tokens on which the report is based, with the norms of their activations and
            the sums for statistics, at all hooks.
        hook_number: The number of the hook in stored order, from 0.
        hook_name: The name of the hook.

    Attributes:
        name: The name of the hook.
        hook_kind_name: The name of the hook without the layer, such as "hook_resid_post". OTHER if
            the name contains no layer. The charts show the hooks with the same `hook_kind_name`
            together.
        layer_or_hook_number: The number of the layer. `hook_number` if `hook_kind_name` is OTHER.
        norm_quantiles: The 1 %, 25 %, 50 %, 75 % and 99 % quantiles of the tokens' norms, and the
            largest norm (see LEVELS), float64 (6,).
        median_norms_of_position_ranges: The median norm of the tokens in each range of
            `selection.position_ranges`, float64 (ranges,).
        outlier_token_mask: Whether the norm of each token is an outlier (see OUTLIER), bool
            (tokens,).
        equal_tokens_with_largest_norms: The NUM_LARGEST_NORMS tokens with the largest norms. They
            are grouped by their token id and by whether their position is 0. The list has an
            `EqualTokens` for each group, in descending order of the largest norm in the group.
        outlier_dimensions_and_ratios: A list with a tuple for each dimension whose root mean square
            is an outlier (see OUTLIER), the largest first. The tuple contains the number of the
            dimension, from 0, and its root mean square as a multiple of the median over all
            dimensions. The root mean squares leave out the first token of each sample, unless the
            selection contains no other tokens.
    """

    def __init__(self, selection: TokenSelection, hook_number: int, hook_name: str) -> None:
        hook_norms = selection.norms_by_hook[hook_name]
        statistics_of_selection = HookStatistics(load=lambda: selection.sums_by_hook[hook_name])
        layer_match = re.fullmatch(r"blocks\.([0-9]{1,9})\.(.+)", hook_name)
        self.name = hook_name
        if layer_match:
            self.hook_kind_name, self.layer_or_hook_number = layer_match[2], int(layer_match[1])
        else:
            # The charts order the hooks of a kind by this number. Hooks of the kind OTHER have no
            # layer, so the charts order them by the number of the hook.
            self.hook_kind_name, self.layer_or_hook_number = OTHER, hook_number
        self.norm_quantiles = np.quantile(hook_norms, LEVELS)
        median_norms = [
            np.median(hook_norms[token_indices])
            for token_indices in selection.position_ranges.values()
        ]
        self.median_norms_of_position_ranges = np.array(median_norms)
        self.outlier_token_mask = hook_norms > OUTLIER * self.norm_quantiles[MEDIAN]
        self.equal_tokens_with_largest_norms = equal_tokens_with_largest_norms(
            selection, hook_norms
        )
        statistics_without_first_token = statistics_of_selection.without_first_token
        statistics_for_outliers = (
            statistics_without_first_token
            if statistics_without_first_token.tokens
            else statistics_of_selection.all_tokens
        )
        rms_of_dimensions = np.sqrt(
            statistics_for_outliers.variance + statistics_for_outliers.mean**2
        )
        # If most dimensions of a hook are always zero, the median is zero. In this case, all ratios
        # are set to zero, so that no dimension is an outlier.
        rms_ratios = rms_of_dimensions / (np.median(rms_of_dimensions) or np.inf)
        dimensions_in_descending_ratio_order = np.argsort(-rms_ratios).tolist()
        self.outlier_dimensions_and_ratios = [
            (dimension, rms_ratios[dimension])
            for dimension in dimensions_in_descending_ratio_order
            if rms_ratios[dimension] > OUTLIER
        ]


class EqualTokens(NamedTuple):
    """Tokens with the same id among the NUM_LARGEST_NORMS tokens with the largest norms at a hook.

    Either all or none of them are at position 0.

    Attributes:
        index_of_largest_norm: The index in `TokenSelection.token_ids` of the token that has the
            largest norm of these tokens.
        token_count: The number of these tokens.
    """

    index_of_largest_norm: int
    token_count: int


def equal_tokens_with_largest_norms(
    selection: TokenSelection, norms: np.ndarray
) -> list[EqualTokens]:
    """Finds the tokens with the largest norms, and counts tokens with the same id together.

    Only the NUM_LARGEST_NORMS tokens with the largest norms are considered. Tokens at position 0
    are counted apart from other tokens with the same id.

    Args:
        selection: The tokens on which the report is based.
        norms: The norms of the tokens' activations at a hook, (tokens,).

    Returns:
        The equal tokens, in descending order of the largest norm among them.
    """
    indices_of_largest_norms = np.argsort(-norms, kind="stable")[:NUM_LARGEST_NORMS]
    first_token_mask = selection.positions[indices_of_largest_norms] == 0
    # A column for each of these tokens: its id, and 1 if it is the first token of a sample,
    # otherwise 0. Tokens with equal columns are counted together.
    stacked_token_ids_and_first_token_mask = np.stack(
        [selection.token_ids[indices_of_largest_norms], first_token_mask]
    )
    # The stacked array has a column for each token, from the largest norm to the smallest, so the
    # index of a column is the rank of its token. Equal tokens have equal columns. For each distinct
    # column, `np.unique` returns the smallest index, which is the rank of the token with the
    # largest norm, and the number of equal columns.
    _, smallest_ranks_of_columns, token_counts_of_columns = np.unique(
        stacked_token_ids_and_first_token_mask, axis=1, return_index=True, return_counts=True
    )
    return [
        EqualTokens(int(indices_of_largest_norms[smallest_rank]), int(token_count))
        for smallest_rank, token_count in sorted(
            zip(smallest_ranks_of_columns, token_counts_of_columns, strict=True)
        )
    ]


def throughput(
    commits_of_hosts: Iterable[Sequence[Commit]],
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the throughput of all hosts over the time of a run.

    The time of each host starts at 0. The time between the end of a command and its restart does
    not count.

    Args:
        commits_of_hosts: The commits of the shards of each host.

    Returns:
        A tuple of the edges of the bins of time in seconds, (bins + 1,), and the tokens per second
        of all hosts together in each bin, (bins,). None if the times in the commits do not show how
        long the shards took.
    """
    # An array (2, shards + 1) for each host. Column i contains the total seconds and tokens of the
    # first i shards of the host, so column 0 contains zeros.
    cumulative_seconds_and_tokens_of_hosts: list[np.ndarray] = []
    for commits_of_host in commits_of_hosts:
        seconds_and_tokens_of_shards = [
            (seconds, commit.tokens) for commit, seconds in shard_seconds(commits_of_host)
        ]
        if seconds_and_tokens_of_shards:
            cumulative_seconds_and_tokens_of_hosts.append(
                np.cumsum([(0, 0), *seconds_and_tokens_of_shards], axis=0).T
            )
    if not cumulative_seconds_and_tokens_of_hosts:
        return None
    max_shards_per_host = max(
        cumulative_seconds_and_tokens.shape[1] - 1
        for cumulative_seconds_and_tokens in cumulative_seconds_and_tokens_of_hosts
    )
    bin_count = int(np.clip(max_shards_per_host // SHARDS_PER_BIN, 1, BINS))
    seconds_of_slowest_host = max(
        cumulative_seconds_of_shards[-1]
        for cumulative_seconds_of_shards, _ in cumulative_seconds_and_tokens_of_hosts
    )
    bin_edges = np.linspace(0, seconds_of_slowest_host, bin_count + 1)
    token_counts_until_bin_edges = np.zeros(bin_count + 1)
    for (
        cumulative_seconds_of_shards,
        cumulative_tokens_of_shards,
    ) in cumulative_seconds_and_tokens_of_hosts:
        token_counts_until_bin_edges += np.interp(
            bin_edges, cumulative_seconds_of_shards, cumulative_tokens_of_shards
        )
    return bin_edges, np.diff(token_counts_until_bin_edges) / np.diff(bin_edges)
