"""Uploading to a bucket that fails, is slow or refuses."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from command_line import SCRIPT, main
from memory_bucket import MemoryBucket, MemoryFolder, Process
from small_runs import HIDDEN, HOOKS, both_formats
from storages import open_storage
from test_killed import URL, flags, is_whole, undisturbed, upload_flags  # noqa: F401

from activation_extraction.common.errors import StorageError
from activation_extraction.store.commit import number_of
from activation_extraction.store.patience import FolderError
from activation_extraction.store.shard_writer import SHARDS_AT_ONCE


@pytest.mark.parametrize(
    "fault,status,message",
    [
        ("nothing", 2, "no such bucket: elsewhere"),
        ("403", 2, "permission denied"),
        ("401", 2, "the credentials are missing, invalid or have expired"),
        ("503", 1, "kept failing for"),
    ],
)
def test_a_bucket_that_refuses_is_told_in_one_line_before_the_model_is_read(
    flags,  # noqa: F811
    bucket,
    tmp_path,
    capsys,
    monkeypatch,
    fault,
    status,
    message,
):
    monkeypatch.setattr("activation_extraction.run.prepare.prepare_model", None)
    command = upload_flags(flags, tmp_path / "out", "--upload_timeout", "1")
    if fault == "nothing":
        command[command.index("bucket")] = "elsewhere"
    else:
        bucket.faults, bucket.rate = (fault,), 1.0
    assert main(*command) == status
    *before, error = capsys.readouterr().err.strip().splitlines()
    assert message in error and error.startswith("error: ")
    assert [("failed (" in line) for line in before] == [True] * (fault == "503")
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_the_second_ctrl_c_does_not_wait_for_uploads(flags, is_whole, bucket, tmp_path):  # noqa: F811
    """The bucket confirms nothing, and so computing waits."""
    command = upload_flags(flags, tmp_path, "--waiting_shards_gb", "0.003")
    arrived, go = threading.Semaphore(0), threading.Event()

    def hold(method, name):
        if method == "PUT" and name.endswith(".pkl.gz"):
            arrived.release()
            go.wait(600)

    bucket.before = hold
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *command],
        env=os.environ | bucket.environment | {"JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(2):
        assert arrived.acquire(timeout=60)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert any("stopping after this step" in line for line in iter(process.stderr.readline, ""))
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 130 and printed.splitlines()[-1] == "interrupted"
    go.set()
    bucket.before = lambda method, name: None
    assert main(*command) == 0
    is_whole(URL)


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
        self.arrived: list[str] = []
        self.most = self.uploading = 0
        self.counting = threading.Lock()

    def hold(self, _, request):
        if not (request.startswith("writing") and request.endswith(".pkl")):
            return
        number = number_of(request.split()[1])
        with self.counting:
            self.begun.add(number)
            self.uploading += 1
            self.most = max(self.most, self.uploading)
        assert self.go[number].wait(600)
        with self.counting:
            self.uploading -= 1
        if number in self.refused:
            raise FolderError(f"{request}: permission denied", final=True)

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
    storage = open_slow(tmp_path, store, waiting_shards_gb=5.25 * SHARD / 1e9)
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
    assert sum(storage.waited.values()) > 0
    assert storage.gauges()["bytes_waiting"] <= SHARD  # the last sample's, which none followed


def test_many_shards_are_on_their_way_at_a_time_but_no_more_than_that(tmp_path):
    store = SlowStore()
    with open_slow(tmp_path, store) as storage:
        for sample in range(30):
            add(storage, sample)
        until(lambda: len(store.begun) == SHARDS_AT_ONCE)
        store.let_go(*range(31))
    assert store.most == SHARDS_AT_ONCE and store.committed == [*range(1, 31)]


@pytest.mark.parametrize("refused", [(3,), (3, 2)])
def test_a_shard_that_fails_stops_those_after_it_only(tmp_path, refused):
    """If two shards fail, the message is about the first one, although it fails later."""
    store = SlowStore(refused)
    storage = open_slow(tmp_path, store)
    for sample in range(7):
        add(storage, sample)
    store.let_go(3, 4, 5, 6)
    until(lambda: "shard_0006.npz" in store.arrived and storage._writer._failure)
    for sample in (7, 8):
        with pytest.raises(StorageError, match="shard_0003.pkl: permission denied"):
            add(storage, sample)
    store.let_go(2, 1)
    with pytest.raises(StorageError, match=f"shard_000{refused[-1]}.pkl: permission denied"):
        storage.finalize()
    assert store.committed == [*range(1, refused[-1])]
    assert storage.totals.shards == len(store.committed)
    assert json.loads((tmp_path / "out/metadata.json").read_bytes())["status"] == "failed"


MEMORY = """
import os, sys, threading, time
from pathlib import Path
import numpy as np
from activation_extraction.store.folder import ANY, Folder
from activation_extraction.store.sample_table import pack_table
from benchmarks.processes import resident
from storages import open_storage
MIB = 2**20
shard, ceiling, batch = 32 * MIB, 256 * MIB, 8 * MIB
remote = Folder(sys.argv[1])
# With what has to be imported for it, also by pyarrow itself.
remote.write("first", b"1", ANY)
pack_table([])
storage = open_storage(
    sys.argv[2], {0: "h"}, shard_size_gb=shard / 1e9, shard_format=sys.argv[3], writer_threads=2,
    waiting_shards_gb=ceiling / 1e9, remote=remote,
)
storage.open()
Path("/proc/self/clear_refs").write_text("5")  # the peak begins now
before = resident("VmRSS")
added = 0
def work():
    global added
    ids = np.zeros(2048, np.int32)
    for sample in range(400):
        values = np.random.default_rng(sample).random((2048, 1024), np.float32)  # 8 MiB
        storage.add_activation(0, values, sample, "", ids)
        del values
        added += 1
threading.Thread(target=work, daemon=True).start()
def full():  # and all of it is on its way to the bucket
    now = storage.gauges()
    return now["bytes_waiting"] > ceiling and not now["shards_packing"] and now["shards_writing"]
while not full():
    time.sleep(0.05)
print("full", flush=True)
sys.stdin.readline()
now = storage.gauges()
print(added * batch / MIB, now["bytes_waiting"] / MIB, (resident("VmHWM") - before) / MIB)
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.long
@both_formats
def test_memory_has_a_ceiling_when_the_bucket_confirms_nothing(bucket, tmp_path, shard_format):
    """Shards of 32 MiB, of samples of 8 MiB, are offered as fast as they are taken; 256 MiB may
    wait."""
    arrived, go = threading.Semaphore(0), threading.Event()

    def hold(method, name):
        if method == "PUT" and re.search(r"shard_\d+\.(pkl|safetensors)", name):
            arrived.release()
            go.wait(600)

    bucket.before = hold
    script = [sys.executable, "-c", MEMORY, "gs://bucket/slow", str(tmp_path), shard_format]
    paths = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        script,
        env=os.environ | bucket.environment | paths,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "full\n"
        for _ in range(3):  # all that are cut by then have been sent
            assert arrived.acquire(timeout=60)
        printed = process.communicate("\n", timeout=60)[0]
        go.set()
    added, held, peak = map(float, printed.split())
    assert 256 < held <= 256 + 2 * 8, printed
    # MiB: to the ceiling comes the sample that waits, and what it takes to pack: each of two
    # threads has 4 to add up in float64, the blocks of gzip that are not yet in order, and what
    # the client keeps of eight uploads.
    assert added < peak < 256 + 8 + 48, printed
