"""Two-byte floating point numbers as the unsigned integers that their bits spell.

XLA has no slices, gathers or updates of bfloat16 on the CPU: it widens whole arrays to float32 for
them, in every step. Where arrays are only moved, they are moved as bits; the numbers are the same.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array, lax


def to_bits(x: Array) -> Array:
    """uint16 for a two-byte type, anything else as it is."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def from_bits(x: Array, dtype: Any = jnp.bfloat16) -> Array:
    """`dtype` from uint16 bits; anything else as it is."""
    return lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x
