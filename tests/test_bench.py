"""The benchmarks run, compare what they should, and end with a line of JSON."""

import json
import sys

import numpy as np
import pytest
from extractions import write_records

from benchmarks import end_to_end, gpu, hooks, reading_bucket, writing
from benchmarks.agreement import Agreement, Disagreement

pytestmark = [pytest.mark.long, pytest.mark.rare]

SMALL = ["--documents", "9", "--max_seq_length", "64"]


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
    monkeypatch.setattr(hooks, "fastest_product", lambda *_: 1e12)  # takes long
    monkeypatch.setattr(gpu, "run_torch", lambda *_: None)  # slow to start
    of_writing = "--dtypes float32 --rounds 1 --batches 1 --folder".split()
    of_gpu = "--shapes tiny --rows 2 --length 32 --seconds 0.01".split()
    writing.main([*of_writing, str(tmp_path)])
    hooks.main(["--shape", "tiny", "--rounds", "1", *SMALL])
    lines = capsys.readouterr().out.splitlines()
    found = next(json.loads(line) for line in lines if line.startswith('{"') and "server" in line)
    for name in writing.FORMATS:
        assert found[f"float32 {name}"]["server"]["mb_per_second"] > 1
    per_token = json.loads(lines[-1])["requests"]
    pairs, residual = (per_token[name]["bytes_per_token"] for name in ("pairs", "residual"))
    assert 1.8 < pairs / residual < 2.2
    assert gpu.main(["--shapes", "7B"]) == 2
    assert capsys.readouterr().err == "no GPU: JAX finds only cpu\n"
    assert gpu.main(of_gpu) == 0


def test_other_values_or_tokens_are_noticed(tmp_path):
    ids, values = [[1, 2, 3], [4, 5]], [np.ones((n, 4), np.float32) for n in (3, 2)]
    agreement = Agreement(ids)
    facts = {"hook": "blocks.3.hook_resid_post", "text_preview": "", "doc_id": None}

    def check(name, values, tokens=ids):
        (tmp_path / name).mkdir()
        records = [
            {"sample_idx": n, "activation": each, "shape": each.shape, **facts}
            | {"token_ids": np.array(row, np.int32)}
            for n, (each, row) in enumerate(zip(values, tokens, strict=True))
        ]
        write_records(tmp_path / name / "shard_0001.pkl.gz", {3: records})
        return agreement.check(tmp_path / name, "float32", 5).worst

    assert check("first", values) is None
    assert check("near", [value * 1.001 for value in values]) == pytest.approx(1e-3, rel=1e-2)
    for name, *bad in (
        ("values", [values[0], values[1] * 2]),
        ("tokens", values, [[1, 2, 3], [4, 6]]),
        ("count", values[:1], ids[:1]),
        ("nan", [values[0], values[1] * np.nan]),
    ):
        with pytest.raises(Disagreement):
            check(name, *bad)


def test_reading_from_a_bucket(capsys, tmp_path):
    flags = "--mb 60 --mb_of_fourteen 8 --latency 0 30 --rounds 1 --folder".split()
    reading_bucket.main([*flags, str(tmp_path)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(found["latency"]["0.0"]) == 6 and len(found["latency"]["30.0"]) == 7
    for each in (each for latency in found["latency"].values() for each in latency.values()):
        assert each["bare"][0] > 0 and each["read"][0] > 0
        assert 1 <= each["downloaded"][0] < 3 and each["requests_per_gb"][0] > 0
