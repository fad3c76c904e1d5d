"""A store that says nothing, or little: one file whose content never arrives, and no writes.

It speaks as much of Google's language and of S3's as it takes to get so far.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FILE = {"name": "run/file", "size": "1000", "generation": "1"}  # in Google's words
LONGEST = 300.0  # seconds: what is red does not hang for ever


@contextmanager
def silent_server(drips: bool = False) -> Iterator[str]:
    """Yields the server's address. drips: whether it sends a byte of the file now and then."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def _begin(self, size: int) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(size))
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.end_headers()

        def do_HEAD(self) -> None:
            self._begin(int(FILE["size"]))

        def do_GET(self) -> None:
            if self.path.startswith("/storage/"):
                content = json.dumps(FILE).encode()
                self._begin(len(content))
                self.wfile.write(content)
                return
            self.close_connection = True
            self._begin(int(FILE["size"]))
            while drips and not over.wait(0.5):
                self.wfile.write(b"x")
            over.wait(LONGEST)

        def do_PUT(self) -> None:
            self.close_connection = True
            over.wait(LONGEST)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """Clients go away."""

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        over.set()
        server.shutdown()
        server.server_close()
