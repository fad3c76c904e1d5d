"""A local HTTP server that answers as the Hugging Face hub does, for tests without internet.

It owns the part of the hub's protocol that downloads and streaming use: repository information,
file trees, and files with their commit, ETag (safetensors are LFS files) and byte ranges; no Xet or
login. Set HF_ENDPOINT to its address before huggingface_hub is imported. Files are read at each
request from `models/ORG/NAME/` and `datasets/ORG/NAME/` under one root. These are the revision
`main`; `NAME@v1` beside it is the revision `v1`. A commit is derived from the files.
"""

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

_NAME = r"(\w[\w.-]*/\w[\w.-]*)"
_API = re.compile(rf"/api/(models|datasets)/{_NAME}(?:/(tree|paths-info|revision)/([^/]+)(.*))?")
_RESOLVE = re.compile(rf"/(?:(datasets)/)?{_NAME}/resolve/([^/]+)/(.+)")


@dataclass
class Hub:
    """A running server: its address, each (method, path with query) asked of it so far, what those
    requests were authorised with, and the bytes of weights that it has sent."""

    endpoint: str
    requests: list[tuple[str, str]] = field(default_factory=list)
    authorizations: set[str | None] = field(default_factory=set)
    sent: int = 0


class _Server(ThreadingHTTPServer):
    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.hub = root, Hub(f"http://127.0.0.1:{self.server_port}")
        self.counting = threading.Lock()


@contextmanager
def serve_hub(root: Path) -> Iterator[Hub]:
    """Serves the repositories under `root` on a free local port until the block ends."""
    with _Server(root) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server.hub
        finally:
            server.shutdown()
            thread.join()


class _NotFound(Exception):
    """A refusal: clients choose their exception by `code`."""

    def __init__(self, code: str, commit: str = "") -> None:
        super().__init__(code)
        self.headers = {"X-Error-Code": code} | ({"X-Repo-Commit": commit} if commit else {})


@lru_cache(maxsize=4096)
def _sha256(path: Path, _size: int, _mtime_ns: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class _Repo:
    """One repository as it lies on disk at the moment of a request."""

    def __init__(self, root: Path, kind: str, name: str, revision: str) -> None:
        self.name = name
        main = root / kind / name
        if not main.is_dir():
            raise _NotFound("RepoNotFound")
        for self.folder in (main, *main.parent.glob(f"{main.name}@*")):
            entries = [self._entry(path) for path in sorted(self.folder.rglob("*"))]
            self.entries = {entry["path"]: entry for entry in entries}
            self.commit = hashlib.sha1(json.dumps([kind, name, entries]).encode()).hexdigest()
            if revision in (self.folder.name.partition("@")[2] or "main", self.commit):
                return
        raise _NotFound("RevisionNotFound")

    def _entry(self, path: Path) -> dict:
        name, stat = path.relative_to(self.folder).as_posix(), path.stat()
        if path.is_dir():
            return {"type": "directory", "oid": name, "size": 0, "path": name}
        digest = _sha256(path, stat.st_size, stat.st_mtime_ns)
        entry = {"type": "file", "oid": digest[:40], "size": stat.st_size, "path": name}
        if path.suffix == ".safetensors":
            entry["lfs"] = {"oid": digest, "size": stat.st_size, "pointerSize": 134}
        return entry

    def entry(self, name: str, kind: str) -> dict:
        entry = self.entries.get(name)
        if entry is None or entry["type"] != kind:
            raise _NotFound("EntryNotFound", self.commit)
        return entry


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # Lets clients keep a connection for many requests, on which
    disable_nagle_algorithm = True  # Nagle's algorithm could hold each answer back for 40 ms.
    server: _Server

    def log_message(self, *args: object) -> None:
        """Stays silent: `Hub.requests` is the log."""

    def do_GET(self) -> None:
        self.server.hub.requests.append((self.command, self.path))
        self.server.hub.authorizations.add(self.headers.get("Authorization"))
        form = parse_qs(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())
        url = urlsplit(self.path)
        try:
            if match := _RESOLVE.fullmatch(url.path):
                kind, name, revision, filename = map(unquote, match.groups("models"))
                self._send_file(_Repo(self.server.root, kind, name, revision), filename)
            elif match := _API.fullmatch(url.path):
                kind, name, action, revision, folder = map(unquote, match.groups(""))
                repo = _Repo(self.server.root, kind, name, revision or "main")
                answer = self._ask(repo, action, folder.strip("/"), form | parse_qs(url.query))
                self._send(200, json.dumps(answer).encode())
            else:
                raise _NotFound("NotFound")
        except _NotFound as error:
            self._send(404, json.dumps({"error": str(error)}).encode(), error.headers)

    do_HEAD = do_POST = do_GET

    def _ask(self, repo: _Repo, action: str, folder: str, query: dict) -> dict | list:
        if action == "paths-info":
            return [repo.entries[path] for path in query["paths"] if path in repo.entries]
        if action == "tree":
            prefix = repo.entry(folder, "directory")["path"] + "/" if folder else ""
            inside = [entry for path, entry in repo.entries.items() if path.startswith(prefix)]
            if query.get("recursive") in (["true"], ["True"]):
                return inside
            return [each for each in inside if "/" not in each["path"].removeprefix(prefix)]
        files = [path for path, entry in repo.entries.items() if entry["type"] == "file"]
        siblings = [{"rfilename": path} for path in files]
        return {"id": repo.name, "sha": repo.commit, "tags": [], "siblings": siblings}

    def _send_file(self, repo: _Repo, filename: str) -> None:
        entry = repo.entry(filename, "file")
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{entry["oid"]}"'}
        headers |= {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        size, status, start, end = entry["size"], 200, 0, entry["size"]
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            status, start, end = 206, int(asked[1]), min(int(asked[2] or size) + 1, size)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        with (repo.folder / filename).open("rb") as file:
            file.seek(start)
            data = file.read(end - start)
        if "lfs" in entry:
            headers |= {"X-Linked-ETag": f'"{entry["lfs"]["oid"]}"', "X-Linked-Size": str(size)}
            if self.command != "HEAD":
                with self.server.counting:
                    self.server.hub.sent += len(data)
        self._send(status, data, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        defaults = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        for name, value in (defaults | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
