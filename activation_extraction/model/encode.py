"""Encodes the values at hooks by autoencoders, inside the compiled step.

Features are computed for a block of tokens at a time, and only those that are kept leave it, so
memory does not grow with the dictionary. Devices that share rows share the dictionary; features are
then chosen as the most likely tokens are in predictions.py. The formula is that of `Autoencoder`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from activation_extraction.common.codes import CODES, code_bytes, record_width
from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import plain_url
from activation_extraction.model.autoencoders import Autoencoder
from activation_extraction.model.hooks import Hook, HookTable
from activation_extraction.model.mesh import RULES, Layout
from activation_extraction.model.numerics import einsum
from activation_extraction.model.predictions import in_blocks, largest

VALUES_OF_A_BLOCK = 2**25  # features of a block's tokens on each device: 134 MB of float32
MOST = 256  # features of a token that are kept unless k or --encode_most says another number
DICTIONARY, OF_FEATURES = ("head_vocab", "embed"), ("batch", "sequence", "head_vocab")
AXES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("W_enc", "W_dec"), DICTIONARY),
    **dict.fromkeys(("b_enc", "threshold", "score"), ("head_vocab",)),
    **{"b_dec": ("hidden",), "W_skip": ("hidden", "embed")},
}
EPSILON = 1e-5  # SAELens's, in layer_norm

Weights = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Encoder:
    """An autoencoder at a hook of a model. target: the hook that it reconstructs, which is the same
    for all but transcoders. most: how many features of a token are kept."""

    autoencoder: Autoencoder
    source: Hook
    target: Hook
    most: int

    @property
    def hook(self) -> Hook:
        """Returns the hook of the codes, whose values are the records of codes.py."""
        kind = self.source.kind
        codes = replace(
            kind,
            name=kind.name + CODES,
            letters="",
            modules=tuple(name + CODES for name in kind.modules),
            aliases=tuple(name + CODES for name in kind.aliases),
            dtype="int32",
            count=record_width(self.most),
        )
        return self.source._replace(kind=codes)

    def facts(self) -> dict[str, Any]:
        """Returns what metadata.json records of the hook besides its name."""
        hook = self.hook
        return {
            "module": hook.module,
            "aliases": hook.names()[1:],
            "width": self.autoencoder.features,
            "most": self.most,
            "autoencoder": plain_url(self.autoencoder.name),
            "reconstructs": self.target.name,
        }

    def in_words(self, dtype: Any) -> str:
        """Returns what is stored of a token. dtype: of the run's activations."""
        each = "each token has" if self.most == self.autoencoder.k else "a token has at most"
        of_all = f"{self.most} of {self.autoencoder.features:,} features"
        size = code_bytes(self.most, dtype)
        return f"{self.hook.name}: {each} {of_all}, {size:,} bytes per token"

    @property
    def flops(self) -> float:
        """Returns the floating-point operations for a token."""
        return 2.0 * sum(array.size for array in self.autoencoder.arrays.values())

    def memory(self, layout: Layout) -> float:
        """Returns the bytes that it takes on each device beside records, about."""
        numbers = sum(array.size for array in self.autoencoder.arrays.values())
        parts = layout.size(*RULES["head_vocab"], *RULES["embed"])
        return numbers * self.autoencoder.dtype.itemsize / parts + 4 * 4 * VALUES_OF_A_BLOCK

    def shapes(self, layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shape, dtype and sharding that every array has on the devices."""
        found = {}
        for name, array in self.autoencoder.arrays.items():
            dtype = self.autoencoder.dtype if array.ndim > 1 else np.dtype(np.float32)
            sharding = layout.sharding(AXES[name], array.shape)
            found[name] = jax.ShapeDtypeStruct(array.shape, dtype, sharding=sharding)
        return found

    def weights(self, layout: Layout) -> Weights:
        """Returns every array on the devices, which get only their own parts."""

        def load(array: np.ndarray, to: jax.ShapeDtypeStruct) -> Array:
            def part(index: Any) -> np.ndarray:
                return array[index].astype(to.dtype, order="C")

            return jax.make_array_from_callback(to.shape, to.sharding, part)

        return jax.tree.map(load, self.autoencoder.arrays, self.shapes(layout))


def make_encoders(
    autoencoders: Sequence[Autoencoder],
    most: int | None,
    table: HookTable,
    depth: int,
    sizes: Mapping[str, int],
) -> tuple[Encoder, ...]:
    """Returns the autoencoders at their hooks. most: --encode_most. sizes: letter -> size.

    Raises InputError for a hook that the model lacks, that has another width, or that has two.
    """
    encoders: list[Encoder] = []
    for each in autoencoders:
        where = f"--encode {plain_url(each.name)}"
        hooks: list[Hook] = []
        for name, width in ((each.hook, each.W_enc.shape[1]), (each.target, len(each.b_dec))):
            try:
                found = table.matching([name], depth)
            except InputError as error:
                raise InputError(f"{where}: {str(error).removeprefix('--hook_names ')}") from error
            if len(found) > 1 or any(hook.kind.dtype for hook in found.values()):
                raise InputError(f"{where}: {name} is not one hook with activations")
            (hook,) = found.values()
            if hook.kind.width(sizes) != width:
                raise InputError(
                    f"{where}: is for {width:,} numbers per token, {hook.name} has "
                    f"{hook.kind.width(sizes):,}; is it of another model?"
                )
            hooks.append(hook)
        source, target = hooks
        if source in (encoder.source for encoder in encoders):
            raise InputError(f"{where}: {source.name} has another autoencoder already")
        kept = min(most or each.k or MOST, each.k or each.features)
        encoders.append(Encoder(each, source, target, kept))
    return tuple(sorted(encoders, key=lambda encoder: encoder.source))


def encode(encoder: Encoder, weights: Weights, x: Array, target: Array, layout: Layout) -> Array:
    """Returns the codes of values x (B, T, D), as records int32 (B, T, 3 + 2 * most).

    weights: the arrays of the autoencoder, on devices. target: (B, T, O), what it reconstructs.
    """
    parts = layout.size(*RULES["head_vocab"])
    tokens = VALUES_OF_A_BLOCK * parts // encoder.autoencoder.features
    weights = {name: layout.gather(weight, AXES[name]) for name, weight in weights.items()}
    arrays = [x] if encoder.source == encoder.target else [x, target]

    def of_block(block: Sequence[Array]) -> Array:
        values = [layout.constrain(each, "batch", "sequence", "hidden") for each in block]
        return _records(encoder, weights, values[0], values[-1], layout)

    with jax.named_scope("encode"):
        return in_blocks(of_block, arrays, tokens, layout)


def _records(encoder: Encoder, weights: Weights, x: Array, target: Array, layout: Layout) -> Array:
    form, dtype = encoder.autoencoder, encoder.autoencoder.dtype
    given = x.astype(dtype).astype(jnp.float32)
    x, put_back = _normalised(given, form.norm)
    if form.subtracts:
        x = x - weights["b_dec"]
    pre = einsum("BTD,FD->BTF", x.astype(dtype), weights["W_enc"]) + weights["b_enc"]
    pre = layout.constrain(pre, *OF_FEATURES)
    score, active = pre, jnp.ones(pre.shape, bool)
    if form.score is not None:
        score = score * weights["score"]
    if form.threshold is not None:
        active &= score > weights["threshold"]
    if form.relu:
        active &= pre > 0
    score = jnp.where(active, score, -jnp.inf)
    found, ids = largest(score, encoder.most, layout)
    number = active.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    if form.k is not None:
        number = jnp.minimum(number, form.k)
    # Of features that are tied with the last one that is kept, the first ones are kept. (With a
    # slice in place of the minimum, XLA would sort all features, in 30 times the time.)
    last = found.min(axis=-1, keepdims=True)
    tied = jnp.where(found == last, ids, -1).max(axis=-1, keepdims=True)
    kept = (score > last) | ((score == last) & (jnp.arange(pre.shape[-1]) <= tied))
    features = jnp.where(kept & active, pre, 0).astype(dtype)
    result = einsum("BTF,FD->BTD", features, weights["W_dec"]) + weights["b_dec"]
    if encoder.source == encoder.target:
        result = put_back(result)
    if form.W_skip is not None:
        result += einsum("BTD,OD->BTO", given.astype(dtype), weights["W_skip"])
    target = target.astype(jnp.float32)
    error = jnp.square(target - result).sum(axis=-1, keepdims=True)
    norm = jnp.sqrt(jnp.square(target).sum(axis=-1, keepdims=True))
    values = found / jnp.take(weights["score"], ids) if form.score is not None else found
    there = jnp.isfinite(found)
    ids, values = jnp.where(there, ids, form.features), jnp.where(there, values, 0)
    ids, values = lax.sort((ids, values), num_keys=1)
    bits = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
    return jnp.concatenate([number, bits(error), bits(norm), ids, bits(values)], axis=-1)


def _normalised(x: Array, norm: str) -> tuple[Array, Callable[[Array], Array]]:
    """Returns x normalised, and what undoes that for a result."""
    if norm == "constant_norm_rescale":
        factor = math.sqrt(x.shape[-1]) / jnp.linalg.norm(x, axis=-1, keepdims=True)
        return x * factor, lambda result: result / factor
    if norm == "layer_norm":
        mean = x.mean(axis=-1, keepdims=True)
        deviation = jnp.std(x, axis=-1, keepdims=True, ddof=1)
        return (x - mean) / (deviation + EPSILON), lambda result: result * deviation + mean
    return x, lambda result: result
