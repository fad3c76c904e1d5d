"""--verify finds whatever is off."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import main
from extractions import change_shard, change_table, edit, extract, flip, open_part, shard_file
from pods import flags_for
from safetensors.numpy import load_file, save_file
from small_runs import both_formats, files_in
from storages import open_storage

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import InputError
from activation_extraction.inspect import verify as verify_module
from activation_extraction.store.chosen_samples import Recomputer
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Identity
from activation_extraction.store.run_log import DamagedError, unseal

METADATA, SHARD, FILE = "metadata.json", "shard_0002.json", "shard_0002.pkl.gz"


def three_by_two(root):
    for machine in range(3):
        for host in range(2):
            extract(root, machine, host, 3, 2, count=7)


def test_verify_as_a_user_meets_it(tmp_path, capsys):
    extract(tmp_path, compress_shards=False)
    for place in (tmp_path, f"file://{tmp_path}"):
        assert main("--verify", "--output_dir", place) == 0
        assert "in order: 1 folder, 4 shards, 10 samples" in capsys.readouterr().out
    flip(tmp_path / "shard_0001.pkl", 50)
    assert main("--verify", "--output_dir", tmp_path) == 1
    assert "shard_0001.pkl: " in capsys.readouterr().out


def test_one_flipped_bit_anywhere_in_a_json(tmp_path):
    extract(tmp_path)
    whole = (tmp_path / SHARD).read_bytes()
    for position in range(0, 8 * len(whole), 13):
        data = bytearray(whole)
        data[position // 8] ^= 1 << position % 8
        with pytest.raises(DamagedError):
            unseal(bytes(data), SHARD)


@both_formats
def test_one_flipped_bit_anywhere_in_a_shard(shard_format, tmp_path, check):
    extract(tmp_path, shard_format=shard_format)
    path = shard_file(tmp_path, 3)
    whole = path.read_bytes()
    for position in {0, len(whole) - 1, *range(0, len(whole), len(whole) // 20)}:
        flip(path, position, 1 << position % 8)
        (found,) = check(tmp_path)
        assert found.startswith(f"{path.name}: "), position
        path.write_bytes(whole)
    for data in (whole[:-1], b"", whole + b"\0"):
        path.write_bytes(data)
        (found,) = check(tmp_path)
        assert f"{path.name}: has " in found


def lose_all_of_shard(path):
    for each in path.parent.glob(f"{path.stem}.*"):
        each.unlink()


DAMAGE = [  # a file, what happens to it, what is told
    (SHARD, Path.unlink, f"{SHARD}: is missing"),
    (FILE, Path.unlink, f"{FILE}: is missing"),
    ("shard_0004.json", lose_all_of_shard, "shard_0004.json: is missing"),
    ("shard_0002.npz", lambda path: os.truncate(path, 10), "shard_0002.npz: "),
    (METADATA, Path.unlink, METADATA),
    (METADATA, lambda path: flip(path, 400), f"{METADATA}: is damaged"),
    (SHARD, lambda path: flip(path, 400), f"{SHARD}: is damaged"),
]


@pytest.mark.parametrize("file,change,told", DAMAGE)
def test_damage_is_told_and_not_continued(file, change, told, tmp_path, check):
    extract(tmp_path)
    change(tmp_path / file)
    before = files_in(tmp_path)
    assert told in "\n".join(check(tmp_path))
    with pytest.raises(InputError, match=f"{told}.*--repair"):
        open_part(tmp_path)
    assert files_in(tmp_path) == before
    extract(tmp_path, overwrite=True)
    assert check(tmp_path) == []


COUNTS = [
    (METADATA, {"shards": 5}, "metadata.json: has 5 shards, there are 4"),
    (METADATA, {"tokens": 99}, "metadata.json: has 99 tokens, there are 100"),
    (SHARD, {"format_version": 1}, "by another version"),
    (SHARD, {"tokens": 31}, "tokens: found 30, its JSON says 31"),
    (SHARD, {"samples": {"first": 3, "last": 5, "count": 4}}, "number of samples: found 3, its"),
    (FILE, {"sha256": "0" * 64}, "its sha256 is not the one in its JSON"),
]


@pytest.mark.parametrize("file,changes,problem", COUNTS)
def test_counts_and_checksums_are_compared(file, changes, problem, tmp_path, check):
    extract(tmp_path)

    def change(content):
        (content["files"][FILE] if file == FILE else content).update(changes)

    edit(tmp_path / (SHARD if file == FILE else file), change)
    assert problem in "\n".join(check(tmp_path))


@pytest.mark.parametrize("file,field", [(METADATA, "identity"), (SHARD, "mark")])
def test_a_json_that_lacks_a_field_is_one_line_and_unknown_fields_are_ignored(
    file, field, tmp_path, check
):
    """A later version may add some."""
    extract(tmp_path)
    edit(tmp_path / file, lambda content: content.update(more={"a": [1]}))
    assert check(tmp_path) == [] and open_part(tmp_path).complete
    assert len(ActivationDataset(tmp_path)) == 10
    edit(tmp_path / file, lambda content: content.pop(field))
    (problem,) = (each for each in check(tmp_path) if f"/{file}: " in each)
    assert field in problem
    with pytest.raises(OSError, match=f"{file}: .*{field}"):
        ActivationDataset(tmp_path)
    assert main("--status", "--output_dir", tmp_path) == 1


@pytest.mark.parametrize(
    "told,numbers,twice",
    [
        ("4 is missing", [3, 3, 5], ["1 sample number stored more than once, such as 3"]),
        ("5 is missing", [3, 4, 99], []),
        ("-1 belongs to another host", [-1, 4, 5], []),
    ],
)
def test_sample_numbers_are_unique_and_have_no_gaps(told, numbers, twice, tmp_path, check):
    extract(tmp_path)

    def renumber(rows):
        for row, number in zip(rows, numbers, strict=True):
            row["sample_idx"] = number

    change_table(tmp_path, 2, renumber)
    assert check(tmp_path) == [*twice, f"the output itself: sample {told}"]
    edit(tmp_path / METADATA, lambda content: content.update(status="interrupted"))
    assert f"the output itself: sample {told}" in check(tmp_path)  # it is before the mark


def test_files_and_folders_are_missing_too_many_swapped_or_of_other_runs(tmp_path, check):
    extract(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "one/machine_000")
    assert check(tmp_path / "one") == [
        "machine_000: holds shards that are not part of this run",
        "10 sample numbers stored more than once, such as 0",
    ]
    root = tmp_path / "run"
    three_by_two(root)
    other = root / "machine_001_host_01"
    shutil.rmtree(other)
    assert check(root) == ["machine_001_host_01: is missing"]
    shutil.copytree(root / "machine_001_host_00", other)
    assert check(root) == [
        "machine_001_host_01: holds the shards of machine_001_host_00",
        "7 sample numbers stored more than once, such as 1",
    ]
    shutil.rmtree(other)
    extract(root, 1, 1, 3, 2, count=7, identity={"data_revision": "3" * 64})
    assert check(root) == [
        "machine_001_host_01: belongs to another run: its data_revision is digest 333333333333, "
        "but digest 111111111111 in machine_000_host_00"
    ]


def test_all_problems_are_told_not_only_the_first(tmp_path, check):
    three_by_two(tmp_path)
    files = [{"name": "a.jsonl", "bytes": 9, "fingerprint": "x"}]
    edit(tmp_path / "machine_000_host_00" / METADATA, lambda c: c.update(data_files=files))
    others = [files[0] | {"fingerprint": "y"}]
    edit(tmp_path / "machine_001_host_00" / METADATA, lambda c: c.update(data_files=others))
    edit(tmp_path / "machine_001_host_01" / METADATA, lambda c: c.update(status="interrupted"))
    flip(tmp_path / "machine_000_host_00" / "shard_0001.pkl.gz", 40)
    found = "\n".join(check(tmp_path))
    for told in (
        "machine_001_host_00: has read a file a.jsonl with other content than others have",
        "machine_001_host_01/metadata.json: the run is not complete: interrupted",
        "machine_000_host_00/shard_0001.pkl.gz",
    ):
        assert told in found


# Recomputing, with the demo's model.

HOOK = "blocks.1.hook_resid_post"


def test_changed_activations_are_found_by_recomputing(demo_inputs, tmp_path, capsys):
    """Everything agrees with everything, but the numbers are not the model's, by 1 %. Another model
    is refused before the shards are read."""
    out, layers = tmp_path / "out", ("--layers_to_extract", 0, 1)
    more = "--max_samples", 12, "--max_seq_length", 32, "--shard_size_gb", 1e-4
    assert main(*flags_for(demo_inputs, out, *more, hooks=layers)) == 0
    number = len(list(out.glob("shard_*.json")))

    def scale(shard):
        shard[1][-1]["activation"] *= np.float32(1.01)

    change_shard(out, number, scale)
    capsys.readouterr()
    assert main("--verify", "--output_dir", out) == 0
    assert "nothing recomputed (give --model_path)" in capsys.readouterr().out
    arguments = ["--verify", "--output_dir", out, "--verify_samples", 12, "--model_path"]
    assert main(*arguments, demo_inputs / "model") == 1
    first, summary = capsys.readouterr().out.splitlines()
    assert f"shard_{number:04d}.pkl.gz: sample 11, {HOOK}: recomputed" in first
    assert "12 samples recomputed; 1 problem" in summary
    shutil.copytree(demo_inputs / "model", tmp_path / "model")
    weights = load_file(tmp_path / "model/model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name] * np.array(1.5, weights[name].dtype)
    save_file(weights, tmp_path / "model/model.safetensors", metadata={"format": "pt"})
    assert main(*arguments, tmp_path / "model") == 2
    out, err = capsys.readouterr()
    told = "the model is not the one that the stored activations came from"
    assert out == "" and told in err.splitlines()[-1]


def test_rounding_and_what_a_budget_cut_are_no_error(demo_inputs, tmp_path, capsys):
    """Another mesh or packing is none either. All tokens of a sample are computed again, also where
    a budget has cut it."""
    more = "--positions", "every:2", "--max_tokens", 250, "--dtype", "bfloat16"
    assert main(*flags_for(demo_inputs, tmp_path, *more)) == 0
    again = "--verify", "--verify_samples", 12, "--mesh_type", "1d", "--batch_size", 1
    model = "--model_path", demo_inputs / "model"
    capsys.readouterr()
    assert main(*again, *model, "--output_dir", tmp_path) == 0
    assert " samples recomputed; 0 problems" in capsys.readouterr().out


def test_a_value_that_is_nan_only_here_or_there_is_a_problem(tmp_path, capsys):
    """The loss of a first token is NaN in both."""
    stored = {"loss": np.float32([[np.nan], [2]]), HOOK: np.float32([[1], [2]])}
    identity = Identity("0" * 64, dtype="float32", activation_dtype="float32", keyed_by="hook name")
    identity = replace(identity, float32_hooks=("loss",))
    with open_storage(tmp_path, {name: name for name in stored}, identity=identity) as storage:
        for name, values in stored.items():
            storage.add_activation(name, values, 0, "", np.arange(2, dtype=np.int32))
    for hook, token, value, problems in (
        ("loss", 0, np.nan, 0),
        ("loss", 0, 1, 1),
        (HOOK, 1, np.nan, 1),
    ):
        again = {name: values.copy() for name, values in stored.items()}
        again[hook][token] = value
        recompute = Recomputer("cpu", lambda _, again=again: [again])
        assert verify_module.verify(Folder(str(tmp_path)), lambda _, r=recompute: r, 1) == problems
        out = capsys.readouterr().out
        assert "1 sample recomputed" in out
        assert out.count(f"sample 0, {hook}: recomputed, it differs by nan") == problems
