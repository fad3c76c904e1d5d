"""Defines codes: the active features of an autoencoder for each token, with their values.

There are two representations. Files contain sparse matrices, which readers return as `Codes`: each
token has one entry per active feature. On devices, and where batches are shuffled, all tokens need
rows of the same width. There, the codes of a token are a "record": a row of int32 numbers with room
for K features. It contains, in this order,

  the number of active features, which may be larger than K,
  the bits of the squared error and the bits of the norm, both float32 (see `Codes`),
  K ids of features, ascending, and
  the bits of the K values of these features, float32.

If a token has fewer than K active features, the remaining ids and values are undefined.
model/encode.py computes records, and store/stored_hook.py stores codes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

# The suffix that the name of a hook of codes adds to the name of the encoded hook.
CODES = ".codes"
# The index of the first feature's id in a record, after the three numbers that describe the token.
RECORD_IDS = 3
# Last part of an array's name in a file -> field of `Codes`. For example, the array HOOK.codes.ids
# contains `indices`.
ARRAYS = {"ids": "indices", "values": "data", "offsets": "indptr", "error": "error", "norm": "norm"}


def record_width(num_features: int) -> int:
    """Returns the number of int32 numbers in a record, which contains the codes of one token.

    The docstring of this module explains records.

    Args:
        num_features: K, the number of features for which the record has room.
    """
    return RECORD_IDS + 2 * num_features


def value_dtype(activation_dtype: Any) -> np.dtype:
    """Returns the dtype in which files store the values of an autoencoder's active features.

    Args:
        activation_dtype: The dtype of the run's activations, or `encodings.FLOAT8`.
    """
    is_bfloat16 = str(activation_dtype) == "bfloat16"
    return np.dtype(ml_dtypes.bfloat16 if is_bfloat16 else np.float32)


def code_bytes(num_features: int, activation_dtype: Any) -> int:
    """Returns the number of bytes that the codes of a token take in a file.

    A token takes 8 bytes for the index of its first feature among the features of all tokens, and 4
    bytes each for its error and its norm. A feature takes 4 bytes for its id, and the bytes of its
    value.

    Args:
        num_features: The number of features that the file contains for the token.
        activation_dtype: The dtype of the run's activations, or `encodings.FLOAT8`.
    """
    return 8 + 4 + 4 + num_features * (4 + value_dtype(activation_dtype).itemsize)


@dataclass(frozen=True, eq=False)
class Codes:
    """The active features of some tokens: a sparse matrix (tokens, features) in CSR format.

    Token t has the features indices[indptr[t] : indptr[t + 1]], with the values
    data[indptr[t] : indptr[t + 1]]. The arrays are NumPy arrays, unless `map` has converted them
    to arrays of JAX or PyTorch.

    Attributes:
        indptr: The index in `indices` and `data` of each token's first entry, followed by the
            number of all entries, int64 (tokens + 1,).
        indices: The ids of the features, int32 (entries,), ascending for each token.
        data: The values of the features, float32 (entries,). They may be bfloat16 before they are
            written to a file.
        error: For each token, the squared Euclidean norm of the difference between the activation
            and its reconstruction from the stored features, float32 (tokens,).
        norm: The Euclidean norm of the activation that the autoencoder reconstructs, float32
            (tokens,).
        features: The number of all features of the autoencoder.
        active: The number of active features of each token, int64 (tokens,), which may be larger
            than the number of its stored features. None for codes that were read from a file,
            because files do not contain it.
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
            records: The records of the tokens, int32 (tokens, 3 + 2 * K). The docstring of this
                module explains them.
            features: The number of all features of the autoencoder.
            dtype: The dtype of the values in the returned codes.
        """
        num_record_features = (records.shape[1] - RECORD_IDS) // 2
        values_start = RECORD_IDS + num_record_features
        active_feature_counts_of_tokens = records[:, 0].astype(np.int64)
        records_as_float32 = records.view(np.float32)
        # Mask (tokens, num_record_features) of the slots in the tokens' records that contain an
        # active feature. The last slots of a record are empty if the token has fewer features.
        active_slot_mask = np.arange(num_record_features) < active_feature_counts_of_tokens[:, None]
        return cls(
            indptr=np.cumsum(
                [0, *np.minimum(active_feature_counts_of_tokens, num_record_features)],
                dtype=np.int64,
            ),
            indices=records[:, RECORD_IDS:values_start][active_slot_mask],
            data=records_as_float32[:, values_start:][active_slot_mask].astype(dtype, copy=False),
            error=records_as_float32[:, 1].copy(),
            norm=records_as_float32[:, 2].copy(),
            features=features,
            active=active_feature_counts_of_tokens,
        )

    @classmethod
    def concatenate(cls, codes_of_parts: Sequence["Codes"]) -> "Codes":
        """Joins several `Codes` into one, which contains all of their tokens in order.

        Args:
            codes_of_parts: At least one object of `Codes`, all of the same autoencoder. A single
                object is returned as it is, without a copy.
        """
        if len(codes_of_parts) == 1:
            return codes_of_parts[0]
        indptr_parts = [np.zeros(1, np.int64)]
        num_entries_before_part = 0
        for part_codes in codes_of_parts:
            indptr_parts.append(part_codes.indptr[1:] + num_entries_before_part)
            num_entries_before_part += len(part_codes.indices)
        return cls(
            indptr=np.concatenate(indptr_parts),
            indices=np.concatenate([part_codes.indices for part_codes in codes_of_parts]),
            data=np.concatenate([part_codes.data for part_codes in codes_of_parts]),
            error=np.concatenate([part_codes.error for part_codes in codes_of_parts]),
            norm=np.concatenate([part_codes.norm for part_codes in codes_of_parts]),
            features=codes_of_parts[0].features,
        )

    def records(self, record_features: int) -> np.ndarray:
        """Returns the codes as records, int32 (tokens, 3 + 2 * K).

        The docstring of this module explains records.

        Args:
            record_features: K, the number of features for which a record has room. No token may
                have more features.
        """
        feature_counts_of_tokens = np.diff(self.indptr)
        values_start = RECORD_IDS + record_features
        records = np.zeros((len(feature_counts_of_tokens), record_width(record_features)), np.int32)
        records_as_float32 = records.view(np.float32)
        # Mask (tokens, num_record_features) of the slots in the tokens' records that contain an
        # active feature. The last slots of a record are empty if the token has fewer features.
        active_slot_mask = np.arange(record_features) < feature_counts_of_tokens[:, None]
        records[:, 0] = feature_counts_of_tokens
        records_as_float32[:, 1] = self.error
        records_as_float32[:, 2] = self.norm
        records[:, RECORD_IDS:values_start][active_slot_mask] = self.indices
        records_as_float32[:, values_start:][active_slot_mask] = self.data
        return records

    def __len__(self) -> int:
        return len(self.error)

    def __getitem__(self, tokens: Any) -> "Codes":
        """Returns the codes of some of the tokens.

        The arrays of this object must be NumPy arrays.

        Args:
            tokens: A slice, a mask or an array of indices of tokens.
        """
        feature_counts_of_tokens = np.diff(self.indptr)[tokens]
        indptr = np.cumsum([0, *feature_counts_of_tokens], dtype=np.int64)
        # The number that is added to an index in the new `indices` and `data` to get the index in
        # the present arrays. It is the same for all entries of a token, which are consecutive.
        entry_shifts_of_tokens = self.indptr[:-1][tokens] - indptr[:-1]
        entry_indices = np.arange(indptr[-1]) + np.repeat(
            entry_shifts_of_tokens, feature_counts_of_tokens
        )
        return Codes(
            indptr=indptr,
            indices=self.indices[entry_indices],
            data=self.data[entry_indices],
            error=self.error[tokens],
            norm=self.norm[tokens],
            features=self.features,
        )

    @property
    def nbytes(self) -> int:
        """The size of all arrays except `active`, in bytes."""
        return sum(getattr(self, field_name).nbytes for field_name in ARRAYS.values())

    @property
    def dtype(self) -> Any:
        """The dtype of the features' values, which are in `data`."""
        return self.data.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """A tuple of the number of tokens and the number of all features of the autoencoder."""
        return len(self), self.features

    def map(self, convert: Callable[[Any], Any]) -> "Codes":
        """Returns the codes with each array converted, except `active`, which becomes None.

        Args:
            convert: A function that takes an array and returns an array.
        """
        array_by_field_name = {
            field_name: convert(getattr(self, field_name)) for field_name in ARRAYS.values()
        }
        return replace(self, **array_by_field_name, active=None)

    def to_scipy(self) -> Any:
        """Returns the values as a scipy.sparse.csr_array, (tokens, features).

        It uses the memory of the arrays of this object.
        """
        from scipy.sparse import csr_array

        numpy_codes = self.map(np.asarray)
        return csr_array(
            (numpy_codes.data, numpy_codes.indices, numpy_codes.indptr), shape=self.shape
        )

    def to_torch(self) -> Any:
        """Returns the values as a sparse CSR tensor of PyTorch, (tokens, features).

        The tensor is on the device of the arrays, which is the CPU for NumPy arrays.
        """
        import torch

        torch_codes = self.map(torch.as_tensor)
        return torch.sparse_csr_tensor(
            torch_codes.indptr,
            torch_codes.indices.to(torch_codes.indptr.dtype),
            torch_codes.data,
            self.shape,
            # The arrays are valid CSR arrays by construction, and checking them takes time.
            check_invariants=False,
        )


def map_arrays(activations: Any, convert: Callable[[Any], Any]) -> Any:
    """Converts the activations of some tokens at a hook to arrays of another library or type.

    Args:
        activations: An array, or `Codes` if the hook has codes.
        convert: A function that takes an array and returns an array.

    Returns:
        The converted array, or `Codes` with converted arrays.
    """
    if isinstance(activations, Codes):
        return activations.map(convert)
    return convert(activations)
