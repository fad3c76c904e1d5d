"""Rows that cannot be used: each is named with its place and ends the run, or is skipped and
counted, whatever interrupts the run. Rows without text are no samples and are not counted."""

import json
import uuid

import datasets
import pyarrow
import pytest
from command_line import main
from pods import flags_for
from row_files import as_arrow, as_parquet, packed, write_lines, write_parquet
from small_runs import TEXT, stream_of

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.text.batch import Worker
from activation_extraction.text.documents import DocumentStream, Mixture, check_dataset
from activation_extraction.text.rows import IdsColumn, RowForm, TextColumn
from activation_extraction.text.samples import SampleForm, samples
from activation_extraction.text.sources import open_files

GOOD = '{"text": "good"}'
BODY = RowForm(TextColumn("body"))
KEPT = RowForm(TextColumn("text"), keep_columns=("other",))
NOT_UTF8 = pyarrow.array([b"good", b"\xff", b"good"]).view(pyarrow.string())


def arrow(**columns):
    return as_arrow(pyarrow.table(columns))


def parquet(**columns):
    return as_parquet(pyarrow.table(columns), 2)


TEXT_IS = "--text_column text: expected text, found "
DEEP = '{{"text": "bad", "{}": {}}}'.format
LONG = json.dumps("é" * 50_000)  # six bytes each
# A line that cannot be used, and why.
LINES = [
    ('{"text": "cut', "not JSON: Unterminated string starting at, column 10"),
    ("[1, 2]", "expected a JSON object, found list"),
    ('{"text": 5}', f"{TEXT_IS}int 5"),
    ('{"text": ["a"]}', f"{TEXT_IS}list ['a']"),
    ('{"text": [7, 8]}', f"{TEXT_IS}token ids; --ids_column text reads it"),
    ('{"text": [{"role": "user"}]}', f"{TEXT_IS}a conversation; --messages_column text reads it"),
    ('{"other": "x"}', "--text_column text: no such column; the columns are other (text)"),
    ("{}", "--text_column text: no such column; the columns are none"),
    ('{"train": [{"input": [[1]]}], "test": []}', "it has ARC-AGI columns but no grids in them"),
    ('{"text": "\udcff"}', "not JSON: "),
    (DEEP("id", LONG), "its id takes 300,002 bytes, there is room for 262,144"),
    (DEEP("id", f'{{"$oid": {LONG}}}'), "its id takes 300,"),
]
ROW = "row 1 (from 0): "
GROUP = "row group {} row {} (both from 0): {}".format
NO_COLUMN = "--text_column text: no such column; the columns are body (text), id"
NUMBERS, BYTES = pyarrow.array([1, None, 3]), pyarrow.array([None, None, b"x"])
BODIES = parquet(body=["a"] * 3, id=[1] * 3)
# The name of a file, its content, the row that is named and why, the good rows and the bad ones.
BAD = [
    *(
        ("a.jsonl", "\n".join([GOOD, "", line, GOOD]), f"line 3: {why}", 2, 1)
        for line, why in LINES
    ),
    ("a.jsonl.gz", f"\ufeff{GOOD}\r\n\r\n  \r\n{GOOD}\r\n{{", "line 5: not JSON", 2, 1),
    ("a.csv", "text,id\ngood,1\nbad\n\ngood,2\n", f"{ROW}expected 2 fields as in the header", 2, 1),
    ("a.csv", 'text\ngood\n"bad\n",1\ngood', f"{ROW}expected 1 field", 2, 1),
    ("a.csv", b"text\r\ngood\r\nbad\xff\r\ngood", f"{ROW}not UTF-8", 2, 1),
    ("a.csv", b"body,id\nx,1", f"row 0 (from 0): {NO_COLUMN} (text)", 0, 1),
    ("a.json", f'[{GOOD}, ["bad"], {GOOD}]', f"{ROW}expected a JSON object, found list", 2, 1),
    ("a.json", f"[{GOOD},23,{GOOD}]", f"{ROW}expected a JSON object, found int", 2, 1),
    ("a.arrow", arrow(text=NOT_UTF8), f"{ROW}column text: 'utf-8' codec can't decode", 2, 1),
    ("a.parquet", parquet(text=NOT_UTF8), GROUP(0, 1, "column text: 'utf-8' codec"), 2, 1),
    ("a.parquet", parquet(text=NUMBERS), GROUP(0, 0, f"{TEXT_IS}int 1"), 0, 2),
    ("a.parquet", parquet(text=BYTES), GROUP(1, 0, f"{TEXT_IS}bytes"), 0, 1),
    ("a.parquet", BODIES, GROUP(0, 0, NO_COLUMN), 0, 3),
]


