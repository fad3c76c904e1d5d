"""ActivationDataset: every value that it reads is the one that was stored, and damage is told."""

import pickle
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import extractions
import numpy as np
import pytest
from cloud import REPOSITORY
from extractions import (
    activations_of,
    changed_identity,
    edit,
    extract,
    flip,
    identity_of,
    shard_file,
    upload,
)
from runs_of_rows import WIDTHS
from runs_to_read import (
    assert_same,
    check_moments,
    check_samples,
    in_order,
    joined,
    run_of,
    stored_tokens,
)
from storages import open_storage

import activation_extraction
from activation_extraction import ActivationDataset
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.dataset import batches, open_shards
from activation_extraction.model.weight_files import LocalFile
from activation_extraction.store import safetensors_file
from activation_extraction.store.folder import Folder
from activation_extraction.text.batch import Sample
from activation_extraction.text.mark import Mark
from activation_extraction.text.packing import pack
from activation_extraction.text.sample_facts import SampleFacts

FIRST, SECOND, THIRD = WIDTHS
KINDS = [
    ("pickle", "float32"),
    ("safetensors", "bfloat16"),
    ("safetensors", "float8"),
]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def run(request, tmp_path_factory):
    """A machine with two hosts and a machine with one."""
    run = run_of(*request.param, count=36, kept="odd", hosts=(2, 1))
    run.store(tmp_path_factory.mktemp("run"))
    return run


def test_every_sample_and_every_token_is_what_was_stored(run):
    dataset = ActivationDataset(run.root)
    assert dataset.hooks == WIDTHS
    assert dataset.dtype == ("float32" if run.dtype == "float8" else run.dtype)
    check_samples(dataset, run, WIDTHS)
    for hooks in ([FIRST], list(WIDTHS)[::-1]):
        selected = ActivationDataset(f"file://{run.root}", hooks)
        assert selected.hooks == {hook: WIDTHS[hook] for hook in hooks}
        check_samples(selected, run, hooks)
    expected, plain = stored_tokens(run), joined(dataset.batches(50))
    assert dataset.tokens == len(expected["position"])
    assert_same(in_order(plain), expected)
    order = [sample.sample_idx for sample in dataset if len(sample.position)]
    assert list(dict.fromkeys(plain["sample_idx"].tolist())) == order
    for hooks in ([FIRST], [SECOND, THIRD]):
        shuffled = joined(dataset.batches(50, hooks=hooks, shuffle=1, buffer=150))
        assert not np.array_equal(shuffled["sample_idx"], plain["sample_idx"])
        assert_same(in_order(shuffled), expected)
    assert_same(in_order(joined(dataset.batches(16, hooks=[]))), expected)
    for dtype in ("float32", np.float16, "bfloat16"):
        found = in_order(joined(dataset.batches(50, hooks=FIRST, dtype=dtype, shuffle=1)))
        assert_same({FIRST: found[FIRST]}, {FIRST: expected[FIRST].astype(dtype)})


def test_filters(run):
    dataset, stored = ActivationDataset(run.root), stored_tokens(run)
    tokens = {name: values[stored["position"] >= 2] for name, values in stored.items()}
    norms = {hook: np.linalg.norm(tokens[hook].astype(np.float32), axis=1) for hook in WIDTHS}
    small = {hook: norms[hook] <= 2.5 for hook in WIDTHS}
    every = np.logical_and.reduce(list(small.values()))
    for limit, keep in ((2.5, every), ({SECOND: 2.5}, small[SECOND]), (None, every | True)):
        assert keep.any() and (limit is None or not keep.all())
        options = dict(skip_first=2, max_norm=limit)
        expected = {name: values[keep] for name, values in tokens.items()}
        for order in (dict(), dict(shuffle=3, buffer=64)):
            assert_same(in_order(joined(dataset.batches(16, **options, **order))), expected)


def test_norms_of_float16_do_not_overflow(tmp_path):
    """Squares of what float16 holds are more than it holds."""
    stream = "blocks.0.hook_resid_post"
    options = dict(identity=replace(identity_of(), activation_dtype="float16"))
    with open_storage(tmp_path, {0: stream}, **options) as storage:
        storage.add_activation(0, np.full((4, 16), 300, np.float16), 0, "", np.arange(4))
    dataset = ActivationDataset(tmp_path)
    assert sum(map(len, dataset.batches(4, max_norm=1201, dtype="float16"))) == 4
    with pytest.raises(ValueError, match="no token passes"):
        next(dataset.batches(4, max_norm=1199))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float8"])
