"""The table of samples: whatever is known of a sample is read back as it was given, and filtered by
pyarrow; and a table that is damaged is refused."""

import hashlib
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
import pyarrow.parquet
import pytest
from storages import open_storage

from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.errors import RunError, StorageError
from activation_extraction.store.commit import Commit, FileFacts
from activation_extraction.store.folder import Folder
from activation_extraction.store.sample_table import (
    MAX_SAMPLE_BYTES,
    concatenated,
    pack_table,
    read_table,
    rows_of,
    stored_in,
)
from activation_extraction.store.shard import SampleRow
from activation_extraction.text.batch import StoredSample

NAME = "shard_0001.samples.parquet"
NUMBERS = [0, 7, -(2**63), 2**63, 2**70, 1.5, -0.0, math.nan, math.inf]
SCALARS = [None, True, *NUMBERS, "", "ä", "\ud800"]
NESTED = [[], [1, 2.0, None], [[]], {}, {"a": None}, [{"\ud800": "x"}, {"b": [True]}]]
VALUES: list[Any] = [*SCALARS, *NESTED]
ROWS = [
    None,
    {},
    {"file": "a.jsonl", "line": 7},
    {"file": "a.jsonl", "line": 8, "piece": 0, "start": 0},
    {"source": "b", "row": 3, "share": 1},
    {"file": None},
    {"file": 3},
    {"\ud800": 1, "": 2, "a.b": "\ud800"},
    {str(n): n for n in range(64)},
    {str(n): n for n in range(30, 90)},
]


def samples_of(known, first=0):
    """Samples of 1, 2, 3 and so on tokens, of which these fields are known."""
    return [
        SampleRow(first + n, None, np.arange(n + 1, dtype=np.int32), **fields)
        for n, fields in enumerate(known)
    ]


def commit_of(samples, data):
    facts = FileFacts(len(data), hashlib.sha256(data).hexdigest())
    return Commit(
        number=1,
        count=len(samples),
        tokens=sum(len(sample.positions) for sample in samples),
        first=samples[0].sample_idx,
        last=samples[-1].sample_idx,
        files={NAME: facts},
        **{"run": "", "owner": "", "url": "", "file": "shard_0001.pkl", "unpacked": 0},
        **{"hooks": [], "mark": None, "committed": 0, "began": 0},
    )


def table_of(samples, folder):
    data = pack_table(samples)
    (folder / NAME).write_bytes(data)
    return read_table(Folder(str(folder)), commit_of(samples, data))


def known_of(row):
    """All that the table says of a sample, with the types of the values."""
    names = "sample_idx", "doc_id", "cut", "text_preview"
    values = {name: getattr(row, name) for name in names}
    return repr((values, sorted_(row.row), sorted_(row.columns)))


def sorted_(values):
    return None if values is None else sorted(values.items())


def random_known(seed):
    """Fields of samples: of a few rows and values, so that some columns have one type."""
    chance = np.random.default_rng(seed)

    def some(pool):
        few = [pool[n] for n in chance.integers(0, len(pool), chance.integers(1, 4))]
        return lambda: few[chance.integers(len(few))]

    doc_id, row, preview = some(SCALARS), some(ROWS), some(["", "text", "ä", "\ud800"])
    columns = {name: some(VALUES) for name in ("label", "größe", "a.b", "")[: seed % 5]}
    often = chance.integers(2)
    return [
        {
            "doc_id": doc_id(),
            "row": row(),
            "text_preview": preview(),
            "cut": int(chance.choice([0, 1, 2**31, 2**63 - 1])),
            "columns": {n: value() for n, value in columns.items() if often or chance.integers(2)},
        }
        for _ in range(chance.integers(1, 9))
    ]


@pytest.mark.parametrize("seeds", [range(start, start + 100) for start in range(0, 400, 100)])
def test_whatever_is_known_of_a_sample_is_read_back(seeds, tmp_path):
    for seed in seeds:
        samples = samples_of(random_known(seed))
        table = table_of(samples, tmp_path)
        found = rows_of(table)
        assert [*map(known_of, found)] == [*map(known_of, samples)], seed
        assert [row.tokens for row in found] == [*range(1, len(samples) + 1)]
        stored = stored_in(table)
        expected = {s.sample_idx: StoredSample(len(s.positions), s.row) for s in samples}
        assert stored == expected


