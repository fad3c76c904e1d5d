"""`--plan_png`: the picture of a plan. No program is compiled: its meshes are made of numbers."""

import json
from dataclasses import replace

import matplotlib.image
import pytest
from command_line import main

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import InputError
from activation_extraction.model.automatic_mesh import Sent, StepMemory
from activation_extraction.model.step_plan import StepPlan
from activation_extraction.model.topologies import topology_of
from activation_extraction.run import plan_picture
from activation_extraction.run.data_size import data_size
from activation_extraction.run.make_plan import layout_of
from activation_extraction.run.mesh_plan import Machine, MeshPlan
from activation_extraction.run.plan import Plan
from activation_extraction.run.plan_picture import check_picture, draw_plan
from activation_extraction.run.rented import Price, host_of
from activation_extraction.store.pack_rate import PackRate

STEP = StepPlan(
    flops=30e12,
    kernel=0.0,
    hbm=90e9,
    sent=(Sent(("fsdp",), 14e9, 7e9),),
    memory=StepMemory(7.6e9, 2.4e9, 1.1e9),
)
LARGE = replace(STEP, memory=StepMemory(145e9, 40e9, 9e9))
TINY = StepPlan(1e3, 0.0, 1e3, (), StepMemory(10.0, 1.0, 1.0))
LONG = {"data": 4, "fsdp": 4, "expert": 4, "model": 2}


def plan_of(*steps, model="Qwen/Qwen2.5-7B", memory=16e9, fails=""):
    """Returns a plan with a mesh for each step, in this order."""
    topology = topology_of("v5e:4x4")
    chip = topology.chip._replace(memory=memory)
    host, pack = host_of(topology.kind, 8), PackRate(0.25e9, 0.8)
    devices, hosts = topology.described(), topology.hosts
    machine = Machine(topology.name, devices, 16, hosts, chip, False, host, pack)
    layout = layout_of(LONG, 4)
    meshes = [MeshPlan(machine, layout, step, 16, 2**16, 28000, 1, True, fails) for step in steps]
    config = parse_args(["--plan", topology.name, "--model_path", "a"])
    config = replace(config, model_path=model)
    price, data = Price(None, None), data_size(config)
    return Plan(config, machine, meshes, meshes[0], data, [28_000], {}, 1e9, price, (24, 28))


def drawn(plan, tmp_path):
    """Returns the pixels: rows, columns, RGBA from 0 to 1."""
    path = tmp_path / "plan.png"
    draw_plan(plan, str(path))
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [*tmp_path.iterdir()] == [path]
    return matplotlib.image.imread(path)


def has_color(pixels, color):
    wanted = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return bool((abs(pixels[..., :3] - wanted).max(axis=2) < 1e-3).sum() > 1000)


@pytest.mark.parametrize("count", [1, 3, 4])
def test_every_mesh_has_a_row_on_an_opaque_page(count, tmp_path):
    pixels = drawn(plan_of(*[STEP] * count), tmp_path)
    height, width, _ = pixels.shape
    assert width == 1800 and 400 < height < 1000 and (pixels[..., 3] == 1).all()
    more = drawn(plan_of(*[STEP] * (count + 1)), tmp_path)
    assert more.shape[0] > height and more.shape[1] == width
    assert has_color(pixels, plan_picture.COLORS["sent"])  # what binds
    assert all(has_color(pixels, color) for color in plan_picture.MEMORY.values())


def test_what_does_not_fit_is_pale(tmp_path):
    """The legend alone has fewer pixels of a color than `has_color` asks for."""
    dark = plan_picture.MEMORY["weights"]
    assert has_color(drawn(plan_of(STEP), tmp_path), dark)
    assert not has_color(drawn(plan_of(LARGE), tmp_path), dark)
    assert not has_color(drawn(plan_of(STEP, fails="the compiler crashed"), tmp_path), dark)
    assert has_color(drawn(plan_of(STEP, LARGE), tmp_path), dark)


@pytest.mark.parametrize("memory", [16e9, 0.0, 1e15])
def test_sizes_far_apart_can_be_drawn(memory, tmp_path):
    """A memory of 0 is one that nobody knows."""
    drawn(plan_of(TINY, STEP, LARGE, memory=memory), tmp_path)


@pytest.mark.parametrize(
    "model", ["$\\frac{$", "$\\frac{", "ä漢\x1b[2J\u202e\n\udcff", "x" * 5000, ""]
)
def test_any_name_of_a_model_can_be_drawn(model, tmp_path):
    drawn(plan_of(STEP, model=model), tmp_path)


def test_bad_paths_are_refused(tmp_path, monkeypatch):
    (tmp_path / "folder.png").mkdir()
    check_picture(str(tmp_path / "a.png"))
    for name, said in {
        "folder.png": "a file in a folder that exists",
        "no/a.png": "a file in a folder that exists",
        "~nobody/a.png": "a file in a folder that exists",
        "a.jpg": "ends in .png",
        "": "ends in .png",
    }.items():
        with pytest.raises(InputError, match=said):
            check_picture(name if name.startswith("~") else str(tmp_path / name))
    monkeypatch.setattr(plan_picture, "find_spec", {"matplotlib": None}.get)
    with pytest.raises(InputError, match=r"needs matplotlib; .* pip install -e '.\[plan\]'"):
        check_picture(str(tmp_path / "a.png"))


def test_a_failing_disk_is_one_line(tmp_path):
    with pytest.raises(InputError, match=r"^--plan_png .*no/a.png: .*No such file"):
        draw_plan(plan_of(STEP), str(tmp_path / "no" / "a.png"))


def test_the_command_line_draws(tmp_path, capsys, monkeypatch):
    """It looks at the path before anything is compiled."""
    path, plan = tmp_path / "plan.png", plan_of(STEP)
    flags = ["--plan", "v5e:4x4", "--demo", "--output_dir", tmp_path / "out", "--json"]
    flags += ["--plan_png"]
    monkeypatch.setattr("extract_activations.make_plan", lambda config, families: plan)
    assert main(*flags, path) == 0
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["machine"] == "v5e:4x4" and path.stat().st_size > 10_000
    assert f"picture: {path}\n" in err
    monkeypatch.setattr("extract_activations.make_plan", None)
    assert main(*flags, tmp_path) == 2
    assert capsys.readouterr().err.startswith(f"error: --plan_png {tmp_path}: expected a name")
