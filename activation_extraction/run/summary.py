"""A run prints its progress, and at the end what this host stored and how to go on.

--list_hooks prints a model's hooks, without a run. Totals over all machines and hosts are the
subject of inspect/status.py.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from activation_extraction.cli.console import Clock, Progress
from activation_extraction.common.log import log
from activation_extraction.common.positions import Positions
from activation_extraction.common.visible import counted, say
from activation_extraction.model.devices import peak_flops
from activation_extraction.model.encode import Encoder
from activation_extraction.model.hooks import HookTable
from activation_extraction.run.hosts import gather
from activation_extraction.run.prepare import Run
from activation_extraction.store.statistics_in_words import code_warnings, codes_in_words
from activation_extraction.store.totals import Totals

ACTIVITIES = ("data", "compute", "copy", "store")
COLUMNS = "hook", "Hugging Face module", "width", "dtype", "bytes/token", "other names"
RIGHT = "width", "bytes/token"  # columns of numbers


def make_progress(run: Run) -> Progress:
    """Makes this host's progress bar, progress lines and metrics."""
    devices = run.forward.rows.mesh.shape["device"]
    return Progress(
        run.storage.options.max_samples,
        run.storage.options.max_tokens if run.storage.plan.repair is None else None,
        (run.storage.totals.samples, run.storage.totals.tokens),
        run.config.log_every,
        chips=devices,
        peak_flops=peak_flops(devices),
        gauges=lambda: {"batches_ready": run.batches.ready, **run.storage.gauges()},
        record=run.storage.record,
    )


def print_summary(run: Run, clock: Clock, complete: bool) -> None:
    """Prints what is stored, by this run and earlier ones, and which hosts had too little data.

    The first host, and with --verbose every host, also prints where the time went and how to read
    what is stored. All hosts must call this together.

    Args:
        run: The run, which has ended on this host.
        clock: The clock that has measured how long each activity took.
        complete: Whether the whole run is stored, so that nothing is left to continue.
    """
    storage = run.storage
    totals = storage.totals
    before = storage.plan.totals
    repair = storage.plan.repair
    if repair is not None:
        made = ranges(sorted(commit.number for commit in storage.made)) or "none"
        say(f"{'repaired' if complete else 'interrupted'}: shards stored in {run.where}: {made}")
        if complete and repair.gaps:
            if repair.status(totals.samples) != "complete":
                say("the run is not complete: the same command without --repair continues it")
            elif (more := totals.tokens - repair.metadata["tokens"]) > 0:
                say(
                    "stored whole: samples that an earlier --max_tokens had cut, with "
                    f"{counted(more, 'token')} more"
                )
        return
    shortfalls = gather(run.host, _shortfall(run) if complete else "")
    say(
        f"{'done' if complete else 'interrupted'}: "
        f"{counted(totals.samples, 'sample')}, {counted(totals.tokens, 'token')}, "
        f"{counted(len(run.forward.hooks), 'hook')}, {counted(totals.shards, 'shard')}, "
        f"{totals.bytes / 1e6:,.1f} MB in {run.where}"
    )
    if run.text.options.skip_bad_rows:
        rows = counted(totals.skipped_rows, "row")
        say(f"skipped: {rows} that could not be used (--skip_bad_rows)")
    if totals.empty_rows:
        say(f"empty: {counted(totals.empty_rows, 'row')} without text, which gave no sample")
    if totals.cut_samples:
        length, split = run.text.options.max_seq_length, run.text.sample_form.split
        by = [] if split else [f"at {counted(length, 'token')} (--max_seq_length)"]
        by += ["by --max_tokens"] if run.storage.options.max_tokens else []
        by += ["by --max_samples"] if run.storage.options.max_samples and split else []
        say(
            f"cut: {counted(totals.cut_samples, 'sample')} {' or '.join(by)}; left out: "
            f"{counted(totals.cut_tokens, 'token')}"
        )
    if totals.empty_samples:
        mask = run.text.options.mask_column
        rule = f"--mask_column {mask}, " * bool(mask) + str(run.text.sample_form.choice)
        say(f"kept nothing: {counted(totals.empty_samples, 'sample')} ({rule})")
    for line in codes_in_words(totals.statistics):
        say(line)
    for line in code_warnings(totals.statistics):
        log.warning("%s", line)
    for shortfall in filter(None, shortfalls):
        say(f"short: {shortfall}")
    if run.host.id != 0 and not run.config.verbose:
        return
    if new := totals.tokens - before.tokens:
        say(_where_the_time_went(run, clock, new))
    if totals.shards:
        say(
            "read it with:", *_how_to_read(run.folders.bucket_url or str(run.folders.local), totals)
        )


