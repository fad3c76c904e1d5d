"""Reading weights: each tensor once, to the bit, few at a time, and from what is stored."""

import json
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from command_line import main
from conftest import Reference, make_reference
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file
from test_model import (
    MESHES,
    MODELS,
    TOLERANCE,
    checked,
    error_of,
    family,
    load,
    matching,
    table_of,
)
from tiny_models import QUICK_REFERENCE, TINY
from watched import Watched

from activation_extraction.common.errors import InputError
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.model.checkpoint import INDEX_FILE, Checkpoint
from activation_extraction.model.hooks import hook_table
from activation_extraction.model.mesh import build_layout, usable_devices
from activation_extraction.model.tensor_names import text_name, text_names
from activation_extraction.model.weight_files import FIRST_BYTES
from activation_extraction.model.weights import WEIGHT_READERS, WeightSpec, load_params
from qwen2_jax import Qwen2, weight_table
from qwen2_jax_with_hooks import create_model_with_hooks


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "metadata", ["", "x", "xxx", pytest.param("x" * FIRST_BYTES, id="longer than a request")]
)
def test_parts_are_what_the_file_holds_to_the_bit(tmp_path, dtype, metadata):
    """Every pattern of 16 bits, infinities and NaN included, wherever the header ends."""
    patterns = np.arange(2**16, dtype=np.uint16).view(jnp.dtype("bfloat16")).reshape(64, -1)
    with np.errstate(all="ignore"):
        values = patterns.astype(dtype)
        expected = values.astype(np.float32)
    save_file({"t": values}, tmp_path / "model.safetensors", {"made by": metadata})
    spec = WeightSpec((64, 512, 2), ("embed", "kv_heads", "head_dim"), ("t",))
    read = Checkpoint(str(tmp_path)).read
    for rows, heads in ((slice(64), slice(512)), (slice(60, 64), slice(1, 400))):
        ranges = range(64)[rows], range(512)[heads], range(2)
        with np.errstate(all="ignore"):
            part = spec.read_slice(read, np.float32, ranges)
        wanted = np.ascontiguousarray(expected.reshape(spec.shape)[rows, heads])
        np.testing.assert_array_equal(part.view(np.uint32), wanted.view(np.uint32))
        assert part.ctypes.data % 64 == 0


@pytest.fixture
def reference(request: pytest.FixtureRequest, tmp_path: Path) -> Reference:
    """A tiny model."""
    shard = "100KB" if request.param == "sharded" else "1GB"
    return make_reference(tmp_path, shard, **TINY[request.param])


def each_of(*names: str) -> pytest.MarkDecorator:
    marks = {
        name: [family(name)] + [pytest.mark.long] * (name != QUICK_REFERENCE) for name in names
    }
    every = [pytest.param(name, marks=of_name) for name, of_name in marks.items()]
    return pytest.mark.parametrize("reference", every, indirect=True)


@each_of(QUICK_REFERENCE, "qwen3_5_moe")
def test_a_read_that_fails_ends_the_loading(reference: Reference):
    """Tensors are read side by side: nothing is read before a second thread reads, too."""
    two = threading.Event()

    def before(tensor: str) -> None:
        if len(checkpoint.threads) > 1:
            two.set()
        assert two.wait(600)
        if tensor == "model.layers.1.post_attention_layernorm.weight":
            raise OSError("the disk is gone")

    checkpoint = Watched(reference.folder, before)
    layout = build_layout(jax.devices()[:2], {"data": 2}, kv_heads=1)
    with pytest.raises(OSError, match="the disk is gone"):
        load_params(table_of(Qwen2(reference.config), checkpoint), checkpoint, np.float32, layout)
    assert "model.layers.2.post_attention_layernorm.weight" not in checkpoint.sizes


