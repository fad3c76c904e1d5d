"""--lora: weights are those that NumPy merges by PEFT's formulas, on any mesh and from anywhere.

An adapter that cannot be merged is refused by name."""

import json
import math
import re
import shutil
from pathlib import Path

import fsspec
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from command_line import assert_refused, main, records_of
from conftest import make_reference
from flax.traverse_util import flatten_dict
from safetensors.numpy import load_file, save_file
from test_model import MESHES, checked
from tiny_models import MOE, MOE_TEXT

from activation_extraction.common.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.lora import Adapter
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.weights import load_params
from qwen2_jax_with_hooks import FAMILIES

EMBED, HEAD, ATTENTION, MLP = "model.embed_tokens", "lm_head", "self_attn", "mlp"
CONFIG = dict(peft_type="LORA", r=3, lora_alpha=5, peft_version="0.21.2", target_modules=None)
MODELS = {
    "dense": dict(num_key_value_heads=2, head_dim=24, vocab_size=257),
    "tied": dict(num_key_value_heads=1, tie_word_embeddings=True),
    "experts one by one": MOE | dict(num_key_value_heads=2, head_dim=64, num_hidden_layers=2),
    "fused experts": MOE_TEXT,
    "square experts": MOE_TEXT | dict(moe_intermediate_size=64),
}


