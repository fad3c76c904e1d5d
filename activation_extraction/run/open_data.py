"""Opens what a run reads: files, a data set of the hub, or a mixture of both.

A run that continues reads the same data: the files that it has recorded, and the same revisions.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, NamedTuple

from activation_extraction.cli.flags import DATASET, Config
from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import plain_url
from activation_extraction.run.data_files import DataFiles
from activation_extraction.store.run_log import METADATA, identity_of
from activation_extraction.text.file_list import is_path, list_files, refuse_repeated
from activation_extraction.text.rows import RowForm
from activation_extraction.text.sources import Rows, open_files, open_hub_dataset

FILES = "files"  # what an identity calls a data set of files


class Source(NamedTuple):
    """An open data set, which has a name in a mixture."""

    rows: Rows
    name: str | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Dataset:
    """The open data sets of a run. Their name and content must stay the same when it continues.

    content: the revision of a hub data set; "" for files, which `files` compares one by one.
    """

    sources: tuple[Source, ...]
    name: str
    content: str
    files: DataFiles = field(default_factory=DataFiles)


def open_dataset(
    config: Config,
    form: RowForm,
    earlier: Sequence[Mapping[str, Any]] = (),
    names: Sequence[str] = (),
) -> Dataset:
    """Opens what is asked for: files, a data set of the hub, or a mixture of both.

    earlier: the metadata that hosts of the run have stored already, that of this host first. A hub
    data set is opened at the revision that it records; files must be those that it lists (see
    DataFiles.as_recorded). names: what a mixture calls its sources; () for what the flags do.
    Raises InputError.
    """
    if config.mix:
        try:
            return _open_mixture(config.mix, form, earlier, names)
        except InputError as error:
            raise InputError(re.sub("--dataset_(path|name)", "--mix", str(error))) from error
    path = config.dataset_path
    if path is not None:
        stored, _ = _recorded(FILES, earlier)
        files = DataFiles.as_recorded(list_files(path), stored)
        return Dataset((Source(open_files(path, form, files.files)),), FILES, "", files)
    name = config.dataset_name
    subset = config.dataset_config
    split = config.dataset_split
    assert name is not None  # cli/config.py fills it in where no other source is given
    source = " ".join(filter(None, (name, subset, split)))
    stored, recorded = _recorded(source, earlier)
    _check_reader(f"--dataset_name {source}", stored)
    rows, revision = open_hub_dataset(name, subset, split, recorded or None)
    return Dataset((Source(rows),), source, revision)


def _recorded(
    name: str, earlier: Sequence[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], str]:
    """Returns the metadata that records this data set, and the revision there, "" if there is none.

    A run with another data set is refused later on.
    """
    found = [each for each in earlier if identity_of(each, METADATA).data == name]
    return found, identity_of(found[0], METADATA).data_revision if found else ""


def _check_reader(source: str, stored: Sequence[Mapping[str, Any]]) -> None:
    """Raises InputError if another version of `datasets` has read a data set of the hub before.

    `datasets` cuts such a data set into pieces, gives them an order, and decides what a position
    means. After an upgrade, a position may lie before other rows. Files do not depend on it.

    Args:
        source: The flag and the name of the data set, for the message.
        stored: Metadata of the hosts of the run; without a recorded version, any version continues.
    """
    now = version("datasets")
    for metadata in stored:
        before = metadata.get("versions", {}).get("datasets", now)
        if before != now:
            raise InputError(
                f"{source}: the run has read it with datasets {before}, and datasets {now} is "
                "installed here, which may divide or order its rows differently: rows could be "
                f"skipped or stored twice; pip install datasets=={before}, or begin anew with "
                "--overwrite or in another folder"
            )


def _open_mixture(
    given: Sequence[tuple[str, float]],
    form: RowForm,
    earlier: Sequence[Mapping[str, Any]],
    names: Sequence[str],
) -> Dataset:
    """Opens all sources. Their files are listed together, each under the number of its source."""
    names = names or [plain_url(source) for source, _ in given]
    mix = [(name, source, weight) for name, (source, weight) in zip(names, given, strict=True)]
    name = " ".join(f"{plain}={repr(weight).removesuffix('.0')}" for plain, _, weight in mix)
    stored, recorded = _recorded(name, earlier)
    revisions = dict(each.rsplit("@", 1) for each in recorded.split())
    listed = [
        replace(file, name=f"{number}/{file.name}")
        for number, (_, source, _) in enumerate(mix)
        if is_path(source)
        for file in list_files(source)
    ]
    refuse_repeated(listed)
    files = DataFiles.as_recorded(listed, stored)
    sources = []
    for number, (plain, source, weight) in enumerate(mix):
        if is_path(source):
            own = [file for file in files.files if file.name.startswith(f"{number}/")]
            own = [replace(file, name=file.name.removeprefix(f"{number}/")) for file in own]
            rows = open_files(source, form, own)
        else:
            hub_name, config, split, *more = [*source.split(":"), "", ""]
            if any(more):
                raise InputError(f"--mix {plain}: no such path, and not NAME:CONFIG:SPLIT")
            _check_reader(f"--mix {plain}", stored)
            rows, revisions[plain] = open_hub_dataset(
                hub_name, config or None, split or DATASET[2], revisions.get(plain)
            )
        sources.append(Source(rows, plain, weight))
    content = " ".join(f"{plain}@{revision}" for plain, revision in revisions.items())
    return Dataset(tuple(sources), name, content, files)
