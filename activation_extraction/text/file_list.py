"""Lists the files of a data set, and decides which files are data and which are left out.

A data set is a file, a folder with its subfolders, or a glob, on this machine or at a URL. By their
names, all data files must be of the same kind, such as Parquet. file_rows.py declares the kinds and
reads the files. Some data sets are rejected because wrong rows would be stored without a warning:
folders with several splits, Delta tables, and files that are listed twice.
"""

import itertools
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
# `datasets` writes these files beside the data files that it saves. state.json lists the data files
# of a folder. dataset_dict.json lists the splits of a data set, each of which has its own folder.
STATE_FILE = "state.json"
SPLITS_FILE = "dataset_dict.json"
FILES_SAVED_WITH_DATA = ("dataset_info.json", STATE_FILE, SPLITS_FILE)
DELTA_LOG = "_delta_log"  # the name of the folder in a Delta table that contains its log
# A word in a file name that names a split, such as "test" in "data/test-00000.parquet". `datasets`
# looks for the same words. Each capturing group of the pattern matches the words for one split.
SPLIT_WORD = re.compile(
    r"(?:^|[-._/ ])(?:(train|training)|(test|testing|eval|evaluation)|(validation|valid|val|dev))"
    r"(?=[-._/ 0-9])"
)
WILDCARDS = "*?["
FILES_AT_ONCE = 32  # the number of files or folders that requests ask about in parallel
# Keys in the metadata of a file whose values identify its content, in Google Cloud Storage, S3,
# Azure, HTTP servers and the hub.
VERSION_KEYS = ("md5Hash", "crc32c", "ETag", "etag", "content_md5", "generation", "blob_id")


def list_files(path: str) -> list[DataFile]:
    """Lists the files of a data set, and logs how many other files are left out.

    Args:
        path: Value of --dataset_path, or a source of --mix: a file, a folder, a glob, or a URL of
            one of them.

    Returns:
        The files, all of one kind, sorted by their paths.

    Raises:
        InputError: If there is no data file, if there are several kinds or splits, if a folder is a
            Delta table, if a file is listed twice, or if the file system raises an error.
    """
    with as_input_errors(path), ThreadPoolExecutor(FILES_AT_ONCE) as thread_pool:
        if "://" in path:
            file_system, root_path = url_to_fs(path)
        else:
            # url_to_fs is not used for a local path, because it would interpret "::" in the path as
            # a chain of URLs.
            file_system = fsspec.filesystem("file")
            root_path = os.path.abspath(os.path.expanduser(path))
        if file_system.isfile(root_path):
            if not kind_of(root_path):
                raise _no_data_error(path, "does not end in", [root_path])
            data_paths = [root_path]
            # The query of a URL may contain a slash, so `plain_url` removes the query first.
            base_folder_path = plain_url(root_path).rpartition("/")[0]
        else:
            data_paths, base_folder_path = _list_folder(path, file_system, root_path, thread_pool)
        data_files = list(
            thread_pool.map(
                partial(_data_file_at, file_system, plain_url(base_folder_path)), data_paths
            )
        )
    refuse_repeated(data_files)
    return data_files


def is_path(source: str) -> bool:
    """Returns whether a source of --mix is a path, a glob or a URL, not a name on the hub."""
    if "://" in source or source.startswith(("/", ".")):
        return True
    if any(wildcard in source for wildcard in WILDCARDS):
        return True
    return kind_of(source) is not None or os.path.exists(source)


def refuse_repeated(files: Iterable[DataFile]) -> None:
    """Checks that no file is listed twice, not even by different paths.

    The rows of such a file would be stored twice.

    Args:
        files: The files of one or several data sets.

    Raises:
        InputError: If a file is listed twice.
    """
    # Path of a local file with all links resolved, or URL of a remote file -> the path or URL under
    # which `files` lists the file.
    url_by_resolved_path: dict[str, str] = {}
    for data_file in files:
        resolved_path = os.path.realpath(data_file.url) if data_file.is_local else data_file.url
        if resolved_path in url_by_resolved_path:
            other_path_phrase = (
                f", also as {url_by_resolved_path[resolved_path]}"
                if url_by_resolved_path[resolved_path] != data_file.url
                else ""
            )
            raise InputError(
                f"--dataset_path {data_file.url}: is given twice{other_path_phrase}; each of its "
                "rows would be stored twice; leave one of them out, for example with a glob"
            )
        url_by_resolved_path[resolved_path] = data_file.url


