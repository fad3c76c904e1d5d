"""Lists the inputs of a run: model, adapter, autoencoders, tokenizer, chat template, data set.

Each input has an entry in INPUTS. The entry determines how metadata.json identifies the input,
which flags may differ between the hosts of a run, what the hosts compare, and what is compared
before samples are recomputed (--verify) or read again (reread.py). --repair and a run that
continues compare the identity that is made here.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

import jax

import activation_extraction
from activation_extraction.cli.flags import FLAGS, Config
from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import plain_url
from activation_extraction.model.forward import Forward
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

# Packages whose versions decide which bytes are stored.
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "transformers", "datasets", "isal")
Home = TypeVar("Home", Forward, Text)  # the model or the text, to which an input belongs
# Files of this program beside the package, which belong to its code version, too.
SCRIPTS = ("extract_activations.py", "qwen2_jax.py", "qwen2_jax_with_hooks.py")


@dataclass(frozen=True)
class Input(Generic[Home]):
    """One input of a run, which belongs to its model or to its text.

    Attributes:
        name: The name of the input in messages.
        field: The field of Identity that identifies the content of the input.
        known_by: A function that takes the model or the text and returns the value of this field.
        flags: The flags that name the input. A message shows the first one that is given.
        paths: The flags with paths, which may differ between hosts. The content must be the same.
    """

    name: str
    field: str
    known_by: Callable[[Home], str]
    flags: tuple[str, ...]
    paths: tuple[str, ...]


def _adapter_digest(forward: Forward) -> str:
    # Even an adapter on the hub has a digest, because metadata.json records no commit of it with
    # which the next start could find the same adapter.
    adapter = forward.adapter_files
    return "" if adapter is None else content_digest(adapter)


def _autoencoder_digest(forward: Forward) -> str:
    if not forward.encoders:
        return ""
    lines = []
    for encoder in forward.encoders:
        # k is a part of the line because it may follow from the folder's name alone.
        files = digest_fingerprints(encoder.autoencoder.files)
        lines.append(f"{encoder.source.name} {encoder.autoencoder.k} {files}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _tokenizer_digest(text: Text) -> str:
    chosen = text.chosen_tokenizer
    return "" if chosen is None else digest_files(chosen.home.tokenizer_files())


def _template_digest(text: Text) -> str:
    return "" if text.template is None else text.template.digest


def _model_digest(forward: Forward) -> str:
    return model_digest(forward.checkpoint)


MODEL_FLAGS = ("model_path", "model_revision")
LORA = ("lora",)
SAE = ("encode",)
TEMPLATE_FLAGS = ("chat_template", "model_path", "chat_template_args")
TEMPLATE_PATHS = ("chat_template", "lora")
DATA_FLAGS = ("mix", "dataset_path", "dataset_name", "dataset_config", "dataset_split")
DATA_PATHS = ("dataset_path", "mix")  # settings_of compares the parts of --mix that are no paths
MODEL_INPUTS: tuple[Input[Forward], ...] = (
    Input("model", "model_digest", _model_digest, MODEL_FLAGS, ("model_path",)),
    Input("adapter", "lora_digest", _adapter_digest, LORA, LORA),
    Input("autoencoder", "autoencoder_digest", _autoencoder_digest, SAE, SAE),
)
TOKENIZER: Input[Text] = Input(
    "tokenizer", "tokenizer_digest", _tokenizer_digest, MODEL_FLAGS, ("model_path", "lora")
)
# The inputs that decide the token ids. They are compared only before token ids are made again.
TEXT_INPUTS: tuple[Input[Text], ...] = (
    TOKENIZER,
    Input("chat template", "chat_template", _template_digest, TEMPLATE_FLAGS, TEMPLATE_PATHS),
    Input("data set", "data", lambda text: text.dataset.name, DATA_FLAGS, DATA_PATHS),
    Input("data set", "data_revision", lambda text: text.dataset.content, DATA_FLAGS, DATA_PATHS),
)
INPUTS: tuple[Input[Any], ...] = (*MODEL_INPUTS, *TEXT_INPUTS)

# Flags that may differ between the hosts of a run.
HOST_FIELDS = {
    *(name for name, flag in FLAGS.items() if flag.per_host),
    *(path for entry in INPUTS for path in entry.paths),
}


def check_model_inputs(forward: Forward, config: Config, identity: Identity) -> None:
    """Checks that stored activations came from this model.

    Args:
        forward: The model, with its adapter and autoencoders.
        config: The configuration that names them, for the message.
        identity: The identity of the run that stored the activations.

    Raises:
        InputError: The model, the adapter or an autoencoder is another one.
    """
    _check_inputs(MODEL_INPUTS, forward, config.values, identity)


def check_text_inputs(text: Text, config: Config, identity: Identity) -> None:
    """Checks that the tokens of stored activations came from this text.

    Args:
        text: The text.
        config: The configuration that names the inputs of the text, for the message.
        identity: The identity of the run that stored the activations.

    Raises:
        InputError: The tokenizer, the chat template, the data set or one of its files is another
            one.
    """
    _check_inputs(TEXT_INPUTS, text, config.values, identity)


def check_tokenizer(text: Text, config: Config, identity: Identity) -> None:
    """Raises InputError unless the tokenizer made the tokens of stored activations.

    Args:
        text: The text, whose data set is not opened.
        config: The configuration that says where its inputs are now, for the message.
        identity: The identity of the run that stored the activations.

    Raises:
        InputError: The tokenizer is another one.
    """
    _check_inputs((TOKENIZER,), text, config.values, identity)


def _check_inputs(
    inputs: Sequence[Input[Home]], home: Home, flags: Mapping[str, Any], identity: Identity
) -> None:
    """Checks that inputs are those of a run.

    Args:
        inputs: The inputs to compare.
        home: The model or the text to which they belong.
        flags: The values of the flags that name them.
        identity: The identity of the run.

    Raises:
        InputError: An input differs; the message names the first one and its flag.
    """
    for entry in inputs:
        if entry.known_by(home) == getattr(identity, entry.field):
            continue
        flag = next((flag for flag in entry.flags if flags[flag]), entry.flags[0])
        problem = "is not the one" if flags[flag] else "is missing, the one"
        path = f" {plain_url(flags[flag])}" if isinstance(flags[flag], str) else ""
        # The tokenizer or template may differ because the adapter has, or no longer has, its own.
        if flag in MODEL_FLAGS and "lora" in entry.paths and flags["lora"]:
            path += f" with --lora {plain_url(flags['lora'])}"
        raise InputError(
            f"--{flag}{path}: the {entry.name} {problem} that the stored activations came from"
        )


def new_identity(config: Config, forward: Forward, text: Text, worker: Worker) -> Identity:
    """Returns the identity of a run: everything that decides the content of its shards.

    Args:
        config: The configuration of the run.
        forward: The model of the run.
        text: The text of the run.
        worker: The machine and the host.

    Raises:
        InputError: An input cannot be read.
    """
    codes = tuple(encoder.hook.name for encoder in forward.encoders)
    dtypes = {
        hook.name: hook.kind.dtype for hook in forward.hooks.values() if hook.name not in codes
    }
    has_top_logits = any(name.startswith("logits.top_") for name in dtypes)
    model_inputs = {entry.field: entry.known_by(forward) for entry in MODEL_INPUTS}
    text_inputs = {entry.field: entry.known_by(text) for entry in TEXT_INPUTS}
    return Identity(
        **model_inputs,
        **text_inputs,
        special_tokens=text.sample_form.special.template,
        text=replace(config.text, drop_token_ids=text.drop_token_ids),
        storage=config.storage,
        hooks=(*dtypes, *codes),
        integer_hooks=tuple(name for name in dtypes if dtypes[name] == "int32"),
        float32_hooks=tuple(name for name in dtypes if dtypes[name] == "float32"),
        code_hooks=codes,
        encode_most=tuple(encoder.most for encoder in forward.encoders),
        keyed_by=forward.keyed_by,
        dtype=str(forward.model.dtype),
        activation_dtype=str(forward.model.activation_dtype),
        top_logits=config.hooks.top_logits if has_top_logits else 0,
        worker=worker,
    )


def settings_of(config: Config) -> dict[str, Any]:
    """Returns the settings that hosts must have in common before they prepare anything.

    Args:
        config: The configuration of this host.

    Returns:
        Flags, versions of packages, and the devices of this host, by their names in messages.
    """
    flags = config.to_json()
    # Of a mixture, the weights of all sources and the names of hub data sets. Paths may differ.
    mix = [("" if is_path(source) else source, weight) for source, weight in config.text.mix]
    return {
        **{f"--{name}": flags[name] for name in FLAGS if name not in HOST_FIELDS},
        "--mix": mix,
        **{f"version of {package}": number for package, number in package_versions().items()},
        "devices": f"{jax.default_backend()} {jax.local_device_count()}",
    }


def step_of(forward: Forward) -> dict[str, Any]:
    """Returns the properties of a step that hosts must have in common before they compile it.

    Args:
        forward: The model on its mesh.

    Returns:
        The rows of a host, the mesh, and the choice of each kernel, by their names in messages.
    """
    return {
        "rows per host": forward.shape[0],
        "mesh": json.dumps(forward.layout.shape),
        **{name: choice.name for name, choice in forward.kernels.items()},
    }


def fingerprint(forward: Forward, text: Text, identity: Identity) -> dict[str, Any]:
    """Returns everything that hosts must have in common before they compute.

    Args:
        forward: The model on its mesh.
        text: The text.
        identity: The identity of the run.

    Returns:
        The properties of the step (`step_of`), the fields of the identity that all hosts share, the
        files of the data, and a digest of this program's source, by their names in messages.
    """
    package = Path(activation_extraction.__file__).parent
    sources = [*(package.parent / name for name in SCRIPTS), *package.rglob("*.py")]
    shared = identity.shared
    for entry in INPUTS:
        flags = " or ".join(f"--{path}" for path in entry.paths)
        shared[f"{entry.field} ({flags})"] = shared.pop(entry.field)
    return {
        **step_of(forward),
        **shared,
        **text.dataset.files.fingerprints(),
        "source": digest_files(sources),
    }


def package_versions() -> dict[str, str]:
    """Returns the versions of the packages that decide which bytes are stored."""
    return {package: version(package) for package in PACKAGES}
