"""Kills extractions at random moments and starts them again with the same command, until they end.

`python -m benchmarks.kill_and_resume --kills 200 --rounds 30` does two things. It kills runs over
ten kinds of input, in both formats, in a folder and in a bucket where a fifth of the requests fail;
the batch size, the mesh and the number of devices change with every start. Then, in each of the
rounds, two or three processes write to one bucket at the same time, and are stopped for seconds
(SIGSTOP) or killed. At the end, every sample must be stored exactly once, its values must differ
from those of an undisturbed run by at most 1e-5 of the root mean square of their hook, and --verify
must report nothing. The last line printed is one JSON object.
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
from itertools import cycle, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.parquet

ROOT = Path(__file__).parents[1]
# The tests have a bucket whose requests fail, and processes that start quickly.
sys.path[:0] = [str(ROOT / "tests")]

from chat_templates import QWEN2_5  # noqa: E402
from forks import DEVICES, Forked  # noqa: E402
from gcs_server import Bucket  # noqa: E402

from activation_extraction import __main__ as command  # noqa: E402
from activation_extraction.model.family import parse_model_config  # noqa: E402
from activation_extraction.run import demo  # noqa: E402
from activation_extraction.store.chosen_samples import read_samples  # noqa: E402
from activation_extraction.store.folder import Folder  # noqa: E402
from activation_extraction.store.run_log import RunLog  # noqa: E402
from activation_extraction.store.sample_table import read_table, stored_samples  # noqa: E402
from activation_extraction.text.sample_facts import SampleFacts  # noqa: E402
from benchmarks.inputs import SHAPES  # noqa: E402
from benchmarks.processes import print_result  # noqa: E402
from qwen2_jax import Qwen2, weight_table  # noqa: E402

# A script that runs the tool with a pause before every batch, so that a run lasts long enough to be
# killed.
SLOWLY = """
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
LONGEST = 0.8  # seconds between the sign of life and the kill, at most
TOLERANCE = 1e-5  # largest difference of values, as a share of the root mean square
LOST = "has taken over"  # in the message of a process that has lost the folder to another one
MESHES: tuple[tuple[int, list[str]], ...] = (  # the number of devices, and the flags of the mesh
    (1, []),
    (2, ["--mesh_type", "1d"]),
    (2, ["--mesh_type", "2d"]),
    (4, ["--mesh_shape", "2,2", "--mesh_axes", "data,fsdp"]),
    (4, ["--no_data_parallel"]),
)
DOCUMENTS = 900


class Started(NamedTuple):
    """A started process.

    Attributes:
        process: The process.
        log: The file of its output.
    """

    process: Forked
    log: Path

    def end(self) -> str:
        """Waits until the process has ended.

        Returns:
            "done" if the run is complete, "killed", or "lost" if another process has taken over.

        Raises:
            RuntimeError: If the process has ended in another way.
        """
        status, printed = self.process.wait(), self.log.read_text(errors="replace")
        if status == 2 and LOST in printed.splitlines()[-1]:
            return "lost"
        if status not in (0, -signal.SIGKILL):
            raise RuntimeError(f"a process has ended with status {status}: {printed}")
        return "done" if status == 0 else "killed"


