"""Which files of a folder are data: each once; what is left out is counted and said."""

import os
import socket

import datasets
import fsspec
import pytest
from command_line import assert_refused
from row_files import packed, write_parquet
from small_runs import stream_of

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import InputError
from activation_extraction.run.open_data import open_dataset
from activation_extraction.text.file_list import list_files
from activation_extraction.text.rows import Columns

LINE = b'{"text": "x"}\n'


def put(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".parquet"):
            write_parquet(folder / name, text=["x"])
        else:
            (folder / name).write_bytes(packed(name, b"text\nx\n" if ".csv" in name else LINE))


@pytest.fixture(params=["here", "url"])
def at(request, tmp_path):
    """Says where a folder of tmp_path is read: on this machine, or copied to a URL."""

    def there(folder):
        if request.param == "here":
            return str(folder)
        fsspec.filesystem("memory").put(str(folder), f"/{tmp_path.name}/data", recursive=True)
        return f"memory://{tmp_path.name}/data"

    return there


def listed(path):
    return [file.name for file in list_files(str(path))]


def texts_of(path):
    return [document.content.text for document in stream_of(path)]


def save(folder, *numbers, shards):
    rows = datasets.Dataset.from_dict({"text": [f"text {n}" for n in numbers]})
    rows.save_to_disk(folder, num_shards=shards)


def test_only_what_datasets_has_saved_last_is_read(tmp_path, at, caplog):
    """Files left by an earlier save with more files, or cached by `map`, are not read."""
    save(tmp_path / "data", *range(6), shards=3)
    save(tmp_path / "data", *range(10, 14), shards=2)
    (tmp_path / "data/data-00001-of-00003.arrow").rename(tmp_path / "data/cache-1f.arrow")
    place = at(tmp_path / "data")
    for asked in ("", "/*", "/*.arrow"):
        caplog.clear()
        assert texts_of(place + asked) == [f"text {n}" for n in range(10, 14)]
        told = f"reading 2 files of {place}{asked}; left out: 3 files (not listed in state.json)"
        assert caplog.messages == [told]


def test_a_state_that_is_damaged_or_lists_a_missing_file_is_refused(tmp_path):
    save(tmp_path / "data", *range(4), shards=2)
    state = tmp_path / "data/state.json"
    (tmp_path / "data/data-00001-of-00002.arrow").unlink()
    with pytest.raises(InputError, match=r"state.json: lists data-00001-of-00002.arrow, which is"):
        list_files(str(tmp_path / "data"))
    for content in (b"{", b'{"_data_files": [5]}', b"\xff", b"[" * 10**5):
        state.write_bytes(content)
        with pytest.raises(InputError, match=r"state.json: is damaged, but says which files count"):
            list_files(str(tmp_path / "data"))
    state.write_text("{}")  # of something else
    assert listed(tmp_path / "data") == ["data-00000-of-00002.arrow"]


def test_splits_that_datasets_has_saved_are_not_mixed(tmp_path, at):
    one = datasets.Dataset.from_dict({"text": ["x"]})
    datasets.DatasetDict({"train": one}).save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "two")
    assert texts_of(tmp_path / "one") == texts_of(tmp_path / "two/train") == ["x"]
    with pytest.raises(InputError, match=r"/ holds several splits of a data set \(test, train\); "):
        list_files(at(tmp_path / "two"))


def test_splits_that_names_tell_apart_are_not_mixed(tmp_path, at):
    """The name of a folder says the split of its files before theirs do; a glob takes them all."""
    put(tmp_path / "data", "en/train-0-of-2.parquet", "en/train-1-of-2.parquet", "en/dev.parquet")
    put(tmp_path / "data", "train/Test-1.parquet", "train/contest.parquet")
    place = at(tmp_path / "data")
    with pytest.raises(
        InputError, match=r"files of several splits, such as .*/en/dev.* and .*/en/"
    ):
        list_files(place)
    assert len(listed(f"{place}/**")) == 5
    assert len(listed(f"{place}/en/train*")) == 2
    assert len(listed(f"{place}/train")) == 2


def test_private_names_are_no_data(tmp_path, at, caplog):
    """As Spark leaves them; the only copy of a row is not in an attempt."""
    put(tmp_path / "data", "part-0.parquet", "_temporary/0/attempt/part-0.parquet")
    put(tmp_path / "data", ".part-1.parquet", "_SUCCESS", ".part-0.parquet.crc", "_committed_1")
    place = at(tmp_path / "data")
    for asked in ("", "/*", "/**"):
        assert texts_of(place + asked) == ["x"]
    told = f"reading 1 file of {place}; left out: 2 files (name or folder begins with . or _)"
    assert told in caplog.messages


