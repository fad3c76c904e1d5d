"""What the model predicts: the loss and the entropy of tokens, and the most likely next ones.

Logits are computed for a block of tokens at a time, and only the values at hooks are kept of them,
so memory does not grow with the vocabulary unless the logits themselves are a hook. Where devices
share the vocabulary, blocks of logits do not move between them. encode.py uses the same blocks and
the same search for the largest values.

Letters: B rows, T tokens per row, D hidden, V vocabulary.
"""

from collections.abc import Callable, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from activation_extraction.model.mesh import RULES, Layout
from activation_extraction.model.numerics import einsum, from_bits, to_bits

TOKENS_OF_A_BLOCK = 512  # of each device: 311 MB of logits with 151,936 tokens in the vocabulary
OF_LOGITS = "batch", "sequence", "head_vocab"  # logical axes of the logits of a block


def predictions(
    hidden: Array,
    head: Array,
    token_ids: Array,
    positions: Array,
    wanted: Set[str],
    top: int,
    dtype: Any,
    layout: Layout,
) -> dict[str, Array]:
    """Returns predictions by name.

    Args:
        hidden: The residual stream after the final norm, (B, T, D).
        head: The weight of the head, (V, D).
        token_ids: (B, T) int32.
        positions: The position of a token in its sample, (B, T) int32.
        wanted: The names of the predictions to return.
        top: The number of most likely tokens.
        dtype: The dtype of the logits in the result.
        layout: The mesh.

    Returns:
        Those of the following that are wanted:

        logits: The logits of the token after each one, (B, T, V) in `dtype`.
        top_ids: The most likely tokens after each one, (B, T, top) int32, the most likely first; of
            two that are equally likely, the one with the smaller number first.
        top_logprobs: The logarithms of their probabilities, (B, T, top) float32.
        entropy: The entropy of the prediction of the token after each one, (B, T, 1) float32, in
            nats.
        loss: The negative logarithm of the probability of each token given those before it,
            (B, T, 1) float32; NaN for the first token of a sample.
    """
    following = jnp.roll(token_ids, -1, axis=1)
    head = layout.constrain(head, "head_vocab", "embed", without="fsdp")

    def of_block(block: tuple[Array, Array]) -> dict[str, Array]:
        x, following = block
        x = layout.constrain(x, "batch", "sequence", "hidden")
        logits = layout.constrain(einsum("BTD,VD->BTV", x, head), *OF_LOGITS)
        return _of_logits(logits, following, wanted, top, dtype, layout)

    bits = in_blocks(of_block, (hidden, following), TOKENS_OF_A_BLOCK, layout)
    result = {name: from_bits(values, dtype) for name, values in bits.items()}
    if "loss" in wanted:
        # The loss was computed at the token before the one that it is of.
        loss = jnp.roll(result["loss"], 1, axis=1)
        result["loss"] = jnp.where(positions[..., None] == 0, jnp.nan, loss)
    return result


def _of_logits(
    logits: Array, following: Array, wanted: Set[str], top: int, dtype: Any, layout: Layout
) -> dict[str, Array]:
    """Returns the predictions that follow from logits, as `predictions` describes them.

    With m the largest logit z and s the sum of exp(z - m), the logarithm of a probability is
    z - m - log(s), and the entropy is log(s) less the mean of z - m.

    Args:
        logits: (B, T, V) float32.
        following: The token after each one, (B, T) int32, whose loss is returned here.
        wanted: See `predictions` for this and the other arguments.
        top: The number of most likely tokens.
        dtype: The dtype of the logits, which are returned as bits.
        layout: The mesh.
    """
    shifted = logits - logits.max(axis=-1, keepdims=True)
    weights = jnp.exp(shifted)
    total = weights.sum(axis=-1, keepdims=True)
    result = {}
    if "logits" in wanted:
        result["logits"] = to_bits(logits.astype(dtype))
    if "loss" in wanted:
        is_next = jnp.arange(logits.shape[-1]) == following[..., None]
        chosen = jnp.where(is_next, shifted, 0).sum(axis=-1, keepdims=True)
        result["loss"] = jnp.log(total) - chosen
    if "entropy" in wanted:
        mean = (weights * shifted).sum(axis=-1, keepdims=True) / total
        result["entropy"] = jnp.log(total) - mean
    if wanted & {"top_ids", "top_logprobs"}:
        top_shifted, top_ids = largest(shifted, top, layout)
        if "top_ids" in wanted:
            result["top_ids"] = top_ids
        if "top_logprobs" in wanted:
            result["top_logprobs"] = top_shifted - jnp.log(total)
    return result


def largest(values: Array, count: int, layout: Layout) -> tuple[Array, Array]:
    """Returns the largest values of the last axis, in descending order, and their indices.

    Each device that has a part of the axis searches its own part, and only the largest values of
    all parts are compared.

    Args:
        values: (B, T, size).
        count: The number of values to return.
        layout: The mesh, along whose `head_vocab` the last axis is split.

    Returns:
        The values, (B, T, count) in their dtype, and their indices, (B, T, count) int32. Of equal
        values, the one with the smaller index comes first.
    """
    size = values.shape[-1]
    parts = layout.size(*RULES["head_vocab"])
    if size % parts or size // parts < count:
        return lax.top_k(values, count)
    rows = values.shape[:2]
    split = values.reshape(*rows, parts, -1)
    split = layout.constrain(split, "batch", "sequence", "head_vocab", "one")
    of_parts, indices = lax.top_k(split, count)
    indices += jnp.arange(parts)[:, None] * (size // parts)
    candidates = of_parts.reshape(*rows, -1)
    indices = indices.reshape(*rows, -1)
    result, order = lax.top_k(candidates, count)
    return result, jnp.take_along_axis(indices, order, axis=-1)


def in_blocks(function: Callable[[Any], Any], arrays: Any, tokens: int, layout: Layout) -> Any:
    """Runs a function on blocks of tokens, one after the other, and joins its results.

    The last block is filled up with zeros.

    Args:
        function: Maps a pytree like `arrays`, of one block, to a pytree of arrays (B, tokens of a
            block, ...), whose dtypes should not be bfloat16 (see `to_bits`).
        arrays: A pytree of arrays (B, T, ...).
        tokens: The number of tokens of a block on each device.
        layout: The mesh.

    Returns:
        The results of all blocks, a pytree of arrays (B, T, ...).
    """
    batch, length = jax.tree.leaves(arrays)[0].shape[:2]
    rows = max(batch // layout.size(*RULES["batch"]), 1)
    count = -(-length // max(tokens // rows, 1))
    size = -(-length // count)
    dtypes = jax.tree.map(lambda x: x.dtype, arrays)

    def of_block(bits: Any) -> Any:
        return function(jax.tree.map(from_bits, bits, dtypes))

    def cut(x: Array) -> Array:
        """Maps (B, T, ...) to bits (blocks, B, tokens of a block, ...)."""
        filling = count * size - length
        x = jnp.pad(to_bits(x), [(0, 0), (0, filling), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(batch, count, size, *x.shape[2:]).swapaxes(0, 1)

    def join(x: Array) -> Array:
        """Maps (blocks, B, tokens of a block, ...) to (B, T, ...)."""
        x = x.swapaxes(0, 1)
        return x.reshape(batch, count * size, *x.shape[3:])[:, :length]

    return jax.tree.map(join, lax.map(of_block, jax.tree.map(cut, arrays)))
