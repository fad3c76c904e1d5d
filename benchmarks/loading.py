"""How fast weights are loaded: `python -m benchmarks.loading`.

It makes a checkpoint in bfloat16, and one in float8 with a scale for each block of 128 x 128
values, as Qwen releases them: a layer of Qwen3-8B, and one with experts, of Qwen3-30B-A3B. Both are
loaded into one device of this machine, as in a run, in turns and from the page cache. It prints
GB/s of what is on disk, medians over the rounds, and the median share of float8 in bfloat16's with
the least and the largest one. The last line is one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from activation_extraction.common.encodings import VALUES
from activation_extraction.model.checkpoint import SINGLE_FILE, Checkpoint
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.weights import load_params
from benchmarks.inputs import make_model
from benchmarks.processes import machine
from benchmarks.shapes import SHAPES
from qwen2_jax_with_hooks import FAMILIES

BLOCK = 128  # rows and columns
LARGEST = 8 / 400  # standard deviations of the values for each unit of a code
QUANTIZED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
MODELS: dict[str, dict[str, Any]] = {
    "dense": SHAPES["8B"] | {"num_hidden_layers": 1},
    "experts": SHAPES["30B-A3B"] | {"num_hidden_layers": 1},
}
ROWS_OF_VOCABULARY = {"vocab_size": 1024}  # embeddings are not float8


def quantise(source: Path, target: Path) -> None:
    """Writes a checkpoint's matrices in float8, beside scales of blocks in bfloat16."""
    config = json.loads((source / "config.json").read_text())
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZED}))
    tensors, chance = load_file(source / SINGLE_FILE), np.random.default_rng(0)
    for name, values in [*tensors.items()]:
        if not name.endswith("_proj.weight"):
            continue
        blocks = [-(-size // BLOCK) for size in values.shape]
        unit = LARGEST / values.shape[1] ** 0.5
        scales = (unit * chance.uniform(1, 2, blocks)).astype(values.dtype)
        of_values = scales.repeat(BLOCK, 0)[: len(values)].repeat(BLOCK, 1)[:, : values.shape[1]]
        tensors[name] = (values.astype(np.float32) / of_values.astype(np.float32)).astype(VALUES)
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, target / SINGLE_FILE)


def seconds_to_load(folder: Path, dtype: str) -> float:
    checkpoint = Checkpoint(str(folder))
    family, config = FAMILIES.read_config(folder / "config.json")
    table = family.weight_table(family.whole(config), checkpoint.tensors)
    layout = build_layout(jax.devices()[:1], {"model": 1}, config.num_key_value_heads)
    began = time.perf_counter()
    jax.block_until_ready(
        load_params(table, checkpoint, jnp.dtype(dtype), layout, dtype == "bfloat16")
    )
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, config in MODELS.items():
            folders = {kind: Path(scratch, name, kind) for kind in ("bfloat16", "float8")}
            make_model(folders["bfloat16"], config | ROWS_OF_VOCABULARY)
            quantise(*folders.values())
            speeds: dict[str, list[float]] = {kind: [] for kind in folders}
            for number in range(asked.rounds + 1):
                for kind, folder in folders.items():
                    size = (folder / SINGLE_FILE).stat().st_size
                    speed = size / seconds_to_load(folder, asked.dtype) / 1e9
                    speeds[kind] += [speed] * (number > 0)  # the first round compiles
            pairs = zip(speeds["float8"], speeds["bfloat16"], strict=True)
            shares = sorted(a / b for a, b in pairs)
            found[name] = {kind: round(statistics.median(each), 3) for kind, each in speeds.items()}
            spread = statistics.median(shares), shares[0], shares[-1]
            found[name]["share"] = [round(share, 3) for share in spread]
            print(
                f"{name}, loaded as {asked.dtype}: bfloat16 {found[name]['bfloat16']:.2f} GB/s, "
                f"float8 {found[name]['float8']:.2f} GB/s, "
                "a share of {:.2f} ({:.2f} to {:.2f})".format(*spread),
                flush=True,
            )
    print(json.dumps({"dtype": asked.dtype, "gb_per_second": found, "machine": machine()}))


if __name__ == "__main__":
    main()
