"""Checks that the files of a data set are those that the run began with.

metadata.json lists the files in the order in which they are read, local or at a URL, each with its
size and fingerprint. A run that continues reads them in that order, even under new names, and
refuses a file that has changed. If a local text file has grown, only the bytes that it had when the
run began are read.
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
class RecordedFile:
    """A file of a data set as metadata.json records it.

    Attributes:
        name: The name under which rows refer to the file.
        bytes: The number of bytes that the run reads.
        fingerprint: The fingerprint of these bytes for a local file (see digests.py), otherwise the
            version that the store reports, or the size if it reports none.
    """

    name: str
    bytes: int
    fingerprint: str


class DataFiles:
    """The files of a data set, in the order in which they are read.

    Args:
        files: The files. Their sizes determine how many bytes of each file are read.
        recorded: The records of these files in metadata.json. None to compute the fingerprints now.

    Attributes:
        files: The files.
        recorded: The record of each file.

    Raises:
        InputError: A file cannot be read.
    """

    def __init__(
        self, files: Sequence[DataFile] = (), recorded: Sequence[RecordedFile] | None = None
    ) -> None:
        self.files = tuple(files)
        if recorded is None:
            with ThreadPoolExecutor(BLOCKS_AT_ONCE, "fingerprint-data") as pool:
                recorded = list(pool.map(_record, files))
        self.recorded = tuple(recorded)
        # The local files by the names under which rows may refer to them. In a mixture, a file's
        # name here begins with the number of its source (see open_data.py), but not in its rows.
        self._local: defaultdict[str, list[tuple[DataFile, RecordedFile]]] = defaultdict(list)
        for file, record in zip(self.files, self.recorded, strict=True):
            if file.local:
                for name in {file.name, file.name.partition("/")[2]}:
                    self._local[name].append((file, record))

    @classmethod
    def as_recorded(
        cls, files: Sequence[DataFile], earlier: Sequence[Mapping[str, Any]]
    ) -> "DataFiles":
        """Returns the files in the order, and with the sizes, that the run has recorded.

        Args:
            files: The files that are listed now.
            earlier: The metadata that hosts of the run have stored. Without a record of files, for
                example in a new run, the files are taken as they are.

        Raises:
            InputError: A file differs from its record, is missing, or was added after the run
                began; the message names the file. Or the hosts have recorded different files.
        """
        lists: set[tuple[RecordedFile, ...]] = set()
        for metadata in earlier:
            if records := metadata.get("data_files"):
                lists.add(tuple(RecordedFile(**record) for record in records))
        if not lists:
            return cls(files)
        if len(lists) > 1:
            raise InputError("--dataset_path: the hosts of this run have read different files")
        recorded = lists.pop()
        ordered = _in_recorded_order(files, recorded)
        added = {}  # bytes that a file has grown by, by its URL
        with ThreadPoolExecutor(BLOCKS_AT_ONCE, "fingerprint-data") as pool:
            unchanged = pool.map(_is_recorded, ordered, recorded)
            for file, record, is_unchanged in zip(ordered, recorded, unchanged, strict=True):
                growth = file.size - record.bytes
                if not is_unchanged:
                    sizes = f" ({record.bytes:,} bytes then, {file.size:,} now)" if growth else ""
                    raise InputError(
                        f"--dataset_path: {file.url} is not the file that the run began with{sizes}"
                        f"; {ANEW}"
                    )
                if growth:
                    added[file.url] = growth
        if added:
            log.warning(
                "the last %s of %s are not read: they were not there when the run began",
                counted(sum(added.values()), "byte"),
                min(added) if len(added) == 1 else counted(len(added), "file"),
            )
        pairs = zip(ordered, recorded, strict=True)
        return cls([replace(file, size=record.bytes) for file, record in pairs], recorded)

    def fingerprints(self) -> dict[str, str]:
        """Returns the sizes and fingerprints of the files, which hosts compare.

        Returns:
            "SIZE bytes, FINGERPRINT" by "data file NAME".
        """
        return {
            f"data file {record.name}": f"{record.bytes} bytes, {record.fingerprint}"
            for record in self.recorded
        }

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the files as metadata.json lists them."""
        return [asdict(record) for record in self.recorded]

    def check(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Checks that the local files of some rows have not changed since the run began.

        The fingerprint is computed again only if the file's size or modification time differs.

        Args:
            rows: The rows as SampleFacts has them: a row of a file has its name under "file". In a
                mixture, the files of that name in all sources are checked.

        Raises:
            RunError: A file has changed or cannot be read.
        """
        for name in {row["file"] for row in rows if "file" in row}:
            for file, record in self._local.get(name, ()):
                problem = f"{file.url}: has changed while the run was reading it"
                try:
                    with naming_unreadable(file.url):
                        status = os.stat(file.url)
                    current = replace(file, size=status.st_size, version=str(status.st_mtime_ns))
                    if current == file or _is_recorded(current, record):
                        continue
                except InputError as error:
                    problem = str(error)
                raise RunError(problem, remedy=PUT_BACK)


def _in_recorded_order(
    files: Sequence[DataFile], recorded: Sequence[RecordedFile]
) -> list[DataFile]:
    """Returns the files in recorded order and under their recorded names.

    A file without a recorded name is recognised by its content. The content of the others is not
    compared.

    Raises:
        InputError: A recorded file is missing, or a file was not recorded.
    """
    by_name = {file.name: file for file in files}
    names = {file.name for file in recorded}
    unknown = [file for file in files if file.name not in names]
    unknown.sort(key=lambda file: file.size)
    ordered = []
    for record in recorded:
        file = by_name.get(record.name)
        if file is None:
            file = next((renamed for renamed in unknown if _is_recorded(renamed, record)), None)
            if file is None:
                raise InputError(
                    f"--dataset_path: {record.name} is missing; {ANEW}; this one needs the file "
                    "that it began with"
                )
            unknown.remove(file)
        ordered.append(replace(file, name=record.name))
    if unknown:
        raise InputError(
            f"--dataset_path: {unknown[0].name} was not read when the run began; take it out, or "
            f"give a glob that leaves it out; {ANEW}"
        )
    return ordered


def _is_recorded(file: DataFile, record: RecordedFile) -> bool:
    """Returns whether a file has the recorded content. A local text file may have grown."""
    if file.size != record.bytes and not file.may_grow:
        return False
    return _record(replace(file, size=record.bytes)).fingerprint == record.fingerprint


def _record(file: DataFile) -> RecordedFile:
    """Returns the record of a file for metadata.json.

    Raises:
        InputError: A local file cannot be read.
    """
    if file.local:
        fingerprint = f"blocks {file_fingerprint(Path(file.url), file.size)}"
    else:
        fingerprint = file.version or f"{file.size} bytes"
    return RecordedFile(file.name, file.size, fingerprint)
