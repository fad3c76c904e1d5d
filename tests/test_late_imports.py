"""What is imported only where it is needed, in processes of their own."""

import subprocess
import sys

import pytest
from cloud import REPOSITORY

RUN = """
import gc, sys
from extract_activations import main
assert gc.isenabled() and gc.get_freeze_count() > 100_000  # it is off only during imports
status = main(sys.argv[1:])
print(status, *(name in sys.modules for name in ("transformers", "torch")))
"""


def run(*arguments):
    """The last line: the exit status, and whether transformers and PyTorch are loaded."""
    command = [sys.executable, "-c", RUN, *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1], done.stderr


@pytest.mark.long
def test_looking_does_without_transformers_and_a_run_without_pytorch(inputs, tmp_path):
    """PyTorch is installed here; loading it would take seconds. Nothing is said about it."""
    pytest.importorskip("torch")
    assert run("--list_hooks", *inputs[:2]) == ("0 True False", "")
    out = "--output_dir", tmp_path / "out"
    last, log = run(*inputs, "--max_samples", 1, *out)
    assert last == "0 True False" and "PyTorch" not in log
    for look in ("--status", "--verify"):
        assert run(look, *out)[0] == "0 False False"
