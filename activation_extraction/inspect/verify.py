"""Checks everything that a run has stored, for --verify.

It compares the files with their JSON files, checks that every sample number is stored exactly once,
and recomputes a few samples. It reports the first problem of each shard, and all problems of the
JSON files, the sample numbers and the recomputed samples.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from activation_extraction.common.encodings import FLOAT8
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.common.visible import counted, say
from activation_extraction.store.chosen_samples import ChosenSample, Recompute, read_samples
from activation_extraction.store.folder import Folder
from activation_extraction.store.formats import SHARD_FILE
from activation_extraction.store.hook_values import Tolerance
from activation_extraction.store.identity import Identity
from activation_extraction.store.run_folders import (
    expected_names,
    foreign_folders,
    read_folders,
    shown_name,
)
from activation_extraction.store.run_log import METADATA, Commit, RunLog, furthest_mark, identity_of
from activation_extraction.store.shard_check import (
    NO_NUMBERS,
    CheckedShard,
    check_shard,
    file_path,
    for_each_shard,
)
from activation_extraction.store.totals import total_problems


def verify(root: Folder, load: Callable[[dict[str, Any]], Recompute] | None, count: int) -> int:
    """Checks everything that a run has stored, and prints all problems.

    Args:
        root: The output of the run.
        load: A function that takes the metadata of the run, loads its model and returns a
            Recompute. None to recompute nothing.
        count: The number of random samples to recompute.

    Returns:
        The exit status: 0 if there is no problem, otherwise 1.

    Raises:
        InputError: There is no run, or it records no model and samples are to be recomputed.
            `load` may raise it, too.
    """
    folders = read_folders(root)
    metadata = next((stored.metadata for stored in folders.values() if stored.metadata), None)
    identity = Identity() if metadata is None else identity_of(metadata, METADATA)
    without_model = metadata is not None and not identity.model_digest
    recompute = None
    if load is not None and without_model:
        raise InputError(
            f"--model_path: {root.url} records no model, because another program stored its "
            "activations; verify it without --model_path"
        )
    if load is not None and metadata is not None:
        recompute = load(metadata)
        allowed = tolerance(identity, metadata.get("backend") == recompute.platform)
    problems = list(check_folders(folders))
    shards = list(check_shards(root, folders, count if recompute is not None else 0))
    checked = [shard for shard, _ in shards]
    problems += [shard.problem for shard in checked if shard.problem]
    problems += check_numbers(folders, checked)
    hint = "no model is recorded" if without_model else "give --model_path"
    recomputed = f"nothing recomputed ({hint})"
    if recompute is not None:
        chosen = [sample for _, samples in shards for sample in samples]
        problems += _compare(chosen, recompute, allowed)
        recomputed = f"{counted(len(chosen), 'sample')} recomputed"
    samples = sum(shard.commit.count for shard in checked)
    gigabytes = sum(shard.commit.bytes for shard in checked) / 1e9
    say(
        *problems,
        f"{'FAILED' if problems else 'in order'}: {counted(len(folders), 'folder')}, "
        f"{counted(len(checked), 'shard')}, {counted(samples, 'sample')}, {gigabytes:,.3f} GB; "
        f"{recomputed}; {counted(len(problems), 'problem')}",
    )
    return 1 if problems else 0


def check_shards(
    root: Folder, folders: dict[str, RunLog], count: int = 0
) -> Iterator[tuple[CheckedShard, list[ChosenSample]]]:
    """Checks all shards, several at the same time, and yields the results in order.

    Args:
        root: The output of the run.
        folders: The content of each folder, by the folder's name.
        count: The number of random samples to choose, over all shards.

    Yields:
        The result of the check of a shard, and its chosen samples; none if there is a problem.
    """
    shards = [(name, commit) for name in folders for commit in folders[name].in_order]
    picks = _pick(shards, count)
    arguments = []
    for (name, commit), wanted in zip(shards, picks, strict=True):
        arguments.append((commit, (root.child(name), name, folders[name], commit, wanted)))
    return for_each_shard(check_and_choose, arguments)


def check_and_choose(
    store: Folder, folder: str, stored: RunLog, commit: Commit, wanted: Sequence[int]
) -> tuple[CheckedShard, list[ChosenSample]]:
    """Checks a shard and, if it is good, reads the samples that are to be recomputed.

    Args:
        store: The host's folder.
        folder: The name of the host's folder, for messages.
        stored: The content of the folder.
        commit: The commit of the shard.
        wanted: The indices in the shard of the samples to read.

    Returns:
        The result of the check, and the samples. If there is a problem, even in reading the
        samples, the list is empty.
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