class Made:
    """An adapter in the making, and the base's weights as NumPy merges them."""

    def __init__(self, base, prefix="base_model.model."):
        self.turn = inputs_first if base.name.endswith("inputs first") else lambda _, values: values
        self.weights = {
            name.replace("language_model.", ""): self.turn(name, value).astype(np.float32)
            for name, value in load_file(base / "model.safetensors").items()
        }
        self.tensors, self.config, self.prefix = {}, dict(CONFIG), prefix
        self.chance = np.random.default_rng(0)

    def random(self, key, *shape, dtype=np.float32):
        values = self.chance.normal(scale=0.3, size=shape).astype(dtype)
        self.tensors[self.prefix + key] = values
        return values.astype(np.float32)

    def linear(self, module, scale, rank=3, name="", dtype=np.float32):
        """Adds scale * B @ A to a matrix. name: of the adapter, in the keys of raw dicts."""
        out, into = self.weights[f"{module}.weight"].shape
        a = self.random(f"{module}.lora_A{name}.weight", rank, into, dtype=dtype)
        b = self.random(f"{module}.lora_B{name}.weight", out, rank, dtype=dtype)
        self.weights[f"{module}.weight"] += np.float32(scale) * (b @ a)

    def dora(self, module, scale, suffix=""):
        self.linear(module, scale)
        merged = self.weights[f"{module}.weight"]
        norms = self.random(f"{module}.lora_magnitude_vector{suffix}", len(merged))
        norms = norms / np.sqrt((merged.astype(np.float64) ** 2).sum(1))
        self.weights[f"{module}.weight"] = (norms[:, None] * merged).astype(np.float32)

    def embedding(self, module, scale):
        size, width = self.weights[f"{module}.weight"].shape
        a = self.random(f"{module}.lora_embedding_A", 3, size)
        b = self.random(f"{module}.lora_embedding_B", width, 3)
        self.tensors[f"{self.prefix}{module}.base_layer.weight"] = self.weights[f"{module}.weight"]
        self.weights[f"{module}.weight"] = self.weights[f"{module}.weight"] + scale * (b @ a).T

    def whole(self, tensor, key=""):
        self.weights[tensor] = self.random(key or tensor, *self.weights[tensor].shape)

    def experts(self, key, scale, matrices, exchanged=False):
        """Changes all experts. matrices: those of each expert, one below the other."""
        out = sum(
            len(self.weights[name] if at is None else self.weights[name][at])
            for name, at in matrices[0]
        )
        name, at = matrices[0][0]
        into, count = self.weights[name].shape[-1], len(matrices)
        if exchanged:
            out, into = into, out
        a = self.random(f"{key}.lora_A.weight", count * 3, into).reshape(count, 3, into)
        b = self.random(f"{key}.lora_B.weight", out, 3 * count).reshape(out, 3, count)
        delta = scale * np.einsum("ore,eri->eio" if exchanged else "ore,eri->eoi", b, a)
        for expert, parts in enumerate(matrices):
            row = 0
            for name, at in parts:
                target = self.weights[name] if at is None else self.weights[name][at]
                target += delta[expert, row : row + len(target)]
                row += len(target)

    def save(self, folder):
        folder.mkdir(exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "adapter_model.safetensors")
        return folder

    def save_merged(self, base, folder):
        shutil.copytree(base, folder)
        weights = {name: self.turn(name, values) for name, values in self.weights.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder


def everything(made):
    """Patterns; ranks; biases; the keys of raw dicts; whole tensors; half precision."""
    made.config |= dict(bias="all", lora_bias=True, fan_in_fan_out=True)
    made.config["rank_pattern"] = {"o_pro": 9, "_proj": 9}  # which match no whole name
    made.config["rank_pattern"] |= {r".*\.1\..*(k|v)_proj": 2, "v_proj": 7, "1.mlp.up_proj": 4}
    made.config["alpha_pattern"] = {"layers.0.self_attn.q_proj": 9, "q_proj": 4, "up_proj": 2.5}
    first, second = "model.layers.0", "model.layers.1"
    made.linear(f"{first}.{ATTENTION}.q_proj", 9 / 3)
    made.linear(f"{second}.{ATTENTION}.q_proj", 4 / 3, name=".default")
    made.linear(f"{second}.{ATTENTION}.k_proj", 5 / 2, rank=2)
    made.linear(f"{second}.{ATTENTION}.v_proj", 5 / 2, rank=2, dtype=np.float16)
    made.linear(f"{first}.{ATTENTION}.v_proj", 5 / 7, rank=7)
    made.linear(f"{second}.{ATTENTION}.o_proj", 5 / 3)
    made.linear(f"{second}.{MLP}.up_proj", 2.5 / 4, rank=4)
    made.linear(f"{first}.{MLP}.gate_proj", 5 / 3)
    made.linear(f"{first}.{MLP}.down_proj", 5 / 3)
    made.linear(HEAD, 5 / 3)
    made.embedding(EMBED, 5 / 3)
    bias = f"{first}.{ATTENTION}.k_proj.bias"
    made.whole(bias, bias.replace("bias", "base_layer.bias"))
    bias = f"{second}.{ATTENTION}.q_proj.bias"
    made.weights[bias] += (
        4 / 3 * made.random(f"{second}.{ATTENTION}.q_proj.lora_B.bias", *made.weights[bias].shape)
    )
    made.whole("model.norm.weight", "model.norm.modules_to_save.default.weight")


def of_raw_names(made):
    """DoRA, rank-stabilised, without a prefix; beside the language model's there is another's."""
    made.prefix = ""
    made.config |= dict(use_dora=True, use_rslora=True)
    made.dora("model.layers.0.self_attn.q_proj", 5 / 3**0.5)
    made.dora("model.layers.3.mlp.down_proj", 5 / 3**0.5, ".default.weight")
    made.random("model.visual.blocks.0.attn.qkv.lora_A.weight", 3, 7)
    made.random("model.visual.blocks.0.attn.qkv.lora_B.weight", 9, 3)


def head_alone(made):
    """The embedding stays as it is, although the base's head is tied to it."""
    made.weights["lm_head.weight"] = made.weights["model.embed_tokens.weight"].copy()
    made.linear(HEAD, 5 / 3)


def embedding_alone(made):
    made.weights["lm_head.weight"] = made.weights["model.embed_tokens.weight"].copy()
    made.embedding(EMBED, 5 / 3)


def embedding_and_head(made):
    made.config["ensure_weight_tying"] = True
    made.whole("model.embed_tokens.weight")


def new_head(made):
    made.weights["lm_head.weight"] = made.weights["model.embed_tokens.weight"]
    made.whole("lm_head.weight")


def experts_one_by_one(made):
    name = "model.layers.{}.mlp.experts.{}.{}_proj"
    made.linear(name.format(1, 3, "up"), 5 / 3)
    made.linear(name.format(1, 5, "down"), 5 / 3)
    made.linear("model.layers.0.mlp.gate", 5 / 3)


def all_experts(made, exchanged=False):
    """gate_up_proj is the inner one, whatever the order in target_parameters is."""
    made.config["alpha_pattern"] = {"experts.down_proj": 2}
    made.prefix = "base_model.model.model.language_"  # as in a model with vision inputs
    name = "model.layers.{}.mlp.experts.{}.{}_proj.weight"
    for layer in range(2):
        of = [
            [[(name.format(layer, e, part), None)] for part in ("gate", "up", "down")]
            for e in range(6)
        ]
        key = f"model.layers.{layer}.mlp.experts"
        made.experts(f"{key}.base_layer", 5 / 3, [gate + up for gate, up, _ in of], exchanged)
        made.experts(key, 2 / 3, [down for *_, down in of], exchanged)


def fused_experts(made, exchanged=False):
    for layer in (0, 3):
        name = f"model.layers.{layer}.mlp.experts"
        for key, tensor in (("", "gate_up_proj"), (".base_layer", "down_proj")):
            made.experts(
                name + key, 5 / 3, [[(f"{name}.{tensor}", e)] for e in range(6)], exchanged
            )
    made.linear("model.layers.0.linear_attn.in_proj_qkv", 5 / 3)
    made.linear("model.layers.1.self_attn.q_proj", 5 / 3)
    made.linear("model.layers.2.mlp.shared_expert.up_proj", 5 / 3)


def all_exchanged(made):
    """The adapter is one of PEFT before 0.19.1: for square experts the version decides."""
    made.config["peft_version"] = "0.18.1"
    fused = "model.layers.0.mlp.experts.down_proj" in made.weights
    (fused_experts if fused else all_experts)(made, exchanged=True)


CASES = [
    *(("dense", each) for each in (everything, of_raw_names)),
    *(("tied", each) for each in (head_alone, embedding_alone, embedding_and_head, new_head)),
    *(("experts one by one", each) for each in (experts_one_by_one, all_experts, all_exchanged)),
    *(("fused experts", each) for each in (fused_experts, all_exchanged)),
    *(("square experts", each) for each in (fused_experts, all_exchanged)),
    *((f"{name} experts, inputs first", fused_experts) for name in ("fused", "square")),
    ("square experts, inputs first", all_exchanged),
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of models by name."""
    root = tmp_path_factory.mktemp("bases")
    made = {name: make_reference(root / name, **MODELS[name]).folder for name in MODELS}
    for name in ("fused experts", "square experts"):
        folder = root / f"{name}, inputs first"
        tensors = fused(load_file(made[name] / "model.safetensors"))
        made[folder.name] = shutil.copytree(made[name], folder)
        save_file(tensors, made[name] / "model.safetensors", {"format": "pt"})
        turned = {key: inputs_first(key, each) for key, each in tensors.items()}
        save_file(turned, folder / "model.safetensors", {"format": "pt"})
    return made


def inputs_first(name, values):
    """Returns an expert tensor as released models with vision inputs have it."""
    return values.swapaxes(1, 2).copy() if ".experts." in name else values


def fused(tensors):
    """Returns tensors as Qwen3.5 has them: a layer's experts in two, under longer names."""
    found = {name: value for name, value in tensors.items() if ".experts." not in name}
    for layer in range(MODELS["fused experts"]["num_hidden_layers"]):
        name = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors[f"{name}.{e}.{part}_proj.weight"] for e in range(6)])
            for part in ("gate", "up", "down")
        )
        found |= {f"{name}.gate_up_proj": np.concatenate([gate, up], 1), f"{name}.down_proj": down}
    return {
        name.replace("model.", "model.language_model.", 1): each for name, each in found.items()
    }


