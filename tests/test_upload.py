"""Uploading to a bucket that fails, is slow or refuses; and runs that are killed meanwhile."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import forks
import numpy as np
import pytest
from pods import Pod
from small_runs import HIDDEN, HOOKS, both_formats

import extract_activations
from activation_extraction.common.errors import StorageError
from activation_extraction.store import folder as folder_module
from activation_extraction.store import shard_writer
from activation_extraction.store.folder import Folder
from activation_extraction.store.formats import format_of
from activation_extraction.store.storage import ActivationStorage
from benchmarks.kill_and_resume import kill_and_resume, shards_in


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
@both_formats
def test_faults_in_a_fifth_of_the_requests_lose_nothing(flags, shard_format, bucket, tmp_path):
    flags = [*flags, "--shard_format", shard_format]
    whole = tmp_path / "whole"
    assert extract_activations.main([*flags, "--output_dir", str(whole)]) == 0
    bucket.rate = 0.2
    bucket.reach()
    assert extract_activations.main(upload_flags(flags, tmp_path / "out")) == 0
    assert sum(bucket.failed.values()) > 10 and len(bucket.failed) == 6, bucket.failed
    assert uploaded(bucket) == shards_in(whole) and not shards_in(tmp_path / "out")
    metadata = json.loads(bucket.objects()["run/machine_000/metadata.json"])
    assert metadata["status"] == "complete" and metadata["samples"] == 200
    names = {path.name for path in (tmp_path / "out").glob("*.json")}
    assert {f"run/machine_000/{name}" for name in names} <= set(bucket.objects())
    bucket.rate = 0
    assert extract_activations.main(["--verify", "--output_dir", "gs://bucket/run"]) == 0


@pytest.mark.long
def test_an_outage_ends_the_run_and_the_next_one_completes(
    flags, undisturbed, bucket, tmp_path, capsys
):
    """Nothing works any more after some shards: status 1, and what is here stays here."""
    bucket.reach()

    def break_down():
        while not any(name.endswith("shard_0002.json") for name in bucket.objects()):
            time.sleep(0.01)
        bucket.faults, bucket.rate = ("503",), 1.0

    saboteur = threading.Thread(target=break_down)
    saboteur.start()
    command = upload_flags(flags, tmp_path, "--upload_timeout", "2")
    assert extract_activations.main(command) == 1
    saboteur.join()
    error = capsys.readouterr().err.splitlines()[-1]
    assert "kept failing for" in error and "--upload_timeout" in error
    assert "Stored in gs://bucket/run/machine_000: " in error
    assert "to continue, run the same command again" in error
    stored = uploaded(bucket)
    assert 2 <= len(stored) < len(undisturbed)
    kept = {path.name for path in tmp_path.glob("shard_*.pkl.gz")}
    counted = {n for n in bucket.objects() if "shard" in n and n.endswith(".json")}
    assert kept and len(counted) + len(kept) >= 3
    bucket.rate = 0
    assert extract_activations.main(command) == 0
    assert uploaded(bucket) == undisturbed and not list(tmp_path.glob("*.pkl.gz"))


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


@pytest.mark.long
@pytest.mark.parametrize("victim", [0, 1])
def test_either_of_two_hosts_killed(demo_inputs, bucket, tmp_path, victim):
    """Both start again, each continues its own part; the union is complete."""
    flags = [
        *("--model_path", demo_inputs / "model", "--layers_to_extract", 1),
        *("--dataset_path", demo_inputs / "documents.parquet", "--max_seq_length", 64),
        *("--batch_size", 4, "--shard_size_gb", 2e-4, "--heartbeat_timeout", 10),
    ]
    where = upload_flags(flags, tmp_path / "out")
    expected = Pod(tmp_path, 2, 2, *flags, "--output_dir", tmp_path / "whole")
    assert expected.wait() == [0, 0]
    bucket.bytes_per_second = 4e5
    pod = Pod(tmp_path, 2, 2, *where, **bucket.environment)
    while f"run/machine_000_host_{victim:02d}/shard_0002.json" not in bucket.objects():
        assert pod.processes[victim].poll() is None, pod.text(victim)
        time.sleep(0.05)
    pod.processes[victim].send_signal(signal.SIGKILL)
    assert all(pod.wait())
    bucket.bytes_per_second = None
    pod = Pod(tmp_path, 2, 2, *where, **bucket.environment)
    assert pod.wait() == [0, 0], [pod.text(i) for i in range(2)]
    for host in range(2):
        name = f"machine_000_host_{host:02d}"
        assert uploaded(bucket, name) == shards_in(tmp_path / "whole" / name)
    assert extract_activations.main(["--verify", "--output_dir", "gs://bucket/run"]) == 0


@pytest.mark.long
def test_a_host_that_is_done_waits_for_the_uploads_of_the_others(demo_inputs, bucket, tmp_path):
    """Everything is computed; the bucket has lost the part of host 1. Host 0 coordinates."""
    flags = [
        *("--model_path", demo_inputs / "model", "--layers_to_extract", 1, "--max_samples", 60),
        *("--dataset_path", demo_inputs / "documents.parquet", "--max_seq_length", 64),
        *("--shard_size_gb", 2e-4, "--keep_local"),
    ]
    where = upload_flags(flags, tmp_path / "out")
    assert Pod(tmp_path, 2, 2, *where, **bucket.environment).wait() == [0, 0]
    stored = uploaded(bucket, "machine_000_host_01")
    for name in [name for name in bucket.objects() if "host_01" in name]:
        bucket.delete(name)
    bucket.bytes_per_second = 1e5
    pod = Pod(tmp_path, 2, 2, *where, **bucket.environment)
    assert pod.wait() == [0, 0], [pod.text(i) for i in range(2)]
    assert uploaded(bucket, "machine_000_host_01") == stored
    assert "everything has been computed already" in pod.text(0)


@pytest.mark.long
def test_the_second_ctrl_c_does_not_wait_for_uploads(flags, undisturbed, bucket, tmp_path):
    out = tmp_path / "out"
    bucket.bytes_per_second = 1e4
    process = subprocess.Popen(
        [sys.executable, extract_activations.__file__, *upload_flags(flags, out)],
        env=os.environ | bucket.environment | {"JAX_PLATFORMS": "cpu"},
        stderr=subprocess.PIPE,
        text=True,
    )
    while len(list(out.glob("shard_*.gz"))) < 6:  # the computation waits for the bucket
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, printed = process.communicate(timeout=10)
    assert process.returncode == 130 and printed.splitlines()[-1] == "interrupted"
    bucket.bytes_per_second = None
    assert extract_activations.main(upload_flags(flags, out)) == 0
    assert uploaded(bucket) == undisturbed


def fill(storage, count, tokens=1000, pause=0.0):
    """Adds samples of (tokens, HIDDEN) float32 for each hook."""
    for sample in range(count):
        for key in HOOKS:
            values = np.random.default_rng([sample, key]).random((tokens, HIDDEN), np.float32)
            storage.add_activation(key, values, sample, "", np.zeros(tokens, np.int32))
        time.sleep(pause)


class SlowStore(Folder):
    """Notes what is on its way; waits until it is let go."""

    def __init__(self, url):
        super().__init__(url, patience=0.5)
        self.go = threading.Event()
        self.uploading, self.most = 0, 0
        self.order: list[str] = []
        self.counting = threading.Lock()

    def put(self, path, name=None):
        with self.counting:
            self.uploading += path.name.endswith(".pkl")
            self.most = max(self.most, self.uploading)
        if path.name.endswith(".pkl"):
            self.go.wait(300)
        super().put(path, name)
        with self.counting:
            self.uploading -= path.name.endswith(".pkl")
            self.order.append(path.name)


def test_computing_writing_and_uploading_go_on_at_the_same_time_within_bounds(tmp_path):
    """With a bucket that takes nothing the caller is stopped after a few shards, and goes on
    when it does; commits reach the bucket in order."""
    store = SlowStore(f"memory://{tmp_path}/slow")
    size = 1000 * HIDDEN * 4 * len(HOOKS) / 1e9
    storage = ActivationStorage(
        tmp_path / "out", HOOKS, shard_size_gb=size, compress=False, remote=store
    )
    done = threading.Event()

    def work():
        fill(storage, 30)
        storage.finalize()
        done.set()

    threading.Thread(target=work, daemon=True).start()
    deadline = time.monotonic() + 20
    while store.uploading < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.5)
    written = len(list((tmp_path / "out").glob("*.pkl")))
    assert store.most == 4 and not done.is_set()
    assert 5 <= written <= 7  # four on their way, one waiting, one or two behind them
    assert storage._cutter.last_sample < 10 and storage.totals.shards == 0
    store.go.set()
    assert done.wait(300) and storage.totals.shards == 30
    commits = [name for name in store.order if name.endswith("json") and name[0] == "s"]
    assert commits == [f"shard_{n:04d}.json" for n in range(1, 31)]


def test_an_upload_error_ends_the_run_at_the_next_batch(tmp_path, monkeypatch):
    store = Folder(f"memory://{tmp_path}/broken", patience=0.1)
    storage = ActivationStorage(tmp_path / "out", HOOKS, shard_size_gb=1e-5, remote=store)
    storage.open()

    def refuse(*_, **__):
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(store._fs, "put_file", refuse)
    fill(storage, 2)
    deadline = time.monotonic() + 20
    while storage._writer.failure is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(StorageError, match="uploading shard_0001.pkl.gz: permission denied"):
        storage.add_batch(None, None)  # type: ignore[arg-type]
    with pytest.raises(StorageError):
        storage.finalize()
    kept = sorted(path.name for path in (tmp_path / "out").glob("*.gz"))
    assert kept and storage.totals.shards == 0


MEMORY = """
import os, sys, threading, time
import numpy as np
from activation_extraction.store.storage import ActivationStorage
from activation_extraction.store.folder import Folder
from activation_extraction.store.formats import format_of
from benchmarks.processes import resident
shard = 128 * 2**20
storage = ActivationStorage(
    sys.argv[1], {0: "h"}, shard_size_gb=shard / 1e9, compress=False, remote=Folder(sys.argv[2])
)
storage.open()
offered = 0
def offer():
    global offered
    for sample in range(400):
        values = np.full((2048, 1024), sample, np.float32)  # 8 MB, of 16 in a shard
        storage.add_activation(0, values, sample, "", np.zeros(2048, np.int32))
        offered += 1
