"""What looking at a run in a bucket costs: `python -m benchmarks.requests`.

Counts the requests of --status, and of a run that continues until it may write, over one folder
of so many shards in the emulated bucket of the tests: once as earlier versions left it, without
an outline in metadata.json, and once with it. `--run MACHINES HOSTS SHARDS` counts those of
--status over a whole run, each host with so many shards, in a bucket whose listings cost what they
return. Prints one table, and one JSON line at the end.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import numpy as np
from gcs_server import Bucket, gcs

from activation_extraction.dataset.folders import HostFolder
from activation_extraction.inspect.status import show_status
from activation_extraction.store.commit import METADATA, Commit, Outline, names_beside
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import StorageOptions
from activation_extraction.store.metadata import read_stored
from activation_extraction.store.sealed_json import seal, unseal
from activation_extraction.store.storage import ActivationStorage
from benchmarks.indexed_bucket import indexed_bucket

ROOT, NAME = "gs://bucket/run", "machine_000"
HOOKS: dict[int | str, str] = {n: f"blocks.{n}.hook_resid_post" for n in range(14)}


def storage_in(folder: str, overwrite: bool = False) -> ActivationStorage:
    """Shards of one sample, uploaded to the bucket."""
    options = StorageOptions(shard_size_gb=1e-9, overwrite=overwrite)
    return ActivationStorage(folder, HOOKS, options, remote=Folder(ROOT).child(NAME))


def fill(bucket: Bucket, shards: int, outline: bool) -> None:
    """A folder of an interrupted run of so many shards."""
    files = folder_files(shards, outline)
    bucket.fill({f"run/{NAME}/{name}": data for name, data in files.items()})


def folder_files(shards: int, outline: bool) -> dict[str, bytes]:
    """The files of such a folder: copies of a shard that is stored in the emulated bucket first."""
    with tempfile.TemporaryDirectory() as folder:
        storage = storage_in(folder, overwrite=True)
        for sample in range(2):  # the first one is whole
            for key in HOOKS:
                storage.add_activation(key, np.ones((1, 4), np.float32), sample, "")
        storage.finalize(complete=False)
    stored = read_stored(storage.destination)
    shard = storage.destination.read(stored.commits[1].file) or b""
    beside = [storage.destination.read(name) or b"" for name in names_beside(1)]
    metadata = dict(stored.metadata or {})
    files: dict[str, bytes] = {}
    found = Outline()
    for number in range(1, shards + 1):
        commit = as_number(stored.commits[1], number)
        found.add(commit)
        files |= {commit.file: shard, commit.name: seal(commit.to_json())}
        files |= dict(zip(names_beside(number), beside, strict=True))
    metadata |= {"shards": shards, "samples": shards, "outline": found.to_json()}
    if not outline:
        del metadata["outline"]
    return files | {METADATA: seal(metadata)}


def run_files(machines: int, hosts: int, shards: int) -> dict[str, bytes]:
    """The objects of a run that is going on, whose hosts have all stored so many shards."""
    with reached(gcs()):
        files = folder_files(shards, outline=True)
    metadata = unseal(files[METADATA], METADATA) | {"status": "running", "written": time.time()}
    shared = metadata["identity"] | {"total_machines": machines, "num_hosts": hosts}
    found: dict[str, bytes] = {}
    for machine, host in itertools.product(range(machines), range(hosts)):
        place = f"run/{HostFolder.of(machine, host, hosts).name}"
        found |= {f"{place}/{name}": data for name, data in files.items()}
        identity = {"identity": {**shared, "machine": machine, "host": host}}
        found[f"{place}/{METADATA}"] = seal(metadata | identity)
    return found


@contextlib.contextmanager
def reached(opened: contextlib.AbstractContextManager[Any]) -> Iterator[Any]:
    """A bucket, which this process reaches as gs://bucket."""
    with opened as bucket:
        os.environ |= bucket.environment
        Folder("gs://bucket")._fs.clear_instance_cache()
        yield bucket


def measure_run(machines: int, hosts: int, shards: int) -> dict[str, Any]:
    """Requests, seconds and seconds of a core of --status over a run."""
    with reached(indexed_bucket(run_files(machines, hosts, shards))) as bucket:
        clock, core = time.perf_counter(), time.process_time()
        status()
        seconds = time.perf_counter() - clock, time.process_time() - core
        size = {"machines": machines, "hosts": hosts, "shards": shards}
        spent = {"seconds": round(seconds[0], 2), "core": round(seconds[1], 2)}
        return {"what": "status of a run", **size, **bucket.asked(), **spent}


def as_number(commit: Commit, number: int) -> Commit:
    file = commit.file.replace("0001", f"{number:04d}")
    return replace(commit, file=file, first=number - 1, last=number - 1)


def status() -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        show_status(Folder(ROOT), write=False)


def resume() -> None:
    with tempfile.TemporaryDirectory() as folder:
        storage = storage_in(folder)
        storage.open()
        storage.close()


def count(bucket: Bucket, action: Callable[[], None]) -> dict[str, float]:
    """Requests by kind, and seconds."""
    bucket.asked.clear()
    began = time.perf_counter()
    action()
    seconds = round(time.perf_counter() - began, 2)
    asked = list(bucket.asked)
    listings = sum(method == "GET" and not name for method, name in asked)
    reads = sum(method == "GET" and bool(name) for method, name in asked)
    writes = len(asked) - listings - reads
    return {"listings": listings, "reads": reads, "writes": writes, "seconds": seconds}


def measure(sizes: list[int]) -> Iterator[dict[str, Any]]:
    for shards in sizes:
        for outline in (False, True):
            with reached(gcs()) as bucket:
                fill(bucket, shards, outline)
                for action in (status, resume):
                    what = {"what": action.__name__, "shards": shards, "outline": outline}
                    yield {**what, **count(bucket, action)}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, nargs="+", default=[1000, 20000])
    parser.add_argument("--run", type=int, nargs=3, metavar=("MACHINES", "HOSTS", "SHARDS"))
    arguments = parser.parse_args(argv)
    rows = []
    if arguments.run:
        rows.append(measure_run(*arguments.run))
        print(", ".join(f"{name}: {value}" for name, value in rows[0].items()))
        print(json.dumps({"requests": rows}))
        return
    print("what    shards  outline  listings   reads  writes  seconds")
    for row in measure(arguments.shards):
        rows.append(row)
        print(
            f"{row['what']:6}  {row['shards']:6}  {'with' if row['outline'] else 'without':7}  "
            f"{row['listings']:8}  {row['reads']:6}  {row['writes']:6}  {row['seconds']:7.1f}"
        )
    print(json.dumps({"requests": rows}))


if __name__ == "__main__":
    main()
