"""How the values of hooks get from the layers that compute them into one array per width.

A loop over layers carries buffers, one for each width, in which every hook has a slot. What a slot
is, which layer writes to it, and how the buffers become the result is decided here, for a loop over
all layers as for the stages of a pipeline. The layers themselves belong to the model's file.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jax import Array, lax

from activation_extraction.model.hooks import Hook, HookKind
from activation_extraction.model.mesh import Layout

CAPTURED = "batch", "captured_sequence", "hidden"  # logical axes of a hook's value when stored

Buffers = dict[int, Array]  # width -> bits of the hooks of that width, (slots, ..., B, T, width)
Slots = dict[str, Any]  # name of a kind -> the slots that layers write it to, int32


@dataclass(frozen=True)
class Capture:
    """What is captured of `stages` times `length` layers.

    hooks: in their order; sizes: letter -> size, from the model's configuration; dtype: of the
    values as they are stored.
    """

    hooks: tuple[Hook, ...]
    sizes: Mapping[str, int]
    dtype: Any
    layout: Layout
    stages: int
    length: int

    @property
    def kinds(self) -> list[HookKind]:
        """The kinds in use, in the order in which a layer computes them."""
        return [kind for _, kind in sorted({hook[1:] for hook in self.hooks})]

    def by_width(self) -> dict[int, list[Hook]]:
        """The hooks of each width, in their order."""
        found: dict[int, list[Hook]] = {}
        for hook in self.hooks:
            found.setdefault(hook.kind.width(self.sizes), []).append(hook)
        return found

    def slots(self) -> Slots:
        """Kind in use -> (stages, length): the slot that a layer writes its value to.

        Every kind in use is written at every layer, into the slot of the next hook of its width: a
        value nobody asked for is overwritten before the loop ends. So memory grows with the hooks,
        not with the depth. What comes after the last hook goes into one spare slot.
        """
        firsts = np.arange(self.stages) * self.length
        return {
            hook.kind.name: np.array(
                [
                    [
                        sum((first, 0) <= h[:2] < (layer, hook.order) for h in hooks)
                        for layer in range(first, first + self.length)
                    ]
                    for first in firsts
                ],
                np.int32,
            )
            for hooks in self.by_width().values()
            for hook in hooks
        }

    def buffers(self, *shape: int) -> Buffers:
        """Empty buffers. shape: of the rows, (B, T) or (micro-batches, B, T).

        With several stages each has buffers of its own, as long as the longest.
        """
        slots, found = self.slots(), {}
        stages = () if self.stages == 1 else (self.stages,)
        axes = ("stage",) * len(stages) + ("slots",) + ("micro_batch",) * (len(shape) - 2)
        for width, hooks in self.by_width().items():
            count = 1 + max(slots[hook.kind.name].max() for hook in hooks)
            empty = _bits(jnp.zeros((*stages, count, *shape, width), self.dtype))
            found[width] = self.layout.constrain(empty, *axes, *CAPTURED)
        return found

    def bits_of(self, out: dict[str, Any]) -> dict[str, Array]:
        """The values of the kinds in use, (B, T, width), from a layer's intermediates."""
        found = flatten_dict(out, sep=".")
        values = {kind.name: found[kind.value] for kind in self.kinds}
        return {
            name: _bits(value.reshape(*value.shape[:2], -1).astype(self.dtype))
            for name, value in values.items()
        }

    def write(
        self, buffers: Buffers, values: dict[str, Array], slots: Slots, *at: Array
    ) -> Buffers:
        """Buffers with one layer's values, each device of `model` keeping a part of the row.

        slots: of this layer; at: what follows the slot, the number of the micro-batch if there is
        one.
        """
        buffers = dict(buffers)
        for kind in self.kinds:
            value = self.layout.constrain(values[kind.name], *CAPTURED)
            width = value.shape[-1]
            value = value.reshape(*[1] * (1 + len(at)), *value.shape)
            start = slots[kind.name], *at, 0, 0, 0
            buffers[width] = lax.dynamic_update_slice(buffers[width], value, start)
        return buffers

    def result(self, buffers: Buffers, rows: int) -> dict[int, Array]:
        """Full buffers -> {width: (hooks of that width, B, T, width)}."""
        leave = self._from_stages if self.stages > 1 else lambda bits, hooks, _: bits[: len(hooks)]
        return {
            width: lax.bitcast_convert_type(leave(buffers[width], hooks, rows), self.dtype)
            for width, hooks in self.by_width().items()
        }

    def _from_stages(self, bits: Array, hooks: list[Hook], rows: int) -> Array:
        """From (stages, slots, micro-batches, B, T, width)."""
        bits = bits.swapaxes(2, 3).reshape(*bits.shape[:2], rows, *bits.shape[-2:])
        axes = "stages", "slots", "batch", "leaving_sequence", "hidden"
        bits = self.layout.constrain(bits, *axes)
        counts = np.bincount([hook.layer // self.length for hook in hooks])
        return jnp.concatenate([bits[stage, :count] for stage, count in enumerate(counts)])


def _bits(x: Array) -> Array:
    """The same bits as unsigned integers, which the CPU updates in place (see bits.py).

    For float32 too: XLA then keeps the layout in which results leave out of the loop.
    """
    return lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)
