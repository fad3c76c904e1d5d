"""Waits for a write to a bucket, and gives it up if it makes no progress.

obstore 0.12 sends the whole body of a write in one request, and does not report how much of it was
sent. Its timeouts, which are those of reqwest 0.13, count from the beginning of the request. So
they cannot tell a slow line from a store that has taken the body and never answers. The kernel can:
while a body is on its way, a TCP connection of this process holds bytes that the other side has not
acknowledged. On Linux this module asks the kernel. Elsewhere the only bound is the time that a slow
line needs.
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

STEP = 1.0  # seconds between two checks of a write
SAMPLE = 0.2  # seconds for which all writes share one check of the connections
LOGGED_AFTER = 60.0  # seconds for which a write has waited; the next time after twice as many
CONNECTED = "01"  # the state of a connection in TCP_TABLES
TCP_TABLES = Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6")
OPEN_FILES = Path("/proc/self/fd")
STATES = {  # level and message of the log for a waiting write, by whether bytes are being sent
    True: (logging.INFO, "bytes are being sent"),
    False: (logging.WARNING, "everything is sent, and the store has not answered yet"),
    None: (logging.INFO, "there is no answer yet"),
}
T = TypeVar("T")


class Patience:
    """The time that one write may take, with all of its attempts.

    The write has `seconds` in which nothing is sent because it fails, pauses, or waits for an
    answer. The time in which its body is sent is added, but no more than a slow line needs.

    Attributes:
        began: When the write began, in seconds of `time.monotonic`.
        end: When the write is given up, in seconds of `time.monotonic`.
        silence: The most seconds for which one attempt may wait for an answer after the last byte
            of its body: half of `seconds`, so that there is time for a second attempt.
    """

    def __init__(self, seconds: float, sending: float = 0.0) -> None:
        """Begins now.

        Args:
            seconds: Time for the write, without the time in which the body is being sent.
            sending: Seconds that sending the body takes on a slow line, which may be added at most.
        """
        self.began = time.monotonic()
        self.end = self.began + seconds
        self.silence = seconds / 2
        self._latest = self.end + sending

    def add(self, seconds: float) -> None:
        """Adds seconds in which the body was being sent."""
        self.end = min(self.end + seconds, self._latest)


def watched(write: Callable[[], T], patience: Patience, name: str) -> T:
    """Returns the result of one attempt at a write, and logs when that takes minutes.

    The attempt runs in a thread of its own. If it is given up, that thread goes on until the client
    has an answer or reaches its timeout, and the result is dropped.

    Args:
        write: The attempt.
        patience: The time that is left for the write, which grows while bytes are leaving.
        name: Folder and name of the file that is written, for the log.

    Raises:
        FolderError: Nothing was sent and no answer came for too long, or no time is left. It is
            unknown whether the file was written.
        Exception: Whatever `write` raises.
    """
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(write())
        except BaseException as error:
            answer.set_exception(error)

    Thread(target=run, name=f"write {name}", daemon=True).start()
    began = before = time.monotonic()
    silent, logged_after = 0.0, LOGGED_AFTER
    while not wait([answer], min(STEP, patience.silence / 4)).done:
        now = time.monotonic()
        sending = is_sending()
        if sending is False:
            silent += now - before
        else:
            silent = 0.0
            patience.add(now - before)
        before = now
        if silent >= patience.silence or now >= patience.end:
            period = f"within {now - began:.0f} s"
            if silent:
                period = f"for {silent:.0f} s after the last byte"
            raise FolderError(f"no answer {period}", final=False)
        if now - began >= logged_after:
            logged_after *= 2
            level, state = STATES[sending]
            log.log(level, "%s has been waiting for %.0f s: %s", name, now - began, state)
    return answer.result()


def is_sending() -> bool | None:
    """Returns whether this process has sent bytes that are not acknowledged yet.

    This concerns all of its TCP connections. None if the system does not show such bytes.
    """
    if not _shows_unsent_bytes():
        return None
    return _sampled(int(time.monotonic() / SAMPLE))


@lru_cache(1)
def _sampled(_tick: int) -> bool | None:
    with suppress(OSError):
        return bool(_sockets_with_unsent_bytes() & _own_sockets())
    return None


def _own_sockets() -> set[str]:
    """Returns the inodes of the sockets that this process has open."""
    inodes = set()
    for name in os.listdir(OPEN_FILES):
        with suppress(OSError):  # it was closed in this moment
            kind, _, inode = os.readlink(OPEN_FILES / name).partition(":")
            if kind == "socket":
                inodes.add(inode.strip("[]"))
    return inodes


def _sockets_with_unsent_bytes() -> set[str]:
    """Returns the inodes of the connections on this machine with unacknowledged bytes."""
    inodes = set()
    for table in TCP_TABLES:
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            # Number, local and remote address, state, bytes to be sent and to be read, ...
            _, _, _, state, queues, _, _, _, _, inode, *_ = line.split()
            if state == CONNECTED and int(queues.split(":")[0], 16):
                inodes.add(inode)
    return inodes


@lru_cache(1)
def _shows_unsent_bytes() -> bool:
    """Returns whether the system shows bytes that are not acknowledged.

    It is tried with a connection that nobody reads, because sandboxes such as gVisor have the
    table, but always with zero bytes.
    """
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname()) as client,
        ):
            client.setblocking(False)
            inode = str(os.fstat(client.fileno()).st_ino)
            with suppress(BlockingIOError):
                while True:
                    client.send(bytes(2**20))
            return inode in _sockets_with_unsent_bytes()
    except OSError:
        return False
