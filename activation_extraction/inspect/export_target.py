"""The local folder that an export writes to: taken by one process, and with room for it all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.store.local_files import lock_folder, unlock


def local_folder(target: str) -> Path:
    """The folder that --export_dir names."""
    if "://" in target:
        raise InputError(f"--export_dir {target}: is a URL; expected a local folder")
    return Path(target)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """While no other process may write to the folder, which is made if necessary."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder)
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise InputError(f"--export_dir {folder}: cannot be written to: {reason}") from error
    except RunError as error:
        raise RunError(f"--export_dir {folder}: another process is writing to it") from error
    try:
        yield
    finally:
        unlock(lock)


def check_space(folder: Path, needed: int) -> None:
    """Raises InputError when the disk of `folder` has less room than `needed` bytes."""
    if needed > (free := shutil.disk_usage(folder).free):
        raise InputError(
            f"--export_dir {folder}: has {free / 1e9:,.1f} GB free, needs {needed / 1e9:,.1f} GB"
        )
