"""Shard formats: each one's files are known by their names, and hold what was written."""

import gzip
import hashlib
import json
import pickle
import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from extractions import activations_of, batches, change_table, extract, open_part
from storages import open_storage

from activation_extraction import ActivationDataset
from activation_extraction import store as store_package
from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.errors import RunError, StorageError
from activation_extraction.store.commit import Commit, names_beside
from activation_extraction.store.folder import Folder
from activation_extraction.store.formats import FORMATS, SAFETENSORS, Threads, format_of
from activation_extraction.store.metadata import own_files
from activation_extraction.store.shard import (
    MAX_LINE_BYTES,
    SampleRow,
    Shard,
    TableRow,
    pack_table,
    unpack_table,
)
from activation_extraction.store.shard_reader import read_shard, read_table
from activation_extraction.store.statistics import STATISTICS

NAMES: dict[int | str, str] = {3: "blocks.3.hook_resid_post", 5: "blocks.5.hook_mlp_out"}


def shard_of(dtype=np.float32):
    """Samples of 3 and 5 tokens; hooks of different widths."""
    chance = np.random.default_rng(0)
    rows = []
    for number, tokens in enumerate((3, 5)):
        ids = chance.integers(0, 50, tokens, np.int32)
        rows.append(SampleRow(number, ids, np.arange(tokens, dtype=np.int32), "ä", f"id-{number}"))
    slices = {
        key: [chance.standard_normal((len(row.positions), width)).astype(dtype) for row in rows]
        for key, width in ((3, 4), (5, 2))
    }
    return Shard(rows, slices)


def content(shard):
    """Everything that a shard holds, to be compared bit by bit."""

    def plain(value):
        if isinstance(value, np.ndarray):
            return value.dtype, value.shape, value.tobytes()
        if isinstance(value, dict):
            return {name: plain(each) for name, each in value.items()}
        return [plain(each) for each in value] if isinstance(value, list) else value

    samples = [plain(vars(sample)) for sample in shard.samples]
    return samples, plain(dict(shard.slices)), plain(dict(shard.scales))


def store(folder, shard, each, number=1):
    """Writes the files of a shard; returns its commit."""
    threads = Threads(2)
    with open(folder / each.file_name(number), "wb") as file, threads.pool:
        packed = each.write(shard, NAMES, threads, [file.write])
    table = pack_table(shard.samples)
    (folder / names_beside(number)[1]).write_bytes(table)
    facts = [
        {"key": key, "name": NAMES[key], "width": slices[0].shape[1], "dtype": slices[0].dtype.name}
        for key, slices in shard.slices.items()
    ]
    return Commit(
        file=each.file_name(number),
        **packed._asdict(),
        **{"first": 0, "last": 1, "count": 2, "tokens": shard.tokens},
        **{"partial": False, "cursor": None, "hooks": facts, "run": "", "committed": 0, "began": 0},
        **{"statistics": "", "table": hashlib.sha256(table).hexdigest()},
    )


def read(folder, commit):
    """Returns the shard, with the values of its table."""
    place = Folder(str(folder))
    shard, table = read_shard(place, commit, folder), read_table(place, commit)
    names = "sample_idx", "text_preview", "doc_id", "row", "cut", "columns"
    samples = [
        replace(sample, **{name: getattr(row, name) for name in names})
        for sample, row in zip(shard.samples, table, strict=True)
    ]
    assert [row.tokens for row in table] == [len(sample.positions) for sample in samples]
    return replace(shard, samples=samples)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.suffix)
def test_what_is_written_is_read_back(each, dtype, tmp_path):
    commit = store(tmp_path, shard_of(dtype), each, 7)
    assert commit.bytes == (tmp_path / commit.file).stat().st_size
    assert content(read(tmp_path, commit)) == content(shard_of(dtype))


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.suffix)
def test_larger_shards_are_refused(each, tmp_path):
    commit = store(tmp_path, shard_of(), each)
    with pytest.raises(RunError, match="its JSON says"):
        read(tmp_path, replace(commit, bytes=commit.bytes - 1))
    if each is not SAFETENSORS:
        with pytest.raises(RunError, match="more than"):
            read(tmp_path, replace(commit, unpacked=commit.unpacked - 1))


