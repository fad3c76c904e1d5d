"""`--plan`: what it says of runs whose answers are known, of which machines, and what it refuses.

Most tests estimate by formula alone, as where libtpu is not installed; tests/test_tpu.py has the
compiler's plans.
"""

import json
import re
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from command_line import main

from activation_extraction.cli.config import parse_args
from activation_extraction.model.devices import CHIPS
from activation_extraction.run import estimate
from activation_extraction.run.estimate import BINDS, data_size
from activation_extraction.run.topologies import MACHINES, topology_of
from benchmarks.shapes import SHAPES

KEYS = ["meshes", "best", "hours", "dollars", "terabytes"]
MESH = ["shape", "fits", "memory_gb", "compiled_gb", "step_ms", "tokens_per_second", "binds"]


@pytest.fixture
def said(monkeypatch, tmp_path, capsys):
    """Returns a function that estimates a run of a model, by its shape or its name, and returns
    what is printed. Nothing is compiled or measured."""
    monkeypatch.setattr(estimate, "find_spec", lambda name: None)
    monkeypatch.setattr(estimate, "pack_rate", lambda *_: (1e9, 0.8))

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
    """Returns a function that returns the JSON of an estimate. flags: also in one string."""

    def run(machine, model, *flags):
        given = [word for flag in flags for word in str(flag).split()]
        (line,) = said(machine, model, *given, "--json").splitlines()
        return json.loads(line)

    return run


def test_known_truths(planned):
    one = planned("v5e-1", "Qwen/Qwen2.5-7B")
    assert [mesh["fits"] for mesh in one["meshes"]] == [False]
    assert one["best"] is one["hours"] is one["dollars"] is None
    assert one["terabytes"] > 100  # but how much there would be to store is known
    # By default JAX takes three quarters of a GPU's memory; here weights take 66 GB.
    run = "h100-8", "32B", "--layers_to_extract 63 --mesh_shape 8 --mesh_axes data"
    auto, whole = planned(*run)["meshes"]
    assert "fsdp" in auto["shape"] and auto["fits"]
    assert not whole["fits"] and whole["memory_gb"] < 0.9 * 80


def test_a_step_takes_what_an_independent_count_says(planned):
    """The products of Qwen2.5-7B are two for every weight and those of causal attention. Devices
    along `model` add up the residual stream twice in a layer, and gather it twice, beside none."""
    hidden, layers, tokens, chip = 3584, 24, 4096, CHIPS["TPU v5e"]
    weights = hidden * (2 * hidden + 2 * 512 + 3 * 18944)
    products = tokens * layers * (2 * weights + 2 * 2 * hidden * 2048 / 2) / chip.flops
    exchanges = 4 * layers * 2 * 4 * tokens * hidden * 3 / 4 / (2 * 45e9)
    for mesh, sent in (("4 --mesh_axes data", 0), ("1,4 --mesh_axes data,model", exchanges)):
        flags = f"--mesh_shape {mesh} --max_seq_length 2048"
        *_, found = planned("v5e-4", "Qwen/Qwen2.5-7B", flags)["meshes"]
        assert found["step_ms"] == pytest.approx(1e3 * (products + sent), rel=0.03)
        slow, fast = products / 0.4 + sent / 0.6, products / 0.7 + sent / 0.9
        speeds = [0.99 * 4 * tokens / seconds for seconds in (slow, fast)]
        assert found["tokens_per_second"] == pytest.approx(speeds, rel=0.03)
        assert found["binds"] == "products" or sent


