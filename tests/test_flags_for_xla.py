"""What whoever starts the tests asks of XLA holds in all of their processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

SESSION = """
import importlib, os
import conftest, forks
import jax

importlib.reload(conftest)  # a worker of pytest-xdist finds what the controller has made of them
print(os.environ["XLA_FLAGS"], conftest.AS_IN_A_RUN["XLA_FLAGS"], sep="\\n")
jax.jit(lambda x: 2 * x)(1.0)
command = [os.path.join(os.path.dirname(__file__), "fork.py")]
assert forks.start(command, os.environ | conftest.AS_IN_A_RUN, 2).wait(300) == 0
conftest.pytest_unconfigure()
"""
FORK = """
import jax

def in_a_fork(x):
    return 2 * x

jax.jit(in_a_fork)(1.0)
"""


@pytest.mark.long
def test_flags_of_the_caller_reach_tests_their_workers_and_forks(tmp_path):
    """XLA itself says so: it writes what it compiles to a folder that a flag names."""
    (tmp_path / "session.py").write_text(SESSION)
    (tmp_path / "fork.py").write_text(FORK)
    asked = f"--xla_cpu_max_isa=AVX2 --xla_dump_to={tmp_path / 'dump'}"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"XLA_FLAGS": asked, "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    result = subprocess.run(
        [sys.executable, tmp_path / "session.py"], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    of_tests, as_in_a_run = result.stdout.splitlines()
    assert as_in_a_run == asked
    assert of_tests.endswith(f" {asked}") and of_tests.count(asked) == 1
    assert "--xla_cpu_use_fusion_emitters=false" in of_tests
    compiled = {path.name.split(".")[1] for path in (tmp_path / "dump").iterdir()}
    assert {"jit__lambda", "jit_in_a_fork"} <= compiled
