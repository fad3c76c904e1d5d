"""--export: what trainers find in the files is what the run stored, whatever happened meanwhile."""

import json
import os
import tracemalloc
from collections import namedtuple
from contextlib import suppress
from pathlib import Path

import extractions
import ml_dtypes
import numpy as np
import pytest
import torch
from command_line import main
from datasets import Array2D, load_from_disk
from extractions import HIDDEN, HOOKS, activations_of, batches, edit, extract, open_part
from safetensors.torch import load_file
from small_runs import Killed
from test_killed import killed_at

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.inspect import export as exporting
from activation_extraction.inspect import export_tokens, trainer_files
from activation_extraction.inspect.export import export
from activation_extraction.inspect.torch_tensor import write_tensor
from activation_extraction.inspect.trainer_files import SaeLens
from activation_extraction.store.folder import Folder
from activation_extraction.store.local_files import lock_folder

FIRST, SECOND = HOOKS.values()
PER_CHUNK = 7  # tokens; samples have 10
ROW = 3  # tokens of a row for SAELens, so that its chunks have 6
FORMATS = ("memmap", "llamascopium", "sae_lens")
Found = namedtuple("Found", "token_ids starts activations")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(export_tokens, "CHUNK_BYTES", PER_CHUNK * 128)
    monkeypatch.setattr(SaeLens, "TOGETHER", ROW)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run of two hosts, float32; tests must not change it."""
    root = tmp_path_factory.mktemp("run")
    for host in range(2):
        extract(root, 0, host, 1, 2)
    return root


def make(root, dtype):
    """A finished run of one host."""
    identity = {"activation_dtype": dtype}
    with open_part(root, identity=identity) as storage:
        for batch in batches(10):
            values = activations_of(batch).items()
            storage.add_batch(batch, {key: each.astype(dtype) for key, each in values})
    return root


def save(run, form, target, *patterns):
    export(Folder(str(run)), form, str(target), patterns or None)
    return target


def stored(run, form="memmap"):
    """What an export of the run in a format holds, read from the run sample by sample."""
    samples = list(ActivationDataset(str(run)))
    token_ids = np.concatenate([sample.token_ids for sample in samples])
    starts = np.cumsum([0, *(len(sample.token_ids) for sample in samples)])
    values = {hook: np.concatenate([s[hook] for s in samples]) for hook in (FIRST, SECOND)}
    if form == "sae_lens":  # whole rows, and no bfloat16
        rows = slice(len(token_ids) // ROW * ROW)
        token_ids = token_ids[rows]
        values = {hook: as_arrow_can(each[rows]) for hook, each in values.items()}
    return Found(token_ids, starts, values)


def as_arrow_can(values):
    return values.astype(np.float32) if values.dtype == ml_dtypes.bfloat16 else values


def read_memmap(target):
    """As the cache.py of jkminder's dictionary_learning reads it."""

    def load(path):
        meta = json.loads(path.with_suffix(".meta").read_text())
        dtype = getattr(torch, meta["dtype"].removeprefix("torch."))
        number_type = {"torch.bfloat16": np.int16}.get(meta["dtype"], meta["dtype"][6:])
        values = np.memmap(path, number_type, mode="r", shape=tuple(meta["shape"]))
        return torch.tensor(values).view(dtype)

    found = {}
    for hook in (FIRST, SECOND):
        config = json.loads((target / hook / "config.json").read_text())
        shards = [load(target / hook / f"shard_{i}.memmap") for i in range(config["shard_count"])]
        found[hook] = torch.cat(shards)
        assert found[hook].shape == (config["total_size"], config["d_model"])
        assert config["store_tokens"] and config["store_sequence_ranges"]
    tokens = torch.load(target / "tokens.pt", weights_only=True)
    return Found(tokens, torch.load(target / "sequence_ranges.pt", weights_only=True), found)


