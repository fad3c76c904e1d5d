"""How many rows a step has: the default, and what auto finds that the devices have memory for."""

import json
from types import SimpleNamespace

import jax
import pytest
from command_line import main, records_of
from pods import Pod, check_union, flags_for

from activation_extraction.cli.config import parse_args
from activation_extraction.model.forward import bytes_of_step, prepare_model
from activation_extraction.run import batch_size
from activation_extraction.run.prepare import model_request
from qwen2_jax_with_hooks import FAMILIES

# Runs the tool on a host whose devices report the memory that MEMORY says.
WITH_MEMORY = """
import os, sys
from types import SimpleNamespace
from activation_extraction.run import batch_size
import extract_activations

own_devices = batch_size._own_devices

def with_memory(every, planned=None):
    stats = {"bytes_limit": int(os.environ["MEMORY"])}
    kind = {"device_kind": "a chip", "memory_stats": lambda: stats}
    return [SimpleNamespace(platform=device.platform, **kind) for device in own_devices(every)]

batch_size._own_devices = with_memory
sys.exit(extract_activations.main(sys.argv[1:]))
"""


@pytest.fixture
def devices(monkeypatch):
    """Sets how many devices this host has, of which platform, and the memory that they report."""

    def fake(count, platform="cpu", memory=None):
        stats = None if memory is None else {"bytes_limit": int(memory)}
        device = SimpleNamespace(
            platform=platform, device_kind=f"a {platform}", memory_stats=lambda: stats
        )
        monkeypatch.setattr(
            batch_size, "_own_devices", lambda every, planned=None: [device] * count
        )

    return fake


@pytest.fixture
def flags(demo_inputs, tmp_path):
    return flags_for(demo_inputs, tmp_path / "out", "--batch_size", "auto")


def bytes_for(flags, rows):
    """What the compiler plans for a step."""
    config = parse_args([str(flag) for flag in (*flags, "--batch_size", rows)])
    return bytes_of_step(prepare_model(FAMILIES, model_request(config)))


def recorded(folder):
    """The rows of the last step, and what auto has recorded."""
    metadata = json.loads((folder / "metadata.json").read_text())
    return metadata["configuration"]["batch_size"], metadata["auto_batch_size"]


@pytest.mark.parametrize(
    "count,length,rows",
    [
        *((1, 2048, 1), (1, 4096, 1), (1, 1024, 2), (1, 600, 3), (1, 256, 8), (1, 16, 8)),
        *((8, 2048, 8), (8, 16, 8), (3, 2048, 3), (3, 512, 6), (3, 16, 9)),
    ],
)
def test_a_step_on_a_cpu_has_few_tokens_and_some_for_every_device(devices, count, length, rows):
    devices(count)
    assert batch_size.default_rows(length, every_device=True) == rows


def test_a_step_on_accelerators_has_8_rows(devices):
    for count in (1, 3, 8):
        devices(count, "tpu")
        assert batch_size.default_rows(4096, every_device=True) == 8
        # What auto begins with divides on every mesh.
        assert batch_size.default_rows(4096, True, auto=True) % count == 0


@pytest.mark.long
def test_auto_takes_the_largest_step_that_fits_and_keeps_it(flags, tmp_path, devices, capsys):
    out = tmp_path / "out"
    enough = [bytes_for(flags, rows) for rows in (8, 16, 32, 64)]
    assert enough == sorted(enough) and enough[-1] - enough[0] > 1e5

    def run(*more):
        assert main(*flags, *more) == 0
        said = capsys.readouterr().err.splitlines()
        return [line for line in said if "--batch_size auto" in line]

    devices(8, "tpu", enough[2] / 0.9 + 1)
    (line,) = run("--max_samples", 3)
    assert "32 rows per host and step: 64 would take" in line
    chosen = {"rows": 32, "device": "a tpu", "devices": 8, "mesh": {"data": 8}}
    assert recorded(out) == (32, chosen)

    devices(8, "tpu", 1e12)  # more memory of the same kind: as the run began
    (line,) = run("--max_samples", 6)
    assert "32 rows per host and step: as when the run began" in line
    assert recorded(out) == (32, chosen)

    devices(8, "gpu", enough[1] / 0.9 + 1)  # another kind
    (line,) = run("--max_samples", 9)
    assert "16 rows per host and step: 32 would take" in line
    assert recorded(out) == (16, chosen | {"rows": 16, "device": "a gpu"})

    devices(8, "gpu", bytes_for([*flags, "--mesh_shape", "2,4"], 8) / 0.9 + 1)  # another mesh
    (line,) = run("--max_samples", 10, "--mesh_shape", "2,4")
    assert "8 rows per host and step: 16 would take" in line

    devices(8, "gpu", 1e12)
    assert run("--max_samples", 12, "--batch_size", 64) == []
    assert json.loads((out / "metadata.json").read_text())["configuration"]["batch_size"] == 64
    every = records_of(out)
    assert [record["sample_idx"] for record in every[1]] == [*range(12)]


