"""Every kind of file gives the same rows: all of them once, and exactly from any of them on. A file
that cannot be read is named, with what it is or why, and what to do about it."""

import bz2
import csv
import datetime
import gzip
import io
import json
import lzma
import tracemalloc

import fsspec
import pyarrow
import pyarrow.ipc
import pytest
import row_files
from small_runs import documents_in, stream_of

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.text import file_rows
from activation_extraction.text.batch import Worker


def rows_of(numbers):
    """Rows whose texts have what CSV has to quote."""
    return [{"text": f'a "text",\r\nnumber {n}: é\n', "id": f"id {n}"} for n in numbers]


def as_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def as_zstd(rows):
    """Two frames, as of files that were put together."""
    parts = as_lines(rows[:3]), as_lines(rows[3:])
    return b"".join(pyarrow.compress(part, "zstd", asbytes=True) for part in parts)


def as_csv(rows):
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [*rows[0], "other"], restval="x")
    writer.writeheader()
    writer.writerows(rows)
    return b"\xef\xbb\xbf" + text.getvalue().encode()


def as_arrow(rows, new=pyarrow.ipc.new_file):
    rows = [{"other": {"a": [b"\xff"]}, **row} for row in rows]
    return row_files.as_arrow(pyarrow.Table.from_pylist(rows), new, max_chunksize=4)


def as_parquet(rows):
    return row_files.as_parquet(pyarrow.Table.from_pylist(rows), 4)


# How a file's name ends, how its content is made, and how the last of nine rows is counted.
KINDS = [
    (".jsonl", as_lines, {"line": 9}),
    (".NDJSON", as_lines, {"line": 9}),
    (".json", as_lines, {"line": 9}),
    (".json", lambda rows: json.dumps(rows, indent=1, ensure_ascii=False).encode(), {"row": 8}),
    (".jsonl.gz", lambda rows: gzip.compress(as_lines(rows)), {"line": 9}),
    (".Jsonl.bz2", lambda rows: bz2.compress(as_lines(rows)), {"line": 9}),
    (".json.xz", lambda rows: lzma.compress(json.dumps(rows).encode()), {"row": 8}),
    (".jsonl.zst", as_zstd, {"line": 9}),
    (".zst", as_zstd, {"line": 9}),
    (".csv", as_csv, {"row": 8}),
    (".parquet", as_parquet, {"row_group": 2, "row": 0}),
    (".arrow", as_arrow, {"row": 8}),
    (".arrow", lambda rows: as_arrow(rows, pyarrow.ipc.new_stream), {"row": 8}),
]


def known(document):
    return document.content.text, document.doc_id, document.row_position_fields


@pytest.mark.parametrize("place", ["here", "url"])
@pytest.mark.parametrize("end,content_of,last", KINDS)
def test_every_row_once_and_from_any_of_them_on(tmp_path, place, end, content_of, last):
    place = f"memory://{tmp_path.name}" if place == "url" else tmp_path
    for number, rows in enumerate((rows_of(range(9)), rows_of(range(9, 14)))):
        with fsspec.open(f"{place}/{number}{end}", "wb", auto_mkdir=True) as file:
            file.write(content_of(rows))
    shares = [Worker(machine, 2, host, 2) for machine in range(2) for host in range(2)]
    found = {}
    for worker in (Worker(), *shares):
        stream = stream_of(place, worker)
        rows = list(stream.read(stream.beginning))
        every = [known(row.document) for row in rows]
        for number, row in enumerate(rows, start=1):
            state = json.loads(json.dumps(row.document_stream_state))
            again = stream_of(place, worker).read(state)
            assert [known(row.document) for row in again] == every[number:]
        found[worker] = every
    alone = found.pop(Worker())
    assert [(text, own) for text, own, _ in alone] == [
        (r["text"], r["id"]) for r in rows_of(range(14))
    ]
    assert alone[8][-1] == {"file": f"0{end}", **last}
    assert len({str(row) for *_, row in alone}) == 14
    assert sorted(map(str, sum(found.values(), []))) == sorted(map(str, alone))


def test_memory_does_not_grow_with_the_file(tmp_path):
    """tracemalloc sees what Python holds of lines and fields."""
    rows = [{"text": "x" * 5000, "id": str(n)} for n in range(1000)]
    for name, content in (("a.jsonl.zst", as_zstd(rows)), ("a.csv", as_csv(rows))):
        (tmp_path / name).write_bytes(content)
        stream = stream_of(tmp_path / name)
        documents = stream.read(stream.beginning)
        next(documents)
        tracemalloc.start()
        assert sum(1 for _ in documents) == 999
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1e6  # the file has 5 MB


