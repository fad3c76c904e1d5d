"""--export: what trainers find in the files is what the run stored, whatever happened meanwhile."""

import json
import tracemalloc
from collections import namedtuple
from pathlib import Path

import extractions
import fsspec
import ml_dtypes
import numpy as np
import pytest
import torch
from command_line import main
from datasets import Array2D, load_from_disk
from extractions import HIDDEN, HOOKS, activations_of, batches, extract, open_part
from safetensors.torch import load_file

from activation_extraction import ActivationStorage
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.inspect import export as exporting
from activation_extraction.inspect.export import export
from activation_extraction.inspect.trainer_files import EXPORT_FORMS
from activation_extraction.store.folder import Folder

FIRST, SECOND = HOOKS.values()
PER_CHUNK = 7  # tokens; samples have 10
ROW = 3  # tokens of a row for SAELens, so that its chunks have 6
FORMATS = ("memmap", "llamascopium", "sae_lens")
Found = namedtuple("Found", "token_ids starts activations")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(exporting, "CHUNK_BYTES", PER_CHUNK * 128)
    monkeypatch.setitem(EXPORT_FORMS, "sae_lens", EXPORT_FORMS["sae_lens"]._replace(row=ROW))


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
def test_all_hosts_are_exported_and_nothing_else_is_left(form, run, tmp_path, capsys):
    target = save(run, form, tmp_path / "deep/export")
    equal(READ[form](target), stored(run, form))
    beside = ["sequence_ranges.pt", "tokens.pt"] if form == "memmap" else []
    assert sorted(path.name for path in target.iterdir()) == [FIRST, SECOND, *beside]
    assert [path.name for path in target.parent.iterdir()] == ["export"]
    lengths = {len(data) for name, data in files(target).items() if "/shard_0." in name}
    assert form != "memmap" or PER_CHUNK * 16 * 4 in lengths
    out = capsys.readouterr().out
    assert out.startswith(f"exported: {198 if form == 'sae_lens' else 200} tokens, 2 hooks, ")
    left_out = "left out: the last 2 tokens of the run, too few for a row of 3\n"
    assert (left_out in out) == (form == "sae_lens")


def test_hooks_are_chosen_by_glob(run, tmp_path):
    target = save(run, "llamascopium", tmp_path / "export", "blocks.5.*")
    assert {Path(name).parent.name for name in files(target)} == {SECOND}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_export_that_fails_leaves_nothing(form, error, run, tmp_path, monkeypatch):
    """Until all is written, no folder has its name."""
    chunks = exporting._chunks

    def failing(*arguments):
        yield next(chunks(*arguments))
        assert not (tmp_path / "export").exists()
        raise error

    monkeypatch.setattr(exporting, "_chunks", failing)
    kind = RunError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(kind) as caught:
        save(run, form, tmp_path / "export")
    assert kind is KeyboardInterrupt or "No space left on device" in str(caught.value)
    assert not list(tmp_path.iterdir())


def other_files(target):
    target.mkdir()
    (target / "notes.txt").write_text("mine")


EXISTS = ": exists; expected the name of a"
TARGETS = {  # what is there already -> why it is refused
    "files": (other_files, EXISTS),
    "a file": (Path.touch, EXISTS),
    "a link": (lambda target: target.symlink_to("nowhere"), EXISTS),
    "an empty folder": (Path.mkdir, EXISTS),
    "a file above": (
        lambda target: target.parent.touch(),
        ": cannot be written to: Not a directory",
    ),
    "an export that was killed": (
        lambda target: other_files(target.with_suffix(".unfinished")),
        ".unfinished exists, so another export is running or was killed; delete it",
    ),
}


@pytest.mark.parametrize("case", TARGETS)
def test_a_target_that_cannot_be_made_is_refused(case, run, tmp_path):
    """An export leaves alone what is in the folder."""
    prepare, why = TARGETS[case]
    target = (tmp_path / "file" if case == "a file above" else tmp_path) / "export"
    prepare(target)
    before = files(tmp_path)
    with pytest.raises(InputError, match=f"^--export_dir {target}.*{why}"):
        save(run, "memmap", f"{target}/")
    assert files(tmp_path) == before


