"""What a shard holds: its bytes, records and statistics, compared with its JSON file."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from activation_extraction.cli.errors import RunError
from activation_extraction.output.commits import Commit, Stored
from activation_extraction.output.shards import Record, Shard, read_shard
from activation_extraction.output.statistics import Statistics, merge_all
from activation_extraction.output.stores import Store
from activation_extraction.reading.verify_folder import differing, file_path
from activation_extraction.text.workers import Worker


@dataclass(frozen=True)
class Chosen:
    """A stored sample that is to be recomputed."""

    where: str
    token_ids: np.ndarray
    activations: list[np.ndarray]  # in the order of the hooks


def check_shard(
    store: Store, folder: str, stored: Stored, commit: Commit, wanted: list[int], scratch: Path
) -> tuple[list[str], list[Chosen]]:
    """What is wrong with a shard, and those of its samples that are to be recomputed.

    wanted: the positions of those samples. scratch: a folder for downloads.
    """
    where = file_path(folder, commit.file)
    if problem := _check_size(store, stored, commit):
        return [f"{where}: {problem}"], []
    if stored.metadata is None:
        return [], []
    own = scratch / (folder or "all")
    own.mkdir(exist_ok=True)
    try:
        shard, intact = _read(store, commit, own)
        problems = [] if intact else [f"{where}: its sha256 is not its JSON's"]
        problems += [f"{where}: {what}" for what in _check_records(shard, stored.metadata, commit)]
        return problems, [] if problems else _choose(shard, wanted, where)
    except (RunError, OSError) as error:
        return [f"{where}: {error}".replace(f"{where}: {commit.file}: ", f"{where}: ")], []
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        return [f"{where}: its records are not as they should be: {error!r:.200}"], []


def _check_size(store: Store, stored: Stored, commit: Commit) -> str | None:
    """What is wrong with the file as it is listed."""
    size = stored.files.get(commit.file)
    if size is None:
        moved = (stored.metadata or {}).get("remote")
        hint = f" here, it was uploaded to {moved}" if moved and store.local else ""
        return f"is missing{hint}"
    return None if size == commit.bytes else f"has {size} bytes, its JSON says {commit.bytes}"


def _read(store: Store, commit: Commit, scratch: Path) -> tuple[Shard, bool]:
    """A shard, and whether its file has the recorded sha256. Raises RunError or OSError."""
    path = store.fetch(commit.file, scratch)
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return read_shard(path, commit.unpacked), digest == commit.sha256
    finally:
        if not store.local:
            path.unlink(missing_ok=True)


def _choose(shard: Shard, wanted: list[int], where: str) -> list[Chosen]:
    hooks = list(shard.values())
    return [
        Chosen(
            f"{where}: sample {hooks[0][i]['sample_idx']}",
            np.asarray(hooks[0][i]["token_ids"]),
            [records[i]["activation"] for records in hooks],
        )
        for i in wanted
    ]


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
        yield from _check_hook(shard[hook["key"]], indices, metadata, commit, hook)


def _check_hook(
    records: list[Record],
    indices: list[int],
    metadata: dict[str, Any],
    commit: Commit,
    hook: dict[str, Any],
) -> Iterator[str]:
    """What is wrong with a hook's records. indices: the `sample_idx` that they should have."""
    name = f"hook {hook['key']}"
    if [record["sample_idx"] for record in records] != indices:
        yield f"{name}: its samples are not those of its JSON"
        return
    problems = [
        f"{name}, sample {record['sample_idx']}: {problem}"
        for record in records
        for problem in _check_record(record, metadata, hook)
    ]
    if problems:
        yield from problems
        return
    found = merge_all(Statistics.of(record["activation"]) for record in records)
    yield from (f"{name}: {problem}" for problem in differing(found, hook))
    if found.tokens != commit.tokens:
        yield f"{name}: has {found.tokens} tokens, its JSON says {commit.tokens}"


def _check_record(record: Record, metadata: dict[str, Any], hook: dict[str, Any]) -> Iterator[str]:
    identity = metadata["identity"]
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
    elif token_ids.min() < 0 or token_ids.max() >= metadata["model"]["vocab_size"]:
        yield "token ids outside the vocabulary"


def _width(hook: dict[str, Any], metadata: dict[str, Any]) -> int:
    """The width of a hook. JSON files from before hooks had widths have the model's hidden size."""
    return hook.get("width", metadata["model"]["hidden_size"])
