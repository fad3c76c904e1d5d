"""ActivationDataset: every value that it reads is the one that was stored."""

import os
import pickle
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from cloud import REPOSITORY
from extractions import HOOKS, edit, extract, merge_all, shard_file, statistics_of
from runs_to_read import (
    DTYPES,
    FORMATS,
    WIDTHS,
    activation_of,
    agree,
    assert_same,
    check_samples,
    in_order,
    joined,
    make_run,
    store,
    stored_tokens,
    tokens_of,
)
from storages import open_storage

import activation_extraction
from activation_extraction import ActivationDataset
from activation_extraction.cli.parser import build_parser
from activation_extraction.dataset import open_shards

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


def test_every_sample_is_what_was_stored(run):
    dataset = ActivationDataset(run.root)
    assert dataset.hooks == WIDTHS and dataset.dtype == run.dtype
    assert dataset.tokens == sum(len(tokens_of(index)) for index in run.indices)
    check_samples(dataset, run)
    for hooks in ([FIRST], list(WIDTHS)[::-1]):
        selected = ActivationDataset(f"file://{run.root}", hooks)
        assert selected.hooks == {hook: WIDTHS[hook] for hook in hooks}
        check_samples(selected, run, hooks)


def test_every_token_of_the_batches_is_what_was_stored(run):
    dataset = ActivationDataset(run.root)
    expected = stored_tokens(run)
    assert_same(joined(dataset.batches(50)), expected)
    for hooks in ([FIRST], list(WIDTHS)[:0:-1]):
        shuffled = joined(dataset.batches(50, hooks=hooks, shuffle=1, buffer=150), hooks)
        assert not np.array_equal(shuffled["sample_idx"], expected["sample_idx"])
        assert_same(in_order(shuffled), in_order({name: expected[name] for name in shuffled}))


def test_random_access_and_slices(small):
    dataset = ActivationDataset(small.root)
    for number in np.random.default_rng(0).integers(-20, 20, 30):
        sample = dataset[int(number)]
        index = small.indices[number]
        assert sample.sample_idx == index
        assert_same({"": sample[FIRST]}, {"": activation_of(index, FIRST, "float32")})
    for piece in (slice(3, 9), slice(None, None, -7), slice(15, 99), slice(5, 5)):
        assert [s.sample_idx for s in dataset[piece]] == small.indices[piece]
    for number in (20, -21):
        with pytest.raises(IndexError, match=f"sample {number}: the dataset has 20 samples"):
            dataset[number]
    sample = dataset[0]
    sample[FIRST][:] = 0  # a copy: what is stored stays
    assert dataset[0][FIRST].any()


def test_statistics_and_metadata_are_those_of_the_json_files(run, monkeypatch):
    dataset = ActivationDataset(run.root, list(WIDTHS)[1:])
    monkeypatch.setattr(open_shards, "open_shard", None)
    assert list(dataset.statistics) == list(WIDTHS)[1:]
    for hook, found in dataset.statistics.items():
        parts = (statistics_of(activation_of(index, hook, run.dtype)) for index in run.indices)
        for what, value in merge_all(parts).to_json().items():
            name = f"overall_{what}" if what in ("mean", "variance") else what
            assert getattr(found, name) == pytest.approx(value, rel=1e-9)
    assert dataset.tokenizer_path == "some/model"
    assert dataset.metadata["status"] == "complete" and dataset.complete


def test_the_table_of_samples_takes_no_activations(run, monkeypatch):
    dataset = ActivationDataset(run.root)
    expected = list(dataset)
    monkeypatch.setattr(open_shards, "open_shard", None)
    found = ActivationDataset(run.root).samples
    assert found["sample_idx"].to_pylist() == [sample.sample_idx for sample in expected]
    assert found["tokens"].to_pylist() == [len(sample.token_ids) for sample in expected]
    for name in ("doc_id", "row", "cut", "text_preview"):
        assert found[name].to_pylist() == [getattr(sample, name) for sample in expected], name


