"""A bucket in memory whose requests fail, have unknown outcomes, or stop a process.

Each process has a `MemoryFolder` of its own into the same `MemoryBucket`. Conditions are obeyed as
the stores obey them, and the version of an object is the MD5 of its content, as on S3: writing the
same content again does not change it.
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
    """Stands for SIGKILL: no request of this process is carried out from here on."""


class MemoryBucket:
    """The objects of a bucket: path -> (content, version). replaced: the commits that another one
    of the same run has replaced, which may never happen."""

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

    def put(self, path: str, data: bytes) -> str:
        if "/shard_" in path and path.endswith(".json"):
            before, now = (json.loads(each) for each in (self.objects.get(path, ["{}"])[0], data))
            if "files" in before and "files" in now and before["run"] == now["run"]:
                self.replaced.append(path)
        version = hashlib.md5(data).hexdigest()
        self.objects[path] = data, version
        return version


@dataclass
class Process:
    """One process. fate: is called before each of its requests with the request's number and name;
    it may return "stop" (the process ends instead), "fail" (the request is not carried out), "lost"
    (it is, but its answer does not arrive), "late" (it is when the bucket delivers late requests,
    unlike its answer) or "refuse" (the store does not permit it)."""

    fate: Callable[[int, str], str | None] = lambda number, request: None
    requests: int = 0
    dead: bool = False


class MemoryFolder(Folder):
    """A process's way to a folder of the bucket."""

    def __init__(self, bucket: MemoryBucket, process: Process, url: str = "mem://bucket") -> None:
        self.bucket, self.process = bucket, process
        super().__init__(url, patience=60)

    def child(self, name: str) -> "MemoryFolder":
        return MemoryFolder(self.bucket, self.process, f"{self.url}/{name}")

    def _open(self, scheme: str) -> Any:
        return _Files(self.bucket, self.process, self.given)


class _Files:
    """The requests to one folder; store/local_files.py describes them."""

    largest = None

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
                result = action(self.bucket.objects)
        if fate in ("fail", "lost", "late"):
            raise FolderError("no answer", final=False)
        return result

    def entries(self) -> dict[str, FileEntry | None]:
        below = f"{self.url}/"
        found = self._ask("listing", lambda objects: dict(objects))
        names = {p.removeprefix(below): each for p, each in found.items() if p.startswith(below)}
        files = {n: FileEntry(len(data), v) for n, (data, v) in names.items() if "/" not in n}
        return {**{name.split("/")[0]: None for name in names if "/" in name}, **files}

    def head(self, name: str) -> Any:
        found = self.read(name)
        return found and FileEntry(len(found[0]), found[1])

    def read(self, name: str, version: Any = None, most: Any = None, span: Any = None) -> Any:
        found = self._ask(f"reading {name}", lambda objects: objects.get(f"{self.url}/{name}"))
        if found is not None and version not in (None, found[1]):
            raise ChangedError("is another version now")
        return found and (found[0][slice(*span or (None, None))], found[1])

    def write(self, name: str, parts: Any, expected: Any) -> str:
        path = f"{self.url}/{name}"

        def put(objects: dict[str, tuple[bytes, str]]) -> str:
            if expected is not ANY and expected != (objects.get(path) or (None, None))[1]:
                raise ChangedError("is another version now")
            return self.bucket.put(path, b"".join(parts))

        return self._ask(f"writing {name}", put)

    def remove(self, name: str) -> None:
        self._ask(f"deleting {name}", lambda objects: objects.pop(f"{self.url}/{name}", None))
