"""A local HTTP server that answers as the Hugging Face hub does, for tests without internet.

It owns the part of the hub's protocol that downloads and streaming use: repository information,
file trees, and files with their commit, ETag (safetensors are LFS files, with their SHA-256) and
byte ranges; no Xet or login. Set HF_ENDPOINT to its address before huggingface_hub, datasets or
transformers is imported. Files are read at each request from `models/ORG/NAME/` and
`datasets/ORG/NAME/` under one root. These are the revision `main`; `NAME@v1` beside it is the
revision `v1`. Commit ids are derived from the files, so changed files are a new commit.
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
_ACTION = r"(revision|tree|paths-info)/([^/]+)(?:/(.+))?"
_API = re.compile(rf"/api/(models|datasets)/{_NAME}(?:/{_ACTION})?")
_RESOLVE = re.compile(rf"/(?:(datasets)/)?{_NAME}/resolve/([^/]+)/(.+)")
_RANGE = re.compile(r"bytes=(?:(\d+)-(\d*)|-(\d+))")


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
    """Serve the repositories under `root` on a free local port until the block ends."""
    with _Server(root) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server.hub
        finally:
            server.shutdown()
            thread.join()


class _NotFound(Exception):
    """A refusal in the hub's form: clients choose their exception by X-Error-Code."""

    def __init__(self, code: str, message: str, commit: str | None = None) -> None:
        super().__init__(message)
        self.headers = {"X-Error-Code": code} | ({"X-Repo-Commit": commit} if commit else {})


@lru_cache(maxsize=4096)
def _blob_id(path: Path, size: int, _mtime_ns: int) -> str:
    """Git's id of a file's content, computed again only when its size or time changes."""
    return hashlib.sha1(b"blob %d\0" % size + path.read_bytes()).hexdigest()


@lru_cache(maxsize=4096)
def _sha256(path: Path, _size: int, _mtime_ns: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


class _Repo:
    """One repository as it lies on disk at the moment of a request."""

    def __init__(self, root: Path, kind: str, name: str, revision: str) -> None:
        self.name = name
        main = root / kind / name
        if not main.is_dir():
            raise _NotFound("RepoNotFound", "Repository not found")
        for folder in (main, *main.parent.glob(f"{main.name}@*")):
            self.folder = folder
            entries = [self._entry(path) for path in sorted(folder.rglob("*"))]
            self.entries = {entry["path"]: entry for entry in entries}
            self.commit = hashlib.sha1(json.dumps([kind, name, entries]).encode()).hexdigest()
            if revision in (folder.name.partition("@")[2] or "main", self.commit):
                return
        raise _NotFound("RevisionNotFound", f"Invalid rev id: {revision}")

    def _entry(self, path: Path) -> dict:
        name, stat = path.relative_to(self.folder).as_posix(), path.stat()
        if path.is_dir():
            oid = hashlib.sha1(name.encode()).hexdigest()
            return {"type": "directory", "oid": oid, "size": 0, "path": name}
        oid = _blob_id(path, stat.st_size, stat.st_mtime_ns)
        entry = {"type": "file", "oid": oid, "size": stat.st_size, "path": name}
        if path.suffix == ".safetensors":
            digest = _sha256(path, stat.st_size, stat.st_mtime_ns)
            entry["lfs"] = {"oid": digest, "size": stat.st_size, "pointerSize": 134}
        return entry

    def info(self) -> dict:
        files = [entry for entry in self.entries.values() if entry["type"] == "file"]
        siblings = [{"rfilename": entry["path"]} for entry in files]
        return {"id": self.name, "sha": self.commit, "tags": [], "siblings": siblings}

    def entry(self, name: str, kind: str) -> dict:
        entry = self.entries.get(name)
        if entry is None or entry["type"] != kind:
            raise _NotFound("EntryNotFound", f"No {kind} {name}", self.commit)
        return entry

    def tree(self, folder: str, recursive: bool) -> list[dict]:
        prefix = self.entry(folder, "directory")["path"] + "/" if folder else ""
        inside = [entry for path, entry in self.entries.items() if path.startswith(prefix)]
        return [e for e in inside if recursive or "/" not in e["path"].removeprefix(prefix)]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # Lets clients keep a connection for many requests, on which
    disable_nagle_algorithm = True  # Nagle's algorithm could hold each answer back for 40 ms.
    server: _Server

    def log_message(self, *args: object) -> None:
        """Stay silent: `Hub.requests` is the log."""

    def do_GET(self) -> None:
        self.server.hub.requests.append((self.command, self.path))
        self.server.hub.authorizations.add(self.headers.get("Authorization"))
        form = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        try:
            self._route(urlsplit(self.path).path, form.decode(errors="replace"))
        except _NotFound as error:
            self._send(404, json.dumps({"error": str(error)}).encode(), error.headers)

    do_HEAD = do_POST = do_GET

    def _route(self, path: str, form: str) -> None:
        if match := _RESOLVE.fullmatch(path):
            kind, name, revision, filename = map(unquote, match.groups("models"))
            self._send_file(_Repo(self.server.root, kind, name, revision), filename)
        elif match := _API.fullmatch(path):
            kind, name, action, revision, folder = map(unquote, match.groups(""))
            repo = _Repo(self.server.root, kind, name, revision or "main")
            self._send(200, json.dumps(self._ask(repo, action, folder, form)).encode())
        else:
            raise _NotFound("NotFound", f"This test hub has no {path}")

    def _ask(self, repo: _Repo, action: str, folder: str, form: str) -> dict | list:
        if action == "tree":
            query = parse_qs(urlsplit(self.path).query)
            return repo.tree(folder, recursive=query.get("recursive") in (["true"], ["True"]))
        if action == "paths-info":
            wanted = parse_qs(form).get("paths", [])
            return [repo.entries[path] for path in wanted if path in repo.entries]
        return repo.info()

    def _send_file(self, repo: _Repo, filename: str) -> None:
        entry = repo.entry(filename, "file")
        status, start, end = self._byte_range(entry["size"])
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{entry["oid"]}"'}
        if "lfs" in entry:
            digest = entry["lfs"]["oid"]
            headers |= {"X-Linked-ETag": f'"{digest}"', "X-Linked-Size": str(entry["size"])}
            if self.command != "HEAD":
                with self.server.counting:
                    self.server.hub.sent += end - start
        headers |= {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        if status != 200:
            span = f"{start}-{end - 1}" if status == 206 else "*"
            headers["Content-Range"] = f"bytes {span}/{entry['size']}"
        with (repo.folder / filename).open("rb") as file:
            file.seek(start)
            self._send(status, file.read(end - start), headers)

    def _byte_range(self, size: int) -> tuple[int, int, int]:
        """The status to answer with, the first byte to send and the one past the last."""
        match = _RANGE.fullmatch(self.headers.get("Range", ""))
        if not match:
            return 200, 0, size
        first, last, tail = match.groups()
        start = int(first) if first else max(size - int(tail), 0)
        end = min(int(last) + 1, size) if last else size
        return (206, start, end) if start < end else (416, 0, 0)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        defaults = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        for name, value in (defaults | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
