"""Serves each kind of store that the README names, with one empty bucket, on this machine.

`make test-all` installs moto and Azurite. To use others, set the environment variables MOTO_PYTHON
(the Python of moto's environment) and AZURITE (Azurite's main.js).
"""

import base64
import hashlib
import hmac
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from email.utils import formatdate
from pathlib import Path
from typing import NamedTuple
from urllib.request import Request, urlopen

from gateway import gateway
from gcs_server import gcs

TESTS = Path(__file__).parent
MOTO_PYTHON = Path(os.environ.get("MOTO_PYTHON", f"{sys.prefix}/moto/bin/python"))
AZURITE = Path(
    os.environ.get("AZURITE", f"{sys.prefix}/azurite/node_modules/azurite/dist/src/blob/main.js")
)
ACCOUNT, CONTAINER = "account", "container"
AZURE_KEY = base64.b64encode(b"not a secret").decode()
AZURE_VERSION = "2021-12-02"  # of the protocol


class Store(NamedTuple):
    """A running server.

    Attributes:
        bucket: The URL of the bucket, as --gcs_bucket takes it.
        environment: The variables by which a process reaches it.
        was_used: Raises AssertionError if the special behaviour of the server was not tested.
    """

    bucket: str
    environment: Mapping[str, str]
    was_used: Callable[[], None] = lambda: None


@contextmanager
def google() -> Iterator[Store]:
    with gcs() as server:
        address = "STORAGE_EMULATOR_HOST"
        yield Store("gs://bucket", {address: server.environment[address]})


@contextmanager
def s3() -> Iterator[Store]:
    with _started([str(MOTO_PYTHON), str(TESTS / "moto_server.py")], r"^(\d+)$") as port:
        keys = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "test")
        yield Store("s3://bucket", {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", **keys})


@contextmanager
def hugging_face() -> Iterator[Store]:
    with gateway() as server:

        def was_used() -> None:
            assert server.fetched and server.redirected == server.fetched

        yield Store("s3://bucket", server.environment, was_used)


@contextmanager
def azure() -> Iterator[Store]:
    command = ["node", str(AZURITE), "--blobHost", "127.0.0.1", "--blobPort", "0"]
    command += ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    accounts = {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{AZURE_KEY}"}
    with _started(command, r"successfully listens on http://127\.0\.0\.1:(\d+)", accounts) as port:
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        _create_container(endpoint)
        variables = {
            "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
            "AZURE_STORAGE_ENDPOINT": endpoint,
        }
        yield Store(f"az://{CONTAINER}", variables)


STORES: dict[str, Callable[[], AbstractContextManager[Store]]] = {
    "google": google,
    "s3": s3,
    "hugging_face": hugging_face,
    "azure": azure,
}


@contextmanager
def _started(
    command: Sequence[str], port: str, variables: Mapping[str, str] | None = None
) -> Iterator[int]:
    """Runs a server until the block ends, and gives its port.

    Args:
        command: The program, a file that must exist, and its arguments.
        port: A pattern that finds the port in a line that the server prints.
        variables: Environment variables beside those of this process.
    """
    for path in (part for part in command if part.startswith("/")):
        assert Path(path).exists(), f"{path} is missing; `make test-all` installs it"
    output = subprocess.PIPE
    environment = {**os.environ, **(variables or {})}
    with subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment
    ) as server:
        try:
            assert server.stdout is not None
            printed = []
            for line in server.stdout:
                printed.append(line)
                if match := re.search(port, line):
                    # The rest of its output is read and dropped, because its pipe must not fill.
                    threading.Thread(target=server.stdout.read, daemon=True).start()
                    yield int(match[1])
                    return
            raise AssertionError(f"{command[1]} has ended: {''.join(printed)}")
        finally:
            server.kill()


def _create_container(endpoint: str) -> None:
    """Creates the container, which obstore cannot do."""
    kind = "application/octet-stream"
    headers = {"Content-Type": kind, "x-ms-date": formatdate(usegmt=True)}
    headers["x-ms-version"] = AZURE_VERSION
    lines = ["PUT", *[""] * 4, kind, *[""] * 6]
    lines += [f"{name}:{headers[name]}" for name in ("x-ms-date", "x-ms-version")]
    # A signed path begins with the account, and the URL of an emulator contains it once more.
    lines += [f"/{ACCOUNT}/{ACCOUNT}/{CONTAINER}", "restype:container"]
    key, text = base64.b64decode(AZURE_KEY), "\n".join(lines).encode()
    signature = base64.b64encode(hmac.digest(key, text, hashlib.sha256)).decode()
    headers["Authorization"] = f"SharedKey {ACCOUNT}:{signature}"
    url = f"{endpoint}/{CONTAINER}?restype=container"
    urlopen(Request(url, data=b"", headers=headers, method="PUT")).close()