LINE = b'{"text": "x"}\n'
ROWS = rows_of(range(3000))
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"
WHOLE = "if the file is damaged, replace it"
BEHIND = "; the last row before: "
LFS = "is a Git LFS pointer instead of the data; git lfs pull"
UTF16 = "is UTF-16, expected UTF-8; convert it, for example with iconv -f UTF-16 -t UTF-8"
QUOTES = (
    "quotes in a quoted field are not doubled, or the field has no end",
    "save it with doubled quotes",
)
NO_ARRAY = "expected an array of objects, or an object on"
# The name of a file, its content, and what must be said of it.
FORMS = [
    *((f"a.{end}", POINTER, LFS) for end in ("jsonl", "csv", "arrow", "parquet")),
    ("a.jsonl", LINE.decode().encode("utf-16"), UTF16),
    ("a.jsonl", gzip.compress(b"{}"), "is compressed with gzip; give it a name that ends in .gz"),
    ("a.jsonl.gz", LINE, "is not compressed, though its name says so; remove .gz from its name"),
    ("a.parquet", b"PK\x03\x04...", "is a zip archive; extract it"),
    ("a.json", b"<!DOCTYPE html><html>", "is a web page instead of the data; download"),
    ("a.csv", b'id,text\n1,"she \\"said\\" it"\n', *QUOTES),
    ("a.csv", b"id;text\n1;x, y\n", "'id;text' has semicolons, expected commas; save it with"),
    ("a.csv", b"text,id,text\nx,y,z\n", "the header calls column 3 'text'; give each"),
    ("a.json", b'{\n "data": [{"text": "x"}]\n}\n', NO_ARRAY),
    ("a.json", b'[{"text": "x"}, {"text"', "not a JSON array: Expecting ':'", "char 23", WHOLE),
    ("a.json", b"[" * 200_001, "a JSON array of more than 200,000 bytes, expected", "jq -c '.[]'"),
    ("a.jsonl.zst", as_zstd(ROWS)[:-9], "Truncated", f"{BEHIND}line ", WHOLE),
    ("a.jsonl.gz", gzip.compress(as_lines(ROWS))[:-99], f"{BEHIND}line ", WHOLE),
    ("a.arrow", as_arrow(ROWS, pyarrow.ipc.new_stream)[:-99], f"{BEHIND}row 2995 (from", WHOLE),
]


@pytest.mark.parametrize(
    "name,data,told",
    [(name, data, told) for name, data, *told in FORMS],
    ids=[str(name) for name, *_ in FORMS],  # compressed bytes differ in their times
)
def test_a_file_is_called_what_it_is(name, data, told, tmp_path, monkeypatch):
    """It is, too, where rows are skipped: which rows it should have is not known."""
    monkeypatch.setattr(file_rows, "MAX_ARRAY_BYTES", 200_000)
    (tmp_path / name).write_bytes(data)
    with pytest.raises((RunError, InputError)) as caught:
        documents_in(stream_of(tmp_path, skip=True))
    message = f"{caught.value}; {getattr(caught.value, 'remedy', '')}"
    assert f"{tmp_path / name}: " in message
    assert all(part in message for part in told), message
    assert ("damaged" in message) == (WHOLE in told)


def test_backslashes_before_doubled_quotes_are_text(tmp_path):
    texts = [json.dumps({"a": 'x "y", z\n'}), 'say \\"hi\\"', "C:\\", 'x\\"', 'a "b", c', "\\n"]
    content = io.StringIO(newline="")
    csv.writer(content, quoting=csv.QUOTE_ALL).writerows([["text"], *([text] for text in texts)])
    (tmp_path / "a.csv").write_text(content.getvalue(), newline="")
    (tmp_path / "b.csv").write_text("text\rone\rtwo\r", newline="")
    found = [document.content.text for document in documents_in(stream_of(tmp_path))]
    assert found == [*texts, "one", "two"]


def test_parquet_columns_may_differ_in_type_and_be_null(tmp_path):
    row_files.write_parquet(tmp_path / "a.parquet", text=["one"], id=["x"], extra=[{"deep": [1]}])
    row_files.write_parquet(tmp_path / "b.parquet", text=pyarrow.nulls(2), id=[2, 3])
    row_files.write_parquet(tmp_path / "c.parquet", text=["dated"], id=[datetime.date(2020, 1, 2)])
    found = [(each.content.text, each.doc_id) for each in documents_in(stream_of(tmp_path)) if each]
    assert found == [("one", "x"), ("dated", "2020-01-02")]


def test_rows_need_not_have_equal_columns_or_types(texts):
    """Lone surrogates, which JSON may have and UTF-8 may not, are replaced."""
    rows = [
        {"text": "a", "id": 1},
        {"text": None, "id": "x", "extra": [1, {"b": 2}]},
        {"id": 2.5, "text": "bad \ud800 x", "meta": {"k": "v"}},
        {"text": "pair \ud83d\ude42"},
    ]
    path = texts(rows)
    with open(path, "a") as file:
        file.write('\n   \n{"text": "c"}')
    found = [
        document and (document.content.text, document.doc_id)
        for document in documents_in(stream_of(path))
    ]
    assert found == [("a", 1), None, ("bad \ufffd x", 2.5), ("pair 🙂", None), ("c", None)]
