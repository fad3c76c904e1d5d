"""This module checks that a data set's files are those that the run began with.

metadata.json lists the files, local ones or those at a URL, in the order in which they are read,
each with its size and fingerprint. A run that continues reads them in that order, whatever they are
called now, and refuses a file that has changed. Of a local file of text that has grown, it reads
what was there when the run began.
"""

import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.common.log import log
from activation_extraction.common.visible import counted
from activation_extraction.run.digests import BLOCKS_AT_ONCE, file_fingerprint, naming_unreadable
from activation_extraction.text.file_rows import DataFile

ANEW = "a run over other data needs another --output_dir (or --gcs_prefix), or --overwrite"
PUT_BACK = "put the file back as it was when the run began, or begin anew with --overwrite"


@dataclass(frozen=True)
class Recorded:
    """A file as metadata.json records it.

    fingerprint: of its first `bytes` bytes if it is local, else what its store says of it.
    """

    name: str
    bytes: int
    fingerprint: str


class DataFiles:
    """The files of a data set, in the order in which they are read, and as they are recorded.

    Of each file, as many bytes are read as its size here says.
    """

    def __init__(
        self, files: Sequence[DataFile] = (), recorded: Sequence[Recorded] | None = None
    ) -> None:
        """Takes the fingerprints of the files, unless they are recorded already."""
        self.files = tuple(files)
        if recorded is None:
            with ThreadPoolExecutor(BLOCKS_AT_ONCE, "fingerprint-data") as pool:
                recorded = list(pool.map(_record, files))
        self.recorded = tuple(recorded)
        # By the names that rows may have for it: those of several sources begin with a number here.
        self._local: defaultdict[str, list[tuple[DataFile, Recorded]]] = defaultdict(list)
        for file, own in zip(self.files, self.recorded, strict=True):
            for name in {file.name, file.name.partition("/")[2]} if file.local else ():
                self._local[name].append((file, own))

    @classmethod
    def as_recorded(
        cls, files: Sequence[DataFile], earlier: Sequence[Mapping[str, Any]]
    ) -> "DataFiles":
        """Returns the files as a run that continues has to read them.

        earlier: the metadata that hosts of the run have stored. Raises InputError, naming the file,
        if one is not the recorded one, is missing, or was not there when the run began.
        """
        every = [tuple(Recorded(**f) for f in found.get("data_files", ())) for found in earlier]
        recorded, *others = dict.fromkeys(filter(None, every)) or [()]
        if others:
            raise InputError("--dataset_path: the hosts of this run have read different files")
        if not recorded:
            return cls(files)
        ordered = _in_recorded_order(files, recorded)
        added = {}
        with ThreadPoolExecutor(BLOCKS_AT_ONCE, "fingerprint-data") as pool:
            same = pool.map(_is_recorded, ordered, recorded)
            for now, before, is_same in zip(ordered, recorded, same, strict=True):
                more = now.size - before.bytes
                if not is_same:
                    sizes = f" ({before.bytes:,} bytes then, {now.size:,} now)" if more else ""
                    raise InputError(
                        f"--dataset_path: {now.url} is not the file that the run began with{sizes}"
                        f"; {ANEW}"
                    )
                if more:
                    added[now.url] = more
        if added:
            log.warning(
                "the last %s of %s are not read: they were not there when the run began",
                counted(sum(added.values()), "byte"),
                min(added) if len(added) == 1 else counted(len(added), "file"),
            )
        pairs = zip(ordered, recorded, strict=True)
        return cls([replace(now, size=before.bytes) for now, before in pairs], recorded)

    def fingerprints(self) -> dict[str, str]:
        """Returns the size and the fingerprint of each file, for hosts to compare."""
        return {f"data file {r.name}": f"{r.bytes} bytes, {r.fingerprint}" for r in self.recorded}

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the files as metadata.json lists them."""
        return [asdict(each) for each in self.recorded]

    def check(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Raises RunError if a local file of these rows is not what it was when the run began.

        rows: as samples have them. A file of the same name in another source is checked, too. A
        fingerprint is compared only if the file's size or time is another.
        """
        for name in {row["file"] for row in rows if "file" in row}:
            for file, recorded in self._local.get(name, ()):
                problem = f"{file.url}: has changed while the run was reading it"
                try:
                    with naming_unreadable(file.url):
                        status = os.stat(file.url)
                    now = replace(file, size=status.st_size, version=str(status.st_mtime_ns))
                    if now == file or _is_recorded(now, recorded):
                        continue
                except InputError as error:
                    problem = str(error)
                raise RunError(problem, remedy=PUT_BACK)


def _in_recorded_order(files: Sequence[DataFile], recorded: Sequence[Recorded]) -> list[DataFile]:
    """Returns the files under their recorded names, recognising renamed ones by their content.

    Raises InputError if there is one too many or too few.
    """
    by_name = {file.name: file for file in files}
    names = {file.name for file in recorded}
    new = sorted((file for file in files if file.name not in names), key=lambda file: file.size)
    ordered = []
    for before in recorded:
        now = by_name.get(before.name)
        if now is None:
            now = next((file for file in new if _is_recorded(file, before)), None)
            if now is None:
                raise InputError(
                    f"--dataset_path: {before.name} is missing; {ANEW}; this one needs the file "
                    "that it began with"
                )
            new.remove(now)
        ordered.append(replace(now, name=before.name))
    if new:
        raise InputError(
            f"--dataset_path: {new[0].name} was not read when the run began; take it out, or give "
            f"a glob that leaves it out; {ANEW}"
        )
    return ordered


def _is_recorded(now: DataFile, before: Recorded) -> bool:
    """Returns whether a file is the recorded one; a local one of text may have grown."""
    may_be = now.size == before.bytes or now.may_grow
    return may_be and _record(replace(now, size=before.bytes)).fingerprint == before.fingerprint


def _record(file: DataFile) -> Recorded:
    """Takes the fingerprint of the first `size` bytes of a local file, or a store's version."""
    found = file.version or f"{file.size} bytes"
    if file.local:
        found = f"blocks {file_fingerprint(Path(file.url), file.size)}"
    return Recorded(file.name, file.size, found)
