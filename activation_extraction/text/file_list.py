"""Lists the files of a data set: which of those in a folder are data, and which are left out.

Files may be in a local folder or at a URL. Their names say of which kind they are; sources.py opens
them.
"""

import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.log import log
from activation_extraction.common.visible import counted, plain_url
from activation_extraction.text.file_forms import PACKINGS, packing_of, unpacked_name

# A kind of files and how their names end, in small or capital letters.
FILE_KINDS = {
    "JSON": (".jsonl", ".ndjson", ".json"),
    "CSV": (".csv",),
    "Parquet": (".parquet",),
    "Arrow": (".arrow",),
}
TEXT = ("JSON", "CSV")  # kinds of files that may be packed, and that may grow at their ends
# Extensions of files that hold data in a form that is not read, and how to make one that is.
OTHER_FORMS = {
    (".tsv", ".tab"): "save the columns with commas between them, as .csv",
    (".txt",): 'write a line {"text": ...} for each text into a .jsonl file',
    (".xlsx", ".xls", ".ods"): "save the sheet as .csv",
    (".zip", ".tar", ".tgz", ".7z"): "unpack the archive",
    (".orc", ".avro", ".feather"): "convert it to .parquet",
}
# What `datasets` writes beside the files that it saves; the last lists the splits of a data set.
STATE, SPLITS = "state.json", "dataset_dict.json"
SAVED = ("dataset_info.json", STATE, SPLITS)
DELTA = "_delta_log"  # the folder that makes another one a Delta table
# A word in a file's name that says of which split it is; `datasets` looks for the same ones.
NAMED_SPLIT = re.compile(
    r"(?:^|[-._/ ])(?:(train|training)|(test|testing|eval|evaluation)|(validation|valid|val|dev))"
    r"(?=[-._/ 0-9])"
)
FILES_AT_ONCE = 32  # files that are described at the same time
# What stores say of a file's content: Google Cloud Storage, S3, Azure, HTTP servers and the hub.
VERSIONS = ("md5Hash", "crc32c", "ETag", "etag", "content_md5", "generation", "blob_id")


@dataclass(frozen=True)
class TextFile:
    """A file of a data set. size: in bytes.

    name: relative to the folder that the data set is, or is in, or that comes before its first
    wildcard. version: the checksum or version that the store of a URL has for its content, "" if
    it has none; for a file on this machine, when it was last modified, in nanoseconds.
    """

    url: str
    name: str
    size: int
    version: str = ""

    @property
    def local(self) -> bool:
        return "://" not in self.url

    @property
    def may_grow(self) -> bool:
        """Returns whether the file can be read up to a byte where it once ended."""
        return self.local and kind_of(self.url) in TEXT

    @property
    def read_to(self) -> int | None:
        """Returns how many of its bytes are read; None for all."""
        return self.size if self.may_grow else None


def list_files(path: str) -> list[TextFile]:
    """Lists the files of a data set: a file, a folder with its subfolders, a glob, or a URL.

    They are sorted, and of one kind. The log says how many others are left out. Raises InputError
    if there is none to read, if there are several kinds or splits, if a folder is a Delta table, or
    if a file is listed twice.
    """
    with refusing(path), ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        if "://" in path:
            fs, root = url_to_fs(path)
        else:  # url_to_fs would take :: for a chain of URLs
            fs, root = fsspec.filesystem("file"), os.path.abspath(os.path.expanduser(path))
        what = "has no files that end in"
        others = ""
        matches = {}
        if fs.isfile(root):
            base = plain_url(root).rpartition("/")[0]  # a query may have a /
            what = "does not end in"
            known = [root] if kind_of(root) else []
        else:
            is_glob = any(c in root for c in "*?[") and not fs.exists(root)
            matches = (fs.glob if is_glob else fs.find)(root, detail=True)
            found = sorted(name for name in matches if matches[name]["type"] != "directory")
            base = re.split(r"[*?[]", root)[0].rpartition("/")[0] if is_glob else root
            _refuse_delta(path, fs, base, found)
            known, others = _chosen(path, fs, root, found)
            if not is_glob:
                _refuse_named_splits(path, root, known)
        if not known:
            ends = ", ".join(end for ends in FILE_KINDS.values() for end in ends)
            why = f"{what} {ends} (JSON and CSV also packed: {', '.join(PACKINGS)})"
            if not (matches or fs.exists(root)):
                why = "no such file or folder"
            why += f"; left out: {others}" if others else ""
            why += _what_to_do(matches or [root])
            raise InputError(f"--dataset_path {path}: {why}")
        if others:
            log.warning("reading %s of %s; left out: %s", counted(len(known), "file"), path, others)
        files = list(pool.map(partial(_describe, fs, plain_url(base)), known))
    refuse_repeated(files)
    return files


