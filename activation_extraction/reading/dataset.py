"""ActivationDataset: what a run has stored, for training on it. Needs neither JAX nor PyTorch.

It reads the JSON files of all machines and hosts once, at the start, and shards as they are needed.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, overload

import numpy as np

from activation_extraction.cli.errors import InputError, RunError
from activation_extraction.output.commit import Commit
from activation_extraction.output.folder import Folder
from activation_extraction.output.metadata import identity_of
from activation_extraction.output.statistics import Statistics
from activation_extraction.reading.batches import Batches, Chunk, Plan, TokenBatch
from activation_extraction.reading.folders import read_folders
from activation_extraction.reading.shard_readers import ShardReader, open_shard

CHUNK_BYTES = 8 * 2**20  # of one read of one hook, about
OPEN_SHARDS = 1024  # of those that are read by ranges; of pickles, which are in memory, one
REQUESTS = 4  # to a bucket at the same time


@dataclass(frozen=True)
class SampleActivations:
    """One sample: hook -> (tokens, width), and what the run stored with it."""

    activations: dict[str, np.ndarray]
    token_ids: np.ndarray
    position: np.ndarray
    sample_idx: int
    text_preview: str
    doc_id: Any

    def __getitem__(self, hook: str) -> np.ndarray:
        return self.activations[hook]


class ActivationDataset(Sequence[SampleActivations]):
    """The samples of a run, in the order of machines, hosts and shards.

    url: the run's output, a local folder or any URL that fsspec knows. hooks: names of the hooks to
    read; None: all of them. `hooks` is then a dict from name to width. A run that still goes on is
    read as far as it is stored now.

    Raises ValueError when there is no such run or hook, when folders of different runs are mixed,
    or when shards are missing; OSError when a shard cannot be read or is damaged.
    """

    def __init__(self, url: str, hooks: Sequence[str] | None = None) -> None:
        self.url = str(url)
        try:
            folders = read_folders(Folder(self.url))
        except (InputError, RunError) as error:
            raise ValueError(str(error)) from error
        self._folders = [Folder(self.url).child(name) for name in folders]
        self._shards: list[tuple[int, Commit]] = []
        for number, (name, stored) in enumerate(folders.items()):
            _check(f"{self.url}/{name}".rstrip("/"), stored)
            self._shards += [(number, commit) for commit in stored.in_order]
        every = [stored.metadata for stored in folders.values() if stored.metadata is not None]
        if not every:
            raise ValueError(f"{self.url}: has no metadata.json that can be read")
        _check_one_run(self.url, every)
        self.metadata: dict[str, Any] = every[0]
        self._names = {hook["name"]: hook["key"] for hook in self.metadata["hooks"]}
        self._wanted = self._chosen(hooks)
        self._ends = list(accumulate(commit.count for _, commit in self._shards))
        in_ranges = all(map(_in_ranges, self._shards))
        self._open = lru_cache(OPEN_SHARDS if in_ranges else 1)(self._open_shard)
        self._requests = 1 if self._folders[0].local or not in_ranges else REQUESTS

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(commit.tokens for _, commit in self._shards)

    @cached_property
    def hooks(self) -> dict[str, int]:
        """Name -> width, of the hooks that are read."""
        stored = {hook["name"]: hook["width"] for hook in self.metadata["hooks"]}
        return {name: stored[name] for name in self._wanted}

    @cached_property
    def statistics(self) -> dict[str, Statistics]:
        """Hook -> statistics over all that is stored, from the JSON files alone."""
        found = dict.fromkeys(self._wanted, Statistics())
        for _, commit in self._shards:
            for hook in commit.hooks:
                if hook["name"] in found:
                    merged = found[hook["name"]].merge(Statistics.from_json(hook))
                    found[hook["name"]] = merged
        return found

    @property
    def tokenizer_path(self) -> str:
        """The folder or hub name of the model, whose tokenizer made the token ids."""
        return str(self.metadata["configuration"]["model_path"])

    @overload
    def __getitem__(self, index: int) -> SampleActivations: ...
    @overload
    def __getitem__(self, index: slice) -> list[SampleActivations]: ...
    def __getitem__(self, index: int | slice) -> SampleActivations | list[SampleActivations]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"sample {index}: there are {len(self)}")
        index %= len(self)
        shard = bisect_right(self._ends, index)
        return self._sample(self._open(shard), index - (self._ends[shard] - self._count(shard)))

    def __iter__(self) -> Iterator[SampleActivations]:
        return (self[index] for index in range(len(self)))

    def batches(
        self,
        size: int,
        hooks: Sequence[str] | None = None,
        shuffle: int | None = None,
        buffer: int | None = None,
        skip_first: int = 0,
        max_norm: float | Mapping[str, float] | None = None,
        dtype: Any = None,
        worker: int = 0,
        workers: int = 1,
    ) -> Batches:
        """All tokens, in batches of `size`: one pass over the data.

        hooks: those to read, all of this dataset's by default. shuffle: a seed, or None for the
        stored order. buffer: tokens in memory at a time, in which they are shuffled (default:
        64 batches). skip_first: leave out that many tokens at the start of every sample. max_norm:
        leave out tokens with a larger norm, at any hook or per hook. dtype: of the result (default:
        as stored). worker, workers: this process takes one of so many parts that do not overlap;
        workers of a PyTorch DataLoader divide it further by themselves.
        """
        names = self._chosen(hooks)
        limits = max_norm if isinstance(max_norm, Mapping) else dict.fromkeys(names, max_norm)
        buffer = 64 * size if buffer is None else buffer
        if size < 1 or buffer < 2 * size:
            raise ValueError(f"buffer {buffer}: two batches of {size} tokens have to fit")
        if not 0 <= worker < workers:
            raise ValueError(f"worker {worker}: there are {workers}, counted from 0")
        if unknown := set(limits) - set(names):
            raise ValueError(f"max_norm: {sorted(unknown)} are not among the hooks {names}")

        def read(chunk: Chunk) -> TokenBatch:
            return _filtered(self._block(chunk, names), skip_first, limits)

        def plan_for(part: int, parts: int) -> Plan:
            chunks = self._chunks(names, shuffle, worker * parts + part, workers * parts)
            window = buffer // 2 // size * size
            return Plan(chunks, read, self._requests, size, window, shuffle, dtype)

        arguments = {
            **{"size": size, "hooks": list(names), "shuffle": shuffle, "buffer": buffer},
            **{"skip_first": skip_first, "max_norm": _plain(limits), "dtype": str(dtype)},
            **{"worker": worker, "workers": workers},
            **{"shards": len(self._shards), "tokens": self.tokens},
        }
        return Batches(plan_for, arguments)

    def _chosen(self, hooks: Sequence[str] | None) -> list[str]:
        known = self._names if not hasattr(self, "_wanted") else self._wanted
        if hooks is None:
            return list(known)
        if isinstance(hooks, str):
            hooks = [hooks]
        for name in hooks:
            if name not in known:
                raise ValueError(f"{self.url}: has no hook {name!r}; it has {', '.join(known)}")
        return list(hooks)

    def _count(self, shard: int) -> int:
        return self._shards[shard][1].count

    def _open_shard(self, shard: int) -> ShardReader:
        folder, commit = self._shards[shard]
        keys = {name: self._names[name] for name in self._wanted}
        try:
            return open_shard(self._folders[folder], commit, keys)
        except RunError as error:
            raise OSError(str(error)) from error

    def _sample(self, reader: ShardReader, number: int) -> SampleActivations:
        table = reader.table
        span = int(table.offsets[number]), int(table.offsets[number + 1])
        return SampleActivations(
            {name: np.array(reader.rows(name, *span)) for name in self._wanted},
            np.array(table.token_ids[slice(*span)]),
            np.array(table.position[slice(*span)]),
            int(table.sample_idx[number]),
            table.text_previews[number],
            table.doc_ids[number],
        )

    def _block(self, chunk: Chunk, names: Sequence[str]) -> TokenBatch:
        """The tokens of a chunk. Activations are views of the file where that is possible."""
        reader = self._open(chunk.shard)
        span = chunk.start, chunk.stop
        samples = np.searchsorted(reader.table.offsets, np.arange(*span), "right") - 1
        return TokenBatch(
            {name: reader.rows(name, *span) for name in names},
            reader.table.token_ids[slice(*span)],
            reader.table.sample_idx[samples],
            reader.table.position[slice(*span)],
        )

    def _chunks(
        self, names: Sequence[str], shuffle: int | None, worker: int, workers: int
    ) -> list[Chunk]:
        """The chunks of one worker, in the order in which it reads them.

        Pieces of a safetensors shard are read by themselves, so all pieces of the run are shuffled.
        A pickle is read whole, so its pieces stay together.
        """
        widest = max(self.hooks[name] for name in names) * 4
        tokens = max(CHUNK_BYTES // widest, 1)
        groups: list[list[Chunk]] = []
        for number, shard in enumerate(self._shards):
            commit = shard[1]
            starts = range(0, commit.tokens, tokens)
            pieces = [Chunk(number, at, min(at + tokens, commit.tokens)) for at in starts]
            groups += [[piece] for piece in pieces] if _in_ranges(shard) else [pieces]
        if len(groups) < workers:
            groups = [[piece] for group in groups for piece in group]
        if shuffle is not None:
            order = np.random.default_rng(shuffle).permutation(len(groups))
            groups = [groups[i] for i in order]
        return [piece for group in groups[worker::workers] for piece in group]


def _in_ranges(shard: tuple[int, Commit]) -> bool:
    """Whether a part of the shard can be read without the rest."""
    return shard[1].file.endswith(".safetensors")


def _plain(limits: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: None if value is None else float(value) for name, value in limits.items()}


def _filtered(block: TokenBatch, skip_first: int, limits: Mapping[str, float | None]) -> TokenBatch:
    keep = block.position >= skip_first
    for hook, limit in limits.items():
        if limit is not None:
            norms = np.linalg.norm(block[hook].astype(np.float32), axis=1)
            keep = keep & (norms <= limit)
    return block if keep.all() else block._as(lambda values: values[keep])


def _check(where: str, stored: Any) -> None:
    """Raises ValueError for JSONs that are damaged, and for shards that are missing."""
    for why in stored.damaged.values():
        raise ValueError(why)
    numbers = [commit.number for commit in stored.in_order]
    expected = list(range(1, len(numbers) + 1))
    if stored.metadata is not None and stored.metadata["status"] == "complete":
        expected = list(range(1, stored.metadata["shards"] + 1))
    if missing := sorted(set(expected) - set(numbers)):
        raise ValueError(f"{where}: shard {missing[0]} is missing; --verify tells more")


def _check_one_run(url: str, every: Sequence[Mapping[str, Any]]) -> None:
    shared = [identity_of(metadata, url).shared for metadata in every]
    for other in shared[1:]:
        for key in shared[0]:
            if shared[0][key] != other[key]:
                raise ValueError(f"{url}: holds shards of different runs: their {key} differs")
