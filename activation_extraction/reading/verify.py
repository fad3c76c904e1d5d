"""Verification of an extraction: files against their JSON, samples complete and there once, and a
few of them recomputed. Collects everything that is off instead of stopping at the first."""

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from tqdm import tqdm

from activation_extraction.cli.errors import RunError
from activation_extraction.output.commits import METADATA, Commit, Stored, part_folder
from activation_extraction.output.committer import Totals
from activation_extraction.output.resume import PER_HOST
from activation_extraction.output.shards import Record, Shard, read_shard
from activation_extraction.output.statistics import Statistics, merge_all
from activation_extraction.output.stores import Store
from activation_extraction.reading.status import expected_names, read_folders
from activation_extraction.text.workers import Worker

WORKERS = 4  # shards read at the same time; each is unpacked in memory
# Largest relative error (Frobenius norm, per sample and hook) of a recomputed sample: another
# packing, mesh or device rounds otherwise. By the dtype of computing, then of storing.
TOLERANCE = {"float32": 1e-3, "float16": 3e-3, "bfloat16": 1e-2}
LOW_PRECISION_TOLERANCE = 5e-2

# Token ids of samples -> the activations of each: name of a hook -> (tokens, width).
Recompute = Callable[[list[np.ndarray]], list[dict[str, np.ndarray]]]


@dataclass(frozen=True)
class Chosen:
    """A stored sample that is to be recomputed."""

    where: str
    token_ids: np.ndarray
    activations: list[np.ndarray]  # in the order of the hooks


def verify(root: Store, load: Callable[[dict[str, Any]], Recompute] | None, count: int) -> int:
    """Checks everything; prints what is off. Returns the exit status: 0 when nothing is.

    load: metadata -> the function that recomputes samples; it gets `count` random ones. Raises
    InputError when there is no extraction, and as `load` does.
    """
    folders = read_folders(root)
    metadata = next((stored.metadata for stored in folders.values() if stored.metadata), None)
    recompute = None if load is None or metadata is None else load(metadata)
    problems = list(_check_folders(folders))
    chosen: list[Chosen] = []
    samples = total = shards = 0
    for commit, off, found in check_shards(root, folders, count if recompute is not None else 0):
        problems += off
        chosen += found
        shards, samples, total = shards + 1, samples + commit.count, total + commit.bytes
    recomputed = "nothing recomputed (give --model_path)"
    if recompute is not None and metadata is not None:
        problems += _compare(metadata, chosen, recompute)
        recomputed = f"{len(chosen)} samples recomputed"
    for problem in problems:
        print(problem)
    print(
        f"{'NOT IN ORDER' if problems else 'in order'}: {len(folders)} folder(s), {shards} "
        f"shard(s), {samples:,} samples, {total / 1e9:,.3f} GB; {recomputed}; "
        f"{len(problems)} problem(s)"
    )
    return 1 if problems else 0


def check_shards(
    root: Store, folders: dict[str, Stored], count: int = 0
) -> Iterator[tuple[Commit, list[str], list[Chosen]]]:
    """Reads every shard: its commit, what is off with it, and its share of `count` random samples.

    Several shards are read at the same time; they come in their order.
    """
    shards = [(name, commit) for name in folders for commit in folders[name].in_order]
    total = sum(commit.bytes for _, commit in shards)
    with (
        TemporaryDirectory() as scratch,
        ThreadPoolExecutor(WORKERS) as pool,
        tqdm(total=total, unit="B", unit_scale=True, desc="verifying", disable=None) as bar,
    ):
        jobs = [
            pool.submit(
                _check_shard, root.child(name), name, folders[name], commit, wanted, Path(scratch)
            )
            for (name, commit), wanted in zip(shards, _pick(shards, count), strict=True)
        ]
        try:
            for job, (_, commit) in zip(jobs, shards, strict=True):
                yield commit, *job.result()
                bar.update(commit.bytes)
        finally:  # Ctrl-C waits for the shards in hand, not for all
            pool.shutdown(cancel_futures=True)


def _pick(shards: list[tuple[str, Commit]], count: int) -> list[list[int]]:
    """Positions of random samples in each shard, `count` in all, every sample equally likely."""
    total = sum(commit.count for _, commit in shards)
    numbers = sorted(random.sample(range(total), min(count, total)))
    picks, first = [], 0
    for _, commit in shards:
        picks.append([n - first for n in numbers if first <= n < first + commit.count])
        first += commit.count
    return picks


