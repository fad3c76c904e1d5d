"""--verify: whether everything that a run stored is in order.

It checks the files against their JSON files, checks that every sample is stored exactly once, and
recomputes a few samples. It lists everything that is wrong instead of stopping at the first.
"""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from tqdm import tqdm

from activation_extraction.common.visible import counted, say
from activation_extraction.dataset.folders import read_folders
from activation_extraction.inspect.verify_folder import check_folders
from activation_extraction.inspect.verify_rows import ids_that_recur, rows_stored_twice
from activation_extraction.inspect.verify_shard import Checked, Chosen, check_shard
from activation_extraction.store.commit import Commit
from activation_extraction.store.folder import Folder
from activation_extraction.store.metadata import METADATA, Stored, identity_of
from activation_extraction.store.patience import scratch_folder

WORKERS = 4  # shards read at the same time; each is unpacked in memory
# The largest relative error (Frobenius norm, per sample and hook) of a recomputed sample, by the
# dtype in which it is stored. Another packing, mesh or device rounds differently.
TOLERANCE = {"float32": 1e-3, "float16": 3e-3, "bfloat16": 1e-2}
LOW_PRECISION_TOLERANCE = 5e-2  # where the model computed in low precision

# Samples -> the activations of each, name of a hook -> (tokens, width); or why there are none.
Recompute = Callable[[list[Chosen]], list[dict[str, np.ndarray] | str]]


def verify(root: Folder, load: Callable[[dict[str, Any]], Recompute] | None, count: int) -> int:
    """Checks everything and prints what is wrong. Returns the exit status: 0 when nothing is.

    load: takes the metadata and returns the function that recomputes samples; that function gets
    `count` random ones. Raises InputError when there is no extraction, and whatever `load` raises.
    """
    folders = read_folders(root)
    metadata = next((stored.metadata for stored in folders.values() if stored.metadata), None)
    recompute = None if load is None or metadata is None else load(metadata)
    problems = list(check_folders(folders))
    checked = list(check_shards(root, folders, count if recompute is not None else 0))
    problems += [problem for shard in checked for problem in shard.problems]
    chosen = [sample for shard in checked for sample in shard.chosen]
    digests = [shard.digests for shard in checked if shard.digests is not None]
    problems += rows_stored_twice(digests)
    recomputed = "nothing recomputed (give --model_path)"
    if recompute is not None and metadata is not None:
        problems += _compare(metadata, chosen, recompute)
        recomputed = f"{counted(len(chosen), 'sample')} recomputed"
    note = ids_that_recur(digests)
    commits = [shard.commit for shard in checked]
    verdict = _verdict(len(folders), commits, recomputed, len(problems))
    say(*problems, *([f"note: {note}"] if note else ()), verdict)
    return 1 if problems else 0


def _verdict(folders: int, commits: list[Commit], recomputed: str, problems: int) -> str:
    samples = sum(commit.count for commit in commits)
    gigabytes = sum(commit.bytes for commit in commits) / 1e9
    return (
        f"{'FAILED' if problems else 'in order'}: {counted(folders, 'folder')}, "
        f"{counted(len(commits), 'shard')}, {counted(samples, 'sample')}, {gigabytes:,.3f} GB; "
        f"{recomputed}; {counted(problems, 'problem')}"
    )


def check_shards(root: Folder, folders: dict[str, Stored], count: int = 0) -> Iterator[Checked]:
    """Reads every shard.

    `count` random samples are chosen in all. Several shards are read at the same time; they are
    yielded in order.
    """
    shards = [(name, commit) for name in folders for commit in folders[name].in_order]
    total = sum(commit.bytes for _, commit in shards)
    with (
        scratch_folder() as scratch,
        ThreadPoolExecutor(WORKERS) as pool,
        tqdm(total=total, unit="B", unit_scale=True, desc="verifying", disable=None) as bar,
    ):
        jobs = [
            pool.submit(check_shard, root.child(name), name, folders[name], commit, wanted, scratch)
            for (name, commit), wanted in zip(shards, _pick(shards, count), strict=True)
        ]
        try:
            for job, (_, commit) in zip(jobs, shards, strict=True):
                yield job.result()
                bar.update(commit.bytes)
        finally:  # Ctrl-C waits only for the shards that are being read
            pool.shutdown(cancel_futures=True)


def _pick(shards: list[tuple[str, Commit]], count: int) -> list[list[int]]:
    """Positions of random samples in each shard, `count` in all; every sample is as likely."""
    total = sum(commit.count for _, commit in shards)
    numbers = sorted(random.sample(range(total), min(count, total)))
    picks, first = [], 0
    for _, commit in shards:
        picks.append([n - first for n in numbers if first <= n < first + commit.count])
        first += commit.count
    return picks


def _compare(metadata: dict[str, Any], chosen: list[Chosen], recompute: Recompute) -> Iterator[str]:
    """Recomputes the chosen samples and reports those that differ."""
    identity = identity_of(metadata, METADATA)
    tolerance = TOLERANCE[identity.activation_dtype]
    if identity.dtype != "float32" or metadata["backend"] != "cpu":
        tolerance = LOW_PRECISION_TOLERANCE
    for sample, activations in zip(chosen, recompute(chosen), strict=True):
        if isinstance(activations, str):
            yield f"{sample.where}: cannot be recomputed: {activations}"
            continue
        for name, stored in zip(identity.hooks, sample.activations, strict=True):
            error = _relative_error(stored, activations[name])
            if not error <= tolerance:
                yield (
                    f"{sample.where}, {name}: recomputed, it differs by {error:.2g} of its norm "
                    f"(allowed: {tolerance:g})"
                )


def _relative_error(stored: np.ndarray, recomputed: np.ndarray) -> float:
    before, now = np.asarray(stored, np.float64), np.asarray(recomputed, np.float64)
    return float(np.linalg.norm(now - before)) / max(float(np.linalg.norm(before)), 1e-30)
