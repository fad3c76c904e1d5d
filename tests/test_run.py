"""The run as a whole, in this process: one program serves all, and stores the model's values."""

import gzip
import json
import pickle
import re
import time

import jax
import pytest
from command_line import main
from conftest import make_reference
from pods import flags_for
from small_runs import set_status
from test_model import TOLERANCE, error_of

import extract_activations
from activation_extraction import ActivationDataset
from activation_extraction.run import demo
from activation_extraction.store.storage import ActivationStorage


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
