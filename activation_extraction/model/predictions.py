"""What the model predicts: the loss and the entropy of tokens, and the most likely next ones.

Logits are computed for a block of tokens at a time, and only what is wanted of them is kept, so
memory does not grow with the vocabulary unless the logits themselves are wanted. Where devices
share the vocabulary, blocks of logits do not move between them.
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
    """Returns, by name, what is wanted of the following, (B, T, width).

    logits: (B, T, V), of the token after each one, in `dtype`. top_ids, top_logprobs: the `top`
    most likely tokens after each one, int32, the most likely first and the smaller number where two
    are equally likely, and the logarithms of their probabilities, float32. entropy: of the
    prediction of the token after each one, float32, in nats. loss: the negative logarithm of the
    probability of each token given those before it, float32; NaN for the first token of a sample.

    hidden: (B, T, D), after the final norm; head: (V, D); token_ids, positions: int32 (B, T).
    wanted: names of the above.
    """
    following = jnp.roll(token_ids, -1, axis=1)
    head = layout.constrain(head, "head_vocab", "embed", without="fsdp")

    def of_block(block: tuple[Array, Array]) -> dict[str, Array]:
        x = layout.constrain(block[0], "batch", "sequence", "hidden")
        logits = layout.constrain(einsum("BTD,VD->BTV", x, head), *OF_LOGITS)
        return _of_logits(logits, block[1], wanted, top, dtype, layout)

    parts = in_blocks(of_block, (hidden, following), TOKENS_OF_A_BLOCK, layout)
    result = {name: from_bits(part, dtype) for name, part in parts.items()}
    if "loss" in wanted:
        loss = jnp.roll(result["loss"], 1, axis=1)
        result["loss"] = jnp.where(positions[..., None] == 0, jnp.nan, loss)
    return result


def _of_logits(
    logits: Array, following: Array, wanted: Set[str], top: int, dtype: Any, layout: Layout
) -> dict[str, Array]:
    """Returns what is wanted of logits (B, T, V). following: (B, T), the next tokens, whose losses
    these are.

    With m the largest logit z and s the sum of exp(z - m), the logarithm of a probability is
    z - m - log(s), and the entropy is log(s) less the mean of z - m.
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
        found, numbers = largest(shifted, top, layout)
        result |= {"top_ids": numbers, "top_logprobs": found - jnp.log(total)}
    return {name: value for name, value in result.items() if name in wanted}


def largest(values: Array, count: int, layout: Layout) -> tuple[Array, Array]:
    """Returns the `count` largest of the last axis, in descending order, and their indices.

    Each device that has a part of the axis finds the largest of its own, and only these are
    compared.
    """
    size, parts = values.shape[-1], layout.size(*RULES["head_vocab"])
    if size % parts or size // parts < count:
        return lax.top_k(values, count)
    split = values.reshape(*values.shape[:2], parts, -1)
    split = layout.constrain(split, "batch", "sequence", "head_vocab", "one")
    found, numbers = lax.top_k(split, count)
    numbers += jnp.arange(parts)[:, None] * (size // parts)
    found, numbers = (x.reshape(*values.shape[:2], -1) for x in (found, numbers))
    found, order = lax.top_k(found, count)
    return found, jnp.take_along_axis(numbers, order, axis=-1)


def in_blocks(function: Callable[[Any], Any], arrays: Any, tokens: int, layout: Layout) -> Any:
    """Runs a function on blocks of tokens, one after the other, and joins its results.

    arrays, results: (B, T, ...). tokens: of a block, on each device. The last block is filled up
    with zeros.
    """
    batch, length = jax.tree.leaves(arrays)[0].shape[:2]
    rows = max(batch // layout.size(*RULES["batch"]), 1)
    count = -(-length // max(tokens // rows, 1))
    size = -(-length // count)
    dtypes = jax.tree.map(lambda x: x.dtype, arrays)

    def of_block(bits: Any) -> Any:
        return function(jax.tree.map(from_bits, bits, dtypes))

    def cut(x: Array) -> Array:
        x = jnp.pad(to_bits(x), [(0, 0), (0, count * size - length), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(len(x), count, size, *x.shape[2:]).swapaxes(0, 1)

    def join(x: Array) -> Array:
        return x.swapaxes(0, 1).reshape(x.shape[1], count * size, *x.shape[3:])[:, :length]

    return jax.tree.map(join, lax.map(of_block, jax.tree.map(cut, arrays)))
