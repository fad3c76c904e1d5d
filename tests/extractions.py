"""Small extractions without a model, as a run leaves them, and ways to change them afterwards."""

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
    """Returns an identity with other values for fields of its JSON."""
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
    """Key -> (B, T, D)"""
    first, shape = batch.samples[0].sample.facts.sample_idx, (ROWS, TOKENS, HIDDEN)
    return {
        key: np.random.default_rng([first, key]).standard_normal(shape, np.float32) for key in HOOKS
    }


def open_part(root: Path, *part: int, identity: dict | None = None, **options: Any):
    """The storage of one host. part: machine, host, machines, hosts."""
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
    """A complete part: `count` samples of 1280 bytes, three to a shard."""
    with open_part(root, *part, **options) as storage:
        for batch in batches(count, *part):
            storage.add_batch(batch, activations_of(batch))
    return storage


def edit(path: Path, change: Callable[[dict], object]) -> None:
    """Changes a JSON and gives it its right checksum again."""
    content = unseal(path.read_bytes(), str(path))
    change(content)
    path.write_bytes(seal(content))


def flip(path: Path, at: int, bits: int = 1) -> None:
    """Changes bits of a byte. at: counted from the end if it is negative."""
    data = bytearray(path.read_bytes())
    data[at] ^= bits
    path.write_bytes(data)


def agree(path: Path, **changes: Any) -> None:
    """Makes the JSON of a shard agree to a file that was changed. changes: of its other fields."""
    data = path.read_bytes()
    of_activations = len(data) if format_of(path.name) else 0
    blocks = (data[start : start + 2**20] for start in range(0, of_activations, 2**20))
    facts = {
        "bytes": len(data),
        "sha256": hashlib.sha256(data).hexdigest(),
        "crc32c": "".join(f"{crc32c(block):08x}" for block in blocks),
    }

    def change(content: dict) -> None:
        content.update(changes)
        content["files"].setdefault(path.name, {"version": None}).update(facts)

    edit(path.with_name(f"{path.name.split('.')[0]}.json"), change)


def records_in(path: Path, limit: int = 10**8) -> Any:
    """The records of a pickled shard, which may unpack to so many bytes."""
    with open(path, "rb") as file:
        return read_records(file, path.name, limit)


def load(folder: Path, number: int) -> Any:
    with gzip.open(folder / f"shard_{number:04d}.pkl.gz") as file:
        return pickle.load(file)


def replace_shard(folder: Path, number: int, data: bytes, unpacked: int | None = None) -> None:
    """Other bytes for a shard, to which its JSON and the metadata agree.

    unpacked: what the JSON says of that; what is true by default.
    """
    unpacked = len(gzip.decompress(data)) if unpacked is None else unpacked
    path = folder / f"shard_{number:04d}.pkl.gz"
    more = len(data) - path.stat().st_size
    path.write_bytes(data)
    agree(path, unpacked=unpacked)
    edit(folder / "metadata.json", lambda content: content.update(bytes=content["bytes"] + more))


def shard_file(folder: Path, number: int) -> Path:
    """The file of a shard, in whichever format."""
    (found,) = (p for p in folder.glob(f"shard_{number:04d}.*") if format_of(p.name))
    return found


def change_shard(folder: Path, number: int, change: Callable[[Any], object]) -> None:
    """Changes the records of a shard; the sizes and the sha256 in its JSON agree."""
    shard = load(folder, number)
    change(shard)
    replace_shard(folder, number, gzip.compress(pickle.dumps(shard, protocol=4), 1, mtime=0))


def change_table(folder: Path, number: int, change: Callable[[list[dict]], object]) -> None:
    """Changes the rows of a shard's table of samples, dicts of `tokens` and the facts of a sample;
    its JSON agrees."""
    path = folder / f"shard_{number:04d}.samples.parquet"
    samples = stored_samples(pyarrow.parquet.read_table(path))
    rows = [{"tokens": sample.tokens, **vars(sample.facts)} for sample in samples]
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
