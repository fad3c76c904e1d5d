"""The gated delta rule in chunks and as a Pallas kernel: as precise as transformers' chunks.

Rows are packed, and every document is computed alone in transformers. The definition, token by
token, is exact.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import rare_but
from test_families import released
from test_model import batch_of

from activation_extraction.model.delta_kernel import pallas_delta_rule
from activation_extraction.model.delta_net import CHUNK, gated_delta_rule, token_by_token
from qwen2_jax_with_hooks import FAMILIES

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
# Documents of each row: at the edges of chunks and blocks and within them; the last not whole; many
# short ones; only padding.
LENGTHS = [[CHUNK, 3, CHUNK - 3, 1, CHUNK, CHUNK - 2, 20], [3 * CHUNK + 7, 1, 2]]
LENGTHS += [[1, 2, 3, 4, 5] * 9, []]
SIZES = [(1, 4, 32, 16), (1, 2, 128, 128), (4, 2, 16, 16), (2, 3, 16, 24)]  # the second: released


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


def in_chunks(q, k, v, log_decay, beta):
    """Computes the rule with a function of transformers."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    of_values = (x.flatten(2, 3) for x in (v, log_decay, beta))
    arguments = dict(zip(("value", "g", "beta"), of_values, strict=True))
    found = torch_chunk_gated_delta_rule(q, k, **arguments, use_qk_l2norm_in_kernel=True)[0]
    return found.unflatten(2, v.shape[2:4])


kernel = partial(pallas_delta_rule, interpret=True)


def repeating(arrays):
    """Equal tokens that forget nothing: the system of a chunk is as hard as it can be."""
    q, k, v, log_decay, beta = arrays
    k[:], log_decay[:], beta[:] = k[:, :1], 0, 1
    return arrays


def sizes_of(delta):
    return delta.key_heads, delta.values_per_key, delta.key_size, delta.value_size


def errors(found, exact):
    """The root mean square of the error, and the largest."""
    error = np.asarray(found, np.float64) - exact
    return np.array([np.sqrt(np.mean(np.square(error))), np.abs(error).max()])


@pytest.mark.parametrize(
    "rule,keys,values,change,most",
    [
        *((kernel, FLOAT32, FLOAT32, change, 1.25) for change in (tuple, repeating)),
        *((kernel, BFLOAT16, dtype, tuple, 1.25) for dtype in (BFLOAT16, FLOAT32)),
        (gated_delta_rule, FLOAT32, FLOAT32, tuple, 1.25),
        (gated_delta_rule, FLOAT32, FLOAT32, repeating, 4),  # up to 2.5 times was seen
    ],
)
@pytest.mark.parametrize("sizes", rare_but(SIZES[:2], SIZES), ids=str)
def test_a_rule_is_as_close_as_the_chunks_of_transformers(sizes, rule, keys, values, change, most):
    """most: how many times as large errors may be. Padding may be anything but infinite, and does
    not reach others."""
    ids, places = segments(LENGTHS, padding=9)
    *narrow, log_decay, beta = change(inputs(ids.shape, sizes))
    narrow = [jnp.asarray(x, dtype) for x, dtype in zip(narrow, (keys, keys, values), strict=True)]
    wide = [np.asarray(x.astype(jnp.float32)) for x in narrow]
    exact = token_by_token(*wide, log_decay, beta, ids)[ids > 0]
    got = jax.jit(rule)(*narrow, log_decay, beta, ids)
    assert got.dtype == values and got.shape == wide[2].shape
    assert jnp.isfinite(got).all()
    theirs = each_alone(in_chunks, (*wide, log_decay, beta), places)
    theirs = np.asarray(jnp.asarray(theirs, values).astype(jnp.float32))[ids > 0]
    ours = np.asarray(got.astype(jnp.float32))[ids > 0]
    assert errors(theirs, exact)[0] < 0.01 * errors(0, exact)[0]  # the definition is right
    assert (errors(ours, exact) <= most * errors(theirs, exact)).all()


def shapes_of(name, dtype, parts, rows=8, length=2048, sharding=None):
    """What a device has of some rows of a released model whose heads are split in `parts`."""
    keys, of_each, key_size, value_size = sizes_of(
        FAMILIES.config(released(f"Qwen3.5-{name}")).delta
    )
    tokens, heads = (rows, length), (keys // parts, of_each)
    shapes = [((*tokens, heads[0], key_size), dtype)] * 2 + [((*tokens, *heads, value_size), dtype)]
    shapes += [((*tokens, *heads), FLOAT32)] * 2 + [(tokens, jnp.int32)]
    return [jax.ShapeDtypeStruct(*each, sharding=sharding) for each in shapes]
