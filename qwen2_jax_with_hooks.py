"""The hooked model: which hook points exist, what they are called, and how they are captured.

A hook point is a layer and a kind. Names are TransformerLens's, meanings are
  residual  blocks.k.hook_resid_post  the residual stream after block k, before any final norm
                                      (Hugging Face hidden_states[k + 1], but for the last layer)
  attn      blocks.k.hook_attn_out    attention output after o_proj, before it is added
  mlp       blocks.k.hook_mlp_out     MLP output, before it is added
The hooked model has the layers up to the last requested one, and neither final norm nor lm_head.
"""

import fnmatch
from collections.abc import Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from activation_extraction.attention import Attention, blocked_attention
from activation_extraction.errors import InputError
from qwen2_jax import DecoderLayer, Embedding, QwenConfig, rotary_table, scan_layers

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

    Its parameters are the corresponding part of `qwen2_jax.Qwen2`'s.
    """

    config: QwenConfig
    hooks: tuple[Hook, ...]
    dtype: Any = jnp.float32
    activation_dtype: Any = jnp.float32
    attention: Attention = blocked_attention

    @property
    def num_layers(self) -> int:
        """Layers that are loaded and run."""
        return self.hooks[-1].layer + 1

    def setup(self) -> None:
        self.embed_tokens = Embedding(self.config, self.dtype)
        self.layers = DecoderLayer(self.config, self.dtype, self.attention)

    def __call__(self, token_ids: Array, segment_ids: Array, positions: Array) -> Array:
        """All (B, T) int32. Returns (hooks, B, T, D) in activation_dtype, hooks in their order.

        Every kind in use is written at every layer, into the slot of the next hook to come: a value
        nobody asked for is overwritten before the loop ends. So memory grows with the hooks, not
        with the depth. What is computed after the last hook goes into one spare slot.
        """
        orders = sorted({hook.order for hook in self.hooks})
        rotary = rotary_table(positions, self.config)
        slots = jnp.asarray(
            [
                [sum(hook < Hook(layer, order) for hook in self.hooks) for order in orders]
                for layer in range(self.num_layers)
            ],
            jnp.int32,
        )

        def block(
            layer: DecoderLayer, carry: tuple[Array, Array], slots: Array
        ) -> tuple[Array, Array]:
            x, captured = carry
            x, values = layer(x, rotary, segment_ids)
            for order, slot in zip(orders, slots, strict=True):
                value = _bits(values[KINDS[order]].astype(self.activation_dtype))
                captured = lax.dynamic_update_index_in_dim(captured, value, slot, axis=0)
            return x, captured

        x = self.embed_tokens(token_ids)
        spare = int(self.hooks[-1].order != orders[-1])
        slot_count = len(self.hooks) + spare
        captured = _bits(jnp.zeros((slot_count, *x.shape), self.activation_dtype))
        with jax.named_scope("layers"):
            _, captured = scan_layers(self.layers, self.num_layers, block, (x, captured), slots)
        return lax.bitcast_convert_type(captured[: len(self.hooks)], self.activation_dtype)


def _bits(x: Array) -> Array:
    """The same bits as unsigned integers, which the CPU updates in place (see `from_bits`)."""
    return lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)


def create_model_with_hooks(
    config: QwenConfig,
    hooks: Sequence[Hook],
    dtype: Any = jnp.float32,
    activation_dtype: Any = None,
    attention: Attention = blocked_attention,
) -> HookedQwen2:
    """The model that computes `hooks` and no more.

    dtype: of weights and matrix products (float32 or bfloat16; accumulation is float32);
    activation_dtype: of the result, default `dtype`. Raises ValueError without hooks.
    """
    if not hooks:
        raise ValueError("at least one hook is needed")
    ordered = tuple(sorted(set(hooks)))
    return HookedQwen2(config, ordered, dtype, activation_dtype or dtype, attention)
