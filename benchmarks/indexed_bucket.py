"""A bucket of very many objects that can only be looked at, for clients of Google Cloud Storage.

Its names are sorted, so a page of a listing costs what it returns, as in the real store; the
emulator of the tests goes through all objects for each. What it answers has the fields and about
the length of the real store's answers. It is served by a process of its own, whose work does not
count as the client's.
"""

import base64
import hashlib
import json
import multiprocessing
import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

BUCKET = "bucket"
PAGE = 1000  # names in one answer to a listing
TIME = "2026-01-01T00:00:00.000Z"
GENERATION = "1767225600000000"
AFTER_ALL = "\U0010ffff"  # follows every other character


class Objects:
    """Names and contents, in the order of the names."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self._contents = contents
        self._names = sorted(contents)
        self._digests = {
            data: base64.b64encode(hashlib.md5(data).digest()).decode()
            for data in set(contents.values())
        }

    def read(self, name: str) -> bytes | None:
        return self._contents.get(name)

    def page(self, prefix: str, delimiter: str, after: str) -> dict[str, Any]:
        """The first names with this prefix that follow `after`; folders count as one name each."""
        items: list[dict[str, str]] = []
        prefixes: list[str] = []
        page: dict[str, Any] = {"kind": "storage#objects", "items": items, "prefixes": prefixes}
        at = bisect_left(self._names, max(prefix, after))
        while at < len(self._names) and (name := self._names[at]).startswith(prefix):
            if len(items) + len(prefixes) == PAGE:
                return page | {"nextPageToken": name}
            folder, inside, _ = name[len(prefix) :].partition(delimiter or AFTER_ALL)
            if inside:
                prefixes.append(prefix + folder + inside)
                at = bisect_left(self._names, prefixes[-1] + AFTER_ALL, at)
            else:
                items.append(self.describe(name))
                at += 1
        return page

    def describe(self, name: str) -> dict[str, str]:
        """As the store describes an object."""
        link = f"https://www.googleapis.com/storage/v1/b/{BUCKET}/o/{quote(name, safe='')}"
        data = self._contents[name]
        return {
            "kind": "storage#object",
            "id": f"{BUCKET}/{name}/{GENERATION}",
            "selfLink": link,
            "mediaLink": f"{link}?generation={GENERATION}&alt=media",
            "name": name,
            "bucket": BUCKET,
            "generation": GENERATION,
            "metageneration": "1",
            "contentType": "application/octet-stream",
            "storageClass": "STANDARD",
            "size": str(len(data)),
            "md5Hash": self._digests[data],
            "crc32c": "AAAAAA==",
            "etag": "CICAgICAgICAgA==",
            "timeCreated": TIME,
            "updated": TIME,
            "timeStorageClassUpdated": TIME,
            "timeFinalized": TIME,
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: Objects
    asked: Counter[str]
    counting = threading.Lock()

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        name = unquote(url.path.partition("/o/")[2])
        with self.counting:
            self.asked["reads" if name else "listings"] += 1
        if not name:
            where = (query.get(key, "") for key in ("prefix", "delimiter", "pageToken"))
            return self._answer(json.dumps(self.objects.page(*where)).encode())
        data = self.objects.read(name)
        if data is None:
            return self._answer(b'{"error": {"code": 404, "message": "Not Found"}}', 404)
        if query.get("alt") != "media":
            data = json.dumps(self.objects.describe(name)).encode()
        self._answer(data)

    def _answer(self, content: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def _serve(contents: Mapping[str, bytes], pipe: Connection) -> None:
    """Serves until the pipe closes; answers each message with the requests since the last one."""
    asked: Counter[str] = Counter()
    handler = type("Handler", (_Handler,), {"objects": Objects(contents), "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    pipe.send(server.server_port)
    try:
        while True:
            pipe.recv()
            pipe.send(dict(asked))
            asked.clear()
    except EOFError:
        server.shutdown()


class IndexedBucket:
    """The bucket as its client sees it."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.environment = {"STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{pipe.recv()}"}

    def asked(self) -> dict[str, int]:
        """How many listings and reads were asked for since the last call."""
        self._pipe.send(None)
        return self._pipe.recv()


@contextmanager
def indexed_bucket(contents: Mapping[str, bytes]) -> Iterator[IndexedBucket]:
    """gs://bucket with these objects, for clients in the environment that it names."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(contents, theirs), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield IndexedBucket(ours)
    finally:
        ours.close()
        process.join()
