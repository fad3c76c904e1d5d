"""From the command line to the configuration: what was given, what stands in for the rest, checks.

What one flag may be is checked where it is parsed; here is what flags are together. Nothing outside
this folder sees argparse's result, and only the script, run and inspect/look.py see the whole
`Config`. `python -m activation_extraction.cli.config FLAGS` checks flags and starts nothing.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from activation_extraction import __version__
from activation_extraction.cli.flags import (
    DATASET,
    DEMO_MAX_SEQ_LENGTH,
    FLAGS,
    GROUPS,
    LOOKING,
    MODES,
    Config,
)
from activation_extraction.common.choices import MAX_COLUMNS, SAMPLE_COLUMNS
from activation_extraction.common.errors import InputError, exit_status, near_miss
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

README.md says what files are written, and how to read them. In Python:
  from activation_extraction import ActivationDataset
  sample = ActivationDataset("out")[7]  # its activations by hook, token_ids, text_preview, ...

environment variables that stand in for flags that are not given:
"""
AFTER_ENVIRONMENT = """
  HF_TOKEN gives access to private and gated repositories of the Hugging Face hub.

exit status: 0 done; 1 failed on the way, or --verify or --status found a problem; 2 bad input,
also a row that cannot be used, or NaN; 130 or 143 stopped by Ctrl-C or SIGTERM (complete
samples are stored). A scheduler should never retry 2.
"""
# The flags that were given, by name, as argparse read them.
Given = dict[str, Any]


def parse_args(argv: Sequence[str] | None = None) -> Config:
    """Returns the command line as a Config. Raises InputError for flags that are wrong together."""
    words = sys.argv[1:] if argv is None else argv
    given: Given = vars(build_parser().parse_args(_with_slices(words)))
    _fill_from_environment(given)
    _refuse_conflicts(given)
    _check_hosts(given)
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = FLAGS[name].collect(value)
    config = Config(**{**given, **_depending(given)})
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
            known = re.findall(r"--\w+", self.format_usage())
            typed = message.removeprefix("unrecognized arguments:").split()
            message += near_miss(typed[0].partition("=")[0], known) if typed else "''"
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
    group = parser.add_argument_group("")
    for name, flag in FLAGS.items():
        if name in GROUPS:
            group = parser.add_argument_group(*GROUPS[name])
        # Of a flag and its opposite, only one may be given.
        both = group.add_mutually_exclusive_group() if flag.opposite else group
        both.add_argument(f"--{name}", **flag.options)
        if flag.opposite:
            opposite, meaning = flag.opposite
            both.add_argument(f"--{opposite}", dest=name, action="store_false", help=meaning)
    version = f"activation-extraction {__version__}"
    group.add_argument("--version", action="version", version=version, help="print the version")
    return parser


def _epilog() -> str:
    """Returns the end of --help: examples, environment variables, exit statuses."""
    variables = "\n".join(
        f"  {' or '.join(flag.variables):<46} --{name}"
        f"{' (with --multihost)' * (flag.needs == 'multihost')}"
        for name, flag in FLAGS.items()
        if flag.variables
    )
    return BEFORE_ENVIRONMENT + variables + AFTER_ENVIRONMENT


def _fill_from_environment(given: Given) -> None:
    """Takes missing flags from environment variables.

    Variables about hosts count only with --multihost. Variables about machines count only in a run
    over the user's data, so looking, planning, listing hooks and the demo work inside any job.

    Raises:
        InputError: A variable has a bad value, or MACHINE_ID stands without a number of machines.
    """
    shares_data = not any(mode in given for mode in (*LOOKING, "plan", "list_hooks", "demo"))
    for name, flag in FLAGS.items():
        usable = flag.needs != "multihost" or "multihost" in given
        if name in ("machine_id", "total_machines"):
            usable = shares_data
        # With a mesh type on the command line, the shape is not used; nor are axes without a shape.
        if name == "mesh_shape":
            usable = "mesh_type" not in given and given.get("use_data_parallel", True)
        if name == "mesh_axes":
            usable = "mesh_shape" in given
        variables = [variable for variable in flag.variables if os.environ.get(variable)]
        if usable and variables and name not in given:
            _take_variable(given, name, variables[0])
    if shares_data and os.environ.get("MACHINE_ID") and "total_machines" not in given:
        raise InputError(
            "TOTAL_MACHINES: is not set; MACHINE_ID says which machine this is, but not how many "
            "there are; set it, or give --total_machines"
        )


def _take_variable(given: Given, name: str, variable: str) -> None:
    """Sets a flag to the value of an environment variable, which must exist."""
    try:
        given |= vars(build_parser().parse_args([f"--{name}={os.environ[variable]}"]))
    except InputError as error:
        raise InputError(f"environment variable {variable}: {error}") from error


def _looking(given: Given) -> bool:
    return any(mode in given for mode in LOOKING)


def task_without_machine(config: Config) -> str | None:
    """Returns the variable by which a scheduler numbers this task, if the task is machine 0 of 1.

    All tasks of the scheduler's array would then do the same work. Where the hosts of a pod are an
    indexed Kubernetes Job, its index is the number of the host and is not returned.

    Returns:
        None if there are several machines, or if no scheduler has numbered this task.
    """
    if config.total_machines > 1:
        return None
    for variable in ARRAY_VARIABLES:
        of_a_host = variable == "JOB_COMPLETION_INDEX" and config.multihost
        if os.environ.get(variable) and not of_a_host:
            return variable
    return None