@pytest.mark.parametrize("name,data,told,good,bad", BAD)
def test_a_row_is_named_or_skipped(tmp_path, name, data, told, good, bad):
    path = tmp_path / name
    data = data if isinstance(data, bytes) else data.encode(errors="surrogateescape")
    path.write_bytes(packed(name, data))
    with pytest.raises(RunError) as caught:
        list(stream_of(path))
    assert str(caught.value).startswith(f"a row cannot be used: {path} {told}")
    assert "--skip_bad_rows" in caught.value.remedy
    stream = stream_of(path, skip=True)
    texts = [document.content.text for document in stream if document]
    assert (texts, stream.counts.skipped) == (["good"] * good, bad)


HUGE = {  # such as milliseconds that were taken for seconds
    "seconds": pyarrow.array([0, 1717171717123, 5], pyarrow.timestamp("s")),
    "with a zone": pyarrow.array([0, 2**60, 5], pyarrow.timestamp("us", "Europe/Berlin")),
    "days": pyarrow.array([0, 4 * 10**6, 5], pyarrow.date32()),
    "spans": pyarrow.array([0, 10**18, 5], pyarrow.duration("s")),
    "in lists": pyarrow.array([[0], [1, 2**60], []], pyarrow.list_(pyarrow.timestamp("us"))),
}


@pytest.mark.parametrize("end,form_of", [("parquet", parquet), ("arrow", arrow)])
@pytest.mark.parametrize("case", HUGE)
def test_a_date_beyond_the_year_9999_is_a_bad_row(tmp_path, case, end, form_of):
    """The rows beside it are read, and so are all where nobody asks for the column."""
    path = tmp_path / f"a.{end}"
    path.write_bytes(form_of(text=["one", "two", "three"], other=HUGE[case]))
    for form in (KEPT, RowForm(TextColumn("text"), id_column="other")):
        with pytest.raises(RunError, match=r"a\.\w+ row .*1 \(.*from 0\): column other: "):
            list(stream_of(path, form=form))
        stream = stream_of(path, skip=True, form=form)
        assert [each.content.text for each in stream if each] == ["one", "three"]
        assert stream.counts.skipped == 1
    assert [each.content.text for each in stream_of(path)] == ["one", "two", "three"]


def test_uuids_and_times_of_day_are_stored_as_text(tmp_path):
    number = uuid.UUID(int=7)
    columns = {
        "uuid": pyarrow.array([number.bytes], pyarrow.uuid()),
        "micro": pyarrow.array([3_661_000_002], pyarrow.time64("us")),
        "nano": pyarrow.array([3_661_000_000_002], pyarrow.time64("ns")),
    }
    path = write_parquet(tmp_path / "a.parquet", text=["good"], **columns)
    expected = {"uuid": str(number), "micro": "01:01:01.000002", "nano": "01:01:01.000000002"}
    form = RowForm(TextColumn("text"), keep_columns=tuple(columns))
    assert [each.columns for each in stream_of(path, form=form)] == [expected]
    for name, text in expected.items():
        form = RowForm(TextColumn("text"), id_column=name)
        assert [each.doc_id for each in stream_of(path, form=form)] == [text]


@pytest.mark.parametrize(
    "row,told",
    [
        ({"ids": [0, 9], "mask": [0, 1]}, None),
        ({"ids": [0, 10], "mask": [0, 1]}, "token id 10; the model has token ids 0 to 9"),
        ({"ids": [0, -1], "mask": [0, 1]}, "token id -1; the model has"),
        ({"ids": [0, 1.0], "mask": [0, 1]}, "--ids_column ids: expected a list of whole numbers, "),
        ({"ids": [0, 2**70], "mask": [0, 1]}, "expected a list of whole numbers, found list [0, 1"),
        ({"ids": [[0], [1, 2]], "mask": [0, 1]}, "expected a list of whole numbers"),
        ({"ids": "01", "mask": [0, 1]}, "expected a list of whole numbers, found str"),
        ({"ids": [0, 1], "mask": [0, 2]}, "--mask_column mask: expected 2 values, each 0 or 1"),
        ({"ids": [0, 1], "mask": [1]}, "--mask_column mask: expected 2 values, each 0 or 1"),
    ],
)
def test_token_ids_that_the_model_lacks_are_a_bad_row(tmp_path, row, told):
    path = write_lines(tmp_path / "a.jsonl", [json.dumps(row)])
    stream = stream_of(path, form=RowForm(IdsColumn("ids", "mask", 10)))
    if told is None:
        (document,) = stream
        assert document.content.token_ids.tolist() == row["ids"]
        assert document.content.mask.tolist() == [False, True]
        return
    with pytest.raises(RunError, match="a.jsonl line 1: ") as caught:
        list(stream)
    assert told in str(caught.value)


def test_the_longest_id_and_columns_are_stored(demo_inputs, tmp_path):
    row = {"text": "\U0001f600" * 300, "id": "x" * 262_142, "other": "y" * 524_000}
    path = write_lines(tmp_path / f"{'n' * 200}.jsonl", [json.dumps(row)])
    flags = flags_for(demo_inputs, tmp_path / "out", "--dataset_path", path)
    assert main(*flags, "--keep_columns", "other") == 0
    (sample,) = ActivationDataset(tmp_path / "out")
    assert (sample.doc_id, sample.columns["other"]) == (row["id"], row["other"])


