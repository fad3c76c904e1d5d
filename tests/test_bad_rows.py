"""Rows that cannot be used: each is named with its place and ends the run, or is skipped and
counted, whatever interrupts the run. Rows without text are no samples and are not counted."""

import json
import uuid

import datasets
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from command_line import main
from pods import flags_for
from row_files import packed, write_lines, write_parquet
from small_runs import TEXT, stream_of

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.text import documents, file_rows
from activation_extraction.text.batch import Worker
from activation_extraction.text.documents import DocumentStream, check_dataset
from activation_extraction.text.rows import RowForm, TextColumn
from activation_extraction.text.samples import SampleForm, samples
from activation_extraction.text.sources import open_files

GOOD = '{"text": "good"}'
BODY = RowForm(TextColumn("body"))
NOT_UTF8 = pyarrow.array([b"good", b"\xff", b"good"]).view(pyarrow.string())


def arrow(**columns):
    sink, table = pyarrow.BufferOutputStream(), pyarrow.table(columns)
    with pyarrow.ipc.new_file(sink, table.schema) as file:
        file.write_table(table)
    return sink.getvalue().to_pybytes()


def parquet(**columns):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink, row_group_size=2)
    return sink.getvalue().to_pybytes()


LINES = {
    "not JSON": ('{"text": "cut', "not JSON: Unterminated string starting at, column 10"),
    "no object": ("[1, 2]", "expected a JSON object, found list"),
    "a number": ('{"text": 5}', "--text_column text: expected text, found int 5"),
    "a list": ('{"text": ["a"]}', "--text_column text: expected text, found list"),
    "no column": (
        '{"other": "x"}',
        "--text_column text: no such column; the columns are other (text)",
    ),
    "no grids": (
        '{"train": [{"input": [[1]]}], "test": []}',
        "it has ARC-AGI columns but no grids in them",
    ),
    "not UTF-8": ('{"text": "\udcff"}', "not JSON: "),
}
ROW = "row 1 (from 0): "
GROUP = "row group {} row {} (both from 0): "
# The name of a file, its content, the row that is named and why, the good rows and the bad ones.
BAD = {
    **{
        f"{case}, {name}": (name, "\n".join([GOOD, "", line, GOOD]), f"line 3: {why}", 2, 1)
        for case, (line, why) in LINES.items()
        for name in ("a.jsonl", "a.jsonl.gz")
    },
    "too few fields": ("a.csv", "text,id\ngood,1\nbad\n\ngood,2\n", f"{ROW}expected 2 ", 2, 1),
    "too many": ("a.csv", 'text\ngood\n"bad\n",1\ngood', f"{ROW}expected 1 field", 2, 1),
    "csv not UTF-8": ("a.csv", b"text\r\ngood\r\nbad\xff\r\ngood", f"{ROW}not UTF-8", 2, 1),
    "array with a list": ("a.json", f'[{GOOD}, ["bad"], {GOOD}]', f"{ROW}expected a", 2, 1),
    "array with a number": ("a.json", f"[{GOOD},23,{GOOD}]", f"{ROW}expected a", 2, 1),
    "array not UTF-8": (
        "a.json",
        b'[{"text": "good"}, {"text": "\xff"}, {"text": "good"}]',
        f"{ROW}not UTF-8",
        *(2, 1),
    ),
    "arrow not UTF-8": ("a.arrow", arrow(text=NOT_UTF8), f"{ROW}not UTF-8", 2, 1),
    "parquet not UTF-8": ("a.parquet", parquet(text=NOT_UTF8), GROUP.format(0, 1), 2, 1),
    "parquet of numbers": (
        "a.parquet",
        parquet(text=pyarrow.array([1, None, 3])),
        GROUP.format(0, 0) + "--text_column text: expected text, found int 1",
        *(0, 2),
    ),
    "parquet of bytes": (
        "a.parquet",
        parquet(text=pyarrow.array([None, None, b"x"])),
        GROUP.format(1, 0) + "--text_column text: expected text, found bytes",
        *(0, 1),
    ),
    "parquet without the column": (
        "a.parquet",
        parquet(body=["a"] * 3, id=[1] * 3),
        GROUP.format(0, 0) + "--text_column text: no such column; the columns are body (text), id",
        *(0, 3),
    ),
}


@pytest.mark.parametrize("piece", [3, 2**16])
@pytest.mark.parametrize("case", BAD)
def test_a_row_is_named_or_skipped(tmp_path, monkeypatch, case, piece):
    monkeypatch.setattr(file_rows, "PIECE", piece)
    name, data, told, good, bad = BAD[case]
    data = data if isinstance(data, bytes) else data.encode(errors="surrogateescape")
    (tmp_path / name).write_bytes(packed(name, data))
    check_both_ways(tmp_path, f"{tmp_path / name} {told}", good=good, bad=bad)


