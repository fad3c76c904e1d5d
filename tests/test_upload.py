"""Shards on their way to a slow bucket: how many, in what order, and how much memory they take."""

import json
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from memory_bucket import MemoryBucket, MemoryFolder, Process
from small_runs import HIDDEN, HOOKS
from storages import open_storage

from activation_extraction.common.errors import StorageError
from activation_extraction.store.commit import number_of
from activation_extraction.store.folder import FolderError

SHARD = 1000 * HIDDEN * 4 * len(HOOKS)  # bytes of a sample: each fills a shard


def add(storage, sample):
    for key in HOOKS:
        values = np.random.default_rng([sample, key]).random((1000, HIDDEN), np.float32)
        storage.add_activation(key, values, sample, "", np.zeros(1000, np.int32))


def until(condition):
    """Waits, in vain for a minute at most."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


class SlowStore(MemoryFolder):
    """Takes a shard once it is let go, or refuses it. `arrived` names files in their order."""

    def __init__(self, refused=()):
        super().__init__(MemoryBucket(), Process(self.hold))
        self.go = [threading.Event() for _ in range(31)]  # by number
        self.refused = refused
        self.begun: set[int] = set()
        self.ended: set[int] = set()
        self.arrived: list[str] = []
        self.most = 0

    def hold(self, _, request):
        if not re.fullmatch(r"writing .*\.pkl", request):
            return
        number = number_of(request.split()[1])
        self.begun.add(number)
        self.most = max(self.most, len(self.begun) - len(self.ended))
        assert self.go[number].wait(600)
        self.ended.add(number)
        if number in self.refused:
            raise FolderError("permission denied")

    def write(self, name, parts, expected):
        version = super().write(name, parts, expected)
        self.arrived.append(name)
        return version

    def let_go(self, *numbers):
        for number in numbers:
            self.go[number].set()

    @property
    def committed(self):
        """In the order of their commits; the first one's JSON is written twice: to reserve it."""
        jsons = [name for name in self.arrived if re.fullmatch(r"shard_\d+\.json", name)]
        return [number_of(name) for name in jsons][1:]


def open_slow(tmp_path, store, **options):
    usual = {"shard_size_gb": SHARD / 1e9, "compress_shards": False, "waiting_shards_gb": 1}
    return open_storage(tmp_path / "out", HOOKS, remote=store, **usual | options)


def test_adding_stops_at_the_ceiling_of_memory_and_goes_on_when_there_is_room(tmp_path):
    store = SlowStore()
    waits: list[int] = []
    most, on_wait = 5.25 * SHARD / 1e9, partial(waits.append, 1)
    storage = open_slow(tmp_path, store, waiting_shards_gb=most, on_wait=on_wait)
    added = []

    def work():
        for sample in range(30):
            add(storage, sample)
            added.append(sample)
        storage.finalize()

    def is_full(shards):
        """With two samples that are in no shard yet; the last one is not added, but waits."""
        until(lambda: storage.gauges()["bytes_waiting"] == 6 * SHARD and len(store.begun) == shards)
        assert len(added) == shards + 1

    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        is_full(4)
        assert storage.totals.shards == 0 and not store.committed
        store.let_go(1)
        is_full(5)
        store.let_go(4, 3, 5)  # they arrive, and wait for the second one
        tables = {f"shard_000{number}.samples.parquet" for number in (3, 4, 5)}
        until(lambda: tables <= {*store.arrived})
        assert store.committed == [1] and not working.done()
        is_full(5)
        store.let_go(*range(31))
        working.result(60)
    assert storage.totals.shards == 30 and store.committed == [*range(1, 31)]
    assert sum(storage.waited.values()) > 0 and waits
    assert storage.gauges()["bytes_waiting"] <= SHARD  # the last sample's, which none followed


@pytest.mark.parametrize("refused", [(3,), (3, 2)])
def test_a_shard_that_fails_stops_those_after_it_only(tmp_path, refused):
    """If two shards fail, the message is about the first one, although it fails later."""
    store = SlowStore(refused)
    storage = open_slow(tmp_path, store)
    for sample in range(7):
        add(storage, sample)
    store.let_go(3, 4, 5, 6)
    until(lambda: "shard_0006.npz" in store.arrived and storage._writer._jobs[2].stored.done())
    for sample in (7, 8):
        with pytest.raises(StorageError, match="shard_0003.pkl: permission denied"):
            add(storage, sample)
    store.let_go(2, 1)
    with pytest.raises(StorageError, match=f"shard_000{refused[-1]}.pkl: permission denied"):
        storage.finalize()
    assert store.committed == [*range(1, refused[-1])]
    assert storage.totals.shards == len(store.committed)
    assert json.loads((tmp_path / "out/metadata.json").read_bytes())["status"] == "failed"


def test_ctrl_c_while_the_last_shards_are_stored_waits_for_none(tmp_path):
    store = SlowStore()
    storage = open_slow(tmp_path, store)
    for sample in range(3):
        add(storage, sample)
    main = threading.get_ident()

    def interrupt():
        until(lambda: len(store.begun) == 3)  # the last one is cut by `finalize`
        signal.pthread_kill(main, signal.SIGINT)

    with ThreadPoolExecutor(1) as threads, pytest.raises(KeyboardInterrupt):
        threads.submit(interrupt)
        storage.finalize(complete=False)
    assert not store.committed
    store.let_go(*range(31))
