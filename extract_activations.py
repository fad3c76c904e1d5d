#!/usr/bin/env python3
"""Extracts the activations of a language model for a stream of text. See --help and README.md.

This script contains the main steps of a run, from the checked flags to the summary, and leaves the
details to the packages of `activation_extraction`. Bad input is reported before the weights are
read.
"""

if __name__ == "__main__":
    # `script` parses the flags before the imports below, which take seconds. For a command that
    # needs them, it imports this file again as a module, which runs these imports, and calls
    # `carry_out`. --help and commands that only look at a stored run do not need them. At the end,
    # `script` ends the process.
    from activation_extraction.__main__ import script

    script()

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from activation_extraction.common.late_imports import set_library_defaults

set_library_defaults()

import jax
import numpy as np

from activation_extraction.cli.config import variable_name_of_task_without_machine
from activation_extraction.cli.console import Clock, Progress, stop_on_signals
from activation_extraction.cli.flags import Config
from activation_extraction.common.errors import RunError, reworded
from activation_extraction.common.log import log, start_logging
from activation_extraction.common.visible import counted, say
from activation_extraction.inspect.look import look
from activation_extraction.inspect.verify import verify
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.compilation import use_compilation_cache
from activation_extraction.model.devices import device_errors, leave_out_absent_tpu
from activation_extraction.model.family import parse_model_config, read_model_config
from activation_extraction.model.forward import Activations, StepFunction, compile_step
from activation_extraction.model.hooks import hook_table
from activation_extraction.model.model_config import HEAD
from activation_extraction.model.model_setup import choose_dtypes, choose_hooks
from activation_extraction.model.repository import check_adapter
from activation_extraction.run.demo import MODEL_CONFIG
from activation_extraction.run.estimate import print_estimate
from activation_extraction.run.host_text import known_special_tokens
from activation_extraction.run.hosts import (
    Host,
    Lockstep,
    Watchdog,
    any_host,
    explain_abort,
    join,
    leave,
    one_step_behind,
    raise_together,
)
from activation_extraction.run.prepare import Run, prepare, step_request
from activation_extraction.run.recompute import load_for_recomputing
from activation_extraction.run.recompute_states import load_for_hidden_states
from activation_extraction.run.reread import load_text
from activation_extraction.run.summary import (
    how_to_continue,
    list_hooks,
    make_progress,
    print_summary,
)
from activation_extraction.text.batch import Batch


def carry_out(config: Config) -> int:
    """Carries out a command that needs the packages with which a model is run, such as JAX.

    The command is --list_hooks, --plan, --verify with --model_path, or --export nla. Without these
    flags, it is a run.

    Args:
        config: The configuration, made from checked flags.

    Returns:
        The exit status.

    Raises:
        InputError: If the flags or the files that they name cannot be used.
        RunError: If something fails after the inputs have been checked.
    """
    leave_out_absent_tpu()
    if config.list_hooks:
        return show_hooks(config)
    if config.plan_options.plan is not None:
        return print_estimate(config)
    if config.inspection_options.export is not None:
        return look(config, load_text=partial(load_text, config))
    return recompute_some(config) if config.inspection_options.requested else extract(config)


