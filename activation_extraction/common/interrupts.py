"""Makes Ctrl-C end the process with one line and status 130, whenever it is pressed.

Python's default handler raises KeyboardInterrupt at the place that the main thread has reached. The
exception prints a traceback during an import or in a destructor, and it is lost in code that
catches all exceptions. With the handler of this module, the process ends at once, except in blocks
of `raise_on_ctrl_c`, which clean up first.

This module is imported before anything else, so it imports as little as possible. A process that
was started with Ctrl-C ignored, as by `nohup COMMAND &`, continues to ignore it.
"""

import os
import signal

# The exit status of a process that Ctrl-C has ended.
INTERRUPTED = 128 + signal.SIGINT


def end_on_ctrl_c() -> None:
    """Makes Ctrl-C end this process at once from now on.

    Commands call this before they import other modules.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_process)


class raise_on_ctrl_c:
    """A context manager in whose block Ctrl-C raises KeyboardInterrupt, so that code can clean up.

    The context manager has no effect in a process that has not called `end_on_ctrl_c`.
    """

    def __enter__(self) -> None:
        self._replaces_handler = signal.getsignal(signal.SIGINT) is _end_process
        if self._replaces_handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        if self._replaces_handler:
            signal.signal(signal.SIGINT, _end_process)


def _end_process(*_: object) -> None:
    try:
        # The message is not written to sys.stderr, because Ctrl-C may have interrupted a write to
        # sys.stderr.
        os.write(2, b"interrupted\n")
    finally:
        os._exit(INTERRUPTED)
