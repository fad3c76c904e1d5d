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
from activation_extraction.run.open_data import TextRequest
from activation_extraction.run.prepare import model_request
from activation_extraction.run.recompute import load_for_recomputing
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Identity, StorageOptions
from activation_extraction.store.metadata import read_metadata
from qwen2_jax_with_hooks import FAMILIES

ABOUT_CONTENT = {"model", "what to extract", "which tokens to keep", "text"}  # groups of flags
AS_HOOKS = {"layers_to_extract", "activation_type", "hook_names"}  # the identity has the hooks
NOT_CONTENT = {"list_hooks", "max_samples", "max_tokens"}
# Fields of the identity that neither are flags nor say by what an input is known.
FOUND = {"hooks", "integer_hooks", "float32_hooks", "keyed_by"}
FOUND |= {"machine", "host"}
OF_INPUTS = {field: each.name for each in INPUTS for field in each.fields}


def test_every_flag_about_content_belongs_to_an_input_or_to_the_identity():
    title, about_content = None, set()
    for name in FLAGS:
        title = GROUPS[name][0] if name in GROUPS else title
        about_content |= {name} if title in ABOUT_CONTENT else set()
    assert AS_HOOKS | NOT_CONTENT < about_content
    of_inputs = {flag for each in INPUTS for flag in each.flags}
    compared = of_inputs | {each.name for each in fields(Identity)}
    assert about_content - compared == AS_HOOKS | NOT_CONTENT


def test_every_field_of_the_identity_has_its_source():
    names = {each.name for each in fields(Identity)}
    assert names - {*FLAGS, *OF_INPUTS} == FOUND
    assert {*OF_INPUTS} < names


def test_what_names_an_input_is_asked_for():
    asked = {each.name for part in (ModelRequest, TextRequest) for each in fields(part)}
    for each in INPUTS:
        assert {*each.flags} <= asked & FLAGS.keys() and {*each.paths} <= {*each.flags}


def test_hosts_compare_what_they_are_asked_but_for_the_paths_of_inputs():
    compared, paths = settings_of(parse_args([])), {path for each in INPUTS for path in each.paths}
    assert {path for path in paths if f"--{path}" in compared} == {"mix"}  # its weights
    for each in INPUTS:
        assert all(f"--{flag}" in compared for flag in each.flags if flag not in paths)


@pytest.mark.parametrize("part", [ModelRequest, TextRequest, StorageOptions])
def test_a_part_of_the_configuration_has_the_names_and_values_of_flags(part):
    config = parse_args(["--positions", "last:2", "--batch_size", "7", "--writer_threads", "3"])
    others = {"memory", "devices"} if part is ModelRequest else set()
    asked = vars(config.part(part))
    assert asked.keys() - FLAGS.keys() == others
    assert all(asked[name] == getattr(config, name) for name in asked.keys() & FLAGS.keys())


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--mix a.jsonl=1 b.jsonl=2.5 --positions random:.5 --drop_token_ids 5 x --mesh_shape 2,2",
        "--messages_column talk --chat_template_args a=[1,[2]] b=text --keep_columns x y "
        "--layers_to_extract 1-3 --roles user",
    ],
)
def test_a_recorded_configuration_is_read_back(flags):
    config = parse_args(flags.split())
    assert Config.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.fixture(scope="module")
def run(demo_inputs, tmp_path_factory):
    """The request to recompute a small run that keeps some of its tokens, and its metadata."""
    out = tmp_path_factory.mktemp("run")
    flags = flags_for(demo_inputs, out, "--max_samples", 3, "--positions", "every:2")
    assert main(*flags) == 0
    request = model_request(parse_args(["--model_path", str(demo_inputs / "model")]))
    return request, read_metadata(Folder(str(out)))


def test_the_data_set_that_verify_is_given_is_read_in_place_of_the_recorded_one(run, demo_inputs):
    request, metadata = run
    configuration = {**metadata["configuration"], "mix": [["gone.jsonl", 1.0]]}
    mixed, data = {**metadata, "configuration": configuration}, demo_inputs / "documents.parquet"
    assert load_for_recomputing(FAMILIES, request, str(data), mixed).activations
    with pytest.raises(InputError, match="^--mix gone.jsonl: no such"):
        load_for_recomputing(FAMILIES, request, None, mixed)


@pytest.mark.parametrize("field", [None, *OF_INPUTS])
def test_another_input_is_not_used_to_recompute(run, field):
    request, metadata = run
    if field is None:
        assert load_for_recomputing(FAMILIES, request, None, metadata).platform == "cpu"
        return
    other = {**metadata, "identity": {**metadata["identity"], field: "another"}}
    with pytest.raises(InputError, match=f"^--[a-z_]+ .*: the {OF_INPUTS[field]} is not the one"):
        load_for_recomputing(FAMILIES, request, None, other)
