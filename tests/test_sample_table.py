"""The table of samples: whatever is known of a sample is read back as it was given, and filtered by
pyarrow."""

import json
import math
from itertools import combinations_with_replacement
from typing import Any

import numpy as np
import pyarrow.compute
import pyarrow.parquet
import pytest
from storages import open_storage

from activation_extraction.common.errors import StorageError
from activation_extraction.store.sample_table import (
    concatenate_tables,
    pack_table,
    samples_to_continue,
    stored_samples,
)
from activation_extraction.store.shard import ShardSample
from activation_extraction.text.sample_facts import SampleFacts, StoredSample

NUMBERS = [0, 7, -(2**63), 2**63, 2**70, 1.5, -0.0, math.nan, math.inf]
SCALARS: list[Any] = [None, True, *NUMBERS, "", "ä", "\ud800"]
VALUES = [*SCALARS, [], [1, 2.0, None], {}, {"a": None}, [{"\ud800": "x"}, {"b": [True]}]]
VALUES += [[{str(n): n} for n in range(99)], json.loads("[" * 60 + "]" * 60)]  # wide and deep
ROWS = [
    None,
    {},
    {"file": "a.jsonl", "line": 7},
    {"file": "a.jsonl", "line": 8, "piece": 0, "start": 0},
    {"file": None},
    {"file": 3},
    {"\ud800": 1, "": 2, "a.b": "\ud800"},
    {str(n): n for n in range(64)},
]


def table_of(*known):
    """The table of samples of 1, 2, 3 and so on tokens, of which these fields are known."""
    samples = [
        ShardSample(SampleFacts(n, **fields), None, np.arange(n + 1, dtype=np.int32))
        for n, fields in enumerate(known)
    ]
    return pyarrow.parquet.read_table(pyarrow.BufferReader(pack_table(samples)))


POOLS: dict[str, list[Any]] = {
    "doc_id": SCALARS,
    "row": ROWS,
    "cut": [0, 2**63 - 1],
    "text_preview": ["", "ä", "\ud800"],
    "columns": [{}, *({"größe": value, "a.b": 1, "": True} for value in VALUES)],
}


def test_whatever_is_known_of_a_sample_is_read_back():
    """Another sample may have a value of any other type, or none."""
    for name, pool in POOLS.items():
        for values in combinations_with_replacement(pool, 2):
            table = table_of(*({name: value} for value in values))
            samples = zip(stored_samples(table), values, strict=True)
            for number, (sample, value) in enumerate(samples):
                assert (sample.facts.sample_idx, sample.num_kept_tokens) == (number, number + 1)
                found = getattr(sample.facts, name)
                if isinstance(value, dict):
                    found, value = sorted(found.items()), sorted(value.items())
                assert repr(found) == repr(value), values  # types, too


def test_a_start_that_continues_keeps_no_previews_and_columns():
    rows = [{"file": "a", "line": 1}, None]
    table = table_of(*({"row": row, "text_preview": "x", "columns": {"a": 1}} for row in rows))
    first, second = (SampleFacts(number, row) for number, row in enumerate(rows))
    assert samples_to_continue(table) == {0: StoredSample(first, 1), 1: StoredSample(second, 2)}


def test_plain_values_are_columns_of_their_types():
    """Any reader of Parquet can filter by them, and by a field of the row."""
    rows = [{"file": "a", "line": n} | ({"piece": 0} if n % 2 else {}) for n in range(4)]
    scores = [0.0, None, 1.0, 1.5]
    known = [{"doc_id": f"id-{n}", "row": row} for n, row in enumerate(rows)]
    table = table_of(*(a | {"columns": {"score": b}} for a, b in zip(known, scores, strict=True)))
    assert {each.name: str(each.type) for each in table.schema} == {
        **{"sample_idx": "int64", "tokens": "int32", "doc_id": "string"},
        **{"row": "struct<file: string, line: int64, piece: int64>", "cut": "int64"},
        **{"text_preview": "string", "score": "double"},
    }
    assert table["score"].to_pylist() == scores
    assert table.filter(pyarrow.compute.field("row", "line") == 2)["sample_idx"].to_pylist() == [2]


@pytest.mark.parametrize(
    "shards,expected",
    [
        ([["a"], ["b", None]], ["a", "b", None]),
        ([[None], [7]], [None, 7]),
        ([[1], [2.5]], [1.0, 2.5]),
        ([[2**60 + 1], [2.5]], [str(2**60 + 1), "2.5"]),  # which no float has
        ([[1, "x", None], [True]], ["1", "x", None, "True"]),
        ([["\ud800"], ["x"]], ["?", "x"]),
    ],
)
def test_tables_of_shards_become_one(shards, expected):
    tables = [table_of(*({"doc_id": each} for each in ids)) for ids in shards]
    assert concatenate_tables(tables)["doc_id"].to_pylist() == expected
    assert [s.facts.doc_id for table in tables for s in stored_samples(table)] == sum(shards, [])


def test_shards_with_other_rows_and_columns_become_one_table():
    one = table_of({"row": {"file": "a", "line": 1}, "columns": {"label": 1, "tags": ["x"]}})
    two = table_of({"row": {"file": "b", "row": 2}, "columns": {"split": "test"}}, {})
    table = concatenate_tables([one, two])
    assert table["row"].to_pylist()[1:] == [{"file": "b", "line": None, "row": 2}, None]
    assert table["label"].to_pylist() == [1, None, None]
    assert table["tags"].to_pylist() == [["x"], None, None]
    texts = concatenate_tables([one, table_of({"row": {"file": 3}})])["row"].to_pylist()
    assert texts == ['{"file": "a", "line": 1}', '{"file": 3}']
    shards = [table_of({"columns": {"one": {str(n): n}}}) for n in range(99)]
    assert (
        concatenate_tables(shards)["one"].to_pylist()[7] == '{"7": 7}'
    )  # and no 99 fields in each row
    assert concatenate_tables([]).num_rows == 0


JSON = "its id, row, text preview or columns are no JSON values: "


@pytest.mark.parametrize(
    "given,told",
    [
        ({"doc_id": b"x"}, JSON),
        ({"columns": {"\ud800": 7}}, JSON),
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
