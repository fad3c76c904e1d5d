"""Runs over the same data that are read as one: side by side (`paired`), or joined (`join`).

Two samples are the same if they come from the same row of the data set. Two tokens are the same if
their samples are, and they have the same position in them. Rows of different data sets may have the
same names, so runs whose metadata records different data sets are rejected with ValueError.
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
    Read,
    ShardTokens,
    TokenSource,
    as_mask,
    default_buffer,
)
from activation_extraction.dataset.windows import Chunk
from activation_extraction.store.resume import shown
from activation_extraction.store.statistics import HookStatistics

if TYPE_CHECKING:  # dataset.py imports this module
    from activation_extraction.dataset.dataset import ActivationDataset


class AlignedRuns:
    """Several runs over the same data, reduced to the tokens that all of the runs store.

    The length of the object is the number of samples that all runs have.

    Args:
        *runs: Datasets of the runs.

    Attributes:
        runs: Datasets of the runs, in the order of the arguments.
        unpaired_samples: For each run, the number of its samples that at least one other run lacks.

    Raises:
        ValueError: The runs have no row in common, two samples of one run come from the same row,
            or the metadata shows that the samples come from other data or were made in another way.
    """

    def __init__(self, *runs: "ActivationDataset") -> None:
        self.runs = runs
        urls = without_secrets(" and ".join(run.url for run in runs))
        for run in runs[1:]:
            files = runs[0].data_files, run.data_files
            for name, value, other_value in runs[0].identity.other_samples(run.identity, *files):
                message = (
                    f"{runs[0].url} and {run.url}: their samples are not those of the same data: "
                    f"{name} is {shown(value, other_value)} in one and "
                    f"{shown(other_value, value)} in the other"
                )
                raise ValueError(without_secrets(message))
        tables = [_rows(run, str(number)) for number, run in enumerate(runs)]
        table = reduce(lambda one, other: one.join(other, "row", join_type="inner"), tables)
        # Numbers of the samples in each run, int64 (runs, samples), in the order of the first run.
        self._numbers = np.stack(table.sort_by("0").drop_columns("row").columns)
        if not len(self):
            raise ValueError(f"{urls}: no row of the data set has a sample in each of them")
        self.unpaired_samples = tuple(len(run) - len(self) for run in runs)
        tokens = [run.shards.columns(["tokens"])["tokens"] for run in runs]
        # Numbers of tokens of these samples in each run.
        common = [
            of_run[numbers].astype(int)
            for of_run, numbers in zip(tokens, self._numbers, strict=True)
        ]
        for run, left_out, in_all in zip(runs, self.unpaired_samples, common, strict=True):
            if left_out:
                samples = counted(left_out, "sample")
                left_out_tokens = counted(run.tokens - in_all.sum(), "token")
                log.warning(
                    "%s: %s (%s) left out: not all runs have them",
                    run.url,
                    samples,
                    left_out_tokens,
                )
        if any(
            run.identity.kept_tokens != runs[0].identity.kept_tokens or (counts != common[0]).any()
            for run, counts in zip(runs, common, strict=True)
        ):
            log.warning(
                "%s: store different tokens of the same samples; only those that all have are read",
                urls,
            )

    def __len__(self) -> int:
        return self._numbers.shape[1]

    def _batches(
        self, form: Any, hooks: Sequence[list[str]], options: BatchOptions
    ) -> Batches[Any]:
        """Returns batches of the tokens that all runs have.

        Args:
            form: Function that takes a list with a TokenBatch of each run, and returns the batch
                to yield.
            hooks: For each run, the canonical names of the hooks to read.
            options: Options of the batches. A mask in `where` has a boolean for each sample of the
                first run; a function in `where` is called with the `samples` of each run.

        Raises:
            ValueError: An option makes no sense for these runs.
        """
        runs = list(zip(self.runs, hooks, strict=True))
        row = sum(run.shards.row_bytes(names) for run, names in runs)
        local = all(run.shards.local for run in self.runs)
        buffer = options.buffer or default_buffer(options, sum(map(len, hooks)), row, local)
        unread = set(options.max_norm) if isinstance(options.max_norm, Mapping) else set()
        sources = list[TokenSource]()
        for run, names in runs:
            limits = options.max_norm
            aliases = run.hooks.aliases
            if isinstance(limits, Mapping):
                limits = {n: limit for n, limit in limits.items() if aliases.get(n, n) in names}
                unread -= limits.keys()
            where = options.where if callable(options.where) or not sources else None
            of_run = dict(hooks=names, buffer=buffer, max_norm=limits, where=where)
            sources.append(run.source(replace(options, **of_run)))
        for name in unread:
            raise ValueError(f"max_norm: hook {name!r} is not read")
        sources[0] = sources[0].of(self._numbers[0])
        return Batches(sources, form, partial(aligned_reader, sources, self._numbers))


class PairedRuns(AlignedRuns):
    """Two runs over the same data that are read side by side, as `paired` returns them.

    The length of the object is the number of samples that both runs have.

    Args:
        *runs: Datasets of the two runs.

    Attributes:
        runs: Datasets of the two runs, in the order in which `paired` was called with them.
        unpaired_samples: For each run, the number of its samples that the other run lacks.

    Raises:
        ValueError: The runs have no row in common, two samples of one run come from the same row,
            or the metadata shows that the samples come from other data or were made in another way.
    """

    def batches(self, size: int, hooks: Any = None, **options: Any) -> Batches[TokenPair]:
        """Returns an iterator over the tokens that both runs have, as pairs of batches.

        Row t of every array of a pair belongs to the same token. Tokens have the order of the first
        run, and only those are read that pass the filters in both runs.

        Args:
            size: Number of tokens in each batch of a pair; the last pair may have fewer.
            hooks: Names of the hooks to read in both runs, or globs. None for all hooks of both
                datasets. To read different hooks, give `paired` datasets that were opened with
                these hooks.
            **options: Any other field of BatchOptions. A mask in `where` has a boolean for each
                sample of the first run; a function in `where` is called with the `samples` of each
                run.

        Raises:
            ValueError: An argument makes no sense for these runs.
        """
        names = [run.hooks.chosen(run.url, hooks) for run in self.runs]
        return self._batches(TokenPair._make, names, BatchOptions(size, **options))


class JoinedRuns(AlignedRuns, Samples):
    """Runs of different hooks over the same data, as one sequence of samples.

    `ActivationDataset.join` returns it. The sequence contains the samples and tokens that all runs
    have, in the order of the first run.

    Args:
        *runs: Datasets of the runs.

    Attributes:
        hooks: Width of every hook of all runs, by name; for a hook of codes, the number of
            features.
        dtypes: Dtype of every hook of all runs, by name.
        runs: Datasets of the runs, in the order of the arguments.
        unpaired_samples: For each run, the number of its samples that at least one other run lacks.

    Raises:
        ValueError: Two runs have a hook of the same name, or the runs cannot be aligned (see
            AlignedRuns).
    """

    def __init__(self, *runs: "ActivationDataset") -> None:
        self.hooks: ByHook[int] = _joined_hooks([run.hooks for run in runs])
        self.dtypes: ByHook[np.dtype] = _joined_hooks([run.dtypes for run in runs])
        super().__init__(*runs)

    @cached_property
    def statistics(self) -> ByHook[HookStatistics]:
        """Statistics by the name of the hook, over all tokens of the run that has the hook."""
        return _joined_hooks([run.statistics for run in self.runs])

    @cached_property
    def samples(self) -> pyarrow.Table:
        """The table of the samples that all runs have, with the columns of the first run.

        Its column `tokens` counts the tokens that the first run stores.
        """
        return self.runs[0].samples.take(self._numbers[0])

    def join(self, other: Any) -> "JoinedRuns":
        """Returns a dataset that also has the hooks of another run. See `ActivationDataset.join`.

        Args:
            other: An ActivationDataset, or the URL of a run.
        """
        return JoinedRuns(*self.runs, self.runs[0].opened(other))

    def batches(self, size: int, hooks: Any = None, **options: Any) -> Batches[TokenBatch]:
        """Returns an iterator over the tokens that all runs have, with the hooks of all runs.

        Only tokens are read that pass the filters in all runs. All arrays of a batch except for the
        activations come from the first run.

        Args:
            size: Number of tokens in a batch; the last batch may have fewer.
            hooks: Names of the hooks to read, or globs. None for all hooks.
            **options: Any other field of BatchOptions. A mask in `where` has a boolean for each
                sample of this object; a function in `where` is called with its `samples`.

        Raises:
            ValueError: An argument makes no sense for these runs.
        """
        names = self.hooks.chosen("the joined runs", hooks)
        of_runs = [[name for name in names if name in run.hooks] for run in self.runs]
        batch_options = BatchOptions(size, **options)
        if (where := batch_options.where) is not None:
            mask = as_mask(where(self.samples) if callable(where) else where, len(self))
            of_first = np.isin(np.arange(len(self.runs[0])), self._numbers[0][mask])
            batch_options = replace(batch_options, where=of_first)
        return self._batches(_joined, of_runs, batch_options)

    def _sample(self, index: int) -> SampleActivations:
        """Returns a sample with the hooks of all runs, of the tokens that all runs have.

        Raises:
            ValueError: The runs have different token ids.
        """
        numbers = self._numbers[:, index].tolist()
        samples = [run[number] for run, number in zip(self.runs, numbers, strict=True)]
        position = reduce(np.intersect1d, (sample.position for sample in samples))
        first, *others = (_at_positions(sample, position) for sample in samples)
        for run, other in zip(self.runs[1:], others, strict=True):
            _check_same_tokens((self.runs[0].url, run.url), first, other)
        return _joined([first, *others])


def aligned_reader(sources: Sequence[TokenSource], numbers: np.ndarray) -> Read:
    """Returns a function that reads the tokens of a chunk that all runs have.

    If another run has pickles, tokens are aligned by whole shards of the first run, because every
    alignment decompresses all pickles that it needs.

    Args:
        sources: Sources of the runs. The source of the first run has a mask.
        numbers: Numbers of the same samples in each run, int64 (runs, samples), in the order of the
            first run.

    Returns:
        A function that takes a chunk of the first run, and returns a block for each run. Their rows
        are the tokens that pass the filters of all runs.
    """
    first, *others = sources
    numbers = numbers[:, np.asarray(first.mask)[numbers[0]]]
    whole = not all(source.shards.by_ranges for source in others)

    @lru_cache(int(whole))  # the chunks of a shard share the alignment of the whole shard
    def align(chunk: Chunk) -> tuple[ShardTokens, list[Block]]:
        ours = first.tokens([chunk])
        first_sample, last_sample = ours.samples[[0, -1]]
        begin, end = np.searchsorted(numbers[0], [first_sample, last_sample + 1])
        partners = [
            _partners(first, source, ours, numbers[[0, run], begin:end])
            for run, source in enumerate(others, 1)
        ]
        return ours, partners

    def read(chunk: Chunk) -> tuple[Block, ...]:
        aligned = first.whole(chunk.shard) if whole else chunk
        ours, partners = align(aligned)
        start = chunk.start - aligned.start
        stop = start + len(chunk)
        in_all_runs = np.all([partner.rows[start:stop] >= 0 for partner in partners], axis=0)
        rows = start + np.flatnonzero(in_all_runs)
        block = first.with_activations(ours, rows)
        small = first.are_small(block)
        blocks = block, *(Block(tokens, at[rows]) for tokens, at in partners)
        return tuple(Block(tokens, at[small]) for tokens, at in blocks)

    return read


def _partners(one: TokenSource, other: TokenSource, ours: ShardTokens, pairs: np.ndarray) -> Block:
    """Finds tokens of the first run in another run, and reads them there.

    Args:
        one: Source of the first run.
        other: Source of the other run.
        ours: Tokens of the first run.
        pairs: Numbers of their samples in the first run and in the other run, int64 (2, samples).

    Returns:
        A block of the other run with a row for each token of `ours`. A row is -1 if the other run
        lacks the token, or if the token does not pass the filters of both runs.

    Raises:
        ValueError: A token has another id in the other run.
    """
    of_one, of_other = pairs[:, np.argsort(pairs[1])]
    keys = ours.samples << 32 | ours.tokens.position
    rows = np.full(len(keys), -1)
    parts = list[TokenBatch]()
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
    """Raises ValueError for the first token whose id differs between two runs.

    Args:
        urls: URLs of the two runs.
        *runs: A TokenBatch or a SampleActivations of each of the two runs. Their tokens come from
            the same rows of the data set and have the same positions, one by one.
    """
    for token in np.flatnonzero(runs[0].token_ids != runs[1].token_ids):
        difference = " but ".join(
            f"{tokens.token_ids[token]} in sample "
            f"{np.broadcast_to(tokens.sample_idx, tokens.token_ids.shape)[token]} of {url}"
            for url, tokens in zip(urls, runs, strict=True)
        )
        position = runs[0].position[token]
        message = f"the token at position {position} of the same row is {difference}"
        raise ValueError(without_secrets(message))


def _joined_hooks(of_runs: Sequence[ByHook[Any]]) -> ByHook[Any]:
    """Returns the values by hook of several runs as one mapping, with the aliases of all hooks.

    Args:
        of_runs: Values by hook, for each run.

    Raises:
        ValueError: Two runs have a hook of the same name.
    """
    joined = ByHook[Any]({})
    for of_run in of_runs:
        for hook in filter(joined.__contains__, of_run):
            raise ValueError(f"hook {hook!r} is in more than one of the runs")
        joined.update(of_run)
        joined.aliases.update(of_run.aliases)
    return joined


def _joined(of_runs: Sequence[Any]) -> Any:
    """Returns one batch or sample with the hooks of all runs.

    Args:
        of_runs: A batch or a sample of each run, with the same tokens. All arrays except for the
            activations are taken from the first run's.
    """
    activations = _joined_hooks([tokens.activations for tokens in of_runs])
    return replace(of_runs[0], activations=activations)


def _at_positions(sample: SampleActivations, position: np.ndarray) -> SampleActivations:
    """Returns the part of a sample whose tokens are at the given positions.

    Args:
        sample: Sample to select tokens from.
        position: Positions to keep, int32 (n,).
    """
    rows = np.isin(sample.position, position)
    kept: dict[str, Any] = {
        name: values[rows]
        for name, values in vars(sample).items()
        if isinstance(values, np.ndarray)
    }
    return replace(sample, activations=sample.activations.map(itemgetter(rows)), **kept)


def _rows(run: "ActivationDataset", number: str) -> pyarrow.Table:
    """Returns the rows of the data set that the samples of a run come from.

    Args:
        run: Dataset of the run.
        number: Name to give to the column with the numbers of the samples.

    Returns:
        A table with a row for each sample whose `row` is stored. Its column "row" holds the `row`
        as JSON, which differs between the pieces of a document; its column `number` holds the
        number of the sample in the run.

    Raises:
        ValueError: Two samples come from the same row.
    """
    numbers = dict[str, int]()
    for sample, row in enumerate(run.shards.columns(["row"])["row"]):
        if row is None:
            continue
        if numbers.setdefault(json.dumps(row, sort_keys=True), sample) != sample:
            url = without_secrets(run.url)
            raise ValueError(f"{url}: sample {sample} has the row of another sample")
    schema = pyarrow.schema({"row": pyarrow.string(), number: pyarrow.int64()})
    return pyarrow.table([[*numbers], [*numbers.values()]], schema=schema)
