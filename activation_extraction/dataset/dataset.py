"""ActivationDataset: what a run has stored, for training on it. Needs neither JAX nor PyTorch.

It reads the JSON files of all machines and hosts once, at the start, and shards when they are
needed.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow

from activation_extraction.common.choices import ROLES
from activation_extraction.common.visible import counted
from activation_extraction.dataset.batches import Batches
from activation_extraction.dataset.features import feature_table
from activation_extraction.dataset.grain import TokenRecords
from activation_extraction.dataset.open_shards import OpenShards
from activation_extraction.dataset.paired import JoinedRuns, PairedRuns
from activation_extraction.dataset.token_batch import (
    ByHook,
    SampleActivations,
    Samples,
    TokenBatch,
    piece_of,
    recorded_aliases,
)
from activation_extraction.dataset.token_source import (
    BatchOptions,
    TokenSource,
    as_mask,
    default_buffer,
    floating_name,
)
from activation_extraction.store.run_folders import expected_names, read_run
from activation_extraction.store.run_log import METADATA, identity_of
from activation_extraction.store.statistics import HookStatistics


class ActivationDataset(Samples):
    """The samples of a run, in the order of its machines, hosts and shards. Within a shard their
    numbers ascend, but those of several shards may interleave.

    url: the run's output, a local folder or any URL that fsspec knows. hooks: names of the hooks to
    read, or globs, as --hook_names takes them; all of them by default. A run that is still going on
    is read as far as it is stored now. Mappings by hook list the canonical names, and
    find a hook by its other names, too.
    `metadata` is what the first host's metadata.json says, `identity` has the settings that it
    records, `shards` opens what is stored, and `data_files` has the bytes and the fingerprint of
    every file of the data by its name.

    Opening a run checks the checksums of all JSON files, and that every shard has its full size.
    Reading compares every MiB of a shard that it reads with its crc32c, and the tables of samples
    and statistics with their sha256.

    Raises ValueError when there is no such run or hook, or when folders of different runs are
    mixed; OSError when files are damaged, missing or cut short. Reading raises OSError for a shard
    in which these checks find damage, that has become shorter, or that has been replaced because
    the run was overwritten or repaired in the meantime.
    """

    def __init__(self, url: Any, hooks: Sequence[str] | None = None) -> None:
        root, folders = read_run(str(url))
        self.url = root.url
        every = [stored.metadata for stored in folders.values() if stored.metadata is not None]
        self.metadata: dict[str, Any] = every[0]
        self.identity = identity_of(self.metadata, METADATA)
        files = [file for each in reversed(every) for file in each.get("data_files", ())]
        self.data_files = {file["name"]: (file["bytes"], file["fingerprint"]) for file in files}
        self._going_on = {
            name for name, s in folders.items() if s.metadata and s.metadata["status"] != "complete"
        }
        self._strides = {n: s.identity.worker.stride for n, s in folders.items() if s.identity}
        self.complete: bool = set(folders) == set(expected_names(folders)) and not self._going_on
        described = self.metadata.get("hooks", ())
        aliases = recorded_aliases(described)
        recorded = ByHook({hook["name"]: hook for hook in described}, aliases)
        names = recorded.chosen(self.url, hooks)
        if not names:
            raise ValueError(f"{self.url}: no hook is asked for; it has {', '.join(recorded)}")
        commits = [(name, commit) for name in folders for commit in folders[name].in_order]
        in_shards = {hook["name"]: hook for _, commit in commits for hook in commit.hooks}
        stored = {
            name: self.identity.recorded_hook(in_shards.get(name, {}) | recorded[name])
            for name in names
        }
        with_samples = [each for each in commits if each[1].count]  # --repair may leave others
        self.shards = OpenShards(root.given, root.local, with_samples, ByHook(stored, aliases))

    def __len__(self) -> int:
        return self.shards.firsts[-1]

    def __repr__(self) -> str:
        return (
            f"ActivationDataset({self.url!r}: {counted(len(self), 'sample')}, "
            f"{counted(self.tokens, 'token')}, hooks {self.hooks}"
            f"{'' if self.complete else ', not complete'})"
        )

    @property
    def tokens(self) -> int:
        """The tokens of all samples."""
        return sum(commit.tokens for commit in self.shards.commits)

    @property
    def hooks(self) -> ByHook[int]:
        """The width of every hook that is read, by name; of codes, the number of features."""
        return self.shards.hooks.map(lambda hook: hook.width)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of activations: as they are stored, or float32 if they are encoded. It is that
        of the first hook if no hook that is read has activations."""
        every = self.shards.hooks.values()
        return min(every, key=lambda hook: not hook.activations).dtype

    @property
    def dtypes(self) -> ByHook[np.dtype]:
        """The dtype of every hook that is read, by name. Numbers of experts and tokens are int32;
        losses and the like are float32, and so are encoded activations."""
        return self.shards.hooks.map(lambda hook: hook.dtype)

    @property
    def statistics(self) -> ByHook[HookStatistics]:
        """Statistics over all that is stored, by hook. No shard is read for them.

        Those of numbers of experts and tokens are over no tokens, and those of losses leave out the
        tokens that have none. Statistics of every dimension are read from the small files beside
        the shards when they are first asked for.
        """
        return self.shards.statistics

    @property
    def samples(self) -> pyarrow.Table:
        """A table of all samples, in their order: sample_idx, tokens (how many are stored), doc_id,
        row, cut and text_preview, as in SampleActivations, and each column that the run kept, under
        its own name. No activation is read for it.

        Values of several types become texts. `samples.to_pandas()` makes a frame of it. Raises
        OSError for a table that is damaged.
        """
        return self.shards.samples

    @property
    def tokenizer_path(self) -> str:
        """The model or adapter whose tokenizer made the token ids: the absolute path of its folder,
        its URL or its hub name. It is the model if the data set had token ids."""
        try:
            model = self.metadata["configuration"]["model_path"]
            return str(self.metadata.get("tokenizer_path", model))
        except KeyError:
            raise ValueError(f"{self.url}: its metadata does not name the model") from None

    def document(self, index: int) -> SampleActivations:
        """Returns the whole document that sample `index` belongs to, every token of it once.

        Where a run splits long documents, a sample is a piece of one. The pieces are joined, and
        `position` counts from the start of the document; sample_idx, row and the like are those of
        the first piece. Any other sample is returned as it is. A run that ended within a document,
        because of --max_samples, has the start of it.

        Raises ValueError where pieces are missing, or may be because the run still goes on.
        """
        number = self.number(index)
        facts = self.shards.facts(number)
        folder, _ = self.shards.shards[self.shards.shard_of(number)]
        if (found := piece_of(facts.row)) is None:
            return self[index]
        piece, _, document = found
        # The pieces of a document have consecutive numbers, but may lie in any shards of the host.
        stride = self._strides[folder]
        starts = list[int]()
        numbers = list[int]()
        first = facts.sample_idx - piece * stride
        while (place := self.shards.find(folder, first + len(numbers) * stride)) is not None:
            found = piece_of(self.shards.facts(place).row)
            if found is None or (found[0], found[2]) != (len(numbers), document):
                break
            starts.append(found[1])
            numbers.append(place)
        if piece >= len(numbers):
            raise ValueError(
                f"sample {index}: is piece {piece} of its document, of which piece {len(numbers)} "
                "is missing"
            )
        if place is None and folder in self._going_on:
            raise ValueError(
                f"sample {index}: its document may have pieces that are not stored yet; the run "
                "goes on"
            )
        return self._joined(numbers, starts)

    def _sample(self, number: int) -> SampleActivations:
        return self._joined([number], [0])

    def _joined(self, numbers: Sequence[int], starts: Sequence[int]) -> SampleActivations:
        """The samples with these numbers, which are all pieces of a document, as one. starts: where
        in the document each begins."""
        facts, last = self.shards.facts(numbers[0]), self.shards.facts(numbers[-1])
        source = self._all_tokens
        chunks = [chunk for number in numbers for (chunk,) in source.by_shard(np.array([number]))]
        tokens = source.whole_tokens(chunks)
        begins = np.repeat(np.array(starts, np.int32), [len(chunk) for chunk in chunks])
        return SampleActivations(
            **vars(replace(facts, cut=last.cut)),
            activations=tokens.activations,
            token_ids=tokens.token_ids,
            position=begins + tokens.position,
            **tokens.labels,
        )

    @cached_property
    def _all_tokens(self) -> TokenSource:
        return self.source(BatchOptions(1))

    def batches(self, size: int, hooks: Any = None, **options: Any) -> Batches[TokenBatch]:
        """Returns all tokens, in batches of `size`: one pass over the data.

        BatchOptions describes all arguments. The order of shuffled batches depends on how the
        shards were cut. `paired` reads two runs side by side. Raises ValueError for arguments that
        make no sense, and for a choice of samples or roles that is empty.
        """
        source = self.source(BatchOptions(size, hooks, **options))
        return Batches((source,), itemgetter(0), source.reader)

    def source(self, options: BatchOptions) -> TokenSource:
        """Returns what batches with these options are made of."""
        names = self.hooks.chosen(self.url, options.hooks)
        mask, where = None, options.where
        if where is not None:
            mask = as_mask(where(self.samples) if callable(where) else where, len(self))
            if len(mask) and not mask.any():
                raise ValueError(f"where: chooses none of {counted(len(mask), 'sample')}")
        complete = replace(
            options,
            hooks=tuple(names),
            max_norm=self._limits(names, options.max_norm),
            buffer=options.buffer
            or default_buffer(options, len(names), self.shards.row_bytes(names), self.shards.local),
            dtype=floating_name(options.dtype),
            roles=None if options.roles is None else self._known_roles(options.roles),
            where=None if mask is None else hashlib.sha256(np.packbits(mask).tobytes()).hexdigest(),
            columns=self._known_columns(options.columns),
        )
        return TokenSource(self.shards, complete, mask)

    def _limits(self, names: Sequence[str], max_norm: Any) -> dict[str, float]:
        """Returns the largest norm at each hook that has a limit. Raises ValueError."""
        floats = [name for name in names if self.shards.hooks[name].activations]
        limits = max_norm if isinstance(max_norm, Mapping) else dict.fromkeys(floats, max_norm)
        limits = {self.hooks.aliases.get(name, name): limit for name, limit in limits.items()}
        for name in limits:
            if name not in floats:
                raise ValueError(
                    f"max_norm: hook {name!r} is not read or has no activations, and no norm; "
                    f"{', '.join(floats) or 'none'} can have a limit"
                )
        return {name: float(limit) for name, limit in limits.items() if limit is not None}

    def join(self, other: Any) -> JoinedRuns:
        """Returns a dataset with the hooks of this run and of another run over the same data.

        So a layer can be added without computing the others again. other: an ActivationDataset, or
        its url. It has the samples and tokens that both runs have, found as `paired` does. Raises
        ValueError for a hook that both have.
        """
        return JoinedRuns(self, self.opened(other))

    @classmethod
    def opened(cls, run: Any) -> "ActivationDataset":
        """Returns the dataset of a run, which may be given as one, or as its url."""
        return run if isinstance(run, cls) else cls(run)

    def _known_roles(self, roles: Sequence[str]) -> tuple[str, ...]:
        """The roles that are asked for, in the order of ROLES. Raises ValueError."""
        asked = [roles] if isinstance(roles, str) else list(roles)
        stored = self.identity.text.roles or ROLES
        has = "has no roles; only runs of conversations do"
        if not len(self) or "role" in self.shards.get(0).tokens(0, 0):
            has = f"has tokens of {', '.join(stored)}"
            if asked and set(asked) <= {*stored}:
                return tuple(role for role in ROLES if role in asked)
        raise ValueError(f"roles: {', '.join(asked) or 'none'} asked for; {self.url} {has}")

    def _known_columns(self, columns: Sequence[str]) -> tuple[str, ...]:
        """The columns that are asked for. Raises ValueError for one that the samples lack."""
        asked = (columns,) if isinstance(columns, str) else tuple(columns)
        known = self.shards.table(0).column_names if asked and len(self) else asked
        for name in asked:
            if name not in known:
                raise ValueError(f"columns: samples have no {name!r}; they have {', '.join(known)}")
        return asked

    def grain(self, hooks: Any = None, tokens: int = 1) -> TokenRecords:
        """Returns all tokens as a random-access source for a DataLoader or a MapDataset of grain.

        A record is a dict of NumPy arrays: the activations of each hook, (tokens, width), and
        token_ids, sample_idx, position and, where the run has them, role and turn, (tokens,), as in
        a TokenBatch. With tokens=1 they have no axis of tokens, and `grain.transforms.Batch(1024)`
        gives what a batch of 1024 tokens has. Otherwise a record has so many consecutive tokens of
        a shard, but the last one of each shard may have fewer: give `Batch` a `batch_fn` that
        concatenates. hooks: those to read, as for `batches`.

        A record of hundreds of tokens takes little longer than one of a single token. In a bucket,
        each takes a request of at least a MiB for every hook, and in a random order it shares none
        with others: use thousands of tokens there, or `batches`.

        Raises ValueError for a hook that the run lacks, or that holds codes, for fewer tokens than
        1, and for a run of pickles: grain's threads would each unpack a whole one for every record.
        """
        if not self.shards.by_ranges:
            raise ValueError(f"{self.url}: has pickles; grain needs --shard_format safetensors")
        source = self.source(BatchOptions(1, hooks))
        for name in source.options.hooks:
            if not self.shards.hooks[name].is_array:
                raise ValueError(f"{name} holds codes, which have no array; read `batches`")
        return TokenRecords(source, tokens)

    def features(self, hook: str, contexts: int = 10, around: int = 16) -> pyarrow.Table:
        """Returns a table with a row for each feature of the codes at a hook: one pass over them.

        feature: its number. tokens: on how many it is active; frequency: the share of all tokens.
        mean, maximum: of its values where it is active, null where it never is. contexts: the
        tokens with its largest values, descending; of each, the value, sample_idx, position, the
        token_ids of it and of up to `around` tokens of its sample on each side, `token`, which of
        these it is, and their text, null where the tokenizer (tokenizer.json, or vocab.json with
        merges.txt) is neither in the folder of `tokenizer_path` nor in the hub's cache here.

        `pyarrow.parquet.write_table(table, "features.parquet")` keeps it. Raises ValueError for a
        hook that has no codes; reading raises OSError, as `batches` does.
        """
        return feature_table(self, hook, contexts, around)


def paired(a: Any, b: Any) -> PairedRuns:
    """Returns two runs over the same data as one, such as those of a base and a chat model.

    a, b: ActivationDatasets, or what these take as `url`. Tokens are paired that come from the same
    row of the data set, as in the `row` of the samples, and have the same position, however the
    runs were cut, ordered and stored; only rows of a hub data set that are counted within a share
    are the same on equally many machines and hosts alone. Tokens that one of the runs lacks are
    left out; the log says so once, and `unpaired_samples` counts samples.

    The order is that of `a`; `b` is read wherever its tokens lie. If `b` stores pickles, those that
    have samples of a shard of `a` are all unpacked for it, and up to six shards come on top of the
    buffer. If its order is quite another one, this takes long.

    Raises ValueError when there is no such run, when a run has two samples of a row, when no row is
    in both, or when the metadata shows that the samples come from other data or were made in
    another way. Reading raises ValueError for a token whose id differs in the two runs.
    """
    return PairedRuns(*map(ActivationDataset.opened, (a, b)))