def test_strange_ids_and_rows_are_texts_in_the_table_of_samples(tmp_path):
    rows: list = [{"a": 1}, {"a": "\udce9"}, None, {str(n): n for n in range(60)}, {"x": 2**70}]
    with open_storage(tmp_path, {0: "h"}, hook_facts={0: {"width": 2}}) as storage:
        for number, row in enumerate(rows):
            values, ids = np.zeros((1, 2), np.float32), np.zeros(1, np.int32)
            storage.add_activation(0, values, number, "", ids, 2**63 + number, row)
    dataset = ActivationDataset(tmp_path)
    found = dataset.samples
    assert found["doc_id"].to_pylist() == [2**63 + number for number in range(5)]
    assert found["row"].to_pylist()[:3] == ['{"a": 1}', '{"a": "\\udce9"}', None]
    assert [sample.row for sample in dataset] == rows
    assert "samples" not in vars(pickle.loads(pickle.dumps(dataset)))  # is read there again


def test_every_promised_name_is_there_with_its_documentation():
    assert activation_extraction.ROLES[3] == "assistant"  # a tuple, explained in TokenBatch
    for name in set(activation_extraction.__all__) - {"ROLES"}:
        found = getattr(activation_extraction, name)
        assert found.__name__ == name and len(found.__doc__) > 40
    with pytest.raises(AttributeError, match="has no attribute 'Dataset'"):
        print(activation_extraction.Dataset)


def test_the_table_of_samples_says_what_it_needs(small, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match="needs pyarrow: pip install pyarrow"):
        print(ActivationDataset(small.root).samples)


def test_ids_of_several_types_are_texts_in_the_table_of_samples(tmp_path):
    ids = [7, None, "x", "\ud800", 1.5]
    with open_storage(tmp_path, {0: "h"}, hook_facts={0: {"width": 2}}) as storage:
        for number, doc_id in enumerate(ids):
            storage.add_activation(0, np.zeros((1, 2), np.float32), number, "", None, doc_id)
    assert ActivationDataset(tmp_path).samples["doc_id"].to_pylist() == ["7", None, "x", "?", "1.5"]
    (tmp_path / "shard_0001.samples.jsonl.gz").unlink()
    with pytest.raises(OSError, match="shard_0001.samples.jsonl.gz: is missing"):
        print(ActivationDataset(tmp_path).samples)


def test_a_run_that_is_still_going_on(tmp_path):
    """A machine of three has finished, one is at work, one has not started."""
    store(tmp_path, part=(0, 0, 3, 1), count=4)
    store(tmp_path, part=(1, 0, 3, 1), finish=False)
    dataset = ActivationDataset(tmp_path)
    assert not dataset.complete
    stored = [sample.sample_idx for sample in dataset]
    assert stored[:4] == [0, 3, 6, 9] and 0 < len(stored[4:]) < 20
    assert stored[4:] == [1 + 3 * n for n in range(len(stored) - 4)]
    assert sum(len(batch) for batch in dataset.batches(9)) == dataset.tokens


def test_a_run_that_has_stored_nothing_yet(tmp_path):
    store(tmp_path, count=0, finish=False)
    dataset = ActivationDataset(tmp_path)
    assert len(dataset) == dataset.tokens == 0 and dataset.hooks == WIDTHS
    assert list(dataset) == list(dataset.batches(8)) == []


def test_an_older_run_without_widths(copy, small):
    def forget(content):
        for hook in content["hooks"]:
            del hook["width"]

    edit(copy / "metadata.json", forget)
    assert ActivationDataset(copy, FIRST).hooks == {FIRST: 16}
    check_samples(ActivationDataset(copy, FIRST), small, [FIRST])


def test_a_copy_in_another_process_reads_the_same(small):
    dataset = ActivationDataset(small.root)
    dataset[0]
    check_samples(pickle.loads(pickle.dumps(dataset)), small)


# What goes wrong.


@pytest.mark.parametrize("place", ["", "nowhere", "nope://x"])
def test_there_is_no_run(tmp_path, place):
    named = place or re.escape(str(tmp_path))
    with pytest.raises(ValueError, match=f"{named}: (holds no extraction|Protocol not known)"):
        ActivationDataset(place if "://" in place else tmp_path / place)


def test_an_unknown_hook_is_told_with_the_list_of_hooks(small):
    expected = "has no hook 'blocks.9'; it has " + re.escape(", ".join(WIDTHS))
    with pytest.raises(ValueError, match=expected):
        ActivationDataset(small.root, [FIRST, "blocks.9"])
    with pytest.raises(ValueError, match=expected):
        ActivationDataset(small.root).batches(8, hooks=["blocks.9"])
    with pytest.raises(ValueError, match=f"has no hook '{FIRST}'; it has blocks.4"):
        ActivationDataset(small.root, list(WIDTHS)[1:]).batches(8, hooks=FIRST)
    with pytest.raises(ValueError, match="no hook is asked for"):
        ActivationDataset(small.root, [])


