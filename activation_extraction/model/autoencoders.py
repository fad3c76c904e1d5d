"""Published sparse autoencoders and transcoders, read in the forms that their publishers write.

A form is one function, which turns the tensors and the configuration of a publisher into the fields
of an `Autoencoder`. The docstring of `Autoencoder` has the one formula that encode.py computes. The
shape of a matrix tells which of its axes holds the features. Files of any other form, and settings
that no form describes, are refused by name.

Letters: D the width of the hook that is read, O the width of the hook that is reconstructed, F the
number of features.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import yaml

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.model.repository import Repository, read_json
from activation_extraction.model.repository_files import AUTOENCODER
from activation_extraction.model.torch_file import read_torch_file
from activation_extraction.model.weight_files import LocalFile

Tensors = dict[str, np.ndarray]  # by our names, which are those of the fields of `Autoencoder`
Config = Mapping[str, Any]  # what a publisher's configuration file contains
USUAL = "W_enc", "b_enc", "W_dec", "b_dec"  # the tensors that all autoencoders have
LOG_THRESHOLD = "log_jumprelu_threshold"
DATA_NORM = "dataset_average_activation_norm."
# SAELens's files beside the weights of a checkpoint whose normalisation is not folded into them.
SCALER_FILE, WHITENING_FILE = "activation_scaler.json", "activation_whitening.safetensors"
VALUES_AT_ONCE = 2**22  # how many values of an array are checked at a time
# A publisher's name of a tensor -> our name. The names of SAELens and Qwen-Scope are the same.
OUR_NAMES = {
    **{"encoder.weight": "W_enc", "encoder.bias": "b_enc"},  # sparsify
    **{"W_E": "W_enc", "b_E": "b_enc", "W_D": "W_dec", "b_D": "b_dec"},  # Llamascopium
    **{f"activation_function.{name}": name for name in ("threshold", LOG_THRESHOLD)},
}


@dataclass(frozen=True, eq=False)
class Autoencoder:
    """A sparse autoencoder, or a transcoder, which reconstructs another hook than it reads.

    Letters: D is the width of the hook that is read, O the width of the hook that is reconstructed,
    F the number of features. With x the input, normalised by `norm` and less b_dec if `subtracts`:

        pre      = x @ W_enc.T + b_enc                      (F,)
        active   = pre * score > threshold, and pre > 0 if `relu`
        values   = pre where active and, with k, among the k largest of pre * score; else 0
        result   = values @ W_dec + b_dec + input @ W_skip.T
                   where an autoencoder, but no transcoder, undoes the normalisation before the skip

    Attributes:
        name: The name that the user gave.
        hook: The hook that it reads, by a name of TransformerLens or Hugging Face.
        target: The hook that it reconstructs. It equals `hook` for all but transcoders.
        named: The hook that its files name; None if they name none.
        W_enc: Encoder weights, (F, D).
        b_enc: Encoder bias, (F,).
        W_dec: Decoder weights, (F, O).
        b_dec: Decoder bias, which is added to the result, (O,).
        files: The local paths of the files that it was read from.
        repository: The repository of the files, which keeps local copies for as long as it lives.
        dtype: The dtype of matrix products, float32 or bfloat16.
        k: The largest number of active features of a token; None if it is not limited.
        relu: Whether only features with a positive `pre` are active.
        threshold: The value that `pre * score` of each feature must exceed, (F,); None for no
            threshold.
        score: The factor of each feature when features are compared, (F,); None for 1.
        W_skip: Weights of the skip connection from the input to the result, (O, D); None if there
            is none.
        subtracts: Whether b_dec is subtracted from the input as well. Never for transcoders, whose
            b_dec belongs to the hook that is reconstructed.
        norm: The normalisation of the input: "none", "constant_norm_rescale" (to a norm of
            sqrt(D)), or "layer_norm" (SAELens's).
    """

    name: str
    hook: str
    target: str
    named: str | None
    W_enc: np.ndarray
    b_enc: np.ndarray
    W_dec: np.ndarray
    b_dec: np.ndarray
    files: tuple[Path, ...]
    repository: Repository
    dtype: np.dtype
    k: int | None = None
    relu: bool = True
    threshold: np.ndarray | None = None
    score: np.ndarray | None = None
    W_skip: np.ndarray | None = None
    subtracts: bool = False
    norm: str = "none"

    @property
    def features(self) -> int:
        """The number of features."""
        return len(self.b_enc)

    @property
    def arrays(self) -> Tensors:
        """Name of a field -> array, for all arrays that it has."""
        return {name: x for name, x in vars(self).items() if isinstance(x, np.ndarray)}

    def __reduce__(self) -> Any:  # another process reads the files again
        return read_autoencoder, (self.hook, self.name)


class Source(NamedTuple):
    """The files of an autoencoder.

    Attributes:
        name: The name of the autoencoder as the user gave it.
        repository: The repository that holds it.
        folder: The folder in the repository with its files, with a slash at the end; "" for the
            top.
        layer: The number of its layer, for folders with a file for each layer; "" if unknown.
        used: The local paths of the files that were read so far.
    """

    name: str
    repository: Repository
    folder: str
    layer: str
    used: list[Path]

    @property
    def path(self) -> str:
        """The path of the folder, with a slash at the end."""
        return f"{self.repository.path}/{self.folder}"

    def error(self, why: str) -> InputError:
        return InputError(f"--encode {self.name}: {why}")

    def has(self, name: str) -> bool:
        return self.repository.find(self.folder + name) is not None

    def file(self, name: str) -> Path:
        """Returns the local path of a file, and notes that it is used."""
        path = self.repository.file(self.folder + name)
        self.used.append(path)
        return path

    def tensors(self, name: str) -> Tensors:
        """Returns the tensors of a file by our names, as views of it where that is possible."""
        path = self.file(name)
        if name.endswith(".pt"):
            content = read_torch_file(path, f"--encode {self.name}")
            tensors = content.get("sae", content)
        else:
            file = LocalFile(path)
            tensors = {tensor: file.read(tensor, ()) for tensor in file.tensors}
        return {OUR_NAMES.get(tensor, tensor): array for tensor, array in tensors.items()}

    def one_of(self, config: Config, key: str, *supported: str) -> str:
        """Returns a value of a configuration, which must be supported.

        Args:
            config: The configuration.
            key: The key of the value.
            supported: The supported values. The first one is the default.

        Raises:
            InputError: The value is not supported.
        """
        value = config.get(key, supported[0])
        if value not in supported:
            raise self.error(f"{key} {value!r} is not read, only {', '.join(supported)}")
        return value


def read_autoencoder(hook: str, name: str) -> Autoencoder:
    """Reads an autoencoder.

    Args:
        hook: The name of the hook that it encodes; "" for the hook that its files name. It also
            chooses the file of a folder that has one for each layer.
        name: A folder or a file: a local path, a URL, or ORG/REPO/FOLDER on the hub.

    Raises:
        InputError: A file is missing or damaged or has a form that is not read, a weight is NaN or
            infinite, or the hook is neither given nor named by the files.
    """
    root = name.rstrip("/")
    folder = ""
    file = ""
    if root.endswith((".pt", ".safetensors")):
        root, file = os.path.split(root)
    local = os.path.abspath(os.path.expanduser(root))
    on_hub = re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)/(.+)", root)
    if os.path.exists(local):
        root = local
    elif on_hub:
        root = on_hub[1]
        folder = f"{on_hub[2]}/"
    layer = re.sub(r"\D", "", file) or layer_in(hook)
    source = Source(name, Repository(root, kind=AUTOENCODER), folder, layer, [])
    try:
        fields = _fields(source, file)
        _check(source, fields)
        _check_finite(source, fields)
    except (LookupError, TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
        why = f"{type(error).__name__}: {one_line(error):.200}"
        raise source.error(f"cannot be read: {why}") from error
    named = fields["hook"]
    if not hook and not named:
        raise source.error(f"does not name its hook; give --encode HOOK={name}")
    if hook:
        fields["hook"] = hook
        if fields["target"] == named:
            fields["target"] = hook
    is_bfloat16 = str(fields.get("dtype", fields["W_enc"].dtype)).endswith("bfloat16")
    fields["dtype"] = np.dtype(ml_dtypes.bfloat16 if is_bfloat16 else np.float32)
    return Autoencoder(
        **fields, name=name, named=named, files=tuple(source.used), repository=source.repository
    )


def layer_in(hook: str) -> str:
    """Returns the number of the layer in the name of a hook, "" if it has none."""
    match = re.search(r"\.(\d+)\.", f".{hook}.")
    return match[1] if match else ""


def _fields(source: Source, file: str) -> dict[str, Any]:
    """Returns the fields of an Autoencoder, read in the first form whose files exist.

    Args:
        source: The files of the autoencoder.
        file: The name of the file that the user gave; "" if the user gave a folder.

    Raises:
        InputError: The files of no form exist. The message lists the files of all forms.
    """
    looked_for: list[str] = []
    for read, config_file, pattern in FORMS:
        name = pattern.format(source.layer)
        in_words = pattern.format(source.layer or "N")
        looked_for.append(f"{in_words} with {config_file}" if config_file else in_words)
        needs_layer = name != pattern
        if file not in ("", name) or (needs_layer and not source.layer) or not source.has(name):
            continue
        if config_file is None:
            return read(source, {}, source.tensors(name))
        if source.has(config_file):
            config = read_json(source.file(config_file))
            return read(source, config, source.tensors(name))
    if source.has("ae.pt"):
        raise source.error("is of dictionary_learning, whose form is not read")
    which = "" if source.layer else f"; N is the layer of HOOK in --encode HOOK={source.name}"
    raise source.error(
        f"has no {file or 'files'} of a form that is read; looked for "
        f"{', '.join(dict.fromkeys(looked_for))}{which}"
    )


def qwen_scope(source: Source, _: Config, tensors: Tensors) -> dict[str, Any]:
    """Returns the fields of an autoencoder of Qwen-Scope, by the formula in its README.

    The k largest values of `pre` are kept, negative ones as well. Only the name of the repository
    says k.
    """
    k = re.search(r"-L0_(\d+)/", source.path)
    if k is None:
        raise source.error(
            "the folder must be named as Qwen-Scope's repository, which ends in -L0_K: nothing "
            "else says how many features a token has"
        )
    hook = f"blocks.{source.layer}.hook_resid_post"
    return {**tensors, "hook": hook, "target": hook, "k": int(k[1]), "relu": False}


def sae_lens(source: Source, config: Config, tensors: Tensors) -> dict[str, Any]:
    """Returns the fields of an autoencoder of SAELens 6, by the formulas of sae_lens/saes.

    Decoder norms come before the normalisation of activations, so that the features of a checkpoint
    that is not folded are those of its training (ActivationScaler, and then encode).
    """
    metadata = config.get("metadata") or {}
    if not re.match(r"[6-9]|[1-9]\d", str(metadata.get("sae_lens_version"))):
        raise source.error(
            "cfg.json has no metadata.sae_lens_version of 6 or later; load it with SAELens 6 and "
            "save it again"
        )
    plain = "standard", "topk", "jumprelu"
    transcoders = "transcoder", "skip_transcoder", "jumprelu_transcoder", "jumprelu_skip_transcoder"
    architecture = source.one_of(config, "architecture", *plain, *transcoders)
    transcoder = architecture in transcoders
    unfolded = "expected_average_only_in", "covariance_whitening"
    norms = "none", "constant_norm_rescale", "layer_norm", *unfolded
    norm = source.one_of(config, "normalize_activations", *norms)
    subtracts = not transcoder and config.get("apply_b_dec_to_input", True)
    if config.get("rescale_acts_by_decoder_norm"):
        row_norms = np.linalg.norm(tensors["W_dec"].astype(np.float32), axis=1)
        tensors["W_enc"] = tensors["W_enc"] * row_norms
        tensors["b_enc"] = tensors["b_enc"] * row_norms
        tensors["W_dec"] = tensors["W_dec"] / row_norms[:, None]
    if norm in unfolded:
        if transcoder:
            raise source.error(
                f"is a transcoder with normalize_activations {norm!r}: nothing says how its output "
                "is scaled; fold the normalisation into its weights with SAELens and save it again"
            )
        tensors |= _folded(source, norm, tensors, subtracts)
        norm = "none"
    return {
        **tensors,
        "threshold": tensors["threshold"] if "jumprelu" in architecture else None,
        "W_skip": tensors["W_skip"] if "skip" in architecture else None,
        "hook": metadata.get("hook_name"),
        "target": (metadata["hook_name_out"] or "") if transcoder else metadata.get("hook_name"),
        "k": config["k"] if architecture == "topk" else None,
        "subtracts": subtracts,
        "norm": norm,
        "dtype": config.get("dtype"),
    }


def _folded(source: Source, norm: str, tensors: Tensors, subtracts: bool) -> Tensors:
    """Folds the normalisation of activations into the weights of a SAELens checkpoint.

    SAELens does so at the end of training, and then saves "none" for normalize_activations. The
    checkpoints before that keep the normalisation in files of their own.

    Args:
        source: The files of the checkpoint.
        norm: "expected_average_only_in", a factor for all activations; or "covariance_whitening",
            an affine map of them.
        tensors: The weights for normalised activations: W_enc (D, F), b_enc (F,), W_dec (F, D) and
            b_dec (D,).
        subtracts: Whether b_dec is subtracted from the input.

    Returns:
        The same weights for activations as the model has them, in float32.

    Raises:
        InputError: A file of the normalisation is missing, or has a factor that is no positive
            number.
    """
    if not source.has(SCALER_FILE):
        raise source.error(
            f"cfg.json says normalize_activations {norm!r}, and {SCALER_FILE} is not beside it: "
            "the weights are for scaled activations, and the scale is unknown; give a checkpoint "
            "with this file, or the autoencoder that SAELens saves at the end of training"
        )
    scaler = read_json(source.file(SCALER_FILE))
    W_enc, b_enc, W_dec, b_dec = (tensors[name].astype(np.float64) for name in USUAL)
    if norm == "expected_average_only_in":
        factor = scaler.get("scaling_factor")
        if not isinstance(factor, int | float) or not 0 < factor < np.inf:
            raise source.error(f"{SCALER_FILE}: scaling_factor is {factor!r}, expected a number")
        W_enc = W_enc * factor
        W_dec = W_dec / factor
        b_dec = b_dec / factor
    else:
        if not (scaler.get("has_whitening", True) and source.has(WHITENING_FILE)):
            raise source.error(f"cfg.json says {norm!r}, and {WHITENING_FILE} is not beside it")
        whitening = source.tensors(WHITENING_FILE)
        mean, matrix, inverse = (
            whitening[name].astype(np.float64) for name in ("mean", "matrix", "inverse_matrix")
        )
        W_enc = matrix @ W_enc
        if not subtracts:  # otherwise the new b_dec takes the mean off the input
            b_enc = b_enc - mean @ W_enc
        W_dec, b_dec = W_dec @ inverse, b_dec @ inverse + mean
    folded = zip(USUAL, (W_enc, b_enc, W_dec, b_dec), strict=True)
    with np.errstate(over="ignore"):  # infinite values are refused later, by name
        return {name: values.astype(np.float32) for name, values in folded}


def sparsify(source: Source, config: Config, tensors: Tensors) -> dict[str, Any]:
    """Returns the fields of an autoencoder of EleutherAI's sparsify (sparse_coder.py).

    The k largest values of `pre` are kept, if they are positive. The folder is named after the
    module.
    """
    source.one_of(config, "activation", "topk")
    transcodes = config.get("transcode")
    named = re.search(r"/(layers\.\d+[\w.]*)/*$", source.path)
    module = f"model.{named[1]}." if named else ""
    hook = module and module + ("input" if transcodes else "output")
    return {
        **tensors,
        "hook": hook,
        "target": f"{module}output" if transcodes else hook,
        "k": config["k"],
        "subtracts": not transcodes,
    }


def llamascopium(source: Source, config: Config, tensors: Tensors) -> dict[str, Any]:
    """Returns the fields of an autoencoder of Llamascopium, formerly lm_saes (models/sae.py)."""
    source.one_of(config, "sae_type", "sae")
    activation = source.one_of(config, "act_fn", "relu", "jumprelu", "topk")
    hook = config["hook_point_in"]
    target = config["hook_point_out"]
    norms = ["dataset-wise", "inference"]
    if hook == target:
        norms.append("token-wise")
    norm = source.one_of(config, "norm_activation", *norms)
    norm_names = [name for name in tensors if name.startswith(DATA_NORM)]
    average_norms = {name: tensors.pop(name) for name in norm_names}
    dtype = tensors["W_enc"].dtype
    width = tensors["W_dec"].shape[1]
    if activation == "jumprelu":
        tensors["threshold"] = np.exp(tensors.pop(LOG_THRESHOLD).astype(np.float32))
    if config.get("sparsity_include_decoder_norm", True):
        tensors["score"] = np.linalg.norm(tensors["W_dec"].astype(np.float32), axis=1)
    if not config.get("use_decoder_bias", True):
        tensors["b_dec"] = np.zeros(width, np.float32)
    if norm == "dataset-wise":  # both hooks are scaled to a norm of sqrt(D) on average
        input_factor = np.float32(width**0.5 / average_norms[DATA_NORM + hook].item())
        output_factor = np.float32(width**0.5 / average_norms[DATA_NORM + target].item())
        tensors["W_enc"] = tensors["W_enc"] * input_factor
        tensors["W_dec"] = tensors["W_dec"] / output_factor
        tensors["b_dec"] = tensors["b_dec"] / output_factor
    return {
        **tensors,
        "hook": hook,
        "target": target,
        "k": config["top_k"] if activation == "topk" else None,
        "norm": "constant_norm_rescale" if norm == "token-wise" else "none",
        "dtype": dtype,
    }


def circuit_tracer(source: Source, _: Config, tensors: Tensors) -> dict[str, Any]:
    """Returns the fields of a transcoder of a single layer of circuit-tracer.

    It is computed in float32, with JumpReLU if it has thresholds and with ReLU otherwise. There may
    be a config.yaml.
    """
    text = source.file("config.yaml").read_text() if source.has("config.yaml") else ""
    config = dict(yaml.safe_load(text) or {})
    block = f"blocks.{source.layer}."
    source.one_of(config, "model_kind", "transcoder_set")
    return {
        **tensors,
        "relu": "threshold" not in tensors,
        "hook": block + config.get("feature_input_hook", "mlp.hook_in"),
        "target": block + config.get("feature_output_hook", "hook_mlp_out"),
        "dtype": "float32",
    }


# For each form: the function that reads it, the file of the configuration that this takes (None for
# none), and the file with the tensors, in whose name {} stands for the number of the layer.
FORMS: tuple[Any, ...] = (
    (qwen_scope, None, "layer{}.sae.pt"),
    (circuit_tracer, None, "layer_{}.safetensors"),
    (sae_lens, "cfg.json", "sae_weights.safetensors"),
    (sparsify, "cfg.json", "sae.safetensors"),
    (llamascopium, "config.json", "sae_weights.safetensors"),
    (llamascopium, "config.json", "sae_weights.pt"),
    (llamascopium, "config.json", "checkpoints/final.safetensors"),
)


def _check(source: Source, fields: dict[str, Any]) -> None:
    """Checks the tensors of an autoencoder, and transposes matrices with the features last.

    Args:
        source: The files of the autoencoder.
        fields: The fields that the form has returned, in which matrices are replaced.

    Raises:
        InputError: The form does not know a tensor, a matrix is square, the shapes of the tensors
            are inconsistent, or k is no number of features.
    """
    for name in sorted(fields.keys() - Autoencoder.__dataclass_fields__.keys()):
        raise source.error(f"has a tensor {name}, which its form does not know")
    features = fields["b_enc"].size
    for name in ("W_enc", "W_dec"):
        if fields[name].shape == (features, features):
            raise source.error("has square matrices, whose orientation cannot be known")
        if fields[name].shape[1] == features:
            fields[name] = fields[name].T
    width = fields["W_enc"].shape[1]
    target_width = fields["W_dec"].shape[1]
    shapes = {
        "W_enc": (features, width),
        "W_dec": (features, target_width),
        "b_enc": (features,),
        "threshold": (features,),
        "score": (features,),
        "b_dec": (target_width,),
        "W_skip": (target_width, width),
    }
    for name, shape in shapes.items():
        array = fields[name] if name in USUAL else fields.get(name)
        if array is not None and array.shape != shape:
            raise source.error(f"{name} has shape {array.shape}, expected {shape}")
    k = fields.get("k")
    if k is not None and not 0 < k <= features:
        raise source.error(f"k is {k!r}, expected 1 to {features}")


def _check_finite(source: Source, fields: Mapping[str, Any]) -> None:
    """Checks that all weights are finite, a part of an array at a time.

    A feature with a weight that is not finite would never be active, and nothing else would show
    it.

    Raises:
        InputError: A weight is NaN, or is infinite in float32.
    """
    for name, array in sorted(fields.items()):
        if not isinstance(array, np.ndarray):
            continue
        rows = max(VALUES_AT_ONCE // max(array[:1].size, 1), 1)
        for start in range(0, len(array), rows):
            with np.errstate(over="ignore"):
                values = array[start : start + rows].astype(np.float32)
            bad = np.argwhere(~np.isfinite(values))
            if len(bad):
                row, *columns = bad[0]
                place = ", ".join(str(index) for index in (row + start, *columns))
                raise source.error(
                    f"{name}[{place}] is {values[tuple(bad[0])]}: weights must be finite numbers; "
                    "the files are damaged, or the training has diverged"
                )
