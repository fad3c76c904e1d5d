"""Batches: an iterator over batches of tokens, with an exact state that can be restored.

Batches cuts the data into chunks and orders them; token_source.py and paired.py read chunks, and
windows.py shuffles tokens in bounded memory. The iterator can be copied to other processes, and
divides the data among the workers of a PyTorch DataLoader.
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
from activation_extraction.dataset.windows import (
    Chunk,
    Position,
    Window,
    Windows,
    cut,
    share,
    shuffled,
)
from activation_extraction.store.shard_reader import IN_FLIGHT

ALONE = 0, 1  # number of this worker and of all workers in a process without a DataLoader
# Most bytes of a chunk: for each hook if a run is in a bucket, otherwise for all hooks together.
LARGEST_READ = 8 * 2**20
# Least bytes of a chunk for each hook if a run is in a bucket, because blocks of up to a MiB are
# read there.
LEAST_READ = 2 * 2**20
# Most bytes of a chunk for each hook if a run is in a bucket and tokens stay in order. Each chunk
# takes requests for its token ids and positions, too, so chunks that need not be mixed are larger.
ORDERED_READ = 14 * 2**20
CHUNKS_IN_BUFFER = 32  # least chunks in a shuffled buffer, so that tokens of many places are mixed
# Least chunks in the buffer if a run is in a bucket: LEAST_READ may allow fewer than 32 there.
LEAST_CHUNKS = 8
ORDERED_CHUNKS = 4  # least chunks in a buffer whose tokens stay in order
T = TypeVar("T", TokenBatch, TokenPair)


class Batches(Iterator[T]):
    """An iterator over batches of tokens, for one pass over the data.

    A batch is a TokenBatch, or a TokenPair if two runs are read side by side; the last one may have
    fewer tokens. A copy in another process continues where this object stands. In a worker of a
    DataLoader, which reads only a share of the data, a copy can be read only if it stands at the
    start.

    Args:
        sources: Sources of the tokens, one for each run. The options of the first source determine
            the order.
        form: Function that takes a list with a TokenBatch of each run, and returns the batch to
            yield: a TokenBatch or a TokenPair.
        reader: Function without arguments that returns a function of type Read. The returned
            function takes a chunk of the first run and returns a block of each run.

    Attributes:
        options: Options of the batches.

    Raises:
        ValueError: No token of the run passes the filters. `next` raises this.
        OSError: A shard is damaged. `next` raises this.
    """

    def __init__(
        self,
        sources: Sequence[TokenSource],
        form: Callable[[Sequence[TokenBatch]], T],
        reader: Callable[[], Read],
    ) -> None:
        self._sources = sources
        self._reader = reader
        self._form: Callable[[Sequence[TokenBatch]], T] = form
        self.options = sources[0].options
        self._position = Position()
        # Number of the DataLoader's worker whose share the position is in, and of all its workers.
        self._loader_worker: tuple[int, int] | None = None
        self._looped = False  # whether a loop over tensors has begun here since `restore`
        self._windows: Generator[Window, None, None] | None = None
        self._window: Window | None = None
        # A byte of memory that forked workers share once `torch` was called: not 0 if workers of a
        # DataLoader have read batches since `restore`.
        self._read_by_workers: mmap.mmap | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_windows": None, "_window": None, "_read_by_workers": None}

    def state(self) -> dict[str, Any]:
        """Returns the state of the iteration, from which `restore` continues.

        Returns:
            A dict of JSON values: the fields of Position, and all settings on which the order of
            the tokens depends, which `restore` compares.

        Raises:
            ValueError: Workers of a DataLoader have read these batches since they were made or
                restored. Only the workers know where they stand.
        """
        if _loader_worker() is None and self._read_by_workers and self._read_by_workers[0]:
            raise ValueError(
                "workers of a DataLoader have read these batches, and only they know where they "
                "stand: save the state_dict() of torchdata's StatefulDataLoader, or read with "
                "num_workers=0"
            )
        return {**self._setting(), **asdict(self._position)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues at the position at which a state was taken.

        Args:
            state: State that `state` returned, for batches of the same data with the same
                arguments.

        Raises:
            ValueError: The state comes from other data, or from batches with other arguments.
        """
        position = dict(state)
        for name, expected in self._setting().items():
            stored = position.pop(name, None)
            if stored != expected:
                raise ValueError(
                    f"the state is of other batches: its {name} is {stored!r}, not {expected!r}"
                )
        self._begin(Position(**position))

    def _begin(self, position: Position) -> None:
        """Moves the iteration to a position, in the share of the process that calls this."""
        self.close()
        self._position = position
        self._loader_worker = _loader_worker()
        self._looped = False
        if self._read_by_workers is not None and _loader_worker() is None:
            self._read_by_workers[0] = 0

    def _setting(self) -> dict[str, Any]:
        """Returns all settings on which the order of the tokens depends, as JSON values."""
        part, parts = _loader_worker() or ALONE
        fingerprints = "\n".join(source.fingerprint for source in self._sources)
        data_digest = hashlib.sha256(fingerprints.encode()).hexdigest()
        setting, *others = (source.options.setting for source in self._sources)
        setting = {"data": data_digest, **setting, "others": others, "part": part, "parts": parts}
        plain: dict[str, Any] = json.loads(json.dumps(setting))
        return plain

    def close(self) -> None:
        """Stops reading ahead, and frees the buffer.

        The iteration keeps its position. Reading the next batch starts reading ahead again.
        """
        if self._windows is not None:
            self._windows.close()
        self._windows = self._window = None

    def torch(self) -> Any:
        """Returns a PyTorch IterableDataset of these batches as tensors.

        Use it in a loop, or in a DataLoader with `batch_size=None`: with any other size, the
        DataLoader would try to make batches of batches, and raises TypeError. If the run is in a
        bucket and the DataLoader has workers, the DataLoader needs
        `multiprocessing_context="spawn"`.

        The first loop continues where this object stands. Every later loop begins at the start,
        unless `restore` was called before it.

        Each worker of a DataLoader reads a share of the data, and moves only its own copy of this
        object. Therefore a loop with workers raises ValueError if this object does not stand at the
        start, and `state` raises ValueError after workers have read.

        Returns:
            The IterableDataset. It has the methods `state_dict` and `load_state_dict`, with which
            torchdata's StatefulDataLoader continues its workers if it has as many workers as
            before.
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

            def __reduce__(self) -> tuple[Any, ...]:  # pickle cannot find a local class by name
                if get_spawning_popen() is not None:
                    read_by_workers[0] = 1  # the process that is being started shares no memory
                return Batches.torch, (self._batches,)

        return TorchBatches(self)

    def jax(self) -> Iterator[T]:
        """Returns an iterator over these batches as JAX arrays (see TokenBatch.jax)."""
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
        window = self._window
        taken = self._position.taken
        stop = min(taken + self.options.size, window.tokens)
        runs = zip(self._sources, window.runs, strict=True)
        batch = self._form([source.take(blocks, taken, stop) for source, blocks in runs])
        if stop < window.tokens:
            self._position = replace(self._position, taken=stop)
        else:
            self._window = None
            self._position = window.end
        return batch

    def _next_window(self) -> Window:
        """Returns the window that begins at the current position.

        Raises:
            StopIteration: There are no more windows.
            ValueError: There was no window at all, because no token passes the filters.
        """
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
        """Returns the windows of the data that this process reads.

        The workers divide the chunks of the first run. If a run stores pickles, they divide whole
        shards instead, and each worker then cuts its shards into chunks.
        """
        sources = self._sources
        options = self.options
        seed = options.shuffle
        hooks = max(sum(len(source.options.hooks) for source in sources), 1)
        row_bytes = max(sum(source.row_bytes for source in sources), 1)
        local = all(source.shards.local for source in sources)
        by_ranges = all(source.shards.by_ranges for source in sources)
        largest = LARGEST_READ
        least = 1
        if not local:
            largest = hooks * (ORDERED_READ if seed is None else LARGEST_READ)
            least = min(LEAST_READ * hooks // row_bytes, options.buffer // LEAST_CHUNKS)
        chunks_in_buffer = ORDERED_CHUNKS if seed is None else CHUNKS_IN_BUFFER
        size = max(min(largest // row_bytes, options.buffer // chunks_in_buffer), least, 1)
        chunks = sources[0].chunks()
        ahead = 1
        if by_ranges:
            blocks = [sources[0].shards.block_tokens(chunk.shard, size) for chunk in chunks]
            chunks = [
                piece
                for chunk, block in zip(chunks, blocks, strict=True)
                for piece in cut(chunk, size, block)
            ]
        chunks = share(shuffled(chunks, seed), options.worker, options.workers)
        chunks = share(chunks, *(self._loader_worker or ALONE))
        if not by_ranges:
            pieces = list[Chunk]()
            for chunk in chunks:
                pieces += shuffled(cut(chunk, size), seed, chunk.shard, chunk.start)
            chunks = pieces
        elif not local:
            most_bytes = IN_FLIGHT * LARGEST_READ
            ahead = max(min(IN_FLIGHT // hooks, most_bytes // (size * row_bytes)), 2)
        # A window is half of the buffer, and has whole batches.
        window_tokens = options.buffer // 2 // options.size * options.size
        most = min(window_tokens, sum(map(len, chunks)))
        return Windows(chunks, self._reader(), ahead, most, seed)

    def _check_selection(self) -> None:
        """Checks at the end of the data that there was a batch, unless there are no filters.

        If there are several workers, the others may have had batches, so a worker without a batch
        only logs a warning.

        Raises:
            ValueError: No token passes the filters.
        """
        filters = dict.fromkeys(text for source in self._sources for text in source.options.filters)
        if self._position != Position() or not filters:
            return
        message = f"no token passes these filters: {', '.join(filters)}"
        part, parts = self._loader_worker or ALONE
        worker = self.options.worker * parts + part
        workers = self.options.workers * parts
        if workers == 1:
            raise ValueError(message)
        log.warning("in the share of worker %d of %d, %s", worker, workers, message)


def _loader_worker() -> tuple[int, int] | None:
    """Returns the place of this process among the workers of a PyTorch DataLoader.

    Returns:
        The number of this worker, from 0, and the number of all workers. None if this process is
        not a worker of a DataLoader.
    """
    torch_data = sys.modules.get("torch.utils.data")
    info = torch_data.get_worker_info() if torch_data is not None else None
    return None if info is None else (info.id, info.num_workers)
