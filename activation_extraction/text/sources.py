"""Opens a data set as a stream of rows, which can be shuffled and read from any position.

The rows come from files, which file_list.py lists and file_rows.py reads, or from a data set of the
hub, which the library `datasets` reads. Both streams implement `Rows`. A row of a file comes with
its position in the file; documents.py numbers the rows of a hub data set.
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

BLOCK_ROWS = 1024  # the rows of a shuffled data set that are permuted, and held in memory, together


class Rows(Protocol):
    """The rows of a data set in a fixed order, in pieces, which can be read from any position.

    `FilePieces` and `datasets.IterableDataset` implement this protocol.

    Attributes:
        num_shards: Number of pieces that can be read independently.
        features: Types of the columns in `datasets`; None for files, whose rows are converted when
            they are read.
    """

    @property
    def num_shards(self) -> int: ...
    @property
    def features(self) -> Any: ...
    def shard(self, num_shards: int, index: int) -> Any:
        """Returns the rows of one of several shares of the pieces.

        Args:
            num_shards: The number of shares.
            index: The number of the share, from 0.
        """

    def reshard(self) -> Any:
        """Returns the same rows in more pieces, if they can be divided further."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the row that was read last, as JSON."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Makes the next iteration continue from a position that `state_dict` has returned."""

    def __iter__(self) -> Iterator[Any]: ...


class FilePieces:
    """The rows of files, piece by piece (see `Rows`).

    A piece is a row group of a Parquet file, or any other file as a whole. This class determines
    the order of the pieces, their shares and the meaning of a position, so that a run over files
    can be continued with any version of `datasets`.
    """

    features = None

    def __init__(self, pieces: Sequence[tuple[DataFile, int]], form: RowForm) -> None:
        """Takes the pieces, which `open_files` determines.

        Args:
            pieces: Pieces in the order in which they are read: a file, and the number of a row
                group in it, which is 0 if the piece is the whole file.
            form: Columns to read of each row, and how.
        """
        self._pieces = tuple(pieces)
        self._form = form
        # A position is the index of a piece, and the number of its rows that were read.
        self._start = self._position = (0, 0)

    @property
    def num_shards(self) -> int:
        """The number of pieces."""
        return len(self._pieces)

    def shard(self, num_shards: int, index: int) -> "FilePieces":
        """Returns the rows of one of several shares of the pieces.

        The pieces of a share are consecutive. If the number of pieces is no multiple of the number
        of shares, the first shares have one piece more.

        Args:
            num_shards: The number of shares.
            index: The number of the share, from 0.
        """
        size, num_larger = divmod(len(self._pieces), num_shards)
        start = index * size + min(index, num_larger)
        stop = start + size + (index < num_larger)
        return FilePieces(self._pieces[start:stop], self._form)

    def reshard(self) -> "FilePieces":
        """Returns the same pieces, because they cannot be divided further."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the row that was read last, as JSON.

        Stored runs contain positions in this form, which is the one of `datasets` for the rows of a
        generator.
        """
        piece, row = self._position
        return {"examples_iterable": {"shard_idx": piece, "shard_example_idx": row}}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Makes the next iteration continue from a position that `state_dict` has returned."""
        position = state["examples_iterable"]
        self._start = self._position = position["shard_idx"], position["shard_example_idx"]

    def __iter__(self) -> Iterator[SourceRow]:
        first, skipped = self._start
        self._position = self._start
        for number in range(first, len(self._pieces)):
            rows = file_rows(*self._pieces[number], self._form)
            for num_read, row in enumerate(islice(rows, skipped, None), start=skipped + 1):
                self._position = number, num_read
                yield row
            skipped = 0
            self._position = number + 1, 0


def open_files(path: str, form: RowForm, files: Sequence[DataFile] | None = None) -> FilePieces:
    """Opens the files of a data set.

    Local text files may grow while they are read; bytes beyond their size in `files` are not read.
    Of Parquet and Arrow files, only the needed columns are read.

    Args:
        path: Value of --dataset_path, or a source of --mix.
        form: Columns to read of each row, and how.
        files: Files in the order in which they are read; None to list the files of `path`.

    Raises:
        InputError: If the files cannot be listed, if they have no row groups, or if a Parquet file
            is damaged or in another format.
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
        The stream of rows.
        The commit that is read.

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
    except Exception as error:  # the libraries for the hub and its files may raise any type
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
    """Gives `datasets` a temporary cache in a `with` block.

    `datasets` needs a writable cache to open a data set, although streams store nothing there, and
    the default cache may not be writable.
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

    The pieces of the data set (files, or row groups of Parquet files) are permuted, and so are the
    rows of each block of BLOCK_ROWS rows within a piece. The permutations depend only on the seed,
    the number of pieces, the piece and the block. (The shuffle buffer of `datasets` is not used,
    because its content cannot be restored.)

    The position contains the position of the data set at the beginning of a block, so continuing
    reads the rows of one block again. Its keys are:
        piece: The number of pieces that were read.
        block: The number of the block in the piece.
        taken: The number of rows of the block that were read.
        begin: The position in the piece where the block begins; None for the piece's beginning.
    """

    def __init__(self, dataset: Rows, seed: int) -> None:
        """Takes the data set, and the seed of the order."""
        self._dataset = dataset
        self._seed = seed
        self._order = np.random.default_rng(seed).permutation(dataset.num_shards).tolist()
        self._state: dict[str, Any] = {"piece": 0, "block": 0, "taken": 0, "begin": None}

    def state_dict(self) -> dict[str, Any]:
        """Returns the position after the row that was read last, as JSON."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue from a position that `state_dict` has returned."""
        self._state = dict(state)

    def __iter__(self) -> Iterator[SourceRow]:
        state = self._state
        for number in range(state["piece"], len(self._order)):
            piece = self._order[number]
            rows = self._dataset.shard(num_shards=len(self._order), index=piece)
            if state["begin"] is not None:
                # A copy, because the data set changes the state that it loads.
                rows.load_state_dict(deepcopy(state["begin"]))
            iterator = iter(rows)
            block = state["block"]
            while block_rows := list(islice(iterator, BLOCK_ROWS)):
                generator = np.random.default_rng([self._seed, piece, block])
                order = generator.permutation(len(block_rows)).tolist()
                for taken in range(state["taken"], len(order)):
                    index = order[taken]
                    self._state = {**state, "taken": taken + 1}
                    row = block_rows[index]
                    if not isinstance(row, SourceRow):  # a row of the hub, without a position
                        row_number = block * BLOCK_ROWS + index
                        where = f"row {row_number} of shard {piece} (both from 0)"
                        position = {"shard": piece, "row": row_number}
                        row = hub_row(row, rows.features, where, position)
                    yield row
                block += 1
                begin = rows.state_dict()
                state = {"piece": number, "block": block, "taken": 0, "begin": begin}
            state = {"piece": number + 1, "block": 0, "taken": 0, "begin": None}
