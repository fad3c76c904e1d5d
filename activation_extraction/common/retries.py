"""This module replaces what libraries log about retried requests by one line of our own."""

import errno
import functools
import logging
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies

from activation_extraction.common.log import log

UNREACHABLE = {errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH}
UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT}
LOGGERS = ("huggingface_hub.utils._http", "datasets.utils.file_utils")
RETRIES = re.compile(r"'?(.*?)'? thrown while requesting|Retrying in|Retrying \d|Rate limited")


class _FirstFailure(logging.Filter):
    """Drops what the libraries say about retries, and logs the first one in our words."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        self._logged = False

    def filter(self, record: logging.LogRecord) -> bool:
        retry = RETRIES.search(record.getMessage())
        if retry and not self._logged:
            self._logged = True
            log.warning(
                "%s: the hub is not answering%s; trying again for about half a minute",
                *(self._what, f" ({retry[1]:.200})" if retry[1] else ""),
            )
        return retry is None


@contextmanager
def hub_requests(what: str) -> Iterator[None]:
    """Logs retried requests inside the block as one line. what: what is being requested."""
    first = _FirstFailure(what)
    for name in LOGGERS:
        logging.getLogger(name).addFilter(first)
    try:
        yield
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(first)


@functools.cache
def hub_unreachable(endpoint: str) -> OSError | None:
    """Returns why nothing answers at the hub's URL, or None if something may answer.

    The name may not resolve, nothing may listen there, or there may be no network; the libraries
    would go on trying for a minute. A proxy that the environment names may always answer.
    """
    url, proxies = urlsplit(endpoint), getproxies()
    if proxies.get(url.scheme) or proxies.get("all"):
        return None
    port = url.port or (80 if url.scheme == "http" else 443)
    for attempts_left in reversed(range(3)):
        try:
            socket.create_connection((url.hostname or "", port), timeout=5).close()
        except OSError as error:
            lasting = isinstance(error, socket.gaierror) or error.errno in UNREACHABLE
            if not lasting or not attempts_left:
                return error if lasting else None
            time.sleep(1)
        else:
            return None
    return None


def name_unknown(error: BaseException | None) -> bool:
    """Returns whether an error was caused by a host name that does not resolve."""
    while error is not None and not isinstance(error, socket.gaierror):
        error = error.__cause__ or error.__context__
    return error is not None


def unwritable_cache(error: BaseException | None) -> str | None:
    """Returns a message if the error came from a hub cache that cannot be written, else None."""
    while error is not None:
        if isinstance(error, OSError) and error.filename and error.errno in UNWRITABLE:
            return (
                f"the cache of the hub's files cannot be written: {error.filename}: "
                f"{error.strerror}; HF_HOME names another folder for it"
            )
        error = error.__cause__ or error.__context__
    return None
