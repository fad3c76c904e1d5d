"""README.md says what is: its commands and snippets run as written, its flags and messages exist.

Commands run in one shell in the order in which they are written, with stand-ins for what the hub
and the bucket would answer. Those of the section about pods are test_deploy.py's part.
"""

import gzip
import importlib
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import gcsfs
import pyarrow
import pyarrow.parquet
import pytest
from cloud import script
from conftest import AS_IN_A_RUN, inputs_with
from gcs_server import gcs
from hub_server import serve_hub

from activation_extraction import ActivationDataset
from activation_extraction.cli.config import build_parser
from activation_extraction.run import demo

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()
PODS = "Several devices, pods and many machines"
SCRIPTS = ("deploy/deploy.sh", "launch_v5e64.sh")
# Of gcloud, docker and the engines.
OTHERS_FLAGS = {
    "--repo-type",
    "--accelerator-type",
    "--spot",
    "--platform",
    "--build-arg",
    "--array",
}
TOOLS = ("python", "ruff", "mypy", "shellcheck", "hadolint")
STAMPS = (".runtime", ".dev", ".libtpu", ".slurm", "skypilot/.done", "competitors/.done")
# Stands for .venv/bin/python and the other programs there: what would take long is only recorded.
PROGRAM = """#!/bin/sh
case "$(basename $0) $*" in
    python\\ extract_activations.py*--plan*)
        shift; exec {python} -m activation_extraction.cli.config "$@" ;;
    python\\ extract_activations.py*) exec {python} "$@" ;;
esac
echo "$(basename $0) $*" >>{record}
"""


def section(title):
    return re.split(r"\n## ", README.split(f"\n## {title}\n")[1])[0]


def blocks(text):
    """The indented ones, without their indentation."""
    found = re.findall(r"(?:^    .*\n|^\n(?=    ))+", text, flags=re.M)
    return [re.sub(r"^    ", "", block.strip("\n"), flags=re.M) for block in found]


def is_python(block):
    return block.startswith(("import ", "from "))


BLOCKS = [b for b in blocks(README.replace(section(PODS), "")) if not b.startswith("out/ ")]
COMMANDS = "\n".join(block for block in BLOCKS if not is_python(block))


def with_bucket(text):
    return text.replace("BUCKET", "bucket").replace("PREFIX", "prefix")


@pytest.fixture(scope="module")
def hub(tmp_path_factory, demo_inputs):
    """A tiny model of 24 layers and a few documents under the names that the README uses."""
    root = tmp_path_factory.mktemp("hub")
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 24}
    inputs = inputs_with({**demo.MODEL_CONFIG, **small}, demo_inputs, root / "inputs")
    shutil.copytree(inputs / "model", root / "models/Qwen/Qwen2.5-0.5B")
    texts = root / "datasets/HuggingFaceFW/fineweb-edu"
    (texts / "sample").mkdir(parents=True)
    card = "configs:\n- config_name: sample-10BT\n  data_files: sample/*.parquet\n"
    (texts / "README.md").write_text(f"---\n{card}---\n")
    rows = [{"text": f"document {number} " * 20, "id": str(number)} for number in range(150)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), texts / "sample/0.parquet")
    with serve_hub(root) as server:
        yield server


