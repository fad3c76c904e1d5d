"""The errors of this program, and the exit status and message that each of them becomes.

`InputError` (status 2) means that the request cannot be met; it is raised before anything expensive
starts. `RunError` means that the request was sound, but something failed later: status 1, or 2 if
the same command would fail again in the same way. The message of both is one line for the user. Any
other exception that escapes is a bug in this program.
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
    """Returns the operating system's description of an OSError, else the message as one line."""
    return (isinstance(error, OSError) and error.strerror) or one_line(error)


def near_miss(typed: str, names: Iterable[str]) -> str:
    """Suggests the most similar valid name for an unknown one.

    Args:
        typed: The unknown name.
        names: The valid names.

    Returns:
        The end of an error message, "; did you mean NAME?", or "" if no name is similar.
    """
    matches = get_close_matches(typed, names, 1)
    return f"; did you mean {matches[0]}?" if matches else ""


def install(package: str) -> str:
    """Returns an instruction to install a package for the Python that runs this program."""
    return f"run: {sys.executable} -m pip install {package}"


def install_extra(name: str) -> str:
    """Returns an instruction to install an optional dependency group of pyproject.toml."""
    return "in the folder of the checkout " + install(f"-e '.[{name}]'")


class InputError(Exception):
    """The input is invalid.

    The message names the flag or the file, and says what was found and what was expected.
    """


class FlagValueError(ValueError):
    """The text after a flag is not a valid value. The message does not name the flag."""


class RunError(Exception):
    """An operation failed during the run. The message says which one and why.

    Attributes:
        remedy: What must change before the run can continue. None if it is enough to run the
            command again.
        recurs: Whether the same command would fail again in the same way.
    """

    def __init__(self, message: str, *, remedy: str | None = None, recurs: bool = False) -> None:
        super().__init__(message)
        self.remedy, self.recurs = remedy, recurs


class StorageError(RunError):
    """A shard could not be committed, so no later one may be. All earlier shards are safe."""


RunErrorType = TypeVar("RunErrorType", bound=RunError)


def reworded(error: BaseException, message: str, kind: type[RunErrorType]) -> RunErrorType:
    """Returns an error with another type and message, and with the remedy of the original.

    Args:
        error: The original error. If it is no RunError, the new one has no remedy and does not
            recur.
        message: The message of the new error.
        kind: The type of the new error.
    """
    remedy = getattr(error, "remedy", None)
    recurs = getattr(error, "recurs", False)
    return kind(message, remedy=remedy, recurs=recurs)


def for_the_user(error: BaseException) -> Exception:
    """Returns an error whose message can be shown to the user.

    An error that is no RunError, InputError or MemoryError is a bug in this program. Its traceback
    is logged, and a RunError that says so is returned in its place.
    """
    if isinstance(error, RunError | InputError | MemoryError):
        return error
    log.error("unexpected error", exc_info=error)
    return RunError(
        f"unexpected {type(error).__name__}: {one_line(error)}",
        remedy="this is a bug in this program; its traceback is above",
    )


def exit_status(action: Callable[[], int]) -> int:
    """Runs a command, prints an error that ends it as one line, and returns the exit status.

    Args:
        action: The command: a function that returns an exit status. Errors other than InputError,
            RunError, MemoryError and KeyboardInterrupt escape.
    """
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
