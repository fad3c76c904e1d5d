"""What docker and gcloud do, played on this machine: they record their calls and execute them.

Run as `stand_ins.py ROOT NAME ARGUMENT...`. Each host of a TPU is a folder ROOT/hosts/TPU-w-NUMBER,
which is its home. ROOT/settings.json has variables of every host, ROOT/tpus/NAME.json the number
of hosts and where they meet; a file `down` in the folder of a host makes it unreachable.
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
    environment = {"PATH": f"{ROOT}/host_bin:{os.environ['PATH']}", "HOME": str(home)}
    environment |= SETTINGS["variables"] | variables
    if (home / "down").exists():
        command = f"echo 'ssh: connect to host {name}: Connection refused' >&2; exit 255"
    return subprocess.Popen(
        ["sh", "-c", command],
        cwd=home,
        env=environment,
        start_new_session=True,  # out of reach of the laptop's Ctrl-C
    )


def gcloud(arguments: list[str]) -> int:
    if arguments[:3] != ["compute", "tpus", "tpu-vm"]:
        return 0
    verb, name = arguments[3:5]
    flags = dict(a[2:].split("=", 1) for a in arguments if a.startswith("--") and "=" in a)
    file = ROOT / "tpus" / f"{name}.json"
    if verb == "create":
        file.write_text(json.dumps({"hosts": 2, "coordinator": "127.0.0.1:8476"}))
        for worker in range(2):
            (ROOT / "hosts" / f"{name}-w-{worker}").mkdir()
    if verb != "ssh":
        return 0
    if not file.exists():
        print("ERROR: (gcloud) NOT_FOUND", file=sys.stderr)
        return 1
    tpu = json.loads(file.read_text())
    # By default 64 hosts at a time: of a larger pod the others would wait until these have ended.
    assert flags["worker"] == flags["batch-size"] == "all"
    running = []
    for worker in range(tpu["hosts"]):
        # As gcloud does, ssh gets the command in pieces and joins them again.
        command = " ".join(flags["command"].split(" "))
        cloud = {"COORDINATOR_ADDRESS": tpu["coordinator"], "HOST_ID": str(worker)}
        cloud |= {"NUM_HOSTS": str(tpu["hosts"]), "HOSTNAME": f"t1v-n-0a1b2c3d-w-{worker}"}
        running.append(on_host(f"{name}-w-{worker}", command, **cloud))
    return max(process.wait() for process in running)


def docker(arguments: list[str]) -> int:
    """One container per host, with its process, log and exit status in a folder."""
    verb, folder = arguments[0], ROOT / "containers" / Path(os.environ["HOME"]).name
    if verb == "pull":
        return int((Path(os.environ["HOME"]) / "no_image").exists())
    if verb == "run" and "--detach" in arguments:
        return docker_run(arguments[1:], folder)
    if verb not in ("rm", "logs", "wait", "stop"):
        return 0
    if not folder.exists():
        print("docker: No such container", file=sys.stderr)
        return 1
    if verb == "logs":
        follow = ["tail", "--lines=+1", "--sleep-interval=0.05", "--follow", f"{folder}/log"]
        return subprocess.call([*follow, "--pid=" + (folder / "pid").read_text().strip()])
    if verb == "rm":
        if not (folder / "status").exists():
            return 1
        shutil.rmtree(folder)
        return 0
    if verb == "stop" and not (folder / "status").exists():
        os.killpg(int((folder / "pid").read_text()), signal.SIGTERM)
    while not (folder / "status").exists():
        time.sleep(0.02)
    print((folder / "status").read_text().strip() if verb == "wait" else "extraction")
    return 0


def docker_run(arguments: list[str], folder: Path) -> int:
    environment = {"PATH": f"{ROOT}/image_bin:{os.environ['PATH']}", **SETTINGS["variables"]}
    meeting = ("COORDINATOR_ADDRESS", "HOST_ID", "NUM_HOSTS")  # what JAX asks the metadata server
    environment |= {name: os.environ[name] for name in meeting}
    mounts, work = {}, ""
    while arguments[0].startswith("-"):
        flag = arguments.pop(0)
        if flag in ("--name", "--volume", "--mount", "--workdir"):
            value = arguments.pop(0)
            if flag == "--volume":
                source, target = value.split(":")
                mounts[target] = source
            elif flag == "--workdir":
                work = value
            elif flag == "--mount":
                kind, source, target = (part.split("=")[1] for part in value.split(","))
                assert kind == "bind" and source == target
                if not Path(source).exists():
                    print(f"docker: bind source path does not exist: {source}", file=sys.stderr)
                    return 125
    environment |= {"HF_HOME": mounts["/cache/huggingface"], "HOME": "/nonexistent"}
    environment["XDG_CACHE_HOME"] = str(Path(mounts["/cache/activation_extraction"]).parent)
    try:
        folder.mkdir()
    except FileExistsError:
        print("docker: the container name extraction is already in use", file=sys.stderr)
        return 125
    # The shell outlives the signal to its group, to write down the exit status.
    script = 'trap : TERM; "$@" >log 2>&1 & echo $$ >pid; cd "$FOLDER"; wait $!; status=$?\n'
    script += "while kill -0 $! 2>/dev/null; do wait $!; status=$?; done; echo $status >status.part"
    script += "; mv status.part status"
    entry = [str(ROOT / "image/deploy/entrypoint.sh"), *arguments[1:]]
    inside = ["sh", "-c", f'cd "{mounts[work]}" && exec "$@"', "sh", *entry]
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", *inside],
        cwd=folder,
        env=environment | {"FOLDER": str(folder)},
        start_new_session=True,
    )
    while not (folder / "pid").exists() or not (folder / "pid").read_text().strip():
        time.sleep(0.01)
    return 0 if process.poll() in (None, 0) else 1


if __name__ == "__main__":
    calls = os.open(ROOT / "calls.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(calls, (json.dumps(sys.argv[2:]) + "\n").encode())  # at once: calls run in parallel
    sys.exit({"docker": docker, "gcloud": gcloud}[sys.argv[2]](sys.argv[3:]))
