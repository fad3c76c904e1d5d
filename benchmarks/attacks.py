"""Attacks on the readers: files that somebody wrote to crash them or to exhaust the machine.

Each attack runs in a process of its own, with a limit on its memory and its time, and prints one
line: its name, and how it ended. It ends well when it is read, or refused with ValueError, OSError,
InputError or RunError. The exit status is 1 if any ends otherwise. A new attack is a function that
takes a folder and a generator of chance, and a line in ATTACKS.
"""

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import pickle
import resource
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from activation_extraction.common.errors import InputError, RunError
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.folders import read_folders
from activation_extraction.inspect.report import make_report
from activation_extraction.inspect.status import show_status
from activation_extraction.inspect.verify import verify
from activation_extraction.store.folder import Folder
from activation_extraction.store.formats import format_of
from activation_extraction.store.identity import Identity, StorageOptions
from activation_extraction.store.pickle_file import read_records
from activation_extraction.store.run_record import RunFacts
from activation_extraction.store.sealed_json import seal, unseal
from activation_extraction.store.storage import ActivationStorage
from benchmarks.processes import ROOT

MEMORY = 2**30  # bytes beyond what the imports take
SECONDS = 600
ROUNDS = 200  # of one fuzz
CLEAN = (ValueError, OSError, RunError, InputError)
HOOKS: dict[int | str, str] = {3: "blocks.3.hook_resid_post", 5: "blocks.5.hook_resid_post"}
WIDTH, VOCABULARY = 16, 50
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 10**11, 2**60, 2**70, -(10**30), 0.5, -1e300, 1e300),
    *("", "x", "\x1b[2J", "<script>", "../../x", "9" * 5000, [], [1], [[]], [{}], {}, {"x": []}),
)


def make_run(folder: Path, shard_format: str) -> None:
    """A small complete run: 10 samples in some shards."""
    with ActivationStorage(
        folder,
        HOOKS,
        StorageOptions(shard_size_gb=4e-6, shard_format=shard_format),
        Identity(
            model_digest="0" * 64, data="files", data_revision="1" * 64, max_seq_length=32,
            dtype="float32", activation_dtype="float32",
        ),
        facts=RunFacts(
            {
                "model": {"hidden_size": WIDTH, "vocab_size": VOCABULARY}, "backend": "cpu",
                "configuration": {"model_path": "m", "batch_size": 2}, "versions": {"numpy": "2"},
            },
            {key: {"width": WIDTH} for key in HOOKS},
        ),
    ) as storage:  # fmt: skip
        for index in range(10):
            ids = np.arange(10, dtype=np.int32)
            for key in HOOKS:
                values = np.full((10, WIDTH), index, np.float32)
                storage.add_activation(key, values, index, f"text {index}", ids, f"id-{index}")


def readers(folder: Path) -> Iterator[Callable[[], object]]:
    """Everything that reads a run."""
    root = Folder(str(folder))
    yield lambda: list(ActivationDataset(folder))
    yield lambda: [h.all_tokens for h in ActivationDataset(folder).statistics.values()]
    yield lambda: list(ActivationDataset(folder).batches(8, shuffle=1))
    yield lambda: show_status(root, write=False)
    yield lambda: verify(root, None, 0)


def report(folder: Path) -> str:
    """The outcome of a report."""
    try:
        root = Folder(str(folder))
        make_report(root, read_folders(root))
    except CLEAN as error:
        return f"refused: {error}"
    return "read"


def read(folder: Path) -> str:
    """The outcome of all readers; raises what is not clean."""
    outcome = "read"
    for reader in readers(folder):
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                reader()
        except CLEAN as error:
            outcome = f"refused: {type(error).__name__}: {' '.join(str(error).split()):.90}"
    return outcome


def fuzz(
    folder: Path,
    chance: np.random.Generator,
    shard_format: str,
    spoil: Callable[[Path, np.random.Generator], str],
    outcome: Callable[[Path], str] = read,
    rounds: int = ROUNDS,
) -> str:
    """spoil: changes the files of a fresh run. outcome: of reading them."""
    refused = 0
    for number in range(rounds):
        at = folder / f"{number}"
        make_run(at, shard_format)
        what = spoil(at, chance)
        try:
            refused += outcome(at) != "read"
        except Exception as error:
            raise AssertionError(f"round {number}: {what}: {error!r:.200}") from error
    return f"{rounds} rounds, {refused} refused"


def spoil_bytes(folder: Path, chance: np.random.Generator) -> str:
    """A shard with other bytes at its beginning, to which its JSON agrees."""
    (shard,) = (path for path in folder.glob("shard_0001.*") if format_of(path.name))
    packed = shard.suffix == ".gz"
    data = bytearray(gzip.decompress(shard.read_bytes()) if packed else shard.read_bytes())
    for position in chance.integers(0, min(len(data), 600), chance.integers(1, 5)):
        data[position] = chance.integers(256)
    agree(shard, gzip.compress(data, 1) if packed else bytes(data), len(data))
    return shard.name


def spoil_records(folder: Path, chance: np.random.Generator) -> str:
    """A record with a field of another type."""
    shard = folder / "shard_0001.pkl.gz"
    records = pickle.loads(gzip.decompress(shard.read_bytes()))
    record = records[3][0]
    field = str(chance.choice(list(record)))
    record[field] = VALUES[chance.integers(len(VALUES))]
    data = pickle.dumps(records, 4)
    agree(shard, gzip.compress(data, 1), len(data))
    return f"{field} {record[field]!r:.40}"


