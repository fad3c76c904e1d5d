"""Requests that fail and are tried again: one line says so when it begins, and how it may end."""

import logging
import socket

import gcsfs
import huggingface_hub.constants
import huggingface_hub.utils._http as hub_http
import pytest
from cloud import free_port
from gcs_server import gcs
from test_folder import Flaky

from activation_extraction.common.errors import InputError
from activation_extraction.model import checkpoint
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.store import patience
from activation_extraction.store.folder import Folder
from activation_extraction.store.patience import FolderError
from activation_extraction.text.sources import open_hub_dataset


@pytest.fixture
def lines(monkeypatch):
    """What has been logged by anybody: (name of the logger, message)."""
    found = []

    class Keep(logging.Handler):
        def emit(self, record):
            found.append((record.name, record.getMessage()))

    for name in ("huggingface_hub", "datasets", "urllib3", "extract_activations"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [Keep(logging.WARNING)])
    return found


@pytest.fixture
def address(monkeypatch):
    """Sets the address of the hub; nobody waits between attempts."""

    def choose(url):
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)

    monkeypatch.setattr(hub_http.time, "sleep", lambda _: None)
    return choose


def test_a_hub_at_which_nobody_listens_is_not_asked_again(address, lines):
    address(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(InputError, match="--model_path org/x: .* the hub cannot be reached"):
        Checkpoint("org/x").file("config.json")
    with pytest.raises(InputError, match="--dataset_name org/x train: .*Connection refused"):
        open_hub_dataset("org/x", None, "train")
    assert not lines


def test_a_hub_that_does_not_answer_is_one_line_at_once(address, lines, monkeypatch):
    """Such as one behind a proxy, which is asked for longer."""
    monkeypatch.setattr(checkpoint, "hub_unreachable", lambda _: None)
    address(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(InputError, match="--model_path org/x: .* the hub cannot be reached"):
        Checkpoint("org/x").file("config.json")
    ((name, line),) = lines
    assert name == "extract_activations" and line == (
        "--model_path org/x: the hub is not answering ([Errno 111] Connection refused); trying "
        "again for about half a minute"
    )


def unresolved(*_, **__):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


def test_a_hub_without_an_address_says_how_to_do_without_it(address, lines, monkeypatch):
    monkeypatch.setattr(socket, "getaddrinfo", unresolved)
    address("https://hub.invalid")
    with pytest.raises(InputError, match="does not resolve: offline. --model_path takes a folder"):
        Checkpoint("org/x").file("config.json")
    with pytest.raises(InputError, match="does not resolve: offline. --dataset_path reads local"):
        open_hub_dataset("org/x", None, "train")
    assert not lines


@pytest.fixture
def pauses(monkeypatch):
    """The pauses between gcsfs's own attempts; they take no time."""
    found = []

    async def no_time(seconds):
        found.append(seconds)

    monkeypatch.setattr(gcsfs.retry.asyncio, "sleep", no_time)
    monkeypatch.setattr(patience, "FIRST_PAUSE", 60)  # longer than the patience: one attempt
    gcsfs.GCSFileSystem.clear_instance_cache()
    return found


def test_a_bucket_that_cannot_be_reached_is_said_at_once(monkeypatch, lines, pauses):
    """Long before gcsfs, which tries by itself, gives the first request up."""
    said_after = []
    original = Folder._warn

    def say(store, what, reason):
        said_after.append(len(pauses))
        original(store, what, reason)

    monkeypatch.setattr(Folder, "_warn", say)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(FolderError, match="kept failing for"):
        Folder("gs://bucket/run", patience=30).try_writing()
    assert said_after[0] == 0 and len(pauses) > 3
    ((_, line),) = lines
    assert line.startswith("gs://bucket/run: uploading .write_test failed (Cannot connect to host")
    assert line.endswith("; trying again for up to 30 s")


def test_every_streak_of_failures_is_one_line(tmp_path, monkeypatch, lines):
    monkeypatch.setattr(patience, "FIRST_PAUSE", 0.001)
    store = Folder(f"memory://{tmp_path}/flaky", patience=5, flag="--some_flag")
    for _ in range(2):
        Flaky(monkeypatch, store._fs, "pipe_file", [TimeoutError(), ConnectionResetError("gone")])
        store.write("file", b"content")
    assert [line for _, line in lines] == 2 * [
        f"memory://{tmp_path}/flaky: uploading file failed (TimeoutError); trying again for up to "
        "5 s (--some_flag)"
    ]


def test_what_a_bucket_answers_is_said(monkeypatch, lines, pauses):
    with gcs() as bucket:
        bucket.faults, bucket.rate = ("503",), 1.0
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(FolderError, match="kept failing for"):
            Folder("gs://bucket/run", patience=30).try_writing()
    ((_, line),) = lines
    assert line.startswith("gs://bucket/run: uploading .write_test failed (no, 503); trying")
