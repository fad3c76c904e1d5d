"""Where text comes from: a Hugging Face data set or files, streamed, and split between workers.

A stream yields the rows of one worker in a fixed order and can be continued from any state that it
reported. Rows without text are not documents. ARC-AGI rows are rendered by `arc_prompt`. A row that
cannot be used (not JSON, no such column, no text in it) is named with its place, or skipped.
"""

import logging
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
from fsspec.core import url_to_fs
from huggingface_hub import HfApi

from activation_extraction.cli.errors import InputError, RunError, one_line
from activation_extraction.cli.retries import hub_requests, name_unknown
from activation_extraction.text.rows import FileRow, UnusableRowError, json_lines, parquet_rows
from activation_extraction.text.workers import Worker

log = logging.getLogger("extract_activations")

PARQUET = (".parquet",)
JSON_LINES = (".jsonl", ".jsonl.gz")
# Below this many pieces per share, Parquet files are split into row groups for even shares.
PIECES_PER_SHARE = 16
READERS = 32  # files whose sizes or footers are read at the same time
CHECKED_ROWS = 1000  # one of the first so many rows must be usable
LOGGED_ROWS = 10  # of those that are skipped; there may be millions
SKIP = "add --skip_bad_rows (and leave out --overwrite) to skip such rows and continue"

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
        rows = parquet_rows if parquet else json_lines
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
    """The documents of one worker, in order. `skipped_rows` counts the rows that were skipped.

    Every row belongs to exactly one worker, and a machine's rows do not depend on how many hosts
    any machine has. Machines, and the hosts of a machine, take whole pieces (files or Parquet row
    groups) where there are enough of them; otherwise those that share a piece take its rows in
    turn.
    """

    def __init__(
        self,
        dataset: datasets.IterableDataset,
        text_column: str,
        worker: Worker | None = None,
        skip_bad_rows: bool = False,
    ) -> None:
        self.worker = worker or Worker()
        dataset, turn, turns = _share(dataset, self.worker.machine, self.worker.machines)
        self._dataset, again, hosts = _share(dataset, self.worker.host, self.worker.hosts)
        self._turn, self._turns = turn + turns * again, turns * hosts
        self._text_column = text_column
        self._skip_bad_rows = skip_bad_rows
        self.skipped_rows = 0
        self._rows = 0  # rows read of the pieces, those of other workers included
        self._position: dict[str, Any] | None = None  # of the data set; None before the first row

    def state(self) -> dict[str, Any]:
        """JSON-compatible position after the last row that was read."""
        return {"rows": self._rows, "skipped": self.skipped_rows, "dataset": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        """Makes the next iteration continue where `state` was taken."""
        self._rows, self._position = state["rows"], state["dataset"]
        self.skipped_rows = state["skipped"]

    def __iter__(self) -> Iterator[Document | None]:
        """One item per row of this worker; None for a row that is skipped or has no text.

        Raises RunError when reading fails, and for a row that cannot be used.
        """
        if self._position is not None:
            self._dataset.load_state_dict(self._position)
        rows = iter(self._dataset)
        while True:
            try:
                row = next(rows)
                self._position = self._dataset.state_dict()
            except StopIteration:
                return
            except Exception as error:  # whatever a file system or a file format may raise
                remedy = error.remedy if isinstance(error, RunError) else None
                where = "" if isinstance(error, RunError) else f" after {self._rows} rows"
                raise RunError(
                    f"reading the data set failed{where}: {one_line(error)}", remedy=remedy
                ) from error
            mine = self._rows % self._turns == self._turn
            self._rows += 1
            if mine:
                yield self._document(row)

    def _document(self, row: FileRow | dict[str, Any]) -> Document | None:
        """Of the row that was read last."""
        try:
            columns = row.read() if isinstance(row, FileRow) else row
            text = _text_of(columns, self._text_column)
        except UnusableRowError as error:
            where = row.where if isinstance(row, FileRow) else self._place(row)
            if not self._skip_bad_rows:
                raise RunError(f"a row cannot be used: {where}: {error}", remedy=SKIP) from error
            self.skipped_rows += 1
            level = logging.WARNING if self.skipped_rows <= LOGGED_ROWS else logging.DEBUG
            log.log(level, "a row is skipped: %s: %s", where, error)
            return None
        if text is None or not text.strip():
            return None
        return Document(_valid(text), _plain(columns.get("id")))

    def _place(self, row: dict[str, Any]) -> str:
        """Of the row of a hub data set that was read last."""
        whose = "of the data set" if self.worker == Worker() else "of those that this host reads"
        own_id = f", id {row['id']!r:.80}" if "id" in row else ""
        return f"row {self._rows - 1} (from 0) {whose}{own_id}"


def _share(
    dataset: datasets.IterableDataset, index: int, count: int
) -> tuple[datasets.IterableDataset, int, int]:
    """Share `index` of `count` of a data set: its pieces, and whose turn it is in them.

    Row n of the pieces belongs to the share when n % turns == turn; (pieces, turn, turns).
    """
    if count > 1 and dataset.num_shards < PIECES_PER_SHARE * count:
        dataset = dataset.reshard()
    pieces = dataset.num_shards
    if pieces >= count:
        return dataset.shard(num_shards=count, index=index), 0, 1
    piece = index % pieces
    turns = len(range(piece, count, pieces))
    return dataset.shard(num_shards=pieces, index=piece), index // pieces, turns


def check_dataset(
    dataset: datasets.IterableDataset, text_column: str, skip_bad_rows: bool = False
) -> None:
    """Raises InputError unless the first row can be used; to skip some, one of the first."""
    stream = DocumentStream(dataset, text_column, skip_bad_rows=skip_bad_rows)
    read = 0
    try:
        with hub_requests("the data set"):
            for read, _ in enumerate(islice(stream, CHECKED_ROWS), start=1):
                if read > stream.skipped_rows:
                    return
    except RunError as error:
        raise with_remedy(error) from error
    if not read:
        raise InputError("the data set is empty: it has no rows")
    raise InputError(f"--skip_bad_rows: none of the first {read} rows can be used, see above")


def with_remedy(error: RunError) -> InputError:
    """The same error, found before anything expensive starts."""
    return InputError(f"{error}; {error.remedy}" if error.remedy else str(error))


def _text_of(row: dict[str, Any], column: str) -> str | None:
    """Raises UnusableRowError where there is none, and no ARC-AGI task either."""
    if column in row:
        text = row[column]
        if text is not None and not isinstance(text, str):
            raise UnusableRowError(
                f"--text_column {column}: expected text, found {type(text).__name__} {text!r:.40}"
            )
        return text
    if isinstance(row.get("train"), list) and isinstance(row.get("test"), list):
        try:
            return arc_prompt(row)
        except (KeyError, TypeError) as error:
            raise UnusableRowError(f"a row in ARC-AGI form has no grids: {error!r}") from error
    raise UnusableRowError(f"--text_column {column}: no such column; there are {', '.join(row)}")


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
