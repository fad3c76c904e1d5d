"""Identity: what is recorded is read back, and of two that differ the field is named."""

import json
from dataclasses import fields, replace

import pytest

from activation_extraction.store.commit import DamagedError
from activation_extraction.store.identity import Difference, Identity
from activation_extraction.store.metadata import identity_of

ONE = Identity(
    model_digest="1" * 64,
    data="files",
    max_seq_length=64,
    hooks=("blocks.1.hook_mlp_out", "blocks.2.hook_mlp_out"),
    dtype="float32",
    activation_dtype="float16",
    total_machines=2,
    num_hosts=2,
    machine=1,
)


def other(value):
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, str | tuple):
        return (*value, "x") if isinstance(value, tuple) else f"{value}x"
    return value + 1


def test_json_is_read_back():
    recorded = json.loads(json.dumps(ONE.to_json()))
    assert Identity.from_json(recorded) == ONE
    assert all(" " not in name for name in recorded)


@pytest.mark.parametrize("name", [each.name for each in fields(Identity)])
def test_every_field_is_compared(name):
    changed = replace(ONE, **{name: other(getattr(ONE, name))})
    expected = Difference(name, getattr(ONE, name), getattr(changed, name))
    turned_on = name == "skip_bad_rows"
    assert changed.compare(ONE) == (None if turned_on else expected)
    assert ONE.compare(changed) == Difference(name, expected.now, expected.before)
    per_host = name in ("machine", "host", "num_hosts")
    assert changed.compare_shared(ONE) == (None if turned_on or per_host else expected)
    assert (name in ONE.shared) == (not turned_on and not per_host)


def test_whether_every_token_is_kept():
    assert ONE.every_token and replace(ONE, shard_format="safetensors").every_token
    assert not replace(ONE, positions="random:0.1:0").every_token
    assert not replace(ONE, drop_token_ids=(5, 7)).every_token
    assert not replace(ONE, mask_column="mask").every_token
    assert replace(ONE, mask_column="attention_mask").every_token  # whose zeros are padding


@pytest.mark.parametrize("content", [{"colour": "red"}, [], None, {"hooks": 3}])
def test_what_this_version_does_not_know_is_damaged(content):
    with pytest.raises(DamagedError, match="out/metadata.json: its identity: cannot be read"):
        identity_of({"identity": content}, "out/metadata.json")
