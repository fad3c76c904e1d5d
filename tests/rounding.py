"""Computes by how much two right computations may differ, whatever processors they run on."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np

STEP = 2.0**-16  # relative change of inputs: far above float32's rounding, and still linear
DRAWS = 4  # random changes of all inputs
Name = TypeVar("Name", bound=Hashable)


def allowed_errors(
    function: Callable[[Any], Mapping[Name, np.ndarray]], inputs: Any, terms: int
) -> dict[Name, float]:
    """Returns by how much two float32 evaluations of a function may differ.

    Two evaluations differ by sqrt(2 n) u condition, where n is the number of terms of the longest
    sum and u = 2^-24 (Higham and Mary, SIAM J. Sci. Comput. 41, 2019). The condition is the largest
    change of an output under random changes of all inputs, divided by the size of these changes
    (Kenney and Laub, SIAM J. Sci. Comput. 15, 1994).

    Args:
        function: The function, which returns arrays by name. It should be the reference: a wrong
            formula with a large condition would allow its own errors.
        inputs: Its inputs, a tree of arrays.
        terms: The number of terms of the longest sum.

    Returns:
        The largest allowed difference of each output.
    """
    draw, expected = np.random.default_rng(0), function(inputs)
    moved = dict.fromkeys(expected, 0.0)
    for _ in range(DRAWS):
        changed = jax.tree.map(lambda x: x * draw.choice([1 - STEP, 1 + STEP], x.shape), inputs)
        changed = jax.tree.map(lambda x, y: np.asarray(y, x.dtype), inputs, changed)
        for name, output in function(changed).items():
            most = np.abs(np.asarray(output) - expected[name]).max()
            moved[name] = max(moved[name], float(most))
    return {name: (2 * terms) ** 0.5 * 2.0**-24 / STEP * most for name, most in moved.items()}


def assert_within_rounding(
    got: Any, reference: Callable[..., np.ndarray], arrays: tuple[Any, ...], terms: int
) -> None:
    """Asserts that an array equals a reference, except for rounding; see `allowed_errors`.

    Args:
        got: The array.
        reference: The reference, a function of `arrays`.
        arrays: The inputs.
        terms: The number of terms of the longest sum.
    """

    def function(inputs: Any) -> dict[str, np.ndarray]:
        return {"": np.asarray(reference(*inputs))}

    error = np.abs(np.asarray(got) - function(arrays)[""]).max()
    allowed = allowed_errors(function, arrays, terms)[""]
    assert error <= allowed, f"{error:.2e} is more than {allowed:.2e}"


def assert_rounded_alike(got: Any, other: Any, exact: Any, name: str = "") -> None:
    """Asserts that `got` is as close to `exact` as `other` is, if both round equally often.

    Rounding to the nearest changes a number with significand m, from 1 to 2, by up to u / m of it
    (u = 2^-8 in bfloat16), so by u / (sqrt(3) m) in the root mean square. Numbers of many sizes
    have significands of density 1 / (m ln 2). So the mean of 1 / m^2 is 3 / (8 ln 2) for the
    numbers that are rounded in `other`. In `got`, the same numbers may have another scale, at which
    this mean is at most 1, so that the squared errors are 8 ln 2 / 3 times as large. For chance,
    five standard errors of the difference of the two means are allowed. They are estimated from the
    errors of `other`, because a wrong formula in `got` would allow its own errors.

    Args:
        got: The array to check, (..., width). The rows are rounded independently.
        other: The array to compare with, in the same shape.
        exact: The exact values.
        name: The name of the array, for the message.
    """
    exact = np.asarray(exact, np.float64)

    def squared_errors(array: Any) -> np.ndarray:
        return np.square(np.asarray(array, np.float64) - exact).mean(axis=-1)

    ours, theirs = squared_errors(got), squared_errors(other)
    chance = 5 * theirs.std() * (2 / theirs.size) ** 0.5
    allowed = 8 * np.log(2) / 3 * (theirs.mean() + chance)
    assert ours.mean() <= allowed, f"{name}: {ours.mean():.2e} is more than {allowed:.2e}"
