"""Reading from a bucket: `python -m benchmarks.reading`. Needs PyTorch, as the tests do.

It stores runs in bfloat16 and safetensors, serves them from benchmarks/bucket_server.py with a
latency per request and a rate per connection, and prints MB/s of activations for

- one hook of one, width 3584, shuffled and in order;
- one hook of fourteen, width 896, shuffled and in order;
- the assistant's tokens of conversations, shuffled;
- two runs of the same data with shards of different sizes, paired, shuffled;
- the training loop of the README with few features, and its steps alone on data in memory.

Each follows, in a round, three bare readers of the same hooks' bytes, in another process, so that
neither finds memory as the other has left it:

- `bare`: 32 ranges of at most 8 MiB at the same time with obstore, the client that the product
  uses, where each range is looked through once, as somebody would do it by hand; `share` is of it;
- `of 16`: the same with 16 ranges of at most 2 MiB;
- sockets that receive 32 ranges of 8 MiB into buffers that are used again: the least it can cost.

Every figure is of the second of two passes, and the first round is left out: the buffer of 256 MiB
of each hook is new memory once in a run, however long it is, and a virtual machine may take longer
for it than for a GB of such a small run. Opening a run is not measured, unless --open asks for it
alone: of a run of so many shards of 14 hooks. Figures are the median over the rounds, with the
least and the largest. The last line printed is one JSON object. The runs take 12 GB on the disk,
and should fit into the page cache.
"""

import argparse
import http.client
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import obstore
import torch
from obstore.store import GCSStore

from activation_extraction import ROLES, ActivationDataset, paired
from activation_extraction.cli.flags import StorageOptions, TextOptions
from activation_extraction.model.weight_files import LocalFile
from activation_extraction.store.identity import Identity, RunFacts
from activation_extraction.store.storage import ActivationStorage
from activation_extraction.text.batch import Sample
from activation_extraction.text.mark import Mark
from activation_extraction.text.packing import pack
from activation_extraction.text.sample_facts import SampleFacts
from benchmarks.bucket_server import BUCKET, RATE, bucket_server, counts
from benchmarks.processes import print_result

BATCH, MIB = 1024, 2**20
BARE, OF_16 = (32, 8 * MIB), (16, 2 * MIB)  # how many ranges at the same time, and their bytes
LENGTH = 2048  # tokens of a sample
TURNS = ("system", 40), *(("user", 60), ("assistant", 250)) * 8  # roles, and median tokens
LATENCIES = 0.0, 10.0, 30.0, 100.0  # ms
TRAINED_AT = 30.0  # ms


