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
from pods import Pod, first_documents, flags_for

from activation_extraction import ActivationDataset

pytestmark = pytest.mark.long


def test_hosts_that_disagree_all_end_with_the_field_named(demo_inputs, tmp_path):
    flags = flags_for(demo_inputs, tmp_path / "out")
    dropped = tuple(range(20, 60))
    pod = Pod(tmp_path, 2, 2, flags, [*flags, "--drop_token_ids", *dropped])
    assert pod.wait() == [2, 2]
    for host in range(2):
        told = f"error: hosts differ in --drop_token_ids: () on 0; {dropped} on 1; it must be the"
        assert told in pod.text(host)
    model = tmp_path / "model"
    shutil.copytree(demo_inputs / "model", model)
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (model / "model.safetensors").write_bytes(weights)
    pod = Pod(tmp_path, 2, 2, flags, [*flags, "--model_path", model])
    assert pod.wait() == [2, 2]
    told = r"hosts differ in model_digest \(--model_path\): \w{64} on 0; \w{64} on 1; it must be"
    assert re.search(told, pod.text(0))
    fewer = first_documents(demo_inputs, tmp_path / "fewer.parquet", 200)
    pod = Pod(tmp_path, 2, 2, flags, [*flags, "--dataset_path", fewer])
    assert pod.wait() == [2, 2]
    differ = r"error: hosts differ in .*documents.parquet.*; nothing on 1; it must be the same"
    assert re.search(differ, pod.text(1)), pod.text(1)
    # As where devices differ in memory.
    pod = faulty_pod(tmp_path, flags, "1:model axis")
    assert pod.wait() == [2, 2], [pod.text(i) for i in range(2)]
    assert (
        'error: hosts differ in mesh: {"data": 4} on 0; {"data": 2, "model": 2} on 1' in pod.text(0)
    )
    # As where a kernel fails its trial on one host.
    pod = faulty_pod(tmp_path, flags, "1:attention")
    assert pod.wait() == [2, 2], [pod.text(i) for i in range(2)]
    assert "error: hosts differ in attention: " in pod.text(0) and "other on 1" in pod.text(0)
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
    """JAX ends the other one, which waits for its devices."""
    flags = flags_for(demo_inputs, tmp_path / "out", "--heartbeat_timeout", 10)
    pod = Pod(tmp_path, 2, 2, *flags, of_each=[{}, {"JAX_PLATFORMS": "cuda"}])
    assert pod.processes[1].wait(600) == 2, pod.text(1)
    assert "error: JAX finds no devices (JAX_PLATFORMS, drivers)" in pod.text(1)
    assert "Traceback" not in pod.text(1)
    assert pod.wait()[0] not in (0, 2)


@pytest.mark.parametrize("fault", ["versions", "memory"])
def test_a_check_that_fails_on_one_host_is_told_to_the_others(demo_inputs, tmp_path, fault):
    """Also while it compares, and while the others wait for its numbers."""
    pod = faulty_pod(
        tmp_path, flags_for(demo_inputs, tmp_path / "out", "--batch_size", "auto"), f"1:{fault}"
    )
    assert pod.wait() == [1, 1], [pod.text(host) for host in range(2)]
    assert "error: host 1 failed: see the message there" in pod.text(0)
    assert "injected" in pod.text(1) and "the device failed" not in pod.text(0)


