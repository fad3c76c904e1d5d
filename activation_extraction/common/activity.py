"""This module knows what each thread of this process is busy with, for a watchdog to name it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_activities: dict[int, str] = {}  # by thread


@contextmanager
def activity(words: str) -> Iterator[None]:
    """Says what this thread does inside the block, such as "reading x.jsonl line 5"."""
    _activities[threading.get_ident()] = words
    try:
        yield
    finally:
        _activities.pop(threading.get_ident(), None)


def activities() -> list[str]:
    return list(_activities.values())