def load(folder, mesh, lora=None, dtype=np.float32):
    """The parameters of the whole model, from its checkpoint."""
    checkpoint = Checkpoint(str(folder))
    if lora is not None:
        _, config = FAMILIES.read_config(checkpoint.file("config.json"))
        checkpoint.adapter = Adapter(str(lora), checkpoint, config.tie_word_embeddings)
    model, table = checked(checkpoint)
    devices = jax.devices()[: math.prod(mesh.values())]
    layout = build_layout(devices, mesh, model.config.num_key_value_heads)
    params = flatten_dict(load_params(table, checkpoint, jnp.dtype(dtype), layout), sep="/")
    return {name: np.asarray(value) for name, value in params.items()}


@pytest.mark.parametrize("mesh", ["one device", "fsdp"])
@pytest.mark.parametrize("base,make", CASES, ids=lambda each: getattr(each, "__name__", each))
def test_weights_are_those_that_numpy_merges(bases, tmp_path, base, make, mesh):
    made = Made(bases[base])
    make(made)
    lora = made.save(tmp_path / "lora")
    merged = made.save_merged(bases[base], tmp_path / "merged")
    found, expected = load(bases[base], MESHES[mesh], lora), load(merged, MESHES[mesh])
    before = load(bases[base], MESHES[mesh])
    assert found.keys() == expected.keys() == before.keys()
    assert any(np.abs(found[name] - before[name]).max() > 0.1 for name in found)
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=2e-6, err_msg=name)


