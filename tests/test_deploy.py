"""deploy.sh: runs on many machines are started, followed and stopped; and README's pod commands.

What extracts for real uses the demo; what is about starting, following and stopping, the small job.
"""

import os
import pty
import re
import shutil
import signal
import subprocess
import sys

import pytest
from cloud import DEPLOY, LAUNCH, ODD, REPOSITORY, Cloud
from pods import stored

pytestmark = pytest.mark.long

DEMO = ["--demo", "--max_seq_length", "64", "--layers_to_extract", "1", "3"]


@pytest.fixture(params=[2])
def real_cloud(request, tmp_path):
    """Runs extract_activations.py, with so many devices per host."""
    cloud = Cloud(tmp_path, sys.executable, devices=request.param)
    yield cloud
    cloud.close()


def demo_documents(output):
    """Checks that every document of the demo is there once, in both layers; returns the folders."""
    found = stored(output)
    for layer in (1, 3):
        records = [r for (_, at), part in found.items() if at == layer for r in part]
        assert sorted(r["doc_id"] for r in records) == [f"<urn:demo:{n:04d}>" for n in range(300)]
        assert len({r["sample_idx"] for r in records}) == 300
    return {folder for folder, _ in found}


def hosts_of(machine, count):
    return {f"machine_{machine:03d}_host_{host:02d}" for host in range(count)}


# ---- for real


@pytest.mark.parametrize("real_cloud", [16], indirect=True)
def test_a_local_pod_of_four_hosts_with_16_devices(real_cloud):
    cloud = real_cloud
    flags = [*DEMO, "--batch_size", "16"]
    status, text = cloud.deploy("local", "4", "--", *flags, MODEL_PATH=None)
    assert status == 0, text
    assert "[machine_0/3] done: " in text and text.count("read it with") == 1
    assert text.endswith("machine_0: done on all 4 hosts\n")
    assert demo_documents(cloud.laptop / "out") == hosts_of(0, 4)


@pytest.mark.parametrize("real_cloud", [16], indirect=True)
def test_a_cloud_pod_of_four_hosts_with_16_devices_in_docker(real_cloud):
    cloud = real_cloud
    cloud.tpu("pod", 4)
    image = "us-docker.pkg.dev/project/images/extraction:1"
    flags = ["--image", image, "--zone", "us-west4-a", "--", *DEMO, "--batch_size", "16"]
    status, text = cloud.deploy("gcloud", "pod", *flags, MODEL_PATH=None)
    assert status == 0, text
    assert text.endswith("pod: done on all 4 hosts\n")
    outputs = [cloud.root / f"hosts/pod-w-{i}/activation-extraction/out" for i in range(4)]
    for output in outputs[1:]:  # every host has its own disk
        for folder in output.iterdir():
            shutil.move(folder, outputs[0])
    assert demo_documents(outputs[0]) == hosts_of(0, 4)
    calls = cloud.lines("calls")
    for call in calls:
        assert call[0] != "gcloud" or call[1] == "auth" or "--zone=us-west4-a" in call
    assert calls.count(["docker", "pull", "--quiet", image]) == 4
    assert calls.count(["gcloud", "auth", "configure-docker", "us-docker.pkg.dev", "--quiet"]) == 4
    runs = [call for call in calls if call[:2] == ["docker", "run"]]
    assert len(runs) == 4 and all("--privileged" in run and "--net=host" in run for run in runs)
    assert not any("COORDINATOR_ADDRESS=" in argument for run in runs for argument in run)


