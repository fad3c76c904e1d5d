"""A Google Cloud Storage that misbehaves: the emulator of gcp-storage-emulator behind a proxy.

The proxy forwards each request, or fails it in one of the ways in which networks and stores fail.
It adds what the emulator lacks: generation preconditions, also of the XML API's uploads, and
listings in pages of 1,000 names.
`Bucket` is one bucket behind it and what a client needs in its environment to reach it.
"""

import hashlib
import http
import http.client
import json
import os
import random
import re
import socket
import struct
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType, SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlencode, urlsplit

os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # as store/folder.py

import fsspec
import gcsfs
import pytest
from gcp_storage_emulator.handlers import objects
from gcp_storage_emulator.server import RequestHandler, create_server

# A number is the HTTP status of the answer; the others are what networks do.
FAULTS = ("503", "429", "reset", "stall", "truncated", "lost")
STALL_SECONDS = 3.0
CHUNK = 65536
PAGE = 1000  # names in one answer to a listing, as in the real store
MUTATIONS = {"POST", "PUT", "DELETE", "PATCH"}


class Bucket:
    """The bucket `name`. Set `rate` to have that share of the requests fail in one of `faults`;
    `bytes_per_second` slows uploads down, all together. `failed` counts what was done, `served` the
    bytes of objects in answers. `asked` lists the requests: (method, name of the object). `before`
    is called with each one before it is served, `after` also with its status. `door` opens another
    way into the same bucket."""

    name = "bucket"

    def __init__(self, emulator_port: int, writing: Any = None) -> None:
        self.rate = 0.0
        self.faults: tuple[str, ...] = FAULTS
        self.bytes_per_second: float | None = None
        self.failed: Counter[str] = Counter()
        self.requests = 0
        self.served = 0
        self.asked: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda method, name: None
        self.pages: dict[str, dict[str, Any]] = {}
        self.uploads: dict[str, str] = {}  # id of a resumable upload -> name of its object
        self.after: Callable[[str, str, int], None] = lambda method, name, status: None
        self.writing = writing or threading.Lock()  # a precondition and its write are one step
        self.chance = random.Random(0)
        self.emulator_port = emulator_port
        self.storage: Any = None  # the emulator's
        self.lock = threading.Lock()
        self._server = _Server(self)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @contextmanager
    def door(self) -> Iterator["Bucket"]:
        """The same bucket at another address, so that requests of two clients are told apart."""
        another = Bucket(self.emulator_port, self.writing)
        try:
            yield another
        finally:
            another.close()

    @property
    def environment(self) -> dict[str, str]:
        """For a client, in this process or another one. Requests time out after a second."""
        return {
            "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{self._server.server_port}",
            "FSSPEC_GCS": json.dumps({"requests_timeout": 1.0 if self.rate else 30.0}),
        }

    def choose_fault(self) -> str | None:
        """What shall happen to the next request."""
        with self.lock:
            self.requests += 1
            if self.chance.random() >= self.rate:
                return None
            fault = self.chance.choice(self.faults)
            self.failed[fault] += 1
            return fault

    def objects(self) -> dict[str, bytes]:
        """Name -> content of everything in the bucket, straight from the emulator."""
        listing = json.loads(self._ask(f"/storage/v1/b/{self.name}/o"))
        names = [item["name"] for item in listing.get("items", [])]
        return {name: self._ask(f"{self._path(name)}?alt=media") for name in names}

    def put(self, name: str, data: bytes) -> None:
        """Writes an object behind everybody's back."""
        query = urlencode({"uploadType": "media", "name": name})
        self._ask(f"/upload/storage/v1/b/{self.name}/o?{query}", "POST", data)

    def fill(self, files: Mapping[str, bytes]) -> None:
        """As `put`, for thousands of objects."""
        for name, data in files.items():
            about = objects._make_object_resource("", self.name, name, "", str(len(data)))
            self.storage.create_file(self.name, name, data, objects._checksums(data, about))

    def delete(self, name: str) -> None:
        """Deletes an object behind everybody's back."""
        self._ask(self._path(name), "DELETE")

    def generation(self, name: str) -> str:
        """That of the object; "0" when there is none."""
        return json.loads(self._ask(self._path(name)) or b"{}").get("generation", "0")

    def _path(self, name: str) -> str:
        return f"/storage/v1/b/{self.name}/o/{quote(name, safe='')}"

    def _ask(self, path: str, method: str = "GET", data: bytes | None = None) -> bytes:
        return _answer_of(self.emulator_port, method, path, data)[1]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, bucket: Bucket) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.bucket = bucket

    def handle_error(self, *_: Any) -> None:
        """Clients that went away are part of the game."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or the body of an answer waits 40 ms for its headers

    def log_message(self, *_: Any) -> None:
        pass

    def _serve(self) -> None:
        assert isinstance(self.server, _Server)
        bucket = self.server.bucket
        fault = bucket.choose_fault()
        body = self._body(bucket)
        if body is None:  # the client is gone
            self.close_connection = True
            return
        if fault is not None and fault.isdigit():
            self._answer(int(fault), [], self._error(int(fault), "no"))
            return
        if fault == "reset":
            self._reset()
            return
        if fault == "stall":
            time.sleep(STALL_SECONDS)
            self._reset()
            return
        query = parse_qs(urlsplit(self.path).query)
        session = query.get("upload_id", [""])[0]
        name = bucket.uploads[session] if session else _object(self.path, body)
        bucket.asked.append((self.command, name))
        bucket.before(self.command, name)
        with bucket.writing if self.command in MUTATIONS else nullcontext():
            expected = query.get("ifGenerationMatch", [None])[0]
            expected = self.headers.get("x-goog-if-generation-match", expected)
            kept: list[tuple[str, str]] = []
            if expected is not None and bucket.generation(name) != expected:
                status, content = 412, self._error(412, "changed")
            else:
                status, kept, content = self._forward(bucket, body)
                if self._xml and status == 200:
                    tag = f'"{hashlib.md5(body).hexdigest()}"'
                    kept += [("ETag", tag), ("x-goog-generation", bucket.generation(name))]
                elif self._xml:
                    content = self._error(status, "no such bucket")
            bucket.after(self.command, name, status)
        for location in (value for key, value in kept if key == "Location"):
            bucket.uploads[parse_qs(urlsplit(location).query)["upload_id"][0]] = name
        if fault == "lost":
            self._reset()
            return
        if self.command == "GET" and not name and status == 200:
            content = _page(bucket.pages, content, query.get("pageToken", [None])[0])
        if "alt=media" in self.path:
            with bucket.lock:
                bucket.served += len(content)
        self._answer(status, kept, content, cut=fault == "truncated")

    def _forward(self, bucket: Bucket, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """Status, headers and content of the emulator's answer."""
        if "pageToken=" in self.path:  # a later page is kept here
            return 200, [], b"{}"
        headers = {k: v for k, v in self.headers.items() if k.lower() != "transfer-encoding"}
        given = self.command, self.path, body, headers
        response, content = _answer_of(bucket.emulator_port, *given)
        skipped = {"content-length", "transfer-encoding", "connection", "date", "server"}
        kept = [(k, v) for k, v in response.getheaders() if k.lower() not in skipped]
        return response.status, kept, content

    @property
    def _xml(self) -> bool:
        return _names_object(self.path)

    def _error(self, status: int, message: str) -> bytes:
        """The body of an answer, in the language of the API that the request belongs to."""
        if not self._xml:
            return json.dumps({"error": {"code": status, "message": message}}).encode()
        code = http.HTTPStatus(status).phrase.replace(" ", "")
        return f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()

    do_GET = do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = _serve

    def _body(self, bucket: Bucket) -> bytes | None:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        left, parts = int(self.headers.get("Content-Length") or 0), []
        while left:
            part = self.rfile.read(min(left, CHUNK))
            if not part:
                return None
            if bucket.bytes_per_second is not None:
                with bucket.lock:
                    time.sleep(len(part) / bucket.bytes_per_second)
            left -= len(part)
            parts.append(part)
        return b"".join(parts)

    def _answer(
        self, status: int, headers: list[tuple[str, str]], content: bytes, cut: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self._reset()

    def _reset(self) -> None:
        """Ends the connection with a reset."""
        self.wfile.flush()
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True


def _answer_of(
    port: int,
    method: str,
    path: str,
    body: bytes | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[http.client.HTTPResponse, bytes]:
    """The emulator's answer to a request, and its content. It may be stopped meanwhile."""
    with closing(http.client.HTTPConnection("127.0.0.1", port)) as connection:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response, response.read()


def _names_object(path: str) -> bool:
    """Whether a path is one of the XML API, /bucket/object."""
    return not path.startswith(("/storage/", "/upload/", "/download/", "/batch/"))


def _object(path: str, body: bytes) -> str:
    """The name of the object that a request is about; "" for a bucket and for listings."""
    url = urlsplit(path)
    if _names_object(path):
        return unquote(url.path.lstrip("/").partition("/")[2])
    query = parse_qs(url.query)
    if "name" in query:
        return query["name"][0]
    if url.path.startswith("/upload/"):  # the name is in the first part of the body
        found = re.search(rb'"name": ?("(?:[^"\\\\]|\\\\.)*")', body[:4096])
        return json.loads(found[1]) if found else ""
    return unquote(url.path.partition("/o/")[2])


def _page(pages: dict[str, dict[str, Any]], content: bytes, token: str | None) -> bytes:
    """One page of a listing; the rest of it waits for the token that the page carries."""
    listing = json.loads(content) if token is None else pages.pop(token)
    if "items" not in listing:
        return content
    page = {**listing, "items": listing["items"][:PAGE]}
    if rest := listing["items"][PAGE:]:
        page["nextPageToken"] = uuid.uuid4().hex
        pages[page["nextPageToken"]] = {**listing, "items": rest, "prefixes": []}
    return json.dumps(page).encode()


@contextmanager
def gcs() -> Iterator[Bucket]:
    """A running store with one empty bucket."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    RequestHandler.disable_nagle_algorithm = True
    emulator = create_server("127.0.0.1", port, in_memory=True, default_bucket=Bucket.name)
    emulator._storage._write_config_to_file = lambda: None  # all of it, at every write
    emulator.start()
    bucket = Bucket(port)
    bucket.storage = emulator._storage
    try:
        yield bucket
    finally:
        bucket.close()
        threading.Thread(target=emulator.stop).start()  # which takes half a second


@pytest.fixture
def bucket(monkeypatch):
    """An empty bucket; this process and its children reach it as gs://bucket."""
    with gcs() as found:

        def reach():
            for name, value in found.environment.items():
                monkeypatch.setenv(name, value)
            monkeypatch.setattr(fsspec.config, "conf", {})
            fsspec.config.set_conf_env(fsspec.config.conf)
            gcsfs.GCSFileSystem.clear_instance_cache()

        reach()
        found.reach = reach
        # In this process gcsfs does not wait between its own attempts.
        monkeypatch.setattr(gcsfs.retry, "random", SimpleNamespace(random=lambda: -100.0))
        yield found
        gcsfs.GCSFileSystem.clear_instance_cache()
