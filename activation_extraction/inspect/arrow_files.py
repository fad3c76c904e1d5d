"""Writes a data set in the form that `datasets.load_from_disk` reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "data-00000-of-00001.arrow"


class ArrowFolder:
    """A data set in a folder that exists, written in batches of rows.

    columns: the type of each, of `datasets`. form: what rows are read as, "torch" for tensors.
    """

    def __init__(self, folder: Path, columns: Mapping[str, Any], form: str | None = None) -> None:
        import datasets
        from datasets.arrow_writer import ArrowWriter

        self._state_file = folder / "state.json"
        self._form = form
        self._columns = [*columns]
        features = datasets.Features(columns)
        datasets.DatasetInfo(features=features).write_to_directory(str(folder))
        self._writer = ArrowWriter(features=features, path=str(folder / FILE))

    def write(self, rows: Mapping[str, Any]) -> None:
        """Adds rows, by column."""
        self._writer.write_batch(rows)

    def finalize(self) -> None:
        """Completes the folder; nothing can be added after it."""
        self._writer.finalize()
        state: dict[str, Any] = dict.fromkeys(("_fingerprint", "_format_columns", "_split"))
        state |= {"_format_kwargs": {}, "_output_all_columns": False, "_format_type": self._form}
        state["_data_files"] = [{"filename": FILE}]  # `datasets` makes the fingerprint
        if self._form is not None:
            state["_format_columns"] = self._columns
        self._state_file.write_text(json.dumps(state, indent=2))
