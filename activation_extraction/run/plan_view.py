"""Prints a plan: as a table and facts for people, or as one JSON object."""

import json
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from activation_extraction.common.visible import counted, say, visible
from activation_extraction.model.devices import USABLE
from activation_extraction.model.mesh import in_words
from activation_extraction.run.mesh_plan import BINDS, MeshPlan
from activation_extraction.run.plan import HOUR, TERABYTE, Plan
from activation_extraction.run.rented import STORAGE_PRICE

WIDTH = 240  # more than the table needs; what is wider than a terminal goes on in its next line
TIMES = {
    "products": "products",
    "hbm": "HBM",
    "sent": "sent",
    "copy": "copies",
    "host": "packing",
    "upload": "upload",
}
SHORTEST = 1e-5  # seconds of a step; less is 0
LEAST_SENT = 1e6  # bytes; less is not shown
ALIGNED = 22  # where the texts below the table begin


def show_plan(plan: Plan, as_json: bool) -> None:
    """Prints the plan to stdout; with `as_json` as one object on the last line."""
    if as_json:
        say(json.dumps(plan.to_json()))
        return
    console = Console(highlight=False, width=WIDTH)
    console.print(_table(plan))
    for name, text in _facts(plan):
        console.print(Text(visible(f"{name:{ALIGNED}}{text}")), soft_wrap=True)