@contextmanager
def as_input_errors(path: str) -> Iterator[None]:
    """Turns exceptions in a `with` block, such as errors of a file system, into an InputError.

    Args:
        path: The value of --dataset_path, or the path of a file, for the message.

    Raises:
        InputError: If the block raises any exception.
    """
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        error_remedy = getattr(error, "remedy", None)
        error_phrase = f"{one_line(error)}; {error_remedy}" if error_remedy else one_line(error)
        raise InputError(f"--dataset_path {path}: {error_phrase}") from error


def _list_folder(
    path: str, fs: Any, root: str, thread_pool: ThreadPoolExecutor
) -> tuple[list[str], str]:
    """Lists the data files of a folder or a glob, and logs how many other files are left out.

    Args:
        path: Value of --dataset_path, for messages.
        fs: The file system, an object of fsspec.
        root: The path of the folder, or the glob, in the file system.
        thread_pool: The threads that send requests in parallel.

    Returns:
        A tuple of:
            The paths of the data files, sorted.
            The path of the folder to which the names of the files are relative.
    """
    has_wildcard = any(wildcard in root for wildcard in WILDCARDS)
    is_glob = has_wildcard and not fs.exists(root)
    if is_glob:
        entry_details_by_path = fs.glob(root, detail=True)
        base_folder_path = re.split(f"[{re.escape(WILDCARDS)}]", root)[0].rpartition("/")[0]
    else:
        entry_details_by_path = fs.find(root, detail=True)
        base_folder_path = root
    file_paths = sorted(
        entry_path
        for entry_path, entry_details in entry_details_by_path.items()
        if entry_details["type"] != "directory"
    )
    _refuse_delta_table(path, fs, base_folder_path, file_paths, thread_pool, is_glob=is_glob)
    data_paths, left_out_files_phrase = _select_data_files(path, fs, root, file_paths)
    if not is_glob:
        _refuse_named_splits(path, root, data_paths)
    if not data_paths:
        if not (entry_details_by_path or fs.exists(root)):
            raise InputError(
                f"--dataset_path {path}: no such file or folder{_conversion_advice([root])}"
            )
        raise _no_data_error(
            path,
            "has no files that end in",
            entry_details_by_path or [root],
            left_out_files_phrase,
        )
    if left_out_files_phrase:
        num_files_phrase = counted(len(data_paths), "file")
        log.warning("reading %s of %s; left out: %s", num_files_phrase, path, left_out_files_phrase)
    return data_paths, base_folder_path


def _no_data_error(
    path: str, problem: str, paths: Iterable[str], left_out_files_phrase: str = ""
) -> InputError:
    """Returns the error for a source without data files.

    Args:
        path: Value of --dataset_path.
        problem: The problem with the source, such as "does not end in". In the message, the
            extensions of all files that can be read follow it.
        paths: The paths of the files in the source, or the path of the source if it contains no
            files. For files with an extension in CONVERSIONS, the message says how to convert them
            to a format that can be read.
        left_out_files_phrase: Text with the number of files that were left out for each reason,
            such as "2 files (.md)"; "" if no file was left out.
    """
    readable_extensions: list[str] = []
    for file_kind in KINDS:
        readable_extensions += file_kind.extensions
    problem_description = f"{problem} {', '.join(readable_extensions)}"
    problem_description += f" (JSON and CSV also compressed: {', '.join(COMPRESSIONS)})"
    if left_out_files_phrase:
        problem_description += f"; left out: {left_out_files_phrase}"
    return InputError(f"--dataset_path {path}: {problem_description}{_conversion_advice(paths)}")


def _conversion_advice(paths: Iterable[str]) -> str:
    """Returns advice on converting files into formats that are read.

    Args:
        paths: The paths of the files.

    Returns:
        Clauses for the end of a message, each of which begins with a semicolon. "" if there is no
        advice for these files.
    """
    # A dict keeps the order of the files, and contains each clause once.
    advice_clauses: dict[str, None] = {}
    for file_path in paths:
        for convertible_extensions, conversion_phrase in CONVERSIONS.items():
            for convertible_extension in convertible_extensions:
                if uncompressed_name(file_path).endswith(convertible_extension):
                    advice_clauses[
                        f"; {convertible_extension} is not read: {conversion_phrase}"
                    ] = None
    return "".join(advice_clauses)


