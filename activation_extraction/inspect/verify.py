"""--verify: checks everything that a run has stored.

It compares the files with their JSON files, checks that every sample number is stored exactly once,
and recomputes a few samples. It lists the first problem of every shard, and all others.
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
    read_folders,
    shown_name,
    strangers,
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
    """Checks everything, and prints all problems.

    Args:
        root: The output of the run.
        load: A function that returns a Recompute, given the metadata of the run. None to recompute
            nothing.
        count: How many random samples are recomputed.

    Returns:
        The exit status: 0 if there is no problem.

    Raises:
        InputError: There is no run, or it records no model and samples are to be recomputed.
            `load` raises it, too.
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
    results = list(check_shards(root, folders, count if recompute is not None else 0))
    checked = [shard for shard, _ in results]
    problems += [shard.problem for shard in checked if shard.problem]
    problems += check_numbers(folders, checked)
    hint = "no model is recorded" if without_model else "give --model_path"
    recomputed = f"nothing recomputed ({hint})"
    if recompute is not None:
        chosen = [sample for _, samples in results for sample in samples]
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
    """Checks every shard, several at the same time, and yields the results in order.

    Args:
        root: The output.
        folders: What is stored in each folder, by its name.
        count: How many random samples to choose, over all shards.
    """
    shards = [(name, commit) for name in folders for commit in folders[name].in_order]
    picks = _pick(shards, count)
    arguments = [
        (commit, (root.child(name), name, folders[name], commit, wanted))
        for (name, commit), wanted in zip(shards, picks, strict=True)
    ]
    return for_each_shard(check_and_choose, arguments)


