"""The gated delta net (arXiv:2412.06464) as a module: Qwen3.5's layers without attention.

Its weights are declared here and its sums are gated_delta.py's. The letters are those of
qwen2_jax.py, and J key heads, G value heads of each, C key size, Z value size, O all values of a
token, W taps of the convolution. Key heads, each with its value heads, are what is split over
devices.

The checkpoint keeps queries, keys and values in one matrix, one below the other, and the
convolutions likewise. Here each has parameters of its own, so that heads can be split.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array

from activation_extraction.model.gated_delta import (
    gated_delta_rule,
    gated_norm,
    short_convolution,
)
from activation_extraction.model.layers import STREAM, Linear, Out, parameter
from activation_extraction.model.mesh import Layout
from activation_extraction.model.model_config import QwenConfig

KEYS = "batch", "sequence", "key_heads", "head_dim"  # logical axes of queries and keys
VALUES = *KEYS, "head_dim"
ROWS = "batch", "sequence"


class Convolution(nn.Module):
    """The short convolution of one kind of heads, `JC` or `JGZ`."""

    config: QwenConfig
    heads: str
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, segment_ids: Array) -> Array:
        weight = parameter(self, "weight", f"{self.heads}IW")
        return short_convolution(x, jnp.squeeze(weight, -2), segment_ids)


class GatedNorm(nn.Module):
    """Norm of each value head, then the gate. Its weights are stored as they are."""

    config: QwenConfig
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: Array, gate: Array) -> Array:
        weight = parameter(self, "weight", "Z")
        return gated_norm(x, gate, weight, self.config.rms_norm_eps).astype(self.dtype)


class GatedDeltaNet(nn.Module):
    """(B, T, D) -> (B, T, D), token by token from the state that its segment has left."""

    config: QwenConfig
    dtype: Any
    layout: Layout

    def setup(self) -> None:
        linear = partial(Linear, self.config, dtype=self.dtype)
        convolution = partial(Convolution, self.config, dtype=self.dtype)
        self.in_proj_q, self.in_proj_k = linear("D->JC"), linear("D->JC")
        self.in_proj_v, self.in_proj_z = linear("D->JGZ"), linear("D->JGZ")
        self.in_proj_b, self.in_proj_a = linear("D->JG"), linear("D->JG")
        self.conv1d_q, self.conv1d_k = convolution("JC"), convolution("JC")
        self.conv1d_v = convolution("JGZ")
        self.A_log = parameter(self, "A_log", "JG")
        self.dt_bias = parameter(self, "dt_bias", "JG")
        self.norm = GatedNorm(self.config, self.dtype)
        self.out_proj = linear("O->D")  # TPUs would copy (D, J, G, Z) for each step

    def __call__(self, x: Array, segment_ids: Array) -> tuple[Array, Out]:
        constrain, out = self.layout.constrain, self._inputs(x, segment_ids)
        names = "q", "k", "v", "log_decay", "beta"
        with jax.named_scope("gated_delta_rule"):
            out["recurrence_out"] = self.layout.each(
                gated_delta_rule,
                [*(out[name] for name in names), segment_ids],
                [KEYS, KEYS, VALUES, KEYS, KEYS, ROWS],
                like=names.index("v"),
            )
        gated = out["gated"] = self.norm(out["recurrence_out"], out["gate_input"])
        flat = gated.reshape(*gated.shape[:2], -1)
        out["out"] = constrain(self.out_proj(flat).astype(self.dtype), *STREAM)
        return out["out"], out

    def _inputs(self, x: Array, segment_ids: Array) -> Out:
        """What the recurrence and the gate after it take."""
        constrain, out = self.layout.constrain, Out()
        parts = (
            ("q", KEYS, self.in_proj_q, self.conv1d_q),
            ("k", KEYS, self.in_proj_k, self.conv1d_k),
            ("v", VALUES, self.in_proj_v, self.conv1d_v),
        )
        for name, axes, projection, convolution in parts:
            y = out[f"{name}_pre_conv"] = constrain(projection(x), *axes).astype(self.dtype)
            out[name] = convolution(y, segment_ids)
        out["gate_input"] = constrain(self.in_proj_z(x), *VALUES).astype(self.dtype)
        out["beta_logit"] = constrain(self.in_proj_b(x), *KEYS)
        out["beta"] = jax.nn.sigmoid(out["beta_logit"])
        rate, bias = (x.astype(jnp.float32) for x in (self.A_log, self.dt_bias))
        step = jax.nn.softplus(constrain(self.in_proj_a(x), *KEYS) + bias)
        out["log_decay"] = -jnp.exp(rate) * step
        return out
