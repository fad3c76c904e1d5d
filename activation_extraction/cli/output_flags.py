"""The flags that say where the output goes, and those that look at it afterwards."""

import argparse

from activation_extraction import __version__
from activation_extraction.cli.declare import (
    add,
    add_pair,
    add_switch,
    free_gigabytes,
    gigabytes,
    integer,
    text,
)
from activation_extraction.cli.defaults import DEFAULTS

SHARD_FORMATS = ("pickle", "safetensors")
EXPORT_FORMATS = (*SHARD_FORMATS, "memmap", "llamascopium")


def add_output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    add(
        group,
        "output_dir",
        "the folder for the shards; the same command continues a run that was interrupted there",
        type=text,
        metavar="FOLDER",
    )
    add(
        group,
        "min_free_gb",
        "refuse to start if the disk of --output_dir has less than this free, in units of 10^9 "
        "bytes",
        unit=" GB",
        type=free_gigabytes,
        metavar="GB",
    )
    add(
        group,
        "activation_dtype",
        "the type of the stored activations (default: "
        f"{DEFAULTS['activation_dtype']} = as --dtype)",
        choices=("auto", "float32", "float16", "bfloat16"),
    )
    add(
        group,
        "shard_size_gb",
        "activations per shard before compression, in units of 10^9 bytes",
        unit=" GB",
        type=gigabytes,
        metavar="GB",
    )
    add(
        group,
        "shard_format",
        "pickle: a dict that Python reads without this program; safetensors: one contiguous tensor "
        "per hook, so that one hook is read without the others, from a disk or a bucket",
        choices=SHARD_FORMATS,
    )
    add_pair(
        group,
        "compress_shards",
        "no_compress_shards",
        "gzip the pickles; safetensors are never compressed",
        "write plain .pkl files",
        default=None,
    )
    add(
        group,
        "writer_threads",
        "the threads that compress shards and add up their statistics (default: as many as there "
        "are cores)",
        type=integer(1),
        metavar="N",
    )
    add(
        group,
        "waiting_shards_gb",
        "the most memory for activations that wait to be stored, in units of 10^9 bytes; beyond "
        "it, computing waits; room for two shards is the least (default: a quarter of the memory "
        "at hand, at most 16, or two shards)",
        type=gigabytes,
        metavar="GB",
    )
    add_switch(
        group,
        "overwrite",
        "at every start, delete the extraction that --output_dir and the bucket hold (default: "
        "continue it)",
    )
    add_switch(
        group,
        "repair",
        "with the flags of a run: recompute the shards that --verify finds damaged or missing, and "
        "no others; then verify again and exit with that status",
    )


def add_bucket_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "upload",
        "credentials come from the environment: gcloud auth application-default login, "
        "GOOGLE_APPLICATION_CREDENTIALS, or the machine's service account",
    )
    add_switch(
        group,
        "upload_to_gcs",
        "store the shards in a bucket, from memory; a shard counts as stored only once the bucket "
        "has confirmed it",
    )
    add(
        group,
        "gcs_bucket",
        "the bucket, or a URL that fsspec knows, such as s3://bucket (with s3fs installed)",
        type=text,
        metavar="NAME",
    )
    add(
        group,
        "gcs_prefix",
        "a folder in the bucket; it gets one folder for each machine and host",
        type=text,
        metavar="PATH",
    )
    add_pair(
        group,
        "delete_local_after_upload",
        "keep_local",
        "write no local shards, only metadata.json and metrics.jsonl",
        "write local shards as well, beside those in the bucket",
    )
    add(
        group,
        "upload_timeout",
        "how long a failing upload is retried without progress before the run stops",
        unit=" s",
        type=integer(1),
        metavar="SECONDS",
    )


def add_checking_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "looking at an extraction",
        "these flags do not extract; they look at the bucket with --upload_to_gcs, else at "
        "--output_dir, which may be a URL here",
    )
    add_switch(
        group,
        "status",
        "show what all machines and hosts have stored, how fast they are and when they will be "
        "done; also works during a run",
    )
    add_switch(
        group,
        "aggregate",
        "with --status: also write it there as aggregated_metadata.json",
    )
    add_switch(
        group,
        "json",
        "with --status: print all of it as one JSON object instead of a table",
    )
    add_switch(
        group,
        "verify",
        "compare every shard with its checksum and its JSON file, and check that every sample is "
        "there once; with --model_path, also recompute some samples; lists every problem and exits "
        "with status 1 if there is any",
    )
    add(
        group,
        "verify_samples",
        "how many random samples --verify recomputes",
        type=integer(1),
        metavar="N",
    )
    group.add_argument(
        "--report",
        nargs="?",
        const="",
        metavar="FILE",
        help="write an HTML page about the activations: norms, leading directions, the largest "
        "tokens, throughput; also works during a run (default: report.html in --output_dir, or in "
        "the working directory for a bucket)",
    )
    group.add_argument(
        "--export",
        choices=EXPORT_FORMATS,
        help="copy a finished run to --export_dir: pickle and safetensors make a run of such "
        "shards; memmap makes the files of jkminder's dictionary_learning (crosscoders), "
        "llamascopium those of Llamascopium; the same command continues an export that was "
        "stopped; --hook_names chooses hooks (default: all)",
    )
    add(group, "export_dir", "the folder that --export writes to", type=text, metavar="FOLDER")


def add_general_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("general")
    version = f"activation-extraction {__version__}"
    group.add_argument("--version", action="version", version=version, help="print the version")
    add_switch(
        group,
        "demo",
        "make a tiny model and sample documents in --output_dir/demo_inputs and extract from them",
    )
    add(
        group,
        "log_every",
        "the time between two lines of metrics.jsonl and, without a terminal, of progress",
        unit=" s",
        type=integer(1),
        metavar="SECONDS",
    )
    add_switch(
        group,
        "verbose",
        "log every step and shard, on all hosts (default: hosts other than 0 log problems only)",
    )