@pytest.mark.parametrize("order", [dict(), dict(shuffle=0)])
def test_values_that_float16_does_not_hold_are_not_read_as_it(tmp_path, stored, order):
    """Such as those of tokens whose norms are hundreds of times the median."""
    values = np.ones((40, 16), np.float32)
    values[0, 3] = 70_000
    identity = replace(identity_of(), activation_dtype=stored)
    options = dict(identity=identity, shard_format="safetensors")
    with open_storage(tmp_path, {0: "blocks.0.hook_resid_post"}, **options) as storage:
        given = values if stored == "float8" else values.astype(stored)
        storage.add_activation(0, given, 0, "", np.arange(40))
    dataset = ActivationDataset(tmp_path)
    with pytest.raises(ValueError, match="hook 'blocks.0.hook_resid_post': float16 ends at 65504"):
        list(dataset.batches(8, dtype="float16", **order))
    for fits in (dict(dtype="float32"), dict(dtype="float16", skip_first=1)):
        read = joined(dataset.batches(8, **fits, **order))["blocks.0.hook_resid_post"]
        assert np.isfinite(read).all() and len(read) == 40 - fits.get("skip_first", 0)


def test_samples_by_number_and_by_slice(run):
    """They are read from a copy, as another process gets it."""
    opened = ActivationDataset(run.root)
    numbers, every = opened.samples["sample_idx"].to_pylist(), list(opened)
    assert opened.statistics[FIRST].mean.size
    dataset = pickle.loads(pickle.dumps(opened))
    for number in range(-36, 36):
        assert dataset[number].sample_idx == numbers[number]
        assert_same({FIRST: dataset[number][FIRST]}, {FIRST: every[number][FIRST]})
    for piece in (slice(3, 9), slice(None, None, -7), slice(30, 99), slice(5, 5)):
        assert [s.sample_idx for s in dataset[piece]] == numbers[piece]
    for number in (36, -37):
        with pytest.raises(IndexError, match=f"sample {number}: the dataset has 36 samples"):
            dataset[number]
    dataset[-1][FIRST][:] = 0  # a copy: what is stored stays
    assert dataset[-1][FIRST].any()


def test_statistics_and_the_table_of_samples_take_no_activations(run, monkeypatch):
    """They are over all shards, hosts and machines."""
    stored, expected = stored_tokens(run), list(ActivationDataset(run.root))
    dataset = ActivationDataset(run.root, [SECOND, THIRD])
    monkeypatch.setattr(open_shards, "open_shard", None)
    assert list(dataset.statistics) == [SECOND, THIRD]
    for hook, found in dataset.statistics.items():
        values = stored[hook].astype(np.float64)
        check_moments(found, values)
        check_moments(found.all_tokens, values)
        check_moments(found.without_first_token, values[stored["position"] > 0])
        assert found.max_norm == pytest.approx(np.linalg.norm(values, axis=1).max(), rel=1e-6)
        assert found.overall_variance == pytest.approx(values.var(), rel=1e-6)
    table = dataset.samples
    assert table["tokens"].to_pylist() == [len(sample.token_ids) for sample in expected]
    for name in ("sample_idx", "doc_id", "cut", "text_preview"):
        assert table[name].to_pylist() == [getattr(sample, name) for sample in expected], name
    assert dataset.tokenizer_path == "some/model"
    assert dataset.metadata["status"] == "complete" and dataset.complete


def test_every_promised_name_is_there_with_its_documentation():
    for name in set(activation_extraction.__all__) - {"ROLES"}:
        found = getattr(activation_extraction, name)
        assert found.__name__ == name and len(found.__doc__) > 40