def _refuse_conflicts(given: Given) -> None:
    """Raises InputError for given flags that cannot be used together, or that need another one."""
    for name in given:
        for other in FLAGS[name].excludes:
            if other in given:
                raise InputError(f"--{name} and --{other} cannot be used together")
    for name in given:
        needed = [other for other in FLAGS[name].needs.split(" or ") if other]
        if needed and not any(other in given for other in needed):
            raise InputError(f"--{name}: needs {' or '.join(f'--{other}' for other in needed)}")
    if "model_path" not in given:
        if "verify_samples" in given:
            raise InputError("--verify_samples: needs --model_path")
        for name in ("model_revision", "lora", "encode"):
            if name in given and _looking(given):
                raise InputError(f"--{name}: needs --model_path here")
    # The run that is estimated may begin anew.
    planning = {"overwrite"} if "plan" in given else set()
    modes = [f"--{mode}" for mode in MODES if mode in given and mode not in planning]
    if len(modes) > 1:
        raise InputError(f"{' and '.join(modes)} cannot be used together")
    if given.get("compress_shards") and given.get("shard_format") == "safetensors":
        raise InputError(
            "--compress_shards: safetensors are never compressed, so that ranges of them can be "
            "read; leave it out, or choose pickle"
        )
    if "mesh_shape" in given and not given.get("use_data_parallel", True):
        raise InputError("--mesh_shape and --no_data_parallel cannot be used together")


def _check_hosts(given: Given) -> None:
    """Checks the flags that name the hosts of a pod: all of them must be given, or none."""
    names = ("coordinator_address", "host_id", "num_hosts")
    present = [name for name in names if name in given]
    if 0 < len(present) < len(names):
        missing = next(name for name in names if name not in given)
        raise InputError(f"--{missing}: is missing; --{present[0]} needs it")
    if present and given["host_id"] >= given["num_hosts"]:
        raise InputError(
            f"--host_id {given['host_id']}: out of range for --num_hosts {given['num_hosts']}; "
            "hosts are counted from 0"
        )


def _depending(given: Given) -> Given:
    """Returns the fields whose values depend on several flags."""
    recompute = "verify" in given and "model_path" in given
    values: Given = {
        "verify_samples": given.get("verify_samples", Config.verify_samples) if recompute else 0,
        "compress_shards": given.get("compress_shards", True)
        and given.get("shard_format") != "safetensors",
    }
    if not {"dataset_path", "mix", "demo"} & given.keys():
        values["dataset_name"] = given.get("dataset_name", DATASET[0])
        # The default configuration is the default data set's.
        if "dataset_name" not in given:
            values["dataset_config"] = given.get("dataset_config", DATASET[1])
    if "demo" in given:
        values["max_seq_length"] = given.get("max_seq_length", DEMO_MAX_SEQ_LENGTH)
    if "mesh_shape" in given:
        values["mesh_type"] = given.get("mesh_type")
    return values


def _check_values(config: Config) -> None:
    """Raises InputError for values, given or default, that make no sense."""
    if "://" in config.output_dir and not config.looking:
        raise InputError(
            f"--output_dir {config.output_dir}: is a URL, expected a local folder; to store shards "
            "in a bucket, use --upload_to_gcs with --gcs_bucket and --gcs_prefix"
        )
    if config.activation_dtype == "float8" and config.shard_format != "safetensors":
        raise InputError("--activation_dtype float8: needs --shard_format safetensors")
    if config.positions.last_of_turn and config.messages_column is None:
        raise InputError("--positions last_of_turn: needs --messages_column")
    names = [token for token in config.drop_token_ids if isinstance(token, str)]
    if names and config.ids_column is not None:
        raise InputError(
            f"--drop_token_ids {names[0]}: with --ids_column no tokenizer is read, which knows the "
            "names of tokens; give the id"
        )
    if config.overlap >= config.max_seq_length:
        raise InputError(
            f"--overlap {config.overlap}: expected less than --max_seq_length "
            f"{config.max_seq_length}"
        )
    if config.overlap and config.long_documents != "split":
        raise InputError("--overlap: needs --long_documents split")
    for name in config.keep_columns:
        if name in SAMPLE_COLUMNS:
            raise InputError(
                f"--keep_columns {name}: the table of samples has a column of this name; rename "
                "the data set's"
            )
    if len(config.keep_columns) > MAX_COLUMNS:
        raise InputError(
            f"--keep_columns: names {len(config.keep_columns)} columns, there is room for "
            f"{MAX_COLUMNS}"
        )
    sources = [plain_url(source) for source, _ in config.mix]
    for source in sources:
        if sources.count(source) > 1:
            raise InputError(f"--mix: names {source} twice")
    if not config.positions.may_keep(config.max_seq_length):
        raise InputError(
            f"--positions {config.positions}: keeps no token of any sample; samples have at most "
            f"{counted(config.max_seq_length, 'token')} (--max_seq_length), with positions from 0"
        )
    waiting, least = config.waiting_shards_gb, 2 * config.shard_size_gb
    if waiting is not None and waiting < least:
        raise InputError(
            f"--waiting_shards_gb {waiting:g}: has no room for two shards; give at least "
            f"{least:g}, or a smaller --shard_size_gb"
        )
    if config.machine_id >= config.total_machines:
        raise InputError(
            f"--machine_id {config.machine_id}: out of range for --total_machines "
            f"{config.total_machines}; machines are counted from 0"
        )


def check_flags() -> int:
    parse_args()
    return 0


if __name__ == "__main__":
    make_streams_safe()
    sys.exit(exit_status(check_flags))
