"""Bad flags, files and folders: one line that names them, and exit status 2."""

import errno
import os
import shlex
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest
from command_line import SCRIPT, assert_refused, start

from activation_extraction.cli.config import parse_args
from activation_extraction.cli.flags import FLAGS
from activation_extraction.common import home, retries
from activation_extraction.common.errors import InputError
from activation_extraction.common.positions import parse_positions
from activation_extraction.common.retries import hub_unreachable, unwritable_cache
from activation_extraction.model.devices import default_folder

# Flags, in which {} stands for a folder with FILES, and what the message names.
BAD_REQUESTS = """\
--layer 3 | --layer
--max_sample 3 | --max_sample
--batch_size | --batch_size
--batchsize 4 | unrecognized arguments: --batchsize 4; did you mean --batch_size? (see --help)
'' | unrecognized arguments: '' (see --help)
--text_column -x | a value that begins with - follows a =, such as --text_column=-x
--batch_size 0 | argument --batch_size: 0 is less than 1
--batch_size 1000000000000 | is more than
--batch_size all | argument --batch_size: invalid integer or auto value: 'all'
--batch_size 7 --mesh_type 2d | --batch_size, rows of all hosts together: 7 does not divide among 2 devices
--max_seq_length -5 | argument --max_seq_length
--max_seq_length 2k | invalid integer value: '2k'
--max_seq_length 4096 | the model has 2048 positions
--max_samples 0 | argument --max_samples
--shard_size_gb 0 | argument --shard_size_gb
--shard_size_gb nan | argument --shard_size_gb
--waiting_shards_gb 1.5 | --waiting_shards_gb 1.5: has no room for two shards; give at least 2
--writer_threads 0 | argument --writer_threads
--dtype float8 | argument --dtype
--activation_type q | argument --activation_type
--layers_to_extract 12 | --layers_to_extract 12: the model
--layers_to_extract 9-12 | --layers_to_extract 12: the model
--layers_to_extract -1 | argument --layers_to_extract
--layers_to_extract 3-1 | 3-1 is not a range of layers
--layers_to_extract 3- | invalid layers value: '3-'
--layers_to_extract 2,3 | invalid layers value: '2,3'; put spaces between values: 2 3 (see --help)
--layers_to_extract 1 2-3,5 | put spaces between values: 2-3 5 (see --help)
--drop_token_ids 4,5 | invalid token id value: '4,5'; put spaces between values: 4 5 (see --help)
--positions first | argument --positions: 'first' is no choice of positions; expected all, last, first:N
--positions first:0 | expected numbers from 1
--positions every:0 | expected numbers from 1
--positions=::0 | expected numbers from 1
--positions=::-1 | no choice of positions
--positions 5 | no choice of positions
--positions random:0 | the share is not between 0 and 1
--positions random:1 | the share is not between 0 and 1
--positions random:0.5:x | no choice of positions
--positions 99999999999: | to 1000000000
--drop_token_ids 3 2048 | --drop_token_ids 2048: the model has token ids 0 to 2047
--messages_column m --roles user,tool | put spaces between values: user tool (see --help)
--drop_token_ids '<|im_end|>' --ids_column ids | \
 --drop_token_ids <|im_end|>: with --ids_column no tokenizer is read
--drop_token_ids '<|endoftext|>,a' | \
 no token of this name; put spaces between values: <|endoftext|> a
--version=1,2 | argument --version: ignored explicit argument '1,2'
--drop_token_ids '<endoftext>' | \
 --drop_token_ids <endoftext>: the tokenizer has no token of this name; did you mean <|endoftext|>?
--hook_names blocks.3.hook_resid_pots | \
 with layers 0 to 11; did you mean blocks.3.hook_resid_post?; --list_hooks
--hook_names 'blocks.*.hook_mlp_in' | --hook_names blocks.*
--json | --json: needs --status
--aggregate | --aggregate: needs --status
--verify --status | cannot be used together
--repair --verify | cannot be used together
--repair --overwrite | cannot be used together
--repair --status | cannot be used together
--dataset_name a/b | --dataset_path and --dataset_name cannot be used together
--hook_names '*' --layers_to_extract 1 | \
 --hook_names and --layers_to_extract cannot be used together
--demo | --demo and --model_path cannot be used together
--compress_shards --no_compress_shards | \
 --no_compress_shards: not allowed with argument --compress_shards
--compress_shards --shard_format safetensors | \
 --compress_shards: safetensors are never compressed
--machine_id 2 --total_machines 2 | --machine_id 2: out of range for --total_machines 2
--host_id 1 | --host_id: needs --multihost
--multihost --host_id 1 --num_hosts 2 | --coordinator_address: is missing
--multihost --coordinator_address a:1 --host_id 2 --num_hosts 2 | \
 --host_id 2: out of range for --num_hosts 2
--multihost --coordinator_address a --host_id 0 --num_hosts 2 | \
 --coordinator_address a: expected HOST:PORT
--mesh_shape 4,4 | there are 8; these would fit: 2,4
--mesh_type 3d --mesh_shape 2,4 | has 2 axes
--mesh_shape 2,x | argument --mesh_shape
--mesh_axes data,rows | argument --mesh_axes
--mesh_axes fsdp,data | needs --mesh_shape
--model_path ' ' | argument --model_path: is empty
--model_path ./no/such/model | no such folder
--model_path {}/file | is a file, expected a folder
--model_path nope://b/m | --model_path nope://b/m: Protocol not known: nope
--model_path ftp://127.0.0.1:1/m | --model_path ftp://127.0.0.1:1/m
--dataset_path '' | argument --dataset_path: is empty
--dataset_path {}/none | none: no such file or folder
--dataset_path {}/notes | has no files that end in .jsonl
--dataset_path {}/x.txt | \
 x.txt: does not end in .jsonl, .ndjson, .json, .csv, .parquet, .arrow (JSON and CSV also packed: .gz, .bz2, .xz, .zst)
--dataset_path {}/several | both CSV and JSON; choose one of them,\
 for example with a glob such as FOLDER/*.csv
--dataset_path {}/gap.csv | column 1
--dataset_path {}/both | both Parquet and JSON
--dataset_path nope://x | --dataset_path nope://x
--dataset_path simplecache::nope://b/m | \
 --dataset_path simplecache::nope://b/m: Protocol not known: nope
--dataset_path ftp://127.0.0.1:1/m.jsonl | --dataset_path ftp://127.0.0.1:1/m.jsonl
--dataset_path {}/empty.jsonl | is empty
--dataset_path {}/no.parquet | no.parquet
--dataset_path {}/empty.parquet | empty.parquet
--dataset_path {}/no.jsonl.gz | no.jsonl.gz: Compressed
--dataset_path {}/no.jsonl | no.jsonl line 1: not JSON
--dataset_path {}/no_text.jsonl | no row has text
--dataset_path {}/body.jsonl | --text_column text: no such column; the columns are body (text), id
--dataset_path {}/body.parquet | --text_column text: no such column; the columns are body (text), id
--dataset_path {}/body.jsonl --text_column id | --text_column id: expected text, found int
--output_dir {}/file | is a file, expected a folder
--output_dir {}/file/out | cannot be written to
--output_dir /proc/activations | cannot be written to
--output_dir gs://b/c | use --upload_to_gcs
--output_dir {}/taken | taken/metadata.json: is damaged, or was not written by this program
--output_dir {}/shards | already holds shards, but no metadata.json
--status --output_dir nope://b | --output_dir nope://b: Protocol not known: nope
--verify --output_dir ftp://127.0.0.1:1/o | ftp://127.0.0.1:1/o
--report --output_dir {}/nothing | nothing: holds no extraction
--gcs_bucket b | --gcs_bucket: needs --upload_to_gcs
--upload_to_gcs | --upload_to_gcs: needs --gcs_bucket
--upload_to_gcs --gcs_bucket memory://b | --gcs_bucket memory://b: is not the URL of a bucket
--upload_to_gcs --gcs_bucket s3:// | --gcs_bucket s3://: is not the URL of a bucket; expected a name
--upload_to_gcs --gcs_bucket b/c | --gcs_bucket b/c: is a path
--upload_to_gcs --gcs_bucket b --gcs_prefix 'run*' | \
 --gcs_prefix 'run*': contains a space, a wildcard
--upload_to_gcs --gcs_bucket b --gcs_prefix a//b | --gcs_prefix a//b: has a folder without a name
--upload_to_gcs --gcs_bucket b --gcs_prefix /a/./b | --gcs_prefix /a/./b: has a folder without
--upload_to_gcs --gcs_bucket b --gcs_prefix ../b/ | --gcs_prefix ../b/: has a folder without
--upload_to_gcs --gcs_bucket gs://b//c | --gcs_bucket gs://b//c: has a folder without a name
--upload_to_gcs --gcs_bucket b --gcs_prefix 'a;b' | --gcs_prefix 'a;b': contains a space, a
--upload_to_gcs --gcs_bucket b --gcs_prefix 'a\\b' | --gcs_prefix 'a\\\\b': contains a space, a
--upload_to_gcs --gcs_bucket b --gcs_prefix a::b | --gcs_prefix 'a::b': contains a space, a
--upload_to_gcs --gcs_bucket b --gcs_prefix 'a\x07b' | --gcs_prefix 'a\\x07b': contains a space, a
--output_dir ~nobody.known/out | --output_dir ~nobody.known/out: no home folder is known
--compilation_cache ~nobody.known | --compilation_cache ~nobody.known: no home folder is known
--report ~nobody.known/x --output_dir {}/o | --report ~nobody.known/x: no home folder is known
--export memmap --export_dir ~nobody.known/x --output_dir {}/o | \
 --export_dir ~nobody.known/x: no home folder is known
--upload_to_gcs --gcs_bucket ftp://127.0.0.1:1 | --gcs_bucket ftp://127.0.0.1:1: is not the URL
"""  # noqa: E501
FILES = {
    "file": "",
    "x.txt": "a",
    "several/a.jsonl": "{}",
    "several/b.csv": "",
    "several/c.json": "",
    "gap.csv": ",text\n0,a\n",
    "notes/x": "a",
    "both/a.jsonl": "{}",
    "both/b.parquet": "",
    "empty.jsonl": "",
    "empty.parquet": "",
    "no.jsonl": "x",
    "no.jsonl.gz": "x",
    "no.parquet": "x",
    "no_text.jsonl": '{"text": ""}\n{"text": null}\n',
    "body.jsonl": '{"body": "x", "id": 1}\n',
    "taken/metadata.json": "{}",
    "shards/shard_0001.pkl.gz": "x",
}
every_bad_request = [tuple(line.split(" | ")) for line in BAD_REQUESTS.splitlines()]
AS_PROCESSES = ("--layer 3", "--dataset_path {}/empty.parquet", "--dataset_path {}/no_text.jsonl")