@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.suffix)
def test_files_are_known_by_their_names(each):
    name = each.file_name(12345)
    assert name == f"shard_12345{each.suffix}" and format_of(name) is each
    own = [name, f".{name}.tmp"]
    others = [f"{name}.bak", f"x{name}", "shard_1.pkl", "shard_0000.json"]
    others += [f"shard_{number}{each.suffix}" for number in ("00001", "٠٠٠١")]
    assert sorted(own_files([*own, *others])) == sorted(own)
    assert not any(map(format_of, others))
    for other in (f"{name}x", f".{name}", "shard_0001.json", "metadata.json"):
        assert format_of(other) is None


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # open() without close
@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.suffix)
def test_the_lines_that_a_run_prints_read_a_shard(each, tmp_path):
    path = tmp_path / each.file_name(1)
    store(tmp_path, shard_of(), each)
    scope: dict = {}
    lines = each.how_to_read(str(path), False)
    exec("\n".join(lines), scope)
    assert not lines or list(scope["records"]) == list(NAMES)


@pytest.mark.parametrize("doc_id", [None, 7, 1.5, float("nan"), "\ud800", "ä" * 300])
@pytest.mark.parametrize("each", FORMATS, ids=lambda each: each.suffix)
def test_every_document_id_is_read_back(each, doc_id, tmp_path):
    shard = shard_of()
    rows = [replace(row, doc_id=doc_id) for row in shard.samples]
    found = read(tmp_path, store(tmp_path, Shard(rows, shard.slices), each))
    assert [repr(row.doc_id) for row in found.samples] == [repr(doc_id)] * 2


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
def test_a_sample_of_which_too_much_is_known_is_named(tmp_path, shard_format):
    """The shards before it are stored."""
    with pytest.raises(StorageError, match="^sample 2: its id, row and text preview take 1,048,"):
        with open_storage(tmp_path, {0: "h"}, shard_format=shard_format, shard_size_gb=1e-9) as s:
            for number, length in enumerate((0, MAX_LINE_BYTES - 200, MAX_LINE_BYTES, 0)):
                values, ids = np.zeros((1, 2), np.float32), np.zeros(1, np.int32)
                s.add_activation(0, values, number, "text", ids, "x" * length)
    assert len(list(tmp_path.glob("shard_*.json"))) == 2


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
def test_the_page_of_the_format_is_enough_to_read_it(tmp_path, shard_format):
    """With what every language has: JSON, gzip, safetensors and zip."""
    with open_part(tmp_path, shard_format=shard_format) as storage:
        for batch in batches(4):
            storage.add_batch(batch, activations_of(batch))
    page = store_package.__doc__
    for path in tmp_path.iterdir():
        assert path.name.replace("0002", "0001") in page
    content = json.loads((tmp_path / "shard_0001.json").read_bytes())
    for name in (*content, *content["hooks"][0], *content["samples"]):
        assert re.search(rf"\b{name}\b", page) or name in STATISTICS, name
    assert f"`format_version` in all JSONs is {content['format_version']}." in page
    data = (tmp_path / "shard_0001.samples.jsonl.gz").read_bytes()
    assert hashlib.sha256(data).hexdigest() == content["table"]
    rows = [json.loads(line) for line in gzip.decompress(data).splitlines()]
    assert all(re.search(rf"\b{name}\b", page) for name in rows[0])
    tokens = sum(row["tokens"] for row in rows)
    assert (len(rows), tokens) == (content["samples"]["count"], content["tokens"])
    expected = ActivationDataset(tmp_path)
    assert [row["doc_id"] for row in rows] == [expected[n].doc_id for n in range(len(rows))]
    shard = tmp_path / content["file"]
    assert hashlib.sha256(shard.read_bytes()).hexdigest() == content["sha256"]
    if shard_format == "safetensors":
        tensors = safetensors.numpy.load_file(shard)
        hook = tensors[content["hooks"][1]["name"]]
        begin, end = tensors["sample_offsets"][1:3]
        found, ids = hook[begin:end], tensors["token_ids"][begin:end]
    else:
        record = pickle.loads(gzip.decompress(shard.read_bytes()))[content["hooks"][1]["key"]][1]
        found, ids = record["activation"], record["token_ids"]
    np.testing.assert_array_equal(found, expected[1][content["hooks"][1]["name"]])
    np.testing.assert_array_equal(ids, expected[1].token_ids)
    checksum = content.pop("checksum")
    plain = json.dumps(content, sort_keys=True, ensure_ascii=False)
    assert hashlib.sha256(plain.encode()).hexdigest() == checksum


