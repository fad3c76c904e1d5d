"""RunRecord: counts what is stored, and writes metadata.json and metrics.jsonl."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from activation_extraction.common.errors import StorageError, reason_of
from activation_extraction.store.commit import FORMAT_VERSION, METRICS, Commit
from activation_extraction.store.folder import ANY
from activation_extraction.store.identity import Identity, RunFacts
from activation_extraction.store.local_files import append_line, write_file
from activation_extraction.store.metadata import COUNTED
from activation_extraction.store.owner import Owner
from activation_extraction.store.resume import StoragePlan
from activation_extraction.store.shard import Key
from activation_extraction.store.statistics import Statistics

CUT = ("cut_samples", "cut_tokens", "empty_samples")  # totals that follow from the shards, too
METRICS_SECONDS = 300  # between uploads of metrics.jsonl


class RunRecord:
    """Counts what is stored, and writes both files to the local folder and to the bucket.

    folder: the local one. owner: this process as the owner of the folder with the shards. hooks:
    the hooks' full names by key. limits: the most samples and tokens, by name. A repair keeps the
    metadata that its plan has `recorded`, except the totals. `totals` include the shards of earlier
    runs.
    """

    def __init__(
        self,
        folder: Path,
        owner: Owner,
        hooks: Mapping[Key, str],
        identity: Identity,
        limits: Mapping[str, int | None],
        facts: RunFacts,
    ) -> None:
        self._owner = owner
        self._bucket = owner.folder if owner.local is not None else None
        self._metrics_file = folder / METRICS
        self._hooks = {
            name: {"key": key, "name": name, **facts.hooks.get(key, {})}
            for key, name in hooks.items()
        }
        self._identity = identity
        self._limits = limits
        self._facts, self.sources = facts, facts.sources
        self._metrics_uploaded = time.monotonic()
        self.follow(StoragePlan())
        self.begin()

    def begin(self) -> None:
        """Takes the current time as the beginning of what this process stores."""
        self.began = round(time.time(), 3)

    def follow(self, plan: StoragePlan) -> None:
        """Resets all counts to what earlier runs have stored."""
        self._plan, self.totals = plan, plan.totals

    def content(self, status: str) -> dict[str, Any]:
        """Returns the content of metadata.json. That of a repair has new totals once it is
        complete."""
        content = {
            "format_version": FORMAT_VERSION,
            "status": status,
            **self.totals.counts,
            **self._limits,
            "written": round(time.time(), 3),
            "remote": None if self._bucket is None else self._bucket.url,
            "hooks": [
                {**hook, **self.totals.statistics.get(name, Statistics()).to_json()}
                for name, hook in self._hooks.items()
            ],
            "identity": self._identity.to_json(),
            "data_files": self.sources.to_json() if self.sources else [],
            **self._facts.metadata,
        }
        recorded = self._plan.recorded
        if recorded is not None:
            updated = ["written", "remote"]
            if status == "complete":
                updated += [*COUNTED, *CUT, "hooks"]
            content |= {**recorded, **{name: content[name] for name in updated}}
            if status == "complete":
                content["status"] = self._plan.repaired_status(self.totals.samples)
        return content

    def write(self, status: str, upload: bool = True) -> None:
        """Writes metadata.json. upload: whether also in a bucket."""
        self._owner.write_metadata(self.content(status), upload)

    def add(self, commit: Commit) -> None:
        """Counts a committed shard, and uploads the metrics from time to time."""
        self.totals.add(commit)
        if time.monotonic() - self._metrics_uploaded > METRICS_SECONDS:
            self.upload_metrics()

    def begin_metrics(self, anew: bool) -> None:
        """Deletes earlier metrics if the run begins anew; or else makes them the same in both
        folders, of which the local one may be on another disk than before."""
        if anew:
            self._metrics_file.unlink(missing_ok=True)
            if self._bucket is not None:
                self._bucket.remove_once(METRICS)  # if it is left, the next upload replaces it
        elif self._bucket is not None and not self._metrics_file.exists():
            data = self._bucket.read(METRICS)
            if data is not None:
                write_file(self._metrics_file, [data])
        self.upload_metrics()

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Appends a line to metrics.jsonl. Raises StorageError.

        Does nothing in a repair, because the file describes the run itself.
        """
        if self._plan.recorded is not None:
            return
        try:
            append_line(self._metrics_file, json.dumps(metrics))
        except OSError as error:
            raise StorageError(f"{self._metrics_file}: {reason_of(error)}") from error

    def upload_metrics(self) -> None:
        """Uploads the current content of metrics.jsonl."""
        self._metrics_uploaded = time.monotonic()
        if self._bucket is not None and self._metrics_file.exists():
            self._bucket.write(METRICS, self._metrics_file.read_bytes(), ANY)
