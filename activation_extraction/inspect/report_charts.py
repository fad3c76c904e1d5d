"""Draws the charts of a report as SVG images, which contain no text from the stored data.

report.jinja calls the functions that draw the charts. They are decorated with `_image`, so a caller
leaves out their first parameter, the axes, and gets the image as a data URL.
"""

import io
from base64 import b64encode
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from activation_extraction.inspect.report_numbers import OTHER, HookReport

STYLE: dict[Any, Any] = {
    **{"svg.fonttype": "none", "svg.hashsalt": "report", "font.size": 11, "lines.linewidth": 1.4},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.formatter.useoffset": False},
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": "#e3e7ec"},
    **{"figure.facecolor": "none", "axes.facecolor": "none", "figure.figsize": (6.0, 3.5)},
}
BLUE, RED = "#1f5fbf", "#c2410c"
LOG_FROM = 20.0  # ratio of the largest to the smallest norm above which the scale is logarithmic


def _image(draw: Callable[..., None]) -> Callable[..., str]:
    """Turns a function that draws on axes into a function that returns the image as a data URL.

    Args:
        draw: A function that draws on axes. The axes are its first argument, and it may have more
            arguments.

    Returns:
        A function that takes the arguments of `draw` after the axes, and returns a data URL.
    """

    def image(*arguments: Any) -> str:
        with matplotlib.rc_context(STYLE):
            figure = Figure(layout="constrained")
            axes = figure.add_subplot()
            axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
            axes.yaxis.set_major_formatter("{x:,.6g}")
            draw(axes, *arguments)
            svg_buffer = io.BytesIO()
            figure.savefig(svg_buffer, format="svg", metadata={"Date": None})
        return f"data:image/svg+xml;base64,{b64encode(svg_buffer.getvalue()).decode()}"

    return image


@_image
def norms_by_layer(axes: Axes, hooks: Sequence[HookReport]) -> None:
    """Draws the distribution of the norms of tokens at each hook.

    The chart shows the percentiles 1 and 99, the quartiles, and the largest norm.

    Args:
        axes: The axes to draw on.
        hooks: The reports on the hooks of one kind.
    """
    layer_or_hook_numbers = [hook_report.layer_or_hook_number for hook_report in hooks]
    # Quantiles of the norms, with a row for each probability in LEVELS, (6, hooks).
    norm_quantiles = np.transpose([hook_report.norm_quantiles for hook_report in hooks])
    (
        percentile_1_norms,
        first_quartile_norms,
        median_norms,
        third_quartile_norms,
        percentile_99_norms,
        max_norms,
    ) = norm_quantiles
    axes.vlines(
        layer_or_hook_numbers,
        percentile_1_norms,
        percentile_99_norms,
        color=BLUE,
        linewidth=1.2,
        alpha=0.55,
    )
    axes.vlines(
        layer_or_hook_numbers,
        first_quartile_norms,
        third_quartile_norms,
        color=BLUE,
        linewidth=4.5,
        alpha=0.55,
    )
    axes.plot(layer_or_hook_numbers, median_norms, "o", color=BLUE, markersize=4.5)
    axes.plot(layer_or_hook_numbers, max_norms, "x", color=RED, markersize=4.5)
    axes.set(xlabel=_label(hooks), ylabel="norm")
    _norm_scale(axes, norm_quantiles)


@_image
def norms_by_position(axes: Axes, hooks: Sequence[HookReport], range_starts: Sequence[int]) -> None:
    """Draws the median norm by position, with a line for each hook.

    Args:
        axes: The axes to draw on.
        hooks: The reports on the hooks of one kind.
        range_starts: The first position of each range of positions for which there is a median.
    """
    line_colors = matplotlib.colormaps["viridis"](np.linspace(0, 0.85, len(hooks)))
    for line_color, hook_report in zip(line_colors, hooks, strict=True):
        number_label = (
            hook_report.layer_or_hook_number if hook_report in (hooks[0], hooks[-1]) else None
        )
        axes.plot(
            hook_report.median_norms_of_position_ranges, ".-", color=line_color, label=number_label
        )
    axes.figure.legend(loc="outside upper center", ncols=2, title=_label(hooks))
    axes.set(xlabel="position in the document", ylabel="median norm")
    axes.set_xticks(range(len(range_starts)), [str(range_start) for range_start in range_starts])
    _norm_scale(
        axes, np.stack([hook_report.median_norms_of_position_ranges for hook_report in hooks])
    )


@_image
def sample_lengths(axes: Axes, lengths: Sequence[int], axis_end: int, mean_length: float) -> None:
    """Draws a histogram of the lengths of samples. The labels call the samples documents.

    Args:
        axes: The axes to draw on.
        lengths: The number of tokens of each sample that was selected for the report.
        axis_end: The right end of the axis: the number of tokens of a row of a batch, or the length
            of the longest sample if that is larger.
        mean_length: The mean length of all samples of the run, drawn as a line.
    """
    axes.hist(
        lengths, min(max(len(lengths) // 5, 8), 40), range=(0, axis_end), color=BLUE, alpha=0.75
    )
    axes.axvline(mean_length, color=RED)
    axes.set(xlabel="tokens per document", ylabel="documents", xlim=(0, axis_end))


@_image
def throughput_over_time(axes: Axes, bin_edges: np.ndarray, rates: np.ndarray) -> None:
    """Draws the tokens per second of all hosts together.

    Args:
        axes: The axes to draw on.
        bin_edges: The edges of the bins, (bins + 1,): seconds since the start of the run, without
            the pauses between its processes.
        rates: The tokens per second in each bin, (bins,).
    """
    seconds_per_unit, time_unit = (3600, "hours") if bin_edges[-1] >= 7200 else (1, "seconds")
    axes.stairs(rates, bin_edges / seconds_per_unit, color=BLUE, fill=True, alpha=0.3)
    axes.set(
        xlabel=f"{time_unit} of work",
        ylabel="tokens per second",
        xlim=(0, bin_edges[-1] / seconds_per_unit),
    )


def _label(hooks: Sequence[HookReport]) -> str:
    return "hook, in stored order" if hooks[0].hook_kind_name == OTHER else "layer"


def _norm_scale(axes: Axes, norms: np.ndarray) -> None:
    """Sets the scale of the y axis for norms.

    The scale is logarithmic if the ratio of the largest to the smallest norm is more than LOG_FROM.
    Otherwise it is linear and starts at 0.

    Args:
        axes: The axes.
        norms: The norms that are drawn.
    """
    if 0 < LOG_FROM * norms.min() < norms.max():
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,.6g}")
    else:
        axes.set_ylim(bottom=0)
