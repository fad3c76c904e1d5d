"""Opens a data set on the Hugging Face hub as a stream, at a fixed revision."""

import datasets
from huggingface_hub import HfApi

from activation_extraction.cli.errors import InputError, one_line
from activation_extraction.cli.retries import hub_requests, name_unknown


def open_hub_dataset(
    name: str, config: str | None, split: str, revision: str | None = None
) -> tuple[datasets.IterableDataset, str]:
    """Opens a hub data set; returns its stream and its revision, by default the newest one.

    Raises InputError with the hub's reason if it cannot be opened.
    """
    wanted = " ".join(filter(None, (name, config, split)))
    try:
        with hub_requests(f"--dataset_name {wanted}"):
            revision = revision or str(HfApi().dataset_info(name).sha)
            found = datasets.load_dataset(
                name, config, split=split, revision=revision, streaming=True
            )
        return found, revision
    except Exception as error:  # whatever the hub, the network or a file format may raise
        reason = one_line(error)
        if name_unknown(error):
            reason = "the hub's name does not resolve: offline? --dataset_path reads local files"
        raise InputError(f"--dataset_name {wanted}: {reason}") from error
