"""RunRecord: what a run records about itself, in metadata.json and metrics.jsonl."""

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from activation_extraction.common.errors import StorageError
from activation_extraction.store.atomic_file import append_line, write_bytes
from activation_extraction.store.commit import FORMAT_VERSION
from activation_extraction.store.folder_lock import running_system
from activation_extraction.store.identity import Identity
from activation_extraction.store.metadata import METRICS
from activation_extraction.store.outline import Outline
from activation_extraction.store.ownership import Ownership
from activation_extraction.store.reasons import reason_of
from activation_extraction.store.sealed_json import seal
from activation_extraction.store.shard import Key
from activation_extraction.store.totals import ROW_COUNTS, Totals

SUMS = ("shards", "samples", "tokens", "bytes", "hooks")  # in metadata.json


class Sources(Protocol):
    """The files that samples come from. grown: whether they have rows that they did not have."""

    grown: bool

    def settle(self) -> bool:
        """Waits until it is known what all files are that were read; whether that is news."""
        ...

    def to_json(self) -> list[dict[str, Any]]: ...


class RunRecord:
    """Writes both files to a local folder, and metadata.json to the bucket as well.

    local, ownership: the right to write to the folder, and to the bucket. hooks: key, name and
    whatever else is known of each hook. owner: a name for this process. sources: of the samples.
    more: what else the caller wants recorded. A repair keeps what is `recorded` already, except the
    sums.
    """

    def __init__(
        self,
        local: Ownership,
        ownership: Ownership | None,
        hooks: Mapping[Key, Mapping[str, Any]],
        identity: Identity,
        max_samples: int | None,
        owner: str,
        sources: Sources | None,
        more: Mapping[str, Any],
    ) -> None:
        self.recorded: Mapping[str, Any] | None = None
        self._local = local
        self._folder = Path(local.folder.url)
        self._remote = None if ownership is None else ownership.folder
        self._ownership = ownership
        self._hooks = hooks
        self._identity = identity
        self._max_samples = max_samples
        self._owner = owner
        self._sources = sources
        self._more = more
        self._writing = threading.Lock()
        self._metrics: Mapping[str, Any] = {}  # the last ones
        self.begin()

    def begin(self) -> None:
        """Makes the run's seconds count from now."""
        self._began = time.perf_counter()

    def write(
        self,
        status: str,
        totals: Totals,
        outline: Outline,
        counted: bool = True,
        upload: bool = True,
    ) -> None:
        """Writes metadata.json. counted: whether `totals` are those of all that is stored."""
        content = self._content(status, totals)
        if self.recorded is not None:
            own = ("owner", "written", *(SUMS if counted else ()))
            content |= {**self.recorded, **{name: content[name] for name in own}}
        if self._remote is not None:
            content["outline"] = {**outline.to_json(), "metrics": self._metrics}
        with self._writing:
            self._local.put_metadata(seal(content))
        if self._ownership is not None and upload:
            self._ownership.put_metadata(seal(content))

    def _content(self, status: str, totals: Totals) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "status": status,
            "shards": totals.shards,
            "samples": totals.samples,
            "tokens": totals.tokens,
            "bytes": totals.bytes,
            **{name: getattr(totals, name) for name in ROW_COUNTS},
            "max_samples": self._max_samples,
            "seconds": round(time.perf_counter() - self._began, 3),
            "written": round(time.time(), 3),
            "owner": self._owner,
            "system": running_system(),
            "remote": None if self._remote is None else self._remote.url,
            "hooks": [
                {**self._hooks[key], **statistics.to_json()}
                for key, statistics in totals.statistics.items()
            ],
            "identity": self._identity.to_json(),
            "data_files": [] if self._sources is None else self._sources.to_json(),
            **self._more,
        }

    def fetch_metrics(self) -> None:
        """Gets earlier metrics from the bucket, if this disk does not have them."""
        path = self._folder / METRICS
        if self._remote is not None and not path.exists():
            data = self._remote.read(METRICS)
            if data is not None:
                write_bytes(path, data)

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Appends a line to metrics.jsonl. Raises StorageError."""
        self._metrics = metrics
        try:
            append_line(self._folder / METRICS, json.dumps(metrics))
        except OSError as error:
            raise StorageError(f"{self._folder / METRICS}: {reason_of(error)[0]}") from error
