"""The hooked model: which hook points exist, what they are called, and how they are captured.

A hook point is a layer and a kind. Names are TransformerLens's, meanings are
  residual  blocks.k.hook_resid_post  the residual stream after block k, before any final norm
                                      (Hugging Face hidden_states[k + 1], but for the last layer)
  attn      blocks.k.hook_attn_out    attention output after o_proj, before it is added
  mlp       blocks.k.hook_mlp_out     MLP output, before it is added
The hooked model has the layers up to the last requested one, and neither final norm nor lm_head.
"""

import fnmatch
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from activation_extraction.cli.errors import InputError
from activation_extraction.model.attention import Attention, blocked_attention
from activation_extraction.model.mesh import Layout
from qwen2_jax import STREAM, Decoder, Embedding, QwenConfig, rotary_table

CAPTURED = "batch", "captured_sequence", "hidden"  # logical axes of a hook's value when stored

# In the order in which a layer computes them.
HOOK_NAMES = {"attn": "hook_attn_out", "mlp": "hook_mlp_out", "residual": "hook_resid_post"}
KINDS = tuple(HOOK_NAMES)


class Hook(NamedTuple):
    """A hook point. Hooks sort in the order in which the model computes them."""

    layer: int
    order: int  # of the kind within its layer: an index into KINDS

    @property
    def kind(self) -> str:
        return KINDS[self.order]

    @property
    def name(self) -> str:
        return f"blocks.{self.layer}.{HOOK_NAMES[self.kind]}"


def hooks_for_layers(layers: Sequence[int], activation_type: str, depth: int) -> tuple[Hook, ...]:
    """One hook per layer. Raises InputError for a layer outside 0 .. depth - 1."""
    for layer in layers:
        if not 0 <= layer < depth:
            raise InputError(f"--layers_to_extract {layer}: the model has layers 0 to {depth - 1}")
    return tuple(sorted(Hook(layer, KINDS.index(activation_type)) for layer in set(layers)))


