"""A run knows its files by their content: it goes on with the same rows, or not at all."""

import json
import os
import re
from pathlib import Path

import datasets
import fsspec
import pytest
from command_line import main
from pods import Pod, flags_for
from small_runs import content

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.run import data_files
from activation_extraction.run.data_files import DataFiles
from activation_extraction.store.ownership import Ownership
from activation_extraction.text.file_list import TextFile, list_files


def rows_of(numbers):
    return "".join(json.dumps({"text": f"text number {n}", "id": n}) + "\n" for n in numbers)


@pytest.fixture
def extract(demo_inputs, tmp_path):
    """Runs over `data`, in shards of a few samples; the exit status."""

    def run(output, *more, data=tmp_path / "data"):
        few = "--layers_to_extract", 1, "--batch_size", 1, "--shard_size_gb", 5e-5
        flags = flags_for(demo_inputs, tmp_path / output, "--no_data_parallel", *more, hooks=few)
        return main(*flags, "--dataset_path", data)

    (tmp_path / "data").mkdir()
    return run


def recorded(folder):
    return json.loads((folder / "metadata.json").read_text())["data_files"]


def test_a_file_in_another_order_is_refused_and_named(extract, tmp_path, capsys):
    """Half of its rows would be stored twice, and the others never."""
    path = tmp_path / "data/a.jsonl"
    path.write_text(rows_of(range(40)))
    assert extract("out", "--max_samples", 20) == 0
    before = content(tmp_path / "out")
    path.write_text(rows_of(reversed(range(40))))
    assert extract("out", "--max_samples", 40) == 2
    assert f"{path} has changed since stored shards read it; a run over" in capsys.readouterr().err
    assert content(tmp_path / "out") == before
    path.write_text(rows_of(range(40)))
    assert extract("out", "--max_samples", 40) == 0
    assert extract("whole") == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_only_what_was_read_must_stay(extract, tmp_path):
    """A file that no stored sample comes from has no digest, and may change."""
    for name in "abc":
        (tmp_path / f"data/{name}.jsonl").write_text(rows_of([f"{name}{n}" for n in range(90)]))
    assert extract("out", "--max_samples", 10) == 0
    read = [bool(file["digest"]) for file in recorded(tmp_path / "out")]
    assert read == [True, False, False]
    (tmp_path / "data/c.jsonl").write_text(rows_of([f"c{n}" for n in reversed(range(90))]))
    assert extract("out") == 0 and extract("whole") == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert all(file["digest"] for file in recorded(tmp_path / "out"))


def test_renamed_files_are_the_same_data_in_the_same_order(extract, tmp_path):
    for name in "ab":
        (tmp_path / f"data/{name}.jsonl").write_text(rows_of([f"{name}{n}" for n in range(30)]))
    assert extract("whole") == 0
    assert extract("out", "--max_samples", 40) == 0
    (tmp_path / "data/a.jsonl").rename(tmp_path / "data/z.jsonl")
    assert extract("out") == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_file_that_has_grown_gives_its_new_rows(extract, tmp_path, check):
    """Also after a complete run, again and again."""
    path = tmp_path / "data/a.jsonl"
    for count in (20, 30, 45):
        path.write_text(rows_of(range(count)))
        assert extract("out") == 0
        assert len(recorded(tmp_path / "out")) == 1
    assert extract("whole") == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert check(tmp_path / "out") == []


@pytest.mark.parametrize("kind", ["csv", "saved"])
def test_other_kinds_are_continued_in_the_same_way(extract, tmp_path, check, kind):
    """What `datasets` puts beside its data is not on record."""
    rows = datasets.Dataset.from_list([json.loads(row) for row in rows_of(range(40)).splitlines()])
    if kind == "csv":
        rows.to_csv(tmp_path / "data/a.csv")
    else:
        rows.save_to_disk(tmp_path / "data")
    assert extract("out", "--max_samples", 20) == 0
    assert len(recorded(tmp_path / "out")) == 1
    assert extract("out") == 0 and extract("whole") == 0
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert check(tmp_path / "out") == []


