"""Batches of tokens: an iterator with an exact state, which can be copied to other processes."""

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

from activation_extraction.dataset.token_batch import TokenBatch
from activation_extraction.dataset.windows import Plan, Position, Window, read_ahead, windows_of


@dataclass(frozen=True)
class BatchOptions:
    """The arguments of `ActivationDataset.batches`, checked and complete."""

    size: int
    hooks: tuple[str, ...]
    shuffle: int | None
    buffer: int
    skip_first: int
    max_norm: Mapping[str, float]
    dtype: str | None
    worker: int
    workers: int

    def to_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))


class Source(Protocol):
    """What batches are made of."""

    @property
    def fingerprint(self) -> str:
        """The same only for the same data."""
        ...

    def plan(self, options: BatchOptions, part: int, parts: int) -> Plan: ...


class Batches(Iterator[TokenBatch]):
    """Batches of tokens; the last one may be shorter. `state` and `restore` are exact.

    It goes over the data once. A copy in another process starts where this one stands.
    """

    def __init__(self, source: Source, options: BatchOptions) -> None:
        self._source = source
        self._options = options
        self._position = Position()
        self._forget()

    def _forget(self) -> None:
        self._windows: Iterator[Window] | None = None
        self._window: Window | None = None

    def __getstate__(self) -> tuple[Source, BatchOptions, Position]:
        return self._source, self._options, self._position

    def __setstate__(self, state: tuple[Source, BatchOptions, Position]) -> None:
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
            self._windows.close()  # type: ignore[attr-defined]
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
        options = self._options
        if self._windows is None:
            plan = self._source.plan(options, *_loader_worker())
            batches = options.buffer // 2 // options.size
            windows = windows_of(plan, options.size, batches, options.shuffle, self._position)
            self._windows = read_ahead(windows)
        while self._window is None or self._position.taken >= self._window.tokens:
            self._next_window()
        taken = self._position.taken
        tokens = min(options.size, self._window.tokens - taken)
        self._position = replace(self._position, taken=taken + tokens)
        return self._window.next_batch(tokens, options.dtype)

    def _next_window(self) -> None:
        """Raises StopIteration after the last window."""
        assert self._windows is not None
        restored = self._position.taken if self._window is None else 0
        self._window = None  # before the next one is asked for, which needs its memory
        try:
            self._window = next(self._windows)
        except OSError:
            self._forget()  # so that the next call tries again
            raise
        self._window.skip(restored)
        self._position = replace(self._window.begin, taken=restored)


def _loader_worker() -> tuple[int, int]:
    """Number and count of PyTorch's DataLoader workers; (0, 1) outside of them."""
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    return (0, 1) if info is None else (info.id, info.num_workers)