@each_of(*TINY)
def test_every_tensor_is_read_once_and_lies_where_the_model_has_it(reference: Reference):
    """In two stages of a pipeline if they can have the same sequence of layers."""
    config, checkpoint = reference.config, Watched(reference.folder)
    half = config.num_hidden_layers // 2
    stages = 2 if config.layer_types[:half] == config.layer_types[half:] else 1
    layout = build_layout(jax.devices()[: 2 * stages], {"pipeline": stages, "data": 2}, kv_heads=1)
    hooks = list(hook_table(config).all_hooks(config.num_hidden_layers))
    model = create_model_with_hooks(config, hooks, layout=layout)
    table, dtype = table_of(model, checkpoint), jnp.dtype("bfloat16")
    checked(checkpoint)  # no tensor that transformers saves is unknown, nor one of other inputs
    loaded: list[int] = []
    params = load_params(table, checkpoint, dtype, layout, as_bits=True, progress=loaded.append)
    assert sum(loaded) == sum(array.nbytes for array in jax.tree.leaves(params))
    assert max(checkpoint.parts.values()) == 1 <= len(checkpoint.threads) <= WEIGHT_READERS
    params = flatten_dict(params)
    assert params.keys() == table.keys()
    state = reference.model.state_dict()
    state = {text: state[name].numpy() for text, name in text_names(state, "").items()}
    for path, spec in table.items():
        assert params[path].dtype == np.uint16
        assert params[path].sharding == layout.sharding(spec.axes, spec.shape)
        if "experts" not in spec.axes and spec.tensor_slice is None:  # others are tested below
            flat = [state[name].reshape(-1) for name in spec.hf_names]
            expected = np.concatenate(flat).astype(dtype).view(np.uint16)
            np.testing.assert_array_equal(np.ravel(params[path])[: expected.size], expected)


@pytest.mark.parametrize(
    "name,mesh,most,tensor,parts",
    [  # how much of the model a device may have, and how often a tensor of layer 0 or 1 is read
        ("1 kv head", "pipeline and fsdp", 0.22, "0.mlp.gate_proj", 4),
        ("2 kv heads", "pipeline and fsdp", 0.18, "1.self_attn.q_proj", 4),
        ("delta", "2d", 0.39, "0.mlp.gate_proj", 4),
        ("experts", "expert and data", 0.44, "1.mlp.experts.4.gate_proj", 2),
        ("interleaved", "expert and data", 0.42, "0.linear_attn.in_proj_qkvz", 16),
    ],
)
def test_weights_are_split_and_read_only_once(tmp_path, name, mesh, most, tensor, parts):
    """Per device: what the axes leave of each weight; per process: every byte once, by parts."""
    reference = make_reference(tmp_path, **MODELS[name])
    config, checkpoint = reference.config, Watched(reference.folder)
    layout = build_layout(usable_devices(every=True), MESHES[mesh], config.num_key_value_heads)
    hooks = matching(config, [f"blocks.{config.num_hidden_layers - 1}.hook_resid_post"])
    table = weight_table(create_model_with_hooks(config, hooks, layout=layout))
    params = load_params(table, checkpoint, np.float32, layout)
    checkpoint.check_read_once(table)
    assert len(checkpoint.sizes[f"model.layers.{tensor}.weight"]) == parts
    total = sum(map(sum, checkpoint.sizes.values()))
    held = Counter[Any]()
    for array in jax.tree.leaves(params):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert len(held) == 8 and max(held.values()) < most * total, max(held.values()) / total


@pytest.mark.parametrize(
    "added,left_out", [("b a", "ba"), ("qkv z b a", "qkvz ba"), ("qkv z b a", "")]
)
def test_projections_by_key_head_and_as_qwen3_5_has_them_give_the_same_weights(
    tmp_path, added, left_out
):
    """transformers writes them by key head; some who quantise a model do not."""
    reference = make_reference(tmp_path, **MODELS["interleaved"])
    expected, state = load(Qwen2(reference.config), tmp_path), load_file(path_of(tmp_path))
    for layer in (0, 2):
        name = f"model.layers.{layer}.linear_attn.in_proj_{{}}.weight".format
        qkvz, ba = (state[name(both)].reshape(4, -1, 64) for both in ("qkvz", "ba"))
        parts = *np.split(qkvz, [16, 32, 64], axis=1), *np.split(ba, [2], axis=1)
        apart = {n: part.reshape(-1, 64) for n, part in zip("qkvzba", parts, strict=True)}
        apart |= {"qkv": np.concatenate([apart[n] for n in "qkv"])}
        state |= {name(n): apart[n] for n in added.split()}
        for both in left_out.split():
            del state[name(both)]
    save_file(state, path_of(tmp_path))
    if not left_out:  # the two may differ
        with pytest.raises(InputError, match=r"in_proj_a.weight is unknown .* \(and 7 more\)"):
            checked(Checkpoint(str(tmp_path)))
        return
    checked(Checkpoint(str(tmp_path)))
    jax.tree.map(np.testing.assert_array_equal, load(Qwen2(reference.config), tmp_path), expected)


