"""Ownership: of several processes with the same machine_id, only the last to begin may write.

On one machine, a lock on the folder decides. Where no lock is visible, in a bucket or on a file
system without locks, metadata.json names the owner. Each write is preceded by a look at it, but
another process may begin between the look and the write. If the store supports conditional writes
(`Folder.conditional`: Google Cloud Storage and S3), that does no harm:

- A process that begins claims the JSON of the first shard that it will store: it writes its own id
  there, on condition that the JSON has not changed since the process read the folder. Then it
  writes metadata.json. Readers do not count a claim, because a shard without its JSON does not
  exist.
- A shard's JSON is written on condition that it does not exist yet, or that it is the writer's own
  claim. JSONs are written in order, so a process that has lost one of them writes no later one.
- metadata.json is written on condition that it is what this process wrote before.
- A shard file is only ever created; an existing one is deleted first, by its version.
- A process that deletes an extraction first claims the JSON that the owner would write next, and
  then metadata.json. It deletes only versions that it has seen in a listing after which its claims
  still held, so it deletes no files of a later owner. No later owner relies on these files either,
  since it reads metadata.json again after its own claim.

So once a later process owns the folder, an earlier one writes no JSON and no metadata.json, and
neither replaces nor deletes a file of the later one. The owner is also checked before each write. A
store without conditional requests, or one that ignores the conditions, gets only this check.
"""

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Self

from activation_extraction.common.errors import StorageError
from activation_extraction.store.commit import METADATA, claim_of, commit_name
from activation_extraction.store.folder import Folder, ObjectExistsError
from activation_extraction.store.local_files import AtomicFile, lock_folder, unlock, write_bytes
from activation_extraction.store.metadata import (
    READERS,
    check_own,
    is_commit,
    own_files,
    read_owner,
)
from activation_extraction.store.resume import StoragePlan

DELETIONS = 128  # how many files are deleted between two checks of the owner


