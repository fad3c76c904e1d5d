"""`--plan`: what it says of runs whose answers are known, and what it refuses.

Most tests take formulas in place of the compiler; tests/test_tpu.py compares both.
"""

import json
import math
import random
import re
from statistics import fmean

import pytest
from command_line import main

import extract_activations
from activation_extraction.cli.config import parse_args
from activation_extraction.model import step_plan, topologies
from activation_extraction.run import make_plan, rented
from activation_extraction.run.data_size import MEDIAN, SIGMA, data_size
from activation_extraction.run.mesh_plan import BINDS
from activation_extraction.run.prepare import model_request
from activation_extraction.store.pack_rate import PackRate, pack_rate
from benchmarks.shapes import SHAPES
from qwen2_jax_with_hooks import FAMILIES

MESH = {
    *("shape", "fits", "memory_gb", "products_ms", "hbm_ms", "sent_ms", "overlapped", "host_ms"),
    *("upload_ms", "binds", "tokens_per_second", "batch_size"),
}


@pytest.fixture
def planned(formulas, tmp_path, capsys):
    """Returns a function that plans a model, by its shape or its name, and returns the JSON."""

    def plan_json(machine, model, *flags):
        path = tmp_path / "model"
        if model in SHAPES:
            path.mkdir(exist_ok=True)
            (path / "config.json").write_text(json.dumps(SHAPES[model]))
        where = path if model in SHAPES else model
        flags = ("--model_path", where, "--output_dir", tmp_path / "out", "--json", *flags)
        assert main("--plan", machine, *flags) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    return plan_json


def mesh_with(found, **shape):
    return next(mesh for mesh in found["meshes"] if mesh["shape"] == shape)


def test_known_truths(planned):
    one = planned("v5e-1", "Qwen/Qwen2.5-7B")
    assert [mesh["fits"] for mesh in one["meshes"]] == [False]
    assert one["best"] is one["hours"] is one["dollars"] is None
    assert one["terabytes"] > 100  # but how much there would be to store is known
    half = planned("v5e:8x8", "0.5B")
    assert half["best"]["shape"] == {"data": 64} and half["best"]["fits"]
    assert half["meshes"][0] == half["best"]
    large = planned("v5e:8x8", "72B")
    assert large["best"]["shape"].keys() & {"fsdp", "model", "pipeline"}
    assert not mesh_with(large, data=64)["fits"]


def test_operations_are_those_of_an_independent_count(planned):
    """They are two for every weight of the 24 layers that run, and those of causal attention."""
    hidden, mlp, kv, length = 3584, 18944, 512, 2048
    weights = hidden * (2 * hidden + 2 * kv + 3 * mlp)
    attention = 2 * 2 * hidden * length / 2
    found = planned("v5e-64", "Qwen/Qwen2.5-7B")
    assert found["flops_per_token"] == pytest.approx(24 * (2 * weights + attention), rel=0.02)


def test_fourteen_hooks_bind_the_host_and_one_does_not(planned, monkeypatch):
    """The speeds of host and network are fixed here."""
    monkeypatch.setattr(make_plan, "pack_rate", lambda *_: PackRate(2e7, 0.8))
    monkeypatch.setitem(rented.TPU_HOSTS, ("v5e", 4), rented.RentedHost(112, 192e9, 2e9, 15e9))
    fourteen = planned("v5e:8x8", "7B")["best"]
    one = planned("v5e:8x8", "7B", "--layers_to_extract", 12)["best"]
    assert fourteen["binds"] == "host" and one["binds"] == "products"
    # 14 hooks of 3,584 numbers of 2 bytes, of the 8 * 2,048 tokens of each host
    stored = 14 * 3584 * 2 * 8 * 2048
    assert fourteen["host_ms"] == pytest.approx(1e3 * stored / (2e7 * 112))
    assert fourteen["copy_ms"] == pytest.approx(1e3 * stored / (4 * 15e9))
    assert fourteen["upload_ms"] is None
    monkeypatch.setattr(extract_activations, "keep_plan", lambda *_: None)
    uploading = planned("v5e:8x8", "7B", "--upload_to_gcs", "--gcs_bucket", "b")["best"]
    assert uploading["upload_ms"] == pytest.approx(1e3 * 0.8 * stored / 2e9)
    assert uploading["binds"] == "upload"