def check_and_choose(
    store: Folder, folder: str, stored: RunLog, commit: Commit, wanted: Sequence[int]
) -> tuple[CheckedShard, list[ChosenSample]]:
    """Checks a shard, and reads the samples that are to be recomputed if it is good.

    Args:
        store: The host's folder.
        folder: Its name, for messages.
        stored: The content of the folder.
        commit: The commit of the shard.
        wanted: The positions in the shard of the samples to read.

    Returns:
        The result of the check, which has a problem if the samples cannot be read; and the samples,
        none if there is a problem.
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
    """Picks `count` random samples with equal probability, and returns their positions by shard."""
    total = sum(commit.count for _, commit in shards)
    numbers = sorted(random.sample(range(total), min(count, total)))
    picks, first = [], 0
    for _, commit in shards:
        picks.append([n - first for n in numbers if first <= n < first + commit.count])
        first += commit.count
    return picks


# How much recomputed activations may differ from the stored ones, relative to the norm of a sample
# at a hook. This is the error of the computation, by the dtype of the model and by whether the
# platform is the one of the run.
COMPUTED = {  # on the platform of the run, and on another one
    # Products have the highest precision on every platform, but another mesh or packing changes the
    # order in which they are summed: on a CPU, 2e-6 was measured after 12 layers. Functions such as
    # exp and rsqrt differ between platforms.
    "float32": (1e-3, 2e-3),
    # Each value is rounded to 8 bits, and may be rounded to the other side if the sum before it
    # differs; later layers propagate the difference. On a CPU, 1.6e-2 was measured after 12 layers.
    # The functions of two platforms differ by less than one such rounding.
    "bfloat16": (5e-2, 5e-2),
}
# This is the error of rounding both to the stored dtype: 0.4 of a unit in the last place (the RMS
# of two roundings), which is at most 2**-10 or 2**-7 of a value. Encoded activations are compared
# with float32. A value of float8 has 4 significant bits, so it is off by at most 2**-4 of itself
# (0.026 of a token's norm was measured).
STORED = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8, FLOAT8: 2.0**-4}

# How large a share of a sample's numbers of experts, or of predicted tokens, may differ at a hook,
# by the dtype of the model: rounding decides between those that are nearly tied. On a CPU, with 8
# of 64 experts, no number differed where only the packing did, and 13 % did between bfloat16 and
# float32.
OTHER_NUMBERS = {"float32": 0.01, "bfloat16": 0.25}


def tolerance(identity: Identity, same_platform: bool) -> Tolerance:
    """Returns the differences that rounding explains.

    Args:
        identity: The identity of the run.
        same_platform: Whether samples are recomputed on the platform of the run.

    Raises:
        InputError: The differences are not known for the dtype of the model or of its activations.
    """
    dtype, stored = identity.dtype, identity.activation_dtype
    if dtype not in COMPUTED or stored not in STORED:
        raise InputError(
            f"{METADATA}: computed in {dtype or 'an unknown dtype'}, stored in {stored}: expected "
            f"one of {', '.join(COMPUTED)}, and one of {', '.join(STORED)}"
        )
    return Tolerance(COMPUTED[dtype][not same_platform], STORED[stored], OTHER_NUMBERS[dtype])


def _compare(chosen: list[ChosenSample], recompute: Recompute, allowed: Tolerance) -> Iterator[str]:
    """Recomputes the chosen samples, and yields those that differ by more than is allowed."""
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
    """Yields whether sample numbers are stored more than once, and the first one that is missing.

    In a run over a data set that is not complete, only numbers before its mark can be missing. A
    folder with a shard whose numbers are unknown is not searched for missing ones.

    Args:
        folders: The content of each folder, by the folder's name.
        checked: The results for all shards. A shard with a problem has no numbers.
    """
    of_shards: dict[str, list[np.ndarray]] = {name: [] for name in folders}
    for shard in checked:
        if shard.sample_idx is not None:
            of_shards[shard.folder].append(shard.sample_idx)
    of_folders = [np.concatenate([NO_NUMBERS, *numbers]) for numbers in of_shards.values()]
    numbers, times = np.unique(np.concatenate([NO_NUMBERS, *of_folders]), return_counts=True)
    if (twice := numbers[times > 1]).size:
        yield f"{counted(len(twice), 'sample number')} stored more than once, such as {twice[0]}"
    for name, stored in folders.items():
        identity, last = stored.identity, max(stored.commits, default=0)
        if identity is None or not 0 < last == len(of_shards[name]):
            continue
        numbers = np.unique(np.concatenate(of_shards[name]))
        if identity.from_dataset and (stored.metadata or {})["status"] != "complete":
            mark = furthest_mark(stored.commits.values())
            numbers = numbers[: 0 if mark is None else mark.samples]
        worker = identity.worker
        expected = worker.sample_idx(0) + worker.stride * np.arange(len(numbers))
        for i in np.flatnonzero(numbers != expected)[:1]:
            problem = "is missing" if numbers[i] > expected[i] else "belongs to another host"
            yield f"{shown_name(name)}: sample {min(numbers[i], expected[i])} {problem}"


def check_folders(folders: dict[str, RunLog]) -> Iterator[str]:
    """Yields all problems that the JSON files and the names of the files show."""
    yield from (f"{name}: is missing" for name in expected_names(folders) if name not in folders)
    yield from strangers(folders)
    prints: dict[tuple[str, int], str] = {}  # of the data set's files, by name and size
    for name, stored in folders.items():
        yield from stored.damaged.values()
        yield from (file_path(name, message) for message in stored.missing_jsons)
        metadata, where = stored.metadata or {}, file_path(name, METADATA)
        for file in metadata.get("data_files", ()):
            fingerprint = file["fingerprint"]
            if prints.setdefault((file["name"], file["bytes"]), fingerprint) != fingerprint:
                yield f"{name}: has read a file {file['name']} with other content than others have"
        if metadata and metadata["status"] != "complete":
            yield f"{where}: the run is not complete: {metadata['status']}"
        elif metadata:
            for problem in total_problems(stored.in_order, metadata):
                yield f"{where}: {problem}"
            for file in sorted(stored.files.keys() - {commit.file for commit in stored.in_order}):
                if SHARD_FILE.fullmatch(file):
                    yield f"{file_path(name, file)}: has no JSON"
