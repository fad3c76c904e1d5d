"""StoredSamples: which samples earlier runs have stored, and of which widths and dtypes.

A program that gives its samples again, from the first one on, has these left out.
"""

from collections.abc import Container
from functools import cached_property

from activation_extraction.store.commit import Commit
from activation_extraction.store.folder import Folder
from activation_extraction.store.metadata import read_stored
from activation_extraction.store.resume import StoragePlan
from activation_extraction.store.shard import Key
from activation_extraction.store.shard_reader import read_table
from activation_extraction.text.batch import Worker


class StoredSamples:
    """The samples in the shards that a plan keeps. Methods raise RunError for damaged files.

    folder: has the shards. worker: the host whose samples they are.
    """

    def __init__(self, folder: Folder, plan: StoragePlan, worker: Worker) -> None:
        self._folder = folder
        self._plan = plan
        self._worker = worker

    def __contains__(self, sample_idx: int) -> bool:
        return sample_idx in self._numbers

    @cached_property
    def _numbers(self) -> Container[int]:
        """Every `sample_idx`. The tables of samples are read only if some numbers were left out."""
        end = self._plan.next.last_sample_before + 1
        whole = range(self._worker.sample_idx(0), end, self._worker.stride)
        if len(whole) == self._plan.samples:
            return whole
        commits = self._commits
        return {row.sample_idx for each in commits for row in read_table(self._folder, each)}

    @cached_property
    def forms(self) -> dict[Key, tuple[int, str]]:
        """The width and the dtype of the stored values, by the key of the hook; empty if nothing is
        stored."""
        hooks = self._commits[-1].hooks if self._plan.shards else []
        return {hook["key"]: (hook["width"], hook["dtype"]) for hook in hooks}

    @cached_property
    def _commits(self) -> list[Commit]:
        if len(self._plan.commits) == self._plan.shards:
            return self._plan.commits
        return read_stored(self._folder).in_order[: self._plan.shards]
