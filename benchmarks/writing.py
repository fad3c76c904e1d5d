"""Measures how fast activations are stored, without a model: `python -m benchmarks.writing`.

The values resemble activations: they are normally distributed with a different scale in each
dimension, and a few dimensions and the first token of every document are 100 times as large.
`ActivationStorage` stores them as safetensors and as gzipped pickles, in bfloat16 and float32, and
in two places: in a bucket on a server that discards the bytes (`server`), and in files in memory
(`files`). For comparison, a shard is saved by safetensors or torch, or pickled and gzipped, and
then uploaded by obstore.

For each of these ways, the benchmark measures MB of activations per second, and CPU seconds per GB.
Each of `--rounds` rounds measures every way once. The medians are printed as a table, and the last
line is one JSON object. `--quick` measures fewer batches in one round.
"""

import argparse
import gzip
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
import torch

from activation_extraction.cli.flags import StorageOptions
from activation_extraction.store.folder import ANY, Folder
from activation_extraction.store.hook_values import DenseValues
from activation_extraction.store.pickle_file import records_of
from activation_extraction.store.shard import Shard, ShardSample
from activation_extraction.store.storage import ActivationStorage
from activation_extraction.text.batch import Batch
from activation_extraction.text.packing import pack, samples_of
from activation_extraction.text.sample_facts import SampleFacts
from benchmarks.null_bucket import null_bucket
from benchmarks.processes import medians, print_result, print_table

# The width of the activations, the number of hooks, the number of rows of a batch, and the number
# of tokens of a row.
HIDDEN, HOOKS, ROWS, LENGTH = 896, 14, 8, 1024
# The size of a shard in 10^9 bytes: two batches in bfloat16, or one in float32.
SHARD_GB = 0.43
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
FORMATS = ("safetensors", "pickle")
# Key of a hook in pickles, which is the number of its layer here -> name of the hook.
HOOK_NAMES: dict[int | str, str] = {
    layer: f"blocks.{layer}.hook_resid_post" for layer in range(HOOKS)
}

# Name of a figure -> figure.
Figures = dict[str, float]


def activations(dtype: Any) -> np.ndarray:
    """Returns random activations of one batch, (HOOKS, ROWS, LENGTH, HIDDEN).

    Args:
        dtype: The NumPy dtype of the activations.
    """
    rng = np.random.default_rng(0)
    hidden_scales = rng.lognormal(0.0, 0.5, HIDDEN).astype(np.float32)
    hidden_scales[rng.choice(HIDDEN, 4, replace=False)] *= 100
    activation_values = (
        rng.standard_normal((HOOKS, ROWS, LENGTH, HIDDEN), np.float32) * hidden_scales
    )
    activation_values[:, :, 0] *= 100
    return activation_values.astype(dtype)


def full_batches(count: int) -> list[Batch]:
    """Returns batches in which every row is one document of LENGTH tokens.

    Args:
        count: The number of batches.
    """
    token_ids_of_documents = [np.arange(LENGTH, dtype=np.int32)] * (count * ROWS)
    return list(pack(samples_of(token_ids_of_documents), ROWS, LENGTH))


def figures_of(store_function: Callable[[], object], num_bytes: int) -> Figures:
    """Calls a function that stores activations, and returns its speed.

    Args:
        store_function: The function, which takes no arguments.
        num_bytes: The number of bytes of activations that the function stores.

    Returns:
        A dict with these figures.
        mb_per_second: MB of activations per second.
        core_seconds_per_gb: CPU seconds of this process for each GB of activations.
    """
    start_time, cpu_start_time = time.perf_counter(), time.process_time()
    store_function()
    storing_seconds = time.perf_counter() - start_time
    cpu_seconds = time.process_time() - cpu_start_time
    return {
        "mb_per_second": num_bytes / 1e6 / storing_seconds,
        "core_seconds_per_gb": cpu_seconds / num_bytes * 1e9,
    }


def store(
    folder: Path, remote: Folder | None, shard_format: str, values: np.ndarray, batches: list[Batch]
) -> None:
    """Stores batches as a new run, in which all batches have the same activations.

    Args:
        folder: The local folder of the run.
        remote: The folder of the run in a bucket. None to store locally.
        shard_format: "safetensors" or "pickle".
        values: The activations of a batch, (HOOKS, ROWS, LENGTH, HIDDEN).
        batches: The batches.
    """
    values_of_hook: dict[int | str, np.ndarray] = dict(enumerate(values))
    storage_options = StorageOptions(
        SHARD_GB, shard_format, overwrite=True, waiting_shards_gb=8 * SHARD_GB
    )
    with ActivationStorage(folder, HOOK_NAMES, storage_options, remote=remote) as storage:
        for batch in batches:
            storage.add_batch(batch, values_of_hook)


def as_torch(values: np.ndarray) -> torch.Tensor:
    if values.dtype == np.float32:
        return torch.from_numpy(values)
    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)


