"""Rows of the data set and document ids that occur more than once among the samples of a run.

A run may have billions of samples, so only a digest of each row and id is kept: 40 bytes a sample.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from activation_extraction.common.visible import counted
from activation_extraction.store.shard import SampleRow

DIGEST = np.dtype([("high", "<u8"), ("low", "<u8")])
SHOWN = 5  # pairs of samples with the same row


@dataclass(frozen=True)
class RowDigests:
    """Digests of where the samples of a shard come from.

    sample_idx: int64, shape (samples,). rows, ids: DIGEST, of the same shape; 0 where a sample has
    none.
    """

    sample_idx: np.ndarray
    rows: np.ndarray
    ids: np.ndarray

    @classmethod
    def of(cls, samples: Iterable[SampleRow]) -> "RowDigests":
        samples = list(samples)
        return cls(
            np.array([sample.sample_idx for sample in samples], np.int64),
            _digests(sample.row for sample in samples),
            _digests(sample.doc_id for sample in samples),
        )


def rows_stored_twice(every: list[RowDigests]) -> Iterator[str]:
    """A line for the first few pairs of samples that come from the same row, and how many."""
    sample_idx, repeated = _repeated(every, [each.rows for each in every])
    for one, other in repeated[:SHOWN]:
        yield (
            f"samples {sample_idx[one]} and {sample_idx[other]}: come from the same row of the "
            "data set, which is stored twice"
        )
    if len(repeated) > SHOWN:
        yield f"{len(repeated):,} rows of the data set are stored twice in all"


def ids_that_recur(every: list[RowDigests]) -> str | None:
    """A line about document ids that several samples have, if there are any."""
    sample_idx, repeated = _repeated(every, [each.ids for each in every])
    if not len(repeated):
        return None
    one, other = sample_idx[repeated[0]]
    return (
        f"{counted(len(repeated), 'sample')} with the doc_id of an earlier one, such as samples "
        f"{one} and {other}; the data set itself may hold them twice"
    )


def _repeated(every: list[RowDigests], digests: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """All `sample_idx`, and pairs of places there, (pairs, 2), whose digests are the same."""
    sample_idx = np.concatenate([np.zeros(0, np.int64), *(each.sample_idx for each in every)])
    values = np.concatenate([np.zeros(0, DIGEST), *digests])
    order = np.lexsort((values["low"], values["high"]))
    values = values[order]
    same = (values[1:] == values[:-1]) & (values[1:] != np.zeros((), DIGEST))
    return sample_idx, np.stack([order[:-1][same], order[1:][same]], axis=1)


def _digests(values: Iterable[Any]) -> np.ndarray:
    def digest(value: Any) -> bytes:
        if value is None:
            return bytes(DIGEST.itemsize)
        text = json.dumps(value, sort_keys=True, default=repr)
        return hashlib.blake2b(text.encode(), digest_size=DIGEST.itemsize).digest()

    return np.frombuffer(b"".join(map(digest, values)), DIGEST)
