"""A whole file in a form that is not read is called what it is, not a damaged one."""

import gzip
import io
import json

import pyarrow
import pytest
from command_line import assert_refused
from small_runs import stream_of

from activation_extraction.common.errors import InputError, RunError

LINE = '{"text": "x"}\n'
POINTER = (
    b"version https://git-lfs.github.com/spec/v1\n"
    b"oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 12345\n"
)


def with_long_window(content):
    """A zstd frame of one raw block that needs a window of 2 GiB, as of zstd --long=31."""
    block = (len(content) << 3 | 1).to_bytes(3, "little") + content
    return b"\x28\xb5\x2f\xfd\x00" + bytes([21 << 3]) + block


LFS = "is a Git LFS pointer instead of the data", "git lfs pull"
UTF16 = "is UTF-16, expected UTF-8", "iconv -f UTF-16 -t UTF-8"
WINDOW = "is packed with zstd and a window of more than 128 MB", "unpack it with zstd -d --long=31"
QUOTES = "quotes in a quoted field are not doubled", "save it with doubled quotes"
FORMS = {
    "pointer to lines": ("a.jsonl", POINTER, *LFS),
    "pointer to an array": ("a.json", POINTER, *LFS),
    "pointer to packed lines": ("a.jsonl.gz", POINTER, *LFS),
    "pointer to zstd": ("a.jsonl.zst", POINTER, *LFS),
    "pointer to csv": ("a.csv", POINTER, *LFS),
    "pointer to arrow": ("a.arrow", POINTER, *LFS),
    "pointer to parquet": ("a.parquet", POINTER, *LFS),
    "UTF-16": ("a.jsonl", LINE.encode("utf-16"), *UTF16),
    "UTF-16 csv": ("a.csv", "text\nx\n".encode("utf-16"), *UTF16),
    "UTF-16 array": ("a.json", f"[{LINE}]".encode("utf-16-le"), *UTF16),
    "UTF-16, other order": ("a.jsonl", LINE.encode("utf-16-be"), *UTF16),
    "UTF-16, packed": ("a.csv.gz", gzip.compress("text\nx\n".encode("utf-16")), *UTF16),
    "UTF-32": ("a.jsonl", LINE.encode("utf-32"), "is UTF-32, expected UTF-8", "iconv -f UTF-32"),
    "long window": ("a.jsonl.zst", with_long_window(LINE.encode()), *WINDOW),
    "long window of csv": ("a.csv.zst", with_long_window(b"text\nx\n"), *WINDOW),
    "gzip by content": ("a.jsonl", gzip.compress(b"{}"), "is packed with gzip", "ends in .gz"),
    "zstd by content": (
        "a.jsonl.gz",
        pyarrow.compress(b"{}", "zstd", asbytes=True),
        "is packed with zstd",
        "ends in .zst",
    ),
    "packed twice": ("a.jsonl.gz", gzip.compress(gzip.compress(b"{}")), "is packed with gzip", ""),
    "lines by content": ("a.jsonl.gz", LINE.encode(), "is not packed, though", "take .gz off it"),
    "array by content": ("a.json.bz2", b"[]", "is not packed, though", "take .bz2 off it"),
    "zip": ("a.parquet", b"PK\x03\x04...", "is a zip archive", "unpack it"),
    "web page": ("a.json", b"<!DOCTYPE html><html>", "is a web page instead of", "download"),
    "escaped quotes": ("a.csv", b'id,text\n1,"she \\"said\\" it"\n', *QUOTES),
    "escaped quotes and a comma": ("a.csv", b'id,text\n1,"a \\"b\\", c"\n2,x\n', *QUOTES),
    "bare quotes": ("a.csv", b'id,text\n1,"300 WEST "A" STREET"\n', *QUOTES),
    "an escaped quote at the end": (
        "a.csv",
        b'text\n"ends with \\""\n',
        "unexpected end of data: a quoted field has no end",
        "replace it by a whole one, or save it with doubled quotes",
    ),
    "semicolons": ("a.csv", b"id;text\n1;x, y\n", "'id;text' has semicolons, expected commas", ""),
    "tabs": ("a.csv", b"id\ttext\n1\tx\n", "has tabs, expected commas", "save it with commas"),
    "vertical bars": ("a.csv", b"id|text\n1|x\n", "has vertical bars, expected commas", ""),
}


@pytest.mark.parametrize("case", FORMS)
def test_a_file_is_called_what_it_is(tmp_path, case):
    """Whether rows are skipped or not; a file that is merely damaged is replaced."""
    name, data, told, remedy = FORMS[case]
    (tmp_path / name).write_bytes(data)
    with pytest.raises((RunError, InputError)) as caught:
        list(stream_of(tmp_path, skip=True))
    message = f"{caught.value}; {getattr(caught.value, 'remedy', '')}"
    assert f"{tmp_path / name}: " in message and told in message and remedy in message
    assert "damaged" not in message


def test_it_is_refused_before_anything_starts(inputs, tmp_path, capsys):
    for case in ("pointer to parquet", "long window", "semicolons", "UTF-16"):
        name, data, told, remedy = FORMS[case]
        path = tmp_path / name
        path.write_bytes(data)
        flags = [*inputs[:2], *inputs[4:], "--skip_bad_rows", "--dataset_path", path]
        assert_refused(capsys, tmp_path, flags, told)


def test_a_file_that_starts_like_another_form_is_read(tmp_path):
    """Parquet, Arrow, packed files and a byte order mark of UTF-8 are what they are."""
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + LINE.encode() * 2)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(LINE.encode()))
    (tmp_path / "c.jsonl").write_bytes(b"")
    (tmp_path / "d.jsonl").write_bytes(b"\n")
    assert [document.content.text for document in stream_of(tmp_path)] == ["x"] * 3


def texts_of(path, skip=False):
    stream = stream_of(path, skip=skip)
    return [document.content.text for document in stream if document], stream.counts.skipped


def test_a_quote_that_two_dialects_read_differently_is_a_bad_row(tmp_path):
    r"""With escapes, the field ends at \"", and two rows would become one without a word."""
    path = tmp_path / "a.csv"
    path.write_bytes(b'text\n"x \\""\n, y"\ngood\n')
    with pytest.raises(RunError, match=r'row 0 \(from 0\): column text: a \\" before a comma or'):
        list(stream_of(path))
    assert texts_of(path, skip=True) == (["good"], 1)


def test_backslashes_before_doubled_quotes_are_text(tmp_path):
    texts = [json.dumps({"a": 'x "y", z\n'}), 'say \\"hi\\"', "C:\\", 'x\\"', 'a "b", c', "\\n"]
    content = io.StringIO(newline="")
    content.write("text\n")
    for text in texts:
        content.write('"' + text.replace('"', '""') + '"\n')
    (tmp_path / "a.csv").write_text(content.getvalue(), newline="")
    assert texts_of(tmp_path) == (texts, 0)
