"""What an output holds already: the same run's, which is continued, or another's, which is refused
by the name of the field, and with --overwrite replaced."""

import json
import shutil
from dataclasses import fields, replace

import numpy as np
import pytest
from command_line import main, records_of
from pods import flags_for, rounding_of_run
from small_runs import set_status
from storages import open_storage

from activation_extraction.common.errors import InputError
from activation_extraction.store.commit import DamagedError
from activation_extraction.store.identity import Difference, Identity
from activation_extraction.store.metadata import identity_of
from activation_extraction.store.resume import refuse_difference

ONE = Identity(
    model_digest="1" * 64,
    data="files",
    hooks=("blocks.1.hook_mlp_out", "blocks.2.hook_mlp_out"),
    activation_dtype="float16",
    total_machines=2,
    num_hosts=2,
    machine=1,
)


def other(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    return value + (("x",) if isinstance(value, tuple) else "x" if isinstance(value, str) else 1)


@pytest.mark.parametrize("name", [each.name for each in fields(Identity)])
def test_every_field_is_recorded_and_compared(name):
    changed = replace(ONE, **{name: other(getattr(ONE, name))})
    assert Identity.from_json(json.loads(json.dumps(changed.to_json()))) == changed
    expected = Difference(name, getattr(ONE, name), getattr(changed, name))
    per_host, turned_on = name in ("machine", "host", "num_hosts"), name == "skip_bad_rows"
    assert changed.compare(ONE) == (None if turned_on else expected)
    assert ONE.compare(changed) == Difference(name, expected.now, expected.before)
    ignored = turned_on or per_host
    assert changed.compare(ONE, shared_only=True) == (None if ignored else expected)
    assert (name in ONE.shared) == (not ignored)


def test_of_long_lists_a_message_names_what_differs():
    hooks = tuple(f"blocks.{layer}.hook_resid_post" for layer in range(12))
    found = Difference("hooks", hooks, hooks[1:])
    with pytest.raises(InputError, match=r"hooks: blocks\.0\.hook_resid_post, now nothing;"):
        refuse_difference("out", found)
    with pytest.raises(InputError, match=r"blocks\.3\.hook_resid_post \.\.\., now blocks\.11\."):
        refuse_difference("out", Difference("hooks", hooks, hooks[::-1]))


def test_whether_every_token_is_kept():
    whole = {"shard_format": "safetensors", "mask_column": "attention_mask"}  # zeros are padding
    assert replace(ONE, **whole).every_token
    some = {"mask_column": "mask", "positions": "last", "drop_token_ids": (5,), "roles": ("user",)}
    for name, value in (some | {"overlap": 3}).items():
        assert not replace(ONE, **{name: value}).every_token, name


@pytest.mark.parametrize("content", [{"colour": "red"}, [], None, {"hooks": 3}])
def test_what_this_version_does_not_know_is_damaged(content):
    with pytest.raises(DamagedError, match="out/metadata.json: its identity: cannot be read"):
        identity_of({"identity": content}, "out/metadata.json")


REFUSED = {
    "max_seq_length": ["--max_seq_length", "48"],
    "hooks": ["--layers_to_extract", "1", "2"],
    "hooks ": ["--activation_type", "mlp"],
    "keyed_by": ["--hook_names", "blocks.1.hook_resid_post", "blocks.3.hook_resid_post"],
    "dtype": ["--dtype", "bfloat16"],
    "activation_dtype": ["--activation_dtype", "float16"],
    "shard_size_gb": ["--shard_size_gb", "0.001"],
    "compress_shards": ["--no_compress_shards"],
    "shard_format": ["--shard_format", "safetensors"],
    "positions": ["--positions", "last"],
    "drop_token_ids": ["--drop_token_ids", "3"],
    "model_digest": ["--model_path", "other_model"],
    "tokenizer_digest": ["--model_path", "other_tokenizer"],
    "text_column": ["--text_column", "id"],
    "shuffle_documents": ["--shuffle_documents", "0"],
}
LAYERS = ["--layers_to_extract", "1", "3"]


@pytest.fixture(scope="module")
def started(demo_inputs, tmp_path_factory):
    """An extraction of the demo's inputs, and inputs that differ in one thing each."""
    folder = tmp_path_factory.mktemp("started")
    flags = ["--model_path", demo_inputs / "model", "--max_seq_length", 64, "--max_samples", 40]
    flags += ["--dataset_path", demo_inputs / "documents.parquet", "--shard_size_gb", 0.0005]
    assert main(*flags, "--output_dir", folder / "out", *LAYERS) == 0
    for name in ("other_model", "other_tokenizer"):
        shutil.copytree(demo_inputs / "model", folder / name)
    weights = bytearray((folder / "other_model/model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "other_model/model.safetensors").write_bytes(weights)
    (folder / "other_tokenizer/tokenizer_config.json").write_text("{}")
    return folder, [*flags, "--output_dir"]


@pytest.mark.parametrize("field", REFUSED)
def test_a_changed_request_is_refused_naming_the_field(started, capsys, field, monkeypatch):
    folder, flags = started
    monkeypatch.chdir(folder)
    before = {p.name: p.read_bytes() for p in (folder / "out").iterdir()}
    changed = REFUSED[field]
    layers = [] if {"--layers_to_extract", "--hook_names"} & {*changed} else LAYERS
    assert main(*flags, folder / "out", *layers, *changed) == 2
    error = capsys.readouterr().err
    assert f"already holds an extraction that differs in {field.strip()}: " in error
    assert {p.name: p.read_bytes() for p in (folder / "out").iterdir()} == before


@pytest.mark.long
def test_what_does_not_change_the_contents_may_change(demo_inputs, started, tmp_path):
    """Batch size and mesh, halfway: same samples, same values within rounding."""
    folder, flags = started
    out = shutil.copytree(folder / "out", tmp_path / "out")
    for path in out.glob("shard_000[3-9]*"):
        path.unlink()
    set_status(out, "running")
    assert main(*flags, out, *LAYERS, "--batch_size", "4", "--mesh_shape", "2,4") == 0
    allowed = rounding_of_run(folder / "out", demo_inputs / "model")
    first, second = records_of(folder / "out"), records_of(out)
    for key in first:
        for before, after in zip(first[key], second[key], strict=True):
            assert before["sample_idx"] == after["sample_idx"]
            error = np.abs(before["activation"] - after["activation"]).max()
            assert error <= allowed[key]


def test_machines_of_one_output_must_agree(started, tmp_path, capsys):
    flags = [*started[1], tmp_path / "out", *LAYERS, "--max_samples", "5", "--total_machines"]
    assert main(*flags, "2") == 0
    for changed, told in (
        (["2", "--dtype", "bfloat16"], "in dtype: float32, now bfloat16"),
        (["3"], "in total_machines: 2, now 3"),
    ):
        assert main(*flags, *changed, "--machine_id", "1") == 2
        told = f"machine_000: already holds an extraction that differs {told}"
        assert told in capsys.readouterr().err
    assert main(*flags, "2", "--machine_id", "1") == 0


def test_overwrite_spares_what_another_process_writes(demo_inputs, tmp_path, capsys):
    out = tmp_path / "out"
    flags = flags_for(demo_inputs, out, "--max_samples", 6, "--overwrite")
    with open_storage(out, {0: "hook"}) as storage:
        storage.add_activation(0, np.zeros((2, 3), np.float32), 0, "")
        assert main(*flags) == 1
        assert "another process is writing to it" in capsys.readouterr().err
    assert (out / "shard_0001.pkl.gz").exists()
