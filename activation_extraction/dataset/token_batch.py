"""Tokens with their activations at several hooks: NumPy arrays, PyTorch tensors or JAX arrays."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from activation_extraction.dataset.hook_names import ByHook


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


def getters_of(batch: TokenBatch) -> list[Callable[[TokenBatch], np.ndarray]]:
    """What gets each of the arrays from a batch with the same hooks."""
    return [
        *map(itemgetter, batch.activations),
        *map(attrgetter, ("token_ids", "sample_idx", "position")),
    ]


def bits_of(values: np.ndarray) -> np.ndarray:
    """Two-byte numbers as integers: NumPy is slow with those that it does not know itself."""
    return values.view(np.uint16) if values.dtype.itemsize == 2 else values
