"""The log: one line per event on stderr, which passes the filter of visible.py."""

import logging
import sys
from collections.abc import Callable
from typing import Any

from activation_extraction.common.visible import visible

log = logging.getLogger("extract_activations")
LIBRARIES = ("datasets", "huggingface_hub", "transformers")  # which log to stderr by themselves


def start_logging(verbose: bool, machine: int, host: int | None) -> None:
    """Logs one line per event to stderr, above the progress bar.

    What libraries log passes the same filter. Hosts other than the first log only warnings and
    errors. host: None while it is not known.
    """
    handler: logging.Handler = logging.StreamHandler()
    if on_terminal():
        from tqdm.contrib.logging import _TqdmLoggingHandler

        handler = _TqdmLoggingHandler()
    who = f"machine {machine} host {'?' if host is None else host}"
    line = f"%(asctime)s %(levelname)s {who}: %(message)s"
    handler.setFormatter(VisibleFormatter(line, "%Y-%m-%d %H:%M:%S"))
    log.handlers = [handler]
    others = [each for name in LIBRARIES for each in logging.getLogger(name).handlers]
    for each in filter(None, (logging.lastResort, *others)):
        each.setFormatter(VisibleFormatter())
    log.propagate = False
    take_over_gcsfs_log()
    usual = logging.WARNING if host else logging.INFO
    log.setLevel(logging.DEBUG if verbose else usual)


def on_terminal() -> bool:
    """Whether stderr is a terminal. Terminals get a progress bar, log files get lines."""
    return sys.stderr.isatty()


class VisibleFormatter(logging.Formatter):
    """Formats a record as one line, and its traceback as lines below that."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return visible(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(visible, super().formatException(ei).splitlines()))


class _GcsfsLog(logging.Handler):
    """Passes on why gcsfs retries a request; it does so for half a minute before it fails.

    Drops everything else, including its traceback for every request that it gives up: our caller
    tries again and says so in one line.
    """

    def emit(self, record: logging.LogRecord) -> None:
        _, retried, reason = record.getMessage().partition(" retrying after exception: ")
        for listener in gcsfs_listeners[-1:] if retried else []:
            listener(" ".join(reason.split()))


gcsfs_listeners: list[Callable[[str], None]] = []  # only the latest one is called


def take_over_gcsfs_log() -> None:
    """Has the listeners hear what gcsfs logs, and nobody else. For the command line alone: a
    program that uses the library keeps its own logging."""
    gcsfs = logging.getLogger("gcsfs")
    gcsfs.handlers, gcsfs.propagate = [_GcsfsLog()], False
    gcsfs.setLevel(logging.DEBUG)
