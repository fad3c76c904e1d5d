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
RETRY_LINE = re.compile(r"'?(.*?)'? thrown while requesting|Retrying in|Retrying \d|Rate limited")


@contextmanager
def hub_requests(what: str) -> Iterator[None]:
    """Logs retried requests inside the block as one line. what: what is being requested."""
    logged = False

    def first_failure(record: logging.LogRecord) -> bool:
        """Drops what the libraries say about retries, and logs the first one in our words."""
        nonlocal logged
        retry = RETRY_LINE.search(record.getMessage())
        if retry and not logged:
            logged = True
            log.warning(
                "%s: the hub is not answering%s; trying again for about half a minute",
                what,
                f" ({retry[1]:.200})" if retry[1] else "",
            )
        return retry is None

    for name in LOGGERS:
        logging.getLogger(name).addFilter(first_failure)
    try:
        yield
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeFilter(first_failure)


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
    for wait in (1, 1, 0):  # a moment's failure is none
        try:
            socket.create_connection((url.hostname or "", port), timeout=5).close()
            return None
        except OSError as error:
            if not isinstance(error, socket.gaierror) and error.errno not in UNREACHABLE:
                return None
            failure = error
        time.sleep(wait)
    return failure


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def name_unknown(error: BaseException | None) -> bool:
    """Returns whether an error was caused by a host name that does not resolve."""
    return any(isinstance(each, socket.gaierror) for each in _with_causes(error))


def unwritable_cache(error: BaseException | None) -> str | None:
    """Returns a message if the error came from a hub cache that cannot be written, else None."""
    for each in _with_causes(error):
        if isinstance(each, OSError) and each.filename and each.errno in UNWRITABLE:
            return (
                f"the cache of the hub's files cannot be written: {each.filename}: "
                f"{each.strerror}; HF_HOME names another folder for it"
            )
    return None
