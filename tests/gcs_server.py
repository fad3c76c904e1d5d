"""Serves an object store in memory that can misbehave.

It understands the XML APIs of Google, S3 and Azure, which obstore uses with conditions on
generations (Google) or ETags (S3, Azure), and Google's JSON API, by which gcsfs reads models and
data sets. `Bucket` is its only bucket, with the environment variables that clients need.
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
# The faults that happen by default. A number is the HTTP status of the answer; an error code may
# follow it, as in "400 RequestTimeout". The others are failures of the network. The connection is
# reset before the request is served ("reset"), in the middle of its answer ("truncated"), or after
# it was served and before its answer ("lost"). Tests may also set "half", which is like "truncated"
# with 3 seconds of silence before the reset.
FAULTS = ("503", "429", "reset", "truncated", "lost")
PIECE = 2**16  # bytes of a body that are read at once


@dataclass(frozen=True)
class Stored:
    """An object.

    Attributes:
        data: Its content.
        generation: Its generation, which grows with every write to the bucket.
    """

    data: bytes
    generation: int

    @property
    def tag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'

    @property
    def about(self) -> dict[str, str]:
        """Returns the headers with which the XML APIs describe it."""
        generation = {"x-goog-generation": str(self.generation)}
        return {"ETag": self.tag, "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT", **generation}


class Bucket:
    """The bucket `name` and its server.

    Attributes:
        fault_rate: The share of requests that fail. Tests set it.
        faults: The faults of these requests, chosen at random; see FAULTS.
        failed: Fault -> the number of requests that it has hit.
        served: The bytes of objects in all answers.
        requests: The requests in order: (method, name of the object).
        before: Is called with the method and the name before each request is served.
        received: Is called with the size of each piece of a request's body that was read.
        chance: The generator of all random choices.
        lock: Is held while objects are changed.
        stored: The objects by name.
    """

    name = "bucket"

    def __init__(self, handler: "type[Handler] | None" = None) -> None:
        self.fault_rate = 0.0
        self.faults: tuple[str, ...] = FAULTS
        self.failed: Counter[str] = Counter()
        self.served = 0
        self.requests: list[tuple[str, str]] = []
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
        """Returns environment variables by which processes reach the bucket.

        It has the URLs gs://bucket, s3://bucket and az://bucket.
        """
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
        """Returns the fault of the next request, or None to serve it."""
        with self.lock:
            if self.chance.random() >= self.fault_rate:
                return None
            fault = self.chance.choice(self.faults)
            self.failed[fault] += 1
            return fault

    def objects(self) -> dict[str, bytes]:
        """Returns the content of each object by name."""
        return {name: stored.data for name, stored in sorted(dict(self.stored).items())}

    def put(self, name: str, content: bytes) -> None:
        """Writes an object directly, without a request."""
        self.stored[name] = Stored(content, time.time_ns())

    def delete(self, name: str) -> None:
        del self.stored[name]

    def keep_little_unread(self) -> None:
        """Has the kernel accept only a few pieces of a body before they are read.

        So new connections behave as on a slow network.
        """
        self._server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    bucket: Bucket

    def handle_error(self, *_: Any) -> None:
        """Ignores errors of connections, because tests make clients end in the middle of them."""


Answer = tuple[int, dict[str, str], bytes]  # status, headers, content


class Handler(BaseHTTPRequestHandler):
    """Answers requests. A subclass overrides `answer` to change the answers."""

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
        bucket.requests.append((self.command, name))
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
        stored, headers = bucket.stored.get(name), self.headers
        tag, generation = (stored.tag, str(stored.generation)) if stored else (None, "0")
        if "If-Match" in headers and stored is None and not self.azure:  # so S3 answers
            return self.error(404, "no such object", "NoSuchKey")
        if self.azure and headers.get("If-None-Match") == "*" and stored is not None:
            return self.error(409, "The specified blob already exists.", "BlobAlreadyExists")
        if (
            headers.get("If-Match", tag) != tag
            or (headers.get("If-None-Match") == "*" and stored is not None)
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
        stored = bucket.stored.get(name)
        if stored is None:
            return self.error(404, "no such object", "NoSuchKey")
        if self.json and self.query.get("alt") != "media" and "/download/" not in self.path:
            return 200, {}, json.dumps(_resource(name, stored)).encode()
        if self.headers.get("If-Match", stored.tag) != stored.tag:
            return self.error(412, "changed", "PreconditionFailed")
        status, content, about = 200, stored.data, stored.about
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
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter", "")
        files: dict[str, Stored] = {}
        folders: list[str] = []
        for name, stored in sorted(dict(bucket.stored).items()):
            if not name.startswith(prefix):
                continue
            head, separator, tail = name[len(prefix) :].partition(delimiter or "\0")
            if not separator or not tail:
                files[name] = stored
            elif prefix + head + separator not in folders:
                folders.append(prefix + head + separator)
                files.pop(folders[-1], None)  # an object that only stands for the folder
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
        """Returns an error in the format of the API that the request uses.

        Args:
            status: The HTTP status.
            message: The message.
            code: The code of the error in XML. Empty to derive it from the status.
        """
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
        for name, text in headers.items():
            self.send_header(name, text)
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
    """Returns a listing as Azure sends it; its ETags lack the quotes that other answers have."""
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
    """Returns an object's description in the JSON API."""
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
    """Runs a store with one empty bucket."""
    with closing(Bucket()) as bucket:
        yield bucket


@pytest.fixture
def bucket(monkeypatch):
    """Runs a store with an empty bucket, which this process and its children can reach.

    Its URLs are gs://bucket, s3://bucket and az://bucket.
    """
    with gcs() as server:
        for name, text in server.environment.items():
            monkeypatch.setenv(name, text)
        gcsfs.GCSFileSystem.clear_instance_cache()
        # In this process gcsfs does not wait between its own attempts.
        monkeypatch.setattr(gcsfs.retry, "random", SimpleNamespace(random=lambda: -100.0))
        yield server
        gcsfs.GCSFileSystem.clear_instance_cache()
