"""OpenShards: opens the shards of a run when they are read, and keeps the last ones open.

It finds the shard of a sample, and reads the tables and the statistics beside the shards.
store/shard_reader.py reads a single shard.
"""

import resource
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from threading import Lock
from typing import Any, TypeVar

import numpy as np
import pyarrow

from activation_extraction.common.errors import RunError
from activation_extraction.common.visible import counted, without_secrets
from activation_extraction.dataset.token_batch import ByHook
from activation_extraction.store.folder import Folder
from activation_extraction.store.hook_values import HookValues
from activation_extraction.store.run_log import Commit
from activation_extraction.store.safetensors_file import SafetensorsFile
from activation_extraction.store.sample_table import (
    concatenate_tables,
    read_table,
    stored_samples,
    values_of,
)
from activation_extraction.store.shard import MAX_GZIP_RATIO
from activation_extraction.store.shard_reader import (
    IN_FLIGHT,
    front_bytes,
    open_shard,
    read_by_ranges,
    read_sums,
)
from activation_extraction.store.statistics import HookStatistics, Statistics, Sums
from activation_extraction.store.totals import Totals
from activation_extraction.text.sample_facts import SampleFacts

# The largest number of local safetensors files of a dataset that stay open, if the process may open
# so many files. If a run stores pickles, one shard stays in memory.
MAX_OPEN_SHARDS = 128
# The fraction of the files that this process may open which a dataset keeps open. Several datasets,
# connections and the files of the user's program need the rest.
OPEN_FILES_FRACTION = 1 / 8
# Most memory for the headers and the arrays of samples of the shards in a bucket that stay open.
# Opening a shard anew takes one request.
KEPT_BYTES = 2**26
# Most rows of the tables of samples that stay in memory. One table stays even if it is larger.
TABLE_ROWS = 100_000

