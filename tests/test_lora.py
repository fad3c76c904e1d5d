"""--lora: weights are those that NumPy merges by PEFT's formulas, on any mesh and from anywhere.

An adapter that cannot be merged is refused by name."""

import json
import logging
import shutil
from typing import Any

import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_templates import QWEN3, chat_model
from chat_templates import VOCABULARY as CHAT_VOCABULARY
from command_line import assert_refused, main, records_of
from conftest import make_reference
from flax.traverse_util import flatten_dict
from float8_models import BFLOAT16
from safetensors.numpy import load_file, save_file
from test_model import MESHES, checked
from tiny_models import LLAMA, MOE, MOE_TEXT
from transformers import AutoTokenizer

from activation_extraction import ActivationDataset
from activation_extraction.cli.config import parse_args
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.family import read_model_config
from activation_extraction.model.lora import LoraAdapter
from activation_extraction.model.mesh import build_layout
from activation_extraction.model.weights import load_params
from activation_extraction.run.host_text import Text

EMBED, HEAD, ATTENTION, MLP = "model.embed_tokens", "lm_head", "self_attn", "mlp"
CONFIG = dict(peft_type="LORA", r=3, lora_alpha=5, peft_version="0.21.2", target_modules=None)
MODELS = {
    "dense": dict(num_key_value_heads=2, head_dim=24, vocab_size=257),
    "llama": LLAMA | dict(num_key_value_heads=2, attention_bias=True),
    "tied": dict(num_key_value_heads=1, tie_word_embeddings=True),
    "experts one by one": MOE | dict(num_key_value_heads=2, head_dim=64, num_hidden_layers=2),
    "fused experts": MOE_TEXT,
}


class Made:
    """An adapter in the making, and the base's weights as NumPy merges them."""

    def __init__(self, base):
        self.turn = inputs_first if base.name.endswith("inputs first") else lambda _, values: values
        self.weights = {
            name.replace("language_model.", ""): self.turn(name, value).astype(np.float32)
            for name, value in load_file(base / "model.safetensors").items()
        }
        self.tensors, self.config, self.prefix = {}, dict(CONFIG), "base_model.model."
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
        out, into = sum(map(len, matrices[0])), matrices[0][0].shape[1]
        if exchanged:
            out, into = into, out
        count = len(matrices)
        a = self.random(f"{key}.lora_A.weight", count * 3, into).reshape(count, 3, into)
        b = self.random(f"{key}.lora_B.weight", out, 3 * count).reshape(out, 3, count)
        delta = scale * np.einsum("ore,eri->eio" if exchanged else "ore,eri->eoi", b, a)
        for of_expert, parts in zip(delta, matrices, strict=True):
            row = 0
            for part in parts:
                part += of_expert[row : row + len(part)]
                row += len(part)

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
    """Has patterns, ranks, biases, keys of raw dicts, whole tensors and half precision."""
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
    added = made.random(bias.replace("bias", "lora_B.bias"), *made.weights[bias].shape)
    made.weights[bias] += 4 / 3 * added
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
        gate, up, down = (
            [made.weights[name.format(layer, e, part)] for e in range(6)]
            for part in ("gate", "up", "down")
        )
        key = f"model.layers.{layer}.mlp.experts"
        made.experts(f"{key}.base_layer", 5 / 3, [*zip(gate, up, strict=True)], exchanged)
        made.experts(key, 2 / 3, [*zip(down, strict=True)], exchanged)


def fused_experts(made, exchanged=False):
    for layer in (0, 3):
        name = f"model.layers.{layer}.mlp.experts"
        for key, tensor in (("", "gate_up_proj"), (".base_layer", "down_proj")):
            matrices = [[each] for each in made.weights[f"{name}.{tensor}"]]
            made.experts(name + key, 5 / 3, matrices, exchanged)
    made.linear("model.layers.0.linear_attn.in_proj_qkv", 5 / 3)
    made.linear("model.layers.1.self_attn.q_proj", 5 / 3)
    made.linear("model.layers.2.mlp.shared_expert.up_proj", 5 / 3)


