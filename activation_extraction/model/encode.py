"""Encodes the values at hooks by autoencoders, inside the compiled step.

Features are computed for a block of tokens at a time, and only the largest ones of a token leave
it, so memory does not grow with the dictionary. Devices that share rows share the dictionary, and
the largest features are found as the most likely tokens are in predictions.py. The docstring of
`Autoencoder` has the formula; codes.py says what is stored of a token.

Letters: B rows, T tokens per row, and D, O and F as in autoencoders.py.
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
MOST = 256  # features of a token that are kept if neither k nor --encode_most says another number
OF_FEATURES = "batch", "sequence", "head_vocab"  # logical axes of a block's features
# Array of an autoencoder -> its logical axes.
AXES: dict[str, tuple[str, ...]] = {
    "W_enc": ("head_vocab", "embed"),
    "W_dec": ("head_vocab", "embed"),
    "b_enc": ("head_vocab",),
    "threshold": ("head_vocab",),
    "score": ("head_vocab",),
    "b_dec": ("hidden",),
    "W_skip": ("hidden", "embed"),
}
EPSILON = 1e-5  # added to the standard deviation, as in SAELens's layer_norm

Weights = Mapping[str, Any]  # name of an array of an autoencoder -> the array on the devices


@dataclass(frozen=True, eq=False)
class Encoder:
    """An autoencoder at a hook of a model.

    Attributes:
        autoencoder: The autoencoder.
        source: The hook that it reads.
        target: The hook that it reconstructs, which equals `source` for all but transcoders.
        most: The largest number of features of a token that are kept.
    """

    autoencoder: Autoencoder
    source: Hook
    target: Hook
    most: int

    @property
    def hook(self) -> Hook:
        """The hook of the codes, whose values are the records that codes.py describes."""
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
        """Returns a sentence about the codes of a token, for the log.

        Args:
            dtype: The dtype in which the run stores activations.
        """
        exact = self.most == self.autoencoder.k
        subject = "each token has" if exact else "a token has at most"
        features = f"{self.most} of {self.autoencoder.features:,} features"
        size = code_bytes(self.most, dtype)
        return f"{self.hook.name}: {subject} {features}, {size:,} bytes per token"

    @property
    def flops(self) -> float:
        """The floating-point operations for a token."""
        return 2.0 * sum(array.size for array in self.autoencoder.arrays.values())

    def memory(self, layout: Layout) -> float:
        """Returns about how many bytes it takes on each device, without the records of codes."""
        numbers = sum(array.size for array in self.autoencoder.arrays.values())
        parts = layout.size(*RULES["head_vocab"], *RULES["embed"])
        return numbers * self.autoencoder.dtype.itemsize / parts + 4 * 4 * VALUES_OF_A_BLOCK

    def shapes(self, layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns name of an array -> its shape, dtype and sharding on the devices."""
        shapes = {}
        for name, array in self.autoencoder.arrays.items():
            dtype = self.autoencoder.dtype if array.ndim > 1 else np.dtype(np.float32)
            sharding = layout.sharding(AXES[name], array.shape)
            shapes[name] = jax.ShapeDtypeStruct(array.shape, dtype, sharding=sharding)
        return shapes

    def weights(self, layout: Layout) -> Weights:
        """Copies the arrays to the devices, each of which gets only its own part."""

        def load(array: np.ndarray, shape: jax.ShapeDtypeStruct) -> Array:
            def part(index: Any) -> np.ndarray:
                return array[index].astype(shape.dtype, order="C")

            return jax.make_array_from_callback(shape.shape, shape.sharding, part)

        return jax.tree.map(load, self.autoencoder.arrays, self.shapes(layout))


def make_encoders(
    autoencoders: Sequence[Autoencoder],
    most: int | None,
    table: HookTable,
    depth: int,
    sizes: Mapping[str, int],
) -> tuple[Encoder, ...]:
    """Returns the autoencoders at their hooks, in the order of the hooks that they read.

    Args:
        autoencoders: The autoencoders.
        most: The largest number of features of a token that are kept, from --encode_most. None for
            the k of an autoencoder, or for MOST if it has none.
        table: The hooks of the model.
        depth: The number of layers of the model.
        sizes: Letter -> size in the model.

    Raises:
        InputError: The model lacks a hook, a hook has another width than the autoencoder, or two
            autoencoders read the same hook.
    """
    encoders: list[Encoder] = []
    for autoencoder in autoencoders:
        where = f"--encode {plain_url(autoencoder.name)}"
        hooks: list[Hook] = []
        for name, width in (
            (autoencoder.hook, autoencoder.W_enc.shape[1]),
            (autoencoder.target, len(autoencoder.b_dec)),
        ):
            try:
                matches = [*table.matching([name], depth).values()]
            except InputError as error:
                raise InputError(f"{where}: {str(error).removeprefix('--hook_names ')}") from error
            if len(matches) > 1 or matches[0].kind.dtype is not None:
                raise InputError(f"{where}: {name} is not one hook with activations")
            hook = matches[0]
            if hook.kind.width(sizes) != width:
                raise InputError(
                    f"{where}: is for {width:,} numbers per token, {hook.name} has "
                    f"{hook.kind.width(sizes):,}; is it of another model?"
                )
            hooks.append(hook)
        source, target = hooks
        if any(encoder.source == source for encoder in encoders):
            raise InputError(f"{where}: {source.name} has another autoencoder already")
        limit = autoencoder.k or autoencoder.features
        kept = min(most or autoencoder.k or MOST, limit)
        encoders.append(Encoder(autoencoder, source, target, kept))
    return tuple(sorted(encoders, key=lambda encoder: encoder.source))


