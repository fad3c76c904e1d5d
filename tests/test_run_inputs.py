"""What a run reads and what its flags ask: nothing of it is forgotten where runs are compared."""

import json
from dataclasses import fields

import pytest
from command_line import main
from pods import flags_for

from activation_extraction.cli.config import parse_args
from activation_extraction.cli.flags import FLAGS, GROUPS, Config
from activation_extraction.common.errors import InputError
from activation_extraction.model.forward import ModelRequest
from activation_extraction.run.inputs import INPUTS, settings_of
from activation_extraction.run.prepare import model_request
from activation_extraction.run.recompute import load_for_recomputing
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Identity, StorageOptions
from activation_extraction.store.metadata import read_metadata
from qwen2_jax_with_hooks import FAMILIES

ABOUT_CONTENT = {"model", "what to extract", "which tokens to keep", "text"}  # groups of flags
# The identity has the hooks.
AS_HOOKS = {"layers_to_extract", "activation_type", "hook_names", "keep_activations"}
NOT_CONTENT = {"list_hooks", "max_samples", "max_tokens"}
# Fields of the identity that neither are flags nor say by what an input is known.
FOUND = {"hooks", "integer_hooks", "float32_hooks", "code_hooks", "keyed_by", "machine", "host"}
OF_INPUTS = {each.field: each.name for each in INPUTS}


def test_every_flag_about_content_belongs_to_an_input_or_to_the_identity():
    """All hosts compare the flags of inputs, but for their paths."""
    title, about_content = None, set()
    for name in FLAGS:
        title = GROUPS[name][0] if name in GROUPS else title
        about_content |= {name} if title in ABOUT_CONTENT else set()
    of_inputs = {flag for each in INPUTS for flag in each.flags}
    of_identity = {each.name for each in fields(Identity)}
    assert about_content - of_inputs - of_identity == AS_HOOKS | NOT_CONTENT
    assert of_identity - {*FLAGS, *OF_INPUTS} == FOUND and {*OF_INPUTS} < of_identity
    compared, paths = settings_of(parse_args([])), {path for each in INPUTS for path in each.paths}
    assert of_inputs <= FLAGS.keys() and paths <= of_inputs
    assert {path for path in paths if f"--{path}" in compared} == {"mix"}  # its weights
    assert all(f"--{flag}" in compared for flag in of_inputs - paths)


@pytest.mark.parametrize("part", [ModelRequest, StorageOptions])
def test_a_part_of_the_configuration_has_the_names_and_values_of_flags(part):
    config = parse_args(["--positions", "last:2", "--batch_size", "7", "--writer_threads", "3"])
    others = {"memory", "devices", "autoencoders"} if part is ModelRequest else set()
    asked = vars(config.part(part))
    assert asked.keys() - FLAGS.keys() == others
    assert all(asked[name] == getattr(config, name) for name in asked.keys() & FLAGS.keys())


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


def test_verify_recomputes_only_from_the_inputs_of_the_run(demo_inputs, tmp_path):
    """A data set that it is given is read in place of the recorded one."""
    data = demo_inputs / "documents.parquet"
    assert (
        main(*flags_for(demo_inputs, tmp_path, "--max_samples", 3, "--positions", "every:2")) == 0
    )
    request = model_request(parse_args(["--model_path", str(demo_inputs / "model")]))
    metadata = read_metadata(Folder(str(tmp_path)))

    def load(path, **other):
        return load_for_recomputing(FAMILIES, request, path, {**metadata, **other})

    assert load(None).platform == "cpu"
    gone = {**metadata["configuration"], "mix": [["gone.jsonl", 1.0]]}
    assert load(str(data), configuration=gone).activations
    with pytest.raises(InputError, match="^--mix gone.jsonl: no such"):
        load(None, configuration=gone)
    for field, name in OF_INPUTS.items():
        with pytest.raises(InputError, match=f"^--[a-z_]+.*: the {name} is (not|missing,) the one"):
            load(None, identity={**metadata["identity"], field: "another"})