def all_exchanged(made):
    """PEFT before 0.19.1 made adapters so; the shapes tell, whatever version is named."""
    fused = "model.layers.0.mlp.experts.down_proj" in made.weights
    (fused_experts if fused else all_experts)(made, exchanged=True)


CASES = [
    *(("dense", each) for each in (everything, of_raw_names)),
    ("llama", everything),
    *(("tied", each) for each in (head_alone, embedding_alone, embedding_and_head)),
    *(("experts one by one", each) for each in (experts_one_by_one, all_experts, all_exchanged)),
    *(("fused experts", each) for each in (fused_experts, all_exchanged)),
    ("fused experts, inputs first", fused_experts),
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Folders of models by name."""
    root = tmp_path_factory.mktemp("bases")
    made = {name: make_reference(root / name, **MODELS[name]).folder for name in MODELS}
    base, folder = made["fused experts"], root / "fused experts, inputs first"
    tensors = fused(load_file(base / "model.safetensors"))
    made[folder.name] = shutil.copytree(base, folder)
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
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


def load(folder, lora=None, dtype=np.float32):
    """The parameters of the whole model, of which every device reads a part."""
    checkpoint = Checkpoint(str(folder))
    if lora is not None:
        config = read_model_config(checkpoint.file("config.json"))
        checkpoint.adapter = LoraAdapter(str(lora), checkpoint, config.tie_word_embeddings)
    model, table = checked(checkpoint)
    layout = build_layout(jax.devices(), MESHES["fsdp"], model.config.num_key_value_heads)
    params = flatten_dict(load_params(table, checkpoint, jnp.dtype(dtype), layout), sep="/")
    return {name: np.asarray(value) for name, value in params.items()}


@pytest.mark.parametrize("base,make", CASES, ids=lambda each: getattr(each, "__name__", each))
def test_weights_are_those_that_numpy_merges(bases, tmp_path, base, make):
    made = Made(bases[base])
    make(made)
    lora = made.save(tmp_path / "lora")
    found = load(bases[base], lora)
    expected = load(made.save_merged(bases[base], tmp_path / "merged"))
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=2e-6, err_msg=name)
    if make is everything:  # rounded once
        for name, value in load(bases[base], lora, BFLOAT16).items():
            np.testing.assert_array_equal(value, found[name].astype(BFLOAT16))


FILE, NOT_SUPPORTED = "adapter_model.safetensors: ", "is not supported; merge it with PEFT"
Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj"
A, B = f"{Q_PROJ}.lora_A.weight", f"{Q_PROJ}.lora_B.weight"
EXPERTS, FITS = "layers.1.mlp.experts.lora_{}.weight".format, "fits no tensor of the base model"
RESIZED = "if the vocabulary was resized for training, give"
EMBEDDING = "base_model.model.model.embed_tokens.modules_to_save.weight"
# What is said, and what is changed: settings, or tensors with their new shapes, or without one.
REFUSED: dict[str, dict[str, Any]] = {
    f"layer_replication [[0, 4]] {NOT_SUPPORTED}": {"layer_replication": [[0, 4]]},
    f"peft_type 'IA3' {NOT_SUPPORTED}": {"peft_type": "IA3"},
    f"init_lora_weights 'pissa' {NOT_SUPPORTED}": {"init_lora_weights": "pissa"},
    f"{FILE}{A} has rank 3, adapter_config.json says 4": {"r": 4},
    "is not supported: DoRA has use_dora and a linear magnitude_vector": {"use_dora": True},
    f"(260, 64), expected (257, 64); {RESIZED}": {EMBEDDING: (260, 64)},
    "lora_A.weight has shape (3, 63), expected (3, 64)": {A: (3, 63)},
    "has shape (0,) (was it saved from a part of ZeRO-3?)": {B: (0,)},
    f"{EXPERTS('A')} {FITS} (2 keys in all)": {EXPERTS("A"): (6, 8), EXPERTS("B"): (8, 6)},
    "has no tensor for the language model": {A: (), B: (), "model.visual.lora_A.weight": (1, 1)},
}


@pytest.mark.parametrize("told", REFUSED)
def test_what_cannot_be_merged_is_refused_by_name(bases, tmp_path, told, demo_inputs, capsys):
    made = Made(bases["dense"])
    made.linear("model.layers.1.self_attn.q_proj", 5 / 3)
    for name, changed in REFUSED[told].items():
        if "." not in name:
            made.config[name] = changed
        elif changed:
            made.tensors[name] = np.ones(changed, np.float32)
        else:
            del made.tensors[name]
    lora = made.save(tmp_path / "lora")
    flags = ["--model_path", bases["dense"], "--lora", lora, "--layers_to_extract", 1]
    flags += ["--dataset_path", demo_inputs / "documents.parquet"]
    assert_refused(capsys, tmp_path, flags, told)


def test_an_adapter_is_an_input_of_the_run(demo_inputs, tmp_path, capsys, monkeypatch):
    """It may be at a URL, too. The merged model's activations are stored; a run with another
    adapter, or with none, does not continue or verify them."""
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

    made.config["lora_alpha"] = 3
    other = made.save(tmp_path / "other")
    remote = f"memory://{tmp_path.name}/lora"
    fsspec.filesystem("memory").put(f"{tmp_path}/lora/*", f"{remote}/")
    again, verify = [*flags, 30, "--output_dir", "out"], ["--verify", "--output_dir", "out"]
    of_model, came = ["--model_path", model], "that the stored activations came from\n"
    for asked, status, told in (
        ([*again, "--lora", other], 2, "already holds a run that differs in lora_digest: "),
        ([*again, "--lora", remote], 0, ""),
        ([*verify, *of_model, "--lora", remote], 0, ""),
        ([*verify, *of_model], 2, f"error: --lora: the adapter is missing, the one {came}"),
        ([*flags, 30, "--lora", "out", "--list_hooks"], 2, "out: has no adapter_config.json"),
    ):
        capsys.readouterr()
        assert main(*asked) == status and told in capsys.readouterr().err


OWN, SAID = "<|sum|>", "some words <|sum|>"
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def tokenizer_in(folder, model, tokens=(), settings=None):
    """Writes a model's tokenizer to an adapter's folder, as transformers saves it, with further
    tokens and settings."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(list(tokens))
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **(settings or {})}))


