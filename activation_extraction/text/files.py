"""Opens text files as a stream: JSON Lines or Parquet, in a local folder or at a URL.

rows.py reads the rows in them.
"""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
from fsspec.core import url_to_fs

from activation_extraction.cli.errors import InputError, one_line
from activation_extraction.cli.visible import plain_url
from activation_extraction.text.hub import writable_cache
from activation_extraction.text.rows import json_lines, parquet_rows

PARQUET = (".parquet",)
JSON_LINES = (".jsonl", ".jsonl.gz")
READERS = 32  # files whose sizes or footers are read at the same time


def open_files(path: str, text_column: str) -> datasets.IterableDataset:
    """Opens JSON Lines or Parquet: a file, a folder with all its subfolders, a glob, or a URL.

    Only the needed columns of Parquet files are read. Raises InputError if there is no such file,
    if there are files of both kinds, or if a file is not what its name says.
    """
    try:
        urls = _list_files(path)
        parquet = [url for url in urls if plain_url(url).endswith(PARQUET)]
        if parquet and len(parquet) < len(urls):
            raise InputError(
                f"--dataset_path {path}: holds both Parquet and JSON Lines; choose one of "
                "them, for example with a glob such as FOLDER/*.parquet"
            )
        pieces: dict[str, Any] = {"urls": urls}
        if parquet:
            with ThreadPoolExecutor(READERS) as pool:
                counts = list(pool.map(_row_groups, urls))
            pairs = zip(urls, counts, strict=True)
            groups = [(url, n) for url, count in pairs for n in range(count)]
            if not groups:
                raise InputError(f"--dataset_path {path}: is empty; expected rows with text")
            pieces = {
                "urls": [url for url, _ in groups],
                "groups": [n for _, n in groups],
                "text_column": text_column,
            }
        rows = parquet_rows if parquet else json_lines
        with writable_cache():
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
    # Below the folder that was asked for, hidden files are left-overs of editors and notebooks.
    visible = [name for name in found if "/." not in name.removeprefix(root)]
    known = sorted(name for name in visible if plain_url(name).endswith(PARQUET + JSON_LINES))
    if not known:
        exists = found or fs.isdir(root)
        kinds = ", ".join(JSON_LINES + PARQUET)
        what = f"has no files that end in {kinds}" if exists else "no such file or folder"
        raise InputError(f"--dataset_path {path}: {what}")
    local = "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)
    return known if local else [fs.unstrip_protocol(name) for name in known]


def describe_files(path: str) -> list[tuple[str, int]]:
    """The name and the size in bytes of every file that `open_files` would read.

    Names are relative to the folder that `path` is, or is in, or names before its first wildcard,
    and without what signs a URL.
    """
    fs, root = url_to_fs(path)
    folder = root if fs.isdir(root) else re.split(r"[*?[]", root)[0].rpartition("/")[0]
    urls, folder = _list_files(path), plain_url(folder)
    names = [plain.partition(folder)[2].lstrip("/") for plain in map(plain_url, urls)]
    with ThreadPoolExecutor(READERS) as pool:
        return list(zip(names, pool.map(fs.size, urls), strict=True))


def _row_groups(url: str) -> int:
    with fsspec.open(url, "rb") as file:
        try:
            return pyarrow.parquet.ParquetFile(file).num_row_groups
        except pyarrow.ArrowException as error:
            raise InputError(f"--dataset_path {url}: {one_line(error)}") from error
