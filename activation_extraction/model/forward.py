"""The forward pass that a run asks for: the hooked model on its mesh, checked, with its weights.

Between the flags and the model: `ModelRequest` is what the flags ask, and everything in it that can
be wrong is found here, before a weight is read. Compiling and running is step.py's part.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from activation_extraction.cli.config import DEFAULT_LAYERS, Config
from activation_extraction.cli.console import log
from activation_extraction.cli.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.devices import usable_devices
from activation_extraction.model.family import HookedModel, ModelFamily, WeightTable
from activation_extraction.model.hooks import Hook, HookTable
from activation_extraction.model.kernels import attention_for
from activation_extraction.model.mesh import (
    HostRows,
    Layout,
    build_layout,
    check_divisibility,
    host_rows,
)
from activation_extraction.model.mesh_shape import choose_shape, smallest_model_axis
from activation_extraction.model.weights import check_tensors

Key = int | str  # of a hook in the shards: its layer, or its name


@dataclass(frozen=True)
class ModelRequest:
    """What the flags of the same names ask of the model; rows and length are those of a step.

    every_device: False for one device of every host.
    """

    model_path: str
    dtype: str
    activation_dtype: str
    hook_names: tuple[str, ...] | None
    layers: tuple[int, ...] | None
    activation_type: str
    rows: int
    length: int
    mesh_type: str
    mesh_shape: tuple[int, ...] | None
    mesh_axes: tuple[str, ...] | None
    every_device: bool

    @classmethod
    def of(cls, config: Config) -> "ModelRequest":
        return cls(
            model_path=config.model_path,
            dtype=config.dtype,
            activation_dtype=config.activation_dtype,
            hook_names=config.hook_names,
            layers=config.layers_to_extract,
            activation_type=config.activation_type,
            rows=config.batch_size,
            length=config.max_seq_length,
            mesh_type=config.mesh_type,
            mesh_shape=config.mesh_shape,
            mesh_axes=config.mesh_axes,
            every_device=config.use_data_parallel,
        )


@dataclass(frozen=True)
class Forward:
    """A checked model: what it computes, with which weights, on which devices.

    hooks: key in the shards -> hook, in the order in which the model computes them; shape: rows and
    tokens per row that this host feeds in a step.
    """

    checkpoint: Checkpoint
    model: HookedModel
    hooks: dict[Key, Hook]
    weights: WeightTable
    rows: HostRows
    shape: tuple[int, int]

    @property
    def layout(self) -> Layout:
        return self.model.layout

    @property
    def keyed_by(self) -> str | list[str]:
        """What the keys in the shards are: all of them, where hooks have other names there."""
        if all(isinstance(key, int) for key in self.hooks):
            return "layer"
        keys = [str(key) for key in self.hooks]
        return "hook name" if keys == [hook.name for hook in self.hooks.values()] else keys

    def receive(self, activations: Mapping[int, Array]) -> dict[Key, np.ndarray]:
        """What the model returned for this host's rows: key in the shards -> (B, T, width)."""
        found = self.rows.receive(activations)
        sizes = self.model.config.sizes
        views = {width: iter(arrays) for width, arrays in found.items()}
        return {key: next(views[hook.kind.width(sizes)]) for key, hook in self.hooks.items()}


def prepare_model(family: ModelFamily, request: ModelRequest) -> Forward:
    """The model on its mesh, with a checkpoint that has been checked. Raises InputError."""
    checkpoint = Checkpoint(request.model_path)
    config = family.config.from_file(checkpoint.file("config.json"))
    hooks = choose_hooks(request, family.hooks, config.num_hidden_layers)
    model, rows = build_model(family, request, config)
    weights = family.weight_table(model)
    every = family.weight_table(family.whole(config)).values()
    known = {name for spec in every for name in spec.hf_names} | {"lm_head.weight"}
    check_tensors(checkpoint, weights.values(), known)
    return Forward(checkpoint, model, hooks, weights, rows, (request.rows, request.length))


def build_model(
    family: ModelFamily, request: ModelRequest, config: Any
) -> tuple[HookedModel, HostRows]:
    """The hooked model on its mesh, and how rows come to the mesh. Raises InputError."""
    devices = usable_devices(request.every_device)
    if request.length > config.max_position_embeddings:
        raise InputError(
            f"--max_seq_length {request.length}: the model has "
            f"{config.max_position_embeddings} positions"
        )
    dtype, stored = choose_dtypes(request)
    hooks = list(choose_hooks(request, family.hooks, config.num_hidden_layers).values())
    alone = family.hooked(config, hooks, dtype, stored)
    rows = host_rows(devices)
    layout = choose_layout(family, request, alone, devices, rows.hosts)
    attention = attention_for(devices[0].platform)
    return family.hooked(config, hooks, dtype, stored, attention, layout), rows


def choose_layout(
    family: ModelFamily, request: ModelRequest, alone: HookedModel, devices: list[Any], hosts: int
) -> Layout:
    """The mesh for a model, given as it is without one. Raises InputError."""
    config, total_rows = alone.config, request.rows * hosts
    smallest_model = 1
    if request.mesh_type == "auto":
        widths = sum(hook.kind.width(config.sizes) for hook in alone.hooks)
        smallest_model = smallest_model_axis(
            len(devices),
            total_rows,
            weights=sum(math.prod(s.shape) for s in family.weight_table(alone).values()),
            captured=total_rows * request.length * widths,
            itemsize=jnp.dtype(alone.dtype).itemsize,
        )
    shape, remark = choose_shape(
        request.mesh_type,
        request.mesh_shape if request.every_device else None,
        request.mesh_axes if request.every_device else None,
        devices=len(devices),
        hosts=hosts,
        smallest_model=smallest_model,
    )
    if remark:
        log.info("%s", remark)
    layout = build_layout(devices, shape, config.num_key_value_heads)
    check_divisibility(layout, total_rows, request.length, config.sizes)
    return layout


def choose_dtypes(request: ModelRequest) -> tuple[Any, Any]:
    """For computing, where auto is what the hardware is built for; and for what is stored."""
    auto = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    dtype = jnp.dtype(auto if request.dtype == "auto" else request.dtype)
    stored = request.activation_dtype
    return dtype, dtype if stored == "auto" else jnp.dtype(stored)


def choose_hooks(request: ModelRequest, table: HookTable, depth: int) -> dict[Key, Hook]:
    """The hooks that are asked for, by their keys in the shards and in their order.

    The default layers are clipped to the model's depth, explicit ones are not.
    """
    if request.hook_names is not None:
        return {name: hook for name, hook in table.matching(request.hook_names, depth).items()}
    layers = request.layers or [min(layer, depth - 1) for layer in DEFAULT_LAYERS]
    hooks = table.of_layers(layers, request.activation_type, depth)
    return {hook.layer: hook for hook in hooks}
