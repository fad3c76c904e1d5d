"""The kernel of the gated delta rule, in Pallas's interpret mode and through the TPU compiler."""

import math
from functools import partial
from itertools import pairwise, product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_reference
from delta_reference import QWEN3_5
from jax.experimental import pallas as pl
from jax.extend.core import jaxpr_as_fun
from test_families import released
from test_gated_delta import by_transformers, each_alone, inputs, segments
from test_mesh import SHAPES, run_on
from test_model import TOLERANCE, error_of, load, packed, run
from test_model import by_hook as values_of
from tiny_models import MOE_TEXT, TEXT

from activation_extraction.model import delta_kernel
from activation_extraction.model.delta_kernel import CHUNK, pallas_delta_rule
from activation_extraction.model.delta_net import token_by_token
from activation_extraction.model.hooks import hook_table
from activation_extraction.model.kernels import Kernels
from activation_extraction.model.layers import einsum
from benchmarks.step_plan import padded_flops
from qwen2_jax_with_hooks import FAMILIES, create_model_with_hooks

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
interpreted = partial(pallas_delta_rule, interpret=True)
in_chunks = partial(by_transformers, "torch_chunk_gated_delta_rule")
# Documents that end at the edges of chunks and blocks and within them; the last ones not whole.
LENGTHS = [[CHUNK, 3, CHUNK - 3, 1, CHUNK, CHUNK - 2, 20], [3 * CHUNK + 7, 1, 2]]
HOOKS = [
    "blocks.0.linear_attn.hook_recurrence_out",
    "blocks.2.linear_attn.*",
    "blocks.3.hook_resid_post",
]


def sizes_of(delta):
    return delta.key_heads, delta.values_per_key, delta.key_size, delta.value_size


TINY = {sizes_of(FAMILIES.config(raw).delta) for raw in (TEXT, MOE_TEXT, *QWEN3_5.values())}
TINY_AND_RELEASED = [*sorted(TINY), (1, 2, 128, 128)]


def errors(found, exact):
    """The root mean square of the error, and the largest."""
    error = np.asarray(found, np.float64) - exact
    return np.array([np.sqrt(np.mean(np.square(error))), np.abs(error).max()])


@pytest.mark.parametrize(
    "keys,values",
    [(FLOAT32, FLOAT32), (BFLOAT16, BFLOAT16), (BFLOAT16, FLOAT32)],
    ids=["float32", "bfloat16", "bfloat16, not rounded at the end"],
)
@pytest.mark.parametrize("sizes", TINY_AND_RELEASED, ids=str)
def test_it_is_as_close_to_the_recurrence_as_the_chunks_of_transformers(sizes, keys, values):
    """Padding may be anything but infinite, and does not reach others."""
    ids, places = segments(LENGTHS, padding=9)
    *narrow, log_decay, beta = inputs(ids.shape, sizes)
    narrow = [jnp.asarray(x, dtype) for x, dtype in zip(narrow, (keys, keys, values), strict=True)]
    wide = [np.asarray(x.astype(jnp.float32)) for x in narrow]
    exact = token_by_token(*wide, log_decay, beta, ids)[ids > 0]
    got = jax.jit(interpreted)(*narrow, log_decay, beta, ids)
    assert got.dtype == values and got.shape == wide[2].shape
    assert jnp.isfinite(got).all()
    theirs = each_alone(in_chunks, (*wide, log_decay, beta), places)
    theirs = np.asarray(jnp.asarray(theirs, values).astype(jnp.float32))[ids > 0]
    ours = np.asarray(got.astype(jnp.float32))[ids > 0]
    assert (errors(ours, exact) <= 1.25 * errors(theirs, exact)).all()


@pytest.mark.parametrize("sizes", [(2, 3, 16, 24), (1, 2, 128, 128)], ids=str)
def test_six_passes_of_a_matrix_unit_are_as_close(sizes, monkeypatch):
    """A TPU with precision HIGHEST adds up the six largest products of bfloat16 parts."""

    def parts(x):
        found = []
        for _ in range(3):
            found.append(x.astype(BFLOAT16))
            x -= found[-1].astype(FLOAT32)
        return found

    def in_six_passes(equation, x, y):
        if x.dtype == BFLOAT16:
            return einsum(equation, x, y)
        left, right = parts(x), parts(y)
        pairs = (2, 0), (0, 2), (1, 1), (0, 1), (1, 0), (0, 0)
        return sum(einsum(equation, left[i], right[j]) for i, j in pairs)

    ids, places = segments(LENGTHS, padding=9)
    arrays = inputs(ids.shape, sizes)
    exact = token_by_token(*arrays, ids)[ids > 0]
    theirs = errors(each_alone(in_chunks, arrays, places)[ids > 0], exact)
    with monkeypatch.context() as patch:
        patch.setattr(delta_kernel, "einsum", in_six_passes)
        got = np.asarray(jax.jit(lambda *arrays: interpreted(*arrays))(*arrays, ids))[ids > 0]
    assert (errors(got, exact) <= 1.25 * theirs).all()


