"""Words the errors about models, adapters and autoencoders that cannot be read.

Only safetensors weights are read, because they can be read by ranges and because reading a pickle
may run any code; other formats, such as .bin and .gguf, must be converted first. Shards without an
index are not read, because only the index tells which shard contains a tensor. A model with an
adapter beside it is not read, because it would be unclear whether to merge the adapter, as --lora
does. If the hub cannot be reached, its cache is only read if it shows which files the model has.

Each function returns an InputError. The parameter `where` is a flag and its value, such as
`--model_path org/x`. float8.py, lora.py and weights.py have the errors about tensors.
"""

import re
from collections.abc import Collection

from huggingface_hub import constants

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.retries import hub_unreachable, name_unknown
from activation_extraction.model.weight_files import INDEX_FILE, SINGLE_FILE

# Names of weight files in formats that are not read.
OTHER_WEIGHTS = re.compile(r"(\w+_)?model.*\.(bin|pt|pth)|consolidated.*\.pth|.*\.gguf")


def a_file(where: str) -> InputError:
    """Returns the error about a path that is a file."""
    return InputError(f"{where}: is a file, expected a folder")


def no_such_place(where: str) -> InputError:
    """Returns the error about a path that is no folder and cannot be a name on the hub."""
    return InputError(f"{where}: no such folder, and not a hub name")


def revision_of_a_folder(where: str, revision: str) -> InputError:
    """Returns the error about a revision of a repository that is not on the hub."""
    return InputError(
        f"--model_revision {revision}: {where} is a folder; only models of the hub have revisions"
    )


def lacks_file(where: str, name: str, offline: bool) -> InputError:
    """Returns the error about a missing file.

    Args:
        where: The flag and its value.
        name: The name of the file.
        offline: Whether the hub could not be reached, so that only its cache was searched.
    """
    cache = "the hub cannot be reached, and its cache here " if offline else ""
    return InputError(f"{where}: {cache}has no {name}")


def no_weights(where: str, weights: str, words: str, names: Collection[str]) -> InputError:
    """Returns the error about missing weights, which mentions weights in other formats.

    Args:
        where: The flag and its value.
        weights: The name of the missing file.
        words: The kind of repository and the library that stores it, such as `model with
            transformers`.
        names: The names of all files in the repository.
    """
    shards = sorted(name for name in names if name.endswith(".safetensors"))
    others = sorted(name for name in names if OTHER_WEIGHTS.fullmatch(name))
    instead = ""
    if shards and weights == SINGLE_FILE:
        instead = (
            f" and no {INDEX_FILE}, but {shards[0]}; copy the index from where the shards come "
            "from: it tells which shard contains a tensor"
        )
    elif others:
        instead = (
            f", but {others[0]}; only safetensors are read: load the {words} and "
            "store it with save_pretrained"
        )
    return InputError(f"{where}: has no {weights}{instead}")


def adapter_in_model(where: str, adapter_file: str, base: str | None) -> InputError:
    """Returns the error about an adapter in the repository of a model.

    Args:
        where: The flag and its value.
        adapter_file: The name of the adapter's configuration file.
        base: The base model in this file; None if it names none.
    """
    of_base = f", of {base}" if base else ""
    return InputError(
        f"{where}: holds an adapter ({adapter_file}{of_base}), which --lora takes; give its base "
        "model alone here"
    )


def hub_refuses(where: str, revision: str | None, error: Exception) -> InputError:
    """Returns the error about an error that the hub has returned.

    Args:
        where: The flag and its value.
        revision: The value of --model_revision; None without one.
        error: The error of the hub.
    """
    of_revision = f" --model_revision {revision}" if revision else ""
    return InputError(
        f"{where}{of_revision}: no such local folder, and the hub says: {one_line(error)}"
    )


def hub_not_reached(
    where: str, flag: str, name: str, nothing: bool, error: Exception
) -> InputError:
    """Returns the error about a hub that cannot be reached, although a file is needed from it.

    Args:
        where: The flag and its value.
        flag: The flag that names the repository.
        name: The name of the file.
        nothing: Whether the hub's cache contains no file of this repository.
        error: The error of the request.
    """
    if constants.HF_HUB_OFFLINE:
        return InputError(
            f"{where}: no such local folder, and the hub's cache {constants.HF_HUB_CACHE} has "
            "nothing of it; HF_HUB_OFFLINE=1 forbids to ask the hub"
        )
    reason = f"the hub cannot be reached for {name}"
    if name_unknown(hub_unreachable(constants.ENDPOINT) or error):
        reason = f"the hub has a name that does not resolve: offline? {flag} takes a folder"
    remedy = "reads its cache" if nothing else "does without what its cache lacks"
    remark = ", which has nothing of this repository" if nothing else ""
    return InputError(
        f"{where}: no such local folder, and {reason}; HF_HUB_OFFLINE=1 {remedy} "
        f"({constants.HF_HUB_CACHE}){remark}"
    )


def another_checkpoint_s_index(where: str, stored: str, other: str | None) -> InputError:
    """Returns the error about a tensor that is missing from the file that the index names.

    Args:
        where: The path or URL of the file.
        stored: The name of the tensor in the index.
        other: The name of the same tensor in the file; None if it is missing.
    """
    but = f"; it is {other} there: {INDEX_FILE} is of another checkpoint" if other else ""
    return InputError(f"{where}: tensor {stored} is missing{but}")
