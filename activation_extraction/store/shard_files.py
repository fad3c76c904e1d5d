"""The files of a shard while they are made: bytes that are packed, hashed and handed on."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, Self

from activation_extraction.store.atomic_file import AtomicFile
from activation_extraction.store.blocks import Threads
from activation_extraction.store.formats import ShardFormat
from activation_extraction.store.shard import Key, Shard
from activation_extraction.store.statistics import Sums, Tokens, sums_of

GROUP_BYTES = 32 * 2**20  # of the activations that a thread adds up at a time


class NewFile(Protocol):
    """A file, or an object in a bucket, that appears when it is complete."""

    def write(self, data: bytes | memoryview) -> int: ...

    def finish(self) -> None:
        """Makes sure that all bytes are where they will stay."""
        ...

    def publish(self) -> None:
        """Makes the file appear under its name."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: object) -> None:
        """Forgets what was not published."""
        ...


class Packed(NamedTuple):
    """What a shard's JSON says of its file. unpacked: the bytes before compression."""

    sha256: str
    bytes: int
    unpacked: int


def pack(
    shard: Shard,
    names: Mapping[Key, str],
    shard_format: ShardFormat,
    threads: Threads,
    files: Sequence[NewFile],
) -> Packed:
    """Writes a shard to each of some files. names: key of each hook -> its full name."""
    pieces = shard_format.pieces(shard, names)
    digest, size = hashlib.sha256(), 0
    for data in shard_format.packed(pieces, threads):
        digest.update(data)
        size += memoryview(data).nbytes
        for file in files:
            file.write(data)
    return Packed(digest.hexdigest(), size, sum(piece.nbytes for piece in pieces))


def add_up(shard: Shard, threads: Threads) -> dict[Key, Sums]:
    """The sums of a shard, by hook. They depend on its content alone."""
    positions = shard.positions
    groups = [(key, group) for key in shard.slices for group in _groups(shard, key)]
    tokens = {(g.start, g.stop): Tokens(positions[g]) for _, g in groups}

    def sums(item: tuple[Key, slice]) -> Sums:
        key, group = item
        return sums_of(shard.slices[key][group], tokens[group.start, group.stop])

    total: dict[Key, Sums] = {}
    done = threads.in_order(sums, groups)
    for (key, _), found in zip(groups, done, strict=True):
        if key in total:
            total[key].merge(found)
        else:
            total[key] = found
    return total


def _groups(shard: Shard, key: Key) -> Iterator[slice]:
    """Consecutive samples with GROUP_BYTES at one hook, or a little more."""
    begin = size = 0
    for number, values in enumerate(shard.slices[key], 1):
        size += values.nbytes
        if size >= GROUP_BYTES or number == len(shard.samples):
            yield slice(begin, number)
            begin, size = number, 0


def write_shard(
    path: Path,
    shard: Shard,
    names: Mapping[Key, str],
    shard_format: ShardFormat,
    ready: Callable[[], object] = lambda: None,
) -> Packed:
    """Writes a shard to a local file that appears when it is complete. Raises OSError.

    ready: called just before the file appears.
    """
    threads = Threads(2)
    with AtomicFile(path) as file, threads.pool:
        packed = pack(shard, names, shard_format, threads, [file])
        file.finish()
        ready()
        file.publish()
    return packed
