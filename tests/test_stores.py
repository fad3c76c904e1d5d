"""The whole story of a run, by real processes, on every store that the README names.

It is killed and continued with other batch sizes, written by several processes at once, damaged,
verified, repaired and read. What is stored in the end is what an undisturbed local run stores.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cloud import REPOSITORY
from command_line import SCRIPT, main
from forks import Forked
from stores import STORES, Store

from activation_extraction import ActivationDataset
from activation_extraction.store.folder import ANY, Folder
from activation_extraction.store.run_log import RunLog
from benchmarks.kill_and_resume import Sample, StartedProcess, deviation, samples_in

pytestmark = [pytest.mark.rare, pytest.mark.long]
HOOK = "blocks.3.hook_resid_post"
HELD = """
import os, pathlib, sys, time
from activation_extraction.__main__ import main
from activation_extraction.store.storage import ActivationStorage

released, add_batch = pathlib.Path(os.environ["RELEASED"]), ActivationStorage.add_batch
batches = 0

def add_and_wait(*arguments):
    global batches
    add_batch(*arguments)
    batches += 1
    while batches >= int(os.environ["BATCHES"]) and not released.exists():
        time.sleep(0.02)

ActivationStorage.add_batch = add_and_wait
sys.exit(main(sys.argv[1:]))
"""


class Run:
    """One run in a store, whose command is started again and again.

    Attributes:
        root: The URL of the run.
        url: The folder of its only machine.
        released: The file that lets processes go on that are held.
    """

    def __init__(self, store: Store, name: str, folder: Path, flags: list[str]) -> None:
        self._folder = folder
        self._flags = [*flags, "--upload_to_gcs", "--gcs_bucket", store.bucket]
        self._flags += ["--gcs_prefix", f"runs/{name}"]
        self._started: list[StartedProcess] = []
        self.root = f"{store.bucket}/runs/{name}"
        self.url = f"{self.root}/machine_000"
        self.released = folder / "released"

    def start(self, *flags: object, batches: int = 0) -> StartedProcess:
        """Starts the run's command, on a disk of its own.

        Args:
            flags: Flags beside those of the run.
            batches: The number of batches after which the process waits to be released; 0 to
                start the tool as it is.
        """
        script = SCRIPT
        if batches:
            script = self._folder / "held.py"
            script.write_text(HELD)
        output = self._folder / f"disk_{len(self._started)}"
        command = [str(script), *self._flags, "--output_dir", str(output), *map(str, flags)]
        return self._process(command, {"BATCHES": str(batches), "RELEASED": str(self.released)})

    def look(self, *flags: object) -> tuple[int, str]:
        """Returns the exit status of the tool on this run, and what it prints."""
        command = [str(SCRIPT), "--output_dir", self.url, *map(str, flags)]
        process, log = self._process(command, {})
        return process.wait(), log.read_text()

    def kill(self) -> None:
        """Kills the processes that still run, stopped and held ones, too."""
        for process, _ in self._started:
            process.kill()

    def _process(self, command: list[str], variables: Mapping[str, str]) -> StartedProcess:
        log = self._folder / f"{len(self._started)}.log"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(REPOSITORY)}
        started = StartedProcess(Forked(command, environment | dict(variables), log), log)
        self._started.append(started)
        return started

    def wait_for_commits(self, count: int, started: StartedProcess) -> int:
        """Waits until so many shards are committed, and returns how many there are."""
        while (found := self.commits()) < count:
            assert started.process.poll() is None, started.log_path.read_text()
            time.sleep(0.05)
        return found

    def commits(self) -> int:
        return len(RunLog.read(Folder(self.url)).commits_in_order)


@pytest.fixture(scope="module", params=STORES)
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    with STORES[request.param]() as store, pytest.MonkeyPatch.context() as variables:
        for name, value in store.environment.items():
            variables.setenv(name, value)
        yield store
        store.was_used()


@pytest.fixture
def new_run(store: Store, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Makes runs in the store, from the name and the flags of each."""
    runs = []

    def new_run(name: str, flags: list[str]) -> Run:
        runs.append(Run(store, name, tmp_path, flags))
        return runs[-1]

    yield new_run
    for run in runs:
        run.kill()


