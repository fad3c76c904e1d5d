"""Opens text files as a stream: JSON Lines or Parquet, in a local folder or at a URL.

rows.py reads the rows in them.
"""

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
from fsspec.core import url_to_fs

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.visible import plain_url
from activation_extraction.text.hub import writable_cache
from activation_extraction.text.rows import json_lines, parquet_rows

PARQUET = (".parquet",)
JSON_LINES = (".jsonl", ".jsonl.gz")
READERS = 32  # files whose sizes or footers are read at the same time
# What stores say of a file's content: Google Cloud Storage, S3, Azure and HTTP servers.
VERSIONS = ("md5Hash", "crc32c", "ETag", "etag", "content_md5", "generation")


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


def open_files(path: str, text_column: str) -> datasets.IterableDataset:
    """Opens JSON Lines or Parquet: a file, a folder with all its subfolders, a glob, or a URL.

    Only the needed columns of Parquet files are read. Raises InputError if there is no such file,
    if there are files of both kinds, or if a file is not what its name says.
    """
    return open_listed(path, list_files(path), text_column)


def open_listed(path: str, files: Sequence[TextFile], text_column: str) -> datasets.IterableDataset:
    """Opens these files of `path`, in this order; see `open_files`."""
    parquet = [plain_url(file.url).endswith(PARQUET) for file in files]
    if any(parquet) and not all(parquet):
        raise InputError(
            f"--dataset_path {path}: holds both Parquet and JSON Lines; choose one of "
            "them, for example with a glob such as FOLDER/*.parquet"
        )
    try:
        pieces: dict[str, Any] = {
            "urls": [file.url for file in files],
            "names": [file.name for file in files],
        }
        if any(parquet):
            with ThreadPoolExecutor(READERS) as pool:
                counts = list(pool.map(_row_groups, pieces["urls"]))
            groups = [
                (file, n) for file, count in zip(files, counts, strict=True) for n in range(count)
            ]
            if not groups:
                raise InputError(f"--dataset_path {path}: is empty; expected rows with text")
            pieces = {
                "urls": [file.url for file, _ in groups],
                "names": [file.name for file, _ in groups],
                "groups": [n for _, n in groups],
                "text_column": text_column,
            }
        rows = parquet_rows if any(parquet) else json_lines
        with writable_cache():
            return datasets.IterableDataset.from_generator(rows, gen_kwargs=pieces)
    except InputError:
        raise
    except Exception as error:  # whatever a file system may raise
        raise InputError(f"--dataset_path {path}: {one_line(error)}") from error


def list_files(path: str) -> list[TextFile]:
    """The files that `open_files` would read, sorted. Raises InputError if there is none."""
    try:
        return _list_files(path)
    except InputError:
        raise
    except Exception as error:  # whatever a file system may raise
        raise InputError(f"--dataset_path {path}: {one_line(error)}") from error


def _list_files(path: str) -> list[TextFile]:
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
        exists = found or fs.isdir(root)
        kinds = ", ".join(JSON_LINES + PARQUET)
        what = f"has no files that end in {kinds}" if exists else "no such file or folder"
        raise InputError(f"--dataset_path {path}: {what}")
    folder = root if fs.isdir(root) else re.split(r"[*?[]", root)[0].rpartition("/")[0]
    folder = plain_url(folder)
    local = "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)

    def file_of(name: str) -> TextFile:
        found = fs.info(name)
        relative = plain_url(name).partition(folder)[2].lstrip("/")
        relative = os.fsencode(relative).decode(errors="backslashreplace")
        if local:
            return TextFile(name, relative, found["size"], modified(found["mtime"]))
        version = next((f"{key} {found[key]}" for key in VERSIONS if found.get(key)), "")
        return TextFile(fs.unstrip_protocol(name), relative, found["size"], version)

    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(file_of, known))


def modified(mtime: float) -> str:
    """The version of a file on this machine. mtime: in seconds, as os.stat has it."""
    return f"modified {mtime!r}"


def _row_groups(url: str) -> int:
    with fsspec.open(url, "rb") as file:
        try:
            return pyarrow.parquet.ParquetFile(file).num_row_groups
        except pyarrow.ArrowException as error:
            raise InputError(f"--dataset_path {url}: {one_line(error)}") from error
