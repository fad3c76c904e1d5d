#!/usr/bin/env python3
"""Extracts activations of a Qwen2 model over a stream of text. See --help and README.md.

This script is the story of a run, from the command line to the summary; each chapter lives in the
module that it calls. Everything the user can get wrong is found before the weights are read.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

# Before the libraries are imported: `datasets` would load PyTorch wherever it is installed.
os.environ.setdefault("USE_TORCH", "false")

import jax

from activation_extraction.cli.config import Config, parse_args
from activation_extraction.cli.console import Clock, Progress, log, start_logging, stop_on_signals
from activation_extraction.cli.errors import InputError, RunError
from activation_extraction.model.compilation import use_compilation_cache
from activation_extraction.model.devices import device_errors, peak_flops
from activation_extraction.model.digests import digest_files
from activation_extraction.model.forward import (
    Forward,
    ModelRequest,
    build_model,
    prepare_model,
)
from activation_extraction.model.revisions import choose_commit, same_commit
from activation_extraction.model.step import Step, compile_step
from activation_extraction.output.places import (
    check_unused,
    open_bucket,
    output_roots,
    remove_others,
    stale_folders,
)
from activation_extraction.output.resume import PER_HOST, check_output_dir, check_siblings
from activation_extraction.output.storage import ActivationStorage
from activation_extraction.output.stores import Store, StoreError
from activation_extraction.reading.export import export
from activation_extraction.reading.status_table import show_status
from activation_extraction.reading.verify import verify
from activation_extraction.run import demo
from activation_extraction.run.hosts import (
    Host,
    Watchdog,
    agree,
    any_host,
    join,
    last_words,
    part,
    together,
)
from activation_extraction.run.loop import extract
from activation_extraction.run.recompute import load_again
from activation_extraction.run.repair import Repair
from activation_extraction.text.documents import DocumentStream, check_dataset
from activation_extraction.text.packing import Batch
from activation_extraction.text.text import (
    max_samples_of,
    open_batches,
    open_dataset,
    open_documents,
    open_gaps,
)
from activation_extraction.text.tokens import Prefetch, load_tokenizer
from qwen2_jax_with_hooks import QWEN2

MODEL_FILES = ("qwen2_jax", "qwen2_jax_with_hooks")
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "datasets")


@dataclass(frozen=True)
class Job:
    """A request that has been checked: the model, the text, and where the result goes (`place`).

    batches: those that were not stored when it was checked; open_text opens what is left by now.
    """

    config: Config
    host: Host
    forward: Forward
    storage: ActivationStorage
    open_text: Callable[[], tuple[DocumentStream, Prefetch[Batch]]]
    documents: DocumentStream
    batches: Prefetch[Batch]
    identity: dict[str, Any]
    place: str


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    try:
        config = parse_args(argv)
        start_logging(config.verbose, config.machine_id, config.host_id if config.multihost else 0)
        looking = config.status or config.verify or config.export
        return look(config) if looking else run(config)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}{f'; {error.remedy}' if error.remedy else ''}", file=sys.stderr)
        return 1
    except MemoryError as error:
        print(f"error: out of memory on the host: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def run(config: Config) -> int:
    """One extraction from beginning to end; returns the exit status."""
    host = join_hosts(config)
    with last_words_of(host, config):
        with device_errors():
            job = prepare_together(config, host)
        clock = Clock()
        try:
            if any_host(host, [not job.storage.complete])[0]:
                complete, signaled = compute(job, clock)
            else:
                log.info("nothing to repair" if config.repair else "everything is computed already")
                finish(job, clock, complete=True)
                complete, signaled = True, 0
        except RunError as error:
            totals = job.storage.totals
            raise RunError(
                f"{error}. Stored in {job.place}: {totals.shards} shard(s), {totals.samples} "
                f"samples",
                remedy=error.remedy or how_to_continue(config, host),
            ) from error
        if config.repair:
            print_repairs(job, complete)
        else:
            print_summary(job, clock, complete)
        part(host)
    if config.repair and complete:
        return verify(job.storage.place, None, 0)
    return 0 if complete else 128 + (signaled or signal.SIGTERM)


def compute(job: Job, clock: Clock) -> tuple[bool, int]:
    """Runs the model over the text; returns whether all is done, and the signal that stopped it."""
    config, host, storage = job.config, job.host, job.storage
    with device_errors():
        step, job = start_together(job)
    clock.began = time.perf_counter()
    with storage, stop_on_signals() as stopped:
        try:
            with device_errors(), Watchdog(config.stall_timeout) as watchdog:
                storage.alive = watchdog.alive
                complete, failure = extract(
                    host,
                    job.batches,
                    step,
                    job.forward.receive,
                    storage,
                    job.forward.flops,
                    progress_of(job),
                    clock,
                    watchdog,
                    stopped,
                )
        except KeyboardInterrupt:  # the second Ctrl-C: do not wait for uploads
            storage.close()
            raise
        with device_errors():
            finish(job, clock, complete, failure)
        return complete, stopped()


def finish(job: Job, clock: Clock, complete: bool, failure: Exception | None = None) -> None:
    """Commits what is complete, and waits for the other hosts to have done so."""
    done = complete and failure is None
    try:
        with clock.measure("store"):
            job.storage.finalize(done, job.documents.skipped_rows if done else 0)
    except Exception as error:  # as in prepare_together
        failure = failure or error
    together(job.host, failure)


def progress_of(job: Job) -> Progress:
    """The bar, the lines and the metrics of this host."""
    devices = job.forward.rows.mesh.shape["device"]
    return Progress(
        max_samples_of(job.config, job.host),
        job.storage.found_samples,
        job.config.log_every,
        chips=devices,
        peak_flops=peak_flops(devices),
        gauges=lambda: {"batches_ready": job.batches.ready, **job.storage.gauges()},
        record=job.storage.record,
    )


def look(config: Config) -> int:
    """--status, --verify and --export: reads what is stored; returns the exit status."""
    try:
        root = Store(config.location, config.upload_timeout)
        if config.status:
            return show_status(root, config.aggregate)
        if config.export is not None and config.export_dir is not None:
            export(root, config.export, config.export_dir, config.hook_names)
            return 0
        if config.verify_samples:
            use_compilation_cache(config.compilation_cache, config.output_dir, several=False)
        load = partial(load_again, QWEN2, ModelRequest.of(config))
        return verify(root, load if config.verify_samples else None, config.verify_samples)
    except StoreError as error:
        if error.final:
            raise InputError(str(error)) from error
        raise


def join_hosts(config: Config) -> Host:
    """This process alone, or as one of the pod's."""
    if not config.multihost:
        return Host()
    log.info("joining the other hosts")
    host = join(
        config.coordinator_address,
        config.host_id,
        config.num_hosts,
        config.connect_timeout,
        config.heartbeat_timeout,
    )
    start_logging(config.verbose, config.machine_id, host.id)
    return host


