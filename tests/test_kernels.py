"""The kernels of attention against its definition, run in Pallas's interpret mode on the CPU."""

import base64
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokamax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from rounding import assert_rounded_alike, assert_within_rounding
from test_trial import trials_of_experts

from activation_extraction.model.attention import dense_attention
from activation_extraction.model.kernels import (
    cudnn_attention,
    splash_attention,
    tokamax_experts,
)
from activation_extraction.model.trial import TOLERANCE, largest_error

# T, S, first query, query heads, key/value heads, head size
CASES = {
    "groups of four": (256, 256, 0, 4, 1, 64),
    "second half of the queries": (128, 256, 128, 4, 2, 128),
    "rows that end within a block": (200, 200, 0, 2, 2, 128),
    "few queries of a long row": (72, 360, 216, 2, 1, 64),
}


def inputs(case, dtype):
    """Two packed rows of three segments; the second ends in padding."""
    length, keys, first, heads, kv_heads, size = CASES[case]
    generator = np.random.default_rng(0)
    shapes = (2, length, heads, size), *[(2, keys, kv_heads, size)] * 2
    q, k, v = (jnp.asarray(generator.standard_normal(shape), dtype) for shape in shapes)
    segments = np.ones((2, keys), np.int32)
    segments[:, keys // 3 :], segments[:, keys // 2 :] = 2, 3
    segments[1, -keys // 5 :] = 0
    return (
        q * (2 * size**-0.5),
        k,
        v,
        jnp.asarray(segments[:, first : first + length]),
        jnp.asarray(segments),
    )


@pytest.mark.long
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "traced,dtype", [(False, jnp.float32), (True, jnp.float32), (True, jnp.bfloat16)]
)
def test_splash_attention_computes_attention(dtype, case, traced, window):
    arrays, first = inputs(case, dtype), CASES[case][2]
    run = partial(splash_attention, window=window, interpret=True)
    definition = partial(dense_attention, window=window)
    got = jax.jit(run)(*arrays, first) if traced else run(*arrays, first)
    exact = definition(*(x.astype(jnp.float32) for x in arrays[:3]), *arrays[3:], first)
    assert got.dtype == dtype
    if dtype == jnp.float32:
        assert_within_rounding(
            got, lambda *qkv: definition(*qkv, *arrays[3:], first), arrays[:3], CASES[case][1]
        )
    else:  # no worse than rounding probabilities and values once each
        assert_rounded_alike(got, definition(*arrays, first), exact)


@pytest.mark.long
def test_large_scores_are_not_rounded():
    """Scores of some hundreds, as the biases of Qwen's keys make them: an error is multiplied."""
    q, k, v, *segments = inputs("rows that end within a block", jnp.bfloat16)
    arrays = 8 * q, 4 * k, v, *segments
    exact = dense_attention(*(x.astype(jnp.float32) for x in arrays[:3]), *segments, 0)
    rounded = dense_attention(*arrays, 0)
    assert_rounded_alike(splash_attention(*arrays, 0, interpret=True), rounded, exact)


def lowered(attention, platform, dtype, case="second half of the queries"):
    return program(
        lambda *arrays: attention(*arrays, CASES[case][2]), inputs(case, dtype), platform
    )


def program(function, arrays, platform):
    """For a platform that is not here; newer versions of JAX ask for which GPU."""
    gpu = AbstractDevice("NVIDIA H100 80GB HBM3", platform="gpu", num_cores=132)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=gpu)):
        traced = jax.jit(function).trace(*arrays)
        return traced.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_tpu_multiplies_float32_as_such(dtype):
    text = lowered(splash_attention, "tpu", dtype)
    kernel = re.search(r"\\22body\\22: ?\\22([^\\]+)", text)
    assert kernel is not None
    exact = b"contract_precision<fp32>" in base64.b64decode(kernel[1])
    assert exact == (dtype == jnp.float32)


def test_a_gpu_multiplies_float32_as_such():
    text = lowered(cudnn_attention, "cuda", jnp.float32)
    assert "cudnn" not in text and "precision = [HIGHEST, HIGHEST]" in text


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_what_cudnn_is_asked_for_is_attention(case, monkeypatch):
    """cuDNN itself needs a GPU: XLA answers the same call in its place."""
    asked, answer = [], jax.nn.dot_product_attention

    def ask(*arrays, implementation, **how):
        asked.append(implementation)
        with jax.numpy_dtype_promotion("standard"):  # JAX's own code mixes dtypes
            return answer(*arrays, **how)

    monkeypatch.setattr(jax.nn, "dot_product_attention", ask)
    arrays, first = inputs(case, jnp.bfloat16), CASES[case][2]
    got = cudnn_attention(*arrays, first)
    exact = dense_attention(*(x.astype(jnp.float32) for x in arrays[:3]), *arrays[3:], first)
    assert asked == ["cudnn"]
    assert_rounded_alike(got, dense_attention(*arrays, first), exact)


@pytest.mark.filterwarnings("ignore:jax.experimental.pallas.dot was moved:DeprecationWarning")
def test_tokamax_can_be_lowered_from_here():
    ((_, arrays, _),) = trials_of_experts((8, 256, 128), jnp.dtype("bfloat16"))
    with tokamax.config.cross_compile(True), jax.numpy_dtype_promotion("standard"):
        text = program(tokamax_experts, arrays, "cuda")
    assert text.count("custom_call @__gpu$xla.gpu.triton") == 3 and "chlo.ragged_dot" not in text


def test_tokamax_gets_no_float32():
    ((_, arrays, _),) = trials_of_experts((8, 256, 128), jnp.dtype("float32"))
    text = program(tokamax_experts, arrays, "cuda")
    assert "triton" not in text and "mosaic" not in text and "[HIGHEST, HIGHEST]" in text


@pytest.mark.parametrize("experts", [1, 8])
def test_what_tokamax_is_asked_for_are_experts(experts, monkeypatch):
    """Its kernels need a GPU: its own definition answers in their place."""
    asked, answer = [], tokamax.ragged_dot

    def ask(*arrays, implementation, **how):
        asked.append(implementation)
        with jax.numpy_dtype_promotion("standard"):  # its own code mixes dtypes
            return answer(*arrays, implementation="xla", **how)

    monkeypatch.setattr(tokamax, "ragged_dot", ask)
    trials = trials_of_experts((experts, 72, 40), jnp.dtype("bfloat16"))
    error = largest_error(tokamax_experts, trials)
    assert asked == [("mosaic", "triton")] * 3
    assert error < TOLERANCE["bfloat16"] / 2