def extract(config: Config) -> int:
    """Carries out one run from beginning to end.

    Args:
        config: The configuration.

    Returns:
        The exit status. It is 0 if the run is complete, and 128 plus the number of the signal if a
        signal has stopped the run. After a repair, it is the exit status of --verify.

    Raises:
        InputError: If the flags or the files that they name cannot be used.
        RunError: If something fails after the inputs have been checked.
    """
    host_options = config.host_options
    if host_options.total_machines > 1:
        log.info("machine %d of %d", host_options.machine_id, host_options.total_machines)
    elif environment_variable_name := variable_name_of_task_without_machine(config):
        log.warning(
            "%s is set, but this is machine 0 of 1, as every other task of the array would be; set "
            "MACHINE_ID and TOTAL_MACHINES in each task to share the data",
            environment_variable_name,
        )
    host = join_hosts(config)
    watchdog = Watchdog(host_options.stall_timeout)
    remedy_phrase = how_to_continue(host.num_hosts, config.storage_options.overwrite)
    with explain_abort(host, f"committed shards are safe; {remedy_phrase}"):
        with device_errors():
            run = prepare(config, host, watchdog)
        clock = Clock()
        stop_signal_number = 0
        try:
            if any_host(host, [not run.storage.complete])[0]:
                is_run_complete, stop_signal_number = compute(run, clock)
            else:
                if config.repair:
                    log.info("no shard needs repair")
                else:
                    log.info("everything has been computed already")
                finish(run, clock, complete=True)
                is_run_complete = True
        except RunError as error:
            stored_totals = run.storage.totals
            message_with_totals = (
                f"{error}. Stored in {run.output_url}: {counted(stored_totals.shards, 'shard')}, "
                f"{counted(stored_totals.samples, 'sample')}"
            )
            failure_with_totals = reworded(error, message_with_totals, RunError)
            failure_with_totals.remedy = failure_with_totals.remedy or remedy_phrase
            raise failure_with_totals from error
        print_summary(run, clock, is_run_complete)
        stored_totals = run.storage.totals
        any_samples_stored, any_tokens_stored = any_host(
            host, [stored_totals.samples > 0, stored_totals.tokens > 0]
        )
        leave(host)
    if is_run_complete and any_samples_stored and not any_tokens_stored:
        token_choice = run.text_pipeline.sample_settings.token_choice
        raise RunError(
            f"no token was stored: no sample has a token that is kept ({token_choice})",
            remedy="start anew with another choice and --overwrite",
            is_recurring=True,
        )
    if config.repair and is_run_complete:
        return verify(run.storage.destination, None, 0)
    return 0 if is_run_complete else 128 + (stop_signal_number or signal.SIGTERM)


def compute(run: Run, clock: Clock) -> tuple[bool, int]:
    """Runs the model over the text, and stores the activations.

    Args:
        run: The run.
        clock: The clock that measures the time of each activity.

    Returns:
        A tuple of:
            Whether the run has reached the end of its data or of its limits (--max_samples,
            --max_tokens).
            The number of the signal that stopped this host; 0 without a signal.

    Raises:
        InputError: If the weights cannot be used, or if the output cannot be continued.
        RunError: If a step or an upload fails on this host or on another host.
    """
    with device_errors():
        compiled_step, run = start_together(run)
    clock.restart()
    with run.storage, stop_on_signals() as get_stop_signal:
        try:
            with device_errors(), run.watchdog:
                progress = make_progress(run)
                lockstep_of_hosts = take_steps(run, compiled_step, progress, clock, get_stop_signal)
        except KeyboardInterrupt:
            # The user has pressed Ctrl-C after an earlier signal had asked the run to stop. `close`
            # releases the folder without waiting for uploads.
            run.storage.close()
            raise
        if get_stop_signal() and (num_waiting_bytes := run.storage.gauges()["bytes_waiting"]):
            log.info(
                "stopping; %.2f GB wait to be stored, in order; what is not stored when this "
                "process is killed is computed again",
                num_waiting_bytes / 1e9,
            )
        with device_errors():
            finish(
                run, clock, lockstep_of_hosts.reaches_end_of_data, lockstep_of_hosts.error_to_raise
            )
        return lockstep_of_hosts.reaches_end_of_data, get_stop_signal()


def start_together(run: Run) -> tuple[StepFunction, Run]:
    """Loads the weights, compiles the step and opens the output folder.

    All hosts must call this function together. It fails on all hosts or on none.

    Args:
        run: The run.

    Returns:
        A tuple of:
            The compiled step.
            The run. If another process has written to the output folder while this process was
            compiling, the run has new batches, without the samples that are stored by now.

    Raises:
        Exception: If this host or another host fails; see `raise_together` for the types.
    """
    failure: Exception | None = None
    try:
        compiled_step = compile_step(run.forward)
    except Exception as error:
        # All hosts together raise this error below. If this host raised it alone, the other hosts
        # would wait for this host.
        failure = error
    # Host 0 of a pod opens its output before the other hosts do. So if two pods start at the same
    # time, their hosts 0 alone decide which pod continues.
    for is_turn_of_first_host in (True, False):
        raise_together(run.host, failure)
        try:
            if (run.host.id == 0) == is_turn_of_first_host:
                run = open_output(run)
        except Exception as error:
            failure = error
    raise_together(run.host, failure)
    return compiled_step, run


