"""Computes the numbers of a report: from a sample of tokens, and from the times of the shards.

The sample is bounded, and spread over the whole run, so that every run takes about the same time
and memory.
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

READ_BYTES = 1e9  # bytes of activations in the whole sample, about
BATCH_BYTES = 2**24  # bytes of activations in a batch, about
LEAST_TOKENS = 1000  # tokens in the sample, even if they exceed READ_BYTES
MOST_TOKENS = 200_000  # tokens in the sample, even if READ_BYTES allows more
# Limits on the shards from which the sample is read, because a shard of pickles is read whole.
SHARD_BYTES = 8e9  # decompressed bytes of these shards together, about
SHARDS = 128  # number of these shards
MAX_NORM = 1e16  # a larger norm counts as damage

# An outlier exceeds this multiple of the median over the tokens or the dimensions of a hook.
OUTLIER = 10.0
LEVELS = (0.01, 0.25, 0.5, 0.75, 0.99, 1.0)  # probabilities of the quantiles of norms
MEDIAN = 2  # index of the median in LEVELS
OTHER = "other hooks"  # the kind of hooks whose names have no layer
# Number of tokens that `largest_tokens` groups by kind: those with the largest norms at a hook.
LARGEST = 200
BINS = 120  # largest number of bins of the throughput
# Approximate minimum of shards in a bin, because several shards are often committed at a time.
SHARDS_PER_BIN = 4


@dataclass(frozen=True)
class TokenSample:
    """The sample of tokens that was read, in stored order, and the documents that contain them.

    Attributes:
        documents: The documents that have tokens.
        document: The index in `documents` of each token's document, int (tokens,).
        token_ids: The token ids, int32 (tokens,).
        position: The position of each token in its document, int32 (tokens,).
        norms: The Euclidean norms of the tokens by hook, float64 (tokens,) each.
        sums: The sums for the statistics over these tokens, by hook.
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
        """The indices of the tokens, grouped by position: 0, 1, 2, 3, 4–7, 8–15 and so on.

        The key is the first position of the group. A group without tokens is left out.
        """
        starts = np.array([0, 1, 2, 3, *(2**power for power in range(2, 31))])
        bucket = np.searchsorted(starts, self.position, "right") - 1
        return {int(starts[n]): np.flatnonzero(bucket == n) for n in np.unique(bucket)}

    def around(self, token: int, most: int) -> slice:
        """Returns the range of a token and its neighbours in the document.

        Args:
            token: The index of the token.
            most: The largest number of neighbours on each side. There are fewer at the ends of the
                document, and where a token between them is not stored.
        """
        start = max(token - most, 0)
        stop = min(token + most + 1, len(self.position))
        # If no token between two tokens is missing, their positions are as far apart as their
        # indices.
        offsets = self.position[start:stop] - np.arange(start, stop)
        connected = offsets == offsets[token - start]
        connected &= self.document[start:stop] == self.document[token]
        return slice(start + int(connected.argmax()), stop - int(connected[::-1].argmax()))


