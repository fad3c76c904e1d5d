"""`--plan`: what it says of runs whose answers are known, and what it refuses.

Most tests estimate by formula alone, as where libtpu is not installed; tests/test_tpu.py compares
the formula with the compiler.
"""

import json
import math
import random
import re
import subprocess
import sys
from statistics import fmean

import pytest
from command_line import main

from activation_extraction.cli.config import parse_args
from activation_extraction.model.devices import CHIPS
from activation_extraction.run import estimate
from activation_extraction.run.estimate import BINDS, data_size, pack_rate
from activation_extraction.run.topologies import MACHINES
from benchmarks.shapes import SHAPES

KEYS = ["meshes", "best", "hours", "dollars", "terabytes"]
MESH = ["shape", "fits", "memory_gb", "compiled_gb", "step_ms", "tokens_per_second", "binds"]


@pytest.fixture
def formulas(monkeypatch):
    """Nothing is compiled or measured."""
    monkeypatch.setattr(estimate, "find_spec", lambda name: None)
    monkeypatch.setattr(estimate, "pack_rate", lambda *_: (1e9, 0.8))


@pytest.fixture
def said(formulas, tmp_path, capsys):
    """Returns a function that estimates a run of a model, by its shape or its name, and returns
    what is printed."""

    def run(machine, model, *flags):
        path = tmp_path / "model"
        if model in SHAPES:
            path.mkdir(exist_ok=True)
            (path / "config.json").write_text(json.dumps(SHAPES[model]))
        where = path if model in SHAPES else model
        flags = ("--model_path", where, "--output_dir", tmp_path / "out", *flags)
        assert main("--plan", machine, *flags) == 0
        assert not (tmp_path / "out").exists()
        return capsys.readouterr().out

    return run


@pytest.fixture
def planned(said):
    """Returns a function that returns the JSON of an estimate."""

    def run(*flags):
        (line,) = said(*flags, "--json").splitlines()
        return json.loads(line)

    return run


def test_known_truths(planned):
    one = planned("v5e-1", "Qwen/Qwen2.5-7B")
    assert [mesh["fits"] for mesh in one["meshes"]] == [False]
    assert one["best"] is one["hours"] is one["dollars"] is None
    assert one["terabytes"] > 100  # but how much there would be to store is known
    half = planned("v5e:8x8", "0.5B")
    assert half["best"]["shape"] == {"data": 64} and half["best"]["fits"]
    assert half["meshes"] == [half["best"]]
    large = planned("v5e:8x8", "72B", "--mesh_shape", "64", "--mesh_axes", "data")
    auto, given = large["meshes"]
    assert auto["shape"].keys() & {"fsdp", "model"} and large["best"] == auto
    assert given["shape"] == {"data": 64} and not given["fits"]


# Of Qwen2.5-7B: the weights of a layer, and the layers that run.
HIDDEN, LAYERS = 3584, 24
WEIGHTS = HIDDEN * (2 * HIDDEN + 2 * 512 + 3 * 18944)
LINKS, CHIP = 2 * 45e9, CHIPS["TPU v5e"]


def products(tokens, length):
    """Two for every weight, and those of causal attention."""
    flops = LAYERS * (2 * WEIGHTS + 2 * 2 * HIDDEN * length / 2)
    return tokens * flops / CHIP.flops


@pytest.mark.parametrize(
    "mesh,length,bound,seconds,shares",
    [
        ("4 --mesh_axes data", 2048, "products", products(2 * 2048, 2048), (0.4, 0.7)),
        # Every weight is read once, those of the embedding, too.
        (
            *("4 --mesh_axes data", 16, "hbm"),
            *(2 * (LAYERS * WEIGHTS + 152064 * HIDDEN) / CHIP.bandwidth, (0.6, 0.9)),
        ),
        # A chip receives the weights that it does not hold, beside the products.
        (
            *("4 --mesh_axes fsdp", 128, "gathers"),
            *(3 / 4 * 2 * LAYERS * WEIGHTS / LINKS, (0.6, 0.9)),
        ),
    ],
)
def test_a_step_takes_what_an_independent_count_says(planned, mesh, length, bound, seconds, shares):
    flags = f"--mesh_shape {mesh} --max_seq_length {length}".split()
    *_, found = planned("v5e-4", "Qwen/Qwen2.5-7B", *flags)["meshes"]
    assert found["binds"] == bound and found["step_ms"] == pytest.approx(1e3 * seconds, rel=0.03)
    speeds = [0.99 * 8 * length / seconds * share for share in shares]
    assert found["tokens_per_second"] == pytest.approx(speeds, rel=0.03)


