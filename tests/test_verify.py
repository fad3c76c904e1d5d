"""--verify finds whatever is off."""

import gc
import json
import shutil
import threading
import time
from dataclasses import replace

import fsspec
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
    folder_name,
    open_part,
)
from safetensors.numpy import load_file, save_file
from small_runs import both_formats, shard_name

from activation_extraction import ActivationDataset
from activation_extraction.common.encodings import FLOAT8
from activation_extraction.common.errors import InputError
from activation_extraction.inspect import verify as verify_module
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Identity
from activation_extraction.store.sealed_json import DamagedError, seal, unseal


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


def test_an_output_in_a_bucket(tmp_path, check):
    """fsspec's file system in memory stands for it; shard files are deleted here."""
    url = f"memory:/{tmp_path}"
    for machine in range(2):
        extract(tmp_path, machine, 0, 2, 1, remote=Folder(f"{url}/machine_{machine:03d}"))
    assert not list(tmp_path.glob("machine_*/*.gz"))
    assert check(url) == []
    shard = f"{tmp_path}/machine_001/shard_0002.pkl.gz"
    memory = fsspec.filesystem("memory")
    data = bytearray(memory.cat_file(shard))
    data[100] ^= 4
    memory.pipe_file(shard, bytes(data))
    (found,) = check(url)
    assert found.startswith("machine_001/shard_0002.pkl.gz: ")
    memory.rm_file(shard)
    assert check(url) == ["machine_001/shard_0002.pkl.gz: is missing"]
    memory.rm(str(tmp_path), recursive=True)


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


@pytest.mark.parametrize(
    "content", ["", "[]", '[""]', "{}", "1", '"x"', "null", '{"checksum": 1}', "[" * 10**5]
)
def test_a_json_of_something_else_is_damaged(content, tmp_path, check):
    extract(tmp_path)
    (tmp_path / "shard_0002.json").write_text(content)
    gc.collect()  # so that no other test's garbage is finalized deep in the recursion
    assert "shard_0002.json: is damaged" in check(tmp_path)[0]