def test_plain_values_are_columns_of_their_types(tmp_path):
    """So any reader of Parquet filters by them, and finds a field of the row."""
    known = [
        {"doc_id": f"id-{n}", "row": {"file": "a", "line": n} | ({"piece": 0} if n % 2 else {})}
        | {"columns": {"split": ["train", "test"][n % 2], "score": None if n == 1 else n / 2}}
        for n in range(4)
    ]
    table_of(samples_of(known), tmp_path)
    table = pyarrow.parquet.read_table(tmp_path / NAME)
    row = pyarrow.struct(
        {"file": pyarrow.string(), "line": pyarrow.int64(), "piece": pyarrow.int64()}
    )
    types = {
        **{"sample_idx": pyarrow.int64(), "tokens": pyarrow.int32(), "doc_id": pyarrow.string()},
        **{"row": row, "cut": pyarrow.int64(), "text_preview": pyarrow.string()},
        **{"split": pyarrow.string(), "score": pyarrow.float64()},
    }
    assert dict(zip(table.column_names, table.schema.types, strict=True)) == types
    chosen = table.filter(pyarrow.compute.field("split") == "test")
    assert chosen["doc_id"].to_pylist() == ["id-1", "id-3"]
    assert chosen["score"].to_pylist() == [None, 1.5]
    assert table.filter(pyarrow.compute.field("row", "line") == 2)["sample_idx"].to_pylist() == [2]


JOINED = {
    "one type": ([["a"], ["b", None]], ["a", "b", None]),
    "none at first": ([[None], [7]], [None, 7]),
    "whole and other numbers": ([[1], [2.5]], [1.0, 2.5]),
    "a number that no float has": ([[2**60 + 1], [2.5]], [str(2**60 + 1), "2.5"]),
    "numbers and texts": ([[1, 2], ["x"]], ["1", "2", "x"]),
    "mixed within a shard": ([[1, "x", None], [True]], ["1", "x", None, "True"]),
    "large numbers": ([[2**63], [1]], [2**63, 1]),
    "larger numbers": ([[2**70], [1]], [str(2**70), "1"]),
    "half a character": ([["\ud800"], ["x"]], ["?", "x"]),
}


@pytest.mark.parametrize("name", JOINED)
def test_tables_of_shards_become_one(name, tmp_path):
    shards, expected = JOINED[name]
    tables = [table_of(samples_of([{"doc_id": i} for i in ids]), tmp_path) for ids in shards]
    assert concatenated(tables)["doc_id"].to_pylist() == expected
    assert [row.doc_id for table in tables for row in rows_of(table)] == sum(shards, [])


def test_shards_with_other_rows_and_columns_become_one_table(tmp_path):
    shards = [
        [{"row": {"file": "a", "line": 1}, "columns": {"label": 1, "tags": ["x"]}}],
        [{"row": {"file": "b", "row_group": 0, "row": 2}, "columns": {"split": "test"}}, {}],
    ]
    tables = [table_of(samples_of(known), tmp_path) for known in shards]
    table = concatenated(tables)
    row = {"file": "b", "line": None, "row_group": 0, "row": 2}
    assert table["row"].to_pylist()[1:] == [row, None]
    assert [table[name].to_pylist() for name in ("label", "tags", "split")] == [
        [1, None, None],
        [["x"], None, None],
        [None, "test", None],
    ]
    clash = table_of(samples_of([{"row": {"file": 3}}]), tmp_path)
    texts = concatenated([tables[0], clash])["row"].to_pylist()
    assert texts == ['{"file": "a", "line": 1}', '{"file": 3}']
    assert concatenated([]).num_rows == 0


def deep(levels):
    value: list = []
    for _ in range(levels):
        value = [value]
    return value


