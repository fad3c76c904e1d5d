"""Rows that cannot be used: each is named with its place and ends the run, or is skipped and
counted, whatever interrupts the run. Rows without text are no samples and are not counted."""

import gzip
import json
import random
import shutil
import uuid

import datasets
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from pods import flags_for
from small_runs import TEXT, content, set_status, stream_of

import extract_activations
from activation_extraction import ActivationDataset
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.text import documents
from activation_extraction.text import samples as text_samples
from activation_extraction.text.batch import Worker
from activation_extraction.text.documents import DocumentStream, check_dataset
from activation_extraction.text.rows import RowForm, TextColumn
from activation_extraction.text.samples import SampleForm, samples
from activation_extraction.text.sources import open_files

GOOD = '{"text": "good"}'
BODY = RowForm(TextColumn("body"))
NOT_UTF8 = pyarrow.array([b"good", b"\xff", b"good"]).view(pyarrow.string())


def write_lines(path, lines, end="\n"):
    data = end.join([*lines, ""]).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def write_parquet(path, row_group_size=2, **columns):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=row_group_size)
    return path


JSON_LINES = {
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


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("case", JSON_LINES)
def test_a_line_is_named_or_skipped(tmp_path, name, case):
    line, why = JSON_LINES[case]
    whole = "\n".join([GOOD, "", line, GOOD]).encode(errors="surrogateescape")
    path = tmp_path / name
    path.write_bytes(gzip.compress(whole) if name.endswith(".gz") else whole)
    check_both_ways(path, f"{path} line 3: {why}", good=2, bad=1)


PARQUET = {
    "not text": ({"text": pyarrow.array([1, None, 3])}, 0, 0, "expected text, found int 1", 2),
    "bytes": ({"text": pyarrow.array([None, None, b"x"])}, 1, 0, "expected text, found bytes", 1),
    "no column": (
        {"body": ["a"] * 3, "id": [1] * 3},
        0,
        0,
        "no such column; the columns are body (text), id",
        3,
    ),
    "not UTF-8": ({"text": NOT_UTF8}, 0, 1, "not UTF-8: ", 1),
}


@pytest.mark.parametrize("case", PARQUET)
def test_a_row_of_a_parquet_file_is_named_or_skipped(tmp_path, case):
    columns, group, row, why, bad = PARQUET[case]
    write_parquet(tmp_path / "a.parquet", text=["good", "good"])
    path = write_parquet(tmp_path / "b.parquet", **columns)
    good = 4 if case == "not UTF-8" else 2
    place = f"{path} row group {group} row {row} (both from 0): "
    check_both_ways(tmp_path, place, why, good=good, bad=bad)


def check_both_ways(path, *told, good=2, bad=1):
    with pytest.raises(RunError) as caught:
        list(stream_of(path))
    assert str(caught.value).startswith("a row cannot be used: ")
    assert all(part in str(caught.value) for part in told)
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
    table = pyarrow.table({"text": ["one", "two", "three"], "created": HUGE[case]})
    if end == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
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
    assert extract_activations.main([*map(str, flags), "--keep_columns", "other"]) == 0
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


def test_a_file_that_cannot_be_read_on_is_not_a_bad_row(tmp_path):
    """Skipping rows does not pass over the rest of a file."""
    whole = gzip.compress("".join(f'{{"text": "{n}"}}\n' for n in range(5000)).encode())
    (tmp_path / "x.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RunError, match="data set failed: .*x.jsonl.gz: Compressed file") as caught:
        list(stream_of(tmp_path, skip=True))
    assert "replace the damaged file" in caught.value.remedy


def test_rows_without_text_are_no_samples_and_not_bad(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        ['{"text": null}', '{"text": ""}', r'{"text": " \n\t　"}', GOOD],
    )
    assert [document and document.content.text for document in stream_of(path)] == [None] * 3 + [
        "good"
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_blank_lines_and_a_last_line_cut_short(tmp_path, name, end):
    path = write_lines(tmp_path / name, [GOOD, "", "  ", GOOD, '{"text": "cu'], end)
    check_both_ways(path, f"{path} line 5: not JSON", good=2, bad=1)
    path = write_lines(tmp_path / name, ['\ufeff{"text": "good"}', GOOD], end)
    assert [document.content.text for document in stream_of(path)] == ["good", "good"]


def write_many(folder, chance):
    """Files with bad rows among good ones; the number of bad ones."""
    folder.mkdir()
    bad = 0
    for number in range(chance.randint(1, 4)):
        lines = [chance.choice([GOOD, GOOD, '{"text": ""}', "{", "[]"]) for _ in range(40)]
        bad += sum(line in ("{", "[]") for line in lines)
        write_lines(folder / f"{number}.jsonl", lines)
    return bad


@pytest.mark.parametrize("seed", range(5))
def test_workers_count_every_bad_row_once(tmp_path, seed):
    chance = random.Random(seed)
    bad = write_many(tmp_path / "data", chance)
    counted = 0
    for machine in range(3):
        hosts = chance.randint(1, 4)
        for host in range(hosts):
            stream = stream_of(tmp_path / "data", Worker(machine, 3, host, hosts), skip=True)
            for _ in stream:
                pass
            counted += stream.counts.skipped
    assert counted == bad


@pytest.mark.parametrize("seed", range(5))
def test_the_count_continues_at_every_sample(tmp_path, tokenizer, monkeypatch, seed):
    """Whatever a chunk reads again is not counted again; with a limit, nothing behind it is."""
    monkeypatch.setattr(text_samples, "CHUNK_ROWS", 7)
    write_many(tmp_path / "data", random.Random(seed))

    def run(start=None, most=None):
        stream = stream_of(tmp_path / "data", skip=True)
        found = list(samples(stream, tokenizer, SampleForm(8), most, start))
        return found, stream.counts.skipped

    full, skipped = run()
    assert 0 < skipped and full[-1].next_cursor.skipped_rows <= skipped
    for n, sample in enumerate(full):
        for start, at in ((sample.cursor, n), (sample.next_cursor, n + 1)):
            again, count = run(start)
            assert count == skipped
            assert [s.next_cursor.skipped_rows for s in again] == [
                s.next_cursor.skipped_rows for s in full[at:]
            ]
        assert run(most=n + 1)[1] == sample.next_cursor.skipped_rows


def test_the_first_rows_are_checked_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "CHECKED_ROWS", 3)
    path = write_lines(tmp_path / "a.jsonl", ["{", "[]", GOOD])
    rows = open_files(str(path), TEXT.columns)
    with pytest.raises(InputError, match="line 1: not JSON.*add --skip_bad_rows"):
        check_dataset(rows, TEXT)
    check_dataset(rows, TEXT, skip_bad_rows=True)
    with pytest.raises(InputError, match="none of the first 3 rows can be used"):
        check_dataset(rows, BODY, skip_bad_rows=True)


@pytest.fixture(scope="module")
def stopped(demo_inputs, tmp_path_factory):
    """Data with three bad lines, the last one at its end; flags; the output of a run that stopped
    at the first one, and of one that skipped them all."""
    folder = tmp_path_factory.mktemp("stopped")
    lines = [json.dumps({"text": f"a text with number {n}", "id": n}) for n in range(160)]
    lines[90:90] = ["{", '{"text": 5}']
    path = write_lines(folder / "rows.jsonl", [*lines, '{"text": "cu'])
    small = (
        "--dataset_path",
        path,
        "--batch_size",
        1,
        "--no_data_parallel",
        "--shard_size_gb",
        0.0001,
    )

    def flags(output, *more):
        return [str(flag) for flag in flags_for(demo_inputs, output, *small, *more)]

    assert extract_activations.main(flags(folder / "all", "--skip_bad_rows")) == 0
    assert extract_activations.main(flags(folder / "some")) == 1
    return folder, flags


def metadata_of(folder):
    return json.loads((folder / "metadata.json").read_text())


@pytest.mark.long
def test_a_run_that_stopped_at_a_bad_row_goes_on_and_skips(stopped, tmp_path, capsys):
    """The bytes are those of a run that skipped from the beginning; so is the count."""
    folder, flags = stopped
    shutil.copytree(folder / "some", tmp_path / "out")
    before = metadata_of(tmp_path / "out")
    assert (before["status"], before["skipped_rows"]) == ("interrupted", 0)
    assert 0 < before["samples"] < 90
    assert extract_activations.main(flags(tmp_path / "out")) == 1
    assert f"{folder}/rows.jsonl line 91: not JSON" in capsys.readouterr().err
    for _ in range(2):  # the second one finds that all is done
        assert extract_activations.main(flags(tmp_path / "out", "--skip_bad_rows")) == 0
        expected = "\nskipped: 3 rows that could not be used (--skip_bad_rows)\n"
        assert expected in capsys.readouterr().out
        assert metadata_of(tmp_path / "out")["skipped_rows"] == 3
    assert content(tmp_path / "out") == content(folder / "all")
    assert extract_activations.main(flags(tmp_path / "out")) == 2
    told = "already holds an extraction that differs in skip_bad_rows: True, now False"
    assert told in capsys.readouterr().err
    assert extract_activations.main(["--verify", "--output_dir", str(tmp_path / "out")]) == 0


def test_the_count_survives_a_kill(stopped, tmp_path):
    folder, flags = stopped
    shards = len(list((folder / "all").glob("shard_*.json")))
    counts = []
    for kept in (shards // 2, shards - 2):  # before the first bad row and behind it
        out = tmp_path / str(kept)
        shutil.copytree(folder / "all", out)
        for path in out.glob("shard_*"):
            if int(path.name[6:10]) > kept:
                path.unlink()
        set_status(out, "running")
        assert extract_activations.main(flags(out, "--skip_bad_rows")) == 0
        assert content(out) == content(folder / "all")
        counts.append(metadata_of(out)["skipped_rows"])
    assert counts == [3, 3]


def test_a_limit_counts_only_rows_before_it(stopped, tmp_path):
    _, flags = stopped
    for most, expected in ((100, 2), (170, 3)):
        limit = ("--skip_bad_rows", "--max_samples", str(most))
        assert extract_activations.main(flags(tmp_path / "out", *limit)) == 0
        metadata = metadata_of(tmp_path / "out")
        assert (metadata["samples"], metadata["skipped_rows"]) == (min(most, 160), expected)


@pytest.mark.long
def test_a_machine_without_any_row_to_use_counts_its_rows(demo_inputs, tmp_path, check):
    """Also when it starts again. The other machine need not skip rows."""
    (tmp_path / "data").mkdir()
    write_lines(tmp_path / "data/a.jsonl", [GOOD] * 3)
    write_lines(tmp_path / "data/b.jsonl", ["{"] * 4)
    flags = flags_for(demo_inputs, tmp_path / "out", "--dataset_path", tmp_path / "data")
    flags = [str(flag) for flag in (*flags, "--total_machines", 2)]
    for _ in range(2):
        assert extract_activations.main([*flags, "--machine_id", "1", "--skip_bad_rows"]) == 0
        metadata = metadata_of(tmp_path / "out/machine_001")
        assert (metadata["samples"], metadata["skipped_rows"]) == (0, 4)
    assert extract_activations.main([*flags, "--machine_id", "0"]) == 0
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
