"""Reads stored samples with all that is needed to compute them again.

--verify chooses samples, compares them with what a `Recompute` returns, and so finds values that
no longer follow from the model and the text. Recomputing needs the model, which this room does not
know: run/recompute.py makes the Recompute.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from activation_extraction.store.folder import Folder
from activation_extraction.store.hook_values import HookValues, Values
from activation_extraction.store.run_log import Commit, RunLog, furthest_mark
from activation_extraction.store.shard import ShardSample
from activation_extraction.store.shard_reader import open_shard
from activation_extraction.text.batch import Worker
from activation_extraction.text.mark import Mark
from activation_extraction.text.sample_facts import SampleFacts


@dataclass(frozen=True)
class ChosenSample:
    """A stored sample that is to be recomputed.

    Attributes:
        where: The path of the shard's file and the sample's number, for messages.
        stored: The sample as the shard has it: its number, and the token ids and positions that are
            stored. Facts that only the table of samples has are their defaults.
        hooks: The hooks of the run.
        values: The stored values at each of the hooks, in the user's form (hook_values.py).
        worker: The host that stored the sample.
        shard: The number of the sample's shard.
        start: A mark in the data before all samples of the shard. None for the beginning of the
            data.
    """

    where: str
    stored: ShardSample
    hooks: Sequence[HookValues]
    values: list[Values]
    worker: Worker
    shard: int
    start: Mark | None


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
    identity = stored.identity
    assert identity is not None
    worker = identity.worker
    descriptions = {hook["name"]: hook for hook in (stored.metadata or {}).get("hooks", ())}
    hooks = [
        identity.recorded_hook(hook | descriptions.get(hook["name"], {})) for hook in commit.hooks
    ]
    start = furthest_mark(stored.in_order, worker.number_of(commit.first))
    samples = []
    reader = open_shard(store, commit, hooks)
    for i in wanted:
        first, stop = reader.offsets[i : i + 2].tolist()
        tokens = reader.tokens(first, stop)
        facts = SampleFacts(int(reader.sample_idx[i]))
        sample = ShardSample(facts, tokens["token_ids"], tokens["position"])
        values = [hook.for_user(hook.begin_rows(reader, first, stop)()) for hook in hooks]
        name = f"{where}: sample {facts.sample_idx}"
        samples.append(ChosenSample(name, sample, hooks, values, worker, commit.number, start))
    return samples
