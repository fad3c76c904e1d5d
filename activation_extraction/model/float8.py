"""Reads float8 checkpoints, which store weights as one byte per value and multiply them by scales.

Each byte is a float8 number of the type e4m3. The scales of a tensor X are in the tensor
X_scale_inv or X_scale. There is one scale for all of X, one for each row, or one for each block of
rows and columns. A weight is the product of its float8 number and its scale, computed in float32
and rounded once to the dtype of the run. Whether X is float8 follows from the dtype of X alone. So
the list in config.json of modules that are not quantised is not read.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.common.encodings import VALUE_DTYPE, VALUES_AT_ONCE
from activation_extraction.common.errors import InputError
from activation_extraction.common.safetensors import DTYPE_NAMES, DTYPES, Tensor
from activation_extraction.model.weight_files import FLOAT_TYPES, Index, WeightFile

Shape = tuple[int, ...]
# The description of a float8 checkpoint's weights in messages to the user.
DEQUANTIZED = "float8 weights, dequantised"
# The scales of a tensor are in a tensor with the same name and one of these endings. With both
# endings the scales are factors, although one ending says inverse.
ENDINGS = ("_scale_inv", "_scale")
# Names of scales and zero points of activations and caches, which are not read, because the model
# computes with activations that are not quantised, and has no caches. The names come from
# compressed-tensors (quant_metadata.py, initialize.py), from vLLM's loaders (get_cache_scale and
# maybe_remap_kv_scale_name), and from the fused experts of transformers.
OTHER_SCALES = re.compile(
    r"(.*[._])?(input|output|activation|prob|q|k|v|kv|cache)_(global_scale|scale|zero_point)"
)
# The dtypes of scales that are read, by their names in safetensors.
SCALE_DTYPE_NAMES = ("F32", "BF16", "F16", "F8_E8M0")
# Supported quant_method in config.json -> the field with the number format of the weights, and the
# values of this field that mean float8.
METHODS = {
    "fp8": ("fmt", ("e4m3", None)),
    "compressed-tensors": ("format", ("float-quantized", "naive-quantized")),
    "modelopt": ("quant_algo", ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")),
}
# Byte -> the float8 number that it stands for, as float32.
FLOAT32_OF_BYTE = np.arange(256, dtype=np.uint8).view(VALUE_DTYPE).astype(np.float32)
NAN_BYTE = 0x7F  # the byte of NaN, without the sign bit


class Float8Format(NamedTuple):
    """The block size and the dtypes of the scales of a float8 checkpoint.

    Attributes:
        block_size: The number of rows and the number of columns of a block.
        scale_dtype_names: The dtypes that scales may have, by their names in safetensors.
    """

    block_size: tuple[int, int] = (128, 128)
    scale_dtype_names: tuple[str, ...] = SCALE_DTYPE_NAMES


def float8_format(raw: Mapping[str, Any], source: str) -> Float8Format | None:
    """Returns how a checkpoint stores the scales of its float8 weights, according to config.json.

    Args:
        raw: The contents of config.json.
        source: The path of config.json, for messages.

    Returns:
        The size of the blocks of weights that share a scale, and the dtypes that scales may have;
        None if config.json describes no quantisation.

    Raises:
        InputError: If config.json describes another quantisation than float8, an invalid size of
            blocks, or blocks of several sizes. Also if its transform_config demands that
            activations are transformed while the model runs.
    """
    quantization_setting = _quantization(raw)
    if quantization_setting is None:
        return None
    quantization_config: Mapping[str, Any] = (
        quantization_setting
        if isinstance(quantization_setting, Mapping)
        else {"quant_method": quantization_setting}
    )
    _reject_transforms(quantization_config, source)
    quant_method = str(quantization_config.get("quant_method"))
    name_of_format_field, float8_format_names = METHODS.get(quant_method, ("quant_algo", ()))
    name_of_weight_format = quantization_config.get(name_of_format_field)
    config_groups = quantization_config.get("config_groups") or {}
    try:
        weight_settings_of_config_groups = [
            config_group["weights"]
            for config_group in config_groups.values()
            if config_group.get("weights")
        ]
        is_every_config_group_float8 = all(
            (weight_settings["num_bits"], weight_settings["type"]) == (8, "float")
            for weight_settings in weight_settings_of_config_groups
        )
        block_sizes_of_config_groups = [
            weight_settings.get("block_structure")
            for weight_settings in weight_settings_of_config_groups
        ]
    except (AttributeError, KeyError, TypeError):
        is_every_config_group_float8 = False
    if not is_every_config_group_float8 or name_of_weight_format not in float8_format_names:
        quantization_phrase = (
            f"{quant_method}, {name_of_weight_format}" if name_of_weight_format else quant_method
        )
        raise InputError(
            f"{source}: quantization_config ({quantization_phrase:.80}): quantised checkpoints "
            "are not supported, but for float8 (fp8, and that of compressed-tensors and modelopt); "
            "use bfloat16"
        )
    block_size_settings = [
        quantization_config.get("weight_block_size"),
        *block_sizes_of_config_groups,
    ]
    block_sizes = [
        block_size_setting for block_size_setting in block_size_settings if block_size_setting
    ] or [[128, 128]]
    block_size = block_sizes[0]
    has_equal_block_sizes = all(
        type(candidate_block_size) is list and candidate_block_size == block_size
        for candidate_block_size in block_sizes
    )
    if not has_equal_block_sizes or [*map(type, block_size)] != [int, int] or min(block_size) < 1:
        raise InputError(
            f"{source}: quantization_config: {block_sizes!r:.80} is not one size of blocks"
        )
    # With this scale_fmt, the scales may be stored as bytes, each of which is an exponent.
    exponent_scale_dtype_names = ("U8",) if quantization_config.get("scale_fmt") == "ue8m0" else ()
    return Float8Format(
        (block_size[0], block_size[1]), SCALE_DTYPE_NAMES + exponent_scale_dtype_names
    )


def _reject_transforms(quantization: Mapping[str, Any], source: str) -> None:
    """Rejects weights that are right only if activations are transformed while the model runs.

    In the library compressed-tensors, such transforms are rotations, as in SpinQuant and QuIP. For
    models that need no transforms, the library writes a transform_config that is empty or contains
    no groups.

    Args:
        quantization: The quantization_config of the model.
        source: The path of config.json, for the message.

    Raises:
        InputError: If the model needs transforms.
    """
    transform_config = quantization.get("transform_config")
    needs_transforms = bool(transform_config)
    if isinstance(transform_config, Mapping) and not transform_config.get("config_groups"):
        needs_transforms = bool(transform_config.keys() - {"config_groups"})
    if needs_transforms:
        raise InputError(
            f"{source}: quantization_config has a transform_config: activations are rotated while "
            "this model runs, which is not supported; use a checkpoint without transforms"
        )


def _quantization(raw: Mapping[str, Any]) -> Any:
    """Returns the quantization_config of a model.

    The field is usually at the top of config.json. If it is missing there, it is looked for in the
    sections of a multimodal model that describe the language model: first in text_config, then in
    thinker_config and in the text_config inside thinker_config.

    Args:
        raw: The contents of config.json. When the function calls itself, a section of config.json.

    Returns:
        The value of quantization_config; None if none of these places contains the field.
    """
    quantization_config = raw.get("quantization_config")
    for section_name in ("text_config", "thinker_config"):
        if quantization_config is None and isinstance(raw.get(section_name), Mapping):
            quantization_config = _quantization(raw[section_name])
    return quantization_config


def scale_names(tensor: str, tensors: Collection[str]) -> list[str]:
    """Returns the names of the tensors that contain a tensor's scales.

    In a valid checkpoint, a float8 tensor has one tensor of scales, and other tensors have none.

    Args:
        tensor: The name of the tensor.
        tensors: The names of all tensors of the checkpoint.

    Returns:
        The names, as a list; empty if the tensor has no scales.
    """
    possible_scale_names = [tensor + scale_ending for scale_ending in ENDINGS]
    return [scale_name for scale_name in possible_scale_names if scale_name in tensors]


def without_scales(tensors: Collection[str], source: str) -> set[str]:
    """Returns the names of the tensors that are not scales or zero points.

    Args:
        tensors: The names of all tensors.
        source: The path of the checkpoint, for the message.

    Raises:
        InputError: If the checkpoint contains the scales of a tensor, but not the tensor itself.
    """
    tensor_names = {
        tensor_name for tensor_name in tensors if not OTHER_SCALES.fullmatch(tensor_name)
    }
    for tensor_name in sorted(tensor_names):
        scale_ending = next(filter(tensor_name.endswith, ENDINGS), None)
        if scale_ending is None:
            continue
        name_of_scaled_tensor = tensor_name.removesuffix(scale_ending)
        if name_of_scaled_tensor not in tensors:
            raise InputError(
                f"{source}: {tensor_name} is a scale without its tensor, {name_of_scaled_tensor}"
            )
        tensor_names.remove(tensor_name)
    return tensor_names


@dataclass(frozen=True)
class Scales:
    """The scales of a float8 tensor, by which its stored values are multiplied.

    This object contains the place and the layout of the scales. `dequantize` reads the scales.

    Attributes:
        scaled_tensor_name: The name of the float8 tensor in the language model.
        scaled_tensor_shape: The shape of the float8 tensor.
        scales_file: The file that contains the scales.
        scales_tensor_name: The name of the tensor of scales in this file.
        block_shape_of_scale: The shape of the blocks of values that share a scale: for each axis of
            the tensor, the number of consecutive values.
    """

    scaled_tensor_name: str
    scaled_tensor_shape: Shape
    scales_file: WeightFile
    scales_tensor_name: str
    block_shape_of_scale: Shape

    @classmethod
    def find(
        cls,
        tensor: str,
        tensors: Mapping[str, str],
        locate: Callable[[str], tuple[WeightFile, Tensor]],
        float8: Float8Format,
    ) -> "Scales | None":
        """Finds the scales of a tensor, and checks their dtype and shape.

        Args:
            tensor: The name of the tensor in the language model.
            tensors: Name of each tensor in the language model -> name in the files.
            locate: A function that maps the name of a tensor to the file that contains it, and the
                tensor's entry in the header of the file.
            float8: The format of the scales in config.json.

        Returns:
            The scales; None for a tensor that is not float8.

        Raises:
            InputError: If the dtype of the tensor is not supported, or its scales are missing or
                inconsistent with it.
        """
        tensor_file, header_entry = locate(tensor)
        names_of_scales = scale_names(tensor, tensors)
        tensor_dtype_name = DTYPE_NAMES[header_entry.dtype]
        expected_scale_tensor_count = int(header_entry.dtype == VALUE_DTYPE)
        tensor_phrase = f"{tensor_file.location}: tensor {tensor} is {tensor_dtype_name}"
        if expected_scale_tensor_count == 0 and tensor_dtype_name not in FLOAT_TYPES:
            float_types_text = ", ".join(FLOAT_TYPES)
            raise InputError(
                f"{tensor_phrase}; only {float_types_text} and, beside its scales, F8_E4M3 are read"
            )
        zero_point_name = f"{tensor}_zero_point"
        if zero_point_name in tensors:
            raise InputError(f"{tensor_phrase} and has {zero_point_name}: zero points are not read")
        if len(names_of_scales) != expected_scale_tensor_count:
            scale_names_text = " and ".join(names_of_scales) or f"no {tensor}{ENDINGS[0]}"
            raise InputError(
                f"{tensor_phrase} and has {scale_names_text}, "
                f"expected {expected_scale_tensor_count or 'no'} tensor of scales"
            )
        if not names_of_scales:
            return None
        scale_tensor_name = names_of_scales[0]
        scale_file, scale_header_entry = locate(scale_tensor_name)
        block_shape_by_scales_shape = _layouts(header_entry.shape, float8.block_size)
        scale_dtype_name = DTYPE_NAMES[scale_header_entry.dtype]
        if (
            scale_dtype_name not in float8.scale_dtype_names
            or scale_header_entry.shape not in block_shape_by_scales_shape
        ):
            raise InputError(
                f"{scale_file.location}: tensor {scale_tensor_name} is {scale_dtype_name} of shape "
                f"{scale_header_entry.shape}; scales of {header_entry.shape} in blocks of "
                f"{float8.block_size} are read in {', '.join(float8.scale_dtype_names)} and have "
                "one of the shapes "
                f"{', '.join(map(str, block_shape_by_scales_shape))}"
            )
        return cls(
            tensor,
            header_entry.shape,
            scale_file,
            tensors[scale_tensor_name],
            block_shape_by_scales_shape[scale_header_entry.shape],
        )

    def dequantize(self, stored_values: np.ndarray, index: Index, dtype: Any) -> np.ndarray:
        """Returns the values of a part of the tensor, multiplied by their scales.

        For each scale, the function computes a lookup table with the products of the scale and the
        256 possible float8 numbers. With these tables, a layer of Qwen3-8B (0.2 GB) is loaded in
        0.9 CPU seconds. It would take 1.4 CPU seconds to multiply and round each value.

        Args:
            stored_values: The float8 numbers of the part, as stored, without their scales.
            index: The part of the tensor, as a (start, stop) slice for every axis.
            dtype: The dtype of the result.

        Returns:
            The values, with the shape of `stored_values`.

        Raises:
            InputError: If a stored value or a scale is not a finite number.
        """
        # For each axis of the tensor, an array with an entry for each index along this axis in the
        # part of the tensor that is dequantised. The entry is the index of the scale along the same
        # axis.
        scale_indices_of_axes = []
        for axis_slice, axis_size, values_per_scale in zip(
            index, self.scaled_tensor_shape, self.block_shape_of_scale, strict=True
        ):
            start_index, stop_index, _ = axis_slice.indices(axis_size)
            scale_indices_of_axes.append(np.arange(start_index, stop_index) // values_per_scale)
        scale_indices_of_leading_axes = scale_indices_of_axes[:-2]
        row_scale_indices, column_scale_indices = scale_indices_of_axes[-2:]
        lookup_table_size = len(FLOAT32_OF_BYTE)
        scales_of_columns = self._read()[
            ..., column_scale_indices[0] : column_scale_indices[-1] + 1
        ]
        scale_count_per_row = scales_of_columns.shape[-1]
        lookup_table_offsets_of_columns = (
            column_scale_indices - column_scale_indices[0]
        ) * lookup_table_size
        dequantized_values = np.empty(stored_values.shape, dtype)
        # The rows are computed in chunks, so that neither the values of a chunk nor its lookup
        # tables leave a core's caches.
        table_value_count_per_row = (
            lookup_table_size * scale_count_per_row // self.block_shape_of_scale[-2]
        )
        rows_per_chunk = max(
            VALUES_AT_ONCE // max(len(column_scale_indices), table_value_count_per_row), 1
        )
        for matrix_index in np.ndindex(stored_values.shape[:-2]):
            scale_matrix_index = tuple(
                scale_indices_along_axis[index_on_axis]
                for scale_indices_along_axis, index_on_axis in zip(
                    scale_indices_of_leading_axes, matrix_index, strict=True
                )
            )
            scale_matrix = scales_of_columns[scale_matrix_index]
            for first_row_index in range(0, len(row_scale_indices), rows_per_chunk):
                chunk_slice = slice(first_row_index, first_row_index + rows_per_chunk)
                chunk_values_as_uint8 = stored_values[matrix_index][chunk_slice].view(np.uint8)
                chunk_scale_indices = row_scale_indices[chunk_slice]
                if (chunk_values_as_uint8 & NAN_BYTE).max() == NAN_BYTE:
                    raise InputError(
                        f"{self.scales_file.location}: tensor {self.scaled_tensor_name} has NaN "
                        "values"
                    )
                chunk_scales = scale_matrix[
                    chunk_scale_indices[0] : chunk_scale_indices[-1] + 1, :, None
                ]
                scaled_value_table = (FLOAT32_OF_BYTE * chunk_scales).astype(dtype).reshape(-1)
                # The smallest dtype that can index the table moves the fewest bytes.
                index_dtype = np.min_scalar_type(len(scaled_value_table))
                table_indices = np.add(
                    chunk_values_as_uint8,
                    lookup_table_offsets_of_columns.astype(index_dtype),
                    dtype=index_dtype,
                )
                lookup_table_offsets_of_rows = (
                    (chunk_scale_indices - chunk_scale_indices[0])
                    * lookup_table_size
                    * scale_count_per_row
                )
                table_indices += lookup_table_offsets_of_rows.astype(index_dtype)[:, None]
                # In its default mode, "raise", np.take would copy the values once more.
                np.take(
                    scaled_value_table,
                    table_indices,
                    out=dequantized_values[matrix_index][chunk_slice],
                    mode="wrap",
                )
        return dequantized_values

    def _read(self) -> np.ndarray:
        """Reads all scales of the tensor.

        Returns:
            The scales, float32, with as many axes as the tensor. The size of an axis is the number
            of scales along this axis.

        Raises:
            InputError: If a scale is not a finite number.
        """
        header_entry = self.scales_file.tensors[self.scales_tensor_name]
        whole_tensor_index = tuple(slice(0, axis_size) for axis_size in header_entry.shape)
        stored_scales = self.scales_file.read(self.scales_tensor_name, whole_tensor_index)
        if stored_scales.dtype == np.uint8:
            stored_scales = stored_scales.view(DTYPES["F8_E8M0"])
        stored_scales = stored_scales.astype(np.float32)
        if not np.isfinite(stored_scales).all():
            raise InputError(
                f"{self.scales_file.location}: tensor {self.scales_tensor_name} has NaN or "
                "infinite scales"
            )
        scale_counts_of_axes = [
            -(-axis_size // values_per_scale)
            for axis_size, values_per_scale in zip(
                self.scaled_tensor_shape, self.block_shape_of_scale, strict=True
            )
        ]
        return stored_scales.reshape(scale_counts_of_axes)


def _layouts(shape: Shape, block_size: tuple[int, int]) -> dict[Shape, Shape]:
    """Returns the shapes that the scales of a float8 tensor may have, with the meaning of each.

    Args:
        shape: The shape of the tensor, (rows, columns) or (experts, rows, columns).
        block_size: The number of rows and the number of columns of a block.

    Returns:
        A dict: possible shape of the scales -> for each axis of the tensor, the number of
        consecutive values that share a scale. The dict is empty for a tensor that has neither 2
        nor 3 axes.
    """
    if len(shape) not in (2, 3):
        return {}
    *expert_axis_sizes, row_count, column_count = shape
    expert_block_sizes = (1,) * len(expert_axis_sizes)  # empty if the tensor has no axis of experts
    # The last block of rows and the last block of columns may be smaller than the others.
    block_counts_of_axes = -(-row_count // block_size[0]), -(-column_count // block_size[1])
    block_shape_by_scales_shape = {
        (1,): shape,
        (*expert_axis_sizes, row_count, 1): (*expert_block_sizes, 1, column_count),
    }
    if expert_axis_sizes:
        shapes_with_one_scale_per_expert = (
            (*expert_axis_sizes,),
            (*expert_axis_sizes, 1),
            (*expert_axis_sizes, 1, 1),
        )
        block_shape_by_scales_shape |= dict.fromkeys(
            shapes_with_one_scale_per_expert, (*expert_block_sizes, row_count, column_count)
        )
    block_shape_by_scales_shape |= {
        (*expert_axis_sizes, *block_counts_of_axes): (*expert_block_sizes, *block_size)
    }
    if not expert_axis_sizes:
        # modelopt writes scales of rows and of blocks in these shapes.
        block_shape_by_scales_shape |= {
            (row_count,): (1, column_count),
            (block_counts_of_axes[0], 1, block_counts_of_axes[1], 1): block_size,
        }
    return block_shape_by_scales_shape
