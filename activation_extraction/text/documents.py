"""Documents: one worker's rows that have text, in a fixed order.

The stream can continue from any state that it has reported. Rows without text are not documents,
and are counted. ARC-AGI rows are rendered by `arc_prompt`. A row that cannot be used (not JSON, no
such column, no text in it) is skipped and counted, or ends the run with a message that gives its
position. sources.py opens the data sets.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import datasets

from activation_extraction.common.errors import InputError, RunError, near_miss, one_line
from activation_extraction.common.log import log
from activation_extraction.common.retries import hub_requests
from activation_extraction.common.visible import counted
from activation_extraction.text.batch import Worker
from activation_extraction.text.sources import FileRow, MissingColumnError, UnusableRowError

# With fewer pieces per share than this, Parquet files are split into row groups, for even shares.
PIECES_PER_SHARE = 16
CHECKED_ROWS = 1000  # at least one of this many rows at the start must be usable
LOGGED_ROWS = 10  # how many skipped rows are logged: there may be millions
SKIP = "add --skip_bad_rows (and leave out --overwrite) to skip such rows and continue"

DocId = str | int | float | None


@dataclass(frozen=True)
class Document:
    """One row with non-empty text; `doc_id` is the row's own `id`, None if it has none.

    row: where it comes from: {"file", "line"} (from 1) of JSON Lines; {"file", "row_group", "row"}
    (from 0) of Parquet; {"row"} (from 0) of a hub data set, with {"share"} if it is counted within
    one share of several. where: the same in words. skipped_rows, empty_rows: how many rows before
    it were skipped or empty.
    """

    text: str
    doc_id: DocId
    row: dict[str, Any]
    where: str
    skipped_rows: int
    empty_rows: int


def arc_prompt(row: dict[str, Any]) -> str:
    """Returns the prompt for an ARC-AGI task: its training pairs, then each test input to solve.

    Each row of a grid is one line, with spaces between the cells, below a line "Input:" or
    "Output:". The outputs of the tests are left out.
    """

    def lines(grid: list[list[int]]) -> str:
        return "\n".join(" ".join(map(str, row)) for row in grid)

    examples = [
        f"Example {n}\nInput:\n{lines(pair['input'])}\nOutput:\n{lines(pair['output'])}\n"
        for n, pair in enumerate(row["train"], start=1)
    ]
    tests = [
        f"Test {n}\nInput:\n{lines(pair['input'])}\nOutput:\n"
        for n, pair in enumerate(row["test"], start=1)
    ]
    return "\n".join(examples + tests)


class DocumentStream:
    """The documents of one worker, in order.

    `skipped_rows` counts the rows that were skipped, and `empty_rows` those without text. `reads`
    is called with the name of every file that a row is read from.

    Every row belongs to exactly one worker, and a machine's rows do not depend on how many hosts
    any machine has. If there are enough pieces (files or Parquet row groups), machines take whole
    pieces, and so do the hosts of a machine; otherwise those that share a piece take turns at its
    rows.
    """

    def __init__(
        self,
        dataset: datasets.IterableDataset,
        text_column: str,
        worker: Worker | None = None,
        skip_bad_rows: bool = False,
        reads: Callable[[str], None] = lambda name: None,
    ) -> None:
        self.worker = worker or Worker()
        self._dataset = dataset
        self._turn, self._turns = 0, 1  # row n of the pieces is this worker's if n % turns == turn
        self._share = ""  # which of how many groups of pieces it reads
        self._take_share(self.worker.machine, self.worker.machines)
        self._take_share(self.worker.host, self.worker.hosts)
        self._reads = reads
        self._text_column = text_column
        self._skip_bad_rows = skip_bad_rows
        self.skipped_rows = self.empty_rows = 0
        self._rows = 0  # rows read from the pieces, including those of other workers
        self._position: dict[str, Any] | None = None  # the data set's; None before the first row

    def _take_share(self, index: int, count: int) -> None:
        """Narrows the stream to share `index` out of `count` shares."""
        if count > 1 and self._dataset.num_shards < PIECES_PER_SHARE * count:
            self._dataset = self._dataset.reshard()
        groups = min(self._dataset.num_shards, count)
        group = index % groups
        self._dataset = self._dataset.shard(num_shards=groups, index=group)
        self._turn += self._turns * (index // groups)
        self._turns *= len(range(group, count, groups))
        if groups > 1:
            self._share = ", ".join(filter(None, (self._share, f"{group} of {groups}")))

    def state(self) -> dict[str, Any]:
        """Returns the position after the row that was read last, as JSON."""
        counts = {"rows": self._rows, "skipped": self.skipped_rows, "empty": self.empty_rows}
        return {**counts, "dataset": self._position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue from where `state` was taken."""
        # A copy: the data set changes the state that it loads.
        self._rows, self._position = state["rows"], deepcopy(state["dataset"])
        self.skipped_rows, self.empty_rows = state["skipped"], state.get("empty", 0)

    def __iter__(self) -> Iterator[Document | None]:
        """Yields one item per row of this worker: None if the row is skipped or has no text.

        Raises RunError when reading fails, and for a row that cannot be used.
        """
        if self._position is not None:
            self._dataset.load_state_dict(self._position)
        rows = iter(self._dataset)
        while True:
            try:
                row = next(rows)
                self._position = self._dataset.state_dict()
            except StopIteration:
                return
            except Exception as error:  # whatever a file system or a file format may raise
                remedy = error.remedy if isinstance(error, RunError) else None
                where = "" if isinstance(error, RunError) else f" after row {self._rows}"
                raise RunError(
                    f"reading the data set failed{where}: {one_line(error)}", remedy=remedy
                ) from error
            mine = self._rows % self._turns == self._turn
            self._rows += 1
            if mine:
                yield self._document(row)

    def _document(self, row: FileRow | dict[str, Any]) -> Document | None:
        """Returns the document in the row that was read last; None if there is none."""
        if isinstance(row, FileRow):
            self._reads(row.row["file"])
        else:
            number = self._rows - 1
            whose = "the data set" if self.worker == Worker() else "the rows that this host reads"
            own_id = f", id {row['id']!r:.80}" if "id" in row else ""
            share = {"share": self._share} if self._share else {}
            position = {**share, "row": number}
            row = FileRow(f"row {number} (from 0) of {whose}{own_id}", position, partial(dict, row))
        try:
            columns = row.read()
            text = _text_of(columns, self._text_column)
        except UnusableRowError as error:
            self.reject(row.where, error)
            return None
        if text is None or not text.strip():
            self.empty_rows += 1
            return None
        doc_id = columns.get("id")
        if doc_id is not None and type(doc_id) not in (str, int, float):
            doc_id = str(doc_id)  # a date, a decimal or the like: shards hold only plain values
        counts = self.skipped_rows, self.empty_rows
        return Document(_valid(text), doc_id, row.row, row.where, *counts)

    def reject(self, where: str, why: object) -> None:
        """Counts a row that cannot be used. Raises RunError unless such rows are skipped."""
        if not self._skip_bad_rows:
            cause = why if isinstance(why, UnusableRowError) else None
            raise RunError(f"a row cannot be used: {where}: {why}", remedy=SKIP) from cause
        self.skipped_rows += 1
        level = logging.WARNING if self.skipped_rows <= LOGGED_ROWS else logging.DEBUG
        log.log(level, "skipped a row: %s: %s", where, why)


