"""Reads single stored samples, with all that is needed to compute or read them again.

--verify chooses samples, compares them with what a `Recompute` returns, and so finds values that
no longer follow from the model and the text. A `Reread` returns the token ids that a run did not
store, and a `RunText` also decodes token ids. They need the model or the text of the run, which
this room does not know: run/recompute.py and run/reread.py make them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from activation_extraction.store.folder import Folder
from activation_extraction.store.hook_values import HookValues, Values
from activation_extraction.store.run_log import Commit, RunLog, furthest_mark
from activation_extraction.store.safetensors_file import SafetensorsFile
from activation_extraction.store.shard_reader import open_shard
from activation_extraction.text.batch import Worker
from activation_extraction.text.mark import Mark


@dataclass(frozen=True)
class StoredTokens:
    """The stored tokens of one sample, and the place in the data from which it can be read again.

    Attributes:
        worker: The host that stored the sample.
        sample_idx: The number of the sample.
        token_ids: The token ids that are stored, int32 (tokens,).
        positions: The positions of these tokens in the sample, from 0, int32 (tokens,).
        start: A mark in the host's data before the sample. None for the beginning of the data.
    """

    worker: Worker
    sample_idx: int
    token_ids: np.ndarray
    positions: np.ndarray
    start: Mark | None


class Reread(Protocol):
    """Reads the text of stored samples again."""

    def __call__(self, stored: Sequence[StoredTokens]) -> list[np.ndarray | str]:
        """Returns all token ids of samples, including those that are not stored.

        Args:
            stored: The stored tokens of each sample. Samples of one host are read together if they
                have the same `start`.

        Returns:
            For each sample its token ids, int32 (tokens,), which `positions` indexes. They are
            empty for a sample without stored tokens. If the data set now gives other tokens than
            those that are stored, the item is a message that says so. A sample that --max_tokens
            had cut is whole here.
        """


@dataclass(frozen=True)
class RunText:
    """The text of a stored run.

    Attributes:
        decode: A function that returns the text of token ids, int32 (tokens,), without special
            tokens.
        reread: A function that reads samples again. None if the run stores all tokens.
    """

    decode: Callable[[np.ndarray], str]
    reread: Reread | None


@dataclass(frozen=True)
class ChosenSample:
    """A stored sample that is to be recomputed.

    Attributes:
        where: The path of the shard's file and the sample's number, for messages.
        tokens: The tokens that are stored.
        hooks: The hooks of the run.
        values: The stored values at each of the hooks, in the user's form (hook_values.py).
    """

    where: str
    tokens: StoredTokens
    hooks: Sequence[HookValues]
    values: list[Values]


class Recompute(NamedTuple):
    """Recomputes stored samples with the model of their run.

    Attributes:
        platform: JAX's name of the platform that computes.
        values: A function that takes samples and returns a result for each of them: the values of
            the stored tokens in the user's form, by the name of the hook, or the reason why the
            sample cannot be recomputed.
    """

    platform: str
    values: Callable[[list[ChosenSample]], list[dict[str, Values] | str]]


def read_tokens(
    store: Folder, stored: RunLog, commit: Commit, wanted: Sequence[int]
) -> list[StoredTokens]:
    """Reads the stored tokens of some samples of a shard, without activations.

    Args:
        store: The host's folder.
        stored: The content of the folder, which has metadata.
        commit: The commit of the shard.
        wanted: The positions of the samples in the shard.

    Returns:
        The tokens of each sample, in the order of `wanted`.

    Raises:
        RunError: The file is damaged or missing, or was replaced.
        OSError: The file cannot be read.
    """
    return _tokens_of(open_shard(store, commit, []), stored, commit, wanted)


def read_samples(
    store: Folder, stored: RunLog, commit: Commit, wanted: Sequence[int], where: str
) -> list[ChosenSample]:
    """Reads some samples of a shard.

    Args:
        store: The host's folder.
        stored: The content of the folder, which has metadata.
        commit: The commit of the shard.
        wanted: The positions of the samples in the shard.
        where: The path of the shard's file, for messages.

    Returns:
        The samples, in the order of `wanted`.

    Raises:
        RunError: The file is damaged or missing, or was replaced.
        OSError: The file cannot be read.
        ValueError: The width or dtype of a hook is unknown.
    """
    hooks = _hooks_of(stored, commit)
    reader = open_shard(store, commit, hooks)
    samples = []
    all_tokens = _tokens_of(reader, stored, commit, wanted)
    for i, tokens in zip(wanted, all_tokens, strict=True):
        first, stop = reader.offsets[i : i + 2].tolist()
        values = [hook.for_user(hook.begin_rows(reader, first, stop)()) for hook in hooks]
        name = f"{where}: sample {tokens.sample_idx}"
        samples.append(ChosenSample(name, tokens, hooks, values))
    return samples


def _tokens_of(
    reader: SafetensorsFile, stored: RunLog, commit: Commit, wanted: Sequence[int]
) -> list[StoredTokens]:
    """Returns the stored tokens of some samples of an open shard."""
    identity = stored.identity
    assert identity is not None
    worker = identity.worker
    start = furthest_mark(stored.in_order, worker.number_of(commit.first))
    samples = []
    for i in wanted:
        tokens = reader.tokens(*reader.offsets[i : i + 2].tolist())
        sample_idx = int(reader.sample_idx[i])
        samples.append(
            StoredTokens(worker, sample_idx, tokens["token_ids"], tokens["position"], start)
        )
    return samples


def _hooks_of(stored: RunLog, commit: Commit) -> list[HookValues]:
    """Returns the hooks of a shard, as its JSON and metadata.json together describe them."""
    identity = stored.identity
    assert identity is not None
    descriptions = {hook["name"]: hook for hook in (stored.metadata or {}).get("hooks", ())}
    return [
        identity.recorded_hook(hook | descriptions.get(hook["name"], {})) for hook in commit.hooks
    ]
