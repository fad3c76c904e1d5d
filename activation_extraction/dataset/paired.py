"""Runs over the same data, read as one: `paired` gives two side by side, `join` adds up hooks.

Which tokens the runs have in common is found in alignment.py, by the names of rows. Other data may
have the same names, so runs that record other data are refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from operator import itemgetter
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from activation_extraction.common.log import log
from activation_extraction.common.visible import counted, without_secrets
from activation_extraction.dataset.alignment import AlignedSource, samples_in_all
from activation_extraction.dataset.batches import Batches
from activation_extraction.dataset.options import BatchOptions, as_mask, default_buffer
from activation_extraction.dataset.sample_activations import SampleActivations, Samples
from activation_extraction.dataset.token_batch import ByHook, TokenBatch, TokenPair
from activation_extraction.dataset.token_source import TokenSource
from activation_extraction.store.commit import METADATA
from activation_extraction.store.metadata import identity_of
from activation_extraction.store.resume import shown
from activation_extraction.store.statistics import HookStatistics

if TYPE_CHECKING:
    import pyarrow

    from activation_extraction.dataset.dataset import ActivationDataset

T = TypeVar("T", TokenBatch, TokenPair)
# What decides the samples of a row and their tokens. The tokenizer's files are not among it: those
# of a base and a chat model differ, but give the same ids, which are compared one by one.
OF_SAMPLES = (
    *("data", "data_revision", "text_column", "messages_column", "ids_column", "chat_template"),
    *("special_tokens", "max_seq_length", "long_documents", "overlap"),
)
BLOCKS = "blocks "  # what the fingerprint of a local file begins with


def joined_hooks(every: Sequence[ByHook[Any]]) -> ByHook[Any]:
    """Returns the values of several runs by hook. Raises ValueError for a hook that two have."""
    values: dict[str, Any] = {}
    for hook, value in (each for of_run in every for each in of_run.items()):
        if hook in values:
            raise ValueError(f"hook {hook!r} is in more than one of the runs")
        values[hook] = value
    return ByHook(values, {a: hook for each in every for a, hook in each.aliases.items()})


def _joined(batches: Sequence[Any]) -> Any:
    """Batches or samples of several runs as one, with the hooks of all."""
    return replace(batches[0], activations=joined_hooks([each.activations for each in batches]))


class AlignedRuns:
    """Several runs over the same data, of which the tokens that all have are read.

    runs: the datasets. unpaired_samples: how many samples each has that not all have. The length is
    the number of samples that all have.
    """

    def __init__(self, *runs: "ActivationDataset") -> None:
        self.runs = runs
        for run in runs[1:]:
            _refuse_other_data(runs[0], run)
        self._numbers, tokens = samples_in_all([run.shards for run in runs])
        self.unpaired_samples = tuple(len(run) - len(self) for run in runs)
        common = [of_run[row] for of_run, row in zip(tokens, self._numbers, strict=True)]
        for run, left_out, in_all in zip(runs, self.unpaired_samples, common, strict=True):
            if left_out:
                what = counted(left_out, "sample"), counted(run.tokens - in_all.sum(), "token")
                log.warning("%s: %s (%s) left out: not all runs have them", run.url, *what)
        if len(set(map(_choice, runs))) > 1 or any((each != common[0]).any() for each in common):
            log.warning(
                "%s: store different tokens of the same samples; only those that all have are read",
                " and ".join(run.url for run in runs),
            )

    def __len__(self) -> int:
        return self._numbers.shape[1]

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
        options = replace(
            options, buffer=options.buffer or default_buffer(options.size, row, local)
        )
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
        return Batches(AlignedSource(tuple(sources), form, self._numbers))


class PairedRuns(AlignedRuns):
    """Two runs side by side; `paired` makes it."""

    def batches(self, size: int, hooks: Any = None, **options: Any) -> Batches[TokenPair]:
        """Returns all tokens that both runs have, as pairs of batches of `size`, a batch of each
        run: row t of every array belongs to the same token.

        The arguments are those of `ActivationDataset.batches`, and the order is that of the first
        run. A token comes only if it passes the filters in both runs. hooks: names for both runs;
        to read other hooks of each, give datasets of these to `paired`. where: a function is called
        with the table of each run; a mask is over the samples of the first.

        Raises ValueError for arguments that make no sense.
        """
        names = [run.hooks.chosen(run.url, hooks) for run in self.runs]
        return self._batches(TokenPair._make, names, BatchOptions(size, **options))


class JoinedRuns(AlignedRuns, Samples):
    """Runs of different hooks over the same data, as one dataset; `ActivationDataset.join` makes
    it. It has the samples and tokens that all runs have, in the order of the first run."""

    def __init__(self, *runs: "ActivationDataset") -> None:
        joined_hooks([run.hooks for run in runs])
        super().__init__(*runs)

    @property
    def hooks(self) -> ByHook[int]:
        """The width of every hook, by name."""
        return joined_hooks([run.hooks for run in self.runs])

    @property
    def dtypes(self) -> ByHook[np.dtype]:
        """The dtype of every hook, by name."""
        return joined_hooks([run.dtypes for run in self.runs])

    @cached_property
    def statistics(self) -> ByHook[HookStatistics]:
        """Statistics by hook, over all that its own run has stored."""
        return joined_hooks([run.statistics for run in self.runs])

    @cached_property
    def samples(self) -> "pyarrow.Table":
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
            if (different := np.flatnonzero(each.token_ids != cut[0].token_ids)).size:
                raise ValueError(
                    f"sample {cut[0].sample_idx} of {self.runs[0].url} and sample "
                    f"{each.sample_idx} of {run.url} have different tokens at position "
                    f"{each.position[different[0]]}"
                )
        return _joined(cut)

    def batches(self, size: int, hooks: Any = None, **options: Any) -> Batches[TokenBatch]:
        """Returns all tokens, in batches of `size`, with the hooks of all runs.

        The arguments are those of `ActivationDataset.batches`; what a batch has beside activations
        is what the first run has. A token comes only if it passes the filters in all runs.

        Raises ValueError for arguments that make no sense.
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


