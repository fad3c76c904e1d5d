"""Numbers and names that would exhaust or mislead who reads them. test_shards.py has pickles."""

import json
import tracemalloc

import numpy as np
import pytest
from command_line import main
from extractions import HOOKS, extract
from storages import open_storage

from activation_extraction.common.errors import InputError
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.model.checkpoint import Checkpoint


def test_batches_take_no_more_memory_than_there_are_tokens(tmp_path):
    extract(tmp_path, hook_facts={key: {"width": 16} for key in HOOKS})
    dataset = ActivationDataset(tmp_path)
    tracemalloc.start()
    try:
        found = list(dataset.batches(10**6, shuffle=0, skip_first=9))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(map(len, found)) == 10 and peak < 10**7


@pytest.mark.parametrize("name", ["../../x.safetensors", "/x.safetensors", "gs://x", 7])
def test_weights_lie_in_the_folder_of_their_index(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "lm_head.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="weight_map: .* for 'lm_head.weight'"):
        _ = Checkpoint(str(tmp_path)).file_of_tensor


@pytest.mark.parametrize("form", ["memmap", "llamascopium", "sae_lens"])
@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped"])
def test_names_of_hooks_are_no_paths(name, form, tmp_path, capsys):
    """The export writes nothing, in its folder or elsewhere."""
    with open_storage(tmp_path / "run", {1: name}) as storage:
        for number in range(10):
            values = np.zeros((20, 4), np.float32)
            storage.add_activation(1, values, number, "", np.arange(20, dtype=np.int32))
    flags = "--export_dir", tmp_path / "out/copy", "--output_dir", tmp_path / "run"
    assert main("--export", form, *flags) == 2
    assert "cannot name a folder" in capsys.readouterr().err
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and "run" not in path.parts]
