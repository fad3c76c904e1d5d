"""Collects the values at hooks in a few arrays, while a loop over layers runs.

Hooks whose values have the same width and dtype share one array (see `hooks.WidthAndDtype`). The
loop carries one such array, called a buffer, for each width and dtype. Each hook has a slot in its
buffer: an index of the buffer's first axis. A `CapturePlan` contains the slots to which layers
write.

`Capture` makes the plans and the buffers, and writes the values at the hooks to the buffers. After
the last layer, it returns these values from the buffers, in the order of the hooks. `Capture` works
for one loop over all layers and for the stages of a pipeline. The layers belong to qwen2_jax.py,
and the loops to qwen2_jax_with_hooks.py.

Letters: B rows, T tokens per row.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from activation_extraction.model.decoder import intermediate
from activation_extraction.model.hooks import Hook, HookKind, WidthAndDtype
from activation_extraction.model.mesh import Layout

# The logical axes (see mesh.RULES) of a hook's values (B, T, width) in a buffer.
CAPTURED_AXES = "batch", "captured_sequence", "hidden"
# The logical axes of a hook's values (rows, T, width) after the stages of a pipeline, when the
# values leave the devices for the host.
LEAVING_AXES = "batch", "leaving_sequence", "hidden"

# Width and dtype -> the buffer with the values at all hooks that have this width and dtype, as
# unsigned integers with the same bits. The shape is (slots, B, T, width), with a slot for each
# hook. In a pipeline, the shape is (stages, slots, micro-batches, B, T, width), with a slot for
# each hook of a stage, and B is the number of rows of a micro-batch.
BufferByWidthAndDtype = dict[WidthAndDtype, Array]


class CapturePlan(NamedTuple):
    """The kinds of hooks whose values layers write to buffers, and the slots of each kind.

    A slot is an index of the first axis of the buffer for the width and dtype of the kind (see
    `BufferByWidthAndDtype`).

    Attributes:
        kinds: The kinds, in the order in which a layer computes them.
        buffer_slots_of_kinds: For each kind, its slots in its buffer, int32. The shape is (layers,)
            for a loop over layers, (stages, layers of a stage) for a pipeline, and () for a single
            layer.
    """

    kinds: tuple[HookKind, ...]
    buffer_slots_of_kinds: tuple[Any, ...]

    def with_slots(self, buffer_slots_of_kinds: tuple[Any, ...]) -> "CapturePlan":
        """Returns a copy of this plan with other slots, for example for the layers of one stage.

        Args:
            buffer_slots_of_kinds: For each kind, the slots to which layers write its values, int32.
                The shape is (layers,) for a loop over layers, and () for a single layer. A slot is
                an index of the first axis of a buffer.
        """
        return self._replace(buffer_slots_of_kinds=buffer_slots_of_kinds)


@dataclass(frozen=True)
class Capture:
    """Captures the values at hooks. Hooks with the same width and dtype share one buffer.

    Attributes:
        hooks: The hooks, in the order in which they are computed.
        size_by_axis_letter: Letter of an axis -> its size, for all letters in
            `HookKind.axis_letters`.
        dtype: The dtype of activations. Some kinds of hooks have a dtype of their own.
        layout: The mesh of devices, and the rules for splitting arrays along its axes.
    """

    hooks: tuple[Hook, ...]
    size_by_axis_letter: Mapping[str, int]
    dtype: Any
    layout: Layout

    def width_and_dtype(self, kind: HookKind) -> WidthAndDtype:
        """Returns the width and the dtype of the values at a kind of hook."""
        return kind.width_and_dtype(self.size_by_axis_letter, self.dtype)

    def hooks_by_width_and_dtype(self) -> dict[WidthAndDtype, list[Hook]]:
        """Groups the hooks by the width and dtype of their values.

        Returns:
            Width and dtype -> the hooks whose values have this width and dtype, in the order in
            which they are computed.
        """
        hooks_by_width_and_dtype: dict[WidthAndDtype, list[Hook]] = {}
        for hook in self.hooks:
            hooks_by_width_and_dtype.setdefault(self.width_and_dtype(hook.kind), []).append(hook)
        return hooks_by_width_and_dtype

    def plan(self, layers: range) -> CapturePlan:
        """Plans the slots of the buffers to which a loop over layers writes.

        There is a buffer for each width and dtype that hooks have, and a slot is an index of its
        first axis. Every layer writes the values of all kinds, although a kind may have a hook at
        some layers only. At a layer where the kind has a hook, its values are written to the slot
        of this hook. At another layer, they are written to the slot of the next hook in the same
        buffer, whose own values overwrite them later in the loop. If no such hook follows, they are
        written to a spare slot after the slots of all hooks. So memory grows with the number of
        hooks, not with the number of layers.

        Args:
            layers: The numbers of the layers. Hooks of earlier layers have no slots.

        Returns:
            The plan, in which the slots of each kind have the shape (layers,).
        """
        kind_by_index_in_table = {
            hook.kind_index_in_hook_table: hook.kind
            for hook in self.hooks
            if not hook.kind.is_after_layers
        }
        kind_by_index_in_table = dict(sorted(kind_by_index_in_table.items()))
        hooks_by_width_and_dtype = self.hooks_by_width_and_dtype()
        buffer_slots_of_kinds: list[np.ndarray] = []
        for kind_index_in_table, hook_kind in kind_by_index_in_table.items():
            hook_sort_keys = [
                (hook.layer_number, hook.kind_index_in_hook_table)
                for hook in hooks_by_width_and_dtype[self.width_and_dtype(hook_kind)]
                if hook.layer_number >= layers.start
            ]
            slots_of_layers = [
                sum(
                    hook_sort_key < (layer, kind_index_in_table) for hook_sort_key in hook_sort_keys
                )
                for layer in layers
            ]
            buffer_slots_of_kinds.append(np.array(slots_of_layers, np.int32))
        return CapturePlan(tuple(kind_by_index_in_table.values()), tuple(buffer_slots_of_kinds))

    def plan_stages(self, stages: int, layers_per_stage: int) -> CapturePlan:
        """Plans the slots of the buffers for a pipeline, in which each stage has its own buffers.

        Each hook of a stage has a slot: the index at which its values are stored, on the first axis
        of a buffer of the stage.

        Args:
            stages: The number of stages.
            layers_per_stage: The number of layers in each stage.

        Returns:
            The plan, in which the array of the slots of each kind has the shape (stages, layers of
            a stage).
        """
        first_layers_of_stages = range(0, stages * layers_per_stage, layers_per_stage)
        capture_plans_of_stages = [
            self.plan(range(first_layer, first_layer + layers_per_stage))
            for first_layer in first_layers_of_stages
        ]
        plan_of_first_stage = capture_plans_of_stages[0]
        buffer_slots_of_kinds: list[np.ndarray] = []
        for kind_number in range(len(plan_of_first_stage.kinds)):
            buffer_slots_of_stages = [
                capture_plan.buffer_slots_of_kinds[kind_number]
                for capture_plan in capture_plans_of_stages
            ]
            buffer_slots_of_kinds.append(np.stack(buffer_slots_of_stages))
        return plan_of_first_stage.with_slots(tuple(buffer_slots_of_kinds))

    def plan_end(self) -> CapturePlan:
        """Plans to which slots of the buffers the values at hooks after the last layer are written.

        A slot is an index of the first axis of a buffer.

        Returns:
            The plan, which contains one slot for each kind of hook after the last layer, () int32.
        """
        hooks_by_width_and_dtype = self.hooks_by_width_and_dtype()
        hooks_after_layers = [hook for hook in self.hooks if hook.kind.is_after_layers]
        buffer_slots_of_hooks_after_layers = tuple(
            np.int32(hooks_by_width_and_dtype[self.width_and_dtype(hook.kind)].index(hook))
            for hook in hooks_after_layers
        )
        return CapturePlan(
            tuple(hook.kind for hook in hooks_after_layers), buffer_slots_of_hooks_after_layers
        )

    def buffers(
        self, capture_plans: Sequence[CapturePlan], shape: Sequence[int], stages: int = 1
    ) -> BufferByWidthAndDtype:
        """Makes buffers of zeros, to which layers write the values at the hooks.

        Hooks share a buffer if their values have the same width and dtype. The first axis of a
        buffer consists of slots, each with room for the values of one hook.

        Args:
            capture_plans: All plans for writing to the buffers. A `CapturePlan` contains the slots
                to which each layer writes. A buffer gets as many slots as the plans need.
            shape: The shape of a batch: (B, T), which means B rows of T tokens, or (micro-batches,
                B, T) in a pipeline.
            stages: The number of pipeline stages; 1 without a pipeline. The buffers of all stages
                have the same size, with room for the stage with the most hooks.

        Returns:
            Width and dtype -> buffer, an array of unsigned integers, (slots, B, T, width). In a
            pipeline, the shape is (stages, slots, micro-batches, B, T, width).
        """
        slot_count_by_width_and_dtype: dict[WidthAndDtype, int] = {}
        for capture_plan in capture_plans:
            for hook_kind, buffer_slots_of_kind in zip(
                capture_plan.kinds, capture_plan.buffer_slots_of_kinds, strict=True
            ):
                width_and_dtype_of_kind = self.width_and_dtype(hook_kind)
                slot_count_by_width_and_dtype[width_and_dtype_of_kind] = max(
                    slot_count_by_width_and_dtype.get(width_and_dtype_of_kind, 0),
                    buffer_slots_of_kind.max() + 1,
                )
        buffer_by_width_and_dtype = {}
        for width_and_dtype, slot_count in slot_count_by_width_and_dtype.items():
            buffer_shape = [slot_count, *shape, width_and_dtype.width]
            buffer_axes = ["slots", *CAPTURED_AXES]
            if stages > 1:
                buffer_shape = [stages, *buffer_shape]
                buffer_axes = ["stage", "slots", "micro_batch", *CAPTURED_AXES]
            zeros_as_integers = _unsigned(jnp.zeros(buffer_shape, width_and_dtype.dtype))
            buffer_by_width_and_dtype[width_and_dtype] = self.layout.constrain(
                zeros_as_integers, *buffer_axes
            )
        return buffer_by_width_and_dtype

    def bit_patterns_of(
        self, kinds: Iterable[HookKind], intermediates: dict[str, Any]
    ) -> list[Array]:
        """Returns the values at some kinds of hooks of a layer, as unsigned integers.

        A layer does not compute the kinds of hooks that only exist in layers of other types. For
        these kinds, the values are zeros. The method `plan` chooses the indices (slots) at which
        values are written to the buffers, so that these zeros are overwritten or ignored.

        Args:
            kinds: The kinds of hooks.
            intermediates: The intermediates of the layer, nested by module. The shape of the
                intermediate `resid_pre`, which every layer has, determines B and T.

        Returns:
            A list with an array for each kind: its values as unsigned integers with the same bits,
            (B, T, width).
        """
        row_and_token_counts = intermediates["resid_pre"].shape[:2]
        value_bit_patterns_of_kinds = []
        for hook_kind in kinds:
            width_and_dtype_of_kind = self.width_and_dtype(hook_kind)
            x = intermediate(intermediates, hook_kind.path_in_intermediates)
            if x is None:
                x = jnp.zeros(
                    (*row_and_token_counts, width_and_dtype_of_kind.width),
                    width_and_dtype_of_kind.dtype,
                )
            x = x.reshape(*row_and_token_counts, -1).astype(width_and_dtype_of_kind.dtype)
            value_bit_patterns_of_kinds.append(_unsigned(x))
        return value_bit_patterns_of_kinds

    def write(
        self,
        buffer_by_width_and_dtype: BufferByWidthAndDtype,
        plan: CapturePlan,
        value_bit_patterns_of_kinds: Iterable[Array],
        micro_batch: Array | None = None,
    ) -> BufferByWidthAndDtype:
        """Writes the values that one layer computes at its hooks to the buffers.

        Args:
            buffer_by_width_and_dtype: Width and dtype -> buffer, (slots, B, T, width). In a
                pipeline, these are the buffers of one stage, (slots, micro-batches, B, T, width).
            plan: The plan for this layer alone. It has one slot for each kind: the index on the
                first axis of the buffer at which the layer's values of this kind are written.
            value_bit_patterns_of_kinds: An array for each kind of hook, in the order of
                `plan.kinds`: the values as unsigned integers with the same bits, (B, T, width), as
                `bit_patterns_of` returns them.
            micro_batch: The number of the micro-batch in a pipeline, () int32, which is the index
                on the second axis of the buffer; None without a pipeline.

        Returns:
            The buffers, which now contain these values.
        """
        updated_buffer_by_width_and_dtype = dict(buffer_by_width_and_dtype)
        for hook_kind, buffer_slot_of_kind, value_bit_patterns_of_kind in zip(
            plan.kinds, plan.buffer_slots_of_kinds, value_bit_patterns_of_kinds, strict=True
        ):
            width_and_dtype_of_kind = self.width_and_dtype(hook_kind)
            value_bit_patterns_of_kind = self.layout.constrain(
                value_bit_patterns_of_kind, *CAPTURED_AXES
            )
            buffer_index = (
                (buffer_slot_of_kind,)
                if micro_batch is None
                else (buffer_slot_of_kind, micro_batch)
            )
            bit_patterns_with_buffer_axes = value_bit_patterns_of_kind.reshape(
                *[1] * len(buffer_index), *value_bit_patterns_of_kind.shape
            )
            buffer_of_kind = updated_buffer_by_width_and_dtype[width_and_dtype_of_kind]
            updated_buffer_by_width_and_dtype[width_and_dtype_of_kind] = lax.dynamic_update_slice(
                buffer_of_kind, bit_patterns_with_buffer_axes, (*buffer_index, 0, 0, 0)
            )
        return updated_buffer_by_width_and_dtype

    def values(
        self, buffer_by_width_and_dtype: BufferByWidthAndDtype
    ) -> dict[WidthAndDtype, Array]:
        """Returns the values at all hooks after one loop over all layers.

        Args:
            buffer_by_width_and_dtype: Width and dtype -> buffer, an array of unsigned integers,
                (slots, B, T, width). The first slots contain the values at the hooks, and the
                values in the slots after them are ignored. The loop has written the values at the
                hooks of all layers to the buffers, and the values at the hooks after the last layer
                have been written as well.

        Returns:
            Width and dtype -> the values at the hooks with this width and dtype, (hooks, B, T,
            width). The hooks are in the order in which they are computed.
        """
        values_by_width_and_dtype = {}
        for width_and_dtype, hooks_of_array in self.hooks_by_width_and_dtype().items():
            bit_patterns_of_hooks = buffer_by_width_and_dtype[width_and_dtype][
                : len(hooks_of_array)
            ]
            values_by_width_and_dtype[width_and_dtype] = lax.bitcast_convert_type(
                bit_patterns_of_hooks, width_and_dtype.dtype
            )
        return values_by_width_and_dtype

    def values_of_stages(
        self,
        buffer_by_width_and_dtype: BufferByWidthAndDtype,
        rows: int,
        layers_per_stage: int,
        bit_patterns_by_kind_after_last_layer: Mapping[HookKind, Array],
    ) -> dict[WidthAndDtype, Array]:
        """Returns the values at all hooks after all stages of a pipeline have run their layers.

        Args:
            buffer_by_width_and_dtype: Width and dtype -> buffer, an array of unsigned integers,
                (stages, slots, micro-batches, B, T, width). All layers have written to the buffers.
            rows: The number of rows of all micro-batches together.
            layers_per_stage: The number of layers in each stage.
            bit_patterns_by_kind_after_last_layer: Kind of hook after the last layer -> its values
                as unsigned integers with the same bits, (rows, T, width).

        Returns:
            Width and dtype -> the values at the hooks with this width and dtype, (hooks, rows, T,
            width). The hooks are in the order in which they are computed.
        """
        values_by_width_and_dtype = {}
        for width_and_dtype, hooks_of_array in self.hooks_by_width_and_dtype().items():
            bit_pattern_arrays: list[Array] = []
            stage_numbers_of_hooks = [
                hook.layer_number // layers_per_stage
                for hook in hooks_of_array
                if not hook.kind.is_after_layers
            ]
            if stage_numbers_of_hooks:
                # With M micro-batches, micro-batch m contains the rows m, m + M, m + 2 M and so on
                # of the batch. The axis of micro-batches and the axis of their rows are swapped, so
                # that merging the two axes restores the order of the rows in the batch.
                bit_patterns_of_pipeline_stages = buffer_by_width_and_dtype[
                    width_and_dtype
                ].swapaxes(2, 3)
                bit_patterns_of_pipeline_stages = bit_patterns_of_pipeline_stages.reshape(
                    *bit_patterns_of_pipeline_stages.shape[:2],
                    rows,
                    *bit_patterns_of_pipeline_stages.shape[-2:],
                )
                bit_patterns_of_pipeline_stages = self.layout.constrain(
                    bit_patterns_of_pipeline_stages, "stages", "slots", *LEAVING_AXES
                )
                hook_counts_of_stages = np.bincount(stage_numbers_of_hooks)
                bit_pattern_arrays = [
                    bit_patterns_of_pipeline_stages[stage_number, :hook_count]
                    for stage_number, hook_count in enumerate(hook_counts_of_stages)
                ]
            for hook in hooks_of_array:
                if hook.kind.is_after_layers:
                    bit_patterns_of_hook = self.layout.constrain(
                        bit_patterns_by_kind_after_last_layer[hook.kind], *LEAVING_AXES
                    )
                    bit_pattern_arrays.append(bit_patterns_of_hook[None])
            values_by_width_and_dtype[width_and_dtype] = lax.bitcast_convert_type(
                jnp.concatenate(bit_pattern_arrays), width_and_dtype.dtype
            )
        return values_by_width_and_dtype


def _unsigned(x: Array) -> Array:
    """Views an array as unsigned integers with the same bits.

    CPUs can update such an array in place, unlike an array of bfloat16. float32 is viewed as
    integers as well, because XLA then keeps the layout in which the values leave the loop over the
    layers.
    """
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
