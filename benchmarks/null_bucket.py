"""Serves Google Cloud Storage's API, but discards the content of large objects.

`null_bucket` runs this server in another process, for benchmarks of writing. The server answers the
requests of obstore with correct sizes, generations and ETags. It discards the content of an object
above 1 MiB, and answers requests for ranges of this object with zeros.
`python -m benchmarks.null_bucket` prints the port of the server, and serves until it is killed.
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

# The size in bytes up to which the content of an object is kept, so that small files can be read
# again.
MAX_KEPT_BYTES = 2**20
# The number of bytes of a request's body that are read at a time, so that large bodies take little
# memory.
READ_BYTES = 2**20


class StoredObject(NamedTuple):
    """An object of the bucket.

    Attributes:
        num_bytes: Size in bytes.
        generation: Generation number, which grows with every write to the bucket.
        content: Bytes of the object. Empty if there are more than MAX_KEPT_BYTES.
    """

    num_bytes: int
    generation: int
    content: bytes


class NullBucketHandler(BaseHTTPRequestHandler):
    """Answers the requests of one connection to the server.

    The attributes belong to the class, so all connections share one bucket.

    Attributes:
        object_by_name: Name of an object -> the object.
        generation_numbers: Iterator over the generation numbers of the next writes.
        write_lock: Lock for comparing a generation and writing an object in one step.
    """

    protocol_version = "HTTP/1.1"
    # With Nagle's algorithm, the body of a response would be sent 40 ms after its headers.
    disable_nagle_algorithm = True
    object_by_name: dict[str, StoredObject] = {}
    generation_numbers = count(1)
    write_lock = Lock()

    def log_message(self, *_: object) -> None:
        pass

    @property
    def object_name(self) -> str:
        """The name of the object in the URL of the request. "" if the URL names the bucket."""
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    def do_GET(self) -> None:
        if not self.object_name:
            return self._send(200, self._listing())
        stored_object = self.object_by_name.get(self.object_name)
        if stored_object is None:
            return self._send(404)
        range_match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if range_match is None:
            return self._send(200, stored_object.content, stored_object)
        object_size = stored_object.num_bytes
        first_byte_offset = int(range_match[1])
        last_byte_offset = min(int(range_match[2]), object_size - 1)
        range_content = stored_object.content[first_byte_offset : last_byte_offset + 1]
        if not stored_object.content:
            # The content was discarded, so zeros take its place.
            range_content = bytes(max(0, last_byte_offset + 1 - first_byte_offset))
        self._send(
            206,
            range_content,
            stored_object,
            f"bytes {first_byte_offset}-{last_byte_offset}/{object_size}",
        )

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        self._send(204 if self.object_by_name.pop(self.object_name, None) else 404)

    def do_PUT(self) -> None:
        request_body_size, request_body = self._read_body()
        with self.write_lock:
            previous_object = self.object_by_name.get(self.object_name)
            previous_generation = str(previous_object.generation if previous_object else 0)
            if (
                self.headers.get("x-goog-if-generation-match", previous_generation)
                != previous_generation
            ):
                return self._send(412)
            stored_object = StoredObject(
                request_body_size, next(self.generation_numbers), request_body
            )
            self.object_by_name[self.object_name] = stored_object
        self._send(200, b"", stored_object)

    def _listing(self) -> bytes:
        """Returns the XML that lists the objects whose names begin with the requested prefix."""
        name_prefix = parse_qs(urlsplit(self.path).query).get("prefix", [""])[0]
        entries_xml = ""
        for object_name, stored_object in sorted(dict(self.object_by_name).items()):
            if object_name.startswith(name_prefix):
                entries_xml += (
                    f"<Contents><Key>{escape(object_name)}</Key><Size>{stored_object.num_bytes}</Size>"
                    f'<ETag>"{stored_object.generation}"</ETag>'
                    "<LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
                )
        return f"<ListBucketResult>{entries_xml}</ListBucketResult>".encode()

    def _read_body(self) -> tuple[int, bytes]:
        """Reads the body of the request.

        Returns:
            A tuple of the size of the body in bytes, and the content of the body. If the body has
            more than MAX_KEPT_BYTES bytes, its content is discarded, and b"" is returned instead.
        """
        request_body_size = int(self.headers.get("Content-Length") or 0)
        remaining_bytes = request_body_size
        request_body = b""
        read_buffer = memoryview(bytearray(min(READ_BYTES, max(request_body_size, 1))))
        while remaining_bytes:
            num_read_bytes = self.rfile.readinto(read_buffer[: min(remaining_bytes, READ_BYTES)])
            if request_body_size <= MAX_KEPT_BYTES:
                request_body += read_buffer[:num_read_bytes]
            remaining_bytes -= num_read_bytes
        return request_body_size, request_body

    def _send(
        self,
        status: int,
        content: bytes = b"",
        stored_object: StoredObject | None = None,
        content_range: str = "",
    ) -> None:
        """Sends the response.

        Args:
            status: The HTTP status.
            content: The body, which is not sent if the request is HEAD.
            stored_object: The object that the headers describe. None for a response without an
                object.
            content_range: The header Content-Range. "" to leave it out.
        """
        self.send_response(status)
        if content_range:
            self.send_header("Content-Range", content_range)
        content_length = len(content)
        if stored_object is not None:
            if self.command == "HEAD":
                content_length = stored_object.num_bytes
            self.send_header("ETag", f'"{stored_object.generation}"')
            self.send_header("x-goog-generation", str(stored_object.generation))
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        self.send_header("Content-Length", str(content_length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def null_bucket() -> Iterator[int]:
    """Runs a server that imitates Google Cloud Storage, with an empty bucket gs://bucket.

    The server discards the content of objects above 1 MiB, so the bucket is called a null bucket.
    The server runs in a new process until the context ends.

    This process and the child processes that it starts later reach the bucket as gs://bucket,
    because an environment variable contains the address of the server.

    Yields:
        The port of the server.
    """
    server_command = [sys.executable, "-m", "benchmarks.null_bucket"]
    with subprocess.Popen(server_command, stdout=subprocess.PIPE, text=True) as server_process:
        try:
            assert server_process.stdout is not None
            server_port = int(server_process.stdout.readline())
            os.environ["STORAGE_EMULATOR_HOST"] = f"http://127.0.0.1:{server_port}"
            yield server_port
        finally:
            server_process.kill()
            os.environ.pop("STORAGE_EMULATOR_HOST", None)


if __name__ == "__main__":
    http_server = ThreadingHTTPServer(("127.0.0.1", 0), NullBucketHandler)
    print(http_server.server_port, flush=True)
    http_server.serve_forever()
