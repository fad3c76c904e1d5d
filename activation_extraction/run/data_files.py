"""This module checks that a data set's files still are what stored shards have read.

metadata.json lists the files, local ones or those at a URL, in the order in which they are read,
with a digest of those that a shard has samples of. A run that continues reads them in the recorded
order, whatever they are called now, and refuses a file that has changed. The others are digested
while the run computes.
"""

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.common.log import log
from activation_extraction.run.digests import file_digests, reading, same_beginning
from activation_extraction.text.file_list import JSON_LINES, TextFile, modified

RECORD = "data_files"  # the field in metadata.json
ANEW = "a run over other data needs another --output_dir (or --gcs_prefix), or --overwrite"
CHANGED = f"{ANEW}; this one needs the file that it began with"
OTHER_CONTENT = (
    "--dataset_path: {} has other content here than where another host of this run has read it"
)
# At the start, hosts compare blocks from all over a file, or all of it if it is small.
BLOCK, BLOCKS = 2**16, 64


@dataclass(frozen=True)
class Recorded:
    """A file as metadata.json records it. digest: "" if no stored shard has read the file."""

    name: str
    bytes: int
    digest: str = ""

    def contradicts(self, other: "Recorded") -> bool:
        """Returns whether the content has changed; with another size, it may just have grown."""
        both = self.digest and other.digest and self.bytes == other.bytes
        return bool(both) and self.digest != other.digest


class DataFiles:
    """The files are listed in the order in which they are read, with digests of those read so far.

    `grown`: whether a file that the stored shards have read has new rows at its end.
    """

    def __init__(self, files: Sequence[TextFile] = ()) -> None:
        self.files = tuple(files)
        self.grown = False
        self._by_name = {file.name: file for file in files}
        self._read: dict[str, Recorded] = {}
        self._read_by_others: dict[str, Recorded] = {}
        self._pending: dict[str, Future[str]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="digest-data")

    @classmethod
    def as_recorded(
        cls,
        files: Sequence[TextFile],
        own: Sequence[Mapping[str, Any]],
        others: Sequence[Mapping[str, Any]] = (),
        may_grow: bool = True,
    ) -> "DataFiles":
        """Returns the files as a run that continues has to read them.

        own: the metadata that this host has stored, here and in the bucket; others: that of other
        hosts. may_grow: whether the last file may have new lines at its end. Raises InputError,
        naming the file, if one that this host's shards have read has changed, or if hosts have read
        different ones.
        """
        recorded = _merged([*own, *others])
        if not recorded:
            return cls(files)
        read_here = {f.name for metadata in own for f in _recorded_in(metadata) if f.digest}
        data_files = cls(_in_recorded_order(files, recorded))
        pairs = zip(data_files.files, recorded, strict=True)
        read = [(now, before) for now, before in pairs if before.name in read_here]
        same_size = [now for now, before in read if now.size == before.bytes]
        digests = _digests(same_size, "the data set")
        data_files._read_by_others = {file.name: file for file in recorded if file.digest}
        for now, before in read:
            if digests.get(now.name) != before.digest:
                if not may_grow or now is not read[-1][0] or not _has_grown(now, before):
                    sizes = f" ({before.bytes:,} bytes then, {now.size:,} now)"
                    raise InputError(
                        f"--dataset_path: {now.url} has changed since stored shards read it"
                        f"{sizes if now.size != before.bytes else ''}; {CHANGED}"
                    )
                data_files.grown = True
            data_files._read[now.name] = before
        return data_files

    def start_digest(self, name: str) -> None:
        """Starts to digest a file, because a row of it has been read."""
        if name not in self._pending:
            self._pending[name] = self._pool.submit(_digest_unchanged, self._by_name[name])

    def settle(self) -> bool:
        """Waits for the digests of all files read so far; returns whether any is new.

        Raises RunError if a file has changed since the run began, or if other hosts have read one
        with other content.
        """
        before = dict(self._read)
        for name, future in list(self._pending.items()):
            if not future.done():
                log.info("waiting for the SHA-256 of %s", self._by_name[name].url)
            now = Recorded(name, self._by_name[name].size, future.result())
            if now.contradicts(self._read_by_others.get(name, now)):
                raise RunError(OTHER_CONTENT.format(name))
            self._read[name] = now
        return self._read != before

    def to_json(self) -> list[dict[str, Any]]:
        """Returns the files as metadata.json lists them."""
        read = dict(self._read)  # another thread may add to it
        files = (read.get(file.name, Recorded(file.name, file.size)) for file in self.files)
        return [{**vars(file)} for file in files]

    def sampled(self) -> dict[str, str]:
        """Returns a digest of each file's size and of samples of its content, for hosts to compare.

        Reading all of a large file would take too long; a small one is read whole.
        """
        return {f"data file {file.name}": _sampled(file) for file in self.files}


