"""--encode: every published form gives the codes of its publisher's formula in NumPy, on every
mesh; what is not known is refused by name. Publishers' own code runs in test_trainers.py.
"""

import json
import pickle
import zipfile
from dataclasses import replace
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
from activation_extraction.model import autoencoders
from activation_extraction.model import encode as encoding
from activation_extraction.model.autoencoders import read_autoencoder
from activation_extraction.model.encode import make_encoders
from activation_extraction.model.hooks import HOOKS
from activation_extraction.model.mesh import build_layout

RESID, OUT, MLP_IN = (f"blocks.1.{n}" for n in ("hook_resid_post", "hook_mlp_out", "ln2.hook_out"))
SIZES = dict(D=made.D, F=32, N=4, H=16, K=2, Q=4, V=99)
CONSTANT_NORM, TOKEN_WISE, INFERENCE = "constant_norm_rescale", "token-wise", "inference"
TRANSCODER, MLP = "transcoder", "layers.1.mlp"
LAYER_NORM, JUMPS = dict(normalize_activations="layer_norm"), dict(act_fn="jumprelu", bias=False)
RESCALED = dict(architecture="topk", k=9, rescale_acts_by_decoder_norm=True)
AVERAGE = dict(normalize_activations="expected_average_only_in")
WHITENED = dict(normalize_activations="covariance_whitening")
FORMS = {  # the hooks that are read and reconstructed, who writes the files, and how
    "Qwen-Scope": (RESID, RESID, made.qwen_scope, {}),
    "SAELens standard": (RESID, RESID, made.sae_lens, {}),
    "SAELens without b_dec": (RESID, RESID, made.sae_lens, dict(apply_b_dec_to_input=False)),
    "SAELens jumprelu": (RESID, RESID, made.sae_lens, dict(architecture="jumprelu")),
    "SAELens topk": (RESID, RESID, made.sae_lens, dict(architecture="topk", k=9)),
    "SAELens topk rescaled": (RESID, RESID, made.sae_lens, RESCALED),
    "SAELens norm": (RESID, RESID, made.sae_lens, dict(normalize_activations=CONSTANT_NORM)),
    "SAELens layer norm": (RESID, RESID, made.sae_lens, LAYER_NORM),
    "SAELens not folded": (RESID, RESID, made.sae_lens, AVERAGE),
    "SAELens not folded, topk": (RESID, RESID, made.sae_lens, AVERAGE | RESCALED),
    "SAELens whitened": (RESID, RESID, made.sae_lens, WHITENED | dict(architecture="jumprelu")),
    "SAELens whitened, topk": (RESID, RESID, made.sae_lens, WHITENED | RESCALED),
    "SAELens whitened without b_dec": (
        RESID,
        RESID,
        made.sae_lens,
        WHITENED | dict(apply_b_dec_to_input=False),
    ),
    "SAELens transcoder": (RESID, OUT, made.sae_lens, LAYER_NORM | dict(architecture=TRANSCODER)),
    "SAELens skip": (RESID, OUT, made.sae_lens, dict(architecture=f"jumprelu_skip_{TRANSCODER}")),
    "sparsify": (RESID, RESID, made.sparsify, {}),
    "sparsify transcoder": (MLP_IN, OUT, made.sparsify, dict(module=MLP, transcode=True)),
    "Llamascopium": (RESID, RESID, made.llamascopium, {}),
    "Llamascopium tokens": (RESID, RESID, made.llamascopium, dict(act_fn="relu", norm=TOKEN_WISE)),
    "Llamascopium transcoder": (RESID, OUT, made.llamascopium, dict(out=OUT, include=False)),
    "Llamascopium jumprelu": (RESID, OUT, made.llamascopium, JUMPS | dict(norm=INFERENCE, out=OUT)),
    "circuit-tracer": (MLP_IN, OUT, made.circuit_tracer, {}),
    "circuit-tracer jumprelu": (MLP_IN, OUT, made.circuit_tracer, dict(jumps=True, config=False)),
}
ONE, EIGHT = {"data": 1}, {"model": 8}


