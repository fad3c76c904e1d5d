"""Reads the content, the id and the columns to keep from a row of a data set.

`RowSchema` declares which columns are read. A `Reader` reads the content from them. readers.py
contains the readers of text, token ids and ARC-AGI tasks, and chat.py contains the reader of
conversations. If a row cannot be used, `UnusableRowError` is raised, and documents.py decides
whether to skip the row.
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
# The largest size in bytes, as JSON, of the values that --keep_columns stores of one row, in all of
# these columns together.
MAX_STORED_COLUMNS_BYTES = 2**19
# The largest depth of nested lists and objects in a column that is stored. It limits the recursion
# of the functions that convert, write and read the values.
MAX_LEVELS = 60
MAX_ID_BYTES = 2**18  # the largest size in bytes of the id of a row, as JSON
# --keep_columns stores values of these types as text, because JSON has no such types.
TYPES_STORED_AS_TEXT = (
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    uuid.UUID,
)
# Names of two kinds of values in columns, for messages.
CONVERSATION, TOKEN_IDS = "a conversation", "token ids"
# Kind of values in a column -> name of the flag that reads a column of this kind.
READING_FLAGS = {CONVERSATION: "messages_column", TOKEN_IDS: "ids_column"}


class UnusableRowError(Exception):
    """Raised if a row cannot be used. The message contains the reason."""


class ColumnError(UnusableRowError):
    """Raised if a column is missing, or if its values cannot be used in any row."""


@dataclass(frozen=True)
class SourceRow:
    """A row of a file or of a hub data set, whose columns are not decoded yet.

    Attributes:
        location_phrase: Position of the row in words, for messages.
        row_position_fields: Position of the row in the form that is stored with the row's samples
            (see `SampleFacts.row`).
        read_columns: Function that returns the columns of the row by name, or raises
            UnusableRowError.
    """

    location_phrase: str
    row_position_fields: dict[str, Any]
    read_columns: Callable[[], dict[str, Any]]


class Span(NamedTuple):
    """A stretch of a conversation's text with one role; it ends where the next span begins.

    Attributes:
        start_offset: Offset of the first character of the span in the text, in characters.
        role_index: Index of the role in ROLES.
        turn_number: Number of the turn that contains the span, counted from 0.
    """

    start_offset: int
    role_index: int
    turn_number: int


@dataclass(frozen=True)
class Content:
    """The content of a row: text, or token ids.

    Attributes:
        text: The text; "" if the content is token ids.
        spans: Spans with the roles of a conversation, which together cover the text; empty if the
            content is no conversation or has no roles.
        token_ids: Token ids, int32 (tokens,); None if the content is text.
        storable_token_mask: Mask of the tokens whose activations may be stored, bool (tokens,).
            None if the activations of all tokens may be stored.
    """

    text: str = ""
    spans: Sequence[Span] = ()
    token_ids: np.ndarray | None = None
    storable_token_mask: np.ndarray | None = None


class Columns(NamedTuple):
    """The names of the columns that a `Reader` needs.

    Attributes:
        required_columns: Columns without which the reader cannot read a row.
        optional_columns: Columns that the reader uses as well if a row has them.
        id_columns: Columns that may contain the id of a row, in order of preference. They are not
            used if --id_column names a column.
    """

    required_columns: tuple[str, ...]
    optional_columns: tuple[str, ...] = ()
    id_columns: tuple[str, ...] = ("id",)


class Reader(Protocol):
    """Reads the content of rows from certain columns.

    Attributes:
        activity_phrase: Words that precede the position of a row in the log if the run makes no
            progress while the row is read. For example, with "reading" the log contains "reading
            x.jsonl line 5".
    """

    activity_phrase: ClassVar[str]

    @property
    def columns(self) -> Columns:
        """The names of the columns that the reader needs."""

    def can_read(self, row: Mapping[str, Any]) -> bool:
        """Returns whether a row has the columns that this reader requires.

        Args:
            row: The columns of the row by name.
        """

    def read(self, row: Mapping[str, Any]) -> Content | None:
        """Returns the content of a row; None if the row has no content.

        Args:
            row: The columns of the row by name.

        Raises:
            UnusableRowError: If the content cannot be used.
        """


@dataclass(frozen=True)
class RowSchema:
    """Declares which columns of the rows of a data set are read, and which readers read them.

    Attributes:
        readers: Readers of the content. A row is read by the first reader that can read it. If no
            reader can read the row, the first reader raises an error.
        id_column: Value of --id_column, the column that contains the id of a row. None to use the
            first column in `Columns.id_columns` that the row has. A row without such a column has
            no id.
        stored_column_names: Value of --keep_columns, the columns whose values are stored with the
            samples of a row.
    """

    readers: tuple[Reader, ...]
    id_column: str | None = None
    stored_column_names: tuple[str, ...] = ()

    @property
    def activity_phrase(self) -> str:
        """Words that precede the position of a row in the log if the run stops making progress.

        For example, with "reading" the log contains "reading x.jsonl line 5".
        """
        return self.readers[0].activity_phrase

    def columns_among(self, names: Sequence[str]) -> list[str]:
        """Returns the columns of a file that need to be read.

        Args:
            names: The columns of the file.

        Returns:
            The columns in `names` that contain the content, the id or a value for --keep_columns.
            All of `names` if none of `self.readers` finds all of its required columns in the file,
            or if the file lacks a column that --id_column or --keep_columns names. Then the error
            message can list all columns of the file.
        """
        columns_named_by_flags = list(self.stored_column_names)
        if self.id_column is not None:
            columns_named_by_flags.append(self.id_column)
        columns_of_readers = [reader.columns for reader in self.readers]
        has_required_columns = False
        for reader_columns in columns_of_readers:
            required_column_names = {*columns_named_by_flags, *reader_columns.required_columns}
            has_required_columns |= required_column_names <= set(names)
        if not has_required_columns:
            return list(names)
        needed_column_names = dict.fromkeys(columns_named_by_flags)  # an ordered set
        for reader_columns in columns_of_readers:
            needed_column_names |= dict.fromkeys(
                (
                    *reader_columns.required_columns,
                    *reader_columns.optional_columns,
                    *reader_columns.id_columns,
                )
            )
        return [column_name for column_name in needed_column_names if column_name in names]

    def content_of(self, row: Mapping[str, Any]) -> Content | None:
        """Returns the content of a row; None if the row has no content.

        Args:
            row: The columns of the row by name.

        Raises:
            UnusableRowError: If no reader can read the row, or if its content cannot be used.
        """
        for reader in self.readers:
            if reader.can_read(row):
                return reader.read(row)
        return self.readers[0].read(row)

    def id_of(self, row: Mapping[str, Any]) -> DocId:
        """Returns the id of a row in the data set; None if the row has no id.

        Args:
            row: The columns of the row by name.

        Raises:
            UnusableRowError: If the column that --id_column names is missing, or if the id is too
                long.
        """
        doc_id = self._id_value(row)
        if doc_id is not None and type(doc_id) not in (str, int, float):
            doc_id = str(doc_id)  # JSON cannot store other types, such as dates or decimals
        num_json_bytes = len(json.dumps(doc_id))
        if num_json_bytes > MAX_ID_BYTES:
            raise UnusableRowError(
                f"its id takes {num_json_bytes:,} bytes, expected at most {MAX_ID_BYTES:,}"
            )
        return doc_id

    def _id_value(self, row: Mapping[str, Any]) -> Any:
        if self.id_column is not None:
            return column_of(row, self.id_column, "--id_column")
        # More than one reader may be able to read a row. For example, a row with a text column may
        # be an ARC-AGI task as well, whose id is in a column that only the second reader names. So
        # the id columns of all readers that can read the row are searched.
        for reader in self.readers:
            if not reader.can_read(row):
                continue
            for column_name in reader.columns.id_columns:
                if column_name in row:
                    return row[column_name]
        return None

    def stored_values_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the values of a row that are stored because --keep_columns names their columns.

        Args:
            row: The columns of the row by name.

        Returns:
            The values by column name. Only values that JSON can represent occur.

        Raises:
            UnusableRowError: If a column is missing, cannot be stored or is nested too deeply, or
                if the columns together are too large.
        """
        stored_value_by_column = {
            column_name: _as_json(row, column_name) for column_name in self.stored_column_names
        }
        num_json_bytes = len(json.dumps(stored_value_by_column))
        if num_json_bytes > MAX_STORED_COLUMNS_BYTES:
            raise UnusableRowError(
                f"--keep_columns: the row's columns take {num_json_bytes:,} bytes, expected at "
                f"most {MAX_STORED_COLUMNS_BYTES:,}"
            )
        return stored_value_by_column


