"""Kills extractions at random moments and starts them again, and checks what they have stored.

`python -m benchmarks.kill_and_resume --kills 200 --rounds 30` does two things:

1. It kills 200 processes of runs. The runs have ten different inputs and both shard formats, and
   are stored in a local folder, or in a bucket in which a fifth of the requests fail.
2. In each of 30 rounds, two or three processes write to one bucket at the same time, and are
   stopped for some seconds (SIGSTOP) or killed.

The batch size, the mesh and the number of devices change with every start. Every run is started
again until it is complete. Then every sample must be stored exactly once, and --verify must find no
problem. The values must differ from the values of an undisturbed run by at most 1e-5 of the root
mean square (RMS) of their hook. The last line printed is one JSON object.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet

# This script imports modules from tests/, which serve a bucket whose requests can fail, and start
# processes quickly.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from chat_templates import QWEN2_5
from forks import DEVICES, Forked
from gcs_server import Bucket

from activation_extraction import __main__ as command
from activation_extraction.model.family import parse_model_config
from activation_extraction.run import demo
from activation_extraction.store.chosen_samples import read_samples
from activation_extraction.store.folder import Folder
from activation_extraction.store.run_log import RunLog
from activation_extraction.store.sample_table import read_table, stored_samples
from activation_extraction.text.sample_facts import SampleFacts
from benchmarks.inputs import SHAPES
from benchmarks.processes import print_result
from qwen2_jax import Qwen2, weight_table

ROOT = Path(__file__).parents[1]
# A script that runs the tool, but pauses before every batch is stored, so that a run lasts long
# enough to be killed.
SLOW_SCRIPT = """
import os, sys, time
from activation_extraction.__main__ import main
from activation_extraction.store.storage import ActivationStorage
add = ActivationStorage.add_batch
def slowly(*arguments):
    time.sleep(0.15)
    return add(*arguments)
