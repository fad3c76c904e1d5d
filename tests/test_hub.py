"""Models and data sets of the hub, against a local server that answers as the hub does, and
requests that fail: one line says so. test_folder.py has those to folders."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import autoencoder_files
import huggingface_hub
import huggingface_hub.utils._http as hub_http
import pytest
from cloud import free_port
from command_line import SCRIPT
from conftest import make_reference
from extractions import flip
from hub_server import serve_hub
from row_files import write_parquet, write_rows
from test_lora import Made

from activation_extraction import ActivationDataset
from activation_extraction.common import retries
from activation_extraction.common.errors import InputError
from activation_extraction.common.retries import hub_unreachable, unwritable_cache
from activation_extraction.common.safetensors import FIRST_BYTES
from activation_extraction.model import hub_files
from activation_extraction.model.repository import Repository
from activation_extraction.model.repository_files import ADAPTER, AUTOENCODER, MODEL
from activation_extraction.model.weight_files import INDEX_FILE, SINGLE_FILE
from activation_extraction.run import demo
from activation_extraction.text.sources import open_hub_dataset

# Runs several commands, the flags of each of which are one argument, with the same end and status.
COMMANDS = """
import sys
from activation_extraction.__main__ import main
status, *commands = sys.argv[1:-2]
for flags in commands:
    assert main([*flags.split(), *sys.argv[-2:]]) == int(status)
