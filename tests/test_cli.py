"""The command line as users meet it: separate processes, Ctrl-C, help."""

import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from command_line import SCRIPT, main, records_of, start
from conftest import rare_but
from small_runs import shard_name

from activation_extraction.cli.flags import FLAGS
from activation_extraction.common.choices import SHARD_FORMATS


@pytest.mark.long
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("shard_format", rare_but(["pickle"], SHARD_FORMATS))
def test_demo_in_a_new_process_reads_back_as_it_says(shard_format, tmp_path):
    process = start("--demo", "--output_dir", tmp_path / "out", "--shard_format", shard_format)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "done: 300 samples" in out and "tokens/s" in out
    scope: dict = {}
    exec(textwrap.dedent(out.split("read it with:\n")[1]), scope)
    dataset = scope["dataset"]
    hooks = [f"blocks.{layer}.hook_resid_post" for layer in (10, 11)]
    assert dataset.hooks == dict.fromkeys(hooks, 128) and len(dataset) == 300
    if shard_format == "pickle":
        records = pickle.loads(gzip.open(tmp_path / "out/shard_0001.pkl.gz").read())
        assert list(records) == [10, 11] and len(records[10]) == 300
        assert (dataset[299][hooks[1]] == records[11][299]["activation"]).all()
    assert (tmp_path / "out" / shard_name(1, shard_format)).exists()
    assert dataset.metadata["status"] == "complete" and dataset.metadata["samples"] == 300


@pytest.mark.long
def test_demo_inputs_are_the_same_bytes_every_time(demo_inputs, tmp_path):
    assert main("--demo", "--max_samples", 1, "--output_dir", tmp_path) == 0
    again = tmp_path / "demo_inputs"
    names = [path.relative_to(again) for path in again.rglob("*") if path.is_file()]
    assert len(names) == 5
    for name in names:
        assert (again / name).read_bytes() == (demo_inputs / name).read_bytes(), name


@pytest.mark.long
def test_ctrl_c_commits_what_is_complete(inputs, texts, tmp_path):
    path = texts([{"text": f"text number {n} " * 20} for n in range(20_000)])
    out = tmp_path / "out"
    process = start(
        *inputs, "--dataset_path", path, "--output_dir", out, "--shard_size_gb", 1e-3, "--verbose"
    )
    while not (out / "shard_0003.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=600)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and printed.startswith("interrupted: ")
    metadata = json.loads((out / "metadata.json").read_text())
    assert metadata["status"] == "interrupted" and metadata["samples"] < 20_000
    assert metadata["samples"] == len(records_of(out)[10]) > 0
    assert not list(out.glob(".*"))


LOOK_FOR_TPU = """
import extract_activations as script
from activation_extraction.model import devices
devices.TPU_FILES = ()  # as if this machine had no accelerator
print("imported")
script.main()
import jax
print(jax.default_backend())
"""


@pytest.mark.long
@pytest.mark.parametrize("sign", ["", "TPU_WORKER_ID"])
def test_libtpu_without_a_tpu_is_left_alone(sign, tmp_path):
    """It prints errors when it looks for a TPU. Where anything shows one, JAX looks for it."""
    (tmp_path / "libtpu").mkdir()
    (tmp_path / "libtpu/__init__.py").write_text(
        "def get_library_path():\n    print('libtpu looks for a TPU')\n    return 'no library'\n"
    )
    # JAX sets some of these itself where a test has compiled for a TPU.
    others = {name: value for name, value in os.environ.items() if not name.startswith("TPU_")}
    others |= {"JAX_PLATFORMS": "", "PYTHONPATH": f"{tmp_path}:{SCRIPT.parent}"}
    flags = ["--demo", "--max_samples", "2", "--output_dir", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-c", LOOK_FOR_TPU, *flags],
        env=others | ({sign: "0"} if sign else {}),
        capture_output=True,
        text=True,
    )
    run = done.stdout.split("imported\n")[1]
    assert ("libtpu looks for a TPU" in run) == bool(sign), done.stderr
    assert run.endswith("cpu\n") and "done: 2 samples" in run


def test_help_tells_every_flag_with_its_default_and_unit(capsys):
    with pytest.raises(SystemExit) as stopped:
        main("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0
    for part in ("model:", "text:", "computing:", "output:", "default: 2048", "10^9 bytes", "GLOB"):
        assert part in text
    for words in ("A turn is one message", "HOST_ID --host_id (with --multihost)", "exit status: "):
        assert words in text
    for name, flag in FLAGS.items():
        assert f"--{name} " in text and " ".join(flag.options["help"].split()) in text


LOADED = """
import gc, sys
from extract_activations import main
assert gc.isenabled() and gc.get_freeze_count() > 100_000  # it is off only during imports
status = main(sys.argv[1:])
print(status, *(name in sys.modules for name in ("transformers", "torch")))
"""


def loaded(*arguments):
    """The last line: the exit status, and whether transformers and PyTorch are loaded."""
    command = [sys.executable, "-c", LOADED, *map(str, arguments)]
    done = subprocess.run(command, cwd=SCRIPT.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1], done.stderr


@pytest.mark.long
def test_looking_does_without_transformers_and_a_run_without_pytorch(inputs, tmp_path):
    """PyTorch is installed here; loading it would take seconds. Nothing is said about it."""
    pytest.importorskip("torch")
    assert loaded("--list_hooks", *inputs[:2]) == ("0 True False", "")
    out = "--output_dir", tmp_path / "out"
    last, log = loaded(*inputs, "--max_samples", 1, *out)
    assert last == "0 True False" and "PyTorch" not in log
    for look in ("--status", "--verify"):
        assert loaded(look, *out)[0] == "0 False False"
