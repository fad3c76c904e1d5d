"""The persistent compilation cache: a second start loads what the first one compiled."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import extract_activations
from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import InputError
from activation_extraction.model import devices
from activation_extraction.model.devices import use_compilation_cache

pytestmark = pytest.mark.long

SCRIPT = Path(extract_activations.__file__)


@pytest.fixture(autouse=True)
def no_cache_of_the_session(monkeypatch):
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.delenv(name)


@pytest.fixture
def extract(demo_inputs, tmp_path):
    """Runs an extraction in a process of its own; returns exit status and log."""

    def run(*flags: object, **variables: object) -> tuple[int, str]:
        command = [sys.executable, SCRIPT, "--model_path", demo_inputs / "model", "--overwrite"]
        command += ["--dataset_path", demo_inputs / "documents.parquet", "--max_samples", "1"]
        command += ["--output_dir", tmp_path / "out", "--max_seq_length", "32", *flags]
        environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "caches")}
        environment |= {name: str(value) for name, value in variables.items()}
        done = subprocess.run(
            list(map(str, command)), env=environment, capture_output=True, text=True
        )
        return done.returncode, done.stderr

    return run


@pytest.fixture
def settings(monkeypatch):
    """What would be set in JAX, which these tests must leave as it is."""
    found: dict[str, object] = {}
    monkeypatch.setattr("jax.config.update", found.__setitem__)
    monkeypatch.setattr(type(jax.config), "values", {"jax_enable_compilation_cache": True})
    return found


def test_the_second_start_does_not_compile(extract, tmp_path):
    cache = tmp_path / "caches" / "activation_extraction" / "jax"
    for expected in (False, True):
        status, log = extract()
        assert status == 0 and ("from the cache" in log) == expected, log
        assert list(cache.glob("jit_apply-*"))
    assert not list((tmp_path / "out").rglob("jit_*"))


def test_a_damaged_cache_is_one_warning(extract, tmp_path):
    flags = ["--compilation_cache", tmp_path / "mine"]
    assert extract(*flags)[0] == 0
    entries = [path for path in (tmp_path / "mine").iterdir() if path.is_file()]
    for path in entries:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    status, log = extract(*flags)
    assert entries and status == 0
    (line,) = [line for line in log.splitlines() if "WARNING" in line]
    assert "Error reading persistent compilation cache entry for 'jit_apply'" in line
    assert "compiled in" in log and "from the cache" not in log
    assert "Traceback" not in log and "UserWarning" not in log


def test_off_keeps_nothing_whatever_the_environment_says(extract, tmp_path):
    for flags in (["--compilation_cache", "off"], []):
        status, log = extract(*flags, JAX_COMPILATION_CACHE_DIR=tmp_path / "of_jax")
        assert status == 0, log
        assert (tmp_path / "of_jax").exists() == (not flags)
    assert not (tmp_path / "caches").exists()


def test_a_folder_that_cannot_be_used_is_refused_when_it_was_asked_for(
    tmp_path, settings, monkeypatch, caplog
):
    monkeypatch.setattr(extract_activations.log, "propagate", True)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    output = ["--output_dir", str(tmp_path / "out")]
    for folder, problem in ((tmp_path / "file" / "x", "Not a dir"), (tmp_path / "out", "within")):
        config = parse_args([*output, "--compilation_cache", str(folder)])
        with pytest.raises(InputError, match=f"--compilation_cache {folder}: .*{problem}"):
            use_compilation_cache(config.compilation_cache, Path(config.output_dir), several=False)
    use_compilation_cache(None, tmp_path / "out", several=False)
    assert settings == {"jax_enable_compilation_cache": False}
    assert "nothing is kept for the next start" in caplog.text


def test_several_hosts_use_a_cache_only_when_it_is_given(tmp_path, settings):
    use_compilation_cache(None, Path("out"), several=True)
    assert settings == {"jax_enable_compilation_cache": False}
    use_compilation_cache("gs://bucket/jax", Path("out"), several=True)
    assert settings["jax_compilation_cache_dir"] == "gs://bucket/jax"
    assert settings["jax_enable_compilation_cache"]


def test_an_option_that_the_compiler_does_not_know_is_left_out(monkeypatch, caplog):
    monkeypatch.setitem(devices.COMPILER_OPTIONS, "cpu", {"xla_no_such_option": True})
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    assert devices.compile_with_options(lowered, "cpu")(1.0) == 2
    assert "No such compile option: 'xla_no_such_option'" in caplog.text