COUNTS = {
    "shards": ("metadata.json", {"shards": 5}, "metadata.json: has 5 shards, there are 4"),
    "samples": ("metadata.json", {"samples": 11}, "metadata.json: has 11 samples, there are 10"),
    "tokens": ("metadata.json", {"tokens": 99}, "metadata.json: has 99 tokens, there are 100"),
    "bytes": ("metadata.json", {"bytes": 1}, "metadata.json: has 1 byte, there are "),
    "tokens of a shard": (
        "shard_0002.json",
        {"tokens": 31},
        "shard_0002.pkl.gz: has 30 tokens, its JSON says 31",
    ),
    "samples of a shard": (
        "shard_0002.json",
        {"samples": {"first": 3, "last": 5, "count": 4}},
        "shard_0002.samples.jsonl.gz: cannot be read: it has 3 lines, expected 4",
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
    edit(tmp_path / file, lambda content: content.update(changes))
    assert problem in "\n".join(check(tmp_path))


@pytest.mark.parametrize(
    "file,field",
    [
        ("metadata.json", "identity"),
        ("metadata.json", "samples"),
        ("shard_0002.json", "samples"),
        ("shard_0002.json", "sha256"),
        ("shard_0002.json", "run"),
    ],
)
def test_a_json_that_lacks_a_field_is_one_line(file, field, tmp_path, check, capsys):
    extract(tmp_path)
    edit(tmp_path / file, lambda content: content.pop(field))
    (problem,) = (each for each in check(tmp_path) if f"/{file}: " in each)
    assert field in problem
    with pytest.raises(ValueError, match=f"{file}: .*{field}"):
        ActivationDataset(tmp_path)
    assert main("--status", "--output_dir", tmp_path) in (0, 1)
    with pytest.raises(InputError, match=f"{file}: .*{field}"):
        open_part(tmp_path)


def test_unknown_fields_are_ignored(tmp_path, check):
    """A later version may add some."""
    extract(tmp_path)
    for name in ("metadata.json", "shard_0002.json"):
        edit(tmp_path / name, lambda content: content.update(more={"a": [1]}))
    change_table(tmp_path, 2, lambda rows: rows[0].update(more=1))
    assert check(tmp_path) == []
    assert ActivationDataset(tmp_path).samples["sample_idx"].to_pylist() == [*range(10)]
    assert open_part(tmp_path).complete


NUMBERS = {
    "twice": ([3, 3, 5], ["1 sample number stored more than once, such as 3"], "4 is missing"),
    "missing": ([3, 4, 99], [], "5 is missing"),
    "of another host": ([3, 4, -1], [], "-1 belongs to another host"),
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


def test_sample_numbers_are_unique_over_all_hosts(tmp_path, check):
    three_by_two(tmp_path)
    folder = tmp_path / "machine_002_host_01"
    change_table(folder, 1, lambda rows: rows[1].update(sample_idx=0))
    assert check(tmp_path) == [
        "1 sample number stored more than once, such as 0",
        "machine_002_host_01: sample 0 belongs to another host",
    ]


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


def copy_shard(source, number, target, to):
    """A shard under another number, with a JSON that says so."""
    for end in ("json", "pkl.gz", "npz", "samples.jsonl.gz"):
        shutil.copy(source / f"shard_{number:04d}.{end}", target / f"shard_{to:04d}.{end}")
    edit(target / f"shard_{to:04d}.json", lambda c: c.update(file=f"shard_{to:04d}.pkl.gz"))


def count_again(folder):
    """Makes the metadata agree with the commits."""
    parts = [json.loads(path.read_text()) for path in sorted(folder.glob("shard_*.json"))]
    edit(
        folder / "metadata.json",
        lambda content: content.update(
            shards=len(parts),
            samples=sum(part["samples"]["count"] for part in parts),
            tokens=sum(part["tokens"] for part in parts),
            bytes=sum(part["bytes"] for part in parts),
        ),
    )


def test_a_duplicated_shard(tmp_path, check):
    extract(tmp_path, count=9)
    copy_shard(tmp_path, 2, tmp_path, 4)
    count_again(tmp_path)
    assert check(tmp_path) == ["3 sample numbers stored more than once, such as 3"]


def test_a_json_under_another_name(tmp_path, check):
    extract(tmp_path)
    shutil.copy(tmp_path / "shard_0003.json", tmp_path / "shard_0005.json")
    assert "shard_0005.json: describes shard_0003.pkl.gz, expected the" in check(tmp_path)[0]
    with pytest.raises(InputError, match="describes shard_0003.pkl.gz"):
        open_part(tmp_path)


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


def test_a_shard_of_another_run(tmp_path, check):
    extract(tmp_path / "a")
    extract(tmp_path / "b", identity={"model_digest": "2" * 64})
    copy_shard(tmp_path / "b", 2, tmp_path / "a", 2)
    assert "shard_0002.json: belongs to another run" in check(tmp_path / "a")


def test_a_shard_of_another_machine(tmp_path, check):
    for machine in range(2):
        extract(tmp_path, machine, 0, 2, 1)
    copy_shard(tmp_path / "machine_001", 2, tmp_path / "machine_000", 2)
    found = check(tmp_path)
    assert "machine_000/shard_0002.json: belongs to another run" in found
    assert "machine_000: sample 6 is missing" in found


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


def test_a_leftover_shard_without_json(tmp_path, check):
    extract(tmp_path)
    shutil.copy(tmp_path / "shard_0001.pkl.gz", tmp_path / "shard_0005.pkl.gz")
    (tmp_path / ".shard_0006.pkl.gz.tmp").touch()  # of a killed run: nobody reads it
    assert check(tmp_path) == ["shard_0005.pkl.gz: has no JSON"]


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


@pytest.mark.long
def test_verify_while_a_run_writes(tmp_path, check):
    """The only complaint is that it is not complete, or a shard that is being written."""
    done = threading.Event()

    def write():
        extract(tmp_path, 0, 0, 2, 1, count=200)
        done.set()

    thread = threading.Thread(target=write)
    thread.start()
    try:
        while not done.is_set():
            try:
                found = check(tmp_path)
            except InputError:  # not begun
                continue
            for problem in found:
                assert "is damaged" not in problem and "refused" not in problem, problem
    finally:
        thread.join()
    assert check(tmp_path) == [f"{folder_name(1, 0, 2, 1)}: is missing"]


def test_seal_is_the_inverse_of_unseal():
    content = {"a": [1, 0.1, -0.0, None, True, "ä\n\ud7ff"], "b": {"10": 1, "9": 2}}
    assert unseal(seal(content), "") == content
