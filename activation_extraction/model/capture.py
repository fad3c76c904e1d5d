"""The values of hooks are moved from the layers that compute them into one array per form.

A loop over layers carries a buffer for each form (hooks.py), in which every hook has a slot. A
`Plan` says which slots a layer writes to. `Capture` makes the plans and the buffers, writes to
them, and turns full buffers into the result, both for a loop over all layers and for the stages of
a pipeline. The layers themselves belong to qwen2_jax.py, and the loops to qwen2_jax_with_hooks.py.

Letters: B rows, T tokens per row.
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

# Logical axes of a hook's value (B, T, width), in a buffer and on its way to the host.
CAPTURED = "batch", "captured_sequence", "hidden"
LEAVING = "batch", "leaving_sequence", "hidden"

# Form -> the bits of the hooks of that form as unsigned integers, (slots, B, T, width); in a
# pipeline (stages, slots, micro-batches, B, T, width), where B is the rows of a micro-batch.
Buffers = dict[Form, Array]


class Plan(NamedTuple):
    """The kinds of hooks that are written together, and the slot of each kind.

    Attributes:
        kinds: The kinds, in the order in which a layer computes them.
        slots: For each kind, the slots in the buffer of its form, int32: (layers,) for a loop over
            layers, (stages, layers of a stage) for a pipeline, and () for a single layer.
    """

    kinds: tuple[HookKind, ...]
    slots: tuple[Any, ...]

    def with_slots(self, slots: tuple[Any, ...]) -> "Plan":
        """Returns the plan of a part of its layers, for example of one stage or one layer.

        Args:
            slots: The slots of that part, for each kind.
        """
        return self._replace(slots=slots)


@dataclass(frozen=True)
class Capture:
    """Captures the values of hooks as one array per form.

    Attributes:
        hooks: The hooks, in the order in which they are computed.
        sizes: Letter -> size, for the letters of the model and S, the tokens of a row.
        dtype: The dtype of activations. Some kinds of hooks have a dtype of their own.
        layout: The mesh.
    """

    hooks: tuple[Hook, ...]
    sizes: Mapping[str, int]
    dtype: Any
    layout: Layout

    def form(self, kind: HookKind) -> Form:
        return kind.form(self.sizes, self.dtype)

    def by_form(self) -> dict[Form, list[Hook]]:
        """Returns form -> its hooks, in the order in which they are computed."""
        groups: dict[Form, list[Hook]] = {}
        for hook in self.hooks:
            groups.setdefault(self.form(hook.kind), []).append(hook)
        return groups

    def plan(self, layers: range) -> Plan:
        """Plans a loop over layers.

        Every layer writes all kinds of hooks that any layer has, each into the slot of the next
        hook of its form. If that hook is of a later layer, its own value overwrites this one before
        the loop ends; if there is none, the slot is a spare one after those of the hooks. So memory
        grows with the hooks and not with the depth.

        Args:
            layers: The layers. The buffers begin with the hooks of the first of them.
        """
        kinds = {hook.order: hook.kind for hook in self.hooks if not hook.kind.at_end}
        by_form = self.by_form()
        orders = sorted(kinds)
        slots = []
        for order in orders:
            hooks = [
                (hook.layer, hook.order)
                for hook in by_form[self.form(kinds[order])]
                if hook.layer >= layers.start
            ]
            earlier = [sum(hook < (layer, order) for hook in hooks) for layer in layers]
            slots.append(np.array(earlier, np.int32))
        return Plan(tuple(kinds[order] for order in orders), tuple(slots))

    def plan_stages(self, stages: int, length: int) -> Plan:
        """Plans the stages of a pipeline, each of which has buffers of its own.

        Args:
            stages: The number of stages.
            length: The number of layers in a stage.
        """
        firsts = range(0, stages * length, length)
        plans = [self.plan(range(first, first + length)) for first in firsts]
        slots_by_kind = zip(*(plan.slots for plan in plans), strict=True)
        return plans[0].with_slots(tuple(np.stack(of_stages) for of_stages in slots_by_kind))

    def plan_end(self) -> Plan:
        """Plans the hooks that come once, after the last layer."""
        by_form = self.by_form()
        hooks = [hook for hook in self.hooks if hook.kind.at_end]
        slots = [by_form[self.form(hook.kind)].index(hook) for hook in hooks]
        kinds = tuple(hook.kind for hook in hooks)
        return Plan(kinds, tuple(np.int32(slot) for slot in slots))

    def buffers(self, plans: Sequence[Plan], shape: Sequence[int], stages: int = 1) -> Buffers:
        """Returns empty buffers for all that the plans write.

        Args:
            plans: The plans that write to the buffers.
            shape: (B, T), or (micro-batches, B, T) in a pipeline.
            stages: The number of pipeline stages. The buffers of all of them are as long as those
                of the stage with most hooks.
        """
        counts: dict[Form, int] = {}
        for plan in plans:
            for kind, slots in zip(plan.kinds, plan.slots, strict=True):
                form = self.form(kind)
                counts[form] = max(counts.get(form, 0), slots.max() + 1)
        buffers = {}
        for form, count in counts.items():
            sizes = [count, *shape, form.width]
            axes = ["slots", *CAPTURED]
            if stages > 1:
                sizes = [stages, *sizes]
                axes = ["stage", "slots", "micro_batch", *CAPTURED]
            empty = _unsigned(jnp.zeros(sizes, form.dtype))
            buffers[form] = self.layout.constrain(empty, *axes)
        return buffers

    def bits_of(self, kinds: Iterable[HookKind], out: dict[str, Any]) -> list[Array]:
        """Returns the values of hooks as bits, for each kind (B, T, width).

        A kind that the type of the layer lacks gives zeros, which are overwritten like any value
        that no hook asks for.

        Args:
            kinds: The kinds of the hooks.
            out: The intermediates of a layer; `resid_pre` is one of them.
        """
        shape = out["resid_pre"].shape[:2]
        values = []
        for kind in kinds:
            form = self.form(kind)
            x = intermediate(out, kind.intermediate)
            if x is None:
                x = jnp.zeros((*shape, form.width), form.dtype)
            values.append(_unsigned(x.reshape(*shape, -1).astype(form.dtype)))
        return values

    def write(
        self,
        buffers: Buffers,
        plan: Plan,
        values: Iterable[Array],
        micro_batch: Array | None = None,
    ) -> Buffers:
        """Returns the buffers with the values of one layer.

        Args:
            buffers: The buffers, of one stage in a pipeline.
            plan: The plan of this layer alone, with one slot for each kind.
            values: The bits of each kind, (B, T, width).
            micro_batch: The number of the micro-batch in a pipeline, () int32; None without one.
        """
        buffers = dict(buffers)
        for kind, slot, value in zip(plan.kinds, plan.slots, values, strict=True):
            form = self.form(kind)
            value = self.layout.constrain(value, *CAPTURED)
            entry = (slot,) if micro_batch is None else (slot, micro_batch)
            value = value.reshape(*[1] * len(entry), *value.shape)
            buffers[form] = lax.dynamic_update_slice(buffers[form], value, (*entry, 0, 0, 0))
        return buffers

    def result(self, buffers: Buffers) -> dict[Form, Array]:
        """Returns form -> the values of its hooks, (hooks of the form, B, T, width).

        Args:
            buffers: The full buffers of a loop over all layers.
        """
        return {
            form: lax.bitcast_convert_type(buffers[form][: len(hooks)], form.dtype)
            for form, hooks in self.by_form().items()
        }

    def result_of_stages(
        self, buffers: Buffers, rows: int, length: int, at_end: Mapping[HookKind, Array]
    ) -> dict[Form, Array]:
        """Returns form -> the values of its hooks, (hooks of the form, rows, T, width).

        Args:
            buffers: The full buffers of the stages of a pipeline.
            rows: The rows of all micro-batches together.
            length: The number of layers in a stage.
            at_end: The bits of the hooks that come after the last layer, (rows, T, width).
        """
        result = {}
        for form, hooks in self.by_form().items():
            pieces = []
            stages = [hook.layer // length for hook in hooks if not hook.kind.at_end]
            if stages:
                bits = buffers[form].swapaxes(2, 3)
                bits = bits.reshape(*bits.shape[:2], rows, *bits.shape[-2:])
                bits = self.layout.constrain(bits, "stages", "slots", *LEAVING)
                hooks_by_stage = np.bincount(stages)
                pieces = [bits[stage, :count] for stage, count in enumerate(hooks_by_stage)]
            for hook in hooks:
                if hook.kind.at_end:
                    value = self.layout.constrain(at_end[hook.kind], *LEAVING)
                    pieces.append(value[None])
            result[form] = lax.bitcast_convert_type(jnp.concatenate(pieces), form.dtype)
        return result


def _unsigned(x: Array) -> Array:
    """Returns the same bits as unsigned integers, which the CPU updates in place (see `to_bits`).

    This includes float32: XLA then keeps the layout in which results leave the loop.
    """
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
