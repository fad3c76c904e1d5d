"""attn.hook_pattern, whose columns are the positions of a token's own sample."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_line import main, records_of
from conftest import make_reference
from jax.sharding import Mesh
from rounding import assert_rounded_alike
from test_model import TOLERANCE, error_of

from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.hooks import Form
from activation_extraction.model.mesh import HostRows, build_layout
from activation_extraction.model.weights import load_params
from activation_extraction.text.packing import pack, samples_of
from qwen2_jax import weight_table
from qwen2_jax_with_hooks import HOOKS, create_model_with_hooks

ASKED = ["blocks.*.attn.hook_pattern", "blocks.1.attn.hook_z"]
LENGTH = 64
MESHES = {
    "one device": {"model": 1},
    "1d": {"model": 8},
    "2d": {"data": 2, "model": 4},
    "pipeline": {"pipeline": 2, "data": 2, "model": 2},
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    return make_reference(folder, num_key_value_heads=2, num_hidden_layers=4)


@pytest.fixture(scope="module")
def batch(tiny):
    """Samples of 1 to 60 tokens, several to a row."""
    chance = np.random.default_rng(3)
    lengths = [60, 31, 20, 33, 1, 12, 40, 7, 57, 25, 38, 5]
    documents = [chance.integers(0, tiny.config.vocab_size, n) for n in lengths]
    (found,) = pack(samples_of(documents), rows=8, length=LENGTH)
    assert len(found.samples) == len(lengths)
    return found


def attentions(reference, token_ids, dtype=None):
    """What transformers' eager attention returns for one sample: (layers, heads, queries, keys)."""
    import torch

    model = reference.model if dtype is None else reference.model.to(dtype)
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        ids = torch.tensor(token_ids[None], dtype=torch.long)
        out = model.model(ids, use_cache=False, output_attentions=True)
    model.set_attn_implementation(before)
    return np.stack([each[0].float().numpy() for each in out.attentions])


def patterns(reference, batch, shape, dtype=jnp.float32):
    """(layers, B, T, N, S) on a mesh."""
    devices = jax.devices()[: int(np.prod(list(shape.values())))]
    layout = build_layout(devices, shape, kv_heads=2)
    hooks = list(HOOKS.matching(ASKED, 4).values())
    model = create_model_with_hooks(reference.config, hooks, dtype, layout=layout)
    coming = HostRows(Mesh(np.array(devices, object).reshape(1, -1), ("host", "device")))
    checkpoint = Checkpoint(str(reference.folder))
    params = load_params(weight_table(model), checkpoint, dtype, layout)
    forward = jax.jit(model.apply, out_shardings=coming.outgoing(LENGTH, layout))
    arrays = (batch.token_ids, batch.segment_ids, batch.positions)
    inputs = [jax.device_put(array, coming.incoming()) for array in arrays]
    found = forward({"params": params}, *inputs)
    heads = reference.config.num_attention_heads
    wide = np.asarray(found[Form(heads * LENGTH, np.dtype(dtype).name)])
    return wide.reshape(*wide.shape[:3], heads, LENGTH)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
def test_patterns_are_those_of_transformers_eager_attention(mesh, tiny, batch):
    """Token t of a sample has, for each head, one column per position of that sample.

    Row t of transformers' (heads, queries, keys) for the sample alone is in the first columns; all
    other columns are 0, in packed rows too.
    """
    got = patterns(tiny, batch, MESHES[mesh])
    assert got.shape[0] == 4
    for placed in batch.samples:
        expected = attentions(tiny, placed.sample.token_ids).transpose(0, 2, 1, 3)
        own = got[:, placed.row, placed.start : placed.stop]
        tokens = len(placed.sample.token_ids)
        assert error_of(own[..., :tokens], expected) < TOLERANCE
        assert not own[..., tokens:].any()
        np.testing.assert_allclose(own.sum(-1), 1, rtol=0, atol=(2 * tokens + 1) * 2.0**-24)


@pytest.mark.long
def test_bfloat16_patterns_are_as_close_as_those_of_transformers(tiny, batch, tmp_path):
    import torch

    low = make_reference(tmp_path, num_key_value_heads=2, num_hidden_layers=4)
    got = patterns(tiny, batch, MESHES["one device"], jnp.bfloat16)
    placed = batch.samples[0]
    tokens = len(placed.sample.token_ids)
    exact = attentions(tiny, placed.sample.token_ids).transpose(0, 2, 1, 3)
    rounded = attentions(low, placed.sample.token_ids, torch.bfloat16).transpose(0, 2, 1, 3)
    own = got[:, placed.row, placed.start : placed.stop, :, :tokens]
    assert_rounded_alike(own, rounded, exact)


@pytest.mark.long
def test_a_run_stores_patterns(inputs, tmp_path, capsys):
    asked = [*inputs, "--hook_names", "blocks.1.attn.hook_pattern", "--max_samples", 10]
    out = tmp_path / "out"
    assert main(*asked, "--positions", "last:2", "--output_dir", out) == 0
    (records,) = records_of(out).values()
    assert records[3]["activation"].shape == (2, 4 * 64)
    (hook,) = json.loads((out / "metadata.json").read_text())["hooks"]
    assert (hook["width"], hook["heads"], hook["keys"]) == (256, 4, 64)
    model = ["--model_path", inputs[1], "--verify_samples", 10]
    assert main("--verify", *model, "--output_dir", out) == 0
    assert "10 samples recomputed; 0 problems" in capsys.readouterr().out


def test_the_refusal_names_the_bytes(tmp_path, capsys):
    flags = ["--demo", "--hook_names", "blocks.1.attn.hook_pattern", "--max_seq_length", 2048]
    assert main(*flags, "--activation_dtype", "float32", "--output_dir", tmp_path) == 2
    assert (
        "error: --hook_names blocks.1.attn.hook_pattern: takes 32,768 bytes per token and "
        "67,108,864 per row with --max_seq_length 2048; at most 33,554,432 per row are stored; "
        "choose a smaller --max_seq_length"
    ) == capsys.readouterr().err.splitlines()[-1]
