"""The home folder of the user, for which ~ stands, and the user's caches.

In a container there may be none: HOME is not set, and the system does not know the user.
"""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from activation_extraction.common.errors import InputError


def expand_home(flag: str, path: str) -> str:
    """Returns the path that a flag gives, with the home folder for ~.

    Raises InputError if there is none; a folder called ~ would be made.
    """
    expanded = os.path.expanduser(path)
    if expanded.startswith("~"):
        raise InputError(
            f"--{flag} {path}: no home folder is known for {path.split('/')[0]}; set HOME, or give "
            f"a path without ~ (./{path} if this is its name)"
        )
    return expanded


def cache_home() -> str:
    """Returns the folder of the user's caches; it begins with ~ if there is no home."""
    return os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")


def set_cache_home() -> None:
    """Sets XDG_CACHE_HOME if there is no home; libraries would make a folder called ~."""
    if cache_home().startswith("~"):
        try:
            os.environ["XDG_CACHE_HOME"] = str(_temporary_caches())
        except OSError:  # not even temporary files can be written
            os.environ["XDG_CACHE_HOME"] = os.devnull


def _temporary_caches() -> Path:
    """Returns a folder of this user alone, the same at each start unless another user has it."""
    folder = Path(tempfile.gettempdir(), f"cache-of-user-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return folder if own and not found.st_mode & 0o077 else Path(tempfile.mkdtemp(prefix="cache-"))
