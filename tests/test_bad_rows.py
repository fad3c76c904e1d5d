"""Rows that cannot be used: each is named with its place and ends the run, or is skipped and
counted, whatever interrupts the run. Rows without text are no samples and are not counted."""

import json
import re

import pyarrow
import pytest
from command_line import main
from pods import flags_for
from row_files import as_arrow, as_parquet, packed, write_lines, write_rows
from small_runs import TEXT, documents_in, stream_of

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.text.documents import Mixture, check_dataset
from activation_extraction.text.readers import IdsColumn, TextColumn
from activation_extraction.text.rows import RowSchema
from activation_extraction.text.sources import open_files

GOOD = '{"text": "good"}'


def parquet(**columns):
    return as_parquet(pyarrow.table(columns), 2)


TEXT_IS = "--text_column text: expected text, found "
# A line that cannot be used, and why.
LINES = [
    ('{"text": "cut', "not JSON: Unterminated string starting at, column 10"),
    ("[1, 2]", "expected a JSON object, found list"),
    ('{"text": 5}', f"{TEXT_IS}int 5"),
    ('{"text": [{"role": "user"}]}', f"{TEXT_IS}a conversation; --messages_column text reads it"),
    ('{"other": "x"}', "--text_column text: no such column; the columns are other (text)"),
    ('{"train": [{"input": [[1]]}], "test": []}', "it has ARC-AGI columns but no grids in them"),
    ('{"text": "\udcff"}', "not JSON: "),
]
ROW = "row 1 (from 0): "
GROUP = "row group {} row {} (both from 0): {}".format
NO_COLUMN = "--text_column text: no such column; the columns are body (text)"
NOT_UTF8 = pyarrow.array([b"good", b"\xff", b"good"]).view(pyarrow.string())
# The name of a file, its content, the row that is named and why, the good rows and the bad ones.
BAD = [
    *(
        ("a.jsonl", "\n".join([GOOD, "", line, GOOD]), f"line 3: {why}", 2, 1)
        for line, why in LINES
    ),
    ("a.jsonl.gz", f"\ufeff{GOOD}\r\n\r\n  \r\n{GOOD}\r\n{{", "line 5: not JSON", 2, 1),
    ("a.csv", "text,id\ngood,1\nbad\n\ngood,2\n", f"{ROW}expected 2 fields as in the header", 2, 1),
    ("a.csv", b"text\r\ngood\r\nbad\xff\r\ngood", f"{ROW}not UTF-8", 2, 1),
    # With escapes, the field ends at \", and two rows would become one without a word.
    ("a.csv", b'text\ngood\n"x \\""\n, y"', f'{ROW}column text: a \\" before a comma or', 1, 1),
    ("a.json", f'[{GOOD}, ["bad"], {GOOD}]', f"{ROW}expected a JSON object, found list", 2, 1),
    ("a.arrow", as_arrow(pyarrow.table({"text": NOT_UTF8})), f"{ROW}column text: 'utf-8'", 2, 1),
    ("a.parquet", parquet(text=NOT_UTF8), GROUP(0, 1, "column text: 'utf-8' codec"), 2, 1),
    ("a.parquet", parquet(text=[1, None, 3]), GROUP(0, 0, f"{TEXT_IS}int 1"), 0, 2),
    ("a.parquet", parquet(body=["a"] * 3), GROUP(0, 0, NO_COLUMN), 0, 3),
]


@pytest.mark.parametrize("name,data,told,good,bad", BAD)
def test_a_row_is_named_or_skipped(tmp_path, name, data, told, good, bad):
    path = tmp_path / name
    data = data if isinstance(data, bytes) else data.encode(errors="surrogateescape")
    path.write_bytes(packed(name, data))
    with pytest.raises(RunError) as caught:
        documents_in(stream_of(path))
    assert str(caught.value).startswith(f"a row cannot be used: {path} {told}")
    assert "--skip_bad_rows" in caught.value.remedy
    stream = stream_of(path, skip=True)
    rows = list(stream.read(stream.beginning))
    texts = [row.document.content.text for row in rows if row.document]
    assert (texts, sum(bool(row.skip_reason) for row in rows)) == (["good"] * good, bad)


