"""What an output holds already: the same run's, which is continued, or another's, which is refused
by the name of the field. Nothing of what a run reads, and of what its flags ask, is forgotten.
Digests of a model at a URL are tested in test_weights.py."""

import hashlib
import json
import os
import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import main, records_of
from extractions import flip
from pods import flags_for, rounding_of_run
from small_runs import set_status
from storages import open_storage

from activation_extraction.cli.config import parse_args
from activation_extraction.cli.flags import EXTRACT, FLAGS, MODEL, TEXT, TOKENS, Config
from activation_extraction.common.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run.digests import model_digest
from activation_extraction.run.inputs import INPUTS, settings_of
from activation_extraction.run.recompute import load_for_recomputing
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Difference, Identity
from activation_extraction.store.run_log import read_metadata
from activation_extraction.text.batch import Worker

ONE = Identity(
    model_digest="1" * 64,
    data="files",
    hooks=("blocks.1.hook_mlp_out", "blocks.2.hook_mlp_out"),
    activation_dtype="float16",
    worker=Worker(machine_number=1, num_machines=2, num_hosts=2),
)
# Values of fields of which not any text is a value.
OTHERS = {"positions": "last:2", "shuffle_documents": "7"}


def other(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    return value + (["x"] if isinstance(value, list) else "x" if isinstance(value, str) else 1)


@pytest.mark.parametrize("name", ONE.to_json())
def test_every_field_is_recorded_and_compared(name):
    before = ONE.to_json()
    now = OTHERS.get(name) or other(before[name])
    changed = Identity.from_json(json.loads(json.dumps({**before, name: now})))
    assert changed.to_json() == {**before, name: now} and changed != ONE
    assert (changed.digest != ONE.digest) == (name != "skip_bad_rows")
    expected = Difference(name, before[name], now)
    per_host, turned_on = name in ("machine", "host", "num_hosts"), name == "skip_bad_rows"
    assert changed.compare(ONE) == (None if turned_on else expected)
    assert ONE.compare(changed) == Difference(
        name, expected.value_in_second_identity, expected.value_in_first_identity
    )
    ignored = turned_on or per_host
    assert changed.compare(ONE, shared_only=True) == (None if ignored else expected)
    assert (name in ONE.shared) == (not ignored)


def test_every_flag_that_decides_content_is_in_the_identity():
    content = {name for name, flag in FLAGS.items() if flag.determines_shards}
    assert content < ONE.to_json().keys()
    assert Identity.from_json(ONE.to_json()) == ONE
    elsewhere = replace(ONE.text, dataset_path="moved.jsonl", chat_template="t.jinja")
    assert replace(ONE, text=elsewhere, storage=replace(ONE.storage, overwrite=True)) == ONE


@pytest.mark.parametrize("content", [{"unknown": 1}, {"positions": "unknown"}])
def test_a_field_of_a_later_version_is_refused(content):
    with pytest.raises((TypeError, ValueError), match="unknown"):
        Identity.from_json(content)


KEPT_RUNS = Path(__file__).parent / "kept_runs.zip"


@pytest.mark.parametrize("run", ["pickle", "safetensors", "codes", "float8"])
def test_the_identity_of_a_kept_run_is_the_same_now_and_has_the_same_digest(run):
    with zipfile.ZipFile(KEPT_RUNS) as kept:
        recorded = json.loads(kept.read(f"{run}/metadata.json"))["identity"]
    identity = Identity.from_json(recorded)
    assert identity.to_json() == recorded
    del recorded["skip_bad_rows"]  # it may be turned on
    content = json.dumps(recorded, sort_keys=True).encode()
    assert identity.digest == hashlib.sha256(content).hexdigest()


# Groups of flags about content, and those among them that the identity does not have as they are.
ABOUT_CONTENT = {MODEL, EXTRACT, TOKENS, TEXT}
AS_HOOKS = {"layers_to_extract", "activation_type", "hook_names", "keep_activations"}
NOT_CONTENT = {"list_hooks", "max_samples", "max_tokens"}


def test_every_flag_about_content_belongs_to_an_input_or_to_the_identity():
    """All hosts compare the flags of inputs, but for their paths."""
    about_content = {name for name, flag in FLAGS.items() if flag.help_group in ABOUT_CONTENT}
    of_inputs = {flag for run_input in INPUTS for flag in run_input.flag_names}
    of_identity = ONE.to_json().keys()
    assert about_content - of_inputs - of_identity == AS_HOOKS | NOT_CONTENT
    compared, paths = (
        settings_of(parse_args([])),
        {path for run_input in INPUTS for path in run_input.path_flag_names},
    )
    assert {path for path in paths if f"--{path}" in compared} == {"mix"}  # its weights
    assert all(f"--{flag}" in compared for flag in of_inputs - paths)


@pytest.mark.parametrize(
    "flags",
    [
        "--mix a.jsonl=1 b.jsonl=2.5 --positions random:.5 --drop_token_ids 5 x --mesh_shape 2,2",
        "--messages_column talk --chat_template_args a=[1,[2]] b=text --keep_columns x y "
        "--layers_to_extract 1-3 --roles user",
        "--encode blocks.1.hook_resid_post=gs://bucket/sae org/repo/folder --encode_most 3",
    ],
)
def test_a_recorded_configuration_is_read_back(flags):
    config = parse_args(flags.split())
    assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config


REFUSED = {
    "max_seq_length": ["--max_seq_length", "48"],
    "hooks": ["--layers_to_extract", "1", "2"],
    "keyed_by": ["--hook_names", "blocks.1.hook_resid_post", "blocks.3.hook_resid_post"],
    "dtype": ["--dtype", "bfloat16"],
    "activation_dtype": ["--activation_dtype", "float16"],
    "shard_size_gb": ["--shard_size_gb", "0.001"],
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
    flip(folder / "other_model/model.safetensors", -1)
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
    assert f"already holds a run that differs in {field}: " in error
    assert {p.name: p.read_bytes() for p in (folder / "out").iterdir()} == before


def test_verify_recomputes_only_from_the_inputs_of_the_run(started):
    folder, flags = started
    config = parse_args([*map(str, flags[:2])])
    assert config.text_options.dataset_path is None
    metadata = read_metadata(Folder(str(folder / "out")))
    metadata["identity"]["positions"] = "every:2"  # otherwise, shards have all token ids

    def load(path, **other):
        options = replace(config.text_options, dataset_path=path)
        return load_for_recomputing(replace(config, text_options=options), {**metadata, **other})

    gone = {**metadata["configuration"], "mix": [["gone.jsonl", 1.0]]}
    data = str(flags[flags.index("--dataset_path") + 1])
    # What is given counts, not what is recorded.
    assert load(data, configuration=gone).compute_values
    for run_input in INPUTS:
        expected_message = (
            f"^--[a-z_]+.*: the {run_input.name_in_messages} is (not|missing,) the one"
        )
        with pytest.raises(InputError, match=expected_message):
            load(None, identity={**metadata["identity"], run_input.identity_field: "another"})


@pytest.mark.long
def test_what_does_not_change_the_contents_may_change(demo_inputs, started, tmp_path):
    """Batch size, mesh and where the model is, halfway: same samples, values within rounding."""
    folder, flags = started
    out = shutil.copytree(folder / "out", tmp_path / "out")
    moved = shutil.copytree(demo_inputs / "model", tmp_path / "moved")
    for path in out.glob("shard_000[3-9]*"):
        path.unlink()
    set_status(out, "running")
    changed = "--batch_size", "4", "--mesh_shape", "2,4", "--model_path", moved
    assert main(*flags, out, *LAYERS, *changed) == 0
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
        told = f"machine_000: already holds a run that differs {told}"
        assert told in capsys.readouterr().err
    assert main(*flags, "2", "--machine_id", "1") == 0


@pytest.mark.parametrize("name", ["machine_001", "machine_000_host_00"])
def test_a_folder_of_another_number_of_machines_or_hosts_is_named(name, started, tmp_path, capsys):
    """Beside this run's own folder, its samples would count twice."""
    folder, flags = started
    shutil.copytree(folder / "out", tmp_path / name)
    for more, remedy in ([], "give the same number, or delete it"), (["--overwrite"], "delete it"):
        assert main(*flags, tmp_path, *LAYERS, *more) == 2
        told = f"holds a run with another number of hosts or machines; {remedy}\n"
        assert capsys.readouterr().err.endswith(f"{tmp_path}/{name}: {told}")


def test_overwrite_spares_what_another_process_writes(demo_inputs, tmp_path, capsys):
    out = tmp_path / "out"
    flags = flags_for(demo_inputs, out, "--max_samples", 6, "--overwrite")
    with open_storage(out, {0: "hook"}) as storage:
        storage.add_activation(0, np.zeros((2, 3), np.float32), 0, "")
        assert main(*flags) == 1
        assert "another process is writing to it" in capsys.readouterr().err
    assert (out / "shard_0001.pkl.gz").exists()


BLOCK, LARGE = 2**16, 10 * 2**20  # bytes


def test_a_model_is_known_by_its_header_samples_and_configuration(tmp_path):
    """The header is longer than a block, and all of it counts; of the rest, spread blocks do."""
    weights = tmp_path / "model.safetensors"
    tensor = {"dtype": "F32", "shape": [LARGE // 4], "data_offsets": [0, LARGE]}
    header = json.dumps({"__metadata__": {"note": "x" * 2 * BLOCK}, "tensor": tensor}).encode()
    with open(weights, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + LARGE)
    (tmp_path / "config.json").write_text("{}")

    def digest():
        checkpoint = Checkpoint(str(tmp_path))
        assert {*checkpoint.tensors} == {"tensor"}  # this checks the weights
        return model_digest(checkpoint)

    thirtieth = (8 + len(header) + LARGE - BLOCK) * 30 // 63  # where that block begins
    for change, is_seen in (
        (lambda: flip(weights, BLOCK + 1000), True),  # in the header
        (lambda: flip(weights, thirtieth), True),
        (lambda: flip(weights, -1), True),
        (lambda: (tmp_path / "config.json").write_text("{ }"), True),
        (lambda: os.utime(weights, (1, 1)), False),
    ):
        before = digest()
        change()
        assert (digest() != before) == is_seen