def test_three_machines_and_one_is_preempted_and_restarted(real_cloud):
    """One host each, over ssh, with the code copied. What ran to its end is left alone."""
    cloud = real_cloud
    flags = ["--", *DEMO, "--batch_size", "4"]
    process = cloud.start("ssh", "a", "me@b", "c", *flags, MODEL_PATH=None)
    job = cloud.root / "hosts/b/activation-extraction/.deploy/extraction"
    cloud.wait(lambda: (job / "log").exists() and "compiled" in (job / "log").read_text())
    os.killpg(int((job / "pid").read_text()), signal.SIGKILL)
    text = process.communicate(timeout=200)[0]
    assert process.returncode == 1 and "me@b/0: killed, or its machine was" in text, text
    assert "a: done on all 1 hosts" in text and "c: done on all 1 hosts" in text
    log = cloud.root / "hosts/a/activation-extraction/.deploy/extraction/log"
    before = log.stat().st_mtime_ns
    status, text = cloud.deploy("ssh", "a", "me@b", "c", *flags, MODEL_PATH=None)
    assert status == 1 and "me@b/0: killed" in text  # not without being asked
    status, text = cloud.deploy("ssh", "a", "me@b", "c", "--restart", *flags, MODEL_PATH=None)
    assert status == 0 and "me@b: done on all 1 hosts" in text, text
    assert log.stat().st_mtime_ns == before
    for machine in "bc":
        for folder in (cloud.root / f"hosts/{machine}/activation-extraction/out").iterdir():
            shutil.move(folder, cloud.root / "hosts/a/activation-extraction/out")
    expected = {f"machine_{i:03d}" for i in range(3)}
    assert demo_documents(cloud.root / "hosts/a/activation-extraction/out") == expected


# ---- with the small job


TARGETS = {
    "local": ["local", "2", "1"],
    "ssh": ["ssh", "a,b", "me@c"],
    "gcloud": ["gcloud", "pod", "single"],
    "docker": ["gcloud", "pod", "single", "--image", "image:1"],
}


@pytest.mark.parametrize("mode", TARGETS)
def test_any_argument_arrives_as_it_was_given(cloud, mode):
    cloud.tpu("pod", 2)
    cloud.tpu("single", 1)
    cloud.finish()
    status, text = cloud.deploy(*TARGETS[mode], "--", "--odd", *ODD, DATASET_NAME='it\'s a "$set"')
    assert status == 0, text
    jobs = sorted(cloud.lines("jobs"), key=lambda job: job["who"])
    assert [job["who"] for job in jobs] == ["0-0", "0-1", "1-0"]
    for job in jobs:
        argv = job["argv"]
        assert argv[argv.index("--odd") + 1 :] == ODD
        assert argv[argv.index("--dataset_name") + 1] == 'it\'s a "$set"'
        assert argv[argv.index("--total_machines") + 1] == "2"
        assert ("--multihost" in argv) == (job["who"][0] == "0" or mode in ("gcloud", "docker"))
    if mode == "ssh":
        assert jobs[0]["address"] == jobs[1]["address"] == f"a:{cloud.port}"
    assert not list((cloud.root / "containers").glob("*/*"))


def test_a_second_deploy_follows_and_two_at_once_start_once(cloud):
    both = [cloud.start("ssh", "a,b,c") for _ in range(2)]
    cloud.wait_for_jobs(3)
    third = cloud.start("ssh", "a,b,c")
    assert "a: runs already" in cloud.read_until(third, "] working as", 3)
    status, text = cloud.deploy("ssh", "a,b,c", "--", "--max_samples", "5")
    assert status == 2 and "a/0: a job with another command runs there" in text
    status, text = cloud.deploy("ssh", "d", "a,b,c")  # the same hosts as another machine
    assert status == 2 and "c/2: a job with another command runs there" in text
    cloud.finish()
    for process in (*both, third):
        text = process.communicate(timeout=60)[0]
        assert process.returncode == 0 and "a: done on all 3 hosts" in text
    assert len(cloud.lines("jobs")) == 3
    assert cloud.deploy("ssh", "a,b,c")[0] == 0 and len(cloud.lines("jobs")) == 3
    assert cloud.deploy("ssh", "a,b,c", "--", "--max_samples", "5")[0] == 0  # another job
    assert len(cloud.lines("jobs")) == 6