ActivationStorage.add_batch = slowly
status = main(sys.argv[1:])
sys.stdout.flush()
os._exit(status)
"""
# A process is killed at a random moment. The moment is at most this number of seconds after the
# start of the process or, if `Extraction.kill` first waits until the process has stored a file, at
# most this number of seconds after this file is stored.
MAX_SECONDS_TO_KILL = 0.8
# The largest allowed difference between a value of a disturbed run (whose processes were killed or
# stopped) and the same value of an undisturbed run, divided by the root mean square of the values
# at the hook.
TOLERANCE = 1e-5
# Words in the message of a process whose folder another process has taken over.
TAKEN_OVER = "has taken over"
# Tuples (number of devices, flags of a mesh with this number of devices).
MESHES: tuple[tuple[int, list[str]], ...] = (
    (1, []),
    (2, ["--mesh_type", "1d"]),
    (2, ["--mesh_type", "2d"]),
    (4, ["--mesh_shape", "2,2", "--mesh_axes", "data,fsdp"]),
    (4, ["--no_data_parallel"]),
)
# The number of documents in each input. They fill several shards (see RUN_FLAGS).
DOCUMENTS = 900


class StartedProcess(NamedTuple):
    """A process of an extraction, which may be running or may have ended.

    Attributes:
        process: Handle of the process.
        log_path: Path of the file with the stdout and stderr of the process.
    """

    process: Forked
    log_path: Path

    def end(self) -> str:
        """Waits until the process has ended.

        Returns:
            "done" if the run is complete. "killed" if the process was killed. "lost" if another
            process has taken over the folder.

        Raises:
            RuntimeError: If the process has ended in another way.
        """
        exit_status = self.process.wait()
        log_text = self.log_path.read_text(errors="replace")
        if exit_status == 2 and TAKEN_OVER in log_text.splitlines()[-1]:
            return "lost"
        if exit_status not in (0, -signal.SIGKILL):
            raise RuntimeError(f"a process has ended with status {exit_status}: {log_text}")
        return "done" if exit_status == 0 else "killed"


@dataclass
class Extraction:
    """An extraction that is started repeatedly.

    Attributes:
        folder: Folder in which the logs of the processes and the script that they run are written.
        flags: Flags of extract_activations.py, with their values.
        environment: Environment variables that are added to the variables of this process.
        varies_settings: Whether the batch size, the mesh and the number of devices are chosen at
            random at every start.
        rng: Generator of all random choices.
        num_starts: Number of times that the extraction was started so far.
    """

    folder: Path
    flags: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    varies_settings: bool = False
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    num_starts: int = 0

    def start(self, *more_flags: str) -> StartedProcess:
        """Starts the extraction in a new process, which can be killed while it stores.

        The process pauses before it stores each batch, so that there is time to kill it while it
        stores.

        Args:
            more_flags: Flags and their values that are added to the flags of the extraction.

        Returns:
            The process, which may still be running.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.num_starts += 1
        script_path, log_path = self.folder / "slowly.py", self.folder / f"{self.num_starts}.log"
        script_path.write_text(SLOW_SCRIPT)
        process_environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        extraction_command = [str(script_path), *self.flags, *more_flags]
        if self.varies_settings:
            num_devices, mesh_flags = self.rng.choice(MESHES)
            process_environment[DEVICES] = str(num_devices)
            extraction_command += [*mesh_flags, "--batch_size", str(self.rng.choice([4, 8, 12]))]
        process = Forked(extraction_command, process_environment | dict(self.environment), log_path)
        return StartedProcess(process, log_path)

    def kill(self, count_stored_files: Callable[[], int], kills: int) -> int:
        """Starts and kills the extraction several times, and then lets it complete.

        The first two kills and every fourth kill come at a random moment after the start of the
        process. The other kills come at a random moment after the process has stored its first
        file. If the run is complete before it is killed, it is not started again.

        Args:
            count_stored_files: A function without arguments that returns the number of stored
                files, which grows when a process has begun to store.
            kills: The number of processes to kill.

        Returns:
            The number of killed processes.

        Raises:
            RuntimeError: If a process fails.
        """
        for kill_number in range(kills):
            num_stored_files_before_start = count_stored_files()
            started_process = self.start()
            if kill_number > 1 and kill_number % 4:
                while (
                    started_process.process.poll() is None
                    and count_stored_files() == num_stored_files_before_start
                ):
                    time.sleep(0.01)
            time.sleep(self.rng.uniform(0, MAX_SECONDS_TO_KILL))
            started_process.process.kill()
            if started_process.end() == "done":
                return kill_number
        assert self.start().end() == "done"
        return kills

    def compete(self, writers: int, events: int) -> Counter[str]:
        """Lets several processes store one run in a bucket, and pauses or kills some of them.

        After each pause or kill, every process that has ended is replaced by a new process. When
        all processes have ended, one more process runs until the extraction is complete.

        Args:
            writers: The number of processes that run at the same time.
            events: The number of pauses and kills.

        Returns:
            Event -> how often it occurred. The events are "stopped" for a process that was paused
            for some time, and the ways in which processes ended: "done", "killed" and "lost" (see
            `StartedProcess.end`).

        Raises:
            RuntimeError: If a process fails.
        """
        count_by_event: Counter[str] = Counter()

        def start(writer_number: int) -> StartedProcess:
            return self.start("--output_dir", str(self.folder / f"disk_{writer_number}"))

        running_processes = [start(writer_number) for writer_number in range(writers)]
        for _ in range(events):
            time.sleep(self.rng.uniform(0, 2))
            chosen_process = running_processes[self.rng.randrange(writers)].process
            if self.rng.random() < 0.6:
                chosen_process.send_signal(signal.SIGSTOP)
                time.sleep(self.rng.uniform(0.5, 4))
                chosen_process.send_signal(signal.SIGCONT)
                count_by_event["stopped"] += 1
            else:
                chosen_process.kill()
                chosen_process.wait()
            for writer_number, started_process in enumerate(running_processes):
                if started_process.process.poll() is not None:
                    count_by_event[started_process.end()] += 1
                    running_processes[writer_number] = start(writer_number)
        count_by_event.update(started_process.end() for started_process in running_processes)
        assert start(0).end() == "done"
        return count_by_event


