"""Makes small autoencoders in the file formats of their publishers, with their formulas in NumPy.

Each maker (a function named after a publisher) writes files to a folder. It returns the path for
--encode and the publisher's formula: a function from inputs (tokens, D) to the dense features
(tokens, F) and the reconstruction (tokens, O), in float64.
"""

import json

import numpy as np
from safetensors.numpy import save_file

D, F = 128, 200  # the demo's model has this width


def relu(x):
    return np.maximum(x, 0)


def top(k, scores, values):
    """Returns the values whose scores are among the k largest of their row, and 0 elsewhere."""
    indices = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    chosen_values = np.zeros_like(values)
    np.put_along_axis(chosen_values, indices, np.take_along_axis(values, indices, 1), 1)
    return chosen_values


class Made:
    """Random weights of an autoencoder, and the folder of its files.

    Attributes:
        folder: The folder.
        chance: The generator of the weights.
        W_enc, W_dec: Matrices, (D, F) and (F, D).
        b_enc, b_dec: Biases, (F,) and (D,).
        skip: The matrix of a skip connection, (O, D).
    """

    def __init__(self, folder, bias=-0.3):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.chance = folder, np.random.default_rng(0)
        self.W_enc, self.W_dec = self.random(D, F) / D**0.5, self.random(F, D) / 4
        self.b_enc, self.b_dec = self.random(F) / 4 + np.float32(bias), self.random(D) / 2
        self.skip = self.random(D, D) / 20  # (O, D)

    def random(self, *shape):
        return self.chance.standard_normal(shape, np.float32)

    def pre(self, x):
        return x @ self.W_enc.astype(np.float64) + self.b_enc

    def decoded(self, features, bias=True):
        return features @ self.W_dec.astype(np.float64) + (self.b_dec if bias else 0)

    def save(self, config, name, **tensors):
        weights = {n.replace("__", "."): np.ascontiguousarray(v) for n, v in tensors.items()}
        if config is not None:
            (self.folder / config[0]).write_text(json.dumps(config[1]))
        save_file(weights, self.folder / name)
        return str(self.folder)


def qwen_scope(folder):
    import torch

    made = Made(folder / "SAE-Res-Tiny-W1K-L0_7", bias=-2.0)
    weights = dict(W_enc=made.W_enc.T, W_dec=made.W_dec.T, b_enc=made.b_enc, b_dec=made.b_dec)
    path = made.folder / "layer1.sae.pt"
    torch.save({n: torch.from_numpy(np.ascontiguousarray(v)) for n, v in weights.items()}, path)

    def formula(x):
        features = top(7, made.pre(x), made.pre(x))  # most are negative: no ReLU
        return features, made.decoded(features)

    return str(path), formula


def sae_lens(folder, architecture="standard", **config):
    """Makes an autoencoder or transcoder of SAELens.

    Args:
        folder: The folder of its files.
        architecture: The architecture in cfg.json. The formula knows "standard" and "topk", and
            names that contain "jumprelu", "skip" (a skip connection) or "transcoder".
        config: More fields of cfg.json. `normalize_activations` determines how the formula scales
            its inputs.
    """
    made, transcoder = Made(folder), "transcoder" in architecture
    metadata = dict(hook_name="blocks.1.hook_resid_post", sae_lens_version="6.54.12")
    if transcoder:
        metadata["hook_name_out"] = "blocks.1.hook_mlp_out"
        config["apply_b_dec_to_input"] = False
    config = dict(architecture=architecture, d_in=D, d_sae=F, dtype="float32") | config
    norm, rescale = config.get("normalize_activations"), config.get("rescale_acts_by_decoder_norm")
    more = {"threshold": made.random(F) ** 2} if "jumprelu" in architecture else {}
    more |= {"W_skip": made.skip} if "skip" in architecture else {}
    names = "W_enc", "b_enc", "W_dec", "b_dec"
    weights = {name: getattr(made, name) for name in names} | more
    path = made.save(
        ("cfg.json", config | {"metadata": metadata}), "sae_weights.safetensors", **weights
    )
    scaler: dict = {"scaling_factor": None, "has_whitening": norm == "covariance_whitening"}
    if norm == "expected_average_only_in":
        scaler["scaling_factor"] = 0.27
    if norm == "covariance_whitening":
        center, matrix = made.random(D).astype(float), made.random(D, D) / D**0.5 + np.eye(D)
        whitening = {"mean": center, "matrix": matrix, "inverse_matrix": np.linalg.inv(matrix)}
        save_file(whitening, folder / "activation_whitening.safetensors")
    if norm in ("expected_average_only_in", "covariance_whitening"):
        (folder / "activation_scaler.json").write_text(json.dumps(scaler))

    def formula(x):
        z, back = x, lambda output: output
        if norm == "expected_average_only_in":
            z, back = x * 0.27, lambda output: output / 0.27
        elif norm == "covariance_whitening":
            z = (x - center) @ matrix
            back = lambda output: output @ whitening["inverse_matrix"] + center  # noqa: E731
        elif norm == "constant_norm_rescale":
            factor = D**0.5 / np.linalg.norm(x, axis=1, keepdims=True)
            z, back = x * factor, lambda output: output / factor
        elif norm == "layer_norm":
            mean, std = x.mean(1, keepdims=True), x.std(1, keepdims=True, ddof=1)
            z, back = (x - mean) / (std + 1e-5), lambda output: output * std + mean
        if config.get("apply_b_dec_to_input", True):
            z = z - made.b_dec
        pre, norms = made.pre(z), np.linalg.norm(made.W_dec.astype(np.float64), axis=1)
        if architecture == "topk":
            pre = pre * norms if rescale else pre
            features = relu(top(config["k"], pre, pre))
        else:
            features = relu(pre) * (pre > more["threshold"] if "threshold" in more else 1)
        output = made.decoded(features / norms if rescale else features)
        output = output if transcoder else back(output)
        return features, output + (x @ made.skip.T if "skip" in architecture else 0)

    return path, formula


