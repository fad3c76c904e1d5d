"""Whether contenders stored the same thing: the tokens of every document, and like activations."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from activation_extraction.output.pickle_file import read_records

SHARD_LIMIT = 4 * 10**9  # bytes that a shard may unpack to
# Largest deviation of a value from the first contender's, relative to the layer's RMS. bfloat16
# has 8 bits, and every layer rounds several times.
TOLERANCE = {"float32": 1e-2, "bfloat16": 0.5}
KEPT_TOKENS = 640  # longer documents are not kept for comparing


class Disagreement(Exception):
    """A contender computed something else."""


class Agreement:
    """Compares what contenders stored; the first one of a dtype is the measure of the others."""

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        self._documents = documents
        self._kept: dict[tuple[str, int, int], np.ndarray] = {}

    def check(self, folder: Path, dtype: str, tokens: int) -> float | None:
        """The largest deviation, relative to the layer's RMS; None when nothing can be compared.

        tokens: how many every layer should have. Raises Disagreement.
        """
        found: dict[int, int] = {}
        deviations = []
        for layer, number, ids, values in stored(folder):
            if ids.tolist() != list(self._documents[number]) or len(values) != len(ids):
                raise Disagreement(f"{folder.name}: document {number} has other tokens")
            found[layer] = found.get(layer, 0) + len(ids)
            if len(ids) <= KEPT_TOKENS:
                expected = self._kept.setdefault((dtype, layer, number), values)
                if expected is not values:
                    deviations.append(deviation(values, expected))
        if set(found.values()) != {tokens}:
            raise Disagreement(f"{folder.name}: tokens by layer are {found}, expected {tokens}")
        worst = float(np.max(deviations)) if deviations else None  # NaN, if any is
        if worst is not None and not worst <= TOLERANCE[dtype]:
            raise Disagreement(
                f"{folder.name}: deviates by {worst:.3g} of the RMS, {TOLERANCE[dtype]} is allowed"
            )
        return worst


def deviation(values: np.ndarray, expected: np.ndarray) -> float:
    """Largest difference, in units of the RMS of `expected`."""
    wide, reference = values.astype(np.float32), expected.astype(np.float32)
    rms = np.sqrt(np.mean(np.square(reference), dtype=np.float64))
    return float(np.abs(wide - reference).max() / rms)


def stored(folder: Path) -> Iterator[tuple[int, int, np.ndarray, np.ndarray]]:
    """(layer, document, token ids, activation) of all that is in the shards of a folder."""
    for path in sorted(folder.glob("shard_*.pkl.gz")):
        for layer, records in read_records(path, SHARD_LIMIT).items():
            for record in records:
                ids = record["token_ids"]
                assert isinstance(layer, int) and ids is not None
                yield layer, record["sample_idx"], ids, record["activation"]
