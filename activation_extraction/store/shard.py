"""Shard: a shard in memory, which is a list of samples with their values at every hook.

shard_writer.py gathers samples into shards. The methods of a shard then encode its values and
compute their statistics, and formats.py converts the shard to a file. sample_table.py makes a
separate file with the facts of its samples.
"""

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from activation_extraction.common.errors import StorageError
from activation_extraction.store.statistics import ErrorByTokenKind, Sums, SumsOfCodes
from activation_extraction.store.stored_hook import HookKey, StoredHook, slices_of
from activation_extraction.text.sample_facts import SampleFacts

# Names of the labels of tokens in conversations. All samples of a run have both labels, or none.
LABELS = ("role", "turn")
MAX_GZIP_RATIO = 1032  # largest number of bytes to which gzip can decompress one byte
OVERFLOW = (
    "float16 ends at 65504; start anew with --activation_dtype bfloat16 or float32 and --overwrite"
)
NOT_FINITE = (
    "the model computes them, and would do so again; check its weights, or start anew with other "
    "layers or --dtype float32, and --overwrite"
)


@dataclass(frozen=True)
class ShardSample:
    """A sample of a shard, without its values at hooks.

    Attributes:
        facts: Facts of the sample, such as its number and its row in the data set. In a shard that
            was read from a file, facts that only the table of samples contains have their defaults.
        token_ids: Ids of the stored tokens, int32 (tokens,). None if a program with a loop of its
            own added the sample without ids.
        positions: Positions of the stored tokens in the sample, from 0, int32 (tokens,).
        token_labels_by_name: Labels of the stored tokens, int32 (tokens,) each, by the names "role"
            and "turn". Empty if the run stores no conversations.
    """

    facts: SampleFacts
    token_ids: np.ndarray | None
    positions: np.ndarray
    token_labels_by_name: Mapping[str, np.ndarray] = field(default_factory=dict)


@dataclass(frozen=True)
class Shard:
    """A shard in memory: samples in ascending order, with their values at every hook.

    Attributes:
        samples: Samples of the shard, by ascending `sample_idx`.
        hook_by_key: Descriptions of the hooks, by the keys of the hooks in pickles.
        sample_values_by_hook_key: Key of each hook -> list with the values of each sample at this
            hook, in the order of `samples`. After `encode`, the values are ready to be written (in
            the stored form, see stored_hook.py).
    """

    samples: list[ShardSample]
    hook_by_key: Mapping[HookKey, StoredHook]
    sample_values_by_hook_key: Mapping[HookKey, list[Any]]

    @property
    def positions(self) -> list[np.ndarray]:
        """For each sample, the positions of its stored tokens, int32 (tokens,).

        A position is the index of a token in its sample, from 0.
        """
        return [sample.positions for sample in self.samples]

    @property
    def sample_offsets(self) -> np.ndarray:
        """For each sample, the index of its first token in the shard, int64 (samples + 1,).

        The last element is the number of tokens in the shard, so sample i has the tokens from
        sample_offsets[i] to sample_offsets[i + 1] - 1.
        """
        return np.cumsum([0, *map(len, self.positions)], dtype=np.int64)

    def encode(self, threads: Executor) -> tuple["Shard", dict[HookKey, ErrorByTokenKind]]:
        """Encodes the values at all hooks that need an encoding.

        Args:
            threads: Threads that encode.

        Returns:
            A tuple of the shard, whose values are ready to be written (in the stored form), and a
            dict with the errors of encoding: key of a hook -> kind of token -> relative errors. The
            inner dict is empty for a hook whose values are not encoded.
        """
        encoded_values_by_hook_key: dict[HookKey, list[Any]] = {}
        errors_by_hook_key: dict[HookKey, ErrorByTokenKind] = {}
        for hook_key, hook in self.hook_by_key.items():
            encoded_values_by_hook_key[hook_key], errors_by_hook_key[hook_key] = hook.encode(
                self.sample_values_by_hook_key[hook_key], self.positions, threads
            )
        return replace(
            self, sample_values_by_hook_key=encoded_values_by_hook_key
        ), errors_by_hook_key

    def compute_statistics(
        self, errors: Mapping[HookKey, ErrorByTokenKind], threads: Executor
    ) -> tuple[list[dict[str, Any]], dict[str, Sums]]:
        """Computes the statistics of the values at all hooks.

        Args:
            errors: Encoding errors by the key of the hook, as `encode` returns them.
            threads: Threads that compute sums.

        Returns:
            A tuple of:
                The description of each hook for the shard's JSON, with the statistics of the hook.
                The sums over the shard's tokens (see `Sums`), by the full name of the hook, for the
                shard's file of sums. Hooks with codes are left out.

        Raises:
            StorageError: If a value is NaN or infinite. The message names the sample.
        """
        # A thread's task is to sum a slice of the samples at one hook. These two lists contain the
        # key of the hook and the slice of samples of each task.
        hook_keys_of_tasks: list[HookKey] = []
        sample_slices_of_tasks: list[slice] = []
        for hook_key in self.hook_by_key:
            for sample_slice in slices_of(self.sample_values_by_hook_key[hook_key]):
                hook_keys_of_tasks.append(hook_key)
                sample_slices_of_tasks.append(sample_slice)
        sums_by_hook_key: dict[HookKey, Any] = {}
        for hook_key, sums_of_slice in zip(
            hook_keys_of_tasks,
            threads.map(self._sums, hook_keys_of_tasks, sample_slices_of_tasks),
            strict=True,
        ):
            sums_by_hook_key[hook_key] = (
                sums_by_hook_key[hook_key].merge(sums_of_slice)
                if hook_key in sums_by_hook_key
                else sums_of_slice
            )
        hook_descriptions = []
        for hook_key, hook_sums in sums_by_hook_key.items():
            hook_statistics = replace(hook_sums.statistics, error=errors[hook_key])
            if not hook_statistics.finite:
                self._refuse_not_finite(hook_key)
            hook_description = self.hook_by_key[hook_key].to_json(
                self.sample_values_by_hook_key[hook_key][0]
            )
            hook_descriptions.append(hook_description | hook_statistics.to_json())
        sums_by_hook_name = {
            hook.name: sums_by_hook_key[hook_key]
            for hook_key, hook in self.hook_by_key.items()
            if hook.values_are_array
        }
        return hook_descriptions, sums_by_hook_name

    def _sums(self, key: HookKey, sample_slice: slice) -> Sums | SumsOfCodes:
        """Computes the sums from which the statistics of some samples at one hook are computed.

        Args:
            key: Key of the hook.
            sample_slice: Slice of the shard's list `samples`.

        Returns:
            `SumsOfCodes` if the hook has codes, otherwise `Sums`.
        """
        positions_of_samples = [sample.positions for sample in self.samples[sample_slice]]
        return self.hook_by_key[key].sums(
            self.sample_values_by_hook_key[key][sample_slice], positions_of_samples
        )

    def _refuse_not_finite(self, key: HookKey) -> None:
        """Raises StorageError for the first sample with a NaN or infinite value at a hook.

        Args:
            key: Key of the hook. At least one sample has such a value at it.
        """
        for sample_index, sample in enumerate(self.samples):
            if not self._sums(key, slice(sample_index, sample_index + 1)).statistics.finite:
                dtype_name = self.sample_values_by_hook_key[key][sample_index].dtype.name
                raise StorageError(
                    f"sample {sample.facts.sample_idx}, hook {key}: NaN or infinite {dtype_name} "
                    "values",
                    remedy=OVERFLOW if dtype_name == "float16" else NOT_FINITE,
                    is_recurring=True,
                )
