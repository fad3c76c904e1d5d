#!/usr/bin/env python3
"""Extracts activations of a Qwen2 model over a stream of text. See --help and README.md.

This script is the story of a run, from the command line to the summary; each chapter lives in the
module that it calls. Everything the user can get wrong is found before the weights are read.
"""

import hashlib
import json
import math
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Before the libraries are imported: `datasets` would load PyTorch wherever it is installed.
os.environ.setdefault("USE_TORCH", "false")

import datasets
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tokenizers import Tokenizer
from tqdm import tqdm

from activation_extraction import demo
from activation_extraction.commits import AGGREGATE
from activation_extraction.config import DEFAULT_LAYERS, Config, parse_args
from activation_extraction.console import (
    Clock,
    Progress,
    log,
    on_terminal,
    start_logging,
    stop_on_signals,
)
from activation_extraction.documents import (
    DocumentStream,
    check_dataset,
    describe_files,
    open_files,
    open_hub_dataset,
)
from activation_extraction.errors import InputError, RunError, one_line
from activation_extraction.hosts import (
    Host,
    Watchdog,
    agree,
    any_host,
    digest_files,
    join,
    last_words,
    together,
)
from activation_extraction.loop import Step, extract
from activation_extraction.mesh import (
    HostRows,
    Layout,
    build_layout,
    check_divisibility,
    choose_shape,
    host_rows,
    peak_flops,
    smallest_model_axis,
    usable_devices,
)
from activation_extraction.packing import Batch, Sample, pack
from activation_extraction.resume import (
    PER_HOST,
    check_output_dir,
    check_siblings,
    find_metadata,
    other_folders,
    remove_extraction,
)
from activation_extraction.status import show_status
from activation_extraction.storage import ActivationStorage
from activation_extraction.stores import Store, StoreError
from activation_extraction.tokens import Prefetch, load_tokenizer, samples
from activation_extraction.verify import Recompute, verify
from activation_extraction.weights import Checkpoint, WeightSpec, load_params
from qwen2_jax import Qwen2, QwenConfig, weight_table
from qwen2_jax_with_hooks import (
    Hook,
    HookedQwen2,
    create_model_with_hooks,
    hooks_for_layers,
    hooks_matching,
)

BATCHES_AHEAD = 4
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "datasets")


@dataclass(frozen=True)
class Forward:
    """A checked model: what it computes, with which weights, on which devices."""

    config: Config
    checkpoint: Checkpoint
    model: HookedQwen2
    weights: dict[tuple[str, ...], WeightSpec]
    rows: HostRows

    @property
    def layout(self) -> Layout:
        return self.model.layout

    def flops(self, lengths: Iterable[int]) -> float:
        """Floating point operations of samples of these lengths."""
        return self.model.config.flops(self.model.num_layers, lengths)


@dataclass(frozen=True)
class Job:
    """A request that has been checked: the model, the text, and where the result goes (`place`)."""

    host: Host
    forward: Forward
    storage: ActivationStorage
    batches: Prefetch[Batch]
    identity: dict[str, Any]
    place: str

    @property
    def config(self) -> Config:
        return self.forward.config


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    try:
        config = parse_args(argv)
        start_logging(config.verbose, config.machine_id, config.host_id if config.multihost else 0)
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
                    *(host, job.batches, step, job.forward.rows, storage, job.forward.flops),
                    *(progress_of(job), clock, watchdog, stopped),
                )
        except KeyboardInterrupt:  # the second Ctrl-C: do not wait for uploads
            storage.close()
            raise
        with device_errors():
            finish(job, clock, complete, failure)
        return complete, stopped()


def finish(job: Job, clock: Clock, complete: bool, failure: Exception | None = None) -> None:
    """Commits what is complete. No host leaves before the others: that would end them."""
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


def look(config: Config) -> int:
    """--status and --verify: looks at what is stored; returns the exit status."""
    try:
        root = Store(config.location, config.upload_timeout)
        if config.status:
            return show_status(root, config.aggregate)
        load = partial(load_again, config) if config.verify_samples else None
        return verify(root, load, config.verify_samples)
    except StoreError as error:
        if error.final:
            raise InputError(str(error)) from error
        raise