def test_equal_tokens_that_forget_nothing():
    """A document that repeats itself makes the system of a chunk as hard as it can be."""
    ids, places = segments([[2 * CHUNK + 44], [150, 150]], padding=0)
    q, k, v, log_decay, beta = inputs(ids.shape, (2, 3, 8, 24))
    k[:], log_decay[:], beta[:] = k[:, :1], 0, 1
    arrays = q, k, v, log_decay, beta
    exact = token_by_token(*arrays, ids)
    theirs = errors(each_alone(in_chunks, arrays, places), exact)
    assert (errors(jax.jit(interpreted)(*arrays, ids), exact) <= 1.25 * theirs).all()


def test_several_stages_of_a_pipeline_at_once():
    ids, _ = segments(LENGTHS, padding=9)
    stages = [inputs(ids.shape, (2, 1, 16, 24), seed) for seed in range(2)]
    together = jax.vmap(interpreted, in_axes=(0, 0, 0, 0, 0, None))
    got = jax.jit(together)(*map(np.stack, zip(*stages, strict=True)), ids)
    for stage, arrays in zip(got, stages, strict=True):
        np.testing.assert_allclose(stage, jax.jit(interpreted)(*arrays, ids), atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("mesh", ["2d", "3d pipeline"])
def test_a_model_on_a_mesh(tmp_path, mesh):
    """It has both types of layer; its heads or layers are split."""
    reference = make_reference(tmp_path, **TEXT)
    batch = packed(reference.config.vocab_size, ends=(40, 64))
    hooks = hook_table(reference.config).matching(HOOKS, 4).values()
    alone = create_model_with_hooks(reference.config, [*hooks])
    expected = run(alone, load(alone, tmp_path), *batch)
    kernels = Kernels(delta_rule=interpreted)
    found, model = run_on(reference, batch, [*hooks], SHAPES[mesh], hosts=2, kernels=kernels)
    for hook, value in values_of(model, found).items():
        assert error_of(value, expected[hook]) < TOLERANCE, hook.name


def shapes_of(name, dtype, parts, rows=8, length=2048, sharding=None):
    """What a device has of some rows of a released model whose heads are split in `parts`."""
    keys, of_each, key_size, value_size = sizes_of(
        FAMILIES.config(released(f"Qwen3.5-{name}")).delta
    )
    tokens, heads = (rows, length), (keys // parts, of_each)
    shapes = [((*tokens, heads[0], key_size), dtype)] * 2 + [((*tokens, *heads, value_size), dtype)]
    shapes += [((*tokens, *heads), FLOAT32)] * 2 + [(tokens, jnp.int32)]
    return [jax.ShapeDtypeStruct(*each, sharding=sharding) for each in shapes]


def test_each_array_is_fetched_once():
    """What the kernel moves is the size of its arrays."""
    given = shapes_of("9B", BFLOAT16, parts=4, rows=2, length=512)
    (call,) = (
        equation
        for equation in jax.make_jaxpr(pallas_delta_rule)(*given).eqns
        if equation.primitive.name == "pallas_call"
    )
    mapping, moved = call.params["grid_mapping"], []
    for block in mapping.block_mappings:
        sizes = [size.block_size for size in block.block_shape if isinstance(size, pl.Blocked)]
        place_of = jaxpr_as_fun(block.index_map_jaxpr)
        places = [tuple(map(int, place_of(*step))) for step in product(*map(range, mapping.grid))]
        fetched = 1 + sum(before != after for before, after in pairwise(places))
        moved.append(fetched * math.prod(sizes))
    q, k, v, log_decay, beta, _ = (x.size for x in given)
    assert moved == [q, k, v, log_decay + beta, v]


@pytest.mark.parametrize(
    "dtype,tile,expected,highest",
    # Rows of each kind of product, times passes: keys and queries with keys; inverses, what they
    # solve, and what a chunk's tokens read of each other; reading and writing the state.
    [
        (BFLOAT16, 128, 128 + (192 + 128 + 128) * 6 + (256 + 256) * 3, 20),
        (BFLOAT16, 256, 128 + (192 + 128 + 128) * 6 + (128 + 256) * 3, 20),
        (FLOAT32, 128, (128 + 192 + 128 + 128 + 256 + 256) * 6, 28),
    ],
)
def test_what_the_matrix_units_do(dtype, tile, expected, highest):
    """No product of float32 has a lower precision."""
    given = shapes_of("9B", dtype, parts=4)
    blocks = 8 * 8 * 2048 // 128  # rows, value heads, tokens
    assert padded_flops(pallas_delta_rule, given, tile) == blocks * expected * 2 * tile**2
    program = str(jax.make_jaxpr(pallas_delta_rule)(*given))
    assert program.count("(Precision.HIGHEST, Precision.HIGHEST)") == highest
