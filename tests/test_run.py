"""The run as a whole, in this process: one program serves all, and stores the model's values; and
what one says that fails: what has to change, and the traceback of what nobody expected."""

import gzip
import json
import pickle
import re
import shutil
import time

import jax
import numpy as np
import pytest
from command_line import main
from conftest import make_reference
from pods import flags_for
from safetensors.numpy import load_file, save_file
from small_runs import set_status
from test_model import TOLERANCE, error_of

import extract_activations
from activation_extraction import ActivationDataset
from activation_extraction.cli.console import Progress
from activation_extraction.common.errors import RunError, StorageError
from activation_extraction.model.devices import device_errors
from activation_extraction.run import demo
from activation_extraction.store.formats import ShardFormat
from activation_extraction.store.storage import ActivationStorage
from qwen2_jax_with_hooks import HookedQwen2


def test_the_model_of_a_run_is_found_from_any_folder(demo_inputs, tmp_path, monkeypatch):
    """However the folder was given: its path is recorded as an absolute one."""
    monkeypatch.setenv("HOME", str(demo_inputs))
    monkeypatch.chdir(demo_inputs)
    for number, given in enumerate(("model", "~/model")):
        out = tmp_path / str(number)
        layers = ["--layers_to_extract", "0", "--max_seq_length", "32", "--max_samples", "2"]
        data = ["--dataset_path", "documents.parquet"]
        assert main("--model_path", given, *data, *layers, "--output_dir", out) == 0
        assert ActivationDataset(out).tokenizer_path == str(demo_inputs / "model")


@pytest.mark.long
def test_one_program_computes_a_batch_while_the_one_before_is_stored(
    inputs, tmp_path, monkeypatch, capsys, caplog
):
    """JAX says what it compiles. Where devices take no new step at once, waiting for that is told
    as computing."""
    events = []
    compile_step, add_batch = extract_activations.compile_step, ActivationStorage.add_batch

    def compile_and_watch(forward):
        step = compile_step(forward)
        return lambda *given: (events.append("computes"), time.sleep(0.01), step(*given))[2]

    def store(*arguments):
        events.append("stored")
        return add_batch(*arguments)

    monkeypatch.setattr(extract_activations, "compile_step", compile_and_watch)
    monkeypatch.setattr(ActivationStorage, "add_batch", store)
    flags = ["--max_seq_length", 64, "--batch_size", 8, "--max_samples", 100]
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        assert main(*inputs, *flags, "--output_dir", tmp_path) == 0
    messages = [record.getMessage() for record in caplog.records]
    assert len([m for m in messages if "Finished XLA compilation of jit(apply)" in m]) == 1
    batches = len(events) // 2
    assert batches >= 5
    assert events == ["computes", *["computes", "stored"] * (batches - 1), "stored"]
    said = re.search(r"waiting for data .*, compute ([\d.]+)", capsys.readouterr().out)
    assert float(said[1]) >= 0.05


@pytest.mark.long
def test_stored_records_are_hugging_face_activations(texts, tmp_path):
    """The whole way: text, tokens, packing, model, shard; the last layer included."""
    reference = make_reference(tmp_path / "model", num_key_value_heads=2, vocab_size=300)
    demo.write_tokenizer(reference.folder, [])
    rows = [{"text": f"Sample {n}, " * (n % 9 + 1), "id": n} for n in range(40)]
    depth = reference.config.num_hidden_layers
    out = tmp_path / "out"
    flags = ["--model_path", reference.folder, "--dataset_path", texts(rows)]
    flags += ["--layers_to_extract", 0, depth - 1, "--max_seq_length", 64]
    assert main(*flags, "--output_dir", out) == 0
    shard = pickle.load(gzip.open(out / "shard_0001.pkl.gz"))
    for layer in (0, depth - 1):
        assert [record["doc_id"] for record in shard[layer]] == list(range(40))
        for record in shard[layer]:
            expected = reference.hooked(record["token_ids"][None])[
                f"blocks.{layer}.hook_resid_post"
            ][0]
            assert error_of(record["activation"], expected) < TOLERANCE
            assert record["text_preview"] == rows[record["doc_id"]]["text"][:200]


