"""A program's own loop over ActivationStorage: started again it continues; --verify checks it."""

import os
import subprocess
import sys

import numpy as np
import pytest
from command_line import main
from extractions import shard_file
from storages import open_storage

from activation_extraction import ActivationDataset
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.errors import RunError
from activation_extraction.inspect.verify import verify
from activation_extraction.store.folder import Folder

HOOKS = {"third": "my.layers.3.output", "last": "my.layers.9.output"}
COUNT = 10


def values_of(number, key):
    return np.random.default_rng([abs(number), len(key)]).standard_normal((4, 6)).astype(np.float32)


def add(storage, number):
    for key in HOOKS:
        ids = np.arange(4, dtype=np.int32)
        storage.add_activation(key, values_of(number, key), number, "", ids, f"doc {number}")


def loop(folder, numbers=range(COUNT), stop=None, after=lambda storage: None, **options):
    """Adds samples, three to a shard. stop: raises ZeroDivisionError before this sample. after: is
    called then."""
    with open_storage(folder, HOOKS, **({"shard_size_gb": 6e-7} | options)) as storage:
        for number in numbers(storage) if callable(numbers) else numbers:
            if number == stop:
                after(storage)
                raise ZeroDivisionError
            add(storage, number)
    return storage


def the_rest(storage):
    return range(storage.totals.samples, COUNT)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def check_whole(folder, numbers=range(COUNT)):
    dataset = ActivationDataset(folder)
    assert dataset.complete and [sample.sample_idx for sample in dataset] == [*numbers]
    for sample in dataset:
        assert sample.doc_id == f"doc {sample.sample_idx}"
        for key, hook in HOOKS.items():
            np.testing.assert_array_equal(sample[hook], values_of(sample.sample_idx, key))


@pytest.mark.parametrize("again", [range(COUNT), the_rest], ids=["all", "the rest"])
@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
def test_the_same_loop_started_again_continues(tmp_path, check, again, shard_format):
    """After an exception before any sample, and once more one sample later."""
    for stop in (0, 1, 5, 9):
        folder = tmp_path / str(stop)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                loop(folder, again, stop, shard_format=shard_format)
        loop(folder, again, shard_format=shard_format)
        check_whole(folder)
        assert check(folder) == []


@pytest.mark.parametrize("again", [range(COUNT), the_rest], ids=["all", "the rest"])
def test_a_complete_loop_has_nothing_left_to_do(tmp_path, again):
    loop(tmp_path)
    before = contents(tmp_path)
    assert loop(tmp_path, again).totals.samples == COUNT
    assert contents(tmp_path) == before
    told = "sample 10: .* holds a complete extraction of 10 samples; give another folder"
    with pytest.raises(ValueError, match=told):
        loop(tmp_path, range(COUNT + 1))
    assert contents(tmp_path) == before


KILL = """
import os, signal, sys
import test_own_loop
def kill(storage):
    storage._writer.wait()
    os.kill(os.getpid(), signal.SIGKILL)
test_own_loop.loop(sys.argv[1], stop=int(sys.argv[2]), after=kill)
"""


@pytest.mark.parametrize("again", [range(COUNT), the_rest], ids=["all", "the rest"])
def test_a_killed_loop_continues(tmp_path, check, again):
    """Its process cannot tell anybody."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for stop in (5, 8):
        command = [sys.executable, "-c", KILL, str(tmp_path), str(stop)]
        assert subprocess.run(command, env=environment).returncode == -9
        stored = open_storage(tmp_path, HOOKS).totals.samples
        assert stored == stop - stop % 3 - (0 if stop % 3 else 3)
    loop(tmp_path, again)
    check_whole(tmp_path)
    assert check(tmp_path) == []


def test_numbers_may_have_gaps(tmp_path, check):
    """Where a number was left out, nothing is skipped in silence, and it may come later."""
    numbers = [2, 3, 5, 8, 9, 10, 14, 20]
    for stop in (10, 20, 20):
        with pytest.raises(ZeroDivisionError):
            loop(tmp_path, numbers, stop)
    with pytest.raises(ValueError, match="sample 6, .*: given twice or out of order"):
        loop(tmp_path, [2, 7, 6])
    loop(tmp_path, [*numbers, 21])
    with pytest.raises(ValueError, match="sample 22: .* holds a complete extraction"):
        loop(tmp_path, [22])
    assert sorted(s.sample_idx for s in ActivationDataset(tmp_path)) == sorted([*numbers, 7, 21])
    assert check(tmp_path) == []


def test_a_sample_given_again_is_known_by_its_number_alone(tmp_path):
    loop(tmp_path)
    with open_storage(tmp_path, HOOKS) as storage:
        storage.add_activation("third", np.ones((1, 1)), 3, "another text")
        with pytest.raises(KeyError, match="hook 'first' is not one of"):
            storage.add_activation("first", np.ones((1, 1)), 3, "")
    check_whole(tmp_path)


def test_a_table_that_is_damaged_ends_the_start_by_name(tmp_path):
    with pytest.raises(ZeroDivisionError):
        loop(tmp_path, [0, 1, 5, 6, 7], 7)
    path = tmp_path / "shard_0001.samples.parquet"
    path.write_bytes(path.read_bytes()[::-1])
    with pytest.raises(RunError, match="shard_0001.samples.parquet: is damaged"):
        loop(tmp_path, [0, 1, 5, 6, 7])


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
def test_verify_compares_what_is_recorded(tmp_path, capsys, shard_format):
    """Checksums, numbers of samples, statistics; there is no model, so nothing is recomputed."""
    loop(tmp_path, shard_format=shard_format)
    assert main("--verify", "--output_dir", tmp_path) == 0
    told = "in order: 1 folder, 4 shards, 10 samples, 0.000 GB; nothing recomputed (no model is "
    assert told in capsys.readouterr().out
    assert main("--verify", "--output_dir", tmp_path, "--model_path", "Qwen/Qwen2.5-0.5B") == 2
    told = f"error: --model_path: {tmp_path} records no model, because another program stored its"
    assert told in capsys.readouterr().err
    path = shard_file(tmp_path, 2)
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(data)
    assert main("--verify", "--output_dir", tmp_path) == 1
    assert f"{path.name}: " in capsys.readouterr().out


def test_verify_of_samples_without_token_ids_or_without_tokens(tmp_path, check):
    with open_storage(tmp_path, {0: "h"}) as storage:
        for number, tokens in enumerate((3, 0, 2)):
            storage.add_activation(0, np.ones((tokens, 2), np.float32), number, "")
    assert check(tmp_path) == []
    assert verify(Folder(str(tmp_path)), None, 8) == 0
