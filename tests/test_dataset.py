"""ActivationDataset: every value that it reads is the one that was stored."""

import ctypes
import pickle
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import extractions
import numpy as np
import pytest
from cloud import REPOSITORY
from extractions import (
    HOOKS,
    activations_of,
    edit,
    extract,
    identity_of,
    shard_file,
    upload,
)
from runs_to_read import (
    DTYPES,
    FORMATS,
    WIDTHS,
    activation_of,
    assert_same,
    check_samples,
    in_order,
    joined,
    make_run,
    store,
    stored_tokens,
)
from storages import open_storage

import activation_extraction
from activation_extraction import ActivationDataset
from activation_extraction.dataset import open_shards
from activation_extraction.store.folder import Folder
from activation_extraction.text.batch import Cursor, Sample
from activation_extraction.text.packing import pack

FIRST, HOOK = next(iter(WIDTHS)), HOOKS[3]
FILES = [("pickle", True), ("pickle", False), ("safetensors", False)]
KINDS = [(shard_format, dtype) for shard_format in FORMATS for dtype in DTYPES]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(kind))
def run(request, tmp_path_factory):
    """A machine with two hosts and a machine with one, in every format and dtype."""
    return make_run(tmp_path_factory.mktemp("run"), *request.param, count=12, machines=(2, 1))


@pytest.fixture(scope="module", params=FORMATS)
def small(request, tmp_path_factory):
    """A run on one machine, in every format."""
    return make_run(tmp_path_factory.mktemp("small"), request.param)


@pytest.fixture
def copy(small, tmp_path):
    """A copy of the run on one machine, to be damaged."""
    shutil.copytree(small.root, tmp_path / "copy")
    return tmp_path / "copy"


def test_every_sample_and_every_token_is_what_was_stored(run):
    dataset = ActivationDataset(run.root)
    assert dataset.hooks == WIDTHS and dataset.dtype == run.dtype
    check_samples(dataset, run)
    for hooks in ([FIRST], list(WIDTHS)[::-1]):
        selected = ActivationDataset(f"file://{run.root}", hooks)
        assert selected.hooks == {hook: WIDTHS[hook] for hook in hooks}
        check_samples(selected, run, hooks)
    expected = stored_tokens(run)
    assert dataset.tokens == len(expected["position"])
    assert_same(joined(dataset.batches(50)), expected)
    for hooks in ([FIRST], list(WIDTHS)[:0:-1]):
        shuffled = joined(dataset.batches(50, hooks=hooks, shuffle=1, buffer=150), hooks)
        assert not np.array_equal(shuffled["sample_idx"], expected["sample_idx"])
        assert_same(in_order(shuffled), in_order({name: expected[name] for name in shuffled}))


def test_random_access_and_slices(small):
    dataset = ActivationDataset(small.root)
    for number in range(-20, 20):
        assert dataset[number].sample_idx == small.indices[number]
        expected = activation_of(small.indices[number], FIRST, "float32")
        assert_same({"": dataset[number][FIRST]}, {"": expected})
    for piece in (slice(3, 9), slice(None, None, -7), slice(15, 99), slice(5, 5)):
        assert [s.sample_idx for s in dataset[piece]] == small.indices[piece]
    for number in (20, -21):
        with pytest.raises(IndexError, match=f"sample {number}: the dataset has 20 samples"):
            dataset[number]
    dataset[0][FIRST][:] = 0  # a copy: what is stored stays
    assert dataset[0][FIRST].any()


