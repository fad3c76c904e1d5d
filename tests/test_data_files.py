"""A run knows its files by their content: it goes on with the same rows, or not at all."""

import gzip
import json
import os
import re

import fsspec
import pytest
from command_line import main
from pods import flags_for
from small_runs import content
from test_file_kinds import as_arrow, as_lines, as_parquet, rows_of

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run.data_files import DataFiles
from activation_extraction.run.host_text import Text
from activation_extraction.store.identity import Identity
from activation_extraction.text.batch import Worker
from activation_extraction.text.file_list import list_files

# How a data set in the folder {} is asked for; the second source of a mixture is another folder.
ASKED = {
    "folder": ["--dataset_path", "{}/data"],
    "shuffled": ["--dataset_path", "{}/data/*.jsonl", "--shuffle_documents", "3"],
    "mixture": ["--mix", "{}/more=0.5", "{}/data=1"],
}
every_way = pytest.mark.parametrize("asked", ASKED)


def lines(*names):
    return "".join(json.dumps({"text": f"text {name}", "id": name}) + "\n" for name in names)


A, B = ([f"{letter}{n}" for n in range(30)] for letter in "ab")
NEW = lines("new")


@pytest.fixture
def data(tmp_path):
    """The folder `data`, with two files of rows; there is another one for mixtures."""
    for path, names in (("data/a.jsonl", A), ("data/b.jsonl", B), ("more/m.jsonl", ["m1", "m2"])):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(lines(*names))
    return tmp_path / "data"


def opened(folder, asked="folder", earlier=()):
    """The text of a run whose hosts have stored this metadata, with the data set opened."""
    flags = [flag.format(folder) for flag in ASKED[asked]]
    text = Text(parse_args(flags), Checkpoint("none"), 0, earlier)
    assert text.dataset.files.files
    return text


def metadata_of(text):
    dataset = text.dataset
    identity = Identity(data=dataset.name, data_revision=dataset.content)
    metadata = {"identity": identity.to_json(), "data_files": dataset.files.to_json()}
    return json.loads(json.dumps(metadata))


def texts_of(text):
    return [document.content.text for document in text.documents(Worker())]


def write(name, content, mode="w"):
    def change(folder):
        with open(folder / name, mode) as file:
            file.write(content)

    return change


def append(name):
    return write(name, NEW, "a")


def rename(*pairs):
    def change(folder):
        for old, new in pairs:
            (folder / old).rename(folder / f"_{new}")
        for _, new in pairs:
            (folder / f"_{new}").rename(folder / new)

    return change


def both(*changes):
    return lambda folder: [change(folder) for change in changes]


def delete(name):
    return lambda folder: (folder / name).unlink()


def touch(name):
    return lambda folder: os.utime(folder / name, (1, 1))


REVERSED = write("a.jsonl", lines(*reversed(A)))
LONGER = r"/data/{}\.jsonl is not the file that .* \([\d,]+ bytes then, [\d,]+ now\); a run".format
# What happens to the files between two starts, and the refusal; None: the same rows are read.
BETWEEN_STARTS = {
    "nothing": (both(), None),
    "renamed": (rename(("a.jsonl", "z.jsonl")), None),
    "all renamed": (rename(("a.jsonl", "z.jsonl"), ("b.jsonl", "y.jsonl")), None),
    "grown": (append("a.jsonl"), None),
    "renamed and grown": (both(append("a.jsonl"), rename(("a.jsonl", "z.jsonl"))), None),
    "left out": (both(*(write(name, NEW) for name in ("_b.jsonl", ".c.jsonl", "e.json"))), None),
    "reordered rows": (REVERSED, r"/data/a\.jsonl is not the file that the run began with; a run "),
    "exchanged": (write("b.jsonl", lines("other", *B)), LONGER("b")),
    "exchanged for each other": (
        rename(("a.jsonl", "b.jsonl"), ("b.jsonl", "a.jsonl")),
        r"/data/a\.jsonl is not the file that the run began with; ",
    ),
    "shortened": (write("a.jsonl", lines(*A[:-1])), LONGER("a")),
    "changed and grown": (write("a.jsonl", lines(*reversed(A), "new")), LONGER("a")),
    "missing": (delete("b.jsonl"), r"b\.jsonl is missing; a run .*; this one needs the file"),
    "renamed and changed": (both(REVERSED, rename(("a.jsonl", "z.jsonl"))), r"a\.jsonl is missing"),
    "additional": (write("0.jsonl", NEW), r"0\.jsonl was not read when the run began; take it out"),
}


