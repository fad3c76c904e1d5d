"""The log prints one line per event to stderr, through the filter of visible.py.

It also knows what each thread is busy with, which a watchdog names when nothing moves.
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
activities: dict[int, str] = {}  # thread -> what it is busy with


def start_logging(verbose: bool, machine: int, host: int | None) -> None:
    """Logs one line per event to stderr, above the progress bar.

    What libraries log passes the same filter. Hosts other than the first one log only warnings and
    errors. host: None while it is not known.
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
    # gcsfs prints a traceback when it gives a request up, which our caller says in one line.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL + 1)
    log.setLevel(logging.DEBUG if verbose else logging.WARNING if host else logging.INFO)


def on_terminal() -> bool:
    """Returns whether stderr is a terminal: terminals get a progress bar, log files get lines."""
    return sys.stderr.isatty()


class AboveProgressBar(logging.StreamHandler):
    """Writes to stderr, above the progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm  # which reading does not need otherwise

        tqdm.write(self.format(record), file=sys.stderr)


@contextmanager
def activity(words: str) -> Iterator[None]:
    """Says what this thread does inside the block, such as "reading x.jsonl line 5"."""
    activities[threading.get_ident()] = words
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
