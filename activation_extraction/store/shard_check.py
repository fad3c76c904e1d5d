"""Checks whole shards, for --verify and --repair.

--verify reports bad shards. --repair replaces their commits by reservations, and stores their
samples again. Both must distinguish a bad shard from a shard that could not be read. A shard is
only bad if its content was read and differs from its commit, or if one of its files certainly does
not exist. The following list contains all checks of a shard, in this module and in the modules that
read shards. For each check, it gives the damage that no other check finds:

- *Sizes* (`RunLog.missing_file_names`, and `check_shard` here): files that are missing or cut
  short, before any file is read, and files that are too long. The folder refuses to read a file
  that is too long, and without this check the refusal would look like a request that failed.
- *Versions* (shard_reader.py, in a bucket): a file that was replaced since its commit was read,
  because the run was overwritten or repaired. Its content is not damaged.
- *CRC-32C of every MiB* of the file of activations, and of every block of tokens in a safetensors
  shard (shard_reader.py): damage in a range of the file, for readers that do not read the rest of
  the file.
- *SHA-256* of a whole file (shard_reader.py): any damage, with certainty. The small files are
  compared whenever they are read; the file of activations is compared only here.
- *Dtypes, shapes and counts* of the tensors (`open_shard`) and of the table (`read_table`): files
  that are not damaged, but differ from the description in the commit, because of a fault of the
  program that wrote them, or because somebody has edited the commit.

`check_shard` compares the sizes, the versions, the SHA-256 of every file, and the counts of the
table. Reading the values of tokens compares the CRC-32C and the tensors. --verify reads some
samples that way, to compare them with recomputed values. The checksums inside gzip and zip files
find nothing more, because the bytes of these files were compared before.
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

# Number of shards that are checked at the same time. It is small, because a shard in a bucket is
# read into memory.
SHARDS_AT_ONCE = 4
NO_NUMBERS = np.zeros(0, np.int64)  # numbers of the samples of a shard without samples
T = TypeVar("T")


class CheckedShard(NamedTuple):
    """The result of checking a shard.

    Attributes:
        folder_name: Name of the host's folder; "" for the output folder itself.
        commit: Commit of the shard.
        problem: Message on the first problem that was found, with the path of the file; "" if there
            is none. A failed request is also a problem.
        failure: Error of a request that failed, so that it is unknown whether the shard is good.
            None if no request failed.
        sample_numbers: Numbers (`sample_idx`) of the shard's samples, int64 (samples,). None if
            there is a problem.
    """

    folder_name: str
    commit: Commit
    problem: str = ""
    failure: FolderError | None = None
    sample_numbers: np.ndarray | None = None


def file_path(folder_name: str, name: str) -> str:
    """Returns the path of a file relative to the output of the run, for messages.

    Args:
        folder_name: Name of the host's folder; "" for the output folder itself.
        name: Name of the file.
    """
    return f"{folder_name}/{name}" if folder_name else name


def check_shard(store: Folder, folder_name: str, run_log: RunLog, commit: Commit) -> CheckedShard:
    """Checks a shard until the first problem is found.

    Args:
        store: The host's folder.
        folder_name: Name of this folder, for messages; "" for the output folder itself.
        run_log: Log of this folder.
        commit: Commit of the shard.

    Returns:
        The result of the check. It records a problem of the shard or a failed request. Neither of
        them raises an exception.
    """
    if not commit.count:
        return CheckedShard(folder_name, commit, sample_numbers=NO_NUMBERS)
    shard_path = file_path(folder_name, commit.file)
    try:
        _check_sizes(store, run_log, commit)
        check_shard_file(store, commit)
        read_sums(store, commit, ())
        sample_numbers = read_table(store, commit)["sample_idx"].to_numpy()
    except FolderError as failure:
        return CheckedShard(folder_name, commit, f"{shard_path}: {failure}", failure)
    except (RunError, ValueError) as error:
        problem_message = f"{shard_path}: {error}".replace(
            f"{shard_path}: {commit.file}: ", f"{shard_path}: "
        )
        return CheckedShard(folder_name, commit, problem_message)
    return CheckedShard(folder_name, commit, sample_numbers=sample_numbers)


def _check_sizes(store: Folder, run_log: RunLog, commit: Commit) -> None:
    """Compares the sizes of a shard's files with its commit.

    Args:
        store: The host's folder.
        run_log: Log of this folder.
        commit: Commit of the shard.

    Raises:
        RunError: If a file is missing or has another size.
    """
    for file_name, recorded_facts in commit.files.items():
        actual_file_size = run_log.size_by_file_name.get(file_name)
        # The folder was listed earlier, so a size that differs may be outdated and is read again.
        if actual_file_size != recorded_facts.bytes:
            current_file_entry = store.head(file_name)
            actual_file_size = None if current_file_entry is None else current_file_entry.byte_count
        if actual_file_size is None:
            upload_url = run_log.moved_to
            upload_note = f" here, it was uploaded to {upload_url}" if upload_url else ""
            raise RunError(f"{file_name}: is missing{upload_note}")
        if actual_file_size != recorded_facts.bytes:
            raise RunError(
                f"{file_name}: has {actual_file_size} bytes, its JSON says {recorded_facts.bytes}"
            )


def for_each_shard(
    check: Callable[..., T], commits_and_arguments: Sequence[tuple[Commit, tuple]]
) -> Iterator[T]:
    """Calls a function for several shards at the same time, and yields its results in order.

    Args:
        check: Function to call for each shard.
        commits_and_arguments: A tuple for each shard, which contains:
            The commit of the shard. Its size is used for the progress bar.
            A tuple of the arguments of `check`.

    Yields:
        The results of `check`, in the order of `commits_and_arguments`.
    """
    from tqdm import tqdm  # imported here, because only these checks need it

    total_bytes = sum(commit.bytes for commit, _ in commits_and_arguments)
    with (
        ThreadPoolExecutor(SHARDS_AT_ONCE) as check_threads,
        tqdm(
            total=total_bytes, unit="B", unit_scale=True, desc="verifying", disable=None
        ) as progress_bar,
    ):
        check_futures = [
            check_threads.submit(check, *check_arguments)
            for _, check_arguments in commits_and_arguments
        ]
        try:
            for check_future, (commit, _) in zip(check_futures, commits_and_arguments, strict=True):
                yield check_future.result()
                progress_bar.update(commit.bytes)
        finally:
            # After Ctrl-C or a failure, only checks that have begun are completed.
            check_threads.shutdown(cancel_futures=True)
