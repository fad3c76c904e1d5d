"""Kernels of attention and experts against their definitions; Pallas's in its interpret mode.

test_model.py compares those of CPUs, which are among them, with transformers.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import rare_but
from interpreted import pallas
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from rounding import assert_rounded_alike, assert_within_rounding

from activation_extraction.model import attention, expert_kernel
from activation_extraction.model.attention import Segments, blocked_attention, dense_attention
from activation_extraction.model.devices import usable_devices
from activation_extraction.model.experts import (
    Stacks,
    one_expert_after_the_other,
    route,
    sum_experts_in_tiles,
    sum_experts_with_ragged_dot,
)
from activation_extraction.model.flash_kernel import flash_attention
from activation_extraction.model.grouped_kernel import grouped_experts
from activation_extraction.model.host_rows import host_rows
from activation_extraction.model.kernels import splash_attention
from activation_extraction.model.layers import swap_pairs, swap_pairs_on_tpu
from activation_extraction.model.mesh import build_layout

splash, flash, grouped = (
    partial(f, interpret=True) for f in (splash_attention, flash_attention, grouped_experts)
)

# T, S, first query, query heads, key/value heads, head size
CASES = {
    "groups of four": (256, 256, 0, 4, 1, 64),
    "second half of the queries": (128, 256, 128, 4, 2, 128),
    "rows that end within a block": (200, 200, 0, 2, 2, 128),
    "few queries of a long row": (72, 360, 216, 2, 1, 64),
}
WINDOWS = 70, None, 70, None  # what each of these is tried with


def inputs(length, keys, first, heads, kv_heads, size, dtype=jnp.float32):
    """Rows of three segments, of three and padding, of one, and of nothing but padding."""
    generator = np.random.default_rng(0)
    shapes = (4, length, heads, size), *[(4, keys, kv_heads, size)] * 2
    q, k, v = (jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes)
    segments = np.ones((4, keys), np.int32)
    segments[:2, keys // 3 :], segments[:2, keys // 2 :] = 2, 3
    segments[1, -keys // 5 :] = segments[3] = 0
    of_queries = segments[:, first : first + length]
    return q * (2 * size**-0.5), k, v, Segments(*map(jnp.asarray, (of_queries, segments)))


def wide(arrays):
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, arrays)


def assert_attention(got, arrays, first, window=None):
    """Padding may be anything."""
    real, definition = arrays[3].q > 0, partial(dense_attention, window=window)
    assert got.dtype == arrays[0].dtype and got.shape == arrays[0].shape
    if got.dtype == jnp.float32:
        reference = lambda *qkv: definition(*qkv, arrays[3], first)[real]  # noqa: E731
        assert_within_rounding(got[real], reference, arrays[:3], arrays[1].shape[1])
    else:  # no worse than rounding probabilities and values once each
        results = got, definition(*arrays, first), definition(*wide(arrays), first)
        assert_rounded_alike(*(x[real] for x in results))


@pytest.mark.long
@pytest.mark.parametrize("case,window", [*zip(CASES, WINDOWS, strict=True)])
@pytest.mark.parametrize(
    "kernel,traced,dtype",
    [
        (blocked_attention, True, jnp.float32),
        (splash, False, jnp.float32),
        (splash, True, jnp.bfloat16),
        (flash, True, jnp.bfloat16),
    ],
)
def test_kernels_compute_attention(kernel, traced, dtype, case, window):
    """They do so whether the compiler knows the first query or not."""
    arrays, first = inputs(*CASES[case], dtype), CASES[case][2]
    run = jax.jit(partial(kernel, window=window), static_argnums=() if traced else 4)
    assert_attention(run(*arrays, first), arrays, first, window)


def test_longer_spans_of_keys_give_the_same(monkeypatch):
    """Long rows have them: each length of a span takes its time to compile."""
    monkeypatch.setattr(attention, "MOST_LENGTHS", 2)
    arrays, first = inputs(*CASES["few queries of a long row"]), 216
    assert_attention(blocked_attention(*arrays, first), arrays, first)


@pytest.mark.long
@pytest.mark.parametrize("kernel", [splash, flash])
def test_large_scores_are_not_rounded(kernel):
    """Scores of some hundreds, as the biases of Qwen's keys make them: an error is multiplied."""
    q, k, v, segments = inputs(*CASES["rows that end within a block"], jnp.bfloat16)
    arrays = 8 * q, 4 * k, v, segments
    assert_attention(kernel(*arrays, 0), arrays, 0)


def test_kernels_of_gpus_can_be_lowered_into_programs_of_both_meshes():
    """In a run, rows come on one mesh and weights lie on another one. (JAX refuses cuDNN's
    attention there, which needs the one mesh of a program.)"""
    devices = usable_devices(all_of_host=True)[:4]
    layout = build_layout(devices, {"data": 2, "model": 2}, 2)
    rows = host_rows(layout)
    q, k, v, segments = inputs(*CASES["rows that end within a block"], jnp.bfloat16)
    k, v = jax.device_put((k, v), layout.sharding(("batch", "", "kv_heads", ""), k.shape))
    q, ids = jax.device_put((q, segments.q), rows.incoming())
    # Newer versions of JAX ask for which GPU.
    gpu = AbstractDevice("NVIDIA H100 80GB HBM3", platform="gpu", num_cores=132)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        traced = jax.jit(partial(layout.attend, flash_attention)).trace(q, k, v, ids)
        assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


