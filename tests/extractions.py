"""Stores small extractions without a model, and changes or damages their files afterwards.

A part of a run is what one host of one machine stores. Its number is the tuple (machine, host,
machines, hosts).
"""

import gzip
import hashlib
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
from crc32c import crc32c
from storages import open_storage

from activation_extraction.cli.flags import StorageOptions, TextOptions
from activation_extraction.store.folder import ANY, Folder
from activation_extraction.store.formats import format_of
from activation_extraction.store.identity import Identity
from activation_extraction.store.pickle_file import read_records
from activation_extraction.store.run_log import seal, unseal
from activation_extraction.store.sample_table import pack_table, stored_samples
from activation_extraction.store.shard import ShardSample
from activation_extraction.store.storage import ActivationStorage
from activation_extraction.text.batch import Batch, Sample, Worker
from activation_extraction.text.mark import Mark
from activation_extraction.text.packing import pack
from activation_extraction.text.sample_facts import SampleFacts

HOOKS: dict[Any, str] = {3: "blocks.3.hook_resid_post", 5: "blocks.5.hook_resid_post"}
HIDDEN, VOCABULARY, TOKENS, ROWS = 16, 50, 10, 2


def identity_of(machine: int = 0, host: int = 0, machines: int = 1, hosts: int = 1) -> Identity:
    return Identity(
        model_digest="0" * 64,
        data="files",
        data_revision="1" * 64,
        text=TextOptions(max_seq_length=TOKENS),
        storage=StorageOptions(shard_size_gb=4e-6),
        dtype="float32",
        activation_dtype="float32",
        worker=Worker(machine, machines, host, hosts),
    )


def changed_identity(identity: Identity, **fields: Any) -> Identity:
    """Returns a copy of an identity in which some fields of its JSON have other values."""
    return Identity.from_json({**identity.to_json(), **fields})


def folder_name(machine: int, host: int, machines: int, hosts: int) -> str:
    if hosts > 1:
        return f"machine_{machine:03d}_host_{host:02d}"
    return f"machine_{machine:03d}" if machines > 1 else ""


def samples(count: int, worker: Worker) -> Iterator[Sample]:
    for number in range(count):
        index = worker.sample_idx(number)
        token_ids = np.random.default_rng(index).integers(0, VOCABULARY, TOKENS, np.int32)
        facts = SampleFacts(index, doc_id=f"id-{index}", text_preview=f"text {index} ä")
        yield Sample(facts, token_ids, Mark(number, skip=number))


def activations_of(batch: Batch) -> dict[Any, np.ndarray]:
    """Returns random activations of a batch: key -> (ROWS, TOKENS, HIDDEN)."""
    first, shape = batch.samples[0].sample.facts.sample_idx, (ROWS, TOKENS, HIDDEN)
    return {
        key: np.random.default_rng([first, key]).standard_normal(shape, np.float32) for key in HOOKS
    }


def open_part(root: Path, *part: int, identity: dict | None = None, **options: Any):
    """Makes the storage of one part.

    Args:
        root: The folder of the run.
        part: Machine, host, machines, hosts. None of them for a run with one part.
        identity: Fields of the identity that are changed.
        options: More arguments of `open_storage`.
    """
    part = part or (0, 0, 1, 1)
    usual: dict[str, Any] = {
        "shard_size_gb": 4e-6,
        "hook_facts": {key: {"width": HIDDEN} for key in HOOKS},
    }
    return open_storage(
        root / folder_name(*part),
        HOOKS,
        identity=changed_identity(identity_of(*part), **(identity or {})),
        metadata={"model": {"hidden_size": HIDDEN, "vocab_size": VOCABULARY}, "backend": "cpu"},
        **(usual | options),
    )


def batches(count: int, machine: int = 0, host: int = 0, machines: int = 1, hosts: int = 1):
    return pack(samples(count, Worker(machine, machines, host, hosts)), ROWS, TOKENS)


def extract(root: Path, *part: int, count: int = 10, **options: Any) -> ActivationStorage:
    """Stores a complete part with `count` samples of 1280 bytes, of which three make a shard.

    See `open_part` for the other arguments.
    """
    with open_part(root, *part, **options) as storage:
        for batch in batches(count, *part):
            storage.add_batch(batch, activations_of(batch))
    return storage