class Run(NamedTuple):
    """A run to store. bytes: of the hook that is read. shard: bytes."""

    bytes: int
    hooks: int = 1
    width: int = 3584
    shard: int = 128_000_000
    chat: bool = False

    @property
    def names(self) -> list[str]:
        return [f"blocks.{layer}.hook_resid_post" for layer in range(self.hooks)]

    @property
    def read(self) -> str:
        """The hook that is read."""
        return self.names[self.hooks // 2]

    @property
    def folder(self) -> str:
        chat = "_chat" if self.chat else ""
        return f"{self.hooks}x{self.width}_{self.bytes}_by_{self.shard}{chat}"

    def store(self, folder: Path) -> None:
        """Stores the run, unless it is there already."""
        identity = Identity(
            data="files",
            activation_dtype="bfloat16",
            text=TextOptions(
                max_seq_length=LENGTH, messages_column="messages" if self.chat else None
            ),
            storage=StorageOptions(shard_format="safetensors"),
        )
        options = StorageOptions(shard_size_gb=self.shard / 1e9, shard_format="safetensors")
        facts = RunFacts(hooks={name: {"width": self.width} for name in self.names})
        chance = np.random.default_rng(0)
        values = chance.standard_normal((4 * LENGTH, self.width), np.float32)
        pool = values.astype(ml_dtypes.bfloat16)
        hooks = dict.fromkeys(self.names)
        with ActivationStorage(
            folder, {name: name for name in hooks}, options, identity, facts=facts
        ) as storage:
            for sample in range(0 if storage.complete else self.bytes // (LENGTH * self.width * 2)):
                self._add(storage, sample, chance, pool)

    def _add(
        self, storage: ActivationStorage, number: int, chance: np.random.Generator, pool: np.ndarray
    ) -> None:
        """Adds a sample of LENGTH tokens, with random slices of the pool as activations."""
        ids = chance.integers(0, 150_000, LENGTH, np.int32)
        labels = labels_of(chance) if self.chat else {}
        facts = SampleFacts(number, {"file": "0.jsonl", "line": number})
        sample = Sample(facts, ids, Mark(number), labels)
        starts = chance.integers(len(pool) - LENGTH, size=self.hooks)
        values: dict[int | str, np.ndarray] = {
            name: pool[None, start : start + LENGTH]
            for name, start in zip(self.names, starts, strict=True)
        }
        (batch,) = pack([sample], 1, LENGTH)
        storage.add_batch(batch, values)


def labels_of(chance: np.random.Generator) -> dict[str, np.ndarray]:
    """The role and the turn of every token of a conversation, with tokens of the template around
    each message."""
    roles, turns = list[int](), list[int]()
    for turn, (role, median) in enumerate(TURNS):
        content = [ROLES.index(role)] * int(chance.lognormal(np.log(median), 0.8) + 1)
        roles += [0, 0, 0, *content, 0, 0]
        turns += [turn] * (len(content) + 5)
    missing = max(0, LENGTH - len(roles))
    roles += roles[-6:-5] * missing
    turns += turns[-1:] * missing
    return {"role": np.array(roles[:LENGTH], np.int32), "turn": np.array(turns[:LENGTH], np.int32)}


def spans(folder: Path, hook: str, most: int) -> list[tuple[str, int, int]]:
    """Files and ranges of at most so many bytes, of all bytes of a hook, as safetensors' headers
    tell."""
    found = []
    for path in sorted(folder.glob("*.safetensors")):
        tensor = LocalFile(path).tensors[hook]
        size = tensor.end - tensor.offset
        parts = -(-size // most)
        cuts = [tensor.offset + size * n // parts for n in range(parts + 1)]
        name = f"{folder.name}/{path.name}"
        found += [(name, *each) for each in zip(cuts, cuts[1:], strict=False)]
    return found


def read_by_obstore(address: str, ranges: list[tuple[str, int, int]], readers: int) -> int:
    """Reads these ranges, so many at once, and returns how many bytes they are."""

    def no_credentials() -> Any:
        return {"token": "", "expires_at": None}

    store = GCSStore(
        BUCKET,
        base_url=f"http://{address}",
        credential_provider=no_credentials,
        client_options={"allow_http": True},
    )

    def work(span: tuple[str, int, int]) -> int:
        content = obstore.get_range(store, span[0], start=span[1], end=span[2])
        values = np.frombuffer(memoryview(content), np.uint8)
        values.max()  # touches every byte
        return values.nbytes

    with ThreadPoolExecutor(readers) as pool:
        return sum(pool.map(work, ranges))


def read_by_sockets(address: str, ranges: list[tuple[str, int, int]], readers: int) -> int:
    """Reads these ranges with so many connections, and returns how many bytes they are."""
    rest = iter(ranges)  # whose `next` is atomic

    def work(_: int) -> int:
        buffer, done = memoryview(bytearray(max(b - a for _, a, b in ranges))), 0
        with closing(http.client.HTTPConnection(address)) as connection:
            for name, start, stop in rest:
                span = {"Range": f"bytes={start}-{stop - 1}"}
                connection.request("GET", f"/{BUCKET}/{name}", headers=span)
                answer, at = connection.getresponse(), 0
                while at < stop - start and (got := answer.readinto(buffer[at : stop - start])):
                    at += got
                answer.read()
                if at < stop - start:
                    raise SystemExit(f"{name}: got {at:,} bytes of {stop - start:,}")
                done += at
        return done

    with ThreadPoolExecutor(readers) as pool:
        return sum(pool.map(work, range(readers)))


def bytes_of(batches: Iterable[Any], hooks: Callable[[Any], list[Any]]) -> int:
    """Takes all batches, and returns how many bytes their activations have."""
    return sum(values.nbytes for batch in batches for values in hooks(batch))


def step_of(hook: str, width: int, features: int) -> Callable[[Any], None]:
    """The README's training step."""
    encoder, decoder = torch.nn.Linear(width, features), torch.nn.Linear(features, width)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)

    def step(batch: Any) -> None:
        x = batch[hook]
        found = encoder(x).relu()
        loss = (decoder(found) - x).square().mean() + 1e-3 * found.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def train(dataset: ActivationDataset, hook: str, features: int) -> int:
    """Runs the loop, and returns the bytes of activations as they are stored."""
    width, tokens = dataset.hooks[hook], 0
    step = step_of(hook, width, features)
    batches = dataset.batches(BATCH, hooks=[hook], shuffle=0, skip_first=1, dtype="float32")
    for batch in batches.torch():
        step(batch)
        tokens += len(batch[hook])
    return tokens * width * 2


def step_alone(width: int, features: int, steps: int = 20) -> float:
    """MB/s of activations in bfloat16 that training takes from memory."""
    batch = {"x": torch.randn(BATCH, width)}
    step = step_of("x", width, features)
    step(batch)
    began = time.perf_counter()
    for _ in range(steps):
        step(batch)
    return steps * BATCH * width * 2 / 1e6 / (time.perf_counter() - began)


class Scenario(NamedTuple):
    """A way to read some runs, whose bytes the bare readers read as well.

    prepare: opens them, and returns a function to be measured, which returns how many bytes of
    activations it got.
    """

    runs: list[Run]
    prepare: Callable[[], Callable[[], int]]


def scenarios(one: Run, many: Run, chat: Run, other: Run, features: int) -> dict[str, Scenario]:
    def of_one(run: Run, **options: Any) -> Scenario:
        def prepare() -> Callable[[], int]:
            dataset = ActivationDataset(f"gs://{BUCKET}/{run.folder}", [run.read])
            return lambda: bytes_of(dataset.batches(BATCH, **options), lambda b: [b[run.read]])

        return Scenario([run], prepare)

    def pairs() -> Callable[[], int]:
        both = paired(*(f"gs://{BUCKET}/{run.folder}" for run in (one, other)))
        batches = both.batches(BATCH, shuffle=0)
        return lambda: bytes_of(batches, lambda b: [b.first[one.read], b.second[one.read]])

    def training() -> Callable[[], int]:
        dataset = ActivationDataset(f"gs://{BUCKET}/{one.folder}")
        return lambda: train(dataset, one.read, features)

    return {
        "one hook of one, shuffled": of_one(one, shuffle=0),
        "one hook of one, in order": of_one(one),
        "one hook of fourteen, shuffled": of_one(many, shuffle=0),
        "one hook of fourteen, in order": of_one(many),
        "assistant's tokens, shuffled": of_one(chat, shuffle=0, roles="assistant"),
        "two runs paired, shuffled": Scenario([one, other], pairs),
        "training": Scenario([one], training),
    }


def measure(
    address: str, scenario: Scenario, root: Path, other: ProcessPoolExecutor
) -> dict[str, float]:
    """One round: the bare readers, in the other process, and after them the scenario."""

    def rate_there(read: Callable[..., int], readers: int, most: int) -> Rate:
        ranges = [s for run in scenario.runs for s in spans(root / run.folder, run.read, most)]
        return [other.submit(rate_of, read, address, ranges, readers) for _ in range(2)][1].result()

    bare, of_16 = (rate_there(read_by_obstore, *how) for how in (BARE, OF_16))
    sockets = rate_there(read_by_sockets, *BARE)
    scenario.prepare()()
    read, before = scenario.prepare(), counts(address)
    ours, after = rate_of(read), counts(address)
    return {
        "bare": bare.speed,
        "of_16": of_16.speed,
        "sockets": sockets.speed,
        "read": ours.speed,
        "share": ours.speed / bare.speed,
        "share_of_16": ours.speed / of_16.speed,
        "share_of_sockets": ours.speed / sockets.speed,
        "core_seconds_per_gb_bare": bare.core_seconds,
        "core_seconds_per_gb_of_16": of_16.core_seconds,
        "core_seconds_per_gb_sockets": sockets.core_seconds,
        "core_seconds_per_gb": ours.core_seconds,
        "requests_per_gb": (after.requests - before.requests) / ours.bytes * 1e9,
        "downloaded": (after.bytes - before.bytes) / ours.bytes,
    }


class Rate(NamedTuple):
    """MB/s, and the seconds of a core, of this process, for each GB of so many bytes."""

    speed: float
    core_seconds: float
    bytes: int


def rate_of(read: Callable[..., int], *arguments: Any) -> Rate:
    """How fast something is read, which returns how many bytes it got."""
    cores, began = time.process_time(), time.perf_counter()
    size = read(*arguments)
    seconds = time.perf_counter() - began
    return Rate(size / 1e6 / seconds, (time.process_time() - cores) / size * 1e9, size)


def store_shards(folder: Path, shards: int) -> None:
    """Stores a run of so many shards with a sample each, unless it is there already."""
    run = Run(0, hooks=14, width=4)
    hooks: dict[int | str, str] = {name: name for name in run.names}
    options = StorageOptions(shard_size_gb=1e-9, shard_format="safetensors")
    facts = RunFacts(hooks={name: {"width": run.width} for name in hooks})
    identity = Identity(data="files", activation_dtype="bfloat16", storage=options)
    values = np.ones((2, run.width), ml_dtypes.bfloat16)
    with ActivationStorage(folder, hooks, options, identity, facts=facts) as storage:
        for sample in range(0 if storage.complete else shards):
            for name in run.names:
                storage.add_activation(name, values, sample, "", np.arange(2, dtype=np.int32))


def measure_opening(root: Path, shards: int, latency: float, rate: float) -> dict[str, float]:
    """Seconds and requests until a run of so many shards is open."""
    store_shards(root / "shards", shards)
    with bucket_server(root, latency, rate) as address:
        before, began = counts(address), time.perf_counter()
        cores = time.process_time()
        dataset = ActivationDataset(f"gs://{BUCKET}/shards")
        seconds, after = time.perf_counter() - began, counts(address)
    assert len(dataset) == len(dataset.shards.commits) == shards
    return {
        "shards": shards,
        "latency": latency,
        "seconds": round(seconds, 2),
        "core_seconds": round(time.process_time() - cores, 2),
        "requests": after.requests - before.requests,
        "mb": round((after.bytes - before.bytes) / 1e6, 1),
    }


def summary(rounds: list[dict[str, float]]) -> dict[str, list[float]]:
    """Median, least and largest of every figure."""
    each = {name: [found[name] for found in rounds] for name in rounds[0]}
    return {
        name: [round(f(values), 3) for f in (statistics.median, min, max)]
        for name, values in each.items()
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, default=1800.0, help="of a run (default: 1800)")
    parser.add_argument(
        "--mb_of_fourteen", type=float, default=450.0, help="of one hook of 14 (default: 450)"
    )
    parser.add_argument("--latency", type=float, nargs="+", default=LATENCIES, help="ms")
    parser.add_argument("--rate", type=float, default=RATE, help="MB/s of a connection")
    parser.add_argument("--rounds", type=int, default=3, help="medians of so many (default: 3)")
    parser.add_argument("--features", type=int, default=4, help="of training (default: 4)")
    parser.add_argument("--open", type=int, default=0, help="open a run of so many shards, only")
    parser.add_argument("--only", default="", help="scenarios with this in their names")
    parser.add_argument("--folder", type=Path, help="keeps the runs (default: a temporary one)")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    size = int(arguments.mb * 1e6)
    one, chat = Run(size), Run(size, chat=True)
    many = Run(int(arguments.mb_of_fourteen * 1e6), hooks=14, width=896)
    other = Run(size, shard=200_000_000)
    found: dict[float, dict[str, Any]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.folder or Path(temporary)
        if arguments.open:
            opened = [
                measure_opening(root, arguments.open, latency, arguments.rate)
                for latency in arguments.latency
            ]
            print_result({"opened": opened})
            return
        asked = {
            name: scenario
            for name, scenario in scenarios(one, many, chat, other, arguments.features).items()
            if arguments.only in name
        }
        for run in {run for scenario in asked.values() for run in scenario.runs}:
            run.store(root / run.folder)
        print(
            "   ms  bare MB/s  of 16  MB/s  share (least to largest)  of 16  of sockets  s/GB  "
            "bare s/GB  requests/GB  downloaded"
        )
        for latency in arguments.latency:
            with (
                bucket_server(root, latency, arguments.rate) as address,
                ProcessPoolExecutor(1, get_context("spawn")) as other_process,
            ):
                for name, scenario in asked.items():
                    if name == "training" and latency != TRAINED_AT:
                        continue
                    rounds = range(1 + arguments.rounds)  # of which the first is left out
                    of_rounds = [measure(address, scenario, root, other_process) for _ in rounds]
                    each = found[latency][name] = summary(of_rounds[1:])
                    print(line(latency, name, each), flush=True)
    alone = round(step_alone(one.width, arguments.features), 1)
    print(f"training alone, on data in memory: {alone:.0f} MB/s")
    print_result({"latency": found, "training_alone": alone})


def line(latency: float, name: str, each: dict[str, list[float]]) -> str:
    share = "{:.2f} ({:.2f} to {:.2f})".format(*each["share"])
    names = "bare", "of_16", "read", "share_of_16", "share_of_sockets"
    bare, of_16, read, share_of_16, sockets = (each[name][0] for name in names)
    core, core_bare = each["core_seconds_per_gb"][0], each["core_seconds_per_gb_bare"][0]
    requests, downloaded = each["requests_per_gb"][0], each["downloaded"][0]
    return (
        f"{latency:>5g} {bare:>10.0f} {of_16:>6.0f} {read:>5.0f}  {share:<24} {share_of_16:>6.2f} "
        f"{sockets:>11.2f} {core:>5.2f} {core_bare:>10.2f} {requests:>12.0f} {downloaded:>11.2f}  "
        f"{name}"
    )


if __name__ == "__main__":
    main()
