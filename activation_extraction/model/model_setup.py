"""Sets up the model of a run from the flags.

`StepRequest` contains the flags. `prepare_model` reads config.json and the headers of the weight
files, and chooses the hooks, the mesh and the kernels. It raises all errors that can be detected
before weights are read. Its result is a `Forward`, for which forward.py loads the weights and
compiles the step.
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
from activation_extraction.model.tensor_names import name_in_language_model
from activation_extraction.model.trial import Choice, try_kernels
from activation_extraction.model.weights import check_tensors, orient_experts
from qwen2_jax import Qwen2, tensor_names, weight_table
from qwen2_jax_with_hooks import HookedModel, create_model_with_hooks

# The largest number of bytes of a row at a hook whose width grows with the length of the row. The
# limit is necessary because these bytes grow with the square of the length.
MAX_ROW_BYTES = 32 * 2**20


@dataclass(frozen=True)
class StepRequest:
    """The flags and other facts that determine how a step is computed.

    Attributes:
        model_options: Flags that name the model.
        hook_options: Flags that name the hooks.
        computing_options: Flags about the mesh. Their `batch_size` is not used, because
            `batch_shape` contains the number of rows.
        batch_shape: Tuple of the number of rows that each host feeds in a step, and the number of
            tokens per row.
        has_several_hosts: Whether the run has several hosts. If so, weights from the hub are not
            kept in the cache of this host, because a host may need only some of the weights.
        device_memory_bytes: Bytes of memory of a device. If the hosts' devices differ, the smallest
            number. None to use the memory of this host's first device.
        devices_of_planned_machine: Descriptions of the devices of the machine that --plan names. A
            step can be estimated or compiled for them, but not run, because they are not attached.
            None to use the devices that JAX finds.
        autoencoders: Autoencoders that --encode names, in the order of the flag.
    """

    model_options: ModelOptions
    hook_options: HookOptions
    computing_options: ComputingOptions
    batch_shape: tuple[int, int]
    has_several_hosts: bool = False
    device_memory_bytes: float | None = None
    devices_of_planned_machine: Sequence[Any] | None = None
    autoencoders: tuple[Autoencoder, ...] = ()


def prepare_model(request: StepRequest, previous: Forward | None = None) -> Forward:
    """Chooses the hooks, the mesh and the kernels of a step, and checks the checkpoint.

    No weights are read, only config.json and the headers of the weight files.

    Args:
        request: The flags and facts that determine the step.
        previous: The result of an earlier call for the same request with another number of rows.
            Its checkpoint is used again. Its kernels are used again if the mesh has not changed.
            None for the first call.

    Returns:
        The model on its mesh, with its hooks, its kernels, and the checkpoint from which its
        weights will be read.

    Raises:
        InputError: If the model cannot be read, or if the requested step cannot be computed.
        RunError: If, for an operation such as attention, all candidate kernels fail or compute
            wrong numbers on the device.
    """
    model_options = request.model_options
    if previous is None:
        checkpoint = Checkpoint(
            model_options.model_path, model_options.model_revision, not request.has_several_hosts
        )
    else:
        checkpoint = previous.checkpoint
    model_config_in_json = read_model_config(checkpoint.file("config.json"))
    adapter = None
    if previous is None and model_options.lora is not None:
        adapter = LoraAdapter(
            model_options.lora, checkpoint, model_config_in_json.tie_word_embeddings
        )
        checkpoint.adapter = adapter
    model_config = as_stored(model_config_in_json, checkpoint.tensors)
    model, host_row_shardings = build_model(request, model_config)
    if previous is None:
        _log_peculiarities(checkpoint, model_config_in_json, model)
    if previous is not None and previous.layout == model.layout:
        kernels = previous.kernel_choice_by_operation
    else:
        kernels = try_kernels(
            model_config, model.layout, request.batch_shape[1], jnp.dtype(model.dtype)
        )
    model = _with_kernels(model, kernels)
    if model.predicts and not model_config.tie_word_embeddings and HEAD not in checkpoint.tensors:
        raise InputError(
            f"--hook_names: losses and logits need {HEAD}, which "
            f"--model_path {model_options.model_path} lacks; its other hooks can be stored"
        )
    weight_spec_by_parameter_path = weight_table(model, checkpoint.tensors)
    oriented_spec_by_parameter_path = orient_experts(
        weight_spec_by_parameter_path, lambda tensor_name: checkpoint.locate(tensor_name)[1].shape
    )
    check_tensors(
        checkpoint,
        oriented_spec_by_parameter_path.values(),
        tensor_names(model_config, checkpoint.tensors),
    )
    if adapter is not None:
        # `check_read` gets the tensors of the whole model, because the adapter may also change
        # tensors that the hooked model does not read: the head if no predictions are
        # requested, and the layers after the last hook.
        tensor_names_of_model = {HEAD}
        for weight_spec in weight_table(Qwen2(model_config), checkpoint.tensors).values():
            tensor_names_of_model.update(weight_spec.hf_names)
        adapter.check_read(tensor_names_of_model)
    stored_hook_by_key, code_encoders = choose_hooks(request, model_config)
    return Forward(
        model,
        oriented_spec_by_parameter_path,
        host_row_shardings,
        request.batch_shape,
        stored_hook_by_key,
        code_encoders,
        checkpoint,
        kernels,
    )


def _log_peculiarities(
    checkpoint: Checkpoint, model_config_in_json: ModelConfig, model: HookedModel
) -> None:
    """Logs differences between the computation and what a user may expect from config.json.

    Args:
        checkpoint: The checkpoint, with its adapter.
        model_config_in_json: The configuration in config.json, which may contradict the stored
            tensors.
        model: The model that computes the hooks.
    """
    if FAMILIES[model_config_in_json.model_type].is_multimodal:
        log.info(
            "%s: its text model alone runs; placeholders of images and sound are ordinary tokens",
            checkpoint.flag_with_value,
        )
    # If the head is tied to the embedding, `LoraAdapter` may have added HEAD to
    # `checkpoint.tensors` as another name of the stored embedding. So a head is only stored if the
    # tensor also has the name HEAD in its file.
    name_of_head_in_file = checkpoint.tensors.get(HEAD, "")
    checkpoint_contains_head = name_in_language_model(name_of_head_in_file) == HEAD
    if model.predicts and model_config_in_json.tie_word_embeddings and checkpoint_contains_head:
        log.info(
            "%s: its %s is used, although config.json ties it to the embedding",
            checkpoint.flag_with_value,
            HEAD,
        )
    rope = model.config.rope
    if rope.attn_factor is not None:
        log.info(
            "%s: YaRN's attn_factor %s is ignored, as by transformers; vLLM would multiply the "
            "attention factor %s by it",
            checkpoint.flag_with_value,
            rope.attn_factor,
            rope.attention_factor,
        )


def _with_kernels(model: HookedModel, kernels: dict[str, Choice]) -> HookedModel:
    """Returns the model with the kernels that were chosen for the run.

    Args:
        model: The model, with any kernels.
        kernels: Kind of kernel (a field of `Kernels`) -> the kernel that was chosen.

    Returns:
        A copy of the model. For kinds that are not in `kernels`, it keeps the kernels of `model`.
    """
    chosen_kernel_by_kind = {
        kernel_kind: kernel_choice.kernel for kernel_kind, kernel_choice in kernels.items()
    }
    return model.clone(kernels=model.kernels._replace(**chosen_kernel_by_kind))


def build_model(request: StepRequest, config: ModelConfig) -> tuple[HookedModel, HostRows]:
    """Builds the hooked model on its mesh, without weights.

    Args:
        request: The flags and facts that determine the step.
        config: The configuration of the model.

    Returns:
        A tuple of:
            The model, with the kernels that its platform prefers. A run replaces them if
                `try_kernels` chooses other kernels.
            The shardings of the rows that hosts feed and of the activations that they receive.

    Raises:
        InputError: If the requested step cannot be computed.
    """
    num_rows_of_host, row_length = request.batch_shape
    computing_options = request.computing_options
    max_row_length, reason_for_limit = config.longest_row
    if row_length > max_row_length:
        raise InputError(f"--max_seq_length {row_length}: {reason_for_limit}")
    devices = usable_devices(
        computing_options.use_data_parallel, request.devices_of_planned_machine
    )
    platform = devices[0].platform
    model_dtype, activation_dtype = choose_dtypes(request, platform)
    hooks_computed_by_model, code_encoders = _model_hooks_and_encoders(request, config)
    for hook in hooks_computed_by_model:
        _check_bytes_of_a_row(hook, config, row_length, activation_dtype)
    num_hosts = count_hosts(devices)
    num_rows_of_step = num_rows_of_host * num_hosts

    def choose_automatically() -> MeshChoice:
        """Chooses the mesh for `--mesh_type auto`, by estimates of the duration of a step."""
        model = create_model_with_hooks(
            config, hooks_computed_by_model, model_dtype, activation_dtype
        )
        device_memory_bytes = request.device_memory_bytes
        if device_memory_bytes is None:
            device_memory_bytes = memory_of((devices_of_this_host(devices) or devices)[0])
        cost_model = CostModel(
            model, weight_table(model), num_rows_of_step, row_length, code_encoders
        )
        return cheapest_mesh(cost_model, devices, device_memory_bytes)

    mesh_shape, mesh_axes = computing_options.mesh_shape, computing_options.mesh_axes
    if not computing_options.use_data_parallel:
        # Each host uses only one device, so --mesh_shape and --mesh_axes are ignored.
        mesh_shape, mesh_axes = None, None
    mesh_choice = choose_mesh(
        computing_options.mesh_type,
        mesh_shape,
        mesh_axes,
        len(devices),
        num_hosts,
        choose_automatically,
    )
    layout = build_layout(
        devices, mesh_choice.shape, config.num_key_value_heads, mesh_choice.reason_for_mesh
    )
    check_divisibility(layout, num_rows_of_step, row_length, config.sizes)
    preferred_kernel_by_kind = {
        kernel_kind: next(iter(kernel_by_name.values()))
        for kernel_kind, kernel_by_name in candidates_for(platform).items()
    }
    kernels = Kernels(**preferred_kernel_by_kind)
    model = create_model_with_hooks(
        config, hooks_computed_by_model, model_dtype, activation_dtype, kernels, layout
    )
    return model, host_rows(layout)


def _model_hooks_and_encoders(
    request: StepRequest, config: ModelConfig
) -> tuple[list[Hook], tuple[Encoder, ...]]:
    """Returns the hooks whose values the model computes, and the encoders that compute codes.

    Args:
        request: The flags and facts that determine the step.
        config: The configuration of the model.

    Returns:
        A tuple of:
            The hooks of the model that are stored, and the hooks that the encoders read or
                reconstruct, sorted. Hooks of codes are not among them.
            An encoder for each autoencoder that --encode names.
    """
    stored_hook_by_key, code_encoders = choose_hooks(request, config)
    hooks_with_codes = {encoder.hook for encoder in code_encoders}
    hooks_computed_by_model = set(stored_hook_by_key.values()) - hooks_with_codes
    for encoder in code_encoders:
        hooks_computed_by_model |= {encoder.source_hook, encoder.target_hook}
    return sorted(hooks_computed_by_model), code_encoders


def _check_bytes_of_a_row(
    hook: Hook, config: ModelConfig, length: int, activation_dtype: Any
) -> None:
    """Checks the size of a row's values at a hook whose width grows with the length of the row.

    Args:
        hook: Any hook. Only hooks whose width grows with the length of the row are checked.
        config: The configuration of the model.
        length: The number of tokens of the row.
        activation_dtype: The dtype of stored activations; the constant FLOAT8 if --activation_dtype
            is float8.

    Raises:
        InputError: If the values of the row take more than MAX_ROW_BYTES.
    """
    bytes_per_token = hook.kind.width_and_dtype(config.sizes_with(length), activation_dtype).bytes
    if hook.kind.grows_with_row_length and bytes_per_token * length > MAX_ROW_BYTES:
        raise InputError(
            f"--hook_names {hook.name}: takes {bytes_per_token:,} bytes per token and "
            f"{bytes_per_token * length:,} per row with --max_seq_length {length}; at most "
            f"{MAX_ROW_BYTES:,} per row are stored; choose a smaller --max_seq_length"
        )


def choose_dtypes(request: StepRequest, platform: str) -> tuple[Any, Any]:
    """Returns the dtypes of the computation and of stored activations.

    `--dtype auto` is float32 on CPUs and bfloat16 on other platforms. `--activation_dtype auto` is
    the dtype of the computation.

    Args:
        request: The flags and facts that determine the step.
        platform: The platform of the devices.

    Returns:
        A tuple of:
            The dtype of the computation.
            The dtype of stored activations. The constant FLOAT8 takes the place of a dtype if
                --activation_dtype is float8.
    """
    auto_dtype = "float32" if platform == "cpu" else "bfloat16"
    requested_dtype = request.model_options.dtype
    model_dtype = jnp.dtype(auto_dtype if requested_dtype == "auto" else requested_dtype)
    activation_dtype = request.hook_options.activation_dtype
    if activation_dtype == FLOAT8:
        return model_dtype, FLOAT8
    if activation_dtype == "auto":
        return model_dtype, model_dtype
    return model_dtype, jnp.dtype(activation_dtype)


def choose_hooks(
    request: StepRequest, config: ModelConfig
) -> tuple[dict[Key, Hook], tuple[Encoder, ...]]:
    """Returns the hooks that are stored, and the encoders that compute codes.

    If --encode is given, the default layers are not stored. The activations from which codes are
    computed are stored if --keep_activations is given, and not stored otherwise.

    Args:
        request: The flags and facts that determine the step.
        config: The configuration of the model.

    Returns:
        A tuple of:
            A dict: key in the shards -> hook. Hooks of codes come last.
            An encoder for each autoencoder that --encode names.

    Raises:
        InputError: If the model lacks a requested hook, or if an autoencoder does not fit the
            model.
    """
    hook_options = request.hook_options
    hook_table_of_model = hook_table(config, hook_options.top_logits)
    num_layers = config.num_hidden_layers
    size_by_axis_letter = config.sizes_with(request.batch_shape[1])
    code_encoders = make_encoders(
        request.autoencoders,
        hook_options.encode_most,
        hook_table_of_model,
        num_layers,
        size_by_axis_letter,
    )
    hook_by_key: dict[Key, Hook] = {}
    if (
        not code_encoders
        or hook_options.hook_names is not None
        or hook_options.layers_to_extract is not None
    ):
        hook_by_key = _requested_hooks(hook_options, config, hook_table_of_model)
    for encoder in code_encoders:
        source_hook = encoder.source_hook
        if not hook_options.keep_activations:
            hook_by_key = {
                hook_key: hook for hook_key, hook in hook_by_key.items() if hook != source_hook
            }
        elif source_hook not in hook_by_key.values():
            hook_by_key[source_hook.name] = source_hook
    hook_by_key |= {encoder.hook.name: encoder.hook for encoder in code_encoders}
    return hook_by_key, code_encoders


def _requested_hooks(
    options: HookOptions, config: ModelConfig, hook_table_of_model: HookTable
) -> dict[Key, Hook]:
    """Returns the hooks that --hook_names or --layers_to_extract names.

    If neither flag is given, the hooks of the default layers are returned. The hooks whose values
    are codes of autoencoders are not among the returned hooks, because --encode names them.

    Args:
        options: The flags that name the hooks.
        config: The configuration of the model.
        hook_table_of_model: The table of the kinds of hooks of the model.

    Returns:
        Key in the shards -> hook, in the order in which the model computes the hooks.

    Raises:
        InputError: If the model lacks a layer or hook, or if --top_logits is larger than the
            vocabulary.
    """
    num_layers = config.num_hidden_layers
    if options.hook_names is not None:
        hook_by_name = hook_table_of_model.matching(options.hook_names, num_layers)
        if any(hook.kind.width_factor > config.vocab_size for hook in hook_by_name.values()):
            raise InputError(
                f"--top_logits {options.top_logits}: the model has {config.vocab_size} tokens"
            )
        return dict(hook_by_name.items())
    numbers_of_layers_to_store: Sequence[int]
    if options.layers_to_extract is None:
        # The default must work for any model, so the last layer replaces layers that a model lacks.
        numbers_of_layers_to_store = [min(layer, num_layers - 1) for layer in DEFAULT_LAYERS]
    elif isinstance(options.layers_to_extract, str):
        # The only text that --layers_to_extract accepts is "all".
        numbers_of_layers_to_store = range(num_layers)
    else:
        numbers_of_layers_to_store = options.layers_to_extract
    hooks_of_layers = hook_table_of_model.of_layers(
        numbers_of_layers_to_store, options.activation_type, num_layers
    )
    return {hook.layer_number: hook for hook in hooks_of_layers}


def log_hooks(options: HookOptions, forward: Forward) -> None:
    """Logs the hooks and codes that are stored, and the bytes that a token's activations take.

    It also logs a message if an autoencoder was trained on another layer than the layer whose
    activations it encodes, or if the model lacks some of the default layers.

    Args:
        options: The flags that name the hooks.
        forward: The model on its mesh, with its hooks and encoders.
    """
    num_layers = forward.model.config.num_hidden_layers
    bytes_per_token_by_hook = forward.token_bytes
    for encoder in forward.encoders:
        autoencoder_name = plain_url(encoder.autoencoder.name)
        hook_name_in_files = encoder.autoencoder.hook_name_in_files or ""
        codes_phrase = encoder.description(forward.model.activation_dtype)
        log.info("codes of %s: %s", autoencoder_name, codes_phrase)
        bytes_per_token_by_hook.pop(encoder.hook.name)
        if layer_in_name(hook_name_in_files) not in ("", str(encoder.source_hook.layer_number)):
            log.warning(
                "--encode %s: its files name %s, and it is used at %s",
                autoencoder_name,
                hook_name_in_files,
                encoder.source_hook.name,
            )
    if not bytes_per_token_by_hook:
        return
    uses_default_layers = options.layers_to_extract is None and options.hook_names is None
    if uses_default_layers and not forward.encoders and num_layers <= DEFAULT_LAYERS[-1]:
        log.info(
            "the default layers, %d to %d, are clipped: the model has layers 0 to %d",
            DEFAULT_LAYERS[0],
            DEFAULT_LAYERS[-1],
            num_layers - 1,
        )
    hook_widths = []
    hook_dtypes = []
    for hook in forward.hook_by_key.values():
        if hook.name in bytes_per_token_by_hook:
            width_and_dtype = hook.kind.width_and_dtype(
                forward.sizes, forward.model.activation_dtype
            )
            hook_widths.append(width_and_dtype.width)
            hook_dtypes.append(width_and_dtype.dtype)
    log.info(
        "hooks: %s; %s, in %s: %s bytes per token",
        ", ".join(bytes_per_token_by_hook),
        f"width {hook_widths[0]} each" if len(set(hook_widths)) == 1 else f"widths {hook_widths}",
        " and ".join(dict.fromkeys(hook_dtypes)),
        f"{sum(bytes_per_token_by_hook.values()):,}",
    )
