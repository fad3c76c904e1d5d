"""The numbers of a report: each hook's norms, directions and largest tokens, and the throughput."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from activation_extraction.inspect.report_sample import TokenSample
from activation_extraction.store.metadata import numbers_of

OUTLIER = 10.0  # times the median norm of the hook: attention sinks are far above it
LEVELS = (0.01, 0.25, 0.5, 0.75, 0.99, 1.0)  # of quantiles; the median is number 2
LARGEST = 200  # tokens per hook, out of which the list of the largest is made
SHARES = (0.5, 0.9, 0.99)  # of the variance
OTHER = "other hooks"
PAUSE = 1.0  # seconds without a program; less is rounding

Interval = tuple[float, float, float]  # Unix time of its begin and end, tokens
Throughput = tuple[np.ndarray, np.ndarray, np.ndarray, float]  # see `throughput`


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