def encoded(path, x, target, most=None, mesh=ONE):
    """Returns the codes of x (tokens, D) in rows of 8 tokens, with the autoencoder at its hooks."""
    devices = jax.devices()[: int(np.prod([*mesh.values()]))]
    layout = build_layout(devices, mesh, kv_heads=2)
    (encoder,) = make_encoders([read_autoencoder("", path)], most, HOOKS, 3, SIZES)
    weights = encoder.weights(layout)
    rows, targets = (jnp.asarray(each.reshape(-1, 8, each.shape[1])) for each in (x, target))
    step = jax.jit(lambda *arrays: encoding.encode(encoder, *arrays, layout))
    records = np.asarray(step(weights, rows, targets)).reshape(len(x), -1)
    return encoder, Codes.of(records, encoder.autoencoder.features)


def inputs():
    chance = np.random.default_rng(3)
    x, target = chance.standard_normal((2, 64, made.D)).astype(np.float32)
    x[:2] *= 50  # sinks
    return x, target


def assert_codes(codes, features, result, target):
    """Requires the same active features, their values to 1e-4 of the largest, and errors."""
    dense = codes.to_scipy().toarray()
    assert ((dense != 0) == (features != 0)).all()
    np.testing.assert_allclose(dense, features, atol=1e-4 * np.abs(features).max(), rtol=1e-4)
    errors = np.square(target.astype(np.float64) - result).sum(1)
    np.testing.assert_allclose(codes.error, errors, rtol=1e-3)
    np.testing.assert_allclose(codes.norm, np.linalg.norm(target, axis=1), rtol=1e-5)
    assert all((np.diff(codes[t : t + 1].indices) > 0).all() for t in range(len(codes)))


@pytest.mark.parametrize("form", FORMS)
def test_codes_are_those_of_the_publishers_formula(form, tmp_path):
    source, target, make, options = FORMS[form]
    path, formula = make(tmp_path, **options)
    x, other = inputs()
    encoder, codes = encoded(path, x, other, most=made.F)
    assert (encoder.source_hook.name, encoder.target_hook.name) == (source, target)
    assert_codes(codes, *formula(x.astype(np.float64)), x if source == target else other)


OTHER_MESH = {"pipeline": 2, "data": 2, "model": 2}


