"""Makes autoencoders with publishers' own packages, and what their own code computes with them.

Runs in the trainers' environment, in an empty folder: `autoencoders.py D F` writes a folder or file
for each, and expected.npz with the inputs `x` and, by its path, the features and the result.
"""

import sys
from typing import Any

import numpy as np
import torch

HOOK = "blocks.1.hook_resid_post"
D, F = map(int, sys.argv[1:])
SAE_LENS: dict[str, dict[str, Any]] = {
    "standard": {},
    "jumprelu": {"normalize_activations": "layer_norm"},
    "topk": {"k": 9, "rescale_acts_by_decoder_norm": True, "apply_b_dec_to_input": False},
    "transcoder": {"d_out": D, "apply_b_dec_to_input": False},
    "jumprelu_skip_transcoder": {"d_out": D, "apply_b_dec_to_input": False},
}
# Checkpoints from the middle of training, by their folders.
NOT_FOLDED: dict[str, dict[str, Any]] = {
    "scaled": {"architecture": "standard", "normalize_activations": "expected_average_only_in"},
    "whitened": {
        **{"architecture": "topk", "k": 9, "rescale_acts_by_decoder_norm": True},
        "normalize_activations": "covariance_whitening",
    },
}
LLAMASCOPIUM: dict[str, dict[str, Any]] = {
    "relu": {"norm_activation": "token-wise"},
    "jumprelu": {"norm_activation": "inference", "use_decoder_bias": False},
    "topk": {"norm_activation": "dataset-wise"},
}
# By hook point, which names the folder. Of 150 features, some are not positive.
SPARSIFY: dict[str, dict[str, Any]] = {
    "layers.1": {"k": 9},
    "layers.2": {"k": 9, "normalize_decoder": False},
    "layers.1.mlp": {"k": 150, "transcode": True},
    "layers.2.mlp": {"k": 9, "transcode": True, "skip_connection": True},
}
CIRCUIT_TRACER = {"layer_0": "relu", "layer_1": "jumprelu", "layer_2": "skip"}


def randomize(module):
    """Random parameters; thresholds are positive, and some features are active."""
    for name, parameter in module.named_parameters():
        scale = 0.1 if parameter.ndim > 1 else 0.5
        values = torch.randn(parameter.shape) * scale
        parameter.data = values.abs() if name.endswith("threshold") else values


def sae_lens(folder, config, x):
    """Saves an autoencoder of SAELens; returns its features for x, and what it reconstructs.

    In the folders "scaled" and "whitened", activations are scaled first, as in training, and the
    scaler is saved beside the autoencoder.
    """
    from sae_lens import SAE
    from sae_lens.training.activation_scaler import ActivationScaler

    said = {"hook_name": HOOK, "hook_name_out": "blocks.1.hook_mlp_out", "model_name": "tiny"}
    sae = SAE.from_dict({"d_in": D, "d_sae": F, "metadata": said, **config})
    randomize(sae)
    sae.save_model(folder)
    scaler = ActivationScaler()
    if folder == "scaled":
        scaler.scaling_factor = 0.27
    if folder == "whitened":
        mixed = torch.randn(D, D) / D**0.5 + torch.eye(D)
        batches = iter(lambda: torch.randn(512, D) @ mixed + 1, None)
        scaler.estimate_whitening(D, batches, n_batches_for_norm_estimate=8)
    if folder in NOT_FOLDED:
        scaler.save(f"{folder}/activation_scaler.json")
    scaled = scaler.scale(x)
    return sae.encode(scaled), scaler.unscale(sae(scaled))


def llamascopium(rule, config, x):
    from llamascopium.models.sae import SAEConfig, SparseAutoEncoder

    sizes = {"d_model": D, "expansion_factor": F / D, "dtype": torch.float32, "device": "cpu"}
    hooks = {"hook_point_in": HOOK, "hook_point_out": HOOK}
    cfg = SAEConfig(sae_type="sae", **sizes, **hooks, act_fn=rule, top_k=8, **config)
    sae = SparseAutoEncoder(cfg)
    randomize(sae)
    sae.set_dataset_average_activation_norm({HOOK: 5.0})
    sae.save_pretrained(f"llamascopium_{rule}")
    cfg.save_hyperparameters(f"llamascopium_{rule}")
    scale = sae.compute_norm_factor(x, hook_point=HOOK)
    features = sae.encode(x * scale)
    return features, sae.decode(features) / scale


def sparsify(hookpoint, config, x):
    from sparsify import SparseCoder, SparseCoderConfig

    sae = SparseCoder(D, SparseCoderConfig(num_latents=F, **config))
    randomize(sae)
    if sae.cfg.normalize_decoder:
        sae.set_decoder_norm_to_unit_norm()  # as after each step of its training
    sae.save_to_disk(hookpoint)
    found = sae.encode(x)
    features = torch.zeros(len(x), F).scatter_(1, found.top_indices, found.top_acts)
    return features, sae(x).sae_out


def circuit_tracer(name, rule, x):
    from circuit_tracer.transcoder.activation_functions import JumpReLU
    from circuit_tracer.transcoder.single_layer_transcoder import SingleLayerTranscoder

    function = JumpReLU(torch.zeros(F)) if rule == "jumprelu" else torch.relu
    layer = int(name.removeprefix("layer_"))
    sizes = {"device": torch.device("cpu"), "dtype": torch.float32}
    transcoder = SingleLayerTranscoder(
        D, F, function, layer, skip_connection=rule == "skip", **sizes
    )
    randomize(transcoder)
    transcoder.to_safetensors(f"{name}.safetensors")
    return transcoder.encode(x), transcoder(x)


torch.manual_seed(0)
torch.set_grad_enabled(False)
x = torch.randn(64, D)
found = {}
for architecture, config in SAE_LENS.items():
    found[architecture] = sae_lens(architecture, {"architecture": architecture, **config}, x)
for folder, config in NOT_FOLDED.items():
    found[folder] = sae_lens(folder, config, x)
for rule, config in LLAMASCOPIUM.items():
    found[f"llamascopium_{rule}"] = llamascopium(rule, config, x)
for hookpoint, config in SPARSIFY.items():
    found[hookpoint] = sparsify(hookpoint, config, x)
for name, rule in CIRCUIT_TRACER.items():
    found[f"{name}.safetensors"] = circuit_tracer(name, rule, x)
arrays: Any = {
    f"{name}/{part}": np.asarray(values)
    for name, each in found.items()
    for part, values in zip(("features", "result"), each, strict=True)
}
np.savez("expected.npz", x=np.asarray(x), **arrays)
