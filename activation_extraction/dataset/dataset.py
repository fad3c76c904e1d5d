"""ActivationDataset: reads the samples, tokens and activations of a stored run.

An ActivationDataset reads the JSON files of all machines and hosts once, when the run is opened. It
reads shards when they are needed (open_shards.py). token_source.py filters tokens, batches.py makes
batches of them, and paired.py reads several runs as one. None of these modules needs JAX or
PyTorch.
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
    """The samples of a stored run, as a sequence of SampleActivations, with the run's metadata.

    Samples have the order of the run's machines, hosts and shards. Within a shard, their numbers
    (`sample_idx`) ascend, but the numbers of several shards may interleave. If a run is still going
    on, the dataset contains the samples that were stored when it was opened. Mappings by hook list
    the canonical names of the hooks, and find a hook by its other names, too.

    Opening a run compares the checksums of all JSON files, and checks that every shard has its full
    size. Reading compares all bytes of a shard that it reads with a crc32c, and the tables of
    samples and statistics with their sha256.

    Args:
        url: The output of the run: a local folder, a bucket (gs://, s3:// or az://), a repository
            on the Hugging Face hub (hf://datasets/ORG/NAME or hf://datasets/ORG/NAME@REVISION), or
            any other URL that fsspec knows.
        hooks: Names of the hooks to read, or globs, as --hook_names takes them. None for all hooks.

    Attributes:
        url: URL of the run, without secrets. On the hub, it names the commit from which all files
            are read.
        metadata: Content of the first host's metadata.json.
        identity: Settings of the run that metadata.json records.
        data_files: A tuple for every file of the data set, by the name of the file: its size in
            bytes, and its fingerprint.
        complete: Whether the folders of all machines and hosts of the run exist, and every host has
            stored all of its samples.
        shards: Shards of the run that contain samples, which are opened when they are read.

    Raises:
        ValueError: There is no such run or hook, or the output mixes folders of different runs.
        OSError: A file is damaged, missing or cut short. All methods that read shards or tables
            raise OSError, too, if a file turns out to be damaged or shorter than its JSON says, or
            if it was replaced because the run was overwritten or repaired in the meantime.
    """

    def __init__(self, url: Any, hooks: Sequence[str] | None = None) -> None:
        root, folders = read_run(str(url))
        self.url = root.url
        all_metadata = [
            run_log.metadata for run_log in folders.values() if run_log.metadata is not None
        ]
        self.metadata: dict[str, Any] = all_metadata[0]
        self.identity = identity_of(self.metadata, METADATA)
        files = [
            file for metadata in reversed(all_metadata) for file in metadata.get("data_files", ())
        ]
        self.data_files = {file["name"]: (file["bytes"], file["fingerprint"]) for file in files}
        self._going_on = {
            name
            for name, run_log in folders.items()
            if run_log.metadata and run_log.metadata["status"] != "complete"
        }
        self._strides = {
            name: run_log.identity.worker.stride
            for name, run_log in folders.items()
            if run_log.identity
        }
        self.complete: bool = set(folders) == set(expected_names(folders)) and not self._going_on
        described = self.metadata.get("hooks", ())
        aliases = recorded_aliases(described)
        recorded = ByHook({hook["name"]: hook for hook in described}, aliases)
        names = recorded.chosen(self.url, hooks)
        if not names:
            raise ValueError(f"{self.url}: no hook is asked for; it has {', '.join(recorded)}")
        commits = [(name, commit) for name in folders for commit in folders[name].in_order]
        in_shards = {hook["name"]: hook for _, commit in commits for hook in commit.hooks}
        hook_values = {
            name: self.identity.recorded_hook(in_shards.get(name, {}) | recorded[name])
            for name in names
        }
        # --repair may leave shards without samples.
        with_samples = [(name, commit) for name, commit in commits if commit.count]
        self.shards = OpenShards(
            root.full_url, root.local, with_samples, ByHook(hook_values, aliases)
        )

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
        """The number of stored tokens of all samples."""
        return sum(commit.tokens for commit in self.shards.commits)

    @property
    def hooks(self) -> ByHook[int]:
        """The width of every hook that is read, by name; for codes, the number of features."""
        return self.shards.hooks.map(lambda hook: hook.width)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of activations: the stored dtype, or float32 if they are stored in float8.

        If no hook that is read has activations, it is the dtype of the first hook.
        """
        hooks = list(self.shards.hooks.values())
        with_activations = [hook for hook in hooks if hook.are_activations]
        return (with_activations or hooks)[0].dtype

    @property
    def dtypes(self) -> ByHook[np.dtype]:
        """The dtype of every hook that is read, by name.

        Activations have the stored dtype, or float32 if they are stored in float8. Losses,
        log-probabilities and codes are float32; numbers of experts and of tokens are int32.
        """
        return self.shards.hooks.map(lambda hook: hook.dtype)

    @property
    def statistics(self) -> ByHook[HookStatistics]:
        """Statistics of every hook that is read, over all stored tokens, by name.

        They come from the JSON files. Only the statistics of every dimension are read from the
        small files beside the shards, when they are first used. Numbers of experts and of tokens
        have no statistics: their number of tokens is 0. Statistics of losses leave out the tokens
        without a loss.
        """
        return self.shards.statistics

    @property
    def samples(self) -> pyarrow.Table:
        """The table of all samples, with a row for each of them, in their order.

        Its columns are `sample_idx`, `doc_id`, `row`, `cut` and `text_preview`, as in
        SampleActivations; `tokens`, the number of stored tokens; and every column of the data set
        that the run kept, under its name in the data set. If the values of a column have several
        types, they are converted to texts. No activations are read. `samples.to_pandas()` converts
        the table to a data frame.

        Raises:
            OSError: The table of a shard is damaged, or was replaced.
        """
        return self.shards.samples

    @property
    def tokenizer_path(self) -> str:
        """The model or adapter whose tokenizer made the token ids.

        It is the absolute path of a folder, a URL or a name on the hub. If the data set contained
        token ids instead of text, it is the model.

        Raises:
            ValueError: metadata.json does not name the model.
        """
        try:
            model = self.metadata["configuration"]["model_path"]
            return str(self.metadata.get("tokenizer_path", model))
        except KeyError:
            raise ValueError(f"{self.url}: its metadata does not name the model") from None

    def document(self, index: int) -> SampleActivations:
        """Returns the whole document that a sample belongs to.

        If the run splits long documents, a sample may be a piece of a document. All pieces of this
        document are then joined, so that the result has every stored token once. Any other sample
        is returned as it is. If the run ended within the document because of --max_samples, the
        result is the stored beginning of the document.

        Args:
            index: Index of the sample; a negative one counts from the end.

        Returns:
            The document. `cut` comes from the last piece, and all other facts come from the first
            piece. `position` counts from the start of the document.

        Raises:
            IndexError: There is no such sample.
            ValueError: Pieces are missing, or are perhaps not stored yet because the run goes on.
            OSError: A shard or a table is damaged.
        """
        number = self.number(index)
        facts = self.shards.facts(number)
        folder, _ = self.shards.shards[self.shards.shard_of(number)]
        location = piece_of(facts.row)
        if location is None:
            return self[index]
        piece, _, document = location
        # The pieces of a document have consecutive numbers, but may lie in any shards of the host.
        stride = self._strides[folder]
        starts = list[int]()
        numbers = list[int]()
        first = facts.sample_idx - piece * stride
        while (place := self.shards.find(folder, first + len(numbers) * stride)) is not None:
            location = piece_of(self.shards.facts(place).row)
            if location is None:
                break
            next_piece, start, document_of_piece = location
            if next_piece != len(numbers) or document_of_piece != document:
                break
            starts.append(start)
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
        """Returns the pieces of a document as one sample.

        Args:
            numbers: Numbers of the samples that are the pieces, in order.
            starts: Position in the document at which each piece begins.
        """
        facts = self.shards.facts(numbers[0])
        last = self.shards.facts(numbers[-1])
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
        """Returns an iterator over batches of the tokens of all samples, for one pass.

        The order of shuffled tokens depends on the seed and on how the run was divided into shards.
        `paired` reads two runs side by side.

        Args:
            size: Number of tokens in a batch; the last batch may have fewer.
            hooks: Names of the hooks to read, or globs. None for all hooks of the dataset.
            **options: Any other field of BatchOptions, whose docstring describes the fields.

        Raises:
            ValueError: An argument is invalid for the run, or `where` or `roles` selects nothing.
        """
        source = self.source(BatchOptions(size, hooks, **options))
        return Batches((source,), itemgetter(0), source.reader)

    def source(self, options: BatchOptions) -> TokenSource:
        """Returns the source of the tokens of batches.

        Args:
            options: Options of the batches, as a user gives them.

        Raises:
            ValueError: An option makes no sense for this run.
        """
        names = self.hooks.chosen(self.url, options.hooks)
        mask = None
        where = options.where
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
        """Returns the largest norm at each hook that has a limit, by the hook's canonical name.

        Args:
            names: Canonical names of the hooks to read.
            max_norm: Limit as in BatchOptions: a number for all activations, a mapping by hook, or
                None.

        Raises:
            ValueError: A hook with a limit is not read, or has no activations.
        """
        floats = [name for name in names if self.shards.hooks[name].are_activations]
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

        Joining adds layers to a run without computing its other layers again. The result has the
        samples and tokens that both runs have; the documentation of `paired` defines which tokens
        of two runs are the same.

        Args:
            other: An ActivationDataset, or the URL of a run.

        Raises:
            ValueError: Both runs have a hook of the same name, or they cannot be aligned for one of
                the reasons for which `paired` raises ValueError.
        """
        return JoinedRuns(self, self.opened(other))

    @classmethod
    def opened(cls, run: Any) -> "ActivationDataset":
        """Returns the dataset of a run.

        Args:
            run: An ActivationDataset, which is returned as it is, or the URL of a run.
        """
        return run if isinstance(run, cls) else cls(run)

    def _known_roles(self, roles: Sequence[str]) -> tuple[str, ...]:
        """Returns the roles that a user has chosen, in the order of ROLES.

        Args:
            roles: Names of roles, or a single name.

        Raises:
            ValueError: `roles` is empty, or the run stores no tokens of one of the roles.
        """
        names = [roles] if isinstance(roles, str) else list(roles)
        stored = self.identity.text.roles or ROLES
        has = "has no roles; only runs of conversations do"
        if not len(self) or "role" in self.shards.get(0).labels:
            has = f"has tokens of {', '.join(stored)}"
            if names and set(names) <= {*stored}:
                return tuple(role for role in ROLES if role in names)
        raise ValueError(f"roles: {', '.join(names) or 'none'} asked for; {self.url} {has}")

    def _known_columns(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Returns the names of the columns that a user has chosen.

        Args:
            columns: Names of columns of the table of samples, or a single name.

        Raises:
            ValueError: The table lacks a column.
        """
        names = (columns,) if isinstance(columns, str) else tuple(columns)
        if names and len(self):
            stored = self.shards.table(0).column_names
            for name in names:
                if name not in stored:
                    raise ValueError(
                        f"columns: samples have no {name!r}; they have {', '.join(stored)}"
                    )
        return names

    def grain(self, hooks: Any = None, tokens: int = 1) -> TokenRecords:
        """Returns all tokens as a random-access source for a DataLoader or a MapDataset of grain.

        A record is a dict of NumPy arrays, as in a TokenBatch: the activations of each hook by its
        name, (tokens, width), and `token_ids`, `sample_idx`, `position` and, if the run has them,
        `role` and `turn`, (tokens,).

        A record of hundreds of tokens takes little longer to read than a record of a single token.
        If the run is in a bucket, reading a record takes a request of at least a MiB for every
        hook, and records that are read in a random order share no requests. Records should
        therefore have thousands of tokens there; `batches` is faster.

        Args:
            hooks: Names of the hooks to read, or globs. None for all hooks of the dataset.
            tokens: Number of tokens in a record. With 1, the arrays have no axis of tokens, and
                `grain.transforms.Batch(1024)` makes batches of 1024 tokens. Otherwise the tokens of
                a record follow one another in a shard, and the last record of a shard may have
                fewer: give `Batch` a `batch_fn` that concatenates.

        Raises:
            ValueError: The dataset lacks a hook, a hook holds codes, `tokens` is less than 1, or
                the run stores pickles, which threads would decompress whole for every record.
        """
        if not self.shards.by_ranges:
            raise ValueError(f"{self.url}: has pickles; grain needs --shard_format safetensors")
        source = self.source(BatchOptions(1, hooks))
        for name in source.options.hooks:
            if not self.shards.hooks[name].is_array:
                raise ValueError(f"{name} holds codes, which have no array; read `batches`")
        return TokenRecords(source, tokens)

    def features(self, hook: str, contexts: int = 10, around: int = 16) -> pyarrow.Table:
        """Returns a table of the features of an autoencoder whose codes the run stores.

        The codes are read once; then the tokens around the strongest tokens are read.
        `pyarrow.parquet.write_table(table, "features.parquet")` stores the table.

        Args:
            hook: Name of the hook that holds the codes.
            contexts: Number of tokens to list for each feature.
            around: Number of tokens of the sample to show on each side of a listed token.

        Returns:
            A row for each feature, with these columns:

            feature: Number of the feature, from 0.
            tokens: Number of tokens on which the feature is active.
            frequency: Share of all tokens on which it is active.
            mean: Mean of its values on these tokens; null if there are no such tokens.
            maximum: Largest of its values on these tokens; null if there are no such tokens.
            contexts: A list of the tokens with its largest values, in descending order of value. A
                token is a struct of the `value`, `sample_idx` and `position`; the `token_ids` of
                the token and the tokens around it; `token`, the index in `token_ids` of the token
                itself; and `text`, the decoded `token_ids`. The text is null if the vocabulary
                (tokenizer.json, or vocab.json with merges.txt) is neither in the folder of
                `tokenizer_path` nor in the cache of the hub on this machine, or cannot be read, or
                if the package tokenizers is not installed.

        Raises:
            ValueError: The hook has no codes or is not read, `contexts` is less than 1, or `around`
                is less than 0.
            OSError: A shard is damaged.
        """
        return feature_table(self, hook, contexts, around)


def paired(a: Any, b: Any) -> PairedRuns:
    """Returns two runs over the same data, to be read side by side.

    The runs may be those of a base model and a chat model, for example.

    Tokens of the two runs are paired if their samples come from the same row of the data set (`row`
    of a sample) and the tokens have the same position in the sample. It does not matter how the
    runs were divided into shards, ordered and stored. There is one exception: if rows of a data set
    on the hub are counted within a share, they are the same only if both runs had the same number
    of machines and hosts. Tokens that one of the runs lacks are left out. The log warns of this
    once, and `unpaired_samples` of the result counts the samples that are left out.

    Pairs have the order of run `a`. The tokens of run `b` are read from wherever they lie, which is
    slow if the order of `b` is very different. If `b` stores pickles, reading a shard of `a`
    decompresses every pickle of `b` that contains any of its samples, and up to six shards are in
    memory beside the buffer.

    Args:
        a: The first run: an ActivationDataset, or the URL of a run.
        b: The second run: an ActivationDataset, or the URL of a run.

    Returns:
        The two runs. The method `batches` of the result reads pairs of batches.

    Raises:
        ValueError: There is no such run, a run has two samples of the same row, no row is in both
            runs, or the metadata shows that the samples come from other data or were made in
            another way. Reading raises ValueError if the ids of two paired tokens differ.
        OSError: A file is damaged, missing or cut short.
    """
    return PairedRuns(ActivationDataset.opened(a), ActivationDataset.opened(b))
