"""Opens a data set as a stream of rows, which can be shuffled and can continue after any row.

The rows come from files, which file_list.py lists and file_rows.py reads, or from a data set of the
hub, which the library `datasets` reads. Both streams implement the protocol `Rows`. A row of a file
comes with its position in the file. Rows of a hub data set have no position, so documents.py counts
them.

A data set consists of partitions. A partition of files is a row group of a Parquet file, or any
other file as a whole. A partition of a hub data set is what `datasets` calls a shard: a file or a
row group.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import datasets
import numpy as np
from huggingface_hub import HfApi, constants

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.retries import (
    hub_requests,
    hub_unreachable,
    name_unknown,
    unwritable_cache,
)
from activation_extraction.text.file_list import FILES_AT_ONCE, as_input_errors, list_files
from activation_extraction.text.file_rows import DataFile, count_row_groups, file_rows
from activation_extraction.text.rows import RowSchema, SourceRow
from activation_extraction.text.structs import as_structs

# The number of rows of a shuffled data set that are read into memory and permuted together.
BLOCK_ROWS = 1024


class Rows(Protocol):
    """The rows of a data set in a fixed order. Reading can continue after any row.

    `FilePartitions` and `datasets.IterableDataset` implement this protocol. The names of its
    members are those of `datasets.IterableDataset`, which calls a partition a shard.
    """

    @property
    def num_shards(self) -> int:
        """The number of partitions, which `datasets` calls shards.

        Partitions can be read independently of each other.
        """

    @property
    def features(self) -> Any:
        """The types of the columns, a `Features` object of the library `datasets`.

        None if the data set consists of files, whose values are converted when a row is read.
        """

    def shard(self, num_shards: int, index: int) -> Any:
        """Divides the partitions into subsets, and returns the rows of one subset.

        Args:
            num_shards: The number of subsets into which the partitions are divided.
            index: The number of the subset to return, counted from 0.
        """

    def reshard(self) -> Any:
        """Returns the same rows, divided into more partitions if that is possible.

        Partitions that cannot be divided further stay as they are.
        """

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the row that was read last.

        The state is a JSON object from which reading can continue with the next row.
        """

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Makes the next iteration continue from a state that `state_dict` has returned."""

    def __iter__(self) -> Iterator[Any]: ...


class FilePartitions:
    """The rows of files, partition by partition (see `Rows`).

    A partition is a row group of a Parquet file, or any other file as a whole. This class does not
    depend on `datasets`, so a run over files can be continued with any version of `datasets`.
    """

    features = None  # no types of columns, because values are converted when a row is read

    def __init__(self, partitions: Sequence[tuple[DataFile, int]], schema: RowSchema) -> None:
        """Initialises the stream at its first row.

        Args:
            partitions: Partitions in the order in which they are read. Each is a file and the
                number of a row group in the file, which is 0 if the partition is the whole file.
            schema: Columns to read of each row, and the `Reader`s of the row's content.
        """
        self._partitions = tuple(partitions)
        self._row_schema = schema
        # The place where the next iteration starts: the index of a partition, and the number of its
        # rows that were read before.
        self._start_partition_index_and_num_read_rows = (0, 0)
        self._current_partition_index_and_num_read_rows = (
            self._start_partition_index_and_num_read_rows
        )

    @property
    def num_shards(self) -> int:
        """The number of partitions, which `datasets` calls shards."""
        return len(self._partitions)

    def shard(self, num_shards: int, index: int) -> "FilePartitions":
        """Divides the partitions into subsets, and returns the rows of one subset.

        The partitions of a subset are consecutive. If the number of partitions is no multiple of
        the number of subsets, the first subsets have one partition more.

        Args:
            num_shards: The number of subsets into which the partitions are divided.
            index: The number of the subset to return, counted from 0.
        """
        partitions_per_subset, num_larger_subsets = divmod(len(self._partitions), num_shards)
        first_partition_index = index * partitions_per_subset + min(index, num_larger_subsets)
        end_partition_index = (
            first_partition_index + partitions_per_subset + (index < num_larger_subsets)
        )
        return FilePartitions(
            self._partitions[first_partition_index:end_partition_index], self._row_schema
        )

    def reshard(self) -> "FilePartitions":
        """Returns this object, because its partitions cannot be divided further."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the row that was read last.

        The state is a JSON object with another object under the key `examples_iterable`. The keys
        of this object are `shard_idx`, the index of the partition, and `shard_example_idx`, the
        number of the partition's rows that were read. Marks in stored runs contain these keys,
        which `datasets` uses as well.
        """
        partition_index, num_rows_read = self._current_partition_index_and_num_read_rows
        return {
            "examples_iterable": {"shard_idx": partition_index, "shard_example_idx": num_rows_read}
        }

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Makes the next iteration continue from a state that `state_dict` has returned."""
        partition_state = state["examples_iterable"]
        self._start_partition_index_and_num_read_rows = (
            partition_state["shard_idx"],
            partition_state["shard_example_idx"],
        )
        self._current_partition_index_and_num_read_rows = (
            self._start_partition_index_and_num_read_rows
        )

    def __iter__(self) -> Iterator[SourceRow]:
        first_partition_index, num_rows_to_skip = self._start_partition_index_and_num_read_rows
        self._current_partition_index_and_num_read_rows = (
            self._start_partition_index_and_num_read_rows
        )
        for partition_index in range(first_partition_index, len(self._partitions)):
            data_file, row_group_number = self._partitions[partition_index]
            partition_rows = islice(
                file_rows(data_file, row_group_number, self._row_schema), num_rows_to_skip, None
            )
            for num_rows_read, partition_row in enumerate(
                partition_rows, start=num_rows_to_skip + 1
            ):
                self._current_partition_index_and_num_read_rows = partition_index, num_rows_read
                yield partition_row
            num_rows_to_skip = 0
            # No row of the next partition was read yet.
            self._current_partition_index_and_num_read_rows = partition_index + 1, 0