@pytest.mark.parametrize(
    "dtype, mesh",
    [
        ("float32", EIGHT),
        ("bfloat16", {"data": 2, "model": 4}),
        pytest.param("float32", OTHER_MESH, marks=pytest.mark.rare),
    ],
    ids=str,
)
def test_every_mesh_gives_the_same_codes(dtype, mesh, tmp_path, monkeypatch):
    """Three tokens of a row at a time, of 8. The encoder's dtype is that of its products."""
    monkeypatch.setattr(encoding, "VALUES_OF_A_BLOCK", 3 * 8 * made.F // 8 + 8)
    rule = dict(k=9, rescale_acts_by_decoder_norm=True, dtype=dtype)
    path, formula = made.sae_lens(tmp_path, "topk", **rule)
    x, _ = inputs()
    encoder, codes = encoded(path, x, x, mesh=mesh)
    features, result = formula(x.astype(np.float64))
    if dtype == "float32":
        assert_codes(codes, features, result, x)
    else:
        off = np.abs(codes.to_scipy().toarray() - features).max() / features.max()
        assert 1e-4 < off < 3e-2
    weights = encoder.weights(build_layout(jax.devices(), mesh, kv_heads=2))["W_enc"]
    parts = 8 // mesh.get("data", 1)  # devices that share rows share the dictionary
    assert weights.addressable_shards[0].data.size * parts == weights.size


@pytest.mark.parametrize("mesh", [ONE, EIGHT])
def test_what_encode_most_cuts_is_counted(mesh, tmp_path):
    """The largest are kept, and the first of those that are tied; the error is that of these."""
    path, _ = made.sae_lens(tmp_path)
    weights = tmp_path / "sae_weights.safetensors"
    exact = load_file(weights) | {"W_enc": np.eye(made.D, made.F, dtype=np.float32)}
    for first in (64, 128):  # features with the values of the first ones
        exact["W_enc"][:, first:] = exact["W_enc"][:, : made.F - first]
    exact |= {name: np.zeros_like(exact[name]) for name in ("b_enc", "b_dec")}
    save_file(exact, weights)
    x, _ = inputs()
    features = made.relu(x.astype(np.float64)) @ exact["W_enc"]
    kept = made.top(5, features, features)
    _, codes = encoded(path, x, x, most=5, mesh=mesh)
    assert_codes(codes, kept, kept @ exact["W_dec"], x)
    assert (codes.active == (features != 0).sum(1)).all() and codes.active.max() > 50


@pytest.mark.parametrize(
    "make, hook", [(made.qwen_scope, RESID), (made.circuit_tracer, "model.layers.1.mlp.input")]
)
def test_a_folder_has_a_file_for_each_layer(make, hook, tmp_path):
    """It may be in a bucket, too."""
    path, _ = make(tmp_path)
    other = read_autoencoder("blocks.2.hook_resid_post", path)
    assert other.hook_name == "blocks.2.hook_resid_post" and str(other.file_paths[0]) == path
    url = f"memory://{tmp_path.name}"
    fsspec.filesystem("memory").put(f"{tmp_path}/", url, recursive=True)
    for folder in (path, path.replace(str(tmp_path), url)):
        folder, _, file = folder.rpartition("/")
        found = read_autoencoder(hook, folder)
        assert found.hook_name == hook and found.file_paths[0].name.endswith(
            file
        )  # for their digest
        for name, array in read_autoencoder("", path).arrays.items():
            np.testing.assert_array_equal(array, found.arrays[name])
        with pytest.raises(InputError, match="N is the layer of HOOK in --encode HOOK="):
            read_autoencoder("", folder)


class Evil:
    def __reduce__(self):
        return print, ("executed",)


def test_files_of_torch_run_no_code(tmp_path, capsys):
    path, _ = made.qwen_scope(tmp_path)
    whole = Path(path).read_bytes()
    with zipfile.ZipFile(path) as archive:
        root = archive.namelist()[0].split("/")[0]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{root}/data.pkl", pickle.dumps({"W_enc": Evil()}))
    with pytest.raises(InputError, match="refused: would import 'builtins.print'"):
        read_autoencoder("", path)
    assert "executed" not in capsys.readouterr().out
    Path(path).write_bytes(whole[:-100])
    with pytest.raises(InputError, match=f"^--encode {path}: not a file of PyTorch tensors: "):
        read_autoencoder("", path)


def of_older_sae_lens(folder):
    path, _ = made.sae_lens(folder)
    file = folder / "cfg.json"
    metadata = {"hook_name": RESID, "sae_lens_version": "5.9"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"metadata": metadata}))
    return path


def with_tensors(folder, **changes):
    path, _ = made.circuit_tracer(folder)
    save_file(load_file(path) | changes, path)
    return path


def without(name, changes=None):
    """Returns a maker of a SAELens checkpoint that lacks a file, or has another one."""

    def make(folder):
        norm = WHITENED if "whitening" in name else AVERAGE
        path, _ = made.sae_lens(folder, **norm)
        (folder / name).unlink()
        if changes is not None:
            (folder / name).write_text(json.dumps(changes))
        return path

    return make


def renamed(folder):
    path, _ = made.qwen_scope(folder)
    return str(Path(path).parent.rename(folder / "mine") / "layer1.sae.pt")


