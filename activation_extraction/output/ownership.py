"""Ownership: of several processes with one machine_id, only the one that began last may write.

metadata.json in the bucket names the owner. Looking there before each write leaves a moment between
looking and writing, in which another process may begin. Where the store writes conditionally
(`Folder.conditional`: Google Cloud Storage and S3), that moment does no harm:

- A process that begins claims the JSON of the first shard that it is to store: it writes its name
  there, on condition that the JSON is as it saw it when it looked for what is stored. Then it
  writes metadata.json. Readers do not count a claim: a shard without its JSON does not exist.
- A shard's JSON is written on condition that its place is still empty, or holds the writer's own
  claim. JSONs are written in order, so a process that has lost one place writes no later one.
- metadata.json is written on condition that it is what this process wrote before.
- A shard file is only created; one that is there already is deleted first, by its version.

So no JSON and no metadata.json of an earlier process appears once a later one owns the folder, and
no shard file replaces one of the later. The owner is looked up before each write as well: in a
store without such requests, or one that ignores their conditions, nothing more can be promised.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from activation_extraction.cli.errors import StorageError
from activation_extraction.output.commit import claim_of, commit_name
from activation_extraction.output.folder import Folder, TakenError
from activation_extraction.output.metadata import METADATA, is_commit, remove_extraction
from activation_extraction.output.sealed_json import unseal


class Ownership:
    """The right of the process `owner` to write to one host's folder in a bucket.

    Methods raise StorageError when another process has begun to write there.
    """

    def __init__(self, folder: Folder, owner: str) -> None:
        self.owner = owner
        self.folder = folder
        self._versions: dict[str, str] = {}  # of the JSONs in the bucket, as far as we know
        self._claimed: set[str] = set()
        self._metadata: str | None = None  # the version that we wrote

    def claim(self, number: int, versions: Mapping[str, str]) -> bool:
        """Claims shard `number`; False when its JSON is not as in `versions`: look again.

        versions: of the JSONs, when it was decided what to store.
        """
        if not self.folder.conditional:
            return True
        self._versions = dict(versions)
        return self._claim(commit_name(number))

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

        The place that the owner would write to next stays claimed until we come to it.
        """
        while self.folder.conditional:
            names = {name for name in self.folder.listing() if is_commit(name)}
            self._versions, self._claimed = {}, set()
            gate = next(n for n in range(1, len(names) + 2) if commit_name(n) not in names)
            if not self._claim(commit_name(gate)):
                continue
            remove_extraction(self.folder, keep=self._claimed)
            if gate == 1 or self._claim(commit_name(1)):
                return
        remove_extraction(self.folder)

    def check(self) -> None:
        """Whether metadata.json still names us."""
        data = self.folder.read(METADATA)
        if data is None or unseal(data, self.folder.url).get("owner") != self.owner:
            raise self._lost()

    def begin_shard(self, paths: Iterable[Path], json: str) -> None:
        """Uploads a shard's files, after the JSON of the shard that they replace is gone."""
        self.check()
        if not self.folder.conditional:
            self.folder.remove(json)
        elif json in self._versions and json not in self._claimed and not self._claim(json):
            raise self._lost()
        for path in paths:
            self._put_file(path)

    def _put_file(self, path: Path) -> None:
        """Uploads a file, which replaces none that a later owner has written."""
        if not self.folder.conditional:
            return self.folder.put(path)
        while True:
            try:
                return self.folder.put(path, new=True)
            except TakenError:
                version = self.folder.version(path.name)
                self.check()  # after looking: what a later owner has written stays
                if version is not None:
                    self.folder.remove(path.name, version)

    def commit(self, path: Path) -> None:
        """Uploads the JSON of a shard."""
        self.check()
        if not self.folder.conditional:
            return self.folder.put(path)
        version = self.folder.write_if(path.name, path.read_bytes(), self._versions.get(path.name))
        if version is None:
            raise self._lost()
        self._versions[path.name] = version
        self._claimed.discard(path.name)

    def put_metadata(self, path: Path) -> None:
        """Uploads metadata.json; the first one makes us the owner in everybody's eyes."""
        if not self.folder.conditional:
            return self.folder.put(path)
        data, written = path.read_bytes(), None
        if self._metadata is not None:
            written = self.folder.write_if(METADATA, data, self._metadata)
            if written is None:
                raise self._lost()
        while written is None:
            before = self.folder.version(METADATA)
            self._check_claims()  # after looking: whoever claims later writes later
            written = self.folder.write_if(METADATA, data, before)
        self._metadata = written

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
