"""The names of machines, the sizes of released models, and what the TPU compiler knows of both."""

from collections import Counter

import pytest

from activation_extraction.common.errors import InputError
from activation_extraction.model.released import released_config
from activation_extraction.run.topologies import MACHINES, topology_of


@pytest.mark.parametrize(
    "name,known_as,hosts,chips,devices",
    [
        ("v5e:8x8", "v5e:8x8", 16, 64, 64),
        ("v5litepod-64", "v5e:8x8", 16, 64, 64),
        ("v5e-64", "v5e:8x8", 16, 64, 64),
        ("v5e-1", "v5e:1x1", 1, 1, 1),
        ("v5e-8", "v5e:2x4", 1, 8, 8),
        ("v6e-64", "v6e:8x8", 16, 64, 64),
        ("v4-32", "v4:2x2x4", 4, 16, 16),  # names of v4 and v5p count cores
        ("v4-64", "v4:2x4x4", 8, 32, 32),
        ("v5p-32", "v5p:2x2x4", 4, 16, 16),
        ("v5p:4x4x12", "v5p:4x4x12", 48, 192, 192),
        ("tpu7x-16", "tpu7x:2x2x2", 2, 8, 16),  # its chips are two devices each
        ("tpu7x:2x2x2", "tpu7x:2x2x2", 2, 8, 16),
        ("h100", "h100-1", 1, 1, 1),
        ("h100-16", "h100-16", 2, 16, 16),
        ("a100-8", "a100-8", 1, 8, 8),
    ],
)
def test_names(name, known_as, hosts, chips, devices):
    found = topology_of(name)
    assert (found.name, found.hosts, found.chips) == (known_as, hosts, chips)
    described = found.described()
    assert len(described) == devices
    assert [*Counter(device.process_index for device in described).values()] == (
        [devices // hosts] * hosts
    )


@pytest.mark.parametrize(
    "name,per_host,hosts",
    [("v5e:8x8", 8, 8), ("v5e:8x8", 16, 4), ("v5e:2x4", 4, 2), ("h100-8", 4, 2), ("h100-12", 6, 2)],
)
def test_chips_of_a_host(name, per_host, hosts):
    assert topology_of(name, per_host).hosts == hosts


@pytest.mark.parametrize(
    "name,words",
    [
        ("v5e", "there are v5e-1 (v5e:1x1), v5e-4 (v5e:2x2)"),
        ("v5e-63", "v5e-16 (v5e:4x4), v5e-32 (v5e:4x8)"),
        ("v4-63", "there are v4-8 (v4:2x2x1), v4-16 (v4:2x2x2)"),
        ("v5e:8x8x8", "there are v5e-1 (v5e:1x1)"),
        ("v4:2x2", "there are v4-8 (v4:2x2x1)"),
        ("v5e:99999x99999", "there are v5e-1"),
        ("tpu7-16", "v6e, tpu7x, a100, h100, h200, such as v5e:8x8, v5litepod-64, v4-32 or h100-8"),
        ("v5e-8x8", "there are machines of v4, v5e"),
        ("h100:2x4", "there are machines of v4, v5e"),
        ("", "there are machines of v4, v5e"),
        ("h100-0", "its chips divide among hosts of no number"),
        ("h100-12", "--chips_per_host 8: its chips divide among hosts of 1, 2, 3, 4, 6, 12"),
        ("v5p:3x3x3", "--chips_per_host 4: its chips divide among hosts of no number"),
    ],
)
def test_wrong_names_list_good_ones(name, words):
    with pytest.raises(InputError) as error:
        topology_of(name)
    assert str(error.value).startswith(f"--plan {name}") and words in str(error.value)


@pytest.mark.parametrize("name,per_host", [("v5e:8x8", 2), ("v5e:2x2", 8), ("v4-32", 8)])
def test_hosts_that_there_are_not(name, per_host):
    with pytest.raises(
        InputError, match=f"--chips_per_host {per_host}: its chips divide among hosts of "
    ):
        topology_of(name, per_host)


@pytest.mark.long
def test_the_compiler_knows_every_machine_alike():
    """Devices, hosts and kinds are those that libtpu gives; the largest machines are left out."""
    pytest.importorskip("libtpu")
    for key, kind in MACHINES.items():
        for shape in kind.shapes.split():
            topology = topology_of(f"{key}:{shape}")
            if topology.chips <= 256:
                real, described = topology.compilable(), topology.described()
                assert [device.process_index for device in real] == (
                    [device.process_index for device in described]
                )
                assert {device.platform for device in real} == {"tpu"}
                assert all(kind.chip in device.device_kind for device in real)


def test_other_models_are_not_known():
    for name in ("Qwen/Qwen2.5-7.5B", "meta/Llama-3-8B", "./Qwen2.5-7B/x", "Qwen/Qwen3-8B-FP8x"):
        assert released_config(name) is None