def _pick(shards: list[tuple[str, Commit]], count: int) -> list[list[int]]:
    """Picks random samples with equal probability.

    Args:
        shards: The folder's name and the commit of each shard.
        count: The number of samples to pick. There are fewer if the shards have fewer.

    Returns:
        The indices of the samples within each shard, ascending.
    """
    total = sum(commit.count for _, commit in shards)
    numbers = sorted(random.sample(range(total), min(count, total)))
    picks = []
    first = 0  # number of the shard's first sample among those of all shards
    for _, commit in shards:
        stop = first + commit.count
        picks.append([number - first for number in numbers if first <= number < stop])
        first = stop
    return picks


# Largest error of the computation of activations, relative to the norm of a sample at a hook: by
# the dtype of the model, a pair for recomputing on the platform of the run and on another platform.
COMPUTED = {
    # Products have the highest precision on every platform, but another mesh or packing changes the
    # order in which they are summed: on a CPU, 2e-6 was measured after 12 layers. Functions such as
    # exp and rsqrt differ between platforms.
    "float32": (1e-3, 2e-3),
    # Each value is rounded to 8 bits, and may be rounded to the other side if the sum before it
    # differs; later layers propagate the difference. On a CPU, 1.6e-2 was measured after 12 layers.
    # The functions of two platforms differ by less than one such rounding.
    "bfloat16": (5e-2, 5e-2),
}
# Relative error when the stored and the recomputed activations are both rounded to the stored
# dtype: 0.4 of a unit in the last place (the RMS of two roundings), which is at most 2**-10 of a
# float16 and 2**-7 of a bfloat16. Float8 is compared with recomputed values in float32; it has
# 4 significant bits, so a value is off by at most 2**-4 of itself (0.026 of a token's norm was
# measured).
STORED = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8, FLOAT8: 2.0**-4}

# Largest fraction of a sample's expert numbers, or predicted token ids, that may differ at a hook,
# by the dtype of the model. Rounding decides between experts, or tokens, that are nearly tied. On a
# CPU, with 8 of 64 experts, no number differed if only the packing did, and 13 % differed between
# bfloat16 and float32.
OTHER_NUMBERS = {"float32": 0.01, "bfloat16": 0.25}


def tolerance(identity: Identity, same_platform: bool) -> Tolerance:
    """Returns the differences between stored and recomputed samples that rounding explains.

    Args:
        identity: The identity of the run.
        same_platform: Whether samples are recomputed on the platform of the run.

    Raises:
        InputError: COMPUTED lacks the dtype of the model, or STORED that of the activations.
    """
    dtype, stored = identity.dtype, identity.activation_dtype
    if dtype not in COMPUTED or stored not in STORED:
        raise InputError(
            f"{METADATA}: computed in {dtype or 'an unknown dtype'}, stored in {stored}: expected "
            f"one of {', '.join(COMPUTED)}, and one of {', '.join(STORED)}"
        )
    return Tolerance(COMPUTED[dtype][not same_platform], STORED[stored], OTHER_NUMBERS[dtype])


