"""The flags that say what to compute, and the parser of all flags.

Flags about the output are in output_flags.py; config.py checks whether flags fit together. A flag
that is not given is None, so that conflicts between given flags can be found; defaults are filled
in afterwards. Boolean flags are the exception.
"""

import argparse
import re
import sys
from typing import Any, NoReturn

from activation_extraction.cli.declare import (
    MESH_AXES,
    add,
    add_pair,
    add_switch,
    axes,
    integer,
    layers,
    sizes,
    text,
    variables,
)
from activation_extraction.cli.defaults import DATASET, DEFAULT_LAYERS, DEFAULTS
from activation_extraction.cli.defaults import DEMO_MAX_SEQ_LENGTH as DEMO_LENGTH
from activation_extraction.cli.help_text import epilog
from activation_extraction.cli.output_flags import (
    add_bucket_flags,
    add_checking_flags,
    add_general_flags,
    add_output_flags,
)
from activation_extraction.common.errors import InputError, near_miss
from activation_extraction.common.positions import SLICE, positions

ACTIVATION_TYPES = ("residual", "mlp", "attn")


class _Parser(argparse.ArgumentParser):
    """Reports a bad flag, such as one without its value, as an InputError: one line, no usage."""

    def error(self, message: str) -> NoReturn:
        if message.endswith("argument"):  # one that begins with "-" looks like a flag
            message += "; a value that begins with - follows a =, such as --text_column=-x"
        if message.startswith("unrecognized"):
            known = re.findall(r"--\w+", self.format_usage())
            typed = message.removeprefix("unrecognized arguments:").split()
            message += near_miss(typed[0].partition("=")[0], known) if typed else "''"
        raise InputError(f"{message} (see --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Takes a slice such as -8: for the value that it is, and not for a flag."""
        joined: list[str] = []
        for typed in sys.argv[1:] if args is None else args:
            if SLICE.fullmatch(typed) and joined and joined[-1] == "--positions":
                joined[-1] += f"={typed}"
            else:
                joined.append(typed)
        return super().parse_known_args(joined, namespace)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all flags, with their help."""
    parser = _Parser(
        prog="extract_activations.py",
        description="Turns a Qwen checkpoint and a stream of text into shards of activations.",
        epilog=epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_model_flags(parser)
    _add_hook_flags(parser)
    _add_token_flags(parser)
    _add_data_flags(parser)
    _add_machine_flags(parser)
    _add_computing_flags(parser)
    _add_host_flags(parser)
    add_output_flags(parser)
    add_bucket_flags(parser)
    add_checking_flags(parser)
    add_general_flags(parser)
    return parser


def _add_model_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    add(
        group,
        "model_path",
        "a folder with config.json, safetensors and tokenizer: a local one, one in a bucket "
        "(gs://BUCKET/FOLDER), or the name of a hub model",
        type=text,
        metavar="PATH",
    )
    add(
        group,
        "model_revision",
        "a branch, tag or commit of a hub model (default: the commit that the extraction began "
        "with; the newest one for a new extraction)",
        type=text,
        metavar="NAME",
    )
    add(
        group,
        "dtype",
        "the type of weights and matrix products; sums are float32 (default: "
        f"{DEFAULTS['dtype']} = bfloat16 on TPU and GPU, float32 on CPU)",
        choices=("auto", "float32", "bfloat16"),
    )


def _add_hook_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to extract")
    add(
        group,
        "layers_to_extract",
        "layers, counted from 0: numbers, ranges such as 1-3, or all (default: "
        f"{DEFAULT_LAYERS[0]}-{DEFAULT_LAYERS[-1]}, clipped to the model's depth)",
        type=layers,
        nargs="+",
        metavar="N|N-M|all",
    )
    add(
        group,
        "activation_type",
        "residual: the residual stream after the block; attn, mlp: what that half of the block "
        "adds to it",
        choices=ACTIVATION_TYPES,
    )
    add(
        group,
        "hook_names",
        "instead of the two flags above: TransformerLens names, or inputs and outputs of Hugging "
        "Face modules; globs are allowed, such as 'blocks.*.mlp.hook_in' or "
        "'model.layers.20.mlp.output'",
        nargs="+",
        metavar="GLOB",
    )
    add_switch(
        group,
        "list_hooks",
        "list the model's hooks with all their names, widths and bytes per token, then exit; "
        "reads only config.json",
    )


def _add_token_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "which tokens to keep", "the model always reads whole samples; only kept tokens are stored"
    )
    add(
        group,
        "positions",
        "all, last, first:N, last:N, every:N (0, N, 2N, ...), a slice as in Python, such as 4:-1, "
        "or random:P, which keeps every token with probability P; random:P:SEED makes another "
        "choice than SEED 0. Records then say the positions of their tokens",
        type=positions,
        metavar="RULE",
    )
    add(
        group,
        "drop_token_ids",
        "of the tokens that --positions keeps, leave out those with these ids, such as the end of "
        "text (default: none)",
        type=integer(0),
        nargs="+",
        metavar="ID",
    )


def _add_data_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("text")
    name, config, split = DATASET
    add(
        group,
        "dataset_name",
        f"a data set on the hub, which is streamed (default: {name})",
        type=text,
        metavar="NAME",
    )
    add(
        group,
        "dataset_config",
        f"its configuration (default: {config} for the default data set, else its own default)",
        type=text,
        metavar="NAME",
    )
    add(group, "dataset_split", f"its split (default: {split})", type=text, metavar="NAME")
    add(
        group,
        "dataset_path",
        "your own files instead of a hub data set: .jsonl, .jsonl.gz or .parquet; a file, a folder "
        "or a glob; a local path or a URL such as gs://bucket/folder",
        type=text,
        metavar="PATH",
    )
    add(
        group,
        "text_column",
        "the column that holds the text; in rows without it, ARC-AGI's columns train and test "
        f"become a prompt, see below (default: {DEFAULTS['text_column']})",
        type=text,
        metavar="NAME",
    )
    add_switch(
        group,
        "skip_bad_rows",
        "skip and count rows that cannot be used: not JSON, no such column, no text in it; may "
        "also be added when a run is continued (default: such a row ends the run)",
    )
    add(
        group,
        "max_samples",
        "stop after N samples on this machine, shared equally by its hosts (default: all)",
        type=integer(1),
        metavar="N",
    )


def _add_machine_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several machines", "each with its own share of the data")
    add(
        group,
        "machine_id",
        "the number of this machine, from 0; each machine extracts its own share of the data "
        "(default: SLURM_ARRAY_TASK_ID, SKYPILOT_JOB_RANK or, without --multihost, "
        f"JOB_COMPLETION_INDEX; else {DEFAULTS['machine_id']})",
        type=integer(0),
        metavar="I",
    )
    add(
        group,
        "total_machines",
        "the number of independent machines that share the data; it may be much larger than the "
        "number that runs at a time (default: SLURM_ARRAY_TASK_COUNT or SKYPILOT_NUM_JOBS, else "
        f"{DEFAULTS['total_machines']})",
        type=integer(1),
        metavar="N",
    )


def _add_computing_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("computing")
    add(
        group,
        "batch_size",
        "rows per host and step; several samples share a row",
        type=integer(1),
        metavar="ROWS",
    )
    add(
        group,
        "max_seq_length",
        f"tokens per row; longer documents are cut (default: {DEFAULTS['max_seq_length']} tokens; "
        f"{DEMO_LENGTH} with --demo)",
        type=integer(1),
        metavar="TOKENS",
    )
    add(
        group,
        "mesh_type",
        "how the devices are arranged. 1d: all along the model axis; 2d: data x model, with one "
        "host per data index; 3d: pipeline x data x model; auto: the smallest model axis with "
        f"which everything fits in memory (default: {DEFAULTS['mesh_type']})",
        choices=("1d", "2d", "3d", "auto"),
    )
    add(
        group,
        "mesh_shape",
        f"the size of each axis (default: {variables('mesh_shape')}, else as --mesh_type says)",
        type=sizes,
        metavar="A,B[,C]",
    )
    add(
        group,
        "mesh_axes",
        f"the names of the axes, from {', '.join(MESH_AXES)}: pipeline splits the layers; data, "
        "fsdp and expert the rows; fsdp and model the weights; expert those of the experts "
        f"(default: {variables('mesh_axes')}, else data,model or pipeline,data,model)",
        type=axes,
        metavar="NAME,...",
    )
    add_pair(
        group,
        "use_data_parallel",
        "no_data_parallel",
        "use all devices",
        "use only one device of each host",
    )
    add(
        group,
        "compilation_cache",
        "where JAX keeps compiled programs for the next start, or off; with --multihost a folder "
        f"or URL that all hosts share (default: {variables('compilation_cache')}, else "
        "activation_extraction/jax in XDG_CACHE_HOME or ~/.cache; off with --multihost)",
        type=text,
        metavar="FOLDER",
    )


def _add_host_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several hosts as one", "start the same command on every host of a pod"
    )
    add_switch(
        group,
        "multihost",
        "join the other hosts; on Cloud TPU, GKE and Slurm this flag alone is enough",
    )
    add(
        group,
        "coordinator_address",
        f"the address of host 0 (default: {variables('coordinator_address')})",
        type=text,
        metavar="HOST:PORT",
    )
    add(
        group,
        "host_id",
        f"the number of this host, from 0 (default: {variables('host_id')})",
        type=integer(0),
        metavar="I",
    )
    add(
        group,
        "num_hosts",
        f"the number of hosts (default: {variables('num_hosts')})",
        type=integer(1),
        metavar="N",
    )
    for name, meaning in (
        ("connect_timeout", "how long to wait for the other hosts at the start"),
        ("heartbeat_timeout", "how long a host may be silent before it counts as dead"),
        ("stall_timeout", "end the process if no step finishes for this long"),
    ):
        add(group, name, meaning, unit=" s", type=integer(1), metavar="SECONDS")