class Sample(NamedTuple):
    """A sample that a run has stored.

    Attributes:
        token_ids_and_positions: Tuple of two lists: the ids of the stored tokens, and their
            positions in the sample, from 0.
        facts: Row of the sample in the table of samples.
        activations_by_hook_key: Key of a hook -> activations (tokens, width).
    """

    token_ids_and_positions: tuple[list[int], list[int]]
    facts: SampleFacts
    activations_by_hook_key: Mapping[Any, Any]


def samples_in(*urls: object) -> dict[int, Sample]:
    """Reads all samples of a run.

    Args:
        urls: The URLs or paths of the run's folders, one for each worker.

    Returns:
        Sample number -> sample.

    Raises:
        RuntimeError: If a sample is stored twice, or if the run log of a folder has a problem.
    """
    sample_by_sample_number: dict[int, Sample] = {}
    for folder in map(Folder, map(str, urls)):
        run_log = RunLog.read(folder)
        if run_log.problems:
            raise RuntimeError(run_log.problems[0])
        for commit in run_log.commits_in_order:
            if not commit.count:
                continue
            table_rows = stored_samples(read_table(folder, commit))
            samples_of_commit = read_samples(
                folder, run_log, commit, range(commit.count), commit.file
            )
            for stored_sample, table_row in zip(samples_of_commit, table_rows, strict=True):
                sample_facts = table_row.facts
                sample_number = sample_facts.sample_idx
                sample_number_read_from_shard = stored_sample.tokens.sample_idx
                if (
                    sample_number in sample_by_sample_number
                    or sample_number_read_from_shard != sample_number
                ):
                    raise RuntimeError(f"{folder.url}: sample {sample_number} is stored twice")
                sample_by_sample_number[sample_number] = Sample(
                    (
                        np.asarray(stored_sample.tokens.token_ids).tolist(),
                        stored_sample.tokens.positions.tolist(),
                    ),
                    sample_facts,
                    dict(zip(commit.hook_name_by_key, stored_sample.values_of_hooks, strict=True)),
                )
    return sample_by_sample_number


def deviation(disturbed: Mapping[int, Sample], undisturbed: Mapping[int, Sample]) -> float:
    """Compares the samples of a disturbed run with the samples of an undisturbed run.

    The processes of a disturbed run are killed or stopped at random, and the run is continued until
    it is complete. Both runs have the same input.

    Args:
        disturbed: Sample number -> sample of the disturbed run.
        undisturbed: Sample number -> sample of the undisturbed run.

    Returns:
        The largest difference between a value of the disturbed run and the same value of the
        undisturbed run, divided by the root mean square of the undisturbed run's values at the
        hook. It is 0 if all values are equal.

    Raises:
        RuntimeError: If the numbers, tokens, positions or facts of the samples differ.
    """
    missing_sample_numbers = undisturbed.keys() - disturbed.keys()
    unexpected_sample_numbers = disturbed.keys() - undisturbed.keys()
    if missing_sample_numbers or unexpected_sample_numbers:
        raise RuntimeError(
            f"missing samples: {missing_sample_numbers}, "
            f"unexpected samples: {unexpected_sample_numbers}"
        )
    for sample_number, expected_sample in undisturbed.items():
        disturbed_run_sample = disturbed[sample_number]
        if (disturbed_run_sample.token_ids_and_positions, disturbed_run_sample.facts) != (
            expected_sample.token_ids_and_positions,
            expected_sample.facts,
        ):
            raise RuntimeError(
                f"sample {sample_number}: {disturbed_run_sample[:2]}, "
                f"expected {expected_sample[:2]}"
            )

    def values_at(hook_key: Any, samples: Mapping[int, Sample]) -> np.ndarray:
        values_of_samples = [
            samples[sample_number].activations_by_hook_key[hook_key]
            for sample_number in undisturbed
        ]
        return np.concatenate(values_of_samples).astype(np.float64)

    # Largest absolute difference from the undisturbed run at any hook, divided by the root mean
    # square of the undisturbed values at this hook.
    largest_deviation = 0.0
    for hook_key in next(iter(undisturbed.values())).activations_by_hook_key:
        expected_values = values_at(hook_key, undisturbed)
        largest_difference = abs(values_at(hook_key, disturbed) - expected_values).max()
        rms_of_expected_values = np.sqrt((expected_values**2).mean())
        largest_deviation = max(
            largest_deviation, float(largest_difference / rms_of_expected_values)
        )
    return largest_deviation


