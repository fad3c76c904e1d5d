"""Batches of tokens: an iterator with an exact state, which can be copied to other processes."""

import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

from activation_extraction.dataset.token_batch import TokenBatch
from activation_extraction.dataset.token_source import (
    BatchOptions,
    Position,
    TokenSource,
    Window,
    windows_of,
)


class Batches(Iterator[TokenBatch]):
    """Batches of tokens; the last one may be shorter. `state` and `restore` are exact.

    It goes over the data once. A copy in another process starts where this one stands.
    """

    def __init__(self, source: TokenSource, options: BatchOptions) -> None:
        self._source = source
        self._options = options
        self._position = Position()
        self._forget()

    def _forget(self) -> None:
        self._windows: Generator[Window, None, None] | None = None
        self._window: Window | None = None

    def __getstate__(self) -> tuple[TokenSource, BatchOptions, Position]:
        return self._source, self._options, self._position

    def __setstate__(self, state: tuple[TokenSource, BatchOptions, Position]) -> None:
        self._source, self._options, self._position = state
        self._forget()

    def state(self) -> dict[str, Any]:
        """Where the iteration stands, as plain JSON values."""
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
        options = self._options.to_json()
        return {"data": self._source.fingerprint, **options, "part": part, "parts": parts}

    def again(self) -> "Batches":
        """The same batches from the start."""
        return Batches(self._source, self._options)

    def close(self) -> None:
        """Ends the reading ahead and frees the buffer."""
        if self._windows is not None:
            self._windows.close()
        self._forget()

    def torch(self) -> Any:
        """A PyTorch IterableDataset of the same batches as tensors, for a DataLoader or a loop.

        Give a DataLoader `batch_size=None`. Each of its workers reads its own share of the data.
        """
        from activation_extraction.dataset.torch_batches import TorchBatches

        return TorchBatches(self)

    def jax(self) -> Iterator[TokenBatch]:
        """The same batches as JAX arrays."""
        return (batch.jax() for batch in self)

    def __next__(self) -> TokenBatch:
        if self._window is None:
            self._window = self._next_window()
        window, taken = self._window, self._position.taken
        batch = window.batch(taken, taken + self._options.size, self._options.dtype)
        taken += len(batch)
        if taken < len(window.order):
            self._position = replace(self._position, taken=taken)
        else:
            self._window, self._position = None, window.end
        return batch

    def _next_window(self) -> Window:
        """The window at the position. Raises StopIteration after the last one."""
        options = self._options
        if self._windows is None:
            plan = self._source.plan(options, *_loader_worker())
            most = options.buffer // 2 // options.size * options.size
            self._windows = windows_of(plan, most, options.shuffle, self._position)
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
