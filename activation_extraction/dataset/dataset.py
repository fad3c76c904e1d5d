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

    `dataset[0]` reads the first sample, `dataset[0]["blocks.4.hook_resid_post"]` contains its
    activations at a hook, `len(dataset)` is the number of samples, and `dataset.batches(1024)`
    iterates over the tokens of all samples in batches.

    Samples have the order of the run's machines, hosts and shards. Within a shard, their numbers
    (`sample_idx`) ascend, but the numbers of several shards may interleave. If a run is still going
    on, the dataset contains the samples that were stored when the run was opened. Attributes that
    map hooks to values, such as `hooks`, `dtypes` and `statistics`, list the canonical names of the
    hooks, and also accept any other name of a hook as a key.

    Opening a run verifies the checksums of all JSON files, and checks that every shard has its full
    size. Reading a shard verifies the crc32c of the bytes that are read. Reading a table of samples
    or of statistics verifies its sha256.

    Args:
        url: Output folder of the run: a local path, a URL of a folder in a bucket (gs://, s3:// or
            az://), a repository on the Hugging Face hub (hf://datasets/ORG/NAME or
            hf://datasets/ORG/NAME@REVISION), or any other URL that fsspec supports.
        hooks: Names of the hooks to read, or globs that match names, such as
            ["blocks.*.hook_resid_post"]. None for all hooks that the run stores.

    Attributes:
        url: URL of the run, without secrets. The URL of a repository on the hub names the git
            commit from which all files are read.
        metadata: Content of metadata.json of the first host whose folder contains this file, a
            dict.
        identity: Settings and inputs that decide the content of the shards, as metadata.json
            records them (`store.identity.Identity`).
        data_files: Files of the data set: a dict from the name of a file to a tuple of its size in
            bytes and its fingerprint. Empty if metadata.json records no files.
        complete: Whether the folders of all machines and hosts of the run exist, and every host has
            stored all of its samples.
        shards: The shards of the run that contain samples (`dataset.open_shards.OpenShards`). A
            shard is opened when it is first read.

    Raises:
        ValueError: If there is no run at `url`, if a name or glob in `hooks` matches no hook of the
            run, or if the output folder contains folders of different runs.
        OSError: If a file is damaged, missing or cut short. All methods that read shards or tables
            raise OSError, too, if a file turns out to be damaged or shorter than the JSON file of
            its shard says, or if it was replaced because the run was overwritten or repaired in the
            meantime.
    """

    def __init__(self, url: Any, hooks: Sequence[str] | None = None) -> None:
        run_folder, log_by_folder = read_run(str(url))
        self.url = run_folder.url
        all_metadata = [
            run_log.metadata for run_log in log_by_folder.values() if run_log.metadata is not None
        ]
        self.metadata: dict[str, Any] = all_metadata[0]
        self.identity = identity_of(self.metadata, METADATA)
        data_file_records = [
            file_record
            for metadata in reversed(all_metadata)
            for file_record in metadata.get("data_files", ())
        ]
        self.data_files = {
            file_record["name"]: (file_record["bytes"], file_record["fingerprint"])
            for file_record in data_file_records
        }
        self._unfinished_folder_names = {
            folder_name
            for folder_name, run_log in log_by_folder.items()
            if run_log.metadata and run_log.metadata["status"] != "complete"
        }
        # For each host's folder, the difference in `sample_idx` between consecutive samples of the
        # host.
        self._stride_by_folder_name = {
            folder_name: run_log.identity.worker.stride
            for folder_name, run_log in log_by_folder.items()
            if run_log.identity
        }
        self.complete: bool = (
            set(log_by_folder) == set(expected_names(log_by_folder))
            and not self._unfinished_folder_names
        )
        hook_descriptions = self.metadata.get("hooks", ())
        canonical_name_by_alias = recorded_aliases(hook_descriptions)
        description_by_hook_name = ByHook(
            {hook_description["name"]: hook_description for hook_description in hook_descriptions},
            canonical_name_by_alias,
        )
        chosen_hook_names = description_by_hook_name.chosen(self.url, hooks)
        if not chosen_hook_names:
            raise ValueError(
                f"{self.url}: no hook is asked for; it has {', '.join(description_by_hook_name)}"
            )
        folder_names_and_commits = [
            (folder_name, commit)
            for folder_name in log_by_folder
            for commit in log_by_folder[folder_name].commits_in_order
        ]
        description_in_commit_by_hook_name = {
            hook_description["name"]: hook_description
            for _, commit in folder_names_and_commits
            for hook_description in commit.hooks
        }
        stored_hook_by_name = {
            hook_name: self.identity.recorded_hook(
                description_in_commit_by_hook_name.get(hook_name, {})
                | description_by_hook_name[hook_name]
            )
            for hook_name in chosen_hook_names
        }
        # Shards without samples, which --repair may leave in a run, cannot be read.
        folder_names_and_nonempty_commits = [
            (folder_name, commit)
            for folder_name, commit in folder_names_and_commits
            if commit.count
        ]
        self.shards = OpenShards(
            run_folder.full_url,
            run_folder.is_local,
            folder_names_and_nonempty_commits,
            ByHook(stored_hook_by_name, canonical_name_by_alias),
        )

    def __len__(self) -> int:
        """Returns the number of samples."""
        return self.shards.first_sample_indices_of_shards[-1]

    def __repr__(self) -> str:
        return (
            f"ActivationDataset({self.url!r}: {counted(len(self), 'sample')}, "
            f"{counted(self.tokens, 'token')}, hooks {self.hooks}"
            f"{'' if self.complete else ', not complete'})"
        )

    @property
    def tokens(self) -> int:
        """The number of stored tokens in all samples together."""
        return sum(commit.tokens for commit in self.shards.commits)

    @property
    def hooks(self) -> ByHook[int]:
        """The width of every hook that is read, by the name of the hook.

        The width is the number of values of a token. For a hook with codes, it is the number of
        features of the autoencoder.
        """
        return self.shards.stored_hook_by_name.map(lambda stored_hook: stored_hook.width)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the activations: the stored dtype, or float32 if they are stored in float8.

        If hooks have different dtypes, which is only possible in a run that another program stored
        with `ActivationStorage`, it is the dtype of the first hook with activations. `dtypes`
        contains the dtype of every hook.

        Hooks may also hold losses, entropies, log-probabilities, codes, token ids or the indices of
        the chosen experts. If all hooks that are read hold such values, this is the dtype of the
        first hook.
        """
        stored_hooks = list(self.shards.stored_hook_by_name.values())
        hooks_of_activations = [
            stored_hook for stored_hook in stored_hooks if stored_hook.values_are_activations
        ]
        return (hooks_of_activations or stored_hooks)[0].user_dtype

    @property
    def dtypes(self) -> ByHook[np.dtype]:
        """The dtype of every hook that is read, by the name of the hook.

        Activations have the stored dtype, or float32 if they are stored in float8. Losses,
        log-probabilities and codes have the dtype float32. Some hooks store the indices of the
        chosen experts, or token ids, instead of activations; these have the dtype int32.
        """
        return self.shards.stored_hook_by_name.map(lambda stored_hook: stored_hook.user_dtype)

    @property
    def statistics(self) -> ByHook[HookStatistics]:
        """Statistics of every hook that is read, over all stored tokens, by the name of the hook.

        Statistics over all dimensions come from the JSON files, which were read when the run was
        opened. Statistics of each dimension are read from a small file of each shard when they are
        first used. At hooks that store token ids or the indices of the chosen experts, no
        statistics are computed, so the number of tokens (`tokens`) is 0. At hooks with codes, only
        the field `codes` is filled. Statistics of losses leave out the tokens without a loss.
        """
        return self.shards.statistics

    @property
    def samples(self) -> pyarrow.Table:
        """The table of all samples, with a row for each sample, in the order of the dataset.

        The columns of the table are `sample_idx`, `doc_id`, `row`, `cut` and `text_preview`, as in
        SampleActivations; `tokens`, the number of stored tokens of a sample; and every column of
        the data set that the run kept, under its name in the data set. If the values of a column
        have several types, all values of the column are converted to texts. No activations are
        read. `samples.to_pandas()` converts the table to a data frame.

        Raises:
            OSError: If the table of a shard is damaged, or was replaced.
        """
        return self.shards.samples

    @property
    def tokenizer_path(self) -> str:
        """The path of the model or adapter whose tokenizer made the token ids.

        The path is the absolute path of a folder, a URL, or a name on the hub. If the data set
        contained token ids instead of text, it is the path of the model.

        Raises:
            ValueError: If metadata.json does not name the model.
        """
        try:
            model_path = self.metadata["configuration"]["model_path"]
            return str(self.metadata.get("tokenizer_path", model_path))
        except KeyError:
            raise ValueError(f"{self.url}: its metadata does not name the model") from None

    def document(self, index: int) -> SampleActivations:
        """Returns the whole document that a sample belongs to.

        If the run splits long documents, a sample may be a piece of a document. All pieces of this
        document are then joined, so that the result has every stored token once. Any other sample
        is returned as it is. If the run ended within the document because of --max_samples, the
        result is the stored beginning of the document.

        Args:
            index: Index of the sample in the dataset; a negative index counts from the end.

        Returns:
            The document, as a sample with all of its tokens. The attribute `cut` comes from the
            last piece; `sample_idx`, `row`, `doc_id`, `text_preview` and `columns` come from the
            first piece. `position` counts from the start of the document.

        Raises:
            IndexError: If there is no such sample.
            ValueError: If pieces of the document are missing, or are perhaps not stored yet because
                the run is still going on.
            OSError: If a shard or a table is damaged.
        """
        nonnegative_sample_index = self.number(index)
        sample_facts = self.shards.facts(nonnegative_sample_index)
        shard_index = self.shards.shard_of(nonnegative_sample_index)
        folder_name, _ = self.shards.folder_names_and_commits[shard_index]
        piece_number_start_and_row = piece_of(sample_facts.row)
        if piece_number_start_and_row is None:
            return self[index]
        piece_number, _, document_row_position = piece_number_start_and_row
        # The `sample_idx` of consecutive pieces of a document differ by `sample_idx_stride`. The
        # pieces may be in any shards of the host.
        sample_idx_stride = self._stride_by_folder_name[folder_name]
        start_token_indices_of_pieces = list[int]()
        sample_indices_of_pieces = list[int]()
        sample_idx_of_first_piece = sample_facts.sample_idx - piece_number * sample_idx_stride
        while (
            sample_index_of_next_piece := self.shards.find(
                folder_name,
                sample_idx_of_first_piece + len(sample_indices_of_pieces) * sample_idx_stride,
            )
        ) is not None:
            piece_number_start_and_row = piece_of(self.shards.facts(sample_index_of_next_piece).row)
            if piece_number_start_and_row is None:
                break
            (
                next_piece_number,
                start_token_index_of_next_piece,
                row_position_of_next_piece,
            ) = piece_number_start_and_row
            if (
                next_piece_number != len(sample_indices_of_pieces)
                or row_position_of_next_piece != document_row_position
            ):
                break
            start_token_indices_of_pieces.append(start_token_index_of_next_piece)
            sample_indices_of_pieces.append(sample_index_of_next_piece)
        if piece_number >= len(sample_indices_of_pieces):
            raise ValueError(
                f"sample {index}: is piece {piece_number} of its document, of which piece "
                f"{len(sample_indices_of_pieces)} is missing"
            )
        if sample_index_of_next_piece is None and folder_name in self._unfinished_folder_names:
            raise ValueError(
                f"sample {index}: its document may have pieces that are not stored yet; the run "
                "goes on"
            )
        return self._joined(sample_indices_of_pieces, start_token_indices_of_pieces)

    def _sample(self, index: int) -> SampleActivations:
        return self._joined([index], [0])

    def _joined(
        self,
        sample_indices_of_pieces: Sequence[int],
        start_token_indices_of_pieces: Sequence[int],
    ) -> SampleActivations:
        """Returns the pieces of a document as one sample.

        Args:
            sample_indices_of_pieces: For each piece, in the order of the document, the index of its
                sample in the dataset.
            start_token_indices_of_pieces: For each piece, the index in the document of its first
                token.
        """
        first_piece_facts = self.shards.facts(sample_indices_of_pieces[0])
        last_piece_facts = self.shards.facts(sample_indices_of_pieces[-1])
        token_source = self._all_tokens
        whole_piece_chunks = [
            whole_piece_chunk
            for sample_index_of_piece in sample_indices_of_pieces
            for (whole_piece_chunk,) in token_source.by_shard(np.array([sample_index_of_piece]))
        ]
        token_batch_of_document = token_source.whole_tokens(whole_piece_chunks)
        piece_start_indices_of_tokens = np.repeat(
            np.array(start_token_indices_of_pieces, np.int32),
            [len(whole_piece_chunk) for whole_piece_chunk in whole_piece_chunks],
        )
        return SampleActivations(
            **vars(replace(first_piece_facts, cut=last_piece_facts.cut)),
            activations=token_batch_of_document.activations,
            token_ids=token_batch_of_document.token_ids,
            position=piece_start_indices_of_tokens + token_batch_of_document.position,
            **token_batch_of_document.labels,
        )

    @cached_property
    def _all_tokens(self) -> TokenSource:
        return self.source(BatchOptions(1))

    def batches(self, size: int, hooks: Any = None, **options: Any) -> Batches[TokenBatch]:
        """Returns an iterator over batches of the tokens of all samples, for one pass.

        For example, `dataset.batches(4096, shuffle=0, dtype="float32")` yields batches of 4096
        tokens in a random order. The value of `shuffle` is the seed of this order, which also
        depends on how the run was divided into shards.

        The function `activation_extraction.paired` reads two runs side by side.

        Args:
            size: Number of tokens in a batch; the last batch may have fewer.
            hooks: Names of the hooks to read, or globs. None for all hooks of the dataset.
            **options: Any other fields of BatchOptions, whose docstring describes the fields:
                `shuffle`, `buffer`, `skip_first`, `max_norm`, `dtype`, `worker`, `workers`,
                `where`, `roles` and `columns`.

        Returns:
            An iterator that yields a TokenBatch at each step. It can save and restore its state.
            Its methods `torch()` and `jax()` convert the batches to tensors and JAX arrays.

        Raises:
            ValueError: If an argument is invalid for the run, or if `where` or `roles` selects
                nothing.
        """
        token_source = self.source(BatchOptions(size, hooks, **options))
        return Batches((token_source,), itemgetter(0), token_source.reader)

    def source(self, options: BatchOptions) -> TokenSource:
        """Returns the TokenSource that reads and filters the tokens of this run for batches.

        Args:
            options: Options of the batches, as a user passes them to `batches`.

        Returns:
            A TokenSource whose `options` are complete: `hooks` contains canonical names instead of
            globs, `max_norm` is a dict from canonical names of hooks to their largest norms, and
            `buffer` is a number of tokens even if the user gave None.

        Raises:
            ValueError: If an option is invalid for this run.
        """
        chosen_hook_names = self.hooks.chosen(self.url, options.hooks)
        sample_mask = None
        sample_filter = options.where
        if sample_filter is not None:
            sample_mask = as_mask(
                sample_filter(self.samples) if callable(sample_filter) else sample_filter, len(self)
            )
            if len(sample_mask) and not sample_mask.any():
                raise ValueError(f"where: chooses none of {counted(len(sample_mask), 'sample')}")
        resolved_options = replace(
            options,
            hooks=tuple(chosen_hook_names),
            max_norm=self._limits(chosen_hook_names, options.max_norm),
            buffer=options.buffer
            or default_buffer(
                options,
                len(chosen_hook_names),
                self.shards.bytes_per_token(chosen_hook_names),
                self.shards.is_local,
            ),
            dtype=floating_name(options.dtype),
            roles=None if options.roles is None else self._known_roles(options.roles),
            where=None
            if sample_mask is None
            else hashlib.sha256(np.packbits(sample_mask).tobytes()).hexdigest(),
            columns=self._known_columns(options.columns),
        )
        return TokenSource(self.shards, resolved_options, sample_mask)

    def _limits(self, hook_names: Sequence[str], max_norm: Any) -> dict[str, float]:
        """Returns the largest norm at each hook that has a limit, by the hook's canonical name.

        Args:
            hook_names: Canonical names of the hooks to read.
            max_norm: Limit as in BatchOptions: a number for all hooks with activations, a mapping
                from hooks to their limits, or None for no limit.

        Raises:
            ValueError: If a hook with a limit is not read, or has no activations.
        """
        names_of_activation_hooks = [
            hook_name
            for hook_name in hook_names
            if self.shards.stored_hook_by_name[hook_name].values_are_activations
        ]
        max_norm_by_hook_name = (
            max_norm
            if isinstance(max_norm, Mapping)
            else dict.fromkeys(names_of_activation_hooks, max_norm)
        )
        max_norm_by_hook_name = {
            self.hooks.canonical_name_by_alias.get(hook_name, hook_name): norm_limit
            for hook_name, norm_limit in max_norm_by_hook_name.items()
        }
        for hook_name in max_norm_by_hook_name:
            if hook_name not in names_of_activation_hooks:
                raise ValueError(
                    f"max_norm: hook {hook_name!r} is not read or has no activations, and no "
                    f"norm; {', '.join(names_of_activation_hooks) or 'none'} can have a limit"
                )
        return {
            hook_name: float(norm_limit)
            for hook_name, norm_limit in max_norm_by_hook_name.items()
            if norm_limit is not None
        }

    def join(self, other: Any) -> JoinedRuns:
        """Returns a dataset with the hooks of this run and of another run over the same data.

        Joining adds layers to a run without computing its other layers again. The documentation of
        `paired` defines which tokens of two runs are the same.

        Args:
            other: The other run: an ActivationDataset, or the URL of a run.

        Returns:
            A dataset with the samples and tokens that both runs have, in the order of this run.

        Raises:
            ValueError: If there is no run at the URL, if both runs have a hook of the same name, if
                a run has two samples of the same row, if no row has a sample in both runs, or if
                the metadata shows that the samples of the two runs come from different data or were
                made in different ways.
            OSError: If a file is damaged, missing or cut short.
        """
        return JoinedRuns(self, self.opened(other))

    @classmethod
    def opened(cls, run: Any) -> "ActivationDataset":
        """Returns the dataset of a run, which is opened if only its URL is given.

        Args:
            run: An ActivationDataset, which is returned as it is, or the URL of a run.
        """
        return run if isinstance(run, cls) else cls(run)

    def _known_roles(self, roles: Sequence[str]) -> tuple[str, ...]:
        """Checks that the run stores tokens of the roles that a user has chosen.

        Args:
            roles: Names of roles, or a single name.

        Returns:
            The names, in the order of ROLES.

        Raises:
            ValueError: If `roles` is empty, or if the run stores no tokens of one of the roles.
        """
        chosen_roles = [roles] if isinstance(roles, str) else list(roles)
        stored_roles = self.identity.text.roles or ROLES
        stored_roles_clause = "has no roles; only runs of conversations do"
        if not len(self) or "role" in self.shards.get(0).label_names:
            stored_roles_clause = f"has tokens of {', '.join(stored_roles)}"
            if chosen_roles and set(chosen_roles) <= {*stored_roles}:
                return tuple(role for role in ROLES if role in chosen_roles)
        raise ValueError(
            f"roles: {', '.join(chosen_roles) or 'none'} asked for; {self.url} "
            f"{stored_roles_clause}"
        )

    def _known_columns(self, columns: Sequence[str]) -> tuple[str, ...]:
        """Checks that the table of samples has the columns that a user has chosen.

        Args:
            columns: Names of columns of the table of samples, or a single name.

        Returns:
            The names as a tuple.

        Raises:
            ValueError: If the table lacks one of the columns.
        """
        chosen_column_names = (columns,) if isinstance(columns, str) else tuple(columns)
        if chosen_column_names and len(self):
            stored_column_names = self.shards.read_sample_table(0).column_names
            for column_name in chosen_column_names:
                if column_name not in stored_column_names:
                    raise ValueError(
                        f"columns: samples have no {column_name!r}; they have "
                        f"{', '.join(stored_column_names)}"
                    )
        return chosen_column_names

    def grain(self, hooks: Any = None, tokens: int = 1) -> TokenRecords:
        """Returns the tokens as records that grain, a library for loading data, reads in any order.

        The result can be passed to grain's DataLoader or MapDataset. A record consists of one token
        or of several consecutive tokens, with their activations.

        A record of hundreds of tokens takes little longer to read than a record of a single token.
        If the run is in a bucket, reading a record takes a request of at least a MiB for every
        hook, and records that are read in a random order share no requests. Records of a run in a
        bucket should therefore have thousands of tokens; `batches` reads such a run faster.

        Args:
            hooks: Names of the hooks to read, or globs. None for all hooks of the dataset.
            tokens: Number of tokens in a record. With 1, the arrays have no axis of tokens, and
                `grain.transforms.Batch(1024)` makes batches of 1024 tokens. With more, the tokens
                of a record are consecutive tokens of a shard, and the last record of a shard may
                have fewer tokens, so `Batch` needs a `batch_fn` that concatenates arrays.

        Returns:
            A sequence of records. A record is a dict of NumPy arrays, as in a TokenBatch: the
            activations at each hook by the name of the hook, (tokens, width); and `token_ids`,
            `sample_idx`, `position` and, if the run has them, `role` and `turn`, (tokens,).

        Raises:
            ValueError: If the dataset lacks a hook, if a hook holds codes, if `tokens` is less than
                1, or if the run stores pickles, which threads would decompress whole for every
                record.
        """
        if not self.shards.can_read_ranges:
            raise ValueError(f"{self.url}: has pickles; grain needs --shard_format safetensors")
        token_source = self.source(BatchOptions(1, hooks))
        for hook_name in token_source.options.hooks:
            if not self.shards.stored_hook_by_name[hook_name].values_are_array:
                raise ValueError(f"{hook_name} holds codes, which have no array; read `batches`")
        return TokenRecords(token_source, tokens)

    def features(self, hook: str, contexts: int = 10, around: int = 16) -> pyarrow.Table:
        """Returns a table of the features of an autoencoder whose codes the run stores.

        The method first reads all codes, and then the tokens around the tokens on which a feature
        has its largest values. `pyarrow.parquet.write_table(table, "features.parquet")` stores the
        table in a file.

        Args:
            hook: Name of the hook that holds the codes.
            contexts: Number of tokens to list for each feature. Tokens on which the feature has
                larger values are listed first.
            around: Number of tokens of the sample to include on each side of a listed token.

        Returns:
            A table with a row for each feature. Its columns are:

            feature: Number of the feature, from 0.
            tokens: Number of tokens on which the feature is active.
            frequency: Fraction of all tokens on which the feature is active.
            mean: Mean value of the feature over the tokens on which it is active; null if it is
                active on no token.
            maximum: Largest value of the feature; null if it is active on no token.
            contexts: List of the tokens on which the feature has its largest values, in descending
                order of value. An item of the list is a struct with the fields `value`,
                `sample_idx` and `position` of the token; `token_ids`, the ids of the token and of
                the tokens around it; `token`, the index of the token in `token_ids`; and `text`,
                the decoded `token_ids`. The text is null if the vocabulary (tokenizer.json, or
                vocab.json with merges.txt) is neither in the folder of `tokenizer_path` nor in the
                cache of the hub on this machine, or cannot be read, or if the package tokenizers is
                not installed.

        Raises:
            ValueError: If the hook has no codes or is not read, if `contexts` is less than 1, or if
                `around` is less than 0.
            OSError: If a shard is damaged.
        """
        return feature_table(self, hook, contexts, around)


def paired(a: Any, b: Any) -> PairedRuns:
    """Returns two runs over the same data, to be read side by side.

    For example, the first run may have used a base model, and the second run a chat model.
    `for first, second in paired(a, b).batches(1024)` then iterates over batches of the same tokens
    from both runs.

    A token of the first run and a token of the second run are paired if their samples come from the
    same row of the data set (`row` of a sample) and the tokens have the same position in their
    samples. The order of the samples, their division into shards, and the format of the shards may
    differ between the runs. The number of machines and hosts may differ, too, except for some data
    sets on the hub whose rows can only be numbered separately for each host. Tokens that one of the
    runs lacks are left out. The log warns of this once, and `unpaired_samples` of the result counts
    the samples that are left out.

    Pairs have the order of run `a`. The tokens of run `b` are looked up in its shards, which is
    slow if the order of `b` is very different. If `b` stores pickles, reading a shard of `a`
    decompresses every pickle of `b` that contains any sample of that shard, and up to six shards
    are in memory in addition to the buffer of `batches` (`BatchOptions.buffer`).

    Args:
        a: The first run: an ActivationDataset, or the URL of a run.
        b: The second run: an ActivationDataset, or the URL of a run.

    Returns:
        The two runs as one object, whose method `batches` reads pairs of batches.

    Raises:
        ValueError: If there is no run at a URL, if a run has two samples of the same row, if no row
            has a sample in both runs, or if the metadata shows that the samples of the two runs
            come from different data or were made in different ways. Reading raises ValueError if
            the ids of two paired tokens differ.
        OSError: If a file is damaged, missing or cut short.
    """
    return PairedRuns(ActivationDataset.opened(a), ActivationDataset.opened(b))
