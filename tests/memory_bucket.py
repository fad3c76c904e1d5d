"""Simulates a bucket in memory whose requests fail, have unknown outcomes, or stop a process.

Each simulated process has its own `MemoryFolder` of the same `MemoryBucket`. Conditions work as in
real stores. The version of an object is the MD5 of its content, as on S3, so writing the same
content again does not change it.
"""

import hashlib
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from activation_extraction.store.folder import ANY, ChangedError, FileEntry, Folder, FolderError


class Stopped(BaseException):
    """Stands for SIGKILL: the bucket ignores all further requests of the process."""


class MemoryBucket:
    """The objects of a bucket.

    Attributes:
        objects: Path -> content and version.
        lock: Is held while objects are read or changed.
        replaced: The paths of commits that were replaced by a commit of the same run. Tests assert
            that there are none.
        late: The requests that `deliver` carries out.
    """

    def __init__(self) -> None:
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.lock = threading.Lock()
        self.replaced: list[str] = []
        self.late: list[Callable[[dict[str, tuple[bytes, str]]], Any]] = []

    def deliver(self) -> None:
        """Carries out all late requests, as far as their conditions still hold."""
        with self.lock:
            for action in self.late:
                with suppress(ChangedError):
                    action(self.objects)
            self.late.clear()

    def put(self, path: str, content: bytes) -> str:
        if "/shard_" in path and path.endswith(".json"):
            before = json.loads(self.objects.get(path, ["{}"])[0])
            now = json.loads(content)
            if "files" in before and "files" in now and before["run"] == now["run"]:
                self.replaced.append(path)
        version = hashlib.md5(content).hexdigest()
        self.objects[path] = content, version
        return version


@dataclass
class Process:
    """A simulated process.

    Attributes:
        fate: Decides about each request. It takes the number and the name of the request, and
            returns None to carry it out or one of these:
            "stop": The process ends instead.
            "fail": The request is not carried out, and no answer arrives.
            "lost": The request is carried out, but no answer arrives.
            "late": No answer arrives; the request is carried out by `MemoryBucket.deliver`.
            "refuse": The store denies permission.
        requests: The number of requests so far.
        dead: Whether the process has ended.
    """

    fate: Callable[[int, str], str | None] = lambda number, request: None
    requests: int = 0
    dead: bool = False


class MemoryFolder(Folder):
    """A folder of the bucket, as one process uses it."""

    def __init__(self, bucket: MemoryBucket, process: Process, url: str = "mem://bucket") -> None:
        self.bucket, self.process = bucket, process
        super().__init__(url, patience_seconds=60)

    def child(self, name: str) -> "MemoryFolder":
        return MemoryFolder(self.bucket, self.process, f"{self.url}/{name}")

    def _open(self, scheme: str) -> Any:
        return _Files(self.bucket, self.process, self.full_url)


class _Files:
    """The requests to one folder; store/local_files.py describes them."""

    max_file_bytes = None

    def __init__(self, bucket: MemoryBucket, process: Process, url: str) -> None:
        self.bucket, self.process, self.url = bucket, process, url

    def _ask(self, request: str, action: Callable[[dict[str, tuple[bytes, str]]], Any]) -> Any:
        process = self.process
        with self.bucket.lock:
            number, process.requests = process.requests, process.requests + 1
        fate = None if process.dead else process.fate(number, request)
        if process.dead or fate == "stop":
            process.dead = True
            raise Stopped
        if fate == "refuse":
            raise FolderError("permission denied")
        if fate == "late":
            self.bucket.late.append(action)
        elif fate != "fail":
            with self.bucket.lock:
                answer = action(self.bucket.objects)
        if fate in ("fail", "lost", "late"):
            raise FolderError("no answer", is_permanent=False)
        return answer

    def entries(self) -> dict[str, FileEntry | None]:
        below = f"{self.url}/"
        objects = self._ask("listing", lambda objects: dict(objects))
        files: dict[str, FileEntry | None] = {}
        folders: dict[str, FileEntry | None] = {}
        for path, (content, version) in objects.items():
            if not path.startswith(below):
                continue
            name, separator, _ = path.removeprefix(below).partition("/")
            if separator:
                folders[name] = None
            else:
                files[name] = FileEntry(len(content), version)
        return folders | files

    def head(self, name: str) -> Any:
        stored = self.read(name)
        return stored and FileEntry(len(stored[0]), stored[1])

    def read(self, name: str, version: Any = None, most: Any = None, span: Any = None) -> Any:
        stored = self._ask(f"reading {name}", lambda objects: objects.get(f"{self.url}/{name}"))
        if stored is not None and version not in (None, stored[1]):
            raise ChangedError("is another version now")
        return stored and (stored[0][slice(*span or (None, None))], stored[1])

    def write(self, name: str, parts: Any, expected: Any) -> str:
        path = f"{self.url}/{name}"

        def put(objects: dict[str, tuple[bytes, str]]) -> str:
            if expected is not ANY and expected != (objects.get(path) or (None, None))[1]:
                raise ChangedError("is another version now")
            return self.bucket.put(path, b"".join(parts))

        return self._ask(f"writing {name}", put)

    def remove(self, name: str) -> None:
        self._ask(f"deleting {name}", lambda objects: objects.pop(f"{self.url}/{name}", None))
