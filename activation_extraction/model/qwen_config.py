"""QwenConfig: what a Hugging Face config.json says of a dense model, checked.

transformers fills in what a file leaves out and knows every spelling; what this tool would compute
wrongly is refused here, by name. Sizes of axes and counts of operations follow from the result.
"""

import copy
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.late_imports import transformers
from activation_extraction.model.rope import Rope, positive

# Hundreds of times what any model has, so that an absurd one is refused before it is computed with.
LARGEST_SIZE = 2**27
LARGEST_DEPTH = 10_000
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclasses.dataclass(frozen=True)
class QwenConfig:
    """The shape and constants of a dense model, mostly under the names of its config.json.

    In sliding_layers a token sees only the last `sliding_window` tokens, itself included. Families
    differ in their biases; in qk_norm, a norm on the queries and keys of each head; in q_gate, a
    gate on the output of each head, which q_proj gives beside the queries; in norm_offset, which is
    added to the weights of norms; and in what their tensors' names begin with.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rope: Rope
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    sliding_window: int | None
    sliding_layers: tuple[int, ...]
    qkv_bias: bool
    o_bias: bool
    qk_norm: bool
    _: dataclasses.KW_ONLY
    q_gate: bool = False
    norm_offset: float = 0.0
    prefix: str = "model."
    # Of the family: the types of layers that it has, and whether it may rotate a part of each head.
    TYPES: ClassVar = LAYER_TYPES
    PARTIAL: ClassVar = False

    @property
    def sizes(self) -> dict[str, int]:
        """Letter -> size, for the axes that weights have."""
        return {
            "D": self.hidden_size,
            "N": self.num_attention_heads,
            "Q": self.num_attention_heads * (1 + self.q_gate),
            "K": self.num_key_value_heads,
            "H": self.head_dim,
            "F": self.intermediate_size,
            "V": self.vocab_size,
        }

    @property
    def layer_types(self) -> tuple[str, ...]:
        """Of every layer: the words that tell what it is made of."""
        depth = range(self.num_hidden_layers)
        return tuple(" ".join(self.layer_words(layer)) or "dense" for layer in depth)

    def layer_words(self, layer: int) -> tuple[str, ...]:
        """What this layer has that not every layer of its family has."""
        return ()

    def sizes_with(self, length: int) -> dict[str, int]:
        """`sizes`, and S: the tokens of a row, which is a width of some hooks."""
        return self.sizes | {"S": length}

    @property
    def longest_row(self) -> int:
        """Tokens. Configurations with YaRN often keep the number of positions without it."""
        return max(self.max_position_embeddings, int(self.rope.factor * self.rope.trained))

    def sliding(self, layers: range) -> np.ndarray | None:
        """Which of these layers have a window; None when no layer of the model has one."""
        return np.isin(layers, self.sliding_layers) if self.sliding_layers else None

    def flops(self, layers: int, lengths: Iterable[int]) -> float:
        """Floating point operations of a forward pass through the first `layers` layers.

        lengths: tokens of each sample. Two per weight of a matrix and token, and what causal
        attention needs (arXiv:2204.02311, appendix B, without the half above the diagonal).
        """
        lengths = list(lengths)
        return sum(
            self.flops_of(layer, self.mixer_weights(layer) + self.mlp_weights(layer), True, lengths)
            for layer in range(layers)
        )

    def mixer_weights(self, layer: int) -> int:
        """Of this layer's matrices before its MLP."""
        sizes = self.sizes
        return self.hidden_size * self.head_dim * (sizes["Q"] + sizes["N"] + 2 * sizes["K"])

    def mlp_weights(self, layer: int) -> int:
        """Of this layer's matrices after its attention, those that one token is multiplied with."""
        return 3 * self.hidden_size * self.intermediate_size

    def used(self, path: Sequence[str]) -> float:
        """Which share of a parameter's weights one token is multiplied with."""
        return 1.0

    def flops_of(self, layer: int, weights: int, attends: bool, lengths: Iterable[int]) -> float:
        """As `flops`, of one layer that uses so many weights of its matrices."""
        heads = self.num_attention_heads * self.head_dim
        window = self.sliding_window if layer in self.sliding_layers else None

        def seen(n: int) -> int:
            """Twice the pairs of tokens of which one sees the other."""
            most = n if window is None else min(window, n)
            return most * (2 * n - most)

        return float(sum(2 * (weights * n + attends * heads * seen(n)) for n in lengths))

    @classmethod
    def from_hf(cls, hf: Any, source: str, **details: Any) -> Self:
        """From a configuration that `complete` returned.

        details: what the family adds, or says in place of config.json. Raises InputError, naming
        field and value, for what would be computed wrongly.
        """
        _refuse(hf, source)
        asked = [name for name in POSITIVE if name not in details]
        numbers: dict[str, Any] = {name: positive_int(hf, name, source) for name in asked}
        head_dim = getattr(hf, "head_dim", None)
        if head_dim is None:
            head_dim = numbers["hidden_size"] // numbers["num_attention_heads"]
        window, sliding = _sliding(hf, cls.TYPES, source)
        config = cls(
            model_type=hf.model_type,
            **numbers,
            head_dim=head_dim,
            rope=Rope.from_hf(_rope_parameters(hf, source), head_dim, source, cls.PARTIAL),
            rms_norm_eps=positive(vars(hf), "rms_norm_eps", source),
            tie_word_embeddings=bool(hf.tie_word_embeddings),
            sliding_window=window,
            sliding_layers=sliding,
            **details,
        )
        if config.num_attention_heads % config.num_key_value_heads:
            raise InputError(
                f"{source}: num_attention_heads {config.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {config.num_key_value_heads}"
            )
        if type(head_dim) is not int or head_dim < 2 or head_dim % 2:
            raise InputError(f"{source}: head_dim {head_dim!r} is not a positive even number")
        return config


