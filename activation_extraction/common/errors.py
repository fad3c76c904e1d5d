"""The two ways a run may fail, and the exit status of each.

`InputError`: the request cannot be met; found before anything expensive starts (status 2).
`RunError`: the request was sound, but something failed on the way (status 1).
Both carry one line for the user; any other exception that escapes is a bug in this program.
"""

import signal
from collections.abc import Callable, Iterable
from difflib import get_close_matches

from activation_extraction.common.log import log
from activation_extraction.common.visible import say_error, without_secrets


def one_line(error: BaseException) -> str:
    """The message of a library's exception, as one line without secrets."""
    return without_secrets(" ".join(str(error).split())) or type(error).__name__


def near_miss(typed: str, known: Iterable[str]) -> str:
    """Words to add to a refusal: what may have been meant by a name that is not known, if any."""
    found = get_close_matches(typed, known, 1)
    return f"; did you mean {found[0]}?" if found else ""


class InputError(Exception):
    """Bad input. The message names the flag or file, what was found and what was expected."""


class RunError(Exception):
    """A failure at run time. The message says what failed; the caller adds what is stored.

    remedy: what must change before the run can continue; None: nothing, just run it again.
    """

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy


class StorageError(RunError):
    """A shard could not be committed, so no later one may be; all earlier ones are safe."""


def for_the_user(error: BaseException) -> Exception:
    """The error itself if `main` knows how to report it. Any other one is a bug in this program:
    its traceback is logged, and a RunError takes its place."""
    if isinstance(error, RunError | InputError | MemoryError):
        return error
    log.error("unexpected error", exc_info=error)
    return RunError(
        f"unexpected {type(error).__name__}: {one_line(error)}",
        remedy="this is a bug in this program; its traceback is above",
    )


def exit_status(action: Callable[[], int]) -> int:
    """The status that `action` returns, or that of its failure, which is printed as one line."""
    try:
        return action()
    except InputError as error:
        say_error(f"error: {error}")
        return 2
    except RunError as error:
        say_error(f"error: {error}{f'; {error.remedy}' if error.remedy else ''}")
        return 1
    except MemoryError as error:
        say_error(f"error: out of memory on the host: {error}")
        return 1
    except KeyboardInterrupt:
        say_error("interrupted")
        return 128 + signal.SIGINT
