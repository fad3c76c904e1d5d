"""Measures reading a run of many shards from a bucket: `python -m benchmarks.many_shards`.

A run of a thousand shards of 1 GB has more of everything than a cache could hold. It is stored as
one shard of which all other shards are hard links, with a JSON for each, so that it takes 1 GB on
the disk and in the page cache. benchmarks/bucket_server.py serves it, and counts the requests and
the bytes. Shuffled tokens are read as one of many workers, so that a pass has `--mb` of activations
from all over the run. Tokens in order are read from a run of the same shards that has only `--mb`.

benchmarks/one_pass.py describes the figures. It reads with datasets of its own in every pass, so
every shard is opened anew. With `--against CHECKOUT`, the reader of another checkout takes turns
with this one, before and after it. Figures are medians over the rounds. `passed` is the share of
the tokens that pass the filters: the bytes of the others are read with them. The last line printed
is one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from activation_extraction import ActivationDataset
from activation_extraction.store.run_log import METADATA, commit_name, seal, unseal
from benchmarks.bucket_server import BUCKET, RATE, bucket_server
from benchmarks.one_pass import mask_of
from benchmarks.processes import ROOT, medians, print_result, print_table
from benchmarks.reading import Run

SHORT = 48  # tokens of a short sample
KEPT = 0.9  # share of the samples that the filter `where` keeps
READER = Path(__file__).with_name("one_pass.py")


class Scenario(NamedTuple):
    """A way to read a run.

    Attributes:
        run: The run, as one shard.
        options: Options of the batches.
        keep: Share of the samples that pass the filter `where`; 1 for no filter.
    """

    run: Run
    options: dict[str, Any]
    keep: float = 1.0


def scenarios(shard: int) -> dict[str, Scenario]:
    """Returns the scenarios by name.

    Args:
        shard: Bytes of a shard.
    """
    room = 2 * shard  # no shard is cut

    def run(hooks: int, width: int, **kind: Any) -> Run:
        return Run(shard // hooks, hooks=hooks, width=width, shard=room, **kind)

    shuffled = {"shuffle": 0}
    short = run(1, 896, chat=True, length=SHORT)
    content = {**shuffled, "roles": ["system", "user", "assistant"]}
    return {
        "one of one, width 896, shuffled": Scenario(run(1, 896), shuffled),
        "one of one, width 896, in order": Scenario(run(1, 896), {}),
        "one of one, width 3584, shuffled": Scenario(run(1, 3584), shuffled),
        "one of one, width 3584, in order": Scenario(run(1, 3584), {}),
        "one of 14, width 896, shuffled": Scenario(run(14, 896), shuffled),
        "one of 14, width 896, in order": Scenario(run(14, 896), {}),
        "short samples, skip_first": Scenario(short, {**shuffled, "skip_first": 1}),
        "short samples, roles": Scenario(short, content),
        "short samples, where": Scenario(short, shuffled, KEPT),
    }


def multiply(source: Path, folder: Path, shards: int) -> None:
    """Makes a run of many equal shards, unless `folder` already contains it.

    Args:
        source: Folder of a run with one shard.
        folder: Folder of the new run. Its files are hard links, except for the JSON files.
        shards: Number of shards.
    """
    if (folder / METADATA).exists():
        return
    folder.mkdir()
    commit = unseal((source / commit_name(1)).read_bytes(), commit_name(1))
    facts = commit["files"]
    for number in range(1, shards + 1):
        names = {name: name.replace("_0001", f"_{number:04d}") for name in facts}
        for name, copy in names.items():
            os.link(source / name, folder / copy)
        files = {names[name]: facts[name] for name in facts}
        copied = {**commit, "number": number, "file": names[commit["file"]], "files": files}
        (folder / commit_name(number)).write_bytes(seal(copied))
    metadata = unseal((source / METADATA).read_bytes(), METADATA)
    (folder / METADATA).write_bytes(seal({**metadata, "shards": shards}))


def passed(folder: Path, scenario: Scenario) -> float:
    """Returns the share of the tokens of a local run that pass the filters of a scenario."""
    dataset = ActivationDataset(str(folder))
    options = dict(scenario.options)
    if scenario.keep < 1:
        options["where"] = mask_of(len(dataset), scenario.keep)
    batches = dataset.batches(2**16, [], **options)
    return sum(len(batch) for batch in batches) / dataset.tokens


def read(checkout: Path, scenario: Scenario, folder: str, workers: int) -> dict[str, float]:
    """Returns the figures of the reader of a checkout, which runs in a process of its own.

    Args:
        checkout: Folder of the checkout.
        scenario: The scenario.
        folder: Name of the run's folder in the bucket.
        workers: Number of shares, of which the first is read.
    """
    options = {**scenario.options, "workers": workers}
    command = [sys.executable, "-P", str(READER), f"gs://{BUCKET}/{folder}", scenario.run.read]
    command += ["--options", json.dumps(options), "--keep", str(scenario.keep)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=1000, help="of a run (default: 1000)")
    parser.add_argument("--shard_mb", type=float, default=1000.0, help="of a shard (default: 1000)")
    parser.add_argument(
        "--mb", type=float, default=1000.0, help="of activations in a pass (default: 1000)"
    )
    parser.add_argument(
        "--latency", type=float, default=30.0, help="ms before each answer (default: 30)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of the medians (default: 3)")
    parser.add_argument("--only", default="", help="measure scenarios whose names contain this")
    parser.add_argument(
        "--against", type=Path, metavar="CHECKOUT", help="measure its reader, too, in turns"
    )
    parser.add_argument(
        "--folder", type=Path, help="keep the runs in this folder (default: a temporary one)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="a smoke test: 20 shards of 60 MB, 20 MB in a pass"
    )
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.shards, arguments.shard_mb, arguments.mb, arguments.rounds = 20, 60.0, 20.0, 1
    readers = {"this": ROOT}
    if arguments.against:
        readers = {"other": arguments.against.resolve(), "this": ROOT}
    rows = []
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.folder or Path(temporary)
        chosen = scenarios(int(arguments.shard_mb * 1e6))
        for name in [name for name in chosen if arguments.only not in name]:
            del chosen[name]
        folders = {}
        shares = {}
        for name, (run, options, _) in chosen.items():
            run.store(root / run.folder)
            passes = max(round(run.bytes * arguments.shards / 1e6 / arguments.mb), 1)
            is_shuffled = "shuffle" in options
            shares[name] = passes if is_shuffled else 1
            shards = arguments.shards if is_shuffled else max(arguments.shards // passes, 1)
            folders[name] = f"{run.folder}_times_{shards}"
            multiply(root / run.folder, root / folders[name], shards)
        with bucket_server(root, arguments.latency, RATE):
            for name, scenario in chosen.items():
                rounds: dict[str, list[dict[str, float]]] = {reader: [] for reader in readers}
                for number in range(arguments.rounds):
                    for reader in sorted(readers, reverse=number % 2 == 1):
                        figures = read(readers[reader], scenario, folders[name], shares[name])
                        rounds[reader].append(figures)
                share = round(passed(root / scenario.run.folder, scenario), 3)
                for reader, of_reader in rounds.items():
                    figures = {key: round(value, 3) for key, value in medians(of_reader).items()}
                    results.setdefault(name, {})[reader] = figures
                    results[name]["passed"] = share
                    row = {"scenario": name, "reader": reader, "passed": share, **figures}
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    print_table(rows)
    print_result({"scenarios": results})


if __name__ == "__main__":
    main()
