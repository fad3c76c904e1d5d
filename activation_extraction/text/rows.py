"""What becomes of a row: its text, conversation or token ids, its id, and the columns to keep."""

import datetime
import decimal
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np

from activation_extraction.common.choices import ATTENTION_MASK, ROLES
from activation_extraction.common.errors import near_miss
from activation_extraction.text.batch import DocId

MAX_COLUMN_BYTES = 2**19  # bytes of JSON that the kept columns of a row may take
MAX_LEVELS = 60  # of lists and objects in a kept column; shards have room for a few more
MAX_ID_BYTES = 2**18  # of JSON that the id of a row may take
AS_TEXT = (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID)


class UnusableRowError(Exception):
    """A row has nothing in it that can be used. The message says why."""


class ColumnError(UnusableRowError):
    """A column is missing, or holds what cannot be used in any row."""


class Struct(dict[str, Any]):
    """An object out of Arrow: it has every key that any object beside it has, null if need be."""


def as_structs(value: Any, feature: Any = None) -> Any:
    """Returns a value of a hub data set with its objects out of Arrow as Structs.

    feature: its type in `datasets`, if that is known. One that is Json was text in Arrow, and the
    nulls in it are its own.
    """
    if type(feature).__name__ == "Json":
        return value
    if isinstance(value, dict):
        of = feature if isinstance(feature, Mapping) else {}
        return Struct({key: as_structs(each, of.get(key)) for key, each in value.items()})
    inner = getattr(feature, "feature", None)
    return [as_structs(each, inner) for each in value] if isinstance(value, list) else value


def without_nulls(value: Any) -> Any:
    """Returns a value without the keys of its Structs that are null, at every depth.

    A null in an object that was written as JSON is a value, and so is one in a list.
    """
    if isinstance(value, dict):
        left_out = isinstance(value, Struct)
        given = value.items()
        return {key: without_nulls(v) for key, v in given if not (left_out and v is None)}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


class Columns(NamedTuple):
    """The columns that are read: those that every row must have, and others."""

    required: tuple[str, ...]
    optional: tuple[str, ...] = ()

    def among(self, names: Sequence[str]) -> list[str]:
        """Returns those that are there; all names if a required one is missing, for the message.

        Rows with the columns of ARC-AGI do without the first one.
        """
        missing = set(self.required) - set(names)
        if missing - {self.required[0]} or (missing and not set(ARC) <= set(names)):
            return list(names)
        return [name for name in dict.fromkeys((*self.required, *self.optional)) if name in names]


TEMPLATE = ROLES.index("template")


class Span(NamedTuple):
    """Where a role begins in the text of a conversation; it ends where the next span begins.

    start: in characters. role: a number in ROLES. turn: the number of the turn, from 0.
    """

    start: int
    role: int
    turn: int


@dataclass(frozen=True)
class Content:
    """What a sample is made of: text, or token ids.

    spans: of a conversation; together they cover its text. token_ids: int32; None for text.
    mask: bool, the token ids that may be kept; None for all.
    """

    text: str = ""
    spans: Sequence[Span] = ()
    token_ids: np.ndarray | None = None
    mask: np.ndarray | None = None


class Reader(Protocol):
    """Reads the content of a row; None if there is none. Raises UnusableRowError.

    doing: what it does, in words that end before the name of a row.
    """

    doing: ClassVar[str]

    @property
    def columns(self) -> Columns: ...
    def read(self, row: Mapping[str, Any]) -> Content | None: ...


ARC = ("train", "test")


def arc_prompt(row: Mapping[str, Any]) -> str:
    """Returns the prompt for an ARC-AGI task: its training pairs, then each test input to solve.

    Each row of a grid is one line, with spaces between the cells, below a line "Input:" or
    "Output:". The outputs of the tests are left out. Raises UnusableRowError.
    """

    def lines(grid: list[list[int]]) -> str:
        return "\n".join(" ".join(map(str, row)) for row in grid)

    try:
        examples = [
            f"Example {n}\nInput:\n{lines(pair['input'])}\nOutput:\n{lines(pair['output'])}\n"
            for n, pair in enumerate(row["train"], start=1)
        ]
        tests = [
            f"Test {n}\nInput:\n{lines(pair['input'])}\nOutput:\n"
            for n, pair in enumerate(row["test"], start=1)
        ]
    except (KeyError, TypeError) as error:
        raise UnusableRowError(f"it has ARC-AGI columns but no grids in them: {error!r}") from error
    return "\n".join(examples + tests)


def is_arc_task(row: Mapping[str, Any]) -> bool:
    return all(isinstance(row.get(column), list) for column in ARC)


@dataclass(frozen=True)
class TextColumn:
    """Reads the text of a column, or an ARC-AGI task as a prompt where there is no such column."""

    doing: ClassVar = "reading"
    name: str

    @property
    def columns(self) -> Columns:
        return Columns((self.name,), ARC)

    def read(self, row: Mapping[str, Any]) -> Content | None:
        if self.name not in row and is_arc_task(row):
            return Content(arc_prompt(row))
        text = column_of(row, self.name, "--text_column")
        if text is not None and not isinstance(text, str):
            found = _kind_of(text)
            message = f"--text_column {self.name}: expected text, found "
            if found in FLAGS_OF:
                raise ColumnError(f"{message}{found}; --{FLAGS_OF[found]} {self.name} reads it")
            raise UnusableRowError(f"{message}{type(text).__name__} {text!r:.40}")
        return None if text is None or not text.strip() else Content(valid(text))


