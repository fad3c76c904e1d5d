"""The errors about models, adapters and autoencoders that are not read, and why they are not.

Only safetensors weights are read, because they can be read by ranges and because reading a pickle
may run any code; other forms, such as .bin and .gguf, must be converted first. A shard without its
index is not read, because only the index says which shard holds a tensor. A model with an adapter
beside it is not read, because it would not be clear whether the adapter is to be merged; --lora
says that it is. If the hub cannot be asked, files of its cache are read only where it is clear
which files the model has.

All functions return the InputError. where: the flag and its value, such as `--model_path org/x`.
float8.py, lora.py and weights.py have the errors about tensors that do not fit.
"""

import re
from collections.abc import Collection

from huggingface_hub import constants

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.retries import hub_unreachable, name_unknown
from activation_extraction.model.weight_files import INDEX_FILE, SINGLE_FILE

# Weights in forms that are not read.
OTHER_WEIGHTS = re.compile(r"(\w+_)?model.*\.(bin|pt|pth)|consolidated.*\.pth|.*\.gguf")


def a_file(where: str) -> InputError:
    """The path is a file."""
    return InputError(f"{where}: is a file, expected a folder")


def no_such_place(where: str) -> InputError:
    """The path is no folder, and the hub has no such names."""
    return InputError(f"{where}: no such folder, and not a hub name")


def revision_of_a_folder(where: str, revision: str) -> InputError:
    """A revision is given, but not a repository of the hub."""
    return InputError(
        f"--model_revision {revision}: {where} is a folder; only models of the hub have revisions"
    )


def lacks_file(where: str, name: str, offline: bool) -> InputError:
    """A file is missing. offline: whether only the hub's cache could be asked for it."""
    cache = "the hub cannot be reached, and its cache here " if offline else ""
    return InputError(f"{where}: {cache}has no {name}")


def no_weights(where: str, weights: str, words: str, names: Collection[str]) -> InputError:
    """The file with the weights is missing; the message says what is there instead.

    Args:
        where: The flag and its value.
        weights: The name of the missing file.
        words: The kind of repository and the library that stores it, such as `model with
            transformers`.
        names: The names of the files that are there.
    """
    shards = sorted(name for name in names if name.endswith(".safetensors"))
    others = sorted(name for name in names if OTHER_WEIGHTS.fullmatch(name))
    instead = ""
    if shards and weights == SINGLE_FILE:
        instead = (
            f" and no {INDEX_FILE}, but {shards[0]}; copy the index from where the shards come "
            "from: it says which shard holds a tensor"
        )
    elif others:
        instead = (
            f", but {others[0]}; only safetensors are read: load the {words} and "
            "store it with save_pretrained"
        )
    return InputError(f"{where}: has no {weights}{instead}")


def adapter_in_model(where: str, adapter_file: str, base: str | None) -> InputError:
    """A model is asked for, and the folder has an adapter.

    Args:
        where: The flag and its value.
        adapter_file: The file that shows the adapter.
        base: The adapter's base model, as its file names it; None if it does not.
    """
    of_base = f", of {base}" if base else ""
    return InputError(
        f"{where}: holds an adapter ({adapter_file}{of_base}), which --lora takes; give its base "
        "model alone here"
    )


def hub_refuses(where: str, revision: str | None, error: Exception) -> InputError:
    """The hub has answered with an error."""
    of_revision = f" --model_revision {revision}" if revision else ""
    return InputError(
        f"{where}{of_revision}: no such local folder, and the hub says: {one_line(error)}"
    )


def hub_not_reached(
    where: str, flag: str, name: str, nothing: bool, error: Exception
) -> InputError:
    """The hub must be asked for a file, and cannot be.

    Args:
        where: The flag and its value.
        flag: The flag that names the repository.
        name: The file.
        nothing: Whether the hub's cache has no file of this repository.
        error: Why the hub could not be asked.
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
    """A file lacks a tensor that the index places there.

    Args:
        where: The file.
        stored: The name of the tensor in the index.
        other: The name under which the file has the tensor; None if it has not.
    """
    but = f"; it is {other} there: {INDEX_FILE} is of another checkpoint" if other else ""
    return InputError(f"{where}: tensor {stored} is missing{but}")
