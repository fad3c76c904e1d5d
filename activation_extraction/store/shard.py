"""A shard in memory: a list of samples, and one array of activations per hook and sample.

Every shard format writes and reads this. The facts of its samples are stored in the table of
samples (sample_table.py).
"""

from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from activation_extraction.common.codes import Codes
from activation_extraction.common.encodings import decode, encode, relative_errors
from activation_extraction.text.sample_facts import SampleFacts

Values = np.ndarray | Codes  # of some tokens at a hook
Key = int | str  # a hook's name in a shard: its layer number, or the name the user asked for
LABELS = ("role", "turn")  # of every token; all samples of a run have the same ones, or none
MAX_GZIP_RATIO = 1032  # the most bytes that gzip can unpack from one byte
GROUP_BYTES = 32 * 2**20
MEASURED = 1024  # at most, of the sinks of a shard, and of its other tokens


@dataclass(frozen=True)
class ShardSample:
    """A sample of a shard, without its activations.

    Attributes:
        facts: Facts of the sample. Those that only the table of samples has are their defaults in a
            shard that was read.
        token_ids: Ids of the stored tokens, int32 (tokens,). None if the caller gave none.
        positions: Positions of the stored tokens, int32 (tokens,), counted from 0 at the start of
            the sample.
        labels: Labels of the stored tokens, int32 (tokens,) each, by names in LABELS. Empty if the
            run has none.
    """

    facts: SampleFacts
    token_ids: np.ndarray | None
    positions: np.ndarray
    labels: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """Samples in ascending order; `slices[key][i]` is sample i at that hook, (tokens, width), or
    the codes of its tokens.

    scales: for the hooks whose slices are encoded (common/encodings.py), `scales[key][i]` has the
    scales of sample i, (tokens, 1).
    """

    samples: list[ShardSample]
    slices: dict[Key, list[Any]]
    scales: dict[Key, list[np.ndarray]] = field(default_factory=dict)

    def groups(self, key: Key) -> Iterator[slice]:
        """Yields groups of consecutive samples that have about GROUP_BYTES at one hook, which a
        thread handles at a time."""
        begin = size = 0
        for number, values in enumerate(self.slices[key], 1):
            size += values.nbytes
            if size >= GROUP_BYTES or number == len(self.samples):
                yield slice(begin, number)
                begin, size = number, 0

    @property
    def positions(self) -> list[np.ndarray]:
        """The positions of the tokens of each sample."""
        return [sample.positions for sample in self.samples]

    @property
    def offsets(self) -> np.ndarray:
        """int64 (samples + 1,); sample i has the tokens offsets[i] to offsets[i + 1]."""
        return np.cumsum([0, *map(len, self.positions)], dtype=np.int64)


@dataclass(frozen=True)
class EncodingError:
    """How many encoded tokens were measured, and the mean and the largest of their relative errors.

    The error of a token x is the Euclidean norm of x - decoded x, divided by that of x.
    """

    tokens: int = 0
    mean: float = 0.0
    worst: float = 0.0

    def merge(self, other: "EncodingError") -> "EncodingError":
        """Returns the errors of both together."""
        tokens = self.tokens + other.tokens
        total = self.mean * self.tokens + other.mean * other.tokens
        return EncodingError(tokens, total / max(tokens, 1), max(self.worst, other.worst))


# The errors at one hook by kind of token: "sinks" are those at position 0, which are often
# attention sinks; "others" are all others.
Errors = dict[str, EncodingError]


def encode_shard(
    shard: Shard, keys: Collection[Key], threads: Executor
) -> tuple[Shard, dict[Key, Errors]]:
    """Returns the shard with these hooks encoded, and the errors by key."""
    if not keys:
        return shard, {}
    slices = dict(shard.slices)
    scales = dict(shard.scales)
    found = {}
    offsets, positions = shard.offsets, np.concatenate(shard.positions)
    measured = _every_nth(positions == 0) | _every_nth(positions != 0)
    sinks = positions[measured] == 0

    def encode_group(key: Key, group: slice) -> tuple[list[np.ndarray], ...]:
        x = np.concatenate(shard.slices[key][group])
        values, scales = encode(x)
        first, *starts, stop = offsets[group.start : group.stop + 1]
        some = measured[first:stop]
        errors = relative_errors(x[some], decode(values[some], scales[some]))
        samples = np.array(starts, np.int64) - first
        return np.split(values, samples), np.split(scales, samples), [errors]

    for key in keys:
        groups = threads.map(partial(encode_group, key), shard.groups(key))
        parts = [list(chain.from_iterable(each)) for each in zip(*groups, strict=True)]
        slices[key], scales[key], errors = parts[0], parts[1], np.concatenate(parts[2])
        found[key] = {
            kind: EncodingError(len(some), float(np.mean(some)), float(np.max(some)))
            if len(some)
            else EncodingError()
            for kind, some in (("sinks", errors[sinks]), ("others", errors[~sinks]))
        }
    return replace(shard, slices=slices, scales=scales), found


@dataclass(frozen=True)
class CodeSums:
    """What the codes of some tokens add up to, which can be merged.

    features: how many are stored. cut: how many more were active, and are not kept
    (--encode_most); cut_tokens: tokens with such features. error, square: sums of the squared norms
    of what the stored features do not reconstruct, and of what is to be reconstructed.
    """

    tokens: int = 0
    features: int = 0
    cut: int = 0
    cut_tokens: int = 0
    error: float = 0.0
    square: float = 0.0

    @classmethod
    def of(cls, codes: Codes, chosen: np.ndarray) -> "CodeSums":
        """Returns the sums over those of the tokens that are chosen, bool (tokens,)."""
        kept = np.diff(codes.indptr)[chosen]
        cut = np.zeros(1, np.int64) if codes.active is None else codes.active[chosen] - kept
        sums = (each[chosen].astype(np.float64) for each in (codes.error, np.square(codes.norm)))
        numbers = len(kept), int(kept.sum()), int(cut.sum()), int((cut > 0).sum())
        return cls(*numbers, *(float(each.sum()) for each in sums))

    def merge(self, other: "CodeSums") -> "CodeSums":
        """Returns the sums over the tokens of both."""
        return CodeSums(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def explained(self) -> float:
        """The share of the squared norms that the stored features explain, 1 - error / square.

        Zeros in place of the features' reconstruction give 0, and a reconstruction that is worse
        than that gives less. NaN if all norms are 0.
        """
        return 1 - self.error / self.square if self.square else float("nan")


# By kind of token, as `Errors`.
SumsOfCodes = dict[str, CodeSums]


def sums_of_codes(codes: Codes, positions: np.ndarray) -> SumsOfCodes:
    """Returns the sums over some tokens. positions: of these tokens in their documents."""
    first = positions == 0
    return {"sinks": CodeSums.of(codes, first), "others": CodeSums.of(codes, ~first)}


def _every_nth(mask: np.ndarray) -> np.ndarray:
    """Returns a mask of every n-th element that is True, so that at most MEASURED are left."""
    indices = np.flatnonzero(mask)
    chosen = np.zeros(len(mask), bool)
    chosen[indices[:: max(-(-len(indices) // MEASURED), 1)]] = True
    return chosen