def test_statistics_and_the_table_of_samples_take_no_activations(run, monkeypatch):
    expected = list(ActivationDataset(run.root))
    dataset = ActivationDataset(run.root, list(WIDTHS)[1:])
    monkeypatch.setattr(open_shards, "open_shard", None)
    assert list(dataset.statistics) == list(WIDTHS)[1:]
    for hook, found in dataset.statistics.items():
        values = np.concatenate([sample[hook] for sample in expected]).astype(np.float64)
        norms = np.linalg.norm(values, axis=1)
        assert (found.tokens, found.max_norm) == (len(values), pytest.approx(norms.max(), rel=1e-6))
        assert found.mean_norm == pytest.approx(norms.mean(), rel=1e-6)
        assert found.overall_variance == pytest.approx(values.var(), rel=1e-6)
    table = dataset.samples
    assert table["tokens"].to_pylist() == [len(sample.token_ids) for sample in expected]
    for name in ("sample_idx", "doc_id", "row", "cut", "text_preview"):
        assert table[name].to_pylist() == [getattr(sample, name) for sample in expected], name
    assert dataset.tokenizer_path == "some/model"
    assert dataset.metadata["status"] == "complete" and dataset.complete


def test_every_promised_name_is_there_with_its_documentation():
    for name in set(activation_extraction.__all__) - {"ROLES"}:
        found = getattr(activation_extraction, name)
        assert found.__name__ == name and len(found.__doc__) > 40
    with pytest.raises(AttributeError, match="has no attribute 'Dataset'"):
        print(activation_extraction.Dataset)


def test_a_run_that_is_still_going_on(tmp_path):
    """A machine of three has finished, one is at work, one has not started."""
    store(tmp_path / "begun", count=0, finish=False)
    dataset = ActivationDataset(tmp_path / "begun")
    assert len(dataset) == dataset.tokens == 0 and dataset.hooks == WIDTHS
    assert list(dataset) == list(dataset.batches(8)) == []
    store(tmp_path / "run", part=(0, 0, 3, 1), count=4)
    store(tmp_path / "run", part=(1, 0, 3, 1), finish=False)
    dataset = ActivationDataset(tmp_path / "run")
    assert not dataset.complete
    stored = [sample.sample_idx for sample in dataset]
    assert stored[:4] == [0, 3, 6, 9] and 0 < len(stored[4:]) < 20
    assert stored[4:] == [1 + 3 * n for n in range(len(stored) - 4)]
    assert sum(len(batch) for batch in dataset.batches(9)) == dataset.tokens


def test_a_shard_without_samples_is_passed_over(copy, small):
    """--repair leaves one where other shards have all that it held."""
    number = len(list(copy.glob("shard_*.json"))) + 1
    shutil.copy(copy / "shard_0001.json", copy / f"shard_{number:04d}.json")
    nothing = {"file": "", "files": {}, "samples": {"first": 0, "last": 0, "count": 0}}
    nothing |= {"number": number, "tokens": 0, "unpacked": 0, "hooks": []}
    edit(copy / f"shard_{number:04d}.json", lambda content: content.update(nothing))
    edit(copy / "metadata.json", lambda content: content.update(shards=number))
    dataset = ActivationDataset(copy)
    check_samples(dataset, small)
    assert dataset.samples["sample_idx"].to_pylist() == small.indices
    assert_same(joined(dataset.batches(50)), stored_tokens(small))


PIECES = 4  # of each document, of 1 to 4 tokens


def store_pieces(root, numbers, shard_format="safetensors", finish=True):
    """One sample after the other, as if they had been packed so."""
    with open_storage(
        root / "machine_001", {0: "h"}, identity=identity_of(1, 0, 2, 1),
        shard_format=shard_format, shard_size_gb=8e-8, hook_facts={0: {"width": 2}},
    ) as storage:  # fmt: skip
        for number in numbers:
            document, piece = divmod(number, PIECES)
            token_ids = np.arange(1 + number % 3, dtype=np.int32) + 10 * number
            row = {"line": document, "piece": piece, "start": 5 * piece}
            known = 2 * number + 1, token_ids, "", document, Cursor(number), Cursor(number + 1)
            cut = 7 * (piece == PIECES - 1)
            (batch,) = pack([Sample(*known, row, cut=cut)], 1, 4)
            storage.add_batch(batch, {0: np.full((1, 4, 2), number, np.float32)})
        storage.finalize(complete=finish)


