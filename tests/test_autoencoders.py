"""--encode: every published form gives the codes of its publisher's formula in NumPy, on every
mesh; what is not known is refused by name. Publishers' own code runs in test_trainers.py.
"""

import json
import pickle
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import autoencoder_files as made
import fsspec
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from activation_extraction.common.codes import Codes
from activation_extraction.common.errors import InputError
from activation_extraction.model import encode as encoding
from activation_extraction.model.autoencoders import read_autoencoder
from activation_extraction.model.encode import Encoder, make_encoders
from activation_extraction.model.hooks import HOOKS
from activation_extraction.model.mesh import build_layout

RESID, OUT = "blocks.1.hook_resid_post", "blocks.1.hook_mlp_out"
SIZES = dict(D=made.D, F=32, N=4, H=16, K=2, Q=4, V=99)
FORMS = {
    "Qwen-Scope": made.qwen_scope,
    "SAELens standard": made.sae_lens,
    "SAELens without b_dec": partial(made.sae_lens, apply_b_dec_to_input=False),
    "SAELens jumprelu": partial(made.sae_lens, architecture="jumprelu"),
    "SAELens topk": partial(made.sae_lens, architecture="topk", k=9),
    "SAELens topk rescaled": partial(
        made.sae_lens, architecture="topk", k=9, rescale_acts_by_decoder_norm=True
    ),
    "SAELens norm": partial(made.sae_lens, normalize_activations="constant_norm_rescale"),
    "SAELens layer norm": partial(made.sae_lens, normalize_activations="layer_norm"),
    "SAELens transcoder": partial(
        made.sae_lens, architecture="transcoder", normalize_activations="layer_norm"
    ),
    "SAELens skip": partial(made.sae_lens, architecture="jumprelu_skip_transcoder"),
    "sparsify": made.sparsify,
    "sparsify transcoder": partial(made.sparsify, module="layers.1.mlp", transcode=True),
    "Llamascopium": made.llamascopium,
    "Llamascopium jumprelu": partial(
        made.llamascopium, act_fn="jumprelu", norm="inference", out=OUT, bias=False
    ),
    "Llamascopium transcoder": partial(made.llamascopium, out=OUT, include=False),
    "Llamascopium tokens": partial(made.llamascopium, act_fn="relu", norm="token-wise"),
    "circuit-tracer": made.circuit_tracer,
    "circuit-tracer jumprelu": partial(made.circuit_tracer, jumps=True, config=False),
}
ONE = {"data": 1}
MESHES = (
    *({"model": 8}, {"data": 2, "model": 4}, {"data": 2, "fsdp": 2, "model": 2}, {"data": 8}),
    {"pipeline": 2, "data": 2, "model": 2},
)


def encoded(path, x, target, most=None, mesh=ONE, hook=""):
    """The codes of x (tokens, D) in rows of 8 tokens, with the autoencoder at its hooks."""
    devices = jax.devices()[: int(np.prod([*mesh.values()]))]
    layout = build_layout(devices, mesh, kv_heads=2)
    (encoder,) = make_encoders([read_autoencoder(hook, path)], most, HOOKS, 3, SIZES)
    weights = encoder.weights(layout)
    rows, targets = (jnp.asarray(each.reshape(-1, 8, each.shape[1])) for each in (x, target))
    step = jax.jit(lambda *arrays: encoding.encode(encoder, *arrays, layout))
    records = np.asarray(step(weights, rows, targets)).reshape(len(x), -1)
    return encoder, Codes.of(records, encoder.autoencoder.features)


def inputs(dtype=np.float32):
    chance = np.random.default_rng(3)
    x, target = chance.standard_normal((2, 64, made.D)).astype(np.float32)
    x[:2] *= 50  # sinks
    return x.astype(dtype), target.astype(dtype)


def assert_codes(codes, features, result, target):
    """The same active features, their values to 1e-4 of the largest, and the errors."""
    dense = codes.to_scipy().toarray()
    assert ((dense != 0) == (features != 0)).all()
    np.testing.assert_allclose(dense, features, atol=1e-4 * np.abs(features).max(), rtol=1e-4)
    errors = np.square(target.astype(np.float64) - result).sum(1)
    np.testing.assert_allclose(codes.error, errors, rtol=1e-3)
    np.testing.assert_allclose(codes.norm, np.linalg.norm(target, axis=1), rtol=1e-5)
    assert all((np.diff(codes[t : t + 1].indices) > 0).all() for t in range(len(codes)))