def read_llamascopium(target):
    """As Llamascopium's CachedActivationLoader reads it, all hooks with the same tokens."""
    found, tokens = {}, []
    for hook in (FIRST, SECOND):
        chunks = [load_file(path) for path in sorted((target / hook).glob("chunk-*.safetensors"))]
        for chunk in chunks:
            assert chunk["mask"].all() and chunk["attention_mask"].all()
            assert chunk["mask"].shape == chunk["attention_mask"].shape == chunk["tokens"].shape
        found[hook] = torch.cat([chunk["activation"] for chunk in chunks])
        tokens.append(torch.cat([chunk["tokens"] for chunk in chunks]))
    assert torch.equal(*tokens)
    return Found(tokens[0], None, found)


def read_sae_lens(target):
    """Reads an export as SAELens's ActivationsStore does, one hook after the other."""
    found, token_ids = {}, []
    for hook in (FIRST, SECOND):
        rows = load_from_disk(str(target / hook))
        assert rows.column_names == [hook, "token_ids"]
        types = rows.features[hook]
        assert isinstance(types, Array2D) and types.shape == (ROW, HIDDEN)
        found[hook] = torch.tensor(read_column(rows, hook, types.dtype)).reshape(-1, HIDDEN)
        token_ids.append(torch.tensor(read_column(rows, "token_ids", "int64")).reshape(-1))
    assert torch.equal(*token_ids)
    return Found(token_ids[0], None, found)


def read_column(rows, name, dtype):
    return rows.with_format("numpy", columns=[name], dtype=np.dtype(dtype))[:][name]


READ = {"memmap": read_memmap, "llamascopium": read_llamascopium, "sae_lens": read_sae_lens}


def equal(found, expected):
    assert found.token_ids.dtype == torch.int64
    np.testing.assert_array_equal(found.token_ids, expected.token_ids)
    if found.starts is not None:
        np.testing.assert_array_equal(found.starts, expected.starts)
    for hook, values in expected.activations.items():
        assert str(found.activations[hook].dtype) == f"torch.{values.dtype}"
        bits = np.int32 if values.dtype == np.float32 else np.int16
        ours = found.activations[hook].view(getattr(torch, bits.__name__)).numpy()
        np.testing.assert_array_equal(ours, values.view(bits))


def files(target):
    """Every file and its bytes."""
    return {str(p.relative_to(target)): p.read_bytes() for p in target.rglob("*") if p.is_file()}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "float16", ml_dtypes.bfloat16])
def test_trainers_find_what_the_run_stored(form, dtype, tmp_path):
    root = make(tmp_path / "run", np.dtype(dtype).name)
    equal(READ[form](save(root, form, tmp_path / "export")), stored(root, form))


@pytest.mark.parametrize("form", FORMATS)
def test_all_hosts_are_exported_and_nothing_else_is_left(form, run, tmp_path):
    target = save(run, form, tmp_path / "deep/export")
    equal(READ[form](target), stored(run, form))
    assert not [name for name in files(target) if Path(name).name.startswith(".")]
    lengths = {len(data) for name, data in files(target).items() if "/shard_0." in name}
    assert form != "memmap" or PER_CHUNK * 16 * 4 in lengths


def test_hooks_are_chosen_by_glob(run, tmp_path):
    target = save(run, "llamascopium", tmp_path / "export", "blocks.5.*")
    assert {Path(name).parent.name for name in files(target)} == {"", SECOND}


@pytest.mark.parametrize("form", FORMATS)
def test_an_export_continues_after_it_was_killed_again_and_again(form, run, tmp_path, monkeypatch):
    """The files are then those of an export that never stopped."""
    expected = files(save(run, form, tmp_path / "expected"))
    target, finished, attempts = tmp_path / "export", False, 0
    while not finished:
        attempts += 1
        with killed_at(attempts, target, monkeypatch), suppress(Killed):
            save(run, form, target)
            finished = True
    assert attempts > 10
    assert files(target) == expected


@pytest.mark.parametrize("form", FORMATS)
def test_a_finished_export_is_left_alone(form, run, tmp_path, capsys):
    target = save(run, form, tmp_path / "export")
    first = capsys.readouterr().out
    times = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    save(run, form, target)
    count = 198 if form == "sae_lens" else 200
    assert capsys.readouterr().out == first and first.startswith(f"exported: {count} tokens, 2")
    left_out = "left out: the last 2 tokens of the run, too few for a row of 3\n"
    assert (left_out in first) == (form == "sae_lens")
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == times


