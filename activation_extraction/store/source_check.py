"""SourceCheck: refuses to commit samples from files that have changed since the run began.

`Sources` (identity.py) finds out whether files have changed. This module decides which files are
checked, and when: before a shard is committed, it checks the files from which the shard's samples
come.
"""

from collections.abc import Sequence

from activation_extraction.common.errors import RunError, StorageError, reworded
from activation_extraction.store.identity import Sources
from activation_extraction.store.run_log import Commit
from activation_extraction.store.shard import ShardSample


class SourceCheck:
    """Checks before each commit that the files of the shard's samples have not changed.

    Args:
        sources: Files from which the samples of the run come. None if these files are unknown, so
            that nothing is checked.
        commits: List of the commits of this process, to which the caller appends later commits.
            If a file has changed, the message names the shards of the commits since the last check.
    """

    def __init__(self, sources: Sources | None, commits: Sequence[Commit]) -> None:
        self._sources = sources
        self._commits = commits
        # Number of commits that existed when the source files were last found unchanged. The error
        # about a change names the shards that were committed since then.
        self._num_checked_commits = 0

    def check(self, samples: Sequence[ShardSample]) -> None:
        """Checks that the data files with a shard's samples have not changed since the run began.

        Args:
            samples: Samples of the shard that will be committed next.

        Raises:
            StorageError: If a data file has changed. The message names the shards that were
                committed since the last check that found no change.
        """
        if self._sources is not None:
            row_positions_of_samples = [sample.facts.row for sample in samples]
            try:
                self._sources.check(
                    row_position
                    for row_position in row_positions_of_samples
                    if row_position is not None
                )
            except RunError as error:
                shard_numbers = [
                    commit.number for commit in self._commits[self._num_checked_commits :]
                ]
                shard_numbers_phrase = ", ".join(map(str, shard_numbers)) or "none"
                problem_message = (
                    f"{error}; shards committed since it was last seen unchanged: "
                    f"{shard_numbers_phrase}"
                )
                raise reworded(error, problem_message, StorageError) from error
        self._num_checked_commits = len(self._commits)