def hooks_matching(patterns: Sequence[str], depth: int) -> tuple[Hook, ...]:
    """The hooks whose names match any glob. Raises InputError for a pattern that matches none."""
    every = [Hook(layer, order) for layer in range(depth) for order in range(len(KINDS))]
    matched: set[Hook] = set()
    for pattern in patterns:
        found = {hook for hook in every if fnmatch.fnmatchcase(hook.name, pattern)}
        if not found:
            known = ", ".join(f"blocks.<layer>.{name}" for name in HOOK_NAMES.values())
            raise InputError(
                f"--hook_names {pattern}: matches no hook; there are {known} "
                f"for layers 0 to {depth - 1}"
            )
        matched |= found
    return tuple(sorted(matched))


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

    @nn.compact
    def __call__(self, token_ids: Array, segment_ids: Array, positions: Array) -> Array:
        """All (B, T) int32. Returns (hooks, B, T, D) in activation_dtype, hooks in their order."""
        embed = Embedding(self.config, self.dtype, self.layout, name="embed_tokens")
        decoder = Decoder(self.config, self.dtype, self.attention, self.layout)
        params = self.param("layers", decoder.init, self.stages * self.layers_per_stage)
        captured: Array
        if self.stages == 1 or self.is_initializing():
            captured = self._scanned(decoder, params, embed, token_ids, segment_ids, positions)
        else:
            batch = token_ids, segment_ids, positions
            captured = self._pipelined(decoder, params, embed, batch)
        return lax.bitcast_convert_type(captured, self.activation_dtype)

    def _orders(self) -> list[int]:
        """The kinds in use, as places within a layer."""
        return sorted({hook.order for hook in self.hooks})

    def _scanned(
        self,
        decoder: Decoder,
        params: Any,
        embed: Embedding,
        token_ids: Array,
        segment_ids: Array,
        positions: Array,
    ) -> Array:
        """One loop over all layers. Returns bits, (hooks, B, T, D).

        Every kind in use is written at every layer, into the slot of the next hook to come: a value
        nobody asked for is overwritten before the loop ends. So memory grows with the hooks, not
        with the depth. What is computed after the last hook goes into one spare slot.
        """
        orders = self._orders()
        layers = self.stages * self.layers_per_stage
        rotary = rotary_table(positions, self.config)
        slots = jnp.asarray(
            [
                [sum(hook < Hook(layer, order) for hook in self.hooks) for order in orders]
                for layer in range(layers)
            ],
            jnp.int32,
        )

        def block(layer: Callable, carry: tuple[Array, Array], slots: Array) -> Any:
            x, captured = carry
            x, added = layer(x, rotary, segment_ids)
            values = added | {"residual": x}
            for order, slot in zip(orders, slots, strict=True):
                value = self._captured_bits(values[KINDS[order]])
                captured = lax.dynamic_update_index_in_dim(captured, value, slot, axis=0)
            return x, captured

        x = embed(token_ids)
        spare = int(self.hooks[-1] != Hook(layers - 1, orders[-1]))
        captured = self._no_bits(len(self.hooks) + spare, *x.shape)
        captured = self.layout.constrain(captured, "hooks", *CAPTURED)
        with jax.named_scope("layers"):
            _, captured = decoder.scan(params, block, (x, captured), slots)
        return captured[: len(self.hooks)]

    def _pipelined(
        self, decoder: Decoder, params: Any, embed: Embedding, batch: tuple[Array, Array, Array]
    ) -> Array:
        """All stages at once, each on another micro-batch. Returns bits, (hooks, B, T, D).

        After M + stages - 1 ticks M micro-batches have passed; stage s works on micro-batch t - s
        at tick t. Each stage captures its own layers' hooks, in a buffer as long as the longest.
        """
        stages, orders = self.stages, self._orders()
        count = self.micro_batches(batch[0].shape[0])
        per_stage = jax.tree.map(lambda w: w.reshape(stages, -1, *w.shape[1:]), params)
        token_ids, segment_ids, positions = (
            x.reshape(-1, count, x.shape[1]).swapaxes(0, 1) for x in batch
        )
        slots, places = self._stage_slots(orders)
        numbers = jnp.arange(stages)

        def stage(params: Any, slots: Array, x: Array, captured: Array, number: Array) -> Any:
            """number: of the micro-batch; slots: -1 where nothing is to be captured.

            In the bubble before the first micro-batch a stage writes what it will write again; in
            the one after the last, that one comes once more. So neither needs a mask.
            """
            number = jnp.clip(number, 0, count - 1)
            rotary = rotary_table(positions[number], self.config)

            def block(layer: Callable, carry: tuple[Array, Array], slots: Array) -> Any:
                x, captured = carry
                x, added = layer(x, rotary, segment_ids[number])
                values = added | {"residual": x}
                for order, slot in zip(orders, slots, strict=True):
                    value = self._captured_bits(values[KINDS[order]])
                    at = jnp.maximum(slot, 0), number, 0, 0, 0
                    kept = lax.dynamic_slice(captured, at, (1, 1, *value.shape))
                    value = jnp.where(slot >= 0, value[None, None], kept)
                    captured = lax.dynamic_update_slice(captured, value, at)
                return x, captured

            return decoder.scan(params, block, (x, captured), slots)

        def tick(carry: tuple[Array, Array], time: Array) -> tuple[Any, None]:
            x, captured = carry
            x = jnp.roll(x, 1, axis=0).at[0].set(embed_tokens(time))
            x = self.layout.constrain(x, "stage", *STREAM)
            x, captured = jax.vmap(stage, spmd_axis_name="pipeline")(
                per_stage, slots, x, captured, time - numbers
            )
            return (x, captured), None

        def embed_tokens(time: Array) -> Array:
            return embed(token_ids[jnp.minimum(time, count - 1)])

        x = jnp.zeros((stages, *token_ids.shape[1:], self.config.hidden_size), self.dtype)
        captured = self._no_bits(stages, max(map(len, places)), count, *x.shape[1:])
        captured = self.layout.constrain(captured, "stage", "hooks", "micro_batch", *CAPTURED)
        with jax.named_scope("layers"):
            (_, captured), _ = lax.scan(tick, (x, captured), jnp.arange(count + stages - 1))
        captured = captured.swapaxes(2, 3).reshape(-1, *batch[0].shape, self.config.hidden_size)
        captured = self.layout.constrain(captured, "hooks", "batch", "leaving_sequence", "hidden")
        longest = captured.shape[0] // stages
        return captured[
            jnp.asarray([s * longest + n for s in range(stages) for n in range(len(places[s]))])
        ]

    def micro_batches(self, rows: int) -> int:
        """How many pass through the pipeline per step: one row of every data-parallel device."""
        return max(rows // self.layout.size("data", "fsdp"), 1)

    def _stage_slots(self, orders: list[int]) -> tuple[Array, list[list[Hook]]]:
        """(stages, layers per stage, kinds in use) -> slot or -1; and the hooks of every stage."""
        length = self.layers_per_stage
        of_stage = [[h for h in self.hooks if h.layer // length == s] for s in range(self.stages)]
        slots = [
            [
                [
                    of_stage[s].index(hook)
                    if (hook := Hook(s * length + k, order)) in of_stage[s]
                    else -1
                    for order in orders
                ]
                for k in range(length)
            ]
            for s in range(self.stages)
        ]
        return jnp.asarray(slots, jnp.int32), of_stage

    def _captured_bits(self, value: Array) -> Array:
        """A hook's value as it is stored, each device of `model` keeping a part of the row."""
        return self.layout.constrain(_bits(value.astype(self.activation_dtype)), *CAPTURED)

    def _no_bits(self, *shape: int) -> Array:
        return _bits(jnp.zeros(shape, self.activation_dtype))


def _bits(x: Array) -> Array:
    """The same bits as unsigned integers, which the CPU updates in place (see bits.py).

    For float32 too: XLA then keeps the layout in which results leave out of the loop.
    """
    return lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)


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
