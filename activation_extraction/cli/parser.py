"""The command line and --help, both made from the table of flags in flags.py."""

import argparse
import re
from typing import NoReturn

from activation_extraction import __version__
from activation_extraction.cli.flags import FLAGS, GROUPS
from activation_extraction.common.errors import InputError, near_miss


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
        description="Turns a Qwen checkpoint and a stream of text into shards of activations.",
        epilog=_epilog(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    # As in Python 3.14: what begins with - and a digit, such as the slice -8:, is a value.
    parser._negative_number_matcher = re.compile(r"-\.?\d")
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

exit status: 0 done; 1 failed on the way, or --verify or --status found a problem; 2 bad input;
130 or 143 stopped by Ctrl-C or SIGTERM (complete samples are stored). A scheduler should never
retry 2.
"""
