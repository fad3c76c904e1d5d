"""Reads the content, the id and the columns to keep from the columns of a row.

`RowForm` declares which columns these are. A `Reader` reads the content: readers.py has the readers
of text, token ids and ARC-AGI tasks, and chat.py has the reader of conversations. A row that cannot
be used raises `UnusableRowError`; documents.py decides whether to skip the row.
"""

import datetime
import decimal
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from activation_extraction.common.choices import ROLES
from activation_extraction.common.errors import near_miss
from activation_extraction.text.sample_facts import DocId

TEMPLATE = ROLES.index("template")
MAX_COLUMN_BYTES = 2**19  # the largest size of the kept columns of a row as JSON
MAX_LEVELS = 60  # the largest depth of lists and objects in a kept column
MAX_ID_BYTES = 2**18  # the largest size of the id of a row as JSON
# Types of values that are kept as text, because JSON has no such type.
AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)
# Kinds of values in columns, for messages, and the flags that read them.
CONVERSATION, TOKEN_IDS = "a conversation", "token ids"
READING_FLAGS = {CONVERSATION: "messages_column", TOKEN_IDS: "ids_column"}


class UnusableRowError(Exception):
    """A row that cannot be used. The message says why."""


class ColumnError(UnusableRowError):
    """A column that is missing, or that holds values which cannot be used in any row."""


@dataclass(frozen=True)
class SourceRow:
    """A row of a file or of a hub data set, whose columns are not read yet.

    Attributes:
        where: Position of the row in words, for messages.
        row: Position of the row as it is stored with a sample (see `SampleFacts.row`).
        read: Function that returns the columns of the row by name, or raises UnusableRowError.
    """

    where: str
    row: dict[str, Any]
    read: Callable[[], dict[str, Any]]


class Span(NamedTuple):
    """A stretch of a conversation's text with one role; it ends where the next span begins.

    Attributes:
        start: Offset of its first character.
        role: Index of its role in ROLES.
        turn: Number of its turn, from 0.
    """

    start: int
    role: int
    turn: int


@dataclass(frozen=True)
class Content:
    """The content of a row: text, or token ids.

    Attributes:
        text: The text; "" for token ids.
        spans: The roles of a conversation's text, which the spans cover; empty for other content.
        token_ids: Token ids, int32 (tokens,); None for text.
        mask: The token ids that may be kept, bool (tokens,); None for all.
    """

    text: str = ""
    spans: Sequence[Span] = ()
    token_ids: np.ndarray | None = None
    mask: np.ndarray | None = None


class Columns(NamedTuple):
    """The columns that a reader reads.

    Attributes:
        required: Columns that every row must have.
        optional: Columns that are read as well if a row has them.
        ids: Columns that may hold the row's own id. The first one that a row has is its id, unless
            --id_column names another one.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()
    ids: tuple[str, ...] = ("id",)


class Reader(Protocol):
    """Reads the content of rows from certain columns.

    Attributes:
        activity: Description of reading a row, such as "reading". The position of the row follows
            it in messages.
        columns: Columns that are read.
    """

    activity: ClassVar[str]

    @property
    def columns(self) -> Columns: ...

    def can_read(self, row: Mapping[str, Any]) -> bool:
        """Returns whether a row has the columns of this reader's content."""

    def read(self, row: Mapping[str, Any]) -> Content | None:
        """Returns the content of a row; None if it is empty.

        Raises:
            UnusableRowError: If the content cannot be used.
        """


