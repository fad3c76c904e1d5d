"""Checks everything that a run has stored, for --verify.

This module compares the files of each shard with the JSON file that lists them, checks that every
sample number is stored exactly once, and compares a few samples with recomputed ones. It reports
the first problem of each shard, and all problems of the JSON files, the sample numbers and the
recomputed samples. store/shard_check.py checks the files of one shard, and run/recompute.py
recomputes samples.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from activation_extraction.common.encodings import FLOAT8
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.common.visible import counted, say
from activation_extraction.store.chosen_samples import ChosenSample, Recomputer, read_samples
from activation_extraction.store.folder import Folder
from activation_extraction.store.formats import SHARD_FILE
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
from activation_extraction.store.stored_hook import Tolerance
from activation_extraction.store.totals import total_problems


def verify(
    root: Folder, load_model: Callable[[dict[str, Any]], Recomputer] | None, sample_count: int
) -> int:
    """Checks everything that a run has stored, and prints all problems.

    Args:
        root: The folder with the output of all hosts.
        load_model: A function that takes the content of metadata.json, loads the model of the run
            and returns a `Recomputer`. None to recompute no samples.
        sample_count: The number of random samples to recompute.

    Returns:
        The exit status: 0 if there is no problem, otherwise 1.

    Raises:
        InputError: If there is no run, or samples should be recomputed but the run records no
            model. `load_model` may raise it, too.
    """
    log_by_folder = read_folders(root)
    first_metadata = next(
        (run_log.metadata for run_log in log_by_folder.values() if run_log.metadata), None
    )
    run_identity = Identity() if first_metadata is None else identity_of(first_metadata, METADATA)
    has_no_model = first_metadata is not None and not run_identity.model_digest
    recomputer = None
    if load_model is not None and has_no_model:
        raise InputError(
            f"--model_path: {root.url} records no model, because another program stored its "
            "activations; verify it without --model_path"
        )
    if load_model is not None and first_metadata is not None:
        recomputer = load_model(first_metadata)
        tolerance_of_run = tolerance(
            run_identity, first_metadata.get("backend") == recomputer.jax_platform
        )
    problem_messages = list(check_folders(log_by_folder))
    num_samples_to_choose = 0 if recomputer is None else sample_count
    shard_check_results: list[CheckedShard] = []
    chosen_samples: list[ChosenSample] = []
    for shard_check_result, chosen_samples_of_shard in check_shards(
        root, log_by_folder, num_samples_to_choose
    ):
        shard_check_results.append(shard_check_result)
        chosen_samples += chosen_samples_of_shard
    problem_messages += [
        shard_check_result.problem
        for shard_check_result in shard_check_results
        if shard_check_result.problem
    ]
    problem_messages += check_numbers(log_by_folder, shard_check_results)
    if recomputer is not None:
        problem_messages += _compare(chosen_samples, recomputer, tolerance_of_run)
        recomputation_phrase = f"{counted(len(chosen_samples), 'sample')} recomputed"
    else:
        omission_reason = "no model is recorded" if has_no_model else "give --model_path"
        recomputation_phrase = f"nothing recomputed ({omission_reason})"
    stored_sample_count = sum(
        shard_check_result.commit.count for shard_check_result in shard_check_results
    )
    stored_gigabytes = (
        sum(shard_check_result.commit.bytes for shard_check_result in shard_check_results) / 1e9
    )
    say(
        *problem_messages,
        f"{'FAILED' if problem_messages else 'in order'}: "
        f"{counted(len(log_by_folder), 'folder')}, "
        f"{counted(len(shard_check_results), 'shard')}, {counted(stored_sample_count, 'sample')}, "
        f"{stored_gigabytes:,.3f} GB; {recomputation_phrase}; "
        f"{counted(len(problem_messages), 'problem')}",
    )
    return 1 if problem_messages else 0


def check_shards(
    root: Folder, log_by_folder: dict[str, RunLog], sample_count: int = 0
) -> Iterator[tuple[CheckedShard, list[ChosenSample]]]:
    """Checks all shards, several at the same time, and yields the results in stored order.

    Args:
        root: The folder with the output of all hosts.
        log_by_folder: The run log of each folder, by the folder's name.
        sample_count: The number of random samples to choose from all shards together.

    Yields:
        A tuple of the result of checking a shard, and the chosen samples of the shard. If there is
        a problem, the list of samples is empty.
    """
    folders_and_commits = []
    for folder_name, run_log in log_by_folder.items():
        for commit in run_log.commits_in_order:
            folders_and_commits.append((folder_name, commit))
    picked_indices_in_shards = _pick_samples(folders_and_commits, sample_count)
    commits_and_check_arguments = []
    for (folder_name, commit), picked_indices_in_shard in zip(
        folders_and_commits, picked_indices_in_shards, strict=True
    ):
        host_folder = root.child(folder_name)
        check_arguments = (
            host_folder,
            folder_name,
            log_by_folder[folder_name],
            commit,
            picked_indices_in_shard,
        )
        commits_and_check_arguments.append((commit, check_arguments))
    return for_each_shard(check_and_choose, commits_and_check_arguments)


def check_and_choose(
    host_folder: Folder,
    folder_name: str,
    run_log: RunLog,
    commit: Commit,
    sample_indices: Sequence[int],
) -> tuple[CheckedShard, list[ChosenSample]]:
    """Checks a shard and, if it has no problem, reads the samples that are to be recomputed.

    Args:
        host_folder: The host's folder.
        folder_name: The name of the host's folder, for messages.
        run_log: The run log of the folder.
        commit: The commit of the shard.
        sample_indices: The indices of the samples to read, in the shard.

    Returns:
        A tuple of the result of the check, and the samples. If there is a problem, or the samples
        cannot be read, the list of samples is empty.
    """
    shard_check_result = check_shard(host_folder, folder_name, run_log, commit)
    if shard_check_result.problem or not sample_indices or run_log.identity is None:
        return shard_check_result, []
    shard_path = file_path(folder_name, commit.file)
    try:
        return shard_check_result, read_samples(
            host_folder, run_log, commit, sample_indices, shard_path
        )
    except (RunError, OSError, ValueError) as error:
        # If the error's message begins with the name of the file, the name is removed, because the
        # path that precedes the message ends with it.
        error_message = f"{shard_path}: {error}"
        problem_message = error_message.replace(f"{shard_path}: {commit.file}: ", f"{shard_path}: ")
        return CheckedShard(folder_name, commit, problem_message), []


def _pick_samples(
    folders_and_commits: list[tuple[str, Commit]], sample_count: int
) -> list[list[int]]:
    """Picks random samples with equal probability.

    Args:
        folders_and_commits: A tuple for each shard, of the name of its folder and its commit.
        sample_count: The number of samples to pick. If there are fewer, all samples are picked.

    Returns:
        A list for each shard, which contains the indices of the picked samples in the shard, in
        ascending order.
    """
    stored_sample_count = sum(commit.count for _, commit in folders_and_commits)
    # Numbers of the picked samples, counted over all shards from 0.
    picked_sample_numbers = sorted(
        random.sample(range(stored_sample_count), min(sample_count, stored_sample_count))
    )
    picked_indices_in_shards = []
    previous_sample_count = 0  # number of samples in the shards before `commit`
    for _, commit in folders_and_commits:
        sample_numbers_of_shard = range(previous_sample_count, previous_sample_count + commit.count)
        picked_indices_in_shard = [
            picked_sample_number - previous_sample_count
            for picked_sample_number in picked_sample_numbers
            if picked_sample_number in sample_numbers_of_shard
        ]
        picked_indices_in_shards.append(picked_indices_in_shard)
        previous_sample_count += commit.count
    return picked_indices_in_shards


# Largest errors of recomputed activations that --verify tolerates, by the dtype of the model. They
# are relative to the norm of a sample's activations at a hook. The first limit applies if the
# activations are recomputed on the platform of the run, and the second on another platform. The
# errors of rounding to the stored dtype (ROUNDING_ERRORS) are added.
COMPUTING_ERRORS = {
    # Products have the highest precision on every platform, but another mesh or packing changes the
    # order in which they are summed. On a CPU, this caused an error of 2e-6 after 12 layers, far
    # below the first limit. The second limit is twice the first one, because functions such as exp
    # and rsqrt differ between platforms, too.
    "float32": (1e-3, 2e-3),
    # Each value is rounded to 8 significant bits, and a small difference in a sum can round it in
    # the other direction. Later layers propagate the difference. On a CPU, an error of 1.6e-2 was
    # measured after 12 layers. Functions such as exp and rsqrt differ between two platforms by less
    # than the error of one such rounding.
    "bfloat16": (5e-2, 5e-2),
}
# Stored dtype -> largest error that rounding to this dtype causes, relative to the norm of a
# sample's activations at a hook. For float16 and bfloat16, the recomputed activations are rounded,
# too. The root mean square of the difference between two rounded values is 0.4 of a unit in the
# last place. This unit is at most 2**-10 of a float16 value and 2**-7 of a bfloat16 value, so the
# error is less than half of that. Stored float8 values have 4 significant bits, so rounding changes
# a value by at most 2**-4 of it. The recomputed float32 values, with which they are compared, are
# not rounded. For float8, an error of 0.026 of a token's norm was measured, which is below 2**-4.
ROUNDING_ERRORS = {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8, FLOAT8: 2.0**-4}

# Largest fraction of a sample's expert numbers or predicted token ids that may differ at a hook, by
# the dtype of the model. Rounding decides between experts or tokens whose scores are nearly equal.
# On a CPU, with 8 of 64 experts, no number differed with another packing, and 13 % of the numbers
# differed between bfloat16 and float32.
DIFFERENT_NUMBERS = {"float32": 0.01, "bfloat16": 0.25}


def tolerance(identity: Identity, same_platform: bool) -> Tolerance:
    """Returns the tolerance: the largest differences of recomputed samples that rounding explains.

    Args:
        identity: The identity of the run.
        same_platform: Whether samples are recomputed on the platform of the run.

    Raises:
        InputError: If the dtype of the model is not in COMPUTING_ERRORS, or the dtype of the stored
            activations is not in ROUNDING_ERRORS.
    """
    model_dtype, stored_dtype = identity.dtype, identity.activation_dtype
    if model_dtype not in COMPUTING_ERRORS or stored_dtype not in ROUNDING_ERRORS:
        raise InputError(
            f"{METADATA}: computed in {model_dtype or 'an unknown dtype'}, stored in "
            f"{stored_dtype}: expected one of {', '.join(COMPUTING_ERRORS)}, and one of "
            f"{', '.join(ROUNDING_ERRORS)}"
        )
    max_error_on_same_platform, max_error_on_other_platform = COMPUTING_ERRORS[model_dtype]
    return Tolerance(
        max_error_on_same_platform if same_platform else max_error_on_other_platform,
        ROUNDING_ERRORS[stored_dtype],
        DIFFERENT_NUMBERS[model_dtype],
    )


def _compare(
    chosen_samples: list[ChosenSample], recomputer: Recomputer, tolerance_of_run: Tolerance
) -> Iterator[str]:
    """Recomputes samples, and yields a message on each difference that rounding does not explain.

    Args:
        chosen_samples: The stored samples to recompute.
        recomputer: The object whose function `compute_values` is called with the samples.
        tolerance_of_run: The largest differences that rounding explains.
    """
    values_or_messages_of_samples = recomputer.compute_values(chosen_samples)
    for chosen_sample, values_or_message in zip(
        chosen_samples, values_or_messages_of_samples, strict=True
    ):
        if isinstance(values_or_message, str):
            yield f"{chosen_sample.location_phrase}: cannot be recomputed: {values_or_message}"
            continue
        token_positions = chosen_sample.tokens.positions
        for stored_hook, stored_values in zip(
            chosen_sample.hooks, chosen_sample.values_of_hooks, strict=True
        ):
            recomputed_values = values_or_message[stored_hook.name]
            for difference_message in stored_hook.differences(
                stored_values, recomputed_values, token_positions, tolerance_of_run
            ):
                yield (
                    f"{chosen_sample.location_phrase}, {stored_hook.name}: recomputed, "
                    f"{difference_message}"
                )


def check_numbers(
    log_by_folder: dict[str, RunLog], shard_check_results: Sequence[CheckedShard]
) -> Iterator[str]:
    """Yields messages about sample numbers that are stored twice, missing, or in a wrong folder.

    There is one message about all repeated numbers. For each folder, there is at most one message
    about missing or wrong numbers, namely about its first number that is missing or belongs to
    another host.

    If a run over a data set is not complete, only numbers before its furthest mark count as
    missing. A folder is not searched for missing numbers if the numbers of one of its shards are
    unknown.

    Args:
        log_by_folder: The run log of each folder, by the folder's name.
        shard_check_results: The results of checking all shards. The sample numbers of a shard with
            a problem are unknown.
    """
    sample_numbers_by_folder: dict[str, list[np.ndarray]] = {
        folder_name: [] for folder_name in log_by_folder
    }
    sample_numbers_of_shards = [NO_NUMBERS]
    for shard_check_result in shard_check_results:
        if shard_check_result.sample_numbers is not None:
            sample_numbers_by_folder[shard_check_result.folder_name].append(
                shard_check_result.sample_numbers
            )
            sample_numbers_of_shards.append(shard_check_result.sample_numbers)
    sample_numbers, occurrence_counts = np.unique(
        np.concatenate(sample_numbers_of_shards), return_counts=True
    )
    repeated_sample_numbers = sample_numbers[occurrence_counts > 1]
    if repeated_sample_numbers.size:
        repeated_sample_numbers_phrase = counted(len(repeated_sample_numbers), "sample number")
        first_repeated_sample_number = repeated_sample_numbers[0]
        yield (
            f"{repeated_sample_numbers_phrase} stored more than once, such as "
            f"{first_repeated_sample_number}"
        )
    for folder_name, run_log in log_by_folder.items():
        folder_identity = run_log.identity
        last_shard_number = max(run_log.commit_by_shard_number, default=0)
        if (
            folder_identity is None
            or last_shard_number == 0
            or last_shard_number != len(sample_numbers_by_folder[folder_name])
        ):
            continue
        sample_numbers = np.unique(np.concatenate(sample_numbers_by_folder[folder_name]))
        if folder_identity.from_dataset and (run_log.metadata or {})["status"] != "complete":
            mark = furthest_mark(run_log.commit_by_shard_number.values())
            sample_numbers = sample_numbers[: 0 if mark is None else mark.samples]
        worker = folder_identity.worker
        expected_sample_numbers = worker.sample_idx(0) + worker.stride * np.arange(
            len(sample_numbers)
        )
        indices_of_wrong_sample_numbers = np.flatnonzero(sample_numbers != expected_sample_numbers)
        if indices_of_wrong_sample_numbers.size:
            index_of_first_wrong_sample_number = indices_of_wrong_sample_numbers[0]
            sample_number = sample_numbers[index_of_first_wrong_sample_number]
            expected_sample_number = expected_sample_numbers[index_of_first_wrong_sample_number]
            shown_folder_name = shown_name(folder_name)
            if sample_number > expected_sample_number:
                yield f"{shown_folder_name}: sample {expected_sample_number} is missing"
            else:
                yield f"{shown_folder_name}: sample {sample_number} belongs to another host"


def check_folders(log_by_folder: dict[str, RunLog]) -> Iterator[str]:
    """Yields messages about the problems that can be found without reading the shards' data.

    They follow from the JSON files of each folder, and from the names of the other files.

    Args:
        log_by_folder: The run log of each folder, by the folder's name.
    """
    for folder_name in expected_names(log_by_folder):
        if folder_name not in log_by_folder:
            yield f"{folder_name}: is missing"
    yield from foreign_folders(log_by_folder)
    # Fingerprints of the files of the data set, by the name and the size in bytes of the file.
    fingerprint_by_name_and_num_bytes: dict[tuple[str, int], str] = {}
    for folder_name, run_log in log_by_folder.items():
        yield from run_log.message_by_damaged_file.values()
        yield from (
            file_path(folder_name, missing_json_message)
            for missing_json_message in run_log.missing_json_messages
        )
        folder_metadata = run_log.metadata or {}
        metadata_path = file_path(folder_name, METADATA)
        for data_file in folder_metadata.get("data_files", ()):
            file_name, num_file_bytes = data_file["name"], data_file["bytes"]
            file_fingerprint = data_file["fingerprint"]
            if file_fingerprint != fingerprint_by_name_and_num_bytes.setdefault(
                (file_name, num_file_bytes), file_fingerprint
            ):
                yield (
                    f"{folder_name}: has read a file {file_name} with other content than others "
                    "have"
                )
        if folder_metadata and folder_metadata["status"] != "complete":
            yield f"{metadata_path}: the run is not complete: {folder_metadata['status']}"
        elif folder_metadata:
            for problem_of_totals in total_problems(run_log.commits_in_order, folder_metadata):
                yield f"{metadata_path}: {problem_of_totals}"
            committed_file_names = {commit.file for commit in run_log.commits_in_order}
            for file_name in sorted(run_log.size_by_file_name.keys() - committed_file_names):
                if SHARD_FILE.fullmatch(file_name):
                    yield f"{file_path(folder_name, file_name)}: has no JSON"
