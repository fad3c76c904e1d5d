"""OpenShards: the shards of a run, of which the last few that were read stay open."""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from activation_extraction.common.choices import MAX_COLUMNS, SAMPLE_COLUMNS
from activation_extraction.common.errors import RunError
from activation_extraction.common.visible import counted
from activation_extraction.dataset.token_batch import ByHook
from activation_extraction.store.commit import Commit
from activation_extraction.store.folder import Folder
from activation_extraction.store.shard import MAX_GZIP_RATIO, TableRow
from activation_extraction.store.shard_reader import (
    ShardReader,
    StoredHook,
    open_shard,
    read_by_ranges,
    read_sums,
    read_table,
)
from activation_extraction.store.statistics import Sums

if TYPE_CHECKING:
    import pyarrow

OPEN_SHARDS = 128  # where a shard is read by ranges; one pickle stays in memory
TABLE_ROWS = 100_000  # of tables of samples that stay in memory, and at least one table
MAX_PATHS = 64  # in the values of a column; one with more becomes texts
READERS = 16  # small files read at the same time

T = TypeVar("T")


@dataclass
class OpenShards:
    """The shards of a run; the last few that were read stay open. Methods raise OSError.

    url: of the run. shards: the name of the folder and the commit of each. A copy of this in
    another process opens its own files and connections, also after a fork.
    """

    url: str
    shards: list[tuple[str, Commit]]
    hooks: ByHook[StoredHook]

    def __post_init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._folders: dict[str, Folder] = {}
        self._readers: OrderedDict[int, ShardReader] = OrderedDict()
        self._tables: OrderedDict[int, list[TableRow]] = OrderedDict()
        self._sums: dict[str, Sums] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenShards, (self.url, self.shards, self.hooks)

    def row_bytes(self, hooks: Sequence[str]) -> int:
        """Returns the bytes of one token at these hooks in memory."""
        return sum(self.hooks[name].width * self.hooks[name].dtype.itemsize for name in hooks)

    def check_sizes(self, url: str) -> None:
        """Raises ValueError if a shard's file is too small for its tokens at the recorded widths.

        url: of the run, for messages.
        """
        row = sum(hook.stored_bytes for hook in self.hooks.values())
        for folder, commit in self.shards:
            most = commit.bytes * (1 if read_by_ranges(commit) else MAX_GZIP_RATIO)
            if commit.tokens * row > most:
                where = "/".join(filter(None, (url, folder, commit.file)))
                raise ValueError(
                    f"{where}: {counted(commit.tokens, 'token')} of {row} bytes cannot be in "
                    f"{commit.bytes} bytes"
                )

    def get(self, number: int) -> ShardReader:
        """Returns the reader of a shard, which stays open for the next call."""
        self._notice_fork()
        most = OPEN_SHARDS if read_by_ranges(self.shards[number][1]) else 1
        return self._kept(self._readers, number, self.open, lambda: len(self._readers) > most)

    def open(self, number: int, hooks: Sequence[str] | None = None) -> ShardReader:
        """Returns a new reader of a shard, for some of the hooks."""
        wanted = self.hooks if hooks is None else {name: self.hooks[name] for name in hooks}
        return self._read(number, lambda folder, commit: open_shard(folder, commit, wanted))

    def table(self, number: int) -> list[TableRow]:
        """Returns the table of a shard's samples."""
        self._notice_fork()
        return self._kept(
            self._tables,
            number,
            lambda number: self._read(number, read_table),
            lambda: sum(map(len, self._tables.values())) > TABLE_ROWS,
        )

    def samples(self) -> "pyarrow.Table":
        """Returns a table of all samples, with the fields of `TableRow` and the columns of the run,
        unless they have the name of a field.

        Ids, rows, or values of a column become texts where they are of several types.
        """
        try:
            import pyarrow
        except ImportError as error:
            raise ImportError("the table of samples needs pyarrow: pip install pyarrow") from error
        rows = self.rows()
        kept = dict.fromkeys(name for row in rows for name in row.columns)
        if len(kept) > MAX_COLUMNS:
            raise OSError(f"{self.url}: has {len(kept)} columns; expected at most {MAX_COLUMNS}")
        columns = {_text(name): [row.columns.get(name) for row in rows] for name in kept}
        fixed = {name: [getattr(row, name) for row in rows] for name in SAMPLE_COLUMNS}
        columns = fixed | {name: columns[name] for name in columns if name not in fixed}
        return pyarrow.table({name: _column(values) for name, values in columns.items()})

    def rows(self) -> list[TableRow]:
        """Returns the rows of the tables of all shards."""
        with ThreadPoolExecutor(READERS) as pool:
            return [row for rows in pool.map(self.table, range(len(self.shards))) for row in rows]

    def sums(self, hook: str) -> Sums:
        """Returns the sums of all shards at a hook, merged in their order: always with the same
        result. Those of all hooks are read the first time."""
        self._sums = self._sums or self._all_sums()
        return self._sums[hook]

    def _all_sums(self) -> dict[str, Sums]:
        widths = {name: hook.width for name, hook in self.hooks.items()}

        def read(number: int) -> dict[str, Sums]:
            return self._read(number, lambda folder, commit: read_sums(folder, commit, widths))

        total: dict[str, Sums] = {}  # as large as what was read
        with ThreadPoolExecutor(READERS) as pool:
            for found in pool.map(read, range(len(self.shards))):
                for hook, sums in found.items():
                    if hook in total:
                        total[hook].merge(sums)
                    else:
                        total[hook] = sums
        return total or {name: Sums.zeros(width) for name, width in widths.items()}

    def _kept(
        self,
        kept: OrderedDict[int, T],
        number: int,
        read: Callable[[int], T],
        are_too_many: Callable[[], bool],
    ) -> T:
        """What is kept of a shard, or else is read now. The last one that was used always stays."""
        with self._lock:
            if number in kept:
                kept.move_to_end(number)
                return kept[number]
        found = read(number)
        with self._lock:
            kept[number] = found
            while len(kept) > 1 and are_too_many():
                kept.popitem(last=False)
        return found

    def _read(self, number: int, read: Callable[[Folder, Commit], T]) -> T:
        """What `read` makes of a shard's folder and commit. Raises OSError for its RunError."""
        self._notice_fork()
        name, commit = self.shards[number]
        try:
            if name not in self._folders:
                self._folders[name] = Folder(self.url).child(name)
            return read(self._folders[name], commit)
        except RunError as error:
            raise OSError(str(error)) from error

    def _notice_fork(self) -> None:
        if self._process != os.getpid():
            self.__post_init__()


