"""A file that cannot be read is named, with what it is or why, and what to do about it."""

import bz2
import csv
import gzip
import io
import json

import pyarrow
import pytest
from command_line import assert_refused
from row_files import packed
from small_runs import stream_of
from test_file_kinds import as_arrow, as_lines, as_zstd, rows_of

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.text import file_rows

LINE = b'{"text": "x"}\n'
ROWS = rows_of(range(3000))
CORRUPT = bytearray(gzip.compress(as_lines(ROWS)))
CORRUPT[5000] ^= 255
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)
# A zstd frame of one raw block that needs a window of 2 GiB, as of zstd --long=31.
LONG_WINDOW = b"\x28\xb5\x2f\xfd\x00\xa8" + (len(LINE) << 3 | 1).to_bytes(3, "little") + LINE
WHOLE = "if the file is damaged, replace it"
BEHIND = "; the last row before: "
LFS = "is a Git LFS pointer instead of the data; git lfs pull"
UTF16 = "is UTF-16, expected UTF-8; convert it, for example with iconv -f UTF-16 -t UTF-8"
QUOTES = "quotes in a quoted field are not doubled, or it has no end", "save it with doubled quotes"
# The name of a file, its content, and what must be said of it.
FORMS = [
    *((f"a.{end}", POINTER, LFS) for end in ("jsonl", "json.gz", "csv", "arrow", "parquet")),
    ("a.jsonl", LINE.decode().encode("utf-16"), UTF16),
    ("a.json", b"[{}]".decode().encode("utf-16-le"), UTF16),
    ("a.jsonl", LINE.decode().encode("utf-16-be"), UTF16),
    ("a.csv.gz", "text\nx\n".encode("utf-16"), UTF16),
    ("a.jsonl", LINE.decode().encode("utf-32"), "is UTF-32, expected UTF-8", "iconv -f UTF-32"),
    ("a.jsonl.zst", LONG_WINDOW, "Frame requires too much memory", "; unpack it with zstd -d --"),
    ("a.jsonl", gzip.compress(b"{}"), "is packed with gzip; give it a name that ends in .gz"),
    ("a.csv", as_zstd(ROWS), "is packed with zstd; give it a name that ends in .zst"),
    ("a.jsonl.gz", gzip.compress(gzip.compress(LINE)), "is packed with gzip"),
    ("a.jsonl.gz", as_zstd(ROWS), "is packed with zstd; give it a name that ends in .zst"),
    ("a.jsonl.gz", LINE, "is not packed, though its name says so; take .gz off it"),
    ("a.json.bz2", b"[]", "is not packed, though its name says so; take .bz2 off it"),
    ("a.parquet", b"PK\x03\x04...", "is a zip archive; unpack it"),
    ("a.json", b"<!DOCTYPE html><html>", "is a web page instead of the data; download"),
    ("a.csv", b'id,text\n1,"she \\"said\\" it"\n', *QUOTES),
    ("a.csv", b'id,text\n1,"a \\"b\\", c"\n2,x\n', *QUOTES),
    ("a.csv", b'id,text\n1,"300 WEST "A" STREET"\n', *QUOTES),
    ("a.csv", b'text\n"ends with \\""\n', *QUOTES),
    ("a.csv", b"id;text\n1;x, y\n", "'id;text' has semicolons, expected commas; save it with"),
    ("a.csv", b"id\ttext\n1\tx\n", "has tabs, expected commas"),
    ("a.csv", b"id|text\n1|x\n", "has vertical bars, expected commas"),
    ("a.csv", b"text,id,text\nx,y,z\n", "the header calls column 3 'text'; give each"),
    ("a.csv", b"text,,id\nx,y,z\n", "the header calls column 2 ''; give each"),
    (
        "a.json",
        b'{\n "data": [{"text": "x"}]\n}\n',
        "expected an array of objects, or an object on",
    ),
    ("a.json", b'[{"text": "x"}, {"text"', "not a JSON array: Expecting ':'", "char 23", WHOLE),
    ("a.json", b'[{"text": "x"} {"text": "y"}]', "not a JSON array: Expecting ',' delim", WHOLE),
    (
        "a.json",
        b'[{"text": "x"}]\n\n[{"text": "y"}]',
        "not a JSON array: Extra data: line 3",
        WHOLE,
    ),
    ("a.json", b"[" * 100_000, "not a JSON array: ", WHOLE),
    ("a.json", b'[{"text": ' + b"1" * 5000 + b"}]", "not a JSON array: Exceeds the limit", WHOLE),
    ("a.json", b'[{"text": "\xff"}]', "not a JSON array: 'utf-8' codec can't decode", WHOLE),
    ("a.jsonl.zst", as_zstd(ROWS)[:-9], "Truncated", f"{BEHIND}line ", WHOLE),
    ("a.jsonl.zst", b"text", "ZSTD decompress failed", WHOLE),
    ("a.jsonl.gz", gzip.compress(as_lines(ROWS))[:-99], f"{BEHIND}line ", WHOLE),
    ("a.jsonl.gz", bytes(CORRUPT), "a.jsonl.gz: ", WHOLE),
    ("a.jsonl.bz2", bz2.compress(as_lines(ROWS))[:-9], f"{BEHIND}line ", WHOLE),
    ("a.csv.bz2", b"text\nx", "Invalid data stream", WHOLE),
    ("a.json.xz", b"text", "not supported by decoder", WHOLE),
    ("a.arrow", b"text,id\n", "a.arrow: ", WHOLE),
    ("a.arrow", b"", "a.arrow: ", WHOLE),
    ("a.arrow", as_arrow(ROWS)[:-9], "a.arrow: Not an Arrow file", WHOLE),
    ("a.arrow", as_arrow(ROWS, pyarrow.ipc.new_stream)[:-99], f"{BEHIND}row 2995 (from", WHOLE),
]


