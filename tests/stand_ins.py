"""What docker, gcloud and ssh do, played on this machine: they record their calls and execute them.

Run as `stand_ins.py ROOT NAME ARGUMENT...`. Every host is a folder ROOT/hosts/NAME, which is its
home. Files in ROOT say how the world is: settings.json (variables of every host, interpreter that a
venv gets), tpus/NAME.json (state, hosts, coordinator), hosts/NAME/down, hosts/NAME/image_id.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(sys.argv[1])
SETTINGS = json.loads((ROOT / "settings.json").read_text())


def on_host(name: str, command: str, **variables: str) -> "subprocess.Popen[bytes]":
    """Starts what a login shell on that host would run."""
    home = ROOT / "hosts" / name
    home.mkdir(parents=True, exist_ok=True)
    environment = {"PATH": f"{ROOT}/host_bin:{os.environ['PATH']}", "HOME": str(home)}
    environment |= SETTINGS["variables"] | variables
    while (home / "slow").exists():
        time.sleep(0.02)
    if (home / "down").exists():
        command = f"echo 'ssh: connect to host {name}: Connection refused' >&2; exit 255"
    return subprocess.Popen(["sh", "-c", command], cwd=home, env=environment)


def ssh(arguments: list[str]) -> int:
    while arguments[0].startswith("-"):
        arguments.pop(0)
    return on_host(arguments[0].split("@")[-1], " ".join(arguments[1:])).wait()


def gcloud(arguments: list[str]) -> int:
    if arguments[:3] != ["compute", "tpus", "tpu-vm"]:
        return 0
    verb, name = arguments[3:5]
    flags = dict(a[2:].split("=", 1) for a in arguments if a.startswith("--") and "=" in a)
    if verb == "scp":
        name = arguments[5].removesuffix(":")
    file = ROOT / "tpus" / f"{name}.json"
    if verb == "create":
        tpu = {"state": "READY", "hosts": 2, "coordinator": "127.0.0.1:8476"}
        file.write_text(json.dumps(tpu))
        for worker in range(2):
            (ROOT / "hosts" / f"{name}-w-{worker}").mkdir()
    if verb == "delete":
        file.unlink()
        for home in (ROOT / "hosts").glob(f"{name}-w-*"):
            shutil.rmtree(home)
    if verb not in ("ssh", "scp", "describe"):
        return 0
    if not file.exists():
        print("ERROR: (gcloud) NOT_FOUND", file=sys.stderr)
        return 1
    tpu = json.loads(file.read_text())
    if verb == "describe":
        print(tpu["state"], tpu["hosts"], sep="\t")
        return 0
    # By default 64 hosts at a time: of a larger pod the others would wait until these have ended.
    assert flags["worker"] == flags["batch-size"] == "all"
    print(
        f"Attempting to SSH into 1 nodes with a total of {tpu['hosts']} workers.", file=sys.stderr
    )
    running = []
    for worker in range(tpu["hosts"]):
        host = f"{name}-w-{worker}"
        if verb == "scp":
            shutil.copy(arguments[4], ROOT / "hosts" / host)
            continue
        # As gcloud does, ssh gets the command in pieces and joins them again.
        command = " ".join(flags["command"].split(" "))
        cloud = {"COORDINATOR_ADDRESS": tpu["coordinator"], "HOST_ID": str(worker)}
        cloud |= {"NUM_HOSTS": str(tpu["hosts"]), "HOSTNAME": f"t1v-n-0a1b2c3d-w-{worker}"}
        running.append(on_host(host, command, **cloud))
    return max([process.wait() for process in running], default=0)


def docker(arguments: list[str]) -> int:
    host = Path(os.environ["HOME"])
    containers = ROOT / "containers" / host.name
    if arguments[0] == "image":
        file = host / "image_id"
        print(file.read_text() if file.exists() else "sha256:0123456789abcdef")
    elif arguments[0] == "run" and "--name" in arguments:
        return docker_run(arguments[1:], containers)
    elif arguments[0] in ("stop", "rm"):
        folder = containers / arguments[-1]
        if not folder.exists():
            return arguments[0] == "stop"
        seconds = float(arguments[2]) if arguments[0] == "stop" else 0
        pid = int((folder / "pid").read_text())
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + seconds
        while folder.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        if folder.exists():
            os.kill(pid, signal.SIGKILL)
    return 0


def docker_run(arguments: list[str], containers: Path) -> int:
    environment = {"PATH": f"{ROOT}/image_bin:{os.environ['PATH']}", **SETTINGS["variables"]}
    name, mounts = "", {}
    while arguments[0].startswith("-"):
        flag = arguments.pop(0)
        if flag in ("--name", "--volume", "--env", "--gpus"):
            value = arguments.pop(0)
            if flag == "--name":
                name = value
            elif flag == "--volume":
                source, target, *_ = value.split(":")
                mounts[target] = source
            elif flag == "--env" and "=" in value:
                environment |= dict([value.split("=", 1)])
            elif flag == "--env" and value in os.environ:
                environment[value] = os.environ[value]
    environment |= {"HF_HOME": mounts["/cache/huggingface"], "HOME": "/nonexistent"}
    environment["XDG_CACHE_HOME"] = str(Path(mounts["/cache/activation_extraction"]).parent)
    folder = containers / name
    workspace = folder / "workspace"
    try:
        workspace.mkdir(parents=True)
    except FileExistsError:
        print(f"docker: the container name {name} is already in use", file=sys.stderr)
        return 125
    for path in (ROOT / "image").iterdir():
        (workspace / path.name).symlink_to(path)
    for target, source in mounts.items():
        if target.startswith("/workspace/"):
            (folder / target[1:]).symlink_to(source)
        else:
            known = "/cache/huggingface", "/cache/activation_extraction", "/adc.json", source
            assert target in known and Path(source).exists()
    entry = [str(workspace / "entrypoint.sh"), *arguments[1:]]
    process = subprocess.Popen(entry, cwd=workspace, env=environment)
    (folder / "pid").write_text(str(process.pid))
    status = process.wait()
    shutil.rmtree(folder)
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    calls = os.open(ROOT / "calls.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(calls, (json.dumps(sys.argv[2:]) + "\n").encode())  # at once: calls run in parallel
    sys.exit({"docker": docker, "gcloud": gcloud, "ssh": ssh}[sys.argv[2]](sys.argv[3:]))
