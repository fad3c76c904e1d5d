"""The shape of the mesh: the sizes of its axes, from --mesh_type, --mesh_shape and --mesh_axes.

How arrays lie on the mesh is mesh.py's part.
"""

import math
from collections.abc import Sequence

import jax

from activation_extraction.common.choices import MESH_AXES
from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import counted

DEFAULT_3D_DEVICES = 64
DEFAULT_3D_AXES = ("pipeline", "data", "model")
DEFAULT_2D_AXES = ("data", "model")


def smallest_model_axis(devices: int, rows: int, weights: int, captured: int, itemsize: int) -> int:
    """The smallest `model` axis with which everything fits, for --mesh_type auto.

    weights: number of parameters; captured: activations of one step, all hosts together. Counts
    weights, two steps of activations, and half as much again as the activations for what lies
    between; leaves a tenth of the memory free. 1 where devices do not tell their memory (CPU).
    """
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    for model in range(1, devices + 1):
        if devices % model == 0 and rows % (devices // model) == 0:
            need = itemsize * (weights / model + 2.5 * captured / devices)
            if limit is None or need <= 0.9 * limit:
                return model
    return devices


def choose_shape(
    kind: str | None,
    shape: Sequence[int] | None,
    axes: Sequence[str] | None,
    devices: int,
    hosts: int,
    smallest_model: int = 1,
) -> tuple[dict[str, int], str | None]:
    """Mesh axis -> size for --mesh_type, --mesh_shape and --mesh_axes, and a remark or None.

    kind: None when only a shape is given. smallest_model: what `auto` takes as the `model` axis, a
    divisor of `devices`. Raises InputError when a given shape does not fit the axes or the devices.
    """
    dimensions = {"1d": 1, "2d": 2, "3d": 3}.get(kind or "")
    if shape is not None:
        return _explicit(shape, axes, dimensions, devices), None
    if axes is not None and dimensions != 3:
        raise InputError(f"--mesh_axes {','.join(axes)}: needs --mesh_shape")
    if kind == "auto":
        return {"data": devices // smallest_model, "model": smallest_model}, None
    if kind == "1d":
        return {"model": devices}, None
    remark = None
    if kind == "3d":
        if devices >= DEFAULT_3D_DEVICES and devices % 16 == 0:
            return _default_3d(tuple(axes or DEFAULT_3D_AXES), devices), None
        remark = (
            f"a 3d mesh needs a multiple of 16 devices, {DEFAULT_3D_DEVICES} or more, or "
            f"--mesh_shape; {counted(devices, 'device')} become a 2d mesh"
        )
    data = hosts if hosts > 1 else (2 if devices >= 8 and devices % 2 == 0 else 1)
    return {"data": data, "model": devices // data}, remark


def _default_3d(names: tuple[str, ...], devices: int) -> dict[str, int]:
    """Four along two axes; the rest along the one that splits rows alone, or the first."""
    if len(names) != 3:
        raise InputError(f"--mesh_axes {','.join(names)}: a 3d mesh has three axes")
    rest = next(axis for axis in ("data", "fsdp", names[0]) if axis in names)
    return {name: devices // 16 if name == rest else 4 for name in names}


def _explicit(
    shape: Sequence[int], axes: Sequence[str] | None, dimensions: int | None, devices: int
) -> dict[str, int]:
    text = ",".join(map(str, shape))
    if dimensions is not None and len(shape) != dimensions:
        raise InputError(
            f"--mesh_shape {text}: has {len(shape)} axes, --mesh_type has {dimensions}"
        )
    defaults = {1: ("model",), 2: DEFAULT_2D_AXES, 3: DEFAULT_3D_AXES}
    names = tuple(axes or defaults.get(len(shape), MESH_AXES))
    if len(names) != len(shape):
        raise InputError(f"--mesh_shape {text}: has {len(shape)} axes, --mesh_axes {len(names)}")
    if math.prod(shape) != devices:
        fitting = "; ".join(",".join(map(str, s)) for s in _fitting_shapes(devices, len(shape)))
        raise InputError(
            f"--mesh_shape {text}: is {counted(math.prod(shape), 'device')}, there are {devices}; "
            f"these would fit: {fitting}"
        )
    return dict(zip(names, shape, strict=True))


def _fitting_shapes(devices: int, dimensions: int, most: int = 8) -> list[tuple[int, ...]]:
    """Factorisations of `devices`, the most even ones first."""
    found: list[tuple[int, ...]] = []

    def extend(prefix: tuple[int, ...], left: int) -> None:
        if len(prefix) == dimensions - 1:
            found.append((*prefix, left))
            return
        for factor in range(1, left + 1):
            if left % factor == 0:
                extend((*prefix, factor), left // factor)

    extend((), devices)
    return sorted(found, key=lambda s: (max(s) - min(s), s))[:most]
