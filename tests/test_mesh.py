"""Meshes: the shapes that flags choose, and what cannot be split; test_model.py has the numbers."""

from types import SimpleNamespace

import pytest
from tiny_models import SHARED

from activation_extraction.common.errors import InputError
from activation_extraction.model.mesh import (
    build_layout,
    check_divisibility,
    choose_shape,
    host_rows,
    usable_devices,
)
from qwen2_jax_with_hooks import FAMILIES

PIPELINE_FSDP = ("pipeline", "fsdp", "model")


@pytest.mark.parametrize(
    "kind,shape,axes,devices,hosts,expected",
    [
        ("2d", None, None, 1, 1, {"data": 1, "model": 1}),
        ("2d", None, None, 4, 1, {"data": 1, "model": 4}),
        ("2d", None, None, 8, 1, {"data": 2, "model": 4}),
        ("2d", None, None, 64, 16, {"data": 16, "model": 4}),
        ("1d", None, None, 64, 4, {"model": 64}),
        ("3d", None, None, 64, 4, {"pipeline": 4, "data": 4, "model": 4}),
        ("3d", None, ("data", "fsdp", "model"), 64, 4, {"data": 4, "fsdp": 4, "model": 4}),
        ("3d", None, PIPELINE_FSDP, 128, 8, {"pipeline": 4, "fsdp": 8, "model": 4}),
        (None, (2, 2, 2), ("data", "model", "fsdp"), 8, 1, {"data": 2, "model": 2, "fsdp": 2}),
        ("3d", (2, 2, 2), None, 8, 1, {"pipeline": 2, "data": 2, "model": 2}),
        (None, (8,), None, 8, 1, {"model": 8}),
    ],
)
def test_shapes_that_are_chosen(kind, shape, axes, devices, hosts, expected):
    chosen, why = choose_shape(kind, shape, axes, devices, hosts, automatic=dict)
    assert chosen == expected and list(chosen) == list(expected) and not why


def test_3d_on_few_devices_falls_back_and_a_shape_that_does_not_fit_is_refused():
    chosen, why = choose_shape("3d", None, None, 8, 1, dict)
    assert chosen == {"data": 2, "model": 4}
    assert "64 or more" in why and "8 devices become a 2d" in why
    with pytest.raises(InputError, match="is 12 devices, there are 8.*2,4; 4,2; 1,8; 8,1"):
        choose_shape(None, (3, 4), None, 8, 1, dict)


MOE = FAMILIES.config(SHARED | dict(num_hidden_layers=4, decoder_sparse_step=2)).sizes
DENSE = FAMILIES.config({"model_type": "qwen3", "intermediate_size": 128}).sizes


@pytest.mark.parametrize(
    "shape,rows,length,sizes,said",
    [
        ({"data": 8}, 16, 64, DENSE, None),
        ({"data": 2, "expert": 2, "model": 2}, 8, 64, MOE, None),
        ({"model": 8}, 8, 64, MOE, None),  # which has 6 experts
        ({"data": 4, "fsdp": 2}, 12, 64, DENSE, "--batch_size.* 12 does not divide among 8"),
        ({"model": 8}, 8, 66, DENSE, "--max_seq_length: 66 does not divide among 4"),
        ({"model": 8}, 8, 64, DENSE | {"F": 100}, "intermediate_size: 100 does not divide among 8"),
        ({"fsdp": 8}, 8, 64, DENSE | {"D": 100}, "hidden_size: 100 does not divide among 8"),
        ({"expert": 4, "model": 2}, 8, 64, MOE, "num_experts: 6 does .* among 4 devices .expert"),
        ({"model": 8}, 8, 64, MOE | {"M": 20}, "moe_intermediate_size: 20 does not divide among 8"),
        ({"expert": 2, "model": 4}, 8, 64, DENSE, "--mesh_axes expert: the model has no experts"),
    ],
)
def test_what_does_not_divide_is_refused(shape, rows, length, sizes, said):
    layout = build_layout(usable_devices(every=True), shape, kv_heads=2)
    if said is None:
        return check_divisibility(layout, rows, length, sizes)
    with pytest.raises(InputError, match=said):
        check_divisibility(layout, rows, length, sizes)


def test_devices_of_several_hosts():
    """Rows of a host go to consecutive devices; a TPU may number neighbours across hosts."""
    found = [SimpleNamespace(process_index=host, id=n) for n, host in enumerate((1, 0, 1, 0))]
    assert [each.id for each in usable_devices(True, found)] == [1, 3, 0, 2]
    assert [each.id for each in usable_devices(False, found)] == [1, 0]
    with pytest.raises(InputError, match="different numbers of devices"):
        host_rows(found[:3])
