"""Runs that encode activations: `--activation_dtype float8`."""

import json

import ml_dtypes
import numpy as np
import pytest
from command_line import main
from pods import first_documents

from activation_extraction import ActivationDataset

HOOKS = ["blocks.0.hook_attn_out", "blocks.1.mlp.hook_post", "blocks.3.hook_resid_post"]
ONE, PIPELINE = ["--no_data_parallel"], ["--mesh_shape", "2,4", "--mesh_axes", "pipeline,data"]
KEPT = ["--positions", "every:3"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--shard_format", "safetensors", *ONE],
        [*ONE, *KEPT],
        pytest.param(["--mesh_type", "2d", *KEPT], marks=pytest.mark.long),
        pytest.param(["--shard_format", "safetensors", *PIPELINE], marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_what_is_stored_is_what_numpy_makes_of_a_plain_run(demo_inputs, tmp_path, capsys, flags):
    text = first_documents(demo_inputs, tmp_path / "few.parquet", 24)
    usual = ["--model_path", demo_inputs / "model", "--dataset_path", text, "--hook_names", *HOOKS]
    usual += ["--max_seq_length", 64, "--batch_size", 4, "--shard_size_gb", 2e-4, *flags]
    runs = {}
    for dtype in ("float8", "float32"):
        out = tmp_path / dtype
        assert main(*usual, "--activation_dtype", dtype, "--output_dir", out) == 0
        runs[dtype] = ActivationDataset(out)
    dataset, plain = runs["float8"], runs["float32"]
    assert dataset.tokens == plain.tokens and len(dataset) == 24
    errors, first = {hook: [] for hook in HOOKS}, []
    others = values = 0
    for ours, theirs in zip(dataset, plain, strict=True):
        np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
        np.testing.assert_array_equal(ours.position, theirs.position)
        first.append(ours.position == 0)
        for hook in HOOKS:
            x = theirs[hook]
            scales = np.abs(x).max(axis=1, keepdims=True) * np.float32(1 / 448)
            expected = (x / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
            others += int((expected != ours[hook]).sum())
            values += x.size
            apart = ours[hook].astype(np.float64) - x
            errors[hook].append(np.linalg.norm(apart, axis=1) / np.linalg.norm(x, axis=1))
    assert others <= values * 1e-4, (others, values)  # another program may round otherwise
    sinks, out = np.concatenate(first), tmp_path / "float8"
    for path in out.glob("shard_*.json"):
        commit = json.loads(path.read_text())
        assert [hook["dtype"] for hook in commit.get("hooks", [])] in ([], ["float8_e4m3fn"] * 3)
    recorded = json.loads((out / "metadata.json").read_text())["hooks"]
    assert main("--verify", "--output_dir", out) == 0
    capsys.readouterr()
    assert main("--status", "--output_dir", out) == 0
    shown = capsys.readouterr().out
    assert main("--status", "--json", "--output_dir", out) == 0
    status = json.loads(capsys.readouterr().out)["hooks"]
    for hook, in_metadata, in_status in zip(HOOKS, recorded, status, strict=True):
        assert in_metadata["name"] == in_status["name"] == hook
        assert in_status["error"] == in_metadata["error"]
        (line,) = [line for line in shown.splitlines() if line.startswith(hook)]
        of_tokens = np.concatenate(errors[hook])
        for kind, chosen in (("sinks", sinks), ("others", ~sinks)):
            found = in_metadata["error"][kind]
            assert found["tokens"] == chosen.sum()
            assert found["mean"] == pytest.approx(of_tokens[chosen].mean(), rel=1e-3)
            assert found["worst"] == pytest.approx(of_tokens[chosen].max(), rel=2e-2)
            assert f"{found['mean']:.2%}" in line and f"{found['worst']:.2%}" in line
    assert main("--status", "--output_dir", tmp_path / "float32") == 0
    assert "relative error" not in capsys.readouterr().out