def open_output(run: Run) -> Run:
    """Takes over the folder of this host, so that no earlier process can write to it any more.

    Args:
        run: The run.

    Returns:
        The run. If another process has stored shards since `prepare` read the output, the run has
        new batches, without the samples that are stored by now.

    Raises:
        InputError: If the folder now contains a run that this run cannot continue.
        RunError: If another process is writing to the folder, or if the folder is not writable.
    """
    storage_plan_before_opening = run.storage.plan
    if run.config.storage_options.overwrite:
        run.folders.remove_totals()
    run.storage.open()
    storage_plan_after_opening = run.storage.plan
    current_commits_and_sample_limit = (
        storage_plan_after_opening.commits,
        storage_plan_after_opening.num_samples_to_read,
    )
    if current_commits_and_sample_limit == (
        storage_plan_before_opening.commits,
        storage_plan_before_opening.num_samples_to_read,
    ):
        return run
    log.info(
        "another process has written to %s in the meantime; stored there: %s",
        run.output_url,
        counted(run.storage.totals.samples, "sample"),
    )
    return run.with_text_reopened()


def take_steps(
    run: Run,
    step: StepFunction,
    progress: Progress,
    clock: Clock,
    get_stop_signal: Callable[[], int],
) -> Lockstep:
    """Runs the model on all batches of this host, and stores the activations.

    The devices compute a step while the results of the previous step are copied and stored.

    Args:
        run: The run.
        step: The compiled step.
        progress: The progress, which is closed at the end.
        clock: The clock that measures the time of each activity.
        get_stop_signal: A function that returns the number of the signal that has asked the run to
            stop, or 0 without a signal.

    Returns:
        The `Lockstep` that has yielded the batches. Its attributes `reaches_end_of_data` and
        `error_to_raise` tell how the loop has ended.
    """
    batches_until_stop = run.batches.until(get_stop_signal)
    lockstep_of_hosts = Lockstep(
        batches_until_stop, get_stop_signal, partial(any_host, run.host), clock
    )

    def start(batch: Batch | None) -> tuple[Batch | None, Activations, jax.Array]:
        """Starts the computation of a step, without waiting for its result.

        Args:
            batch: The batch of this host; None if this host has no batch for the step.

        Returns:
            A tuple of:
                The batch.
                The activations, which are still being computed.
                The sum of the votes of all hosts, an array on the devices. The hosts vote on
                whether there is a further step (see `Lockstep`).
        """
        with clock.measure("compute"):
            return batch, *step(batch, lockstep_of_hosts.votes)

    can_store_batches = True
    try:
        for batch, activations, vote_sums_over_hosts in one_step_behind(
            map(start, lockstep_of_hosts)
        ):
            with clock.measure("compute"):
                jax.block_until_ready(activations)
            if batch is not None and can_store_batches:
                with clock.measure("copy"):
                    received_activations = run.forward.receive(activations)
                try:
                    with clock.measure("store"):
                        run.storage.add_batch(batch, received_activations)
                    num_kept_tokens = sum(
                        placed_sample.sample.num_kept for placed_sample in batch.samples
                    )
                    flops_of_step = run.forward.flops(batch.lengths)
                    progress.advance(
                        len(batch.samples), batch.num_tokens, flops_of_step, num_kept_tokens
                    )
                    log.debug("step %d: %d samples", progress.num_steps, len(batch.samples))
                except Exception as error:
                    # The error is raised once all hosts have stopped. Until then, no later batch is
                    # stored, because the batch that failed is missing.
                    lockstep_of_hosts.fail(error)
                    can_store_batches = False
            run.watchdog.reset()
            lockstep_of_hosts.learn(np.asarray(vote_sums_over_hosts))
    finally:
        try:
            progress.close()
        except Exception as error:
            # Writing the last metrics failed. `Lockstep` tells all hosts about this failure.
            lockstep_of_hosts.fail(error)
    return lockstep_of_hosts