@pytest.mark.parametrize(
    "ids,mask,told",
    [
        ([0, 9], [0, 1], None),
        ([0, 10], [0, 1], "token id 10; the model has token ids 0 to 9"),
        ([0, 1.0], [0, 1], "--ids_column ids: expected a list of whole numbers, "),
        ([[0], [1, 2]], [0, 1], "expected a list of whole numbers"),
        ([0, 1], [0, 2], "--mask_column mask: expected 2 values, each 0 or 1"),
        ([0, 1], [1], "--mask_column mask: expected 2 values, each 0 or 1"),
    ],
)
def test_token_ids_that_the_model_lacks_are_a_bad_row(tmp_path, ids, mask, told):
    path = write_rows(tmp_path / "a.jsonl", [{"ids": ids, "mask": mask}])
    stream = stream_of(path, schema=RowSchema((IdsColumn("ids", "mask", 10),)))
    if told is None:
        (document,) = documents_in(stream)
        assert document.content.token_ids.tolist() == ids
        assert document.content.storable_token_mask.tolist() == [False, True]
        return
    with pytest.raises(RunError, match=f"a.jsonl line 1: .*{re.escape(told)}"):
        documents_in(stream)


def test_rows_without_text_do_not_count_in_a_mixture(tmp_path):
    write_lines(tmp_path / "a.jsonl", ['{"text": " "}'] * 3 + [GOOD] * 4)
    write_lines(tmp_path / "b.jsonl", ['{"text": "b"}'] * 4)
    streams = [stream_of(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    mixture = Mixture(streams, ["a", "b"], [1, 1])
    assert [each.content.text for each in documents_in(mixture) if each] == ["good", "b"] * 4


def test_the_first_rows_are_checked_before_anything_starts(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["{"] * 999 + [GOOD, "[]"])
    rows = open_files(str(path), TEXT)
    with pytest.raises(InputError, match="line 1: not JSON.*add --skip_bad_rows"):
        check_dataset(rows, TEXT)
    check_dataset(rows, TEXT, skip_bad_rows=True)
    for schema in (
        RowSchema((TextColumn("body"),)),
        RowSchema((TextColumn("text"),), id_column="id"),
    ):
        with pytest.raises(InputError, match="none of the first 1,000 rows can be used"):
            check_dataset(rows, schema, skip_bad_rows=True)


@pytest.mark.long
def test_a_run_that_stopped_at_a_bad_row_goes_on_and_skips(demo_inputs, tmp_path, capsys):
    """All other rows are stored once, whatever was skipped before and after the stop."""
    lines = [json.dumps({"text": f"a text with number {n}", "id": n}) for n in range(160)]
    lines[90:90] = ["{", '{"text": 5}']
    path, out = write_lines(tmp_path / "rows.jsonl", [*lines, '{"text": "cu']), tmp_path / "out"
    flags = flags_for(demo_inputs, out, "--dataset_path", path, "--batch_size", 1)
    flags += ["--no_data_parallel", "--shard_size_gb", 1e-4]

    def recorded():
        return json.loads((out / "metadata.json").read_text())

    for _ in range(2):  # at once, and when it is started again
        assert main(*flags) == 2
        assert f"{path} line 91: not JSON" in capsys.readouterr().err
    assert (recorded()["status"], recorded()["skipped_rows"]) == ("interrupted", 0)
    assert recorded()["samples"] == 90
    for more, skipped in ((["--max_samples", 100], 2), ([], 3), ([], 3)):  # at last, all is done
        assert main(*flags, "--skip_bad_rows", *more) == 0
        told = f"\nskipped: {skipped} rows that could not be used (--skip_bad_rows)\n"
        assert told in capsys.readouterr().out
        assert recorded()["skipped_rows"] == skipped  # not the one behind the last sample
    assert [sample.doc_id for sample in ActivationDataset(out)] == [*range(160)]
