"""The formats of shard files: how a shard is written, and what its file is called."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from activation_extraction.store.blocks import Threads, gzipped
from activation_extraction.store.commit import NUMBER_OF_A_SHARD
from activation_extraction.store.pickle_file import pickle_pieces
from activation_extraction.store.safetensors_file import safetensors_pieces
from activation_extraction.store.shard import Key, Shard


@dataclass(frozen=True)
class ShardFormat:
    """One form of a shard file.

    pieces: shard, names of its hooks -> its bytes before compression. compressed: whether they are
    gzipped. how_to_read: path or URL of a file, whether it is in a bucket -> lines of Python that
    read it without this program; none where it takes more than a few.
    """

    suffix: str
    pieces: Callable[[Shard, Mapping[Key, str]], list[memoryview]]
    compressed: bool
    how_to_read: Callable[[str, bool], tuple[str, ...]]

    def packed(self, pieces: list[memoryview], threads: Threads) -> Iterator[bytes | memoryview]:
        """The bytes of the file, which the threads compress where that is asked for."""
        return gzipped(pieces, threads) if self.compressed else iter(pieces)

    def file_name(self, number: int) -> str:
        """Name of the file of shard `number`."""
        return f"shard_{number:04d}{self.suffix}"


def _pickle_lines(shard: str, in_bucket: bool) -> tuple[str, ...]:
    """The lines read the file to its end, because that is where gzip's checksum is."""
    module, opened = "", f"open({shard!r}, 'rb')"
    if in_bucket:
        module, opened = "fsspec, ", f"fsspec.open({shard!r}, compression='infer').open()"
    elif shard.endswith(".gz"):
        module, opened = "gzip, ", f"gzip.open({shard!r})"
    return f"import {module}pickle", f"records = pickle.loads({opened}.read())"


PICKLE = ShardFormat(".pkl", pickle_pieces, False, _pickle_lines)
GZIP_PICKLE = ShardFormat(".pkl.gz", pickle_pieces, True, _pickle_lines)
SAFETENSORS = ShardFormat(".safetensors", safetensors_pieces, False, lambda shard, in_bucket: ())
FORMATS = (PICKLE, GZIP_PICKLE, SAFETENSORS)
SUFFIXES = "|".join(re.escape(each.suffix) for each in FORMATS)
SHARD_FILE = re.compile(rf"shard_{NUMBER_OF_A_SHARD}({SUFFIXES})")


def chosen_format(name: str, compress: bool) -> ShardFormat:
    """The format that --shard_format names. compress: of pickles; safetensors never are, as ranges
    of them are read."""
    if name == "safetensors":
        return SAFETENSORS
    return GZIP_PICKLE if compress else PICKLE


def lines_of_dataset(url: str) -> tuple[str, ...]:
    """Lines of Python that read a whole run, in any format."""
    return (
        "from activation_extraction import ActivationDataset",
        f"dataset = ActivationDataset({url!r})",
    )


def format_of(file: str) -> ShardFormat | None:
    """The format of a shard file, by its name; None for any other file."""
    found = SHARD_FILE.fullmatch(file)
    return next((each for each in FORMATS if found and each.suffix == found[1]), None)
