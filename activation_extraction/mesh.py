"""Devices -> Mesh, and the one table from logical axes to mesh axes.

Model and step name logical axes only; an axis without a rule, or whose mesh axis is absent, is
not split.
"""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from activation_extraction.errors import InputError

RULES = {"batch": "data"}
BATCH_AXES = ("batch", "sequence")
CAPTURED_AXES = ("hooks", "batch", "sequence", "embed")


def build_mesh(data_parallel: bool, batch_size: int) -> Mesh:
    """All local devices along `data`, or the first device alone.

    Raises InputError when the rows do not divide among the devices.
    """
    devices = jax.local_devices() if data_parallel else jax.local_devices()[:1]
    if batch_size % len(devices):
        raise InputError(
            f"--batch_size {batch_size}: not a multiple of the {len(devices)} local devices "
            "(--no_data_parallel uses one)"
        )
    return Mesh(devices, ("data",))


def sharding(mesh: Mesh, axes: Sequence[str]) -> NamedSharding:
    """How an array with these logical axes lies on the mesh."""
    names = [RULES.get(axis) for axis in axes]
    return NamedSharding(mesh, PartitionSpec(*(n if n in mesh.axis_names else None for n in names)))
