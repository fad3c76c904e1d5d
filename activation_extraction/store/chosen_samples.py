"""Reads single stored samples of a shard, so that they can be computed or tokenised again.

--verify compares the stored values of some samples with the values that a `Recomputer` computes.
A `Reread` returns the token ids that a run did not store, and a `TextFunctions` also decodes token
ids. A `StatesRecomputer` computes hidden states for samples that another program has stored. These
four are only declared in this module, because they need the model or the data set of the run, which
this package does not use. run/recompute.py, run/recompute_states.py and run/reread.py make them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from activation_extraction.store.folder import Folder
from activation_extraction.store.run_log import Commit, RunLog, furthest_mark
from activation_extraction.store.safetensors_file import SafetensorsFile
from activation_extraction.store.shard_reader import open_shard
from activation_extraction.store.stored_hook import StoredHook, Values
from activation_extraction.text.batch import Worker
from activation_extraction.text.mark import Mark


@dataclass(frozen=True)
class StoredTokens:
    """The stored tokens of one sample, and a mark from which the sample can be read again.

    Attributes:
        worker: Host that stored the sample.
        sample_idx: Number of the sample, which is unique in the run.
        token_ids: Token ids that are stored, int32 (tokens,).
        positions: Positions of these tokens in the sample, from 0, int32 (tokens,).
        mark_before_sample: Mark before the sample, from which the host's data can be read. None for
            the beginning of the data.
    """

    worker: Worker
    sample_idx: int
    token_ids: np.ndarray
    positions: np.ndarray
    mark_before_sample: Mark | None


class Reread(Protocol):
    """A function that reads stored samples from the data set again, and returns their token ids."""

    def __call__(self, stored: Sequence[StoredTokens]) -> list[np.ndarray | str]:
        """Returns all token ids of some stored samples, including token ids that are not stored.

        Args:
            stored: Stored tokens of each sample. Samples of one host that have the same
                `mark_before_sample` are read together.

        Returns:
            A list with an item for each sample, in the order of `stored`. The item is an array with
            all token ids of the sample, int32 (tokens,), or a message if the data set no longer
            contains the stored tokens. `StoredTokens.positions` are indices into this array. The
            array is empty for a sample without stored tokens. It contains the whole sample even if
            --max_tokens ended the stored sample early.
        """


@dataclass(frozen=True)
class TextFunctions:
    """The functions with which a reader of a stored run gets the text of its samples.

    Attributes:
        decode_token_ids: Function that takes token ids, int32 (tokens,), and returns their text
            without special tokens.
        read_samples_again: Function that reads samples from the data set again, to get also the
            token ids that the run did not store. None if the run stores all tokens.
    """

    decode_token_ids: Callable[[np.ndarray], str]
    read_samples_again: Reread | None


@dataclass(frozen=True)
class ChosenSample:
    """A stored sample that is to be recomputed.

    Attributes:
        location_phrase: Path of the shard's file and number of the sample, for messages.
        tokens: Stored tokens of the sample.
        hooks: Hooks of the run.
        values_of_hooks: Stored values at each hook, in the order of `hooks`. They are in the form
            in which users get them: an array (tokens, width) or `Codes`.
    """

    location_phrase: str
    tokens: StoredTokens
    hooks: Sequence[StoredHook]
    values_of_hooks: list[Values]


class Recomputer(NamedTuple):
    """Computes the values of stored samples again with the model of their run.

    Attributes:
        jax_platform: JAX's name of the platform that computes the values, such as "tpu".
        compute_values: Function that takes samples, and returns a list with an item for each of
            them. The item is a dict from the full name of each hook to the recomputed values of the
            stored tokens, in the form of `ChosenSample.values_of_hooks`. If the sample cannot be
            recomputed, the item is the reason instead.
    """

    jax_platform: str
    compute_values: Callable[[list[ChosenSample]], list[dict[str, Values] | str]]


class StatesRecomputer(NamedTuple):
    """Computes a model's hidden states, to compare them with those in another program's files.

    Attributes:
        num_layers: Number of layers of the model.
        dtype: Name of the dtype of the computation.
        has_experts: Whether the model chooses experts for each token.
        requested_hooks: Full names of the hooks that the flags name, in the order of the flags.
            None if no flag names hooks.
        compute_states: Function that takes the token ids of samples, int32 (tokens,) each. For each
            sample, in any order, it yields a tuple of the sample's index, from 0, and its hidden
            states. These are float32 (tokens, width), by the name of the hook:
            `blocks.0.hook_resid_pre` (the embedding), `blocks.K.hook_resid_post` for each layer K,
            and `ln_final.hook_out`, in this order.
    """

    num_layers: int
    dtype: str
    has_experts: bool
    requested_hooks: Sequence[str] | None
    compute_states: Callable[[Sequence[np.ndarray]], Iterator[tuple[int, Mapping[str, np.ndarray]]]]


def read_tokens(
    folder: Folder, run_log: RunLog, commit: Commit, sample_indices: Sequence[int]
) -> list[StoredTokens]:
    """Reads the stored tokens of some samples of a shard, without values at hooks.

    Args:
        folder: Folder of the host.
        run_log: Log of the folder, which must contain metadata.json.
        commit: Commit of the shard.
        sample_indices: Indices of the samples within the shard, from 0.

    Returns:
        The tokens of each sample, in the order of `sample_indices`.

    Raises:
        RunError: If the shard's file is damaged or missing, or was replaced after its commit.
        OSError: If the shard's file cannot be read.
    """
    return _tokens_of(open_shard(folder, commit, []), run_log, commit, sample_indices)


def read_samples(
    folder: Folder, run_log: RunLog, commit: Commit, sample_indices: Sequence[int], where: str
) -> list[ChosenSample]:
    """Reads the tokens and the values at all hooks of some samples of a shard.

    Args:
        folder: Folder of the host.
        run_log: Log of the folder, which must contain metadata.json.
        commit: Commit of the shard.
        sample_indices: Indices of the samples within the shard, from 0.
        where: Path of the shard's file, for messages.

    Returns:
        The samples, in the order of `sample_indices`.

    Raises:
        RunError: If the shard's file is damaged or missing, or was replaced after its commit.
        OSError: If the shard's file cannot be read.
        ValueError: If the width or dtype of a hook is unknown.
    """
    hooks = _hooks_of(run_log, commit)
    shard_reader = open_shard(folder, commit, hooks)
    tokens_of_samples = _tokens_of(shard_reader, run_log, commit, sample_indices)
    chosen_samples = []
    for sample_index, stored_tokens in zip(sample_indices, tokens_of_samples, strict=True):
        start_token_index, end_token_index = shard_reader.sample_offsets[
            sample_index : sample_index + 2
        ].tolist()
        values_of_hooks = [
            hook.for_user(hook.begin_rows(shard_reader, start_token_index, end_token_index)())
            for hook in hooks
        ]
        location_phrase = f"{where}: sample {stored_tokens.sample_idx}"
        chosen_samples.append(ChosenSample(location_phrase, stored_tokens, hooks, values_of_hooks))
    return chosen_samples


def _tokens_of(
    reader: SafetensorsFile, run_log: RunLog, commit: Commit, sample_indices: Sequence[int]
) -> list[StoredTokens]:
    """Reads the stored tokens of some samples of an open shard.

    Args:
        reader: Open shard.
        run_log: Log of the host's folder, which must contain metadata.json.
        commit: Commit of the shard.
        sample_indices: Indices of the samples within the shard, from 0.

    Returns:
        The tokens of each sample, in the order of `sample_indices`.
    """
    identity = run_log.identity
    assert identity is not None
    worker = identity.worker
    mark_before_shard = furthest_mark(run_log.commits_in_order, worker.number_of(commit.first))
    if not sample_indices:
        return []
    # All tokens from the first sample to the last one are read, because one large range takes less
    # time than many small ones if the shard is in a bucket.
    start_token_index = int(reader.sample_offsets[min(sample_indices)])
    end_token_index = int(reader.sample_offsets[max(sample_indices) + 1])
    token_fields = reader.begin_tokens(start_token_index, end_token_index)()
    stored_samples = []
    for sample_index in sample_indices:
        start_token_index_in_range, end_token_index_in_range = (
            reader.sample_offsets[sample_index : sample_index + 2] - start_token_index
        ).tolist()
        token_ids = token_fields["token_ids"][start_token_index_in_range:end_token_index_in_range]
        positions = token_fields["position"][start_token_index_in_range:end_token_index_in_range]
        sample_number = int(reader.sample_numbers[sample_index])
        stored_samples.append(
            StoredTokens(worker, sample_number, token_ids, positions, mark_before_shard)
        )
    return stored_samples


def _hooks_of(run_log: RunLog, commit: Commit) -> list[StoredHook]:
    """Returns the hooks of a shard, from the descriptions in its commit and in metadata.json.

    Args:
        run_log: Log of the host's folder, which must contain metadata.json.
        commit: Commit of the shard.
    """
    identity = run_log.identity
    assert identity is not None
    metadata = run_log.metadata or {}
    # Hook name -> facts about the hook in metadata.json.
    metadata_facts_by_hook = {
        hook_facts["name"]: hook_facts for hook_facts in metadata.get("hooks", ())
    }
    hooks_of_shard = []
    for hook_facts_in_commit in commit.hooks:
        hook_facts_in_metadata = metadata_facts_by_hook.get(hook_facts_in_commit["name"], {})
        hooks_of_shard.append(identity.recorded_hook(hook_facts_in_commit | hook_facts_in_metadata))
    return hooks_of_shard
