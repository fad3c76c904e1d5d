"""The forward pass of a run is the hooked model on its mesh, checked, loaded and compiled.

`ModelRequest` holds what the flags ask for, and `prepare_model` finds everything in it that can be
wrong before a weight is read. `compile_step` then reads the weights and compiles the one program
for all batches. The loop decides what happens between steps.
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

from activation_extraction.common.choices import DEFAULT_LAYERS
from activation_extraction.common.codes import code_bytes
from activation_extraction.common.encodings import FLOAT8
from activation_extraction.common.errors import InputError
from activation_extraction.common.log import log, on_terminal
from activation_extraction.common.visible import plain_url
from activation_extraction.model.autoencoders import Autoencoder, layer_in
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.compilation import compile_with_options, watch_compiling
from activation_extraction.model.devices import devices_of_this_host, memory_of, usable_devices
from activation_extraction.model.encode import Encoder, Weights, encode, make_encoders
from activation_extraction.model.family import FAMILIES, read_model_config
from activation_extraction.model.hooks import Form, Hook, HookTable, hook_table
from activation_extraction.model.host_rows import HostRows, count_hosts, host_rows
from activation_extraction.model.kept import KeptTokens, take_kept
from activation_extraction.model.kernels import Kernels, candidates_for
from activation_extraction.model.lora import LoraAdapter
from activation_extraction.model.mesh import Layout, build_layout, in_words
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
from activation_extraction.model.weights import (
    WeightTable,
    check_tensors,
    load_params,
    oriented,
)
from activation_extraction.text.batch import Batch
from qwen2_jax import Qwen2, tensor_names, weight_table
from qwen2_jax_with_hooks import HookedModel, create_model_with_hooks

MOST_BYTES_OF_A_ROW = 32 * 2**20  # at a hook whose width grows with the row

Key = int | str  # a hook's key in the shards: its layer, or its name
# {form: (hooks of that form, rows of all hosts, T, width)}, or only the batch's kept tokens
Activations = dict[Form, Array] | KeptTokens
# A step maps (batch or None, flags of this host) to (activations, number of hosts that set each
# flag), and does not wait for the devices.
Step = Callable[[Batch | None, Sequence[bool]], tuple[Activations, Array]]


@dataclass(frozen=True)
class ModelRequest:
    """Holds what the flags of the same names ask of the model.

    batch_size: the rows that every host feeds in a step. multihost: then the hub's cache here does
    not keep the weights, of which a host of a pod may need only some. memory: the bytes of each
    device, the least of all hosts; None for those of this host. devices: those of a machine that is
    only planned; None for this one's. autoencoders: those that `encode` names, in its order.
    """

    model_path: str
    model_revision: str | None
    lora: str | None
    encode: tuple[tuple[str, str], ...]
    encode_most: int | None
    keep_activations: bool
    dtype: str
    activation_dtype: str
    hook_names: tuple[str, ...] | None
    layers_to_extract: tuple[int, ...] | str | None
    activation_type: str
    top_logits: int
    batch_size: int
    max_seq_length: int
    mesh_type: str | None
    mesh_shape: tuple[int, ...] | None
    mesh_axes: tuple[str, ...] | None
    use_data_parallel: bool
    multihost: bool
    memory: float | None = None
    devices: Sequence[Any] | None = None
    autoencoders: tuple[Autoencoder, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        return self.batch_size, self.max_seq_length


@dataclass(frozen=True)
class Program:
    """What the program of a step is compiled from, without weights.

    shape: rows and tokens per row that each host feeds in a step. hooks: key in the shards -> hook;
    those of codes come last. encoders: the autoencoders whose codes the step computes.
    """

    model: HookedModel
    weights: WeightTable
    rows: HostRows
    shape: tuple[int, int]
    hooks: dict[Key, Hook]
    encoders: tuple[Encoder, ...]

    @property
    def layout(self) -> Layout:
        return self.model.layout

    @property
    def platform(self) -> str:
        return self.rows.mesh.devices.flat[0].platform

    @property
    def as_bits(self) -> bool:
        """Returns whether parameters are passed to the compiled step as integers."""
        return self.model.dtype == jnp.bfloat16 and self.platform == "cpu"

    @property
    def sizes(self) -> dict[str, int]:
        """Returns letter -> size, with S for the tokens of a row."""
        return self.model.config.sizes_with(self.shape[1])

    def form(self, hook: Hook) -> Form:
        return hook.kind.form(self.sizes, self.model.captured_dtype)

    def flops(self, lengths: Sequence[int]) -> float:
        """Returns the floating-point operations for samples of these lengths."""
        of_token = sum(encoder.flops for encoder in self.encoders)
        return self.model.flops(lengths) + of_token * sum(lengths)

    @property
    def token_bytes(self) -> dict[str, int]:
        """Returns how many bytes of a token are stored at each hook; of codes, the most."""
        dtype, hooks = self.model.activation_dtype, self.hooks.values()
        found = {hook.name: hook.kind.form(self.sizes, dtype).bytes for hook in hooks}
        return found | {each.hook.name: code_bytes(each.most, dtype) for each in self.encoders}

    def with_codes(self, found: dict[Form, Array], weights: Sequence[Weights]) -> dict[Form, Array]:
        """Returns the values at the hooks that are stored, from those that the model computes.

        weights: of each autoencoder.
        """
        if not self.encoders:
            return found
        rest = {form: iter(stack) for form, stack in found.items()}
        values = {hook: next(rest[self.form(hook)]) for hook in self.model.hooks}
        for encoder, arrays in zip(self.encoders, weights, strict=True):
            given = values[encoder.source], values[encoder.target]
            values[encoder.hook] = encode(encoder, arrays, *given, self.layout)
        stacks: dict[Form, list[Array]] = defaultdict(list)
        for hook in self.hooks.values():
            stacks[self.form(hook)].append(values[hook])
        return {form: jnp.stack(stack) for form, stack in stacks.items()}


@dataclass(frozen=True)
class Forward(Program):
    """A checked model: what it computes, with which weights and on which devices."""

    checkpoint: Checkpoint
    kernels: dict[str, Choice]

    @property
    def keyed_by(self) -> str | list[str]:
        """Returns what the shards' keys are: "layer", "hook name", or all keys if neither."""
        if all(isinstance(key, int) for key in self.hooks):
            return "layer"
        keys = [str(key) for key in self.hooks]
        return "hook name" if keys == [hook.name for hook in self.hooks.values()] else keys

    def receive(self, activations: Activations) -> dict[Key, np.ndarray]:
        """Returns a step's activations for this host's rows, by key in the shards.

        They are (B, T, width), or (tokens, width) of the kept tokens, row by row.
        """
        if isinstance(activations, KeptTokens):
            stacks = activations.receive()
        else:
            stacks = self.rows.receive(activations)
        rest = {form: iter(stack) for form, stack in stacks.items()}
        return {key: next(rest[self.form(hook)]) for key, hook in self.hooks.items()}


