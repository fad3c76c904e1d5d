"""Models and data sets of the hub, against a local server that answers as the hub does."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import autoencoder_files
import pytest
from conftest import make_reference, rare_but
from hub_server import serve_hub
from row_files import write_parquet, write_rows
from test_lora import Made

import extract_activations
from activation_extraction import ActivationDataset
from activation_extraction.model.checkpoint import INDEX_FILE, SINGLE_FILE, TOKENIZER_FILES
from activation_extraction.run import demo

SCRIPT = Path(extract_activations.__file__)
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
    """Which were stored, each with its source."""
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


def continued_offline(hub, tmp_path, demo_inputs, flag, name, other):
    """Runs with an input of the hub, continues offline, and asks for another one. Returns what the
    first run and the last one say."""
    flags = ["--model_path", "org/tiny", "--dataset_path", demo_inputs / "documents.parquet", *FEW]
    first = run(hub, tmp_path, *flags, flag, name, "--max_samples", "5")
    flags += ["--max_samples", "9", flag]
    run(hub, tmp_path, *flags, name, HF_HUB_OFFLINE="1")
    assert recorded(tmp_path / "out")["samples"] == 9
    return first, run(hub, tmp_path, *flags, other, status=2)


@pytest.mark.long
def test_an_adapter_of_the_hub(hub, tmp_path, demo_inputs):
    made = Made(demo_inputs / "model")
    made.linear("model.layers.0.mlp.up_proj", 5 / 3)
    made.save(tmp_path / "hub/models/org/lora")
    told = continued_offline(hub, tmp_path, demo_inputs, "--lora", "org/lora", "org/none")
    assert "--lora org/lora: merged in float32 into 1 tensors" in told[0]
    error = told[1].splitlines()[-1]
    assert error.startswith("error: --lora org/none: no such local folder, and the")


@pytest.mark.long
@pytest.mark.rare
def test_an_autoencoder_of_the_hub(hub, tmp_path, demo_inputs, monkeypatch):
    """It lies in a folder of a repository."""
    monkeypatch.setattr(autoencoder_files, "D", 128)
    autoencoder_files.sparsify(tmp_path / "hub/models/org/saes/pile")
    names = "org/saes/pile/layers.1", "org/saes/pile/layers.2"
    told = continued_offline(hub, tmp_path, demo_inputs, "--encode", *names)
    assert f"codes of {names[0]}: blocks.1.hook_resid_post.codes: " in told[0]
    assert "of 200 features" in told[0]
    assert f"error: --encode {names[1]}: has no files of a form" in told[1]


@pytest.mark.long
def test_a_mixture_of_the_hub_and_files_in_a_random_order(hub, tmp_path):
    """It continues with the same samples, and a sample knows its source; the hub's revision is part
    of the run's identity."""
    rows = ({"text": f"line {n}", "id": f"own-{n}"} for n in range(60))
    own = write_rows(tmp_path / "own.jsonl", rows)
    flags = ["--model_path", "org/tiny", *FEW, "--shuffle_documents", "1", "--batch_size", "2"]
    flags += ["--mix", "org/texts:small:train=3", f"{own}=1", "--max_samples"]
    for most in ("40", "80"):
        run(hub, tmp_path, *flags, most)
    whole = documents(tmp_path / "out")
    sources = [source for _, source in whole]
    assert [sources[:n].count("org/texts:small:train") for n in (20, 40, 80)] == [15, 30, 60]
    assert len(set(whole)) == 80 and whole != sorted(whole)
    identity = recorded(tmp_path / "out")["identity"]
    assert identity["data_revision"].startswith("org/texts:small:train@")
    run(hub, tmp_path, *flags, "80", "--overwrite")
    assert documents(tmp_path / "out") == whole


@pytest.mark.long
def test_files_of_the_hub_are_known_by_its_digests(hub, tmp_path):
    """A file of the same size that takes the place of one is refused."""
    flags = ["--model_path", "org/tiny", "--dataset_path", "hf://datasets/org/texts/sample", *FEW]
    run(hub, tmp_path, *flags, "--max_samples", "5")
    path = tmp_path / "hub/datasets/org/texts/sample/1.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    told = run(hub, tmp_path, *flags, "--max_samples", "10", status=2)
    assert "sample/1.parquet is not the file that the run began with;" in told


@pytest.mark.long
def test_a_revision_is_read_with_the_token_and_then_offline(hub, tmp_path, demo_inputs):
    """transformers reads the files that were downloaded, and asks the hub for nothing itself."""
    tiny = tmp_path / "hub/models/org/tiny"
    settings = json.loads((tiny / "tokenizer_config.json").read_text())
    settings["model_max_length"] = 7  # of v1: no limit to samples
    shutil.copytree(tiny, f"{tiny}@v1")
    Path(f"{tiny}@v1/tokenizer_config.json").write_text(json.dumps(settings))
    (tiny / "tokenizer.json").write_text("{")  # of main: it must not be read
    flags = ["--model_path", "org/tiny", "--model_revision", "v1", *FEW, "--max_samples", "3"]
    flags += ["--dataset_path", demo_inputs / "documents.parquet", "--overwrite"]
    run(hub, tmp_path, *flags, HF_TOKEN="hf_secret")
    assert hub.authorizations == {"Bearer hf_secret"}
    assert resolved(hub, "org/tiny") <= {"config.json", SINGLE_FILE, INDEX_FILE, *TOKENIZER_FILES}
    shard, asked = (tmp_path / "out/shard_0001.pkl.gz").read_bytes(), len(hub.requests)
    run(hub, tmp_path, *flags, HF_HUB_OFFLINE="1")
    assert len(hub.requests) == asked
    assert (tmp_path / "out/shard_0001.pkl.gz").read_bytes() == shard


