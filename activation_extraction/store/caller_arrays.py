"""Copies and checks the arrays that programs pass to `ActivationStorage.add_activation`.

The arrays are copied because the program may use the same memory for the next sample. They may
belong to NumPy, PyTorch or JAX; this module imports neither PyTorch nor JAX.
"""

import sys
from typing import Any

import ml_dtypes
import numpy as np

from activation_extraction.common.errors import one_line


def copy_array(values: Any) -> np.ndarray:
    """Returns a copy of an array as a NumPy array in C order and in the machine's byte order.

    Args:
        values: Array of NumPy, JAX or PyTorch, or nested lists of numbers.

    Raises:
        ValueError: If the values are a PyTorch tensor that requires grad or is not in CPU memory,
            or NumPy cannot convert the values.
    """
    try:
        uncopied_array = np.asarray(_without_torch(values))
        return np.array(uncopied_array, uncopied_array.dtype.newbyteorder("="), order="C")
    except (TypeError, RuntimeError, BufferError) as error:
        type_and_dtype = f"{type(values).__name__} of {getattr(values, 'dtype', 'no dtype')}"
        raise ValueError(
            f"{type_and_dtype}: expected an array of numbers: {one_line(error)}"
        ) from error


def _without_torch(values: Any) -> Any:
    """Returns a PyTorch tensor as a NumPy array that shares its memory, and other values unchanged.

    Raises:
        ValueError: If the tensor requires grad or is not in CPU memory.
    """
    torch_module = sys.modules.get("torch")
    if torch_module is None or not isinstance(values, torch_module.Tensor):
        return values
    if values.requires_grad or values.device.type != "cpu":
        problem_phrase = "requires grad" if values.requires_grad else f"is on {values.device}"
        raise ValueError(f"the tensor {problem_phrase}; give tensor.detach().cpu()")
    if values.dtype == torch_module.bfloat16:  # NumPy's from_dlpack does not support bfloat16
        return np.from_dlpack(values.view(torch_module.int16)).view(ml_dtypes.bfloat16)
    return np.from_dlpack(values)


def copy_as_int32(values: Any) -> np.ndarray:
    """Returns a copy of token ids as an int32 array.

    If the ids are not integers, or do not fit int32, the copy keeps their dtype. The caller checks
    the dtype of the copy, and names it in an error message.

    Args:
        values: Token ids, in any form that `copy_array` accepts.

    Raises:
        ValueError: If `copy_array` cannot convert the ids.
    """
    copied_token_ids = copy_array(values)
    ids_are_integers = copied_token_ids.dtype.kind in "iu"
    ids_fit_int32 = (
        ids_are_integers and (copied_token_ids == copied_token_ids.astype(np.int32)).all()
    )
    return (
        copied_token_ids.astype(np.int32)
        if ids_fit_int32 or not copied_token_ids.size
        else copied_token_ids
    )
