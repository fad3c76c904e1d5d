"""The hooked model runs the layers of qwen2_jax.py and returns the values at hooks.

`create_model_with_hooks` makes it for any supported model. To add a kind of hook, add a row to the
table of kinds in hooks.py, and a line to the module of qwen2_jax.py that computes it.
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
from activation_extraction.model.capture import Buffers, Capture, Plan
from activation_extraction.model.decoder import Layers, stage_length
from activation_extraction.model.hooks import PREDICTED, Hook, HookKind, VectorType
from activation_extraction.model.kernels import Kernels
from activation_extraction.model.layers import STREAM, Out, RMSNorm, rotary_table
from activation_extraction.model.mesh import RULES, Layout
from activation_extraction.model.model_config import ModelConfig
from activation_extraction.model.numerics import from_bits, to_bits
from activation_extraction.model.predictions import predictions
from qwen2_jax import Embedding, decoder


class HookedModel(nn.Module):
    """The layers of a model that hooks need, which return the values at the hooks.

    Its parameters are a part of those of `qwen2_jax.Qwen2`. Layers run in a loop, up to the deepest
    one with a hook.

    Attributes:
        config: The configuration of the model.
        hooks: The hooks in the order in which they are computed.
        dtype: The dtype of weights and matrix products.
        activation_dtype: The dtype in which activations are stored, or "float8".
        kernels: The functions that compute attention, experts and delta nets.
        layout: The mesh.
        stages: The number of pipeline stages, which have equally many layers. The last ones may be
            filled up with layers of zeros, which change nothing.
    """

    config: ModelConfig
    hooks: tuple[Hook, ...]
    dtype: Any = jnp.float32
    activation_dtype: Any = jnp.float32
    kernels: Kernels = Kernels()
    layout: Layout = Layout()
    stages: int = 1

    @property
    def captured_dtype(self) -> Any:
        """The dtype of activations in the result, which the store may encode as float8."""
        return self.dtype if self.activation_dtype == FLOAT8 else self.activation_dtype

    @property
    def num_layers(self) -> int:
        """The number of layers that run: all up to the deepest one with a hook."""
        return self.hooks[-1].layer + 1

    @property
    def layers_per_stage(self) -> int:
        """The number of layers in a pipeline stage; without a pipeline, of all layers."""
        return stage_length(self.config.layer_types[: self.num_layers], self.stages)

    @property
    def runs_to_the_end(self) -> bool:
        """Whether a hook comes after the last layer."""
        return self.hooks[-1].kind.at_end

    @property
    def predicts(self) -> bool:
        """Whether a hook needs the logits."""
        return any(hook.kind.is_prediction for hook in self.hooks)

    def micro_batches(self, rows: int) -> int:
        """Returns the number of micro-batches of a step.

        Each has one row for each data-parallel device.

        Args:
            rows: The rows of a step.
        """
        return max(rows // self.layout.size(*RULES["batch"]), 1)

    def flops(self, lengths: Sequence[int]) -> float:
        """Returns the number of floating-point operations for samples.

        Args:
            lengths: The lengths of the samples in tokens.
        """
        total = 0.0
        for layer in range(self.num_layers):
            weights = _weights_of_a_token(self.config, layer)
            total += self.config.flops_of(layer, weights, lengths)
        if self.predicts:
            total += 2.0 * self.config.hidden_size * self.config.vocab_size * sum(lengths)
        return total

    def setup(self) -> None:
        self.decoder = decoder(self.config, self.dtype, self.kernels, self.layout)
        self.embed_tokens = Embedding(self.config, self.dtype, self.layout)
        self.layers = self.param("layers", self.decoder.init, self.layers_per_stage, self.stages)
        self.norm = RMSNorm(self.config, self.dtype)
        if not self.config.tie_word_embeddings:
            self.lm_head = Embedding(self.config, self.dtype, self.layout)

    def __call__(
        self, token_ids: Array, segment_ids: Array, positions: Array
    ) -> dict[VectorType, Array]:
        """Returns the values at the hooks.

        Args:
            token_ids: (B, T) int32.
            segment_ids: The number of the sample that a token belongs to in its row, (B, T) int32;
                0 for padding.
            positions: The position of a token in its sample, (B, T) int32.

        Returns:
            Vector type -> the values of its hooks, in the order of `hooks`, (hooks of this type, B,
            T, width). Activations have `captured_dtype`.
        """
        if self.is_initializing():
            self._declare(token_ids)
            return {}
        sizes = self.config.sizes_with(token_ids.shape[1])
        capture = Capture(self.hooks, sizes, self.captured_dtype, self.layout)
        run = self._in_one_loop if self.stages == 1 else self._in_stages
        return run(capture, token_ids, segment_ids, positions)

    def _declare(self, token_ids: Array) -> None:
        """Declares the parameters outside the layers that the hooks need, by calling their modules.

        Flax creates the parameters of a module when the module is first called. The parameters of
        the layers are declared in `setup`.

        Args:
            token_ids: The token ids of a step, (B, T) int32.
        """
        x = self.embed_tokens(token_ids)
        if self.runs_to_the_end:
            self.norm(x)
        if self.predicts:
            self._head().table()

    def _head(self) -> Embedding:
        return self.embed_tokens if self.config.tie_word_embeddings else self.lm_head

    def _in_one_loop(
        self, capture: Capture, token_ids: Array, segment_ids: Array, positions: Array
    ) -> dict[VectorType, Array]:
        """Runs one loop over all layers. See `__call__` for the arrays and the result."""
        plan = capture.plan(range(self.num_layers))
        end = capture.plan_end()
        x = self.embed_tokens(token_ids)
        buffers = capture.buffers([plan, end], token_ids.shape)
        rotary = rotary_table(positions, self.config)
        with jax.named_scope("layers"):
            layers = self.decoder.stacked(self.layers)
            x, buffers = self._loop(capture, plan, layers, x, buffers, rotary, segment_ids)
        if self.runs_to_the_end:
            values = self._end(capture, x, token_ids, positions)
            buffers = capture.write(buffers, end, values)
        return capture.values(buffers)

    def _in_stages(
        self, capture: Capture, token_ids: Array, segment_ids: Array, positions: Array
    ) -> dict[VectorType, Array]:
        """Runs all stages of a pipeline at once, each on a different micro-batch.

        At tick t, stage s works on micro-batch t - s, so M micro-batches take M + stages - 1 ticks.
        Each stage captures the hooks of its own layers. See `__call__` for the arrays and the
        result.
        """
        stages = self.stages
        rows, length = token_ids.shape
        count = self.micro_batches(rows)

        def split(x: Array) -> Array:
            """Maps (B, T) to (micro-batches, B / micro-batches, T)."""
            return x.reshape(-1, count, length).swapaxes(0, 1)

        layers = self.decoder.stacked(self.layers)
        stage_layers = jax.tree.map(lambda x: x.reshape(stages, -1, *x.shape[1:]), layers)
        micro_ids, micro_segments, micro_positions = map(split, (token_ids, segment_ids, positions))
        plan = capture.plan_stages(stages, self.layers_per_stage)
        stage_numbers = jnp.arange(stages)

        def stage(
            layers: Layers, slots: Any, x: Array, buffers: Buffers, number: Array
        ) -> tuple[Array, Buffers]:
            """Runs one stage on one micro-batch.

            A stage also runs in the bubble, where it has no micro-batch. Before the first
            micro-batch arrives, it writes meaningless values in place of that micro-batch's, and
            overwrites them later. After the last micro-batch, it computes this one again. So
            neither part of the bubble needs a mask.

            Args:
                layers: The layers of the stage with their parameters.
                slots: `Plan.slots` for the layers of the stage: an int32 array (layers of the
                    stage,) for each kind of hook.
                x: The residual stream before the stage, (B, T, D), where B is the rows of a
                    micro-batch.
                buffers: The buffers of the stage.
                number: The number of the micro-batch, () int32. It is negative in the bubble before
                    the first micro-batch, and at least `count` in the bubble after the last one.

            Returns:
                The residual stream after the stage, (B, T, D), and the buffers.
            """
            number = jnp.clip(number, 0, count - 1)
            rotary = rotary_table(micro_positions[number], self.config)
            segments = micro_segments[number]
            stage_plan = plan.with_slots(slots)
            return self._loop(capture, stage_plan, layers, x, buffers, rotary, segments, number)

        def tick(carry: tuple[Array, Buffers], time: Array) -> tuple[Any, Array | None]:
            """Runs every stage once; returns the bits of the stream after the last stage."""
            x, buffers = carry
            entering = micro_ids[jnp.minimum(time, count - 1)]
            x = jnp.roll(x, 1, axis=0).at[0].set(self.embed_tokens(entering))
            x = self.layout.constrain(x, "stage", *STREAM)
            run_stages = jax.vmap(stage, spmd_axis_name="pipeline")
            x, buffers = run_stages(stage_layers, plan.slots, x, buffers, time - stage_numbers)
            return (x, buffers), to_bits(x[-1]) if self.runs_to_the_end else None

        x = jnp.zeros((stages, *micro_ids.shape[1:], self.config.hidden_size), self.dtype)
        buffers = capture.buffers([plan], micro_ids.shape, stages)
        with jax.named_scope("layers"):
            ticks = jnp.arange(count + stages - 1)
            (_, buffers), streams = lax.scan(tick, (x, buffers), ticks)
        at_end: dict[HookKind, Array] = {}
        if self.runs_to_the_end:
            assert streams is not None
            x = from_bits(streams[stages - 1 :], self.dtype).swapaxes(0, 1)
            x = self.layout.constrain(x.reshape(rows, length, -1), *STREAM)
            values = self._end(capture, x, token_ids, positions)
            at_end = dict(zip(capture.plan_end().kinds, values, strict=True))
        return capture.values_of_stages(buffers, rows, self.layers_per_stage, at_end)

    def _loop(
        self,
        capture: Capture,
        plan: Plan,
        layers: Layers,
        x: Array,
        buffers: Buffers,
        rotary: tuple[Array, Array],
        segment_ids: Array,
        micro_batch: Array | None = None,
    ) -> tuple[Array, Buffers]:
        """Runs all layers, or those of one stage, and writes the values at their hooks.

        Args:
            capture: The hooks.
            plan: The slots of these layers.
            layers: The layers with their parameters.
            x: The residual stream before the layers, (B, T, D).
            buffers: The buffers, of this stage in a pipeline.
            rotary: The rotary table of the rows.
            segment_ids: The segment ids of the rows, (B, T) int32.
            micro_batch: The number of the micro-batch in a pipeline, () int32; None without one.

        Returns:
            The residual stream after the layers, and the buffers.
        """

        def block(layer: Callable, carry: tuple[Array, Buffers], slots: Any) -> Any:
            x, buffers = carry
            x, values = layer(x, rotary, segment_ids)
            return x, capture.write(buffers, plan.with_slots(slots), values, micro_batch)

        keep = partial(capture.bits_of, plan.kinds)
        return self.decoder.scan(layers, block, (x, buffers), plan.slots, keep)

    def _end(self, capture: Capture, x: Array, token_ids: Array, positions: Array) -> list[Array]:
        """Returns the bits of the hooks that come after the last layer, each (B, T, width).

        Args:
            capture: The hooks.
            x: The residual stream after the last layer, (B, T, D).
            token_ids: (B, T) int32.
            positions: The position of a token in its sample, (B, T) int32.
        """
        hidden, final = self.norm(x)
        out: Out = {"resid_pre": x, "final": final}
        if self.predicts:
            kinds = [hook.kind for hook in self.hooks if hook.kind.is_prediction]
            with jax.named_scope("predictions"):
                out["predicted"] = predictions(
                    hidden,
                    from_bits(self._head().table()),
                    token_ids,
                    positions,
                    wanted={kind.intermediate.removeprefix(PREDICTED) for kind in kinds},
                    top=max(kind.count for kind in kinds),
                    dtype=self.captured_dtype,
                    layout=self.layout,
                )
        return capture.bits_of(capture.plan_end().kinds, out)


@cache
def _weights_of_a_token(config: ModelConfig, layer: int) -> int:
    """Returns how many weights of this layer's matrices a token is multiplied by."""
    layers = decoder(config, jnp.float32, Kernels(), Layout())
    total = 0
    for path, box in layers.parameters(config.layer_types[layer]).items():
        if path[-1] == "weight" and len(box.names) > 1:
            size = math.prod(box.value.shape)
            if config.experts is not None and "experts" in path:
                size = size * config.experts.per_token // config.experts.count
            total += size
    return total