def make_texts() -> list[str]:
    """Returns DOCUMENTS texts of at most 60 words.

    Each text consists of consecutive words from a random place in demo_texts.txt, the file with the
    texts of --demo. Some texts are empty.
    """
    rng = random.Random(0)
    words = (ROOT / "activation_extraction/run/demo_texts.txt").read_text(encoding="utf-8").split()
    first_word_indices = [rng.randrange(len(words)) for _ in range(DOCUMENTS)]
    document_texts = []
    for first_word_index in first_word_indices:
        word_count = rng.choice(range(61))
        document_texts.append(" ".join(words[first_word_index : first_word_index + word_count]))
    return document_texts


def make_inputs(folder: Path) -> dict[str, list[str]]:
    """Writes two models and several data sets, and combines them into ten inputs for runs.

    Args:
        folder: The folder to which the models and data sets are written.

    Returns:
        Name of an input -> flags that select its model, its data set and the way to read it.
    """
    model_folder = demo.make_demo(folder)[0]
    moe_model_folder = folder / "experts"
    moe_model_folder.mkdir()
    moe_model_config = {**demo.MODEL_CONFIG, **SHAPES["tiny-moe"], "vocab_size": demo.VOCAB_SIZE}
    (moe_model_folder / "config.json").write_text(json.dumps(moe_model_config))
    for file_name in ("tokenizer.json", "tokenizer_config.json"):
        (moe_model_folder / file_name).write_bytes((model_folder / file_name).read_bytes())
    weight_spec_by_path = weight_table(Qwen2(parse_model_config(moe_model_config)))
    demo.write_weights(moe_model_folder / "model.safetensors", weight_spec_by_path.values())
    template_path = folder / "template.jinja"
    template_path.write_text(QWEN2_5)

    document_texts = make_texts()
    documents: list[dict[str, Any]] = [
        {"text": document_text, "id": document_number}
        for document_number, document_text in enumerate(document_texts)
    ]
    conversations = []
    rows_of_token_ids = []
    for document_text in filter(None, document_texts):
        system_message = {"role": "system", "content": "Hm."}
        conversations.append(
            {"messages": [system_message, {"role": "user", "content": document_text}]}
        )
        token_ids = [ord(character) % 128 for character in document_text[:80]]
        kept_token_mask = [position % 3 > 0 for position in range(len(token_ids))]
        rows_of_token_ids.append({"ids": token_ids, "mask": kept_token_mask})

    def write(name: str, rows: Sequence[Mapping[str, Any]], num_bad_lines: int = 0) -> str:
        """Writes rows to a JSON Lines file, and returns its path.

        Args:
            name: The name of the file in `folder`.
            rows: The rows. Each row is written as one line of JSON.
            num_bad_lines: The number of lines without valid JSON that are inserted between the
                rows.
        """
        json_lines = [json.dumps(row) for row in rows]
        for line_index in range(0, 60 * num_bad_lines, 60):
            json_lines.insert(line_index, "{")
        file_path = folder / name
        file_path.parent.mkdir(exist_ok=True)
        file_path.write_text("\n".join(json_lines) + "\n")
        return str(file_path)

    documents_path = write("rows.jsonl", documents)
    conversations_path = write("c.jsonl", conversations)
    token_ids_path = write("ids.jsonl", rows_of_token_ids)
    bad_rows_path = write("b.jsonl", documents, num_bad_lines=9)
    for file_number in range(3):
        write(f"files/{file_number}.jsonl", documents[file_number::3])
    middle_index = len(documents) // 2
    first_half_path = write("half.jsonl", documents[:middle_index])
    second_half_table = pyarrow.Table.from_pylist(documents[middle_index:])
    pyarrow.parquet.write_table(second_half_table, folder / "half.parquet", row_group_size=100)

    model_flags = ["--model_path", str(model_folder)]
    text_flags = [*model_flags, "--dataset_path", documents_path]
    flags_with_dataset_folder = [*model_flags, "--dataset_path", str(folder / "files")]
    sources_with_weights = [f"{first_half_path}=0.7", f"{folder}/half.parquet=0.3"]
    chat_flags = ["--dataset_path", conversations_path, "--messages_column", "messages"]
    chat_flags += ["--chat_template", str(template_path), "--roles", "system", "user"]
    ids_flags = ["--dataset_path", token_ids_path, "--ids_column", "ids", "--mask_column", "mask"]
    return {
        "text": text_flags,
        "shuffled files": [*flags_with_dataset_folder, "--shuffle_documents", "3"],
        "mixture": [*model_flags, "--mix", *sources_with_weights],
        "pieces": [*text_flags, "--long_documents", "split", "--overlap", "8"],
        "chat": [*model_flags, *chat_flags],
        "ids": [*model_flags, *ids_flags],
        "few tokens": [*text_flags, "--positions", "random:0.1"],
        "bad rows": [*model_flags, "--dataset_path", bad_rows_path, "--skip_bad_rows"],
        "budget": [*text_flags, "--max_tokens", "12000"],
        "experts": ["--model_path", str(moe_model_folder), "--dataset_path", documents_path],
    }