@every_way
@pytest.mark.parametrize("case", BETWEEN_STARTS)
def test_a_continued_run_reads_the_same_rows_or_names_the_file(data, case, asked):
    change, refused = BETWEEN_STARTS[case]
    first = opened(data.parent, asked)
    before, stored = texts_of(first), metadata_of(first)
    change(data)
    if refused is not None:
        flag = "--mix" if asked == "mixture" else "--dataset_path"
        with pytest.raises(InputError, match=f"^{flag}: .*{refused}"):
            opened(data.parent, asked, [stored])
        return
    again = opened(data.parent, asked, [stored])
    assert texts_of(again) == before
    assert metadata_of(again) == stored


def test_what_is_not_read_of_files_that_have_grown_is_said_in_one_line(data, caplog):
    stored = metadata_of(opened(data.parent))
    for name, told in (("a.jsonl", f"{data}/a.jsonl"), ("b.jsonl", "2 files")):
        append(name)(data)
        caplog.clear()
        opened(data.parent, earlier=[stored])
        size = len(NEW) * (1 + (name == "b.jsonl"))
        assert caplog.messages == [
            f"the last {size} bytes of {told} are not read: they were not there when the run began"
        ]


ROWS, LINES = rows_of([1]), as_lines(rows_of([1]))
# The name of a file, its content, what is written behind it, and whether the run continues.
KINDS = [
    ("a.JSONL", LINES, LINES, True),
    ("a.json", b"[" + LINES + b"]", b"\n", True),
    ("a.csv", b"text,id\nx,1\n", b"new,new\n", True),
    ("a.jsonl.gz", gzip.compress(LINES), gzip.compress(b"new"), True),
    ("a.parquet", as_parquet(ROWS), b"new", False),
    ("a.arrow", as_arrow(ROWS), b"new", False),
]


@pytest.mark.parametrize("name,content,more,continues", KINDS, ids=[each[0] for each in KINDS])
def test_files_of_text_may_grow_and_others_may_not(tmp_path, name, content, more, continues):
    (tmp_path / "data").mkdir()
    write(name, content, "wb")(tmp_path / "data")
    first = opened(tmp_path)
    stored, texts = metadata_of(first), texts_of(first)
    assert len(texts) == 1
    write(name, more, "ab")(tmp_path / "data")
    if continues:
        first.dataset.files.check([{"file": name}])
        assert texts_of(opened(tmp_path, earlier=[stored])) == texts
        return
    with pytest.raises(RunError, match=f"{name}: has changed while the run was reading it"):
        first.dataset.files.check([{"file": name}])
    with pytest.raises(InputError, match=f"{name} is not the file that the run began with"):
        opened(tmp_path, earlier=[stored])


ONE = '{"text": "1"}'
# What a file has when the run begins, what comes behind it, the texts, and whether a row is cut.
CUT = [
    ("a.jsonl", f'{ONE}\n{{"text": "2', '"}\n', ["1"], True),
    ("a.json", f'{ONE}\n{{"te', 'xt": "2"}\n', ["1"], True),
    ("a.jsonl", ONE, f"\n{ONE}\n", ["1"], False),
    ("a.jsonl", f"{ONE}\r", f"\n{ONE}\n", ["1"], False),
    ("a.jsonl", ONE, f"\r\n{ONE}\n", ["1"], False),
    ("a.jsonl", f"{ONE}\n", f"{ONE}\n", ["1"], False),
    ("a.jsonl", f"{ONE}\n{ONE}", "", ["1", "1"], False),
    ("a.jsonl", ONE[:5], ONE[5:], [], True),
    ("a.csv", "text\n1\n2", "2\n", ["1"], True),
    ("a.csv", "text\n1\n2", "\n3\n", ["1", "2"], False),
    ("a.csv", 'text\n1\n"2', '2"\n', ["1"], True),
    ("a.csv", 'text\n1\n"2\n', '2"\n', ["1"], True),
]


@pytest.mark.parametrize("name,begins,more,texts,cut", CUT)
def test_a_row_that_the_recorded_size_cuts_is_not_read(
    tmp_path, name, begins, more, texts, cut, caplog
):
    (tmp_path / "data").mkdir()
    write(name, begins)(tmp_path / "data")
    dataset = opened(tmp_path)
    write(name, more, "a")(tmp_path / "data")
    assert texts_of(dataset) == texts
    assert ("its last row is not read: it was not complete when" in caplog.text) == cut


CHANGED = "has changed while the run was reading it"
# Whose first row has been read when something happens to the files, what, and what ends the run.
WHILE_READ = {
    "touched": ("a", touch("a.jsonl"), None),
    "grown": ("a", append("a.jsonl"), None),
    "grown, the other one": ("b", append("b.jsonl"), None),
    "reordered": ("a", REVERSED, CHANGED),
    "exchanged": ("b", write("b.jsonl", NEW), CHANGED),
    "shortened": ("a", write("a.jsonl", lines(*A[:-1])), CHANGED),
    "deleted": ("b", delete("b.jsonl"), "cannot be read: No such file"),
}


