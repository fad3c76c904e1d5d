"""Requests to the hub that fail: one line says so; test_folder.py has those to folders."""

import logging
import socket

import huggingface_hub.constants
import huggingface_hub.utils._http as hub_http
import pytest
from cloud import free_port

from activation_extraction.common.errors import InputError
from activation_extraction.model import checkpoint
from activation_extraction.model.checkpoint import Checkpoint
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