def test_what_json_has(planned):
    found = planned("v5e-64", "0.5B", "--max_tokens", 10**9)
    assert all(mesh.keys() >= MESH for mesh in found["meshes"])
    assert {mesh["binds"] for mesh in found["meshes"]} <= BINDS.keys()
    for mesh in found["meshes"]:
        low, high = mesh["tokens_per_second"]
        assert 0 < low < high and 0 <= mesh["overlapped"] <= 1
        assert math.prod(mesh["shape"].values()) == 64
    low, high = found["hours"]
    slow, fast = found["best"]["tokens_per_second"]
    assert low == pytest.approx(1e9 / fast / 3600) and high == pytest.approx(1e9 / slow / 3600)
    (cheap, dear), (spot, _) = found["dollars"]["on_demand"], found["dollars"]["spot"]
    assert (cheap, dear) == pytest.approx((low * 64 * 1.20, high * 64 * 1.416))
    assert spot == pytest.approx(low * 64 * 0.298)
    of_token = 14 * 896 * 2
    assert found["bytes_per_token"] == of_token
    assert found["terabytes"] == pytest.approx(of_token * 1e9 / 1e12)
    assert found["shards"] == 16 * math.ceil(of_token / 16)
    assert found["savings"]["terabytes_per_hook"] == pytest.approx(found["terabytes"] / 14)
    assert found["savings"]["float8"] == pytest.approx(found["terabytes"] - 14 * 900 / 1e3)


def test_prices_and_places_without_a_source_are_null(planned):
    found = planned("tpu7x:2x2x1", "0.5B", "--max_tokens", 10**6)
    assert found["dollars"] == {"on_demand": None, "spot": None}
    assert found["best"]["copy_ms"] is None
    own = planned("tpu7x:2x2x1", "0.5B", "--max_tokens", 10**6, "--chip_hour_dollars", "2,0.5")
    low, high = own["hours"]
    assert own["dollars"]["on_demand"] == pytest.approx([low * 4 * 2, high * 4 * 2])
    assert own["dollars"]["spot"] == pytest.approx([low * 4 * 0.5, high * 4 * 0.5])


def test_nothing_is_said_where_nothing_tells_how_much_data_there_is(planned, capsys):
    found = planned("h100", "0.5B", "--dataset_path", "texts.jsonl")
    assert found["tokens"] is found["hours"] is found["dollars"] is found["terabytes"] is None
    assert found["best"]["shape"] == {"data": 1}


def test_positions_and_encodings_change_what_is_stored(planned):
    flags = ("--layers_to_extract", 3, "--max_samples", 1000)
    every = planned("v5e-4", "0.5B", *flags)
    some = planned("v5e-4", "0.5B", *flags, "--positions", "every:8")
    small = planned("v5e-4", "0.5B", *flags, "--activation_dtype", "float8")
    assert every["bytes_per_token"] == 896 * 2
    assert some["bytes_per_token"] == pytest.approx(896 * 2 / 8, rel=0.01)
    assert small["bytes_per_token"] == 896 + 4 and small["savings"]["float8"] == 0
    tokens = [planned("v5e-4", "0.5B", *p, "--max_tokens", 800)["tokens"] for p in ((), flags[:2])]
    assert tokens == [pytest.approx([800, 800])] * 2
    kept = planned("v5e-4", "0.5B", "--max_tokens", 800, "--positions", "every:8")
    # So many are computed for 800 that are stored.
    assert kept["tokens"] == pytest.approx([6400, 6400], rel=0.01)


def test_a_mesh_that_is_given_is_the_only_one(planned):
    found = planned("v5e:4x4", "0.5B", "--mesh_shape", "4,4", "--mesh_axes", "data,fsdp")
    assert [mesh["shape"] for mesh in found["meshes"]] == [{"data": 4, "fsdp": 4}]
    assert found["meshes"][0]["sent"] == [
        {"axes": ["fsdp"], "gb": pytest.approx(0.5285, abs=1e-4), "overlapped": 1.0,
         "reach": "within a host"}
    ]  # fmt: skip
    far = planned("v5e:4x4", "0.5B", "--mesh_shape", "2,8", "--mesh_axes", "data,fsdp")
    assert far["meshes"][0]["sent"][0]["reach"] == "over the interconnect"
    hosts = planned("h100-16", "0.5B", "--mesh_shape", "16", "--mesh_axes", "fsdp")
    assert hosts["meshes"][0]["sent"][0]["reach"] == "over the network"


