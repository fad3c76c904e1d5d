"""Reading weights: each tensor once, to the bit, and few at a time."""

import dataclasses
import json
import threading

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from command_line import main
from conftest import Reference, make_reference, references
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file
from test_model import TOLERANCE, error_of
from watched import Watched

from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.model.checkpoint import INDEX_FILE, Checkpoint
from activation_extraction.model.hooks import hook_table
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.model_config import as_stored
from activation_extraction.model.weights import WEIGHT_READERS, WeightSpec, load_params
from qwen2_jax import Qwen2, weight_table
from qwen2_jax_with_hooks import create_model_with_hooks


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("metadata", ["", "x", "xxx"])
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


def load(reference, checkpoint, progress=lambda _: None):
    layout = build_layout(jax.devices()[:2], {"data": 2}, kv_heads=1)
    table = weight_table(Qwen2(reference.config), checkpoint.tensors)
    return load_params(table, checkpoint, np.float32, layout, progress=progress)


def test_every_tensor_is_read_once_however_many_devices_hold_it(reference: Reference):
    checkpoint = Watched(reference.folder)
    loaded: list[int] = []
    params = load(reference, checkpoint, loaded.append)
    tied = reference.config.tie_word_embeddings
    again = {f"{reference.config.prefix}embed_tokens.weight"} if tied else set()
    assert {name for (name, _), count in checkpoint.parts.items() if count > 1} <= again
    assert 1 <= len(checkpoint.threads) <= WEIGHT_READERS
    assert sum(loaded) == sum(array.nbytes for array in jax.tree.leaves(params))


@references("two_kv_heads_tied", "qwen3_5_moe")
def test_tensors_are_read_side_by_side(reference: Reference):
    """Nothing is read before a second thread reads, too."""
    two = threading.Event()

    def wait(_tensor: str) -> None:
        if len(checkpoint.threads) > 1:
            two.set()
        assert two.wait(600)

    checkpoint = Watched(reference.folder, wait)
    load(reference, checkpoint)


@references("two_kv_heads_tied", "qwen3_5_moe")
def test_a_read_that_fails_ends_the_loading(reference: Reference):
    layers, norm = f"{reference.config.prefix}layers", "post_attention_layernorm.weight"

    def fail(tensor: str) -> None:
        if tensor == f"{layers}.1.{norm}":
            raise OSError("the disk is gone")

    checkpoint = Watched(reference.folder, fail)
    with pytest.raises(OSError, match="the disk is gone"):
        load(reference, checkpoint)
    assert f"{layers}.2.{norm}" not in checkpoint.sizes


def test_every_layer_lies_where_the_model_has_it(reference: Reference):
    """In two stages of a pipeline if they can have the same sequence of layers."""
    config, checkpoint = reference.config, Checkpoint(str(reference.folder))
    half = config.num_hidden_layers // 2
    stages = 2 if config.layer_types[:half] == config.layer_types[half:] else 1
    layout = build_layout(jax.devices()[: 2 * stages], {"pipeline": stages, "data": 2}, kv_heads=1)
    hooks = list(hook_table(config).all_hooks(config.num_hidden_layers))
    model = create_model_with_hooks(config, hooks, layout=layout)
    table, dtype = weight_table(model, checkpoint.tensors), jnp.dtype("bfloat16")
    params = flatten_dict(load_params(table, checkpoint, dtype, layout, as_bits=True))
    assert params.keys() == table.keys()
    for path, spec in table.items():
        assert params[path].dtype == np.uint16
        assert params[path].sharding == layout.sharding(spec.axes, spec.shape)
        expected = spec.read_whole(checkpoint.read, dtype).view(np.uint16)
        np.testing.assert_array_equal(params[path], expected)


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
    extract(tied.folder, tmp_path, *flags[:1], flags[3])  # no hook needs the head
    assert says not in capsys.readouterr().err


def test_a_decoder_with_another_head_has_the_values_of_the_language_model(tied, tmp_path):
    """As reward models, value models and classifiers are stored, with and without "model."."""
    flags = "--layers_to_extract", "0-3"
    expected = extract(tied.folder, tmp_path, *flags)
    one = np.ones((1, 64), np.float32)
    heads = {"score.weight": one, "v_head.summary.weight": one, "v_head.summary.bias": one[0, :1]}
    change(tied.folder, **heads)
    for _ in range(2):
        found = extract(tied.folder, tmp_path, *flags)
        assert found.keys() == expected.keys() and len(found) == 4
        for hook, values in expected.items():
            np.testing.assert_array_equal(found[hook], values)
        change(tied.folder, lambda name: name.removeprefix("model."))


def test_a_decoder_beside_vision_may_lack_the_prefix_of_the_whole(tied):
    beside = dataclasses.replace(tied.config, prefix="model.language_model.")
    for prefix in ("model.language_model.", "language_model."):
        assert as_stored(beside, {f"{prefix}embed_tokens.weight"}).prefix == prefix


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
