"""`--plan_png`: draws a plan as one PNG image, with a row for each of its meshes.

The memory of a device is at the left, the times of a step are at the right. The image is opaque, so
that it can be read on a white page and on a dark one. It needs matplotlib, imported only to draw.
"""

import io
import os
import textwrap
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import visible
from activation_extraction.model.devices import USABLE
from activation_extraction.model.mesh import in_words
from activation_extraction.run.mesh_plan import FILLED, MeshPlan
from activation_extraction.run.plan import Plan
from activation_extraction.run.plan_view import TIMES, number
from activation_extraction.store.local_files import write_bytes
from activation_extraction.store.patience import reason_of

PAGE, INK, GRID = "#fafbfc", "#1f2733", "#dfe4ea"
STYLE: dict[Any, Any] = {
    **{"font.family": "DejaVu Sans", "font.size": 10, "text.color": INK, "text.usetex": False},
    **{"text.parse_math": False, "legend.frameon": False, "legend.fontsize": 9},
    **{"figure.facecolor": PAGE, "axes.facecolor": PAGE, "savefig.facecolor": "auto"},
    **{"axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.formatter.useoffset": False},
    **{"axes.grid": True, "axes.grid.axis": "x", "axes.axisbelow": True, "grid.color": GRID},
    **{"savefig.bbox": None, "figure.constrained_layout.wspace": 0.03},
    **{"figure.constrained_layout.w_pad": 0.15, "figure.constrained_layout.h_pad": 0.12},
}
MEMORY = {
    "weights": "#4b3f8f",
    "working memory": "#8f82d3",
    "activations of two steps": "#c9c1ef",
}
COLORS = {
    "products": "#1769aa",
    "hbm": "#e08a00",
    "sent": "#c2478f",
    "copy": "#4fb3e8",
    "host": "#12876a",
    "upload": "#c8431f",
}
FRAME: dict[str, Any] = {"edgecolor": INK, "linewidth": 0.8}
WAITS = 1.005  # a step gets a frame if it is this many times as long as its longest part
PALE = 0.35  # the opacity of a mesh that does not fit
WIDTH, ROW, AROUND = 12.0, 0.95, 2.3  # of the image, of a mesh's row and around the rows, in inches
LONGEST_NAME, LONGEST_TITLE = 24, 100  # characters of a line
# A bar is cut if it is longer than these, in memories of a device and in steps of the best mesh.
MOST_MEMORY, MOST_TIME = 2.0, 5.0


def check_picture(path: str) -> None:
    """Raises InputError if no picture can be drawn, or none can be written to this path."""
    if find_spec("matplotlib") is None:
        how = "in the folder of the checkout run: pip install -e '.[plan]'"
        raise InputError(f"--plan_png: needs matplotlib; {how}")
    target = Path(path)
    if target.suffix.lower() != ".png":
        raise InputError(f"--plan_png {path}: expected a name that ends in .png")
    if os.path.isdir(target) or not os.path.isdir(target.parent):
        raise InputError(f"--plan_png {path}: expected a file in a folder that exists")


def draw_plan(plan: Plan, path: str) -> None:
    """Writes the picture. Raises InputError if it cannot be written."""
    import matplotlib
    from matplotlib.figure import Figure

    image, height = io.BytesIO(), AROUND + ROW * len(plan.meshes)
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # A model's name may have letters that the font lacks.
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        figure = Figure((WIDTH, height), dpi=150, layout="constrained", linewidth=2, edgecolor=GRID)
        figure.suptitle(_title(plan), x=0.0125, ha="left", weight="bold", linespacing=1.4)
        left, right = figure.subplots(1, 2, sharey=True)
        _draw_memory(left, plan)
        _draw_times(right, plan)
        _name_rows(left, plan)
        figure.savefig(image, format="png", edgecolor=figure.get_edgecolor())
    try:
        write_bytes(Path(path), image.getvalue())
    except OSError as error:
        raise InputError(f"--plan_png {path}: {reason_of(error)[0]}") from error


def _title(plan: Plan) -> str:
    """Returns two lines: the machine and the model. Of a long line, the end remains."""
    model = "the model of --demo" if plan.config.demo else visible(plan.config.model_path)
    lines = f"An estimate for {visible(plan.machine.name)}", model
    return "\n".join(
        line if len(line) <= LONGEST_TITLE else f"...{line[3 - LONGEST_TITLE :]}" for line in lines
    )


def _name_rows(panel: Any, plan: Plan) -> None:
    """Writes the meshes beside their rows."""
    panel.set_yticks(range(len(plan.meshes)), [_name(plan, mesh) for mesh in plan.meshes])
    panel.set_ylim(len(plan.meshes) - 0.5, -0.5)
    for mesh, label in zip(plan.meshes, panel.get_yticklabels(), strict=True):
        label.set(weight="bold" if mesh is plan.best else "normal", alpha=1 if mesh.fits else 0.6)


