"""Serves a Google Cloud Storage that discards large objects: `python -m benchmarks.null_bucket`.

It answers obstore's requests with the right sizes, generations and ETags. The content of an object
above 1 MiB is discarded, and reads as zeros. Benchmarks run it in a separate process. It prints its
port.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from threading import Lock
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

SMALL = 2**20  # bytes of an object whose content is kept, at most
PIECE = 2**20  # bytes of a body that are read at once


class Stored(NamedTuple):
    """An object.

    Attributes:
        size: Its size in bytes.
        generation: Its generation, which grows with every write to the bucket.
        data: Its content; empty if it is larger than SMALL.
    """

    size: int
    generation: int
    data: bytes


class Null(BaseHTTPRequestHandler):
    """Answers one request; all requests share the objects."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or the body of an answer waits 40 ms for its headers
    objects: dict[str, Stored] = {}  # by name
    generations = count(1)
    lock = Lock()

    def log_message(self, *_: object) -> None:
        pass

    @property
    def name(self) -> str:
        """Returns the name of the object; "" for the bucket."""
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    def do_GET(self) -> None:
        if not self.name:
            return self._send(200, self._listing())
        stored = self.objects.get(self.name)
        if stored is None:
            return self._send(404)
        if span := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")):
            start, last = int(span[1]), min(int(span[2]), stored.size - 1)
            whole = stored.data or bytes(last + 1)  # zeros, if the content was discarded
            content = whole[start : last + 1]
            return self._send(206, content, stored, f"bytes {start}-{last}/{stored.size}")
        self._send(200, stored.data, stored)

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        self._send(204 if self.objects.pop(self.name, None) else 404)

    def do_PUT(self) -> None:
        size, content = self._body()
        with self.lock:
            now = self.objects.get(self.name, Stored(0, 0, b"")).generation
            if self.headers.get("x-goog-if-generation-match", str(now)) != str(now):
                return self._send(412)
            made = self.objects[self.name] = Stored(size, next(self.generations), content)
        self._send(200, b"", made)

    def _listing(self) -> bytes:
        prefix = parse_qs(urlsplit(self.path).query).get("prefix", [""])[0]
        text = "".join(
            f'<Contents><Key>{escape(name)}</Key><Size>{stored.size}</Size><ETag>"{stored.generation}"'
            "</ETag><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
            for name, stored in sorted(dict(self.objects).items())
            if name.startswith(prefix)
        )
        return f"<ListBucketResult>{text}</ListBucketResult>".encode()

    def _body(self) -> tuple[int, bytes]:
        """Reads the body; returns its size in bytes, and its content, b"" if it is not small."""
        size = left = int(self.headers.get("Content-Length") or 0)
        kept, buffer = b"", memoryview(bytearray(min(PIECE, max(size, 1))))
        while left:
            got = self.rfile.readinto(buffer[: min(left, PIECE)])
            if size <= SMALL:
                kept += buffer[:got]
            left -= got
        return size, kept

    def _send(
        self, status: int, content: bytes = b"", about: Stored | None = None, span: str = ""
    ) -> None:
        self.send_response(status)
        if span:
            self.send_header("Content-Range", span)
        size = len(content)
        if about is not None:
            size = about.size if self.command == "HEAD" else size
            self.send_header("ETag", f'"{about.generation}"')
            self.send_header("x-goog-generation", str(about.generation))
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(size))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def null_bucket() -> Iterator[int]:
    """Runs the store, which this process and its children reach as gs://bucket; yields its port."""
    command = [sys.executable, "-m", "benchmarks.null_bucket"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            os.environ["STORAGE_EMULATOR_HOST"] = f"http://127.0.0.1:{port}"
            yield port
        finally:
            server.kill()
            os.environ.pop("STORAGE_EMULATOR_HOST", None)


if __name__ == "__main__":
    running = ThreadingHTTPServer(("127.0.0.1", 0), Null)
    print(running.server_port, flush=True)
    running.serve_forever()
