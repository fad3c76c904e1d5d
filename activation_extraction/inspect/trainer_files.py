"""The files that trainers of autoencoders read, in chunks of tokens: one class per trainer.

Every file is written atomically and read back.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from activation_extraction.common.errors import RunError
from activation_extraction.dataset.token_batch import TokenBatch
from activation_extraction.inspect import arrow_rows
from activation_extraction.inspect.torch_tensor import write_tensor
from activation_extraction.store.local_files import write_atomically
from activation_extraction.store.safetensors_file import header
from activation_extraction.store.statistics import DimensionStatistics, HookStatistics

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True)
class Contents:
    """The contents of an export. Exports with equal contents have equal files.

    form: the value of --export. source: digest of the run's shards. hooks: the widths by name.
    dtype: the dtype in the files; own_dtypes: by name, of hooks that have another one. tokens: how
    many there are in all; per_chunk: how many are in every chunk but the last.
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
        """Returns the dtype of a hook's values in the files."""
        return np.dtype(self.own_dtypes.get(hook, self.dtype))


@dataclass(frozen=True)
class TrainerFiles(ABC):
    """The files of one trainer in a folder.

    TOGETHER: how many tokens a row of the files has; tokens at the end of the run that are too few
    for a row are not written. WRITTEN_AS: maps each dtype that the files cannot have to the one
    that is written. TEMPORARY: a glob of the files that only an unfinished export needs.
    """

    folder: Path
    contents: Contents
    TOGETHER: ClassVar[int] = 1
    WRITTEN_AS: ClassVar[Mapping[str, str]] = {}
    TEMPORARY: ClassVar[str] = ".table_*.bin"

    @abstractmethod
    def path(self, hook: str, chunk: int) -> Path:
        """Returns the path of a chunk of a hook."""

    @abstractmethod
    def size(self, hook: str, chunk: int) -> int:
        """Returns the bytes of that file."""

    @abstractmethod
    def write(self, chunk: int, batch: TokenBatch) -> None:
        """Writes all files of a chunk. Raises OSError, and RunError if a file differs from what was
        written to it."""

    @abstractmethod
    def finish(self, statistics: Mapping[str, HookStatistics]) -> None:
        """Writes the files that describe all chunks. It may be called again. statistics: by hook.
        Raises what `write` does."""

    def clean_up(self) -> None:
        """Deletes the temporary files."""
        for path in self.folder.glob(self.TEMPORARY):
            path.unlink()

    @abstractmethod
    def how_to_read(self, hook: str) -> str:
        """Returns a line of Python with which the trainer reads a hook."""


class Llamascopium(TrainerFiles):
    """Llamascopium's cached activations, for its target `activations-1d`.

    There is a folder of chunks for each hook. There is no padding, so both masks are 1.
    """

    def path(self, hook: str, chunk: int) -> Path:
        return self.folder / hook / f"chunk-{chunk:08d}.safetensors"

    def size(self, hook: str, chunk: int) -> int:
        tokens = self.contents.tokens_of(chunk)
        return len(self._header(tokens, hook)) + tokens * (self.contents.row_bytes(hook) + 16)

    def write(self, chunk: int, batch: TokenBatch) -> None:
        ones, token_ids = np.ones(len(batch), np.int32), batch.token_ids.astype(np.int64)
        for hook, values in batch.activations.items():
            head = self._header(len(batch), hook)
            _store(self.path(hook, chunk), head, token_ids, ones, ones, values)

    def finish(self, statistics: Mapping[str, HookStatistics]) -> None:
        """Does nothing: chunks describe themselves."""

    def how_to_read(self, hook: str) -> str:
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


class Memmap(TrainerFiles):
    """The activation cache of jkminder's dictionary_learning, from which crosscoders are trained.

    Each hook has a folder with config.json, with `shard_i.memmap` and `shard_i.meta` per chunk, and
    with the statistics of every dimension. Beside these folders are tokens.pt, and
    sequence_ranges.pt with the start of each sample and the end of the last one. Until these are
    written, a temporary file for each chunk has its token ids and then its sample indices, int64.
    """

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
        table = self.folder / self.TEMPORARY.replace("*", f"{chunk:08d}")
        _store(table, batch.token_ids.astype(np.int64), batch.sample_idx)

    def finish(self, statistics: Mapping[str, HookStatistics]) -> None:
        contents = self.contents
        starts = np.array([*self._starts(), contents.tokens], np.int64)
        _store_tensor(self.folder / "sequence_ranges.pt", "int64", starts.shape, [starts])
        token_ids = (ids for ids, _ in self._tables())
        _store_tensor(self.folder / "tokens.pt", "int64", (contents.tokens,), token_ids)
        for hook, width in contents.hooks.items():
            if statistics[hook].tokens:  # hooks that hold no activations have no statistics
                self._store_statistics(hook, statistics[hook].all_tokens)
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

    def how_to_read(self, hook: str) -> str:
        return f"ActivationCache({str(self.folder)!r}, {hook!r})"

    def _store_statistics(self, hook: str, of_hook: DimensionStatistics) -> None:
        """Writes what the cache's `mean`, `std` and `running_stats` read.

        They are float32, as they are if the cache computes them. `M2` is the sum of the squared
        deviations from the mean, and `std` is the root of M2 / (count - 1), NaN for a single token
        (RunningStatWelford in the cache's cache.py).
        """
        squares = of_hook.variance * of_hook.tokens
        with np.errstate(invalid="ignore"):
            std = np.sqrt(squares / (of_hook.tokens - 1))
        for name, values in {"mean": of_hook.mean, "std": std, "M2": squares}.items():
            _store_tensor(self.folder / hook / f"{name}.pt", "float32", values.shape, [values])
        count = np.array(of_hook.tokens)
        _store_tensor(self.folder / hook / "count.pt", "int64", count.shape, [count])

    def _tables(self) -> Iterator[list[np.ndarray]]:
        """Yields the token ids and the sample indices of every chunk."""
        for path in sorted(self.folder.glob(self.TEMPORARY)):
            yield np.split(np.fromfile(path, np.int64), 2)

    def _starts(self) -> Iterator[int]:
        """Yields the number of the first token of every sample."""
        first, before = 0, None
        for _, sample_idx in self._tables():
            if sample_idx[0] != before:
                yield first
            yield from (first + 1 + np.flatnonzero(np.diff(sample_idx))).tolist()
            first, before = first + len(sample_idx), sample_idx[-1]


