"""Kernels of attention and experts against their definitions; Pallas's in its interpret mode."""

import base64
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import rare_but
from interpreted import pallas
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from rounding import assert_rounded_alike, assert_within_rounding
from test_trial import trials_of

from activation_extraction.model import expert_kernel
from activation_extraction.model.attention import (
    KEY_BLOCK,
    Segments,
    blocked_attention,
    dense_attention,
)
from activation_extraction.model.expert_kernel import ROWS, TOKENS, pallas_experts, table_of
from activation_extraction.model.experts import (
    TILE,
    Stacks,
    one_expert_after_the_other,
    ragged_experts,
    route,
    tiled_experts,
)
from activation_extraction.model.flash_kernel import flash_attention
from activation_extraction.model.grouped_kernel import grouped_experts
from activation_extraction.model.kernels import splash_attention
from activation_extraction.model.layers import others_of_pairs, others_of_pairs_on_tpu
from activation_extraction.model.mesh import build_layout, host_rows, usable_devices

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


@pytest.mark.parametrize("window", [None, 2])
def test_dense_attention_is_that_of_torch(window):
    import torch

    chance = np.random.default_rng(2)
    q, k, v = (chance.standard_normal((1, 5, n, 4)).astype(np.float32) for n in (4, 2, 2))
    segments, distance = np.array([1, 1, 1, 2, 2]), np.subtract.outer(np.arange(5), np.arange(5))
    seen = (segments[:, None] == segments) & (distance >= 0) & (distance < (window or 9))

    def by_torch(*arrays):
        attend = torch.nn.functional.scaled_dot_product_attention
        qkv = (torch.tensor(x).transpose(1, 2) for x in arrays)
        found = attend(*qkv, torch.tensor(seen), scale=1, enable_gqa=True)
        return found.transpose(1, 2).numpy()

    both = Segments(*[jnp.asarray(segments[None], jnp.int32)] * 2)
    got = dense_attention(*map(jnp.asarray, (q, k, v)), both, 0, window)
    assert_within_rounding(got, by_torch, (q, k, v), terms=5)


@pytest.mark.long
@pytest.mark.parametrize(
    "keys,first,kv_heads,window",
    [
        (40, 0, 2, None),
        (300, 100, 1, None),
        (300, 100, 2, 1),
        (300, 100, 4, 70),
        pytest.param(5000, 2500, 2, 2500, marks=pytest.mark.rare),
    ],
)
def test_blocked_attention_computes_attention(keys, first, kv_heads, window):
    """Whether the first query is known to the compiler or not."""
    arrays = inputs(min(200, keys - first), keys, first, 4, kv_heads, 16)
    blocked = partial(blocked_attention, window=window)
    for got in (jax.jit(blocked), jax.jit(blocked, static_argnums=4)):
        assert_attention(got(*arrays, first), arrays, first, window)


@pytest.mark.parametrize("kernel,dtype", [(blocked_attention, jnp.float32), (flash, jnp.bfloat16)])
def test_no_other_segments_nor_keys_before_the_window_are_read(kernel, dtype):
    """What lies there is not a number."""
    q, k, v, _ = inputs(1024, 1024, 0, 4, 2, 16, dtype)
    q, k, v = q[:1], k[:1], v[:1]
    segments = jnp.asarray(np.repeat([1, 2, 3], [256, 384, 384])[None], jnp.int32)
    near = np.arange(256 - KEY_BLOCK, 640)  # lengths are rounded up
    few = [jnp.full_like(x, jnp.nan).at[:, near].set(x[:, near]) for x in (k, v)]
    got = np.asarray(kernel(q, *few, Segments(segments, segments), 0), np.float32)
    assert np.isfinite(got[:, 256:640]).all()
    assert np.isnan(got[:, :128]).all() and np.isnan(got[:, 640:]).all()
    late = [x.at[:, :512].set(jnp.nan) for x in (k, v)]
    ones = jnp.ones_like(segments)
    got = np.asarray(kernel(q, *late, Segments(ones, ones), 0, window=65), np.float32)
    assert np.isfinite(got[:, 640:]).all() and np.isnan(got[:, :512]).all()


@pytest.mark.long
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "kernel,traced,dtype",
    [
        (splash, False, jnp.float32),
        (splash, True, jnp.float32),
        (splash, True, jnp.bfloat16),
        (flash, False, jnp.bfloat16),
        (flash, True, jnp.bfloat16),
    ],
)
def test_kernels_of_accelerators_compute_attention(kernel, traced, dtype, case, window):
    arrays, first = inputs(*CASES[case], dtype), CASES[case][2]
    run = partial(kernel, window=window)
    assert_attention((jax.jit(run) if traced else run)(*arrays, first), arrays, first, window)


