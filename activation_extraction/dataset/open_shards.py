"""OpenShards: opens the shards of a run when they are read, and keeps recently read shards open.

OpenShards finds the shard of a sample. It also reads the table of samples and the sums for
statistics of each shard, which are in files of their own. store/shard_reader.py reads a single
shard.
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
    MAX_REQUESTS,
    can_read_ranges,
    front_bytes,
    open_shard,
    read_sums,
)
from activation_extraction.store.statistics import HookStatistics, Statistics, Sums
from activation_extraction.store.stored_hook import StoredHook
from activation_extraction.store.totals import Totals
from activation_extraction.text.sample_facts import SampleFacts

# Largest number of local safetensors files that a dataset keeps open. It keeps fewer files open if
# OPEN_FILES_FRACTION allows fewer. Of a run that stores pickles, one shard stays in memory instead.
MAX_OPEN_SHARDS = 128
# A dataset may keep at most this fraction of the files open that the process may open. The rest is
# left for other datasets, for connections and for the user's program.
OPEN_FILES_FRACTION = 1 / 8
# Largest number of bytes of memory for the open shards of a run in a bucket. Of an open shard, the
# header and two arrays with a value for each sample are in memory. A shard that was closed to save
# memory takes one request to open again.
MAX_FRONT_BYTES = 2**26
# Largest number of rows in all tables of samples that stay in memory. The table that was read last
# stays even if it has more rows.
MAX_TABLE_ROWS = 100_000

T = TypeVar("T")


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Returns a context in which a RunError is raised as an OSError.

    Users expect OSError for a damaged file.
    """
    try:
        yield
    except RunError as error:
        raise OSError(str(error)) from error


def _max_open_files() -> int:
    """Returns how many local files a dataset may keep open.

    A file stays open as long as it is mapped into memory. The number is a fraction
    (OPEN_FILES_FRACTION) of the number of files that the process may open, which is only 256 on
    macOS by default, but at most MAX_OPEN_SHARDS.
    """
    open_files_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if open_files_limit == resource.RLIM_INFINITY:
        return MAX_OPEN_SHARDS
    return max(min(int(open_files_limit * OPEN_FILES_FRACTION), MAX_OPEN_SHARDS), 1)


