"""Several real processes as one run, as on a TPU pod, of which one may differ, fail or not come."""

import json
import re
import shutil
import signal
import socket

import pytest
from command_line import SCRIPT, main
from conftest import rare_but
from extractions import flip
from pods import Pod, check_union, first_documents, flags_for

pytestmark = pytest.mark.long


def printed(pod):
    return [pod.text(host) for host in pod.processes]


def test_a_mesh_of_four_hosts(demo_inputs, alone_with_few, tmp_path):
    few, alone = alone_with_few
    out, mesh = tmp_path / "out", ["--mesh_shape", "2,4,2", "--mesh_axes", "data,fsdp,model"]
    flags = flags_for(demo_inputs, out, "--dataset_path", few, "--batch_size", 16, *mesh)
    pod = Pod(tmp_path, 4, 4, *flags)
    assert pod.wait() == [0] * 4, printed(pod)
    check_union(out, alone, {f"machine_000_host_{i:02d}" for i in range(4)})
    metadata = json.loads((out / "machine_000_host_00/metadata.json").read_text())
    assert metadata["mesh"] == {"data": 2, "fsdp": 4, "model": 2}


# Runs the script, which needs longer on host 1 between its last shard and its end.
SLOW_TO_LEAVE = """
import os, time
import extract_activations
from activation_extraction.__main__ import script
print_summary = extract_activations.print_summary

def print_late(*given):
    time.sleep(1.5 * (os.environ["HOST_ID"] == "1"))
    print_summary(*given)

extract_activations.print_summary = print_late
script()
"""


def test_uneven_ends(demo_inputs, texts, tmp_path):
    """Every second row is empty, and so are all of host 1, which JAX would abort if host 0 left
    before it."""
    path, out = texts([{"text": row} for row in ("x" * 9, "") * 3]), tmp_path / "out"
    script = tmp_path / "slow_to_leave.py"
    script.write_text(SLOW_TO_LEAVE)
    flags = "--dataset_path", path, "--max_samples", 6, "--max_tokens", 60
    short = (
        "short: the data of host 1 ended after 0 of at most 3 samples (its share of --max_samples) "
        "and 0 of at most 30 tokens (its share of --max_tokens)"
    )
    pod = Pod(tmp_path, 2, 2, *flags_for(demo_inputs, out, *flags), script=script)
    assert pod.wait() == [0, 0], printed(pod)
    for host, samples in enumerate((3, 0)):
        assert "Terminating process" not in pod.text(host)
        assert re.findall("^short: .*$", pod.text(host), re.M) == [short]
        metadata = json.loads((out / f"machine_000_host_{host:02d}/metadata.json").read_text())
        assert metadata["samples"] == samples


FAILED = "host 1 failed: see the message there"
SAME = "; it must be the same on all"
FAULTS_AT_START = {  # flags of host 1, what it says, and what host 0 says
    "flags": ("--drop_token_ids 20 21", rf".*_ids: \(\) on 0; \(20, 21\) on 1{SAME}$"),
    "weights": ("--model_path {0}/model", r".* model_digest \(--model_path\): \w{64} on 0; "),
    "data": ("--dataset_path {0}/fewer.parquet", f".*documents.parquet.*; nothing on 1{SAME}"),
    "no data": ("--dataset_path {0}/nothing", ".*nothing: no such file or folder", FAILED),
}


@pytest.mark.parametrize("fault", rare_but(["weights", "data"], FAULTS_AT_START))
def test_what_differs_or_fails_on_one_host_ends_all(demo_inputs, tmp_path, fault):
    more, *told = FAULTS_AT_START[fault]
    model = shutil.copytree(demo_inputs / "model", tmp_path / "model")
    flip(model / "model.safetensors", -1)
    first_documents(demo_inputs, tmp_path / "fewer.parquet", 200)
    flags = flags_for(demo_inputs, tmp_path / "out")
    pod = Pod(tmp_path, 2, 2, flags, [*flags, *more.format(tmp_path).split()])
    assert pod.wait() == [2, 2], printed(pod)
    for host, words in ((1, told[0]), (0, told[-1])):
        last = pod.text(host).splitlines()[-1]
        assert re.match(f"error: {words}", last), last
        assert "Traceback" not in pod.text(host)
    assert not (tmp_path / "out").exists()


# Runs the script, whose second batch cannot be stored on host 0.
WITH_A_BUG = """
import os
from activation_extraction.__main__ import script
from activation_extraction.store.storage import ActivationStorage
add_batch, added = ActivationStorage.add_batch, []

def fail_later(*given):
    if added and os.environ["HOST_ID"] == "0":
        raise ValueError("injected")
    added.append(given)
    add_batch(*given)

ActivationStorage.add_batch = fail_later
script()
"""


@pytest.mark.parametrize("fault", ["bug", "bad row", "sigterm"])
def test_a_fault_on_one_host_ends_both_in_order(demo_inputs, texts, tmp_path, fault):
    """Nobody hangs or is aborted; what was complete where there was no fault is stored. A bad row
    would end the run again, so both hosts have the status that no scheduler retries."""
    out, with_a_bug = tmp_path / "out", tmp_path / "with_a_bug.py"
    with_a_bug.write_text(WITH_A_BUG)
    rows = [{"text": f"row {n} " * 30} for n in range(20_000)]
    if fault == "bad row":
        rows = [*rows[:41], {"text": 5}, *rows[:50]]  # the 21st row of host 1
    path = texts(rows)
    flags = flags_for(demo_inputs, out, "--dataset_path", path, "--batch_size", 4)
    flags += ["--shard_size_gb", 3e-4]
    pod = Pod(tmp_path, 2, 2, *flags, script=with_a_bug if fault == "bug" else SCRIPT)
    if fault == "sigterm":
        pod.wait_until((out / "machine_000_host_01/shard_0002.json").exists)
        pod.processes[1].send_signal(signal.SIGTERM)
    status = {"bug": 1, "bad row": 2, "sigterm": 143}[fault]
    assert pod.wait() == [status, status], printed(pod)
    assert not any("Terminating process" in text for text in printed(pod))
    found = [json.loads(path.read_text()) for path in sorted(out.glob("*/metadata.json"))]
    first, second = (each["samples"] for each in found)
    assert found[1]["status"] == "interrupted" and 8 <= second < 10_000
    if fault == "bad row":
        assert second == 20 and f"{path} line 42: " in pod.text(1)
        assert "another host failed" in pod.text(0)
    if fault == "bug":
        assert first < second and "another host failed" in pod.text(1)
    else:
        assert first == second  # both at the same step


def test_a_port_that_is_taken_is_named_by_host_0(inputs, tmp_path, capsys):
    """JAX would end the process with SIGSEGV or SIGABRT."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        pod = ["--multihost", "--coordinator_address", address, "--num_hosts", 2, "--host_id", 0]
        assert main(*inputs, "--output_dir", tmp_path / "out", *pod) == 1
    told = f"error: --coordinator_address {address}: host 0 cannot listen at port"
    assert told in capsys.readouterr().err


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
