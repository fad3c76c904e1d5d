"""Batches of tokens: an iterator with an exact state, which can be copied to other processes.

Batches are shuffled in bounded memory by windows of tokens out of many shards (windows.py).
"""

import json
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from activation_extraction.dataset.token_batch import TokenBatch, TokenPair
from activation_extraction.dataset.token_source import BatchOptions
from activation_extraction.dataset.windows import Plan, Position, Window, Windows

T_co = TypeVar("T_co", TokenBatch, TokenPair, covariant=True)


class Source(Protocol[T_co]):
    """What Batches are made of: one run, or several that are read as one."""

    @property
    def fingerprint(self) -> str: ...
    def plan(self, options: BatchOptions, part: int, parts: int) -> Plan: ...
    def take(self, memory: tuple[TokenBatch, ...], rows: np.ndarray, options: BatchOptions) -> T_co:
        """Returns the tokens with these numbers as a batch of its own."""


class Batches(Iterator[T_co]):
    """Batches of tokens; the last one may be shorter. `state` and `restore` are exact.

    They are of type TokenBatch, or pairs of these where two runs are read side by side. It goes
    over the data once. A copy in another process starts where this one stands. `source` is what
    they are read from, and `options` are the arguments with which they were asked for.
    """

    def __init__(
        self, source: Source[T_co], options: BatchOptions, position: Position | None = None
    ) -> None:
        self.source: Source[T_co] = source
        self.options: BatchOptions = options
        self._position = position or Position()
        self._windows: Generator[Window, None, None] | None = None
        self._window: Window | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Batches, (self.source, self.options, self._position)

    def state(self) -> dict[str, Any]:
        """Returns where the iteration stands, as plain JSON values."""
        return {**self._setting(), **asdict(self._position)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues where `state` was taken.

        Raises ValueError when the state is of other data, or of batches with other arguments.
        """
        content = dict(state)
        for name, expected in self._setting().items():
            if (found := content.pop(name, None)) != expected:
                raise ValueError(
                    f"the state is of other batches: its {name} is {found!r}, not {expected!r}"
                )
        self.close()
        self._position = Position(**content)

    def _setting(self) -> dict[str, Any]:
        """Everything on which the order of the tokens depends."""
        part, parts = _loader_worker()
        options: dict[str, Any] = json.loads(json.dumps(asdict(self.options)))
        for each in (options, *(options["others"] or ())):
            del each["columns"]
        return {"data": self.source.fingerprint, **options, "part": part, "parts": parts}

    def again(self) -> "Batches[T_co]":
        """Returns the same batches from the start."""
        return Batches(self.source, self.options)

    def close(self) -> None:
        """Ends the reading ahead and frees the buffer."""
        if self._windows is not None:
            self._windows.close()
        self._windows = self._window = None

    def torch(self) -> Any:
        """Returns a PyTorch IterableDataset of the same batches as tensors, for a DataLoader or a
        loop.

        A loop in this process goes on where the batches stand. Give a DataLoader `batch_size=None`;
        each of its workers reads its own share of the data, from the start.
        """
        from torch.utils.data import IterableDataset, get_worker_info

        class TorchBatches(IterableDataset):
            def __init__(self, batches: Batches[Any]) -> None:
                self._batches = batches

            def __iter__(self) -> Iterator[Any]:
                own = self._batches if get_worker_info() is None else self._batches.again()
                return (batch.torch() for batch in own)

            def __reduce__(self) -> tuple[Any, ...]:  # such a class cannot be pickled by its name
                return Batches.torch, (self._batches,)

        return TorchBatches(self)

    def jax(self) -> Iterator[T_co]:
        """Returns the same batches as JAX arrays."""
        return (batch.jax() for batch in self)

    def __next__(self) -> T_co:
        if self._window is None:
            self._window = self._next_window()
        window, taken = self._window, self._position.taken
        rows = window.order[taken : taken + self.options.size]
        batch = self.source.take(window.memory, rows, self.options)
        taken += len(rows)
        if taken < len(window.order):
            self._position = replace(self._position, taken=taken)
        else:
            self._window, self._position = None, window.end
        return batch

    def _next_window(self) -> Window:
        """The window at the position. Raises StopIteration after the last one."""
        options = self.options
        if self._windows is None:
            plan = self.source.plan(options, *_loader_worker())
            most = options.buffer // 2 // options.size * options.size
            self._windows = Windows(plan, most, options.shuffle).beginning(self._position)
        try:
            return next(self._windows)
        except BaseException:
            self.close()  # so that the next call tries again
            raise


def _loader_worker() -> tuple[int, int]:
    """Number and count of PyTorch's DataLoader workers; (0, 1) outside of them."""
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    return (0, 1) if info is None else (info.id, info.num_workers)