@every_way
@pytest.mark.parametrize("case", WHILE_READ)
def test_a_file_that_changes_while_it_is_read_ends_the_run(data, case, asked):
    """After its last row, be there another file or none."""
    letter, change, told = WHILE_READ[case]
    given = []

    def read():
        for document in opened(data.parent, asked).documents(Worker()):
            if document.doc_id[0] == letter and letter not in given:
                change(data)
            given.append(document.doc_id[0])

    if told is None:
        read()
        assert (given.count("a"), given.count("b")) == (30, 30)
        return
    with pytest.raises(RunError, match=rf"/data/{letter}\.jsonl: {told}") as raised:
        read()
    assert "put the file back as it was" in raised.value.remedy
    assert given.count(letter) == 30


@pytest.mark.parametrize("asked,prefix", [("folder", ""), ("mixture", "1/")])
def test_hosts_compare_what_their_files_hold(data, asked, prefix):
    """What other hosts have stored is read here, too, and must be the same."""
    here = opened(data.parent, asked)
    for change in (append("b.jsonl"), write("b.jsonl", lines(*reversed(B)))):
        before = here.dataset.files.fingerprints()
        change(data)
        there = opened(data.parent, asked)
        differing = set(before.items()) ^ set(there.dataset.files.fingerprints().items())
        assert {name for name, _ in differing} == {f"data file {prefix}b.jsonl"}
        with pytest.raises(InputError, match="the hosts of this run have read different files"):
            opened(data.parent, asked, [metadata_of(here), metadata_of(there)])


def test_files_at_a_url_count_by_what_their_store_says(bucket):
    """One listing says it of all of them."""
    for number in range(9):
        bucket.put(f"data/{number}.jsonl", LINES)
    bucket.asked.clear()
    files = DataFiles(list_files("gs://bucket/data"))
    assert {file.version[:8] for file in files.files} == {"md5Hash "} and len(bucket.asked) < 9
    before = {"data_files": files.to_json()}
    assert (
        DataFiles.as_recorded(list_files("gs://bucket/data"), [before]).to_json() == files.to_json()
    )
    for changed in (LINES.swapcase(), LINES * 2):
        bucket.put("data/4.jsonl", changed)
        fsspec.filesystem("gs").invalidate_cache()
        with pytest.raises(InputError, match=r"gs://bucket/data/4\.jsonl is not the file that the"):
            DataFiles.as_recorded(list_files("gs://bucket/data"), [before])


def test_names_that_are_not_utf8_can_be_recorded(tmp_path):
    (tmp_path / "data").mkdir()
    with open(os.fsencode(tmp_path / "data") + b"/\xff.jsonl", "w") as file:
        file.write(lines("x"))
    stored = metadata_of(opened(tmp_path))
    assert stored["data_files"][0]["name"] == "\\xff.jsonl"
    assert metadata_of(opened(tmp_path, earlier=[stored])) == stored


@pytest.fixture
def extract(demo_inputs, data, tmp_path):
    """Runs over `data`, in shards of a few samples; the exit status."""

    def run(output, *more):
        few = "--layers_to_extract", 1, "--batch_size", 1, "--shard_size_gb", 5e-5
        flags = flags_for(demo_inputs, tmp_path / output, "--no_data_parallel", *more, hooks=few)
        return main(*flags, "--dataset_path", data)

    return run


def test_a_run_records_every_file_and_refuses_others(extract, data, tmp_path, capsys):
    """Also a file that no stored sample comes from; what is stored stays as it is."""
    assert extract("out", "--max_samples", 10) == 0

    def recorded():
        return json.loads((tmp_path / "out/metadata.json").read_text())

    listed = recorded()["data_files"]
    sizes = [(name, (data / name).stat().st_size) for name in ("a.jsonl", "b.jsonl")]
    assert [(each["name"], each["bytes"]) for each in listed] == sizes
    assert all(re.fullmatch(r"blocks \w{64}", each["fingerprint"]) for each in listed)
    before = content(tmp_path / "out")
    write("b.jsonl", lines(*reversed(B)))(data)
    assert extract("out", "--max_samples", 40) == 2
    told = f"error: --dataset_path: {data}/b.jsonl is not the file that the run began with"
    assert capsys.readouterr().err.splitlines()[-1].startswith(told)
    assert content(tmp_path / "out") == before
    both(write("b.jsonl", lines(*B, "new")), rename(("a.jsonl", "z.jsonl")))(data)
    assert extract("out") == 0
    assert recorded()["data_files"] == listed and recorded()["samples"] == 60


def test_a_machine_refuses_files_that_another_one_has_read_differently(extract, data, capsys):
    """Together they would have some rows twice, and others never."""
    for machine, order in enumerate((1, -1)):
        write("a.jsonl", lines(*A[::order]))(data)
        assert extract("out", "--total_machines", 2, "--machine_id", machine) == 2 * machine
    assert "a.jsonl is not the file that the run began with" in capsys.readouterr().err
