"""Contains the messages of errors about models, adapters and autoencoders that cannot be read.

Each function returns an InputError, which the caller raises. These rules lead to the errors:

The weights of models and adapters are only read from safetensors files. Such files can be read by
ranges, and reading a pickle might run any code. Other formats, such as .bin and .gguf, must be
converted first. Several weight files need an index, because only the index tells which file
contains a tensor. A model with an adapter in the same folder is rejected, because it is unclear
whether to merge the adapter; users merge it with --lora. If the hub cannot be reached, its cache is
only read if the cache shows which files the repository has.

The errors about tensors are in float8.py, lora.py and weights.py.
"""

import re
from collections.abc import Collection

from huggingface_hub import constants

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.retries import hub_unreachable, name_unknown
from activation_extraction.model.weight_files import INDEX_FILE, SINGLE_FILE

# Names of weight files in formats that are not read, such as pytorch_model.bin,
# consolidated.00.pth or model-q4.gguf.
OTHER_WEIGHTS = re.compile(r"(\w+_)?model.*\.(bin|pt|pth)|consolidated.*\.pth|.*\.gguf")


def path_is_file(flag_with_value: str) -> InputError:
    """Returns the error about a path that is a file instead of a folder.

    Args:
        flag_with_value: The flag and its value, such as `--model_path org/x`.
    """
    return InputError(f"{flag_with_value}: is a file, expected a folder")


def no_folder_and_no_hub_name(flag_with_value: str) -> InputError:
    """Returns the error about a path that is no folder and cannot be a name on the hub.

    Args:
        flag_with_value: The flag and its value, such as `--model_path models/qwen/base`.
    """
    return InputError(
        f"{flag_with_value}: no such folder, and no possible name on the hub, such as ORG/NAME"
    )


def revision_of_a_folder(flag_with_value: str, revision: str) -> InputError:
    """Returns the error about --model_revision for a model that is not on the hub.

    Args:
        flag_with_value: The flag and its value, a folder, such as `--model_path models/qwen`.
        revision: The value of --model_revision.
    """
    return InputError(
        f"--model_revision {revision}: {flag_with_value} is a folder; only models of the hub have "
        "revisions"
    )


def lacks_file(flag_with_value: str, name: str, is_offline: bool) -> InputError:
    """Returns the error about a file that a repository lacks.

    Args:
        flag_with_value: The flag and its value, such as `--model_path org/x`.
        name: The name of the file.
        is_offline: Whether the hub could not be reached, so that only its cache was searched.
    """
    offline_prefix = "the hub cannot be reached, and its cache here " if is_offline else ""
    return InputError(f"{flag_with_value}: {offline_prefix}has no {name}")


def no_weights(
    flag_with_value: str, weights: str, description: str, names: Collection[str]
) -> InputError:
    """Returns the error about a missing weight file.

    If the repository contains other weight files, the error names one of them, and tells what to
    do: if there are several safetensors files, their index file must be added. Weights in other
    formats must be converted to safetensors.

    Args:
        flag_with_value: The flag and its value, such as `--model_path org/x`.
        weights: The name of the missing file.
        description: A phrase for the message: the kind of repository, and the library that can
            convert its weights to safetensors, such as "model with transformers".
        names: The names of all files in the repository.
    """
    safetensors_names = sorted(
        file_name for file_name in names if file_name.endswith(".safetensors")
    )
    unsupported_weight_file_names = sorted(
        file_name for file_name in names if OTHER_WEIGHTS.fullmatch(file_name)
    )
    weights_remark = ""
    if safetensors_names and weights == SINGLE_FILE:
        weights_remark = (
            f" and no {INDEX_FILE}, but {safetensors_names[0]}; copy the index from where the "
            "shards come from: it tells which shard contains a tensor"
        )
    elif unsupported_weight_file_names:
        weights_remark = (
            f", but {unsupported_weight_file_names[0]}; only safetensors are read: load the "
            f"{description} and store it with save_pretrained"
        )
    return InputError(f"{flag_with_value}: has no {weights}{weights_remark}")


def adapter_in_model(flag_with_value: str, adapter_file: str, base_model: str | None) -> InputError:
    """Returns the error about an adapter in a repository that the user gave as a model.

    Args:
        flag_with_value: The flag and its value, such as `--model_path org/x`.
        adapter_file: The name of the adapter's configuration file.
        base_model: The name of the base model in this file; None if the file names no base model.
    """
    base_model_clause = f", of {base_model}" if base_model else ""
    return InputError(
        f"{flag_with_value}: holds an adapter ({adapter_file}{base_model_clause}), which --lora "
        "takes; give its base model alone here"
    )


def hub_error(flag_with_value: str, revision: str | None, error: Exception) -> InputError:
    """Returns the error about a request to the hub that failed although the hub can be reached.

    Args:
        flag_with_value: The flag and its value, such as `--model_path org/x`.
        revision: The revision of the request; None for the main branch.
        error: The error of the request.
    """
    revision_flag = f" --model_revision {revision}" if revision else ""
    return InputError(
        f"{flag_with_value}{revision_flag}: no such local folder, and the hub says: "
        f"{one_line(error)}"
    )


def hub_not_reached(
    flag_with_value: str, flag_name: str, name: str, cache_is_empty: bool, error: Exception
) -> InputError:
    """Returns the error about a file on the hub that is needed while the hub cannot be reached.

    Args:
        flag_with_value: The flag and its value, such as `--model_path org/x`.
        flag_name: The name of this flag, such as `--model_path`.
        name: The name of the file.
        cache_is_empty: Whether the hub's cache contains no file of this repository.
        error: The error of the request.
    """
    if constants.HF_HUB_OFFLINE:
        return InputError(
            f"{flag_with_value}: no such local folder, and the hub's cache "
            f"{constants.HF_HUB_CACHE} has nothing of it; HF_HUB_OFFLINE=1 forbids requests to "
            "the hub"
        )
    hub_problem = f"the hub cannot be reached for {name}"
    if name_unknown(hub_unreachable(constants.ENDPOINT) or error):
        hub_problem = (
            f"the hub has a name that does not resolve: offline? {flag_name} takes a folder"
        )
    effect_of_hf_hub_offline = (
        "reads its cache" if cache_is_empty else "does without what its cache lacks"
    )
    cache_remark = ", which has nothing of this repository" if cache_is_empty else ""
    return InputError(
        f"{flag_with_value}: no such local folder, and {hub_problem}; HF_HUB_OFFLINE=1 "
        f"{effect_of_hf_hub_offline} ({constants.HF_HUB_CACHE}){cache_remark}"
    )


def tensor_not_in_file(location: str, name_in_index: str, name_in_file: str | None) -> InputError:
    """Returns the error for a tensor that is not in the file where the weight index says it is.

    Args:
        location: The path or URL of the file.
        name_in_index: The name of the tensor in the weight index.
        name_in_file: The other name under which the file contains the tensor; None if the file does
            not contain the tensor.
    """
    remark_on_other_checkpoint = ""
    if name_in_file:
        remark_on_other_checkpoint = (
            f"; it is {name_in_file} there: {INDEX_FILE} is of another checkpoint"
        )
    return InputError(f"{location}: tensor {name_in_index} is missing{remark_on_other_checkpoint}")
