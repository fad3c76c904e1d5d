"""A Google Cloud Storage that keeps little content: `python -m benchmarks.null_bucket`.

It prints its port, answers requests as the store does, with sizes, generations and checksums,
and throws the bytes of large objects away. It is for benchmarks, in a process of its own.
"""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from crc32c import crc32c

SMALL = 2**20  # bytes of objects that are kept
PIECE = 2**20


class Null(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, dict[str, Any]] = {}  # by name
    contents: dict[str, bytes] = {}  # of small objects
    sessions: dict[str, tuple[str, int, int]] = {}  # of resumable uploads: name, size, crc32c
    generations = count(1)
    lock = threading.Lock()

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        name = unquote(url.path.partition("/o/")[2])
        if name:
            known = self.objects.get(name)
            if known is not None and "alt=media" in url.query:
                return self._send(200, self.contents.get(name, b""))
            return self._answer(404 if known is None else 200, known or {})
        if not url.path.endswith("/o"):
            return self._answer(200, {"name": "bucket"})
        prefix = parse_qs(url.query).get("prefix", [""])[0]
        found = {name: each for name, each in self.objects.items() if name.startswith(prefix)}
        inside = {name: name.removeprefix(prefix) for name in found}
        items = [found[name] for name in found if "/" not in inside[name]]
        folders = {prefix + rest.split("/")[0] + "/" for rest in inside.values() if "/" in rest}
        self._answer(200, {"items": items, "prefixes": sorted(folders)})

    def do_DELETE(self) -> None:
        self.objects.pop(unquote(urlsplit(self.path).path.partition("/o/")[2]), None)
        self._answer(204, None)

    def do_PUT(self) -> None:
        """Creates an object, as obstore asks for it."""
        made = self._made(unquote(urlsplit(self.path).path).split("/", 2)[2], *self._body())
        if made is None:
            return self._answer(412, {})
        self._answer(200, None, [("ETag", '"x"'), ("x-goog-generation", made["generation"])])

    def _take_chunk(self, session: str, size: int, crc: int) -> None:
        """Takes a chunk of a resumable upload, as gcsfs sends it."""
        name, before, sum_before = self.sessions[session]
        # What a chunk adds to the checksum is not needed: no peer compares it.
        self.sessions[session] = name, before + size, sum_before ^ crc
        if self.headers.get("Content-Range", "").endswith("/*"):
            return self._answer(308, None, [("Range", f"bytes=0-{before + size - 1}")])
        self._answer(200, self._made(name, before + size, sum_before ^ crc, b""))

    def do_POST(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        size, crc, data = self._body()
        if "upload_id" in query:
            return self._take_chunk(query["upload_id"][0], size, crc)
        kind = query["uploadType"][0]
        if kind == "multipart":
            boundary = data.split(b"\n", 1)[0].rstrip(b"\r")
            head, content = data.split(boundary)[1:3]
            data = content.split(b"\r\n\r\n" if b"\r\n\r\n" in content else b"\n\n", 1)[1]
            data = data.removesuffix(b"\r\n").removesuffix(b"\n")
            found = re.search(rb'"name": ?("[^"]*")', head)
            name = json.loads(found[1]) if found else ""
            size, crc = len(data), crc32c(data)
        elif kind == "resumable":
            name = query.get("name", [""])[0] or json.loads(data)["name"]
            session = str(next(self.generations))
            self.sessions[session] = name, 0, 0
            place = (
                f"http://{self.headers['Host']}/upload/storage/v1/b/bucket/o?upload_id={session}"
            )
            return self._answer(200, None, [("Location", place)])
        else:
            name = query["name"][0]
        made = self._made(name, size, crc, data)
        self._answer(412 if made is None else 200, made)

    def _made(self, name: str, size: int, crc: int, data: bytes) -> dict[str, Any] | None:
        """The object, which takes the place of another one; None if a precondition fails."""
        query = parse_qs(urlsplit(self.path).query)
        expected = query.get("ifGenerationMatch", [None])[0]
        expected = self.headers.get("x-goog-if-generation-match", expected)
        with self.lock:
            now = self.objects.get(name, {"generation": "0"})["generation"]
            if expected not in (None, now):
                return None
            made = self.objects[name] = {
                "name": name,
                "bucket": "bucket",
                "size": str(size),
                "generation": str(next(self.generations)),
                "crc32c": base64.b64encode(crc.to_bytes(4, "big")).decode(),
                "contentType": "application/octet-stream",
            }
        if len(data) == size:
            self.contents[name] = data
            made["md5Hash"] = base64.b64encode(hashlib.md5(data).digest()).decode()
        return made

    def _body(self) -> tuple[int, int, bytes]:
        """Size, CRC-32C and, if it is small, the content of what was sent."""
        size = left = int(self.headers.get("Content-Length") or 0)
        crc, kept, buffer = 0, [], memoryview(bytearray(min(PIECE, max(size, 1))))
        while left:
            got = self.rfile.readinto(buffer[: min(left, PIECE)])
            crc = crc32c(buffer[:got], crc)
            if size <= SMALL or "uploadType=multipart" in self.path:
                kept.append(bytes(buffer[:got]))
            left -= got
        return size, crc, b"".join(kept)

    def _answer(
        self, status: int, content: Any, headers: list[tuple[str, str]] | None = None
    ) -> None:
        self._send(status, b"" if content is None else json.dumps(content).encode(), headers)

    def _send(self, status: int, data: bytes, headers: list[tuple[str, str]] | None = None) -> None:
        self.send_response(status)
        for name, value in headers or []:
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def null_bucket() -> Iterator[int]:
    """A running store, which this process and its children reach as gs://bucket; its port."""
    import gcsfs  # after store/folder.py, which sets how

    command = [sys.executable, "-m", "benchmarks.null_bucket"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            os.environ["STORAGE_EMULATOR_HOST"] = f"http://127.0.0.1:{port}"
            gcsfs.GCSFileSystem.clear_instance_cache()
            yield port
        finally:
            server.kill()
            os.environ.pop("STORAGE_EMULATOR_HOST", None)
            gcsfs.GCSFileSystem.clear_instance_cache()


if __name__ == "__main__":
    running = ThreadingHTTPServer(("127.0.0.1", 0), Null)
    print(running.server_port, flush=True)
    running.serve_forever()
