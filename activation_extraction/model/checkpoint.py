"""Finds and reads the tensors of a language model in its weight files.

`Checkpoint.read` is the only function that returns the values of a tensor. It reads a part of the
tensor, multiplies float8 values by their scales, and merges the adapter if there is one.
repository.py finds the files, and weight_files.py reads bytes from them. tensor_names.py finds the
tensors of the language model in multimodal models. weights.py turns tensors into parameters.
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
from activation_extraction.model.tensor_names import tensors_of_language_model
from activation_extraction.model.weight_files import (
    INDEX_FILE,
    SINGLE_FILE,
    Index,
    WeightFile,
    read_index,
)


class Adapter(Protocol):
    """An adapter, which changes tensors while they are read.

    `LoraAdapter` implements this protocol.

    Attributes:
        repository: The repository of the adapter, which may contain a tokenizer.
    """

    repository: Repository

    def merge(
        self, tensor_name: str, index: Index, read_base_tensor: Callable[[Index], np.ndarray]
    ) -> np.ndarray:
        """Returns a part of a tensor of the base model with the adapter's changes.

        Args:
            tensor_name: The name of the tensor in the language model.
            index: A (start, stop) slice for each axis.
            read_base_tensor: A function that maps an index, in the form of `index`, to this part of
                the tensor as stored in the base model.

        Returns:
            The values of the part. They are float32 if the adapter adds a change to the tensor. If
            it replaces the whole tensor, they have the dtype of the adapter's file. Otherwise they
            are the result of `read_base_tensor`.
        """
        ...


class Checkpoint(Repository):
    """The weights of a language model, and the other files of the model.

    If a file or tensor is missing, cut off or not in a supported format, methods raise InputError
    with the path and the file in the message. `Repository` documents the inherited attributes.

    Attributes:
        adapter: The LoRA adapter that is merged into each tensor as it is read. None to read the
            tensors as stored.
    """

    def __init__(self, path: str, revision: str | None = None, keep: bool = True) -> None:
        """Determines where the model is, without reading a file.

        Args:
            path: A folder, a URL or the name of a repository on the hub.
            revision: A branch, tag or commit of a repository on the hub; None for its main branch.
            keep: Whether to store weights from the hub in the hub's cache on this machine, for the
                next start.
        """
        super().__init__(path, revision, keep, MODEL)
        self.adapter: Adapter | None = None

    @functools.cached_property
    def tensors(self) -> dict[str, str]:
        """Name of a tensor in the language model -> its name in the files.

        The names differ in multimodal models, where the language model is one of several modules.

        Raises:
            InputError: If the weights are missing, or the repository contains an adapter.
        """
        if ADAPTER.config_file_name in self.file_names:
            raise self.adapter_error()
        tensor_names_in_files = list(self._file_of_tensor or self.open_weights(SINGLE_FILE).tensors)
        return tensors_of_language_model(tensor_names_in_files, self.flag_with_value)

    def local_tensors(self) -> Collection[str] | None:
        """Returns the names of the language model's tensors if they can be read without a download.

        Returns:
            The keys of `tensors`. None if the weight files are not in a local folder.
        """
        if not self.is_local:
            return None
        has_weights = self.find(SINGLE_FILE) is not None or self.find(INDEX_FILE) is not None
        return self.tensors if has_weights else None

    @functools.cached_property
    def _file_of_tensor(self) -> dict[str, str] | None:
        """Name of a tensor in the files -> the name of its file, from the index file.

        None if the repository has no index file, or if all weights are in a single file. Like
        transformers, this program ignores an index file beside a single weight file.
        """
        index_path = self.find(INDEX_FILE)
        if index_path is None:
            return None
        if SINGLE_FILE in self.file_names:
            log.info("%s: %s is read, and %s is not", self.flag_with_value, SINGLE_FILE, INDEX_FILE)
            return None
        return read_index(index_path)

    def locate(self, tensor: str) -> tuple[WeightFile, Tensor]:
        """Finds a tensor in the weight files.

        Args:
            tensor: The name of the tensor in the language model.

        Returns:
            A tuple of:
                The file that contains the tensor.
                The tensor's entry in the header of the file.

        Raises:
            InputError: If the tensor is missing.
        """
        tensor_name_in_checkpoint = self.tensors.get(tensor)
        if tensor_name_in_checkpoint is None:
            raise InputError(f"{self.flag_with_value}: tensor {tensor} is missing")
        weight_file = self.open_weights(
            (self._file_of_tensor or {}).get(tensor_name_in_checkpoint, SINGLE_FILE)
        )
        if tensor_name_in_checkpoint not in weight_file.tensors:
            tensor_name_in_file = tensors_of_language_model(
                weight_file.tensors, weight_file.location
            ).get(tensor)
            raise not_read.tensor_not_in_file(
                weight_file.location, tensor_name_in_checkpoint, tensor_name_in_file
            )
        return weight_file, weight_file.tensors[tensor_name_in_checkpoint]

    def read(self, tensor: str, index: Index, dtype: Any = np.float32) -> np.ndarray:
        """Reads a part of a tensor, with the adapter merged into it if there is one.

        Args:
            tensor: The name of the tensor in the language model.
            index: A (start, stop) slice for each axis.
            dtype: The dtype to which float8 values are dequantised if there is no adapter. With an
                adapter, float8 values are dequantised to float32, because values that the adapter
                changes would otherwise be rounded twice.

        Returns:
            The values of the part. They are float32 if the adapter adds a change to the tensor.
            Otherwise, float8 values are dequantised (see `dtype`), and other values have the dtype
            of the file from which they are read, which may be the adapter's file.
        """
        if self.adapter is None:
            return self._read_stored(tensor, index, dtype)
        read_stored_part = functools.partial(self._read_stored, tensor, dtype=np.float32)
        return self.adapter.merge(tensor, index, read_stored_part)

    def _read_stored(self, tensor: str, index: Index, dtype: Any) -> np.ndarray:
        """Reads a part of a tensor as stored, without the adapter's changes.

        Args:
            tensor: The name of the tensor in the language model.
            index: A (start, stop) slice for each axis.
            dtype: The dtype to which float8 values are dequantised.

        Returns:
            The values of the part, in `dtype` if the tensor is float8, otherwise in the dtype of
            the file.
        """
        tensor_scales = self.scales(tensor)
        weight_file, _ = self.locate(tensor)
        stored_values = weight_file.read(self.tensors[tensor], index)
        return (
            stored_values
            if tensor_scales is None
            else tensor_scales.dequantize(stored_values, index, dtype)
        )

    def scales(self, tensor: str) -> Scales | None:
        """Returns the scales of a float8 tensor.

        Args:
            tensor: The name of the tensor in the language model.

        Returns:
            The scales; None for a tensor of another dtype.

        Raises:
            InputError: If the dtype of the tensor is not supported, or its scales are missing or
                inconsistent with it.
        """
        return Scales.find(tensor, self.tensors, self.locate, self._float8)

    @functools.cached_property
    def _float8(self) -> Float8Format:
        """The format of float8 weights that config.json describes.

        It is the default `Float8Format` if config.json is missing or describes no quantisation.
        """
        config_path = self.find(MODEL.config_file_name)
        if config_path is None:
            return Float8Format()
        return float8_format(read_json(config_path), str(config_path)) or Float8Format()
