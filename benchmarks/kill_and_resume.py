"""Kills extractions at random moments and starts them again with the same command, until they end.

`python -m benchmarks.kill_and_resume --kills 200 --rounds 30` does two things. It kills runs over
ten kinds of input, in both formats, in a folder and in a bucket where a fifth of the requests fail;
the batch size, the mesh and the number of devices change with every start. And in each of the
rounds, two or three processes write to one bucket at the same time, and are stopped for seconds
(SIGSTOP) or killed. In the end, every sample must be there once, with the values of an undisturbed
run within 1e-5 of their root mean square, and --verify must find nothing wrong. The last line
printed is one JSON object.
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
sys.path[:0] = [str(ROOT / "tests")]  # for the bucket that fails, and processes that start quickly

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

# The tool itself, with a pause after every batch: time for somebody to kill it.
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
LONGEST = 0.8  # seconds between the sign of life and the kill
TOLERANCE = 1e-5  # of the root mean square
LOST = "has taken over"  # what a process says that has lost the folder
MESHES: tuple[tuple[int, list[str]], ...] = (
    (1, []),
    (2, ["--mesh_type", "1d"]),
    (2, ["--mesh_type", "2d"]),
    (4, ["--mesh_shape", "2,2", "--mesh_axes", "data,fsdp"]),
    (4, ["--no_data_parallel"]),
)
DOCUMENTS = 900


class Started(NamedTuple):
    """A process, and the file that has what it prints."""

    process: Forked
    log: Path

    def end(self) -> str:
        """Waits until the process has ended, and returns how. Raises RuntimeError for an end that
        nobody has caused."""
        status, printed = self.process.wait(), self.log.read_text(errors="replace")
        if status == 2 and LOST in printed.splitlines()[-1]:
            return "lost"
        if status not in (0, -signal.SIGKILL):
            raise RuntimeError(f"a process has ended with status {status}: {printed}")
        return "done" if status == 0 else "killed"


@dataclass
class Extraction:
    """An extraction that is started again and again. varied: whether the batch size, the mesh and
    the number of devices are others every time."""

    folder: Path
    flags: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    varied: bool = False
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    starts: int = 0

    def start(self, *more: str) -> Started:
        """Starts the command, slowed down."""
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
        """Starts, kills and starts again; then lets the command end. Returns how many processes
        were killed.

        signs_of_life: something that changes when a run has begun to store; the first two kills and
        every fourth do not wait for it. Ends early when a run is quicker than its killer.
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
        """Has several processes write to one bucket, stops or kills one of them at each of so many
        events, and starts another one for each that has ended; then lets one end. Returns how many
        were stopped, and how the processes ended."""
        found: Counter[str] = Counter()

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
                found["stopped"] += 1
            else:
                process.kill()
                process.wait()
            for number, each in enumerate(running):
                if each.process.poll() is not None:
                    found[each.end()] += 1
                    running[number] = start(number)
        found.update(each.end() for each in running)
        assert start(0).end() == "done"
        return found


class Sample(NamedTuple):
    """A stored sample: its tokens and their positions, its facts, its activations."""

    tokens: tuple[list[int], list[int]]
    facts: SampleFacts
    values: Mapping[Any, Any]


def samples_in(*urls: object) -> dict[int, Sample]:
    """Returns every sample in these folders by its number. Raises RuntimeError if one is stored
    twice, or if anything is missing or damaged."""
    found: dict[int, Sample] = {}
    for folder in map(Folder, map(str, urls)):
        stored = RunLog.read(folder)
        for problem in stored.problems:
            raise RuntimeError(problem)
        for commit in (each for each in stored.in_order if each.count):
            table = stored_samples(read_table(folder, commit))
            samples = read_samples(folder, stored, commit, range(commit.count), commit.file)
            for sample, in_table in zip(samples, table, strict=True):
                number, in_shard = in_table.facts.sample_idx, sample.tokens
                if number in found or in_shard.sample_idx != number:
                    raise RuntimeError(f"{folder.url}: sample {number} is there twice")
                values = dict(zip(commit.names, sample.values, strict=True))
                tokens = np.asarray(in_shard.token_ids).tolist(), in_shard.positions.tolist()
                found[number] = Sample(tokens, in_table.facts, values)
    return found


def deviation(found: Mapping[int, Sample], whole: Mapping[int, Sample]) -> float:
    """Returns by how much values differ from those of an undisturbed run at most, as a share of the
    root mean square of their hook; 0 means the same bits. Raises RuntimeError if the samples
    differ."""
    if found.keys() != whole.keys():
        raise RuntimeError(
            f"missing: {whole.keys() - found.keys()}, more: {found.keys() - whole.keys()}"
        )
    for number, sample in whole.items():
        if (found[number].tokens, found[number].facts) != (sample.tokens, sample.facts):
            raise RuntimeError(f"sample {number}: {found[number][:2]}, expected {sample[:2]}")
    largest = 0.0
    for key in next(iter(whole.values())).values:
        ours, theirs = (
            np.concatenate([each[number].values[key] for number in whole]).astype(np.float64)
            for each in (found, whole)
        )
        largest = max(largest, float(abs(ours - theirs).max() / np.sqrt((theirs**2).mean())))
    return largest