@pytest.mark.long
def test_auto_stops_at_the_most_rows_at_the_hosts_memory_and_at_the_compiler(
    flags, tmp_path, devices, capsys, monkeypatch
):
    def chosen(memory):
        devices(8, "tpu", memory)
        assert main(*flags, "--max_samples", 1, "--overwrite") == 0
        rows, _ = recorded(tmp_path / "out")
        return rows, capsys.readouterr().err

    monkeypatch.setattr(batch_size, "MOST_ROWS", 40)
    rows, said = chosen(1e12)
    assert rows == 32 and "32 rows per host and step: the most that are tried" in said

    rows, said = chosen(1)
    assert rows == 8 and "8 rows per host and step: 8 would take" in said

    step = 64 * 8 * 2 * 128 * 4  # bytes of the activations of 8 rows, of two hooks
    monkeypatch.setattr(batch_size, "available_memory", lambda: 4 * 2 * step)
    rows, said = chosen(1e12)
    assert rows == 16 and "4 steps of 32 would take" in said and "GB of each host" in said
    monkeypatch.undo()

    def compile_up_to_8(forward):
        if forward.shape[0] > 8:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 17.1G of 15.7G hbm")
        return bytes_of_step(forward)

    monkeypatch.setattr(batch_size, "bytes_of_step", compile_up_to_8)
    rows, said = chosen(1e12)
    assert rows == 8 and "16 do not fit, says the compiler: RESOURCE_EXHAUSTED: 17.1G" in said


def test_another_error_of_the_compiler_is_told(flags, devices, monkeypatch, capsys):
    def broken(forward):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    devices(8, "tpu", 1e12)
    monkeypatch.setattr(batch_size, "bytes_of_step", broken)
    assert main(*flags) == 1
    assert "error: the device failed: INTERNAL: something else" in capsys.readouterr().err


def test_auto_is_the_default_where_devices_do_not_report_their_memory(flags, tmp_path, capsys):
    assert main(*flags, "--max_samples", 2) == 0
    assert recorded(tmp_path / "out") == (8, None)
    assert "--batch_size auto: 8 rows, the default on cpu" in capsys.readouterr().err


@pytest.mark.long
def test_hosts_agree_on_the_rows_that_fit_on_all_of_them(
    demo_inputs, alone_with_few, tmp_path, monkeypatch
):
    """They share the smaller number; the devices of one report less memory."""
    few, alone = alone_with_few
    script, out = tmp_path / "with_memory.py", tmp_path / "out"
    script.write_text(WITH_MEMORY)
    flags = flags_for(demo_inputs, out, "--dataset_path", few, "--batch_size", "auto")
    memory = [{"MEMORY": str(int(1e12))}, {"MEMORY": str(int(3e7))}]
    pod = Pod(tmp_path, 2, 2, *flags, script=script, of_each=memory)
    assert pod.wait() == [0, 0], [pod.text(i) for i in range(2)]
    check_union(out, alone, {f"machine_000_host_{i:02d}" for i in range(2)})
    found = [recorded(out / f"machine_000_host_{i:02d}") for i in range(2)]
    assert found[0] == found[1]
    assert 2 <= found[0][0] < batch_size.MOST_ROWS
