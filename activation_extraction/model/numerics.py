"""The numerics of the model: how products accumulate, are rounded, and how numbers are moved.

Every matrix product of the model, outside of kernels, is an `einsum` of this module. Products
accumulate in float32, and the caller rounds the result once. Arrays of two-byte numbers that are
only moved are moved as their bits.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def einsum(equation: str, x: Array, y: Array) -> Array:
    """Computes `jnp.einsum`, accumulates in float32 and returns float32.

    float32 operands are multiplied as float32: TPUs and GPUs would otherwise round them to bfloat16
    or TF32, which is not what somebody who asked for float32 expects.
    """
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(equation, x, y, precision=precision, preferred_element_type=jnp.float32)


def einsum_of_parts(equation: str, x: Array, y: Array) -> Array:
    """Computes `einsum` where devices have parts of the summed axis and add up their results.

    Accelerators round every part to the dtype of x before they add the parts, so that bfloat16
    halves the bytes that are moved and sent. The result is rounded later anyway.
    """

    def rounded_before(x: Array, y: Array) -> Array:
        return jnp.einsum(equation, x, y, preferred_element_type=x.dtype).astype(jnp.float32)

    exact = partial(einsum, equation)
    if x.dtype == jnp.float32:
        return exact(x, y)
    return lax.platform_dependent(x, y, cpu=exact, default=rounded_before)


def rounded(x: Array, dtype: Any) -> Array:
    """Rounds a product's float32 result to `dtype`, on TPUs before it leaves the product.

    Without a barrier, XLA omits a rounding that float32 arithmetic follows, and a TPU would move
    twice the bytes. A CPU is faster without one more pass over them.
    """

    def in_product(x: Array) -> Array:
        return lax.optimization_barrier(x.astype(dtype))

    if x.dtype == dtype:
        return x
    return lax.platform_dependent(x, tpu=in_product, default=lambda x: x.astype(dtype))


def to_bits(x: Array) -> Array:
    """Returns an array of a two-byte dtype as uint16 with the same bits, any other unchanged.

    On the CPU, XLA has no slices, gathers or updates of bfloat16: it widens whole arrays to float32
    for them, in every step.
    """
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def from_bits(x: Array, dtype: Any = jnp.bfloat16) -> Array:
    """Returns uint16 bits as `dtype`, anything else unchanged."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x
