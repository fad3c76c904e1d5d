"""Makes Ctrl-C end the process with one line and status 130, whenever it is pressed.

Python's default handler raises KeyboardInterrupt wherever the main thread is. During an import or
in a destructor, the exception prints a traceback, and code that catches all exceptions may swallow
it. So the process ends at once, except in blocks that must clean up first.

This module is imported before anything else, so it imports as little as possible. A process that
was started with Ctrl-C ignored, as by `nohup COMMAND &`, continues to ignore it.
"""

import os
import signal

INTERRUPTED = 128 + signal.SIGINT  # the exit status


def end_on_ctrl_c() -> None:
    """Makes Ctrl-C end this process from now on. Commands call this before they import anything."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_process)


class raise_on_ctrl_c:
    """A context in which Ctrl-C raises KeyboardInterrupt, for code that must clean up.

    It has no effect in a process that has not called `end_on_ctrl_c`.
    """

    def __enter__(self) -> None:
        self._ends = signal.getsignal(signal.SIGINT) is _end_process
        if self._ends:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        if self._ends:
            signal.signal(signal.SIGINT, _end_process)


def _end_process(*_: object) -> None:
    try:
        # Not sys.stderr: the handler may have interrupted a write to it.
        os.write(2, b"interrupted\n")
    finally:
        os._exit(INTERRUPTED)
