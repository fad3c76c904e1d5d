"""Models that cannot be read are refused in one line, which names the file and what is wrong."""

import json
import shutil

import numpy as np
import pytest
from command_line import assert_refused
from conftest import configure
from safetensors.numpy import load_file, save_file

from activation_extraction.model.weight_files import INDEX_FILE, SINGLE_FILE


def break_file(name, change):
    """A way to spoil a copy of the model folder."""
    return lambda model: (model / name).write_bytes(change((model / name).read_bytes()))


def edit_weights(change):
    def spoil(model):
        weights = load_file(model / SINGLE_FILE)
        change(weights)
        save_file(weights, model / SINGLE_FILE)

    return spoil


def rename_weights(name):
    return lambda model: (model / SINGLE_FILE).rename(model / name)


def remove(*names):
    return lambda model: [(model / name).unlink() for name in names]


def adapter_beside(model):
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')


def without_a_shard(model):
    index = {"weight_map": dict.fromkeys(load_file(model / SINGLE_FILE), "other.safetensors")}
    (model / INDEX_FILE).write_text(json.dumps(index))
    remove(SINGLE_FILE)(model)


def of_another_tokenizer(model):
    """A wrong vocabulary also changes the embedding's shape: the tokenizer is to blame alone."""
    configure(model, vocab_size=2000)
    name = "model.embed_tokens.weight"
    edit_weights(lambda w: w.update({name: w[name][:2000].copy()}))(model)


Q_PROJ = "model.layers.3.self_attn.q_proj.weight"
BAD_MODELS = {
    "no config": (remove("config.json"), "has no config.json"),
    "config is no JSON": (break_file("config.json", lambda _: b"{"), "config.json: cannot be read"),
    "other architecture": (
        lambda model: configure(model, model_type="mistral"),
        "model_type 'mistral'",
    ),
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
    "a shard is missing": (without_a_shard, "has no other.safetensors"),
    "broken index": (rename_weights(INDEX_FILE), "not a safetensors index"),
    "an adapter beside the model": (
        adapter_beside,
        "model: holds an adapter (adapter_config.json, of org/base), which --lora takes; give its "
        "base model alone here",
    ),
    "truncated weights": (
        break_file(SINGLE_FILE, lambda b: b[: len(b) // 2]),
        "model.safetensors: not a complete safetensors file",
    ),
    "weights are garbage": (
        break_file(SINGLE_FILE, lambda _: b"garbage!" * 9),
        "its header would have",
    ),
    "size and shape differ": (
        break_file(SINGLE_FILE, lambda b: b.replace(b"[128]", b"[127]", 1)),
        "size does not follow from its shape",
    ),
    "missing tensor": (edit_weights(lambda w: w.pop(Q_PROJ)), f"tensor {Q_PROJ} is missing"),
    "unknown tensor": (
        edit_weights(lambda w: w.update(odd=np.zeros(1, np.float32))),
        "tensor odd is unknown",
    ),
    "wrong shape": (
        edit_weights(lambda w: w.update({Q_PROJ: w[Q_PROJ][:-2].copy()})),
        f"{Q_PROJ} has shape (126, 128), config.json asks for (128, 128)",
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
    model = shutil.copytree(inputs[1], tmp_path / "model")
    spoil(model)
    assert_refused(capsys, tmp_path, [*inputs, "--model_path", model], named)