def agree(shard: Path, data: bytes, unpacked: int) -> None:
    shard.write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    change = {"bytes": len(data), "sha256": digest, "unpacked": unpacked}
    path = shard.with_name("shard_0001.json")
    path.write_bytes(seal({**unseal(path.read_bytes(), ""), **change}))


def spoil_json(folder: Path, chance: np.random.Generator) -> str:
    """One value, anywhere in one sealed JSON, is another."""
    path = folder / ("metadata.json", "shard_0001.json")[chance.integers(2)]
    content = unseal(path.read_bytes(), "")
    places = list(places_of(content))
    inside, key = places[chance.integers(len(places))]
    before, value = inside[key], VALUES[chance.integers(len(VALUES))]
    inside[key] = value
    path.write_bytes(seal(content))
    return f"{path.name}: {key}: {before!r:.40} -> {value!r:.40}"


def places_of(content: Any) -> Iterator[tuple[Any, Any]]:
    """Every value inside, as container and key."""
    items = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in list(items):
        yield content, key
        if isinstance(value, dict | list):
            yield from places_of(value)


def spoil_header(folder: Path, chance: np.random.Generator) -> str:
    """One value in the header of a safetensors shard is another."""
    shard = folder / "shard_0001.safetensors"
    data = shard.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    content = json.loads(data[8 : 8 + length])
    places = list(places_of(content))
    inside, key = places[chance.integers(len(places))]
    inside[key] = VALUES[chance.integers(len(VALUES))]
    text = json.dumps(content).encode()
    agree(shard, struct.pack("<Q", len(text)) + text + data[8 + length :], len(data))
    return f"{key} -> {inside[key]!r:.40}"


def small_pickle(content: bytes) -> Callable[[Path, np.random.Generator], str]:
    def attack(folder: Path, chance: np.random.Generator) -> str:
        path = folder / "shard_0001.pkl.gz"
        path.write_bytes(gzip.compress(content))
        size = path.stat().st_size
        try:
            read_records(path, 2**60)
        except RunError as error:
            return f"{size:,} bytes, refused: {error}"
        return f"{size:,} bytes, read"

    return attack


def absurd(file: str, **change: Any) -> Callable[[Path, np.random.Generator], str]:
    """A run in one of whose JSONs something else is said."""

    def attack(folder: Path, chance: np.random.Generator) -> str:
        make_run(folder / "run", "pickle")
        path = folder / "run" / file
        content = unseal(path.read_bytes(), "")
        for inside in (content, content.get("samples", {}), content.get("identity", {})):
            if isinstance(inside, dict):
                inside |= {name: value for name, value in change.items() if name in inside}
        path.write_bytes(seal(content))
        return read(folder / "run")

    return attack


ATTACKS: dict[str, Callable[[Path, np.random.Generator], str]] = {
    "bytes of 2**60": small_pickle(b"\x80\x04\x8e" + struct.pack("<Q", 2**60)),
    "shards: 10**11": absurd("metadata.json", shards=10**11),
    "total_machines: 10**11": absurd("metadata.json", total_machines=10**11),
    "last: 10**11": absurd("shard_0001.json", last=10**11),
    "count: 10**11": absurd("shard_0001.json", count=10**11),
    "unpacked: 2**60": absurd("shard_0001.json", unpacked=2**60),
    "fuzzed JSONs": lambda folder, chance: fuzz(folder, chance, "pickle", spoil_json),
    "fuzzed JSONs beside safetensors": lambda f, chance: fuzz(f, chance, "safetensors", spoil_json),
    "fuzzed JSONs in a report": lambda f, chance: fuzz(f, chance, "pickle", spoil_json, report, 40),
    "fuzzed pickles": lambda folder, chance: fuzz(folder, chance, "pickle", spoil_bytes),
    "fuzzed records": lambda folder, chance: fuzz(folder, chance, "pickle", spoil_records),
    "fuzzed safetensors": lambda folder, chance: fuzz(folder, chance, "safetensors", spoil_bytes),
    "fuzzed headers": lambda folder, chance: fuzz(folder, chance, "safetensors", spoil_header),
}


def run_here(name: str, seed: int) -> None:
    """In the child: prints how an attack ended; raises whatever is not clean."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    with tempfile.TemporaryDirectory() as folder:
        print(ATTACKS[name](Path(folder), np.random.default_rng(seed)))


def outcome_of(name: str, seed: int) -> tuple[bool, str]:
    """Whether an attack ended well, and how."""
    command = [sys.executable, "-m", "benchmarks.attacks", "--here", name, "--seed", str(seed)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return False, f"took more than {SECONDS} s"
    if found.returncode == 0:
        return True, found.stdout.strip()
    last = (found.stderr.strip().splitlines() or [""])[-1]
    return False, f"ended with status {found.returncode}: {last:.300}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="attacks whose name contains this")
    parser.add_argument("--here", choices=ATTACKS, help="runs one attack in this process")
    flags = parser.parse_args()
    if flags.here:
        run_here(flags.here, flags.seed)
        return 0
    bad = 0
    for name in ATTACKS:
        if flags.only in name:
            well, how = outcome_of(name, flags.seed)
            bad += not well
            print(f"{name}: {'' if well else 'BAD: '}{how}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