def _name(plan: Plan, mesh: MeshPlan) -> str:
    whole = (
        in_words(mesh.layout.shape).replace(" x ", "\n").replace(" ", "\u00a0").replace("\n", " x ")
    )
    lines = textwrap.wrap(whole, LONGEST_NAME)
    if mesh is plan.best:
        lines.append("\u2605 the best")
    elif not mesh.fits:
        lines.append("does not compile" if mesh.fails else "does not fit")
    return "\n".join(lines)


def _draw_memory(panel: Any, plan: Plan) -> None:
    """Draws what a device holds, one part after the other, and how much memory it has."""
    from matplotlib.patches import Patch

    room, totals = plan.machine.chip.memory, [sum(mesh.memory) for mesh in plan.meshes]
    end = min(max(*totals, room), MOST_MEMORY * room or max(totals))
    for row, (mesh, total) in enumerate(zip(plan.meshes, totals, strict=True)):
        start = 0.0
        for size, color in zip(mesh.memory, MEMORY.values(), strict=True):
            stop = min(start + size, end)
            _bar(panel, row, 0.5, start / 1e9, stop / 1e9, color, mesh)
            start = stop
        _say_length(panel, row, total / 1e9, end / 1e9, mesh)
    keys = [Patch(color=color, label=name) for name, color in MEMORY.items()]
    if room:
        name = f"what a run may fill of it ({USABLE:.0%})"
        keys += [
            panel.axvline(room / 1e9, color=INK, linewidth=1.6, label="memory of a device"),
            panel.axvline(USABLE * room / 1e9, color=INK, linestyle="--", label=name),
        ]
    _finish(panel, end / 1e9, "memory per device, GB", keys, 2)


def _draw_times(panel: Any, plan: Plan) -> None:
    """Draws the times of a step: a thick bar for what binds it, thin ones below it for the rest.

    A frame shows the whole step if it is longer, because one part waits for another.
    """
    from matplotlib.patches import Patch

    times = [
        {name: seconds / plan.machine.shares[name][1] for name, seconds in mesh.seconds.items()}
        for mesh in plan.meshes
    ]
    steps = [mesh.tokens * FILLED / mesh.tokens_per_second[1] for mesh in plan.meshes]
    end = min(max(steps), MOST_TIME * steps[0])
    unit, scale = ("s", 1.0) if end >= 10 else ("ms", 1e3)
    drawn = [name for name in TIMES if any(name in each for each in times)]
    for row, (mesh, each, step) in enumerate(zip(plan.meshes, times, steps, strict=True)):
        others = [name for name in drawn if name != mesh.binds]
        longest, whole = (min(x, end) * scale for x in (each[mesh.binds], step))
        _bar(panel, row - 0.2, 0.34, 0, longest, COLORS[mesh.binds], mesh)
        if whole > WAITS * longest:
            _bar(panel, row - 0.2, 0.34, 0, whole, "none", mesh, **FRAME)
        for lane, name in enumerate(others):
            stop = min(each.get(name, 0.0), end) * scale
            _bar(panel, row + 0.045 + 0.085 * lane, 0.07, 0, stop, COLORS[name], mesh)
        _say_length(panel, row - 0.2, step * scale, end * scale, mesh)
    keys = [Patch(color=COLORS[name], label=TIMES[name]) for name in drawn]
    keys.append(Patch(facecolor="none", label="the whole step, if longer", **FRAME))
    label = f"time of a step at best, {unit} (thick: what binds it)"
    _finish(panel, end * scale, label, keys, 3)


def _bar(
    panel: Any,
    middle: float,
    height: float,
    start: float,
    stop: float,
    color: str,
    mesh: MeshPlan,
    **edge: Any,
) -> None:
    alpha = 1 if mesh.fits else PALE
    panel.barh(middle, stop - start, height, start, color=color, alpha=alpha, **edge)


def _say_length(panel: Any, middle: float, length: float, end: float, mesh: MeshPlan) -> None:
    """Writes how long a bar is at its end, with an arrow if it is cut."""
    cut = length > end * (1 + 1e-9)
    text = panel.annotate(
        (number(length) if length < 1e6 else f"{length:.1e}") + " \u2192" * cut,
        (min(length, end), middle),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        alpha=1 if mesh.fits else 0.6,
    )
    text.set_bbox({"facecolor": PAGE, "edgecolor": "none", "pad": 1, "alpha": 0.85})


def _finish(panel: Any, end: float, label: str, keys: list[Any], columns: int) -> None:
    """Gives a panel its scale, and a legend above it."""
    from matplotlib.ticker import MaxNLocator

    panel.set_xlim(0, end * 1.15)
    panel.set_xlabel(label)
    panel.xaxis.set_major_locator(MaxNLocator(6))
    panel.xaxis.set_major_formatter("{x:,.6g}")
    panel.tick_params(axis="y", length=0)
    panel.legend(handles=keys, loc="lower left", bbox_to_anchor=(0, 1.01), ncols=columns)
