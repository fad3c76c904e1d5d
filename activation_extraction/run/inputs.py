"""The inputs of a run: the model, its adapter and tokenizer, the chat template, the data set.

Each is one entry of INPUTS, from which follows by what metadata.json knows it, which flags may
differ between the hosts of a run, what the hosts compare, and what --verify compares before it
recomputes samples. --repair and a run that continues compare the identity that is made here.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from tokenizers import Tokenizer

import activation_extraction
from activation_extraction.cli.flags import FLAGS, Config
from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import plain_url
from activation_extraction.model.forward import Forward, ModelRequest
from activation_extraction.run.digests import (
    content_digest,
    digest_files,
    digest_fingerprints,
    model_digest,
)
from activation_extraction.run.host_text import load_text_files, row_form, special_tokens
from activation_extraction.run.open_data import Dataset, TextRequest, open_dataset
from activation_extraction.store.identity import Identity, StorageOptions
from activation_extraction.text.batch import Worker
from activation_extraction.text.chat import ChatTemplate
from activation_extraction.text.file_list import is_path
from activation_extraction.text.rows import RowForm

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "transformers", "datasets", "isal")
SCRIPTS = ("extract_activations.py", "qwen2_jax.py", "qwen2_jax_with_hooks.py")


@dataclass(frozen=True)
class Inputs:
    """The inputs of one run, which are opened when they are first needed; that raises InputError.

    model, text: what the flags ask. forward: the checked model. earlier, names: see `open_dataset`.
    """

    model: ModelRequest
    text: TextRequest
    forward: Forward
    earlier: Sequence[Mapping[str, Any]] = ()
    names: Sequence[str] = ()

    @cached_property
    def _text_files(self) -> tuple[Tokenizer | None, ChatTemplate | None]:
        return load_text_files(self.text, self.forward.checkpoint, self.vocabulary)

    @property
    def vocabulary(self) -> int:
        """Returns how many token ids the model has."""
        return self.forward.model.config.vocab_size

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._text_files[0]

    @property
    def template(self) -> ChatTemplate | None:
        return self._text_files[1]

    @cached_property
    def rows(self) -> RowForm:
        """Returns what is read of every row of the data set."""
        return row_form(self.text, self.template, self.vocabulary)

    @cached_property
    def dataset(self) -> Dataset:
        return open_dataset(self.text, self.rows.columns, self.earlier, self.names)


@dataclass(frozen=True)
class Input:
    """One input of a run.

    flags: those that name it; a message shows the first one that is given. paths: those of them
    that may differ between hosts, which must have the same content there. fields: those of Identity
    by which it is known; known_by: returns their values. of_text: whether it decides token ids
    alone, and does not matter where these are known.
    """

    name: str
    flags: tuple[str, ...]
    paths: tuple[str, ...]
    fields: tuple[str, ...]
    known_by: Callable[[Inputs], tuple[str, ...]]
    of_text: bool = True


def _adapter_digest(inputs: Inputs) -> tuple[str]:
    # Of a hub adapter, too: no commit is recorded that the next start could ask for.
    adapter = inputs.forward.checkpoint.adapter
    return ("" if adapter is None else content_digest(adapter.files),)


def _autoencoder_digest(inputs: Inputs) -> tuple[str]:
    # Nothing but the name of its folder may say k; hooks are in the identity.
    lines = [
        f"{each.source.name} {each.autoencoder.k} {digest_fingerprints(each.autoencoder.files)}\n"
        for each in inputs.forward.encoders
    ]
    return (hashlib.sha256("".join(lines).encode()).hexdigest() if lines else "",)


def _tokenizer_digest(inputs: Inputs) -> tuple[str]:
    files = [] if inputs.text.ids_column else inputs.forward.checkpoint.tokenizer_files()
    return (digest_files(files) if files else "",)


INPUTS = (
    Input(
        "model",
        flags=("model_path", "model_revision"),
        paths=("model_path",),
        fields=("model_digest",),
        known_by=lambda inputs: (model_digest(inputs.forward.checkpoint),),
        of_text=False,
    ),
    Input(
        "adapter",
        flags=("lora",),
        paths=("lora",),
        fields=("lora_digest",),
        known_by=_adapter_digest,
        of_text=False,
    ),
    Input(
        "autoencoder",
        flags=("encode",),
        paths=("encode",),
        fields=("autoencoder_digest",),
        known_by=_autoencoder_digest,
        of_text=False,
    ),
    Input(
        "tokenizer",
        flags=("model_path", "model_revision"),
        paths=("model_path",),
        fields=("tokenizer_digest",),
        known_by=_tokenizer_digest,
    ),
    Input(
        "chat template",
        flags=("chat_template", "model_path", "chat_template_args"),
        paths=("chat_template",),
        fields=("chat_template",),
        known_by=lambda inputs: ("" if inputs.template is None else inputs.template.digest,),
    ),
    Input(
        "data set",
        flags=("mix", "dataset_path", "dataset_name", "dataset_config", "dataset_split"),
        paths=("dataset_path", "mix"),  # settings_of has what hosts compare of a mixture
        fields=("data", "data_revision"),
        known_by=lambda inputs: (inputs.dataset.name, inputs.dataset.content),
    ),
)

# Flags that may differ between the hosts of a run.
HOST_FIELDS = {
    *("host_id", "coordinator_address", "output_dir", "verbose", "compilation_cache"),
    *(path for each in INPUTS for path in each.paths),
}


def check_inputs(inputs: Inputs, identity: Identity, of_text: bool) -> None:
    """Raises InputError unless the stored activations came from these inputs.

    of_text: whether to compare the inputs that decide token ids, or else the others.
    """
    given = {**vars(inputs.model), **vars(inputs.text)}
    for each in INPUTS:
        recorded = tuple(getattr(identity, field) for field in each.fields)
        if each.of_text == of_text and each.known_by(inputs) != recorded:
            flag = next((flag for flag in each.flags if given[flag]), each.flags[0])
            told = "is not the one" if given[flag] else "is missing, the one"
            value = f" {plain_url(given[flag])}" if isinstance(given[flag], str) else ""
            raise InputError(
                f"--{flag}{value}: the {each.name} {told} that the stored activations came from"
            )


def new_identity(
    inputs: Inputs, text: TextRequest, options: StorageOptions, worker: Worker
) -> Identity:
    """Returns everything that decides the content of the shards, and must stay the same.

    text: that of the inputs, with the ids of the tokens to drop.
    """
    forward, model, seed = inputs.forward, inputs.forward.model, text.shuffle_documents
    codes = tuple(encoder.hook.name for encoder in forward.encoders)
    own = {hook.name: hook.kind.dtype for hook in forward.hooks.values() if hook.name not in codes}
    has_top_logits = any(name.startswith("logits.top_") for name in own)
    flags = {**vars(text), **vars(options), "positions": str(text.positions)}
    known: dict[str, Any] = {}
    for each in INPUTS:
        known |= zip(each.fields, each.known_by(inputs), strict=True)
    found = {
        "hooks": (*own, *codes),
        "integer_hooks": tuple(name for name in own if own[name] == "int32"),
        "float32_hooks": tuple(name for name in own if own[name] == "float32"),
        "code_hooks": codes,
        "encode_most": tuple(encoder.most for encoder in forward.encoders),
        "keyed_by": forward.keyed_by,
        "dtype": str(model.dtype),
        "activation_dtype": str(model.activation_dtype),
        "special_tokens": special_tokens(text, inputs.tokenizer).template,
        "shuffle_documents": "" if seed is None else str(seed),
        "top_logits": inputs.model.top_logits if has_top_logits else 0,
        "total_machines": worker.machines,
        "num_hosts": worker.hosts,
        "machine": worker.machine,
        "host": worker.host,
    }
    content: dict[str, Any] = {**flags, **known, **found}
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
        shared |= {f"{field} ({flags})": shared.pop(field) for field in each.fields}
    return {
        **step_of(inputs.forward),
        **shared,
        **inputs.dataset.files.fingerprints(),
        "source": digest_files(sources),
    }


def package_versions() -> dict[str, str]:
    """Returns the versions of the packages that decide which bytes are stored."""
    return {package: version(package) for package in PACKAGES}
