#!/usr/bin/env python3
"""Extracts activations of a Qwen2 model over a stream of text. See --help and README.md.

This script is the story of a run, from the command line to the summary; each chapter lives in the
module that it calls. Everything the user can get wrong is found before the weights are read.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

# Before the libraries are imported: `datasets` would load PyTorch wherever it is installed.
os.environ.setdefault("USE_TORCH", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from tqdm import tqdm

from activation_extraction import demo
from activation_extraction.config import DEFAULT_LAYERS, Config, parse_args
from activation_extraction.documents import (
    DocumentStream,
    check_dataset,
    open_files,
    open_hub_dataset,
)
from activation_extraction.errors import InputError, RunError
from activation_extraction.mesh import BATCH_AXES, CAPTURED_AXES, build_mesh, sharding
from activation_extraction.packing import Batch, pack
from activation_extraction.progress import Clock, Progress
from activation_extraction.storage import ActivationStorage, check_output_dir
from activation_extraction.tokens import load_tokenizer, prefetch, samples
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

log = logging.getLogger("extract_activations")
Step = Callable[[Batch], Array]


@dataclass(frozen=True)
class Job:
    """A request that has been checked: the model to run and the text to run it on."""

    config: Config
    checkpoint: Checkpoint
    model: HookedQwen2
    weights: dict[tuple[str, ...], WeightSpec]
    batches: Iterator[Batch]
    mesh: Mesh


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    try:
        config = parse_args(argv)
        _start_logging(config.verbose)
        return run(config)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def run(config: Config) -> int:
    """One extraction from beginning to end; returns the exit status."""
    if config.demo:
        log.info("demo: making a tiny Qwen2 model and sample documents")
        config = demo.prepare(
            config, lambda raw: weight_table(Qwen2(QwenConfig.from_hf(raw))).values()
        )
    job = prepare(config)
    with device_errors():
        step = compile_step(job)
    clock = Clock()
    storage = open_storage(job)
    try:
        with storage, stop_on_ctrl_c() as stop_requested, device_errors():
            complete = extract(job, step, storage, clock, stop_requested)
            storage.finalize(complete)
    except RunError as error:
        totals = storage.totals
        raise RunError(
            f"{error}. Safe in {config.output_dir}: {totals.shards} shard(s), "
            f"{totals.samples} samples"
        ) from error
    print_summary(job, storage, clock, complete)
    return 0 if complete else 128 + signal.SIGINT


def prepare(config: Config) -> Job:
    """Checks the whole request without reading weights. Raises InputError."""
    checkpoint = Checkpoint(config.model_path)
    qwen = QwenConfig.from_file(checkpoint.file("config.json"))
    if config.max_seq_length > qwen.max_position_embeddings:
        raise InputError(
            f"--max_seq_length {config.max_seq_length}: the model has "
            f"{qwen.max_position_embeddings} positions"
        )
    dtype = choose_dtype(config.dtype)
    model = create_model_with_hooks(
        qwen,
        choose_hooks(config, qwen.num_hidden_layers),
        dtype,
        dtype if config.activation_dtype == "auto" else jnp.dtype(config.activation_dtype),
    )
    weights = weight_table(model)
    every = weight_table(Qwen2(qwen)).values()
    known = {name for spec in every for name in spec.hf_names} | {"lm_head.weight"}
    checkpoint.check(weights.values(), known)
    batches = open_batches(config, checkpoint, qwen.vocab_size)
    check_output_dir(config.output_dir, config.overwrite)
    mesh = build_mesh(config.use_data_parallel, config.batch_size)
    return Job(config, checkpoint, model, weights, batches, mesh)


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


def open_batches(config: Config, checkpoint: Checkpoint, vocab_size: int) -> Iterator[Batch]:
    """This machine's part of the text as packed batches, prepared in the background."""
    tokenizer = load_tokenizer(checkpoint, vocab_size)
    if config.dataset_path is not None:
        dataset = open_files(config.dataset_path)
    else:
        dataset = open_hub_dataset(
            str(config.dataset_name), config.dataset_config, str(config.dataset_split)
        )
    check_dataset(dataset, config.text_column)
    rank, world = config.machine_id, config.total_machines
    documents = DocumentStream(dataset, config.text_column, rank, world)
    stream = samples(
        documents, tokenizer, config.max_seq_length, config.max_samples, rank=rank, world=world
    )
    return prefetch(pack(stream, config.batch_size, config.max_seq_length), BATCHES_AHEAD)


def compile_step(job: Job) -> Step:
    """Loads the weights and compiles the forward pass, once for the whole run.

    Returns the function batch -> activations (hooks, B, T, D), which does not wait for the device.
    """
    config, model, mesh = job.config, job.model, job.mesh
    by_batch = sharding(mesh, BATCH_AXES)
    shape = jax.ShapeDtypeStruct(
        (config.batch_size, config.max_seq_length), jnp.int32, sharding=by_batch
    )
    params = read_weights(job)
    began = time.perf_counter()
    forward = jax.jit(model.apply, out_shardings=sharding(mesh, CAPTURED_AXES))
    compiled = forward.lower({"params": params}, shape, shape, shape).compile()
    log.info("compiled in %.1f s", time.perf_counter() - began)

    def step(batch: Batch) -> Array:
        arrays = (batch.token_ids, batch.segment_ids, batch.positions)
        return compiled({"params": params}, *jax.device_put(arrays, by_batch))

    return step


