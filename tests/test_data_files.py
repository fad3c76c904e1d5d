"""A run knows its files by their content: it goes on with the same rows, or not at all."""

import gzip
import json
import re
import subprocess

import datasets
import fsspec
import pytest
from command_line import main
from extractions import edit
from pods import flags_for
from small_runs import content, documents_in
from test_file_kinds import as_arrow, as_lines, as_parquet, rows_of

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run import open_data
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
    (tmp_path / "new").write_text(NEW)
    return tmp_path / "data"


def change(folder, command):
    subprocess.run(["bash", "-c", command], cwd=folder, check=True)


def opened(folder, asked="folder", earlier=()):
    """The text of a run whose hosts have stored this metadata, with the data set opened."""
    flags = [flag.format(folder) for flag in ASKED[asked]]
    text = Text(parse_args(flags).text_options, Checkpoint("none"), 0, earlier)
    assert text.dataset.files.files
    return text


def metadata_of(text):
    dataset = text.dataset
    identity = Identity(data=dataset.description, data_revision=dataset.data_revision)
    metadata = {"identity": identity.to_json(), "data_files": dataset.files.to_json()}
    return json.loads(json.dumps(metadata))


def texts_of(text):
    return [document.content.text for document in documents_in(text.documents(Worker()))]


GROW, RENAME, DELETE = "cat ../new >> a.jsonl", "mv a.jsonl z.jsonl", "rm b.jsonl"
REVERSE, SHORTEN = 'echo "$(tac a.jsonl)" > a.jsonl', 'echo "$(head -29 a.jsonl)" > a.jsonl'
LONGER = r"/data/{}\.jsonl is not the file that .* \([\d,]+ bytes then, [\d,]+ now\); a run".format
# What happens to the files between two starts, and the refusal; None: the same rows are read.
BETWEEN_STARTS = {
    "nothing": ("true", None),
    "grown": (GROW, None),
    "renamed and grown": (f"{GROW}; {RENAME}", None),
    "left out": ("for name in _b.jsonl .c.jsonl e.json; do cp ../new $name; done", None),
    "reordered rows": (REVERSE, r"/data/a\.jsonl is not the file that the run began with; a run "),
    "exchanged": ("cat ../new a.jsonl > b.jsonl", LONGER("b")),
    "exchanged for each other": (
        f"{RENAME}; mv b.jsonl a.jsonl; mv z.jsonl b.jsonl",
        r"/data/a\.jsonl is not the file that the run began with; ",
    ),
    "shortened": (SHORTEN, LONGER("a")),
    "changed and grown": (f"{REVERSE}; {GROW}", LONGER("a")),
    "missing": (DELETE, r"b\.jsonl is missing; a run .*; this one needs the file"),
    "additional": ("cp ../new 0.jsonl", r"0\.jsonl was not read when the run began; take it out"),
}