def prepare_model(request: ModelRequest, before: Forward | None = None) -> Forward:
    """Returns the model on its mesh and its checked checkpoint. Raises InputError.

    before: what this function returned for the same request with other rows; if they lead to the
    same mesh, the kernels are not tried again.
    """
    if before is None:
        checkpoint = Checkpoint(request.model_path, request.model_revision, not request.multihost)
    else:
        checkpoint = before.checkpoint
    config = read_model_config(checkpoint.file("config.json"))
    adapter = None
    if before is None and request.lora is not None:
        adapter = LoraAdapter(request.lora, checkpoint, config.tie_word_embeddings)
        checkpoint.adapter = adapter
    tied, config = config.tie_word_embeddings, as_stored(config, checkpoint.tensors)
    model, rows = build_model(request, config)
    where, rope = f"--model_path {request.model_path}", config.rope
    if before is None and FAMILIES[config.model_type].multimodal:
        says = "its text model alone runs; placeholders of images and sound are ordinary tokens"
        log.info("%s: %s", where, says)
    own = text_name(checkpoint.tensors.get(HEAD, "")) == HEAD  # not the adapter's
    if before is None and model.predicts and tied and own:
        log.info("%s: its %s is used, although config.json ties it to the embedding", where, HEAD)
    if before is None and rope.attn_factor is not None:
        text = "%s: YaRN's attn_factor %s is ignored, as by transformers; vLLM would multiply the "
        text += "attention factor %s by it"
        log.info(text, where, rope.attn_factor, rope.attention_factor)
    if before is not None and before.layout == model.layout:
        chosen = before.kernels
    else:
        chosen = try_kernels(config, model.layout, request.max_seq_length, jnp.dtype(model.dtype))
    functions = {name: choice.function for name, choice in chosen.items()}
    model = model.clone(kernels=model.kernels._replace(**functions))
    if model.predicts and not config.tie_word_embeddings and HEAD not in checkpoint.tensors:
        raise InputError(
            f"--hook_names: losses and logits need {HEAD}, which --model_path {request.model_path} "
            "has not; its other hooks can be stored"
        )
    table = weight_table(model, checkpoint.tensors)
    weights = oriented(table, lambda name: checkpoint.place(name)[1].shape)
    check_tensors(checkpoint, weights.values(), tensor_names(config, checkpoint.tensors))
    if adapter is not None:
        whole = weight_table(Qwen2(config), checkpoint.tensors).values()
        adapter.check_read({name for spec in whole for name in spec.hf_names} | {HEAD})
    asked = choose_hooks(request, config)
    return Forward(model, weights, rows, request.shape, *asked, checkpoint, chosen)


