"""This file has the hooked model, which computes the values at hooks, and the model families.

`FAMILIES` at the end says of each family what its config.json means. To add a kind of hook, add a
row to the table of kinds in hooks.py, and a line to the module of qwen2_jax.py that computes it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array, lax

from activation_extraction.model.capture import Buffers, Capture, Plan
from activation_extraction.model.decoder import Decoder, Layers, Path, stage_length
from activation_extraction.model.family import Families, ModelFamily
from activation_extraction.model.hooks import HOOKS as HOOKS
from activation_extraction.model.hooks import KINDS, Form, Hook
from activation_extraction.model.kernels import Kernels
from activation_extraction.model.layers import STREAM, Out, RMSNorm, rotary_table
from activation_extraction.model.mesh import RULES, Layout
from activation_extraction.model.model_config import (
    QwenConfig,
    config_beside_vision,
    qwen2_config,
    qwen2_moe_config,
    qwen3_5_moe_text_config,
    qwen3_5_text_config,
    qwen3_config,
    qwen3_moe_config,
)
from qwen2_jax import Embedding, Qwen2, decoder, weight_table

# A layer computes these before its attention, or before the recurrence in its place.
VALUES = [value for _, _, _, value, _, _ in KINDS]
BEFORE_ATTENTION = frozenset(VALUES[: VALUES.index("attn.pattern")])
BEFORE_ATTENTION -= {f"linear_attn.{name}" for name in ("recurrence_out", "gated", "out")}

# A kind in the loop costs each layer a write, and an exchange of values that are split over
# devices; a layer after the loop takes time to compile.
MOST_KINDS_OF_ONE_LAYER = 2


class HookedQwen2(nn.Module):
    """The hooked model runs the part of a model that the hooks need and returns their values.

    Its parameters are the corresponding part of `qwen2_jax.Qwen2`'s. Layers run in a loop. The last
    layer follows the loop if the hooks need only a part of it, or the final norm, or many kinds
    that no other layer is asked for; the parameters that it needs are then "last_layer". With
    `stages` > 1 all layers are whole and split into that many pipeline stages of equal length; the
    last stages may be filled up with layers of zeros, which change nothing.
    """

    config: QwenConfig
    hooks: tuple[Hook, ...]
    dtype: Any = jnp.float32
    activation_dtype: Any = jnp.float32
    kernels: Kernels = Kernels()
    layout: Layout = Layout()
    stages: int = 1

    @property
    def num_layers(self) -> int:
        """Returns how many layers run; the last one may run only in part."""
        return self.hooks[-1].layer + 1

    @property
    def whole_layers(self) -> int:
        """Returns how many layers run in the loop."""
        return self.num_layers - (self.last_layer is not None)

    @property
    def last_layer(self) -> frozenset[Path] | None:
        """Returns the parameters of the layer after the loop; None if there is no such layer."""
        if self.stages > 1:
            return None
        last = {hook.kind for hook in self.hooks if hook.layer == self.num_layers - 1}
        others = {hook.kind for hook in self.hooks if hook.layer < self.num_layers - 1}
        separate = len(last - others) > MOST_KINDS_OF_ONE_LAYER
        values = frozenset(kind.value for kind in last)
        return _last_layer(self.config, self.num_layers - 1, values, separate)

    @property
    def layers_per_stage(self) -> int:
        return stage_length(self.config.layer_types[: self.whole_layers], self.stages)

    def micro_batches(self, rows: int) -> int:
        """Returns how many micro-batches a step has, each with one row per data-parallel device."""
        return max(rows // self.layout.size(*RULES["batch"]), 1)

    def flops(self, lengths: Sequence[int]) -> float:
        """Returns the floating-point operations for samples of these lengths."""
        total = 0.0
        for layer in range(self.num_layers):
            paths, attends = None, True
            if layer == self.whole_layers:
                paths = self.last_layer
                attends = self.hooks[-1].kind.value not in BEFORE_ATTENTION
            weights = _weights_of_a_token(self.config, layer, paths)
            total += self.config.flops_of(layer, weights, attends, lengths)
        return total

    @nn.compact
    def __call__(self, token_ids: Array, segment_ids: Array, positions: Array) -> dict[Form, Array]:
        """Returns {form: (hooks of that form, B, T, width)}. Inputs are (B, T) int32.

        Activations have activation_dtype, or are packed rows of bytes (common/encodings.py) if that
        names an encoding; hooks of one form are in the order of `hooks`.
        """
        embed = Embedding(self.config, self.dtype, self.layout, name="embed_tokens")
        norm = RMSNorm(self.config, self.dtype, name="norm")
        params, layers = {}, self._layers()
        if self.whole_layers:
            length = self.layers_per_stage
            params["layers"] = self.param("layers", layers.init, length, self.stages)
        if self.last_layer:
            number, paths = self.whole_layers, self.last_layer
            params["last_layer"] = self.param("last_layer", layers.init_partial, number, paths)
        if self.is_initializing():
            x = embed(token_ids)
            if any(_is_final(hook.kind.value) for hook in self.hooks):
                norm(x)
            return {}
        run = self._scanned if self.stages == 1 else self._pipelined
        return run(params, embed, norm, token_ids, segment_ids, positions)

    def _layers(self) -> Decoder:
        return decoder(self.config, self.dtype, self.kernels, self.layout)

    def _capture(self, length: int) -> Capture:
        sizes = self.config.sizes_with(length)
        return Capture(self.hooks, sizes, self.activation_dtype, self.layout)

    def _keep(self, capture: Capture, plan: Plan, norm: RMSNorm) -> Callable[[Out], list[Array]]:
        """Returns a function that picks what is captured from a layer's intermediates."""

        def keep(out: Out) -> list[Array]:
            if any(_is_final(kind.value) for kind in plan.kinds):
                out = out | {"final": norm(out["resid_post"])[1]}
            return capture.bits_of(plan.kinds, out)

        return keep

    def _scanned(
        self, params: Any, embed: Embedding, norm: RMSNorm, *batch: Array
    ) -> dict[Form, Array]:
        """Runs a loop over the whole layers, then what is needed of the last one."""
        token_ids, segment_ids, positions = batch
        capture, whole = self._capture(token_ids.shape[1]), self.whole_layers
        inside, after = capture.plan(range(whole)), capture.plan(range(whole, self.num_layers))
        carry = embed(token_ids), capture.buffers([inside, after], token_ids.shape)
        inputs = rotary_table(positions, self.config), segment_ids
        if whole:
            with jax.named_scope("layers"):
                keep = self._keep(capture, inside, norm)
                layers = self._layers().stacked(params["layers"])
                carry = self._loop(capture, layers, inside, carry, keep, *inputs)
        x, buffers = carry
        if self.last_layer is not None:
            with jax.named_scope("last_layer"):
                last = params.get("last_layer", {})
                keep = self._keep(capture, after, norm)
                values = self._layers().partial_layer(whole, last, keep, x, *inputs)
                slots = [of_kind[0] for of_kind in after.slots]
                buffers = capture.write(buffers, after.kinds, values, slots)
        return capture.result(buffers)

    def _loop(
        self,
        capture: Capture,
        layers: Layers,
        plan: Plan,
        carry: tuple[Array, Buffers],
        keep: Callable[[Out], list[Array]],
        rotary: tuple[Array, Array],
        segment_ids: Array,
        *at: Array,
    ) -> tuple[Array, Buffers]:
        """Runs all whole layers, or those of one stage. at: the micro-batch in a pipeline."""

        def block(layer: Callable, carry: tuple[Array, Buffers], slots: Any) -> Any:
            x, buffers = carry
            x, values = layer(x, rotary, segment_ids)
            return x, capture.write(buffers, plan.kinds, values, slots, *at)

        return self._layers().scan(layers, block, carry, plan.slots, keep)

    def _pipelined(
        self, params: Any, embed: Embedding, norm: RMSNorm, *batch: Array
    ) -> dict[Form, Array]:
        """Runs all stages at once, each on a different micro-batch.

        At tick t, stage s works on micro-batch t - s, so M micro-batches take M + stages - 1 ticks.
        Each stage captures the hooks of its own layers.
        """
        stages, (rows, length) = self.stages, batch[0].shape
        capture = self._capture(length)
        micro_batches = self.micro_batches(rows)
        layers = self._layers().stacked(params["layers"])
        per_stage = jax.tree.map(lambda x: x.reshape(stages, -1, *x.shape[1:]), layers)
        token_ids, segment_ids, positions = (
            x.reshape(-1, micro_batches, length).swapaxes(0, 1) for x in batch
        )
        plan, numbers = capture.plan_stages(stages, self.layers_per_stage), jnp.arange(stages)
        keep = self._keep(capture, plan, norm)

        def stage(layers: Layers, slots: Any, x: Array, buffers: Buffers, number: Array) -> Any:
            """Runs a stage. number: of the micro-batch.

            In the bubble before the first micro-batch, a stage writes values that it will write
            again; in the bubble after the last one, it computes that one again. Neither needs a
            mask.
            """
            number = jnp.clip(number, 0, micro_batches - 1)
            inputs = rotary_table(positions[number], self.config), segment_ids[number]
            own = plan._replace(slots=slots)
            return self._loop(capture, layers, own, (x, buffers), keep, *inputs, number)

        def tick(carry: tuple[Array, Buffers], time: Array) -> tuple[Any, None]:
            x, buffers = carry
            entering = token_ids[jnp.minimum(time, micro_batches - 1)]
            x = jnp.roll(x, 1, axis=0).at[0].set(embed(entering))
            x = self.layout.constrain(x, "stage", *STREAM)
            inputs = per_stage, plan.slots, x, buffers, time - numbers
            return jax.vmap(stage, spmd_axis_name="pipeline")(*inputs), None

        x = jnp.zeros((stages, *token_ids.shape[1:], self.config.hidden_size), self.dtype)
        carry = x, capture.buffers([plan], token_ids.shape, stages)
        with jax.named_scope("layers"):
            (_, buffers), _ = lax.scan(tick, carry, jnp.arange(micro_batches + stages - 1))
        return capture.result_of_stages(buffers, rows, self.layers_per_stage)


