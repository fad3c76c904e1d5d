"""Reads hidden states that other programs have stored to train draft models, for --verify.

Two kinds of folders are read. A folder of the library speculators contains a data set and the files
`hidden_states/hs_I.safetensors`, of which file I belongs to row I of the data set. A folder of the
library SpecForge contains the files `rows_A-B/data_I.ckpt`, perhaps compressed (`.ckpt.gz`). The
docstring of draft_files.py describes how the two libraries number layers. The files do not contain
these numbers. verify_states.py compares the hidden states with a model.

The files may come from strangers, so no pickled code is run.
"""

import gzip
import io
import json
import pickle
import re
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from activation_extraction.common.encodings import FLOAT8, LARGEST_E4M3, VALUE_DTYPE
from activation_extraction.common.errors import (
    InputError,
    RunError,
    install_advice,
    one_line,
    reason_of,
)
from activation_extraction.common.safetensors import read_header
from activation_extraction.inspect.draft_files import (
    FINAL_NORM_HOOK,
    LOSS_MASK,
    SCALES,
    last_residual_stream_hook,
)

SPECULATORS_FILE = re.compile(r"hs_(\d+)\.safetensors")
SPECFORGE_FILE = re.compile(r"data_(\d+)\.ckpt(?:\.gz)?")
# Dtypes of hidden states that can be read.
DTYPES = ("float32", "bfloat16", "float16", VALUE_DTYPE.name)
# Errors of torch.load, and of converting its result, if a file is damaged, or if it contains other
# objects than tensors.
NOT_ONLY_TENSORS = (
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


@dataclass(frozen=True)
class StoredRow:
    """The token ids and hidden states of one sample, as another program has stored them.

    Attributes:
        token_ids: Token ids of the sample, int64 (tokens,).
        states_of_layers: Hidden states of each layer in the stored dtype, (states, width). There is
            a state for each token, unless the file is wrong.
        token_scales: Scale of each token, by which its float8 values in all layers are
            multiplied, float32 (states, 1). None if the states are not float8.
    """

    token_ids: np.ndarray
    states_of_layers: Sequence[np.ndarray]
    token_scales: np.ndarray | None = None

    @property
    def dtype(self) -> str:
        """The name of the dtype of the stored states, which is FLOAT8 if they are float8 e4m3."""
        dtype_name = self.states_of_layers[0].dtype.name
        return FLOAT8 if dtype_name == VALUE_DTYPE.name else dtype_name

    @property
    def width(self) -> int:
        """The width of the model: the number of values of a hidden state."""
        return self.states_of_layers[0].shape[1]

    def states(self, layer: int) -> np.ndarray:
        """Returns the hidden states of a layer, decoded to float32 (states, width).

        There is a state for each token of the sample, unless the file is wrong.

        Args:
            layer: Index of the layer in `states_of_layers`.
        """
        float32_states = self.states_of_layers[layer].astype(np.float32)
        return float32_states if self.token_scales is None else float32_states * self.token_scales

    def as_if_stored(self, values: np.ndarray, first_state_index: int) -> np.ndarray:
        """Rounds recomputed values to float8 as the file does, if the file contains float8 values.

        All layers share the scale of a token. So a layer with much smaller values than another
        layer has only a few different float8 numbers, or only zeros. The recomputed values are
        rounded in the same way, so that they can be compared with the stored values.

        Args:
            values: Recomputed hidden states of consecutive tokens, float32 (tokens, width).
            first_state_index: Index of the stored state with which the first row of `values` is
                compared. It counts the stored states of one layer of the file, from 0. The next
                rows are compared with the next states.

        Returns:
            The rounded values, float32 (tokens, width). `values` itself if the file contains no
            float8 values.
        """
        if self.token_scales is None:
            return values
        compared_token_scales = self.token_scales[
            first_state_index : first_state_index + len(values)
        ]
        clipped_values = np.clip(values / compared_token_scales, -LARGEST_E4M3, LARGEST_E4M3)
        return clipped_values.astype(VALUE_DTYPE).astype(np.float32) * compared_token_scales


class StatesFolder(ABC):
    """A folder in which another program has stored hidden states, with one file for each row.

    The other program is the library speculators or SpecForge, which trains draft models on such
    folders. Creating a StatesFolder opens no file.

    Args:
        path: Path of the folder.
        path_by_row_number: Path of the file of each row, by the number of the row, in any order.

    Attributes:
        writing_program_name: Name of the other program, which has written the files.
        first_decoder_layer_number: Number that the other program gives to the output of the model's
            first block (decoder layer).
        path: Path of the folder.
        path_by_row_number: Path of the file of each row, by the number of the row, in ascending
            order.
    """

    writing_program_name: str
    first_decoder_layer_number: int

    def __init__(self, path: Path, path_by_row_number: dict[int, Path]) -> None:
        self.path = path
        self.path_by_row_number = dict(sorted(path_by_row_number.items()))

    @abstractmethod
    def last_hook(self, depth: int) -> str:
        """Returns the name of the hook that corresponds to the last layer in each file.

        A layer of a file is one of its arrays of hidden states. In files of speculators, the last
        layer contains the output of the last block, so its hook is blocks.K.hook_resid_post, where
        K is `depth` - 1. In files of SpecForge, the last layer contains the output of the final
        norm, so its hook is ln_final.hook_out.

        Args:
            depth: Number of blocks of the model.
        """

    def default_blocks(self, depth: int) -> list[int]:
        """Returns the blocks whose outputs the files contain if the user has chosen no layers.

        The programs that write the files, speculators and SpecForge, choose the same blocks, but
        number them differently.

        Args:
            depth: Number of blocks of the model.

        Returns:
            The indices of the blocks, counted from 0. They do not include the last layer of the
            files (see `last_hook`), which the files always contain.
        """
        return [1, depth // 2 - 1, depth - 4]

    @abstractmethod
    def read(self, number: int) -> StoredRow:
        """Reads the token ids and hidden states of a row from its file.

        Args:
            number: Number of the row, which must be a key of `path_by_row_number`.

        Raises:
            RunError: If the file cannot be read, or does not contain hidden states.
        """

    def data_set_ids(self, number: int) -> np.ndarray | None:
        """Returns the token ids of a row in the folder's data set, int64 (tokens,).

        They should be equal to the token ids in the file of the row. None if the folder contains no
        data set. Empty if the data set has no such row.

        Args:
            number: Number of the row.

        Raises:
            InputError: If the data set cannot be read.
        """
        return None

    @property
    def notes(self) -> list[str]:
        """Notes for the user about the whole folder, for example that it contains no data set."""
        return []

    def relative_path(self, number: int) -> str:
        """Returns the path of the file of a row, relative to this folder, for messages.

        Args:
            number: Number of the row, which must be a key of `path_by_row_number`.
        """
        return str(self.path_by_row_number[number].relative_to(self.path))


class SpeculatorsFolder(StatesFolder):
    """A folder from which the library speculators trains draft models.

    The tensor `hidden_states` of a file has the shape (tokens, layers, width), and `token_ids` has
    the shape (tokens,). If the states are float8 (e4m3), the tensor `hidden_states_scales`, float32
    (tokens, 1, 1), contains the scale of each token.
    """

    writing_program_name = "speculators"
    first_decoder_layer_number = 1

    def last_hook(self, depth: int) -> str:
        return last_residual_stream_hook(depth)

    def read(self, number: int) -> StoredRow:
        file_path = self.path_by_row_number[number]
        tensor_by_name = _safetensors(file_path)
        _check_names(file_path, tensor_by_name, ("hidden_states", "token_ids"))
        hidden_states = tensor_by_name["hidden_states"]
        token_ids = tensor_by_name["token_ids"]
        _check_states(file_path, "hidden_states", hidden_states, ("tokens", "layers", "width"))
        if token_ids.ndim != 1 or not np.issubdtype(token_ids.dtype, np.integer):
            raise RunError(f"{file_path}: token_ids is {_described(token_ids)}, expected (tokens,)")
        token_scales = tensor_by_name.get(SCALES)
        if (token_scales is not None) != (hidden_states.dtype == VALUE_DTYPE):
            scales_phrase = f"without {SCALES}" if token_scales is None else f"with {SCALES}"
            raise RunError(f"{file_path}: holds {hidden_states.dtype} {scales_phrase}")
        if token_scales is not None:
            if token_scales.shape != (len(hidden_states), 1, 1):
                raise RunError(
                    f"{file_path}: {SCALES} is {_described(token_scales)}, expected "
                    f"({len(hidden_states)}, 1, 1)"
                )
            token_scales = token_scales.astype(np.float32)[:, 0]
        states_of_layers = [
            hidden_states[:, layer_index] for layer_index in range(hidden_states.shape[1])
        ]
        return StoredRow(token_ids.astype(np.int64), states_of_layers, token_scales)

    @cached_property
    def _input_ids_column(self) -> Any:
        """The column `input_ids` of the data set, a pyarrow.ChunkedArray.

        None if the folder contains no data set.
        """
        import pyarrow

        state_path = self.path / "state.json"
        if not state_path.exists():
            return None
        try:
            arrow_file_names = [
                data_file["filename"]
                for data_file in json.loads(state_path.read_text())["_data_files"]
            ]
            arrow_tables_of_files = []
            for arrow_file_name in arrow_file_names:
                mapped_file = pyarrow.memory_map(str(self.path / Path(arrow_file_name).name))
                arrow_tables_of_files.append(
                    pyarrow.ipc.open_stream(mapped_file).read_all().select(["input_ids"])
                )
            return pyarrow.concat_tables(arrow_tables_of_files)["input_ids"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{state_path}: its data set cannot be read: {one_line(error)}"
            ) from error

    def data_set_ids(self, number: int) -> np.ndarray | None:
        if self._input_ids_column is None:
            return None
        if number >= len(self._input_ids_column):
            return np.empty(0, np.int64)
        return np.array(self._input_ids_column[number].as_py(), np.int64)

    @property
    def notes(self) -> list[str]:
        if self._input_ids_column is None:
            return [
                "there is no data set beside hidden_states, so token_ids are not compared with it"
            ]
        missing_file_count = len(
            set(range(len(self._input_ids_column))) - self.path_by_row_number.keys()
        )
        if missing_file_count:
            return [
                f"{missing_file_count:,} of the {len(self._input_ids_column):,} rows of the data "
                "set have no file"
            ]
        return []


class SpecForgeFolder(StatesFolder):
    """A folder from which the library SpecForge trains EAGLE-3 draft models.

    The tensor `aux_hidden_state` of a file has the shape (1, tokens, layers * width), and
    `hidden_state`, the last layer, has the shape (1, tokens, width). `input_ids` and `loss_mask`
    have the shape (tokens,).
    """

    writing_program_name = "SpecForge"
    first_decoder_layer_number = 0

    def last_hook(self, depth: int) -> str:
        return FINAL_NORM_HOOK

    def read(self, number: int) -> StoredRow:
        file_path = self.path_by_row_number[number]
        tensor_by_name = _torch_tensors(file_path)
        _check_names(
            file_path, tensor_by_name, ("input_ids", LOSS_MASK, "hidden_state", "aux_hidden_state")
        )
        states_by_tensor_name = {}
        for tensor_name in ("hidden_state", "aux_hidden_state"):
            stored_tensor = tensor_by_name[tensor_name]
            unbatched_states = (
                stored_tensor[0]
                if stored_tensor.ndim == 3 and len(stored_tensor) == 1
                else stored_tensor
            )
            _check_states(file_path, tensor_name, unbatched_states, ("tokens", "width"))
            states_by_tensor_name[tensor_name] = unbatched_states
        states_of_last_layer = states_by_tensor_name["hidden_state"]
        concatenated_streams = states_by_tensor_name["aux_hidden_state"]
        stream_count, remaining_width = divmod(
            concatenated_streams.shape[1], states_of_last_layer.shape[1]
        )
        if (
            remaining_width
            or not stream_count
            or len(concatenated_streams) != len(states_of_last_layer)
            or concatenated_streams.dtype != states_of_last_layer.dtype
        ):
            raise RunError(
                f"{file_path}: aux_hidden_state is {_described(concatenated_streams)}, "
                f"which does not fit hidden_state, {_described(states_of_last_layer)}"
            )
        states_of_layers = [
            *np.split(concatenated_streams, stream_count, axis=1),
            states_of_last_layer,
        ]
        return StoredRow(tensor_by_name["input_ids"].reshape(-1).astype(np.int64), states_of_layers)


def find_states_folder(path: Path) -> StatesFolder | None:
    """Returns the folder with another program's hidden states, recognised by the names of files.

    Args:
        path: Path of the folder.

    Returns:
        The folder, or None if it contains no file with hidden states.

    Raises:
        InputError: If two files belong to the same row.
    """
    speculators_path_by_row_number = _numbered(
        path / "hidden_states", "*.safetensors", SPECULATORS_FILE
    )
    if speculators_path_by_row_number:
        return SpeculatorsFolder(path, speculators_path_by_row_number)
    specforge_path_by_row_number = _numbered(path, "rows_*/data_*", SPECFORGE_FILE)
    if specforge_path_by_row_number:
        return SpecForgeFolder(path, specforge_path_by_row_number)
    return None


def _numbered(folder: Path, glob: str, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Returns the paths of the files with hidden states, by the number of the row in their names.

    Args:
        folder: Folder to search. It may be missing.
        glob: Glob that matches the paths of the files relative to the folder.
        pattern: Pattern of the names of the files, whose first group is the number of the row.
            Files with other names are ignored.

    Raises:
        InputError: If two files belong to the same row.
    """
    path_by_row_number: dict[int, Path] = {}
    for file_path in folder.glob(glob):
        name_match = pattern.fullmatch(file_path.name)
        if name_match is None:
            continue
        row_number = int(name_match[1])
        if row_number in path_by_row_number:
            raise InputError(f"{file_path}: has the same row as {path_by_row_number[row_number]}")
        path_by_row_number[row_number] = file_path
    return path_by_row_number


def _safetensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a safetensors file by name.

    The tensors are views of the memory-mapped file.

    Raises:
        RunError: If the file cannot be read, or is no safetensors file.
    """
    try:
        mapped_bytes = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:  # np.memmap raises ValueError if the file is empty
        raise RunError(f"{path}: {reason_of(error)}") from error
    file_header = read_header(
        lambda start, stop: mapped_bytes[start:stop].tobytes(),
        len(mapped_bytes),
        str(path),
        RunError,
    )
    return {
        tensor_name: np.ndarray(
            tensor_description.shape,
            tensor_description.dtype,
            mapped_bytes,
            tensor_description.offset,
        )
        for tensor_name, tensor_description in file_header.tensors.items()
    }


def _torch_tensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a file that torch.save has written, by name.

    Raises:
        InputError: If torch is not installed.
        RunError: If the file cannot be read, or is no dict of tensors.
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise InputError(f"{path}: reading it needs torch; {install_advice('torch')}") from error
    try:
        file_bytes = path.read_bytes()
        if path.suffix == ".gz":
            file_bytes = gzip.decompress(file_bytes)
        loaded_object_by_name = torch.load(
            io.BytesIO(file_bytes), map_location="cpu", weights_only=True
        )
        return {
            object_name: _as_array(loaded_object)
            for object_name, loaded_object in loaded_object_by_name.items()
            if torch.is_tensor(loaded_object)
        }
    except (OSError, EOFError, zlib.error) as error:
        raise RunError(f"{path}: {reason_of(error)}") from error
    except NOT_ONLY_TENSORS as error:
        reason_phrase = one_line(error).partition(". ")[0]
        raise RunError(
            f"{path}: is damaged, or holds more than tensors: {reason_phrase}"
        ) from error


def _as_array(tensor: Any) -> np.ndarray:
    """Returns the values of a PyTorch tensor."""
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # Tensor.numpy does not support bfloat16
        bfloat16_bits: np.ndarray = tensor.contiguous().view(torch.int16).numpy()
        return bfloat16_bits.view(ml_dtypes.bfloat16)
    tensor_values: np.ndarray = tensor.numpy()
    return tensor_values


def _check_names(
    path: Path, tensor_by_name: dict[str, np.ndarray], needed_names: Sequence[str]
) -> None:
    """Raises RunError if a file lacks one of the tensors that a trainer reads.

    Args:
        path: Path of the file, for the message.
        tensor_by_name: Values of the tensors in the file, by name.
        needed_names: Names of the tensors that the trainer reads.
    """
    for tensor_name in needed_names:
        if tensor_name not in tensor_by_name:
            raise RunError(
                f"{path}: lacks the tensor {tensor_name}; has {', '.join(map(str, tensor_by_name))}"
            )


def _check_states(path: Path, name: str, states: np.ndarray, axes: Sequence[str]) -> None:
    """Raises RunError if a tensor's shape or dtype shows that it contains no hidden states.

    Args:
        path: Path of the file, for the message.
        name: Name of the tensor, for the message.
        states: Values of the tensor.
        axes: Names of the expected axes, such as "tokens" and "width". The tensor must have as many
            axes. Only the first axis may have the length 0.
    """
    if states.ndim != len(axes) or 0 in states.shape[1:]:
        raise RunError(f"{path}: {name} is {_described(states)}, expected ({', '.join(axes)})")
    if states.dtype.name not in DTYPES:
        accepted_dtypes_phrase = ", ".join(DTYPES)
        raise RunError(
            f"{path}: {name} is {_described(states)}, expected one of {accepted_dtypes_phrase}"
        )


def _described(array: np.ndarray) -> str:
    """Returns the dtype and the shape of an array in words."""
    return f"{array.dtype} {array.shape}"
