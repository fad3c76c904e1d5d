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
from activation_extraction.store.shard import SampleRow, Shard
from activation_extraction.store.shard_reader import check_shard_file, read_shard, read_sums
from activation_extraction.text.batch import Cursor, Worker


@dataclass(frozen=True)
class ChosenSample:
    """A stored sample that is to be recomputed. activations: in the order of the hooks, decoded.

    worker: the host that stored it. shard: the number of its shard. start: a mark in the data
    before all samples of the shard; None for the beginning of the data.
    """

    where: str
    row: SampleRow
    activations: list[np.ndarray]
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
    where, chosen = file_path(folder, commit.file), []
    try:
        _check_size(store, stored, commit)
        if wanted and stored.identity is not None:
            shard = read_shard(store, commit)
            chosen = _choose(where, shard, wanted, stored, commit)
        else:
            check_shard_file(store, commit)
        read_sums(store, commit, ())
        table = read_table(store, commit)
    except (RunError, OSError) as error:
        problem = f"{where}: {error}".replace(f"{where}: {commit.file}: ", f"{where}: ")
        return CheckedShard(folder, commit, [problem], [])
    return CheckedShard(folder, commit, [], chosen, table["sample_idx"].to_numpy())


def _check_size(store: Folder, stored: Stored, commit: Commit) -> None:
    """Raises RunError if the listing lacks the shard's file, or has it with another size."""
    size = stored.files.get(commit.file)
    if size is None:
        moved = (stored.metadata or {}).get("remote")
        hint = f" here, it was uploaded to {moved}" if moved and store.local else ""
        raise RunError(f"is missing{hint}")
    if size != commit.bytes:
        raise RunError(f"has {size} bytes, its JSON says {commit.bytes}")


def _choose(
    where: str, shard: Shard, wanted: Sequence[int], stored: Stored, commit: Commit
) -> list[ChosenSample]:
    identity, first = stored.identity, commit.first
    assert identity is not None
    number = (first - identity.worker.sample_idx(0)) // identity.worker.stride
    start = furthest_mark(stored.in_order, number)
    return [
        ChosenSample(
            where=f"{where}: sample {shard.samples[i].sample_idx}",
            row=shard.samples[i],
            activations=[shard.activation(key, i) for key in shard.slices],
            worker=identity.worker,
            shard=commit.number,
            start=start,
        )
        for i in wanted
    ]
