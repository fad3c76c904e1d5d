"""Reading weights from a folder, a bucket or the hub: each tensor once, to the bit, and few at a
time; and what counts if names and files say several things.

test_bad_models.py has models that cannot be read, test_hub.py weights of the hub, and test_model.py
what models compute of them.
"""

import json
import math
from collections import Counter
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from command_line import assert_refused, main
from conftest import Reference, configure, make_reference
from row_files import write_parquet
from safetensors.numpy import load_file, save, save_file
from test_model import MESHES, MODELS, TOLERANCE, checked, error_of, load, matching

from activation_extraction.common.safetensors import FIRST_BYTES
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.model import weight_files
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.devices import usable_devices
from activation_extraction.model.family import read_model_config
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.weight_files import INDEX_FILE, SINGLE_FILE
from activation_extraction.model.weights import WeightSpec, load_params
from activation_extraction.run.digests import model_digest
from activation_extraction.store.folder import SourceFolder
from activation_extraction.text.tokenizer import load_tokenizer
from qwen2_jax import Qwen2, weight_table
from qwen2_jax_with_hooks import create_model_with_hooks


@pytest.mark.parametrize(
    "dtype,metadata",
    [
        ("float64", "x"),
        ("float32", ""),
        ("float16", "xxx"),
        pytest.param("bfloat16", "x" * FIRST_BYTES, id="longer than a request"),
    ],
)
def test_parts_are_what_the_file_holds_to_the_bit(tmp_path, dtype, metadata):
    """Every pattern of 16 bits, infinities and NaN included, wherever the header ends."""
    patterns = np.arange(2**16, dtype=np.uint16).view(jnp.dtype("bfloat16")).reshape(64, -1)
    with np.errstate(all="ignore"):
        values = patterns.astype(dtype)
        expected = values.astype(np.float32)
    save_file({"t": values}, tmp_path / SINGLE_FILE, {"made by": metadata})
    spec = WeightSpec((64, 512, 2), ("embed", "kv_heads", "head_dim"), ("t",))
    read = Checkpoint(str(tmp_path)).read
    for rows, heads in ((slice(64), slice(512)), (slice(60, 64), slice(1, 400))):
        ranges = range(64)[rows], range(512)[heads], range(2)
        with np.errstate(all="ignore"):
            part = spec.read_slice(read, np.float32, ranges)
        wanted = np.ascontiguousarray(expected.reshape(spec.shape)[rows, heads])
        np.testing.assert_array_equal(part.view(np.uint32), wanted.view(np.uint32))
        assert part.ctypes.data % 64 == 0


class Watched(Checkpoint):
    """A checkpoint that notes what is read of it."""

    def __init__(self, folder):
        super().__init__(str(folder))
        self.sizes: dict[str, list[int]] = {}  # tensor -> bytes of each read

    def read(self, tensor, index, dtype=np.float32):
        part = super().read(tensor, index, dtype)
        self.sizes.setdefault(tensor, []).append(part.nbytes)
        return part


@pytest.mark.parametrize(
    "name,mesh,most,tensor,parts",
    [  # how much of the model a device may have, and how often a tensor of layer 0 or 1 is read
        ("1 kv head", "pipeline and fsdp", 0.22, "0.mlp.gate_proj", 4),
        ("experts", "expert and data", 0.44, "1.mlp.experts.4.gate_proj", 2),
        ("interleaved", "expert and data", 0.42, "0.linear_attn.in_proj_qkvz", 16),
    ],
)
def test_weights_are_split_and_read_only_once(tmp_path, name, mesh, most, tensor, parts):
    """A device holds what the axes leave of each weight; a process reads every byte once."""
    reference = make_reference(tmp_path, **MODELS[name])
    config, checkpoint = reference.config, Watched(reference.folder)
    layout = build_layout(
        usable_devices(all_of_host=True), MESHES[mesh], config.num_key_value_heads
    )
    hooks = matching(config, [f"blocks.{config.num_hidden_layers - 1}.hook_resid_post"])
    table = weight_table(create_model_with_hooks(config, hooks, layout=layout))
    params = load_params(table, checkpoint, np.float32, layout)
    whole = {name: 4 * math.prod(s.hf_shape) for s in table.values() for name in s.hf_names}
    assert {name: sum(sizes) for name, sizes in checkpoint.sizes.items()} == whole
    assert len(checkpoint.sizes[f"model.layers.{tensor}.weight"]) == parts
    total = sum(whole.values())
    held = Counter[Any]()
    for array in jax.tree.leaves(params):
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert len(held) == 8 and max(held.values()) < most * total, max(held.values()) / total


