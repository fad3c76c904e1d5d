"""The way from the command line to a checked `Config`.

flags.py declares the flags, and values.py checks the value of each where it is parsed. This module
takes environment variables and defaults for flags that are not given, and checks whether flags are
consistent. Nothing outside this folder sees argparse's result, and only the script, run and
inspect/look.py see the whole `Config`.
`python -m activation_extraction.cli.config FLAGS` checks flags and starts nothing.
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NoReturn

from activation_extraction import __version__
from activation_extraction.cli.declare import Flag
from activation_extraction.cli.flags import (
    DATASET,
    DEMO_MAX_SEQ_LENGTH,
    FLAGS,
    GROUPS,
    LOOKING,
    MODES,
    Config,
    LookingOptions,
    TextOptions,
)
from activation_extraction.common.choices import MAX_COLUMNS, SAMPLE_COLUMNS
from activation_extraction.common.errors import FlagValueError, InputError, exit_status, near_miss
from activation_extraction.common.visible import counted, make_streams_safe, plain_url

# What schedulers call the number of a task of an array. It is only warned of, never used.
ARRAY_VARIABLES = ("SLURM_ARRAY_TASK_ID", "SKYPILOT_JOB_RANK", "JOB_COMPLETION_INDEX")
BEFORE_ENVIRONMENT = """\
examples:
  extract_activations.py --demo
      a tiny model and sample documents, made on the spot; needs no network
  extract_activations.py --model_path ./my-qwen --dataset_path texts.jsonl.gz --output_dir out
      your own model and texts
  extract_activations.py --model_path ./my-qwen --upload_to_gcs --gcs_bucket B --gcs_prefix run1
      shards go to gs://B/run1/machine_000; if the run is killed, the same command continues it
  extract_activations.py --status --output_dir gs://B/run1
      how far the run has come

README.md describes the files that are written and how to read them. In Python:
  from activation_extraction import ActivationDataset
  sample = ActivationDataset("out")[7]  # its activations by hook, token_ids, text_preview, ...

environment variables, which count if the flag is not given:
"""
AFTER_ENVIRONMENT = """
  HF_TOKEN gives access to private and gated repositories of the Hugging Face hub.

