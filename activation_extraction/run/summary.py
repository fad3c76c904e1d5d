"""What a run tells its user: its progress, and at the end what this host stored and how to go on.

Totals over all machines and hosts are the subject of inspect/status_table.py.
"""

from collections.abc import Iterable, Mapping

from activation_extraction.cli.console import Clock, Progress
from activation_extraction.common.visible import counted, say
from activation_extraction.model.devices import peak_flops
from activation_extraction.run.hosts import any_host
from activation_extraction.run.prepare import Job
from activation_extraction.store.commit import Totals
from activation_extraction.store.formats import lines_of_dataset

ACTIVITIES = ("data", "compute", "copy", "store")


def progress_of(job: Job, log_every: int) -> Progress:
    """This host's progress bar, progress lines and metrics."""
    devices = job.forward.rows.mesh.shape["device"]
    return Progress(
        job.text.max_samples,
        job.storage.found_samples,
        log_every,
        chips=devices,
        peak_flops=peak_flops(devices),
        gauges=lambda: {"batches_ready": job.batches.ready, **job.storage.gauges()},
        record=job.storage.record,
    )


def print_summary(job: Job, clock: Clock, complete: bool, verbose: bool) -> None:
    """Prints what is stored; on the first host also where the time went and how to read it.

    verbose: whether the other hosts print all that too.
    """
    storage, totals = job.storage, job.storage.totals
    if job.repair is not None:
        differing = job.repair.differing(storage.made) if complete else ()
        made = [commit.number for commit in storage.made]
        say(*differing, what_was_repaired(made, job.where, complete))
        return
    say(what_is_stored(totals, len(job.forward.hooks), job.where, complete))
    if job.text.skip_bad_rows:
        rows = counted(totals.skipped_rows, "row")
        say(f"skipped: {rows} that could not be used (--skip_bad_rows)")
    if totals.empty_rows:
        say(f"empty: {counted(totals.empty_rows, 'row')} without text, which gave no sample")
    if totals.cut_samples:
        say(
            f"cut: {counted(totals.cut_samples, 'sample')} at "
            f"{counted(job.text.length, 'token')} (--max_seq_length); left out: "
            f"{counted(totals.cut_tokens, 'token')}"
        )
    if job.host.id != 0 and not verbose:
        return
    if new := totals.tokens - storage.found_tokens:
        say(where_the_time_went(totals, clock, storage.waited, new, job.text.choice.everything))
    if totals.shards:
        say("read it with:", *(f"  {line}" for line in how_to_read(job)))


def kept_nothing(job: Job) -> bool:
    """Whether all hosts together have samples, but no token of them. All hosts must call this."""
    totals = job.storage.totals
    samples, tokens = any_host(job.host, [totals.samples > 0, totals.tokens > 0])
    return samples and not tokens


def how_to_read(job: Job) -> list[str]:
    """Lines of Python: for the whole run, and for one shard without this program."""
    in_bucket, shards = job.folders.bucket_url is not None, job.storage.format
    lines = lines_of_dataset(job.folders.bucket_url or str(job.folders.local))
    alone = shards.how_to_read(f"{job.where}/{shards.file_name(1)}", in_bucket)
    return [*lines, *(["# or one shard, without this program:"] if alone else []), *alone]


def what_is_stored(totals: Totals, hooks: int, where: str, complete: bool) -> str:
    """The line that every host prints."""
    return (
        f"{'done' if complete else 'interrupted'}: "
        f"{counted(totals.samples, 'sample')}, {counted(totals.tokens, 'token')}, "
        f"{counted(hooks, 'hook')}, {counted(totals.shards, 'shard')}, "
        f"{totals.bytes / 1e6:,.1f} MB in {where}"
    )


def where_the_time_went(
    totals: Totals, clock: Clock, waited: Mapping[str, float], tokens: int, every_token: bool
) -> str:
    """waited: seconds in which the memory for shards was full, by what the oldest shard waited for.
    tokens: those of this run alone; every_token: whether samples are stored whole."""
    elapsed = clock.elapsed
    what = "tokens" if every_token else "kept tokens"
    spent = ", ".join(f"{name} {clock.seconds[name]:.1f}" for name in ACTIVITIES)
    held_up = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in waited.items())
    return (
        f"time: {elapsed:.1f} s, {tokens / elapsed:,.0f} {what}/s; waiting for {spent} s; of "
        f"store, until there was room in memory (--waiting_shards_gb): {held_up} s; shards took "
        f"{totals.pack_seconds:.1f} s to pack and {totals.write_seconds:.1f} s to write"
    )


def what_was_repaired(repaired: Iterable[int], where: str, complete: bool) -> str:
    """The line at the end of --repair."""
    made = ", ".join(map(str, repaired)) or "none"
    return f"{'repaired' if complete else 'interrupted'}: shards made again in {where}: {made}"


def continue_with(hosts: int, overwrite: bool) -> str:
    """What to do after a failure. hosts: how many; overwrite: whether --overwrite was given."""
    flags = " without --overwrite" if overwrite else ""
    if hosts > 1:
        return f"to continue, start all hosts again with the same command{flags}"
    return f"to continue, run the same command again{flags}"
