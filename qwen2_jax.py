"""The model in Flax: the modules of all families, and the checkpoint tensors of each weight.

The modules come in the order in which a token passes them: its embedding, then in every layer
attention and an MLP or experts, then the whole model, `Qwen2`. A ModelConfig says in what the
families differ; family.py has the table of families. At the end, `weight_table` derives from the
modules which checkpoint tensors make each parameter. weights.py reads the tensors, mesh.py shards
them, and qwen2_jax_with_hooks.py captures activations.

The parameter tree mirrors the names and the orientation of the Hugging Face checkpoint. Its tensor
`model.layers.7.self_attn.q_proj.weight` becomes row 7 of `layers/self_attn/q_proj/weight`, because
layers are stacked for `scan`, and the flat head axis is split in two. Every module declares the
shape and logical axes of a weight once.

Letters: B rows, T tokens per row, D hidden, N query heads, K key/value heads, H head size, F MLP
width, V vocabulary, L layers. Of layers with experts: E experts, X experts of a token, M width of
an expert, P width of the shared one, R the router's outputs (E, but never split), U one.

References: `transformers.models.qwen2.modeling_qwen2`, and the same of qwen3, qwen2_moe, qwen3_moe,
qwen3_next, qwen3_5, qwen3_5_moe and llama, and the reports (arXiv:2407.10671, arXiv:2505.09388).
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint

from activation_extraction.model.attention import Attention, attention_pattern
from activation_extraction.model.decoder import Decoder
from activation_extraction.model.delta_net import GatedDeltaNet
from activation_extraction.model.experts import Experts, ExpertSum, route, scattered
from activation_extraction.model.kernels import Kernels
from activation_extraction.model.layers import STREAM, Linear, Out, RMSNorm, rotary_table, rotate
from activation_extraction.model.mesh import Layout
from activation_extraction.model.model_config import (
    DENSE,
    HEAD,
    LINEAR,
    SPARSE,
    DeltaNet,
    ModelConfig,
)
from activation_extraction.model.numerics import from_bits, rounded
from activation_extraction.model.parameters import ParamPath, declared, parameter
from activation_extraction.model.weights import TensorSlice, WeightSpec, WeightTable


class Embedding(nn.Module):
    """The embedding of tokens.

    `HookedModel` also uses this class for its head: the same module if config.json ties the head to
    the embedding, otherwise a second one. It computes logits from the whole matrix, which `table`
    returns.
    """

    config: ModelConfig
    dtype: Any
    layout: Layout

    def setup(self) -> None:
        self.weight = parameter(self, "weight", "VD")

    def __call__(self, token_ids: Array) -> Array:
        """Returns the vectors of tokens.

        Each device along fsdp looks up its columns for all tokens, so that the devices exchange
        vectors and not the table.

        Args:
            token_ids: (B, T) int32.

        Returns:
            (B, T, D).
        """
        constrain = self.layout.constrain
        token_ids = constrain(token_ids, "fsdp_batch", "sequence")
        columns = constrain(self.weight[token_ids], "fsdp_batch", "sequence", "embed")
        return constrain(from_bits(columns), *STREAM)

    def table(self) -> Array:
        """Returns the vectors of all tokens, (V, D), as bits."""
        return self.layout.gather(self.weight, ("vocab", "embed"))


class SelfAttention(nn.Module):
    """Grouped-query attention, with the biases, norms and gates that the configuration names.

    In a model with gates, q_proj returns for each head its query and then its gate.
    """

    config: ModelConfig
    dtype: Any
    attention: Attention
    layout: Layout

    def setup(self) -> None:
        linear = partial(Linear, self.config, dtype=self.dtype)
        self.q_proj = linear("D->QH", use_bias=self.config.qkv_bias)
        self.k_proj = linear("D->KH", use_bias=self.config.qkv_bias)
        self.v_proj = linear("D->KH", use_bias=self.config.qkv_bias)
        split = self.layout.adds_up_parts
        self.o_proj = linear("NH->D", use_bias=self.config.o_bias, split=split)
        if self.config.qk_norm:
            self.q_norm = RMSNorm(self.config, self.dtype, over="H")
            self.k_norm = RMSNorm(self.config, self.dtype, over="H")

    def __call__(
        self, x: Array, rotary: tuple[Array, Array], segment_ids: Array, slides: Array | None
    ) -> tuple[Array, Out]:
        queries = "batch", "query_sequence", "heads", "head_dim"
        keys = "batch", "sequence", "kv_heads", "head_dim"
        constrain = self.layout.constrain
        out: Out = {}
        q = out["q"] = constrain(rounded(self.q_proj(x), self.dtype), *queries)
        if self.config.q_gate:
            q = q.reshape(*q.shape[:2], -1, 2, q.shape[-1])
            q, out["q_gate"] = constrain(q[..., 0, :], *queries), constrain(q[..., 1, :], *queries)
        k = out["k"] = constrain(rounded(self.k_proj(x), self.dtype), *keys)
        v = out["v"] = constrain(self.v_proj(x), *keys).astype(self.dtype)
        if self.config.qk_norm:
            q = out["q_normed"] = self.q_norm(q)[0]
            k = out["k_normed"] = self.k_norm(k)[0]
        q = out["rot_q"] = rotate(q, rotary, self.config)
        k = out["rot_k"] = rotate(k, rotary, self.config).astype(self.dtype)
        q = (q * self.config.head_dim**-0.5).astype(self.dtype)
        with jax.named_scope("attention"):
            out["pattern"] = partial(self._attend, attention_pattern, slides, q, k, k, segment_ids)
            heads = self._attend(self.attention, slides, q, k, v, segment_ids)
        if self.config.q_gate:
            gate = jax.nn.sigmoid(out["q_gate"].astype(jnp.float32))
            heads = (heads.astype(jnp.float32) * gate).astype(self.dtype)
        out["z"] = heads
        out["out"] = constrain(self.o_proj(heads).astype(self.dtype), *STREAM)
        return out["out"], out

    def _attend(self, attention: Attention, slides: Array | None, *inputs: Array) -> Array:
        """Computes attention with or without the window.

        Args:
            attention: The function that computes attention.
            slides: Whether this layer has a window, bool (); None if no layer of the model has one.
            inputs: Queries, keys, values and segment ids.
        """
        full = partial(self.layout.attend, attention)
        if slides is None:
            return full(*inputs)
        window = partial(attention, window=self.config.sliding_window)
        return jax.lax.cond(slides, partial(self.layout.attend, window), full, *inputs)


class MLP(nn.Module):
    """The MLP of a dense layer, or a shared expert: down(silu(gate(x)) * up(x)).

    It is called SwiGLU (arXiv:2002.05202).

    Attributes:
        width: The letter of its width.
    """

    config: ModelConfig
    dtype: Any
    layout: Layout
    width: str = "F"

    def setup(self) -> None:
        self.gate_proj = Linear(self.config, f"D->{self.width}", dtype=self.dtype)
        self.up_proj = Linear(self.config, f"D->{self.width}", dtype=self.dtype)
        split = self.layout.adds_up_parts
        self.down_proj = Linear(self.config, f"{self.width}->D", dtype=self.dtype, split=split)

    def __call__(self, x: Array, _segment_ids: Array | None = None) -> tuple[Array, Out]:
        gate, up = rounded(self.gate_proj(x), self.dtype), self.up_proj(x)
        gated = (jax.nn.silu(gate.astype(jnp.float32)) * up).astype(self.dtype)
        gated = self.layout.constrain(gated, "batch", "sequence", "mlp")
        out = self.layout.constrain(self.down_proj(gated).astype(self.dtype), *STREAM)
        return out, {"pre": gate, "pre_linear": up, "post": gated, "out": out}


class SparseMLP(nn.Module):
    """A mixture of experts.

    Each token passes through a few routed experts, which the router chooses among many, and through
    the shared expert if there is one. The result is the weighted sum of their results.
    """

    config: Any
    dtype: Any
    expert_sum: ExpertSum
    layout: Layout

    def setup(self) -> None:
        self.gate = Linear(self.config, "D->R", dtype=self.dtype)
        self.experts = Experts(self.config, self.dtype, self.expert_sum, self.layout)
        if self.config.experts.shared_width:
            self.shared_expert = MLP(self.config, self.dtype, self.layout, "P")
            self.shared_expert_gate = Linear(self.config, "D->U", dtype=self.dtype)

    def __call__(self, x: Array, segment_ids: Array) -> tuple[Array, Out]:
        experts = self.config.experts
        logits = self.gate(x).astype(self.dtype)
        weights, chosen = route(logits, experts.per_token, experts.renormalise)
        out: Out = {"logits": logits, "chosen": chosen}
        out["weights"] = partial(scattered, weights, chosen, experts.count)
        # Padding needs no expert.
        needed = jnp.where(segment_ids[..., None] > 0, chosen, experts.count)
        if experts.shared_width:
            shared, out["shared"] = self.shared_expert(x)
            # Tokens travel to experts meanwhile, and their weights after them.
            shared, weights = lax.optimization_barrier((shared, weights))
        y = self.layout.constrain(self.experts(x, weights, needed), *STREAM)
        out["routed"] = y
        if experts.shared_width:
            share = out["shared_share"] = self.shared_expert_gate(x)
            y = y + jax.nn.sigmoid(share) * shared.astype(jnp.float32)
        out["out"] = y.astype(self.dtype)
        return out["out"], out


class DecoderLayer(nn.Module):
    """A layer: attention or a gated delta net, then an MLP or experts.

    It returns the residual stream after it, and the intermediates that hooks name.

    Attributes:
        type_: The type of the layer, one of ModelConfig.layer_types.
    """

    config: ModelConfig
    dtype: Any
    kernels: Kernels
    layout: Layout
    type_: str = DENSE

    def setup(self) -> None:
        config = self.config
        dtype = self.dtype
        words = self.type_.split()
        self.input_layernorm = RMSNorm(config, dtype)
        if LINEAR in words:
            self.linear_attn = GatedDeltaNet(config, dtype, self.kernels.delta_rule, self.layout)
        else:
            self.self_attn = SelfAttention(config, dtype, self.kernels.attention, self.layout)
        self.post_attention_layernorm = RMSNorm(config, dtype)
        mlp = partial(SparseMLP, expert_sum=self.kernels.experts) if SPARSE in words else MLP
        self.mlp = mlp(config, dtype, layout=self.layout)

    def __call__(
        self, x: Array, rotary: tuple[Array, Array], segment_ids: Array, slides: Array | None
    ) -> tuple[Array, Out]:
        out: Out = {"resid_pre": x}
        y, out["ln1"] = self.input_layernorm(x)
        if LINEAR in self.type_.split():
            y, out["linear_attn"] = self.linear_attn(y, segment_ids)
        else:
            y, out["attn"] = self.self_attn(y, rotary, segment_ids, slides)
        x = x + y
        if SPARSE in self.type_.split():
            # Experts fetch and send whole tokens; for products, TPUs would choose another layout.
            x = with_layout_constraint(x, MemoryLayout((0, 1, 2)))
        out["resid_mid"] = x
        y, out["ln2"] = self.post_attention_layernorm(x)
        y, out["mlp"] = self.mlp(y, segment_ids)
        x = out["resid_post"] = x + y
        return x, out


def decoder(config: ModelConfig, dtype: Any, kernels: Kernels, layout: Layout) -> Decoder:
    """Returns the layers of a model as functions of their parameters."""
    layer = partial(DecoderLayer, config, dtype, kernels, layout, parent=None)
    return Decoder(config, {type_: layer(type_=type_) for type_ in config.layer_types})


class Qwen2(nn.Module):
    """The whole language model of any family, which maps token ids to next-token logits."""

    config: ModelConfig
    dtype: Any = jnp.float32
    kernels: Kernels = Kernels()
    layout: Layout = Layout()

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @nn.compact
    def __call__(self, token_ids: Array, segment_ids: Array, positions: Array) -> Array:
        """Returns the logits of the next tokens.

        Args:
            token_ids: (B, T) int32.
            segment_ids: The number of the sample that a token belongs to in its row, (B, T) int32;
                0 for padding.
            positions: The position of a token in its sample, (B, T) int32.

        Returns:
            (B, T, V) float32; those of padding are meaningless.
        """
        layers = decoder(self.config, self.dtype, self.kernels, self.layout)
        params = self.param("layers", layers.init, self.num_layers)
        rotary = rotary_table(positions, self.config)

        def block(layer: Callable, x: Array, _: None) -> Array:
            return layer(x, rotary, segment_ids)[0]

        x = Embedding(self.config, self.dtype, self.layout, name="embed_tokens")(token_ids)
        if not self.is_initializing():
            x = layers.scan(layers.stacked(params), block, x)
        x, _ = RMSNorm(self.config, self.dtype, name="norm")(x)
        return Linear(self.config, "D->V", dtype=self.dtype, name="lm_head")(x)


def weight_table(model: nn.Module, tensors: Collection[str] = ()) -> WeightTable:
    """Returns the shape, logical axes and checkpoint tensors of each parameter, by its path.

    It computes and allocates nothing. Stacked layers beyond `model.num_layers`, which make the
    stages of a pipeline equally long, have no tensors.

    Args:
        model: A module that follows the naming of this file.
        tensors: The names of the tensors in the checkpoint. They tell whether experts and the
            projections of a delta net are fused. Empty if there is no checkpoint.
    """
    fused = any(name.endswith("experts.gate_up_proj") for name in tensors)
    renamed = _renamed(model.config, fused) | _interleaved(model.config.delta, tensors)
    # The weights are the same on devices that are not here, whose kernels cannot run.
    plain = model.clone(kernels=Kernels(), layout=Layout(), parent=None)
    return {path: _weight(path, box, model, renamed) for path, box in declared(plain).items()}


def tensor_names(config: ModelConfig, tensors: Collection[str]) -> set[str]:
    """Returns the names that tensors of the language model may have in a checkpoint.

    A checkpoint may hold a tensor for each expert besides the fused ones, and a head even where
    config.json ties it to the embedding.

    Args:
        config: The configuration of the model.
        tensors: The names in the checkpoint, as for `weight_table`.
    """
    names = {HEAD}
    for layout in ((), tensors):
        for spec in weight_table(Qwen2(config), layout).values():
            names.update(spec.hf_names)
    return names


def _weight(path: ParamPath, box: Any, model: nn.Module, renamed: Mapping[str, Any]) -> WeightSpec:
    config = model.config
    shape = box.value.shape
    axes = box.names
    if path[0] != "layers":
        if path[0] == "lm_head":
            tied = "model.embed_tokens.weight"
            return WeightSpec(shape, axes, (tied if config.tie_word_embeddings else HEAD,))
        return WeightSpec(shape, axes, (f"model.{path[0]}.weight",))
    types, mixed = config.layer_types, len(set(config.layer_types)) > 1
    inside = path[2:] if mixed else path[1:]
    layers = [k for k in range(model.num_layers) if not mixed or types[k] == path[1]]
    tensor, tensor_slice = renamed.get(".".join(inside), (".".join(inside), None))
    names = [f"model.layers.{k}.{tensor}" for k in layers]
    per_expert = "{}" in tensor
    if per_expert:
        names = [name.format(e) for name in names for e in range(config.experts.count)]
    return WeightSpec(shape, axes, tuple(names), 1 + per_expert, tensor_slice)


def _renamed(config: ModelConfig, fused: bool) -> dict[str, tuple[str, TensorSlice | None]]:
    """Returns the parameters of a layer whose checkpoint tensors have other names.

    Args:
        config: The configuration of the model.
        fused: Whether one tensor holds all experts of a layer.

    Returns:
        Name of the parameter -> (name of the tensor, the slice of it). In a tensor for each expert,
        "{}" stands for the number of the expert. The slice is None for a whole tensor.
    """
    renamed: dict[str, tuple[str, TensorSlice | None]] = {}
    if config.delta is not None:
        keys, values = config.delta.key_heads * config.delta.key_size, config.sizes["O"]
        for letter, start in (("q", 0), ("k", keys), ("v", 2 * keys)):
            tensor_slice = TensorSlice(0, start, 2 * keys + values)
            for parameter_name, tensor in (("in_proj", "in_proj_qkv"), ("conv1d", "conv1d")):
                name = f"linear_attn.{parameter_name}_{letter}.weight"
                renamed[name] = f"linear_attn.{tensor}.weight", tensor_slice
    if config.experts is not None:
        width = config.experts.width
        for projection, in_fused in (
            ("gate_proj", ("mlp.experts.gate_up_proj", TensorSlice(1, 0, 2 * width))),
            ("up_proj", ("mlp.experts.gate_up_proj", TensorSlice(1, width, 2 * width))),
            ("down_proj", ("mlp.experts.down_proj", None)),
        ):
            per_expert = f"mlp.experts.{{}}.{projection}.weight", None
            renamed[f"mlp.experts.{projection}.weight"] = in_fused if fused else per_expert
    return renamed


def _interleaved(
    delta: DeltaNet | None, tensors: Collection[str]
) -> dict[str, tuple[str, TensorSlice]]:
    """Returns the renamed projections of a delta net that are stored key head by key head.

    Such a tensor has all rows of one key head, then those of the next. In `in_proj_qkvz`, the rows
    of a key head are those of its query, its key, and the values and gates of its value heads.

    Returns:
        Name of the parameter -> (name of the tensor, the slice of it), as from `_renamed`.
    """
    renamed: dict[str, tuple[str, TensorSlice]] = {}
    if delta is None or not delta.interleaved:
        return renamed
    heads = delta.values_per_key
    key = delta.key_size
    value = delta.value_size
    for shared, sizes in (
        ("in_proj_qkvz", {"q": key, "k": key, "v": heads * value, "z": heads * value}),
        ("in_proj_ba", {"b": heads, "a": heads}),
    ):
        tensor = f"linear_attn.{shared}.weight"
        start = 0
        total = sum(sizes.values())
        # Some who quantise such a model store it as Qwen3.5 is stored.
        if not tensors or any(name.endswith(tensor) for name in tensors):
            for letter, size in sizes.items():
                part = TensorSlice(0, start, total, per_head=True)
                renamed[f"linear_attn.in_proj_{letter}.weight"] = tensor, part
                start += size
    return renamed