def load_again(config: Config, metadata: dict[str, Any]) -> Recompute:
    """The model of a stored extraction, for --verify. Raises InputError when it is another one.

    The function that is returned gives (hooks, tokens, hidden) of each sample.
    """
    identity = metadata["identity"]
    config = replace(
        config,
        layers_to_extract=None,
        hook_names=tuple(identity["hooks"]),
        dtype=identity["dtype"],
        activation_dtype=identity["activation_dtype"],
        max_seq_length=identity["max_seq_length"],
    )
    with device_errors():
        forward = prepare_model(config, Host())
        if model_digest(forward) != identity["model files"]:
            raise InputError(f"--model_path {config.model_path}: is another model than the stored")
        step = compile_step(forward)

    def recompute(token_ids: list[np.ndarray]) -> list[np.ndarray]:
        stream = (Sample(i, ids, "", None, {}, {}) for i, ids in enumerate(token_ids))
        found: list[np.ndarray] = []
        for batch in pack(stream, config.batch_size, config.max_seq_length):
            with device_errors():
                activations, _ = step(batch, (False, False, False))
                on_host = forward.rows.receive(activations)
            found += [on_host[:, at.row, at.start : at.stop] for at in batch.samples]
        return found

    return recompute


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
        if job.config.overwrite and job.host.id == 0:
            for folder in stale_folders(job.config, job.host):
                remove_extraction(folder)
            for root, _ in output_roots(job.config):
                root.remove(AGGREGATE)
        job.storage.open()
    except Exception as error:  # as in prepare_together
        failure = error
    together(job.host, failure)
    return step


def fingerprint(job: Job) -> dict[str, Any]:
    """All that must be the same on every host of a run, by name."""
    own = {"host_id", "coordinator_address", "output_dir", "output_url", "model_path"}
    own |= {"dataset_path", "verbose"}
    asked = {name: value for name, value in asdict(job.config).items() if name not in own}
    here = Path(__file__).parent
    source = [*here.glob("*.py"), *(here / "activation_extraction").glob("*.py")]
    return {
        "configuration": json.dumps(asked, sort_keys=True, default=str),
        **{name: value for name, value in job.identity.items() if name not in PER_HOST},
        "package versions": json.dumps({package: version(package) for package in PACKAGES}),
        "source": digest_files(source),
        "devices": f"{jax.default_backend()} {jax.local_device_count()}",
    }


def prepare(config: Config, host: Host) -> Job:
    """Checks the whole request; what costs most, the weights, comes last. Raises InputError."""
    folder = config.output_dir / config.folder_name(host.id, host.count, in_bucket=False)
    check_output_dir(folder)
    remote = open_bucket(config, host)
    stale = stale_folders(config, host)
    if stale and not config.overwrite:
        raise InputError(
            f"{stale[0].url}: holds an extraction by another number of hosts or machines; "
            "--overwrite replaces it"
        )
    if config.demo:
        build_model(config, QwenConfig.from_hf(demo.MODEL_CONFIG), host)  # may refuse the flags
        log.info("demo: making a tiny Qwen2 model and sample documents")
        config = demo.prepare(
            config, folder, lambda raw: weight_table(Qwen2(QwenConfig.from_hf(raw))).values()
        )
    forward = prepare_model(config, host)
    tokenizer = load_tokenizer(forward.checkpoint, forward.model.config.vocab_size)
    dataset, data = open_dataset(config)
    check_dataset(dataset, config.text_column)
    identity = identity_of(forward, host, data)
    if not config.overwrite:
        for root, _ in output_roots(config):
            check_siblings(root, identity)
    storage = open_storage(forward, host, folder, remote, identity)
    batches = open_batches(config, host, tokenizer, dataset, storage)
    return Job(host, forward, storage, batches, identity, remote.url if remote else str(folder))


def output_roots(config: Config) -> list[tuple[Store, bool]]:
    """The folders above those of machines and hosts, and whether each is in the bucket."""
    roots = [(Store(config.output_url), False)]
    if config.bucket_url is not None:
        roots.append((Store(config.bucket_url, config.upload_timeout), True))
    return roots


def stale_folders(config: Config, host: Host) -> list[Store]:
    """What an earlier run of this machine, with other hosts or machines, left in the output."""
    found = []
    for root, in_bucket in output_roots(config):
        own = {config.folder_name(i, host.count, in_bucket) for i in range(host.count)}
        found += other_folders(root, config.machine, own)
    return found


def open_bucket(config: Config, host: Host) -> Store | None:
    """This host's folder in the bucket, after a trial. Raises InputError when it is refused."""
    if config.bucket_url is None:
        return None
    name = config.folder_name(host.id, host.count, in_bucket=True)
    try:
        store = Store(config.bucket_url, config.upload_timeout).child(name)
        store.try_writing()
    except StoreError as error:
        if error.final:
            raise InputError(f"--upload_to_gcs: {error}") from error
        raise
    return store


