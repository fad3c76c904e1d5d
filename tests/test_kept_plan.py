"""A plan that was made with the flags of a run is shown beside what the run did."""

import json
import re

import pytest
from command_line import main
from pods import flags_for

from activation_extraction.cli.config import parse_args
from activation_extraction.run.kept_plan import kept_plan
from activation_extraction.run.mesh_plan import BINDS
from activation_extraction.store.folder import Folder
from activation_extraction.store.sealed_json import seal, unseal

PLANNED = r"planned: ([\d,]+) to ([\d,]+) tokens/s on v5e:2x2, mesh data 4, bound by (.*); this "


@pytest.fixture
def flags(demo_inputs, tmp_path):
    return flags_for(demo_inputs, tmp_path / "out", "--max_samples", 20)


@pytest.fixture
def run(flags, tmp_path, capsys):
    """Returns a function that runs with further flags and returns the line about the plan."""

    def run_with(*more):
        capsys.readouterr()
        assert main(*flags, "--overwrite", *more) == 0
        lines = capsys.readouterr().out.splitlines()
        return next((line for line in lines if line.startswith("planned: ")), None)

    return run_with


def test_the_summary_shows_the_plan(flags, run, formulas, tmp_path, capsys):
    assert run() is None
    assert main(*flags, "--plan", "v5e-4", "--json") == 0
    planned = json.loads(capsys.readouterr().out.splitlines()[-1])["best"]
    line = run()
    low, high, bound = re.match(PLANNED, line).groups()
    speeds = [float(text.replace(",", "")) for text in (low, high)]
    assert speeds == pytest.approx(planned["tokens_per_second"], abs=1)
    assert bound == BINDS[planned["binds"]]
    assert re.search(r"this run: [\d,]+ tokens/s, mesh data \d+$", line)
    recorded = json.loads((tmp_path / "out/metadata.json").read_text())["plan"]
    assert recorded["mesh"] == {"data": 4}
    assert run("--log_every", 7) is not None  # this flag does not count
    assert run("--max_seq_length", 32) is None


def test_a_plan_for_which_nothing_fits_is_not_kept(flags, formulas, tmp_path, monkeypatch):
    monkeypatch.setattr("activation_extraction.run.mesh_plan.USABLE", 1e-6)
    assert main(*flags, "--plan", "v5e-4") == 0
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan | {"tokens_per_second": ["<script>", 1]},
        lambda plan: plan | {"tokens_per_second": [1e300, 1]},
        lambda plan: {name: plan[name] for name in plan if name != "mesh"},
        lambda plan: plan | {"machine": ["v5e"]},
    ],
)
def test_a_strange_plan_is_a_warning(flags, formulas, tmp_path, caplog, change):
    assert main(*flags, "--plan", "v5e-4") == 0
    config, root = parse_args(list(map(str, flags))), Folder(str(tmp_path / "out"))
    path = tmp_path / "out/plan.json"
    plan = unseal(path.read_bytes(), "")
    assert kept_plan(config, root) == plan
    for data in (seal(change(plan)), b"{}", path.read_bytes().replace(b"v5e", b"v6e")):
        path.write_bytes(data)
        assert kept_plan(config, root) is None
    assert kept_plan(config, Folder(str(tmp_path / "nothing"))) is None


def test_what_a_plan_says_is_shown_as_text(flags, run, formulas, tmp_path):
    assert main(*flags, "--plan", "v5e-4") == 0
    path = tmp_path / "out/plan.json"
    path.write_bytes(seal(unseal(path.read_bytes(), "") | {"machine": "\x1b[31m<b>"}))
    assert "\\x1b[31m<b>" in run()


def test_what_a_demo_planned_is_what_it_stores(run, tmp_path, capsys):
    """`here` compiles the program of this machine. The bytes are those of the arrays."""
    out = tmp_path / "demo"
    assert main("--demo", "--output_dir", out, "--plan", "here", "--json") == 0
    planned = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert main("--demo", "--output_dir", out, "--max_samples", 5) == 0
    stored = json.loads((out / "metadata.json").read_text())
    size = json.loads((out / "shard_0001.json").read_text())["unpacked"]
    assert size == pytest.approx(planned["bytes_per_token"] * stored["tokens"], rel=0.2)
    widths = sum(hook["width"] * 4 for hook in stored["hooks"])
    assert planned["bytes_per_token"] == widths
