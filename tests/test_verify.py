"""--verify finds whatever is off; shards are read without running what is in them."""

import copyreg
import gzip
import io
import json
import os
import pickle
import shutil
import struct
import subprocess
import threading
import time
import tracemalloc

import fsspec
import ml_dtypes
import numpy as np
import pytest
from extractions import (
    HIDDEN,
    HOOKS,
    change_shard,
    edit,
    extract,
    folder_name,
    load,
    open_part,
    replace_shard,
)
from safetensors.numpy import load_file, save_file

import extract_activations
from activation_extraction import verify as verify_module
from activation_extraction.commits import DamagedError, seal, unseal
from activation_extraction.errors import InputError, RunError
from activation_extraction.shards import UnsafeError, read_shard, write_shard
from activation_extraction.storage import ActivationStorage
from activation_extraction.stores import Store
from activation_extraction.verify import verify


def main(*arguments):
    return extract_activations.main([str(argument) for argument in arguments])


@pytest.fixture
def check(capsys):
    """Verifies a folder or URL; the problems found, in agreement with the exit status."""

    def run(root):
        capsys.readouterr()
        status = verify(Store(str(root)), None, 0)
        *problems, summary = capsys.readouterr().out.splitlines()
        assert summary.startswith("NOT IN ORDER" if problems else "in order"), summary
        assert status == (1 if problems else 0)
        return problems

    return run


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
    extract(tmp_path / "plain", compress=False)
    assert check(tmp_path / "plain") == []


def test_an_output_in_a_bucket(tmp_path, check):
    """fsspec's file system in memory stands for it; shard files are deleted here."""
    url = f"memory:/{tmp_path}"
    for machine in range(2):
        extract(tmp_path, machine, 0, 2, 1, remote=Store(f"{url}/machine_{machine:03d}"))
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


