"""A layer, a few rows at a time.

One CPU is fastest with as many tokens as its caches can hold; accelerators take all rows at once.
What a layer computes is no concern of this module.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from activation_extraction.model.bits import from_bits, to_bits
from activation_extraction.model.mesh import Layout

TOKENS_AT_ONCE = 2048  # on one CPU


def rows_at_once(layout: Layout, rows: int, length: int) -> int:
    """How many rows of `length` tokens go through a layer together; a divisor of `rows`.

    On anything but one CPU these are all rows.
    """
    mesh = layout.mesh
    if mesh is None or mesh.size > 1 or mesh.devices.flat[0].platform != "cpu":
        return rows
    fitting = max(TOKENS_AT_ONCE // length, 1)
    return max(size for size in range(1, min(fitting, rows) + 1) if rows % size == 0)


def in_groups(layer: Callable[..., Any], layout: Layout, dtype: Any) -> Callable[..., Any]:
    """`layer`, a group of rows at a time where that is faster.

    layer: (x, rotary, segment_ids) -> (x, arrays that begin with the rows and are no two-byte
    floating point numbers). Groups of nothing but padding, as in the last batch of a run, keep
    their x, and their other arrays are zeros.
    """

    def apply(x: Array, *others: Any) -> Any:
        size = rows_at_once(layout, *x.shape[:2])
        if size == len(x):
            return layer(x, *others)
        groups = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), (to_bits(x), *others))
        done = jax.lax.map(group, groups)
        x, kept = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), done)
        return from_bits(x, dtype), kept

    def group(inputs: Any) -> Any:
        return jax.lax.cond(inputs[-1].any(), compute, skip, *inputs)

    def compute(x: Array, *others: Any) -> Any:
        x, kept = layer(from_bits(x, dtype), *others)
        return to_bits(x), kept

    def skip(*inputs: Any) -> Any:
        _, kept = jax.eval_shape(compute, *inputs)
        return inputs[0], jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), kept)

    return apply
