"""The page of a report: puts numbers, drawings and texts into one HTML file that needs no other."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from itertools import groupby

from activation_extraction.common.visible import counted
from activation_extraction.inspect import report_plots
from activation_extraction.inspect.report_analysis import (
    OUTLIER,
    Bucket,
    HookReport,
    findings,
)
from activation_extraction.inspect.report_run import Lengths, Run, Throughput
from activation_extraction.inspect.report_sample import TokenSample
from activation_extraction.inspect.report_text import Decode, passage
from activation_extraction.store.statistics import Statistics

LARGEST_SHOWN = 9  # tokens of each hook
MOST_HOSTS = 64  # in the table
HOOK_COLUMNS: tuple[str, ...] = ("hook", "width", "mean norm", "largest norm", "standard deviation")
HOOK_COLUMNS += ("median norm", "1 % – 99 %", f"over {OUTLIER:g}× median", "first direction")
HOOK_COLUMNS += ("directions for 90 %", "effective directions", "variance of outliers")


@dataclass(frozen=True)
class Content:
    """All that the page shows. statistics: hook -> over all tokens; lengths: None where documents
    are not stored whole; decode: None where the tokenizer is not at hand."""

    run: Run
    sample: TokenSample
    buckets: list[Bucket]
    hooks: list[HookReport]
    statistics: Mapping[str, Statistics]
    lengths: Lengths | None
    throughput: Throughput | None
    decode: Decode | None

    @property
    def kinds(self) -> list[tuple[str, list[HookReport]]]:
        """The hooks by kind, each kind by layer."""
        ordered = sorted(self.hooks, key=lambda hook: (hook.kind, hook.layer or 0))
        return [(kind, list(group)) for kind, group in groupby(ordered, lambda hook: hook.kind)]


def page(content: Content) -> str:
    """The whole HTML file."""
    css = resources.files(__package__).joinpath("report.css").read_text(encoding="utf-8")
    title = f"Activations of {escape(content.run.model)}"
    sections = (_glance, _run, _norms, _directions, _tokens, _lengths, _throughput)
    body = "\n".join(section(content) for section in sections)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
        f"{_head(content.run, title, len(content.hooks))}\n{body}\n{_foot(content)}\n</main>\n"
        "</body>\n</html>\n"
    )


def _head(run: Run, title: str, hooks: int) -> str:
    totals = {
        "samples": f"{run.samples:,}",
        "tokens": f"{run.tokens:,}",
        "hooks": f"{hooks:,}",
        "shards": f"{run.shards:,}",
        "stored": f"{run.bytes / 1e9:,.2f} GB",
    }
    tiles = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in totals.items())
    word = escape("".join(run.state.split()[:1]))  # one that report.css may know
    state = f'<span class="state {word}">{escape(run.state)}</span>'
    return (
        f"<header><h1>{title}</h1>\n<p>{state} from {escape(run.dataset)}</p>\n"
        f'<dl class="tiles">{tiles}</dl></header>'
    )


def _section(name: str, title: str, note: str, body: Iterable[str]) -> str:
    return (
        f'<section id="{name}"><h2>{title}</h2>\n<p class="note">{note}</p>\n'
        + "\n".join(body)
        + "</section>"
    )


def _figure(title: str, note: str, svg: str) -> str:
    return f"<figure><figcaption><b>{escape(title)}</b>{escape(note)}</figcaption>{svg}</figure>"


def _charts(figures: Iterable[str]) -> str:
    return f'<div class="charts">{"".join(figures)}</div>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _details(summary: str, body: str) -> str:
    return f"<details><summary>{summary}</summary>{body}</details>"


def _glance(content: Content) -> str:
    found = [*content.run.problems, *findings(content.hooks, content.lengths)]
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in found)
    note = (
        f"From {counted(len(content.sample.token_ids), 'token')} of "
        f"{counted(len(content.sample.documents), 'document')} in {content.sample.shards:,} of "
        f"{counted(content.run.shards, 'shard')}, chosen at "
        "random. Totals and means are of everything stored."
    )
    return _section("glance", "At a glance", note, [f"<ul>{items}</ul>"])


def _run(content: Content) -> str:
    run = content.run
    facts = "".join(
        f"<dt>{escape(label)}</dt><dd>{escape(value)}</dd>" for label, value in run.facts.items()
    )
    columns = ("host", "state", "shards", "samples", "tokens", "GB", "tokens/s")
    rows = [
        (
            *(part.name or "this folder", part.state, f"{part.shards:,}", f"{part.samples:,}"),
            *(f"{part.tokens:,}", f"{part.bytes / 1e9:,.3f}"),
            "–" if part.tokens_per_second is None else f"{part.tokens_per_second:,.0f}",
        )
        for part in run.parts[:MOST_HOSTS]
    ]
    more = len(run.parts) - len(rows)
    hosts = _table(columns, rows) + (f"<p>and {more:,} more</p>" if more else "")
    title = f"{len(run.parts):,} host" + ("s" if len(run.parts) > 1 else "")
    body = [f'<dl class="facts">{facts}</dl>', _details(title, hosts)]
    return _section("run", "The run", "What the shards were made with.", body)


def _norms(content: Content) -> str:
    def body() -> Iterator[str]:
        for kind, hooks in content.kinds:
            yield f"<h3>{escape(kind)}</h3>"
            yield _charts(_norm_figures(hooks, content.buckets))
        rows = (_hook_row(hook, content.statistics[hook.name]) for hook in content.hooks)
        yield _details("All hooks in numbers", _table(HOOK_COLUMNS, rows))

    note = (
        "The Euclidean norm of each token's activation. Norms that grow smoothly with depth are "
        "usual, and so are huge norms at position 0 (attention sinks)."
    )
    return _section("norms", "Norms", note, body())


def _norm_figures(hooks: Sequence[HookReport], buckets: Sequence[Bucket]) -> Iterator[str]:
    yield _figure(
        "By layer",
        "Point: median. Bars: middle half and 1 % to 99 %. Cross: the largest.",
        report_plots.norms_by_layer(hooks),
    )
    yield _figure(
        "By position, all layers",
        "Medians. A tick names the first position of its group.",
        report_plots.norms_by_position(hooks, buckets),
    )
    middle = hooks[len(hooks) // 2]
    yield _figure(
        f"By position, {middle.name}",
        "Line: median. Bands: 25 % to 75 % and 5 % to 95 %. Cross: the largest.",
        report_plots.spread_by_position(middle, buckets),
    )


def _hook_row(hook: HookReport, statistics: Statistics) -> tuple[str, ...]:
    found, norms = hook.directions, hook.norms
    spread = f"{norms.at(0.01):.4g} – {norms.at(0.99):.4g}"
    return (
        *(hook.name, f"{hook.width:,}", f"{statistics.mean_norm:.4g}"),
        *(f"{statistics.max_norm:.4g}", f"{statistics.variance**0.5:.4g}"),
        *(f"{norms.median:.4g}", spread, f"{hook.outliers:.2%}"),
        *(
            ("–", "–", "–", "–")
            if found is None
            else (
                *(f"{found.shares[0]:.1%}", f"{found.needed(0.9):,}"),
                *(f"{found.effective:,.0f}", f"{found.outlier_share:.1%}"),
            )
        ),
    )


def _directions(content: Content) -> str:
    def body() -> Iterator[str]:
        for kind, hooks in content.kinds:
            yield f"<h3>{escape(kind)}</h3>"
            if any(hook.directions is not None for hook in hooks):
                yield _charts(_direction_figures(hooks))
            else:
                yield "<p>These activations do not vary in the sample.</p>"

    used = max((h.directions.tokens for h in content.hooks if h.directions is not None), default=0)
    note = (
        f"Principal components of up to {used:,} tokens per hook. Tokens with more than "
        f"{OUTLIER:g} times the median norm are left out, as they would hide the rest. A sample "
        "of fewer tokens than the hook has dimensions makes the leading shares look larger."
    )
    return _section("directions", "Variance explained by leading directions", note, body())


def _direction_figures(hooks: Sequence[HookReport]) -> Iterator[str]:
    yield _figure(
        "Cumulative share of the variance",
        "Lines near the top left: few directions carry most of it.",
        report_plots.variance_explained(hooks),
    )
    yield _figure(
        "Directions needed, by layer",
        "How many leading directions have this share of the variance.",
        report_plots.directions_needed(hooks),
    )


def _tokens(content: Content) -> str:
    def body() -> Iterator[str]:
        for _, hooks in content.kinds:
            three = {hooks[0].name: hooks[0], hooks[len(hooks) // 2].name: hooks[len(hooks) // 2]}
            three[hooks[-1].name] = hooks[-1]
            chosen = list(three.values()) if len(content.kinds) == 1 else [hooks[len(hooks) // 2]]
            for hook in chosen:
                yield f"<h3>{escape(hook.name)}</h3>"
                yield f'<ul class="tokens">{"".join(_token_items(content, hook))}</ul>'

    shown = "" if content.decode else " The model's tokenizer is not on this machine: token ids."
    note = (
        "The largest norms of the sample, each token id once at position 0 and once elsewhere."
        f"{shown}"
    )
    return _section("tokens", "Tokens with the largest norms", note, body())


def _token_items(content: Content, hook: HookReport) -> Iterator[str]:
    for large in hook.largest[:LARGEST_SHOWN]:
        document = content.sample.document_of(large.token)
        found = passage(content.sample, large.token, content.decode)
        often = f", {large.count:,} times among the largest" if large.count > 1 else ""
        facts = (
            f"norm {large.norm:.4g}, {large.norm / max(hook.norms.median, 1e-30):.3g}× the median; "
            f"position {content.sample.position[large.token]}{often}; document {document.doc_id}"
        )
        preview = "" if found.decoded else f"<p>{escape(document.text_preview[:100])}</p>"
        yield (
            f'<li><p class="note">{escape(facts)}</p>{preview}<p>{escape(found.before)}'
            f"<mark>{escape(found.token)}</mark>{escape(found.after)}</p></li>"
        )


def _lengths(content: Content) -> str:
    lengths = content.lengths
    if lengths is None:
        note = "The run does not keep all tokens of its documents, so their lengths are not known."
        return _section("lengths", "Lengths and padding", note, [])
    packed = (
        "" if lengths.packed is None else f" This run packed them: {lengths.packed:.1%} padding."
    )
    note = (
        f"The mean of all documents is {lengths.mean:,.0f} tokens; a row has "
        f"{lengths.longest_row:,}. With a row for each document, {lengths.padded:.0%} of what is "
        f"computed would be padding.{packed}"
    )
    figure = _figure(
        "Lengths of the sampled documents",
        f"{counted(len(lengths.sampled), 'document')}. Line: the mean of all.",
        report_plots.document_lengths(lengths),
    )
    return _section("lengths", "Lengths and padding", note, [_charts([figure])])


def _throughput(content: Content) -> str:
    found = content.throughput
    if found is None:
        note = "There is no metrics.jsonl yet: the first line is written after --log_every."
        return _section("throughput", "Throughput", note, [])
    hosts = f"{found.hosts:,} hosts together" if found.hosts > 1 else "One host"
    figure = _figure(
        "Tokens per second",
        f"{hosts}. Zero: no program was running.",
        report_plots.throughput_over_time(found),
    )
    working = found.tokens_per_second[found.tokens_per_second > 0]
    note = f"While at work: {working.mean():,.0f} tokens per second on average."
    return _section("throughput", "Throughput", note, [_charts([figure])])


def _foot(content: Content) -> str:
    now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    return f"<footer>Made on {now}.</footer>"
