"""Every kind of file gives the same rows: all of them once, and exactly from any of them on.

A file that is damaged is named, and ends the run.
"""

import bz2
import csv
import gzip
import io
import json
import lzma
import tracemalloc

import datasets
import fsspec
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from small_runs import stream_of

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.text import file_rows
from activation_extraction.text.batch import Worker
from activation_extraction.text.file_list import list_files
from activation_extraction.text.rows import RowForm, TextColumn


def rows_of(numbers):
    """Rows whose texts have what CSV has to quote."""
    return [{"text": f'a "text",\r\nnumber {n}: é\n', "id": f"id {n}"} for n in numbers]


def as_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_zstd(rows):
    """Two frames, as of files that were put together."""
    frames = []
    for part in (rows[:3], rows[3:]):
        sink = pyarrow.BufferOutputStream()
        with pyarrow.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(as_lines(part))
        frames.append(sink.getvalue().to_pybytes())
    return b"".join(frames)


def as_csv(rows):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, ["other", *rows[0]], restval="x")
    writer.writeheader()
    writer.writerows(rows)
    return b"\xef\xbb\xbf" + text.getvalue().encode()


def as_arrow(rows, new=pyarrow.ipc.new_file, batch=4):
    rows = [{"other": {"a": [b"\xff"]}, **row} for row in rows]
    table, sink = pyarrow.Table.from_pylist(rows), io.BytesIO()
    with new(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return sink.getvalue()


def as_parquet(rows):
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=4)
    return sink.getvalue()


