"""Measures what a device of this machine can do, if devices.py does not know its kind."""

import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from activation_extraction.model.decoder import TOKENS_AT_ONCE
from activation_extraction.model.devices import Chip
from activation_extraction.model.layers import einsum

SECONDS = 0.5  # for each measurement
COPIED = 2**26  # numbers that are read and written in place


def measured_chip(config: Any, dtype: Any, devices: int) -> Chip:
    """Returns what each of this machine's devices can do while all of them work.

    config: of the model; a product as large as one of its MLP is measured. devices: how many share
    what is measured. The size of the memory is not measured, but 0; links are as fast as memory.
    """
    hidden, width = config.hidden_size, config.sizes.get("F") or config.sizes["M"]
    x, w = jnp.ones((TOKENS_AT_ONCE, hidden), dtype), jnp.ones((width, hidden), dtype)
    products = jax.jit(lambda x, w: einsum("td,fd->tf", x, w))
    operations = 2 * TOKENS_AT_ONCE * hidden * width
    flops = _per_second(lambda: products(x, w), operations)
    numbers = [jnp.ones(COPIED, jnp.float32)]
    add = jax.jit(lambda x: x + 1, donate_argnums=0)  # without new pages of memory

    def add_one() -> jax.Array:
        numbers[0] = add(numbers[0])
        return numbers[0]

    bandwidth = _per_second(add_one, 2 * numbers[0].nbytes)
    return Chip(flops / devices, 0.0, bandwidth / devices, bandwidth / devices, 1, bandwidth)


def _per_second(action: Callable[[], Any], amount: float) -> float:
    """Returns the amount per second of the action's fastest call; the first does not count."""
    jax.block_until_ready(action())
    began, best = time.perf_counter(), math.inf
    while (now := time.perf_counter()) - began < SECONDS:
        jax.block_until_ready(action())
        best = min(best, time.perf_counter() - now)
    return amount / best