@pytest.mark.long
@pytest.mark.parametrize("kernel", [splash, flash])
def test_large_scores_are_not_rounded(kernel):
    """Scores of some hundreds, as the biases of Qwen's keys make them: an error is multiplied."""
    q, k, v, segments = inputs(*CASES["rows that end within a block"], jnp.bfloat16)
    arrays = 8 * q, 4 * k, v, segments
    assert_attention(kernel(*arrays, 0), arrays, 0)


def program(function, arrays, platform):
    """For a platform that is not here; newer versions of JAX ask for which GPU."""
    gpu = AbstractDevice("NVIDIA H100 80GB HBM3", platform="gpu", num_cores=132)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        traced = jax.jit(function).trace(*arrays)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_accelerators_multiply_float32_as_such(dtype):
    case, exact = CASES["second half of the queries"], dtype == jnp.float32
    arrays = inputs(*case, dtype)
    text = program(lambda *arrays: splash_attention(*arrays, case[2]), arrays, "tpu")
    kernel = re.search(r"\\22body\\22: ?\\22([^\\]+)", text)
    assert kernel is not None
    assert (b"contract_precision<fp32>" in base64.b64decode(kernel[1])) == exact
    if exact:
        text = program(lambda *arrays: flash_attention(*arrays, case[2]), arrays, "cuda")
        assert "triton" not in text and "precision = [HIGHEST, HIGHEST]" in text
        ((_, arrays, _),) = trials_of((8, 256, 128), jnp.dtype("float32"))
        text = program(grouped_experts, arrays, "cuda")
        assert "triton" not in text and "[HIGHEST, HIGHEST]" in text


def test_kernels_of_gpus_can_be_lowered_into_programs_of_both_meshes():
    """In a run, rows come on one mesh and weights lie on another one. (JAX refuses cuDNN's
    attention there, which needs the one mesh of a program.)"""
    devices = usable_devices(every=True)[:4]
    layout, rows = build_layout(devices, {"data": 2, "model": 2}, 2), host_rows(devices)
    q, k, v, segments = inputs(*CASES["rows that end within a block"], jnp.bfloat16)
    put = jax.device_put((k, v), layout.sharding(("batch", "", "kv_heads", ""), k.shape))

    def attend(q, k, v, segments):
        return layout.attend(flash_attention, q, k, v, segments)

    traced = jax.jit(attend, in_shardings=None, out_shardings=rows.everywhere()).trace(
        jax.device_put(q, rows.incoming()), *put, jax.device_put(segments.q, rows.incoming())
    )
    gpu = AbstractDevice("NVIDIA H100 80GB HBM3", platform="gpu", num_cores=132)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()
    ((_, arrays, _),) = trials_of((8, 256, 128), jnp.dtype("bfloat16"))
    assert program(grouped_experts, arrays, "cuda").count("@__gpu$xla.gpu.triton") == 2


def experts_of(sizes, per_token, dtype, widths, layers=3):
    """Arguments of an `ExpertSum` for the last layer: experts with so many rows each, in a random
    order, and as many rows of experts of other devices, whose weights are not numbers. The other
    layers' experts would give numbers far too large."""
    rng, (hidden, width) = np.random.default_rng(0), widths
    numbers, others = np.repeat(np.arange(len(sizes)), sizes), [-1, len(sizes), -7, 10**6]
    numbers = [*numbers, *rng.choice(others, len(numbers) + -2 * len(numbers) % per_token + 40)]
    chosen = rng.permutation(numbers).reshape(-1, per_token).astype(np.int32)
    local = (chosen >= 0) & (chosen < len(sizes))
    weights = np.where(local, rng.uniform(0.2, 1, chosen.shape), np.nan).astype(np.float32)
    shapes = (hidden, width), (hidden, width), (width, hidden)
    stacks = [np.full((layers, len(sizes), *shape), 1e6) for shape in shapes]
    for stack, shape in zip(stacks, shapes, strict=True):
        stack[-1] = rng.standard_normal((len(sizes), *shape)) * shape[0] ** -0.5
    x, *stacks = (
        jnp.array(a, dtype) for a in (rng.standard_normal((len(chosen), hidden)), *stacks)
    )
    given = jnp.array(weights), jnp.array(chosen), Stacks(jnp.int32(layers - 1), *stacks)
    return x, *given


SIZES = {  # of an expert's rows, by what is special about them
    "none and several tiles": (0, 300, 1, 63, 128, 0),
    "all of one": (0, 0, 500, 0),
    "few": (5, 0, 0, 0, 0, 0),
    "no rows": (0,) * 6,
}