# What a file is -> how its name ends, and how its content is made.
KINDS = {
    "lines": (".jsonl", as_lines),
    "gzip": (".jsonl.gz", lambda rows: gzip.compress(as_lines(rows))),
    "zstd": (".jsonl.zst", as_zstd),
    "lines of .ndjson": (".NDJSON", as_lines),
    "bzip2 lines": (".Jsonl.bz2", lambda rows: bz2.compress(as_lines(rows))),
    "gzip lines in .json": (".json.gz", lambda rows: gzip.compress(as_lines(rows))),
    "xz array": (".json.xz", lambda rows: lzma.compress(json.dumps(rows).encode())),
    "lines of a dump": (".zst", as_zstd),
    "gzip csv": (".csv.gz", lambda rows: gzip.compress(as_csv(rows))),
    "array": (".json", lambda rows: json.dumps(rows, indent=1, ensure_ascii=False).encode()),
    "lines in .json": (".json", as_lines),
    "csv": (".csv", as_csv),
    "parquet": (".parquet", as_parquet),
    "arrow": (".arrow", as_arrow),
    "arrow stream": (".arrow", lambda rows: as_arrow(rows, pyarrow.ipc.new_stream)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(params=["here", "url"])
def place(request, tmp_path):
    """A folder on this machine, or a URL."""
    return str(tmp_path / "data") if request.param == "here" else f"memory://{tmp_path.name}/data"


def write(place, kind, *files, folder=""):
    end, content_of = KINDS[kind]
    for number, rows in enumerate(files):
        with fsspec.open(f"{place}{folder}/{number}{end}", "wb", auto_mkdir=True) as file:
            file.write(content_of(rows))


def found(stream):
    return [(document.content.text, document.doc_id, document.row) for document in stream]


@every_kind
def test_a_row_has_its_text_its_id_and_its_position(place, kind):
    write(place, kind, rows_of(range(6)), rows_of(range(6, 9)))
    every = found(stream_of(place))
    assert [(text, doc_id) for text, doc_id, _ in every] == [
        (row["text"], row["id"]) for row in rows_of(range(9))
    ]
    end = KINDS[kind][0]
    if kind == "parquet":
        last = {"row_group": 0, "row": 2}
    else:
        last = {"line": 3} if "lines" in kind or ".jsonl" in end else {"row": 2}
    assert every[-1][-1] == {"file": f"1{end}", **last}
    assert len({str(row) for *_, row in every}) == 9


@every_kind
@pytest.mark.parametrize("worker", [Worker(), Worker(1, 2, 1, 2)])
def test_continuing_at_every_row(place, kind, worker, monkeypatch):
    monkeypatch.setattr(file_rows, "PIECE", 50)
    write(place, kind, rows_of(range(11)), rows_of(range(11, 19)))
    stream = stream_of(place, worker)
    every, states = [], [stream.state()]
    for document in stream:
        every.append((document.content.text, document.doc_id, document.row))
        states.append(json.loads(json.dumps(stream.state())))
    assert len(every) > 3
    for n, state in enumerate(states):
        if n:
            again = stream_of(place, worker)
            again.restore(state)
            assert found(again) == every[n:]


@every_kind
@pytest.mark.parametrize("files", [1, 3])
def test_two_machines_with_two_hosts_have_every_row_once(place, kind, files):
    write(place, kind, *(rows_of(range(9 * n, 9 * n + 9)) for n in range(files)))
    workers = [Worker(machine, 2, host, 2) for machine in range(2) for host in range(2)]
    parts = [found(stream_of(place, worker)) for worker in workers]
    ids = [doc_id for part in parts for _, doc_id, _ in part]
    assert sorted(ids) == sorted(row["id"] for row in rows_of(range(9 * files)))


ROWS = rows_of(range(3000))
BEHIND = "; the last row before: "
DAMAGED = {
    "zstd cut off": ("a.jsonl.zst", as_zstd(ROWS)[:-9], "Truncated", BEHIND + "line "),
    "no zstd": ("a.jsonl.zst", b"text", "ZSTD decompress failed"),
    "gzip cut off": ("a.jsonl.gz", gzip.compress(as_lines(ROWS))[:-99], BEHIND + "line "),
    "array cut off": ("a.json", b'[{"text": "x"}, {"text": "x"', f"{BEHIND}row 0 (from 0)"),
    "array without end": ("a.json", b'[{"text": "x"}, 5', f"{BEHIND}row 0 (from 0)"),
    "no comma": ("a.json", b'[{"text": "x"} {"text": "y"}]', "expected a comma"),
    "a comma too many": ("a.json", b'[{"text": "x"},]', "Expecting value"),
    "two arrays": ("a.json", b'[{"text": "x"}]\n\n[{"text": "y"}]', "there is more behind"),
    "too deep": ("a.json", b'[{"text": "x"},' + b"[" * 100_000, f"{BEHIND}row 0 (from 0)"),
    "too many digits": ("a.json", b'[{"text": ' + b"1" * 5000 + b"}]", "not JSON: Exceeds"),
    "a name twice": ("a.csv", b"text,id,text\nx,y,z\n", "the header names 'text' 2 times"),
    "no name": ("a.csv", b"text,,id\nx,y,z\n", "column 2 has no name in the header"),
    "not UTF-8": ("a.csv", b"text,\xff\nx,y", "the header is not UTF-8"),
    "no bzip2": ("a.csv.bz2", b"text\nx", "Invalid data stream"),
    "no xz": ("a.json.xz", b"text", "not supported by decoder"),
    "bzip2 cut off": ("a.jsonl.bz2", bz2.compress(as_lines(ROWS))[:-9], BEHIND + "line "),
    "huge field": ("a.csv", b'text\nx\n"' + b"y\n" * 5000, f"field limit (9999){BEHIND}row 0"),
    "huge line": ("a.csv", b"text\nx\n" + b"y" * 10_000, f"9,999 characters or more{BEHIND}row 0"),
    "huge line of JSON": (
        "a.jsonl",
        b'{"text": "x"}\n' + bytes(10_000),
        f"9,999 characters or more{BEHIND}line 1",
    ),
    "huge line in .json": (
        "a.json",
        b'{"text": "x"}\n' + bytes(10_000),
        f"9,999 characters or more{BEHIND}line 1",
    ),
    "nothing but zeros": ("a.jsonl", bytes(10_000), "a line has 9,999 characters or more"),
    "huge packed line": (
        "a.jsonl.gz",
        gzip.compress(b'{"text": "x"}\n' + b" " * 10_000),
        f"9,999 characters or more{BEHIND}line 1",
    ),
    "huge line of zstd": (
        "a.jsonl.zst",
        pyarrow.compress(b'{"text": "x"}\n' + b" " * 10_000, "zstd", asbytes=True),
        f"9,999 characters or more{BEHIND}line 1",
    ),
    "huge element": (
        "a.json",
        b'[{"text": "x"}, {"text": "' + b"y" * 50_000,
        "9,999 characters or more, or is not JSON: Unterminated",
    ),
    "one object": (
        "a.json",
        b'{\n  "data": [{"text": "x"}]\n}\n',
        "expected an array of objects, or an object on every line",
    ),
    "no arrow": ("a.arrow", b"text,id\n", "a.arrow: "),
    "empty arrow": ("a.arrow", b"", "a.arrow: "),
    "arrow file cut off": ("a.arrow", as_arrow(ROWS)[:-9], "a.arrow: Not an Arrow file"),
    "stream cut off": (
        "a.arrow",
        as_arrow(ROWS, pyarrow.ipc.new_stream)[:-99],
        f"{BEHIND}row 2995 (from 0)",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_ends_the_run(tmp_path, monkeypatch, case):
    """Whether rows are skipped or not: which rows it should have is not known."""
    monkeypatch.setattr(file_rows, "LONGEST", 9999)
    name, data, *told = DAMAGED[case]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(RunError) as caught:
        list(stream_of(tmp_path, skip=True))
    message = str(caught.value)
    assert message.startswith(f"reading the data set failed: {tmp_path / name}: ")
    assert all(part in message for part in told), message
    assert "replace the damaged file" in caught.value.remedy


def test_a_file_system_that_fails_is_not_damage(tmp_path, monkeypatch):
    place = f"memory://{tmp_path.name}"
    write(place, "arrow", rows_of(range(3)))
    rows = stream_of(place)

    def gone(*_):
        raise OSError("Forbidden")

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFile, "read", gone)
    with pytest.raises(RunError, match="Forbidden") as caught:
        list(rows)
    assert caught.value.remedy is None


def test_a_missing_column_is_named_with_those_there(tmp_path):
    for kind in ("csv", "array", "arrow"):
        write(str(tmp_path / kind), kind, rows_of(range(3)))
        with pytest.raises(
            RunError, match=r"the columns are (other( \(text\))?, )?text \(text\), id"
        ):
            list(stream_of(tmp_path / kind, form=RowForm(TextColumn("body"))))


@pytest.mark.parametrize("kind", ["zstd", "array", "csv", "arrow", "arrow stream"])
def test_memory_does_not_grow_with_the_file(tmp_path, kind):
    write(str(tmp_path), kind, [{"text": "x" * 5000, "id": str(n)} for n in range(1000)])
    rows = iter(stream_of(tmp_path))
    next(rows)
    tracemalloc.start()
    assert sum(1 for _ in rows) == 999
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6  # the file has 5 MB


def test_folders_that_datasets_has_saved(place, tmp_path):
    """What a `map` over them has left is no data, and splits are not mixed."""
    datasets.Dataset.from_list(rows_of([7])).save_to_disk(tmp_path / "data")
    (tmp_path / "data/cache-1f.arrow").write_bytes(as_arrow(rows_of([8])))
    if "memory:" in place:
        fsspec.filesystem("memory").put(str(tmp_path / "data"), place, recursive=True)
    assert [doc_id for _, doc_id, _ in found(stream_of(place))] == ["id 7"]
    one, two = (
        {name: datasets.Dataset.from_list(rows_of([7])) for name in s}
        for s in (["train"], ["train", "test"])
    )
    datasets.DatasetDict(one).save_to_disk(tmp_path / "one")
    assert len(found(stream_of(tmp_path / "one"))) == 1
    datasets.DatasetDict(two).save_to_disk(folder := tmp_path / "two")
    told = rf"splits of a data set \(test, train\); choose one of them, such as {folder}/test$"
    with pytest.raises(InputError, match=told):
        list_files(str(folder))
    assert len(found(stream_of(folder / "train"))) == 1


def test_json_beside_other_data_is_none(tmp_path):
    """Folders have it for other purposes. A run that began before it was read goes on."""
    write(str(tmp_path), "lines", rows_of(range(3)))
    (tmp_path / "config.json").write_text("{}")
    for asked in (tmp_path, tmp_path / "*"):
        assert [file.name for file in list_files(str(asked))] == ["0.jsonl"]
    assert [file.name for file in list_files(str(tmp_path / "*.json"))] == ["config.json"]
