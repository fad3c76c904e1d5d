"""RunRecord: counts what is stored, and writes metadata.json and metrics.jsonl."""

import json
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from activation_extraction.common.errors import StorageError
from activation_extraction.store.commit import FORMAT_VERSION, METRICS, Commit, Outline
from activation_extraction.store.identity import Identity
from activation_extraction.store.local_files import append_line, running_system, write_bytes
from activation_extraction.store.ownership import Ownership
from activation_extraction.store.patience import reason_of
from activation_extraction.store.resume import StoragePlan
from activation_extraction.store.sealed_json import seal
from activation_extraction.store.shard import Key
from activation_extraction.store.statistics import Statistics

SUMS = ("shards", "samples", "tokens", "bytes", "hooks")  # in metadata.json
METRICS_SECONDS = 300  # between uploads of metrics.jsonl
OUTLINE_SECONDS = 10  # between uploads of metadata.json, after a commit


class Sources(Protocol):
    """The files that samples come from. grown: whether rows were added since an earlier run."""

    grown: bool

    def settle(self) -> bool:
        """Waits for the digests of all files read so far; returns whether there are new ones."""
        ...

    def to_json(self) -> list[dict[str, Any]]: ...


@dataclass(frozen=True)
class RunFacts:
    """Optional facts about a run that metadata.json records beside its identity.

    metadata: any JSON. hooks: further facts about a hook, such as its aliases, by its key. sources:
    the files that the samples come from.
    """

    metadata: Mapping[str, Any] = field(default_factory=dict)
    hooks: Mapping[Key, Mapping[str, Any]] = field(default_factory=dict)
    sources: Sources | None = None


class RunRecord:
    """Counts what is stored, and writes both files to the local folder and to the bucket.

    local, remote: the ownership of the local folder, and of the one in the bucket. hooks: the
    hooks' full names by key. limits: the most samples and tokens, by name. A repair keeps the
    `recorded` metadata, except the totals. `totals` include the shards of earlier runs.
    """

    def __init__(
        self,
        local: Ownership,
        remote: Ownership | None,
        hooks: Mapping[Key, str],
        identity: Identity,
        limits: Mapping[str, int | None],
        facts: RunFacts,
    ) -> None:
        self._local = local
        self._metrics_file = Path(local.folder.url) / METRICS
        self._remote = remote
        self._hooks = {
            key: {"key": key, "name": hooks[key], **facts.hooks.get(key, {})} for key in hooks
        }
        self._identity = identity
        self._limits = limits
        self._facts = facts
        self._writing = threading.Lock()
        self._metrics: Mapping[str, Any] = {}  # the last line of metrics.jsonl
        self._metrics_uploaded = self._uploaded = time.monotonic()
        self.follow(StoragePlan())
        self.begin()

    def begin(self) -> None:
        """Counts the run's seconds from now."""
        self._began = time.perf_counter()

    def follow(self, plan: StoragePlan) -> None:
        """Resets all counts to what earlier runs have stored."""
        self.recorded = plan.recorded
        self.count(plan.commits, plan.outline)
        self.totals.count_rows(plan.skipped_rows, plan.empty_rows)

    def count(self, commits: Iterable[Commit], outline: Outline) -> None:
        """Resets all counts to these shards and those in an outline."""
        self._outline = outline.without_partial()
        self.totals = outline.totals.copy()
        statistics = self.totals.statistics
        self.totals.statistics = {key: statistics.get(key, Statistics()) for key in self._hooks}
        for commit in commits:
            self._add(commit)

    def _add(self, commit: Commit) -> None:
        self.totals.add(commit)
        self._outline.add(commit)

    def write(self, status: str, counted: bool = False, upload: bool = True) -> None:
        """Writes metadata.json. counted: whether `totals` include everything that is stored."""
        content = self._content(status)
        if self.recorded is not None:
            updated = ("owner", "written", "remote", *(SUMS if counted else ()))
            content |= {**self.recorded, **{name: content[name] for name in updated}}
        if self._remote is not None:
            content["outline"] = {**self._outline.to_json(), "metrics": self._metrics}
        with self._writing:
            self._local.put_metadata(seal(content))
            if self._remote is not None and upload:
                self._remote.put_metadata(seal(content))
                self._uploaded = time.monotonic()

    def settle(self) -> None:
        """Records the files that were read so far, before the next shard is committed."""
        sources = self._facts.sources
        if sources is not None and sources.settle():
            self.write("running")

    def add(self, commit: Commit) -> None:
        """Counts a committed shard, and uploads the progress of the run from time to time."""
        self._add(commit)
        if self._remote is None:
            return
        if time.monotonic() - self._uploaded > OUTLINE_SECONDS:
            self.write("running")
        if time.monotonic() - self._metrics_uploaded > METRICS_SECONDS:
            self.upload_metrics()

    def _content(self, status: str) -> dict[str, Any]:
        sources, remote = self._facts.sources, self._remote
        return {
            "format_version": FORMAT_VERSION,
            "status": status,
            **self.totals.counts,
            **self._limits,
            "seconds": round(time.perf_counter() - self._began, 3),
            "written": round(time.time(), 3),
            "owner": self._local.owner,
            "system": running_system(),
            "remote": None if remote is None else remote.folder.url,
            "hooks": [
                {**self._hooks[key], **statistics.to_json()}
                for key, statistics in self.totals.statistics.items()
            ],
            "identity": self._identity.to_json(),
            "data_files": [] if sources is None else sources.to_json(),
            **self._facts.metadata,
        }

    def fetch_metrics(self) -> None:
        """Downloads earlier metrics from the bucket, if the local folder lacks them."""
        if self._remote is not None and not self._metrics_file.exists():
            data = self._remote.folder.read(METRICS)
            if data is not None:
                write_bytes(self._metrics_file, data)

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Appends a line to metrics.jsonl. Raises StorageError."""
        self._metrics = metrics
        try:
            append_line(self._metrics_file, json.dumps(metrics))
        except OSError as error:
            raise StorageError(f"{self._metrics_file}: {reason_of(error)[0]}") from error

    def upload_metrics(self) -> None:
        """Uploads the current content of metrics.jsonl."""
        self._metrics_uploaded = time.monotonic()
        if self._remote is not None and self._metrics_file.exists():
            self._remote.folder.write(METRICS, self._metrics_file.read_bytes())
