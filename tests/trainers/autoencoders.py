"""Makes autoencoders with publishers' own packages, and what their own code computes with them.

Runs in the trainers' environment, in an empty folder: `autoencoders.py D F` writes a folder for
each, and expected.npz with the inputs `x` and, by folder, its features and its result.
"""

import sys
from typing import Any

import numpy as np
import torch

HOOK = "blocks.1.hook_resid_post"
D, F = map(int, sys.argv[1:])
SAE_LENS = {
    "standard": {},
    "jumprelu": {"normalize_activations": "layer_norm"},
    "topk": {"k": 9, "rescale_acts_by_decoder_norm": True, "apply_b_dec_to_input": False},
    "transcoder": {"d_out": D, "apply_b_dec_to_input": False},
    "jumprelu_skip_transcoder": {"d_out": D, "apply_b_dec_to_input": False},
}
LLAMASCOPIUM = {
    "relu": {"norm_activation": "token-wise"},
    "jumprelu": {"norm_activation": "inference", "use_decoder_bias": False},
    "topk": {"norm_activation": "dataset-wise"},
}


def randomize(module):
    """Random parameters; thresholds are positive, and some features are active."""
    for name, parameter in module.named_parameters():
        scale = 0.1 if parameter.ndim > 1 else 0.5
        values = torch.randn(parameter.shape) * scale
        parameter.data = values.abs() if name.endswith("threshold") else values


def sae_lens(architecture, config, x):
    from sae_lens import SAE

    said = {"hook_name": HOOK, "hook_name_out": "blocks.1.hook_mlp_out", "model_name": "tiny"}
    config = {"architecture": architecture, "d_in": D, "d_sae": F, "metadata": said, **config}
    sae = SAE.from_dict(config)
    randomize(sae)
    sae.save_model(architecture)
    return sae.encode(x), sae(x)


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


torch.manual_seed(0)
torch.set_grad_enabled(False)
x = torch.randn(64, D)
found = {"x": x}
for architecture, config in SAE_LENS.items():
    found[architecture], found[f"{architecture}/result"] = sae_lens(architecture, config, x)
for rule, config in LLAMASCOPIUM.items():
    name = f"llamascopium_{rule}"
    found[name], found[f"{name}/result"] = llamascopium(rule, config, x)
arrays: Any = {name: np.asarray(values) for name, values in found.items()}
np.savez("expected.npz", **arrays)
