"""The gated delta rule as one Pallas kernel for TPUs, in which nothing but its result reaches HBM.

It computes what `gated_delta_rule` of delta_net.py does, in the same chunks, but a chunk's system,
its inverse and the state stay in the chip's fast memory. A program of the grid computes a block of
two chunks of one key head and of its value heads. The blocks of a row are the last axis of the
grid, and the state waits in scratch memory for the next one.

A chunk's system would fill half of a register, and a quarter of a matrix unit. So the systems of a
block's two chunks lie side by side, (C, 2C): row i holds what token i of the first chunk takes of
that chunk's tokens, then the same for the second chunk. To be inverted, they are multiplied by
arrays in which one chunk's rows lie above the other's.

Products of float32 have the precision HIGHEST: each array is the sum of three arrays in bfloat16,
and of their nine products the six largest count. With only the three largest, the errors of a
chunk's solution would be 15 to 50 times as large. The six products are computed as one that is six
times as deep, because each of them alone would fill half or a quarter of the depth of a matrix
unit, which has 128 rows, and 256 in v6e. Queries and keys in bfloat16 are multiplied before they
are normalised, while they are exact: one product with each other, three with float32.

The letters are those of delta_net.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from activation_extraction.model.delta_net import CHUNK, inverse_length
from activation_extraction.model.numerics import einsum

TWO_CHUNKS = 2 * CHUNK  # tokens: as many as a TPU's register has lanes
SUBLANES = 8  # rows of a float32 register: arrays cut at multiples of it stay in place
FORGETS = -1e30  # a log decay whose exp is 0; sums of it are finite


def pallas_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    log_decay: Array,
    beta: Array,
    segment_ids: Array,
    interpret: bool = False,
) -> Array:
    """Computes the rule on TPUs.

    Segments are kept apart by their first tokens, which forget everything.

    Args:
        q: The queries. See `DeltaRule` for this and the next five arguments, and for the result.
        k: The keys.
        v: The values.
        log_decay: The log decay.
        beta: The rates.
        segment_ids: The segment ids.
        interpret: Whether Pallas interprets the kernel, for tests without a TPU.
    """
    rows, length, heads, values_per_key, value_size = v.shape
    key_size = k.shape[-1]
    is_first = jnp.pad(segment_ids[:, :-1], [(0, 0), (1, 0)]) != segment_ids
    log_decay = jnp.where(is_first[..., None, None], FORGETS, log_decay.astype(jnp.float32))
    gates = jnp.concatenate([log_decay, beta.astype(jnp.float32)], axis=-1)
    gates = jnp.moveaxis(_whole_blocks(gates), 1, 3)  # BK(2G)T
    heads_first = [jnp.moveaxis(_whole_blocks(x), 1, -2) for x in (q, k, v)]  # BKTD, BKTD, BKGTU

    def tokens(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, None, TWO_CHUNKS, width), lambda b, k, n: (b, k, n, 0))

    of_values = pl.BlockSpec(
        (None, None, values_per_key, TWO_CHUNKS, value_size), lambda b, k, n: (b, k, 0, n, 0)
    )
    of_gates = pl.BlockSpec(
        (None, None, 2 * values_per_key, TWO_CHUNKS), lambda b, k, n: (b, k, 0, n)
    )
    out = pl.pallas_call(
        _compute_block,
        grid=(rows, heads, gates.shape[-1] // TWO_CHUNKS),
        in_specs=[tokens(key_size), tokens(key_size), of_values, of_gates],
        out_specs=of_values,
        out_shape=jax.ShapeDtypeStruct(heads_first[2].shape, v.dtype),
        scratch_shapes=[pltpu.VMEM((key_size, values_per_key * value_size), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="gated_delta_rule",
    )(*heads_first, gates)
    return jnp.moveaxis(out, -2, 1)[:, :length]


def _whole_blocks(x: Array) -> Array:
    """Pads (B, T, ...) with zeros to whole blocks of tokens."""
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % TWO_CHUNKS), *[(0, 0)] * (x.ndim - 2)])


def _compute_block(
    q_ref: Any, k_ref: Any, v_ref: Any, gates_ref: Any, out_ref: Any, state: Any
) -> None:
    """Computes a block of T = 2C tokens.

    See `_prepare` and `_step` of delta_net.py. Here a chunk reads the state before its system is
    solved, for all heads at once:

        added = inverse (beta (v - since k S));  o = since q S + within added

    Args:
        q_ref: (T, D).
        k_ref: (T, D).
        v_ref: (G, T, U).
        gates_ref: The log decays of all value heads, then their betas, (2G, T).
        out_ref: The outputs, (G, T, U).
        state: S of all value heads side by side, (D, GU).
    """

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        state[...] = jnp.zeros_like(state)

    q, k = q_ref[...], k_ref[...]
    q_scale, k_scale = q.shape[-1] ** -0.5 * inverse_length(q), inverse_length(k)  # T1
    k_row = jnp.broadcast_to(k_scale, (k_scale.shape[0], SUBLANES)).T[:1]  # 1T
    among_keys, of_queries = (_beside(einsum("ID,JD->IJ", x, k)) * k_row for x in (k, q))
    of_queries *= _beside(q_scale)
    log_decays, betas = jnp.split(gates_ref[...].T, 2, axis=1)  # TG
    heads, _, value_size = v_ref.shape
    inverses = []
    withins = []
    sinces = []
    until_ends = []
    for head in range(heads):
        within, since_begin = _decays(log_decays[:, head, None])
        inverses.append(_inverse(_beside(betas[:, head, None] * k_scale) * among_keys * within))
        withins.append(of_queries * within)
        sinces.append(since_begin)
        until_ends.append(k_scale * within[-SUBLANES:].T[:, -1:])  # T1
    for chunk in (0, 1):
        tokens = slice(chunk * CHUNK, (chunk + 1) * CHUNK)
        since = [of_head[chunk] for of_head in sinces]
        read = _product("CD,DU->CU", jnp.concatenate([k[tokens], q[tokens]]), state[...])
        read_by_keys, read_by_queries = jnp.split(read, 2)
        by_keys = jnp.split(k_scale[tokens] * read_by_keys, heads, axis=1)
        by_queries = jnp.split(q_scale[tokens] * read_by_queries, heads, axis=1)
        added = []
        for head in range(heads):
            missing = v_ref[head, tokens].astype(jnp.float32) - since[head] * by_keys[head]
            missing *= betas[tokens, head, None]
            added.append(_product("IJ,JU->IU", inverses[head][:, tokens], missing))
            out = since[head] * by_queries[head]
            out += _product("IJ,JU->IU", withins[head][:, tokens], added[head])
            out_ref[head, tokens] = out.astype(out_ref.dtype)
        kept = [jnp.broadcast_to(of_head[-1:], (1, value_size)) for of_head in since]
        left_at_end = [until_ends[head][tokens] * added[head] for head in range(heads)]
        written = _product("CD,CU->DU", k[tokens], jnp.concatenate(left_at_end, axis=1))
        state[...] = jnp.concatenate(kept, axis=1) * state[...] + written


def _product(equation: str, x: Array, y: Array) -> Array:
    """Computes `einsum` in the precision HIGHEST, for a float32 y.

    The products of parts (see `_parts`) that count are one product: the parts lie one after the
    other along the axis that is summed. The smallest products come first, because a sum of small
    numbers is rounded little.

    Args:
        equation: The equation, such as "CD,DU->CU"; the summed axis is the first one of y.
        x: float32 or bfloat16.
        y: float32.
    """
    x_parts = _parts(x)
    y_parts = _parts(y)
    left = []
    right = []
    for rank in (2, 1, 0):  # the product of parts i and j has the rank i + j
        for place, x_part in enumerate(x_parts[: rank + 1]):
            left.append(x_part)
            right.append(y_parts[rank - place])
    summed = equation.index(equation[3])  # of "CD,DU->CU", the D
    return einsum(equation, jnp.concatenate(left, axis=summed), jnp.concatenate(right))


def _parts(x: Array) -> list[Array]:
    """Returns the arrays in bfloat16 whose sum is x, the largest first."""
    if x.dtype == jnp.bfloat16:
        return [x]
    parts = []
    for _ in range(3):
        parts.append(x.astype(jnp.bfloat16))
        x -= parts[-1].astype(jnp.float32)
    return parts


def _places() -> tuple[Array, Array, Array]:
    """Returns the row, the column and the chunk of every number of two systems side by side."""
    row, lane = (lax.broadcasted_iota(jnp.int32, (CHUNK, TWO_CHUNKS), axis) for axis in (0, 1))
    return row, lane & (CHUNK - 1), lane & CHUNK


def _beside(x: Array) -> Array:
    """Puts the second chunk's rows beside the first one's.

    Maps (2C, 2C) to (C, 2C), each chunk's own columns; and (2C, 1), the same for all columns.
    """
    return jnp.where(_places()[2] == 0, x[:CHUNK], x[CHUNK:])


def _decays(log_decay: Array) -> tuple[Array, list[Array]]:
    """Returns what `_decays` of delta_net.py returns, for two chunks.

    Args:
        log_decay: (2C, 1).

    Returns:
        The decay between tokens, (C, 2C), and for each chunk, the decay since its beginning,
        (C, 1).
    """
    row, column, _ = _places()
    log_decay = _beside(log_decay)
    between = jnp.where(row > column, log_decay, 0)
    distance = 1
    while distance < CHUNK:  # each row becomes the sum of all rows until it
        between += jnp.where(row >= distance, pltpu.roll(between, distance, 0), 0)
        distance *= 2
    since_begin = between + log_decay[:1]  # only each chunk's first column counts
    since = [jnp.exp(since_begin[:, column, None]) for column in (0, CHUNK)]
    return jnp.where(row >= column, jnp.exp(between), 0), since


def _inverse(below: Array) -> Array:
    """Inverts two lower triangular matrices side by side, whose diagonals are 1.

    Blocks of SUBLANES rows along a diagonal are inverted token by token. Then it goes on like
    `_inverse` of delta_net.py: where two blocks become one, only the rows of the second change.

    Args:
        below: The matrices, (C, 2C). Only the values below their diagonals are used.
    """
    row, column, chunk = _places()
    inverse = (row == column).astype(jnp.float32)
    block = row & -SUBLANES
    for place in range(SUBLANES - 1):
        taken = jnp.where((column == block + place) & (row > column), below, 0)
        first = jnp.sum(jnp.where(chunk == 0, taken, 0), axis=1, keepdims=True)
        second = jnp.sum(jnp.where(chunk == 0, 0, taken), axis=1, keepdims=True)
        inverse -= jnp.where(chunk == 0, first, second) * _spread(inverse, place)
    size = SUBLANES
    while size < CHUNK:
        joined = (row & -2 * size == column & -2 * size) & (row & size > column & size)
        earlier, later = _halves(inverse, size)
        between = _product("IC,CJ->IJ", later, _apart(jnp.where(joined, below, 0)))
        later -= _product("IC,CJ->IJ", between, _apart(inverse))
        blocks = [x.reshape(-1, 1, size, TWO_CHUNKS) for x in (earlier, later)]
        inverse = jnp.concatenate(blocks, axis=1).reshape(CHUNK, TWO_CHUNKS)
        size *= 2
    return inverse


def _spread(x: Array, place: int) -> Array:
    """Returns x with all rows of a block of SUBLANES rows equal to the block's row `place`."""
    blocks = x.reshape(-1, SUBLANES, x.shape[1])
    return jnp.broadcast_to(blocks[:, place, None], blocks.shape).reshape(x.shape)


def _halves(x: Array, size: int) -> list[Array]:
    """Returns the rows of the first of every two blocks of `size` rows, and those of the second."""
    blocks = x.reshape(-1, 2, size, x.shape[1])
    return [blocks[:, half].reshape(-1, x.shape[1]) for half in (0, 1)]


def _apart(x: Array) -> Array:
    """Puts what lies side by side along a diagonal: (C, 2C) -> (2C, 2C)."""
    second = _places()[2]
    return jnp.concatenate([jnp.where(second == 0, x, 0), jnp.where(second == 0, 0, x)])
