"""OpenShards: the shards of a run, of which those that were read last stay open."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from threading import Lock
from typing import Any, Generic, TypeVar

import numpy as np
import pyarrow

from activation_extraction.common.errors import RunError
from activation_extraction.common.visible import counted, without_secrets
from activation_extraction.dataset.token_batch import ByHook
from activation_extraction.store.commit import Commit
from activation_extraction.store.folder import Folder
from activation_extraction.store.safetensors_file import SafetensorsFile
from activation_extraction.store.sample_table import (
    TableRow,
    read_table,
    rows_of,
    values_of,
)
from activation_extraction.store.shard import MAX_GZIP_RATIO
from activation_extraction.store.shard_reader import (
    StoredHook,
    open_shard,
    read_by_ranges,
    read_sums,
)
from activation_extraction.store.statistics import Sums

OPEN_SHARDS = 128  # that are mapped; one pickle stays in memory
KEPT_BYTES = 2**28  # of what the shards in a bucket say of their tokens
TABLE_ROWS = 100_000  # of tables of samples that stay in memory, and at least one table
IN_FLIGHT = 32  # requests to a bucket at the same time, over all shards and hooks
# glibc's malloc learns from the largest block that it has given back to the system, of up to 32
# MiB: smaller ones come from its heap from then on, which keeps twice as much of what is freed.
# Once it has had a block of this size, ranges are received in memory that was used before. New
# memory would take longer than copying them.
LARGEST_KEPT = 2**25 - 2**16

T = TypeVar("T")


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Turns a RunError into an OSError, as a reader expects it of a damaged file."""
    try:
        yield
    except RunError as error:
        raise OSError(str(error)) from error


class Kept(Generic[T]):
    """The values of a function of a number that were asked for last, as many as fit into `most`.

    weight: what a value counts. Each is made once, also if several threads ask for it.
    """

    def __init__(self, make: Callable[[int], T], weight: Callable[[T], int], most: int) -> None:
        self._make, self._weight, self._most = make, weight, most
        self._lock = Lock()
        self._values: dict[int, Future[T]] = {}  # the one that was asked for last is the last

    def __call__(self, number: int) -> T:
        with self._lock:
            value = self._values.pop(number, None)
            made_here = value is None
            value = self._values[number] = value or Future()
        if made_here:
            try:
                value.set_result(self._make(number))
            except BaseException as error:
                value.set_exception(error)
            with self._lock:
                self._forget(number)
        return value.result()

    def _forget(self, newest: int) -> None:
        """Drops what failed, and all that does not fit beside what was made just now."""
        room = self._most
        for number in [newest, *(n for n in reversed(self._values) if n != newest)]:
            value = self._values.get(number)  # another thread may have dropped the newest
            if value is not None and value.done():
                failed = value.exception() is not None
                room -= 0 if failed else self._weight(value.result())
                if failed or (room < 0 and number != newest):
                    del self._values[number]


class Requests(Executor):
    """Threads for requests to a bucket. A fork of the process, which has none of them, gets its
    own."""

    def __init__(self) -> None:
        self._pools: dict[int, ThreadPoolExecutor] = {}  # by process

    def submit(self, *call: Any, **options: Any) -> Future[Any]:
        """Returns what will have the result of a call."""
        if (pool := self._pools.get(os.getpid())) is None:
            np.empty(LARGEST_KEPT, np.uint8)  # which is freed at once
            new = ThreadPoolExecutor(IN_FLIGHT, "requests")
            pool = self._pools.setdefault(os.getpid(), new)
        return pool.submit(*call, **options)


