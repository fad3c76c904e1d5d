"""metrics.jsonl: a file with the speed of a run over time, one line for each report of progress.

Nothing depends on this file, and it is not part of the log (run_log.py). A killed process may leave
an incomplete last line, and the copy in a bucket is a few minutes old. The docstring of the package
`store` describes the fields of a line.
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
UPLOAD_SECONDS = 300  # seconds between two uploads to a bucket
TAIL_BYTES = 4096  # bytes read from the end of metrics.jsonl, enough for a whole line


class MetricsFile:
    """Writes the file metrics.jsonl of one host, and copies it to a bucket.

    Args:
        folder: Local folder of the host.
        bucket: Folder of the host in a bucket; None if there is no bucket.
    """

    def __init__(self, folder: Path, bucket: Folder | None) -> None:
        self._metrics_path = folder / METRICS
        self._bucket_folder = bucket
        self._last_upload_time = time.monotonic()

    def begin(self, anew: bool) -> None:
        """Prepares the file before lines are appended, and uploads it.

        If the run is continued on another machine, the local file is missing, and is first
        downloaded from the bucket.

        Args:
            anew: Whether a new run begins, so that earlier metrics are deleted.
        """
        if anew:
            self._metrics_path.unlink(missing_ok=True)
            if self._bucket_folder is not None:
                # The result does not matter: if the file is not deleted, the next upload replaces
                # it.
                self._bucket_folder.remove_once(METRICS)
        elif self._bucket_folder is not None and not self._metrics_path.exists():
            uploaded_content = self._bucket_folder.read(METRICS)
            if uploaded_content is not None:
                write_file(self._metrics_path, [uploaded_content])
        self.upload()

    def append(self, metrics: Mapping[str, Any]) -> None:
        """Appends a line to the local file.

        Args:
            metrics: Metrics by name, with values that JSON can represent.

        Raises:
            StorageError: If the line cannot be written.
        """
        try:
            append_line(self._metrics_path, json.dumps(metrics))
        except OSError as error:
            raise StorageError(f"{self._metrics_path}: {reason_of(error)}") from error

    def upload(self) -> None:
        """Uploads the file to the bucket if there is one."""
        self._last_upload_time = time.monotonic()
        if self._bucket_folder is not None and self._metrics_path.exists():
            self._bucket_folder.write(METRICS, self._metrics_path.read_bytes(), ANY)

    def upload_if_due(self) -> None:
        """Uploads the file to the bucket if the last upload was more than UPLOAD_SECONDS ago."""
        if time.monotonic() - self._last_upload_time > UPLOAD_SECONDS:
            self.upload()


def last_metrics(folder: Folder, size: int) -> dict[str, Any]:
    """Returns the numbers in the last complete line of metrics.jsonl, by name.

    The dict is empty if the file has no complete line. The numbers are not checked, because they
    are only shown to the user.

    Args:
        folder: Folder of the host.
        size: Size of the file in bytes; 0 if there is no file.
    """
    last_bytes = folder.read_range(METRICS, max(0, size - TAIL_BYTES), size)
    for metrics_line in reversed(bytes(last_bytes or b"").splitlines()):
        with suppress(ValueError, RecursionError):
            metric_by_name = json.loads(metrics_line)
            if isinstance(metric_by_name, dict):
                return {
                    metric_name: metric_value
                    for metric_name, metric_value in metric_by_name.items()
                    if type(metric_value) in (int, float)
                }
    return {}
