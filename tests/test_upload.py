"""Uploading to a bucket that fails, is slow or refuses; and runs that are killed meanwhile."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import forks
import fsspec
import numpy as np
import pytest
from pods import Pod
from small_runs import HIDDEN, HOOKS, both_formats, content
from storages import open_storage

import extract_activations
from activation_extraction.common.errors import StorageError
from activation_extraction.store.commit import number_of
from activation_extraction.store.folder import Folder
from activation_extraction.store.formats import format_of
from activation_extraction.store.patience import FolderError
from activation_extraction.store.shard_writer import SHARDS_AT_ONCE
from benchmarks.kill_and_resume import kill_and_resume, shards_in

LOCAL = {"metadata.json", "metrics.jsonl"}  # what is written to the disk of a run with a bucket


@pytest.fixture(scope="module")
def flags(demo_inputs):
    return [
        *("--model_path", str(demo_inputs / "model"), "--layers_to_extract", "1", "3"),
        *("--dataset_path", str(demo_inputs / "documents.parquet"), "--max_seq_length", "64"),
        *("--batch_size", "4", "--max_samples", "200", "--shard_size_gb", "0.0005"),
        "--no_data_parallel",
    ]


@pytest.fixture(scope="module")
def undisturbed(flags, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert extract_activations.main([*flags, "--output_dir", str(folder)]) == 0
    return shards_in(folder)


def upload_flags(flags, output, *more):
    return [
        *(*flags, "--output_dir", str(output)),
        *("--upload_to_gcs", "--gcs_bucket", "bucket", "--gcs_prefix", "run", *more),
    ]


def uploaded(bucket, folder="machine_000"):
    """The shards in the bucket."""
    prefix = f"run/{folder}/"
    return {
        name.removeprefix(prefix): data
        for name, data in bucket.objects().items()
        if name.startswith(prefix) and format_of(name.removeprefix(prefix))
    }


@pytest.mark.long
def test_faults_in_a_fifth_of_the_requests_lose_nothing(flags, undisturbed, bucket, tmp_path):
    bucket.rate = 0.2
    bucket.reach()
    assert extract_activations.main(upload_flags(flags, tmp_path / "out")) == 0
    assert sum(bucket.failed.values()) > 10 and len(bucket.failed) == 6, bucket.failed
    assert uploaded(bucket) == undisturbed
    metadata = json.loads(bucket.objects()["run/machine_000/metadata.json"])
    assert metadata["status"] == "complete" and metadata["samples"] == 200
    assert {path.name for path in (tmp_path / "out").iterdir()} == LOCAL
    bucket.rate = 0
    assert extract_activations.main(["--verify", "--output_dir", "gs://bucket/run"]) == 0


@pytest.mark.long
def test_an_outage_ends_the_run_and_the_next_one_completes(
    flags, undisturbed, bucket, tmp_path, capsys
):
    """Nothing works any more after some shards: status 1, and what was confirmed counts."""
    bucket.reach()

    def break_down(method, name):
        if method == "POST" and name.endswith("shard_0003.json"):
            bucket.faults, bucket.rate = ("503",), 1.0

    bucket.before = break_down
    command = upload_flags(flags, tmp_path, "--upload_timeout", "2")
    assert extract_activations.main(command) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "kept failing for" in error and "--upload_timeout" in error
    assert "Stored in gs://bucket/run/machine_000: 3 shards, " in error
    assert "to continue, run the same command again" in error
    assert {path.name for path in tmp_path.iterdir()} == LOCAL
    assert json.loads((tmp_path / "metadata.json").read_bytes())["status"] == "failed"
    confirmed = {n for n in bucket.objects() if "shard" in n and n.endswith(".json")}
    assert len(confirmed) == 3 < len(undisturbed)
    bucket.rate, bucket.before = 0, lambda method, name: None
    assert extract_activations.main(command) == 0
    assert uploaded(bucket) == undisturbed


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
    flags, bucket, tmp_path, capsys, monkeypatch, fault, status, message
):
    monkeypatch.setattr("activation_extraction.run.prepare.prepare_model", None)
    command = upload_flags(flags, tmp_path / "out", "--upload_timeout", "1")
    if fault == "nothing":
        command[command.index("bucket")] = "elsewhere"
    else:
        bucket.faults, bucket.rate = (fault,), 1.0
    assert extract_activations.main(command) == status
    *before, error = capsys.readouterr().err.strip().splitlines()
    assert message in error and error.startswith("error: ")
    assert [("failed (" in line) for line in before] == [True] * (fault == "503")
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_runs_killed_at_random_moments_store_what_an_undisturbed_one_does(
    flags, undisturbed, tmp_path
):
    out = tmp_path / "out"
    command = [*flags, "--output_dir", str(out)]
    killed = kill_and_resume(command, {}, lambda: len([*out.glob("*.json")]), 10, 0, forks.start)
    assert killed == 10 and shards_in(out) == undisturbed
    assert extract_activations.main(["--verify", "--output_dir", str(out)]) == 0


@pytest.mark.long
def test_uploading_runs_killed_at_random_moments(flags, undisturbed, bucket, tmp_path):
    """The local disk is lost as well, every third time."""
    out, lives = tmp_path / "out", []

    def sign_of_life():
        lives.append(len(bucket.objects()))
        return lives[-1]

    bucket.bytes_per_second = 2e6  # so that kills find uploads under way
    command = upload_flags(flags, out)
    killed = kill_and_resume(command, bucket.environment, sign_of_life, 10, 1, forks.start)
    assert killed == 10 and uploaded(bucket) == undisturbed
    assert extract_activations.main(["--verify", "--output_dir", "gs://bucket/run"]) == 0


@pytest.fixture(scope="module")
def two_hosts(demo_inputs, tmp_path_factory):
    """Flags, and the folder of two hosts that nobody disturbed."""
    folder = tmp_path_factory.mktemp("two_hosts")
    flags = [
        *("--model_path", demo_inputs / "model", "--layers_to_extract", 1),
        *("--dataset_path", demo_inputs / "documents.parquet", "--max_seq_length", 64),
        *("--batch_size", 4, "--shard_size_gb", 2e-4, "--heartbeat_timeout", 10),
    ]
    assert Pod(folder, 2, 2, *flags, "--output_dir", folder / "whole").wait() == [0, 0]
    return flags, folder / "whole"


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_either_of_two_hosts_killed(two_hosts, bucket, tmp_path, victim):
    """Both start again, each continues its own part; the union is complete."""
    flags, whole = two_hosts
    where = upload_flags(flags, tmp_path / "out")
    bucket.bytes_per_second = 4e5
    pod = Pod(tmp_path, 2, 2, *where, **bucket.environment)
    while f"run/machine_000_host_{victim:02d}/shard_0002.json" not in bucket.objects():
        assert pod.processes[victim].poll() is None, pod.text(victim)
        time.sleep(0.05)
    pod.processes[victim].send_signal(signal.SIGKILL)
    assert all(pod.wait())
    pod.wait_for_words(1 - victim, "start all hosts again")  # a helper writes them afterwards
    bucket.bytes_per_second = None
    pod = Pod(tmp_path, 2, 2, *where, **bucket.environment)
    assert pod.wait() == [0, 0], [pod.text(i) for i in range(2)]
    for host in range(2):
        name = f"machine_000_host_{host:02d}"
        assert uploaded(bucket, name) == shards_in(whole / name)
    assert extract_activations.main(["--verify", "--output_dir", "gs://bucket/run"]) == 0


@pytest.mark.long
def test_a_host_that_is_done_helps_the_others(demo_inputs, bucket, tmp_path):
    """The bucket has lost the part of host 1, which is computed again: local files do not count.
    Host 0, which coordinates, has nothing to do but to wait for it."""
    flags = [
        *("--model_path", demo_inputs / "model", "--layers_to_extract", 1, "--max_samples", 60),
        *("--dataset_path", demo_inputs / "documents.parquet", "--max_seq_length", 64),
        *("--shard_size_gb", 2e-4, "--keep_local"),
    ]
    where = upload_flags(flags, tmp_path / "out")
    assert Pod(tmp_path, 2, 2, *where, **bucket.environment).wait() == [0, 0]
    stored = bucket.objects()
    for name in [name for name in stored if "host_01" in name]:
        bucket.delete(name)
    bucket.asked.clear()
    bucket.bytes_per_second = 1e5
    pod = Pod(tmp_path, 2, 2, *where, **bucket.environment)
    assert pod.wait() == [0, 0], [pod.text(i) for i in range(2)]
    for host in range(2):
        name = f"machine_000_host_{host:02d}"
        found = uploaded(bucket, name)
        assert found == {n: stored[f"run/{name}/{n}"] for n in found} and len(found) > 1
        assert shards_in(tmp_path / "out" / name) == found
    assert not [name for method, name in bucket.asked if method == "PUT" and "host_00" in name]


@pytest.mark.long
def test_the_second_ctrl_c_does_not_wait_for_uploads(flags, undisturbed, bucket, tmp_path):
    """The bucket confirms nothing, and so computing waits."""
    command = upload_flags(flags, tmp_path, "--waiting_shards_gb", "0.003")
    arrived, go = threading.Semaphore(0), threading.Event()

    def hold(method, _):
        if method == "PUT":
            arrived.release()
            go.wait(600)

    bucket.before = hold
    process = subprocess.Popen(
        [sys.executable, extract_activations.__file__, *command],
        env=os.environ | bucket.environment | {"JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )
    for _ in range(2):
        assert arrived.acquire(timeout=600)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert any("stopping after this step" in line for line in iter(process.stderr.readline, ""))
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=600)
    assert process.returncode == 130 and printed.splitlines()[-1] == "interrupted"
    go.set()
    bucket.before = lambda method, name: None
    assert extract_activations.main(command) == 0
    assert uploaded(bucket) == undisturbed


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


class SlowStore(Folder):
    """Takes a shard once it is let go, or refuses it. `arrived` names files in their order."""

    def __init__(self, url, refused=()):
        super().__init__(url, patience=0.5)
        self.go = [threading.Event() for _ in range(31)]  # by number
        self.refused = refused
        self.begun: set[int] = set()
        self.arrived: list[str] = []
        self.most = self.uploading = 0
        self.counting = threading.Lock()

    def create(self, name, *content):
        number = number_of(name)
        if name.endswith(".pkl"):
            with self.counting:
                self.begun.add(number)
                self.uploading += 1
                self.most = max(self.most, self.uploading)
            assert self.go[number].wait(600)
            with self.counting:
                self.uploading -= 1
            if number in self.refused:
                raise FolderError(f"{name}: permission denied", final=True)
        super().create(name, *content)

    def write(self, name, data):
        super().write(name, data)
        self.arrived.append(name)

    def let_go(self, *numbers):
        for number in numbers:
            self.go[number].set()

    @property
    def committed(self):
        return [number_of(name) for name in self.arrived if re.fullmatch(r"shard_\d+\.json", name)]


def open_slow(tmp_path, store, folder="out", **options):
    usual = {"shard_size_gb": SHARD / 1e9, "compress_shards": False, "waiting_shards_gb": 1}
    return open_storage(tmp_path / folder, HOOKS, remote=store, **usual | options)


def test_adding_stops_at_the_ceiling_of_memory_and_goes_on_when_there_is_room(tmp_path):
    store = SlowStore(f"memory://{tmp_path}/slow")
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
        until(lambda: {"shard_0003.npz", "shard_0004.npz", "shard_0005.npz"} <= {*store.arrived})
        assert store.committed == [1] and not working.done()
        is_full(5)
        store.let_go(*range(31))
        working.result(60)
    assert storage.totals.shards == 30 and store.committed == [*range(1, 31)]
    assert sum(storage.waited.values()) > 0
    assert storage.gauges()["bytes_waiting"] <= SHARD  # the last sample's, which none followed


def test_many_shards_are_on_their_way_at_a_time_but_no_more_than_that(tmp_path):
    store = SlowStore(f"memory://{tmp_path}/slow")
    with open_slow(tmp_path, store) as storage:
        for sample in range(30):
            add(storage, sample)
        until(lambda: len(store.begun) == SHARDS_AT_ONCE)
        store.let_go(*range(31))
    assert store.most == SHARDS_AT_ONCE and store.committed == [*range(1, 31)]


@pytest.mark.parametrize("refused", [(3,), (3, 2)])
def test_a_shard_that_fails_stops_those_after_it_only(tmp_path, refused):
    """If two shards fail, the message is about the first one, although it fails later."""
    url = f"memory://{tmp_path}/slow"
    store = SlowStore(url, refused)
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
    for place, first in (("out", len(store.committed)), ("whole", 0)):
        remote = Folder(url if place == "out" else f"{url} whole")
        with open_slow(tmp_path, remote, folder=place) as storage:
            for sample in range(first, 7):
                add(storage, sample)
        fsspec.filesystem("memory").get(f"{remote.url}/", f"{tmp_path}/{place}", recursive=True)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


MEMORY = """
import os, sys, threading, time
from pathlib import Path
import google_crc32c
import numpy as np
from activation_extraction.store.folder import Folder
from benchmarks.processes import resident
from storages import open_storage
MIB = 2**20
shard, ceiling, batch = 32 * MIB, 256 * MIB, 8 * MIB
remote = Folder(sys.argv[1])
# With what has to be imported for it.
remote.create("first", [memoryview(b"1")], 1, google_crc32c.value(b"1"))
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
        if method == "PUT" and "shard" in name:
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
            assert arrived.acquire(timeout=600)
        printed = process.communicate("\n", timeout=600)[0]
        go.set()
    added, held, peak = map(float, printed.split())
    assert 256 < held <= 256 + 2 * 8, printed
    # MiB: to the ceiling comes the sample that waits, and what it takes to pack: each of two
    # threads has 4 to add up in float64, and the blocks of gzip that are not yet in order.
    assert added < peak < 256 + 8 + 32, printed
