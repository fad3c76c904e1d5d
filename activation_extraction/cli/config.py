"""Turns the command line into a checked `Config`, and writes the text of --help.

flags.py declares the flags, and values.py parses and checks the value of each flag. This module
replaces missing flags by environment variables and defaults, and checks whether flags are
consistent. Other packages do not use argparse's result. Only extract_activations.py, the package
run and inspect/look.py use the whole `Config`.

`python -m activation_extraction.cli.config FLAGS` checks flags and starts nothing.
"""

import argparse
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, NoReturn

from activation_extraction import __version__
from activation_extraction.cli.declare import Flag
from activation_extraction.cli.flags import (
    DEFAULT_DATASET,
    DEMO_MAX_SEQ_LENGTH,
    FLAGS,
    GROUPS,
    INSPECTION_FLAGS,
    MODES,
    Config,
    InspectionOptions,
    TextOptions,
)
from activation_extraction.common.choices import MAX_COLUMNS, SAMPLE_COLUMNS
from activation_extraction.common.errors import FlagValueError, InputError, exit_status, near_miss
from activation_extraction.common.visible import counted, make_streams_safe, plain_url

# Environment variables in which schedulers store the number of a task in an array of tasks. Their
# values are never used, but the user is warned if one is set and there is only one machine.
ARRAY_VARIABLES = ("SLURM_ARRAY_TASK_ID", "SKYPILOT_JOB_RANK", "JOB_COMPLETION_INDEX")
# The end of --help consists of this text, the list of environment variables, and
# HELP_AFTER_VARIABLES.
HELP_BEFORE_VARIABLES = """\
examples:
  extract_activations.py --demo
      extract from a tiny model and documents that are created; needs no network
  extract_activations.py --model_path ./my-qwen --dataset_path texts.jsonl.gz --output_dir out
      extract from your own model and texts
  extract_activations.py --model_path ./my-qwen --upload_to_gcs --gcs_bucket B --gcs_prefix run1
      store the shards in gs://B/run1/machine_000; if the run is killed, give the command again
  extract_activations.py --status --output_dir gs://B/run1
      show the progress of the run

README.md describes the files that are written and how to read them. In Python:
  from activation_extraction import ActivationDataset
  sample = ActivationDataset("out")[7]  # its activations by hook, token_ids, text_preview, ...

environment variables, which are used if the flag is not given:
"""
HELP_AFTER_VARIABLES = """
  HF_TOKEN gives access to private and gated repositories of the Hugging Face hub.

exit status: 0 done; 1 failed on the way, or --verify or --status found a problem; 2 bad input
(also a row that cannot be used) or NaN, which a scheduler should not try again; 130 or 143 stopped
by Ctrl-C or SIGTERM, with all complete samples stored.
"""
# Width in characters of the texts below the titles of the groups in --help. argparse indents these
# texts by two more characters.
GROUP_TEXT_WIDTH = 76
ValueByFlagName = dict[str, Any]


def parse_args(argv: Sequence[str] | None = None) -> Config:
    """Returns the configuration that a command line describes.

    Args:
        argv: The words of the command line after the program's name. None for the command line of
            this process.

    Raises:
        InputError: If a flag has an invalid value, or if flags are inconsistent.
        SystemExit: If --help or --version has been printed.
    """
    command_words = sys.argv[1:] if argv is None else argv
    value_by_flag_name: ValueByFlagName = vars(
        build_parser().parse_args(_with_slices(command_words))
    )
    _fill_from_environment(value_by_flag_name)
    _refuse_conflicts(value_by_flag_name)
    _check_hosts(value_by_flag_name)
    for flag_name, flag_value in value_by_flag_name.items():
        if isinstance(flag_value, list):
            value_by_flag_name[flag_name] = FLAGS[flag_name].collect_values(flag_value)
    config = Config.of({**value_by_flag_name, **_dependent_values(value_by_flag_name)})
    _check_values(config)
    return config


