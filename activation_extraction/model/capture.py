"""This module moves the values of hooks from the layers that compute them into one array per form.

A loop over layers carries one buffer for each form, in which every hook has a slot. This module
decides what a slot is, which layer writes to it, and how the buffers become the result, both for a
loop over all layers and for the stages of a pipeline. The layers belong to the model's file.
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


class Writes(NamedTuple):
    """The hook kinds to write, in computing order, and each kind's slots by layer."""

    kinds: tuple[HookKind, ...]
    slots: tuple[Any, ...]

    def only(self) -> "Writes":
        """Returns what the first layer writes, with one slot for each kind."""
        return self._replace(slots=tuple(of_kind[0] for of_kind in self.slots))


@dataclass(frozen=True)
class Capture:
    """The values of some hooks are captured as one array per form."""

    hooks: tuple[Hook, ...]  # in their order
    sizes: Mapping[str, int]  # the model's, and S, the tokens of a row
    dtype: Any  # of activations
    layout: Layout

    def by_form(self) -> dict[Form, list[Hook]]:
        groups: dict[Form, list[Hook]] = {}
        for hook in self.hooks:
            groups.setdefault(self.form(hook.kind), []).append(hook)
        return groups

    def form(self, kind: HookKind) -> Form:
        return kind.form(self.sizes, self.dtype)

    def plan(self, layers: range, within: range | None = None, first: int = 0) -> Writes:
        """Plans a loop over `layers` into buffers that begin with the hooks of layer `first`.

        Every layer writes all kinds of hooks that `within` (by default these layers) has, each into
        the slot of the next hook of its form: a value that nobody asked for is overwritten before
        the loop ends. So memory grows with the hooks, not with the depth. Values that come after
        the last hook go into one spare slot. `plan_end` plans hooks that come after the last layer.
        """
        by_form, slots = self.by_form(), []
        within = layers if within is None else within
        in_layers = [hook for hook in self.hooks if not hook.kind.at_end]
        kinds = sorted({hook[1:] for hook in in_layers if hook.layer in within})
        for order, kind in kinds:
            hooks = [h[:2] for h in by_form[self.form(kind)] if h.layer >= first]
            before = [sum(hook < (layer, order) for hook in hooks) for layer in layers]
            slots.append(np.array(before, np.int32))
        return Writes(tuple(kind for _, kind in kinds), tuple(slots))

    def plan_end(self) -> Writes:
        """Plans what is written once, after the last layer."""
        by_form = self.by_form()
        kinds = [hook.kind for hook in self.hooks if hook.kind.at_end]
        slots = [[hook.kind for hook in by_form[self.form(kind)]].index(kind) for kind in kinds]
        return Writes(tuple(kinds), tuple(np.array([slot], np.int32) for slot in slots))

    def plan_stages(self, stages: int, length: int) -> Writes:
        """Plans pipeline stages that have buffers of their own; slots are (stages, length)."""
        layers = range(stages * length)
        plans = [self.plan(layers[k : k + length], layers, first=k) for k in layers[::length]]
        slots = zip(*(plan.slots for plan in plans), strict=True)
        return Writes(plans[0].kinds, tuple(np.stack(of_stages) for of_stages in slots))

    def buffers(self, plans: Sequence[Writes], shape: Sequence[int], stages: int = 1) -> Buffers:
        """Returns empty buffers for what the plans write.

        shape: (B, T) or (micro-batches, B, T). Each of several stages has buffers of its own, all
        as long as the longest.
        """
        lengths: dict[Form, int] = {}
        for plan in plans:
            for kind, slots in zip(*plan, strict=True):
                form = self.form(kind)
                lengths[form] = max(lengths.get(form, 0), slots.max() + 1)
        several = stages > 1
        axes = ["stage"] * several + ["slots"] + ["micro_batch"] * (len(shape) - 2)
        buffers = {}
        for form, length in lengths.items():
            sizes = [stages] * several + [length, *shape, form.width]
            empty = _unsigned(jnp.zeros(sizes, form.dtype))
            buffers[form] = self.layout.constrain(empty, *axes, *CAPTURED)
        return buffers

    def bits_of(self, kinds: Iterable[HookKind], out: dict[str, Any]) -> list[Array]:
        """Returns the values of these kinds, (B, T, width), from a layer's intermediates.

        A kind that the layer's type lacks gives zeros, which are overwritten like any value that
        nobody asked for.
        """
        shape, found = out["resid_pre"].shape[:2], []
        for kind in kinds:
            x, (width, dtype) = intermediate(out, kind.value), self.form(kind)
            if x is None:
                x = jnp.zeros((*shape, width), dtype)
            found.append(_unsigned(x.reshape(*shape, -1).astype(dtype)))
        return found

    def write(self, buffers: Buffers, plan: Writes, values: Iterable[Array], *at: Array) -> Buffers:
        """Returns the buffers with one layer's values; a device of `model` keeps a part of a row.

        plan: of this layer alone, a slot for each kind. at: the index after the slot, which is the
        number of the micro-batch if there is one.
        """
        buffers = dict(buffers)
        for kind, slot, value in zip(*plan, values, strict=True):
            form, value = self.form(kind), self.layout.constrain(value, *CAPTURED)
            value = value.reshape(*[1] * (1 + len(at)), *value.shape)
            start = slot, *at, 0, 0, 0
            buffers[form] = lax.dynamic_update_slice(buffers[form], value, start)
        return buffers

    def result(self, buffers: Buffers) -> dict[Form, Array]:
        """Turns full buffers into {form: (hooks of that form, B, T, width)}."""
        return {
            form: lax.bitcast_convert_type(buffers[form][: len(hooks)], form.dtype)
            for form, hooks in self.by_form().items()
        }

    def result_of_stages(
        self, buffers: Buffers, rows: int, length: int, at_end: Mapping[HookKind, Array]
    ) -> dict[Form, Array]:
        """Does what `result` does for buffers (stages, slots, micro-batches, B, T, width).

        rows: of all micro-batches together; length: layers of a stage; at_end: the bits of the
        hooks that come after the last layer, (B, T, width).
        """
        result = {}
        for form, hooks in self.by_form().items():
            stages = [hook.layer // length for hook in hooks if not hook.kind.at_end]
            pieces = []
            if stages:
                bits = buffers[form].swapaxes(2, 3)
                bits = bits.reshape(*bits.shape[:2], rows, *bits.shape[-2:])
                axes = "stages", "slots", "batch", "leaving_sequence", "hidden"
                bits = self.layout.constrain(bits, *axes)
                pieces = [bits[stage, :count] for stage, count in enumerate(np.bincount(stages))]
            for value in (at_end[hook.kind] for hook in hooks if hook.kind.at_end):
                value = self.layout.constrain(value, "batch", "leaving_sequence", "hidden")
                pieces.append(value[None])
            result[form] = lax.bitcast_convert_type(jnp.concatenate(pieces), form.dtype)
        return result


def _unsigned(x: Array) -> Array:
    """Returns the same bits as unsigned integers, which the CPU updates in place (see `to_bits`).

    This includes float32: XLA then keeps the layout in which results leave the loop.
    """
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
