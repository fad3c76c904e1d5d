"""Every record has the name of its hook; what older versions wrote is read, and not mixed."""

import json
import pickle

import pytest
from command_line import main
from extractions import HOOKS, edit, extract, load
from pods import flags_for

from activation_extraction import ActivationDataset
from activation_extraction.common.errors import InputError
from activation_extraction.run import demo
from activation_extraction.store.pickle_file import pieces_of, read_records
from qwen2_jax import Qwen2, weight_table
from qwen2_jax_with_hooks import FAMILIES


@pytest.mark.long
def test_records_have_the_full_name_of_their_hook(demo_inputs, tmp_path, capsys):
    flags = flags_for(demo_inputs, tmp_path, "--max_samples", 2, "--activation_type", "mlp")
    assert main(*flags) == 0
    shard = read_records(tmp_path / "shard_0001.pkl.gz", 10**8)
    for layer, records in shard.items():
        assert [record["hook"] for record in records] == [f"blocks.{layer}.hook_mlp_out"] * 2
    log = capsys.readouterr().err
    hooks = "blocks.1.hook_mlp_out, blocks.3.hook_mlp_out"
    assert f"hooks: {hooks}; width 128 each, in float32: 1,024 bytes per token\n" in log
    assert "clipped" not in log


@pytest.mark.long
def test_clipped_default_layers_are_told(texts, tmp_path, capsys):
    """A model of six layers has none of the default ones: its last layer is taken."""
    config = {**demo.MODEL_CONFIG, "num_hidden_layers": 6}
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    demo.write_tokenizer(model, [])
    weights = weight_table(Qwen2(FAMILIES.config(config))).values()
    demo.write_weights(model / "model.safetensors", weights)
    flags = ["--model_path", model, "--dataset_path", texts([{"text": "one"}])]
    flags += ["--output_dir", tmp_path / "out", "--max_seq_length", 16]
    assert main(*flags) == 0
    log = capsys.readouterr().err
    assert "the default layers, 10 to 23, are clipped: the model has layers 0 to 5\n" in log
    assert "hooks: blocks.5.hook_resid_post; width 128" in log
    for typed, layers in ((["all"], range(6)), (["4-5", "0"], (0, 4, 5))):
        out = tmp_path / typed[0]
        flags[flags.index("--output_dir") + 1] = out
        more = [*map(str, flags), "--layers_to_extract", *typed]
        assert main(*more) == 0
        names = [f"blocks.{layer}.hook_resid_post" for layer in layers]
        assert list(ActivationDataset(out).hooks) == names


def test_the_name_takes_few_bytes(tmp_path):
    """pickle writes a string that is the same object once."""

    def size_of(shard):
        path = tmp_path / "pickle"
        with open(path, "wb") as file:
            file.writelines(pieces_of(shard))
        return path.stat().st_size

    storage = extract(tmp_path / "out", count=300, shard_size_gb=1)
    shard = load(storage.folder, 1)
    named = size_of(shard)
    with open(tmp_path / "pickle", "rb") as file:
        assert pickle.load(file)[3][299]["hook"] == HOOKS[3]
    for records in shard.values():
        for record in records:
            del record["hook"]
    assert named - size_of(shard) < 600 * 11 + 200


def test_what_an_older_version_began_is_not_continued(tmp_path):
    extract(tmp_path)
    for path in tmp_path.glob("*.json"):
        edit(path, lambda content: content.update(format_version=2))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError, match="another version of this program; continue it with"):
        extract(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    extract(tmp_path, overwrite=True)
    assert load(tmp_path, 1)[3][0]["hook"] == HOOKS[3]


def test_machines_of_other_versions_are_not_mixed(demo_inputs, tmp_path, capsys):
    flags = flags_for(demo_inputs, tmp_path / "out", "--max_samples", 2)
    flags += ["--total_machines", "2"]
    assert main(*flags) == 0
    metadata = tmp_path / "out/machine_000/metadata.json"
    edit(metadata, lambda content: content.update(format_version=2))
    assert main(*flags, "--machine_id", "1") == 2
    assert "machine_000: holds an extraction in format 2" in capsys.readouterr().err