def test_a_disk_with_too_little_room_is_refused(run, tmp_path, monkeypatch):
    usage = namedtuple("usage", "free")(200 * (128 + 32) - 1)
    monkeypatch.setattr(exporting.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(InputError, match="has 0.0 GB free, needs 0.0 GB$"):
        save(run, "memmap", tmp_path / "export")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("form,row", [("memmap", 1), ("sae_lens", 20)])
def test_a_run_with_too_few_tokens_is_refused(form, row, tmp_path, monkeypatch):
    for tokens in (row - 1, row):
        with ActivationStorage(str(tmp_path / f"{tokens}"), {3: FIRST}) as storage:
            values, ids = np.zeros((tokens, 2), np.float32), np.zeros(tokens, np.int32)
            storage.add_activation(3, values, 0, "", ids)
    monkeypatch.setitem(EXPORT_FORMS, form, EXPORT_FORMS[form]._replace(row=row))
    message = f"{tmp_path}/{row - 1} holds {row - 1} tokens; expected at least {row}$"
    with pytest.raises(InputError, match=message):
        save(tmp_path / f"{row - 1}", form, tmp_path / "export")
    save(tmp_path / f"{row}", form, tmp_path / "export")


def test_memory_is_bounded_by_the_chunks(tmp_path, monkeypatch):
    """Four times as many tokens need no more memory.

    Activations are wide here, so that little else counts.
    """
    monkeypatch.setattr(extractions, "HIDDEN", 10 * extractions.HIDDEN)
    monkeypatch.setattr(exporting, "CHUNK_BYTES", 640_000)
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


@pytest.mark.parametrize(
    "form,library", [("sae_lens", "datasets"), ("memmap", "torch"), ("llamascopium", "safetensors")]
)
def test_a_form_needs_its_library(form, library, run, tmp_path, monkeypatch):
    monkeypatch.setattr(exporting, "find_spec", {library: None}.get)
    message = f"^--export {form}: needs {library}; run: pip install {library}$"
    with pytest.raises(InputError, match=message):
        save(run, form, tmp_path / "export")


def test_a_run_is_exported_from_a_bucket(run, tmp_path):
    url = f"memory:/{tmp_path}/bucket"
    fsspec.filesystem("memory").put(f"{run}/", url, recursive=True)
    equal(read_llamascopium(save(url, "llamascopium", tmp_path / "export")), stored(run))


EXPORT = "--export memmap --export_dir"
REFUSED = [
    ("--export memmap", "--export: needs --export_dir"),
    ("--export_dir x", "--export_dir: needs --export"),
    ("--export safetensors --export_dir x", "invalid choice: 'safetensors'"),
    (f"{EXPORT} gs://b/x", "gs://b/x: is a URL"),
    (
        f"{EXPORT} x --hook_names blocks.4.*",
        f"--hook_names blocks.4.*: no such hook; the run has {FIRST}, {SECOND}",
    ),
    (f"{EXPORT} x --status", "--status and --export cannot be used together"),
    (f"{EXPORT} x --output_dir none", "none: holds no extraction"),
    (f"{EXPORT} x --output_dir started", "started is interrupted; expected a finished run"),
]


@pytest.mark.parametrize("typed,why", REFUSED)
def test_bad_requests_are_refused_in_one_line(typed, why, run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if "started" in typed:
        with open_part(tmp_path / "started") as storage:
            storage.finalize(complete=False)
    output = [] if "--output_dir" in typed else ["--output_dir", str(run)]
    assert main(*typed.split(), *output) == 2
    error = capsys.readouterr().err
    assert why in error and error.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_the_command_line_exports_and_says_how_to_read(run, tmp_path, capsys):
    flags = ["--output_dir", str(run), "--export", "memmap", "--export_dir", str(tmp_path / "x")]
    assert main(*flags) == 0
    equal(read_memmap(tmp_path / "x"), stored(run))
    assert f"ActivationCache('{tmp_path}/x', '{FIRST}')" in capsys.readouterr().out