def path_of(folder):
    return folder / "model.safetensors"


def test_fused_experts_of_all_layers_have_one_layout(tmp_path):
    """The input axis is last in what transformers saves, and first in Qwen3-VL as released."""
    reference = make_reference(tmp_path, **MODELS["experts"])
    stored = {name: tensor.numpy() for name, tensor in reference.model.state_dict().items()}
    fused = [name for name in stored if ".experts." in name]
    assert len(fused) == 4  # two in each of two layers
    for name in fused:
        stored[name] = np.ascontiguousarray(stored[name].swapaxes(1, 2))
        save_file(stored, path_of(tmp_path))
        if name == fused[-1]:
            checked(Checkpoint(str(tmp_path)))
            break
        with pytest.raises(InputError, match=r"mlp.experts.\w+ has shape"):
            checked(Checkpoint(str(tmp_path)))


TOKEN_IDS = np.random.default_rng(0).integers(0, 211, 30, np.int32)


@pytest.fixture
def tied(tmp_path):
    """A model whose head is its embedding."""
    return make_reference(tmp_path / "model", num_key_value_heads=2, tie_word_embeddings=True)


def change(folder, name=lambda name: name, **more):
    """Renames the tensors of a model, and adds some."""
    path = folder / "model.safetensors"
    tensors = {name(old): values for old, values in load_file(path).items()}
    save_file(tensors | more, path, {"format": "pt"})


def extract(model_path, tmp_path, *flags):
    """What a run stores of TOKEN_IDS: name of a hook -> its values."""
    table = pyarrow.table({"ids": [TOKEN_IDS.tolist()]})
    pyarrow.parquet.write_table(table, tmp_path / "ids.parquet")
    flags = [*flags, "--dataset_path", tmp_path / "ids.parquet", "--ids_column", "ids"]
    flags += ["--dtype", "float32", "--no_data_parallel", "--overwrite"]
    assert main("--model_path", model_path, *flags, "--output_dir", tmp_path / "out") == 0
    dataset = ActivationDataset(tmp_path / "out")
    return {hook: np.asarray(dataset[0][hook]) for hook in dataset.hooks}


def test_a_stored_head_counts_although_it_is_said_to_be_tied(tied, tmp_path, capsys):
    """As in transformers, which computes the expected values with the stored one."""
    from transformers import AutoModelForCausalLM

    flags = "--hook_names", "entropy", "loss", "ln_final.hook_normalized"
    before = extract(tied.folder, tmp_path, *flags)
    says = "its lm_head.weight is used, although config.json ties it to the embedding"
    assert says not in capsys.readouterr().err
    head = np.random.default_rng(1).standard_normal((211, 64)).astype(np.float32)
    change(tied.folder, **{"lm_head.weight": head})
    reference = Reference(AutoModelForCausalLM.from_pretrained(tied.folder), tied.folder)
    expected = reference.hooked(TOKEN_IDS[None])
    found = extract(tied.folder, tmp_path, *flags)
    for name in ("entropy", "loss"):
        used = slice(name == "loss", None)  # the first token has no loss
        assert error_of(found[name][used], expected[name][0][used]) < TOLERANCE
        assert error_of(before[name][used], expected[name][0][used]) > 0.1
    assert capsys.readouterr().err.count(says) == 1


def test_the_language_model_is_found_whatever_it_was_stored_in(tied, tmp_path):
    """As reward models, classifiers, embedding models, models with other inputs, and as saved by a
    library that repeated a part of the names."""
    flags = "--layers_to_extract", "0-3"
    expected = extract(tied.folder, tmp_path, *flags)
    beside = ("score.weight", "v_head.summary.weight", "visual.blocks.0.norm1.weight")
    beside += ("talker.model.layers.0.input_layernorm.weight", "audio_tower.ln_post.weight")
    beside += ("model.visual.merger.norm.weight", "mtp.layers.0.input_layernorm.weight")
    beside += ("thinker.visual.merger.ln_q.weight", "model.layers.0.self_attn.rotary_emb.inv_freq")
    beside += ("thinker.audio_tower.conv_out.weight", "code2wav.decoder.0.conv.weight")
    beside += ("token2wav.code2wav_bigvgan_model.conv_pre.weight", "classifier.weight")
    beside += ("qa_outputs.weight",)
    path, one = tied.folder / "model.safetensors", np.ones((1, 64), np.float32)
    stored, others = load_file(path), dict.fromkeys(beside, one)
    for around in (
        "",
        "language_model.",
        "model.language_model.",
        "thinker.model.",
        "transformer.",
    ):
        named = {around + name.removeprefix("model."): stored[name] for name in stored}
        save_file(named | others, path, {"format": "pt"})
        found = extract(tied.folder, tmp_path, *flags)
        assert found.keys() == expected.keys() and len(found) == 4
        for hook, values in expected.items():
            np.testing.assert_array_equal(found[hook], values)


