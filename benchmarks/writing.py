"""Writing alone, without a model: `python -m benchmarks.writing`.

Values are like activations: normal, of another size in every dimension, a few dimensions and the
first token of every document 100 times as large. On one core, MB/s of them and how small they get:
the standard library's gzip at its default level, against what the tool writes; and the tool's
ActivationStorage as a run uses it, on one core and on all. Then what each part of that costs. The
last line printed is one JSON object.
"""

import argparse
import gzip
import hashlib
import io
import json
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from isal import igzip

from activation_extraction.store.formats import GZIP_PICKLE, write_shard
from activation_extraction.store.pickle_file import COMPRESSION_LEVEL, pickle_records, records_of
from activation_extraction.store.shard import SampleRow, Shard
from activation_extraction.store.statistics import sums_of
from activation_extraction.store.storage import ActivationStorage
from activation_extraction.text.batch import Batch
from activation_extraction.text.packing import pack, samples_of
from benchmarks.processes import machine

HIDDEN, HOOKS, ROWS, LENGTH = 896, 14, 8, 1024
DTYPES = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
NAMES: dict[int | str, str] = {n: f"blocks.{n}.hook_resid_post" for n in range(HOOKS)}
ALL_CORES = os.sched_getaffinity(0)


def activations(dtype: Any) -> np.ndarray:
    """(hooks, rows, tokens, hidden)"""
    chance = np.random.default_rng(0)
    sizes = chance.lognormal(0.0, 0.5, HIDDEN).astype(np.float32)
    sizes[chance.choice(HIDDEN, 4, replace=False)] *= 100
    values = chance.standard_normal((HOOKS, ROWS, LENGTH, HIDDEN), np.float32) * sizes
    values[:, :, 0] *= 100
    return values.astype(dtype)


def batches(count: int) -> list[Batch]:
    """Full rows of one document each."""
    return list(pack(samples_of([np.arange(LENGTH)] * (count * ROWS)), ROWS, LENGTH))


def seconds(action: Callable[[], object], rounds: int) -> float:
    """Median of several calls."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        action()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Within it, this process has no others."""
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, ALL_CORES)


def shard_of(values: np.ndarray) -> Shard:
    """A shard of everything, as the tool has it."""
    ids = np.arange(values.shape[2], dtype=np.int32)
    rows = [SampleRow(row, ids, ids, "", None) for row in range(values.shape[1])]
    return Shard(rows, {layer: list(of_layer) for layer, of_layer in enumerate(values)})


def store(folder: Path, values: np.ndarray, count: int) -> float:
    """Seconds of an ActivationStorage from the first batch to the last shard."""
    given = batches(count)
    began = time.perf_counter()
    with ActivationStorage(folder, NAMES, shard_size_gb=0.2, overwrite=True) as storage:
        for batch in given:
            storage.add_batch(batch, dict(enumerate(values)))
    return time.perf_counter() - began


def write(path: Path, shard: Shard) -> None:
    """As the tool does."""
    write_shard(path, shard, NAMES, GZIP_PICKLE)


def against_gzip(folder: Path, values: np.ndarray, rounds: int) -> dict[str, float]:
    """MB/s and compressed size of the same shard, as others write it and as the tool does."""
    sample = shard_of(values[:, :1, : LENGTH // 4])  # gzip takes its time
    size = values[:, :1, : LENGTH // 4].nbytes

    def others() -> None:
        with gzip.open(folder / "others.pkl.gz", "wb") as file:  # level 9
            pickle.dump(records_of(sample, NAMES), file)

    slow = seconds(others, 1)
    quick = seconds(lambda: write(folder / "same.pkl.gz", sample), rounds)
    shard = shard_of(values)
    whole = seconds(lambda: write(folder / "ours.pkl.gz", shard), rounds)
    ratios = {name: (folder / f"{name}.pkl.gz").stat().st_size for name in ("others", "same")}
    return {
        "gzip_mb_per_second": size / slow / 1e6,
        "gzip_ratio": ratios["others"] / size,
        "ours_mb_per_second": values.nbytes / whole / 1e6,
        "ours_same_sample_mb_per_second": size / quick / 1e6,
        "ours_ratio": ratios["same"] / size,
        "times_as_fast": slow / size / (whole / values.nbytes),
        "size_against_gzip": ratios["same"] / ratios["others"],
    }


def parts(folder: Path, values: np.ndarray, rounds: int) -> dict[str, float]:
    """MB/s, of uncompressed values, of everything that happens to a shard, one after the other."""
    records = records_of(shard_of(values), NAMES)

    def pickled() -> bytes:
        file = io.BytesIO()
        pickle_records(records, file)
        return file.getvalue()

    plain = pickled()
    packed = igzip.compress(plain, compresslevel=COMPRESSION_LEVEL)

    def write() -> None:
        with open(folder / "plain", "wb") as file:
            file.write(packed)
            file.flush()
            os.fsync(file.fileno())

    def stream() -> None:
        with igzip.IGzipFile(
            fileobj=io.BytesIO(), mode="wb", compresslevel=COMPRESSION_LEVEL, mtime=0
        ) as file:
            pickle_records(records, file)

    shard = shard_of(values)
    actions: dict[str, Callable[[], object]] = {
        "statistics": lambda: [sums_of(each, shard.samples) for each in shard.slices.values()],
        "pickle": pickled,
        "compress at once": lambda: igzip.compress(plain, compresslevel=COMPRESSION_LEVEL),
        "pickle and compress": stream,
        "sha256 of the compressed": lambda: hashlib.sha256(packed).digest(),
        "write and sync": write,
    }
    return {name: values.nbytes / seconds(call, rounds) / 1e6 for name, call in actions.items()}


def measure(folder: Path, dtype: str, rounds: int, count: int) -> dict[str, Any]:
    """Everything for one dtype, with a line for each result."""
    values = activations(DTYPES[dtype])
    one_core = {min(ALL_CORES)}
    with on_cores(one_core):
        found: dict[str, Any] = dict(against_gzip(folder, values, rounds))
        of_parts = parts(folder, values, rounds)
    print(
        f"{dtype}: gzip {found['gzip_mb_per_second']:.0f} MB/s to {found['gzip_ratio']:.3f}, "
        f"tool {found['ours_mb_per_second']:.0f} MB/s to {found['ours_ratio']:.3f}: "
        f"{found['times_as_fast']:.1f} times as fast",
        flush=True,
    )
    for name, cores in (("one_core", one_core), ("all_cores", ALL_CORES)):
        with on_cores(cores):
            taken = [store(folder / "out", values, count) for _ in range(rounds)]
        found[f"storage_{name}_mb_per_second"] = (
            values.nbytes * count / statistics.median(taken) / 1e6
        )
    found["parts_mb_per_second"] = of_parts
    print(
        f"{dtype}: ActivationStorage {found['storage_one_core_mb_per_second']:.0f} MB/s on one "
        f"core, {found['storage_all_cores_mb_per_second']:.0f} on {len(ALL_CORES)}; "
        + ", ".join(f"{name} {rate:.0f}" for name, rate in of_parts.items()),
        flush=True,
    )
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=3, help="of which medians (default: 3)")
    parser.add_argument("--batches", type=int, default=3, help="for the storage (default: 3)")
    parser.add_argument("--folder", type=Path, help="on the disk to be measured (default: /tmp)")
    given = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        found = {
            dtype: measure(Path(name), dtype, given.rounds, given.batches) for dtype in given.dtypes
        }
    print(json.dumps({"machine": machine(), **found}))


if __name__ == "__main__":
    main()
