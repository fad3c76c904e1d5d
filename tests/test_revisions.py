"""--model_revision, and the commit of a hub model that an extraction stays with."""

import json
import shutil

import pytest
from command_line import main
from pods import Pod
from test_hub import hub, run  # noqa: F401


@pytest.fixture
def flags(demo_inputs):
    text = ["--dataset_path", str(demo_inputs / "documents.parquet"), "--max_seq_length", "64"]
    return [*text, "--model_path", "org/tiny", "--layers_to_extract", "0"]


def commit_upstream(tmp_path, revision=""):
    """Changes a weight of org/tiny's revision; the commit before stays within reach."""
    model = tmp_path / f"hub/models/org/tiny{revision}"
    shutil.copytree(model, tmp_path / "hub/models/org/tiny@before")
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-2] ^= 1
    (model / "model.safetensors").write_bytes(weights)


def recorded(folder):
    return json.loads((folder / "metadata.json").read_text())["model_commit"]


@pytest.mark.long
def test_a_commit_upstream_does_not_stop_an_extraction(hub, tmp_path, flags):  # noqa: F811
    done = run(hub, tmp_path, *flags, "--max_samples", "5")
    assert done.returncode == 0, done.stderr
    first = recorded(tmp_path / "out")
    commit_upstream(tmp_path)
    other = run(hub, tmp_path, *flags, "--max_samples", "9", "--model_revision", "main")
    assert other.returncode == 2
    (line,) = other.stderr.splitlines()
    assert line.startswith("error: --model_revision main: is commit ") and first in line
    shutil.rmtree(tmp_path / "home")
    done = run(hub, tmp_path, *flags, "--max_samples", "9")
    assert done.returncode == 0, done.stderr
    assert recorded(tmp_path / "out") == first
    verified = run(hub, tmp_path, "--verify", "--model_path", "org/tiny", "--verify_samples", "1")
    assert verified.returncode == 0, verified.stderr


@pytest.mark.long
def test_the_command_with_a_tag_continues_when_the_tag_has_moved(hub, tmp_path, flags):  # noqa: F811
    flags = [*flags, "--model_revision", "v1"]
    done = run(hub, tmp_path, *flags)
    assert done.returncode == 2
    assert "--model_path org/tiny --model_revision v1: " in done.stderr
    shutil.copytree(tmp_path / "hub/models/org/tiny", tmp_path / "hub/models/org/tiny@v1")
    commit_upstream(tmp_path)  # main is not what was asked for
    done = run(hub, tmp_path, *flags, "--max_samples", "5")
    assert done.returncode == 0, done.stderr
    first = recorded(tmp_path / "out")
    shutil.rmtree(tmp_path / "hub/models/org/tiny@v1")
    (tmp_path / "hub/models/org/tiny").rename(tmp_path / "hub/models/org/tiny@v1")
    shutil.copytree(tmp_path / "hub/models/org/tiny@v1", tmp_path / "hub/models/org/tiny")
    done = run(hub, tmp_path, *flags, "--max_samples", "9")
    assert done.returncode == 0, done.stderr
    assert recorded(tmp_path / "out") == first


@pytest.mark.long
def test_hosts_use_one_commit_though_they_have_seen_different_ones(hub, tmp_path, flags):  # noqa: F811
    one = [*flags, "--max_samples", "4"]
    assert run(hub, tmp_path, *one).returncode == 0
    first = recorded(tmp_path / "out")
    commit_upstream(tmp_path)
    # Host 0 knows no more than its cache does.
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    pod = Pod(
        *(tmp_path, 2, 1, *one, "--output_dir", tmp_path / "pod"),
        of_each=[offline, {"HF_HOME": str(tmp_path / "empty")}],
        HF_ENDPOINT=hub.endpoint,
    )
    assert pod.wait() == [0, 0], [pod.text(i) for i in range(2)]
    for host in range(2):
        assert recorded(tmp_path / f"pod/machine_000_host_{host:02d}") == first


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--model_path", "{folder}"], "--model_revision v1: --model_path {folder} is a folder"),
        (["--demo"], "--demo and --model_revision cannot be used together"),
        (["--verify"], "--model_revision: needs --model_path here"),
    ],
)
def test_a_revision_of_what_has_none_is_refused(demo_inputs, tmp_path, flags, message, capsys):
    folder = demo_inputs / "model"
    flags = [flag.format(folder=folder) for flag in flags] + ["--model_revision", "v1"]
    assert main(*flags, "--output_dir", tmp_path / "out") == 2
    assert capsys.readouterr().err.startswith(f"error: {message.format(folder=folder)}")
    assert not (tmp_path / "out").exists()
