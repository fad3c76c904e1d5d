"""Lists the sizes of models that Qwen has released, for plans without access to the hub.

For each model, the table contains the fields of config.json that `--plan` needs. The sizes of
Qwen2.5 models are from the technical report (https://arxiv.org/abs/2412.15115). The sizes of Qwen3
and Qwen3.5 models are from the tables of models in maxtext and torchtitan, and the sizes of
Qwen3-Next models are from transformers. run/estimate.py makes the plan.
"""

import re
from typing import Any

# The largest number of tokens per row (max_position_embeddings in config.json). The table has the
# same limit for all models, although some of the models have fewer positions.
MAX_POSITIONS = 262144
# The following dictionaries contain fields of config.json that several models share.
FAMILY = {"vocab_size": 151936, "max_position_embeddings": MAX_POSITIONS}
QWEN2 = FAMILY | {"model_type": "qwen2"}
UNTIED = QWEN2 | {"vocab_size": 152064}
QWEN3 = FAMILY | {"model_type": "qwen3", "head_dim": 128}
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
QWEN3_MOE = QWEN3 | EXPERTS | {"model_type": "qwen3_moe"}
QWEN3_NEXT = FAMILY | {"model_type": "qwen3_next", "head_dim": 256, "num_experts_per_tok": 10}
QWEN3_NEXT |= {"norm_topk_prob": True}
QWEN3_5 = FAMILY | {"model_type": "qwen3_5_text", "head_dim": 256, "vocab_size": 248320}
QWEN3_5_MOE = QWEN3_5 | {"model_type": "qwen3_5_moe_text", "num_experts_per_tok": 8}
# Name of a model -> tuple of the fields that it shares with other models, and the values of the
# fields in SIZE_FIELDS, in the same order. Models without a delta net lack the last two values, and
# models with a delta net but without experts lack the last value.
RELEASED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "Qwen2.5-0.5B": (QWEN2, (896, 4864, 24, 14, 2)),
    "Qwen2.5-1.5B": (QWEN2, (1536, 8960, 28, 12, 2)),
    "Qwen2.5-3B": (QWEN2, (2048, 11008, 36, 16, 2)),
    "Qwen2.5-7B": (UNTIED, (3584, 18944, 28, 28, 4)),
    "Qwen2.5-14B": (UNTIED, (5120, 13824, 48, 40, 8)),
    "Qwen2.5-32B": (UNTIED, (5120, 27648, 64, 40, 8)),
    "Qwen2.5-72B": (UNTIED, (8192, 29568, 80, 64, 8)),
    "Qwen3-0.6B": (QWEN3, (1024, 3072, 28, 16, 8)),
    "Qwen3-1.7B": (QWEN3, (2048, 6144, 28, 16, 8)),
    "Qwen3-4B": (QWEN3, (2560, 9728, 36, 32, 8)),
    "Qwen3-8B": (QWEN3, (4096, 12288, 36, 32, 8)),
    "Qwen3-14B": (QWEN3, (5120, 17408, 40, 40, 8)),
    "Qwen3-32B": (QWEN3, (5120, 25600, 64, 64, 8)),
    "Qwen3-30B-A3B": (QWEN3_MOE, (2048, 768, 48, 32, 4)),
    "Qwen3-235B-A22B": (QWEN3_MOE, (4096, 1536, 94, 64, 4)),
    "Qwen3-Next-80B-A3B": (QWEN3_NEXT, (2048, 512, 48, 16, 2, 32, 512)),
    "Qwen3-Coder-Next": (QWEN3_NEXT, (2048, 512, 48, 16, 2, 32, 512)),
    "Qwen3.5-0.8B": (QWEN3_5, (1024, 3584, 24, 8, 2, 16)),
    "Qwen3.5-2B": (QWEN3_5, (2048, 6144, 24, 8, 2, 16)),
    "Qwen3.5-4B": (QWEN3_5, (2560, 9216, 32, 16, 4, 32)),
    "Qwen3.5-9B": (QWEN3_5, (4096, 12288, 32, 16, 4, 32)),
    "Qwen3.5-27B": (QWEN3_5, (5120, 17408, 64, 24, 4, 48)),
    "Qwen3.5-35B-A3B": (QWEN3_5_MOE, (2048, 512, 40, 16, 2, 32, 256)),
    "Qwen3.5-122B-A10B": (QWEN3_5_MOE, (3072, 1024, 48, 32, 2, 64, 256)),
    "Qwen3.5-397B-A17B": (
        QWEN3_5_MOE | {"num_experts_per_tok": 10},
        (4096, 1024, 60, 32, 2, 64, 512),
    ),
}
# The fields of config.json whose values RELEASED lists. For models with experts, the value of
# intermediate_size is the width of an expert. linear_num_value_heads is a field of the delta net.
SIZE_FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_value_heads",
    "num_experts",
)
# The names of the models whose embedding is also their head.
TIED = re.compile(r"Qwen(2\.5-(0\.5|1\.5|3)B|3-(0\.6|1\.7|4)B|3\.5-(0\.8|2|4)B)")
# The end of a model's name that names its training, such as "-Instruct-2507". It does not change
# the sizes.
VARIANT = re.compile(r"-(Base|Instruct|Thinking|Chat)(-\d+)?$")


def released_config(name: str) -> dict[str, Any] | None:
    """Returns the fields of a released model's config.json that --plan needs.

    Args:
        name: The name of the model on the hub, such as Qwen/Qwen2.5-7B-Instruct.

    Returns:
        The fields by name. None if the table of released models (RELEASED) lacks the model.
    """
    model_name_without_variant = VARIANT.sub("", name.removeprefix("Qwen/"))
    if model_name_without_variant not in RELEASED:
        return None
    value_by_field_shared_by_models, values_of_size_fields = RELEASED[model_name_without_variant]
    value_by_config_field = value_by_field_shared_by_models | dict(
        zip(SIZE_FIELDS, values_of_size_fields, strict=False)
    )
    if "num_experts" in value_by_config_field:
        value_by_config_field["moe_intermediate_size"] = value_by_config_field["intermediate_size"]
    if "linear_num_value_heads" in value_by_config_field:
        # If a model with a delta net has experts, its shared expert is as wide as the others. The
        # other models with a delta net ignore this field.
        value_by_config_field["shared_expert_intermediate_size"] = value_by_config_field[
            "intermediate_size"
        ]
    return value_by_config_field | {
        "tie_word_embeddings": TIED.fullmatch(model_name_without_variant) is not None
    }
