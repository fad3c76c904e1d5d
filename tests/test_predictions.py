"""Losses, entropies and the most likely next tokens, of meshes and in runs.

test_families.py and test_model.py compare them with transformers.
"""

import numpy as np
import pytest
from command_line import main
from conftest import make_reference
from pods import flags_for
from storages import open_storage
from test_mesh import SHAPES, run_on
from test_model import PREDICTIONS, by_hook, load, packed, predictions, run

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import InputError, StorageError
from activation_extraction.model.hooks import HOOKS
from activation_extraction.store.identity import Identity
from qwen2_jax_with_hooks import create_model_with_hooks


def predicted(model, params, *batch):
    return {hook.name: value for hook, value in run(model, params, *batch).items()}


@pytest.fixture(scope="module", params=["tied", "untied"])
def small(request, tmp_path_factory):
    """A model whose vocabulary devices can share, a packed batch, and its predictions alone."""
    folder = tmp_path_factory.mktemp("small")
    reference = make_reference(
        folder,
        num_key_value_heads=2,
        vocab_size=256,
        intermediate_size=128,
        tie_word_embeddings=request.param == "tied",
    )
    batch = packed(256, ends=(40, 64))
    hooks = predictions(reference.config, [*PREDICTIONS, "blocks.1.hook_resid_post"])
    model = create_model_with_hooks(reference.config, hooks)
    return reference, batch, predicted(model, load(model, reference.folder), *batch)


@pytest.mark.parametrize("name", SHAPES)
def test_every_mesh_gives_those_of_one_device(small, name):
    reference, batch, expected = small
    hooks = predictions(reference.config, [*PREDICTIONS, "blocks.1.hook_resid_post"])
    found, model = run_on(reference, batch, hooks, SHAPES[name], hosts=2)
    for hook, got in by_hook(model, found).items():
        np.testing.assert_allclose(got, expected[hook.name], atol=1e-5, rtol=0)


def test_the_head_is_loaded_only_for_them(small):
    reference, _, _ = small
    size = reference.config.sizes
    layers, model = (
        create_model_with_hooks(reference.config, predictions(reference.config, [name]))
        for name in ("ln_final.*", "loss")
    )
    assert model.flops([3, 4]) - layers.flops([3, 4]) == 2 * size["D"] * size["V"] * 7


def test_all_logits_are_stored_only_if_they_are_asked_for_by_name():
    for pattern in ("lm_head.*", "*.logits", "logi?s", "unembed.hook_*"):
        with pytest.raises(InputError, match=r"logits, which takes 0 bytes|matches no hook"):
            HOOKS.matching([pattern], 4)
    for name in ("logits", "lm_head.output", "unembed.hook_out"):
        assert [hook.name for hook in HOOKS.matching([name], 4).values()] == ["logits"]
    every = [hook.name for hook in HOOKS.matching(["*"], 4).values()]
    assert "loss" in every and "logits.top_ids" in every and "logits" not in every


@pytest.mark.parametrize(
    "flags,words",
    [
        (["--top_logits", 3], "--top_logits: needs --hook_names"),
        (["--hook_names", "logits.top_ids", "--top_logits", 2049], "the model has 2048 tokens"),
        (["--hook_names", "logits.top_ids", "--top_logits", 0], "--top_logits"),
        (["--hook_names", "lm_head.*"], "matches only logits, which takes 4,096 bytes per token"),
    ],
)
def test_what_makes_no_sense_is_refused(flags, words, demo_inputs, tmp_path, capsys):
    assert main(*flags_for(demo_inputs, tmp_path, hooks=flags)) == 2
    assert words in capsys.readouterr().err


RUN = ["--hook_names", *PREDICTIONS[:4], "blocks.1.hook_resid_post", "--top_logits", 4]


@pytest.fixture(scope="module")
def whole(demo_inputs, tmp_path_factory):
    """A run in bfloat16 that stores predictions, and its flags."""
    folder = tmp_path_factory.mktemp("predictions") / "whole"
    flags = [
        *("--activation_dtype", "bfloat16", "--shard_format", "safetensors"),
        *("--shard_size_gb", 2e-4, "--batch_size", 4),
    ]
    assert main(*flags_for(demo_inputs, folder, *flags, hooks=RUN)) == 0
    return folder, flags


def test_a_run_stores_them_in_their_own_dtypes(whole):
    dataset = ActivationDataset(whole[0])
    assert {name: str(dtype) for name, dtype in dataset.dtypes.items()} == {
        "blocks.1.hook_resid_post": "bfloat16",
        "logits.top_ids": "int32",
        "logits.top_logprobs": "float32",
        "loss": "float32",
        "entropy": "float32",
    }
    assert dataset.hooks["logits.top_ids"] == 4 and dataset.hooks["loss"] == 1
    firsts = others = 0
    for batch in dataset.batches(256, dtype="float16"):
        assert batch["blocks.1.hook_resid_post"].dtype == np.float16
        assert batch["loss"].dtype == np.float32 and batch["logits.top_ids"].dtype == np.int32
        first = batch.position == 0
        assert np.isnan(batch["loss"][first]).all() and (batch["loss"][~first] > 0).all()
        assert np.isfinite(batch["entropy"]).all()
        logprobs = batch["logits.top_logprobs"]
        assert (np.diff(logprobs) <= 0).all() and (logprobs < 0).all()
        firsts, others = firsts + first.sum(), others + (~first).sum()
    loss, entropy = dataset.statistics["loss"], dataset.statistics["entropy"]
    assert (loss.tokens, entropy.tokens) == (others, firsts + others)
    assert 5 < loss.overall_mean < 12  # ln(2048) is 7.6
    assert dataset.statistics["logits.top_ids"].tokens == 0
    with pytest.raises(ValueError, match="has no activations"):
        dataset.batches(8, max_norm={"loss": 3.0})
    assert sum(map(len, dataset.batches(256, max_norm=1e9))) == dataset.tokens


def test_such_a_run_is_verified_and_shown(whole, demo_inputs, capsys):
    folder, flags = whole
    model = "--model_path", demo_inputs / "model"
    assert main("--verify", "--output_dir", folder, *model) == 0
    assert main("--status", "--output_dir", folder) == 0
    assert main("--report", "--output_dir", folder) == 0
    capsys.readouterr()
    other = flags_for(demo_inputs, folder, *flags, hooks=[*RUN[:-1], 5])
    assert main(*other) == 2
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