@dataclass(frozen=True)
class IdsColumn:
    """Reads token ids from a column, and from another one which of them may be kept.

    mask: the name of that column, "" for none; if it is ATTENTION_MASK, it says which of the token
    ids are not padding, and there are no others. vocabulary: how many token ids the model has.
    """

    doing: ClassVar = "reading"
    name: str
    mask: str
    vocabulary: int

    @property
    def columns(self) -> Columns:
        return Columns((self.name, *filter(None, (self.mask,))))

    def read(self, row: Mapping[str, Any]) -> Content | None:
        given = column_of(row, self.name, "--ids_column")
        if given is None or (isinstance(given, list) and not given):
            return None
        ids, mask = self._integers(given, self.name, "--ids_column"), None
        if self.mask:
            flags = column_of(row, self.mask, "--mask_column")
            numbers = self._integers(flags, self.mask, "--mask_column")
            if len(numbers) != len(ids) or not np.isin(numbers, (0, 1)).all():
                raise UnusableRowError(
                    f"--mask_column {self.mask}: expected {len(ids)} values, each 0 or 1, one for "
                    f"each token id, found {len(numbers)}: {numbers[:8].tolist()}"
                )
            mask = numbers.astype(bool)
        if mask is not None and self.mask == ATTENTION_MASK:
            if not mask.any():
                raise UnusableRowError(
                    f"--mask_column {self.mask}: each of its {len(mask)} values is 0, which says "
                    "that all is padding; expected a 1 for each token"
                )
            ids, mask = ids[mask], None  # padding may have any id
        if ids.min() < 0 or ids.max() >= self.vocabulary:
            wrong = int(ids.min() if ids.min() < 0 else ids.max())
            raise UnusableRowError(
                f"--ids_column {self.name}: token id {wrong}; the model has token ids 0 to "
                f"{self.vocabulary - 1}"
            )
        return Content(token_ids=ids.astype(np.int32), mask=mask)

    def _integers(self, given: Any, name: str, flag: str) -> np.ndarray:
        try:
            found = np.array(given)
        except ValueError:  # lists of several lengths
            found = np.array(None)
        if isinstance(given, list) and found.ndim == 1 and found.dtype.kind in "bi":
            return found.astype(np.int64)
        raise UnusableRowError(
            f"{flag} {name}: expected a list of whole numbers, found {type(given).__name__} "
            f"{given!r:.40}"
        )


@dataclass(frozen=True)
class RowForm:
    """Says what is read of every row.

    reader: of its content. id_column: None is `id`, which a row may lack. keep_columns: stored with
    the row's samples.
    """

    reader: Reader
    id_column: str | None = None
    keep_columns: tuple[str, ...] = ()

    @property
    def columns(self) -> Columns:
        required, optional = self.reader.columns
        own = filter(None, (self.id_column,))
        return Columns((*required, *own, *self.keep_columns), (*optional, "id", "task_id"))

    def id_of(self, row: Mapping[str, Any]) -> DocId:
        """Returns the row's own id; for an ARC-AGI task that has none, its `task_id`.

        Raises UnusableRowError if it is too long.
        """
        if self.id_column is not None:
            found = column_of(row, self.id_column, "--id_column")
        else:
            found = row.get("id", row.get("task_id") if is_arc_task(row) else None)
        if found is not None and type(found) not in (str, int, float):
            found = str(found)  # a date, a decimal or the like: shards hold only plain values
        if (size := len(json.dumps(found))) > MAX_ID_BYTES:
            raise UnusableRowError(
                f"its id takes {size:,} bytes, there is room for {MAX_ID_BYTES:,}"
            )
        return found

    def kept_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the columns to keep, as JSON values. Raises UnusableRowError."""
        kept = {name: _as_json(row, name) for name in self.keep_columns}
        if kept and (size := len(json.dumps(kept))) > MAX_COLUMN_BYTES:
            raise UnusableRowError(
                f"--keep_columns: the row's take {size:,} bytes, there is room for "
                f"{MAX_COLUMN_BYTES:,}"
            )
        return kept


def _as_json(row: Mapping[str, Any], name: str) -> Any:
    def convert(value: Any, levels: int = MAX_LEVELS) -> Any:
        if not levels:
            raise UnusableRowError(f"--keep_columns {name}: has more than {MAX_LEVELS} levels")
        if value is None or isinstance(value, str | bool | int | float):
            return value
        if isinstance(value, AS_TEXT):
            return str(value)
        if isinstance(value, list | tuple):
            return [convert(each, levels - 1) for each in value]
        if isinstance(value, dict):
            return {str(key): convert(each, levels - 1) for key, each in value.items()}
        raise ColumnError(
            f"--keep_columns {name}: {type(value).__name__}, such as an image, cannot be stored; "
            "expected text, numbers, or lists or objects of these"
        )

    return convert(column_of(row, name, "--keep_columns"))


def column_of(row: Mapping[str, Any], name: str, flag: str) -> Any:
    """Returns a column of a row. Raises ColumnError, which says what the other columns hold."""
    if name in row:
        return row[name]
    kinds = {column: _kind_of(value) for column, value in row.items()}
    columns = ", ".join(f"{column} ({kind})" if kind else column for column, kind in kinds.items())
    raise ColumnError(
        f"{flag} {name}: no such column{near_miss(name, row)}; "
        f"the columns are {columns or 'none':.2000}"
    )


CHAT, IDS = "a conversation", "token ids"
FLAGS_OF = {CHAT: "messages_column", IDS: "ids_column"}


def _kind_of(value: Any) -> str:
    """What a value looks like; "" for none of these."""
    if isinstance(value, str):
        return "text"
    if isinstance(value, list) and value:
        if all(isinstance(each, dict) and {"role", "from"} & each.keys() for each in value):
            return CHAT
        if all(type(each) is int and each >= 0 for each in value):
            return IDS
    return ""


def valid(text: str) -> str:
    """Returns the text with lone surrogates replaced: JSON may contain them, but UTF-8 may not."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
