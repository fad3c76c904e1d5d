"""The hooked model: which hook points Qwen2 has, and the model that computes what they ask for.

A hook point is a layer and a kind; `HOOKS` is the table of kinds. Meanings are TransformerLens's
without processed weights:
  hook_attn_out    attention output after o_proj, before it is added
  hook_mlp_out     MLP output, before it is added
  hook_resid_post  the residual stream after the block, before any final norm
                   (Hugging Face hidden_states[k + 1], but for the last layer)
A new kind is a row here and a line in the module of qwen2_jax.py that computes it. The hooked model
has the layers up to the last requested one, and neither final norm nor lm_head.
"""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from activation_extraction.model.attention import Attention, blocked_attention
from activation_extraction.model.capture import Buffers, Capture, Slots
from activation_extraction.model.family import ModelFamily
from activation_extraction.model.hooks import Hook, HookKind, HookTable
from activation_extraction.model.mesh import Layout
from qwen2_jax import STREAM, Decoder, Embedding, Qwen2, QwenConfig, rotary_table, weight_table

HOOKS = HookTable(
    (  # name, letters, intermediate; in the order in which a layer computes them
        HookKind("hook_attn_out", "D", "attn.out"),
        HookKind("hook_mlp_out", "D", "mlp.out"),
        HookKind("hook_resid_post", "D", "resid_post"),
    )
)


class HookedQwen2(nn.Module):
    """Qwen2 up to the last hook, returning what the hooks saw.

    Its parameters are the corresponding part of `qwen2_jax.Qwen2`'s. With `stages` > 1 the layers
    are split into that many pipeline stages of equal length, the last ones perhaps with layers of
    zeros, which change nothing.
    """

    config: QwenConfig
    hooks: tuple[Hook, ...]
    dtype: Any = jnp.float32
    activation_dtype: Any = jnp.float32
    attention: Attention = blocked_attention
    layout: Layout = Layout()
    stages: int = 1

    @property
    def num_layers(self) -> int:
        """Layers that are loaded and run."""
        return self.hooks[-1].layer + 1

    @property
    def layers_per_stage(self) -> int:
        return -(-self.num_layers // self.stages)

    def micro_batches(self, rows: int) -> int:
        """How many pass through the pipeline per step: one row of every data-parallel device."""
        return max(rows // self.layout.size("data", "fsdp"), 1)

    @nn.compact
    def __call__(self, token_ids: Array, segment_ids: Array, positions: Array) -> dict[int, Array]:
        """All (B, T) int32. Returns {width: (hooks of that width, B, T, width)}.

        The values are in activation_dtype, the hooks of one width in the order of `hooks`.
        """
        embed = Embedding(self.config, self.dtype, self.layout, name="embed_tokens")
        params = self.param("layers", self._decoder().init, self.stages * self.layers_per_stage)
        capture = Capture(
            self.hooks,
            self.config.sizes,
            self.activation_dtype,
            self.layout,
            self.stages,
            self.layers_per_stage,
        )
        if self.is_initializing():
            embed(token_ids)
            return {}
        if self.stages > 1:
            return self._pipelined(capture, params, embed, token_ids, segment_ids, positions)
        slots = jax.tree.map(lambda of_stages: of_stages[0], capture.slots())
        carry = embed(token_ids), capture.buffers(*token_ids.shape)
        with jax.named_scope("layers"):
            _, found = self._run(capture, params, slots, carry, segment_ids, positions)
        return capture.result(found, len(token_ids))

    def _decoder(self) -> Decoder:
        return Decoder(self.config, self.dtype, self.attention, self.layout)

    def _run(
        self,
        capture: Capture,
        params: Any,
        slots: Slots,
        carry: tuple[Array, Buffers],
        segment_ids: Array,
        positions: Array,
        *at: Array,
    ) -> tuple[Array, Buffers]:
        """All layers, or those of one stage, on rows that buffers keep `at` their slots."""
        rotary = rotary_table(positions, self.config)

        def block(layer: Callable, carry: tuple[Array, Buffers], slots: Slots) -> Any:
            x, buffers = carry
            x, values = layer(x, rotary, segment_ids)
            return x, capture.write(buffers, values, slots, *at)

        return self._decoder().scan(params, block, carry, slots, capture.bits_of)

    def _pipelined(
        self, capture: Capture, params: Any, embed: Embedding, *batch: Array
    ) -> dict[int, Array]:
        """All stages at once, each on another micro-batch.

        After M + stages - 1 ticks M micro-batches have passed; stage s works on micro-batch t - s
        at tick t. Each stage captures its own layers' hooks.
        """
        stages, (rows, length) = self.stages, batch[0].shape
        count = self.micro_batches(rows)
        per_stage = jax.tree.map(lambda w: w.reshape(stages, -1, *w.shape[1:]), params)
        token_ids, segment_ids, positions = (
            x.reshape(-1, count, length).swapaxes(0, 1) for x in batch
        )
        numbers = jnp.arange(stages)

        def stage(params: Any, slots: Slots, x: Array, buffers: Buffers, number: Array) -> Any:
            """number: of the micro-batch.

            In the bubble before the first micro-batch a stage writes what it will write again; in
            the one after the last, that one comes once more. So neither needs a mask.
            """
            number = jnp.clip(number, 0, count - 1)
            rows = segment_ids[number], positions[number]
            return self._run(capture, params, slots, (x, buffers), *rows, number)

        def tick(carry: tuple[Array, Buffers], time: Array) -> tuple[Any, None]:
            x, buffers = carry
            x = jnp.roll(x, 1, axis=0).at[0].set(embed_tokens(time))
            x = self.layout.constrain(x, "stage", *STREAM)
            return jax.vmap(stage, spmd_axis_name="pipeline")(
                per_stage, capture.slots(), x, buffers, time - numbers
            ), None

        def embed_tokens(time: Array) -> Array:
            return embed(token_ids[jnp.minimum(time, count - 1)])

        x = jnp.zeros((stages, *token_ids.shape[1:], self.config.hidden_size), self.dtype)
        carry = x, capture.buffers(*token_ids.shape)
        with jax.named_scope("layers"):
            (_, buffers), _ = lax.scan(tick, carry, jnp.arange(count + stages - 1))
        return capture.result(buffers, rows)


def create_model_with_hooks(
    config: QwenConfig,
    hooks: Sequence[Hook],
    dtype: Any = jnp.float32,
    activation_dtype: Any = None,
    attention: Attention = blocked_attention,
    layout: Layout | None = None,
) -> HookedQwen2:
    """The model that computes `hooks` and no more.

    dtype: of weights and matrix products (float32 or bfloat16; accumulation is float32);
    activation_dtype: of the result, default `dtype`; layout: the mesh to run on, default one
    device. Raises ValueError without hooks.
    """
    if not hooks:
        raise ValueError("at least one hook is needed")
    layout = layout or Layout()
    return HookedQwen2(
        config,
        tuple(sorted(set(hooks))),
        dtype,
        activation_dtype or dtype,
        attention,
        layout,
        stages=layout.size("pipeline"),
    )


QWEN2 = ModelFamily(QwenConfig, Qwen2, create_model_with_hooks, weight_table, HOOKS)
