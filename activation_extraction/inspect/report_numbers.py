"""Computes the numbers of a report from a sample of tokens, and the throughput from the metrics.

The sample is bounded, and spread over the whole run, so that every run takes about the same time
and memory. All of its tokens contribute their norms at each hook; a smaller random share of them
also contributes activations, from which the directions are computed.
"""

import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from tqdm import tqdm

from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.sample_activations import SampleActivations
from activation_extraction.dataset.token_batch import ByHook
from activation_extraction.store.commit import Commit, numbers_of
from activation_extraction.store.shard_reader import read_by_ranges

READ_BYTES = 1e9  # about how many bytes of activations are read
MIN_TOKENS, MAX_TOKENS = 1000, 200_000
SHARDS = 16  # how many shards the sample is taken from
WHOLE_SHARD_BYTES = 4e9  # about how many uncompressed bytes of pickles, which are read whole
KEPT_BYTES = 512e6  # how many bytes of activations stay in memory
MAX_KEPT = 4096  # tokens if there is one hook; the directions of all hooks then take ten seconds
MAX_NORM = 1e16  # the squares of larger norms overflow
THREADS, THREAD_BYTES = 8, 256e6  # the limits for samples that are read at the same time
SEED = 0  # the same run gives the same report

OUTLIER = 10.0  # times the median norm of the hook: attention sinks are far above it
LEVELS = (0.01, 0.25, 0.5, 0.75, 0.99, 1.0)  # of the quantiles; the median is number 2
LARGEST = 200  # how many tokens per hook the list of the largest is made from
SHARES = (0.5, 0.9, 0.99)  # of the variance
OTHER = "other hooks"
PAUSE = 1.0  # seconds without any program; shorter times are rounding errors

Interval = tuple[float, float, float]  # Unix times of its beginning and end, tokens
Throughput = tuple[np.ndarray, np.ndarray, np.ndarray, float]  # see `throughput`


@dataclass(frozen=True)
class TokenSample:
    """The tokens that were read, in order, with the documents that they come from.

    documents: have no activations. document: the number of each token's document. token_ids,
    position: int32 (tokens,). norms: float64 (tokens,) by hook. kept: the numbers of the tokens
    whose activations are here, int64 (kept,). vectors: (kept, width) by hook, in the stored dtype.
    shards: how many shards were read.
    """

    documents: list[SampleActivations]
    document: np.ndarray
    token_ids: np.ndarray
    position: np.ndarray
    norms: dict[str, np.ndarray]
    kept: np.ndarray
    vectors: dict[str, np.ndarray]
    shards: int

    def around(self, token: int, most: int) -> slice:
        """Returns the range of a token and up to `most` stored neighbours on each side."""
        start, stop = max(token - most, 0), min(token + most + 1, len(self.position))
        apart = self.position[start:stop] - np.arange(start, stop)
        same = apart == apart[token - start]  # whether no token between them is missing
        same &= self.document[start:stop] == self.document[token]
        return slice(start + int(same.argmax()), stop - int(same[::-1].argmax()))


