"""Reads hidden states that other programs have stored to train draft models, for --verify.

Two kinds of folders are read. A folder of speculators contains `hidden_states/hs_i.safetensors`,
and the data set to whose row i this file belongs. A folder of SpecForge contains
`rows_A-B/data_i.ckpt`, perhaps compressed (`.ckpt.gz`). The docstring of draft_files.py describes
how the two programs number layers. verify_states.py compares what is read here with a model.

No file contains the numbers of its layers. No pickled code is run.
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

from activation_extraction.common.encodings import FLOAT8, VALUE_DTYPE
from activation_extraction.common.errors import InputError, RunError, install, one_line, reason_of
from activation_extraction.common.safetensors import read_header
from activation_extraction.inspect.draft_files import (
    FINAL_NORM_HOOK,
    LARGEST_FLOAT8,
    LOSS_MASK,
    SCALES,
)

SPECULATORS_FILE = re.compile(r"hs_(\d+)\.safetensors")
SPECFORGE_FILE = re.compile(r"data_(\d+)\.ckpt(?:\.gz)?")
DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    VALUE_DTYPE.name,
)  # dtypes of hidden states that are read
# Errors of torch.load, and of converting its result, if a file is damaged or holds other objects.
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
        layers: Hidden states of each layer in the stored dtype, (states, width). There is a state
            for each token, unless the file is wrong.
        scales: Number by which the float8 values of each token are multiplied, in all layers,
            float32 (states, 1). None for other dtypes.
    """

    token_ids: np.ndarray
    layers: Sequence[np.ndarray]
    scales: np.ndarray | None = None

    @property
    def dtype(self) -> str:
        """The name of the stored dtype, FLOAT8 for e4m3."""
        name = self.layers[0].dtype.name
        return FLOAT8 if name == VALUE_DTYPE.name else name

    @property
    def width(self) -> int:
        """The number of values of a hidden state."""
        return self.layers[0].shape[1]

    def states(self, layer: int) -> np.ndarray:
        """Returns the decoded hidden states of a layer, float32 (states, width).

        Args:
            layer: Index of the layer in the file.
        """
        values = self.layers[layer].astype(np.float32)
        return values if self.scales is None else values * self.scales

    def as_if_stored(self, values: np.ndarray, first_state: int) -> np.ndarray:
        """Rounds recomputed values as the file rounds its values, if these are float8.

        All layers share the scale of a token. So a layer with much smaller values than another one
        has only a few different float8 numbers, or only zeros. The recomputed values lose as much.

        Args:
            values: Recomputed hidden states of consecutive tokens, float32 (tokens, width).
            first_state: Index of the stored state that is compared with the first of these tokens.

        Returns:
            The values, float32 (tokens, width). They are unchanged for other dtypes.
        """
        if self.scales is None:
            return values
        scales = self.scales[first_state : first_state + len(values)]
        scaled = np.clip(values / scales, -LARGEST_FLOAT8, LARGEST_FLOAT8)
        return scaled.astype(VALUE_DTYPE).astype(np.float32) * scales


