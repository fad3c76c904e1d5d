"""TokenSource: the tokens of a run in chunks, and which of them pass the filters."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from activation_extraction.common.choices import ROLES
from activation_extraction.dataset.open_shards import OpenShards, as_os_errors
from activation_extraction.dataset.options import BatchOptions
from activation_extraction.dataset.token_batch import ByHook, TokenBatch, copy_rows, empty_batch
from activation_extraction.dataset.windows import Block, Chunk
from activation_extraction.store.shard_reader import ShardReader, read_rows


class ChunkTokens(NamedTuple):
    """The tokens of a chunk, without activations. samples: the number of each one's sample in its
    shard. wanted: whether each passes the filters, but for its norm."""

    reader: ShardReader
    chunk: Chunk
    tokens: TokenBatch
    samples: np.ndarray
    wanted: np.ndarray


@dataclass(frozen=True)
class TokenSource:
    """What batches of one run are made of: its shards, and the complete options.

    mask: bool (samples,), the samples that are wanted; None for all.
    """

    shards: OpenShards
    options: BatchOptions
    mask: np.ndarray | None = None

    @cached_property
    def fingerprint(self) -> str:
        """A digest of what is stored."""
        files = "".join(f"{folder}/{commit.sha256}\n" for folder, commit in self.shards.shards)
        return hashlib.sha256(files.encode()).hexdigest()

    @property
    def row_bytes(self) -> int:
        """The bytes of one token at the hooks in memory."""
        return self.shards.row_bytes(self.options.hooks)

    def columns(self, names: Sequence[str], sample_idx: np.ndarray) -> dict[str, np.ndarray]:
        """Returns columns of the table of samples for some samples, as objects. Raises OSError."""
        columns = self.shards.columns(dict.fromkeys(["sample_idx", *names]))
        indices, rows = self._ascending
        found = rows[np.searchsorted(indices, sample_idx)]
        return {name: columns[name][found] for name in names}

    @cached_property
    def _ascending(self) -> tuple[np.ndarray, np.ndarray]:
        """Every `sample_idx`, ascending, and the row of each in the table of all samples."""
        indices = self.shards.columns(["sample_idx"])["sample_idx"].astype(np.int64)
        rows = np.argsort(indices)
        return indices[rows], rows

    def of(self, samples: np.ndarray) -> "TokenSource":
        """Returns the same source, but only with tokens of the samples with these numbers."""
        mask = np.isin(np.arange(self.shards.firsts[-1]), samples)
        return replace(self, mask=mask if self.mask is None else mask & self.mask)

    def _mask_of(self, shard: int) -> np.ndarray | None:
        span = slice(*self.shards.firsts[shard : shard + 2])
        return None if self.mask is None else self.mask[span]

    def whole(self, shard: int) -> Chunk:
        """Returns all tokens of a shard."""
        return Chunk(shard, 0, self.shards.commits[shard].tokens)

    def chunks(self) -> list[Chunk]:
        """Returns the shards that have samples which are wanted."""
        masks = [self._mask_of(shard) for shard, _ in enumerate(self.shards.commits)]
        return [self.whole(n) for n, mask in enumerate(masks) if mask is None or mask.any()]

    def tokens(self, chunk: Chunk) -> ChunkTokens:
        """Returns all tokens of a chunk, and which of them are wanted. Raises OSError."""
        with as_os_errors():
            reader, span = self.shards.get(chunk.shard), (chunk.start, chunk.stop)
            token_ids, position = reader.tokens(*span)
            labels = reader.labels(*span)
        samples = np.searchsorted(reader.offsets, np.arange(*span), "right") - 1
        wanted = position >= self.options.skip_first
        if (mask := self._mask_of(chunk.shard)) is not None:
            wanted &= mask[samples]
        if self.options.roles is not None:
            if "role" not in labels:
                folder, commit = self.shards.shards[chunk.shard]
                raise OSError(f"{self.shards.url}: {folder}/{commit.file} has no roles")
            numbers = [ROLES.index(role) for role in self.options.roles]
            wanted &= np.isin(labels["role"], numbers)
        hooks = ByHook[np.ndarray]({}, self.shards.hooks.aliases)
        shared = token_ids, reader.sample_idx[samples], position
        tokens = TokenBatch(hooks, *shared, labels.get("role"), labels.get("turn"))
        return ChunkTokens(reader, chunk, tokens, samples, wanted)

    def with_activations(self, found: ChunkTokens, rows: np.ndarray) -> Block:
        """Returns these tokens of a chunk with their activations. Raises OSError.

        Activations are views of the file where that is possible. Encoded ones are decoded to the
        dtype of the result.
        """
        first, stop = (int(rows.min()), int(rows.max()) + 1) if len(rows) else (0, 0)
        span = found.chunk.start + first, found.chunk.start + stop
        hooks, dtype = self.shards.hooks, self.options.dtype
        with as_os_errors():
            activations = {
                name: read_rows(found.reader, name, hooks[name], span, dtype)
                for name in self.options.hooks
            }
        tokens = found.tokens.map(itemgetter(slice(first, stop)))
        by_hook = ByHook(activations, tokens.activations.aliases)
        return Block(replace(tokens, activations=by_hook), rows - first)

    def are_small(self, block: Block) -> np.ndarray:
        """Returns whether the norms of each row of a block are within the limits."""
        small = np.ones(len(block.tokens), bool)
        for hook, limit in self.options.max_norm.items():
            small &= np.linalg.norm(block.tokens[hook].astype(np.float32), axis=1) <= limit
        return small[block.rows]

    def take(self, tokens: TokenBatch, rows: np.ndarray) -> TokenBatch:
        """Returns the tokens with these numbers as a batch of its own. Raises OSError."""
        dtypes: dict[str, str] = {}
        if self.options.dtype is not None:
            floats = [name for name in self.options.hooks if self.shards.hooks[name].activations]
            dtypes = dict.fromkeys(floats, self.options.dtype)
        batch = empty_batch(tokens, len(rows), dtypes)
        copy_rows(tokens, rows, batch)
        if names := self.options.columns:
            batch = replace(batch, columns=self.columns(names, batch.sample_idx))
        return batch