def _is_final(value: str) -> bool:
    return value.startswith("final.")


@functools.cache
def _last_layer(
    config: QwenConfig, number: int, values: frozenset[str], separate: bool
) -> frozenset[Path] | None:
    """Returns the parameters of this layer that these values need; None if it runs in the loop.

    separate: whether it must follow the loop even if all of it is needed.
    """
    layers = decoder(config, jnp.float32, Kernels(), Layout())
    final = any(map(_is_final, values))
    paths = layers.paths_for(number, {"resid_post"} if final else values)
    whole = paths == layers.paths_for(number, {"resid_post"})
    return None if whole and not (separate or final) else paths


@functools.cache
def _weights_of_a_token(config: QwenConfig, number: int, paths: frozenset[Path] | None) -> int:
    """Returns how many weights of this layer's matrices a token is multiplied by.

    paths: the parameters that the layer has; None for all.
    """
    sizes = decoder(config, jnp.float32, Kernels(), Layout()).matrix_sizes(number)
    total = 0
    for path in sizes if paths is None else paths:
        if config.experts is not None and "experts" in path:
            total += sizes[path] * config.experts.per_token // config.experts.count
        else:
            total += sizes[path]
    return total


def create_model_with_hooks(
    config: QwenConfig,
    hooks: Sequence[Hook],
    dtype: Any = jnp.float32,
    activation_dtype: Any = None,
    kernels: Kernels | None = None,
    layout: Layout | None = None,
) -> HookedQwen2:
    """Creates the model that computes `hooks` and nothing more.

    dtype: the type of weights and matrix products (float32 or bfloat16; sums are float32).
    activation_dtype: the type of activations in the result, by default `dtype`, or the name of an
    encoding. layout: the mesh to run on, by default one device. Raises ValueError without hooks,
    and InputError for a pipeline that cannot have equal stages.
    """
    if not hooks:
        raise ValueError("hooks: is empty; give at least one hook")
    layout = layout or Layout()
    stages = layout.size("pipeline")
    stage_length(config.layer_types[: max(hooks).layer + 1], stages)
    return HookedQwen2(
        config,
        tuple(sorted(set(hooks))),
        dtype,
        activation_dtype or dtype,
        kernels or Kernels(),
        layout,
        stages,
    )


