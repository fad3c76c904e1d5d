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
from activation_extraction.model.capture import Buffers, Capture, Writes
from activation_extraction.model.decoder import Decoder, Layers, stage_length
from activation_extraction.model.hooks import Form, Hook, HookKind
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
        """Returns the dtype of activations in the result, which the store may encode as float8."""
        return self.dtype if self.activation_dtype == FLOAT8 else self.activation_dtype

    @property
    def num_layers(self) -> int:
        """Returns the number of layers that run: all up to the deepest one with a hook."""
        return self.hooks[-1].layer + 1

    @property
    def runs_to_the_end(self) -> bool:
        return self.hooks[-1].kind.at_end

    @property
    def predicts(self) -> bool:
        return any(map(_is_predicted, self.hooks))

    @property
    def layers_per_stage(self) -> int:
        return stage_length(self.config.layer_types[: self.num_layers], self.stages)

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

    @nn.compact
    def __call__(self, token_ids: Array, segment_ids: Array, positions: Array) -> dict[Form, Array]:
        """Returns the values at the hooks.

        Args:
            token_ids: (B, T) int32.
            segment_ids: The number of the sample that a token belongs to in its row, (B, T) int32;
                0 for padding.
            positions: The position of a token in its sample, (B, T) int32.

        Returns:
            Form -> the values at all hooks of this form in the order of `hooks`, (hooks of the
            form, B, T, width). Activations have `captured_dtype`.
        """
        embed = Embedding(self.config, self.dtype, self.layout, name="embed_tokens")
        norm, head = RMSNorm(self.config, self.dtype, name="norm"), embed
        if not self.config.tie_word_embeddings:
            head = Embedding(self.config, self.dtype, self.layout, name="lm_head")
        params = self.param("layers", self._layers().init, self.layers_per_stage, self.stages)
        if self.is_initializing():
            x = embed(token_ids)
            if self.runs_to_the_end:
                norm(x)
            if self.predicts:
                head.table()
            return {}
        sizes = self.config.sizes_with(token_ids.shape[1])
        capture = Capture(self.hooks, sizes, self.captured_dtype, self.layout)
        run = self._scanned if self.stages == 1 else self._pipelined
        end = partial(self._end, capture, norm, head, token_ids, positions)
        return run(capture, params, embed, end, token_ids, segment_ids, positions)

    def _layers(self) -> Decoder:
        return decoder(self.config, self.dtype, self.kernels, self.layout)

    def _end(self, capture: Capture, norm: RMSNorm, head: Embedding, *others: Array) -> list[Array]:
        """Returns the bits of the hooks that come after the last layer, (B, T, width).

        others: token ids, positions, and (B, T, D), the residual stream after the last layer.
        """
        token_ids, positions, x = others
        hidden, final = norm(x)
        out: Out = {"resid_pre": x, "final": final}
        if self.predicts:
            kinds = [hook.kind for hook in self.hooks if _is_predicted(hook)]
            with jax.named_scope("predictions"):
                out["predicted"] = predictions(
                    hidden,
                    from_bits(head.table()),
                    token_ids,
                    positions,
                    {kind.value.rpartition(".")[2] for kind in kinds},
                    max(kind.count for kind in kinds),
                    self.captured_dtype,
                    self.layout,
                )
        return capture.bits_of(capture.plan_end().kinds, out)

    def _scanned(
        self, capture: Capture, params: Any, embed: Embedding, end: Callable, *batch: Array
    ) -> dict[Form, Array]:
        """Runs one loop over all layers."""
        token_ids, segment_ids, positions = batch
        plan, at_end = capture.plan(range(self.num_layers)), capture.plan_end()
        carry = embed(token_ids), capture.buffers([plan, at_end], token_ids.shape)
        inputs = rotary_table(positions, self.config), segment_ids
        with jax.named_scope("layers"):
            layers = self._layers().stacked(params)
            x, buffers = self._loop(capture, layers, plan, carry, inputs)
        if self.runs_to_the_end:
            buffers = capture.write(buffers, at_end.only(), end(x))
        return capture.result(buffers)

    def _loop(
        self, capture: Capture, layers: Layers, plan: Writes, carry: Any, inputs: Any, *at: Array
    ) -> tuple[Array, Buffers]:
        """Runs all layers, or those of one stage; the carry is the stream and the buffers.

        inputs: of a layer, the rotary table and the segment ids. at: the micro-batch in a pipeline.
        """

        def block(layer: Callable, carry: tuple[Array, Buffers], slots: Any) -> Any:
            x, buffers = carry
            x, values = layer(x, *inputs)
            return x, capture.write(buffers, plan._replace(slots=slots), values, *at)

        keep = partial(capture.bits_of, plan.kinds)
        return self._layers().scan(layers, block, carry, plan.slots, keep)

    def _pipelined(
        self, capture: Capture, params: Any, embed: Embedding, end: Callable, *batch: Array
    ) -> dict[Form, Array]:
        """Runs all stages at once, each on a different micro-batch.

        At tick t, stage s works on micro-batch t - s, so M micro-batches take M + stages - 1 ticks.
        Each stage captures the hooks of its own layers.
        """
        stages, (rows, length) = self.stages, batch[0].shape
        micro_batches = self.micro_batches(rows)
        layers = self._layers().stacked(params)
        per_stage = jax.tree.map(lambda x: x.reshape(stages, -1, *x.shape[1:]), layers)
        token_ids, segment_ids, positions = (
            x.reshape(-1, micro_batches, length).swapaxes(0, 1) for x in batch
        )
        plan, numbers = capture.plan_stages(stages, self.layers_per_stage), jnp.arange(stages)

        def stage(layers: Layers, slots: Any, x: Array, buffers: Buffers, number: Array) -> Any:
            """Runs a stage. number: of the micro-batch.

            In the bubble before the first micro-batch, a stage writes values that it will write
            again; in the bubble after the last one, it computes that one again. Neither needs a
            mask.
            """
            number = jnp.clip(number, 0, micro_batches - 1)
            inputs = rotary_table(positions[number], self.config), segment_ids[number]
            own = plan._replace(slots=slots)
            return self._loop(capture, layers, own, (x, buffers), inputs, number)

        def tick(carry: tuple[Array, Buffers], time: Array) -> tuple[Any, Array | None]:
            x, buffers = carry
            entering = token_ids[jnp.minimum(time, micro_batches - 1)]
            x = jnp.roll(x, 1, axis=0).at[0].set(embed(entering))
            x = self.layout.constrain(x, "stage", *STREAM)
            inputs = per_stage, plan.slots, x, buffers, time - numbers
            x, buffers = jax.vmap(stage, spmd_axis_name="pipeline")(*inputs)
            return (x, buffers), to_bits(x[-1]) if self.runs_to_the_end else None

        x = jnp.zeros((stages, *token_ids.shape[1:], self.config.hidden_size), self.dtype)
        carry = x, capture.buffers([plan], token_ids.shape, stages)
        with jax.named_scope("layers"):
            ticks = jnp.arange(micro_batches + stages - 1)
            (_, buffers), streams = lax.scan(tick, carry, ticks)
        at_end: dict[HookKind, Array] = {}
        if self.runs_to_the_end:
            assert streams is not None
            x = from_bits(streams[stages - 1 :], self.dtype).swapaxes(0, 1)
            x = self.layout.constrain(x.reshape(rows, length, -1), *STREAM)
            at_end = dict(zip(capture.plan_end().kinds, end(x), strict=True))
        return capture.result_of_stages(buffers, rows, self.layers_per_stage, at_end)


def _is_predicted(hook: Hook) -> bool:
    return hook.kind.value.startswith("predicted.")


@cache
def _weights_of_a_token(config: ModelConfig, layer: int) -> int:
    """Returns how many weights of this layer's matrices a token is multiplied by."""
    layers, total = decoder(config, jnp.float32, Kernels(), Layout()), 0
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
    stage_length(config.layer_types[: max(hooks).layer + 1], stages)
    return HookedModel(
        config,
        tuple(sorted(set(hooks))),
        dtype,
        activation_dtype or dtype,
        kernels or Kernels(),
        layout,
        stages,
    )
