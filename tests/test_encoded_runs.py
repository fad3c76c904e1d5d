"""Runs that encode activations: `--activation_dtype float8`."""

import json

import numpy as np
import pytest
from command_line import main
from pods import first_documents

from activation_extraction import ActivationDataset
from activation_extraction.common.encodings import decode, encode

HOOKS = ["blocks.0.hook_attn_out", "blocks.1.mlp.hook_post", "blocks.3.hook_resid_post"]
STREAM = HOOKS[2]
MESHES = {
    "one": ["--no_data_parallel"],
    "2d": ["--mesh_type", "2d"],
    "pipeline": ["--mesh_shape", "2,4", "--mesh_axes", "pipeline,data"],
}
KEPT = ["--positions", "every:3"]
RUNS = [  # each with the format of the shards, and further flags
    pytest.param("safetensors", MESHES["one"], id="one"),
    pytest.param("pickle", [*MESHES["one"], *KEPT], id="kept"),
    pytest.param("pickle", [*MESHES["2d"], *KEPT], id="2d-kept", marks=pytest.mark.long),
    pytest.param("safetensors", MESHES["pipeline"], id="pipeline", marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def extract(demo_inputs, tmp_path_factory):
    """A function that runs an extraction into a folder and returns the exit status."""
    few = first_documents(demo_inputs, tmp_path_factory.mktemp("few") / "few.parquet", 24)

    def run(out, *flags):
        usual = ["--model_path", demo_inputs / "model", "--dataset_path", few]
        usual += ["--max_seq_length", 64, "--batch_size", 4, "--shard_size_gb", 2e-4]
        return main(*usual, "--output_dir", out, "--hook_names", *HOOKS, *flags)

    return run


@pytest.fixture(scope="module")
def stored(extract, tmp_path_factory):
    """A function that returns a run with these flags, which tests must not change."""
    made = {}

    def get(dtype, *flags):
        key = dtype, *flags
        if key not in made:
            made[key] = tmp_path_factory.mktemp("run") / "out"
            assert extract(made[key], "--activation_dtype", dtype, *flags) == 0
        return made[key]

    return get


def relative_errors(dataset, plain, hook):
    """The errors of all tokens, from what two runs say, and whether each is a document's first."""
    found, first = [], []
    for ours, theirs in zip(dataset, plain, strict=True):
        x = theirs[hook].astype(np.float64)
        apart = np.linalg.norm(ours[hook].astype(np.float64) - x, axis=1)
        found.append(apart / np.linalg.norm(x, axis=1))
        first.append(ours.position == 0)
    return np.concatenate(found), np.concatenate(first)


@pytest.mark.parametrize("shard_format,flags", RUNS)
def test_what_is_stored_is_what_numpy_makes_of_a_plain_run(stored, capsys, shard_format, flags):
    flags = ["--shard_format", shard_format, *flags]
    out = stored("float8", *flags)
    dataset = ActivationDataset(out)
    plain = ActivationDataset(stored("float32", *flags))
    assert dataset.tokens == plain.tokens and len(dataset) == 24
    others = values = 0
    for ours, theirs in zip(dataset, plain, strict=True):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_array_equal(ours.position, theirs.position)
        for hook in HOOKS:
            others += int((decode(*encode(theirs[hook])) != ours[hook]).sum())
            values += ours[hook].size
    assert others <= values * 1e-4, (others, values)  # another program may round otherwise
    commits = [json.loads(path.read_text()) for path in out.glob("shard_*.json")]
    names = {hook["name"]: hook for commit in commits for hook in commit["hooks"]}
    assert [hook["dtype"] for hook in names.values()] == ["float8_e4m3fn"] * 3
    recorded = json.loads((out / "metadata.json").read_text())["hooks"]
    capsys.readouterr()
    assert main("--status", "--json", "--output_dir", out) == 0
    status = json.loads(capsys.readouterr().out)["hooks"]
    for hook, in_metadata, in_status in zip(HOOKS, recorded, status, strict=True):
        errors, first = relative_errors(dataset, plain, hook)
        assert in_metadata["name"] == in_status["name"] == hook
        assert in_status["error"] == in_metadata["error"]
        for kind, chosen in (("sinks", first), ("others", ~first)):
            found = in_metadata["error"][kind]
            assert found["tokens"] == chosen.sum()
            assert found["mean"] == pytest.approx(errors[chosen].mean(), rel=1e-3)
            assert found["worst"] == pytest.approx(errors[chosen].max(), rel=2e-2)
    assert main("--verify", "--output_dir", out) == 0


def test_errors_are_shown(stored, capsys):
    """And nothing of them for a plain run."""
    flags = "--shard_format", "safetensors", *MESHES["one"]
    assert main("--status", "--output_dir", stored("float32", *flags)) == 0
    assert STREAM not in capsys.readouterr().out
    out = stored("float8", *flags)
    error = ActivationDataset(out).statistics[STREAM].error
    capsys.readouterr()
    assert main("--status", "--output_dir", out) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(STREAM)]
    for value in (error.others.mean, error.others.worst, error.sinks.mean, error.sinks.worst):
        assert f"{value:.2%}" in line


def test_list_hooks_and_the_log_say_how_many_bytes_are_stored(demo_inputs, capsys):
    model = ["--model_path", demo_inputs / "model", "--list_hooks"]
    assert main(*model, "--activation_dtype", "float8") == 0
    lines = capsys.readouterr().out.splitlines()
    row = next(line.split() for line in lines if "hook_resid_post" in line)
    assert row[2:5] == ["128", "float8", "132"]
