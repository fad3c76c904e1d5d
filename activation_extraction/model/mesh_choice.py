"""Chooses the mesh of a run.

`choose_mesh` follows --mesh_type, --mesh_shape and --mesh_axes. For `auto`, `cheapest_mesh` takes
the mesh with the shortest step among those that fit in memory, or, if steps of other meshes take at
most 1 % longer, the mesh that splits weights least. So it prefers pure `data`, then `fsdp` over the
fewest devices, and then `model`, if there are too few rows. It never uses `pipeline`, because
`fsdp` saves the same memory without idle stages. step_cost.py has the formulas, and mesh.py builds
the mesh.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from activation_extraction.common.choices import MESH_AXES
from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import counted
from activation_extraction.model.devices import USABLE
from activation_extraction.model.mesh import BOTH, RULES, Layout, abstract_layout
from activation_extraction.model.model_config import ModelConfig
from activation_extraction.model.step_cost import AXES, CostModel, StepCost

DIMENSIONS = {"1d": 1, "2d": 2, "3d": 3}
# Dimensions of a mesh -> its axes, unless --mesh_axes names them.
DEFAULT_AXES: dict[int, tuple[str, ...]] = {
    1: ("model",),
    2: ("data", "model"),
    3: ("pipeline", "data", "model"),
}
DEFAULT_3D_DEVICES = 64  # the smallest number of devices for which 3d needs no --mesh_shape
ALIKE = 1.01  # steps whose durations differ by at most this factor count as equally long
SHAPES_SHOWN = 8  # the largest number of shapes in a message


class MeshChoice(NamedTuple):
    """The mesh of a run.

    Attributes:
        shape: Mesh axis, as the user knows it -> size. The first axis varies slowest.
        why: Reason for the choice in one line; "" if the flags determine the mesh.
    """

    shape: dict[str, int]
    why: str = ""


def choose_mesh(
    mesh_type: str | None,
    mesh_shape: Sequence[int] | None,
    mesh_axes: Sequence[str] | None,
    devices: int,
    hosts: int,
    automatic: Callable[[], MeshChoice],
) -> MeshChoice:
    """Returns the mesh that the flags request.

    --mesh_shape determines the mesh. Without it, the mesh follows from --mesh_type: 1d has all
    devices on `model`. 2d has the hosts on `data` and the devices of a host on `model`; a single
    host with an even number of at least 8 devices has `data` 2. 3d has sizes of 4 on two of its
    axes, and becomes 2d if there are too few devices.

    Args:
        mesh_type: The value of --mesh_type; None if only a shape is given.
        mesh_shape: The value of --mesh_shape; None without it.
        mesh_axes: The value of --mesh_axes; None without it.
        devices: The number of devices of all hosts.
        hosts: The number of hosts.
        automatic: A function that chooses the mesh for `auto`.

    Raises:
        InputError: The shape contradicts the axes or the number of devices, or there are axes
            without a shape.
    """
    if mesh_shape is not None:
        return MeshChoice(_with_axes(mesh_shape, mesh_axes, mesh_type, devices))
    if mesh_axes is not None and mesh_type != "3d":
        raise InputError(f"--mesh_axes {','.join(mesh_axes)}: needs --mesh_shape")
    if mesh_type == "auto":
        return automatic()
    if mesh_type == "1d":
        return MeshChoice({"model": devices})
    if mesh_type == "3d":
        if devices >= DEFAULT_3D_DEVICES and devices % 16 == 0:
            return MeshChoice(_default_3d(mesh_axes, devices))
        why = (
            f"a 3d mesh needs a multiple of 16 devices, {DEFAULT_3D_DEVICES} or more, or "
            f"--mesh_shape; {counted(devices, 'device')} become a 2d mesh"
        )
        return MeshChoice(_default_2d(devices, hosts), why)
    return MeshChoice(_default_2d(devices, hosts))


def _default_2d(devices: int, hosts: int) -> dict[str, int]:
    """Returns the shape of a 2d mesh without --mesh_shape."""
    data = hosts
    if hosts == 1:
        data = 2 if devices >= 8 and devices % 2 == 0 else 1
    return {"data": data, "model": devices // data}


def _default_3d(mesh_axes: Sequence[str] | None, devices: int) -> dict[str, int]:
    """Returns the shape of a 3d mesh without --mesh_shape.

    Two axes have the size 4. The third, to which all other devices belong, is `data` or otherwise
    `fsdp`, along which rows are split; without both, it is the first axis.
    """
    names = tuple(mesh_axes or DEFAULT_AXES[3])
    if len(names) != 3:
        raise InputError(f"--mesh_axes {','.join(names)}: a 3d mesh has three axes")
    largest = next(axis for axis in ("data", "fsdp", names[0]) if axis in names)
    return {name: devices // 16 if name == largest else 4 for name in names}


def _with_axes(
    mesh_shape: Sequence[int],
    mesh_axes: Sequence[str] | None,
    mesh_type: str | None,
    devices: int,
) -> dict[str, int]:
    """Returns the sizes in --mesh_shape by their axes. Raises InputError as `choose_mesh` does."""
    text = ",".join(map(str, mesh_shape))
    dimensions = DIMENSIONS.get(mesh_type or "", len(mesh_shape))
    if len(mesh_shape) != dimensions:
        raise InputError(
            f"--mesh_shape {text}: has {len(mesh_shape)} axes, --mesh_type has {dimensions}"
        )
    names = tuple(mesh_axes or DEFAULT_AXES.get(len(mesh_shape), MESH_AXES))
    if len(names) != len(mesh_shape):
        raise InputError(
            f"--mesh_shape {text}: has {len(mesh_shape)} axes, --mesh_axes {len(names)}"
        )
    if math.prod(mesh_shape) != devices:
        raise InputError(
            f"--mesh_shape {text}: is {counted(math.prod(mesh_shape), 'device')}, there are "
            f"{devices}; these would fit: {_fitting_shapes(len(mesh_shape), devices)}"
        )
    return dict(zip(names, mesh_shape, strict=True))


def _fitting_shapes(dimensions: int, devices: int) -> str:
    """Lists shapes with this many devices for a message, with the most even ones first."""
    factors = [size for size in range(1, devices + 1) if devices % size == 0]
    shapes = [shape for shape in product(factors, repeat=dimensions) if math.prod(shape) == devices]
    shapes.sort(key=lambda shape: (max(shape) - min(shape), shape))
    return "; ".join(",".join(map(str, shape)) for shape in shapes[:SHAPES_SHOWN])


def cheapest_mesh(
    cost_model: CostModel, devices: Sequence[Any], device_memory: float | None
) -> MeshChoice:
    """Chooses the mesh with the shortest step for `--mesh_type auto`.

    If no mesh fits in memory by the estimate, it is the mesh that needs the least memory.

    Args:
        cost_model: The step.
        devices: The devices, ordered by host.
        device_memory: The bytes of memory of each device. None if they are unknown; then all meshes
            count as fitting.

    Raises:
        InputError: No mesh divides the rows and widths.
    """
    costs = _costs(cost_model, devices)
    fitting = [
        cost for cost in costs if device_memory is None or cost.memory <= USABLE * device_memory
    ]
    if not fitting:
        best = min(costs, key=lambda cost: cost.memory)
        why = f"{_memory_in_words(best, device_memory)}; no mesh fits by this estimate"
        return MeshChoice(best.layout.shape, why)
    shortest = min(cost.seconds for cost in fitting)
    alike = [cost for cost in fitting if cost.seconds <= ALIKE * shortest]
    splits = "model", "expert", "fsdp"  # their sizes are minimised in this order
    best = min(alike, key=lambda cost: [cost.layout.shape.get(axis, 1) for axis in splits])
    return MeshChoice(best.layout.shape, _reason(best, device_memory))


def _costs(cost_model: CostModel, devices: Sequence[Any]) -> list[StepCost]:
    """Returns the cost of the step on each mesh that divides its rows and widths.

    Raises:
        InputError: No mesh divides them.
    """
    config = cost_model.model.config
    costs: list[StepCost] = []
    for shape in _shapes(cost_model, len(devices)):
        layout = abstract_layout(shape, config.num_key_value_heads)
        try:
            check_divisibility(layout, cost_model.rows, cost_model.length, config.sizes)
        except InputError as error:
            if shape.get("model", 1) == len(devices) and not costs:
                rows = f"--batch_size: the {cost_model.rows} rows of all hosts"
                raise InputError(f"{rows} can be split on no mesh: {error}") from error
            continue
        costs.append(cost_model.estimate(layout, devices))
    return costs


def _shapes(cost_model: CostModel, devices: int) -> Iterator[dict[str, int]]:
    """Yields the shapes that can split the rows; the last one has all devices along `model`."""
    factors = [size for size in range(1, devices + 1) if devices % size == 0]
    config: ModelConfig = cost_model.model.config
    experts = 1 if config.experts is None else config.experts.count
    for model_size, expert_size, fsdp_size in product(factors, repeat=3):
        data_size, remainder = divmod(devices, model_size * expert_size * fsdp_size)
        divides = remainder == 0 and cost_model.rows % (data_size * fsdp_size * expert_size) == 0
        if divides and experts % expert_size == 0:
            axis_sizes = data_size, fsdp_size, expert_size, model_size
            sizes = dict(zip(AXES, axis_sizes, strict=True))
            yield {axis: size for axis, size in sizes.items() if size > 1 or axis == "data"}


def _reason(best: StepCost, device_memory: float | None) -> str:
    """Returns the reasons for the choice of a mesh in one line."""
    shape = best.layout.shape
    reasons = [_memory_in_words(best, device_memory)]
    if shape.keys() == {"data"} and shape["data"] > 1:
        reasons.append("every device holds all weights and computes its own rows")
    if "fsdp" in shape:
        verb = "hide behind" if best.gathers <= best.products else "outlast"
        reasons.append(f"gathers of weights {verb} products")
    if best.exchanges:
        share = 100 * best.exchanges / best.seconds
        axes = " and ".join(axis for axis in shape if axis in ("expert", "model"))
        reasons.append(f"exchanges along {axes} take {share:.0f} %")
    return "; ".join(reasons)


def _memory_in_words(cost: StepCost, device_memory: float | None) -> str:
    limit = "" if device_memory is None else f" of {device_memory / 1e9:.3g}"
    return f"about {cost.memory / 1e9:.2g}{limit} GB per device"


def check_divisibility(layout: Layout, rows: int, length: int, sizes: Mapping[str, int]) -> None:
    """Checks that the mesh divides the rows, the tokens and the widths of the model.

    Args:
        layout: The mesh.
        rows: The number of rows per step, of all hosts together.
        length: The number of tokens per row.
        sizes: `ModelConfig.sizes`: letter of an axis -> size.

    Raises:
        InputError: A size is not divisible by the number of devices that share it, or the mesh has
            an axis for experts, which the model lacks.
    """
    if "expert" in layout.shape and "E" not in sizes:
        raise InputError("--mesh_axes expert: the model has no experts")
    checks = (
        ("--batch_size, rows of all hosts together", rows, RULES["batch"]),
        ("--max_seq_length", length, ("query",)),
        ("intermediate_size", sizes.get("F", 0), BOTH),
        ("moe_intermediate_size", sizes.get("M", 0), BOTH),
        ("shared_expert_intermediate_size", sizes.get("P", 0), BOTH),
        ("num_experts", sizes.get("E", 0), ("expert",)),
        ("hidden_size", sizes["D"], ("fsdp",)),
    )
    for name, size, axes in checks:
        parts = layout.size(*axes)
        if size % parts:
            raise InputError(
                f"{name}: {size} does not divide among {parts} devices ({' x '.join(axes)}); "
                "choose another --mesh_shape or size (--no_data_parallel uses one device)"
            )