exit status: 0 done; 1 failed on the way, or --verify or --status found a problem; 2 bad input
(also a row that cannot be used) or NaN, which a scheduler should not try again; 130 or 143 stopped
by Ctrl-C or SIGTERM, with all complete samples stored.
"""
Values = dict[str, Any]  # name of a flag that is given -> its value


def parse_args(argv: Sequence[str] | None = None) -> Config:
    """Returns the configuration that a command line asks for.

    Args:
        argv: The flags. None for those that this process was started with.

    Raises:
        InputError: A flag has a bad value, or flags are inconsistent.
        SystemExit: After --help or --version.
    """
    words = sys.argv[1:] if argv is None else argv
    values: Values = vars(build_parser().parse_args(_with_slices(words)))
    _fill_from_environment(values)
    _refuse_conflicts(values)
    _check_hosts(values)
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = FLAGS[name].collect(value)
    config = Config.of({**values, **_depending(values)})
    _check_values(config)
    return config


def _with_slices(words: Sequence[str]) -> list[str]:
    """Joins --positions and a slice such as -8: by "=".

    argparse would take a word that begins with a minus for a flag.
    """
    joined: list[str] = []
    for word in words:
        if joined[-1:] == ["--positions"] and re.match(r"-\d", word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


class _Parser(argparse.ArgumentParser):
    """Reports a bad flag, such as one without its value, as an InputError: one line, no usage."""

    def error(self, message: str) -> NoReturn:
        if message.endswith("argument"):  # one that begins with "-" looks like a flag
            message += "; a value that begins with - follows a =, such as --text_column=-x"
        argument = re.match(r"argument --(\w+): .*'([^',\s]+(?:,[^',\s]+)+)'", message)
        flag = FLAGS.get(argument[1]) if argument else None
        if argument and flag and flag.options.get("nargs") == "+":
            message += f"; put spaces between values: {argument[2].replace(',', ' ')}"
        if message.startswith("unrecognized"):
            names = re.findall(r"--\w+", self.format_usage())
            typed = message.removeprefix("unrecognized arguments:").split()
            message += near_miss(typed[0].partition("=")[0], names) if typed else "''"
        raise InputError(f"{message} (see --help)")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all flags. What it parses has only the flags that were given."""
    parser = _Parser(
        prog="extract_activations.py",
        description="Turns a Qwen or Llama 3 checkpoint and text into shards of activations.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for declared in GROUPS:
        group = parser.add_argument_group(declared.title, declared.note)
        for name, flag in FLAGS.items():
            if flag.group == declared:
                _add_flag(group, name, flag)
    version = f"activation-extraction {__version__}"
    group.add_argument("--version", action="version", version=version, help="print the version")
    return parser


def _add_flag(group: "argparse._ArgumentGroup", name: str, flag: Flag) -> None:
    """Adds a flag to its group of --help, and its opposite if it has one."""
    options = flag.options
    if "type" in options:
        options = {**options, "type": _for_argparse(options["type"])}
    if flag.opposite is None:
        group.add_argument(f"--{name}", **options)
        return
    opposite, meaning = flag.opposite
    both = group.add_mutually_exclusive_group()
    both.add_argument(f"--{name}", **options)
    both.add_argument(f"--{opposite}", dest=name, action="store_false", help=meaning)


def _for_argparse(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Returns the same parser with refusals that argparse shows as they are."""

    @wraps(parse)  # messages of argparse contain the name
    def parse_for_argparse(typed: str) -> Any:
        try:
            return parse(typed)
        except FlagValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_for_argparse


def _epilog() -> str:
    """Returns the end of --help: examples, environment variables, exit statuses."""
    lines = []
    for name, flag in FLAGS.items():
        if flag.variables is not None:
            line = f"  {' or '.join(flag.variables.names):<46} --{name}"
            if flag.variables.only_with:
                line += f" (with --{flag.variables.only_with})"
            lines.append(line)
    return BEFORE_ENVIRONMENT + "\n".join(lines) + AFTER_ENVIRONMENT


def _fill_from_environment(values: Values) -> None:
    """Takes flags that are not given from environment variables, where these count.

    Raises:
        InputError: A variable has a bad value, or MACHINE_ID is set without a number of machines.
    """
    for name, flag in FLAGS.items():
        if flag.variables is None or name in values:
            continue
        present = [variable for variable in flag.variables.names if os.environ.get(variable)]
        if present and flag.variables.count_with(_typed(values)):
            _take_variable(values, name, present[0])
    of_machine = FLAGS["machine_id"].variables
    if (
        of_machine is not None
        and of_machine.count_with(_typed(values))
        and os.environ.get("MACHINE_ID")
        and "total_machines" not in values
    ):
        raise InputError(
            "TOTAL_MACHINES: is not set; MACHINE_ID says which machine this is, but not how many "
            "there are; set it, or give --total_machines"
        )


def _typed(values: Mapping[str, Any]) -> set[str]:
    """Returns the names of the flags that are given, such as no_data_parallel of a pair."""
    names = set()
    for name, value in values.items():
        opposite = FLAGS[name].opposite
        names.add(name if opposite is None or value else opposite[0])
    return names


def _take_variable(values: Values, name: str, variable: str) -> None:
    """Sets a flag to the value of an environment variable, which must exist."""
    try:
        values |= vars(build_parser().parse_args([f"--{name}={os.environ[variable]}"]))
    except InputError as error:
        raise InputError(f"environment variable {variable}: {error}") from error


def task_without_machine(config: Config) -> str | None:
    """Returns the variable by which a scheduler numbers this task, if the task is machine 0 of 1.

    All tasks of the scheduler's array would then do the same work. Where the hosts of a pod are an
    indexed Kubernetes Job, its index is the number of the host and is not returned.

    Returns:
        None if there are several machines, or if no scheduler has numbered this task.
    """
    if config.hosts.total_machines > 1:
        return None
    for variable in ARRAY_VARIABLES:
        of_a_host = variable == "JOB_COMPLETION_INDEX" and config.hosts.multihost
        if os.environ.get(variable) and not of_a_host:
            return variable
    return None


def _refuse_conflicts(values: Values) -> None:
    """Raises InputError for given flags that cannot be used together, or that need another one."""
    for name in values:
        for other in FLAGS[name].excludes:
            if other in values:
                raise InputError(f"--{name} and --{other} cannot be used together")
    for name in values:
        needed = [other for other in FLAGS[name].needs.split(" or ") if other]
        if needed and not any(other in values for other in needed):
            raise InputError(f"--{name}: needs {' or '.join(f'--{other}' for other in needed)}")
    if "model_path" not in values:
        if "verify_samples" in values:
            raise InputError("--verify_samples: needs --model_path")
        looking = [mode for mode in LOOKING if mode in values]
        for name in ("model_revision", "lora", "encode"):
            if name in values and looking:
                raise InputError(f"--{name}: needs --model_path if --{looking[0]} is given")
    # The run that is estimated may begin anew.
    planning = {"overwrite"} if "plan" in values else set()
    modes = [f"--{mode}" for mode in MODES if mode in values and mode not in planning]
    if len(modes) > 1:
        raise InputError(f"{' and '.join(modes)} cannot be used together")
    if values.get("compress_shards") and values.get("shard_format") == "safetensors":
        raise InputError(
            "--compress_shards: safetensors are never compressed, so that ranges of them can be "
            "read; leave it out, or choose pickle"
        )
    if "mesh_shape" in values and not values.get("use_data_parallel", True):
        raise InputError("--mesh_shape and --no_data_parallel cannot be used together")


def _check_hosts(values: Values) -> None:
    """Checks the flags that name the hosts of a pod: all of them must be given, or none."""
    names = ("coordinator_address", "host_id", "num_hosts")
    present = [name for name in names if name in values]
    if 0 < len(present) < len(names):
        missing = next(name for name in names if name not in values)
        raise InputError(f"--{missing}: is missing; --{present[0]} needs it")
    if present and values["host_id"] >= values["num_hosts"]:
        raise InputError(
            f"--host_id {values['host_id']}: out of range for --num_hosts {values['num_hosts']}; "
            "hosts are counted from 0"
        )


def _depending(values: Values) -> Values:
    """Returns the values of flags that depend on several flags."""
    recompute = "verify" in values and "model_path" in values
    compressible = values.get("shard_format") != "safetensors"
    results: Values = {
        "verify_samples": 0,
        "compress_shards": compressible and values.get("compress_shards", True),
    }
    if recompute:
        results["verify_samples"] = values.get("verify_samples", LookingOptions.verify_samples)
    if not {"dataset_path", "mix", "demo"} & values.keys():
        results["dataset_name"] = values.get("dataset_name", DATASET[0])
        # The default configuration is the default data set's.
        if "dataset_name" not in values:
            results["dataset_config"] = values.get("dataset_config", DATASET[1])
    if "demo" in values:
        results["max_seq_length"] = values.get("max_seq_length", DEMO_MAX_SEQ_LENGTH)
    if "mesh_shape" in values:
        results["mesh_type"] = values.get("mesh_type")
    return results


def _check_values(config: Config) -> None:
    """Raises InputError for values, given or default, that make no sense together."""
    output, storage, hosts = config.output, config.storage, config.hosts
    if "://" in output.output_dir and not config.looking.requested:
        raise InputError(
            f"--output_dir {output.output_dir}: is a URL, expected a local folder; to store shards "
            "in a bucket, use --upload_to_gcs with --gcs_bucket and --gcs_prefix"
        )
    if config.hooks.activation_dtype == "float8" and storage.shard_format != "safetensors":
        raise InputError("--activation_dtype float8: needs --shard_format safetensors")
    _check_text(config.text)
    waiting, least = storage.waiting_shards_gb, 2 * storage.shard_size_gb
    if waiting is not None and waiting < least:
        raise InputError(
            f"--waiting_shards_gb {waiting:g}: has no room for two shards; give at least "
            f"{least:g}, or a smaller --shard_size_gb"
        )
    if hosts.machine_id >= hosts.total_machines:
        raise InputError(
            f"--machine_id {hosts.machine_id}: out of range for --total_machines "
            f"{hosts.total_machines}; machines are counted from 0"
        )


def _check_text(text: TextOptions) -> None:
    """Raises InputError for values of the flags about text that make no sense together."""
    if text.positions.last_of_turn and text.messages_column is None:
        raise InputError("--positions last_of_turn: needs --messages_column")
    names = [token for token in text.drop_token_ids if isinstance(token, str)]
    if names and text.ids_column is not None:
        raise InputError(
            f"--drop_token_ids {names[0]}: with --ids_column no tokenizer is read, which knows the "
            "names of tokens; give the id"
        )
    if text.overlap >= text.max_seq_length:
        raise InputError(
            f"--overlap {text.overlap}: expected less than --max_seq_length {text.max_seq_length}"
        )
    if text.overlap and text.long_documents != "split":
        raise InputError("--overlap: needs --long_documents split")
    for name in text.keep_columns:
        if name in SAMPLE_COLUMNS:
            raise InputError(
                f"--keep_columns {name}: the table of samples has a column of this name; rename "
                "the data set's"
            )
    if len(text.keep_columns) > MAX_COLUMNS:
        raise InputError(
            f"--keep_columns: names {len(text.keep_columns)} columns, there is room for "
            f"{MAX_COLUMNS}"
        )
    sources = [plain_url(source) for source, _ in text.mix]
    for source in sources:
        if sources.count(source) > 1:
            raise InputError(f"--mix: names {source} twice")
    if not text.positions.may_keep(text.max_seq_length):
        raise InputError(
            f"--positions {text.positions}: keeps no token of any sample; samples have at most "
            f"{counted(text.max_seq_length, 'token')} (--max_seq_length), with positions from 0"
        )


def check_flags() -> int:
    """Checks the flags of this process; returns the exit status 0."""
    parse_args()
    return 0


if __name__ == "__main__":
    make_streams_safe()
    sys.exit(exit_status(check_flags))
