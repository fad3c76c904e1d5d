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
from activation_extraction.run.prepare import Job, model_request, prepare_together
from activation_extraction.run.recompute import load_for_recomputing
from activation_extraction.run.summary import (
    how_to_continue,
    list_hooks,
    make_progress,
    print_summary,
)
from activation_extraction.text.batch import Batch


def carry_out(config: Config) -> int:
    """Does what checked flags ask of a model; returns the exit status."""
    leave_out_absent_tpu()
    if config.list_hooks:
        return show_hooks(config)
    if config.plan is not None:
        return print_estimate(config)
    return recompute_some(config) if config.looking else run(config)


def run(config: Config) -> int:
    """Runs one extraction from beginning to end; returns the exit status."""
    if config.total_machines > 1:
        log.info("machine %d of %d", config.machine_id, config.total_machines)
    elif task := task_without_machine(config):
        log.warning(
            "%s is set, but this is machine 0 of 1, as every other task of the array would be; set "
            "MACHINE_ID and TOTAL_MACHINES in each task to share the data",
            task,
        )
    host = join_hosts(config)
    watchdog = Watchdog(config.stall_timeout)
    remedy = how_to_continue(host.count, config.overwrite)
    with explain_abort(host, f"committed shards are safe; {remedy}"):
        with device_errors():
            job = prepare_together(config, host, watchdog)
        clock, signaled = Clock(), 0
        try:
            if any_host(host, [not job.storage.complete])[0]:
                complete, signaled = compute(config, job, clock, watchdog)
            else:
                nothing_to_do = "everything has been computed already"
                log.info("no shard needs repair" if config.repair else nothing_to_do)
                finish(job, clock, complete=True)
                complete = True
        except RunError as error:
            totals = job.storage.totals
            told = (
                f"{error}. Stored in {job.where}: {counted(totals.shards, 'shard')}, "
                f"{counted(totals.samples, 'sample')}"
            )
            failure = reworded(error, told, RunError)
            failure.remedy = failure.remedy or remedy
            raise failure from error
        print_summary(job, clock, complete, config.verbose)
        totals = job.storage.totals
        samples, tokens = any_host(host, [totals.samples > 0, totals.tokens > 0])
        leave(host)
    if complete and samples and not tokens:
        raise RunError(
            f"no token was stored: no sample has a token that is kept ({job.text.form.choice})",
            remedy="start anew with another choice and --overwrite",
            recurs=True,
        )
    if config.repair and complete:
        return verify(job.storage.destination, None, 0)
    return 0 if complete else 128 + (signaled or signal.SIGTERM)


def compute(config: Config, job: Job, clock: Clock, watchdog: Watchdog) -> tuple[bool, int]:
    """Runs the model over the text; returns whether all is done, and which signal stopped it."""
    with device_errors():
        step, job = start_together(job, config.overwrite, watchdog)
    clock.restart()
    with job.storage, stop_on_signals() as stopped:
        try:
            with device_errors(), watchdog:
                progress = make_progress(job, config.log_every)
                steps = extract(job, step, progress, clock, watchdog, stopped)
        except KeyboardInterrupt:  # the second Ctrl-C: do not wait for uploads
            job.storage.close()
            raise
        if stopped() and (waiting := job.storage.gauges()["bytes_waiting"]):
            log.info(
                "stopping; %.2f GB wait to be stored, in order; what is not stored when this "
                "process is killed is computed again",
                waiting / 1e9,
            )
        with device_errors():
            finish(job, clock, steps.complete, steps.failure)
        return steps.complete, stopped()


def start_together(job: Job, overwrite: bool, watchdog: Watchdog) -> tuple[Step, Job]:
    """Loads the weights, compiles the step and opens the output; fails on all hosts or on none.

    Returns the step, and the job with the batches that are left: another process may have written
    to the same output while this one was compiling.
    """
    failure: Exception | None = None
    try:
        step = compile_step(job.forward)
    except Exception as error:  # the other hosts must not wait for this one
        failure = error
    for firsts_turn in (True, False):  # if two pods begin, the first hosts decide which goes on
        raise_together(job.host, failure)
        try:
            if (job.host.id == 0) == firsts_turn:
                job = open_output(job, overwrite, watchdog)
        except Exception as error:
            failure = error
    raise_together(job.host, failure)
    return step, job