# What getrusage tells begins with the peak of the process that started this one.
before, seen, deadline = resident("VmHWM"), -1, time.monotonic() + 60
threading.Thread(target=offer, daemon=True).start()
while offered != seen or offered < 96 and time.monotonic() < deadline:  # nothing more is taken
    seen = offered
    time.sleep(3)
print(offered / 16, (resident("VmHWM") - before - 2 * shard) / 2**20, flush=True)
os._exit(0)
"""


@pytest.mark.long
def test_memory_has_a_ceiling_of_two_shards_with_a_slow_bucket(bucket, tmp_path):
    """A bucket that accepts 1 MB/s; shards of 128 MB are offered as fast as they are taken."""
    bucket.bytes_per_second = 1e6
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path / "out"), "gs://bucket/slow"],
        env=os.environ | bucket.environment | {"PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    offered, beyond = map(float, done.stdout.split())
    assert 6 <= offered < 8  # it was stopped: two shards in memory, the others on the disk
    # MB: the sample that did not fit any more, the chunks under way, and modules for uploading.
    assert beyond < 100, done.stdout


def test_a_slow_bucket_gets_its_chunks_before_the_requests_time_out():
    """1 MB/s, as above, shared by all uploads."""
    assert (
        shard_writer.UPLOADS * folder_module.CHUNK_BYTES / 1e6 < folder_module.REQUEST_SECONDS / 2
    )
