"""Measures how fast weights are loaded: `python -m benchmarks.loading`.

It makes checkpoints of one layer of Qwen3-8B and of one layer of Qwen3-30B-A3B, which has experts.
Each is made in bfloat16, and in float8 with a scale for each block of 128 x 128 values, as in
Qwen's releases. The two dtypes take turns, and are loaded into one device of this machine as in a
run: warm, from the page cache, and cold, from the disk, where a checkpoint usually is. It prints
GB/s of the files (medians over the rounds), and the ratio of float8's speed to bfloat16's (median,
smallest and largest). The last line is one JSON object.
"""

import argparse
import json
import os
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
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.family import read_model_config
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.weight_files import SINGLE_FILE
from activation_extraction.model.weights import load_params
from benchmarks.inputs import SHAPES, make_model
from benchmarks.processes import print_result
from qwen2_jax import Qwen2, weight_table

BLOCK = 128  # rows and columns of a block that has one scale
# The smallest scale, in standard deviations of the values: codes up to 400 reach 8 deviations.
SMALLEST_SCALE = 8 / 400
QUANTIZED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
MODELS: dict[str, dict[str, Any]] = {
    "dense": SHAPES["8B"] | {"num_hidden_layers": 1},
    "experts": SHAPES["30B-A3B"] | {"num_hidden_layers": 1},
}
ROWS_OF_VOCABULARY = {"vocab_size": 1024}  # embeddings are not float8


def quantise(source: Path, target: Path) -> None:
    """Writes a float8 checkpoint with random scales, which stands for the values of another one.

    Args:
        source: The folder of the bfloat16 checkpoint.
        target: The folder to make. Its projections are float8; the scales of their blocks, and all
            other tensors, are bfloat16.
    """
    config = json.loads((source / "config.json").read_text())
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTIZED}))
    tensors = load_file(source / SINGLE_FILE)
    rng = np.random.default_rng(0)
    for name, values in [*tensors.items()]:
        if not name.endswith("_proj.weight"):
            continue
        blocks = [-(-size // BLOCK) for size in values.shape]
        smallest_scale = SMALLEST_SCALE / values.shape[1] ** 0.5
        scales = (smallest_scale * rng.uniform(1, 2, blocks)).astype(values.dtype)
        of_values = scales.repeat(BLOCK, 0)[: len(values)].repeat(BLOCK, 1)[:, : values.shape[1]]
        tensors[name] = (values.astype(np.float32) / of_values.astype(np.float32)).astype(VALUES)
        tensors[f"{name}_scale_inv"] = scales
    save_file(tensors, target / SINGLE_FILE)


def drop_from_page_cache(path: Path) -> None:
    """Makes the next reader of a file wait for the disk."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())  # pages that are not on the disk yet would stay
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_to_load(folder: Path, dtype: str) -> float:
    checkpoint = Checkpoint(str(folder))
    config = read_model_config(folder / "config.json")
    table = weight_table(Qwen2(config), checkpoint.tensors)
    layout = build_layout(jax.devices()[:1], {"model": 1}, config.num_key_value_heads)
    start_time = time.perf_counter()
    jax.block_until_ready(
        load_params(table, checkpoint, jnp.dtype(dtype), layout, dtype == "bfloat16")
    )
    return time.perf_counter() - start_time


def compare(folders: dict[str, Path], dtype: str, rounds: int, cold: bool) -> dict[str, Any]:
    """Loads checkpoints in turns, and returns their speeds.

    Args:
        folders: "bfloat16" and "float8" -> the folder of the checkpoint.
        dtype: The dtype that weights have on the device.
        rounds: The number of times to load each checkpoint.
        cold: Whether to read from the disk, not from the page cache.

    Returns:
        bfloat16, float8: The median speed of each checkpoint in GB/s.
        share: The ratio of float8's speed to bfloat16's: [median, smallest, largest].
    """
    speeds: dict[str, list[float]] = {kind: [] for kind in folders}
    for _ in range(rounds):
        for kind, folder in folders.items():
            path = folder / SINGLE_FILE
            if cold:
                drop_from_page_cache(path)
            speeds[kind].append(path.stat().st_size / seconds_to_load(folder, dtype) / 1e9)
    pairs = zip(speeds["float8"], speeds["bfloat16"], strict=True)
    shares = sorted(float8 / bfloat16 for float8, bfloat16 in pairs)
    spread = statistics.median(shares), shares[0], shares[-1]
    figures: dict[str, Any] = {"share": [round(share, 3) for share in spread]}
    for kind, rates in speeds.items():
        figures[kind] = round(statistics.median(rates), 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--rounds", type=int, default=9, help="of the medians (default: 9)")
    options = parser.parse_args()
    speeds_of_models: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, config in MODELS.items():
            folders = {kind: Path(scratch, name, kind) for kind in ("bfloat16", "float8")}
            make_model(folders["bfloat16"], config | ROWS_OF_VOCABULARY)
            quantise(*folders.values())
            for folder in folders.values():
                seconds_to_load(folder, options.dtype)  # compiles, which later rounds do not
            speeds_of_models[name] = {
                state: compare(folders, options.dtype, options.rounds, state == "cold")
                for state in ("warm", "cold")
            }
            for state, speeds in speeds_of_models[name].items():
                print(
                    f"{name}, loaded {state} as {options.dtype}: "
                    f"bfloat16 {speeds['bfloat16']:.2f} GB/s, float8 {speeds['float8']:.2f} GB/s, "
                    "a ratio of {:.2f} ({:.2f} to {:.2f})".format(*speeds["share"]),
                    flush=True,
                )
    print_result({"dtype": options.dtype, "gb_per_second": speeds_of_models})


if __name__ == "__main__":
    main()
