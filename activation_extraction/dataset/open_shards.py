"""OpenShards: the shards of a run, of which the last few that were read stay open."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from activation_extraction.common.errors import RunError
from activation_extraction.dataset.hook_names import ByHook
from activation_extraction.store.commit import Commit
from activation_extraction.store.folder import Folder
from activation_extraction.store.sample_table import TableRow
from activation_extraction.store.shard_reader import (
    ShardReader,
    StoredHook,
    open_shard,
    read_by_ranges,
    read_table,
)

OPEN_SHARDS = 128  # where a shard is read by ranges; one pickle stays in memory
TABLE_ROWS = 100_000  # of tables of samples that stay in memory, and at least one table

T = TypeVar("T")


@dataclass
class OpenShards:
    """The shards of a run; the last few that were read stay open.

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

    def __getstate__(self) -> tuple[str, list[tuple[str, Commit]], ByHook[StoredHook]]:
        return self.url, self.shards, self.hooks

    def __setstate__(self, state: tuple[str, list[tuple[str, Commit]], ByHook[StoredHook]]) -> None:
        self.url, self.shards, self.hooks = state
        self.__post_init__()

    def row_bytes(self, hooks: Sequence[str]) -> int:
        """The bytes of one token at these hooks."""
        return sum(self.hooks[name].width * self.hooks[name].dtype.itemsize for name in hooks)

    def get(self, number: int) -> ShardReader:
        """The reader of a shard, which stays open for the next call. Raises OSError."""
        self._notice_fork()
        most = OPEN_SHARDS if read_by_ranges(self.shards[number][1]) else 1
        return self._kept(self._readers, number, self.open, lambda: len(self._readers) > most)

    def open(self, number: int, hooks: Sequence[str] | None = None) -> ShardReader:
        """A new reader of a shard, for some of the hooks. Raises OSError."""
        wanted = self.hooks if hooks is None else {name: self.hooks[name] for name in hooks}
        return self._read(number, lambda folder, commit: open_shard(folder, commit, wanted))

    def table(self, number: int) -> list[TableRow]:
        """The table of a shard's samples. Raises OSError."""
        self._notice_fork()
        return self._kept(
            self._tables,
            number,
            lambda number: self._read(number, read_table),
            lambda: sum(map(len, self._tables.values())) > TABLE_ROWS,
        )

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
