#!/usr/bin/env python3
"""Extracts activations of a Qwen2 model over a stream of text. See --help and README.md.

This script is the story of a run, from the command line to the summary; each chapter lives in the
module that it calls. Everything the user can get wrong is found before the weights are read.
"""

import json
import logging
import math
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Before the libraries are imported: `datasets` would load PyTorch wherever it is installed.
os.environ.setdefault("USE_TORCH", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm
from tqdm.contrib.logging import _TqdmLoggingHandler as TqdmLoggingHandler

from activation_extraction import demo
from activation_extraction.config import DEFAULT_LAYERS, Config, parse_args
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
from activation_extraction.mesh import (
    HostRows,
    Layout,
    build_layout,
    check_divisibility,
    choose_shape,
    host_rows,
    smallest_model_axis,
    usable_devices,
)
from activation_extraction.packing import Batch, pack
from activation_extraction.progress import Clock, Progress
from activation_extraction.storage import (
    ActivationStorage,
    StorageError,
    check_output_dir,
    other_folders,
    remove_extraction,
)
from activation_extraction.tokens import Prefetch, load_tokenizer, samples
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

FIELDS = (
    "configuration",
    "model files",
    "tokenizer",
    "data files",
    "package versions",
    "source",
    "devices",
)
AGAIN = "start all hosts again, with --overwrite or another --output_dir"

log = logging.getLogger("extract_activations")
Step = Callable[[Batch | None, Sequence[bool]], tuple[Array, Array]]


@dataclass(frozen=True)
class Job:
    """A request that has been checked: the model to run, where, and the text to run it on."""

    config: Config
    host: Host
    folder: Path
    checkpoint: Checkpoint
    model: HookedQwen2
    weights: dict[tuple[str, ...], WeightSpec]
    rows: HostRows
    batches: Prefetch[Batch]

    @property
    def layout(self) -> Layout:
        return self.model.layout


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    try:
        config = parse_args(argv)
        start_logging(config.verbose)
        return run(config)
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
    with last_words_of(host):
        with device_errors():
            job = prepare_together(config, host)
            step, storage = start_together(job)
        clock = Clock()
        try:
            with storage, stop_on_signals() as stopped, Watchdog(config.stall_timeout) as watchdog:
                with device_errors():
                    complete, failure = extract(job, step, storage, clock, watchdog, stopped)
                    try:
                        storage.finalize(complete and failure is None)
                    except StorageError as error:
                        failure = failure or error
                    together(host, failure)
        except RunError as error:
            totals = storage.totals
            raise RunError(
                f"{error}. Safe in {job.folder}: {totals.shards} shard(s), {totals.samples} samples"
                + (f"; {AGAIN}" if host.several else "")
            ) from error
    print_summary(job, storage, clock, complete)
    return 0 if complete else 128 + (stopped() or signal.SIGTERM)


def join_hosts(config: Config) -> Host:
    """This process alone, or as one of the pod's."""
    if not config.multihost:
        return Host()
    log.info("joining the other hosts")
    return join(
        config.coordinator_address,
        config.host_id,
        config.num_hosts,
        config.connect_timeout,
        config.heartbeat_timeout,
    )


def prepare_together(config: Config, host: Host) -> Job:
    """Checks the request here and compares it with the other hosts'. Raises InputError."""
    job, problem = None, None
    marks = dict.fromkeys(FIELDS, "")
    try:
        job = prepare(config, host)
        if host.several:
            marks = fingerprint(config, job)
    except Exception as error:  # whatever it is, the other hosts must not wait for this one
        problem = error
    agree(host, marks, problem)
    assert job is not None
    return job


def start_together(job: Job) -> tuple[Step, ActivationStorage]:
    """Loads, compiles and opens the output; when it fails on one host it fails on all."""
    failure: Exception | None = None
    try:
        step = compile_step(job)
        storage = open_storage(job)
    except Exception as error:  # as in prepare_together
        failure = error
    together(job.host, failure)
    return step, storage


def fingerprint(config: Config, job: Job) -> dict[str, str]:
    """All that must be the same on every host of a run, under the names of FIELDS."""
    own = ("host_id", "coordinator_address", "output_dir", "model_path", "dataset_path", "verbose")
    asked = {name: value for name, value in asdict(config).items() if name not in own}
    path = job.config.dataset_path
    here = Path(__file__).parent
    source = [*here.glob("*.py"), *(here / "activation_extraction").glob("*.py")]
    values = (
        json.dumps(asked, sort_keys=True, default=str),
        digest_files(job.checkpoint.weight_files()),
        digest_files(job.checkpoint.tokenizer_files()),
        str(describe_files(path)) if path is not None else "",
        json.dumps({package: version(package) for package in PACKAGES}),
        digest_files(source),
        f"{jax.default_backend()} {jax.local_device_count()}",
    )
    return dict(zip(FIELDS, values, strict=True))


def prepare(config: Config, host: Host) -> Job:
    """Checks the whole request; what costs most, the weights, comes last. Raises InputError."""
    folder = config.output_folder(host.id, host.count)
    check_output_dir(folder, config.overwrite)
    others = stale_folders(config, host)
    if others and not config.overwrite:
        raise InputError(
            f"--output_dir {others[0]}: holds an extraction by another number of hosts or "
            "machines; --overwrite replaces it"
        )
    if config.demo:
        build_model(config, QwenConfig.from_hf(demo.MODEL_CONFIG), host)  # may refuse the flags
        log.info("demo: making a tiny Qwen2 model and sample documents")
        config = demo.prepare(
            config, folder, lambda raw: weight_table(Qwen2(QwenConfig.from_hf(raw))).values()
        )
    checkpoint = Checkpoint(config.model_path)
    qwen = QwenConfig.from_file(checkpoint.file("config.json"))
    model, rows = build_model(config, qwen, host)
    batches = open_batches(config, host, checkpoint, qwen.vocab_size)
    weights = weight_table(model)
    every = weight_table(Qwen2(qwen)).values()
    known = {name for spec in every for name in spec.hf_names} | {"lm_head.weight"}
    checkpoint.check(weights.values(), known)
    return Job(config, host, folder, checkpoint, model, weights, rows, batches)


def stale_folders(config: Config, host: Host) -> list[Path]:
    """What an earlier run of this machine, with other hosts or machines, left in the output."""
    own = {config.output_folder(i, host.count) for i in range(host.count)}
    return other_folders(config.output_dir, config.machine, own)


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


def open_batches(
    config: Config, host: Host, checkpoint: Checkpoint, vocab_size: int
) -> Prefetch[Batch]:
    """This host's part of the text as packed batches, prepared in the background."""
    tokenizer = load_tokenizer(checkpoint, vocab_size)
    if config.dataset_path is not None:
        dataset = open_files(config.dataset_path, config.text_column)
    else:
        dataset = open_hub_dataset(
            str(config.dataset_name), config.dataset_config, str(config.dataset_split)
        )
    check_dataset(dataset, config.text_column)
    rank = config.machine_id * host.count + host.id
    world = config.total_machines * host.count
    most = max_samples_of(config, host)
    documents = DocumentStream(dataset, config.text_column, rank, world)
    stream = samples(documents, tokenizer, config.max_seq_length, most, rank=rank, world=world)
    batches = Prefetch(pack(stream, config.batch_size, config.max_seq_length), BATCHES_AHEAD)
    try:
        if batches.peek() is None and world == 1:
            raise InputError("the data set is empty: no row has text")
    except RunError as error:
        raise InputError(str(error)) from error
    return batches


def max_samples_of(config: Config, host: Host) -> int | None:
    """This host's share of what the machine may store."""
    most = config.max_samples
    return None if most is None else len(range(host.id, most, host.count))


def compile_step(job: Job) -> Step:
    """Loads the weights and compiles the forward pass, once for the whole run.

    Returns the function (batch or None, flags of this host) -> (activations (hooks, rows of all
    hosts, T, D), number of hosts that set each flag). It does not wait for the devices.
    """
    config, model, rows = job.config, job.model, job.rows
    shape = (config.batch_size, config.max_seq_length)
    params = read_weights(job)
    began = time.perf_counter()

    def forward(params: Any, tokens: Array, segments: Array, positions: Array, flags: Array) -> Any:
        return model.apply({"params": params}, tokens, segments, positions), flags.sum(axis=0)

    def abstract(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        whole = (shape[0] * rows.hosts, *shape[1:])
        return jax.ShapeDtypeStruct(whole, jnp.int32, sharding=rows.incoming())

    outgoing = rows.outgoing(config.max_seq_length), rows.everywhere()
    inputs = [abstract(shape)] * 3 + [abstract((1, 3))]
    compiled = jax.jit(forward, out_shardings=outgoing).lower(params, *inputs).compile()
    log.info("compiled in %.1f s", time.perf_counter() - began)
    nothing = np.zeros(shape, np.int32)

    def step(batch: Batch | None, flags: Sequence[bool]) -> tuple[Array, Array]:
        arrays = [nothing] * 3
        if batch is not None:
            arrays = [batch.token_ids, batch.segment_ids, batch.positions]
        return compiled(params, *map(rows.feed, (*arrays, np.array([flags], np.int32))))

    return step


def read_weights(job: Job) -> dict[str, Any]:
    """The parameters, each in its shards, with a progress bar."""
    model = job.model
    total = sum(math.prod(spec.shape) for spec in job.weights.values())
    mesh = " x ".join(f"{name} {size}" for name, size in job.layout.shape.items())
    log.info(
        "model: layers 0 to %d of %d, %.3g M parameters, %s; %s mesh: %s",
        *(model.num_layers - 1, model.config.num_hidden_layers, total / 1e6, model.dtype),
        *(jax.default_backend(), mesh),
    )
    if model.stages > 1:
        count = model.micro_batches(job.config.batch_size * job.rows.hosts)
        idle = (model.stages - 1) / (count + model.stages - 1)
        log.info(
            "pipeline: %d stages, %d micro-batches per step, bubble %.0f %%",
            *(model.stages, count, 100 * idle),
        )
    as_bits = model.dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
    size = total * model.dtype.itemsize
    with tqdm(total=size, unit="B", unit_scale=True, desc="loading weights", leave=False) as bar:
        return load_params(
            job.weights, job.checkpoint, model.dtype, job.layout, as_bits, bar.update
        )


def open_storage(job: Job) -> ActivationStorage:
    """The output folder, with all that a reader should know about its contents."""
    config = job.config
    by_name = config.hook_names is not None
    if config.overwrite and job.host.id == 0:
        for folder in stale_folders(config, job.host):
            remove_extraction(folder)
    return ActivationStorage(
        job.folder,
        {hook.name if by_name else hook.layer: hook.name for hook in job.model.hooks},
        shard_size_gb=config.shard_size_gb,
        compress=config.compress_shards,
        overwrite=config.overwrite,
        metadata={
            "configuration": config.to_json(),
            "host": asdict(job.host),
            "model": asdict(job.model.config),
            "dtype": str(job.model.dtype),
            "activation_dtype": str(job.model.activation_dtype),
            "backend": jax.default_backend(),
            "mesh": job.layout.shape,
            "versions": {package: version(package) for package in PACKAGES},
        },
    )


def extract(
    job: Job,
    step: Step,
    storage: ActivationStorage,
    clock: Clock,
    watchdog: Watchdog,
    stopped: Callable[[], int],
) -> tuple[bool, Exception | None]:
    """Runs every batch; while one computes, the one before is copied and stored.

    All hosts take the same number of steps: until none has data, or any must stop. A host without
    a batch feeds empty rows. With step n goes what a host knows of step n + 2, so that the answer
    is there when it is needed and nobody waits for it. Returns whether the data came to its end,
    and what failed on this host or, as far as it knows by then, on another one.
    """
    progress = Progress(max_samples_of(job.config, job.host))
    failure: Exception | None = None
    complete = True
    job.batches.stopped = stopped

    def fetch() -> Batch | None:
        nonlocal failure
        if failure is None and not stopped():
            try:
                with clock.measure("data"):
                    return next(job.batches, None)
            except Exception as error:  # reported in the end, when all hosts have stopped
                failure = error
        return None

    def settle(batch: Batch | None, activations: Array, votes: Array) -> bool:
        """Stores a step's activations; returns whether the step after the next one is wanted."""
        nonlocal failure, complete
        with clock.measure("compute"):
            activations.block_until_ready()
        if batch is not None and not isinstance(failure, StorageError):
            with clock.measure("copy"):
                on_host = job.rows.receive(activations)
            try:
                with clock.measure("store"):
                    storage.add_batch(batch, on_host)
            except Exception as error:  # as in fetch
                failure = error if isinstance(error, StorageError) else StorageError(repr(error))
            else:
                progress.advance(len(batch.samples), batch.num_tokens)
                log.debug("step %d: %d samples", progress.steps, len(batch.samples))
        watchdog.step_finished()
        with_data, stopping, failed = np.asarray(votes)
        if failed and failure is None:
            failure = RunError("another host failed: see the message there")
        complete = complete and not stopping
        return bool(with_data) and not stopping and not failed

    upcoming = deque([fetch(), fetch()])
    state = [*(batch is not None for batch in upcoming), bool(stopped()), failure is not None]
    *some_data, stopping, failed = any_host(job.host, state)
    complete = not stopping
    wanted = deque([] if stopping or failed and not any(some_data) else some_data)
    in_flight: deque[tuple[Batch | None, Array, Array]] = deque()
    try:
        while wanted and wanted.popleft():
            batch = upcoming.popleft()
            upcoming.append(fetch())
            flags = upcoming[-1] is not None, bool(stopped()), failure is not None
            in_flight.append((batch, *step(batch, flags)))
            if len(in_flight) > 1:
                wanted.append(settle(*in_flight.popleft()))
        while in_flight:
            settle(*in_flight.popleft())
    finally:
        progress.close()
    return complete, failure


@contextmanager
def device_errors() -> Iterator[None]:
    """Turns what the device or its compiler reports into a RunError of one line."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = one_line(error).rstrip(".")
        hint = "; try a smaller --batch_size or fewer layers" if "EXHAUSTED" in reason else ""
        raise RunError(f"the device failed: {reason:.300}{hint}") from error


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], int]]:
    """Within it, SIGTERM and the first Ctrl-C only ask to stop; the second Ctrl-C interrupts.

    Yields the function that gives the number of the signal that asked, 0 when none did.
    """
    received = 0

    def handle(number: int, _: Any) -> None:
        nonlocal received
        received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log.warning("stopping after this step; what is complete will be stored")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def last_words_of(host: Host) -> AbstractContextManager[None]:
    """What to say when JAX ends this process because another host is gone."""
    if not host.several:
        return nullcontext()
    return last_words(
        f"host {host.id} ended because another host is gone (or by a crash of its own, see above); "
        f"what is committed is safe; {AGAIN}"
    )


def print_summary(job: Job, storage: ActivationStorage, clock: Clock, complete: bool) -> None:
    """What was stored, where the time went, and how to read it."""
    totals, elapsed = storage.totals, clock.elapsed
    spent = ", ".join(
        f"{name} {clock.seconds[name]:.1f}" for name in ("data", "compute", "copy", "store")
    )
    print(
        f"{'done' if complete else 'interrupted'}: {totals.samples:,} samples, "
        f"{totals.tokens:,} tokens, {len(job.model.hooks)} hook(s), {totals.shards} shard(s), "
        f"{totals.bytes / 1e6:,.1f} MB in {job.folder}\n"
        f"time: {elapsed:.1f} s, {totals.tokens / elapsed:,.0f} tokens/s; waiting for {spent} s; "
        f"in the background compress {totals.compress_seconds:.1f}, "
        f"write {totals.write_seconds:.1f} s"
    )
    if totals.shards:
        gz = job.config.compress_shards
        path = str(job.folder / f"shard_0001.pkl{'.gz' if gz else ''}")
        opened = f"gzip.open({path!r})" if gz else f"open({path!r}, 'rb')"
        print(f"read it with:\n  import gzip, pickle\n  records = pickle.load({opened})")


def start_logging(verbose: bool) -> None:
    """Our own lines to stderr, above the progress bar; other libraries keep their settings."""
    handler = TqdmLoggingHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.DEBUG if verbose else logging.INFO)


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
