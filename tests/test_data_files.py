"""A run knows its files by their content: it goes on with the same rows, or not at all."""

import gzip
import json
import os
import re

import pyarrow
import pyarrow.parquet
import pytest
from command_line import main
from pods import flags_for
from small_runs import TEXT, content

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.run.data_files import DataFiles
from activation_extraction.run.open_data import TextRequest, open_dataset
from activation_extraction.store.identity import Identity
from activation_extraction.text.batch import Worker
from activation_extraction.text.file_list import TextFile, list_files

# How a data set in the folder {} is asked for; the second source of a mixture is another folder.
ASKED = {
    "folder": ["--dataset_path", "{}/data"],
    "glob": ["--dataset_path", "{}/data/*.jsonl"],
    "shuffled": ["--dataset_path", "{}/data", "--shuffle_documents", "3"],
    "mixture": ["--mix", "{}/more=0.5", "{}/data=1"],
}


def lines(*names):
    return "".join(json.dumps({"text": f"text {name}", "id": name}) + "\n" for name in names)


A, B = ([f"{letter}{n}" for n in range(30)] for letter in "ab")


@pytest.fixture
def data(tmp_path):
    """The folder `data`, with two files of rows; there is another one for mixtures."""
    for path, names in (("data/a.jsonl", A), ("data/b.jsonl", B), ("more/m.jsonl", ["m1", "m2"])):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(lines(*names))
    return tmp_path / "data"


def opened(folder, asked, earlier=()):
    """A data set as a run opens it whose hosts have stored this metadata."""
    flags = [flag.format(folder) for flag in ASKED[asked]]
    return open_dataset(parse_args(flags).part(TextRequest), TEXT.columns, earlier)


def metadata_of(dataset):
    identity = Identity(data=dataset.name, data_revision=dataset.content)
    return json.loads(
        json.dumps({"identity": identity.to_json(), "data_files": dataset.files.to_json()})
    )


def documents_of(dataset, asked):
    seed = 3 if asked == "shuffled" else None
    return dataset.documents(TEXT, Worker(), False, seed)


def texts_of(dataset, asked):
    return [document.content.text for document in documents_of(dataset, asked)]


def write(name, content):
    def change(folder):
        (folder / name).write_text(content)

    return change


def append(name, content):
    def change(folder):
        with open(folder / name, "a") as file:
            file.write(content)

    return change


def rename(*pairs):
    def change(folder):
        for old, new in pairs:
            (folder / old).rename(folder / f"_{new}")
        for _, new in pairs:
            (folder / f"_{new}").rename(folder / new)

    return change


def both(*changes):
    def change(folder):
        for each in changes:
            each(folder)

    return change