def check_dataset(
    dataset: datasets.IterableDataset, text_column: str, skip_bad_rows: bool = False
) -> None:
    """Raises InputError unless the first row can be used.

    With `skip_bad_rows`, one of the first CHECKED_ROWS rows is enough.
    """
    stream = DocumentStream(dataset, text_column, skip_bad_rows=skip_bad_rows)
    read = 0
    try:
        with hub_requests("the data set"):
            for read, _ in enumerate(islice(stream, CHECKED_ROWS), start=1):
                if read > stream.skipped_rows:
                    return
    except RunError as error:
        if isinstance(error.__cause__, MissingColumnError):  # skipping would skip every row
            raise InputError(str(error)) from error
        raise with_remedy(error) from error
    if not read:
        raise InputError("the data set is empty: it has no rows; expected at least one with text")
    raise InputError(
        f"--skip_bad_rows: none of the first {counted(read, 'row')} can be used; the log above "
        "says why"
    )


def with_remedy(error: RunError) -> InputError:
    """Returns the error as an InputError: it was found before anything expensive started."""
    return InputError(f"{error}; {error.remedy}" if error.remedy else str(error))


def _text_of(row: dict[str, Any], column: str) -> str | None:
    """The row's text, or its ARC-AGI task as a prompt. Raises UnusableRowError without either."""
    if column in row:
        text = row[column]
        if text is not None and not isinstance(text, str):
            raise UnusableRowError(
                f"--text_column {column}: expected text, found {type(text).__name__} {text!r:.40}"
            )
        return text
    if isinstance(row.get("train"), list) and isinstance(row.get("test"), list):
        try:
            return arc_prompt(row)
        except (KeyError, TypeError) as error:
            raise UnusableRowError(
                f"it has ARC-AGI columns but no grids in them: {error!r}"
            ) from error
    raise MissingColumnError(
        f"--text_column {column}: no such column{near_miss(column, row)}; the columns are "
        f"{', '.join(row)}"
    )


def _valid(text: str) -> str:
    """The text with lone surrogates replaced: JSON may contain them, but UTF-8 may not."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