def test_new_rows_before_a_cursor_are_refused(extract, tmp_path, capsys):
    for name in "ab":
        (tmp_path / f"data/{name}.jsonl").write_text(rows_of([f"{name}{n}" for n in range(30)]))
    assert extract("out", "--max_samples", 40) == 0
    with open(tmp_path / "data/a.jsonl", "a") as file:
        file.write(rows_of(["new"]))
    capsys.readouterr()
    assert extract("out") == 2
    assert "data/a.jsonl has changed since stored shards read it (" in capsys.readouterr().err


@pytest.mark.parametrize("more", ["", " "])
def test_a_last_line_that_goes_on_is_refused(extract, tmp_path, capsys, more):
    """What was stored of it is not what it says now."""
    path = tmp_path / "data/a.jsonl"
    path.write_text(rows_of(range(10)).rstrip("\n"))
    assert extract("out") == 0
    with open(path, "a") as file:
        file.write(f"{more}\n" + rows_of([10]))
    capsys.readouterr()
    assert extract("out") == 2
    assert "a.jsonl has changed since stored shards read it (" in capsys.readouterr().err


def test_one_file_more_or_less_is_named(extract, tmp_path, capsys):
    for name in "ab":
        (tmp_path / f"data/{name}.jsonl").write_text(rows_of(range(5)))
    assert extract("out", "--max_samples", 3) == 0
    (tmp_path / "data/0.jsonl").write_text(rows_of(range(5, 10)))
    assert extract("out") == 2
    anew = "a run over other data needs another --output_dir (or --gcs_prefix), or --overwrite"
    told = "--dataset_path: 0.jsonl was not read when the run began; take it out, or give a glob"
    assert f"{told} that leaves it out; {anew}\n" in capsys.readouterr().err
    (tmp_path / "data/0.jsonl").unlink()
    (tmp_path / "data/b.jsonl").unlink()
    assert extract("out") == 2
    told = (
        f"--dataset_path: b.jsonl is missing; {anew}; this one needs the file that it began with\n"
    )
    assert capsys.readouterr().err.endswith(told)


def test_files_that_are_left_out_do_not_count(extract, tmp_path, capsys):
    """Whenever they come; and a glob leaves out others that a later version would read."""
    (tmp_path / "data/a.jsonl").write_text(rows_of(range(30)))
    assert extract("out", "--max_samples", 20) == 0
    for name in ("_b.jsonl", ".c.jsonl", "d.md", "e.json"):
        (tmp_path / "data" / name).write_text(rows_of([0]))
    assert extract("out", "--max_samples", 25) == 0
    (tmp_path / "data/f.ndjson").write_text(rows_of([0]))
    capsys.readouterr()
    assert extract("out") == 2
    assert "f.ndjson was not read when the run began; take it out, or give a glob" in (
        capsys.readouterr().err
    )
    assert extract("out", data=tmp_path / "data/*.jsonl") == 0
    assert [file["name"] for file in recorded(tmp_path / "out")] == ["a.jsonl"]


@pytest.mark.parametrize("name", ["a.ndjson", "a.JSONL"])
def test_lines_of_every_name_may_grow(extract, tmp_path, name):
    for count in (10, 20):
        (tmp_path / "data" / name).write_text(rows_of(range(count)))
        assert extract("out") == 0


def test_content_is_on_record_before_the_first_shard_is_committed(extract, tmp_path, monkeypatch):
    """However long the digest takes: whenever the run is killed, the next one can compare."""
    (tmp_path / "data/a.jsonl").write_text(rows_of(range(40)))
    commit, seen = Ownership.commit, []

    def watched(owner, name, data):
        seen.append(recorded(Path(owner.folder.url))[0]["digest"])
        commit(owner, name, data)

    monkeypatch.setattr(Ownership, "commit", watched)
    assert extract("out") == 0
    assert len(seen) > 2 and set(seen) == {recorded(tmp_path / "out")[0]["digest"]} != {""}


