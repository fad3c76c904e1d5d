"""Waits for a write to a bucket, and gives the write up if it makes no progress.

obstore 0.12 sends the whole body of a write in one request, and does not report how much of it was
sent. Its timeouts (those of reqwest 0.13) count from the beginning of the request. So they cannot
distinguish a slow line from a store that has received the body and never answers. The kernel can:
while a body is being sent, a TCP connection of this process has bytes that the other side has not
acknowledged. On Linux this module reads the number of these bytes. On other systems, a write is
given up after the time that a slow line needs. bucket.py sends the requests.
"""

import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from threading import Thread
from typing import TypeVar

from activation_extraction.common.log import log
from activation_extraction.store.local_files import FolderError

CHECK_SECONDS = 1.0  # largest number of seconds between two checks whether bytes are being sent
# A check whether bytes are being sent reads the kernel's tables of TCP connections (TCP_TABLES),
# which may be large. So all writes of this process share the result of a check, for at most this
# many seconds.
SHARED_SECONDS = 0.2
# Seconds after which the first message about a waiting write is logged. The next messages follow
# after twice as many seconds, after four times as many, and so on.
LOGGED_AFTER = 60.0
CONNECTED = "01"  # state of an established connection in TCP_TABLES
# The kernel's tables of the TCP connections over IPv4 and over IPv6.
TCP_TABLES = Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")
OPEN_FILES = Path("/proc/self/fd")
# Log level and message about a waiting write, by the result of `is_sending`.
STATES = {
    True: (logging.INFO, "bytes are being sent"),
    False: (logging.WARNING, "everything is sent, and the store has not answered yet"),
    None: (logging.INFO, "there is no answer yet"),
}
T = TypeVar("T")


class Patience:
    """Limits the time that one write may take, including all of its attempts.

    The time begins when the object is made. The seconds in which the body of the write is being
    sent do not count, up to a total of `sending_seconds`.

    Args:
        seconds: Seconds for the write, without the time in which its body is being sent.
        sending_seconds: Seconds that a slow line needs to send the body.

    Attributes:
        start_time: Time of `time.monotonic` at which the write began, in seconds.
        deadline: Time of `time.monotonic` at which the write is given up, in seconds.
        max_seconds_since_last_byte: Largest number of seconds for which one attempt may wait for an
            answer after the last byte of its body. It is half of `seconds`, so that there is time
            for a second attempt.
    """

    def __init__(self, seconds: float, sending_seconds: float = 0.0) -> None:
        self.start_time = time.monotonic()
        self.deadline = self.start_time + seconds
        self.max_seconds_since_last_byte = seconds / 2
        self._latest_deadline = self.deadline + sending_seconds

    def add(self, seconds: float) -> None:
        """Postpones `deadline` by the time in which the body of the write was being sent.

        In total, `deadline` is postponed by at most the seconds that a slow line needs to send the
        body.

        Args:
            seconds: Number of seconds in which the body was being sent.
        """
        self.deadline = min(self.deadline + seconds, self._latest_deadline)


def watched(write: Callable[[], T], patience: Patience, name: str) -> T:
    """Makes one attempt at a write, and returns its result.

    A message is logged if the attempt takes LOGGED_AFTER seconds or more. The attempt runs in a new
    thread. If it is given up, the thread goes on until the client has an answer or reaches its
    timeout, and its result is ignored.

    Args:
        write: Function that sends the write and returns its result.
        patience: Time that is left for the write, which is extended while bytes are being sent.
        name: Folder and name of the file that is written, for the log.

    Raises:
        FolderError: If no byte was sent and no answer came for
            `patience.max_seconds_since_last_byte`, or if the time of the write is over. It is
            unknown whether the file was written.
        Exception: If `write` raises an exception, which is raised again.
    """
    write_future: Future[T] = Future()

    def run() -> None:
        try:
            write_future.set_result(write())
        except BaseException as error:
            write_future.set_exception(error)

    Thread(target=run, name=f"write {name}", daemon=True).start()
    start_time = time.monotonic()
    last_check_time = start_time
    seconds_since_last_byte = 0.0
    waited_seconds_at_next_log = LOGGED_AFTER
    while not wait(
        [write_future], min(CHECK_SECONDS, patience.max_seconds_since_last_byte / 4)
    ).done:
        check_time = time.monotonic()
        has_unacknowledged_bytes = is_sending()
        if has_unacknowledged_bytes is False:
            seconds_since_last_byte += check_time - last_check_time
        else:
            seconds_since_last_byte = 0.0
            patience.add(check_time - last_check_time)
        last_check_time = check_time
        waited_seconds = check_time - start_time
        if (
            seconds_since_last_byte >= patience.max_seconds_since_last_byte
            or check_time >= patience.deadline
        ):
            time_phrase = f"within {waited_seconds:.0f} s"
            if seconds_since_last_byte:
                time_phrase = f"for {seconds_since_last_byte:.0f} s after the last byte"
            raise FolderError(f"no answer {time_phrase}", is_permanent=False)
        if waited_seconds >= waited_seconds_at_next_log:
            waited_seconds_at_next_log *= 2
            log_level, state_phrase = STATES[has_unacknowledged_bytes]
            log.log(
                log_level,
                "%s has been waiting for %.0f s: %s",
                name,
                waited_seconds,
                state_phrase,
            )
    return write_future.result()


