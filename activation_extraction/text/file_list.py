"""Lists the files of a data set: decides which files are data and which are left out.

A source is a file, a folder with its subfolders, or a glob, on this machine or at a URL. All files
of a data set are of one kind, by their names; file_rows.py declares the kinds and reads the files.
Sources from which wrong rows would be stored silently are rejected: several splits, Delta tables, a
file that is listed twice.
"""

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.log import log
from activation_extraction.common.visible import counted, plain_url
from activation_extraction.text.file_rows import (
    ARROW,
    COMPRESSIONS,
    KINDS,
    DataFile,
    kind_of,
    uncompressed_name,
)

# Extensions of files that contain data but are not read -> how to convert such a file.
CONVERSIONS = {
    (".tsv", ".tab"): "save the columns with commas between them, as .csv",
    (".txt",): 'write a line {"text": ...} for each text into a .jsonl file',
    (".xlsx", ".xls", ".ods"): "save the sheet as .csv",
    (".zip", ".tar", ".tgz", ".7z"): "extract the archive",
    (".orc", ".avro", ".feather"): "convert it to .parquet",
}
# Files that `datasets` writes beside the data that it saves. STATE lists the data files of a
# folder, and SPLITS the splits of a data set, each of which has a folder.
STATE, SPLITS = "state.json", "dataset_dict.json"
SAVED_WITH_DATA = ("dataset_info.json", STATE, SPLITS)
DELTA_LOG = "_delta_log"  # the folder of a Delta table's log
# A word in a file name that names a split; `datasets` looks for the same words. Each split has a
# group of its own.
SPLIT_WORD = re.compile(
    r"(?:^|[-._/ ])(?:(train|training)|(test|testing|eval|evaluation)|(validation|valid|val|dev))"
    r"(?=[-._/ 0-9])"
)
WILDCARDS = "*?["
FILES_AT_ONCE = 32  # files whose size or metadata is requested in parallel
# Keys of a file's metadata that identify its content, in Google Cloud Storage, S3, Azure, HTTP
# servers and the hub.
VERSION_KEYS = ("md5Hash", "crc32c", "ETag", "etag", "content_md5", "generation", "blob_id")


def list_files(path: str) -> list[DataFile]:
    """Lists the files of a data set, and logs how many other files are left out.

    Args:
        path: Value of --dataset_path, or a source of --mix: a file, a folder, a glob, or a URL of
            one of them.

    Returns:
        The files of a single kind, sorted by their paths.

    Raises:
        InputError: If there is no data file, if there are several kinds or splits, if a folder is a
            Delta table, if a file is listed twice, or if the file system raises an error.
    """
    with as_input_errors(path), ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        if "://" in path:
            fs, root = url_to_fs(path)
        else:  # url_to_fs would take :: for a chain of URLs
            fs, root = fsspec.filesystem("file"), os.path.abspath(os.path.expanduser(path))
        if fs.isfile(root):
            if not kind_of(root):
                raise _no_data(path, "does not end in", [root])
            paths = [root]
            folder = plain_url(root).rpartition("/")[0]  # a query of a URL may contain a /
        else:
            paths, folder = _list_folder(path, fs, root)
        files = list(pool.map(partial(_describe, fs, plain_url(folder)), paths))
    refuse_repeated(files)
    return files


def is_path(source: str) -> bool:
    """Returns whether a source of --mix is a path, a glob or a URL, not a name on the hub."""
    if "://" in source or source.startswith(("/", ".")):
        return True
    if any(character in source for character in WILDCARDS):
        return True
    return kind_of(source) is not None or os.path.exists(source)


def refuse_repeated(files: Iterable[DataFile]) -> None:
    """Checks that no file is listed twice, even by different paths, which would store rows twice.

    Args:
        files: The files of one or several data sets.

    Raises:
        InputError: If a file is listed twice.
    """
    urls: dict[str, str] = {}  # the file itself, without links -> the path that lists it
    for file in files:
        target = os.path.realpath(file.url) if file.local else file.url
        if target in urls:
            alias = f", also as {urls[target]}" if urls[target] != file.url else ""
            raise InputError(
                f"--dataset_path {file.url}: is given twice{alias}; each of its rows would be "
                "stored twice; leave one of them out, for example with a glob"
            )
        urls[target] = file.url