def test_a_change_of_the_data_is_noticed(tmp_path):
    """The run's own statistics tell what should have been exported."""
    root = make(tmp_path / "run", "float32")
    edit(root / "shard_0002.json", lambda content: content["hooks"][1].update(max_norm=99.0))
    with pytest.raises(RunError, match=f"{SECOND}: the max_norm of what was exported is .* 99.0$"):
        save(root, "memmap", tmp_path / "export")


def test_a_file_that_the_disk_changed_is_noticed(run, tmp_path, monkeypatch):
    write = trainer_files.write_atomically

    def write_and_damage(path, content):
        written = write(path, content)
        if path.name == "shard_3.memmap":
            path.write_bytes(path.read_bytes()[:-1] + b"\0")
        return written

    monkeypatch.setattr(trainer_files, "write_atomically", write_and_damage)
    with pytest.raises(RunError, match="shard_3.memmap: the disk does not hold what was written"):
        save(run, "memmap", tmp_path / "export")


def test_a_full_disk_is_a_failure_that_continues(run, tmp_path, monkeypatch):
    def full(path, content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(trainer_files, "write_atomically", full)
    with pytest.raises(RunError, match="No space left on device") as caught:
        save(run, "memmap", tmp_path / "export")
    assert caught.value.remedy == "to continue, run the same command again"


def other_files(run, target):
    target.mkdir()
    (target / "notes.txt").write_text("mine")


def other_format(run, target):
    save(run, "llamascopium", target)


def other_hooks(run, target):
    save(run, "memmap", target, FIRST)


def other_run(run, target):
    save(make(target.parent / "other", "float32"), "memmap", target)


def lost_chunk(run, target):
    save(run, "memmap", target)
    (target / FIRST / "shard_4.memmap").unlink()


def damaged_state(run, target):
    save(run, "memmap", target)
    (target / "export.json").write_text("{}")


def no_folder(run, target):
    target.write_text("")


@pytest.mark.parametrize(
    "prepare, message",
    [
        (other_files, "export: holds other files; expected an empty folder$"),
        (other_format, "export: holds another export, with form llamascopium, not memmap$"),
        (other_hooks, "export: holds another export, with hooks .*"),
        (other_run, "export: holds another export, with other shards$"),
        (lost_chunk, "shard_4.memmap: is missing or has another size; delete .* export again$"),
        (damaged_state, "export.json: is damaged; delete .* and export again$"),
        (no_folder, "export: cannot be written to: File exists$"),
    ],
)
def test_a_target_that_holds_anything_else_is_refused(prepare, message, run, tmp_path):
    target = tmp_path / "export"
    prepare(run, target)
    before = files(target)
    with pytest.raises(InputError, match=message):
        save(run, "memmap", target)
    assert files(target) == before


def test_a_target_that_another_process_writes_to_is_refused(run, tmp_path):
    target = tmp_path / "export"
    target.mkdir()
    lock = lock_folder(target)
    with pytest.raises(RunError, match="^--export_dir .*: another process is writing to it$"):
        save(run, "memmap", target)
    os.close(lock)


def test_a_disk_with_too_little_room_is_refused(run, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")(200 * (128 + 32) - 1)
    monkeypatch.setattr(exporting.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match="has 0.0 GB free, needs 0.0 GB$"):
        save(run, "memmap", tmp_path / "export")


def test_memory_is_bounded_by_the_chunks(tmp_path, monkeypatch):
    """Four times as many tokens need no more memory.

    Activations are wide here, so that little else counts.
    """
    monkeypatch.setattr(extractions, "HIDDEN", 10 * extractions.HIDDEN)
    monkeypatch.setattr(export_tokens, "CHUNK_BYTES", 640_000)
    peaks = []
    for count in (200, 800):
        root = tmp_path / f"run{count}"
        with open_part(root, shard_size_gb=64e-5) as storage:
            for batch in batches(count):
                storage.add_batch(batch, activations_of(batch))
        tracemalloc.start()
        save(root, "memmap", tmp_path / f"export{count}")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


@pytest.mark.parametrize("dtype", ["int64", "float32"])
@pytest.mark.parametrize("shape", [(0,), (1,), (2003,), (), (2, 3, 5)])
def test_torch_reads_a_tensor_that_was_written_without_it(shape, dtype, tmp_path):
    path = tmp_path / "tensor.pt"
    array = np.arange(-3, np.prod(shape, dtype=int) - 3).astype(dtype)
    with open(path, "wb") as file:
        write_tensor(file, dtype, shape, np.array_split(array, 3))
    for mmap in (False, True):
        found = torch.load(path, weights_only=True, mmap=mmap)
        assert found.dtype == getattr(torch, dtype) and found.is_contiguous()
        np.testing.assert_array_equal(found, array.reshape(shape))


def test_the_cache_of_dictionary_learning_has_statistics_of_every_dimension(run, tmp_path):
    """What its ActivationCache reads as `mean`, `std` and `running_stats`."""
    target, values = save(run, "memmap", tmp_path / "export"), stored(run).activations
    for hook in (FIRST, SECOND):
        found = {
            name: torch.load(target / hook / f"{name}.pt", weights_only=True)
            for name in ("mean", "std", "M2", "count")
        }
        assert found["count"].shape == () and found["count"].dtype == torch.int64
        assert found["count"] == len(values[hook]) == 200
        expected = values[hook].astype(np.float64)
        for name, each in {
            "mean": expected.mean(0),
            "std": expected.std(0, ddof=1),
            "M2": np.square(expected - expected.mean(0)).sum(0),
        }.items():
            assert found[name].dtype == torch.float32 and found[name].shape == (HIDDEN,)
            np.testing.assert_allclose(found[name].numpy(), each, rtol=1e-5, atol=1e-6)


def test_rows_of_sae_lens_need_enough_tokens(run, tmp_path, monkeypatch):
    monkeypatch.setattr(SaeLens, "TOGETHER", 201)
    with pytest.raises(InputError, match=f"{run} holds 200 tokens; expected at least 201$"):
        save(run, "sae_lens", tmp_path / "export")
    monkeypatch.setattr(SaeLens, "TOGETHER", 200)
    save(run, "sae_lens", tmp_path / "export")
    assert len(load_from_disk(str(tmp_path / "export" / FIRST))) == 1


def test_an_export_for_sae_lens_needs_pyarrow(run, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "find_spec", {"pyarrow": None}.get)
    with pytest.raises(InputError, match="^--export sae_lens: needs pyarrow; run: pip install"):
        save(run, "sae_lens", tmp_path / "export")


def started(root):
    make(root, "float32")
    edit(root / "metadata.json", lambda content: content.update(status="interrupted"))


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--export", "memmap"], "--export: needs --export_dir"),
        (["--export_dir", "x"], "--export_dir: needs --export"),
        (["--export", "csv", "--export_dir", "x"], "invalid choice: 'csv'"),
        (["--export", "memmap", "--export_dir", "gs://b/x"], "gs://b/x: is a URL"),
        (
            ["--export", "memmap", "--export_dir", "x", "--hook_names", "blocks.4.*"],
            f"--hook_names blocks.4.*: no such hook; the run has {FIRST}, {SECOND}",
        ),
        (
            ["--export", "memmap", "--export_dir", "x", "--status"],
            "--status and --export cannot be used together",
        ),
        (
            ["--export", "memmap", "--export_dir", "x", "--output_dir", "none"],
            "none: holds no extraction",
        ),
        (
            ["--export", "memmap", "--export_dir", "x", "--output_dir", "started"],
            "started is interrupted; expected a finished run",
        ),
    ],
)
def test_bad_requests_are_refused_in_one_line(flags, message, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "started" in flags:
        started(tmp_path / "started")
    output = [] if "--output_dir" in flags else ["--output_dir", str(run)]
    assert main(*flags, *output) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_the_command_line_exports_and_says_how_to_read(run, tmp_path, capsys):
    flags = ["--output_dir", str(run), "--export", "memmap", "--export_dir", str(tmp_path / "x")]
    assert main(*flags) == 0
    equal(read_memmap(tmp_path / "x"), stored(run))
    assert f"ActivationCache('{tmp_path}/x', '{FIRST}')" in capsys.readouterr().out
