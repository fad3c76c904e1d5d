"""Opens the data of a run: files, a data set on the hub, or a mixture of both.

metadata.json records which files and which revisions of hub data sets a run reads. When the run
continues, this module opens exactly these. text/sources.py reads the rows.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, NamedTuple

from activation_extraction.cli.flags import DEFAULT_DATASET, TextOptions
from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import plain_url
from activation_extraction.run.data_files import DataFiles
from activation_extraction.store.run_log import METADATA, identity_of
from activation_extraction.text.file_list import is_path, list_files, refuse_repeated
from activation_extraction.text.rows import RowSchema
from activation_extraction.text.sources import Rows, open_files, open_hub_dataset

# Value of `Dataset.description`, and so of the identity's field `data`, if files are read.
FILES = "files"


class Source(NamedTuple):
    """A data set, opened for reading, which may be one of the sources of a mixture.

    Attributes:
        row_stream: The stream of the rows of the data set.
        name_in_mixture: The name of the source in a mixture. None if there is no mixture.
        weight_in_mixture: The weight of the source in a mixture. The number of documents from a
            source is proportional to its weight.
    """

    row_stream: Rows
    name_in_mixture: str | None = None
    weight_in_mixture: float = 1.0


@dataclass(frozen=True)
class Dataset:
    """The data of a run, opened for reading: one data set, or a mixture of several.

    The identity of the run contains `description` (as `data`) and `data_revision`, so they must be
    the same when the run continues.

    Attributes:
        sources: The data sets. There are several only in a mixture.
        description: Description of the data. It is "files" for files; the name, configuration and
            split for a hub data set; and the sources with their weights for a mixture.
        data_revision: The revision of the hub data set. In a mixture, a text of the form
            "NAME@REVISION NAME@REVISION" with all hub data sets. "" without hub data sets, because
            the content of files is compared by `files`.
        files: The files of all sources.
    """

    sources: tuple[Source, ...]
    description: str
    data_revision: str
    files: DataFiles = field(default_factory=DataFiles)


def open_dataset(
    options: TextOptions,
    row_schema: RowSchema,
    metadata_of_earlier_outputs: Sequence[Mapping[str, Any]] = (),
    source_names: Sequence[str] = (),
) -> Dataset:
    """Opens the data of a run: files, a data set on the hub, or a mixture of both.

    Args:
        options: The flags about text.
        row_schema: The settings by which rows become documents.
        metadata_of_earlier_outputs: The content of each metadata.json that this run has stored
            already, in the local folder and in the bucket. A hub data set is opened at the recorded
            revision, and files must have the recorded content (see `DataFiles.as_recorded`). Empty
            for a new run.
        source_names: The names under which the sources of a mixture are recorded, in the order of
            --mix. They are the same on all hosts, although the paths of the sources may differ.
            Empty without a mixture, or to use the paths and names in --mix.

    Returns:
        The data, opened for reading.

    Raises:
        InputError: If a data set cannot be opened, or if it differs from the data set that the run
            began with.
    """
    if options.mix:
        try:
            return _open_mixture(options.mix, row_schema, metadata_of_earlier_outputs, source_names)
        except InputError as error:
            raise InputError(re.sub("--dataset_(path|name)", "--mix", str(error))) from error
    dataset_path = options.dataset_path
    if dataset_path is not None:
        metadata_of_outputs_with_same_data, _ = _metadata_with_same_data(
            FILES, metadata_of_earlier_outputs
        )
        data_files = DataFiles.as_recorded(
            list_files(dataset_path), metadata_of_outputs_with_same_data
        )
        row_stream = open_files(dataset_path, row_schema, data_files.files)
        return Dataset((Source(row_stream),), FILES, "", data_files)
    hub_dataset_name = options.dataset_name
    hub_dataset_config = options.dataset_config
    hub_dataset_split = options.dataset_split
    assert hub_dataset_name is not None  # cli/config.py sets it if no other source is given
    hub_dataset_description = " ".join(
        filter(None, (hub_dataset_name, hub_dataset_config, hub_dataset_split))
    )
    metadata_of_outputs_with_same_data, recorded_data_revision = _metadata_with_same_data(
        hub_dataset_description, metadata_of_earlier_outputs
    )
    _check_reader(f"--dataset_name {hub_dataset_description}", metadata_of_outputs_with_same_data)
    row_stream, dataset_revision = open_hub_dataset(
        hub_dataset_name, hub_dataset_config, hub_dataset_split, recorded_data_revision or None
    )
    return Dataset((Source(row_stream),), hub_dataset_description, dataset_revision)


def _metadata_with_same_data(
    data_description: str, metadata_of_earlier_outputs: Sequence[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], str]:
    """Selects the stored metadata that names the data set of this run.

    Metadata that names another data set is left out without an error, because this process then
    fails later, when the identity of its run is compared with the stored identity.

    Args:
        data_description: The description of the data, as in `Dataset.description`.
        metadata_of_earlier_outputs: The content of each metadata.json that this run has stored
            already.

    Returns:
        A tuple of:
            The content of each metadata.json that names this data set, in the given order.
            The value of `Dataset.data_revision` that the first of them has recorded. "" if none of
                them names this data set.
    """
    metadata_of_outputs_with_same_data = [
        metadata_of_output
        for metadata_of_output in metadata_of_earlier_outputs
        if identity_of(metadata_of_output, METADATA).data == data_description
    ]
    recorded_data_revision = (
        identity_of(metadata_of_outputs_with_same_data[0], METADATA).data_revision
        if metadata_of_outputs_with_same_data
        else ""
    )
    return metadata_of_outputs_with_same_data, recorded_data_revision


def _check_reader(
    flag_and_name: str, metadata_of_earlier_outputs: Sequence[Mapping[str, Any]]
) -> None:
    """Checks that a run has always read a hub data set with the installed version of `datasets`.

    The package `datasets` divides a hub data set into parts and orders them, so its version
    determines the order of the rows. Reading files does not depend on `datasets`.

    Args:
        flag_and_name: The flag and the name of the data set, for the message.
        metadata_of_earlier_outputs: The content of each metadata.json that this run has stored
            already. If a metadata.json records no version of `datasets`, nothing is compared with
            it.

    Raises:
        InputError: If the run has read the data set with another version before.
    """
    installed_version = version("datasets")
    for metadata_of_output in metadata_of_earlier_outputs:
        recorded_version_by_package = metadata_of_output.get("versions", {})
        recorded_version = recorded_version_by_package.get("datasets", installed_version)
        if recorded_version != installed_version:
            raise InputError(
                f"{flag_and_name}: the run has read it with datasets {recorded_version}, and "
                f"datasets {installed_version} is installed here, which may divide or order its "
                "rows differently: rows could be skipped or stored twice; pip install "
                f"datasets=={recorded_version}, or begin anew with --overwrite or in another folder"
            )


def _open_mixture(
    sources_and_weights: Sequence[tuple[str, float]],
    row_schema: RowSchema,
    metadata_of_earlier_outputs: Sequence[Mapping[str, Any]],
    source_names: Sequence[str],
) -> Dataset:
    """Opens all sources of a mixture.

    `Dataset.files` of a mixture contains the files of all sources. The name of each file in it
    begins with the number of the file's source, from 0, because sources may have files of the same
    name.

    Args:
        sources_and_weights: The sources of --mix with their weights. A source is a path, or the
            name of a data set on the hub.
        row_schema: The settings by which rows become documents.
        metadata_of_earlier_outputs: The content of each metadata.json that this run has stored
            already, in the local folder and in the bucket.
        source_names: The names under which the sources are recorded, in the order of
            `sources_and_weights`. They are the same on all hosts, although the paths of the sources
            may differ. Empty to use the paths and names in `sources_and_weights`.

    Raises:
        InputError: If a source cannot be opened, or if it differs from the source that the run
            began with.
    """
    source_names = source_names or [
        plain_url(path_or_hub_dataset_name) for path_or_hub_dataset_name, _ in sources_and_weights
    ]
    source_descriptions = []
    for source_name, (_, source_weight) in zip(source_names, sources_and_weights, strict=True):
        source_descriptions.append(f"{source_name}={repr(source_weight).removesuffix('.0')}")
    mixture_description = " ".join(source_descriptions)
    metadata_of_outputs_with_same_data, recorded_names_and_revisions_text = (
        _metadata_with_same_data(mixture_description, metadata_of_earlier_outputs)
    )
    revision_by_source = {}  # revision of each hub data set by the name of the source
    for name_and_revision in recorded_names_and_revisions_text.split():
        source_name, source_revision = name_and_revision.rsplit("@", 1)
        revision_by_source[source_name] = source_revision
    # All files of the mixture. The name of each file begins with the number of its source.
    files_with_source_numbers = []
    for source_number, (path_or_hub_dataset_name, _) in enumerate(sources_and_weights):
        if is_path(path_or_hub_dataset_name):
            for data_file in list_files(path_or_hub_dataset_name):
                files_with_source_numbers.append(
                    replace(data_file, name=f"{source_number}/{data_file.name}")
                )
    refuse_repeated(files_with_source_numbers)
    files_of_mixture = DataFiles.as_recorded(
        files_with_source_numbers, metadata_of_outputs_with_same_data
    )
    opened_sources: list[Source] = []
    for source_number, (path_or_hub_dataset_name, source_weight) in enumerate(sources_and_weights):
        source_name = source_names[source_number]
        if is_path(path_or_hub_dataset_name):
            source_number_prefix = f"{source_number}/"
            files_of_source = [
                replace(data_file, name=data_file.name.removeprefix(source_number_prefix))
                for data_file in files_of_mixture.files
                if data_file.name.startswith(source_number_prefix)
            ]
            row_stream = open_files(path_or_hub_dataset_name, row_schema, files_of_source)
        else:
            # A hub data set is given as NAME, NAME:CONFIG or NAME:CONFIG:SPLIT.
            hub_dataset_name, hub_dataset_config, hub_dataset_split, *surplus_fields = [
                *path_or_hub_dataset_name.split(":"),
                "",
                "",
            ]
            if any(surplus_fields):
                raise InputError(f"--mix {source_name}: no such path, and not NAME:CONFIG:SPLIT")
            _check_reader(f"--mix {source_name}", metadata_of_outputs_with_same_data)
            row_stream, revision_by_source[source_name] = open_hub_dataset(
                hub_dataset_name,
                hub_dataset_config or None,
                hub_dataset_split or DEFAULT_DATASET.split,
                revision_by_source.get(source_name),
            )
        opened_sources.append(Source(row_stream, source_name, source_weight))
    names_and_revisions_text = " ".join(
        f"{source_name}@{source_revision}"
        for source_name, source_revision in revision_by_source.items()
    )
    return Dataset(
        tuple(opened_sources), mixture_description, names_and_revisions_text, files_of_mixture
    )
