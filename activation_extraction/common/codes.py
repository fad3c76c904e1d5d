"""Codes: the active features of an autoencoder for each token, as sparse rows.

In memory that is moved (on devices, in batches that are shuffled) a token's codes are a record of
int32, all of one width, so that they move as the values of any other hook do: how many features are
active, the bits of the squared error and of the norm, `most` feature numbers, and the bits of their
values. Where they are stored and given to the user they are ragged: `Codes`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

CODES = ".codes"  # follows the name of a hook
HEAD = 3  # numbers of a record before the features
# What the arrays of the codes at a HOOK are called in files: HOOK.codes.ids and so on.
ARRAYS = {"ids": "indices", "values": "data", "offsets": "indptr", "error": "error", "norm": "norm"}


def record_width(most: int) -> int:
    """Returns how many numbers the record of a token has that keeps `most` features."""
    return HEAD + 2 * most


def value_dtype(activations: Any) -> np.dtype:
    """Returns the dtype in which values are stored. activations: that of the run's activations."""
    narrow = str(activations) == "bfloat16"
    return np.dtype(ml_dtypes.bfloat16 if narrow else np.float32)


def code_bytes(most: int, activations: Any) -> int:
    """Returns how many bytes are stored of a token with `most` active features: its offset, error
    and norm, and the features. activations: as for `value_dtype`."""
    return 8 + 4 + 4 + most * (4 + value_dtype(activations).itemsize)


@dataclass(frozen=True, eq=False)
class Codes:
    """The active features of some tokens: a sparse matrix (tokens, features) in CSR form.

    Token t has the features indices[indptr[t] : indptr[t + 1]], whose numbers ascend, with the
    values in `data` at the same places. indptr: int64 (tokens + 1,), beginning with 0; indices:
    int32; data: float32 (or bfloat16, on its way to a file). error: float32 (tokens,), the squared
    Euclidean norm of what the features that are kept do not reconstruct. norm: float32 (tokens,),
    that of what is reconstructed. features: how many the autoencoder has.
    active: int64 (tokens,), how many features are active, which may be more than are kept; None for
    codes that were stored, of which this is not known for each token.
    """

    indptr: Any
    indices: Any
    data: Any
    error: Any
    norm: Any
    features: int
    active: np.ndarray | None = None

    @classmethod
    def of(cls, records: np.ndarray, features: int, dtype: Any = np.float32) -> "Codes":
        """Returns the codes that records hold, int32 (tokens, 3 + 2 * most). dtype: of values."""
        most = (records.shape[1] - HEAD) // 2
        active, numbers = records[:, 0].astype(np.int64), records.view(np.float32)
        kept = np.arange(most) < active[:, None]
        indptr = np.cumsum([0, *np.minimum(active, most)], dtype=np.int64)
        values = numbers[:, HEAD + most :][kept].astype(dtype, copy=False)
        ids = records[:, HEAD : HEAD + most][kept]
        error = numbers[:, 1]
        norm = numbers[:, 2]
        return cls(indptr, ids, values, error.copy(), norm.copy(), features, active)

    @classmethod
    def concatenate(cls, parts: Sequence["Codes"]) -> "Codes":
        """Returns the codes of the tokens of all parts, which have the same features.

        A single part is returned as it is, without a copy.
        """
        if len(parts) == 1:
            return parts[0]
        first_entries = np.cumsum([0, *(len(part.indices) for part in parts)])
        ends = [part.indptr[1:] + first for part, first in zip(parts, first_entries, strict=False)]
        return cls(
            indptr=np.concatenate([np.zeros(1, np.int64), *ends]),
            indices=np.concatenate([part.indices for part in parts]),
            data=np.concatenate([part.data for part in parts]),
            error=np.concatenate([part.error for part in parts]),
            norm=np.concatenate([part.norm for part in parts]),
            features=parts[0].features,
        )

    def records(self, most: int) -> np.ndarray:
        """Returns the codes as records; no token may have more than `most` features."""
        counts = np.diff(self.indptr)
        records = np.zeros((len(counts), record_width(most)), np.int32)
        numbers, kept = records.view(np.float32), np.arange(most) < counts[:, None]
        records[:, 0], numbers[:, 1], numbers[:, 2] = counts, self.error, self.norm
        records[:, HEAD : HEAD + most][kept] = self.indices
        numbers[:, HEAD + most :][kept] = self.data
        return records

    def __len__(self) -> int:
        return len(self.error)

    def __getitem__(self, tokens: Any) -> "Codes":
        """Returns the codes of some tokens of NumPy arrays: of a slice, or of an array of numbers
        or of bool."""
        counts = np.diff(self.indptr)[tokens]
        indptr = np.cumsum([0, *counts], dtype=np.int64)
        at = np.arange(indptr[-1]) + np.repeat(self.indptr[:-1][tokens] - indptr[:-1], counts)
        arrays = self.indices[at], self.data[at], self.error[tokens], self.norm[tokens]
        return Codes(indptr, *arrays, features=self.features)

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, field).nbytes for field in ARRAYS.values())

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.data.dtype

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.features

    def map(self, convert: Callable[[Any], Any]) -> "Codes":
        """Returns `convert` applied to every array."""
        arrays = {field: convert(getattr(self, field)) for field in ARRAYS.values()}
        return replace(self, **arrays, active=None)

    def to_scipy(self) -> Any:
        """Returns a scipy.sparse.csr_array (tokens, features) in the same memory."""
        from scipy.sparse import csr_array

        found = self.map(np.asarray)
        return csr_array((found.data, found.indices, found.indptr), shape=self.shape)

    def to_torch(self) -> Any:
        """Returns a sparse CSR tensor of PyTorch (tokens, features), on the device of the batch."""
        import torch

        found = self.map(torch.as_tensor)
        arrays = found.indptr, found.indices.to(found.indptr.dtype), found.data
        return torch.sparse_csr_tensor(*arrays, self.shape, check_invariants=False)  # they hold
