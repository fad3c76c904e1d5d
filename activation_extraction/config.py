"""The command line: flags, defaults, and the checks that need nothing but the flags.

The only module that knows argparse. Everything else receives the frozen `Config`.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from activation_extraction.errors import InputError

DEFAULT_MODEL = "Qwen/Qwen2.5-0.5B"
DEFAULT_DATASET = ("HuggingFaceFW/fineweb-edu", "sample-10BT", "train")
DEFAULT_LAYERS = range(10, 24)
ACTIVATION_TYPES = ("residual", "mlp", "attn")

EXAMPLES = """\
examples:
  extract_activations.py --demo
      a tiny model and sample documents, made on the spot; needs no network
  extract_activations.py --model_path Qwen/Qwen2.5-0.5B --layers_to_extract 12 --max_samples 1000
      1000 documents of FineWeb-Edu through a model of the hub
  extract_activations.py --model_path ./my-qwen --dataset_path texts.jsonl.gz --output_dir out
      your own model and texts

read a shard:
  import gzip, pickle
  records = pickle.load(gzip.open("out/shard_0001.pkl.gz"))  # {layer: [record, ...]}

exit status: 0 done, 1 failed on the way, 2 bad input, 130 interrupted (what is complete is stored)
"""


@dataclass(frozen=True)
class Config:
    """One run, as asked for. Field names are the flags'."""

    model_path: str
    dtype: str
    dataset_name: str | None
    dataset_config: str | None
    dataset_split: str | None
    dataset_path: str | None
    text_column: str
    max_samples: int | None
    layers_to_extract: tuple[int, ...] | None
    activation_type: str
    hook_names: tuple[str, ...] | None
    batch_size: int
    max_seq_length: int
    machine_id: int
    total_machines: int
    use_data_parallel: bool
    output_dir: Path
    activation_dtype: str
    shard_size_gb: float
    compress_shards: bool
    overwrite: bool
    verbose: bool
    demo: bool

    def to_json(self) -> dict[str, Any]:
        """The configuration as recorded in metadata.json."""
        return {**asdict(self), "output_dir": str(self.output_dir)}


class _Parser(argparse.ArgumentParser):
    """Bad flags are InputErrors like every other bad input, one line and no usage text."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see --help)")


def _integer(least: int) -> Any:
    def parse(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    parse.__name__ = "integer"
    return parse


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
        metavar="PATH",
        help="a local folder (config.json, safetensors, tokenizer) or a hub name "
        f"(default: {DEFAULT_MODEL})",
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
        "--dataset_name", metavar="NAME", help=f"a data set of the hub, streamed (default: {name})"
    )
    group.add_argument(
        "--dataset_config", metavar="NAME", help=f"(default: {config} of the default data set)"
    )
    group.add_argument("--dataset_split", metavar="NAME", help=f"(default: {split})")
    group.add_argument(
        "--dataset_path",
        metavar="PATH",
        help="instead of a hub data set: .jsonl, .jsonl.gz or .parquet; a file, a folder or a "
        "glob, local or a URL such as gs://bucket/folder",
    )
    group.add_argument(
        "--text_column",
        default="text",
        metavar="NAME",
        help="column that holds the text (default: text); rows without it that have ARC-AGI's "
        "train and test grids become a prompt",
    )
    group.add_argument(
        "--max_samples",
        type=_integer(1),
        metavar="N",
        help="stop after N samples on this machine (default: all)",
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
        help="rows per step; several samples share a row (default: 8)",
    )
    group.add_argument(
        "--max_seq_length",
        type=_integer(1),
        metavar="TOKENS",
        help="tokens per row; longer documents are cut (default: 2048)",
    )
    _add_pair(
        group,
        "use_data_parallel",
        "no_data_parallel",
        "split the rows over all local devices (default)",
        "use one device",
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
        type=Path,
        default=Path("activations"),
        metavar="FOLDER",
        help="where the shards go (default: activations)",
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
        help="delete the extraction that --output_dir already holds (default: refuse)",
    )
    group = parser.add_argument_group("general")
    group.add_argument(
        "--demo",
        action="store_true",
        help="make a tiny model and sample documents in --output_dir/demo_inputs and extract from "
        "them, 256 tokens per row",
    )
    group.add_argument("--verbose", action="store_true", help="log every step and shard")


def parse_args(argv: Sequence[str] | None = None) -> Config:
    """The command line as a Config. Raises InputError for flags that are wrong or conflict."""
    flags = build_parser().parse_args(argv)
    _refuse_conflicts(flags)
    return Config(
        model_path=flags.model_path or DEFAULT_MODEL,
        dtype=flags.dtype,
        **_dataset(flags),
        text_column=flags.text_column,
        max_samples=flags.max_samples,
        layers_to_extract=_tuple(flags.layers_to_extract),
        activation_type=flags.activation_type or "residual",
        hook_names=_tuple(flags.hook_names),
        batch_size=flags.batch_size or 8,
        max_seq_length=flags.max_seq_length or (256 if flags.demo else 2048),
        machine_id=flags.machine_id,
        total_machines=flags.total_machines,
        use_data_parallel=flags.use_data_parallel,
        output_dir=flags.output_dir.expanduser(),
        activation_dtype=flags.activation_dtype,
        shard_size_gb=flags.shard_size_gb,
        compress_shards=flags.compress_shards,
        overwrite=flags.overwrite,
        verbose=flags.verbose,
        demo=flags.demo,
    )


def _tuple(values: list[Any] | None) -> tuple[Any, ...] | None:
    return None if values is None else tuple(values)


def _dataset(flags: argparse.Namespace) -> dict[str, str | None]:
    """The data set fields; the defaults of config and split go with the default name only."""
    name: str | None
    config: str | None
    split: str
    name, config, split = DEFAULT_DATASET
    if flags.dataset_path or flags.demo:
        name = config = None
    elif flags.dataset_name:
        name, config = flags.dataset_name, None
    return {
        "dataset_name": name,
        "dataset_config": flags.dataset_config or config,
        "dataset_split": flags.dataset_split or split,
        "dataset_path": flags.dataset_path,
    }


CONFLICTS = {
    "demo": ("model_path", "dataset_name", "dataset_config", "dataset_split", "dataset_path"),
    "dataset_path": ("dataset_name", "dataset_config", "dataset_split"),
    "hook_names": ("layers_to_extract", "activation_type"),
}


def _refuse_conflicts(flags: argparse.Namespace) -> None:
    for flag, others in CONFLICTS.items():
        for other in others:
            if getattr(flags, flag) and getattr(flags, other) is not None:
                raise InputError(f"--{flag} and --{other} exclude each other")
    if flags.machine_id >= flags.total_machines:
        raise InputError(
            f"--machine_id {flags.machine_id}: out of range for --total_machines "
            f"{flags.total_machines}; machines are counted from 0"
        )
