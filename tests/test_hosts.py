"""Several real processes as one run, as on a TPU pod, of which one may differ, fail or not come."""

import json
import re
import shutil
import signal
import socket

import pytest
from command_line import start
from pods import Pod, check_union, first_documents, flags_for

pytestmark = pytest.mark.long


def printed(pod):
    return [pod.text(host) for host in pod.processes]


MESHES = {  # devices of each host, flags, and the mesh
    "fsdp": (
        *(4, ["--mesh_shape", "2,4,2", "--mesh_axes", "data,fsdp,model"]),
        {"data": 2, "fsdp": 4, "model": 2},
    ),
    "3d": (16, ["--mesh_type", "3d"], {"pipeline": 4, "data": 4, "model": 4}),
}


@pytest.mark.parametrize("name", ["fsdp", pytest.param("3d", marks=pytest.mark.rare)])
def test_a_mesh_of_four_hosts(demo_inputs, alone_with_few, tmp_path, name):
    """Few steps: collectives of 64 devices take seconds on a few cores."""
    few, alone = alone_with_few
    devices, mesh, sizes = MESHES[name]
    out = tmp_path / "out"
    flags = flags_for(demo_inputs, out, "--dataset_path", few, "--batch_size", 16, *mesh)
    pod = Pod(tmp_path, 4, devices, *flags)
    assert pod.wait() == [0] * 4, printed(pod)
    check_union(out, alone, {f"machine_000_host_{i:02d}" for i in range(4)})
    metadata = json.loads((out / "machine_000_host_00/metadata.json").read_text())
    assert metadata["mesh"] == sizes


def test_uneven_ends(demo_inputs, texts, tmp_path):
    """Every second row is empty, and so are all of host 1."""
    path, out = texts([{"text": row} for row in ("x" * 9, "") * 3]), tmp_path / "out"
    flags = "--dataset_path", path, "--max_samples", 6, "--max_tokens", 60
    short = (
        "short: the data of host 1 ended after 0 of at most 3 samples (its share of --max_samples) "
        "and 0 of at most 30 tokens (its share of --max_tokens)"
    )
    for _ in range(2):  # also when all has been computed before
        pod = Pod(tmp_path, 2, 2, *flags_for(demo_inputs, out, *flags))
        assert pod.wait() == [0, 0], printed(pod)
        for host, samples in enumerate((3, 0)):
            assert re.findall("^short: .*$", pod.text(host), re.M) == [short]
            metadata = json.loads((out / f"machine_000_host_{host:02d}/metadata.json").read_text())
            assert metadata["samples"] == samples


# Runs the script with one of its parts replaced on one host: (host, what to do).
INJECT = """
import os, signal, sys, time
import extract_activations as script
from activation_extraction.common.errors import RunError, StorageError
from activation_extraction.model.automatic_mesh import StepSizes
from activation_extraction.run import batch_size
from activation_extraction.store.run_record import RunRecord
from activation_extraction.store.storage import ActivationStorage
host, fault = os.environ["FAULT"].split(":")
calls = []

def first(owner, name, action):
    original = getattr(owner, name)
    setattr(owner, name, lambda *args: (action(), original(*args))[1])

def fail(error, at=1):
    calls.append(1)
    if len(calls) >= at:
        raise error

class Silent:
    platform = device_kind = "cpu"
    def memory_stats(self):
        raise RunError("injected")

if host == os.environ["HOST_ID"]:
    if fault == "bug":
        first(ActivationStorage, "add_batch", lambda: fail(ValueError("injected"), at=2))
    if fault == "model axis":
        StepSizes.choose_mesh = lambda *_: ({"data": 2, "model": 2}, "")
    if fault == "memory":
        batch_size.own_devices = lambda devices: [Silent()] * len(devices)
    if fault == "metrics":
        first(RunRecord, "add_metrics", lambda: fail(StorageError("no room for metrics")))
    if fault in ("metrics", "slow to leave"):  # the others have nothing more to do by then
        first(script, "print_summary", lambda: time.sleep(1.5))
        first(script, "how_to_continue", lambda: time.sleep(1.5))
    if fault == "stop":
        first(ActivationStorage, "add_batch", lambda: os.kill(os.getpid(), signal.SIGTERM))
    if fault == "waiting":
        first(script, "compile_step", lambda: (print(fault, flush=True), time.sleep(600)))
status = 1
try:
    status = script.main(sys.argv[1:])
finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
"""


def faulty_pod(folder, flags, fault):
    """Two hosts of two devices, one of them with a fault: `fault` is its number and the fault."""
    path = folder / "inject.py"
    path.write_text(INJECT)
    return Pod(folder, 2, 2, *flags, script=path, FAULT=fault)


FAILED = "host 1 failed: see the message there"
SAME = "; it must be the same on all"
FAULTS_AT_START = {  # flags of host 1, or its fault; the status; what host 1 says, and host 0
    "flags": ("--drop_token_ids 20 21", 2, rf".*_ids: \(\) on 0; \(20, 21\) on 1{SAME}$"),
    "weights": ("--model_path {0}/model", 2, r".* model_digest \(--model_path\): \w{64} on 0; "),
    "data": ("--dataset_path {0}/fewer.parquet", 2, f".*documents.parquet.*; nothing on 1{SAME}"),
    "no data": ("--dataset_path {0}/nothing", 2, ".*nothing: no such file or folder", FAILED),
    # As where devices differ in memory.
    "model axis": ("", 2, '.* mesh: {"data": 4} on 0; {"data": 2, "model": 2} on 1'),
    "memory": ("", 1, "injected", FAILED),  # while the others wait for its numbers
}


