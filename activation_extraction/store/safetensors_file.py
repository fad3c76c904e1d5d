"""The safetensors format of a shard: every tensor is one contiguous range of bytes.

Because of this, the values at one hook can be read without the values at other hooks, by mapping a
part of a local file or by range requests to a bucket. The docstring of the package `store` lists
the tensors in the order in which they are written. All tensors of a hook are written one after the
other. The bytes of a file depend only on its content and on the id of the process that wrote it,
which is `writer` in the metadata of the header. common/safetensors.py parses and writes the header.

The JSON of a shard records a checksum of every MiB of the file. To check a short range of a tensor,
a reader would have to read whole MiB, and so up to two MiB more than it needs. Therefore,
`RangeChecksums` divides the tokens of a shard into smaller blocks, and contains a checksum for the
rows of each block in every tensor.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from crc32c import crc32c

from activation_extraction.common.errors import RunError
from activation_extraction.common.safetensors import Tensor, pack_header, read_header
from activation_extraction.common.visible import counted
from activation_extraction.store.shard import LABELS, Shard

# Names of the tensors of every shard that belong to no hook. A shard of conversations also has
# tensors with the labels of the tokens, named as in LABELS.
OF_TOKENS = ("sample_idx", "sample_offsets", "token_ids", "position")
FORMAT = "2"
# The tokens of a shard are divided into blocks of consecutive tokens. In each tensor with one row
# per token, the rows of a block together have one checksum, which the JSON of the shard records. A
# block has as many tokens as take at most BLOCK_BYTES bytes at the hook with the most bytes per
# token, but at least one token.
BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class Blocks:
    """A range of a file that is divided into blocks, with the CRC-32C of each block.

    Attributes:
        start_offset: Offset in the file of the first byte of the first block.
        stop_offset: Offset in the file of the byte after the last block.
        block_bytes: Size of a block in bytes. The last block may be smaller.
        concatenated_block_crc32c_hex: CRC-32C of each block, 8 hexadecimal digits each,
            concatenated.
    """

    start_offset: int
    stop_offset: int
    block_bytes: int
    concatenated_block_crc32c_hex: str


@dataclass(frozen=True)
class RangeChecksums:
    """The CRC-32C of ranges of a safetensors shard, as the JSON of the shard records them.

    Attributes:
        front: Number of bytes before the tensor `token_ids`: the header, `sample_idx` and
            `sample_offsets`.
        front_crc32c: CRC-32C of these bytes, 8 hexadecimal digits.
        tokens: Number of tokens in a block. A block of a tensor contains the rows of this number of
            consecutive tokens. The last block of a tensor may have fewer rows.
        consecutive: Whether the positions of the stored tokens are 0, 1, 2 and so on in every
            sample. Readers then compute the positions, and need not read the tensor `position`.
        crc32c: CRC-32C of each block of a tensor, 8 hexadecimal digits each, concatenated, by the
            name of the tensor. Only tensors with one row for each token have checksums.
    """

    front: int
    front_crc32c: str
    tokens: int
    consecutive: bool
    crc32c: Mapping[str, str]

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "RangeChecksums":
        """Returns the checksums that the JSON of a shard records.

        Args:
            content: Fields by name. Fields with unknown names are ignored.

        Raises:
            KeyError: If a field is missing.
            TypeError: If a field has a value of another type.
            ValueError: If a number cannot be read.
        """
        return cls(
            front=int(content["front"]),
            front_crc32c=str(content["front_crc32c"]),
            tokens=int(content["tokens"]),
            consecutive=bool(content["consecutive"]),
            crc32c=dict(content["crc32c"]),
        )

    @property
    def front_blocks(self) -> Blocks:
        """The range of bytes before the tensor `token_ids`, as a single block with its checksum."""
        return Blocks(0, self.front, self.front, self.front_crc32c)

    def blocks_of(self, name: str, header_entry: Tensor) -> Blocks | None:
        """Returns the checksums of a tensor, one for each block of tokens.

        Args:
            name: Name of the tensor.
            header_entry: Dtype, shape and byte offset of the tensor in the file.

        Returns:
            The blocks with their checksums. None if no checksums are recorded for the tensor,
            because it does not have one row for each token.
        """
        if name not in self.crc32c:
            return None
        bytes_per_block_of_tokens = self.tokens * header_entry.row_bytes
        return Blocks(
            header_entry.offset, header_entry.end, bytes_per_block_of_tokens, self.crc32c[name]
        )


def blocks_of(buffers: Iterable[memoryview], block_bytes: int) -> Iterator[list[memoryview]]:
    """Divides consecutive bytes into blocks of equal size, without copying them.

    Args:
        buffers: Consecutive buffers with the bytes, of any sizes.
        block_bytes: Size of a block in bytes.

    Yields:
        The consecutive buffers of each block. The last block may be smaller than `block_bytes`.
    """
    block_buffers: list[memoryview] = []
    bytes_left_in_block = block_bytes
    for buffer in buffers:
        while buffer.nbytes > bytes_left_in_block:
            yield [*block_buffers, buffer[:bytes_left_in_block]]
            buffer = buffer[bytes_left_in_block:]
            block_buffers = []
            bytes_left_in_block = block_bytes
        block_buffers.append(buffer)
        bytes_left_in_block -= buffer.nbytes
    if block_buffers:
        yield block_buffers


def crc_digits(buffers: Iterable[memoryview], block_bytes: int) -> str:
    """Returns the CRC-32C of each block of bytes, 8 hexadecimal digits each, concatenated.

    Args:
        buffers: Consecutive buffers with the bytes, of any sizes.
        block_bytes: Size of a block in bytes. The last block may be smaller.
    """
    block_checksums = (
        reduce(lambda checksum, buffer: crc32c(buffer, checksum), block_buffers, 0)
        for block_buffers in blocks_of(buffers, block_bytes)
    )
    return "".join(f"{checksum:08x}" for checksum in block_checksums)


def safetensors_pieces(shard: Shard, writer: str = "") -> list[memoryview]:
    """Converts a shard to a safetensors file without copying its activations.

    Args:
        shard: Shard, whose values are in the stored form (stored_hook.py).
        writer: Id of the process that writes the file; "" to leave it out.

    Returns:
        Consecutive buffers with the bytes of the file: the header, then the tensors. No buffer
        contains bytes of two tensors.
    """
    arrays_by_tensor_name = {
        "sample_idx": [np.array([sample.facts.sample_idx for sample in shard.samples], np.int64)],
        "sample_offsets": [shard.sample_offsets],
        "token_ids": [np.asarray(sample.token_ids, np.int32) for sample in shard.samples],
        "position": [np.asarray(sample.positions, np.int32) for sample in shard.samples],
    }
    for label_name in shard.samples[0].token_labels_by_name:
        arrays_by_tensor_name[label_name] = [
            sample.token_labels_by_name[label_name] for sample in shard.samples
        ]
    for hook_key, hook in shard.hook_by_key.items():
        arrays_by_tensor_name |= hook.tensors(shard.sample_values_by_hook_key[hook_key])
    header_metadata = {"format": FORMAT, "writer": writer} if writer else {"format": FORMAT}
    dtype_and_shape_by_tensor_name = {
        tensor_name: (
            arrays_of_tensor[0].dtype,
            (sum(map(len, arrays_of_tensor)), *arrays_of_tensor[0].shape[1:]),
        )
        for tensor_name, arrays_of_tensor in arrays_by_tensor_name.items()
    }
    contiguous_arrays = (
        np.ascontiguousarray(array)
        for arrays_of_tensor in arrays_by_tensor_name.values()
        for array in arrays_of_tensor
    )
    array_buffers = (
        contiguous_array.reshape(-1).view(np.uint8).data
        for contiguous_array in contiguous_arrays
        if contiguous_array.size
    )
    return [
        memoryview(pack_header(dtype_and_shape_by_tensor_name, header_metadata)),
        *array_buffers,
    ]


def range_checksums(shard: Shard, file_buffers: Sequence[memoryview]) -> RangeChecksums:
    """Computes the checksums with which readers can check parts of a shard's file.

    The parts are the front of the file, before the tensor `token_ids`, and the blocks of each
    tensor that has one row for each token. A block has the same number of rows in all these
    tensors. This number is chosen so that a block of the hook with the most bytes has about
    BLOCK_BYTES bytes.

    Args:
        shard: Shard, whose values are in the stored form (stored_hook.py).
        file_buffers: Bytes of the file, as `safetensors_pieces` returns them.

    Returns:
        The checksum of the front and the checksums of the blocks of each tensor, together with the
        sizes of the front and of the blocks (see `RangeChecksums`).
    """
    num_file_bytes = sum(buffer.nbytes for buffer in file_buffers)
    file_header = read_header(
        lambda start, stop: bytes(file_buffers[0][start:stop]), num_file_bytes, "", RunError
    )
    token_count = int(shard.sample_offsets[-1])
    bytes_of_hooks = [
        sum(map(hook.bytes_of, shard.sample_values_by_hook_key[hook_key]))
        for hook_key, hook in shard.hook_by_key.items()
    ]
    tokens_per_block = max(BLOCK_BYTES * token_count // max(*bytes_of_hooks, 1), 1)
    buffer_ends = np.cumsum([buffer.nbytes for buffer in file_buffers])

    def buffers_of_range(start: int, stop: int) -> Sequence[memoryview]:
        """Returns the buffers with the bytes of the file from `start` to before `stop`.

        Both offsets must be at the beginning or the end of a tensor.
        """
        first_buffer_index, stop_buffer_index = np.searchsorted(
            buffer_ends, [start, stop], "right"
        ).tolist()
        return file_buffers[first_buffer_index:stop_buffer_index]

    num_front_bytes = file_header.tensors["token_ids"].offset
    joined_checksums_by_tensor_name = dict[str, str]()
    for tensor_name, header_entry in file_header.tensors.items():
        if header_entry.shape[0] == token_count:
            tensor_buffers = buffers_of_range(header_entry.offset, header_entry.end)
            joined_checksums_by_tensor_name[tensor_name] = crc_digits(
                tensor_buffers, tokens_per_block * header_entry.row_bytes
            )
    return RangeChecksums(
        front=num_front_bytes,
        front_crc32c=crc_digits(buffers_of_range(0, num_front_bytes), num_front_bytes),
        tokens=tokens_per_block,
        consecutive=all(
            np.array_equal(positions, np.arange(len(positions))) for positions in shard.positions
        ),
        crc32c=joined_checksums_by_tensor_name,
    )


# A function that begins to read a range of bytes of a shard's file. Its arguments are the offset of
# the first byte, the offset of the byte after the last one, and `Blocks` that contain the range,
# with the checksums that their bytes must have. If the third argument is None, the MiB of the file
# that contain the range must have the checksums that the JSON of the shard records for every MiB.
# The function returns another function, which waits for the bytes and returns them, uint8.
BeginRead = Callable[[int, int, Blocks | None], Callable[[], np.ndarray]]


class SafetensorsFile:
    """A shard's file in the safetensors format, which is open for reading.

    The arrays that methods return are views of the file if it is mapped into memory. Otherwise,
    they are read when a method is called, and only the attributes are kept in memory.

    Attributes:
        header_entry_by_tensor_name: Dtype, shape and byte offset of each tensor by its name, in the
            order of the file.
        sample_numbers: Numbers (`sample_idx`) of the samples, int64 (samples,).
        sample_offsets: Index in the shard of the first token of each sample, int64 (samples + 1,).
            The last item is the number of tokens in the shard. Sample i consists of the tokens from
            sample_offsets[i] to sample_offsets[i + 1] - 1.
        label_names: Names of the labels of the tokens, "role" and "turn". Empty if the run has
            none.
    """

    def __init__(
        self,
        begin: BeginRead,
        size: int,
        where: str,
        checksums: RangeChecksums | None = None,
        front: int = 0,
    ) -> None:
        """Reads the header and the tensors `sample_idx` and `sample_offsets`.

        Args:
            begin: Function that begins to read bytes of the file (see `BeginRead`).
            size: Size of the file in bytes.
            where: Path or URL of the file, for messages.
            checksums: Checksums of ranges of the file. None if they are not recorded, or if the
                file is in memory or mapped into memory.
            front: Estimated size in bytes of the header and of the tensors `sample_idx` and
                `sample_offsets`. If there are no `checksums`, this many bytes at the beginning of
                the file are read with one request. 0 to read bytes only when they are needed.

        Raises:
            RunError: If the file is not a shard of this program, or its size does not match its
                tensors.
        """
        self._begin_read = begin
        self._file_location = where  # path or URL of the file, for messages
        self._range_checksums = checksums
        # First bytes of the file, uint8. They stay in memory until the header and the tensors
        # `sample_idx` and `sample_offsets` are read, so that a file in a bucket needs only one
        # request for all three. `checksums` records the number of the bytes that contain all three,
        # and the checksum of these bytes. Without `checksums`, `front` is used as the number.
        if checksums is not None:
            wait_for_first_bytes = begin(0, checksums.front, checksums.front_blocks)
        else:
            wait_for_first_bytes = begin(0, min(front, size), None)
        self._first_bytes_of_file = wait_for_first_bytes()
        file_header = read_header(self._read, size, where, RunError)
        format_version = file_header.metadata.get("format")
        if format_version != FORMAT:
            raise RunError(
                f"{where}: is not a shard that can be read: format {format_version!r}, expected "
                f"{FORMAT!r}"
            )
        self.header_entry_by_tensor_name = file_header.tensors
        # Labels are the roles and turns of tokens, which not every run stores. A hook may have the
        # same name as a label, but a hook's tensor has two axes, and a label's tensor has one.
        self.label_names = [
            label_name
            for label_name in LABELS
            if label_name in self.header_entry_by_tensor_name
            and len(self.header_entry_by_tensor_name[label_name].shape) == 1
        ]
        self.sample_numbers = np.array(self.whole("sample_idx"))
        self.sample_offsets = np.array(self.whole("sample_offsets"))
        # `sample_numbers` and `sample_offsets` are copies, so the memory of the first bytes can be
        # released.
        self._first_bytes_of_file = np.empty(0, np.uint8)

    def begin_tokens(self, start: int, stop: int) -> Callable[[], dict[str, np.ndarray]]:
        """Begins to read the ids, positions and labels of consecutive tokens.

        Args:
            start: Index of the first token among the tokens of the shard, from 0.
            stop: Index of the token after the last one.

        Returns:
            A function that waits for the arrays and returns them by name, int32 (stop - start,)
            each. The names are `token_ids`, `position`, and the names in `label_names`.
        """
        wait_function_by_tensor_name = {"token_ids": self.begin_rows("token_ids", start, stop)}
        if self._range_checksums is not None and self._range_checksums.consecutive:
            # Consecutive positions can be computed, which takes less time than requesting them from
            # a bucket.
            wait_function_by_tensor_name["position"] = lambda: self._consecutive_positions(
                start, stop
            )
        else:
            wait_function_by_tensor_name["position"] = self.begin_rows("position", start, stop)
        for label_name in self.label_names:
            wait_function_by_tensor_name[label_name] = self.begin_rows(label_name, start, stop)
        return lambda: {
            tensor_name: wait_function()
            for tensor_name, wait_function in wait_function_by_tensor_name.items()
        }

    def _consecutive_positions(self, start: int, stop: int) -> np.ndarray:
        """Computes the positions of consecutive tokens of the shard in their samples.

        The positions in every sample of the shard must be 0, 1, 2 and so on.

        Args:
            start: Index of the first token among the tokens of the shard, from 0.
            stop: Index of the token after the last one.

        Returns:
            The positions, int32 (stop - start,).
        """
        token_indices = np.arange(start, stop)
        sample_indices_of_tokens = np.searchsorted(self.sample_offsets, token_indices, "right") - 1
        return (token_indices - self.sample_offsets[sample_indices_of_tokens]).astype(np.int32)

    def begin_rows(self, name: str, start: int, stop: int) -> Callable[[], np.ndarray]:
        """Begins to read consecutive rows of a tensor.

        Args:
            name: Name of the tensor.
            start: Number of the first row, from 0.
            stop: Number of the row after the last one.

        Returns:
            A function that waits for the rows and returns them, (stop - start, ...).

        Raises:
            RunError: If the file lacks the tensor or some of the rows.
        """
        header_entry = self._header_entry(name)
        if stop > header_entry.shape[0]:
            num_rows_phrase = counted(header_entry.shape[0], "row")
            raise RunError(
                f"{self._file_location}: the tensor {name} has {num_rows_phrase}, "
                f"expected {stop} or more"
            )
        blocks_to_check = (
            None
            if self._range_checksums is None
            else self._range_checksums.blocks_of(name, header_entry)
        )
        wait_for_bytes = self._begin(*header_entry.byte_range(start, stop), blocks_to_check)
        rows_shape = stop - start, *header_entry.shape[1:]
        return lambda: np.ndarray(rows_shape, header_entry.dtype, wait_for_bytes())

    def whole(self, name: str) -> np.ndarray:
        """Reads a whole tensor.

        Args:
            name: Name of the tensor.

        Raises:
            RunError: If the file lacks the tensor.
        """
        return self.begin_rows(name, 0, self._header_entry(name).shape[0])()

    def _header_entry(self, name: str) -> Tensor:
        """Returns the dtype, the shape and the byte offsets of a tensor in the file.

        Args:
            name: Name of the tensor.

        Raises:
            RunError: If the file lacks the tensor.
        """
        header_entry = self.header_entry_by_tensor_name.get(name)
        if header_entry is None:
            raise RunError(f"{self._file_location}: lacks the tensor {name}")
        return header_entry

    def _read(self, start: int, stop: int) -> bytes:
        """Reads a range of bytes of the file for `read_header`.

        The first bytes of the file are in memory already (`_first_bytes_of_file`). If the range
        begins within them and ends after them, only its part in memory is returned. `read_header`
        then reads further bytes only if the header is longer than this part.

        Args:
            start: Offset of the first byte in the file.
            stop: Offset of the byte after the last one.
        """
        if start < len(self._first_bytes_of_file):
            stop = min(stop, len(self._first_bytes_of_file))
        return self._begin(start, stop, None)().tobytes()

    def _begin(self, start: int, stop: int, blocks: Blocks | None) -> Callable[[], np.ndarray]:
        """Begins to read a range of bytes.

        A range that lies within the first bytes of the file (`_first_bytes_of_file`) is not read
        again, because these bytes are in memory already.

        Args:
            start: Offset of the first byte in the file.
            stop: Offset of the byte after the last one.
            blocks: Blocks that contain the range, with the checksums that their bytes must have.
                None to check the bytes by the checksums that the JSON of the shard records for
                every MiB of the file.

        Returns:
            A function that waits for the bytes and returns them, uint8 (stop - start,). It raises
            RunError if bytes that were read from a bucket do not have their checksum.

        Raises:
            RunError: If the file is local, and the bytes do not have their checksum.
        """
        front_content = self._first_bytes_of_file
        if stop > len(front_content):
            return self._begin_read(start, stop, blocks)
        return lambda: front_content[start:stop]
