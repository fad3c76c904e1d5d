"""Documents: one worker's rows that have content, of one data set or several, in a fixed order.

Reading begins at a state, and gives the state after every row, from which it can begin again.
Rows without content are no documents. A row that cannot be used (not JSON, no such column, no text
in it) is skipped, or ends the run with a message that gives its position. Both kinds are given as
rows without a document, and counted in samples.py. sources.py opens the data sets, and rows.py
reads their rows.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol

from activation_extraction.common.errors import InputError, RunError, one_line, reworded
from activation_extraction.common.log import activity, log
from activation_extraction.common.retries import hub_requests
from activation_extraction.common.visible import counted
from activation_extraction.text.batch import Worker
from activation_extraction.text.rows import (
    ColumnError,
    Content,
    RowForm,
    SourceRow,
    UnusableRowError,
)
from activation_extraction.text.sample_facts import DocId
from activation_extraction.text.sources import Rows, ShuffledRows, hub_row

# With fewer pieces per share than this, Parquet files of the hub are split into row groups, for
# even shares. Local ones always are.
PIECES_PER_SHARE = 16
CHECKED_ROWS = 1000  # at least one of this many rows at the start must be usable
LOGGED_ROWS = 10  # how many skipped rows are logged: there may be millions
SKIP = "add --skip_bad_rows (and leave out --overwrite) to skip such rows and continue"


@dataclass(frozen=True)
class Document:
    """One row with content.

    Attributes:
        content: Text, conversation or token ids of the row.
        doc_id, row, columns: Facts that every sample of the document has (see `SampleFacts`).
        where: Position of the row in words, for messages.
    """

    content: Content
    doc_id: DocId
    row: dict[str, Any]
    where: str
    columns: Mapping[str, Any] = field(default_factory=dict)


class ReadRow(NamedTuple):
    """A row of a worker that was read.

    Attributes:
        document: Document in the row. None if the row has no content, or is skipped.
        problem: Position of a row that is skipped, and the reason. "" for any other row.
        state: State of the documents after the row, as JSON. It does not count skipped and empty
            rows; `with_counts` adds the counts.
    """

    document: Document | None
    problem: str
    state: dict[str, Any]


class RowCounts(NamedTuple):
    """Counts of the rows, from the beginning of a worker's data, that gave no sample.

    Attributes:
        skipped: Number of rows that could not be used.
        empty: Number of rows without text.
    """

    skipped: int = 0
    empty: int = 0


def with_counts(state: Mapping[str, Any], counts: RowCounts) -> dict[str, Any]:
    """Returns the state of the documents as a mark stores it, in `Mark.stream`.

    Args:
        state: A state of the documents, with other counts or none.
        counts: The counts of rows before this state. In a mixture, each of its data sets gets the
            counts of all of them together.
    """
    if "streams" in state:
        return {**state, "streams": [with_counts(stream, counts) for stream in state["streams"]]}
    return {**state, **counts._asdict()}


def counts_in(stream: Mapping[str, Any]) -> RowCounts:
    """Returns the counts that `with_counts` has added to a state."""
    if "streams" in stream:
        return counts_in(stream["streams"][0])
    return RowCounts(stream["skipped"], stream["empty"])


def unusable_row(problem: str) -> RunError:
    """Returns the error that ends a run at a row that cannot be used and is not to be skipped."""
    return RunError(f"a row cannot be used: {problem}", remedy=SKIP, recurs=True)


def log_skipped_row(problem: str, before: int) -> None:
    """Logs that a row is skipped; the first LOGGED_ROWS of a worker are warnings.

    Args:
        problem: The position of the row, and the reason.
        before: The number of rows that were skipped before it.
    """
    level = logging.WARNING if before < LOGGED_ROWS else logging.DEBUG
    log.log(level, "skipped a row: %s", problem)


class Documents(Protocol):
    """The documents of one worker, in an order that never changes.

    Attributes:
        worker: Worker whose documents these are.
        skip_bad_rows: Whether rows that cannot be used are skipped.
        beginning: State of the documents before the first row.
    """

    worker: Worker
    skip_bad_rows: bool

    @property
    def beginning(self) -> dict[str, Any]: ...

    def read(self, state: Mapping[str, Any]) -> Iterator[ReadRow]:
        """Reads the rows of the worker that come after a state.

        Args:
            state: `beginning`, the state of a ReadRow, or the `stream` of a mark.

        Yields:
            Every row of the worker, also one without a document.

        Raises:
            RunError: Reading fails, or a row cannot be used and is not to be skipped.
        """
        ...


class DocumentStream:
    """The documents of one worker in one data set (see `Documents`).

    Every row belongs to exactly one worker, and a machine's rows do not depend on how many hosts
    any machine has. If there are enough pieces (files or Parquet row groups), machines take whole
    pieces, and so do the hosts of a machine; otherwise those that share a piece take turns at its
    rows.

    A state has `rows`, the number of rows that were read from the pieces, including those of other
    workers, and `dataset`, the position of the data set, which is None before the first row.
    """

    def __init__(
        self,
        dataset: Rows,
        form: RowForm,
        worker: Worker | None = None,
        skip_bad_rows: bool = False,
        leave: Callable[[Sequence[Mapping[str, Any]]], None] = lambda rows: None,
        shuffle: int | None = None,
        source: str | None = None,
    ) -> None:
        """Takes the worker's share of a data set.

        Args:
            dataset: The data set.
            form: What is read of each row.
            worker: The worker; None for one that reads all rows.
            skip_bad_rows: Whether rows that cannot be used are skipped.
            leave: A function that is called before a row of another file is read and at the end,
                with a list that contains the position of the last row of the file.
            shuffle: The seed of a random order; None for the order of the data set.
            source: The name of the data set in a mixture; None without a mixture.
        """
        self.worker = worker or Worker()
        self.skip_bad_rows = skip_bad_rows
        self._dataset = dataset
        self._turn, self._turns = 0, 1  # row n of the pieces is this worker's if n % turns == turn
        self._share = ""  # which of how many groups of pieces it reads
        self._take_share(self.worker.machine, self.worker.machines)
        self._take_share(self.worker.host, self.worker.hosts)
        self._ordered = self._dataset if shuffle is None else ShuffledRows(self._dataset, shuffle)
        self._form = form
        self._leave = leave
        self._source = {} if source is None else {"source": source}

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

    @property
    def beginning(self) -> dict[str, Any]:
        """The state before the first row."""
        return {"rows": 0, "dataset": None}

    def read(self, state: Mapping[str, Any]) -> Iterator[ReadRow]:
        """Reads the rows of the worker that come after a state, as `Documents.read` does."""
        number: int = state["rows"]
        if state["dataset"] is not None:
            # A copy: the data set changes the state that it loads.
            self._ordered.load_state_dict(deepcopy(state["dataset"]))
        rows = iter(self._ordered)
        last_row: Mapping[str, Any] = {}  # of this worker
        while True:
            try:
                raw = next(rows)
                position = self._ordered.state_dict()
            except StopIteration:
                self._leave_file(last_row, {})
                return
            except RunError as error:
                why = f"reading the data set failed: {error}"
                raise reworded(error, why, RunError) from error
            except Exception as error:  # whatever the hub or a format of its files may raise
                why = f"reading the data set failed after row {number}: {one_line(error)}"
                raise RunError(why) from error
            is_own = number % self._turns == self._turn
            if is_own:
                row = raw if isinstance(raw, SourceRow) else self._numbered(raw, number)
                self._leave_file(last_row, row.row)
                last_row = row.row
            number += 1
            if is_own:
                document, problem = self._document_in(row)
                yield ReadRow(document, problem, {"rows": number, "dataset": position})

    def _leave_file(self, last_row: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        """Calls `leave` unless a row comes from the same file as the row that was read last."""
        if "file" in last_row and last_row["file"] != row.get("file"):
            self._leave([last_row])

    def _numbered(self, columns: dict[str, Any], number: int) -> SourceRow:
        """Returns a row of a data set on the hub, which has no position but its number."""
        whose = "the data set" if self.worker == Worker() else "the rows that this host reads"
        where = f"row {number} (from 0) of {whose}"
        return hub_row(columns, self._dataset.features, where, {"row": number})

    def _document_in(self, row: SourceRow) -> tuple[Document | None, str]:
        """Returns the document in a row, None if there is none; and why the row is skipped, or "".

        Raises:
            RunError: The row cannot be used and is not to be skipped.
        """
        form = self._form
        try:
            with activity(f"{form.activity} {row.where}"):
                columns = row.read()
                content = form.content_of(columns)
            if content is None:
                return None, ""
            doc_id, kept = form.id_of(columns), form.kept_of(columns)
        except (UnusableRowError, RecursionError) as error:  # there are too many levels of lists
            problem = f"{row.where}: {error}"
            if not self.skip_bad_rows:
                raise unusable_row(problem) from error
            return None, problem
        share = {"share": self._share} if self._share and "file" not in row.row else {}
        origin = {**self._source, **share, **row.row}
        return Document(content, doc_id, origin, row.where, kept), ""


class Mixture:
    """The documents of one worker in several data sets (see `Documents`).

    The next one comes from the data set that is furthest behind its weight. So every beginning has
    the shares of the weights, but for a document or so, and nothing is random. A data set that is
    used up ends, and the others go on in their proportions.

    A state has `given`, the number of documents that each data set has given, and `streams`, the
    state of each.
    """

    def __init__(
        self, streams: Sequence[DocumentStream], names: Sequence[str], weights: Sequence[float]
    ) -> None:
        """Mixes data sets.

        Args:
            streams: The documents of each data set, of the same worker.
            names: The names of the data sets, for messages.
            weights: The weights of the data sets, positive, in documents. Rows without content do
                not count.
        """
        self.worker = streams[0].worker
        self.skip_bad_rows = streams[0].skip_bad_rows
        self._streams = streams
        self._names = names
        self._weights = weights

    @property
    def beginning(self) -> dict[str, Any]:
        """The state before the first row."""
        streams = [stream.beginning for stream in self._streams]
        return {"given": [0] * len(streams), "streams": streams}

    def read(self, state: Mapping[str, Any]) -> Iterator[ReadRow]:
        """Reads the rows of the worker that come after a state, as `Documents.read` does."""
        given, states = list(state["given"]), list(state["streams"])
        rows = {number: stream.read(states[number]) for number, stream in enumerate(self._streams)}
        while rows:
            number = min(rows, key=lambda n: (given[n] + 0.5) / self._weights[n])
            row = next(rows[number], None)
            if row is None:
                del rows[number]
                if rows:
                    log.warning(
                        "--mix: %s has no more than %s for this host; the others continue",
                        self._names[number],
                        counted(given[number], "document"),
                    )
                continue
            given[number] += row.document is not None
            states[number] = row.state
            yield row._replace(state={"given": list(given), "streams": list(states)})


def check_dataset(dataset: Rows, form: RowForm, skip_bad_rows: bool = False) -> None:
    """Raises InputError unless the first row can be used.

    With `skip_bad_rows`, one of the first CHECKED_ROWS rows is enough.
    """
    stream = DocumentStream(dataset, form, skip_bad_rows=skip_bad_rows)
    skipped = 0
    try:
        with hub_requests("the data set"):
            for row in islice(stream.read(stream.beginning), CHECKED_ROWS):
                if not row.problem:
                    return
                log_skipped_row(row.problem, skipped)
                skipped += 1
    except RunError as error:
        if isinstance(error.__cause__, ColumnError):  # skipping would skip every row
            raise InputError(str(error)) from error
        raise with_remedy(error) from error
    if not skipped:
        raise InputError("the data set is empty: it has no rows; expected at least one with text")
    raise InputError(
        f"--skip_bad_rows: none of the first {counted(skipped, 'row')} can be used; the log above "
        "says why"
    )


def with_remedy(error: RunError) -> InputError:
    """Returns the error as an InputError: it was found before anything expensive started."""
    return InputError(f"{error}; {error.remedy}" if error.remedy else str(error))
