"""Real processes that are killed, stopped or refused by the disk: the same command continues.

What may happen at each single request, test_exactly_once.py sweeps.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import main
from pods import Pod

from activation_extraction.store.folder import Folder
from activation_extraction.store.metadata import read_stored
from benchmarks.kill_and_resume import LOST, Extraction, deviation, samples_in

pytestmark = pytest.mark.long
URL = "gs://bucket/run/machine_000"


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
    assert main(*flags, "--output_dir", folder) == 0
    return samples_in(folder)


@pytest.fixture
def is_whole(undisturbed, check):
    """Checks what is stored: every sample once, the same bits, and nothing beside the shards but
    what a process leaves that is killed while it looks whether a bucket obeys conditions."""

    def is_whole(url: object) -> None:
        folder = Folder(str(url))
        stored = read_stored(folder)
        expected = {"metadata.json", "metrics.jsonl"}
        for commit in stored.in_order:
            expected |= {commit.name, *commit.files}
            found = {name for name in folder.files() if not name.startswith(".write_test_")}
        assert found == expected
        assert deviation(samples_in(url), undisturbed) == 0 and check(url) == []

    return is_whole


def upload_flags(flags, output, *more):
    where = "--output_dir", output, "--upload_to_gcs", "--gcs_bucket", "bucket"
    return [str(flag) for flag in (*flags, *where, "--gcs_prefix", "run", *more)]


def wait_for(bucket, name: str, running: Callable[[], int | None]) -> None:
    """Until the bucket has an object."""
    while name not in bucket.objects():
        assert running() is None
        time.sleep(0.02)


def test_runs_killed_at_random_moments(flags, is_whole, tmp_path):
    out = tmp_path / "out"
    extraction = Extraction(tmp_path, [*flags, "--output_dir", str(out)])
    assert extraction.kill(lambda: len([*out.glob("*.json")]), 8) == 8
    is_whole(out)


def test_uploading_runs_killed_at_random_moments(flags, is_whole, bucket, tmp_path):
    """And a fifth of the requests fail."""
    bucket.bytes_per_second, bucket.rate = 2e6, 0.2  # so that kills find uploads under way
    extraction = Extraction(tmp_path, upload_flags(flags, tmp_path / "out"), bucket.environment)
    assert extraction.kill(lambda: len(bucket.objects()), 5) == 5
    assert sum(bucket.failed.values()) > 10, bucket.failed
    bucket.rate = 0
    is_whole(URL)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "metadata.json",
        "metrics.jsonl",
    }


def test_of_two_writers_the_later_one_goes_on(flags, is_whole, bucket, tmp_path):
    """The earlier one sleeps meanwhile, says that it has lost, and ends with status 2."""
    extraction = Extraction(tmp_path, upload_flags(flags, tmp_path / "a"), bucket.environment)
    earlier = extraction.start()
    wait_for(bucket, "run/machine_000/shard_0002.json", earlier.process.poll)
    earlier.process.send_signal(signal.SIGSTOP)
    later = extraction.start("--output_dir", str(tmp_path / "b"))
    wait_for(bucket, "run/machine_000/shard_0004.json", later.process.poll)
    earlier.process.send_signal(signal.SIGCONT)
    assert earlier.end() == "lost" and later.end() == "done"
    (error,) = (line for line in earlier.log.read_text().splitlines() if LOST in line)
    assert error.startswith(f"error: {URL}: ") and "what it has committed is safe" in error
    is_whole(URL)


def test_what_is_complete_is_in_the_bucket_after_sigterm(
    flags, undisturbed, is_whole, bucket, tmp_path
):
    """An engine sends SIGTERM some seconds before it kills. The last shard is short."""
    bucket.bytes_per_second = 4e5  # so that shards wait for their upload, and the run for them
    given = upload_flags(flags, tmp_path, "--waiting_shards_gb", "0.001")
    extraction = Extraction(tmp_path, given, bucket.environment)
    started = extraction.start()
    wait_for(bucket, "run/machine_000/shard_0002.json", started.process.poll)
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(600) == 128 + signal.SIGTERM
    stored = read_stored(Folder(URL))
    assert stored.metadata["status"] == "interrupted" and not any(stored.missing())
    found = samples_in(URL)
    assert f"interrupted: {len(found):,} samples" in started.log.read_text()
    assert 0 < len(found) < 200 and found.keys() <= undisturbed.keys()
    *full, last = (commit.tokens for commit in stored.in_order)
    assert last < min(full) and not list(tmp_path.glob("shard_*"))
    bucket.bytes_per_second = None
    assert main(*given) == 0
    is_whole(URL)


def test_a_full_disk_ends_the_run_and_the_next_one_completes(flags, is_whole, tmp_path):
    """A real refusal by the kernel, from a limit on the size of files."""
    out = tmp_path / "out"
    command = [*flags, "--output_dir", str(out)]
    assert main(*command, "--max_samples", 60) == 0
    script = (
        "import resource, signal, sys, extract_activations as tool\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))\n"
        "sys.exit(tool.main(sys.argv[1:]))"
    )
    run = [sys.executable, "-c", script, *command, "--compilation_cache", "off"]
    done = subprocess.run(run, capture_output=True, text=True)
    shards, error = len([*out.glob("shard_*.json")]), done.stderr.splitlines()[-1]
    assert done.returncode == 1, done.stderr
    assert f"writing shard_{shards:04d}.pkl.gz: File too large" in error  # its JSON reserves it
    assert f"Stored in {out}: {shards - 1} shards, 60 samples; to continue" in error
    assert len(samples_in(out)) == 60
    assert main(*command) == 0
    is_whole(out)


@pytest.fixture(scope="module")
def two_hosts(demo_inputs, tmp_path_factory):
    """Flags, and what two hosts store that nobody disturbs."""
    folder = tmp_path_factory.mktemp("two_hosts")
    flags = [
        *("--model_path", demo_inputs / "model", "--layers_to_extract", 1),
        *("--dataset_path", demo_inputs / "documents.parquet", "--max_seq_length", 64),
        *("--batch_size", 4, "--shard_size_gb", 2e-4, "--heartbeat_timeout", 10),
    ]
    assert Pod(folder, 2, 2, *flags, "--output_dir", folder / "whole").wait() == [0, 0]
    return flags, samples_in(*(folder / "whole").glob("machine_*"))


@pytest.mark.parametrize("victim", [0, 1])
def test_either_of_two_hosts_killed(two_hosts, bucket, tmp_path, check, victim):
    """Both start again, and each continues its own part."""
    flags, whole = two_hosts
    folders = [f"machine_000_host_{host:02d}" for host in range(2)]
    where = upload_flags(flags, tmp_path / "out")
    bucket.bytes_per_second = 4e5
    pod = Pod(tmp_path, 2, 2, *where, **bucket.environment)
    wait_for(bucket, f"run/{folders[victim]}/shard_0002.json", pod.processes[victim].poll)
    pod.processes[victim].send_signal(signal.SIGKILL)
    assert all(pod.wait())
    pod.wait_for_words(1 - victim, "start all hosts again")  # a helper writes them afterwards
    bucket.bytes_per_second = None
    pod = Pod(tmp_path, 2, 2, *where, **bucket.environment)
    assert pod.wait() == [0, 0], [pod.text(i) for i in range(2)]
    found = samples_in(*(f"gs://bucket/run/{name}" for name in folders))
    assert deviation(found, whole) < 1e-5
    assert check("gs://bucket/run") == []
    metadata = json.loads(bucket.objects()[f"run/{folders[victim]}/metadata.json"])
    assert metadata["status"] == "complete"


def test_a_host_that_is_done_helps_the_others(demo_inputs, bucket, tmp_path):
    """The bucket has lost all that host 1 stored, which is computed again: its local files do not
    count. Host 0, which coordinates, has nothing to do but to wait for it."""
    flags = [
        *("--model_path", demo_inputs / "model", "--layers_to_extract", 1, "--max_samples", 60),
        *("--dataset_path", demo_inputs / "documents.parquet", "--max_seq_length", 64),
        *("--shard_size_gb", 2e-4, "--keep_local"),
    ]
    where = upload_flags(flags, tmp_path / "out")
    assert Pod(tmp_path, 2, 2, *where, **bucket.environment).wait() == [0, 0]
    urls = [f"gs://bucket/run/machine_000_host_{host:02d}" for host in range(2)]
    before = samples_in(*urls)
    for name in [name for name in bucket.objects() if "host_01" in name]:
        bucket.delete(name)
    bucket.asked.clear()
    pod = Pod(tmp_path, 2, 2, *where, **bucket.environment)
    assert pod.wait() == [0, 0], [pod.text(i) for i in range(2)]
    assert deviation(samples_in(*urls), before) == 0
    local = [tmp_path / "out" / Path(url).name for url in urls]
    assert deviation(samples_in(*local), before) == 0
    assert not [
        name for method, name in bucket.asked if method == "PUT" and "host_00/shard" in name
    ]
