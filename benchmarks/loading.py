"""What loading the weights of a small model takes: at once, and layer by layer as a large model's.

Random weights, and a new process for each round and way; they take turns. Nothing is compiled
before: with a cache of compiled programs the difference is smaller. Seconds are medians. The last
line printed is one JSON object.

On two cores of an AMD EPYC, `tiny` (0.46 M parameters): at once 0.014 s, layer by layer
0.546 s.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
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


def main(flags: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="default: tiny")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    given = parser.parse_args(flags)
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
