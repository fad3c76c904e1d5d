"""Where text comes from: a Hugging Face data set or files, streamed, and split between workers.

A stream yields the rows of one worker in a fixed order and can be continued from any state that it
reported. Rows without text are not documents. ARC-AGI rows are rendered by `arc_prompt`.
"""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
from fsspec.core import url_to_fs
from huggingface_hub import HfApi

from activation_extraction.cli.errors import InputError, RunError, one_line
from activation_extraction.cli.retries import hub_requests, name_unknown

PARQUET = (".parquet",)
JSON_LINES = (".jsonl", ".jsonl.gz")
OTHER_COLUMNS = ("id", "train", "test")
# Below this many pieces per worker, Parquet files are split into row groups for an even share.
PIECES_PER_WORKER = 16
READERS = 32  # files whose sizes or footers are read at the same time


DocId = str | int | float | None


@dataclass(frozen=True)
class Document:
    """One row with non-empty text; `doc_id` is the row's own `id`, None when it has none."""

    text: str
    doc_id: DocId


def open_hub_dataset(
    name: str, config: str | None, split: str, revision: str | None = None
) -> tuple[datasets.IterableDataset, str]:
    """A streamed data set of the hub at a revision, the newest one by default, and which it is.

    Raises InputError with the hub's reason if there is none.
    """
    wanted = " ".join(filter(None, (name, config, split)))
    try:
        with hub_requests(f"--dataset_name {wanted}"):
            revision = revision or str(HfApi().dataset_info(name).sha)
            found = datasets.load_dataset(
                name, config, split=split, revision=revision, streaming=True
            )
        return found, revision
    except Exception as error:  # whatever the hub, the network or a file format may raise
        reason = one_line(error)
        if name_unknown(error):
            reason = "the hub's name does not resolve: offline? --dataset_path reads local files"
        raise InputError(f"--dataset_name {wanted}: {reason}") from error


def open_files(path: str, text_column: str) -> datasets.IterableDataset:
    """JSON Lines or Parquet: a file, a folder (searched recursively) or a glob, local or a URL.

    Of Parquet only the columns that are needed are read. Raises InputError when nothing is there,
    kinds are mixed, or a file is no Parquet.
    """
    try:
        urls = _list_files(path)
        parquet = [url for url in urls if url.endswith(PARQUET)]
        if parquet and len(parquet) < len(urls):
            raise InputError(
                f"--dataset_path {path}: holds both Parquet and JSON Lines; choose one"
            )
        pieces: dict[str, Any] = {"urls": urls}
        if parquet:
            with ThreadPoolExecutor(READERS) as pool:
                counts = list(pool.map(_row_groups, urls))
            pairs = zip(urls, counts, strict=True)
            groups = [(url, n) for url, count in pairs for n in range(count)]
            if not groups:
                raise InputError(f"--dataset_path {path}: is empty: no rows")
            pieces = {
                "urls": [url for url, _ in groups],
                "groups": [n for _, n in groups],
                "text_column": text_column,
            }
        rows = _parquet_rows if parquet else _json_lines
        return datasets.IterableDataset.from_generator(rows, gen_kwargs=pieces)
    except InputError:
        raise
    except Exception as error:  # whatever a file system may raise
        raise InputError(f"--dataset_path {path}: {one_line(error)}") from error


def _list_files(path: str) -> list[str]:
    fs, root = url_to_fs(path)
    if fs.isfile(root):
        found = [root]
    elif any(c in root for c in "*?[") and not fs.exists(root):
        found = fs.glob(root)
    else:
        found = fs.find(root)
    # Hidden below the folder that was asked for: left-overs of editors and notebooks.
    visible = [name for name in found if "/." not in name.removeprefix(root)]
    known = sorted(name for name in visible if name.endswith(PARQUET + JSON_LINES))
    if not known:
        exists = found or fs.isdir(root)
        what = "has none of these files" if exists else "no such file or folder"
        raise InputError(f"--dataset_path {path}: {what}: {', '.join(JSON_LINES + PARQUET)}")
    local = "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)
    return known if local else [fs.unstrip_protocol(name) for name in known]


def describe_files(path: str) -> list[tuple[str, int]]:
    """Name and size in bytes of every file that `open_files` would read.

    Names begin below the folder that `path` is, or lies in, or has before its first wildcard.
    """
    fs, root = url_to_fs(path)
    folder = root if fs.isdir(root) else re.split(r"[*?[]", root)[0].rpartition("/")[0]
    urls = _list_files(path)
    names = [url[url.index(folder) + len(folder) :].lstrip("/") for url in urls]
    with ThreadPoolExecutor(READERS) as pool:
        return list(zip(names, pool.map(fs.size, urls), strict=True))


def _row_groups(url: str) -> int:
    with fsspec.open(url, "rb") as file:
        try:
            return pyarrow.parquet.ParquetFile(file).num_row_groups
        except pyarrow.ArrowException as error:
            raise InputError(f"--dataset_path {url}: {one_line(error)}") from error


def _parquet_rows(urls: list[str], groups: list[int], text_column: str) -> Iterator[dict[str, Any]]:
    """The rows of these row groups (group `groups[i]` of file `urls[i]`)."""
    for url, pairs in groupby(zip(urls, groups, strict=True), key=itemgetter(0)):
        with _naming(url), fsspec.open(url, "rb") as file:
            parquet = pyarrow.parquet.ParquetFile(file)
            columns = parquet.schema_arrow.names
            wanted = [c for c in (text_column, *OTHER_COLUMNS) if c in columns]
            if text_column not in columns and not {"train", "test"} <= set(columns):
                raise InputError(
                    f"--text_column {text_column}: no such column in {url}; "
                    f"there are {', '.join(columns)}"
                )
            for _, group in pairs:
                for batch in parquet.iter_batches(256, row_groups=[group], columns=wanted):
                    yield from batch.to_pylist()


def _json_lines(urls: list[str]) -> Iterator[dict[str, Any]]:
    for url in urls:
        with _naming(url), fsspec.open(url, "rb", compression="infer") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _json_object(line, f"{url} line {number}")


@contextmanager
def _naming(url: str) -> Iterator[None]:
    """Whatever fails within says with which file."""
    try:
        yield
    except (InputError, RunError):
        raise
    except Exception as error:  # whatever a file system or a file format may raise
        raise RunError(f"{url}: {one_line(error)}") from error


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{where}: not JSON: {one_line(error)}") from error
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
                    yield Document(_valid(text), _plain(row.get("id"))) if text else None
        except Exception as error:  # as in check_dataset
            raise RunError(f"reading the data set failed: {one_line(error)}") from error


def check_dataset(dataset: datasets.IterableDataset, text_column: str) -> None:
    """Raises InputError unless the first row can be read and has text, or is an ARC-AGI row."""
    try:
        with hub_requests("the data set"):
            row = next(iter(dataset), None)
    except Exception as error:  # whatever a file system or a file format may raise
        raise InputError(f"the data set cannot be read: {one_line(error)}") from error
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


def _valid(text: str) -> str:
    """Without lone surrogates, which JSON may hold and UTF-8 may not."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _plain(doc_id: Any) -> DocId:
    """Dates, decimals and other objects as text: a shard holds plain values only."""
    return doc_id if doc_id is None or type(doc_id) in (str, int, float) else str(doc_id)