def test_shards_that_are_missing_or_cut_short(copy):
    path = shard_file(copy, 2)
    whole = path.read_bytes()
    for data in (whole[:-1], b"", None):
        path.unlink()
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(ValueError, match=f"{path.name}: is missing or cut short$"):
            ActivationDataset(copy)
    for number, named in ((2, "shard 2 is missing"), (3, "shard 2 is missing")):
        (copy / f"shard_{number:04d}.json").unlink()
        with pytest.raises(ValueError, match=named):
            ActivationDataset(copy)
    last = sorted(copy.glob("shard_*.json"))[-1]
    last.unlink()
    with pytest.raises(ValueError, match="shard 2 is missing"):
        ActivationDataset(copy)


def test_a_shard_that_goes_away_later(copy):
    dataset = ActivationDataset(copy)
    path = shard_file(copy, 1)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    for read in (lambda: dataset[0], lambda: list(dataset.batches(8))):
        with pytest.raises(OSError, match=f"{path.name}: has {len(whole) - 1} bytes, its JSON"):
            read()
    path.unlink()
    with pytest.raises(OSError, match=f"{path.name}: cannot be read: No such file"):
        dataset[0]


def test_shards_that_were_uploaded_and_deleted_here(copy):
    edit(copy / "metadata.json", lambda content: content.update(remote="gs://bucket/run"))
    for path in copy.glob("shard_*[!n]"):
        path.unlink()
    for path in copy.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ValueError, match="the shards were uploaded to gs://bucket/run"):
        ActivationDataset(copy)


def test_damaged_and_unknown_json_files(copy):
    for name in ("metadata.json", "shard_0002.json"):
        path = copy / name
        whole = path.read_bytes()
        path.write_bytes(whole[:-9])
        with pytest.raises(ValueError, match=f"{name}: is damaged"):
            ActivationDataset(copy)
        path.write_bytes(whole)
        edit(path, lambda content: content.update(format_version=99))
        with pytest.raises(ValueError, match=f"{name}: was written by another version"):
            ActivationDataset(copy)
        path.write_bytes(whole)
    (copy / "metadata.json").unlink()
    with pytest.raises(ValueError, match="metadata.json: is missing"):
        ActivationDataset(copy)


def test_folders_of_different_runs(tmp_path):
    store(tmp_path, part=(0, 0, 2, 1), count=3)
    store(tmp_path, "float16", part=(1, 0, 2, 1), count=3)
    with pytest.raises(ValueError, match="different runs: their activation_dtype differs"):
        ActivationDataset(tmp_path)
    shutil.rmtree(tmp_path / "machine_001")
    store(tmp_path / "more", part=(5, 0, 6, 1), count=3)
    (tmp_path / "more" / "machine_005").rename(tmp_path / "machine_005")
    with pytest.raises(ValueError, match="machine_005 is not part of the same run"):
        ActivationDataset(tmp_path)


