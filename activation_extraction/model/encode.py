"""Encodes the values at hooks by autoencoders, inside the compiled step.

The features are computed for one block of tokens at a time, and only the largest features of each
token are kept after the block. So memory does not grow with the number of features. Devices that
share rows split the features among themselves; `largest` in predictions.py finds the largest
features of all these devices. The docstring of `Autoencoder` has the formula. common/codes.py has
the format of a token's record, which `encode` returns.

Letters: B rows, T tokens per row, D the width of the hook that is read, O the width of the hook
that is reconstructed, F the number of features.
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

# Tokens are encoded in blocks. On each device, a block has at most this number of feature values
# (tokens times features of the autoencoder), which take 134 MB in float32.
VALUES_OF_A_BLOCK = 2**25
# The number of features of a token that are kept if neither k nor --encode_most determines it.
DEFAULT_MOST = 256
FEATURE_AXES = "batch", "sequence", "head_vocab"  # logical axes of feature values, (B, T, F)
# Field of `Autoencoder` -> the logical axes of its array.
AXES: dict[str, tuple[str, ...]] = {
    "W_enc": ("head_vocab", "embed"),
    "W_dec": ("head_vocab", "embed"),
    "b_enc": ("head_vocab",),
    "threshold": ("head_vocab",),
    "feature_score_factors": ("head_vocab",),
    "b_dec": ("hidden",),
    "W_skip": ("hidden", "embed"),
}
EPSILON = 1e-5  # the number that SAELens's layer_norm adds to the standard deviation

Weights = Mapping[str, Any]  # field of `Autoencoder` -> its array on the devices


@dataclass(frozen=True, eq=False)
class Encoder:
    """An autoencoder at a hook of a model.

    Attributes:
        autoencoder: The autoencoder with its weights on the host.
        source_hook: The hook whose values are encoded.
        target_hook: The hook whose values are reconstructed. It equals `source_hook` for all but
            transcoders.
        max_codes_per_token: The largest number of features that are kept for each token.
    """

    autoencoder: Autoencoder
    source_hook: Hook
    target_hook: Hook
    max_codes_per_token: int

    @property
    def hook(self) -> Hook:
        """The hook whose values are the codes, a record for each token (see common/codes.py).

        Its names are the names of `source_hook`, each with the ending CODES.
        """
        source_hook_kind = self.source_hook.kind
        codes_hook_kind = replace(
            source_hook_kind,
            name=source_hook_kind.name + CODES,
            axis_letters="",
            module_names=tuple(
                module_name + CODES for module_name in source_hook_kind.module_names
            ),
            aliases=tuple(alias_name + CODES for alias_name in source_hook_kind.aliases),
            dtype="int32",
            width_factor=record_width(self.max_codes_per_token),
        )
        return self.source_hook._replace(kind=codes_hook_kind)

    def metadata(self) -> dict[str, Any]:
        """Returns the facts that metadata.json records about the hook at which codes are stored.

        Returns:
            A dict with these keys:

            - "module": The hook's name in Hugging Face; None if it has none there.
            - "aliases": The hook's names besides its canonical name.
            - "width": The number of features.
            - "most": The largest number of features that are kept for each token.
            - "autoencoder": The name of the autoencoder.
            - "reconstructs": The name of the hook whose values the autoencoder reconstructs.
        """
        codes_hook = self.hook
        return {
            "module": codes_hook.module_name,
            "aliases": codes_hook.names()[1:],
            "width": self.autoencoder.features,
            "most": self.max_codes_per_token,
            "autoencoder": plain_url(self.autoencoder.name),
            "reconstructs": self.target_hook.name,
        }

    def description(self, dtype: Any) -> str:
        """Returns a text for the log that tells how many features and bytes are stored per token.

        Args:
            dtype: The dtype in which the run stores activations, and so the values of features.
        """
        keeps_all_active_features = self.max_codes_per_token == self.autoencoder.k
        codes_per_token_phrase = (
            f"each token has {self.max_codes_per_token}"
            if keeps_all_active_features
            else f"a token has at most {self.max_codes_per_token}"
        )
        codes_bytes_per_token = code_bytes(self.max_codes_per_token, dtype)
        return (
            f"{self.hook.name}: {codes_per_token_phrase} of "
            f"{self.autoencoder.features:,} features, {codes_bytes_per_token:,} bytes per token"
        )

    @property
    def flops(self) -> float:
        """The number of floating-point operations that encode and reconstruct a token."""
        return 2.0 * sum(weight_array.size for weight_array in self.autoencoder.arrays.values())

    def memory(self, layout: Layout) -> float:
        """Estimates how much memory encoding takes on each device.

        The estimate consists of the weights of the autoencoder and the arrays for a block of
        tokens. Tokens are encoded in blocks, one block at a time. The records of codes that the
        step returns do not count.

        Args:
            layout: The mesh of devices, and the rules for splitting arrays along its axes.

        Returns:
            The number of bytes on each device.
        """
        weight_count = sum(weight_array.size for weight_array in self.autoencoder.arrays.values())
        weight_part_count = layout.size(*RULES["head_vocab"], *RULES["embed"])
        # About four arrays with values of a block of tokens exist at a time, and each float32 value
        # has four bytes.
        block_bytes = 4 * 4 * VALUES_OF_A_BLOCK
        return weight_count * self.autoencoder.dtype.itemsize / weight_part_count + block_bytes

    def shapes(self, layout: Layout) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes, dtypes and shardings of the autoencoder's arrays on the devices.

        Args:
            layout: The mesh of devices, and the rules for splitting arrays along its axes.

        Returns:
            Field of `Autoencoder` -> the shape, dtype and sharding of its array.
        """
        shape_by_field = {}
        for field_name, weight_array in self.autoencoder.arrays.items():
            dtype_on_devices = (
                self.autoencoder.dtype if weight_array.ndim > 1 else np.dtype(np.float32)
            )
            sharding = layout.sharding(AXES[field_name], weight_array.shape)
            shape_by_field[field_name] = jax.ShapeDtypeStruct(
                weight_array.shape, dtype_on_devices, sharding=sharding
            )
        return shape_by_field

    def weights(self, layout: Layout) -> Weights:
        """Copies the autoencoder's arrays to the devices, to each device only its part of an array.

        Args:
            layout: The mesh of devices, and the rules for splitting arrays along its axes.

        Returns:
            Field of `Autoencoder` -> its array on the devices.
        """

        def load(array: np.ndarray, shape: jax.ShapeDtypeStruct) -> Array:
            def read_part(index: Any) -> np.ndarray:
                return array[index].astype(shape.dtype, order="C")

            return jax.make_array_from_callback(shape.shape, shape.sharding, read_part)

        return jax.tree.map(load, self.autoencoder.arrays, self.shapes(layout))