T = TypeVar("T")


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Raises OSError in place of a RunError, because users expect it for a damaged file."""
    try:
        yield
    except RunError as error:
        raise OSError(str(error)) from error


def _max_open_files() -> int:
    """Returns how many local files a dataset may keep open.

    A file stays open as long as it is mapped into memory. On macOS, a process may open 256 files by
    default.
    """
    files_of_process, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files_of_process == resource.RLIM_INFINITY:
        return MAX_OPEN_SHARDS
    return max(min(int(files_of_process * OPEN_FILES_FRACTION), MAX_OPEN_SHARDS), 1)


@dataclass
class OpenShards:
    """The shards of a run, which are opened when they are read. The last ones stay open.

    A pickled copy in another process opens files and connections of its own. A fork of this process
    can read only local runs. Methods that read raise OSError for damaged, missing and replaced
    files.

    Attributes:
        url: URL of the run, with its secrets.
        local: Whether the run is on this machine.
        shards: Name of the host's folder ("" for the output itself) and commit of each shard.
        hooks: Dtype, width and encoding of every hook that is read, by name.
        commits: Commits of the shards.
        firsts: Number of samples before each shard; the last item is the number of all samples.
        by_ranges: Whether a range of rows can be read from every shard without reading the whole
            shard. False if a shard is a pickle.
        table: Function that takes the number of a shard and returns the table of its samples.

    Raises:
        ValueError: A file is too small for its tokens.
    """

    url: str
    local: bool
    shards: list[tuple[str, Commit]]
    hooks: ByHook[HookValues]

    def __post_init__(self) -> None:
        self.commits = [commit for _, commit in self.shards]
        self.firsts = [0, *accumulate(commit.count for commit in self.commits)]
        self.by_ranges = all(map(read_by_ranges, self.commits))
        self._check_sizes()
        self._columns: dict[str, np.ndarray] = {}
        # The cached functions do not refer to this object: such a cycle would keep a decompressed
        # pickle in memory until the garbage collector runs.
        self._read: Callable[..., Any] = partial(_read, self.url, self.shards, {})
        hooks = list(self.hooks.values())
        most = _max_open_files()
        if not self.by_ranges:
            most = 1
        elif not self.local:
            most = KEPT_BYTES // max(map(front_bytes, self.commits), default=KEPT_BYTES)
        self._locks = defaultdict[int, Lock](Lock)
        self._open: Callable[[int], SafetensorsFile] = lru_cache(max(most, 1))(
            partial(self._read, lambda folder, commit: open_shard(folder, commit, hooks))
        )
        tables = TABLE_ROWS // max((commit.count for commit in self.commits), default=1)
        self.table: Callable[[int], pyarrow.Table] = lru_cache(max(tables, 1))(
            partial(self._read, read_table)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenShards, (self.url, self.local, self.shards, self.hooks)

    def get(self, shard: int) -> SafetensorsFile:
        """Returns an open shard. It is opened only once if several threads need it.

        Args:
            shard: Number of the shard, from 0.
        """
        with self._locks[shard]:
            return self._open(shard)

    def row_bytes(self, hooks: Sequence[str]) -> int:
        """Returns the bytes of memory for the values of one token at some hooks.

        Args:
            hooks: Canonical names of the hooks.
        """
        return sum(self.hooks[name].row.itemsize for name in hooks)

    def block_tokens(self, shard: int, most: int) -> int:
        """Returns the number of tokens of which the length of a chunk is best a multiple.

        A chunk of whole blocks (see RangeChecksums) is read from a bucket without the bytes of
        other tokens.

        Args:
            shard: Number of the shard, from 0.
            most: Number of tokens in a chunk.

        Returns:
            The number; 1 if the file is on this machine, if the shard has no such blocks, or if a
            chunk is too small for one.
        """
        commit = self.commits[shard]
        ranges = commit.files[commit.file].ranges
        if self.local or ranges is None or ranges.tokens > most:
            return 1
        return ranges.tokens

    def _check_sizes(self) -> None:
        """Raises ValueError if a shard's file is too small for the tokens that it should hold."""
        row = sum(hook.min_token_bytes for hook in self.hooks.values())
        for folder, commit in self.shards:
            most = commit.bytes * (1 if read_by_ranges(commit) else MAX_GZIP_RATIO)
            if commit.tokens * row > most:
                where = without_secrets("/".join(filter(None, (self.url, folder, commit.file))))
                raise ValueError(
                    f"{where}: {counted(commit.tokens, 'token')} of {row} bytes cannot be in "
                    f"{commit.bytes} bytes"
                )

    def shard_of(self, sample: int) -> int:
        """Returns the number of the shard that contains a sample.

        Args:
            sample: Number of the sample in the run, in the order of the shards.
        """
        return bisect_right(self.firsts, sample) - 1

    def facts(self, sample: int) -> SampleFacts:
        """Returns the facts of a sample.

        Args:
            sample: Number of the sample in the run, in the order of the shards.
        """
        shard = self.shard_of(sample)
        row = self.table(shard).slice(sample - self.firsts[shard], 1)
        return stored_samples(row)[0].facts

    def find(self, folder: str, sample_idx: int) -> int | None:
        """Returns the number of a sample in the run, in the order of the shards.

        Args:
            folder: Name of the folder of the host that stored the sample.
            sample_idx: Number of the sample among those of all hosts.

        Returns:
            The number; None if no shard of the folder contains the sample.
        """
        for number, (name, commit) in enumerate(self.shards):
            if name == folder and commit.first <= sample_idx <= commit.last:
                numbers = self.table(number)["sample_idx"].to_numpy()
                row = int(np.searchsorted(numbers, sample_idx))
                if numbers[row] == sample_idx:
                    return self.firsts[number] + row
        return None

    def each(self, read: Callable[[int], T]) -> Iterator[T]:
        """Yields the results of reading all shards, in their order. Several threads read them.

        Args:
            read: Function that takes the number of a shard, reads the shard or a file beside it,
                and returns the result.
        """
        # The threads end with this call, because a fork of this process would lack them.
        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            yield from pool.map(read, range(len(self.shards)))

    @cached_property
    def samples(self) -> pyarrow.Table:
        """The table with a row for each sample of the run, in the order of the shards."""
        return concatenate_tables(self.each(self.table))

    def columns(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns columns of the table of all samples. They stay in memory.

        Args:
            names: Names of the columns.

        Returns:
            The stored values by the name of the column: arrays of objects (samples,), with None for
            a sample that lacks the column.
        """
        if missing := [name for name in names if name not in self._columns]:
            tables = list(self.each(self.table))
            for name in missing:
                values = [value for table in tables for value in values_of(table, name)]
                self._columns[name] = np.fromiter(values, object, len(values))
        return {name: self._columns[name] for name in names}

    @cached_property
    def statistics(self) -> ByHook[HookStatistics]:
        """The statistics of every hook over all shards.

        The statistics of every dimension are computed from `sums`, which is read when they are
        first used.
        """
        totals = Totals.of(self.commits).statistics
        statistics = {
            name: HookStatistics(
                **vars(totals.get(name, Statistics())), load=partial(self._sums_of, name)
            )
            for name in self.hooks
        }
        return ByHook(statistics, self.hooks.aliases)

    def _sums_of(self, hook: str) -> Sums:
        return self.sums.get(hook) or Sums.zeros(self.hooks[hook].width)

    @cached_property
    def sums(self) -> dict[str, Sums]:
        """The sums over all shards, by the name of the hook. Hooks of codes have no sums.

        The sums of the shards are merged in the order of the shards, so that the result is always
        the same. The dict is empty for a run without shards.
        """
        summed = [name for name, hook in self.hooks.items() if hook.is_array]
        total: dict[str, Sums] = {}
        for of_shard in self.each(partial(self._read, partial(read_sums, hooks=summed))):
            for hook, sums in of_shard.items():
                total[hook] = total[hook].merge(sums) if hook in total else sums
        return total


def _read(
    url: str,
    shards: Sequence[tuple[str, Commit]],
    folders: dict[str, Folder],
    read: Callable[[Folder, Commit], T],
    number: int,
) -> T:
    """Returns the result of reading a shard.

    Args:
        url: URL of the run.
        shards: Name of the folder and commit of each shard.
        folders: Folders that are open, by name. The shard's folder is added.
        read: Function that takes the folder and the commit of a shard, reads the shard or a file
            beside it, and returns the result.
        number: Number of the shard, from 0.

    Raises:
        OSError: `read` raises RunError, for example because the file is damaged.
    """
    name, commit = shards[number]
    with as_os_errors():
        if name not in folders:
            folders[name] = Folder(url).child(name)
        return read(folders[name], commit)
