"""Writes a data set in the form that `datasets.load_from_disk` reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "data-00000-of-00001.arrow"


class ArrowFolder:
    """A data set that is written to an existing folder in batches of rows.

    Args:
        folder: The folder, which exists.
        columns: The feature type of each column, as `datasets.Features` takes it.
        form: The format in which `datasets` returns rows, "torch" for tensors. None for Python
            lists and numbers.
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
        """Appends a batch of rows.

        Args:
            rows: The values of each column, with as many entries as there are rows.
        """
        self._writer.write_batch(rows)

    def finalize(self) -> None:
        """Closes the Arrow file and writes state.json. No rows can be appended afterwards."""
        self._writer.finalize()
        state: dict[str, Any] = {
            "_data_files": [{"filename": FILE}],
            "_fingerprint": None,  # `datasets` computes one when it reads the folder
            "_format_columns": None if self._form is None else self._columns,
            "_format_kwargs": {},
            "_format_type": self._form,
            "_output_all_columns": False,
            "_split": None,
        }
        self._state_file.write_text(json.dumps(state, indent=2))