def make_encoders(
    autoencoders: Sequence[Autoencoder],
    max_codes_per_token: int | None,
    table: HookTable,
    depth: int,
    sizes: Mapping[str, int],
) -> tuple[Encoder, ...]:
    """Returns an encoder for each autoencoder, in the order in which their hooks are computed.

    Args:
        autoencoders: The autoencoders.
        max_codes_per_token: The largest number of features that are kept for each token, from
            --encode_most. None for the k of each autoencoder, or DEFAULT_MOST for an autoencoder
            without k.
        table: The hooks of the model.
        depth: The number of layers of the model.
        sizes: Letter of an axis -> its size in the model (see `HookKind.axis_letters`).

    Raises:
        InputError: If the model lacks a hook, a hook has another width than the autoencoder, or two
            autoencoders read the same hook.
    """
    encoders: list[Encoder] = []
    for autoencoder in autoencoders:
        flag_and_name = f"--encode {plain_url(autoencoder.name)}"
        source_hook = _hook_of_width(
            autoencoder.hook_name, autoencoder.W_enc.shape[1], flag_and_name, table, depth, sizes
        )
        target_hook = _hook_of_width(
            autoencoder.target_hook_name, len(autoencoder.b_dec), flag_and_name, table, depth, sizes
        )
        if any(encoder.source_hook == source_hook for encoder in encoders):
            raise InputError(f"{flag_and_name}: {source_hook.name} has another autoencoder already")
        max_active_features = autoencoder.k or autoencoder.features
        max_codes_per_token_of_encoder = min(
            max_codes_per_token or autoencoder.k or DEFAULT_MOST, max_active_features
        )
        encoders.append(
            Encoder(autoencoder, source_hook, target_hook, max_codes_per_token_of_encoder)
        )
    return tuple(sorted(encoders, key=lambda encoder: encoder.source_hook))