@contextmanager
def as_input_errors(path: str) -> Iterator[None]:
    """Turns all errors in a `with` block, such as those of a file system, into an InputError.

    Args:
        path: The value of --dataset_path, or a file, which the message names.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        remedy = getattr(error, "remedy", None)
        message = f"{one_line(error)}; {remedy}" if remedy else one_line(error)
        raise InputError(f"--dataset_path {path}: {message}") from error


def _list_folder(path: str, fs: Any, root: str) -> tuple[list[str], str]:
    """Lists the data files of a folder or a glob, and logs how many other files are left out.

    Args:
        path: Value of the flag, for messages.
        fs: The file system of fsspec.
        root: The path of the folder, or the glob, in the file system.

    Returns:
        The paths of the data files, sorted.
        The folder to which the names of the files are relative.
    """
    is_glob = any(character in root for character in WILDCARDS) and not fs.exists(root)
    if is_glob:
        entries = fs.glob(root, detail=True)
        folder = re.split(f"[{re.escape(WILDCARDS)}]", root)[0].rpartition("/")[0]
    else:
        entries = fs.find(root, detail=True)
        folder = root
    paths = sorted(name for name, entry in entries.items() if entry["type"] != "directory")
    _refuse_delta_table(path, fs, folder, paths)
    data, left_out = _select(path, fs, root, paths)
    if not is_glob:
        _refuse_named_splits(path, root, data)
    if not data:
        if not (entries or fs.exists(root)):
            raise InputError(f"--dataset_path {path}: no such file or folder{_remedies([root])}")
        raise _no_data(path, "has no files that end in", entries or [root], left_out)
    if left_out:
        log.warning("reading %s of %s; left out: %s", counted(len(data), "file"), path, left_out)
    return data, folder


def _no_data(path: str, problem: str, names: Iterable[str], left_out: str = "") -> InputError:
    """Returns the error for a source without data files.

    Args:
        path: Value of the flag.
        problem: What is wrong, in words that continue with the extensions that are read.
        names: The files of the source, for which the message says how they can be converted.
        left_out: How many files were left out and why; "" if nothing was.
    """
    extensions = ", ".join(extension for kind in KINDS for extension in kind.extensions)
    message = f"{problem} {extensions} (JSON and CSV also compressed: {', '.join(COMPRESSIONS)})"
    if left_out:
        message += f"; left out: {left_out}"
    return InputError(f"--dataset_path {path}: {message}{_remedies(names)}")


def _remedies(names: Iterable[str]) -> str:
    """Returns advice on converting files, as clauses that each begin with a semicolon."""
    remedies: dict[str, None] = {}  # in the order of the files, each once
    for name in names:
        for extensions, remedy in CONVERSIONS.items():
            for extension in extensions:
                if uncompressed_name(name).endswith(extension):
                    remedies[f"; {extension} is not read: {remedy}"] = None
    return "".join(remedies)


def _select(path: str, fs: Any, root: str, paths: Sequence[str]) -> tuple[list[str], str]:
    """Selects the data files out of all files of a folder or glob.

    Args:
        path: Value of the flag, for messages.
        fs: The file system of fsspec.
        root: The path of the folder, or the glob, in the file system.
        paths: The sorted paths of all files.

    Returns:
        The paths of the data files.
        The numbers of other files and the reasons why they are left out, in words. Files that
        `datasets` writes beside its data, and hidden files that are not data, are not counted.

    Raises:
        InputError: If there are several kinds or saved splits.
    """
    reasons: dict[str, str] = {}  # path -> why it is left out; "" if it is not counted
    for name in paths:
        if _is_hidden(name, root):
            reasons[name] = "name or folder begins with . or _" if kind_of(name) else ""
        elif not kind_of(name):
            is_link = isinstance(fs, LocalFileSystem) and os.path.isdir(name)
            extension = os.path.splitext(name)[1]
            reasons[name] = "link to a folder" if is_link else extension or "no ending"
    arrow = [name for name in paths if name not in reasons and kind_of(name) is ARROW]
    if arrow:
        _refuse_saved_splits(path, paths, arrow)
        reasons |= {name: "" for name in paths if os.path.basename(name) in SAVED_WITH_DATA}
        for folder in sorted({os.path.dirname(name) for name in arrow}):
            listed = _files_in_state(fs, folder)
            for name in arrow:
                if os.path.dirname(name) == folder and listed is not None and name not in listed:
                    reasons[name] = f"not listed in {STATE}"
    data = [name for name in paths if name not in reasons]
    # .json files beside other data are settings more often than data.
    if not all(uncompressed_name(name).endswith(".json") for name in data):
        for name in data:
            if name.lower().endswith(".json"):
                reasons[name] = ".json beside other data"
        data = [name for name in data if name not in reasons]
    kinds_of_data = {kind_of(name) for name in data}
    kinds = [kind for kind in KINDS if kind in kinds_of_data]
    if len(kinds) > 1:
        raise InputError(
            f"--dataset_path {path}: holds both {kinds[-1].name} and {kinds[-2].name}; choose one "
            f"of them, for example with a glob such as FOLDER/*{kinds[-1].extensions[0]}"
        )
    counts = Counter(reason for reason in reasons.values() if reason)
    left_out = (f"{counted(count, 'file')} ({reason})" for reason, count in counts.items())
    return data, ", ".join(left_out)


def _is_hidden(name: str, root: str) -> bool:
    """Returns whether the name of a file, or of a folder below the root, begins with . or _.

    Such names have unfinished files of Spark, backups of editors, and logs of tables. A root or a
    glob may name them explicitly.
    """
    patterns = root.split("/")
    for part in name.removeprefix(root).split("/"):
        if part[:1] in (".", "_"):
            explicit = (p for p in patterns if p[:1] == part[0] and fnmatch(part, p))
            if not any(explicit):
                return True
    return False


def _refuse_delta_table(path: str, fs: Any, folder: str, paths: Sequence[str]) -> None:
    """Checks that no folder is a Delta table, which may contain files with deleted rows.

    Args:
        path: Value of the flag, for messages.
        fs: The file system of fsspec.
        folder: The path of the folder of the source in the file system.
        paths: The paths of all files.

    Raises:
        InputError: If a folder is a Delta table.
    """
    tables = {name.partition(f"/{DELTA_LOG}/")[0] for name in paths if f"/{DELTA_LOG}/" in name}
    # A glob may match the data and not the log.
    if tables or fs.isdir(f"{folder}/{DELTA_LOG}"):
        raise InputError(
            f"--dataset_path {path}: {min(tables, default=folder)} is a Delta table, whose files "
            "may hold rows that it no longer has; save its rows to files of their own, for example "
            "those of DeltaTable(FOLDER).to_pyarrow_table() from the package deltalake"
        )


def _files_in_state(fs: Any, folder: str) -> set[str] | None:
    """Returns the files that state.json lists as the data of a folder.

    `datasets` writes state.json when it saves data. A folder may also contain files of an earlier
    save, which state.json does not list.

    Args:
        fs: The file system of fsspec.
        folder: The path of the folder in the file system.

    Returns:
        The paths of the files; None if there is no state.json, or if it does not list files.

    Raises:
        InputError: If state.json is damaged, or if a file that it lists is missing.
    """
    state = f"{folder}/{STATE}"
    if not fs.isfile(state):
        return None
    try:
        entries = json.loads(fs.cat_file(state)).get("_data_files")
        paths = None if entries is None else {f"{folder}/{entry['filename']}" for entry in entries}
    except Exception as error:
        raise InputError(
            f"--dataset_path {state}: is damaged, but says which files count: {one_line(error)}"
        ) from error
    for name in sorted(paths or ()):
        if not fs.isfile(name):
            raise InputError(
                f"--dataset_path {state}: lists {os.path.basename(name)}, which is missing"
            )
    return paths


def _refuse_saved_splits(path: str, paths: Sequence[str], arrow: Sequence[str]) -> None:
    """Checks that no folder contains several splits of a data set that `datasets` saved.

    Args:
        path: Value of the flag, for messages.
        paths: The paths of all files.
        arrow: The paths of the Arrow files among them.

    Raises:
        InputError: If a folder contains several splits.
    """
    for name in paths:
        if os.path.basename(name) != SPLITS:
            continue
        folder = name.removesuffix(SPLITS)
        splits = {
            arrow_path.removeprefix(folder).split("/")[0]
            for arrow_path in arrow
            if arrow_path.startswith(folder)
        }
        if len(splits) > 1:
            raise InputError(
                f"--dataset_path {path}: {folder} holds several splits of a data set "
                f"({', '.join(sorted(splits))}); choose the folder of one of them"
            )


def _refuse_named_splits(path: str, root: str, data: Sequence[str]) -> None:
    """Checks that the data files of a folder do not belong to several splits by their names.

    Args:
        path: Value of the flag, for messages.
        root: The path of the folder in the file system.
        data: The paths of the data files.

    Raises:
        InputError: If the names of the files belong to several splits.
    """
    examples: dict[int | None, str] = {}  # group of SPLIT_WORD -> the first file of this split
    for name in data:
        if word := SPLIT_WORD.search(name.removeprefix(root).lower()):
            examples.setdefault(word.lastindex, name)
    if len(examples) > 1:
        raise InputError(
            f"--dataset_path {path}: holds files of several splits, such as "
            f"{' and '.join(sorted(examples.values()))}; choose those of one with a glob, or all "
            f"with {path.rstrip('/')}/**"
        )


def _describe(fs: Any, folder: str, path: str) -> DataFile:
    """Returns a file with its size and version.

    Args:
        fs: The file system of fsspec.
        folder: The folder that the name of the file is relative to; "" for the whole path.
        path: The path of the file in the file system.

    Raises:
        InputError: If the path is not a regular file.
    """
    plain = plain_url(path)
    relative = (plain.partition(folder)[2] if folder else plain).lstrip("/")
    name = os.fsencode(relative).decode(errors="backslashreplace")
    if isinstance(fs, LocalFileSystem):
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(
                f"--dataset_path {path}: is a named pipe, a socket or a device; expected a file"
            )
        return DataFile(path, name, status.st_size, str(status.st_mtime_ns))
    metadata = fs.info(path)  # from the listing, if the store's client caches it
    version = next((f"{key} {metadata[key]}" for key in VERSION_KEYS if metadata.get(key)), "")
    return DataFile(fs.unstrip_protocol(path), name, metadata["size"], version)