@pytest.fixture(scope="module")
def chat_base(demo_inputs, tmp_path_factory):
    return chat_model(demo_inputs, tmp_path_factory.mktemp("chat"), QWEN3)


@pytest.fixture
def adapter_of(chat_base, tmp_path):
    """Makes adapters of a model, the same but for the files beside their weights."""

    def make(name):
        made = Made(chat_base)
        made.linear("model.layers.0.self_attn.q_proj", 5 / 3)
        return made.save(tmp_path / name)

    return make


def chosen(base, lora, column):
    """The text of a run with an adapter."""
    flags = ["--lora", str(lora), f"--{column}_column", column, "--dataset_path", "x.jsonl"]
    checkpoint = Checkpoint(str(base))
    checkpoint.adapter = LoraAdapter(str(lora), checkpoint, tied=True)
    options = parse_args(["--model_path", str(base), *flags]).text_options
    return Text(
        options, checkpoint, CHAT_VOCABULARY, adapter_repository=checkpoint.adapter.repository
    )


# What an adapter's folder has: further tokens and settings, the text of a file with a template, and
# whether token ids and the template are the adapter's. None: no tokenizer.
BESIDE: dict[str, tuple[Any, ...]] = {
    "nothing": (None, {}, None, False, False),
    "the same": ((), {}, None, False, False),
    "other tokens": ((OWN,), {}, None, True, False),
    "a setting": ((), {"split_special_tokens": True}, None, True, False),
    "a template alone": (None, {}, PLAIN, False, True),
    "a template": ((), {}, PLAIN, False, True),
    "both": ((OWN,), {}, PLAIN, True, True),
}


