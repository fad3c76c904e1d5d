"""The log, which prints one line per event to stderr, through the filter of visible.py.

The module also keeps what each thread is doing; a watchdog names it if the run makes no progress.
"""

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from activation_extraction.common.visible import visible

log = logging.getLogger("extract_activations")
LIBRARIES = ("datasets", "huggingface_hub", "transformers")  # these log to stderr by themselves
activities: dict[int, str] = {}  # thread's identifier -> description of its present activity


def start_logging(verbose: bool, machine: int, host: int | None) -> None:
    """Sets up the log: one line per event to stderr, above the progress bar if there is one.

    Messages that libraries log pass the same filter.

    Args:
        verbose: Whether to log debug messages as well.
        machine: Number of the machine, for the beginning of each line.
        host: Number of the host, for the beginning of each line. None while it is unknown. Hosts
            other than host 0 log only warnings and errors unless `verbose` is true.
    """
    handler: logging.Handler = AboveProgressBar() if on_terminal() else logging.StreamHandler()
    who = f"machine {machine} host {'?' if host is None else host}"
    line = f"%(asctime)s %(levelname)s {who}: %(message)s"
    handler.setFormatter(VisibleFormatter(line, "%Y-%m-%d %H:%M:%S"))
    log.handlers = [handler]
    others = [other for name in LIBRARIES for other in logging.getLogger(name).handlers]
    for other in filter(None, (logging.lastResort, *others)):
        other.setFormatter(VisibleFormatter())
    log.propagate = False
    # gcsfs logs a traceback when it gives up a request; the caller reports the failure in one line.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL + 1)
    log.setLevel(logging.DEBUG if verbose else logging.WARNING if host else logging.INFO)


def on_terminal() -> bool:
    """Returns whether stderr is a terminal: terminals get a progress bar, log files get lines."""
    return sys.stderr.isatty()


class AboveProgressBar(logging.StreamHandler):
    """Writes to stderr, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm  # imported late, because readers of stored activations do not need it

        tqdm.write(self.format(record), file=sys.stderr)


@contextmanager
def activity(description: str) -> Iterator[None]:
    """Records the activity of this thread for the time of a `with` block.

    Args:
        description: Description of the activity, such as "reading x.jsonl line 5".
    """
    activities[threading.get_ident()] = description
    try:
        yield
    finally:
        activities.pop(threading.get_ident(), None)


class VisibleFormatter(logging.Formatter):
    """Formats a record as one line, and its traceback as lines below that."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return visible(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(visible, super().formatException(ei).splitlines()))