def prepare_together(config: Config, host: Host) -> Job:
    """Checks the request here and compares it with the other hosts'. Raises InputError."""
    job, found, problem = None, None, None
    fields: dict[str, Any] = {}
    try:
        remote = prepare_output(config, host)
        found = choose_commit(config)
    except Exception as error:  # whatever it is, the other hosts must not wait for this one
        problem = error
    agree(host, {"--model_revision": config.model_revision}, problem)
    commit = same_commit(host, found)
    try:
        job = prepare(config, host, remote, commit)
        fields = fingerprint(job)
    except Exception as error:  # whatever it is, the other hosts must not wait for this one
        problem = error
    agree(host, fields, problem)
    assert job is not None
    return job


def start_together(job: Job) -> tuple[Step, Job]:
    """Loads, compiles and opens the output; when it fails on one host it fails on all.

    Returns the step, and the job with the batches that are left: another process may have written
    to the same output while this one compiled.
    """
    failure: Exception | None = None
    storage = job.storage
    found = storage.cursor, storage.complete
    try:
        step = compile_step(job.forward)
        if job.config.overwrite:
            remove_others(job.config, job.host)
        storage.open()
        if (storage.cursor, storage.complete) != found:
            log.info(
                "another process wrote to %s meanwhile; %s samples are stored there",
                job.place,
                f"{storage.found_samples:,}",
            )
            documents, batches = job.open_text()
            job = replace(job, documents=documents, batches=batches)
    except Exception as error:  # as in prepare_together
        failure = error
    together(job.host, failure)
    return step, job