def test_merged_weights_are_rounded_once(bases, tmp_path):
    """From a base in bfloat16, as it is released, to bfloat16."""
    base = shutil.copytree(bases["dense"], tmp_path / "base")
    file = base / "model.safetensors"
    stored = {name: value.astype(ml_dtypes.bfloat16) for name, value in load_file(file).items()}
    save_file(stored, file, {"format": "pt"})
    made = Made(base)
    everything(made)
    lora, mesh = made.save(tmp_path / "lora"), MESHES["fsdp"]
    rounded, whole = (load(base, mesh, lora, dtype) for dtype in (ml_dtypes.bfloat16, np.float32))
    for name, value in whole.items():
        np.testing.assert_array_equal(rounded[name], value.astype(ml_dtypes.bfloat16))


Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj"
UP_PROJ = "model.layers.2.mlp.up_proj"


def test_changes_of_experts_that_are_refused(bases, tmp_path, demo_inputs, capsys):
    """A checkpoint may hold a tensor for each expert beside the fused ones, which are read; and a
    version of PEFT may not say which axis of square experts is the input's."""
    folder = shutil.copytree(bases["fused experts"], tmp_path / "model")
    apart = load_file(bases["experts one by one"] / "model.safetensors")
    own = {name: each for name, each in apart.items() if ".experts." in name}
    save_file(load_file(folder / "model.safetensors") | own, folder / "model.safetensors")
    one, square = Made(bases["experts one by one"]), Made(bases["square experts"])
    experts_one_by_one(one)
    fused_experts(square)
    square.config["peft_version"] = "0.17.0"
    flags = "--layers_to_extract", 1, "--dataset_path", demo_inputs / "documents.parquet"
    for base, made, told in (
        (folder, one, "which is in the base but is not read (and 1 more)"),
        (bases["square experts"], square, "is square, and peft_version 0.17.0 does not say how"),
    ):
        lora = made.save(tmp_path / "lora")
        assert (
            main("--model_path", base, "--lora", lora, *flags, "--output_dir", tmp_path / "out")
            == 2
        )
        assert told in capsys.readouterr().err.splitlines()[-1]


def tensors(shapes):
    """Adds tensors of these shapes, or removes those that have none."""

    def change(folder):
        file = folder / "adapter_model.safetensors"
        found = load_file(file)
        for key, shape in shapes.items():
            found.pop(key, None)
            if shape is not None:
                found[key] = np.ones(shape, np.float32)
        save_file(found, file)

    return change


def pair(module, a, b):
    """Adds A and B of these shapes."""
    return tensors({f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b})


def config(**changed):
    def change(folder):
        file = folder / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))

    return change


def written(name, content, renamed=None):
    """Writes another content to a file, or gives it another name."""

    def change(folder):
        if renamed:
            (folder / name).rename(folder / renamed)
        else:
            (folder / name).write_bytes(content)

    return change