def _table(plan: Plan) -> Table:
    """Returns a table with a line for each mesh: memory, times of a step, speed."""
    machine = plan.machine
    title = (
        f"An estimate for {machine.name}, {counted(machine.chips, 'chip')} on "
        f"{counted(machine.hosts, 'host')}: milliseconds of a step of "
        f"{counted(plan.meshes[0].rows, 'row')} per host, at peak speeds"
    )
    table = Table(title=Text(visible(title)), title_justify="left", box=None, pad_edge=False)
    table.add_column("mesh", no_wrap=True)
    for name in ("GB/device", *TIMES.values(), "tokens/s", "most rows"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("bound by", no_wrap=True)
    for mesh in plan.meshes:
        style = "bold" if mesh is plan.best else "" if mesh.fits else "dim"
        table.add_row(*map(Text, _cells(mesh, mesh is plan.best)), style=style)
    return table


def _cells(mesh: MeshPlan, best: bool) -> Iterator[str]:
    yield ("* " if best else "  ") + in_words(mesh.layout.shape)
    if mesh.fails:
        outcome = "does not fit" if "EXHAUSTED" in mesh.fails else "does not compile"
        yield from ("-", *["-"] * len(TIMES), outcome, "-", "")
        return
    yield f"{sum(mesh.memory) / 1e9:.1f}"
    for name in TIMES:
        seconds = mesh.seconds.get(name)
        yield "-" if seconds is None else number(1e3 * seconds) if seconds > SHORTEST else "0"
    yield between(mesh.tokens_per_second) if mesh.fits else "does not fit"
    yield f"{mesh.batch_size}"
    yield BINDS[mesh.binds] if mesh.fits else ""


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields names and lines of text: what the table does not say. "" continues a name."""
    if plan.best is not None:
        yield "* the best", "the fastest mesh that fits"
    if memory := plan.machine.chip.memory:
        yield "each device", f"has {memory / 1e9:.3g} GB, of which a run may fill {USABLE:.0%}"
    if plan.best is None:
        most = max(mesh.batch_size for mesh in plan.meshes)
        fewer = f"--batch_size {most}, " if most else ""
        yield (
            "to make it fit",
            f"{fewer}fewer hooks or layers, a shorter --max_seq_length, more chips",
        )
    elif plan.chosen is not plan.best:
        shape = plan.best.layout.shape
        flags = f"--mesh_shape {','.join(map(str, shape.values()))} --mesh_axes {','.join(shape)}"
        yield (
            "the run's mesh",
            f"{in_words(plan.chosen.layout.shape)}; for the best one, add {flags}",
        )
    run, depth = plan.layers
    yield "the model", f"layers 0 to {run - 1} of {depth} run"
    for mesh in plan.meshes:
        if mesh.fails:
            yield in_words(mesh.layout.shape), f"{mesh.fails:.200}"
            continue
        weights, working, results = (number(size / 1e9) for size in mesh.memory)
        text = (
            f"weights {weights} GB, working memory {working} GB, activations of two steps "
            f"{results} GB on each device"
        )
        for each in mesh.step.sent:
            if each.bytes > LEAST_SENT:
                along, share = " and ".join(each.axes), each.hidden / each.bytes
                sent = f"a step sends {number(each.bytes / 1e9)} GB along {along}"
                text += f"; {sent}, {mesh.reach(each.axes)}, {share:.0%} of it while products run"
        yield in_words(mesh.layout.shape), text
    hooks, operations = counted(len(plan.hook_bytes), "hook"), f"{plan.flops_per_token / 1e9:.3g}"
    yield (
        "a token",
        f"{operations} billion operations; {plan.bytes_per_token:,.0f} bytes stored from {hooks}",
    )
    yield from _amounts(plan)
    name = "assumptions"
    for text in plan.assumptions:
        yield name, text
        name = ""


def _amounts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yields names and lines of text: what all the data takes."""
    token_bytes = sum(plan.hook_bytes)
    stored = plan.terabytes(token_bytes)
    if stored is None or plan.shards is None:
        yield "how long", "nothing says how much data there is: give --max_tokens or --max_samples"
        return
    yield "how long", "no mesh fits" if plan.hours is None else _duration(plan.hours)
    for name, price in plan.price._asdict().items():
        if price is not None and (dollars := plan.dollars(price)) is not None:
            each = f"{between(price)} for a chip and an hour"
            yield name.replace("_", " "), f"{between(dollars)} dollars, {each}"
    if plan.price.on_demand is None:
        yield "dollars", "no source gives the price of a chip: give --chip_hour_dollars"
    size = f"at most {_size(stored)} before compression, in {counted(plan.shards, 'shard')}"
    month = between([1e3 * stored * price for price in STORAGE_PRICE])
    yield "stored", f"{size}; a month in a bucket costs {month} dollars"
    if plan.best is not None and not plan.config.upload_to_gcs:
        ratio, hosts = plan.machine.pack.ratio, plan.machine.hosts
        speed = plan.best.tokens_per_second[1] * plan.bytes_per_token * ratio / hosts
        disk = f"{_size(speed / TERABYTE)} per second, and {_size(stored * ratio / hosts)} in all"
        yield "the disk", f"of each host has to take {disk}, as nothing is uploaded"
    saved = {"for each hook left out": token_bytes / len(plan.hook_bytes)}
    saved |= {f"with {name}": token_bytes - encoded for name, encoded in plan.encoded.items()}
    texts = [f"{_size(plan.terabytes(x) or 0)} {name}" for name, x in saved.items() if x > 0]
    yield "possible savings", ", ".join(texts)


def _duration(hours: Sequence[float]) -> str:
    """Returns a range of hours in a unit that suits it."""
    for unit, seconds in (("hours", HOUR), ("minutes", 60)):
        if hours[1] * HOUR >= seconds:
            return f"{between([each * HOUR / seconds for each in hours])} {unit}"
    return f"{between([each * HOUR for each in hours])} seconds"


def _size(terabytes: float) -> str:
    """Returns a number of bytes in a unit that suits it."""
    for unit, size in (("TB", 1.0), ("GB", 1e-3), ("MB", 1e-6)):
        if terabytes >= size:
            return f"{number(terabytes / size)} {unit}"
    return f"{terabytes * TERABYTE:,.0f} bytes"


def between(both: Sequence[float]) -> str:
    """Returns a range in words, with three significant digits."""
    low, high = map(number, both)
    return low if low == high else f"{low} to {high}"


def number(value: float) -> str:
    """Returns a number with three significant digits."""
    return f"{float(f'{value:.3g}'):,.10g}"
