"""How far apart two right computations may be, whatever processor they ran on."""

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

    inputs: arrays, in any tree. terms: the number n of terms of the longest sum. Two evaluations
    differ by sqrt(2 n) u condition, u = 2^-24 (Higham and Mary, SIAM J. Sci. Comput. 41, 2019),
    where the condition is the largest change that random changes of all inputs cause, over the size
    of those (Kenney and Laub, SIAM J. Sci. Comput. 15, 1994). `function` should be the reference,
    so that a wrong formula does not excuse itself.
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


def assert_rounded_alike(got: Any, other: Any, exact: Any, what: str = "") -> None:
    """Asserts that `got` is as close to `exact` as `other` is, which rounds as much on the way.

    Arrays (..., width); the rows before the last axis are rounded independently.

    Rounding to the nearest changes a number with significand m, from 1 to 2, by up to u / m of it,
    u = 2^-8 in bfloat16: by u / (sqrt(3) m) in the root mean square. Numbers of many sizes have
    significands of density 1 / (m ln 2), and so the mean of 1 / m^2 is 3 / (8 ln 2) for what is
    rounded in `other`. At the scale at which `got` has them it may be 1, and its squared errors
    8 ln 2 / 3 times as large. Chance adds up to five standard errors of the difference of the two
    means, by the errors of `other`, so that a wrong formula does not excuse itself.
    """
    exact = np.asarray(exact, np.float64)
    ours, theirs = (
        np.square(np.asarray(x, np.float64) - exact).mean(axis=-1) for x in (got, other)
    )
    chance = 5 * theirs.std() * (2 / theirs.size) ** 0.5
    allowed = 8 * np.log(2) / 3 * (theirs.mean() + chance)
    assert ours.mean() <= allowed, f"{what}: {ours.mean():.2e} is more than {allowed:.2e}"