@pytest.mark.parametrize("added,left_out", [("b a", "ba"), ("qkv z b a", "qkvz ba")])
def test_projections_by_key_head_and_as_qwen3_5_has_them_give_the_same_weights(
    tmp_path, added, left_out
):
    """transformers writes them by key head; some who quantise a model do not."""
    reference = make_reference(tmp_path, **MODELS["interleaved"])
    expected, state = load(Qwen2(reference.config), tmp_path), load_file(tmp_path / SINGLE_FILE)
    for layer in (0, 2):
        name = f"model.layers.{layer}.linear_attn.in_proj_{{}}.weight".format
        qkvz, ba = (state[name(both)].reshape(4, -1, 64) for both in ("qkvz", "ba"))
        parts = *np.split(qkvz, [16, 32, 64], axis=1), *np.split(ba, [2], axis=1)
        apart = {n: part.reshape(-1, 64) for n, part in zip("qkvzba", parts, strict=True)}
        apart |= {"qkv": np.concatenate([apart[n] for n in "qkv"])}
        state |= {name(n): apart[n] for n in added.split()}
        for both in left_out.split():
            del state[name(both)]
    save_file(state, tmp_path / SINGLE_FILE)
    checked(Checkpoint(str(tmp_path)))
    same(load(Qwen2(reference.config), tmp_path), expected)


TOKEN_IDS = np.random.default_rng(0).integers(0, 211, 30, np.int32)


@pytest.fixture
def tied(tmp_path):
    """A model whose head is its embedding."""
    return make_reference(tmp_path / "model", num_key_value_heads=2, tie_word_embeddings=True)


def extract(model_path, tmp_path, *flags):
    """What a run stores of TOKEN_IDS: name of a hook -> its values."""
    write_parquet(tmp_path / "ids.parquet", ids=[TOKEN_IDS.tolist()])
    flags = [*flags, "--dataset_path", tmp_path / "ids.parquet", "--ids_column", "ids"]
    flags += ["--dtype", "float32", "--no_data_parallel", "--overwrite"]
    assert main("--model_path", model_path, *flags, "--output_dir", tmp_path / "out") == 0
    dataset = ActivationDataset(tmp_path / "out")
    return {hook: np.asarray(dataset[0][hook]) for hook in dataset.hooks}