def sparsify(folder, module="layers.1", transcode=False):
    """Makes a TopK autoencoder of sparsify for a module, or a transcoder with a skip connection."""
    made, k = Made(folder / module, bias=0.0 if transcode else -2.5), 9  # fewer are positive
    config = dict(d_in=D, k=k, activation="topk", transcode=transcode, num_latents=F)
    weights = dict(encoder__weight=made.W_enc.T, encoder__bias=made.b_enc, W_dec=made.W_dec)
    weights |= {"W_skip": made.skip} if transcode else {}
    path = made.save(("cfg.json", config), "sae.safetensors", b_dec=made.b_dec, **weights)

    def formula(x):
        pre = relu(made.pre(x if transcode else x - made.b_dec))
        features = top(k, pre, pre)
        return features, made.decoded(features) + (x @ made.skip.T if transcode else 0)

    return path, formula


def llamascopium(folder, act_fn="topk", norm="dataset-wise", out="", bias=True, include=True):
    """Makes an autoencoder of Llamascopium.

    Args:
        folder: The folder of its files.
        act_fn: "topk", "jumprelu" or "relu".
        norm: How inputs are scaled: "dataset-wise" or "token-wise"; other names for no scaling.
        out: The hook that it reconstructs. Empty for the hook that it reads.
        bias: Whether the decoder has a bias.
        include: Whether features are multiplied by the norms of the decoder before they are chosen.
    """
    made, hook, k = Made(folder), "blocks.1.hook_resid_post", 8
    out, norms = out or hook, {hook: 5.0, "blocks.1.hook_mlp_out": 3.0}
    config = dict(sae_type="sae", d_model=D, expansion_factor=F / D, act_fn=act_fn, top_k=k)
    config |= dict(hook_point_in=hook, hook_point_out=out, norm_activation=norm)
    config |= dict(use_decoder_bias=bias, sparsity_include_decoder_norm=include)
    weights = dict(W_E=made.W_enc, b_E=made.b_enc, W_D=made.W_dec)
    weights |= {"b_D": made.b_dec} if bias else {}
    threshold = made.random(F) ** 2
    if act_fn == "jumprelu":
        weights["activation_function__log_jumprelu_threshold"] = np.log(threshold)
    averages = {f"dataset_average_activation_norm.{h}": np.float32(norms[h]) for h in {hook, out}}
    path = made.save(("config.json", config), "sae_weights.safetensors", **weights, **averages)

    def formula(x):
        into = back = 1.0
        if norm == "dataset-wise":
            into, back = D**0.5 / norms[hook], D**0.5 / norms[out]
        elif norm == "token-wise":
            into = back = D**0.5 / np.linalg.norm(x, axis=1, keepdims=True)
        scale = np.linalg.norm(made.W_dec.astype(np.float64), axis=1) if include else 1.0
        pre = made.pre(x * into) * scale
        if act_fn == "topk":
            features = top(k, relu(pre), relu(pre))
        else:
            features = pre * (pre > (threshold if act_fn == "jumprelu" else 0))
        return features / scale, made.decoded(features / scale, bias) / back

    return path, formula


def circuit_tracer(folder, jumps=False, config=True):
    """Makes a transcoder of circuit-tracer for layer 1.

    Args:
        folder: The folder of its files.
        jumps: Whether features have thresholds (JumpReLU) in place of ReLU.
        config: Whether the folder contains a config.yaml.
    """
    made = Made(folder)
    weights = dict(W_enc=made.W_enc.T, b_enc=made.b_enc, W_dec=made.W_dec, b_dec=made.b_dec)
    weights["W_skip"] = made.skip
    threshold = made.random(F) / 4 if jumps else 0  # some are negative: there is no ReLU
    if jumps:
        weights["activation_function__threshold"] = threshold
    made.save(None, "layer_1.safetensors", **weights)
    if config:
        text = "model_kind: transcoder_set\nfeature_input_hook: mlp.hook_in\n"
        (folder / "config.yaml").write_text(text + "feature_output_hook: hook_mlp_out\n")

    def formula(x):
        features = made.pre(x) * (made.pre(x) > threshold)
        return features, made.decoded(features) + x @ made.skip.T

    return str(folder / "layer_1.safetensors"), formula
