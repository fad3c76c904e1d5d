"""The gated delta net over packed rows, against transformers with each document alone."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rounding import assert_within_rounding

from activation_extraction.model.delta_net import (
    CHUNK,
    gated_delta_rule,
    gated_norm,
    short_convolution,
)

LAYOUTS = {  # the lengths of the documents of each row
    "one row, one chunk": [[3, 1, 17]],
    "longer than chunks": [[CHUNK * 2 + 5, 1, CHUNK, 2], [9, 190, 3]],
    "at the edges of chunks": [[CHUNK, CHUNK * 2, CHUNK - 1, 1, 1], [CHUNK - 1, 1, CHUNK + 1]],
    "many short ones": [[1, 2, 3, 4, 5] * 9, [7] * 20],
    "a row of padding": [[], [30]],
}
SIZES = {  # key heads, value heads of each, key size, value size
    "as many": (2, 1, 16, 16),
    "more values": (2, 3, 8, 24),
    "one key": (1, 4, 24, 8),
}


def segments(lengths, padding):
    """Segment ids of rows with documents of these lengths, and where each document is."""
    size = max(map(sum, lengths)) + padding
    ids, places = np.zeros((len(lengths), size), np.int32), []
    for row, of_row in enumerate(lengths):
        ends = np.cumsum(of_row, dtype=int)
        for number, (end, length) in enumerate(zip(ends, of_row, strict=True), 1):
            ids[row, end - length : end] = number
            places.append((row, slice(end - length, end)))
    return ids, places


def inputs(shape, sizes, seed=0):
    """q, k, v, log decay and beta; some heads forget at once, some hardly at all."""
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


def assert_delta_rule(arrays, ids, places):
    """Asserts that ours, in chunks, is the recurrence but for rounding. Padding may be anything."""
    got = np.asarray(jax.jit(gated_delta_rule)(*arrays, ids))
    assert got.shape == arrays[2].shape and got.dtype == np.float32
    assert np.isfinite(got).all()
    terms = CHUNK + arrays[0].shape[-1]  # of what tokens of a chunk have written, and of the state

    def alone(*arrays):
        return each_alone(recurrence, arrays, places)[ids > 0]

    assert_within_rounding(got[ids > 0], alone, arrays, terms)


@pytest.mark.long
@pytest.mark.parametrize("layout,sizes", [*zip(LAYOUTS, [*SIZES, *SIZES], strict=False)])
def test_each_document_is_computed_as_if_it_were_alone(layout, sizes):
    ids, places = segments(LAYOUTS[layout], padding=5)
    assert_delta_rule(inputs(ids.shape, SIZES[sizes]), ids, places)


def test_equal_tokens_that_forget_nothing():
    """Of a document that repeats itself: the system of a chunk is as far from easy as it can be."""
    ids, places = segments([[100, 150]], padding=0)
    q, k, v, log_decay, beta = inputs(ids.shape, SIZES["more values"])
    k[:], log_decay[:], beta[:] = k[:, :1], 0, 1
    assert_delta_rule((q, k, v, log_decay, beta), ids, places)


def test_the_convolution_sees_no_other_document():
    from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_fn

    ids, places = segments([[5, 1, 2, 3, 4, 9], [11]], padding=3)
    draw = np.random.default_rng(0).standard_normal
    x, weight = draw((*ids.shape, 6), np.float32), draw((6, 4), np.float32)

    def alone(x, weight):
        import torch

        def of_one(x):
            return causal_conv1d_fn(x.mT, torch.tensor(weight), activation="silu").mT

        return each_alone(of_one, [x], places)[ids > 0]

    got = short_convolution(x, weight, ids)
    assert_within_rounding(got[ids > 0], alone, (x, weight), terms=4)
    by_head = short_convolution(x.reshape(*ids.shape, 2, 3), weight.reshape(2, 3, 4), ids)
    np.testing.assert_array_equal(by_head.reshape(x.shape), got)


def test_the_norm_comes_before_the_gate():
    import torch
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

    draw = np.random.default_rng(0).standard_normal
    x, gate, weight = (draw(shape, np.float32) for shape in [(7, 12), (7, 12), (12,)])

    def reference(x, gate, weight):
        module = Qwen3_5RMSNormGated(12, eps=1e-3)
        module.weight.data = torch.tensor(weight)
        return module(torch.tensor(x), torch.tensor(gate)).detach().numpy()

    got = gated_norm(jnp.asarray(x), jnp.asarray(gate), jnp.asarray(weight), 1e-3)
    assert_within_rounding(got, reference, (x, gate, weight), terms=12)
