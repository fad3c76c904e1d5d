"""--report: writes an HTML file about a run, from a sample of its shards.

It works while the run goes on, from a local folder or a bucket, and runs no pickled code. The page
is made from report.jinja, where every value is escaped. It needs matplotlib and Jinja2.
"""

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from activation_extraction.common.errors import InputError, RunError, install_extra, reason_of
from activation_extraction.common.visible import counted, say, visible
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.features import find_decoder
from activation_extraction.inspect import report_numbers
from activation_extraction.inspect.status import host_states, totals_of
from activation_extraction.store.folder import Folder, FolderError, local_path
from activation_extraction.store.local_files import write_file
from activation_extraction.store.run_folders import read_folders
from activation_extraction.store.run_log import METADATA, RunLog, identity_of
from activation_extraction.store.statistics_in_words import code_warnings, codes_in_words


def show_report(root: Folder, file: str) -> int:
    """Writes the report of a run, and prints its path.

    Args:
        root: Output of the run.
        file: Path of the report. "" for report.html, beside metadata.json if the run is local, and
            otherwise in the working directory.

    Returns:
        The exit status.

    Raises:
        InputError: A package is missing, nothing is stored, or the file cannot be written.
        RunError: A shard is damaged.
    """
    folders, name = read_folders(root), "report.html"
    target = Path(file or (Path(local_path(root.given), name) if root.local else name))
    for library in ("matplotlib", "jinja2"):
        if find_spec(library) is None:
            raise InputError(f"--report: needs {library}; {install_extra('report')}")
    if target.is_dir() or not target.parent.is_dir():
        raise InputError(f"--report {target}: expected a file in a folder that exists")
    html = make_report(root, folders)
    try:
        write_file(target, [html.encode()])
    except (OSError, FolderError) as error:
        raise InputError(f"--report {target}: {reason_of(error)}") from error
    say(f"report: {target}")
    return 0


def make_report(root: Folder, folders: dict[str, RunLog]) -> str:
    """Returns the page. Raises InputError if nothing is stored, RunError if a shard is damaged."""
    commits = [commit for stored in folders.values() for commit in stored.in_order]
    if not sum(commit.tokens for commit in commits):
        raise InputError(f"{root.url}: no {'token' if commits else 'shard'} is stored yet")
    try:
        dataset = ActivationDataset(root.given)
        identity = identity_of(dataset.metadata, METADATA)
        names = [name for name, hook in dataset.shards.hooks.items() if hook.are_activations]
        sample = report_numbers.read_sample(dataset, names)
    except ValueError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise RunError(str(error)) from error
    decode, undecoded = None, ""
    try:
        decode = find_decoder(dataset)
    except LookupError as error:
        undecoded = str(error)
    hooks = [report_numbers.HookReport(sample, number, name) for number, name in enumerate(names)]
    statistics = totals_of(folders).statistics
    return _template().render(
        dataset=dataset,
        identity=identity,
        hosts=host_states(folders),
        sample=sample,
        hooks=sorted(hooks, key=lambda hook: (hook.kind, hook.layer)),
        decode=decode,
        undecoded=undecoded,
        codes=[
            *codes_in_words(statistics),
            *(f"Warning: {line}" for line in code_warnings(statistics)),
        ],
        throughput=report_numbers.throughput(stored.in_order for stored in folders.values()),
        now=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    )


def _template() -> Any:
    """Returns report.jinja, whose values are first made visible and then escaped."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    from activation_extraction.inspect import report_charts  # imports matplotlib

    environment = Environment(
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else visible(value),
        loader=PackageLoader("activation_extraction.inspect", ""),
    )
    environment.globals |= {"charts": report_charts, "outlier": report_numbers.OUTLIER}
    environment.globals |= {"counted": counted, "visible": visible}
    return environment.get_template("report.jinja")
