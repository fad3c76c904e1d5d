"""The gated delta rule in chunks and as a Pallas kernel, against transformers' recurrence.

Rows are packed, and every document is computed alone in transformers.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import rare_but
from delta_reference import QWEN3_5
from rounding import assert_within_rounding
from test_families import released
from test_model import batch_of
from tiny_models import MOE_TEXT, TEXT

from activation_extraction.model.delta_kernel import pallas_delta_rule
from activation_extraction.model.delta_net import (
    CHUNK,
    gated_delta_rule,
    token_by_token,
)
from benchmarks.step_plan import padded_flops
from qwen2_jax_with_hooks import FAMILIES

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
# Documents of each row: at the edges of chunks and blocks and within them; the last not whole.
LENGTHS = [[CHUNK, 3, CHUNK - 3, 1, CHUNK, CHUNK - 2, 20], [3 * CHUNK + 7, 1, 2]]
LAYOUTS = {
    "one row, one chunk": ([[3, 1, 17]], (2, 1, 16, 16)),
    "longer than chunks": ([[CHUNK * 2 + 5, 1, CHUNK, 2], [9, 190, 3]], (2, 3, 8, 24)),
    "at the edges of chunks": (LENGTHS, (1, 4, 24, 8)),
    "many short ones, a row of padding": ([[1, 2, 3, 4, 5] * 9, [7] * 20, []], (2, 3, 8, 24)),
}


def segments(lengths, padding):
    """Segment ids of rows with documents of these lengths, and where each document is."""
    (_, ids, _), places = batch_of(lengths, max(map(sum, lengths)) + padding, 1)
    return ids, places


def inputs(shape, sizes, seed=0):
    """q, k, v, log decay and beta; some heads forget at once, some hardly at all.

    sizes: key heads, value heads of each, key size, value size.
    """
    keys, of_each, key_size, value_size = sizes
    values = keys, of_each
    draw = np.random.default_rng(seed).standard_normal
    q, k = (draw((*shape, keys, key_size), np.float32) for _ in range(2))
    v = draw((*shape, *values, value_size), np.float32)
    slopes = np.geomspace(1e-3, 16, keys * of_each, dtype=np.float32).reshape(values)
    log_decay = -slopes * np.logaddexp(0, draw((*shape, *values), np.float32))
    return q, k, v, log_decay, 1 / (1 + np.exp(-2 * draw((*shape, *values), np.float32)))


def each_alone(function, arrays, places):
    """What a function of torch computes of each document, put together as rows."""
    import torch

    rows = None
    for row, place in places:
        got = function(*(torch.tensor(x[row : row + 1, place]) for x in arrays)).numpy()
        if rows is None:
            rows = np.zeros((*arrays[0].shape[:2], *got.shape[2:]), np.float32)
        rows[row, place] = got[0]
    return rows


def by_transformers(rule, q, k, v, log_decay, beta):
    """Computes the rule with this function of transformers."""
    from transformers.models.qwen3_5 import modeling_qwen3_5

    of_values = (x.flatten(2, 3) for x in (v, log_decay, beta))
    arguments = dict(zip(("value", "g", "beta"), of_values, strict=True))
    function = getattr(modeling_qwen3_5, rule)
    return function(q, k, **arguments, use_qk_l2norm_in_kernel=True)[0].unflatten(2, v.shape[2:4])


recurrence = partial(by_transformers, "torch_recurrent_gated_delta_rule")
in_chunks = partial(by_transformers, "torch_chunk_gated_delta_rule")
interpreted = partial(pallas_delta_rule, interpret=True)


def repeating(arrays):
    """Equal tokens that forget nothing: the system of a chunk is as hard as it can be."""
    q, k, v, log_decay, beta = arrays
    k[:], log_decay[:], beta[:] = k[:, :1], 0, 1
    return arrays


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("change", [tuple, repeating])
def test_each_document_is_computed_as_if_it_were_alone(layout, change):
    lengths, sizes = LAYOUTS[layout]
    ids, places = segments(lengths, padding=5)
    arrays = change(inputs(ids.shape, sizes))
    got = np.asarray(jax.jit(gated_delta_rule)(*arrays, ids))
    assert got.shape == arrays[2].shape and got.dtype == np.float32
    assert np.isfinite(got).all()  # padding may be anything else
    terms = CHUNK + arrays[0].shape[-1]  # of what tokens of a chunk have written, and of the state

    def alone(*arrays):
        return each_alone(recurrence, arrays, places)[ids > 0]

    assert_within_rounding(got[ids > 0], alone, arrays, terms)


def sizes_of(delta):
    return delta.key_heads, delta.values_per_key, delta.key_size, delta.value_size


RELEASED = 1, 2, 128, 128
TINY = {sizes_of(FAMILIES.config(raw).delta) for raw in (TEXT, MOE_TEXT, *QWEN3_5.values())}


def errors(found, exact):
    """The root mean square of the error, and the largest."""
    error = np.asarray(found, np.float64) - exact
    return np.array([np.sqrt(np.mean(np.square(error))), np.abs(error).max()])


@pytest.mark.parametrize("keys,values", [(FLOAT32,) * 2, (BFLOAT16,) * 2, (BFLOAT16, FLOAT32)])
@pytest.mark.parametrize(
    "sizes", rare_but([min(TINY), RELEASED], [*sorted(TINY), RELEASED]), ids=str
)
def test_the_kernel_is_as_close_as_the_chunks_of_transformers(sizes, keys, values):
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


def test_the_kernel_with_equal_tokens_that_forget_nothing():
    ids, places = segments([[2 * CHUNK + 44], [150, 150]], padding=0)
    arrays = repeating(inputs(ids.shape, (2, 3, 8, 24)))
    exact = token_by_token(*arrays, ids)
    theirs = errors(each_alone(in_chunks, arrays, places), exact)
    assert (errors(jax.jit(interpreted)(*arrays, ids), exact) <= 1.25 * theirs).all()


def shapes_of(name, dtype, parts, rows=8, length=2048, sharding=None):
    """What a device has of some rows of a released model whose heads are split in `parts`."""
    keys, of_each, key_size, value_size = sizes_of(
        FAMILIES.config(released(f"Qwen3.5-{name}")).delta
    )
    tokens, heads = (rows, length), (keys // parts, of_each)
    shapes = [((*tokens, heads[0], key_size), dtype)] * 2 + [((*tokens, *heads, value_size), dtype)]
    shapes += [((*tokens, *heads), FLOAT32)] * 2 + [(tokens, jnp.int32)]
    return [jax.ShapeDtypeStruct(*each, sharding=sharding) for each in shapes]


@pytest.mark.parametrize("name", ["9B", "397B-A17B"])
@pytest.mark.parametrize("tile,most", [(128, 0.9e6), (256, 1.7e6)])
def test_the_kernel_leaves_little_of_a_matrix_unit_empty(name, tile, most):
    """A token of a value head took 1.1 and 4 million operations while the parts of float32 were
    multiplied one after the other, and a chunk beside zeros."""
    shapes = shapes_of(name, BFLOAT16, 1)
    of_each_token = padded_flops(pallas_delta_rule, shapes, tile) / np.prod(shapes[2].shape[:-1])
    assert of_each_token < most
