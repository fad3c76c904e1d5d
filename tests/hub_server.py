"""Serves local repositories as the Hugging Face hub does, for tests without internet.

It implements the part of the hub's protocol that downloads and streaming use: repository
information, file trees in pages, files with their commit, ETag and byte ranges, and private
repositories; no Xet and no login. Binary files are LFS files: requests for them are redirected to a
second address, as the hub redirects them to its content delivery network (CDN). Set HF_ENDPOINT to
the server's address before huggingface_hub is imported. Files are read at each request from
`models/ORG/NAME/` and `datasets/ORG/NAME/` under one root, as the revision `main`. The revision
`v1` is in `NAME@v1` beside these. A commit is a hash of the files of its revision.
"""

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

_NAME = r"(\w[\w.-]*/\w[\w.-]*)"
_API = re.compile(rf"/api/(models|datasets)/{_NAME}(?:/(tree|paths-info|revision)/([^/]+)(.*))?")
_RESOLVE = re.compile(rf"(/cdn)?/(?:(datasets)/)?{_NAME}/resolve/([^/]+)/(.+)")
# Extensions of the files that the hub keeps in LFS.
_LFS = {".safetensors", ".gz", ".npz", ".parquet"}


class Hub(ThreadingHTTPServer):
    """A running server.

    Attributes:
        root: The folder of the repositories.
        endpoint: Its address.
        cdn: The address to which requests for LFS files are redirected. It is that of the same
            server under another name, so that clients take it for another server.
        page: The most entries in an answer to a request for a file tree.
        tokens: Names of private repositories (ORG/NAME), and the token that may read each.
        expired: Tokens that the server does not accept, even for public repositories.
        ignores_ranges: Whether the server sends whole files in place of ranges.
        failures: Number of the next requests that are answered with "503 Service Unavailable".
        requests: The paths of all requests to `endpoint` in order.
        authorizations: The Authorization headers of all requests to `endpoint`; None for those
            without one.
        cdn_authorizations: The same, for the requests to `cdn`.
        sent: The bytes of the content of each file that the server has sent, by the file's name.
        counting: Is held while `sent` changes.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.root, self.endpoint = root, f"http://127.0.0.1:{self.server_port}"
        self.cdn = f"http://localhost:{self.server_port}/cdn"
        self.page = 1000
        self.tokens: dict[str, str] = {}
        self.expired: set[str] = set()
        self.ignores_ranges = False
        self.failures = 0
        self.requests: list[str] = []
        self.authorizations: set[str | None] = set()
        self.cdn_authorizations: set[str | None] = set()
        self.sent, self.counting = Counter[str](), threading.Lock()


@contextmanager
def serve_hub(root: Path) -> Iterator[Hub]:
    """Serves the repositories under `root` on a free local port until the block ends."""
    with Hub(root) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


class _NotFound(Exception):
    """The answer is 404, or 401 for a repository that a request without a token may not see.

    Its arguments are the code by which clients choose their exception, and optionally the commit.
    """


@lru_cache(maxsize=4096)
def _sha256(path: Path, _size: int, _mtime_ns: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _entry(folder: Path, path: Path) -> dict:
    name, stat = path.relative_to(folder).as_posix(), path.stat()
    if path.is_dir():
        return {"type": "directory", "oid": name, "size": 0, "path": name}
    digest = _sha256(path, stat.st_size, stat.st_mtime_ns)
    entry = {"type": "file", "oid": digest[:40], "size": stat.st_size, "path": name}
    if path.suffix in _LFS:
        entry["lfs"] = {"oid": digest, "size": stat.st_size, "pointerSize": 134}
    return entry


def _revision(root: Path, kind: str, name: str, revision: str) -> tuple[Path, dict[str, dict], str]:
    """Reads a revision of a repository as it is now.

    Args:
        root: The folder of the repositories.
        kind: "models" or "datasets".
        name: ORG/NAME.
        revision: The name of the revision, or a commit.

    Returns:
        The folder of the revision, its entries by path, and its commit.
    """
    main = root / kind / name
    if not main.is_dir():
        raise _NotFound("RepoNotFound")
    for folder in (main, *main.parent.glob(f"{main.name}@*")):
        entries = [_entry(folder, path) for path in sorted(folder.rglob("*"))]
        commit = hashlib.sha1(json.dumps([kind, name, entries]).encode()).hexdigest()
        if revision in (folder.name.partition("@")[2] or "main", commit):
            return folder, {entry["path"]: entry for entry in entries}, commit
    raise _NotFound("RevisionNotFound")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps a connection for many requests
    disable_nagle_algorithm = True  # which would delay answers on such a connection by 40 ms
    server: Hub

    def log_message(self, *args: object) -> None:
        """Prints nothing, because `Hub.requests` is the log."""

    def do_GET(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers.get("Content-Length", 0))).decode())
        url = urlsplit(self.path)
        authorization = self.headers.get("Authorization")
        if url.path.startswith("/cdn/"):
            self.server.cdn_authorizations.add(authorization)
        else:
            self.server.requests.append(self.path)
            self.server.authorizations.add(authorization)
        if self.server.failures and "agent-harnesses" not in url.path:
            self.server.failures -= 1
            return self._send(503, b"{}")
        if authorization and authorization.removeprefix("Bearer ") in self.server.expired:
            message = {"X-Error-Message": "Invalid credentials in Authorization header"}
            return self._send(401, b"{}", message)
        try:
            if match := _RESOLVE.fullmatch(url.path):
                cdn, kind, name, revision, filename = match.groups()
                repository = kind or "models", unquote(name), unquote(revision)
                if cdn is None:
                    self._check_token(repository[1])
                self._send_file(unquote(filename), *_revision(self.server.root, *repository))
            elif match := _API.fullmatch(url.path):
                self._check_token(match[2])
                self._send_information(form | parse_qs(url.query), *map(unquote, match.groups("")))
            else:
                raise _NotFound("NotFound")
        except _NotFound as error:
            names = "X-Error-Code", "X-Repo-Commit"
            status = 401 if error.args == ("RepoNotFound",) and authorization is None else 404
            self._send(status, b"{}", dict(zip(names, error.args, strict=False)))

    def _check_token(self, name: str) -> None:
        """Raises _NotFound if the repository is private, and the request lacks its token."""
        token = self.server.tokens.get(name)
        if token is not None and self.headers.get("Authorization") != f"Bearer {token}":
            raise _NotFound("RepoNotFound")

    do_HEAD = do_POST = do_GET

    def _send_information(
        self, query: dict, kind: str, name: str, action: str, revision: str, folder: str
    ) -> None:
        _, entries, commit = _revision(self.server.root, kind, name, revision or "main")
        prefix = folder.strip("/") + "/" if folder.strip("/") else ""
        files = [path for path, entry in entries.items() if entry["type"] == "file"]
        siblings = [{"rfilename": path} for path in files]
        headers: dict[str, str] = {}
        answer: dict | list = {"id": name, "sha": commit, "tags": [], "siblings": siblings}
        if action == "paths-info":
            answer = [entries[path] for path in query["paths"] if path in entries]
        elif action == "tree" and prefix and prefix[:-1] not in entries:
            raise _NotFound("EntryNotFound", commit)
        elif action == "tree":
            deep = query.get("recursive") in (["true"], ["True"])
            inside = [path for path in entries if path.startswith(prefix)]
            answer = [entries[p] for p in inside if deep or "/" not in p.removeprefix(prefix)]
            start = int(query.get("cursor", ["0"])[0])
            stop = start + self.server.page
            if len(answer) > stop:
                path = urlsplit(self.path).path
                parameters = f"cursor={stop}" + "&recursive=true" * deep
                headers["Link"] = f'<{self.server.endpoint}{path}?{parameters}>; rel="next"'
            answer = answer[start:stop]
        self._send(200, json.dumps(answer).encode(), headers)

    def _send_file(self, filename: str, folder: Path, entries: dict, commit: str) -> None:
        entry = entries.get(filename, {"type": "none"})
        if entry["type"] != "file":
            raise _NotFound("EntryNotFound", commit)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{entry["oid"]}"'}
        headers |= {"Accept-Ranges": "bytes", "Content-Type": "application/octet-stream"}
        size, status, start, end = entry["size"], 200, 0, entry["size"]
        header = "" if self.server.ignores_ranges else self.headers.get("Range", "")
        if byte_range := re.fullmatch(r"bytes=(\d+)-(\d*)", header):
            status, start, end = 206, int(byte_range[1]), min(int(byte_range[2] or size) + 1, size)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
            if start >= size:
                return self._send(416, b"", {"Content-Range": f"bytes */{size}"})
        content = (folder / filename).read_bytes()[start:end]
        if "lfs" in entry:
            headers |= {"X-Linked-ETag": f'"{entry["lfs"]["oid"]}"', "X-Linked-Size": str(size)}
            if not self.path.startswith("/cdn/"):
                location = {"Location": f"{self.server.cdn}{self.path}"}
                return self._send(302, b"", headers | location)
        if self.command != "HEAD":
            with self.server.counting:
                self.server.sent[filename] += len(content)
        self._send(status, content, headers)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        defaults = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        for name, text in (defaults | (headers or {})).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
