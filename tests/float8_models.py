"""Makes float8 checkpoints of tiny models, and transformers' models of the dequantised values."""

from typing import Any

import ml_dtypes
import numpy as np
from conftest import Reference, configure
from delta_reference import QWEN3_5, experts
from safetensors.numpy import load_file, save_file
from tiny_models import INTERLEAVED

E4M3, BFLOAT16 = np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.bfloat16)
FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = FP8 | {"weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}
FLOATS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [32, 16]}


def compressed(**weights: Any) -> dict[str, Any]:
    """Returns the `quantization_config` of a checkpoint in the format of compressed-tensors.

    Args:
        weights: Changed settings of its weights.
    """
    group = {"targets": ["Linear"], "weights": FLOATS | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }


def spread(scale: np.ndarray, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """Returns the scale of each value, in float32.

    Args:
        scale: The scales of rows, blocks, whole experts or the whole tensor.
        shape: The shape of the values.
        block: The rows and columns of a block.
    """
    scale = scale.astype(np.float32)
    if scale.shape == shape[:1]:  # of the rows
        scale = scale[:, None]
    elif scale.ndim == 4:
        scale = scale[:, 0, :, 0]
    while scale.ndim < len(shape):  # of a whole tensor, or of whole experts
        scale = scale[..., None]
    for axis, size in ((-2, block[0]), (-1, block[1])):
        if scale.shape[axis] not in (1, shape[axis]):
            scale = scale.repeat(size, axis)
    rows, columns = (min(a, b) for a, b in zip(scale.shape[-2:], shape[-2:], strict=True))
    return np.broadcast_to(scale[..., :rows, :columns], shape)


def quantised(values: np.ndarray, block: tuple[int, int], dtype: Any) -> tuple[np.ndarray, ...]:
    """Quantises a matrix, or a stack of experts' matrices, by blocks.

    Returns:
        The float8 codes, the scales of the blocks in `dtype`, and the dequantised values.
    """
    *first, rows, columns = values.shape
    scales = np.ones((*first, -(-rows // block[0]), -(-columns // block[1])), np.float32)
    for at in np.ndindex(scales.shape):
        *expert, i, j = at
        part = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
        scales[at] = np.abs(values[(*expert, *part)]).max() / 400
    scales = scales.astype(dtype)
    factors = spread(scales, values.shape, block)
    codes = (values / factors).astype(E4M3)
    return codes, scales, codes.astype(np.float32) * factors


# No matrix is a multiple of the blocks: 200 x 72, 72 x 200 and 100 x 72 values, in blocks of 128 or
# smaller ones.
ODD = dict(hidden_size=72, head_dim=50, num_key_value_heads=2, num_hidden_layers=3)
DENSE = ODD | dict(model_type="qwen3", intermediate_size=200)
SPARSE = ODD | experts(4, 2, 136, model_type="qwen3_moe", norm_topk_prob=True)
BESIDE_VISION = QWEN3_5["qwen3_5_tied_beside_vision"]
# The model, its quantization_config, the dtype of the scales, how experts are stored (the argument
# `fused` of `dequantised`), and the mesh.
FLOAT8: dict[str, tuple[dict[str, Any], dict[str, Any], Any, str, str]] = {
    "float8": (DENSE, BLOCKS, np.float32, "", "fsdp"),
    "float8 of compressed-tensors": (DENSE, compressed(), BFLOAT16, "", "pipeline"),
    "float8 experts": (SPARSE, BLOCKS, BFLOAT16, "", "fsdp"),
    "float8 interleaved": (INTERLEAVED, compressed(), np.float32, "", "fsdp"),
    "float8 beside vision": (BESIDE_VISION, BLOCKS, BFLOAT16, "fused", "one device"),
    "float8 fused experts": (SPARSE, BLOCKS, np.float16, "fused", "expert and fsdp"),
    "float8 fused experts, input first": (SPARSE, BLOCKS, BFLOAT16, "turned", "fsdp"),
}


def quantise(folder, config, dtype=BFLOAT16, state=None):
    """Turns the checkpoint in a folder into a float8 one.

    Args:
        folder: The folder of the checkpoint.
        config: The `quantization_config`.
        dtype: The dtype of the scales.
        state: The tensors to quantise, which are changed. None for those of the checkpoint.

    Returns:
        The stored tensors by name, and the dequantised values by name.
    """
    path = folder / "model.safetensors"
    state, stored = state or load_file(path), dict[str, np.ndarray]()
    block = (32, 16) if "config_groups" in config else (128, 128)
    ending = "_scale" if "config_groups" in config else "_scale_inv"
    for name, values in [*state.items()]:
        if "_proj" not in name or values.ndim < 2:
            stored[name] = values
            continue
        stored[name], stored[name + ending], state[name] = quantised(values, block, dtype)
    save_file(stored, path, {"format": "pt"})
    configure(folder, quantization_config=config)
    return stored, state


def turned(state):
    """Returns the tensors, with the last two axes of fused experts swapped."""
    fused = {key: tensor.swapaxes(1, 2).copy() for key, tensor in state.items() if tensor.ndim == 3}
    return state | fused


def dequantised(reference: Reference, config: dict[str, Any], dtype: Any, fused: str) -> Reference:
    """Turns the checkpoint of a model into a float8 one.

    Args:
        reference: The model and its checkpoint.
        config: The `quantization_config`.
        dtype: The dtype of the scales.
        fused: "" to store a tensor for each expert; "fused" to store all experts in one tensor;
            "turned" to store them so with the input axis first.

    Returns:
        transformers' model with the dequantised values.
    """
    import torch
    from transformers import AutoModelForCausalLM

    in_memory = {key: tensor.numpy() for key, tensor in reference.model.state_dict().items()}
    if fused == "turned":  # as in Qwen3-VL's checkpoints
        in_memory = turned(in_memory)
    _, state = quantise(reference.folder, config, dtype, in_memory if fused else None)
    if fused:
        state = turned(state) if fused == "turned" else state
        reference.model.load_state_dict({k: torch.tensor(v) for k, v in state.items()})
        return reference
    plain = reference.folder / "plain"
    reference.model.save_pretrained(plain)
    save_file(state, plain / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    return Reference(loaded.eval(), reference.folder)
