"""An engine sends SIGTERM 30 seconds before it kills: what is complete is committed by then."""

import json
import signal
import subprocess
import sys
import time

import pytest
from test_upload import flags, upload_flags, uploaded  # noqa: F401

pytestmark = pytest.mark.long


def test_what_is_complete_is_in_the_bucket_after_a_notice(
    flags,  # noqa: F811
    bucket,
    tmp_path,
    check,
):
    """And nothing of it is left to upload."""
    bucket.bytes_per_second = 4e5  # so that shards wait for their upload, and the run for them
    given = upload_flags(flags, tmp_path, "--waiting_shards_gb", "0.001")
    command = [sys.executable, "extract_activations.py", *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while "run/machine_000/shard_0002.json" not in bucket.objects():
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        printed = process.communicate(timeout=600)[0]
    assert process.returncode == 128 + signal.SIGTERM
    metadata = json.loads(bucket.objects()["run/machine_000/metadata.json"])
    assert metadata["status"] == "interrupted" and 0 < metadata["samples"] < 200
    assert f"interrupted: {metadata['samples']:,} samples" in printed
    assert len(uploaded(bucket)) == metadata["shards"] and not list(tmp_path.glob("*.pkl.gz"))
    (problem,) = check("gs://bucket/run")
    assert problem.endswith("the run is not complete: interrupted")