# Flags of all runs. The shards are small, so that a run has several shards.
RUN_FLAGS = ["--layers_to_extract", "1", "3", "--max_seq_length", "32", "--shard_size_gb", "0.0015"]
BUCKET_FLAGS = ["--upload_to_gcs", "--gcs_bucket", Bucket.name, "--gcs_prefix", "run"]
# The URL of the folder in which a run with BUCKET_FLAGS stores its files.
BUCKET_URL = f"gs://{Bucket.name}/run/machine_000"


def run_tool(*arguments: object) -> None:
    """Runs extract_activations.py in this process, without starting a new process.

    Args:
        arguments: The command-line arguments of extract_activations.py: its flags and their values.

    Raises:
        RuntimeError: If the exit status is not 0.
    """
    if exit_status := command.main([str(argument) for argument in arguments]):
        raise RuntimeError(f"{arguments}: status {exit_status}")


def disturb(
    folder: Path,
    flags: list[str],
    stores_in_bucket: bool,
    seed: int,
    action: Callable[[Extraction, Callable[[], int]], Any],
) -> tuple[Any, dict[int, Sample]]:
    """Makes a run whose processes are killed or stopped, verifies its files and reads its samples.

    Args:
        folder: The folder in which the run, the logs of its processes and the script that they run
            are written.
        flags: The flags of the input and of the shard format.
        stores_in_bucket: Whether the run stores in a bucket. A fifth of the bucket's requests fail
            while the extraction is disturbed.
        seed: The seed of all random choices.
        action: A function that starts and disturbs the extraction until the run is complete. Its
            arguments are the extraction, and a function without arguments that returns the number
            of stored files, which grows when a process has begun to store.

    Returns:
        A tuple of the result of `action` and the stored samples: sample number -> sample.

    Raises:
        RuntimeError: If a process fails, or if the stored files are incomplete or damaged.
    """
    output_folder = folder / "out"
    extraction_flags = [*flags, *RUN_FLAGS, "--output_dir", str(output_folder)]
    run_location = str(output_folder)
    if stores_in_bucket:
        extraction_flags += BUCKET_FLAGS
        run_location = BUCKET_URL
    with closing(Bucket()) as bucket:
        os.environ.update(bucket.environment)
        # So many requests fail that the processes must often repeat them.
        bucket.fault_rate = 0.2
        rng = random.Random(seed)
        extraction = Extraction(folder, extraction_flags, varies_settings=True, rng=rng)

        def count_stored_files() -> int:
            return (
                len(bucket.objects()) if stores_in_bucket else len([*output_folder.glob("*.json")])
            )

        action_result = action(extraction, count_stored_files)
        # From now on, the bucket answers all requests without faults.
        bucket.fault_rate = 0
        run_tool("--verify", "--output_dir", run_location)
        return action_result, samples_in(run_location)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="how many (default: 200)")
    parser.add_argument(
        "--rounds", type=int, default=30, help="of several writers, how many (default: 30)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of random choices (default: 0)")
    parsed_flags = parser.parse_args(argv)
    start_time = time.perf_counter()
    # Event -> how often it occurred in the runs with several writers (see `Extraction.compete`).
    count_by_event: Counter[str] = Counter()
    # Name of an input -> largest deviation of its disturbed runs from the undisturbed run.
    largest_deviation_by_input: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as temporary_folder:
        work_folder = Path(temporary_folder)
        flags_by_input_name = make_inputs(work_folder / "inputs")
        # Name of an input -> number of a sample -> sample of an undisturbed run.
        undisturbed_run_samples_by_input: dict[str, dict[int, Sample]] = {}

        def compare(input_name: str, disturbed_run_sample_by_number: Mapping[int, Sample]) -> None:
            """Checks that a disturbed run has stored the same samples as an undisturbed run.

            The processes of the disturbed run were killed or stopped, and the run was continued
            until it was complete. The undisturbed run is made when the input is first compared. The
            largest difference between the activations of the two runs (see `deviation`) is stored
            in `largest_deviation_by_input`, which the benchmark prints at the end.

            Args:
                input_name: The name of the input of both runs.
                disturbed_run_sample_by_number: Number of a sample -> sample of the disturbed run.

            Raises:
                RuntimeError: If the samples differ by more than rounding explains.
            """
            if input_name not in undisturbed_run_samples_by_input:
                output_folder = work_folder / "whole" / input_name
                run_tool(
                    *flags_by_input_name[input_name],
                    *RUN_FLAGS,
                    "--batch_size",
                    8,
                    "--output_dir",
                    output_folder,
                )
                undisturbed_run_samples_by_input[input_name] = samples_in(output_folder)
            largest_deviation = deviation(
                disturbed_run_sample_by_number, undisturbed_run_samples_by_input[input_name]
            )
            largest_deviation_by_input[input_name] = max(
                largest_deviation, largest_deviation_by_input.get(input_name, 0.0)
            )
            if largest_deviation > TOLERANCE:
                raise RuntimeError(
                    f"{input_name}: values differ by {largest_deviation:.1e} of the RMS"
                )
            print(
                f"{input_name}: {len(disturbed_run_sample_by_number)} samples, "
                f"within {largest_deviation:.1e} of the RMS",
                flush=True,
            )

        def compete(
            num_writers: int, extraction: Extraction, _count_stored_files: Callable[[], int]
        ) -> Counter[str]:
            return extraction.compete(num_writers, events=8)

        setting_combinations = list(
            product((False, True), ("pickle", "safetensors"), flags_by_input_name)
        )
        setting_combinations = random.Random(parsed_flags.seed).sample(
            setting_combinations, len(setting_combinations)
        )
        max_kills_of_run = max(1, parsed_flags.kills // len(setting_combinations))
        total_num_kills = 0
        for run_number, (stores_in_bucket, shard_format, input_name) in enumerate(
            cycle(setting_combinations)
        ):
            if total_num_kills >= parsed_flags.kills:
                break
            num_kills = min(parsed_flags.kills - total_num_kills, max_kills_of_run)
            num_killed_processes, disturbed_run_sample_by_number = disturb(
                work_folder / f"kills_{run_number}",
                [*flags_by_input_name[input_name], "--shard_format", shard_format],
                stores_in_bucket,
                parsed_flags.seed + run_number,
                partial(Extraction.kill, kills=num_kills),
            )
            total_num_kills += num_killed_processes
            compare(input_name, disturbed_run_sample_by_number)
        for round_number in range(parsed_flags.rounds):
            input_name = list(flags_by_input_name)[round_number % len(flags_by_input_name)]
            num_writers = 2 + round_number % 2
            event_counts_of_round, disturbed_run_sample_by_number = disturb(
                work_folder / f"writers_{round_number}",
                flags_by_input_name[input_name],
                True,
                parsed_flags.seed + round_number,
                partial(compete, num_writers),
            )
            count_by_event.update(event_counts_of_round)
            compare(input_name, disturbed_run_sample_by_number)
    print_result(
        {
            "kills": total_num_kills,
            "rounds": parsed_flags.rounds,
            "writers": count_by_event,
            "largest_deviation_of_rms": largest_deviation_by_input,
            "seconds": round(time.perf_counter() - start_time, 1),
        }
    )


if __name__ == "__main__":
    main()
