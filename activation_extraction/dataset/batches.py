"""Batches of tokens: an iterator with an exact state, which can be copied to other processes.

Batches are shuffled in bounded memory by windows of tokens out of many shards (windows.py).
"""

import hashlib
import json
import mmap
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing.context import get_spawning_popen
from typing import Any, TypeVar

from activation_extraction.common.log import log
from activation_extraction.dataset.token_batch import TokenBatch, TokenPair
from activation_extraction.dataset.token_source import Read, TokenSource
from activation_extraction.dataset.windows import Position, Window, Windows, cut, share, shuffled
from activation_extraction.store.shard_reader import IN_FLIGHT

ALONE = 0, 1  # the share of a process without a DataLoader: the first of one
LARGEST_READ = 8 * 2**20  # bytes of a chunk: in a bucket of each hook, else of all
LEAST_READ = 2 * 2**20  # in a bucket, of each hook: whole MiB are read
ORDERED_READ = 14 * 2**20  # in a bucket, in order: two chunks that meet read the same MiB twice
CHUNKS_IN_BUFFER, LEAST_CHUNKS = 32, 8  # so that tokens are mixed well, and at least
ORDERED_CHUNKS = 4  # in a buffer whose tokens stay in order
T = TypeVar("T", TokenBatch, TokenPair)


class Batches(Iterator[T]):
    """Batches of tokens; the last one may be shorter. `state` and `restore` are exact.

    They are of type TokenBatch, or pairs of these where two runs are read side by side. It goes
    over the data once. A copy in another process starts where this one stands; in a worker of a
    DataLoader, which reads a share of its own, only a copy that stands at the start can be read.
    Asking for a batch raises ValueError if no token of the run passes the filters.
    """

    def __init__(
        self,
        sources: Sequence[TokenSource],
        form: Callable[[Sequence[TokenBatch]], T],
        reader: Callable[[], Read],
    ) -> None:
        """sources: of each run. form: makes one result of a batch of each. reader: returns what
        reads a chunk of the first run, whose options decide the order."""
        self._sources, self._reader = sources, reader
        self._form: Callable[[Sequence[TokenBatch]], T] = form
        self.options = sources[0].options
        self._position = Position()
        self._loader_worker: tuple[int, int] | None = None  # whose share the position is in
        self._looped = False  # whether a loop over tensors has begun here since `restore`
        self._windows: Generator[Window, None, None] | None = None
        self._window: Window | None = None
        # A byte of memory that forked workers share, from `torch` on: not 0 if workers of a
        # DataLoader have read batches since `restore`.
        self._read_by_workers: mmap.mmap | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_windows": None, "_window": None, "_read_by_workers": None}

    def state(self) -> dict[str, Any]:
        """Returns where the iteration stands, as plain JSON values.

        Raises:
            ValueError: Workers of a DataLoader have read these batches since they were made or
                restored: where each worker stands is not known here.
        """
        if _loader_worker() is None and self._read_by_workers and self._read_by_workers[0]:
            raise ValueError(
                "workers of a DataLoader have read these batches, and only they know where they "
                "stand: save the state_dict() of torchdata's StatefulDataLoader, or read with "
                "num_workers=0"
            )
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
        self._position = position
        self._loader_worker = _loader_worker()
        self._looped = False
        if self._read_by_workers is not None and _loader_worker() is None:
            self._read_by_workers[0] = 0

    def _setting(self) -> dict[str, Any]:
        """Everything on which the order of the tokens depends."""
        part, parts = _loader_worker() or ALONE
        each = "\n".join(source.fingerprint for source in self._sources)
        data = hashlib.sha256(each.encode()).hexdigest()
        setting, *others = (source.options.setting for source in self._sources)
        setting = {"data": data, **setting, "others": others, "part": part, "parts": parts}
        plain: dict[str, Any] = json.loads(json.dumps(setting))
        return plain

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
        bucket `multiprocessing_context="spawn"`, if it has workers. With any other size, it raises
        TypeError, because it would make batches of batches.

        Each worker of a DataLoader reads a share of its own, and moves only its own copy of the
        batches. So a loop with workers raises ValueError if the batches were restored, and `state`
        raises ValueError once workers have read. The result has `state_dict` and
        `load_state_dict`, with which torchdata's StatefulDataLoader continues its workers, if there
        are equally many.
        """
        from torch.utils.data import IterableDataset

        if self._read_by_workers is None:
            self._read_by_workers = mmap.mmap(-1, 1)
        read_by_workers = self._read_by_workers

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
                if get_spawning_popen() is not None:
                    read_by_workers[0] = 1  # the process that is being started shares no memory
                return Batches.torch, (self._batches,)

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
            if worker is not None and self._read_by_workers is not None:
                self._read_by_workers[0] = 1
        if self._window is None:
            self._window = self._next_window()
        window, taken = self._window, self._position.taken
        stop = min(taken + self.options.size, window.tokens)
        runs = zip(self._sources, window.runs, strict=True)
        batch = self._form([source.take(blocks, taken, stop) for source, blocks in runs])
        if stop < window.tokens:
            self._position = replace(self._position, taken=stop)
        else:
            self._window, self._position = None, window.end
        return batch

    def _next_window(self) -> Window:
        """Returns the window at the position. Raises StopIteration after the last one."""
        if self._windows is None:
            self._windows = self._share().beginning(self._position)
        try:
            return next(self._windows)
        except StopIteration:
            self.close()
            self._check_selection()
            raise
        except BaseException:
            self.close()  # so that the next call tries again
            raise

    def _share(self) -> Windows:
        """The windows of what this process reads.

        Workers share chunks of the first run, or its whole pickles, which they then read in chunks
        as well.
        """
        sources = self._sources
        options = self.options
        seed = self.options.shuffle
        hooks = max(sum(len(source.options.hooks) for source in sources), 1)
        row = max(sum(source.row_bytes for source in sources), 1)
        local = all(source.shards.local for source in sources)
        by_ranges = all(source.shards.by_ranges for source in sources)
        largest, least = LARGEST_READ, 1
        if not local:
            largest = hooks * (ORDERED_READ if seed is None else LARGEST_READ)
            least = min(LEAST_READ * hooks // row, options.buffer // LEAST_CHUNKS)
        many = ORDERED_CHUNKS if seed is None else CHUNKS_IN_BUFFER
        size = max(min(largest // row, options.buffer // many), least, 1)
        chunks, ahead = sources[0].chunks(), 1
        if by_ranges:
            chunks = [piece for each in chunks for piece in cut(each, size)]
        chunks = share(shuffled(chunks, seed), options.worker, options.workers)
        chunks = share(chunks, *(self._loader_worker or ALONE))
        if not by_ranges:
            parts = (shuffled(cut(each, size), seed, each.shard, each.start) for each in chunks)
            chunks = [piece for part in parts for piece in part]
        elif not local:
            most_bytes = IN_FLIGHT * LARGEST_READ
            ahead = max(min(IN_FLIGHT // hooks, most_bytes // (size * row)), 2)
        most = min(options.buffer // 2 // options.size * options.size, sum(map(len, chunks)))
        return Windows(chunks, self._reader(), ahead, most, seed)

    def _check_selection(self) -> None:
        """Raises ValueError at the end of the data if it had no batch because of filters.

        A worker that has no batch logs it: the others may have some.
        """
        filters = dict.fromkeys(text for s in self._sources for text in s.options.filters)
        if self._position != Position() or not filters:
            return
        told = f"no token passes these filters: {', '.join(filters)}"
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