def finish(run: Run, clock: Clock, complete: bool, failure: Exception | None = None) -> None:
    """Commits the complete samples of this host, and waits until all hosts have committed theirs.

    Args:
        run: The run.
        clock: The clock that measures the time of each activity.
        complete: Whether the run has reached the end of its data or of its limits (--max_samples,
            --max_tokens).
        failure: The failure that ended the steps. None without a failure.

    Raises:
        Exception: If this host or another host has failed; see `raise_together` for the types.
    """
    is_run_complete = complete and failure is None
    try:
        with clock.measure("store"):
            # Only a complete run has a mark at the end of the data. It also counts the skipped and
            # empty rows after the last sample.
            mark_at_end_of_data = run.batches.generator_result if is_run_complete else None
            if mark_at_end_of_data is None:
                run.storage.finalize(is_run_complete)
            else:
                num_skipped_rows, num_empty_rows = (
                    mark_at_end_of_data.skipped_rows,
                    mark_at_end_of_data.empty_rows,
                )
                run.storage.finalize(is_run_complete, num_skipped_rows, num_empty_rows)
    except Exception as error:
        # All hosts together raise this error below. If this host raised it alone, the other hosts
        # would wait for this host.
        failure = failure or error
    raise_together(run.host, failure)


def show_hooks(config: Config) -> int:
    """Prints a table of all hooks of the model in --model_path or --demo, for --list_hooks.

    This function reads config.json, and tokenizer.json if this file exists. If the model is in a
    local folder, the function also reads the names of the tensors.

    Args:
        config: The configuration.

    Returns:
        The exit status, 0.

    Raises:
        InputError: If the flags do not fit the model, or if config.json cannot be read.
    """
    tensor_names_of_local_checkpoint = None
    if config.demo:
        model_config = parse_model_config(MODEL_CONFIG)
    else:
        checkpoint = Checkpoint(
            config.model_options.model_path, config.model_options.model_revision
        )
        model_config = read_model_config(checkpoint.file("config.json"))
        tensor_names_of_local_checkpoint = checkpoint.local_tensors()
        check_adapter(config.model_options.lora)
    request_to_list_hooks = step_request(config)
    _, activation_dtype = choose_dtypes(request_to_list_hooks, jax.default_backend())
    _, encoders = choose_hooks(request_to_list_hooks, model_config)
    hook_table_of_model = hook_table(model_config, config.hook_options.top_logits)
    special_tokens = known_special_tokens(config)
    if (
        tensor_names_of_local_checkpoint is not None
        and HEAD not in tensor_names_of_local_checkpoint
        and not model_config.tie_word_embeddings
    ):
        hook_table_of_model = hook_table_of_model.without_predictions()
    position_rule, row_length = config.text_options.positions, config.text_options.max_seq_length
    say(
        *list_hooks(
            hook_table_of_model, model_config, activation_dtype, position_rule, row_length, encoders
        )
    )
    if special_tokens:
        say(f"special tokens: {special_tokens.description}")
    return 0


def recompute_some(config: Config) -> int:
    """Verifies a stored run, or another program's hidden states, by recomputing some samples.

    Args:
        config: The configuration.

    Returns:
        The exit status: 0 if there is no problem, otherwise 1.

    Raises:
        InputError: If there is neither a run nor hidden states of another program, if the model
            or the data differ from those of the run, or if the hidden states do not fit the model.
    """
    use_compilation_cache(
        config.computing_options.compilation_cache,
        Path(config.output_options.output_dir),
        several_hosts=False,
    )
    return look(
        config,
        partial(load_for_recomputing, config),
        load_states_recomputer=partial(load_for_hidden_states, config),
    )


def join_hosts(config: Config) -> Host:
    """Joins the other hosts of the pod, if --multihost is set.

    Args:
        config: The configuration.

    Returns:
        This host. Without --multihost, it is the only host.

    Raises:
        InputError: If there is no pod, or if its hosts cannot work together.
        RunError: If the other hosts do not answer in time.
    """
    if not config.host_options.multihost:
        return Host()
    log.info("joining the other hosts")
    this_host = join(config.host_options)
    start_logging(config.verbose, config.host_options.machine_id, this_host.id)
    return this_host
