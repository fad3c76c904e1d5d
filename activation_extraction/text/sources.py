"""Opens a data set as a stream of rows: files of one kind, or a data set on the hub.

Files may be in a local folder or at a URL; file_rows.py reads them. Each row of a file comes with
its position, for messages about it; documents.py gives a row of a hub data set its number.
"""

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import fsspec
import pyarrow
import pyarrow.parquet
from fsspec.core import url_to_fs
from huggingface_hub import HfApi, constants

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.log import log
from activation_extraction.common.retries import (
    hub_requests,
    hub_unreachable,
    name_unknown,
    unwritable_cache,
)
from activation_extraction.common.visible import plain_url
from activation_extraction.text.file_rows import (
    FileRow,
    arrow_rows,
    csv_rows,
    json_lines,
    json_rows,
    parquet_rows,
)
from activation_extraction.text.rows import Columns

JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")
# A kind of files and how their names end.
KINDS = {
    "JSON Lines": JSON_LINES,
    "JSON": (".json",),
    "CSV": (".csv",),
    "Parquet": (".parquet",),
    "Arrow": (".arrow",),
}
# What `datasets` writes beside the data in its folders, which each have the first of these.
BESIDE_DATA = ("dataset_info.json", "state.json", "cache-*.arrow")
SPLITS = "/dataset_dict.json"  # in a folder of such folders, one per split
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

    @property
    def local(self) -> bool:
        return "://" not in self.url


def list_files(path: str) -> list[TextFile]:
    """Lists the files of a data set: a file, a folder with its subfolders, a glob, or a URL.

    They are sorted. Raises InputError if there is none, or if a folder holds several splits.
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
        known = sorted(name for name in visible if kind_of(name))
        if found != [root]:
            _refuse_splits(path, fs, known)
            known = _without_metadata(known)
        if not known:
            kinds = ", ".join(end for ends in KINDS.values() for end in ends)
            exists = found or fs.isdir(root)
            what = f"has no files that end in {kinds}" if exists else "no such file or folder"
            raise InputError(f"--dataset_path {path}: {what}")
        folder = plain_url(
            root if fs.isdir(root) else re.split(r"[*?[]", root)[0].rpartition("/")[0]
        )
        return list(pool.map(partial(_describe, fs, folder), known))


def is_path(source: str) -> bool:
    """Returns whether a source is files, by its form, and not the name of a hub data set."""
    formed = "://" in source or any(c in source for c in "*?[") or source.startswith(("/", "."))
    return formed or kind_of(source) is not None or os.path.exists(source)


def kind_of(url: str) -> str | None:
    """Returns which of KINDS a file is by its name; None: it is no data."""
    name = plain_url(url)
    return next((kind for kind, ends in KINDS.items() if name.endswith(ends)), None)


def _refuse_splits(path: str, fs: Any, names: Sequence[str]) -> None:
    """Raises InputError if `datasets` has saved several splits there: they are not one data set."""
    arrow = [name for name in names if kind_of(name) == "Arrow"]
    for folder in (name.removesuffix(SPLITS) for name in names if name.endswith(SPLITS)):
        inside = [
            name.removeprefix(f"{folder}/") for name in arrow if name.startswith(f"{folder}/")
        ]
        splits = sorted({name.split("/")[0] for name in inside})
        if len(splits) > 1:
            where = folder if _is_local(fs) else fs.unstrip_protocol(folder)
            raise InputError(
                f"--dataset_path {path}: holds several splits of a data set ({', '.join(splits)}); "
                f"choose one of them, such as {where}/{splits[0]}"
            )


def _without_metadata(names: Sequence[str]) -> list[str]:
    """The files without what `datasets` adds, and without JSON beside data of another kind."""
    parts = {name: name.rpartition("/") for name in names}
    saved = {folder for folder, _, last in parts.values() if last == BESIDE_DATA[0]}
    data = [
        name
        for name, (folder, _, last) in parts.items()
        if not name.endswith(SPLITS)
        and not (folder in saved and any(fnmatch(last, pattern) for pattern in BESIDE_DATA))
    ]
    return [name for name in data if kind_of(name) != "JSON"] or data


def _describe(fs: Any, folder: str, path: str) -> TextFile:
    found = fs.info(path)
    relative = plain_url(path).partition(folder)[2].lstrip("/")
    name = os.fsencode(relative).decode(errors="backslashreplace")
    if _is_local(fs):
        return TextFile(path, name, found["size"], modified(found["mtime"]))
    version = next((f"{key} {found[key]}" for key in VERSIONS if found.get(key)), "")
    return TextFile(fs.unstrip_protocol(path), name, found["size"], version)


def _is_local(fs: Any) -> bool:
    return "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol)


def modified(mtime: float) -> str:
    """Returns the version of a file on this machine. mtime: in seconds, as os.stat has it."""
    return f"modified {mtime!r}"


def open_files(
    path: str, columns: Columns, files: Sequence[TextFile] | None = None
) -> datasets.IterableDataset:
    """Opens the files of `path`. files: in the order in which they are read; None: as listed.

    Only the needed columns of Parquet and Arrow files are read. Raises InputError if there are
    files of several kinds, or if a Parquet file is not what its name says.
    """
    files = list_files(path) if files is None else files
    kinds = [kind for kind in reversed(KINDS) if kind in {kind_of(file.url) for file in files}]
    if len(kinds) > 1:
        raise InputError(
            f"--dataset_path {path}: holds both {kinds[0]} and {kinds[1]}; choose one of "
            f"them, for example with a glob such as FOLDER/*{KINDS[kinds[0]][0]}"
        )
    pieces: dict[str, Any] = {
        "urls": [file.url for file in files],
        "names": [file.name for file in files],
    }
    with _refusing(path), _writable_cache():
        if kinds == ["Parquet"]:
            return _open_row_groups(path, files, columns)
        if kinds == ["Arrow"]:
            pieces["wanted"] = columns
        readers: dict[str, Callable[..., Iterator[FileRow]]] = {
            "JSON Lines": json_lines,
            "JSON": json_rows,
            "CSV": csv_rows,
            "Arrow": arrow_rows,
        }
        return datasets.IterableDataset.from_generator(readers[kinds[0]], gen_kwargs=pieces)


def _open_row_groups(
    path: str, files: Sequence[TextFile], wanted: Columns
) -> datasets.IterableDataset:
    with ThreadPoolExecutor(READERS) as pool:
        counts = pool.map(_row_groups, [file.url for file in files])
        pairs = zip(files, counts, strict=True)
        groups = [(file.url, file.name, n) for file, count in pairs for n in range(count)]
    if not groups:
        raise InputError(f"--dataset_path {path}: is empty; expected rows with text")
    urls, names, numbers = map(list, zip(*groups, strict=True))
    pieces = {"urls": urls, "names": names, "groups": numbers, "wanted": wanted}
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