def test_a_run_that_is_still_going_on(tmp_path):
    """A machine of three has finished, one is at work, one has not started."""
    run_of(count=0).store(tmp_path / "begun", finish=False)
    dataset = ActivationDataset(tmp_path / "begun")
    assert len(dataset) == dataset.tokens == 0 and dataset.hooks == WIDTHS
    assert list(dataset) == list(dataset.batches(8)) == []
    run = run_of(count=60, machines=3)
    run.store(tmp_path / "run", only=0)
    run.store(tmp_path / "run", only=1, finish=False)
    dataset = ActivationDataset(tmp_path / "run")
    assert not dataset.complete and repr(dataset).endswith(", not complete)")
    stored = [sample.sample_idx for sample in dataset]
    assert sorted(stored[:20]) == [*range(0, 60, 3)] and 0 < len(stored[20:]) < 20
    assert len(set(stored)) == len(stored) and {number % 3 for number in stored[20:]} == {1}
    assert sum(len(batch) for batch in dataset.batches(9)) == dataset.tokens


PIECES = 4  # of each document, of 1 to 3 tokens


def store_pieces(root, numbers, finish=True):
    """Stores one sample after the other, as if they had been packed so. Returns the dataset."""
    with open_storage(
        root / "machine_001", {0: "h"}, identity=identity_of(1, 0, 2, 1),
        shard_size_gb=8e-8, hook_facts={0: {"width": 2}},
    ) as storage:  # fmt: skip
        for number in numbers:
            document, piece = divmod(number, PIECES)
            token_ids = np.arange(1 + number % 3, dtype=np.int32) + 10 * number
            row = {"line": document, "piece": piece, "start": 5 * piece}
            cut = 7 * (piece == PIECES - 1)
            facts = SampleFacts(2 * number + 1, row, doc_id=document, cut=cut)
            sample = Sample(facts, token_ids, Mark(number))
            (batch,) = pack([sample], 1, 4)
            storage.add_batch(batch, {0: np.full((1, 4, 2), number, np.float32)})
        storage.finalize(complete=finish)
    return ActivationDataset(root)


def test_the_pieces_of_a_document_may_lie_in_any_shards(tmp_path):
    dataset = store_pieces(tmp_path, [7, 0, 2, 9, 4, 5, 1, 11, 3, 8, 6, 10])
    spans = [(commit.first, commit.last) for commit in dataset.shards.commits]
    assert any(later[0] < earlier[1] for earlier, later in pairwise(spans))
    found = [sample.sample_idx for sample in dataset]
    assert sorted(found) == [2 * number + 1 for number in range(12)]
    for index, sample_idx in enumerate(found):
        whole, document = dataset.document(index), (sample_idx - 1) // 2 // PIECES
        numbers = range(PIECES * document, PIECES * (document + 1))
        parts = [10 * number + np.arange(1 + number % 3) for number in numbers]
        assert whole.token_ids.tolist() == np.concatenate(parts).tolist()
        at = [5 * piece + np.arange(len(part)) for piece, part in enumerate(parts)]
        assert whole.position.tolist() == np.concatenate(at).tolist()
        assert whole.sample_idx == 2 * numbers[0] + 1 and whole.row["piece"] == 0
        assert whole.cut == 7


@pytest.mark.parametrize(
    "more,finish,told",
    [
        ([5, 4], False, "not stored yet; the run goes on"),
        ([4, 6, 7], True, "of which piece 1 is missing"),
    ],
)
def test_a_document_of_which_pieces_are_missing(more, finish, told, tmp_path):
    dataset = store_pieces(tmp_path, [*range(PIECES), *more], finish)
    assert dataset.document(0).row["line"] == 0
    with pytest.raises(ValueError, match=told):
        dataset.document(PIECES + 1)


# From a bucket.


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
def test_from_a_bucket(shard_format, tmp_path, bucket):
    (run := run_of(shard_format, "bfloat16", hosts=(2, 1))).store(tmp_path)
    upload(tmp_path, "gs://bucket/some/run")
    dataset = ActivationDataset("gs://bucket/some/run")
    check_samples(dataset, run, WIDTHS)
    stored = stored_tokens(run)
    assert_same(in_order(joined(dataset.batches(64, shuffle=0))), stored)
    check_moments(dataset.statistics[FIRST], stored[FIRST].astype(np.float64))


