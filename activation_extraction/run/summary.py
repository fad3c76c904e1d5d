"""Words the progress of a run, the summary at its end, and the list of --list_hooks.

The summary says what this host has stored and how to read or continue it. inspect/status.py has the
totals over all machines and hosts.
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

ACTIVITIES = ("data", "compute", "copy", "store")  # names of the times that Clock measures
COLUMNS = "hook", "Hugging Face module", "width", "dtype", "bytes/token", "other names"
RIGHT = "width", "bytes/token"  # columns of numbers, which are aligned on the right


def make_progress(run: Run) -> Progress:
    """Returns the object that shows and records this host's progress.

    Args:
        run: The run.
    """
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
    """Prints what this and earlier processes have stored, and which hosts had too little data.

    The first host, and with --verbose every host, also prints the time of each activity and how to
    read the data set. All hosts must call this together.

    Args:
        run: The run, which has ended on this host.
        clock: The clock that has measured the time of each activity.
        complete: Whether the whole run is stored, so that nothing is left to continue.
    """
    storage = run.storage
    totals = storage.totals
    repair = storage.plan.repair
    if repair is not None:
        made = ranges(sorted(commit.number for commit in storage.made)) or "none"
        say(f"{'repaired' if complete else 'interrupted'}: shards stored in {run.where}: {made}")
        if complete and repair.gaps:
            if repair.status(totals.samples) != "complete":
                say("the run is not complete: the same command without --repair continues it")
            elif (added_tokens := totals.tokens - repair.metadata["tokens"]) > 0:
                say(
                    "stored whole: samples that an earlier --max_tokens had cut, with "
                    f"{counted(added_tokens, 'token')} more"
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
        split = run.text.sample_form.split
        causes = []
        if not split:
            length = run.text.options.max_seq_length
            causes.append(f"at {counted(length, 'token')} (--max_seq_length)")
        if run.storage.options.max_tokens:
            causes.append("by --max_tokens")
        if run.storage.options.max_samples and split:
            causes.append("by --max_samples")
        say(
            f"cut: {counted(totals.cut_samples, 'sample')} {' or '.join(causes)}; left out: "
            f"{counted(totals.cut_tokens, 'token')}"
        )
    if totals.empty_samples:
        mask = run.text.options.mask_column
        rule = str(run.text.sample_form.choice)
        if mask:
            rule = f"--mask_column {mask}, {rule}"
        say(f"kept nothing: {counted(totals.empty_samples, 'sample')} ({rule})")
    for line in codes_in_words(totals.statistics):
        say(line)
    for line in code_warnings(totals.statistics):
        log.warning("%s", line)
    for shortfall in filter(None, shortfalls):
        say(f"short: {shortfall}")
    if run.host.id != 0 and not run.config.verbose:
        return
    if new_tokens := totals.tokens - storage.plan.totals.tokens:
        say(_where_the_time_went(run, clock, new_tokens))
    if totals.shards:
        say(
            "read it with:", *_how_to_read(run.folders.bucket_url or str(run.folders.local), totals)
        )


def _how_to_read(url: str, totals: Totals) -> list[str]:
    """Returns lines of Python that read a sample and a batch of tokens.

    Args:
        url: The folder or URL of the run.
        totals: The totals of this host. Lines that would find no sample or no token are left out.
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
    """Returns a message that this host's data ended before it reached a limit.

    It is "" if the host reached a limit, or has none.
    """
    limits = {"sample": run.storage.options.max_samples, "token": run.storage.options.max_tokens}
    stored = {"sample": run.storage.totals.samples, "token": run.storage.totals.tokens}
    set_limits = {unit: most for unit, most in limits.items() if most is not None}
    if not set_limits or any(stored[unit] >= most for unit, most in set_limits.items()):
        return ""
    whose = f" of host {run.host.id}" if run.host.several else ""
    share = "its share of " if run.host.several else ""
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
        tokens: The number of tokens that this process has stored.
    """
    elapsed = clock.elapsed
    unit = "tokens" if run.text.sample_form.choice.everything else "kept tokens"
    times = ", ".join(f"{name} {clock.seconds[name]:.1f}" for name in ACTIVITIES)
    waits = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in run.storage.waited.items())
    return (
        f"time: {elapsed:.1f} s, {tokens / elapsed:,.0f} {unit}/s; waiting for {times} "
        f"s; of store, until there was room in memory (--waiting_shards_gb): {waits} s"
    )


def how_to_continue(hosts: int, overwrite: bool) -> str:
    """Returns the advice of messages about a failure: how to continue the run.

    Args:
        hosts: The number of hosts.
        overwrite: Whether --overwrite was given, which would begin anew.
    """
    advice = "run the same command again"
    if hosts > 1:
        advice = "start all hosts again with the same command"
    return f"to continue, {advice}{' without --overwrite' if overwrite else ''}"


def list_hooks(
    table: HookTable,
    config: Any,
    dtype: Any,
    rule: Positions,
    length: int,
    encoders: Sequence[Encoder] = (),
) -> list[str]:
    """Returns the lines of --list_hooks: a table of a model's hooks, and notes below it.

    A row has all names of a hook of each layer K, its width and dtype, and the bytes of a stored
    token.

    Args:
        table: The hooks of the model.
        config: The configuration of the model.
        dtype: The dtype of stored activations.
        rule: The rule of --positions.
        length: The tokens of the longest samples.
        encoders: The autoencoders of --encode.
    """
    depth = config.num_hidden_layers
    sizes = config.sizes_with(length)
    rows: list[tuple[str, ...]] = [COLUMNS]
    for kind in table.kinds:
        vector_type = kind.vector_type(sizes, dtype)
        module, *other_modules = kind.modules or ("",)
        layers = kind.layers(depth, table.layer_types)
        name = kind.name.format("K")
        if "{}" in kind.name and len(layers) != depth:
            name += f" (K: {ranges(layers)})"
        other_names = ", ".join(alias.format("K") for alias in (*kind.aliases, *other_modules))
        numbers = f"{vector_type.width:,}", vector_type.dtype, f"{vector_type.bytes:,}"
        rows.append((name, module.format("K"), *numbers, other_names))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = []
        for column, cell, width in zip(COLUMNS, row, widths, strict=True):
            cells.append(cell.rjust(width) if column in RIGHT else cell.ljust(width))
        lines.append("  ".join(cells))
    lines.append(f"K is the layer, from 0 to {depth - 1}")
    for encoder in encoders:
        activation_bytes = encoder.source.kind.vector_type(sizes, dtype).bytes
        lines.append(f"{encoder.in_words(dtype)} (the activations take {activation_bytes:,})")
    if config.weights:
        lines.append(f"the checkpoint has {config.weights}")
    if rule != Positions():
        kept = rule.expected(length)
        lines.append(f"--positions {rule} keeps about {kept:,.0f} of a sample's {length:,} tokens")
    return [line.rstrip() for line in lines]


def ranges(numbers: Iterable[int]) -> str:
    """Returns ascending numbers in words, with consecutive ones as ranges: "1-3, 7"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in runs)
