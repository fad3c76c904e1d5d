"""The files that trainers of autoencoders read, one class per layout.

An export is cut into chunks of tokens. A format writes one chunk at a time, every file atomically,
and at the end the files that describe the whole. It knows nothing of where activations come from.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from activation_extraction.common.errors import RunError
from activation_extraction.dataset.batches import TokenBatch
from activation_extraction.inspect.torch_file import write_tensor
from activation_extraction.store.local_files import write_atomically
from activation_extraction.store.safetensors_file import header


@dataclass(frozen=True)
class Contents:
    """What an export holds. Exports with the same contents have the same files.

    source: digest of the run's shards. hooks: name -> width. tokens: of every hook; per_chunk: of
    every chunk but the last.
    """

    form: str
    source: str
    hooks: dict[str, int]
    dtype: str
    tokens: int
    per_chunk: int

    @property
    def chunks(self) -> int:
        return -(-self.tokens // self.per_chunk)

    def tokens_of(self, chunk: int) -> int:
        return min(self.per_chunk, self.tokens - chunk * self.per_chunk)

    def row_bytes(self, hook: str) -> int:
        """Bytes of one token's activation."""
        return self.hooks[hook] * (4 if self.dtype == "float32" else 2)


class Format(Protocol):
    """A layout of files that a trainer reads."""

    def path(self, hook: str, chunk: int) -> str:
        """Of a chunk of a hook, within the export."""
        ...

    def size(self, contents: Contents, hook: str, chunk: int) -> int:
        """Bytes of that file."""
        ...

    def write(self, target: Path, chunk: int, batch: TokenBatch) -> None:
        """Writes all files of a chunk. Raises OSError, and RunError for a file that is not what
        was written to it."""
        ...

    def finish(self, target: Path, contents: Contents) -> None:
        """Writes what describes all chunks. May be called again."""
        ...

    def clean_up(self, target: Path) -> None:
        """Deletes what only an unfinished export needs."""
        ...

    def how_to_read(self, target: Path, hook: str) -> str:
        """A line of Python for the trainer."""
        ...


class Memmap:
    """The activation cache of jkminder's dictionary_learning, with which crosscoders are trained.

    For each hook a folder: config.json, and per chunk `shard_i.memmap` with `shard_i.meta`. Beside
    the folders: tokens.pt, and sequence_ranges.pt, where each sample starts and where the last one
    ends.
    """

    TABLE = ".table_*.bin"  # of each chunk: its token ids, then its sample indices, int64

    def path(self, hook: str, chunk: int) -> str:
        return f"{hook}/shard_{chunk}.memmap"

    def size(self, contents: Contents, hook: str, chunk: int) -> int:
        return contents.tokens_of(chunk) * contents.row_bytes(hook)

    def write(self, target: Path, chunk: int, batch: TokenBatch) -> None:
        for hook, values in batch.activations.items():
            path = target / self.path(hook, chunk)
            meta = {"shape": list(values.shape), "dtype": f"torch.{values.dtype.name}"}
            _store(path.with_suffix(".meta"), [json.dumps(meta).encode()])
            _store(path, [values])
        table = [batch.token_ids.astype(np.int64), batch.sample_idx]
        _store(target / self.TABLE.replace("*", f"{chunk:08d}"), table)

    def finish(self, target: Path, contents: Contents) -> None:
        starts = np.array([*self._starts(target), contents.tokens], np.int64)
        _store_tensor(target / "sequence_ranges.pt", len(starts), [starts])
        token_ids = (np.split(table, 2)[0] for table in self._tables(target))
        _store_tensor(target / "tokens.pt", contents.tokens, token_ids)
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
            _store(target / hook / "config.json", [json.dumps(config, indent=2).encode()])

    def clean_up(self, target: Path) -> None:
        for path in target.glob(self.TABLE):
            path.unlink()

    def how_to_read(self, target: Path, hook: str) -> str:
        return f"ActivationCache({str(target)!r}, {hook!r})"

    def _tables(self, target: Path) -> Iterator[np.ndarray]:
        return (np.fromfile(path, np.int64) for path in sorted(target.glob(self.TABLE)))

    def _starts(self, target: Path) -> Iterator[int]:
        """The first token of every sample."""
        first, before = 0, None
        for table in self._tables(target):
            sample_idx = np.split(table, 2)[1]
            if sample_idx[0] != before:
                yield first
            yield from (first + 1 + np.flatnonzero(np.diff(sample_idx))).tolist()
            first, before = first + len(sample_idx), sample_idx[-1]


class Llamascopium:
    """Llamascopium's cached activations, for its target `activations-1d`.

    For each hook a folder of chunks. Nothing is padded: every token is real, so both masks are 1.
    """

    def path(self, hook: str, chunk: int) -> str:
        return f"{hook}/chunk-{chunk:08d}.safetensors"

    def size(self, contents: Contents, hook: str, chunk: int) -> int:
        tokens = contents.tokens_of(chunk)
        head = self._header(tokens, contents.hooks[hook], np.dtype(contents.dtype))
        return len(head) + tokens * (contents.row_bytes(hook) + 16)

    def write(self, target: Path, chunk: int, batch: TokenBatch) -> None:
        ones = np.ones(len(batch), np.int32)
        for hook, values in batch.activations.items():
            head = self._header(len(batch), values.shape[1], values.dtype)
            tokens = batch.token_ids.astype(np.int64)
            _store(target / self.path(hook, chunk), [head, tokens, ones, ones, values])

    def finish(self, target: Path, contents: Contents) -> None:
        pass

    def clean_up(self, target: Path) -> None:
        pass

    def how_to_read(self, target: Path, hook: str) -> str:
        return f"ActivationFactoryActivationsSource(path={str(target)!r}, name={hook!r})"

    def _header(self, tokens: int, width: int, dtype: np.dtype) -> bytes:
        flat = (tokens,)
        tensors: dict[str, tuple[np.dtype, tuple[int, ...]]] = {
            "tokens": (np.dtype(np.int64), flat),
            "mask": (np.dtype(np.int32), flat),
            "attention_mask": (np.dtype(np.int32), flat),
            "activation": (dtype, (tokens, width)),
        }
        return header(tensors)


FORMATS: dict[str, Format] = {"memmap": Memmap(), "llamascopium": Llamascopium()}


def _store(path: Path, parts: Sequence[bytes | np.ndarray]) -> None:
    """Writes a file from its parts, and reads it back."""

    def write(file: Any) -> None:
        for part in parts:
            file.write(part if isinstance(part, bytes) else part.reshape(-1).view(np.uint8).data)

    _store_with(path, write)


def _store_tensor(path: Path, count: int, parts: Any) -> None:
    """Writes an int64 tensor of `count` values for torch.load, and reads the file back."""
    _store_with(path, partial(write_tensor, count=count, parts=parts))


def _store_with(path: Path, write: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    written = write_atomically(path, write)
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != written:
            raise RunError(f"{path}: the disk does not hold what was written to it")
