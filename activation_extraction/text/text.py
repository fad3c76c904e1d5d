"""The text of a run: the data set that was asked for, and one host's part of it as batches."""

import hashlib
import json
from collections.abc import Iterator

import datasets
from tokenizers import Tokenizer

from activation_extraction.cli.config import Config
from activation_extraction.cli.errors import InputError, RunError
from activation_extraction.output.metadata import identity_of
from activation_extraction.output.run_folders import find_metadata, output_roots
from activation_extraction.output.storage import ActivationStorage
from activation_extraction.run.hosts import Host
from activation_extraction.text.documents import (
    DocumentStream,
    describe_files,
    open_files,
    open_hub_dataset,
    with_remedy,
)
from activation_extraction.text.packing import Batch, Cursor, pack
from activation_extraction.text.tokens import Prefetch, samples
from activation_extraction.text.workers import Worker

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
        found = None if config.overwrite else find_metadata(root)
        if found is not None:
            where, metadata = found
            stored = identity_of(metadata, where)
            revision = stored.data_revision if stored.data == source else revision
    dataset, revision = open_hub_dataset(str(name), subset, str(split), revision)
    return dataset, (source, revision)


def open_documents(config: Config, host: Host, dataset: datasets.IterableDataset) -> DocumentStream:
    """This host's part of the text."""
    worker = Worker(config.machine_id, config.total_machines, host.id, host.count)
    return DocumentStream(dataset, config.text_column, worker, config.skip_bad_rows)


def open_batches(
    config: Config,
    host: Host,
    tokenizer: Tokenizer,
    documents: DocumentStream,
    storage: ActivationStorage,
) -> Prefetch[Batch]:
    """Those of `documents` that are not stored yet, as packed batches, prepared in the
    background."""
    if storage.complete:
        return Prefetch(iter(()), BATCHES_AHEAD)
    most = max_samples_of(config, host)
    part = _batches(config, tokenizer, documents, most, storage.cursor)
    batches = Prefetch(part, BATCHES_AHEAD)
    alone = documents.worker == Worker()
    try:
        if batches.peek() is None and alone and not storage.found_samples:
            raise InputError("the data set is empty: no row has text")
    except RunError as error:
        raise with_remedy(error) from error
    return batches


def open_gaps(
    config: Config,
    host: Host,
    tokenizer: Tokenizer,
    dataset: datasets.IterableDataset,
    storage: ActivationStorage,
) -> Prefetch[Batch]:
    """The batches in which the samples of damaged shards lie, each gap with the batch after it."""

    def batches() -> Iterator[Batch]:
        for gap in storage.plan.ranges:
            documents = open_documents(config, host, dataset)
            most = storage.max_samples
            for batch in _batches(config, tokenizer, documents, most, gap.cursor):
                yield batch
                if gap.until is not None and batch.samples[-1].sample.sample_idx >= gap.until:
                    break

    return Prefetch(batches(), BATCHES_AHEAD)


def _batches(
    config: Config,
    tokenizer: Tokenizer,
    documents: DocumentStream,
    most: int | None,
    start: Cursor | None,
) -> Iterator[Batch]:
    """The batches of `documents` from a cursor on, up to `most` samples from the beginning."""
    stream = samples(documents, tokenizer, config.max_seq_length, most, start)
    return pack(stream, config.batch_size, config.max_seq_length)


def max_samples_of(config: Config, host: Host) -> int | None:
    """This host's share of what the machine may store."""
    most = config.max_samples
    return None if most is None else len(range(host.id, most, host.count))