def _hook_of_width(
    name: str, width: int, flag: str, table: HookTable, depth: int, sizes: Mapping[str, int]
) -> Hook:
    """Returns the hook with a given name, after checking the width of its activations.

    Args:
        name: The name of the hook.
        width: The width of the autoencoder, which the hook must have.
        flag: The flag and its value, for messages.
        table: The hooks of the model.
        depth: The number of layers of the model.
        sizes: Letter of an axis -> its size in the model.

    Raises:
        InputError: If the model has no such hook or several of them, or if the hook has another
            width.
    """
    try:
        matching_hooks = [*table.matching([name], depth).values()]
    except InputError as error:
        raise InputError(f"{flag}: {str(error).removeprefix('--hook_names ')}") from error
    if len(matching_hooks) > 1 or matching_hooks[0].kind.dtype is not None:
        raise InputError(f"{flag}: {name} is not one hook with activations")
    matching_hook = matching_hooks[0]
    hook_width = matching_hook.kind.width(sizes)
    if hook_width != width:
        raise InputError(
            f"{flag}: is for {width:,} numbers per token, {matching_hook.name} has {hook_width:,}; "
            "is it of another model?"
        )
    return matching_hook


def encode(
    encoder: Encoder, weight_by_field_name: Weights, x: Array, target_values: Array, layout: Layout
) -> Array:
    """Encodes activations by an autoencoder, and returns a record of codes for each token.

    A record contains the number of active features of the token, the squared error of the
    reconstruction, the norm of the token's `target_values`, and the ids and values of the features
    that are kept. common/codes.py describes its format.

    Letters: D width of the hook that is read, O width of the hook that is reconstructed.

    Args:
        encoder: The autoencoder, with the hooks that it reads and reconstructs.
        weight_by_field_name: Field of `Autoencoder` -> its array on the devices.
        x: The values at the hook that is read, (B, T, D).
        target_values: The values at the hook that is reconstructed, (B, T, O).
        layout: The mesh of devices, and the rules for splitting arrays along its axes.

    Returns:
        The record of each token, (B, T, 3 + 2 * `encoder.max_codes_per_token`) int32.
    """
    feature_part_count = layout.size(*RULES["head_vocab"])
    tokens_per_block = VALUES_OF_A_BLOCK * feature_part_count // encoder.autoencoder.features
    weight_by_field_name = {
        field_name: layout.gather(weight, AXES[field_name])
        for field_name, weight in weight_by_field_name.items()
    }
    values_at_hooks = [x] if encoder.source_hook == encoder.target_hook else [x, target_values]

    def records_of_block(block_values: Sequence[Array]) -> Array:
        sharded_values_of_hooks = [
            layout.constrain(hook_array, "batch", "sequence", "hidden")
            for hook_array in block_values
        ]
        return _records(
            encoder,
            weight_by_field_name,
            sharded_values_of_hooks[0],
            sharded_values_of_hooks[-1],
            layout,
        )

    with jax.named_scope("encode"):
        return in_blocks(records_of_block, values_at_hooks, tokens_per_block, layout)


