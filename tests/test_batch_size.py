"""How many rows a step has: the default, and what auto finds that the devices have memory for."""

import json
from types import SimpleNamespace

import jax
import pytest
from command_line import main, records_of
from pods import Pod, check_union, flags_for

from activation_extraction.cli.config import parse_args
from activation_extraction.model.forward import bytes_of_step
from activation_extraction.model.model_setup import prepare_model
from activation_extraction.run import batch_size
from activation_extraction.run.prepare import step_request

# Runs the tool on a host whose devices report the memory that MEMORY says.
WITH_MEMORY = """
import os, sys
from types import SimpleNamespace
from activation_extraction.run import batch_size
from activation_extraction.__main__ import main

of_host, stats = batch_size.devices_of_this_host, {"bytes_limit": int(os.environ["MEMORY"])}
kind = {"platform": "cpu", "device_kind": "a chip", "memory_stats": lambda: stats}
batch_size.devices_of_this_host = lambda devices: [SimpleNamespace(**kind)] * len(of_host(devices))
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def devices(monkeypatch):
    """Sets how many devices this host has, of which platform, and the memory that they report."""

    def fake(count, platform="cpu", memory=None):
        stats = None if memory is None else {"bytes_limit": int(memory)}
        kind = {"platform": platform, "device_kind": f"a {platform}", "memory_stats": lambda: stats}
        found = [SimpleNamespace(**kind)] * count
        monkeypatch.setattr(batch_size, "devices_of_this_host", lambda devices: found)

    return fake


@pytest.fixture
def flags(demo_inputs, tmp_path):
    return flags_for(demo_inputs, tmp_path / "out", "--batch_size", "auto")


@pytest.fixture
def chosen(flags, tmp_path, devices, capsys):
    """Returns a function that runs with so much memory; it returns the rows and what is logged."""

    def run(memory, *more, platform="tpu"):
        devices(8, platform, memory)
        assert main(*flags, *more) == 0
        return recorded(tmp_path / "out")[0], capsys.readouterr().err

    return run


def bytes_for(flags, rows):
    """What the compiler plans for a step."""
    config = parse_args([str(flag) for flag in (*flags, "--batch_size", rows)])
    return bytes_of_step(prepare_model(step_request(config)))


def recorded(folder):
    """The rows of the last step, and what auto has recorded."""
    metadata = json.loads((folder / "metadata.json").read_text())
    return metadata["configuration"]["batch_size"], metadata["auto_batch_size"]


@pytest.mark.parametrize(
    "count,length,rows",
    [(1, 4096, 1), (1, 600, 3), (1, 16, 8), (8, 2048, 8), (3, 512, 6), (3, 16, 9)],
)
def test_a_step_on_a_cpu_has_few_tokens_and_some_for_every_device(devices, count, length, rows):
    devices(count)
    assert batch_size.default_rows(length, every_device=True) == rows
    devices(count, "tpu")
    assert batch_size.default_rows(length, every_device=True) == 8
    # What auto begins with divides on every mesh.
    assert batch_size.default_rows(length, True, auto=True) % count == 0


@pytest.mark.long
def test_auto_takes_the_largest_step_that_fits_and_keeps_it(flags, tmp_path, chosen):
    mesh = ["--mesh_shape", "2,4"]
    _, of_16, of_32, of_64 = (bytes_for(flags, rows) for rows in (8, 16, 32, 64))
    assert of_16 < of_32 < of_64
    for memory, platform, more, rows, says in (
        (of_32 / 0.9 + 1, "tpu", [], 32, "64 would take"),
        (1e12, "tpu", [], 32, "as when the run began"),  # more memory of the same kind
        (of_16 / 0.9 + 1, "gpu", [], 16, "32 would take"),  # another kind
        (bytes_for([*flags, *mesh], 8) / 0.9 + 1, "gpu", mesh, 8, "16 would take"),  # and mesh
    ):
        stored = len(records_of(tmp_path / "out").get(1, []))
        found, said = chosen(memory, "--max_samples", stored + 3, *more, platform=platform)
        assert found == rows and f"{rows} rows per host and step: {says}" in said
    assert main(*flags, "--max_samples", 14, "--batch_size", 64) == 0
    every = records_of(tmp_path / "out")
    assert [record["sample_idx"] for record in every[1]] == [*range(14)]


@pytest.mark.long
def test_auto_stops_at_the_hosts_memory_and_at_the_compiler(flags, chosen, capsys, monkeypatch):
    anew = "--max_samples", 1, "--overwrite"
    four_steps = 4 * 2 * 64 * 8 * 2 * 128 * 4  # bytes of two hooks' activations of 16 rows
    with monkeypatch.context() as patch:
        patch.setattr(batch_size, "available_memory", lambda: four_steps)
        rows, said = chosen(1e12, *anew)
    assert rows == 16 and "16 rows per host and step: 4 steps of 32 would take" in said

    message = "RESOURCE_EXHAUSTED: 17.1G of 15.7G hbm"

    def compile_up_to_8(forward):
        if forward.batch_shape[0] > 8:
            raise jax.errors.JaxRuntimeError(message)
        return bytes_of_step(forward)

    monkeypatch.setattr(batch_size, "bytes_of_step", compile_up_to_8)
    rows, said = chosen(1e12, *anew)
    assert rows == 8 and "16 do not fit, says the compiler: RESOURCE_EXHAUSTED: 17.1G" in said
    message = "INTERNAL: something else"
    assert main(*flags, *anew) == 1
    assert "error: the device failed: INTERNAL: something else" in capsys.readouterr().err


@pytest.mark.long
def test_hosts_agree_on_the_rows(flags, chosen, monkeypatch):
    """All must compile the same program. The devices of another host report less memory; then it
    has a record, which this one lacks, as it was killed before it had written its own."""
    less = bytes_for(flags, 16) / 0.9 + 1
    monkeypatch.setattr(batch_size, "gather", lambda _, own: [own, less if own == 1e12 else own])
    rows, said = chosen(1e12, "--max_samples", 1)
    assert rows == 16 and "16 rows per host and step: 32 would take" in said
    monkeypatch.setattr(batch_size, "gather", lambda _, own: [own, 8 if own is None else own])
    rows, said = chosen(1e12, "--max_samples", 1, "--overwrite")
    assert rows == 8 and "8 rows per host and step: as when the run began" in said


@pytest.mark.rare
def test_hosts_agree_on_the_rows_that_fit_on_all_of_them(demo_inputs, alone_with_few, tmp_path):
    """They take the smaller number; the devices of one report less memory."""
    few, alone = alone_with_few
    script, out = tmp_path / "with_memory.py", tmp_path / "out"
    script.write_text(WITH_MEMORY)
    flags = flags_for(demo_inputs, out, "--dataset_path", few, "--batch_size", "auto")
    memory = [{"MEMORY": str(int(1e12))}, {"MEMORY": str(int(3e7))}]
    pod = Pod(tmp_path, 2, 2, *flags, script=script, of_each=memory)
    assert pod.wait() == [0, 0], [pod.text(i) for i in range(2)]
    folders = [f"machine_000_host_{host:02d}" for host in range(2)]
    check_union(out, alone, {*folders})
    first, second = (recorded(out / folder) for folder in folders)
    assert first == second and 2 <= first[0] < batch_size.MOST_ROWS