def build_model(request: ModelRequest, config: ModelConfig) -> tuple[HookedModel, HostRows]:
    """Returns the hooked model on its mesh, and how rows come to the mesh. Raises InputError.

    Its kernels are those that its platform prefers; `try_kernels` has the last word.
    """
    length = request.max_seq_length
    longest, why = config.longest_row
    if length > longest:
        raise InputError(f"--max_seq_length {length}: {why}")
    devices = usable_devices(request.use_data_parallel, request.devices)
    dtype, activations = choose_dtypes(request, devices[0].platform)
    stored, encoders = choose_hooks(request, config)
    of_codes = {encoder.hook for encoder in encoders}
    hooks = {hook for hook in stored.values() if hook not in of_codes}
    hooks |= {hook for encoder in encoders for hook in (encoder.source, encoder.target)}
    for hook in sorted(hooks):
        of_token = hook.kind.form(config.sizes_with(length), activations).bytes
        if hook.kind.grows and of_token * length > MOST_BYTES_OF_A_ROW:
            raise InputError(
                f"--hook_names {hook.name}: takes {of_token:,} bytes per token and "
                f"{of_token * length:,} per row with --max_seq_length {length}; at most "
                f"{MOST_BYTES_OF_A_ROW:,} per row are stored; choose a smaller --max_seq_length"
            )
    asked = config, sorted(hooks), dtype, activations
    hosts = count_hosts(devices)
    total_rows = request.batch_size * hosts

    def automatic() -> MeshChoice:
        model = create_model_with_hooks(*asked)
        step = CostModel(model, weight_table(model), total_rows, length, encoders)
        memory = request.memory
        if memory is None:
            memory = memory_of((devices_of_this_host(devices) or devices)[0])
        return cheapest_mesh(step, devices, memory)

    several = request.use_data_parallel
    choice = choose_mesh(
        request.mesh_type,
        request.mesh_shape if several else None,
        request.mesh_axes if several else None,
        len(devices),
        hosts,
        automatic,
    )
    layout = build_layout(devices, choice.shape, config.num_key_value_heads, choice.why)
    check_divisibility(layout, total_rows, length, config.sizes)
    candidates = candidates_for(devices[0].platform)
    preferred = {kind: next(iter(each.values())) for kind, each in candidates.items()}
    return create_model_with_hooks(*asked, Kernels(**preferred), layout), host_rows(layout)


def choose_dtypes(request: ModelRequest, platform: str) -> tuple[Any, Any]:
    """Returns the dtypes to compute in and to store, which may be "float8".

    `auto` depends on the platform of the devices.
    """
    auto = "float32" if platform == "cpu" else "bfloat16"
    dtype = jnp.dtype(auto if request.dtype == "auto" else request.dtype)
    stored = request.activation_dtype
    if stored == FLOAT8:
        return dtype, stored
    return dtype, dtype if stored == "auto" else jnp.dtype(stored)


def choose_hooks(
    request: ModelRequest, config: ModelConfig
) -> tuple[dict[Key, Hook], tuple[Encoder, ...]]:
    """Returns the hooks that are stored, by their keys in the shards, and the encoders of those
    whose codes are stored.

    Codes come last. They are in the place of the activations that they are made from, or beside
    them; if there are any, the default layers are not stored. Raises InputError.
    """
    table, depth = hook_table(config, request.top_logits), config.num_hidden_layers
    sizes = config.sizes_with(request.max_seq_length)
    encoders = make_encoders(request.autoencoders, request.encode_most, table, depth, sizes)
    hooks: dict[Key, Hook] = {}
    if not encoders or request.hook_names is not None or request.layers_to_extract is not None:
        hooks = _asked_hooks(request, config, table)
    for source in (encoder.source for encoder in encoders):
        if not request.keep_activations:
            hooks = {key: hook for key, hook in hooks.items() if hook != source}
        elif source not in hooks.values():
            hooks[source.name] = source
    return hooks | {encoder.hook.name: encoder.hook for encoder in encoders}, encoders


def _asked_hooks(request: ModelRequest, config: ModelConfig, table: HookTable) -> dict[Key, Hook]:
    """Returns the hooks that are asked for, by their keys in the shards and in their order.

    The default layers are clipped to the model's depth, explicit ones are not.
    """
    depth = config.num_hidden_layers
    if request.hook_names is not None:
        named = table.matching(request.hook_names, depth)
        if any(hook.kind.count > config.vocab_size for hook in named.values()):
            raise InputError(
                f"--top_logits {request.top_logits}: the model has {config.vocab_size} tokens"
            )
        return dict(named.items())
    clipped = [min(layer, depth - 1) for layer in DEFAULT_LAYERS]
    asked = clipped if request.layers_to_extract is None else request.layers_to_extract
    layers = range(depth) if isinstance(asked, str) else asked
    hooks = table.of_layers(layers, request.activation_type, depth)
    return {hook.layer: hook for hook in hooks}


