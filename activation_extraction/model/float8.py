"""Float8 checkpoints store weights in one byte per value (e4m3), and scales that multiply them.

The scales of a tensor X are the tensor X_scale_inv or X_scale: one scale for all of X, one for each
row, or one for each block of rows and columns. Whether X is float8 follows from the tensors alone;
config.json's list of modules that are not quantised is not consulted. A value is float32(code) *
float32(scale), and is rounded once, to the dtype of the run.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.common.encodings import AT_ONCE, VALUES
from activation_extraction.common.errors import InputError
from activation_extraction.common.safetensors import DTYPE_NAMES, DTYPES, Tensor
from activation_extraction.model.weight_files import FLOAT_TYPES, Index, WeightFile

Shape = tuple[int, ...]
DEQUANTIZED = "float8 weights, dequantised"
ENDINGS = ("_scale_inv", "_scale")  # both multiply, although one is called inverse
# Scales and zero points of activations and caches, which a run does not hold in float8. Names are
# those of compressed-tensors (quant_metadata.py, initialize.py), of vLLM's loaders
# (get_cache_scale and maybe_remap_kv_scale_name), and of transformers' fused experts.
OTHER_SCALES = re.compile(
    r"(.*[._])?(input|output|activation|prob|q|k|v|kv|cache)_(global_scale|scale|zero_point)"
)
SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0")
# quant_method in config.json -> the field with details, and its values that mean float8 weights.
METHODS = {
    "fp8": ("fmt", ("e4m3", None)),
    "compressed-tensors": ("format", ("float-quantized", "naive-quantized")),
    "modelopt": ("quant_algo", ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO")),
}
FLOAT32_OF_CODE = np.arange(256, dtype=np.uint8).view(VALUES).astype(np.float32)
NAN_CODE = 0x7F  # the bits of NaN, without the sign


class Float8Format(NamedTuple):
    """The form of the scales, as config.json describes it.

    Attributes:
        block: The rows and the columns of a block.
        types: The types of scales that are read, by their names in safetensors.
    """

    block: tuple[int, int] = (128, 128)
    types: tuple[str, ...] = SCALE_TYPES


def float8_format(raw: Mapping[str, Any], source: str) -> Float8Format | None:
    """Returns the form of the scales; None if the weights are not quantised.

    Args:
        raw: Contents of config.json.
        source: Path of config.json, for messages.

    Raises:
        InputError: If the weights are quantised in another form than float8, or if activations are
            transformed while the model runs.
    """
    stated = _quantization(raw)
    if stated is None:
        return None
    quantization: Mapping[str, Any] = (
        stated if isinstance(stated, Mapping) else {"quant_method": stated}
    )
    _refuse_transforms(quantization, source)
    method = str(quantization.get("quant_method"))
    field, float8_details = METHODS.get(method, ("quant_algo", ()))
    detail, groups = quantization.get(field), quantization.get("config_groups") or {}
    try:
        weights = [group["weights"] for group in groups.values() if group.get("weights")]
        sound = all(
            (of_group["num_bits"], of_group["type"]) == (8, "float") for of_group in weights
        )
        blocks = [of_group.get("block_structure") for of_group in weights]
    except (AttributeError, KeyError, TypeError):
        sound = False
    if not sound or detail not in float8_details:
        named = f"{method}, {detail}" if detail else method
        raise InputError(
            f"{source}: quantization_config ({named:.80}): quantised checkpoints are not supported,"
            " but for float8 (fp8, and that of compressed-tensors and modelopt); use bfloat16"
        )
    blocks = [size for size in (quantization.get("weight_block_size"), *blocks) if size]
    blocks = blocks or [[128, 128]]
    block = blocks[0]
    sound = all(type(size) is list and size == block for size in blocks)
    if not sound or [*map(type, block)] != [int, int] or min(block) < 1:
        raise InputError(f"{source}: quantization_config: {blocks!r:.80} is not one size of blocks")
    exponents = ("U8",) if quantization.get("scale_fmt") == "ue8m0" else ()
    return Float8Format((block[0], block[1]), SCALE_TYPES + exponents)


def _refuse_transforms(quantization: Mapping[str, Any], source: str) -> None:
    """Raises InputError if the stored weights are right only with transforms of activations.

    With compressed-tensors these are rotations, as in SpinQuant and QuIP. An empty transform_config
    or one without groups is what it writes for models that have none.
    """
    transforms = quantization.get("transform_config")
    if isinstance(transforms, Mapping) and not transforms.get("config_groups"):
        transforms = transforms.keys() - {"config_groups"}
    if transforms:
        raise InputError(
            f"{source}: quantization_config has a transform_config: activations are rotated while "
            "this model runs, which is not supported; use a checkpoint without transforms"
        )


def _quantization(raw: Mapping[str, Any]) -> Any:
    """Returns the quantization_config of a model, or of the language model inside it."""
    quantization = raw.get("quantization_config")
    for section in ("text_config", "thinker_config"):
        if quantization is None and isinstance(raw.get(section), Mapping):
            quantization = _quantization(raw[section])
    return quantization


def scale_names(tensor: str, tensors: Collection[str]) -> list[str]:
    """Returns the names of a tensor's scales, of which a sound checkpoint has one or none."""
    return [name for ending in ENDINGS if (name := tensor + ending) in tensors]


