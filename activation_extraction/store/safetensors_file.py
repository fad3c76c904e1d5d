"""The safetensors format of a shard: every tensor is one contiguous range of bytes.

So the values at one hook can be read without the others, by mapping a part of a local file or by
range requests to a bucket. The docstring of this package lists the tensors, in the order in which
they are written; the tensors of a hook follow one another. The bytes of a file depend only on its
content and on the id of the process that wrote it, which is `writer` in the metadata of the header.
common/safetensors.py parses and writes the header.

The checksums of whole MiB would make a reader of a bucket read up to two MiB more for each range of
a tensor, however small. So RangeChecksums divide the tokens of a shard into blocks, and have a
checksum for the rows of each block in every tensor.
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

OF_TOKENS = (
    "sample_idx",
    "sample_offsets",
    "token_ids",
    "position",
)  # tensors that belong to no hook
FORMAT = "2"
# Most bytes of a block of tokens at the hook with the most bytes. A block has at least one token.
BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class Blocks:
    """Consecutive blocks of bytes of a file, with the CRC-32C of each.

    Attributes:
        start: Offset of the first byte of the first block.
        stop: Offset of the byte after the last block.
        size: Bytes of a block; the last one may have fewer.
        crc32c: CRC-32C of each block, 8 hexadecimal digits each, concatenated.
    """

    start: int
    stop: int
    size: int
    crc32c: str


@dataclass(frozen=True)
class RangeChecksums:
    """The CRC-32C of ranges of a safetensors shard, as the JSON of the shard records them.

    Attributes:
        front: Number of bytes before the tensor `token_ids`: the header, `sample_idx` and
            `sample_offsets`.
        front_crc32c: CRC-32C of these bytes, 8 hexadecimal digits.
        tokens: Number of tokens in a block; the last block of a shard may have fewer.
        consecutive: Whether the positions of every sample are 0, 1, 2, and so on. A reader then
            knows them without the tensor `position`.
        crc32c: CRC-32C of each block of rows, 8 hexadecimal digits each, concatenated, by the name
            of the tensor. Only tensors that have one row for each token are contained.
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
            content: The fields by name. Unknown names are ignored.

        Raises:
            KeyError: A field is missing.
            TypeError: A field has a value of another type.
            ValueError: A number cannot be read.
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
        """The bytes before the tensor `token_ids`, as a single block."""
        return Blocks(0, self.front, self.front, self.front_crc32c)

    def blocks_of(self, name: str, tensor: Tensor) -> Blocks | None:
        """Returns the blocks of a tensor; None if its checksums are not recorded.

        Args:
            name: Name of the tensor.
            tensor: Place of the tensor in the file.
        """
        if name not in self.crc32c:
            return None
        size = self.tokens * tensor.row_bytes
        return Blocks(tensor.offset, tensor.end, size, self.crc32c[name])


def blocks_of(buffers: Iterable[memoryview], block_bytes: int) -> Iterator[list[memoryview]]:
    """Divides consecutive bytes into blocks of equal size, without copying them.

    Args:
        buffers: Consecutive buffers with the bytes, of any sizes.
        block_bytes: Size of a block in bytes.

    Yields:
        The consecutive buffers of each block. The last block may be smaller than `block_bytes`.
    """
    block: list[memoryview] = []
    missing_bytes = block_bytes
    for buffer in buffers:
        while buffer.nbytes > missing_bytes:
            yield [*block, buffer[:missing_bytes]]
            buffer = buffer[missing_bytes:]
            block = []
            missing_bytes = block_bytes
        block.append(buffer)
        missing_bytes -= buffer.nbytes
    if block:
        yield block


def crc_digits(pieces: Iterable[memoryview], size: int) -> str:
    """Returns the CRC-32C of each block of bytes, 8 hexadecimal digits each, concatenated.

    Args:
        pieces: The bytes, piece by piece.
        size: Bytes of a block; the last one may have fewer.
    """
    crcs = (
        reduce(lambda crc, piece: crc32c(piece, crc), block, 0) for block in blocks_of(pieces, size)
    )
    return "".join(f"{crc:08x}" for crc in crcs)