def _merged(earlier: Iterable[Mapping[str, Any]]) -> list[Recorded]:
    """Returns what all hosts have recorded. Raises InputError if they have read different files."""
    merged: list[Recorded] = []
    for recorded in filter(None, map(_recorded_in, earlier)):
        merged = merged or recorded
        if [file.name for file in merged] != [file.name for file in recorded]:
            raise InputError("--dataset_path: the hosts of this run have read different files")
        for n, (one, other) in enumerate(zip(merged, recorded, strict=True)):
            if one.contradicts(other):
                raise InputError(OTHER_CONTENT.format(one.name))
            merged[n] = one if one.digest else other
    return merged


def _recorded_in(metadata: Mapping[str, Any]) -> list[Recorded]:
    """Returns the files that metadata.json lists."""
    return [Recorded(f["name"], f["bytes"], f["digest"]) for f in metadata.get(RECORD, ())]


def _in_recorded_order(files: Sequence[TextFile], recorded: Sequence[Recorded]) -> list[TextFile]:
    """Returns the files under their recorded names, recognising renamed ones by size and content.

    Raises InputError if there is one too many or too few.
    """
    by_name = {file.name: file for file in files}
    names = {file.name for file in recorded}
    new = [file for file in files if file.name not in names]
    ordered = []
    for before in recorded:
        now = by_name.get(before.name)
        if now is None:
            same_size = (file for file in new if file.size == before.bytes)
            alike = (f for f in same_size if before.digest in ("", *_digests([f]).values()))
            if (now := next(alike, None)) is None:
                raise InputError(f"--dataset_path: {before.name} is missing; {CHANGED}")
            new.remove(now)
        ordered.append(replace(now, name=before.name))
    if new:
        raise InputError(
            f"--dataset_path: {new[0].name} was not read when the run began; take it out, or give "
            f"a glob that leaves it out; {ANEW}"
        )
    return ordered


def _digests(files: Sequence[TextFile], what: str | None = None) -> dict[str, str]:
    """Returns what identifies each file's content by name: a SHA-256, or the store's version.

    what: what a progress bar calls the files; None: there is no bar.
    """
    sha256 = file_digests([Path(file.url) for file in files if file.local], what)
    return {
        file.name: f"sha256 {sha256[Path(file.url)]}"
        if file.local
        else file.version or f"{file.size} bytes"
        for file in files
    }


def _digest_unchanged(file: TextFile) -> str:
    """Returns a file's digest. Raises RunError if it has changed since it was listed."""
    digest = _digests([file])[file.name]
    if file.local and modified(os.stat(file.url).st_mtime) != file.version:
        raise RunError(
            f"{file.url}: has changed while the run was reading it",
            remedy="let whatever writes to it finish; then give the same command again",
        )
    return digest


def _has_grown(now: TextFile, before: Recorded) -> bool:
    """Returns whether lines were added at the end of a file, and nothing else has changed."""
    if now.size <= before.bytes or not now.local or not now.url.lower().endswith(JSON_LINES):
        return False
    return same_beginning(Path(now.url), before.bytes, before.digest.removeprefix("sha256 "))


def _sampled(file: TextFile) -> str:
    if not file.local:
        return f"{file.size} {file.version}"
    digest = hashlib.sha256(str(file.size).encode())
    with reading(Path(file.url)), open(file.url, "rb") as content:
        whole = file.size <= BLOCK * BLOCKS
        step = BLOCK if whole else (file.size - BLOCK) // (BLOCKS - 1)
        for start in range(0, file.size, step):
            content.seek(start)
            digest.update(content.read(BLOCK))
    return digest.hexdigest()
