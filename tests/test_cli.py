"""The command line as users meet it: separate processes, exit statuses, bad input, Ctrl-C."""

import gzip
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import make_reference
from safetensors.numpy import load_file, save_file
from small_runs import both_formats, shard_name

import extract_activations
from activation_extraction.cli.flags import build_parser
from activation_extraction.run import demo

SCRIPT = Path(extract_activations.__file__)


def start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        **options,
    )


def records_of(folder):
    """Every record of an extraction: key -> list, shards in order."""
    found = {}
    for path in sorted(folder.glob("shard_*.pkl.gz")):
        for key, records in pickle.load(gzip.open(path)).items():
            found.setdefault(key, []).extend(records)
    return found


def main(*arguments):
    """Runs in this process (quicker than a new one); the exit status."""
    return extract_activations.main([str(argument) for argument in arguments])


@pytest.mark.long
@pytest.mark.usefixtures("optimized")
@both_formats
def test_demo_in_a_new_process_reads_back_as_it_says(shard_format, tmp_path):
    process = start("--demo", "--output_dir", tmp_path / "out", "--shard_format", shard_format)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "done: 300 samples" in out and "compress" in out and "tokens/s" in out
    scope: dict = {}
    exec(textwrap.dedent(out.split("read it with:\n")[1]), scope)
    dataset = scope["dataset"]
    hooks = [f"blocks.{layer}.hook_resid_post" for layer in (10, 11)]
    assert dataset.hooks == dict.fromkeys(hooks, 128) and len(dataset) == 300
    if shard_format == "pickle":
        assert list(scope["records"]) == [10, 11] and len(scope["records"][10]) == 300
        assert (dataset[299][hooks[1]] == scope["records"][11][299]["activation"]).all()
    assert (tmp_path / "out" / shard_name(1, shard_format)).exists()
    assert dataset.metadata["status"] == "complete" and dataset.metadata["samples"] == 300


