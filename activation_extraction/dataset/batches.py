"""Batches of tokens: an iterator with an exact state, which can be copied to other processes.

Batches are shuffled in bounded memory by windows of tokens out of many shards (windows.py).
"""

import json
import sys
from collections.abc import Generator, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

from activation_extraction.common.log import log
from activation_extraction.dataset.alignment import AlignedSource
from activation_extraction.dataset.options import BatchOptions
from activation_extraction.dataset.token_batch import TokenBatch, TokenPair
from activation_extraction.dataset.windows import Position, Window

ALONE = 0, 1  # the share of a process without a DataLoader: the first of one
T = TypeVar("T", TokenBatch, TokenPair)


class Batches(Iterator[T]):
    """Batches of tokens; the last one may be shorter. `state` and `restore` are exact.

    They are of type TokenBatch, or pairs of these where two runs are read side by side. It goes
    over the data once. A copy in another process starts where this one stands; in a worker of a
    DataLoader, which reads a share of its own, only a copy that stands at the start can be read.
    Asking for a batch raises ValueError if no token of the run passes the filters.
    """

    def __init__(self, source: AlignedSource[T]) -> None:
        self.source: AlignedSource[T] = source
        self.options: BatchOptions = source.options
        self._position = Position()
        self._loader_worker: tuple[int, int] | None = None  # whose share the position is in
        self._looped = False  # whether a loop over tensors has begun here since `restore`
        self._windows: Generator[Window, None, None] | None = None
        self._window: Window | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_windows": None, "_window": None}

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
        self._begin(Position(**content))

    def _begin(self, position: Position) -> None:
        self.close()
        self._position, self._loader_worker, self._looped = position, _loader_worker(), False

    def _setting(self) -> dict[str, Any]:
        """Everything on which the order of the tokens depends."""
        part, parts = _loader_worker() or ALONE
        setting: dict[str, Any] = json.loads(json.dumps(self.source.setting))
        return {**setting, "part": part, "parts": parts}

    def close(self) -> None:
        """Ends the reading ahead and frees the buffer."""
        if self._windows is not None:
            self._windows.close()
        self._windows = self._window = None

    def torch(self) -> Any:
        """Returns a PyTorch IterableDataset of the same batches as tensors, for a DataLoader or a
        loop.

        The first loop goes on where the batches stand, and every later one begins anew, unless
        `restore` was called before it. Give a DataLoader `batch_size=None`, and for a run in a
        bucket `multiprocessing_context="spawn"`, if it has workers. Each of its workers
        reads its own share of the data, of which `state` and `restore` know nothing here, so a loop
        with workers raises ValueError after `restore`. The result has `state_dict` and
        `load_state_dict`, by which torchdata's StatefulDataLoader continues its workers, if there
        are equally many.
        """
        from torch.utils.data import IterableDataset
        from torch.utils.data._utils.collate import default_collate_fn_map

        class TorchBatches(IterableDataset):
            def __init__(self, batches: Batches[Any]) -> None:
                self._batches = batches

            def __iter__(self) -> Iterator[Any]:
                batches = self._batches
                if batches._looped:
                    batches._begin(Position())
                batches._looped = True
                return (batch.torch() for batch in batches)

            def state_dict(self) -> dict[str, Any]:
                return self._batches.state()

            def load_state_dict(self, state: Mapping[str, Any]) -> None:
                self._batches.restore(state)

            def __reduce__(self) -> tuple[Any, ...]:  # such a class cannot be pickled by its name
                return Batches.torch, (self._batches,)

        default_collate_fn_map[TokenBatch] = _refuse_to_collate
        return TorchBatches(self)

    def jax(self) -> Iterator[T]:
        """Returns the same batches as JAX arrays."""
        return (batch.jax() for batch in self)

    def __next__(self) -> T:
        if self._loader_worker != (worker := _loader_worker()):
            if self._position != Position():
                raise ValueError(
                    "these batches stand in the middle of the data, of which each worker of a "
                    "DataLoader reads a share of its own: continue with num_workers=0 or with "
                    "torchdata's StatefulDataLoader, or make new batches"
                )
            self.close()  # the threads of another process do not run here
            self._loader_worker = worker
        if self._window is None:
            self._window = self._next_window()
        window, taken = self._window, self._position.taken
        rows = window.order[taken : taken + self.options.size]
        batch = self.source.take(window.memory, rows)
        taken += len(rows)
        if taken < len(window.order):
            self._position = replace(self._position, taken=taken)
        else:
            self._window, self._position = None, window.end
        return batch

    def _next_window(self) -> Window:
        """Returns the window at the position. Raises StopIteration after the last one."""
        if self._windows is None:
            windows = self.source.windows(*(self._loader_worker or ALONE))
            self._windows = windows.beginning(self._position)
        try:
            return next(self._windows)
        except StopIteration:
            self.close()
            self._check_selection()
            raise
        except BaseException:
            self.close()  # so that the next call tries again
            raise

    def _check_selection(self) -> None:
        """Raises ValueError at the end of the data if it had no batch because of filters.

        A worker that has no batch logs it: the others may have some.
        """
        filters = self.source.filters
        if self._position != Position() or not filters:
            return
        told = f"no token passes these filters: {', '.join(dict.fromkeys(filters))}"
        part, parts = self._loader_worker or ALONE
        worker, workers = self.options.worker * parts + part, self.options.workers * parts
        if workers == 1:
            raise ValueError(told)
        log.warning("in the share of worker %d of %d, %s", worker, workers, told)


def _loader_worker() -> tuple[int, int] | None:
    """The number of this worker of a DataLoader of PyTorch, and of all; None outside of them."""
    data = sys.modules.get("torch.utils.data")
    info = data.get_worker_info() if data is not None else None
    return None if info is None else (info.id, info.num_workers)


def _refuse_to_collate(*_: Any, **__: Any) -> Any:
    raise TypeError("these are batches already: give the DataLoader batch_size=None")
