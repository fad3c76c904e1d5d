"""The table of samples: whatever is known of a sample is read back as it was given, and filtered by
pyarrow; and a table that is damaged is refused."""

import json
import math
from typing import Any

import numpy as np
import pyarrow.compute
import pyarrow.parquet
import pytest
from extractions import extract
from storages import open_storage

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import StorageError
from activation_extraction.store.sample_table import (
    concatenated,
    pack_table,
    rows_of,
    stored_in,
)
from activation_extraction.store.shard import SampleRow

NAME = "shard_0001.samples.parquet"
NUMBERS = [0, 7, -(2**63), 2**63, 2**70, 1.5, -0.0, math.nan, math.inf]
SCALARS: list[Any] = [None, True, *NUMBERS, "", "ä", "\ud800"]
VALUES = [*SCALARS, [], [1, 2.0, None], {}, {"a": None}, [{"\ud800": "x"}, {"b": [True]}]]
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
    {str(n): n for n in range(30, 99)},
]


def samples_of(known):
    """Samples of 1, 2, 3 and so on tokens, of which these fields are known."""
    return [
        SampleRow(n, None, np.arange(n + 1, dtype=np.int32), **fields)
        for n, fields in enumerate(known)
    ]


def table_of(*known):
    return pyarrow.parquet.read_table(pyarrow.BufferReader(pack_table(samples_of(known))))


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
        {"doc_id": doc_id(), "row": row(), "text_preview": preview()}
        | {"cut": int(chance.choice([0, 1, 2**31, 2**63 - 1]))}
        | {"columns": {n: each() for n, each in columns.items() if often or chance.integers(2)}}
        for _ in range(chance.integers(1, 9))
    ]


def test_whatever_is_known_of_a_sample_is_read_back():
    for seed in range(300):
        known = random_known(seed)
        table = table_of(*known)
        for number, (row, given) in enumerate(zip(rows_of(table), known, strict=True)):
            assert (row.sample_idx, row.tokens) == (number, number + 1)
            for name, value in given.items():
                found = getattr(row, name)
                if isinstance(value, dict):
                    found, value = sorted(found.items()), sorted(value.items())
                assert repr(found) == repr(value), (seed, name)  # types, too
        assert stored_in(table) == {n: (n + 1, each["row"]) for n, each in enumerate(known)}


def test_plain_values_are_columns_of_their_types():
    """Any reader of Parquet can filter by them, and by a field of the row."""
    rows = [{"file": "a", "line": n} | ({"piece": 0} if n % 2 else {}) for n in range(4)]
    splits, scores = ["train", "test"] * 2, [0.0, None, 1.0, 1.5]
    columns = [{"split": a, "score": b} for a, b in zip(splits, scores, strict=True)]
    ids = [f"id-{n}" for n in range(4)]
    known = zip(ids, rows, columns, strict=True)
    table = table_of(*({"doc_id": a, "row": b, "columns": c} for a, b, c in known))
    assert {each.name: str(each.type) for each in table.schema} == {
        **{"sample_idx": "int64", "tokens": "int32", "doc_id": "string"},
        **{"row": "struct<file: string, line: int64, piece: int64>", "cut": "int64"},
        **{"text_preview": "string", "split": "string", "score": "double"},
    }
    chosen = table.filter(pyarrow.compute.field("split") == "test")
    assert chosen["doc_id"].to_pylist() == ["id-1", "id-3"]
    assert chosen["score"].to_pylist() == [None, 1.5]
    assert table.filter(pyarrow.compute.field("row", "line") == 2)["sample_idx"].to_pylist() == [2]


