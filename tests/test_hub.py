"""Models and data sets of the hub, against a local server that answers as the hub does."""

import gzip
import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from conftest import make_reference
from hub_server import serve_hub

import extract_activations
from activation_extraction import ActivationDataset
from activation_extraction.model.checkpoint import INDEX_FILE, SINGLE_FILE, TOKENIZER_FILES
from activation_extraction.run import demo

pytestmark = pytest.mark.long

TEXTS = ["--dataset_name", "org/texts", "--dataset_config", "small"]
SCRIPT = Path(extract_activations.__file__)
CONFIGS = """---
configs:
- config_name: small
  data_files: sample/*.parquet
---
"""


@pytest.fixture
def hub(tmp_path, demo_inputs):
    """A hub with the demo model as `org/tiny`, a sharded one, and documents as `org/texts`."""
    root = tmp_path / "hub"
    shutil.copytree(demo_inputs / "model", root / "models/org/tiny")
    reference = make_reference(
        root / "models/org/sharded", "100KB", num_key_value_heads=2, vocab_size=300
    )
    demo.write_tokenizer(reference.folder, [])
    texts = root / "datasets/org/texts"
    (texts / "sample").mkdir(parents=True)
    (texts / "README.md").write_text(CONFIGS)
    for number in range(2):
        rows = [{"text": f"file {number} row {r}", "id": f"{number}-{r}"} for r in range(50)]
        pyarrow.parquet.write_table(
            pyarrow.Table.from_pylist(rows), texts / f"sample/{number}.parquet", row_group_size=10
        )
    with serve_hub(root) as server:
        yield server


def run(hub, tmp_path, *arguments, **environment):
    """The command line in a process whose hub is the local one."""
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments, "--output_dir", str(tmp_path / "out")],
        env=os.environ
        | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_model_and_streamed_data_set_from_the_hub(hub, tmp_path):
    flags = ["--model_path", "org/tiny", "--dataset_name", "org/texts"]
    flags += ["--dataset_config", "small", "--max_seq_length", "64", "--machine_id", "1"]
    done = run(hub, tmp_path, *flags, "--total_machines", "2")
    assert done.returncode == 0, done.stderr
    shard = pickle.load(gzip.open(tmp_path / "out/machine_001/shard_0001.pkl.gz"))
    # Two files of five row groups each: this machine has five of the ten groups.
    assert len(shard[10]) == 50
    assert len({record["doc_id"] for record in shard[10]}) == 50
    assert any(path.startswith("/datasets/org/texts/resolve/") for _, path in hub.requests)
    stored = json.loads((tmp_path / "out/machine_001/metadata.json").read_text())
    (snapshot,) = (tmp_path / "home/hub/models--org--tiny/snapshots").iterdir()
    assert stored["identity"]["model_digest"] == f"commit {snapshot.name}"


def test_a_mixture_of_the_hub_and_files_in_a_random_order(hub, tmp_path):
    """It continues with the same samples, and a sample knows its source; the hub's revision is part
    of the run's identity."""
    lines = "".join(json.dumps({"text": f"line {n}", "id": f"own-{n}"}) + "\n" for n in range(60))
    (tmp_path / "own.jsonl").write_text(lines)
    flags = ["--model_path", "org/tiny", "--max_seq_length", "64", "--shuffle_documents", "1"]
    flags += ["--mix", "org/texts:small:train=3", f"{tmp_path}/own.jsonl=1", "--batch_size", "2"]
    done = run(hub, tmp_path, *flags, "--layers_to_extract", "1", "--max_samples", "40")
    assert done.returncode == 0, done.stderr
    done = run(hub, tmp_path, *flags, "--layers_to_extract", "1", "--max_samples", "80")
    assert done.returncode == 0, done.stderr
    whole = [sample.doc_id for sample in ActivationDataset(tmp_path / "out")]
    sources = [sample.row["source"] for sample in ActivationDataset(tmp_path / "out")]
    assert [sources[:n].count("org/texts:small:train") for n in (20, 40, 80)] == [15, 30, 60]
    assert len(set(whole)) == 80 and whole != sorted(whole)
    metadata = json.loads((tmp_path / "out/metadata.json").read_text())
    assert metadata["identity"]["data_revision"].startswith("org/texts:small:train@")
    shutil.rmtree(tmp_path / "out")
    done = run(hub, tmp_path, *flags, "--layers_to_extract", "1", "--max_samples", "80")
    assert done.returncode == 0, done.stderr
    assert [sample.doc_id for sample in ActivationDataset(tmp_path / "out")] == whole
    done = run(hub, tmp_path, "--model_path", "org/tiny", "--mix", "org/none=1", "org/texts=2")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: --mix org/none train: ")


