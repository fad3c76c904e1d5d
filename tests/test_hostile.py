"""Numbers and names that somebody wrote to exhaust or to mislead who reads them. test_shards.py has
those in pickles."""

import json
import shutil
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from command_line import main
from extractions import HOOKS, edit, extract
from runs_to_read import FORMATS
from storages import open_storage

from activation_extraction.common.errors import InputError
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.family import complete
from activation_extraction.store.safetensors_file import Tensor

HUGE = 10**11
JSONS = {
    "shards": ("metadata.json", lambda content: content.update(shards=HUGE)),
    "last": ("shard_0004.json", lambda content: content["samples"].update(last=HUGE)),
    "width": ("shard_0004.json", lambda content: content["hooks"][0].update(width=HUGE)),
    "unpacked": ("shard_0004.json", lambda content: content.update(unpacked=2**60)),
}
LOOK = """
import resource, sys, extract_activations
resource.setrlimit(resource.RLIMIT_AS, (6 * 2**30,) * 2)
for folder in sys.argv[1:]:
    for action in ("--status", "--verify"):
        assert extract_activations.main([action, "--output_dir", folder]) in (0, 1)
"""
WIDE = {"hook_facts": {key: {"width": 16} for key in HOOKS}}


def test_a_number_takes_no_memory_before_it_is_checked(tmp_path):
    extract(tmp_path / "whole", **WIDE)
    for name, (file, change) in JSONS.items():
        shutil.copytree(tmp_path / "whole", tmp_path / name)
        edit(tmp_path / name / file, change)
    command = [sys.executable, "-c", LOOK, *(str(tmp_path / name) for name in JSONS)]
    child = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0 and "Traceback" not in child.stderr, child.stderr


@pytest.mark.parametrize("shard_format", FORMATS)
def test_a_width_that_no_file_has_room_for_is_refused_before_any_is_read(shard_format, tmp_path):
    extract(tmp_path, **WIDE, shard_format=shard_format)
    edit(tmp_path / "metadata.json", lambda content: content["hooks"][0].update(width=2**27))
    with pytest.raises(ValueError, match=r"shard_0001\..*: 30 tokens of \d+ bytes cannot be in"):
        ActivationDataset(tmp_path)


@pytest.mark.parametrize("shard_format", FORMATS)
def test_batches_take_no_more_memory_than_there_are_tokens(shard_format, tmp_path):
    extract(tmp_path, **WIDE, shard_format=shard_format)
    dataset = ActivationDataset(tmp_path)
    tracemalloc.start()
    try:
        found = list(dataset.batches(10**6, shuffle=0, skip_first=9))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(map(len, found)) == 10 and peak < 10**7


@pytest.mark.parametrize("offsets", [[-8, 0], [0.0, 8], ["0", 8], [True, 9], [0]])
def test_the_offsets_of_a_tensor_are_whole_numbers_from_0_on(offsets):
    with pytest.raises((ValueError, TypeError)):
        Tensor.from_json({"dtype": "F32", "shape": [2], "data_offsets": offsets}, 16)


@pytest.mark.parametrize("name", ["../../x.safetensors", "/x.safetensors", "a\\b", "gs://x", "", 7])
def test_weights_lie_in_the_folder_of_their_index(name, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    index = {"weight_map": {"a": "model-1.safetensors", "lm_head.weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="weight_map: .* for 'lm_head.weight'"):
        _ = Checkpoint(str(tmp_path)).file_of_tensor


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_an_absurd_size_is_refused_before_anything_is_made_of_it(field):
    for sizes in ({field: 10**12}, {"text_config": {field: 10**12}}):
        with pytest.raises(InputError, match=f"^config.json: {field} is 1e[+]12, expected at most"):
            complete({"model_type": "qwen3", **sizes}, "config.json")


@pytest.mark.parametrize("form", ["memmap", "llamascopium", "sae_lens"])
@pytest.mark.parametrize("name", ["../escaped", "/tmp/escaped", ".."])
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
