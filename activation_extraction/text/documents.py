"""Documents: the rows with content that a worker reads from one or several data sets, in order.

Reading starts from a state and yields the state after each row, from which reading can start again.
A row without content has no document. A row that cannot be used, for example because it is not JSON
or lacks a column, is skipped or ends the run with a message that names its position. Rows without a
document are yielded as well, because samples.py counts them. sources.py opens the data sets, and
rows.py reads their rows.
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

# A data set of the hub with fewer pieces (Parquet files) per share is split into row groups, to
# make the shares more even. The pieces of local Parquet files are always row groups.
PIECES_PER_SHARE = 16
CHECKED_ROWS = 1000  # at least one of this many rows at the start must be usable
LOGGED_ROWS = 10  # the number of skipped rows to warn about, since there may be millions
SKIP = "add --skip_bad_rows (and leave out --overwrite) to skip such rows and continue"


@dataclass(frozen=True)
class Document:
    """A row with content.

    Attributes:
        content: Text, conversation or token ids of the row.
        doc_id: Id that the row has in the data set (see `SampleFacts`).
        row: Position of the row, as it is stored with each sample (see `SampleFacts`).
        where: Position of the row in words, for messages.
        columns: Columns of the row that are stored with each sample (see `SampleFacts`).
    """

    content: Content
    doc_id: DocId
    row: dict[str, Any]
    where: str
    columns: Mapping[str, Any] = field(default_factory=dict)


class ReadRow(NamedTuple):
    """A row that a worker has read.

    Attributes:
        document: Document of the row. None if the row has no content or is skipped.
        problem: Position of the row and the reason why it is skipped. "" for any other row.
        state: State of the documents after the row, a JSON object. It does not contain the counts
            of skipped and empty rows, which `with_counts` adds.
    """

    document: Document | None
    problem: str
    state: dict[str, Any]


class RowCounts(NamedTuple):
    """Counts of rows without samples, from the beginning of a worker's data.

    Attributes:
        skipped: Number of rows that could not be used.
        empty: Number of rows without a single token.
    """

    skipped: int = 0
    empty: int = 0


def with_counts(state: Mapping[str, Any], counts: RowCounts) -> dict[str, Any]:
    """Adds counts to a state of the documents, in the form in which `Mark.stream` stores it.

    Args:
        state: A state of the documents, with other counts or none.
        counts: The counts of the rows before this state. In the state of a mixture, the state of
            each data set gets the counts for all data sets together.
    """
    if "streams" in state:
        return {**state, "streams": [with_counts(stream, counts) for stream in state["streams"]]}
    return {**state, **counts._asdict()}


def counts_in(stream: Mapping[str, Any]) -> RowCounts:
    """Returns the counts in a state that `with_counts` has returned."""
    if "streams" in stream:
        return counts_in(stream["streams"][0])
    return RowCounts(stream["skipped"], stream["empty"])


def unusable_row(problem: str) -> RunError:
    """Returns the error that ends a run at a row that cannot be used, without --skip_bad_rows.

    Args:
        problem: The position of the row, and the reason.
    """
    return RunError(f"a row cannot be used: {problem}", remedy=SKIP, recurs=True)


def log_skipped_row(problem: str, before: int) -> None:
    """Logs that a row is skipped: the first LOGGED_ROWS as warnings, later ones for debugging.

    Args:
        problem: The position of the row, and the reason.
        before: The number of rows that this worker skipped before the row.
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
            All rows of the worker, including rows without a document.

        Raises:
            RunError: Reading fails, or a row cannot be used and `skip_bad_rows` is false.
        """
        ...


class DocumentStream:
    """The documents of one worker in one data set (see `Documents`).

    Each row belongs to exactly one worker, and the rows of a machine do not depend on the number of
    hosts of any machine. If there are enough pieces (files or Parquet row groups), machines take
    whole pieces, and so do the hosts of a machine. Otherwise several workers share a piece and take
    turns at its rows.

    A state contains `rows`, the number of rows that were read from the worker's pieces, including
    rows of other workers, and `dataset`, the position in the data set, which is None before the
    first row.
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
            form: The columns to read of each row, and how.
            worker: The worker; None for one that reads all rows.
            skip_bad_rows: Whether to skip rows that cannot be used. Otherwise they end the run.
            leave: A function that is called when the worker has read its last row of a file. Its
                argument is a list with one entry, the position of that row.
            shuffle: The seed of a random order; None for the order of the data set.
            source: The name of the data set in a mixture; None without a mixture.
        """
        self.worker = worker or Worker()
        self.skip_bad_rows = skip_bad_rows
        self._dataset = dataset
        # Row n of the pieces belongs to this worker if n % turns == turn.
        self._turn = 0
        self._turns = 1
        self._share = ""  # the group of pieces that the worker reads, such as "0 of 2"
        self._take_share(self.worker.machine, self.worker.machines)
        self._take_share(self.worker.host, self.worker.hosts)
        self._ordered = self._dataset if shuffle is None else ShuffledRows(self._dataset, shuffle)
        self._form = form
        self._leave = leave
        self._source = {} if source is None else {"source": source}

    def _take_share(self, index: int, count: int) -> None:
        """Narrows the stream to one of several shares of its rows.

        Args:
            index: The number of the share, from 0.
            count: The number of shares.
        """
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
        last_row: Mapping[str, Any] = {}  # the position of this worker's last row
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
            except Exception as error:  # the libraries for hub data sets may raise any type
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
        """Calls `leave` if the worker has read its last row of a file.

        Args:
            last_row: The position of the row that was read last; empty if there is none.
            row: The position of the next row; empty at the end.
        """
        if "file" in last_row and last_row["file"] != row.get("file"):
            self._leave([last_row])

    def _numbered(self, columns: dict[str, Any], number: int) -> SourceRow:
        """Returns a row of a hub data set, whose position is only its number."""
        whose = "the data set" if self.worker == Worker() else "the rows that this host reads"
        where = f"row {number} (from 0) of {whose}"
        return hub_row(columns, self._dataset.features, where, {"row": number})

    def _document_in(self, row: SourceRow) -> tuple[Document | None, str]:
        """Reads the document of a row.

        Returns:
            A tuple of:
                The document; None if the row has no content or is skipped.
                The position of a row that is skipped, and the reason; otherwise "".

        Raises:
            RunError: The row cannot be used and `skip_bad_rows` is false.
        """
        form = self._form
        try:
            with activity(f"{form.activity} {row.where}"):
                columns = row.read()
                content = form.content_of(columns)
            if content is None:
                return None, ""
            doc_id = form.id_of(columns)
            kept = form.kept_of(columns)
        except (UnusableRowError, RecursionError) as error:  # lists may be nested too deeply
            problem = f"{row.where}: {error}"
            if not self.skip_bad_rows:
                raise unusable_row(problem) from error
            return None, problem
        share = {"share": self._share} if self._share and "file" not in row.row else {}
        origin = {**self._source, **share, **row.row}
        return Document(content, doc_id, origin, row.where, kept), ""


class Mixture:
    """The documents of one worker in several data sets (see `Documents`).

    The next document comes from the data set that is furthest behind its weight, without a random
    choice. So the shares of the data sets follow the weights at any time, up to about one document.
    If a data set has no more rows, the others continue in their proportions.

    A state contains `given`, the number of documents from each data set, and `streams`, the state
    of each data set.
    """

    def __init__(
        self, streams: Sequence[DocumentStream], names: Sequence[str], weights: Sequence[float]
    ) -> None:
        """Mixes data sets.

        Args:
            streams: The documents of each data set, all for the same worker.
            names: The names of the data sets, for messages.
            weights: The weights of the data sets, positive. They apply to numbers of documents;
                rows without content do not count.
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
        counts = list(state["given"])
        states = list(state["streams"])
        rows = {number: stream.read(states[number]) for number, stream in enumerate(self._streams)}

        def progress(number: int) -> float:
            """Returns the documents of a data set relative to its weight."""
            return (counts[number] + 0.5) / self._weights[number]

        while rows:
            number = min(rows, key=progress)
            row = next(rows[number], None)
            if row is None:
                del rows[number]
                if rows:
                    log.warning(
                        "--mix: %s has no more than %s for this host; the others continue",
                        self._names[number],
                        counted(counts[number], "document"),
                    )
                continue
            counts[number] += row.document is not None
            states[number] = row.state
            yield row._replace(state={"given": list(counts), "streams": list(states)})


def check_dataset(dataset: Rows, form: RowForm, skip_bad_rows: bool = False) -> None:
    """Checks that the first row of a data set can be used, before anything expensive starts.

    Args:
        dataset: The data set.
        form: The columns to read of each row, and how.
        skip_bad_rows: Whether rows that cannot be used are skipped. If so, it is enough that one of
            the first CHECKED_ROWS rows can be used.

    Raises:
        InputError: The data set is empty, a column is missing, or the rows cannot be used.
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
        if isinstance(error.__cause__, ColumnError):  # --skip_bad_rows would skip all rows
            raise InputError(str(error)) from error
        raise with_remedy(error) from error
    if not skipped:
        raise InputError("the data set is empty: it has no rows; expected at least one with text")
    raise InputError(
        f"--skip_bad_rows: none of the first {counted(skipped, 'row')} can be used; the log above "
        "says why"
    )


def with_remedy(error: RunError) -> InputError:
    """Turns a RunError into an InputError whose message contains the remedy.

    This is for errors of reading that are detected before anything expensive starts.
    """
    return InputError(f"{error}; {error.remedy}" if error.remedy else str(error))
