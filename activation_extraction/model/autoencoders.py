"""Published sparse autoencoders and transcoders, read in the forms that their publishers write.

A form is one function: it knows the files, the names and orientations of the matrices, and how its
publisher computes features. All of them give an `Autoencoder`, whose docstring is the one formula
that encode.py computes. What no form describes is refused by name. D is the width of the input, O
that of what is reconstructed, F the number of features.
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import yaml

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.model.checkpoint import AUTOENCODER, Checkpoint, read_json
from activation_extraction.model.torch_file import read_torch_file
from activation_extraction.model.weight_files import LocalFile

Tensors = dict[str, np.ndarray]
ONE_FILE = re.compile(r"(.*/)?([^/]+\.(pt|safetensors|npz|bin))")
WEIGHTS = "sae_weights.safetensors", "sae_weights.pt", "final.safetensors", "sae.safetensors"
READ = "Qwen-Scope, SAELens 6, sparsify, Llamascopium and circuit-tracer's transcoders are read"


@dataclass(frozen=True, eq=False)
class Autoencoder:
    """A sparse autoencoder, or a transcoder, which reconstructs another hook than it reads.

    With x the input, normalised by `norm` and less b_dec if `subtracts`:

        pre      = x @ W_enc.T + b_enc                      (F,)
        active   = pre * score > threshold, and pre > 0 if `relu`
        values   = pre where active and, with k, among the k largest of pre * score; else 0
        result   = values @ W_dec + b_dec + input @ skip.T
                   where an autoencoder, but no transcoder, puts the norm back before the skip

    name: as it was given. hook, target: TransformerLens's or Hugging Face's names of what it reads
    and reconstructs. named: the hook that its files name, "" if they name none. W_enc: (F, D);
    W_dec: (F, O); b_enc, threshold, score: (F,), the last two None if there are none; b_dec: (O,);
    skip: (O, D) or None. norm: "none", "constant_norm_rescale" (a norm of sqrt(D)), or "layer_norm"
    (SAELens's). dtype: of the products. files: those that it was read from.
    """

    name: str
    hook: str
    target: str
    named: str
    W_enc: np.ndarray
    b_enc: np.ndarray
    W_dec: np.ndarray
    b_dec: np.ndarray
    files: tuple[Path, ...]
    checkpoint: Checkpoint
    dtype: Any
    k: int | None = None
    relu: bool = True
    threshold: np.ndarray | None = None
    score: np.ndarray | None = None
    skip: np.ndarray | None = None
    subtracts: bool = False
    norm: str = "none"

    @property
    def features(self) -> int:
        return len(self.b_enc)

    @property
    def arrays(self) -> Tensors:
        """Returns what it computes with, by the names of the fields."""
        names = "W_enc", "b_enc", "W_dec", "b_dec", "threshold", "score", "skip"
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def __reduce__(self) -> Any:  # another process reads the files again
        return read_autoencoder, (self.hook, self.name)


class Source(NamedTuple):
    """Where an autoencoder lies. name: as it was given; folder: the names in `checkpoint` that
    begin so are those of its files. layer: of the hook that was asked for, "" if none was. used:
    the files that were read."""

    name: str
    checkpoint: Checkpoint
    folder: str
    layer: str
    used: list[Path]

    def find(self, name: str) -> Path | None:
        return self.checkpoint.find(self.folder + name)

    def error(self, why: str) -> InputError:
        return InputError(f"--encode {self.name}: {why}")

    def json(self, name: str) -> dict[str, Any]:
        self.used.append(self.checkpoint.file(self.folder + name))
        return read_json(self.used[-1])

    def tensors(self, name: str) -> Tensors:
        """Returns all tensors of a file, by name, as views of it where that is possible."""
        path = self.checkpoint.file(self.folder + name)
        self.used.append(path)
        if name.endswith(".pt"):
            found = read_torch_file(path, f"--encode {self.name}")
            found = found.get("sae", found) if isinstance(found, dict) else found
            if not isinstance(found, dict) or not found:
                raise self.error("holds no tensors by name")
            return {n: value for n, value in found.items() if isinstance(value, np.ndarray)}
        file = LocalFile(path)
        return {
            n: file.read(n, tuple(slice(0, size) for size in tensor.shape))
            for n, tensor in file.header.items()
        }

    def take(self, tensors: Tensors, needed: str, possible: str = "") -> None:
        """Raises InputError unless there are these tensors, and no others but the possible ones."""
        for name in needed.split():
            if name not in tensors:
                raise self.error(f"has no tensor {name}; it has {', '.join(sorted(tensors))}")
        for name in sorted(tensors.keys() - {*needed.split(), *possible.split()}):
            raise self.error(f"has a tensor {name}, which its form does not know")


def read_autoencoder(hook: str, name: str) -> Autoencoder:
    """Reads an autoencoder. name: a folder or a file, local, at a URL or in a hub repository
    (ORG/REPO/FOLDER). hook: the hook that it is for, "" for the one that its files name; a folder
    with a file for each layer gives that of the hook.

    Raises InputError for what is missing or damaged, and for all forms that are not read.
    """
    source, file = _locate(hook, name)
    form, argument = _form_of(source, file)
    try:
        found = form(source, argument)
        dtype = found.get("dtype", found["W_enc"].dtype)
        found["dtype"] = np.dtype(ml_dtypes.bfloat16 if dtype == ml_dtypes.bfloat16 else np.float32)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise source.error(f"cannot be read: {error!r:.200}") from error
    found |= {"named": found["hook"], "hook": hook or found["hook"], "name": name}
    found |= {"files": tuple(source.used), "checkpoint": source.checkpoint}
    found.setdefault("target", found["hook"])  # a transcoder's form has its own
    if not found["hook"]:
        raise source.error(f"does not name its hook; give --encode HOOK={name}")
    if not found["target"]:
        raise source.error("is a transcoder that does not name the hook that it reconstructs")
    autoencoder = Autoencoder(**found)
    _check(autoencoder, source)
    return autoencoder


def _locate(hook: str, name: str) -> tuple[Source, str]:
    """Returns where an autoencoder lies, and the name of its file, "" for a folder."""
    root, folder, file = name.rstrip("/"), "", ""
    if one := ONE_FILE.fullmatch(root):
        root, file = (one[1] or "./").rstrip("/") or "/", one[2]
    here = "://" in name or name.startswith(("/", ".", "~")) or os.path.exists(root)
    if not here and root.count("/") > 1:
        organisation, repository, folder = root.split("/", 2)
        root, folder = f"{organisation}/{repository}", f"{folder}/"
    checkpoint = Checkpoint(root, kind=AUTOENCODER)
    return Source(name, checkpoint, folder, layer_in(hook), []), file


def layer_in(hook: str) -> str:
    """Returns the number of the layer in the name of a hook, "" if it has none."""
    found = re.search(r"\.(\d+)\.", f".{hook}.")
    return found[1] if found else ""


def _form_of(source: Source, file: str) -> tuple[Callable[..., dict[str, Any]], Any]:
    """Returns the function that reads a form, and what it takes beside the source."""
    of_layers = (qwen_scope, "layer{}.sae.pt"), (circuit_tracer, "layer_{}.safetensors")
    for form, pattern in of_layers:
        own = pattern.format(source.layer)
        if not file and source.layer and source.find(own):
            file = own
        if re.fullmatch(pattern.format(r"\d+"), file):
            return form, file
    if file and file not in ("ae.pt", *WEIGHTS):
        raise source.error(f"the form of a file {file} is not known; {READ}")
    if source.find("cfg.json"):
        weights = source.find("sae_weights.safetensors")
        return sae_lens if weights else sparsify, source.json("cfg.json")
    config = source.json("config.json") if source.find("config.json") else {}
    if "sae_type" in config:
        return llamascopium, config
    if file == "ae.pt" or "trainer" in config or (not file and source.find("ae.pt")):
        raise source.error(f"is of dictionary_learning, whose form is not read; {READ}")
    raise source.error(
        "has no cfg.json or config.json of an autoencoder, and no file of the layer of HOOK in "
        f"--encode HOOK={source.name}; {READ}"
    )


def qwen_scope(source: Source, file: str) -> dict[str, Any]:
    """Reads layerN.sae.pt of Qwen-Scope: the k largest of pre, negative ones as well.

    Its README has the formula. Only the name of the repository says k.
    """
    tensors = source.tensors(file)
    source.take(tensors, "W_enc b_enc W_dec b_dec")
    path = source.checkpoint.model_path
    where = os.path.abspath(os.path.expanduser(path)) if source.checkpoint.local else path
    if (k := re.search(r"-L0_(\d+)(/|$)", f"{where}/{source.folder}")) is None:
        raise source.error(
            "the folder must be named as Qwen-Scope's repository, which ends in -L0_K: nothing "
            "else says how many features a token has"
        )
    hook = f"blocks.{file.removeprefix('layer').removesuffix('.sae.pt')}.hook_resid_post"
    return {**tensors, "W_dec": tensors["W_dec"].T, "hook": hook, "k": int(k[1]), "relu": False}


SAE_LENS = {"standard": "relu", "transcoder": "relu", "skip_transcoder": "relu", "topk": "topk"}
SAE_LENS |= dict.fromkeys(("jumprelu", "jumprelu_transcoder", "jumprelu_skip_transcoder"), "jump")


def sae_lens(source: Source, config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads cfg.json and sae_weights.safetensors of SAELens 6 (sae_lens/saes)."""
    said, architecture = config.get("metadata") or {}, str(config.get("architecture"))
    version = str(said.get("sae_lens_version", ""))
    if not re.match(r"[6-9]|[1-9]\d", version):
        raise source.error("is of SAELens before 6; load it with SAELens 6 and save it again")
    if (rule := SAE_LENS.get(architecture)) is None:
        raise source.error(f"architecture {architecture!r} of SAELens is not read; {READ}")
    norm = config.get("normalize_activations", "none")
    if norm in ("expected_average_only_in", "covariance_whitening"):
        norm = "none"  # saving has folded it into the weights
    if norm not in ("none", "constant_norm_rescale", "layer_norm"):
        raise source.error(f"normalize_activations {norm!r} is not known")
    if said.get("hook_head_index") is not None:
        raise source.error("is of a single head (hook_head_index), which no hook stores")
    transcoder, skip = "transcoder" in architecture, " W_skip" * ("skip" in architecture)
    tensors = source.tensors("sae_weights.safetensors")
    source.take(tensors, "W_enc b_enc W_dec b_dec" + " threshold" * (rule == "jump") + skip)
    if rule == "topk" and config.get("rescale_acts_by_decoder_norm"):
        norms = np.linalg.norm(tensors["W_dec"].astype(np.float32), axis=1)
        scaled = {"W_enc": tensors["W_enc"] * norms, "b_enc": tensors["b_enc"] * norms}
        tensors |= scaled | {"W_dec": tensors["W_dec"] / norms[:, None]}
    if (skipped := tensors.pop("W_skip", None)) is not None:
        tensors["skip"] = skipped
    return {
        **{**tensors, "W_enc": tensors["W_enc"].T},
        **({"target": said.get("hook_name_out") or ""} if transcoder else {}),
        "hook": said.get("hook_name") or "",
        "k": config.get("k", 100) if rule == "topk" else None,
        "subtracts": not transcoder and config.get("apply_b_dec_to_input", True),
        "norm": norm,
        "dtype": np.dtype(str(config.get("dtype", "float32")).removeprefix("torch.")),
    }


def sparsify(source: Source, config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads cfg.json and sae.safetensors of EleutherAI's sparsify (sparse_coder.py): ReLU, and of
    that the k largest. The folder is named after the module."""
    if (rule := config.get("activation", "topk")) != "topk":
        raise source.error(f"activation {rule!r} of sparsify is not read; {READ}")
    tensors = source.tensors("sae.safetensors")
    source.take(tensors, "encoder.weight encoder.bias W_dec b_dec", "W_skip")
    folder = os.path.basename(source.folder.rstrip("/") or source.checkpoint.model_path.rstrip("/"))
    transcode, module = bool(config.get("transcode")), ""
    if re.fullmatch(r"layers\.\d+(\.\w+)*", folder):
        module = f"model.{folder}."
    return {
        "W_enc": tensors["encoder.weight"],
        "b_enc": tensors["encoder.bias"],
        **{name: tensors[name] for name in ("W_dec", "b_dec")},
        "skip": tensors.get("W_skip"),
        "hook": module and module + ("input" if transcode else "output"),
        **({"target": module and module + "output"} if transcode else {}),
        "k": config.get("k"),
        "subtracts": not transcode,
    }


def llamascopium(source: Source, config: Mapping[str, Any]) -> dict[str, Any]:
    """Reads config.json and sae_weights of Llamascopium, formerly lm_saes (models/sae.py)."""
    if (kind := config["sae_type"]) != "sae":
        raise source.error(f"sae_type {kind!r} of Llamascopium is not read; {READ}")
    if config.get("use_glu_encoder"):
        raise source.error("use_glu_encoder of Llamascopium is not read")
    rule, norm = str(config.get("act_fn", "relu")).lower(), config.get("norm_activation")
    if rule not in ("relu", "jumprelu", "topk"):
        raise source.error(
            f"act_fn {rule!r} depends on the other tokens of a batch; convert it to jumprelu"
        )
    names = "sae_weights.safetensors", "sae_weights.pt", "checkpoints/final.safetensors"
    tensors = source.tensors(next(filter(source.find, names), names[0]))
    average = "dataset_average_activation_norm."
    norms = {n.removeprefix(average): tensors.pop(n) for n in [*tensors] if n.startswith(average)}
    log = "activation_function.log_jumprelu_threshold"
    bias = " b_D" * config.get("use_decoder_bias", True)
    source.take(tensors, "W_E b_E W_D" + bias + f" {log}" * (rule == "jumprelu"))
    hooks = config["hook_point_in"], config["hook_point_out"]
    into, out = (np.float32(1), np.float32(1))
    width = tensors["W_D"].shape[-1]
    if norm == "dataset-wise":
        if any(hook not in norms for hook in hooks):
            raise source.error("norm_activation is dataset-wise, and no norm of the data is stored")
        into, out = (np.float32(width**0.5 / float(norms[hook].ravel()[0])) for hook in hooks)
    elif norm != "inference" and (norm != "token-wise" or hooks[0] != hooks[1]):
        raise source.error(f"norm_activation {norm!r} of Llamascopium is not read")
    decoder = tensors["W_D"].astype(np.float32)
    return {
        "W_enc": tensors["W_E"].T * into if into != 1 else tensors["W_E"].T,
        "b_enc": tensors["b_E"],
        "W_dec": decoder / out,
        "b_dec": tensors.get("b_D", np.zeros(width, np.float32)) / out,
        "hook": hooks[0],
        **({"target": hooks[1]} if hooks[0] != hooks[1] else {}),
        "k": config.get("top_k", 50) if rule == "topk" else None,
        "threshold": np.exp(tensors[log].astype(np.float32)) if rule == "jumprelu" else None,
        "score": np.linalg.norm(decoder, axis=1)
        if config.get("sparsity_include_decoder_norm", True)
        else None,
        "norm": "constant_norm_rescale" if norm == "token-wise" else "none",
        "dtype": tensors["W_E"].dtype,
    }


def circuit_tracer(source: Source, file: str) -> dict[str, Any]:
    """Reads layer_N.safetensors of circuit-tracer's transcoders of single layers, and config.yaml
    if there is one. With thresholds it is a JumpReLU, else a ReLU; it computes in float32."""
    layer, config = re.sub(r"\D", "", file), dict[str, Any]()
    if (path := source.find("config.yaml")) is not None:
        source.used.append(path)
        try:
            config = dict(yaml.safe_load(path.read_text()) or {})
        except (ValueError, TypeError, yaml.YAMLError) as error:
            raise source.error(f"config.yaml cannot be read: {one_line(error):.200}") from error
    if (kind := config.get("model_kind", "transcoder_set")) != "transcoder_set":
        raise source.error(f"model_kind {kind!r} of circuit-tracer is not read; {READ}")
    tensors, threshold = source.tensors(file), "activation_function.threshold"
    source.take(tensors, "W_enc b_enc W_dec b_dec", f"W_skip {threshold}")
    return {
        **{name: tensors[name] for name in ("W_enc", "b_enc", "W_dec", "b_dec")},
        "skip": tensors.get("W_skip"),
        "threshold": tensors.get(threshold),
        "relu": threshold not in tensors,
        "hook": f"blocks.{layer}.{config.get('feature_input_hook', 'mlp.hook_in')}",
        "target": f"blocks.{layer}.{config.get('feature_output_hook', 'hook_mlp_out')}",
        "dtype": np.dtype(np.float32),
    }


def _check(found: Autoencoder, source: Source) -> None:
    """Raises InputError unless all shapes fit each other, and their orientation is known."""
    features, out = found.b_enc.size, found.b_dec.size
    width = found.W_enc.size // max(features, 1)
    if features == width:
        raise source.error("has square matrices, whose orientation cannot be known")
    of_features = dict.fromkeys(("b_enc", "threshold", "score"), (features,))
    shapes: dict[str, tuple[int, ...]] = {**of_features, "b_dec": (out,), "skip": (out, width)}
    shapes |= {"W_enc": (features, width), "W_dec": (features, out)}
    for name, array in found.arrays.items():
        if array.shape != (shape := shapes[name]):
            raise source.error(f"{name} has shape {array.shape}, expected {shape} in this form")
        if not np.issubdtype(array.dtype, np.floating) and array.dtype != ml_dtypes.bfloat16:
            raise source.error(f"{name} is {array.dtype}, expected floating-point numbers")
    if found.target == found.hook and width != out:
        raise source.error(f"reads {width} numbers and gives {out}, but names no other hook")
    if found.k is not None and (type(found.k) is not int or not 0 < found.k <= features):
        raise source.error(f"k is {found.k!r}, expected 1 to {features}")
