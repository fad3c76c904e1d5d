"""Codes: the active features of an autoencoder for each token, as sparse rows.

Files contain codes, and users read them, as `Codes`: a token has as many entries as it has active
features. On devices, and where batches are shuffled, all tokens need rows of one width. There the
codes of a token are a record of int32, which has in this order

  the number of active features, which may be more than are kept,
  the bits of the squared error and of the norm, float32 (see `Codes`),
  `most` numbers of features, ascending, and
  the bits of the values of these features, float32.

Where a token has fewer active features than `most`, the other numbers and values are undefined.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

CODES = ".codes"  # follows the name of a hook
HEAD = 3  # numbers of a record before the features
# What files call the arrays of Codes -> their fields. At a HOOK: HOOK.codes.ids and so on.
ARRAYS = {"ids": "indices", "values": "data", "offsets": "indptr", "error": "error", "norm": "norm"}


def record_width(most: int) -> int:
    """Returns how many numbers a record has.

    Args:
        most: How many features of a token are kept at most.
    """
    return HEAD + 2 * most


def value_dtype(activations: Any) -> np.dtype:
    """Returns the dtype in which files have the values of features.

    Args:
        activations: The dtype of the run's activations, or FLOAT8.
    """
    narrow = str(activations) == "bfloat16"
    return np.dtype(ml_dtypes.bfloat16 if narrow else np.float32)


def code_bytes(most: int, activations: Any) -> int:
    """Returns how many bytes of a token are stored: its offset, error, norm and features.

    Args:
        most: How many active features the token has.
        activations: The dtype of the run's activations, or FLOAT8.
    """
    return 8 + 4 + 4 + most * (4 + value_dtype(activations).itemsize)


@dataclass(frozen=True, eq=False)
class Codes:
    """The active features of some tokens: a sparse matrix (tokens, features) in CSR form.

    Token t has the features indices[indptr[t] : indptr[t + 1]], with the values in `data` at the
    same places. The arrays are NumPy's, or JAX's or PyTorch's after `map`.

    Attributes:
        indptr: The first entry of each token and the end of the last one, int64 (tokens + 1,).
        indices: The numbers of the features, int32 (entries,), ascending for each token.
        data: The values of the features, float32 (entries,), or bfloat16 on the way to a file.
        error: The squared Euclidean norm of what the features that are kept do not reconstruct,
            float32 (tokens,).
        norm: The Euclidean norm of what is reconstructed, float32 (tokens,).
        features: The number of all features of the autoencoder.
        active: The number of active features, which may be more than are kept, int64 (tokens,).
            None for codes that were stored, because files do not have it.
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
        """Returns the codes in records.

        Args:
            records: The records, int32 (tokens, 3 + 2 * most).
            features: The number of all features of the autoencoder.
            dtype: The dtype of the values in the result.
        """
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
        """Returns the codes as records, int32 (tokens, 3 + 2 * most).

        Args:
            most: The number of features in a record; no token may have more.
        """
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
        """Returns the codes of the tokens that a slice, a mask or an array of their numbers
        chooses. The arrays must be NumPy's."""
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

        arrays = self.map(np.asarray)
        return csr_array((arrays.data, arrays.indices, arrays.indptr), shape=self.shape)

    def to_torch(self) -> Any:
        """Returns a sparse CSR tensor of PyTorch (tokens, features), on the device of the batch."""
        import torch

        tensors = self.map(torch.as_tensor)
        return torch.sparse_csr_tensor(
            tensors.indptr,
            tensors.indices.to(tensors.indptr.dtype),
            tensors.data,
            self.shape,
            check_invariants=False,  # they hold
        )


def map_arrays(values: Any, convert: Callable[[Any], Any]) -> Any:
    """Returns the values of some tokens with `convert` applied to their arrays.

    Args:
        values: An array, or Codes.
        convert: A function of an array.
    """
    return values.map(convert) if isinstance(values, Codes) else convert(values)
