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
@pytest.mark.parametrize("look", ["--status", "--verify"])
def test_looking_at_what_is_stored_does_without_transformers(look, tmp_path):
    assert run(look, "--output_dir", tmp_path)[0].split()[1:] == ["False", "False"]


@pytest.mark.long
def test_a_model_is_read_by_transformers_without_pytorch(demo_inputs, tmp_path):
    """PyTorch is installed here; loading it would take seconds. Nothing is said about it."""
    pytest.importorskip("torch")
    model = ["--model_path", demo_inputs / "model"]
    assert run("--list_hooks", *model) == ("0 True False", "")
    flags = ["--dataset_path", demo_inputs / "documents.parquet", "--max_samples", 1]
    out, log = run(*model, *flags, "--max_seq_length", 32, "--output_dir", tmp_path / "out")
    assert out == "0 True False" and "PyTorch" not in log