@pytest.mark.parametrize("mode", TARGETS)
def test_ctrl_c_stops_all_hosts(cloud, mode):
    cloud.tpu("pod", 2)
    cloud.tpu("single", 1)
    process = cloud.start(*TARGETS[mode])
    cloud.read_until(process, "] working as", 3)
    os.killpg(process.pid, signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and text.count("] stored\n") == 3, text
    assert len(re.findall(r"\] \d{4}-\d\d-\d\d [\d:]{8} ended with status 143\n", text)) == 3
    assert text.count("exit status 143") == 3


@pytest.mark.parametrize("mode", ["ssh", "docker"])
def test_a_second_ctrl_c_kills(cloud, mode):
    cloud.tpu("pod", 2)
    cloud.tpu("single", 1)
    (cloud.root / "stubborn").touch()
    process = cloud.start(*TARGETS[mode])
    cloud.read_until(process, "] working as", 3)
    os.killpg(process.pid, signal.SIGINT)
    cloud.read_until(process, "again to kill them")
    os.killpg(process.pid, signal.SIGINT)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 130 and text.count("killed") + text.count("137") >= 3, text


@pytest.mark.parametrize("stage", ["check", "start"])
def test_ctrl_c_before_the_job_runs(cloud, stage):
    """In the check it ends at once; later, what was started is stopped."""
    slow = cloud.root / "hosts/b/slow"
    slow.parent.mkdir()
    if stage == "check":
        slow.touch()
        process = cloud.start("ssh", "a,b")
        cloud.wait(lambda: any("b" in call for call in cloud.lines("calls")))
    else:
        process = cloud.start("ssh", "a,b")
        cloud.read_until(process, "hosts: 2")
        slow.touch()
    os.killpg(process.pid, signal.SIGINT)
    if stage == "check":
        text = process.communicate(timeout=60)[0]
        slow.unlink()
        assert not cloud.lines("jobs")
    else:
        slow.unlink()
        text = process.communicate(timeout=60)[0]
    assert process.returncode == 130, text
    assert cloud.deploy("ssh", "a,b", "--stop")[0] == 0
    cloud.finish()
    status, text = cloud.deploy("ssh", "a,b", "--restart")
    assert status == 0, text


def test_detach_stop_and_only(cloud):
    status, text = cloud.deploy("local", "1", "2", "--detach")
    assert status == 0 and "started" in text
    cloud.wait_for_jobs(3)
    stop = ["--stop", "--only", "machine_1"]
    status, text = cloud.deploy("local", "1", "2", *stop, MODEL_PATH=None, OUTPUT_DIR=None)
    assert status == 0 and text == "machine_1/0: stopped\nmachine_1/1: stopped\n"
    status, text = cloud.deploy("local", "1", "2", "--only", "machine_0", "--detach")
    assert status == 0 and "machine_0: runs already" in text
    (cloud.root / "status-0-0").write_text("3")
    status, text = cloud.deploy("local", "1", "2", "--detach", "--only", "machine_1")
    assert status == 143 and "started" not in text
    status, text = cloud.deploy("local", "1", "2")
    assert status == 3 and "machine_0/0: exit status 3" in text
    assert "machine_1/0: exit status 143" in text and len(cloud.lines("jobs")) == 3


def test_closing_the_terminal_leaves_the_hosts_running(cloud):
    process = cloud.start("local", "2")
    cloud.read_until(process, "] working as", 2)
    os.killpg(process.pid, signal.SIGHUP)
    process.communicate(timeout=60)
    cloud.finish()
    status, text = cloud.deploy("local", "2")
    assert status == 0 and len(cloud.lines("jobs")) == 2, text


def test_a_host_that_fails_is_reported_and_restarted_with_its_whole_pod(cloud):
    (cloud.root / "status-0-1").write_text("3")
    process = cloud.start("ssh", "a,b", "c")
    cloud.wait_for_jobs(3)
    (cloud.root / "status-1-0").write_text("0")
    cloud.read_until(process, "\n[b/1] finished\n")
    (cloud.root / "status-0-1").unlink()
    again = cloud.start("ssh", "a,b", "c", "--restart")
    cloud.wait_for_jobs(5)
    cloud.finish()
    text = process.communicate(timeout=60)[0]
    assert process.returncode and "b/1: exit status 3" in text, text
    text = again.communicate(timeout=60)[0]
    assert again.returncode == 0 and "c: done on all 1 hosts" in text, text
    assert sorted(job["who"] for job in cloud.lines("jobs")) == ["0-0", "0-0", "0-1", "0-1", "1-0"]


def test_a_job_that_is_killed_within_a_line(cloud):
    (cloud.root / "half").touch()
    cloud.finish()
    status, text = cloud.deploy("local", "1")
    assert status == 1 and "half a line\n" in text, text
    assert "machine_0/0: killed, or its machine was" in text, text


def test_a_tpu_that_was_preempted_and_created_again_starts_alone(cloud):
    """Its disks are empty then, so it takes no --restart; the other machine is only followed."""
    for name in ("one", "two"):
        cloud.tpu(name, 1)
    first = cloud.start("gcloud", "one", "two")
    cloud.wait_for_jobs(2)
    home = cloud.root / "hosts/two-w-0"
    pid = (home / "activation-extraction/.deploy/extraction/pid").read_text()
    os.killpg(int(pid), signal.SIGKILL)
    cloud.tpu("two", 1, "PREEMPTED")
    status, text = cloud.deploy("gcloud", "one", "two")
    assert status == 2 and "error: two: is PREEMPTED, not READY" in text
    shutil.rmtree(home)
    cloud.tpu("two", 1)
    second = cloud.start("gcloud", "one", "two")
    cloud.wait_for_jobs(3)
    cloud.finish()
    text = second.communicate(timeout=60)[0]
    assert second.returncode == 0 and "one: runs already" in text, text
    assert sorted(job["who"] for job in cloud.lines("jobs")) == ["0-0", "1-0", "1-0"]
    assert "one: done on all 1 hosts" in first.communicate(timeout=60)[0] and first.returncode == 1


# JAX, which other tests use in this process, warns of every fork; this one becomes bash at once.
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_ctrl_c_in_a_terminal(cloud):
    """The terminal's own way: a session, a foreground process group, the key itself."""
    script = f"cd {cloud.laptop} && exec bash {DEPLOY} local 2 --min_free_gb 0"
    variables = {"PATH": os.environ["PATH"], "PYTHON": cloud.python, "OUTPUT_DIR": "out"}
    variables |= {"MODEL_PATH": "m", "COORDINATOR_PORT": str(cloud.port), **cloud.variables}
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve("/bin/bash", ["bash", "-c", script], variables)
    text = b""
    try:
        while part := os.read(terminal, 4096):
            if text.count(b"] working as") < 2 <= (text + part).count(b"] working as"):
                os.write(terminal, b"\x03")
            text += part
    except OSError:  # how a terminal says that the other side is closed
        pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    assert text.count(b"] stored") == 2, text


def test_a_host_that_differs_or_is_not_there_stops_everything_before_it_starts(cloud):
    cloud.tpu("pod", 3)
    cloud.tpu("gone", 1, "PREEMPTED")
    image = ["--image", "image:1"]
    (cloud.root / "hosts/pod-w-2/image_id").write_text("sha256:other")
    status, text = cloud.deploy("gcloud", "pod", *image)
    assert (
        status == 2
        and "error: hosts differ in version (image or code): sha256:other on pod/2" in text
    )
    (cloud.root / "hosts/pod-w-2/image_id").unlink()
    status, text = cloud.deploy("gcloud", "pod", "gone", "never", *image)
    assert status == 2 and "error: gone: is PREEMPTED, not READY" in text
    assert "error: never: is not there, not READY" in text
    status, text = cloud.deploy("gcloud", "pod", *image, "--min_free_gb", "94")
    assert status == 2 and "error: pod/0: 93 GB free for the output" in text
    (cloud.root / "hosts/pod-w-1/down").touch()
    status, text = cloud.deploy("gcloud", "pod", *image)
    assert status == 2 and "error: pod: 2 of 3 hosts passed the check" in text, text
    (cloud.root / "hosts/pod-w-1/down").unlink()
    Cloud.script(cloud.root / "host_bin/python3.14", "#!/bin/sh\nexit 1\n")
    status, text = cloud.deploy("gcloud", "pod")
    assert status == 2 and "error: pod/0: the check failed" in text
    assert "error: nothing was started" in text and not cloud.lines("jobs")


def test_what_docker_would_invent_is_refused_and_what_is_there_is_mounted(cloud):
    """A path that is missing on a host, a glob, a ~ of another home; and credentials."""
    image, data = ["--image", "image:1"], cloud.root / "data"
    flags = {"MODEL_PATH": str(data / "model"), "DATASET_PATH": str(data / "texts/*.parquet")}
    status, text = cloud.deploy("ssh", "a", *image, **flags)
    assert status == 2 and f"{data}/model: is not on this host" in text, text
    (data / "model").mkdir(parents=True)
    status, text = cloud.deploy("ssh", "a", *image, **flags)
    assert status == 2 and f"{data}/texts: is not on this host" in text, text
    (data / "texts").mkdir()
    status, text = cloud.deploy("ssh", "a", *image, OUTPUT_DIR="~/out", **flags)
    assert status == 2 and "~/out: give the whole path" in text, text
    (data / "file").touch()
    status, text = cloud.deploy("ssh", "a", *image, OUTPUT_DIR=str(data / "file/out"), **flags)
    assert status == 2 and f"cannot create directory '{data}/file'" in text, text
    assert not cloud.lines("jobs")
    key = cloud.root / "hosts/a/.config/gcloud/application_default_credentials.json"
    key.parent.mkdir(parents=True)
    key.touch()
    cloud.finish()
    status, text = cloud.deploy("ssh", "a", *image, **flags)
    assert status == 0, text
    assert cloud.lines("jobs")[0]["credentials"] == "/adc.json"
    run = next(call for call in cloud.lines("calls") if call[:2] == ["docker", "run"])
    assert f"{data}/texts:{data}/texts:ro" in run and f"{data}/model:{data}/model:ro" in run


def test_machines_without_external_addresses(cloud):
    cloud.tpu("pod", 2)
    cloud.finish()
    flags = ["--zone", "z", "--tunnel-through-iap"]
    assert cloud.deploy("gcloud", "pod", *flags)[0] == 0
    calls = [call for call in cloud.lines("calls") if call[:3] == ["gcloud", "compute", "tpus"]]
    assert {call[4] for call in calls} == {"describe", "scp", "ssh"}
    for call in calls:
        assert "--zone=z" in call
        assert ("--tunnel-through-iap" in call) == (call[4] != "describe")


def test_the_container_of_another_user_of_the_host_is_left_alone(cloud):
    other = subprocess.Popen(["sleep", "100"])
    try:
        folder = cloud.root / "containers/a/extraction"
        folder.mkdir(parents=True)
        (folder / "pid").write_text(str(other.pid))
        cloud.finish()
        status, text = cloud.deploy("ssh", "a", "--image", "image:1")
        assert status == 0 and other.poll() is None, text
    finally:
        other.kill()
        other.wait()


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ([], {}, "MODE: expected gcloud, ssh or local"),
        (["slurm", "a"], {}, "slurm: expected gcloud, ssh or local"),
        (["ssh"], {}, "TARGET: none is given"),
        (["ssh", "a", "b,a"], {}, "a: is given twice"),
        (["ssh", "a,,b"], {}, "a,,b: not a target for ssh"),
        (["gcloud", "Pod;id"], {}, "Pod;id: not a target for gcloud"),
        (["local", "0"], {}, "0: not a target for local"),
        (["local", "1", "--only", "b"], {}, "--only b: is none of machine_0"),
        (["local", "1", "--max_samples", "4"], {}, "--max_samples: unknown; flags of"),
        (["local", "1", "--image"], {}, "--image: needs a value"),
        (["local", "1", "--job", "a b"], {}, "--job a b: letters"),
        (["local", "1", "--min_free_gb", "x"], {}, "--min_free_gb x: not a whole number"),
        (["local", "1"], {"MACHINE_ID": "3"}, "MACHINE_ID: is set here from the targets"),
        (["local", "1", "--", "--host_id=1"], {}, "--host_id: is set here from the targets"),
        (["local", "1"], {"COORDINATOR_PORT": "x"}, "COORDINATOR_PORT=x: not a number"),
        (["local", "1"], {"MODEL_PATH": None}, "MODEL_PATH: is not set"),
    ],
)
def test_bad_input_is_one_line(cloud, arguments, variables, message):
    environment = {"MODEL_PATH": "m", "OUTPUT_DIR": "o", **variables}
    environment = {name: value for name, value in environment.items() if value is not None}
    result = subprocess.run(
        ["bash", DEPLOY, *arguments],
        env={"PATH": os.environ["PATH"], **environment},
        cwd=cloud.laptop,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and not result.stdout
    assert result.stderr.startswith(f"error: {message}") and result.stderr.count("\n") == 1


def test_an_old_bash_is_named():
    script = DEPLOY.read_text().replace("BASH_VERSINFO", "OLD")
    result = subprocess.run(["bash", "-c", f"OLD=(3 2)\n{script}"], capture_output=True, text=True)
    assert result.returncode == 2 and "4.4 or newer is needed" in result.stderr


# ---- README


def readme_commands():
    """The shell blocks of the section about pods, in order."""
    section = (REPOSITORY / "README.md").read_text().split("\n## Pods and many machines\n")[1]
    section = re.split(r"\n## ", section)[0]
    blocks = re.findall(r"(?:^    .*\n|^\n(?=    ))+", section, flags=re.M)
    return [re.sub(r"^    ", "", block.strip("\n"), flags=re.M) for block in blocks]


def test_the_commands_of_the_readme(cloud):
    """As written, in one shell and one folder; the cloud's answers come from the stand-ins."""
    names = [
        "deploy.sh",
        "deploy_host.sh",
        "launch_v5e64.sh",
        *(p.name for p in REPOSITORY.glob("*.py")),
    ]
    for name in [*names, "activation_extraction", *(p.name for p in REPOSITORY.glob("require*"))]:
        (cloud.laptop / name).symlink_to(REPOSITORY / name)
    (cloud.laptop / ".venv/bin").mkdir(parents=True)
    (cloud.laptop / ".venv/bin/python").symlink_to(cloud.root / "image_bin/python")
    cloud.finish()
    commands = readme_commands()
    assert len(commands) == 5  # none was missed
    script = "set -eux\n" + "\n".join(commands)
    environment = {"PATH": f"{cloud.root}/bin:{os.environ['PATH']}", "HOME": str(cloud.laptop)}
    environment |= {"COORDINATOR_PORT": str(cloud.port)}
    result = subprocess.run(
        ["bash", "-c", script], cwd=cloud.laptop, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    calls = cloud.lines("calls")
    assert ["docker", "push"] in [call[:2] for call in calls]
    told = [" ".join(call) for call in calls if call[0] == "gcloud"]
    assert sum("tpu-vm create" in call for call in told) == 3
    assert len(cloud.lines("jobs")) == 2 + 2 * 2 + 3 + 2  # pod-a; pod-b, pod-c; ssh; local
    for mode in ("deploy.sh gcloud", "deploy.sh ssh", "deploy.sh local"):
        assert mode in script
    for variable in re.findall(r"^([A-Z_]{4,})=", script, flags=re.M):
        assert f" {variable}" in LAUNCH.read_text()