FILE, NOT_SUPPORTED = "adapter_model.safetensors: ", "is not supported; merge it with PEFT"
A, B = f"{Q_PROJ}.lora_A.weight", f"{Q_PROJ}.lora_B.weight"
OF_Q, FITS = "of model.layers.1.self_attn.q_proj is", "fits no tensor of the base model"
RESIZED = "if the vocabulary was resized for training, give"
EMBEDDING = "base_model.model.model.embed_tokens.modules_to_save.weight"
REFUSED = {
    **{
        f"{name} {value!r} {NOT_SUPPORTED}": config(**{name: value})
        for name, value in dict(
            alora_invocation_tokens=[3],
            layer_replication=[[0, 4], [2, 5]],
            use_qalora=True,
            use_bdlora={"nblocks": 2},
            arrow_config={"top_k": 2},
            kasa_config={"beta": 1},
            velora_config={"rank": 1},
            monteclora_config={"num_samples": 1},
            trainable_token_indices=[5],
            peft_type="IA3",
            init_lora_weights="pissa",
        ).items()
    },
    f"{FILE}{A} has rank 3, adapter_config.json says 4": config(r=4),
    f"lora_alpha {OF_Q} '16', expected a number": config(lora_alpha="16"),
    **{
        f"{name} is {value!r}, expected true or false": config(**{name: value})
        for name, value in (("use_rslora", "false"), ("use_dora", 1), ("ensure_weight_tying", "no"))
    },
    f"(260, 64), expected (257, 64); {RESIZED}": tensors({EMBEDDING: [260, 64]}),
    f"shape (260, 3), expected (257, 3); {RESIZED}": pair("lm_head", [3, 64], [260, 3]),
    f"r {OF_Q} None, expected a number": config(r=None),
    "rank_pattern: missing ), unterminated subpattern": config(rank_pattern={"(": 3}),
    "alpha_pattern: 'list' object has no attribute 'items'": config(alpha_pattern=[3]),
    f"lora_alpha {OF_Q} 1000": config(lora_alpha=10**400),
    "is not supported: DoRA has use_dora and a linear magnitude_vector": config(use_dora=True),
    f"{A} is not supported: DoRA": tensors({f"{Q_PROJ}.lora_magnitude_vector": [64]}),
    "lora_A.weight has shape (3, 63), expected (3, 64)": tensors({A: [3, 63]}),
    "lora_B.weight has shape (64, 3), expected (96, 3)": tensors({B: [64, 3]}),
    "has shape (0,) (was it saved from a part of ZeRO-3?)": tensors({B: [0]}),
    f"{A} {FITS} (1 key in all)": tensors({B: None}),
    f"9.up_proj.lora_A.weight {FITS} (2 keys in all)": pair("layers.9.up_proj", [3, 64], [8, 3]),
    f"norm.lora_A.weight {FITS} (2 keys in all)": pair("model.norm", [3, 64], [64, 3]),
    f"1.mlp.experts.lora_A.weight {FITS}": pair("layers.1.mlp.experts", [6, 8], [8, 6]),
    f"{UP_PROJ}.lora_B.bias {FITS}": tensors({f"{UP_PROJ}.lora_B.bias": [112]}),
    f"{A} is I8; only F64, F32, F16, BF16 are merged": lambda folder: save_file(
        load_file(folder / FILE[:-2]) | {A: np.ones((3, 64), np.int8)}, folder / FILE[:-2]
    ),
    "model.norm.weight has shape (63,), expected (64,)": tensors({"model.norm.weight": [63]}),
    "lora_A.default.weight are the same": tensors({f"{Q_PROJ}.lora_A.default.weight": [3, 64]}),
    "which another key has changed": pair(
        "model.language_model.layers.1.self_attn.q_proj", [3, 64], [96, 3]
    ),
    "has no tensor for the language model": lambda folder: save_file(
        {"model.visual.x.lora_A.weight": np.ones((1, 1))}, folder / FILE[:-2]
    ),
    "has no adapter_model.safetensors, but adapter_model.bin; only safetensors are read: load the "
    "adapter with PEFT and store it with": written(FILE[:-2], None, "adapter_model.bin"),
    "has no adapter_config.json": written("adapter_config.json", None, "config.json"),
    "config.json: expected a JSON object, found list": written("adapter_config.json", b"[]"),
    "adapter_model.safetensors: not a complete safetensors file": written(FILE[:-2], b"0123456789"),
}


@pytest.mark.parametrize("told", REFUSED)
def test_what_cannot_be_merged_is_refused_by_name(bases, tmp_path, told, demo_inputs, capsys):
    made = Made(bases["dense"])
    made.linear("model.layers.1.self_attn.q_proj", 5 / 3)
    made.linear(UP_PROJ, 5 / 3)
    lora = made.save(tmp_path / "lora")
    REFUSED[told](lora)
    flags = ["--model_path", bases["dense"], "--lora", lora, "--layers_to_extract", 1]
    flags += ["--dataset_path", demo_inputs / "documents.parquet"]
    assert_refused(capsys, tmp_path, flags, told)


