"""Opens what a run reads: files, a data set of the hub, or a mixture of both.

A run that continues reads the same data: the files that it has recorded, and the same revisions.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, NamedTuple

from activation_extraction.cli.flags import DATASET, TextOptions
from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import plain_url
from activation_extraction.run.data_files import DataFiles
from activation_extraction.store.run_log import METADATA, identity_of
from activation_extraction.text.file_list import is_path, list_files, refuse_repeated
from activation_extraction.text.rows import RowForm
from activation_extraction.text.sources import Rows, open_files, open_hub_dataset

FILES = "files"  # what an identity calls a data set of files


class Source(NamedTuple):
    """An open data set.

    Attributes:
        rows: Rows of the data set.
        name: Name in a mixture; None if there is no mixture.
        weight: Share of the documents in a mixture.
    """

    rows: Rows
    name: str | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Dataset:
    """The open data sets of a run. Their name and content must stay the same when it continues.

    Attributes:
        sources: The open data sets, several only of a mixture.
        name: Name in the identity of the run: FILES, the flags of a hub data set, or the sources of
            a mixture with their weights.
        content: Revision of a hub data set, or the revisions of a mixture's; "" for files, which
            `files` compares one by one.
        files: Files of all sources.
    """

    sources: tuple[Source, ...]
    name: str
    content: str
    files: DataFiles = field(default_factory=DataFiles)


def open_dataset(
    options: TextOptions,
    form: RowForm,
    earlier: Sequence[Mapping[str, Any]] = (),
    names: Sequence[str] = (),
) -> Dataset:
    """Opens the data of a run: files, a data set of the hub, or a mixture of both.

    Args:
        options: Flags about text.
        form: How a row becomes a document.
        earlier: Metadata that hosts of the run have stored already, that of this host first. A hub
            data set is opened at the revision that it records, and files must be those that it
            lists (see `DataFiles.as_recorded`). Empty for a new run.
        names: Names of the sources of a mixture; empty for the names that the flags give them.

    Raises:
        InputError: A source cannot be opened, or is not the one that the run began with.
    """
    if options.mix:
        try:
            return _open_mixture(options.mix, form, earlier, names)
        except InputError as error:
            raise InputError(re.sub("--dataset_(path|name)", "--mix", str(error))) from error
    path = options.dataset_path
    if path is not None:
        stored, _ = _recorded(FILES, earlier)
        files = DataFiles.as_recorded(list_files(path), stored)
        return Dataset((Source(open_files(path, form, files.files)),), FILES, "", files)
    name = options.dataset_name
    subset = options.dataset_config
    split = options.dataset_split
    assert name is not None  # cli/config.py fills it in where no other source is given
    source = " ".join(filter(None, (name, subset, split)))
    stored, recorded = _recorded(source, earlier)
    _check_reader(f"--dataset_name {source}", stored)
    rows, revision = open_hub_dataset(name, subset, split, recorded or None)
    return Dataset((Source(rows),), source, revision)


def _recorded(
    name: str, earlier: Sequence[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], str]:
    """Returns the metadata that records this data set, and the revision there; "" if none does.

    A run with another data set is refused later on.
    """
    metadata = [record for record in earlier if identity_of(record, METADATA).data == name]
    revision = identity_of(metadata[0], METADATA).data_revision if metadata else ""
    return metadata, revision


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
    sources_and_weights: Sequence[tuple[str, float]],
    form: RowForm,
    earlier: Sequence[Mapping[str, Any]],
    names: Sequence[str],
) -> Dataset:
    """Opens all sources. Their files are listed together, each under the number of its source."""
    names = names or [plain_url(source) for source, _ in sources_and_weights]
    pairs = zip(names, sources_and_weights, strict=True)
    mix = [(name, source, weight) for name, (source, weight) in pairs]
    name = " ".join(f"{plain}={repr(weight).removesuffix('.0')}" for plain, _, weight in mix)
    stored, recorded = _recorded(name, earlier)
    revisions = dict(entry.rsplit("@", 1) for entry in recorded.split())
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
            prefix = f"{number}/"
            files_of_source = [
                replace(file, name=file.name.removeprefix(prefix))
                for file in files.files
                if file.name.startswith(prefix)
            ]
            rows = open_files(source, form, files_of_source)
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
