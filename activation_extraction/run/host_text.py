"""The text of a run: opens the data set, and makes batches of one host's share of it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import datasets
from tokenizers import Tokenizer

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.run.data_files import DataFiles
from activation_extraction.store.metadata import METADATA, identity_of
from activation_extraction.store.storage import ActivationStorage
from activation_extraction.text.batch import Batch, Cursor
from activation_extraction.text.choice import TokenChoice
from activation_extraction.text.documents import DocumentStream, with_remedy
from activation_extraction.text.files import list_files, open_listed
from activation_extraction.text.hub import open_hub_dataset
from activation_extraction.text.packing import pack
from activation_extraction.text.prefetch import Prefetch
from activation_extraction.text.samples import samples
from activation_extraction.text.workers import Worker

BATCHES_AHEAD = 4


@dataclass(frozen=True)
class Dataset:
    """An open data set. Its name and content must stay the same when an extraction continues.

    content: the revision of a hub data set; "" for files, which `files` compares one by one.
    """

    rows: datasets.IterableDataset
    name: str
    content: str
    files: DataFiles = field(default_factory=DataFiles)


def open_dataset(
    path: str | None,
    name: str | None,
    subset: str | None,
    split: str | None,
    text_column: str,
    own: Sequence[Mapping[str, Any]],
    others: Sequence[Mapping[str, Any]] = (),
) -> Dataset:
    """Opens the files at `path`, or else the hub data set with this name, subset and split.

    own, others: the metadata that this host and others have stored already. A hub data set is
    opened at the revision that it records; files must be those that it lists. Raises InputError.
    """
    if path is not None:
        files = DataFiles.found(list_files(path), own, others)
        return Dataset(open_listed(path, files.files, text_column), "files", "", files)
    return _open_from_hub(str(name), subset, str(split), [*others, *own])


def _open_from_hub(
    name: str, subset: str | None, split: str, earlier: Sequence[Mapping[str, Any]]
) -> Dataset:
    source = " ".join(filter(None, (name, subset, split)))
    revision = None
    for metadata in earlier:
        stored = identity_of(metadata, METADATA)
        revision = stored.data_revision if stored.data == source else revision
    rows, revision = open_hub_dataset(name, subset, split, revision)
    return Dataset(rows, source, revision)


def share_of(most: int | None, host: int, hosts: int) -> int | None:
    """How many samples a host stores if its machine stores at most `most`; None: no limit."""
    return None if most is None else len(range(host, most, hosts))


@dataclass(frozen=True)
class HostText:
    """How one host turns its share of a data set into batches of `rows` rows, `length` tokens each.

    max_samples: the most samples that the host stores; None: no limit. choice: the tokens to keep.
    """

    dataset: Dataset
    tokenizer: Tokenizer
    worker: Worker
    text_column: str
    skip_bad_rows: bool
    max_samples: int | None
    rows: int
    length: int
    choice: TokenChoice = TokenChoice()

    def documents(self) -> DocumentStream:
        """The host's share of the documents, from the beginning."""
        return DocumentStream(
            self.dataset.rows,
            self.text_column,
            self.worker,
            self.skip_bad_rows,
            self.dataset.files.reads,
        )

    def batches(
        self, documents: DocumentStream, most: int | None, start: Cursor | None
    ) -> Iterator[Batch]:
        """The batches from `start` on, up to `most` samples counted from the beginning."""
        stream = samples(documents, self.tokenizer, self.length, most, start)
        return map(self.choice.mark, pack(stream, self.rows, self.length))

    def not_stored(
        self,
        documents: DocumentStream,
        storage: ActivationStorage,
        watchdog: AbstractContextManager[object],
    ) -> Prefetch[Batch]:
        """The batches whose samples are not stored yet, prepared in the background.

        watchdog: watches over the wait for the first of them. Raises InputError if that one cannot
        be read, or if there is no text at all.
        """
        if storage.complete:
            return Prefetch(iter(()), BATCHES_AHEAD)
        found = self.batches(documents, self.max_samples, storage.cursor)
        batches = Prefetch(found, BATCHES_AHEAD)
        alone = self.worker == Worker()
        try:
            with watchdog:
                first = batches.peek()
            if first is None and alone and not storage.found_samples:
                raise InputError("the data set is empty: no row has text; expected at least one")
        except RunError as error:
            raise with_remedy(error) from error
        return batches

    def of_gaps(self, storage: ActivationStorage) -> Prefetch[Batch]:
        """The batches with the samples of damaged shards, and one more after each gap."""

        def batches() -> Iterator[Batch]:
            for gap in storage.plan.ranges:
                found = self.batches(self.documents(), storage.max_samples, gap.cursor)
                for batch in found:
                    yield batch
                    if gap.until is not None and batch.samples[-1].sample.sample_idx >= gap.until:
                        break

        return Prefetch(batches(), BATCHES_AHEAD)