def refuse_repeated(files: Iterable[TextFile]) -> None:
    """Raises InputError if a file is listed twice, be it by two paths: its rows would be, too."""
    seen: dict[str, str] = {}
    for file in files:
        itself = os.path.realpath(file.url) if file.local else file.url
        if itself in seen:
            alias = f", also as {seen[itself]}" if seen[itself] != file.url else ""
            raise InputError(
                f"--dataset_path {file.url}: is given twice{alias}; each of its rows would be "
                "stored twice; leave one of them out, for example with a glob"
            )
        seen[itself] = file.url


def is_path(source: str) -> bool:
    """Returns whether a source is files, by its form, and not the name of a hub data set."""
    formed = "://" in source or any(c in source for c in "*?[") or source.startswith(("/", "."))
    return formed or kind_of(source) is not None or os.path.exists(source)


def kind_of(url: str) -> str | None:
    """Returns which of FILE_KINDS a file is by its name; None: it is no data.

    A name that ends in .zst alone is JSON Lines, as of the dumps of Reddit.
    """
    name, packing = unpacked_name(url), packing_of(url)
    kind = next((kind for kind, ends in FILE_KINDS.items() if name.endswith(ends)), None)
    if packing == ".zst" and "." not in name.rpartition("/")[2]:
        return "JSON"
    return kind if not packing or kind in TEXT else None


def _chosen(path: str, fs: Any, root: str, found: Sequence[str]) -> tuple[list[str], str]:
    """Returns the files that are data, and in words how many others there are and why.

    Not counted are files that `datasets` writes beside its data, and hidden ones of no kind. Raises
    InputError if there are several kinds or splits.
    """
    why: dict[str, str] = {}  # "" for those that are not counted
    for name in found:
        if _is_hidden(name, root):
            why[name] = "name or folder begins with . or _" if kind_of(name) else ""
        elif not kind_of(name):
            is_link = isinstance(fs, LocalFileSystem) and os.path.isdir(name)
            why[name] = "link to a folder" if is_link else os.path.splitext(name)[1] or "no ending"
    arrow = [name for name in found if name not in why and kind_of(name) == "Arrow"]
    if arrow:
        _refuse_splits(path, found, arrow)
        why |= {name: "" for name in found if os.path.basename(name) in SAVED}
        for folder in sorted(set(map(os.path.dirname, arrow))):
            inside = {name for name in arrow if os.path.dirname(name) == folder}
            if (listed := _listed_in(fs, folder)) is not None:
                why |= dict.fromkeys(inside - listed, f"not listed in {STATE}")
    data = [name for name in found if name not in why]
    if not all(unpacked_name(name).endswith(".json") for name in data):  # some have it for settings
        why |= {name: ".json beside other data" for name in data if name.lower().endswith(".json")}
    data = [name for name in data if name not in why]
    kinds = [kind for kind in FILE_KINDS if kind in map(kind_of, data)]
    if len(kinds) > 1:
        raise InputError(
            f"--dataset_path {path}: holds both {kinds[-1]} and {kinds[-2]}; choose one of "
            f"them, for example with a glob such as FOLDER/*{FILE_KINDS[kinds[-1]][0]}"
        )
    counts = Counter(filter(None, why.values()))
    words = ", ".join(f"{counted(count, 'file')} ({each})" for each, count in counts.items())
    return data, words


def _what_to_do(names: Iterable[str]) -> str:
    """Returns how to make files that are read out of those that are not, one hint for each of
    OTHER_FORMS that occurs in `names`, each after a semicolon."""
    hints = dict[str, None]()
    for name in names:
        for ends, remedy in OTHER_FORMS.items():
            for end in ends:
                if unpacked_name(name).endswith(end):
                    hints[f"; {end} is not read: {remedy}"] = None
    return "".join(hints)


