"""Computes the model's predictions: logits, the most likely next tokens, losses and entropies.

Logits are computed for one block of tokens after the other, and a block of logits is dropped once
the requested predictions are computed from it. Therefore memory does not grow with the vocabulary
unless the logits themselves are requested. If the vocabulary is split over devices, blocks of
logits stay split. encode.py also uses `in_blocks` and `largest`.

Letters: B rows, T tokens per row, D hidden size, V tokens in the vocabulary.
"""

from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from activation_extraction.model.mesh import RULES, Layout
from activation_extraction.model.numerics import einsum, from_bits, to_bits

# The largest number of tokens whose logits each device computes at a time (a block). With 151,936
# tokens in the vocabulary, the logits of this number of tokens take 311 MB in float32.
TOKENS_OF_A_BLOCK = 512
# The logical axes of logits, (B, T, V). They are computed for one block of tokens at a time.
LOGIT_AXES = "batch", "sequence", "head_vocab"


def predictions(
    hidden: Array,
    head_weight: Array,
    token_ids: Array,
    positions: Array,
    requested: Set[str],
    top: int,
    dtype: Any,
    layout: Layout,
) -> dict[str, Array]:
    """Computes the model's predictions for each token, such as logits, from the residual stream.

    Args:
        hidden: The residual stream after the final norm, (B, T, D).
        head_weight: The weight of the LM head, (V, D).
        token_ids: The ids of the tokens, (B, T) int32.
        positions: The position of each token in its sample, (B, T) int32.
        requested: The names of the predictions to compute: the keys of the result below.
        top: The number of most likely tokens to return.
        dtype: The dtype of the returned logits.
        layout: The layout of the mesh.

    Returns:
        A dict with the requested entries of the following. Logits, most likely tokens and entropies
        at a position belong to the prediction of the next token.

        logits: The logits, (B, T, V) in `dtype`.
        top_ids: The ids of the most likely tokens, (B, T, top) int32, ordered by descending
            probability. If two tokens are equally likely, the smaller id comes first.
        top_logprobs: The natural logarithms of the probabilities of `top_ids`, (B, T, top) float32.
        entropy: The entropy of the prediction in nats, (B, T, 1) float32.
        loss: The negative natural logarithm of the probability of the token at the
            position, given the earlier tokens of its sample, (B, T, 1) float32. NaN for the first
            token of a sample.
    """
    next_token_ids = jnp.roll(token_ids, -1, axis=1)
    head_weight = layout.constrain(head_weight, "head_vocab", "embed", unsplit_axis="fsdp")

    def predictions_of_block(token_block: tuple[Array, Array]) -> dict[str, Array]:
        hidden_states_of_token_block, next_token_ids_of_token_block = token_block
        hidden_states_of_token_block = layout.constrain(
            hidden_states_of_token_block, "batch", "sequence", "hidden"
        )
        logits = layout.constrain(
            einsum("BTD,VD->BTV", hidden_states_of_token_block, head_weight), *LOGIT_AXES
        )
        return _from_logits(logits, next_token_ids_of_token_block, requested, top, dtype, layout)

    bits_by_prediction_name = in_blocks(
        predictions_of_block, (hidden, next_token_ids), TOKENS_OF_A_BLOCK, layout
    )
    array_by_prediction_name = {
        prediction_name: from_bits(prediction_bits, dtype)
        for prediction_name, prediction_bits in bits_by_prediction_name.items()
    }
    if "loss" in requested:
        # `_from_logits` stores the loss of a token at the position before the token. Therefore, the
        # next line moves all losses to the right by one position.
        losses_of_tokens = jnp.roll(array_by_prediction_name["loss"], 1, axis=1)
        array_by_prediction_name["loss"] = jnp.where(
            positions[..., None] == 0, jnp.nan, losses_of_tokens
        )
    return array_by_prediction_name


def _from_logits(
    logits: Array, next_ids: Array, requested: Set[str], top: int, dtype: Any, layout: Layout
) -> dict[str, Array]:
    """Returns the requested predictions that follow from logits (see `predictions`).

    Let m be the largest logit of a position, and s the sum of exp(z - m) over all logits z. Then
    the logarithm of a token's probability is z - m - log(s), and the entropy is log(s) minus the
    expected value of z - m.

    Args:
        logits: The logits, (B, T, V) float32.
        next_ids: The id of the token after each position, (B, T) int32.
        requested: The names of the predictions to return.
        top: The number of most likely tokens to return.
        dtype: The dtype of the returned logits.
        layout: The layout of the mesh.

    Returns:
        The predictions by name, as `predictions` returns them, with two differences: the logits are
        returned as bits (see `to_bits`), and a loss is returned at the position before its token.
    """
    shifted_logits = logits - logits.max(axis=-1, keepdims=True)
    exponentials = jnp.exp(shifted_logits)
    exponential_sums = exponentials.sum(axis=-1, keepdims=True)
    array_by_prediction_name: dict[str, Array] = {}
    if "logits" in requested:
        array_by_prediction_name["logits"] = to_bits(logits.astype(dtype))
    if "loss" in requested:
        next_token_mask = jnp.arange(logits.shape[-1]) == next_ids[..., None]
        shifted_logits_of_next_tokens = jnp.where(next_token_mask, shifted_logits, 0).sum(
            axis=-1, keepdims=True
        )
        array_by_prediction_name["loss"] = jnp.log(exponential_sums) - shifted_logits_of_next_tokens
    if "entropy" in requested:
        weighted_logit_sums = (exponentials * shifted_logits).sum(axis=-1, keepdims=True)
        array_by_prediction_name["entropy"] = (
            jnp.log(exponential_sums) - weighted_logit_sums / exponential_sums
        )
    if requested & {"top_ids", "top_logprobs"}:
        top_shifted_logits, top_ids = largest(shifted_logits, top, layout)
        if "top_ids" in requested:
            array_by_prediction_name["top_ids"] = top_ids
        if "top_logprobs" in requested:
            array_by_prediction_name["top_logprobs"] = top_shifted_logits - jnp.log(
                exponential_sums
            )
    return array_by_prediction_name


