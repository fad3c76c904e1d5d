"""What a store answers is not always what it holds, and a folder is not always what it seems."""

import os

import pytest
from command_line import main

from activation_extraction.common.errors import InputError, StorageError
from activation_extraction.store.folder import Folder


def test_a_json_that_is_stored_damaged_is_told_and_nothing_is_to_be_deleted(run, bucket, tmp_path):
    folder = Folder("gs://bucket/run/machine_000", patience=20)
    run(tmp_path / "a", interrupt_after=7, max_samples=12, remote=folder)
    bucket.put("run/machine_000/metadata.json", b"{}")
    with pytest.raises(InputError, match="--repair repairs it") as raised:
        run(tmp_path / "b", max_samples=12, remote=folder)
    assert "--overwrite" not in str(raised.value)


def test_metrics_are_not_written_through_a_link(run, tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    with pytest.raises(StorageError, match=r"metrics.jsonl: is a symbolic link"):
        place = run(tmp_path / "other", interrupt_after=3, max_samples=12)
        os.symlink(precious, tmp_path / "other/metrics.jsonl")
        place.record({"line": 1})
    with pytest.raises(InputError, match=r"metrics.jsonl is a symbolic link"):
        run(tmp_path / "other", max_samples=12)
    assert precious.read_text() == "mine"


@pytest.mark.parametrize("name", ["demo_inputs", "demo_inputs/model"])
def test_the_demo_writes_into_no_linked_folder(tmp_path, name, capsys):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "out" / name
    link.parent.mkdir(parents=True)
    os.symlink(tmp_path / "elsewhere", link)
    assert main("--demo", "--output_dir", tmp_path / "out") == 2
    assert "is a symbolic link" in capsys.readouterr().err
    assert not list((tmp_path / "elsewhere").iterdir())