def safetensors_pieces(shard: Shard, writer: str = "") -> list[memoryview]:
    """Returns the bytes of a shard's file. Activations are not copied.

    Args:
        shard: The shard, whose values are in the stored form.
        writer: The id of the process that writes the file; "" to leave it out.

    Returns:
        The header, and then the bytes of the tensors. No piece has bytes of two tensors.
    """
    tensors = {
        "sample_idx": [np.array([sample.facts.sample_idx for sample in shard.samples], np.int64)],
        "sample_offsets": [shard.offsets],
        "token_ids": [np.asarray(sample.token_ids, np.int32) for sample in shard.samples],
        "position": [np.asarray(sample.positions, np.int32) for sample in shard.samples],
    }
    for name in shard.samples[0].labels:
        tensors[name] = [sample.labels[name] for sample in shard.samples]
    for key, hook in shard.hooks.items():
        tensors |= hook.tensors(shard.values[key])
    metadata = {"format": FORMAT, "writer": writer} if writer else {"format": FORMAT}
    shapes = {
        name: (parts[0].dtype, (sum(map(len, parts)), *parts[0].shape[1:]))
        for name, parts in tensors.items()
    }
    arrays = (np.ascontiguousarray(part) for parts in tensors.values() for part in parts)
    flat = (array.reshape(-1).view(np.uint8).data for array in arrays if array.size)
    return [memoryview(pack_header(shapes, metadata)), *flat]


