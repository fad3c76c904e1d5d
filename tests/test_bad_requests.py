"""Flags, files and folders: what is bad has one line that names it, and exit status 2.

What is good becomes the values of the configuration.
"""

import shlex

import pytest
from command_line import assert_refused, start

from activation_extraction.cli.config import parse_args
from activation_extraction.common.positions import parse_positions

# Flags, in which {} stands for a folder with FILES, and what the message names. They follow those
# of a model and data, unless the line begins with "bare". {many} is in `flags_in`.
BAD_REQUESTS = """\
--batch_size | --batch_size
--batchsize 4 | unrecognized arguments: --batchsize 4; did you mean --batch_size? (see --help)
--text_column -x | a value that begins with - follows a =, such as --text_column=-x
--batch_size 0 | argument --batch_size: 0 is not a whole number from 1 to 1000000000
--batch_size all | argument --batch_size: invalid integer or auto value: 'all'
--batch_size 7 --mesh_type 2d | of all hosts together: 7 does not divide among 2 devices
--max_seq_length 4096 | the model has 2048 positions
--waiting_shards_gb 1.5 | --waiting_shards_gb 1.5: has no room for two shards; give at least 2
--dtype float8 | argument --dtype
--activation_dtype float8 | --activation_dtype float8: needs --shard_format safetensors
--activation_dtype float8 --shard_format pickle | float8: needs --shard_format safetensors
--layers_to_extract 12 | --layers_to_extract 12: the model
--layers_to_extract 3-1 | 3-1 is not a range of layers
--layers_to_extract -1 | argument --layers_to_extract: -1: layers are counted from 0, never from
--layers_to_extract=-3--1 | argument --layers_to_extract: -3--1: layers are counted from 0,
--positions first | argument --positions: 'first' is no choice of positions; expected all, last
--positions random:0 | keeps no token
--positions random:0.0 | the share is not between 0 and 1
--positions random:3:1:96 --max_seq_length 96 | keeps no token of any sample
--positions last_of_turn | --positions last_of_turn: needs --messages_column
--drop_token_ids 3 2048 | --drop_token_ids 2048: the model has token ids 0 to 2047
--drop_token_ids '<|im_end|>' --ids_column ids | with --ids_column no tokenizer is read
--drop_token_ids '<endoftext>' | no token of this name; did you mean <|endoftext|>?
--list_hooks --hook_names blocks.3.hook_resid_pots | did you mean blocks.3.hook_resid_post?
--hook_names blocks.3.hook_resid_pots | did you mean blocks.3.hook_resid_post?; --list_hooks
--hook_names blocks.1.attn.hook_pattern --max_seq_length 2048 --activation_dtype float32 | \
 --hook_names blocks.1.attn.hook_pattern: takes 32,768 bytes per token and 67,108,864 per row \
with --max_seq_length 2048; at most 33,554,432 per row are stored; choose a smaller --max_seq_length
--top_logits 3 | --top_logits: needs --hook_names
--json | --json: needs --status
--dataset_name a/b | --dataset_path and --dataset_name cannot be used together
--mesh_shape 2,4 --no_data_parallel | --mesh_shape and --no_data_parallel cannot be used together
--compress_shards --shard_format safetensors | --compress_shards: safetensors are never compressed
--machine_id 2 --total_machines 2 | --machine_id 2: out of range for --total_machines 2
--host_id 1 | --host_id: needs --multihost
--multihost --coordinator_address a:1 --host_id 2 --num_hosts 2 | --host_id 2: out of range for
--multihost --coordinator_address a --host_id 0 --num_hosts 2 | a: expected HOST:PORT
--mesh_shape 4,4 | there are 8; these would fit: 2,4
--mesh_type 3d --mesh_shape 2,4 | has 2 axes
--mesh_axes fsdp,data | needs --mesh_shape
--model_path ' ' | argument --model_path: is empty
--model_path ./no/such/model | no such folder
--model_path {}/file | is a file, expected a folder
--model_path nope://b/m | nope://b/m: Protocol not known: nope
--model_revision v1 | is a folder; only models of the hub have revisions
--dataset_path {}/x.txt | x.txt: does not end in .jsonl, .ndjson, .json, .csv, .parquet, .arrow
--dataset_path {}/x.tsv.gz | ; .tsv is not read: save the columns with commas between them, as .csv
--dataset_path {}/x.txt | ; .txt is not read: write a line {"text": ...} for
--dataset_path {}/empty.jsonl | is empty
--dataset_path {}/no.parquet | no.parquet
--dataset_path {}/no_text.jsonl | no row has text
--dataset_path {}/body.jsonl | --text_column text: no such column; the columns are body (text), id
--dataset_path {}/body.jsonl --text_column id | --text_column id: expected text, found int 1
--output_dir {}/file | is a file, expected a folder
--output_dir gs://b/c | use --upload_to_gcs
--output_dir {}/taken | taken/metadata.json: is damaged, or was not written by this program
--output_dir {}/shards | already holds shards, but no metadata.json
--gcs_bucket b | --gcs_bucket: needs --upload_to_gcs
--upload_to_gcs | --upload_to_gcs: needs --gcs_bucket
--upload_to_gcs --gcs_bucket b/c | argument --gcs_bucket: b/c: is a path
--upload_to_gcs --gcs_bucket b --gcs_prefix ../b/ | argument --gcs_prefix: ../b/: has a folder
--upload_to_gcs --gcs_bucket b --gcs_prefix 'a\x07*' | argument --gcs_prefix: 'a\\x07*': contains a
--overlap 4 | --overlap: needs --long_documents split
--long_documents split --overlap 64 | --overlap 64: expected less than --max_seq_length 64
--keep_columns a row | --keep_columns row: the table of samples has a column of this name
--keep_columns {many} | names 65 columns, expected at most 64
bare --mix a.jsonl=1 a.jsonl=2 | --mix: names a.jsonl twice
bare --mix a.jsonl=0 | 'a.jsonl=0' is not SOURCE=WEIGHT
bare --model_path {model} --mix {}/none.jsonl=1 | --mix {}/none.jsonl: no such file or folder
bare --verify --verify_samples 3 | --verify_samples: needs --model_path
"""
FILES = {
    "file": "",
    "x.txt": "a",
    "x.tsv.gz": "a",
    "empty.jsonl": "",
    "no.parquet": "x",
    "no_text.jsonl": '{"text": ""}\n{"text": null}\n',
    "body.jsonl": '{"body": "x", "id": 1}\n',
    "taken/metadata.json": "{}",
    "shards/shard_0001.pkl.gz": "x",
}
every_bad_request = [tuple(line.split(" | ")) for line in BAD_REQUESTS.splitlines()]


