"""Writes folders that `datasets.load_from_disk` of the package `datasets` reads.

Such a folder contains one Arrow file with the rows, and JSON files that describe it. The libraries
SAELens and speculators read such folders. sae_lens_files.py and draft_files.py choose the columns
and make the rows.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "data-00000-of-00001.arrow"  # name of the file with the rows


class ArrowFolder:
    """A data set of the package `datasets`, which is written to a folder in batches of rows.

    Args:
        folder: The folder, which must exist.
        type_by_column_name: The type of each column by its name, as `datasets.Features` takes it.
        row_format_name: Name of the format in which `datasets` returns the rows, such as "torch"
            for tensors. None for Python lists and numbers.
    """

    def __init__(
        self,
        folder: Path,
        type_by_column_name: Mapping[str, Any],
        row_format_name: str | None = None,
    ) -> None:
        import datasets
        from datasets.arrow_writer import ArrowWriter

        self._state_path = folder / "state.json"
        self._row_format_name = row_format_name
        self._column_names = [*type_by_column_name]
        column_features = datasets.Features(type_by_column_name)
        datasets.DatasetInfo(features=column_features).write_to_directory(str(folder))
        self._writer = ArrowWriter(features=column_features, path=str(folder / FILE))

    def write(self, rows: Mapping[str, Any]) -> None:
        """Appends a batch of rows.

        Args:
            rows: The values of the rows in each column, by the name of the column. All columns have
                one value for each row.
        """
        self._writer.write_batch(rows)

    def finalize(self) -> None:
        """Closes the Arrow file and writes state.json. No rows can be appended afterwards."""
        self._writer.finalize()
        state_fields: dict[str, Any] = {
            "_data_files": [{"filename": FILE}],
            "_fingerprint": None,  # `datasets` computes a fingerprint when it reads the folder
            "_format_columns": None if self._row_format_name is None else self._column_names,
            "_format_kwargs": {},
            "_format_type": self._row_format_name,
            "_output_all_columns": False,
            "_split": None,
        }
        self._state_path.write_text(json.dumps(state_fields, indent=2))