def _at_positions(sample: SampleActivations, position: np.ndarray) -> SampleActivations:
    """The tokens of a sample that are at these positions."""
    rows = np.isin(sample.position, position)
    names = [n for n in ("token_ids", "position", "role", "turn") if getattr(sample, n) is not None]
    kept = {name: getattr(sample, name)[rows] for name in names}
    return replace(sample, activations=sample.activations.map(itemgetter(rows)), **kept)


def _refuse_other_data(one: "ActivationDataset", other: "ActivationDataset") -> None:
    """Raises ValueError if both runs record where their samples come from, and that differs."""
    a, b = (identity_of(run.metadata, METADATA) for run in (one, other))
    if not (a.data and b.data):  # the run of a program that stores activations of its own
        return
    found = [(name, getattr(a, name), getattr(b, name)) for name in OF_SAMPLES]
    for name in one.data_files.keys() & other.data_files.keys():
        (size, known), (other_size, other_known) = one.data_files[name], other.data_files[name]
        found.append((f"the size of data file {name}", size, other_size))
        # That of a file at a URL is its store's, and says nothing about a copy elsewhere.
        if known.startswith(BLOCKS) and other_known.startswith(BLOCKS):
            found.append((f"the content of data file {name}", known, other_known))
    for name, before, now in found:
        if before != now:
            told = (
                f"{one.url} and {other.url}: their samples are not those of the same data: "
                f"{name} is {shown(before)} in one and {shown(now)} in the other"
            )
            raise ValueError(without_secrets(told))


def _choice(run: "ActivationDataset") -> tuple[Any, ...]:
    """What decides which tokens of its samples a run stores."""
    stored = identity_of(run.metadata, METADATA)
    rules = stored.positions, stored.drop_token_ids, stored.roles, stored.mask_column
    return *map(str, rules), stored.overlap
