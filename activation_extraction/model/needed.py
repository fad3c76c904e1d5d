"""Which inputs of a function its outputs depend on, read off its program without running it.

So a layer that is run only in part is loaded only in part, whatever the hooks are.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Literal


def needed_inputs(function: Callable[..., Any], *inputs: Any) -> list[bool]:
    """For every leaf of the inputs (arrays or their shapes): does any output depend on it?"""
    program = jax.make_jaxpr(function)(*inputs).jaxpr
    needed = {out for out in program.outvars if not isinstance(out, Literal)}
    for equation in reversed(program.eqns):
        if needed.intersection(equation.outvars):
            needed.update(value for value in equation.invars if not isinstance(value, Literal))
    return [value in needed for value in program.invars]