def _select_data_files(
    path: str, fs: Any, root: str, paths: Sequence[str]
) -> tuple[list[str], str]:
    """Selects the data files out of all files of a folder or glob.

    Args:
        path: Value of --dataset_path, for messages.
        fs: The file system, an object of fsspec.
        root: The path of the folder, or the glob, in the file system.
        paths: The sorted paths of all files.

    Returns:
        A tuple of:
            The paths of the data files.
            Text for messages with the number of files that are left out for each reason, such as
            "2 files (.md)". Files that `datasets` writes beside its data files are not counted, nor
            are hidden files that contain no data.

    Raises:
        InputError: If there are data files of several kinds, or several splits that `datasets` has
            saved.
    """
    # Path of each file that is left out -> the reason, for the log; "" for files that the log does
    # not mention.
    reason_by_left_out_path: dict[str, str] = {}
    for file_path in paths:
        if _is_hidden(file_path, root):
            reason_by_left_out_path[file_path] = (
                "name or folder begins with . or _" if kind_of(file_path) else ""
            )
        elif not kind_of(file_path):
            is_link_to_folder = isinstance(fs, LocalFileSystem) and os.path.isdir(file_path)
            file_extension = os.path.splitext(file_path)[1]
            reason_by_left_out_path[file_path] = (
                "link to a folder" if is_link_to_folder else file_extension or "no ending"
            )
    data_paths = [file_path for file_path in paths if file_path not in reason_by_left_out_path]
    arrow_paths = [file_path for file_path in data_paths if kind_of(file_path) is ARROW]
    if arrow_paths:
        _refuse_saved_splits(path, paths, arrow_paths)
        for file_path in paths:
            if os.path.basename(file_path) in FILES_SAVED_WITH_DATA:
                reason_by_left_out_path[file_path] = ""
        for file_path in _paths_not_in_state(fs, arrow_paths):
            reason_by_left_out_path[file_path] = f"not listed in {STATE_FILE}"
        data_paths = [file_path for file_path in paths if file_path not in reason_by_left_out_path]
    # .json files beside other data files usually contain settings, not data.
    if not all(uncompressed_name(file_path).endswith(".json") for file_path in data_paths):
        for file_path in data_paths:
            if file_path.lower().endswith(".json"):
                reason_by_left_out_path[file_path] = ".json beside other data"
        data_paths = [
            file_path for file_path in data_paths if file_path not in reason_by_left_out_path
        ]
    data_file_kinds = {kind_of(file_path) for file_path in data_paths}
    file_kinds_in_order = [file_kind for file_kind in KINDS if file_kind in data_file_kinds]
    if len(file_kinds_in_order) > 1:
        raise InputError(
            f"--dataset_path {path}: holds both {file_kinds_in_order[-1].name} and "
            f"{file_kinds_in_order[-2].name}; choose one of them, for example with a glob such as "
            f"FOLDER/*{file_kinds_in_order[-1].extensions[0]}"
        )
    num_files_by_reason = Counter(reason for reason in reason_by_left_out_path.values() if reason)
    count_and_reason_phrases = [
        f"{counted(num_files, 'file')} ({reason})"
        for reason, num_files in num_files_by_reason.items()
    ]
    return data_paths, ", ".join(count_and_reason_phrases)


def _is_hidden(path: str, root: str) -> bool:
    """Returns whether a file is hidden: a name in its path below the root begins with . or _.

    Unfinished files of Spark, backups of editors, and logs of tables have such names. Such
    a name does not hide a file if the user has asked for it: if a part of the root or of the glob
    begins with the same character and matches the name. For example, the glob `data/_old/*` finds
    the files in `_old`.

    Args:
        path: The path of the file in the file system.
        root: The path of the folder, or the glob, in the file system.
    """
    name_patterns = root.split("/")
    for path_part in path.removeprefix(root).split("/"):
        if path_part[:1] not in (".", "_"):
            continue
        is_hidden_name_requested = any(
            name_pattern[:1] == path_part[0] and fnmatch(path_part, name_pattern)
            for name_pattern in name_patterns
        )
        if not is_hidden_name_requested:
            return True
    return False