def _check_folders(folders: dict[str, Stored]) -> Iterator[str]:
    """All that the JSON files and the file sizes tell."""
    common: dict[str, Any] | None = None
    hosts: dict[int, int] = {}  # of every machine
    expected = expected_names(folders)
    for name in expected:
        if name not in folders:
            yield f"{name}: is missing"
    for name, stored in folders.items():
        if name not in expected:
            yield f"{name or 'the output itself'}: holds shards that are not part of this run"
        yield from stored.damaged.values()
        if stored.metadata is None:
            if METADATA not in stored.damaged:
                yield f"{_path(name, METADATA)}: is missing"
            continue
        try:
            yield from _check_folder(name, stored, stored.metadata)
            identity = stored.metadata["identity"]
            shared = {key: value for key, value in identity.items() if key not in PER_HOST}
        except (KeyError, TypeError, IndexError) as error:
            yield f"{_path(name, METADATA)}: lacks what every run records: {error!r}"
            continue
        common = common or shared
        if hosts.setdefault(identity["machine"], identity["num_hosts"]) != identity["num_hosts"]:
            yield f"{name}: is of another run: its num_hosts differs"
        for key in common:
            if shared.get(key) != common[key]:
                yield f"{name}: is of another run: its {key} differs"


def _check_folder(name: str, stored: Stored, metadata: dict[str, Any]) -> Iterator[str]:
    identity = metadata["identity"]
    hosts, machine, host = identity["num_hosts"], identity["machine"], identity["host"]
    expected = part_folder(machine, host, hosts)
    if name not in ("", expected):
        yield f"{name}: holds the part of {expected}"
    if metadata["status"] != "complete":
        yield f"{_path(name, METADATA)}: the run is not complete: {metadata['status']}"
    commits = stored.in_order
    worker = Worker(machine, identity["total_machines"], host, hosts)
    upcoming = worker.sample_idx(0)
    cursor = 0
    for expected_number, commit in enumerate(commits, start=1):
        where = _path(name, commit.name)
        if commit.number != expected_number:
            yield f"{_path(name, f'shard_{expected_number:04d}.json')}: is missing"
            break
        if commit.run != stored.run:
            yield f"{where}: is of another run"
        if commit.first != upcoming:
            word = "is missing" if commit.first > upcoming else "is there twice"
            yield f"{where}: sample {min(upcoming, commit.first)} {word}"
        if commit.last != commit.first + worker.stride * (commit.count - 1):
            yield f"{where}: {commit.count} samples do not go from {commit.first} to {commit.last}"
        upcoming = commit.last + worker.stride
        if commit.cursor is not None:
            position = commit.cursor["samples"]
            if not cursor <= position <= upcoming // worker.stride:
                yield f"{where}: its cursor does not follow from the one before"
            cursor = position
    for commit in commits[:-1]:
        if commit.partial:
            yield f"{_path(name, commit.name)}: is partial, and not the last one"
    totals = Totals()
    for commit in commits:
        totals.add(commit)
    if metadata["status"] == "complete":
        for what in ("shards", "samples", "tokens", "bytes"):
            if metadata[what] != getattr(totals, what):
                there = f"there are {getattr(totals, what)}"
                yield f"{_path(name, METADATA)}: has {metadata[what]} {what}, {there}"
        for hook in metadata["hooks"]:
            found = totals.statistics.get(hook["key"], Statistics())
            for what in _differing(found, hook):
                yield f"{_path(name, METADATA)}: hook {hook['key']}: {what}"
    committed = {commit.file for commit in commits}
    for file in stored.files:
        if ".pkl" in file and file[0] != "." and file not in committed:
            yield f"{_path(name, file)}: has no JSON"