@pytest.mark.parametrize(
    "shards,expected",
    [
        ([["a"], ["b", None]], ["a", "b", None]),
        ([[None], [7]], [None, 7]),
        ([[1], [2.5]], [1.0, 2.5]),
        ([[2**60 + 1], [2.5]], [str(2**60 + 1), "2.5"]),  # which no float has
        ([[1, 2], ["x"]], ["1", "2", "x"]),
        ([[1, "x", None], [True]], ["1", "x", None, "True"]),
        ([[2**63], [1]], [str(2**63), "1"]),
        ([["\ud800"], ["x"]], ["?", "x"]),
    ],
)
def test_tables_of_shards_become_one(shards, expected):
    tables = [table_of(*({"doc_id": each} for each in ids)) for ids in shards]
    assert concatenated(tables)["doc_id"].to_pylist() == expected
    assert [row.doc_id for table in tables for row in rows_of(table)] == sum(shards, [])


def test_shards_with_other_rows_and_columns_become_one_table():
    one = table_of({"row": {"file": "a", "line": 1}, "columns": {"label": 1, "tags": ["x"]}})
    two = table_of({"row": {"file": "b", "row": 2}, "columns": {"split": "test"}}, {})
    table = concatenated([one, two])
    assert table["row"].to_pylist()[1:] == [{"file": "b", "line": None, "row": 2}, None]
    assert table["label"].to_pylist() == [1, None, None]
    assert table["tags"].to_pylist() == [["x"], None, None]
    assert table["split"].to_pylist() == [None, "test", None]
    texts = concatenated([one, table_of({"row": {"file": 3}})])["row"].to_pylist()
    assert texts == ['{"file": "a", "line": 1}', '{"file": 3}']
    assert concatenated([]).num_rows == 0


def test_deep_and_wide_values_take_little_room():
    """pyarrow would have room for each name in every row."""
    deep: list = [1]
    for _ in range(60):
        deep = [deep]
    columns = {"deep": deep, "wide": [{str(n): n} for n in range(99)], "odd": ["\ud800"]}
    table = concatenated([table_of({"columns": columns})])
    assert table["odd"].to_pylist() == ['["\\ud800"]']
    for name in ("deep", "wide"):  # Parquet is read up to some depth
        assert json.loads(table[name][0].as_py()) == columns[name]
    assert table_of(*({"row": {str(n): n}} for n in range(99)))["row"].type == "string"
    shards = [table_of({"columns": {"one": {str(n): n}}}) for n in range(99)]
    assert concatenated(shards)["one"].to_pylist()[7] == '{"7": 7}'


def test_a_table_that_changed_or_went_away_is_refused(tmp_path):
    extract(tmp_path)
    path = tmp_path / NAME
    data = path.read_bytes()
    for content, told in (
        (data[:9] + bytes([data[9] ^ 1]) + data[10:], "is damaged: its sha256 is not the one"),
        (data + bytes(1), f" bytes, expected at most {len(data):,}"),  # before it is read
        (None, "is missing"),
    ):
        path.write_bytes(data)
        dataset = ActivationDataset(tmp_path)
        path.unlink() if content is None else path.write_bytes(content)
        with pytest.raises(OSError, match=f"{NAME}.*{told}"):
            print(dataset.samples)


JSON = "its id, row, text preview or columns are no JSON values: "


@pytest.mark.parametrize(
    "given,told",
    [
        ({"doc_id": b"x"}, JSON),
        ({"row": {"a": {1}}}, JSON),
        ({"text_preview": b"x"}, JSON),
        ({"columns": {"n": 1j}}, JSON),
        ({"columns": {"\ud800": 7}}, JSON),
        ({"columns": {7: 7}}, JSON),
        ({"columns": {"cut": 7}}, "a column that is kept cannot be called cut"),
    ],
)
def test_what_cannot_be_in_the_table_is_refused_by_name(given, told, tmp_path):
    """The shards before it are stored."""
    with pytest.raises(StorageError, match=f"^sample 2: {told}"):
        with open_storage(tmp_path, {0: "h"}, shard_size_gb=1e-9) as storage:
            fine = {"columns": {f"{n}": 0 for n in range(99)}, "doc_id": "x" * 10**7}
            for number, known in enumerate(({}, fine, given, {})):
                known = {"text_preview": "", **known}
                storage.add_activation(0, np.zeros((1, 2), np.float32), number, **known)
    assert len(list(tmp_path.glob("shard_*.json"))) == 2
