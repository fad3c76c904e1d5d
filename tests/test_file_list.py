"""Which files of a folder are data: each once; what is left out is counted and said."""

import os
import socket

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from command_line import assert_refused
from small_runs import stream_of

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import InputError
from activation_extraction.run.open_data import TextRequest, open_dataset
from activation_extraction.text.file_list import list_files
from activation_extraction.text.rows import Columns


@pytest.fixture(params=["here", "url"])
def place(request, tmp_path):
    """A folder on this machine, or a URL."""
    return str(tmp_path / "data") if request.param == "here" else f"memory://{tmp_path.name}/data"


@pytest.fixture
def said(monkeypatch):
    """What is logged as a warning."""
    lines = []
    monkeypatch.setattr(
        "activation_extraction.text.file_list.log.warning",
        lambda text, *values: lines.append(text % values),
    )
    return lines


def put(place, *names, content=b'{"text": "x"}\n'):
    for name in names:
        with fsspec.open(f"{place}/{name}", "wb", auto_mkdir=True) as file:
            file.write(content)


def put_parquet(place, name, *texts):
    with fsspec.open(f"{place}/{name}", "wb", auto_mkdir=True) as file:
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), file)


def listed(path):
    return [file.name for file in list_files(str(path))]


def save(folder, *numbers, shards):
    rows = datasets.Dataset.from_dict({"text": [f"text {n}" for n in numbers]})
    rows.save_to_disk(folder, num_shards=shards)


@pytest.fixture
def saved_twice(tmp_path, place):
    """The second time with fewer files, so that some of the first are left."""
    save(tmp_path / "data", *range(6), shards=3)
    save(tmp_path / "data", *range(10, 14), shards=2)
    if "memory:" in place:
        fsspec.filesystem("memory").put(str(tmp_path / "data"), place, recursive=True)
    return place


@pytest.mark.parametrize("asked", ["", "/*", "/*.arrow", "/data-*-of-0000?.arrow"])
def test_only_what_was_saved_last_is_read(saved_twice, said, asked):
    texts = [document.content.text for document in stream_of(saved_twice + asked)]
    assert texts == [f"text {n}" for n in range(10, 14)]
    assert set(said) == {
        f"reading 2 files of {saved_twice}{asked}; left out: 3 files (not listed in state.json)"
    }


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


def test_private_names_are_no_data(place, said):
    """As Spark leaves them; the only copy of a row is not in an attempt."""
    put_parquet(place, "part-0.parquet", "one", "two")
    put_parquet(place, "_temporary/0/attempt/part-0.parquet", "one")
    put_parquet(place, ".part-1.parquet", "two")
    put(place, "_SUCCESS", ".part-0.parquet.crc", "_committed_1")
    for asked in ("", "/*", "/**"):
        assert [document.content.text for document in stream_of(place + asked)] == ["one", "two"]
    told = f"reading 1 file of {place}; left out: 2 files (name or folder begins with . or _)"
    assert told in said


def test_private_names_that_are_asked_for_are_read(tmp_path):
    put(tmp_path, ".cache/_x/a.jsonl", ".cache/_x/_b.jsonl", ".cache/_x/.c/d.jsonl")
    assert listed(tmp_path / ".cache/_x") == ["a.jsonl"]
    assert listed(tmp_path / ".cache/_x/*.jsonl") == ["a.jsonl"]
    assert listed(tmp_path / ".cache/_x/**/*.jsonl") == ["a.jsonl"]
    assert listed(tmp_path / ".*/_x/a.jsonl") == [".cache/_x/a.jsonl"]
    assert listed(tmp_path / ".cache/_x/_*.jsonl") == ["_b.jsonl"]
    assert listed(tmp_path / ".cache/_x/_b.jsonl") == ["_b.jsonl"]


def test_what_is_left_out_is_counted_and_said(tmp_path, said):
    put(tmp_path, "a.jsonl", "b.json", "sub/c.json", "d.jsonl.lz4", "e.md", "f.md", "LICENSE")
    put(tmp_path, "g.parquet.gz", ".gitattributes")
    (tmp_path / "more").symlink_to(tmp_path / "sub")
    assert listed(tmp_path) == ["a.jsonl"]
    (line,) = said
    assert line.startswith(f"reading 1 file of {tmp_path}; left out: ")
    assert set(line.partition("left out: ")[2].split(", ")) == {
        "2 files (.json beside other data)",
        "1 file (.lz4)",
        "2 files (.md)",
        "1 file (no ending)",
        "1 file (.gz)",
        "1 file (link to a folder)",
    }


def test_json_that_is_packed_is_data_beside_other_files(place):
    """The names of C4 and Dolma; a plain .json beside lines holds settings more often."""
    put(place, "a.jsonl", "b.json.zst", "config.json", content=b"")
    put(f"{place}/all", "c4-train.00000-of-01024.json.gz", "b.json", content=b"")
    assert listed(f"{place}/*") == ["a.jsonl", "b.json.zst"]
    assert listed(f"{place}/all") == ["b.json", "c4-train.00000-of-01024.json.gz"]


