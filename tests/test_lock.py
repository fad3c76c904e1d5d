"""What the store's threads spend most of their time in lets other threads run meanwhile."""

import hashlib
import sys
import threading
import time

import ml_dtypes
import numpy as np
import pytest
from crc32c import crc32c
from isal import isal_zlib

DATA = np.random.default_rng(0).integers(0, 256, 2**26, np.uint8)
WIDE = np.empty((2**19, 64))
NARROW = np.ones((2**19, 64), ml_dtypes.bfloat16)

CALLS = {
    "sha256": lambda: hashlib.sha256().update(DATA.data),
    "crc32c": lambda: crc32c(DATA.data),
    "isal": lambda: isal_zlib.compressobj(1, isal_zlib.DEFLATED, 31).compress(DATA.data),
    "a copy": lambda: np.copyto(np.empty_like(DATA), DATA),
    "a cast of bfloat16": lambda: np.copyto(WIDE, NARROW),
    "a sum over tokens": lambda: np.add.reduce(WIDE, 0),
    "a sum over dimensions": lambda: np.add.reduce(WIDE, 1),
    "a product": lambda: np.multiply(WIDE, WIDE, out=WIDE),
}


@pytest.fixture(autouse=True)
def no_switches():
    """A thread gets its turn only when another one releases the interpreter's lock by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(3600)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_lets_another_thread_run(name):
    assert any(seen_during(CALLS[name]) for _ in range(20))


def test_a_call_that_keeps_the_lock_is_noticed():
    assert not any(seen_during(lambda: b"".join([DATA.data] * 2)) for _ in range(3))


def test_a_call_that_sleeps_is_noticed():
    assert seen_during(lambda: time.sleep(0.5))


def seen_during(call) -> bool:
    """Whether another thread ran between the beginning and the end of a call."""
    go, ran = threading.Lock(), []
    go.acquire()

    def other() -> None:
        with go:
            ran.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    go.release()  # which lets nobody run yet: this thread holds the interpreter's lock
    before = list(ran)
    call()
    after = list(ran)
    thread.join()
    return not before and bool(after)
