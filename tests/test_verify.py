"""--verify finds whatever is off."""

import shutil
import time
from dataclasses import replace

import numpy as np
import pytest
from command_line import main
from extractions import (
    HIDDEN,
    HOOKS,
    change_shard,
    change_table,
    edit,
    extract,
    open_part,
)
from safetensors.numpy import load_file, save_file
from small_runs import both_formats, shard_name

from activation_extraction import ActivationDataset
from activation_extraction.common.encodings import FLOAT8
from activation_extraction.common.errors import InputError
from activation_extraction.inspect import verify as verify_module
from activation_extraction.store.commit import DamagedError, unseal
from activation_extraction.store.identity import Identity


def three_by_two(root):
    for machine in range(3):
        for host in range(2):
            extract(root, machine, host, 3, 2, count=7)


def flip(path, position, bits=1):
    data = bytearray(path.read_bytes())
    data[position] ^= bits
    path.write_bytes(data)


def test_what_was_written_is_in_order(tmp_path, check):
    extract(tmp_path / "one")
    assert check(tmp_path / "one") == []
    for machine in range(2):
        extract(tmp_path / "machines", machine, 0, 2, 1, count=10 - machine)
    assert check(tmp_path / "machines") == []
    three_by_two(tmp_path / "hosts")
    assert check(tmp_path / "hosts") == []
    extract(tmp_path / "plain", compress_shards=False)
    assert check(tmp_path / "plain") == []


@pytest.mark.parametrize("name", ["shard_0002.json", "metadata.json"])
def test_one_flipped_bit_anywhere_in_a_json(name, tmp_path, check):
    extract(tmp_path)
    path = tmp_path / name
    whole = path.read_bytes()
    for position in range(len(whole)):
        for bit in range(8):
            data = bytearray(whole)
            data[position] ^= 1 << bit
            with pytest.raises(DamagedError):
                unseal(bytes(data), name)
    for position in {0, len(whole) - 1, *range(0, len(whole), 50)}:
        flip(path, position)
        found = check(tmp_path)
        assert any(f"/{name}: is damaged" in problem for problem in found), (position, found)
        path.write_bytes(whole)
    assert check(tmp_path) == []


