"""What a chip's matrix units do for Pallas kernels, counted in the program, without a chip."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def padded_flops(function: Callable[..., Any], arguments: Sequence[Any], tile: int) -> float:
    """Returns what the matrix units do for the Pallas kernels of a function, in operations.

    It compares with a chip's peak: the rows of a product go through square tiles of its other
    operand, however full these are, once for each pass. Products of float32 take six passes with
    precision HIGHEST. tile: 128, or 256 on v6e.
    """
    total = 0.0
    for call in _equations(jax.make_jaxpr(function)(*arguments)):
        if call.primitive.name == "pallas_call":
            steps = math.prod(call.params["grid_mapping"].grid)
            for each in _equations(call.params["jaxpr"]):
                if each.primitive.name == "dot_general":
                    (contracted, _), _ = each.params["dimension_numbers"]
                    left, right = (operand.aval for operand in each.invars)
                    depth = math.prod(left.shape[axis] for axis in contracted)
                    tiles = -(-depth // tile) * -(-right.size // depth // tile)
                    passes = 6 if left.dtype == jnp.float32 else 1
                    total += steps * left.size // depth * tiles * passes * 2 * tile**2
    return total


def _equations(program: Any) -> Iterator[Any]:
    """Yields the equations of a program, those inside of others included."""
    for each in getattr(program, "jaxpr", program).eqns:
        yield each
        for inner in jax.tree.leaves([*each.params.values()]):
            if each.primitive.name != "pallas_call" and hasattr(inner, "eqns"):
                yield from _equations(inner)