def ways_of_other_libraries(folder: Path, values: np.ndarray) -> dict[str, Callable[[], Figures]]:
    """Returns ways to store one shard in a bucket without `ActivationStorage`.

    Args:
        folder: The folder in which a way saves its file before it uploads the file.
        values: The activations of the shard, (HOOKS, ROWS, LENGTH, HIDDEN).

    Returns:
        The name of a way -> a function that stores the shard once and returns its speed.
    """
    tensor_of_hook = {
        HOOK_NAMES[layer]: array.reshape(-1, HIDDEN) for layer, array in enumerate(values)
    }
    torch_tensor_of_hook = {
        hook_name: as_torch(tensor) for hook_name, tensor in tensor_of_hook.items()
    }
    # gzip is slow, so only a quarter of one row is pickled and gzipped.
    pickled_values = values[:, :1, : LENGTH // 4]
    bucket_folder, file_path = Folder("gs://bucket/others"), folder / "other"

    def pickle_and_gzip() -> None:
        _, num_rows, row_length, _ = pickled_values.shape
        token_ids = np.arange(row_length, dtype=np.int32)
        shard_samples = [
            ShardSample(SampleFacts(sample_number), token_ids, token_ids)
            for sample_number in range(num_rows)
        ]
        hook_of_key = {
            key: DenseValues(key, hook_name, HIDDEN, pickled_values.dtype.name)
            for key, hook_name in HOOK_NAMES.items()
        }
        shard = Shard(
            shard_samples, hook_of_key, {key: list(pickled_values[key]) for key in HOOK_NAMES}
        )
        with gzip.open(file_path, "wb") as gzip_file:
            pickle.dump(records_of(shard), gzip_file)

    def way(save: Callable[[], object], num_bytes: int) -> Callable[[], Figures]:
        """Returns a function that saves and uploads a file, and returns the speed of doing both.

        Args:
            save: The function that saves the file.
            num_bytes: The number of bytes of activations in the file.
        """

        def save_and_upload() -> None:
            save()
            bucket_folder.write("other", file_path.read_bytes(), ANY)
            file_path.unlink()

        return lambda: figures_of(save_and_upload, num_bytes)

    return {
        "safetensors.save_file": way(
            partial(safetensors.numpy.save_file, tensor_of_hook, file_path), values.nbytes
        ),
        "torch.save": way(partial(torch.save, torch_tensor_of_hook, file_path), values.nbytes),
        "pickle and gzip": way(pickle_and_gzip, pickled_values.nbytes),
    }


def measure(folder: Path, dtype: str, shard_format: str, rounds: int, count: int) -> list[Any]:
    """Measures all ways to store activations of one dtype in one format.

    Args:
        folder: The folder in which the ways write.
        dtype: "bfloat16" or "float32".
        shard_format: "safetensors" or "pickle". The ways of other libraries are measured only with
            "safetensors", because they do not depend on the format.
        rounds: The number of rounds.
        count: The number of batches that `ActivationStorage` stores in a round.

    Returns:
        The rows of the table, one for each way: the dtype, the way, and the medians of its figures.
    """
    batch_values, batches = activations(DTYPES[dtype]), full_batches(count)
    num_stored_bytes = batch_values.nbytes * count
    bucket_folder_of_place = {"server": Folder("gs://bucket/run"), "files": None}

    def measure_this_tool(remote: Folder | None) -> Figures:
        tool_figures = figures_of(
            lambda: store(folder / "out", remote, shard_format, batch_values, batches),
            num_stored_bytes,
        )
        shutil.rmtree(folder / "out")
        return tool_figures

    function_of_way: dict[str, Callable[[], Figures]] = {
        f"ours, {shard_format}, to {place}": partial(measure_this_tool, remote)
        for place, remote in bucket_folder_of_place.items()
    }
    if shard_format == FORMATS[0]:
        function_of_way |= ways_of_other_libraries(folder, batch_values)
    figures_of_way: dict[str, list[Figures]] = {way_name: [] for way_name in function_of_way}
    for _ in range(rounds):
        for way_name, measure_way in function_of_way.items():
            figures_of_way[way_name].append(measure_way())
    return [
        {"dtype": dtype, "way": way_name} | medians(rounds_of_way)
        for way_name, rounds_of_way in figures_of_way.items()
    ]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument(
        "--batches",
        type=int,
        default=16,
        help="how many in a round. With few batches, the beginning and the end of a round distort "
        "the figures, because only one shard is being stored then (default: 16)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("/dev/shm"),
        help="in which a temporary folder is made (default: /dev/shm)",
    )
    parser.add_argument("--quick", action="store_true", help="one round of 3 batches")
    parsed_flags = parser.parse_args(argv)
    if parsed_flags.quick:
        parsed_flags.rounds, parsed_flags.batches = 1, 3
    table_rows = []
    with tempfile.TemporaryDirectory(dir=parsed_flags.folder) as temporary_folder, null_bucket():
        for dtype in parsed_flags.dtypes:
            for shard_format in parsed_flags.formats:
                table_rows += measure(
                    Path(temporary_folder),
                    dtype,
                    shard_format,
                    parsed_flags.rounds,
                    parsed_flags.batches,
                )
    print_table(table_rows)
    print_result({"rows": table_rows})


if __name__ == "__main__":
    main()
