"""Opens a data set on the Hugging Face hub as a stream, at a fixed revision."""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
from huggingface_hub import HfApi, constants

from activation_extraction.common.errors import InputError, one_line
from activation_extraction.common.retries import (
    hub_requests,
    hub_unreachable,
    name_unknown,
    unwritable_cache,
)

log = logging.getLogger("extract_activations")


@contextmanager
def writable_cache() -> Iterator[None]:
    """Inside the block, `datasets` has a cache that can be written: its own, or a temporary one.

    It asks for one whatever it opens, but streams keep nothing there.
    """
    folder = Path(datasets.config.HF_DATASETS_CACHE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        log.warning(
            "%s: %s: a temporary folder takes the place of this cache of data sets; "
            "HF_DATASETS_CACHE names another one",
            *(folder, error.strerror),
        )
        with tempfile.TemporaryDirectory() as scratch:
            datasets.config.HF_DATASETS_CACHE = Path(scratch)
            try:
                yield
            finally:
                datasets.config.HF_DATASETS_CACHE = folder
    else:
        yield


def open_hub_dataset(
    name: str, config: str | None, split: str, revision: str | None = None
) -> tuple[datasets.IterableDataset, str]:
    """Opens a hub data set; returns its stream and its revision, by default the newest one.

    Raises InputError with the hub's reason if it cannot be opened.
    """
    wanted = " ".join(filter(None, (name, config, split)))
    try:
        if unreachable := hub_unreachable(constants.ENDPOINT):
            raise unreachable
        with hub_requests(f"--dataset_name {wanted}"), writable_cache():
            revision = revision or str(HfApi().dataset_info(name).sha)
            found = datasets.load_dataset(
                name, config, split=split, revision=revision, streaming=True
            )
        return found, revision
    except Exception as error:  # whatever the hub, the network or a file format may raise
        reason = unwritable_cache(error) or one_line(error)
        if name_unknown(error):
            reason = "the hub's name does not resolve: offline? --dataset_path reads local files"
        raise InputError(f"--dataset_name {wanted}: {reason}") from error
