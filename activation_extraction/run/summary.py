"""Writes the messages of a run: its progress, the summary at its end, and --list_hooks.

The summary says what this host has stored, and how to read it or continue the run.
inspect/status.py prints the totals over all machines and hosts.
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
from activation_extraction.store.statistics_lines import code_lines, code_warnings
from activation_extraction.store.totals import Totals

ACTIVITIES = ("data", "compute", "copy", "store")  # activities whose times the summary prints
# Columns of the table of --list_hooks. The columns with numbers are aligned on the right.
COLUMNS = "hook", "Hugging Face module", "width", "dtype", "bytes/token", "other names"
NUMBER_COLUMNS = "width", "bytes/token"


def make_progress(run: Run) -> Progress:
    """Returns the object that shows this host's progress, and records it in metrics.jsonl.

    Args:
        run: The run.
    """
    num_mesh_devices = run.forward.host_rows.mesh.shape["device"]
    return Progress(
        run.storage.options.max_samples,
        run.storage.options.max_tokens if run.storage.plan.repair is None else None,
        (run.storage.totals.samples, run.storage.totals.tokens),
        run.config.log_every,
        chips=num_mesh_devices,
        peak_flops=peak_flops(num_mesh_devices),
        gauges=lambda: {"batches_ready": run.batches.ready, **run.storage.gauges()},
        record=run.storage.record,
    )


def print_summary(run: Run, clock: Clock, complete: bool) -> None:
    """Prints what this host has stored so far, and on which hosts the data ended too early.

    The data of a host ended too early if it ended before the host had reached its share of
    --max_samples or --max_tokens. The counts include the shards of earlier processes. The first
    host, and with --verbose every host, also prints the time of each activity and how to read the
    stored run. After a --repair, messages about the repair are printed instead. All hosts must call
    this function together, because they exchange messages.

    Args:
        run: The run, which has ended on this host.
        clock: The clock that has measured the time of each activity.
        complete: Whether the whole run is stored, so that it need not be continued.
    """
    activation_storage = run.storage
    stored_totals = activation_storage.totals
    repair_plan = activation_storage.plan.repair
    if repair_plan is not None:
        shard_numbers_phrase = (
            ranges_phrase(
                sorted(shard_commit.number for shard_commit in activation_storage.new_commits)
            )
            or "none"
        )
        repair_outcome = "repaired" if complete else "interrupted"
        say(f"{repair_outcome}: shards stored in {run.output_url}: {shard_numbers_phrase}")
        if complete and repair_plan.shard_numbers_to_store_again:
            if repair_plan.status(stored_totals.samples) != "complete":
                say("the run is not complete: the same command without --repair continues it")
            elif (
                num_added_tokens := stored_totals.tokens - repair_plan.previous_metadata["tokens"]
            ) > 0:
                say(
                    "stored whole: samples that an earlier --max_tokens had cut, with "
                    f"{counted(num_added_tokens, 'token')} more"
                )
        return
    shortfall_messages = gather(run.host, _shortfall_message(run) if complete else "")
    say(
        f"{'done' if complete else 'interrupted'}: "
        f"{counted(stored_totals.samples, 'sample')}, {counted(stored_totals.tokens, 'token')}, "
        f"{counted(len(run.forward.hook_by_key), 'hook')}, "
        f"{counted(stored_totals.shards, 'shard')}, "
        f"{stored_totals.bytes / 1e6:,.1f} MB in {run.output_url}"
    )
    if run.text_pipeline.options.skip_bad_rows:
        skipped_rows_phrase = counted(stored_totals.skipped_rows, "row")
        say(f"skipped: {skipped_rows_phrase} that could not be used (--skip_bad_rows)")
    if stored_totals.empty_rows:
        say(f"empty: {counted(stored_totals.empty_rows, 'row')} without text, which gave no sample")
    if stored_totals.cut_samples:
        splits_documents = run.text_pipeline.sample_settings.splits_documents
        limits_that_cut_samples = []
        if not splits_documents:
            max_sample_tokens = run.text_pipeline.options.max_seq_length
            limits_that_cut_samples.append(
                f"at {counted(max_sample_tokens, 'token')} (--max_seq_length)"
            )
        if run.storage.options.max_tokens:
            limits_that_cut_samples.append("by --max_tokens")
        if run.storage.options.max_samples and splits_documents:
            limits_that_cut_samples.append("by --max_samples")
        limits_phrase = " or ".join(limits_that_cut_samples)
        say(
            f"cut: {counted(stored_totals.cut_samples, 'sample')} {limits_phrase}; "
            f"left out: {counted(stored_totals.cut_tokens, 'token')}"
        )
    if stored_totals.empty_samples:
        mask_column = run.text_pipeline.options.mask_column
        rule_of_kept_tokens = str(run.text_pipeline.sample_settings.token_choice)
        if mask_column:
            rule_of_kept_tokens = f"--mask_column {mask_column}, {rule_of_kept_tokens}"
        empty_samples_phrase = counted(stored_totals.empty_samples, "sample")
        say(f"kept nothing: {empty_samples_phrase} ({rule_of_kept_tokens})")
    for line_about_codes in code_lines(stored_totals.statistics):
        say(line_about_codes)
    for warning_line in code_warnings(stored_totals.statistics):
        log.warning("%s", warning_line)
    for shortfall_message in filter(None, shortfall_messages):
        say(f"short: {shortfall_message}")
    if run.host.id != 0 and not run.config.verbose:
        return
    if num_new_tokens := stored_totals.tokens - activation_storage.plan.totals.tokens:
        say(_time_line(run, clock, num_new_tokens))
    if stored_totals.shards:
        say(
            "read it with:",
            *_reading_lines(
                run.folders.bucket_url or str(run.folders.local_output_path), stored_totals
            ),
        )


def _reading_lines(url: str, totals: Totals) -> list[str]:
    """Returns lines of Python that read a sample and a batch of tokens from the stored run.

    Args:
        url: The folder or URL of the run.
        totals: The totals of this host. The lines for a sample are left out if no sample is stored,
            and the lines for a batch are left out if no token is stored.
    """
    first_hook_name = next(iter(totals.statistics))
    python_lines = [
        "from activation_extraction import ActivationDataset",
        f"dataset = ActivationDataset({url!r})",
    ]
    if totals.samples:
        python_lines.append("sample = dataset[0]")
        python_lines.append(
            "print(sample.text_preview[:40], sample.token_ids[:8], "
            f"sample[{first_hook_name!r}].shape)"
        )
    if totals.tokens:
        python_lines.append("batch = next(dataset.batches(1024))  # shuffle=0 shuffles the tokens")
        python_lines.append(
            f"print(batch.sample_idx[:8], batch.position[:8], batch[{first_hook_name!r}].shape)"
        )
    return [f"  {python_line}" for python_line in python_lines]


def _shortfall_message(run: Run) -> str:
    """Returns a message if this host's data ended before a limit of samples or tokens was reached.

    Args:
        run: The run.

    Returns:
        The message. "" if the host reached one of the limits, or if it has no limit.
    """
    storage_options, stored_totals = run.storage.options, run.storage.totals
    stored_count_and_limit_by_unit: dict[str, tuple[int, int]] = {}
    if storage_options.max_samples is not None:
        stored_count_and_limit_by_unit["sample"] = (
            stored_totals.samples,
            storage_options.max_samples,
        )
    if storage_options.max_tokens is not None:
        stored_count_and_limit_by_unit["token"] = (stored_totals.tokens, storage_options.max_tokens)
    if not stored_count_and_limit_by_unit:
        return ""
    if any(
        stored_count >= limit_of_unit
        for stored_count, limit_of_unit in stored_count_and_limit_by_unit.values()
    ):
        return ""
    host_phrase = f" of host {run.host.id}" if run.host.is_one_of_several else ""
    share_phrase = "its share of " if run.host.is_one_of_several else ""
    shortfall_phrases = []
    for unit, (stored_count, limit_of_unit) in stored_count_and_limit_by_unit.items():
        flag_phrase = f"{share_phrase}--max_{unit}s"
        shortfall_phrases.append(
            f"{stored_count:,} of at most {counted(limit_of_unit, unit)} ({flag_phrase})"
        )
    return f"the data{host_phrase} ended after {' and '.join(shortfall_phrases)}"


def _time_line(run: Run, clock: Clock, num_new_tokens: int) -> str:
    """Returns a line with the speed of this process and the seconds for which it waited.

    The waits are for data, for the computation, for copies from the devices, and for storing.

    Args:
        run: The run.
        clock: The clock that has measured the time of each activity.
        num_new_tokens: The number of tokens that this process has stored.
    """
    elapsed_seconds = clock.elapsed
    token_unit = (
        "tokens"
        if run.text_pipeline.sample_settings.token_choice.keeps_everything
        else "kept tokens"
    )
    times_phrase = ", ".join(
        f"{activity} {clock.seconds_by_activity[activity]:.1f}" for activity in ACTIVITIES
    )
    waits_phrase = ", ".join(
        f"{storage_phase} {waited_seconds:.1f}"
        for storage_phase, waited_seconds in run.storage.waited.items()
    )
    return (
        f"time: {elapsed_seconds:.1f} s, {num_new_tokens / elapsed_seconds:,.0f} {token_unit}/s; "
        f"waiting for {times_phrase} s; of store, until there was room in memory "
        f"(--waiting_shards_gb): {waits_phrase} s"
    )


def how_to_continue(num_hosts: int, overwrite: bool) -> str:
    """Returns the sentence that tells the user how to continue a run that failed.

    Args:
        num_hosts: The number of hosts.
        overwrite: Whether --overwrite is set. If so, the advice is to omit this flag, because it
            would delete the stored shards.
    """
    advice_phrase = "run the same command again"
    if num_hosts > 1:
        advice_phrase = "start all hosts again with the same command"
    return f"to continue, {advice_phrase}{' without --overwrite' if overwrite else ''}"


def list_hooks(
    table: HookTable,
    model_config: Any,
    dtype: Any,
    positions: Positions,
    max_sample_tokens: int,
    encoders: Sequence[Encoder] = (),
) -> list[str]:
    """Returns the lines of --list_hooks: a table of a model's hooks, and notes below it.

    Each row of the table describes one kind of hook, with K in place of the number of the layer. It
    contains all names of the hook, the width, the dtype, and the bytes of a stored token.

    Args:
        table: The hooks of the model.
        model_config: The configuration of the model.
        dtype: The dtype of stored activations.
        positions: The rule of --positions.
        max_sample_tokens: The number of tokens of the longest possible sample.
        encoders: The autoencoders of --encode.
    """
    num_layers = model_config.num_hidden_layers
    size_by_axis_letter = model_config.sizes_with(max_sample_tokens)
    table_rows: list[tuple[str, ...]] = [COLUMNS]
    for hook_kind in table.kinds:
        width_and_dtype = hook_kind.width_and_dtype(size_by_axis_letter, dtype)
        module_name, *other_module_names = hook_kind.module_names or ("",)
        hook_layers = hook_kind.layers(num_layers, table.layer_types)
        # K stands for the number of a layer.
        displayed_hook_name = hook_kind.name.format("K")
        if "{}" in hook_kind.name and len(hook_layers) != num_layers:
            displayed_hook_name += f" (K: {ranges_phrase(hook_layers)})"
        other_names_phrase = ", ".join(
            hook_alias.format("K") for hook_alias in (*hook_kind.aliases, *other_module_names)
        )
        width_dtype_and_bytes_cells = (
            f"{width_and_dtype.width:,}",
            width_and_dtype.dtype,
            f"{width_and_dtype.bytes:,}",
        )
        table_rows.append(
            (
                displayed_hook_name,
                module_name.format("K"),
                *width_dtype_and_bytes_cells,
                other_names_phrase,
            )
        )
    column_widths = [max(map(len, table_column)) for table_column in zip(*table_rows, strict=True)]
    table_lines = []
    for cells_of_row in table_rows:
        padded_cells = []
        for column_name, table_cell, column_width in zip(
            COLUMNS, cells_of_row, column_widths, strict=True
        ):
            is_number_column = column_name in NUMBER_COLUMNS
            padded_cells.append(
                table_cell.rjust(column_width)
                if is_number_column
                else table_cell.ljust(column_width)
            )
        table_lines.append("  ".join(padded_cells))
    table_lines.append(f"K is the layer, from 0 to {num_layers - 1}")
    for encoder in encoders:
        activation_bytes_per_token = encoder.source_hook.kind.width_and_dtype(
            size_by_axis_letter, dtype
        ).bytes
        table_lines.append(
            f"{encoder.description(dtype)} (the activations take {activation_bytes_per_token:,})"
        )
    if model_config.weights:
        table_lines.append(f"the checkpoint has {model_config.weights}")
    if positions != Positions():
        num_expected_kept_tokens = positions.expected(max_sample_tokens)
        table_lines.append(
            f"--positions {positions} keeps about {num_expected_kept_tokens:,.0f} of a sample's "
            f"{max_sample_tokens:,} tokens"
        )
    return [table_line.rstrip() for table_line in table_lines]


def ranges_phrase(numbers: Iterable[int]) -> str:
    """Returns ascending numbers of shards or layers in words.

    For example, returns "1-3, 7" for 1, 2, 3 and 7.
    """
    # One list for each range: its first and its last number, or its only number.
    bounds_of_shard_or_layer_ranges: list[list[int]] = []
    for shard_or_layer_number in numbers:
        if (
            bounds_of_shard_or_layer_ranges
            and shard_or_layer_number == bounds_of_shard_or_layer_ranges[-1][-1] + 1
        ):
            bounds_of_shard_or_layer_ranges[-1][1:] = [shard_or_layer_number]
        else:
            bounds_of_shard_or_layer_ranges.append([shard_or_layer_number])
    return ", ".join(
        "-".join(map(str, range_bounds)) for range_bounds in bounds_of_shard_or_layer_ranges
    )
