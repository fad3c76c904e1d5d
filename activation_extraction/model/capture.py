"""How the values of hooks get from the layers that compute them into one array per form.

A loop over layers carries buffers, one for each form, in which every hook has a slot. What a slot
is, which layer writes to it, and how the buffers become the result is decided here, for a loop over
all layers as for the stages of a pipeline. The layers themselves belong to the model's file.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from activation_extraction.model.decoder import intermediate
from activation_extraction.model.hooks import Form, Hook, HookKind
from activation_extraction.model.mesh import Layout

CAPTURED = "batch", "captured_sequence", "hidden"  # logical axes of a hook's value when stored

Buffers = dict[Form, Array]  # form -> bits of the hooks of that form, (slots, ..., B, T, width)


class Plan(NamedTuple):
    """What layers write: kinds in the order of computing, and for each kind the slots by layer."""

    kinds: tuple[HookKind, ...]
    slots: tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Capture:
    """hooks: in their order; sizes: letter -> size, from the model's configuration, and of S, the
    tokens of a row; dtype: of activations as they are stored."""

    hooks: tuple[Hook, ...]
    sizes: Mapping[str, int]
    dtype: Any
    layout: Layout

    def by_form(self) -> dict[Form, list[Hook]]:
        """The hooks of each form, in their order."""
        found: dict[Form, list[Hook]] = {}
        for hook in self.hooks:
            found.setdefault(self.form(hook.kind), []).append(hook)
        return found

    def form(self, kind: HookKind) -> Form:
        return kind.form(self.sizes, self.dtype)

    def plan(self, layers: range, within: range | None = None, first: int = 0) -> Plan:
        """Plans a loop over `layers`, into buffers that begin with the hooks of layer `first`.

        All kinds that `within` (by default: these layers) has hooks of are written at every layer,
        into the slot of the next hook of their form: a value nobody asked for is overwritten
        before the loop ends. So memory grows with the hooks, not with the depth. What comes after
        the last hook goes into one spare slot.
        """
        by_form, slots = self.by_form(), []
        within = layers if within is None else within
        kinds = sorted({hook[1:] for hook in self.hooks if hook.layer in within})
        for order, kind in kinds:
            hooks = [h[:2] for h in by_form[self.form(kind)] if h.layer >= first]
            before = [sum(hook < (layer, order) for hook in hooks) for layer in layers]
            slots.append(np.array(before, np.int32))
        return Plan(tuple(kind for _, kind in kinds), tuple(slots))

    def plan_stages(self, stages: int, length: int) -> Plan:
        """Plans pipeline stages that have buffers of their own: slots are (stages, length)."""
        every = range(stages * length)
        plans = [self.plan(every[k : k + length], every, first=k) for k in every[::length]]
        slots = zip(*(plan.slots for plan in plans), strict=True)
        return Plan(plans[0].kinds, tuple(np.stack(of_stages) for of_stages in slots))

    def buffers(self, plans: Sequence[Plan], shape: Sequence[int], stages: int = 1) -> Buffers:
        """Empty buffers for what the plans write.

        shape: of the rows, (B, T) or (micro-batches, B, T). Each of several stages has buffers of
        its own, as long as the longest.
        """
        lengths: dict[Form, int] = {}
        for plan in plans:
            for kind, slots in zip(*plan, strict=True):
                form = self.form(kind)
                lengths[form] = max(lengths.get(form, 0), slots.max() + 1)
        many = stages > 1
        axes = [*["stage"] * many, "slots", *["micro_batch"] * (len(shape) - 2), *CAPTURED]
        empty = {
            form: _bits(jnp.zeros((*[stages] * many, length, *shape, form.width), form.dtype))
            for form, length in lengths.items()
        }
        return {form: self.layout.constrain(bits, *axes) for form, bits in empty.items()}

    def bits_of(self, kinds: Iterable[HookKind], out: dict[str, Any]) -> list[Array]:
        """The values of these kinds, (B, T, width), from a layer's intermediates.

        Zeros for a kind that the layer's type lacks; they are overwritten like any value that
        nobody asked for.
        """
        shape = out["resid_pre"].shape[:2]

        def value(kind: HookKind) -> Array:
            x, (width, dtype) = intermediate(out, kind.value), self.form(kind)
            if x is None:
                return jnp.zeros((*shape, width), dtype)
            return x.reshape(*shape, -1).astype(dtype)

        return [_bits(value(kind)) for kind in kinds]

    def write(
        self,
        buffers: Buffers,
        kinds: Iterable[HookKind],
        values: Iterable[Array],
        slots: Iterable[Any],
        *at: Array,
    ) -> Buffers:
        """Buffers with one layer's values, each device of `model` keeping a part of the row.

        at: what follows the slot, the number of the micro-batch if there is one.
        """
        buffers = dict(buffers)
        for kind, value, slot in zip(kinds, values, slots, strict=True):
            form = self.form(kind)
            value = self.layout.constrain(value, *CAPTURED)
            value = value.reshape(*[1] * (1 + len(at)), *value.shape)
            start = slot, *at, 0, 0, 0
            buffers[form] = lax.dynamic_update_slice(buffers[form], value, start)
        return buffers

    def result(self, buffers: Buffers) -> dict[Form, Array]:
        """Full buffers -> {form: (hooks of that form, B, T, width)}."""
        return {
            form: lax.bitcast_convert_type(buffers[form][: len(hooks)], form.dtype)
            for form, hooks in self.by_form().items()
        }

    def result_of_stages(self, buffers: Buffers, rows: int, length: int) -> dict[Form, Array]:
        """Does what `result` does, with buffers (stages, slots, micro-batches, B, T, width).

        rows: of all micro-batches together; length: layers of a stage.
        """
        found = {}
        for form, hooks in self.by_form().items():
            bits = buffers[form].swapaxes(2, 3)
            bits = bits.reshape(*bits.shape[:2], rows, *bits.shape[-2:])
            axes = "stages", "slots", "batch", "leaving_sequence", "hidden"
            bits = self.layout.constrain(bits, *axes)
            counts = np.bincount([hook.layer // length for hook in hooks])
            joined = jnp.concatenate([bits[stage, :count] for stage, count in enumerate(counts)])
            found[form] = lax.bitcast_convert_type(joined, form.dtype)
        return found


def _bits(x: Array) -> Array:
    """The same bits as unsigned integers, which the CPU updates in place (see `to_bits`).

    For float32 too: XLA then keeps the layout in which results leave out of the loop.
    """
    return lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint32)
