"""Requests to the hub that fail: one line says so; test_folder.py has those to folders."""

import errno
import socket

import huggingface_hub.constants
import huggingface_hub.utils._http as hub_http
import pytest
from cloud import free_port

from activation_extraction.common import retries
from activation_extraction.common.errors import InputError
from activation_extraction.common.retries import hub_unreachable, unwritable_cache
from activation_extraction.model import checkpoint
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.text.sources import open_hub_dataset


@pytest.fixture
def address(monkeypatch):
    """Sets the address of the hub; nobody waits between attempts."""
    monkeypatch.setattr(hub_http.time, "sleep", lambda _: None)

    def choose(url):
        template = url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", url)

    return choose


def unresolved(*_, **__):
    raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")


@pytest.mark.parametrize("host", ["127.0.0.1", "hub.invalid"])
def test_a_hub_that_cannot_be_reached_is_not_asked_again(host, address, lines, monkeypatch):
    address(f"http://{host}:{free_port()}")
    model, data = "the hub cannot be reached", "Connection refused"
    if host == "hub.invalid":
        monkeypatch.setattr(socket, "getaddrinfo", unresolved)
        model = "does not resolve: offline. --model_path takes a folder"
        data = "does not resolve: offline. --dataset_path reads local"
    with pytest.raises(InputError, match=f"--model_path org/x: .*{model}"):
        Checkpoint("org/x").file("config.json")
    with pytest.raises(InputError, match=f"--dataset_name org/x.*{data}"):
        open_hub_dataset("org/x", None, "train")
    assert not lines


def test_a_hub_that_does_not_answer_is_one_line_at_once(address, lines, monkeypatch):
    """Such as one behind a proxy, which is asked for longer."""
    monkeypatch.setattr(checkpoint, "hub_unreachable", lambda _: None)
    address(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(InputError, match="--model_path org/x: .* the hub cannot be reached"):
        Checkpoint("org/x").file("config.json")
    told = "the hub is not answering ([Errno 111] Connection refused); trying again"
    assert lines == [("extract_activations", f"--model_path org/x: {told} for about half a minute")]


GONE, REFUSED = socket.gaierror("no name"), ConnectionRefusedError(errno.ECONNREFUSED, "no")


@pytest.mark.parametrize(
    "answers,failure",
    [([GONE] * 3, GONE), ([REFUSED] * 3, REFUSED), ([REFUSED, None], None), ([TimeoutError], None)],
)
def test_only_a_lasting_failure_to_connect_counts(answers, failure, monkeypatch):
    def connect(*_, **__):
        if answer := answers.pop(0):
            raise answer
        return socket.socket()

    monkeypatch.setattr(retries.time, "sleep", lambda _: None)
    monkeypatch.setattr(retries.socket, "create_connection", connect)
    monkeypatch.delenv("http_proxy", raising=False)
    assert hub_unreachable.__wrapped__("http://hub") is failure and not answers
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:1")
    assert hub_unreachable.__wrapped__("http://hub") is None  # the proxy may reach it


def test_an_unwritable_cache_is_named_with_its_variable():
    outer = RuntimeError("cannot download")
    outer.__cause__ = NotADirectoryError(errno.ENOTDIR, "Not a directory", "/dev/null/home/hub")
    assert "/dev/null/home/hub: Not a directory; HF_HOME names" in str(unwritable_cache(outer))
    assert unwritable_cache(FileNotFoundError(errno.ENOENT, "no such file", "x")) is None
