"""Computes the gated delta net (arXiv:2412.06464), which replaces attention in some layers.

Models of the families Qwen3-Next and Qwen3.5 have such layers. The gated delta rule keeps a matrix
S per value head, the state, which is zero before a segment's first token. A token with the query q,
key k, value v, log decay g and rate b changes the state, and then reads its output o:

    S <- exp(g) S
    S <- S + k (b (v - S^T k))^T
    o = S^T q

The tokens of a row are computed in chunks (arXiv:2406.06484). The effects of a chunk's tokens on
each other are the solution of a triangular system of equations. The systems of all chunks are
solved at once, and then a loop computes S for one chunk after the other. All of this is in float32,
and no token sees another segment of its row.

Key heads, each with its value heads, are divided among devices. A checkpoint contains the
projections of queries, keys and values in one matrix, one below the other or head by head, and
their convolutions in another matrix. Here each projection and each convolution is a parameter of
its own, so that heads can be divided.

Letters of `GatedDeltaNet`, besides B, T and D of qwen2_jax.py: J key heads, G value heads of each
key head, C key size, Z value size, O all values of a token, W taps of the convolution. The
functions of the rule use other letters: B rows, T tokens per row, K key heads, G value heads of
each key head, D key size, U value size, N chunks, C tokens of a chunk (also I and J, where token I
reads token J), X any size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from activation_extraction.model.layers import STREAM, Intermediates, Linear
from activation_extraction.model.mesh import Layout
from activation_extraction.model.model_config import ModelConfig
from activation_extraction.model.numerics import einsum
from activation_extraction.model.parameters import Weight, parameter

# The number of tokens of a chunk. Two chunks fill the lanes of a TPU's register (delta_kernel.py).
CHUNK = 64
# The number that is added to the squared length of queries and keys, as in transformers, so that
# the inverse of the length is finite.
EPSILON = 1e-6
KEY_AXES = "batch", "sequence", "key_heads", "head_dim"  # logical axes of queries and keys
VALUE_AXES = *KEY_AXES, "head_dim"  # logical axes of values

# A function that computes the gated delta rule (see the docstring of this module). There are K key
# heads with queries and keys of size D, and each key head has G value heads with values of size U.
# The function maps (q, k, v, log_decay, beta, segment_ids) to the outputs o, (B, T, K, G, U) in the
# dtype of v:
#   q, k         the queries and keys, (B, T, K, D), which the function normalises
#   v            the values, (B, T, K, G, U)
#   log_decay    the logarithm of the factor by which each token first multiplies the state,
#                (B, T, K, G) float32, at most 0
#   beta         the rate with which each token changes the state, (B, T, K, G) float32
#   segment_ids  the segment of each token, (B, T) int32. The tokens of a segment are consecutive,
#                and the segments of a row have different numbers. Padding comes last, with the
#                number 0.
# The outputs of padding are meaningless.
DeltaRuleFunction = Callable[[Array, Array, Array, Array, Array, Array], Array]


class GatedDeltaNet(nn.Module):
    """The gated delta net of a layer.

    It projects each token to queries, keys, values, output gates, log decays, and betas, which are
    the rates with which a token changes the state. It applies a convolution over tokens to the
    queries, keys and values, then the gated delta rule, a norm with the output gates, and an output
    projection.

    Attributes:
        config: The configuration of the model.
        dtype: The dtype of weights and of the operands of matrix products.
        compute_delta_rule: The function that computes the gated delta rule.
        layout: The mesh of devices, and the rules for splitting arrays along its axes.
    """

    config: ModelConfig
    dtype: Any
    compute_delta_rule: DeltaRuleFunction
    layout: Layout

    def setup(self) -> None:
        make_linear = partial(Linear, self.config, dtype=self.dtype)
        make_weight = partial(Weight, self.config, dtype=self.dtype)
        self.in_proj_q, self.in_proj_k = make_linear("D->JC"), make_linear("D->JC")
        self.in_proj_v, self.in_proj_z = make_linear("D->JGZ"), make_linear("D->JGZ")
        self.in_proj_b, self.in_proj_a = make_linear("D->JG"), make_linear("D->JG")
        self.conv1d_q, self.conv1d_k = make_weight("JCIW"), make_weight("JCIW")
        self.conv1d_v = make_weight("JGZIW")
        self.A_log = parameter(self, "A_log", "JG")
        self.dt_bias = parameter(self, "dt_bias", "JG")
        # The weight of the norm. The attribute must be called `norm`, because this is the name in
        # checkpoints.
        self.norm = make_weight("Z")
        # The axis O of the weight joins the axes J, G and Z of the outputs of all value heads,
        # because TPUs would copy a weight of the shape (D, J, G, Z) in each step.
        self.out_proj = make_linear("O->D", has_split_inputs=self.layout.adds_up_parts)

    def __call__(self, x: Array, segment_ids: Array) -> tuple[Array, Intermediates]:
        """Returns the output of the delta net, and its intermediates by name.

        Args:
            x: The normed residual stream, (B, T, D).
            segment_ids: The segment of each token, (B, T) int32; 0 for padding.

        Returns:
            The output, (B, T, D), which is added to the residual stream.
            The intermediates: name -> array, or a function that computes it (see `Intermediates`).
        """
        intermediates = self._intermediates_before_delta_rule(x, segment_ids)
        q, k, v = intermediates["q"], intermediates["k"], intermediates["v"]
        delta_rule_inputs = q, k, v, intermediates["log_decay"], intermediates["beta"], segment_ids
        delta_rule_input_axes = KEY_AXES, KEY_AXES, VALUE_AXES, KEY_AXES, KEY_AXES, KEY_AXES[:2]
        with jax.named_scope("gated_delta_rule"):
            # The outputs are split over devices like the values v, which are delta_rule_inputs[2].
            delta_rule_outputs = self.layout.per_device(
                self.compute_delta_rule, delta_rule_inputs, delta_rule_input_axes, template=2
            )
        intermediates["recurrence_out"] = delta_rule_outputs
        epsilon = self.config.rms_norm_eps
        gated_outputs = gated_norm(
            delta_rule_outputs, intermediates["gate_input"], self.norm(), epsilon
        ).astype(self.dtype)
        intermediates["gated"] = gated_outputs
        # The outputs of all heads side by side, (B, T, O).
        joined_outputs = gated_outputs.reshape(*gated_outputs.shape[:2], -1)
        intermediates["out"] = self.layout.constrain(
            self.out_proj(joined_outputs).astype(self.dtype), *STREAM
        )
        return intermediates["out"], intermediates

    def _intermediates_before_delta_rule(self, x: Array, segment_ids: Array) -> Intermediates:
        """Computes the inputs of the gated delta rule, and of the gate that follows the rule.

        Args:
            x: The normed residual stream, (B, T, D).
            segment_ids: The segment of each token, (B, T) int32; 0 for padding.

        Returns:
            Name -> array, for the inputs and further intermediates. The inputs of the rule are `q`,
            `k`, `v`, `log_decay` and `beta`, and the input of the gate is `gate_input`.
        """
        constrain = self.layout.constrain
        intermediates: Intermediates = {}
        for projection_letter, head_axes, projection_module, convolution_module in (
            ("q", KEY_AXES, self.in_proj_q, self.conv1d_q),
            ("k", KEY_AXES, self.in_proj_k, self.conv1d_k),
            ("v", VALUE_AXES, self.in_proj_v, self.conv1d_v),
        ):
            y = constrain(projection_module(x), *head_axes).astype(self.dtype)
            intermediates[f"{projection_letter}_pre_conv"] = y
            tap_weights = jnp.squeeze(convolution_module(), -2)
            if projection_letter == "k":
                # The barrier makes the convolution of the keys wait for the convolution of the
                # queries. Both at once would need more VMEM than a TPU has for them.
                tap_weights, intermediates["q"] = lax.optimization_barrier(
                    (tap_weights, intermediates["q"])
                )
            intermediates[projection_letter] = short_convolution(
                y, tap_weights, segment_ids
            ).astype(self.dtype)
        intermediates["gate_input"] = constrain(self.in_proj_z(x), *VALUE_AXES).astype(self.dtype)
        intermediates["beta_logit"] = constrain(self.in_proj_b(x), *KEY_AXES)
        intermediates["beta"] = jax.nn.sigmoid(intermediates["beta_logit"])
        log_decay_rate = self.A_log.astype(jnp.float32)
        time_step_bias = self.dt_bias.astype(jnp.float32)
        time_step = jax.nn.softplus(constrain(self.in_proj_a(x), *KEY_AXES) + time_step_bias)
        intermediates["log_decay"] = -jnp.exp(log_decay_rate) * time_step
        return intermediates


def short_convolution(x: Array, weight: Array, segment_ids: Array) -> Array:
    """Computes a causal convolution of each channel over the tokens of a segment, then silu.

    Letters: W taps.

    Args:
        x: The values of each token's channels, (B, T, ...), where the further axes are channels.
        weight: The weight of each tap for each channel, (..., W). The last tap is for the token
            itself, and the one before it for the previous token.
        segment_ids: The segment of each token, (B, T) int32.

    Returns:
        The result, with the shape of x, float32.
    """
    weight = weight.astype(jnp.float32)
    tap_count = weight.shape[-1]
    # Each tap converts x to float32. If x were converted once for all taps, XLA would write it to
    # HBM in float32.
    weighted_sum = x.astype(jnp.float32) * weight[..., -1]
    for tap_distance in range(1, tap_count):
        earlier_token_in_segment_mask = jnp.expand_dims(
            _shifted(segment_ids, tap_distance) == segment_ids, range(2, x.ndim)
        )
        earlier_inputs = jnp.where(
            earlier_token_in_segment_mask, _shifted(x, tap_distance), 0
        ).astype(jnp.float32)
        weighted_sum += earlier_inputs * weight[..., -1 - tap_distance]
    return jax.nn.silu(weighted_sum)


def _shifted(x: Array, distance: int) -> Array:
    """Shifts the values of tokens, so that each token gets the value of an earlier token.

    Args:
        x: The values of the tokens, (B, T, ...).
        distance: The number of tokens by which values are shifted to the end of the row.

    Returns:
        The shifted values, with the shape of x. The first `distance` tokens of a row get 0.
    """
    padding_widths = [(0, 0), (distance, 0), *[(0, 0)] * (x.ndim - 2)]
    return jnp.pad(x, padding_widths)[:, : x.shape[1]]


def gated_norm(x: Array, gate: Array, weight: Array, epsilon: float) -> Array:
    """Applies an RMS norm over the last axis, then multiplies by `weight` and silu(gate).

    Letters: Z value size.

    Args:
        x: The values, (..., Z).
        gate: The input of the gate, (..., Z).
        weight: The weights of the norm, (Z,).
        epsilon: The number that is added to the mean square.

    Returns:
        The result, (..., Z) float32.
    """
    x, gate = x.astype(jnp.float32), gate.astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + epsilon)
    return x * inverse_rms * weight.astype(jnp.float32) * jax.nn.silu(gate)


def token_by_token(*arrays: Any) -> np.ndarray:
    """Computes the gated delta rule token by token in NumPy's float64.

    This is the reference implementation. Tests and the trials of kernels in trial.py compare the
    other implementations with it.

    Letters: K key heads, G value heads of each key head, U value size.

    Args:
        *arrays: The arguments of a `DeltaRuleFunction` in its order: q, k, v, log_decay, beta and
            segment_ids.

    Returns:
        The outputs, (B, T, K, G, U) float64.
    """
    *float_arrays, segment_ids = map(np.asarray, arrays)
    q, k, v, log_decay, beta = (x.astype(np.float64) for x in float_arrays)
    q, k = (x / np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + EPSILON) for x in (q, k))
    row_count, row_length, key_head_count, value_heads_per_key_head, value_head_dim = v.shape
    # The state S of every value head, (B, K, G, D, U).
    state = np.zeros(
        (row_count, key_head_count, value_heads_per_key_head, k.shape[-1], value_head_dim)
    )
    token_outputs = []
    segment_ids_before_t = np.zeros(row_count)
    for t in range(row_length):
        segment_ids_at_t = segment_ids[:, t]
        same_segment_mask = (segment_ids_at_t == segment_ids_before_t)[:, None, None]
        state_decay = np.where(same_segment_mask, np.exp(log_decay[:, t]), 0)  # shape (B, K, G)
        state *= state_decay[..., None, None]
        value_differences = v[:, t] - np.einsum("bkgdu,bkd->bkgu", state, k[:, t])
        state += np.einsum("bkd,bkg,bkgu->bkgdu", k[:, t], beta[:, t], value_differences)
        token_outputs.append(np.einsum("bkgdu,bkd->bkgu", state, q[:, t]) * q.shape[-1] ** -0.5)
        segment_ids_before_t = segment_ids_at_t
    return np.stack(token_outputs, axis=1)


def gated_delta_rule(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, segment_ids: Array
) -> Array:
    """Computes the gated delta rule in chunks, on any platform.

    Letters: K key heads, G value heads of each key head, D key size, U value size.

    Args:
        q: The queries, (B, T, K, D), which this function normalises.
        k: The keys, (B, T, K, D), which this function normalises.
        v: The values, (B, T, K, G, U).
        log_decay: The log decays, (B, T, K, G) float32, at most 0.
        beta: The rates with which tokens change the state, (B, T, K, G) float32.
        segment_ids: The segment of each token, (B, T) int32; 0 for padding.

    Returns:
        The outputs, (B, T, K, G, U) in the dtype of v. See `DeltaRuleFunction`.
    """
    output_dtype = v.dtype
    q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in (q, k, v, log_decay, beta))
    q, k = q.shape[-1] ** -0.5 * inverse_length(q) * q, inverse_length(k) * k
    arrays_with_token_axis = (
        q,
        k,
        v,
        log_decay[..., None],
        beta[..., None],
        segment_ids[..., None],
    )
    prepared_chunks = _prepare(*map(_in_chunks, arrays_with_token_axis))
    initial_state = jnp.zeros(
        (*prepared_chunks.update_vectors_from_zero_state.shape[1:4], k.shape[-1], v.shape[-1]),
        jnp.float32,
    )
    _, chunk_outputs = lax.scan(_step, initial_state, prepared_chunks)
    chunk_outputs = jnp.moveaxis(chunk_outputs, (0, 4), (1, 2))  # shape (B, N, C, K, G, U)
    return chunk_outputs.reshape(len(v), -1, *v.shape[2:])[:, : v.shape[1]].astype(output_dtype)


def inverse_length(x: Array) -> Array:
    """Returns the inverse lengths of vectors, which turn the vectors into unit vectors.

    Letters: D key size.

    Args:
        x: The vectors, (..., D).

    Returns:
        The inverse length of each vector, (..., 1) float32. EPSILON, which is added to the squared
        length, keeps it finite.
    """
    x = x.astype(jnp.float32)
    return lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPSILON)


def _in_chunks(x: Array) -> Array:
    """Divides the tokens of an array into chunks, and pads the last chunk with zeros.

    Letters: N chunks, C tokens of a chunk, X any size.

    Args:
        x: The array, (B, T, ..., X), where the axes in the middle are heads.

    Returns:
        The chunks, (N, B, ..., C, X).
    """
    padding_widths = [(0, 0), (0, -x.shape[1] % CHUNK), *[(0, 0)] * (x.ndim - 2)]
    x = jnp.pad(x, padding_widths).reshape(x.shape[0], -1, CHUNK, *x.shape[2:])
    return jnp.moveaxis(x, (1, 2), (0, -2))


class _Chunks(NamedTuple):
    """The arrays of all chunks, from which a loop computes the state S and the outputs.

    The gated delta rule keeps a matrix S (D, U) for each value head. Each token of a chunk adds the
    outer product of its key and its update vector to S. The update vectors are affine functions of
    the state S before the chunk.

    Letters: N chunks, K key heads, G value heads of each key head, C tokens of a chunk, D key size,
    U value size. The letters I and J also stand for the tokens of a chunk, in an array with an
    entry for each pair of tokens.

    Attributes:
        update_vectors_from_zero_state: The update vectors that tokens would have if S were zero
            before the chunk, (N, B, K, G, C, U).
        rows_to_multiply_by_state: The rows that are multiplied with S before the chunk,
            (N, B, K, G, 2 * C, D). The products of the first C rows are subtracted from
            `update_vectors_from_zero_state`, which gives the update vectors. The products of the
            other C rows are added to the outputs.
        decayed_query_key_products: The factor of token J's update vector in the output of token I,
            (N, B, K, G, I, J).
        decayed_keys: The key of each token, multiplied by the decay from this token to the end of
            the chunk, (N, B, K, G, C, D).
        state_decay: The fraction of S before the chunk that is left after it, (N, B, K, G, 1, 1).
    """

    update_vectors_from_zero_state: Array
    rows_to_multiply_by_state: Array
    decayed_query_key_products: Array
    decayed_keys: Array
    state_decay: Array


def _prepare(
    q: Array, k: Array, v: Array, log_decay: Array, beta: Array, segment_ids: Array
) -> _Chunks:
    """Computes, for all chunks at once, the arrays that do not depend on the state S.

    The gated delta rule keeps a matrix S (D, U) for each value head, which every token changes.

    Letters: N chunks, K key heads, G value heads of each key head, C tokens of a chunk, D key size,
    U value size.

    Args:
        q: The normalised queries, multiplied by D ** -0.5, (N, B, K, C, D).
        k: The normalised keys, (N, B, K, C, D).
        v: The values, (N, B, K, G, C, U).
        log_decay: The logarithm of the factor by which S decays at each token,
            (N, B, K, G, C, 1).
        beta: The rate with which each token changes S, (N, B, K, G, C, 1).
        segment_ids: The segment of each token, (N, B, C, 1) int32; 0 for padding.

    Returns:
        The fields of `_Chunks`, each an array whose first axis has the N chunks.
    """
    decays_between_tokens, decay_since_chunk_begin = _decays(log_decay, segment_ids)
    key_key_products = einsum("NBKID,NBKJD->NBKIJ", k, k)[:, :, :, None]
    query_key_products = einsum("NBKID,NBKJD->NBKIJ", q, k)[:, :, :, None]
    q, k = q[:, :, :, None], k[:, :, :, None]
    right_hand_side = beta * jnp.concatenate([v, decay_since_chunk_begin * k], axis=-1)
    inverses = _inverse(beta * key_key_products * decays_between_tokens)
    solution = einsum("NBKGIJ,NBKGJX->NBKGIX", inverses, right_hand_side)
    # `state_correction_keys` contains a row for each token. With the state S before the chunk, the
    # update vectors of the tokens are update_vectors_from_zero_state - state_correction_keys @ S.
    update_vectors_from_zero_state, state_correction_keys = jnp.split(
        solution, [v.shape[-1]], axis=-1
    )
    return _Chunks(
        update_vectors_from_zero_state=update_vectors_from_zero_state,
        rows_to_multiply_by_state=jnp.concatenate(
            [state_correction_keys, decay_since_chunk_begin * q], axis=-2
        ),
        decayed_query_key_products=query_key_products * decays_between_tokens,
        decayed_keys=decays_between_tokens[..., -1:, :].mT * k,
        state_decay=decay_since_chunk_begin[..., -1:, :],
    )


def _inverse(matrices: Array) -> Array:
    """Inverts lower triangular matrices whose diagonals are 1.

    The function inverts blocks along the diagonal, first blocks of one token, then of two, of four
    and so on. Two neighbouring blocks P and Q with the inverses X and Y, and the block M below
    P, become one block, whose inverse is

        [ P 0 ] -1   [    X    0 ]
        [ M Q ]    = [ -Y M X  Y ]

    So the function only computes matrix products, while a triangular solver would compute one token
    after the other. On a CPU with several devices, JAX's triangular solver never returns.

    Letters: N chunks, K key heads, G value heads of each key head, I and J tokens of a chunk.

    Args:
        matrices: The matrices, (N, B, K, G, I, J). Only the values below the diagonal are used.

    Returns:
        The inverses, (N, B, K, G, I, J).
    """
    token_indices_in_chunk = np.arange(CHUNK)
    block_inverses = jnp.eye(CHUNK)
    multiply_matrices = partial(einsum, "NBKGIC,NBKGCJ->NBKGIJ")
    for log2_block_size in range(CHUNK.bit_length() - 1):
        block_numbers = token_indices_in_chunk >> log2_block_size
        joined_block_numbers = token_indices_in_chunk >> (log2_block_size + 1)
        same_joined_block_mask = joined_block_numbers[:, None] == joined_block_numbers
        lower_block_mask = block_numbers[:, None] > block_numbers
        lower_left_blocks = jnp.where(same_joined_block_mask & lower_block_mask, matrices, 0)
        # At first, each block on the diagonal is a single 1, and so is its inverse. Multiplying
        # `lower_left_blocks` by the inverses from both sides would not change the values.
        if log2_block_size > 0:
            lower_left_blocks = multiply_matrices(
                multiply_matrices(block_inverses, lower_left_blocks), block_inverses
            )
        block_inverses = block_inverses - lower_left_blocks
    return block_inverses


def _decays(log_decay: Array, segment_ids: Array) -> tuple[Array, Array]:
    """Returns the decay of the state S between tokens of a chunk, and since the chunk's beginning.

    The gated delta rule keeps a matrix S for each value head, which decays at every token. For each
    pair of tokens, the function adds up the log decays of all tokens after the first one of them,
    up to the second one. It does not subtract cumulative sums, because their differences would lose
    their precision after a token that erases S, whose log decay is very negative.

    Letters: N chunks, K key heads, G value heads of each key head, C tokens of a chunk. The letters
    I and J also stand for the tokens of a chunk, in arrays with an entry for each pair of tokens.

    Args:
        log_decay: The logarithm of the factor by which S decays at each token,
            (N, B, K, G, C, 1) float32, at most 0.
        segment_ids: The segment of each token, (N, B, C, 1) int32; 0 for padding.

    Returns:
        A tuple of:
            The fraction of token J's addition to S that is left at token I, (N, B, K, G, I, J). It
                is 0 if the tokens belong to different segments, or J comes after I.
            The fraction of S before the chunk that is left at each token, (N, B, K, G, C, 1). It is
                0 if the token's segment begins in the chunk.
    """
    segment_ids_of_tokens = segment_ids[:, :, None, None]  # from (N, B, C, 1) to (N, B, 1, 1, C, 1)
    # The segment of the last token of each chunk, except the last chunk of a row.
    last_segment_ids_of_earlier_chunks = segment_ids_of_tokens[:-1, ..., -1:, :]
    # The segment of the last token before each chunk; -1 before the first chunk.
    segment_ids_before_chunks = jnp.pad(
        last_segment_ids_of_earlier_chunks, [(1, 0), *[(0, 0)] * 5], constant_values=-1
    )
    # Whether token I of a chunk sees token J of the same chunk, (N chunks, B, 1, 1, I, J).
    visible_token_mask = jnp.tril(segment_ids_of_tokens == segment_ids_of_tokens.mT)
    # A matrix (I, C), which is 1 where token C is token I or an earlier token, and 0 elsewhere.
    same_or_earlier_token_mask = jnp.tri(CHUNK)
    log_decay_between_tokens = einsum(
        "IC,NBKGCJ->NBKGIJ", same_or_earlier_token_mask, log_decay * jnp.tri(CHUNK, k=-1)
    )
    log_decay_since_chunk_begin = einsum("IC,NBKGCJ->NBKGIJ", same_or_earlier_token_mask, log_decay)
    decays_between_tokens = jnp.where(visible_token_mask, jnp.exp(log_decay_between_tokens), 0)
    decay_since_chunk_begin = jnp.where(
        segment_ids_of_tokens == segment_ids_before_chunks, jnp.exp(log_decay_since_chunk_begin), 0
    )
    return decays_between_tokens, decay_since_chunk_begin


def _step(state: Array, chunk: _Chunks) -> tuple[Array, Array]:
    """Computes one chunk: the state S after it, and the outputs of its tokens.

    The gated delta rule keeps a matrix S (D, U) for each value head, which every token changes.

    Letters: K key heads, G value heads of each key head, C tokens of a chunk, D key size, U value
    size.

    Args:
        state: S before the chunk, (B, K, G, D, U).
        chunk: The arrays of this chunk, which lack the axis N of chunks.

    Returns:
        A tuple of:
            S after the chunk, (B, K, G, D, U).
            The outputs of the chunk's tokens, (B, K, G, C, U).
    """
    products_with_state = einsum("BKGCD,BKGDU->BKGCU", chunk.rows_to_multiply_by_state, state)
    corrections_of_update_vectors, outputs_from_state = jnp.split(products_with_state, 2, axis=3)
    update_vectors = chunk.update_vectors_from_zero_state - corrections_of_update_vectors
    token_outputs = outputs_from_state + einsum(
        "BKGIJ,BKGJU->BKGIU", chunk.decayed_query_key_products, update_vectors
    )
    state = chunk.state_decay * state
    state += einsum("BKGCD,BKGCU->BKGDU", chunk.decayed_keys, update_vectors)
    return state, token_outputs