def _as_json(row: Mapping[str, Any], name: str) -> Any:
    """Returns the JSON value that --keep_columns stores for a column of a row.

    Args:
        row: The columns of the row by name.
        name: The name of the column.

    Raises:
        ColumnError: If the column is missing or contains values that cannot be stored.
        UnusableRowError: If the value is nested too deeply.
    """

    def convert(value: Any, levels: int = MAX_LEVELS) -> Any:
        if not levels:
            raise UnusableRowError(f"--keep_columns {name}: has more than {MAX_LEVELS} levels")
        if value is None or isinstance(value, str | bool | int | float):
            return value
        if isinstance(value, TYPES_STORED_AS_TEXT):
            return str(value)
        if isinstance(value, list | tuple):
            return [convert(nested_value, levels - 1) for nested_value in value]
        if isinstance(value, dict):
            return {
                str(object_key): convert(nested_value, levels - 1)
                for object_key, nested_value in value.items()
            }
        raise ColumnError(
            f"--keep_columns {name}: {type(value).__name__}, such as an image, cannot be stored; "
            "expected text, numbers, or lists or objects of these"
        )

    return convert(column_of(row, name, "--keep_columns"))


def column_of(row: Mapping[str, Any], name: str, flag: str) -> Any:
    """Returns the value of a column of a row.

    Args:
        row: The columns of the row by name.
        name: The name of the column.
        flag: The flag that names the column, for the message.

    Raises:
        ColumnError: If the row has no such column. The message lists the columns of the row, and
            which of them look like text, conversations or token ids.
    """
    if name in row:
        return row[name]
    column_descriptions = []
    for column_name, column_value in row.items():
        kind_of_column_value = kind_of_value(column_value)
        column_descriptions.append(
            f"{column_name} ({kind_of_column_value})" if kind_of_column_value else column_name
        )
    raise ColumnError(
        f"{flag} {name}: no such column{near_miss(name, row)}; "
        f"the columns are {', '.join(column_descriptions) or 'none':.2000}"
    )


def kind_of_value(value: Any) -> str:
    """Returns the kind of content that a value seems to be.

    Args:
        value: The value of a column.

    Returns:
        "text", CONVERSATION or TOKEN_IDS; "" if the value seems to be none of these.
    """
    if isinstance(value, str):
        return "text"
    if isinstance(value, list) and value:
        if all(
            isinstance(element, dict) and {"role", "from"} & element.keys() for element in value
        ):
            return CONVERSATION
        if all(type(element) is int and element >= 0 for element in value):
            return TOKEN_IDS
    return ""


def without_surrogates(text: str) -> str:
    """Returns a text in which U+FFFD replaces each lone surrogate.

    JSON may contain lone surrogates (halves of a surrogate pair), but UTF-8 may not.
    """
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
