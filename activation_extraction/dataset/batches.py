"""Batches: an iterator over batches of tokens, with an exact state that can be restored.

Batches cuts the shards into chunks, which are consecutive tokens of a shard, and shuffles the
chunks if a user wants shuffled tokens. token_source.py and paired.py read the chunks, and
windows.py shuffles their tokens in bounded memory. The iterator can be copied to other processes,
and divides the data among the workers of a PyTorch DataLoader.
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
from activation_extraction.dataset.token_source import ReadChunk, TokenSource
from activation_extraction.dataset.windows import (
    Chunk,
    Position,
    Window,
    Windows,
    chunks_of_worker,
    cut_chunk,
    shuffled_chunks,
)
from activation_extraction.store.shard_reader import MAX_REQUESTS

# Number of the worker and number of workers, for a process that is not a worker of a DataLoader.
# Such a process reads all of its data, as the only worker of a DataLoader would.
ONLY_WORKER = 0, 1
# Largest size of a chunk in bytes. A chunk is read at once.
#   - If all runs are local, this is the limit for the activations at all hooks together.
#   - If a run is in a bucket and tokens are shuffled, this is the limit for the activations at one
#     hook, on average over the hooks, because the activations at each hook need a request of their
#     own.
#   - If a run is in a bucket and tokens stay in order, MAX_ORDERED_READ_BYTES is the limit instead.
MAX_READ_BYTES = 8 * 2**20
# Smallest number of bytes of the activations at one hook in a chunk (on average over the hooks), if
# a run is in a bucket, and if the read-ahead buffer has room for MIN_BUCKET_CHUNKS such chunks.
# Blocks of up to a MiB can only be read whole, so most bytes that are read for a smaller chunk
# would belong to other chunks.
MIN_READ_BYTES = 2 * 2**20
# Largest number of bytes of the activations at one hook in a chunk (on average over the hooks), if
# a run is in a bucket and tokens stay in order. It is larger than MAX_READ_BYTES, because each
# chunk also needs requests for its token ids and positions, so larger chunks need fewer requests.
# Shuffling needs many small chunks.
MAX_ORDERED_READ_BYTES = 14 * 2**20
# Smallest number of chunks for which the read-ahead buffer has room if tokens are shuffled, so that
# tokens from many parts of the data mix.
MIN_SHUFFLED_CHUNKS = 32
# Smallest number of chunks for which the read-ahead buffer has room if a run is in a bucket. It is
# less than MIN_SHUFFLED_CHUNKS, because chunks of at least MIN_READ_BYTES need much memory.
MIN_BUCKET_CHUNKS = 8
# Smallest number of chunks for which the read-ahead buffer has room if tokens are not shuffled. A
# window takes half of the buffer, so it has room for at least two chunks.
MIN_ORDERED_CHUNKS = 4
T = TypeVar("T", TokenBatch, TokenPair)


class Batches(Iterator[T]):
    """An iterator over batches of tokens, for one pass over the data.

    A batch is a TokenBatch, or a TokenPair if two runs are read side by side. The last batch may
    have fewer tokens than the others. `state` returns the position of the iteration, and `restore`
    continues at it.

    A copy of this object in another process continues at the position of this object. A worker of a
    PyTorch DataLoader reads only a part of the data, so a copy in a worker can be read only if no
    batch was taken from this object before.

    Args:
        sources: The TokenSource of each run. The options of the first source determine the order of
            the tokens.
        make_batch: Function that takes a list with a TokenBatch of each run, and returns the batch
            to yield: a TokenBatch or a TokenPair.
        make_reader: Function without arguments that returns a function for reading chunks. The
            returned function takes a chunk of the first run (consecutive tokens of a shard), reads
            its tokens from all runs, and returns a tuple of a block
            (`dataset.token_batch.Block`) of each run.

    Attributes:
        options: Options of the batches.

    Raises:
        ValueError: If no token of the run passes the filters. `next` raises this error.
        OSError: If a shard is damaged. `next` raises this error.
    """

    def __init__(
        self,
        sources: Sequence[TokenSource],
        make_batch: Callable[[Sequence[TokenBatch]], T],
        make_reader: Callable[[], ReadChunk],
    ) -> None:
        self._token_sources = sources
        self._make_reader = make_reader
        self._make_batch: Callable[[Sequence[TokenBatch]], T] = make_batch
        self.options = sources[0].options
        self._iteration_position = Position()
        # The worker of a PyTorch DataLoader to whose part of the data `_iteration_position` refers.
        # It is a tuple of the number of the worker, from 0, and the number of all workers. None if
        # `_iteration_position` refers to all data of this process.
        self._loader_worker_number_and_num_workers: tuple[int, int] | None = None
        # Whether a loop over `torch()` has begun since `restore`.
        self._has_data_loader_loop_begun = False
        # Iterator over the windows after `_current_window`. None until a batch is read, and after
        # `close`.
        self._window_iterator: Generator[Window, None, None] | None = None
        # Window from which the next batch is cut; None if this window is not filled yet.
        self._current_window: Window | None = None
        # One byte of memory, which forked workers of a DataLoader share. The byte is 1 if workers
        # have read batches since `restore`, otherwise 0. None until `torch` is called.
        self._shared_byte_after_worker_reads: mmap.mmap | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {
            **vars(self),
            "_window_iterator": None,
            "_current_window": None,
            "_shared_byte_after_worker_reads": None,
        }

    def state(self) -> dict[str, Any]:
        """Returns the state of the iteration, from which `restore` continues.

        Returns:
            A dict of JSON values: the position of the next batch (the fields of
            `windows.Position`), and all settings on which the order of the tokens depends.
            `restore` rejects the state if these settings differ from the settings of the object
            whose `restore` is called.

        Raises:
            ValueError: If workers of a DataLoader have read batches since this object was made or
                restored, because only the workers know their positions.
        """
        if (
            _loader_worker_number_and_num_workers() is None
            and self._shared_byte_after_worker_reads
            and self._shared_byte_after_worker_reads[0]
        ):
            raise ValueError(
                "workers of a DataLoader have read these batches, and only they know where they "
                "stand: save the state_dict() of torchdata's StatefulDataLoader, or read with "
                "num_workers=0"
            )
        return {**self._settings(), **asdict(self._iteration_position)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Moves the iteration to the position at which a state was saved.

        Args:
            state: State that `state` returned, for batches of the same data with the same
                arguments.

        Raises:
            ValueError: If the state comes from other data, or from batches with other arguments.
        """
        # Fields of the state by name. The settings are removed from this dict as they are checked
        # below, so that only the fields of `Position` remain.
        state_fields = dict(state)
        for setting_name, expected_value in self._settings().items():
            stored_value = state_fields.pop(setting_name, None)
            if stored_value != expected_value:
                raise ValueError(
                    f"the state is of other batches: its {setting_name} is {stored_value!r}, not "
                    f"{expected_value!r}"
                )
        self._begin(Position(**state_fields))

    def _begin(self, iteration_position: Position) -> None:
        """Moves the iteration to a position, as if nothing had been read before.

        Args:
            iteration_position: Position of the next batch. In a worker of a DataLoader, it is a
                position in the worker's part of the data.
        """
        self.close()
        self._iteration_position = iteration_position
        self._loader_worker_number_and_num_workers = _loader_worker_number_and_num_workers()
        self._has_data_loader_loop_begun = False
        if (
            self._shared_byte_after_worker_reads is not None
            and _loader_worker_number_and_num_workers() is None
        ):
            self._shared_byte_after_worker_reads[0] = 0

    def _settings(self) -> dict[str, Any]:
        """Returns all settings on which the order of the tokens depends, as JSON values by name.

        A state (see `state`) contains them, and is only restored if they are the same.

        Returns:
            The options of the run by name (see `BatchOptions.setting`), of the first run if runs
            are read in pairs. In addition, these settings:
            data: A digest of all shards.
            others: The options of each run that is paired with the first one; empty without pairs.
            part: The number of this worker of a DataLoader, from 0.
            parts: The number of workers of the DataLoader.
        """
        loader_worker_number, num_loader_workers = (
            _loader_worker_number_and_num_workers() or ONLY_WORKER
        )
        joined_fingerprints = "\n".join(
            token_source.fingerprint for token_source in self._token_sources
        )
        data_digest = hashlib.sha256(joined_fingerprints.encode()).hexdigest()
        option_dicts_of_runs = [
            token_source.options.setting for token_source in self._token_sources
        ]
        value_by_setting_name = {
            "data": data_digest,
            **option_dicts_of_runs[0],
            "others": option_dicts_of_runs[1:],
            "part": loader_worker_number,
            "parts": num_loader_workers,
        }
        json_value_by_setting_name: dict[str, Any] = json.loads(json.dumps(value_by_setting_name))
        return json_value_by_setting_name

    def close(self) -> None:
        """Stops reading ahead, and frees the memory of the tokens that were read ahead.

        The iteration keeps its position. Reading the next batch starts reading ahead again.
        """
        if self._window_iterator is not None:
            self._window_iterator.close()
        self._window_iterator = None
        self._current_window = None

    def torch(self) -> Any:
        """Returns a PyTorch IterableDataset of these batches as tensors.

        Use the IterableDataset in a loop, or in a DataLoader with `batch_size=None`: with any other
        size, the DataLoader would try to make batches of batches, and raises TypeError. If the run
        is in a bucket and the DataLoader has workers, the DataLoader needs
        `multiprocessing_context="spawn"`.

        The first loop begins at the position of this object. Every later loop begins at the start
        of the data, unless `restore` was called before the loop.

        Each worker of a DataLoader has its own copy of this object, and reads a part of the data
        with it, while the position of this object stays unchanged. Therefore a loop with workers
        raises ValueError if batches were taken from this object before, and `state` raises
        ValueError after workers have read.

        Returns:
            The IterableDataset. torchdata's StatefulDataLoader uses its methods `state_dict` and
            `load_state_dict` to continue its workers, if the number of workers is unchanged.
        """
        from torch.utils.data import IterableDataset

        if self._shared_byte_after_worker_reads is None:
            self._shared_byte_after_worker_reads = mmap.mmap(-1, 1)
        shared_byte_after_worker_reads = self._shared_byte_after_worker_reads

        class TorchBatches(IterableDataset):
            def __init__(self, batches: Batches[Any]) -> None:
                self._batches = batches

            def __iter__(self) -> Iterator[Any]:
                batches = self._batches
                if batches._has_data_loader_loop_begun:
                    batches._begin(Position())
                batches._has_data_loader_loop_begun = True
                return (batch.torch() for batch in batches)

            def state_dict(self) -> dict[str, Any]:
                return self._batches.state()

            def load_state_dict(self, state: Mapping[str, Any]) -> None:
                self._batches.restore(state)

            # TorchBatches is a local class of `Batches.torch`, and pickle cannot find a local class
            # by its name. Unpickling therefore calls `Batches.torch` again.
            def __reduce__(self) -> tuple[Any, ...]:
                if get_spawning_popen() is not None:
                    # This object is being pickled for a new worker of a DataLoader, which does not
                    # share the memory of this process. Therefore this process sets the byte itself.
                    # The value 1 tells `Batches.state` that workers read the batches.
                    shared_byte_after_worker_reads[0] = 1
                return Batches.torch, (self._batches,)

        return TorchBatches(self)

    def jax(self) -> Iterator[T]:
        """Returns an iterator over these batches, each as a batch of JAX arrays.

        An item is a TokenBatch, or a TokenPair if two runs are read side by side. Its arrays are
        JAX arrays, with the exceptions that `TokenBatch.jax` lists.
        """
        return (batch.jax() for batch in self)

    def __next__(self) -> T:
        loader_worker_number_and_num_workers = _loader_worker_number_and_num_workers()
        if self._loader_worker_number_and_num_workers != loader_worker_number_and_num_workers:
            if self._iteration_position != Position():
                raise ValueError(
                    "these batches stand in the middle of the data, of which each worker of a "
                    "DataLoader reads a share of its own: continue with num_workers=0 or with "
                    "torchdata's StatefulDataLoader, or make new batches"
                )
            # In a forked process, the threads that read ahead do not exist, and waiting for them
            # would never end. So the state of reading ahead is discarded here, and the next window
            # is read by new threads.
            self.close()
            self._loader_worker_number_and_num_workers = loader_worker_number_and_num_workers
            if (
                loader_worker_number_and_num_workers is not None
                and self._shared_byte_after_worker_reads is not None
            ):
                self._shared_byte_after_worker_reads[0] = 1
        if self._current_window is None:
            self._current_window = self._next_window()
        window = self._current_window
        num_taken_tokens = self._iteration_position.taken
        stop_token_index = min(num_taken_tokens + self.options.size, window.token_count)
        sources_and_blocks = zip(self._token_sources, window.blocks_of_each_run, strict=True)
        batch = self._make_batch(
            [
                token_source.take(blocks, num_taken_tokens, stop_token_index)
                for token_source, blocks in sources_and_blocks
            ]
        )
        if stop_token_index < window.token_count:
            self._iteration_position = replace(self._iteration_position, taken=stop_token_index)
        else:
            self._current_window = None
            self._iteration_position = window.end
        return batch

    def _next_window(self) -> Window:
        """Reads the next window of tokens, and returns it.

        A window (see `Window`) contains the tokens of one or more consecutive batches, in the order
        of the batches.

        Raises:
            StopIteration: If there are no more windows.
            ValueError: If no token passes the filters, and no other process reads a part of
                the data.
            OSError: If a shard is damaged.
        """
        if self._window_iterator is None:
            self._window_iterator = self._windows_of_process().beginning(self._iteration_position)
        try:
            return next(self._window_iterator)
        except StopIteration:
            self.close()
            self._check_selection()
            raise
        except BaseException:
            self.close()  # the next call then reads the window again, which could not be read
            raise

    def _windows_of_process(self) -> Windows:
        """Returns the windows of the tokens that this process reads.

        The run is cut into chunks, each of consecutive tokens of a shard. A window contains the
        tokens of some chunks, and batches are cut from windows (dataset/windows.py). If several
        runs are read side by side, the first run is cut into chunks, and its tokens determine the
        tokens of the other runs.

        The chunks are divided in two steps. `BatchOptions.workers` is the number of processes among
        which the chunks are divided first. If one of these processes reads with a PyTorch
        DataLoader that has worker processes, the chunks of this process are then divided among
        the worker processes. In a worker process, the result contains only the worker process's
        chunks.

        Pickles can only be read whole. If one of the runs stores pickles, whole shards are divided
        in these two steps, and each process then cuts its own shards into chunks. If there are
        fewer shards than processes, the chunks are divided nevertheless, and several processes read
        the same pickle.
        """
        token_sources = self._token_sources
        batch_options = self.options
        shuffle_seed = batch_options.shuffle
        hook_count = max(sum(len(token_source.options.hooks) for token_source in token_sources), 1)
        bytes_per_token = max(
            sum(token_source.bytes_per_token for token_source in token_sources), 1
        )
        are_all_runs_local = all(token_source.shards.is_local for token_source in token_sources)
        can_read_ranges_of_all_runs = all(
            token_source.shards.can_read_ranges for token_source in token_sources
        )
        max_chunk_bytes = MAX_READ_BYTES
        min_tokens_per_chunk = 1
        if not are_all_runs_local:
            max_chunk_bytes = hook_count * (
                MAX_ORDERED_READ_BYTES if shuffle_seed is None else MAX_READ_BYTES
            )
            min_tokens_per_chunk = min(
                MIN_READ_BYTES * hook_count // bytes_per_token,
                batch_options.buffer // MIN_BUCKET_CHUNKS,
            )
        min_buffer_chunks = MIN_ORDERED_CHUNKS if shuffle_seed is None else MIN_SHUFFLED_CHUNKS
        tokens_per_chunk = max(
            min(max_chunk_bytes // bytes_per_token, batch_options.buffer // min_buffer_chunks),
            min_tokens_per_chunk,
            1,
        )
        chunks = token_sources[0].chunks()
        num_chunks_read_at_once = 1
        if can_read_ranges_of_all_runs:
            smaller_chunks = list[Chunk]()
            for chunk in chunks:
                tokens_per_block = token_sources[0].shards.tokens_per_block(
                    chunk.shard_index, tokens_per_chunk
                )
                smaller_chunks += cut_chunk(chunk, tokens_per_chunk, tokens_per_block)
            chunks = smaller_chunks
        chunks = chunks_of_worker(
            shuffled_chunks(chunks, shuffle_seed), batch_options.worker, batch_options.workers
        )
        chunks = chunks_of_worker(
            chunks, *(self._loader_worker_number_and_num_workers or ONLY_WORKER)
        )
        if not can_read_ranges_of_all_runs:
            smaller_chunks = list[Chunk]()
            for chunk in chunks:
                smaller_chunks += shuffled_chunks(
                    cut_chunk(chunk, tokens_per_chunk),
                    shuffle_seed,
                    chunk.shard_index,
                    chunk.start_token_index,
                )
            chunks = smaller_chunks
        elif not are_all_runs_local:
            max_bytes_read_ahead = MAX_REQUESTS * MAX_READ_BYTES
            num_chunks_read_at_once = max(
                min(
                    MAX_REQUESTS // hook_count,
                    max_bytes_read_ahead // (tokens_per_chunk * bytes_per_token),
                ),
                2,
            )
        # A window takes half of the buffer, because one window is filled while batches are cut from
        # another. It contains whole batches.
        batches_per_window = batch_options.buffer // 2 // batch_options.size
        num_chunk_tokens = sum(map(len, chunks))
        tokens_per_full_window = min(batches_per_window * batch_options.size, num_chunk_tokens)
        return Windows(
            chunks,
            self._make_reader(),
            num_chunks_read_at_once,
            tokens_per_full_window,
            shuffle_seed,
        )

    def _check_selection(self) -> None:
        """Checks, at the end of the data, that the filters did not leave out all tokens.

        If several processes read the data, and no token of this process's part passes the filters,
        other processes may still have tokens. Therefore only a warning is logged.

        Raises:
            ValueError: If this process reads all data, and no token passes the filters.
        """
        distinct_filter_texts = dict.fromkeys(
            filter_text
            for token_source in self._token_sources
            for filter_text in token_source.options.filters
        )
        if self._iteration_position != Position() or not distinct_filter_texts:
            return
        message = f"no token passes these filters: {', '.join(distinct_filter_texts)}"
        loader_worker_number, num_loader_workers = (
            self._loader_worker_number_and_num_workers or ONLY_WORKER
        )
        reader_number = self.options.worker * num_loader_workers + loader_worker_number
        reader_count = self.options.workers * num_loader_workers
        if reader_count == 1:
            raise ValueError(message)
        log.warning("in the share of worker %d of %d, %s", reader_number, reader_count, message)


def _loader_worker_number_and_num_workers() -> tuple[int, int] | None:
    """Returns this process's number as a DataLoader worker, and the number of workers.

    Returns:
        A tuple of the number of this worker, from 0, and the number of workers of its DataLoader.
        None if this process is not a worker of a DataLoader.
    """
    torch_data_module = sys.modules.get("torch.utils.data")
    loader_worker_info = (
        torch_data_module.get_worker_info() if torch_data_module is not None else None
    )
    return (
        None
        if loader_worker_info is None
        else (loader_worker_info.id, loader_worker_info.num_workers)
    )