def test_a_file_that_changes_under_the_run_ends_it(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(rows_of(range(3)))
    files = DataFiles(list_files(str(path)))
    path.write_text(rows_of(range(4)))
    files.start_digest("a.jsonl")
    with pytest.raises(RunError, match=r"a\.jsonl: has changed while the run was reading it"):
        files.settle()


def test_large_files_are_compared_all_over(tmp_path, monkeypatch):
    """Hosts see a difference in their order at once, without reading all of a file."""
    monkeypatch.setattr(data_files, "BLOCK", 64)
    lines = [json.dumps({"text": str(n)}) for n in range(10_000)]
    found = []
    for name, every in (("one", lines), ("two", lines[::-1]), ("same", lines)):
        path = tmp_path / name / "a.jsonl"
        path.parent.mkdir()
        path.write_text("\n".join(every))
        found.append(DataFiles(list_files(str(path))).sampled())
    assert found[0] == found[2] != found[1]
    assert list(found[0]) == ["data file a.jsonl"]


def test_files_at_a_url_count_by_what_their_store_says():
    def record(version):
        files = DataFiles([TextFile("gs://b/a.jsonl", "a.jsonl", 9, version)])
        files.start_digest("a.jsonl")
        assert files.settle() and not files.settle()
        return {"data_files": files.to_json()}, files.files

    before, files = record("md5Hash abc=")
    assert not DataFiles.as_recorded(files, [before]).grown
    other = [TextFile("gs://b/a.jsonl", "a.jsonl", 9, "md5Hash xyz=")]
    with pytest.raises(InputError, match=r"gs://b/a\.jsonl has changed since stored shards read"):
        DataFiles.as_recorded(other, [before])
    with pytest.raises(InputError, match=r"a\.jsonl has other content here than where"):
        DataFiles.as_recorded(files, [before], [record("md5Hash xyz=")[0]])


def test_a_bucket_tells_the_checksum_of_a_file(bucket):
    with fsspec.open("gs://bucket/data/a.jsonl", "wb") as file:
        file.write(b'{"text": "x"}\n')
    assert list_files("gs://bucket/data")[0].version.startswith("md5Hash ")


def test_names_that_are_not_utf8_can_be_recorded(extract, tmp_path):
    path = os.fsencode(tmp_path / "data") + b"/\xff.jsonl"
    with open(path, "w") as file:
        file.write(rows_of(range(5)))
    assert extract("out") == 0 and extract("out") == 0
    assert recorded(tmp_path / "out")[0]["name"] == "\\xff.jsonl"


@pytest.mark.long
def test_hosts_with_the_same_file_in_another_order_end_at_once(demo_inputs, tmp_path):
    """They would take turns at different rows: some twice, others never."""
    flags = []
    for host, order in enumerate((1, -1)):
        path = tmp_path / str(host) / "a.jsonl"
        path.parent.mkdir()
        path.write_text(rows_of(range(100, 160)[::order]))
        flags.append([*flags_for(demo_inputs, tmp_path / "out"), "--dataset_path", path])
    pod = Pod(tmp_path, 2, 2, *flags)
    assert pod.wait() == [2, 2], [pod.text(host) for host in range(2)]
    for host in range(2):
        told = r"error: hosts differ in data file a.jsonl: \w{64} on 0; \w{64} on 1; it must"
        assert re.search(told, pod.text(host))


def test_machines_that_read_the_same_file_differently(extract, tmp_path, check, capsys):
    """Each is in order by itself; together they have some rows twice, and others never."""
    path = tmp_path / "data/a.jsonl"
    for machine, order in enumerate((1, -1)):
        path.write_text(rows_of(range(10, 50)[::order]))
        flags = "--total_machines", 2, "--machine_id", machine
        assert extract("out", *flags) == machine  # the second one fails
        assert extract("apart", *flags, "--overwrite") == 0
        (tmp_path / f"machine_{machine}").mkdir()
        (tmp_path / f"apart/machine_00{machine}").rename(tmp_path / f"machine_{machine}/kept")
    assert "a.jsonl has other content here than where another host" in capsys.readouterr().err
    (tmp_path / "both").mkdir()
    for machine in range(2):
        kept = tmp_path / f"machine_{machine}/kept"
        kept.rename(tmp_path / f"both/machine_00{machine}")
    told = check(tmp_path / "both")
    assert "machine_001: has read a file a.jsonl with other content than others have" in told