@pytest.fixture
def odd(tmp_path, monkeypatch):
    """Makes a folder with what is no data, is data twice, or would never end."""
    put(tmp_path, "none/_a.jsonl", "none/b.txt", "none/c.txt", "data/a.jsonl", "two/a.jsonl")
    put_parquet(tmp_path, "d/table/part-0.parquet", "one")
    put_parquet(tmp_path, "d/table/_delta_log/00000000000000000010.checkpoint.parquet", "x")
    (tmp_path / "two/b.jsonl").symlink_to("a.jsonl")
    (tmp_path / "link").symlink_to("data")
    (tmp_path / "out/part.jsonl").mkdir(parents=True)
    devices = tmp_path / "devices"
    devices.mkdir()
    os.mkfifo(devices / "pipe.jsonl")
    (devices / "link.jsonl").symlink_to(devices / "pipe.jsonl")
    (devices / "zero.jsonl").symlink_to("/dev/zero")
    monkeypatch.chdir(devices)  # the path of a socket is short
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket.jsonl")
    monkeypatch.chdir(tmp_path)
    return tmp_path


NO_FILE = "is a named pipe, a socket or a device; expected a"
REFUSED = [  # {} stands for that folder
    ("{}/none", "left out: 1 file (name or folder begins with . or _), 2 files (.txt)"),
    ("{}/out/*.jsonl", "--dataset_path {}/out/*.jsonl: matches only folders; add /* to it"),
    # A Delta table's folder has files with rows that were deleted from it.
    *((f"{{}}/d/table{end}", "{}/d/table is a Delta table") for end in ("", "/*.parquet", "/..")),
    *(
        (f"{{}}/two{end}", "{0}/two/b.jsonl: is given twice, also as {0}/two/a.jsonl; each")
        for end in ("", "/*.jsonl")
    ),
    # To open a pipe waits for whoever writes to it.
    *(
        (f"{{}}/devices/{name}", NO_FILE)
        for name in ("", "pipe.jsonl", "link.jsonl", "zero.jsonl", "socket.jsonl", "p*.jsonl")
    ),
    ("/dev/null", f"/dev/null: {NO_FILE}"),
]


@pytest.mark.parametrize("path,told", REFUSED)
def test_what_cannot_be_read_once_is_refused(path, told, odd, inputs, capsys):
    flags = [*inputs[:2], "--dataset_path", path.format(odd)]
    assert_refused(capsys, odd, flags, told.format(odd))


@pytest.mark.parametrize(
    "other", ["{}/data/", "{}/./data", "file://{}/data", "data", "./data", "{}/link", "{}/d*/a.*"]
)
def test_one_file_in_two_sources_of_a_mixture_is_refused(other, odd, inputs, capsys):
    flags = [*inputs[:2], "--mix", f"{odd}/data/a.jsonl=1", f"{other.format(odd)}=2"]
    assert_refused(capsys, odd, flags, "a.jsonl: is given twice")


def test_a_file_that_is_named_is_read(odd):
    assert listed(odd / "two/b.jsonl") == ["b.jsonl"]
    assert listed(odd / "d/table/part-0.parquet") == ["part-0.parquet"]


def test_one_object_under_two_urls_is_refused(bucket):
    bucket.put("data/a.jsonl", b"{}")
    mixed = parse_args(["--mix", "gs://bucket/data=1", "gcs://bucket/data/a.jsonl=1"])
    with pytest.raises(InputError, match=r"--mix gs://bucket/data/a.jsonl: is given twice;"):
        open_dataset(mixed.part(TextRequest), Columns(("text",)))


@pytest.mark.parametrize("name", ["a::b.jsonl", "zip::a.jsonl", "a[1]::x.jsonl", "::.csv.gz"])
def test_two_colons_in_a_local_path_are_part_of_a_name(tmp_path, name):
    """fsspec would take it for a chain of URLs."""
    folder = tmp_path / "x::y"
    folder.mkdir()
    content = b"text\nx\n" if name.endswith(".gz") else b'{"text": "x"}\n'
    packed = pyarrow.compress(content, "gzip", asbytes=True) if name.endswith(".gz") else content
    (folder / name).write_bytes(packed)
    for asked in (folder, folder / name, tmp_path / "x::*/*"):
        assert [document.content.text for document in stream_of(asked)] == ["x"]
    assert listed(folder / name) == [name]
    with open(folder / "c::d.parquet", "wb") as file:
        pyarrow.parquet.write_table(pyarrow.table({"text": ["x"]}), file)
    assert [document.content.text for document in stream_of(folder / "c::d.parquet")] == ["x"]


def test_a_file_at_the_top_has_a_name():
    put("memory://", "top.jsonl")
    try:
        for asked in ("memory://top.jsonl", "memory://to*.jsonl"):
            assert listed(asked) == ["top.jsonl"]
    finally:
        fsspec.filesystem("memory").rm("/top.jsonl")
    with pytest.raises(InputError, match=r"--dataset_path /no_such.jsonl: no such file or folder"):
        list_files("/no_such.jsonl")