_family = functools.partial(
    ModelFamily, whole=Qwen2, hooked=create_model_with_hooks, weight_table=weight_table
)
FAMILIES = Families(
    (
        _family("qwen2", "Qwen2, Qwen2.5, QwQ", qwen2_config),
        _family("qwen3", "Qwen3, dense", qwen3_config),
        _family("qwen2_moe", "Qwen1.5-MoE, Qwen2 57B-A14B", qwen2_moe_config),
        _family("qwen3_moe", "Qwen3 30B-A3B, 235B-A22B", qwen3_moe_config),
        _family(
            "qwen3_5",
            "Qwen3.5, dense, without its vision inputs",
            functools.partial(config_beside_vision, qwen3_5_text_config),
            ignored=r"mtp\..*|model\.visual\..*",
        ),
        _family(
            "qwen3_5_text", "Qwen3.5, dense, text alone", qwen3_5_text_config, ignored=r"mtp\..*"
        ),
        _family(
            "qwen3_5_moe",
            "Qwen3.5 35B-A3B, 122B-A10B, 397B-A17B, without their vision inputs",
            functools.partial(config_beside_vision, qwen3_5_moe_text_config),
            ignored=r"mtp\..*|model\.visual\..*",
        ),
        _family(
            "qwen3_5_moe_text",
            "Qwen3.5 with experts, text alone",
            qwen3_5_moe_text_config,
            ignored=r"mtp\..*",
        ),
    )
)
