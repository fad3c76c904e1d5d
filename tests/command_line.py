"""The tool as a test calls it, what it stored, and how it refuses."""

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
    """Runs in this process (quicker than a new one); the exit status."""
    return command.main([str(argument) for argument in arguments])


# Becomes another command, in which signals do what they do by default. Whoever starts the tests may
# have them ignored, as `nohup make test &` has Ctrl-C, and children would inherit that.
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
    """Every record of an extraction: key -> list, shards in order."""
    found = {}
    for path in sorted(folder.glob("shard_*.pkl.gz")):
        for key, records in pickle.load(gzip.open(path)).items():
            found.setdefault(key, []).extend(records)
    return found


def assert_refused(capsys, tmp_path, arguments, named):
    """Status 2, one line on stderr that holds `named`, nothing written."""
    if "--output_dir" not in arguments:
        arguments = [*arguments, "--output_dir", tmp_path / "new" / "out"]
    before = sorted(tmp_path.rglob("*"))
    assert main(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    assert named in err
    assert sorted(tmp_path.rglob("*")) == before