def encode(encoder: Encoder, weights: Weights, x: Array, target: Array, layout: Layout) -> Array:
    """Returns the codes of values, as the records that codes.py describes.

    Args:
        encoder: The autoencoder.
        weights: Its arrays on the devices.
        x: The values at the hook that it reads, (B, T, D).
        target: The values at the hook that it reconstructs, (B, T, O).
        layout: The mesh.

    Returns:
        (B, T, 3 + 2 * most) int32.
    """
    parts = layout.size(*RULES["head_vocab"])
    tokens = VALUES_OF_A_BLOCK * parts // encoder.autoencoder.features
    weights = {name: layout.gather(weight, AXES[name]) for name, weight in weights.items()}
    arrays = [x] if encoder.source == encoder.target else [x, target]

    def of_block(block: Sequence[Array]) -> Array:
        values = [layout.constrain(array, "batch", "sequence", "hidden") for array in block]
        return _records(encoder, weights, values[0], values[-1], layout)

    with jax.named_scope("encode"):
        return in_blocks(of_block, arrays, tokens, layout)


def _records(encoder: Encoder, weights: Weights, x: Array, target: Array, layout: Layout) -> Array:
    """Returns the records of a block of tokens. See `encode` for the arguments.

    It follows the formula of `Autoencoder`, whose names it uses.
    """
    autoencoder = encoder.autoencoder
    dtype = autoencoder.dtype
    original = x.astype(dtype).astype(jnp.float32)
    x, undo = _normalised(original, autoencoder.norm)
    if autoencoder.subtracts:
        x = x - weights["b_dec"]
    pre = einsum("BTD,FD->BTF", x.astype(dtype), weights["W_enc"]) + weights["b_enc"]
    pre = layout.constrain(pre, *OF_FEATURES)
    score = pre
    active = jnp.ones(pre.shape, bool)
    if autoencoder.score is not None:
        score = score * weights["score"]
    if autoencoder.threshold is not None:
        active &= score > weights["threshold"]
    if autoencoder.relu:
        active &= pre > 0
    score = jnp.where(active, score, -jnp.inf)
    top_scores, ids = largest(score, encoder.most, layout)
    number = active.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    if autoencoder.k is not None:
        number = jnp.minimum(number, autoencoder.k)
    # Of features that are tied with the last one that is kept, the first ones are kept. (With a
    # slice in place of the minimum, XLA would sort all features, in 30 times the time.)
    last = top_scores.min(axis=-1, keepdims=True)
    tied = jnp.where(top_scores == last, ids, -1).max(axis=-1, keepdims=True)
    kept = (score > last) | ((score == last) & (jnp.arange(pre.shape[-1]) <= tied))
    features = jnp.where(kept & active, pre, 0).astype(dtype)
    result = einsum("BTF,FD->BTD", features, weights["W_dec"]) + weights["b_dec"]
    if encoder.source == encoder.target:
        result = undo(result)
    if autoencoder.W_skip is not None:
        result += einsum("BTD,OD->BTO", original.astype(dtype), weights["W_skip"])
    target = target.astype(jnp.float32)
    error = jnp.square(target - result).sum(axis=-1, keepdims=True)
    norm = jnp.sqrt(jnp.square(target).sum(axis=-1, keepdims=True))
    values = top_scores
    if autoencoder.score is not None:
        values = top_scores / jnp.take(weights["score"], ids)
    exists = jnp.isfinite(top_scores)  # fewer features may be active than are kept
    ids = jnp.where(exists, ids, autoencoder.features)
    values = jnp.where(exists, values, 0)
    ids, values = lax.sort((ids, values), num_keys=1)
    bits = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
    return jnp.concatenate([number, bits(error), bits(norm), ids, bits(values)], axis=-1)


def _normalised(x: Array, norm: str) -> tuple[Array, Callable[[Array], Array]]:
    """Returns x normalised, and the function that undoes the normalisation of a result.

    Args:
        x: (B, T, D) float32.
        norm: The normalisation; see `Autoencoder.norm`.
    """
    if norm == "constant_norm_rescale":
        factor = math.sqrt(x.shape[-1]) / jnp.linalg.norm(x, axis=-1, keepdims=True)
        return x * factor, lambda result: result / factor
    if norm == "layer_norm":
        mean = x.mean(axis=-1, keepdims=True)
        deviation = jnp.std(x, axis=-1, keepdims=True, ddof=1)
        return (x - mean) / (deviation + EPSILON), lambda result: result * deviation + mean
    return x, lambda result: result
