"""OpenShards: the shards of a run, of which the last few that were read stay open."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, TypeVar

import numpy as np
import pyarrow

from activation_extraction.common.errors import RunError
from activation_extraction.common.visible import counted
from activation_extraction.dataset.token_batch import ByHook
from activation_extraction.store.commit import Commit
from activation_extraction.store.folder import Folder
from activation_extraction.store.sample_table import (
    TableRow,
    concatenated,
    read_table,
    rows_of,
    values_of,
)
from activation_extraction.store.shard import MAX_GZIP_RATIO
from activation_extraction.store.shard_reader import (
    ShardReader,
    StoredHook,
    open_shard,
    read_by_ranges,
    read_sums,
)
from activation_extraction.store.statistics import Sums

OPEN_SHARDS = 128  # where a shard is read by ranges; one pickle stays in memory
TABLE_ROWS = 100_000  # of tables of samples that stay in memory, and at least one table
READERS = 16  # small files read at the same time

T = TypeVar("T")


@dataclass
class OpenShards:
    """The shards of a run; the last few that were read stay open. Methods raise OSError.

    url: of the run. shards: the name of the folder and the commit of each. get: returns the reader
    of a shard by its number. table: returns the table of its samples, as `read_table` does. A copy
    of this in another process opens its own files and connections; a fork can read only local runs.
    """

    url: str
    shards: list[tuple[str, Commit]]
    hooks: ByHook[StoredHook]

    def __post_init__(self) -> None:
        by_ranges = all(read_by_ranges(commit) for _, commit in self.shards)
        largest = max((commit.count for _, commit in self.shards), default=1)
        readers, tables = OPEN_SHARDS if by_ranges else 1, max(TABLE_ROWS // max(largest, 1), 1)
        self._read: Callable[..., Any] = partial(_read, self.url, self.shards, {})
        read, hooks = self._read, self.hooks
        self.get: Callable[[int], ShardReader] = lru_cache(readers)(
            lambda number: read(lambda folder, commit: open_shard(folder, commit, hooks), number)
        )
        self.table: Callable[[int], pyarrow.Table] = lru_cache(tables)(partial(read, read_table))
        self._columns: dict[str, np.ndarray] = {}

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

    def samples(self) -> pyarrow.Table:
        """Returns one table of all samples."""
        return concatenated(self._all_tables())

    def columns(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns the values of columns of the table of all samples, as they were given, in arrays
        of objects. They stay in memory, and the tables are read once for those that do not yet."""
        if missing := [name for name in names if name not in self._columns]:
            tables = self._all_tables()
            for name in missing:
                values = [value for table in tables for value in values_of(table, name)]
                self._columns[name] = np.fromiter(values, object, len(values))
        return {name: self._columns[name] for name in names}

    def _all_tables(self) -> list[pyarrow.Table]:
        with ThreadPoolExecutor(READERS) as pool:
            return list(pool.map(self.table, range(len(self.shards))))

    def sums(self, hook: str) -> Sums:
        """Returns the sums of all shards at a hook, merged in their order: always with the same
        result. Those of all hooks are read the first time."""
        return self._all_sums[hook]

    @cached_property
    def _all_sums(self) -> dict[str, Sums]:
        read = partial(self._read, partial(read_sums, hooks=self.hooks))
        total: dict[str, Sums] = {}  # as large as what was read
        with ThreadPoolExecutor(READERS) as pool:
            for found in pool.map(read, range(len(self.shards))):
                for hook, sums in found.items():
                    if hook in total:
                        total[hook].merge(sums)
                    else:
                        total[hook] = sums
        return total or {name: Sums.zeros(hook.width) for name, hook in self.hooks.items()}


def _read(
    url: str,
    shards: Sequence[tuple[str, Commit]],
    folders: dict[str, Folder],
    read: Callable[[Folder, Commit], T],
    number: int,
) -> T:
    """What `read` makes of a shard's folder and commit. Raises OSError for its RunError.

    folders: those that were opened before, by name.
    """
    name, commit = shards[number]
    try:
        if name not in folders:
            folders[name] = Folder(url).child(name)
        return read(folders[name], commit)
    except RunError as error:
        raise OSError(str(error)) from error