@dataclass(frozen=True)
class RowForm:
    """Declares the columns that are read of each row of a data set.

    Attributes:
        readers: Readers of the content. The first one that can read a row reads it. If no reader
            can read a row, the first one is used, and raises an error.
        id_column: The column of the row's id; None for the id columns of the readers, which a row
            may lack.
        keep_columns: Columns that are stored with the samples of the row.
    """

    readers: tuple[Reader, ...]
    id_column: str | None = None
    keep_columns: tuple[str, ...] = ()

    @property
    def activity(self) -> str:
        """Description of reading a row (see `Reader.activity`)."""
        return self.readers[0].activity

    def columns_among(self, names: Sequence[str]) -> list[str]:
        """Returns the columns of a file that need to be read.

        Args:
            names: The columns of the file.

        Returns:
            The columns in `names` that a reader reads, the id, and the columns to keep. If the
            file lacks required columns, all of `names`, so that the error message can list them.
        """
        always = (*self.keep_columns, *([] if self.id_column is None else [self.id_column]))
        columns = [reader.columns for reader in self.readers]
        if not any({*always, *reader.required} <= set(names) for reader in columns):
            return list(names)
        needed = dict.fromkeys(always)
        for reader in columns:
            needed |= dict.fromkeys((*reader.required, *reader.optional, *reader.ids))
        return [name for name in needed if name in names]

    def content_of(self, row: Mapping[str, Any]) -> Content | None:
        """Returns the content of a row; None if it is empty.

        Raises:
            UnusableRowError: If no reader can use the row.
        """
        able = (reader for reader in self.readers if reader.can_read(row))
        return next(able, self.readers[0]).read(row)

    def id_of(self, row: Mapping[str, Any]) -> DocId:
        """Returns the row's own id; None if it has none.

        Raises:
            UnusableRowError: If the column that --id_column names is missing, or if the id is too
                long.
        """
        doc_id = self._id_value(row)
        if doc_id is not None and type(doc_id) not in (str, int, float):
            doc_id = str(doc_id)  # a date, a decimal or the like: shards hold only plain values
        size = len(json.dumps(doc_id))
        if size > MAX_ID_BYTES:
            raise UnusableRowError(
                f"its id takes {size:,} bytes, there is room for {MAX_ID_BYTES:,}"
            )
        return doc_id

    def _id_value(self, row: Mapping[str, Any]) -> Any:
        if self.id_column is not None:
            return column_of(row, self.id_column, "--id_column")
        # A row with a text column can be an ARC-AGI task as well, and then has the task's id.
        for reader in self.readers:
            for name in reader.columns.ids if reader.can_read(row) else ():
                if name in row:
                    return row[name]
        return None

    def kept_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the columns to keep by name, as JSON values.

        Raises:
            UnusableRowError: If a column is missing, cannot be stored or has too many levels, or
                if the columns together are too large.
        """
        kept = {name: _as_json(row, name) for name in self.keep_columns}
        if kept and (size := len(json.dumps(kept))) > MAX_COLUMN_BYTES:
            raise UnusableRowError(
                f"--keep_columns: the row's take {size:,} bytes, there is room for "
                f"{MAX_COLUMN_BYTES:,}"
            )
        return kept


def _as_json(row: Mapping[str, Any], name: str) -> Any:
    """Returns a column to keep as a JSON value.

    Raises:
        ColumnError: If the column is missing or holds values that cannot be stored.
        UnusableRowError: If the value is nested too deeply.
    """

    def convert(value: Any, levels: int = MAX_LEVELS) -> Any:
        if not levels:
            raise UnusableRowError(f"--keep_columns {name}: has more than {MAX_LEVELS} levels")
        if value is None or isinstance(value, str | bool | int | float):
            return value
        if isinstance(value, AS_TEXT):
            return str(value)
        if isinstance(value, list | tuple):
            return [convert(item, levels - 1) for item in value]
        if isinstance(value, dict):
            return {str(key): convert(item, levels - 1) for key, item in value.items()}
        raise ColumnError(
            f"--keep_columns {name}: {type(value).__name__}, such as an image, cannot be stored; "
            "expected text, numbers, or lists or objects of these"
        )

    return convert(column_of(row, name, "--keep_columns"))


def column_of(row: Mapping[str, Any], name: str, flag: str) -> Any:
    """Returns the value of a column of a row.

    Args:
        row: The row.
        name: The name of the column.
        flag: The flag that names the column, for the message.

    Raises:
        ColumnError: If the row has no such column. The message lists its columns, and which of them
            look like text, conversations or token ids.
    """
    if name in row:
        return row[name]
    columns = []
    for column, value in row.items():
        kind = kind_of_value(value)
        columns.append(f"{column} ({kind})" if kind else column)
    raise ColumnError(
        f"{flag} {name}: no such column{near_miss(name, row)}; "
        f"the columns are {', '.join(columns) or 'none':.2000}"
    )


def kind_of_value(value: Any) -> str:
    """Returns whether a value looks like text, CONVERSATION or TOKEN_IDS; "" for other values."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, list) and value:
        if all(isinstance(item, dict) and {"role", "from"} & item.keys() for item in value):
            return CONVERSATION
        if all(type(item) is int and item >= 0 for item in value):
            return TOKEN_IDS
    return ""


def without_surrogates(text: str) -> str:
    """Returns a text with its lone surrogates replaced: JSON may contain them, UTF-8 may not."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
