"""The flags: names, help texts, defaults, units. What they mean together is config.py's part."""

import argparse
import re
from typing import Any, NoReturn

from activation_extraction.cli.errors import InputError

DEFAULT_MODEL = "Qwen/Qwen2.5-0.5B"
DEFAULT_DATASET = ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train")
DEFAULT_PREFIX = "activations"
LARGEST = 10**9  # of any number; more is a slip of the finger
ACTIVATION_TYPES = ("residual", "mlp", "attn")
EXPORT_FORMATS = ("memmap", "llamascopium")
MESH_AXES = ("pipeline", "data", "fsdp", "model")

EXAMPLES = """\
examples:
  extract_activations.py --demo
      a tiny model and sample documents, made on the spot; needs no network
  extract_activations.py --model_path Qwen/Qwen2.5-0.5B --layers_to_extract 12 --max_samples 1000
      1000 documents of FineWeb-Edu through a model of the hub
  extract_activations.py --model_path ./my-qwen --dataset_path texts.jsonl.gz --output_dir out
      your own model and texts
  extract_activations.py --model_path ./my-qwen --upload_to_gcs --gcs_bucket B --gcs_prefix run1
      shards go to gs://B/run1/machine_000; killed? the same command continues
  extract_activations.py --status --output_dir gs://B/run1
      how far it is

read a shard:
  import gzip, pickle
  records = pickle.loads(gzip.open("out/shard_0001.pkl.gz").read())  # {layer: [record, ...]}

exit status: 0 done, 1 failed on the way, 2 bad input, 130 interrupted (what is complete is stored)
"""