def range_checksums(shard: Shard, pieces: Sequence[memoryview]) -> RangeChecksums:
    """Returns the checksums of ranges of a shard's file.

    Args:
        shard: The shard.
        pieces: The bytes of the file, as `safetensors_pieces` returns them.
    """
    size = sum(piece.nbytes for piece in pieces)
    header = read_header(lambda start, stop: bytes(pieces[0][start:stop]), size, "", RunError)
    tokens = int(shard.offsets[-1])
    of_hooks = [sum(map(hook.bytes_of, shard.values[key])) for key, hook in shard.hooks.items()]
    block_tokens = max(BLOCK_BYTES * tokens // max(*of_hooks, 1), 1)
    ends = np.cumsum([piece.nbytes for piece in pieces])

    def between(start: int, stop: int) -> Sequence[memoryview]:
        """Returns the pieces of a range of bytes at whose ends a tensor begins or ends."""
        first, last = np.searchsorted(ends, [start, stop], "right").tolist()
        return pieces[first:last]

    front = header.tensors["token_ids"].offset
    crcs = dict[str, str]()
    for name, tensor in header.tensors.items():
        if tensor.shape[0] == tokens:
            tensor_pieces = between(tensor.offset, tensor.end)
            crcs[name] = crc_digits(tensor_pieces, block_tokens * tensor.row_bytes)
    return RangeChecksums(
        front=front,
        front_crc32c=crc_digits(between(0, front), front),
        tokens=block_tokens,
        consecutive=all(
            np.array_equal(positions, np.arange(len(positions))) for positions in shard.positions
        ),
        crc32c=crcs,
    )


# Function that asks for the bytes of a file between two offsets, and returns a function that waits
# for these bytes, uint8. The third argument holds the checksums to compare; with None, whole MiB
# are compared.
Begin = Callable[[int, int, Blocks | None], Callable[[], np.ndarray]]


class SafetensorsFile:
    """A shard's file that is open for reading.

    Arrays are views of the file if it is mapped into memory. Only the header and the two arrays
    with a value for each sample are kept in memory.

    Attributes:
        tensors: The tensors by name, in the order of the file.
        sample_idx: The numbers of the samples, int64 (samples,).
        offsets: The offset of the first token of each sample, then the number of tokens in the
            shard, int64 (samples + 1,). Sample i has the tokens from offsets[i] up to
            offsets[i + 1] - 1.
        labels: Names of the labels that the tokens have: "role" and "turn", or none.
    """

    def __init__(
        self,
        begin: Begin,
        size: int,
        where: str,
        checksums: RangeChecksums | None = None,
        front: int = 0,
    ) -> None:
        """Reads the header and the arrays of samples.

        Args:
            begin: A function that asks for bytes of the file.
            size: The size of the file in bytes.
            where: The path or URL of the file, for messages.
            checksums: Checksums of ranges of the file. None if they are not recorded, or if the
                file is in memory or mapped into it.
            front: Number of bytes at the beginning of the file that are read with one request if
                there are no `checksums`. 0 to read them when they are needed.

        Raises:
            RunError: The file is not a shard of this program, or its size does not match its
                tensors.
        """
        self._ask = begin
        self._where = where
        self._checksums = checksums
        if checksums is not None:
            self._front = begin(0, checksums.front, checksums.front_blocks)()
        else:
            self._front = begin(0, min(front, size), None)()
        header = read_header(self._read, size, where, RunError)
        version = header.metadata.get("format")
        if version != FORMAT:
            raise RunError(
                f"{where}: is not a shard that can be read: format {version!r}, expected {FORMAT!r}"
            )
        self.tensors = header.tensors
        # A hook may have the name of a label, too, but its tensor has two axes.
        self.labels = [
            name for name in LABELS if name in self.tensors and len(self.tensors[name].shape) == 1
        ]
        self.sample_idx = np.array(self.whole("sample_idx"))
        self.offsets = np.array(self.whole("sample_offsets"))
        self._front = np.empty(0, np.uint8)  # everything in it has been copied

    def begin_tokens(self, start: int, stop: int) -> Callable[[], dict[str, np.ndarray]]:
        """Asks for the ids, positions and labels of consecutive tokens.

        Args:
            start: Offset of the first token in the shard.
            stop: Offset of the token after the last one.

        Returns:
            A function that waits for the arrays `token_ids` and `position`, and `role` and `turn`
            if the run has them, and returns them by these names, int32 (stop - start,).
        """
        waiting = {"token_ids": self.begin_rows("token_ids", start, stop)}
        if self._checksums is not None and self._checksums.consecutive:
            # A request costs more than this computation.
            waiting["position"] = lambda: self._consecutive_positions(start, stop)
        else:
            waiting["position"] = self.begin_rows("position", start, stop)
        for name in self.labels:
            waiting[name] = self.begin_rows(name, start, stop)
        return lambda: {name: wait() for name, wait in waiting.items()}

    def _consecutive_positions(self, start: int, stop: int) -> np.ndarray:
        """Returns the positions of consecutive tokens in samples that store all of their tokens.

        Args:
            start: Offset of the first token in the shard.
            stop: Offset of the token after the last one.

        Returns:
            The positions, int32 (stop - start,).
        """
        tokens = np.arange(start, stop)
        samples = np.searchsorted(self.offsets, tokens, "right") - 1
        return (tokens - self.offsets[samples]).astype(np.int32)

    def begin_rows(self, name: str, start: int, stop: int) -> Callable[[], np.ndarray]:
        """Asks for consecutive rows of a tensor.

        Args:
            name: Name of the tensor.
            start: Number of the first row.
            stop: Number of the row after the last one.

        Returns:
            A function that waits for the rows and returns them, (stop - start, ...).

        Raises:
            RunError: The file lacks the tensor or some of the rows.
        """
        tensor = self._tensor(name)
        if stop > tensor.shape[0]:
            raise RunError(
                f"{self._where}: the tensor {name} has {counted(tensor.shape[0], 'row')}, "
                f"expected {stop} or more"
            )
        blocks = None if self._checksums is None else self._checksums.blocks_of(name, tensor)
        content = self._begin(*tensor.byte_range(start, stop), blocks)
        shape = stop - start, *tensor.shape[1:]
        return lambda: np.ndarray(shape, tensor.dtype, content())

    def whole(self, name: str) -> np.ndarray:
        """Returns a whole tensor. Raises RunError if the file lacks it."""
        return self.begin_rows(name, 0, self._tensor(name).shape[0])()

    def _tensor(self, name: str) -> Tensor:
        """Returns the place of a tensor in the file. Raises RunError if the file lacks it."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise RunError(f"{self._where}: lacks the tensor {name}")
        return tensor

    def _read(self, start: int, stop: int) -> bytes:
        """Returns the bytes of the file from `start` to `stop`.

        Fewer are returned if `start` is in the front: the front ends after the header.
        """
        if start < len(self._front):
            stop = min(stop, len(self._front))
        return self._begin(start, stop, None)().tobytes()

    def _begin(self, start: int, stop: int, blocks: Blocks | None) -> Callable[[], np.ndarray]:
        """Asks for a range of bytes, unless it is in the front, and returns a function that waits.

        Args:
            start: Offset of the first byte.
            stop: Offset of the byte after the last one.
            blocks: Checksums to compare; None to compare whole MiB.
        """
        front = self._front
        if stop > len(front):
            return self._ask(start, stop, blocks)
        return lambda: front[start:stop]