def test_names_that_say_two_things_or_nothing(tied, tmp_path, capsys):
    repeated = "model.language_model.language_model.language_model.layers.3.mlp.up_proj.weight"
    assert text_name(repeated) == "model.layers.3.mlp.up_proj.weight"
    assert text_name("thinker.lm_head.weight") == "lm_head.weight"
    assert text_name("model.odd.weight") == "model.odd.weight" and text_name("model") == "model"
    change(tied.folder, **{"language_model.norm.weight": np.ones(64, np.float32)})
    flags = "--dataset_path", "none.jsonl", "--output_dir", tmp_path / "out"
    assert main("--model_path", tied.folder, *flags) == 2
    says = "language_model.norm.weight and model.norm.weight are both the text model's model.norm"
    assert says in capsys.readouterr().err


def test_without_a_head_only_what_it_gives_is_refused(tied, tmp_path, capsys):
    """As Qwen3-Embedding-8B, whose config.json does not tie a head that is not there."""
    expected = extract(tied.folder, tmp_path, "--layers_to_extract", "2")
    raw = json.loads((tied.folder / "config.json").read_text())
    (tied.folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    found = extract(tied.folder, tmp_path, "--layers_to_extract", "2")
    np.testing.assert_array_equal(*(next(iter(each.values())) for each in (expected, found)))
    flags = "--dataset_path", tmp_path / "ids.parquet", "--ids_column", "ids"
    flags += ("--model_path", tied.folder, "--output_dir", tmp_path / "other")
    for hook in ("loss", "logits.top_ids"):
        assert main(*flags, "--hook_names", hook) == 2
        says = f"losses and logits need lm_head.weight, which --model_path {tied.folder} has not"
        assert says in capsys.readouterr().err
    assert main("--list_hooks", "--model_path", tied.folder) == 0
    listed = capsys.readouterr().out
    assert "ln_final.hook_out" in listed and not re.search("loss|entropy|logits", listed)
    (tied.folder / "config.json").write_text(json.dumps(raw))
    assert main("--list_hooks", "--model_path", tied.folder) == 0
    assert "logits.top_ids" in capsys.readouterr().out


def test_an_index_of_another_checkpoint_says_what_the_shard_calls_a_tensor(tied, tmp_path, capsys):
    path, name = tied.folder / "model.safetensors", "layers.0.self_attn.q_proj.weight"
    names = [text.removeprefix("model.") for text in load_file(path)]
    path.rename(tied.folder / "model-1.safetensors")
    index = {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
    (tied.folder / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(InputError) as refused:
        Checkpoint(str(tied.folder)).place(f"model.{name}")
    says = f"tensor {name} is missing; it is model.{name} there: {INDEX_FILE} is of another"
    assert says in str(refused.value)


@pytest.mark.parametrize("where", ["folder", "URL"])
def test_a_single_file_counts_before_an_index(where, tied, tmp_path, capsys):
    """As in transformers; the shards may be older ones, and they may be gone."""
    expected = extract(tied.folder, tmp_path, "--layers_to_extract", "3")
    assert INDEX_FILE not in capsys.readouterr().err
    older = dict.fromkeys(load_file(tied.folder / "model.safetensors"), "model-00001.safetensors")
    (tied.folder / INDEX_FILE).write_text(json.dumps({"weight_map": older}))
    model_path, memory = str(tied.folder), fsspec.filesystem("memory")
    if where == "URL":
        model_path = f"memory://{tmp_path.name}"
        memory.put(f"{tied.folder}/*", f"/{tmp_path.name}/")
    found = extract(model_path, tmp_path, "--layers_to_extract", "3")
    for hook, values in expected.items():
        np.testing.assert_array_equal(found[hook], values)
    says = f"--model_path {model_path}: model.safetensors is read, and {INDEX_FILE} is not"
    assert capsys.readouterr().err.count(says) == 1
