"""Documents: one worker's rows that have content, of one data set or several, in a fixed order.

The documents can continue from any state that they have reported. Rows without content are not
documents, and are counted. A row that cannot be used (not JSON, no such column, no text in it) is
skipped and counted, or ends the run with a message that gives its position. sources.py opens the
data sets, and rows.py reads their rows.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

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
from activation_extraction.text.sources import Rows, ShuffledRows
from activation_extraction.text.structs import as_structs

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
        skipped_rows: Number of rows before this one that were skipped.
        empty_rows: Number of rows before this one that have no content.
    """

    content: Content
    doc_id: DocId
    row: dict[str, Any]
    where: str
    skipped_rows: int
    empty_rows: int
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class RowCounts:
    """Counts the rows of a worker that give no document: skipped ones, and those without text.

    skip_bad_rows: whether rows that cannot be used are skipped.
    """

    skip_bad_rows: bool = False
    skipped: int = 0
    empty: int = 0

    def reject(self, where: str, why: object) -> None:
        """Counts a row that cannot be used. Raises RunError unless such rows are skipped."""
        if not self.skip_bad_rows:
            cause = why if isinstance(why, Exception) else None
            told = f"a row cannot be used: {where}: {why}"
            raise RunError(told, remedy=SKIP, recurs=True) from cause
        self.skipped += 1
        level = logging.WARNING if self.skipped <= LOGGED_ROWS else logging.DEBUG
        log.log(level, "skipped a row: %s: %s", where, why)


