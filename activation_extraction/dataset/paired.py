"""Runs over the same data, read as one: `paired` gives two side by side, `join` adds up hooks.

Samples are the same that come from the same row of the data set. Other data may have rows of the
same names, so runs that record other data are refused.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from operator import itemgetter
from typing import Any, NoReturn, Protocol, TypeVar

import numpy as np
import pyarrow

from activation_extraction.common.log import log
from activation_extraction.common.visible import counted, without_secrets
from activation_extraction.dataset.alignment import Alignment, different_tokens
from activation_extraction.dataset.batches import Batches
from activation_extraction.dataset.open_shards import OpenShards
from activation_extraction.dataset.token_batch import (
    ByHook,
    SampleActivations,
    Samples,
    TokenBatch,
    TokenPair,
)
from activation_extraction.dataset.token_source import (
    BatchOptions,
    TokenSource,
    as_mask,
    default_buffer,
)
from activation_extraction.store.identity import Identity
from activation_extraction.store.resume import shown
from activation_extraction.store.statistics import HookStatistics

T = TypeVar("T", TokenBatch, TokenPair)


class Run(Protocol):
    """The part of an ActivationDataset that joined and paired runs and features.py need."""

    url: str
    metadata: dict[str, Any]
    shards: OpenShards
    identity: Identity
    data_files: dict[str, tuple[int, str]]

    @property
    def tokens(self) -> int: ...
    @property
    def hooks(self) -> ByHook[int]: ...
    @property
    def dtypes(self) -> ByHook[np.dtype]: ...
    @property
    def statistics(self) -> ByHook[HookStatistics]: ...
    @property
    def samples(self) -> pyarrow.Table: ...
    @property
    def tokenizer_path(self) -> str: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> SampleActivations: ...
    def source(self, options: BatchOptions, /) -> TokenSource: ...
    def batches(self, size: int, hooks: Any = None, /) -> Batches[TokenBatch]: ...
    def opened(self, run: Any, /) -> "Run": ...


class AlignedRuns:
    """Several runs over the same data, of which the tokens that all have are read.

    runs: the datasets. unpaired_samples: how many samples each has that not all have. The length is
    the number of samples that all have.
    """

    def __init__(self, *runs: Run) -> None:
        self.runs = runs
        for run in runs[1:]:
            _refuse_other_data(runs[0], run)
        by_row = [_numbers_by_row(run) for run in runs]
        rows = [row for row in by_row[0] if all(row in each for each in by_row[1:])]
        if not rows:
            urls = " and ".join(without_secrets(run.url) for run in runs)
            raise ValueError(f"{urls}: no row of the data set has a sample in each of them")
        self._numbers = np.array([[each[row] for row in rows] for each in by_row])
        self.unpaired_samples = tuple(len(run) - len(self) for run in runs)
        tokens = [run.shards.columns(["tokens"])["tokens"] for run in runs]
        common = [each[row].astype(int) for each, row in zip(tokens, self._numbers, strict=True)]
        for run, left_out, in_all in zip(runs, self.unpaired_samples, common, strict=True):
            if left_out:
                what = counted(left_out, "sample"), counted(run.tokens - in_all.sum(), "token")
                log.warning("%s: %s (%s) left out: not all runs have them", run.url, *what)
        if any(
            run.identity.kept_tokens != runs[0].identity.kept_tokens or (each != common[0]).any()
            for run, each in zip(runs, common, strict=True)
        ):
            log.warning(
                "%s: store different tokens of the same samples; only those that all have are read",
                " and ".join(run.url for run in runs),
            )

    def __len__(self) -> int:
        return self._numbers.shape[1]

    def grain(self, *_: Any, **__: Any) -> NoReturn:
        """Raises ValueError: only a single run is a random-access source, since which tokens all
        runs have, and how many, is found while they are read."""
        urls = " and ".join(without_secrets(run.url) for run in self.runs)
        raise ValueError(f"{urls}: are read as one only in batches(); one run alone has grain()")

    def _batches(
        self,
        form: Callable[[Sequence[TokenBatch]], T],
        hooks: Sequence[Sequence[str]],
        options: BatchOptions,
    ) -> Batches[T]:
        """Batches of the tokens that all runs have: what `form` makes of a batch of each run.

        hooks: the names of those to read, of each run. A mask in `where` is over the samples of the
        first run; a function gets the table of each. Raises ValueError.
        """
        runs = list(zip(self.runs, hooks, strict=True))
        row = sum(run.shards.row_bytes(names) for run, names in runs)
        local = all(run.shards.local for run in self.runs)
        buffer = options.buffer or default_buffer(options, sum(map(len, hooks)), row, local)
        options = replace(options, buffer=buffer)
        unread = set(options.max_norm) if isinstance(options.max_norm, Mapping) else set()
        sources: list[TokenSource] = []
        for run, names in runs:
            limits = options.max_norm
            if isinstance(limits, Mapping):
                aliases = run.hooks.aliases
                limits = {n: limit for n, limit in limits.items() if aliases.get(n, n) in names}
                unread -= limits.keys()
            where = options.where if callable(options.where) or not sources else None
            sources.append(run.source(replace(options, hooks=names, max_norm=limits, where=where)))
        for name in unread:
            raise ValueError(f"max_norm: hook {name!r} is not read")
        sources[0] = sources[0].of(self._numbers[0])
        return Batches(sources, form, Alignment(sources, self._numbers).reader)


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

    def __init__(self, *runs: Run) -> None:
        self.hooks: ByHook[int] = joined_hooks([run.hooks for run in runs])
        self.dtypes: ByHook[np.dtype] = joined_hooks([run.dtypes for run in runs])
        super().__init__(*runs)

    @cached_property
    def statistics(self) -> ByHook[HookStatistics]:
        """Statistics by hook, over all that its own run has stored."""
        return joined_hooks([run.statistics for run in self.runs])

    @cached_property
    def samples(self) -> pyarrow.Table:
        """The table of the samples, as the first run has it: `tokens` counts those that it has."""
        return self.runs[0].samples.take(self._numbers[0])

    def join(self, other: Any) -> "JoinedRuns":
        """Returns the same with the hooks of another run, too. See `ActivationDataset.join`."""
        return JoinedRuns(*self.runs, self.runs[0].opened(other))

    def _sample(self, index: int) -> SampleActivations:
        """Raises ValueError where the runs have different token ids."""
        numbers = map(int, self._numbers[:, index])
        samples = [run[number] for run, number in zip(self.runs, numbers, strict=True)]
        position = reduce(np.intersect1d, (sample.position for sample in samples))
        cut = [_at_positions(sample, position) for sample in samples]
        for each, run in zip(cut, self.runs, strict=True):
            if (each.token_ids != cut[0].token_ids).any():
                raise different_tokens((self.runs[0].url, run.url), cut[0], each)
        return _joined(cut)

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
            of_first = np.zeros(len(self.runs[0]), bool)
            of_first[self._numbers[0]] = mask
            asked = replace(asked, where=of_first)
        return self._batches(_joined, of_runs, asked)


def joined_hooks(every: Sequence[ByHook[Any]]) -> ByHook[Any]:
    """Returns the values of several runs by hook. Raises ValueError for a hook that two have."""
    values: dict[str, Any] = {}
    for hook, value in (each for of_run in every for each in of_run.items()):
        if hook in values:
            raise ValueError(f"hook {hook!r} is in more than one of the runs")
        values[hook] = value
    return ByHook(values, {a: hook for each in every for a, hook in each.aliases.items()})


def _joined(every: Sequence[Any]) -> Any:
    """Batches or samples of several runs as one, with the hooks of all."""
    return replace(every[0], activations=joined_hooks([each.activations for each in every]))


def _at_positions(sample: SampleActivations, position: np.ndarray) -> SampleActivations:
    """The tokens of a sample that are at these positions."""
    rows = np.isin(sample.position, position)
    names = [n for n in ("token_ids", "position", "role", "turn") if getattr(sample, n) is not None]
    kept = {name: getattr(sample, name)[rows] for name in names}
    return replace(sample, activations=sample.activations.map(itemgetter(rows)), **kept)


def _numbers_by_row(run: Run) -> dict[str, int]:
    """The number of every sample that has a row, by its row as JSON, which includes the piece and
    start of a piece of a document. Raises ValueError where two samples come from the same row."""
    numbers: dict[str, int] = {}
    for number, row in enumerate(run.shards.columns(["row"])["row"]):
        if row is None:
            continue
        if numbers.setdefault(json.dumps(row, sort_keys=True), number) != number:
            url = without_secrets(run.url)
            raise ValueError(f"{url}: sample {number} has the row of another sample")
    return numbers


def _refuse_other_data(one: Run, other: Run) -> None:
    """Raises ValueError if both runs record where their samples come from, and that differs."""
    files = one.data_files, other.data_files
    for name, before, now in one.identity.other_samples(other.identity, *files):
        told = (
            f"{one.url} and {other.url}: their samples are not those of the same data: "
            f"{name} is {shown(before)} in one and {shown(now)} in the other"
        )
        raise ValueError(without_secrets(told))