def _how_to_read(url: str, totals: Totals) -> list[str]:
    """Returns lines of Python that read a sample and a batch.

    Args:
        url: Folder or URL of the run.
        totals: Totals of this host, which say whether there is a sample or a token to read.
    """
    hook = next(iter(totals.statistics))
    lines = [
        "from activation_extraction import ActivationDataset",
        f"dataset = ActivationDataset({url!r})",
    ]
    if totals.samples:
        lines.append("sample = dataset[0]")
        lines.append(
            f"print(sample.text_preview[:40], sample.token_ids[:8], sample[{hook!r}].shape)"
        )
    if totals.tokens:
        lines.append("batch = next(dataset.batches(1024))  # shuffle=0 shuffles the tokens")
        lines.append(f"print(batch.sample_idx[:8], batch.position[:8], batch[{hook!r}].shape)")
    return [f"  {line}" for line in lines]


def _shortfall(run: Run) -> str:
    """Says that this host's data ended before it reached a limit; "" if it reached one."""
    limits = {"sample": run.storage.options.max_samples, "token": run.storage.options.max_tokens}
    stored = {"sample": run.storage.totals.samples, "token": run.storage.totals.tokens}
    set_limits = {unit: most for unit, most in limits.items() if most is not None}
    if not set_limits or any(stored[unit] >= most for unit, most in set_limits.items()):
        return ""
    whose, share = (f" of host {run.host.id}", "its share of ") if run.host.several else ("", "")
    ended = " and ".join(
        f"{stored[unit]:,} of at most {counted(most, unit)} ({share}--max_{unit}s)"
        for unit, most in set_limits.items()
    )
    return f"the data{whose} ended after {ended}"


def _where_the_time_went(run: Run, clock: Clock, tokens: int) -> str:
    """Returns a line with the time of each activity.

    Args:
        run: The run.
        clock: The clock that has measured the times.
        tokens: Number of tokens that this process has stored.
    """
    waited, elapsed = run.storage.waited, clock.elapsed
    unit = "tokens" if run.text.sample_form.choice.everything else "kept tokens"
    times = ", ".join(f"{name} {clock.seconds[name]:.1f}" for name in ACTIVITIES)
    waits = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in waited.items())
    return (
        f"time: {elapsed:.1f} s, {tokens / elapsed:,.0f} {unit}/s; waiting for {times} "
        f"s; of store, until there was room in memory (--waiting_shards_gb): {waits} s"
    )


def how_to_continue(hosts: int, overwrite: bool) -> str:
    """Returns what to do after a failure, as messages say it.

    Args:
        hosts: Number of hosts.
        overwrite: Whether --overwrite was given, which would begin anew.
    """
    how = "run the same command again"
    if hosts > 1:
        how = "start all hosts again with the same command"
    return f"to continue, {how}{' without --overwrite' if overwrite else ''}"


def list_hooks(
    table: HookTable,
    config: Any,
    dtype: Any,
    rule: Positions,
    length: int,
    encoders: Sequence[Encoder] = (),
) -> list[str]:
    """Returns lines with a model's hooks, all their names, and how much each of them stores.

    Args:
        table: Hooks of the model.
        config: Configuration of the model.
        dtype: Dtype of stored activations.
        rule: Rule of --positions.
        length: Tokens of the longest samples.
        encoders: Autoencoders of --encode.
    """
    depth, letters = config.num_hidden_layers, config.sizes_with(length)
    rows: list[tuple[str, ...]] = [COLUMNS]
    for kind in table.kinds:
        form = kind.form(letters, dtype)
        module, *others = kind.modules or ("",)
        layers = kind.layers(depth, table.types)
        only = f" (K: {ranges(layers)})" if "{}" in kind.name and len(layers) != depth else ""
        names = kind.name.format("K") + only, module.format("K")
        more = ", ".join(name.format("K") for name in (*kind.aliases, *others))
        rows.append((*names, f"{form.width:,}", form.dtype, f"{form.bytes:,}", more))
    sizes = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(COLUMNS, row, sizes, strict=True)
        lines.append("  ".join(f"{c:{'>' if name in RIGHT else '<'}{n}}" for name, c, n in cells))
    lines.append(f"K is the layer, from 0 to {depth - 1}")
    for encoder in encoders:
        whole = encoder.source.kind.form(letters, dtype).bytes
        lines.append(f"{encoder.in_words(dtype)} (the activations take {whole:,})")
    if config.weights:
        lines.append(f"the checkpoint has {config.weights}")
    if rule != Positions():
        kept = rule.expected(length)
        lines.append(f"--positions {rule} keeps about {kept:,.0f} of a sample's {length:,} tokens")
    return [line.rstrip() for line in lines]


def ranges(numbers: Iterable[int]) -> str:
    """Abbreviates ascending numbers, as in 1-3, 7."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in runs)
