"""Another process writes to the same output while this one loads and compiles."""

import json
import shutil

import pytest
from command_line import main
from pods import Pod, flags_for
from small_runs import content, set_status

import extract_activations
from activation_extraction.store.commit import METADATA
from activation_extraction.store.folder import Folder
from activation_extraction.store.storage import ActivationStorage


@pytest.fixture(scope="module")
def whole(demo_inputs, tmp_path_factory):
    """An extraction that nobody disturbed, of some shards."""
    folder = tmp_path_factory.mktemp("whole") / "whole"
    assert main(*flags_of(demo_inputs, folder)) == 0
    assert len(list(folder.glob("shard_*.json"))) > 6
    return folder


def flags_of(demo_inputs, folder):
    more = ("--max_samples", 40, "--batch_size", 2, "--shard_size_gb", 1e-4)
    return [*flags_for(demo_inputs, folder, *more), "--no_data_parallel"]


@pytest.fixture
def steps(monkeypatch):
    """The batches that were computed."""
    computed = []
    original = extract_activations.compile_step

    def compile_step(forward):
        step = original(forward)
        return lambda batch, flags: (computed.append(batch), step(batch, flags))[1]

    monkeypatch.setattr(extract_activations, "compile_step", compile_step)
    return computed


def keep(folder, shards):
    """Leaves the first shards, as a run that was killed does."""
    for path in folder.glob("shard_*"):
        if int(path.name[6:10]) > shards:
            path.unlink()
    set_status(folder, "running")


@pytest.mark.long
@pytest.mark.parametrize("before,after", [(0, "all"), (2, "all"), (2, 5), (4, 1), (3, 0)])
def test_it_goes_on_where_the_other_one_ended(
    demo_inputs, whole, steps, tmp_path, monkeypatch, before, after
):
    """Completed, continued, or begun anew: between the look at the output and its opening."""
    folder = tmp_path / "out"
    if before:
        shutil.copytree(whole, folder)
        keep(folder, before)
    original = ActivationStorage.open

    def late(storage):
        monkeypatch.setattr(ActivationStorage, "open", original)
        shutil.rmtree(folder, ignore_errors=True)
        if after:
            shutil.copytree(whole, folder)
        if after != "all" and after:
            keep(folder, after)
        original(storage)

    monkeypatch.setattr(ActivationStorage, "open", late)
    assert main(*flags_of(demo_inputs, folder)) == 0
    assert content(folder) == content(whole)
    computed = [placed.sample.sample_idx for batch in steps for placed in batch.samples]
    if after == "all":
        assert computed == []
        assert (folder / METADATA).read_bytes() == (whole / METADATA).read_bytes()
        return
    commits = [json.loads(path.read_bytes()) for path in sorted(whole.glob("shard_*.json"))]
    cursor = commits[after - 1]["cursor"] if after else {"samples": 0}
    due = {*range(cursor["samples"], 40)} - {*cursor.get("taken", ())}
    assert sorted(computed) == sorted(due)


def test_a_bucket_that_another_process_completes(demo_inputs, whole, steps, tmp_path, monkeypatch):
    url = f"file://{tmp_path}/bucket"
    upload = ("--upload_to_gcs", "--gcs_bucket", url, "--gcs_prefix", "run")
    bucket = Folder(f"{url}/run/machine_000")
    original, written = ActivationStorage.open, []

    def late(storage):
        monkeypatch.setattr(ActivationStorage, "open", original)
        assert main(*flags_of(demo_inputs, tmp_path / "other"), *upload) == 0
        steps.clear()
        written.append(bucket.read(METADATA))
        original(storage)

    monkeypatch.setattr(ActivationStorage, "open", late)
    assert main(*flags_of(demo_inputs, tmp_path / "out"), *upload) == 0
    assert steps == [] and [bucket.read(METADATA)] == written
    assert len(bucket.files()) == len(list(whole.glob("shard_*"))) + 2


SCRIPT = """
import os, shutil, sys
import extract_activations as script
from activation_extraction.store.storage import ActivationStorage
original = ActivationStorage.open
def late(storage):
    name = storage.folder.name
    if storage._state.name == "PLANNED" and not storage.complete and name in os.environ["DONE"]:
        shutil.copytree(os.environ["WHOLE"] + "/" + name, storage.folder)
    original(storage)
ActivationStorage.open = late
status = script.main(sys.argv[1:])
sys.stdout.flush()
os._exit(status)
"""


@pytest.mark.long
def test_hosts_of_a_pod_decide_together(demo_inputs, tmp_path):
    """The folders of both hosts are completed meanwhile, or that of one of them."""
    (tmp_path / "late.py").write_text(SCRIPT)
    more = ("--max_samples", 20, "--batch_size", 4, "--verbose")
    whole = tmp_path / "whole"
    assert Pod(tmp_path, 2, 1, *flags_for(demo_inputs, whole, *more)).wait() == [0, 0]
    names = [f"machine_000_host_{host:02d}" for host in range(2)]
    for number, done in enumerate((names, names[1:])):
        out = tmp_path / f"out_{number}"
        flags = flags_for(demo_inputs, out, *more)
        variables = {"WHOLE": str(whole), "DONE": " ".join(done)}
        pod = Pod(tmp_path, 2, 1, *flags, script=tmp_path / "late.py", **variables)
        assert pod.wait() == [0, 0], [pod.text(i) for i in range(2)]
        for host, name in enumerate(names):
            assert content(out / name) == content(whole / name)
            assert ("step 1:" in pod.text(host)) == (name not in done)
