"""Computes the numbers of a report, from some of the stored tokens and the times of the shards.

The read tokens are spread over the whole run. Their number is limited, so that reports of large and
small runs take about the same time and memory. In this package, a document is a stored sample, and
a sample is the selection of tokens.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tqdm import tqdm

from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.inspect.status import shard_seconds
from activation_extraction.store.run_log import Commit
from activation_extraction.store.sample_table import stored_samples
from activation_extraction.store.statistics import HookStatistics, Sums, sums_of
from activation_extraction.text.sample_facts import StoredSample

READ_BYTES = 1e9  # approximate number of bytes of activations to read in total
BATCH_BYTES = 2**24  # approximate number of bytes of activations to read at a time
LEAST_TOKENS = 1000  # number of tokens that are read even if they exceed READ_BYTES
MOST_TOKENS = 200_000  # largest number of tokens to read, even if READ_BYTES allows more
# The number of shards is limited, too, because a shard of pickles is read completely.
SHARD_BYTES = 8e9  # approximate largest number of decompressed bytes of all these shards
SHARDS = 128  # largest number of these shards
MAX_NORM = 1e16  # largest norm of a token that is not damaged

# An outlier exceeds this multiple of the median over the tokens or the dimensions of a hook.
OUTLIER = 10.0
LEVELS = (0.01, 0.25, 0.5, 0.75, 0.99, 1.0)  # probabilities of the quantiles of norms
MEDIAN = 2  # index of the median in LEVELS
OTHER = "other hooks"  # kind of the hooks whose names contain no layer
LARGEST = 200  # number of tokens with the largest norms that `largest_tokens` groups
BINS = 120  # largest number of bins in the chart of the throughput
# Approximate least number of shards in a bin, because shards are often committed at the same time.
SHARDS_PER_BIN = 4


@dataclass(frozen=True)
class TokenSample:
    """The tokens that were read, in stored order, and their documents.

    Attributes:
        documents: The documents of the tokens. Each is a stored sample.
        document: The index in `documents` of each token's document, int64 (tokens,).
        token_ids: The token ids, int32 (tokens,).
        position: The position of each token in its document, int32 (tokens,).
        norms: The Euclidean norms of the tokens' activations at each hook, float64 (tokens,).
        sums: The sums from which the statistics of these tokens are computed, by hook.
        shards: The number of shards that were read.
    """

    documents: Sequence[StoredSample]
    document: np.ndarray
    token_ids: np.ndarray
    position: np.ndarray
    norms: Mapping[str, np.ndarray]
    sums: Mapping[str, Sums]
    shards: int

    @cached_property
    def buckets(self) -> dict[int, np.ndarray]:
        """The indices of the tokens in groups of positions: 0, 1, 2, 3, 4–7, 8–15 and so on.

        The keys are the first positions of the groups. Groups without tokens are left out.
        """
        bucket_starts = np.array([0, 1, 2, 3, *(2**power for power in range(2, 31))])
        bucket_of_token = np.searchsorted(bucket_starts, self.position, "right") - 1
        return {
            int(bucket_starts[bucket_number]): np.flatnonzero(bucket_of_token == bucket_number)
            for bucket_number in np.unique(bucket_of_token)
        }

    def around(self, token: int, most_neighbours: int) -> slice:
        """Returns the range of indices of a token and its neighbours in the document.

        Args:
            token: The index of the token.
            most_neighbours: The largest number of neighbours on each side. There are fewer at the
                ends of the document, and where a token between them is not stored.
        """
        start = max(token - most_neighbours, 0)
        stop = min(token + most_neighbours + 1, len(self.position))
        # If no token is missing between two tokens, their positions differ as much as their
        # indices.
        offsets = self.position[start:stop] - np.arange(start, stop)
        is_connected = offsets == offsets[token - start]
        is_connected &= self.document[start:stop] == self.document[token]
        return slice(start + int(is_connected.argmax()), stop - int(is_connected[::-1].argmax()))


def read_sample(dataset: ActivationDataset, hooks: Sequence[str]) -> TokenSample:
    """Reads consecutive documents from shards that are spread over the whole run.

    The same run gives the same documents every time.

    Args:
        dataset: The run, which has tokens.
        hooks: The names of the hooks to read. They must be hooks with activations.

    Raises:
        OSError: A shard cannot be read, or contains activations that are NaN or huge.
        ValueError: The chosen documents contain no tokens.
    """
    token_bytes = max(dataset.shards.row_bytes(hooks), 1)
    tokens_to_read = int(np.clip(READ_BYTES // token_bytes, LEAST_TOKENS, MOST_TOKENS))
    commits = [commit for _, commit in dataset.shards.shards]
    mean_bytes = max(sum(commit.unpacked for commit in commits) / len(commits), 1)
    shard_count = min(int(np.clip(SHARD_BYTES / mean_bytes, 1, SHARDS)), len(commits))
    shard_indices = np.linspace(0, len(commits) - 1, shard_count, dtype=int).tolist()
    documents_per_shard = max(
        tokens_to_read * len(dataset) // dataset.tokens // len(shard_indices), 1
    )
    shard_starts = np.cumsum([0, *(commit.count for commit in commits)])
    is_chosen = np.zeros(len(dataset), bool)
    documents: list[StoredSample] = []
    for shard_index in shard_indices:
        spare_documents = max(commits[shard_index].count - documents_per_shard, 0)
        first_document = int(np.random.default_rng(shard_index).integers(spare_documents + 1))
        start = shard_starts[shard_index] + first_document
        stop = min(start + documents_per_shard, shard_starts[shard_index + 1])
        is_chosen[start:stop] = True
        table = dataset.shards.table(shard_index).slice(first_document, documents_per_shard)
        documents += [sample for sample in stored_samples(table) if sample.tokens]
    batch_size = int(np.clip(BATCH_BYTES // token_bytes, 1, tokens_to_read))
    norms_by_hook: dict[str, list[np.ndarray]] = {hook: [] for hook in hooks}
    sums_by_hook = {hook: Sums.zeros(dataset.hooks[hook]) for hook in hooks}
    sample_numbers: list[np.ndarray] = []
    token_ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    batches = dataset.batches(batch_size, hooks, buffer=4 * batch_size, where=is_chosen)
    for batch in tqdm(batches, "reading", unit=" batches", disable=None):
        for hook, values in batch.items():
            batch_norms = np.linalg.norm(values.astype(np.float64), axis=1)
            is_damaged = ~(batch_norms < MAX_NORM)  # also true for NaN
            damaged_samples = batch.sample_idx[is_damaged]
            if len(damaged_samples):
                raise OSError(
                    f"{dataset.url}: sample {damaged_samples[0]}, {hook}: NaN or huge values"
                )
            norms_by_hook[hook].append(batch_norms)
            batch_sums = sums_of(values.__getitem__, values.shape[1], batch.position)
            sums_by_hook[hook] = sums_by_hook[hook].merge(batch_sums)
        sample_numbers.append(batch.sample_idx)
        token_ids.append(batch.token_ids)
        positions.append(batch.position)
    if not sample_numbers:
        raise ValueError(f"{dataset.url}: the sampled shards hold no tokens")
    is_document_start = np.diff(np.concatenate(sample_numbers), prepend=sample_numbers[0][0]) != 0
    return TokenSample(
        documents=documents,
        document=np.cumsum(is_document_start),
        token_ids=np.concatenate(token_ids),
        position=np.concatenate(positions),
        norms={hook: np.concatenate(hook_norms) for hook, hook_norms in norms_by_hook.items()},
        sums=sums_by_hook,
        shards=len(shard_indices),
    )


class HookReport:
    """The numbers of one hook in the report.

    Args:
        sample: The sample of tokens.
        number: The number of the hook in stored order.
        name: The name of the hook.

    Attributes:
        name: The name of the hook.
        kind: The name without the layer, by which the charts group hooks. OTHER if the name
            contains no layer.
        layer: The layer. If the kind is OTHER, the number of the hook in stored order.
        norms: The quantiles of the norms at LEVELS, float64 (LEVELS,).
        by_position: The median norm in each of `sample.buckets`, float64 (buckets,).
        outlier: Whether the norm of each token is an outlier, bool (tokens,).
        largest: The tokens with the largest norms, grouped; see `largest_tokens`.
        dimensions: The dimensions that are outliers, the largest first. A tuple contains the number
            of the dimension, and its root mean square as a multiple of the median over all
            dimensions. First tokens of documents are not counted if there are other tokens.
    """

    def __init__(self, sample: TokenSample, hook_number: int, hook_name: str) -> None:
        hook_norms = sample.norms[hook_name]
        statistics = HookStatistics(load=lambda: sample.sums[hook_name])
        layer_match = re.fullmatch(r"blocks\.([0-9]{1,9})\.(.+)", hook_name)
        self.name = hook_name
        if layer_match:
            self.kind, self.layer = layer_match[2], int(layer_match[1])
        else:
            self.kind, self.layer = OTHER, hook_number
        self.norms = np.quantile(hook_norms, LEVELS)
        bucket_medians = [np.median(hook_norms[tokens]) for tokens in sample.buckets.values()]
        self.by_position = np.array(bucket_medians)
        self.outlier = hook_norms > OUTLIER * self.norms[MEDIAN]
        self.largest = largest_tokens(sample, hook_norms)
        sums_of_dimensions = statistics.without_first_token
        if not sums_of_dimensions.tokens:
            sums_of_dimensions = statistics.all_tokens
        rms_ratios = np.sqrt(sums_of_dimensions.variance + sums_of_dimensions.mean**2)
        # If most dimensions of a hook are always zero, the median is zero, and no dimension is an
        # outlier.
        rms_ratios /= np.median(rms_ratios) or np.inf
        dimensions_by_ratio = np.argsort(-rms_ratios).tolist()
        self.dimensions = [
            (dimension, rms_ratios[dimension])
            for dimension in dimensions_by_ratio
            if rms_ratios[dimension] > OUTLIER
        ]


def largest_tokens(sample: TokenSample, norms: np.ndarray) -> list[tuple[int, int]]:
    """Groups the LARGEST tokens with the largest norms by token id and position.

    Tokens at position 0 are in other groups than tokens at later positions.

    Args:
        sample: The sample of tokens.
        norms: The norms at a hook, (tokens,).

    Returns:
        A tuple for each group, in descending order of the largest norm. It contains the index of
        the group's token with the largest norm, and the number of tokens in the group.
    """
    tokens_by_norm = np.argsort(-norms, kind="stable")[:LARGEST]
    is_first = sample.position[tokens_by_norm] == 0
    group_keys = np.stack([sample.token_ids[tokens_by_norm], is_first])
    _, first_indices, counts = np.unique(group_keys, axis=1, return_index=True, return_counts=True)
    groups = []
    for first_index, count in sorted(zip(first_indices, counts, strict=True)):
        groups.append((int(tokens_by_norm[first_index]), int(count)))
    return groups


def throughput(hosts: Iterable[Sequence[Commit]]) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the throughput of all hosts over the time of a run.

    The time of each host starts at 0, and pauses between its processes do not count.

    Args:
        hosts: The commits of the shards of each host.

    Returns:
        The edges of the bins of time in seconds, (bins + 1,). Then the tokens per second of all
        hosts together in each bin, (bins,). None if the shards do not show how long they took.
    """
    # The seconds and the tokens of each host up to each of its shards, (2, shards + 1).
    totals_of_hosts: list[np.ndarray] = []
    for commits in hosts:
        shard_steps = [(seconds, commit.tokens) for commit, seconds in shard_seconds(commits)]
        if shard_steps:
            totals_of_hosts.append(np.cumsum([(0, 0), *shard_steps], axis=0).T)
    if not totals_of_hosts:
        return None
    most_shards = max(host_totals.shape[1] - 1 for host_totals in totals_of_hosts)
    bin_count = int(np.clip(most_shards // SHARDS_PER_BIN, 1, BINS))
    longest_seconds = max(seconds[-1] for seconds, _ in totals_of_hosts)
    bin_edges = np.linspace(0, longest_seconds, bin_count + 1)
    tokens_done = np.zeros(bin_count + 1)
    for seconds, tokens in totals_of_hosts:
        tokens_done += np.interp(bin_edges, seconds, tokens)
    return bin_edges, np.diff(tokens_done) / np.diff(bin_edges)
