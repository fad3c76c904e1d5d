"""SourceCheck: refuses to commit samples of files that have changed while the run read them.

A `Sources` (identity.py) finds out whether files have changed. This module decides when it looks:
before each commit, at the files that the samples of the shard come from.
"""

from collections.abc import Sequence

from activation_extraction.common.errors import RunError, StorageError, reworded
from activation_extraction.store.identity import Sources
from activation_extraction.store.run_log import Commit
from activation_extraction.store.shard import ShardSample


class SourceCheck:
    """Checks, before a shard is committed, that the files of its samples have not changed.

    Args:
        sources: The files that the samples of the run come from. None if these files are unknown;
            then nothing is checked.
        commits: The commits of this process so far. The owner of this list appends every later
            commit to it.
    """

    def __init__(self, sources: Sources | None, commits: Sequence[Commit]) -> None:
        self._sources = sources
        self._commits = commits
        self._unchanged = 0  # number of commits when a check last succeeded

    def check(self, samples: Sequence[ShardSample]) -> None:
        """Checks that the files of a shard's samples have not changed since the run began.

        Args:
            samples: The samples of the shard that is about to be committed.

        Raises:
            StorageError: A file has changed. The message names the shards that were committed since
                it was last seen unchanged.
        """
        if self._sources is not None:
            rows = [sample.facts.row for sample in samples]
            try:
                self._sources.check(row for row in rows if row is not None)
            except RunError as error:
                numbers = [commit.number for commit in self._commits[self._unchanged :]]
                names = ", ".join(map(str, numbers)) or "none"
                message = f"{error}; shards committed since it was last seen unchanged: {names}"
                raise reworded(error, message, StorageError) from error
        self._unchanged = len(self._commits)
