"""Checks that the files of a data set are the files that the run began with.

metadata.json lists the files, local or at a URL, in the order in which they are read. Each file has
its name, size and fingerprint there. A run that continues reads the files in that order, even if
they have new names, and refuses a file that has changed. If a local text file has grown, only the
bytes that it had when the run began are read. The package `text` lists the files and reads them.
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

NEW_RUN_REMEDY = (
    "a run over other data needs another --output_dir (or --gcs_prefix), or --overwrite"
)
CHANGED_FILE_REMEDY = (
    "put the file back as it was when the run began, or begin anew with --overwrite"
)


@dataclass(frozen=True)
class FileRecord:
    """The record in metadata.json of one file of a data set.

    Attributes:
        name: The name under which rows refer to the file.
        bytes: The number of bytes of the file that the run reads, from its beginning.
        fingerprint: The fingerprint of these bytes if the file is local (see digests.py). For a
            file at a URL, the version that its server reports, or its size if the server reports
            none.
    """

    name: str
    bytes: int
    fingerprint: str


class DataFiles:
    """The files of a data set, in the order in which they are read.

    Args:
        files: The files, in the order in which they are read. `DataFile.byte_count` determines how
            many bytes of each file are read.
        file_records: The record of each file in metadata.json, in the same order. None to make
            the records, which computes the fingerprints.

    Attributes:
        files: The files, as a tuple.
        file_records: The record of each file, as a tuple.

    Raises:
        InputError: If a file cannot be read.
    """

    def __init__(
        self, files: Sequence[DataFile] = (), file_records: Sequence[FileRecord] | None = None
    ) -> None:
        self.files = tuple(files)
        if file_records is None:
            with ThreadPoolExecutor(BLOCKS_AT_ONCE, "fingerprint-data") as thread_pool:
                file_records = list(thread_pool.map(_record_of_file, files))
        self.file_records = tuple(file_records)
        # Name of a file, as the position of a row contains it -> the local files with this name,
        # each with its record. In a mixture, `DataFile.name` begins with the number of the source
        # (see open_data.py), but the name in the position does not. Therefore each file is listed
        # under its full name and under the part of it that follows the first slash.
        self._files_and_records_by_file_name: defaultdict[
            str, list[tuple[DataFile, FileRecord]]
        ] = defaultdict(list)
        for data_file, file_record in zip(self.files, self.file_records, strict=True):
            if data_file.is_local:
                for file_name in {data_file.name, data_file.name.partition("/")[2]}:
                    self._files_and_records_by_file_name[file_name].append((data_file, file_record))

    @classmethod
    def as_recorded(
        cls, files: Sequence[DataFile], metadata_of_hosts: Sequence[Mapping[str, Any]]
    ) -> "DataFiles":
        """Returns the files in the order and with the names and sizes that the run has recorded.

        A local text file may have grown since then. In this case, the run reads only the recorded
        number of bytes from the beginning of the file, and compares only these with the record.

        Args:
            files: The files that the data set has now.
            metadata_of_hosts: The metadata that hosts of the run have stored. If it contains no
                record of files, for example in a new run, the files keep their order and sizes.

        Raises:
            InputError: If a file is missing, was added after the run began, or differs from its
                record (a local text file may have grown), or if a local file cannot be read. The
                message names the file. The error is also raised if the hosts have recorded
                different files.
        """
        lists_of_file_records: set[tuple[FileRecord, ...]] = set()
        for metadata in metadata_of_hosts:
            if file_records_as_json := metadata.get("data_files"):
                lists_of_file_records.add(
                    tuple(FileRecord(**record_as_json) for record_as_json in file_records_as_json)
                )
        if not lists_of_file_records:
            return cls(files)
        if len(lists_of_file_records) > 1:
            raise InputError("--dataset_path: the hosts of this run have read different files")
        file_records = lists_of_file_records.pop()
        files_in_recorded_order = _in_recorded_order(files, file_records)
        # Path of a local file -> number of bytes that were appended to it after the run began.
        num_added_bytes_by_path = {}
        with ThreadPoolExecutor(BLOCKS_AT_ONCE, "fingerprint-data") as thread_pool:
            are_files_unchanged = thread_pool.map(
                _matches_record, files_in_recorded_order, file_records
            )
            for data_file, file_record, is_file_unchanged in zip(
                files_in_recorded_order, file_records, are_files_unchanged, strict=True
            ):
                num_added_bytes = data_file.byte_count - file_record.bytes
                if not is_file_unchanged:
                    sizes_phrase = (
                        f" ({file_record.bytes:,} bytes then, {data_file.byte_count:,} now)"
                        if num_added_bytes
                        else ""
                    )
                    raise InputError(
                        f"--dataset_path: {data_file.url} is not the file that the run began "
                        f"with{sizes_phrase}; {NEW_RUN_REMEDY}"
                    )
                if num_added_bytes:
                    num_added_bytes_by_path[data_file.url] = num_added_bytes
        if num_added_bytes_by_path:
            log.warning(
                "the last %s of %s are not read: they were not there when the run began",
                counted(sum(num_added_bytes_by_path.values()), "byte"),
                min(num_added_bytes_by_path)
                if len(num_added_bytes_by_path) == 1
                else counted(len(num_added_bytes_by_path), "file"),
            )
        files_of_run = []
        for data_file, file_record in zip(files_in_recorded_order, file_records, strict=True):
            files_of_run.append(replace(data_file, byte_count=file_record.bytes))
        return cls(files_of_run, file_records)

    def fingerprints(self) -> dict[str, str]:
        """Returns the sizes and fingerprints of the files, which hosts compare.

        Returns:
            A dict with the keys "data file NAME" and the values "SIZE bytes, FINGERPRINT".
        """
        return {
            f"data file {file_record.name}": (
                f"{file_record.bytes} bytes, {file_record.fingerprint}"
            )
            for file_record in self.file_records
        }

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the records of the files as the JSON that metadata.json contains."""
        return [asdict(file_record) for file_record in self.file_records]

    def check(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Checks that the local files from which rows were read have not changed.

        A fingerprint is computed again only if the size or modification time of the file differs.

        Args:
            rows: The positions of the rows, as `SampleFacts.row` contains them. The key "file"
                contains the name of the row's file. Rows without this key are ignored. In a
                mixture, the files of this name in all sources are checked.

        Raises:
            RunError: If a file has changed or cannot be read.
        """
        for file_name in {row_position["file"] for row_position in rows if "file" in row_position}:
            for data_file, file_record in self._files_and_records_by_file_name.get(file_name, ()):
                problem_message = f"{data_file.url}: has changed while the run was reading it"
                try:
                    with naming_unreadable(data_file.url):
                        file_status = os.stat(data_file.url)
                    modification_nanoseconds_text = str(file_status.st_mtime_ns)
                    refreshed_data_file = replace(
                        data_file,
                        byte_count=file_status.st_size,
                        content_version=modification_nanoseconds_text,
                    )
                    if refreshed_data_file == data_file or _matches_record(
                        refreshed_data_file, file_record
                    ):
                        continue
                except InputError as error:
                    problem_message = str(error)
                raise RunError(problem_message, remedy=CHANGED_FILE_REMEDY)


def _in_recorded_order(
    files: Sequence[DataFile], file_records: Sequence[FileRecord]
) -> list[DataFile]:
    """Returns the files in the recorded order and with their recorded names.

    A file that now has another name is recognised by its content. The content of a file with a
    recorded name is not compared here.

    Args:
        files: The files that the data set has now.
        file_records: The records of the files that the run reads.

    Raises:
        InputError: If a recorded file is missing, or if a file was not recorded.
    """
    file_by_name = {data_file.name: data_file for data_file in files}
    recorded_names = {file_record.name for file_record in file_records}
    unrecorded_files = [data_file for data_file in files if data_file.name not in recorded_names]
    unrecorded_files.sort(key=lambda data_file: data_file.byte_count)
    files_in_recorded_order = []
    for file_record in file_records:
        data_file = file_by_name.get(file_record.name)
        if data_file is None:
            files_matching_record = (
                unrecorded_file
                for unrecorded_file in unrecorded_files
                if _matches_record(unrecorded_file, file_record)
            )
            data_file = next(files_matching_record, None)
            if data_file is None:
                raise InputError(
                    f"--dataset_path: {file_record.name} is missing; {NEW_RUN_REMEDY}; this one "
                    "needs the file that it began with"
                )
            unrecorded_files.remove(data_file)
        files_in_recorded_order.append(replace(data_file, name=file_record.name))
    if unrecorded_files:
        raise InputError(
            f"--dataset_path: {unrecorded_files[0].name} was not read when the run began; take it "
            f"out, or give a glob that leaves it out; {NEW_RUN_REMEDY}"
        )
    return files_in_recorded_order


def _matches_record(file: DataFile, file_record: FileRecord) -> bool:
    """Returns whether a file still has the content that a run has recorded.

    A file that may grow (`file.may_grow` is True) may have become longer. Only the recorded number
    of bytes from the beginning of such a file are compared, by their fingerprint. Any other file
    must also have the recorded size.

    Args:
        file: The file as it is now.
        file_record: The record of the file.

    Raises:
        InputError: If a local file cannot be read.
    """
    if file.byte_count != file_record.bytes and not file.may_grow:
        return False
    file_with_recorded_size = replace(file, byte_count=file_record.bytes)
    return _record_of_file(file_with_recorded_size).fingerprint == file_record.fingerprint


def _record_of_file(file: DataFile) -> FileRecord:
    """Returns the record of a file for metadata.json.

    Args:
        file: The file. If it is local, the fingerprint in the record is computed from its first
            `file.byte_count` bytes.

    Raises:
        InputError: If a local file cannot be read.
    """
    if file.is_local:
        fingerprint_or_version_text = f"blocks {file_fingerprint(Path(file.url), file.byte_count)}"
    else:
        fingerprint_or_version_text = file.content_version or f"{file.byte_count} bytes"
    return FileRecord(file.name, file.byte_count, fingerprint_or_version_text)
