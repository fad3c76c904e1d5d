"""RunRecord: counts what is stored, and writes metadata.json and metrics.jsonl."""

import json
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from activation_extraction.common.errors import StorageError
from activation_extraction.store.commit import FORMAT_VERSION, METRICS, Commit
from activation_extraction.store.folder import ANY
from activation_extraction.store.identity import Identity
from activation_extraction.store.local_files import append_line, running_system, write_file
from activation_extraction.store.metadata import COUNTED
from activation_extraction.store.owner import Owner
from activation_extraction.store.patience import reason_of
from activation_extraction.store.resume import StoragePlan, repaired_status
from activation_extraction.store.shard import Key
from activation_extraction.store.statistics import Statistics

METRICS_SECONDS = 300  # between uploads of metrics.jsonl
PROGRESS_SECONDS = 10  # between uploads of metadata.json, after a commit


class Sources(Protocol):
    """The files that samples come from. `check` raises RunError if one of those that samples with
    these `row`s come from has changed since the run began."""

    def check(self, rows: Iterable[Mapping[str, Any]]) -> None: ...

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

    local, remote: this process as the owner of the local folder, and of the one in the bucket.
    hooks: the hooks' full names by key. limits: the most samples and tokens, by name. A repair
    keeps the `recorded` metadata, except the totals. `totals` include the shards of earlier runs.
    """

    def __init__(
        self,
        local: Owner,
        remote: Owner | None,
        hooks: Mapping[Key, str],
        identity: Identity,
        limits: Mapping[str, int | None],
        facts: RunFacts,
    ) -> None:
        self._owners = [local] if remote is None else [local, remote]
        self._remote = remote
        self._metrics_file = Path(local.folder.url) / METRICS
        self._hooks = {
            name: {"key": key, "name": name, **facts.hooks.get(key, {})}
            for key, name in hooks.items()
        }
        self._identity = identity
        self._limits = limits
        self._facts, self.sources = facts, facts.sources
        self._writing = threading.Lock()
        self._metrics_uploaded = self._uploaded = time.monotonic()
        self.follow(StoragePlan())
        self.begin()

    def begin(self) -> None:
        """Takes the current time as the beginning of what this process stores."""
        self.began = round(time.time(), 3)

    def follow(self, plan: StoragePlan) -> None:
        """Resets all counts to what earlier runs have stored."""
        self.recorded = plan.recorded
        self.totals = plan.totals
        statistics = self.totals.statistics
        self.totals.statistics = {n: statistics.get(n, Statistics()) for n in self._hooks}

    def content(self, status: str, counted: bool = True) -> dict[str, Any]:
        """Returns the content of metadata.json. counted: whether `totals` include everything that
        is stored."""
        content = {
            "format_version": FORMAT_VERSION,
            "status": status,
            **self.totals.counts,
            **self._limits,
            "written": round(time.time(), 3),
            "system": running_system(),
            "remote": None if self._remote is None else self._remote.folder.url,
            "hooks": [
                {**self._hooks[name], **statistics.to_json()}
                for name, statistics in self.totals.statistics.items()
            ],
            "identity": self._identity.to_json(),
            "data_files": self.sources.to_json() if self.sources else [],
            **self._facts.metadata,
        }
        if self.recorded is not None:
            updated = ("written", "remote", *((*COUNTED, "hooks") if counted else ()))
            content |= {**self.recorded, **{name: content[name] for name in updated}}
            if counted:
                content["status"] = repaired_status(self.recorded, self.totals.samples)
        return content

    def write(self, status: str, counted: bool = True, upload: bool = True) -> None:
        """Writes metadata.json. counted: see `content`."""
        content = self.content(status, counted)
        with self._writing:
            for owner in self._owners if upload else self._owners[:1]:
                owner.write_metadata(content)
            self._uploaded = time.monotonic()

    def add(self, commit: Commit) -> None:
        """Counts a committed shard, and uploads the progress of the run from time to time."""
        self.totals.add(commit)
        if self._remote is not None:
            now = time.monotonic()
            if now - self._uploaded > PROGRESS_SECONDS:
                self.write("running", counted=False)
            if now - self._metrics_uploaded > METRICS_SECONDS:
                self.upload_metrics()

    def begin_metrics(self, anew: bool) -> None:
        """Deletes earlier metrics if the run begins anew; or else makes them the same in both
        folders, of which the local one may be on another disk than before."""
        if anew:
            for owner in self._owners:
                owner.folder.remove(METRICS)
        elif self._remote is not None and not self._metrics_file.exists():
            data = self._remote.folder.read(METRICS)
            if data is not None:
                write_file(self._metrics_file, [data])
        self.upload_metrics()

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Appends a line to metrics.jsonl. Raises StorageError.

        Does nothing in a repair, because the file describes the run itself.
        """
        if self.recorded is not None:
            return
        try:
            append_line(self._metrics_file, json.dumps(metrics))
        except OSError as error:
            raise StorageError(f"{self._metrics_file}: {reason_of(error)[0]}") from error

    def upload_metrics(self) -> None:
        """Uploads the current content of metrics.jsonl."""
        self._metrics_uploaded = time.monotonic()
        if self._remote is not None and self._metrics_file.exists():
            self._remote.folder.write(METRICS, self._metrics_file.read_bytes(), ANY)