def edit(path: Path, change: Callable[[dict], object]) -> None:
    """Changes the content of a JSON, and updates its checksum."""
    content = unseal(path.read_bytes(), str(path))
    change(content)
    path.write_bytes(seal(content))


def flip(path: Path, at: int, bits: int = 1) -> None:
    """Flips bits of the byte at an offset, which counts from the end if it is negative."""
    content = bytearray(path.read_bytes())
    content[at] ^= bits
    path.write_bytes(content)


def agree(path: Path, **changes: Any) -> None:
    """Updates the JSON of a shard after one of its files was changed.

    Args:
        path: The changed file, whose size and checksums are updated.
        changes: New values of other fields of the JSON.
    """
    content = path.read_bytes()
    of_activations = len(content) if format_of(path.name) else 0
    blocks = (content[start : start + 2**20] for start in range(0, of_activations, 2**20))
    facts = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "crc32c": "".join(f"{crc32c(block):08x}" for block in blocks),
    }

    def change(commit: dict) -> None:
        commit.update(changes)
        commit["files"].setdefault(path.name, {"version": None}).update(facts)

    edit(path.with_name(f"{path.name.split('.')[0]}.json"), change)


def records_in(path: Path, limit: int = 10**8) -> Any:
    """Returns the records of a pickled shard, which has at most `limit` bytes decompressed."""
    with open(path, "rb") as file:
        return read_records(file, path.name, limit)


def load(folder: Path, number: int) -> Any:
    with gzip.open(folder / f"shard_{number:04d}.pkl.gz") as file:
        return pickle.load(file)


def replace_shard(folder: Path, number: int, content: bytes, unpacked: int | None = None) -> None:
    """Replaces the file of a pickled shard, and updates its JSON and metadata.json.

    Args:
        folder: The folder of the shard.
        number: The number of the shard.
        content: The new content of the file.
        unpacked: The size after decompression that the JSON records. None for the right size.
    """
    unpacked = len(gzip.decompress(content)) if unpacked is None else unpacked
    path = folder / f"shard_{number:04d}.pkl.gz"
    more = len(content) - path.stat().st_size
    path.write_bytes(content)
    agree(path, unpacked=unpacked)
    edit(folder / "metadata.json", lambda run: run.update(bytes=run["bytes"] + more))


def shard_file(folder: Path, number: int) -> Path:
    """Returns the path of a shard's activations, in either format."""
    (path,) = (file for file in folder.glob(f"shard_{number:04d}.*") if format_of(file.name))
    return path


def change_shard(folder: Path, number: int, change: Callable[[Any], object]) -> None:
    """Changes the records of a pickled shard, and updates its JSON and metadata.json."""
    shard = load(folder, number)
    change(shard)
    replace_shard(folder, number, gzip.compress(pickle.dumps(shard, protocol=4), 1, mtime=0))


def change_table(folder: Path, number: int, change: Callable[[list[dict]], object]) -> None:
    """Changes a shard's table of samples, and updates its JSON.

    Args:
        folder: The folder of the shard.
        number: The number of the shard.
        change: Changes the rows: a list of dicts of `tokens` and the facts of a sample.
    """
    path = folder / f"shard_{number:04d}.samples.parquet"
    samples = stored_samples(pyarrow.parquet.read_table(path))
    rows = [{"tokens": sample.num_kept_tokens, **vars(sample.facts)} for sample in samples]
    change(rows)
    numbers = [row["sample_idx"] for row in rows]
    changed = []
    for row in rows:
        positions = np.arange(row.pop("tokens"))
        changed.append(ShardSample(SampleFacts(**row), None, positions))
    path.write_bytes(pack_table(changed))
    cuts = [row["cut"] for row in rows if row["cut"] > 0]
    span = {"first": numbers[0], "last": numbers[-1], "count": len(numbers)}
    agree(path, samples=span, cut_samples=len(cuts), cut_tokens=sum(cuts))


def upload(root: Path, url: str) -> None:
    """Copies all files of a run into a bucket."""
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        folder = Folder(url).child(str(path.parent.relative_to(root)).strip("."))
        folder.write(path.name, path.read_bytes(), ANY)