def test_only_the_files_with_needed_layers_are_downloaded(hub, tmp_path):
    flags = ["--model_path", "org/sharded", "--layers_to_extract", "0"]
    done = run(hub, tmp_path, *flags, "--dataset_name", "org/texts", "--dataset_config", "small")
    assert done.returncode == 0, done.stderr
    every = set((tmp_path / "hub/models/org/sharded").glob("*.safetensors"))
    fetched = {
        path.rsplit("/", 1)[1]
        for _, path in hub.requests
        if path.startswith("/org/sharded/resolve/") and path.endswith(".safetensors")
    } & {path.name for path in every}
    assert 0 < len(fetched) < len(every)


def test_a_single_file_of_the_hub_counts_before_an_index(hub, tmp_path):
    """Also offline, and from the hub's cache."""
    shards = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "hub/models/org/tiny" / INDEX_FILE).write_text(json.dumps(shards))
    flags = ["--model_path", "org/tiny", "--dataset_path", str(tmp_path / "a.jsonl")]
    (tmp_path / "a.jsonl").write_text('{"text": "a text"}\n')
    for offline in ("0", "1"):
        done = run(hub, tmp_path, *flags, "--overwrite", HF_HUB_OFFLINE=offline)
        assert done.returncode == 0, done.stderr
        assert f"org/tiny: {SINGLE_FILE} is read, and {INDEX_FILE} is not" in done.stderr


def test_adapters_and_other_weights_of_the_hub_are_named(hub, tmp_path):
    models = tmp_path / "hub/models/org"
    adapter = json.dumps({"base_model_name_or_path": "org/tiny"})
    (models / "adapter").mkdir()
    (models / "adapter/adapter_config.json").write_text(adapter)
    shutil.copytree(models / "tiny", models / "both")
    (models / "both/adapter_config.json").write_text(adapter)
    shutil.copytree(models / "tiny", models / "pickled")
    (models / f"pickled/{SINGLE_FILE}").rename(models / "pickled/pytorch_model.bin")
    for name, said in (
        ("adapter", "holds an adapter (adapter_config.json, of org/tiny), which is not applied"),
        ("both", "holds an adapter (adapter_config.json, of org/tiny), which is not applied"),
        ("pickled", f"has no {SINGLE_FILE}, but pytorch_model.bin; only safetensors are read"),
    ):
        done = run(hub, tmp_path, "--model_path", f"org/{name}", *TEXTS)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert done.stderr.startswith(f"error: --model_path org/{name}: {said}")


def test_files_of_the_hub_are_known_by_its_digests(hub, tmp_path):
    """A file of the same size that takes the place of one is refused."""
    flags = ["--model_path", "org/tiny", "--dataset_path", "hf://datasets/org/texts/sample"]
    flags += ["--layers_to_extract", "1", "--max_samples"]
    done = run(hub, tmp_path, *flags, "5")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "hub/datasets/org/texts/sample/1.parquet"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    done = run(hub, tmp_path, *flags, "10")
    assert done.returncode == 2, done.stderr
    assert "sample/1.parquet is not the file that the run began with;" in done.stderr


