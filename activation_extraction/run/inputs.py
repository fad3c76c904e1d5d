"""The inputs of a run: the model, its adapter and tokenizer, the chat template, the data set.

Each has its entry in INPUTS, from which follows by what metadata.json knows it, which flags may
differ between the hosts of a run, what the hosts compare, and what --verify compares before it
recomputes samples. --repair and a run that continues compare the identity that is made here.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax

import activation_extraction
from activation_extraction.cli.flags import FLAGS, Config
from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import plain_url
from activation_extraction.model.forward import Forward
from activation_extraction.model.model_setup import ModelRequest
from activation_extraction.run.digests import (
    content_digest,
    digest_files,
    digest_fingerprints,
    model_digest,
)
from activation_extraction.run.host_text import Text
from activation_extraction.store.identity import Identity
from activation_extraction.text.batch import Worker
from activation_extraction.text.file_list import is_path

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "transformers", "datasets", "isal")
SCRIPTS = ("extract_activations.py", "qwen2_jax.py", "qwen2_jax_with_hooks.py")


class Inputs(NamedTuple):
    """The inputs of one run. request: what the flags ask of the model; forward: the checked one."""

    request: ModelRequest
    forward: Forward
    text: Text


@dataclass(frozen=True)
class Input:
    """One input of a run.

    flags: those that name it; a message shows the first one that is given. paths: those of them
    that may differ between hosts, which must have the same content there. field: that of Identity
    by which it is known; known_by: returns its value. of_text: whether it decides token ids alone,
    and does not matter where these are known.
    """

    name: str
    field: str
    known_by: Callable[[Inputs], str]
    flags: tuple[str, ...]
    paths: tuple[str, ...]
    of_text: bool = True


def _adapter_digest(inputs: Inputs) -> str:
    # Of a hub adapter, too: no commit is recorded that the next start could ask for.
    adapter = inputs.forward.checkpoint.adapter
    return "" if adapter is None else content_digest(adapter.files)


def _autoencoder_digest(inputs: Inputs) -> str:
    # Nothing but the name of its folder may say k; hooks are in the identity.
    lines = [
        f"{each.source.name} {each.autoencoder.k} {digest_fingerprints(each.autoencoder.files)}\n"
        for each in inputs.forward.encoders
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest() if lines else ""


def _tokenizer_digest(inputs: Inputs) -> str:
    chosen = inputs.text.chosen_tokenizer
    return "" if chosen is None else digest_files(chosen.home.tokenizer_files())


def _template_digest(inputs: Inputs) -> str:
    return "" if inputs.text.template is None else inputs.text.template.digest


def _model_digest(inputs: Inputs) -> str:
    return model_digest(inputs.forward.checkpoint)


MODEL_FLAGS, LORA, SAE = ("model_path", "model_revision"), ("lora",), ("encode",)
TEMPLATE_FLAGS = ("chat_template", "model_path", "chat_template_args")
TEMPLATE_PATHS = ("chat_template", "lora")
DATA_FLAGS = ("mix", "dataset_path", "dataset_name", "dataset_config", "dataset_split")
DATA_PATHS = ("dataset_path", "mix")  # settings_of has what hosts compare of a mixture
INPUTS = (
    Input("model", "model_digest", _model_digest, MODEL_FLAGS, ("model_path",), of_text=False),
    Input("adapter", "lora_digest", _adapter_digest, LORA, LORA, of_text=False),
    Input("autoencoder", "autoencoder_digest", _autoencoder_digest, SAE, SAE, of_text=False),
    Input("tokenizer", "tokenizer_digest", _tokenizer_digest, MODEL_FLAGS, ("model_path", "lora")),
    Input("chat template", "chat_template", _template_digest, TEMPLATE_FLAGS, TEMPLATE_PATHS),
    Input("data set", "data", lambda it: it.text.dataset.name, DATA_FLAGS, DATA_PATHS),
    Input("data set", "data_revision", lambda it: it.text.dataset.content, DATA_FLAGS, DATA_PATHS),
)

# Flags that may differ between the hosts of a run.
HOST_FIELDS = {
    "host_id",
    "coordinator_address",
    "output_dir",
    "verbose",
    "compilation_cache",
    *(path for each in INPUTS for path in each.paths),
}


def check_inputs(inputs: Inputs, identity: Identity, of_text: bool) -> None:
    """Raises InputError unless the stored activations came from these inputs.

    of_text: whether to compare the inputs that decide token ids, or else the others.
    """
    given = {**vars(inputs.text.config), **vars(inputs.request)}
    for each in INPUTS:
        if each.of_text == of_text and each.known_by(inputs) != getattr(identity, each.field):
            flag = next((flag for flag in each.flags if given[flag]), each.flags[0])
            told = "is not the one" if given[flag] else "is missing, the one"
            value = f" {plain_url(given[flag])}" if isinstance(given[flag], str) else ""
            # The adapter has a tokenizer and a template of its own, or has lost them.
            if flag in MODEL_FLAGS and "lora" in each.paths and given["lora"]:
                value += f" with --lora {plain_url(given['lora'])}"
            raise InputError(
                f"--{flag}{value}: the {each.name} {told} that the stored activations came from"
            )


def new_identity(inputs: Inputs, worker: Worker) -> Identity:
    """Returns everything that decides the content of the shards, and must stay the same."""
    request, forward, text = inputs
    model, seed = forward.model, text.config.shuffle_documents
    codes = tuple(encoder.hook.name for encoder in forward.encoders)
    own = {hook.name: hook.kind.dtype for hook in forward.hooks.values() if hook.name not in codes}
    has_top_logits = any(name.startswith("logits.top_") for name in own)
    known = {each.field: each.known_by(inputs) for each in INPUTS}
    found = {
        "positions": str(text.config.positions),
        "drop_token_ids": text.drop_token_ids,
        "hooks": (*own, *codes),
        "integer_hooks": tuple(name for name in own if own[name] == "int32"),
        "float32_hooks": tuple(name for name in own if own[name] == "float32"),
        "code_hooks": codes,
        "encode_most": tuple(encoder.most for encoder in forward.encoders),
        "keyed_by": forward.keyed_by,
        "dtype": str(model.dtype),
        "activation_dtype": str(model.activation_dtype),
        "special_tokens": text.form.special.template,
        "shuffle_documents": "" if seed is None else str(seed),
        "top_logits": request.top_logits if has_top_logits else 0,
        "total_machines": worker.machines,
        "num_hosts": worker.hosts,
        "machine": worker.machine,
        "host": worker.host,
    }
    content: dict[str, Any] = {**vars(text.config), **known, **found}
    content |= {name: "" for name, value in content.items() if value is None}
    return Identity(**{each.name: content[each.name] for each in fields(Identity)})


def settings_of(config: Config) -> dict[str, Any]:
    """Returns what hosts must have in common before they prepare anything, by name."""
    asked = config.to_json()
    return {
        **{f"--{name}": asked[name] for name in FLAGS if name not in HOST_FIELDS},
        # The weights of a mixture's sources, and the names of those that are not files.
        "--mix": [("" if is_path(source) else source, weight) for source, weight in config.mix],
        **{f"version of {package}": found for package, found in package_versions().items()},
        "devices": f"{jax.default_backend()} {jax.local_device_count()}",
    }


def step_of(forward: Forward) -> dict[str, Any]:
    """Returns what hosts must have in common before they compile a step, by name."""
    return {
        "rows per host": forward.shape[0],
        "mesh": json.dumps(forward.layout.shape),
        **{name: choice.name for name, choice in forward.kernels.items()},
    }


def fingerprint(inputs: Inputs, identity: Identity) -> dict[str, Any]:
    """Returns what hosts must have in common before they compute, by name."""
    package = Path(activation_extraction.__file__).parent
    sources = [*(package.parent / name for name in SCRIPTS), *package.rglob("*.py")]
    shared = identity.shared
    for each in INPUTS:
        flags = " or ".join(f"--{path}" for path in each.paths)
        shared[f"{each.field} ({flags})"] = shared.pop(each.field)
    return {
        **step_of(inputs.forward),
        **shared,
        **inputs.text.dataset.files.fingerprints(),
        "source": digest_files(sources),
    }


def package_versions() -> dict[str, str]:
    """Returns the versions of the packages that decide which bytes are stored."""
    return {package: version(package) for package in PACKAGES}