def test_one_hook_of_many_takes_little_more_than_its_bytes(tmp_path, bucket):
    """Everything is requested once, and compared with its checksum."""
    hooks = {layer: f"blocks.{layer}.mlp.hook_post" for layer in range(5)}
    (run := run_of("safetensors", "float16", 1000, hooks=hooks, shard_gb=2e-2)).store(tmp_path)
    path = shard_file(tmp_path, 1)
    data = path.read_bytes()
    path.write_bytes(data[:-1000] + bytes(400) + data[-600:])
    upload(tmp_path, "gs://bucket/run")
    dataset = ActivationDataset("gs://bucket/run")
    shards, stored = len(dataset.shards.commits), stored_tokens(run)
    for shuffle in (0, None):
        bucket.served = 0
        found = joined(dataset.batches(100, hooks=[hooks[3]], shuffle=shuffle))
        assert_same(in_order(found), stored)
        least = found[hooks[3]].nbytes
        assert 2 == shards and least <= bucket.served <= 1.06 * least
    # Of a sample, only the ids and positions of the tokens of its shard, and the blocks of
    # activations in which it lies.
    dataset, bucket.served = ActivationDataset("gs://bucket/run"), 0
    one = dataset.batches(100, hooks=[hooks[3]], where=[n == 700 for n in range(1000)])
    assert [set(batch.sample_idx) for batch in one] == [{700}]
    assert 0 < bucket.served <= 2.2 * 2**20
    damage_message = (
        "shard_0001.safetensors: is damaged in MiB [0-9]+( or [0-9]+)?: its crc32c is not the one"
    )
    with pytest.raises(OSError, match=damage_message):
        list(dataset.batches(100, hooks=[hooks[4]]))
    values = stored[hooks[3]].astype(np.float64)
    statistics = dataset.statistics[hooks[3]]  # summed in blocks
    check_moments(statistics.all_tokens, values)
    check_moments(statistics.without_first_token, values[stored["position"] > 0])


@pytest.fixture
def small_blocks(monkeypatch):
    """Divides shards into blocks of 64 KiB and chunks of 256 KiB, and keeps one shard open."""
    monkeypatch.setattr(safetensors_file, "BLOCK_BYTES", 2**16)
    monkeypatch.setattr(batches, "MAX_READ_BYTES", 2**18)
    monkeypatch.setattr(batches, "MAX_ORDERED_READ_BYTES", 2**18)
    monkeypatch.setattr(batches, "MIN_READ_BYTES", 2**16)
    monkeypatch.setattr(open_shards, "MAX_FRONT_BYTES", 0)


@pytest.mark.parametrize("hooks", [1, 4])
def test_one_hook_of_many_shards_takes_little_more_than_its_bytes(
    hooks, tmp_path, bucket, small_blocks
):
    """No cache holds the token ids and positions of all shards, nor is one needed."""
    names = {layer: f"blocks.{layer}.mlp.hook_post" for layer in range(hooks)}
    run = run_of("safetensors", "float16", 1000, hooks=names, shard_gb=hooks * 8e-4)
    run.store(tmp_path)
    upload(tmp_path, "gs://bucket/run")
    dataset, stored = ActivationDataset("gs://bucket/run"), stored_tokens(run)
    assert len(dataset.shards.commits) >= 7
    for options in ({"shuffle": 0}, {}):
        bucket.served = 0
        read_batch = joined(dataset.batches(100, hooks=[names[0]], **options))
        assert_same(in_order(read_batch), stored)
        assert 1 < bucket.served / read_batch[names[0]].nbytes <= 1.06
    where = [number % 16 != 0 for number in range(1000)]
    for options in ({"skip_first": 1}, {"where": where}, {"roles": ["system", "user"]}):
        bucket.served = 0
        read = list(dataset.batches(100, hooks=[names[0]], shuffle=0, **options))
        tokens = sum(map(len, read))
        passed = tokens / len(stored["position"])
        assert 0.5 < passed < 0.96
        assert bucket.served * passed / (tokens * 512) <= 1.08


