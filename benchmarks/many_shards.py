"""Measures how fast a run of many shards is read from a bucket: `python -m benchmarks.many_shards`.

A run of a thousand shards of 1 GB contains more data than any cache of a reader. The files of all
shards are hard links to the files of one shard, and only the JSON files differ. So the run takes
1 GB on the disk and in the page cache. bucket_server.py serves the run, and counts requests and
bytes.

A scenario is an order of reading, with or without filters (such as roles) that only some tokens
pass. A pass reads `--mb` MB of activations. In shuffled order, it reads the part of one of several
workers. The number of workers is chosen so that the part has this size, and the tokens of the part
are spread over the whole run. In stored order, it reads all tokens of a run that has fewer shards.

one_pass.py makes a pass and describes the figures. It makes a new dataset for every pass, so every
shard is opened again. With `--against CHECKOUT`, the reader of another checkout is measured as
well, and the order of the two readers changes in each round. Figures are medians over the rounds.
The figure `passed` is the fraction of the tokens that pass the filters. The reader also downloads
the bytes of other tokens if they lie between tokens that pass. So it may download more than this
fraction of the bytes.

The last line printed is one JSON object with the figures.
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

# The number of tokens of a sample in the scenarios whose names begin with "short samples".
SHORT_SAMPLE_TOKENS = 48
# The fraction of the samples that the filter `where` keeps, in the scenario with this filter.
KEPT_FRACTION = 0.9
READER_SCRIPT = Path(__file__).with_name("one_pass.py")


class Scenario(NamedTuple):
    """A way to read a run.

    Attributes:
        single_shard_run: Run with a single shard. The run that is read consists of many copies of
            this shard.
        batch_option_by_name: Name of a keyword argument of `ActivationDataset.batches` -> argument.
        kept_sample_fraction: Fraction of the samples that pass the filter `where`. 1 for no filter.
    """

    single_shard_run: Run
    batch_option_by_name: dict[str, Any]
    kept_sample_fraction: float = 1.0


def scenarios(shard_bytes: int) -> dict[str, Scenario]:
    """Returns the scenarios that are measured, each of which is a way to read a run.

    Args:
        shard_bytes: The number of bytes of activations in a shard, at all hooks together.

    Returns:
        Name of a scenario -> scenario.
    """
    # The largest size of a shard is twice the size of all activations, so the run has one shard.
    max_shard_bytes = 2 * shard_bytes

    def describe_run(num_hooks: int, width: int, **fields: Any) -> Run:
        return Run(
            shard_bytes // num_hooks,
            num_hooks=num_hooks,
            activation_width=width,
            max_shard_bytes=max_shard_bytes,
            **fields,
        )

    shuffle_options = {"shuffle": 0}
    run_of_short_samples = describe_run(
        1, 896, has_conversations=True, tokens_per_sample=SHORT_SAMPLE_TOKENS
    )
    role_options = {**shuffle_options, "roles": ["system", "user", "assistant"]}
    return {
        "one of one, width 896, shuffled": Scenario(describe_run(1, 896), shuffle_options),
        "one of one, width 896, in order": Scenario(describe_run(1, 896), {}),
        "one of one, width 3584, shuffled": Scenario(describe_run(1, 3584), shuffle_options),
        "one of one, width 3584, in order": Scenario(describe_run(1, 3584), {}),
        "one of 14, width 896, shuffled": Scenario(describe_run(14, 896), shuffle_options),
        "one of 14, width 896, in order": Scenario(describe_run(14, 896), {}),
        "short samples, skip_first": Scenario(
            run_of_short_samples, {**shuffle_options, "skip_first": 1}
        ),
        "short samples, roles": Scenario(run_of_short_samples, role_options),
        "short samples, where": Scenario(run_of_short_samples, shuffle_options, KEPT_FRACTION),
    }


def multiply(source: Path, folder: Path, num_shards: int) -> None:
    """Makes a run of many equal shards, unless the folder already contains the run.

    Args:
        source: The folder of a run with one shard.
        folder: The folder of the new run. All files in it are hard links, except the JSON files.
        num_shards: The number of shards.
    """
    if (folder / METADATA).exists():
        return
    folder.mkdir()
    source_commit = unseal((source / commit_name(1)).read_bytes(), commit_name(1))
    facts_by_file_name = source_commit["files"]
    for shard_number in range(1, num_shards + 1):
        # Name of a file of the only shard in `source` -> name of the link to this file.
        link_name_by_file_name = {
            file_name: file_name.replace("_0001", f"_{shard_number:04d}")
            for file_name in facts_by_file_name
        }
        for file_name, link_name in link_name_by_file_name.items():
            os.link(source / file_name, folder / link_name)
        new_commit = {
            **source_commit,
            "number": shard_number,
            "file": link_name_by_file_name[source_commit["file"]],
            "files": {
                link_name_by_file_name[file_name]: facts_by_file_name[file_name]
                for file_name in facts_by_file_name
            },
        }
        (folder / commit_name(shard_number)).write_bytes(seal(new_commit))
    run_metadata = unseal((source / METADATA).read_bytes(), METADATA)
    (folder / METADATA).write_bytes(seal({**run_metadata, "shards": num_shards}))


def passing_fraction(folder: Path, scenario: Scenario) -> float:
    """Returns the fraction of the tokens of a local run that pass the filters of a scenario.

    Args:
        folder: The folder of the run.
        scenario: The scenario, which contains the filters in `batch_option_by_name` and
            `kept_sample_fraction`.
    """
    dataset = ActivationDataset(str(folder))
    batch_option_by_name = dict(scenario.batch_option_by_name)
    if scenario.kept_sample_fraction < 1:
        batch_option_by_name["where"] = mask_of(len(dataset), scenario.kept_sample_fraction)
    batches = dataset.batches(2**16, [], **batch_option_by_name)
    return sum(len(batch) for batch in batches) / dataset.tokens


def measure_reader(
    checkout: Path, scenario: Scenario, folder: str, workers: int
) -> dict[str, float]:
    """Measures how fast a version of this tool reads a run, in a new process.

    Args:
        checkout: The folder of a checkout of this repository, whose reader is measured.
        scenario: The way to read the run.
        folder: The name of the run's folder in the bucket.
        workers: The number of workers among which the run is divided. Only the part of the first
            worker is read.

    Returns:
        The figures that one_pass.py prints (see its function `measure`).
    """
    batch_option_by_name = {**scenario.batch_option_by_name, "workers": workers}
    reader_command = [
        sys.executable,
        "-P",
        str(READER_SCRIPT),
        f"gs://{BUCKET}/{folder}",
        scenario.single_shard_run.name_of_read_hook,
    ]
    reader_command += [
        "--options",
        json.dumps(batch_option_by_name),
        "--keep",
        str(scenario.kept_sample_fraction),
    ]
    reader_environment = {**os.environ, "PYTHONPATH": str(checkout)}
    reader_process = subprocess.run(
        reader_command, env=reader_environment, check=True, stdout=subprocess.PIPE, text=True
    )
    figure_by_name: dict[str, float] = json.loads(reader_process.stdout)
    return figure_by_name


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shards",
        dest="num_shards",
        metavar="SHARDS",
        type=int,
        default=1000,
        help="of a run (default: 1000)",
    )
    parser.add_argument("--shard_mb", type=float, default=1000.0, help="of a shard (default: 1000)")
    parser.add_argument(
        "--mb",
        dest="mb_per_pass",
        metavar="MB",
        type=float,
        default=1000.0,
        help="of activations in a pass (default: 1000)",
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
    parsed_flags = parser.parse_args(argv)
    if parsed_flags.quick:
        parsed_flags.num_shards = 20
        parsed_flags.shard_mb = 60.0
        parsed_flags.mb_per_pass = 20.0
        parsed_flags.rounds = 1
    checkout_path_by_reader_name = {"this": ROOT}
    if parsed_flags.against:
        checkout_path_by_reader_name = {"other": parsed_flags.against.resolve(), "this": ROOT}
    result_table_rows = []
    figures_by_scenario_name: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary_folder:
        root_folder = parsed_flags.folder or Path(temporary_folder)
        chosen_scenarios = scenarios(int(parsed_flags.shard_mb * 1e6))
        for scenario_name in [
            scenario_name
            for scenario_name in chosen_scenarios
            if parsed_flags.only not in scenario_name
        ]:
            del chosen_scenarios[scenario_name]
        folder_by_scenario_name = {}
        num_workers_by_scenario_name = {}
        for scenario_name, (single_shard_run, batch_option_by_name, _) in chosen_scenarios.items():
            single_shard_run.store(root_folder / single_shard_run.folder)
            worker_count = max(
                round(
                    single_shard_run.bytes_per_hook
                    * parsed_flags.num_shards
                    / 1e6
                    / parsed_flags.mb_per_pass
                ),
                1,
            )
            is_shuffled = "shuffle" in batch_option_by_name
            num_workers_by_scenario_name[scenario_name] = worker_count if is_shuffled else 1
            shard_count = (
                parsed_flags.num_shards
                if is_shuffled
                else max(parsed_flags.num_shards // worker_count, 1)
            )
            folder_by_scenario_name[scenario_name] = (
                f"{single_shard_run.folder}_times_{shard_count}"
            )
            multiply(
                root_folder / single_shard_run.folder,
                root_folder / folder_by_scenario_name[scenario_name],
                shard_count,
            )
        with bucket_server(root_folder, parsed_flags.latency, RATE):
            for scenario_name, scenario in chosen_scenarios.items():
                figures_of_rounds_by_reader_name: dict[str, list[dict[str, float]]] = {
                    reader_name: [] for reader_name in checkout_path_by_reader_name
                }
                for round_number in range(parsed_flags.rounds):
                    for reader_name in sorted(
                        checkout_path_by_reader_name, reverse=round_number % 2 == 1
                    ):
                        figure_by_name = measure_reader(
                            checkout_path_by_reader_name[reader_name],
                            scenario,
                            folder_by_scenario_name[scenario_name],
                            num_workers_by_scenario_name[scenario_name],
                        )
                        figures_of_rounds_by_reader_name[reader_name].append(figure_by_name)
                passing_token_fraction = round(
                    passing_fraction(root_folder / scenario.single_shard_run.folder, scenario), 3
                )
                for reader_name, figures_of_rounds in figures_of_rounds_by_reader_name.items():
                    median_by_figure_name = {
                        figure_name: round(figure, 3)
                        for figure_name, figure in medians(figures_of_rounds).items()
                    }
                    figures_by_scenario_name.setdefault(scenario_name, {})[reader_name] = (
                        median_by_figure_name
                    )
                    figures_by_scenario_name[scenario_name]["passed"] = passing_token_fraction
                    result_table_row = {
                        "scenario": scenario_name,
                        "reader": reader_name,
                        "passed": passing_token_fraction,
                        **median_by_figure_name,
                    }
                    result_table_rows.append(result_table_row)
                    print(json.dumps(result_table_row), flush=True)
    print_table(result_table_rows)
    print_result({"scenarios": figures_by_scenario_name})


if __name__ == "__main__":
    main()
