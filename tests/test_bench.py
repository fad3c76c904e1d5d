"""The benchmarks run, compare what they should, and end with the JSON line that README reads."""

import json
import sys
from typing import Any

import numpy as np
import pytest
from extractions import write_records

from benchmarks import competitors, end_to_end, gpu, hooks, peak, writing
from benchmarks.agreement import Agreement, Disagreement

pytestmark = pytest.mark.long

DOCUMENTS = [[1, 2, 3], [4, 5]]


@pytest.mark.rare
def test_side_by_side(capsys, monkeypatch):
    """This tool and transformers in two ways, in processes of their own, on a tiny model.

    It has experts, whose numbers all of them store.
    """
    flags = "--shape tiny-moe --documents 9 --max_seq_length 64 --batch_size 2".split()
    flags += ["--only", "ours", "alone", "padded", "--dtypes", "float32", "--whole"]
    monkeypatch.setattr(end_to_end, "measure_peaks", lambda _: {"float32": 1e12})  # takes long
    end_to_end.main([*flags, "--competitors", sys.executable])
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])
    assert "ours / padded" in printed and "deviation" in printed
    assert set(found["ours_over"]) == {"alone", "padded"}
    assert found["machine"]["cores"] and found["versions"]["jax"]
    assert set(found["peak_flops_per_second"]) == {"before", "after", "best"}
    tokens = found["documents"]["tokens"]
    for name, rows in found["contenders"].items():
        row = rows["float32"]
        assert row["tokens"] == row["written_tokens"] == tokens
        assert row["bytes"] > 0 and row["peak_bytes"] > 1e8 and row["process_seconds"] > 0
        assert 0 < row["of_peak"] and 0 < row["compute_of_peak"] < 1
        assert row["tokens_per_second"] > 0 and row["compute_tokens_per_second"] > 0
        assert name == "ours" or row["deviation"] < 1e-4
        assert row["compared_tokens"] == tokens and row["changed_experts"] == 0
    ours = found["contenders"]["ours"]["float32"]
    assert ours["first_batch_seconds"] > ours["compile_seconds"] > 0
    assert 0 < ours["full_rows_of_peak"] < 1


@pytest.mark.parametrize("library", ["jax", "torch"])
def test_peaks(library):
    found = peak.best(peak.measure(library, [(8, 16, 8), (16, 16, 8)], peak.DTYPES, 0.01))
    assert set(found) == {"bfloat16", "float32"} and min(found.values()) > 0


def test_what_others_batch():
    lengths = [5, 1, 4, 2, 3]
    ways = competitors.WAYS
    assert competitors.batches(lengths, ways["padded"], 2, 1) == [[0, 1], [2, 3], [4]]
    assert competitors.batches(lengths, ways["sorted"], 2, 1) == [[1, 3], [4, 2], [0]]
    assert competitors.batches(lengths, ways["alone"], 2, 3) == [[1], [4]]
    tokens, mask = competitors.pad([[7], [8, 9]])
    assert tokens.tolist() == [[7, 0], [8, 9]] and mask is not None
    assert mask.tolist() == [[1, 0], [1, 1]]


def store(folder, activations, tokens, chosen=None):
    """One layer's residual stream of each document, and perhaps its chosen experts."""
    folder.mkdir()
    found: dict[Any, Any] = {3: activations}
    if chosen is not None:
        found["blocks.3.mlp.hook_expert_indices"] = chosen
    facts = {"hook": "blocks.3.hook_resid_post", "text_preview": "", "doc_id": None}
    for key, values in found.items():
        found[key] = [
            {"sample_idx": n, "activation": each, "shape": each.shape, **facts}
            | {"token_ids": np.array(ids, np.int32)}
            for n, (each, ids) in enumerate(zip(values, tokens, strict=True))
        ]
    write_records(folder / "shard_0001.pkl.gz", found)
    return folder