"""
NO_ROOM = "import shutil; shutil.disk_usage = lambda path: shutil._ntuple_diskusage(9, 9, 9)\n"
CONFIGS = "---\nconfigs:\n- config_name: small\n  data_files: sample/*.parquet\n---\n"
TEXTS = ["--dataset_name", "org/texts", "--dataset_config", "small"]
FEW = ["--layers_to_extract", "1", "--max_seq_length", "64"]
JOINED = "{{ messages | map(attribute='content') | join }}"


@pytest.fixture
def hub(tmp_path, demo_inputs):
    """A hub with the demo model as `org/tiny`, and documents as `org/texts`."""
    root = tmp_path / "hub"
    shutil.copytree(demo_inputs / "model", root / "models/org/tiny")
    texts = root / "datasets/org/texts"
    (texts / "sample").mkdir(parents=True)
    (texts / "README.md").write_text(CONFIGS)
    for number in range(2):
        rows = {"text": [f"file {number} row {row}" for row in range(50)]}
        ids = [f"{number}-{row}" for row in range(50)]
        write_parquet(texts / f"sample/{number}.parquet", 10, **rows, id=ids)
    with serve_hub(root) as server:
        yield server


def run(hub, tmp_path, *arguments, status=0, script=(SCRIPT,), **more):
    """Runs the command line in a process whose hub is the local one; what it said on stderr."""
    home = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [sys.executable, *script, *map(str, arguments), "--output_dir", str(tmp_path / "out")],
        env=os.environ | {"PYTHONPATH": str(SCRIPT.parent)} | home | more,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == status, done.stderr
    return done.stderr


def recorded(folder):
    return json.loads((folder / "metadata.json").read_text())


def documents(folder):
    """Returns which were stored, each with its source."""
    return [(sample.doc_id, sample.row.get("source")) for sample in ActivationDataset(folder)]


def resolved(hub, repository):
    """The names of the files of a repository that were asked for."""
    start = f"/{repository}/resolve/"
    return {path.rsplit("/", 1)[1] for path in hub.requests if path.startswith(start)}


@pytest.mark.long
def test_model_and_streamed_data_set_from_the_hub(hub, tmp_path):
    """Only the files with needed layers are downloaded."""
    model = tmp_path / "hub/models/org/sharded"
    make_reference(model, "100KB", num_key_value_heads=2, vocab_size=300)
    demo.write_tokenizer(model, [])
    flags = ["--model_path", "org/sharded", *TEXTS, "--layers_to_extract", "0"]
    run(hub, tmp_path, *flags, "--machine_id", "1", "--total_machines", "2")
    # Two files of five row groups each: this machine has five of the ten groups.
    out = tmp_path / "out/machine_001"
    assert len({*documents(out)}) == len(documents(out)) == 50
    assert resolved(hub, "datasets/org/texts")
    every = {path.name for path in model.glob("*.safetensors")}
    assert 0 < len(resolved(hub, "org/sharded") & every) < len(every)
    (snapshot,) = (tmp_path / "home/hub/models--org--sharded/snapshots").iterdir()
    assert recorded(out)["identity"]["model_digest"] == f"commit {snapshot.name}"


@pytest.mark.long
def test_a_mixture_of_the_hub_and_files_with_an_adapter_and_an_autoencoder(hub, tmp_path):
    """The autoencoder lies in a folder of a repository. The run continues with the same samples,
    each of which knows its source; the hub's revision is part of the run's identity. The dataset
    card of the run names all of these."""
    made = Made(tmp_path / "hub/models/org/tiny")
    made.linear("model.layers.0.mlp.up_proj", 5 / 3)
    made.save(tmp_path / "hub/models/org/lora")
    autoencoder_files.sparsify(tmp_path / "hub/models/org/saes/pile")
    rows = ({"text": f"line {n}", "id": f"own-{n}"} for n in range(60))
    own = write_rows(tmp_path / "own.jsonl", rows)
    flags = ["--model_path", "org/tiny", *FEW, "--shuffle_documents", "1", "--batch_size", "2"]
    flags += ["--lora", "org/lora", "--encode", "org/saes/pile/layers.1"]
    flags = " ".join([*flags, "--mix", "org/texts:small:train=3", f"{own}=1", "--max_samples"])
    report = f"--report {tmp_path / 'page.html'}"
    printed = run(hub, tmp_path, 0, f"{flags} 40", f"{flags} 80", report, script=("-c", COMMANDS))
    assert "--lora org/lora: merged in float32 into 1 tensors" in printed
    assert "codes of org/saes/pile/layers.1: blocks.1.hook_resid_post.codes: " in printed
    whole = documents(tmp_path / "out")
    sources = [source for _, source in whole]
    assert [sources[:n].count("org/texts:small:train") for n in (20, 40, 80)] == [15, 30, 60]
    assert len(set(whole)) == 80 and whole != sorted(whole)
    identity = recorded(tmp_path / "out")["identity"]
    assert identity["data_revision"].startswith("org/texts:small:train@")
    card = (tmp_path / "dataset_card.md").read_text()
    assert 'base_model: "org/tiny"' in card and "The LoRA adapter `org/lora` was merged" in card
    assert "Autoencoders: `org/saes/pile/layers.1`." in card and str(tmp_path) not in card
    revision = identity["data_revision"].split("@")[1]
    mixture = f"`org/texts:small:train` at commit `{revision}` (weight 3), `own.jsonl` (weight 1)"
    assert f"A mixture of {mixture}." in card


@pytest.mark.long
def test_a_revision_is_read_with_the_token_and_then_offline(hub, tmp_path):
    """Its templates are there at the first start; that for conversations with tools is in a folder
    of the repository. Offline, they come from a cache that another program has filled, which does
    not say what files a model lacks."""
    tiny = tmp_path / "hub/models/org/tiny"
    shutil.copytree(tiny, v1 := Path(f"{tiny}@v1"))
    (tiny / "tokenizer.json").write_text("{")  # of main: it must not be read
    (v1 / "additional_chat_templates").mkdir()
    templates = "additional_chat_templates/tool_use", "chat_template"
    for name in templates:
        (v1 / f"{name}.jinja").write_text(f"{name}: {JOINED}")
    messages = [{"role": "user", "content": "a question"}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    rows = [{"messages": messages, "tools": tools}, {"messages": messages}]
    texts = write_rows(tmp_path / "rows.jsonl", rows)
    flags = ["--model_path", "org/tiny", "--model_revision", "v1", "--dataset_path", texts, *FEW]
    flags += ["--messages_column", "messages", "--overwrite"]

    def check_previews():
        previews = [sample.text_preview for sample in ActivationDataset(tmp_path / "out")]
        assert previews == [f"{name}: a question" for name in templates]

    run(hub, tmp_path, *flags, HF_TOKEN="hf_secret")
    assert hub.authorizations == {"Bearer hf_secret"}
    check_previews()
    cache = {"cache_dir": tmp_path / "other/hub", "endpoint": hub.endpoint}
    huggingface_hub.snapshot_download("org/tiny", revision="v1", **cache)
    asked = len(hub.requests)
    run(hub, tmp_path, *flags, HF_HOME=str(tmp_path / "other"), HF_HUB_OFFLINE="1")
    assert len(hub.requests) == asked
    check_previews()


@pytest.mark.long
def test_a_commit_upstream_does_not_stop_an_extraction(hub, tmp_path):
    """A full disk does not either: the weights are read straight into memory. But a file of data of
    the same size that takes the place of one is refused: the hub's digests tell."""
    flags = ["--model_path", "org/tiny", "--dataset_path", "hf://datasets/org/texts/sample", *FEW]
    flags = " ".join([*flags, "--max_samples"])
    told = run(hub, tmp_path, 0, f"{flags} 5", script=("-c", NO_ROOM + COMMANDS))
    assert "it is read straight into memory" in told
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    model = tmp_path / "hub/models/org/tiny"
    size = (model / SINGLE_FILE).stat().st_size
    assert (
        0 < hub.sent[SINGLE_FILE] <= size + FIRST_BYTES
    )  # to know the model, its commit is enough
    first = recorded(tmp_path / "out")["model_commit"]
    shutil.copytree(model, f"{model}@before")  # an earlier commit stays within reach
    flip(model / SINGLE_FILE, -2)
    shutil.rmtree(tmp_path / "home")
    verify = "--verify --model_path org/tiny --verify_samples 9"
    run(hub, tmp_path, 0, f"{flags} 9", verify, script=("-c", COMMANDS))
    assert recorded(tmp_path / "out")["model_commit"] == first
    texts = tmp_path / "hub/datasets/org/texts/sample/1.parquet"
    flip(texts, texts.stat().st_size // 2)
    commands = f"{flags} 12", f"{flags} 12 --model_revision main"
    of_data, of_model = run(hub, tmp_path, 2, *commands, script=("-c", COMMANDS)).splitlines()[-2:]
    assert "sample/1.parquet is not the file that the run began with;" in of_data
    assert of_model.startswith("error: --model_revision main: is commit ") and first in of_model


HOLDS_ADAPTER = "holds an adapter (adapter_config.json, of org/tiny), which --lora takes"
TINY = "--model_path org/tiny --dataset_name org/"
# The flags, and how the one line begins that must come.
REFUSED = [
    ("--model_path org/adapter", f"--model_path org/adapter: {HOLDS_ADAPTER}"),
    ("--model_path org/pickled", f"--model_path org/pickled: has no {SINGLE_FILE}, but pytorch_mo"),
    ("--model_path org/none", "--model_path org/none: "),
    ("--model_path org/tiny --model_revision v1", "--model_path org/tiny --model_revision v1: "),
    (f"{TINY}none", "--dataset_name org/none train: "),
    (f"{TINY}texts --dataset_config big", "--dataset_name org/texts big train: "),
    ("--model_path org/tiny --mix org/none=1 org/texts=2", "--mix org/none train: "),
    (f"{TINY}texts --lora org/none", "--lora org/none: no such local folder, and the"),
    (f"{TINY}texts --encode org/tiny/x", "--encode org/tiny/x: has no files of a supported format"),
]


@pytest.mark.long
def test_what_the_hub_does_not_have_exits_2_with_one_line(hub, tmp_path):
    models = tmp_path / "hub/models/org"
    (models / "adapter").mkdir()
    adapter = json.dumps({"base_model_name_or_path": "org/tiny"})
    (models / "adapter/adapter_config.json").write_text(adapter)
    shutil.copytree(models / "tiny", models / "pickled")
    (models / f"pickled/{SINGLE_FILE}").rename(models / "pickled/pytorch_model.bin")
    commands = (flags for flags, _ in REFUSED)
    lines = run(hub, tmp_path, 2, *commands, script=("-c", COMMANDS)).splitlines()
    for line, (_, told) in zip(lines, REFUSED, strict=True):
        assert line.startswith(f"error: {told}")
    assert not (tmp_path / "out").exists()


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
        Repository("org/x").file("config.json")
    with pytest.raises(InputError, match=f"--dataset_name org/x.*{data}"):
        open_hub_dataset("org/x", None, "train")
    assert not lines


COMMIT = "a" * 40


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """Puts files into an empty cache of the hub as `hf download` leaves them, which does not note
    the files that a repository lacks. Returns a function of the names of files, those with no
    content that matters."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    hub_files.log_that_the_cache_is_read.cache_clear()

    def fill(*names, index=()):
        repository = tmp_path / "cache/models--org--x"
        (repository / "refs").mkdir(parents=True)
        (repository / "refs/main").write_text(COMMIT)
        for name in names:
            path = repository / "snapshots" / COMMIT / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
        if index:
            written = {"weight_map": {f"model.{shard}": shard for shard in index}}
            (path.parent / INDEX_FILE).write_text(json.dumps(written))

    return fill


SHARDS = ["1.safetensors", "2.safetensors"]


class Unavailable(BaseHTTPRequestHandler):
    """Answers as a proxy does that cannot reach the hub."""

    def do_HEAD(self):
        self.send_error(503)

    def log_message(self, *_):
        pass


@pytest.fixture(params=["nothing listens", "a proxy"])
def dead_hub(request, address):
    if request.param == "nothing listens":
        address(f"http://127.0.0.1:{free_port()}")
        yield
        return
    with ThreadingHTTPServer(("127.0.0.1", 0), Unavailable) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        address(f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("kind", "names", "index", "lacking"),
    [
        (MODEL, ["config.json", SINGLE_FILE], (), "chat_template.jinja"),
        (MODEL, ["config.json", *SHARDS], SHARDS, "tokenizer_config.json"),
        (ADAPTER, [ADAPTER.config_file_name, ADAPTER.weights_file_name], (), "x.json"),
        (AUTOENCODER, ["k/cfg.json", "k/sae.safetensors"], (), "k/x.json"),
    ],
)
def test_a_whole_model_in_the_cache_is_read_if_the_hub_cannot_be_reached(
    kind, names, index, lacking, cached, dead_hub, lines
):
    """As transformers does. The log says so once."""
    cached(*names, index=index)
    for _ in range(2):
        found = Repository("org/x", kind=kind)
        assert found.find(lacking) is None
        assert all(found.file(name).parts[-2 - name.count("/")] == COMMIT for name in names)
    told = [line for name, line in lines if name == "extract_activations" and COMMIT in line]
    (line,) = told
    assert line.startswith(f"{kind.flag} org/x: the hub cannot be reached; commit {COMMIT} is read")


@pytest.mark.parametrize(
    ("kind", "names", "index", "lacking"),
    [
        (MODEL, [], (), "config.json"),
        (MODEL, [SINGLE_FILE], (), "config.json"),
        (MODEL, ["config.json"], (), INDEX_FILE),
        (MODEL, ["config.json", *SHARDS[:1]], SHARDS, "chat_template.jinja"),
        (MODEL, ["config.json", *SHARDS[:1]], SHARDS, SHARDS[1]),
        (ADAPTER, [ADAPTER.config_file_name], (), ADAPTER.weights_file_name),
        (AUTOENCODER, ["k/cfg.json"], (), "k/sae.safetensors"),
    ],
)
def test_a_part_of_a_model_in_the_cache_is_refused_and_offline_is_named(
    kind, names, index, lacking, cached, address
):
    address(f"http://127.0.0.1:{free_port()}")
    if names:
        cached(*names, index=index)
    with pytest.raises(InputError) as refused:
        Repository("org/x", kind=kind).file(lacking)
    told = str(refused.value)
    assert told.startswith(f"{kind.flag} org/x: ") and "HF_HUB_OFFLINE=1" in told
    assert f"cannot be reached for {lacking}" in told
    assert ("nothing of this repository" in told) == (not names)


def test_a_moment_s_failure_to_connect_is_none(monkeypatch):
    answers = [ConnectionRefusedError(errno.ECONNREFUSED, "no"), None]

    def connect(*_, **__):
        if answer := answers.pop(0):
            raise answer
        return socket.socket()

    monkeypatch.setattr(retries.time, "sleep", lambda _: None)
    monkeypatch.setattr(retries.socket, "create_connection", connect)
    assert hub_unreachable("http://hub.momentary") is None and not answers


def test_an_unwritable_cache_is_named_with_its_variable():
    outer = RuntimeError("cannot download")
    outer.__cause__ = NotADirectoryError(errno.ENOTDIR, "Not a directory", "/dev/null/home/hub")
    assert "/dev/null/home/hub: Not a directory; set HF_HOME to a folder" in str(
        unwritable_cache(outer)
    )
    assert unwritable_cache(FileNotFoundError(errno.ENOENT, "no such file", "x")) is None