def test_the_host_binds_if_it_gets_more_than_it_can_store(planned, monkeypatch):
    (quick,) = planned("v5e:8x8", "7B")["meshes"]
    monkeypatch.setattr(estimate, "pack_rate", lambda *_: (2e7, 0.8))
    slow = MACHINES["v5e"]._replace(network=1e8)
    monkeypatch.setitem(MACHINES, "v5e", slow)
    # 14 hooks of 3,584 numbers of 2 bytes, of the 8 * 2,048 tokens of each host
    tokens, cores = 8 * 2048, 4 * slow.cores
    stored = 14 * 3584 * 2 * tokens
    packed, sent = stored / (2e7 * cores), 0.8 * stored / (4 * 1e8)
    for flags, binds, seconds in (
        ("", "host", packed),
        ("--upload_to_gcs --gcs_bucket b", "upload", sent),
        ("--layers_to_extract 12", "products", None),
    ):
        (found,) = planned("v5e:8x8", "7B", flags)["meshes"]
        assert found["binds"] == binds
        if seconds is not None:
            assert found["step_ms"] == quick["step_ms"]  # of the devices alone
            expected = [0.99 * 16 * tokens / seconds * share for share in BINDS[binds][1]]
            assert found["tokens_per_second"] == pytest.approx(expected)


def test_what_json_has(planned):
    found = planned("v5e-64", "0.5B", "--max_tokens 1000000000 --mesh_type 2d")
    assert list(found) == KEYS and all(list(mesh) == MESH for mesh in found["meshes"])
    assert [mesh["shape"] for mesh in found["meshes"]] == [{"data": 64}, {"data": 16, "model": 4}]
    for mesh in found["meshes"]:
        low, high = mesh["tokens_per_second"]
        assert 0 < low < high and mesh["binds"] in BINDS and mesh["compiled_gb"] is None
        assert 0 < mesh["memory_gb"] < 16 and mesh["fits"] is True
    low, high = found["hours"]
    slow, fast = found["best"]["tokens_per_second"]
    assert (low, high) == pytest.approx((1e9 / fast / 3600, 1e9 / slow / 3600))
    on_demand, spot = MACHINES["v5e"].dollars
    assert found["dollars"] == pytest.approx([low * 64 * spot, high * 64 * on_demand])
    assert found["terabytes"] == pytest.approx(14 * 896 * 2 * 1e9 / 1e12)
    given = planned("v5e-64", "0.5B", "--max_tokens 1000000000 --chip_hour_dollars 2,0.5")
    low, high = given["hours"]
    assert given["dollars"] == pytest.approx([low * 64 * 0.5, high * 64 * 2])
    # Nothing says how much data there is.
    found = planned("h100", "0.5B", "--dataset_path texts.jsonl")
    assert found["hours"] is found["dollars"] is found["terabytes"] is None
    assert found["best"]["shape"] == {"data": 1}


def test_flags_change_what_is_stored(planned):
    flags = ("v5e-4", "0.5B", "--layers_to_extract 3 --max_samples 1000")
    every = planned(*flags)["terabytes"]
    assert every == pytest.approx(827_781 * 896 * 2 / 1e12, rel=1e-3)
    for more, share in (("--positions every:8", 1 / 8), ("--activation_dtype float8", 900 / 1792)):
        assert planned(*flags, more)["terabytes"] == pytest.approx(every * share, rel=0.01)


def test_the_words(said):
    text = said("v5e:8x8", "Qwen/Qwen2.5-72B", "--max_samples", 1000, "--mesh_shape", "64",
                "--mesh_axes", "data")  # fmt: skip
    for words in (
        r"^v5e:8x8: 64 chips on 16 hosts, each of which feeds 8 rows of 2,048 tokens per step$",
        r"^mesh data \d+ x fsdp \d+: fits; GB per device: .*, bound by matrix products$",
        r"^mesh data 64: does not fit; GB per device: ",
        r"^hours: [\d.]+ to [\d.]+$",
        r"^terabytes: 0.19$",
    ):
        assert re.search(words, text, re.M), words


BAD = """
--plan v5x:8x8 => --plan v5x:8x8: there are machines of v4, v5e
--plan v5e => --plan v5e: no such size; there are v5e-1 (v5e:1x1), v5e-4 (v5e:2x2)
--plan h100-12 => --chips_per_host 8: its chips divide among hosts of 1, 2, 3, 4, 6, 12
--chips_per_host 4 => --chips_per_host: needs --plan
--plan v5e-4 --model_path Qwen/Qwen3-8B-FP8x => --model_path Qwen/Qwen3-8B-FP8x
--plan v5e-4 --mesh_shape 3,2 => --mesh_shape 3,2: is 6 devices, there are 4
--plan h100-8 --mesh_shape 2,4 --mesh_axes pipeline,data => --plan has no formula for a pipeline
"""