@dataclass
class Extraction:
    """An extraction that is started repeatedly.

    Attributes:
        folder: The folder of the script and the logs.
        flags: The flags of the tool.
        environment: Environment variables beside those of this process.
        varied: Whether the batch size, the mesh and the number of devices change at every start.
        chance: The generator of all random choices.
        starts: The number of starts so far.
    """

    folder: Path
    flags: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    varied: bool = False
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    starts: int = 0

    def start(self, *more: str) -> Started:
        """Starts the command, slowed down, with `more` flags."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.starts += 1
        script, log = self.folder / "slowly.py", self.folder / f"{self.starts}.log"
        script.write_text(SLOWLY)
        variables = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
        command = [str(script), *self.flags, *more]
        if self.varied:
            devices, mesh = self.chance.choice(MESHES)
            variables[DEVICES] = str(devices)
            command += [*mesh, "--batch_size", str(self.chance.choice([4, 8, 12]))]
        return Started(Forked(command, variables | dict(self.environment), log), log)

    def kill(self, signs_of_life: Callable[[], object], kills: int) -> int:
        """Starts and kills the command several times, and then lets it end.

        The first two kills and every fourth one come at a random moment after the start, the others
        after the first sign of life. If a run is complete before it is killed, nothing is started
        any more.

        Args:
            signs_of_life: Returns a value that changes when a run has begun to store.
            kills: The number of processes to kill.

        Returns:
            The number of killed processes.

        Raises:
            RuntimeError: If a process fails.
        """
        for number in range(kills):
            before = signs_of_life()
            started = self.start()
            if number > 1 and number % 4:
                while started.process.poll() is None and signs_of_life() == before:
                    time.sleep(0.01)
            time.sleep(self.chance.uniform(0, LONGEST))
            started.process.kill()
            if started.end() == "done":
                return number
        assert self.start().end() == "done"
        return kills

    def compete(self, writers: int, events: int) -> Counter[str]:
        """Has several processes write to one bucket, and stops or kills them at random.

        After each stop or kill, a new process replaces each one that has ended. When all have
        ended, one more process runs to the end.

        Args:
            writers: The number of processes at the same time.
            events: The number of stops and kills.

        Returns:
            "stopped" -> the number of stops; "done", "killed", "lost" -> the number of processes
            that ended in this way (see `Started.end`).

        Raises:
            RuntimeError: If a process fails.
        """
        ends: Counter[str] = Counter()

        def start(number: int) -> Started:
            return self.start("--output_dir", str(self.folder / f"disk_{number}"))

        running = [start(number) for number in range(writers)]
        for _ in range(events):
            time.sleep(self.chance.uniform(0, 2))
            number = self.chance.randrange(writers)
            process = running[number].process
            if self.chance.random() < 0.6:
                process.send_signal(signal.SIGSTOP)
                time.sleep(self.chance.uniform(0.5, 4))
                process.send_signal(signal.SIGCONT)
                ends["stopped"] += 1
            else:
                process.kill()
                process.wait()
            for number, started in enumerate(running):
                if started.process.poll() is not None:
                    ends[started.end()] += 1
                    running[number] = start(number)
        ends.update(started.end() for started in running)
        assert start(0).end() == "done"
        return ends


class Sample(NamedTuple):
    """A stored sample.

    Attributes:
        tokens: Its token ids, and their positions.
        facts: Its facts in the table of samples.
        values: The key of a hook -> activations (tokens, width).
    """

    tokens: tuple[list[int], list[int]]
    facts: SampleFacts
    values: Mapping[Any, Any]


def samples_in(*urls: object) -> dict[int, Sample]:
    """Reads all samples of these folders.

    Args:
        urls: The folders of the machines and hosts of a run.

    Returns:
        The number of a sample -> the sample.

    Raises:
        RuntimeError: If a sample is stored twice, or if the log of a folder has a problem.
    """
    samples_by_number: dict[int, Sample] = {}
    for folder in map(Folder, map(str, urls)):
        log = RunLog.read(folder)
        for problem in log.problems:
            raise RuntimeError(problem)
        for commit in log.in_order:
            if not commit.count:
                continue
            table = stored_samples(read_table(folder, commit))
            samples = read_samples(folder, log, commit, range(commit.count), commit.file)
            for sample, in_table in zip(samples, table, strict=True):
                number, in_shard = in_table.facts.sample_idx, sample.tokens
                if number in samples_by_number or in_shard.sample_idx != number:
                    raise RuntimeError(f"{folder.url}: sample {number} is stored twice")
                values = dict(zip(commit.names, sample.values, strict=True))
                tokens = np.asarray(in_shard.token_ids).tolist(), in_shard.positions.tolist()
                samples_by_number[number] = Sample(tokens, in_table.facts, values)
    return samples_by_number


def deviation(disturbed: Mapping[int, Sample], whole: Mapping[int, Sample]) -> float:
    """Compares the samples of a disturbed run with those of an undisturbed one.

    Args:
        disturbed: The number of a sample -> the sample of the disturbed run.
        whole: The same of the undisturbed run.

    Returns:
        The largest difference of a value, divided by the root mean square of its hook. 0 means that
        all values are equal.

    Raises:
        RuntimeError: If the numbers, tokens, positions or facts of the samples differ.
    """
    missing, surplus = whole.keys() - disturbed.keys(), disturbed.keys() - whole.keys()
    if missing or surplus:
        raise RuntimeError(f"missing samples: {missing}, unexpected samples: {surplus}")
    for number, expected in whole.items():
        sample = disturbed[number]
        if (sample.tokens, sample.facts) != (expected.tokens, expected.facts):
            raise RuntimeError(f"sample {number}: {sample[:2]}, expected {expected[:2]}")

    def values_at(hook: Any, samples: Mapping[int, Sample]) -> np.ndarray:
        values = [samples[number].values[hook] for number in whole]
        return np.concatenate(values).astype(np.float64)

    largest = 0.0
    for hook in next(iter(whole.values())).values:
        expected_values = values_at(hook, whole)
        difference = abs(values_at(hook, disturbed) - expected_values).max()
        largest = max(largest, float(difference / np.sqrt((expected_values**2).mean())))
    return largest


def texts() -> list[str]:
    """Returns texts of 0 to 60 words."""
    chance = random.Random(0)
    words = (ROOT / "activation_extraction/run/demo_texts.txt").read_text(encoding="utf-8").split()
    starts = [chance.randrange(len(words)) for _ in range(DOCUMENTS)]
    return [" ".join(words[at : at + chance.choice([0, 1, *range(2, 61)])]) for at in starts]


def make_inputs(folder: Path) -> dict[str, list[str]]:
    """Writes two models and their data.

    Returns:
        The name of a kind of input -> the flags of a run over it.
    """
    model = demo.make_demo(folder)[0]
    experts = folder / "experts"
    experts.mkdir()
    config = {**demo.MODEL_CONFIG, **SHAPES["tiny-moe"], "vocab_size": demo.VOCAB_SIZE}
    (experts / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (experts / name).write_bytes((model / name).read_bytes())
    parsed = parse_model_config(config)
    demo.write_weights(experts / "model.safetensors", weight_table(Qwen2(parsed)).values())
    (folder / "template.jinja").write_text(QWEN2_5)

    documents: list[dict[str, Any]] = [{"text": text, "id": n} for n, text in enumerate(texts())]
    conversations = [
        {"messages": [{"role": "system", "content": "Hm."}, {"role": "user", "content": text}]}
        for text in texts()
        if text
    ]
    token_rows: list[dict[str, Any]] = [
        {"ids": [ord(c) % 128 for c in row["text"]][:80], "mask": [n % 3 > 0 for n in range(80)]}
        for row in documents
        if row["text"]
    ]
    for row in token_rows:
        row["mask"] = row["mask"][: len(row["ids"])]

    def write(name: str, content: Sequence[Mapping[str, Any]], bad: int = 0) -> str:
        lines = [json.dumps(row) for row in content]
        for number in range(bad):
            lines.insert(number * 60, "{")
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    plain, half = write("rows.jsonl", documents), len(documents) // 2
    for number in range(3):
        write(f"files/{number}.jsonl", documents[number::3])
    table = pyarrow.Table.from_pylist(documents[half:])
    pyarrow.parquet.write_table(table, folder / "half.parquet", row_group_size=100)
    files, with_model = str(folder / "files"), ["--model_path", str(model)]
    text = [*with_model, "--dataset_path", plain]
    chat = ["--messages_column", "messages", "--chat_template", str(folder / "template.jinja")]
    ids = ["--ids_column", "ids", "--mask_column", "mask"]
    mixture = [write("half.jsonl", documents[:half]) + "=0.7", f"{folder}/half.parquet=0.3"]
    return {
        "text": text,
        "shuffled files": [*with_model, "--dataset_path", files, "--shuffle_documents", "3"],
        "mixture": [*with_model, "--mix", *mixture],
        "pieces": [*text, "--long_documents", "split", "--overlap", "8"],
        "chat": [*with_model, "--dataset_path", write("c.jsonl", conversations), *chat, *ROLES],
        "ids": [*with_model, "--dataset_path", write("ids.jsonl", token_rows), *ids],
        "few tokens": [*text, "--positions", "random:0.1"],
        "bad rows": [
            *with_model,
            "--dataset_path",
            write("b.jsonl", documents, 9),
            "--skip_bad_rows",
        ],
        "budget": [*text, "--max_tokens", "12000"],
        "experts": ["--model_path", str(experts), "--dataset_path", plain],
    }


ROLES = ["--roles", "system", "user"]
USUAL = ["--layers_to_extract", "1", "3", "--max_seq_length", "32", "--shard_size_gb", "0.0015"]
BUCKET = ["--upload_to_gcs", "--gcs_bucket", Bucket.name, "--gcs_prefix", "run"]
URL = f"gs://{Bucket.name}/run/machine_000"


def succeed(*flags: object) -> None:
    """Runs the tool in this process."""
    if status := command.main([str(flag) for flag in flags]):
        raise RuntimeError(f"{flags}: status {status}")


def disturb(
    folder: Path,
    flags: list[str],
    in_bucket: bool,
    seed: int,
    action: Callable[[Extraction, Callable[[], object]], Any],
) -> tuple[Any, dict[int, Sample]]:
    """Disturbs an extraction, verifies it and reads what it has stored.

    Args:
        folder: The folder of the scripts, the logs and the output.
        flags: The flags of the input and the format.
        in_bucket: Whether the run stores in a bucket, where a fifth of the requests fail meanwhile.
        seed: The seed of all random choices.
        action: Disturbs the extraction until it is complete. It takes the extraction and its signs
            of life (see `Extraction.kill`).

    Returns:
        The result of `action`, and the stored samples by their numbers.

    Raises:
        RuntimeError: If a process fails, or if what is stored is incomplete or damaged.
    """
    out = folder / "out"
    with closing(Bucket()) as bucket:
        os.environ.update(bucket.environment)
        url = URL if in_bucket else str(out)
        command = [*flags, *USUAL, "--output_dir", str(out), *(BUCKET if in_bucket else [])]
        bucket.rate = 0.2
        extraction = Extraction(folder, command, {}, True, random.Random(seed))

        def signs_of_life() -> int:
            return len(bucket.objects()) if in_bucket else len([*out.glob("*.json")])

        outcome = action(extraction, signs_of_life)
        bucket.rate = 0
        succeed("--verify", "--output_dir", url)
        return outcome, samples_in(url)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="(default: 200)")
    parser.add_argument(
        "--rounds", type=int, default=30, help="with several writers each (default: 30)"
    )
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    options = parser.parse_args(argv)
    began, killed, number = time.perf_counter(), 0, 0
    ended: Counter[str] = Counter()
    deviations: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = make_inputs(folder / "inputs")
        whole: dict[str, dict[int, Sample]] = {}

        def compare(kind: str, disturbed: Mapping[int, Sample]) -> None:
            if kind not in whole:
                out = folder / "whole" / kind
                succeed(*inputs[kind], *USUAL, "--batch_size", 8, "--output_dir", out)
                whole[kind] = samples_in(out)
            largest = deviation(disturbed, whole[kind])
            deviations[kind] = max(largest, deviations.get(kind, 0.0))
            if largest > TOLERANCE:
                raise RuntimeError(f"{kind}: values differ by {largest:.1e} of the RMS")
            print(f"{kind}: {len(disturbed)} samples, within {largest:.1e} of the RMS", flush=True)

        combinations = list(product((False, True), ("pickle", "safetensors"), inputs))
        kinds = cycle(random.Random(options.seed).sample(combinations, len(combinations)))
        each_time = max(1, options.kills // len(combinations))
        while killed < options.kills:
            in_bucket, form, kind = next(kinds)
            count = min(options.kills - killed, each_time)
            kills, samples = disturb(
                folder / f"kills_{number}",
                [*inputs[kind], "--shard_format", form],
                in_bucket,
                options.seed + number,
                lambda extraction, signs, count=count: extraction.kill(signs, count),  # type: ignore[misc]
            )
            killed += kills
            number += 1
            compare(kind, samples)
        for number in range(options.rounds):
            kind = list(inputs)[number % len(inputs)]
            writers = 2 + number % 2
            ends, samples = disturb(
                folder / f"writers_{number}",
                inputs[kind],
                True,
                options.seed + number,
                lambda extraction, _, writers=writers: extraction.compete(writers, 8),  # type: ignore[misc]
            )
            ended.update(ends)
            compare(kind, samples)
    summary = {"kills": killed, "rounds": options.rounds, "writers": ended}
    summary |= {"largest_deviation_of_rms": deviations}
    print_result({**summary, "seconds": round(time.perf_counter() - began, 1)})


if __name__ == "__main__":
    main()