def _records(
    encoder: Encoder, weight_by_field_name: Weights, x: Array, target_values: Array, layout: Layout
) -> Array:
    """Encodes a block of tokens by an autoencoder, and returns a record of codes for each token.

    A record contains the number of active features of the token, the squared error of the
    reconstruction, the norm of the token's `target_values`, and the ids and values of the features
    that are kept. common/codes.py describes its format.

    The docstring of `Autoencoder` has the formula. Its `pre` and `score` are called
    `pre_activations` and `feature_scores` here.

    Letters: D width of the hook that is read, O width of the hook that is reconstructed.

    Args:
        encoder: The autoencoder, with the hooks that it reads and reconstructs.
        weight_by_field_name: Field of `Autoencoder` -> its array on the devices.
        x: The block's values at the hook that is read, (B, T, D).
        target_values: The block's values at the hook that is reconstructed, (B, T, O).
        layout: The mesh of devices, and the rules for splitting arrays along its axes.

    Returns:
        The record of each token, (B, T, 3 + 2 * `encoder.max_codes_per_token`) int32.
    """
    autoencoder = encoder.autoencoder
    product_dtype = autoencoder.dtype
    rounded_input = x.astype(product_dtype).astype(jnp.float32)
    x, undo_normalisation = _normalised(rounded_input, autoencoder.normalisation)
    if autoencoder.subtracts_b_dec:
        x = x - weight_by_field_name["b_dec"]
    pre_activations = (
        einsum("BTD,FD->BTF", x.astype(product_dtype), weight_by_field_name["W_enc"])
        + weight_by_field_name["b_enc"]
    )
    pre_activations = layout.constrain(pre_activations, *FEATURE_AXES)
    feature_scores = pre_activations
    active_feature_mask = jnp.ones(pre_activations.shape, bool)
    if autoencoder.feature_score_factors is not None:
        feature_scores = pre_activations * weight_by_field_name["feature_score_factors"]
    if autoencoder.threshold is not None:
        active_feature_mask &= feature_scores > weight_by_field_name["threshold"]
    if autoencoder.uses_relu:
        active_feature_mask &= pre_activations > 0
    feature_scores = jnp.where(active_feature_mask, feature_scores, -jnp.inf)
    top_scores, feature_ids = largest(feature_scores, encoder.max_codes_per_token, layout)
    active_feature_counts = active_feature_mask.sum(axis=-1, keepdims=True, dtype=jnp.int32)
    if autoencoder.k is not None:
        active_feature_counts = jnp.minimum(active_feature_counts, autoencoder.k)
    # If several features have the lowest kept score, `largest` keeps the features with the smallest
    # ids among them. `kept_feature_mask` selects the same features. The lowest score is computed as
    # a minimum, because with a slice of `top_scores` XLA would sort all features, which takes 30
    # times as long.
    lowest_kept_scores = top_scores.min(axis=-1, keepdims=True)
    largest_kept_tied_ids = jnp.where(top_scores == lowest_kept_scores, feature_ids, -1).max(
        -1, keepdims=True
    )
    kept_tied_feature_mask = (feature_scores == lowest_kept_scores) & (
        jnp.arange(pre_activations.shape[-1]) <= largest_kept_tied_ids
    )
    kept_feature_mask = (feature_scores > lowest_kept_scores) | kept_tied_feature_mask
    kept_feature_values = jnp.where(
        kept_feature_mask & active_feature_mask, pre_activations, 0
    ).astype(product_dtype)
    reconstruction = (
        einsum("BTF,FO->BTO", kept_feature_values, weight_by_field_name["W_dec"])
        + weight_by_field_name["b_dec"]
    )
    if encoder.source_hook == encoder.target_hook:
        reconstruction = undo_normalisation(reconstruction)
    if autoencoder.W_skip is not None:
        reconstruction += einsum(
            "BTD,OD->BTO", rounded_input.astype(product_dtype), weight_by_field_name["W_skip"]
        )
    target_values = target_values.astype(jnp.float32)
    squared_errors = jnp.square(target_values - reconstruction).sum(axis=-1, keepdims=True)
    target_norms = jnp.sqrt(jnp.square(target_values).sum(axis=-1, keepdims=True))
    feature_values = top_scores
    if autoencoder.feature_score_factors is not None:
        feature_values = top_scores / jnp.take(
            weight_by_field_name["feature_score_factors"], feature_ids
        )
    # If a token has fewer than `max_codes_per_token` active features, the remaining scores are
    # -inf.
    active_code_mask = jnp.isfinite(top_scores)
    feature_ids = jnp.where(active_code_mask, feature_ids, autoencoder.features)
    feature_values = jnp.where(active_code_mask, feature_values, 0)
    feature_ids, feature_values = lax.sort((feature_ids, feature_values), num_keys=1)
    as_int32_bits = partial(lax.bitcast_convert_type, new_dtype=jnp.int32)
    record_parts = [
        active_feature_counts,
        as_int32_bits(squared_errors),
        as_int32_bits(target_norms),
        feature_ids,
        as_int32_bits(feature_values),
    ]
    return jnp.concatenate(record_parts, axis=-1)


def _normalised(x: Array, normalisation: str) -> tuple[Array, Callable[[Array], Array]]:
    """Normalises the input of an autoencoder.

    Args:
        x: The input, (B, T, D) float32.
        normalisation: See `Autoencoder.normalisation`.

    Returns:
        A tuple of:
            The normalised input, (B, T, D) float32.
            A function that takes an output of the decoder, (B, T, D), and undoes the normalisation.
    """
    if normalisation == "constant_norm_rescale":
        input_scale = math.sqrt(x.shape[-1]) / jnp.linalg.norm(x, axis=-1, keepdims=True)
        return x * input_scale, lambda output: output / input_scale
    if normalisation == "layer_norm":
        input_mean = x.mean(axis=-1, keepdims=True)
        input_standard_deviation = jnp.std(x, axis=-1, keepdims=True, ddof=1)
        return (x - input_mean) / (
            input_standard_deviation + EPSILON
        ), lambda output: output * input_standard_deviation + input_mean
    return x, lambda output: output