def fingerprint(job: Job) -> dict[str, Any]:
    """All that must be the same on every host of a run, by name."""
    own = {"host_id", "coordinator_address", "output_dir", "output_url", "model_path"}
    own |= {"dataset_path", "verbose", "compilation_cache"}
    asked = {name: value for name, value in asdict(job.config).items() if name not in own}
    here = Path(__file__).parent
    source = [here / f"{name}.py" for name in ("extract_activations", *MODEL_FILES)]
    source += (here / "activation_extraction").rglob("*.py")
    return {
        "configuration": json.dumps(asked, sort_keys=True, default=str),
        **{name: value for name, value in job.identity.items() if name not in PER_HOST},
        "package versions": json.dumps({package: version(package) for package in PACKAGES}),
        "source": digest_files(source),
        "devices": f"{jax.default_backend()} {jax.local_device_count()}",
        "mesh": json.dumps(job.forward.layout.shape),
        "attention": job.forward.attention.name,
    }


def output_folder(config: Config, host: Host) -> Path:
    """This host's local folder."""
    return config.output_dir / config.folder_name(host.id, host.count, in_bucket=False)


def prepare_output(config: Config, host: Host) -> Store | None:
    """Checks where the output goes; returns the bucket's folder. Raises InputError."""
    check_output_dir(output_folder(config, host))
    use_compilation_cache(config.compilation_cache, config.output_dir, host.several)
    remote = open_bucket(config, host)
    stale = stale_folders(config, host)
    if stale and not config.overwrite:
        raise InputError(
            f"{stale[0].url}: holds an extraction by another number of hosts or machines; "
            "--overwrite replaces it"
        )
    check_unused(stale)
    return remote


def prepare(config: Config, host: Host, remote: Store | None, commit: str | None) -> Job:
    """Checks the rest of the request; what costs most, the weights, comes last.

    commit: of the hub model. Raises InputError.
    """
    folder = output_folder(config, host)
    if config.demo:
        qwen = QWEN2.config.from_hf(demo.MODEL_CONFIG)
        build_model(QWEN2, ModelRequest.of(config), qwen)  # may refuse the flags
        log.info("demo: making a tiny Qwen2 model and sample documents")
        config = demo.prepare(config, folder, QWEN2)
    request = ModelRequest.of(replace(config, model_revision=commit or config.model_revision))
    forward = prepare_model(QWEN2, request)
    tokenizer = load_tokenizer(forward.checkpoint, forward.model.config.vocab_size)
    dataset, data = open_dataset(config)
    check_dataset(dataset, config.text_column, config.skip_bad_rows)
    identity = identity_of(config, forward, host, data)
    if not config.overwrite:
        for root, _ in output_roots(config):
            check_siblings(root, identity)
    storage = open_storage(config, forward, host, folder, remote, identity)

    def open_text() -> tuple[DocumentStream, Prefetch[Batch]]:
        documents = open_documents(config, host, dataset)
        if isinstance(storage, Repair):
            return documents, open_gaps(config, host, tokenizer, dataset, storage)
        return documents, open_batches(config, host, tokenizer, documents, storage)

    place = remote.url if remote else str(folder)
    return Job(config, host, forward, storage, open_text, *open_text(), identity, place)


def identity_of(
    config: Config, forward: Forward, host: Host, data: tuple[str, str]
) -> dict[str, Any]:
    """What decides the content of the shards: it may not change when a run is continued.

    Batch size, mesh, devices and where things lie may.
    """
    model = forward.model
    return {
        "model files": digest_files(forward.checkpoint.weight_files()),
        "tokenizer": digest_files(forward.checkpoint.tokenizer_files()),
        "data": data[0],
        "data content": data[1],
        "text_column": config.text_column,
        "skip_bad_rows": config.skip_bad_rows,
        "max_seq_length": config.max_seq_length,
        "hooks": [hook.name for hook in model.hooks],
        "keyed by": "layer" if config.hook_names is None else "hook name",
        "dtype": str(model.dtype),
        "activation_dtype": str(model.activation_dtype),
        "shard_size_gb": config.shard_size_gb,
        "compress_shards": config.compress_shards,
        "total_machines": config.total_machines,
        "num_hosts": host.count,
        "machine": config.machine_id,
        "host": host.id,
    }


