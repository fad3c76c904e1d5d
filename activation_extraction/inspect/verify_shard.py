"""Checks a shard for --verify, and reads the samples of it that are to be recomputed."""

from collections.abc import Sequence
from dataclasses import dataclass

from activation_extraction.common.errors import RunError
from activation_extraction.store.commit import Commit
from activation_extraction.store.folder import Folder
from activation_extraction.store.metadata import Stored
from activation_extraction.store.resume import furthest_mark
from activation_extraction.store.shard import SampleRow, Values
from activation_extraction.store.shard_check import CheckedShard, check_shard, file_path
from activation_extraction.store.shard_reader import StoredHook, begin_rows, open_shard
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


def check_and_choose(
    store: Folder, folder: str, stored: Stored, commit: Commit, wanted: Sequence[int]
) -> tuple[CheckedShard, list[ChosenSample]]:
    """Checks a shard as `check_shard` does, and reads the samples that are to be recomputed.

    Args:
        store, folder, stored, commit: The arguments of `check_shard`.
        wanted: The positions in the shard of the samples to read.
    """
    checked = check_shard(store, folder, stored, commit)
    if checked.problem or not wanted or stored.identity is None:
        return checked, []
    where = file_path(folder, commit.file)
    try:
        return checked, read_samples(store, stored, commit, wanted, where)
    except (RunError, OSError, ValueError) as error:
        problem = f"{where}: {error}".replace(f"{where}: {commit.file}: ", f"{where}: ")
        return CheckedShard(folder, commit, problem), []


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
    start = furthest_mark(stored.in_order, worker.number_of(commit.first))
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
