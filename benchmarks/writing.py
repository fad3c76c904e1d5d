"""Measures how fast activations are stored, without a model: `python -m benchmarks.writing`.

The values resemble activations: they are normal with a different scale in each dimension, and a few
dimensions and the first token of every document are 100 times as large. For safetensors and gzipped
pickles, in bfloat16 and float32, it measures how many MB of activations `ActivationStorage` takes
per second, and its CPU seconds per GB: once with a bucket on a server that discards the bytes
(`server`), and once with files in memory (`files`). For comparison, a shard is saved by safetensors
or torch, or pickled and gzipped, and then uploaded by obstore. All ways take turns, `--rounds`
times; the medians are printed, and the last line is one JSON object. `--quick` measures fewer
batches, once.
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

HIDDEN, HOOKS, ROWS, LENGTH = 896, 14, 8, 1024
SHARD_GB = 0.43  # two batches in bfloat16, one in float32
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
FORMATS = ("safetensors", "pickle")
NAMES: dict[int | str, str] = {n: f"blocks.{n}.hook_resid_post" for n in range(HOOKS)}

Figures = dict[str, float]  # the name of a figure -> its value


def activations(dtype: Any) -> np.ndarray:
    """Returns random values of one batch, (hooks, rows, tokens, hidden)."""
    chance = np.random.default_rng(0)
    sizes = chance.lognormal(0.0, 0.5, HIDDEN).astype(np.float32)
    sizes[chance.choice(HIDDEN, 4, replace=False)] *= 100
    values = chance.standard_normal((HOOKS, ROWS, LENGTH, HIDDEN), np.float32) * sizes
    values[:, :, 0] *= 100
    return values.astype(dtype)


def full_batches(count: int) -> list[Batch]:
    """Returns `count` batches, in which every row is one document."""
    documents = [np.arange(LENGTH, dtype=np.int32)] * (count * ROWS)
    return list(pack(samples_of(documents), ROWS, LENGTH))


def measured(action: Callable[[], object], size: int) -> Figures:
    """Runs a function once and measures it.

    Args:
        action: The function, which stores activations.
        size: The bytes of activations that it stores.

    Returns:
        mb_per_second: MB of activations per second.
        core_seconds_per_gb: CPU seconds of this process for each GB of activations.
    """
    began, cores = time.perf_counter(), time.process_time()
    action()
    seconds, core_seconds = time.perf_counter() - began, time.process_time() - cores
    return {
        "mb_per_second": size / 1e6 / seconds,
        "core_seconds_per_gb": core_seconds / size * 1e9,
    }


def store(
    folder: Path, remote: Folder | None, shard_format: str, values: np.ndarray, batches: list[Batch]
) -> None:
    """Stores the same values for each batch, in a new run.

    Args:
        folder: The local folder of the run.
        remote: Its folder in a bucket. None to store locally.
        shard_format: "safetensors" or "pickle".
        values: The values of each batch, (hooks, rows, tokens, hidden).
        batches: The batches.
    """
    arrays: dict[int | str, np.ndarray] = dict(enumerate(values))
    options = StorageOptions(SHARD_GB, shard_format, overwrite=True, waiting_shards_gb=8 * SHARD_GB)
    with ActivationStorage(folder, NAMES, options, remote=remote) as storage:
        for batch in batches:
            storage.add_batch(batch, arrays)


def as_torch(values: np.ndarray) -> torch.Tensor:
    if values.dtype == np.float32:
        return torch.from_numpy(values)
    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)


def ways_of_others(folder: Path, values: np.ndarray) -> dict[str, Callable[[], Figures]]:
    """Returns other ways to store one shard in a bucket.

    Args:
        folder: The folder where a way saves its file before it uploads it.
        values: The values of the shard, (hooks, rows, tokens, hidden).

    Returns:
        The name of a way -> a function that runs and measures it once.
    """
    tensors = {NAMES[n]: array.reshape(-1, HIDDEN) for n, array in enumerate(values)}
    torch_tensors = {name: as_torch(tensor) for name, tensor in tensors.items()}
    part = values[:, :1, : LENGTH // 4]  # gzip is slow, so it gets a quarter of one row
    remote, path = Folder("gs://bucket/others"), folder / "other"

    def pickle_and_gzip() -> None:
        ids = np.arange(part.shape[2], dtype=np.int32)
        samples = [ShardSample(SampleFacts(number), ids, ids) for number in range(part.shape[1])]
        hooks = {
            key: DenseValues(key, name, HIDDEN, part.dtype.name) for key, name in NAMES.items()
        }
        shard = Shard(samples, hooks, {key: list(part[key]) for key in NAMES})
        with gzip.open(path, "wb") as file:
            pickle.dump(records_of(shard), file)

    def uploaded(save: Callable[[], object], size: int) -> Callable[[], Figures]:
        def save_and_upload() -> None:
            save()
            remote.write("other", path.read_bytes(), ANY)
            path.unlink()

        return lambda: measured(save_and_upload, size)

    return {
        "safetensors.save_file": uploaded(
            partial(safetensors.numpy.save_file, tensors, path), values.nbytes
        ),
        "torch.save": uploaded(partial(torch.save, torch_tensors, path), values.nbytes),
        "pickle and gzip": uploaded(pickle_and_gzip, part.nbytes),
    }


def measure(folder: Path, dtype: str, shard_format: str, rounds: int, count: int) -> list[Any]:
    """Measures all ways for one dtype and one format.

    Args:
        folder: The folder to write to.
        dtype: "bfloat16" or "float32".
        shard_format: "safetensors" or "pickle". The ways of others run with "safetensors" only.
        rounds: The number of rounds.
        count: The number of batches in a round.

    Returns:
        A row of the table for each way, with the medians of its figures.
    """
    values, batches = activations(DTYPES[dtype]), full_batches(count)
    size = values.nbytes * count
    remotes = {"server": Folder("gs://bucket/run"), "files": None}

    def ours(remote: Folder | None) -> Figures:
        figures = measured(
            lambda: store(folder / "out", remote, shard_format, values, batches), size
        )
        shutil.rmtree(folder / "out")
        return figures

    ways: dict[str, Callable[[], Figures]] = {
        f"ours, {shard_format}, to {place}": partial(ours, remote)
        for place, remote in remotes.items()
    }
    if shard_format == FORMATS[0]:
        ways |= ways_of_others(folder, values)
    of_rounds: dict[str, list[Figures]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            of_rounds[way].append(run())
    return [{"dtype": dtype, "way": way} | medians(figures) for way, figures in of_rounds.items()]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=3, help="medians of so many (default: 3)")
    parser.add_argument(
        "--batches",
        type=int,
        default=16,
        help="in a round. With few batches, the beginning and the end of a round distort the "
        "figures, because only one shard is being stored then (default: 16)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("/dev/shm"),
        help="where a temporary folder is made (default: /dev/shm)",
    )
    parser.add_argument("--quick", action="store_true", help="one round of 3 batches")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.batches = 1, 3
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, null_bucket():
        for dtype in options.dtypes:
            for shard_format in options.formats:
                rows += measure(Path(folder), dtype, shard_format, options.rounds, options.batches)
    print_table(rows)
    print_result({"rows": rows})


if __name__ == "__main__":
    main()