class _Parser(argparse.ArgumentParser):
    """Bad flags are InputErrors like every other bad input, one line and no usage text."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see --help)")


def _text(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty (an unset variable?)")
    return text


def _integer(least: int) -> Any:
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        if value > LARGEST:
            raise argparse.ArgumentTypeError(f"{value} is more than {LARGEST}")
        return value

    parse.__name__ = "integer"
    return parse


def _integers(text: str) -> tuple[int, ...]:
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of positive numbers such as 4,4")
    return tuple(map(int, text.split(",")))


def _axes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if len(set(names)) < len(names) or not set(names) <= set(MESH_AXES):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a list of different names of {', '.join(MESH_AXES)}"
        )
    return names


def _gigabytes(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive size in GB")
    return value


_gigabytes.__name__ = "size in GB"


def build_parser() -> argparse.ArgumentParser:
    """Every flag with its help text."""
    parser = _Parser(
        prog="extract_activations.py",
        description="Turns a Qwen2 checkpoint and a stream of text into shards of activations.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_model_flags(parser)
    _add_data_flags(parser)
    _add_computing_flags(parser)
    _add_output_flags(parser)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model_path",
        type=_text,
        metavar="PATH",
        help="a local folder (config.json, safetensors, tokenizer) or a hub name "
        f"(default: {DEFAULT_MODEL})",
    )
    group.add_argument(
        "--model_revision",
        type=_text,
        metavar="NAME",
        help="a branch, tag or commit of a hub model (default: the commit with which the "
        "extraction began; for a new one the newest)",
    )
    group.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="of weights and matrix products; sums are float32 "
        "(default: auto = bfloat16 on TPU and GPU, float32 on CPU)",
    )
    group = parser.add_argument_group("what to extract")
    group.add_argument(
        "--layers_to_extract",
        type=_integer(0),
        nargs="+",
        metavar="N",
        help="layers, counted from 0 (default: 10 to 23, clipped to the model's depth)",
    )
    group.add_argument(
        "--activation_type",
        choices=ACTIVATION_TYPES,
        help="residual: the stream after the block; attn, mlp: what is added to it "
        "(default: residual)",
    )
    group.add_argument(
        "--hook_names",
        nargs="+",
        metavar="GLOB",
        help="instead of the two above: TransformerLens names, globs allowed, such as "
        "'blocks.*.hook_mlp_out'",
    )


def _add_data_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("text")
    name, config, split = DEFAULT_DATASET
    group.add_argument(
        "--dataset_name",
        type=_text,
        metavar="NAME",
        help=f"a data set of the hub, streamed (default: {name})",
    )
    group.add_argument(
        "--dataset_config",
        type=_text,
        metavar="NAME",
        help=f"(default: {config} of the default data set)",
    )
    group.add_argument("--dataset_split", type=_text, metavar="NAME", help=f"(default: {split})")
    group.add_argument(
        "--dataset_path",
        type=_text,
        metavar="PATH",
        help="instead of a hub data set: .jsonl, .jsonl.gz or .parquet; a file, a folder or a "
        "glob, local or a URL such as gs://bucket/folder",
    )
    group.add_argument(
        "--text_column",
        type=_text,
        default="text",
        metavar="NAME",
        help="column that holds the text (default: text); rows without it that have ARC-AGI's "
        "train and test grids become a prompt",
    )
    group.add_argument(
        "--skip_bad_rows",
        action="store_true",
        help="skip and count rows that cannot be used: not JSON, no such column, not text in it; "
        "may be added to continue a run (default: such a row ends the run)",
    )
    group.add_argument(
        "--max_samples",
        type=_integer(1),
        metavar="N",
        help="stop after N samples on this machine, shared equally by its hosts (default: all)",
    )
    group.add_argument(
        "--machine_id",
        type=_integer(0),
        default=0,
        metavar="I",
        help="this machine, from 0; each has its own part of the data (default: 0)",
    )
    group.add_argument(
        "--total_machines",
        type=_integer(1),
        default=1,
        metavar="N",
        help="independent machines that share the data (default: 1)",
    )


def _add_computing_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("computing")
    group.add_argument(
        "--batch_size",
        type=_integer(1),
        metavar="ROWS",
        help="rows per host per step; several samples share a row (default: 8)",
    )
    group.add_argument(
        "--max_seq_length",
        type=_integer(1),
        metavar="TOKENS",
        help="tokens per row; longer documents are cut (default: 2048)",
    )
    group.add_argument(
        "--mesh_type",
        choices=("1d", "2d", "3d", "auto"),
        help="1d: all devices on model; 2d: data x model, one host per data; 3d: pipeline x data x "
        "model; auto: the smallest model axis that fits in memory (default: 2d)",
    )
    group.add_argument(
        "--mesh_shape",
        type=_integers,
        metavar="A,B[,C]",
        help="size of every axis (default: from TPU_MESH_CONFIG, else by --mesh_type)",
    )
    group.add_argument(
        "--mesh_axes",
        type=_axes,
        metavar="NAME,...",
        help=f"names of the axes, of {', '.join(MESH_AXES)}: pipeline splits the layers, data and "
        "fsdp the rows, fsdp and model the weights (default: from TPU_AXIS_NAMES, else data,model "
        "or pipeline,data,model)",
    )
    _add_pair(
        group,
        "use_data_parallel",
        "no_data_parallel",
        "use all devices (default)",
        "use one device of every host",
    )
    group.add_argument(
        "--compilation_cache",
        type=_text,
        metavar="FOLDER",
        help="where JAX keeps compiled programs for the next start, or off; with --multihost a "
        "folder or URL that all hosts share (default: JAX_COMPILATION_CACHE_DIR, else "
        "activation_extraction/jax in XDG_CACHE_HOME or ~/.cache; off with --multihost)",
    )
    _add_host_flags(parser)


def _add_host_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several hosts as one", "start the same command on every host of a pod"
    )
    group.add_argument(
        "--multihost",
        action="store_true",
        help="join the other hosts; on Cloud TPU, GKE and Slurm this alone is enough",
    )
    group.add_argument(
        "--coordinator_address",
        type=_text,
        metavar="HOST:PORT",
        help="of host 0 (default: JAX_COORDINATOR_ADDRESS or COORDINATOR_ADDRESS)",
    )
    group.add_argument(
        "--host_id",
        type=_integer(0),
        metavar="I",
        help="this host, from 0 (default: JAX_PROCESS_INDEX or HOST_ID)",
    )
    group.add_argument(
        "--num_hosts",
        type=_integer(1),
        metavar="N",
        help="(default: JAX_PROCESS_COUNT or NUM_HOSTS)",
    )
    for name, seconds, text in (
        ("connect_timeout", 300, "wait this long for the other hosts at the start"),
        ("heartbeat_timeout", 100, "take a silent host for dead after this long"),
        ("stall_timeout", 600, "end the process when no step finishes for this long"),
    ):
        group.add_argument(
            f"--{name}",
            type=_integer(1),
            default=seconds,
            metavar="SECONDS",
            help=f"{text} (default: {seconds} s)",
        )


def _add_pair(group: Any, yes: str, no: str, yes_help: str, no_help: str) -> None:
    """A boolean flag as a pair of names, true by default."""
    pair = group.add_mutually_exclusive_group()
    pair.add_argument(f"--{yes}", action="store_true", default=True, help=yes_help)
    pair.add_argument(f"--{no}", dest=yes, action="store_false", help=no_help)


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--output_dir",
        type=_text,
        default="activations",
        metavar="FOLDER",
        help="where the shards go; an interrupted run is continued there by the same command "
        "(default: activations)",
    )
    group.add_argument(
        "--activation_dtype",
        choices=("auto", "float32", "float16", "bfloat16"),
        default="auto",
        help="of the stored activations (default: auto = that of the computing)",
    )
    group.add_argument(
        "--shard_size_gb",
        type=_gigabytes,
        default=1.0,
        metavar="GB",
        help="activations per shard before compression, in 10^9 bytes (default: 1)",
    )
    _add_pair(
        group,
        "compress_shards",
        "no_compress_shards",
        "gzip the shards (default)",
        "write plain .pkl",
    )
    group.add_argument(
        "--overwrite",
        action="store_true",
        help="delete the extraction that --output_dir and the bucket already hold, every time "
        "(default: continue it)",
    )
    group.add_argument(
        "--repair",
        action="store_true",
        help="with the flags of a run: recompute the shards that --verify finds damaged or "
        "missing, and no others; ends with what --verify says then, and its exit status",
    )
    _add_bucket_flags(parser)
    _add_checking_flags(parser)
    group = parser.add_argument_group("general")
    group.add_argument(
        "--demo",
        action="store_true",
        help="make a tiny model and sample documents in --output_dir/demo_inputs and extract from "
        "them, 256 tokens per row",
    )
    group.add_argument(
        "--log_every",
        type=_integer(1),
        default=30,
        metavar="SECONDS",
        help="between lines of metrics.jsonl and, where the output is no terminal, of progress "
        "(default: 30 s)",
    )
    group.add_argument(
        "--verbose",
        action="store_true",
        help="log every step and shard, on all hosts (default: hosts but the first log problems)",
    )


def _add_bucket_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "upload",
        "credentials come from the environment: gcloud auth application-default login, "
        "GOOGLE_APPLICATION_CREDENTIALS, or the machine's service account",
    )
    group.add_argument(
        "--upload_to_gcs",
        action="store_true",
        help="upload every shard; it then counts as stored when the bucket has confirmed it",
    )
    group.add_argument(
        "--gcs_bucket",
        type=_text,
        metavar="NAME",
        help="the bucket, or a URL that fsspec knows, such as s3://bucket (with s3fs installed)",
    )
    group.add_argument(
        "--gcs_prefix",
        type=_text,
        metavar="PATH",
        help="folder in the bucket; in it, one folder for each machine and host "
        f"(default: {DEFAULT_PREFIX})",
    )
    _add_pair(
        group,
        "delete_local_after_upload",
        "keep_local",
        "delete a shard here once the bucket has confirmed it; its JSON stays (default)",
        "keep the shards here as well",
    )
    group.add_argument(
        "--upload_timeout",
        type=_integer(1),
        default=300,
        metavar="SECONDS",
        help="keep retrying an upload that fails for this long, then stop (default: 300 s)",
    )


def _add_checking_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "looking at an extraction",
        "instead of extracting; of the bucket with --upload_to_gcs, else of --output_dir, which "
        "may be a URL here",
    )
    group.add_argument(
        "--status",
        action="store_true",
        help="all machines and hosts: what is stored, how fast, until when; also during a run",
    )
    group.add_argument(
        "--aggregate",
        action="store_true",
        help="with --status: also write it there as aggregated_metadata.json",
    )
    group.add_argument(
        "--verify",
        action="store_true",
        help="check every shard against its checksum and its JSON, and that all samples are there "
        "once; with --model_path, recompute some; exit status 1 and a list if anything is off",
    )
    group.add_argument(
        "--verify_samples",
        type=_integer(1),
        metavar="N",
        help="how many random samples --verify recomputes (default: 8)",
    )
    group.add_argument(
        "--export",
        choices=EXPORT_FORMATS,
        help="copy a finished run into the files of a trainer in --export_dir: memmap for "
        "jkminder's dictionary_learning (crosscoders), llamascopium for Llamascopium; an export "
        "that was stopped continues; --hook_names chooses hooks (default: all)",
    )
    group.add_argument(
        "--export_dir",
        type=_text,
        metavar="FOLDER",
        help="where --export writes",
    )
