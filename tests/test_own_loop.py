"""A program's own loop over ActivationStorage: started again it continues; --verify checks what it
stores, and --export takes the name of no hook for a path."""

import json
from contextlib import nullcontext

import numpy as np
import pytest
from command_line import main
from extractions import flip
from storages import open_storage

from activation_extraction import ActivationDataset
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.errors import InputError

HOOKS = {"third": "my.layers.3.output", "last": "my.layers.9.output"}
COUNT = 10


def values_of(number, key):
    return np.random.default_rng([abs(number), len(key)]).standard_normal((4, 6), np.float32)


def loop(folder, numbers, stop=None, **options):
    """Adds samples, three to a shard. stop: raises ZeroDivisionError before this sample."""
    with open_storage(folder, HOOKS, **({"shard_size_gb": 6e-7} | options)) as storage:
        for number in numbers(storage) if callable(numbers) else numbers:
            if number == stop:
                raise ZeroDivisionError
            for key in HOOKS:
                given = values_of(number, key), number, "", [0, 1, 2, 3], f"doc {number}"
                storage.add_activation(key, *given)
    return storage


def the_rest(storage):
    return range(storage.totals.samples, COUNT)


@pytest.mark.parametrize(
    "again,shard_format", [*((range(COUNT), form) for form in SHARD_FORMATS), (the_rest, "pickle")]
)
def test_the_same_loop_started_again_continues(tmp_path, check, again, shard_format):
    """It does so after exceptions before any sample; a complete loop has nothing to do."""
    for stop in (0, 5, 9):
        folder = tmp_path / str(stop)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                loop(folder, again, stop, shard_format=shard_format)
        loop(folder, again, shard_format=shard_format)
        dataset = ActivationDataset(folder)
        assert dataset.complete and [sample.sample_idx for sample in dataset] == [*range(COUNT)]
        for number, sample in enumerate(dataset):
            assert sample.doc_id == f"doc {number}"
            for key, hook in HOOKS.items():
                np.testing.assert_array_equal(sample[hook], values_of(number, key))
        assert check(folder) == []
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert loop(folder, again, shard_format=shard_format).totals.samples == COUNT
    told = "sample 10: .* holds a complete run of 10 samples; give another folder"
    with pytest.raises(ValueError, match=told):
        loop(folder, range(COUNT + 1), shard_format=shard_format)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def lose(folder, *numbers):
    """Damages the tables of these shards, but of the last one deletes the JSON."""
    *others, last = numbers
    for number in others:
        flip(folder / f"shard_{number:04d}.samples.parquet", 50)
    (folder / f"shard_{last:04d}.json").unlink()


@pytest.mark.parametrize("stop,lost", [(None, (2,)), (None, (1, 3)), (None, (2, 4)), (9, (1, 2))])
def test_a_loop_repairs_what_it_has_stored(stop, lost, tmp_path, check):
    """Bad shards are withdrawn, in the middle and at the end, and the same loop gives their samples
    again. It may be stopped again."""
    with pytest.raises(ZeroDivisionError) if stop else nullcontext():
        loop(tmp_path, range(COUNT), stop)
    lose(tmp_path, *lost)
    told = r"ActivationStorage\(..., repair=True\) repairs it"
    for _ in range(2):
        with pytest.raises(InputError, match=told):
            loop(tmp_path, range(COUNT))
        with pytest.raises(ZeroDivisionError):
            loop(tmp_path, range(COUNT), 1, repair=True)
    loop(tmp_path, range(COUNT), repair=True)
    dataset = ActivationDataset(tmp_path)
    assert dataset.complete and len(dataset) == COUNT and check(tmp_path) == []
    for sample in dataset:
        for key, hook in HOOKS.items():
            np.testing.assert_array_equal(sample[hook], values_of(sample.sample_idx, key))


def test_a_loop_that_does_not_give_lost_samples_again_is_told(tmp_path):
    """The repair is then not finished, and only another one goes on."""
    loop(tmp_path, range(COUNT))
    lose(tmp_path, 2)
    with pytest.raises(ValueError, match="sample 7, .*: expected sample 0 next"):
        loop(tmp_path, the_rest, repair=True)
    with pytest.raises(ValueError, match="5 samples not given again; a repair needs all samples"):
        loop(tmp_path, range(5), repair=True)
    with pytest.raises(InputError, match="repair=True"):
        loop(tmp_path, range(COUNT))
    loop(tmp_path, range(COUNT), repair=True)
    dataset = ActivationDataset(tmp_path)
    assert dataset.complete and sorted(s.sample_idx for s in dataset) == [*range(COUNT)]


def test_a_repair_does_not_overwrite(tmp_path):
    with pytest.raises(InputError, match="overwrite and repair exclude each other"):
        loop(tmp_path, range(COUNT), repair=True, overwrite=True)


@pytest.mark.parametrize("numbers,expected", [([1], 0), ([0, 1, 3], 2)])
def test_numbers_have_no_gaps(numbers, expected, tmp_path):
    """Neither in a new run nor in one that continues."""
    with pytest.raises(ValueError, match=f"sample {numbers[-1]}, .*: expected sample {expected} n"):
        loop(tmp_path, numbers)
    with pytest.raises(ValueError, match=f"sample {expected + 1}, .*: expected sample {expected} "):
        loop(tmp_path, [expected + 1])
    loop(tmp_path, range(COUNT))
    assert len(ActivationDataset(tmp_path)) == COUNT


def test_a_loop_that_continues_reads_no_table(tmp_path):
    with pytest.raises(ZeroDivisionError):
        loop(tmp_path, range(COUNT), 9)
    for path in tmp_path.glob("*.parquet"):
        path.write_bytes(bytes(path.stat().st_size))
    loop(tmp_path, range(COUNT))
    assert json.loads((tmp_path / "metadata.json").read_text())["samples"] == COUNT


def test_verify_of_a_program_of_ones_own(tmp_path, capsys):
    """There is no model, and perhaps no token id or no token, so nothing is recomputed."""
    with open_storage(tmp_path, {0: "h"}) as storage:
        for number, tokens in enumerate((3, 0, 2)):
            storage.add_activation(0, np.ones((tokens, 2), np.float32), number, "")
    for flags, status, told in (
        ([], 0, "in order: 1 folder, 1 shard, 3 samples, 0.000 GB; nothing recomputed (no model"),
        (["--model_path", "Qwen/Qwen2.5-0.5B"], 2, f"error: --model_path: {tmp_path} records no"),
    ):
        assert main("--verify", "--output_dir", tmp_path, *flags) == status
        assert told in "".join(capsys.readouterr())


@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", ".."])
def test_names_of_hooks_are_no_paths(name, tmp_path, capsys):
    """The export writes nothing, in its folder or elsewhere."""
    with open_storage(tmp_path / "run", {1: name}) as storage:
        for number in range(10):
            storage.add_activation(1, np.zeros((20, 4), np.float32), number, "", [*range(20)])
    flags = "--export_dir", tmp_path / "out/copy", "--output_dir", tmp_path / "run"
    assert main("--export", "sae_lens", *flags) == 2
    assert "cannot name a folder" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "run" not in path.parts]