def _compare(chosen: list[ChosenSample], recompute: Recompute, allowed: Tolerance) -> Iterator[str]:
    """Recomputes the chosen samples, and yields a message on each difference beyond `allowed`."""
    for sample, recomputed in zip(chosen, recompute.values(chosen), strict=True):
        if isinstance(recomputed, str):
            yield f"{sample.where}: cannot be recomputed: {recomputed}"
            continue
        for hook, stored in zip(sample.hooks, sample.values, strict=True):
            differences = hook.differences(
                stored, recomputed[hook.name], sample.tokens.positions, allowed
            )
            for difference in differences:
                yield f"{sample.where}, {hook.name}: recomputed, {difference}"


def check_numbers(folders: dict[str, RunLog], checked: Sequence[CheckedShard]) -> Iterator[str]:
    """Yields a message on repeated sample numbers, and on the first missing one of each folder.

    In a run over a data set that is not complete, only numbers before its mark can be missing.
    Missing numbers are not looked for in a folder that has a shard whose numbers are unknown.

    Args:
        folders: The content of each folder, by the folder's name.
        checked: The results for all shards. A shard with a problem has no numbers.
    """
    by_folder: dict[str, list[np.ndarray]] = {name: [] for name in folders}
    for shard in checked:
        if shard.sample_idx is not None:
            by_folder[shard.folder].append(shard.sample_idx)
    all_shards = [shard.sample_idx for shard in checked if shard.sample_idx is not None]
    numbers, times = np.unique(np.concatenate([NO_NUMBERS, *all_shards]), return_counts=True)
    repeated = numbers[times > 1]
    if repeated.size:
        count = counted(len(repeated), "sample number")
        yield f"{count} stored more than once, such as {repeated[0]}"
    for name, stored in folders.items():
        identity = stored.identity
        last_shard = max(stored.commits, default=0)
        if identity is None or last_shard == 0 or last_shard != len(by_folder[name]):
            continue
        numbers = np.unique(np.concatenate(by_folder[name]))
        if identity.from_dataset and (stored.metadata or {})["status"] != "complete":
            mark = furthest_mark(stored.commits.values())
            numbers = numbers[: 0 if mark is None else mark.samples]
        worker = identity.worker
        expected = worker.sample_idx(0) + worker.stride * np.arange(len(numbers))
        different = np.flatnonzero(numbers != expected)
        if different.size:
            number, expected_number = numbers[different[0]], expected[different[0]]
            problem = "is missing" if number > expected_number else "belongs to another host"
            yield f"{shown_name(name)}: sample {min(number, expected_number)} {problem}"


def check_folders(folders: dict[str, RunLog]) -> Iterator[str]:
    """Yields all problems that the JSON files and the names of the files show.

    Args:
        folders: The content of each folder, by the folder's name.
    """
    yield from (f"{name}: is missing" for name in expected_names(folders) if name not in folders)
    yield from foreign_folders(folders)
    # The fingerprint of each file of the data set, by its name and size.
    fingerprints: dict[tuple[str, int], str] = {}
    for name, stored in folders.items():
        yield from stored.damaged_files.values()
        yield from (file_path(name, message) for message in stored.missing_jsons)
        metadata = stored.metadata or {}
        where = file_path(name, METADATA)
        for file in metadata.get("data_files", ()):
            fingerprint = file["fingerprint"]
            expected = fingerprints.setdefault((file["name"], file["bytes"]), fingerprint)
            if fingerprint != expected:
                yield f"{name}: has read a file {file['name']} with other content than others have"
        if metadata and metadata["status"] != "complete":
            yield f"{where}: the run is not complete: {metadata['status']}"
        elif metadata:
            for problem in total_problems(stored.in_order, metadata):
                yield f"{where}: {problem}"
            for file in sorted(stored.files.keys() - {commit.file for commit in stored.in_order}):
                if SHARD_FILE.fullmatch(file):
                    yield f"{file_path(name, file)}: has no JSON"
