"""Storing alone, without a model: `python -m benchmarks.writing`.

Values are like activations: normal, of another size in every dimension, a few dimensions and the
first token of every document 100 times as large. For safetensors and gzipped pickles, in bfloat16
and float32: how many MB of them per second ActivationStorage takes, on all cores and on one, to a
server that throws bytes away (`server`) and to files in memory (`files`), against `limit`, which
bare threads reach that do only what cannot be avoided: statistics, SHA-256, gzip, and handing the
bytes to the kernel. `lock_ms_per_gb` is the CPU time of the process, without uploading, outside of
calls that release the interpreter's lock, `caller_ms_per_gb` that of the caller of add_batch.
Beside it the ways of others: a file by safetensors, by torch, or pickled and gzipped, and then
uploaded by obstore. All take turns, `--rounds` times, and the best of each counts: what disturbs
a measurement makes it slower. `--quick` measures fewer and smaller batches, once, in three minutes.
The last line printed is one JSON object.
"""

import argparse
import gzip
import hashlib
import json
import os
import pickle
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import crc32c
import ml_dtypes
import numpy as np
import obstore
import safetensors.numpy

from activation_extraction.store import formats, local_files, statistics
from activation_extraction.store.folder import ANY, Folder
from activation_extraction.store.formats import blocks_of, chosen_format, gzip_member
from activation_extraction.store.identity import StorageOptions
from activation_extraction.store.pickle_file import records_of
from activation_extraction.store.shard import SampleRow, Shard
from activation_extraction.store.statistics import sums_of
from activation_extraction.store.storage import ActivationStorage
from activation_extraction.text.batch import Batch
from activation_extraction.text.packing import pack, samples_of
from benchmarks.null_bucket import SMALL, null_bucket
from benchmarks.processes import machine

HIDDEN, HOOKS, ROWS, LENGTH = 896, 14, 8, 1024
SHARD_GB = 0.43  # two batches in bfloat16, one in float32
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
FORMATS = ("safetensors", "pickle")
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


def batches(count: int, tokens: int) -> list[Batch]:
    """Full rows of documents of so many tokens each."""
    documents = [np.arange(tokens, dtype=np.int32)] * (count * ROWS * LENGTH // tokens)
    return list(pack(samples_of(documents), ROWS, LENGTH))


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


def options_for(name: str) -> StorageOptions:
    """name: of the format."""
    return StorageOptions(SHARD_GB, name, overwrite=True, waiting_shards_gb=8 * SHARD_GB)


def store(
    folder: Path, remote: Folder | None, name: str, values: np.ndarray, given: list[Batch]
) -> tuple[float, float]:
    """Seconds of an ActivationStorage from the first batch to the last shard, and those that the
    caller spent in add_batch without waiting for room."""
    arrays: dict[int | str, np.ndarray] = dict(enumerate(values))
    began = time.perf_counter()
    storage = ActivationStorage(folder, NAMES, options_for(name), remote=remote)
    with storage:
        before = time.thread_time()
        for batch in given:
            storage.add_batch(batch, arrays)
        calling = time.thread_time() - before
    return time.perf_counter() - began, calling


class Clock:
    """Sums up its own CPU time and that of calls that release the lock, which `timed` makes."""

    def __init__(self, own: float = 0.0) -> None:
        """own: the seconds that the clock itself takes for a call."""
        self.seconds = 0.0
        self._own = own
        self._adding = threading.Lock()

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            result = function(*arguments, **options)
            taken = time.thread_time() - began
            with self._adding:
                self.seconds += taken + self._own
            return result

        return call

    @classmethod
    def calibrated(cls) -> "Clock":
        """A clock that knows what it takes itself."""
        trial, calls = cls(), 10_000
        call = trial.timed(lambda: None)
        began = time.thread_time()
        for _ in range(calls):
            call()
        return cls((time.thread_time() - began - trial.seconds) / calls)


class Proxy:
    """Another object, some of whose attributes are replaced."""

    def __init__(self, behind: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _behind=behind)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)


