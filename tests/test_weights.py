"""Reading weights: each tensor once, to the bit, and few at a time."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import Reference, references
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file
from watched import Watched

from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.hooks import hook_table
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.weights import READERS, WeightSpec, load_params
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
    assert 1 <= len(checkpoint.threads) <= READERS
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