def prepare_model(config: Config, host: Host) -> Forward:
    """The model on its mesh, with a checkpoint that has been checked. Raises InputError."""
    checkpoint = Checkpoint(config.model_path)
    qwen = QwenConfig.from_file(checkpoint.file("config.json"))
    model, rows = build_model(config, qwen, host)
    weights = weight_table(model)
    every = weight_table(Qwen2(qwen)).values()
    known = {name for spec in every for name in spec.hf_names} | {"lm_head.weight"}
    checkpoint.check(weights.values(), known)
    return Forward(config, checkpoint, model, weights, rows)


def open_dataset(config: Config) -> tuple[datasets.IterableDataset, tuple[str, str]]:
    """The data set, and its name and revision: what an extraction that goes on must not change.

    Of the hub the revision is that with which the extraction began.
    """
    if config.dataset_path is not None:
        dataset = open_files(config.dataset_path, config.text_column)
        files = json.dumps(describe_files(config.dataset_path))
        return dataset, ("files", hashlib.sha256(files.encode()).hexdigest())
    name, subset, split = config.dataset_name, config.dataset_config, config.dataset_split
    source = " ".join(filter(None, (name, subset, split)))
    revision = None
    for root, _ in output_roots(config):
        _, earlier = find_metadata(root) or ("", {})
        if not config.overwrite and earlier.get("identity", {}).get("data") == source:
            revision = earlier["identity"]["data content"]
    dataset, revision = open_hub_dataset(str(name), subset, str(split), revision)
    return dataset, (source, revision)


def model_digest(forward: Forward) -> str:
    """Of the configuration and the weights, as far as `digest_files` reads them."""
    return digest_files(forward.checkpoint.weight_files())


def identity_of(forward: Forward, host: Host, data: tuple[str, str]) -> dict[str, Any]:
    """What decides the content of the shards: it may not change when a run is continued.

    Batch size, mesh, devices and where things lie may.
    """
    config, model = forward.config, forward.model
    return {
        "model files": model_digest(forward),
        "tokenizer": digest_files(forward.checkpoint.tokenizer_files()),
        "data": data[0],
        "data content": data[1],
        "text_column": config.text_column,
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
    forward: Forward, host: Host, folder: Path, remote: Store | None, identity: dict[str, Any]
) -> ActivationStorage:
    """The output, with all that a reader should know about its contents. Raises InputError."""
    config, model = forward.config, forward.model
    by_name = config.hook_names is not None
    return ActivationStorage(
        folder,
        {hook.name if by_name else hook.layer: hook.name for hook in model.hooks},
        shard_size_gb=config.shard_size_gb,
        compress=config.compress_shards,
        overwrite=config.overwrite,
        metadata={
            "configuration": config.to_json(),
            "model": asdict(model.config),
            "backend": jax.default_backend(),
            "mesh": forward.layout.shape,
            "versions": {package: version(package) for package in PACKAGES},
        },
        identity=identity,
        max_samples=max_samples_of(config, host),
        remote=remote,
        delete_local=config.delete_local_after_upload,
    )


def open_batches(
    config: Config,
    host: Host,
    tokenizer: Tokenizer,
    dataset: datasets.IterableDataset,
    storage: ActivationStorage,
) -> Prefetch[Batch]:
    """This host's part of the text that is not stored yet, as packed batches, prepared in the
    background."""
    if storage.complete:
        return Prefetch(iter(()), BATCHES_AHEAD)
    rank = config.machine_id * host.count + host.id
    world = config.total_machines * host.count
    documents = DocumentStream(dataset, config.text_column, rank, world)
    stream = samples(
        *(documents, tokenizer, config.max_seq_length, max_samples_of(config, host)),
        *(rank, world, storage.cursor),
    )
    batches = Prefetch(pack(stream, config.batch_size, config.max_seq_length), BATCHES_AHEAD)
    try:
        if batches.peek() is None and world == 1 and not storage.found_samples:
            raise InputError("the data set is empty: no row has text")
    except RunError as error:
        raise InputError(str(error)) from error
    return batches


def build_model(config: Config, qwen: QwenConfig, host: Host) -> tuple[HookedQwen2, HostRows]:
    """The hooked model on its mesh, and how rows come to the mesh. Raises InputError."""
    devices = usable_devices(config.use_data_parallel)
    dtype = choose_dtype(config.dtype)
    stored = dtype if config.activation_dtype == "auto" else jnp.dtype(config.activation_dtype)
    hooks = choose_hooks(config, qwen.num_hidden_layers)
    if config.max_seq_length > qwen.max_position_embeddings:
        raise InputError(
            f"--max_seq_length {config.max_seq_length}: the model has "
            f"{qwen.max_position_embeddings} positions"
        )
    rows = host_rows(devices)
    total_rows = config.batch_size * rows.hosts
    smallest_model = 1
    if config.mesh_type == "auto":
        alone = create_model_with_hooks(qwen, hooks, dtype, stored)
        smallest_model = smallest_model_axis(
            len(devices),
            total_rows,
            weights=sum(math.prod(spec.shape) for spec in weight_table(alone).values()),
            captured=len(hooks) * total_rows * config.max_seq_length * qwen.hidden_size,
            itemsize=dtype.itemsize,
        )
    shape, remark = choose_shape(
        config.mesh_type,
        config.mesh_shape if config.use_data_parallel else None,
        config.mesh_axes if config.use_data_parallel else None,
        devices=len(devices),
        hosts=rows.hosts,
        smallest_model=smallest_model,
    )
    if remark:
        log.info("%s", remark)
    layout = build_layout(devices, shape, qwen.num_key_value_heads)
    check_divisibility(layout, total_rows, config.max_seq_length, qwen.sizes)
    model = create_model_with_hooks(qwen, hooks, dtype, stored, layout=layout)
    return model, rows