SCALER = "activation_scaler.json"
REFUSED = [
    ("architecture is 'gated', expected standard or", lambda at: made.sae_lens(at, "gated")[0]),
    ("no metadata.sae_lens_version of 6 or later", of_older_sae_lens),
    ("activations is 'odd'", lambda at: made.sae_lens(at, normalize_activations="odd")[0]),
    ("which ends in -L0_K", renamed),
    ("W_dec has shape", lambda at: with_tensors(at, W_dec=np.zeros((made.D, 3), np.float32))),
    ("has a tensor b_gate", lambda at: with_tensors(at, b_gate=np.zeros(3, np.float32))),
    ("act_fn is 'batchtopk', expected relu or", lambda at: made.llamascopium(at, "batchtopk")[0]),
    (
        "has no files of a supported format; looked for layerN.sae.pt, layer_N.safetensors, "
        "sae_weights.safetensors with cfg.json, sae.safetensors with cfg.json, "
        "sae_weights.safetensors with config.json, sae_weights.pt with config.json, "
        "checkpoints/final.safetensors with config.json; N is the layer of HOOK in --encode HOOK=",
        str,
    ),
    ("'expected_average_only_in', and activation_scaler.json is not", without(SCALER)),
    (
        "scaling_factor is None, expected a positive number",
        without(SCALER, {"scaling_factor": None}),
    ),
    (
        "scaling_factor is inf, expected a positive number",
        without(SCALER, {"scaling_factor": np.inf}),
    ),
    ("activation_whitening.safetensors is not", without("activation_whitening.safetensors")),
    ("in a folder without the name of a module", lambda at: made.sparsify(at, "a", True)[0]),
    ("is a transcoder with normalize", lambda at: made.sae_lens(at, TRANSCODER, **AVERAGE)[0]),
]


@pytest.mark.parametrize("told, make", REFUSED, ids=[each[0] for each in REFUSED])
def test_what_is_not_known_is_refused_by_name(told, make, tmp_path):
    path = make(tmp_path)
    with pytest.raises(InputError, match=told) as refusal:
        read_autoencoder("", path)
    assert str(refusal.value).startswith(f"--encode {tmp_path}") and "\n" not in str(refusal.value)


BAD_WEIGHTS = {  # what is written into the first numbers of a tensor
    "W_enc": np.nan,
    "b_enc": np.inf,
    "W_dec": -np.inf,
    "b_dec": np.nan,
    "threshold": np.nan,
}


@pytest.mark.parametrize("name", BAD_WEIGHTS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_weights_that_are_not_finite_are_refused_by_name(name, dtype, tmp_path, monkeypatch):
    """Features of such weights would never be active. The arrays are looked at in pieces."""
    monkeypatch.setattr(autoencoders, "VALUES_AT_ONCE", 999)
    path, _ = made.sae_lens(tmp_path, "jumprelu")
    weights = tmp_path / "sae_weights.safetensors"
    tensors = {key: values.astype(dtype) for key, values in load_file(weights).items()}
    save_file(tensors, weights)
    assert read_autoencoder("", path).features == made.F
    # float64 has numbers that are infinite in float32, in which features are computed
    bad = 1e300 if dtype == "float64" and np.isinf(BAD_WEIGHTS[name]) else BAD_WEIGHTS[name]
    tensors[name].flat[-1] = bad
    save_file(tensors, weights)
    with pytest.raises(InputError, match=rf"^--encode {path}: {name}\[.*\d\] is -?(nan|inf): "):
        read_autoencoder("", path)


def test_memory_does_not_grow_with_the_dictionary(tmp_path, monkeypatch):
    """The compiler plans about as much beside the weights for eight times as many features."""
    monkeypatch.setattr(encoding, "VALUES_OF_A_BLOCK", 2**16)
    autoencoder = read_autoencoder("", made.sae_lens(tmp_path, "topk", k=9)[0])
    layout, found = build_layout(jax.devices()[:1], ONE, kv_heads=2), []
    x = jax.ShapeDtypeStruct((4, 512, made.D), jnp.float32)
    for features in (2**10, 2**13):
        shapes = {"W_enc": (features, made.D), "W_dec": (features, made.D), "b_enc": (features,)}
        larger = {n: np.broadcast_to(np.float32(0), shape) for n, shape in shapes.items()}
        (encoder,) = make_encoders([replace(autoencoder, **larger)], None, HOOKS, 3, SIZES)

        def step(weights, x, encoder=encoder):
            return encoding.encode(encoder, weights, x, x, layout)

        compiled = jax.jit(step).lower(encoder.shapes(layout), x).compile()
        found.append(compiled.memory_analysis().temp_size_in_bytes)
    assert found[1] < 1.5 * found[0] < 2**21 + 2 * x.size * 4
