"""Copies and checks the arrays that callers give to ActivationStorage.add_activation.

They are copied because the caller may use the same array again for the next sample. They may belong
to NumPy, PyTorch or JAX; neither PyTorch nor JAX is imported.
"""

import sys
from typing import Any

import ml_dtypes
import numpy as np

from activation_extraction.common.errors import one_line


def copy_array(values: Any) -> np.ndarray:
    """Returns a copy of an array as a NumPy array in C order and in the machine's byte order.

    Args:
        values: Array of NumPy, JAX or PyTorch, or lists of numbers.

    Raises:
        ValueError: A tensor requires grad or is not in the memory of the CPU, or NumPy cannot
            convert the values.
    """
    try:
        array = np.asarray(_without_torch(values))
        return np.array(array, array.dtype.newbyteorder("="), order="C")
    except (TypeError, RuntimeError, BufferError) as error:
        kind = f"{type(values).__name__} of {getattr(values, 'dtype', 'no dtype')}"
        raise ValueError(f"{kind}: expected an array of numbers: {one_line(error)}") from error


def _without_torch(values: Any) -> Any:
    """Returns a PyTorch tensor as a NumPy array in the same memory, and anything else as it is."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(values, torch.Tensor):
        return values
    if values.requires_grad or values.device.type != "cpu":
        problem = "requires grad" if values.requires_grad else f"is on {values.device}"
        raise ValueError(f"the tensor {problem}; give tensor.detach().cpu()")
    if values.dtype == torch.bfloat16:  # NumPy's DLPack lacks it
        return np.from_dlpack(values.view(torch.int16)).view(ml_dtypes.bfloat16)
    return np.from_dlpack(values)


def copy_as_int32(values: Any) -> np.ndarray:
    """Returns a copy of token ids, as int32 if they are integers that fit, or else in their dtype.

    Args:
        values: Ids in a form that `copy_array` takes.

    Raises:
        ValueError: `copy_array` cannot convert them.
    """
    array = copy_array(values)
    whole = array.dtype.kind in "iu" and (array == array.astype(np.int32)).all()
    return array.astype(np.int32) if whole or not array.size else array