def test_hosts_may_have_the_same_files_at_other_paths(demo_inputs, tmp_path):
    """Those of --mix and --chat_template, too; all hosts call the sources as host 0 does."""
    rows = [
        {"messages": [{"role": "user", "content": f"question {n} " * (n % 7 + 1)}]}
        for n in range(20)
    ]
    flags = []
    for host in range(2):
        folder = tmp_path / f"disk_{host}"
        folder.mkdir()
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:10]))
        (folder / "more.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[10:]))
        (folder / "template.jinja").write_text(QWEN2_5)
        data = ["--mix", f"{folder}/rows.jsonl=0.75", f"{folder}/more.jsonl=0.25"]
        data += ["--messages_column", "messages", "--chat_template", folder / "template.jinja"]
        given = flags_for(demo_inputs, tmp_path / "out", *data)
        at = given.index("--dataset_path")
        flags.append(given[:at] + given[at + 2 :])
    pod = Pod(tmp_path, 2, 2, *flags)
    assert pod.wait() == [0, 0], [pod.text(host) for host in range(2)]
    dataset = ActivationDataset(tmp_path / "out")
    assert len(dataset) == 20
    sources = Counter(sample.row["source"] for sample in dataset)
    assert sources == {f"{tmp_path}/disk_0/{name}.jsonl": 10 for name in ("rows", "more")}
    again = Pod(tmp_path, 2, 2, *flags)  # a run that continues calls them so, too
    assert again.wait() == [0, 0], [again.text(host) for host in range(2)]
    other = [str(flag).replace("=0.25", "=0.5") for flag in flags[1]]
    pod = Pod(tmp_path, 2, 2, flags[0], other)
    assert pod.wait() == [2, 2] and "error: hosts differ in --mix: " in pod.text(0)
    with open(tmp_path / "disk_1/template.jinja", "a") as template:
        template.write("the end")
    pod = Pod(tmp_path, 2, 2, *([*each, "--overwrite"] for each in flags))
    assert pod.wait() == [
        2,
        2,
    ] and "error: hosts differ in chat_template (--chat_template): " in pod.text(0)


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


def test_bad_input_on_one_host_ends_all(demo_inputs, tmp_path):
    flags = flags_for(demo_inputs, tmp_path / "out")
    pod = Pod(tmp_path, 2, 2, flags, [*flags, "--dataset_path", tmp_path / "nothing"])
    assert pod.wait() == [2, 2]
    assert "error: host 1 failed: see the message there" in pod.text(0)
    assert "nothing: no such file or folder" in pod.text(1)
    pod = Pod(tmp_path, 2, 2, flags, [*flags, "--min_free_gb", 99_999])
    assert pod.wait() == [2, 2]
    assert "error: host 1 failed: see the message there" in pod.text(0)
    assert "GB free, --min_free_gb asks for 99999" in pod.text(1)
    assert not (tmp_path / "out").exists()


def long_run(texts, demo_inputs, output, *more):
    path = texts([{"text": f"row {n} " * 30} for n in range(20_000)])
    small = ["--shard_size_gb", 3e-4, "--batch_size", 4]
    return flags_for(demo_inputs, output, "--dataset_path", path, *small, *more)


def test_a_failure_on_one_host_stops_all_and_keeps_what_is_stored(demo_inputs, texts, tmp_path):
    """Two files, one for each host; the second one has a bad line."""
    out, data = tmp_path / "out", tmp_path / "data"
    flags = long_run(texts, demo_inputs, out)
    data.mkdir()
    lines = (tmp_path / "texts.jsonl").read_text().splitlines()
    (data / "a.jsonl").write_text("\n".join(lines))
    (data / "b.jsonl").write_text("\n".join([*lines[:200], "{", *lines[200:]]))
    pod = Pod(tmp_path, 2, 2, *flags, "--dataset_path", data)
    assert pod.wait() == [1, 1], [pod.text(i) for i in range(2)]
    assert "line 201: not JSON" in pod.text(1)
    assert "another host failed" in pod.text(0) and "Stored in" in pod.text(0)
    metadata = json.loads((out / "machine_000_host_01/metadata.json").read_text())
    assert metadata["status"] == "interrupted" and metadata["samples"] == 200


def test_sigterm_on_one_host_stops_all_at_the_same_step(demo_inputs, texts, tmp_path):
    out = tmp_path / "out"
    pod = Pod(tmp_path, 2, 2, *long_run(texts, demo_inputs, out))
    pod.wait_for(out / "machine_000_host_01/shard_0002.json")
    pod.processes[1].send_signal(signal.SIGTERM)
    assert pod.wait() == [143, 143], [pod.text(i) for i in range(2)]
    tokens = []
    for host in range(2):
        metadata = json.loads((out / f"machine_000_host_{host:02d}/metadata.json").read_text())
        assert metadata["status"] == "interrupted" and 0 < metadata["samples"] < 10_000
        assert "Traceback" not in pod.text(host)
        tokens.append(metadata["tokens"])
    # Rows of equal length: the same number of steps means about the same number of tokens.
    assert abs(tokens[0] - tokens[1]) < 64


def test_a_stuck_host_is_ended_by_the_watchdog(demo_inputs, texts, tmp_path):
    out = tmp_path / "out"
    pod = Pod(tmp_path, 2, 2, *long_run(texts, demo_inputs, out, "--stall_timeout", 5))
    pod.wait_for(out / "machine_000_host_01/shard_0002.json")
    pod.processes[1].send_signal(signal.SIGSTOP)
    assert pod.processes[0].wait(600) == 1
    assert "no step has finished for 5 s" in pod.text(0) and "Current thread" in pod.text(0)
    pod.processes[1].kill()
    pod.processes[1].wait()


@pytest.mark.parametrize("present", [[1], [0, 2]])
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
from activation_extraction.store.formats import ShardFormat
from activation_extraction.store.storage import ActivationStorage
host, fault = os.environ["FAULT"].split(":")
if fault == "slow writer":
    original = ShardFormat.pack
    def slow(*args):
        time.sleep(4)
        return original(*args)
    ShardFormat.pack = slow
if host == os.environ["HOST_ID"]:
    if fault in ("bug", "bug at the end", "slow writer"):
        calls, after = [], 5 if fault == "bug at the end" else 2
        original_add = ActivationStorage.add_batch
        def add(self, batch, activations):
            calls.append(1)
            if len(calls) >= after:
                raise ValueError("injected")
            return original_add(self, batch, activations)
        ActivationStorage.add_batch = add
    if fault == "model axis":
        from activation_extraction.model.automatic_mesh import StepSizes
        StepSizes.choose_mesh = lambda *_: ({"data": 2, "model": 2}, "")
    if fault == "versions":
        from activation_extraction.common.errors import RunError
        from activation_extraction.run import inputs
        def broken(*_):
            raise RunError("injected")
        inputs.version = broken
    if fault == "memory":
        from activation_extraction.common.errors import RunError
        from activation_extraction.run import batch_size
        original_own = batch_size._own_devices
        class Silent:
            device_kind = "cpu"
            def memory_stats(self):
                raise RunError("injected")
        def own(*given):  # `fit_rows` alone gives no planned machine
            return original_own(*given) if len(given) > 1 else [Silent()]
        batch_size._own_devices = own
    if fault == "attention":
        from activation_extraction.model import trial
        Choice = trial.Choice
        trial.Choice = lambda name, attention: Choice("other", attention)
    if fault == "compile":
        def broken(*_):
            raise ValueError("injected")
        script.compile_step = broken
    if fault == "metrics":
        def full(*_):
            from activation_extraction.common.errors import StorageError
            raise StorageError("no room for metrics")
        ActivationStorage.record = full
    if fault in ("metrics", "slow to leave"):  # the others have nothing more to do by then
        for name in ("print_summary", "how_to_continue"):
            def slow(*args, original=getattr(script, name)):
                time.sleep(1.5)
                return original(*args)
            setattr(script, name, slow)
    if fault == "early stop":
        original_extract = script.extract
        def stopped_at_once(*args):
            os.kill(os.getpid(), signal.SIGTERM)
            return original_extract(*args)
        script.extract = stopped_at_once
status = 1
try:
    status = script.main(sys.argv[1:])
finally:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
"""


def faulty_pod(folder, flags, fault, script=INJECT):
    """Two hosts of two devices, one of them with a fault: `fault` is its number and the fault."""
    path = folder / "inject.py"
    path.write_text(script)
    return Pod(folder, 2, 2, *flags, through_environment=True, script=path, FAULT=fault)


FAULTS = [(0, "bug"), (1, "bug"), (0, "bug at the end"), (0, "metrics"), (1, "slow writer")]
FAULTS += [(0, "compile"), (1, "early stop")]


@pytest.mark.parametrize("host,fault", FAULTS)
def test_a_fault_on_one_host_ends_both_in_order(demo_inputs, texts, tmp_path, host, fault):
    """Nobody hangs or is aborted; what was complete where there was no fault is stored."""
    out = tmp_path / "out"
    path = texts([{"text": "word " * 60}] * 40)  # five steps
    flags = flags_for(demo_inputs, out, "--dataset_path", path, "--batch_size", 4)
    pod = faulty_pod(tmp_path, flags, f"{host}:{fault}")
    expected = [143, 143] if fault == "early stop" else [1, 1]
    assert pod.wait(600) == expected, [pod.text(i) for i in range(2)]
    other = 1 - host
    assert "Terminating process" not in pod.text(host) + pod.text(other)
    if fault == "compile":
        assert f"host {host} failed" in pod.text(other) and not list(out.glob("*/*.pkl*"))
        return
    metadata = json.loads((out / f"machine_000_host_{other:02d}/metadata.json").read_text())
    # A host that had stored all of its data when the other one failed has done its part.
    at_the_end = fault in ("bug at the end", "metrics")
    assert metadata["status"] == ("complete" if at_the_end else "interrupted")
    samples = 20 if at_the_end else {"early stop": 0}.get(fault)
    assert metadata["samples"] == samples if samples is not None else metadata["samples"] >= 8


@pytest.mark.parametrize("host", [0, 1])
def test_nobody_is_aborted_by_those_who_leave_first(demo_inputs, tmp_path, host):
    """One host needs longer than the other between its last shard and its end."""
    flags = flags_for(demo_inputs, tmp_path / "out", "--max_samples", 6)
    pod = faulty_pod(tmp_path, flags, f"{host}:slow to leave")
    assert pod.wait(600) == [0, 0], [pod.text(i) for i in range(2)]
    assert not any("Terminating process" in pod.text(i) for i in range(2))


def test_sigterm_before_the_first_step_ends_the_process(demo_inputs, texts, tmp_path):
    """JAX's own handler would swallow it."""
    script = INJECT.replace(
        "status = 1\ntry:",
        "def wait(*_):\n    print('waiting', flush=True)\n    while True:\n        time.sleep(1)\n"
        "script.compile_step = wait\nstatus = 1\ntry:",
    )
    flags = flags_for(demo_inputs, tmp_path / "out", "--heartbeat_timeout", 10)
    pod = faulty_pod(tmp_path, flags, "9:none", script)
    pod.wait_for_words(1, "waiting")
    pod.processes[1].send_signal(signal.SIGTERM)
    assert pod.processes[1].wait(600) == -signal.SIGTERM
    assert pod.wait(600)[0] != 0