def choose_dtype(name: str) -> Any:
    """The computing dtype; auto is what the hardware is built for."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def choose_hooks(config: Config, depth: int) -> tuple[Hook, ...]:
    """The hooks asked for. The default layers are clipped to the depth, explicit ones are not."""
    if config.hook_names is not None:
        return hooks_matching(config.hook_names, depth)
    layers = config.layers_to_extract or [min(layer, depth - 1) for layer in DEFAULT_LAYERS]
    return hooks_for_layers(layers, config.activation_type, depth)


def max_samples_of(config: Config, host: Host) -> int | None:
    """This host's share of what the machine may store."""
    most = config.max_samples
    return None if most is None else len(range(host.id, most, host.count))


def compile_step(forward: Forward) -> Step:
    """Loads the weights and compiles the forward pass, once for the whole run.

    Returns the function (batch or None, flags of this host) -> (activations (hooks, rows of all
    hosts, T, D), number of hosts that set each flag). It does not wait for the devices.
    """
    config, model, rows = forward.config, forward.model, forward.rows
    shape = (config.batch_size, config.max_seq_length)
    params = read_weights(forward)
    began = time.perf_counter()

    def apply(params: Any, tokens: Array, segments: Array, positions: Array, flags: Array) -> Any:
        return model.apply({"params": params}, tokens, segments, positions), flags.sum(axis=0)

    def abstract(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        whole = (shape[0] * rows.hosts, *shape[1:])
        return jax.ShapeDtypeStruct(whole, jnp.int32, sharding=rows.incoming())

    outgoing = rows.outgoing(config.max_seq_length), rows.everywhere()
    inputs = [abstract(shape)] * 3 + [abstract((1, 3))]
    compiled = jax.jit(apply, out_shardings=outgoing).lower(params, *inputs).compile()
    log.info("compiled in %.1f s", time.perf_counter() - began)
    nothing = np.zeros(shape, np.int32)

    def step(batch: Batch | None, flags: Sequence[bool]) -> tuple[Array, Array]:
        arrays = [nothing] * 3
        if batch is not None:
            arrays = [batch.token_ids, batch.segment_ids, batch.positions]
        return compiled(params, *map(rows.feed, (*arrays, np.array([flags], np.int32))))

    return step


def read_weights(forward: Forward) -> dict[str, Any]:
    """The parameters, each in its shards, with a progress bar."""
    model, layout = forward.model, forward.layout
    total = sum(math.prod(spec.shape) for spec in forward.weights.values())
    mesh = " x ".join(f"{name} {size}" for name, size in layout.shape.items())
    log.info(
        "model: layers 0 to %d of %d, %.3g M parameters, %s; %s mesh: %s",
        *(model.num_layers - 1, model.config.num_hidden_layers, total / 1e6, model.dtype),
        *(jax.default_backend(), mesh),
    )
    if model.stages > 1:
        count = model.micro_batches(forward.config.batch_size * forward.rows.hosts)
        idle = (model.stages - 1) / (count + model.stages - 1)
        log.info(
            "pipeline: %d stages, %d micro-batches per step, bubble %.0f %%",
            *(model.stages, count, 100 * idle),
        )
    as_bits = model.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
    size = total * model.dtype.itemsize
    with tqdm(
        total=size,
        unit="B",
        unit_scale=True,
        desc="loading weights",
        leave=False,
        disable=not on_terminal(),
    ) as bar:
        return load_params(
            forward.weights, forward.checkpoint, model.dtype, layout, as_bits, bar.update
        )


@contextmanager
def device_errors() -> Iterator[None]:
    """Turns what the device or its compiler reports into a RunError of one line."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = one_line(error).rstrip(".")
        hint = "; try a smaller --batch_size or fewer layers" if "EXHAUSTED" in reason else ""
        raise RunError(f"the device failed: {reason:.300}{hint}") from error


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
