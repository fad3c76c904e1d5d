"""What libraries log about requests that fail and are tried again: one line of ours instead."""

import logging
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("extract_activations")

LOGGERS = ("huggingface_hub.utils._http", "datasets.utils.file_utils")
RETRIES = re.compile(r"'?(.*?)'? thrown while requesting|Retrying in|Retrying \d|Rate limited")


class _FirstFailure(logging.Filter):
    """Drops what the libraries say about retries, and says the first in our words."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        self._said = False

    def filter(self, record: logging.LogRecord) -> bool:
        retry = RETRIES.search(record.getMessage())
        if retry and not self._said:
            self._said = True
            log.warning(
                "%s: the hub does not answer%s; trying again for about half a minute",
                *(self._what, f" ({retry[1]:.200})" if retry[1] else ""),
            )
        return retry is None


@contextmanager
def hub_requests(what: str) -> Iterator[None]:
    """Within it, the log has one line about requests that are tried again. what: is asked for."""
    first = _FirstFailure(what)
    for name in LOGGERS:
        logging.getLogger(name).addFilter(first)
    try:
        yield
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(first)


def name_unknown(error: BaseException | None) -> bool:
    """Whether it all began with a host name that does not resolve."""
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None


class _GcsfsLog(logging.Handler):
    """gcsfs tries for half a minute by itself before a request fails: hands on why.

    Everything else is dropped, also its traceback for every request that it gives up: stores.py
    tries again and says so in one line.
    """

    def emit(self, record: logging.LogRecord) -> None:
        _, retried, reason = record.getMessage().partition(" retrying after exception: ")
        for listener in gcsfs_listeners[-1:] if retried else []:
            listener(" ".join(reason.split()))


gcsfs_listeners: list[Callable[[str], None]] = []  # the latest alone is told
_gcsfs = logging.getLogger("gcsfs")
_gcsfs.handlers, _gcsfs.propagate = [_GcsfsLog()], False
_gcsfs.setLevel(logging.DEBUG)
