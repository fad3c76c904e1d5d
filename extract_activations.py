#!/usr/bin/env python3
"""Extracts the activations of a language model from a stream of text. See --help and README.md.

This script is the story of a run, from the checked flags to the summary; the modules that it calls
do the work. It finds everything the user can get wrong before it reads the weights.
"""

if __name__ == "__main__":
    # The flags are parsed before what follows is imported, which takes seconds. `script` imports
    # this file again, as a module, if the flags ask for more than the help or a stored run.
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

from activation_extraction.cli.config import task_without_machine
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
from activation_extraction.model.forward import Activations, Step, compile_step
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
from activation_extraction.run.summary import (
    how_to_continue,
    list_hooks,
    make_progress,
    print_summary,
)
from activation_extraction.text.batch import Batch


def carry_out(config: Config) -> int:
    """Does what checked flags ask of a model, and returns the exit status."""
    leave_out_absent_tpu()
    if config.list_hooks:
        return show_hooks(config)
    if config.planning.plan is not None:
        return print_estimate(config)
    return recompute_some(config) if config.looking.requested else extract(config)


def extract(config: Config) -> int:
    """Carries out one run from beginning to end.

    Args:
        config: The configuration.

    Returns:
        The exit status.

    Raises:
        InputError: The request cannot be met.
        RunError: Something failed on the way.
    """
    hosts = config.hosts
    if hosts.total_machines > 1:
        log.info("machine %d of %d", hosts.machine_id, hosts.total_machines)
    elif task := task_without_machine(config):
        log.warning(
            "%s is set, but this is machine 0 of 1, as every other task of the array would be; set "
            "MACHINE_ID and TOTAL_MACHINES in each task to share the data",
            task,
        )
    host = join_hosts(config)
    watchdog = Watchdog(hosts.stall_timeout)
    remedy = how_to_continue(host.count, config.storage.overwrite)
    with explain_abort(host, f"committed shards are safe; {remedy}"):
        with device_errors():
            run = prepare(config, host, watchdog)
        clock, signaled = Clock(), 0
        try:
            if any_host(host, [not run.storage.complete])[0]:
                complete, signaled = compute(run, clock)
            else:
                if config.repair:
                    log.info("no shard needs repair")
                else:
                    log.info("everything has been computed already")
                finish(run, clock, complete=True)
                complete = True
        except RunError as error:
            totals = run.storage.totals
            message = (
                f"{error}. Stored in {run.where}: {counted(totals.shards, 'shard')}, "
                f"{counted(totals.samples, 'sample')}"
            )
            failure = reworded(error, message, RunError)
            failure.remedy = failure.remedy or remedy
            raise failure from error
        print_summary(run, clock, complete)
        totals = run.storage.totals
        samples, tokens = any_host(host, [totals.samples > 0, totals.tokens > 0])
        leave(host)
    if complete and samples and not tokens:
        choice = run.text.sample_form.choice
        raise RunError(
            f"no token was stored: no sample has a token that is kept ({choice})",
            remedy="start anew with another choice and --overwrite",
            recurs=True,
        )
    if config.repair and complete:
        return verify(run.storage.destination, None, 0)
    return 0 if complete else 128 + (signaled or signal.SIGTERM)


def compute(run: Run, clock: Clock) -> tuple[bool, int]:
    """Runs the model over the text.

    Args:
        run: The run.
        clock: The clock that measures how long each activity takes.

    Returns:
        Whether all is done, and the number of the signal that stopped the run, 0 for none.
    """
    with device_errors():
        step, run = start_together(run)
    clock.restart()
    with run.storage, stop_on_signals() as stopped:
        try:
            with device_errors(), run.watchdog:
                progress = make_progress(run)
                steps = take_steps(run, step, progress, clock, stopped)
        except KeyboardInterrupt:  # the second Ctrl-C: do not wait for uploads
            run.storage.close()
            raise
        if stopped() and (waiting := run.storage.gauges()["bytes_waiting"]):
            log.info(
                "stopping; %.2f GB wait to be stored, in order; what is not stored when this "
                "process is killed is computed again",
                waiting / 1e9,
            )
        with device_errors():
            finish(run, clock, steps.complete, steps.failure)
        return steps.complete, stopped()


def start_together(run: Run) -> tuple[Step, Run]:
    """Loads the weights, compiles the step and opens the output; fails on all hosts or on none.

    Returns:
        The step, and the run with the batches that are left, because another process may have
        written to the same output while this one was compiling.
    """
    failure: Exception | None = None
    try:
        step = compile_step(run.forward)
    except Exception as error:  # the other hosts must not wait for this one
        failure = error
    for firsts_turn in (True, False):  # if two pods begin, the first hosts decide which goes on
        raise_together(run.host, failure)
        try:
            if (run.host.id == 0) == firsts_turn:
                run = open_output(run)
        except Exception as error:
            failure = error
    raise_together(run.host, failure)
    return step, run


