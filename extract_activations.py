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
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Before the libraries are imported: `datasets` would load PyTorch wherever it is installed.
os.environ.setdefault("USE_TORCH", "false")

import jax

from activation_extraction.cli.config import Config, parse_args
from activation_extraction.cli.console import Clock, Progress, log, start_logging, stop_on_signals
from activation_extraction.cli.errors import InputError, RunError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.compilation import use_compilation_cache
from activation_extraction.model.devices import device_errors, peak_flops
from activation_extraction.model.forward import (
    Forward,
    ModelRequest,
    build_model,
    choose_dtypes,
    prepare_model,
)
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
from activation_extraction.reading.status import show_status
from activation_extraction.reading.verify import verify
from activation_extraction.run import demo
from activation_extraction.run.hosts import (
    Host,
    Watchdog,
    agree,
    any_host,
    digest_files,
    join,
    last_words,
    part,
    together,
)
from activation_extraction.run.list_hooks import list_hooks
from activation_extraction.run.loop import extract
from activation_extraction.run.recompute import load_again
from activation_extraction.text.documents import check_dataset
from activation_extraction.text.packing import Batch
from activation_extraction.text.text import max_samples_of, open_batches, open_dataset
from activation_extraction.text.tokens import Prefetch, load_tokenizer
from qwen2_jax_with_hooks import QWEN2

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "datasets")


@dataclass(frozen=True)
class Job:
    """A request that has been checked: the model, the text, and where the result goes (`place`)."""

    config: Config
    host: Host
    forward: Forward
    storage: ActivationStorage
    batches: Prefetch[Batch]
    identity: dict[str, Any]
    place: str


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    try:
        config = parse_args(argv)
        start_logging(config.verbose, config.machine_id, config.host_id if config.multihost else 0)
        if config.list_hooks:
            return show_hooks(config)
        return look(config) if config.status or config.verify else run(config)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
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
                log.info("everything is computed already")
                finish(job, clock, complete=True)
                complete, signaled = True, 0
        except RunError as error:
            totals = job.storage.totals
            raise RunError(
                f"{error}. Stored in {job.place}: {totals.shards} shard(s), {totals.samples} "
                f"samples; {how_to_continue(config, host)}"
            ) from error
        print_summary(job, clock, complete)
        part(host)
    return 0 if complete else 128 + (signaled or signal.SIGTERM)


def compute(job: Job, clock: Clock) -> tuple[bool, int]:
    """Runs the model over the text; returns whether all is done, and the signal that stopped it."""
    config, host, storage = job.config, job.host, job.storage
    with device_errors():
        step = start_together(job)
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
                    job.forward.model.flops,
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
    try:
        with clock.measure("store"):
            job.storage.finalize(complete and failure is None)
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


def show_hooks(config: Config) -> int:
    """--list_hooks: for the model that the flags name, of which only config.json is read."""
    request = ModelRequest.of(config)
    if config.demo:
        qwen = QWEN2.config.from_hf(demo.MODEL_CONFIG)
    else:
        qwen = QWEN2.config.from_file(Checkpoint(config.model_path).file("config.json"))
    print("\n".join(list_hooks(QWEN2.hooks, qwen, choose_dtypes(request)[1])))
    return 0


def look(config: Config) -> int:
    """--status and --verify: looks at what is stored; returns the exit status."""
    try:
        root = Store(config.location, config.upload_timeout)
        if config.status:
            return show_status(root, config.aggregate)
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
    job, problem = None, None
    fields: dict[str, Any] = {}
    try:
        job = prepare(config, host)
    except Exception as error:  # whatever it is, the other hosts must not wait for this one
        problem = error
    else:
        fields = fingerprint(job)
    agree(host, fields, problem)
    assert job is not None
    return job


def start_together(job: Job) -> Step:
    """Loads, compiles and opens the output; when it fails on one host it fails on all."""
    failure: Exception | None = None
    try:
        step = compile_step(job.forward)
        if job.config.overwrite:
            remove_others(job.config, job.host)
        job.storage.open()
    except Exception as error:  # as in prepare_together
        failure = error
    together(job.host, failure)
    return step