@pytest.fixture(scope="module")
def undisturbed(many_shards: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert main(*many_shards, "--batch_size", 4, "--output_dir", folder) == 0
    return folder


def assert_whole(run: Run, undisturbed: Path) -> None:
    """Every sample is stored once with the bits of an undisturbed run, no data file is left without
    a commit, --verify and --status find nothing wrong, and the reader reads it all."""
    commits = RunLog.read(Folder(run.url)).commits_in_order
    committed = {name for commit in commits for name in commit.files}
    data_files = {name for name in Folder(run.url).files() if name.startswith("shard_")}
    assert {name for name in data_files if not name.endswith(".json")} == committed
    stored: dict[int, Sample] = samples_in(run.url)
    assert deviation(stored, samples_in(undisturbed)) == 0
    status, printed = run.look("--verify")
    assert status == 0 and "120 samples" in printed, printed
    status, printed = run.look("--status")
    assert status == 0, printed
    dataset, due = ActivationDataset(run.root), ActivationDataset(str(undisturbed))
    assert dataset.complete
    samples = {sample.sample_idx: sample for sample in map(due.__getitem__, range(len(due)))}
    for number in range(len(dataset)):
        sample = dataset[number]
        np.testing.assert_array_equal(sample[HOOK], samples[sample.sample_idx][HOOK])
    for shuffle in (None, 7):
        for found, right in zip(tokens(dataset, shuffle), tokens(due, None), strict=True):
            np.testing.assert_array_equal(found, right)


def tokens(dataset: ActivationDataset, shuffle: int | None) -> tuple[Any, ...]:
    """Returns sample, position and id of every token and its activation, in one order."""
    batches = list(dataset.batches(100, [HOOK], shuffle=shuffle))
    parts = [(b.sample_idx, b.position, b.token_ids, b[HOOK]) for b in batches]
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.lexsort((columns[1], columns[0]))
    return tuple(column[order] for column in columns)


@pytest.mark.parametrize("shard_format", ["pickle", "safetensors"])
def test_a_run_that_is_killed_goes_on_with_other_batch_sizes(
    new_run, many_shards, undisturbed, shard_format
):
    run = new_run(f"killed_{shard_format}", [*many_shards, "--shard_format", shard_format])
    commits = 0
    for batch_size, batches in ((4, 9), (7, 4)):
        started = run.start("--batch_size", batch_size, batches=batches)
        commits = run.wait_for_commits(commits + 2, started)
        started.process.kill()
        assert started.end() == "killed"
    stored = samples_in(run.url)
    assert 0 < len(stored) < 120 and not RunLog.read(Folder(run.url)).problems
    assert run.start("--batch_size", 5).end() == "done"
    assert run.commits() > commits
    assert_whole(run, undisturbed)
    model = many_shards[:2]
    status, printed = run.look("--verify", *model)
    assert status == 0 and "8 samples recomputed" in printed, printed


def test_of_two_writers_the_later_one_goes_on(new_run, many_shards, undisturbed):
    """The earlier one is stopped for as long as the later one runs."""
    run = new_run("two_writers", [*many_shards, "--shard_format", "safetensors"])
    earlier = run.start("--batch_size", 4, batches=9)
    run.wait_for_commits(1, earlier)
    earlier.process.send_signal(signal.SIGSTOP)
    run.released.touch()
    assert run.start("--batch_size", 6).end() == "done"
    earlier.process.send_signal(signal.SIGCONT)
    assert earlier.end() == "lost"
    assert_whole(run, undisturbed)


def test_writers_that_start_together(new_run, many_shards, undisturbed):
    run = new_run("together", many_shards)
    writers = [run.start("--batch_size", size) for size in (3, 4, 5)]
    ends = [writer.end() for writer in writers]
    assert set(ends) <= {"done", "lost"} and "done" in ends
    assert_whole(run, undisturbed)


def test_damage_is_found_and_repaired(new_run, many_shards, undisturbed):
    run = new_run("damaged", [*many_shards, "--shard_format", "safetensors"])
    assert run.start("--batch_size", 4).end() == "done"
    folder, before = Folder(run.url), ActivationDataset(run.root)
    name = "shard_0002.safetensors"
    data = bytearray(folder.read(name) or b"")
    data[len(data) // 2] ^= 1
    folder.write(name, bytes(data), ANY)
    folder.remove("shard_0003.samples.parquet")
    folder.remove("shard_0005.json")
    with pytest.raises(OSError, match=name):
        tokens(before, None)
    status, printed = run.look("--verify")
    assert status == 1
    for number in (2, 3, 5):
        assert f"shard_{number:04d}" in printed, printed
    repair = run.start("--repair", "--batch_size", 6)
    assert repair.process.wait() == 0, repair.log_path.read_text()
    assert ": 2-3, 5" in repair.log_path.read_text()
    assert_whole(run, undisturbed)


def test_a_reader_notices_that_the_run_is_overwritten(new_run, many_shards):
    """Reading is never conditional on a gateway, where the answer's version tells."""
    run = new_run("overwritten", [*many_shards, "--shard_format", "safetensors"])
    assert run.start().end() == "done"
    before = ActivationDataset(run.root)
    assert run.start("--overwrite", "--activation_dtype", "bfloat16").end() == "done"
    with pytest.raises(OSError, match="shard_0001.safetensors: the run was overwritten"):
        tokens(before, None)
    assert tokens(ActivationDataset(run.root), None)[0].size == before.tokens