@pytest.fixture
def bad_files(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    table = pyarrow.table({"body": ["x"], "id": [1]})
    pyarrow.parquet.write_table(table, tmp_path / "body.parquet")
    return tmp_path


def flags_in(folder, typed):
    return [flag.replace("{}", str(folder)) for flag in shlex.split(typed)]


@pytest.mark.parametrize("typed,named", every_bad_request)
def test_bad_requests_exit_2_with_one_line(typed, named, inputs, bad_files, capsys):
    assert_refused(capsys, bad_files, [*inputs, *flags_in(bad_files, typed)], named.strip())


def test_a_name_that_is_too_long_is_refused(inputs, tmp_path, capsys):
    out = tmp_path / (300 * "x")
    assert_refused(capsys, tmp_path, [*inputs, "--output_dir", out], "cannot be written to")


@pytest.mark.long
@pytest.mark.parametrize("typed", AS_PROCESSES)
def test_bad_requests_as_processes(typed, inputs, bad_files):
    """What libraries print and how the interpreter ends count, too."""
    process = start(*inputs, *flags_in(bad_files, typed))
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1, err
    assert dict(every_bad_request)[typed] in err


@pytest.mark.parametrize("name", FLAGS)
def test_bytes_that_are_not_utf8_are_refused_in_every_flag(name, tmp_path, capsys):
    """Python has such bytes as lone surrogates in its arguments."""
    told = f"argument --{name}: is not UTF-8: '"
    assert_refused(capsys, tmp_path, [f"--{name}", "a\udcff"], told)
    assert_refused(capsys, tmp_path, ["--verbose", f"--{name}=\udcff"], told)


def test_where_python_does_not_read_utf8_the_remedy_is_named():
    command = [sys.executable, SCRIPT, "--output_dir", "größe"]
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 2
    told = "argument --output_dir: is not UTF-8: 'gr\\udcc3\\udcb6\\udcc3\\udc9fe'; Python takes it"
    assert f"{told} for ascii: set PYTHONUTF8=1" in done.stderr


def test_a_variable_that_is_not_utf8_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "\udcff")
    told = "environment variable JAX_COMPILATION_CACHE_DIR: argument --compilation_cache: is not"
    assert_refused(capsys, tmp_path, ["--demo"], told)


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
        assert parse_args(["--positions", typed]).positions == parse_positions(typed)
    with pytest.raises(InputError, match="--layers_to_extract: -1 is less than 0"):
        parse_args(["--layers_to_extract", "-1"])


