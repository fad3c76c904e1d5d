"""The forward pass of a run: the hooked model on its mesh, its weights, and one compiled step.

Between the command line and the model: what the flags ask of the model is checked here.
"""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from activation_extraction.cli.config import DEFAULT_LAYERS, Config
from activation_extraction.cli.console import log, on_terminal
from activation_extraction.cli.errors import InputError, RunError, one_line
from activation_extraction.model.compilation import watch_compiling
from activation_extraction.model.digests import digest_files
from activation_extraction.model.mesh import (
    HostRows,
    Layout,
    build_layout,
    check_divisibility,
    choose_shape,
    host_rows,
    smallest_model_axis,
    usable_devices,
)
from activation_extraction.model.revisions import recorded_commit
from activation_extraction.model.trial import Choice, Sizes, candidates_for, choose_attention
from activation_extraction.model.weights import Checkpoint, WeightSpec, load_params
from activation_extraction.reading.verify import Recompute
from activation_extraction.run.hosts import Host
from activation_extraction.run.loop import Step
from activation_extraction.text.packing import Batch, pack, samples_of
from qwen2_jax import Qwen2, QwenConfig, weight_table
from qwen2_jax_with_hooks import (
    Hook,
    HookedQwen2,
    create_model_with_hooks,
    hooks_for_layers,
    hooks_matching,
)

TOO_LARGE = (
    "it continues with a smaller --batch_size, or with a larger model or fsdp axis (--mesh_shape); "
    "fewer layers or a smaller --max_seq_length make it another extraction (--overwrite)"
)


@dataclass(frozen=True)
class Forward:
    """A checked model: what it computes, with which weights, on which devices."""

    config: Config
    checkpoint: Checkpoint
    model: HookedQwen2
    weights: dict[tuple[str, ...], WeightSpec]
    rows: HostRows
    attention: Choice

    @property
    def layout(self) -> Layout:
        return self.model.layout

    def flops(self, lengths: Iterable[int]) -> float:
        """Floating point operations of samples of these lengths."""
        return self.model.config.flops(self.model.num_layers, lengths)


def prepare_model(config: Config, host: Host, commit: str | None = None) -> Forward:
    """The model on its mesh, with a checkpoint that has been checked. Raises InputError.

    commit: of a hub model, instead of the revision that the configuration asks for.
    """
    checkpoint = Checkpoint(config.model_path, commit or config.model_revision)
    qwen = QwenConfig.from_file(checkpoint.file("config.json"))
    model, rows = build_model(config, qwen, host)
    chosen = try_attention(model, config.max_seq_length)
    model = model.clone(attention=chosen.attention)
    log_hooks(config, model)
    weights = weight_table(model)
    every = weight_table(Qwen2(qwen)).values()
    known = {name for spec in every for name in spec.hf_names} | {"lm_head.weight"}
    checkpoint.check(weights.values(), known)
    return Forward(config, checkpoint, model, weights, rows, chosen)


def try_attention(model: HookedQwen2, length: int) -> Choice:
    """The attention of the run, which every host tries on a device of its own; logs the outcome.

    Where there is no other one, as on the CPU, it is not tried.
    """
    candidates = candidates_for(jax.default_backend())
    if len(candidates) == 1:
        return Choice(*next(iter(candidates.items())))
    qwen, layout = model.config, model.layout
    heads = layout.size("model")
    sizes = Sizes.of_run(
        length,
        layout.size("query"),
        qwen.num_attention_heads // heads,
        qwen.num_key_value_heads // heads,
        qwen.head_dim,
    )
    chosen = choose_attention(candidates, sizes, jnp.dtype(model.dtype))
    for name, why in chosen.passed_over.items():
        log.warning("attention: %s is not used: %s", name, why)
    log.info("attention: %s, which agrees with its definition on this device", chosen.name)
    return chosen


def model_digest(forward: Forward) -> str:
    """Of the configuration and the weights, every byte of them."""
    return digest_files(forward.checkpoint.weight_files())


def build_model(config: Config, qwen: QwenConfig, host: Host) -> tuple[HookedQwen2, HostRows]:
    """The hooked model on its mesh, and how rows come to the mesh. Raises InputError.

    Its attention is the one that its platform prefers; `try_attention` has the last word.
    """
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
    attention = next(iter(candidates_for(devices[0].platform).values()))
    return create_model_with_hooks(qwen, hooks, dtype, stored, attention, layout), rows


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


def log_hooks(config: Config, model: HookedQwen2) -> None:
    """What every token is stored at, and how many bytes that takes."""
    depth, width = model.config.num_hidden_layers, model.config.hidden_size
    default = config.layers_to_extract is None and config.hook_names is None
    if default and depth <= DEFAULT_LAYERS[-1]:
        log.info(
            "the default layers, %d to %d, are clipped: the model has layers 0 to %d",
            *(DEFAULT_LAYERS[0], DEFAULT_LAYERS[-1], depth - 1),
        )
    stored = jnp.dtype(model.activation_dtype)
    log.info(
        "hooks: %s; width %d each, in %s: %s bytes per token",
        *(", ".join(hook.name for hook in model.hooks), width, stored.name),
        f"{len(model.hooks) * width * stored.itemsize:,}",
    )


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
    with watch_compiling() as from_cache:
        compiled = jax.jit(apply, out_shardings=outgoing).lower(params, *inputs).compile()
    where = ", from the cache" if from_cache() else ""
    log.info("compiled in %.1f s%s", time.perf_counter() - began, where)
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
        commit = None if config.model_revision else recorded_commit(config, metadata)
        forward = prepare_model(config, Host(), commit)
        if model_digest(forward) != identity["model files"]:
            raise InputError(f"--model_path {config.model_path}: is another model than the stored")
        step = compile_step(forward)

    def recompute(token_ids: list[np.ndarray]) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        for batch in pack(samples_of(token_ids), config.batch_size, config.max_seq_length):
            with device_errors():
                activations, _ = step(batch, (False, False, False))
                on_host = forward.rows.receive(activations)
            found += [on_host[:, at.row, at.start : at.stop] for at in batch.samples]
        return found

    return recompute


@contextmanager
def device_errors() -> Iterator[None]:
    """Turns what the device or its compiler reports into a RunError of one line."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = one_line(error).rstrip(".")
        remedy = TOO_LARGE if "EXHAUSTED" in reason else None
        raise RunError(f"the device failed: {reason:.300}", remedy=remedy) from error
