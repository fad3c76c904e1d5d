"""Copies and checks the arrays that callers give to ActivationStorage.

Arrays may be those of other programs, such as PyTorch's; neither PyTorch nor JAX is imported. The
caller may use its own array again for the next sample.
"""

import sys
from typing import Any

import ml_dtypes
import numpy as np

from activation_extraction.common.errors import one_line


def own_array(values: Any) -> np.ndarray:
    """Returns a copy of an array of NumPy, JAX or PyTorch, or of lists of numbers.

    Raises ValueError for a tensor that requires grad or is not in the memory of the CPU, and for
    what NumPy cannot convert.
    """
    try:
        found = np.asarray(_without_torch(values))
        return np.array(found, found.dtype.newbyteorder("="), order="C")
    except (TypeError, RuntimeError, BufferError) as error:
        kind = f"{type(values).__name__} of {getattr(values, 'dtype', 'no dtype')}"
        raise ValueError(f"{kind}: expected an array of numbers: {one_line(error)}") from error


def _without_torch(values: Any) -> Any:
    """Returns a tensor of PyTorch as an array that shares its memory, anything else as it is."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(values, torch.Tensor):
        return values
    if values.requires_grad or values.device.type != "cpu":
        found = "requires grad" if values.requires_grad else f"is on {values.device}"
        raise ValueError(f"the tensor {found}; give tensor.detach().cpu()")
    if values.dtype == torch.bfloat16:  # NumPy's DLPack lacks it
        return np.from_dlpack(values.view(torch.int16)).view(ml_dtypes.bfloat16)
    return np.from_dlpack(values)


def as_int32(values: Any) -> np.ndarray:
    """Returns a copy, as int32 if these are whole numbers that fit. Raises ValueError."""
    array = own_array(values)
    whole = array.dtype.kind in "iu" and (array == array.astype(np.int32)).all()
    return array.astype(np.int32) if whole or not array.size else array