def is_sending() -> bool | None:
    """Returns whether a TCP connection of this process has bytes that are not acknowledged yet.

    None means that this is unknown, because the system does not report such bytes, or because the
    tables in which it reports them cannot be read.
    """
    if not _can_detect_unacknowledged_bytes():
        return None
    return _is_sending_at(int(time.monotonic() / SHARED_SECONDS))


@lru_cache(1)
def _is_sending_at(_tick: int) -> bool | None:
    """Returns whether this process has unacknowledged bytes, looked up once in each period of time.

    Args:
        _tick: Number of the current period of SHARED_SECONDS seconds, which is only used as the key
            of the cache.

    Returns:
        Whether a TCP connection of this process has bytes that are not acknowledged yet. None if
        the lists of connections or of this process's sockets cannot be read.
    """
    with suppress(OSError):
        return bool(_sockets_with_unacknowledged_bytes() & _own_sockets())
    return None


def _own_sockets() -> set[str]:
    """Returns the inodes of the sockets that this process has open."""
    socket_inodes = set[str]()
    for descriptor_name in os.listdir(OPEN_FILES):
        # The descriptor may have been closed since OPEN_FILES (/proc/self/fd) was listed.
        with suppress(OSError):
            file_type, _, inode_in_brackets = os.readlink(OPEN_FILES / descriptor_name).partition(
                ":"
            )
            if file_type == "socket":
                socket_inodes.add(inode_in_brackets.strip("[]"))
    return socket_inodes


def _sockets_with_unacknowledged_bytes() -> set[str]:
    """Returns the inodes of all TCP connections with unacknowledged bytes, also of other processes.

    Unacknowledged bytes are bytes that a process has passed to a connection, and that the receiver
    has not acknowledged yet.
    """
    inodes_with_unacknowledged_bytes = set[str]()
    for tcp_table_path in TCP_TABLES:
        for table_line in (
            tcp_table_path.read_text().splitlines()[1:] if tcp_table_path.exists() else ()
        ):
            # The fields of a line are: number, local address, remote address, state, bytes to send
            # and bytes to read (in hexadecimal digits, "SEND:READ"), four other fields, inode, ...
            fields_of_line = table_line.split()
            connection_state = fields_of_line[3]
            num_unacknowledged_bytes = int(fields_of_line[4].split(":")[0], 16)
            socket_inode = fields_of_line[9]
            if connection_state == CONNECTED and num_unacknowledged_bytes:
                inodes_with_unacknowledged_bytes.add(socket_inode)
    return inodes_with_unacknowledged_bytes


@lru_cache(1)
def _can_detect_unacknowledged_bytes() -> bool:
    """Tests whether unacknowledged bytes can be detected on this system at all.

    Unacknowledged bytes are bytes that a process has passed to a TCP connection, and that the
    receiver has not acknowledged yet. Linux reports their number in its tables of TCP connections
    (TCP_TABLES). The existence of the tables is not enough, because in sandboxes such as gVisor
    they exist, but always report 0 unacknowledged bytes. So this function opens a connection for
    the test, fills it without reading from it, and looks it up in the tables.

    Returns:
        True if the tables report unacknowledged bytes of the test connection. False if they do not,
        or if the test failed with an OSError.
    """
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server_socket,
            socket.create_connection(server_socket.getsockname()) as client_socket,
        ):
            client_socket.setblocking(False)
            client_inode = str(os.fstat(client_socket.fileno()).st_ino)
            with suppress(BlockingIOError):
                while True:
                    client_socket.send(bytes(2**20))
            return client_inode in _sockets_with_unacknowledged_bytes()
    except OSError:
        return False