def read_sample(
    dataset: ActivationDataset, commits: Sequence[Commit], hooks: Sequence[str]
) -> TokenSample:
    """Reads a sample of the tokens. commits: the dataset's shards, in its order. hooks: those that
    have activations.

    Raises OSError if a shard cannot be read, or has activations that are NaN or huge.
    """
    token_bytes = sum(
        width * dataset.dtypes[hook].itemsize for hook, width in dataset.hooks.items()
    )
    by_ranges = all(map(read_by_ranges, commits))
    mean = sum(commit.unpacked for commit in commits) / len(commits)
    most = SHARDS if by_ranges else int(np.clip(WHOLE_SHARD_BYTES / mean, 1, SHARDS))
    shards = np.linspace(0, len(commits) - 1, min(most, len(commits)), dtype=int).tolist()
    tokens = float(np.clip(READ_BYTES / token_bytes, MIN_TOKENS, MAX_TOKENS))
    numbers = choose_samples(commits, shards, tokens)
    most_kept = min(KEPT_BYTES / token_bytes, MAX_KEPT / len(dataset.hooks) ** (1 / 3))
    share = most_kept / max(min(tokens, sum(commits[shard].tokens for shard in shards)), 1)
    longest = max(max(commit.tokens / commit.count, 1) for commit in commits) * token_bytes
    threads = int(np.clip(THREAD_BYTES / longest, 1, THREADS)) if by_ranges else 1
    numbers = [number for number in numbers if number < len(dataset)]
    with ThreadPoolExecutor(threads) as pool:
        results = pool.map(partial(_read, dataset, hooks, share), numbers)
        bar = tqdm(results, "reading", len(numbers), unit=" samples", disable=None)
        samples, kept, norms = zip(*bar, strict=True)
    if not any(len(sample.token_ids) for sample in samples):
        raise ValueError(f"{dataset.url}: the sampled shards hold no tokens")
    return TokenSample(
        [replace(sample, activations=ByHook({})) for sample in samples],
        np.repeat(np.arange(len(samples)), [len(sample.token_ids) for sample in samples]),
        np.concatenate([sample.token_ids for sample in samples]),
        np.concatenate([sample.position for sample in samples]),
        {hook: np.concatenate([by_hook[hook] for by_hook in norms]) for hook in hooks},
        np.flatnonzero(np.concatenate(kept)),
        {hook: np.concatenate([sample[hook] for sample in samples]) for hook in hooks},
        len(shards),
    )


def choose_samples(commits: Sequence[Commit], shards: Sequence[int], tokens: float) -> list[int]:
    """Picks samples from some shards with about `tokens` tokens together, and returns their numbers
    in the dataset."""
    first = np.cumsum([0, *(commit.count for commit in commits)])
    chosen: list[int] = []
    for shard in shards:
        count, stored = commits[shard].count, max(commits[shard].tokens, 1)
        wanted = int(np.clip(round(tokens / len(shards) * count / stored), 1, count))
        picks = np.random.default_rng([SEED, shard]).choice(count, wanted, replace=False)
        chosen += sorted((first[shard] + picks).tolist())
    return chosen


def _read(
    dataset: ActivationDataset, hooks: Sequence[str], share: float, number: int
) -> tuple[SampleActivations, np.ndarray, ByHook[np.ndarray]]:
    """Returns a sample with the activations of a share of its tokens, a mask of these tokens, and
    the norms of all tokens."""
    sample = dataset[number]
    activations = ByHook({hook: sample[hook] for hook in hooks})
    kept = np.random.default_rng([SEED, number]).random(len(sample.token_ids)) < share
    norms = activations.map(lambda a: np.linalg.norm(a.astype(np.float64), axis=1))
    for hook, values in norms.items():
        if not (values < MAX_NORM).all():
            raise OSError(f"{dataset.url}: sample {sample.sample_idx}, {hook}: NaN or huge values")
    return replace(sample, activations=activations.map(lambda a: a[kept])), kept, norms


@dataclass(frozen=True)
class HookReport:
    """The numbers of one hook. layer: the hook's number if its kind is OTHER.

    norms: their quantiles at LEVELS. by_position: the median norm of every bucket. outlier: marks
    the outliers in the sample. variance: the variance of every dimension. shares: the shares of the
    variance of every principal component, in descending order; none if nothing varies. Both leave
    out outliers. directions: how many components have SHARES of the variance. largest: see
    `largest_tokens`.
    """

    name: str
    kind: str
    layer: int
    norms: np.ndarray
    by_position: np.ndarray
    outlier: np.ndarray
    variance: np.ndarray
    shares: np.ndarray
    directions: np.ndarray
    largest: list[tuple[int, int]]


def analyse(
    sample: TokenSample, number: int, name: str, buckets: Mapping[int, np.ndarray]
) -> HookReport:
    """Computes the numbers of a hook. number: the hook's position in stored order."""
    norms = sample.norms[name]
    levels = np.quantile(norms, LEVELS)
    outlier = norms > OUTLIER * levels[2]
    usual = sample.vectors[name][~outlier[sample.kept]].astype(np.float32)
    variance = usual.var(axis=0, dtype=np.float64) if len(usual) else np.zeros(usual.shape[1])
    shares = variance_shares(usual) if variance.any() else np.zeros(0)
    match = re.fullmatch(r"blocks\.([0-9]{1,9})\.(.+)", name)
    return HookReport(
        name,
        match[2] if match else OTHER,
        int(match[1]) if match else number,
        levels,
        np.array([np.median(norms[tokens]) for tokens in buckets.values()]),
        outlier,
        variance,
        shares,
        np.searchsorted(np.cumsum(shares), np.array(SHARES) - 1e-6) + 1,
        largest_tokens(sample, norms),
    )


