"""Runs that store losses, entropies and the most likely next tokens, each in its own dtype.

test_model.py compares them with transformers.
"""

import numpy as np
import pytest
from command_line import main
from pods import flags_for
from storages import open_storage
from test_model import PREDICTIONS

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import StorageError
from activation_extraction.store.identity import Identity

RUN = ["--hook_names", *PREDICTIONS[:4], "blocks.1.hook_resid_post", "--top_logits", 4]


def test_a_run_stores_them_in_their_own_dtypes(demo_inputs, tmp_path, capsys):
    flags = "--activation_dtype", "bfloat16", "--shard_format", "safetensors", "--batch_size", 4
    flags = *flags, "--shard_size_gb", 2e-4
    assert main(*flags_for(demo_inputs, tmp_path, *flags, hooks=RUN)) == 0
    dataset = ActivationDataset(tmp_path)
    assert {name: str(dtype) for name, dtype in dataset.dtypes.items()} == {
        "blocks.1.hook_resid_post": "bfloat16",
        "logits.top_ids": "int32",
        "logits.top_logprobs": "float32",
        "loss": "float32",
        "entropy": "float32",
    }
    assert dataset.hooks["logits.top_ids"] == 4 and dataset.hooks["loss"] == 1
    (batch,) = dataset.batches(10**6, dtype="float16")
    assert batch["blocks.1.hook_resid_post"].dtype == np.float16
    assert batch["loss"].dtype == np.float32 and batch["logits.top_ids"].dtype == np.int32
    first, logprobs = batch.position == 0, batch["logits.top_logprobs"]
    assert np.isnan(batch["loss"][first]).all() and (batch["loss"][~first] > 0).all()
    assert np.isfinite(batch["entropy"]).all()
    assert (np.diff(logprobs) <= 0).all() and (logprobs < 0).all()
    statistics = dataset.statistics
    assert statistics["loss"].tokens == (~first).sum()
    assert statistics["entropy"].tokens == len(first) == dataset.tokens
    assert 5 < statistics["loss"].overall_mean < 12  # ln(2048) is 7.6
    assert statistics["logits.top_ids"].tokens == 0
    with pytest.raises(ValueError, match="has no activations"):
        dataset.batches(8, max_norm={"loss": 3.0})
    assert sum(map(len, dataset.batches(256, max_norm=1e9))) == dataset.tokens
    where = "--output_dir", tmp_path
    assert main("--verify", *where, "--model_path", demo_inputs / "model") == 0
    assert main("--status", *where) == main("--report", *where) == 0
    capsys.readouterr()
    assert main(*flags_for(demo_inputs, tmp_path, *flags, hooks=[*RUN[:-1], 5])) == 2
    assert "differs in top_logits: 4, now 5" in capsys.readouterr().err


@pytest.mark.parametrize("name,refused", [("loss", False), ("entropy", True)])
def test_only_a_loss_is_undefined_for_first_tokens(name, refused, tmp_path):
    """Any other NaN stops the run, whatever its position."""
    identity = Identity(float32_hooks=(name,), keyed_by="hook name")
    values = np.array([[np.nan], [1.0]], np.float32)
    ids = np.arange(2, dtype=np.int32)
    storage = open_storage(tmp_path / name, {name: name}, identity=identity)
    storage.add_activation(name, values, 0, "", ids)
    if refused:
        with pytest.raises(StorageError, match="sample 0, hook entropy: NaN or infinite"):
            storage.finalize()
    else:
        storage.finalize()
        assert ActivationDataset(tmp_path / name).statistics[name].overall_mean == 1
    with pytest.raises(StorageError, match="sample 0, hook loss: NaN"):
        with open_storage(tmp_path / "later", {"loss": "loss"}, identity=identity) as later:
            later.add_activation("loss", values[::-1], 0, "", ids)
