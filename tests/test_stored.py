"""What a run stores: the same on several machines, as the flags say, and only good values."""

import json

import numpy as np
import pytest
from command_line import main, records_of
from pods import rounding_of_run


@pytest.mark.long
def test_demo_inputs_are_the_same_bytes_every_time(demo_inputs, tmp_path):
    assert main("--demo", "--max_samples", 1, "--output_dir", tmp_path) == 0
    again = tmp_path / "demo_inputs"
    names = sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    assert len(names) == 5
    for name in names:
        assert (again / name).read_bytes() == (demo_inputs / name).read_bytes(), name


@pytest.mark.long
def test_machines_together_store_what_one_machine_stores(inputs, tmp_path):
    shared = [*inputs, "--layers_to_extract", 2, "--activation_type", "mlp"]
    assert main(*shared, "--output_dir", tmp_path / "one") == 0
    for machine in range(3):
        where = ["--machine_id", machine, "--total_machines", 3]
        assert main(*shared, *where, "--output_dir", tmp_path / "three") == 0
    one = {record["doc_id"]: record for record in records_of(tmp_path / "one")[2]}
    folders = [tmp_path / "three" / f"machine_{m:03d}" for m in range(3)]
    parts = [record for folder in folders for record in records_of(folder)[2]]
    allowed = rounding_of_run(tmp_path / "one", inputs[1])
    assert len({record["sample_idx"] for record in parts}) == len(parts) == len(one) == 300
    for record in parts:
        expected = one[record["doc_id"]]
        np.testing.assert_array_equal(record["token_ids"], expected["token_ids"])
        assert np.abs(record["activation"] - expected["activation"]).max() <= allowed[2]


@pytest.mark.long
def test_options_change_what_they_say(inputs, tmp_path):
    options = ["--hook_names", "blocks.[13].hook_attn_out", "blocks.0.hook_mlp_out"]
    options += ["--activation_dtype", "bfloat16", "--dtype", "bfloat16", "--no_data_parallel"]
    options += ["--max_samples", 20, "--batch_size", 3, "--shard_size_gb", 1e-4, "--verbose"]
    assert main(*inputs, *options, "--output_dir", tmp_path) == 0
    found = records_of(tmp_path)
    assert list(found) == [
        "blocks.0.hook_mlp_out",
        "blocks.1.hook_attn_out",
        "blocks.3.hook_attn_out",
    ]
    assert [record["sample_idx"] for record in found["blocks.1.hook_attn_out"]] == [*range(20)]
    assert found["blocks.1.hook_attn_out"][0]["activation"].dtype.name == "bfloat16"
    assert len(list(tmp_path.glob("*.pkl.gz"))) > 1
    assert json.loads((tmp_path / "metadata.json").read_text())["mesh"] == {"data": 1}
