"""Real trainers of autoencoders learn from what is read or exported: their losses fall. What
their own code computes with an autoencoder is what --encode stores.

trainer_scripts.py has their environment.
"""

import json

import autoencoder_files as made
import ml_dtypes
import numpy as np
import pytest
from storages import open_storage
from test_autoencoders import assert_codes, encoded
from trainer_scripts import MARKS, run_script

from activation_extraction.cli.flags import StorageOptions
from activation_extraction.inspect.export import export
from activation_extraction.inspect.sae_lens_files import SaeLensFormat
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Identity

pytestmark = MARKS
HOOK = "blocks.5.hook_resid_post"
TOKENS, WIDTH, FEATURES, SAMPLES = 128, 32, 64, 1600


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run, `activations`, of few features at a time."""
    folder = tmp_path_factory.mktemp("trainers")
    chance = np.random.default_rng(0)
    directions = chance.standard_normal((FEATURES, WIDTH))
    stored = Identity(activation_dtype="bfloat16", storage=StorageOptions(5e-3))
    with open_storage(
        folder / "activations", {5: HOOK}, identity=stored, shard_size_gb=5e-3
    ) as storage:
        for number in range(SAMPLES):
            active = chance.random((TOKENS, FEATURES)) < 0.05
            values = (active * chance.random(active.shape)) @ directions
            storage.add_activation(
                5, values.astype(ml_dtypes.bfloat16), number, "", np.arange(TOKENS)
            )
    return folder


@pytest.mark.parametrize("trainer", ["sae_lens", "dictionary_learning", "sae_lens_cached"])
def test_the_loss_falls(trainer, folder, tmp_path):
    (tmp_path / "activations").symlink_to(folder / "activations")
    if trainer == "sae_lens_cached":  # the others read the run
        run_folder = Folder(str(folder / "activations"))
        export(run_folder, SaeLensFormat(), str(tmp_path / "export"), None)
    losses = json.loads(run_script("train.py", trainer, folder=tmp_path).splitlines()[-1])
    assert len(losses) >= 80 and np.isfinite(losses).all()
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10]), losses


def test_codes_are_those_of_publishers_own_code(tmp_path):
    run_script("autoencoders.py", str(made.D), str(made.F), folder=tmp_path)
    expected = np.load(tmp_path / "expected.npz")
    x, names = expected["x"], {name.rpartition("/")[0] for name in expected.files} - {""}
    assert len(names) == 17
    for name in names:
        transcodes = any(word in name for word in ("transcoder", "mlp", "layer_"))
        target = np.zeros_like(x) if transcodes else x
        _, codes = encoded(str(tmp_path / name), x, target, most=made.F)
        features, result = (expected[f"{name}/{part}"] for part in ("features", "result"))
        assert_codes(codes, features, result, target)