@pytest.mark.long
def test_a_run_on_local_data_needs_no_home(inputs, tmp_path):
    """Neither the cache of compiled programs nor that of data sets can be written."""
    home = dict.fromkeys(("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR"), "")
    home |= {"HOME": "/dev/null/home", "HF_HOME": "/dev/null/home/hub"}
    out = "--output_dir", tmp_path / "out", "--max_samples", 2
    process = start(*inputs, *out, environment=home)
    printed, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "done: 2 samples" in printed
    assert "/dev/null/home/.cache/activation_extraction/jax: Not a directory" in err
    assert "XDG_CACHE_HOME names another" in err and "HF_DATASETS_CACHE names another" in err


NO_HOME = """
import os, pwd, sys
def unknown(number):
    raise KeyError(number)
pwd.getpwuid = unknown
sys.path.insert(0, os.path.dirname(sys.argv[0]))
import extract_activations
from datasets import config
from huggingface_hub.constants import HF_HUB_CACHE
print("caches:", config.HF_DATASETS_CACHE, HF_HUB_CACHE)
extract_activations.script()
"""


@pytest.mark.long
def test_a_user_without_a_home_has_caches_elsewhere(inputs, tmp_path):
    """A container may run with a user id that its system does not know, and without HOME."""
    names = "HOME", "XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR", "HF_HOME"
    environment = {name: value for name, value in os.environ.items() if name not in names}
    flags = [str(flag) for flag in (*inputs, "--max_samples", 2, "--output_dir", tmp_path / "out")]
    (tmp_path / "here").mkdir()
    (tmp_path / "tmp").mkdir()
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", f"import sys; sys.argv[0] = {str(SCRIPT)!r}{NO_HOME}", *flags],
            env=environment | {"TMPDIR": str(tmp_path / "tmp"), "JAX_PLATFORMS": "cpu"},
            cwd=tmp_path / "here",
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        assert not list((tmp_path / "here").iterdir())
        (folder,) = (tmp_path / "tmp").iterdir()
        caches = done.stdout.splitlines()[0].split()[1:]
        assert len(caches) == 2 and all(cache.startswith(f"{folder}/") for cache in caches)
        assert list((folder / "activation_extraction/jax").iterdir())
        assert folder.stat().st_mode & 0o077 == 0


