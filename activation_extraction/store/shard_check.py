"""Checks whole shards, for --verify and --repair.

--verify reports bad shards, and --repair withdraws them.
Both must tell a bad shard from one that could not be read: only content that was read and differs,
or a file that is definitely absent, makes a shard bad. These are all checks of a shard, here and in
readers, and what each of them finds that no other does:

- *Sizes* (`RunLog.missing_files`, and `check_shard` here): files that are missing or cut short,
  before any is read, and files that are too long. Reading refuses the latter before it believes
  their size, which would look like a request that failed.
- *Versions* (shard_reader.py, in a bucket): a file that was replaced since its JSON was read,
  because the run was overwritten or repaired. Its content is as sound as before.
- *CRC-32C of every MiB*, and of every block of tokens in a safetensors shard (shard_reader.py):
  damage in a range of the file, for readers that never read the rest of it.
- *SHA-256* of a whole file (shard_reader.py): any damage, with certainty. The small files are
  compared whenever they are read, the activations only here.
- *Dtypes, shapes and counts* of the tensors (`open_shard`) and of the table (`read_table`): files
  that are not damaged, but not the ones that the JSON describes, by a fault of the program that
  wrote them or of whoever edited the JSON.

`check_shard` compares the sizes, the versions, the SHA-256 of every file, and the counts of the
table. Reading rows compares the CRC-32C and the tensors; --verify reads some samples that way to
recompute them. The checksums inside gzip and zip files find nothing more, because the bytes of
these files were compared before.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np

from activation_extraction.common.errors import RunError
from activation_extraction.store.folder import Folder, FolderError
from activation_extraction.store.run_log import Commit, RunLog
from activation_extraction.store.sample_table import read_table
from activation_extraction.store.shard_reader import check_shard_file, read_sums

SHARDS_AT_ONCE = 4  # a shard in a bucket is in memory while it is checked
NO_NUMBERS = np.zeros(0, np.int64)
T = TypeVar("T")


class CheckedShard(NamedTuple):
    """The result of checking a shard.

    Attributes:
        folder: The name of the host's folder; "" for the output itself.
        commit: The commit of the shard.
        problem: The first problem that was found, with the path of the file; "" if there is none.
        failure: The request that failed, so that nobody knows whether the shard is good. None if
            every request was answered.
        sample_idx: The numbers of the shard's samples, int64; None if there is a problem.
    """

    folder: str
    commit: Commit
    problem: str = ""
    failure: FolderError | None = None
    sample_idx: np.ndarray | None = None


def file_path(folder: str, name: str) -> str:
    """Returns the path of a file in the output.

    Args:
        folder: The name of the host's folder; "" for the output itself.
        name: The name of the file.
    """
    return f"{folder}/{name}" if folder else name


def check_shard(store: Folder, folder: str, stored: RunLog, commit: Commit) -> CheckedShard:
    """Checks a shard, up to its first problem.

    Args:
        store: The host's folder.
        folder: The name of that folder, for messages; "" for the output itself.
        stored: The content of the folder.
        commit: The commit of the shard.

    Returns:
        The result. A problem of the shard or a failed request is recorded there, not raised.
    """
    if not commit.count:
        return CheckedShard(folder, commit, sample_idx=NO_NUMBERS)
    where = file_path(folder, commit.file)
    try:
        _check_sizes(store, stored, commit)
        check_shard_file(store, commit)
        read_sums(store, commit, ())
        sample_idx = read_table(store, commit)["sample_idx"].to_numpy()
    except FolderError as failure:
        return CheckedShard(folder, commit, f"{where}: {failure}", failure)
    except (RunError, ValueError) as error:
        problem = f"{where}: {error}".replace(f"{where}: {commit.file}: ", f"{where}: ")
        return CheckedShard(folder, commit, problem)
    return CheckedShard(folder, commit, sample_idx=sample_idx)


def _check_sizes(store: Folder, stored: RunLog, commit: Commit) -> None:
    """Raises RunError if a file of a shard is absent or has another size than its JSON says."""
    for name, facts in commit.files.items():
        size = stored.files.get(name)
        if size != facts.bytes:  # a listing that comes in pages is no snapshot
            entry = store.head(name)
            size = None if entry is None else entry.size
        if size is None:
            moved = stored.moved_to
            where = f" here, it was uploaded to {moved}" if moved else ""
            raise RunError(f"{name}: is missing{where}")
        if size != facts.bytes:
            raise RunError(f"{name}: has {size} bytes, its JSON says {facts.bytes}")


def for_each_shard(check: Callable[..., T], shards: Sequence[tuple[Commit, tuple]]) -> Iterator[T]:
    """Calls `check` for several shards at the same time, and yields its results in order.

    Args:
        check: The function to call.
        shards: The commit of each shard, for the progress bar, and the arguments of `check`.
    """
    from tqdm import tqdm  # imported late, because readers and writers of shards do not need it

    total = sum(commit.bytes for commit, _ in shards)
    with (
        ThreadPoolExecutor(SHARDS_AT_ONCE) as pool,
        tqdm(total=total, unit="B", unit_scale=True, desc="verifying", disable=None) as bar,
    ):
        jobs = [pool.submit(check, *arguments) for _, arguments in shards]
        try:
            for job, (commit, _) in zip(jobs, shards, strict=True):
                yield job.result()
                bar.update(commit.bytes)
        finally:  # Ctrl-C and failures wait only for the shards that are being read
            pool.shutdown(cancel_futures=True)