def _refuse_delta_table(
    path: str,
    fs: Any,
    folder: str,
    paths: Sequence[str],
    thread_pool: ThreadPoolExecutor,
    *,
    is_glob: bool,
) -> None:
    """Checks that the files of a data set do not belong to a Delta table.

    A Delta table is a folder that contains a folder with the name _delta_log. The data files of a
    Delta table may contain rows that were deleted from the table.

    Args:
        path: Value of --dataset_path, for messages.
        fs: The file system, an object of fsspec.
        folder: The path of the data set's folder in the file system. If --dataset_path is a glob,
            the last folder before the first wildcard.
        paths: The paths of all files in the folder and in its subfolders, or of the files that the
            glob matches.
        thread_pool: The threads that send requests in parallel.
        is_glob: Whether --dataset_path is a glob. A glob may match only the data files of a Delta
            table, so the folders of these files are searched for the log. This takes a request for
            each folder.

    Raises:
        InputError: If `folder`, or a folder below it that contains one of `paths`, is a Delta
            table.
    """
    table_folder_paths = set()
    for file_path in paths:
        table_folder_path, log_folder_in_path, _ = file_path.partition(f"/{DELTA_LOG}/")
        if log_folder_in_path:
            table_folder_paths.add(table_folder_path)
    if is_glob and not table_folder_paths:
        candidate_folder_paths = {folder}
        for file_path in paths:
            candidate_folder_path = folder
            for subfolder_name in file_path[len(folder) + 1 :].split("/")[:-1]:
                candidate_folder_path += f"/{subfolder_name}"
                candidate_folder_paths.add(candidate_folder_path)
        sorted_folder_paths = sorted(candidate_folder_paths)
        log_folder_paths = [
            f"{candidate_folder_path}/{DELTA_LOG}" for candidate_folder_path in sorted_folder_paths
        ]
        table_folder_mask = list(thread_pool.map(fs.isdir, log_folder_paths))
        table_folder_paths.update(itertools.compress(sorted_folder_paths, table_folder_mask))
    if table_folder_paths:
        raise InputError(
            f"--dataset_path {path}: {min(table_folder_paths)} is a Delta table, whose "
            "files may hold rows that were deleted from it; save its rows to new files, for "
            "example the result of DeltaTable(FOLDER).to_pyarrow_table() from the package deltalake"
        )


def _paths_not_in_state(fs: Any, arrow_paths: Sequence[str]) -> list[str]:
    """Returns the Arrow files that the state.json in their folder does not list.

    `datasets` writes state.json when it saves a data set, and lists the files of this data set in
    it. The folder may also contain files of a data set that was saved there earlier. These are the
    files that are returned. No file is returned of a folder without such a list.

    Args:
        fs: The file system, an object of fsspec.
        arrow_paths: The paths of all Arrow files.
    """
    arrow_paths_not_in_state_file = []
    for arrow_folder_path in sorted({os.path.dirname(arrow_path) for arrow_path in arrow_paths}):
        paths_in_state_file = _files_in_state(fs, arrow_folder_path)
        if paths_in_state_file is None:
            continue
        for arrow_path in arrow_paths:
            if (
                os.path.dirname(arrow_path) == arrow_folder_path
                and arrow_path not in paths_in_state_file
            ):
                arrow_paths_not_in_state_file.append(arrow_path)
    return arrow_paths_not_in_state_file


def _files_in_state(fs: Any, folder: str) -> set[str] | None:
    """Returns the data files of a folder that `datasets` has saved, as its state.json lists them.

    Args:
        fs: The file system, an object of fsspec.
        folder: The path of the folder in the file system.

    Returns:
        The paths of the files; None if there is no state.json, or if it does not list files.

    Raises:
        InputError: If state.json is damaged, or if a file that it lists is missing.
    """
    state_path = f"{folder}/{STATE_FILE}"
    if not fs.isfile(state_path):
        return None
    try:
        data_file_entries = json.loads(fs.cat_file(state_path)).get("_data_files")
        if data_file_entries is None:
            return None
        paths_in_state_file = {
            f"{folder}/{file_entry['filename']}" for file_entry in data_file_entries
        }
    except Exception as error:
        raise InputError(
            f"--dataset_path {state_path}: is damaged, but says which files count: "
            f"{one_line(error)}"
        ) from error
    for path_in_state_file in sorted(paths_in_state_file):
        if not fs.isfile(path_in_state_file):
            raise InputError(
                f"--dataset_path {state_path}: lists {os.path.basename(path_in_state_file)}, "
                "which is missing"
            )
    return paths_in_state_file


