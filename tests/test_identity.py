"""What an output holds already: the same run's, which is continued, or another's, which is refused,
and with --overwrite replaced."""

import shutil

import numpy as np
import pytest
from command_line import main, records_of
from pods import flags_for, rounding_of_run
from small_runs import set_status
from storages import open_storage

from activation_extraction.store.local_files import AtomicFile
from activation_extraction.store.patience import reason_of

REFUSED = {
    "max_seq_length": ["--max_seq_length", "48"],
    "hooks": ["--layers_to_extract", "1", "2"],
    "hooks ": ["--activation_type", "mlp"],
    "keyed_by": ["--hook_names", "blocks.1.hook_resid_post", "blocks.3.hook_resid_post"],
    "dtype": ["--dtype", "bfloat16"],
    "activation_dtype": ["--activation_dtype", "float16"],
    "shard_size_gb": ["--shard_size_gb", "0.001"],
    "compress_shards": ["--no_compress_shards"],
    "shard_format": ["--shard_format", "safetensors"],
    "positions": ["--positions", "last"],
    "drop_token_ids": ["--drop_token_ids", "3"],
    "model_digest": ["--model_path", "{other_model}"],
    "tokenizer_digest": ["--model_path", "{other_tokenizer}"],
    "text_column": ["--text_column", "url"],
}


@pytest.fixture(scope="module")
def started(demo_inputs, tmp_path_factory):
    """An extraction of the demo's inputs, and inputs that differ in one thing each."""
    folder = tmp_path_factory.mktemp("started")
    flags = [
        *("--model_path", str(demo_inputs / "model")),
        *("--dataset_path", str(demo_inputs / "documents.parquet")),
        *("--max_seq_length", "64", "--max_samples", "40", "--shard_size_gb", "0.0005"),
        *("--output_dir", str(folder / "out")),
    ]
    assert main(*flags, "--layers_to_extract", "1", "3") == 0
    for name in ("other_model", "other_tokenizer"):
        shutil.copytree(demo_inputs / "model", folder / name)
    weights = bytearray((folder / "other_model/model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "other_model/model.safetensors").write_bytes(weights)
    (folder / "other_tokenizer/tokenizer_config.json").write_text("{}")
    return folder, flags


@pytest.mark.parametrize("field", REFUSED)
def test_a_changed_request_is_refused_naming_the_field(started, capsys, field):
    folder, flags = started
    before = {p.name: p.read_bytes() for p in (folder / "out").iterdir()}
    changed = [flag.format(**{p.name: p for p in folder.iterdir()}) for flag in REFUSED[field]]
    layers = ["--layers_to_extract", "1", "3"]
    if "--layers_to_extract" in changed or "--hook_names" in changed:
        layers = []
    assert main(*flags, *layers, *changed) == 2
    error = capsys.readouterr().err
    assert f"already holds an extraction that differs in {field.strip()}: " in error
    assert {p.name: p.read_bytes() for p in (folder / "out").iterdir()} == before


@pytest.mark.long
@pytest.mark.parametrize(
    "changes",
    [["--batch_size", "4"], ["--mesh_shape", "2,4"], ["--no_data_parallel"], ["--mesh_type", "1d"]],
    ids=" ".join,
)
def test_what_does_not_change_the_contents_may_change(demo_inputs, started, tmp_path, changes):
    """Batch size and mesh, halfway: same samples, same values within rounding."""
    folder, flags = started
    flags = [*flags[:-1], str(tmp_path / "out"), "--layers_to_extract", "1", "3"]
    shutil.copytree(folder / "out", tmp_path / "out")
    for path in (tmp_path / "out").glob("shard_*"):
        if int(path.name[6:10]) > 2:
            path.unlink()
    set_status(tmp_path / "out", "running")
    assert main(*flags, *changes) == 0
    allowed = rounding_of_run(folder / "out", demo_inputs / "model")
    first, second = records_of(folder / "out"), records_of(tmp_path / "out")
    for key in first:
        for before, after in zip(first[key], second[key], strict=True):
            assert before["sample_idx"] == after["sample_idx"]
            error = np.abs(before["activation"] - after["activation"]).max()
            assert error <= allowed[key]


def test_machines_of_one_output_must_agree(started, tmp_path, capsys):
    _, flags = started
    flags = [*flags[:-1], str(tmp_path / "out"), "--layers_to_extract", "1", "--max_samples", "5"]
    assert main(*flags, "--total_machines", "2") == 0
    second = [*flags, "--total_machines", "2", "--machine_id", "1"]
    assert main(*second, "--dtype", "bfloat16") == 2
    assert (
        "machine_000: already holds an extraction that differs in dtype: float32, now bfloat16"
        in (capsys.readouterr().err)
    )
    assert main(*flags, "--total_machines", "3", "--machine_id", "1") == 2
    assert "differs in total_machines: 2, now 3" in capsys.readouterr().err
    assert main(*second) == 0


@pytest.mark.long
def test_a_commit_says_what_failed_and_what_continues(started, tmp_path, monkeypatch, capsys):
    """A full disk in the middle of a run: status 1, one line; the same command then completes."""
    folder, flags = started
    flags = [*flags[:-1], str(tmp_path / "out"), "--layers_to_extract", "1", "3"]
    original = AtomicFile.finish

    def full(file):
        if file._path.name == "shard_0002.pkl.gz":
            raise OSError(28, "No space left on device")
        original(file)

    with monkeypatch.context() as patch:
        patch.setattr(AtomicFile, "finish", full)
        for more, again in (["--overwrite"], " without --overwrite"), ([], ""):
            assert main(*flags, *more) == 1
            error = capsys.readouterr().err.splitlines()[-1]
            assert "shard_0002.pkl.gz: the disk is full; make room first. Stored in" in error
            assert " 1 shard," in error and error.endswith(f"run the same command again{again}")
    assert main(*flags) == 0 == main("--verify", "--output_dir", tmp_path / "out")
    assert reason_of(OSError(30, ""))[0].startswith("the file system is read-only")


def test_overwrite_spares_what_another_process_writes_and_other_numbers_of_machines(
    demo_inputs, tmp_path, capsys
):
    out = tmp_path / "out"
    flags = flags_for(demo_inputs, out, "--max_samples", 6, "--overwrite")
    with open_storage(out, {0: "hook"}) as storage:
        storage.add_activation(0, np.zeros((2, 3), np.float32), 0, "")
        assert main(*flags) == 1
        assert "another process is writing to it" in capsys.readouterr().err
    assert main(*flags, "--total_machines", 2) == 2
    told = f"{out}: holds an extraction with another number of hosts or machines; delete it"
    assert told in capsys.readouterr().err
    assert (out / "shard_0001.pkl.gz").exists()