def _path(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name


def _check_shard(
    store: Store, folder: str, stored: Stored, commit: Commit, wanted: list[int], scratch: Path
) -> tuple[list[str], list[Chosen]]:
    """What is off with a shard, and those of its samples that are to be recomputed."""
    where = _path(folder, commit.file)
    if commit.file not in stored.files:
        moved = (stored.metadata or {}).get("remote")
        hint = f" here, it was uploaded to {moved}" if moved and store.local else ""
        return [f"{where}: is missing{hint}"], []
    if stored.files[commit.file] != commit.bytes:
        size = stored.files[commit.file]
        return [f"{where}: has {size} bytes, its JSON says {commit.bytes}"], []
    if stored.metadata is None:
        return [], []
    own = scratch / (folder or "all")
    own.mkdir(exist_ok=True)
    try:
        path = store.fetch(commit.file, own)
        try:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            off = [] if digest == commit.sha256 else [f"{where}: its sha256 is not its JSON's"]
            shard = read_shard(path, commit.unpacked)
        finally:
            if not store.local:
                path.unlink(missing_ok=True)
        off += [f"{where}: {what}" for what in _check_records(shard, stored.metadata, commit)]
        hooks = list(shard.values())
        chosen = [
            Chosen(
                f"{where}: sample {hooks[0][i]['sample_idx']}",
                np.asarray(hooks[0][i]["token_ids"]),
                [records[i]["activation"] for records in hooks],
            )
            for i in (wanted if not off else [])
        ]
        return off, chosen
    except (RunError, OSError) as error:
        off_too = [f"{where}: {error}".replace(f"{where}: {commit.file}: ", f"{where}: ")]
        return off_too, []
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        return [f"{where}: its records are not as they should be: {error!r:.200}"], []


def _width(hook: dict[str, Any], metadata: dict[str, Any]) -> int:
    """Of a hook in a commit; before hooks had widths they all had the model's."""
    return hook.get("width", metadata["model"]["hidden_size"])


def _check_records(shard: Shard, metadata: dict[str, Any], commit: Commit) -> Iterator[str]:
    identity = metadata["identity"]
    if list(shard) != [hook["key"] for hook in commit.hooks]:
        yield f"has hooks {list(shard)}, its JSON others"
        return
    if [hook["name"] for hook in commit.hooks] != identity["hooks"]:
        yield "has other hooks than its run"
        return
    stride = Worker(machines=identity["total_machines"], hosts=identity["num_hosts"]).stride
    indices = list(range(commit.first, commit.last + 1, stride))
    for hook in commit.hooks:
        records = shard[hook["key"]]
        if [record["sample_idx"] for record in records] != indices:
            yield f"hook {hook['key']}: its samples are not those of its JSON"
            continue
        off = [
            f"hook {hook['key']}, sample {record['sample_idx']}: {what}"
            for record in records
            for what in _check_record(record, metadata, hook)
        ]
        if off:
            yield from off
            continue
        found = merge_all(Statistics.of(record["activation"]) for record in records)
        for what in _differing(found, hook):
            yield f"hook {hook['key']}: {what}"
        if found.tokens != commit.tokens:
            yield f"hook {hook['key']}: has {found.tokens} tokens, its JSON says {commit.tokens}"


def _differing(found: Statistics, told: dict[str, Any]) -> Iterator[str]:
    """told: as a JSON has them."""
    expected = Statistics.from_json(told)
    for what, value in found.to_json().items():
        if not isclose(value, getattr(expected, what), rel_tol=1e-6, abs_tol=1e-9):
            yield f"its {what} is {value}, its JSON says {getattr(expected, what)}"


def _check_record(record: Record, metadata: dict[str, Any], hook: dict[str, Any]) -> Iterator[str]:
    identity, model = metadata["identity"], metadata["model"]
    if metadata["format_version"] > 2 and record["hook"] != hook["name"]:
        yield f"is of hook {record['hook']!r:.80}, expected {hook['name']}"
    activation, token_ids = record["activation"], np.asarray(record["token_ids"])
    if str(activation.dtype) != identity["activation_dtype"]:
        yield f"dtype {activation.dtype}, expected {identity['activation_dtype']}"
    if token_ids.dtype != np.int32 or token_ids.ndim != 1:
        yield f"token ids of dtype {token_ids.dtype}, shape {token_ids.shape}"
        return
    shape = (len(token_ids), _width(hook, metadata))
    if activation.shape != shape or tuple(record["shape"]) != shape:
        yield f"shape {activation.shape}, expected {shape}"
    if not 0 < len(token_ids) <= identity["max_seq_length"]:
        yield f"{len(token_ids)} tokens"
    elif token_ids.min() < 0 or token_ids.max() >= model["vocab_size"]:
        yield "token ids outside the vocabulary"


def _compare(metadata: dict[str, Any], chosen: list[Chosen], recompute: Recompute) -> Iterable[str]:
    """Recomputes the chosen samples."""
    identity = metadata["identity"]
    tolerance = TOLERANCE[identity["activation_dtype"]]
    if identity["dtype"] != "float32" or metadata["backend"] != "cpu":
        tolerance = LOW_PRECISION_TOLERANCE
    again = recompute([sample.token_ids for sample in chosen])
    for sample, activations in zip(chosen, again, strict=True):
        for name, old in zip(identity["hooks"], sample.activations, strict=True):
            before, now = np.asarray(old, np.float64), np.asarray(activations[name], np.float64)
            error = float(np.linalg.norm(now - before)) / max(float(np.linalg.norm(before)), 1e-30)
            if not error <= tolerance:
                yield (
                    f"{sample.where}, {name}: recomputed, it differs by {error:.2g} of its norm "
                    f"(allowed: {tolerance:g})"
                )