def _refuse_saved_splits(path: str, paths: Sequence[str], arrow_paths: Sequence[str]) -> None:
    """Checks that the files do not contain several splits of a data set that `datasets` has saved.

    `datasets` saves the Arrow files of each split in a folder of its own. The parent folder of
    these folders contains the file dataset_dict.json.

    Args:
        path: Value of --dataset_path, for messages.
        paths: The paths of all files that --dataset_path names, which may include
            dataset_dict.json.
        arrow_paths: The paths of the Arrow files among `paths`.

    Raises:
        InputError: If a folder contains dataset_dict.json, and Arrow files of several splits.
    """
    for file_path in paths:
        if os.path.basename(file_path) != SPLITS_FILE:
            continue
        dataset_folder_path = file_path.removesuffix(SPLITS_FILE)
        split_names = set()
        for arrow_path in arrow_paths:
            if arrow_path.startswith(dataset_folder_path):
                split_names.add(arrow_path.removeprefix(dataset_folder_path).split("/")[0])
        if len(split_names) > 1:
            raise InputError(
                f"--dataset_path {path}: {dataset_folder_path} holds several splits of a data set "
                f"({', '.join(sorted(split_names))}); choose the folder of one of them"
            )


def _refuse_named_splits(path: str, root: str, data_paths: Sequence[str]) -> None:
    """Checks that the names of the data files in a folder name at most one split, such as "train".

    Args:
        path: Value of --dataset_path, for messages.
        root: The path of the folder in the file system.
        data_paths: The paths of the data files.

    Raises:
        InputError: If the names of the files name several splits.
    """
    # Number of the capturing group in SPLIT_WORD that matches the words for a split -> path of one
    # file of this split. For example, the key for "test" is 2. The keys have the type of
    # `re.Match.lastindex`, but none of them is None.
    example_path_by_group_number: dict[int | None, str] = {}
    for data_path in data_paths:
        split_word_match = SPLIT_WORD.search(data_path.removeprefix(root).lower())
        if split_word_match:
            example_path_by_group_number.setdefault(split_word_match.lastindex, data_path)
    if len(example_path_by_group_number) > 1:
        raise InputError(
            f"--dataset_path {path}: holds files of several splits, such as "
            f"{' and '.join(sorted(example_path_by_group_number.values()))}; choose the files of "
            f"one split with a glob, or all files with {path.rstrip('/')}/**"
        )


def _data_file_at(fs: Any, folder: str, path: str) -> DataFile:
    """Makes the DataFile for a path, with the name, size and version of the file.

    Args:
        fs: The file system, an object of fsspec.
        folder: The path of the folder to which the file's name is relative; "" to use the whole
            path as the name.
        path: The path of the file in the file system.

    Raises:
        InputError: If the path is not a regular file.
    """
    path_without_secrets = plain_url(path)
    path_in_folder = path_without_secrets.partition(folder)[2] if folder else path_without_secrets
    # Paths may contain bytes that are not UTF-8. They are replaced by escapes.
    file_name = os.fsencode(path_in_folder.lstrip("/")).decode(errors="backslashreplace")
    if isinstance(fs, LocalFileSystem):
        file_status = os.stat(path)
        if not stat.S_ISREG(file_status.st_mode):
            raise InputError(
                f"--dataset_path {path}: is a named pipe, a socket or a device; expected a file"
            )
        return DataFile(path, file_name, file_status.st_size, str(file_status.st_mtime_ns))
    # `info` is fast even if there are many files, because it sends no request if the file system
    # has cached the listing of the folder.
    file_metadata = fs.info(path)
    content_version = ""
    for version_key in VERSION_KEYS:
        if file_metadata.get(version_key):
            content_version = f"{version_key} {file_metadata[version_key]}"
            break
    return DataFile(fs.unstrip_protocol(path), file_name, file_metadata["size"], content_version)