def open_output(run: Run) -> Run:
    """Takes over the output; returns the run with the batches that are still not stored."""
    before = run.storage.plan
    if run.config.storage.overwrite:
        run.folders.remove_totals()
    run.storage.open()
    plan = run.storage.plan
    if (plan.commits, plan.until) == (before.commits, before.until):
        return run
    log.info(
        "another process has written to %s in the meantime; stored there: %s",
        run.where,
        counted(run.storage.totals.samples, "sample"),
    )
    return run.with_text_reopened()


def take_steps(
    run: Run, step: Step, progress: Progress, clock: Clock, stopped: Callable[[], int]
) -> Lockstep:
    """Runs the loop over batches: a step computes while the one before is copied and stored.

    Args:
        run: The run.
        step: The compiled step.
        progress: The progress, which is closed at the end.
        clock: The clock that measures how long each activity takes.
        stopped: A function that returns the number of the signal that asks to stop, 0 for none.

    Returns:
        How the steps ended: whether the data was used up, and what failed.
    """
    batches = run.batches.until(stopped)
    steps = Lockstep(batches, stopped, partial(any_host, run.host), clock)

    def start(batch: Batch | None) -> tuple[Batch | None, Activations, jax.Array]:
        with clock.measure("compute"):
            return batch, *step(batch, steps.votes)

    storing = True
    try:
        for batch, activations, votes in one_step_behind(map(start, steps)):
            with clock.measure("compute"):
                jax.block_until_ready(activations)
            if batch is not None and storing:
                with clock.measure("copy"):
                    on_host = run.forward.receive(activations)
                try:
                    with clock.measure("store"):
                        run.storage.add_batch(batch, on_host)
                    kept = sum(placed.sample.num_kept for placed in batch.samples)
                    flops = run.forward.flops(batch.lengths)
                    progress.advance(len(batch.samples), batch.num_tokens, flops, kept)
                    log.debug("step %d: %d samples", progress.steps, len(batch.samples))
                except Exception as error:  # it is raised once all hosts have stopped
                    steps.fail(error)
                    storing = False  # nothing may be stored after a gap
            run.watchdog.reset()
            steps.learn(np.asarray(votes))
    finally:
        try:
            progress.close()
        except Exception as error:  # the last metrics were not written; tell the other hosts
            steps.fail(error)
    return steps


def finish(run: Run, clock: Clock, complete: bool, failure: Exception | None = None) -> None:
    """Commits the complete samples and waits until the other hosts have done the same."""
    done = complete and failure is None
    try:
        with clock.measure("store"):
            # Rows count up to the end of the data, unless a run ends before it.
            end = run.batches.result if done else None
            rows = () if end is None else (end.skipped_rows, end.empty_rows)
            run.storage.finalize(done, *rows)
    except Exception as error:  # the other hosts must not wait for this one
        failure = failure or error
    raise_together(run.host, failure)


def show_hooks(config: Config) -> int:
    """Prints the hooks of the model that the flags name (--list_hooks); returns the exit status.

    Only config.json is read, and if they are there, tokenizer.json and, of a local folder, the
    names of the tensors.
    """
    names = None
    if config.demo:
        model = parse_model_config(MODEL_CONFIG)
    else:
        checkpoint = Checkpoint(config.model.model_path, config.model.model_revision)
        model = read_model_config(checkpoint.file("config.json"))
        names = checkpoint.local_tensors()
        check_adapter(config.model.lora)
    request = step_request(config)
    stored = choose_dtypes(request, jax.default_backend())[1]
    encoders = choose_hooks(request, model)[1]
    rule, length = config.text.positions, config.text.max_seq_length
    table, special = hook_table(model, config.hooks.top_logits), known_special_tokens(config)
    if names is not None and HEAD not in names and not model.tie_word_embeddings:
        table = table.without_predictions()
    say(*list_hooks(table, model, stored, rule, length, encoders))
    if special:
        say(f"special tokens: {special.template}")
    return 0


def recompute_some(config: Config) -> int:
    """Verifies what is stored, and computes some samples again; returns the exit status."""
    use_compilation_cache(
        config.computing.compilation_cache, Path(config.output.output_dir), several=False
    )
    return look(config, partial(load_for_recomputing, config))


def join_hosts(config: Config) -> Host:
    """Joins the other hosts of the pod; without --multihost, this process is the only host."""
    if not config.hosts.multihost:
        return Host()
    log.info("joining the other hosts")
    host = join(config.hosts)
    start_logging(config.verbose, config.hosts.machine_id, host.id)
    return host
