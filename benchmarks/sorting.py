"""Rows sorted by expert: as one array of numbers, as experts.py does it, and by jnp.argsort.

    JAX_PLATFORMS=cpu PYTHONPATH=.venv/libtpu .venv/bin/python -m benchmarks.sorting

Milliseconds on this machine, the two in turn, the best of all rounds; and seconds to compile for a
TPU v5e, which needs libtpu and no TPU. The last line printed is one JSON object.

65,536 rows of 128 experts on two cores of an AMD EPYC: 3.4 and 14.6 ms, 2.1 and 5.6 s.
"""

import argparse
import importlib.util
import json
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import SingleDeviceSharding

from activation_extraction.model.experts import stable_order
from benchmarks.processes import machine
from benchmarks.tpu_plan import chips

WAYS: dict[str, Callable[[Array, int], Array]] = {
    "one array": stable_order,
    "argsort": lambda groups, count: jnp.argsort(groups, stable=True),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--rows", type=int, default=65536, help="default: 65536")
    parser.add_argument("--experts", type=int, default=128, help="default: 128")
    parser.add_argument("--rounds", type=int, default=20, help="default: 20")
    given = parser.parse_args(argv)
    shape, count = (given.rows,), given.experts
    functions = {way: jax.jit(function, static_argnums=1) for way, function in WAYS.items()}
    groups = jnp.asarray(np.random.default_rng(0).integers(0, count, shape, np.int32))
    running = dict.fromkeys(WAYS, float("inf"))
    for _ in range(given.rounds + 1):  # the first one compiles
        for way, function in functions.items():
            began = time.perf_counter()
            function(groups, count).block_until_ready()
            running[way] = min(running[way], 1000 * (time.perf_counter() - began))
    compiling: dict[str, float] = {}
    if importlib.util.find_spec("libtpu"):
        on_chip = SingleDeviceSharding(chips("v5e:2x2")[0])
        for way, function in functions.items():
            began = time.perf_counter()
            function.lower(
                jax.ShapeDtypeStruct(shape, jnp.int32, sharding=on_chip), count
            ).compile()
            compiling[way] = time.perf_counter() - began
    for way, ms in running.items():
        line = f"{way:<10} {ms:8.2f} ms"
        print(line + (f" {compiling[way]:8.1f} s to compile for a TPU" if compiling else ""))
    print(json.dumps({"ms": running, "s_to_compile": compiling, "machine": machine()}))


if __name__ == "__main__":
    main()
