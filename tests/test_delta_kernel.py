"""The gated delta rule in chunks and as a Pallas kernel: as precise as transformers' chunks.

Rows are packed, and every document is computed alone in transformers. The definition, token by
token, is exact.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_model import batch_of

from activation_extraction.model.delta_kernel import pallas_delta_rule
from activation_extraction.model.delta_net import CHUNK, gated_delta_rule, token_by_token

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")
# Documents of each row: at the edges of chunks and blocks and within them; the last not whole; many
# short ones; only padding.
LENGTHS = [[CHUNK, 3, CHUNK - 3, 1, CHUNK, CHUNK - 2, 20], [3 * CHUNK + 7, 1, 2]]
LENGTHS += [[1, 2, 3, 4, 5] * 9, []]
ODD, RELEASED = (2, 3, 16, 24), (1, 2, 128, 128)  # see `inputs`


def segments(lengths, padding):
    """Segment ids of rows with documents of these lengths, and where each document is."""
    (_, ids, _), places = batch_of(lengths, max(map(sum, lengths)) + padding, 1)
    return ids, places


def inputs(shape, sizes):
    """Returns q, k, v, log decay and beta; some heads forget at once, some hardly at all.

    sizes: key heads, value heads of each, key size, value size.
    """
    keys, of_each, key_size, value_size = sizes
    values = keys, of_each
    draw = np.random.default_rng(0).standard_normal
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


def errors(found, exact):
    """The root mean square of the error, and the largest."""
    error = np.asarray(found, np.float64) - exact
    return np.array([np.sqrt(np.mean(np.square(error))), np.abs(error).max()])


@pytest.mark.parametrize(
    "rule,sizes,keys,values,change,most",
    [
        (kernel, RELEASED, FLOAT32, FLOAT32, repeating, 1.25),
        (kernel, RELEASED, BFLOAT16, BFLOAT16, tuple, 1.25),
        (kernel, ODD, BFLOAT16, FLOAT32, tuple, 1.25),
        (gated_delta_rule, RELEASED, FLOAT32, FLOAT32, tuple, 1.25),
        (gated_delta_rule, ODD, FLOAT32, FLOAT32, repeating, 4),  # up to 2.5 times was seen
    ],
)
def test_a_rule_is_as_close_as_the_chunks_of_transformers(rule, sizes, keys, values, change, most):
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
