"""Another process writes to the same output while this one loads and compiles."""

import shutil

import pytest
from command_line import main, records_of
from pods import Pod, flags_for
from small_runs import set_status

from activation_extraction.store.storage import ActivationStorage


def flags_of(demo_inputs, folder):
    more = ("--max_samples", 40, "--batch_size", 2, "--shard_size_gb", 1e-4)
    return [*flags_for(demo_inputs, folder, *more), "--no_data_parallel"]


@pytest.fixture(scope="module")
def whole(demo_inputs, tmp_path_factory):
    """An extraction that nobody disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "whole"
    assert main(*flags_of(demo_inputs, folder)) == 0
    return folder


@pytest.mark.parametrize("complete", [True, False])
def test_it_goes_on_where_the_other_one_ended(demo_inputs, whole, tmp_path, monkeypatch, complete):
    """Between this one's look at the output and its opening."""
    folder = tmp_path / "out"
    original = ActivationStorage.open

    def late(storage):
        monkeypatch.setattr(ActivationStorage, "open", original)
        shutil.copytree(whole, folder)
        for path in folder.glob("shard_*"):
            if not complete and int(path.name[6:10]) > 3:
                path.unlink()
        set_status(folder, "complete" if complete else "running")
        original(storage)

    monkeypatch.setattr(ActivationStorage, "open", late)
    assert main(*flags_of(demo_inputs, folder)) == 0
    if complete:
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == {
            p.name: p.read_bytes() for p in whole.iterdir()
        }
    found = [record["sample_idx"] for record in records_of(folder)[1]]
    assert sorted(found) == [*range(40)]
    assert main("--verify", "--output_dir", folder) == 0


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
        assert main("--verify", "--output_dir", out) == 0
        for host, name in enumerate(names):
            assert ("step 1:" in pod.text(host)) == (name not in done)
