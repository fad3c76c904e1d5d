"""Defines the hooked model, which runs the layers of qwen2_jax.py and returns values at hooks.

`create_model_with_hooks` makes the hooked model of any supported model. hooks.py contains the table
of the kinds of hooks, and capture.py moves their values from the layers into the result. To add a
kind of hook, add a row to the table, and a line to the module of qwen2_jax.py that computes the
values.

Letters: B rows, T tokens per row, D hidden.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from activation_extraction.common.encodings import FLOAT8
from activation_extraction.model.capture import BufferByWidthAndDtype, Capture, CapturePlan
from activation_extraction.model.decoder import StackedLayers, stage_length
from activation_extraction.model.hooks import PREDICTED, Hook, HookKind, WidthAndDtype
from activation_extraction.model.kernels import Kernels
from activation_extraction.model.layers import STREAM, Intermediates, RMSNorm, rotary_table
from activation_extraction.model.mesh import RULES, Layout
from activation_extraction.model.model_config import ModelConfig
from activation_extraction.model.numerics import from_bits, to_bits
from activation_extraction.model.predictions import predictions
from qwen2_jax import Embedding, decoder


class HookedModel(nn.Module):
    """A model that runs only the layers that its hooks need, and returns the values at the hooks.

    Its parameters are a part of the parameters of `qwen2_jax.Qwen2`. The layers up to the deepest
    layer with a hook run in a loop.

    Attributes:
        config: The configuration of the model.
        hooks: The hooks in the order in which they are computed.
        dtype: The dtype of weights and of the operands of matrix products.
        activation_dtype: The dtype in which activations are stored, or "float8".
        kernels: The functions that compute attention, experts and delta nets.
        layout: The mesh of devices, and the rules for splitting arrays along its axes.
        num_stages: The number of pipeline stages. All stages have the same number of layers. Layers
            of zeros, which do not change the residual stream, may fill the last stages.
    """

    config: ModelConfig
    hooks: tuple[Hook, ...]
    dtype: Any = jnp.float32
    activation_dtype: Any = jnp.float32
    kernels: Kernels = Kernels()
    layout: Layout = Layout()
    num_stages: int = 1

    @property
    def captured_dtype(self) -> Any:
        """The dtype of the activations that a call of this model returns.

        It is the dtype in which activations are stored. If they are stored as float8, it is the
        dtype of the weights instead, because the store encodes activations as float8 later.
        """
        return self.dtype if self.activation_dtype == FLOAT8 else self.activation_dtype

    @property
    def num_layers(self) -> int:
        """The number of layers that run, up to the deepest layer with a hook."""
        return self.hooks[-1].layer_number + 1

    @property
    def layers_per_stage(self) -> int:
        """The number of layers in each pipeline stage. Without a pipeline, there is one stage."""
        return stage_length(self.config.layer_types[: self.num_layers], self.num_stages)

    @property
    def runs_to_the_end(self) -> bool:
        """Returns whether any of the hooks to store comes after the last layer."""
        return self.hooks[-1].kind.is_after_layers

    @property
    def predicts(self) -> bool:
        """Returns whether any of the hooks to store needs the logits of the next tokens."""
        return any(hook.kind.is_prediction for hook in self.hooks)

    def micro_batches(self, rows: int) -> int:
        """Returns the number of micro-batches into which a pipeline divides a step.

        Each micro-batch has one row for each data-parallel device.

        Args:
            rows: The number of rows of a step.
        """
        return max(rows // self.layout.size(*RULES["batch"]), 1)

    def flops(self, lengths: Sequence[int]) -> float:
        """Returns the number of floating-point operations that the model needs for some samples.

        Args:
            lengths: The lengths of the samples in tokens.
        """
        total_flops = 0.0
        for layer in range(self.num_layers):
            num_weight_values_per_token = _num_weight_values_per_token(self.config, layer)
            total_flops += self.config.flops_of(layer, num_weight_values_per_token, lengths)
        if self.predicts:
            total_flops += 2.0 * self.config.hidden_size * self.config.vocab_size * sum(lengths)
        return total_flops

    def setup(self) -> None:
        self.decoder = decoder(self.config, self.dtype, self.kernels, self.layout)
        self.embed_tokens = Embedding(self.config, self.dtype, self.layout)
        self.layers = self.param(
            "layers", self.decoder.init, self.layers_per_stage, self.num_stages
        )
        self.norm = RMSNorm(self.config, self.dtype)
        if not self.config.tie_word_embeddings:
            self.lm_head = Embedding(self.config, self.dtype, self.layout)

    def __call__(
        self, token_ids: Array, segment_ids: Array, positions: Array
    ) -> dict[WidthAndDtype, Array]:
        """Computes the values at the hooks.

        Args:
            token_ids: The token ids, (B, T) int32.
            segment_ids: For each token, the number of its sample among the samples of the same
                row, counted from 1; 0 for padding. The shape is (B, T), the dtype int32.
            positions: The position of each token in its sample, (B, T) int32.

        Returns:
            Width and dtype -> the values at the hooks with this width and dtype, in the order of
            `hooks`, (hooks, B, T, width). The dtype of activations is `captured_dtype`, a property
            of this model. Other values, such as the numbers of experts, have dtypes of their own.
        """
        if self.is_initializing():
            self._declare(token_ids)
            return {}
        size_by_axis_letter = self.config.sizes_with(token_ids.shape[1])
        capture = Capture(self.hooks, size_by_axis_letter, self.captured_dtype, self.layout)
        run_layers = self._run_in_one_loop if self.num_stages == 1 else self._run_in_stages
        return run_layers(capture, token_ids, segment_ids, positions)

    def _declare(self, token_ids: Array) -> None:
        """Declares the parameters that the hooks need and that belong to no layer.

        Flax creates the parameters of a module when the module is called for the first time, so
        this function calls the modules. `setup` declares the parameters of the layers.

        Args:
            token_ids: The token ids of a step, (B, T) int32.
        """
        x = self.embed_tokens(token_ids)
        if self.runs_to_the_end:
            self.norm(x)
        if self.predicts:
            self._head().table()

    def _head(self) -> Embedding:
        """Returns the module with the matrix that turns hidden states into logits."""
        return self.embed_tokens if self.config.tie_word_embeddings else self.lm_head

    def _run_in_one_loop(
        self, capture: Capture, token_ids: Array, segment_ids: Array, positions: Array
    ) -> dict[WidthAndDtype, Array]:
        """Computes the values at the hooks with one loop over all layers, without a pipeline.

        Args:
            capture: The hooks, and the functions that collect their values in arrays.
            token_ids: The token ids, (B, T) int32.
            segment_ids: The segment of each token, (B, T) int32; 0 for padding.
            positions: The position of each token in its sample, (B, T) int32.

        Returns:
            Width and dtype -> the values at the hooks with this width and dtype, (hooks, B, T,
            width).
        """
        capture_plan = capture.plan(range(self.num_layers))
        capture_plan_after_last_layer = capture.plan_end()
        x = self.embed_tokens(token_ids)
        buffer_by_width_and_dtype = capture.buffers(
            [capture_plan, capture_plan_after_last_layer], token_ids.shape
        )
        cos_and_sin = rotary_table(positions, self.config)
        with jax.named_scope("layers"):
            stacked_layers = self.decoder.stacked(self.layers)
            x, buffer_by_width_and_dtype = self._loop(
                capture,
                capture_plan,
                stacked_layers,
                x,
                buffer_by_width_and_dtype,
                cos_and_sin,
                segment_ids,
            )
        if self.runs_to_the_end:
            bit_patterns_of_kinds_after_last_layer = self._bit_patterns_after_last_layer(
                capture, x, token_ids, positions
            )
            buffer_by_width_and_dtype = capture.write(
                buffer_by_width_and_dtype,
                capture_plan_after_last_layer,
                bit_patterns_of_kinds_after_last_layer,
            )
        return capture.values(buffer_by_width_and_dtype)

    def _run_in_stages(
        self, capture: Capture, token_ids: Array, segment_ids: Array, positions: Array
    ) -> dict[WidthAndDtype, Array]:
        """Computes the values at the hooks with the stages of a pipeline.

        A tick runs all stages at once, each on a different micro-batch. At tick t, stage s runs on
        micro-batch t - s, so M micro-batches take M + stages - 1 ticks. Each stage captures the
        hooks of its own layers.

        Args:
            capture: The hooks, and the functions that collect their values in arrays.
            token_ids: The token ids, (B, T) int32.
            segment_ids: The segment of each token, (B, T) int32; 0 for padding.
            positions: The position of each token in its sample, (B, T) int32.

        Returns:
            Width and dtype -> the values at the hooks with this width and dtype, (hooks, B, T,
            width).
        """
        stage_count = self.num_stages
        row_count, row_length = token_ids.shape
        micro_batch_count = self.micro_batches(row_count)

        def split(x: Array) -> Array:
            """Divides the rows of an array among M micro-batches: (B, T) -> (M, B / M, T).

            Args:
                x: The array, (B, T).
            """
            return x.reshape(-1, micro_batch_count, row_length).swapaxes(0, 1)

        stacked_layers = self.decoder.stacked(self.layers)
        stacked_layers_of_stages = jax.tree.map(
            lambda x: x.reshape(stage_count, -1, *x.shape[1:]), stacked_layers
        )
        token_ids_of_micro_batches, segment_ids_of_micro_batches, positions_of_micro_batches = map(
            split, (token_ids, segment_ids, positions)
        )
        capture_plan_of_all_stages = capture.plan_stages(stage_count, self.layers_per_stage)
        stage_numbers = jnp.arange(stage_count)

        def run_stage(
            layers: StackedLayers,
            buffer_slots_of_kinds: Any,
            x: Array,
            buffer_by_width_and_dtype: BufferByWidthAndDtype,
            micro_batch_number: Array,
        ) -> tuple[Array, BufferByWidthAndDtype]:
            """Runs one stage on one micro-batch.

            A stage also runs in the bubble: in ticks in which it has no micro-batch. In ticks
            before the first micro-batch, it writes meaningless values to the part of the buffers
            for the first micro-batch, and the first micro-batch overwrites them later. In ticks
            after the last micro-batch, it computes the last micro-batch again. So the bubble needs
            no mask.

            Args:
                layers: The layers of the stage with their parameters.
                buffer_slots_of_kinds: A tuple with one array for each kind of hook that layers
                    have, (layers of the stage,) int32. Element i of an array is the slot of this
                    kind of hook in layer i of the stage: the index on the first axis of a buffer at
                    which the values are written.
                x: The residual stream before the stage, (B, T, D), where B is the number of rows of
                    a micro-batch.
                buffer_by_width_and_dtype: Width and dtype -> the buffer with the values at the
                    hooks of the stage that have this width and dtype, for all micro-batches,
                    (slots, micro-batches, B, T, width).
                micro_batch_number: The number of the micro-batch, from 0, () int32. In the bubble,
                    it is negative, or at least the number of micro-batches.

            Returns:
                A tuple of:
                    The residual stream after the stage, (B, T, D).
                    The buffers of the stage with the values of this micro-batch.
            """
            micro_batch_number = jnp.clip(micro_batch_number, 0, micro_batch_count - 1)
            cos_and_sin = rotary_table(positions_of_micro_batches[micro_batch_number], self.config)
            micro_batch_segment_ids = segment_ids_of_micro_batches[micro_batch_number]
            capture_plan_of_stage = capture_plan_of_all_stages.with_slots(buffer_slots_of_kinds)
            return self._loop(
                capture,
                capture_plan_of_stage,
                layers,
                x,
                buffer_by_width_and_dtype,
                cos_and_sin,
                micro_batch_segment_ids,
                micro_batch_number,
            )

        def tick(
            carry: tuple[Array, BufferByWidthAndDtype], tick_number: Array
        ) -> tuple[Any, Array | None]:
            """Runs every stage once, and each stage on a different micro-batch.

            Args:
                carry: A tuple of the residual stream after each stage, (stages, B, T, D), and the
                    buffers of all stages, which contain the values at hooks.
                tick_number: The number of the tick, () int32.

            Returns:
                A tuple of:
                    The carry of the next tick.
                    The residual stream after the last stage, as unsigned integers with the same
                    bits, (B, T, D); None if no hook comes after the last layer.
            """
            x, buffer_by_width_and_dtype = carry
            entering_token_ids = token_ids_of_micro_batches[
                jnp.minimum(tick_number, micro_batch_count - 1)
            ]
            x = jnp.roll(x, 1, axis=0).at[0].set(self.embed_tokens(entering_token_ids))
            x = self.layout.constrain(x, "stage", *STREAM)
            run_stages = jax.vmap(run_stage, spmd_axis_name="pipeline")
            x, buffer_by_width_and_dtype = run_stages(
                stacked_layers_of_stages,
                capture_plan_of_all_stages.buffer_slots_of_kinds,
                x,
                buffer_by_width_and_dtype,
                tick_number - stage_numbers,
            )
            return (x, buffer_by_width_and_dtype), to_bits(x[-1]) if self.runs_to_the_end else None

        x = jnp.zeros(
            (stage_count, *token_ids_of_micro_batches.shape[1:], self.config.hidden_size),
            self.dtype,
        )
        buffer_by_width_and_dtype = capture.buffers(
            [capture_plan_of_all_stages], token_ids_of_micro_batches.shape, stage_count
        )
        with jax.named_scope("layers"):
            tick_numbers = jnp.arange(micro_batch_count + stage_count - 1)
            (_, buffer_by_width_and_dtype), final_stream_bit_patterns_of_ticks = lax.scan(
                tick, (x, buffer_by_width_and_dtype), tick_numbers
            )
        bit_patterns_by_kind_after_last_layer: dict[HookKind, Array] = {}
        if self.runs_to_the_end:
            assert final_stream_bit_patterns_of_ticks is not None
            x = from_bits(
                final_stream_bit_patterns_of_ticks[stage_count - 1 :], self.dtype
            ).swapaxes(0, 1)
            x = self.layout.constrain(x.reshape(row_count, row_length, -1), *STREAM)
            bit_patterns_of_kinds_after_last_layer = self._bit_patterns_after_last_layer(
                capture, x, token_ids, positions
            )
            bit_patterns_by_kind_after_last_layer = dict(
                zip(capture.plan_end().kinds, bit_patterns_of_kinds_after_last_layer, strict=True)
            )
        return capture.values_of_stages(
            buffer_by_width_and_dtype,
            row_count,
            self.layers_per_stage,
            bit_patterns_by_kind_after_last_layer,
        )

    def _loop(
        self,
        capture: Capture,
        plan: CapturePlan,
        layers: StackedLayers,
        x: Array,
        buffer_by_width_and_dtype: BufferByWidthAndDtype,
        cos_and_sin: tuple[Array, Array],
        segment_ids: Array,
        micro_batch_number: Array | None = None,
    ) -> tuple[Array, BufferByWidthAndDtype]:
        """Runs all layers or the layers of one stage, and writes the values at their hooks.

        Args:
            capture: The hooks, and the functions that collect their values in arrays.
            plan: The kinds of hooks whose values these layers write, and the slots to which each
                layer writes them.
            layers: The layers with their parameters.
            x: The residual stream before the layers, (B, T, D).
            buffer_by_width_and_dtype: Width and dtype -> the array to which the layers write the
                values at the hooks with this width and dtype, as unsigned integers with the same
                bits, (slots, B, T, width). Each of these hooks has a slot, an index of the first
                axis. In a pipeline, the array contains the values of one stage, and its shape is
                (slots, micro-batches, B, T, width).
            cos_and_sin: The cosines and the sines that rotate queries and keys, each (B, T, 1, H)
                float32.
            segment_ids: The segment ids of the rows, (B, T) int32.
            micro_batch_number: The number of the micro-batch, () int32; None without a pipeline.

        Returns:
            A tuple of:
                The residual stream after the layers, (B, T, D).
                The buffers with the values of these layers.
        """

        def run_layer(
            layer: Callable, carry: tuple[Array, BufferByWidthAndDtype], buffer_slots_of_kinds: Any
        ) -> Any:
            x, buffer_by_width_and_dtype = carry
            x, value_bit_patterns_of_kinds = layer(x, cos_and_sin, segment_ids)
            return x, capture.write(
                buffer_by_width_and_dtype,
                plan.with_slots(buffer_slots_of_kinds),
                value_bit_patterns_of_kinds,
                micro_batch_number,
            )

        keep_bit_patterns = partial(capture.bit_patterns_of, plan.kinds)
        return self.decoder.scan(
            layers,
            run_layer,
            (x, buffer_by_width_and_dtype),
            plan.buffer_slots_of_kinds,
            keep_bit_patterns,
        )

    def _bit_patterns_after_last_layer(
        self, capture: Capture, x: Array, token_ids: Array, positions: Array
    ) -> list[Array]:
        """Computes the values at the hooks that come after the last layer.

        Args:
            capture: The hooks, and the functions that collect their values in arrays.
            x: The residual stream after the last layer, (B, T, D).
            token_ids: The token ids, (B, T) int32.
            positions: The position of each token in its sample, (B, T) int32.

        Returns:
            A list with an array for each kind in `capture.plan_end().kinds`: its values, as
            unsigned integers with the same bits, (B, T, width).
        """
        hidden_states, norm_intermediates = self.norm(x)
        intermediates: Intermediates = {"resid_pre": x, "final": norm_intermediates}
        if self.predicts:
            prediction_kinds = [hook.kind for hook in self.hooks if hook.kind.is_prediction]
            with jax.named_scope("predictions"):
                intermediates["predicted"] = predictions(
                    hidden_states,
                    from_bits(self._head().table()),
                    token_ids,
                    positions,
                    requested={
                        prediction_kind.path_in_intermediates.removeprefix(PREDICTED)
                        for prediction_kind in prediction_kinds
                    },
                    top=max(prediction_kind.width_factor for prediction_kind in prediction_kinds),
                    dtype=self.captured_dtype,
                    layout=self.layout,
                )
        return capture.bit_patterns_of(capture.plan_end().kinds, intermediates)


@cache
def _num_weight_values_per_token(config: ModelConfig, layer: int) -> int:
    """Returns the number of weights of a layer with which one token is multiplied.

    In a layer with routed experts, only the experts that a token uses count.

    Args:
        config: The configuration of the model.
        layer: The number of the layer.
    """
    model_decoder = decoder(config, jnp.float32, Kernels(), Layout())
    num_weight_values_per_token = 0
    for parameter_path, parameter_box in model_decoder.parameters(
        config.layer_types[layer]
    ).items():
        if parameter_path[-1] == "weight" and len(parameter_box.names) > 1:
            num_values_of_parameter = math.prod(parameter_box.value.shape)
            if config.experts is not None and "experts" in parameter_path:
                num_weight_values_per_token += (
                    num_values_of_parameter * config.experts.per_token // config.experts.count
                )
            else:
                num_weight_values_per_token += num_values_of_parameter
    return num_weight_values_per_token


def create_model_with_hooks(
    config: ModelConfig,
    hooks: Sequence[Hook],
    dtype: Any = jnp.float32,
    activation_dtype: Any = None,
    kernels: Kernels | None = None,
    layout: Layout | None = None,
) -> HookedModel:
    """Creates a model that returns the values at hooks, and runs no layer after the last hook.

    Args:
        config: The configuration of the model.
        hooks: The hooks, in any order.
        dtype: The dtype of weights and of the operands of matrix products, float32 or bfloat16.
            Products accumulate in float32.
        activation_dtype: The dtype in which activations are stored, or "float8". None for `dtype`.
        kernels: The functions that compute attention, experts and delta nets. None for the default
            functions, which run on every platform.
        layout: The mesh of devices, and the rules for splitting arrays along its axes. None for one
            device.

    Returns:
        The model, whose parameters the caller passes to `apply`.

    Raises:
        ValueError: If there are no hooks.
        InputError: If the layers of a pipeline cannot be split into equal stages.
    """
    if not hooks:
        raise ValueError("hooks: is empty; give at least one hook")
    layout = layout or Layout()
    stage_count = layout.size("pipeline")
    deepest_layer = max(hook.layer_number for hook in hooks)
    # This call raises InputError if the layers cannot be divided into equal stages.
    stage_length(config.layer_types[: deepest_layer + 1], stage_count)
    return HookedModel(
        config,
        tuple(sorted(set(hooks))),
        dtype,
        activation_dtype or dtype,
        kernels or Kernels(),
        layout,
        stage_count,
    )
