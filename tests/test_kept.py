"""Runs that keep some tokens: what leaves the devices, is stored, verified and read."""

import shutil

import jax
import numpy as np
import pytest
from command_line import main, records_of
from extractions import change_shard
from pods import rounding_of_run

from activation_extraction import ActivationDataset
from activation_extraction.cli.config import parse_args
from activation_extraction.model import kept as kept_module
from activation_extraction.model import mesh as mesh_module
from activation_extraction.model.hooks import Form
from activation_extraction.model.kept import take_kept
from activation_extraction.model.mesh import build_layout, host_rows
from activation_extraction.text.token_choice import TokenChoice

HOOKS = ["blocks.0.attn.hook_k", "blocks.1.hook_resid_post", "blocks.2.mlp.hook_post"]
RANDOM = ["--positions", "random:0.1:3"]
FEW = ["--positions", "last", "--drop_token_ids", *map(str, range(300))]  # often none of a sample
PIPELINE = ["--mesh_shape", "2,2,2", "--mesh_axes", "pipeline,data,model"]


@pytest.fixture(scope="module")
def stored(demo_inputs, tmp_path_factory):
    """A function that returns a run with these flags, which tests must not change."""
    usual = ["--model_path", demo_inputs / "model", "--hook_names", *HOOKS, "--max_samples", 60]
    usual += ["--dataset_path", demo_inputs / "documents.parquet", "--shard_size_gb", 0.0004]
    made = {}

    def get(*more):
        if more not in made:
            made[more] = tmp_path_factory.mktemp("run")
            flags = [*usual, "--max_seq_length", 96, *more, "--output_dir", made[more]]
            assert main(*flags) == 0
        return made[more]

    return get


@pytest.mark.parametrize(
    "kept,mesh",
    [
        (RANDOM, []),
        pytest.param(FEW, PIPELINE, marks=pytest.mark.long),
        # Rows that do not divide among the devices.
        pytest.param(RANDOM, ["--max_seq_length", "84"], marks=pytest.mark.long),
    ],
)
def test_kept_tokens_have_the_values_of_the_whole(kept, mesh, stored, demo_inputs, capsys):
    out, whole = stored(*kept, *mesh), stored("--no_data_parallel")
    config, allowed = parse_args([*kept, *mesh]), rounding_of_run(whole, demo_inputs / "model")
    choice, length = TokenChoice(config.positions, config.drop_token_ids), config.max_seq_length
    found, expected, dataset = records_of(out), records_of(whole), ActivationDataset(out)
    assert list(found) == list(expected) == HOOKS and len(dataset) == 60
    lengths = []
    for hook in HOOKS:
        records = {record["sample_idx"]: record for record in found[hook]}
        assert len(records) == len(expected[hook]) == 60
        for alone, sample in zip(expected[hook], dataset, strict=True):
            np.testing.assert_array_equal(alone["positions"], np.arange(len(alone["token_ids"])))
            record, token_ids = records[alone["sample_idx"]], alone["token_ids"][:length]
            positions = choice.kept(alone["sample_idx"], token_ids)
            assert record["positions"].dtype == record["token_ids"].dtype == np.int32
            np.testing.assert_array_equal(record["positions"], positions)
            np.testing.assert_array_equal(record["token_ids"], token_ids[positions])
            values, kept_values = record["activation"], alone["activation"][positions]
            assert record["shape"] == values.shape == kept_values.shape
            assert np.abs(values - kept_values).max(initial=0) <= allowed[hook]
            assert sample.sample_idx == alone["sample_idx"]
            np.testing.assert_array_equal(sample[hook], values)
            np.testing.assert_array_equal(sample.position, positions)
            lengths.append(len(positions))
    assert lengths.count(0) > 60 or kept is not FEW
    assert main("--verify", "--output_dir", out) == 0
    assert "60 samples" in capsys.readouterr().out
    every = np.concatenate([record["positions"] for record in found[HOOKS[0]]])
    shuffled = np.concatenate([batch.position for batch in dataset.batches(50, shuffle=1)])
    assert sorted(shuffled.tolist()) == sorted(every.tolist())
    assert sum(map(len, dataset.batches(50, skip_first=70))) == (every >= 70).sum()


@pytest.mark.parametrize("pinned_on", ["cpu", "gpu"])
def test_only_kept_tokens_leave_the_devices(pinned_on, monkeypatch):
    """Counted in bytes: about as many as are kept, whatever the devices; and none of other rows.
    Those of GPUs go through pinned memory."""
    monkeypatch.setattr(kept_module, "PIECES", 32)
    monkeypatch.setattr(mesh_module, "PINNED_ON", (pinned_on,))
    rows, form = host_rows(jax.devices()), Form(5, "float32")
    values = np.random.default_rng(0).standard_normal((3, 8, 64, 5), np.float32)
    split, whole = (build_layout(jax.devices(), {axis: 8}, 8) for axis in ("data", "model"))
    # 60 tokens do not divide among eight devices; rows may be theirs instead.
    for length, layout in ((64, whole), (60, whole), (60, split)):
        part = values[:, :, :length]
        array = jax.device_put(part, rows.outgoing(length, layout))
        np.testing.assert_array_equal(rows.receive({form: array})[form], part)
        for share in (0.0, 0.03, 0.3, 1.0):
            kept = np.random.default_rng(1).random((8, length)) < share
            sent = take_kept({form: array}, kept)
            copied = sum(piece.values[form].nbytes for piece in sent.pieces)
            assert copied <= min(2.5 * share + 0.1, 1.1) * part.nbytes, (length, share)
            np.testing.assert_array_equal(sent.receive()[form], part[:, kept])


def shift(record):
    record["positions"] = record["positions"] + np.int32(1)


@pytest.mark.long
@pytest.mark.parametrize(
    "change,problem",
    [
        (None, "60 samples recomputed; 0 problems"),
        (shift, "the data set now gives other tokens than those that are stored"),
    ],
)
def test_verify_reads_the_text_again_to_recompute_kept_tokens(
    change, problem, stored, demo_inputs, tmp_path, capsys
):
    """A record was changed, and everything else agrees to it."""
    out = shutil.copytree(stored(*RANDOM), tmp_path / "out")
    if change:
        last = len(list(out.glob("shard_*.json")))
        change_shard(out, last, lambda shard: [change(r) for each in shard.values() for r in each])
    flags = "--verify", "--output_dir", out
    assert main(*flags) == 0
    model = "--model_path", demo_inputs / "model", "--verify_samples", 60
    assert main(*flags, *model) == (1 if change else 0)
    assert problem in capsys.readouterr().out