def check_both_ways(path, *told, good=2, bad=1):
    with pytest.raises(RunError) as caught:
        list(stream_of(path))
    assert str(caught.value).startswith("a row cannot be used: ")
    assert all(part in str(caught.value) for part in told), caught.value
    assert "--skip_bad_rows" in caught.value.remedy
    stream = stream_of(path, skip=True)
    texts = [document.content.text for document in stream if document]
    assert (texts, stream.counts.skipped) == (["good"] * good, bad)


HUGE = {  # such as milliseconds that were taken for seconds
    "seconds": pyarrow.array([0, 1717171717123, 5], pyarrow.timestamp("s")),
    "microseconds": pyarrow.array([0, 2**60, 5], pyarrow.timestamp("us")),
    "with a zone": pyarrow.array([0, 2**60, 5], pyarrow.timestamp("us", "Europe/Berlin")),
    "days": pyarrow.array([0, 4 * 10**6, 5], pyarrow.date32()),
    "spans": pyarrow.array([0, 10**18, 5], pyarrow.duration("s")),
    "in lists": pyarrow.array([[0], [1, 2**60], []], pyarrow.list_(pyarrow.timestamp("us"))),
}


@pytest.mark.parametrize("end", ["parquet", "arrow"])
@pytest.mark.parametrize("case", HUGE)
def test_a_date_beyond_the_year_9999_is_a_bad_row(tmp_path, case, end):
    """The rows beside it are read, and so are all where nobody asks for the column."""
    path = tmp_path / f"a.{end}"
    form_of = {"parquet": parquet, "arrow": arrow}[end]
    path.write_bytes(form_of(text=["one", "two", "three"], created=HUGE[case]))
    texts = TextColumn("text")
    for form in (RowForm(texts, keep_columns=("created",)), RowForm(texts, id_column="created")):
        with pytest.raises(RunError, match=r"a\.\w+ row .*1 \(.*from 0\): column created: "):
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


LONG = "é" * 50_000  # six bytes of JSON each


@pytest.mark.parametrize("given", [LONG, {"$oid": LONG}, [LONG, 5]])
def test_an_id_that_is_too_long_is_a_bad_row(tmp_path, given):
    """One stranger's row must not end the run when its shard is written."""
    path = write_lines(tmp_path / "a.jsonl", [GOOD, json.dumps({"text": "bad", "id": given}), GOOD])
    check_both_ways(path, f"{path} line 2: its id takes 300,", " there is room for 262,144")


def test_the_longest_id_and_columns_are_stored(demo_inputs, tmp_path):
    row = {"text": "\U0001f600" * 300, "id": "x" * 262_142, "other": "y" * 524_000}
    path = write_lines(tmp_path / f"{'n' * 200}.jsonl", [json.dumps(row)])
    flags = flags_for(demo_inputs, tmp_path / "out", "--dataset_path", path)
    assert main(*flags, "--keep_columns", "other") == 0
    (sample,) = ActivationDataset(tmp_path / "out")
    assert (sample.doc_id, sample.columns["other"]) == (row["id"], row["other"])


def test_a_row_of_a_hub_data_set_is_named_by_its_number_and_id(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", 4, id=["a", "b", "c"], body=[1, 2, 3])
    rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
    with pytest.raises(RunError, match=r"row 0 \(from 0\) of the data set, id 'a': --text"):
        list(DocumentStream(rows, TEXT))
    with pytest.raises(RunError, match=r"row 2 \(from 0\) of the rows that this host reads"):
        for document in DocumentStream(rows, BODY, Worker(machine=2, machines=3)):
            assert document


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_blank_lines_and_a_last_line_cut_short(tmp_path, name, end):
    path = write_lines(tmp_path / name, [GOOD, "", "  ", GOOD, '{"text": "cu'], end)
    check_both_ways(path, f"{path} line 5: not JSON", good=2, bad=1)
    path = write_lines(tmp_path / name, ['\ufeff{"text": "good"}', GOOD], end)
    assert [document.content.text for document in stream_of(path)] == ["good", "good"]


def test_workers_count_every_bad_row_once(tmp_path):
    for name in "abc":
        write_lines(tmp_path / f"{name}.jsonl", [GOOD, "{", '{"text": ""}', "[]", GOOD] * 8)
    counted = 0
    for machine, hosts in enumerate((1, 4, 3)):
        for host in range(hosts):
            stream = stream_of(tmp_path, Worker(machine, 3, host, hosts), skip=True)
            list(stream)
            counted += stream.counts.skipped
    assert counted == 3 * 16


def test_the_first_rows_are_checked_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "CHECKED_ROWS", 3)
    path = write_lines(tmp_path / "a.jsonl", ["{", "[]", GOOD])
    rows = open_files(str(path), TEXT.columns)
    with pytest.raises(InputError, match="line 1: not JSON.*add --skip_bad_rows"):
        check_dataset(rows, TEXT)
    check_dataset(rows, TEXT, skip_bad_rows=True)
    with pytest.raises(InputError, match="none of the first 3 rows can be used"):
        check_dataset(rows, BODY, skip_bad_rows=True)


