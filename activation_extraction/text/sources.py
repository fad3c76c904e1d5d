"""Opens a data set as a stream of rows, which can be shuffled and read from any position.

The rows are those of files, which file_list.py lists and file_rows.py reads, or those of a data set
of the hub, which the library `datasets` reads. Both have the members of `Rows`. A row of a file
comes with its position in the file; documents.py numbers the rows of a hub data set.
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
from activation_extraction.text.rows import RowForm, SourceRow
from activation_extraction.text.structs import as_structs

BLOCK_ROWS = 1024  # of a shuffled data set; the rows of a block are permuted and held in memory


class Rows(Protocol):
    """Rows of a data set in a fixed order, in pieces, read from any position.

    A `datasets.IterableDataset` has these members, too.

    Attributes:
        num_shards: Number of pieces that can be read independently.
        features: Types of the columns by `datasets`; None for files, whose rows have their own.
    """

    @property
    def num_shards(self) -> int: ...
    @property
    def features(self) -> Any: ...
    def shard(self, num_shards: int, index: int) -> Any:
        """Returns the rows of share `index` out of `num_shards` shares of the pieces."""

    def reshard(self) -> Any:
        """Returns the same rows in more pieces, if they can be divided further."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the row that was read last, as JSON."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Makes the next iteration continue from a position."""

    def __iter__(self) -> Iterator[Any]: ...


class FilePieces:
    """The rows of files, piece by piece, with the members of `Rows`.

    A piece is a row group of a Parquet file, or any other file as a whole. This class determines
    the order of the pieces, their shares and the meaning of a position, so that a run over files
    can be continued with any version of `datasets`.
    """

    features = None

    def __init__(self, pieces: Sequence[tuple[DataFile, int]], form: RowForm) -> None:
        """Takes the pieces; `open_files` finds them.

        Args:
            pieces: Pieces in the order in which they are read: a file, and the number of the row
                group in it, which is 0 if the piece is the whole file.
            form: What is read of each row.
        """
        self._pieces = tuple(pieces)
        self._form = form
        self._start = self._position = (0, 0)  # a piece, and how many of its rows were read

    @property
    def num_shards(self) -> int:
        return len(self._pieces)

    def shard(self, num_shards: int, index: int) -> "FilePieces":
        """Returns the rows of share `index` out of `num_shards` shares of the pieces.

        The pieces of a share are consecutive. If the shares cannot be equal, the first ones have
        one piece more.
        """
        size, larger = divmod(len(self._pieces), num_shards)
        start = index * size + min(index, larger)
        return FilePieces(self._pieces[start : start + size + (index < larger)], self._form)

    def reshard(self) -> "FilePieces":
        return self

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the row that was read last, as JSON.

        It has the form that `datasets` gives to the positions of a generator's rows, which stored
        runs have.
        """
        piece, row = self._position
        return {"examples_iterable": {"shard_idx": piece, "shard_example_idx": row}}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        position = state["examples_iterable"]
        self._start = self._position = position["shard_idx"], position["shard_example_idx"]

    def __iter__(self) -> Iterator[SourceRow]:
        first, skipped = self._start
        self._position = self._start
        for number in range(first, len(self._pieces)):
            rows = file_rows(*self._pieces[number], self._form)
            for read, row in enumerate(islice(rows, skipped, None), start=skipped + 1):
                self._position = number, read
                yield row
            skipped = 0
            self._position = number + 1, 0


def open_files(path: str, form: RowForm, files: Sequence[DataFile] | None = None) -> FilePieces:
    """Opens the files of a data set.

    Local text files may grow while they are read; no more is read of them than their size in
    `files`. Of Parquet and Arrow files, only the needed columns are read.

    Args:
        path: Value of --dataset_path, or a source of --mix.
        form: What is read of each row.
        files: Files in the order in which they are read; None to list the files of `path`.

    Raises:
        InputError: If there are no row groups to read, or if a Parquet file is damaged or in
            another format.
    """
    files = list_files(path) if files is None else files
    with as_input_errors(path), ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        counts = pool.map(_count_row_groups, files)
        pieces = [
            (file, row_group)
            for file, count in zip(files, counts, strict=True)
            for row_group in range(count)
        ]
    if not pieces:
        raise InputError(f"--dataset_path {path}: is empty; expected rows with text")
    return FilePieces(pieces, form)


def _count_row_groups(file: DataFile) -> int:
    with as_input_errors(file.url):
        return count_row_groups(file)


