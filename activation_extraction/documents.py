"""Where text comes from: a Hugging Face data set or files, streamed, and split between workers.

A stream yields the rows of one worker in a fixed order and can be continued from any state that it
reported. Rows without text are not documents. ARC-AGI rows are rendered by `arc_prompt`.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import datasets
import fsspec
import pyarrow
from fsspec.core import url_to_fs

from activation_extraction.errors import InputError, RunError

PARQUET = (".parquet",)
JSON_LINES = (".jsonl", ".jsonl.gz")
READ_ERRORS = (
    InputError,
    RunError,
    OSError,
    EOFError,
    ValueError,
    zlib.error,
    pyarrow.ArrowException,
)
# Below this many pieces per worker, Parquet files are split into row groups for an even share.
PIECES_PER_WORKER = 16


@dataclass(frozen=True)
class Document:
    """One row with non-empty text; `doc_id` is the row's own `id`, None when it has none."""

    text: str
    doc_id: str | int | None


def open_hub_dataset(name: str, config: str | None, split: str) -> datasets.IterableDataset:
    """A streamed data set of the hub. Raises InputError with the hub's reason if there is none."""
    try:
        return datasets.load_dataset(name, config, split=split, streaming=True)
    except (ValueError, OSError, RuntimeError) as error:
        wanted = " ".join(filter(None, (name, config, split)))
        raise InputError(f"--dataset_name {wanted}: {_one_line(error)}") from error


def open_files(path: str) -> datasets.IterableDataset:
    """JSON Lines or Parquet: a file, a folder (searched recursively) or a glob, local or a URL.

    Raises InputError when nothing is there, kinds are mixed, or a file is empty or no Parquet.
    """
    urls = _list_files(path)
    parquet = [url for url in urls if url.endswith(PARQUET)]
    if parquet and len(parquet) < len(urls):
        raise InputError(f"--dataset_path {path}: holds both Parquet and JSON Lines; choose one")
    # Reading local files must not call the hub (which waits for seconds without a network).
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        if parquet:
            return datasets.load_dataset("parquet", data_files=urls, split="train", streaming=True)
        return datasets.IterableDataset.from_generator(_json_lines, gen_kwargs={"urls": urls})
    except (ValueError, OSError, pyarrow.ArrowException) as error:
        raise InputError(f"--dataset_path {path}: {_one_line(error)}") from error


def _list_files(path: str) -> list[str]:
    try:
        fs, root = url_to_fs(path)
        if fs.isfile(root):
            found = [root]
        else:
            found = fs.glob(root) if any(c in root for c in "*?[") else fs.find(root)
    except (ValueError, ImportError, OSError) as error:
        raise InputError(f"--dataset_path {path}: {_one_line(error)}") from error
    known = sorted(name for name in found if name.endswith(PARQUET + JSON_LINES))
    if not known:
        what = "has none of these files" if found else "no such file or folder"
        raise InputError(f"--dataset_path {path}: {what}: {', '.join(JSON_LINES + PARQUET)}")
    local = "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)
    return known if local else [fs.unstrip_protocol(name) for name in known]


def _json_lines(urls: list[str]) -> Iterator[dict[str, Any]]:
    for url in urls:
        with fsspec.open(url, "rb", compression="infer") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _json_object(line, f"{url} line {number}")


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise RunError(f"{where}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RunError(f"{where}: expected a JSON object, found {type(row).__name__}")
    return row


def arc_prompt(row: dict[str, Any]) -> str:
    """The prompt for an ARC-AGI task: its training pairs, then each test input to be solved.

    A grid is one line per row, cells separated by spaces. The outputs of tests are left out.

        Example 1
        Input:
        0 1
        Output:
        1 0

        Test 1
        Input:
        1 1
        Output:
    """
    parts = [
        f"Example {n}\nInput:\n{_grid(pair['input'])}\nOutput:\n{_grid(pair['output'])}\n"
        for n, pair in enumerate(row["train"], start=1)
    ]
    parts += [
        f"Test {n}\nInput:\n{_grid(pair['input'])}\nOutput:\n"
        for n, pair in enumerate(row["test"], start=1)
    ]
    return "\n".join(parts)


def _grid(grid: list[list[int]]) -> str:
    return "\n".join(" ".join(map(str, row)) for row in grid)


class DocumentStream:
    """The documents of worker `rank` of `world`, in order.

    Every row belongs to exactly one worker. Workers take whole pieces (files or Parquet row groups)
    where there are enough of them; otherwise those that share a piece take its rows in turn.
    """

    def __init__(
        self, dataset: datasets.IterableDataset, text_column: str, rank: int = 0, world: int = 1
    ) -> None:
        if world > 1 and dataset.num_shards < PIECES_PER_WORKER * world:
            dataset = dataset.reshard()
        pieces = dataset.num_shards
        if pieces >= world:
            self._dataset = dataset.shard(num_shards=world, index=rank)
            self._turn, self._turns = 0, 1
        else:
            piece = rank % pieces
            self._dataset = dataset.shard(num_shards=pieces, index=piece)
            self._turn, self._turns = rank // pieces, len(range(piece, world, pieces))
        self._text_column = text_column
        self._rows = 0  # rows read of the pieces, those of other workers included
        self._position: dict[str, Any] | None = None  # of the data set; None before the first row

    def state(self) -> dict[str, Any]:
        """JSON-compatible position after the last row that was read."""
        return {"rows": self._rows, "dataset": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        """Makes the next iteration continue where `state` was taken."""
        self._rows, self._position = state["rows"], state["dataset"]

    def __iter__(self) -> Iterator[Document | None]:
        """One item per row of this worker; None for a row without text.

        Raises RunError for a row that cannot be read.
        """
        if self._position is not None:
            self._dataset.load_state_dict(self._position)
        try:
            for row in self._dataset:
                mine = self._rows % self._turns == self._turn
                self._rows += 1
                self._position = self._dataset.state_dict()
                if mine:
                    text = _text_of(row, self._text_column)
                    yield Document(text, row.get("id")) if text else None
        except READ_ERRORS as error:
            raise RunError(f"reading the data set failed: {_one_line(error)}") from error


def check_dataset(dataset: datasets.IterableDataset, text_column: str) -> None:
    """Raises InputError unless the first row can be read and has text, or is an ARC-AGI row."""
    try:
        row = next(iter(dataset), None)
    except READ_ERRORS as error:
        raise InputError(f"the data set cannot be read: {_one_line(error)}") from error
    if row is None:
        raise InputError("the data set is empty: it has no rows")
    _text_of(row, text_column)


def _text_of(row: dict[str, Any], column: str) -> str | None:
    if column in row:
        text = row[column]
        if text is not None and not isinstance(text, str):
            raise InputError(
                f"--text_column {column}: expected text, found {type(text).__name__} {text!r:.40}"
            )
        return text
    if isinstance(row.get("train"), list) and isinstance(row.get("test"), list):
        try:
            return arc_prompt(row)
        except (KeyError, TypeError) as error:
            raise InputError(f"a row in ARC-AGI form has no grids: {error!r}") from error
    raise InputError(f"--text_column {column}: no such column; there are {', '.join(row)}")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
