"""What happens when one of several hosts differs, fails, is killed or does not come."""

import json
import re
import shutil
import signal
import socket
from collections import Counter

import pytest
from chat_templates import QWEN2_5
from command_line import start
from conftest import rare_but
from pods import Pod, first_documents, flags_for

from activation_extraction import ActivationDataset

pytestmark = pytest.mark.long

FAILED = "host 1 failed: see the message there"
SAME = "; it must be the same on all"
FAULTS_AT_START = {  # flags of host 1, or its fault; the status; what host 1 says, and host 0
    "flags": (
        "--drop_token_ids 20 21",
        2,
        rf".* --drop_token_ids: \(\) on 0; \(20, 21\) on 1{SAME}$",
    ),
    "weights": (
        "--model_path {0}/model",
        2,
        r".* model_digest \(--model_path\): \w{64} on 0; \w{64} ",
    ),
    "data": ("--dataset_path {0}/fewer.parquet", 2, f".*documents.parquet.*; nothing on 1{SAME}"),
    # As where devices differ in memory, or where a kernel fails its trial on one host.
    "model axis": ("", 2, '.* mesh: {"data": 4} on 0; {"data": 2, "model": 2} on 1'),
    "attention": ("", 2, ".* attention: .* on 0; other on 1"),
    "no data": ("--dataset_path {0}/nothing", 2, ".*nothing: no such file or folder", FAILED),
    "full disk": ("--min_free_gb 99999", 2, ".*GB free, --min_free_gb asks for 99999", FAILED),
    # Also while it compares, and while the others wait for its numbers.
    "versions": ("", 1, "injected", FAILED),
    "memory": ("", 1, "injected", FAILED),
}


OFTEN = "flags", "weights", "data", "no data", "memory"


@pytest.mark.parametrize("fault", rare_but(OFTEN, FAULTS_AT_START))
def test_what_differs_or_fails_on_one_host_ends_all(demo_inputs, tmp_path, fault):
    more, status, *told = FAULTS_AT_START[fault]
    model = shutil.copytree(demo_inputs / "model", tmp_path / "model")
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    first_documents(demo_inputs, tmp_path / "fewer.parquet", 200)
    flags = flags_for(demo_inputs, tmp_path / "out", "--batch_size", "auto")
    pod = faulty_pod(tmp_path, [flags, [*flags, *more.format(tmp_path).split()]], f"1:{fault}")
    assert pod.wait() == [status] * 2, [pod.text(host) for host in range(2)]
    for host, words in ((1, told[0]), (0, told[-1])):
        last = pod.text(host).splitlines()[-1]
        assert re.match(f"error: {words}", last), last
        assert "Traceback" not in pod.text(host)
    assert not (tmp_path / "out").exists()


def test_hosts_with_other_numbers_of_devices_are_named(demo_inputs, tmp_path):
    """JAX cannot gather anything from them, so this is compared before all else."""
    flags = flags_for(demo_inputs, tmp_path / "out")
    of_each = [{"JAX_NUM_CPU_DEVICES": "2"}, {"JAX_NUM_CPU_DEVICES": "3"}]
    pod = Pod(tmp_path, 2, 2, *flags, of_each=of_each)
    assert pod.wait() == [2, 2], [pod.text(host) for host in range(2)]
    told = "hosts have different numbers of devices: 2 on host 0, 3 on host 1; expected the same"
    for host in range(2):
        assert f"error: {told}" in pod.text(host) and "Traceback" not in pod.text(host)


def test_a_host_without_devices_says_so(demo_inputs, tmp_path):
    flags = flags_for(demo_inputs, tmp_path / "out")
    pod = Pod(tmp_path, 2, 2, *flags, of_each=[{}, {"JAX_PLATFORMS": "cuda"}])
    assert pod.processes[1].wait(600) == 2, pod.text(1)
    assert "error: JAX finds no devices (JAX_PLATFORMS, drivers)" in pod.text(1)
    assert "Traceback" not in pod.text(1)
    pod.processes[0].kill()


