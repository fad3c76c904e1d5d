"""--report: writes an HTML file about a run, from a sample of its shards.

It works while the run goes on, from a local folder or a bucket, and runs no pickled code. The page
is made from report.jinja, where every value is escaped. It needs matplotlib and Jinja2.
"""

import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from activation_extraction.common.encodings import FLOAT8
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.common.visible import counted, say, visible
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.folders import read_folders
from activation_extraction.inspect import report_numbers
from activation_extraction.inspect.status import host_states, problems_of
from activation_extraction.store.commit import METADATA, METRICS
from activation_extraction.store.folder import Folder
from activation_extraction.store.local_files import write_bytes
from activation_extraction.store.metadata import Stored, identity_of
from activation_extraction.store.patience import reason_of

NAME = "report.html"
METRICS_BYTES = 16 * 2**20  # how much is read from the ends of all hosts' metrics together


def show_report(root: Folder, file: str) -> int:
    """Writes the report, prints its path, and returns the exit status.

    file: the path; "" means report.html, which goes beside metadata.json if the run is local, or
    else into the working directory. Raises InputError, also if nothing is stored or a library is
    missing.
    """
    folders = read_folders(root)
    target = Path(file or (root.fetch(NAME, Path()) if root.local else NAME))
    for library in ("matplotlib", "jinja2"):
        if find_spec(library) is None:
            how = "in the folder of the checkout run: pip install -e '.[report]'"
            raise InputError(f"--report: needs {library}; {how}")
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
    """Returns the page. Raises InputError if nothing is stored, RunError if a shard is damaged."""
    commits = [commit for stored in folders.values() for commit in stored.in_order]
    if not sum(commit.tokens for commit in commits):
        raise InputError(f"{root.url}: no {'token' if commits else 'shard'} is stored yet")
    try:
        dataset = ActivationDataset(root.given)
        identity = identity_of(dataset.metadata, METADATA)
        names = list(filter(identity.has_activations, dataset.hooks))
        sample = report_numbers.read_sample(dataset, commits, names)
    except ValueError as error:
        raise InputError(str(error)) from error
    except OSError as error:
        raise RunError(str(error)) from error
    buckets = report_numbers.position_buckets(sample.position)
    hooks = [
        report_numbers.analyse(sample, number, name, buckets) for number, name in enumerate(names)
    ]
    return _template().render(
        dataset=dataset,
        identity=identity,
        folders=folders.values(),
        hosts=host_states(folders),
        problems=[problem for stored in folders.values() for problem in problems_of(stored)],
        sample=sample,
        buckets=list(buckets),
        hooks=sorted(hooks, key=lambda hook: (hook.kind, hook.layer)),
        decode=find_tokenizer(dataset),
        throughput=report_numbers.throughput(_intervals(root, folders)),
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
    environment.globals |= {"counted": counted, "visible": visible, "float8": FLOAT8}
    return environment.get_template("report.jinja")


def find_tokenizer(dataset: ActivationDataset) -> Callable[[np.ndarray], str] | None:
    """Returns a function that decodes token ids, if the tokenizer is in the model's folder or in
    the hub's local cache; None otherwise."""
    metadata, files = dataset.metadata, ("tokenizer.json", "vocab.json", "merges.txt")
    try:
        from huggingface_hub import try_to_load_from_cache
        from tokenizers import Tokenizer, decoders, models

        model = dataset.tokenizer_path
        commit = metadata.get("model_commit") or metadata["configuration"].get("model_revision")
        paths: list[Any] = [str(Path(model).expanduser() / name) for name in files]
        if not any(map(os.path.isfile, paths)):
            paths = [try_to_load_from_cache(model, name, revision=commit) for name in files]
        if isinstance(paths[0], str) and os.path.isfile(paths[0]):
            tokenizer = Tokenizer.from_file(paths[0])
        else:
            tokenizer = Tokenizer(models.BPE.from_file(*paths[1:]))
            tokenizer.decoder = decoders.ByteLevel()
    except Exception:  # not installed, missing or damaged: the report shows ids instead
        return None
    return lambda ids: tokenizer.decode(ids.clip(0).tolist(), skip_special_tokens=False)


def _intervals(root: Folder, folders: dict[str, Stored]) -> list[report_numbers.Interval]:
    """Returns the intervals of all hosts, from the ends of their metrics."""
    result, max_bytes = [], METRICS_BYTES // len(folders)
    for name, stored in folders.items():
        if size := stored.files.get(METRICS, 0):
            data = root.child(name).read(METRICS, start=-min(size, max_bytes)) or b""
            # If lines before it were left out, the first interval seems to cover them too.
            result += report_numbers.intervals(data)[size > max_bytes :]
    return result
