"""Replaces what libraries log about the requests that they retry by one line of our own."""

import logging
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("extract_activations")

LOGGERS = ("huggingface_hub.utils._http", "datasets.utils.file_utils")
RETRIES = re.compile(r"'?(.*?)'? thrown while requesting|Retrying in|Retrying \d|Rate limited")


class _FirstFailure(logging.Filter):
    """Drops what the libraries say about retries, and logs the first one in our words."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool:
        retry = RETRIES.search(record.getMessage())
        if retry and not self._said:
            self._said = True
            log.warning(
                "%s: the hub is not answering%s; trying again for about half a minute",
                *(self._what, f" ({retry[1]:.200})" if retry[1] else ""),
            )
        return retry is None


@contextmanager
def hub_requests(what: str) -> Iterator[None]:
    """Inside the block, retried requests are logged as one line. what: what is asked for."""
    first = _FirstFailure(what)
    for name in LOGGERS:
        logging.getLogger(name).addFilter(first)
    try:
        yield
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(first)


def name_unknown(error: BaseException | None) -> bool:
    """Whether an error was caused by a host name that does not resolve."""
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None


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
_gcsfs = logging.getLogger("gcsfs")
_gcsfs.handlers, _gcsfs.propagate = [_GcsfsLog()], False
_gcsfs.setLevel(logging.DEBUG)
