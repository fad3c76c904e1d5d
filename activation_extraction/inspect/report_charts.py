"""Draws the charts of a report as SVG images, which contain no text from the stored data."""

import io
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from activation_extraction.inspect.report_numbers import OTHER, SHARES, HookReport

STYLE: dict[Any, Any] = {
    **{"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 11, "legend.frameon": False},
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": "#e3e7ec", "lines.linewidth": 1.4},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.formatter.useoffset": False},
    **{"figure.facecolor": "none", "axes.facecolor": "none", "figure.figsize": (6.0, 3.5)},
}
BLUE, RED, GREY = "#1f5fbf", "#c2410c", "#5a6573"
LOG_FROM = 20.0  # if the largest value is more times the smallest one, the scale is logarithmic


def _image(draw: Callable[..., None]) -> Callable[..., str]:
    """Turns a function that draws on axes into one that returns the image as a data URL."""

    def image(*content: Any) -> str:
        with matplotlib.rc_context(STYLE):
            figure, out = Figure(layout="constrained"), io.BytesIO()
            axes = figure.add_subplot()
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
            axes.yaxis.set_major_formatter("{x:,.6g}")
            draw(axes, *content)
            figure.savefig(out, format="svg", metadata={"Date": None})
        return f"data:image/svg+xml;base64,{b64encode(out.getvalue()).decode()}"

    return image


@_image
def norms_by_layer(axes: Axes, hooks: Sequence[HookReport]) -> None:
    """Draws quantiles of the norms, and the largest norm, for hooks of one kind."""
    layers, levels = [hook.layer for hook in hooks], np.transpose([hook.norms for hook in hooks])
    axes.vlines(layers, levels[0], levels[4], color=BLUE, linewidth=1.2, alpha=0.55)
    axes.vlines(layers, levels[1], levels[3], color=BLUE, linewidth=4.5, alpha=0.55)
    axes.plot(layers, levels[2], "o", color=BLUE, markersize=4.5)
    axes.plot(layers, levels[5], "x", color=RED, markersize=4.5)
    axes.set(xlabel=_label(hooks), ylabel="norm")
    _norm_scale(axes, levels)


@_image
def norms_by_position(axes: Axes, hooks: Sequence[HookReport], starts: Sequence[int]) -> None:
    """Draws the median norm by position, with a line for each hook of one kind."""
    for color, hook in zip(_colors(axes, hooks), hooks, strict=True):
        axes.plot(hook.by_position, ".-", color=color)
    axes.set(xlabel="position in the document", ylabel="median norm")
    axes.set_xticks(range(len(starts)), [str(start) for start in starts])
    _norm_scale(axes, np.stack([hook.by_position for hook in hooks]))


@_image
def variance_explained(axes: Axes, hooks: Sequence[HookReport]) -> None:
    """Draws the share of the variance in the first n directions, for hooks of one kind."""
    for color, hook in zip(_colors(axes, hooks), hooks, strict=True):
        at = np.unique(np.geomspace(1, len(hook.shares), 40).round().astype(int))
        axes.plot(at, np.cumsum(hook.shares)[at - 1], color=color)
    axes.set(xlabel="leading directions", ylabel="share of the variance", xscale="log")
    axes.set_ylim(0, 1.03)
    axes.xaxis.set_major_formatter("{x:,.6g}")
    axes.yaxis.set_major_formatter("{x:.0%}")


@_image
def directions_needed(axes: Axes, hooks: Sequence[HookReport]) -> None:
    """Draws how many directions have certain shares of the variance, for hooks of one kind."""
    for number, (share, color) in enumerate(zip(SHARES, (RED, BLUE, GREY), strict=True)):
        needed = [hook.directions[number] for hook in hooks]
        axes.plot([h.layer for h in hooks], needed, ".-", color=color, label=f"{share:.0%}")
    axes.set(xlabel=_label(hooks), ylabel="directions needed", ylim=0)
    axes.figure.legend(loc="outside upper center", ncols=3)


@_image
def document_lengths(axes: Axes, lengths: Sequence[int], row: int, mean: float) -> None:
    """Draws a histogram of lengths up to `row`, and the mean of the whole run."""
    axes.hist(lengths, min(max(len(lengths) // 5, 8), 40), range=(0, row), color=BLUE, alpha=0.75)
    axes.axvline(mean, color=RED)
    axes.set(xlabel="tokens per document", ylabel="documents", xlim=(0, row))


@_image
def throughput_over_time(
    axes: Axes, edges: np.ndarray, rates: np.ndarray, pauses: np.ndarray
) -> None:
    """Draws the tokens per second of all hosts together, with a line where a pause is left out."""
    factor, unit = (3600, "hours") if edges[-1] >= 7200 else (60, "minutes")
    axes.stairs(rates, edges / factor, color=BLUE, fill=True, alpha=0.3)
    for pause in pauses:
        axes.axvline(pause / factor, color=RED, linestyle=":")
    axes.set(xlabel=f"{unit} of work", ylabel="tokens per second", xlim=(0, edges[-1] / factor))


def _label(hooks: Sequence[HookReport]) -> str:
    return "hook, in stored order" if hooks[0].kind == OTHER else "layer"


def _colors(axes: Axes, hooks: Sequence[HookReport]) -> Any:
    """Returns a colour for each hook, and draws a bar at the side that explains them."""
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(hooks)))
    ends = Normalize(hooks[0].layer - 0.5, hooks[-1].layer + 0.5)
    scale, ticks = ScalarMappable(ends, ListedColormap(colors)), MaxNLocator(6, integer=True)
    axes.figure.colorbar(scale, ax=axes, label=_label(hooks), ticks=ticks).ax.grid(False)
    return colors


def _norm_scale(axes: Axes, norms: np.ndarray) -> None:
    """Makes the scale of norms start at 0, or logarithmic if they are very different."""
    axes.set_ylim(bottom=0)
    if 0 < LOG_FROM * norms.min() < norms.max():
        axes.set(yscale="log", ylim=(norms.min() / 1.2, norms.max() * 1.2))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,.6g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