@pytest.mark.long
def test_the_hubs_templates_are_there_at_the_first_start(hub, tmp_path):
    """The one for conversations with tools is in a folder of the repository. Offline, they come
    from a cache that another program has filled, which does not say what files a model lacks."""
    tiny = tmp_path / "hub/models/org/tiny"
    (tiny / "additional_chat_templates").mkdir()
    for name in ("chat_template", "additional_chat_templates/tool_use"):
        (tiny / f"{name}.jinja").write_text(f"{name}: {JOINED}")
    messages = [{"role": "user", "content": "a question"}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    rows = [{"messages": messages, "tools": tools}, {"messages": messages}]
    texts = write_rows(tmp_path / "rows.jsonl", rows)
    flags = ["--model_path", "org/tiny", "--dataset_path", texts, *FEW, "--overwrite"]
    flags += ["--messages_column", "messages"]
    download = "import huggingface_hub; huggingface_hub.snapshot_download('org/tiny')"
    run(hub, tmp_path, script=("-c", download))
    for more in ({"HF_HUB_OFFLINE": "1"}, {"HF_HOME": str(tmp_path / "empty")}):
        run(hub, tmp_path, *flags, **more)
        previews = [sample.text_preview for sample in ActivationDataset(tmp_path / "out")]
        names = "additional_chat_templates/tool_use", "chat_template"
        assert previews == [f"{name}: a question" for name in names]
    for path in (tmp_path / "home").rglob(SINGLE_FILE):
        path.unlink()
    told = run(hub, tmp_path, *flags, HF_HUB_OFFLINE="1", status=2)
    assert "--model_path org/tiny: the hub cannot be reached, and its cache here has no mod" in told


def commit_upstream(tmp_path, revision=""):
    """Changes a weight of org/tiny's revision; the commit before stays within reach."""
    model = tmp_path / f"hub/models/org/tiny{revision}"
    shutil.copytree(model, tmp_path / "hub/models/org/tiny@before")
    weights = bytearray((model / SINGLE_FILE).read_bytes())
    weights[-2] ^= 1
    (model / SINGLE_FILE).write_bytes(weights)


@pytest.mark.long
@pytest.mark.parametrize("revision", rare_but([""], ["", "@v1"]))
def test_a_commit_upstream_does_not_stop_an_extraction(hub, tmp_path, demo_inputs, revision):
    """A tag that has moved does not stop it either, if the command names it."""
    flags = ["--model_path", "org/tiny", "--dataset_path", demo_inputs / "documents.parquet", *FEW]
    flags += ["--model_revision", revision[1:]] * bool(revision) + ["--max_samples"]
    shutil.copytree(tmp_path / "hub/models/org/tiny", tmp_path / "hub/models/org/tiny@v1")
    commit_upstream(tmp_path, "" if revision else "@v1")  # that is not what is asked for
    shutil.rmtree(tmp_path / "hub/models/org/tiny@before")
    run(hub, tmp_path, *flags, "5")
    first = recorded(tmp_path / "out")["model_commit"]
    commit_upstream(tmp_path, revision)
    shutil.rmtree(tmp_path / "home")
    run(hub, tmp_path, *flags, "9")
    assert recorded(tmp_path / "out")["model_commit"] == first
    if revision:
        return
    told = run(hub, tmp_path, *flags, "9", "--model_revision", "main", status=2)
    assert told.startswith("error: --model_revision main: is commit ") and first in told
    run(hub, tmp_path, "--verify", "--model_path", "org/tiny", "--verify_samples", "1")


ADAPTER = "holds an adapter (adapter_config.json, of org/tiny), which --lora takes"
TINY = "--model_path org/tiny --dataset_name org/"
# The flags, and how the one line begins that must come.
REFUSED = [
    ("--model_path org/adapter", f"--model_path org/adapter: {ADAPTER}"),
    ("--model_path org/pickled", f"--model_path org/pickled: has no {SINGLE_FILE}, but pytorch_mo"),
    ("--model_path org/none", "--model_path org/none: "),
    ("--model_path org/tiny --model_revision v1", "--model_path org/tiny --model_revision v1: "),
    (f"{TINY}none", "--dataset_name org/none train: "),
    (f"{TINY}texts --dataset_config big", "--dataset_name org/texts big train: "),
    (
        f"{TINY}texts --dataset_config small --dataset_split test",
        "--dataset_name org/texts small t",
    ),
    ("--model_path org/tiny --mix org/none=1 org/texts=2", "--mix org/none train: "),
]
EVERY = """
import sys, extract_activations
for flags in sys.argv[1:-2]:
    assert extract_activations.main([*flags.split(), *sys.argv[-2:]]) == 2
"""


@pytest.mark.long
def test_what_the_hub_does_not_have_exits_2_with_one_line(hub, tmp_path):
    models = tmp_path / "hub/models/org"
    (models / "adapter").mkdir()
    adapter = json.dumps({"base_model_name_or_path": "org/tiny"})
    (models / "adapter/adapter_config.json").write_text(adapter)
    shutil.copytree(models / "tiny", models / "pickled")
    (models / f"pickled/{SINGLE_FILE}").rename(models / "pickled/pytorch_model.bin")
    lines = run(hub, tmp_path, *(flags for flags, _ in REFUSED), script=("-c", EVERY)).splitlines()
    for line, (_, told) in zip(lines, REFUSED, strict=True):
        assert line.startswith(f"error: {told}")
    assert not (tmp_path / "out").exists()
