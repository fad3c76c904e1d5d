"""Lists the inputs of a run: model, adapter, autoencoders, tokenizer, chat template, data set.

Each input has an entry in INPUTS. The entry names the field of metadata.json that identifies the
content of the input, such as a digest. It also determines which flags may differ between the hosts
of a run. The hosts compare these fields before they compute. Before samples are recomputed
(--verify) or read again (reread.py), the present inputs are compared with the fields that the run
has recorded. --repair and a run that continues compare the whole identity, which `new_identity`
makes and store/identity.py declares.
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

# Packages whose versions determine which bytes are stored.
PACKAGES = ("jax", "jaxlib", "flax", "numpy", "tokenizers", "transformers", "datasets", "isal")
# The type of the object, the model or the text pipeline, that an `Input` of the run belongs to.
ModelOrText = TypeVar("ModelOrText", Forward, Text)
# Source files of this program outside of the package activation_extraction. They belong to the
# digest of the source code, which the hosts compare.
SCRIPTS = ("extract_activations.py", "qwen2_jax.py", "qwen2_jax_with_hooks.py")


@dataclass(frozen=True)
class Input(Generic[ModelOrText]):
    """One input of a run, which belongs to its model or to its text.

    Attributes:
        name_in_messages: Name of the input, such as "model", in messages.
        identity_field: The name of the field of Identity that identifies the content of the input.
        read_field_value: A function that takes the model or the text and returns the value of this
            field.
        flag_names: The names of the flags that determine the input. A message shows the first
            of these flags that is set.
        path_flag_names: The names of the flags that contain the path of the input. The paths may
            differ between hosts if the content is the same.
    """

    name_in_messages: str
    identity_field: str
    read_field_value: Callable[[ModelOrText], str]
    flag_names: tuple[str, ...]
    path_flag_names: tuple[str, ...]


def _adapter_digest(forward: Forward) -> str:
    # The content of an adapter on the hub is digested, too, because metadata.json does not record
    # the commit of an adapter.
    adapter_files = forward.adapter_files
    return "" if adapter_files is None else content_digest(adapter_files)


def _autoencoder_digest(forward: Forward) -> str:
    if not forward.encoders:
        return ""
    autoencoder_digest_lines = []
    for encoder in forward.encoders:
        # The digest also includes k, the number of active features of a token, because the files of
        # some autoencoders do not contain k, which is then read from the name of their folder or
        # repository.
        files_digest = digest_fingerprints(encoder.autoencoder.file_paths)
        autoencoder_digest_lines.append(
            f"{encoder.source_hook.name} {encoder.autoencoder.k} {files_digest}\n"
        )
    return hashlib.sha256("".join(autoencoder_digest_lines).encode()).hexdigest()


def _tokenizer_digest(text_pipeline: Text) -> str:
    chosen_tokenizer = text_pipeline.chosen_tokenizer
    if chosen_tokenizer is None:
        return ""
    return digest_files(chosen_tokenizer.repository.tokenizer_files())


def _template_digest(text_pipeline: Text) -> str:
    return "" if text_pipeline.template is None else text_pipeline.template.digest


def _model_digest(forward: Forward) -> str:
    return model_digest(forward.checkpoint)


MODEL_FLAGS = ("model_path", "model_revision")
LORA = ("lora",)
SAE = ("encode",)
TEMPLATE_FLAGS = ("chat_template", "model_path", "chat_template_args")
TEMPLATE_PATHS = ("chat_template", "lora")
DATA_FLAGS = ("mix", "dataset_path", "dataset_name", "dataset_config", "dataset_split")
# Flags with the paths of data files, which may differ between hosts. The value of --mix also
# contains weights and the names of hub data sets. They must be the same on all hosts, so
# `settings_of` compares them.
DATA_PATHS = ("dataset_path", "mix")
MODEL_INPUTS: tuple[Input[Forward], ...] = (
    Input("model", "model_digest", _model_digest, MODEL_FLAGS, ("model_path",)),
    Input("adapter", "lora_digest", _adapter_digest, LORA, LORA),
    Input("autoencoder", "autoencoder_digest", _autoencoder_digest, SAE, SAE),
)
TOKENIZER: Input[Text] = Input(
    "tokenizer", "tokenizer_digest", _tokenizer_digest, MODEL_FLAGS, ("model_path", "lora")
)
# Inputs that determine the token ids. Before token ids of a stored run are made again, these inputs
# are compared with the inputs that the run has recorded.
TEXT_INPUTS: tuple[Input[Text], ...] = (
    TOKENIZER,
    Input("chat template", "chat_template", _template_digest, TEMPLATE_FLAGS, TEMPLATE_PATHS),
    Input(
        "data set",
        "data",
        lambda text_pipeline: text_pipeline.dataset.description,
        DATA_FLAGS,
        DATA_PATHS,
    ),
    Input(
        "data set",
        "data_revision",
        lambda text_pipeline: text_pipeline.dataset.data_revision,
        DATA_FLAGS,
        DATA_PATHS,
    ),
)
INPUTS: tuple[Input[Any], ...] = (*MODEL_INPUTS, *TEXT_INPUTS)

# Names of the flags that may differ between the hosts of a run.
HOST_FLAGS = {
    *(flag_name for flag_name, flag in FLAGS.items() if flag.may_differ_by_host),
    *(path_flag_name for run_input in INPUTS for path_flag_name in run_input.path_flag_names),
}


def check_model_inputs(forward: Forward, config: Config, identity: Identity) -> None:
    """Checks that a run has computed its activations with the model in `forward`.

    Args:
        forward: The model, with its adapter and autoencoders.
        config: The configuration, whose flags appear in the message.
        identity: The identity of the run.

    Raises:
        InputError: If the run used another model, adapter or autoencoder.
    """
    _check_inputs(MODEL_INPUTS, forward, config.values, identity)


def check_text_inputs(text_pipeline: Text, config: Config, identity: Identity) -> None:
    """Checks that a run has made its tokens with the inputs in `text_pipeline`.

    Args:
        text_pipeline: The inputs: the tokenizer, the chat template and the data set.
        config: The configuration, whose flags appear in the message.
        identity: The identity of the run.

    Raises:
        InputError: If the run used another tokenizer, chat template or data set, or if a file of
            the data set has changed.
    """
    _check_inputs(TEXT_INPUTS, text_pipeline, config.values, identity)


def check_tokenizer(text_pipeline: Text, config: Config, identity: Identity) -> None:
    """Checks that a run has made its tokens with the tokenizer in `text_pipeline`.

    Args:
        text_pipeline: The text pipeline, which opens the tokenizer, the chat template and the data
            set when they are needed. Here, only its tokenizer is opened.
        config: The configuration, whose flags appear in the message.
        identity: The identity of the run.

    Raises:
        InputError: If the run used another tokenizer.
    """
    _check_inputs((TOKENIZER,), text_pipeline, config.values, identity)


def _check_inputs(
    inputs: Sequence[Input[ModelOrText]],
    model_or_text: ModelOrText,
    value_by_flag: Mapping[str, Any],
    identity: Identity,
) -> None:
    """Checks that inputs have the content that the identity of a run records.

    Args:
        inputs: The inputs to compare.
        model_or_text: The object to which the inputs belong: a `Forward` for inputs of the model,
            or a `Text` for the tokenizer, the chat template and the data set.
        value_by_flag: The values of the flags by their names.
        identity: The identity of the run.

    Raises:
        InputError: If an input differs. The message names the first such input and its flag.
    """
    for run_input in inputs:
        if run_input.read_field_value(model_or_text) == getattr(identity, run_input.identity_field):
            continue
        names_of_set_flags = [
            flag_name for flag_name in run_input.flag_names if value_by_flag[flag_name]
        ]
        flag_name = names_of_set_flags[0] if names_of_set_flags else run_input.flag_names[0]
        flag_value = value_by_flag[flag_name]
        difference_phrase = "is not the one" if flag_value else "is missing, the one"
        path_phrase = f" {plain_url(flag_value)}" if isinstance(flag_value, str) else ""
        # An adapter may contain a tokenizer and a template, so the message also names the adapter.
        if (
            flag_name in MODEL_FLAGS
            and "lora" in run_input.path_flag_names
            and value_by_flag["lora"]
        ):
            path_phrase += f" with --lora {plain_url(value_by_flag['lora'])}"
        raise InputError(
            f"--{flag_name}{path_phrase}: the {run_input.name_in_messages} {difference_phrase} "
            "that the stored activations came from"
        )


def new_identity(config: Config, forward: Forward, text_pipeline: Text, worker: Worker) -> Identity:
    """Returns the identity of a run, which is everything that determines the content of its shards.

    Args:
        config: The configuration of the run.
        forward: The model of the run.
        text_pipeline: The tokenizer, the chat template and the data set of the run, and the
            settings of its samples.
        worker: The machine and the host that store the shards.

    Raises:
        InputError: If an input cannot be read.
    """
    code_hook_names = tuple(encoder.hook.name for encoder in forward.encoders)
    dtype_by_hook_name = {
        hook.name: hook.kind.dtype
        for hook in forward.hook_by_key.values()
        if hook.name not in code_hook_names
    }
    stores_top_logits = any(hook_name.startswith("logits.top_") for hook_name in dtype_by_hook_name)
    value_by_identity_field = {
        **{
            model_input.identity_field: model_input.read_field_value(forward)
            for model_input in MODEL_INPUTS
        },
        **{
            text_input.identity_field: text_input.read_field_value(text_pipeline)
            for text_input in TEXT_INPUTS
        },
    }
    return Identity(
        **value_by_identity_field,
        special_tokens=text_pipeline.sample_settings.special_tokens.description,
        text=replace(config.text_options, drop_token_ids=text_pipeline.drop_token_ids),
        storage=config.storage_options,
        hooks=(*dtype_by_hook_name, *code_hook_names),
        integer_hooks=tuple(
            hook_name
            for hook_name in dtype_by_hook_name
            if dtype_by_hook_name[hook_name] == "int32"
        ),
        float32_hooks=tuple(
            hook_name
            for hook_name in dtype_by_hook_name
            if dtype_by_hook_name[hook_name] == "float32"
        ),
        code_hooks=code_hook_names,
        encode_most=tuple(encoder.max_codes_per_token for encoder in forward.encoders),
        keyed_by=forward.keyed_by,
        dtype=str(forward.model.dtype),
        activation_dtype=str(forward.model.activation_dtype),
        top_logits=config.hook_options.top_logits if stores_top_logits else 0,
        worker=worker,
    )


def settings_of(config: Config) -> dict[str, Any]:
    """Returns the settings that must be the same on all hosts before they prepare a run.

    Args:
        config: The configuration of this host.

    Returns:
        A dict: name of a setting, as messages write it -> its value. The settings are flags,
        versions of packages, and "devices", the platform and number of this host's devices.
    """
    value_by_flag = config.to_json()
    # Hosts compare the weights of a mixture and the names of its hub data sets, but not its paths,
    # which may differ between hosts.
    comparable_sources_and_weights = []
    for path_or_hub_dataset_name, source_weight in config.text_options.mix:
        hub_dataset_name_or_empty = (
            "" if is_path(path_or_hub_dataset_name) else path_or_hub_dataset_name
        )
        comparable_sources_and_weights.append((hub_dataset_name_or_empty, source_weight))
    version_by_setting = {
        f"version of {package_name}": package_version
        for package_name, package_version in package_versions().items()
    }
    return {
        **{
            f"--{flag_name}": value_by_flag[flag_name]
            for flag_name in FLAGS
            if flag_name not in HOST_FLAGS
        },
        "--mix": comparable_sources_and_weights,
        **version_by_setting,
        "devices": f"{jax.default_backend()} {jax.local_device_count()}",
    }


def step_of(forward: Forward) -> dict[str, Any]:
    """Returns the properties of a step that must be the same on all hosts.

    The hosts compare these properties before they compile the step.

    Args:
        forward: The model on its mesh.

    Returns:
        Name of a property in messages -> the property. The properties are the number of rows that
        a host computes in a step, the mesh, and the chosen variant of each kernel.
    """
    return {
        "rows per host": forward.batch_shape[0],
        "mesh": json.dumps(forward.layout.shape),
        **{
            operation_name: kernel_choice.kernel_name
            for operation_name, kernel_choice in forward.kernel_choice_by_operation.items()
        },
    }


def contents_to_compare(
    forward: Forward, text_pipeline: Text, identity: Identity
) -> dict[str, Any]:
    """Returns the settings and inputs that must be the same on all hosts before they compute.

    Args:
        forward: The model on its mesh.
        text_pipeline: The data set, the tokenizer, and the settings of the samples.
        identity: The identity of the run.

    Returns:
        A dict from the name of a setting or input, as messages show it, to its value. It contains
        the properties of the step (`step_of`), the fields of the identity that all hosts share, the
        fingerprints of the data files, and a digest of this program's source files.
    """
    package_folder = Path(activation_extraction.__file__).parent
    script_paths = [package_folder.parent / script_name for script_name in SCRIPTS]
    source_files = [*script_paths, *package_folder.rglob("*.py")]
    shared_identity_fields = identity.shared
    for run_input in INPUTS:
        flags_phrase = " or ".join(
            f"--{path_flag_name}" for path_flag_name in run_input.path_flag_names
        )
        shared_identity_fields[f"{run_input.identity_field} ({flags_phrase})"] = (
            shared_identity_fields.pop(run_input.identity_field)
        )
    return {
        **step_of(forward),
        **shared_identity_fields,
        **text_pipeline.dataset.files.fingerprints(),
        "source": digest_files(source_files),
    }


def package_versions() -> dict[str, str]:
    """Returns the versions of the packages that determine which bytes are stored, by name."""
    return {package_name: version(package_name) for package_name in PACKAGES}
