"""A bucket to read from, as slow as one far away: `python -m benchmarks.bucket_server FOLDER`.

It serves the files of a folder, which must not change, as Google Cloud Storage serves objects:
listings in pages of 1000, HEAD, and GET of ranges with If-Match. Every request waits for `latency`
ms before its answer begins, and every connection gets at most `rate` MB/s. It is a process of its
own with a thread for each connection; waiting takes no processor time, and the kernel sends files
from the page cache. It prints its port. GET /counts tells what it has served and waits for nothing.
"""

import argparse
import json
import os
import re
import socketserver
import subprocess
import sys
import time
import urllib.request
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

BUCKET = "bucket"
RATE = 200.0  # MB/s of a connection
PAGE = 1000  # objects of a listing, as Google's, S3's and Azure's pages have
PIECE = 2**20  # bytes that are sent at once
LISTED, DATE = "2026-01-01T00:00:00.000Z", "Thu, 01 Jan 2026 00:00:00 GMT"
REASONS = {200: "OK", 206: "Partial Content", 404: "Not Found", 412: "Precondition Failed"}
REASONS[416] = "Range Not Satisfiable"


class Object(NamedTuple):
    """A file of the folder."""

    path: Path
    size: int
    tag: str

    @classmethod
    def of(cls, path: Path) -> "Object":
        about = path.stat()
        return cls(path, about.st_size, f'"{about.st_mtime_ns:x}-{about.st_size:x}"')


class Counts(NamedTuple):
    """What was served: requests, and bytes of the content of answers."""

    requests: int
    bytes: int


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, folder: Path, latency: float, rate: float) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.seconds, self.rate = latency / 1e3, rate * 1e6
        self.counts, self.lock = Counts(0, 0), Lock()
        self.objects = {
            path.relative_to(folder).as_posix(): Object.of(path)
            for path in folder.rglob("*")
            if path.is_file()
        }
        self.names = sorted(self.objects)

    def handle_error(self, *_: object) -> None:
        """A client may go away."""

    def count(self, size: int) -> None:
        with self.lock:
            self.counts = Counts(self.counts.requests + 1, self.counts.bytes + size)

    def listing(self, prefix: str, delimiter: str, after: str) -> bytes:
        """The page of names with this prefix that follows the entry `after`."""
        page: dict[str, str] = {}
        for name in self.names[bisect_left(self.names, max(prefix, after)) :]:
            if len(page) > PAGE or not name.startswith(prefix):
                break
            inside, folder, _ = name[len(prefix) :].partition(delimiter or "\0")
            if (entry := prefix + inside + folder) <= after or entry in page:
                continue
            found = self.objects[name]
            page[entry] = (
                f"<CommonPrefixes><Prefix>{escape(entry)}</Prefix></CommonPrefixes>"
                if folder
                else f"<Contents><Key>{escape(entry)}</Key><Size>{found.size}</Size>"
                f"<ETag>{found.tag}</ETag><LastModified>{LISTED}</LastModified></Contents>"
            )
        text = "".join([*page.values()][:PAGE])
        if len(page) > PAGE:
            last = escape([*page][PAGE - 1])
            text += f"<NextContinuationToken>{last}</NextContinuationToken>"
        return f"<ListBucketResult>{text}</ListBucketResult>".encode()


class Connection(socketserver.StreamRequestHandler):
    server: Server
    disable_nagle_algorithm = True

    def handle(self) -> None:
        while request := self.rfile.readline():
            method, target, _ = request.decode("latin-1").split(" ", 2)
            headers = {}
            while line := self.rfile.readline().strip():
                name, _, value = line.decode("latin-1").partition(":")
                headers[name.lower()] = value.strip()
            self.answer(method, target, headers)

    def answer(self, method: str, target: str, headers: dict[str, str]) -> None:
        if target == "/counts":
            return self.send(200, json.dumps(self.server.counts._asdict()).encode())
        time.sleep(self.server.seconds)
        url = urlsplit(target)
        bucket, _, name = unquote(url.path).lstrip("/").partition("/")
        if bucket == BUCKET and not name:
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            asked = (query.get(key, "") for key in ("prefix", "delimiter", "continuation-token"))
            data = self.server.listing(*asked)
            self.server.count(len(data))
            return self.send(200, data)
        found = self.server.objects.get(name) if bucket == BUCKET else None
        if found is None:
            self.server.count(0)
            return self.send(404)
        if headers.get("if-match", found.tag) != found.tag:
            self.server.count(0)
            return self.send(412)
        status, start, stop = span_of(headers.get("range", ""), found.size)
        self.server.count(stop - start if method == "GET" else 0)
        about = f"ETag: {found.tag}\r\nx-goog-generation: 1\r\nLast-Modified: {DATE}\r\n"
        if status == 206:
            about += f"Content-Range: bytes {start}-{stop - 1}/{found.size}\r\n"
        self.head(status, stop - start, about)
        if method == "GET" and stop > start:
            self.send_file(found.path, start, stop)

    def head(self, status: int, size: int, about: str = "") -> None:
        line = f"HTTP/1.1 {status} {REASONS[status]}\r\n"
        self.wfile.write(f"{line}{about}Content-Length: {size}\r\n\r\n".encode())

    def send(self, status: int, data: bytes = b"") -> None:
        self.head(status, len(data))
        self.wfile.write(data)

    def send_file(self, path: Path, start: int, stop: int) -> None:
        """Sends the bytes no faster than the rate, counted from the first of them."""
        began, first = time.perf_counter(), start
        with open(path, "rb", buffering=0) as file:
            while start < stop:
                if (early := (start - first) / self.server.rate + began - time.perf_counter()) > 0:
                    time.sleep(early)
                wanted = min(PIECE, stop - start)
                start += os.sendfile(self.connection.fileno(), file.fileno(), start, wanted)


def span_of(wanted: str, size: int) -> tuple[int, int, int]:
    """The status of the answer to this header Range, and which bytes it has."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted)
    if found is None:
        return 200, 0, size
    first, last = found.groups()
    start = int(first) if first else max(0, size - int(last))
    stop = min(int(last) + 1, size) if first and last else size
    return (206, start, stop) if start < size else (416, 0, 0)


@contextmanager
def bucket_server(folder: Path, latency: float, rate: float = RATE) -> Iterator[str]:
    """A running server, which this process and its children reach as gs://bucket; its address."""
    command = [sys.executable, "-m", "benchmarks.bucket_server", str(folder)]
    command += ["--latency", str(latency), "--rate", str(rate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = f"127.0.0.1:{int(server.stdout.readline())}"
            os.environ["STORAGE_EMULATOR_HOST"] = f"http://{address}"
            yield address
        finally:
            server.kill()
            os.environ.pop("STORAGE_EMULATOR_HOST", None)


def counts(address: str) -> Counts:
    """What the server at this address has served so far."""
    with urllib.request.urlopen(f"http://{address}/counts") as answer:
        return Counts(**json.load(answer))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--latency", type=float, default=30.0, help="ms (default: 30)")
    parser.add_argument("--rate", type=float, default=RATE, help="MB/s (default: 200)")
    arguments = parser.parse_args()
    running = Server(arguments.folder, arguments.latency, arguments.rate)
    print(running.server_address[1], flush=True)
    running.serve_forever()