def test_bad_input(said, capsys, tmp_path):
    for line in BAD.strip().splitlines():
        flags, named = line.split(" => ")
        assert main(*flags.split(), "--output_dir", tmp_path / "new" / "out") == 2
        out, err = capsys.readouterr()
        last = err.splitlines()[-1]
        assert out == "" and last.startswith("error: ") and named in last
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "code,gigabytes,fits,logged",
    [
        ("print('libtpu says hello'); print(3e9)", 3.0, True, ""),
        ("print(15e9)", 15.0, False, ""),  # of 16, of which a run may fill 90 %
        ("print('\"RESOURCE_EXHAUSTED: no room\"')", None, False, "RESOURCE_EXHAUSTED: no room"),
        ("import os; os.abort()", None, True, "the compiler failed with status -6"),
    ],
)
def test_what_the_compiler_says_counts(
    monkeypatch, tmp_path, capsys, code, gigabytes, fits, logged
):
    """Other code is in the place of the process that compiles; it is asked for TPUs alone."""
    run = subprocess.run

    def instead(command, **options):
        return run([sys.executable, "-c", code], **options)

    monkeypatch.setattr(estimate, "find_spec", lambda name: True)
    monkeypatch.setattr(subprocess, "run", instead)
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["0.5B"]))
    assert main("--plan", "v5e-4", "--model_path", tmp_path, "--json") == 0
    out, err = capsys.readouterr()
    (mesh,) = json.loads(out)["meshes"]
    assert (mesh["compiled_gb"], mesh["fits"]) == (gigabytes, fits)
    assert logged in err and mesh["memory_gb"] < 5
    if gigabytes:
        assert main("--plan", "h100-4", "--model_path", tmp_path) == 0
        assert "compil" not in capsys.readouterr().err


def test_how_much_data_there_is_and_how_much_of_it_is_kept():
    """Lengths are log-normal; the averages are those of random documents. The default data set has
    9.67 million of them, cut to 2,048 tokens."""
    drawn = np.random.default_rng(0).lognormal(np.log(620), 1, 100_000)
    cut = np.minimum(drawn, 2048)
    every, of_a_piece = 9_672_101 * cut.mean(), drawn.sum() / np.ceil(drawn / 1000).sum()
    for flags, tokens, kept in (
        ("--total_machines 4", every / 4, 1),
        ("--max_samples 100000000", every, 1),  # there are no more
        ("--max_samples 1000 --max_tokens 5000", 5000, 1),
        ("--max_tokens 1000 --positions last", 1000 * cut.mean(), 1 / cut.mean()),
        # Pieces of documents are samples.
        ("--long_documents split --max_seq_length 1000 --max_samples 500", 500 * of_a_piece, 1),
    ):
        found = data_size(parse_args(flags.split()))
        assert found == pytest.approx((tokens, kept), rel=0.02), flags


@pytest.mark.parametrize(
    "name,known_as,hosts,chips,devices",
    [
        ("v5litepod-64", "v5e:8x8", 16, 64, 64),
        ("v4-32", "v4:2x2x4", 4, 16, 16),  # names of v4 and v5p count cores
        ("tpu7x-16", "tpu7x:2x2x2", 2, 8, 16),  # its chips are two devices each
        ("h100-16", "h100-16", 2, 16, 16),
        ("v5e:8x8/16", "v5e:8x8", 4, 64, 64),  # after the slash: --chips_per_host
    ],
)
def test_machines(name, known_as, hosts, chips, devices):
    name, _, per_host = name.partition("/")
    found = topology_of(name, int(per_host) if per_host else None)
    assert (found.name, found.hosts, found.chips) == (known_as, hosts, chips)
    of_host = Counter(device.process_index for device in found.described())
    assert [*of_host.values()] == [devices // hosts] * hosts
