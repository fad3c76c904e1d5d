"""Kills extractions at random moments and starts them again with the same command, until they end:
`python -m benchmarks.kill_and_resume --kills 200`. What they stored must be, byte for
byte, what an undisturbed run stores. The last line printed is one JSON object.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from activation_extraction.store.formats import format_of

ROOT = Path(__file__).parents[1]
# The tool itself, with a pause after every batch: time for somebody to kill it.
SLOWLY = """
import sys, time
import extract_activations as script
from activation_extraction.store.storage import ActivationStorage
add = ActivationStorage.add_batch
def slowly(*arguments):
    time.sleep(0.15)
    return add(*arguments)
ActivationStorage.add_batch = slowly
status = script.main(sys.argv[1:])
sys.stdout.flush()
script.os._exit(status)
"""
LONGEST = 0.8  # seconds between the sign of life and the kill


class Process(Protocol):
    """The part of subprocess.Popen that is used here."""

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def send_signal(self, number: int, /) -> None: ...


def new_process(command: Sequence[str], environment: Mapping[str, str], log: int) -> Process:
    """Starts a Python script. command: its path and arguments; log: a file's descriptor."""
    return subprocess.Popen([sys.executable, *command], env=environment, stdout=log, stderr=log)


def kill_and_resume(
    flags: Sequence[str],
    environment: Mapping[str, str],
    signs_of_life: Callable[[], object],
    kills: int,
    seed: int = 0,
    start: Callable[[Sequence[str], Mapping[str, str], int], Process] = new_process,
) -> int:
    """Starts, kills and starts again; then lets it end. Returns how many runs were killed.

    signs_of_life: something that changes when a run has begun to store; the first two kills and
    every fourth do not wait for it. Ends early, with fewer kills, when a run is quicker than its
    killer.
    """
    chance = random.Random(seed)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), **environment}
    with tempfile.TemporaryDirectory() as folder:
        script, printed = Path(folder) / "slowly.py", Path(folder) / "printed"
        script.write_text(SLOWLY)

        def begin() -> Process:
            with open(printed, "w") as log:
                return start([str(script), *flags], environment, log.fileno())

        for number in range(kills):
            before = signs_of_life()
            process = begin()
            if number > 1 and number % 4:
                while process.poll() is None and signs_of_life() == before:
                    time.sleep(0.01)
            time.sleep(chance.uniform(0, LONGEST))
            process.send_signal(signal.SIGKILL)
            status = process.wait()
            if status == 0:
                return number
            if status != -signal.SIGKILL:
                raise RuntimeError(f"run {number} ended with {status}: {printed.read_text()}")
        if status := begin().wait():
            raise RuntimeError(f"the last run ended with {status}: {printed.read_text()}")
    return kills


def shards_in(folder: Path) -> dict[str, bytes]:
    """Name -> content of the shards in a folder."""
    paths = sorted(path for path in folder.glob("shard_*") if format_of(path.name))
    return {path.name: path.read_bytes() for path in paths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200, help="(default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    import extract_activations

    began, killed, rounds = time.perf_counter(), 0, 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags = ["--demo", "--layers_to_extract", "3", "--max_seq_length", "64"]
        flags += ["--shard_size_gb", "0.0005", "--batch_size", "4"]
        assert extract_activations.main([*flags, "--output_dir", str(folder / "whole")]) == 0
        whole = shards_in(folder / "whole")
        while killed < arguments.kills:
            out = folder / f"out_{rounds}"
            killed += kill_and_resume(
                [*flags, "--output_dir", str(out)],
                {},
                lambda out=out: len(list(out.glob("*.json"))),  # type: ignore[misc]
                min(arguments.kills - killed, 20),
                arguments.seed + rounds,
            )
            rounds += 1
            if shards_in(out) != whole:
                raise SystemExit(f"round {rounds}: not the bytes of an undisturbed run")
            if extract_activations.main(["--verify", "--output_dir", str(out)]):
                raise SystemExit(f"round {rounds}: verification failed")
            print(f"{killed} kills, {rounds} extractions, all bytes equal", file=sys.stderr)
    seconds = round(time.perf_counter() - began, 1)
    print(json.dumps({"kills": killed, "extractions": rounds, "equal": True, "seconds": seconds}))


if __name__ == "__main__":
    main()