@pytest.fixture(scope="module")
def checkout(tmp_path_factory, hub):
    """A checkout in which all commands were run, what they printed and recorded, the bucket."""
    root = tmp_path_factory.mktemp("checkout")
    for path in REPOSITORY.iterdir():
        if path.name[0] != "." and not (path.is_dir() and path.name in ("activations", "out")):
            (root / path.name).symlink_to(path)
    for folder in ("bin", "competitors", "skypilot"):
        (root / ".venv" / folder).mkdir(parents=True)
    for name in TOOLS:
        text = PROGRAM.format(python=sys.executable, record=root / "recorded")
        script(root / ".venv/bin" / name, text)
    for stamp in STAMPS:  # all is installed
        (root / ".venv" / stamp).touch()
    with gcs() as bucket:
        environment = os.environ | bucket.environment | AS_IN_A_RUN
        environment["HF_ENDPOINT"] = hub.endpoint
        done = subprocess.run(
            ["bash", "-euxc", with_bucket(COMMANDS)],
            cwd=root,
            env=environment | {"HF_HOME": str(root / "home")},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        yield root, done.stdout, (root / "recorded").read_text(), bucket


@pytest.mark.rare
def test_the_commands_do_what_is_said(checkout):
    root, printed, recorded, bucket = checkout
    assert "done: 300 samples" in printed and "ActivationDataset('demo_activations')" in printed
    assert printed.count("done: 100 samples") == 4  # out, more, draft, and to the bucket
    assert printed.count(" tokens, 4 hooks, ") == 2  # two exports for draft models
    assert "--target-layer-ids 2 12 21 " in printed and "left out: ln_final.hook_out; " in printed
    assert '"aux_hidden_state_layer_ids": [1, 11, 20]' in printed
    assert json.loads((root / "out/metadata.json").read_text())["samples"] == 100
    assert "prefix/machine_000/shard_0001.pkl.gz" in bucket.objects()
    assert "tokens/s" in printed and "0 problem" in printed  # --status, --verify
    for tool in ("ruff check", "ruff format", *TOOLS[2:]):  # make lint
        assert f"{tool} " in recorded
    assert re.search(r"python -m pytest -n 3 .* -m not rare and not slow\n", recorded)
    for file in re.findall(r"-m pip install -r (\S+)", recorded):
        assert (REPOSITORY / file).is_file()
    (module,) = set(re.findall(r"-m (benchmarks\.\w+)", recorded))
    assert callable(importlib.import_module(module).main)
    told = next(block for block in blocks(README) if block.startswith("out/ "))
    for name in ("shard_0001.pkl.gz", "shard_0001.json", "metrics.jsonl", "metadata.json"):
        assert f"\n  {name} " in told and (root / "out" / name).is_file()
    commit = json.loads((root / "out/shard_0001.json").read_text())
    for field in ("run", "owner", "files", "samples", "tokens", "hooks", "mark", "committed"):
        assert field in told and field in commit


@pytest.mark.rare
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # torchdata
def test_the_snippets_read_what_is_stored(checkout, monkeypatch):
    root, _, _, bucket = checkout
    python = [with_bucket(block) for block in BLOCKS if is_python(block)]
    demonstration, training, resumed, workers, own = python
    monkeypatch.chdir(root)
    for name, value in bucket.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(fsspec.config.conf, "gs", {"token": "anon"})
    gcsfs.GCSFileSystem.clear_instance_cache()
    found = {}
    exec(demonstration, found)
    assert found["batch"]["blocks.10.hook_resid_post"].shape == (1024, 128)
    exec(training, found)
    assert found["hook"] == "blocks.12.hook_resid_post" and found["loss"].isfinite()
    assert len(found["dataset"]) == 100
    (reading,) = re.findall(r"`(pickle\.loads\(.*?\))` reads", README)
    found |= {"gzip": gzip, "pickle": pickle, "path": "out/shard_0001.pkl.gz"}
    exec(f"records = {reading}", found)
    assert list(found["records"]) == [12, 18] and len(found["records"][12]) == 100
    exec(own, found)
    assert found["sample"].doc_id == "doc 7" and len(ActivationDataset("own")) == 100
    check_training(found, resumed, workers)
    for field in found["records"][12][0]:
        assert f"`{field}`" in section("What it writes"), field


def check_training(found, resumed, workers):
    """A loop that is broken off and started again has every token once, with and without workers;
    layers of two runs are read as one."""
    dataset, every = found["dataset"], len(list(found["dataset"].batches(1024)))
    assert every > 2
    broken_off = resumed + "\n    break"
    for _ in range(2):
        exec(broken_off, found)
    found["rest"] = []
    exec(resumed.replace("saved.write_text", "rest.append(len(batch)), saved.write_text"), found)
    assert sum(found["rest"]) == dataset.tokens - 2 * 1024
    exec(workers, found)
    first = len(found["batch"])
    exec(workers.partition("batch = ")[0], found)
    found["loader"].load_state_dict(found["state"])
    rest = sum(map(len, found["loader"]))
    assert first == 1024 and first + rest == ActivationDataset("out").tokens
    (joined,) = re.findall(r"`(\S+\.join\(.*?\))`", section("Training on it"))
    batch = next(eval(joined, found).batches(1024))
    assert list(batch) == [f"blocks.{layer}.hook_resid_post" for layer in (12, 18, 15)]
    assert len(batch) == 1024


def test_every_flag_exists():
    known = {option for action in build_parser()._actions for option in action.option_strings}
    for name in SCRIPTS:
        known |= set(re.findall(r"--[\w-]+", (REPOSITORY / name).read_text()))
    assert known > {"--upload_to_gcs", "--min_free_gb", "--dry-run"}
    named = set(re.findall(r"(?<![\w|-])--[a-z][\w-]*", README))
    assert len(named) > 40 and named - known == OTHERS_FLAGS


# Names, numbers and dots stand for what differs; the sources have a placeholder there.
VARIABLE = (
    r"(?:gs://)?\.\.\.|(?<![\w.])'?\w*\d\w*'?|(?<!-)\b[A-Z]{4,}\b|pod-\w(?:/\d)?|sha256:|\[|\]"
)
OTHERS_PRINT = "RESOURCE_EXHAUSTED"


def test_every_message_is_printed_by_the_sources():
    files = [*REPOSITORY.glob("*.py"), *(REPOSITORY / "activation_extraction").rglob("*.py")]
    text = "\n".join(path.read_text() for path in [*files, *map(REPOSITORY.joinpath, SCRIPTS)])
    text = re.sub(r'"\s*\n\s*f?"', "", text)  # adjacent string literals
    table = section("When something goes wrong").split("what to do |\n|")[1]
    rows = [row.split(" | ")[0] for row in table.splitlines()[1:] if row.startswith("| ")]
    quoted = [re.findall(r"`([^`]+)`", row) for row in rows]
    assert all(quoted) and len(quoted) > 8
    for message in [message for messages in quoted for message in messages]:
        parts = [part.strip(" :,'") for part in re.split(f"{VARIABLE}|{OTHERS_PRINT}", message)]
        assert any(len(part) > 5 for part in parts), message
        for words in filter(None, parts):
            assert words in text, f"{message!r}: {words!r} is printed nowhere"