def _with_slices(words: Sequence[str]) -> list[str]:
    """Joins --positions and a slice such as -8: into one word, --positions=-8:.

    Otherwise, argparse would interpret the slice as a flag, because it begins with a minus sign.

    Args:
        words: The words of the command line after the program's name.

    Returns:
        The words, with --positions and its slice as one word.
    """
    words_with_joined_values: list[str] = []
    for command_word in words:
        if words_with_joined_values[-1:] == ["--positions"] and re.match(r"-\d", command_word):
            words_with_joined_values[-1] += f"={command_word}"
        else:
            words_with_joined_values.append(command_word)
    return words_with_joined_values


class _Parser(argparse.ArgumentParser):
    """A parser that raises an InputError for an invalid command line, instead of printing usage."""

    def error(self, message: str) -> NoReturn:
        """Raises an InputError for an invalid command line.

        Args:
            message: The message of argparse, to which advice is added.
        """
        # argparse takes a value that begins with "-" for a flag, and then reports that a value is
        # missing. So the advice for this case is added to its message.
        if message.endswith("argument"):
            message += "; a value that begins with - follows a =, such as --text_column=-x"
        comma_list_match = re.match(r"argument --(\w+): .*'([^',\s]+(?:,[^',\s]+)+)'", message)
        list_flag = FLAGS.get(comma_list_match[1]) if comma_list_match else None
        if comma_list_match and list_flag and list_flag.argparse_options.get("nargs") == "+":
            message += f"; put spaces between values: {comma_list_match[2].replace(',', ' ')}"
        if message.startswith("unrecognized"):
            flags_in_usage = re.findall(r"--\w+", self.format_usage())
            unknown_words = message.removeprefix("unrecognized arguments:").split()
            message += (
                near_miss(unknown_words[0].partition("=")[0], flags_in_usage)
                if unknown_words
                else "''"
            )
        raise InputError(f"{message} (see --help)")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all flags.

    The namespace that the parser returns contains only the flags on the command line, because
    environment variables and defaults are added later.
    """
    flag_parser = _Parser(
        prog="extract_activations.py",
        description="Extracts activations of a Qwen or Llama 3 model from text, and stores them.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    for help_group in GROUPS:
        help_group_text = help_group.text_below_title
        wrapped_text = help_group_text and textwrap.fill(help_group_text, GROUP_TEXT_WIDTH)
        argument_group = flag_parser.add_argument_group(help_group.title, wrapped_text)
        for flag_name, flag in FLAGS.items():
            if flag.help_group == help_group:
                _add_flag(argument_group, flag_name, flag)
    # --version is added to the group that the loop made last, which is GENERAL.
    program_version = f"activation-extraction {__version__}"
    argument_group.add_argument(
        "--version", action="version", version=program_version, help="print the version"
    )
    return flag_parser


def _add_flag(argument_group: "argparse._ArgumentGroup", name: str, flag: Flag) -> None:
    """Adds a flag to a group of argparse, and the second flag that sets it to False, if any.

    Args:
        argument_group: The group of argparse.
        name: The name of the flag.
        flag: The declaration of the flag.
    """
    argparse_options = flag.argparse_options
    if "type" in argparse_options:
        argparse_options = {**argparse_options, "type": _for_argparse(argparse_options["type"])}
    if flag.negated_name_and_help is None:
        argument_group.add_argument(f"--{name}", **argparse_options)
        return
    negated_name, negated_help = flag.negated_name_and_help
    exclusive_group = argument_group.add_mutually_exclusive_group()
    exclusive_group.add_argument(f"--{name}", **argparse_options)
    exclusive_group.add_argument(
        f"--{negated_name}", dest=name, action="store_false", help=negated_help
    )


def _for_argparse(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wraps a parser of values.py, so that argparse shows the message of its errors unchanged.

    Args:
        parse: Parser, which raises FlagValueError or ValueError.

    Returns:
        A parser that raises ArgumentTypeError in place of FlagValueError. argparse replaces the
        message of a ValueError by a message of its own.
    """

    @wraps(parse)  # argparse prints the name of this function in its messages
    def parse_for_argparse(typed: str) -> Any:
        try:
            return parse(typed)
        except FlagValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_for_argparse


