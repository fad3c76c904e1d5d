"""The drawings of a report: each function draws one and returns it as SVG text.

Colours are names of CSS variables, which report.css gives a value for light and for dark pages.
"""

import hashlib
import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from activation_extraction.inspect.report_analysis import Bucket, HookReport, Quantiles
from activation_extraction.inspect.report_run import Lengths, Throughput

WIDTH, HEIGHT = 380, 250  # px at full size; drawings shrink a little on phones
# Colours that nothing else has, and the CSS variables that take their place.
INK, MUTED, GRID, ACCENT, WARM = "#010101", "#010102", "#010103", "#010104", "#010105"
RAMP = tuple(f"#0101{number:02x}" for number in range(0x20, 0x28))
VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", ACCENT: "accent", WARM: "warm"}
VARIABLES |= {color: f"ramp-{number}" for number, color in enumerate(RAMP)}
STYLE: dict[Any, Any] = {
    **{"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 11, "axes.linewidth": 0.8},
    **{"text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED},
    **{"xtick.color": MUTED, "ytick.color": MUTED, "xtick.labelcolor": INK},
    **{"ytick.labelcolor": INK, "axes.spines.top": False, "axes.spines.right": False},
    **{"axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.8, "axes.axisbelow": True},
    **{"figure.facecolor": "none", "axes.facecolor": "none", "legend.frameon": False},
    **{"legend.fontsize": 10, "xtick.labelsize": 10, "ytick.labelsize": 10},
    **{"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"]},
}
SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
LOG_FROM = 20.0  # a larger ratio of the largest to the smallest value is drawn on a log scale


@contextmanager
def _figure(x_label: str, y_label: str) -> Iterator[tuple[Axes, Callable[[], str]]]:
    """Axes to draw on, and the function that gives the drawing as SVG."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
        axes = figure.add_subplot(xlabel=x_label, ylabel=y_label)
        axes.grid(axis="x", visible=False)
        yield axes, lambda: _svg(figure, f"{y_label} by {x_label}")


def norms_by_layer(reports: Sequence[HookReport]) -> str:
    """Hooks of one kind: quantiles of the norms, and the largest one."""
    with _figure(_layer_label(reports), "norm") as (axes, svg):
        layers = _layers(reports)
        norms = [report.norms for report in reports]
        for low, high, width in ((0.01, 0.99, 1.2), (0.25, 0.75, 4.5)):
            ends = [q.at(low) for q in norms], [q.at(high) for q in norms]
            axes.vlines(layers, *ends, color=ACCENT, linewidth=width, alpha=0.55)
        axes.plot(layers, [q.median for q in norms], "o", color=ACCENT, markersize=4.5)
        axes.plot(layers, [q.largest for q in norms], "x", color=WARM, markersize=4.5)
        _norm_scale(axes, norms)
        _whole_layers(axes, layers)
        return svg()


def norms_by_position(reports: Sequence[HookReport], buckets: Sequence[Bucket]) -> str:
    """Hooks of one kind: the median norm by position, a line for each layer."""
    with _figure("position in the document", "median norm") as (axes, svg):
        for color, report in zip(_ramp(len(reports)), reports, strict=True):
            medians = [quantiles.median for quantiles in report.positions]
            axes.plot(medians, color=color, linewidth=1.4, marker=".", label=_name(report))
        _norm_scale(axes, [q for r in reports for q in r.positions], extremes=False)
        _bucket_ticks(axes, buckets)
        _legend(axes, len(reports))
        return svg()


def spread_by_position(report: HookReport, buckets: Sequence[Bucket]) -> str:
    """One hook: quantiles of the norms by position, and the largest ones."""
    with _figure("position in the document", "norm") as (axes, svg):
        at = np.arange(len(buckets))
        for low, high, alpha in ((0.05, 0.95, 0.22), (0.25, 0.75, 0.4)):
            below, above = ([q.at(level) for q in report.positions] for level in (low, high))
            axes.fill_between(at, below, above, color=ACCENT, alpha=alpha, linewidth=0)
        medians = [q.median for q in report.positions]
        axes.plot(at, medians, color=ACCENT, linewidth=1.6, marker="o", markersize=3.5)
        axes.plot(at, [q.largest for q in report.positions], "x", color=WARM, markersize=4.5)
        _norm_scale(axes, report.positions)
        _bucket_ticks(axes, buckets)
        return svg()


def variance_explained(reports: Sequence[HookReport]) -> str:
    """Hooks of one kind: the share of the variance that the first n directions have."""
    with _figure("leading directions", "share of the variance") as (axes, svg):
        for color, report in zip(_ramp(len(reports)), reports, strict=True):
            if report.directions is not None:
                shares = np.cumsum(report.directions.shares)
                at = np.unique(np.geomspace(1, len(shares), 40).round().astype(int))
                label = _name(report)
                axes.plot(at, shares[at - 1], color=color, linewidth=1.4, label=label)
        axes.set(xscale="log", ylim=(0, 1.03))
        axes.xaxis.set_major_formatter(FuncFormatter(_short))
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0%}"))
        _legend(axes, len(reports))
        return svg()


def directions_needed(reports: Sequence[HookReport]) -> str:
    """Hooks of one kind: how many directions it takes, by layer."""
    with _figure(_layer_label(reports), "directions needed") as (axes, svg):
        known = [
            (layer, report.directions)
            for layer, report in zip(_layers(reports), reports, strict=True)
            if report.directions is not None
        ]
        for share, color in ((0.99, RAMP[1]), (0.9, RAMP[4]), (0.5, RAMP[7])):
            needed = [directions.needed(share) for _, directions in known]
            label = f"{share:.0%} of the variance"
            axes.plot([layer for layer, _ in known], needed, ".-", color=color, label=label)
        _room_for_legend(axes)
        _whole_layers(axes, [layer for layer, _ in known])
        axes.legend(loc="upper left", ncols=1, handlelength=1.4)
        return svg()


def document_lengths(lengths: Lengths) -> str:
    """A histogram, with the mean of the whole run."""
    with _figure("tokens per document", "documents") as (axes, svg):
        bins = min(max(len(lengths.sampled) // 5, 8), 40)
        row = (0, lengths.longest_row)
        axes.hist(lengths.sampled, bins, range=row, color=ACCENT, alpha=0.75)
        axes.axvline(lengths.mean, color=WARM, linewidth=1.4)
        axes.set_xlim(0, lengths.longest_row)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        return svg()


def throughput_over_time(found: Throughput) -> str:
    """Tokens per second of all hosts together."""
    hours = found.edges[-1]
    factor, unit = (1, "hours") if hours >= 2 else (60, "minutes") if hours > 0.05 else (3600, "s")
    with _figure(f"{unit} since the start", "tokens per second") as (axes, svg):
        edges = found.edges * factor
        axes.stairs(found.tokens_per_second, edges, color=ACCENT, fill=True, alpha=0.25)
        axes.stairs(found.tokens_per_second, edges, color=ACCENT, linewidth=1.4)
        axes.set(ylim=(0, 1.08 * max(found.tokens_per_second.max(), 1e-9)), xlim=(0, edges[-1]))
        axes.yaxis.set_major_formatter(FuncFormatter(_short))
        return svg()


def _layers(reports: Sequence[HookReport]) -> list[int]:
    """Where each hook is drawn: at its layer, or at its number among those without one."""
    return [
        number if report.layer is None else report.layer for number, report in enumerate(reports)
    ]


def _layer_label(reports: Sequence[HookReport]) -> str:
    return "hook, in stored order" if reports[0].layer is None else "layer"


def _name(report: HookReport) -> str:
    return report.name if report.layer is None else f"layer {report.layer}"


def _ramp(number: int) -> list[str]:
    """Colours from the first hook to the last."""
    return [RAMP[round(i)] for i in np.linspace(0, len(RAMP) - 1, number)]


def _legend(axes: Axes, number: int) -> None:
    """Names the first and the last line, and two in between."""
    handles, labels = axes.get_legend_handles_labels()
    shown = sorted({round(i) for i in np.linspace(0, len(handles) - 1, min(number, 4))})
    if not handles:
        return
    axes.figure.legend(
        [handles[i] for i in shown],
        [labels[i] for i in shown],
        loc="outside upper center",
        ncols=4,
        handlelength=1.1,
        columnspacing=1,
    )


def _norm_scale(axes: Axes, norms: Sequence[Quantiles], extremes: bool = True) -> None:
    """Linear from 0, or a log scale where the norms are very different."""
    low = min(q.at(0.01) if extremes else q.median for q in norms)
    high = max(q.largest if extremes else q.median for q in norms)
    axes.yaxis.set_major_formatter(FuncFormatter(_short))
    if low > 0 and high / low > LOG_FROM:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(_short))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        axes.set_ylim(0, 1.08 * high or 1)


def _bucket_ticks(axes: Axes, buckets: Sequence[Bucket]) -> None:
    axes.set_xticks(range(len(buckets)), [str(bucket.start) for bucket in buckets])


def _whole_layers(axes: Axes, layers: Sequence[int]) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    if layers:
        axes.set_xlim(min(layers) - 0.7, max(layers) + 0.7)


def _room_for_legend(axes: Axes) -> None:
    axes.set_ylim(0, 1.6 * axes.get_ylim()[1])


def _short(value: float, _: Any = None) -> str:
    """12000 -> 12k"""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _svg(figure: Figure, label: str) -> str:
    """The figure as an element of an HTML page: no fixed size, ids that no other one has."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", XLINK)
    root = ElementTree.fromstring(out.getvalue())
    for name in ("metadata", "defs"):  # defs here: a style that would be the whole page's
        for element in root.findall(f"{{{SVG}}}{name}"):
            if name == "metadata" or element.find(f"{{{SVG}}}style") is not None:
                root.remove(element)
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    root.attrib |= {"role": "img", "aria-label": label}
    text = ElementTree.tostring(root, encoding="unicode")
    prefix = f"c{hashlib.sha256(text.encode()).hexdigest()[:8]}-"
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", text)
    text = re.sub(r"font-family: [^;]*; ", "", text)  # that of the page
    return re.sub(r"#0101[0-9a-f]{2}", lambda found: f"var(--{VARIABLES[found[0]]})", text)