def test_what_is_left_out_is_counted_and_said(tmp_path, caplog):
    put(tmp_path, "a.jsonl", "b.json", "sub/c.json", "d.jsonl.lz4", "e.md", "f.md", "LICENSE")
    put(tmp_path, "g.parquet.gz", ".gitattributes", "h.json.gz")
    (tmp_path / "more").symlink_to(tmp_path / "sub")
    assert listed(tmp_path) == ["a.jsonl", "h.json.gz"]
    (line,) = caplog.messages
    assert line.startswith(f"reading 2 files of {tmp_path}; left out: ")
    assert set(line.partition("left out: ")[2].split(", ")) == {
        "2 files (.json beside other data)",
        "1 file (.lz4)",
        "2 files (.md)",
        "1 file (no ending)",
        "1 file (.gz)",
        "1 file (link to a folder)",
    }
    assert listed(tmp_path / "*.json") == ["b.json"]  # also if they are asked for
    put(tmp_path / "all", "c4-train.00000-of-01024.json.gz", "b.json")
    assert listed(tmp_path / "all") == ["b.json", "c4-train.00000-of-01024.json.gz"]


@pytest.fixture
def odd(tmp_path, monkeypatch):
    """Makes a folder with what is no data, is data twice, or would never end."""
    put(tmp_path, "none/_a.jsonl", "none/b.txt", "none/c.txt", "data/a.jsonl", "two/a.jsonl")
    put(tmp_path, "d/table/part-0.parquet", "d/table/_delta_log/0010.checkpoint.parquet")
    put(tmp_path, "kinds/a.jsonl", "kinds/b.parquet")
    (tmp_path / "two/b.jsonl").symlink_to("a.jsonl")
    (tmp_path / "link").symlink_to("data")
    (tmp_path / "out/part.jsonl").mkdir(parents=True)
    (tmp_path / "devices").mkdir()
    os.mkfifo(tmp_path / "devices/pipe.jsonl")
    (tmp_path / "devices/link.jsonl").symlink_to(tmp_path / "devices/pipe.jsonl")
    (tmp_path / "devices/zero.jsonl").symlink_to("/dev/zero")
    monkeypatch.chdir(tmp_path / "devices")  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


NO_FILE = "is a named pipe, a socket or a device; expected a file"
TWICE = "{0}/two/b.jsonl: is given twice, also as {0}/two/a.jsonl; each"
DELTA = "{}/d/table is a Delta table"  # its folder has files with rows that were deleted from it
PATHS = [  # below that folder, which {} stands for, and what must be said
    ("/none", "left out: 1 file (name or folder begins with . or _), 2 files (.txt)"),
    ("/nothing", "{}/nothing: no such file or folder"),
    ("/out/*.jsonl", "{}/out/*.jsonl: has no files that end in .jsonl, .ndj"),
    ("/kinds", "{}/kinds: holds both Parquet and JSON; choose one of them, for exam"),
    *((f"/d/table{end}", DELTA) for end in ("", "/*.parquet", "/..")),
    *((f"/two{end}", TWICE) for end in ("", "/*.jsonl")),
    *((f"/devices{end}", NO_FILE) for end in ("", "/p*.jsonl")),
    # To open a pipe waits for whoever writes to it.
    *((f"/devices/{name}.jsonl", NO_FILE) for name in ("pipe", "link", "zero", "socket")),
]
AGAIN = "{0}/data/", "{0}/./data", "file://{0}/data", "data", "./data", "{0}/link", "{0}/d*/a.*"
REFUSED = [
    *((f"--dataset_path {{}}{path}", told) for path, told in PATHS),
    *((f"--mix {{0}}/data/a.jsonl=1 {other}=2", "a.jsonl: is given twice") for other in AGAIN),
]


@pytest.mark.parametrize("flags,told", REFUSED)
def test_what_cannot_be_read_once_is_refused(flags, told, odd, inputs, capsys):
    flags = [*inputs[:2], *flags.format(odd).split()]
    assert_refused(capsys, odd, flags, told.format(odd))


def test_a_file_that_is_named_is_read(odd):
    assert listed(odd / "two/b.jsonl") == ["b.jsonl"]
    assert listed(odd / "d/table/part-0.parquet") == ["part-0.parquet"]


def test_one_object_under_two_urls_is_refused(bucket):
    bucket.put("data/a.jsonl", b"{}")
    mixed = parse_args(["--mix", "gs://bucket/data=1", "gcs://bucket/data/a.jsonl=1"])
    with pytest.raises(InputError, match=r"--mix gs://bucket/data/a.jsonl: is given twice;"):
        open_dataset(mixed, Columns(("text",)))


@pytest.mark.parametrize(
    "name", ["a::b.jsonl", "zip::a.jsonl", "a[1]::x.jsonl", "::.csv.gz", "c::d.parquet"]
)
def test_two_colons_in_a_local_path_are_part_of_a_name(tmp_path, name):
    """fsspec would take it for a chain of URLs."""
    put(tmp_path / "x::y", name)
    for asked in (tmp_path / "x::y", tmp_path / "x::y" / name, tmp_path / "x::*/*"):
        assert texts_of(asked) == ["x"]
    assert listed(tmp_path / "x::y" / name) == [name]