def _epilog() -> str:
    """Returns the end of --help: examples, environment variables and exit statuses."""
    environment_variable_lines = []
    for flag_name, flag in FLAGS.items():
        if flag.environment_variables is not None:
            environment_variables_phrase = " or ".join(flag.environment_variables.variable_names)
            environment_variable_line = f"  {environment_variables_phrase:<46} --{flag_name}"
            if flag.environment_variables.flag_that_enables_variables:
                environment_variable_line += (
                    f" (with --{flag.environment_variables.flag_that_enables_variables})"
                )
            environment_variable_lines.append(environment_variable_line)
    return HELP_BEFORE_VARIABLES + "\n".join(environment_variable_lines) + HELP_AFTER_VARIABLES


def _fill_from_environment(values: ValueByFlagName) -> None:
    """Sets missing flags to the values of their environment variables.

    Args:
        values: The values of flags by name. Values of environment variables are added.

    Raises:
        InputError: If a variable has an invalid value, or if MACHINE_ID is set without the number
            of machines.
    """
    for flag_name, flag in FLAGS.items():
        if flag.environment_variables is None or flag_name in values:
            continue
        nonempty_variable_names = [
            environment_variable_name
            for environment_variable_name in flag.environment_variables.variable_names
            if os.environ.get(environment_variable_name)
        ]
        if nonempty_variable_names and flag.environment_variables.are_read_with(
            _names_of_flags(values)
        ):
            _take_variable(values, flag_name, nonempty_variable_names[0])
    machine_id_environment_variables = FLAGS["machine_id"].environment_variables
    if (
        machine_id_environment_variables is not None
        and machine_id_environment_variables.are_read_with(_names_of_flags(values))
        and os.environ.get("MACHINE_ID")
        and "total_machines" not in values
    ):
        raise InputError(
            "TOTAL_MACHINES: is not set; MACHINE_ID says which machine this is, but not how many "
            "there are; set it, or give --total_machines"
        )


def _names_of_flags(values: Mapping[str, Any]) -> set[str]:
    """Returns the names of the flags that are set, as the user would write them, without dashes.

    Some boolean flags have a second flag, which sets them to False. For example, --no_data_parallel
    sets use_data_parallel to False. If such a flag is False, the name of the second flag is
    returned in place of the name of the flag.

    Args:
        values: Name -> value of each flag that the user or an environment variable sets.
    """
    flag_names = set()
    for flag_name, flag_value in values.items():
        negated_name_and_help = FLAGS[flag_name].negated_name_and_help
        flag_names.add(
            flag_name if negated_name_and_help is None or flag_value else negated_name_and_help[0]
        )
    return flag_names


def _take_variable(values: ValueByFlagName, name: str, variable: str) -> None:
    """Sets a flag to the value of an environment variable, which must be set.

    Args:
        values: The values of flags by name, to which the value is added.
        name: The name of the flag.
        variable: The name of the environment variable.

    Raises:
        InputError: If the value of the variable is invalid.
    """
    try:
        values |= vars(build_parser().parse_args([f"--{name}={os.environ[variable]}"]))
    except InputError as error:
        raise InputError(f"environment variable {variable}: {error}") from error


def variable_name_of_task_without_machine(config: Config) -> str | None:
    """Detects that each task of an array of tasks would do the whole work of the run.

    A scheduler that starts an array of tasks gives each task its number in an environment variable.
    If a task has such a variable, but the flags give the run only one machine, every task of the
    array runs as machine 0 of 1, so the user should be warned. With --multihost, the variable of an
    indexed Kubernetes Job does not count, because it then contains the number of the host.

    Args:
        config: The configuration of the run.

    Returns:
        The name of the environment variable that contains the number of this task. None if there
        are several machines, or if no scheduler has numbered this task.
    """
    if config.host_options.total_machines > 1:
        return None
    for environment_variable_name in ARRAY_VARIABLES:
        contains_host_number = (
            environment_variable_name == "JOB_COMPLETION_INDEX" and config.host_options.multihost
        )
        if os.environ.get(environment_variable_name) and not contains_host_number:
            return environment_variable_name
    return None


