"""Codes: the active features of an autoencoder for each token, as sparse rows.

Files store codes as `Codes`, and readers return them so: a token has one entry per active feature.
On devices, and where batches are shuffled, all tokens need rows of the same width. There the codes
of a token are a "record": a row of int32 that contains, in this order,

  the number of active features, which may be larger than `most`,
  the bits of the squared error and of the norm, float32 (see `Codes`),
  the ids of up to `most` features, ascending, and
  the bits of the values of these features, float32.

If a token has fewer active features than `most`, the remaining ids and values are undefined.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

CODES = ".codes"  # the suffix of the hook's name
HEAD = 3  # the length of the part of a record before the ids of the features
# The name of each array in a file -> the field of Codes. At a HOOK: HOOK.codes.ids and so on.
ARRAYS = {"ids": "indices", "values": "data", "offsets": "indptr", "error": "error", "norm": "norm"}


def record_width(most: int) -> int:
    """Returns the length of a record in units of int32.

    Args:
        most: The largest number of features that are kept of a token.
    """
    return HEAD + 2 * most


def value_dtype(activations: Any) -> np.dtype:
    """Returns the dtype in which files store the values of features.

    Args:
        activations: The dtype of the run's activations, or encodings.FLOAT8.
    """
    narrow = str(activations) == "bfloat16"
    return np.dtype(ml_dtypes.bfloat16 if narrow else np.float32)


def code_bytes(most: int, activations: Any) -> int:
    """Returns the number of bytes stored of a token: its offset, error, norm and features.

    Args:
        most: The number of features that are stored of the token.
        activations: The dtype of the run's activations, or encodings.FLOAT8.
    """
    return 8 + 4 + 4 + most * (4 + value_dtype(activations).itemsize)


@dataclass(frozen=True, eq=False)
class Codes:
    """The active features of some tokens: a sparse matrix (tokens, features) in CSR form.

    Token t has the features indices[indptr[t] : indptr[t + 1]], with the values
    data[indptr[t] : indptr[t + 1]]. The arrays are NumPy arrays, or arrays of JAX or PyTorch after
    `map`.

    Attributes:
        indptr: The index of each token's first entry, then the number of all entries, int64
            (tokens + 1,).
        indices: The ids of the features, int32 (entries,), ascending for each token.
        data: The values of the features, float32 (entries,), or bfloat16 on the way to a file.
        error: The squared Euclidean norm of the activation minus its reconstruction from the
            features that are kept, float32 (tokens,).
        norm: The Euclidean norm of the activation that is reconstructed, float32 (tokens,).
        features: The number of all features of the autoencoder.
        active: The number of active features, which may be larger than the number of features
            that are kept, int64 (tokens,). None for codes that were read from a file, because
            files do not store it.
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
        """Returns the codes that records contain.

        Args:
            records: The records, int32 (tokens, 3 + 2 * most).
            features: The number of all features of the autoencoder.
            dtype: The dtype of the values in the returned codes.
        """
        most = (records.shape[1] - HEAD) // 2
        active = records[:, 0].astype(np.int64)
        floats = records.view(np.float32)
        kept = np.arange(most) < active[:, None]
        return cls(
            indptr=np.cumsum([0, *np.minimum(active, most)], dtype=np.int64),
            indices=records[:, HEAD : HEAD + most][kept],
            data=floats[:, HEAD + most :][kept].astype(dtype, copy=False),
            error=floats[:, 1].copy(),
            norm=floats[:, 2].copy(),
            features=features,
            active=active,
        )

    @classmethod
    def concatenate(cls, parts: Sequence["Codes"]) -> "Codes":
        """Returns the codes of the tokens of all parts, in order.

        Args:
            parts: At least one object of Codes, all of the same autoencoder. A single part is
                returned as it is, without a copy.
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
            most: The number of features in a record. No token may have more.
        """
        counts = np.diff(self.indptr)
        records = np.zeros((len(counts), record_width(most)), np.int32)
        floats = records.view(np.float32)
        kept = np.arange(most) < counts[:, None]
        records[:, 0] = counts
        floats[:, 1] = self.error
        floats[:, 2] = self.norm
        records[:, HEAD : HEAD + most][kept] = self.indices
        floats[:, HEAD + most :][kept] = self.data
        return records

    def __len__(self) -> int:
        return len(self.error)

    def __getitem__(self, tokens: Any) -> "Codes":
        """Returns the codes of some of the tokens. The arrays must be NumPy arrays.

        Args:
            tokens: A slice, a mask or an array of indices of tokens.
        """
        counts = np.diff(self.indptr)[tokens]
        indptr = np.cumsum([0, *counts], dtype=np.int64)
        shifts = self.indptr[:-1][tokens] - indptr[:-1]
        entries = np.arange(indptr[-1]) + np.repeat(shifts, counts)
        return Codes(
            indptr=indptr,
            indices=self.indices[entries],
            data=self.data[entries],
            error=self.error[tokens],
            norm=self.norm[tokens],
            features=self.features,
        )

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays, without `active`."""
        return sum(getattr(self, field).nbytes for field in ARRAYS.values())

    @property
    def dtype(self) -> Any:
        """The dtype of the values."""
        return self.data.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """The number of tokens and the number of all features of the autoencoder."""
        return len(self), self.features

    def map(self, convert: Callable[[Any], Any]) -> "Codes":
        """Returns the codes with converted arrays, without `active`.

        Args:
            convert: A function that takes an array and returns an array.
        """
        arrays = {field: convert(getattr(self, field)) for field in ARRAYS.values()}
        return replace(self, **arrays, active=None)

    def to_scipy(self) -> Any:
        """Returns a scipy.sparse.csr_array (tokens, features) in the same memory."""
        from scipy.sparse import csr_array

        arrays = self.map(np.asarray)
        return csr_array((arrays.data, arrays.indices, arrays.indptr), shape=self.shape)

    def to_torch(self) -> Any:
        """Returns a sparse CSR tensor of PyTorch (tokens, features) on the device of the arrays."""
        import torch

        tensors = self.map(torch.as_tensor)
        return torch.sparse_csr_tensor(
            tensors.indptr,
            tensors.indices.to(tensors.indptr.dtype),
            tensors.data,
            self.shape,
            check_invariants=False,  # saves time; the arrays are valid CSR by construction
        )


def map_arrays(activations: Any, convert: Callable[[Any], Any]) -> Any:
    """Converts the array, or the arrays of the codes, of some tokens at a hook.

    Args:
        activations: An array, or Codes.
        convert: A function that takes an array and returns an array.

    Returns:
        The converted array, or Codes of converted arrays.
    """
    if isinstance(activations, Codes):
        return activations.map(convert)
    return convert(activations)
