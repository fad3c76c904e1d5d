"""The persistent compilation cache: a second start loads what the first one compiled."""

from pathlib import Path

import jax
import pytest
from command_line import start
from pods import flags_for

from activation_extraction.common.errors import InputError
from activation_extraction.model.compilation import use_compilation_cache

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def no_cache_of_the_session(monkeypatch):
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.delenv(name)


@pytest.fixture
def extract(demo_inputs, tmp_path):
    """Runs an extraction in a process of its own; returns its log."""

    def run(*flags, **variables):
        flags = [*flags, "--max_samples", 1, "--max_seq_length", 32, "--overwrite"]
        variables |= {"XDG_CACHE_HOME": tmp_path / "caches"}
        environment = {name: str(value) for name, value in variables.items()}
        process = start(*flags_for(demo_inputs, tmp_path / "out", *flags), environment=environment)
        log = process.communicate()[1]
        assert process.returncode == 0, log
        return log

    return run


@pytest.fixture
def settings(monkeypatch):
    """What would be set in JAX, which these tests must leave as it is."""
    found: dict[str, object] = {}
    monkeypatch.setattr("jax.config.update", found.__setitem__)
    monkeypatch.setattr(type(jax.config), "values", {"jax_enable_compilation_cache": True})
    return found


def test_the_second_start_does_not_compile_and_a_damaged_cache_is_one_warning(extract, tmp_path):
    cache = tmp_path / "caches" / "activation_extraction" / "jax"
    for expected in (False, True):
        assert ("from the cache" in extract()) == expected
        assert list(cache.glob("jit_apply-*"))
    assert not list((tmp_path / "out").rglob("jit_*"))
    for path in filter(Path.is_file, cache.iterdir()):
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    log = extract("--compilation_cache", cache)
    (line,) = [line for line in log.splitlines() if "WARNING" in line]
    assert "Error reading persistent compilation cache entry for 'jit_apply'" in line
    assert "compiled in" in log and "from the cache" not in log
    assert "Traceback" not in log and "UserWarning" not in log


def test_a_folder_that_cannot_be_used_is_refused(tmp_path, settings):
    (tmp_path / "file").write_text("")
    for folder, problem in ((tmp_path / "file" / "x", "Not a dir"), (tmp_path / "out", "within")):
        with pytest.raises(InputError, match=f"--compilation_cache {folder}: .*{problem}"):
            use_compilation_cache(str(folder), tmp_path / "out", several_hosts=False)
    assert not settings


@pytest.mark.parametrize("given", [None, "gs://bucket/jax"])
def test_several_hosts_use_a_cache_only_when_it_is_given(given, settings):
    use_compilation_cache(given, Path("out"), several_hosts=True)
    found = settings["jax_enable_compilation_cache"], settings.get("jax_compilation_cache_dir")
    assert found == (given is not None, given)
