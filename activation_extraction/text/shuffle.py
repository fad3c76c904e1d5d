"""Rows in a random order, which is the same when a run continues.

The pieces of a data set (files, or row groups of Parquet files) come in a random order. Within a
piece, every block of BLOCK_ROWS rows is permuted. Both depend on the seed and the piece alone. A
position is the state of the piece at the beginning of a block, and how many rows of it were taken;
so the rows of one block are read again. The shuffle buffer of `datasets` cannot be restored.
"""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import partial
from itertools import islice
from typing import Any

import datasets
import numpy as np

from activation_extraction.text.file_rows import FileRow
from activation_extraction.text.rows import as_structs

BLOCK_ROWS = 1024


class ShuffledRows:
    """The rows of a data set in a random order. Its state is read and set like the data set's."""

    def __init__(self, dataset: datasets.IterableDataset, seed: int) -> None:
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

    def __iter__(self) -> Iterator[FileRow]:
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
                    if not isinstance(row, FileRow):  # of the hub; those of files have a position
                        row_number = block * BLOCK_ROWS + at
                        where = f"row {row_number} of shard {piece} (both from 0)"
                        read_row = partial(as_structs, row, rows.features)
                        row = FileRow(where, {"shard": piece, "row": row_number}, read_row)
                    yield row
                block += 1
                begin = rows.state_dict()
                state = {"piece": number, "block": block, "taken": 0, "begin": begin}
            state = {"piece": number + 1, "block": 0, "taken": 0, "begin": None}