def open_files(
    path: str, schema: RowSchema, files: Sequence[DataFile] | None = None
) -> FilePartitions:
    """Opens the files of a data set.

    Local text files may grow while they are read. The bytes beyond their size in `files` are not
    read.

    Args:
        path: Value of --dataset_path, or a source of --mix.
        schema: Columns to read of each row, and the `Reader`s of the row's content. Other columns
            of Parquet and Arrow files are not read.
        files: Files in the order in which they are read; None to list the files of `path`.

    Returns:
        The rows of all partitions of the files. The partitions are in the order of the files.

    Raises:
        InputError: If the files cannot be listed, if they are Parquet files without row groups, or
            if a Parquet file is damaged or in another format.
    """
    files_to_open = list_files(path) if files is None else files
    files_and_row_group_numbers: list[tuple[DataFile, int]] = []
    with as_input_errors(path), ThreadPoolExecutor(FILES_AT_ONCE) as thread_pool:
        row_group_counts_of_files = thread_pool.map(_count_row_groups, files_to_open)
        for data_file, num_row_groups in zip(files_to_open, row_group_counts_of_files, strict=True):
            files_and_row_group_numbers += [
                (data_file, row_group_number) for row_group_number in range(num_row_groups)
            ]
    if not files_and_row_group_numbers:
        raise InputError(f"--dataset_path {path}: is empty; expected rows with text")
    return FilePartitions(files_and_row_group_numbers, schema)


def _count_row_groups(file: DataFile) -> int:
    with as_input_errors(file.url):
        return count_row_groups(file)


def open_hub_dataset(
    name: str, config: str | None, split: str, revision: str | None = None
) -> tuple[datasets.IterableDataset, str]:
    """Opens a data set of the hub for streaming.

    Args:
        name: Name of the data set, such as HuggingFaceFW/fineweb-edu.
        config: Name of a configuration of the data set; None for its default configuration.
        split: Name of the split.
        revision: Hash of a Git commit of the data set on the hub; None for its newest commit.

    Returns:
        A tuple of:
            The stream of rows.
            The hash of the Git commit of the data set that is read.

    Raises:
        InputError: If the data set cannot be opened. The message contains the hub's reason.
    """
    hub_dataset_phrase = " ".join(filter(None, (name, config, split)))
    try:
        if unreachable_error := hub_unreachable(constants.ENDPOINT):
            raise unreachable_error
        with hub_requests(f"--dataset_name {hub_dataset_phrase}"), _scratch_cache():
            hub_commit_hash = revision or str(HfApi().dataset_info(name).sha)
            dataset_rows = datasets.load_dataset(
                name, config, split=split, revision=hub_commit_hash, streaming=True
            )
        return dataset_rows, hub_commit_hash
    except Exception as error:  # the libraries for the hub and its files may raise any exception
        failure_reason = unwritable_cache(error) or one_line(error)
        if name_unknown(error):
            failure_reason = (
                "the hub's name does not resolve: offline? --dataset_path reads local files"
            )
        raise InputError(f"--dataset_name {hub_dataset_phrase}: {failure_reason}") from error


def hub_row(
    columns: Mapping[str, Any], features: Any, location: str, position: dict[str, Any]
) -> SourceRow:
    """Returns a row of a hub data set as a SourceRow.

    `datasets` yields rows without their positions, so the caller determines the position by
    counting the rows.

    Args:
        columns: Columns of the row by name, as `datasets` returns them.
        features: Types of the columns, as `datasets` declares them; None if they are unknown.
        location: Position of the row in words, for messages. The row's id is added to it.
        position: Position of the row in the form that is stored with the row's samples (see
            `SampleFacts.row`).
    """
    id_phrase = f", id {columns['id']!r:.80}" if "id" in columns else ""
    return SourceRow(location + id_phrase, position, partial(as_structs, columns, features))