@pytest.mark.parametrize("form", FORMS)
def test_codes_are_those_of_the_publishers_formula(form, tmp_path):
    path, formula = FORMS[form](tmp_path)
    x, target = inputs()
    encoder, codes = encoded(path, x, target, most=made.F)
    transcodes = "transcoder" in form or "skip" in form or "circuit" in form
    transcodes |= form == "Llamascopium jumprelu"
    assert (encoder.source != encoder.target) == transcodes
    of_mlp = "mlp" in path or "circuit" in form
    assert encoder.source.name == ("blocks.1.ln2.hook_out" if of_mlp else RESID)
    features, result = formula(x.astype(np.float64))
    assert_codes(codes, features, result, target if transcodes else x)
    assert (codes.active == (features != 0).sum(1)).all()


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: " ".join(map(str, mesh.items())))
def test_every_mesh_gives_the_same_codes(mesh, tmp_path):
    path, formula = made.sae_lens(tmp_path, "topk", k=9, rescale_acts_by_decoder_norm=True)
    x, target = inputs()
    _, codes = encoded(path, x, target, mesh=mesh)
    assert_codes(codes, *formula(x.astype(np.float64)), x)


@pytest.mark.parametrize("mesh", [ONE, {"data": 2, "model": 4}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_blocks_change_nothing(mesh, dtype, tmp_path, monkeypatch):
    """Three tokens of a row at a time, of 8. The encoder's dtype is that of its products."""
    path, formula = made.sae_lens(tmp_path, "topk", k=9, dtype=dtype)
    x, target = inputs(dtype)
    _, whole = encoded(path, x, target, mesh=mesh)
    devices = 1 if mesh is ONE else 8
    monkeypatch.setattr(encoding, "VALUES_OF_A_BLOCK", 3 * 8 * made.F // devices + devices)
    _, codes = encoded(path, x, target, mesh=mesh)
    for name in ("indptr", "indices", "data", "error", "norm"):
        np.testing.assert_allclose(getattr(codes, name), getattr(whole, name), rtol=1e-5)
    features, _ = formula(x.astype(np.float64))
    off = np.abs(codes.to_scipy().toarray() - features).max() / features.max()
    assert off < 1e-5 if dtype == "float32" else 1e-4 < off < 3e-2


@pytest.mark.parametrize("mesh", [ONE, {"model": 8}])
def test_what_encode_most_cuts_is_counted(mesh, tmp_path):
    """The largest are kept, and the first of those that are tied; the error is that of these."""
    path, _ = made.sae_lens(tmp_path)
    weights = tmp_path / "sae_weights.safetensors"
    exact = load_file(weights) | {"W_enc": np.eye(made.D, made.F, dtype=np.float32)}
    for first in (64, 128):  # features with the values of the first ones
        exact["W_enc"][:, first:] = exact["W_enc"][:, : made.F - first]
    exact |= {name: np.zeros_like(exact[name]) for name in ("b_enc", "b_dec")}
    save_file(exact, weights)
    x, target = inputs()
    features = made.relu(x.astype(np.float64)) @ exact["W_enc"]
    kept = made.top(5, features, features)
    _, codes = encoded(path, x, target, most=5, mesh=mesh)
    assert_codes(codes, kept, kept @ exact["W_dec"], x)
    assert (codes.active == (features != 0).sum(1)).all() and codes.active.max() > 50
    assert (np.diff(codes.indptr) == np.minimum(codes.active, 5)).all()


@pytest.mark.parametrize("form", ["Qwen-Scope", "circuit-tracer"])
def test_a_folder_has_a_file_for_each_layer(form, tmp_path):
    path, _ = FORMS[form](tmp_path)
    folder = path.rpartition("/")[0]
    hook = RESID if form == "Qwen-Scope" else "model.layers.1.mlp.input"
    autoencoder = read_autoencoder(hook, folder)
    assert autoencoder.hook == hook and str(autoencoder.files[0]) == path
    other = read_autoencoder("blocks.2.hook_resid_post", path)
    assert other.hook == "blocks.2.hook_resid_post"
    again = pickle.loads(pickle.dumps(autoencoder))
    assert len(pickle.dumps(autoencoder)) < 1000 and (again.W_dec == autoencoder.W_dec).all()
    with pytest.raises(InputError, match="nor one of the layer of HOOK in --encode HOOK="):
        read_autoencoder("", folder)


@pytest.mark.parametrize("form", ["Qwen-Scope", "SAELens topk", "Llamascopium", "circuit-tracer"])
def test_a_bucket_has_what_a_folder_has(form, tmp_path):
    path, _ = FORMS[form](tmp_path)
    url = f"memory://{tmp_path.name}-{form.replace(' ', '-')}"
    fsspec.filesystem("memory").put(f"{tmp_path}/", url, recursive=True)
    here, there = (read_autoencoder("", each) for each in (path, path.replace(str(tmp_path), url)))
    assert here.hook == there.hook and here.k == there.k and here.target == there.target
    assert there.files and all(file.is_file() for file in there.files)  # for their digest
    for name, array in here.arrays.items():
        np.testing.assert_array_equal(array, there.arrays[name])


def test_shapes_are_known_without_the_weights(tmp_path):
    encoder = Encoder(read_autoencoder("", made.sae_lens(tmp_path)[0]), *[None] * 2, 3)
    layout = build_layout(jax.devices(), {"fsdp": 2, "model": 4}, kv_heads=2)
    shapes, arrays = encoder.shapes(layout), encoder.weights(layout)
    for name, array in arrays.items():
        assert (array.shape, array.dtype) == (shapes[name].shape, shapes[name].dtype)
        assert array.sharding == shapes[name].sharding
    assert arrays["W_enc"].addressable_shards[0].data.shape == (made.F // 4, made.D // 2)


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def evil(path):
    """Replaces the pickle of a file by one that would run code."""
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].split("/")[0]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{root}/data.pkl", pickle.dumps({"W_enc": Evil()}))


def test_files_of_torch_run_no_code(tmp_path, capsys):
    path, _ = made.qwen_scope(tmp_path)
    file = Path(path)
    whole = file.read_bytes()
    evil(path)
    with pytest.raises(InputError, match="refused: would import 'builtins.print'"):
        read_autoencoder("", path)
    for length in range(0, len(whole), len(whole) // 40):  # cut short, or a byte changed
        changed = bytearray(whole)
        changed[length] ^= 255
        for content in (whole[:length], bytes(changed)):
            file.write_bytes(content)
            try:
                read_autoencoder("", path)
            except InputError as error:
                assert path in str(error) and "\n" not in str(error)
    assert "executed" not in capsys.readouterr().out


def saved(tmp_path, change):
    """An autoencoder of SAELens with another configuration."""
    path, _ = made.sae_lens(tmp_path)
    file = tmp_path / "cfg.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))
    return path


def renamed(tmp_path):
    path, _ = made.qwen_scope(tmp_path)
    folder = tmp_path / "SAE-Res-Tiny-W1K-L0_7"
    return str(folder.rename(tmp_path / "mine") / "layer1.sae.pt")


def square(tmp_path):
    path, _ = made.circuit_tracer(tmp_path)
    tensors = load_file(path)
    cut = {"W_enc": made.D, "W_dec": made.D, "b_enc": made.D}
    save_file({n: v[: cut.get(n)] for n, v in tensors.items()}, path)
    return path


def with_tensors(tmp_path, **changed):
    path, _ = made.circuit_tracer(tmp_path)
    save_file(load_file(path) | changed, path)
    return path


def without_hooks(tmp_path):
    made.llamascopium(tmp_path)
    return other(tmp_path, "config.json", sae_type="sae", act_fn="topk")


def of_layers(tmp_path):
    made.llamascopium(tmp_path)
    return other(tmp_path, "config.json", sae_type="clt")


def of_groups(tmp_path):
    path, _ = made.sparsify(tmp_path)
    return other(Path(path), "cfg.json", activation="groupmax")


def cross_layer(tmp_path, text="model_kind: cross_layer_transcoder"):
    path, _ = made.circuit_tracer(tmp_path)
    (tmp_path / "config.yaml").write_text(text)
    return path


def other(tmp_path, name, **config):
    (tmp_path / name).write_text(json.dumps(config))
    return str(tmp_path)


def named(tmp_path, **said):
    """An autoencoder of SAELens with other metadata."""
    return saved(tmp_path, lambda config: config["metadata"].update(said))


def of_sae_lens(tmp_path, **config):
    return saved(tmp_path, lambda known: known.update(config))


REFUSED = [
    ("architecture 'gated' is not read, only", lambda at: of_sae_lens(at, architecture="gated")),
    ("architecture 'temporal'", lambda at: of_sae_lens(at, architecture="temporal")),
    ("SAELens before 6", lambda at: saved(at, lambda c: c["metadata"].pop("sae_lens_version"))),
    ("SAELens before 6", lambda at: named(at, sae_lens_version="5.9")),
    ("normalize_activations 'odd'", lambda at: of_sae_lens(at, normalize_activations="odd")),
    ("does not name its hook", lambda at: named(at, hook_name=None)),
    ("KeyError: 'threshold'", lambda at: of_sae_lens(at, architecture="jumprelu")),
    ("k is 0, expected 1 to 200", lambda at: made.sae_lens(at, "topk", k=0)[0]),
    ("KeyError: 'hook_name_out'", lambda at: of_sae_lens(at, architecture="transcoder")),
    ("which ends in -L0_K", renamed),
    ("square matrices, whose orientation", square),
    ("W_dec has shape", lambda at: with_tensors(at, W_dec=np.zeros((made.D, 3), np.float32))),
    ("has a tensor b_gate", lambda at: with_tensors(at, b_gate=np.zeros(3, np.float32))),
    ("is of dictionary_learning", lambda at: other(at, "ae.pt")),
    (
        "has no sparsity.safetensors of a form",
        lambda at: f"{made.sae_lens(at)[0]}/sparsity.safetensors",
    ),
    ("sae_type 'clt' is not read", of_layers),
    ("act_fn 'batchtopk' is not read", lambda at: made.llamascopium(at, "batchtopk")[0]),
    ("norm_activation 'batch-wise'", lambda at: made.llamascopium(at, norm="batch-wise")[0]),
    (
        "norm_activation 'token-wise'",
        lambda at: made.llamascopium(at, norm="token-wise", out=OUT)[0],
    ),
    ("cannot be read: KeyError", without_hooks),
    ("activation 'groupmax'", of_groups),
    ("model_kind 'cross_layer_transcoder'", cross_layer),
    ("cannot be read: ScannerError: while scanning", lambda at: cross_layer(at, "model_kind: '\n")),
    ("cannot be read: TypeError", lambda at: cross_layer(at, "[1]")),
    ("not a hub name", lambda at: str(at / "none")),
    ("has no files of a form that is read", str),
]


@pytest.mark.parametrize("told, make", REFUSED, ids=[each[0] for each in REFUSED])
def test_what_is_not_known_is_refused_by_name(told, make, tmp_path):
    path = make(tmp_path)
    with pytest.raises(InputError, match=told) as refusal:
        read_autoencoder("", path)
    assert str(refusal.value).startswith(f"--encode {tmp_path}") and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "told, hook, sizes",
    [
        ("matches no hook of a model", "blocks.7.hook_resid_post", {}),
        ("is not one hook with activations", "blocks.*.hook_resid_post", {}),
        ("is not one hook with activations", "loss", {}),
        ("is for 64 numbers per token, .* has 63; is it of another model", RESID, {"D": 63}),
    ],
)
def test_hooks_that_do_not_fit_are_refused(told, hook, sizes, tmp_path):
    autoencoder = read_autoencoder(hook, made.sae_lens(tmp_path)[0])
    with pytest.raises(InputError, match=told):
        make_encoders([autoencoder], None, HOOKS, 3, SIZES | sizes)
    if hook == RESID and not sizes:
        with pytest.raises(InputError, match="has another autoencoder already"):
            make_encoders([autoencoder] * 2, None, HOOKS, 3, SIZES)


def test_memory_does_not_grow_with_the_dictionary(tmp_path, monkeypatch):
    """By the compiler's plan, beside the weights, for eight times as many features."""
    monkeypatch.setattr(encoding, "VALUES_OF_A_BLOCK", 2**16)
    autoencoder = read_autoencoder("", made.sae_lens(tmp_path, "topk", k=9)[0])
    layout, found = build_layout(jax.devices()[:1], ONE, kv_heads=2), []
    for features in (2**10, 2**13):
        shapes = {"W_enc": (features, made.D), "W_dec": (features, made.D), "b_enc": (features,)}
        larger = {n: np.broadcast_to(np.float32(0), shape) for n, shape in shapes.items()}
        wide = replace(autoencoder, **larger)
        (encoder,) = make_encoders([wide], None, HOOKS, 3, SIZES)
        x = jax.ShapeDtypeStruct((4, 512, made.D), jnp.float32)

        def step(weights, x, encoder=encoder):
            return encoding.encode(encoder, weights, x, x, layout)

        compiled = jax.jit(step).lower(encoder.shapes(layout), x).compile()
        found.append(compiled.memory_analysis().temp_size_in_bytes)
    assert found[1] < 1.5 * found[0] < 2**21 + 2 * x.size * 4