def largest(values: Array, count: int, layout: Layout) -> tuple[Array, Array]:
    """Returns the largest values along the last axis of an array, and their indices.

    If the last axis is split over devices, each device searches its own part, and only the largest
    values of all parts are compared.

    Args:
        values: The array, (B, T, length of the last axis).
        count: The number of values to return.
        layout: The layout of the mesh. The last axis is split as the logical axis `head_vocab`.

    Returns:
        A tuple of:
            The values, (B, T, count) in their dtype, in descending order. If two values are equal,
                the value with the smaller index comes first.
            The indices of the values in the last axis, (B, T, count) int32.
    """
    axis_length = values.shape[-1]
    num_parts_of_last_axis = layout.size(*RULES["head_vocab"])
    if axis_length % num_parts_of_last_axis or axis_length // num_parts_of_last_axis < count:
        return lax.top_k(values, count)
    batch_shape = values.shape[:2]
    # The shape is (B, T, parts of the last axis, values in a part).
    values_in_parts_of_last_axis = values.reshape(*batch_shape, num_parts_of_last_axis, -1)
    values_in_parts_of_last_axis = layout.constrain(
        values_in_parts_of_last_axis, "batch", "sequence", "head_vocab", "one"
    )
    top_values_in_parts_of_last_axis, top_indices_in_parts_of_last_axis = lax.top_k(
        values_in_parts_of_last_axis, count
    )
    top_indices_in_parts_of_last_axis += jnp.arange(num_parts_of_last_axis)[:, None] * (
        axis_length // num_parts_of_last_axis
    )
    candidate_values = top_values_in_parts_of_last_axis.reshape(*batch_shape, -1)
    candidate_indices = top_indices_in_parts_of_last_axis.reshape(*batch_shape, -1)
    top_values, indices_of_top_candidates = lax.top_k(candidate_values, count)
    return top_values, jnp.take_along_axis(candidate_indices, indices_of_top_candidates, axis=-1)


def in_blocks(
    function: Callable[[Any], Any], arrays: Any, max_tokens_on_device: int, layout: Layout
) -> Any:
    """Runs a function on one block of tokens after the other, and joins the results.

    The token axis of the arrays, whose length is T, is split into blocks of equal length. A block
    contains `block_length` consecutive tokens of every row. If T is not a multiple of
    `block_length`, the last block is padded with zeros, and the results for the padding are
    dropped. The memory for the intermediate arrays of `function` does not grow with T, because only
    one block is computed at a time.

    Args:
        function: A function that maps a block to its results. A block is a pytree with the
            structure of `arrays`, but its arrays have the shape (B, block_length, ...). The results
            are a pytree of arrays (B, block_length, ...). The dtypes of the results should not be
            bfloat16, because XLA for CPUs would convert whole arrays to float32 (see `to_bits`).
        arrays: A pytree of arrays (B, T, ...).
        max_tokens_on_device: The largest number of tokens of a block on one device, counted over
            all rows of the device. It determines `block_length`, which is at least 1 even if a
            device has more rows than this number.
        layout: The layout of the mesh.

    Returns:
        The joined results of all blocks, a pytree of arrays (B, T, ...).
    """
    num_rows, row_length = jax.tree.leaves(arrays)[0].shape[:2]
    num_rows_on_device = max(num_rows // layout.size(*RULES["batch"]), 1)
    num_blocks = -(-row_length // max(max_tokens_on_device // num_rows_on_device, 1))
    block_length = -(-row_length // num_blocks)
    array_dtypes = jax.tree.map(lambda x: x.dtype, arrays)

    def run_on_bits(bits: Any) -> Any:
        return function(jax.tree.map(from_bits, bits, array_dtypes))

    def split_into_blocks(x: Array) -> Array:
        """Splits an array into blocks of tokens. The last block is padded with zeros.

        Args:
            x: The array, (B, T, ...).

        Returns:
            The blocks, (num_blocks, B, block_length, ...). If x has a two-byte dtype such as
            bfloat16, they are uint16 numbers with the same bits, because XLA for CPUs would convert
            whole bfloat16 arrays to float32 (see `to_bits`). Otherwise they have the dtype of x.
        """
        num_padding_tokens = num_blocks * block_length - row_length
        x = jnp.pad(to_bits(x), [(0, 0), (0, num_padding_tokens), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(num_rows, num_blocks, block_length, *x.shape[2:]).swapaxes(0, 1)

    def join_blocks(x: Array) -> Array:
        """Turns an array (num_blocks, B, block_length, ...) into an array (B, T, ...)."""
        x = x.swapaxes(0, 1)
        return x.reshape(num_rows, num_blocks * block_length, *x.shape[3:])[:, :row_length]

    blocks_of_arrays = jax.tree.map(split_into_blocks, arrays)
    return jax.tree.map(join_blocks, lax.map(run_on_bits, blocks_of_arrays))
