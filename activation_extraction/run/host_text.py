"""This module opens the data set of a run and makes batches of one host's share of it.

A thread prepares the next batches while the devices compute.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import datasets
from tokenizers import Tokenizer

from activation_extraction.cli.flags import Config
from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.run.data_files import DataFiles
from activation_extraction.store.commit import METADATA
from activation_extraction.store.metadata import identity_of
from activation_extraction.store.storage import ActivationStorage
from activation_extraction.text.batch import Batch, Worker
from activation_extraction.text.documents import DocumentStream, with_remedy
from activation_extraction.text.packing import TokenChoice, pack
from activation_extraction.text.samples import samples
from activation_extraction.text.sources import list_files, open_files, open_hub_dataset

T = TypeVar("T")
BATCHES_AHEAD = 4
POLL = 0.2  # seconds between checks whether to stop


@dataclass(frozen=True)
class Dataset:
    """A data set is open. Its name and content must stay the same when an extraction continues.

    content: the revision of a hub data set; "" for files, which `files` compares one by one.
    """

    rows: datasets.IterableDataset
    name: str
    content: str
    files: DataFiles = field(default_factory=DataFiles)


def open_dataset(
    configuration: Mapping[str, Any],
    text_column: str,
    own: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]] = (),
) -> Dataset:
    """Opens the data set that a configuration asks for: files, or else one of the hub.

    own, others: the metadata that this host and others have stored already. A hub data set is
    opened at the revision that it records; files must be those that it lists. Raises InputError.
    """
    path = configuration["dataset_path"]
    if path is not None:
        files = DataFiles.as_recorded(list_files(path), own, others)
        return Dataset(open_files(path, text_column, files.files), "files", "", files)
    name, config, split = (configuration[f"dataset_{x}"] for x in ("name", "config", "split"))
    source = " ".join(filter(None, (name, config, split)))
    recorded = [identity_of(metadata, METADATA) for metadata in (*own, *others)]
    revisions = [identity.data_revision for identity in recorded if identity.data == source]
    rows, revision = open_hub_dataset(name, config, split, next(iter(revisions), None))
    return Dataset(rows, source, revision)


class Prefetch(Generic[T]):
    """Yields the items of an iterator, while a background thread prepares up to `depth` of them.

    An exception in the iterator is raised here when its turn comes, whatever kind it is.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._head: T | None = None
        self._ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
        threading.Thread(target=self._run, args=(items,), name="prefetch", daemon=True).start()

    def _run(self, items: Iterator[T]) -> None:
        try:
            for item in items:
                self._ready.put((item, None))
        except BaseException as error:  # otherwise the consumer would wait forever
            self._ready.put((None, error))
        self._ready.put((None, None))

    @property
    def ready(self) -> int:
        """Returns how many items are ready."""
        return self._ready.qsize()

    def peek(self) -> T | None:
        """Returns the next item, without consuming it; None at the end."""
        if self._head is None:
            self._head = next(iter(self), None)
        return self._head

    def __iter__(self) -> Iterator[T]:
        return self.until(lambda: False)

    def until(self, stopped: Callable[[], object]) -> Iterator[T]:
        """Yields items until `stopped` returns true; it is called several times a second."""
        while not stopped():
            if (head := self._head) is not None:
                self._head = None
                yield head
                continue
            try:
                item, error = self._ready.get(timeout=POLL)
            except queue.Empty:
                continue
            if error is not None and not isinstance(error, Exception):
                raise RunError(f"preparing batches failed: {one_line(error)}") from error
            if error is not None:
                raise error
            if item is None:
                self._ready.put((None, None))  # the next iteration ends as well
                return
            yield item


@dataclass(frozen=True)
class HostText:
    """One host turns its share of a data set into batches, as the configuration asks."""

    config: Config
    dataset: Dataset
    tokenizer: Tokenizer
    worker: Worker

    @property
    def choice(self) -> TokenChoice:
        return TokenChoice(self.config.positions, self.config.drop_token_ids)

    @property
    def max_samples(self) -> int | None:
        """Returns the most samples that this host stores; None: no limit."""
        limit = self.config.max_samples  # of the machine
        return None if limit is None else len(range(self.worker.host, limit, self.worker.hosts))

    def open(
        self, storage: ActivationStorage, watchdog: AbstractContextManager[object]
    ) -> tuple[DocumentStream, Prefetch[Batch]]:
        """Returns the host's documents, and the batches whose samples are not stored yet.

        watchdog: watches over the wait for the first batch. Raises InputError if that one cannot be
        read, or if there is no text at all.
        """
        documents = self._documents()
        batches = Prefetch(self._not_stored(documents, storage), BATCHES_AHEAD)
        if storage.complete:
            return documents, batches
        try:
            with watchdog:
                first = batches.peek()
        except RunError as error:
            raise with_remedy(error) from error
        if first is None and self.worker == Worker() and not storage.found_samples:
            raise InputError("the data set is empty: no row has text; expected at least one")
        return documents, batches

    def _documents(self) -> DocumentStream:
        """Returns the host's share of the documents, from the beginning."""
        column, skip = self.config.text_column, self.config.skip_bad_rows
        start_digest = self.dataset.files.start_digest
        return DocumentStream(self.dataset.rows, column, self.worker, skip, start_digest)

    def _not_stored(self, documents: DocumentStream, storage: ActivationStorage) -> Iterator[Batch]:
        """Yields the batches of every range of shards to store, and one more between ranges."""
        rows, length = self.config.batch_size, self.config.max_seq_length
        for number, gap in enumerate(storage.plan.ranges):
            documents = self._documents() if number else documents
            stream = samples(documents, self.tokenizer, length, storage.max_samples, gap.cursor)
            for batch in map(self.choice.mark, pack(stream, rows, length)):
                yield batch
                if gap.until is not None and batch.samples[-1].sample.sample_idx >= gap.until:
                    break