@pytest.mark.parametrize("shard_format", FORMATS)
def test_the_pieces_of_a_document_may_lie_in_any_shards(tmp_path, shard_format):
    order = [7, 0, 2, 9, 4, 5, 1, 11, 3, 8, 6, 10]
    store_pieces(tmp_path, order, shard_format)
    dataset = ActivationDataset(tmp_path)
    spans = [(commit.first, commit.last) for commit in dataset.shards.commits]
    assert any(later[0] < earlier[1] for earlier, later in pairwise(spans))
    found = dataset.samples["sample_idx"].to_pylist()
    assert found == [sample.sample_idx for sample in dataset]
    assert sorted(found) == [2 * number + 1 for number in range(12)]
    tokens = joined(dataset.batches(5), ["h"])
    assert list(dict.fromkeys(tokens["sample_idx"].tolist())) == found  # the order of the shards
    np.testing.assert_array_equal(tokens["sample_idx"], 2 * (tokens["token_ids"] // 10) + 1)
    np.testing.assert_array_equal(tokens["h"][:, 0], tokens["token_ids"] // 10)
    for index, sample_idx in enumerate(found):
        whole, document = dataset.document(index), (sample_idx - 1) // 2 // PIECES
        numbers = range(PIECES * document, PIECES * (document + 1))
        parts = [10 * number + np.arange(1 + number % 3) for number in numbers]
        assert whole.token_ids.tolist() == np.concatenate(parts).tolist()
        at = [5 * piece + np.arange(len(part)) for piece, part in enumerate(parts)]
        assert whole.position.tolist() == np.concatenate(at).tolist()
        assert whole.sample_idx == 2 * numbers[0] + 1 and whole.row["piece"] == 0
        assert whole.cut == 7


def test_a_document_of_which_pieces_are_missing(tmp_path):
    goes_on, lost = "not stored yet; the run goes on", "of which piece 1 is missing"
    for order, finish, told in (
        ([9, 0, 1, 2, 3, 4, 5, 6, 7, 8], False, {8: goes_on, 9: goes_on}),
        ([9, 0, 1, 2, 3, 4, 6, 7, 8], True, {6: lost, 7: lost}),
    ):
        store_pieces(tmp_path / str(finish), order, finish=finish)
        dataset = ActivationDataset(tmp_path / str(finish))
        for index, sample_idx in enumerate(dataset.samples["sample_idx"].to_pylist()):
            if (number := (sample_idx - 1) // 2) in told:
                with pytest.raises(ValueError, match=told[number]):
                    dataset.document(index)
            else:
                assert dataset.document(index).row["line"] == number // PIECES


def test_a_copy_in_another_process_reads_the_same(small):
    dataset = ActivationDataset(small.root)
    assert dataset.samples.num_rows == 20 and dataset.statistics[FIRST].mean.size
    check_samples(pickle.loads(pickle.dumps(dataset)), small)


@pytest.mark.parametrize("shard_format", FORMATS)
def test_from_a_bucket(shard_format, tmp_path, bucket):
    run = make_run(tmp_path, shard_format, "bfloat16", count=12, machines=(2, 1))
    upload(run.root, "gs://bucket/some/run")
    dataset = ActivationDataset("gs://bucket/some/run")
    check_samples(dataset, run)
    found = joined(dataset.batches(64, shuffle=0))
    assert_same(in_order(found), in_order(stored_tokens(run)))


def test_one_hook_of_many_takes_little_more_than_its_bytes(tmp_path, bucket):
    """Whole MiB are read: those in which the hook begins and ends, and those of the header and the
    tokens. All is asked for once."""
    hooks = {layer: f"blocks.{layer}.hook_mlp_out" for layer in range(5)}
    run = make_run(tmp_path, "safetensors", "float16", count=1000, hooks=hooks, shard_size_gb=2e-2)
    upload(run.root, "gs://bucket/run")
    dataset = ActivationDataset("gs://bucket/run")
    bucket.served = 0
    found = joined(dataset.batches(100, hooks=[hooks[3]], shuffle=0), [hooks[3]])[hooks[3]]
    assert len(found) == dataset.tokens
    shards = len(dataset.shards.commits)
    assert 2 == shards and found.nbytes <= bucket.served <= found.nbytes + shards * 3 * 2**20
    # Of a sample, only what is said of the tokens of its shard, and the MiB in which it lies.
    dataset, bucket.served = ActivationDataset("gs://bucket/run"), 0
    one = dataset.batches(100, hooks=[hooks[3]], where=[n == 700 for n in range(1000)])
    assert [set(batch.sample_idx) for batch in one] == [{700}]
    assert 0 < bucket.served <= 3 * 2**20


@pytest.mark.parametrize("shuffle,most,ranges", [(0, 10, 1), (0, 30, 3), (None, 30, 2)])
def test_a_shard_is_read_in_equal_ranges(shuffle, most, ranges, tmp_path, bucket):
    """Ranges have about 8 MiB; in order they are larger, so that fewer MiB are read twice."""
    hooks = {0: "blocks.0.hook_mlp_out"}
    options = dict(count=2100, hooks=hooks, shard_size_gb=most / 1000)
    make_run(tmp_path, "safetensors", "float32", **options)
    upload(tmp_path, "gs://bucket/run")
    dataset = ActivationDataset("gs://bucket/run")
    bucket.asked.clear()
    assert sum(map(len, dataset.batches(1000, shuffle=shuffle))) == dataset.tokens
    asked = [name for _, name in bucket.asked if name == "run/shard_0001.safetensors"]
    assert len(asked) == 1 + ranges  # the first is for what it says of its tokens


MAPPED = """
import ctypes
import numpy as np
from activation_extraction.store.shard_reader import request_threads
class Mallinfo(ctypes.Structure):
    _fields_ = [("values", ctypes.c_size_t * 10)]
count = ctypes.CDLL(None).mallinfo2
count.restype = Mallinfo
{}
before = count().values[3]
block = np.empty(20 * 2**20, np.uint8)
print(count().values[3] > before)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="not glibc")
@pytest.mark.parametrize("requests,mapped", [("", "True"), ("request_threads(1)", "False")])
def test_ranges_are_received_in_memory_that_was_used_before(requests, mapped):
    """Such memory comes from glibc's heap, and not from a mapping, whose pages would all be new."""
    command = [sys.executable, "-c", MAPPED.format(requests)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=600)
    assert (done.stdout.strip(), done.stderr) == (mapped, "")


def test_damage_is_found_in_a_bucket(tmp_path, bucket):
    make_run(tmp_path, "safetensors", count=400, shard_size_gb=0.1)
    path = shard_file(tmp_path, 1)
    data = path.read_bytes()
    path.write_bytes(data[:-1000] + bytes(400) + data[-600:])
    upload(tmp_path, "gs://bucket/run")
    told = "shard_0001.safetensors: is damaged in MiB 1: its crc32c is not the one in its JSON"
    with pytest.raises(OSError, match=told):
        list(ActivationDataset("gs://bucket/run").batches(8))


def test_a_shard_is_opened_once_for_all_threads_and_again_after_a_failure(tmp_path, monkeypatch):
    dataset = ActivationDataset(make_run(tmp_path, "safetensors").root)
    original, opened, failing = open_shards.open_shard, [], [True]

    def count(folder, commit, hooks):
        opened.append(commit.number)
        time.sleep(0.02)
        if commit.number == 3 and failing and failing.pop():
            raise OSError("the network is gone")
        return original(folder, commit, hooks)

    monkeypatch.setattr(open_shards, "open_shard", count)
    with ThreadPoolExecutor(8) as pool:
        readers = list(pool.map(dataset.shards.get, [0, 1, 0, 1, 0, 1]))
    assert sorted(opened) == [1, 2] and len(set(map(id, readers))) == 2
    with pytest.raises(OSError, match="the network is gone"):
        dataset.shards.get(2)
    assert dataset.shards.get(2) is dataset.shards.get(2)
    assert opened[2:] == [3, 3]


@pytest.mark.parametrize("mib,kept", [(256, 256), (1, 1), (0, 1)])
def test_what_stays_in_memory_of_shards_in_a_bucket_has_a_ceiling(mib, kept, tmp_path, monkeypatch):
    make_run(tmp_path, "safetensors", shard_size_gb=1)
    (shards := ActivationDataset(tmp_path).shards).local = False
    monkeypatch.setattr(open_shards, "KEPT_BYTES", mib * 2**20)
    assert pickle.loads(pickle.dumps(shards))._open.cache_info().maxsize == kept


# What goes wrong.


def test_an_unknown_hook_is_told_with_the_list_of_hooks(small):
    dataset, every = ActivationDataset(small.root), re.escape(", ".join(WIDTHS))
    for read, told in (
        (lambda: ActivationDataset(small.root, [FIRST, "x"]), f"has no hook 'x'; it has {every}"),
        (lambda: dataset.batches(8, hooks=["x"]), f"has no hook 'x'; it has {every}"),
        (lambda: ActivationDataset(small.root, []), "no hook is asked for"),
    ):
        with pytest.raises(ValueError, match=told):
            read()


def test_shards_that_are_missing_or_cut_short(copy):
    path, last = shard_file(copy, 2), len(list(copy.glob("shard_*.json")))
    whole = path.read_bytes()
    for data in (whole[:-1], b"", None):
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(OSError, match=f"{path.name}: is missing or cut short; --repair"):
            ActivationDataset(copy)
    path.write_bytes(whole)
    for name in (f"shard_{last:04d}.json", "shard_0002.json", "metadata.json"):
        (copy / name).unlink()
        with pytest.raises(OSError, match=f"{name}: is missing; --repair"):
            ActivationDataset(copy)


def test_a_shard_that_goes_away_later(copy):
    dataset, path = ActivationDataset(copy), shard_file(copy, 1)
    path.write_bytes(path.read_bytes()[:-1])
    for read in (lambda: dataset[0], lambda: list(dataset.batches(8))):
        with pytest.raises(OSError, match=rf"{path.name}: has \d+ bytes, its JSON"):
            read()
    path.unlink()
    with pytest.raises(OSError, match=f"{path.name}: is missing; the run was overwritten"):
        dataset[0]
    for path in [*copy.glob("*.pkl.gz"), *copy.glob("*.safetensors")]:
        path.unlink()
    edit(copy / "metadata.json", lambda content: content.update(remote="gs://bucket/run"))
    with pytest.raises(OSError, match="the shards were uploaded to gs://bucket/run"):
        ActivationDataset(copy)


@pytest.mark.parametrize("shard_format", FORMATS)
def test_a_run_that_is_overwritten_while_it_is_read(tmp_path, shard_format, bucket, monkeypatch):
    """Every file has the size that it had; the reader that opened the run before does not take the
    values of one for those of the other."""
    options, plain = dict(shard_format=shard_format, compress_shards=False), activations_of
    for url, remote in (
        (tmp_path / "run", None),
        ("gs://bucket/run", Folder("gs://bucket/run")),
    ):
        output = tmp_path / ("beside" if remote else "run")
        extract(output, remote=remote, **options)
        datasets = [ActivationDataset(url) for _ in range(2)]
        with monkeypatch.context() as other:
            other.setattr(
                extractions, "activations_of", lambda b: {k: -v for k, v in plain(b).items()}
            )
            extract(output, remote=remote, overwrite=True, **options)
        told = "shard_0001.*: the run was overwritten or repaired"
        for read in (lambda d=datasets[0]: d[0], lambda d=datasets[1]: next(d.batches(8))):
            with pytest.raises(OSError, match=told):
                read()
        assert len(ActivationDataset(url)[0].token_ids) == 10


def test_folders_of_different_runs(tmp_path):
    def part(*of_run, dtype="float32", name=None):
        store(tmp_path / "other", dtype, part=of_run, count=3)
        (folder,) = (tmp_path / "other").iterdir()
        folder.rename(tmp_path / (name or folder.name))

    part(0, 0, 2, 1)
    for of_run, options, told in (
        ((1, 0, 2, 1), {"dtype": "float16"}, "its activation_dtype is float16, but float32 in mac"),
        ((5, 0, 6, 1), {}, "machine_005: holds shards that are not part of this run"),
        ((0, 1, 2, 2), {}, "machine_000_host_01: holds shards that are not part of this run"),
        ((0, 0, 2, 1), {"name": "machine_001"}, "machine_001: holds the shards of machine_000"),
    ):
        part(*of_run, **options)
        with pytest.raises(ValueError, match=told):
            ActivationDataset(tmp_path)
        for folder in tmp_path.glob("machine_*"):
            if folder.name != "machine_000":
                shutil.rmtree(folder)
    shutil.rmtree(tmp_path / "machine_000")
    part(0, 0, 1, 3)
    part(0, 1, 1, 2)
    with pytest.raises(ValueError, match="machine_000_host_01: .* its num_hosts differs"):
        ActivationDataset(tmp_path)


@pytest.mark.parametrize("shard_format,compress", FILES)
def test_a_bit_of_an_activation_that_has_changed_is_found(tmp_path, check, shard_format, compress):
    extract(tmp_path, shard_format=shard_format, compress_shards=compress)
    expected = ActivationDataset(tmp_path)[0][HOOK]
    path = shard_file(tmp_path, 1)
    data = bytearray(path.read_bytes())
    position = data.find(expected.tobytes()[:64]) if not compress else len(data) // 2
    assert position > 0
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(OSError, match=f"{path.name}: is damaged in MiB 0: its crc32c is not the"):
        ActivationDataset(tmp_path)[0]
    (problem,) = check(tmp_path)
    assert problem.startswith(f"{path.name}: ")
    path.write_bytes(data[:-1])
    with pytest.raises(OSError, match=f"{path.name}: is missing or cut short"):
        ActivationDataset(tmp_path)


def test_flipped_bytes_in_the_header_of_a_safetensors_shard_raise(tmp_path):
    """It decides what is read where."""
    run, path = make_run(tmp_path, "safetensors", count=4), shard_file(tmp_path, 1)
    whole, expected, raised = path.read_bytes(), stored_tokens(run), 0
    positions = range(0, 8 + int.from_bytes(whole[:8], "little"), 5)
    for position in positions:
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        try:
            found = joined(ActivationDataset(tmp_path).batches(8))
        except OSError as error:
            raised += 1
            assert path.name in str(error)
        else:  # such as a space in the padding that became a tab
            assert_same(found, expected)
    assert raised > len(positions) // 5


# What is read, and what is imported.


READ = """
import logging, sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "torch", "tqdm", "safetensors", "datasets", "gcsfs"):
            raise ImportError(name)
sys.meta_path.insert(0, Refused())
import activation_extraction
assert "numpy" not in sys.modules
loggers = [logging.getLogger(name) for name in (None, "gcsfs", "fsspec", "huggingface_hub")]
before = [([*each.handlers], each.level, each.propagate) for each in loggers]
from activation_extraction import ActivationDataset, ActivationStorage
dataset = ActivationDataset(sys.argv[1])
print(sum(len(batch) for batch in dataset.batches(16, shuffle=0)) - dataset.tokens)
assert before == [(each.handlers, each.level, each.propagate) for each in loggers]
"""


def test_reading_needs_few_packages_and_changes_nothing_in_the_process(small):
    command = [sys.executable, "-c", READ, str(small.root)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n", "")
