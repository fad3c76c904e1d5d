"""metrics.jsonl: the speed of a run over time, a line for each report of its progress.

Nothing depends on this file, and it is not part of the log (run_log.py): a killed process may leave
an incomplete last line, and the file in a bucket is a few minutes behind the local one. The
package's docstring names the fields.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from activation_extraction.common.errors import StorageError, reason_of
from activation_extraction.store.folder import ANY, Folder
from activation_extraction.store.local_files import append_line, write_file

METRICS = "metrics.jsonl"
UPLOAD_SECONDS = 300  # between uploads
TAIL = 4096  # bytes at the end of metrics.jsonl, more than a line has


class MetricsFile:
    """The metrics.jsonl of one host, in its local folder and, as a copy, in a bucket.

    Args:
        folder: Local folder of the host.
        bucket: Folder of the host in a bucket; None if there is none.
    """

    def __init__(self, folder: Path, bucket: Folder | None) -> None:
        self._path = folder / METRICS
        self._bucket = bucket
        self._uploaded = time.monotonic()

    def begin(self, anew: bool) -> None:
        """Prepares the file before lines are appended.

        Args:
            anew: Whether the run begins anew, so that earlier metrics are deleted. Otherwise they
                are made the same in both folders, since the local one may be on another disk than
                before.
        """
        if anew:
            self._path.unlink(missing_ok=True)
            if self._bucket is not None:
                self._bucket.remove_once(METRICS)  # if it is left, the next upload replaces it
        elif self._bucket is not None and not self._path.exists():
            content = self._bucket.read(METRICS)
            if content is not None:
                write_file(self._path, [content])
        self.upload()

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Appends a line. Raises StorageError if it cannot be written."""
        try:
            append_line(self._path, json.dumps(metrics))
        except OSError as error:
            raise StorageError(f"{self._path}: {reason_of(error)}") from error

    def upload(self) -> None:
        """Uploads the current content."""
        self._uploaded = time.monotonic()
        if self._bucket is not None and self._path.exists():
            self._bucket.write(METRICS, self._path.read_bytes(), ANY)

    def upload_if_due(self) -> None:
        """Uploads the current content unless that was done in the last UPLOAD_SECONDS."""
        if time.monotonic() - self._uploaded > UPLOAD_SECONDS:
            self.upload()


def last_metrics(folder: Folder, size: int) -> dict[str, Any]:
    """Returns the numbers in the last complete line of metrics.jsonl, by name.

    They are only shown to the user. There are none if the file has no such line.

    Args:
        folder: The folder of the host.
        size: Size of the file in bytes; 0 if there is none.
    """
    tail = folder.read_range(METRICS, max(0, size - TAIL), size)
    for line in reversed(bytes(tail or b"").splitlines()):
        with suppress(ValueError, RecursionError):
            metrics = json.loads(line)
            if isinstance(metrics, dict):
                return {
                    name: value for name, value in metrics.items() if type(value) in (int, float)
                }
    return {}