class SaeLens(TrainerFiles):
    """SAELens's cached activations, as its CacheActivationsRunner writes them.

    Each hook has a folder that `datasets.load_from_disk` reads. A row has as many tokens as a
    context has by default in SAELens. Like the rows that SAELens itself makes, it may begin and end
    within samples: SAELens mixes all tokens before it trains on them. Arrow has no bfloat16.
    """

    TOGETHER = 128
    WRITTEN_AS: ClassVar[Mapping[str, str]] = {"bfloat16": "float32"}

    def path(self, hook: str, chunk: int) -> Path:
        return self.folder / hook / f"data-{chunk:05d}-of-{self.contents.chunks:05d}.arrow"

    def size(self, hook: str, chunk: int) -> int:
        tokens = self.contents.tokens_of(chunk)
        zeros = np.zeros((tokens, self.contents.hooks[hook]), self.contents.dtype_of(hook))
        return arrow_rows.size_of(self._rows(hook, zeros, np.zeros(tokens, np.int32)))

    def write(self, chunk: int, batch: TokenBatch) -> None:
        for hook, values in batch.activations.items():
            rows = self._rows(hook, values, batch.token_ids)
            _store(self.path(hook, chunk), *arrow_rows.parts_of(rows))

    def finish(self, statistics: Mapping[str, HookStatistics]) -> None:
        contents = self.contents
        for hook, width in contents.hooks.items():
            dtype = contents.dtype_of(hook).name
            info = {
                **dict.fromkeys(("citation", "description", "homepage", "license"), ""),
                "features": arrow_rows.features(hook, self.TOGETHER, width, dtype),
            }
            names = [self.path(hook, chunk).name for chunk in range(contents.chunks)]
            state: dict[str, Any] = {
                "_data_files": [{"filename": name} for name in names],
                "_fingerprint": hashlib.sha256(f"{contents} {hook}".encode()).hexdigest()[:16],
                "_format_columns": None,
                "_format_kwargs": {},
                "_format_type": None,
                "_output_all_columns": False,
                "_split": None,
            }
            for name, content in {"dataset_info.json": info, "state.json": state}.items():
                _store(self.folder / hook / name, json.dumps(content, indent=2).encode())

    def how_to_read(self, hook: str) -> str:
        where = str(self.folder / hook)
        return (
            f"LanguageModelSAERunnerConfig(..., hook_name={hook!r}, context_size={self.TOGETHER}, "
            f"use_cached_activations=True, cached_activations_path={where!r})"
        )

    def _rows(self, hook: str, values: np.ndarray, token_ids: np.ndarray) -> "pyarrow.RecordBatch":
        """Returns the rows of a chunk, without tokens at its end that are too few for a row."""
        rows = len(values) // self.TOGETHER
        values, token_ids = (each[: rows * self.TOGETHER] for each in (values, token_ids))
        shape = rows, self.TOGETHER, values.shape[1]
        values = values.astype(self.contents.dtype_of(hook), copy=False)
        return arrow_rows.rows_of(hook, values.reshape(shape), token_ids)


FORMATS: dict[str, type[TrainerFiles]] = {
    "memmap": Memmap,
    "llamascopium": Llamascopium,
    "sae_lens": SaeLens,
}


def _store(path: Path, *parts: bytes | np.ndarray) -> None:
    """Writes a file from its parts, and reads it back."""

    def write(file: Any) -> None:
        for part in parts:
            file.write(part if isinstance(part, bytes) else part.reshape(-1).view(np.uint8).data)

    _store_with(path, write)


def _store_tensor(
    path: Path, dtype: str, shape: tuple[int, ...], parts: Iterable[np.ndarray]
) -> None:
    """Writes a tensor for torch.load as `write_tensor` does, and reads the file back."""
    _store_with(path, lambda file: write_tensor(file, dtype, shape, parts))


def _store_with(path: Path, write: Callable[[Any], object]) -> None:
    path.parent.mkdir(exist_ok=True)
    written = write_atomically(path, write)
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != written:
            raise RunError(f"{path}: the disk does not hold what was written to it")
