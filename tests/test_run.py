"""The run as a whole, in this process: one program serves all, and stores the model's values."""

import gzip
import json
import pickle
import re
import time

import jax
import numpy as np
import pytest
from command_line import main
from conftest import make_reference
from pods import flags_for
from small_runs import set_status
from test_model import (
    TOLERANCE,
    error_of,
)

import extract_activations
from activation_extraction import ActivationDataset
from activation_extraction.run import demo
from activation_extraction.store.storage import ActivationStorage
from activation_extraction.text.packing import samples_of

# For tests that compute for longer than it takes to compile as in a run.
computes_much = pytest.mark.usefixtures("optimized")


def random_samples(lengths, vocab_size):
    chance = np.random.default_rng(7)
    return samples_of([chance.integers(0, vocab_size, n) for n in lengths])


@pytest.mark.long
@computes_much
def test_one_compilation_for_20_batches_of_different_lengths(inputs, tmp_path, caplog):
    """Counted over a whole run: JAX says what it compiles."""
    flags = ["--max_seq_length", 96, "--batch_size", 8, "--output_dir", tmp_path, "--verbose"]
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        assert main(*inputs, *flags) == 0
    messages = [record.getMessage() for record in caplog.records]
    assert len([m for m in messages if "Finished XLA compilation of jit(apply)" in m]) == 1
    metadata = json.loads((tmp_path / "metadata.json").read_text())
    assert metadata["tokens"] > 20 * 8 * 90  # so there were more than 20 batches


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
@computes_much
def test_a_batch_is_stored_while_the_next_one_computes(inputs, tmp_path, monkeypatch):
    events = []
    compile_step = extract_activations.compile_step
    add_batch = ActivationStorage.add_batch

    def compile_and_watch(forward):
        step = compile_step(forward)
        return lambda *arguments: (events.append("computes"), step(*arguments))[1]

    def store(*arguments):
        events.append("stored")
        return add_batch(*arguments)

    monkeypatch.setattr(extract_activations, "compile_step", compile_and_watch)
    monkeypatch.setattr(ActivationStorage, "add_batch", store)
    flags = ["--max_seq_length", 96, "--batch_size", 8, "--output_dir", tmp_path]
    assert main(*inputs, *flags) == 0
    batches = len(events) // 2
    assert batches > 20
    assert events == ["computes", *["computes", "stored"] * (batches - 1), "stored"]


def test_waiting_for_a_step_to_start_is_told_as_computing(inputs, tmp_path, monkeypatch, capsys):
    """Devices that have much to do take no new step at once."""
    compile_step = extract_activations.compile_step

    def compile_and_delay(forward):
        step = compile_step(forward)
        return lambda *arguments: (time.sleep(1), step(*arguments))[1]

    monkeypatch.setattr(extract_activations, "compile_step", compile_and_delay)
    flags = ["--max_seq_length", 64, "--max_samples", 2, "--output_dir", tmp_path]
    assert main(*inputs, *flags) == 0
    assert float(re.search(r"compute ([\d.]+)", capsys.readouterr().out)[1]) >= 1


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
    """The totals count all that is stored; another line says how much of it is new."""
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

    assert not re.search("continuing|continued: ", printed())
    whole = json.loads((out / "metadata.json").read_text())
    killed_after(2)
    commits = [json.loads((out / f"shard_000{number}.json").read_text()) for number in (1, 2)]
    samples = sum(commit["samples"]["count"] for commit in commits)
    tokens = sum(commit["tokens"] for commit in commits)
    where, again = f"{samples} samples and {tokens:,} tokens", printed()
    assert f"continuing {out} after {where} in 2 shards\n" in again
    assert f"60 of 60 samples, {whole['tokens']:,} tokens, " in again  # progress
    assert f"done: 60 samples, {whole['tokens']:,} tokens, " in again
    new = f"{60 - samples} samples and {whole['tokens'] - tokens:,} tokens"
    assert f"continued: {where} were there before; new: {new}\n" in again
    killed_after(0)
    again = printed()
    assert not re.search("continuing|continued: ", again)
    again = printed()
    assert "everything has been computed already" in again
    assert not re.search("continuing|continued: ", again)