def metadata_of(folder):
    return json.loads((folder / "metadata.json").read_text())


@pytest.mark.long
def test_a_run_that_stopped_at_a_bad_row_goes_on_and_skips(demo_inputs, tmp_path, capsys):
    """All other rows are stored once, whatever was skipped before and after the stop."""
    lines = [json.dumps({"text": f"a text with number {n}", "id": n}) for n in range(160)]
    lines[90:90] = ["{", '{"text": 5}']
    path, out = write_lines(tmp_path / "rows.jsonl", [*lines, '{"text": "cu']), tmp_path / "out"
    flags = flags_for(demo_inputs, out, "--dataset_path", path, "--batch_size", 1)
    flags += ["--no_data_parallel", "--shard_size_gb", 1e-4]
    assert main(*flags) == 1
    assert f"{path} line 91: not JSON" in capsys.readouterr().err
    before = metadata_of(out)
    assert (before["status"], before["skipped_rows"]) == ("interrupted", 0)
    assert 0 < before["samples"] <= 90
    assert main(*flags, "--skip_bad_rows", "--max_samples", 100) == 0
    assert metadata_of(out)["skipped_rows"] == 2  # not the one behind the last sample
    for _ in range(2):  # the second one finds that all is done
        assert main(*flags, "--skip_bad_rows") == 0
        told = "\nskipped: 3 rows that could not be used (--skip_bad_rows)\n"
        assert told in capsys.readouterr().out
        assert metadata_of(out)["skipped_rows"] == 3
    assert [sample.doc_id for sample in ActivationDataset(out)] == [*range(160)]
    assert main("--verify", "--output_dir", out) == 0


@pytest.mark.long
def test_a_machine_without_any_row_to_use_counts_its_rows(demo_inputs, tmp_path, check):
    """Also when it starts again. The other machine need not skip rows."""
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data/a.jsonl", [GOOD] * 3)
    write_lines(tmp_path / "data/b.jsonl", ["{"] * 4)
    flags = flags_for(demo_inputs, tmp_path / "out", "--dataset_path", tmp_path / "data")
    flags += ["--total_machines", 2]
    for _ in range(2):
        assert main(*flags, "--machine_id", 1, "--skip_bad_rows") == 0
        metadata = metadata_of(tmp_path / "out/machine_001")
        assert (metadata["samples"], metadata["skipped_rows"]) == (0, 4)
    assert main(*flags, "--machine_id", 0) == 0
    assert check(tmp_path / "out") == []


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_a_row_behind_the_last_token_of_a_budget_is_not_read(tmp_path, tokenizer, skip, split):
    """Wherever in a chunk the budget ends."""
    path = write_lines(tmp_path / "rows.jsonl", [GOOD, '{"text": "good good"}', "not JSON"])
    form = SampleForm(1, split)
    every = list(samples(stream_of(path, skip=True), tokenizer, form))
    for limit in ("max_samples", "max_tokens"):
        for most in range(1, len(every) + 1):
            stream = stream_of(path, skip=skip)
            found = list(samples(stream, tokenizer, form, **{limit: most}))
            assert [s.token_ids.tolist() for s in found] == [
                s.token_ids.tolist() for s in every[:most]
            ]
            assert stream.counts.skipped == 0


@pytest.mark.parametrize("levels", [61, 400, 700, 900, 10_000])
def test_columns_of_many_levels_make_a_bad_row(tmp_path, levels):
    deep = "[" * levels + "]" * levels
    path = write_lines(tmp_path / "rows.jsonl", [f'{{"text": "deep", "other": {deep}}}', GOOD])
    form = RowForm(TextColumn("text"), keep_columns=("other",))
    stream = stream_of(path, skip=True, form=form)
    assert [each for each in stream if each] == [] and stream.counts.skipped == 2