@pytest.mark.parametrize("ranges", [True, False], ids=["by blocks", "by MiB"])
@pytest.mark.parametrize(
    "tensor", ["sample_idx", "sample_offsets", "token_ids", "position", "role", FIRST]
)
def test_damage_in_any_tensor_is_found_in_a_bucket(tensor, ranges, tmp_path, bucket, small_blocks):
    """Shards that were stored before blocks had checksums are compared by whole MiB.

    The positions of samples of which all tokens are stored would not be read.
    """
    run = run_of("safetensors", "float16", 300, kept="odd", shard_gb=1)
    run.store(tmp_path)
    path = shard_file(tmp_path, 1)
    if not ranges:
        edit(tmp_path / "shard_0001.json", lambda commit: commit["files"][path.name].pop("ranges"))
    upload(tmp_path, "gs://bucket/sound")
    dataset = ActivationDataset("gs://bucket/sound")
    assert_same(in_order(joined(dataset.batches(100, shuffle=0))), stored_tokens(run))
    place = LocalFile(path).tensors[tensor]
    flip(path, (place.offset + place.end) // 2)
    upload(tmp_path, "gs://bucket/damaged")
    dataset = ActivationDataset("gs://bucket/damaged")
    with pytest.raises(OSError, match=r"shard_0001\.safetensors: is damaged in MiB 0"):
        list(dataset.batches(100, shuffle=0))


# What goes wrong.


def test_an_unknown_hook_is_told_with_the_list_of_hooks(run):
    told = f"has no hook 'x'; it has {re.escape(', '.join(WIDTHS))}"
    for hooks, why in (([FIRST, "x"], told), ([], "no hook is asked for")):
        with pytest.raises(ValueError, match=why):
            ActivationDataset(run.root, hooks)


def test_a_name_that_is_no_hook_says_where_its_values_are(tmp_path):
    """Records call positions `positions`, samples and batches `position`: both names are read."""
    identity = changed_identity(identity_of(), keep_columns=["label"])
    with open_storage(tmp_path, {0: FIRST}, identity=identity) as storage:
        facts = SampleFacts(0, {"line": 1}, columns={"label": "x"})
        sample = Sample(facts, np.arange(3, dtype=np.int32), Mark(0))
        (batch,) = pack([sample], 1, 4)
        storage.add_batch(batch, {0: np.ones((1, 4, 2), np.float32)})
    dataset = ActivationDataset(tmp_path)
    sample, batch = dataset[0], next(dataset.batches(3, columns=["label"]))
    for tokens in (sample, batch, batch.torch()):
        assert tokens.positions.tolist() == tokens.position.tolist() == [0, 1, 2]
        for name in ("token_ids", "position", "positions", "sample_idx", "activations"):
            assert getattr(tokens, name) is not None
            with pytest.raises(KeyError, match=f"'{name}' is no hook; read its attribute .{name}"):
                tokens[name]
        with pytest.raises(KeyError, match=r"'label' is no hook; read .columns\['label'\]"):
            tokens["label"]
        with pytest.raises(KeyError, match=f"no hook 'x'; there are {re.escape(FIRST)}"):
            tokens["x"]
    with pytest.raises(KeyError, match=f"no hook 'x'; there are {re.escape(FIRST)}"):
        dataset.hooks["x"]


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


CHANGES = {"flipped": flipped, "cut": lambda data: data[:-1]}
READS = {
    "a dataset": lambda dataset: ActivationDataset(dataset.url),
    "a sample": lambda dataset: dataset[0],
    "a batch": lambda dataset: next(dataset.batches(8)),
    "moments": lambda dataset: dataset.statistics[FIRST].all_tokens,
    "the table": lambda dataset: dataset.samples,
}
DAMAGE = [  # file (an asterisk: in either format), change, what is then read, message
    ("shard_0001.*", "gone", "a dataset", "is missing or cut short; .* repairs it"),
    ("shard_0002.json", "gone", "a dataset", "is missing; .* repairs it"),
    ("metadata.json", "gone", "a dataset", "is missing; --repair"),
    ("shard_0001.*", "flipped", "a sample", "is damaged in MiB 0: its crc32c is not the one in"),
    ("shard_0001.*", "cut", "a batch", r"has \d+ bytes, its JSON"),
    ("shard_0001.*", "gone", "a sample", "is missing; the run was overwritten"),
    ("shard_0001.npz", "flipped", "moments", "is damaged: its sha256 is not the one"),
    ("shard_0001.samples.parquet", "flipped", "the table", "is damaged: its sha256 is not the one"),
]


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
def test_damaged_files_are_told(shard_format, tmp_path):
    run_of(shard_format).store(tmp_path)
    for name, change, read, told in DAMAGE:
        path = shard_file(tmp_path, 1) if name.endswith("*") else tmp_path / name
        dataset, content = ActivationDataset(tmp_path), path.read_bytes()
        path.unlink()  # a mapped file stays as it is
        if change != "gone":
            path.write_bytes(CHANGES[change](content))
        with pytest.raises(OSError, match=f"{path.name}.*{told}"):
            READS[read](dataset)
        if read in ("moments", "the table"):  # activations are read nevertheless
            assert len(READS["a batch"](dataset)) == 8
        path.write_bytes(content)
    shard_file(tmp_path, 1).unlink()
    edit(tmp_path / "metadata.json", lambda content: content.update(remote="gs://bucket/run"))
    with pytest.raises(OSError, match="the shards were uploaded to gs://bucket/run"):
        ActivationDataset(tmp_path)


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
@pytest.mark.parametrize("in_bucket", [False, True])
def test_a_run_that_is_overwritten_while_it_is_read(
    tmp_path, shard_format, in_bucket, bucket, monkeypatch
):
    """Every file has the size that it had; the reader that opened the run before does not take the
    values of one for those of the other."""
    url = "gs://bucket/run" if in_bucket else str(tmp_path)
    options = dict(shard_format=shard_format, compress_shards=False)
    options["remote"] = Folder(url) if in_bucket else None
    extract(tmp_path, **options)
    first, second = ActivationDataset(url), ActivationDataset(url)
    others = {key: -value for key, value in activations_of(next(extractions.batches(1))).items()}
    monkeypatch.setattr(extractions, "activations_of", lambda batch: others)
    extract(tmp_path, overwrite=True, **options)
    for read in (lambda: first[0], lambda: next(second.batches(8))):
        with pytest.raises(OSError, match="shard_0001.*: the run was overwritten or repaired"):
            read()
    assert len(ActivationDataset(url)[0].token_ids) == 10


def test_folders_of_different_runs(tmp_path):
    """test_verify.py has all the ways in which they differ."""
    run_of(dtype="float32", machines=2).store(tmp_path, only=0)
    run_of(dtype="float16", machines=2).store(tmp_path, only=1)
    with pytest.raises(ValueError, match="its activation_dtype is float16, but float32 in mac"):
        ActivationDataset(tmp_path)


READ = """
import logging, sys
gone = "jax", "jaxlib", "flax", "torch", "tqdm", "safetensors", "datasets", "gcsfs"
sys.modules.update(dict.fromkeys(gone))
import activation_extraction
assert "numpy" not in sys.modules
loggers = [logging.getLogger(name) for name in (None, "gcsfs", "fsspec", "huggingface_hub")]
before = [([*each.handlers], each.level, each.propagate) for each in loggers]
from activation_extraction import ActivationDataset, ActivationStorage
for path in sys.argv[1:]:
    dataset = ActivationDataset(path)
    print(sum(len(batch) for batch in dataset.batches(16, shuffle=0)) - dataset.tokens)
assert before == [(each.handlers, each.level, each.propagate) for each in loggers]
del sys.modules["tqdm"]
from activation_extraction.cli.config import parse_args
from activation_extraction.inspect.look import look
for flag in ("--status", "--verify"):
    print(look(parse_args([flag, "--output_dir", path])))
for batch in dataset.batches(8, shuffle=0, buffer=32):
    sys.exit()
"""


def test_reading_needs_few_packages_and_changes_nothing_in_the_process(tmp_path):
    """Looking at a run needs tqdm beside them. The program may end in the middle of a loop, whose
    thread says nothing then."""
    runs = [run_of(shard_format).store(tmp_path / shard_format) for shard_format in SHARD_FORMATS]
    command = [sys.executable, "-c", READ, *map(str, runs)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.findall(r"^-?\d+$", done.stdout, flags=re.M) == ["0"] * 4


READ_THREE_TIMES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from activation_extraction import ActivationDataset
readers = [ActivationDataset(sys.argv[1]).batches(16, shuffle=0, buffer=64) for _ in range(3)]
tokens = [sum(map(len, batches)) for batches in zip(*readers)]
print(sum(tokens))
"""


def test_several_datasets_fit_into_the_files_that_a_process_may_open(tmp_path):
    shards, tokens = 80, 4
    with open_storage(
        tmp_path, {0: FIRST}, shard_size_gb=1e-9, shard_format="safetensors"
    ) as storage:
        for number in range(shards):
            activation = np.full((tokens, 2), number, np.float32)
            storage.add_activation(0, activation, number, "", np.arange(tokens, dtype=np.int32))
    assert len(ActivationDataset(tmp_path).shards.commits) == shards
    command = [sys.executable, "-c", READ_THREE_TIMES, str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == 3 * shards * tokens
