"""Compiles the forward pass of a run into one program, which computes every step.

A step computes the activations of one batch of each host. `Program` describes the program, and
`Forward` adds the checkpoint with the weights; model_setup.py makes both from the flags.
`compile_step` reads the weights and compiles the program. The package run calls the step for one
batch after the other.

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
from activation_extraction.model.hooks import Hook, WidthAndDtype
from activation_extraction.model.host_rows import HostRows
from activation_extraction.model.kept import KeptTokens, take_kept
from activation_extraction.model.mesh import Layout, shape_phrase
from activation_extraction.model.repository import Repository
from activation_extraction.model.trial import Choice
from activation_extraction.model.weights import (
    WeightTable,
    load_params,
)
from activation_extraction.text.batch import Batch
from qwen2_jax_with_hooks import HookedModel

Key = int | str  # the key of a hook in the shards, which is its layer or its name
# The activations of a step. They are a dict: `WidthAndDtype`, which is a width and a dtype -> the
# stacked activations at all hooks with this width and dtype, (hooks, rows of all hosts, T, width).
# If only some tokens of the batch are kept, they are an object of the class `KeptTokens` instead.
Activations = dict[WidthAndDtype, Array] | KeptTokens
# A function that computes one step. Its arguments are the batch of this host (None if the host has
# no rows left), and three truth values of this host, which are called its votes and whose meaning
# the caller determines. It returns the activations, and for each vote the number of hosts with the
# value True, (3,) int32. It does not wait until the devices have computed these arrays.
StepFunction = Callable[[Batch | None, Sequence[bool]], tuple[Activations, Array]]


@dataclass(frozen=True)
class Program:
    """The program of a step, without its weights.

    Attributes:
        model: Hooked model on its mesh.
        weight_table: Shape, logical axes and checkpoint tensors of each parameter of the model.
        host_rows: Shardings of the rows that hosts feed and of the activations that they receive.
        batch_shape: Tuple of the number of rows that each host feeds in a step, and the number of
            tokens per row.
        hook_by_key: Key in the shards -> hook that is stored. Hooks of codes come last.
        encoders: Autoencoders whose codes the step computes.
    """

    model: HookedModel
    weight_table: WeightTable
    host_rows: HostRows
    batch_shape: tuple[int, int]
    hook_by_key: dict[Key, Hook]
    encoders: tuple[Encoder, ...]

    @property
    def layout(self) -> Layout:
        """The layout of the model, which splits its arrays over a mesh of devices."""
        return self.model.layout

    @property
    def platform(self) -> str:
        """The platform of the devices, as JAX names it."""
        return self.host_rows.mesh.devices.flat[0].platform

    @property
    def takes_params_as_bits(self) -> bool:
        """Returns whether the compiled step takes parameters as uint16 arrays of their bits.

        It does so for bfloat16 on CPUs, where XLA would convert whole arrays of bfloat16 to
        float32 in every step (see `numerics.to_bits`).
        """
        return self.model.dtype == jnp.bfloat16 and self.platform == "cpu"

    @property
    def sizes(self) -> dict[str, int]:
        """Letter of an axis -> its size in the model (see `HookKind.axis_letters`)."""
        return self.model.config.sizes_with(self.batch_shape[1])

    def width_and_dtype(self, hook: Hook) -> WidthAndDtype:
        """Returns the width and the dtype of a hook's activations when they leave the devices.

        Args:
            hook: The hook.
        """
        return hook.kind.width_and_dtype(self.sizes, self.model.captured_dtype)

    def flops(self, lengths: Sequence[int]) -> float:
        """Returns the number of floating-point operations that computing some samples takes.

        The operations of the model and of the autoencoders are counted.

        Args:
            lengths: The lengths of the samples in tokens.
        """
        encoding_flops_per_token = sum(encoder.flops for encoder in self.encoders)
        return self.model.flops(lengths) + encoding_flops_per_token * sum(lengths)

    @property
    def token_bytes(self) -> dict[str, int]:
        """Name of a stored hook -> the number of bytes that are stored for each token.

        For a hook of codes, it is the number of bytes for a token with as many codes as can be
        stored.
        """
        stored_dtype = self.model.activation_dtype
        bytes_by_hook = {}
        for hook in self.hook_by_key.values():
            bytes_by_hook[hook.name] = hook.kind.width_and_dtype(self.sizes, stored_dtype).bytes
        for encoder in self.encoders:
            bytes_by_hook[encoder.hook.name] = code_bytes(encoder.max_codes_per_token, stored_dtype)
        return bytes_by_hook

    def with_codes(
        self,
        activations_by_width_and_dtype: dict[WidthAndDtype, Array],
        weights_of_encoders: Sequence[Weights],
    ) -> dict[WidthAndDtype, Array]:
        """Computes the codes of autoencoders, and selects the arrays of the hooks that are stored.

        Args:
            activations_by_width_and_dtype: Width and dtype -> the activations at all hooks of the
                model with this width and dtype, (hooks, rows of all hosts, T, width).
            weights_of_encoders: The weights of each autoencoder, in the order of `encoders`.

        Returns:
            Width and dtype -> the activations and codes at all stored hooks with this width and
            dtype, (hooks, rows of all hosts, T, width).
        """
        if not self.encoders:
            return activations_by_width_and_dtype
        array_iterator_by_width_and_dtype = {
            width_and_dtype: iter(activations_of_hooks)
            for width_and_dtype, activations_of_hooks in activations_by_width_and_dtype.items()
        }
        activations_by_hook = {
            hook: next(array_iterator_by_width_and_dtype[self.width_and_dtype(hook)])
            for hook in self.model.hooks
        }
        for encoder, encoder_weights in zip(self.encoders, weights_of_encoders, strict=True):
            source_values = activations_by_hook[encoder.source_hook]
            target_values = activations_by_hook[encoder.target_hook]
            encoder_codes = encode(
                encoder, encoder_weights, source_values, target_values, self.layout
            )
            activations_by_hook[encoder.hook] = encoder_codes
        stored_arrays_by_width_and_dtype: dict[WidthAndDtype, list[Array]] = defaultdict(list)
        for hook in self.hook_by_key.values():
            stored_arrays_by_width_and_dtype[self.width_and_dtype(hook)].append(
                activations_by_hook[hook]
            )
        return {
            width_and_dtype: jnp.stack(stored_arrays)
            for width_and_dtype, stored_arrays in stored_arrays_by_width_and_dtype.items()
        }


@dataclass(frozen=True)
class Forward(Program):
    """A program, together with the checkpoint of its weights and the kernels that were chosen.

    Attributes:
        checkpoint: Checkpoint with the weights, and its adapter if there is one.
        kernel_choice_by_operation: Name of an operation (a field of `Kernels`, such as "attention")
            -> kernel that was chosen for the operation.
    """

    checkpoint: Checkpoint
    kernel_choice_by_operation: dict[str, Choice]

    @property
    def adapter_files(self) -> Repository | None:
        """The repository of the LoRA adapter; None if the run has no adapter."""
        adapter = self.checkpoint.adapter
        return None if adapter is None else adapter.repository

    @property
    def keyed_by(self) -> str | list[str]:
        """The description of the keys in the shards, which the identity of the run records.

        The description is "layer" if all keys are layers, "hook name" if all keys are the names of
        their hooks, and otherwise the list of all keys.
        """
        if all(isinstance(hook_key, int) for hook_key in self.hook_by_key):
            return "layer"
        hook_keys_as_text = [str(hook_key) for hook_key in self.hook_by_key]
        hook_names = [hook.name for hook in self.hook_by_key.values()]
        return "hook name" if hook_keys_as_text == hook_names else hook_keys_as_text

    def receive(self, activations: Activations) -> dict[Key, np.ndarray]:
        """Copies the activations of this host's rows from the devices to the host.

        Args:
            activations: The activations of a step.

        Returns:
            Key of a hook in the shards -> the activations at the hook, (B, T, width). If only some
            tokens are kept, the shape is (kept tokens, width), and the tokens are in the order of
            the rows.
        """
        if isinstance(activations, KeptTokens):
            activations_by_width_and_dtype = activations.receive()
        else:
            activations_by_width_and_dtype = self.host_rows.receive(activations)
        array_iterator_by_width_and_dtype = {
            width_and_dtype: iter(activations_of_hooks)
            for width_and_dtype, activations_of_hooks in activations_by_width_and_dtype.items()
        }
        return {
            hook_key: next(array_iterator_by_width_and_dtype[self.width_and_dtype(hook)])
            for hook_key, hook in self.hook_by_key.items()
        }


def compile_step(forward: Forward) -> StepFunction:
    """Reads the weights, and compiles the program that computes every step.

    The same program computes all steps. If the last step has few tokens, computing its padding
    takes less time than compiling another program, which all hosts would have to do together.

    Args:
        forward: The program and its checkpoint.

    Returns:
        The function that computes a step. See `StepFunction` for its arguments and results.
    """
    host_row_shardings = forward.host_rows
    model_weights = read_weights(forward)
    weights_of_encoders = [encoder.weights(forward.layout) for encoder in forward.encoders]
    step_params = model_weights, weights_of_encoders
    start_time = time.perf_counter()
    with watch_compiling() as check_cache_hit:
        compiled_program = _compile(forward, step_params)
    cache_suffix = ", from the cache" if check_cache_hit() else ""
    log.info("compiled in %.1f s%s", time.perf_counter() - start_time, cache_suffix)
    padding_array = np.zeros(forward.batch_shape, np.int32)

    def step(batch: Batch | None, votes: Sequence[bool]) -> tuple[Activations, Array]:
        arrays_to_feed = [padding_array] * 3
        if batch is not None:
            arrays_to_feed = [batch.token_ids, batch.segment_ids, batch.positions]
        arrays_to_feed.append(np.array([votes], np.int32))
        activations, sums_of_host_votes = compiled_program(
            step_params, *map(host_row_shardings.feed, arrays_to_feed)
        )
        if batch is not None and batch.kept_mask is not None:
            # The kept tokens are selected now, so that the devices do it before the next step.
            activations = take_kept(activations, batch.kept_mask)
        return activations, sums_of_host_votes

    return step


def _compile(program: Program, params: Any, **options: Any) -> Any:
    """Compiles the forward pass of a program for weights of given shapes and shardings.

    Args:
        program: The forward pass to compile, with the hooks that are stored and the autoencoders.
        params: A tuple of the model's weights and the list of each autoencoder's weights. Only
            their shapes and shardings matter.
        options: Options of the compiler, in addition to the options that all runs use.

    Returns:
        The compiled program, a function of (params, token ids, segment ids, positions, votes). The
        votes are three truth values of each host, (hosts, 3) int32 (see `StepFunction`). The
        function returns their sums to all hosts, which can then all make the same decision, such as
        whether to take another step. It returns a tuple of:

        - A dict that maps each `WidthAndDtype` to the activations or codes at all stored hooks with
          this width and dtype, (hooks, rows of all hosts, T, width).
        - For each of the three votes, the number of hosts whose value is 1, (3,) int32.
    """
    model = program.model
    host_row_shardings = program.host_rows

    def apply(params: Any, tokens: Array, segments: Array, positions: Array, votes: Array) -> Any:
        model_params, encoder_weights = params
        activations_by_width_and_dtype: Any = model.apply(
            {"params": model_params}, tokens, segments, positions
        )
        stored_arrays = program.with_codes(activations_by_width_and_dtype, encoder_weights)
        return stored_arrays, votes.sum(axis=0)

    output_shardings = (
        host_row_shardings.outgoing(program.batch_shape[1], model.layout),
        host_row_shardings.everywhere(),
    )
    # Each host feeds one row with its three votes (see `StepFunction`).
    shape_of_host_votes = 1, 3
    shapes_of_fed_arrays = []
    for row_count, row_length in [program.batch_shape] * 3 + [shape_of_host_votes]:
        global_array_shape = row_count * host_row_shardings.num_hosts, row_length
        shapes_of_fed_arrays.append(
            jax.ShapeDtypeStruct(
                global_array_shape, jnp.int32, sharding=host_row_shardings.incoming()
            )
        )
    lowered_program = jax.jit(apply, out_shardings=output_shardings).lower(
        params, *shapes_of_fed_arrays
    )
    return compile_with_options(lowered_program, program.platform, **options)


def compile_unloaded(program: Program, **options: Any) -> Any:
    """Compiles the program of a run without reading the model's weights.

    The compiled program tells, for example, how much memory a step takes. All hosts must call this
    function together.

    Args:
        program: The program.
        options: Options of the compiler, in addition to the options that all runs use.

    Returns:
        The compiled program, an object of JAX. It is a function that takes weights and a batch, and
        computes the step (see `_compile`).

    Raises:
        JaxRuntimeError: If the program cannot be compiled. The message contains RESOURCE_EXHAUSTED
            if a step does not fit in memory.
    """
    model = program.model
    param_dtype = jnp.uint16 if program.takes_params_as_bits else model.dtype
    param_shape_by_path = {}
    for parameter_path, weight_spec in program.weight_table.items():
        sharding = model.layout.sharding(weight_spec.logical_axes, weight_spec.shape)
        param_shape_by_path[parameter_path] = jax.ShapeDtypeStruct(
            weight_spec.shape, param_dtype, sharding=sharding
        )
    shapes_of_encoders = [encoder.shapes(model.layout) for encoder in program.encoders]
    return _compile(program, (unflatten_dict(param_shape_by_path), shapes_of_encoders), **options)


def bytes_of_step(program: Program) -> float:
    """Returns the number of bytes of memory that a run takes on each device.

    The function compiles the program, but reads no weights. The bytes include the weights, the
    working memory of a step, and the activations of two steps, because the host copies the
    activations of one step while the devices compute the next step.

    Args:
        program: The program.

    Raises:
        InputError: If the compiler does not report how much memory a step takes.
        JaxRuntimeError: See `compile_unloaded`.
    """
    memory_analysis = compile_unloaded(program).memory_analysis()
    if memory_analysis is None:
        raise InputError(
            "the compiler does not report how much memory a step takes, which --batch_size auto "
            "and --plan need"
        )
    activation_bytes_of_two_steps = 2 * memory_analysis.output_size_in_bytes
    return (
        memory_analysis.argument_size_in_bytes
        + memory_analysis.temp_size_in_bytes
        + activation_bytes_of_two_steps
    )


def read_weights(forward: Forward) -> dict[str, Any]:
    """Reads each device's part of the model's parameters, and shows a progress bar.

    Args:
        forward: The program and its checkpoint.

    Returns:
        The parameters on the devices, as a nested dict.
    """
    model = forward.model
    layout = forward.layout
    spec_by_parameter_path = forward.weight_table
    parameter_value_count = sum(
        math.prod(weight_spec.shape) for weight_spec in spec_by_parameter_path.values()
    )
    log.info(
        "model: layers 0 to %d of %d, %.3g M parameters, %s%s; %s mesh: %s%s",
        model.num_layers - 1,
        model.config.num_hidden_layers,
        parameter_value_count / 1e6,
        model.dtype,
        f" ({model.config.weights})" if model.config.weights else "",
        jax.default_backend(),
        shape_phrase(layout.shape),
        f" ({layout.reason_for_mesh})" if layout.reason_for_mesh else "",
    )
    if model.num_stages > 1:
        micro_batch_count = model.micro_batches(
            forward.batch_shape[0] * forward.host_rows.num_hosts
        )
        idle_percent = 100 * (model.num_stages - 1) / (micro_batch_count + model.num_stages - 1)
        log_format = "pipeline: %d stages, %d micro-batches per step, bubble %.0f %%"
        log.info(log_format, model.num_stages, micro_batch_count, idle_percent)
    with tqdm(
        total=parameter_value_count * model.dtype.itemsize,
        unit="B",
        unit_scale=True,
        desc="loading weights",
        leave=False,
        disable=not on_terminal(),
    ) as progress_bar:
        return load_params(
            spec_by_parameter_path,
            forward.checkpoint,
            model.dtype,
            layout,
            as_bits=forward.takes_params_as_bits,
            progress=progress_bar.update,
        )
