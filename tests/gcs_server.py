"""An object store in memory that misbehaves: the XML of Google, S3 and Azure, and Google's JSON.

obstore speaks XML, with conditions on generations (Google) or ETags (S3, Azure); gcsfs reads models
and data sets by the JSON API. `Bucket` is its one bucket and what a client needs to reach it.
"""

import base64
import hashlib
import http
import json
import os
import random
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from html import unescape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # as folder.py

import gcsfs
import pytest

ACCOUNT = "account"  # as in an emulator of Azure, the first part of each path
# A number is the HTTP status of the answer, and a code may follow it, as in "400 RequestTimeout";
# the others are what networks do. Another one is "half", after which nothing arrives.
FAULTS = ("503", "429", "reset", "truncated", "lost")
PIECE = 2**16  # bytes of a body that are read at once


@dataclass(frozen=True)
class Stored:
    """An object. generation: grows with every write to the bucket."""

    data: bytes
    generation: int

    @property
    def tag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'

    @property
    def about(self) -> dict[str, str]:
        """What an answer of the XML API says of it in its headers."""
        generation = {"x-goog-generation": str(self.generation)}
        return {"ETag": self.tag, "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", **generation}


class Bucket:
    """The bucket `name`. Set `rate` to have that share of the requests fail in one of `faults`;
    `failed` counts what was done. `served` counts the bytes of objects in answers. `asked` lists
    the requests: (method, name of the object). `before` is called with each one before it is
    served. `received` is called with the size of each piece of a body that was read."""

    name = "bucket"

    def __init__(self, handler: "type[Handler] | None" = None) -> None:
        self.rate = 0.0
        self.faults: tuple[str, ...] = FAULTS
        self.failed: Counter[str] = Counter()
        self.served = 0
        self.asked: list[tuple[str, str]] = []
        self.before: Callable[[str, str], None] = lambda method, name: None
        self.received: Callable[[int], None] = lambda size: None
        self.chance = random.Random(0)
        self.lock = threading.RLock()
        self.stored: dict[str, Stored] = {}
        self._server = _Server(("127.0.0.1", 0), handler or Handler)
        self._server.bucket = self
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def port(self) -> int:
        return self._server.server_port

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which this process or another one reaches gs://bucket, s3://bucket and
        az://bucket."""
        address = f"http://127.0.0.1:{self.port}"
        return {
            "STORAGE_EMULATOR_HOST": address,
            "AWS_ENDPOINT_URL": address,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AZURE_STORAGE_ENDPOINT": f"{address}/{ACCOUNT}",
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": base64.b64encode(b"no secret at all").decode(),
        }

    def choose_fault(self) -> str | None:
        """What shall happen to the next request."""
        with self.lock:
            if self.chance.random() >= self.rate:
                return None
            fault = self.chance.choice(self.faults)
            self.failed[fault] += 1
            return fault

    def objects(self) -> dict[str, bytes]:
        """Name -> content of everything in the bucket."""
        return {name: stored.data for name, stored in sorted(dict(self.stored).items())}

    def put(self, name: str, data: bytes) -> None:
        """Writes an object behind everybody's back."""
        self.stored[name] = Stored(data, time.time_ns())

    def delete(self, name: str) -> None:
        del self.stored[name]

    def keep_little_unread(self) -> None:
        """Has the kernel accept only a few pieces of a body before they are read, as on a line that
        is the bottleneck. Holds for connections that are made from now on."""
        self._server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    bucket: Bucket

    def handle_error(self, *_: Any) -> None:
        """Clients that went away are part of the game."""


Answer = tuple[int, dict[str, str], bytes]  # status, headers, content


