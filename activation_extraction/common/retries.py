"""Detects and reports failed requests to the hub.

One line of the log replaces what libraries log about the requests that they retry. The module also
finds out why a request failed: no network, an unknown host name, or a cache that is not writable.
"""

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
    """Logs one warning for all requests to the hub that are retried in a `with` block.

    Args:
        what: Description of the requested object, such as a model, for the warning.
    """
    logged = False

    def first_failure(record: logging.LogRecord) -> bool:
        """Returns whether to keep a library's record; replaces the first one about a retry."""
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
    """Tries to connect to the hub, because libraries would keep retrying for a minute.

    Args:
        endpoint: The URL of the hub.

    Returns:
        The error if the host name does not resolve, nothing listens at the port or there is no
        network. None if the hub may answer, which always holds with a proxy in the environment.
    """
    url = urlsplit(endpoint)
    proxies = getproxies()
    if proxies.get(url.scheme) or proxies.get("all"):
        return None
    port = url.port or (80 if url.scheme == "http" else 443)
    for wait in (1, 1, 0):  # seconds after each attempt, since a failure may be momentary
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
    return any(isinstance(cause, socket.gaierror) for cause in _with_causes(error))


def unwritable_cache(error: BaseException | None) -> str | None:
    """Returns a message if an error arose because the hub's cache cannot be written, else None."""
    for cause in _with_causes(error):
        if isinstance(cause, OSError) and cause.filename and cause.errno in UNWRITABLE:
            return (
                f"the cache of the hub's files cannot be written: {cause.filename}: "
                f"{cause.strerror}; set HF_HOME to a folder that can be written"
            )
    return None