@contextmanager
def timed_calls(clock: Clock) -> Iterator[None]:
    """Times the store's calls that release the interpreter's lock, within the block."""
    add = Proxy(np.add, reduce=clock.timed(np.add.reduce))
    numpy = Proxy(
        np,
        add=add,
        **{n: clock.timed(getattr(np, n)) for n in ("concatenate", "copyto", "multiply", "sqrt")},
    )

    def sha256() -> Any:
        digest = hashlib.sha256()
        return SimpleNamespace(update=clock.timed(digest.update), hexdigest=digest.hexdigest)

    def compressobj(*arguments: Any) -> Any:
        packer = blocks_isal.compressobj(*arguments)
        methods = {n: clock.timed(getattr(packer, n)) for n in ("compress", "flush")}
        return SimpleNamespace(**methods)

    blocks_isal = formats.isal_zlib
    put = obstore.put

    def put_little(to: Any, key: str, parts: list[memoryview], **options: Any) -> Any:
        """Sends no shard, which would take CPU time in Rust."""
        large = sum(part.nbytes for part in parts) > SMALL
        return put(to, key, [b"1"] if large else parts, **options)

    replaced: list[tuple[Any, str, Any]] = [
        (statistics, "np", numpy),
        (formats, "hashlib", Proxy(hashlib, sha256=sha256)),
        (formats, "isal_zlib", Proxy(blocks_isal, compressobj=compressobj)),
        (crc32c, "crc32c", clock.timed(crc32c.crc32c)),
        (local_files, "os", Proxy(os, fsync=clock.timed(os.fsync))),
        (obstore, "put", put_little),
    ]
    before = [getattr(target, name) for target, name, _ in replaced]
    try:
        for target, name, value in replaced:
            setattr(target, name, value)
        yield
    finally:
        for (target, name, _), value in zip(replaced, before, strict=True):
            setattr(target, name, value)


def lock_seconds(
    folder: Path, remote: Folder | None, name: str, values: np.ndarray, given: list[Batch]
) -> float:
    """CPU time of this process outside of the calls that release the lock."""
    clock = Clock.calibrated()
    arrays: dict[int | str, np.ndarray] = dict(enumerate(values))
    with timed_calls(clock):
        storage = ActivationStorage(folder, NAMES, options_for(name), remote=remote)
        with storage:
            before, timed = time.process_time(), clock.seconds
            for batch in given:
                storage.add_batch(batch, arrays)
            storage.finalize(complete=False)  # else it would miss what was not sent
            return time.process_time() - before - (clock.seconds - timed)


def bare_thread(
    name: str, values: np.ndarray, shards: Iterator[int], send: Callable[[list[Any]], None]
) -> None:
    """Does with shards what cannot be avoided, as long as there are any."""
    pieces = chosen_format(name, True).pieces
    for _ in shards:
        shard = shard_of(values)
        for slices in shard.slices.values():
            sums_of(slices, shard.positions)
        data: list[Any] = pieces(shard, NAMES, "")
        if name == "pickle":
            data = [part for block in blocks_of(data) for part in gzip_member(block)]
        digest = hashlib.sha256()
        for part in data:
            digest.update(part)
        send(data)


def limit(folder: Path, port: int | None, name: str, values: np.ndarray, count: int) -> float:
    """Seconds of as many bare threads as there are cores. port: of the server; None: to files."""

    def to_file(data: list[Any]) -> None:
        path = folder / f"limit-{threading.get_ident()}"
        with open(path, "wb", buffering=0) as file:
            for part in data:
                file.write(part)
        path.unlink()

    def to_server(data: list[Any]) -> None:
        size = sum(memoryview(part).nbytes for part in data)
        with socket.create_connection(("127.0.0.1", port)) as connection:
            head = f"PUT /bucket/x HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
            connection.sendall(head.encode())
            for part in data:
                connection.sendall(part)
            connection.recv(1000)

    shards = iter(range(count))
    threads = len(os.sched_getaffinity(0))
    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        send = to_file if port is None else to_server
        done = [pool.submit(bare_thread, name, values, shards, send) for _ in range(threads)]
        for each in done:
            each.result()
    return time.perf_counter() - began