def _refuse_conflicts(values: ValueByFlagName) -> None:
    """Checks that flags can be used together, and that no flag is missing that another flag needs.

    Args:
        values: The values of flags by name.

    Raises:
        InputError: If flags cannot be used together, or if a needed flag is missing.
    """
    for flag_name in values:
        for excluded_flag_name in FLAGS[flag_name].excluded_flags:
            if excluded_flag_name in values:
                raise InputError(
                    f"--{flag_name} and --{excluded_flag_name} cannot be used together"
                )
    for flag_name in values:
        if not FLAGS[flag_name].needs:
            continue
        alternative_flag_names = FLAGS[flag_name].needs.split(" or ")
        if not any(
            alternative_flag_name in values for alternative_flag_name in alternative_flag_names
        ):
            needed_flags_phrase = " or ".join(
                f"--{alternative_flag_name}" for alternative_flag_name in alternative_flag_names
            )
            raise InputError(f"--{flag_name}: needs {needed_flags_phrase}")
    if "model_path" not in values:
        if "verify_samples" in values:
            raise InputError("--verify_samples: needs --model_path")
        inspection_flag_names = [
            inspection_flag_name
            for inspection_flag_name in INSPECTION_FLAGS
            if inspection_flag_name in values
        ]
        for flag_name in ("model_revision", "lora", "encode"):
            if flag_name in values and inspection_flag_names:
                raise InputError(
                    f"--{flag_name}: needs --model_path if --{inspection_flag_names[0]} is given"
                )
    mode_flags = [f"--{mode_name}" for mode_name in MODES if mode_name in values]
    if "plan" in values and "overwrite" in values:
        # --plan and --overwrite do not conflict, because --plan estimates the run that the other
        # flags would start, and --overwrite may be one of these flags.
        mode_flags.remove("--overwrite")
    if len(mode_flags) > 1:
        raise InputError(f"{' and '.join(mode_flags)} cannot be used together")
    if values.get("compress_shards") and values.get("shard_format") == "safetensors":
        raise InputError(
            "--compress_shards: safetensors are never compressed, so that ranges of them can be "
            "read; leave it out, or choose pickle"
        )
    if "mesh_shape" in values and not values.get("use_data_parallel", True):
        raise InputError("--mesh_shape and --no_data_parallel cannot be used together")


def _check_hosts(values: ValueByFlagName) -> None:
    """Checks the flags that describe the hosts of a pod.

    Args:
        values: The values of flags by name.

    Raises:
        InputError: If some of these flags are given without the others, or if the number of the
            host is too large.
    """
    host_flag_names = ("coordinator_address", "host_id", "num_hosts")
    present_host_flag_names = [flag_name for flag_name in host_flag_names if flag_name in values]
    missing_host_flag_names = [
        flag_name for flag_name in host_flag_names if flag_name not in values
    ]
    if present_host_flag_names and missing_host_flag_names:
        raise InputError(
            f"--{missing_host_flag_names[0]}: is missing; --{present_host_flag_names[0]} needs it"
        )
    if present_host_flag_names and values["host_id"] >= values["num_hosts"]:
        raise InputError(
            f"--host_id {values['host_id']}: out of range for --num_hosts {values['num_hosts']}; "
            "hosts are counted from 0"
        )


def _dependent_values(values: ValueByFlagName) -> ValueByFlagName:
    """Returns the values of the flags whose defaults depend on other flags.

    Args:
        values: Name -> value of each flag that the user or an environment variable sets.

    Returns:
        Name -> value of these flags: the value in `values` if the flag is set, otherwise the
        default that the other flags determine. The result need not contain all of these flags. A
        flag that it does not contain has its value in `values`, or its default in flags.py.
    """
    recomputes_samples = "verify" in values and "model_path" in values
    is_shard_format_compressible = values.get("shard_format") != "safetensors"
    value_by_dependent_flag: ValueByFlagName = {
        "verify_samples": 0,
        "compress_shards": is_shard_format_compressible and values.get("compress_shards", True),
    }
    if recomputes_samples:
        default_num_verified_samples = InspectionOptions.verify_samples
        value_by_dependent_flag["verify_samples"] = values.get(
            "verify_samples", default_num_verified_samples
        )
    if not {"dataset_path", "mix", "demo"} & values.keys():
        value_by_dependent_flag["dataset_name"] = values.get("dataset_name", DEFAULT_DATASET.name)
        if "dataset_name" not in values:
            default_dataset_config_name = DEFAULT_DATASET.config_name
            value_by_dependent_flag["dataset_config"] = values.get(
                "dataset_config", default_dataset_config_name
            )
    if "demo" in values:
        value_by_dependent_flag["max_seq_length"] = values.get(
            "max_seq_length", DEMO_MAX_SEQ_LENGTH
        )
    if "mesh_shape" in values:
        value_by_dependent_flag["mesh_type"] = values.get("mesh_type")
    return value_by_dependent_flag


