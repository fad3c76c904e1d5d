"""What runs of all but the model need over texts of a few bytes, and what runs leave."""

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
from activation_extraction.text.rows import RowForm
from activation_extraction.text.samples import SampleForm, samples
from activation_extraction.text.sources import open_files
from activation_extraction.text.tokenizer import load_tokenizer

HOOKS = {1: "blocks.1.hook_resid_post", 2: "blocks.2.hook_resid_post"}
HIDDEN = 4
LENGTH = 24  # the most tokens of a sample
TEXT = RowForm((TextColumn("text"), ArcTask()))


def stream_of(path, worker=None, skip=False, form=TEXT):
    """The documents of one worker in the files at `path`. skip: rows that cannot be used."""
    return DocumentStream(open_files(str(path), form), form, worker, skip_bad_rows=skip)


def documents_in(documents):
    """The documents from the beginning of the data on; None for each row that gives none."""
    return [row.document for row in documents.read(documents.beginning)]


def drained(generator):
    """All that a generator yields, and what it returns."""
    items = []
    while True:
        try:
            items.append(next(generator))
        except StopIteration as end:
            return items, end.value


def activations(batch):
    """Values that do not depend on how the samples are packed."""
    values = {key: np.zeros((*batch.token_ids.shape, HIDDEN), np.float32) for key in HOOKS}
    for placed in batch.samples:
        ramp = np.arange(placed.stop - placed.start, dtype=np.float32)[:, None]
        for number, value in enumerate(values.values()):
            own = placed.sample.facts.sample_idx + ramp / 64 + np.arange(HIDDEN) + number
            value[placed.row, placed.start : placed.stop] = own
    return values


def run_over(documents, tokenizer, folder, form=None, rows=2, stop_after=None, **options):
    """Runs all but the model, and returns the storage.

    stop_after: how many batches are stored before the run ends early. options: of open_storage.
    """
    place = open_storage(folder, HOOKS, **options)
    try:
        place.open()
        complete = place.complete
        try:
            if not complete:
                marks = {"start": place.plan.mark, "stored": place.stored_after_mark}
                marks |= {"until": place.plan.until, **place.limits}
                marks["limits_from"] = place.plan.end_of_stored(documents.worker)
                found = samples(documents, tokenizer, form or SampleForm(LENGTH), **marks)
                for batch in islice(pack(found, rows, LENGTH), stop_after):
                    kept = slice(None) if batch.kept is None else batch.kept
                    values = {key: each[kept] for key, each in activations(batch).items()}
                    place.add_batch(batch, values)
                complete = stop_after is None
        finally:
            place.finalize(complete)
    finally:
        place.close(patient=True)
    return place


def write_texts(path, count):
    """Writes texts of 1 to 30 bytes, some empty."""
    chance = random.Random(1)
    texts = ["x" * chance.choice([0, 1, *range(2, 31)]) for _ in range(count)]
    return write_rows(path, [{"text": text} for text in texts])


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    """Each byte is a token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    demo.write_tokenizer(folder, [])
    (folder / "config.json").write_text("{}")
    files = Checkpoint(str(folder)).tokenizer_files()
    return load_tokenizer(files, str(folder), 2048).backend_tokenizer


both_formats = pytest.mark.parametrize("shard_format", SHARD_FORMATS)


def content(folder: Path) -> dict[str, object]:
    """Shards as bytes, commits without what differs between two runs."""
    found: dict[str, object] = {}
    differs = {"committed", "began", "checksum", "run", "owner", "url", "files"}
    for path in sorted(folder.glob("shard_*")):
        found[path.name] = path.read_bytes()
        if path.suffix == ".json":
            commit = json.loads(path.read_bytes())
            found[path.name] = {key: commit[key] for key in commit if key not in differs}
    return found


def files_in(folder):
    """Returns the bytes of each file, and when it was written."""
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}


def status(folder):
    return json.loads((folder / "metadata.json").read_bytes())["status"]


def set_status(folder, status):
    """Leaves a folder as a run does that was killed."""
    edit(folder / "metadata.json", lambda content: content.update(status=status))