def value_of(row: TableRow, column: str) -> Any:
    """Returns the value of a column of the table of samples; None if the row lacks it."""
    return getattr(row, column) if column in SAMPLE_COLUMNS else row.columns.get(column)


def _column(values: Sequence[Any]) -> Any:
    """An array of pyarrow. Values become texts where they have no type in common, or none there."""
    import pyarrow

    parts: set[tuple[Any, ...]] = set()
    for value in values:
        _add_parts(value, (), parts)
    kinds = (None, pyarrow.uint64()) if len(parts) <= MAX_PATHS else ()
    for kind in kinds:
        with suppress(pyarrow.ArrowException, ValueError, OverflowError):
            return pyarrow.array(values, kind)
    return pyarrow.array([None if value is None else _text(value) for value in values])


def _add_parts(value: Any, path: tuple[Any, ...], parts: set[tuple[Any, ...]]) -> None:
    """Adds the paths of all that is in a value, until they are too many: pyarrow has room for each
    of them in every row."""
    if isinstance(value, dict | list) and len(parts) <= MAX_PATHS:
        for name, part in (
            value.items() if isinstance(value, dict) else ((0, each) for each in value)
        ):
            parts.add((*path, name))
            _add_parts(part, (*path, name), parts)


def _text(value: Any) -> str:
    """Text that has no form in UTF-8 gets question marks there."""
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return text.encode(errors="replace").decode()