@pytest.mark.long
def test_ctrl_c_commits_what_is_complete(inputs, texts, tmp_path):
    path = texts([{"text": f"text number {n} " * 20} for n in range(20_000)])
    out = tmp_path / "out"
    process = start(
        *inputs, "--dataset_path", path, "--output_dir", out, "--shard_size_gb", 1e-3, "--verbose"
    )
    deadline = time.monotonic() + 60
    while not list(out.glob("shard_0003.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=300)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors and printed.startswith("interrupted: ")
    metadata = json.loads((out / "metadata.json").read_text())
    assert metadata["status"] == "interrupted" and metadata["samples"] < 20_000
    assert metadata["samples"] == len(records_of(out)[10]) > 0
    assert not list(out.glob(".*"))


def test_help_tells_defaults_and_units(capsys):
    with pytest.raises(SystemExit) as stopped:
        main("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0
    for part in ("model:", "text:", "computing:", "output:", "default: 2048", "10^9 bytes", "GLOB"):
        assert part in text
    for action in build_parser()._actions:
        assert action.help, action.option_strings


def break_file(name, change):
    """A way to spoil a copy of the model folder."""

    def spoil(model):
        path = model / name
        path.write_bytes(change(path.read_bytes()))

    return spoil


def edit_config(**changes):
    return break_file("config.json", lambda b: json.dumps(json.loads(b) | changes).encode())


def edit_weights(change):
    def spoil(model):
        weights = load_file(model / "model.safetensors")
        change(weights)
        save_file(weights, model / "model.safetensors")

    return spoil


Q_PROJ = "model.layers.3.self_attn.q_proj.weight"
BAD_MODELS = {
    "no config": (lambda m: (m / "config.json").unlink(), "has no config.json"),
    "config is no JSON": (break_file("config.json", lambda _: b"{"), "config.json: cannot be read"),
    "config is a list": (break_file("config.json", lambda _: b"[]"), "found list"),
    "other architecture": (edit_config(model_type="llama"), "model_type 'llama'"),
    "other activation": (edit_config(hidden_act="gelu"), "hidden_act 'gelu'"),
    "scaled rope": (edit_config(rope_scaling={"type": "dynamic", "factor": 2.0}), "'dynamic'"),
    "no size": (edit_config(hidden_size=None), "'hidden_size' expected int, got NoneType"),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), "has no model.safetensors"),
    "truncated weights": (
        break_file("model.safetensors", lambda b: b[: len(b) // 2]),
        "model.safetensors: not a complete safetensors file",
    ),
    "weights are garbage": (
        break_file("model.safetensors", lambda _: b"garbage!" * 9),
        "not a complete safetensors file",
    ),
    "missing tensor": (edit_weights(lambda w: w.pop(Q_PROJ)), f"tensor {Q_PROJ} is missing"),
    "unknown tensor": (
        edit_weights(lambda w: w.update(odd=np.zeros(1, np.float32))),
        "tensor odd is unknown",
    ),
    "wrong shape": (
        edit_weights(lambda w: w.update({Q_PROJ: w[Q_PROJ][:-2].copy()})),
        f"{Q_PROJ} has shape (126, 128), config.json asks for (128, 128)",
    ),
    "quantised": (
        edit_weights(lambda w: w.update({Q_PROJ: w[Q_PROJ].astype(np.int8)})),
        f"{Q_PROJ} is I8",
    ),
    "broken index": (
        lambda m: (m / "model.safetensors.index.json").write_text("{}"),
        "not a safetensors index",
    ),
    "no tokenizer": (
        lambda m: (m / "tokenizer.json").unlink(),
        "has no vocab.json; a tokenizer is read from tokenizer.json",
    ),
    "broken tokenizer": (break_file("tokenizer.json", lambda b: b[:99]), "tokenizer cannot be"),
    "tokenizer of another model": (
        edit_config(vocab_size=2000),
        "has token id 2047, but vocab_size in config.json is 2000",
    ),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_bad_models_exit_2_with_one_line(name, inputs, tmp_path, capsys):
    spoil, named = BAD_MODELS[name]
    model = tmp_path / "model"
    shutil.copytree(inputs[1], model)
    spoil(model)
    # A wrong vocabulary also changes the embedding's shape: the tokenizer is to blame only alone.
    if name == "tokenizer of another model":
        edit_weights(
            lambda w: w.update(
                {"model.embed_tokens.weight": w["model.embed_tokens.weight"][:2000].copy()}
            )
        )(model)
    assert_refused(capsys, tmp_path, [*inputs, "--model_path", model], named)


def assert_refused(capsys, tmp_path, arguments, named):
    """Status 2, one line on stderr that holds `named`, nothing written."""
    if "--output_dir" not in arguments:
        arguments = [*arguments, "--output_dir", tmp_path / "new" / "out"]
    before = sorted(tmp_path.rglob("*"))
    assert main(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    assert named in err
    assert sorted(tmp_path.rglob("*")) == before


def lines(*rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


# Flags, files to write beforehand, and what the message names.
BAD_REQUESTS = {
    "unknown flag": (["--layer", 3], {}, "--layer"),
    "abbreviated flag": (["--max_sample", 3], {}, "--max_sample"),
    "missing value": (["--batch_size"], {}, "--batch_size"),
    "batch size 0": (["--batch_size", 0], {}, "argument --batch_size: 0 is less than 1"),
    "negative length": (["--max_seq_length", -5], {}, "argument --max_seq_length"),
    "length is no number": (["--max_seq_length", "2k"], {}, "invalid integer value: '2k'"),
    "beyond the positions": (["--max_seq_length", 4096], {}, "the model has 2048 positions"),
    "no samples": (["--max_samples", 0], {}, "argument --max_samples"),
    "shard size 0": (["--shard_size_gb", 0], {}, "argument --shard_size_gb"),
    "shard size nan": (["--shard_size_gb", "nan"], {}, "argument --shard_size_gb"),
    "unknown dtype": (["--dtype", "float8"], {}, "argument --dtype"),
    "unknown type": (["--activation_type", "q"], {}, "argument --activation_type"),
    "layer beyond depth": (["--layers_to_extract", 12], {}, "--layers_to_extract 12: the model"),
    "negative layer": (["--layers_to_extract", -1], {}, "argument --layers_to_extract"),
    "hook that is not there": (
        ["--hook_names", "blocks.*.hook_mlp_in"],
        {},
        "--hook_names blocks.*",
    ),
    "machine out of range": (
        ["--machine_id", 2, "--total_machines", 2],
        {},
        "--machine_id 2: out of range for --total_machines 2",
    ),
    "batch not divisible": (
        ["--batch_size", 7],
        {},
        "--batch_size, rows of all hosts together: 7 does not divide among 2 devices",
    ),
    "two data sets": (
        ["--dataset_name", "a/b"],
        {},
        "--dataset_path and --dataset_name cannot be used together",
    ),
    "hooks named twice": (
        ["--hook_names", "*", "--layers_to_extract", 1],
        {},
        "--hook_names and --layers_to_extract cannot be used together",
    ),
    "demo with a model": (["--demo"], {}, "--demo and --model_path cannot be used together"),
    "both of a pair": (
        ["--compress_shards", "--no_compress_shards"],
        {},
        "--no_compress_shards: not allowed with argument --compress_shards",
    ),
    "compressed safetensors": (
        ["--compress_shards", "--shard_format", "safetensors"],
        {},
        "--compress_shards: safetensors are never compressed",
    ),
    "model is nowhere": (["--model_path", "./no/such/model"], {}, "no such folder"),
    "model is a file": (["--model_path", "{}/f"], {"f": ""}, "is a file, expected a folder"),
    "data is nowhere": (["--dataset_path", "{}/none"], {}, "none: no such file or folder"),
    "data in an empty folder": (
        ["--dataset_path", "{}/d"],
        {"d/x": "a"},
        "has no files that end in .jsonl",
    ),
    "data of unknown kind": (
        ["--dataset_path", "{}/x.csv"],
        {"x.csv": "a"},
        "has no files that end in .jsonl, .jsonl.gz, .parquet",
    ),
    "mixed kinds": (
        ["--dataset_path", "{}/d"],
        {"d/a.jsonl": "{}", "d/b.parquet": ""},
        "both Parquet and JSON Lines",
    ),
    "unknown protocol": (["--dataset_path", "nope://x"], {}, "--dataset_path nope://x"),
    "empty file": (["--dataset_path", "{}/e.jsonl"], {"e.jsonl": ""}, "is empty"),
    "no Parquet": (["--dataset_path", "{}/e.parquet"], {"e.parquet": "x"}, "e.parquet"),
    "empty Parquet": (["--dataset_path", "{}/e.parquet"], {"e.parquet": ""}, "e.parquet"),
    "only empty texts": (
        ["--dataset_path", "{}/e.jsonl"],
        {"e.jsonl": lines({"text": ""}, {"text": None})},
        "no row has text",
    ),
    "empty name": (["--dataset_path", ""], {}, "argument --dataset_path: is empty"),
    "empty model": (["--model_path", " "], {}, "argument --model_path: is empty"),
    "name too long": (["--output_dir", "{}/" + 300 * "x"], {}, "cannot be written to"),
    "mesh of too many": (
        ["--mesh_shape", "4,4"],
        {},
        "there are 8; these would fit: 2,4",
    ),
    "mesh of other rank": (["--mesh_type", "3d", "--mesh_shape", "2,4"], {}, "has 2 axes"),
    "mesh of words": (["--mesh_shape", "2,x"], {}, "argument --mesh_shape"),
    "mesh axis unknown": (["--mesh_axes", "data,rows"], {}, "argument --mesh_axes"),
    "axes without shape": (["--mesh_axes", "fsdp,data"], {}, "needs --mesh_shape"),
    "heads of nowhere": (["--host_id", 1], {}, "--host_id: needs --multihost"),
    "address missing": (
        ["--multihost", "--host_id", 1, "--num_hosts", 2],
        {},
        "--coordinator_address: is missing",
    ),
    "host out of range": (
        ["--multihost", "--coordinator_address", "a:1", "--host_id", 2, "--num_hosts", 2],
        {},
        "--host_id 2: out of range for --num_hosts 2",
    ),
    "address without port": (
        ["--multihost", "--coordinator_address", "a", "--host_id", 0, "--num_hosts", 2],
        {},
        "--coordinator_address a: expected HOST:PORT",
    ),
    "a number too large": (["--batch_size", 10**12], {}, "is more than"),
    "no gzip": (["--dataset_path", "{}/e.jsonl.gz"], {"e.jsonl.gz": "x"}, "e.jsonl.gz: Compressed"),
    "no JSON": (["--dataset_path", "{}/e.jsonl"], {"e.jsonl": "x"}, "e.jsonl line 1: not JSON"),
    "text column missing": (
        ["--dataset_path", "{}/e.jsonl"],
        {"e.jsonl": lines({"body": "x", "id": 1})},
        "--text_column text: no such column; the columns are body, id",
    ),
    "text is no text": (
        ["--dataset_path", "{}/e.jsonl", "--text_column", "id"],
        {"e.jsonl": lines({"body": "x", "id": 1})},
        "--text_column id: expected text, found int",
    ),
    "output is a file": (["--output_dir", "{}/f"], {"f": ""}, "is a file, expected a folder"),
    "output below a file": (["--output_dir", "{}/f/out"], {"f": ""}, "cannot be written to"),
    "output unwritable": (["--output_dir", "/proc/activations"], {}, "cannot be written to"),
    "bucket without upload": (["--gcs_bucket", "b"], {}, "--gcs_bucket: needs --upload_to_gcs"),
    "upload without bucket": (["--upload_to_gcs"], {}, "--upload_to_gcs: needs --gcs_bucket"),
    "bucket in memory": (
        ["--upload_to_gcs", "--gcs_bucket", "memory://b"],
        {},
        "--gcs_bucket memory://b: is not a bucket that lasts",
    ),
    "bucket with a path": (
        ["--upload_to_gcs", "--gcs_bucket", "b/c"],
        {},
        "--gcs_bucket b/c: is a path",
    ),
    "prefix with a wildcard": (
        ["--upload_to_gcs", "--gcs_bucket", "b", "--gcs_prefix", "run*"],
        {},
        "--gcs_prefix 'run*': contains a space, a wildcard",
    ),
    "output to a URL": (["--output_dir", "gs://b/c"], {}, "use --upload_to_gcs"),
    "s3fs is not installed": (
        ["--upload_to_gcs", "--gcs_bucket", "s3://b", "--output_dir", "{}/o"],
        {},
        "--upload_to_gcs: s3://b",
    ),
    "aggregate without status": (["--aggregate"], {}, "--aggregate: needs --status"),
    "verify and status": (["--verify", "--status"], {}, "cannot be used together"),
    "output is taken": (
        ["--output_dir", "{}/o"],
        {"o/metadata.json": "{}"},
        "o/metadata.json: is damaged, or was not written by this program",
    ),
    "output has shards": (
        ["--output_dir", "{}/o"],
        {"o/shard_0001.pkl.gz": "x"},
        "already holds shards, but no metadata.json",
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_requests_exit_2_with_one_line(name, inputs, tmp_path, capsys):
    flags, files, named = BAD_REQUESTS[name]
    for path, content in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content)
    arguments = [*inputs, *(str(flag).replace("{}", str(tmp_path)) for flag in flags)]
    assert_refused(capsys, tmp_path, arguments, named)


@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["unknown flag", "empty Parquet", "no gzip", "only empty texts", "output below a file"]
)
def test_bad_requests_as_processes(name, inputs, tmp_path):
    """What libraries print and how the interpreter ends count, too."""
    flags, files, named = BAD_REQUESTS[name]
    for path, content in files.items():
        (tmp_path / path).write_text(content)
    process = start(*inputs, *(str(flag).replace("{}", str(tmp_path)) for flag in flags))
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and named in err, err


def test_a_missing_file_of_a_sharded_checkpoint_is_named(tmp_path, capsys, inputs):
    make_reference(tmp_path / "model", "100KB", num_key_value_heads=2, vocab_size=300)
    demo.write_tokenizer(tmp_path / "model", [])
    parts = sorted((tmp_path / "model").glob("model-*.safetensors"))
    assert len(parts) > 2
    parts[0].unlink()
    assert_refused(
        capsys, tmp_path, [*inputs, "--model_path", tmp_path / "model"], f"has no {parts[0].name}"
    )