def test_one_flipped_bit_anywhere_in_a_shard(tmp_path, check):
    extract(tmp_path)
    path = tmp_path / "shard_0003.pkl.gz"
    whole = path.read_bytes()
    for position in {0, len(whole) - 1, *range(0, len(whole), len(whole) // 60)}:
        flip(path, position, 1 << position % 8)
        found = check(tmp_path)
        assert found and all(p.startswith("shard_0003.pkl.gz: ") for p in found), position
        path.write_bytes(whole)
    for data in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\0"):
        path.write_bytes(data)
        (found,) = check(tmp_path)
        assert "shard_0003.pkl.gz: has " in found


@pytest.mark.parametrize(
    "content", ["", "[]", '[""]', "{}", "1", '"x"', "null", '{"checksum": 1}', "[" * 10**5]
)
def test_a_json_of_something_else_is_damaged(content, tmp_path, check):
    extract(tmp_path)
    (tmp_path / "shard_0002.json").write_text(content)
    assert "shard_0002.json: is damaged" in check(tmp_path)[0]


def test_a_shard_is_missing(tmp_path, check):
    extract(tmp_path)
    (tmp_path / "shard_0002.pkl.gz").unlink()
    assert check(tmp_path) == ["shard_0002.pkl.gz: is missing"]


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_json_is_missing(number, tmp_path, check):
    extract(tmp_path)
    (tmp_path / f"shard_000{number}.json").unlink()
    found = check(tmp_path)
    assert f"shard_000{number}.pkl.gz: has no JSON" in found
    last = "metadata.json: has 4 shards, there are 3"
    assert (last if number == 4 else f"shard_000{number}.json: is missing") in found


@pytest.mark.parametrize("number", [1, 2, 4])
def test_a_shard_and_its_json_are_missing(number, tmp_path, check):
    extract(tmp_path)
    for path in tmp_path.glob(f"shard_000{number}.*"):
        path.unlink()
    found = check(tmp_path)
    assert "metadata.json: has 10 samples, there are " in "\n".join(found)
    if number < 4:
        assert f"shard_000{number}.json: is missing" in found


def test_the_metadata_is_missing(tmp_path, check):
    extract(tmp_path)
    (tmp_path / "metadata.json").unlink()
    assert check(tmp_path) == ["metadata.json: is missing"]


def copy_shard(source, number, target, to):
    """A shard under another number, with a JSON that says so."""
    for end in ("json", "pkl.gz"):
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
    edit(tmp_path / "shard_0003.json", lambda c: c.update(partial=False))
    count_again(tmp_path)
    assert "shard_0004.json: sample 3 is there twice" in check(tmp_path)


def test_a_json_under_another_name(tmp_path, check):
    extract(tmp_path)
    shutil.copy(tmp_path / "shard_0003.json", tmp_path / "shard_0005.json")
    assert "shard_0005.json: is the JSON of shard_0003.pkl.gz" in check(tmp_path)[0]
    with pytest.raises(InputError, match="is the JSON of"):
        open_part(tmp_path)


def test_a_duplicated_sample_within_a_shard(tmp_path, check):
    extract(tmp_path)

    def repeat(shard):
        for records in shard.values():
            records[2] = records[1]

    change_shard(tmp_path, 2, repeat)
    assert check(tmp_path) == [
        f"shard_0002.pkl.gz: hook {key}: its samples are not those of its JSON" for key in HOOKS
    ]


def test_the_same_part_twice(tmp_path, check):
    """As one machine's output beside the folder of the same machine: every sample twice."""
    extract(tmp_path)
    extract(tmp_path / "again")
    (tmp_path / "again").rename(tmp_path / "machine_000")
    assert check(tmp_path) == ["machine_000: holds shards that are not part of this run"]


def test_a_machine_too_many(tmp_path, check):
    for machine in range(2):
        extract(tmp_path, machine, 0, 2, 1)
    extract(tmp_path / "x", 2, 0, 2, 1)
    (tmp_path / "x" / "machine_002").rename(tmp_path / "machine_002")
    assert check(tmp_path) == ["machine_002: holds shards that are not part of this run"]


def test_a_shard_of_another_run(tmp_path, check):
    extract(tmp_path / "a")
    extract(tmp_path / "b", identity={"model files": "2" * 64})
    copy_shard(tmp_path / "b", 2, tmp_path / "a", 2)
    assert "shard_0002.json: is of another run" in check(tmp_path / "a")


def test_a_shard_of_another_machine(tmp_path, check):
    for machine in range(2):
        extract(tmp_path, machine, 0, 2, 1)
    copy_shard(tmp_path / "machine_001", 2, tmp_path / "machine_000", 2)
    found = check(tmp_path)
    assert "machine_000/shard_0002.json: is of another run" in found
    assert "machine_000/shard_0002.json: sample 6 is missing" in found


def test_machines_are_missing_or_swapped_or_of_other_runs(tmp_path, check):
    three_by_two(tmp_path)
    shutil.rmtree(tmp_path / "machine_001_host_01")
    assert check(tmp_path) == ["machine_001_host_01: is missing"]
    shutil.copytree(tmp_path / "machine_001_host_00", tmp_path / "machine_001_host_01")
    assert check(tmp_path) == ["machine_001_host_01: holds the part of machine_001_host_00"]
    shutil.rmtree(tmp_path / "machine_001_host_01")
    extract(tmp_path, 1, 1, 3, 2, count=7, identity={"data revision": "3" * 64})
    assert check(tmp_path) == ["machine_001_host_01: is of another run: its data revision differs"]


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


def change(name, **changes):
    return lambda folder: edit(folder / name, lambda content: content.update(changes))


def change_nested(name, change):
    return lambda folder: edit(folder / name, change)


WRONG_JSONS = {
    "shards": (change("metadata.json", shards=5), "has 5 shards, there are 4"),
    "samples": (change("metadata.json", samples=11), "has 11 samples, there are 10"),
    "tokens": (change("metadata.json", tokens=99), "has 99 tokens, there are 100"),
    "bytes": (change("metadata.json", bytes=1), "has 1 bytes, there are"),
    "statistics of all": (
        change_nested("metadata.json", lambda c: c["hooks"][1].update(mean=1.0)),
        "metadata.json: hook 5: its mean is",
    ),
    "no identity": (
        change_nested("metadata.json", lambda c: c.pop("identity")),
        "metadata.json: lacks identity",
    ),
    "no machines": (
        change_nested("metadata.json", lambda c: c["identity"].pop("total_machines")),
        "metadata.json: lacks what every run records",
    ),
    "no model": (change_nested("metadata.json", lambda c: c.pop("model")), "'model'"),
    "another version": (change("metadata.json", format_version=1), "written by another version"),
    "version of a shard": (change("shard_0001.json", format_version=1), "by another version"),
    "a field too many": (change("shard_0001.json", more=1), "fields are missing or unknown"),
    "samples of a shard": (
        change("shard_0002.json", samples={"first": 3, "last": 6, "count": 3}),
        "3 samples do not go from 3 to 6",
    ),
    "a gap": (
        change("shard_0002.json", samples={"first": 4, "last": 6, "count": 3}),
        "shard_0002.json: sample 3 is missing",
    ),
    "tokens of a shard": (change("shard_0002.json", tokens=31), "has 30 tokens, its JSON says 31"),
    "sha256": (change("shard_0002.json", sha256="0" * 64), "its sha256 is not its JSON's"),
    "size": (change("shard_0002.json", bytes=7), "bytes, its JSON says 7"),
    "partial": (change("shard_0002.json", partial=True), "is partial, and not the last one"),
    "cursor back": (
        change("shard_0002.json", cursor={"samples": 0, "skip": 0}),
        "shard_0002.json: its cursor does not follow",
    ),
    "cursor ahead": (
        change("shard_0002.json", cursor={"samples": 7, "skip": 0}),
        "shard_0002.json: its cursor does not follow",
    ),
    "statistics": (
        change_nested("shard_0002.json", lambda c: c["hooks"][0].update(max_norm=7.0)),
        "shard_0002.pkl.gz: hook 3: its max_norm is",
    ),
    "hooks": (change_nested("shard_0002.json", lambda c: c["hooks"].pop()), "its JSON others"),
    "names of hooks": (
        change_nested("shard_0002.json", lambda c: c["hooks"][0].update(name="blocks.4")),
        "has other hooks than its run",
    ),
}


@pytest.mark.parametrize("name", WRONG_JSONS)
def test_wrong_jsons_with_right_checksums(name, tmp_path, check):
    spoil, named = WRONG_JSONS[name]
    extract(tmp_path)
    spoil(tmp_path)
    assert named in "\n".join(check(tmp_path))


def of_records(change):
    """Applies `change` to the second record of every hook of the third shard."""

    def spoil(folder):
        def of_shard(shard):
            for records in shard.values():
                change(records[1])

        change_shard(folder, 3, of_shard)

    return spoil


WRONG_RECORDS = {
    "dtype": (
        lambda r: r.update(activation=r["activation"].astype(np.float64)),
        "sample 7: dtype float64, expected float32",
    ),
    "shape": (
        lambda r: r.update(activation=r["activation"][:, :-1]),
        "sample 7: shape (10, 15), expected (10, 16)",
    ),
    "told shape": (lambda r: r.update(shape=(9, HIDDEN)), "sample 7: shape"),
    "vocabulary": (
        lambda r: r.update(token_ids=r["token_ids"] + np.int32(50)),
        "sample 7: token ids outside the vocabulary",
    ),
    "negative id": (
        lambda r: r.update(token_ids=-1 - r["token_ids"]),
        "sample 7: token ids outside the vocabulary",
    ),
    "type of ids": (
        lambda r: r.update(token_ids=r["token_ids"].astype(np.int64)),
        "sample 7: token ids of dtype int64",
    ),
    "too long": (
        lambda r: r.update(
            activation=np.ones((11, HIDDEN), np.float32),
            token_ids=np.zeros(11, np.int32),
            shape=(11, HIDDEN),
        ),
        "sample 7: 11 tokens",
    ),
    "order": (lambda r: r.update(sample_idx=8), "its samples are not those of its JSON"),
    "text for a number": (lambda r: r.update(shape="x"), "sample 7: shape"),
    "field missing": (lambda r: r.pop("token_ids"), "its records are not as they should be"),
}


@pytest.mark.parametrize("name", WRONG_RECORDS)
def test_wrong_records_with_right_checksums(name, tmp_path, check):
    spoil, named = WRONG_RECORDS[name]
    extract(tmp_path)
    of_records(spoil)(tmp_path)
    found = check(tmp_path)
    assert named in "\n".join(found)
    assert any(problem.startswith("shard_0003.pkl.gz: ") for problem in found)


@pytest.mark.parametrize(
    "shard",
    [
        [],
        {3: {}, 5: {}},
        {3: [], 5: []},
        {3: [1, 2, 3], 5: [1, 2, 3]},
        {3: [{"sample_idx": 3}], 5: None},
        {"3": [], "5": []},
        "empty",
    ],
)
def test_shards_that_are_none(shard, tmp_path, check):
    extract(tmp_path)
    if shard == "empty":  # as many records, of nothing
        shard = load(tmp_path, 2)
        for record in (record for records in shard.values() for record in records):
            record |= {"activation": np.zeros((0, HIDDEN), np.float32), "shape": (0, HIDDEN)}
            record |= {"token_ids": np.zeros(0, np.int32)}
    replace_shard(tmp_path, 2, gzip.compress(pickle.dumps(shard, protocol=4)))
    found = check(tmp_path)
    assert found and all(problem.startswith("shard_0002.pkl.gz: ") for problem in found)


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
        if "shard_0001" in arguments[3].file:
            raise KeyboardInterrupt
        time.sleep(0.05)
        return [], []

    monkeypatch.setattr(verify_module, "_check_shard", slow)
    with pytest.raises(KeyboardInterrupt):
        check(tmp_path)
    assert len(checked) <= 10


# Recomputing, with the demo's model.


@pytest.fixture(scope="module")
def extracted(demo_inputs, tmp_path_factory):
    """12 samples at two layers: arguments that verify them, and the folder."""
    out = tmp_path_factory.mktemp("extracted")
    model = ["--model_path", demo_inputs / "model"]
    data = ["--dataset_path", demo_inputs / "documents.parquet", "--max_samples", 12]
    layers = ["--max_seq_length", 32, "--layers_to_extract", 0, 1, "--shard_size_gb", 1e-4]
    assert main(*model, *data, *layers, "--output_dir", out) == 0
    return out


def test_the_right_model_computes_the_same_again(extracted, demo_inputs, capsys):
    model = ["--model_path", demo_inputs / "model", "--max_seq_length", 64, "--batch_size", 2]
    assert main("--verify", *model, "--verify_samples", 5, "--output_dir", extracted) == 0
    assert "5 samples recomputed; 0 problem(s)" in capsys.readouterr().out


def other_model(demo_inputs, folder):
    shutil.copytree(demo_inputs / "model", folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name] * np.array(1.5, weights[name].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_another_model_is_refused_before_the_shards_are_read(
    extracted, demo_inputs, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(verify_module, "_check_shard", None)
    other_model(demo_inputs, tmp_path / "model")
    arguments = ["--verify", "--model_path", tmp_path / "model", "--output_dir", extracted]
    assert main(*arguments) == 2
    assert "is another model than the stored" in capsys.readouterr().err.splitlines()[-1]


def test_changed_activations_are_found_by_recomputing(extracted, demo_inputs, tmp_path, capsys):
    """Everything agrees with everything, but the numbers are not the model's."""
    out = tmp_path / "out"
    shutil.copytree(extracted, out)
    number = len(list(out.glob("shard_*.json")))

    def scale(shard):
        shard[1][-1]["activation"] *= np.float32(1.01)

    change_shard(out, number, scale)
    assert main("--verify", "--output_dir", out) == 0
    assert "nothing recomputed (give --model_path)" in capsys.readouterr().out
    arguments = ["--verify", "--model_path", demo_inputs / "model", "--output_dir", out]
    assert main(*arguments, "--verify_samples", 12) == 1
    first, summary = capsys.readouterr().out.splitlines()
    assert f"shard_{number:04d}.pkl.gz: sample 11, blocks.1.hook_resid_post: recomputed" in first
    assert "12 samples recomputed; 1 problem(s)" in summary


# Reading shards.


DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("doc_id", ["<urn:ä𝄞>", 7, -(2**70), 0.5, None, "x" * 70_000])
def test_what_we_write_is_read_back(dtype, doc_id, compress, tmp_path):
    values = np.random.default_rng(0).standard_normal((300, 64)).astype(dtype)
    with ActivationStorage(tmp_path, HOOKS, compress=compress) as storage:
        for sample, tokens in ((0, 300), (2**40, 1)):
            for key in HOOKS:
                token_ids = np.arange(tokens, dtype=np.int32)
                text = "Grüße, 世界 \u2028\n\0 𝄞" * sample.bit_length()
                storage.add_activation(key, values[:tokens] + key, sample, text, token_ids, doc_id)
    (path,) = tmp_path.glob("shard_0001.pkl*")
    found = read_shard(path, 10**6)
    expected = pickle.loads(gzip.decompress(path.read_bytes()) if compress else path.read_bytes())
    assert list(found) == list(expected) == list(HOOKS)
    for key in HOOKS:
        for ours, theirs in zip(found[key], expected[key], strict=True):
            assert list(ours) == list(theirs)
            for name in ("sample_idx", "shape", "text_preview", "doc_id"):
                assert ours[name] == theirs[name]
                assert type(ours[name]) is type(theirs[name])
            for name in ("activation", "token_ids"):
                assert type(ours[name]) is np.ndarray and ours[name].flags.writeable
                assert ours[name].dtype == theirs[name].dtype
                np.testing.assert_array_equal(ours[name], theirs[name])
    assert found[3][0]["activation"].dtype == dtype


class Gadget:
    """Pickles as a call."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def gadgets(path):
    """Name -> an object whose unpickling makes a file at `path`."""
    touch = f"open({str(path)!r}, 'w')"
    return {
        "os.system": Gadget(os.system, f"touch {path}"),
        "eval": Gadget(eval, touch),
        "exec": Gadget(exec, touch),
        "subprocess": Gadget(subprocess.check_call, ["touch", str(path)]),
        "open": Gadget(open, str(path), "w"),
        "getattr": Gadget(getattr, Gadget(__import__, "os"), "system"),
        "method of NumPy": Gadget(np.ndarray.tofile, np.zeros(1), str(path)),
        "objects in an array": np.array([Gadget(os.system, f"touch {path}")], dtype=object),
        "fields in an array": np.zeros(1, [("a", "f4")]),
        "array subclass": np.ma.masked_array([1.0]),
        "set": {1},
        "class": Gadget,
        "complex": 1j,
    }


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("name", gadgets(""))
def test_pickles_that_run_code_are_refused_and_do_not_run(name, protocol, tmp_path):
    ran = tmp_path / "ran"
    data = pickle.dumps(gadgets(ran)[name], protocol)
    path = tmp_path / "shard_0001.pkl"
    for nested in (False, True):
        if nested:
            data = pickle.dumps({3: [{"doc_id": gadgets(ran)[name]}]}, protocol)
        path.write_bytes(data)
        with pytest.raises(UnsafeError, match=r"^shard_0001.pkl: refused: ") as refused:
            read_shard(path, 10**6)
        assert "\n" not in str(refused.value)
    assert not ran.exists()


@pytest.mark.parametrize("name", gadgets(""))
def test_verify_refuses_them_too(name, tmp_path, check):
    """Under a JSON and metadata that agree with them."""
    extract(tmp_path)
    shard = load(tmp_path, 2)
    shard[5][1]["text_preview"] = gadgets(tmp_path / "ran")[name]
    replace_shard(tmp_path, 2, gzip.compress(pickle.dumps(shard, protocol=4)))
    (found,) = check(tmp_path)
    assert found.startswith("shard_0002.pkl.gz: refused: ")
    assert not (tmp_path / "ran").exists()


def name_of(module, name):
    return b"".join(b"\x8c" + bytes([len(part)]) + part for part in (module, name)) + b"\x93"


DTYPE, RECONSTRUCT = (
    name_of(b"numpy", b"dtype"),
    name_of(b"numpy._core.multiarray", b"_reconstruct"),
)
ARRAY, BFLOAT16 = name_of(b"numpy", b"ndarray"), name_of(b"ml_dtypes", b"bfloat16")
FLOAT32 = DTYPE + b"\x8c\x02f4\x85R"
EMPTY = RECONSTRUCT + ARRAY + b"K\x00\x85C\x01b\x87R"
BY_HAND = {
    "persistent id": b"\x80\x04}Q.",
    "persistent id, old": b"Pmy id\n.",
    "extension": b"\x80\x04\x82\xf0.",
    "extension of four bytes": b"\x80\x04\x84\xf0\0\0\0.",
    "INST": b"(S'touch ran'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'touch ran'\no.",
    "NEWOBJ": b"\x80\x04" + name_of(b"os", b"system") + b")\x81.",
    "NEWOBJ_EX": b"\x80\x04" + ARRAY + b")}\x92.",
    "a line in a name": b"\x80\x04" + name_of(b"a\nb\x1b[2J", b"\xed\xa0\x80") + b".",
    "attributes of a function": b"\x80\x04" + DTYPE + b"N}\x8c\x0c__defaults__)s\x86b.",
    "another bfloat16": b"\x80\x04" + BFLOAT16 + b"}\x8c\x05dtype" + FLOAT32 + b"sb.",
    "another float32": b"\x80\x04" + FLOAT32 + b"(K\x03\x8c\x01>NNNK\x00K\x00K\x3ftb.",
    "array of what": b"\x80\x04" + EMPTY + b"(K\x01K\x01\x85" + ARRAY + b"\x89C\x04abcdtb.",
    "array of a list": b"\x80\x04" + EMPTY + b"(K\x01K\x01\x85" + FLOAT32 + b"\x89]tb.",
    "array of addresses": b"\x80\x04" + DTYPE + b"\x8c\x02O8\x89\x88\x87R.",
    "not an empty array": b"\x80\x04" + RECONSTRUCT + ARRAY + b"K\x09\x85C\x01b\x87R.",
    "subclass of array": b"\x80\x04" + RECONSTRUCT + FLOAT32 + b"K\x00\x85C\x01b\x87R.",
}


@pytest.mark.parametrize("name", BY_HAND)
def test_pickles_made_by_hand_are_refused(name, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    copyreg.add_extension("os", "system", 0xF0)
    request.addfinalizer(lambda: copyreg.remove_extension("os", "system", 0xF0))
    path = tmp_path / "shard_0001.pkl"
    path.write_bytes(BY_HAND[name])
    with pytest.raises(UnsafeError, match=r"^shard_0001.pkl: refused: ") as refused:
        read_shard(path, 10**6)
    message = str(refused.value)
    assert message.isprintable() and len(message) < 200
    assert not (tmp_path / "ran").exists()
    # Nothing has changed for who comes next.
    write_shard(path, {0: [{"activation": np.ones((2, 2), ml_dtypes.bfloat16)}]}, False)  # type: ignore
    assert read_shard(path, 10**6)[0][0]["activation"].dtype == ml_dtypes.bfloat16
    assert np.frombuffer(b"\0\0\x80?", "f4") == 1


def test_references_to_outside_objects_are_refused(tmp_path):
    class Outside(pickle.Pickler):
        def persistent_id(self, found):
            return "outside" if isinstance(found, str) else None

    for protocol in range(6):
        file = io.BytesIO()
        Outside(file, protocol).dump({3: [{"doc_id": "x"}]})
        (tmp_path / "shard_0001.pkl").write_bytes(file.getvalue())
        with pytest.raises(UnsafeError, match="refused: "):
            read_shard(tmp_path / "shard_0001.pkl", 10**6)


HUGE = {
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", 2**40),
    "32-bit bytes": b"\x80\x04B" + struct.pack("<I", 2**32 - 1),
    "text": b"\x80\x04\x8d" + struct.pack("<Q", 2**40),
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", 2**40),
    "frame": b"\x80\x04\x95" + struct.pack("<Q", 2**40),
    "integer": b"\x80\x04\x8b" + struct.pack("<i", 2**31 - 1),
    "memo": b"\x80\x04}r" + struct.pack("<I", 2**24) + b".",  # in C: 256 MB, or 64 GB
    "memo in text": b"}p16777216\n.",
    "array": b"\x80\x04" + EMPTY + b"(K\x01\x8a\x06\0\0\0\0\0\x01\x85" + FLOAT32 + b"\x89C\0tb.",
    "line": b"I" + b"1" * 2_000_000,
}


def peak_of(action):
    """The most bytes that Python had allocated."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("name", HUGE)
def test_huge_claims_take_little_memory(name, compress, tmp_path):
    path = tmp_path / ("shard_0001.pkl.gz" if compress else "shard_0001.pkl")
    path.write_bytes(gzip.compress(HUGE[name]) if compress else HUGE[name])

    def refused():
        with pytest.raises(RunError, match="^shard_0001.pkl"):
            read_shard(path, 10**6)

    assert peak_of(refused) < 6 * 10**6


def test_a_decompression_bomb_takes_little_memory(tmp_path, check):
    extract(tmp_path)
    size = 25 * 2**20
    bomb = b"\x80\x04\x8e" + struct.pack("<Q", size) + bytes(size) + b"."
    many = b"\x80\x04](" + b"K\x00" * (size // 2) + b"e."
    for data in (bomb, many):
        replace_shard(tmp_path, 2, gzip.compress(data, 1))
        assert peak_of(lambda: read_shard_fails(tmp_path)) < 10**7
        assert check(tmp_path) == [
            "shard_0002.pkl.gz: unpacks to more than its JSON announces",
        ]


def read_shard_fails(folder):
    with pytest.raises(UnsafeError, match="unpacks to more"):
        read_shard(folder / "shard_0002.pkl.gz", 10**6)


def test_what_is_cut_short_or_no_pickle_is_told(tmp_path):
    extract(tmp_path)
    path = tmp_path / "shard_0001.pkl.gz"
    whole = path.read_bytes()
    for length in range(0, len(whole) - 60, 97):
        path.write_bytes(whole[:length])
        with pytest.raises(RunError, match="^shard_0001.pkl.gz: cannot be read: "):
            read_shard(path, 10**6)
    for data in (b"", b"garbage", gzip.compress(b""), gzip.compress(b"."), whole[::-1]):
        path.write_bytes(data)
        with pytest.raises(RunError, match="^shard_0001.pkl.gz: "):
            read_shard(path, 10**6)


def test_random_pickles_end_in_one_way(tmp_path):
    """Mutated shards: read, or refused with RunError; no other exception, nothing run."""
    extract(tmp_path, count=2)
    whole = gzip.decompress((tmp_path / "shard_0001.pkl.gz").read_bytes())
    path = tmp_path / "shard_0001.pkl"
    chance = np.random.default_rng(0)
    for _ in range(2000):
        data = bytearray(whole)
        for position in chance.integers(0, 500, chance.integers(1, 5)):
            data[position] = chance.integers(256)
        path.write_bytes(data)
        try:
            read_shard(path, 10**6)
        except RunError:
            pass


def test_verify_as_a_user_meets_it(tmp_path, capsys):
    assert main("--verify", "--output_dir", tmp_path) == 2
    assert main("--verify", "--output_dir", tmp_path / "nowhere") == 2
    assert main("--verify", "--output_dir", "nope://x") == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and all(line.startswith("error: ") for line in errors)
    assert "holds no extraction" in errors[0] and "nope" in errors[2]
    extract(tmp_path)
    for place in (tmp_path, f"file://{tmp_path}"):
        assert main("--verify", "--output_dir", place) == 0
        assert "in order: 1 folder(s), 4 shard(s), 10 samples" in capsys.readouterr().out
    flip(tmp_path / "shard_0001.pkl.gz", 50)
    assert main("--verify", "--output_dir", tmp_path) == 1
    assert "shard_0001.pkl.gz: " in capsys.readouterr().out


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
