"""Declares the errors of this program, and turns them into messages and exit statuses.

`InputError` means that the request cannot be met. It is raised before anything expensive starts,
and the command exits with status 2. `RunError` means that the request was valid, but that an
operation failed later. The command then exits with status 1, or with status 2 if the same command
would fail again in the same way. Both have a message of one line for the user. Any other exception
that ends a command is a bug in this program.
"""

import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TypeVar

from activation_extraction.common.interrupts import INTERRUPTED
from activation_extraction.common.log import log
from activation_extraction.common.visible import say_error, without_secrets


def one_line(error: BaseException) -> str:
    """Returns the message of an exception as one line without secrets.

    If the message is empty, returns the name of the exception's type.
    """
    return without_secrets(" ".join(str(error).split())) or type(error).__name__


def reason_of(error: BaseException) -> str:
    """Returns the reason of an error, as one line.

    This is the operating system's description, such as "No space left on device", if the error is
    an OSError that contains one. Otherwise it is the message of the error.
    """
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return one_line(error)


def near_miss(typed: str, names: Iterable[str]) -> str:
    """Suggests the most similar valid name for an unknown one.

    Args:
        typed: The unknown name.
        names: The valid names.

    Returns:
        The end of an error message, "; did you mean NAME?". It is "" if no name is similar.
    """
    similar_names = get_close_matches(typed, names, 1)
    return f"; did you mean {similar_names[0]}?" if similar_names else ""


def install_advice(package: str) -> str:
    """Returns advice to install a package for the Python that runs this program.

    An example is "run: /usr/bin/python3 -m pip install torch".

    Args:
        package: The package, or other arguments of `pip install`.
    """
    return f"run: {sys.executable} -m pip install {package}"


def install_extra_advice(name: str) -> str:
    """Returns advice to install an extra, which is a set of optional dependencies of this program.

    Args:
        name: The name of the extra in pyproject.toml.
    """
    return "in the folder of the checkout " + install_advice(f"-e '.[{name}]'")


class InputError(Exception):
    """A flag, or a file that the user named, is not valid.

    The message names the flag or the file, states its value and the values that are expected.
    """


class FlagValueError(ValueError):
    """The text after a flag is not a valid value.

    The message does not name the flag, because the parser of the command line adds its name.
    """


class RunError(Exception):
    """An operation failed during a run. The message names the operation and the reason.

    Attributes:
        remedy: Description of the changes that the user must make before the run can continue.
            None if it is enough to run the command again.
        is_recurring: Whether the same command would fail again in the same way.
    """

    def __init__(
        self, message: str, *, remedy: str | None = None, is_recurring: bool = False
    ) -> None:
        super().__init__(message)
        self.remedy = remedy
        self.is_recurring = is_recurring


class StorageError(RunError):
    """A shard could not be committed.

    Earlier shards are committed already. Later shards must not be committed after this error.
    """


RunErrorType = TypeVar("RunErrorType", bound=RunError)


def reworded(error: BaseException, message: str, error_type: type[RunErrorType]) -> RunErrorType:
    """Returns an error of another type and with another message, but with the same remedy.

    Args:
        error: The original error. If it is no RunError, the new error has no remedy and its
            attribute `is_recurring` is False.
        message: The message of the new error.
        error_type: The type of the new error.
    """
    original_remedy = getattr(error, "remedy", None)
    is_recurring = getattr(error, "is_recurring", False)
    return error_type(message, remedy=original_remedy, is_recurring=is_recurring)


def for_the_user(error: BaseException) -> Exception:
    """Returns an error whose message can be shown to the user.

    A RunError, InputError or MemoryError is returned as it is. Any other error is a bug in this
    program, so its traceback is logged, and a RunError that describes it is returned in its place.
    """
    if isinstance(error, RunError | InputError | MemoryError):
        return error
    log.error("unexpected error", exc_info=error)
    return RunError(
        f"unexpected {type(error).__name__}: {one_line(error)}",
        remedy="this is a bug in this program; its traceback is above",
    )


def exit_status(action: Callable[[], int]) -> int:
    """Runs a command, and returns its exit status.

    An InputError, RunError, MemoryError or KeyboardInterrupt that ends the command is printed to
    stderr as one line. Other errors are raised.

    Args:
        action: The command, as a function that returns its exit status.

    Returns:
        The exit status that `action` returns. 2 after an InputError, and after a RunError that
        would occur again if the command were repeated; 1 after any other RunError and after a
        MemoryError; INTERRUPTED after a KeyboardInterrupt.
    """
    try:
        return action()
    except InputError as error:
        say_error(f"error: {error}")
        return 2
    except RunError as error:
        remedy_text = f"; {error.remedy}" if error.remedy else ""
        say_error(f"error: {error}{remedy_text}")
        return 2 if error.is_recurring else 1
    except MemoryError as error:
        say_error(f"error: out of memory on the host: {error}")
        return 1
    except KeyboardInterrupt:
        say_error("interrupted")
        return INTERRUPTED
