"""Reports requests to the hub that are retried, and finds the reasons of requests that failed.

Libraries retry requests by themselves. One line of the log replaces all lines that they log about
retries. A request may have failed because there is no network, because the host name is unknown, or
because the cache of the hub's files cannot be written.
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

# Error numbers of a failed connection that mean that the server cannot be reached.
UNREACHABLE = {errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH}
# Error numbers of a failed write that mean that the folder is not writable, or the disk is full.
UNWRITABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENOSPC, errno.EDQUOT}
# The loggers of the libraries that retry requests.
LOGGERS = ("huggingface_hub.utils._http", "datasets.utils.file_utils")
# The pattern of log messages about a retry, such as "'[Errno 111] Connection refused' thrown while
# requesting GET https://huggingface.co/..." or "Retrying in 1s [Retry 1/5]". Group 1 is the error
# of the request, if the message contains it.
RETRY_LINE = re.compile(r"'?(.*?)'? thrown while requesting|Retrying in|Retrying \d|Rate limited")


@contextmanager
def hub_requests(requested: str) -> Iterator[None]:
    """Logs one warning for all requests to the hub that are retried in a `with` block.

    Args:
        requested: Description of the requested object, such as "the data set", for the warning.
    """
    has_warned_of_retry = False

    def is_not_retry(record: logging.LogRecord) -> bool:
        """Decides whether a library's message is logged, as a filter of the library's logger.

        When the first message about a retry comes, this function logs a warning that the hub is not
        answering.

        Args:
            record: The message.

        Returns:
            False for a message about a retry, so that the message is not logged; otherwise True.
        """
        nonlocal has_warned_of_retry
        retry_match = RETRY_LINE.search(record.getMessage())
        if retry_match and not has_warned_of_retry:
            has_warned_of_retry = True
            log.warning(
                "%s: the hub is not answering%s; trying again for about half a minute",
                requested,
                f" ({retry_match[1]:.200})" if retry_match[1] else "",
            )
        return retry_match is None

    loggers = [logging.getLogger(logger_name) for logger_name in LOGGERS]
    for logger in loggers:
        logger.addFilter(is_not_retry)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_not_retry)


@functools.cache
def hub_unreachable(endpoint: str) -> OSError | None:
    """Tries to connect to the hub, and returns the error if the hub cannot be reached.

    Callers call this function before they use a library that would retry its requests for a minute.

    Args:
        endpoint: The URL of the hub.

    Returns:
        The error if the host name does not resolve, if nothing listens at the port, or if there is
        no network. None if the hub may answer. If the environment names a proxy, the result is
        always None, because only the proxy can tell.
    """
    parsed_hub_url = urlsplit(endpoint)
    proxy_url_by_scheme = getproxies()
    if proxy_url_by_scheme.get(parsed_hub_url.scheme) or proxy_url_by_scheme.get("all"):
        return None
    hub_port = parsed_hub_url.port or (80 if parsed_hub_url.scheme == "http" else 443)
    # There are three attempts, because a failure may be momentary.
    for wait_seconds in (1, 1, 0):
        try:
            socket.create_connection((parsed_hub_url.hostname or "", hub_port), timeout=5).close()
            return None
        except OSError as error:
            if not isinstance(error, socket.gaierror) and error.errno not in UNREACHABLE:
                return None
            connection_error = error
        time.sleep(wait_seconds)
    return connection_error


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, the error that caused it, the cause of that error, and so on.

    Args:
        error: The first error; None to yield nothing.
    """
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def name_unknown(error: BaseException | None) -> bool:
    """Returns whether an error was caused by a host name that does not resolve.

    Args:
        error: The error. None for no error, for which the result is False.
    """
    return any(isinstance(cause, socket.gaierror) for cause in _with_causes(error))


def unwritable_cache(error: BaseException | None) -> str | None:
    """Returns a message about the cache of the hub's files, if it caused an error.

    Args:
        error: The error. None for no error.

    Returns:
        The message if the error was caused by a cache that cannot be written. Otherwise None.
    """
    for cause in _with_causes(error):
        if isinstance(cause, OSError) and cause.filename and cause.errno in UNWRITABLE:
            return (
                f"the cache of the hub's files cannot be written: {cause.filename}: "
                f"{cause.strerror}; set HF_HOME to a folder that can be written"
            )
    return None
