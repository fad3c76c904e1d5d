"""Opens a data set as a stream of rows: JSON Lines or Parquet files, or a data set on the hub.

Files may be in a local folder or at a URL. Each row of a file comes with its position, for messages
about it; documents.py gives a row of a hub data set its number.
"""

import gzip
import json
import os
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
from fsspec.core import url_to_fs
from huggingface_hub import HfApi, constants

from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.common.log import log
from activation_extraction.common.retries import (
    hub_requests,
    hub_unreachable,
    name_unknown,
    unwritable_cache,
)
from activation_extraction.common.visible import plain_url
from activation_extraction.text.rows import Columns, UnusableRowError

PARQUET = (".parquet",)
JSON_LINES = (".jsonl", ".jsonl.gz")
READERS = 32  # files whose sizes or footers are read at the same time
# What stores say of a file's content: Google Cloud Storage, S3, Azure and HTTP servers.
VERSIONS = ("md5Hash", "crc32c", "ETag", "etag", "content_md5", "generation")
REPLACE = (
    "replace the damaged file by an intact one; if its size changes, the run cannot continue and "
    "needs --overwrite"
)
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, pyarrow.ArrowException)


@dataclass(frozen=True)
class FileRow:
    """A row of a file. `read` returns its columns, or raises UnusableRowError.

    where: its position, for messages. row: the same as it is stored with a sample.
    """

    where: str
    row: dict[str, Any]
    read: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class TextFile:
    """A file of a data set. size: in bytes.

    name: relative to the folder that the data set is, or is in, or that comes before its first
    wildcard. version: the checksum or version that the store of a URL has for its content, "" if
    it has none; for a file on this machine, when it was last modified.
    """

    url: str
    name: str
    size: int
    version: str = ""

    @property
    def local(self) -> bool:
        return "://" not in self.url


def list_files(path: str) -> list[TextFile]:
    """Lists JSON Lines and Parquet files: a file, a folder with its subfolders, a glob, or a URL.

    They are sorted. Raises InputError if there is none.
    """
    with _refusing(path), ThreadPoolExecutor(READERS) as pool:
        fs, root = url_to_fs(path)
        if fs.isfile(root):
            found = [root]
        elif any(c in root for c in "*?[") and not fs.exists(root):
            found = fs.glob(root)
        else:
            found = fs.find(root)
        # Below the folder that was asked for, hidden files are left-overs of editors and notebooks.
        visible = [name for name in found if "/." not in name.removeprefix(root)]
        known = sorted(name for name in visible if plain_url(name).endswith(PARQUET + JSON_LINES))
        if not known:
            kinds = ", ".join(JSON_LINES + PARQUET)
            exists = found or fs.isdir(root)
            what = f"has no files that end in {kinds}" if exists else "no such file or folder"
            raise InputError(f"--dataset_path {path}: {what}")
        folder = plain_url(
            root if fs.isdir(root) else re.split(r"[*?[]", root)[0].rpartition("/")[0]
        )
        return list(pool.map(partial(_describe, fs, folder), known))


def is_path(source: str) -> bool:
    """Returns whether a source is files, and not the name of a hub data set."""
    return "://" in source or any(c in source for c in "*?[") or os.path.exists(source)


def _describe(fs: Any, folder: str, path: str) -> TextFile:
    found = fs.info(path)
    relative = plain_url(path).partition(folder)[2].lstrip("/")
    name = os.fsencode(relative).decode(errors="backslashreplace")
    if "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol):
        return TextFile(path, name, found["size"], modified(found["mtime"]))
    version = next((f"{key} {found[key]}" for key in VERSIONS if found.get(key)), "")
    return TextFile(fs.unstrip_protocol(path), name, found["size"], version)


def modified(mtime: float) -> str:
    """Returns the version of a file on this machine. mtime: in seconds, as os.stat has it."""
    return f"modified {mtime!r}"


def open_files(
    path: str, columns: Columns, files: Sequence[TextFile] | None = None
) -> datasets.IterableDataset:
    """Opens the files of `path`. files: in the order in which they are read; None: as listed.

    Only the needed columns of Parquet files are read. Raises InputError if there are files of both
    kinds, or if a file is not what its name says.
    """
    files = list_files(path) if files is None else files
    parquet = [plain_url(file.url).endswith(PARQUET) for file in files]
    if any(parquet) and not all(parquet):
        raise InputError(
            f"--dataset_path {path}: holds both Parquet and JSON Lines; choose one of "
            "them, for example with a glob such as FOLDER/*.parquet"
        )
    with _refusing(path), _writable_cache():
        if not any(parquet):
            lines = {"urls": [file.url for file in files], "names": [file.name for file in files]}
            return datasets.IterableDataset.from_generator(json_lines, gen_kwargs=lines)
        with ThreadPoolExecutor(READERS) as pool:
            counts = pool.map(_row_groups, [file.url for file in files])
            pairs = zip(files, counts, strict=True)
            groups = [(file.url, file.name, n) for file, count in pairs for n in range(count)]
        if not groups:
            raise InputError(f"--dataset_path {path}: is empty; expected rows with text")
        urls, names, numbers = map(list, zip(*groups, strict=True))
        pieces = {"urls": urls, "names": names, "groups": numbers, "wanted": columns}
        return datasets.IterableDataset.from_generator(parquet_rows, gen_kwargs=pieces)


