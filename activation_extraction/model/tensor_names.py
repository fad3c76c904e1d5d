"""One rule turns the names of a checkpoint's tensors into those of its language model.

What a tensor is called depends on the class that it was saved from: `layers.0...`, the same after
`model.`, `model.language_model.` or `thinker.model.`; and a library once repeated such a part. Here
the tensors of the language model begin with `model.`, but for its head's.
"""

from collections.abc import Iterable

from activation_extraction.common.errors import InputError

AROUND = {"thinker", "model", "language_model", "transformer"}  # what holds the language model
# What stands beside it: inputs and outputs of other kinds, the draft of further tokens, and heads
# of reward models, value models and classifiers. No hook needs them.
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
RECOMPUTED = ".rotary_emb.inv_freq"  # some exporters write it; every model has it from rope_theta


def text_name(name: str) -> str | None:
    """Returns what a tensor is called in the language model alone; None for one beside it.

    Names that follow no rule are returned as they are.
    """
    parts = name.split(".")
    first = next((k for k, part in enumerate(parts) if part not in AROUND), len(parts))
    rest = parts[first:]
    if not rest or rest[0] not in {"embed_tokens", "layers", "norm", "lm_head", *BESIDE}:
        return name
    if rest[0] in BESIDE or name.endswith(RECOMPUTED):
        return None
    return ".".join(rest if rest[0] == "lm_head" else ["model", *rest])


def text_names(stored: Iterable[str], source: str) -> dict[str, str]:
    """Returns the language model's names of stored tensors: that name -> the stored one.

    Raises InputError for two tensors of one name.
    """
    found: dict[str, str] = {}
    for name in stored:
        text = text_name(name)
        if text is None:
            continue
        if text in found:
            raise InputError(f"{source}: {found[text]} and {name} are both the text model's {text}")
        found[text] = name
    return found
