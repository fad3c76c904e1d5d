"""Seconds to load a small model's weights: at once, and layer by layer as for a large model.

The weights are random. Each way has a process of its own in every round, and the two take turns.
No compiled program is reused; with a cache of them the difference is smaller. Seconds are medians.
The last line printed is one JSON object.

`tiny` (0.46 M parameters) on two cores of an AMD EPYC: 0.014 s at once, 0.546 s layer by layer.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.inputs import make_model
from benchmarks.processes import machine, run
from benchmarks.shapes import SHAPES

WAYS = {"at once": sys.maxsize, "layer by layer": 0}
LOAD = """
import sys, time
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_enable_compilation_cache", False)
import numpy as np
from activation_extraction.model import weights
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.mesh import build_layout
from qwen2_jax_with_hooks import FAMILIES
weights.AT_ONCE = int(sys.argv[2])
checkpoint = Checkpoint(sys.argv[1])
family, config = FAMILIES.read(checkpoint.file("config.json"))
layout = build_layout(jax.devices()[:1], {"model": 1}, config.num_key_value_heads)
began = time.perf_counter()
table = family.weight_table(family.whole(config))
known = time.perf_counter()
jax.block_until_ready(weights.load_params(table, checkpoint, np.dtype("float32"), layout))
print(known - began, time.perf_counter() - known)
"""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="default: tiny")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    given = parser.parse_args(argv)
    found = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(Path(folder), SHAPES[given.shape])
        for _ in range(given.rounds):
            for way, most in WAYS.items():
                done = run([sys.executable, "-c", LOAD, folder, str(most)])
                table, loading = map(float, done.output.split())
                found["shapes of the weights"].append(table)
                found[way].append(loading)
    seconds = {name: statistics.median(each) for name, each in found.items()}
    for name, median in seconds.items():
        print(f"{name:<22} {median:6.3f} s")
    print(json.dumps({"parameters": parameters, "seconds": seconds, "machine": machine()}))


if __name__ == "__main__":
    main()
