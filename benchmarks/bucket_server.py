"""Serves a folder as a slow remote bucket: `python -m benchmarks.bucket_server FOLDER`.

It answers as Google Cloud Storage does: listings in pages of 1000, HEAD, and GET of ranges with
If-Match. The files must not change. Every answer begins after `latency` ms, and every connection
gets at most `rate` MB/s. The server is a separate process with a thread for each connection, so
waiting takes no processor time, and the kernel sends files from the page cache. It prints its port.
GET /counts returns the totals that it has served (`Counts`), without latency.
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
PAGE = 1000  # entries of a listing's page; Google, S3 and Azure use the same number
PIECE = 2**20  # bytes that are sent at once, after which the rate is checked
LISTED, DATE = "2026-01-01T00:00:00.000Z", "Thu, 01 Jan 2026 00:00:00 GMT"
REASONS = {200: "OK", 206: "Partial Content", 404: "Not Found", 412: "Precondition Failed"}
REASONS[416] = "Range Not Satisfiable"


class Object(NamedTuple):
    """A file of the folder.

    Attributes:
        path: The path of the file.
        size: Its size in bytes.
        tag: Its ETag with quotes, made from modification time and size.
    """

    path: Path
    size: int
    tag: str

    @classmethod
    def of(cls, path: Path) -> "Object":
        about = path.stat()
        return cls(path, about.st_size, f'"{about.st_mtime_ns:x}-{about.st_size:x}"')


class Counts(NamedTuple):
    """Totals of a server since its start.

    Attributes:
        requests: The number of requests, without those of /counts.
        bytes: The bytes of listings and objects in the answers.
    """

    requests: int
    bytes: int


class Server(socketserver.ThreadingTCPServer):
    """The server of one folder; it lists the files once, at its start."""

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
        """Ignores errors of connections, because a client may go away at any time."""

    def count(self, size: int) -> None:
        with self.lock:
            self.counts = Counts(self.counts.requests + 1, self.counts.bytes + size)

    def listing(self, prefix: str, delimiter: str, after: str) -> bytes:
        """Returns one page of a listing, as XML.

        Args:
            prefix: The prefix of the listed names.
            delimiter: The character that ends a folder's name. Empty to list all names.
            after: The last entry of the previous page. Empty for the first page.
        """
        page: dict[str, str] = {}
        for name in self.names[bisect_left(self.names, max(prefix, after)) :]:
            if len(page) > PAGE or not name.startswith(prefix):
                break
            inside, folder, _ = name[len(prefix) :].partition(delimiter or "\0")
            if (entry := prefix + inside + folder) <= after or entry in page:
                continue
            entry_file = self.objects[name]
            page[entry] = (
                f"<CommonPrefixes><Prefix>{escape(entry)}</Prefix></CommonPrefixes>"
                if folder
                else f"<Contents><Key>{escape(entry)}</Key><Size>{entry_file.size}</Size>"
                f"<ETag>{entry_file.tag}</ETag><LastModified>{LISTED}</LastModified></Contents>"
            )
        text = "".join([*page.values()][:PAGE])
        if len(page) > PAGE:
            last = escape([*page][PAGE - 1])
            text += f"<NextContinuationToken>{last}</NextContinuationToken>"
        return f"<ListBucketResult>{text}</ListBucketResult>".encode()


class Connection(socketserver.StreamRequestHandler):
    """Answers the requests of one connection, one after the other."""

    server: Server
    disable_nagle_algorithm = True

    def handle(self) -> None:
        while request := self.rfile.readline():
            method, target, _ = request.decode("latin-1").split(" ", 2)
            headers = {}
            while line := self.rfile.readline().strip():
                name, _, content = line.decode("latin-1").partition(":")
                headers[name.lower()] = content.strip()
            self.answer(method, target, headers)

    def answer(self, method: str, target: str, headers: dict[str, str]) -> None:
        if target == "/counts":
            return self.send(200, json.dumps(self.server.counts._asdict()).encode())
        time.sleep(self.server.seconds)
        url = urlsplit(target)
        bucket, _, name = unquote(url.path).lstrip("/").partition("/")
        if bucket == BUCKET and not name:
            query = {key: values[0] for key, values in parse_qs(url.query).items()}
            after = query.get("continuation-token", "")
            page = self.server.listing(query.get("prefix", ""), query.get("delimiter", ""), after)
            self.server.count(len(page))
            return self.send(200, page)
        served = self.server.objects.get(name) if bucket == BUCKET else None
        if served is None:
            self.server.count(0)
            return self.send(404)
        if headers.get("if-match", served.tag) != served.tag:
            self.server.count(0)
            return self.send(412)
        status, start, stop = span_of(headers.get("range", ""), served.size)
        self.server.count(stop - start if method == "GET" else 0)
        about = f"ETag: {served.tag}\r\nx-goog-generation: 1\r\nLast-Modified: {DATE}\r\n"
        if status == 206:
            about += f"Content-Range: bytes {start}-{stop - 1}/{served.size}\r\n"
        self.head(status, stop - start, about)
        if method == "GET" and stop > start:
            self.send_file(served.path, start, stop)

    def head(self, status: int, size: int, about: str = "") -> None:
        line = f"HTTP/1.1 {status} {REASONS[status]}\r\n"
        self.wfile.write(f"{line}{about}Content-Length: {size}\r\n\r\n".encode())

    def send(self, status: int, content: bytes = b"") -> None:
        self.head(status, len(content))
        self.wfile.write(content)

    def send_file(self, path: Path, start: int, stop: int) -> None:
        """Sends the bytes from `start` to `stop` of a file, at the rate of a connection at most."""
        began, first = time.perf_counter(), start
        with open(path, "rb", buffering=0) as file:
            while start < stop:
                due = began + (start - first) / self.server.rate
                time.sleep(max(0.0, due - time.perf_counter()))
                size = min(PIECE, stop - start)
                start += os.sendfile(self.connection.fileno(), file.fileno(), start, size)


def span_of(header: str, size: int) -> tuple[int, int, int]:
    """Parses a Range header.

    Args:
        header: The content of the header; empty for a request without one.
        size: The size of the object in bytes.

    Returns:
        The HTTP status of the answer, and the start and the exclusive end of the bytes to send.
    """
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", header)
    if match is None:
        return 200, 0, size
    first, last = match.groups()
    start = int(first) if first else max(0, size - int(last))
    stop = min(int(last) + 1, size) if first and last else size
    return (206, start, stop) if start < size else (416, 0, 0)


@contextmanager
def bucket_server(folder: Path, latency: float, rate: float = RATE) -> Iterator[str]:
    """Runs a server, which this process and its children reach as gs://bucket.

    Args:
        folder: The folder to serve.
        latency: Milliseconds before each answer.
        rate: MB/s of a connection.

    Yields:
        The address of the server, HOST:PORT.
    """
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
    """Returns the totals of the server at this address (HOST:PORT)."""
    with urllib.request.urlopen(f"http://{address}/counts") as answer:
        return Counts(**json.load(answer))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--latency", type=float, default=30.0, help="ms before each answer (default: 30)"
    )
    parser.add_argument(
        "--rate", type=float, default=RATE, help="MB/s of a connection (default: 200)"
    )
    arguments = parser.parse_args()
    running = Server(arguments.folder, arguments.latency, arguments.rate)
    print(running.server_address[1], flush=True)
    running.serve_forever()
