"""--export: what a trainer finds in the files is what the run stored, whatever happened meanwhile.

The form here is sae_lens; test_draft_files.py and test_codes.py have the others.
"""

import tracemalloc
from types import SimpleNamespace

import extractions
import fsspec
import numpy as np
import pytest
import torch
from command_line import main, start
from datasets import load_from_disk
from extractions import HIDDEN, HOOKS, activations_of, batches, extract, open_part

from activation_extraction import ActivationDataset
from activation_extraction.common.choices import EXPORTS
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.inspect import export as exporting
from activation_extraction.inspect.export import export, export_format_of
from activation_extraction.inspect.sae_lens_files import SaeLensFormat
from activation_extraction.store.folder import Folder

FIRST, SECOND = HOOKS.values()
PER_CHUNK = 7  # tokens; samples have 10
ROW = 3  # tokens of a row for SAELens, so that its chunks have 6


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(exporting, "CHUNK_BYTES", PER_CHUNK * 128)
    monkeypatch.setattr(SaeLensFormat, "tokens_per_row", ROW)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def run(request, tmp_path_factory):
    """A finished run of two hosts; tests must not change it."""
    root, dtype = tmp_path_factory.mktemp("run"), request.param
    for host in range(2):
        with open_part(root, 0, host, 1, 2, identity={"activation_dtype": dtype}) as storage:
            for batch in batches(10, 0, host, 1, 2):
                values = activations_of(batch).items()
                storage.add_batch(batch, {key: each.astype(dtype) for key, each in values})
    return root


one_run = pytest.mark.parametrize("run", ["float32"], indirect=True)


def test_every_choice_of_the_flag_has_a_format():
    assert [export_format_of(name).flag_value for name in EXPORTS] == list(EXPORTS)


def save(run, target, *patterns):
    export(Folder(str(run)), SaeLensFormat(), str(target), patterns or None)
    return target


def read_sae_lens(target, hook):
    """Reads an export as SAELens's ActivationsStore does."""
    rows = load_from_disk(str(target / hook))
    assert rows.column_names == [hook, "token_ids"] and rows.features[hook].shape == (ROW, HIDDEN)
    dtypes = {hook: np.dtype(rows.features[hook].dtype), "token_ids": np.int64}
    found = {
        name: torch.tensor(rows.with_format("numpy", columns=[name], dtype=dtype)[:][name])
        for name, dtype in dtypes.items()
    }
    return found[hook].reshape(-1, HIDDEN), found["token_ids"].reshape(-1)


def check(run, target, hooks=(FIRST, SECOND)):
    """Compares what the trainer reads with what the run holds. There is no bfloat16, and the last
    two tokens do not fill a row."""
    samples = list(ActivationDataset(run))
    for hook in hooks:
        found, tokens = read_sae_lens(target, hook)
        values = np.concatenate([sample[hook] for sample in samples])[:198].astype(np.float32)
        assert (tokens.dtype, found.dtype) == (torch.int64, torch.float32)
        expected = np.concatenate([sample.token_ids for sample in samples])[:198]
        np.testing.assert_array_equal(tokens, expected)
        assert found.numpy().tobytes() == values.tobytes()


def test_the_trainer_finds_what_all_hosts_stored(run, tmp_path, capsys):
    target = tmp_path / "deep/export"
    flags = ["--output_dir", run, "--export", "sae_lens", "--export_dir", target]
    assert main(*flags) == 0
    out = capsys.readouterr().out
    check(run, target)
    assert sorted(path.name for path in target.iterdir()) == [FIRST, SECOND]
    assert [path.name for path in target.parent.iterdir()] == ["export"]
    assert out.startswith("exported: 198 tokens, 2 hooks, ")
    assert "left out: 2 tokens, too few for a row of 3\n" in out
    assert f"hook_name='{FIRST}', context_size=3, use_cached_activations=True" in out
    assert f"cached_activations_path='{target}/{FIRST}')" in out