def test_the_largest_batch_fits_and_twice_as_many_rows_do_not(planned):
    asked = ("--layers_to_extract", 3)
    found = planned("v5e-4", "7B", *asked)["best"]
    rows = found["batch_size"]
    assert rows > 0 and rows % 4 == 0
    for more, fits in ((1, True), (2, False)):
        again = planned("v5e-4", "7B", *asked, "--batch_size", more * rows)
        assert mesh_with(again, **found["shape"])["fits"] is fits


@pytest.fixture
def shown(formulas, tmp_path, capsys):
    """Plans a released model, and returns what is printed where stdout is no terminal."""

    def plan_table(machine, model, *flags):
        flags = ("--model_path", f"Qwen/{model}", "--output_dir", tmp_path / "out", *flags)
        assert main("--plan", machine, *flags) == 0
        return capsys.readouterr().out

    return plan_table


def test_the_table(shown):
    text = shown("v5e:8x8", "Qwen2.5-72B", "--max_samples", 1000)
    assert "\x1b" not in text and "…" not in text
    assert re.search(r"^\* data \d+ x fsdp \d+ .* matrix products *$", text, re.M)
    assert re.search(r"^  data 64 .* does not fit ", text, re.M)
    for words in (
        "An estimate for v5e:8x8, 64 chips on 16 hosts",
        "has 16 GB, of which a run may fill 90%",
        "layers 0 to 23 of 80 run",
        "along fsdp, over the interconnect, 100% of it while products run",
        " seconds\n",
        " dollars, 1.2 to 1.42 for a chip and an hour\n",
        "190 GB before compression, in 192 shards",
        "13.6 GB for each hook left out",
    ):
        assert words in text, words


def test_advice_where_nothing_fits(shown):
    text = shown("v5e-1", "Qwen2.5-7B", "--max_samples", 1000)
    assert "does not fit" in text and "how long              no mesh fits" in text
    assert "to make it fit        --batch_size 2, fewer hooks or layers" in text
    assert "--batch_size" not in shown("v5e-1", "Qwen2.5-72B")


@pytest.mark.parametrize("machine,times", [("v5e-4", 6), ("h100", 15)])
def test_products_of_float32_take_longer(planned, machine, times):
    usual, exact = (
        planned(machine, "0.5B", "--dtype", dtype)["best"] for dtype in ("bfloat16", "float32")
    )
    assert exact["products_ms"] == pytest.approx(times * usual["products_ms"])


@pytest.mark.parametrize(
    "flags,named",
    [
        (("--plan", "v5x:8x8"), "--plan v5x:8x8: no such machine"),
        (("--plan", "v5e:8x8", "--status"), "--status and --plan cannot be used together"),
        (("--chips_per_host", 4), "--chips_per_host: needs --plan"),
        (("--json",), "--json: needs --status or --plan"),
        (("--plan", "v5e-4", "--chip_hour_dollars", "-1"), "--chip_hour_dollars"),
        (("--plan", "v5e-4", "--chip_hour_dollars", "nan"), "--chip_hour_dollars"),
        (("--plan", "v5e-4", "--model_path", "nobody/nothing"), "--model_path nobody/nothing"),
        (("--plan", "v5e-4", "--mesh_shape", "3,2"), "--mesh_shape 3,2: is 6 devices, there are 4"),
        (("--plan", "v5e-4", "--layers_to_extract", "99"), "99"),
        (("--plan", "v5e-4", "--max_seq_length", "999999"), "--max_seq_length 999999"),
        (("--plan", "v5e-4", "--batch_size", "3", "--mesh_type", "2d", "--mesh_shape", "4,1"), "3"),
        (
            ("--plan", "h100-8", "--mesh_shape", "2,4", "--mesh_axes", "pipeline,data"),
            "--mesh_axes pipeline: cannot be planned for h100-8",
        ),
    ],
)
def test_bad_input(formulas, capsys, tmp_path, flags, named):
    capsys.readouterr()
    arguments = (*flags, "--output_dir", tmp_path / "new" / "out")
    assert main(*arguments) == 2
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert out == "" and last.startswith("error: ") and named in last
    assert not (tmp_path / "new").exists()