@dataclass
class OpenShards:
    """The shards of a run, which are opened when they are read. Recently read shards stay open.

    A pickled copy in another process opens its own files and connections. A fork of this process
    can read only local runs. Methods that read files raise OSError if a file is damaged, missing or
    replaced.

    Attributes:
        url: URL of the run, with its secrets.
        is_local: Whether the files of the run are on this machine, so that they can be mapped into
            memory.
        folder_names_and_commits: For each shard, a tuple of the name of the host's folder ("" for
            the output folder itself) and the commit of the shard.
        stored_hook_by_name: Dtype, width and encoding of every hook that is read, by the name of
            the hook.
        commits: Commits of the shards, in their order.
        first_sample_indices_of_shards: For each shard, the index of its first sample in the run.
            One further item at the end is the number of all samples.
        can_read_ranges: Whether a range of rows can be read from every shard without reading the
            whole shard. False if a shard is a pickle.
        read_sample_table: Function that takes the index of a shard in `folder_names_and_commits`
            and returns the table of its samples. Tables that were read recently stay in memory.

    Raises:
        ValueError: If the file of a shard is too small for the tokens that the commit records.
    """

    url: str
    is_local: bool
    folder_names_and_commits: list[tuple[str, Commit]]
    stored_hook_by_name: ByHook[StoredHook]

    def __post_init__(self) -> None:
        self.commits = [commit for _, commit in self.folder_names_and_commits]
        self.first_sample_indices_of_shards = [
            0,
            *accumulate(commit.count for commit in self.commits),
        ]
        self.can_read_ranges = all(map(can_read_ranges, self.commits))
        self._check_sizes()
        self._values_by_column: dict[str, np.ndarray] = {}
        # The cached functions do not refer to this object, because a cycle of references would keep
        # a decompressed pickle in memory until the garbage collector runs.
        self._read_from_shard: Callable[..., Any] = partial(
            _read_shard, self.url, self.folder_names_and_commits, {}
        )
        stored_hooks = list(self.stored_hook_by_name.values())
        max_open_shards = _max_open_files()
        if not self.can_read_ranges:
            max_open_shards = 1
        elif not self.is_local:
            max_open_shards = MAX_FRONT_BYTES // max(
                map(front_bytes, self.commits), default=MAX_FRONT_BYTES
            )
        self._lock_by_shard_index = defaultdict[int, Lock](Lock)
        self._open_shard_file: Callable[[int], SafetensorsFile] = lru_cache(
            max(max_open_shards, 1)
        )(
            partial(
                self._read_from_shard,
                lambda folder, commit: open_shard(folder, commit, stored_hooks),
            )
        )
        max_tables = MAX_TABLE_ROWS // max((commit.count for commit in self.commits), default=1)
        self.read_sample_table: Callable[[int], pyarrow.Table] = lru_cache(max(max_tables, 1))(
            partial(self._read_from_shard, read_table)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenShards, (
            self.url,
            self.is_local,
            self.folder_names_and_commits,
            self.stored_hook_by_name,
        )

    def get(self, shard_index: int) -> SafetensorsFile:
        """Returns a shard, which is opened first if it is not open yet.

        If several threads need the shard at the same time, only one of them opens it.

        Args:
            shard_index: Index of the shard in `folder_names_and_commits`.
        """
        with self._lock_by_shard_index[shard_index]:
            return self._open_shard_file(shard_index)

    def bytes_per_token(self, hooks: Sequence[str]) -> int:
        """Returns the number of bytes of memory for the values of one token at some hooks.

        Args:
            hooks: Canonical names of the hooks.
        """
        return sum(self.stored_hook_by_name[hook_name].row_dtype.itemsize for hook_name in hooks)

    def tokens_per_block(self, shard_index: int, tokens_per_chunk: int) -> int:
        """Returns the number of tokens by which the length of a chunk should be divisible.

        The file of a shard has checksums of blocks of tokens (see RangeChecksums). If a chunk began
        or ended inside a block, the rest of the block would have to be downloaded as well, so that
        the checksum of the block can be compared. A chunk of whole blocks avoids this.

        Args:
            shard_index: Index of the shard in `folder_names_and_commits`.
            tokens_per_chunk: Number of tokens in a chunk.

        Returns:
            The number of tokens in a block; 1 if the file is on this machine, if the shard has no
            checksums of blocks, or if a block has more tokens than a chunk.
        """
        commit = self.commits[shard_index]
        range_checksums = commit.files[commit.file].ranges
        if self.is_local or range_checksums is None or range_checksums.tokens > tokens_per_chunk:
            return 1
        return range_checksums.tokens

    def _check_sizes(self) -> None:
        """Checks that the activation file of each shard is large enough for the shard's tokens.

        Raises:
            ValueError: If a file has too few bytes for the number of tokens in the shard's commit.
        """
        min_token_bytes = sum(
            stored_hook.min_token_bytes for stored_hook in self.stored_hook_by_name.values()
        )
        for folder_name, commit in self.folder_names_and_commits:
            max_compression_ratio = 1 if can_read_ranges(commit) else MAX_GZIP_RATIO
            max_decompressed_bytes = commit.bytes * max_compression_ratio
            if commit.tokens * min_token_bytes > max_decompressed_bytes:
                file_url = without_secrets(
                    "/".join(filter(None, (self.url, folder_name, commit.file)))
                )
                raise ValueError(
                    f"{file_url}: {counted(commit.tokens, 'token')} of {min_token_bytes} bytes "
                    f"cannot be in {commit.bytes} bytes"
                )

    def shard_of(self, sample_index: int) -> int:
        """Returns the index in `folder_names_and_commits` of the shard that contains a sample.

        Args:
            sample_index: Index of the sample in the run, in the order of the shards.
        """
        return bisect_right(self.first_sample_indices_of_shards, sample_index) - 1

    def facts(self, sample_index: int) -> SampleFacts:
        """Returns the facts of a sample, such as its row and its id, from the table of its shard.

        Args:
            sample_index: Index of the sample in the run, in the order of the shards.
        """
        shard_index = self.shard_of(sample_index)
        index_in_shard = sample_index - self.first_sample_indices_of_shards[shard_index]
        sample_row = self.read_sample_table(shard_index).slice(index_in_shard, 1)
        return stored_samples(sample_row)[0].facts

    def find(self, folder: str, sample_idx: int) -> int | None:
        """Looks up a sample by its number, and returns its index in the run.

        Args:
            folder: Name of the folder of the host that stored the sample.
            sample_idx: Number of the sample, which is unique over all machines and hosts.

        Returns:
            The index of the sample, in the order of the shards; None if no shard of the folder
            contains the sample.
        """
        for shard_index, (folder_name, commit) in enumerate(self.folder_names_and_commits):
            if folder_name == folder and commit.first <= sample_idx <= commit.last:
                sample_numbers_of_shard = self.read_sample_table(shard_index)[
                    "sample_idx"
                ].to_numpy()
                index_in_shard = int(np.searchsorted(sample_numbers_of_shard, sample_idx))
                if sample_numbers_of_shard[index_in_shard] == sample_idx:
                    return self.first_sample_indices_of_shards[shard_index] + index_in_shard
        return None

    def read_all(self, read: Callable[[int], T]) -> Iterator[T]:
        """Calls a function for every shard, in several threads, and yields its results.

        The results have the order of the shards.

        Args:
            read: Function that takes the index of a shard in `folder_names_and_commits`, reads
                files of the shard, and returns the result.
        """
        # The pool is not kept, because a fork of this process would lack its threads.
        with ThreadPoolExecutor(MAX_REQUESTS) as thread_pool:
            yield from thread_pool.map(read, range(len(self.folder_names_and_commits)))

    @cached_property
    def samples(self) -> pyarrow.Table:
        """The table with a row for each sample of the run, in the order of the shards."""
        return concatenate_tables(self.read_all(self.read_sample_table))

    def columns(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Returns columns of the table of all samples, and keeps them in memory.

        Args:
            names: Names of the columns.

        Returns:
            The stored values by the name of the column, as arrays of objects (samples,). The value
            of a sample that lacks the column is None.
        """
        unread_column_names = [
            column_name for column_name in names if column_name not in self._values_by_column
        ]
        if unread_column_names:
            sample_tables = list(self.read_all(self.read_sample_table))
            for column_name in unread_column_names:
                column_values = [
                    column_value
                    for sample_table in sample_tables
                    for column_value in values_of(sample_table, column_name)
                ]
                self._values_by_column[column_name] = np.fromiter(
                    column_values, object, len(column_values)
                )
        return {column_name: self._values_by_column[column_name] for column_name in names}

    @cached_property
    def statistics(self) -> ByHook[HookStatistics]:
        """The statistics of every hook over all shards.

        The commits contain the statistics over all dimensions. The statistics of each dimension
        are computed from `sums`, which are read from a file of each shard when a statistic of a
        dimension is first used.
        """
        overall_statistics_by_hook_name = Totals.of(self.commits).statistics
        statistics_by_hook_name = {
            hook_name: HookStatistics(
                **vars(overall_statistics_by_hook_name.get(hook_name, Statistics())),
                load=partial(self._sums_of, hook_name),
            )
            for hook_name in self.stored_hook_by_name
        }
        return ByHook(statistics_by_hook_name, self.stored_hook_by_name.canonical_name_by_alias)

    def _sums_of(self, hook: str) -> Sums:
        return self.sums.get(hook) or Sums.zeros(self.stored_hook_by_name[hook].width)

    @cached_property
    def sums(self) -> dict[str, Sums]:
        """Name of a hook -> the sums of its values and norms over the tokens of all shards.

        `store.statistics.Sums` describes the sums. Hooks with codes are left out, because shards
        contain no sums of codes. The dict is empty for a run without shards.

        The sums of the shards are merged in the order of the shards, so that rounding does not
        depend on the timing of threads.
        """
        names_of_array_hooks = [
            hook_name
            for hook_name, stored_hook in self.stored_hook_by_name.items()
            if stored_hook.values_are_array
        ]
        run_sums_by_hook_name: dict[str, Sums] = {}
        for shard_sums_by_hook_name in self.read_all(
            partial(self._read_from_shard, partial(read_sums, hooks=names_of_array_hooks))
        ):
            for hook_name, sums_of_hook in shard_sums_by_hook_name.items():
                run_sums_by_hook_name[hook_name] = (
                    run_sums_by_hook_name[hook_name].merge(sums_of_hook)
                    if hook_name in run_sums_by_hook_name
                    else sums_of_hook
                )
        return run_sums_by_hook_name


def _read_shard(
    url: str,
    folder_names_and_commits: Sequence[tuple[str, Commit]],
    folder_by_name: dict[str, Folder],
    read: Callable[[Folder, Commit], T],
    shard_index: int,
) -> T:
    """Calls a function that reads a shard, and returns the result of the function.

    Args:
        url: URL of the run.
        folder_names_and_commits: For each shard, a tuple of the name of its folder and its commit.
        folder_by_name: Open folders by name. The folder of the shard is added if it is missing.
        read: Function that takes the folder and the commit of a shard, reads files of the shard,
            and returns the result.
        shard_index: Index of the shard in `folder_names_and_commits`.

    Raises:
        OSError: If `read` raises RunError, for example because the file is damaged.
    """
    folder_name, commit = folder_names_and_commits[shard_index]
    with as_os_errors():
        if folder_name not in folder_by_name:
            folder_by_name[folder_name] = Folder(url).child(folder_name)
        return read(folder_by_name[folder_name], commit)
