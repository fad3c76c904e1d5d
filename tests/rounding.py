"""How far apart two right computations may be, whatever processor they ran on.

Processors, threads and devices differ in the order in which a sum is added up, and in whether a
product is rounded before. A tolerance that was measured on one of them is red on the next.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

STEP = 2.0**-16  # far above float32's rounding; small enough for values to change linearly
DRAWS = 4
Name = TypeVar("Name", bound=Hashable)


def allowed_errors(
    function: Callable[[Any], Mapping[Name, np.ndarray]], inputs: Any, terms: int
) -> dict[Name, float]:
    """The largest difference between two float32 evaluations of function(inputs), for each value.

    inputs: arrays, in any tree. terms: the number n of terms of the longest sum.

    In whatever order it is added up, a sum is the exact sum of terms that were each changed by
    n u / (1 - n u) of their size at most, u = 2^-24 (Higham, Accuracy and Stability of Numerical
    Algorithms, 2002, section 3.1), and in all likelihood by about sqrt(n) u (Higham and Mary, SIAM
    J. Sci. Comput. 41, 2019). How much such changes move a result is its condition: the largest
    change that random changes of all inputs cause, over the size of those (Kenney and Laub, SIAM
    J. Sci. Comput. 15, 1994). The errors of two evaluations are independent. So they differ by

        sqrt(2 n) u condition

    `function` should be the reference, so that a wrong formula does not excuse itself.
    """
    draw, expected = np.random.default_rng(0), function(inputs)
    moved = dict.fromkeys(expected, 0.0)
    for _ in range(DRAWS):
        changed = jax.tree.map(lambda x: x * draw.choice([1 - STEP, 1 + STEP], x.shape), inputs)
        changed = jax.tree.map(lambda x, y: np.asarray(y, x.dtype), inputs, changed)
        for name, value in function(changed).items():
            most = np.abs(np.asarray(value) - expected[name]).max()
            moved[name] = max(moved[name], float(most))
    return {name: (2 * terms) ** 0.5 * 2.0**-24 / STEP * most for name, most in moved.items()}


def assert_within_rounding(
    got: Any, reference: Callable[..., np.ndarray], arrays: tuple[Any, ...], terms: int
) -> None:
    """Asserts that `got` is reference(*arrays) but for rounding; see `allowed_errors`."""

    def function(inputs: Any) -> dict[str, np.ndarray]:
        return {"": np.asarray(reference(*inputs))}

    error = np.abs(np.asarray(got) - function(arrays)[""]).max()
    allowed = allowed_errors(function, arrays, terms)[""]
    assert error <= allowed, f"{error:.2e} is more than {allowed:.2e}"