@every_way
@pytest.mark.parametrize("case", BETWEEN_STARTS)
def test_a_continued_run_reads_the_same_rows_or_names_the_file(data, case, asked, caplog):
    """One line says what is not read of files that have grown."""
    command, refused = BETWEEN_STARTS[case]
    first = opened(data.parent, asked)
    before, stored = texts_of(first), metadata_of(first)
    change(data, command)
    if refused is not None:
        flag = "--mix" if asked == "mixture" else "--dataset_path"
        with pytest.raises(InputError, match=f"^{flag}: .*{refused}"):
            opened(data.parent, asked, [stored])
        return
    caplog.clear()
    again = opened(data.parent, asked, [stored])
    of = {"grown": f"{data}/a.jsonl", "renamed and grown": f"{data}/z.jsonl"}.get(case)
    told = f"the last {len(NEW)} bytes of {of} are not read: they were not there when the run began"
    assert [each for each in caplog.messages if "left out: " not in each] == [told] * bool(of)
    assert texts_of(again) == before
    assert metadata_of(again) == stored


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--dataset_name org/texts --dataset_split train", "--dataset_name org/texts train"),
        ("--mix {}/more=1 org/texts::train=2", "--mix org/texts::train"),
    ],
)
def test_a_data_set_of_the_hub_is_continued_by_the_same_datasets(flags, named, data, monkeypatch):
    """Another version may divide or order its rows otherwise. A record without the version, as runs
    of other programs have it, is continued, and so are files."""
    rows, asked = datasets.IterableDataset.from_generator(lambda: iter([{"text": "a"}])), []

    def open_hub(*given):
        asked.append(given)
        return rows, "f00"

    monkeypatch.setattr(open_data, "open_hub_dataset", open_hub)
    config = parse_args(flags.format(data.parent).split())

    def start(earlier):
        return Text(config.text_options, Checkpoint("none"), 0, earlier).dataset

    first = start([])
    identity = Identity(data=first.description, data_revision=first.data_revision).to_json()
    metadata = {"identity": identity, "data_files": first.files.to_json()}
    installed = {"versions": {"datasets": datasets.__version__}}
    for continued in ({}, {"versions": {}}, installed):
        start([metadata | installed, metadata | continued])
    assert [given[3] for given in asked] == [None, "f00", "f00", "f00"]
    with pytest.raises(InputError) as refused:
        start([metadata | installed, metadata | {"versions": {"datasets": "5.1.9"}}])
    assert len(asked) == 4  # the hub is not asked for what is refused
    told = f"{named}: the run has read it with datasets 5.1.9, and datasets {datasets.__version__}"
    assert str(refused.value).startswith(told) and "pip install datasets==5.1.9" in str(
        refused.value
    )


ROWS, LINES = rows_of([1]), as_lines(rows_of([1]))
ONE = b'{"text": "1"}'
# The name of a file, its content when the run begins, what comes behind it, how many rows the run
# reads, and whether the last one is cut; None: it is another file then.
GROWN = [
    ("a.JSONL", LINES, LINES, 1, False),
    ("a.jsonl.gz", gzip.compress(LINES), gzip.compress(b"new"), 1, False),
    ("a.parquet", as_parquet(ROWS), b"new", None, False),
    ("a.arrow", as_arrow(ROWS), b"new", None, False),
    ("a.jsonl", ONE + b'\n{"text": "2', b'"}\n', 1, True),
    ("a.jsonl", ONE + b"\n" + ONE, b"", 2, False),
    ("a.csv", b"text\n1\n2", b"\n3\n", 2, False),
    ("a.csv", b'text\n1\n"2\n', b'2"\n', 1, True),
]


@pytest.mark.parametrize("case", GROWN, ids=lambda case: f"{case[0]} {case[3]}")
def test_files_of_text_may_grow_and_others_may_not(case, tmp_path, caplog):
    """Nothing is read of a row that the recorded size cuts."""
    name, begins, more, rows, cut = case
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / name
    path.write_bytes(begins)
    first = opened(tmp_path)
    stored = metadata_of(first)
    path.write_bytes(begins + more)
    if rows is None:
        with pytest.raises(RunError, match=f"{name}: has changed while the run was reading it"):
            first.dataset.files.check([{"file": name}])
        with pytest.raises(InputError, match=f"{name} is not the file that the run began with"):
            opened(tmp_path, earlier=[stored])
        return
    for text in (first, opened(tmp_path, earlier=[stored])):
        assert len(texts_of(text)) == rows
    assert ("its last row is not read: it was not complete when" in caplog.text) == cut


CHANGED = "has changed while the run was reading it"
# Whose first row has been read when something happens to the files, what, and what ends the run.
WHILE_READ = {
    "grown": ("a", GROW, None),
    "reordered": ("a", REVERSE, CHANGED),
    "exchanged": ("b", "cp ../new b.jsonl", CHANGED),
    "deleted": ("b", DELETE, "cannot be read: No such file"),
}


