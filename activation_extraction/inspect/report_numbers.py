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

READ_BYTES, BATCH_BYTES = 1e9, 2**24  # about how much is read of activations: in all, and at once
TOKENS = 1000, 200_000  # are read at least, and at most
SHARD_BYTES, SHARDS = 8e9, 128  # of which the sample is taken, since pickles are read whole
MAX_NORM = 1e16  # the squares of larger norms overflow

OUTLIER = 10.0  # times the median over the tokens or dimensions of a hook
LEVELS = (0.01, 0.25, 0.5, 0.75, 0.99, 1.0)  # of the quantiles; the median is number 2
OTHER = "other hooks"
BINS, SHARDS_PER_BIN = 120, 4  # of the throughput: shards are often committed several at a time


@dataclass(frozen=True)
class TokenSample:
    """The tokens that were read for a report, in order, and the documents that they come from.

    Attributes:
        documents: Samples that the tokens come from.
        document: Index in `documents` of each token's sample, (tokens,).
        token_ids: Ids of the tokens, int32 (tokens,).
        position: Positions of the tokens in their samples, int32 (tokens,).
        norms: Norms of the tokens by hook, float64 (tokens,).
        sums: Sums over these tokens, by hook.
        shards: Number of shards that were read.
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
        """The tokens by position: 0, 1, 2, 3, 4–7, 8–15 and so on, by their first position."""
        starts = np.array([0, 1, 2, 3, *(2**power for power in range(2, 31))])
        bucket = np.searchsorted(starts, self.position, "right") - 1
        return {int(starts[n]): np.flatnonzero(bucket == n) for n in np.unique(bucket)}

    def around(self, token: int, most: int) -> slice:
        """Returns the range of a token and up to `most` stored neighbours on each side."""
        start, stop = max(token - most, 0), min(token + most + 1, len(self.position))
        apart = self.position[start:stop] - np.arange(start, stop)
        same = apart == apart[token - start]  # whether no token between them is missing
        same &= self.document[start:stop] == self.document[token]
        return slice(start + int(same.argmax()), stop - int(same[::-1].argmax()))


def read_sample(dataset: ActivationDataset, hooks: Sequence[str]) -> TokenSample:
    """Reads a sample of the tokens of a run.

    Args:
        dataset: Dataset of the run.
        hooks: Names of the hooks that have activations.

    Raises:
        OSError: A shard cannot be read, or has activations that are NaN or huge.
    """
    row_bytes = max(dataset.shards.row_bytes(hooks), 1)
    tokens = int(np.clip(READ_BYTES // row_bytes, *TOKENS))
    commits = [commit for _, commit in dataset.shards.shards]
    mean = max(sum(commit.unpacked for commit in commits) / len(commits), 1)
    most = min(int(np.clip(SHARD_BYTES / mean, 1, SHARDS)), len(commits))
    shards = np.linspace(0, len(commits) - 1, most, dtype=int).tolist()
    count = max(tokens * len(dataset) // dataset.tokens // len(shards), 1)
    firsts = np.cumsum([0, *(commit.count for commit in commits)])
    chosen, documents = np.zeros(len(dataset), bool), list[StoredSample]()
    for shard in shards:  # successive samples of each
        spare = max(commits[shard].count - count, 0)
        first = int(np.random.default_rng(shard).integers(spare + 1))  # the same every time
        chosen[firsts[shard] : firsts[shard + 1]][first : first + count] = True
        samples = stored_samples(dataset.shards.table(shard).slice(first, count))
        documents += [sample for sample in samples if sample.tokens]
    size = int(np.clip(BATCH_BYTES // row_bytes, 1, tokens))
    norms: dict[str, list[np.ndarray]] = {hook: [] for hook in hooks}
    sums, shared = {hook: Sums.zeros(dataset.hooks[hook]) for hook in hooks}, []
    batches = dataset.batches(size, hooks, buffer=4 * size, where=chosen)
    for batch in tqdm(batches, "reading", unit=" batches", disable=None):
        for hook, values in batch.items():
            norms[hook].append(np.linalg.norm(values.astype(np.float64), axis=1))
            for sample in batch.sample_idx[~(norms[hook][-1] < MAX_NORM)]:
                raise OSError(f"{dataset.url}: sample {sample}, {hook}: NaN or huge values")
            sums[hook] = sums[hook].merge(
                sums_of(values.__getitem__, values.shape[1], batch.position)
            )
        shared.append((batch.sample_idx, batch.token_ids, batch.position))
    if not shared:
        raise ValueError(f"{dataset.url}: the sampled shards hold no tokens")
    sample_idx, token_ids, position = (np.concatenate(each) for each in zip(*shared, strict=True))
    document = np.cumsum(np.diff(sample_idx, prepend=sample_idx[0]) != 0)
    all_norms = {hook: np.concatenate(found) for hook, found in norms.items()}
    return TokenSample(documents, document, token_ids, position, all_norms, sums, len(shards))


class HookReport:
    """The numbers of one hook. layer: the hook's number in stored order if its kind is OTHER.

    norms: their quantiles at LEVELS. by_position: the median norm of every bucket. outlier: marks
    the outliers among the tokens. dimensions: the outliers among the dimensions, the largest first,
    with the root mean square of each as a multiple of the median. It leaves out the first tokens of
    documents if there are others. largest: see `largest_tokens`.
    """

    def __init__(self, sample: TokenSample, number: int, name: str) -> None:
        norms = sample.norms[name]
        statistics = HookStatistics(load=lambda: sample.sums[name])
        match = re.fullmatch(r"blocks\.([0-9]{1,9})\.(.+)", name)
        self.name = name
        self.kind, self.layer = (match[2], int(match[1])) if match else (OTHER, number)
        self.norms = np.quantile(norms, LEVELS)
        self.by_position = np.array([np.median(norms[each]) for each in sample.buckets.values()])
        self.outlier = norms > OUTLIER * self.norms[2]
        self.largest = largest_tokens(sample, norms)
        others = statistics.without_first_token
        found = others if others.tokens else statistics.all_tokens
        ratio = np.sqrt(found.variance + found.mean**2)
        ratio /= np.median(ratio) or np.inf  # most dimensions of some hooks are always zero
        order = np.argsort(-ratio).tolist()
        self.dimensions = [(n, ratio[n]) for n in order if ratio[n] > OUTLIER]


def largest_tokens(sample: TokenSample, norms: np.ndarray) -> list[tuple[int, int]]:
    """Returns the largest of each kind among the 200 tokens with the largest norms, and how many of
    its kind are among them. A kind is a token id, either at position 0 or elsewhere."""
    order = np.argsort(-norms, kind="stable")[:200]
    groups = np.stack([sample.token_ids[order], sample.position[order] == 0])
    _, firsts, counts = np.unique(groups, axis=1, return_index=True, return_counts=True)
    return [(int(order[n]), int(count)) for n, count in sorted(zip(firsts, counts, strict=True))]


def throughput(hosts: Iterable[Sequence[Commit]]) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the speed of a run over the time of its hosts' work.

    Args:
        hosts: Commits of the shards of each host.

    Returns:
        The edges of bins, in seconds of each host's work, float64 (bins + 1,); and the tokens per
        second of all hosts together in each bin, float64 (bins,). None if the shards do not show
        it.
    """
    timed = [[(s, commit.tokens) for commit, s in shard_seconds(commits)] for commits in hosts]
    totals = [np.cumsum([(0, 0), *each], axis=0).T for each in timed if each]
    if not totals:
        return None
    bins = int(np.clip(max(map(len, timed)) // SHARDS_PER_BIN, 1, BINS))
    edges = np.linspace(0, max(seconds[-1] for seconds, _ in totals), bins + 1)
    done = sum(np.interp(edges, *each) for each in totals)
    return edges, np.diff(done) / np.diff(edges)