@pytest.mark.parametrize("kernel", [tiled_experts, ragged_experts, grouped, pallas])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("per_token", rare_but([8], [1, 8]))
def test_experts_compute_what_the_definition_says(sizes, per_token, kernel):
    """Tokens without an expert get zeros, and nothing of other layers or other devices is read."""
    assert max(TILE, ROWS) < max(SIZES["none and several tiles"])
    dtype = jnp.bfloat16 if kernel in (grouped, pallas) else jnp.float32
    widths = (256, 128) if kernel is pallas else (96, 48)
    x, weights, chosen, stacks = experts_of(SIZES[sizes], per_token, dtype, widths)
    got = jax.jit(kernel)(x, weights, chosen, stacks)
    assert got.shape == x.shape and got.dtype == jnp.float32
    local = ((chosen >= 0) & (chosen < len(SIZES[sizes]))).any(axis=1)
    assert not np.asarray(got)[~local].any()

    def definition(x, *matrices):
        exact = Stacks(stacks.layer, *matrices)
        return one_expert_after_the_other(x, weights, chosen, exact)[local]

    if not local.any():
        return
    if dtype == jnp.bfloat16:
        rounded = tiled_experts(x, weights, chosen, stacks)[local]
        assert_rounded_alike(got[local], rounded, definition(*wide((x, *stacks[1:]))))
    else:
        assert_within_rounding(got[local], definition, (x, *stacks[1:]), terms=96)


@pytest.mark.parametrize("sizes", SIZES)
def test_only_tiles_with_rows_are_computed_and_only_rows_of_own_experts_are_fetched(sizes):
    """Every tile has one expert's rows, and each row's token; every token finds its rows."""
    _, weights, chosen, _ = experts_of(SIZES[sizes], 8, jnp.float32, (1, 1))
    count, fill = len(SIZES[sizes]), [(0, -len(chosen) % TOKENS), (0, 0)]
    chosen, weights = np.pad(chosen, fill, constant_values=-1), np.pad(weights, fill)
    table = jax.tree.map(np.asarray, table_of(jnp.array(weights), jnp.array(chosen), count))
    own = [-(-size // ROWS) for size in SIZES[sizes]]
    assert table.tiles == sum(own)
    assert table.experts[: sum(own)].tolist() == [*np.repeat(range(count), own)]
    assert table.counts.sum() == table.of_tokens.sum() == sum(SIZES[sizes])
    found = []
    for group, (rows, places) in enumerate(table.rows):
        for row, place in zip(rows[: table.of_tokens[group]], places, strict=False):
            tile, token = row // ROWS, group * TOKENS + place % TOKENS
            assert row % ROWS < table.counts[tile] and table.tokens[tile, 0, row % ROWS] == token
            weight = table.weights[tile, 0, row % ROWS]
            found.append((token, place // TOKENS, table.experts[tile], weight))
    local = (chosen >= 0) & (chosen < count)
    places = zip(*np.nonzero(local), chosen[local], weights[local], strict=True)
    assert sorted(found) == sorted(places)


def test_the_kernels_of_experts_compute_stages_of_a_pipeline():
    """Their tokens, tiles and experts differ."""
    given = [experts_of(sizes, 2, jnp.bfloat16, (128, 128)) for sizes in ((3, 0, 5), (0, 8, 0))]
    stages = jax.tree.map(lambda *pair: jnp.stack(pair), *given)
    alone = np.stack([np.asarray(pallas(*arrays)) for arrays in given])
    np.testing.assert_array_equal(jax.vmap(pallas)(*stages), alone)


def test_weights_that_do_not_fit_at_once_are_read_in_blocks_of_columns(monkeypatch):
    arrays = experts_of((130, 0, 200), 2, jnp.bfloat16, (256, 384))
    whole = np.asarray(pallas(*arrays))
    monkeypatch.setattr(expert_kernel, "MOST_OF_WEIGHTS", 0)
    np.testing.assert_array_equal(pallas(*arrays), whole)


def test_float32_and_widths_that_do_not_fill_registers_are_left_to_the_compiler():
    for hidden, width, dtype, kernels in (
        (128, 128, jnp.bfloat16, 3),
        (96, 128, jnp.bfloat16, 0),
        (128, 96, jnp.bfloat16, 0),
        (128, 128, jnp.float32, 0),
    ):
        given = experts_of((5, 0, 9), 2, dtype, (hidden, width))
        program = str(jax.make_jaxpr(pallas_experts)(*given))
        assert program.count("pallas_call[") == kernels, (hidden, width, dtype)


def test_equal_logits_choose_the_first_experts():
    weights, chosen = route(jnp.array([[[1.0, 3.0, 3.0, 2.0, 3.0]]]), 2, True)
    assert chosen.tolist() == [[[1, 2]]] and weights.tolist() == [[[0.5, 0.5]]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("half", [1, 8, 32])
def test_a_product_finds_the_other_of_each_rotated_pair_exactly(half, dtype):
    x = jax.random.normal(jax.random.key(half), (2, 5, 3, 64), dtype)
    found, product = others_of_pairs(half, x), others_of_pairs_on_tpu(half, x)
    assert found.dtype == product.dtype == jnp.float32
    np.testing.assert_array_equal(found, product)
    x = np.asarray(x.astype(jnp.float32))
    np.testing.assert_array_equal(found[..., :half], x[..., half : 2 * half])
    np.testing.assert_array_equal(found[..., half : 2 * half], x[..., :half])
    assert not np.asarray(found[..., 2 * half :]).any()
