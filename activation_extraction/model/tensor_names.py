"""One rule turns the names of a checkpoint's tensors into those of its language model.

The name of a tensor depends on the class that it was saved from: `layers.0...`, or the same after
`model.`, `model.language_model.` or `thinker.model.`; and a library once repeated such a part. Here
the names of the language model's tensors begin with `model.`, except that of its head.
"""

from collections.abc import Iterable

from activation_extraction.common.errors import InputError

# Modules that contain the language model.
AROUND = {"thinker", "model", "language_model", "transformer"}
# Modules beside the language model: inputs and outputs of other kinds, the draft of further tokens,
# and heads of reward models, value models and classifiers. No hook needs them.
BESIDE = {
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
RECOMPUTED = ".rotary_emb.inv_freq"  # some exporters write it, but it follows from rope_theta


def text_name(name: str) -> str | None:
    """Returns the name that a tensor has in the language model alone.

    Args:
        name: The name in a checkpoint.

    Returns:
        The name; None for a tensor beside the language model. Names that follow no rule are
        returned unchanged.
    """
    parts = name.split(".")
    first = next((k for k, part in enumerate(parts) if part not in AROUND), len(parts))
    inside = parts[first:]
    if not inside or inside[0] not in {"embed_tokens", "layers", "norm", "lm_head", *BESIDE}:
        return name
    if inside[0] in BESIDE or name.endswith(RECOMPUTED):
        return None
    return ".".join(inside if inside[0] == "lm_head" else ["model", *inside])


def text_names(stored: Iterable[str], source: str) -> dict[str, str]:
    """Returns the name of every tensor in the language model -> its name in the checkpoint.

    Args:
        stored: The names in the checkpoint.
        source: The checkpoint or the file, for the message.

    Raises:
        InputError: Two tensors have the same name in the language model.
    """
    names: dict[str, str] = {}
    for name in stored:
        text = text_name(name)
        if text is None:
            continue
        if text in names:
            raise InputError(f"{source}: {names[text]} and {name} are both the text model's {text}")
        names[text] = name
    return names