@both_formats
def test_one_flipped_bit_anywhere_in_a_shard(shard_format, tmp_path, check):
    extract(tmp_path, shard_format=shard_format)
    path = tmp_path / shard_name(3, shard_format)
    whole = path.read_bytes()
    for position in {0, len(whole) - 1, *range(0, len(whole), len(whole) // 60)}:
        flip(path, position, 1 << position % 8)
        found = check(tmp_path)
        assert found and all(p.startswith(f"{path.name}: ") for p in found), position
        path.write_bytes(whole)
    for data in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0"):
        path.write_bytes(data)
        (found,) = check(tmp_path)
        assert f"{path.name}: has " in found
    path.write_bytes(whole)
    assert check(tmp_path) == []


COUNTS = {
    "shards": ("metadata.json", {"shards": 5}, "metadata.json: has 5 shards, there are 4"),
    "samples": ("metadata.json", {"samples": 11}, "metadata.json: has 11 samples, there are 10"),
    "tokens": ("metadata.json", {"tokens": 99}, "metadata.json: has 99 tokens, there are 100"),
    "bytes": ("metadata.json", {"bytes": 1}, "metadata.json: has 1 byte, there are "),
    "tokens of a shard": ("shard_0002.json", {"tokens": 31}, "tokens: found 30, its JSON says 31"),
    "samples of a shard": (
        "shard_0002.json",
        {"samples": {"first": 3, "last": 5, "count": 4}},
        "number of samples: found 3, its JSON says 4",
    ),
    "sha256": ("shard_0002.json", {"sha256": "0" * 64}, "its sha256 is not the one in its JSON"),
    "size": ("shard_0002.json", {"bytes": 70}, "bytes, its JSON says 70"),
    "version": ("metadata.json", {"format_version": 1}, "written by another version"),
    "version of a shard": ("shard_0001.json", {"format_version": 1}, "by another version"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_and_checksums_are_compared(name, tmp_path, check):
    file, changes, problem = COUNTS[name]
    extract(tmp_path)

    def change(content):
        of_file = name in ("sha256", "size")
        (content["files"]["shard_0002.pkl.gz"] if of_file else content).update(changes)

    edit(tmp_path / file, change)
    assert problem in "\n".join(check(tmp_path))


@pytest.mark.parametrize("file,field", [("metadata.json", "identity"), ("shard_0002.json", "mark")])
def test_a_json_that_lacks_a_field_is_one_line(file, field, tmp_path, check, capsys):
    extract(tmp_path)
    edit(tmp_path / file, lambda content: content.pop(field))
    (problem,) = (each for each in check(tmp_path) if f"/{file}: " in each)
    assert field in problem
    with pytest.raises(OSError, match=f"{file}: .*{field}"):
        ActivationDataset(tmp_path)
    assert main("--status", "--output_dir", tmp_path) in (0, 1)
    with pytest.raises(InputError, match=f"{file}: .*{field}"):
        open_part(tmp_path)


def test_unknown_fields_are_ignored(tmp_path, check):
    """A later version may add some."""
    extract(tmp_path)
    for name in ("metadata.json", "shard_0002.json"):
        edit(tmp_path / name, lambda content: content.update(more={"a": [1]}))
    assert check(tmp_path) == []
    assert ActivationDataset(tmp_path).samples["sample_idx"].to_pylist() == [*range(10)]
    assert open_part(tmp_path).complete


NUMBERS = {
    "twice": ([3, 3, 5], ["1 sample number stored more than once, such as 3"], "4 is missing"),
    "missing": ([3, 4, 99], [], "5 is missing"),
    "of another host": ([-1, 4, 5], [], "-1 belongs to another host"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_sample_numbers_are_unique_and_have_no_gaps(name, tmp_path, check):
    numbers, twice, last = NUMBERS[name]
    extract(tmp_path)
    change_table(
        tmp_path,
        2,
        lambda rows: [r.update(sample_idx=n) for r, n in zip(rows, numbers, strict=True)],
    )
    assert check(tmp_path) == [*twice, f"the output itself: sample {last}"]


@pytest.mark.parametrize("name", ["shard_0002.pkl.gz", "metadata.json"])
def test_a_file_is_missing(name, tmp_path, check):
    extract(tmp_path)
    (tmp_path / name).unlink()
    assert check(tmp_path) == [f"{name}: is missing"]


@pytest.mark.parametrize("lost", ["json", "*"])
@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_json_is_missing_alone_or_with_its_shard(number, lost, tmp_path, check):
    extract(tmp_path)
    for path in tmp_path.glob(f"shard_000{number}.{lost}"):
        path.unlink()
    found = check(tmp_path)
    if lost == "*":
        assert "metadata.json: has 10 samples, there are " in "\n".join(found)
    else:
        assert f"shard_000{number}.pkl.gz: has no JSON" in found
    last = "metadata.json: has 4 shards, there are 3"
    assert (last if number == 4 else f"shard_000{number}.json: is missing") in found


def test_a_machine_too_many(tmp_path, check):
    """The output of one machine beside the folder of the same machine, and a third of two."""
    extract(tmp_path / "one")
    extract(tmp_path / "again")
    (tmp_path / "again").rename(tmp_path / "one/machine_000")
    assert check(tmp_path / "one") == [
        "machine_000: holds shards that are not part of this run",
        "10 sample numbers stored more than once, such as 0",
    ]
    for machine in range(2):
        extract(tmp_path / "two", machine, 0, 2, 1)
    extract(tmp_path / "x", 2, 0, 2, 1)
    (tmp_path / "x" / "machine_002").rename(tmp_path / "two/machine_002")
    assert check(tmp_path / "two") == [
        "machine_002: holds shards that are not part of this run",
        "9 sample numbers stored more than once, such as 2",
    ]


def test_machines_are_missing_or_swapped_or_of_other_runs(tmp_path, check):
    three_by_two(tmp_path)
    shutil.rmtree(tmp_path / "machine_001_host_01")
    assert check(tmp_path) == ["machine_001_host_01: is missing"]
    shutil.copytree(tmp_path / "machine_001_host_00", tmp_path / "machine_001_host_01")
    assert check(tmp_path) == [
        "machine_001_host_01: holds the shards of machine_001_host_00",
        "7 sample numbers stored more than once, such as 1",
    ]
    shutil.rmtree(tmp_path / "machine_001_host_01")
    extract(tmp_path, 1, 1, 3, 2, count=7, identity={"data_revision": "3" * 64})
    assert check(tmp_path) == [
        "machine_001_host_01: belongs to another run: its data_revision differs"
    ]


def test_an_unfinished_run(tmp_path, check):
    with pytest.raises(KeyboardInterrupt):
        with open_part(tmp_path) as storage:
            for key in HOOKS:
                storage.add_activation(
                    key, np.ones((4, HIDDEN), np.float32), 0, "", np.zeros(4, np.int32), "id"
                )
            raise KeyboardInterrupt
    assert check(tmp_path) == ["metadata.json: the run is not complete: interrupted"]


def test_all_problems_are_told_not_only_the_first(tmp_path, check):
    three_by_two(tmp_path)
    flip(tmp_path / "machine_000_host_00" / "shard_0001.pkl.gz", 40)
    (tmp_path / "machine_000_host_01" / "shard_0002.pkl.gz").unlink()
    flip(tmp_path / "machine_002_host_01" / "shard_0001.json", 40)
    found = "\n".join(check(tmp_path))
    for name in ("machine_000_host_00/shard_0001.pkl.gz", "machine_000_host_01/shard_0002.pkl.gz"):
        assert name in found
    assert "machine_002_host_01/shard_0001.json: is damaged" in found


def test_ctrl_c_waits_for_the_shards_in_hand_only(tmp_path, monkeypatch, check):
    extract(tmp_path, count=60)
    checked = []

    def slow(*arguments):
        checked.append(arguments)
        if len(checked) == 1:
            raise KeyboardInterrupt
        time.sleep(0.5)
        return [], []

    monkeypatch.setattr(verify_module, "check_shard", slow)
    with pytest.raises(KeyboardInterrupt):
        check(tmp_path)
    assert len(checked) < 20  # there is a shard for each three samples


# Recomputing, with the demo's model.


@pytest.fixture(scope="module")
def extract_again(demo_inputs, tmp_path_factory):
    """Extracts 12 samples at two layers, with more flags; returns the folder."""

    def run(*flags):
        out = tmp_path_factory.mktemp("extracted")
        model = ["--model_path", demo_inputs / "model"]
        data = ["--dataset_path", demo_inputs / "documents.parquet", "--max_samples", 12]
        layers = ["--max_seq_length", 32, "--layers_to_extract", 0, 1, "--shard_size_gb", 1e-4]
        assert main(*model, *data, *layers, *flags, "--output_dir", out) == 0
        return out

    return run


@pytest.fixture(scope="module")
def extracted(extract_again):
    return extract_again()


def other_model(demo_inputs, folder):
    shutil.copytree(demo_inputs / "model", folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name] * np.array(1.5, weights[name].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_another_model_is_refused_before_the_shards_are_read(
    extracted, demo_inputs, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(verify_module, "check_shard", None)
    other_model(demo_inputs, tmp_path / "model")
    arguments = ["--verify", "--model_path", tmp_path / "model", "--output_dir", extracted]
    assert main(*arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "the model is not the one that the stored activations came from" in error


@pytest.mark.parametrize(
    "dtype",
    ["float32", *(pytest.param(name, marks=pytest.mark.long) for name in ("float16", "bfloat16"))],
)
def test_changed_activations_are_found_by_recomputing(extract_again, demo_inputs, capsys, dtype):
    """Everything agrees with everything, but the numbers are not the model's, by 1 %."""
    out = extract_again("--activation_dtype", dtype)
    number = len(list(out.glob("shard_*.json")))

    def scale(shard):
        values = shard[1][-1]["activation"]
        values[...] = (values.astype(np.float32) * 1.01).astype(values.dtype)

    change_shard(out, number, scale)
    capsys.readouterr()
    assert main("--verify", "--output_dir", out) == 0
    assert "nothing recomputed (give --model_path)" in capsys.readouterr().out
    arguments = ["--verify", "--model_path", demo_inputs / "model", "--output_dir", out]
    assert main(*arguments, "--verify_samples", 12) == 1
    first, summary = capsys.readouterr().out.splitlines()
    assert f"shard_{number:04d}.pkl.gz: sample 11, blocks.1.hook_resid_post: recomputed" in first
    assert "12 samples recomputed; 1 problem" in summary


@pytest.mark.long
def test_rounding_to_bfloat16_is_no_error(extract_again, demo_inputs, capsys):
    """Nor does another mesh or packing make it one."""
    out = extract_again("--dtype", "bfloat16")
    model = ["--model_path", demo_inputs / "model", "--mesh_type", "1d", "--batch_size", 1]
    assert main("--verify", *model, "--verify_samples", 12, "--output_dir", out) == 0
    assert "12 samples recomputed; 0 problems" in capsys.readouterr().out


@pytest.mark.parametrize("platform", [True, False])
@pytest.mark.parametrize("stored", verify_module.STORED)
def test_one_percent_is_more_than_rounding_of_float32(platform, stored):
    """And ten percent is more than a byte per value loses."""
    identity, most = Identity(dtype="float32", activation_dtype=stored), 1e-2
    if stored == FLOAT8:
        most = 0.1
    assert 0 < 1.5 * verify_module.tolerance(identity, platform) < most
    with pytest.raises(InputError, match="computed in float8, stored in"):
        verify_module.tolerance(replace(identity, dtype="float8"), platform)


def test_verify_as_a_user_meets_it(tmp_path, capsys):
    extract(tmp_path)
    for place in (tmp_path, f"file://{tmp_path}"):
        assert main("--verify", "--output_dir", place) == 0
        assert "in order: 1 folder, 4 shards, 10 samples" in capsys.readouterr().out
    flip(tmp_path / "shard_0001.pkl.gz", 50)
    assert main("--verify", "--output_dir", tmp_path) == 1
    assert "shard_0001.pkl.gz: " in capsys.readouterr().out