class DocumentStream:
    """The documents of one worker in one data set, in an order that never changes.

    leave: is called with a list of the last row of a file, as samples have it, before a row of
    another file is read and at the end. shuffle: a seed; None for the order of the data set.
    source: its name in a mixture.

    Every row belongs to exactly one worker, and a machine's rows do not depend on how many hosts
    any machine has. If there are enough pieces (files or Parquet row groups), machines take whole
    pieces, and so do the hosts of a machine; otherwise those that share a piece take turns at its
    rows.
    """

    def __init__(
        self,
        dataset: Rows,
        form: RowForm,
        worker: Worker | None = None,
        counts: RowCounts | None = None,
        leave: Callable[[Sequence[Mapping[str, Any]]], None] = lambda rows: None,
        shuffle: int | None = None,
        source: str | None = None,
    ) -> None:
        self.worker = worker or Worker()
        self._dataset = dataset
        self._turn, self._turns = 0, 1  # row n of the pieces is this worker's if n % turns == turn
        self._share = ""  # which of how many groups of pieces it reads
        self._take_share(self.worker.machine, self.worker.machines)
        self._take_share(self.worker.host, self.worker.hosts)
        self._ordered = self._dataset if shuffle is None else ShuffledRows(self._dataset, shuffle)
        self._form = form
        self.counts = counts or RowCounts()
        self._leave = leave
        self._row: Mapping[str, Any] = {}  # the last one of this worker
        self._source = {} if source is None else {"source": source}
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
        counts = {"skipped": self.counts.skipped, "empty": self.counts.empty}
        return {"rows": self._rows, **counts, "dataset": self._position}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Makes the next iteration continue from where `state` was taken."""
        # A copy: the data set changes the state that it loads.
        self._rows, self._position = state["rows"], deepcopy(state["dataset"])
        self.counts.skipped, self.counts.empty = state["skipped"], state["empty"]

    def __iter__(self) -> Iterator[Document | None]:
        """Yields one item per row of this worker: None if the row is skipped or has no content.

        Raises RunError when reading fails, and for a row that cannot be used.
        """
        if self._position is not None:
            self._ordered.load_state_dict(self._position)
        rows = iter(self._ordered)
        while True:
            try:
                row = next(rows)
                self._position = self._ordered.state_dict()
            except StopIteration:
                self._go_on_to({})
                return
            except RunError as error:
                why = f"reading the data set failed: {error}"
                raise reworded(error, why, RunError) from error
            except Exception as error:  # whatever the hub or a format of its files may raise
                why = f"reading the data set failed after row {self._rows}: {one_line(error)}"
                raise RunError(why) from error
            mine = self._rows % self._turns == self._turn
            self._rows += 1
            if mine:
                yield self._document(row)

    def _go_on_to(self, row: Mapping[str, Any]) -> None:
        """Leaves the file of the row before, unless this one comes from the same file."""
        if "file" in self._row and self._row["file"] != row.get("file"):
            self._leave([self._row])
        self._row = row

    def _document(self, row: SourceRow | dict[str, Any]) -> Document | None:
        """Returns the document in the row that was read last; None if there is none."""
        if not isinstance(row, SourceRow):
            number = self._rows - 1
            own_id = f", id {row['id']!r:.80}" if "id" in row else ""
            whose = "the data set" if self.worker == Worker() else "the rows that this host reads"
            where = f"row {number} (from 0) of {whose}{own_id}"
            row = SourceRow(
                where, {"row": number}, partial(as_structs, row, self._dataset.features)
            )
        self._go_on_to(row.row)
        if "file" not in row.row and self._share:
            row = replace(row, row={"share": self._share, **row.row})
        form, counts = self._form, self.counts
        try:
            with activity(f"{form.activity} {row.where}"):
                columns = row.read()
                content = form.content_of(columns)
            if content is None:
                counts.empty += 1
                return None
            doc_id, kept = form.id_of(columns), form.kept_of(columns)
        except (UnusableRowError, RecursionError) as error:  # there are too many levels of lists
            counts.reject(row.where, error)
            return None
        position = {**self._source, **row.row}
        return Document(content, doc_id, position, row.where, counts.skipped, counts.empty, kept)


class Mixture:
    """The documents of one worker in several data sets, with the methods of a DocumentStream.

    The next one comes from the source that is furthest behind its weight. So every beginning has
    the shares of the weights, but for a document or so, and nothing is random. A source that is
    used up ends, and the others go on in their proportions.

    streams: of each data set, all with the same worker and counts. names: for messages. weights:
    positive, in documents; rows without content do not count.
    """

    def __init__(
        self, streams: Sequence[DocumentStream], names: Sequence[str], weights: Sequence[float]
    ) -> None:
        self.worker = streams[0].worker
        self.counts: RowCounts = streams[0].counts
        self._streams = streams
        self._names = names
        self._weights = weights
        self._given = [0] * len(streams)

    def state(self) -> dict[str, Any]:
        return {"given": list(self._given), "streams": [each.state() for each in self._streams]}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._given = list(state["given"])
        for stream, own in zip(self._streams, state["streams"], strict=True):
            stream.restore(own)

    def __iter__(self) -> Iterator[Document | None]:
        rows = {number: iter(stream) for number, stream in enumerate(self._streams)}
        while rows:
            number = min(rows, key=lambda n: (self._given[n] + 0.5) / self._weights[n])
            try:
                document = next(rows[number])
            except StopIteration:
                del rows[number]
                if rows:
                    log.warning(
                        "--mix: %s has no more than %s for this host; the others continue",
                        self._names[number],
                        counted(self._given[number], "document"),
                    )
                continue
            self._given[number] += document is not None
            yield document


Documents = DocumentStream | Mixture


def check_dataset(dataset: Rows, form: RowForm, skip_bad_rows: bool = False) -> None:
    """Raises InputError unless the first row can be used.

    With `skip_bad_rows`, one of the first CHECKED_ROWS rows is enough.
    """
    counts = RowCounts(skip_bad_rows)
    stream = DocumentStream(dataset, form, counts=counts)
    read = 0
    try:
        with hub_requests("the data set"):
            for read, _ in enumerate(islice(stream, CHECKED_ROWS), start=1):
                if read > counts.skipped:
                    return
    except RunError as error:
        if isinstance(error.__cause__, ColumnError):  # skipping would skip every row
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
