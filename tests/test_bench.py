"""The benchmarks run, compare what they should, and end with a line of JSON; and memory at a real
model's size, as they measure it."""

import http.client
import json
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from extractions import write_records

from benchmarks import bucket_server, end_to_end, gpu, hooks, reading_bucket, writing
from benchmarks.agreement import Agreement, Disagreement
from benchmarks.inputs import make_documents, make_model
from benchmarks.processes import extract
from benchmarks.shapes import SHAPES

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
    monkeypatch.setattr(hooks, "fastest_product", lambda *_: 1e12)  # takes long
    monkeypatch.setattr(gpu, "run_torch", lambda *_: {})  # slow to start
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
        assert each["bare"][0] > 0 and each["of_16"][0] > 0 and each["read"][0] > 0
        assert each["sockets"][0] > 0 and each["core_seconds_per_gb"][0] > 0
        assert 1 <= each["downloaded"][0] < 3 and each["requests_per_gb"][0] > 0


def test_opening_many_shards_takes_a_request_for_each(capsys, tmp_path):
    reading_bucket.main(["--open", "40", "--latency", "0", "--folder", str(tmp_path)])
    (found,) = json.loads(capsys.readouterr().out.splitlines()[-1])["opened"]
    assert found["shards"] == 40 <= found["requests"] < 50


def test_the_bucket_to_read_from(tmp_path, monkeypatch):
    """The server answers rightly and in the time that it should, by a clock that waiting moves."""
    clock = SimpleNamespace(now=0.0)
    clock.perf_counter = lambda: clock.now
    clock.sleep = lambda seconds: setattr(clock, "now", clock.now + seconds)
    monkeypatch.setattr(bucket_server, "time", clock)
    data = np.random.default_rng(0).bytes(3 * 2**20)
    (tmp_path / "x").write_bytes(data)
    server = bucket_server.Server(tmp_path, latency=30, rate=1)
    threading.Thread(target=server.serve_forever).start()
    connection = http.client.HTTPConnection(*server.server_address)
    tag = server.objects["x"].tag
    last = 2 * 2**20 / 1e6  # seconds until the last of three pieces is sent
    try:
        for method, name, headers, status, body, seconds in (
            ("GET", "x", {"If-Match": tag}, 200, data, 0.03 + last),
            ("GET", "x", {"If-Match": tag, "Range": "bytes=7-9"}, 206, data[7:10], 0.03),
            ("GET", "x", {"Range": "bytes=-2"}, 206, data[-2:], 0.03),
            ("GET", "x", {"Range": f"bytes={len(data)}-"}, 416, b"", 0.03),
            ("GET", "x", {"If-Match": '"other"'}, 412, b"", 0.03),
            ("HEAD", "x", {}, 200, b"", 0.03),
            ("HEAD", "y", {}, 404, b"", 0.03),
        ):
            began = clock.now
            connection.request(method, f"/bucket/{name}", headers=headers)
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (status, body), (method, headers)
            assert clock.now - began == pytest.approx(seconds), (method, headers)
            if method == "HEAD" and status == 200:
                assert answer.headers["Content-Length"] == str(len(data))
                assert answer.headers["ETag"] == tag
        assert server.counts == (7, len(data) + 3 + 2)
    finally:
        connection.close()
        server.shutdown()
        server.server_close()
