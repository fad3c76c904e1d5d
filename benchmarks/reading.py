"""Reading alone: `python -m benchmarks.reading`. Needs PyTorch, as the tests do.

It stores a run of 14 hooks in both formats and reads it back while the page cache is warm. It
prints GB/s of activations, by the clock and per second of a core:

- shuffled batches of all hooks from safetensors, with the default buffer of 64 batches and with
  one of 4, beside a copy in memory;
- shuffled batches of all hooks from gzip pickles, beside isal's decompression alone, beside that
  and the sha256 of the same files, and beside `pickle.load(gzip.open(...))`;
- one hook of the 14: from safetensors, from one torch.save file per sample, and from a `datasets`
  folder read as SAELens reads it. For safetensors the bytes that are touched are counted.

Shares are medians over the rounds, with the least and the largest one: what is compared follows
each other in a round, so that other processes disturb both alike. By the clock, reading pickles may
exceed isal alone, since it uses several threads. Where no other core is free, the share per second
of a core counts. The last line printed is one JSON object.
"""

import argparse
import gzip
import hashlib
import json
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import datasets
import ml_dtypes
import numpy as np
import torch
from isal import igzip

from activation_extraction import ActivationDataset
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.dataset.token_source import BUFFER_BATCHES
from activation_extraction.store.identity import Identity, RunFacts, StorageOptions
from activation_extraction.store.shard_reader import ShardBytes
from activation_extraction.store.storage import ActivationStorage
from benchmarks.processes import machine