def read_sample(dataset: ActivationDataset, hooks: Sequence[str]) -> TokenSample:
    """Reads a sample of the tokens: consecutive documents of shards all over the run.

    The same run gives the same sample every time.

    Args:
        dataset: The run, which has tokens.
        hooks: The names of the hooks to read, which have activations.

    Raises:
        OSError: A shard cannot be read, or has activations that are NaN or huge.
        ValueError: The chosen documents have no tokens.
    """
    token_bytes = max(dataset.shards.row_bytes(hooks), 1)
    tokens = int(np.clip(READ_BYTES // token_bytes, LEAST_TOKENS, MOST_TOKENS))
    commits = [commit for _, commit in dataset.shards.shards]
    mean_bytes = max(sum(commit.unpacked for commit in commits) / len(commits), 1)
    most_shards = min(int(np.clip(SHARD_BYTES / mean_bytes, 1, SHARDS)), len(commits))
    shards = np.linspace(0, len(commits) - 1, most_shards, dtype=int).tolist()
    per_shard = max(tokens * len(dataset) // dataset.tokens // len(shards), 1)
    shard_starts = np.cumsum([0, *(commit.count for commit in commits)])
    chosen = np.zeros(len(dataset), bool)
    documents: list[StoredSample] = []
    for shard in shards:
        spare = max(commits[shard].count - per_shard, 0)
        first = int(np.random.default_rng(shard).integers(spare + 1))
        chosen[shard_starts[shard] : shard_starts[shard + 1]][first : first + per_shard] = True
        samples = stored_samples(dataset.shards.table(shard).slice(first, per_shard))
        documents += [sample for sample in samples if sample.tokens]
    batch_size = int(np.clip(BATCH_BYTES // token_bytes, 1, tokens))
    norms: dict[str, list[np.ndarray]] = {hook: [] for hook in hooks}
    sums = {hook: Sums.zeros(dataset.hooks[hook]) for hook in hooks}
    sample_idx: list[np.ndarray] = []
    token_ids: list[np.ndarray] = []
    position: list[np.ndarray] = []
    batches = dataset.batches(batch_size, hooks, buffer=4 * batch_size, where=chosen)
    for batch in tqdm(batches, "reading", unit=" batches", disable=None):
        for hook, values in batch.items():
            batch_norms = np.linalg.norm(values.astype(np.float64), axis=1)
            damaged = batch.sample_idx[~(batch_norms < MAX_NORM)]  # also true for NaN
            if len(damaged):
                raise OSError(f"{dataset.url}: sample {damaged[0]}, {hook}: NaN or huge values")
            norms[hook].append(batch_norms)
            batch_sums = sums_of(values.__getitem__, values.shape[1], batch.position)
            sums[hook] = sums[hook].merge(batch_sums)
        sample_idx.append(batch.sample_idx)
        token_ids.append(batch.token_ids)
        position.append(batch.position)
    if not sample_idx:
        raise ValueError(f"{dataset.url}: the sampled shards hold no tokens")
    starts_document = np.diff(np.concatenate(sample_idx), prepend=sample_idx[0][0]) != 0
    return TokenSample(
        documents=documents,
        document=np.cumsum(starts_document),
        token_ids=np.concatenate(token_ids),
        position=np.concatenate(position),
        norms={hook: np.concatenate(hook_norms) for hook, hook_norms in norms.items()},
        sums=sums,
        shards=len(shards),
    )


class HookReport:
    """The numbers of one hook in the report.

    Args:
        sample: The sample of tokens.
        number: The number of the hook in stored order.
        name: The name of the hook.

    Attributes:
        name: The name of the hook.
        kind: The name without the layer, by which the charts group hooks. OTHER if it has no layer.
        layer: The layer. If the kind is OTHER, the number of the hook.
        norms: The quantiles of the norms at LEVELS, float64 (LEVELS,).
        by_position: The median norm in each of `sample.buckets`, float64 (buckets,).
        outlier: Whether each token is an outlier, bool (tokens,).
        largest: The kinds of tokens with the largest norms; see `largest_tokens`.
        dimensions: The dimensions that are outliers, the largest first: the number of the dimension
            and its root mean square as a multiple of the median over the dimensions. The first
            tokens of documents are left out unless the sample has no others.
    """

    def __init__(self, sample: TokenSample, number: int, name: str) -> None:
        norms = sample.norms[name]
        statistics = HookStatistics(load=lambda: sample.sums[name])
        match = re.fullmatch(r"blocks\.([0-9]{1,9})\.(.+)", name)
        self.name = name
        self.kind, self.layer = (match[2], int(match[1])) if match else (OTHER, number)
        self.norms = np.quantile(norms, LEVELS)
        medians = [np.median(norms[tokens]) for tokens in sample.buckets.values()]
        self.by_position = np.array(medians)
        self.outlier = norms > OUTLIER * self.norms[MEDIAN]
        self.largest = largest_tokens(sample, norms)
        dimensions = statistics.without_first_token
        if not dimensions.tokens:
            dimensions = statistics.all_tokens
        ratio = np.sqrt(dimensions.variance + dimensions.mean**2)
        # The median is zero at hooks most of whose dimensions are always zero; none is an outlier.
        ratio /= np.median(ratio) or np.inf
        order = np.argsort(-ratio).tolist()
        self.dimensions = [(n, ratio[n]) for n in order if ratio[n] > OUTLIER]


def largest_tokens(sample: TokenSample, norms: np.ndarray) -> list[tuple[int, int]]:
    """Groups the tokens with the largest norms by kind.

    Two tokens are of one kind if they have the same token id and both or neither are at position 0.

    Args:
        sample: The sample of tokens.
        norms: The norms at a hook, (tokens,).

    Returns:
        For each kind among the LARGEST tokens with the largest norms, the largest norms first: the
        index of its token with the largest norm, and the number of its tokens among the LARGEST.
    """
    order = np.argsort(-norms, kind="stable")[:LARGEST]
    kinds = np.stack([sample.token_ids[order], sample.position[order] == 0])
    _, firsts, counts = np.unique(kinds, axis=1, return_index=True, return_counts=True)
    return [(int(order[n]), int(count)) for n, count in sorted(zip(firsts, counts, strict=True))]


def throughput(hosts: Iterable[Sequence[Commit]]) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the throughput over the time of a run.

    The time is that of each host's work, without pauses between its processes.

    Args:
        hosts: The commits of the shards of each host.

    Returns:
        The edges of the bins of time in seconds, (bins + 1,), and the tokens per second of all
        hosts together in each bin, (bins,). None if no shard shows how long it took.
    """
    totals: list[np.ndarray] = []  # of each host, (2, shards + 1): seconds and tokens up to a shard
    for commits in hosts:
        steps = [(seconds, commit.tokens) for commit, seconds in shard_seconds(commits)]
        if steps:
            totals.append(np.cumsum([(0, 0), *steps], axis=0).T)
    if not totals:
        return None
    most_shards = max(total.shape[1] - 1 for total in totals)
    bins = int(np.clip(most_shards // SHARDS_PER_BIN, 1, BINS))
    edges = np.linspace(0, max(seconds[-1] for seconds, _ in totals), bins + 1)
    tokens_done = sum(np.interp(edges, seconds, tokens) for seconds, tokens in totals)
    return edges, np.diff(tokens_done) / np.diff(edges)