class Ownership:
    """The ownership of one host's folder, local or in a bucket, by the process `owner`.

    Methods raise StorageError when another process has begun to write there.
    """

    def __init__(self, folder: Folder, owner: str) -> None:
        self.owner = owner
        self.folder = folder
        self._lock: int | None = None
        self._versions: dict[str, str] = {}  # the last known versions of the JSONs in the bucket
        self._claimed: set[str] = set()
        self._began = False  # whether metadata.json has named this process
        self._metadata: str | None = None  # the version of metadata.json that this process wrote

    def lock(self) -> None:
        """Locks a local folder, if its file system has locks. Raises RunError if it is locked."""
        self._lock = lock_folder(Path(self.folder.url))

    def unlock(self) -> None:
        """Releases the lock."""
        unlock(self._lock)
        self._lock = None

    def claim(self, plan: StoragePlan) -> bool:
        """Claims the first shard to store; returns False if the folder has changed since `plan`."""
        if self.folder.conditional:
            self._versions = dict(plan.versions)
            if not self._claim(commit_name(plan.next.first)):
                return False
        return read_owner(self.folder) == plan.owner

    def _claim(self, name: str) -> bool:
        before = self._versions.get(name)
        version = self.folder.write_if(name, claim_of(self.owner), before)
        if version is None:
            return False
        self._versions[name] = version
        self._claimed.add(name)
        return True

    def clear(self) -> None:
        """Deletes the extraction in the folder, whose owner may be running, and claims shard 1.

        The JSON that the owner would have written next stays claimed until this process gets to it.
        metadata.json is a claim meanwhile, so that nobody continues an extraction which is only
        partly deleted.
        """
        self._delete()
        first = commit_name(1)
        if self.folder.conditional and first not in self._claimed and not self._claim(first):
            raise self._lost()

    def delete(self) -> None:
        """Deletes the extraction in the folder, and the claims too."""
        self._delete()
        self.release()
        self.folder.remove(METADATA, self._metadata)

    def _delete(self) -> None:
        check_own(self.folder)
        self._stop_owner()
        self.put_metadata(claim_of(self.owner))
        before = None
        while True:  # also delete files that were being written when the owner was stopped
            listing = self.folder.listing()
            kept = {METADATA, *self._claimed}
            entries = [(name, listing[name]) for name in own_files(listing) if name not in kept]
            if not entries or entries == before:
                break
            for start in range(0, len(entries), DELETIONS):
                self.check()
                self._check_claims()
                some = entries[start : start + DELETIONS]
                with ThreadPoolExecutor(READERS) as pool:
                    list(pool.map(lambda each: self.folder.remove(each[0], each[1].version), some))
            before = entries
        self._versions = {name: self._versions[name] for name in self._claimed}

    def _stop_owner(self) -> None:
        """Claims the JSON that the owner of the folder would write next."""
        claimed = not self.folder.conditional
        while not claimed:
            jsons = {
                name: entry for name, entry in self.folder.listing().items() if is_commit(name)
            }
            self._versions = {name: str(entry.version) for name, entry in jsons.items()}
            claim_size = len(claim_of(self.owner))
            commits = {name for name, entry in jsons.items() if entry.size > claim_size}
            names = map(commit_name, count(1))
            claimed = self._claim(next(name for name in names if name not in commits))

    def check(self) -> None:
        """Raises StorageError unless this process still owns the folder, by its lock or by
        metadata.json."""
        if self._lock is not None or not self._began:
            return
        if read_owner(self.folder) != self.owner:
            raise self._lost()

    def new_file(self, name: str) -> "AtomicFile | _NewObject":
        """Returns a shard's file, which appears when it is published. Raises OSError."""
        if self.folder.local:
            return AtomicFile(self.folder.fetch(name, Path()))
        return _NewObject(self, name)

    def begin_shard(self, json: str) -> None:
        """Withdraws the JSON of a shard that is about to be replaced. json: the JSON's name."""
        self.check()
        if not self.folder.conditional:
            self.folder.remove(json)
        elif json in self._versions and json not in self._claimed and not self._claim(json):
            raise self._lost()

    def write(self, name: str, data: bytes) -> None:
        """Writes a small file of a shard, after `begin_shard`."""
        with self.new_file(name) as file:
            file.write(data)
            file.finish()
            file.publish()

    def create(self, name: str, buffers: list[memoryview], size: int, crc32c: int) -> None:
        """Writes an object, but never replaces one that a later owner has written."""
        while True:
            try:
                return self.folder.create(name, buffers, size, crc32c)
            except ObjectExistsError:
                version = self.folder.version(name)
                self.check()  # after `version`, so that a later owner's object is not deleted
                if version is not None:
                    self.folder.remove(name, version)

    def commit(self, name: str, data: bytes) -> None:
        """Writes the JSON of a shard."""
        self.check()
        if not self.folder.conditional:
            return self.folder.write(name, data)
        version = self.folder.write_if(name, data, self._versions.get(name))
        if version is None:
            raise self._lost()
        self._versions[name] = version
        self._claimed.discard(name)

    def put_metadata(self, data: bytes) -> None:
        """Writes metadata.json. The first one tells other processes that this one is the owner.

        Raises OSError if the folder is local.
        """
        if self.folder.conditional:
            self._metadata = self._write_metadata(data)
        else:
            self.check()
            if self.folder.local:
                path = self.folder.fetch(METADATA, Path())
                path.parent.mkdir(parents=True, exist_ok=True)
                write_bytes(path, data)
            else:
                self.folder.write(METADATA, data)
        self._began = True

    def _write_metadata(self, data: bytes) -> str:
        """Writes metadata.json conditionally, and returns its version."""
        if self._metadata is not None:
            version = self.folder.write_if(METADATA, data, self._metadata)
            if version is None:
                raise self._lost()
            return version
        version = None
        while version is None:
            before = self.folder.version(METADATA)
            self._check_claims()  # after `version`: a process that claims later also writes later
            version = self.folder.write_if(METADATA, data, before)
        return version

    def _check_claims(self) -> None:
        for name in self._claimed:
            if self.folder.version(name) != self._versions[name]:
                raise self._lost()

    def release(self) -> None:
        """Removes the claims that were not needed."""
        for name in sorted(self._claimed):
            self.folder.remove(name, self._versions[name])
        self._claimed.clear()

    def _lost(self) -> StorageError:
        return StorageError(
            f"{self.folder.url}: another process has begun to write there",
            remedy="give each machine a --machine_id of its own, or leave it to that one",
        )


class _NewObject:
    """An object in a bucket with the methods of AtomicFile. It is in memory until `publish`."""

    def __init__(self, owner: Ownership, name: str) -> None:
        self._owner = owner
        self._name = name
        self._buffers: list[memoryview] = []
        self._size = 0
        self._crc32c = 0
        self._update = import_module("crc32c").crc32c  # imported here: readers do not need it

    def write(self, data: bytes | memoryview) -> int:
        content = memoryview(data).cast("B")
        self._buffers.append(content)
        self._crc32c = self._update(content, self._crc32c)
        self._size += content.nbytes
        return content.nbytes

    def finish(self) -> None:
        pass

    def publish(self) -> None:
        self._owner.create(self._name, self._buffers, self._size, self._crc32c)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._buffers = []
