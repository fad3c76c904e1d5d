"""Measures how fast weights are loaded: `python -m benchmarks.loading`.

There are two models: one layer of Qwen3-8B, and one layer of Qwen3-30B-A3B, which has experts. The
benchmark makes two checkpoints of each model: one in bfloat16, and one in float8 with a scale for
each block of 128 x 128 values, as in Qwen's releases. The code that loads the weights of a run
loads the checkpoints into one device of this machine.

Loading is measured warm, from the page cache, and then cold, from the disk, with --rounds rounds
each. In every round, the bfloat16 checkpoint and the float8 checkpoint of a model are loaded once.

The benchmark prints the speed of each checkpoint in GB of its weight file per second, as the median
over the rounds. It also prints the speed of the float8 checkpoint divided by the speed of the
bfloat16 checkpoint: the median, the smallest and the largest ratio of all rounds. The last line is
one JSON object.
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

from activation_extraction.common.encodings import VALUE_DTYPE
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.family import read_model_config
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.weight_files import SINGLE_FILE
from activation_extraction.model.weights import load_params
from benchmarks.inputs import SHAPES, make_model
from benchmarks.processes import print_result
from qwen2_jax import Qwen2, weight_table

# The number of rows and of columns of a block of weights that share a scale.
BLOCK = 128
# The smallest scale, divided by the standard deviation of the weights. With this scale, a float8
# number of 400 stands for a weight of 8 standard deviations. The largest float8 number is 448.
SMALLEST_SCALE = 8 / 400
# The quantization_config in config.json of a float8 checkpoint.
QUANTIZATION = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
MODELS: dict[str, dict[str, Any]] = {
    "dense": SHAPES["8B"] | {"num_hidden_layers": 1},
    "experts": SHAPES["30B-A3B"] | {"num_hidden_layers": 1},
}
# The vocabulary is small, so that few of the weights are embeddings, which are bfloat16 in both
# checkpoints.
SMALL_VOCABULARY = {"vocab_size": 1024}


def quantise(source: Path, target: Path) -> None:
    """Converts a bfloat16 checkpoint to float8, with a random scale for each block.

    Projections become float8. Their scales and all other tensors are bfloat16.

    Args:
        source: The folder of the bfloat16 checkpoint.
        target: The folder of the float8 checkpoint, which must not exist yet.
    """
    config_fields = json.loads((source / "config.json").read_text())
    target.mkdir()
    (target / "config.json").write_text(
        json.dumps(config_fields | {"quantization_config": QUANTIZATION})
    )
    tensor_by_name = load_file(source / SINGLE_FILE)
    rng = np.random.default_rng(0)
    for tensor_name, weight in [*tensor_by_name.items()]:
        if not tensor_name.endswith("_proj.weight"):
            continue
        num_rows, num_columns = weight.shape
        block_counts = -(-num_rows // BLOCK), -(-num_columns // BLOCK)
        # SMALLEST_SCALE is for weights with a standard deviation of 1. The smallest scale is
        # proportional to the standard deviation of the weights, which is 1 / sqrt(num_columns) (see
        # `write_weights`).
        smallest_scale = SMALLEST_SCALE / num_columns**0.5
        block_scales = (smallest_scale * rng.uniform(1, 2, block_counts)).astype(weight.dtype)
        value_scales = block_scales.repeat(BLOCK, 0)[:num_rows].repeat(BLOCK, 1)[:, :num_columns]
        scaled_weight = weight.astype(np.float32) / value_scales.astype(np.float32)
        tensor_by_name[tensor_name] = scaled_weight.astype(VALUE_DTYPE)
        tensor_by_name[f"{tensor_name}_scale_inv"] = block_scales
    save_file(tensor_by_name, target / SINGLE_FILE)


def drop_from_page_cache(path: Path) -> None:
    """Drops a file from the page cache of the operating system, so that it is read from the disk.

    Args:
        path: The path of the file.
    """
    with open(path, "rb") as weight_file:
        # Pages that are not on the disk yet cannot be dropped from the page cache. So the operating
        # system first writes all pages of the file to the disk.
        os.fsync(weight_file.fileno())
        os.posix_fadvise(weight_file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def seconds_to_load(folder: Path, dtype: str) -> float:
    checkpoint = Checkpoint(str(folder))
    model_config = read_model_config(folder / "config.json")
    weight_spec_by_parameter_path = weight_table(Qwen2(model_config), checkpoint.tensors)
    layout = build_layout(jax.devices()[:1], {"model": 1}, model_config.num_key_value_heads)
    start_time = time.perf_counter()
    jax.block_until_ready(
        load_params(
            weight_spec_by_parameter_path, checkpoint, jnp.dtype(dtype), layout, dtype == "bfloat16"
        )
    )
    return time.perf_counter() - start_time


def compare(folders: dict[str, Path], dtype: str, rounds: int, is_cold: bool) -> dict[str, Any]:
    """Loads a bfloat16 and a float8 checkpoint alternately, and compares how fast they are loaded.

    Args:
        folders: The dtype of a checkpoint, "bfloat16" or "float8" -> its folder.
        dtype: The dtype of the weights on the device.
        rounds: The number of times that each checkpoint is loaded.
        is_cold: Whether to read from the disk instead of the page cache.

    Returns:
        A dict with these figures.
        bfloat16, float8: The median speed of loading the checkpoint over the rounds, in GB of its
            weight file per second.
        share: A list of the median, the smallest and the largest ratio of all rounds. The ratio of
            a round is the speed of the float8 checkpoint divided by the speed of the bfloat16
            checkpoint.
    """
    speeds_by_checkpoint_dtype: dict[str, list[float]] = {
        checkpoint_dtype: [] for checkpoint_dtype in folders
    }
    for _ in range(rounds):
        for checkpoint_dtype, folder in folders.items():
            weight_path = folder / SINGLE_FILE
            if is_cold:
                drop_from_page_cache(weight_path)
            gb_per_second = weight_path.stat().st_size / seconds_to_load(folder, dtype) / 1e9
            speeds_by_checkpoint_dtype[checkpoint_dtype].append(gb_per_second)
    speed_ratios = sorted(
        float8_speed / bfloat16_speed
        for float8_speed, bfloat16_speed in zip(
            speeds_by_checkpoint_dtype["float8"],
            speeds_by_checkpoint_dtype["bfloat16"],
            strict=True,
        )
    )
    median_min_and_max_ratio = statistics.median(speed_ratios), speed_ratios[0], speed_ratios[-1]
    figure_by_name: dict[str, Any] = {
        "share": [round(speed_ratio, 3) for speed_ratio in median_min_and_max_ratio]
    }
    for checkpoint_dtype, speeds_of_rounds in speeds_by_checkpoint_dtype.items():
        figure_by_name[checkpoint_dtype] = round(statistics.median(speeds_of_rounds), 3)
    return figure_by_name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--dtype",
        default="bfloat16",
        choices=["bfloat16", "float32"],
        help="of the weights on the device (default: bfloat16)",
    )
    parser.add_argument("--rounds", type=int, default=9, help="how many (default: 9)")
    parsed_flags = parser.parse_args()
    # Name of a model -> "warm" or "cold" -> result of `compare`.
    figures_by_model_name: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary_folder:
        for model_name, config_fields in MODELS.items():
            folder_by_dtype = {
                dtype: Path(temporary_folder, model_name, dtype) for dtype in ("bfloat16", "float8")
            }
            make_model(folder_by_dtype["bfloat16"], config_fields | SMALL_VOCABULARY)
            quantise(folder_by_dtype["bfloat16"], folder_by_dtype["float8"])
            for folder in folder_by_dtype.values():
                # The first loading of a checkpoint includes compiling, so it is not measured.
                seconds_to_load(folder, parsed_flags.dtype)
            figures_by_model_name[model_name] = {
                cache_state: compare(
                    folder_by_dtype, parsed_flags.dtype, parsed_flags.rounds, cache_state == "cold"
                )
                for cache_state in ("warm", "cold")
            }
            for cache_state, figure_by_name in figures_by_model_name[model_name].items():
                print(
                    f"{model_name}, loaded {cache_state} as {parsed_flags.dtype}: "
                    f"bfloat16 {figure_by_name['bfloat16']:.2f} GB/s, "
                    f"float8 {figure_by_name['float8']:.2f} GB/s, "
                    "a ratio of {:.2f} ({:.2f} to {:.2f})".format(*figure_by_name["share"]),
                    flush=True,
                )
    print_result({"dtype": parsed_flags.dtype, "gb_per_second": figures_by_model_name})


if __name__ == "__main__":
    main()
