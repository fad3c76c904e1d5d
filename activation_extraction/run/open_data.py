"""Opens the data of a run: files, a data set on the hub, or a mixture of both.

A run that continues reads the same data: the files that metadata.json records, and the recorded
revisions of hub data sets.
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

FILES = "files"  # the name of a data set of files in an identity


class Source(NamedTuple):
    """An open data set.

    Attributes:
        rows: The rows of the data set.
        name: The name of the source in a mixture. None if there is no mixture.
        weight: The weight of the source in a mixture, to which its share of documents is
            proportional.
    """

    rows: Rows
    name: str | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Dataset:
    """The open data of a run.

    When the run continues, name and content must be the same as before.

    Attributes:
        sources: The open data sets. Only a mixture has several.
        name: The name in the identity of the run: FILES, the flags of a hub data set, or the
            sources of a mixture with their weights.
        content: The revision of a hub data set, or the revisions of all hub data sets in a mixture.
            "" for files, which `files` compares one by one.
        files: The files of all sources.
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
    """Opens the data of a run: files, a data set on the hub, or a mixture of both.

    Args:
        options: The flags about text.
        form: The form of rows, by which they become documents.
        earlier: The metadata that hosts of the run have stored already, this host's first. A hub
            data set is opened at the recorded revision, and files must be the recorded ones (see
            `DataFiles.as_recorded`). Empty for a new run.
        names: The names of the sources of a mixture, which are the same on all hosts. Empty for the
            names in the flags.

    Returns:
        The open data.

    Raises:
        InputError: A source cannot be opened, or differs from the source that the run began with.
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
    """Finds the metadata of earlier starts with the same data set.

    Metadata of another data set is left out here; the start is refused later, by its identity.

    Args:
        name: The name of the data set in identities.
        earlier: The metadata that hosts of the run have stored already.

    Returns:
        The metadata, and the revision that the first one records; "" if there is none.
    """
    metadata = [record for record in earlier if identity_of(record, METADATA).data == name]
    revision = identity_of(metadata[0], METADATA).data_revision if metadata else ""
    return metadata, revision


def _check_reader(source: str, stored: Sequence[Mapping[str, Any]]) -> None:
    """Checks that the run has always read a hub data set with this version of `datasets`.

    `datasets` divides a hub data set into pieces and orders them, and so determines which rows
    follow a position. Another version may divide it differently. Files do not depend on `datasets`.

    Args:
        source: The flag and the name of the data set, for the message.
        stored: The metadata of the hosts of the run. Metadata without a version fits any version.

    Raises:
        InputError: Another version has read the data set before.
    """
    installed = version("datasets")
    for metadata in stored:
        recorded = metadata.get("versions", {}).get("datasets", installed)
        if recorded != installed:
            raise InputError(
                f"{source}: the run has read it with datasets {recorded}, and datasets {installed} "
                "is installed here, which may divide or order its rows differently: rows could be "
                f"skipped or stored twice; pip install datasets=={recorded}, or begin anew with "
                "--overwrite or in another folder"
            )


def _open_mixture(
    sources_and_weights: Sequence[tuple[str, float]],
    form: RowForm,
    earlier: Sequence[Mapping[str, Any]],
    names: Sequence[str],
) -> Dataset:
    """Opens all sources of a mixture.

    Their files are listed together. The name of each file begins with the number of its source.

    Args:
        sources_and_weights: The sources and weights of --mix.
        form: The form of rows, by which they become documents.
        earlier: The metadata that hosts of the run have stored already; see `open_dataset`.
        names: The names of the sources; see `open_dataset`.

    Raises:
        InputError: A source cannot be opened, or differs from the source that the run began with.
    """
    names = names or [plain_url(source) for source, _ in sources_and_weights]
    named_weights = []
    for name, (_, weight) in zip(names, sources_and_weights, strict=True):
        named_weights.append(f"{name}={repr(weight).removesuffix('.0')}")
    mixture_name = " ".join(named_weights)
    stored, recorded_revisions = _recorded(mixture_name, earlier)
    revisions = dict(entry.rsplit("@", 1) for entry in recorded_revisions.split())
    listed = []
    for number, (source, _) in enumerate(sources_and_weights):
        if is_path(source):
            listed += [replace(file, name=f"{number}/{file.name}") for file in list_files(source)]
    refuse_repeated(listed)
    files = DataFiles.as_recorded(listed, stored)
    sources = []
    for number, (source, weight) in enumerate(sources_and_weights):
        name = names[number]
        if is_path(source):
            prefix = f"{number}/"
            files_of_source = [
                replace(file, name=file.name.removeprefix(prefix))
                for file in files.files
                if file.name.startswith(prefix)
            ]
            rows = open_files(source, form, files_of_source)
        else:
            hub_name, config, split, *surplus = [*source.split(":"), "", ""]
            if any(surplus):
                raise InputError(f"--mix {name}: no such path, and not NAME:CONFIG:SPLIT")
            _check_reader(f"--mix {name}", stored)
            rows, revisions[name] = open_hub_dataset(
                hub_name, config or None, split or DATASET[2], revisions.get(name)
            )
        sources.append(Source(rows, name, weight))
    content = " ".join(f"{name}@{revision}" for name, revision in revisions.items())
    return Dataset(tuple(sources), mixture_name, content, files)