def experts_of(sizes, per_token, dtype, widths):
    """Returns what an `ExpertSumFunction` takes for the last of three layers: experts with so many
    rows each, in a random order, and as many rows of experts of other devices, whose weights are
    not numbers. The other layers' experts would give numbers far too large."""
    rng, (hidden, width) = np.random.default_rng(0), widths
    numbers, others = np.repeat(np.arange(len(sizes)), sizes), [-1, len(sizes), -7, 10**6]
    numbers = [*numbers, *rng.choice(others, len(numbers) + -2 * len(numbers) % per_token + 40)]
    chosen = rng.permutation(numbers).reshape(-1, per_token).astype(np.int32)
    local = (chosen >= 0) & (chosen < len(sizes))
    weights = np.where(local, rng.uniform(0.2, 1, chosen.shape), np.nan).astype(np.float32)
    shapes = (hidden, width), (hidden, width), (width, hidden)
    stacks = [np.full((3, len(sizes), *shape), 1e6) for shape in shapes]
    for stack, shape in zip(stacks, shapes, strict=True):
        stack[-1] = rng.standard_normal((len(sizes), *shape)) * shape[0] ** -0.5
    x, *stacks = (
        jnp.array(a, dtype) for a in (rng.standard_normal((len(chosen), hidden)), *stacks)
    )
    given = jnp.array(weights), jnp.array(chosen), Stacks(jnp.int32(2), *stacks)
    return x, *given


SIZES = {  # of an expert's rows, by what is special about them, and the experts of a token
    "none and several tiles": ((0, 300, 1, 63, 128, 0), 8),
    "all of one": ((0, 0, 500, 0), 1),
}


@pytest.mark.parametrize(
    "kernel", [sum_experts_in_tiles, sum_experts_with_ragged_dot, grouped, pallas]
)
@pytest.mark.parametrize("special", rare_but(["none and several tiles"], SIZES))
def test_experts_compute_what_the_definition_says(special, kernel):
    """Tokens without an expert get zeros, and nothing of other layers or other devices is read."""
    sizes, per_token = SIZES[special]
    dtype = jnp.bfloat16 if kernel in (grouped, pallas) else jnp.float32
    widths = (256, 128) if kernel is pallas else (96, 48)
    x, weights, chosen, stacks = experts_of(sizes, per_token, dtype, widths)
    got = jax.jit(kernel)(x, weights, chosen, stacks)
    assert got.shape == x.shape and got.dtype == jnp.float32
    local = ((chosen >= 0) & (chosen < len(sizes))).any(axis=1)
    assert not np.asarray(got)[~local].any()

    def definition(x, *matrices):
        exact = Stacks(stacks.layer_number, *matrices)
        return one_expert_after_the_other(x, weights, chosen, exact)[local]

    if dtype == jnp.bfloat16:
        rounded = sum_experts_in_tiles(x, weights, chosen, stacks)[local]
        assert_rounded_alike(got[local], rounded, definition(*wide((x, *stacks[1:]))))
    else:
        assert_within_rounding(got[local], definition, (x, *stacks[1:]), terms=96)


@pytest.mark.rare
def test_the_kernels_of_experts_compute_stages_and_large_weights_in_blocks(monkeypatch):
    """Tokens, tiles and experts of the stages of a pipeline differ; blocks are of columns."""
    sizes = (3, 0, 5), (0, 8, 0)
    given = [experts_of(of_stage, 2, jnp.bfloat16, (256, 256)) for of_stage in sizes]
    alone = np.stack([np.asarray(pallas(*arrays)) for arrays in given])
    monkeypatch.setattr(expert_kernel, "MOST_OF_WEIGHTS", 0)
    stages = jax.tree.map(lambda *pair: jnp.stack(pair), *given)
    np.testing.assert_array_equal(jax.vmap(pallas)(*stages), alone)


def test_equal_logits_choose_the_first_experts():
    weights, chosen = route(jnp.array([[[1.0, 3.0, 3.0, 2.0, 3.0]]]), 2, True)
    assert chosen.tolist() == [[[1, 2]]] and weights.tolist() == [[[0.5, 0.5]]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("half", [8, 32])
def test_a_product_finds_the_other_of_each_rotated_pair_exactly(half, dtype):
    x = jax.random.normal(jax.random.key(half), (2, 5, 3, 64), dtype)
    found, product = swap_pairs(half, x), swap_pairs_on_tpu(half, x)
    assert found.dtype == product.dtype == jnp.float32
    np.testing.assert_array_equal(found, product)
    x = np.asarray(x.astype(jnp.float32))
    np.testing.assert_array_equal(found[..., :half], x[..., half : 2 * half])
    np.testing.assert_array_equal(found[..., half : 2 * half], x[..., :half])
    assert not np.asarray(found[..., 2 * half :]).any()