class StatesFolder(ABC):
    """A folder of hidden states that another program has stored, one file for each row.

    Attributes:
        path: Path of the folder.
        files: Path of the file of each row, by the number of the row, ascending.
    """

    program: str  # name of the program that trains on the folder
    number_of_block_0: int  # number that the program gives to the output of the first block

    def __init__(self, path: Path, files: dict[int, Path]) -> None:
        """Describes a folder, whose files are not opened yet."""
        self.path = path
        self.files = dict(sorted(files.items()))

    @abstractmethod
    def last_hook(self, depth: int) -> str:
        """Returns the hook that the last layer of each file must contain.

        Args:
            depth: Number of blocks of the model.
        """

    def default_blocks(self, depth: int) -> list[int]:
        """Returns the blocks whose outputs are stored by default, before the last layer.

        Both programs choose the same blocks. Only the numbers that they give to them differ.

        Args:
            depth: Number of blocks of the model.

        Returns:
            The numbers of the blocks, counted from 0.
        """
        return [1, depth // 2 - 1, depth - 4]

    @abstractmethod
    def read(self, number: int) -> StoredRow:
        """Reads a row.

        Args:
            number: Number of the row, which must be in `files`.

        Raises:
            RunError: If the file cannot be read, or does not contain hidden states.
        """

    def data_set_ids(self, number: int) -> np.ndarray | None:
        """Returns the token ids that the data set has for a row; None if there is no data set.

        Args:
            number: Number of the row.

        Raises:
            InputError: If the data set cannot be read.
        """
        return None

    @property
    def notes(self) -> list[str]:
        """Remarks about the folder that are no faults of a row."""
        return []

    def file_name(self, number: int) -> str:
        """Returns the path of a row's file in the folder, for messages."""
        return str(self.files[number].relative_to(self.path))


class SpeculatorsFolder(StatesFolder):
    """A folder from which speculators trains draft models.

    The tensor `hidden_states` of a file has the shape (tokens, layers, width), and `token_ids` has
    the shape (tokens,). If the states are float8 (e4m3), the tensor `hidden_states_scales`, float32
    (tokens, 1, 1), contains the scale of each token.
    """

    program = "speculators"
    number_of_block_0 = 1

    def last_hook(self, depth: int) -> str:
        return f"blocks.{depth - 1}.hook_resid_post"

    def read(self, number: int) -> StoredRow:
        path = self.files[number]
        tensors = _safetensors(path)
        _check_names(path, tensors, ("hidden_states", "token_ids"))
        states = tensors["hidden_states"]
        token_ids = tensors["token_ids"]
        _check_states(path, "hidden_states", states, ("tokens", "layers", "width"))
        if token_ids.ndim != 1 or not np.issubdtype(token_ids.dtype, np.integer):
            raise RunError(f"{path}: token_ids is {_described(token_ids)}, expected (tokens,)")
        scales = tensors.get(SCALES)
        if (scales is not None) != (states.dtype == VALUE_DTYPE):
            present = "without" if scales is None else "with"
            raise RunError(f"{path}: holds {states.dtype} {present} {SCALES}")
        if scales is not None:
            if scales.shape != (len(states), 1, 1):
                shape = f"expected ({len(states)}, 1, 1)"
                raise RunError(f"{path}: {SCALES} is {_described(scales)}, {shape}")
            scales = scales.astype(np.float32)[:, 0]
        layers = [states[:, layer] for layer in range(states.shape[1])]
        return StoredRow(token_ids.astype(np.int64), layers, scales)

    @cached_property
    def _data_set(self) -> Any:
        """The column `input_ids` of the data set, a pyarrow.ChunkedArray; None without one."""
        import pyarrow

        state_file = self.path / "state.json"
        if not state_file.exists():
            return None
        try:
            names = [file["filename"] for file in json.loads(state_file.read_text())["_data_files"]]
            tables = []
            for name in names:
                source = pyarrow.memory_map(str(self.path / Path(name).name))
                tables.append(pyarrow.ipc.open_stream(source).read_all().select(["input_ids"]))
            return pyarrow.concat_tables(tables)["input_ids"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{state_file}: its data set cannot be read: {one_line(error)}"
            ) from error

    def data_set_ids(self, number: int) -> np.ndarray | None:
        if self._data_set is None:
            return None
        if number >= len(self._data_set):
            return np.empty(0, np.int64)
        return np.array(self._data_set[number].as_py(), np.int64)

    @property
    def notes(self) -> list[str]:
        if self._data_set is None:
            return [
                "there is no data set beside hidden_states, so token_ids are not compared with it"
            ]
        missing = len(set(range(len(self._data_set))) - self.files.keys())
        if missing:
            return [f"{missing:,} of the {len(self._data_set):,} rows of the data set have no file"]
        return []


class SpecForgeFolder(StatesFolder):
    """A folder from which SpecForge trains EAGLE-3 draft models.

    The tensor `aux_hidden_state` of a file has the shape (1, tokens, layers * width), and
    `hidden_state`, the last layer, has the shape (1, tokens, width). `input_ids` and `loss_mask`
    have the shape (tokens,).
    """

    program = "SpecForge"
    number_of_block_0 = 0

    def last_hook(self, depth: int) -> str:
        return FINAL_NORM_HOOK

    def read(self, number: int) -> StoredRow:
        path = self.files[number]
        tensors = _torch_tensors(path)
        _check_names(path, tensors, ("input_ids", LOSS_MASK, "hidden_state", "aux_hidden_state"))
        states = {}
        for name in ("hidden_state", "aux_hidden_state"):
            tensor = tensors[name]
            values = tensor[0] if tensor.ndim == 3 and len(tensor) == 1 else tensor
            _check_states(path, name, values, ("tokens", "width"))
            states[name] = values
        last = states["hidden_state"]
        streams = states["aux_hidden_state"]
        count, remainder = divmod(streams.shape[1], last.shape[1])
        if remainder or not count or len(streams) != len(last) or streams.dtype != last.dtype:
            raise RunError(
                f"{path}: aux_hidden_state is {_described(streams)}, which does not fit "
                f"hidden_state, {_described(last)}"
            )
        layers = [*np.split(streams, count, axis=1), last]
        return StoredRow(tensors["input_ids"].reshape(-1).astype(np.int64), layers)


def find_states_folder(path: Path) -> StatesFolder | None:
    """Returns the folder with another program's hidden states, recognised by the names of files.

    Args:
        path: Path of the folder.

    Returns:
        The folder, or None if it contains no file with hidden states.

    Raises:
        InputError: If two files belong to the same row.
    """
    speculators_files = _numbered(path / "hidden_states", "*.safetensors", SPECULATORS_FILE)
    if speculators_files:
        return SpeculatorsFolder(path, speculators_files)
    specforge_files = _numbered(path, "rows_*/data_*", SPECFORGE_FILE)
    if specforge_files:
        return SpecForgeFolder(path, specforge_files)
    return None


def _numbered(folder: Path, glob: str, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Returns files by the number in their names, which the first group of `pattern` matches."""
    files: dict[int, Path] = {}
    for path in folder.glob(glob):
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        number = int(match[1])
        if number in files:
            raise InputError(f"{path}: has the same row as {files[number]}")
        files[number] = path
    return files


def _safetensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a safetensors file by name; they are views of the mapped file.

    Raises:
        RunError: If the file cannot be read, or is no safetensors file.
    """
    try:
        content = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:  # ValueError for an empty file
        raise RunError(f"{path}: {reason_of(error)}") from error
    header = read_header(
        lambda start, stop: content[start:stop].tobytes(), len(content), str(path), RunError
    )
    return {
        name: np.ndarray(tensor.shape, tensor.dtype, content, tensor.offset)
        for name, tensor in header.tensors.items()
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
        raise InputError(f"{path}: reading it needs torch; {install('torch')}") from error
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        loaded = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        return {name: _as_array(value) for name, value in loaded.items() if torch.is_tensor(value)}
    except (OSError, EOFError, zlib.error) as error:
        raise RunError(f"{path}: {reason_of(error)}") from error
    except NOT_ONLY_TENSORS as error:
        reason = one_line(error).partition(". ")[0]
        raise RunError(f"{path}: is damaged, or holds more than tensors: {reason}") from error


def _as_array(tensor: Any) -> np.ndarray:
    """Returns the values of a PyTorch tensor."""
    import torch

    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:  # Tensor.numpy does not support it
        values: np.ndarray = tensor.contiguous().view(torch.int16).numpy()
        return values.view(ml_dtypes.bfloat16)
    array: np.ndarray = tensor.numpy()
    return array


def _check_names(path: Path, tensors: dict[str, np.ndarray], names: Sequence[str]) -> None:
    """Raises RunError unless a file contains all tensors that a trainer reads."""
    for name in names:
        if name not in tensors:
            raise RunError(f"{path}: lacks the tensor {name}; has {', '.join(map(str, tensors))}")


def _check_states(path: Path, name: str, states: np.ndarray, axes: Sequence[str]) -> None:
    """Raises RunError unless a tensor has the axes and a dtype of hidden states."""
    if states.ndim != len(axes) or 0 in states.shape[1:]:
        raise RunError(f"{path}: {name} is {_described(states)}, expected ({', '.join(axes)})")
    if states.dtype.name not in DTYPES:
        dtypes = ", ".join(DTYPES)
        raise RunError(f"{path}: {name} is {_described(states)}, expected one of {dtypes}")


def _described(array: np.ndarray) -> str:
    """Returns the dtype and the shape of an array in words."""
    return f"{array.dtype} {array.shape}"
