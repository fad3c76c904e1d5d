"""Runs the tool as a user does, reads what it has stored, and checks how it refuses bad input."""

import gzip
import os
import pickle
import subprocess
import sys
from pathlib import Path

import extract_activations
from activation_extraction import __main__ as command

SCRIPT = Path(extract_activations.__file__)


def main(*arguments):
    """Runs the tool in this process, which is faster than a new one; returns the exit status."""
    return command.main([str(argument) for argument in arguments])


# A command that replaces itself by the command in its arguments, with the default actions of
# signals. Without it, a process would ignore the signals that the tests ignore, such as that of
# Ctrl-C after `nohup make test &`.
WITH_SIGNALS = [
    sys.executable,
    "-S",
    "-c",
    "import os, signal, sys\n"
    "for number in (signal.SIGINT, signal.SIGTERM):\n"
    "    signal.signal(number, signal.SIG_DFL)\n"
    "os.execvp(sys.argv[1], sys.argv[1:])",
]


def start(*arguments, environment=None, **options):
    return subprocess.Popen(
        [*WITH_SIGNALS, sys.executable, str(SCRIPT), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"} | (environment or {}),
        **options,
    )


def records_of(folder):
    """Returns all records of an extraction: key -> list, in the order of the shards."""
    records_by_key = {}
    for path in sorted(folder.glob("shard_*.pkl.gz")):
        for key, records in pickle.load(gzip.open(path)).items():
            records_by_key.setdefault(key, []).extend(records)
    return records_by_key


def assert_refused(capsys, tmp_path, arguments, text):
    """Asserts that the tool refuses its input.

    It must end with status 2, print one line to stderr that contains `text`, and write nothing.
    """
    if "--output_dir" not in arguments:
        arguments = [*arguments, "--output_dir", tmp_path / "new" / "out"]
    before = sorted(tmp_path.rglob("*"))
    assert main(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    assert text in err
    assert sorted(tmp_path.rglob("*")) == before