LINE = {"sample_idx": 0, "tokens": 3, "doc_id": None, "row": None, "cut": 0, "text_preview": ""}
WRONG_LINES = {
    "no line": b"",
    "no object": b"[]",
    "no JSON": b"{",
    "deep": b"[" * 10**5,
    "a line too many": b"\n".join([json.dumps(LINE).encode()] * 3),
    "a long line": b"{" + b" " * MAX_LINE_BYTES + json.dumps(LINE).encode()[1:],
    "a field too few": json.dumps({name: LINE[name] for name in LINE if name != "cut"}).encode(),
    "many digits": b'{"sample_idx": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("name", WRONG_LINES)
def test_a_table_that_was_not_written_here_is_refused(name, tmp_path):
    lines = WRONG_LINES[name]
    first = json.dumps(LINE | {"more": [{}]}).encode() + b"\n"  # of a later version
    data = gzip.compress(first + lines)
    with pytest.raises(RunError, match="^table: "):
        unpack_table(data, 2, "table")
    whole = gzip.compress(2 * first)
    rows = unpack_table(whole, 2, "table")
    assert rows == 2 * [TableRow(**LINE)]
    for damaged in (whole[:-9], whole[:-1], whole + b"x", b"", b"no gzip"):
        with pytest.raises(RunError, match="^table: "):
            unpack_table(damaged, 2, "table")
    commit = store(tmp_path, shard_of(), SAFETENSORS)
    with pytest.raises(RunError, match="jsonl.gz: is damaged: its sha256 is not the one in"):
        read(tmp_path, replace(commit, table=hashlib.sha256(data).hexdigest()))


@pytest.mark.parametrize(
    "given,told",
    [
        ({"doc_id": b"x"}, "its doc_id is bytes b'x', expected a number, text or null"),
        ({"doc_id": np.float64(1)}, "its doc_id is float64 "),
        ({"row": {"a": [1]}}, "its row is dict {'a': [1]}, expected an object of at most 64 plain"),
        ({"row": {str(n): n for n in range(65)}}, "its row is dict {'0': 0, "),
        ({"cut": -1}, "its cut is int -1, expected a whole number"),
    ],
)
def test_what_cannot_be_in_the_table_is_refused_before_it_is_stored(tmp_path, given, told):
    with pytest.raises(StorageError, match=f"^sample 0: {re.escape(told)}"):
        with open_storage(tmp_path, {0: "h"}) as storage:
            storage.add_activation(0, np.zeros((1, 2), np.float32), 0, "", **given)
    assert not list(tmp_path.glob("shard_*"))


def test_a_table_of_other_samples_is_refused(tmp_path):
    extract(tmp_path)
    tokens = [0, 20, 10]
    change_table(
        tmp_path, 1, lambda rows: [r.update(tokens=n) for r, n in zip(rows, tokens, strict=True)]
    )
    with pytest.raises(OSError, match="samples.jsonl.gz is of other samples than its shard"):
        print(ActivationDataset(tmp_path)[0])


def test_safetensors_need_token_ids(tmp_path):
    storage = open_storage(tmp_path, {0: "h"}, shard_format="safetensors")
    with pytest.raises(ValueError, match="sample 0, hook 0: has no token ids"):
        storage.add_activation(0, np.zeros((1, 2), np.float32), 0, "")