@pytest.mark.parametrize("case", BESIDE)
def test_an_adapter_brings_its_own_tokenizer_and_template(
    case, chat_base, adapter_of, caplog, monkeypatch
):
    """They are used where they differ from the model's, which the log says."""
    caplog.set_level("INFO", "extract_activations")
    monkeypatch.setattr(logging.getLogger("extract_activations"), "propagate", True)
    tokens, settings, template, own_ids, own_template = BESIDE[case]
    lora = adapter_of("lora")
    if tokens is not None:
        tokenizer_in(lora, chat_base, tokens, settings)
    if template is not None:
        (lora / "chat_template.jinja").write_text(template)
    text = chosen(chat_base, lora, "messages")
    reference = AutoTokenizer.from_pretrained(lora if own_ids else chat_base)
    for said in (SAID, "x<|im_end|>y"):
        due = reference(said, add_special_tokens=False).input_ids
        assert text.tokenizer.encode(said, add_special_tokens=False).ids == due
    assert text.template.jinja_source_by_template_name == {
        "default": PLAIN if own_template else QWEN3
    }
    home = f"--lora {lora}" if own_template else f"--model_path {chat_base}"
    assert text.template.template_flag_phrase == home
    assert (f"tokenizer: that of --lora {lora}" in caplog.text) == own_ids
    assert (f"chat template: that of --lora {lora}" in caplog.text) == own_template


def test_the_tokenizer_of_an_adapter_is_an_input_of_the_run(
    chat_base, adapter_of, texts, tmp_path, capsys
):
    """An equal one is the model's. Without it, or with another one, the run is another run."""
    lost, same, other = (adapter_of(name) for name in ("lost", "same", "other"))
    tokenizer_in(same, chat_base)
    tokenizer_in(other, chat_base, [OWN])
    path = texts([{"text": SAID}, {"text": f"{OWN}{OWN} again"}])
    flags = ["--model_path", chat_base, "--dataset_path", path, "--max_seq_length", 64]
    flags += ["--layers_to_extract", 1, "--positions", "last"]
    for name, lora in (("of_lost", lost), ("of_other", other)):
        assert main(*flags, "--lora", lora, "--output_dir", tmp_path / name) == 0
    known = [
        json.loads((tmp_path / name / "metadata.json").read_text())
        for name in ("of_lost", "of_other")
    ]
    digests = [each["identity"]["tokenizer_digest"] for each in known]
    assert digests[0] != digests[1]
    assert [each["tokenizer_path"] for each in known] == [str(chat_base), str(other)]
    ids = [sample.token_ids.tolist() for sample in ActivationDataset(tmp_path / "of_other")]
    reference = AutoTokenizer.from_pretrained(other)
    assert ids == [reference(text).input_ids[-1:] for text in (SAID, f"{OWN}{OWN} again")]
    assert ActivationDataset(tmp_path / "of_other").tokenizer_path == str(other)
    differs = "already holds a run that differs in tokenizer_digest: "
    came = "the tokenizer is not the one that the stored activations came from\n"
    for name, lora, status, told in (
        ("of_lost", same, 0, ""),
        ("of_lost", other, 2, differs),
        ("of_other", lost, 2, differs),
        ("of_other", other, 0, ""),
    ):
        asked = ["--lora", lora, "--output_dir", tmp_path / name]
        capsys.readouterr()
        assert main(*flags, *asked) == status and told in capsys.readouterr().err
        status = main("--verify", "--model_path", chat_base, *asked)
        printed = capsys.readouterr()
        if told:
            assert status == 2
            assert f"--model_path {chat_base} with --lora {lora}: {came}" in printed.err
        else:
            assert status == 0 and "2 samples recomputed; 0 problems" in printed.out


def test_tokens_of_an_adapter_that_the_model_has_no_rows_for_are_refused(
    chat_base, adapter_of, texts, tmp_path, capsys
):
    lora = adapter_of("lora")
    tokenizer_in(lora, chat_base, [f"<|{n}|>" for n in range(9)])
    flags = ["--model_path", chat_base, "--lora", lora, "--dataset_path", texts([{"text": "a"}])]
    assert main(*flags, "--layers_to_extract", 1, "--output_dir", tmp_path / "out") == 2
    told = f"{lora}/tokenizer.json: the tokenizer has token id {CHAT_VOCABULARY + 1}, but vocab_si"
    assert f"error: {told}" in capsys.readouterr().err
