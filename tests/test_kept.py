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
from activation_extraction.model import host_rows as host_rows_module
from activation_extraction.model.hooks import WidthAndDtype
from activation_extraction.model.host_rows import host_rows
from activation_extraction.model.kept import take_kept
from activation_extraction.model.mesh import build_layout
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
    [(RANDOM, []), pytest.param(FEW, PIPELINE, marks=pytest.mark.long)],
)
def test_kept_tokens_have_the_values_of_the_whole(kept, mesh, stored, demo_inputs):
    out, whole = stored(*kept, *mesh), stored("--no_data_parallel")
    options = parse_args([*kept, *mesh]).text_options
    allowed = rounding_of_run(whole, demo_inputs / "model")
    choice, length = TokenChoice(options.positions, options.drop_token_ids), options.max_seq_length
    found, dataset, every = records_of(out), ActivationDataset(out), []
    expected = {sample.sample_idx: sample for sample in ActivationDataset(whole)}
    assert len(dataset) == len(expected) == 60 and list(found) == HOOKS
    for sample in dataset:
        alone = expected[sample.sample_idx]
        token_ids = alone.token_ids[:length]
        positions = choice.kept(sample.sample_idx, token_ids)
        np.testing.assert_array_equal(sample.position, positions)
        np.testing.assert_array_equal(sample.token_ids, token_ids[positions])
        for hook in HOOKS:
            values, kept_values = sample[hook], alone[hook][positions]
            assert values.shape == kept_values.shape
            assert np.abs(values - kept_values).max(initial=0) <= allowed[hook]
        every.append(sample.position)
    assert kept is not FEW or list(map(len, every)).count(0) > 20
    assert main("--verify", "--output_dir", out) == 0
    samples = {sample.sample_idx: sample for sample in dataset}
    for record in found[HOOKS[0]]:  # what a reader finds without this program
        sample = samples[record["sample_idx"]]
        assert record["positions"].dtype == record["token_ids"].dtype == np.int32
        np.testing.assert_array_equal(record["positions"], sample.position)
        np.testing.assert_array_equal(record["activation"], sample[HOOKS[0]])
        assert record["shape"] == record["activation"].shape
    every = np.concatenate(every)
    assert sum(map(len, dataset.batches(50, skip_first=70))) == (every >= 70).sum()


def test_only_kept_tokens_leave_the_devices(monkeypatch):
    """Counted in bytes: about as many as are kept; and none of other rows. They go through pinned
    memory, as on GPUs; other tests are without it."""
    monkeypatch.setattr(host_rows_module, "PINNED_ON", ("cpu",))
    width_and_dtype = WidthAndDtype(5, "float32")
    values = np.random.default_rng(0).standard_normal((3, 8, 60, 5), np.float32)
    # 60 tokens do not divide among eight devices; rows may be theirs instead.
    for axis in ("model", "data"):
        layout = build_layout(jax.devices(), {axis: 8}, 8)
        rows = host_rows(layout)
        array = jax.device_put(values, rows.outgoing(60, layout))
        np.testing.assert_array_equal(
            rows.receive({width_and_dtype: array})[width_and_dtype], values
        )
        for share in (0.0, 0.3, 1.0):
            kept = np.random.default_rng(1).random((8, 60)) < share
            sent = take_kept({width_and_dtype: array}, kept)
            copied = sum(
                block.activations_by_width_and_dtype[width_and_dtype].nbytes
                for block in sent.blocks
            )
            assert copied <= min(2 * share + 0.1, 1.1) * values.nbytes, (axis, share)
            np.testing.assert_array_equal(sent.receive()[width_and_dtype], values[:, kept])


def shift(record):
    record["positions"] = record["positions"] + np.int32(1)


@pytest.mark.long
def test_verify_reads_the_text_again_to_recompute_kept_tokens(
    stored, demo_inputs, tmp_path, capsys
):
    """Then records are changed, and everything else agrees to them."""
    out = shutil.copytree(stored(*RANDOM), tmp_path / "out")
    flags = "--verify", "--output_dir", out
    model = "--model_path", demo_inputs / "model", "--verify_samples", 60
    assert main(*flags, *model) == 0
    assert "60 samples recomputed; 0 problems" in capsys.readouterr().out
    last = len(list(out.glob("shard_*.json")))
    change_shard(out, last, lambda shard: [shift(r) for each in shard.values() for r in each])
    assert main(*flags) == 0
    assert main(*flags, *model) == 1
    told = "the data set now gives other tokens than those that are stored"
    assert told in capsys.readouterr().out