def test_other_values_or_tokens_are_noticed(tmp_path):
    agreement = Agreement(DOCUMENTS)
    values = [np.ones((3, 4), np.float32), np.ones((2, 4), np.float32)]
    first = store(tmp_path / "first", values, DOCUMENTS)
    assert agreement.check(first, "float32", 5).worst is None
    near = store(tmp_path / "near", [value * 1.001 for value in values], DOCUMENTS)
    assert agreement.check(near, "float32", 5).worst == pytest.approx(1e-3, rel=1e-2)
    for name, others, tokens, count in (
        ("values", [values[0], values[1] * 2], DOCUMENTS, 5),
        ("tokens", values, [[1, 2, 3], [4, 6]], 5),
        ("count", values[:1], DOCUMENTS[:1], 5),
        ("nan", [values[0], values[1] * np.nan], DOCUMENTS, 5),
    ):
        with pytest.raises(Disagreement):
            agreement.check(store(tmp_path / name, others, tokens), "float32", count)


def test_tokens_with_other_experts_are_counted_and_not_compared(tmp_path):
    """Rounding may change the experts of some; not of many more than another's."""
    ids, agreement = [list(range(100))], Agreement([list(range(100))])

    def check(name, dtype, changed):
        """changed: which tokens have other experts, and other values."""
        values, chosen = np.ones((100, 4), np.float32), np.tile(np.int16([[0, 1]]), (100, 1))
        values[changed], chosen[changed] = 9, [1, 2]
        chosen[50:] = chosen[50:, ::-1]  # the order does not matter
        return agreement.check(store(tmp_path / name, [values], ids, [chosen]), dtype, 100)

    check("exact", "float32", [])
    ours = check("ours", "bfloat16", range(8))
    assert (ours.tokens, ours.other, ours.changed) == (100, 0, 8)
    theirs = check("theirs", "bfloat16", range(4, 20))
    assert (theirs.worst, theirs.other, theirs.changed) == (0, 16, 16)
    with pytest.raises(Disagreement, match="40 of 100 tokens have other experts than in float32"):
        check("many", "bfloat16", range(40))
    with pytest.raises(Disagreement, match="0 of 100 tokens .*, and 30 of the first contender's"):
        agreement = Agreement(ids)
        for name, dtype, changed in (
            ("exact_too", "float32", []),
            ("ours_too", "bfloat16", range(30)),
            ("theirs_too", "bfloat16", []),
        ):
            check(name, dtype, changed)
    with pytest.raises(Disagreement, match="deviates by 8 of the RMS"):
        agreement.check(store(tmp_path / "bare", [np.full((100, 4), 9.0)], ids), "float32", 100)


def test_writing(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(writing, "LENGTH", 64)
    flags = ["--dtypes", "float32", "--rounds", "1", "--batches", "1"]
    writing.main([*flags, "--folder", str(tmp_path)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name in writing.FORMATS:
        measured = found[f"float32 {name}"]
        assert "safetensors.save_file + obstore" in measured["peers_mb_per_second"]
        for place in ("server", "files"):
            for rate in ("mb_per_second", "limit_mb_per_second", "one_core_mb_per_second"):
                assert measured[place][rate] > 1


@pytest.mark.rare
def test_hooks(capsys, monkeypatch):
    monkeypatch.setattr(hooks, "fastest_product", lambda *_: 1e12)  # takes long
    flags = ["--shape", "tiny", "--documents", "9", "--max_seq_length", "64", "--rounds", "1"]
    hooks.main(flags)
    printed = capsys.readouterr().out
    found = json.loads(printed.splitlines()[-1])["requests"]
    assert "fastest matrix product: 1,000 GFLOP/s" in printed
    assert list(found) == [*hooks.requests(12)]
    per_token = {name: row["bytes_per_token"] for name, row in found.items()}
    assert 1.8 < per_token["pairs"] / per_token["residual"] < 2.2
    assert per_token["residual, random:0.1"] < 0.4 * per_token["residual"]
    assert all(row["tokens_per_second"] > 0 for row in found.values())
    assert found["residual"]["flops_per_second"] > 0


def test_gpu_script_without_a_gpu(capsys, monkeypatch):
    assert gpu.main(["--shapes", "7B"]) == 2
    assert capsys.readouterr().err == "no GPU: JAX finds only cpu\n"
    monkeypatch.setattr(gpu, "run_torch", lambda *_: None)  # slow to start
    flags = ["--shapes", "tiny", "--rows", "2", "--length", "32", "--seconds", "0.01"]
    assert gpu.main(flags) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["shapes"]["tiny"]["ours"]["blocked"]["tokens_per_second_with_copies"] > 0
