"""The numbers of a report, from a bounded sample of tokens that is spread over the whole run.

Of every token that is read the norm at each hook is kept; of a smaller, random share of them the
activations as well. A run of any size costs about the same time and memory. From these come each
hook's norms, directions and largest tokens; the throughput comes from the metrics.
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

from activation_extraction.dataset.dataset import ActivationDataset, SampleActivations
from activation_extraction.dataset.token_batch import ByHook
from activation_extraction.store.commit import Commit, numbers_of
from activation_extraction.store.shard_reader import read_by_ranges

READ_BYTES = 1e9  # of activations, about
FEWEST_TOKENS, MOST_TOKENS = 1000, 200_000
SHARDS = 16  # that the sample is taken from, where a part of a shard can be read
WHOLE_SHARD_BYTES = 4e9  # of shards that have to be read whole, before compression, about
KEPT_BYTES = 512e6  # of activations that stay in memory
MOST_KEPT = 4096  # tokens of a single hook: finding the directions of all takes some ten seconds
LARGEST_NORM = 1e16  # the squares of larger ones overflow
THREADS, THREAD_BYTES = 8, 256e6  # of samples that are read at the same time
SEED = 0  # the same run gives the same report

OUTLIER = 10.0  # times the median norm of the hook: attention sinks are far above it
LEVELS = (0.01, 0.25, 0.5, 0.75, 0.99, 1.0)  # of quantiles; the median is number 2
LARGEST = 200  # tokens per hook, out of which the list of the largest is made
SHARES = (0.5, 0.9, 0.99)  # of the variance
OTHER = "other hooks"
PAUSE = 1.0  # seconds without a program; less is rounding

Interval = tuple[float, float, float]  # Unix time of its begin and end, tokens
Throughput = tuple[np.ndarray, np.ndarray, np.ndarray, float]  # see `throughput`


@dataclass(frozen=True)
class TokenSample:
    """The tokens that were read, in order, with the documents that they come from.

    documents: without activations. document: the number of each token's. token_ids, position: int32
    (tokens,). norms: hook -> float64 (tokens,). kept: the tokens whose activations are here, int64
    (kept,). vectors: hook -> (kept, width), in the stored dtype. shards: how many were looked at.
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
        """Returns the token and up to `most` neighbours on each side, as far as they were kept."""
        start, stop = max(token - most, 0), min(token + most + 1, len(self.position))
        apart = self.position[start:stop] - np.arange(start, stop)
        same = apart == apart[token - start]  # no token between them is missing
        same &= self.document[start:stop] == self.document[token]
        return slice(start + int(same.argmax()), stop - int(same[::-1].argmax()))


def read_sample(dataset: ActivationDataset, commits: Sequence[Commit]) -> TokenSample:
    """Reads a sample of the tokens. commits: the dataset's shards, in its order.

    Raises OSError when a shard cannot be read, or holds activations that are no usable numbers.
    """
    token_bytes = sum(
        width * dataset.dtypes[hook].itemsize for hook, width in dataset.hooks.items()
    )
    by_ranges = all(map(read_by_ranges, commits))
    mean = sum(commit.unpacked for commit in commits) / len(commits)
    most = SHARDS if by_ranges else int(np.clip(WHOLE_SHARD_BYTES / mean, 1, SHARDS))
    shards = np.linspace(0, len(commits) - 1, min(most, len(commits)), dtype=int).tolist()
    tokens = float(np.clip(READ_BYTES / token_bytes, FEWEST_TOKENS, MOST_TOKENS))
    numbers = choose_samples(commits, shards, tokens)
    most_kept = min(KEPT_BYTES / token_bytes, MOST_KEPT / len(dataset.hooks) ** (1 / 3))
    share = most_kept / max(min(tokens, sum(commits[shard].tokens for shard in shards)), 1)
    longest = max(max(commit.tokens / commit.count, 1) for commit in commits) * token_bytes
    threads = int(np.clip(THREAD_BYTES / longest, 1, THREADS)) if by_ranges else 1
    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(partial(_read, dataset, share), [n for n in numbers if n < len(dataset)])
        bar = tqdm(found, "reading", len(numbers), unit=" samples", disable=None)
        samples, kept, norms = zip(*bar, strict=True)
    if not any(len(sample.token_ids) for sample in samples):
        raise ValueError(f"{dataset.url}: no token is in the shards that were looked at")
    return TokenSample(
        [replace(sample, activations=ByHook({})) for sample in samples],
        np.repeat(np.arange(len(samples)), [len(sample.token_ids) for sample in samples]),
        np.concatenate([sample.token_ids for sample in samples]),
        np.concatenate([sample.position for sample in samples]),
        {hook: np.concatenate([each[hook] for each in norms]) for hook in dataset.hooks},
        np.flatnonzero(np.concatenate(kept)),
        {hook: np.concatenate([sample[hook] for sample in samples]) for hook in dataset.hooks},
        len(shards),
    )


def choose_samples(commits: Sequence[Commit], shards: Sequence[int], tokens: float) -> list[int]:
    """Picks samples of some shards, as numbers in the dataset; together about `tokens` tokens."""
    first = np.cumsum([0, *(commit.count for commit in commits)])
    chosen: list[int] = []
    for shard in shards:
        count, stored = commits[shard].count, max(commits[shard].tokens, 1)
        wanted = int(np.clip(round(tokens / len(shards) * count / stored), 1, count))
        picks = np.random.default_rng([SEED, shard]).choice(count, wanted, replace=False)
        chosen += sorted((first[shard] + picks).tolist())
    return chosen


