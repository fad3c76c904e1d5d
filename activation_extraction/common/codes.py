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
OF_A_TOKEN = 16  # bytes that are stored of a token beside its features: offset, error and norm
# What the arrays of the codes at a HOOK are called in files: HOOK.codes.ids and so on.
ARRAYS = {"ids": "indices", "values": "data", "offsets": "indptr", "error": "error", "norm": "norm"}
VALUE_DTYPES = np.dtype(np.float32), np.dtype(ml_dtypes.bfloat16)


def record_width(most: int) -> int:
    """Returns how many numbers the record of a token has that keeps `most` features."""
    return HEAD + 2 * most


def value_dtype(activations: Any) -> np.dtype:
    """Returns the dtype in which values are stored. activations: that of the run's activations."""
    return VALUE_DTYPES[str(activations) == "bfloat16"]


def code_bytes(most: int, activations: Any) -> int:
    """Returns how many bytes are stored of a token with `most` active features. activations: as for
    `value_dtype`."""
    return OF_A_TOKEN + most * (4 + value_dtype(activations).itemsize)


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
        active = records[:, 0]
        kept = np.arange(most) < active[:, None]
        error, norm = (_floats(records[:, column]) for column in (1, 2))
        values = _floats(records[:, HEAD + most :][kept]).astype(dtype, copy=False)
        indptr = np.cumsum([0, *np.minimum(active, most)], dtype=np.int64)
        ids = records[:, HEAD : HEAD + most][kept]
        return cls(indptr, ids, values, error, norm, features, active.astype(np.int64))

    def records(self, most: int) -> np.ndarray:
        """Returns the codes as records; no token may have more than `most` features."""
        counts = np.diff(self.indptr)
        records = np.zeros((len(counts), record_width(most)), np.int32)
        records[:, 0] = counts
        records[:, 1], records[:, 2] = (x.view(np.int32) for x in (self.error, self.norm))
        kept = np.arange(most) < counts[:, None]
        records[:, HEAD : HEAD + most][kept] = self.indices
        records[:, HEAD + most :][kept] = self.data.astype(np.float32, copy=False).view(np.int32)
        return records

    def __len__(self) -> int:
        return len(self.error)

    def __getitem__(self, tokens: Any) -> "Codes":
        """Returns the codes of some tokens: of a slice, or of an array of numbers or of bool."""
        if isinstance(tokens, slice):
            numbers = np.arange(*tokens.indices(len(self)))
        elif (numbers := np.arange(len(self))[tokens]).ndim != 1:
            raise TypeError("codes are those of several tokens: give a slice or an array")
        tensors = hasattr(self.data, "is_pinned")
        begins = self.indptr.cpu().numpy() if tensors else np.asarray(self.indptr)
        counts = begins[numbers + 1] - begins[numbers]
        indptr: Any = np.cumsum([0, *counts], dtype=np.int64)
        at = np.arange(indptr[-1]) + np.repeat(begins[numbers] - indptr[:-1], counts)
        arrays = {name: getattr(self, name)[at] for name in ("indices", "data")}
        arrays |= {name: getattr(self, name)[numbers] for name in ("error", "norm")}
        if tensors:
            import torch

            indptr = torch.as_tensor(indptr, device=self.data.device)
        active = None if self.active is None else self.active[numbers]
        return replace(self, indptr=indptr, active=active, **arrays)

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

        found = self if hasattr(self.data, "is_pinned") else self.map(torch.as_tensor)
        indptr, indices = found.indptr.to(torch.int64), found.indices.to(torch.int64)
        arrays = indptr, indices, found.data
        return torch.sparse_csr_tensor(*arrays, self.shape, check_invariants=False)  # they hold


def concatenated_values(parts: Sequence[Any]) -> Any:
    """Returns the values of the tokens of all parts: Codes or arrays (tokens, width), at least one.
    A single one is not copied."""
    if len(parts) == 1:
        return parts[0]
    if not isinstance(parts[0], Codes):
        return np.concatenate(parts)
    begins = np.cumsum([0, *(len(part.indices) for part in parts)])
    ends = [part.indptr[1:] + begin for part, begin in zip(parts, begins, strict=False)]
    names = "indices", "data", "error", "norm", *(["active"] * (parts[0].active is not None))
    arrays: dict[str, Any] = {
        name: np.concatenate([getattr(part, name) for part in parts]) for name in names
    }
    return replace(parts[0], indptr=np.concatenate([np.zeros(1, np.int64), *ends]), **arrays)


def _floats(bits: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bits).view(np.float32)