def create_model_with_hooks(
    config: ModelConfig,
    hooks: Sequence[Hook],
    dtype: Any = jnp.float32,
    activation_dtype: Any = None,
    kernels: Kernels | None = None,
    layout: Layout | None = None,
) -> HookedModel:
    """Creates a model that computes hooks, and no layer beyond the deepest of them.

    Args:
        config: The configuration of the model.
        hooks: The hooks, in any order.
        dtype: The dtype of weights and matrix products, float32 or bfloat16. Sums are float32.
        activation_dtype: The dtype in which activations are stored, or "float8". None for `dtype`.
        kernels: The functions that compute attention, experts and delta nets. None for those that
            define them.
        layout: The mesh to run on. None for one device.

    Raises:
        ValueError: There are no hooks.
        InputError: The layers of a pipeline cannot be split into equal stages.
    """
    if not hooks:
        raise ValueError("hooks: is empty; give at least one hook")
    layout = layout or Layout()
    stages = layout.size("pipeline")
    deepest = max(hook.layer for hook in hooks)
    stage_length(config.layer_types[: deepest + 1], stages)  # raises InputError
    return HookedModel(
        config,
        tuple(sorted(set(hooks))),
        dtype,
        activation_dtype or dtype,
        kernels or Kernels(),
        layout,
        stages,
    )
