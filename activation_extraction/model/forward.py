"""Compiles the forward pass of a run into one program, which computes all steps.

`Program` describes the program, and `Forward` adds the checkpoint with the weights; model_setup.py
makes both from the flags. `compile_step` reads the weights and compiles the program. The loop in
the room run decides what happens between steps.

Letters: B rows of a host, T tokens per row.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax import Array
from tqdm import tqdm

from activation_extraction.common.codes import code_bytes
from activation_extraction.common.errors import InputError
from activation_extraction.common.log import log, on_terminal
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.compilation import compile_with_options, watch_compiling
from activation_extraction.model.encode import Encoder, Weights, encode
from activation_extraction.model.hooks import Hook, VectorType
from activation_extraction.model.host_rows import HostRows
from activation_extraction.model.kept import KeptTokens, take_kept
from activation_extraction.model.mesh import Layout, in_words
from activation_extraction.model.repository import Repository
from activation_extraction.model.trial import Choice
from activation_extraction.model.weights import (
    WeightTable,
    load_params,
)
from activation_extraction.text.batch import Batch
from qwen2_jax_with_hooks import HookedModel

Key = int | str  # a hook's key in the shards: its layer, or its name
# The activations of a step: vector type (width and dtype) -> the values of its hooks, (hooks of
# this type, rows of all hosts, T, width); or only the kept tokens, if the batch does not keep all.
Activations = dict[VectorType, Array] | KeptTokens
# A step takes the batch of this host, or None if it has no rows left, and flags of this host. It
# returns the activations and the number of hosts that set each flag, without waiting for the
# devices.
Step = Callable[[Batch | None, Sequence[bool]], tuple[Activations, Array]]


@dataclass(frozen=True)
class Program:
    """The program of a step, without its weights.

    Attributes:
        model: Hooked model on its mesh.
        weights: Parameters of the model.
        rows: Shardings of the rows that hosts feed and of the activations that they receive.
        shape: Number of rows that each host feeds in a step, and number of tokens per row.
        hooks: Key in the shards -> hook that is stored. Hooks of codes come last.
        encoders: Autoencoders whose codes the step computes.
    """

    model: HookedModel
    weights: WeightTable
    rows: HostRows
    shape: tuple[int, int]
    hooks: dict[Key, Hook]
    encoders: tuple[Encoder, ...]

    @property
    def layout(self) -> Layout:
        """The mesh of the model."""
        return self.model.layout

    @property
    def platform(self) -> str:
        """The platform of the devices, as JAX names it."""
        return self.rows.mesh.devices.flat[0].platform

    @property
    def as_bits(self) -> bool:
        """Whether parameters are passed to the compiled step as uint16."""
        return self.model.dtype == jnp.bfloat16 and self.platform == "cpu"

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each axis by its letter, including S, the number of tokens of a row."""
        return self.model.config.sizes_with(self.shape[1])

    def vector_type(self, hook: Hook) -> VectorType:
        """Returns the width and dtype with which a hook's activations leave the devices."""
        return hook.kind.vector_type(self.sizes, self.model.captured_dtype)

    def flops(self, lengths: Sequence[int]) -> float:
        """Returns the floating-point operations for samples of these lengths."""
        encoding = sum(encoder.flops for encoder in self.encoders)  # per token
        return self.model.flops(lengths) + encoding * sum(lengths)

    @property
    def token_bytes(self) -> dict[str, int]:
        """The bytes stored of a token at each hook, by the hook's name; for codes, the most."""
        dtype = self.model.activation_dtype
        sizes = {}
        for hook in self.hooks.values():
            sizes[hook.name] = hook.kind.vector_type(self.sizes, dtype).bytes
        for encoder in self.encoders:
            sizes[encoder.hook.name] = code_bytes(encoder.most, dtype)
        return sizes

    def with_codes(
        self, computed: dict[VectorType, Array], weights: Sequence[Weights]
    ) -> dict[VectorType, Array]:
        """Computes the codes, and selects the hooks that are stored.

        Args:
            computed: Vector type -> the activations at the hooks of the model, (hooks of this type,
                rows of all hosts, T, width).
            weights: The weights of each autoencoder.

        Returns:
            Vector type -> the activations and codes at the hooks that are stored, (hooks of this
            type, rows of all hosts, T, width).
        """
        if not self.encoders:
            return computed
        remaining = {vector_type: iter(stack) for vector_type, stack in computed.items()}
        activations = {hook: next(remaining[self.vector_type(hook)]) for hook in self.model.hooks}
        for encoder, arrays in zip(self.encoders, weights, strict=True):
            source = activations[encoder.source]
            target = activations[encoder.target]
            activations[encoder.hook] = encode(encoder, arrays, source, target, self.layout)
        stacks: dict[VectorType, list[Array]] = defaultdict(list)
        for hook in self.hooks.values():
            stacks[self.vector_type(hook)].append(activations[hook])
        return {vector_type: jnp.stack(stack) for vector_type, stack in stacks.items()}