def test_a_revision_is_read_with_the_token_and_then_offline(hub, tmp_path, demo_inputs):
    """transformers reads the files that were downloaded, and asks the hub for nothing itself."""
    tiny = tmp_path / "hub/models/org/tiny"
    shutil.copytree(tiny, f"{tiny}@v1")
    settings = json.loads((tiny / "tokenizer_config.json").read_text())
    (tiny / "tokenizer.json").write_text("{")  # of main: it must not be read
    settings["model_max_length"] = 7  # of v1: no limit to samples
    Path(f"{tiny}@v1/tokenizer_config.json").write_text(json.dumps(settings))
    flags = ["--model_path", "org/tiny", "--model_revision", "v1", "--max_seq_length", "64"]
    flags += ["--dataset_path", str(demo_inputs / "documents.parquet"), "--max_samples", "3"]
    done = run(hub, tmp_path, *flags, HF_TOKEN="hf_secret")
    assert done.returncode == 0, done.stderr
    assert hub.authorizations == {"Bearer hf_secret"}
    files = {path.rsplit("/", 1)[1] for _, path in hub.requests if "/resolve/" in path}
    assert files <= {"config.json", SINGLE_FILE, INDEX_FILE, *TOKENIZER_FILES}
    shard = (tmp_path / "out/shard_0001.pkl.gz").read_bytes()
    asked = len(hub.requests)
    done = run(hub, tmp_path, *flags, "--overwrite", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    assert len(hub.requests) == asked
    assert (tmp_path / "out/shard_0001.pkl.gz").read_bytes() == shard


def test_a_cache_that_another_program_has_filled_is_read_offline(hub, tmp_path):
    """It does not say which files the model lacks; one that is needed is named."""
    tiny, texts = tmp_path / "hub/models/org/tiny", tmp_path / "a.jsonl"
    texts.write_text(json.dumps({"messages": [{"role": "user", "content": "a question"}]}))
    (tiny / "chat_template.jinja").write_text("{{ messages | map(attribute='content') | join }}")
    download = "import huggingface_hub; huggingface_hub.snapshot_download('org/tiny')"
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home")}
    subprocess.run([sys.executable, "-c", download], env=os.environ | environment, check=True)
    flags = ["--model_path", "org/tiny", "--dataset_path", str(texts)]
    done = run(hub, tmp_path, *flags, "--messages_column", "messages", HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stderr
    for path in (tmp_path / "home").rglob(SINGLE_FILE):
        path.unlink()
    done = run(hub, tmp_path, *flags, "--overwrite", HF_HUB_OFFLINE="1")
    told = "--model_path org/tiny: the hub cannot be reached, and its cache here has no model.safe"
    assert done.returncode == 2 and told in done.stderr


def test_the_hubs_templates_are_there_at_the_first_start(hub, tmp_path):
    """Also that for conversations with tools, which is in a folder of the repository."""
    tiny = tmp_path / "hub/models/org/tiny"
    (tiny / "additional_chat_templates").mkdir()
    for name in ("chat_template", "additional_chat_templates/tool_use"):
        (tiny / f"{name}.jinja").write_text(
            name + ": {{ messages | map(attribute='content') | join }}"
        )
    messages = [{"role": "user", "content": "a question"}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    rows = [{"messages": messages, "tools": tools}, {"messages": messages}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    flags = ["--model_path", "org/tiny", "--dataset_path", str(tmp_path / "rows.jsonl")]
    flags += ["--messages_column", "messages", "--layers_to_extract", "1"]
    for offline in ("0", "1"):
        done = run(hub, tmp_path, *flags, "--overwrite", HF_HUB_OFFLINE=offline)
        assert done.returncode == 0, done.stderr
        previews = [sample.text_preview for sample in ActivationDataset(tmp_path / "out")]
        assert previews == [
            "additional_chat_templates/tool_use: a question",
            "chat_template: a question",
        ]
    metadata = json.loads((tmp_path / "out/metadata.json").read_text())
    assert len(metadata["model_commit"]) == 40


@pytest.mark.parametrize(
    "flags,named",
    [
        ("--model_path org/none --dataset_name org/texts", "--model_path org/none"),
        ("--model_path org/tiny --dataset_name org/none", "--dataset_name org/none"),
        ("--model_path org/tiny --dataset_name org/texts --dataset_config big", "big"),
        (f"--model_path org/tiny {' '.join(TEXTS)} --dataset_split test", "test"),
    ],
)
def test_what_the_hub_does_not_have_exits_2_with_one_line(hub, tmp_path, flags, named):
    done = run(hub, tmp_path, *flags.split())
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()
    assert len(last) == 1 and last[0].startswith("error: ") and named in last[0], done.stderr
    assert not (tmp_path / "out").exists()