HOOKS, WIDTH, LENGTH, BATCH = 14, 896, 512, 512
BUFFER, SMALL_BUFFER = BUFFER_BATCHES * BATCH, 4 * BATCH  # tokens; the first is the default
COPIED = 2**29  # bytes, in memory
NAMES: dict[int | str, str] = {layer: f"blocks.{layer}.hook_resid_post" for layer in range(HOOKS)}
ONE = NAMES[HOOKS // 2]
BY = ("clock", "core")
SIZES = np.random.default_rng(0).lognormal(0.0, 0.5, WIDTH).astype(np.float32)


class Rate(NamedTuple):
    """GB per second, and per second of a core."""

    clock: float
    core: float


Rates = dict[str, list[Rate]]  # of every round, by what is read


def values_of(sample: int) -> np.ndarray:
    """(LENGTH, WIDTH) bfloat16: normal, with another size in every dimension."""
    chance = np.random.default_rng(sample)
    values = chance.standard_normal((LENGTH, WIDTH), np.float32) * SIZES
    return values.astype(ml_dtypes.bfloat16)


def store(folder: Path, shard_format: str, samples: int) -> None:
    identity = Identity(
        activation_dtype="bfloat16", max_seq_length=LENGTH, shard_format=shard_format
    )
    facts: dict[int | str, dict[str, Any]] = {key: {"width": WIDTH} for key in NAMES}
    token_ids = np.arange(LENGTH, dtype=np.int32)
    options = StorageOptions(shard_size_gb=0.1, shard_format=shard_format)
    with ActivationStorage(
        folder, NAMES, options, identity, facts=RunFacts(hooks=facts)
    ) as storage:
        for sample in range(samples):
            values = values_of(sample)
            for number, key in enumerate(NAMES):
                rolled = np.roll(values.view(np.uint16), number, axis=1).view(values.dtype)
                storage.add_activation(key, rolled, sample, "", token_ids)


def store_for_others(folder: Path, samples: int) -> None:
    """One hook as files of torch.save, and as a folder of `datasets` in float16."""
    (folder / "torch").mkdir(parents=True)
    for sample in range(samples):
        values = torch.from_numpy(values_of(sample).view(np.int16)).view(torch.bfloat16)
        torch.save(values, folder / "torch" / f"{sample}.pt")
    features = datasets.Features({ONE: datasets.Array2D((LENGTH, WIDTH), "float16")})

    def rows() -> Iterator[dict[str, np.ndarray]]:
        for sample in range(samples):
            yield {ONE: values_of(sample).astype(np.float16)}

    cache = str(folder / "cache")
    table = datasets.Dataset.from_generator(rows, features=features, cache_dir=cache)
    table.save_to_disk(folder / "datasets")


def read_batches(dataset: ActivationDataset, shuffle: int | None = 0, buffer: int = BUFFER) -> None:
    for _ in dataset.batches(BATCH, shuffle=shuffle, buffer=buffer):
        pass


def read_on(
    dataset: ActivationDataset, shuffle: int | None = 0, buffer: int = BUFFER
) -> Iterator[int]:
    """Yields once all memory has been used, as in a long pass: memory that is used for the first
    time is slow. So is memory that a virtual machine has not used for some seconds, the page cache
    too: everything is read once before. Then reads on, and yields the bytes. It ends one window
    before the end, so that as much is read ahead at the end as was at the beginning."""
    read_batches(dataset, shuffle, buffer)
    batches = dataset.batches(BATCH, shuffle=shuffle, buffer=buffer)
    first, last = buffer // BATCH, (dataset.tokens - buffer // 2) // BATCH
    for _ in range(first):
        next(batches)
    yield 0
    row = sum(dataset.hooks.values()) * dataset.dtype.itemsize
    yield sum(len(next(batches)) for _ in range(first, last)) * row


def read_torch_files(folder: Path) -> None:
    paths = sorted((folder / "torch").iterdir())
    for number in np.random.default_rng(0).permutation(len(paths)):
        torch.load(paths[number])


def read_datasets(folder: Path) -> None:
    """In blocks of samples that are flattened to tokens, as SAELens' activation store does it."""
    table = datasets.load_from_disk(str(folder / "datasets"))
    table.set_format(type="torch", columns=[ONE], dtype=torch.float16)
    for start in range(0, len(table), BATCH // LENGTH):
        table[start : start + BATCH // LENGTH][ONE].reshape(-1, WIDTH)


def decompress(folder: Path) -> None:
    space = bytearray(2**20)
    for path in sorted(folder.glob("*.pkl.gz")):
        with igzip.open(path) as file:
            while file.readinto(space):
                pass


def decompress_and_hash(folder: Path) -> None:
    """What reading gzip pickles takes at the least, as it checks their sha256."""
    decompress(folder)
    for path in folder.glob("*.pkl.gz"):
        with open(path, "rb") as file:
            hashlib.file_digest(file, "sha256")


def unpickle(folder: Path) -> None:
    for path in sorted(folder.glob("*.pkl.gz")):
        with gzip.open(path) as file:
            pickle.load(file)


def touched_share(folder: Path) -> float:
    """The bytes that reading one hook touches, as a share of the hook's own."""
    touched = 0
    original = ShardBytes.begin

    def counting(file: ShardBytes, start: int, stop: int) -> Callable[[], np.ndarray]:
        nonlocal touched
        touched += stop - start
        return original(file, start, stop)

    with mock.patch.object(ShardBytes, "begin", counting):
        dataset = ActivationDataset(folder, [ONE])
        read_batches(dataset)
    return touched / (dataset.tokens * WIDTH * 2)


def measure(root: Path, samples: int, rounds: int) -> Rates:
    """Each round does everything once, so that all meet the same load."""
    pickles, tensors = root / "pickle", root / "safetensors"
    one = samples * LENGTH * WIDTH * 2
    source = np.random.default_rng(0).integers(0, 2**16, COPIED // 2, np.uint16)
    target = np.empty_like(source)
    every, single = ActivationDataset(tensors), ActivationDataset(tensors, [ONE])
    pickled = ActivationDataset(pickles)

    def copied() -> Iterator[int]:
        """As in `read_on`, all memory has just been used."""
        np.copyto(target, source)
        yield 0
        np.copyto(target, source)
        yield target.nbytes

    def whole(size: int, action: Callable[..., object], *arguments: Any) -> Iterator[int]:
        yield 0
        action(*arguments)
        yield size

    actions: dict[str, Callable[[], Iterator[int]]] = {
        "memory copy": copied,
        "safetensors, shuffled": lambda: read_on(every),
        "safetensors, small buffer": lambda: read_on(every, 0, SMALL_BUFFER),
        "safetensors, in order": lambda: read_on(every, None),
        "isal and sha256": lambda: whole(HOOKS * one, decompress_and_hash, pickles),
        "isal alone": lambda: whole(HOOKS * one, decompress, pickles),
        "gzip pickles, shuffled": lambda: whole(HOOKS * one, read_batches, pickled),
        "gzip pickles, in order": lambda: whole(HOOKS * one, read_batches, pickled, None),
        "pickle.load(gzip.open)": lambda: whole(HOOKS * one, unpickle, pickles),
        "one hook, safetensors, shuffled": lambda: read_on(single),
        "one hook, torch.load per sample": lambda: whole(one, read_torch_files, root / "others"),
        "one hook, datasets": lambda: whole(one, read_datasets, root / "others"),
    }
    rates: Rates = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            rates[name].append(timed(action()))
    return rates


def timed(steps: Iterator[int]) -> Rate:
    """GB per second, and per second of a core, of what follows the first step."""
    next(steps)
    clock, core = time.perf_counter(), time.process_time()
    size = next(steps)
    seconds = time.perf_counter() - clock, time.process_time() - core
    return Rate(size / seconds[0] / 1e9, size / seconds[1] / 1e9)


def medians(rates: Rates) -> dict[str, dict[str, float]]:
    return {
        name: {by: round(statistics.median(getattr(rate, by) for rate in each), 3) for by in BY}
        for name, each in rates.items()
    }


def shares(rates: Rates, what: str, whole: str) -> dict[str, list[float]]:
    """Median, least and largest share in a round, by the clock and per second of a core."""
    found = {}
    for by in BY:
        pairs = zip(rates[what], rates[whole], strict=True)
        each = [getattr(one, by) / getattr(other, by) for one, other in pairs]
        found[by] = [round(f(each), 3) for f in (statistics.median, min, max)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=256, help="of 512 tokens (default: 256)")
    parser.add_argument("--rounds", type=int, default=3, help="medians of so many (default: 3)")
    arguments = parser.parse_args()
    datasets.disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for shard_format in SHARD_FORMATS:
            store(root / shard_format, shard_format, arguments.samples)
        store_for_others(root / "others", arguments.samples)
        rates = measure(root, arguments.samples, arguments.rounds)
        touched = touched_share(root / "safetensors")
    typical = medians(rates)
    print("  GB/s  GB/s of a core")
    for name, rate in typical.items():
        print(f"{rate['clock']:>6.2f} {rate['core']:>6.2f}  {name}")
    result = {
        "gb_per_second": typical,
        "shuffled_of_memory_copy": shares(rates, "safetensors, shuffled", "memory copy"),
        "small_buffer_of_memory_copy": shares(rates, "safetensors, small buffer", "memory copy"),
        "gzip_pickles_of_isal": shares(rates, "gzip pickles, shuffled", "isal alone"),
        "isal_and_sha256_of_isal": shares(rates, "isal and sha256", "isal alone"),
        "one_hook_touched": touched,
        "load": os.getloadavg()[0],
        "machine": machine(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
