"""A Google Cloud Storage that misbehaves: the emulator of gcp-storage-emulator behind a proxy.

The proxy forwards each request, or fails it in one of the ways in which networks and stores fail.
`Bucket` is one bucket behind it and what a client needs in its environment to reach it.
"""

import http.client
import json
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gcp_storage_emulator.server import create_server

# A number is the HTTP status of the answer; the others are what networks do.
FAULTS = ("503", "429", "reset", "stall", "truncated", "lost")
STALL_SECONDS = 3.0
CHUNK = 65536


class Bucket:
    """The bucket `name`. Set `rate` to have that share of the requests fail in one of `faults`;
    `bytes_per_second` slows uploads down, all together. `failed` counts what was done, `served` the
    bytes of objects in answers."""

    name = "bucket"

    def __init__(self, emulator_port: int) -> None:
        self.rate = 0.0
        self.faults: tuple[str, ...] = FAULTS
        self.bytes_per_second: float | None = None
        self.failed: Counter[str] = Counter()
        self.requests = 0
        self.served = 0
        self.chance = random.Random(0)
        self.emulator_port = emulator_port
        self.lock = threading.Lock()
        self._server = _Server(self)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

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
        return {
            name: self._ask(f"/storage/v1/b/{self.name}/o/{name.replace('/', '%2F')}?alt=media")
            for name in names
        }

    def delete(self, name: str) -> None:
        """Deletes an object behind everybody's back."""
        self._ask(f"/storage/v1/b/{self.name}/o/{name.replace('/', '%2F')}", "DELETE")

    def _ask(self, path: str, method: str = "GET") -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.emulator_port)
        connection.request(method, path)
        body = connection.getresponse().read()
        connection.close()
        return body

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
            self._answer(
                int(fault), [], b'{"error": {"code": %s, "message": "no"}}' % fault.encode()
            )
            return
        if fault == "reset":
            self._reset()
            return
        if fault == "stall":
            time.sleep(STALL_SECONDS)
            self._reset()
            return
        connection = http.client.HTTPConnection("127.0.0.1", bucket.emulator_port)
        headers = {k: v for k, v in self.headers.items() if k.lower() != "transfer-encoding"}
        connection.request(self.command, self.path, body, headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if fault == "lost":
            self._reset()
            return
        skipped = {"content-length", "transfer-encoding", "connection", "date", "server"}
        kept = [(k, v) for k, v in response.getheaders() if k.lower() not in skipped]
        if "alt=media" in self.path:
            with bucket.lock:
                bucket.served += len(content)
        self._answer(response.status, kept, content, cut=fault == "truncated")

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


@contextmanager
def gcs() -> Iterator[Bucket]:
    """A running store with one empty bucket."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    emulator = create_server("127.0.0.1", port, in_memory=True, default_bucket=Bucket.name)
    emulator.start()
    bucket = Bucket(port)
    try:
        yield bucket
    finally:
        bucket.close()
        emulator.stop()
