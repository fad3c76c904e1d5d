"""The benchmarks run, compare what they should, and end with a line of JSON; and memory at a real
model's size, as they measure it."""

import json
import sys

import pytest

from benchmarks import end_to_end, gpu, many_shards, opening, reading, writing
from benchmarks.inputs import SHAPES, make_documents, make_model
from benchmarks.processes import extract

pytestmark = [pytest.mark.long, pytest.mark.rare]

SMALL = ["--documents", "9", "--max_seq_length", "64"]


@pytest.mark.slow
def test_peak_memory_stays_under_2_2_times_the_weights(tmp_path):
    """The whole process, libraries and buffers included, at 4 x 512 tokens."""
    model = tmp_path / "model"
    parameters = make_model(model, SHAPES["0.5B"])
    make_documents(tmp_path / "documents.jsonl", 4)
    flags = ["--model_path", str(model), "--dataset_path", str(tmp_path / "documents.jsonl")]
    flags += ["--batch_size", "4", "--max_seq_length", "512"]
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        found = extract(tmp_path / dtype, [*flags, "--dtype", dtype])
        assert found["samples"] == 4
        assert found["peak_bytes"] < 2.2 * parameters * size, dtype


def test_side_by_side(capsys, monkeypatch):
    """This tool and transformers in two ways, in processes of their own, on a tiny model with
    experts, whose numbers all of them store."""
    monkeypatch.setattr(end_to_end, "measure_peaks", lambda _: {"float32": 1e12})  # takes long
    flags = "--shape tiny-moe --batch_size 2 --only ours alone padded --dtypes float32 --whole"
    end_to_end.main([*flags.split(), *SMALL, "--competitors", sys.executable])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["ours_over"]) == {"alone", "padded"}
    tokens = found["documents"]["tokens"]
    for name, rows in found["contenders"].items():
        row = rows["float32"]
        assert row["tokens"] == row["written_tokens"] == row["compared_tokens"] == tokens
        assert row["bytes"] > 0 and row["tokens_per_second"] > 0 and 0 < row["of_peak"]
        assert name == "ours" or row["deviation"] < 1e-4
        assert row["changed_experts"] == 0


def test_others_end_with_their_numbers(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(writing, "LENGTH", 64)

    def result(benchmark, flags):
        benchmark.main(flags.split())
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    rows = result(writing, f"--rounds 1 --gb 0.0001 --folder {tmp_path}")["rows"]
    cases = {tuple(row[key] for key in ("kind", "num_hooks", "shard_format")) for row in rows}
    assert len(rows) == 3 * len(cases) == 3 * 14  # three ways
    assert ("float8", 14, "safetensors") in cases and ("codes", 1, "pickle") in cases
    assert all(row["mb_per_second"] > 0 < row["core_seconds_per_gb"] for row in rows)
    at_no_latency = result(reading, "--mb 60 --mb_of_fourteen 8 --latency 0 --rounds 1")["latency"]
    for figures in at_no_latency["0.0"].values():
        assert figures["bare"][0] > 0 and figures["read"][0] > 0
        assert 1 <= figures["downloaded"][0] < 3
    opened = result(opening, "--shards 40 --hosts 2 --latency 0 --rounds 1")
    for action in "dataset", "status":
        assert 40 <= opened[action][0]["requests"] < 55  # one for each shard
    assert 20 <= opened["continue"][0]["requests"] < 40  # one for each shard of the host
    for figures in result(many_shards, "--quick --latency 0")["scenarios"].values():
        assert 1 <= figures["this"]["downloaded"] < 2
        assert figures["this"]["first_requests"] > 0 and figures["this"]["peak_mb"] > 0
    assert gpu.main(["--shapes", "7B"]) == 2
    assert capsys.readouterr().err == "error: expected a GPU, but JAX finds only: cpu\n"
