"""Folders that hold no model that can be read: one line that says why, and exit status 2."""

import json
import shutil

import numpy as np
import pytest
from command_line import assert_refused
from conftest import make_reference
from safetensors.numpy import load_file, save_file

from activation_extraction.run import demo


def break_file(name, change):
    """A way to spoil a copy of the model folder."""
    return lambda model: (model / name).write_bytes(change((model / name).read_bytes()))


def edit_config(**changes):
    return break_file("config.json", lambda b: json.dumps(json.loads(b) | changes).encode())


def edit_weights(change):
    def spoil(model):
        weights = load_file(model / "model.safetensors")
        change(weights)
        save_file(weights, model / "model.safetensors")

    return spoil


def rename_weights(name):
    return lambda m: (m / "model.safetensors").rename(m / name)


def remove(*names):
    return lambda model: [(model / name).unlink() for name in names]


def adapter(*without):
    """Leaves an adapter in the folder, without these files of the model."""

    def spoil(model):
        (model / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
        remove(*without)(model)

    return spoil


def with_a_tensor_that_the_index_lacks(model):
    """In a file that the index names, and that is read for its other tensors."""
    edit_weights(lambda w: w.update(odd=np.zeros(1, np.float32)))(model)
    rename_weights("shard.safetensors")(model)
    known = load_file(model / "shard.safetensors").keys() - {"odd"}
    index = {"weight_map": dict.fromkeys(known, "shard.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def of_another_tokenizer(model):
    """A wrong vocabulary also changes the embedding's shape: the tokenizer is to blame alone."""
    edit_config(vocab_size=2000)(model)
    name = "model.embed_tokens.weight"
    edit_weights(lambda w: w.update({name: w[name][:2000].copy()}))(model)


HOLDS_ADAPTER = (
    "model: holds an adapter (adapter_config.json, of org/base), which --lora takes; give its base "
    "model alone here"
)
Q_PROJ = "model.layers.3.self_attn.q_proj.weight"
BAD_MODELS = {
    "no config": (remove("config.json"), "has no config.json"),
    "config is no JSON": (break_file("config.json", lambda _: b"{"), "config.json: cannot be read"),
    "config is a list": (break_file("config.json", lambda _: b"[]"), "found list"),
    "other architecture": (edit_config(model_type="llama"), "model_type 'llama'"),
    "no weights": (remove("model.safetensors"), "has no model.safetensors"),
    "weights of PyTorch": (
        rename_weights("pytorch_model.bin"),
        "has no model.safetensors, but pytorch_model.bin; only safetensors are read: load the "
        "model with transformers and store it with save_pretrained",
    ),
    "shards without their index": (
        rename_weights("model-00001-of-00002.safetensors"),
        "has no model.safetensors and no model.safetensors.index.json, but "
        "model-00001-of-00002.safetensors; copy the index from where the shards come from",
    ),
    "adapter beside the model": (adapter(), HOLDS_ADAPTER),
    "adapter alone": (adapter("config.json", "model.safetensors"), HOLDS_ADAPTER),
    "adapter without weights": (adapter("model.safetensors"), HOLDS_ADAPTER),
    "truncated weights": (
        break_file("model.safetensors", lambda b: b[: len(b) // 2]),
        "model.safetensors: not a complete safetensors file",
    ),
    "weights are garbage": (
        break_file("model.safetensors", lambda _: b"garbage!" * 9),
        "not a complete safetensors file",
    ),
    "missing tensor": (edit_weights(lambda w: w.pop(Q_PROJ)), f"tensor {Q_PROJ} is missing"),
    "unknown tensor": (
        edit_weights(lambda w: w.update(odd=np.zeros(1, np.float32))),
        "tensor odd is unknown",
    ),
    "unknown tensor beside those of the index": (
        with_a_tensor_that_the_index_lacks,
        "tensor odd is unknown",
    ),
    "wrong shape": (
        edit_weights(lambda w: w.update({Q_PROJ: w[Q_PROJ][:-2].copy()})),
        f"{Q_PROJ} has shape (126, 128), config.json asks for (128, 128)",
    ),
    "quantised": (
        edit_weights(lambda w: w.update({Q_PROJ: w[Q_PROJ].astype(np.int8)})),
        f"{Q_PROJ} is I8",
    ),
    "broken index": (
        rename_weights("model.safetensors.index.json"),
        "not a safetensors index",
    ),
    "no tokenizer": (
        remove("tokenizer.json"),
        "has no vocab.json; a tokenizer is read from tokenizer.json",
    ),
    "broken tokenizer": (break_file("tokenizer.json", lambda b: b[:99]), "tokenizer cannot be"),
    "tokenizer of another model": (
        of_another_tokenizer,
        "has token id 2047, but vocab_size in config.json is 2000",
    ),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_bad_models_exit_2_with_one_line(name, inputs, tmp_path, capsys):
    spoil, named = BAD_MODELS[name]
    model = tmp_path / "model"
    shutil.copytree(inputs[1], model)
    spoil(model)
    assert_refused(capsys, tmp_path, [*inputs, "--model_path", model], named)


def test_a_missing_file_of_a_sharded_checkpoint_is_named(tmp_path, capsys, inputs):
    make_reference(tmp_path / "model", "100KB", num_key_value_heads=2, vocab_size=300)
    demo.write_tokenizer(tmp_path / "model", [])
    parts = sorted((tmp_path / "model").glob("model-*.safetensors"))
    assert len(parts) > 2
    parts[0].unlink()
    assert_refused(
        capsys, tmp_path, [*inputs, "--model_path", tmp_path / "model"], f"has no {parts[0].name}"
    )
