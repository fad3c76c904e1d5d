"""The text of a run: the data set that was asked for, and one host's part of it as batches."""

import hashlib
import json
from collections.abc import Iterator

import datasets
from tokenizers import Tokenizer

from activation_extraction.cli.config import Config
from activation_extraction.cli.errors import InputError, RunError
from activation_extraction.output.places import output_roots
from activation_extraction.output.resume import find_metadata
from activation_extraction.output.storage import ActivationStorage
from activation_extraction.run.hosts import Host
from activation_extraction.run.repair import Repair
from activation_extraction.text.documents import (
    DocumentStream,
    describe_files,
    open_files,
    open_hub_dataset,
)
from activation_extraction.text.packing import Batch, Cursor, pack
from activation_extraction.text.tokens import Prefetch, samples

BATCHES_AHEAD = 4


def open_dataset(config: Config) -> tuple[datasets.IterableDataset, tuple[str, str]]:
    """The data set, and its name and revision: what an extraction that goes on must not change.

    Of the hub the revision is that with which the extraction began.
    """
    if config.dataset_path is not None:
        dataset = open_files(config.dataset_path, config.text_column)
        files = json.dumps(describe_files(config.dataset_path))
        return dataset, ("files", hashlib.sha256(files.encode()).hexdigest())
    name, subset, split = config.dataset_name, config.dataset_config, config.dataset_split
    source = " ".join(filter(None, (name, subset, split)))
    revision = None
    for root, _ in output_roots(config):
        _, earlier = find_metadata(root) or ("", {})
        if not config.overwrite and earlier.get("identity", {}).get("data") == source:
            revision = earlier["identity"]["data content"]
    dataset, revision = open_hub_dataset(str(name), subset, str(split), revision)
    return dataset, (source, revision)


def open_batches(
    config: Config,
    host: Host,
    tokenizer: Tokenizer,
    dataset: datasets.IterableDataset,
    storage: ActivationStorage,
) -> Prefetch[Batch]:
    """This host's part of the text that is not stored yet, as packed batches, prepared in the
    background."""
    if storage.complete:
        return Prefetch(iter(()), BATCHES_AHEAD)
    most = max_samples_of(config, host)
    part = _part(config, host, tokenizer, dataset, most, storage.cursor)
    batches = Prefetch(part, BATCHES_AHEAD)
    world = config.total_machines * host.count
    try:
        if batches.peek() is None and world == 1 and not storage.found_samples:
            raise InputError("the data set is empty: no row has text")
    except RunError as error:
        raise InputError(str(error)) from error
    return batches


def open_gaps(
    config: Config,
    host: Host,
    tokenizer: Tokenizer,
    dataset: datasets.IterableDataset,
    repair: Repair,
) -> Prefetch[Batch]:
    """The batches in which the samples of damaged shards lie, each gap with the batch after it."""

    def batches() -> Iterator[Batch]:
        for gap in repair.gaps:
            for batch in _part(
                config, host, tokenizer, dataset, repair.found_max_samples, gap.cursor
            ):
                yield batch
                if batch.samples[-1].sample.sample_idx >= gap.until:
                    break

    return Prefetch(batches(), BATCHES_AHEAD)


def _part(
    config: Config,
    host: Host,
    tokenizer: Tokenizer,
    dataset: datasets.IterableDataset,
    most: int | None,
    start: Cursor | None,
) -> Iterator[Batch]:
    """This host's batches from a cursor on, up to `most` samples from the beginning."""
    rank = config.machine_id * host.count + host.id
    world = config.total_machines * host.count
    documents = DocumentStream(dataset, config.text_column, rank, world)
    stream = samples(documents, tokenizer, config.max_seq_length, most, rank, world, start)
    return pack(stream, config.batch_size, config.max_seq_length)


def max_samples_of(config: Config, host: Host) -> int | None:
    """This host's share of what the machine may store."""
    most = config.max_samples
    return None if most is None else len(range(host.id, most, host.count))
