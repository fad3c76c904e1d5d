"""Ownership: of several processes with one machine_id, only the one that began last may write.

On this machine, a lock on the folder decides. metadata.json names the owner for all who cannot see
such a lock: in a bucket, and where the file system has none. Looking there before each write leaves
a moment between looking and writing, in which another process may begin. Where the store writes
conditionally (`Folder.conditional`: Google Cloud Storage and S3), that moment does no harm:

- A process that begins claims the JSON of the first shard that it is to store: it writes its name
  there, on condition that the JSON is as it saw it when it looked for what is stored. Then it
  writes metadata.json. Readers do not count a claim: a shard without its JSON does not exist.
- A shard's JSON is written on condition that its place is still empty, or holds the writer's own
  claim. JSONs are written in order, so a process that has lost one place writes no later one.
- metadata.json is written on condition that it is what this process wrote before.
- A shard file is only created; one that is there already is deleted first, by its version.
- A process that deletes an extraction first claims the place that its owner would write to next,
  and then that of metadata.json. It deletes only the versions that it has seen in a listing, after
  which its claims still held: they are no later owner's. No later owner counts on them either: it
  looks at metadata.json again after its own claim.

So no JSON and no metadata.json of an earlier process appears once a later one owns the folder, no
shard file replaces one of the later, and none of the later's is deleted. The owner is looked up
before each write as well: in a store without such requests, or one that ignores their conditions,
nothing more can be promised.
"""

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Self

from activation_extraction.common.errors import StorageError
from activation_extraction.store.commit import METADATA, claim_of, commit_name
from activation_extraction.store.folder import Folder, TakenError
from activation_extraction.store.local_files import AtomicFile, lock_folder, unlock, write_bytes
from activation_extraction.store.metadata import READERS, check_own, is_commit, own_files, owner_of
from activation_extraction.store.resume import StoragePlan

DELETIONS = 128  # files deleted before the owner is looked up again


class Ownership:
    """The right of the process `owner` to write to one host's folder, local or in a bucket.

    Methods raise StorageError when another process has begun to write there.
    """

    def __init__(self, folder: Folder, owner: str) -> None:
        self.owner = owner
        self.folder = folder
        self._lock: int | None = None
        self._versions: dict[str, str] = {}  # of the JSONs in the bucket, as far as we know
        self._claimed: set[str] = set()
        self._began = False  # whether metadata.json has named us
        self._metadata: str | None = None  # the version that we wrote

    def lock(self) -> None:
        """Locks a local folder, if its file system can. Raises RunError if it is locked."""
        self._lock = lock_folder(Path(self.folder.url))

    def unlock(self) -> None:
        """Gives up the lock."""
        unlock(self._lock)
        self._lock = None

    def claim(self, plan: StoragePlan) -> bool:
        """Claims the first shard to store; False when the folder is not as planned: look again."""
        if self.folder.conditional:
            self._versions = dict(plan.versions)
            if not self._claim(commit_name(plan.next.first)):
                return False
        return owner_of(self.folder) == plan.owner

    def _claim(self, name: str) -> bool:
        before = self._versions.get(name)
        version = self.folder.write_if(name, claim_of(self.owner), before)
        if version is None:
            return False
        self._versions[name] = version
        self._claimed.add(name)
        return True

    def clear(self) -> None:
        """Deletes the extraction in the folder, whose owner may be at work, and claims shard 1.

        The place that the owner would write to next stays claimed until we come to it, and
        metadata.json names us: killed in the middle of this, it is not continued.
        """
        self._delete()
        first = commit_name(1)
        if self.folder.conditional and first not in self._claimed and not self._claim(first):
            raise self._lost()

    def delete(self) -> None:
        """Deletes the extraction in the folder for good."""
        self._delete()
        self.release()
        self.folder.remove(METADATA, self._metadata)

    def _delete(self) -> None:
        check_own(self.folder)
        self._stop_owner()
        self.put_metadata(claim_of(self.owner))
        before = None
        while True:  # until nothing is left that was on its way when the owner was stopped
            listing = self.folder.listing()
            kept = {METADATA, *self._claimed}
            entries = [(name, listing[name]) for name in own_files(listing) if name not in kept]
            if not entries or entries == before:
                break
            for start in range(0, len(entries), DELETIONS):
                self.check()
                self._check_claims()
                some = entries[start : start + DELETIONS]
                with ThreadPoolExecutor(READERS) as pool:  # where there are versions, only these
                    list(pool.map(lambda each: self.folder.remove(each[0], each[1].version), some))
            before = entries
        self._versions = {name: self._versions[name] for name in self._claimed}

    def _stop_owner(self) -> None:
        """Claims the JSON that the owner of the folder would write next."""
        claimed = not self.folder.conditional
        while not claimed:
            jsons = {n: entry for n, entry in self.folder.listing().items() if is_commit(n)}
            self._versions = {name: str(entry.version) for name, entry in jsons.items()}
            claim_size = len(claim_of(self.owner))
            commits = {name for name, entry in jsons.items() if entry.size > claim_size}
            claimed = self._claim(next(n for n in map(commit_name, count(1)) if n not in commits))

    def check(self) -> None:
        """Whether we still are the owner: by our lock, or by metadata.json."""
        if self._lock is not None or not self._began:
            return
        if owner_of(self.folder) != self.owner:
            raise self._lost()

    def new_file(self, name: str) -> "AtomicFile | _NewObject":
        """Returns a shard's file, which appears when it is published. Raises OSError."""
        if self.folder.local:
            return AtomicFile(self.folder.fetch(name, Path()))
        return _NewObject(self, name)

    def begin_shard(self, json: str) -> None:
        """Called when a shard's bytes are ready: the JSON of the shard that it replaces goes.

        `json` is the name of both.
        """
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
        """Writes an object, which replaces none that a later owner has written."""
        while True:
            try:
                return self.folder.create(name, buffers, size, crc32c)
            except TakenError:
                version = self.folder.version(name)
                self.check()  # after looking: what a later owner has written stays
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
        """Writes metadata.json; the first one makes us the owner in everybody's eyes.

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
            written = self.folder.write_if(METADATA, data, self._metadata)
            if written is None:
                raise self._lost()
            return written
        written = None
        while written is None:
            before = self.folder.version(METADATA)
            self._check_claims()  # after looking: whoever claims later writes later
            written = self.folder.write_if(METADATA, data, before)
        return written

    def _check_claims(self) -> None:
        for name in self._claimed:
            if self.folder.version(name) != self._versions[name]:
                raise self._lost()

    def release(self) -> None:
        """Gives up the claims that were not needed."""
        for name in sorted(self._claimed):
            self.folder.remove(name, self._versions[name])
        self._claimed.clear()

    def _lost(self) -> StorageError:
        return StorageError(
            f"{self.folder.url}: another process has begun to write there",
            remedy="give each machine a --machine_id of its own, or leave it to that one",
        )


class _NewObject:
    """An object in a bucket, whose bytes stay in memory until it is published. It is used as an
    AtomicFile is."""

    def __init__(self, owner: Ownership, name: str) -> None:
        self._owner = owner
        self._name = name
        self._buffers: list[memoryview] = []
        self._size = 0
        self._crc32c = 0
        self._add = import_module("crc32c").crc32c  # which reading does without

    def write(self, data: bytes | memoryview) -> int:
        content = memoryview(data).cast("B")
        self._buffers.append(content)
        self._crc32c = self._add(content, self._crc32c)
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