def test_hosts_may_have_the_same_files_at_other_paths(demo_inputs, tmp_path):
    """Those of --mix and --chat_template, too; all hosts call the sources as host 0 does."""
    turns = ([{"role": "user", "content": f"question {n} " * (n % 7 + 1)}] for n in range(20))
    lines = [json.dumps({"messages": each}) + "\n" for each in turns]
    flags = []
    for host in range(2):
        folder = tmp_path / f"disk_{host}"
        folder.mkdir()
        (folder / "rows.jsonl").write_text("".join(lines[:10]))
        (folder / "more.jsonl").write_text("".join(lines[10:]))
        (folder / "template.jinja").write_text(QWEN2_5)
        data = ["--mix", f"{folder}/rows.jsonl=0.75", f"{folder}/more.jsonl=0.25"]
        data += ["--messages_column", "messages", "--chat_template", folder / "template.jinja"]
        given = flags_for(demo_inputs, tmp_path / "out", *data)
        at = given.index("--dataset_path")
        flags.append(given[:at] + given[at + 2 :])
    for _ in range(2):  # a run that continues calls them so, too
        pod = Pod(tmp_path, 2, 2, *flags)
        assert pod.wait() == [0, 0], [pod.text(host) for host in range(2)]
    sources = [sample.row["source"] for sample in ActivationDataset(tmp_path / "out")]
    expected = {f"{tmp_path}/disk_0/{name}.jsonl": 10 for name in ("rows", "more")}
    assert Counter(sources) == expected
    other = [str(flag).replace("=0.25", "=0.5") for flag in flags[1]]
    pod = Pod(tmp_path, 2, 2, flags[0], other)
    assert pod.wait() == [2, 2] and "error: hosts differ in --mix: " in pod.text(0)
    with open(tmp_path / "disk_1/template.jinja", "a") as template:
        template.write("the end")
    pod = Pod(tmp_path, 2, 2, *([*each, "--overwrite"] for each in flags))
    assert pod.wait() == [2, 2]
    assert "error: hosts differ in chat_template (--chat_template): " in pod.text(0)


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
    pod.wait_for(out / "machine_000_host_01/shard_0002.json")
    pod.processes[1].send_signal(signal.SIGSTOP)
    assert pod.processes[0].wait(600) == 1
    assert "no step has finished for 5 s" in pod.text(0) and "Current thread" in pod.text(0)
    pod.processes[1].kill()


@pytest.mark.parametrize("present", rare_but([[1]], [[1], [0, 2]]))
def test_hosts_that_others_do_not_join_give_up(demo_inputs, tmp_path, present):
    flags = flags_for(demo_inputs, tmp_path / "out", "--connect_timeout", 5)
    pod = Pod(tmp_path, 3, 2, *flags, only=present)
    assert pod.wait(600) == [1] * len(present), [pod.text(i) for i in present]
    for host in present:
        expected = f"not all hosts connected to {pod.address} within 5 s (--connect_timeout); check"
        assert expected in pod.text(host) and "stack trace" not in pod.text(host)