def qwen2_config(hf: Any, source: str) -> QwenConfig:
    """From a configuration that `complete` returned. Raises InputError."""
    return QwenConfig.from_hf(hf, source, qkv_bias=True, o_bias=False, qk_norm=False)


def qwen3_config(hf: Any, source: str) -> QwenConfig:
    """From a configuration that `complete` returned. Raises InputError."""
    bias = bool(hf.attention_bias)
    return QwenConfig.from_hf(hf, source, qkv_bias=bias, o_bias=bias, qk_norm=True)


POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def read_json(path: str | Path) -> dict[str, Any]:
    """The contents of a config.json. Raises InputError for a file that holds no JSON object."""
    try:
        raw = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


def complete(raw: Mapping[str, Any], source: str) -> Any:
    """A config.json as transformers understands it, with everything that it leaves out.

    raw: its contents, with a model_type that transformers knows. Raises InputError for what
    transformers does not take.
    """
    _refuse_absurd(raw, source)
    try:
        return transformers().AutoConfig.for_model(**copy.deepcopy(dict(raw)))  # it writes to it
    except Exception as error:  # its validation raises types of its own, and whatever it runs into
        raise InputError(f"{source}: {one_line(error)}") from error


def _refuse_absurd(raw: Mapping[str, Any], source: str) -> None:
    """Raises InputError for sizes for which transformers itself would need too much memory."""
    text = raw.get("text_config")
    for part in (raw, text if isinstance(text, Mapping) else {}):
        for name in POSITIVE:
            value: Any = part.get(name)
            most = LARGEST_DEPTH if name == "num_hidden_layers" else LARGEST_SIZE
            if type(value) in (int, float) and value > most:
                raise InputError(f"{source}: {name} is {value:.6g}, expected at most {most:,}")


def positive_int(hf: Any, field: str, source: str) -> int:
    """A field of a configuration. Raises InputError when it is anything else."""
    value = getattr(hf, field)
    if type(value) is not int or value < 1:
        raise InputError(f"{source}: {field} must be a positive integer, found {value!r}")
    if value > LARGEST_SIZE:
        raise InputError(f"{source}: {field} is {value:.6g}, expected at most {LARGEST_SIZE:,}")
    return value


def _refuse(hf: Any, source: str) -> None:
    refuse_quantized(hf, source)
    if hf.hidden_act != "silu":
        raise InputError(f"{source}: hidden_act {hf.hidden_act!r} is not supported, only 'silu' is")


def refuse_quantized(hf: Any, source: str) -> None:
    """Raises InputError for a configuration of quantised weights."""
    quantized = getattr(hf, "quantization_config", None)
    if quantized is not None:
        how = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise InputError(
            f"{source}: quantization_config ({how}): quantised checkpoints are not supported; use "
            "the model's bfloat16, float16 or float32 weights"
        )


def _rope_parameters(hf: Any, source: str) -> Mapping[str, Any]:
    """The one set of them for all layers. YaRN's factor may be left to the numbers of positions."""
    rope = hf.rope_parameters
    if not isinstance(rope, Mapping) or any(isinstance(v, Mapping) for v in rope.values()):
        raise InputError(f"{source}: rope_parameters {rope!r} is not supported, only one flat set")
    if rope.get("rope_type") == "yarn" and rope.get("factor", 0) is None:
        trained = positive(rope, "original_max_position_embeddings", source)
        return {**rope, "factor": hf.max_position_embeddings / trained}
    return rope


def _sliding(hf: Any, known: tuple[str, ...], source: str) -> tuple[int | None, tuple[int, ...]]:
    """The window, and the layers that have it. known: the types of layers that are supported."""
    types = getattr(hf, "layer_types", None)
    if types is None:  # a family whose layers all have it
        types = [LAYER_TYPES[bool(hf.sliding_window)]] * hf.num_hidden_layers
    for layer, kind in enumerate(types):
        if kind not in known:
            raise InputError(
                f"{source}: layer_types: layer {layer} is {kind!r}, and only "
                f"{' and '.join(known)} are supported"
            )
    sliding = tuple(k for k, kind in enumerate(types) if kind == "sliding_attention")
    if not sliding:
        return None, ()
    if hf.sliding_window is None:
        raise InputError(
            f"{source}: layer_types: layer {sliding[0]} slides, but there is no window "
            "(use_sliding_window, sliding_window)"
        )
    return positive_int(hf, "sliding_window", source), sliding