def without_scales(tensors: Collection[str], source: str) -> set[str]:
    """Returns the names of the tensors that are not scales.

    Raises:
        InputError: If a scale of a weight has no weight.
    """
    names = {name for name in tensors if not OTHER_SCALES.fullmatch(name)}
    for name in sorted(names):
        if ending := next(filter(name.endswith, ENDINGS), None):
            if (scaled := name.removesuffix(ending)) not in tensors:
                raise InputError(f"{source}: {name} is a scale without its tensor, {scaled}")
            names.remove(name)
    return names


@dataclass(frozen=True)
class Scales:
    """The scales of a float8 tensor.

    Attributes:
        tensor: The name of the tensor.
        size: The shape of the tensor.
        file: The file that holds the scales.
        stored: The name of the tensor of scales in this file.
        shared: For each axis of the tensor, how many consecutive values share a scale.
    """

    tensor: str
    size: Shape
    file: WeightFile
    stored: str
    shared: Shape

    @classmethod
    def find(
        cls,
        tensor: str,
        tensors: Mapping[str, str],
        place: Callable[[str], tuple[WeightFile, Tensor]],
        form: Float8Format,
    ) -> "Scales | None":
        """Returns the scales of a tensor; None for a tensor that is not float8.

        Args:
            tensor: The name of the tensor in the language model.
            tensors: The names in the language model -> the names in the files.
            place: Returns the file that holds a tensor, and where it lies there.
            form: The form of the scales, as config.json describes it.

        Raises:
            InputError: The tensor has a type that is not read, or its scales are missing or do not
                fit.
        """
        (file, entry), names = place(tensor), scale_names(tensor, tensors)
        kind, wanted = DTYPE_NAMES[entry.dtype], int(entry.dtype == VALUES)
        where = f"{file.where}: tensor {tensor} is {kind}"
        if not wanted and kind not in FLOAT_TYPES:
            plain = ", ".join(FLOAT_TYPES)
            raise InputError(f"{where}; only {plain} and, beside its scales, F8_E4M3 are read")
        if (name := f"{tensor}_zero_point") in tensors:
            raise InputError(f"{where} and has {name}: zero points are not read")
        if len(names) != wanted:
            listed_scales = " and ".join(names) or f"no {tensor}{ENDINGS[0]}"
            raise InputError(
                f"{where} and has {listed_scales}, expected {wanted or 'no'} tensor of scales"
            )
        if not names:
            return None
        (beside, scales), (block, types) = place(names[0]), form
        layouts = _layouts(entry.shape, block)
        if DTYPE_NAMES[scales.dtype] not in types or scales.shape not in layouts:
            raise InputError(
                f"{beside.where}: tensor {names[0]} is {DTYPE_NAMES[scales.dtype]} of shape "
                f"{scales.shape}; scales of {entry.shape} in blocks of {block} are read in "
                f"{', '.join(types)} and have one of the shapes {', '.join(map(str, layouts))}"
            )
        return cls(tensor, entry.shape, beside, tensors[names[0]], layouts[scales.shape])

    def dequantize(self, codes: np.ndarray, index: Index, dtype: Any) -> np.ndarray:
        """Returns the values of a part of the tensor.

        Every scale makes a lookup table of the 256 values that codes can have. With these tables,
        a layer of Qwen3-8B (0.2 GB) is loaded in 0.9 CPU seconds; it takes 1.4 seconds if each
        value is multiplied and rounded.

        Args:
            codes: The codes of the part, as they are stored.
            index: A (start, stop) slice for every axis of the tensor, which is the part.
            dtype: The dtype of the values.

        Raises:
            InputError: A code or a scale is not a finite number.
        """
        bounds = [part.indices(size)[:2] for part, size in zip(index, self.size, strict=True)]
        *matrices, rows, columns = (
            np.arange(*bound) // shared for bound, shared in zip(bounds, self.shared, strict=True)
        )
        scales = self._read()[..., columns[0] : columns[-1] + 1]
        of_columns, width = (columns - columns[0]) * len(FLOAT32_OF_CODE), scales.shape[-1]
        values = np.empty(codes.shape, dtype)
        # So neither the values nor the tables of a piece leave a core's caches.
        tables = len(FLOAT32_OF_CODE) * width // self.shared[-2]  # per row
        most = max(AT_ONCE // max(len(columns), tables), 1)
        for matrix in np.ndindex(codes.shape[:-2]):
            of_matrix = scales[tuple(each[k] for each, k in zip(matrices, matrix, strict=True))]
            for start in range(0, len(rows), most):
                piece = slice(start, start + most)
                bits, of_rows = codes[matrix][piece].view(np.uint8), rows[piece]
                if (bits & NAN_CODE).max() == NAN_CODE:
                    raise InputError(f"{self.file.where}: tensor {self.tensor} has NaN codes")
                chosen = of_matrix[of_rows[0] : of_rows[-1] + 1, :, None]
                table = (FLOAT32_OF_CODE * chosen).astype(dtype).reshape(-1)
                kind = np.min_scalar_type(len(table))
                places = np.add(bits, of_columns.astype(kind), dtype=kind)
                of_rows = (of_rows - of_rows[0]) * len(FLOAT32_OF_CODE) * width
                places += of_rows.astype(kind)[:, None]
                np.take(table, places, out=values[matrix][piece], mode="wrap")  # "raise" copies
        return values

    def _read(self) -> np.ndarray:
        """Returns all scales in float32, with as many axes as the tensor; they are few."""
        entry = self.file.tensors[self.stored]
        scales = self.file.read(self.stored, tuple(slice(0, size) for size in entry.shape))
        if scales.dtype == np.uint8:
            scales = scales.view(DTYPES["F8_E8M0"])
        scales = scales.astype(np.float32)
        if not np.isfinite(scales).all():
            raise InputError(f"{self.file.where}: tensor {self.stored} has NaN or infinite scales")
        return scales.reshape([-(-n // k) for n, k in zip(self.size, self.shared, strict=True)])


def _layouts(shape: Shape, block: tuple[int, int]) -> dict[Shape, Shape]:
    """Returns the shapes that the scales of a tensor may have.

    Args:
        shape: The shape of the tensor, (rows, columns) or (experts, rows, columns).
        block: The rows and the columns of a block.

    Returns:
        Shape of the scales -> how many consecutive values share a scale along each axis of the
        tensor. Empty for a tensor of another number of axes.
    """
    if len(shape) not in (2, 3):
        return {}
    *experts, rows, columns = shape
    alone = (1,) * len(experts)
    blocks = -(-rows // block[0]), -(-columns // block[1])  # the last ones may be smaller
    layouts = {(1,): shape, (*experts, rows, 1): (*alone, 1, columns)}
    if experts:
        one_per_expert = (*experts,), (*experts, 1), (*experts, 1, 1)
        layouts |= dict.fromkeys(one_per_expert, (*alone, rows, columns))
    layouts |= {(*experts, *blocks): (*alone, *block)}
    if not experts:  # the forms in which modelopt writes scales of rows and of blocks
        layouts |= {(rows,): (1, columns), (blocks[0], 1, blocks[1], 1): block}
    return layouts