def fingerprint(job: Job) -> dict[str, Any]:
    """All that must be the same on every host of a run, by name."""
    own = {"host_id", "coordinator_address", "output_dir", "output_url", "model_path"}
    own |= {"dataset_path", "verbose", "compilation_cache"}
    asked = {name: value for name, value in asdict(job.config).items() if name not in own}
    here = Path(__file__).parent
    source = [*here.glob("*.py"), *(here / "activation_extraction").rglob("*.py")]
    return {
        "configuration": json.dumps(asked, sort_keys=True, default=str),
        **{name: value for name, value in job.identity.items() if name not in PER_HOST},
        "package versions": json.dumps({package: version(package) for package in PACKAGES}),
        "source": digest_files(source),
        "devices": f"{jax.default_backend()} {jax.local_device_count()}",
        "mesh": json.dumps(job.forward.layout.shape),
    }


def prepare(config: Config, host: Host) -> Job:
    """Checks the whole request; what costs most, the weights, comes last. Raises InputError."""
    folder = config.output_dir / config.folder_name(host.id, host.count, in_bucket=False)
    check_output_dir(folder)
    use_compilation_cache(config.compilation_cache, config.output_dir, host.several)
    remote = open_bucket(config, host)
    stale = stale_folders(config, host)
    if stale and not config.overwrite:
        raise InputError(
            f"{stale[0].url}: holds an extraction by another number of hosts or machines; "
            "--overwrite replaces it"
        )
    check_unused(stale)
    if config.demo:
        qwen = QWEN2.config.from_hf(demo.MODEL_CONFIG)
        build_model(QWEN2, ModelRequest.of(config), qwen)  # may refuse the flags
        log.info("demo: making a tiny Qwen2 model and sample documents")
        config = demo.prepare(config, folder, QWEN2)
    forward = prepare_model(QWEN2, ModelRequest.of(config))
    tokenizer = load_tokenizer(forward.checkpoint, forward.model.config.vocab_size)
    dataset, data = open_dataset(config)
    check_dataset(dataset, config.text_column)
    identity = identity_of(config, forward, host, data)
    if not config.overwrite:
        for root, _ in output_roots(config):
            check_siblings(root, identity)
    storage = open_storage(config, forward, host, folder, remote, identity)
    batches = open_batches(config, host, tokenizer, dataset, storage)
    place = remote.url if remote else str(folder)
    return Job(config, host, forward, storage, batches, identity, place)


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
        "max_seq_length": config.max_seq_length,
        "hooks": [hook.name for hook in model.hooks],
        "keyed by": forward.keyed_by,
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
    return ActivationStorage(
        folder,
        {key: hook.name for key, hook in forward.hooks.items()},
        shard_size_gb=config.shard_size_gb,
        compress=config.compress_shards,
        overwrite=config.overwrite,
        metadata={
            "configuration": config.to_json(),
            "model": asdict(forward.model.config),
            "backend": jax.default_backend(),
            "mesh": forward.layout.shape,
            "versions": {package: version(package) for package in PACKAGES},
        },
        identity=identity,
        max_samples=max_samples_of(config, host),
        remote=remote,
        delete_local=config.delete_local_after_upload,
        hook_facts={key: hook.facts(sizes) for key, hook in forward.hooks.items()},
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
    if job.host.id != 0 and not job.config.verbose:
        return
    if new:
        print(
            f"time: {elapsed:.1f} s, {new / elapsed:,.0f} tokens/s; waiting for {spent} s; in the "
            f"background compress {totals.compress_seconds:.1f}, write {totals.write_seconds:.1f}, "
            f"upload {totals.upload_seconds:.1f} s"
        )
    if totals.shards:
        name = f"{job.place}/shard_0001.pkl"
        if job.config.compress_shards:
            name += ".gz"
        opened = f"gzip.open({name!r})" if job.config.compress_shards else f"open({name!r}, 'rb')"
        if job.config.bucket_url is not None:
            opened = f"fsspec.open({name!r}, compression='infer').open()"
        module = opened.split(".")[0] + ", " if "." in opened.split("(")[0] else ""
        print(f"read it with:\n  import {module}pickle\n  records = pickle.load({opened})")


if __name__ == "__main__":
    status = 1
    try:
        status = main()
    except SystemExit as stop:  # --help
        status = int(stop.code or 0)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # What can be committed is. Native threads of streaming readers, and those of jax.distributed
    # after a failure, can hang or abort an ordinary exit.
    os._exit(status)