def open_storage(
    config: Config,
    forward: Forward,
    host: Host,
    folder: Path,
    remote: Store | None,
    identity: dict[str, Any],
) -> ActivationStorage:
    """The output, with all that a reader should know about its contents. Raises InputError."""
    sizes = forward.model.config.sizes
    return (Repair if config.repair else ActivationStorage)(
        folder,
        {key: hook.name for key, hook in forward.hooks.items()},
        shard_size_gb=config.shard_size_gb,
        compress=config.compress_shards,
        overwrite=config.overwrite,
        metadata={
            "configuration": config.to_json(),
            "model": asdict(forward.model.config),
            "model_commit": forward.checkpoint.commit,
            "backend": jax.default_backend(),
            "mesh": forward.layout.shape,
            "attention": forward.attention.to_json(),
            "versions": {package: version(package) for package in PACKAGES},
        },
        identity=identity,
        max_samples=max_samples_of(config, host),
        remote=remote,
        delete_local=config.delete_local_after_upload,
        hook_facts={key: {"width": hook.kind.width(sizes)} for key, hook in forward.hooks.items()},
    )


def how_to_continue(config: Config, host: Host) -> str:
    """After a failure."""
    command = "the same command" + (" without --overwrite" if config.overwrite else "")
    return (
        f"start all hosts again with {command}, it continues"
        if host.several
        else f"{command} continues"
    )


def last_words_of(host: Host, config: Config) -> AbstractContextManager[None]:
    """What to say when JAX ends this process because another host is gone."""
    if not host.several:
        return nullcontext()
    return last_words(
        f"host {host.id} ended because another host is gone (or by a crash of its own, see above); "
        f"what is committed is safe; {how_to_continue(config, host)}"
    )


def print_summary(job: Job, clock: Clock, complete: bool) -> None:
    """What is stored; from the first host also where the time went, and how to read it."""
    totals, elapsed = job.storage.totals, clock.elapsed
    new = totals.tokens - job.storage.found_tokens
    spent = ", ".join(
        f"{name} {clock.seconds[name]:.1f}" for name in ("data", "compute", "copy", "store")
    )
    print(
        f"{'done' if complete else 'interrupted'}: {totals.samples:,} samples, "
        f"{totals.tokens:,} tokens, {len(job.forward.model.hooks)} hook(s), {totals.shards} "
        f"shard(s), {totals.bytes / 1e6:,.1f} MB in {job.place}"
    )
    if job.config.skip_bad_rows:
        print(f"skipped: {totals.skipped_rows:,} rows that cannot be used (--skip_bad_rows)")
    if job.host.id != 0 and not job.config.verbose:
        return
    if new:
        print(
            f"time: {elapsed:.1f} s, {new / elapsed:,.0f} tokens/s; waiting for {spent} s; in the "
            f"background compress {totals.compress_seconds:.1f}, write {totals.write_seconds:.1f}, "
            f"upload {totals.upload_seconds:.1f} s"
        )
    if totals.shards:
        name = f"{job.place}/shard_0001.pkl" + (".gz" if job.config.compress_shards else "")
        print("read it with:", *how_to_read(name, job.config.bucket_url is not None), sep="\n  ")


def print_repairs(job: Job, complete: bool) -> None:
    """Which shards were made again, and whether they have the bytes that they had."""
    assert isinstance(job.storage, Repair)
    for line in job.storage.differing:
        print(line)
    made = ", ".join(map(str, job.storage.repaired)) or "none"
    print(f"{'repaired' if complete else 'interrupted'}: shards made again in {job.place}: {made}")


def how_to_read(shard: str, in_bucket: bool) -> tuple[str, str]:
    """Python that reads a shard to its end, where gzip has its checksum."""
    module, opened = "", f"open({shard!r}, 'rb')"
    if in_bucket:
        module, opened = "fsspec, ", f"fsspec.open({shard!r}, compression='infer').open()"
    elif shard.endswith(".gz"):
        module, opened = "gzip, ", f"gzip.open({shard!r})"
    return f"import {module}pickle", f"records = pickle.loads({opened}.read())"


def script() -> NoReturn:
    """Runs the command line and ends the process with its exit status."""
    status = 1
    try:
        status = main()
    except SystemExit as stop:  # --help
        status = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything that can be committed has been. Native threads of streaming readers, and those of
    # jax.distributed after a failure, can hang or abort an ordinary exit.
    os._exit(status)


if __name__ == "__main__":
    script()