def test_deep_and_wide_values_take_little_room(tmp_path):
    """pyarrow would have room for each name in every row."""
    columns = {"deep": deep(60), "wide": [{str(n): n} for n in range(99)], "odd": ["\ud800"]}
    table = concatenated([table_of(samples_of([{"columns": columns}]), tmp_path)])
    assert table["deep"].to_pylist() == [deep(60)] and table["odd"].to_pylist() == ['["\\ud800"]']
    assert json.loads(table["wide"][0].as_py()) == columns["wide"]
    rows = [{"row": {str(n): n}} for n in range(99)]
    table = table_of(samples_of(rows), tmp_path)
    assert table["row"].type == pyarrow.string()
    assert [row.row for row in rows_of(table)] == [known["row"] for known in rows]


# What is refused.


def test_a_table_that_changed_or_went_away_is_refused(tmp_path):
    samples = samples_of([{}, {}])
    data = pack_table(samples)
    folder, commit = Folder(str(tmp_path)), commit_of(samples, data)
    with pytest.raises(RunError, match=f"^{tmp_path}/{NAME}: is missing"):
        read_table(folder, commit)
    (tmp_path / NAME).write_bytes(data[:9] + bytes([data[9] ^ 1]) + data[10:])
    with pytest.raises(RunError, match=f"^{tmp_path}/{NAME}: is damaged: its sha256 is not the"):
        read_table(folder, commit)
    (tmp_path / NAME).write_bytes(data + bytes(1))  # before its content is read
    with pytest.raises(RunError, match=f"{NAME}.* bytes, expected at most {len(data):,}"):
        read_table(folder, commit)


def test_a_shard_without_samples_has_an_empty_table(tmp_path):
    commit = replace(commit_of(samples_of([{}]), b""), count=0, tokens=0, files={}, file="")
    table = read_table(Folder(str(tmp_path)), commit)
    assert (rows_of(table), stored_in(table)) == ([], {})
    one = table_of(samples_of([{"doc_id": "x"}]), tmp_path)
    assert concatenated([table, one])["doc_id"].to_pylist() == ["x"]


@pytest.mark.parametrize(
    "given,told",
    [
        ({"doc_id": b"x"}, "its doc_id is bytes b'x', expected a number, text or null"),
        ({"doc_id": np.float64(1)}, "its doc_id is float64 "),
        ({"row": {"a": [1]}}, r"its row is dict {'a': \[1\]}, expected an object of at most 64 pl"),
        ({"row": {str(n): n for n in range(65)}}, "its row is dict {'0': 0, "),
        ({"cut": -1}, "its cut is int -1, expected a whole number"),
        ({"cut": 2**63}, "its cut is int 9"),
        ({"text_preview": b"x"}, "its text_preview is bytes"),
        ({"columns": {"n": {1j}}}, "its columns are no JSON values: "),
        (
            {"columns": {"cut": 7}},
            "its columns is dict {'cut': 7}, expected .* called sample_idx, ",
        ),
        ({"columns": {"\ud800": 7}}, "its columns is dict"),
        ({"columns": {7: 7}}, "its columns is dict"),
        ({"columns": {str(n): n for n in range(65)}}, "its columns is dict"),
    ],
)
def test_what_cannot_be_in_the_table_is_refused_by_name(given, told):
    with pytest.raises(StorageError, match=f"^sample 1: {told}"):
        pack_table(samples_of([{}, given]))


def test_more_columns_than_a_table_has_room_for_are_refused():
    known = [{"columns": {f"{n} {i}": 0 for i in range(40)}} for n in range(2)]
    with pytest.raises(StorageError, match="^sample 1: with its columns, the shard has 80 differ"):
        pack_table(samples_of(known))
    pack_table(samples_of(known[:1]))


@pytest.mark.parametrize("shard_format", SHARD_FORMATS)
def test_a_sample_of_which_too_much_is_known_is_named(tmp_path, shard_format):
    """The shards before it are stored."""
    with pytest.raises(StorageError, match="^sample 2: its id, row and text preview take 1,048,"):
        with open_storage(tmp_path, {0: "h"}, shard_format=shard_format, shard_size_gb=1e-9) as s:
            for number, length in enumerate((0, MAX_SAMPLE_BYTES - 200, MAX_SAMPLE_BYTES, 0)):
                values, ids = np.zeros((1, 2), np.float32), np.zeros(1, np.int32)
                s.add_activation(0, values, number, "text", ids, "x" * length)
    assert len(list(tmp_path.glob("shard_*.json"))) == 2
