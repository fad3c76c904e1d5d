"""Runs of all but the model over texts of a few bytes: the fixture `run`, and what it leaves."""

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
from extractions import edit
from storages import open_storage

from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run import demo
from activation_extraction.store.formats import chosen_format
from activation_extraction.store.identity import Identity
from activation_extraction.text.documents import DocumentStream, RowCounts
from activation_extraction.text.packing import pack
from activation_extraction.text.rows import RowForm, TextColumn
from activation_extraction.text.samples import SampleForm, samples
from activation_extraction.text.sources import open_files
from activation_extraction.text.tokenizer import load_tokenizer

HOOKS = {1: "blocks.1.hook_resid_post", 2: "blocks.2.hook_resid_post"}
HIDDEN = 4
DOCUMENTS = 40


TEXT = RowForm(TextColumn("text"))


def stream_of(path, worker=None, skip=False, form=TEXT):
    """The documents of one worker in the files at `path`. skip: rows that cannot be used."""
    return DocumentStream(open_files(str(path), form.columns), form, worker, RowCounts(skip))


def activations(batch):
    """Values that do not depend on how the samples are packed."""
    values = {key: np.zeros((*batch.token_ids.shape, HIDDEN), np.float32) for key in HOOKS}
    for placed in batch.samples:
        ramp = np.arange(placed.stop - placed.start, dtype=np.float32)[:, None]
        for number, value in enumerate(values.values()):
            own = placed.sample.sample_idx + ramp / 64 + np.arange(HIDDEN) + number
            value[placed.row, placed.start : placed.stop] = own
    return values


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    """One byte, one token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    demo.write_tokenizer(folder, [])
    (folder / "config.json").write_text("{}")
    return load_tokenizer(Checkpoint(str(folder)).tokenizer_files(), str(folder), 2048)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Texts of 1 to 30 bytes, some empty."""
    chance, path = random.Random(1), tmp_path_factory.mktemp("rows") / "rows.jsonl"
    texts = ["x" * chance.choice([0, 1, *range(2, 31)]) for _ in range(DOCUMENTS)]
    path.write_text("".join(json.dumps({"text": t, "id": i}) + "\n" for i, t in enumerate(texts)))
    return path


@pytest.fixture
def shard_format():
    """Of what `run` stores; `both_formats` has a test run with each."""
    return "pickle"


both_formats = pytest.mark.parametrize("shard_format", SHARD_FORMATS)


def shard_name(number, shard_format="pickle"):
    """The name of a shard's file."""
    return f"shard_{number:04d}{chosen_format(shard_format, True).suffix}"


@pytest.fixture
def run(byte_tokenizer, rows, shard_format):
    """Runs all but the model; with `interrupt_after`, up to the batch with that sample."""

    def run(folder, *, interrupt_after=math.inf, **options):
        usual = {"shard_size_gb": 1.5e-6, "shard_format": shard_format}
        identity = Identity(model_digest="tiny")
        place = open_storage(folder, HOOKS, **({"identity": identity} | usual | options))
        try:
            place.open()
            if not place.complete:
                form, marks = (
                    SampleForm(24),
                    {"start": place.plan.mark, "stored": place.stored_after_mark},
                )
                found = samples(stream_of(rows), byte_tokenizer, form, **marks, **place.limits)
                for batch in pack(found, 2, 32):
                    place.add_batch(batch, activations(batch))
                    if max(each.sample.sample_idx for each in batch.samples) >= interrupt_after:
                        place.finalize(complete=False)
                        break
            place.finalize()
        finally:
            place.close(patient=True)
        return place

    return run


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


def status(folder):
    return json.loads((folder / "metadata.json").read_bytes())["status"]


def set_status(folder, status):
    """As a run leaves it that was killed."""
    edit(folder / "metadata.json", lambda content: content.update(status=status))
