"""Runs over the same data, read as one: `paired` gives two side by side, `join` adds up hooks.

Samples are the same that come from the same row of the data set, and tokens that are at the same
position of these. Other data may have rows of the same names, so runs that record other data are
refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial, reduce
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow

from activation_extraction.common.log import log
from activation_extraction.common.visible import counted, without_secrets
from activation_extraction.dataset.batches import Batches
from activation_extraction.dataset.token_batch import (
    Block,
    ByHook,
    SampleActivations,
    Samples,
    TokenBatch,
    TokenPair,
    concatenate_batches,
)
from activation_extraction.dataset.token_source import (
    BatchOptions,
    FoundTokens,
    Read,
    TokenSource,
    as_mask,
    default_buffer,
)
from activation_extraction.dataset.windows import Chunk
from activation_extraction.store.resume import shown
from activation_extraction.store.statistics import HookStatistics

if TYPE_CHECKING:  # that module imports this one
    from activation_extraction.dataset.dataset import ActivationDataset


class AlignedRuns:
    """Several runs over the same data, of which the tokens that all have are read.

    runs: the datasets. unpaired_samples: how many samples each has that not all have. The length is
    the number of samples that all have.
    """

    def __init__(self, *runs: "ActivationDataset") -> None:
        self.runs, urls = runs, without_secrets(" and ".join(run.url for run in runs))
        for run in runs[1:]:
            files = runs[0].data_files, run.data_files
            for name, before, now in runs[0].identity.other_samples(run.identity, *files):
                told = (
                    f"{runs[0].url} and {run.url}: their samples are not those of the same data: "
                    f"{name} is {shown(before, now)} in one and {shown(now, before)} in the other"
                )
                raise ValueError(without_secrets(told))
        tables = [_rows(run, str(number)) for number, run in enumerate(runs)]
        table = reduce(lambda one, other: one.join(other, "row", join_type="inner"), tables)
        # int64 (runs, samples): the number of each sample in each run, as the first orders them.
        self._numbers = np.stack(table.sort_by("0").drop_columns("row").columns)
        if not len(self):
            raise ValueError(f"{urls}: no row of the data set has a sample in each of them")
        self.unpaired_samples = tuple(len(run) - len(self) for run in runs)
        tokens = [run.shards.columns(["tokens"])["tokens"] for run in runs]
        common = [each[own].astype(int) for each, own in zip(tokens, self._numbers, strict=True)]
        for run, left_out, in_all in zip(runs, self.unpaired_samples, common, strict=True):
            if left_out:
                what = counted(left_out, "sample"), counted(run.tokens - in_all.sum(), "token")
                log.warning("%s: %s (%s) left out: not all runs have them", run.url, *what)
        if any(
            run.identity.kept_tokens != runs[0].identity.kept_tokens or (each != common[0]).any()
            for run, each in zip(runs, common, strict=True)
        ):
            told = (
                "%s: store different tokens of the same samples; only those that all have are read"
            )
            log.warning(told, urls)

    def __len__(self) -> int:
        return self._numbers.shape[1]

    def _batches(
        self, form: Any, hooks: Sequence[list[str]], options: BatchOptions
    ) -> Batches[Any]:
        """Batches of the tokens that all runs have: what `form` makes of a batch of each run.

        hooks: the names of those to read, of each run. A mask in `where` is over the samples of the
        first run; a function gets the table of each. Raises ValueError.
        """
        runs = list(zip(self.runs, hooks, strict=True))
        row = sum(run.shards.row_bytes(names) for run, names in runs)
        local = all(run.shards.local for run in self.runs)
        buffer = options.buffer or default_buffer(options, sum(map(len, hooks)), row, local)
        unread = set(options.max_norm) if isinstance(options.max_norm, Mapping) else set()
        sources = list[TokenSource]()
        for run, names in runs:
            limits, aliases = options.max_norm, run.hooks.aliases
            if isinstance(limits, Mapping):
                limits = {n: limit for n, limit in limits.items() if aliases.get(n, n) in names}
                unread -= limits.keys()
            where = options.where if callable(options.where) or not sources else None
            own = dict(hooks=names, buffer=buffer, max_norm=limits, where=where)
            sources.append(run.source(replace(options, **own)))
        for name in unread:
            raise ValueError(f"max_norm: hook {name!r} is not read")
        sources[0] = sources[0].of(self._numbers[0])
        return Batches(sources, form, partial(aligned_reader, sources, self._numbers))


class PairedRuns(AlignedRuns):
    """Two runs side by side; `paired` makes it."""

    def batches(self, size: int, hooks: Any = None, **options: Any) -> Batches[TokenPair]:
        """Returns all tokens that both runs have, as pairs of batches of `size`, a batch of each
        run: row t of every array belongs to the same token.

        BatchOptions describes all arguments; the order is that of the first run. A token comes only
        if it passes the filters in both runs. hooks: those of both runs; to read other hooks of
        each, give datasets of these to `paired`. where: a function is called with the table of each
        run; a mask is over the samples of the first. Raises ValueError as for one run.
        """
        names = [run.hooks.chosen(run.url, hooks) for run in self.runs]
        return self._batches(TokenPair._make, names, BatchOptions(size, **options))


class JoinedRuns(AlignedRuns, Samples):
    """Runs of different hooks over the same data, as one dataset; `ActivationDataset.join` makes
    it. It has the samples and tokens that all runs have, in the order of the first run.

    hooks, dtypes: the width and the dtype of every hook, by name.
    """

    def __init__(self, *runs: "ActivationDataset") -> None:
        self.hooks: ByHook[int] = _joined_hooks([run.hooks for run in runs])
        self.dtypes: ByHook[np.dtype] = _joined_hooks([run.dtypes for run in runs])
        super().__init__(*runs)

    @cached_property
    def statistics(self) -> ByHook[HookStatistics]:
        """Statistics by hook, over all that its own run has stored."""
        return _joined_hooks([run.statistics for run in self.runs])

    @cached_property
    def samples(self) -> pyarrow.Table:
        """The table of the samples, as the first run has it: `tokens` counts those that it has."""
        return self.runs[0].samples.take(self._numbers[0])

    def join(self, other: Any) -> "JoinedRuns":
        """Returns the same with the hooks of another run, too. See `ActivationDataset.join`."""
        return JoinedRuns(*self.runs, self.runs[0].opened(other))

    def batches(self, size: int, hooks: Any = None, **options: Any) -> Batches[TokenBatch]:
        """Returns all tokens, in batches of `size`, with the hooks of all runs.

        BatchOptions describes all arguments; `where` is over the joined samples. A token comes only
        if it passes the filters in all runs. What a batch has beside activations is what the first
        run has. Raises ValueError as for one run.
        """
        names = self.hooks.chosen("the joined runs", hooks)
        of_runs = [[name for name in names if name in run.hooks] for run in self.runs]
        asked = BatchOptions(size, **options)
        if (where := asked.where) is not None:
            mask = as_mask(where(self.samples) if callable(where) else where, len(self))
            of_first = np.isin(np.arange(len(self.runs[0])), self._numbers[0][mask])
            asked = replace(asked, where=of_first)
        return self._batches(_joined, of_runs, asked)

    def _sample(self, index: int) -> SampleActivations:
        """Raises ValueError where the runs have different token ids."""
        numbers = self._numbers[:, index].tolist()
        samples = [run[number] for run, number in zip(self.runs, numbers, strict=True)]
        position = reduce(np.intersect1d, (sample.position for sample in samples))
        first, *others = (_at_positions(sample, position) for sample in samples)
        for run, other in zip(self.runs[1:], others, strict=True):
            _check_same_tokens((self.runs[0].url, run.url), first, other)
        return _joined([first, *others])


def aligned_reader(sources: Sequence[TokenSource], numbers: np.ndarray) -> Read:
    """Returns what reads the tokens of a chunk of the first run that all runs have and let through.

    numbers: those of AlignedRuns. If another run has pickles, tokens are aligned by whole shards of
    the first, since every alignment unpacks all pickles that it needs.
    """
    first, *others = sources
    numbers = numbers[:, np.asarray(first.mask)[numbers[0]]]
    whole = not all(source.shards.by_ranges for source in others)

    @lru_cache(int(whole))
    def align(chunk: Chunk) -> tuple[FoundTokens, list[Block]]:
        ours = first.tokens([chunk])
        here = slice(*np.searchsorted(numbers[0], ours.samples[[0, -1]] + [0, 1]))
        return ours, [
            _partners(first, source, ours, numbers[[0, run], here])
            for run, source in enumerate(others, 1)
        ]

    def read(chunk: Chunk) -> tuple[Block, ...]:
        aligned = first.whole(chunk.shard) if whole else chunk
        ours, found = align(aligned)
        start = chunk.start - aligned.start
        here = slice(start, start + len(chunk))
        rows = start + np.flatnonzero(np.all([at[here] >= 0 for _, at in found], axis=0))
        block = first.with_activations(ours, rows)
        small = first.are_small(block)
        blocks = block, *(Block(tokens, at[rows]) for tokens, at in found)
        return tuple(Block(tokens, at[small]) for tokens, at in blocks)

    return read


def _partners(one: TokenSource, other: TokenSource, ours: FoundTokens, pairs: np.ndarray) -> Block:
    """The tokens of another run with a row for each of the tokens of the first, which is -1 where
    that run lacks it, or one of both leaves it out. Raises ValueError if the id of a token differs.
    """
    of_one, of_other = pairs[:, np.argsort(pairs[1])]
    keys = ours.samples << 32 | ours.tokens.position
    rows, parts = np.full(len(keys), -1), list[TokenBatch]()
    for chunks in other.by_shard(of_other):
        theirs = other.tokens(chunks)
        samples = of_one[np.searchsorted(of_other, theirs.samples)]
        their_keys = samples << 32 | theirs.tokens.position
        _, at, row = np.intersect1d(keys, their_keys, return_indices=True)
        same = ours.tokens.map(itemgetter(at)), theirs.tokens.map(itemgetter(row))
        _check_same_tokens((one.shards.url, other.shards.url), *same)
        wanted = ours.wanted[at] & theirs.wanted[row]
        block = other.with_activations(theirs, row[wanted])
        if (small := other.are_small(block)).any():
            rows[at[wanted][small]] = block.rows[small] + sum(map(len, parts))
            parts.append(block.tokens)
    return Block(concatenate_batches(parts or [ours.tokens]), rows)


def _check_same_tokens(urls: Sequence[str], *runs: Any) -> None:
    """Raises ValueError for the first token whose id differs. runs: batches or samples of the same
    tokens, of two runs with these urls."""
    for token in np.flatnonzero(runs[0].token_ids != runs[1].token_ids):
        told = " but ".join(
            f"{each.token_ids[token]} in sample "
            f"{np.broadcast_to(each.sample_idx, each.token_ids.shape)[token]} of {url}"
            for url, each in zip(urls, runs, strict=True)
        )
        told = f"the token at position {runs[0].position[token]} of the same row is {told}"
        raise ValueError(without_secrets(told))


def _joined_hooks(every: Sequence[ByHook[Any]]) -> ByHook[Any]:
    """The values of several runs by hook. Raises ValueError for a hook that two have."""
    joined = ByHook[Any]({})
    for of_run in every:
        for hook in filter(joined.__contains__, of_run):
            raise ValueError(f"hook {hook!r} is in more than one of the runs")
        joined.update(of_run)
        joined.aliases.update(of_run.aliases)
    return joined


def _joined(every: Sequence[Any]) -> Any:
    """Batches or samples of several runs as one, with the hooks of all."""
    return replace(every[0], activations=_joined_hooks([each.activations for each in every]))


def _at_positions(sample: SampleActivations, position: np.ndarray) -> SampleActivations:
    """The tokens of a sample that are at these positions."""
    rows = np.isin(sample.position, position)
    kept: dict[str, Any] = {
        n: v[rows] for n, v in vars(sample).items() if isinstance(v, np.ndarray)
    }
    return replace(sample, activations=sample.activations.map(itemgetter(rows)), **kept)


def _rows(run: "ActivationDataset", number: str) -> pyarrow.Table:
    """The row of every sample that has one, as JSON, which includes the piece and start of a piece
    of a document, and in column `number` the sample's number. Raises ValueError where two samples
    come from the same row."""
    numbers = dict[str, int]()
    for n, row in enumerate(run.shards.columns(["row"])["row"]):
        if row is not None and numbers.setdefault(json.dumps(row, sort_keys=True), n) != n:
            url = without_secrets(run.url)
            raise ValueError(f"{url}: sample {n} has the row of another sample")
    schema = pyarrow.schema({"row": pyarrow.string(), number: pyarrow.int64()})
    return pyarrow.table([[*numbers], [*numbers.values()]], schema=schema)
