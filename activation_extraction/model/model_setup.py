"""Sets up the model of a run from the flags.

`StepRequest` contains the flags. `prepare_model` reads config.json and the headers of the weights,
chooses the hooks, the mesh and the kernels, and raises all errors that can be detected before a
weight is read. forward.py loads and compiles its result, a `Forward`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from activation_extraction.cli.flags import ComputingOptions, HookOptions, ModelOptions
from activation_extraction.common.choices import DEFAULT_LAYERS
from activation_extraction.common.encodings import FLOAT8
from activation_extraction.common.errors import InputError
from activation_extraction.common.log import log
from activation_extraction.common.visible import plain_url
from activation_extraction.model.autoencoders import Autoencoder, layer_in_name
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.devices import devices_of_this_host, memory_of, usable_devices
from activation_extraction.model.encode import Encoder, make_encoders
from activation_extraction.model.family import FAMILIES, read_model_config
from activation_extraction.model.forward import Forward, Key
from activation_extraction.model.hooks import Hook, HookTable, hook_table
from activation_extraction.model.host_rows import HostRows, count_hosts, host_rows
from activation_extraction.model.kernels import Kernels, candidates_for
from activation_extraction.model.lora import LoraAdapter
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.mesh_choice import (
    MeshChoice,
    cheapest_mesh,
    check_divisibility,
    choose_mesh,
)
from activation_extraction.model.model_config import HEAD, ModelConfig, as_stored
from activation_extraction.model.step_cost import CostModel
from activation_extraction.model.tensor_names import text_name
from activation_extraction.model.trial import Choice, try_kernels
from activation_extraction.model.weights import check_tensors, orient_experts
from qwen2_jax import Qwen2, tensor_names, weight_table
from qwen2_jax_with_hooks import HookedModel, create_model_with_hooks

# The largest size of a row at a hook whose width grows with the length of the row.
MOST_BYTES_OF_A_ROW = 32 * 2**20


@dataclass(frozen=True)
class StepRequest:
    """The flags that determine a step, and further facts about it that the run determines.

    Attributes:
        model: Flags that name the model.
        hooks: Flags that name the hooks.
        computing: Flags about the mesh. Its batch_size is not used; `shape` replaces it.
        shape: Number of rows that each host feeds in a step, and number of tokens per row.
        several_hosts: Whether there are several hosts. If so, weights from the hub are not kept in
            the cache of this host, because it may need only some of them.
        memory: Bytes of memory of a device, the smallest number of all hosts. None for the number
            of this host.
        devices: Devices of a machine that --plan describes; None for the devices of this machine.
        autoencoders: Autoencoders that `hooks.encode` names, in the same order.
    """

    model: ModelOptions
    hooks: HookOptions
    computing: ComputingOptions
    shape: tuple[int, int]
    several_hosts: bool = False
    memory: float | None = None
    devices: Sequence[Any] | None = None
    autoencoders: tuple[Autoencoder, ...] = ()


def prepare_model(request: StepRequest, before: Forward | None = None) -> Forward:
    """Prepares the model on its mesh, and checks its checkpoint.

    Args:
        request: The flags and facts that determine the step.
        before: The result of this function for the same request with another number of rows; None
            if there is none. Its checkpoint is used again, and so are its kernels if the mesh is
            the same.

    Returns:
        The program with its checkpoint.

    Raises:
        InputError: The model cannot be read, or the request cannot be computed.
        RunError: No kernel of a kind is accurate on this device.
    """
    options = request.model
    if before is None:
        checkpoint = Checkpoint(
            options.model_path, options.model_revision, not request.several_hosts
        )
    else:
        checkpoint = before.checkpoint
    stated = read_model_config(checkpoint.file("config.json"))
    adapter = None
    if before is None and options.lora is not None:
        adapter = LoraAdapter(options.lora, checkpoint, stated.tie_word_embeddings)
        checkpoint.adapter = adapter
    config = as_stored(stated, checkpoint.tensors)
    model, rows = build_model(request, config)
    if before is None:
        _log_peculiarities(checkpoint, stated, model)
    if before is not None and before.layout == model.layout:
        kernels = before.kernels
    else:
        kernels = try_kernels(config, model.layout, request.shape[1], jnp.dtype(model.dtype))
    model = _with_kernels(model, kernels)
    if model.predicts and not config.tie_word_embeddings and HEAD not in checkpoint.tensors:
        raise InputError(
            f"--hook_names: losses and logits need {HEAD}, which --model_path {options.model_path} "
            "lacks; its other hooks can be stored"
        )
    table = weight_table(model, checkpoint.tensors)
    weights = orient_experts(table, lambda name: checkpoint.locate(name)[1].shape)
    check_tensors(checkpoint, weights.values(), tensor_names(config, checkpoint.tensors))
    if adapter is not None:
        whole = weight_table(Qwen2(config), checkpoint.tensors).values()
        adapter.check_read({name for spec in whole for name in spec.hf_names} | {HEAD})
    hooks, encoders = choose_hooks(request, config)
    return Forward(model, weights, rows, request.shape, hooks, encoders, checkpoint, kernels)


def _log_peculiarities(checkpoint: Checkpoint, stated: ModelConfig, model: HookedModel) -> None:
    """Logs where the computation differs from what a user may expect from config.json.

    Args:
        checkpoint: The checkpoint, with its adapter.
        stated: The configuration in config.json, which may differ from the stored tensors.
        model: The hooked model.
    """
    where = checkpoint.where
    if FAMILIES[stated.model_type].multimodal:
        text = "%s: its text model alone runs; placeholders of images and sound are ordinary tokens"
        log.info(text, where)
    # An adapter may have added HEAD to the tensors of a tied model, as another name of the stored
    # embedding. So the name in the file tells whether a head is stored.
    has_head = text_name(checkpoint.tensors.get(HEAD, "")) == HEAD
    if model.predicts and stated.tie_word_embeddings and has_head:
        log.info("%s: its %s is used, although config.json ties it to the embedding", where, HEAD)
    rope = model.config.rope
    if rope.attn_factor is not None:
        log.info(
            "%s: YaRN's attn_factor %s is ignored, as by transformers; vLLM would multiply the "
            "attention factor %s by it",
            where,
            rope.attn_factor,
            rope.attention_factor,
        )


def _with_kernels(model: HookedModel, kernels: dict[str, Choice]) -> HookedModel:
    """Returns the model with other kernels.

    Args:
        model: The hooked model.
        kernels: Field of `Kernels` -> the kernel that was chosen.
    """
    functions = {name: choice.function for name, choice in kernels.items()}
    return model.clone(kernels=model.kernels._replace(**functions))


def build_model(request: StepRequest, config: ModelConfig) -> tuple[HookedModel, HostRows]:
    """Builds the hooked model on its mesh, without weights.

    Args:
        request: The flags and facts that determine the step.
        config: The configuration of the model.

    Returns:
        A tuple of:
            The model, with the kernels that its platform prefers; in a run, `try_kernels` chooses
                others if necessary.
            The shardings of the rows that hosts feed and of the activations that they receive.

    Raises:
        InputError: The request cannot be computed.
    """
    rows_of_host, length = request.shape
    computing = request.computing
    longest, why = config.longest_row
    if length > longest:
        raise InputError(f"--max_seq_length {length}: {why}")
    devices = usable_devices(computing.use_data_parallel, request.devices)
    platform = devices[0].platform
    dtype, activation_dtype = choose_dtypes(request, platform)
    hooks, encoders = _computed_hooks(request, config)
    for hook in hooks:
        _check_bytes_of_a_row(hook, config, length, activation_dtype)
    hosts = count_hosts(devices)
    rows = rows_of_host * hosts

    def automatic() -> MeshChoice:
        """Chooses the mesh for --mesh_type auto."""
        model = create_model_with_hooks(config, hooks, dtype, activation_dtype)
        memory = request.memory
        if memory is None:
            memory = memory_of((devices_of_this_host(devices) or devices)[0])
        cost_model = CostModel(model, weight_table(model), rows, length, encoders)
        return cheapest_mesh(cost_model, devices, memory)

    several = computing.use_data_parallel
    choice = choose_mesh(
        computing.mesh_type,
        computing.mesh_shape if several else None,
        computing.mesh_axes if several else None,
        len(devices),
        hosts,
        automatic,
    )
    layout = build_layout(devices, choice.shape, config.num_key_value_heads, choice.why)
    check_divisibility(layout, rows, length, config.sizes)
    candidates = candidates_for(platform)
    preferred = {kind: next(iter(functions.values())) for kind, functions in candidates.items()}
    kernels = Kernels(**preferred)
    model = create_model_with_hooks(config, hooks, dtype, activation_dtype, kernels, layout)
    return model, host_rows(layout)


def _computed_hooks(
    request: StepRequest, config: ModelConfig
) -> tuple[list[Hook], tuple[Encoder, ...]]:
    """Returns the hooks that the model computes, and the encoders.

    Returns:
        A tuple of:
            The hooks that are stored, without codes, and the hooks that the encoders read or
                reconstruct, sorted.
            The encoders.
    """
    stored_hooks, encoders = choose_hooks(request, config)
    codes = {encoder.hook for encoder in encoders}
    hooks = {hook for hook in stored_hooks.values() if hook not in codes}
    for encoder in encoders:
        hooks |= {encoder.source, encoder.target}
    return sorted(hooks), encoders


def _check_bytes_of_a_row(
    hook: Hook, config: ModelConfig, length: int, activation_dtype: Any
) -> None:
    """Raises InputError if a row takes too much memory at a hook whose width grows with it."""
    token_bytes = hook.kind.vector_type(config.sizes_with(length), activation_dtype).bytes
    if hook.kind.grows and token_bytes * length > MOST_BYTES_OF_A_ROW:
        raise InputError(
            f"--hook_names {hook.name}: takes {token_bytes:,} bytes per token and "
            f"{token_bytes * length:,} per row with --max_seq_length {length}; at most "
            f"{MOST_BYTES_OF_A_ROW:,} per row are stored; choose a smaller --max_seq_length"
        )


def choose_dtypes(request: StepRequest, platform: str) -> tuple[Any, Any]:
    """Returns the dtypes of the computation and of stored activations.

    For the computation, `auto` is float32 on CPUs and bfloat16 elsewhere. For activations, it is
    the dtype of the computation.

    Args:
        request: The flags and facts that determine the step.
        platform: The platform of the devices.

    Returns:
        The dtype of the computation.
        The dtype of stored activations, or FLOAT8.
    """
    auto = "float32" if platform == "cpu" else "bfloat16"
    dtype = jnp.dtype(auto if request.model.dtype == "auto" else request.model.dtype)
    activation_dtype = request.hooks.activation_dtype
    if activation_dtype == FLOAT8:
        return dtype, FLOAT8
    if activation_dtype == "auto":
        return dtype, dtype
    return dtype, jnp.dtype(activation_dtype)


def choose_hooks(
    request: StepRequest, config: ModelConfig
) -> tuple[dict[Key, Hook], tuple[Encoder, ...]]:
    """Returns the hooks that are stored, and the encoders.

    The activations from which codes are computed are only stored with --keep_activations. If there
    are codes, layers are only stored if flags name them.

    Args:
        request: The flags and facts that determine the step.
        config: The configuration of the model.

    Returns:
        A tuple of:
            Key in the shards -> hook. Hooks of codes come last.
            The encoders.

    Raises:
        InputError: The model has no such hook, or an autoencoder does not fit it.
    """
    options = request.hooks
    table, depth = hook_table(config, options.top_logits), config.num_hidden_layers
    sizes = config.sizes_with(request.shape[1])
    encoders = make_encoders(request.autoencoders, options.encode_most, table, depth, sizes)
    hooks: dict[Key, Hook] = {}
    if not encoders or options.hook_names is not None or options.layers_to_extract is not None:
        hooks = _requested_hooks(options, config, table)
    for source in (encoder.source for encoder in encoders):
        if not options.keep_activations:
            hooks = {key: hook for key, hook in hooks.items() if hook != source}
        elif source not in hooks.values():
            hooks[source.name] = source
    return hooks | {encoder.hook.name: encoder.hook for encoder in encoders}, encoders


def _requested_hooks(
    options: HookOptions, config: ModelConfig, table: HookTable
) -> dict[Key, Hook]:
    """Returns the hooks that the flags name: key in the shards -> hook, in the order of the flags.

    The default layers are clipped to the model's depth; explicit layers are not.
    """
    depth = config.num_hidden_layers
    if options.hook_names is not None:
        named = table.matching(options.hook_names, depth)
        if any(hook.kind.count > config.vocab_size for hook in named.values()):
            raise InputError(
                f"--top_logits {options.top_logits}: the model has {config.vocab_size} tokens"
            )
        return dict(named.items())
    layers: Sequence[int]
    if options.layers_to_extract is None:
        layers = [min(layer, depth - 1) for layer in DEFAULT_LAYERS]
    elif isinstance(options.layers_to_extract, str):  # "all"
        layers = range(depth)
    else:
        layers = options.layers_to_extract
    hooks = table.of_layers(layers, options.activation_type, depth)
    return {hook.layer: hook for hook in hooks}


def log_hooks(options: HookOptions, forward: Forward) -> None:
    """Logs which activations and codes are stored of a token, and how many bytes they take.

    Args:
        options: The flags that name the hooks.
        forward: The program with its hooks.
    """
    depth, size = forward.model.config.num_hidden_layers, forward.token_bytes
    for encoder in forward.encoders:
        name = plain_url(encoder.autoencoder.name)
        hook_in_files = encoder.autoencoder.hook_in_files or ""
        log.info("codes of %s: %s", name, encoder.in_words(forward.model.activation_dtype))
        size.pop(encoder.hook.name)
        if layer_in_name(hook_in_files) not in ("", str(encoder.source.layer)):
            text = "--encode %s: its files name %s, and it is used at %s"
            log.warning(text, name, hook_in_files, encoder.source.name)
    if not size:
        return
    default = options.layers_to_extract is None and options.hook_names is None
    if default and not forward.encoders and depth <= DEFAULT_LAYERS[-1]:
        text = "the default layers, %d to %d, are clipped: the model has layers 0 to %d"
        log.info(text, DEFAULT_LAYERS[0], DEFAULT_LAYERS[-1], depth - 1)
    kinds = [hook.kind for hook in forward.hooks.values() if hook.name in size]
    dtype = forward.model.activation_dtype
    vector_types = [kind.vector_type(forward.sizes, dtype) for kind in kinds]
    widths = [vector_type.width for vector_type in vector_types]
    dtypes = " and ".join(dict.fromkeys(vector_type.dtype for vector_type in vector_types))
    log.info(
        "hooks: %s; %s, in %s: %s bytes per token",
        ", ".join(size),
        f"width {widths[0]} each" if len(set(widths)) == 1 else f"widths {widths}",
        dtypes,
        f"{sum(size.values()):,}",
    )
