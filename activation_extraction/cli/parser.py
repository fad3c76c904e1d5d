"""The command line and --help, both made from the table of flags in flags.py."""

import argparse
import os
import re
import sys
from typing import Any, NoReturn

from activation_extraction import __version__
from activation_extraction.cli.flags import FLAGS, GROUPS
from activation_extraction.common.errors import InputError, near_miss
from activation_extraction.common.positions import SLICE


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

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Takes a slice such as -8: for the value that it is, and not for a flag.

        Bytes that are not UTF-8 are refused: neither JSON nor the names in a bucket can have them.
        """
        joined: list[str] = []
        for typed in sys.argv[1:] if args is None else args:
            try:
                typed.encode()
            except UnicodeEncodeError:
                flags = [each for each in (*joined, typed) if each.startswith("--")]
                name = flags[-1].partition("=")[0] if flags else ""
                self.error(f"argument {name}: is not UTF-8: {ascii(typed)}{_remedy(typed)}")
            if SLICE.fullmatch(typed) and joined and joined[-1] == "--positions":
                joined[-1] += f"={typed}"
            else:
                joined.append(typed)
        return super().parse_known_args(joined, namespace)


def _remedy(typed: str) -> str:
    """Returns what helps where the bytes are UTF-8 and Python decodes them in another way."""
    try:
        os.fsencode(typed).decode()
    except UnicodeError:
        return ""
    return f"; Python takes it for {sys.getfilesystemencoding()}: set PYTHONUTF8=1"


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of all flags. What it parses has only the flags that were given."""
    parser = _Parser(
        prog="extract_activations.py",
        description="Turns a Qwen checkpoint and a stream of text into shards of activations.",
        epilog=epilog(),
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


def epilog() -> str:
    """Returns the end of --help: examples, files, environment variables, the prompt for ARC-AGI."""
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
  extract_activations.py --model_path Qwen/Qwen2.5-0.5B --layers_to_extract 12 --max_samples 1000
      1000 documents of FineWeb-Edu through a model from the hub
  extract_activations.py --model_path ./my-qwen --dataset_path texts.jsonl.gz --output_dir out
      your own model and texts
  extract_activations.py --model_path ./my-qwen --upload_to_gcs --gcs_bucket B --gcs_prefix run1
      shards go to gs://B/run1/machine_000; if the run is killed, the same command continues it
  extract_activations.py --status --output_dir gs://B/run1
      how far the run has come

what is written, to --output_dir or to gs://BUCKET/PREFIX/machine_000:
  shard_0001.pkl.gz  a gzipped pickle: {layer or hook name: [record, ...]}, one record per sample,
                     with sample_idx, hook, activation (tokens, width), shape, text_preview,
                     token_ids and doc_id; or shard_0001.safetensors (--shard_format)
  shard_0001.samples.parquet  its samples: doc_id, row of the data set, what was cut off, preview
  shard_0001.npz     sums for the statistics of every dimension
  shard_0001.json    commits these files: checksums, statistics, and where in the data to continue
  metadata.json      the status, totals, configuration, model and versions of the run
  metrics.jsonl      speed and queues over time
  Each of several machines or hosts has its own folder: machine_000, machine_000_host_00, ...

read it:
  from activation_extraction import ActivationDataset
  sample = ActivationDataset("out")[7]  # its activations by hook, token_ids, text_preview, ...
or one shard, without this program:
  import gzip, pickle
  records = pickle.loads(gzip.open("out/shard_0001.pkl.gz").read())  # {layer: [record, ...]}

environment variables that stand in for flags that are not given:
"""
AFTER_ENVIRONMENT = """
  HF_TOKEN gives access to private and gated repositories of the Hugging Face hub.

rows with ARC-AGI's columns train and test, and no text column, become this prompt; the outputs of
the tests are left for the model to find:
  Example 1
  Input:
  0 1
  Output:
  1 0

  Test 1
  Input:
  1 1
  Output:

exit status: 0 done; 1 failed on the way, or --verify or --status found a problem; 2 bad input;
130 or 143 stopped by Ctrl-C or SIGTERM (complete samples are stored). A scheduler should never
retry 2.
"""
