"""Which files of a folder are data: each once; what is left out is counted and said."""

import datasets
import fsspec
import pytest
from command_line import assert_refused
from row_files import packed, write_parquet
from small_runs import documents_in, stream_of

from activation_extraction.text.file_list import list_files

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
    return [document.content.text for document in documents_in(stream_of(path))]


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


SPLITS = "en/train-0-of-2.parquet en/train-1-of-2.parquet en/dev.parquet train/Test-1.parquet"
PRIVATE = "part-0.parquet _temporary/0/attempt/part-0.parquet .part-1.parquet _SUCCESS .part-0.crc"
HIDDEN = "2 files (name or folder begins with . or _)"
OTHERS = "a.jsonl b.json sub/c.json d.jsonl.lz4 e.md f.md LICENSE g.parquet.gz .gitattributes"
LEFT_OUT = "2 files (.json beside other data), 1 file (.lz4), 2 files (.md), 1 file (no ending)"
# The files of a folder, which of them are asked for, the names of those that are read, and what is
# said of the others. A name says where a file lies below what is asked for, or its first wildcard.
LISTED = [
    ("a.jsonl part/b.jsonl", "", "a.jsonl part/b.jsonl", ""),
    ("a.jsonl part/b.jsonl", "/*.jsonl", "a.jsonl", ""),
    ("a.jsonl part/b.jsonl", "/a.jsonl", "a.jsonl", ""),
    # As Spark leaves them; the only copy of a row is not in an attempt.
    (PRIVATE, "", "part-0.parquet", HIDDEN),
    (OTHERS, "", "a.jsonl", f"{LEFT_OUT}, 1 file (.gz)"),
    (OTHERS, "/*.json", "b.json", ""),  # also if they are asked for
    ("c4.json.gz b.json", "", "b.json c4.json.gz", ""),
    # The name of a folder says the split of its files before theirs do; a glob takes them all.
    (SPLITS, "/**", " ".join(sorted(SPLITS.split())), ""),
    (f"{SPLITS} train/contest.parquet", "/train", "Test-1.parquet contest.parquet", ""),
]


@pytest.mark.parametrize("files,asked,names,others", LISTED)
def test_which_files_are_read(files, asked, names, others, tmp_path, at, caplog):
    put(tmp_path / "data", *files.split())
    place = at(tmp_path / "data") + asked
    assert listed(place) == names.split()
    (line,) = caplog.messages or [""]
    begin, _, counts = line.partition("; left out: ")
    assert set(counts.split(", ")) == set(others.split(", "))
    assert begin.endswith(f" of {place}" if others else "")


@pytest.fixture
def odd(tmp_path):
    """Makes a folder with what is no data, or is data twice."""
    put(tmp_path, "none/_a.jsonl", "none/b.txt", "none/c.txt", "data/a.jsonl", "two/a.jsonl")
    put(tmp_path, "others/a.tsv", "others/b.tsv", "others/c.xlsx")
    put(tmp_path, "d/table/part-0.parquet", "d/table/_delta_log/0010.checkpoint.parquet")
    put(tmp_path, "d/table/day=1/part-1.parquet")
    put(tmp_path, "kinds/a.jsonl", "kinds/b.parquet", *(f"names/{n}" for n in SPLITS.split()))
    save(tmp_path / "lost", *range(4), shards=2)
    (tmp_path / "lost/data-00001-of-00002.arrow").unlink()
    one = datasets.Dataset.from_dict({"text": ["x"]})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "saved")
    (tmp_path / "two/b.jsonl").symlink_to("a.jsonl")
    (tmp_path / "link").symlink_to("data")
    return tmp_path


DELTA = "{}/d/table is a Delta table"  # its folder has files with rows that were deleted from it
PATHS = [  # below that folder, which {} stands for, and what must be said
    ("/none", "left out: 1 file (name or folder begins with . or _), 2 files (.txt)"),
    ("/others", "left out: 2 files (.tsv), 1 file (.xlsx); .tsv is not read: save the columns"),
    ("/others", "as .csv; .xlsx is not read: save the sheet as .csv"),
    ("/nothing", "{}/nothing: no such file or folder"),
    ("/kinds", "{}/kinds: holds both Parquet and JSON; choose one of them, for exam"),
    ("/names", "files of several splits, such as {0}/names/en/dev.parquet and {0}/names/"),
    ("/saved", "{}/saved/ holds several splits of a data set (test, train); "),
    ("/lost", "{}/lost/state.json: lists data-00001-of-00002.arrow, which is"),
    *((f"/d/table{end}", DELTA) for end in ("", "/*.parquet")),
    *((f"/d/{end}", DELTA) for end in ("*/*.parquet", "t*/*/*.parquet")),
    ("/two", "{0}/two/b.jsonl: is given twice, also as {0}/two/a.jsonl; each"),
]
REFUSED = [
    *((f"--dataset_path {{}}{path}", told) for path, told in PATHS),
    ("--mix {0}/data/a.jsonl=1 file://{0}/link=2", "a.jsonl: is given twice"),
]


def test_what_cannot_be_read_once_is_refused(odd, inputs, capsys):
    for flags, told in REFUSED:
        asked = [*inputs[:2], *flags.format(odd).split()]
        assert_refused(capsys, odd, asked, told.format(odd))


def test_a_file_that_is_named_is_read(odd):
    """A name may have ::, which fsspec takes for a chain of URLs."""
    assert listed(odd / "two/b.jsonl") == ["b.jsonl"]
    assert listed(odd / "d/table/part-0.parquet") == ["part-0.parquet"]
    assert texts_of(odd / "saved/train") == ["x"]
    put(odd / "x::y", "zip::a[1].csv.gz")
    assert texts_of(odd / "x::y") == texts_of(odd / "x::y/zip::a[1].csv.gz") == ["x"]
