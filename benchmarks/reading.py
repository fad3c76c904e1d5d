"""Measures how fast a run is read from a bucket: `python -m benchmarks.reading`. It needs PyTorch.

It stores runs in bfloat16 and safetensors, serves them by benchmarks/bucket_server.py with a
latency per request and a rate per connection, and prints MB/s of activations for these scenarios:

- the only hook of a run, width 3584, shuffled and in order;
- one of fourteen hooks, width 896, shuffled and in order;
- the assistant's tokens of conversations, shuffled;
- two runs of the same data with shards of different sizes, paired and shuffled;
- the training loop of the README with few features, and its steps alone on data in memory.

In each round, three simple readers read the bytes of the same hooks before the scenario. They run
in another process, so that neither process affects the memory of the other:

- `bare`: 32 ranges of at most 8 MiB at a time with obstore, the client that the product uses; every
  byte is looked at once. `share` is the scenario's speed divided by the speed of this reader;
- `of 16`: the same with 16 ranges of at most 2 MiB;
- sockets that receive 32 ranges of 8 MiB into reused buffers, which is the least possible work.

Every figure is of the second of two passes, and the first round is left out. The reason is that the
buffer of 256 MiB per hook is allocated once in a run, however long it is, and on a virtual machine
this may take longer than reading a GB of such a small run. The time of opening a run is not
included; opening.py measures it. Figures are medians over the rounds, some with the smallest and
the largest. The last line printed is one JSON object. The runs take 12 GB on the disk, and should
fit into the page cache.
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
from itertools import pairwise
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

BATCH = 1024  # tokens
MIB = 2**20
BARE, OF_16 = (32, 8 * MIB), (16, 2 * MIB)  # ranges at a time, and bytes of a range at most
LENGTH = 2048  # tokens of a sample
TURNS = ("system", 40), *(("user", 60), ("assistant", 250)) * 8  # roles, and median tokens
LATENCIES = 0.0, 10.0, 30.0, 100.0  # ms
TRAINED_AT = 30.0  # ms; the only latency at which training is measured, because it takes long


class Run(NamedTuple):
    """A run to store.

    Attributes:
        bytes: The bytes of the hook that is read.
        hooks: The number of hooks.
        width: The width of each hook.
        shard: The bytes of a shard.
        chat: Whether the samples are conversations.
        length: The tokens of a sample.
    """

    bytes: int
    hooks: int = 1
    width: int = 3584
    shard: int = 128_000_000
    chat: bool = False
    length: int = LENGTH

    @property
    def names(self) -> list[str]:
        return [f"blocks.{layer}.hook_resid_post" for layer in range(self.hooks)]

    @property
    def read(self) -> str:
        """Returns the name of the hook that is read."""
        return self.names[self.hooks // 2]

    @property
    def folder(self) -> str:
        chat = "_chat" if self.chat else ""
        short = "" if self.length == LENGTH else f"_of_{self.length}"
        return f"{self.hooks}x{self.width}_{self.bytes}_by_{self.shard}{chat}{short}"

    def store(self, folder: Path) -> None:
        """Stores the run in a folder, unless the folder already contains it."""
        identity = Identity(
            data="files",
            activation_dtype="bfloat16",
            text=TextOptions(
                max_seq_length=self.length, messages_column="messages" if self.chat else None
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
            sample_bytes = self.length * self.width * 2
            for sample in range(0 if storage.complete else self.bytes // sample_bytes):
                self._add(storage, sample, chance, pool)

    def _add(
        self, storage: ActivationStorage, number: int, chance: np.random.Generator, pool: np.ndarray
    ) -> None:
        """Adds a sample, with random slices of the pool as activations."""
        length = self.length
        ids = chance.integers(0, 150_000, length, np.int32)
        labels = labels_of(chance, length) if self.chat else {}
        facts = SampleFacts(number, {"file": "0.jsonl", "line": number})
        sample = Sample(facts, ids, Mark(number), labels)
        starts = chance.integers(len(pool) - length, size=self.hooks)
        values: dict[int | str, np.ndarray] = {
            name: pool[None, start : start + length]
            for name, start in zip(self.names, starts, strict=True)
        }
        (batch,) = pack([sample], 1, length)
        storage.add_batch(batch, values)


def labels_of(chance: np.random.Generator, length: int) -> dict[str, np.ndarray]:
    """Makes the labels of a random conversation, whose messages stand between template tokens.

    Args:
        chance: The source of random numbers.
        length: The tokens of the conversation, which is cut there.

    Returns:
        "role" and "turn" -> the label of each token, int32 (length,).
    """
    roles, turns = list[int](), list[int]()
    for turn, (role, median) in enumerate(TURNS):
        content = [ROLES.index(role)] * int(chance.lognormal(np.log(median), 0.8) + 1)
        roles += [0, 0, 0, *content, 0, 0]
        turns += [turn] * (len(content) + 5)
    missing = max(0, length - len(roles))
    roles += roles[-6:-5] * missing
    turns += turns[-1:] * missing
    return {"role": np.array(roles[:length], np.int32), "turn": np.array(turns[:length], np.int32)}


def spans(folder: Path, hook: str, most: int) -> list[tuple[str, int, int]]:
    """Cuts the bytes of a hook into ranges.

    Args:
        folder: The local folder of a run.
        hook: The name of the hook.
        most: The bytes of a range, at most.

    Returns:
        The path of the file in the bucket, the start and the exclusive end of each range.
    """
    ranges = []
    for path in sorted(folder.glob("*.safetensors")):
        tensor = LocalFile(path).tensors[hook]
        size = tensor.end - tensor.offset
        parts = -(-size // most)
        cuts = [tensor.offset + size * n // parts for n in range(parts + 1)]
        name = f"{folder.name}/{path.name}"
        ranges += [(name, start, stop) for start, stop in pairwise(cuts)]
    return ranges


def read_by_obstore(address: str, ranges: list[tuple[str, int, int]], readers: int) -> int:
    """Reads ranges with obstore, and looks at every byte once.

    Args:
        address: The address of the bucket's server, HOST:PORT.
        ranges: The ranges, as `spans` returns them.
        readers: The number of ranges that are read at a time.

    Returns:
        The number of bytes.
    """

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
    """Reads ranges over plain connections into reused buffers; see `read_by_obstore`.

    Raises:
        SystemExit: If an answer is shorter than its range.
    """
    remaining = iter(ranges)  # shared by all threads, which is safe because `next` is atomic

    def work(_: int) -> int:
        buffer, done = memoryview(bytearray(max(b - a for _, a, b in ranges))), 0
        with closing(http.client.HTTPConnection(address)) as connection:
            for name, start, stop in remaining:
                span = {"Range": f"bytes={start}-{stop - 1}"}
                connection.request("GET", f"/{BUCKET}/{name}", headers=span)
                answer, at = connection.getresponse(), 0
                while at < stop - start and (got := answer.readinto(buffer[at : stop - start])):
                    at += got
                answer.read()
                if at < stop - start:
                    raise SystemExit(f"{name}: received {at:,} of {stop - start:,} bytes")
                done += at
        return done

    with ThreadPoolExecutor(readers) as pool:
        return sum(pool.map(work, range(readers)))


def bytes_of(batches: Iterable[Any], hooks: Callable[[Any], list[Any]]) -> int:
    """Takes all batches, and returns the bytes of their activations.

    Args:
        batches: The batches.
        hooks: Returns the arrays of activations of a batch.
    """
    return sum(values.nbytes for batch in batches for values in hooks(batch))


def step_of(hook: str, width: int, features: int) -> Callable[[Any], None]:
    """Returns the README's training step, which takes a batch.

    Args:
        hook: The name of the hook to train on.
        width: Its width.
        features: The number of features of the autoencoder.
    """
    encoder, decoder = torch.nn.Linear(width, features), torch.nn.Linear(features, width)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)

    def step(batch: Any) -> None:
        activations = batch[hook]
        features_of_tokens = encoder(activations).relu()
        loss = (
            decoder(features_of_tokens) - activations
        ).square().mean() + 1e-3 * features_of_tokens.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def train(dataset: ActivationDataset, hook: str, features: int) -> int:
    """Runs the README's training loop over a run.

    Args:
        dataset: The run.
        hook: The name of the hook to train on.
        features: The number of features of the autoencoder.

    Returns:
        The bytes of the activations, as they are stored.
    """
    width, token_count = dataset.hooks[hook], 0
    step = step_of(hook, width, features)
    batches = dataset.batches(BATCH, hooks=[hook], shuffle=0, skip_first=1, dtype="float32")
    for batch in batches.torch():
        step(batch)
        token_count += len(batch[hook])
    return token_count * width * 2


def step_alone(width: int, features: int, steps: int = 20) -> float:
    """Measures training on one batch in memory.

    Args:
        width: The width of the activations.
        features: The number of features of the autoencoder.
        steps: The number of steps.

    Returns:
        MB/s of activations, counted in bfloat16.
    """
    batch = {"x": torch.randn(BATCH, width)}
    step = step_of("x", width, features)
    step(batch)
    began = time.perf_counter()
    for _ in range(steps):
        step(batch)
    return steps * BATCH * width * 2 / 1e6 / (time.perf_counter() - began)


class Scenario(NamedTuple):
    """A way to read some runs.

    Attributes:
        runs: The runs.
        prepare: Opens the runs, and returns the function to measure. That function reads all
            activations, and returns how many bytes it has read.
    """

    runs: list[Run]
    prepare: Callable[[], Callable[[], int]]


def scenarios(
    plain: Run, fourteen: Run, chat: Run, larger_shards: Run, features: int
) -> dict[str, Scenario]:
    """Returns the scenarios by name.

    Args:
        plain: A run with one hook.
        fourteen: A run with fourteen hooks.
        chat: A run of conversations.
        larger_shards: A run of the same data as `plain` with larger shards.
        features: The number of features of the trained autoencoder.
    """

    def batches_of(run: Run, **options: Any) -> Scenario:
        def prepare() -> Callable[[], int]:
            dataset = ActivationDataset(f"gs://{BUCKET}/{run.folder}", [run.read])
            return lambda: bytes_of(dataset.batches(BATCH, **options), lambda b: [b[run.read]])

        return Scenario([run], prepare)

    def pairs() -> Callable[[], int]:
        dataset = paired(*(f"gs://{BUCKET}/{run.folder}" for run in (plain, larger_shards)))
        batches = dataset.batches(BATCH, shuffle=0)
        return lambda: bytes_of(batches, lambda b: [b.first[plain.read], b.second[plain.read]])

    def training() -> Callable[[], int]:
        dataset = ActivationDataset(f"gs://{BUCKET}/{plain.folder}")
        return lambda: train(dataset, plain.read, features)

    return {
        "one hook of one, shuffled": batches_of(plain, shuffle=0),
        "one hook of one, in order": batches_of(plain),
        "one hook of fourteen, shuffled": batches_of(fourteen, shuffle=0),
        "one hook of fourteen, in order": batches_of(fourteen),
        "assistant's tokens, shuffled": batches_of(chat, shuffle=0, roles="assistant"),
        "two runs paired, shuffled": Scenario([plain, larger_shards], pairs),
        "training": Scenario([plain], training),
    }


def measure(
    address: str, scenario: Scenario, root: Path, other: ProcessPoolExecutor
) -> dict[str, float]:
    """Measures one round: the simple readers in the other process, and then the scenario.

    Args:
        address: The address of the bucket's server, HOST:PORT.
        scenario: The scenario.
        root: The local folder of all runs.
        other: The other process.

    Returns:
        bare, of_16, sockets, read: MB/s of the simple readers and of the scenario.
        share, share_of_16, share_of_sockets: The speed of the scenario, divided by that of each
            reader.
        core_seconds_per_gb, and the same with _bare, _of_16 and _sockets: CPU seconds per GB.
        requests_per_gb: The scenario's requests for each GB of activations.
        downloaded: The bytes that the scenario downloads for each byte of activations.
    """

    def rate_there(read: Callable[..., int], readers: int, most: int) -> Rate:
        ranges = []
        for run in scenario.runs:
            ranges += spans(root / run.folder, run.read, most)
        other.submit(rate_of, read, address, ranges, readers).result()  # the first pass
        return other.submit(rate_of, read, address, ranges, readers).result()

    bare = rate_there(read_by_obstore, *BARE)
    of_16 = rate_there(read_by_obstore, *OF_16)
    sockets = rate_there(read_by_sockets, *BARE)
    scenario.prepare()()  # the first pass
    read = scenario.prepare()
    before = counts(address)
    ours = rate_of(read)
    after = counts(address)
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
    """The speed of a reader.

    Attributes:
        speed: MB/s.
        core_seconds: CPU seconds of the reading process for each GB.
        bytes: The bytes that were read.
    """

    speed: float
    core_seconds: float
    bytes: int


def rate_of(read: Callable[..., int], *arguments: Any) -> Rate:
    """Measures one call of a function, which returns how many bytes it has read.

    Args:
        read: The function.
        arguments: Its arguments.
    """
    cores, began = time.process_time(), time.perf_counter()
    size = read(*arguments)
    seconds = time.perf_counter() - began
    return Rate(size / 1e6 / seconds, (time.process_time() - cores) / size * 1e9, size)


def summary(rounds: list[dict[str, float]]) -> dict[str, list[float]]:
    """Returns [median, smallest, largest] of each figure over the rounds."""
    spreads = {}
    for name in rounds[0]:
        figures = [of_round[name] for of_round in rounds]
        spread = statistics.median(figures), min(figures), max(figures)
        spreads[name] = [round(figure, 3) for figure in spread]
    return spreads


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, default=1800.0, help="of a run (default: 1800)")
    parser.add_argument(
        "--mb_of_fourteen", type=float, default=450.0, help="of one hook of 14 (default: 450)"
    )
    parser.add_argument(
        "--latency",
        type=float,
        nargs="+",
        default=LATENCIES,
        help="ms before each answer (default: 0 10 30 100)",
    )
    parser.add_argument(
        "--rate", type=float, default=RATE, help="MB/s of a connection (default: 200)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of the medians (default: 3)")
    parser.add_argument(
        "--features", type=int, default=4, help="of the trained autoencoder (default: 4)"
    )
    parser.add_argument("--only", default="", help="measure scenarios whose names contain this")
    parser.add_argument(
        "--folder", type=Path, help="keep the runs in this folder (default: a temporary one)"
    )
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    size = int(arguments.mb * 1e6)
    plain, chat = Run(size), Run(size, chat=True)
    fourteen = Run(int(arguments.mb_of_fourteen * 1e6), hooks=14, width=896)
    larger_shards = Run(size, shard=200_000_000)
    summaries: dict[float, dict[str, Any]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as temporary:
        root = arguments.folder or Path(temporary)
        chosen = scenarios(plain, fourteen, chat, larger_shards, arguments.features)
        for name in [name for name in chosen if arguments.only not in name]:
            del chosen[name]
        for run in {run for scenario in chosen.values() for run in scenario.runs}:
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
                for name, scenario in chosen.items():
                    if name == "training" and latency != TRAINED_AT:
                        continue
                    rounds = range(1 + arguments.rounds)  # of which the first is left out
                    of_rounds = [measure(address, scenario, root, other_process) for _ in rounds]
                    summaries[latency][name] = summary(of_rounds[1:])
                    print(line(latency, name, summaries[latency][name]), flush=True)
    alone = round(step_alone(plain.width, arguments.features), 1)
    print(f"training alone, on data in memory: {alone:.0f} MB/s")
    print_result({"latency": summaries, "training_alone": alone})


def line(latency: float, name: str, figures: dict[str, list[float]]) -> str:
    """Returns the line of a scenario in the table, from the summary of its rounds."""
    share = "{:.2f} ({:.2f} to {:.2f})".format(*figures["share"])
    names = "bare", "of_16", "read", "share_of_16", "share_of_sockets"
    bare, of_16, read, share_of_16, sockets = (figures[name][0] for name in names)
    core, core_bare = figures["core_seconds_per_gb"][0], figures["core_seconds_per_gb_bare"][0]
    requests, downloaded = figures["requests_per_gb"][0], figures["downloaded"][0]
    return (
        f"{latency:>5g} {bare:>10.0f} {of_16:>6.0f} {read:>5.0f}  {share:<24} {share_of_16:>6.2f} "
        f"{sockets:>11.2f} {core:>5.2f} {core_bare:>10.2f} {requests:>12.0f} {downloaded:>11.2f}  "
        f"{name}"
    )


if __name__ == "__main__":
    main()
