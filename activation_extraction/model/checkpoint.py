"""Finds and reads the tensors of a language model in its weight files.

`Checkpoint.read` is the only function that returns the values of tensors: it reads a part of a
tensor, multiplies float8 by its scales and merges the adapter, if there is one. repository.py finds
the files, weight_files.py reads them, tensor_names.py finds the language model in multimodal
models, and weights.py turns tensors into parameters.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any, Protocol

import numpy as np

from activation_extraction.common.errors import InputError
from activation_extraction.common.log import log
from activation_extraction.common.safetensors import Tensor
from activation_extraction.model import not_read
from activation_extraction.model.float8 import Float8Format, Scales, float8_format
from activation_extraction.model.repository import Repository, read_json
from activation_extraction.model.repository_files import ADAPTER, MODEL
from activation_extraction.model.tensor_names import text_names
from activation_extraction.model.weight_files import (
    INDEX_FILE,
    SINGLE_FILE,
    Index,
    WeightFile,
    read_index,
)


class Adapter(Protocol):
    """An adapter, which changes tensors when they are read. `LoraAdapter` implements it.

    Attributes:
        files: Files of the adapter, which may include a tokenizer.
    """

    files: Repository

    def merge(self, tensor: str, index: Index, stored: Callable[[Index], np.ndarray]) -> np.ndarray:
        """Returns a part of a tensor of the base model, with the adapter's change.

        Args:
            tensor: The name of the tensor.
            index: A (start, stop) slice for each axis.
            stored: A function that returns a part of the tensor in the base model.
        """
        ...


class Checkpoint(Repository):
    """The weights of a language model, and the other files of the model.

    Methods raise InputError, naming the path and the file, if a file or tensor is missing, cut off
    or not in a supported format. See `Repository` for the other attributes.

    Attributes:
        adapter: The LoRA adapter that is merged into each tensor as it is read. None to read the
            tensors as stored.
    """

    def __init__(self, path: str, revision: str | None = None, keep: bool = True) -> None:
        """Determines where the model is, without reading a file.

        Args:
            path: See `Repository`.
            revision: See `Repository`.
            keep: See `Repository`.
        """
        super().__init__(path, revision, keep, MODEL)
        self.adapter: Adapter | None = None

    @functools.cached_property
    def tensors(self) -> dict[str, str]:
        """The names of the language model's tensors -> their names in the files."""
        if ADAPTER.config in self.names:
            raise self.holds_adapter()
        stored = self._file_of_tensor or self.open_weights(SINGLE_FILE).tensors
        return text_names(stored, self.where)

    def local_tensors(self) -> Collection[str] | None:
        """Returns the names in `tensors` if the weight files are in a local folder, else None."""
        has_names = self.local and any(map(self.find, (SINGLE_FILE, INDEX_FILE)))
        return self.tensors if has_names else None

    @functools.cached_property
    def _file_of_tensor(self) -> dict[str, str] | None:
        """The name of each tensor -> its file, from the index; None if there is a single file.

        If the checkpoint has both an index and a single file, the single file is used, as by
        transformers.
        """
        index = self.find(INDEX_FILE)
        if index is None:
            return None
        if SINGLE_FILE in self.names:
            log.info("%s: %s is read, and %s is not", self.where, SINGLE_FILE, INDEX_FILE)
            return None
        return read_index(index)

    def place(self, tensor: str) -> tuple[WeightFile, Tensor]:
        """Returns the location of a tensor.

        Args:
            tensor: The name of the tensor in the language model.

        Returns:
            The file that contains the tensor.
            The tensor's entry in the header of the file.

        Raises:
            InputError: The tensor is missing.
        """
        if (stored := self.tensors.get(tensor)) is None:
            raise InputError(f"{self.where}: tensor {tensor} is missing")
        file = self.open_weights((self._file_of_tensor or {}).get(stored, SINGLE_FILE))
        if stored not in file.tensors:
            other = text_names(file.tensors, file.where).get(tensor)
            raise not_read.another_checkpoint_s_index(file.where, stored, other)
        return file, file.tensors[stored]

    def read(self, tensor: str, index: Index, dtype: Any = np.float32) -> np.ndarray:
        """Reads a part of a tensor, with the adapter merged into it if there is one.

        Args:
            tensor: The name of the tensor in the language model.
            index: A (start, stop) slice for each axis.
            dtype: The dtype to which float8 is dequantised without an adapter. With an adapter it
                is dequantised to float32, so that changed values are not rounded twice.

        Returns:
            The part: in float32 if the adapter changes the tensor, in the dtype of dequantised
            float8, and otherwise in the dtype of the file.
        """
        if self.adapter is None:
            return self._read_stored(tensor, index, dtype)
        read_stored = functools.partial(self._read_stored, tensor, dtype=np.float32)
        return self.adapter.merge(tensor, index, read_stored)

    def _read_stored(self, tensor: str, index: Index, dtype: Any) -> np.ndarray:
        """Reads a part of a tensor without the adapter. See `read` for the arguments."""
        scales = self.scales(tensor)
        values = self.place(tensor)[0].read(self.tensors[tensor], index)
        return values if scales is None else scales.dequantize(values, index, dtype)

    def scales(self, tensor: str) -> Scales | None:
        """Returns the scales of a float8 tensor, or None for a tensor of another dtype.

        Raises:
            InputError: The dtype of the tensor is not supported, or its scales are missing or
                inconsistent with it.
        """
        return Scales.find(tensor, self.tensors, self.place, self._float8)

    @functools.cached_property
    def _float8(self) -> Float8Format:
        """The format of float8 weights in config.json, or the default format."""
        path = self.find(MODEL.config)
        stated = None if path is None else float8_format(read_json(path), str(path))
        return stated or Float8Format()
