"""Alignment: the tokens that all of several runs have.

Samples are the same that come from the same row of the data set; their tokens are the same at the
same position. The chunks of the first run are read in its order, and the tokens of the others
wherever they lie.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from operator import itemgetter
from typing import Any

import numpy as np

from activation_extraction.common.visible import without_secrets
from activation_extraction.dataset.token_batch import Block, concatenated
from activation_extraction.dataset.token_source import FoundTokens, Read, TokenSource
from activation_extraction.dataset.windows import Chunk


@dataclass(frozen=True)
class Alignment:
    """Which tokens are the same in several runs.

    numbers: int64 (runs, samples), the number of each sample in each run, in the order of the first
    run, for the samples that all have.
    """

    sources: Sequence[TokenSource]
    numbers: np.ndarray

    def reader(self) -> Read:
        """Returns what reads the tokens of a chunk that all runs have and let through.

        If another run has pickles, tokens are aligned by whole shards of the first, since every
        alignment unpacks all pickles that it needs.
        """
        first = self.sources[0]
        whole = not all(source.shards.by_ranges for source in self.sources[1:])
        align = lru_cache(1)(self._align) if whole else self._align

        def read(chunk: Chunk) -> tuple[Block, ...]:
            aligned = first.whole(chunk.shard) if whole else chunk
            ours, rows, others = align(aligned)
            span = np.array([chunk.start, chunk.stop]) - aligned.start
            here = slice(*np.searchsorted(rows, span))
            block = first.with_activations(ours, rows[here])
            blocks = [block, *(Block(tokens, at[here]) for tokens, at in others)]
            small = first.are_small(block)
            return tuple(Block(tokens, at[small]) for tokens, at in blocks)

        return read

    def _align(self, chunk: Chunk) -> tuple[FoundTokens, np.ndarray, list[Block]]:
        """The tokens of a chunk of the first run, the numbers of those that all runs have and let
        through, and these in each other run."""
        ours = self.sources[0].tokens([chunk])
        found = [self._partners(run, ours) for run in range(1, len(self.sources))]
        rows = reduce(np.intersect1d, [at for at, _ in found], np.flatnonzero(ours.wanted))
        return ours, rows, [Block(b.tokens, b.rows[np.searchsorted(at, rows)]) for at, b in found]

    def _partners(self, run: int, ours: FoundTokens) -> tuple[np.ndarray, Block]:
        """Returns which tokens of the first run another run has and lets through, ascending, and
        its block of them. Raises ValueError if the id of a token differs."""
        source, parts = self.sources[run], list[tuple[np.ndarray, Block]]()
        keys = self._keys(0, ours)
        pairs = np.unique(keys[keys >= 0] >> 32)
        for chunks in source.by_shard(np.sort(self.numbers[run, pairs])):
            theirs = source.tokens(chunks)
            _, at, row = np.intersect1d(keys, self._keys(run, theirs), return_indices=True)
            if (ours.tokens.token_ids[at] != theirs.tokens.token_ids[row]).any():
                urls = self.sources[0].shards.url, source.shards.url
                pair = ours.tokens.map(itemgetter(at)), theirs.tokens.map(itemgetter(row))
                raise different_tokens(urls, *pair)
            wanted = ours.wanted[at] & theirs.wanted[row]
            block = source.with_activations(theirs, row[wanted])
            if (small := source.are_small(block)).any():
                parts.append((at[wanted][small], Block(block.tokens, block.rows[small])))
        if not parts:
            return pairs[:0], Block(ours.tokens, pairs[:0])
        begins = np.cumsum([0, *(len(block.tokens) for _, block in parts)])
        at = np.concatenate([each for each, _ in parts])
        row = np.concatenate([b.rows + n for (_, b), n in zip(parts, begins, strict=False)])
        order = np.argsort(at)
        return at[order], Block(concatenated([block.tokens for _, block in parts]), row[order])

    def _keys(self, run: int, found: FoundTokens) -> np.ndarray:
        """The same number for the same token of any run: its sample's column in `numbers`, and its
        position. It is negative for samples that are in none or are not wanted of the run."""
        return self._columns[run][found.samples] << 32 | found.tokens.position

    @cached_property
    def _columns(self) -> list[np.ndarray]:
        """The column of `numbers` for every sample of each run, or -1."""
        found = []
        for source, numbers in zip(self.sources, self.numbers, strict=True):
            columns = np.full(source.shards.firsts[-1], -1, np.int64)
            columns[numbers] = np.arange(len(numbers))
            found.append(columns)
        if (mask := self.sources[0].mask) is not None:
            found[0][~mask] = -1
        return found


def different_tokens(urls: Sequence[str], *runs: Any) -> ValueError:
    """An error for the first token whose id differs. runs: batches or samples of the same tokens,
    of both runs."""
    token = np.flatnonzero(runs[0].token_ids != runs[1].token_ids)[0]
    one, two = (
        f"sample {np.broadcast_to(each.sample_idx, each.token_ids.shape)[token]} of {url}"
        for url, each in zip(urls, runs, strict=True)
    )
    before, now = (each.token_ids[token] for each in runs)
    told = (
        f"{one} and {two} come from the same row, but the token at position "
        f"{runs[0].position[token]} is {before} in one and {now} in the other"
    )
    return ValueError(without_secrets(told))
