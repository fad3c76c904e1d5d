"""Runs of all but the model over texts of a few bytes: the fixture `run`, and what it leaves."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from storages import open_storage

from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.errors import RunError, StorageError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run import demo
from activation_extraction.store.formats import chosen_format
from activation_extraction.store.identity import Identity
from activation_extraction.store.sealed_json import seal
from activation_extraction.text.batch import Batch
from activation_extraction.text.documents import DocumentStream, RowCounts
from activation_extraction.text.packing import pack
from activation_extraction.text.rows import RowForm, TextColumn
from activation_extraction.text.samples import SampleForm, load_tokenizer, samples
from activation_extraction.text.sources import open_files

HOOKS = {1: "blocks.1.hook_resid_post", 2: "blocks.2.hook_resid_post"}
HIDDEN = 4
DOCUMENTS = 40


TEXT = RowForm(TextColumn("text"))


def stream_of(path, worker=None, skip=False, form=TEXT):
    """The documents of one worker in the files at `path`. skip: rows that cannot be used."""
    return DocumentStream(open_files(str(path), form.columns), form, worker, RowCounts(skip))


def activations(batch):
    values = {key: np.zeros((*batch.token_ids.shape, HIDDEN), np.float32) for key in HOOKS}
    for sample, row, start in batch.samples:
        stop = start + len(sample.token_ids)
        ramp = np.arange(stop - start, dtype=np.float32)[:, None]
        for number, value in enumerate(values.values()):
            value[row, start:stop] = sample.sample_idx + ramp / 64 + np.arange(HIDDEN) + number
            value[row, start:stop] += row / 4 + batch.samples[0].sample.sample_idx / 1024
    if batch.kept is None:
        return values
    return {key: value[batch.kept] for key, value in values.items()}


class Source(NamedTuple):
    """What a run reads: `documents()` from the beginning, and what makes samples of them.

    hooks, values: the names by key, and the values of a batch.
    """

    documents: Callable[[], Any]
    tokenizer: Any
    form: SampleForm
    identity: Identity = Identity(model_digest="tiny")
    hooks: Mapping[Any, str] = HOOKS
    values: Callable[[Batch], dict[Any, np.ndarray]] = activations


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the run goes on."""


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory):
    """One byte, one token."""
    folder = tmp_path_factory.mktemp("tokenizer")
    demo.write_tokenizer(folder, [])
    (folder / "config.json").write_text("{}")
    files = Checkpoint(str(folder)).tokenizer_files()
    return load_tokenizer(files, str(folder), 2048)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Texts of 1 to 30 bytes, some empty."""
    chance = random.Random(1)
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
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
    return chosen_format(shard_format, True).file_name(number)


@pytest.fixture
def source(byte_tokenizer, rows):
    """What `run` reads; a test may replace it."""
    return Source(lambda: stream_of(rows), byte_tokenizer, SampleForm(24))


@pytest.fixture
def run(source, shard_format):
    """Runs all but the model; what is stored depends on how samples are packed, too."""

    def run(folder, *, kill_after=None, interrupt_after=None, values=source.values, **options):
        place = open_storage(
            folder,
            source.hooks,
            identity=source.identity,
            **({"shard_size_gb": 1.5e-6, "shard_format": shard_format} | options),
        )
        try:
            if place.complete:
                place.finalize()
                return place
            found = samples(
                source.documents(),
                source.tokenizer,
                source.form,
                start=place.cursor,
                **place.limits,
            )
            batches = pack(found, 2, 32, () if place.cursor is None else place.cursor.taken)
            place.open()
            place.record({"found": place.plan.samples})
            original = place._cutter.add

            def add(sample, slices):
                if kill_after is not None and sample.sample_idx >= kill_after:
                    raise Killed
                original(sample, slices)

            place._cutter.add = add
            for batch in batches:
                place.add_batch(batch, values(batch))
                if interrupt_after is not None and place._cutter.last_sample >= interrupt_after:
                    place.finalize(complete=False)
                    return place
            place.finalize()
        except StorageError:
            raise
        except RunError:  # of the data, as in an extraction
            place.finalize(complete=False)
            raise
        finally:
            place.close(patient=True)
        return place

    return run


def content(folder: Path) -> dict[str, object]:
    """Shards as bytes, commits without their times."""
    found: dict[str, object] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith("shard") and path.suffix == ".json":
            commit = json.loads(path.read_bytes())
            found[path.name] = {
                key: value
                for key, value in commit.items()
                if key not in ("committed", "began", "checksum")
            }
        elif path.is_file() and path.name not in ("metadata.json", "metrics.jsonl"):
            found[path.name] = path.read_bytes()
    return found


def shards_of(found):
    """The number of shards in what `content` has found."""
    return sum(name.endswith(".json") for name in found)


@pytest.fixture
def whole(run, tmp_path):
    """What an uninterrupted run stores."""
    run(tmp_path / "whole")
    return content(tmp_path / "whole")


def status(folder):
    return json.loads((folder / "metadata.json").read_bytes())["status"]


def set_status(folder, status):
    """As a run leaves it that was killed."""
    metadata = json.loads((folder / "metadata.json").read_bytes())
    del metadata["checksum"]
    (folder / "metadata.json").write_bytes(seal({**metadata, "status": status}))