def test_an_adapter_of_a_head_needs_a_base_with_one(bases, tmp_path):
    base = shutil.copytree(bases["dense"], tmp_path / "base")
    stored = load_file(base / "model.safetensors")
    made = Made(base)
    made.linear("model.layers.1.self_attn.q_proj", 5 / 3)
    made.linear(HEAD, 5 / 3)
    del stored["lm_head.weight"]
    save_file(stored, base / "model.safetensors", {"format": "pt"})
    says = "lora_A.weight changes lm_head.weight, which --model_path .* has not; give a base"
    with pytest.raises(InputError, match=says):
        Adapter(str(made.save(tmp_path / "lora")), Checkpoint(str(base)), tied=False)


def test_an_adapter_is_an_input_of_the_run(demo_inputs, tmp_path, capsys, monkeypatch):
    """From a bucket, too. Stored are the merged model's activations; a run with another adapter, or
    with none, does not continue or verify them."""
    monkeypatch.chdir(tmp_path)
    model, layer = demo_inputs / "model", "model.layers.0"
    made = Made(model)
    made.config["lora_alpha"] = 6
    made.linear(f"{layer}.self_attn.q_proj", 2)
    made.linear(f"{layer}.mlp.down_proj", 2)
    made.save(tmp_path / "lora")
    merged = made.save_merged(model, tmp_path / "merged")
    rows = ["--dataset_path", demo_inputs / "documents.parquet", "--max_seq_length", 64]
    rows += ["--layers_to_extract", 1, "--shard_size_gb", 0.0002, "--max_samples"]
    flags = ["--model_path", model, *rows]
    assert main(*flags, 20, "--lora", "lora", "--output_dir", "out") == 0
    assert "--lora lora: merged in float32 into 2 tensors" in capsys.readouterr().err
    assert main("--model_path", merged, *rows, 20, "--output_dir", "expected") == 0
    found, expected = records_of(tmp_path / "out")[1], records_of(tmp_path / "expected")[1]
    assert len(found) == len(expected) == 20
    for got, wanted in zip(found, expected, strict=True):
        scale = np.sqrt((wanted["activation"] ** 2).mean())
        np.testing.assert_allclose(got["activation"], wanted["activation"], atol=1e-4 * scale)
    metadata = json.loads((tmp_path / "out/metadata.json").read_text())
    assert metadata["configuration"]["lora"] == str(tmp_path / "lora")

    other = shutil.copytree(tmp_path / "lora", tmp_path / "other")
    config(lora_alpha=3)(other)
    remote = f"memory://{tmp_path.name}/lora"
    fsspec.filesystem("memory").put(f"{tmp_path}/lora/*", f"{remote}/")
    again, verify = [*flags, 30, "--output_dir", "out"], ["--verify", "--output_dir", "out"]
    of_model, came = ["--model_path", model], "that the stored activations came from\n"
    for asked, status, told in (
        ([*again, "--lora", other], 2, "already holds an extraction that differs in lora_digest: "),
        (again, 2, "already holds an extraction that differs in lora_digest: "),
        ([*again, "--lora", remote], 0, ""),
        ([*verify, *of_model, "--lora", remote], 0, ""),
        ([*verify, *of_model], 2, f"error: --lora: the adapter is missing, the one {came}"),
        ([*verify, "--lora", remote], 2, "error: --lora: needs --model_path here\n"),
        (["--demo", "--lora", "lora"], 2, "--demo and --lora cannot be used together"),
        (["--report", "report.html", "--output_dir", "out"], 0, ""),
        ([*flags, 30, "--lora", "lora", "--list_hooks"], 0, ""),
        (
            [*flags, 30, "--lora", "out", "--list_hooks"],
            2,
            "out: has no adapter_config.json",
        ),
        ([*flags, 30, "--lora", "lora", "--plan", "v5e:2x2"], 0, ""),
        ([*flags, 30, "--lora", "out", "--plan", "v5e:2x2"], 2, "out: has no adapter_config.json"),
    ):
        capsys.readouterr()
        assert main(*asked) == status and told in capsys.readouterr().err
    assert f"LoRA adapter: {remote}" in re.sub(r"<wbr>|\u200b", "", Path("report.html").read_text())
