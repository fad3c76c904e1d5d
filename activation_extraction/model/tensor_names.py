"""Maps the names of the tensors in a checkpoint to the names in its language model alone.

In a checkpoint, the name of a tensor depends on the class that was saved. The name may begin with
`layers.0.`, or with a prefix before it, such as `model.`, `model.language_model.` or
`thinker.model.`. A library once wrote such a prefix twice. In the language model alone, all names
begin with `model.`, except `lm_head.weight`.
"""

from collections.abc import Iterable

from activation_extraction.common.errors import InputError

# The names of modules that may contain the language model. The names of its tensors in a checkpoint
# begin with such names, for example with "model.language_model.".
CONTAINERS = {"thinker", "model", "language_model", "transformer"}
# Modules that are not part of the language model, and that no hook needs: encoders and decoders of
# images and sound, modules that draft further tokens, and heads of reward models, value models and
# classifiers.
OTHER_MODULES = {
    "visual",
    "audio_tower",
    "talker",
    "code2wav",
    "token2wav",
    "mtp",
    "score",
    "v_head",
    "classifier",
    "qa_outputs",
}
# The end of the name of a tensor that some exporters write. The tensor is not read, because its
# values follow from rope_theta.
RECOMPUTED = ".rotary_emb.inv_freq"


def name_in_language_model(name: str) -> str | None:
    """Returns the name that a tensor would have in a checkpoint of the language model alone.

    Args:
        name: The name in a checkpoint, whose model may contain other parts, such as an encoder of
            images.

    Returns:
        The name in the language model, such as model.norm.weight. None for a tensor that is not
        read: a tensor of a module outside of the language model (OTHER_MODULES), or a tensor whose
        values follow from the configuration (its name ends with RECOMPUTED). Modules that contain
        the language model (CONTAINERS) are removed from the beginning of the name. If the first
        module after them is neither one of OTHER_MODULES nor a module of the language model
        (embed_tokens, layers, norm or lm_head), the name is returned unchanged.
    """
    module_names = name.split(".")
    while module_names and module_names[0] in CONTAINERS:
        del module_names[0]
    if not module_names:
        return name
    first_module_name = module_names[0]
    if first_module_name not in {"embed_tokens", "layers", "norm", "lm_head", *OTHER_MODULES}:
        return name
    if first_module_name in OTHER_MODULES or name.endswith(RECOMPUTED):
        return None
    return ".".join(module_names if first_module_name == "lm_head" else ["model", *module_names])


def tensors_of_language_model(names_in_checkpoint: Iterable[str], source: str) -> dict[str, str]:
    """Finds the tensors of the language model among the tensors of a checkpoint.

    Args:
        names_in_checkpoint: The names of tensors in the checkpoint.
        source: The flag of the checkpoint with its value, or the path or URL of the weight file
            that contains the tensors. The error message begins with it.

    Returns:
        Name of a tensor in the language model (see `name_in_language_model`) -> its name in the
        checkpoint.

    Raises:
        InputError: If two tensors have the same name in the language model.
    """
    name_in_checkpoint_by_name_in_language_model: dict[str, str] = {}
    for name_in_checkpoint in names_in_checkpoint:
        tensor_name_in_language_model = name_in_language_model(name_in_checkpoint)
        if tensor_name_in_language_model is None:
            continue
        if tensor_name_in_language_model in name_in_checkpoint_by_name_in_language_model:
            earlier_name_in_checkpoint = name_in_checkpoint_by_name_in_language_model[
                tensor_name_in_language_model
            ]
            raise InputError(
                f"{source}: {earlier_name_in_checkpoint} and {name_in_checkpoint} are both the "
                f"text model's {tensor_name_in_language_model}"
            )
        name_in_checkpoint_by_name_in_language_model[tensor_name_in_language_model] = (
            name_in_checkpoint
        )
    return name_in_checkpoint_by_name_in_language_model
