"""`--plan`: what it says of runs whose answers are known, of which machines, and what it refuses.

Most tests estimate by formula alone, as where libtpu is not installed; tests/test_tpu.py has the
compiler's plans.
"""

import json
import re
from collections import Counter

import pytest
from command_line import main

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import InputError
from activation_extraction.model.devices import CHIPS
from activation_extraction.run import estimate
from activation_extraction.run.estimate import (
    GUESSED_FRACTIONS,
    TokenCounts,
    hours_phrase,
    token_counts_of,
)
from activation_extraction.run.topologies import topology_of
from benchmarks.inputs import SHAPES

KEYS = ["meshes", "best", "hours", "dollars", "terabytes"]
MESH = ["shape", "fits", "memory_gb", "compiled_gb", "step_ms", "tokens_per_second"]


@pytest.fixture
def said(monkeypatch, tmp_path, capsys):
    """Returns a function that estimates a run of a model, by its shape or its name, and returns
    what is printed. Nothing is compiled."""
    monkeypatch.setattr(estimate, "find_spec", lambda name: None)

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
    products = tokens * layers * (2 * weights + 2 * 2 * hidden * 2048 / 2) / chip.flops_per_second
    exchanges = 4 * layers * 2 * 4 * tokens * hidden * 3 / 4 / (2 * 45e9)
    for mesh, sent in (("4 --mesh_axes data", 0), ("1,4 --mesh_axes data,model", exchanges)):
        flags = f"--mesh_shape {mesh} --max_seq_length 2048"
        *_, found = planned("v5e-4", "Qwen/Qwen2.5-7B", flags)["meshes"]
        assert found["step_ms"] == pytest.approx(1e3 * (products + sent), rel=0.03)
        speed = 4 * tokens / (products + sent)
        expected = [fraction * speed for fraction in GUESSED_FRACTIONS]
        assert found["tokens_per_second"] == pytest.approx(expected, rel=0.03)


def test_what_json_has(planned):
    found = planned("v5e-64", "0.5B", "--max_tokens 1000000000 --mesh_type 2d")
    assert list(found) == KEYS and all(list(mesh) == MESH for mesh in found["meshes"])
    assert [mesh["shape"] for mesh in found["meshes"]] == [{"data": 64}, {"data": 16, "model": 4}]
    for mesh in found["meshes"]:
        low, high = mesh["tokens_per_second"]
        assert 0 < low < high and mesh["compiled_gb"] is None
        assert 0 < mesh["memory_gb"] < 16 and mesh["fits"] is True
    low, high = found["hours"]
    slow, fast = found["best"]["tokens_per_second"]
    assert (low, high) == pytest.approx((1e9 / fast / 3600, 1e9 / slow / 3600))
    assert found["dollars"] is None  # no price is known
    assert found["terabytes"] == pytest.approx(14 * 896 * 2 * 1e9 / 1e12)
    given = planned("v5e-64", "0.5B", "--max_tokens 1000000000 --chip_hour_dollars 2,0.5")
    low, high = given["hours"]
    assert given["dollars"] == pytest.approx([low * 64 * 0.5, high * 64 * 2])
    # Nothing says how much data there is.
    found = planned("h100", "0.5B", "--dataset_path texts.jsonl --chip_hour_dollars 2")
    assert found["hours"] is found["dollars"] is found["terabytes"] is None
    assert found["best"]["shape"] == {"data": 1}


def test_a_measured_speed_gives_one_time_and_one_cost(planned, said):
    """The speed is that of each host, in stored tokens; every:2 stores half of them."""
    flags = "--max_samples 1000 --positions every:2 --tokens_per_second 5000 --chip_hour_dollars 3"
    hours = 500_000 / (5000 * 16) / 3600
    found = planned("v5e:8x8", "0.5B", flags)
    assert found["hours"] == pytest.approx([hours, hours])
    assert found["dollars"] == pytest.approx([64 * 3 * hours] * 2)
    text = said("v5e:8x8", "0.5B", *flags.split())
    assert "time: under a minute, at 5,000 stored tokens per second and host" in text
    assert "\ncost: $0.33\n" in text and "guess" not in text