@dataclass(frozen=True)
class Forward(Program):
    """A program with its checked weights.

    Attributes:
        checkpoint: Checkpoint, with its adapter.
        kernels: Field of `Kernels` -> kernel that was chosen.
    """

    checkpoint: Checkpoint
    kernels: dict[str, Choice]

    @property
    def adapter_files(self) -> Repository | None:
        """The files of the LoRA adapter; None without one."""
        adapter = self.checkpoint.adapter
        return None if adapter is None else adapter.files

    @property
    def keyed_by(self) -> str | list[str]:
        """The kind of the shards' keys: "layer" or "hook name", or the list of keys if mixed."""
        if all(isinstance(key, int) for key in self.hooks):
            return "layer"
        keys = [str(key) for key in self.hooks]
        return "hook name" if keys == [hook.name for hook in self.hooks.values()] else keys

    def receive(self, activations: Activations) -> dict[Key, np.ndarray]:
        """Copies the activations of this host's rows to the host.

        Args:
            activations: The activations of a step.

        Returns:
            Key in the shards -> (B, T, width), or (kept tokens, width) row by row if only some
            tokens are kept.
        """
        if isinstance(activations, KeptTokens):
            stacks = activations.receive()
        else:
            stacks = self.rows.receive(activations)
        remaining = {vector_type: iter(stack) for vector_type, stack in stacks.items()}
        return {key: next(remaining[self.vector_type(hook)]) for key, hook in self.hooks.items()}


def compile_step(forward: Forward) -> Step:
    """Loads the weights and compiles the forward pass.

    There is one program for all steps. If the last step has few tokens, computing its padding takes
    less time than compiling another program, on which several hosts would have to agree.

    Args:
        forward: The program and its checkpoint.

    Returns:
        The step (see `Step`).
    """
    rows, layout = forward.rows, forward.layout
    params = read_weights(forward), [encoder.weights(layout) for encoder in forward.encoders]
    began = time.perf_counter()
    with watch_compiling() as from_cache:
        compiled = _compiled(forward, params)
    where = ", from the cache" if from_cache() else ""
    log.info("compiled in %.1f s%s", time.perf_counter() - began, where)
    padding = np.zeros(forward.shape, np.int32)

    def step(batch: Batch | None, flags: Sequence[bool]) -> tuple[Activations, Array]:
        arrays = [padding] * 3
        if batch is not None:
            arrays = [batch.token_ids, batch.segment_ids, batch.positions]
        votes = np.array([flags], np.int32)
        activations, votes = compiled(params, *map(rows.feed, (*arrays, votes)))
        if batch is not None and batch.kept is not None:
            # Here, so that the devices gather the tokens before they compute the next step.
            activations = take_kept(activations, batch.kept)
        return activations, votes

    return step


