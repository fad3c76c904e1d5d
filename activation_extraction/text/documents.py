"""Reads the documents of a worker, which are the rows with content in its share of the data.

The rows come from one or several data sets, in a fixed order. A state is a place in this order. It
is a JSON object, which each `Mark` contains as `Mark.stream`, so that a run can continue there.
Reading starts from a state, and yields each row together with the state after the row. A row
without content has no document. A row that cannot be used, for example because it is not JSON or
lacks a column, is skipped with --skip_bad_rows. Without this flag, the row ends the run with a
message that names its position. Rows without a document are yielded as well, because samples.py
counts them. sources.py opens the data sets, and rows.py reads their rows.
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
    RowSchema,
    SourceRow,
    UnusableRowError,
)
from activation_extraction.text.sample_facts import DocId
from activation_extraction.text.sources import Rows, ShuffledRows, hub_row

# If a hub data set has fewer partitions (Parquet files) per share than this number, its files are
# divided into row groups, which makes the shares more even. The partitions of local Parquet files
# are row groups already.
MIN_PARTITIONS_PER_SHARE = 16
# With --skip_bad_rows, at least one of this many first rows of a data set must be usable.
CHECKED_ROWS = 1000
# Only this many skipped rows are logged as warnings, since there may be millions.
LOGGED_ROWS = 10
SKIP_ADVICE = "add --skip_bad_rows (and leave out --overwrite) to skip such rows and continue"


@dataclass(frozen=True)
class Document:
    """A document: the content of a row, with the facts of the row that are stored.

    Attributes:
        content: Text, conversation or token ids of the row.
        doc_id: Id of the row in the data set; None if it has no id.
        row_position_fields: Position of the row in the form that is stored with the row's samples
            (see `SampleFacts.row`).
        location_phrase: Position of the row in words, for messages.
        stored_value_by_column: Values that --keep_columns stores with the samples of the row, JSON
            values by column name.
    """

    content: Content
    doc_id: DocId
    row_position_fields: dict[str, Any]
    location_phrase: str
    stored_value_by_column: Mapping[str, Any] = field(default_factory=dict)


class ReadRow(NamedTuple):
    """A row that a worker has read.

    Attributes:
        document: Document of the row; None if the row has no content or is skipped.
        skip_reason: Position of a skipped row and the reason why it is skipped; "" if the row is
            not skipped.
        document_stream_state: State of the documents after the row, a JSON object from which
            reading can continue with the next row. The counts of skipped and empty rows are
            missing; `with_counts` adds them.
    """

    document: Document | None
    skip_reason: str
    document_stream_state: dict[str, Any]


class RowCounts(NamedTuple):
    """Counts of the rows without samples, from the beginning of a worker's data.

    Attributes:
        skipped: Number of rows that could not be used.
        empty: Number of rows without a single token.
    """

    # These names are also keys in the states, which are stored in `Mark.stream`.
    skipped: int = 0
    empty: int = 0


def with_counts(state: Mapping[str, Any], counts: RowCounts) -> dict[str, Any]:
    """Adds the counts of skipped and empty rows to a state, as `Mark.stream` stores it.

    The state of a `Mixture` contains a state for each data set. All of these get the same counts,
    which are the counts for all data sets together.

    Args:
        state: State from which reading can continue. Counts that it contains are replaced.
        counts: Counts of the rows before this state.

    Returns:
        A new state with the counts.
    """
    if "streams" in state:
        return {
            **state,
            "streams": [with_counts(stream_state, counts) for stream_state in state["streams"]],
        }
    return {**state, **counts._asdict()}


def counts_in(stream: Mapping[str, Any]) -> RowCounts:
    """Returns the counts of skipped and empty rows that `with_counts` has added to a state.

    Args:
        stream: State from which reading can continue, with counts, such as `Mark.stream`.
    """
    if "streams" in stream:
        return counts_in(stream["streams"][0])
    return RowCounts(stream["skipped"], stream["empty"])


def unusable_row(problem: str) -> RunError:
    """Returns an error for a row that cannot be used, which ends a run without --skip_bad_rows.

    Args:
        problem: The position of the row, and the reason why it cannot be used.
    """
    return RunError(f"a row cannot be used: {problem}", remedy=SKIP_ADVICE, is_recurring=True)


def log_skipped_row(problem: str, num_skipped: int) -> None:
    """Logs that a row is skipped.

    The first LOGGED_ROWS skipped rows are logged as warnings. Later rows are logged as debug
    messages, which only --verbose shows.

    Args:
        problem: The position of the row, and the reason why it is skipped.
        num_skipped: The number of rows that this worker skipped before this row.
    """
    skip_log_level = logging.WARNING if num_skipped < LOGGED_ROWS else logging.DEBUG
    log.log(skip_log_level, "skipped a row: %s", problem)


class Documents(Protocol):
    """The documents of one worker, in an order that never changes.

    Attributes:
        worker: Worker that reads the documents.
        skip_bad_rows: Whether rows that cannot be used are skipped. Otherwise they end the run.
    """

    worker: Worker
    skip_bad_rows: bool

    @property
    def beginning(self) -> dict[str, Any]:
        """The state before the first row, a JSON object from which `read` can start."""

    def read(self, state: Mapping[str, Any]) -> Iterator[ReadRow]:
        """Reads the rows of the worker from a place in the data to the end.

        Args:
            state: State, a JSON object that tells at which row reading starts. It is `beginning`,
                `ReadRow.document_stream_state` of the row before it, or `Mark.stream` of a stored
                mark.

        Yields:
            The rows of the worker, including rows without a document.

        Raises:
            RunError: If reading fails, or if a row cannot be used and `skip_bad_rows` is false.
        """
        ...


class DocumentStream:
    """The documents of one worker in one data set (see `Documents`).

    Each row belongs to exactly one worker, and the rows of a machine do not depend on the number of
    hosts of any machine. If there are enough partitions (files or Parquet row groups), each machine
    reads whole partitions, and so does each host of a machine. Otherwise several workers read the
    same partitions, and the rows belong to them in turn.

    A state is a JSON object from which reading can continue. It has two keys. `rows` is the number
    of rows that were read from the worker's partitions, including rows of other workers. `dataset`
    is the state of the data set, as `Rows.state_dict` returns it; None before the first row.
    """

    def __init__(
        self,
        dataset: Rows,
        schema: RowSchema,
        worker: Worker | None = None,
        skip_bad_rows: bool = False,
        file_end_callback: Callable[[Sequence[Mapping[str, Any]]], None] = lambda rows: None,
        shuffle: int | None = None,
        source: str | None = None,
    ) -> None:
        """Selects the worker's share of a data set.

        Args:
            dataset: The data set.
            schema: The columns to read of each row, and the `Reader`s of the row's content.
            worker: The worker; None for a worker that reads all rows.
            skip_bad_rows: Whether to skip rows that cannot be used. Otherwise they end the run.
            file_end_callback: A function that is called when the worker has read its last row of a
                file, for example to check that the file has not changed. Its argument is a list
                with one element, the position of this row.
            shuffle: The seed of a random order of the rows; None for the order of the data set.
            source: The name of the data set in a mixture; None without a mixture.
        """
        self.worker = worker or Worker()
        self.skip_bad_rows = skip_bad_rows
        self._dataset = dataset
        # The workers that read the same partitions take turns. Row number n of these partitions
        # belongs to this worker if
        # n % _num_workers_sharing_partitions == _index_among_workers_sharing_partitions.
        self._index_among_workers_sharing_partitions = 0
        self._num_workers_sharing_partitions = 1
        # The subset of partitions that the worker reads, such as "0 of 2": its number, counted from
        # 0, and the number of subsets. "" if the worker reads all partitions.
        self._name_of_partition_subset = ""
        self._take_share(self.worker.machine_number, self.worker.num_machines)
        self._take_share(self.worker.host_number, self.worker.num_hosts)
        self._row_stream: Rows | ShuffledRows = self._dataset
        if shuffle is not None:
            self._row_stream = ShuffledRows(self._dataset, shuffle)
        self._row_schema = schema
        self._file_end_callback = file_end_callback
        # These fields are added to the stored position of each row. In a mixture, the only field is
        # the name of the data set; otherwise there are none.
        self._common_row_position_fields = {} if source is None else {"source": source}

    def _take_share(self, share_index: int, num_shares: int) -> None:
        """Divides the rows of the stream into shares, and keeps only one of the shares.

        A share consists of whole partitions (files or Parquet row groups). If there are fewer
        partitions than shares, the rows of a partition belong to several shares in turn.

        Args:
            share_index: The number of the share that is kept, counted from 0.
            num_shares: The number of shares.
        """
        if num_shares > 1 and self._dataset.num_shards < MIN_PARTITIONS_PER_SHARE * num_shares:
            self._dataset = self._dataset.reshard()
        num_subsets = min(self._dataset.num_shards, num_shares)
        subset_index = share_index % num_subsets
        self._dataset = self._dataset.shard(num_shards=num_subsets, index=subset_index)
        self._index_among_workers_sharing_partitions += self._num_workers_sharing_partitions * (
            share_index // num_subsets
        )
        share_indices_of_subset = range(subset_index, num_shares, num_subsets)
        self._num_workers_sharing_partitions *= len(share_indices_of_subset)
        if num_subsets > 1:
            # `__init__` calls this method twice: for the share of the machine, and for the share of
            # the host. If the first call has named a subset of the partitions, the second call
            # selects a part of this subset, so both names are needed.
            subset_names_outer_to_inner = (
                self._name_of_partition_subset,
                f"{subset_index} of {num_subsets}",
            )
            self._name_of_partition_subset = ", ".join(filter(None, subset_names_outer_to_inner))

    @property
    def beginning(self) -> dict[str, Any]:
        """The state before the first row, from which `read` can start."""
        return {"rows": 0, "dataset": None}

    def read(self, state: Mapping[str, Any]) -> Iterator[ReadRow]:
        """Yields the rows of the worker, each with the state after it (see `Documents`).

        Args:
            state: The state before the first row to read, a JSON object with the keys `rows` and
                `dataset` (see `DocumentStream`).
        """
        row_number: int = state["rows"]
        if state["dataset"] is not None:
            # The data set modifies the object from which it loads its state, so it gets a copy.
            self._row_stream.load_state_dict(deepcopy(state["dataset"]))
        row_iterator = iter(self._row_stream)
        position_fields_of_last_row: Mapping[str, Any] = {}  # empty before this worker's first row
        while True:
            try:
                stream_row = next(row_iterator)
                row_stream_state = self._row_stream.state_dict()
            except StopIteration:
                self._leave_file(position_fields_of_last_row, {})
                return
            except RunError as error:
                error_message = f"reading the data set failed: {error}"
                raise reworded(error, error_message, RunError) from error
            except Exception as error:  # the libraries for hub data sets may raise any exception
                error_message = (
                    f"reading the data set failed after row {row_number}: {one_line(error)}"
                )
                raise RunError(error_message) from error
            is_row_of_worker = (
                row_number % self._num_workers_sharing_partitions
                == self._index_among_workers_sharing_partitions
            )
            if is_row_of_worker:
                source_row = self._as_source_row(stream_row, row_number)
                self._leave_file(position_fields_of_last_row, source_row.row_position_fields)
                position_fields_of_last_row = source_row.row_position_fields
            row_number += 1
            if is_row_of_worker:
                document, skip_reason = self._document_in(source_row)
                state_after_row = {"rows": row_number, "dataset": row_stream_state}
                yield ReadRow(document, skip_reason, state_after_row)

    def _leave_file(self, last: Mapping[str, Any], following: Mapping[str, Any]) -> None:
        """Calls `file_end_callback` if the worker has read its last row of a file.

        The worker has read its last row of a file if its next row is in another file, or if it has
        no next row.

        Args:
            last: The position of the worker's row that was read last; empty if no row was read.
            following: The position of the worker's next row; empty at the end of the data.
        """
        if "file" in last and last["file"] != following.get("file"):
            self._file_end_callback([last])

    def _as_source_row(self, stream_row: SourceRow | dict[str, Any], row_number: int) -> SourceRow:
        """Returns a row of the data set with its position.

        Args:
            stream_row: The row as the data set yields it. A SourceRow, which has a position, is
                returned as it is. A dict contains the columns of a row of a hub data set by name.
                The position of this row is `row_number`.
            row_number: The number of the row among all rows of the worker's partitions, counted
                from 0. Rows of other workers in these partitions count as well.
        """
        if isinstance(stream_row, SourceRow):
            return stream_row
        counted_rows_phrase = (
            "the data set" if self.worker == Worker() else "the rows that this host reads"
        )
        location_phrase = f"row {row_number} (from 0) of {counted_rows_phrase}"
        return hub_row(stream_row, self._dataset.features, location_phrase, {"row": row_number})

    def _document_in(self, row: SourceRow) -> tuple[Document | None, str]:
        """Reads the document of a row.

        Returns:
            A tuple of:
                The document; None if the row has no content or is skipped.
                The position of a skipped row and the reason why it is skipped; "" if the row is
                not skipped.

        Raises:
            RunError: If the row cannot be used and `skip_bad_rows` is false.
        """
        row_schema = self._row_schema
        try:
            with activity(f"{row_schema.activity_phrase} {row.location_phrase}"):
                value_by_column = row.read_columns()
                row_content = row_schema.content_of(value_by_column)
            if row_content is None:
                return None, ""
            doc_id = row_schema.id_of(value_by_column)
            stored_value_by_column = row_schema.stored_values_of(value_by_column)
        # A RecursionError means that the lists in a column are nested too deeply.
        except (UnusableRowError, RecursionError) as error:
            skip_reason = f"{row.location_phrase}: {error}"
            if not self.skip_bad_rows:
                raise unusable_row(skip_reason) from error
            return None, skip_reason
        row_position_fields = {**self._common_row_position_fields}
        # A row of a hub data set is counted within the partitions that the worker reads, so its
        # position must also name these partitions.
        if self._name_of_partition_subset and "file" not in row.row_position_fields:
            row_position_fields["share"] = self._name_of_partition_subset
        row_position_fields |= row.row_position_fields
        return Document(
            row_content, doc_id, row_position_fields, row.location_phrase, stored_value_by_column
        ), ""


class Mixture:
    """The documents of one worker in several data sets (see `Documents`).

    The next document comes from the data set that has yielded the fewest documents relative to its
    weight. There is no random choice. So the numbers of documents are proportional to the weights
    at any time, up to about one document. If a data set has no more rows, the others continue in
    the proportions of their weights.

    A state is a JSON object from which reading can continue. It has two keys. `given` lists the
    number of documents that each data set has yielded. `streams` lists the state of each data set
    (see `DocumentStream`).
    """

    def __init__(
        self, streams: Sequence[DocumentStream], names: Sequence[str], weights: Sequence[float]
    ) -> None:
        """Mixes the documents of several data sets.

        Args:
            streams: The documents of each data set, all for the same worker.
            names: The names of the data sets, for messages.
            weights: The positive weights of the data sets. Numbers of documents are proportional to
                the weights; rows without content do not count.
        """
        self.worker = streams[0].worker
        self.skip_bad_rows = streams[0].skip_bad_rows
        self._document_streams = streams
        self._dataset_names = names
        self._dataset_weights = weights

    @property
    def beginning(self) -> dict[str, Any]:
        """The state before the first row, from which `read` can start."""
        stream_states = [document_stream.beginning for document_stream in self._document_streams]
        return {"given": [0] * len(stream_states), "streams": stream_states}

    def read(self, state: Mapping[str, Any]) -> Iterator[ReadRow]:
        """Yields the rows of the worker, each with the state after it (see `Documents`).

        Args:
            state: The state before the first row to read, a JSON object with the keys `given` and
                `streams` (see `Mixture`).
        """
        given_document_counts_of_datasets = list(state["given"])
        stream_states = list(state["streams"])
        # Index of each data set that may have more rows -> iterator over the rows of the data set.
        rows_by_dataset_index = {
            dataset_index: document_stream.read(stream_states[dataset_index])
            for dataset_index, document_stream in enumerate(self._document_streams)
        }

        def relative_count(dataset_index: int) -> float:
            """Returns the number of documents that a data set has yielded, divided by its weight.

            Half a document is added to the number before the division, so that the data set with
            the largest weight comes first when no data set has yielded a document.

            Args:
                dataset_index: Index of the data set.
            """
            num_documents = given_document_counts_of_datasets[dataset_index]
            return (num_documents + 0.5) / self._dataset_weights[dataset_index]

        while rows_by_dataset_index:
            dataset_index = min(rows_by_dataset_index, key=relative_count)
            document_row = next(rows_by_dataset_index[dataset_index], None)
            if document_row is None:
                del rows_by_dataset_index[dataset_index]
                if rows_by_dataset_index:
                    log.warning(
                        "--mix: %s has no more than %s for this host; the others continue",
                        self._dataset_names[dataset_index],
                        counted(given_document_counts_of_datasets[dataset_index], "document"),
                    )
                continue
            given_document_counts_of_datasets[dataset_index] += document_row.document is not None
            stream_states[dataset_index] = document_row.document_stream_state
            yield document_row._replace(
                document_stream_state={
                    "given": list(given_document_counts_of_datasets),
                    "streams": list(stream_states),
                }
            )


def check_dataset(dataset: Rows, schema: RowSchema, skip_bad_rows: bool = False) -> None:
    """Checks that the first row of a data set can be used, before anything expensive starts.

    Args:
        dataset: The data set.
        schema: The columns to read of each row, and the `Reader`s of the row's content.
        skip_bad_rows: Whether rows that cannot be used are skipped. If so, it is enough
            that one of the first CHECKED_ROWS rows can be used.

    Raises:
        InputError: If the data set is empty, if a column is missing, or if the rows cannot be used.
    """
    document_stream = DocumentStream(dataset, schema, skip_bad_rows=skip_bad_rows)
    num_skipped_rows = 0
    try:
        with hub_requests("the data set"):
            for document_row in islice(
                document_stream.read(document_stream.beginning), CHECKED_ROWS
            ):
                if not document_row.skip_reason:
                    return
                log_skipped_row(document_row.skip_reason, num_skipped_rows)
                num_skipped_rows += 1
    except RunError as error:
        # If a column is missing, all rows are unusable. So the message must not recommend
        # --skip_bad_rows, which would skip all of them.
        if isinstance(error.__cause__, ColumnError):
            raise InputError(str(error)) from error
        raise with_remedy(error) from error
    if not num_skipped_rows:
        raise InputError("the data set is empty: it has no rows; expected at least one with text")
    raise InputError(
        f"--skip_bad_rows: none of the first {counted(num_skipped_rows, 'row')} can be used; the "
        "log above says why"
    )


def with_remedy(error: RunError) -> InputError:
    """Turns a RunError into an InputError whose message ends with the remedy of the error.

    This function is for errors of reading that are detected before anything expensive starts.

    Args:
        error: The error. Its `remedy` tells the user what to do. If `remedy` is None, the message
            of the InputError is the message of `error`.
    """
    return InputError(f"{error}; {error.remedy}" if error.remedy else str(error))