@pytest.mark.parametrize(
    "name,data,told",
    [(name, data, told) for name, data, *told in FORMS],
    ids=[str(name) for name, *_ in FORMS],  # packed bytes differ in their times
)
def test_a_file_is_called_what_it_is(tmp_path, name, data, told):
    """Whether rows are skipped or not: which rows it should have is not known."""
    (tmp_path / name).write_bytes(data)
    with pytest.raises((RunError, InputError)) as caught:
        list(stream_of(tmp_path, skip=True))
    message = f"{caught.value}; {getattr(caught.value, 'remedy', '')}"
    assert f"{tmp_path / name}: " in message
    assert all(part in message for part in told), message
    assert ("damaged" in message) == (WHOLE in told)


def test_it_is_refused_before_anything_starts(inputs, tmp_path, capsys):
    for name, data, told in (("a.parquet", POINTER, LFS), ("a.jsonl", b"\xff\xfe{\0", UTF16)):
        (tmp_path / name).write_bytes(data)
        flags = [*inputs[:2], *inputs[4:], "--skip_bad_rows", "--dataset_path", tmp_path / name]
        assert_refused(capsys, tmp_path, flags, told)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.jsonl.gz"])
def test_a_line_without_end_does_not_fill_the_memory(tmp_path, name):
    first = b"text\nx\n" if name == "a.csv" else LINE
    (tmp_path / name).write_bytes(packed(name, first + bytes(2**27)))
    with pytest.raises(RunError, match="a line has 134,217,728 characters or more; the last row "):
        list(stream_of(tmp_path))


def test_an_array_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(file_rows, "LARGEST_ARRAY", 20)
    (tmp_path / "a.json").write_bytes(b"[" + LINE * 2 + b"]")
    with pytest.raises(RunError, match="is a JSON array of more than 20 bytes, expected") as caught:
        list(stream_of(tmp_path))
    assert "jq -c '.[]'" in caught.value.remedy


def test_a_file_system_that_fails_is_not_damage(tmp_path):
    (tmp_path / "a.arrow").write_bytes(as_arrow(ROWS))
    stream = stream_of(tmp_path)
    (tmp_path / "a.arrow").unlink()
    with pytest.raises(RunError, match="a.arrow: .*No such file") as caught:
        list(stream)
    assert caught.value.remedy is None


def test_a_file_that_begins_like_another_form_is_read(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + LINE * 2)
    (tmp_path / "b.json.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf [" + LINE + b"]"))
    (tmp_path / "c.jsonl").write_bytes(b"")
    (tmp_path / "d.jsonl").write_bytes(b"\n")
    assert [document.content.text for document in stream_of(tmp_path)] == ["x"] * 3


def test_backslashes_before_doubled_quotes_are_text(tmp_path):
    texts = [json.dumps({"a": 'x "y", z\n'}), 'say \\"hi\\"', "C:\\", 'x\\"', 'a "b", c', "\\n"]
    content = io.StringIO(newline="")
    csv.writer(content, quoting=csv.QUOTE_ALL).writerows([["text"], *([text] for text in texts)])
    (tmp_path / "a.csv").write_text(content.getvalue(), newline="")
    (tmp_path / "b.csv").write_text("text\rone\rtwo\r", newline="")
    found = [document.content.text for document in stream_of(tmp_path)]
    assert found == [*texts, "one", "two"]


def test_a_quote_that_two_dialects_read_differently_is_a_bad_row(tmp_path):
    r"""With escapes, the field ends at \"", and two rows would become one without a word."""
    (tmp_path / "a.csv").write_bytes(b'text\n"x \\""\n, y"\ngood\n')
    with pytest.raises(RunError, match=r'row 0 \(from 0\): column text: a \\" before a comma or'):
        list(stream_of(tmp_path))
    stream = stream_of(tmp_path, skip=True)
    assert [each.content.text for each in stream if each] == ["good"] and stream.counts.skipped == 1