@pytest.fixture
def bad_files(tmp_path):
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


def flags_in(folder, typed, inputs):
    words = {"{}": folder, "{model}": inputs[1], "{many}": " ".join(map(str, range(65)))}
    for word, meant in words.items():
        typed = typed.replace(word, str(meant))
    flags = shlex.split(typed)
    return flags[1:] if flags[0] == "bare" else [*inputs, *flags]


@pytest.mark.parametrize("typed,named", every_bad_request)
def test_bad_requests_exit_2_with_one_line(typed, named, inputs, bad_files, capsys):
    named = named.strip().replace("{}", str(bad_files))
    assert_refused(capsys, bad_files, flags_in(bad_files, typed, inputs), named)


@pytest.mark.long
def test_a_bad_request_as_a_process(inputs, bad_files):
    """What libraries print and how the interpreter ends count, too."""
    process = start(*inputs, "--dataset_path", bad_files / "no.parquet")
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out) == (2, "")
    assert err.startswith("error: ") and err.count("\n") == 1 and "no.parquet" in err, err


SHAPE, NAMES = "TPU_MESH_CONFIG=2,4", "TPU_AXIS_NAMES=data,fsdp"
PARSED = [  # variables of the environment and flags, a field, its value
    ("--layers_to_extract 7 1-3 2 0-0", "layers_to_extract", (7, 1, 2, 3, 0)),
    ("--positions -8::2", "positions", parse_positions("-8::2")),
    ("--drop_token_ids 9 x 3 9", "drop_token_ids", (3, 9, "x")),
    ("--shard_format safetensors", "compress_shards", False),
    ("--demo", "max_seq_length", 256),
    ("--mix a=b.jsonl=2.5", "mix", (("a=b.jsonl", 2.5),)),
    ("--verify --model_path m", "verify_samples", 8),
    ("--dataset_name a/b", "dataset_config", None),
    ("--dataset_path a", "dataset_name", None),
    ("--upload_to_gcs --gcs_bucket s3://b/ --gcs_prefix /a/b/", "bucket_url", "s3://b/a/b"),
    ("HOME=/a/home --output_dir ~/a", "output_dir", "/a/home/a"),
    (SHAPE, "mesh_shape", (2, 4)),
    (f"{SHAPE} --mesh_type 2d", "mesh_shape", None),
    (NAMES, "mesh_axes", None),
    (f"{NAMES} --mesh_shape 2,4", "mesh_axes", ("data", "fsdp")),
    ("NUM_HOSTS=3", "num_hosts", None),
    ("NUM_HOSTS=3 --multihost --host_id 0 --coordinator_address a:1", "num_hosts", 3),
    ("JAX_COMPILATION_CACHE_DIR=b --compilation_cache a", "compilation_cache", "a"),
]


@pytest.mark.parametrize("typed,field,value", PARSED)
def test_what_is_typed_or_in_a_variable_has_its_value(typed, field, value, monkeypatch):
    words = typed.split()
    variables = [word for word in words if word.partition("=")[0].isupper()]
    for variable in variables:
        monkeypatch.setenv(*variable.split("="))
    config = parse_args(words[len(variables) :])
    assert {**config.values, "bucket_url": config.output_options.bucket_url}[field] == value
