"""A hook is found by each of its names: in the reader, in its batches and in --export."""

import pickle

import numpy as np
import pytest
from command_line import main
from pods import flags_for

from activation_extraction import ActivationDataset

TYPED = ("blocks.[13].mlp.hook_in", "blocks.3.hook_resid_post")
STORED = ("blocks.1.ln2.hook_out", "blocks.3.ln2.hook_out", "blocks.3.hook_resid_post")
ALIAS, MODULE = "blocks.3.mlp.hook_in", "model.layers.3.mlp.input"


@pytest.fixture(scope="module", params=["pickle", "safetensors"])
def run(demo_inputs, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("run")
    flags = "--max_samples", 3, "--shard_format", request.param
    assert main(*flags_for(demo_inputs, folder, *flags, hooks=("--hook_names", *TYPED))) == 0
    return folder


@pytest.mark.parametrize("name", [STORED[1], ALIAS, MODULE, "blocks.3.mlp.*", "*.3.mlp.input"])
def test_a_hook_is_read_by_any_of_its_names_and_by_globs(run, name):
    whole = ActivationDataset(run)
    assert list(whole.hooks) == [*STORED]
    dataset = ActivationDataset(run, hooks=[name])
    assert list(dataset.hooks) == [STORED[1]] and dataset.hooks[ALIAS] == whole.hooks[STORED[1]]
    expected = whole[1].activations[STORED[1]]
    for sample in (dataset[1], pickle.loads(pickle.dumps(dataset[1]))):
        np.testing.assert_array_equal(sample[ALIAS], expected)
        np.testing.assert_array_equal(sample[MODULE], expected)
    assert dataset.statistics[MODULE] == whole.statistics[STORED[1]]
    limits = {ALIAS: 1e9}
    (batch,) = whole.batches(10**4, hooks=[name], max_norm=limits, dtype="float32")
    assert list(batch.activations) == [STORED[1]]
    for each in (batch, batch.jax(), batch.torch()):
        np.testing.assert_array_equal(np.asarray(each[ALIAS]), batch[STORED[1]])


def test_unknown_names_are_refused_wherever_a_hook_is_asked_for(run):
    with pytest.raises(ValueError, match="has no hook 'blocks.2.mlp.hook_in'; it has blocks.1"):
        ActivationDataset(run, hooks=["blocks.2.mlp.hook_in"])
    dataset = ActivationDataset(run, hooks=[STORED[2]])
    with pytest.raises(ValueError, match=f"has no hook '{ALIAS}'"):  # which is not read
        dataset.batches(8, hooks=[ALIAS])
    with pytest.raises(KeyError, match=ALIAS):
        dataset[0][ALIAS]


def test_export_takes_what_was_typed(run, tmp_path, capsys):
    target = tmp_path / "copy"
    where = "--output_dir", run, "--export_dir", target
    assert main("--export", "memmap", *where, "--hook_names", TYPED[0]) == 0
    assert {path.name for path in target.iterdir() if path.is_dir()} == {*STORED[:2]}
    where = "--output_dir", run, "--export_dir", tmp_path / "other"
    assert main("--export", "memmap", *where, "--hook_names", "blocks.2.mlp.hook_in") == 2
    assert "--hook_names blocks.2.mlp.hook_in: no such hook" in capsys.readouterr().err
