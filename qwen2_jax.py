"""Dense Qwen models in Flax: their modules, and where each weight comes from.

The parameter tree mirrors the names and the orientation of the Hugging Face checkpoint. Its tensor
`model.layers.7.self_attn.q_proj.weight` becomes row 7 of `layers/self_attn/q_proj/weight`: layers
are stacked for `scan`, and the flat head axis is split in two. So every module declares a weight
once (shape, logical axes, initialiser) and `weight_table` derives the rest. weights.py reads the
files, mesh.py shards, and qwen2_jax_with_hooks.py captures activations.

Letters: B rows, T tokens per row, D hidden, N query heads, K key/value heads, H head size,
F MLP width, V vocabulary, L layers.

What the families differ in is said by the configuration, and by their entries in `FAMILIES` at the
end of qwen2_jax_with_hooks.py.

References: `transformers.models.qwen2.modeling_qwen2` and `qwen3.modeling_qwen3`, and the reports
(arXiv:2407.10671, arXiv:2505.09388).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from activation_extraction.model.attention import (
    Attention,
    attention_pattern,
    blocked_attention,
)
from activation_extraction.model.bits import from_bits
from activation_extraction.model.decoder import Decoder, Path
from activation_extraction.model.layers import STREAM, Linear, Out, RMSNorm, parameter
from activation_extraction.model.mesh import Layout
from activation_extraction.model.qwen_config import QwenConfig
from activation_extraction.model.rope import rotate
from activation_extraction.model.weights import WeightSpec


class Embedding(nn.Module):
    """Token embedding: (B, T) int32 -> (B, T, D)."""

    config: QwenConfig
    dtype: Any
    layout: Layout

    @nn.compact
    def __call__(self, token_ids: Array) -> Array:
        table = parameter(self, "weight", "VD", nn.initializers.normal(0.02))
        table = self.layout.gather(table, ("vocab", "embed"))
        return self.layout.constrain(from_bits(table[token_ids]), *STREAM)


class SelfAttention(nn.Module):
    """Grouped-query attention, with the biases and norms that the configuration asks for."""

    config: QwenConfig
    dtype: Any
    attention: Attention
    layout: Layout

    def setup(self) -> None:
        linear = partial(Linear, self.config, dtype=self.dtype)
        self.q_proj = linear("D->NH", use_bias=self.config.qkv_bias)
        self.k_proj = linear("D->KH", use_bias=self.config.qkv_bias)
        self.v_proj = linear("D->KH", use_bias=self.config.qkv_bias)
        self.o_proj = linear("NH->D", use_bias=self.config.o_bias)
        if self.config.qk_norm:
            self.q_norm = RMSNorm(self.config, self.dtype, over="H", wide=True)
            self.k_norm = RMSNorm(self.config, self.dtype, over="H", wide=True)

    def __call__(
        self, x: Array, rotary: tuple[Array, Array], segment_ids: Array, slides: Array | None
    ) -> tuple[Array, Out]:
        queries = "batch", "query_sequence", "heads", "head_dim"
        keys = "batch", "sequence", "kv_heads", "head_dim"
        constrain = self.layout.constrain
        out: Out = {}
        q = out["q"] = constrain(self.q_proj(x), *queries)
        k = out["k"] = constrain(self.k_proj(x), *keys)
        v = out["v"] = constrain(self.v_proj(x), *keys).astype(self.dtype)
        if self.config.qk_norm:
            q = out["q_normed"] = self.q_norm(q)[0]
            k = out["k_normed"] = self.k_norm(k)[0]
        q = out["rot_q"] = rotate(q, rotary)
        k = out["rot_k"] = rotate(k, rotary).astype(self.dtype)
        q = (q * self.config.head_dim**-0.5).astype(self.dtype)
        with jax.named_scope("attention"):
            attend = partial(_attend, self.layout, self.config.sliding_window, slides)
            out["pattern"] = partial(attend, attention_pattern, q, k, k, segment_ids)
            heads = out["z"] = attend(self.attention, q, k, v, segment_ids)
        out["out"] = constrain(self.o_proj(heads).astype(self.dtype), *STREAM)
        return out["out"], out


def _attend(
    layout: Layout, window: int | None, slides: Array | None, attention: Attention, *inputs: Array
) -> Array:
    """slides: whether this layer has the window; None in a model without any."""
    everything = partial(layout.attend, attention)
    if slides is None:
        return everything(*inputs)
    windowed = partial(layout.attend, partial(attention, window=window))
    return jax.lax.cond(slides, windowed, everything, *inputs)


class MLP(nn.Module):
    """SwiGLU (arXiv:2002.05202): down(silu(gate(x)) * up(x))."""

    config: QwenConfig
    dtype: Any
    layout: Layout

    def setup(self) -> None:
        self.gate_proj = Linear(self.config, "D->F", dtype=self.dtype)
        self.up_proj = Linear(self.config, "D->F", dtype=self.dtype)
        self.down_proj = Linear(self.config, "F->D", dtype=self.dtype)

    def __call__(self, x: Array) -> tuple[Array, Out]:
        gate, up = self.gate_proj(x), self.up_proj(x)
        gated = (jax.nn.silu(gate) * up).astype(self.dtype)
        gated = self.layout.constrain(gated, "batch", "sequence", "mlp")
        out = self.layout.constrain(self.down_proj(gated).astype(self.dtype), *STREAM)
        return out, {"pre": gate, "pre_linear": up, "post": gated, "out": out}


class DecoderLayer(nn.Module):
    """One block. Returns the residual stream after it, and the intermediates that hooks name."""

    config: QwenConfig
    dtype: Any
    attention: Attention
    layout: Layout

    def setup(self) -> None:
        self.input_layernorm = RMSNorm(self.config, self.dtype)
        self.self_attn = SelfAttention(self.config, self.dtype, self.attention, self.layout)
        self.post_attention_layernorm = RMSNorm(self.config, self.dtype)
        self.mlp = MLP(self.config, self.dtype, self.layout)

    def __call__(
        self, x: Array, rotary: tuple[Array, Array], segment_ids: Array, slides: Array | None
    ) -> tuple[Array, Out]:
        out: Out = {"resid_pre": x}
        y, out["ln1"] = self.input_layernorm(x)
        y, out["attn"] = self.self_attn(y, rotary, segment_ids, slides)
        x = out["resid_mid"] = x + y
        y, out["ln2"] = self.post_attention_layernorm(x)
        y, out["mlp"] = self.mlp(y)
        x = out["resid_post"] = x + y
        return x, out


def decoder(config: QwenConfig, dtype: Any, attention: Attention, layout: Layout) -> Decoder:
    """The layers, as functions of their parameters."""

    def example() -> tuple[Any, ...]:
        nothing = jnp.zeros((1, 1), jnp.int32)
        x = jnp.zeros((1, 1, config.hidden_size), dtype)
        return x, rotary_table(nothing, config), nothing

    layer = DecoderLayer(config, dtype, attention, layout, parent=None)
    modules = dict.fromkeys(config.layer_types, layer)
    return Decoder(modules, config.layer_types, example, config.sliding)


def rotary_table(positions: Array, config: QwenConfig) -> tuple[Array, Array]:
    """Cosine and sine of the rotary embedding, for `rotate`. positions: (B, T) int32."""
    return config.rope.table(positions, config.head_dim)


class Qwen2(nn.Module):
    """The whole language model: token ids to next-token logits."""

    config: QwenConfig
    dtype: Any = jnp.float32
    attention: Attention = blocked_attention
    layout: Layout = Layout()

    @property
    def whole_layers(self) -> int:
        return self.config.num_hidden_layers

    @nn.compact
    def __call__(self, token_ids: Array, segment_ids: Array, positions: Array) -> Array:
        """Inputs are (B, T) int32. Returns float32 logits (B, T, V), meaningless for padding."""
        layers = decoder(self.config, self.dtype, self.attention, self.layout)
        params = self.param("layers", layers.init, self.whole_layers)
        rotary = rotary_table(positions, self.config)

        def block(layer: Callable, x: Array, _: None) -> Array:
            return layer(x, rotary, segment_ids)[0]

        x = Embedding(self.config, self.dtype, self.layout, name="embed_tokens")(token_ids)
        x = layers.scan(layers.of(params), block, x)
        x, _ = RMSNorm(self.config, self.dtype, name="norm")(x)
        return Linear(self.config, "D->V", dtype=self.dtype, name="lm_head")(x)


def weight_table(model: nn.Module) -> dict[Path, WeightSpec]:
    """Parameter path -> shape, logical axes and checkpoint tensors, for every weight of `model`.

    Works for any module that follows this file's naming, and computes and allocates nothing. The
    stacked layers beyond `model.whole_layers`, which make the stages of a pipeline equally long,
    have no tensors in the checkpoint.
    """
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    alone = model.clone(layout=Layout(), parent=None)
    abstract = jax.eval_shape(alone.init, jax.random.key(0), tokens, tokens, tokens)
    return {
        path: WeightSpec(
            shape=boxed.value.shape,
            axes=boxed.names,
            hf_names=_hf_names(path, model),
        )
        for path, boxed in flatten_dict(abstract["params"]).items()
    }


def _hf_names(path: Path, model: nn.Module) -> tuple[str, ...]:
    whole_layers, tied = model.whole_layers, model.config.tie_word_embeddings
    if path[0] == "layers":
        types = model.config.layer_types
        mixed = len(set(types)) > 1  # then the second part of the path is the layer's type
        own = [k for k in range(whole_layers) if not mixed or types[k] == path[1]]
        return tuple(f"model.layers.{k}.{'.'.join(path[1 + mixed :])}" for k in own)
    if path[0] == "last_layer":
        return (f"model.layers.{whole_layers}.{'.'.join(path[1:])}",)
    if path[0] == "lm_head":
        return ("model.embed_tokens.weight" if tied else "lm_head.weight",)
    return (f"model.{'.'.join(path)}",)


def convert_hf_to_jax_weights(
    hf_weights: Mapping[str, np.ndarray], model: nn.Module, dtype: Any = jnp.float32
) -> dict[str, Any]:
    """Hugging Face tensors in memory -> the parameters of `model`, as NumPy arrays.

    For checkpoints on disk use `activation_extraction.model.weights`, which never loads them whole.
    Raises InputError if a tensor is missing or has the wrong shape.
    """

    def read(name: str, index: tuple[slice, ...]) -> np.ndarray:
        return np.asarray(hf_weights[name])[index]

    table = weight_table(model)
    for spec in table.values():
        spec.check({name: np.shape(tensor) for name, tensor in hf_weights.items()}, "hf_weights")
    return unflatten_dict({path: spec.assemble(read, dtype) for path, spec in table.items()})