def read_weights(job: Job) -> dict[str, Any]:
    """The parameters, each in its shards, with a progress bar."""
    dtype = job.model.dtype
    total = sum(int(np.prod(spec.shape)) for spec in job.weights.values())
    log.info(
        "model: layers 0 to %d of %d, %.3g M parameters, %s, on %d %s device(s)",
        job.model.num_layers - 1,
        job.model.config.num_hidden_layers,
        total / 1e6,
        dtype,
        job.mesh.size,
        jax.default_backend(),
    )
    as_bits = dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
    shardings = {path: sharding(job.mesh, spec.axes) for path, spec in job.weights.items()}
    with tqdm(
        total=total * dtype.itemsize, unit="B", unit_scale=True, desc="loading weights", leave=False
    ) as bar:
        return load_params(job.weights, job.checkpoint, dtype, shardings, as_bits, bar.update)


def open_storage(job: Job) -> ActivationStorage:
    """The output folder, with all that a reader should know about its contents."""
    config = job.config
    by_name = config.hook_names is not None
    return ActivationStorage(
        config.output_dir,
        {hook.name if by_name else hook.layer: hook.name for hook in job.model.hooks},
        shard_size_gb=config.shard_size_gb,
        compress=config.compress_shards,
        overwrite=config.overwrite,
        metadata={
            "configuration": config.to_json(),
            "model": asdict(job.model.config),
            "dtype": str(job.model.dtype),
            "activation_dtype": str(job.model.activation_dtype),
            "backend": jax.default_backend(),
            "mesh": dict(job.mesh.shape),
            "versions": {package: version(package) for package in PACKAGES},
        },
    )


def extract(
    job: Job,
    step: Step,
    storage: ActivationStorage,
    clock: Clock,
    stop_requested: Callable[[], bool],
) -> bool:
    """Runs every batch; while one computes, the one before is copied and stored.

    Returns False when it stopped early because it was asked to.
    """
    progress = Progress(job.config.max_samples)

    def store(batch: Batch, activations: Array) -> None:
        with clock.measure("compute"):
            activations.block_until_ready()
        with clock.measure("copy"):
            on_host = np.asarray(activations)
        with clock.measure("store"):
            storage.add_batch(batch, on_host)
        progress.advance(len(batch.samples), batch.num_tokens)
        log.debug("step %d: %d samples, %d tokens", progress.steps, *_size(batch))

    previous: tuple[Batch, Array] | None = None
    try:
        while not stop_requested():
            with clock.measure("data"):
                batch = next(job.batches, None)
            if batch is None:
                break
            activations = step(batch)
            if previous is not None:
                store(*previous)
            previous = batch, activations
        if previous is not None:
            store(*previous)
    finally:
        progress.close()
    return not stop_requested()


def _size(batch: Batch) -> tuple[int, int]:
    return len(batch.samples), batch.num_tokens


@contextmanager
def device_errors() -> Iterator[None]:
    """Turns what the device or its compiler reports into a RunError of one line."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = " ".join(str(error).split())
        hint = "; try a smaller --batch_size or fewer layers" if "EXHAUSTED" in reason else ""
        raise RunError(f"the device failed: {reason:.300}{hint}") from error


@contextmanager
def stop_on_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Within it, the first Ctrl-C only asks to stop after the step; the second one interrupts.

    Yields the function that says whether a stop was asked for.
    """
    requested = False

    def handle(*_: Any) -> None:
        nonlocal requested
        requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log.warning("stopping after this step; what is complete will be stored")

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield lambda: requested
    finally:
        signal.signal(signal.SIGINT, before)


def print_summary(job: Job, storage: ActivationStorage, clock: Clock, complete: bool) -> None:
    """What was stored, where the time went, and how to read it."""
    totals, elapsed = storage.totals, clock.elapsed
    spent = ", ".join(
        f"{name} {clock.seconds[name]:.1f}" for name in ("data", "compute", "copy", "store")
    )
    suffix = ".pkl.gz" if job.config.compress_shards else ".pkl"
    first = job.config.output_dir / f"shard_0001{suffix}"
    opened = (
        f"gzip.open({str(first)!r})"
        if job.config.compress_shards
        else f"open({str(first)!r}, 'rb')"
    )
    print(
        f"{'done' if complete else 'interrupted'}: {totals.samples:,} samples, "
        f"{totals.tokens:,} tokens, {len(job.model.hooks)} hooks, {totals.shards} shard(s), "
        f"{totals.bytes / 1e6:,.1f} MB in {job.config.output_dir}\n"
        f"time: {elapsed:.1f} s, {totals.tokens / elapsed:,.0f} tokens/s; waiting for {spent} s; "
        f"in the background compress {totals.compress_seconds:.1f}, "
        f"write {totals.write_seconds:.1f} s"
    )
    if totals.shards:
        print(f"read it with:\n  import gzip, pickle\n  records = pickle.load({opened})")


def _start_logging(verbose: bool) -> None:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    log.setLevel(logging.DEBUG if verbose else logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