@one_run
def test_one_hook_is_exported_from_a_bucket(run, tmp_path):
    url = f"memory:/{tmp_path}/bucket"
    fsspec.filesystem("memory").put(f"{run}/", url, recursive=True)
    target = save(url, tmp_path / "export", "blocks.5.*")
    assert [path.name for path in target.iterdir()] == [SECOND]
    check(run, target, [SECOND])


@one_run
def test_ctrl_c_leaves_nothing_of_an_export(run, tmp_path):
    """It comes once the folder is made, as the library that writes the files is imported."""
    (tmp_path / "modules").mkdir()
    interrupt = """
import signal
from pathlib import Path
if Path("out.unfinished").exists():
    signal.raise_signal(signal.SIGINT)
"""
    (tmp_path / "modules/datasets.py").write_text(interrupt)
    flags = "--export", "sae_lens", "--output_dir", run, "--export_dir", "out"
    process = start(*flags, environment={"PYTHONPATH": str(tmp_path / "modules")}, cwd=tmp_path)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out, err) == (130, "", "interrupted\n")
    assert [path.name for path in tmp_path.iterdir()] == ["modules"]


@one_run
def test_an_export_that_fails_leaves_nothing(run, tmp_path, monkeypatch):
    """Until all is written, no folder has its name."""
    chunks = exporting._chunks

    def failing(*arguments):
        yield next(chunks(*arguments))
        assert not (tmp_path / "export").exists()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(exporting, "_chunks", failing)
    with pytest.raises(RunError, match="No space left"):
        save(run, tmp_path / "export")
    assert not list(tmp_path.iterdir())


@one_run
@pytest.mark.parametrize("there, told", [("export", "a new folder"), ("export.unfinished", "kill")])
def test_a_target_that_is_there_is_left_alone(there, told, run, tmp_path):
    (tmp_path / there).mkdir()
    (tmp_path / there / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=f"^--export_dir {tmp_path}/export: .*{told}"):
        save(run, f"{tmp_path}/export/")
    assert [*tmp_path.rglob("*")] == [tmp_path / there, tmp_path / there / "notes.txt"]
    assert (tmp_path / there / "notes.txt").read_text() == "mine"


@one_run
def test_too_little_room_and_a_missing_library_are_refused(run, tmp_path, monkeypatch):
    usage = SimpleNamespace(free=200 * (128 + 32) - 1)
    monkeypatch.setattr(exporting.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match=r"has 0.000 GB free, needs 0.000 GB$"):
        save(run, tmp_path / "export")
    monkeypatch.setattr(exporting, "find_spec", {"datasets": None}.get)
    with pytest.raises(
        InputError, match="^--export sae_lens: needs datasets; run: .* -m pip install"
    ):
        save(run, tmp_path / "export")
    assert not [*tmp_path.iterdir()]


def test_memory_is_bounded_by_the_chunks(tmp_path, monkeypatch):
    """Four times as many tokens need no more memory. Activations are wide here, so that little else
    counts."""
    monkeypatch.setattr(extractions, "HIDDEN", 10 * extractions.HIDDEN)
    monkeypatch.setattr(exporting, "CHUNK_BYTES", 640_000)
    peaks = []
    for count in (200, 800):
        root = tmp_path / f"run{count}"
        extract(root, count=count, shard_size_gb=64e-5)
        tracemalloc.start()
        save(root, tmp_path / f"export{count}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


EXPORT = "--export sae_lens --export_dir"
REFUSED = [
    ("--export sae_lens", "--export: needs --export_dir"),
    (f"{EXPORT} gs://b/x", "gs://b/x: is a URL"),
    (f"{EXPORT} x --hook_names blocks.4.*", f"has no hook 'blocks.4.*'; it has {FIRST}, {SECOND}"),
    (f"{EXPORT} x --output_dir started", "started is interrupted; expected a finished run"),
]


@one_run
@pytest.mark.parametrize("typed,why", REFUSED)
def test_bad_requests_are_refused(typed, why, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "started" in typed:
        with open_part(tmp_path / "started") as storage:
            storage.finalize(complete=False)
    output = [] if "--output_dir" in typed else ["--output_dir", str(run)]
    assert main(*typed.split(), *output) == 2
    assert why in capsys.readouterr().err
    assert not (tmp_path / "x").exists()
