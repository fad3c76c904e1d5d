"""Runs everything but the model over texts of a few bytes, and reads what such runs leave."""

import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from extractions import edit
from row_files import write_rows
from storages import open_storage

from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run import demo
from activation_extraction.text.documents import DocumentStream
from activation_extraction.text.packing import pack
from activation_extraction.text.readers import ArcTask, TextColumn
from activation_extraction.text.rows import RowSchema
from activation_extraction.text.samples import SampleSettings, samples
from activation_extraction.text.sources import open_files
from activation_extraction.text.tokenizer import load_tokenizer

HOOKS = {1: "blocks.1.hook_resid_post", 2: "blocks.2.hook_resid_post"}
HIDDEN = 4
LENGTH = 24  # tokens of a sample, at most
TEXT = RowSchema((TextColumn("text"), ArcTask()))


def stream_of(path, worker=None, skip=False, schema=TEXT):
    """Opens the documents of one worker.

    Args:
        path: The file, the folder or the glob of the data.
        worker: The worker. None for the only one.
        skip: Whether to skip rows that cannot be used.
        schema: The columns to read of each row, and their readers.
    """
    return DocumentStream(open_files(str(path), schema), schema, worker, skip_bad_rows=skip)


def documents_in(documents):
    """Returns the documents from the beginning of the data; None for a row without a document."""
    return [row.document for row in documents.read(documents.beginning)]


def drained(generator):
    """Runs a generator to its end; returns the list of what it yields, and what it returns."""
    items = []
    while True:
        try:
            items.append(next(generator))
        except StopIteration as end:
            return items, end.value


def activations(batch):
    """Returns activations of a batch that do not depend on how samples are packed.

    Returns:
        Key -> array (B, T, HIDDEN) in float32.
    """
    values = {key: np.zeros((*batch.token_ids.shape, HIDDEN), np.float32) for key in HOOKS}
    for placed in batch.samples:
        ramp = np.arange(placed.stop - placed.start_in_row, dtype=np.float32)[:, None]
        for number, array in enumerate(values.values()):
            ramps = placed.sample.facts.sample_idx + ramp / 64 + np.arange(HIDDEN) + number
            array[placed.row_index, placed.start_in_row : placed.stop] = ramps
    return values


def run_over(documents, tokenizer, folder, settings=None, rows=2, stop_after=None, **options):
    """Runs everything but the model.

    Args:
        documents: The documents of the run.
        tokenizer: The tokenizer.
        folder: The folder of the run.
        settings: The settings by which documents become samples. None for whole documents, cut
            at LENGTH tokens.
        rows: The rows of a batch.
        stop_after: The number of batches after which the run ends early. None to complete it.
        options: More arguments of `open_storage`.

    Returns:
        The storage, which is closed.
    """
    storage = open_storage(folder, HOOKS, **options)
    try:
        storage.open()
        complete = storage.complete
        try:
            if not complete:
                marks = {"start": storage.plan.mark, "stored": storage.stored_after_mark}
                marks |= {"until": storage.plan.num_samples_to_read, **storage.limits}
                marks["limits_from"] = storage.plan.end_of_stored(documents.worker)
                stream = samples(documents, tokenizer, settings or SampleSettings(LENGTH), **marks)
                for batch in islice(pack(stream, rows, LENGTH), stop_after):
                    kept = slice(None) if batch.kept_mask is None else batch.kept_mask
                    values = {key: array[kept] for key, array in activations(batch).items()}
                    storage.add_batch(batch, values)
                complete = stop_after is None
        finally:
            storage.finalize(complete)
    finally:
        storage.close(patient=True)
    return storage


def write_texts(path, count):
    """Writes texts of 0 to 30 bytes."""
    chance = random.Random(1)
    texts = ["x" * chance.choice([0, 1, *range(2, 31)]) for _ in range(count)]
    return write_rows(path, [{"text": text} for text in texts])


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    """Returns a tokenizer for which each byte is a token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    demo.write_tokenizer(folder, [])
    (folder / "config.json").write_text("{}")
    files = Checkpoint(str(folder)).tokenizer_files()
    return load_tokenizer(files, str(folder), 2048).backend_tokenizer


both_formats = pytest.mark.parametrize("shard_format", SHARD_FORMATS)


def content(folder: Path) -> dict[str, object]:
    """Returns the content of the shards in a folder, for comparing two runs.

    Returns:
        The name of a file -> its bytes. For the JSON of a shard, the dict of the fields that do not
        differ between two runs over the same data.
    """
    content_by_name: dict[str, object] = {}
    differs = {"committed", "began", "checksum", "run", "owner", "url", "files"}
    for path in sorted(folder.glob("shard_*")):
        content_by_name[path.name] = path.read_bytes()
        if path.suffix == ".json":
            commit = json.loads(path.read_bytes())
            content_by_name[path.name] = {key: commit[key] for key in commit if key not in differs}
    return content_by_name


def files_in(folder):
    """Returns the bytes and the time of the last change (in ns) of each file, by name."""
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}


def status(folder):
    return json.loads((folder / "metadata.json").read_bytes())["status"]


def set_status(folder, status):
    """Changes the status in metadata.json, for example to that of a run that was killed."""
    edit(folder / "metadata.json", lambda content: content.update(status=status))
