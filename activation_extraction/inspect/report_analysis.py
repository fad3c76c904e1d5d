"""What a report says about each hook: norms, leading directions, largest tokens; no drawing."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from activation_extraction.common.visible import counted
from activation_extraction.inspect.report_run import Lengths
from activation_extraction.inspect.report_sample import TokenSample

OUTLIER = 10.0  # times the median norm of the hook: attention sinks are far above it
LEVELS = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
LARGEST = 200  # tokens per hook, out of which the list of the largest is made
FLOPS = 1.5e12  # for the directions of all hooks, about: some ten seconds
FEWEST_VECTORS = 256


@dataclass(frozen=True)
class Quantiles:
    """Of some norms. `levels` has the value of every one of LEVELS."""

    count: int
    levels: tuple[float, ...]
    largest: float

    @classmethod
    def of(cls, norms: np.ndarray) -> "Quantiles":
        levels = np.quantile(norms.astype(np.float64), LEVELS)
        return cls(len(norms), tuple(levels.tolist()), float(norms.max()))

    def at(self, level: float) -> float:
        return self.levels[LEVELS.index(level)]

    @property
    def median(self) -> float:
        return self.at(0.5)


@dataclass(frozen=True)
class Directions:
    """Principal components of a hook's activations, without the outliers.

    tokens: how many they come from. shares: of the variance, of every component, largest first.
    largest_dimension: the share of the one dimension of the hook with the most variance.
    constant: dimensions that never change. outlier_share: the part of the squared distances from
    the mean that the outliers have, had they been included.
    """

    tokens: int
    shares: np.ndarray
    largest_dimension: float
    constant: int
    outlier_share: float

    def needed(self, share: float) -> int:
        """How many components it takes to have this share of the variance."""
        return int(np.searchsorted(np.cumsum(self.shares), share * (1 - 1e-9))) + 1

    @property
    def effective(self) -> float:
        """The participation ratio: the number of components, if all had the same variance."""
        return float(1 / np.square(self.shares).sum())


@dataclass(frozen=True)
class LargeToken:
    """A token with a large norm, as an example of `count` with this id among the largest.

    first: whether these are at position 0.
    """

    token: int
    norm: float
    count: int
    first: bool


@dataclass(frozen=True)
class HookReport:
    """One hook. layer: None where the name has none. positions: one entry per bucket.

    outliers: the share of tokens that are outliers; outliers_first: the share of position 0 in
    these. directions: None where the activations do not vary.
    """

    name: str
    kind: str
    layer: int | None
    width: int
    norms: Quantiles
    positions: list[Quantiles]
    outliers: float
    outliers_first: float
    directions: Directions | None
    largest: list[LargeToken]


def analyse(sample: TokenSample, hooks: Mapping[str, int]) -> list[HookReport]:
    """The report of every hook. hooks: name -> width."""
    buckets = position_buckets(sample.position)
    used = _vectors_used(len(sample.kept), list(hooks.values()))
    return [_analyse(sample, name, width, buckets, used) for name, width in hooks.items()]


def _analyse(
    sample: TokenSample, name: str, width: int, buckets: list["Bucket"], used: np.ndarray
) -> HookReport:
    norms = sample.norms[name]
    quantiles = Quantiles.of(norms)
    outlier = norms > OUTLIER * quantiles.median
    first = sample.position == 0
    layer, kind = parse_hook(name)
    return HookReport(
        name,
        kind,
        layer,
        width,
        quantiles,
        [Quantiles.of(norms[bucket.tokens]) for bucket in buckets],
        float(outlier.mean()),
        float(first[outlier].mean()) if outlier.any() else 0.0,
        directions_of(sample.vectors[name][used], outlier[sample.kept[used]]),
        largest_tokens(norms, sample.token_ids, first),
    )


def parse_hook(name: str) -> tuple[int | None, str]:
    """Layer and kind of a hook: blocks.7.hook_mlp_out -> 7, hook_mlp_out."""
    found = re.fullmatch(r"blocks\.([0-9]{1,9})\.(.+)", name)
    return (int(found[1]), found[2]) if found else (None, "other hooks")


@dataclass(frozen=True)
class Bucket:
    """Positions `start` to `stop` (not included), and which tokens of the sample have them."""

    start: int
    stop: int
    tokens: np.ndarray

    @property
    def label(self) -> str:
        return str(self.start) if self.stop == self.start + 1 else f"{self.start}–{self.stop - 1}"


def position_buckets(position: np.ndarray) -> list[Bucket]:
    """0, 1, 2, 3, 4–7, 8–15 and so on; those that no token of the sample has are left out."""
    edges = [0, 1, 2, 3]
    while edges[-1] <= position.max():
        edges.append(4 if edges[-1] == 3 else 2 * edges[-1])
    found = []
    for start, stop in zip(edges, edges[1:], strict=False):
        tokens = np.flatnonzero((position >= start) & (position < stop))
        if len(tokens):
            found.append(Bucket(start, stop, tokens))
    return found


def _vectors_used(kept: int, widths: Sequence[int]) -> np.ndarray:
    """Which of the kept tokens: so many that the directions of all hooks take a short time."""
    used = kept
    while used > FEWEST_VECTORS and sum(_flops(used, width) for width in widths) > FLOPS:
        used = used * 3 // 4
    return np.arange(used) * kept // max(used, 1)


def _flops(tokens: int, width: int) -> float:
    smaller = min(tokens, width)
    return 2.0 * tokens * width * smaller + 9.0 * smaller**3


def directions_of(vectors: np.ndarray, outlier: np.ndarray) -> Directions | None:
    """vectors: (tokens, width); outlier: which of them are left out. None: nothing varies."""
    wide = vectors.astype(np.float32)
    usual = wide[~outlier]
    if len(usual) < 2:
        return None
    mean = usual.mean(axis=0, dtype=np.float64).astype(np.float32)
    usual = usual - mean
    by_dimension = np.square(usual).sum(axis=0, dtype=np.float64)
    total = float(by_dimension.sum())
    if total == 0:
        return None
    left_out = float(np.square(wide[outlier] - mean).sum(dtype=np.float64))
    gram = usual @ usual.T if len(usual) < usual.shape[1] else usual.T @ usual
    squares = np.linalg.eigvalsh(gram)[::-1].clip(min=0).astype(np.float64)
    return Directions(
        len(usual),
        squares / squares.sum(),
        float(by_dimension.max() / total),
        int((by_dimension == 0).sum()),
        left_out / (left_out + total),
    )


def largest_tokens(norms: np.ndarray, token_ids: np.ndarray, first: np.ndarray) -> list[LargeToken]:
    """The tokens with the largest norms, one for each token id, at position 0 and elsewhere."""
    order = np.argsort(-norms, kind="stable")[:LARGEST]
    groups: dict[tuple[int, bool], list[int]] = {}
    for token in order.tolist():
        groups.setdefault((int(token_ids[token]), bool(first[token])), []).append(token)
    return [
        LargeToken(tokens[0], float(norms[tokens[0]]), len(tokens), at_first)
        for (_, at_first), tokens in groups.items()
    ]


def findings(reports: Sequence[HookReport], lengths: Lengths | None) -> Iterator[str]:
    """What somebody should know before training on the activations, one sentence each."""
    large = [report for report in reports if report.outliers > 0]
    if large:
        most = max(large, key=lambda report: report.outliers)
        yield (
            f"{len(large)} of {counted(len(reports), 'hook')} "
            f"{'has' if len(large) == 1 else 'have'} tokens with more than {OUTLIER:g} times "
            f"the median norm, at most {most.outliers:.2%} of the tokens ({most.name}); "
            f"{most.outliers_first:.0%} of those are the first token of their document."
        )
    else:
        yield f"No token of the sample has more than {OUTLIER:g} times the median norm of its hook."
    known = [(report, report.directions) for report in reports if report.directions is not None]
    if still := [report.name for report in reports if report.directions is None]:
        yield f"These hooks do not vary in the sample: {', '.join(still)}."
    if constant := [(r.name, d.constant) for r, d in known if d.constant]:
        name, count = max(constant, key=lambda each: each[1])
        yield f"Hooks with dimensions that never change: {len(constant)}; {name} has {count:,}."
    if known:
        report, most_of = max(known, key=lambda each: each[1].largest_dimension)
        if most_of.largest_dimension > 0.2:
            share = most_of.largest_dimension
            yield f"A single dimension of {report.name} has {share:.0%} of the variance there."
    if lengths is not None and lengths.cut > 0:
        yield (
            f"{lengths.cut:.0%} of the sampled documents fill a row of {lengths.longest_row:,} "
            "tokens: they were probably cut there."
        )
