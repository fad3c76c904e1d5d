"""Provides matrix products in float32, their rounding, and uint16 views of two-byte dtypes.

Every matrix product of the model, outside of kernels, is computed by `einsum` or
`einsum_of_parts`. These functions return float32, and their callers round the result once. Arrays
of two-byte dtypes are viewed as uint16 while they are only moved and not computed with, because
XLA for CPUs cannot move bfloat16 arrays efficiently (see `to_bits`).
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def einsum(equation: str, x: Array, y: Array) -> Array:
    """Computes `jnp.einsum` of two arrays in float32.

    float32 operands are multiplied in float32. By default, TPUs would round them to bfloat16, and
    GPUs to TF32.

    Args:
        equation: The equation, such as "BTD,DM->BTM".
        x: The left operand.
        y: The right operand.

    Returns:
        The product, accumulated in float32 and not rounded to the dtype of the operands.
    """
    product_precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(
        equation, x, y, precision=product_precision, preferred_element_type=jnp.float32
    )


def einsum_of_parts(equation: str, x: Array, y: Array) -> Array:
    """Computes the einsum of two arrays whose summed axis is split over devices.

    Each device computes the product of its parts of the operands, and the devices add these
    products up. On accelerators, the products are rounded to the dtype of x before they are added.
    In bfloat16, this halves the bytes that devices send. The caller rounds the sum anyway.

    Args:
        equation: The equation, such as "BTM,MD->BTD".
        x: The left operand.
        y: The right operand.

    Returns:
        The sum of the products, float32.
    """

    def compute_rounded_product(x: Array, y: Array) -> Array:
        return jnp.einsum(equation, x, y, preferred_element_type=x.dtype).astype(jnp.float32)

    compute_unrounded_product = partial(einsum, equation)
    if x.dtype == jnp.float32:
        return compute_unrounded_product(x, y)
    return lax.platform_dependent(
        x, y, cpu=compute_unrounded_product, default=compute_rounded_product
    )


def rounded(x: Array, dtype: Any) -> Array:
    """Rounds the float32 result of a matrix product.

    If float32 arithmetic follows, XLA omits the rounding, and a TPU would write and read twice the
    bytes of the rounded values. Therefore, an optimization barrier follows the rounding on TPUs.
    CPUs are faster without the barrier.

    Args:
        x: The result of a product, float32.
        dtype: The dtype to which the values are rounded.

    Returns:
        The rounded values.
    """

    def round_with_barrier(x: Array) -> Array:
        return lax.optimization_barrier(x.astype(dtype))

    if x.dtype == dtype:
        return x
    return lax.platform_dependent(x, tpu=round_with_barrier, default=lambda x: x.astype(dtype))


def to_bits(x: Array) -> Array:
    """Views an array of a two-byte dtype as uint16 with the same bits.

    Arrays of other dtypes are returned unchanged. XLA for CPUs cannot slice, gather or update
    bfloat16 arrays. It would convert whole arrays to float32 for such an operation in every step.
    """
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def from_bits(x: Array, dtype: Any = jnp.bfloat16) -> Array:
    """Views a uint16 array as a two-byte `dtype` with the same bits; the inverse of `to_bits`.

    Arrays of other dtypes are returned unchanged.

    Args:
        x: The array.
        dtype: The dtype of the result, if x is uint16.
    """
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x