def log_hooks(request: ModelRequest, forward: Forward) -> None:
    """Logs what is stored of every token, and how many bytes that takes."""
    depth, size = forward.model.config.num_hidden_layers, forward.token_bytes
    for encoder in forward.encoders:
        name, named = plain_url(encoder.autoencoder.name), encoder.autoencoder.named or ""
        log.info("codes of %s: %s", name, encoder.in_words(forward.model.activation_dtype))
        size.pop(encoder.hook.name)
        if layer_in(named) not in ("", str(encoder.source.layer)):
            text = "--encode %s: its files name %s, and it is used at %s"
            log.warning(text, name, named, encoder.source.name)
    if not size:
        return
    default = request.layers_to_extract is None and request.hook_names is None
    if default and not forward.encoders and depth <= DEFAULT_LAYERS[-1]:
        text = "the default layers, %d to %d, are clipped: the model has layers 0 to %d"
        log.info(text, DEFAULT_LAYERS[0], DEFAULT_LAYERS[-1], depth - 1)
    kinds = [hook.kind for hook in forward.hooks.values() if hook.name in size]
    forms = [kind.form(forward.sizes, forward.model.activation_dtype) for kind in kinds]
    widths = [form.width for form in forms]
    dtypes = " and ".join(dict.fromkeys(form.dtype for form in forms))
    each = f"width {widths[0]} each" if len(set(widths)) == 1 else f"widths {widths}"
    told = ", ".join(size), each, dtypes, f"{sum(size.values()):,}"
    log.info("hooks: %s; %s, in %s: %s bytes per token", *told)


def compile_step(forward: Forward) -> Step:
    """Loads the weights and compiles the forward pass.

    There is one program for all steps: it would take longer to compile another one for the last
    step, if that has few tokens, than to compute its padding, and several hosts would have to agree
    on it.
    """
    rows, layout = forward.rows, forward.layout
    params = read_weights(forward), [each.weights(layout) for each in forward.encoders]
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
        if batch is not None and batch.kept is not None:  # this must precede the next step
            activations = take_kept(activations, batch.kept)
        return activations, votes

    return step


def _compiled(program: Program, params: Any, **options: Any) -> Any:
    """Compiles the forward pass. params: the weights of the model, and of each autoencoder, or
    their shapes and shardings."""
    model, rows = program.model, program.rows

    def apply(params: Any, tokens: Array, segments: Array, positions: Array, flags: Array) -> Any:
        params, autoencoders = params
        values: Any = model.apply({"params": params}, tokens, segments, positions)
        return program.with_codes(values, autoencoders), flags.sum(axis=0)

    outgoing = rows.outgoing(program.shape[1], model.layout), rows.everywhere()
    inputs = [
        jax.ShapeDtypeStruct((count * rows.hosts, size), jnp.int32, sharding=rows.incoming())
        for count, size in [program.shape] * 3 + [(1, 3)]
    ]
    lowered = jax.jit(apply, out_shardings=outgoing).lower(params, *inputs)
    return compile_with_options(lowered, program.platform, **options)


def compile_unloaded(program: Program, **options: Any) -> Any:
    """Compiles the program of a run without its weights. All hosts must call this together.

    options: of the compiler, beyond those of a run. Raises JaxRuntimeError, with RESOURCE_EXHAUSTED
    in it if the compiler finds that a step does not fit.
    """
    model = program.model
    dtype = jnp.uint16 if program.as_bits else model.dtype
    params = {}
    for path, spec in program.weights.items():
        split = model.layout.sharding(spec.axes, spec.shape)
        params[path] = jax.ShapeDtypeStruct(spec.shape, dtype, sharding=split)
    given = unflatten_dict(params), [each.shapes(model.layout) for each in program.encoders]
    return _compiled(program, given, **options)


def bytes_of_step(program: Program) -> float:
    """Returns the bytes that a run takes on each device: those of the weights, of a computing step,
    and of two steps' activations, as the host copies those of one while the next one computes.

    It reads no weights. See `compile_unloaded`. Raises InputError if the compiler does not say.
    """
    memory = compile_unloaded(program).memory_analysis()
    if memory is None:
        raise InputError(
            "the compiler does not say how much memory a step takes, which --batch_size auto and "
            "--plan need"
        )
    output = 2 * memory.output_size_in_bytes
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + output


def read_weights(forward: Forward) -> dict[str, Any]:
    """Reads the parameters straight into their shards, with a progress bar."""
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