@contextmanager
def _scratch_cache() -> Iterator[None]:
    """Makes `datasets` use a temporary cache folder in a `with` block.

    The default cache folder may not be writable. `datasets` needs a writable folder to open a data
    set, although it stores nothing there when it streams the data set.
    """
    default_cache_folder = datasets.config.HF_DATASETS_CACHE
    with tempfile.TemporaryDirectory() as temporary_cache_folder:
        datasets.config.HF_DATASETS_CACHE = Path(temporary_cache_folder)
        try:
            yield
        finally:
            datasets.config.HF_DATASETS_CACHE = default_cache_folder


class ShuffledRows:
    """The rows of a data set in a random order, which is the same when a run continues.

    The partitions of the data set are permuted. Within a partition, the rows of each block of
    BLOCK_ROWS rows are permuted. The permutations depend only on the seed, the number of
    partitions, the partition and the block. (The shuffle buffer of `datasets` is not used, because
    its content cannot be restored.)

    A state is a JSON object from which reading can continue. The rows of the current block are then
    read again, so the state contains the place where the block begins. Stored runs contain states,
    so the keys of a state must not change:
        piece: The number of partitions that were read.
        block: The number of the block in the partition, counted from 0.
        taken: The number of rows of the block that were read.
        begin: The state of the partition's rows at the beginning of the block (`Rows.state_dict`);
            None if the block begins at the beginning of the partition.
    """

    def __init__(self, dataset: Rows, seed: int) -> None:
        """Initialises the stream at its first row.

        Args:
            dataset: The data set.
            seed: The seed of the random order.
        """
        self._dataset = dataset
        self._shuffle_seed = seed
        self._partition_order = np.random.default_rng(seed).permutation(dataset.num_shards).tolist()
        self._row_stream_state: dict[str, Any] = {"piece": 0, "block": 0, "taken": 0, "begin": None}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state after the row that was read last.

        The state is a JSON object from which reading can continue with the next row. The docstring
        of this class lists its keys.
        """
        return dict(self._row_stream_state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue from a state that `state_dict` has returned."""
        self._row_stream_state = dict(state)

    def __iter__(self) -> Iterator[SourceRow]:
        state_at_block_start = self._row_stream_state
        for num_partitions_read in range(state_at_block_start["piece"], len(self._partition_order)):
            partition_index = self._partition_order[num_partitions_read]
            partition_rows = self._dataset.shard(
                num_shards=len(self._partition_order), index=partition_index
            )
            if state_at_block_start["begin"] is not None:
                # The data set modifies the object from which it loads its state, so it gets a copy.
                partition_rows.load_state_dict(deepcopy(state_at_block_start["begin"]))
            row_iterator = iter(partition_rows)
            block_number = state_at_block_start["block"]
            while block_rows := list(islice(row_iterator, BLOCK_ROWS)):
                random_generator = np.random.default_rng(
                    [self._shuffle_seed, partition_index, block_number]
                )
                permuted_indices_in_block = random_generator.permutation(len(block_rows)).tolist()
                for num_rows_read in range(
                    state_at_block_start["taken"], len(permuted_indices_in_block)
                ):
                    index_in_block = permuted_indices_in_block[num_rows_read]
                    self._row_stream_state = {**state_at_block_start, "taken": num_rows_read + 1}
                    source_row_or_value_by_column = block_rows[index_in_block]
                    if isinstance(source_row_or_value_by_column, SourceRow):
                        source_row = source_row_or_value_by_column
                    else:
                        # Hub data sets yield rows as dicts of their columns, without a position.
                        # The position is added here.
                        row_number_in_partition = block_number * BLOCK_ROWS + index_in_block
                        location_phrase = (
                            f"row {row_number_in_partition} of shard {partition_index} "
                            "(both from 0)"
                        )
                        row_position_fields = {
                            "shard": partition_index,
                            "row": row_number_in_partition,
                        }
                        source_row = hub_row(
                            source_row_or_value_by_column,
                            partition_rows.features,
                            location_phrase,
                            row_position_fields,
                        )
                    yield source_row
                block_number += 1
                state_at_block_start = {
                    "piece": num_partitions_read,
                    "block": block_number,
                    "taken": 0,
                    "begin": partition_rows.state_dict(),
                }
            state_at_block_start = {
                "piece": num_partitions_read + 1,
                "block": 0,
                "taken": 0,
                "begin": None,
            }
