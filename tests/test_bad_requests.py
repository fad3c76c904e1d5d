"""Bad flags, files and folders: one line that names them, and exit status 2."""

import json

import pytest
from command_line import assert_refused, start


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
