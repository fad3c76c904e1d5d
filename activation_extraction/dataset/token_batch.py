"""Tokens with their activations at several hooks: NumPy arrays, PyTorch tensors or JAX arrays."""

from collections.abc import Callable, Iterator, KeysView
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from activation_extraction.dataset.hook_names import ByHook

ALIGNMENT = 64  # bytes: JAX on CPUs shares an array's memory when it begins at a multiple of these


@dataclass(frozen=True)
class TokenBatch:
    """Some tokens; row t of every array belongs to the same token.

    activations: hook, by any of its names -> (size, width). token_ids, position: int32 (size,);
    the position counts from 0 within the sample. sample_idx: int64 (size,).
    """

    activations: ByHook[Any]
    token_ids: Any
    sample_idx: Any
    position: Any

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, hook: str) -> Any:
        return self.activations[hook]

    def __iter__(self) -> Iterator[str]:
        """The names of the hooks, as of a dict."""
        return iter(self.activations)

    def keys(self) -> KeysView[str]:
        """The names of the hooks."""
        return self.activations.keys()

    def to(self, device: Any) -> "TokenBatch":
        """The same as PyTorch tensors on a device."""
        tensors = self if hasattr(self.token_ids, "is_pinned") else self.map(np.array).torch()

        def move(tensor: Any) -> Any:
            return tensor.to(device)

        return tensors.map(move)

    @property
    def arrays(self) -> list[Any]:
        """The activations of every hook, and the three arrays that all hooks share."""
        return [*self.activations.values(), self.token_ids, self.sample_idx, self.position]

    def torch(self) -> "TokenBatch":
        """The same as PyTorch tensors, in the same memory."""
        return self.map(_to_torch)

    def jax(self) -> "TokenBatch":
        """The same as JAX arrays on JAX's default device; a CPU shares the memory.

        `sample_idx` stays a NumPy array: JAX would cut it to 32 bits.
        """
        import jax

        return replace(self.map(jax.device_put), sample_idx=self.sample_idx)

    def map(self, convert: Callable[[np.ndarray], Any]) -> "TokenBatch":
        """`convert` applied to every array."""
        return TokenBatch(
            self.activations.map(convert),
            convert(self.token_ids),
            convert(self.sample_idx),
            convert(self.position),
        )


def _to_torch(values: np.ndarray) -> Any:
    import torch

    if values.dtype.name == "bfloat16":  # NumPy and PyTorch do not know each other's
        return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(values)


def empty_batch(like: TokenBatch, size: int, dtype: str | None = None) -> TokenBatch:
    """A batch of `size` tokens, with any content. dtype: of the activations, by default as `like`.

    Its arrays lie in one block: many smaller ones would be given back to the system whenever a
    batch is freed, and the first use of memory takes longer than copying.
    """
    rows = like.map(lambda values: np.dtype((values.dtype, values.shape[1:])))
    if dtype is not None:
        found = like.activations.map(lambda values: np.dtype((dtype, values.shape[1:])))
        rows = replace(rows, activations=found)
    room = sum(size * row.itemsize + ALIGNMENT for row in rows.arrays)
    block, offset = np.empty(room, np.uint8), 0

    def place(row: Any) -> np.ndarray:
        nonlocal offset
        offset += -(block.ctypes.data + offset) % ALIGNMENT
        placed: np.ndarray = np.ndarray(size, row, block, offset)
        offset += placed.nbytes
        return placed

    return rows.map(place)


def copy_rows(source: TokenBatch, rows: np.ndarray, target: TokenBatch) -> None:
    """Copies the tokens with these numbers; `target` has room for them, and its own dtypes."""
    for values, found in zip(source.arrays, target.arrays, strict=True):
        # With mode="raise", NumPy would copy to `out` by way of other memory.
        if values.dtype == found.dtype:
            np.take(_bits_of(values), rows, axis=0, out=_bits_of(found), mode="clip")
        else:
            taken = np.take(_bits_of(values), rows, axis=0).view(values.dtype)
            np.copyto(found, taken, casting="unsafe")


def _bits_of(values: np.ndarray) -> np.ndarray:
    """Two-byte numbers as integers: NumPy is slow with those that it does not know itself."""
    return values.view(np.uint16) if values.dtype.itemsize == 2 else values