def test_a_compiler_that_crashes_is_a_message(monkeypatch):
    topology = topologies.topology_of("v5e-4")
    request = model_request(parse_args([]), topology.described())
    said = []
    for code in ("import os; os.abort()", "import sys; sys.exit('no such plugin')", "pass"):
        monkeypatch.setattr(step_plan, "ANSWER", code)
        said.append(step_plan.plan_elsewhere(FAMILIES, request, {}, topology))
    assert said == [
        "the compiler crashed (SIGABRT)",
        "the compiler failed: no such plugin",
        "the compiler failed: it says nothing",
    ]


@pytest.mark.parametrize(
    "flags,longest,positions",
    [
        ("", 2048, slice(None)),
        ("--max_seq_length 64", 64, slice(None)),
        ("--long_documents split --max_seq_length 1000000", 1e6, slice(None)),
        ("--positions last", 2048, slice(-1, None)),
        ("--positions first:64", 2048, slice(64)),
        ("--positions every:8", 2048, slice(0, None, 8)),
    ],
)
def test_lengths_are_those_of_a_log_normal(flags, longest, positions):
    """The averages are those of random documents and of what the rule keeps of each."""
    chance, found = random.Random(0), data_size(parse_args(flags.split()))
    drawn = (chance.lognormvariate(math.log(MEDIAN), SIGMA) for _ in range(200_000))
    lengths = [min(length, longest) for length in drawn]
    assert found.computed == pytest.approx(fmean(lengths), rel=0.02)
    kept = fmean(len(range(round(length))[positions]) for length in lengths)
    assert found.stored == pytest.approx(kept, rel=0.02)


def test_pieces_of_documents_repeat_tokens():
    flags = "--long_documents split --max_seq_length 100 --overlap 50"
    whole, pieces = (data_size(parse_args(text.split())) for text in ("--positions all", flags))
    assert 0.5 < pieces.kept < 0.53 and whole.kept == 1
    tokens = data_size(parse_args([*flags.split(), "--max_tokens", "1000"])).tokens
    assert tokens == pytest.approx((1000 / pieces.kept,) * 2)


@pytest.mark.parametrize(
    "flags,tokens",
    [
        ("", (8.008e9,) * 2),  # 9.67 million documents, cut to 2,048 tokens
        ("--total_machines 4", (8.008e9 / 4,) * 2),
        ("--long_documents split", (9.887e9,) * 2),
        ("--max_samples 1000", (827_781,) * 2),
        ("--max_samples 1000 --dataset_path x.jsonl", (827_781, 2_048_000)),
        ("--max_samples 1000 --max_tokens 5000", (5000,) * 2),
        ("--max_samples 1000 --max_tokens 1000000 --dataset_path x.jsonl", (827_781, 1e6)),
        ("--max_samples 100000000", (8.008e9,) * 2),  # there are no more
        ("--max_samples 1000 --positions last", (827_781,) * 2),
        ("--max_tokens 1000 --positions last", (827_781,) * 2),
    ],
)
def test_how_much_data(flags, tokens):
    assert data_size(parse_args(flags.split())).tokens == pytest.approx(tokens, rel=5e-3)


def test_unknown_data_has_no_size():
    assert data_size(parse_args(["--dataset_path", "x.jsonl"])).tokens is None
    assert data_size(parse_args(["--dataset_name", "org/name"])).tokens is None


@pytest.mark.parametrize("shard_format,least", [("pickle", 0.5), ("safetensors", 1.0)])
def test_a_core_packs_something(monkeypatch, shard_format, least):
    monkeypatch.setattr("activation_extraction.store.pack_rate.SECONDS", 0.01)
    rate = pack_rate("float32", shard_format, True)
    assert rate.bytes_per_second > 1e6 and least < rate.ratio < 1.01