def test_nothing_runs_beside_exchanges(planned):
    """Devices along `model` add up the residual stream twice in a layer, and gather it twice."""
    flags = "--mesh_shape 1,4 --mesh_axes data,model".split()
    *_, found = planned("v5e-4", "Qwen/Qwen2.5-7B", *flags)["meshes"]
    tokens = 8 * 2048
    sent = 4 * LAYERS * 2 * tokens * HIDDEN * 3 / 4 / LINKS
    both = products(tokens / 4, 2048), sent
    assert found["step_ms"] == pytest.approx(1e3 * sum(both), rel=0.02)
    slow, fast = (both[0] / a + both[1] / b for a, b in ((0.4, 0.6), (0.7, 0.9)))
    speeds = [0.99 * tokens / slow, 0.99 * tokens / fast]
    assert found["tokens_per_second"] == pytest.approx(speeds, rel=0.02)


def test_the_host_binds_if_it_gets_more_than_it_can_store(planned, monkeypatch):
    (quick,) = planned("v5e:8x8", "7B")["meshes"]
    monkeypatch.setattr(estimate, "pack_rate", lambda *_: (2e7, 0.8))
    slow = MACHINES["v5e"]._replace(network=1e8)
    monkeypatch.setitem(MACHINES, "v5e", slow)
    run = ("v5e:8x8", "7B")
    (fourteen,) = planned(*run)["meshes"]
    (one,) = planned(*run, "--layers_to_extract", 12)["meshes"]
    assert fourteen["binds"] == "host" and one["binds"] == "products"
    assert fourteen["step_ms"] == quick["step_ms"]  # of the devices alone
    # 14 hooks of 3,584 numbers of 2 bytes, of the 8 * 2,048 tokens of each host
    tokens, cores = 8 * 2048, 4 * slow.cores
    seconds = 14 * 3584 * 2 * tokens / (2e7 * cores)
    expected = [0.99 * 16 * tokens / seconds * share for share in BINDS["host"][1]]
    assert fourteen["tokens_per_second"] == pytest.approx(expected)
    (threads,) = planned(*run, "--writer_threads", cores // 2)["meshes"]
    assert threads["tokens_per_second"] == pytest.approx([x / 2 for x in expected])
    (some,) = planned(*run, "--positions", "every:8")["meshes"]
    assert some["binds"] == "products"
    (upload,) = planned(*run, "--upload_to_gcs", "--gcs_bucket", "b")["meshes"]
    seconds = 0.8 * 14 * 3584 * 2 * tokens / (4 * 1e8)
    expected = [0.99 * 16 * tokens / seconds * share for share in BINDS["upload"][1]]
    assert upload["binds"] == "upload"
    assert upload["tokens_per_second"] == pytest.approx(expected)


def test_what_json_has(planned):
    found = planned("v5e-64", "0.5B", "--max_tokens", 10**9, "--mesh_type", "2d")
    assert list(found) == KEYS and all(list(mesh) == MESH for mesh in found["meshes"])
    assert [mesh["shape"] for mesh in found["meshes"]] == [{"data": 64}, {"data": 16, "model": 4}]
    for mesh in found["meshes"]:
        low, high = mesh["tokens_per_second"]
        assert 0 < low < high and mesh["binds"] in BINDS and mesh["compiled_gb"] is None
        assert 0 < mesh["memory_gb"] < 16 and mesh["fits"] is True
    assert found["meshes"][1]["binds"] == "exchanges"
    low, high = found["hours"]
    slow, fast = found["best"]["tokens_per_second"]
    assert low == pytest.approx(1e9 / fast / 3600) and high == pytest.approx(1e9 / slow / 3600)
    on_demand, spot = MACHINES["v5e"].dollars
    assert found["dollars"] == pytest.approx([low * 64 * spot, high * 64 * on_demand])
    assert found["terabytes"] == pytest.approx(14 * 896 * 2 * 1e9 / 1e12)


def test_prices_without_a_source_are_null_and_those_given_count(planned):
    run = ("tpu7x:2x2x1", "0.5B", "--max_tokens", 10**6)
    assert planned(*run)["dollars"] is None
    found = planned(*run, "--chip_hour_dollars", "2,0.5")
    low, high = found["hours"]
    assert found["dollars"] == pytest.approx([low * 4 * 0.5, high * 4 * 2])
    assert planned(*run, "--chip_hour_dollars", 2)["dollars"] == pytest.approx([low * 8, high * 8])


def test_nothing_is_said_where_nothing_tells_how_much_data_there_is(planned):
    found = planned("h100", "0.5B", "--dataset_path", "texts.jsonl")
    assert found["hours"] is found["dollars"] is found["terabytes"] is None
    assert found["best"]["shape"] == {"data": 1}


def test_positions_and_encodings_change_what_is_stored(planned):
    flags = ("v5e-4", "0.5B", "--layers_to_extract", 3, "--max_samples", 1000)
    every = planned(*flags)["terabytes"]
    tokens = data_size(parse_args(["--max_samples", "1000"]))[0][1]
    assert every == pytest.approx(tokens * 896 * 2 / 1e12)
    some, small = (
        planned(*flags, *more)["terabytes"]
        for more in (("--positions", "every:8"), ("--activation_dtype", "float8"))
    )
    assert some == pytest.approx(every / 8, rel=0.01)
    assert small == pytest.approx(every * (896 + 4) / (2 * 896))


@pytest.mark.parametrize("machine,times", [("v5p-8", 6), ("h100", 15)])
def test_products_of_float32_take_longer(planned, machine, times):
    usual, exact = (
        planned(machine, "7B", "--dtype", dtype)["meshes"][0] for dtype in ("bfloat16", "float32")
    )
    assert usual["binds"] == exact["binds"] == "products"
    assert exact["step_ms"] == pytest.approx(times * usual["step_ms"])


def test_a_gpu_has_three_quarters_of_its_memory(planned):
    """So much JAX takes by default; what is left decides the mesh."""
    run = ("h100-8", "32B", "--layers_to_extract", 63)  # 66 GB of weights
    assert "fsdp" in planned(*run)["best"]["shape"]
    (auto, whole) = planned(*run, "--mesh_shape", "8", "--mesh_axes", "data")["meshes"]
    assert auto["fits"] and not whole["fits"] and whole["memory_gb"] < 0.9 * 80


def test_the_words(said):
    text = said("v5e:8x8", "Qwen/Qwen2.5-72B", "--max_samples", 1000, "--upload_to_gcs",
                "--gcs_bucket", "b", "--mesh_shape", "64", "--mesh_axes", "data")  # fmt: skip
    for words in (
        r"^v5e:8x8: 64 chips on 16 hosts, each of which feeds 8 rows of 2,048 tokens per step$",
        r"^mesh data \d+ x fsdp \d+: fits; GB per device: .*, bound by matrix products$",
        r"^mesh data 64: does not fit; GB per device: ",
        r"^packing on the host: [\d.]+ to [\d.]+ GB/s per host, which gets [\d.]+ GB/s at peak",
        r"^uploads: 2.33 to 7.75 GB/s per host, which gets ",
        r"^bytes per token: 229,376; kept tokens: 100%$",
        r"^hours: [\d.]+ to [\d.]+$",
        r"^terabytes: 0.19$",
        r"matrix products 40% to 70%.* an hour: 0.3 to 1.2 \(",
        r"^this is an estimate: a run with --max_samples 200 has the real numbers, see --status$",
    ):
        assert re.search(words, text, re.M), words
    unknown = said("h200-8", "0.5B", "--dataset_path", "x.jsonl")
    assert "\nhours: unknown\ndollars: unknown\nterabytes: unknown\n" in unknown
    assert "an hour: unknown" in unknown


@pytest.mark.parametrize(
    "flags,named",
    [
        (("--plan", "v5x:8x8"), "--plan v5x:8x8: there are machines of v4, v5e"),
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
            "--mesh_type, --mesh_axes: --plan has no formula for a pipeline",
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


def test_what_an_estimate_leaves_out_is_logged(formulas, tmp_path, capsys):
    assert main("--plan", "v5e-4", "--demo", "--batch_size", "auto", "--json") == 0
    logged = capsys.readouterr().err
    assert "nothing is compiled: that needs libtpu" in logged
    assert "a run may take more than these 8 rows" in logged


@pytest.fixture
def compiled(said, monkeypatch, tmp_path, capsys):
    """Returns a function that puts code in place of the process that compiles; it returns the
    estimate of the only mesh, and what is logged."""
    monkeypatch.setattr(estimate, "find_spec", lambda name: True)
    run = subprocess.run
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["0.5B"]))

    def estimated(code, machine="v5e-4"):
        def instead(command, **options):
            return run([sys.executable, "-c", code], **options)

        with monkeypatch.context() as patch:
            patch.setattr(subprocess, "run", instead)
            assert main("--plan", machine, "--model_path", tmp_path, "--json") == 0
        out, err = capsys.readouterr()
        (mesh,) = json.loads(out)["meshes"]
        return mesh, err

    return estimated


@pytest.mark.parametrize(
    "code,gigabytes,fits,logged",
    [
        ("print('libtpu says hello'); print(3e9)", 3.0, True, ""),
        ("print(15e9)", 15.0, False, ""),  # of 16, of which a run may fill 90 %
        ("print('\"RESOURCE_EXHAUSTED: no room\"')", None, False, "RESOURCE_EXHAUSTED: no room"),
        ("print('\"INTERNAL: odd\"')", None, True, "mesh data 4: INTERNAL: odd"),
        ("import os; os.abort()", None, True, "the compiler failed with status -6"),
        ("import sys; sys.exit('no plugin')", None, True, "failed with status 1: no plugin"),
    ],
)
def test_what_the_compiler_says_counts(compiled, code, gigabytes, fits, logged):
    mesh, said = compiled(code)
    assert (mesh["compiled_gb"], mesh["fits"]) == (gigabytes, fits)
    assert logged in said and mesh["memory_gb"] < 5


def test_a_compiler_that_hangs_is_ended(compiled, monkeypatch):
    monkeypatch.setattr(estimate, "MOST_SECONDS", 0.1)
    mesh, said = compiled("import time; time.sleep(1000)")
    assert mesh["compiled_gb"] is None and "the compiler took more than 0.1 s" in said


def test_nothing_is_compiled_for_gpus(compiled):
    mesh, said = compiled("raise SystemExit", "h100-4")
    assert mesh["compiled_gb"] is None and mesh["fits"] and "compil" not in said


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
    chance = random.Random(0)
    drawn = (chance.lognormvariate(math.log(620), 1) for _ in range(200_000))
    lengths = [min(length, longest) for length in drawn]
    (tokens, _), kept = data_size(parse_args([*flags.split(), "--max_samples", "1000"]))
    assert tokens == pytest.approx(1000 * fmean(lengths), rel=0.02)
    stored = fmean(len(range(round(length))[positions]) for length in lengths)
    assert kept == pytest.approx(stored / fmean(lengths), rel=0.02)


def test_pieces_of_documents_repeat_tokens():
    flags = "--long_documents split --max_seq_length 100 --overlap 50 --max_tokens 1000"
    tokens, kept = data_size(parse_args(flags.split()))
    assert 0.5 < kept < 0.53 and data_size(parse_args([]))[1] == 1
    assert tokens == pytest.approx((1000 / kept,) * 2)


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
    assert data_size(parse_args(flags.split()))[0] == pytest.approx(tokens, rel=5e-3)


def test_a_rule_that_keeps_nothing_stores_nothing():
    flags = "--max_seq_length 100000 --positions 50000: --max_tokens 1000"
    assert data_size(parse_args(flags.split())) == (pytest.approx((9.9e9,) * 2, rel=0.01), 0)


@pytest.mark.parametrize(
    "flags,dtype,least",
    [("", "float32", 0.5), ("--shard_format safetensors", "float32", 1.0), ("", "float8", 0.5)],
)
def test_a_core_packs_something(flags, dtype, least):
    speed, ratio = pack_rate(parse_args(flags.split()), dtype)
    assert speed > 1e6 and least < ratio < 1.01
