"""--report: one HTML file about a run, from a sample of its shards. Needs matplotlib.

It works while the run goes on, from a local folder or a bucket, and runs no pickled code.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.common.visible import say
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.folders import read_folders
from activation_extraction.inspect.report_analysis import analyse, position_buckets
from activation_extraction.inspect.report_run import (
    Throughput,
    describe,
    intervals,
    lengths_of,
    padding,
    read_metrics,
    throughput,
)
from activation_extraction.inspect.report_sample import read_sample
from activation_extraction.inspect.report_text import find_tokenizer
from activation_extraction.store.atomic_file import write_bytes
from activation_extraction.store.folder import Folder
from activation_extraction.store.metadata import METADATA, METRICS, Stored, identity_of
from activation_extraction.store.reasons import reason_of

NAME = "report.html"


def show_report(root: Folder, file: str) -> int:
    """Writes the report and prints its path; returns the exit status.

    file: where to; "" means report.html, beside metadata.json of a local folder, else in the
    working directory. Raises InputError, also when nothing is stored or matplotlib is missing.
    """
    folders = read_folders(root)
    target = Path(file or (root.fetch(NAME, Path()) if root.local else NAME)).expanduser()
    if find_spec("matplotlib") is None:
        raise InputError(
            "--report: needs matplotlib; in the folder of the checkout run: pip install '.[report]'"
        )
    if target.is_dir() or not target.parent.is_dir():
        raise InputError(f"--report {target}: expected a file in a folder that exists")
    html = make_report(root, folders)
    try:
        write_bytes(target, html.encode())
    except OSError as error:
        raise InputError(f"--report {target}: {reason_of(error)[0]}") from error
    say(f"report: {target}")
    return 0


def make_report(root: Folder, folders: dict[str, Stored]) -> str:
    """The HTML file. Raises InputError when nothing is stored, RunError when a shard is damaged."""
    from activation_extraction.inspect.report_page import Content, page  # imports matplotlib

    commits = [commit for stored in folders.values() for commit in stored.in_order]
    if not sum(commit.tokens for commit in commits):
        raise InputError(f"{root.url}: no {'token' if commits else 'shard'} is stored yet")
    try:
        dataset = ActivationDataset(root.given)
        sample = read_sample(dataset, commits)
    except ValueError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise RunError(str(error)) from error
    run = describe(folders, dataset.metadata)
    identity = identity_of(dataset.metadata, METADATA)
    speed, packed = _measured(root, folders)
    return page(
        Content(
            run,
            sample,
            position_buckets(sample.position),
            analyse(sample, dataset.hooks),
            dataset.statistics,
            lengths_of(sample.documents, run, identity.max_seq_length, packed)
            if identity.every_token
            else None,
            speed,
            find_tokenizer(dataset.metadata),
        )
    )


def _measured(
    root: Folder, folders: Mapping[str, Stored]
) -> tuple[Throughput | None, float | None]:
    """Throughput of all hosts, and the share of padding of the first one that tells it."""
    hosts, packed = [], None
    for name, stored in folders.items():
        lines = read_metrics(root.child(name), stored.files.get(METRICS, 0))
        hosts.append(intervals(lines))
        told = stored.metadata or {}
        rows = told.get("configuration", {}).get("batch_size")
        if packed is None and rows is not None:
            packed = padding(lines, rows * told["identity"]["max_seq_length"])
    return throughput(hosts), packed