@every_way
@pytest.mark.parametrize("case", WHILE_READ)
def test_a_file_that_changes_while_it_is_read_ends_the_run(data, case, asked):
    """It ends after its last row, be there another file or none."""
    letter, command, told = WHILE_READ[case]
    given = []

    def read():
        documents = opened(data.parent, asked).documents(Worker())
        for row in documents.read(documents.beginning):
            document = row.document
            if document.doc_id[0] == letter and letter not in given:
                change(data, command)
            given.append(document.doc_id[0])

    if told is None:
        read()
        assert (given.count("a"), given.count("b")) == (30, 30)
        return
    with pytest.raises(RunError, match=rf"/data/{letter}\.jsonl: {told}") as raised:
        read()
    assert "put the file back as it was" in raised.value.remedy
    assert given.count(letter) == 30


def test_hosts_compare_what_their_files_hold(data):
    """What other hosts have stored is read here, too, and must be the same."""
    for command in (GROW, REVERSE):
        here = opened(data.parent, "mixture")
        before = here.dataset.files.fingerprints()
        change(data, command)
        there = opened(data.parent, "mixture")
        differing = set(before.items()) ^ set(there.dataset.files.fingerprints().items())
        assert {name for name, _ in differing} == {"data file 1/a.jsonl"}
        with pytest.raises(InputError, match="the hosts of this run have read different files"):
            opened(data.parent, "mixture", [metadata_of(here), metadata_of(there)])


def test_files_at_a_url_count_by_what_their_store_says(bucket):
    """One listing says it of all of them."""
    for number in range(9):
        bucket.put(f"data/{number}.jsonl", LINES)
    bucket.requests.clear()
    files = DataFiles(list_files("gs://bucket/data"))
    assert {file.content_version[:8] for file in files.files} == {"md5Hash "}
    assert len(bucket.requests) < 9
    before = {"data_files": files.to_json()}
    assert (
        DataFiles.as_recorded(list_files("gs://bucket/data"), [before]).to_json() == files.to_json()
    )
    for changed in (LINES.swapcase(), LINES * 2):
        bucket.put("data/4.jsonl", changed)
        fsspec.filesystem("gs").invalidate_cache()
        with pytest.raises(InputError, match=r"gs://bucket/data/4\.jsonl is not the file that the"):
            DataFiles.as_recorded(list_files("gs://bucket/data"), [before])


def test_a_run_records_every_file_and_refuses_others(demo_inputs, data, tmp_path, capsys):
    """It knows a file that no stored sample comes from, too; what is stored stays as it is. If
    machines read other files, some rows would be stored twice, and others never."""

    def extract(output, *more):
        few = "--layers_to_extract", 1, "--batch_size", 1, "--shard_size_gb", 5e-5
        flags = flags_for(demo_inputs, tmp_path / output, "--no_data_parallel", *more, hooks=few)
        return main(*flags, "--dataset_path", data)

    def recorded():
        return json.loads((tmp_path / "out/metadata.json").read_text())

    machines = "machines", "--total_machines", 2, "--max_samples", 1, "--machine_id"
    assert extract("out", "--max_samples", 10) == extract(*machines, 0) == 0
    listed = recorded()["data_files"]
    sizes = [(name, (data / name).stat().st_size) for name in ("a.jsonl", "b.jsonl")]
    assert [(each["name"], each["bytes"]) for each in listed] == sizes
    assert all(re.fullmatch(r"blocks \w{64}", each["fingerprint"]) for each in listed)
    before = content(tmp_path / "out")
    change(data, REVERSE)
    told = f"error: --dataset_path: {data}/a.jsonl is not the file that the run began with"
    for run in (("out", "--max_samples", 40), (*machines, 1)):
        assert extract(*run) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(told)
    assert content(tmp_path / "out") == before
    change(data, f"{REVERSE}; {GROW}; {RENAME}")
    # Another version of datasets changes nothing about files.
    edit(tmp_path / "out/metadata.json", lambda metadata: metadata["versions"].update(datasets="5"))
    assert extract("out") == 0
    assert recorded()["data_files"] == listed and recorded()["samples"] == 60