@pytest.mark.parametrize("levels", [61, 400, 10_000])
def test_columns_of_many_levels_make_a_bad_row(tmp_path, levels):
    row = DEEP("other", "[" * levels + "]" * levels)
    path = write_lines(tmp_path / "rows.jsonl", [row, '{"text": "good", "other": 1}'])
    stream = stream_of(path, skip=True, form=KEPT)
    assert [each.content.text for each in stream if each] == ["good"]
    assert stream.counts.skipped == 1


def test_a_row_of_a_hub_data_set_is_named_by_its_number_and_id(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", 4, id=["a", "b", "c"], body=[1, 2, 3])
    rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    with pytest.raises(RunError, match=r"row 0 \(from 0\) of the data set, id 'a': --text"):
        list(DocumentStream(rows, TEXT))
    with pytest.raises(RunError, match=r"row 2 \(from 0\) of the rows that this host reads"):
        list(DocumentStream(rows, BODY, Worker(machine=2, machines=3)))


def test_workers_count_every_bad_row_once(tmp_path):
    for name in "abc":
        write_lines(tmp_path / f"{name}.jsonl", [GOOD, "{", '{"text": ""}', "[]", GOOD] * 8)
    skipped = empty = 0
    for machine, hosts in enumerate((1, 4, 3)):
        for host in range(hosts):
            stream = stream_of(tmp_path, Worker(machine, 3, host, hosts), skip=True)
            list(stream)
            skipped, empty = skipped + stream.counts.skipped, empty + stream.counts.empty
    assert (skipped, empty) == (3 * 16, 3 * 8)


def test_rows_without_text_do_not_count_in_a_mixture(tmp_path):
    write_lines(tmp_path / "a.jsonl", ['{"text": " "}'] * 3 + [GOOD] * 4)
    write_lines(tmp_path / "b.jsonl", ['{"text": "b"}'] * 4)
    streams = [stream_of(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    mixture = Mixture(streams, ["a", "b"], [1, 1])
    assert [each.content.text for each in mixture if each] == ["good", "b"] * 4


def test_the_first_rows_are_checked_before_anything_starts(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", ["{"] * 999 + [GOOD, "[]"])
    rows = open_files(str(path), TEXT.columns)
    with pytest.raises(InputError, match="line 1: not JSON.*add --skip_bad_rows"):
        check_dataset(rows, TEXT)
    check_dataset(rows, TEXT, skip_bad_rows=True)
    for form in (BODY, RowForm(TextColumn("text"), id_column="id")):
        with pytest.raises(InputError, match="none of the first 1,000 rows can be used"):
            check_dataset(rows, form, skip_bad_rows=True)


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

    assert main(*flags) == 1
    assert f"{path} line 91: not JSON" in capsys.readouterr().err
    assert (recorded()["status"], recorded()["skipped_rows"]) == ("interrupted", 0)
    assert 0 < recorded()["samples"] <= 90
    assert main(*flags, "--skip_bad_rows", "--max_samples", 100) == 0
    assert recorded()["skipped_rows"] == 2  # not the one behind the last sample
    for _ in range(2):  # the second one finds that all is done
        assert main(*flags, "--skip_bad_rows") == 0
        told = "\nskipped: 3 rows that could not be used (--skip_bad_rows)\n"
        assert told in capsys.readouterr().out
        assert recorded()["skipped_rows"] == 3
    assert [sample.doc_id for sample in ActivationDataset(out)] == [*range(160)]


@pytest.mark.parametrize("split", [False, True])
def test_a_row_behind_the_last_token_of_a_budget_is_not_read(tmp_path, tokenizer, split):
    """Wherever in a chunk the budget ends."""
    path = write_lines(tmp_path / "rows.jsonl", [GOOD, '{"text": "good good"}', "not JSON"])
    form = SampleForm(1, split)
    every = list(samples(stream_of(path, skip=True), tokenizer, form))
    for limit in ("max_samples", "max_tokens"):
        for most in range(1, len(every) + 1):
            found = list(samples(stream_of(path), tokenizer, form, **{limit: most}))
            assert [s.token_ids.tolist() for s in found] == [
                s.token_ids.tolist() for s in every[:most]
            ]


def test_rows_behind_a_budget_are_not_counted(tmp_path, tokenizer):
    path = write_lines(tmp_path / "rows.jsonl", ['{"text": ""}', "{", GOOD] * 2)
    stream = stream_of(path, skip=True)
    assert len(list(samples(stream, tokenizer, SampleForm(1), max_tokens=1))) == 1
    assert (stream.counts.skipped, stream.counts.empty) == (1, 1)
