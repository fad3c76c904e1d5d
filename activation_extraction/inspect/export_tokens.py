"""Exports a run to files that trainers of autoencoders read, in chunks of tokens.

There is one class per file layout. `export.json` in the folder records which chunks are complete
and where the export continues. Every file is written atomically and read back. At the end, the
statistics of the exported activations are compared with those of the run.
"""

import hashlib
import io
import json
import math
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.common.visible import counted, say
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.token_batch import TokenBatch
from activation_extraction.store.commit import METADATA
from activation_extraction.store.local_files import write_atomically, write_bytes
from activation_extraction.store.metadata import identity_of
from activation_extraction.store.safetensors_file import header
from activation_extraction.store.sealed_json import seal, unseal
from activation_extraction.store.statistics import Statistics, defined_tokens

STATE = "export.json"
CHUNK_BYTES = 256 * 2**20  # of all hooks together; four times as much is in memory
COMPARED = ("mean", "variance", "mean_norm", "max_norm")


@dataclass(frozen=True)
class Contents:
    """The contents of an export. Exports with equal contents have equal files.

    source: digest of the run's shards. hooks: the widths by name. own_dtypes: the dtypes by name,
    of hooks that do not have `dtype`. tokens: how many there are in all; per_chunk: how many are in
    every chunk but the last.
    """

    form: str
    source: str
    hooks: dict[str, int]
    dtype: str
    tokens: int
    per_chunk: int
    own_dtypes: dict[str, str] = field(default_factory=dict)

    @property
    def chunks(self) -> int:
        return -(-self.tokens // self.per_chunk)

    def tokens_of(self, chunk: int) -> int:
        return min(self.per_chunk, self.tokens - chunk * self.per_chunk)

    def row_bytes(self, hook: str) -> int:
        """The bytes of one token's activation."""
        return self.hooks[hook] * self.dtype_of(hook).itemsize

    def dtype_of(self, hook: str) -> np.dtype:
        """Returns the dtype of a hook's values."""
        return np.dtype(self.own_dtypes.get(hook, self.dtype))


@dataclass(frozen=True)
class Llamascopium:
    """Llamascopium's cached activations, for its target `activations-1d`.

    There is a folder of chunks for each hook. There is no padding, so both masks are 1.
    """

    folder: Path
    contents: Contents

    def path(self, hook: str, chunk: int) -> Path:
        """Returns the path of a chunk of a hook."""
        return self.folder / hook / f"chunk-{chunk:08d}.safetensors"

    def size(self, hook: str, chunk: int) -> int:
        """Returns the bytes of that file."""
        tokens = self.contents.tokens_of(chunk)
        return len(self._header(tokens, hook)) + tokens * (self.contents.row_bytes(hook) + 16)

    def write(self, chunk: int, batch: TokenBatch) -> None:
        """Writes all files of a chunk. Raises OSError, and RunError if a file differs from what was
        written to it."""
        ones, token_ids = np.ones(len(batch), np.int32), batch.token_ids.astype(np.int64)
        for hook, values in batch.activations.items():
            head = self._header(len(batch), hook)
            _store(self.path(hook, chunk), head, token_ids, ones, ones, values)

    def finish(self) -> None:
        """Writes the files that describe all chunks. It may be called again."""

    def clean_up(self) -> None:
        """Deletes files that only an unfinished export needs."""

    def how_to_read(self, hook: str) -> str:
        """Returns a line of Python with which the trainer reads a hook."""
        return f"ActivationFactoryActivationsSource(path={str(self.folder)!r}, name={hook!r})"

    def _header(self, tokens: int, hook: str) -> bytes:
        shape = tokens, self.contents.hooks[hook]
        return header(
            {
                "tokens": (np.dtype(np.int64), shape[:1]),
                "mask": (np.dtype(np.int32), shape[:1]),
                "attention_mask": (np.dtype(np.int32), shape[:1]),
                "activation": (self.contents.dtype_of(hook), shape),
            }
        )


@dataclass(frozen=True)
class Memmap:
    """The activation cache of jkminder's dictionary_learning, from which crosscoders are trained.

    Each hook has a folder with config.json, and with `shard_i.memmap` and `shard_i.meta` per chunk.
    Beside these folders are tokens.pt, and sequence_ranges.pt with the start of each sample and the
    end of the last one. The methods are those of Llamascopium.
    """

    folder: Path
    contents: Contents
    TABLE = ".table_*.bin"  # for each chunk: its token ids, then its sample indices, int64

    def path(self, hook: str, chunk: int) -> Path:
        return self.folder / hook / f"shard_{chunk}.memmap"

    def size(self, hook: str, chunk: int) -> int:
        return self.contents.tokens_of(chunk) * self.contents.row_bytes(hook)

    def write(self, chunk: int, batch: TokenBatch) -> None:
        for hook, values in batch.activations.items():
            path = self.path(hook, chunk)
            meta = {"shape": list(values.shape), "dtype": f"torch.{values.dtype.name}"}
            _store(path.with_suffix(".meta"), json.dumps(meta).encode())
            _store(path, values)
        table = self.folder / self.TABLE.replace("*", f"{chunk:08d}")
        _store(table, batch.token_ids.astype(np.int64), batch.sample_idx)

    def finish(self) -> None:
        contents = self.contents
        starts = np.array([*self._starts(), contents.tokens], np.int64)
        _store_tensor(self.folder / "sequence_ranges.pt", len(starts), [starts])
        token_ids = (ids for ids, _ in self._tables())
        _store_tensor(self.folder / "tokens.pt", contents.tokens, token_ids)
        for hook, width in contents.hooks.items():
            config = {
                "d_model": width,
                "shard_size": contents.per_chunk,
                "shard_count": contents.chunks,
                "total_size": contents.tokens,
                "shuffle_shards": False,
                "io": "out",
                "store_tokens": True,
                "store_sequence_ranges": True,
            }
            _store(self.folder / hook / "config.json", json.dumps(config, indent=2).encode())

    def clean_up(self) -> None:
        for path in self.folder.glob(self.TABLE):
            path.unlink()

    def how_to_read(self, hook: str) -> str:
        return f"ActivationCache({str(self.folder)!r}, {hook!r})"

    def _tables(self) -> Iterator[list[np.ndarray]]:
        """Yields the token ids and the sample indices of every chunk."""
        for path in sorted(self.folder.glob(self.TABLE)):
            yield np.split(np.fromfile(path, np.int64), 2)

    def _starts(self) -> Iterator[int]:
        """Yields the number of the first token of every sample."""
        first, before = 0, None
        for _, sample_idx in self._tables():
            if sample_idx[0] != before:
                yield first
            yield from (first + 1 + np.flatnonzero(np.diff(sample_idx))).tolist()
            first, before = first + len(sample_idx), sample_idx[-1]


FORMATS: dict[str, Callable[[Path, Contents], Llamascopium | Memmap]] = {
    "memmap": Memmap,
    "llamascopium": Llamascopium,
}


def _store(path: Path, *parts: bytes | np.ndarray) -> None:
    """Writes a file from its parts, and reads it back."""

    def write(file: Any) -> None:
        for part in parts:
            file.write(part if isinstance(part, bytes) else part.reshape(-1).view(np.uint8).data)

    _store_with(path, write)


def _store_tensor(path: Path, count: int, parts: Iterable[np.ndarray]) -> None:
    """Writes an int64 tensor of `count` values for torch.load, and reads the file back."""
    _store_with(path, lambda file: write_tensor(file, count, parts))


def _store_with(path: Path, write: Callable[[Any], object]) -> None:
    path.parent.mkdir(exist_ok=True)
    written = write_atomically(path, write)
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != written:
            raise RunError(f"{path}: the disk does not hold what was written to it")


def write_tensor(file: Any, count: int, parts: Iterable[np.ndarray]) -> None:
    """Writes `count` int64 values, given in parts, for torch.load(path, weights_only=True).

    Such a file is an uncompressed ZIP archive of a pickle, which has the tensor's dtype and shape,
    and of the tensor's values (see torch/serialization.py). PyTorch is not needed.
    """
    contents: dict[str, Iterable[Any]] = {
        "data.pkl": [_pickle(count)],
        "byteorder": [b"little"],
        "data/0": (part.astype("<i8").data for part in parts),
        "version": [b"3\n"],
    }
    with zipfile.ZipFile(_Appending(file), "w", zipfile.ZIP_STORED) as archive:
        for name, pieces in contents.items():
            # ZipInfo dates it 1980, so the bytes depend on the values alone. Any folder name works.
            with archive.open(zipfile.ZipInfo(f"tensor/{name}"), "w", force_zip64=True) as entry:
                for piece in pieces:
                    entry.write(piece)


class _Appending(io.RawIOBase):
    """A file that cannot seek, so that ZipFile only appends to it."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        return self._file.write(data)

    def writable(self) -> bool:
        return True


def _pickle(count: int) -> bytes:
    """Pickles `_rebuild_tensor_v2(storage, 0, (count,), (1,), False, OrderedDict())`, where the
    storage is the persistent id ("storage", LongStorage, "0", "cpu", count)."""

    def integer(value: int) -> bytes:
        return b"\x8a\x08" + struct.pack("<q", value)

    pieces = [
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((",  # protocol 2, the function, two marks
        b"X\7\0\0\0storagectorch\nLongStorage\nX\1\0\0\0" + b"0X\3\0\0\0cpu",
        *(integer(count), b"tQ", integer(0)),  # a tuple, which is a persistent id; the offset
        *(integer(count), b"\x85", integer(1), b"\x85"),  # shape and strides, tuples of one
        b"\x89ccollections\nOrderedDict\n)R",  # False, and an empty OrderedDict
        b"tR.",  # the arguments as a tuple; the call; stop
    ]
    return b"".join(pieces)


class TokenExport:
    """An export of tokens to a folder, which may have been begun already. size: in tokens."""

    unit = " tokens"

    def __init__(
        self,
        dataset: ActivationDataset,
        form: str,
        source: str,
        hooks: dict[str, int],
        folder: Path,
    ) -> None:
        """Prepares an export. source, hooks: see Contents. Raises InputError if there are no
        tokens."""
        if not dataset.tokens:
            raise InputError(f"--export: {dataset.url} holds no tokens")
        self.folder, self.size, self._dataset = folder, dataset.tokens, dataset
        self._floats = identity_of(dataset.metadata, METADATA).float32_hooks
        own = {name: dataset.dtypes[name].name for name in hooks}
        own = {name: dtype for name, dtype in own.items() if dtype != dataset.dtype.name}
        one_by_one = Contents(form, source, hooks, dataset.dtype.name, self.size, 1, own)
        per_chunk = CHUNK_BYTES // sum(map(one_by_one.row_bytes, hooks))
        self._contents = replace(one_by_one, per_chunk=max(1, per_chunk))
        self._files = FORMATS[form](folder, self._contents)
        # How many chunks are complete; whether the whole export is; the state of the batches; the
        # statistics of the exported activations, by hook.
        self._progress: dict[str, Any] = {
            "chunks": 0,
            "finished": False,
            "reading": None,
            "statistics": {},
        }

    def resume(self) -> bool:
        """Finds out what was exported already, and returns whether that is everything.

        Raises InputError if the folder holds anything else.
        """
        path, remedy = self.folder / STATE, f"delete {self.folder} and export again"
        if not path.exists():
            if any(name != f".{STATE}.tmp" for name in os.listdir(self.folder)):
                raise InputError(
                    f"--export_dir {self.folder}: holds other files; expected an empty folder"
                )
            self._record()
            return False
        try:
            state = unseal(path.read_bytes(), str(path))
        except RunError as error:
            raise InputError(f"{path}: is damaged; {remedy}") from error
        for name, expected in asdict(self._contents).items():
            if (value := {"own_dtypes": {}, **state["contents"]}.get(name)) != expected:
                content = f"{name} {value}, not {expected}" if name != "source" else "other shards"
                raise InputError(
                    f"--export_dir {self.folder}: holds another export, with {content:.200}"
                )
        self._progress = state["progress"]
        for chunk in range(self._progress["chunks"]):
            for hook in self._contents.hooks:
                path = self._files.path(hook, chunk)
                if not path.exists() or path.stat().st_size != self._files.size(hook, chunk):
                    raise InputError(f"{path}: is missing or has another size; {remedy}")
        if self._progress["finished"]:
            self._files.clean_up()
        return self._progress["finished"]

    @property
    def left(self) -> int:
        """How many tokens are left to export."""
        return max(self.size - self._progress["chunks"] * self._contents.per_chunk, 0)

    @property
    def bytes_needed(self) -> int:
        """The most bytes that the files that are left can have."""
        token_bytes = sum(map(self._contents.row_bytes, self._contents.hooks))
        return self.left * (token_bytes + 16 * len(self._contents.hooks))

    def write(self) -> Iterator[int]:
        """Writes the chunks that are left, and yields the number of tokens after each."""
        contents, progress, per_chunk = self._contents, self._progress, self._contents.per_chunk
        statistics = progress["statistics"]
        batches = self._dataset.batches(per_chunk, list(contents.hooks), buffer=2 * per_chunk)
        if progress["reading"] is not None:
            batches.restore(progress["reading"])
        try:
            for chunk in range(progress["chunks"], contents.chunks):
                batch = next(batches)
                self._files.write(chunk, batch)
                for hook, values in batch.activations.items():
                    if hook in self._floats:
                        values = values[defined_tokens(values, batch.position)]
                    merged = Statistics.from_array(values)
                    if hook in statistics:
                        merged = Statistics.from_json(statistics[hook]).merge(merged)
                    statistics[hook] = merged.to_json()
                progress |= {"chunks": chunk + 1, "reading": batches.state()}
                self._record()
                yield len(batch)
        finally:
            batches.close()
        self._compare()
        self._files.finish()
        progress["finished"] = True
        self._record()
        self._files.clean_up()

    def _record(self) -> None:
        state = {"contents": asdict(self._contents), "progress": self._progress}
        write_bytes(self.folder / STATE, seal(state))

    def _compare(self) -> None:
        """Raises RunError unless the exported activations have the statistics of the run."""
        for hook in self._contents.hooks:
            exported = Statistics.from_json(self._progress["statistics"][hook])
            recorded = self._dataset.statistics[hook]
            for name in COMPARED if recorded.tokens else ():  # integers have no statistics
                value, expected = getattr(exported, name), getattr(recorded, name)
                if not math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9):
                    raise RunError(
                        f"{self.folder}: {hook}: the {name} of what was exported is {value}, the "
                        f"run's is {expected}",
                        remedy="run --verify on the run",
                    )

    def say_summary(self) -> None:
        """Prints what was exported, and how to read it."""
        contents, hook = self._contents, next(iter(self._contents.hooks))
        size = contents.tokens * sum(map(contents.row_bytes, contents.hooks))
        say(
            f"exported: {counted(contents.tokens, 'token')}, {counted(len(contents.hooks), 'hook')}"
            f", {counted(contents.chunks, 'chunk')}, {size / 1e9:,.3f} GB of activations in "
            f"{self.folder}",
            *("read it with:", f"  {self._files.how_to_read(hook)}"),
        )