def _row_groups(url: str) -> int:
    with fsspec.open(url, "rb") as file:
        try:
            return pyarrow.parquet.ParquetFile(file).num_row_groups
        except pyarrow.ArrowException as error:
            raise InputError(f"--dataset_path {url}: {one_line(error)}") from error


@contextmanager
def _refusing(path: str) -> Iterator[None]:
    """Turns whatever a file system may raise inside the block into an InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"--dataset_path {path}: {one_line(error)}") from error


@contextmanager
def _writable_cache() -> Iterator[None]:
    """Inside the block, `datasets` has a cache that can be written: its own, or a temporary one.

    It asks for one whatever it opens, but streams keep nothing there.
    """
    cache = Path(datasets.config.HF_DATASETS_CACHE)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=cache).close()
    except OSError as error:
        log.warning(
            "%s: %s: a temporary folder takes the place of this cache of data sets; "
            "HF_DATASETS_CACHE names another one",
            *(cache, error.strerror),
        )
        with tempfile.TemporaryDirectory() as scratch:
            datasets.config.HF_DATASETS_CACHE = Path(scratch)
            try:
                yield
            finally:
                datasets.config.HF_DATASETS_CACHE = cache
    else:
        yield


def parquet_rows(
    urls: list[str], names: list[str], groups: list[int], wanted: Columns
) -> Iterator[FileRow]:
    """Yields the rows of row groups: group `groups[i]` of file `urls[i]`, called `names[i]`.

    Rows and row groups are counted from 0.
    """
    for (url, name), pairs in groupby(zip(urls, names, groups, strict=True), itemgetter(0, 1)):
        with _naming(url), fsspec.open(url, "rb") as file:
            parquet = pyarrow.parquet.ParquetFile(file)
            columns = wanted.among(parquet.schema_arrow.names)
            for *_, group in pairs:
                number = 0
                for batch in parquet.iter_batches(256, row_groups=[group], columns=columns):
                    for at in range(batch.num_rows):
                        where = f"{url} row group {group} row {number} (both from 0)"
                        row = {"file": name, "row_group": group, "row": number}
                        yield FileRow(where, row, partial(_arrow_row, batch.slice(at, 1)))
                        number += 1


def _arrow_row(batch: pyarrow.RecordBatch) -> dict[str, Any]:
    try:
        return batch.to_pylist()[0]
    except UnicodeDecodeError as error:
        raise UnusableRowError(f"not UTF-8: {error}") from error


def json_lines(urls: list[str], names: list[str]) -> Iterator[FileRow]:
    """Yields the lines of files, except blank ones; lines are counted from 1."""
    for url, name in zip(urls, names, strict=True):
        compression = "gzip" if plain_url(url).endswith(".gz") else None
        with _naming(url), fsspec.open(url, "rb", compression=compression) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    row = {"file": name, "line": number}
                    yield FileRow(f"{url} line {number}", row, partial(_json_object, line))


def _json_object(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.rstrip(b"\r\n"))
    except json.JSONDecodeError as error:  # its text adds a line number of its own
        raise UnusableRowError(f"not JSON: {error.msg}, column {error.colno}") from error
    except (ValueError, RecursionError) as error:
        raise UnusableRowError(f"not JSON: {one_line(error)}") from error
    if not isinstance(row, dict):
        raise UnusableRowError(f"expected a JSON object, found {type(row).__name__}")
    return row


@contextmanager
def _naming(url: str) -> Iterator[None]:
    """Adds the file's name to whatever a file system or a file format raises inside the block."""
    try:
        yield
    except Exception as error:
        remedy = REPLACE if isinstance(error, DAMAGE) else None
        raise RunError(f"{url}: {one_line(error)}", remedy=remedy) from error


def open_hub_dataset(
    name: str, config: str | None, split: str, revision: str | None = None
) -> tuple[datasets.IterableDataset, str]:
    """Opens a hub data set; returns its stream and its revision, by default the newest one.

    Raises InputError with the hub's reason if it cannot be opened.
    """
    wanted = " ".join(filter(None, (name, config, split)))
    try:
        if unreachable := hub_unreachable(constants.ENDPOINT):
            raise unreachable
        with hub_requests(f"--dataset_name {wanted}"), _writable_cache():
            revision = revision or str(HfApi().dataset_info(name).sha)
            rows = datasets.load_dataset(
                name, config, split=split, revision=revision, streaming=True
            )
        return rows, revision
    except Exception as error:  # whatever the hub, the network or a file format may raise
        reason = unwritable_cache(error) or one_line(error)
        if name_unknown(error):
            reason = "the hub's name does not resolve: offline? --dataset_path reads local files"
        raise InputError(f"--dataset_name {wanted}: {reason}") from error
