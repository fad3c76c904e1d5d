"""Losses, entropies and the most likely next tokens, against transformers."""

import jax.numpy as jnp
import numpy as np
import pytest
from command_line import main, records_of
from conftest import Reference, make_reference, references
from delta_reference import untouched
from pods import Pod, flags_for, stored
from rounding import assert_rounded_alike
from storages import open_storage
from test_mesh import SHAPES, run_on
from test_model import by_hook, load, rows, run
from test_run import random_samples

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import InputError, StorageError
from activation_extraction.model.hooks import HOOKS, hook_table
from activation_extraction.store.identity import Identity
from activation_extraction.text.packing import pack
from benchmarks.agreement import same_experts
from qwen2_jax_with_hooks import create_model_with_hooks

ONE_PER_FAMILY = (
    *("one_kv_head", "two_kv_heads_tied", "qwen3_tied", "qwen2_moe", "qwen3_moe"),
    *("qwen3_5_tied_beside_vision", "qwen3_5_moe"),
)
NAMES = "loss", "entropy", "logits.top_ids", "logits.top_logprobs", "logits"


def hooks_of(config, names=NAMES):
    return list(hook_table(config).matching(names, config.num_hidden_layers).values())


def predicted(model, params, *batch):
    return {hook.name: value for hook, value in run(model, params, *batch).items()}


@references(*ONE_PER_FAMILY)
@pytest.mark.usefixtures("optimized_for_some")
def test_they_equal_those_of_transformers(reference: Reference):
    """In float32, for every document of a packed batch alone; blocks end within documents."""
    config = reference.config
    samples = random_samples((304, 90, 150, 1, 60), config.vocab_size)
    (batch,) = pack(samples, rows=2, length=304)
    model = create_model_with_hooks(config, hooks_of(config))
    arrays = batch.token_ids, batch.segment_ids, batch.positions
    got = predicted(model, load(model, reference.folder), *arrays)
    assert list(got) == ["logits", "logits.top_ids", "logits.top_logprobs", "loss", "entropy"]
    for at in batch.samples:
        alone = reference.hooked(at.sample.token_ids[None])
        for name, value in got.items():
            found, expected = value[at.row, at.start : at.stop], alone[name][0]
            assert found.shape == expected.shape
            if name == "logits.top_ids":
                assert (found == expected).all()
            else:
                np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)
        assert np.isnan(got["loss"][at.row, at.start])


@references(*ONE_PER_FAMILY)
@pytest.mark.usefixtures("optimized_for_some")
def test_bfloat16_is_as_close_to_float32_as_transformers_is(reference: Reference):
    config = reference.config
    batch = rows(config.vocab_size)
    exact = reference.hooked(batch[0])
    theirs = reference.in_bfloat16().hooked(batch[0])
    experts = ["blocks.*.mlp.hook_expert_indices"] if "E" in config.sizes else []
    model = create_model_with_hooks(config, hooks_of(config, [*NAMES, *experts]), jnp.bfloat16)
    ours = predicted(model, load(model, reference.folder, jnp.bfloat16), *batch)
    same = same_experts(ours, exact) & same_experts(theirs, exact)
    both = untouched(same, config.sizes.get("W", 1))
    both[:, 1:] &= both[:, :-1]  # a loss is of the prediction at the token before
    assert both.sum() > 100
    for name in ("loss", "entropy", "logits.top_logprobs"):
        assert ours[name].dtype == np.float32
        defined = both & ~np.isnan(exact[name]).any(axis=2)
        got, other, wanted = (x[name][defined] for x in (ours, theirs, exact))
        assert_rounded_alike(got, other, wanted, name)


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
    batch = rows(256, (8, 64))
    batch[1][:, 40:] = 2
    batch = batch[0], batch[1], np.where(batch[1] == 2, batch[2] - 40, batch[2]).astype(np.int32)
    hooks = hooks_of(reference.config, [*NAMES, "blocks.1.hook_resid_post"])
    model = create_model_with_hooks(reference.config, hooks)
    return reference, batch, predicted(model, load(model, reference.folder), *batch)