def open_output(job: Job, overwrite: bool, watchdog: Watchdog) -> Job:
    """Takes over the output; returns the job with the batches that are still not stored."""
    before = job.storage.plan
    if overwrite:
        job.folders.remove_totals()
    job.storage.open()
    plan = job.storage.plan
    if (plan.commits, plan.until) == (before.commits, before.until):
        return job
    log.info(
        "another process has written to %s in the meantime; stored there: %s",
        job.where,
        counted(job.storage.totals.samples, "sample"),
    )
    return job.with_text_reopened(watchdog)


def extract(
    job: Job,
    step: Step,
    progress: Progress,
    clock: Clock,
    watchdog: Watchdog,
    stopped: Callable[[], int],
) -> Lockstep:
    """Runs the loop over batches: a step computes while the one before is copied and stored.

    Returns how the steps ended: whether the data was used up, and what failed.
    """
    batches = job.batches.until(stopped)
    steps = Lockstep(batches, stopped, partial(any_host, job.host), clock)

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
                    on_host = job.forward.receive(activations)
                try:
                    with clock.measure("store"):
                        job.storage.add_batch(batch, on_host)
                    kept = sum(placed.sample.num_kept for placed in batch.samples)
                    flops = job.forward.flops(batch.lengths)
                    progress.advance(len(batch.samples), batch.num_tokens, flops, kept)
                    log.debug("step %d: %d samples", progress.steps, len(batch.samples))
                except Exception as error:  # it is raised once all hosts have stopped
                    steps.fail(error)
                    storing = False  # nothing may be stored after a gap
            watchdog.reset()
            steps.learn(np.asarray(votes))
    finally:
        try:
            progress.close()
        except Exception as error:  # the last metrics were not written; tell the other hosts
            steps.fail(error)
    return steps


def finish(job: Job, clock: Clock, complete: bool, failure: Exception | None = None) -> None:
    """Commits the complete samples and waits until the other hosts have done the same."""
    done = complete and failure is None
    try:
        with clock.measure("store"):
            # Rows count up to the end of the data, unless a run ends before it.
            end = job.batches.result if done else None
            rows = () if end is None else (end.skipped_rows, end.empty_rows)
            job.storage.finalize(done, *rows)
    except Exception as error:  # the other hosts must not wait for this one
        failure = failure or error
    raise_together(job.host, failure)


def show_hooks(config: Config) -> int:
    """Prints the hooks of the model that the flags name (--list_hooks); reads only config.json, and
    tokenizer.json and the names of tensors in a local folder if they are there."""
    names = None
    if config.demo:
        model = parse_model_config(MODEL_CONFIG)
    else:
        checkpoint = Checkpoint(config.model_path, config.model_revision)
        model = read_model_config(checkpoint.file("config.json"))
        names = checkpoint.local_tensors()
        check_adapter(config.lora)
    request = model_request(config)
    stored = choose_dtypes(request, jax.default_backend())[1]
    encoders = choose_hooks(request, model)[1]
    rule, length = config.positions, config.max_seq_length
    table, special = hook_table(model, config.top_logits), known_special_tokens(config)
    if names is not None and HEAD not in names and not model.tie_word_embeddings:
        table = table.without_predictions()
    say(*list_hooks(table, model, stored, rule, length, encoders))
    if special:
        say(f"special tokens: {special.template}")
    return 0


def recompute_some(config: Config) -> int:
    """Verifies what is stored, and computes some samples again; returns the exit status."""
    use_compilation_cache(config.compilation_cache, Path(config.output_dir), several=False)
    return look(
        config,
        partial(load_for_recomputing, model_request(config), config.dataset_path),
    )


def join_hosts(config: Config) -> Host:
    """Joins the other hosts of the pod; without --multihost, this process is the only host."""
    if not config.multihost:
        return Host()
    log.info("joining the other hosts")
    host = join(config)
    start_logging(config.verbose, config.machine_id, host.id)
    return host