def _compiled(program: Program, params: Any, **options: Any) -> Any:
    """Compiles the forward pass.

    Args:
        program: The program.
        params: The weights of the model and of each autoencoder, or their shapes and shardings.
        options: Options of the compiler, beyond those of a run.
    """
    model, rows = program.model, program.rows

    def apply(params: Any, tokens: Array, segments: Array, positions: Array, flags: Array) -> Any:
        model_params, autoencoders = params
        activations: Any = model.apply({"params": model_params}, tokens, segments, positions)
        return program.with_codes(activations, autoencoders), flags.sum(axis=0)

    outgoing = rows.outgoing(program.shape[1], model.layout), rows.everywhere()
    inputs = [
        jax.ShapeDtypeStruct((count * rows.hosts, size), jnp.int32, sharding=rows.incoming())
        for count, size in [program.shape] * 3 + [(1, 3)]
    ]
    lowered = jax.jit(apply, out_shardings=outgoing).lower(params, *inputs)
    return compile_with_options(lowered, program.platform, **options)


def compile_unloaded(program: Program, **options: Any) -> Any:
    """Compiles the program of a run without its weights. All hosts must call this together.

    Args:
        program: The program.
        options: Options of the compiler, beyond those of a run.

    Raises:
        JaxRuntimeError: The program cannot be compiled. The message contains RESOURCE_EXHAUSTED if
            a step does not fit in memory.
    """
    model = program.model
    dtype = jnp.uint16 if program.as_bits else model.dtype
    params = {}
    for path, spec in program.weights.items():
        split = model.layout.sharding(spec.axes, spec.shape)
        params[path] = jax.ShapeDtypeStruct(spec.shape, dtype, sharding=split)
    encoders = [encoder.shapes(model.layout) for encoder in program.encoders]
    return _compiled(program, (unflatten_dict(params), encoders), **options)


def bytes_of_step(program: Program) -> float:
    """Returns the bytes of memory that a run takes on each device, by compiling its program.

    They include the weights, the working memory of a step and the activations of two steps, because
    the host copies the activations of one step while the next one computes. No weights are read.

    Args:
        program: The program.

    Raises:
        InputError: The compiler does not report how much memory a step takes.
        JaxRuntimeError: See `compile_unloaded`.
    """
    memory = compile_unloaded(program).memory_analysis()
    if memory is None:
        raise InputError(
            "the compiler does not report how much memory a step takes, which --batch_size auto "
            "and --plan need"
        )
    output = 2 * memory.output_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + output


def read_weights(forward: Forward) -> dict[str, Any]:
    """Reads the parameters directly into their shards, with a progress bar.

    Args:
        forward: The program and its checkpoint.

    Returns:
        The parameters as a nested dict.
    """
    model = forward.model
    layout = forward.layout
    weights = forward.weights
    parameters = sum(math.prod(spec.shape) for spec in weights.values())
    log.info(
        "model: layers 0 to %d of %d, %.3g M parameters, %s%s; %s mesh: %s%s",
        model.num_layers - 1,
        model.config.num_hidden_layers,
        parameters / 1e6,
        model.dtype,
        f" ({model.config.weights})" if model.config.weights else "",
        jax.default_backend(),
        in_words(layout.shape),
        f" ({layout.why})" if layout.why else "",
    )
    if model.stages > 1:
        count = model.micro_batches(forward.shape[0] * forward.rows.hosts)
        idle = 100 * (model.stages - 1) / (count + model.stages - 1)
        text = "pipeline: %d stages, %d micro-batches per step, bubble %.0f %%"
        log.info(text, model.stages, count, idle)
    size, quiet = parameters * model.dtype.itemsize, not on_terminal()
    with tqdm(
        total=size, unit="B", unit_scale=True, desc="loading weights", leave=False, disable=quiet
    ) as bar:
        return load_params(
            weights,
            forward.checkpoint,
            model.dtype,
            layout,
            as_bits=forward.as_bits,
            progress=bar.update,
        )