@pytest.mark.parametrize("fault", FAULTS_AT_START)
def test_what_differs_or_fails_on_one_host_ends_all(demo_inputs, tmp_path, fault):
    more, status, *told = FAULTS_AT_START[fault]
    model = shutil.copytree(demo_inputs / "model", tmp_path / "model")
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    first_documents(demo_inputs, tmp_path / "fewer.parquet", 200)
    flags = flags_for(demo_inputs, tmp_path / "out", "--batch_size", "auto")
    pod = faulty_pod(tmp_path, [flags, [*flags, *more.format(tmp_path).split()]], f"1:{fault}")
    assert pod.wait() == [status] * 2, printed(pod)
    for host, words in ((1, told[0]), (0, told[-1])):
        last = pod.text(host).splitlines()[-1]
        assert re.match(f"error: {words}", last), last
        assert "Traceback" not in pod.text(host)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("host,fault", [(0, "bug"), (0, "metrics"), (1, "stop")])  # by SIGTERM
def test_a_fault_on_one_host_ends_both_in_order(demo_inputs, texts, tmp_path, host, fault):
    """Nobody hangs or is aborted; what was complete where there was no fault is stored."""
    out = tmp_path / "out"
    path = texts([{"text": "word " * 60}] * 64)  # eight steps
    flags = flags_for(demo_inputs, out, "--dataset_path", path, "--batch_size", 4)
    pod = faulty_pod(tmp_path, flags, f"{host}:{fault}")
    assert pod.wait() == ([143, 143] if fault == "stop" else [1, 1]), printed(pod)
    other = 1 - host
    assert not any("Terminating process" in text for text in printed(pod))
    found = [json.loads(path.read_text()) for path in sorted(out.glob("*/metadata.json"))]
    samples = [each["samples"] for each in found]
    if fault == "metrics":  # the other host had stored all of its data: it has done its part
        assert (found[other]["status"], samples[other]) == ("complete", 32)
        return
    assert found[other]["status"] == "interrupted" and 8 <= samples[other] < 32
    if fault == "stop":
        assert samples[0] == samples[1]  # both at the same step
    else:
        assert "another host failed" in pod.text(other)


def test_nobody_is_aborted_by_host_0_if_it_leaves_first(demo_inputs, tmp_path):
    """Host 1 needs longer between its last shard and its end."""
    flags = flags_for(demo_inputs, tmp_path / "out", "--max_samples", 6)
    pod = faulty_pod(tmp_path, flags, "1:slow to leave")
    assert pod.wait() == [0, 0], printed(pod)
    assert not any("Terminating process" in text for text in printed(pod))


def test_sigterm_before_the_first_step_ends_the_process(demo_inputs, tmp_path):
    """JAX's own handler would swallow it."""
    flags = flags_for(demo_inputs, tmp_path / "out", "--heartbeat_timeout", 10)
    pod = faulty_pod(tmp_path, flags, "1:waiting")
    pod.wait_until(lambda: "waiting" in pod.text(1))
    pod.processes[1].send_signal(signal.SIGTERM)
    assert pod.processes[1].wait(600) == -signal.SIGTERM
    assert pod.wait()[0] != 0


def test_hosts_with_other_numbers_of_devices_are_named(demo_inputs, tmp_path):
    """JAX cannot gather anything from them, so this is compared before all else."""
    flags = flags_for(demo_inputs, tmp_path / "out")
    of_each = [{"JAX_NUM_CPU_DEVICES": "2"}, {"JAX_NUM_CPU_DEVICES": "3"}]
    pod = Pod(tmp_path, 2, 2, *flags, of_each=of_each)
    assert pod.wait() == [2, 2], printed(pod)
    told = "hosts have different numbers of devices: 2 on host 0, 3 on host 1; expected the same"
    for text in printed(pod):
        assert f"error: {told}" in text and "Traceback" not in text


def test_a_port_that_is_taken_is_named_by_host_0(demo_inputs, tmp_path):
    """JAX would end the process with SIGSEGV or SIGABRT."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        pod = ["--multihost", "--coordinator_address", address, "--num_hosts", 2, "--host_id", 0]
        process = start(*flags_for(demo_inputs, tmp_path / "out"), *pod)
        out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (1, ""), err
    assert f"error: --coordinator_address {address}: host 0 cannot listen at port" in err
    assert "Address already in use; end the process that uses it" in err


def test_a_stuck_host_is_ended_by_the_watchdog(demo_inputs, texts, tmp_path):
    out, path = tmp_path / "out", texts([{"text": f"row {n} " * 30} for n in range(20_000)])
    flags = flags_for(demo_inputs, out, "--dataset_path", path, "--shard_size_gb", 3e-4)
    pod = Pod(tmp_path, 2, 2, *flags, "--batch_size", 4, "--stall_timeout", 5)
    pod.wait_until((out / "machine_000_host_01/shard_0002.json").exists)
    pod.processes[1].send_signal(signal.SIGSTOP)
    assert pod.processes[0].wait(600) == 1
    assert "no step has finished for 5 s" in pod.text(0) and "Current thread" in pod.text(0)
    pod.processes[1].kill()


def test_a_host_that_others_do_not_join_gives_up(demo_inputs, tmp_path):
    flags = flags_for(demo_inputs, tmp_path / "out", "--connect_timeout", 5)
    pod = Pod(tmp_path, 3, 2, *flags, only=[1])
    assert pod.wait() == [1], printed(pod)
    expected = f"not all hosts connected to {pod.address} within 5 s (--connect_timeout); check"
    assert expected in pod.text(1) and "stack trace" not in pod.text(1)