def test_a_run_that_continues_says_so_and_from_where(texts, demo_inputs, tmp_path, capsys):
    """The totals count all that is stored."""
    out, path = tmp_path / "out", texts([{"text": f"number {n} " * 9} for n in range(60)])
    flags = flags_for(demo_inputs, out, "--dataset_path", path, "--log_every", 1)
    flags += ["--shard_size_gb", 5e-4, "--max_samples", 60]

    def printed():
        assert main(*flags) == 0
        return "\n".join(capsys.readouterr())

    def killed_after(shards):
        for shard in out.glob("shard_*"):
            if int(shard.name[6:10]) > shards:
                shard.unlink()
        set_status(out, "running")

    assert "continuing" not in printed()
    whole = json.loads((out / "metadata.json").read_text())
    killed_after(2)
    commits = [json.loads((out / f"shard_000{number}.json").read_text()) for number in (1, 2)]
    samples = sum(commit["samples"]["count"] for commit in commits)
    tokens = sum(commit["tokens"] for commit in commits)
    again = printed()
    assert f"continuing {out} after {samples} samples and {tokens:,} tokens in 2 shards\n" in again
    assert f"60 of 60 samples, {whole['tokens']:,} tokens, " in again  # progress
    assert f"done: 60 samples, {whole['tokens']:,} tokens, " in again
    killed_after(0)
    assert "continuing" not in printed()
    again = printed()
    assert "everything has been computed already" in again and "continuing" not in again


DEFECTS = (Progress, "advance"), (HookedQwen2, "flops"), (Progress, "close"), (ShardFormat, "pack")


@pytest.fixture
def failing(demo_inputs, tmp_path, capsys):
    """Runs with more flags, has to fail, and returns what was printed to stderr."""

    def run(*more):
        flags = flags_for(demo_inputs, tmp_path / "out", "--max_samples", 6, *more)
        assert main(*flags) == 1
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_has_its_traceback_and_is_no_failure_of_the_storage(failing, monkeypatch, defect):
    monkeypatch.setattr(*defect, lambda *_: 1 // 0)
    printed = failing("--mesh_type", "2d")  # `auto` needs the operations before the run begins
    assert "in <lambda>" in printed and "StorageError" not in printed
    last = printed.splitlines()[-1]
    assert last.startswith("error: unexpected ZeroDivisionError: ") and ". Stored in " in last
    assert last.endswith("; this is a bug in this program; its traceback is above")


def test_weights_of_nan_are_to_be_changed(failing, demo_inputs, tmp_path):
    shutil.copytree(demo_inputs / "model", tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    weights = load_file(path)
    weights["model.layers.2.input_layernorm.weight"][:] = np.nan
    save_file(weights, path, metadata={"format": "pt"})
    last = failing("--model_path", tmp_path / "model").splitlines()[-1]
    assert "hook 3: NaN or infinite float32 values. Stored in " in last
    assert "check its weights" in last and "the same command" not in last


@pytest.mark.parametrize(
    "said,remedy", [("RESOURCE_EXHAUSTED: no memory\n left", True), ("INTERNAL: a ray", False)]
)
def test_what_does_not_fit_in_memory_asks_for_a_smaller_batch(said, remedy):
    with pytest.raises(RunError, match=f"the device failed: {said.split(':')[0]}") as raised:
        with device_errors():
            raise jax.errors.JaxRuntimeError(said)
    assert ("--batch_size" in (raised.value.remedy or "")) == remedy


def test_a_platform_that_jax_does_not_have_is_bad_input(demo_inputs, tmp_path, monkeypatch, capsys):
    def unknown():
        raise RuntimeError("Unable to initialize\nbackend 'nonsense'")

    monkeypatch.setattr(jax, "devices", unknown)
    assert main(*flags_for(demo_inputs, tmp_path / "out")) == 2
    expected = "error: JAX finds no devices (JAX_PLATFORMS, drivers): Unable to initialize backend"
    assert capsys.readouterr().err.splitlines()[-1].startswith(expected)


@pytest.mark.parametrize(
    "error,told",
    [
        (MemoryError("for a moment"), "out of memory on the host: for a moment"),
        (StorageError("no room"), "to continue, run the same command again without --overwrite"),
    ],
)
def test_nothing_is_stored_after_a_batch_that_could_not_be(failing, monkeypatch, error, told):
    """The next ones could move the mark past it, and its samples would be lost."""
    asked, add_batch = [], ActivationStorage.add_batch

    def fail_once(*given):
        asked.append(given)
        if len(asked) == 2:
            raise error
        add_batch(*given)

    monkeypatch.setattr(ActivationStorage, "add_batch", fail_once)
    last = failing("--max_samples", 200, "--batch_size", 8, "--overwrite").splitlines()[-1]
    assert told in last and len(asked) == 2