# What happens to the files between two starts, and the refusal; None: the same rows are read.
BETWEEN_STARTS = {
    "nothing": (lambda folder: None, None),
    "renamed": (rename(("a.jsonl", "z.jsonl")), None),
    "all renamed, and listed in another order": (
        rename(("a.jsonl", "z.jsonl"), ("b.jsonl", "y.jsonl")),
        None,
    ),
    "grown": (append("a.jsonl", lines("new")), None),
    "renamed and grown": (
        both(append("a.jsonl", lines("new")), rename(("a.jsonl", "z.jsonl"))),
        None,
    ),
    "other files that are left out": (
        both(*(write(name, lines("new")) for name in ("_b.jsonl", ".c.jsonl", "d.md", "e.json"))),
        None,
    ),
    "reordered rows": (
        write("a.jsonl", lines(*reversed(A))),
        r"/data/a\.jsonl is not the file that the run began with; a run over other data",
    ),
    "exchanged for another file": (
        write("b.jsonl", lines("other", *B)),
        r"/data/b\.jsonl is not the file that .* \([\d,]+ bytes then, [\d,]+ now\); a run",
    ),
    "exchanged for each other": (
        rename(("a.jsonl", "b.jsonl"), ("b.jsonl", "a.jsonl")),
        r"/data/a\.jsonl is not the file that the run began with; ",
    ),
    "shortened": (
        write("a.jsonl", lines(*A[:-1])),
        r"/data/a\.jsonl is not the file that .* \([\d,]+ bytes then, [\d,]+ now\); a run",
    ),
    "changed and grown": (
        write("a.jsonl", lines(*reversed(A), "new")),
        r"/data/a\.jsonl is not the file that .* \([\d,]+ bytes then, [\d,]+ now\); a run",
    ),
    "missing": (
        lambda folder: (folder / "b.jsonl").unlink(),
        r"b\.jsonl is missing; a run over other data needs another .*; this one needs the file",
    ),
    "renamed and changed": (
        both(rename(("a.jsonl", "z.jsonl")), write("z.jsonl", lines(*reversed(A)))),
        r"a\.jsonl is missing; ",
    ),
    "additional": (
        write("0.jsonl", lines("new")),
        r"0\.jsonl was not read when the run began; take it out, or give a glob that leaves it out",
    ),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("case", BETWEEN_STARTS)
def test_a_continued_run_reads_the_same_rows_or_names_the_file(data, case, asked):
    change, refused = BETWEEN_STARTS[case]
    first = opened(data.parent, asked)
    before, stored = texts_of(first, asked), metadata_of(first)
    change(data)
    if refused is not None:
        flag = "--mix" if asked == "mixture" else "--dataset_path"
        with pytest.raises(InputError, match=f"^{flag}: .*{refused}"):
            opened(data.parent, asked, [stored])
        return
    again = opened(data.parent, asked, [stored])
    assert texts_of(again, asked) == before
    assert metadata_of(again) == stored


def test_a_file_that_is_not_asked_for_may_come(data):
    stored = metadata_of(opened(data.parent, "glob"))
    write("c.ndjson", lines("new"))(data)
    assert metadata_of(opened(data.parent, "glob", [stored])) == stored
    with pytest.raises(InputError, match=r"c\.ndjson was not read when the run began"):
        opened(data.parent, "folder", [stored])


def test_what_is_not_read_of_files_that_have_grown_is_said_in_one_line(data, caplog):
    stored = metadata_of(opened(data.parent, "folder"))
    append("a.jsonl", lines("new"))(data)
    append("b.jsonl", lines("new"))(data)
    opened(data.parent, "folder", [stored])
    told = f"the last {2 * len(lines('new'))} bytes of {data}/a.jsonl and 1 other "
    assert [each.message for each in caplog.records] == [
        f"{told}file are not read: they were not there when the run began"
    ]


def as_csv(*names):
    return "text,id\n" + "".join(f"text {name},{name}\n" for name in names)


def as_parquet(*names):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": names}), sink)
    return sink.getvalue().to_pybytes()


def as_arrow(*names):
    table, sink = pyarrow.table({"text": names}), pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue().to_pybytes()


# The name of a file, its content, what is written behind it, and whether the run continues.
KINDS = [
    ("a.ndjson", lines("x").encode(), lines("new").encode(), True),
    ("a.JSONL", lines("x").encode(), lines("new").encode(), True),
    ("a.json", b'[{"text": "x"}]', b"\n", True),
    ("a.csv", as_csv("x").encode(), b"new,new\n", True),
    ("a.jsonl.gz", gzip.compress(lines("x").encode()), gzip.compress(b"new"), True),
    ("a.parquet", as_parquet("x"), b"new", False),
    ("a.arrow", as_arrow("x"), b"new", False),
]


@pytest.mark.parametrize("name,content,more,continues", KINDS, ids=[each[0] for each in KINDS])
def test_files_of_text_may_grow_and_others_may_not(tmp_path, name, content, more, continues):
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / name
    path.write_bytes(content)
    first = opened(tmp_path, "folder")
    stored, texts = metadata_of(first), texts_of(first, "folder")
    assert len(texts) == 1
    assert texts_of(opened(tmp_path, "folder", [stored]), "folder") == texts
    path.write_bytes(content + more)
    if continues:
        first.files.check([{"file": name}])
        assert texts_of(opened(tmp_path, "folder", [stored]), "folder") == texts
        return
    with pytest.raises(RunError, match=f"{name}: has changed while the run was reading it"):
        first.files.check([{"file": name}])
    with pytest.raises(InputError, match=f"{name} is not the file that the run began with"):
        opened(tmp_path, "folder", [stored])


# What a file has when the run begins, what comes behind it, and the texts; None: it is damaged.
CUT = {
    "a row": ("a.jsonl", '{"text": "1"}\n{"text": "2', '"}\n', ["1"]),
    "a row of .json": ("a.json", '{"text": "1"}\n{"te', 'xt": "2"}\n', ["1"]),
    "only the end of the line": ("a.jsonl", '{"text": "1"}', '\n{"text": "2"}\n', ["1"]),
    "only half of the end": ("a.jsonl", '{"text": "1"}\r', '\n{"text": "2"}\n', ["1"]),
    "nothing": ("a.jsonl", '{"text": "1"}\n', '{"text": "2"}\n', ["1"]),
    "nothing, the file ends": ("a.jsonl", '{"text": "1"}\n{"text": "2"}', "", ["1", "2"]),
    "everything": ("a.jsonl", '{"te', 'xt": "1"}\n', []),
    "a field": ("a.csv", "text\n1\n2", "2\n", ["1"]),
    "only the end of a record": ("a.csv", "text\n1\n2", "\n3\n", ["1", "2"]),
    "a quoted field": ("a.csv", 'text\n1\n"2', '2"\n', ["1"]),
    "a quoted field at the end of a line": ("a.csv", 'text\n1\n"2\n', '2"\n', ["1"]),
    "a quoted field, the file ends": ("a.csv", 'text\n1\n"2\n', "", None),
}


@pytest.mark.parametrize("case", CUT)
def test_a_row_that_the_recorded_size_cuts_is_not_read(tmp_path, case, caplog):
    name, begins, more, texts = CUT[case]
    (tmp_path / "data").mkdir()
    write(name, begins)(tmp_path / "data")
    dataset = opened(tmp_path, "folder")
    append(name, more)(tmp_path / "data")
    if texts is None:
        with pytest.raises(RunError, match="a quoted field has no end"):
            texts_of(dataset, "folder")
        return
    assert texts_of(dataset, "folder") == texts
    whole = case.startswith(("only", "nothing"))
    assert ("its last row is not read: it was not complete when" in caplog.text) != whole


def touch(name):
    return lambda folder: os.utime(folder / name, (1, 1))


# What happens to the files while the run reads a.jsonl, and what ends it; None: it goes on.
WHILE_READ = {
    "nothing": (lambda folder: None, None),
    "touched": (touch("a.jsonl"), None),
    "written again": (write("a.jsonl", lines(*A)), None),
    "grown": (append("a.jsonl", lines("new")), None),
    "another one has changed": (write("b.jsonl", lines("new")), None),
    "reordered": (write("a.jsonl", lines(*reversed(A))), "has changed while the run was reading"),
    "shortened": (write("a.jsonl", lines(*A[:-1])), "has changed while the run was reading it"),
    "emptied": (write("a.jsonl", ""), "has changed while the run was reading it"),
    "deleted": (lambda folder: (folder / "a.jsonl").unlink(), "cannot be read: No such file"),
    "exchanged": (rename(("b.jsonl", "a.jsonl")), "has changed while the run was reading it"),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("case", WHILE_READ)
def test_a_file_that_changes_while_it_is_read_ends_the_run(data, case, asked):
    """Also if it was looked at before, when nothing had happened to it but a new time."""
    change, told = WHILE_READ[case]
    files = opened(data.parent, asked).files
    for before in (lambda folder: None, touch("a.jsonl")):
        before(data)
        files.check([{"file": "a.jsonl"}])
    change(data)
    if told is None:
        files.check([{"file": "a.jsonl"}])
        write("a.jsonl", lines(*reversed(A)))(data)
        told = "has changed while the run was reading it"
    with pytest.raises(RunError, match=rf"/data/a\.jsonl: {told}") as raised:
        files.check([{"file": "a.jsonl"}])
    assert "put the file back as it was" in raised.value.remedy
    if case != "another one has changed":
        files.check([{"row": 0}] + [{"file": "b.jsonl"}] * (case != "exchanged"))


@pytest.mark.parametrize("asked", ["folder", "mixture", "shuffled"])
@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl"])
def test_a_file_is_looked_at_when_it_is_left(data, name, asked):
    """After its last row, be there another file or none."""
    letter, given = name[0], []
    with pytest.raises(RunError, match=rf"/data/{name}: has changed while the run was reading it"):
        for document in documents_of(opened(data.parent, asked), asked):
            if document.doc_id[0] == letter and not any(each[0] == letter for each in given):
                write(name, lines("new"))(data)
            given.append(document.doc_id)
    assert sum(each[0] == letter for each in given) == 30


# What another host has, and what is said of it; None: the same.
OTHER_HOST = {
    "the same": (lambda folder: None, None),
    "rows in another order": (write("b.jsonl", lines(*reversed(B))), ["data file {}b.jsonl"]),
    "a longer file": (append("a.jsonl", lines("new")), ["data file {}a.jsonl"]),
    "another name": (
        rename(("a.jsonl", "c.jsonl")),
        ["data file {}a.jsonl", "data file {}c.jsonl"],
    ),
}


@pytest.mark.parametrize("asked", ["folder", "mixture"])
@pytest.mark.parametrize("case", OTHER_HOST)
def test_hosts_compare_what_their_files_hold(data, tmp_path, case, asked):
    change, names = OTHER_HOST[case]
    here = opened(data.parent, asked).files.fingerprints()
    change(data)
    there = opened(data.parent, asked).files.fingerprints()
    differing = {name for name in {*here, *there} if here.get(name) != there.get(name)}
    assert differing == {name.format("1/" * (asked == "mixture")) for name in names or ()}


def test_what_other_hosts_have_stored_is_read_here_too(data):
    """What this host has stored itself comes first."""
    theirs = metadata_of(opened(data.parent, "folder"))
    append("a.jsonl", lines("new"))(data)
    own = metadata_of(opened(data.parent, "folder"))
    assert metadata_of(opened(data.parent, "folder", [theirs])) == theirs != own
    assert metadata_of(opened(data.parent, "folder", [own, theirs])) == own
    with pytest.raises(InputError, match="the hosts of this run have read different files"):
        renamed = [{**file, "name": file["name"] * 2} for file in theirs["data_files"]]
        opened(data.parent, "folder", [own, {**theirs, "data_files": renamed}])


def at_url(version, size=9):
    return DataFiles([TextFile("gs://b/a.jsonl", "a.jsonl", size, version)])


@pytest.mark.parametrize(
    "now,same",
    [
        (at_url("md5Hash abc="), True),
        (at_url("md5Hash xyz="), False),
        (at_url("md5Hash xyz=", 10), False),
    ],
)
def test_files_at_a_url_count_by_what_their_store_says(now, same):
    before = {"data_files": at_url("md5Hash abc=").to_json()}
    if same:
        assert DataFiles.as_recorded(now.files, [before]).to_json() == before["data_files"]
        return
    with pytest.raises(InputError, match=r"gs://b/a\.jsonl is not the file that the run"):
        DataFiles.as_recorded(now.files, [before])


def test_one_listing_tells_the_checksums_of_a_bucket_s_files(bucket):
    for number in range(9):
        bucket.put(f"data/{number}.jsonl", b'{"text": "x"}\n')
    bucket.asked.clear()
    assert {file.version[:8] for file in list_files("gs://bucket/data")} == {"md5Hash "}
    assert len(bucket.asked) < 9


def test_names_that_are_not_utf8_can_be_recorded(tmp_path):
    (tmp_path / "data").mkdir()
    with open(os.fsencode(tmp_path / "data") + b"/\xff.jsonl", "w") as file:
        file.write(lines("x"))
    dataset = opened(tmp_path, "folder")
    stored = metadata_of(dataset)
    assert stored["data_files"][0]["name"] == "\\xff.jsonl"
    assert metadata_of(opened(tmp_path, "folder", [stored])) == stored
    assert texts_of(dataset, "folder") == ["text x"]


@pytest.fixture
def extract(demo_inputs, data, tmp_path):
    """Runs over `data`, in shards of a few samples; the exit status."""

    def run(output, *more):
        few = "--layers_to_extract", 1, "--batch_size", 1, "--shard_size_gb", 5e-5
        flags = flags_for(demo_inputs, tmp_path / output, "--no_data_parallel", *more, hooks=few)
        return main(*flags, "--dataset_path", data)

    return run


def recorded(folder):
    return json.loads((folder / "metadata.json").read_text())["data_files"]


def test_a_run_records_every_file_and_refuses_others(extract, data, tmp_path, capsys):
    """Also a file that no stored sample comes from; what is stored stays as it is."""
    assert extract("out", "--max_samples", 10) == 0
    listed = recorded(tmp_path / "out")
    assert [(each["name"], each["bytes"]) for each in listed] == [
        (name, (data / name).stat().st_size) for name in ("a.jsonl", "b.jsonl")
    ]
    assert all(re.fullmatch(r"blocks \w{64}", each["fingerprint"]) for each in listed)
    before = content(tmp_path / "out")
    write("b.jsonl", lines(*reversed(B)))(data)
    assert extract("out", "--max_samples", 40) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert told.startswith(
        f"error: --dataset_path: {data}/b.jsonl is not the file that the run began with"
    )
    assert content(tmp_path / "out") == before
    both(write("b.jsonl", lines(*B, "new")), rename(("a.jsonl", "z.jsonl")))(data)
    assert extract("out") == 0
    assert recorded(tmp_path / "out") == listed
    assert json.loads((tmp_path / "out/metadata.json").read_text())["samples"] == 60


def test_machines_that_read_the_same_file_differently(extract, data, tmp_path, check, capsys):
    """Each is in order by itself; together they have some rows twice, and others never."""
    for machine, order in enumerate((1, -1)):
        write("a.jsonl", lines(*A[::order]))(data)
        flags = "--total_machines", 2, "--machine_id", machine
        assert extract("out", *flags) == 2 * machine  # the second one is refused
        assert extract("apart", *flags, "--overwrite") == 0
        (tmp_path / f"machine_{machine}").mkdir()
        (tmp_path / f"apart/machine_00{machine}").rename(tmp_path / f"machine_{machine}/kept")
    assert "a.jsonl is not the file that the run began with" in capsys.readouterr().err
    (tmp_path / "both").mkdir()
    for machine in range(2):
        kept = tmp_path / f"machine_{machine}/kept"
        kept.rename(tmp_path / f"both/machine_00{machine}")
    told = check(tmp_path / "both")
    assert "machine_001: has read a file a.jsonl with other content than others have" in told