def same(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_stored_head_counts_although_it_is_said_to_be_tied(tied, tmp_path, capsys):
    """It counts in transformers, too, which computes the expected values with the stored one."""
    from transformers import AutoModelForCausalLM

    flags = "--hook_names", "entropy", "loss", "ln_final.hook_normalized"
    before = extract(tied.folder, tmp_path, *flags)
    says = "its lm_head.weight is used, although config.json ties it to the embedding"
    assert says not in capsys.readouterr().err
    head = np.random.default_rng(1).standard_normal((211, 64)).astype(np.float32)
    stored = load_file(tied.folder / SINGLE_FILE) | {"lm_head.weight": head}
    save_file(stored, tied.folder / SINGLE_FILE, {"format": "pt"})
    reference = Reference(AutoModelForCausalLM.from_pretrained(tied.folder), tied.folder)
    expected = reference.hooked(TOKEN_IDS[None])
    found = extract(tied.folder, tmp_path, *flags)
    for name in ("entropy", "loss"):
        used = slice(name == "loss", None)  # the first token has no loss
        assert error_of(found[name][used], expected[name][0][used]) < TOLERANCE
        assert error_of(before[name][used], expected[name][0][used]) > 0.1
    assert capsys.readouterr().err.count(says) == 1


def test_the_language_model_is_found_whatever_it_was_stored_in(tied):
    """Reward models, classifiers, embedding models and models with other inputs have it, and a
    library has saved it with a part of the names repeated."""
    expected = load(Qwen2(tied.config), tied.folder)
    beside = """score v_head.summary visual.blocks.0.norm1 talker.model.layers.0.input_layernorm
        audio_tower.ln_post model.visual.merger.norm mtp.layers.0.input_layernorm classifier
        thinker.visual.merger.ln_q thinker.audio_tower.conv_out code2wav.decoder.0.conv qa_outputs
        token2wav.code2wav_bigvgan_model.conv_pre""".split()
    others = dict.fromkeys([f"{name}.weight" for name in beside], np.ones((1, 64), np.float32))
    others["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    stored = load_file(tied.folder / SINGLE_FILE)
    repeated = "model.language_model.language_model."
    for around in ("", repeated, "thinker.model.", "transformer."):
        named = {around + name.removeprefix("model."): stored[name] for name in stored}
        save_file(named | others, tied.folder / SINGLE_FILE, {"format": "pt"})
        model, _ = checked(Checkpoint(str(tied.folder)))
        same(load(model, tied.folder), expected)


def test_without_a_head_only_what_it_gives_is_refused(tied, tmp_path, capsys):
    """Qwen3-Embedding-8B has a config.json that does not tie a head that is not there."""
    expected = extract(tied.folder, tmp_path, "--layers_to_extract", "2")
    configure(tied.folder, tie_word_embeddings=False)
    same(extract(tied.folder, tmp_path, "--layers_to_extract", "2"), expected)
    flags = "--dataset_path", tmp_path / "ids.parquet", "--ids_column", "ids"
    flags += ("--model_path", tied.folder, "--output_dir", tmp_path / "other")
    assert main(*flags, "--hook_names", "loss") == 2
    says = f"losses and logits need lm_head.weight, which --model_path {tied.folder} lacks"
    assert says in capsys.readouterr().err


@pytest.fixture
def memory(tmp_path):
    """A folder of fsspec's that is neither local nor a bucket's."""
    url = f"memory://{tmp_path.name}"
    yield url
    fsspec.filesystem("memory").rm(f"/{tmp_path.name}", recursive=True)


@pytest.fixture
def tiny(demo_inputs, memory):
    """The folder `memory`, with the demo model in it."""
    fsspec.filesystem("memory").put(f"{demo_inputs}/model/*", f"{memory}/")
    return memory


def test_a_single_file_counts_before_an_index(demo_inputs, tmp_path, tiny, inputs, capsys):
    """Transformers reads it first, too; the shards may be older ones, and they may be gone."""
    older = dict.fromkeys(load_file(demo_inputs / "model" / SINGLE_FILE), "model-00001.safetensors")
    index = json.dumps({"weight_map": older}).encode()
    fsspec.filesystem("memory").pipe(f"{tiny}/{INDEX_FILE}", index)
    flags = *inputs, "--model_path", tiny, "--layers_to_extract", 3, "--max_samples", 1
    assert main(*flags, "--output_dir", tmp_path / "out") == 0
    says = f"--model_path {tiny}: model.safetensors is read, and {INDEX_FILE} is not"
    assert capsys.readouterr().err.count(says) == 1


def test_any_part_of_any_tensor_of_a_remote_file(memory):
    """Tensors may be larger than a request, and ranges far from each other."""
    chance = np.random.default_rng(0)
    shapes = {"large": (5, 3_000_000), "deep": (2, 3, 700_000), "t4": (3, 5, 2, 7), "t1": (9,)}
    tensors = {
        name: chance.integers(-99, 99, shape).astype("float16") for name, shape in shapes.items()
    }
    fsspec.filesystem("memory").pipe(f"{memory}/some.safetensors", save(tensors))
    folder = SourceFolder(memory)
    file = weight_files.RemoteFile(folder, "some.safetensors", folder.files()["some.safetensors"])
    assert {name: place.shape for name, place in file.tensors.items()} == shapes
    for name, values in tensors.items():
        for _ in range(20):
            ends = [sorted(chance.integers(0, size + 1, 2)) for size in values.shape]
            index = tuple(slice(*map(int, bound)) for bound in ends)
            np.testing.assert_array_equal(file.read(name, index), values[index])


def load_all(where):
    """The weights of a model anywhere, and its checkpoint."""
    checkpoint = Checkpoint(str(where))
    config = read_model_config(checkpoint.file("config.json"))
    layout = build_layout(jax.devices()[:1], {"model": 1}, kv_heads=1)
    return load_params(weight_table(Qwen2(config)), checkpoint, np.float32, layout), checkpoint


def test_a_model_in_a_bucket_that_fails_is_the_local_one(demo_inputs, monkeypatch, bucket):
    """Little more is read than it has."""
    for path in (demo_inputs / "model").iterdir():
        bucket.put(f"models/tiny/{path.name}", path.read_bytes())
    served = bucket.served
    monkeypatch.setattr(weight_files, "REQUEST_BYTES", 2**18)
    bucket.fault_rate, bucket.faults = 0.05, ("503", "reset", "truncated")
    found, remote = load_all("gs://bucket/models/tiny")
    bucket.fault_rate = 0.0
    expected, local = load_all(demo_inputs / "model")
    same(found, expected)
    assert sum(bucket.failed.values()) > 3
    size = (demo_inputs / "model" / SINGLE_FILE).stat().st_size
    assert bucket.served - served < 2.5 * size
    assert remote.git_commit is None and model_digest(remote) == model_digest(local)
    tokenizers = [load_tokenizer(where.tokenizer_files(), "", 2048) for where in (remote, local)]
    assert len({tokenizer.backend_tokenizer.to_str() for tokenizer in tokenizers}) == 1


@pytest.mark.parametrize("missing", ["config.json", SINGLE_FILE])
def test_a_file_that_a_url_lacks_is_named(inputs, tiny, tmp_path, capsys, missing):
    fsspec.filesystem("memory").rm_file(f"{tiny}/{missing}")
    assert_refused(capsys, tmp_path, [*inputs, "--model_path", tiny], f"{tiny}: has no {missing}")
