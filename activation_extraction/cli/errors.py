"""The two ways a run may fail, and the exit status of each.

`InputError`: the request cannot be met; found before anything expensive starts (status 2).
`RunError`: the request was sound and something failed on the way (status 1).
Both carry one line for the user; anything else that escapes is a defect of this program.
"""

import logging

log = logging.getLogger("extract_activations")


def one_line(error: BaseException) -> str:
    """What an exception of a library says, as one line."""
    return " ".join(str(error).split()) or type(error).__name__


class InputError(Exception):
    """Bad input. The message names the flag or file, what was found and what was expected."""


class RunError(Exception):
    """A failure at run time. The message says what failed; the caller adds what is stored.

    remedy: what has to change before the run can continue; None: the same command continues.
    """

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.remedy = remedy


def for_the_user(error: Exception) -> Exception:
    """The error itself where `main` has a line for it. Any other one is a defect of this program:
    its traceback is logged, and a RunError takes its place."""
    if isinstance(error, RunError | InputError | MemoryError):
        return error
    log.error("unexpected error", exc_info=error)
    return RunError(
        f"unexpected {type(error).__name__}: {one_line(error)}",
        remedy="this is a defect of the program; its traceback is above",
    )
