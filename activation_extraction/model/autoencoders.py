"""Published sparse autoencoders and transcoders, read in the forms that their publishers write.

A form is one function: it knows the files and how its publisher computes features. All of them give
an `Autoencoder`, whose docstring is the one formula that encode.py computes. Which axis of a matrix
has the features, its shape says. What no form describes is refused by name. D is the width of the
input, O that of what is reconstructed, F the number of features.
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

Tensors = dict[str, np.ndarray]
Config = Mapping[str, Any]
USUAL = "W_enc", "b_enc", "W_dec", "b_dec"
LOG_THRESHOLD = "log_jumprelu_threshold"
DATA_NORM = "dataset_average_activation_norm."
# SAELens's files beside the weights of a checkpoint whose normalisation is not folded into them.
SCALER_FILE, WHITENING_FILE = "activation_scaler.json", "activation_whitening.safetensors"
VALUES_AT_ONCE = 2**22  # how many values of an array are checked at a time
OUR_NAMES = {  # by those of publishers; SAELens's and Qwen-Scope's are the same
    **{"encoder.weight": "W_enc", "encoder.bias": "b_enc"},  # sparsify
    **{"W_E": "W_enc", "b_E": "b_enc", "W_D": "W_dec", "b_D": "b_dec"},  # Llamascopium
    **{f"activation_function.{name}": name for name in ("threshold", LOG_THRESHOLD)},
}


@dataclass(frozen=True, eq=False)
class Autoencoder:
    """A sparse autoencoder, or a transcoder, which reconstructs another hook than it reads.

    With x the input, normalised by `norm` and less b_dec if `subtracts`:

        pre      = x @ W_enc.T + b_enc                      (F,)
        active   = pre * score > threshold, and pre > 0 if `relu`
        values   = pre where active and, with k, among the k largest of pre * score; else 0
        result   = values @ W_dec + b_dec + input @ W_skip.T
                   where an autoencoder, but no transcoder, puts the norm back before the skip

    name: as it was given. hook, target: TransformerLens's or Hugging Face's names of what it reads
    and reconstructs. named: the hook that its files name, if they do. W_enc: (F, D); W_dec: (F, O);
    b_enc, threshold, score: (F,), the last two None if there are none; b_dec: (O,); W_skip: (O, D)
    or None. norm: "none", "constant_norm_rescale" (a norm of sqrt(D)), or "layer_norm" (SAELens's).
    dtype: of the products. files: those that it was read from; copies stay for as long as the
    repository.
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
        return len(self.b_enc)

    @property
    def arrays(self) -> Tensors:
        """Returns what it computes with, by the names of the fields."""
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
        used: The files that were read.
    """

    name: str
    repository: Repository
    folder: str
    layer: str
    used: list[Path]

    @property
    def path(self) -> str:
        return f"{self.repository.path}/{self.folder}"

    def error(self, why: str) -> InputError:
        return InputError(f"--encode {self.name}: {why}")

    def has(self, name: str) -> bool:
        return self.repository.find(self.folder + name) is not None

    def file(self, name: str) -> Path:
        """Returns the local path of a file that is to be read."""
        self.used.append(self.repository.file(self.folder + name))
        return self.used[-1]

    def tensors(self, name: str) -> Tensors:
        """Returns the tensors of a file by our names, as views of it where that is possible."""
        path = self.file(name)
        if name.endswith(".pt"):
            found = read_torch_file(path, f"--encode {self.name}")
            found = found.get("sae", found)
        else:
            file = LocalFile(path)
            found = {tensor: file.read(tensor, ()) for tensor in file.tensors}
        return {OUR_NAMES.get(tensor, tensor): values for tensor, values in found.items()}

    def one_of(self, config: Config, key: str, *known: str) -> str:
        """Returns a value of a configuration, by default the first of those that are known. Raises
        InputError for any other."""
        if (value := config.get(key, known[0])) not in known:
            raise self.error(f"{key} {value!r} is not read, only {', '.join(known)}")
        return value


def read_autoencoder(hook: str, name: str) -> Autoencoder:
    """Reads an autoencoder.

    Args:
        hook: Name of the hook that it encodes, "" for the hook that its files name. It also chooses
            the file of a folder that has one for each layer.
        name: A folder or a file: a local path, a URL, or ORG/REPO/FOLDER on the hub.

    Raises:
        InputError: If a file is missing or damaged, if it has a form that is not read, or if a
            weight is NaN or infinite.
    """
    root = name.rstrip("/")
    folder = ""
    file = ""
    if root.endswith((".pt", ".safetensors")):
        root, file = os.path.split(root)
    if os.path.exists(local := os.path.abspath(os.path.expanduser(root))):
        root = local
    elif in_hub := re.fullmatch(r"(\w[\w.-]*/\w[\w.-]*)/(.+)", root):
        root, folder = in_hub[1], f"{in_hub[2]}/"
    layer = re.sub(r"\D", "", file) or layer_in(hook)
    source = Source(name, Repository(root, kind=AUTOENCODER), folder, layer, [])
    try:
        found = _fields(source, file)
        _check(source, found)
        _check_finite(source, found)
    except (LookupError, TypeError, ValueError, AttributeError, yaml.YAMLError) as error:
        why = f"{type(error).__name__}: {one_line(error):.200}"
        raise source.error(f"cannot be read: {why}") from error
    if not hook and not found["hook"]:
        raise source.error(f"does not name its hook; give --encode HOOK={name}")
    named = found["named"] = found["hook"]
    if hook:
        found |= {"hook": hook, "target": hook if found["target"] == named else found["target"]}
    narrow = str(found.get("dtype", found["W_enc"].dtype)).endswith("bfloat16")
    found["dtype"] = np.dtype(ml_dtypes.bfloat16 if narrow else np.float32)
    return Autoencoder(**found, name=name, files=tuple(source.used), repository=source.repository)


def layer_in(hook: str) -> str:
    """Returns the number of the layer in the name of a hook, "" if it has none."""
    found = re.search(r"\.(\d+)\.", f".{hook}.")
    return found[1] if found else ""


def _fields(source: Source, file: str) -> dict[str, Any]:
    """Returns the fields of an Autoencoder, read in the first form whose files are there.

    Args:
        source: Where the autoencoder lies.
        file: Name of the file that was given; "" if a folder was given.

    Raises:
        InputError: The files of no form are there. The message lists the files of all forms.
    """
    looked_for = dict[str, None]()
    for form, config, pattern in FORMS:
        own = pattern.format(source.layer)
        expected = pattern.format(source.layer or "N")
        looked_for[f"{expected} with {config}" if config else expected] = None
        if file not in ("", own) or (own != pattern and not source.layer) or not source.has(own):
            continue
        if config is None:
            return form(source, {}, source.tensors(own))
        if source.has(config):
            return form(source, read_json(source.file(config)), source.tensors(own))
    if source.has("ae.pt"):
        raise source.error("is of dictionary_learning, whose form is not read")
    which = "" if source.layer else f"; N is the layer of HOOK in --encode HOOK={source.name}"
    raise source.error(
        f"has no {file or 'files'} of a form that is read; looked for "
        f"{', '.join(looked_for)}{which}"
    )


def qwen_scope(source: Source, _: Config, tensors: Tensors) -> dict[str, Any]:
    """Returns what Qwen-Scope computes: the k largest of pre, negative ones as well.

    Its README has the formula. Only the name of the repository says k.
    """
    if (k := re.search(r"-L0_(\d+)/", source.path)) is None:
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
    said = config.get("metadata") or {}
    if not re.match(r"[6-9]|[1-9]\d", str(said.get("sae_lens_version"))):
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
        of_rows = np.linalg.norm(tensors["W_dec"].astype(np.float32), axis=1)
        tensors |= {name: tensors[name] * of_rows for name in ("W_enc", "b_enc")}
        tensors["W_dec"] = tensors["W_dec"] / of_rows[:, None]
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
        "hook": said.get("hook_name"),
        "target": (said["hook_name_out"] or "") if transcoder else said.get("hook_name"),
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
        source: Folder of the checkpoint.
        norm: "expected_average_only_in", a factor for all activations; or "covariance_whitening",
            an affine map of them.
        tensors: Weights for normalised activations: W_enc (D, F), b_enc (F,), W_dec (F, D) and
            b_dec (D,).
        subtracts: Whether b_dec is subtracted from the input.

    Returns:
        The same weights for activations as the model has them, in float32.

    Raises:
        InputError: If a file of the normalisation is missing or does not hold it.
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
    """Returns what EleutherAI's sparsify computes (sparse_coder.py): ReLU, and of that the k
    largest. The folder is named after the module."""
    source.one_of(config, "activation", "topk")
    transcodes, named = config.get("transcode"), re.search(r"/(layers\.\d+[\w.]*)/*$", source.path)
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
    """Returns what Llamascopium, formerly lm_saes, computes (models/sae.py)."""
    source.one_of(config, "sae_type", "sae")
    rule = source.one_of(config, "act_fn", "relu", "jumprelu", "topk")
    hook, target = config["hook_point_in"], config["hook_point_out"]
    norms = "dataset-wise", "inference", *["token-wise"] * (hook == target)
    norm = source.one_of(config, "norm_activation", *norms)
    of_data = {name: tensors.pop(name) for name in [*tensors] if name.startswith(DATA_NORM)}
    dtype, width = tensors["W_enc"].dtype, tensors["W_dec"].shape[1]
    if rule == "jumprelu":
        tensors["threshold"] = np.exp(tensors.pop(LOG_THRESHOLD).astype(np.float32))
    if config.get("sparsity_include_decoder_norm", True):
        tensors["score"] = np.linalg.norm(tensors["W_dec"].astype(np.float32), axis=1)
    if not config.get("use_decoder_bias", True):
        tensors["b_dec"] = np.zeros(width, np.float32)
    if norm == "dataset-wise":  # what is read and reconstructed has a norm of sqrt(D) on average
        averages = (of_data[DATA_NORM + name].item() for name in (hook, target))
        into, out = (np.float32(width**0.5 / average) for average in averages)
        tensors["W_enc"] = tensors["W_enc"] * into
        tensors |= {name: tensors[name] / out for name in ("W_dec", "b_dec")}
    return {
        **tensors,
        "hook": hook,
        "target": target,
        "k": config["top_k"] if rule == "topk" else None,
        "norm": "constant_norm_rescale" if norm == "token-wise" else "none",
        "dtype": dtype,
    }


def circuit_tracer(source: Source, _: Config, tensors: Tensors) -> dict[str, Any]:
    """Returns what circuit-tracer's transcoders of single layers compute, in float32: JumpReLU if
    they have thresholds, else ReLU. There may be a config.yaml."""
    text = source.file("config.yaml").read_text() if source.has("config.yaml") else ""
    config, block = dict(yaml.safe_load(text) or {}), f"blocks.{source.layer}."
    source.one_of(config, "model_kind", "transcoder_set")
    return {
        **tensors,
        "relu": "threshold" not in tensors,
        "hook": block + config.get("feature_input_hook", "mlp.hook_in"),
        "target": block + config.get("feature_output_hook", "hook_mlp_out"),
        "dtype": "float32",
    }


# Of each form: its function, the file of the configuration that this takes, and those that its
# tensors may be in, with {} for a layer.
FORMS: tuple[Any, ...] = (
    (qwen_scope, None, "layer{}.sae.pt"),
    (circuit_tracer, None, "layer_{}.safetensors"),
    (sae_lens, "cfg.json", "sae_weights.safetensors"),
    (sparsify, "cfg.json", "sae.safetensors"),
    (llamascopium, "config.json", "sae_weights.safetensors"),
    (llamascopium, "config.json", "sae_weights.pt"),
    (llamascopium, "config.json", "checkpoints/final.safetensors"),
)


def _check(source: Source, found: dict[str, Any]) -> None:
    """Gives matrices their features first. Raises InputError for tensors that the form does not
    know, for square matrices, and unless all shapes fit each other."""
    for name in sorted(found.keys() - Autoencoder.__dataclass_fields__.keys()):
        raise source.error(f"has a tensor {name}, which its form does not know")
    features = found["b_enc"].size
    for name in ("W_enc", "W_dec"):
        if found[name].shape == (features, features):
            raise source.error("has square matrices, whose orientation cannot be known")
        if found[name].shape[1] == features:
            found[name] = found[name].T
    width, out = found["W_enc"].shape[1], found["W_dec"].shape[1]
    shapes: dict[str, tuple[int, ...]] = {"W_enc": (features, width), "W_dec": (features, out)}
    shapes |= dict.fromkeys(("b_enc", "threshold", "score"), (features,))
    shapes |= {"b_dec": (out,), "W_skip": (out, width)}
    for name, shape in shapes.items():
        array = found[name] if name in USUAL else found.get(name)
        if array is not None and array.shape != shape:
            raise source.error(f"{name} has shape {array.shape}, expected {shape}")
    if (k := found.get("k")) is not None and not 0 < k <= features:
        raise source.error(f"k is {k!r}, expected 1 to {features}")


def _check_finite(source: Source, found: Mapping[str, Any]) -> None:
    """Raises InputError if a weight is NaN, or is infinite in float32: a feature of such weights
    would never be active, and nothing else would show it."""
    for name, array in sorted(found.items()):
        if not isinstance(array, np.ndarray):
            continue
        rows = max(VALUES_AT_ONCE // max(array[:1].size, 1), 1)
        for start in range(0, len(array), rows):
            with np.errstate(over="ignore"):
                values = array[start : start + rows].astype(np.float32)
            bad = np.argwhere(~np.isfinite(values))
            if len(bad):
                at = ", ".join(map(str, (bad[0][0] + start, *bad[0][1:])))
                raise source.error(
                    f"{name}[{at}] is {values[tuple(bad[0])]}: weights must be finite numbers; "
                    "the files are damaged, or the training has diverged"
                )