class Handler(BaseHTTPRequestHandler):
    """Answers one request. A subclass answers otherwise by its own `answer`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or the body of an answer waits 40 ms for its headers
    server: _Server

    def log_message(self, *_: Any) -> None:
        pass

    def _body(self, length: int) -> bytes:
        pieces = []
        while length and (piece := self.rfile.read(min(length, PIECE))):
            pieces.append(piece)
            length -= len(piece)
            self.server.bucket.received(len(piece))
        return b"".join(pieces)

    def _serve(self) -> None:
        bucket = self.server.bucket
        fault = bucket.choose_fault()
        length = int(self.headers.get("Content-Length") or 0)
        body = self._body(length)
        url = urlsplit(self.path)
        self.azure = url.path.startswith(f"/{ACCOUNT}/")
        self.query = {key: values[0] for key, values in parse_qs(url.query, True).items()}
        self.json = url.path.startswith(("/storage/", "/download/"))
        if fault == "reset" or len(body) < length:  # the client is gone
            return self._reset()
        if fault is not None and fault[0].isdigit():
            status, _, code = fault.partition(" ")
            return self._send(self.error(int(status), "no", code))
        where = re.sub(r"^/(download/)?storage/v1/b/([^/]+)(/o/?)?", r"/\2/", url.path)
        where = where.removeprefix(f"/{ACCOUNT}")
        place, _, name = unquote(where).lstrip("/").partition("/")
        bucket.asked.append((self.command, name))
        bucket.before(self.command, name)
        answer = self.answer(bucket, place, name, body)
        if fault == "lost":
            self._reset()
        else:
            self._send(answer, fault)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _serve

    def answer(self, bucket: Bucket, place: str, name: str, body: bytes) -> Answer:
        """Returns the answer to this request.

        Args:
            bucket: The bucket that the server has.
            place: The first part of the path, which should be the bucket's name.
            name: The name of the object; empty for a listing.
            body: The content of the request.
        """
        if place != bucket.name:
            code = "ContainerNotFound" if self.azure else "NoSuchBucket"
            return self.error(404, "no such bucket", code)
        if self.command in ("POST", "PUT", "DELETE"):
            with bucket.lock:  # a condition and its write are one step
                return self._change(bucket, name, body)
        return self._object(bucket, name) if name else self._listing(bucket)

    def _change(self, bucket: Bucket, name: str, body: bytes) -> Answer:
        found, headers = bucket.stored.get(name), self.headers
        tag, generation = (found.tag, str(found.generation)) if found else (None, "0")
        if "If-Match" in headers and found is None and not self.azure:  # so S3 answers
            return self.error(404, "no such object", "NoSuchKey")
        if self.azure and headers.get("If-None-Match") == "*" and found is not None:
            return self.error(409, "The specified blob already exists.", "BlobAlreadyExists")
        if (
            headers.get("If-Match", tag) != tag
            or (headers.get("If-None-Match") == "*" and found is not None)
            or headers.get("x-goog-if-generation-match", generation) != generation
        ):
            return self.error(412, "changed", "PreconditionFailed")
        if self.command == "PUT":
            bucket.put(name, body)
            return 200, bucket.stored[name].about, b""
        if self.command == "DELETE":
            return (204, {}, b"") if bucket.stored.pop(name, None) else self.error(404, "none")
        if self.azure:  # a batch of requests, each a part of the body
            (path,) = re.findall(rb"DELETE ([^\s?]+)", body)
            key = unquote(path.decode()).removeprefix(f"/{ACCOUNT}/{bucket.name}/")
            status = "202 Accepted" if bucket.stored.pop(key, None) else "404 no such blob"
            part = "Content-Type: application/http\r\nContent-ID: 0\r\n\r\nHTTP/1.1"
            batch = f"--batch\r\n{part} {status}\r\n\r\n\r\n--batch--\r\n"
            return 202, {"Content-Type": "multipart/mixed; boundary=batch"}, batch.encode()
        deleted = b""
        for key in re.findall(rb"<Key>(.*?)</Key>", body):  # S3 deletes many at a time
            bucket.stored.pop(unescape(key.decode()), None)
            deleted += b"<Deleted><Key>%s</Key></Deleted>" % key
        return 200, {}, b"<DeleteResult>%s</DeleteResult>" % deleted

    def _object(self, bucket: Bucket, name: str) -> Answer:
        found = bucket.stored.get(name)
        if found is None:
            return self.error(404, "no such object", "NoSuchKey")
        if self.json and self.query.get("alt") != "media" and "/download/" not in self.path:
            return 200, {}, json.dumps(_resource(name, found)).encode()
        if self.headers.get("If-Match", found.tag) != found.tag:
            return self.error(412, "changed", "PreconditionFailed")
        status, content, about = 200, found.data, found.about
        if wanted := re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", "")):
            size, start, stop = len(content), wanted[1], wanted[2]
            first = int(start) if start else max(0, size - int(stop))
            last = min(int(stop) + 1, size) if start and stop else size
            if first >= size:
                return self.error(416, "out of range", "InvalidRange")
            status, content = 206, content[first:last]
            about["Content-Range"] = f"bytes {first}-{last - 1}/{size}"
        with bucket.lock:
            bucket.served += len(content) * (self.command == "GET")
        return status, about, content

    def _listing(self, bucket: Bucket) -> Answer:
        prefix, delimiter = (self.query.get(key, "") for key in ("prefix", "delimiter"))
        entries: dict[str, Stored | None] = {}  # None is a folder
        for name, stored in sorted(dict(bucket.stored).items()):
            folder, found, _ = name[len(prefix) :].partition(delimiter or "\0")
            if name.startswith(prefix):
                key = prefix + folder + delimiter if delimiter and found else name
                entries[key] = None if key != name else stored
        files = {name: stored for name, stored in entries.items() if stored}
        folders = [name for name, stored in entries.items() if not stored]
        if self.json:
            items = [_resource(name, stored) for name, stored in files.items()]
            return 200, {}, json.dumps({"items": items, "prefixes": folders}).encode()
        if self.azure:
            return 200, {}, _azure_listing(files, folders)
        text = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(stored.data)}</Size><ETag>{stored.tag}"
            "</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name, stored in files.items()
        )
        for name in folders:
            text += f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"
        return 200, {}, f"<ListBucketResult>{text}</ListBucketResult>".encode()

    def error(self, status: int, message: str, code: str = "") -> Answer:
        """An answer in the language of the API that the request belongs to."""
        if self.json:
            return status, {}, json.dumps({"error": {"code": status, "message": message}}).encode()
        code = code or http.HTTPStatus(status).phrase.replace(" ", "")
        if self.azure:
            message += "\nRequestId:1\nTime:2026-01-01T00:00:00Z"
        text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        return status, {}, text.encode()

    def _send(self, answer: Answer, fault: str | None = None) -> None:
        status, headers, content = answer
        cut = fault in ("truncated", "half")
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[: len(content) // 2] if cut else content)
        if cut:
            self.wfile.flush()
            time.sleep(3 if fault == "half" else 0)
            self._reset()

    def _reset(self) -> None:
        """Ends the connection with a reset."""
        self.wfile.flush()
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.close_connection = True


def _azure_listing(files: dict[str, Stored], folders: list[str]) -> bytes:
    """A listing of Azure's, whose ETags lack the quotes that all other answers have."""
    text = "".join(
        f"<Blob><Name>{escape(name)}</Name><Properties>"
        "<Last-Modified>Thu, 01 Jan 2026 00:00:00 GMT</Last-Modified>"
        f"<Content-Length>{len(stored.data)}</Content-Length>"
        "<Content-Type>application/octet-stream</Content-Type>"
        f"<Etag>{stored.tag.strip(chr(34))}</Etag></Properties></Blob>"
        for name, stored in files.items()
    )
    for name in folders:
        text += f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>"
    return f"<EnumerationResults><Blobs>{text}</Blobs></EnumerationResults>".encode()


def _resource(name: str, stored: Stored) -> dict[str, Any]:
    """What the JSON API says of an object."""
    return {
        "name": name,
        "bucket": Bucket.name,
        "size": str(len(stored.data)),
        "generation": str(stored.generation),
        "md5Hash": base64.b64encode(hashlib.md5(stored.data).digest()).decode(),
        **dict.fromkeys(("timeCreated", "updated"), "2026-01-01T00:00:00.000Z"),
    }


@contextmanager
def gcs() -> Iterator[Bucket]:
    """A running store with one empty bucket."""
    with closing(Bucket()) as bucket:
        yield bucket


@pytest.fixture
def bucket(monkeypatch):
    """An empty bucket; this process and its children reach it as gs://bucket, s3://bucket or
    az://bucket."""
    with gcs() as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        gcsfs.GCSFileSystem.clear_instance_cache()
        # In this process gcsfs does not wait between its own attempts.
        monkeypatch.setattr(gcsfs.retry, "random", SimpleNamespace(random=lambda: -100.0))
        yield found
        gcsfs.GCSFileSystem.clear_instance_cache()