def _read(
    dataset: ActivationDataset, share: float, number: int
) -> tuple[SampleActivations, np.ndarray, ByHook[np.ndarray]]:
    """Returns a sample with the activations of a share of its tokens, these tokens, all norms."""
    sample = dataset[number]
    kept = np.random.default_rng([SEED, number]).random(len(sample.token_ids)) < share
    norms = sample.activations.map(lambda a: np.linalg.norm(a.astype(np.float64), axis=1))
    for hook, values in norms.items():
        if not (values < LARGEST_NORM).all():
            raise OSError(f"{dataset.url}: sample {sample.sample_idx}, {hook}: NaN or huge values")
    return replace(sample, activations=sample.activations.map(lambda a: a[kept])), kept, norms


@dataclass(frozen=True)
class HookReport:
    """One hook. layer: or the number of the hook where its name has none, whose kind is OTHER.

    norms: quantiles at LEVELS. by_position: the median norm of every bucket. outlier: whether a
    token of the sample is one. variance: of every dimension, and shares: of every principal
    component, the largest first, both without outliers; no shares where nothing varies. directions:
    how many components it takes to have SHARES. largest: see `largest_tokens`.
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
    """Makes the report of a hook. number: of the hook, in stored order."""
    norms = sample.norms[name]
    levels = np.quantile(norms, LEVELS)
    outlier = norms > OUTLIER * levels[2]
    usual = sample.vectors[name][~outlier[sample.kept]].astype(np.float32)
    variance = usual.var(axis=0, dtype=np.float64) if len(usual) else np.zeros(usual.shape[1])
    shares = variance_shares(usual) if variance.any() else np.zeros(0)
    found = re.fullmatch(r"blocks\.([0-9]{1,9})\.(.+)", name)
    return HookReport(
        name,
        found[2] if found else OTHER,
        int(found[1]) if found else number,
        levels,
        np.array([np.median(norms[tokens]) for tokens in buckets.values()]),
        outlier,
        variance,
        shares,
        np.searchsorted(np.cumsum(shares), np.array(SHARES) - 1e-6) + 1,
        largest_tokens(sample, norms),
    )


def position_buckets(position: np.ndarray) -> dict[int, np.ndarray]:
    """Groups tokens at position 0, 1, 2, 3, 4–7, 8–15 and so on, by the first of the positions."""
    starts = np.array([0, 1, 2, 3, *(2**power for power in range(2, 31))])
    bucket = np.searchsorted(starts, position, "right") - 1
    return {int(starts[n]): np.flatnonzero(bucket == n) for n in np.unique(bucket)}


def variance_shares(vectors: np.ndarray) -> np.ndarray:
    """Returns the shares of the variance that the principal components have. (tokens, width)"""
    wide = vectors - vectors.mean(axis=0, dtype=np.float64).astype(np.float32)
    gram = wide @ wide.T if len(wide) < wide.shape[1] else wide.T @ wide
    squares = np.linalg.eigvalsh(gram)[::-1].clip(min=0).astype(np.float64)
    return squares / (squares.sum() or 1.0)


def largest_tokens(sample: TokenSample, norms: np.ndarray) -> list[tuple[int, int]]:
    """Lists the tokens with the largest norms, one for each token id, at position 0 and elsewhere,
    each with the number of those that it stands for."""
    order = np.argsort(-norms, kind="stable")[:LARGEST]
    alike = np.stack([sample.token_ids[order], sample.position[order] == 0])
    _, first, count = np.unique(alike, axis=1, return_index=True, return_counts=True)
    return [(int(order[n]), int(many)) for n, many in sorted(zip(first, count, strict=True))]


def intervals(metrics: bytes) -> list[Interval]:
    """Lists what each line of a host's metrics.jsonl covers. `tokens` there counts from every start
    of the program; time in which it did not run belongs to no line."""
    found, before = [], 0.0
    for line in metrics.splitlines():
        with suppress(ValueError, RecursionError, AttributeError, KeyError):  # no metrics, or cut
            told = numbers_of(json.loads(line))
            time, tokens, rate = (told[n] for n in ("time", "tokens", "tokens_per_second"))
            new = tokens - before if tokens >= before else tokens
            before = tokens
            if rate > 0 and 1e-3 < new / rate < 1e9 and 0 < time < 1e10:
                found.append((time - new / rate, time, new))
    return found


def throughput(every: Sequence[Interval], bins: int = 120) -> Throughput | None:
    """Adds up the hosts. every: the `intervals` of them all; without any the result is None.

    Returns the edges of bins, in seconds of work; the tokens per second in each; after how many
    seconds of work there was a pause, in which no host worked; the length of all pauses.
    """
    if not every:
        return None
    starts, stops, tokens = np.array(sorted(every)).T
    latest = np.maximum.accumulate(stops)
    last = np.flatnonzero(starts[1:] > latest[:-1] + PAUSE)  # before each pause
    spans = np.stack([starts[[0, *(last + 1)]], latest[[*last, -1]]])  # of work
    work = np.cumsum(spans[1] - spans[0])
    number = np.clip(work[-1] / (stops - starts).max(), 1, bins)
    edges = np.linspace(0, work[-1], int(number) + 1)
    times = np.interp(edges, np.ravel([[0, *work[:-1]], work], "F"), np.ravel(spans, "F"))
    done = [(tokens * ((t - starts) / (stops - starts)).clip(0, 1)).sum() for t in times]
    paused = spans[1, -1] - spans[0, 0] - work[-1]
    return edges, np.diff(done) / np.diff(edges), work[:-1], paused
