"""What a run that fails says: what has to change, and the traceback of what nobody expected."""

import shutil

import jax
import numpy as np
import pytest
from command_line import main
from pods import flags_for
from safetensors.numpy import load_file, save_file

from activation_extraction.cli.console import Progress
from activation_extraction.common.errors import RunError, StorageError
from activation_extraction.model.devices import device_errors
from activation_extraction.store.formats import ShardFormat
from activation_extraction.store.storage import ActivationStorage
from qwen2_jax_with_hooks import HookedQwen2

DEFECTS = (Progress, "advance"), (HookedQwen2, "flops"), (Progress, "close"), (ShardFormat, "pack")


@pytest.fixture
def failing(demo_inputs, tmp_path, capsys):
    """Runs with more flags, has to fail, and returns what was printed to stderr."""

    def run(*more):
        flags = flags_for(demo_inputs, tmp_path / "out", "--max_samples", 6, *more)
        assert main(*flags) == 1
        return capsys.readouterr().err

    return run


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_has_its_traceback_and_is_no_failure_of_the_storage(failing, monkeypatch, defect):
    monkeypatch.setattr(*defect, lambda *_: 1 // 0)
    printed = failing("--mesh_type", "2d")  # `auto` needs the operations before the run begins
    assert "in <lambda>" in printed and "StorageError" not in printed
    last = printed.splitlines()[-1]
    assert last.startswith("error: unexpected ZeroDivisionError: ") and ". Stored in " in last
    assert last.endswith("; this is a bug in this program; its traceback is above")


def test_weights_of_nan_are_to_be_changed(failing, demo_inputs, tmp_path):
    shutil.copytree(demo_inputs / "model", tmp_path / "model")
    path = tmp_path / "model/model.safetensors"
    weights = load_file(path)
    weights["model.layers.2.input_layernorm.weight"][:] = np.nan
    save_file(weights, path, metadata={"format": "pt"})
    last = failing("--model_path", tmp_path / "model").splitlines()[-1]
    assert "hook 3: NaN or infinite float32 values. Stored in " in last
    assert "check its weights" in last and "the same command" not in last


@pytest.mark.parametrize(
    "said,remedy", [("RESOURCE_EXHAUSTED: no memory\n left", True), ("INTERNAL: a ray", False)]
)
def test_what_does_not_fit_in_memory_asks_for_a_smaller_batch(said, remedy):
    with pytest.raises(RunError, match=f"the device failed: {said.split(':')[0]}") as raised:
        with device_errors():
            raise jax.errors.JaxRuntimeError(said)
    assert ("--batch_size" in (raised.value.remedy or "")) == remedy


def test_a_platform_that_jax_does_not_have_is_bad_input(demo_inputs, tmp_path, monkeypatch, capsys):
    def unknown():
        raise RuntimeError("Unable to initialize\nbackend 'nonsense'")

    monkeypatch.setattr(jax, "devices", unknown)
    assert main(*flags_for(demo_inputs, tmp_path / "out")) == 2
    expected = "error: JAX finds no devices (JAX_PLATFORMS, drivers): Unable to initialize backend"
    assert capsys.readouterr().err.splitlines()[-1].startswith(expected)


@pytest.mark.parametrize(
    "error,told",
    [
        (MemoryError("for a moment"), "out of memory on the host: for a moment"),
        (StorageError("no room"), "to continue, run the same command again without --overwrite"),
    ],
)
def test_nothing_is_stored_after_a_batch_that_could_not_be(failing, monkeypatch, error, told):
    """The next ones could move the mark past it, and its samples would be lost."""
    asked, add_batch = [], ActivationStorage.add_batch

    def fail_once(*given):
        asked.append(given)
        if len(asked) == 2:
            raise error
        add_batch(*given)

    monkeypatch.setattr(ActivationStorage, "add_batch", fail_once)
    last = failing("--max_samples", 200, "--batch_size", 8, "--overwrite").splitlines()[-1]
    assert told in last and len(asked) == 2