def _is_hidden(name: str, root: str) -> bool:
    """Whether a file, or a folder that it is in below the root, has a name that is not for data.

    Such are unfinished files of Spark, left-overs of editors, logs of tables. A root or a glob may
    name them explicitly.
    """
    asked = root.split("/")
    return any(
        part[:1] in (".", "_")
        and not any(part[0] == each[:1] and fnmatch(part, each) for each in asked)
        for part in name.removeprefix(root).split("/")
    )


def _refuse_delta(path: str, fs: Any, base: str, found: Sequence[str]) -> None:
    """Raises InputError for a Delta table: files lie in it that the table no longer has."""
    tables = {name.partition(f"/{DELTA}/")[0] for name in found if f"/{DELTA}/" in name}
    if tables or fs.isdir(f"{base}/{DELTA}"):  # of a glob, the log may not be found
        raise InputError(
            f"--dataset_path {path}: {min(tables, default=base)} is a Delta table, whose files may "
            "hold rows that it no longer has; save its rows to files of their own, for example "
            "those of DeltaTable(FOLDER).to_pyarrow_table() from the package deltalake"
        )


def _listed_in(fs: Any, folder: str) -> set[str] | None:
    """Returns the files that `datasets` has saved in a folder according to the state there, which
    may also hold older ones; None if it does not say. Raises InputError if one is missing."""
    state = f"{folder}/{STATE}"
    if not fs.isfile(state):
        return None
    try:
        listed = json.loads(fs.cat_file(state)).get("_data_files")
        names = None if listed is None else {f"{folder}/{each['filename']}" for each in listed}
    except Exception as error:
        raise InputError(
            f"--dataset_path {state}: is damaged, but says which files count: {one_line(error)}"
        ) from error
    if missing := next((name for name in sorted(names or ()) if not fs.isfile(name)), None):
        raise InputError(
            f"--dataset_path {state}: lists {os.path.basename(missing)}, which is missing"
        )
    return names


def _refuse_splits(path: str, found: Sequence[str], arrow: Sequence[str]) -> None:
    """Raises InputError if `datasets` has saved several splits there: they are not one data set."""
    for lists_splits in (name for name in found if os.path.basename(name) == SPLITS):
        folder = lists_splits.removesuffix(SPLITS)
        inside = (name.removeprefix(folder) for name in arrow if name.startswith(folder))
        splits = sorted({name.split("/")[0] for name in inside})
        if len(splits) > 1:
            raise InputError(
                f"--dataset_path {path}: {folder} holds several splits of a data set "
                f"({', '.join(splits)}); choose the folder of one of them"
            )


def _refuse_named_splits(path: str, root: str, known: Sequence[str]) -> None:
    """Raises InputError if the names of files in a folder say that they are of several splits."""
    splits = dict[int | None, str]()
    for name in known:
        if word := NAMED_SPLIT.search(name.removeprefix(root).lower()):
            splits.setdefault(word.lastindex, name)
    if len(splits) > 1:
        raise InputError(
            f"--dataset_path {path}: holds files of several splits, such as "
            f"{' and '.join(sorted(splits.values()))}; choose those of one with a glob, or all "
            f"with {path.rstrip('/')}/**"
        )


def _describe(fs: Any, folder: str, path: str) -> TextFile:
    plain = plain_url(path)
    relative = (plain.partition(folder)[2] if folder else plain).lstrip("/")
    name = os.fsencode(relative).decode(errors="backslashreplace")
    if isinstance(fs, LocalFileSystem):
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(
                f"--dataset_path {path}: is a named pipe, a socket or a device; expected a file"
            )
        return TextFile(path, name, status.st_size, str(status.st_mtime_ns))
    found = fs.info(path)  # out of the listing, if the store's client keeps that
    version = next((f"{key} {found[key]}" for key in VERSIONS if found.get(key)), "")
    return TextFile(fs.unstrip_protocol(path), name, found["size"], version)


@contextmanager
def refusing(path: str) -> Iterator[None]:
    """Turns whatever a file system may raise inside the block into an InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        remedy = getattr(error, "remedy", None)
        why = f"{one_line(error)}; {remedy}" if remedy else one_line(error)
        raise InputError(f"--dataset_path {path}: {why}") from error
