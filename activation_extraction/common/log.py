"""Sets up the log, which prints a line per event to stderr, and records what each thread is doing.

The filter of visible.py removes secrets and control characters from all lines. The watchdog of
run/hosts.py logs the activities of the threads if a run makes no progress.
"""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from activation_extraction.common.visible import visible

log = logging.getLogger("extract_activations")
# The names of libraries that log to stderr with handlers of their own.
LIBRARIES = ("datasets", "huggingface_hub", "transformers")
# Identifier of a thread -> description of its present activity.
activity_by_thread_id: dict[int, str] = {}


def start_logging(verbose: bool, machine_number: int, host_number: int | None) -> None:
    """Sets up the log, and filters the messages that libraries log.

    Each event becomes one line on stderr, above the progress bar if there is one.

    Args:
        verbose: Whether to log debug messages as well.
        machine_number: The number of the machine, for the beginning of each line.
        host_number: The number of the host, for the beginning of each line. None if it is unknown.
            Hosts other than host 0 log only warnings and errors unless `verbose` is true.
    """
    log_handler: logging.Handler = AboveProgressBar() if on_terminal() else logging.StreamHandler()
    host_label = "?" if host_number is None else host_number
    line_format = (
        f"%(asctime)s %(levelname)s machine {machine_number} host {host_label}: %(message)s"
    )
    log_handler.setFormatter(VisibleFormatter(line_format, "%Y-%m-%d %H:%M:%S"))
    log.handlers = [log_handler]
    log.propagate = False
    # Python's handler of last resort prints the warnings of libraries that have no handler, so it
    # gets the same formatter as the handlers of libraries.
    library_handlers = [logging.lastResort]
    for library_name in LIBRARIES:
        library_handlers += logging.getLogger(library_name).handlers
    for library_handler in filter(None, library_handlers):
        library_handler.setFormatter(VisibleFormatter())
    # gcsfs logs a traceback when it gives a request up. It also raises an exception, which this
    # program reports, so the traceback is not needed.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL + 1)
    if verbose:
        log.setLevel(logging.DEBUG)
    else:
        log.setLevel(logging.WARNING if host_number else logging.INFO)


def on_terminal() -> bool:
    """Returns whether stderr is a terminal, on which a progress bar can be shown."""
    return sys.stderr.isatty()


class AboveProgressBar(logging.StreamHandler):
    """A handler that writes lines to stderr, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        # tqdm is imported late, because readers of stored activations do not need it.
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stderr)


@contextmanager
def activity(description: str) -> Iterator[None]:
    """Records the activity of this thread during a `with` block.

    If a run makes no progress, the log shows the recorded activities of all threads.

    Args:
        description: The activity, such as "reading x.jsonl line 5".
    """
    activity_by_thread_id[threading.get_ident()] = description
    try:
        yield
    finally:
        activity_by_thread_id.pop(threading.get_ident(), None)


class VisibleFormatter(logging.Formatter):
    """A formatter that turns each log record into one line without secrets or control characters.

    If the record has a traceback, the traceback follows on further lines.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:
        return visible(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(visible, super().formatException(ei).splitlines()))
