"""Declares the language model in Flax, and the checkpoint tensors of its parameters.

The modules come in the order in which a token passes them: its embedding, then in every layer
attention and an MLP or experts, then the whole model, `Qwen2`. `Qwen2` serves all families: a
ModelConfig contains the differences between them, and family.py lists the families. At the end,
`weight_table` derives from the modules the checkpoint tensors that each parameter is made of.
weights.py reads the tensors, mesh.py shards parameters, and qwen2_jax_with_hooks.py captures
activations.

The parameter tree has the names of the Hugging Face checkpoint, and the same order of axes. For
example, the tensor `model.layers.7.self_attn.q_proj.weight` becomes row 7 of the parameter
`layers/self_attn/q_proj/weight`, because layers are stacked for `scan`. The axis of all heads
becomes two axes, heads and head size.

In this module, `cos_and_sin` is the result of `rotary_table`, and a segment is a sample in a row.

Letters: B rows, T tokens per row, D hidden, N query heads, K key/value heads, H head size, F MLP
width, V vocabulary, L layers, Q the heads of the query projection, which are 2 * N if heads have
gates. In layers with experts: E experts, X experts of a token, M width of an expert, P width of the
shared expert, R outputs of the router (as many as E, but never split over devices), U the single
output of the shared expert's gate (size 1).

References: `transformers.models.qwen2.modeling_qwen2`, the corresponding modules for qwen3,
qwen2_moe, qwen3_moe, qwen3_next, qwen3_5, qwen3_5_moe and llama, and the technical reports of Qwen2
(arXiv:2407.10671) and Qwen3 (arXiv:2505.09388).
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

from activation_extraction.model.attention import AttentionFunction, attention_pattern
from activation_extraction.model.decoder import Decoder
from activation_extraction.model.delta_net import GatedDeltaNet
from activation_extraction.model.experts import Experts, ExpertSumFunction, route, scattered
from activation_extraction.model.kernels import Kernels
from activation_extraction.model.layers import (
    STREAM,
    Intermediates,
    Linear,
    RMSNorm,
    rotary_table,
    rotate,
)
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
    """The embedding of tokens, a table with a vector for each token of the vocabulary.

    `HookedModel` also uses this class for its head, whose matrix has the same shape. If config.json
    ties the head to the embedding, head and embedding are a single module, otherwise two modules.

    Attributes:
        config: The configuration of the model.
        dtype: The dtype of the vectors.
        layout: The mesh of devices, and the rules for splitting arrays along its axes.
    """

    config: ModelConfig
    dtype: Any
    layout: Layout

    def setup(self) -> None:
        self.weight = parameter(self, "weight", "VD")

    def __call__(self, token_ids: Array) -> Array:
        """Looks up the vectors of tokens.

        Each device along the mesh axis fsdp stores some columns of the table, and looks up these
        columns for all tokens. So the devices exchange vectors, which are smaller than the table.

        Args:
            token_ids: The token ids, (B, T) int32.

        Returns:
            The vectors, (B, T, D).
        """
        constrain = self.layout.constrain
        token_ids = constrain(token_ids, "fsdp_batch", "sequence")
        # On CPUs, a bfloat16 table is stored as uint16. `from_bits` views its vectors as bfloat16.
        embedding_vectors = constrain(self.weight[token_ids], "fsdp_batch", "sequence", "embed")
        return constrain(from_bits(embedding_vectors), *STREAM)

    def table(self) -> Array:
        """Returns the embedding vectors of all tokens of the vocabulary.

        Letters: V vocabulary, D width of the residual stream.

        Returns:
            The vectors, (V, D). On CPUs, bfloat16 vectors are uint16 arrays of the same bits.
        """
        return self.layout.gather(self.weight, ("vocab", "embed"))


class SelfAttention(nn.Module):
    """Grouped-query attention, with the biases, norms and gates that the configuration names.

    In a model with gates, the query projection returns a query and a gate for each head.

    Attributes:
        config: The configuration of the model.
        dtype: The dtype of weights and of the operands of matrix products.
        attention: The function that computes attention from queries, keys and values.
        layout: The mesh of devices, and the rules for splitting arrays along its axes.
    """

    config: ModelConfig
    dtype: Any
    attention: AttentionFunction
    layout: Layout

    def setup(self) -> None:
        make_linear = partial(Linear, self.config, dtype=self.dtype)
        self.q_proj = make_linear("D->QH", use_bias=self.config.qkv_bias)
        self.k_proj = make_linear("D->KH", use_bias=self.config.qkv_bias)
        self.v_proj = make_linear("D->KH", use_bias=self.config.qkv_bias)
        has_split_inputs = self.layout.adds_up_parts
        self.o_proj = make_linear(
            "NH->D", use_bias=self.config.o_bias, has_split_inputs=has_split_inputs
        )
        if self.config.qk_norm:
            self.q_norm = RMSNorm(self.config, self.dtype, axis_letter="H")
            self.k_norm = RMSNorm(self.config, self.dtype, axis_letter="H")

    def __call__(
        self,
        x: Array,
        cos_and_sin: tuple[Array, Array],
        segment_ids: Array,
        has_window: Array | None,
    ) -> tuple[Array, Intermediates]:
        """Computes attention, and returns its output with the intermediates.

        Args:
            x: The normed residual stream, (B, T, D).
            cos_and_sin: The cosines and the sines of the rotary embedding, which `rotate` applies,
                each (B, T, 1, H) float32.
            segment_ids: The segment of each token, (B, T) int32; 0 for padding.
            has_window: Whether the layer attends only to a sliding window, () bool; None in a model
                without sliding windows.

        Returns:
            A tuple of:
                The output, (B, T, D), which is added to the residual stream.
                The intermediates: name -> array, or a function that computes it (see
                `Intermediates`).
        """
        query_axes = "batch", "query_sequence", "heads", "head_dim"
        key_axes = "batch", "sequence", "kv_heads", "head_dim"
        constrain = self.layout.constrain
        intermediates: Intermediates = {}
        q = intermediates["q"] = constrain(rounded(self.q_proj(x), self.dtype), *query_axes)
        if self.config.q_gate:
            queries_and_gates = q.reshape(*q.shape[:2], -1, 2, q.shape[-1])
            q = constrain(queries_and_gates[..., 0, :], *query_axes)
            intermediates["q_gate"] = constrain(queries_and_gates[..., 1, :], *query_axes)
        k = intermediates["k"] = constrain(rounded(self.k_proj(x), self.dtype), *key_axes)
        v = intermediates["v"] = constrain(self.v_proj(x), *key_axes).astype(self.dtype)
        if self.config.qk_norm:
            q = intermediates["q_normed"] = self.q_norm(q)[0]
            k = intermediates["k_normed"] = self.k_norm(k)[0]
        q = intermediates["rot_q"] = rotate(q, cos_and_sin, self.config)
        k = intermediates["rot_k"] = rotate(k, cos_and_sin, self.config).astype(self.dtype)
        q = (q * self.config.head_dim**-0.5).astype(self.dtype)
        with jax.named_scope("attention"):
            intermediates["pattern"] = partial(
                self._attend, attention_pattern, has_window, q, k, k, segment_ids
            )
            head_outputs = self._attend(self.attention, has_window, q, k, v, segment_ids)
        if self.config.q_gate:
            head_gates = jax.nn.sigmoid(intermediates["q_gate"].astype(jnp.float32))
            head_outputs = (head_outputs.astype(jnp.float32) * head_gates).astype(self.dtype)
        intermediates["z"] = head_outputs
        intermediates["out"] = constrain(self.o_proj(head_outputs).astype(self.dtype), *STREAM)
        return intermediates["out"], intermediates

    def _attend(
        self, attention: AttentionFunction, has_window: Array | None, *inputs: Array
    ) -> Array:
        """Computes attention, with the model's window if this layer has a window.

        Args:
            attention: The function that computes attention.
            has_window: Whether the layer attends only to a sliding window, () bool; None in a model
                without sliding windows.
            *inputs: The queries, keys, values and segment ids.

        Returns:
            The result of `attention`.
        """
        attend_fully = partial(self.layout.attend, attention)
        if has_window is None:
            return attend_fully(*inputs)
        windowed_attention = partial(attention, window=self.config.sliding_window)
        attend_to_window = partial(self.layout.attend, windowed_attention)
        return jax.lax.cond(has_window, attend_to_window, attend_fully, *inputs)


class MLP(nn.Module):
    """The MLP of a dense layer, or the shared expert of a layer with experts.

    This MLP is called SwiGLU (arXiv:2002.05202). It computes down(silu(gate(x)) * up(x)).

    Attributes:
        config: The configuration of the model.
        dtype: The dtype of weights and of the operands of matrix products.
        layout: The mesh of devices, and the rules for splitting arrays along its axes.
        axis_letter_of_width: The letter of the axis with the width of the MLP: F in a dense layer,
            P for a shared expert.
    """

    config: ModelConfig
    dtype: Any
    layout: Layout
    axis_letter_of_width: str = "F"

    def setup(self) -> None:
        self.gate_proj = Linear(self.config, f"D->{self.axis_letter_of_width}", dtype=self.dtype)
        self.up_proj = Linear(self.config, f"D->{self.axis_letter_of_width}", dtype=self.dtype)
        has_split_inputs = self.layout.adds_up_parts
        self.down_proj = Linear(
            self.config,
            f"{self.axis_letter_of_width}->D",
            dtype=self.dtype,
            has_split_inputs=has_split_inputs,
        )

    def __call__(self, x: Array, _segment_ids: Array | None = None) -> tuple[Array, Intermediates]:
        """Computes the MLP, and returns its output with the intermediates.

        Args:
            x: The normed residual stream, (B, T, D).
            _segment_ids: The segment of each token, which is not used. `SparseMLP`, which can take
                the place of this module, needs it.

        Returns:
            A tuple of:
                The output, (B, T, D), which is added to the residual stream.
                The intermediates: name -> array, or a function that computes it (see
                `Intermediates`).
        """
        gate_values = rounded(self.gate_proj(x), self.dtype)
        up_values = self.up_proj(x)
        gated_values = (jax.nn.silu(gate_values.astype(jnp.float32)) * up_values).astype(self.dtype)
        gated_values = self.layout.constrain(gated_values, "batch", "sequence", "mlp")
        mlp_output = self.layout.constrain(self.down_proj(gated_values).astype(self.dtype), *STREAM)
        return mlp_output, {
            "pre": gate_values,
            "pre_linear": up_values,
            "post": gated_values,
            "out": mlp_output,
        }


class SparseMLP(nn.Module):
    """A mixture of experts.

    Each token passes through a few routed experts, which the router chooses among many, and through
    the shared expert if there is one. The output is the weighted sum of the experts' results.

    Attributes:
        config: The configuration of the model.
        dtype: The dtype of weights and of the operands of matrix products.
        compute_expert_sum: The function that computes the weighted sums of the routed experts.
        layout: The mesh of devices, and the rules for splitting arrays along its axes.
    """

    config: Any
    dtype: Any
    compute_expert_sum: ExpertSumFunction
    layout: Layout

    def setup(self) -> None:
        self.gate = Linear(self.config, "D->R", dtype=self.dtype)
        self.experts = Experts(self.config, self.dtype, self.compute_expert_sum, self.layout)
        if self.config.experts.shared_width:
            self.shared_expert = MLP(self.config, self.dtype, self.layout, "P")
            self.shared_expert_gate = Linear(self.config, "D->U", dtype=self.dtype)

    def __call__(self, x: Array, segment_ids: Array) -> tuple[Array, Intermediates]:
        """Computes the mixture of experts, and returns its output with the intermediates.

        Args:
            x: The normed residual stream, (B, T, D).
            segment_ids: The segment of each token, (B, T) int32; 0 for padding.

        Returns:
            A tuple of:
                The output, (B, T, D), which is added to the residual stream.
                The intermediates: name -> array, or a function that computes it (see
                `Intermediates`).
        """
        experts_config = self.config.experts
        router_logits = self.gate(x).astype(self.dtype)
        routing_weights, chosen_experts = route(
            router_logits, experts_config.per_token, experts_config.renormalise
        )
        intermediates: Intermediates = {"logits": router_logits, "chosen": chosen_experts}
        intermediates["weights"] = partial(
            scattered, routing_weights, chosen_experts, experts_config.count
        )
        # Padding gets the number after the last expert. No expert has this number, so that padding
        # costs nothing.
        expert_numbers_with_masked_padding = jnp.where(
            segment_ids[..., None] > 0, chosen_experts, experts_config.count
        )
        if experts_config.shared_width:
            shared_expert_output, intermediates["shared"] = self.shared_expert(x)
            # The shared expert is computed while tokens are sent to the experts of other devices.
            # The experts need the routing weights, which the barrier passes on only after the
            # shared expert is computed. Sending the tokens does not wait for the barrier. Without
            # it, the compiler could compute the shared expert after the tokens have been sent.
            shared_expert_output, routing_weights = lax.optimization_barrier(
                (shared_expert_output, routing_weights)
            )
        y = self.layout.constrain(
            self.experts(x, routing_weights, expert_numbers_with_masked_padding), *STREAM
        )
        intermediates["routed"] = y
        if experts_config.shared_width:
            shared_gate_logit = intermediates["shared_share"] = self.shared_expert_gate(x)
            y = y + jax.nn.sigmoid(shared_gate_logit) * shared_expert_output.astype(jnp.float32)
        intermediates["out"] = y.astype(self.dtype)
        return intermediates["out"], intermediates


class DecoderLayer(nn.Module):
    """A layer: attention or a gated delta net, then an MLP or experts.

    Attributes:
        config: The configuration of the model.
        dtype: The dtype of weights and of the operands of matrix products.
        kernels: The functions that compute attention, experts and delta nets.
        layout: The mesh of devices, and the rules for splitting arrays along its axes.
        layer_type: The type of the layer, one of ModelConfig.layer_types.
    """

    config: ModelConfig
    dtype: Any
    kernels: Kernels
    layout: Layout
    layer_type: str = DENSE

    def setup(self) -> None:
        config = self.config
        dtype = self.dtype
        layer_type_words = self.layer_type.split()
        self.input_layernorm = RMSNorm(config, dtype)
        if LINEAR in layer_type_words:
            self.linear_attn = GatedDeltaNet(config, dtype, self.kernels.delta_rule, self.layout)
        else:
            self.self_attn = SelfAttention(config, dtype, self.kernels.attention, self.layout)
        self.post_attention_layernorm = RMSNorm(config, dtype)
        if SPARSE in layer_type_words:
            self.mlp: Any = SparseMLP(config, dtype, self.kernels.experts, self.layout)
        else:
            self.mlp = MLP(config, dtype, self.layout)

    def __call__(
        self,
        x: Array,
        cos_and_sin: tuple[Array, Array],
        segment_ids: Array,
        has_window: Array | None,
    ) -> tuple[Array, Intermediates]:
        """Computes the layer, and returns the residual stream after it with the intermediates.

        Args:
            x: The residual stream before the layer, (B, T, D).
            cos_and_sin: The cosines and the sines of the rotary embedding, which `rotate` applies,
                each (B, T, 1, H) float32.
            segment_ids: The segment of each token, (B, T) int32; 0 for padding.
            has_window: Whether the layer attends only to a sliding window, () bool; None in a model
                without sliding windows.

        Returns:
            A tuple of:
                The residual stream after the layer, (B, T, D).
                The intermediates: name -> array, or a nested dict with the intermediates of a
                module of the layer (see `Intermediates`).
        """
        intermediates: Intermediates = {"resid_pre": x}
        y, intermediates["ln1"] = self.input_layernorm(x)
        if LINEAR in self.layer_type.split():
            y, intermediates["linear_attn"] = self.linear_attn(y, segment_ids)
        else:
            y, intermediates["attn"] = self.self_attn(y, cos_and_sin, segment_ids, has_window)
        x = x + y
        if SPARSE in self.layer_type.split():
            # Experts fetch and send whole tokens, so the values of a token should be contiguous.
            # For matrix products alone, TPUs would choose another order of the axes in memory.
            x = with_layout_constraint(x, MemoryLayout((0, 1, 2)))
        intermediates["resid_mid"] = x
        y, intermediates["ln2"] = self.post_attention_layernorm(x)
        y, intermediates["mlp"] = self.mlp(y, segment_ids)
        x = intermediates["resid_post"] = x + y
        return x, intermediates


def decoder(config: ModelConfig, dtype: Any, kernels: Kernels, layout: Layout) -> Decoder:
    """Creates the decoder of a model, which runs its layers as functions of their parameters.

    Args:
        config: The configuration of the model.
        dtype: The dtype of weights and of the operands of matrix products.
        kernels: The functions that compute attention, experts and delta nets.
        layout: The mesh of devices, and the rules for splitting arrays along its axes.

    Returns:
        A `Decoder`, to whose methods the caller passes the parameters of the layers.
    """
    make_layer = partial(DecoderLayer, config, dtype, kernels, layout, parent=None)
    module_by_layer_type = {
        layer_type: make_layer(layer_type=layer_type) for layer_type in config.layer_types
    }
    return Decoder(config, module_by_layer_type)


class Qwen2(nn.Module):
    """The complete language model, which maps token ids to the logits of the next tokens.

    The class is named after the family Qwen2, but it serves all supported families. `config`
    contains the differences between them.

    Attributes:
        config: The configuration of the model.
        dtype: The dtype of weights and of the operands of matrix products.
        kernels: The functions that compute attention, experts and delta nets.
        layout: The mesh of devices, and the rules for splitting arrays along its axes.
    """

    config: ModelConfig
    dtype: Any = jnp.float32
    kernels: Kernels = Kernels()
    layout: Layout = Layout()

    @property
    def num_layers(self) -> int:
        """The number of layers of the model."""
        return self.config.num_hidden_layers

    @nn.compact
    def __call__(self, token_ids: Array, segment_ids: Array, positions: Array) -> Array:
        """Computes the logits of the token that follows each token.

        Args:
            token_ids: The token ids, (B, T) int32.
            segment_ids: For each token, the number of its sample among the samples of the same
                row, counted from 1; 0 for padding. The shape is (B, T), the dtype int32.
            positions: The position of each token in its sample, (B, T) int32.

        Returns:
            The logits, (B, T, V) float32. The logits of padding are meaningless.
        """
        model_decoder = decoder(self.config, self.dtype, self.kernels, self.layout)
        layer_params = self.param("layers", model_decoder.init, self.num_layers)
        cos_and_sin = rotary_table(positions, self.config)

        def block(layer: Callable, x: Array, _: None) -> Array:
            return layer(x, cos_and_sin, segment_ids)[0]

        x = Embedding(self.config, self.dtype, self.layout, name="embed_tokens")(token_ids)
        if not self.is_initializing():
            x = model_decoder.scan(model_decoder.stacked(layer_params), block, x)
        x, _ = RMSNorm(self.config, self.dtype, name="norm")(x)
        return Linear(self.config, "D->V", dtype=self.dtype, name="lm_head")(x)


def weight_table(model: nn.Module, checkpoint_tensor_names: Collection[str] = ()) -> WeightTable:
    """Returns the shape, logical axes and checkpoint tensors of each parameter of a model.

    This function allocates no parameters. In a pipeline, layers of zeros may fill the last stages.
    A stack of layers contains these layers after the first `model.num_layers` layers. No tensor of
    the checkpoint belongs to them.

    Args:
        model: A `Qwen2` or a `HookedModel`.
        checkpoint_tensor_names: The names of the tensors in the checkpoint. They tell whether a
            tensor contains all experts of a layer or a single expert, and which projections of a
            delta net share a tensor. Empty if there is no checkpoint.

    Returns:
        A dict: path of a parameter -> its shape, logical axes and checkpoint tensors.
    """
    has_fused_experts = any(
        tensor_name.endswith("experts.gate_up_proj") for tensor_name in checkpoint_tensor_names
    )
    tensor_name_and_slice_by_parameter_name = _tensors_by_parameter(
        model.config, has_fused_experts
    ) | _interleaved_tensors(model.config.delta, checkpoint_tensor_names)
    # The shapes of parameters do not depend on kernels or on the mesh. The default kernels run on
    # this machine, even if the kernels of `model` only run on another platform.
    local_model = model.clone(kernels=Kernels(), layout=Layout(), parent=None)
    parameter_box_by_path = declared(local_model)
    return {
        parameter_path: _weight_spec(
            parameter_path, parameter_box, model, tensor_name_and_slice_by_parameter_name
        )
        for parameter_path, parameter_box in parameter_box_by_path.items()
    }


def tensor_names(config: ModelConfig, checkpoint_tensor_names: Collection[str]) -> set[str]:
    """Returns the names that the language model's tensors may have in a checkpoint.

    A caller can find out with these names whether a checkpoint contains unknown tensors. The names
    include tensors that are not read. For example, a checkpoint may contain fused experts and also
    a tensor for each expert. It may contain a head although config.json ties the head to the
    embedding.

    Args:
        config: The configuration of the model.
        checkpoint_tensor_names: The names of the tensors in the checkpoint. They tell the layout of
            the checkpoint: whether a tensor contains all experts of a layer or a single expert, and
            which projections of a delta net share a tensor. The result contains the names in this
            layout, and the names in the layout that is assumed for a model without a checkpoint.
    """
    possible_tensor_names = {HEAD}
    for assumed_tensor_names in ((), checkpoint_tensor_names):
        for weight_spec in weight_table(Qwen2(config), assumed_tensor_names).values():
            possible_tensor_names.update(weight_spec.hf_names)
    return possible_tensor_names


def _weight_spec(
    path: ParamPath,
    box: Any,
    model: nn.Module,
    tensor_name_and_slice_by_parameter_name: Mapping[str, Any],
) -> WeightSpec:
    """Returns the shape, logical axes and checkpoint tensors of one parameter.

    Args:
        path: The path of the parameter.
        box: Flax's box with the logical axes (`names`) and the shape of the parameter (`value`).
        model: The model, a `Qwen2` or a `HookedModel`.
        tensor_name_and_slice_by_parameter_name: Name of a parameter in its layer -> (name of its
            tensor in the layer, the slice of the tensor that belongs to the parameter), from
            `_tensors_by_parameter` and `_interleaved_tensors`. The slice is None for a whole
            tensor. If each expert has a tensor of its own, "{}" in the name of the tensor stands
            for the number of the expert. A parameter that is missing in this dict has the
            same name as its tensor.
    """
    config = model.config
    parameter_shape = box.value.shape
    logical_axes = box.names
    if path[0] == "lm_head":
        head_tensor_name = "model.embed_tokens.weight" if config.tie_word_embeddings else HEAD
        return WeightSpec(parameter_shape, logical_axes, (head_tensor_name,))
    if path[0] != "layers":
        return WeightSpec(parameter_shape, logical_axes, (f"model.{path[0]}.weight",))
    has_several_layer_types = len(set(config.layer_types)) > 1
    layer_numbers = list(range(model.num_layers))
    if has_several_layer_types:
        # If the model has several types of layers, `path[1]` is the type of the parameter's layers.
        layer_numbers = [
            layer_number
            for layer_number in layer_numbers
            if config.layer_types[layer_number] == path[1]
        ]
    parameter_name = ".".join(path[2:] if has_several_layer_types else path[1:])
    tensor_name_template, tensor_slice = tensor_name_and_slice_by_parameter_name.get(
        parameter_name, (parameter_name, None)
    )
    has_tensor_per_expert = "{}" in tensor_name_template
    # A template without "{}" gives the same name for any number, so one number is enough.
    expert_numbers = range(config.experts.count if has_tensor_per_expert else 1)
    names_in_checkpoint = [
        f"model.layers.{layer_number}.{tensor_name_template.format(expert_number)}"
        for layer_number in layer_numbers
        for expert_number in expert_numbers
    ]
    return WeightSpec(
        parameter_shape,
        logical_axes,
        tuple(names_in_checkpoint),
        1 + has_tensor_per_expert,
        tensor_slice,
    )


def _tensors_by_parameter(
    config: ModelConfig, has_fused_experts: bool
) -> dict[str, tuple[str, TensorSlice | None]]:
    """Returns the checkpoint tensors of the layer parameters that have no tensor of the same name.

    A layer parameter that is missing from the result is a whole tensor with the same name.

    The checkpoint of a model with gated delta nets may store the rows of several projections
    interleaved, key head by key head. This function does not consider interleaved projections.
    `_interleaved_tensors` returns their tensors, which take precedence over this result.

    Args:
        config: The configuration of the model.
        has_fused_experts: Whether each tensor of experts contains all experts of a layer. If not,
            each expert has tensors of its own.

    Returns:
        A dict: name of the parameter in its layer -> (name of the tensor in the layer, the slice of
        the tensor that becomes the parameter). The slice is None for a whole tensor. If each expert
        has tensors of its own, "{}" in the name of the tensor stands for the number of the expert.
    """
    tensor_name_and_slice_by_parameter_name: dict[str, tuple[str, TensorSlice | None]] = {}
    if config.delta is not None:
        num_rows_of_key_projection = config.delta.key_heads * config.delta.key_size
        num_rows_of_value_projection = config.sizes["O"]
        for projection_letter, first_row_index_in_tensor in (
            ("q", 0),
            ("k", num_rows_of_key_projection),
            ("v", 2 * num_rows_of_key_projection),
        ):
            tensor_slice = TensorSlice(
                0,
                first_row_index_in_tensor,
                2 * num_rows_of_key_projection + num_rows_of_value_projection,
            )
            for module_name_prefix, module_name_in_checkpoint in (
                ("in_proj", "in_proj_qkv"),
                ("conv1d", "conv1d"),
            ):
                parameter_name = f"linear_attn.{module_name_prefix}_{projection_letter}.weight"
                tensor_name_and_slice_by_parameter_name[parameter_name] = (
                    f"linear_attn.{module_name_in_checkpoint}.weight",
                    tensor_slice,
                )
    if config.experts is not None:
        expert_width = config.experts.width
        gate_slice = TensorSlice(1, 0, 2 * expert_width)
        up_slice = TensorSlice(1, expert_width, 2 * expert_width)
        for projection_name, name_of_fused_tensor, slice_of_fused_tensor in (
            ("gate_proj", "mlp.experts.gate_up_proj", gate_slice),
            ("up_proj", "mlp.experts.gate_up_proj", up_slice),
            ("down_proj", "mlp.experts.down_proj", None),
        ):
            tensor_name_and_slice_by_parameter_name[f"mlp.experts.{projection_name}.weight"] = (
                (name_of_fused_tensor, slice_of_fused_tensor)
                if has_fused_experts
                else (f"mlp.experts.{{}}.{projection_name}.weight", None)
            )
    return tensor_name_and_slice_by_parameter_name


def _interleaved_tensors(
    delta: DeltaNet | None, checkpoint_tensor_names: Collection[str]
) -> dict[str, tuple[str, TensorSlice]]:
    """Returns the tensors of a delta net's projections that are stored key head by key head.

    Such a tensor contains all rows of the first key head, then all rows of the next key head, and
    so on. In the tensor `in_proj_qkvz`, the rows of a key head project to its query, its key, and
    the values and gates of its value heads. In the tensor `in_proj_ba`, they project to the inputs
    of the betas (the rates with which tokens change the state) and of the log decays of its value
    heads.

    Args:
        delta: The sizes of the delta net; None if the model has none.
        checkpoint_tensor_names: The names of the tensors in the checkpoint. Empty if there is no
            checkpoint; the function then assumes that it would contain both tensors.

    Returns:
        A dict: name of the parameter in its layer -> (name of the tensor in the layer, the slice
        that the parameter takes from each key head's rows of the tensor). The dict contains only
        the parameters of tensors that are in the checkpoint. It is empty if the model has no delta
        net, or if the configuration does not mark the projections as interleaved.
    """
    tensor_name_and_slice_by_parameter_name: dict[str, tuple[str, TensorSlice]] = {}
    if delta is None or not delta.interleaved:
        return tensor_name_and_slice_by_parameter_name
    value_heads_per_key = delta.values_per_key
    num_key_weight_rows_per_key_head = delta.key_size
    num_value_weight_rows_per_key_head = value_heads_per_key * delta.value_size
    for module_name_in_checkpoint, row_count_by_projection_letter in (
        (
            "in_proj_qkvz",
            {
                "q": num_key_weight_rows_per_key_head,
                "k": num_key_weight_rows_per_key_head,
                "v": num_value_weight_rows_per_key_head,
                "z": num_value_weight_rows_per_key_head,
            },
        ),
        ("in_proj_ba", {"b": value_heads_per_key, "a": value_heads_per_key}),
    ):
        tensor_name_in_layer = f"linear_attn.{module_name_in_checkpoint}.weight"
        rows_per_key_head = sum(row_count_by_projection_letter.values())
        first_row_index_of_projection = 0
        # A quantised version of a model with interleaved projections may contain separate tensors,
        # as the checkpoints of Qwen3.5 do: in_proj_qkv and in_proj_z instead of in_proj_qkvz, or
        # in_proj_b and in_proj_a instead of in_proj_ba. The parameters of a missing interleaved
        # tensor are then read from the separate tensors (see `_tensors_by_parameter`).
        if not checkpoint_tensor_names or any(
            checkpoint_tensor_name.endswith(tensor_name_in_layer)
            for checkpoint_tensor_name in checkpoint_tensor_names
        ):
            for projection_letter, row_count in row_count_by_projection_letter.items():
                tensor_slice = TensorSlice(
                    0, first_row_index_of_projection, rows_per_key_head, is_per_head=True
                )
                tensor_name_and_slice_by_parameter_name[
                    f"linear_attn.in_proj_{projection_letter}.weight"
                ] = (
                    tensor_name_in_layer,
                    tensor_slice,
                )
                first_row_index_of_projection += row_count
    return tensor_name_and_slice_by_parameter_name
