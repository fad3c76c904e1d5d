"""Serves a folder as a slow remote bucket: `python -m benchmarks.bucket_server FOLDER`.

The server answers as Google Cloud Storage does: it supports listings in pages of 1000 entries,
HEAD, and GET of ranges with If-Match. The files must not change while they are served. Every answer
begins after --latency milliseconds, and every connection is limited to --rate MB/s. The server is a
separate process with a thread for each connection. Therefore waiting takes no processor time, and
the kernel sends files from the page cache. The server prints its port. GET /counts returns the
totals of the server's answers (`Counts`), without latency.
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
# The default of --rate: the bandwidth limit of each connection, in MB/s.
RATE = 200.0
# The number of entries of a listing's page. Google, S3 and Azure use this number.
PAGE_ENTRIES = 1000
# The number of bytes that the server sends at a time. Before it sends more bytes, it waits as long
# as the bandwidth limit requires.
SENT_AT_ONCE = 2**20
# The modification time of all files, as listings and as headers contain it.
LISTED_DATE, HEADER_DATE = "2026-01-01T00:00:00.000Z", "Thu, 01 Jan 2026 00:00:00 GMT"
REASONS = {200: "OK", 206: "Partial Content", 404: "Not Found", 412: "Precondition Failed"}
REASONS[416] = "Range Not Satisfiable"


class Object(NamedTuple):
    """A file of the served folder, which clients see as an object of the bucket.

    Attributes:
        path: Path of the file.
        num_bytes: Size of the file in bytes.
        etag: ETag with quotes, which is made of the modification time and the size of the file.
    """

    path: Path
    num_bytes: int
    etag: str

    @classmethod
    def of(cls, path: Path) -> "Object":
        file_status = path.stat()
        return cls(
            path, file_status.st_size, f'"{file_status.st_mtime_ns:x}-{file_status.st_size:x}"'
        )


class Counts(NamedTuple):
    """Totals of the answers of a server since its start.

    Attributes:
        requests: Number of answered requests, except requests of /counts.
        bytes: Number of bytes in the bodies of the answers. They are pages of listings, and the
            ranges of objects that clients requested. An answer counts in full when it begins, even
            if the client closes the connection before its end.
    """

    requests: int
    bytes: int


class Server(socketserver.ThreadingTCPServer):
    """The server of one folder, which lists the files of the folder once, at its start.

    Attributes:
        latency_seconds: Seconds before each answer begins.
        bytes_per_second: Bandwidth limit of each connection, in bytes per second.
        answer_counts: Number of answers, and of bytes in them, since the start of the server.
        counts_lock: Lock for changes of `answer_counts`.
        object_by_name: Name of an object -> the object.
        object_names: Names of the objects, sorted.
    """

    daemon_threads = allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, folder: Path, latency: float, rate: float) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.latency_seconds = latency / 1e3
        self.bytes_per_second = rate * 1e6
        self.answer_counts = Counts(0, 0)
        self.counts_lock = Lock()
        self.object_by_name = {
            path.relative_to(folder).as_posix(): Object.of(path)
            for path in folder.rglob("*")
            if path.is_file()
        }
        self.object_names = sorted(self.object_by_name)

    def handle_error(self, *_: object) -> None:
        """Ignores errors of connections, because a client may go away at any time."""

    def count_request(self, answer_bytes: int) -> None:
        """Adds a request to the totals.

        Args:
            answer_bytes: The number of bytes in the body of the answer. 0 for an answer without a
                body, such as an error.
        """
        with self.counts_lock:
            self.answer_counts = Counts(
                self.answer_counts.requests + 1, self.answer_counts.bytes + answer_bytes
            )

    def listing(self, prefix: str, delimiter: str, last_entry_of_previous_page: str) -> bytes:
        """Returns one page of a sorted listing, as XML.

        Args:
            prefix: The prefix of the listed names.
            delimiter: The character that ends a folder's name, so that a folder is listed as one
                entry. Empty to list all objects.
            last_entry_of_previous_page: The last entry of the previous page. Empty for the first
                page.
        """
        # Entry of this page of the listing -> XML of the entry. An entry is the name of an object,
        # or the name of a folder followed by the delimiter.
        xml_by_listing_entry: dict[str, str] = {}
        first_object_index = bisect_left(
            self.object_names, max(prefix, last_entry_of_previous_page)
        )
        for object_name in self.object_names[first_object_index:]:
            if len(xml_by_listing_entry) > PAGE_ENTRIES or not object_name.startswith(prefix):
                break
            entry_after_prefix, delimiter_of_entry, _ = object_name[len(prefix) :].partition(
                delimiter or "\0"
            )
            listing_entry = prefix + entry_after_prefix + delimiter_of_entry
            if (
                listing_entry <= last_entry_of_previous_page
                or listing_entry in xml_by_listing_entry
            ):
                continue
            listed_object = self.object_by_name[object_name]
            xml_by_listing_entry[listing_entry] = (
                f"<CommonPrefixes><Prefix>{escape(listing_entry)}</Prefix></CommonPrefixes>"
                if delimiter_of_entry
                else f"<Contents><Key>{escape(listing_entry)}</Key>"
                f"<Size>{listed_object.num_bytes}</Size><ETag>{listed_object.etag}</ETag>"
                f"<LastModified>{LISTED_DATE}</LastModified></Contents>"
            )
        entries_xml = "".join([*xml_by_listing_entry.values()][:PAGE_ENTRIES])
        if len(xml_by_listing_entry) > PAGE_ENTRIES:
            continuation_token = escape([*xml_by_listing_entry][PAGE_ENTRIES - 1])
            entries_xml += f"<NextContinuationToken>{continuation_token}</NextContinuationToken>"
        return f"<ListBucketResult>{entries_xml}</ListBucketResult>".encode()


class Connection(socketserver.StreamRequestHandler):
    """Answers the requests of one connection, one after the other."""

    server: Server  # server that accepted the connection
    disable_nagle_algorithm = True

    def handle(self) -> None:
        while request_line := self.rfile.readline():
            method, request_target, _ = request_line.decode("latin-1").split(" ", 2)
            content_by_header_name = {}
            while header_line := self.rfile.readline().strip():
                header_name, _, header_content = header_line.decode("latin-1").partition(":")
                content_by_header_name[header_name.lower()] = header_content.strip()
            self.answer(method, request_target, content_by_header_name)

    def answer(
        self, method: str, request_target: str, content_by_header_name: dict[str, str]
    ) -> None:
        """Answers a request.

        Args:
            method: The method, "GET" or "HEAD".
            request_target: The path and the query of the requested URL.
            content_by_header_name: Name of a header in small letters -> content of the header.
        """
        if request_target == "/counts":
            return self.send(200, json.dumps(self.server.answer_counts._asdict()).encode())
        time.sleep(self.server.latency_seconds)
        requested_url = urlsplit(request_target)
        bucket_name, _, object_name = unquote(requested_url.path).lstrip("/").partition("/")
        if bucket_name == BUCKET and not object_name:
            query_parameters = {
                parameter_name: parameter_values[0]
                for parameter_name, parameter_values in parse_qs(requested_url.query).items()
            }
            last_entry_of_previous_page = query_parameters.get("continuation-token", "")
            listing_page = self.server.listing(
                query_parameters.get("prefix", ""),
                query_parameters.get("delimiter", ""),
                last_entry_of_previous_page,
            )
            self.server.count_request(len(listing_page))
            return self.send(200, listing_page)
        stored_object = (
            self.server.object_by_name.get(object_name) if bucket_name == BUCKET else None
        )
        if stored_object is None:
            self.server.count_request(0)
            return self.send(404)
        if content_by_header_name.get("if-match", stored_object.etag) != stored_object.etag:
            self.server.count_request(0)
            return self.send(412)
        http_status, start_offset, stop_offset = requested_range(
            content_by_header_name.get("range", ""), stored_object.num_bytes
        )
        self.server.count_request(stop_offset - start_offset if method == "GET" else 0)
        object_header_lines = f"ETag: {stored_object.etag}\r\nx-goog-generation: 1\r\n"
        object_header_lines += f"Last-Modified: {HEADER_DATE}\r\n"
        if http_status == 206:
            content_range = f"{start_offset}-{stop_offset - 1}/{stored_object.num_bytes}"
            object_header_lines += f"Content-Range: bytes {content_range}\r\n"
        self.send_headers(http_status, stop_offset - start_offset, object_header_lines)
        if method == "GET" and stop_offset > start_offset:
            self.send_file(stored_object.path, start_offset, stop_offset)

    def send_headers(self, status: int, size: int, object_header_lines: str = "") -> None:
        """Sends the status and the headers of an answer.

        Args:
            status: The HTTP status.
            size: The number of bytes of the body.
            object_header_lines: The lines of the headers about an object, each with its line end,
                as one text. "" for none.
        """
        status_line = f"HTTP/1.1 {status} {REASONS[status]}\r\n"
        self.wfile.write(
            f"{status_line}{object_header_lines}Content-Length: {size}\r\n\r\n".encode()
        )

    def send(self, status: int, content: bytes = b"") -> None:
        """Sends an answer that does not contain a file, such as a listing or an error.

        Args:
            status: The HTTP status.
            content: The body.
        """
        self.send_headers(status, len(content))
        self.wfile.write(content)

    def send_file(self, path: Path, start: int, stop: int) -> None:
        """Sends a range of the bytes of a file, throttled to the bandwidth limit of a connection.

        Args:
            path: The path of the file.
            start: The offset of the first byte.
            stop: The offset after the last byte.
        """
        start_time = time.perf_counter()
        next_offset = start
        with open(path, "rb", buffering=0) as served_file:
            while next_offset < stop:
                next_send_time = start_time + (next_offset - start) / self.server.bytes_per_second
                time.sleep(max(0.0, next_send_time - time.perf_counter()))
                num_bytes_to_send = min(SENT_AT_ONCE, stop - next_offset)
                next_offset += os.sendfile(
                    self.connection.fileno(), served_file.fileno(), next_offset, num_bytes_to_send
                )


def requested_range(header: str, size: int) -> tuple[int, int, int]:
    """Parses a Range header.

    Args:
        header: The content of the header. Empty for a request without this header.
        size: The size of the object in bytes.

    Returns:
        A tuple of the HTTP status of the answer, the offset of the first byte to send, and the
        offset after the last byte to send. The status is 200 without a range, 206 for a range, and
        416 for a range that begins after the object. For 416, there are no bytes to send.
    """
    range_match = re.fullmatch(r"bytes=(\d*)-(\d*)", header)
    if range_match is None:
        return 200, 0, size
    # Without a start, the number after the hyphen is the number of bytes at the end of the object
    # that are requested.
    range_start_text, range_end_text = range_match.groups()
    start_offset = int(range_start_text) if range_start_text else max(0, size - int(range_end_text))
    stop_offset = (
        min(int(range_end_text) + 1, size) if range_start_text and range_end_text else size
    )
    return (206, start_offset, stop_offset) if start_offset < size else (416, 0, 0)


@contextmanager
def bucket_server(folder: Path, latency: float, rate: float = RATE) -> Iterator[str]:
    """Runs a server in a new process, which serves a folder as gs://bucket.

    This process and the children that it starts later reach the bucket under this name, because an
    environment variable contains the address of the server.

    Args:
        folder: The folder to serve.
        latency: The milliseconds before each answer.
        rate: The largest MB/s of a connection.

    Yields:
        The address of the server, "HOST:PORT".
    """
    server_command = [sys.executable, "-m", "benchmarks.bucket_server", str(folder)]
    server_command += ["--latency", str(latency), "--rate", str(rate)]
    with subprocess.Popen(server_command, stdout=subprocess.PIPE, text=True) as server_process:
        try:
            assert server_process.stdout is not None
            address = f"127.0.0.1:{int(server_process.stdout.readline())}"
            os.environ["STORAGE_EMULATOR_HOST"] = f"http://{address}"
            yield address
        finally:
            server_process.kill()
            os.environ.pop("STORAGE_EMULATOR_HOST", None)


def counts(address: str) -> Counts:
    """Asks a server for the number and the bytes of its answers since it was started.

    Args:
        address: The address of the server, "HOST:PORT".

    Returns:
        The numbers of answered requests and of bytes in the answers (see `Counts`).
    """
    with urllib.request.urlopen(f"http://{address}/counts") as counts_answer:
        return Counts(**json.load(counts_answer))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--latency", type=float, default=30.0, help="ms before each answer (default: 30)"
    )
    parser.add_argument(
        "--rate", type=float, default=RATE, help="MB/s of a connection (default: 200)"
    )
    parsed_flags = parser.parse_args()
    server_of_folder = Server(parsed_flags.folder, parsed_flags.latency, parsed_flags.rate)
    print(server_of_folder.server_address[1], flush=True)
    server_of_folder.serve_forever()