def test_flipped_bytes_in_a_pickle_raise(tmp_path):
    make_run(tmp_path, "pickle", count=4)
    path = shard_file(tmp_path, 1)
    dataset = ActivationDataset(tmp_path)
    whole = path.read_bytes()
    for position in {0, len(whole) - 1, *range(4, len(whole), len(whole) // 40)}:
        data = bytearray(whole)
        data[position] ^= 1 << position % 8
        path.write_bytes(data)
        with pytest.raises(OSError, match=path.name):
            next(dataset.batches(8))
    path.write_bytes(whole)
    next(dataset.batches(8))


@pytest.mark.parametrize("shard_format,compress", FILES)
def test_what_reading_checks_and_what_only_verify_does(tmp_path, check, shard_format, compress):
    """A bit of an activation: pickles are read whole, and of safetensors only what is asked for."""
    extract(tmp_path, shard_format=shard_format, compress_shards=compress)
    expected = ActivationDataset(tmp_path)[0][HOOK]
    path = shard_file(tmp_path, 1)
    data = bytearray(path.read_bytes())
    position = data.find(expected.tobytes()[:64]) if not compress else len(data) // 2
    assert position > 0
    data[position] ^= 1
    path.write_bytes(data)
    if shard_format == "safetensors":
        found = ActivationDataset(tmp_path)[0][HOOK]
        assert (found != expected).sum() == 1
    else:
        with pytest.raises(OSError, match=path.name):
            ActivationDataset(tmp_path)[0]
    (problem,) = check(tmp_path)
    assert problem.startswith(f"{path.name}: ")
    path.write_bytes(data[:-1])
    with pytest.raises(ValueError, match=f"{path.name}: is missing or cut short"):
        ActivationDataset(tmp_path)


def test_what_is_checked_when_is_told():
    (flag,) = [a for a in build_parser()._actions if "--shard_format" in a.option_strings]
    for told in (ActivationDataset.__doc__, flag.help, (REPOSITORY / "README.md").read_text()):
        assert "--verify" in told and "sha256" in told


def test_flipped_bytes_in_the_tables_of_a_safetensors_shard_raise(tmp_path):
    """Its header and its table of samples, which decide what is read where."""
    run = make_run(tmp_path, "safetensors", count=4)
    path = shard_file(tmp_path, 1)
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    texts = whole.index(b"__metadata__"), whole.index(b'"sample_idx"')
    numbers = [*range(0, texts[0]), *range(texts[1], header)]
    expected = stored_tokens(run)
    raised = 0
    for position in numbers[::3]:
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
    assert raised > len(numbers) // 5
    path.write_bytes(whole)
    edit(path.with_suffix(".json"), lambda content: content["samples"].update(last=99))
    with pytest.raises(OSError, match=r"first and last sample: found \[0, \d+\], expected \[0, 99"):
        ActivationDataset(tmp_path)[0]


def test_a_shard_of_another_run_with_a_json_that_agrees(tmp_path):
    """Other hooks, widths or dtypes are refused before any range is read."""
    root = tmp_path / "ours"
    make_run(root, "safetensors", "bfloat16", count=4)
    ours, theirs = shard_file(root, 1), tmp_path / "theirs"
    make_run(theirs, "safetensors", "float16", count=4)
    shutil.copy(shard_file(theirs, 1), ours)
    agree(ours)
    with pytest.raises(OSError, match="found .*float16.*expected .*bfloat16"):
        ActivationDataset(root)[0]


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    make_run(tmp_path, "pickle", count=4, compress_shards=False)
    path = shard_file(tmp_path, 1)
    path.write_bytes(pickle.dumps({3: [os.system]}))
    agree(path)
    with pytest.raises(OSError, match="refused: would import 'posix.system'"):
        ActivationDataset(tmp_path)[0]


# What is read, and what is imported.


READ = """
import sys
class Refused:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "torch", "tqdm", "safetensors", "datasets", "gcsfs"):
            raise ImportError(name)
sys.meta_path.insert(0, Refused())
import activation_extraction
assert "numpy" not in sys.modules
from activation_extraction import ActivationDataset
dataset = ActivationDataset(sys.argv[1])
print(sum(len(batch) for batch in dataset.batches(16, shuffle=0)) - dataset.tokens)
"""


UNTOUCHED = """
import logging, sys, threading
known = {}
for name in (None, "gcsfs", "fsspec", "datasets", "huggingface_hub"):
    logger = logging.getLogger(name)
    known[name] = [*logger.handlers], logger.level, logger.propagate
from activation_extraction import ActivationDataset, ActivationStorage
dataset = ActivationDataset(sys.argv[1])
list(dataset.batches(16, shuffle=0))
for name in known:
    logger = logging.getLogger(name)
    assert known[name] == (logger.handlers, logger.level, logger.propagate), name
for thread in threading.enumerate()[1:]:
    thread.join(600)
    assert not thread.is_alive(), thread
"""


def test_reading_changes_nothing_in_the_process(small):
    command = [sys.executable, "-c", UNTOUCHED, str(small.root)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_reading_needs_few_packages_and_importing_none(small):
    command = [sys.executable, "-c", READ, str(small.root)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout == "0\n", done.stderr
    with pytest.raises(ImportError, match="no_such_name"):
        from activation_extraction import no_such_name  # noqa: F401
