"""Writes the HTML file of --report, which describes a run from some of its shards.

The run may be in a local folder or a bucket, and need not be finished. Pickled code is never run.
The page is rendered from report.jinja, in which every value is escaped. Rendering needs matplotlib
and Jinja2. report_numbers.py computes the numbers, and report_charts.py draws the charts.
"""

import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from activation_extraction.common.errors import (
    InputError,
    RunError,
    install_extra_advice,
    reason_of,
)
from activation_extraction.common.visible import counted, say, visible
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.features import find_decoder
from activation_extraction.inspect import report_numbers
from activation_extraction.inspect.dataset_card import CARD_NAME, write_card
from activation_extraction.inspect.status import host_states, sum_of_host_totals
from activation_extraction.store.folder import Folder, FolderError, local_path
from activation_extraction.store.local_files import write_file
from activation_extraction.store.run_folders import read_folders
from activation_extraction.store.run_log import RunLog
from activation_extraction.store.statistics_lines import code_lines, code_warnings


def show_report(root: Folder, file: str) -> int:
    """Writes the report, and a dataset card beside it, and prints their paths.

    Args:
        root: The folder with the output of all hosts.
        file: The path of the HTML file. "" for report.html in the output if the run is local,
            otherwise in the working directory.

    Returns:
        The exit status, 0.

    Raises:
        InputError: If there is no run, no token is stored yet, a package is missing, or a file
            cannot be written.
        RunError: If a shard is damaged.
    """
    log_by_folder = read_folders(root)
    if file:
        report_path = Path(file)
    else:
        report_path = Path(local_path(root.full_url) if root.is_local else "", "report.html")
    for package_name in ("matplotlib", "jinja2"):
        if find_spec(package_name) is None:
            raise InputError(f"--report: needs {package_name}; {install_extra_advice('report')}")
    if report_path.is_dir() or not report_path.parent.is_dir():
        raise InputError(f"--report {report_path}: expected a file in a folder that exists")
    activation_dataset = _open_dataset(root, log_by_folder)
    report_html = make_report(activation_dataset, log_by_folder)
    try:
        write_file(report_path, [report_html.encode()])
    except (OSError, FolderError) as error:
        raise InputError(f"--report {report_path}: {reason_of(error)}") from error
    say(f"report: {report_path}")
    card_path = report_path.with_name(CARD_NAME)
    if write_card(activation_dataset, card_path):
        say(f"dataset card: {card_path}; to share the run on the hub, rename it to README.md")
    else:
        say(f"dataset card: {card_path} has been edited or is no card; it is left as it is")
    return 0


def _open_dataset(root: Folder, log_by_folder: dict[str, RunLog]) -> ActivationDataset:
    """Opens a run as a dataset.

    Args:
        root: The folder with the output of all hosts.
        log_by_folder: The run log of each folder, by the folder's name.

    Raises:
        InputError: If no token is stored yet, or the run cannot be read as a dataset.
        RunError: If a file is damaged or cannot be read.
    """
    commits = [commit for run_log in log_by_folder.values() for commit in run_log.commits_in_order]
    if not sum(commit.tokens for commit in commits):
        raise InputError(f"{root.url}: no {'token' if commits else 'shard'} is stored yet")
    try:
        return ActivationDataset(root.full_url)
    except ValueError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise RunError(str(error)) from error


def make_report(dataset: ActivationDataset, log_by_folder: dict[str, RunLog]) -> str:
    """Returns the report as HTML.

    Args:
        dataset: The run.
        log_by_folder: The run log of each folder, by the folder's name.

    Raises:
        InputError: If the shards that are read for the report contain no tokens.
        RunError: If a shard is damaged or cannot be read.
    """
    try:
        hook_names = [
            hook_name
            for hook_name, stored_hook in dataset.shards.stored_hook_by_name.items()
            if stored_hook.values_are_activations
        ]
        token_selection = report_numbers.select_tokens(dataset, hook_names)
    except ValueError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise RunError(str(error)) from error
    decode_token = None
    decoding_problem = ""  # the reason why token ids cannot be decoded; "" if they can
    try:
        decode_token = find_decoder(dataset)
    except LookupError as error:
        decoding_problem = str(error)
    hook_reports = []
    for hook_index, hook_name in enumerate(hook_names):
        hook_reports.append(report_numbers.HookReport(token_selection, hook_index, hook_name))
    statistics_by_hook = sum_of_host_totals(log_by_folder).statistics
    warning_lines = [
        f"Warning: {warning_line}" for warning_line in code_warnings(statistics_by_hook)
    ]
    return _template().render(
        dataset=dataset,
        identity=dataset.identity,
        hosts=host_states(log_by_folder),
        selection=token_selection,
        hooks=sorted(
            hook_reports, key=lambda hook: (hook.hook_kind_name, hook.layer_or_hook_number)
        ),
        decode=decode_token,
        undecoded=decoding_problem,
        codes=[*code_lines(statistics_by_hook), *warning_lines],
        throughput=report_numbers.throughput(
            run_log.commits_in_order for run_log in log_by_folder.values()
        ),
        now=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
    )


def _template() -> Any:
    """Returns the template of the report, a `jinja2.Template` of the file report.jinja.

    In each value that the template prints, `visible` replaces characters that cannot be seen, and
    HTML is escaped.
    """
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    # report_charts is imported here because it imports matplotlib, which is optional.
    from activation_extraction.inspect import report_charts

    jinja_environment = Environment(
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else visible(value),
        loader=PackageLoader("activation_extraction.inspect", ""),
    )
    jinja_environment.globals |= {"charts": report_charts, "outlier": report_numbers.OUTLIER}
    jinja_environment.globals |= {"counted": counted, "visible": visible}
    return jinja_environment.get_template("report.jinja")
