"""Bad flags, files and folders: one line that names them, and exit status 2."""

import errno
import json

import pyarrow
import pyarrow.parquet
import pytest
from command_line import assert_refused, start

from activation_extraction.cli.config import parse_args
from activation_extraction.common import retries
from activation_extraction.common.errors import InputError
from activation_extraction.common.positions import parse_positions
from activation_extraction.common.retries import hub_unreachable, unwritable_cache


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
    "no room for two shards": (
        ["--waiting_shards_gb", 1.5],
        {},
        "--waiting_shards_gb 1.5: has no room for two shards; give at least 2",
    ),
    "no writer thread": (["--writer_threads", 0], {}, "argument --writer_threads"),
    "shard size nan": (["--shard_size_gb", "nan"], {}, "argument --shard_size_gb"),
    "unknown dtype": (["--dtype", "float8"], {}, "argument --dtype"),
    "unknown type": (["--activation_type", "q"], {}, "argument --activation_type"),
    "layer beyond depth": (["--layers_to_extract", 12], {}, "--layers_to_extract 12: the model"),
    "negative layer": (["--layers_to_extract", -1], {}, "argument --layers_to_extract"),
    "layers backwards": (["--layers_to_extract", "3-1"], {}, "3-1 is not a range of layers"),
    "layers without end": (["--layers_to_extract", "3-"], {}, "invalid layers value: '3-'"),
    "range beyond depth": (
        ["--layers_to_extract", "9-12"],
        {},
        "--layers_to_extract 12: the model",
    ),
    "a flag that is nearly one": (
        ["--batchsize", 4],
        {},
        "unrecognized arguments: --batchsize 4; did you mean --batch_size? (see --help)",
    ),
    "an empty argument": ([""], {}, "unrecognized arguments: '' (see --help)"),
    "a hook that is nearly one": (
        ["--hook_names", "blocks.3.hook_resid_pots"],
        {},
        "with layers 0 to 11; did you mean blocks.3.hook_resid_post?; --list_hooks",
    ),
    "JSON of nothing": (["--json"], {}, "--json: needs --status"),
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
        ["--dataset_path", "{}/x.txt"],
        {"x.txt": "a"},
        "no files that end in .jsonl, .jsonl.gz, .jsonl.zst, .json, .csv, .parquet, .arrow",
    ),
    "mixed kinds": (
        ["--dataset_path", "{}/d"],
        {"d/a.jsonl": "{}", "d/b.parquet": ""},
        "both Parquet and JSON Lines",
    ),
    "a table and lines": (
        ["--dataset_path", "{}/d"],
        {"d/a.jsonl": "{}", "d/b.csv": "", "d/c.json": ""},
        "both CSV and JSON Lines; choose one of them, for example with a glob such as FOLDER/*.csv",
    ),
    "a header with a gap": (["--dataset_path", "{}/a.csv"], {"a.csv": ",text\n0,a\n"}, "column 1"),
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
        "--gcs_bucket s3://b: Install s3fs",
    ),
    "unknown protocol of a bucket": (
        ["--upload_to_gcs", "--gcs_bucket", "nope://b"],
        {},
        "--gcs_bucket nope://b: Protocol not known: nope",
    ),
    "unknown protocol of a model": (
        ["--model_path", "nope://b/m"],
        {},
        "--model_path nope://b/m: Protocol not known: nope",
    ),
    "unknown protocol within another": (
        ["--dataset_path", "simplecache::nope://b/m"],
        {},
        "--dataset_path simplecache::nope://b/m: Protocol not known: nope",
    ),
    "unknown protocol of the output": (
        ["--status", "--output_dir", "nope://b"],
        {},
        "--output_dir nope://b: Protocol not known: nope",
    ),
    "model at a server that is not there": (
        ["--model_path", "ftp://127.0.0.1:1/m"],
        {},
        "--model_path ftp://127.0.0.1:1/m",
    ),
    "data at a server that is not there": (
        ["--dataset_path", "ftp://127.0.0.1:1/m.jsonl"],
        {},
        "--dataset_path ftp://127.0.0.1:1/m.jsonl",
    ),
    "bucket at a server that is not there": (
        ["--upload_to_gcs", "--gcs_bucket", "ftp://127.0.0.1:1"],
        {},
        "--upload_to_gcs: ftp://127.0.0.1:1",
    ),
    "output at a server that is not there": (
        ["--verify", "--output_dir", "ftp://127.0.0.1:1/o"],
        {},
        "ftp://127.0.0.1:1/o",
    ),
    "a report of nothing": (
        ["--report", "--output_dir", "{}/nothing"],
        {},
        "nothing: holds no extraction",
    ),
    "a value that looks like a flag": (
        ["--text_column", "-x"],
        {},
        "a value that begins with - follows a =, such as --text_column=-x",
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


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_wrong_text_column_lists_the_columns_and_skips_nothing(kind, inputs, tmp_path, capsys):
    path = tmp_path / f"rows.{kind}"
    path.write_text(lines({"body": "x", "id": 1}))
    if kind == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"body": ["x"], "id": [1]}), path)
    assert_refused(
        *(capsys, tmp_path, [*inputs, "--dataset_path", path]),
        "--text_column text: no such column; the columns are body, id\n",
    )


