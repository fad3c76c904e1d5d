"""Measures reading a run of many shards from a bucket: `python -m benchmarks.many_shards`.

A run of a thousand shards of 1 GB contains more data than any cache of a reader. The files of all
shards are hard links to the files of one shard, and only the JSON files differ. So the run takes
1 GB on the disk and in the page cache. bucket_server.py serves the run, and counts requests and
bytes. Shuffled tokens are read as one of many workers, so that a pass reads `--mb` MB of
activations that are spread over the whole run. Tokens in order are read from a run of fewer such
shards, with `--mb` MB of activations.

one_pass.py describes the figures. It makes a new dataset for every pass, so every shard is opened
again. With `--against CHECKOUT`, the reader of another checkout is measured as well, and the order
of the two readers changes in each round. Figures are medians over the rounds. `passed` is the
fraction of the tokens that pass the filters. The bytes of the other tokens are often read with
them. The last line printed is one JSON object.
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

# The number of tokens of a short sample.
SHORT = 48
# The fraction of the samples that the filter `where` keeps.
KEPT = 0.9
READER = Path(__file__).with_name("one_pass.py")


class Scenario(NamedTuple):
    """A way to read a run.

    Attributes:
        run: Run with a single shard, of which the run that is read consists.
        options: Options of the batches (see `ActivationDataset.batches`).
        keep: Fraction of the samples that pass the filter `where`. 1 for no filter.
    """

    run: Run
    options: dict[str, Any]
    keep: float = 1.0


def scenarios(shard_bytes: int) -> dict[str, Scenario]:
    """Returns the scenarios by name.

    Args:
        shard_bytes: The number of bytes of a shard.
    """
    # With this size, the run has a single shard.
    max_shard_bytes = 2 * shard_bytes

    def run(hooks: int, width: int, **fields: Any) -> Run:
        return Run(shard_bytes // hooks, hooks=hooks, width=width, shard=max_shard_bytes, **fields)

    shuffled = {"shuffle": 0}
    short_samples = run(1, 896, chat=True, length=SHORT)
    roles = {**shuffled, "roles": ["system", "user", "assistant"]}
    return {
        "one of one, width 896, shuffled": Scenario(run(1, 896), shuffled),
        "one of one, width 896, in order": Scenario(run(1, 896), {}),
        "one of one, width 3584, shuffled": Scenario(run(1, 3584), shuffled),
        "one of one, width 3584, in order": Scenario(run(1, 3584), {}),
        "one of 14, width 896, shuffled": Scenario(run(14, 896), shuffled),
        "one of 14, width 896, in order": Scenario(run(14, 896), {}),
        "short samples, skip_first": Scenario(short_samples, {**shuffled, "skip_first": 1}),
        "short samples, roles": Scenario(short_samples, roles),
        "short samples, where": Scenario(short_samples, shuffled, KEPT),
    }


def multiply(source: Path, folder: Path, shards: int) -> None:
    """Makes a run of many equal shards, unless the folder already contains the run.

    Args:
        source: The folder of a run with one shard.
        folder: The folder of the new run. All files in it are hard links, except the JSON files.
        shards: The number of shards.
    """
    if (folder / METADATA).exists():
        return
    folder.mkdir()
    commit = unseal((source / commit_name(1)).read_bytes(), commit_name(1))
    facts_of_file = commit["files"]
    for shard_number in range(1, shards + 1):
        # Name of a file of the only shard -> name of the link in the new shard.
        name_of_link = {
            name: name.replace("_0001", f"_{shard_number:04d}") for name in facts_of_file
        }
        for name, link_name in name_of_link.items():
            os.link(source / name, folder / link_name)
        new_commit = {
            **commit,
            "number": shard_number,
            "file": name_of_link[commit["file"]],
            "files": {name_of_link[name]: facts_of_file[name] for name in facts_of_file},
        }
        (folder / commit_name(shard_number)).write_bytes(seal(new_commit))
    metadata = unseal((source / METADATA).read_bytes(), METADATA)
    (folder / METADATA).write_bytes(seal({**metadata, "shards": shards}))


def passed(folder: Path, scenario: Scenario) -> float:
    """Returns the fraction of the tokens of a local run that pass the filters of a scenario.

    Args:
        folder: The folder of the run.
        scenario: The scenario.
    """
    dataset = ActivationDataset(str(folder))
    options = dict(scenario.options)
    if scenario.keep < 1:
        options["where"] = mask_of(len(dataset), scenario.keep)
    batches = dataset.batches(2**16, [], **options)
    return sum(len(batch) for batch in batches) / dataset.tokens


def read(checkout: Path, scenario: Scenario, folder: str, workers: int) -> dict[str, float]:
    """Measures the reader of a checkout in a new process.

    Args:
        checkout: The folder of the checkout.
        scenario: The scenario.
        folder: The name of the run's folder in the bucket.
        workers: The number of workers among which the run is divided. The share of the first worker
            is read.

    Returns:
        The figures that one_pass.py prints.
    """
    options = {**scenario.options, "workers": workers}
    command = [sys.executable, "-P", str(READER), f"gs://{BUCKET}/{folder}", scenario.run.read]
    command += ["--options", json.dumps(options), "--keep", str(scenario.keep)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    process = subprocess.run(
        command, env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    figures: dict[str, float] = json.loads(process.stdout)
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
    checkout_of_reader = {"this": ROOT}
    if arguments.against:
        checkout_of_reader = {"other": arguments.against.resolve(), "this": ROOT}
    rows = []
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary_folder:
        root_folder = arguments.folder or Path(temporary_folder)
        chosen_scenarios = scenarios(int(arguments.shard_mb * 1e6))
        for name in [name for name in chosen_scenarios if arguments.only not in name]:
            del chosen_scenarios[name]
        folder_of_scenario = {}
        workers_of_scenario = {}
        for name, (run, options, _) in chosen_scenarios.items():
            run.store(root_folder / run.folder)
            num_workers = max(round(run.bytes * arguments.shards / 1e6 / arguments.mb), 1)
            is_shuffled = "shuffle" in options
            workers_of_scenario[name] = num_workers if is_shuffled else 1
            num_shards = (
                arguments.shards if is_shuffled else max(arguments.shards // num_workers, 1)
            )
            folder_of_scenario[name] = f"{run.folder}_times_{num_shards}"
            multiply(root_folder / run.folder, root_folder / folder_of_scenario[name], num_shards)
        with bucket_server(root_folder, arguments.latency, RATE):
            for name, scenario in chosen_scenarios.items():
                figures_of_reader: dict[str, list[dict[str, float]]] = {
                    reader: [] for reader in checkout_of_reader
                }
                for round_number in range(arguments.rounds):
                    for reader in sorted(checkout_of_reader, reverse=round_number % 2 == 1):
                        figures = read(
                            checkout_of_reader[reader],
                            scenario,
                            folder_of_scenario[name],
                            workers_of_scenario[name],
                        )
                        figures_of_reader[reader].append(figures)
                passed_fraction = round(passed(root_folder / scenario.run.folder, scenario), 3)
                for reader, figures_of_rounds in figures_of_reader.items():
                    figures = {
                        key: round(value, 3) for key, value in medians(figures_of_rounds).items()
                    }
                    results.setdefault(name, {})[reader] = figures
                    results[name]["passed"] = passed_fraction
                    row = {"scenario": name, "reader": reader, "passed": passed_fraction, **figures}
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    print_table(rows)
    print_result({"scenarios": results})


if __name__ == "__main__":
    main()