def test_the_variables_that_name_caches_may_have_a_tilde(tmp_path, monkeypatch):
    """No shell has expanded those of a Dockerfile."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "~/caches")
    assert default_folder().is_relative_to(tmp_path / "caches")
    home.set_cache_home()
    assert os.environ["XDG_CACHE_HOME"] == "~/caches"


@pytest.mark.parametrize("spoil", ["link", "open to others"])
def test_a_cache_folder_that_others_can_write_is_not_used(spoil, tmp_path, monkeypatch):
    monkeypatch.setattr(home.tempfile, "tempdir", str(tmp_path))
    theirs = tmp_path / f"cache-of-user-{os.getuid()}"
    assert home._temporary_caches() == theirs == home._temporary_caches()
    if spoil == "link":
        theirs.rename(tmp_path / "theirs")
        theirs.symlink_to(tmp_path / "theirs")
    else:
        theirs.chmod(0o770)
    assert home._temporary_caches() not in (theirs, tmp_path / "theirs")


def test_without_a_home_and_temporary_files_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(home.tempfile, "tempdir", str(tmp_path / "none"))
    monkeypatch.setattr(home.os.path, "expanduser", lambda path: path)
    monkeypatch.setenv("XDG_CACHE_HOME", "~/.cache")
    home.set_cache_home()
    assert os.environ["XDG_CACHE_HOME"] == os.devnull


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