def peers(folder: Path, values: np.ndarray) -> dict[str, Callable[[], float]]:
    """The ways of others to store one shard in the bucket; each returns its MB/s."""
    tensors = {NAMES[n]: each.reshape(-1, HIDDEN) for n, each in enumerate(values)}
    remote = Folder("gs://bucket/peers")

    def timed(save: Callable[[Path], object], size: int) -> Callable[[], float]:
        def run() -> float:
            path = folder / "peer"
            began = time.perf_counter()
            save(path)
            remote.write("peer", path.read_bytes(), ANY)
            taken = time.perf_counter() - began
            path.unlink()
            return size / taken / 1e6

        return run

    part = values[:, :1, : LENGTH // 4]  # gzip takes its time

    def gzipped(path: Path) -> None:
        with gzip.open(path, "wb") as file:
            pickle.dump(records_of(shard_of(part), NAMES), file)

    ways = {
        "safetensors.save_file + obstore": timed(
            lambda path: safetensors.numpy.save_file(tensors, path), values.nbytes
        ),
        "pickle + gzip + obstore": timed(gzipped, part.nbytes),
    }
    try:
        import torch
    except ImportError:
        print("torch is not installed: torch.save is left out", flush=True)
        return ways

    def tensor(each: np.ndarray) -> Any:
        if each.dtype == np.float32:
            return torch.from_numpy(each)
        return torch.from_numpy(each.view(np.int16)).view(torch.bfloat16)

    as_torch = {name: tensor(each) for name, each in tensors.items()}
    ways["torch.save + obstore"] = timed(lambda path: torch.save(as_torch, path), values.nbytes)
    return ways


def products() -> float:
    """GFLOP/s of a float32 matrix product, which tells how fast the machine is now."""
    one = np.ones((2048, 2048), np.float32)
    began = time.perf_counter()
    one @ one
    return 2 * 2048**3 / (time.perf_counter() - began) / 1e9


def measure(folder: Path, port: int, dtype: str, name: str, rounds: int, count: int) -> Any:
    """Everything for one dtype and one format, with a line for each place."""
    values = activations(DTYPES[dtype])
    given, size = batches(count, LENGTH), values.nbytes * count / 1e6
    short = batches(max(count // 2, 1), 64)
    found: dict[str, Any] = {"matrix_gflops": products()}
    one_core = {min(ALL_CORES)}
    remotes = {"server": Folder("gs://bucket/run"), "files": None}
    ways = peers(folder, values)
    best: dict[str, float] = dict.fromkeys(ways, 0.0)
    for place, remote in remotes.items():
        rates: dict[str, float] = {}

        def note(what: str, rate: float, rates: dict[str, float] = rates) -> None:
            rates[what] = max(rates.get(what, 0.0), rate)

        out, where = folder / "out", port if remote else None
        for _ in range(rounds):
            for cores, suffix in ((ALL_CORES, ""), (one_core, "one_core_")):
                with on_cores(cores):
                    seconds, calling = store(out, remote, name, values, given)
                    note(f"{suffix}mb_per_second", size / seconds)
                    found["caller_ms_per_gb"] = calling / size * 1e6
                    note(
                        f"limit_{suffix}mb_per_second",
                        size / limit(folder, where, name, values, count),
                    )
                shutil.rmtree(out)
            if remote is not None:
                for way, run in ways.items():
                    best[way] = max(best[way], run())
        rates["lock_ms_per_gb"] = lock_seconds(out, remote, name, values, given) / size * 1e6
        shutil.rmtree(out)
        rates["lock_ms_per_gb_64_tokens"] = (
            lock_seconds(out, remote, name, values, short)
            / (values.nbytes * len(short) / 1e6)
            * 1e6
        )
        shutil.rmtree(out)
        rates["share_of_limit"] = rates["mb_per_second"] / rates["limit_mb_per_second"]
        own = rates["mb_per_second"] / rates["one_core_mb_per_second"]
        bare = rates["limit_mb_per_second"] / rates["limit_one_core_mb_per_second"]
        rates["speed_up_against_bare_threads"] = own / bare
        found[place] = rates
        print(f"{dtype} {name} to {place}: " + ", ".join(f"{k} {v:.4g}" for k, v in rates.items()))
    found["peers_mb_per_second"] = best
    found["times_the_best_peer"] = found["server"]["mb_per_second"] / max(best.values())
    print(f"{dtype} {name}: peers {best}, {found['times_the_best_peer']:.2f} times the best")
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=3, help="of which the best (default: 3)")
    parser.add_argument(
        "--batches",
        type=int,
        default=16,
        help="in a round; with fewer, its beginning and end count, where only one shard is on its "
        "way (default: 16)",
    )
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="default: /dev/shm")
    parser.add_argument("--quick", action="store_true", help="one round of 3 batches, in 3 minutes")
    given = parser.parse_args(argv)
    if given.quick:
        given.rounds, given.batches = 1, 3
    with tempfile.TemporaryDirectory(dir=given.folder) as folder, null_bucket() as port:
        found = {
            f"{dtype} {name}": measure(Path(folder), port, dtype, name, given.rounds, given.batches)
            for dtype in given.dtypes
            for name in given.formats
        }
    print(json.dumps({"machine": machine(), **found}))


if __name__ == "__main__":
    main()