@dataclass
class OpenShards:
    """The shards of a run; those that were read last stay open. Methods raise OSError.

    url: of the run. local: whether its shards are files here. shards: the name of the folder and
    the commit of each. firsts: the number of samples before each shard, and that of all. get:
    returns the reader of a shard by its number. table: returns the table of its samples, as
    `read_table` does. A copy of this in another process opens its own files and connections; a fork
    can read only local runs. Raises ValueError if a file is too small for its tokens.
    """

    url: str
    local: bool
    shards: list[tuple[str, Commit]]
    hooks: ByHook[StoredHook]

    def __post_init__(self) -> None:
        self.commits = [commit for _, commit in self.shards]
        self.firsts = [0, *accumulate(commit.count for commit in self.commits)]
        self.by_ranges = all(map(read_by_ranges, self.commits))
        self._check_sizes()
        self._columns: dict[str, np.ndarray] = {}
        # The caches do not hold this object: they would keep a pickle until it is collected.
        read, hooks = partial(_read, self.url, self.shards, {}), self.hooks
        requests = Requests()
        self._read: Callable[..., Any] = read
        self.get: Callable[[int], SafetensorsFile] = Kept(
            partial(read, lambda folder, commit: open_shard(folder, commit, hooks, requests)),
            _bytes_kept if self.by_ranges and not self.local else lambda _: 1,
            1 if not self.by_ranges else OPEN_SHARDS if self.local else KEPT_BYTES,
        )
        tables = TABLE_ROWS // max((commit.count for commit in self.commits), default=1)
        self.table: Callable[[int], pyarrow.Table] = lru_cache(max(tables, 1))(
            partial(read, read_table)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenShards, (self.url, self.local, self.shards, self.hooks)

    def row_bytes(self, hooks: Sequence[str]) -> int:
        """Returns the bytes of one token at these hooks in memory."""
        return sum(self.hooks[name].row_bytes for name in hooks)

    def given(self, values: ByHook[np.ndarray]) -> ByHook[Any]:
        """Returns the values of tokens as they are given to the user, of which codes are Codes."""
        each = {name: self.hooks[name].given(rows) for name, rows in values.items()}
        return ByHook(each, values.aliases)

    def _check_sizes(self) -> None:
        row = sum(hook.stored_bytes for hook in self.hooks.values())
        for folder, commit in self.shards:
            most = commit.bytes * (1 if read_by_ranges(commit) else MAX_GZIP_RATIO)
            if commit.tokens * row > most:
                where = without_secrets("/".join(filter(None, (self.url, folder, commit.file))))
                raise ValueError(
                    f"{where}: {counted(commit.tokens, 'token')} of {row} bytes cannot be in "
                    f"{commit.bytes} bytes"
                )

    def row(self, shard: int, number: int) -> TableRow:
        """Returns the row of a sample in the table of its shard."""
        return rows_of(self.table(shard).slice(number, 1))[0]

    def find(self, folder: str, sample_idx: int) -> tuple[int, int] | None:
        """Returns the number of the shard that has a sample of a folder, and the number of the
        sample there; None if no shard has it."""
        for number, (name, commit) in enumerate(self.shards):
            if name == folder and commit.first <= sample_idx <= commit.last:
                numbers = self.table(number)["sample_idx"].to_numpy()
                row = int(np.searchsorted(numbers, sample_idx))
                if numbers[row] == sample_idx:
                    return number, row
        return None

    def tables(self) -> list[pyarrow.Table]:
        """Returns the tables of all shards."""
        with ThreadPoolExecutor(IN_FLIGHT) as pool:  # which a fork of this process does not meet
            return list(pool.map(self.table, range(len(self.shards))))

    def columns(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns the values of columns of the table of all samples, as they were given, in arrays
        of objects. They stay in memory, and the tables are read once for those that do not yet."""
        if missing := [name for name in names if name not in self._columns]:
            tables = self.tables()
            for name in missing:
                values = [value for table in tables for value in values_of(table, name)]
                self._columns[name] = np.fromiter(values, object, len(values))
        return {name: self._columns[name] for name in names}

    @cached_property
    def sums(self) -> dict[str, Sums]:
        """The sums of all shards by hook, merged in their order: always with the same result."""
        dense = [name for name, hook in self.hooks.items() if not hook.most]
        read = partial(self._read, partial(read_sums, hooks=dense))
        total: dict[str, Sums] = {}  # as large as what was read
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            for found in pool.map(read, range(len(self.shards))):
                for hook, sums in found.items():
                    total[hook] = total[hook].merge(sums) if hook in total else sums
        return total or {name: Sums.zeros(hook.width) for name, hook in self.hooks.items()}


def _bytes_kept(reader: Any) -> int:
    """The bytes at the beginning of a shard's file, which its reader keeps."""
    return len(reader.front)


def _read(
    url: str,
    shards: Sequence[tuple[str, Commit]],
    folders: dict[str, Folder],
    read: Callable[[Folder, Commit], T],
    number: int,
) -> T:
    """Returns what `read` makes of a shard's folder and commit. folders: the open ones, by name."""
    name, commit = shards[number]
    with as_os_errors():
        if name not in folders:
            folders[name] = Folder(url).child(name)
        return read(folders[name], commit)