def position_buckets(position: np.ndarray) -> dict[int, np.ndarray]:
    """Groups tokens by position: 0, 1, 2, 3, 4–7, 8–15 and so on. The keys are first positions."""
    starts = np.array([0, 1, 2, 3, *(2**power for power in range(2, 31))])
    bucket = np.searchsorted(starts, position, "right") - 1
    return {int(starts[n]): np.flatnonzero(bucket == n) for n in np.unique(bucket)}


def variance_shares(vectors: np.ndarray) -> np.ndarray:
    """Returns the shares of the variance that the principal components have.

    vectors: (tokens, width).
    """
    centred = vectors - vectors.mean(axis=0, dtype=np.float64).astype(np.float32)
    wide = len(centred) < centred.shape[1]
    gram = centred @ centred.T if wide else centred.T @ centred
    squares = np.linalg.eigvalsh(gram)[::-1].clip(min=0).astype(np.float64)
    return squares / (squares.sum() or 1.0)


def largest_tokens(sample: TokenSample, norms: np.ndarray) -> list[tuple[int, int]]:
    """Returns the tokens with the largest norms, and how many similar tokens each represents.

    Tokens are similar if they have the same id, and are both at position 0 or both elsewhere.
    """
    order = np.argsort(-norms, kind="stable")[:LARGEST]
    groups = np.stack([sample.token_ids[order], sample.position[order] == 0])
    _, firsts, counts = np.unique(groups, axis=1, return_index=True, return_counts=True)
    pairs = sorted(zip(firsts, counts, strict=True))
    return [(int(order[first]), int(count)) for first, count in pairs]


def intervals(metrics: bytes) -> list[Interval]:
    """Returns the interval that each line of a host's metrics.jsonl covers.

    `tokens` in it counts from each start of the program. No line covers the time between two runs.
    """
    result, before = [], 0.0
    for line in metrics.splitlines():
        with suppress(ValueError, RecursionError, AttributeError, KeyError):  # no metrics, or cut
            metrics_of_line = numbers_of(json.loads(line))
            names = ("time", "tokens", "tokens_per_second")
            time, tokens, rate = (metrics_of_line[name] for name in names)
            new = tokens - before if tokens >= before else tokens
            before = tokens
            if rate > 0 and 1e-3 < new / rate < 1e9 and 0 < time < 1e10:
                result.append((time - new / rate, time, new))
    return result


def throughput(all_intervals: Sequence[Interval], bins: int = 120) -> Throughput | None:
    """Computes the throughput of all hosts together, given the `intervals` of all; None if there
    are none.

    Returns the edges of bins, in seconds of work; the tokens per second in each bin; the seconds of
    work before each pause, in which no host worked; the length of all pauses together.
    """
    if not all_intervals:
        return None
    starts, stops, tokens = np.array(sorted(all_intervals)).T
    latest = np.maximum.accumulate(stops)
    last = np.flatnonzero(starts[1:] > latest[:-1] + PAUSE)  # the last interval before each pause
    spans = np.stack([starts[[0, *(last + 1)]], latest[[*last, -1]]])  # the times of work
    work = np.cumsum(spans[1] - spans[0])
    number = np.clip(work[-1] / (stops - starts).max(), 1, bins)
    edges = np.linspace(0, work[-1], int(number) + 1)
    times = np.interp(edges, np.ravel([[0, *work[:-1]], work], "F"), np.ravel(spans, "F"))
    done = [(tokens * ((t - starts) / (stops - starts)).clip(0, 1)).sum() for t in times]
    paused = spans[1, -1] - spans[0, 0] - work[-1]
    return edges, np.diff(done) / np.diff(edges), work[:-1], paused