def open_hub_dataset(
    name: str, config: str | None, split: str, revision: str | None = None
) -> tuple[datasets.IterableDataset, str]:
    """Opens a data set of the hub for streaming.

    Args:
        name: Name of the data set, such as HuggingFaceFW/fineweb-edu.
        config: Name of its configuration; None for its default.
        split: Name of the split.
        revision: Commit of the data set; None for its newest one.

    Returns:
        The stream of rows, and the commit that is read.

    Raises:
        InputError: If the data set cannot be opened. The message contains the hub's reason.
    """
    source = " ".join(filter(None, (name, config, split)))
    try:
        if unreachable := hub_unreachable(constants.ENDPOINT):
            raise unreachable
        with hub_requests(f"--dataset_name {source}"), _scratch_cache():
            commit = revision or str(HfApi().dataset_info(name).sha)
            rows = datasets.load_dataset(name, config, split=split, revision=commit, streaming=True)
        return rows, commit
    except Exception as error:  # whatever the hub, the network or a file format may raise
        reason = unwritable_cache(error) or one_line(error)
        if name_unknown(error):
            reason = "the hub's name does not resolve: offline? --dataset_path reads local files"
        raise InputError(f"--dataset_name {source}: {reason}") from error


def hub_row(
    columns: Mapping[str, Any], features: Any, where: str, position: dict[str, Any]
) -> SourceRow:
    """Returns a row of a data set of the hub as a SourceRow.

    Such a row has no position of its own, so whoever iterates over the data set counts its rows.

    Args:
        columns: Columns of the row by name, as `datasets` returns them.
        features: Types of the columns by `datasets`; None if they are unknown.
        where: Position of the row in words, for messages. The row's id is added to it.
        position: Position of the row as it is stored with its samples (see `SampleFacts.row`).
    """
    row_id = f", id {columns['id']!r:.80}" if "id" in columns else ""
    return SourceRow(where + row_id, position, partial(as_structs, columns, features))


@contextmanager
def _scratch_cache() -> Iterator[None]:
    """Gives `datasets` a temporary cache inside the block.

    `datasets` needs a writable cache for whatever it opens, and its default one may not be
    writable. Streams store nothing there.
    """
    default = datasets.config.HF_DATASETS_CACHE
    with tempfile.TemporaryDirectory() as scratch:
        datasets.config.HF_DATASETS_CACHE = Path(scratch)
        try:
            yield
        finally:
            datasets.config.HF_DATASETS_CACHE = default


class ShuffledRows:
    """The rows of a data set in a random order, which is the same when a run continues.

    The pieces of a data set (files, or row groups of Parquet files) come in a random order. Within
    a piece, every block of BLOCK_ROWS rows is permuted. Both depend on the seed and the piece
    alone. The state is read and set like the data set's: it is that of the piece at the beginning
    of a block, and how many rows of it were taken; so the rows of one block are read again. The
    shuffle buffer of `datasets` cannot be restored.
    """

    def __init__(self, dataset: Rows, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._order = np.random.default_rng(seed).permutation(dataset.num_shards).tolist()
        self._state: dict[str, Any] = {"piece": 0, "block": 0, "taken": 0, "begin": None}

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the row that was read last."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue from where a state was taken."""
        self._state = dict(state)

    def __iter__(self) -> Iterator[SourceRow]:
        state = self._state
        for number in range(state["piece"], len(self._order)):
            piece = self._order[number]
            rows = self._dataset.shard(num_shards=len(self._order), index=piece)
            if state["begin"] is not None:
                rows.load_state_dict(deepcopy(state["begin"]))  # it changes what it loads
            ahead, block = iter(rows), state["block"]
            while read := list(islice(ahead, BLOCK_ROWS)):
                order = np.random.default_rng([self._seed, piece, block]).permutation(len(read))
                for taken, at in enumerate(order[state["taken"] :].tolist(), state["taken"] + 1):
                    self._state = {**state, "taken": taken}
                    row = read[at]
                    if not isinstance(row, SourceRow):
                        row_number = block * BLOCK_ROWS + at
                        where = f"row {row_number} of shard {piece} (both from 0)"
                        position = {"shard": piece, "row": row_number}
                        row = hub_row(row, rows.features, where, position)
                    yield row
                block += 1
                begin = rows.state_dict()
                state = {"piece": number, "block": block, "taken": 0, "begin": begin}
            state = {"piece": number + 1, "block": 0, "taken": 0, "begin": None}