def test_flags_change_what_is_stored(planned):
    flags = ("v5e-4", "0.5B", "--layers_to_extract 3 --max_samples 1000")
    every = planned(*flags)["terabytes"]
    assert every == pytest.approx(1000 * 1000 * 896 * 2 / 1e12)
    float8 = "--activation_dtype float8 --shard_format safetensors"
    for more, share in (("--positions every:8", 1 / 8), (float8, 900 / 1792)):
        assert planned(*flags, more)["terabytes"] == pytest.approx(every * share, rel=0.01)


def test_the_words(said):
    text = said("v5e:8x8", "Qwen/Qwen2.5-72B", "--max_samples", 1000, "--mesh_shape", "64",
                "--mesh_axes", "data")  # fmt: skip
    for words in (
        r"^v5e:8x8: 64 chips on 16 hosts, each of which feeds 8 rows of 2,048 tokens per step$",
        r"^mesh data \d+ x fsdp \d+: fits \([\d.]+ GB per device by formula\); [\d,.]+ ms per step",
        r"^mesh data 64: does not fit ",
        r"^time: under a minute(?: to [\d.]+ minutes)?; a guess, which assumes .* 15% to 70% of",
        r"^stored: 229 GB before compression, 229,376 bytes per token; a sample is taken to have",
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
    "answer,gigabytes,fits",
    [
        (3e9, 3.0, True),
        (15e9, 15.0, False),  # of 16, of which a run may fill 90 %
        (InputError("RESOURCE_EXHAUSTED: no room"), None, False),
        (InputError("the compiler does not say"), None, True),
    ],
)
def test_what_the_compiler_says_counts(monkeypatch, planned, capsys, answer, gigabytes, fits):
    """Another function is in the place of the compiler, which is asked for TPUs alone."""

    def instead(*_):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(estimate, "bytes_of_compiled_step", instead)
    (mesh,) = planned("v5e-4", "0.5B")["meshes"]
    assert (mesh["compiled_gb"], mesh["fits"]) == (gigabytes, fits)
    assert mesh["memory_gb"] < 5
    (mesh,) = planned("h100-4", "0.5B")["meshes"]
    assert mesh["compiled_gb"] is None and mesh["fits"]


def test_how_much_data_there_is_and_how_much_of_it_is_kept():
    """A document has 1,000 tokens; the default data set has 9.67 million of them."""
    every = 9_672_101 * 1000
    for flags, computed, stored in (
        ("--total_machines 4", every / 4, every / 4),
        ("--max_samples 100000000", every, every),  # there are no more
        ("--max_samples 1000 --max_tokens 5000", 5000, 5000),
        ("--max_samples 10 --max_seq_length 256", 2560, 2560),
        ("--max_tokens 1000 --positions last", 1_000_000, 1000),
        ("--long_documents split --max_seq_length 100", every, every),
    ):
        assert token_counts_of(parse_args(flags.split())) == TokenCounts(computed, stored), flags
    assert token_counts_of(parse_args(["--dataset_path", "texts.jsonl"])) is None


@pytest.mark.parametrize(
    "hours,words",
    [
        (1e-6, "under a minute"),
        (1 / 60, "1 minute"),
        (0.36, "22 minutes"),
        (1.04, "1 hour"),
        (28.3, "28 hours"),
        (100, "4.2 days"),
        (1e5, "4,200 days"),
    ],
)
def test_a_time_is_told_as_people_say_it(hours, words):
    assert hours_phrase(hours) == words


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
    assert (found.name, found.num_hosts, found.num_chips) == (known_as, hosts, chips)
    of_host = Counter(device.process_index for device in found.describe_devices())
    assert [*of_host.values()] == [devices // hosts] * hosts