# Runs the script with one of its parts replaced on one host: (host, what to do).
INJECT = """
import os, signal, sys, time
import extract_activations as script
from activation_extraction.common.errors import RunError, StorageError
from activation_extraction.model import trial
from activation_extraction.model.automatic_mesh import StepSizes
from activation_extraction.run import batch_size, inputs
from activation_extraction.store.formats import ShardFormat
from activation_extraction.store.run_record import RunRecord
from activation_extraction.store.storage import ActivationStorage
host, fault = os.environ["FAULT"].split(":")
calls = []

def first(owner, name, action):
    original = getattr(owner, name)
    setattr(owner, name, lambda *args: (action(), original(*args))[1])

def fail(error=ValueError("injected"), at=1):
    calls.append(1)
    if len(calls) >= at:
        raise error

class Silent:
    platform = device_kind = "cpu"
    def memory_stats(self):
        raise RunError("injected")

if fault == "slow writer":
    first(ShardFormat, "pack", lambda: time.sleep(4))
if host == os.environ["HOST_ID"]:
    if fault in ("bug", "bug at the end", "slow writer"):
        at = 8 if fault == "bug at the end" else 2
        first(ActivationStorage, "add_batch", lambda: fail(at=at))
    if fault == "model axis":
        StepSizes.choose_mesh = lambda *_: ({"data": 2, "model": 2}, "")
    if fault == "versions":
        first(inputs, "version", lambda: fail(RunError("injected")))
    if fault == "memory":
        batch_size.own_devices = lambda devices: [Silent()] * len(devices)
    if fault == "attention":
        Choice = trial.Choice
        trial.Choice = lambda name, attention: Choice("other", attention)
    if fault == "compile":
        first(script, "compile_step", fail)
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


def at_the_end(fault):
    return fault in ("bug at the end", "metrics")


FAULTS = [(0, "bug"), (0, "metrics"), (1, "stop")]  # by SIGTERM
MORE_FAULTS = [(0, "bug at the end"), (1, "slow writer"), (0, "compile")]


@pytest.mark.parametrize(
    "host,fault", [*FAULTS, *(pytest.param(*each, marks=pytest.mark.rare) for each in MORE_FAULTS)]
)
def test_a_fault_on_one_host_ends_both_in_order(demo_inputs, texts, tmp_path, host, fault):
    """Nobody hangs or is aborted; what was complete where there was no fault is stored."""
    out = tmp_path / "out"
    path = texts([{"text": "word " * 60}] * 64)  # eight steps
    flags = flags_for(demo_inputs, out, "--dataset_path", path, "--batch_size", 4)
    pod = faulty_pod(tmp_path, flags, f"{host}:{fault}")
    expected = [143, 143] if fault == "stop" else [1, 1]
    assert pod.wait(600) == expected, [pod.text(i) for i in range(2)]
    other = 1 - host
    assert "Terminating process" not in pod.text(host) + pod.text(other)
    if fault == "compile":
        assert f"host {host} failed" in pod.text(other) and not list(out.glob("*/*.pkl*"))
        return
    assert fault == "stop" or "another host failed" in pod.text(other) or at_the_end(fault)
    found = [json.loads(path.read_text()) for path in sorted(out.glob("*/metadata.json"))]
    # A host that had stored all of its data when the other one failed has done its part.
    assert found[other]["status"] == ("complete" if at_the_end(fault) else "interrupted")
    if at_the_end(fault):
        assert found[other]["samples"] == 32
    elif fault == "stop":  # both at the same step
        assert 8 <= found[0]["samples"] == found[1]["samples"] < 32
    else:
        assert 8 <= found[other]["samples"] < 32


def test_nobody_is_aborted_by_host_0_if_it_leaves_first(demo_inputs, tmp_path):
    """Host 1 needs longer between its last shard and its end."""
    flags = flags_for(demo_inputs, tmp_path / "out", "--max_samples", 6)
    pod = faulty_pod(tmp_path, flags, "1:slow to leave")
    assert pod.wait(600) == [0, 0], [pod.text(i) for i in range(2)]
    assert not any("Terminating process" in pod.text(i) for i in range(2))


def test_sigterm_before_the_first_step_ends_the_process(demo_inputs, tmp_path):
    """JAX's own handler would swallow it."""
    flags = flags_for(demo_inputs, tmp_path / "out", "--heartbeat_timeout", 10)
    pod = faulty_pod(tmp_path, flags, "1:waiting")
    pod.wait_for_words(1, "waiting")
    pod.processes[1].send_signal(signal.SIGTERM)
    assert pod.processes[1].wait(600) == -signal.SIGTERM
    assert pod.wait(600)[0] != 0