def test_layers_are_numbers_ranges_or_all():
    for typed, layers in (
        ("3", (3,)),
        ("1-3", (1, 2, 3)),
        ("7 1-3 2 0-0", (7, 1, 2, 3, 0)),
        ("all", "all"),
        ("1 all", "all"),
    ):
        assert parse_args(["--layers_to_extract", *typed.split()]).layers_to_extract == layers


def test_a_slice_is_no_flag():
    for typed in ("-8:", "-8:-1", "-8::2", ":-1"):
        assert parse_args(["--positions", typed]).positions == parse_positions(typed).__str__()
    with pytest.raises(InputError, match="--layers_to_extract: -1 is less than 0"):
        parse_args(["--layers_to_extract", "-1"])


@pytest.mark.long
def test_a_run_on_local_data_needs_no_home(inputs, tmp_path):
    """Neither the cache of compiled programs nor that of data sets can be written."""
    home = dict.fromkeys(("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"), "")
    home |= {"HOME": "/dev/null/home", "HF_HOME": "/dev/null/home/hub"}
    out = "--output_dir", tmp_path / "out", "--max_samples", 2
    process = start(*inputs, *out, environment=home)
    printed, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert "done: 2 samples" in printed
    assert "/dev/null/home/.cache/activation_extraction/jax: Not a directory" in err
    assert "XDG_CACHE_HOME names another" in err and "HF_DATASETS_CACHE names another" in err


@pytest.mark.long
def test_a_hub_that_does_not_answer_is_not_waited_for(inputs, tmp_path):
    """The libraries would say that they try again, and do so for a minute."""
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HOME": str(tmp_path / "home")}
    rest = "--output_dir", tmp_path / "out"
    without_data = [*inputs[: inputs.index("--dataset_path")]]
    for flags, named in (
        (["--model_path", "org/nothing"], "--model_path org/nothing: no such local folder, and"),
        ([*without_data, "--dataset_name", "org/nothing"], "--dataset_name org/nothing train: "),
    ):
        process = start(*flags, *rest, environment=nowhere)
        out, err = process.communicate(timeout=300)
        assert (process.returncode, out) == (2, ""), err
        assert err.startswith(f"error: {named}") and err.count("\n") == 1, err


def test_only_a_lasting_failure_to_connect_counts(monkeypatch):
    asked = []
    monkeypatch.setattr(retries.time, "sleep", asked.append)
    monkeypatch.delenv("http_proxy", raising=False)
    assert isinstance(hub_unreachable("http://127.0.0.1:1"), ConnectionRefusedError)
    assert isinstance(hub_unreachable("http://no.such.name.invalid"), OSError)
    assert len(asked) == 4  # each is tried again, twice
    monkeypatch.setenv("http_proxy", "http://proxy.invalid:1")
    assert hub_unreachable("http://127.0.0.1:2") is None  # the proxy may reach it


def test_an_unwritable_cache_is_named_with_its_variable():
    error = NotADirectoryError(errno.ENOTDIR, "Not a directory", "/dev/null/home/hub")
    outer = RuntimeError("cannot download")
    outer.__cause__ = error
    assert "/dev/null/home/hub: Not a directory; HF_HOME names" in str(unwritable_cache(outer))
    assert unwritable_cache(FileNotFoundError(errno.ENOENT, "no such file", "x")) is None


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