def _check_values(config: Config) -> None:
    """Checks that the values of flags, including defaults, are consistent.

    Raises:
        InputError: If values are inconsistent.
    """
    output_options = config.output_options
    storage_options = config.storage_options
    host_options = config.host_options
    if "://" in output_options.output_dir and not config.inspection_options.requested:
        raise InputError(
            f"--output_dir {output_options.output_dir}: is a URL, expected a local folder; "
            "to store shards in a bucket, use --upload_to_gcs with --gcs_bucket and --gcs_prefix"
        )
    if (
        config.hook_options.activation_dtype == "float8"
        and storage_options.shard_format != "safetensors"
    ):
        raise InputError("--activation_dtype float8: needs --shard_format safetensors")
    _check_text(config.text_options)
    waiting_shards_gb = storage_options.waiting_shards_gb
    min_waiting_shards_gb = 2 * storage_options.shard_size_gb
    if waiting_shards_gb is not None and waiting_shards_gb < min_waiting_shards_gb:
        raise InputError(
            f"--waiting_shards_gb {waiting_shards_gb:g}: has no room for two shards; give at least "
            f"{min_waiting_shards_gb:g}, or a smaller --shard_size_gb"
        )
    if host_options.machine_id >= host_options.total_machines:
        raise InputError(
            f"--machine_id {host_options.machine_id}: out of range for --total_machines "
            f"{host_options.total_machines}; machines are counted from 0"
        )


def _check_text(text: TextOptions) -> None:
    """Checks that the values of the flags about text are consistent.

    Raises:
        InputError: If values are inconsistent.
    """
    if text.positions.keeps_only_last_token_of_turn and text.messages_column is None:
        raise InputError("--positions last_of_turn: needs --messages_column")
    dropped_token_names = [
        token_id_or_name
        for token_id_or_name in text.drop_token_ids
        if isinstance(token_id_or_name, str)
    ]
    if dropped_token_names and text.ids_column is not None:
        raise InputError(
            f"--drop_token_ids {dropped_token_names[0]}: with --ids_column no tokenizer is read, "
            "which knows the names of tokens; give the id"
        )
    if text.overlap >= text.max_seq_length:
        raise InputError(
            f"--overlap {text.overlap}: expected less than --max_seq_length {text.max_seq_length}"
        )
    if text.overlap and text.long_documents != "split":
        raise InputError("--overlap: needs --long_documents split")
    for column_name in text.keep_columns:
        if column_name in SAMPLE_COLUMNS:
            raise InputError(
                f"--keep_columns {column_name}: the table of samples has a column of this name; "
                "rename the column of the data set"
            )
    if len(text.keep_columns) > MAX_COLUMNS:
        raise InputError(
            f"--keep_columns: names {len(text.keep_columns)} columns, expected at most "
            f"{MAX_COLUMNS}"
        )
    mixture_sources = [
        plain_url(path_or_hub_dataset_name) for path_or_hub_dataset_name, _ in text.mix
    ]
    for source in mixture_sources:
        if mixture_sources.count(source) > 1:
            raise InputError(f"--mix: names {source} twice")
    if not text.positions.may_keep(text.max_seq_length):
        raise InputError(
            f"--positions {text.positions}: keeps no token of any sample; samples have at most "
            f"{counted(text.max_seq_length, 'token')} (--max_seq_length), with positions from 0"
        )


def check_flags() -> int:
    """Checks the flags of this process.

    Returns:
        The exit status 0.

    Raises:
        InputError: If a flag has an invalid value, or if flags are inconsistent.
        SystemExit: If --help or --version has been printed.
    """
    parse_args()
    return 0


if __name__ == "__main__":
    make_streams_safe()
    sys.exit(exit_status(check_flags))