@pytest.mark.parametrize("name", SHAPES)
def test_every_mesh_gives_those_of_one_device(small, name):
    reference, batch, expected = small
    hooks = hooks_of(reference.config, [*NAMES, "blocks.1.hook_resid_post"])
    found, model = run_on(reference, batch, hooks, SHAPES[name], hosts=2)
    for hook, got in by_hook(model, found).items():
        np.testing.assert_allclose(got, expected[hook.name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("length", [1, 7, 512, 600])
def test_blocks_of_any_length_give_the_same(small, length, monkeypatch):
    reference, batch, expected = small
    monkeypatch.setattr("activation_extraction.model.predictions.TOKENS_AT_ONCE", length)
    model = create_model_with_hooks(reference.config, hooks_of(reference.config))
    found = predicted(model, load(model, reference.folder), *batch)
    for name, got in found.items():
        np.testing.assert_allclose(got, expected[name], atol=1e-5, rtol=0)


def test_the_head_is_loaded_only_for_them(small):
    reference, _, _ = small
    size = reference.config.sizes
    layers = create_model_with_hooks(reference.config, hooks_of(reference.config, ["ln_final.*"]))
    model = create_model_with_hooks(reference.config, hooks_of(reference.config, ["loss"]))
    assert model.flops([3, 4]) - layers.flops([3, 4]) == 2 * size["D"] * size["V"] * 7


def test_all_logits_are_stored_only_if_they_are_asked_for_by_name():
    for pattern in ("lm_head.*", "*.logits", "logi?s", "unembed.hook_*"):
        with pytest.raises(InputError, match=r"logits, which takes 0 bytes|matches no hook"):
            HOOKS.matching([pattern], 4)
    for name in ("logits", "lm_head.output", "unembed.hook_out"):
        assert [hook.name for hook in HOOKS.matching([name], 4).values()] == ["logits"]
    every = [hook.name for hook in HOOKS.matching(["*"], 4).values()]
    assert "loss" in every and "logits.top_ids" in every and "logits" not in every


def test_a_refusal_says_how_many_bytes_all_logits_take(demo_inputs, tmp_path, capsys):
    assert main(*flags_for(demo_inputs, tmp_path, hooks=["--hook_names", "lm_head.*"])) == 2
    assert (
        "matches only logits, which takes 4,096 bytes per token in bfl" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    "flags,words",
    [
        (["--top_logits", 3], "--top_logits: needs --hook_names"),
        (["--hook_names", "logits.top_ids", "--top_logits", 2049], "the model has 2048 tokens"),
        (["--hook_names", "logits.top_ids", "--top_logits", 0], "--top_logits"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(flags, words, demo_inputs, tmp_path, capsys):
    assert main(*flags_for(demo_inputs, tmp_path, hooks=flags)) == 2
    assert words in capsys.readouterr().err


RUN = ["--hook_names", *NAMES[:4], "blocks.1.hook_resid_post", "--top_logits", 4]


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


def test_such_a_run_is_verified_continued_and_shown(whole, demo_inputs, tmp_path, capsys):
    folder, flags = whole
    model = "--model_path", demo_inputs / "model"
    assert main("--verify", "--output_dir", folder, *model) == 0
    assert main("--status", "--output_dir", folder) == 0
    assert main("--report", "--output_dir", folder) == 0
    command = flags_for(demo_inputs, tmp_path / "some", *flags, hooks=RUN)
    assert main(*command, "--max_samples", 150) == 0  # a shard is cut within a batch
    assert main(*command) == 0
    for shard in folder.glob("shard_*.safetensors"):
        assert (tmp_path / "some" / shard.name).read_bytes() == shard.read_bytes()
    capsys.readouterr()
    other = flags_for(demo_inputs, tmp_path / "some", *flags, hooks=[*RUN[:-1], 5])
    assert main(*other) == 2
    assert "differs in top_logits: 4, now 5" in capsys.readouterr().err


def test_hosts_of_a_pod_store_those_of_one_device(demo_inputs, tmp_path):
    flags = "--no_data_parallel", "--max_samples", 80  # the pod's hosts take every other document
    assert main(*flags_for(demo_inputs, tmp_path / "alone", *flags, hooks=RUN)) == 0
    pod = Pod(
        tmp_path,
        2,
        4,
        *flags_for(demo_inputs, tmp_path / "pod", "--max_samples", 40, hooks=RUN),
    )
    assert pod.wait() == [0, 0], pod.text(0)
    expected = records_of(tmp_path / "alone")
    found = stored(tmp_path / "pod")
    for name in NAMES[:4]:
        alone = {r["doc_id"]: r["activation"] for r in expected[name]}
        parts = [record for (_, at), part in found.items() if at == name for record in part]
        assert len(parts) == 40
        for record in (record for record in parts if record["doc_id"] in alone):
            other = alone[record["doc_id"]]
            np.testing.assert_allclose(record["activation"], other, atol=1e-5, rtol=0)


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
