"""Checks a shard: compares the sha256 of its files, and its counts, with its JSON file.

Its activations are read only if some of them are to be recomputed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from activation_extraction.common.errors import RunError
from activation_extraction.store.commit import Commit
from activation_extraction.store.folder import Folder
from activation_extraction.store.metadata import Stored
from activation_extraction.store.resume import furthest_mark
from activation_extraction.store.sample_table import read_table
from activation_extraction.store.shard import SampleRow, Values
from activation_extraction.store.shard_reader import (
    StoredHook,
    begin_rows,
    check_shard_file,
    open_shard,
    read_sums,
)
from activation_extraction.text.batch import Cursor, Worker


@dataclass(frozen=True)
class ChosenSample:
    """A stored sample that is to be recomputed. activations: in the order of the hooks, decoded.

    worker: the host that stored it. shard: the number of its shard. start: a mark in the data
    before all samples of the shard; None for the beginning of the data.
    """

    where: str
    row: SampleRow
    activations: list[Values]
    worker: Worker
    shard: int
    start: Cursor | None


class CheckedShard(NamedTuple):
    """The result of checking a shard. folder: its folder's name. chosen: the samples that are to be
    recomputed. sample_idx: the numbers of its samples, int64; None if the shard has problems."""

    folder: str
    commit: Commit
    problems: list[str]
    chosen: list[ChosenSample]
    sample_idx: np.ndarray | None = None


def file_path(folder: str, name: str) -> str:
    """Returns the path of a file in the output. folder: its folder; "" is the output itself."""
    return f"{folder}/{name}" if folder else name


def check_shard(
    store: Folder, folder: str, stored: Stored, commit: Commit, wanted: list[int]
) -> CheckedShard:
    """Checks a shard, up to its first problem. wanted: the positions in the shard of the samples to
    recompute."""
    if not commit.count:
        return CheckedShard(folder, commit, [], [], np.zeros(0, np.int64))
    where = file_path(folder, commit.file)
    try:
        if (size := stored.files.get(commit.file)) is None:
            moved = stored.moved_to
            raise RunError(f"is missing{f' here, it was uploaded to {moved}' if moved else ''}")
        if size != commit.bytes:
            raise RunError(f"has {size} bytes, its JSON says {commit.bytes}")
        check_shard_file(store, commit)
        chosen = []
        if wanted and stored.identity is not None:
            chosen = read_samples(store, stored, commit, wanted, where)
        read_sums(store, commit, ())
        table = read_table(store, commit)
    except (RunError, OSError, ValueError) as error:
        problem = f"{where}: {error}".replace(f"{where}: {commit.file}: ", f"{where}: ")
        return CheckedShard(folder, commit, [problem], [])
    return CheckedShard(folder, commit, [], chosen, table["sample_idx"].to_numpy())


def read_samples(
    store: Folder, stored: Stored, commit: Commit, wanted: Sequence[int], where: str
) -> list[ChosenSample]:
    """Reads the samples at these positions in a shard of a run that has metadata. where: names the
    shard. Raises RunError, OSError, or ValueError for a hook of an unknown form."""
    identity, described = stored.identity, (stored.metadata or {}).get("hooks", ())
    assert identity is not None
    recorded, worker = {hook["name"]: hook for hook in described}, identity.worker
    hooks = {
        each["name"]: StoredHook.of(each | recorded.get(each["name"], {}), identity)
        for each in commit.hooks
    }
    start = furthest_mark(stored.in_order, (commit.first - worker.sample_idx(0)) // worker.stride)
    chosen = []
    reader = open_shard(store, commit, hooks)
    for i in wanted:
        span = reader.offsets[i : i + 2].tolist()
        tokens = reader.tokens(*span)
        row = SampleRow(int(reader.sample_idx[i]), tokens["token_ids"], tokens["position"])
        values = [
            hook.given(begin_rows(reader, name, hook, span)()) for name, hook in hooks.items()
        ]
        name = f"{where}: sample {row.sample_idx}"
        chosen.append(ChosenSample(name, row, values, worker, commit.number, start))
    return chosen