def texts() -> list[str]:
    """Returns texts of 1 to 60 words; some are empty."""
    chance = random.Random(0)
    words = (ROOT / "activation_extraction/run/demo_texts.txt").read_text(encoding="utf-8").split()
    starts = [chance.randrange(len(words)) for _ in range(DOCUMENTS)]
    return [" ".join(words[at : at + chance.choice([0, 1, *range(2, 61)])]) for at in starts]


def make_inputs(folder: Path) -> dict[str, list[str]]:
    """Writes models and data, and returns flags by the kind of input."""
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

    rows: list[dict[str, Any]] = [{"text": text, "id": n} for n, text in enumerate(texts())]
    talks = [
        {"messages": [{"role": "system", "content": "Hm."}, {"role": "user", "content": text}]}
        for text in texts()
        if text
    ]
    tokens: list[dict[str, Any]] = [
        {"ids": [ord(c) % 128 for c in row["text"]][:80], "mask": [n % 3 > 0 for n in range(80)]}
        for row in rows
        if row["text"]
    ]
    for row in tokens:
        row["mask"] = row["mask"][: len(row["ids"])]

    def write(name: str, content: Sequence[Mapping[str, Any]], bad: int = 0) -> str:
        lines = [json.dumps(row) for row in content]
        for number in range(bad):
            lines.insert(number * 60, "{")
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n")
        return str(path)

    plain, half = write("rows.jsonl", rows), len(rows) // 2
    for number in range(3):
        write(f"files/{number}.jsonl", rows[number::3])
    table = pyarrow.Table.from_pylist(rows[half:])
    pyarrow.parquet.write_table(table, folder / "half.parquet", row_group_size=100)
    files, with_model = str(folder / "files"), ["--model_path", str(model)]
    text = [*with_model, "--dataset_path", plain]
    chat = ["--messages_column", "messages", "--chat_template", str(folder / "template.jinja")]
    ids = ["--ids_column", "ids", "--mask_column", "mask"]
    mixture = [write("half.jsonl", rows[:half]) + "=0.7", f"{folder}/half.parquet=0.3"]
    return {
        "text": text,
        "shuffled files": [*with_model, "--dataset_path", files, "--shuffle_documents", "3"],
        "mixture": [*with_model, "--mix", *mixture],
        "pieces": [*text, "--long_documents", "split", "--overlap", "8"],
        "chat": [*with_model, "--dataset_path", write("c.jsonl", talks), *chat, *ROLES],
        "ids": [*with_model, "--dataset_path", write("ids.jsonl", tokens), *ids],
        "few tokens": [*text, "--positions", "random:0.1"],
        "bad rows": [*with_model, "--dataset_path", write("b.jsonl", rows, 9), "--skip_bad_rows"],
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
    """Disturbs an extraction by `action`, and returns what that returns and what is stored then."""
    out = folder / "out"
    with closing(Bucket()) as bucket:
        os.environ.update(bucket.environment)
        url = URL if in_bucket else str(out)
        command = [*flags, *USUAL, "--output_dir", str(out), *(BUCKET if in_bucket else [])]
        bucket.rate = 0.2
        extraction = Extraction(folder, command, {}, True, random.Random(seed))
        found = action(
            extraction, lambda: len(bucket.objects()) if in_bucket else len([*out.glob("*.json")])
        )
        bucket.rate = 0
        succeed("--verify", "--output_dir", url)
        return found, samples_in(url)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="(default: 200)")
    parser.add_argument("--rounds", type=int, default=30, help="of several writers (default: 30)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    given = parser.parse_args(argv)
    began, killed, number = time.perf_counter(), 0, 0
    ended: Counter[str] = Counter()
    deviations: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inputs = make_inputs(folder / "inputs")
        whole: dict[str, dict[int, Sample]] = {}

        def compare(kind: str, found: Mapping[int, Sample]) -> None:
            if kind not in whole:
                out = folder / "whole" / kind
                succeed(*inputs[kind], *USUAL, "--batch_size", 8, "--output_dir", out)
                whole[kind] = samples_in(out)
            largest = deviation(found, whole[kind])
            deviations[kind] = max(largest, deviations.get(kind, 0.0))
            if largest > TOLERANCE:
                raise RuntimeError(f"{kind}: values differ by {largest:.1e} of the RMS")
            print(f"{kind}: {len(found)} samples, within {largest:.1e} of the RMS", flush=True)

        every = list(product((False, True), ("pickle", "safetensors"), inputs))
        kinds = cycle(random.Random(given.seed).sample(every, len(every)))
        each_time = max(1, given.kills // len(every))
        while killed < given.kills:
            in_bucket, form, kind = next(kinds)
            count = min(given.kills - killed, each_time)
            kills, found = disturb(
                folder / f"kills_{number}",
                [*inputs[kind], "--shard_format", form],
                in_bucket,
                given.seed + number,
                lambda each, signs, count=count: each.kill(signs, count),  # type: ignore[misc]
            )
            killed, number = killed + kills, number + 1
            compare(kind, found)
        for number in range(given.rounds):
            kind = list(inputs)[number % len(inputs)]
            ends, found = disturb(
                folder / f"writers_{number}",
                inputs[kind],
                True,
                given.seed + number,
                lambda each, _, writers=2 + number % 2: each.compete(writers, 8),  # type: ignore[misc]
            )
            ended.update(ends)
            compare(kind, found)
    result = {"kills": killed, "rounds": given.rounds, "writers": ended}
    result |= {"largest_deviation_of_rms": deviations}
    print_result({**result, "seconds": round(time.perf_counter() - began, 1)})


if __name__ == "__main__":
    main()
