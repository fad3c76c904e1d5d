"""A run can fail in two ways, each with an exit status of its own.

`InputError` (status 2) means that the request cannot be met; it is raised before anything expensive
starts. `RunError` (status 1) means that the request was sound, but something failed on the way, or
(status 2) that the same command would compute the same failure again.
Both carry one line for the user; any other exception that escapes is a bug in this program.
"""

import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TypeVar

from activation_extraction.common.interrupts import INTERRUPTED
from activation_extraction.common.log import log
from activation_extraction.common.visible import say_error, without_secrets


def one_line(error: BaseException) -> str:
    """Returns the message of a library's exception as one line without secrets."""
    return without_secrets(" ".join(str(error).split())) or type(error).__name__


def reason_of(error: BaseException) -> str:
    """Returns the system's words for an error of the system; of any other, its message."""
    return (isinstance(error, OSError) and error.strerror) or one_line(error)


def near_miss(typed: str, known: Iterable[str]) -> str:
    """Returns the end of a refusal, which suggests a known name for the unknown one, or ""."""
    found = get_close_matches(typed, known, 1)
    return f"; did you mean {found[0]}?" if found else ""


def install(package: str) -> str:
    """Says which command installs a package for the Python that runs this."""
    return f"run: {sys.executable} -m pip install {package}"


def install_extra(name: str) -> str:
    """Says which command installs one of our optional groups of packages."""
    return "in the folder of the checkout " + install(f"-e '.[{name}]'")


class InputError(Exception):
    """The input is bad. The message names the flag or file, what was found and what was wanted."""


class FlagValueError(ValueError):
    """What was typed after a flag is no value of it. The message does not name the flag."""


class RunError(Exception):
    """Something failed at run time. The message says what failed; the caller adds what is stored.

    remedy: what must change before the run can continue; None if running it again is enough.
    recurs: whether the same command can only fail again.
    """

    def __init__(self, message: str, *, remedy: str | None = None, recurs: bool = False) -> None:
        super().__init__(message)
        self.remedy, self.recurs = remedy, recurs


class StorageError(RunError):
    """A shard could not be committed, so no later one may be; all earlier ones are safe."""


E = TypeVar("E", bound=RunError)


def reworded(error: BaseException, message: str, kind: type[E]) -> E:
    """Returns the same failure as an error of `kind`, with another message."""
    remedy, recurs = getattr(error, "remedy", None), getattr(error, "recurs", False)
    return kind(message, remedy=remedy, recurs=recurs)


def for_the_user(error: BaseException) -> Exception:
    """Returns the error itself if it can be shown to the user, or else a RunError in its place.

    Any error that the user cannot act on is a bug in this program, so its traceback is logged.
    """
    if isinstance(error, RunError | InputError | MemoryError):
        return error
    log.error("unexpected error", exc_info=error)
    return RunError(
        f"unexpected {type(error).__name__}: {one_line(error)}",
        remedy="this is a bug in this program; its traceback is above",
    )


def exit_status(action: Callable[[], int]) -> int:
    """Runs `action` and returns its status; prints a failure as one line and returns its status."""
    try:
        return action()
    except InputError as error:
        say_error(f"error: {error}")
        return 2
    except RunError as error:
        say_error(f"error: {error}{f'; {error.remedy}' if error.remedy else ''}")
        return 2 if error.recurs else 1
    except MemoryError as error:
        say_error(f"error: out of memory on the host: {error}")
        return 1
    except KeyboardInterrupt:
        say_error("interrupted")
        return INTERRUPTED
