"""Experts on several devices: every token's sum is the one that NumPy computes of all experts.

test_model.py has models on meshes of all kinds; here is what is odd.
"""

from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted import pallas
from jax.sharding import Mesh

from activation_extraction.model.experts import (
    Experts,
    Stacks,
    sum_experts_in_tiles,
    sum_experts_with_ragged_dot,
)
from activation_extraction.model.mesh import Layout

EXPERTS, HIDDEN, WIDTH, PER_TOKEN = 8, 16, 6, 3


def experts_of(shape, dtype="float32"):
    """Experts on a mesh of this shape, and their random weights."""
    count = int(np.prod([*shape.values()]))
    mesh = Mesh(np.array(jax.devices()[:count]).reshape([*shape.values()]), tuple(shape))
    config = SimpleNamespace(sizes={"E": EXPERTS, "D": HIDDEN, "M": WIDTH})
    rng, names = np.random.default_rng(5), ("gate_proj", "up_proj", "down_proj")
    shapes = [(EXPERTS, HIDDEN, WIDTH)] * 2 + [(EXPERTS, WIDTH, HIDDEN)]
    weights = [rng.normal(size=each).astype(np.float32) for each in shapes]
    params = {
        name: {"weight": jnp.asarray(x, dtype)} for name, x in zip(names, weights, strict=True)
    }
    module = Experts(config, jnp.dtype(dtype), sum_experts_in_tiles, Layout(mesh))
    return weights, jax.jit(lambda *given: module.apply({"params": params}, *given))


def tokens(rows, length):
    """Tokens, the weights of their experts, and their numbers, of which some mean no expert."""
    rng = np.random.default_rng(rows * length)
    x = rng.normal(size=(rows, length, HIDDEN)).astype(np.float32)
    weights = rng.random((rows, length, PER_TOKEN), np.float32)
    chosen = np.argsort(rng.random((rows, length, EXPERTS)), axis=-1)[..., :PER_TOKEN]
    chosen[rng.random(chosen.shape) < 0.2] = EXPERTS
    return x, weights, chosen.astype(np.int32)


def expected(matrices, x, weights, chosen):
    gate, up, down = (np.float64(matrix) for matrix in matrices)
    gates, ups = (np.einsum("btd,edm->btem", x, each) for each in (gate, up))
    of_all = np.einsum("btem,emd->bted", gates / (1 + np.exp(-gates)) * ups, down)
    every = np.where(chosen[..., None] == np.arange(EXPERTS), weights[..., None], 0).sum(axis=2)
    return np.einsum("bted,bte->btd", of_all, every)


@pytest.mark.parametrize(
    "shape,rows,length",
    [
        ({"expert": 4}, 8, 5),  # an odd number has two halves all the same
        ({"expert": 8}, 8, 1),  # and one token has no halves
    ],
)
def test_sums_on_a_ring_of_devices(shape, rows, length):
    given = tokens(rows, length)
    matrices, run = experts_of(shape)
    wanted, found = expected(matrices, *given), run(*given)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("compute_expert_sum", [sum_experts_with_ragged_dot, pallas])
def test_sums_of_some_tokens_are_computed_by_themselves(compute_expert_sum):
    rng = np.random.default_rng(8)
    x, weights = rng.normal(size=(1, 64, 128)), rng.random((1, 64, PER_TOKEN), np.float32)
    chosen = rng.integers(0, EXPERTS + 1, (1, 64, PER_TOKEN)).astype(np.int32)
    drawn = x, *(0.1 * rng.normal(size=(3, 1, EXPERTS, 128, 128)))
    x, *matrices = (jnp.asarray(drawn_array, jnp.bfloat16) for drawn_array in drawn)
    stacks = Stacks(jnp.int32(0), *matrices)
    expert_sum = compute_expert_sum(x[0], weights[0], chosen[0], stacks, parts=2)
    wanted = expected([matrix[0] for matrix in matrices], np.float64(x), weights, chosen)[0]
    assert np.abs(expert_sum - wanted).max() < 0.02 * np.abs(wanted).max()


def test_each_tpu_of_a_ring_is_beside_the_next_one():
    """Two hosts have eight."""
    there = np.empty((1, 8), object)
    there[0] = [Mock(coords=(x, y, 0)) for y in range(4) for x in range(2)]
    ring = Layout(Mesh(there, ("data", "expert"))).ring("expert")
    assert ring == [0, 2, 4, 6, 7, 5, 3, 1]


def test_bfloat16_travels_from_device_to_device_in_any_order(monkeypatch):
    """In bfloat16 half as much travels, and no device waits for the tokens of all others."""
    monkeypatch.setattr(Layout, "ring", lambda self, axis: [0, 1, 3, 2])
    x, weights, chosen = tokens(4, 6)
    matrices, run = experts_of({"expert": 4}, dtype="bfloat16")
    given = jnp.asarray(x, jnp.bfloat16), weights, chosen
    lines = str(jax.make_jaxpr(run)(*given)).splitlines()
    hops = [line.split(" = ")[0].strip() for line in lines if "ppermute[" in line]
    of_tokens_and_sums = [hop for hop in hops if hop.endswith(f"{HIDDEN}]")]
    assert len(of_tokens_and_sums) == 2 * 2 * 3  # two ways, there and back, three hops
    assert all(":bf16[" in hop for hop in of_tokens_and_sums)
    assert not [line for line in lines if "all_gather[" in line or "reduce_scatter[" in line]
    wanted = expected(matrices, x, weights, chosen)
    assert np.abs(np.float64(run(*given)) - wanted).max() < 0.02 * np.abs(wanted).max()
