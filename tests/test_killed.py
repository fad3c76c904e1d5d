"""Real processes that are killed, stopped or refused by the disk: the same command continues.

What may happen at each single request, test_exactly_once.py sweeps.
"""

import resource
import signal
import time

import pytest
from command_line import main
from pods import Pod
from small_runs import status

from activation_extraction.store.folder import Folder
from activation_extraction.store.run_log import RunLog
from benchmarks.kill_and_resume import Extraction, deviation, samples_in

pytestmark = pytest.mark.long
URL = "gs://bucket/run/machine_000"


@pytest.fixture(scope="module")
def flags(many_shards):
    return ["--batch_size", "4", *many_shards]


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
        expected = {"metadata.json", "metrics.jsonl"}
        for commit in RunLog.read(folder).commits_in_order:
            expected |= {commit.name, *commit.files}
        assert {name for name in folder.files() if not name.startswith(".write_test_")} == expected
        assert deviation(samples_in(url), undisturbed) == 0 and check(url) == []

    return is_whole


def upload_flags(flags, output, *more):
    where = "--output_dir", output, "--upload_to_gcs", "--gcs_bucket", "bucket"
    return [str(flag) for flag in (*flags, *where, "--gcs_prefix", "run", *more)]


def slow_down(bucket, seconds=0.3):
    """Has uploads take a while, so that shards wait for them, and the run for room."""
    bucket.before = lambda method, name: time.sleep(seconds if method == "PUT" else 0)


def wait_for(bucket, name, process):
    """Waits until the bucket has an object."""
    while name not in bucket.objects():
        assert process.poll() is None
        time.sleep(0.02)


@pytest.mark.parametrize("in_bucket", [False, True])
def test_runs_killed_at_random_moments(flags, is_whole, bucket, tmp_path, in_bucket):
    """A fifth of the requests to the bucket fail."""
    out, kills = tmp_path / "out", 4
    if in_bucket:
        slow_down(bucket)
        bucket.fault_rate = 0.2
        extraction = Extraction(tmp_path, upload_flags(flags, out), bucket.environment)
        assert extraction.kill(lambda: len(bucket.objects()), kills) == kills
        assert sum(bucket.failed.values()) > 10, bucket.failed
        bucket.fault_rate = 0
        assert {path.name for path in out.iterdir()} == {"metadata.json", "metrics.jsonl"}
    else:
        extraction = Extraction(tmp_path, [*flags, "--output_dir", str(out)])
        assert extraction.kill(lambda: len([*out.glob("*.json")]), kills) == kills
    is_whole(URL if in_bucket else out)


def test_what_is_complete_is_in_the_bucket_after_sigterm(
    flags, undisturbed, is_whole, bucket, tmp_path
):
    """An engine sends SIGTERM some seconds before it kills. The last shard is short."""
    slow_down(bucket)
    given = upload_flags(flags, tmp_path, "--waiting_shards_gb", "0.001")
    started = Extraction(tmp_path, given, bucket.environment).start()
    wait_for(bucket, "run/machine_000/shard_0002.json", started.process)
    started.process.send_signal(signal.SIGTERM)
    assert started.process.wait(600) == 128 + signal.SIGTERM
    stored, found = RunLog.read(Folder(URL)), samples_in(URL)
    assert stored.metadata["status"] == "interrupted"
    assert f"interrupted: {len(found):,} samples" in started.log_path.read_text()
    assert 0 < len(found) < 120 and found.keys() <= undisturbed.keys()
    *full, last = (commit.tokens for commit in stored.commits_in_order)
    assert last < min(full) and not list(tmp_path.glob("shard_*"))
    slow_down(bucket, 0)
    assert main(*given) == 0
    is_whole(URL)


def test_a_full_disk_ends_the_run_and_the_next_one_completes(flags, is_whole, tmp_path, capsys):
    """The kernel refuses to write, by a limit on the size of files."""
    out = tmp_path / "out"
    command = [*flags, "--output_dir", str(out)]
    assert main(*command, "--max_samples", 40) == 0
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        assert main(*command, "--compilation_cache", "off") == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    shards, error = len([*out.glob("shard_*.json")]), capsys.readouterr().err.splitlines()[-1]
    assert f"writing shard_{shards:04d}.pkl.gz: File too large" in error  # its JSON reserves it
    assert f"Stored in {out}: {shards - 1} shards, 40 samples; to continue" in error
    assert len(samples_in(out)) == 40 and status(out) == "failed"
    assert main(*command) == 0
    is_whole(out)


def test_a_host_of_a_pod_is_killed_and_a_shard_of_it_repaired(flags, bucket, tmp_path, check):
    """Both start again, and each continues, or repairs, its own part. Two machines store the same
    between them as two hosts of one."""
    names, out = [f"machine_000_host_{host:02d}" for host in range(2)], tmp_path / "out"
    for machine in range(2):
        part = "--total_machines", 2, "--machine_id", machine, "--max_samples", 40
        assert main(*flags, *part, "--output_dir", out) == 0
    whole = samples_in(out / "machine_000", out / "machine_001")
    flags = [*flags[:-1], "--max_samples", "80", "--heartbeat_timeout", "10"]
    slow_down(bucket)
    given = upload_flags(flags, tmp_path / "bucket")
    pod = Pod(tmp_path, 2, 1, *given, **bucket.environment)
    wait_for(bucket, f"run/{names[0]}/shard_0002.json", pod.processes[0])
    pod.processes[0].send_signal(signal.SIGKILL)
    assert all(pod.wait())
    pod.wait_until(lambda: "start all hosts again" in pod.text(1))  # a helper writes it
    slow_down(bucket, 0)

    def run_again(*more):
        pod = Pod(tmp_path, 2, 1, *given, *more, **bucket.environment)
        assert pod.wait() == [0, 0], [pod.text(i) for i in range(2)]
        found = samples_in(*(f"gs://bucket/run/{name}" for name in names))
        assert deviation(found, whole) < 1e-5
        assert check("gs://bucket/run") == []
        return pod

    run_again()
    shard = f"run/{names[1]}/shard_0001.pkl.gz"
    bucket.put(shard, b"?" + bucket.objects()[shard][1:])
    pod = run_again("--repair", "--verbose")
    for host, made in enumerate(("none", "1")):
        assert f"shards stored in gs://bucket/run/{names[host]}: {made}" in pod.text(host)
