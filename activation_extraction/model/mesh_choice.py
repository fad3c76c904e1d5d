"""Chooses the mesh of a run.

`choose_mesh` follows --mesh_type, --mesh_shape and --mesh_axes. For `--mesh_type auto`,
`cheapest_mesh` compares all meshes that fit in the devices' memory. It finds the mesh with the
shortest step and the meshes whose steps are at most 1 % longer. Among these meshes, it chooses the
mesh that splits weights least. This is the mesh with the smallest `model` axis; if several meshes
have it, the one of them with the smallest `expert` axis, and then with the smallest `fsdp` axis.
Therefore `cheapest_mesh` prefers `data` alone. It uses `model` if a step has too few rows to divide
them among all devices. It
never uses `pipeline`, because `fsdp` saves the same memory without idle stages.

step_cost.py has the formulas for memory and time, and mesh.py builds the mesh.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from activation_extraction.common.choices import MESH_AXES
from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import counted
from activation_extraction.model.devices import USABLE
from activation_extraction.model.mesh import MODEL_AXES, RULES, Layout, abstract_layout
from activation_extraction.model.model_config import ModelConfig
from activation_extraction.model.step_cost import AXES, CostModel, StepCost

# Value of --mesh_type -> number of axes of the mesh.
DIMENSIONS = {"1d": 1, "2d": 2, "3d": 3}
# Number of axes of a mesh -> the names of its axes if --mesh_axes is not given.
DEFAULT_AXES: dict[int, tuple[str, ...]] = {
    1: ("model",),
    2: ("data", "model"),
    3: ("pipeline", "data", "model"),
}
# The smallest number of devices for which `--mesh_type 3d` without --mesh_shape makes a 3d mesh.
# Two axes of this mesh have the size 4, so with fewer than 4 * 4 * 4 devices, the third axis would
# be smaller than 4. With fewer devices, a 2d mesh is made instead.
DEFAULT_3D_DEVICES = 64
# Steps whose durations differ by at most this factor count as equally long, so that tiny
# differences between estimates do not decide.
SIMILAR_FACTOR = 1.01
# The largest number of shapes that an error message lists, so that the message stays short.
SHAPES_SHOWN = 8


class MeshChoice(NamedTuple):
    """The shape of a run's mesh, with the reason for its choice.

    Attributes:
        shape: Name of a mesh axis, as --mesh_axes accepts it, such as `model` -> its size. The
            first axis varies slowest over the devices.
        reason_for_mesh: Reason for the choice in one line. "" if the flags determine the mesh.
    """

    shape: dict[str, int]
    reason_for_mesh: str = ""


def choose_mesh(
    mesh_type: str | None,
    mesh_shape: Sequence[int] | None,
    mesh_axes: Sequence[str] | None,
    num_devices: int,
    num_hosts: int,
    automatic: Callable[[], MeshChoice],
) -> MeshChoice:
    """Returns the mesh that the flags request.

    If --mesh_shape is given, it determines the mesh. Otherwise the mesh follows from --mesh_type:

    - 1d: All devices are along `model`.
    - 2d: The hosts are along `data`, and the devices of each host are along `model`. With a single
      host, `data` has the size 2 if the number of devices is even and at least 8, otherwise 1.
    - 3d: The axes are the axes in --mesh_axes, or `pipeline`, `data` and `model` if --mesh_axes is
      not given. One of them has the size `num_devices` / 16: `data` if the mesh has it, otherwise
      `fsdp` if the mesh has it, otherwise the first axis. The other two axes have the size 4. If
      the number of devices is less than 64 or no multiple of 16, the mesh is as for 2d.
    - auto: `automatic` chooses the mesh.

    Args:
        mesh_type: The value of --mesh_type. None if only --mesh_shape is given.
        mesh_shape: The value of --mesh_shape. None if it is not given.
        mesh_axes: The value of --mesh_axes. None if it is not given.
        num_devices: The number of devices of all hosts.
        num_hosts: The number of hosts.
        automatic: A function that chooses the mesh for `--mesh_type auto`.

    Raises:
        InputError: If the shape contradicts the axes or the number of devices, or if --mesh_axes is
            given without a shape for a mesh type other than 3d.
    """
    if mesh_shape is not None:
        return MeshChoice(_with_axes(mesh_shape, mesh_axes, mesh_type, num_devices))
    if mesh_axes is not None and mesh_type != "3d":
        raise InputError(f"--mesh_axes {','.join(mesh_axes)}: needs --mesh_shape")
    if mesh_type == "auto":
        return automatic()
    if mesh_type == "1d":
        return MeshChoice({"model": num_devices})
    if mesh_type == "3d":
        if num_devices >= DEFAULT_3D_DEVICES and num_devices % 16 == 0:
            return MeshChoice(_default_3d(mesh_axes, num_devices))
        reason_for_2d_mesh = (
            f"a 3d mesh needs a multiple of 16 devices, {DEFAULT_3D_DEVICES} or more, or "
            f"--mesh_shape; {counted(num_devices, 'device')} become a 2d mesh"
        )
        return MeshChoice(_default_2d(num_devices, num_hosts), reason_for_2d_mesh)
    return MeshChoice(_default_2d(num_devices, num_hosts))


def _default_2d(num_devices: int, num_hosts: int) -> dict[str, int]:
    """Returns the shape of a mesh for `--mesh_type 2d` without --mesh_shape: axis -> its size.

    The hosts are along `data`, and the devices of each host are along `model`. With a single host,
    `data` has the size 2 if the number of devices is even and at least 8, otherwise 1.

    Args:
        num_devices: The number of devices of all hosts.
        num_hosts: The number of hosts.
    """
    data_axis_size = num_hosts
    if num_hosts == 1:
        data_axis_size = 2 if num_devices >= 8 and num_devices % 2 == 0 else 1
    return {"data": data_axis_size, "model": num_devices // data_axis_size}


def _default_3d(mesh_axes: Sequence[str] | None, num_devices: int) -> dict[str, int]:
    """Returns the shape of a mesh for `--mesh_type 3d` without --mesh_shape: axis -> its size.

    One axis has the size `num_devices` / 16, and the other two axes have the size 4. The axis with
    the size `num_devices` / 16 is `data` if the mesh has it, otherwise `fsdp` if the mesh has it,
    because rows are split along these axes. If the mesh has neither of them, it is the first axis.

    Args:
        mesh_axes: The value of --mesh_axes. None if it is not given; the axes are then `pipeline`,
            `data` and `model`.
        num_devices: The number of devices, a multiple of 16.

    Raises:
        InputError: If --mesh_axes does not name three axes.
    """
    axis_names = tuple(mesh_axes or DEFAULT_AXES[3])
    if len(axis_names) != 3:
        raise InputError(f"--mesh_axes {','.join(axis_names)}: a 3d mesh has three axes")
    name_of_largest_axis = axis_names[0]
    for row_axis_name in ("fsdp", "data"):
        if row_axis_name in axis_names:
            name_of_largest_axis = row_axis_name
    size_by_axis = dict.fromkeys(axis_names, 4)
    size_by_axis[name_of_largest_axis] = num_devices // 16
    return size_by_axis


def _with_axes(
    mesh_shape: Sequence[int],
    mesh_axes: Sequence[str] | None,
    mesh_type: str | None,
    num_devices: int,
) -> dict[str, int]:
    """Returns the mesh that --mesh_shape describes: name of an axis -> its size.

    Args:
        mesh_shape: The value of --mesh_shape.
        mesh_axes: The value of --mesh_axes. None for the default axes of a shape of this length.
        mesh_type: The value of --mesh_type. None if it is not given.
        num_devices: The number of devices of all hosts.

    Raises:
        InputError: If the shape contradicts the axes or the number of devices.
    """
    mesh_shape_text = ",".join(map(str, mesh_shape))
    num_mesh_axes = DIMENSIONS.get(mesh_type or "", len(mesh_shape))
    if len(mesh_shape) != num_mesh_axes:
        raise InputError(
            f"--mesh_shape {mesh_shape_text}: has {len(mesh_shape)} axes, --mesh_type has "
            f"{num_mesh_axes}"
        )
    axis_names = tuple(mesh_axes or DEFAULT_AXES.get(len(mesh_shape), MESH_AXES))
    if len(axis_names) != len(mesh_shape):
        raise InputError(
            f"--mesh_shape {mesh_shape_text}: has {len(mesh_shape)} axes, --mesh_axes "
            f"{len(axis_names)}"
        )
    if math.prod(mesh_shape) != num_devices:
        raise InputError(
            f"--mesh_shape {mesh_shape_text}: is {counted(math.prod(mesh_shape), 'device')}, there "
            f"are {num_devices}; these would fit: {_fitting_shapes(len(mesh_shape), num_devices)}"
        )
    return dict(zip(axis_names, mesh_shape, strict=True))


def _fitting_shapes(dimensions: int, num_devices: int) -> str:
    """Lists shapes of meshes with a given number of devices, for a message.

    Shapes whose axes have similar sizes come first.

    Args:
        dimensions: The number of axes.
        num_devices: The number of devices.

    Returns:
        At most SHAPES_SHOWN shapes, such as "2,4; 4,2; 1,8; 8,1".
    """
    mesh_shapes = [
        mesh_shape
        for mesh_shape in product(_divisors(num_devices), repeat=dimensions)
        if math.prod(mesh_shape) == num_devices
    ]
    mesh_shapes.sort(key=lambda mesh_shape: (max(mesh_shape) - min(mesh_shape), mesh_shape))
    return "; ".join(",".join(map(str, mesh_shape)) for mesh_shape in mesh_shapes[:SHAPES_SHOWN])


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def cheapest_mesh(
    cost_model: CostModel, devices: Sequence[Any], device_memory_bytes: float | None
) -> MeshChoice:
    """Chooses the mesh for `--mesh_type auto`, by estimates of the duration of a step.

    Among the meshes that fit in memory and whose steps are at most SIMILAR_FACTOR times as long as
    the shortest step, this function chooses the mesh that splits weights least (see
    `_weight_splits`). If no mesh fits in memory by the estimates, it chooses the mesh that needs
    the least memory.

    Args:
        cost_model: The estimator of the cost of a step on any mesh.
        devices: The devices, ordered by host.
        device_memory_bytes: The bytes of memory of each device. None if they are unknown, and then
            all meshes are assumed to fit.

    Raises:
        InputError: If no mesh divides the rows of a step and the widths of the model.
    """
    step_costs = _costs(cost_model, devices)
    costs_of_fitting_meshes = [
        cost
        for cost in step_costs
        if device_memory_bytes is None or cost.needed_memory_bytes <= USABLE * device_memory_bytes
    ]
    if not costs_of_fitting_meshes:
        cost_with_least_memory = min(step_costs, key=lambda cost: cost.needed_memory_bytes)
        memory_phrase = _memory_phrase(cost_with_least_memory, device_memory_bytes)
        return MeshChoice(
            cost_with_least_memory.layout.shape, f"{memory_phrase}; no mesh fits by this estimate"
        )
    shortest_seconds = min(step_cost.seconds for step_cost in costs_of_fitting_meshes)
    similar_costs = [
        cost
        for cost in costs_of_fitting_meshes
        if cost.seconds <= SIMILAR_FACTOR * shortest_seconds
    ]
    step_cost_of_chosen_mesh = min(similar_costs, key=_weight_splits)
    return MeshChoice(
        step_cost_of_chosen_mesh.layout.shape,
        _reason(step_cost_of_chosen_mesh, device_memory_bytes),
    )


def _weight_splits(cost: StepCost) -> list[int]:
    """Returns the sizes of the mesh axes along which weights are split: `model`, `expert`, `fsdp`.

    `cheapest_mesh` compares meshes whose steps take similar time by these lists, and chooses the
    mesh with the smallest list. Lists are compared element by element. So `cheapest_mesh` chooses
    the mesh that splits weights least along `model`; among several such meshes, the mesh that
    splits them least along `expert`; and then the mesh that splits them least along `fsdp`.

    Args:
        cost: The cost of a step on a mesh, which contains the layout of the mesh.
    """
    return [cost.layout.shape.get(axis_name, 1) for axis_name in ("model", "expert", "fsdp")]


def _costs(cost_model: CostModel, devices: Sequence[Any]) -> list[StepCost]:
    """Returns the cost of a step on each mesh that the rows and the widths of the model allow.

    The sizes of the mesh's axes must divide the number of rows of a step, and the widths of the
    model, without remainder.

    Args:
        cost_model: The estimator of the cost of a step on any mesh.
        devices: The devices, ordered by host.

    Raises:
        InputError: If no mesh can divide the rows of a step and the widths of the model.
    """
    model_config = cost_model.model.config
    step_costs: list[StepCost] = []
    for mesh_shape in _shapes(cost_model, len(devices)):
        layout = abstract_layout(mesh_shape, model_config.num_key_value_heads)
        try:
            check_divisibility(
                layout, cost_model.num_rows, cost_model.row_length, model_config.sizes
            )
        except InputError as error:
            model_axis_has_all_devices = mesh_shape.get("model", 1) == len(devices)
            if model_axis_has_all_devices and not step_costs:
                raise InputError(
                    f"--batch_size: the {cost_model.num_rows} rows of all hosts can be split on no "
                    f"mesh: {error}"
                ) from error
            continue
        step_costs.append(cost_model.estimate(layout, devices))
    return step_costs


def _shapes(cost_model: CostModel, num_devices: int) -> Iterator[dict[str, int]]:
    """Yields the shapes of meshes that divide a step's rows and the model's experts evenly.

    In the last shape, the axis `model` contains all devices.

    Args:
        cost_model: The estimator of the cost of a step. Only the number of rows in the step and the
            number of experts in the language model are used.
        num_devices: The number of devices.

    Yields:
        Name of a mesh axis -> its size. Axes of the size 1 are left out, except `data`.
    """
    model_config: ModelConfig = cost_model.model.config
    num_experts = 1 if model_config.experts is None else model_config.experts.count
    for model_axis_size, expert_axis_size, fsdp_axis_size in product(
        _divisors(num_devices), repeat=3
    ):
        data_axis_size, remaining_device_count = divmod(
            num_devices, model_axis_size * expert_axis_size * fsdp_axis_size
        )
        if remaining_device_count or num_experts % expert_axis_size:
            continue
        if cost_model.num_rows % (data_axis_size * fsdp_axis_size * expert_axis_size):
            continue
        axis_sizes = data_axis_size, fsdp_axis_size, expert_axis_size, model_axis_size
        size_by_axis = dict(zip(AXES, axis_sizes, strict=True))
        yield {axis: size for axis, size in size_by_axis.items() if size > 1 or axis == "data"}


def _reason(step_cost: StepCost, device_memory_bytes: float | None) -> str:
    """Returns the reasons for the choice of a mesh in one line.

    Args:
        step_cost: The estimated cost of a step on this mesh.
        device_memory_bytes: The bytes of memory of each device. None if they are unknown.
    """
    mesh_shape = step_cost.layout.shape
    reasons_for_mesh = [_memory_phrase(step_cost, device_memory_bytes)]
    if mesh_shape.keys() == {"data"} and mesh_shape["data"] > 1:
        reasons_for_mesh.append("every device holds all weights and computes its own rows")
    if "fsdp" in mesh_shape:
        are_gathers_hidden = step_cost.weight_gather_seconds <= step_cost.matrix_product_seconds
        gather_verb = "hide behind" if are_gathers_hidden else "outlast"
        reasons_for_mesh.append(f"gathers of weights {gather_verb} products")
    if step_cost.activation_exchange_seconds:
        exchange_percent = 100 * step_cost.activation_exchange_seconds / step_cost.seconds
        exchange_axes_text = " and ".join(
            axis for axis in mesh_shape if axis in ("expert", "model")
        )
        reasons_for_mesh.append(
            f"exchanges along {exchange_axes_text} take {exchange_percent:.0f} %"
        )
    return "; ".join(reasons_for_mesh)


def _memory_phrase(cost: StepCost, device_memory_bytes: float | None) -> str:
    memory_limit_text = (
        "" if device_memory_bytes is None else f" of {device_memory_bytes / 1e9:.3g}"
    )
    return f"about {cost.needed_memory_bytes / 1e9:.2g}{memory_limit_text} GB per device"


def check_divisibility(
    layout: Layout, num_rows: int, length: int, sizes: Mapping[str, int]
) -> None:
    """Checks that the mesh divides the rows, the tokens and the widths of the model evenly.

    Args:
        layout: The layout of the mesh.
        num_rows: The number of rows per step, of all hosts together.
        length: The number of tokens per row.
        sizes: Letter of an axis -> its size (see `ModelConfig.sizes`).

    Raises:
        InputError: If a size is not divisible by the number of devices that share it, or if the
            mesh has the axis `expert` and the model has no experts.
    """
    if "expert" in layout.shape and "E" not in sizes:
        raise InputError("--mesh_axes expert: the model has no experts")
    # For each check, the name of a size in messages, the size, and the axes of the mesh that divide
    # it.
    divisibility_checks = (
        ("--batch_size, rows of all hosts together", num_rows, RULES["batch"]),
        ("--max_seq_length", length, ("query",)),
        ("intermediate_size", sizes.get("F", 0), MODEL_AXES),
        ("moe_intermediate_size", sizes.get("M", 0), MODEL_AXES),
        ("shared_expert_intermediate_size", sizes.get("P", 0), MODEL_AXES),
        ("num_experts", sizes.get("E", 0), ("expert",)),
        ("hidden_size", sizes["D"], ("fsdp",)),
    )
    for size_name, size, mesh_axes in divisibility_checks:
        num_devices = layout.size(*mesh_axes)
        if size % num_devices:
            raise InputError(
                f"{size_name}: {size} does not divide among {num_devices} devices "
                f"({' x '.join(mesh_axes)}); choose another --mesh_shape or size "
                "(--no_data_parallel uses one device)"
            )
