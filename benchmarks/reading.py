"""Measures how fast a run is read from a bucket: `python -m benchmarks.reading`. It needs PyTorch.

It stores runs in bfloat16 and safetensors, and serves them with bucket_server.py, which simulates a
remote bucket: every response begins after a latency, and the bandwidth of every connection is
limited. A scenario is a way to read these runs. The benchmark measures these scenarios, and prints
the MB/s of activations that each scenario reads:

- the only hook of a run, width 3584, shuffled and in order;
- one of fourteen hooks, width 896, shuffled and in order;
- the assistant's tokens of conversations, shuffled;
- two runs of the same data with shards of different sizes, paired and shuffled;
- the training loop of the README for an autoencoder with few features. The training steps are also
  measured alone, on a batch in memory.

At each latency (--latency), every scenario is measured in several rounds (--rounds). Training is
measured only at 30 ms. In each round, three simple readers read the bytes of the same hooks before
the scenario. They run in another process, so that neither process affects the memory of the other:

- `bare` reads 32 ranges of at most 8 MiB at a time with obstore, the client that this tool uses,
  and accesses every byte once. `share` is the scenario's speed divided by the speed of this reader;
- `of 16` is like `bare`, but reads 16 ranges of at most 2 MiB at a time;
- `sockets` receives 32 ranges of at most 8 MiB at a time into reused buffers, which is the least
  possible work.

In each round, a simple reader or a scenario reads all of its bytes twice, and only the second pass
is measured. An additional round before the others is not counted. The first passes and this round
allocate the memory for buffers, up to 256 MiB per hook, so the time of this allocation is not
measured. On a virtual machine, the allocation may take longer than reading 1 GB, which would change
the result, because a scenario reads only a few GB or less. The time of opening a run is not
included; opening.py measures it.

The printed figures are medians over the counted rounds, and the table also shows the smallest and
the largest `share`. The last line printed is one JSON object. The runs take 12 GB on the disk, and
should fit into the page cache.
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

# The number of tokens of a batch.
BATCH = 1024
MIB = 2**20
# For the simple readers `bare` and `sockets`: the number of ranges of files that they request at
# the same time, and the largest number of bytes of a range.
REQUESTS_OF_32_RANGES = 32, 8 * MIB
# For the simple reader `of 16`: the number of ranges that it requests at the same time, and the
# largest number of bytes of a range. Both are smaller than for `bare` and `sockets`.
REQUESTS_OF_16_RANGES = 16, 2 * MIB
# The number of tokens of a sample.
LENGTH = 2048
# The messages of a conversation: the role of a message, and the median number of its tokens.
TURNS = ("system", 40), *(("user", 60), ("assistant", 250)) * 8
# The default latencies of the bucket in milliseconds. Reading is measured with one after the other.
# The latency is the time for which the bucket's server waits before each response.
LATENCIES_MS = 0.0, 10.0, 30.0, 100.0
# The latency in milliseconds at which training is measured. It is not measured at other latencies,
# because training takes long.
TRAINED_AT = 30.0


class Run(NamedTuple):
    """A description of a run of random activations, which `store` stores.

    Attributes:
        bytes_per_hook: Number of bytes of activations at each hook.
        num_hooks: Number of hooks.
        activation_width: Width of the activations at each hook.
        max_shard_bytes: Largest number of bytes of a shard.
        has_conversations: Whether the samples are conversations.
        tokens_per_sample: Number of tokens of a sample.
    """

    bytes_per_hook: int
    num_hooks: int = 1
    activation_width: int = 3584
    max_shard_bytes: int = 128_000_000
    has_conversations: bool = False
    tokens_per_sample: int = LENGTH

    @property
    def hook_names(self) -> list[str]:
        """The names of the hooks whose activations the run stores."""
        return [f"blocks.{layer}.hook_resid_post" for layer in range(self.num_hooks)]

    @property
    def name_of_read_hook(self) -> str:
        """The name of the hook whose activations are read: the middle one of `hook_names`."""
        return self.hook_names[self.num_hooks // 2]

    @property
    def folder(self) -> str:
        """The name of the run's folder.

        All fields are part of the name, so that different runs have different folders.
        """
        chat_suffix = "_chat" if self.has_conversations else ""
        length_suffix = "" if self.tokens_per_sample == LENGTH else f"_of_{self.tokens_per_sample}"
        sizes_text = (
            f"{self.num_hooks}x{self.activation_width}_{self.bytes_per_hook}"
            f"_by_{self.max_shard_bytes}"
        )
        return sizes_text + chat_suffix + length_suffix

    def store(self, folder: Path) -> None:
        """Stores the run in a folder, unless the folder already contains the run.

        Args:
            folder: The local folder of the run.
        """
        identity = Identity(
            data="files",
            activation_dtype="bfloat16",
            text=TextOptions(
                max_seq_length=self.tokens_per_sample,
                messages_column="messages" if self.has_conversations else None,
            ),
            storage=StorageOptions(shard_format="safetensors"),
        )
        storage_options = StorageOptions(
            shard_size_gb=self.max_shard_bytes / 1e9, shard_format="safetensors"
        )
        run_facts = RunFacts(
            facts_by_hook_key={
                hook_key: {"width": self.activation_width} for hook_key in self.hook_names
            }
        )
        rng = np.random.default_rng(0)
        normal_values = rng.standard_normal((4 * LENGTH, self.activation_width), np.float32)
        value_pool = normal_values.astype(ml_dtypes.bfloat16)
        with ActivationStorage(
            folder,
            # The keys of the hooks are their names, as if --hook_names had selected them.
            {hook_name: hook_name for hook_name in self.hook_names},
            storage_options,
            identity,
            facts=run_facts,
        ) as storage:
            # bfloat16 takes 2 bytes.
            sample_bytes = self.tokens_per_sample * self.activation_width * 2
            num_samples_to_store = 0 if storage.complete else self.bytes_per_hook // sample_bytes
            for sample_number in range(num_samples_to_store):
                self._add(storage, sample_number, rng, value_pool)

    def _add(
        self,
        storage: ActivationStorage,
        sample_number: int,
        rng: np.random.Generator,
        value_pool: np.ndarray,
    ) -> None:
        """Adds a sample, with random slices of a pool of values as activations.

        Args:
            storage: The storage of the run.
            sample_number: The number of the sample.
            rng: The generator of random numbers.
            value_pool: The pool of values, (more tokens than a sample has, width).
        """
        sample_length = self.tokens_per_sample
        token_ids = rng.integers(0, 150_000, sample_length, np.int32)
        token_labels_by_name = labels_of(rng, sample_length) if self.has_conversations else {}
        sample_facts = SampleFacts(sample_number, {"file": "0.jsonl", "line": sample_number})
        sample = Sample(sample_facts, token_ids, Mark(sample_number), token_labels_by_name)
        slice_starts = rng.integers(len(value_pool) - sample_length, size=self.num_hooks)
        # The names of the hooks are also their keys (see `store`).
        activations_by_hook_key: dict[int | str, np.ndarray] = {
            hook_key: value_pool[None, slice_start : slice_start + sample_length]
            for hook_key, slice_start in zip(self.hook_names, slice_starts, strict=True)
        }
        (batch,) = pack([sample], 1, sample_length)
        storage.add_batch(batch, activations_by_hook_key)


def labels_of(rng: np.random.Generator, length: int) -> dict[str, np.ndarray]:
    """Makes the labels of a random conversation, with tokens of a template around each message.

    Args:
        rng: The generator of random numbers.
        length: The number of tokens of the conversation. A longer conversation is cut, and a
            shorter conversation is extended with tokens of its last turn.

    Returns:
        A dict of two arrays, int32 (length,).
        role: For each token, the index of its role in ROLES.
        turn: For each token, the number of the message that contains it, from 0.
    """
    role_indices, turn_numbers = list[int](), list[int]()
    for turn_number, (role, median_token_count) in enumerate(TURNS):
        num_tokens = int(rng.lognormal(np.log(median_token_count), 0.8) + 1)
        # Three tokens of the template stand before the message, and two stand after it.
        role_indices += [0, 0, 0, *[ROLES.index(role)] * num_tokens, 0, 0]
        turn_numbers += [turn_number] * (num_tokens + 5)
    # A conversation that is too short is extended by tokens of its last message.
    num_missing_tokens = max(0, length - len(role_indices))
    role_indices += role_indices[-6:-5] * num_missing_tokens
    turn_numbers += turn_numbers[-1:] * num_missing_tokens
    return {
        "role": np.array(role_indices[:length], np.int32),
        "turn": np.array(turn_numbers[:length], np.int32),
    }


def ranges_of_hook(folder: Path, hook: str, max_bytes: int) -> list[tuple[str, int, int]]:
    """Divides the bytes of the activations at a hook into ranges.

    Args:
        folder: The local folder of a run.
        hook: The name of the hook.
        max_bytes: The largest number of bytes of a range.

    Returns:
        A tuple for each range: the path of the file relative to the parent of `folder`, the offset
        of the first byte, and the offset after the last byte. The benchmark serves the parent of
        `folder` as a bucket, so this is the file's path in the bucket.
    """
    file_ranges = []
    for shard_path in sorted(folder.glob("*.safetensors")):
        hook_tensor = LocalFile(shard_path).tensors[hook]
        tensor_bytes = hook_tensor.end - hook_tensor.offset
        num_ranges = -(-tensor_bytes // max_bytes)
        range_offsets = [
            hook_tensor.offset + tensor_bytes * range_number // num_ranges
            for range_number in range(num_ranges + 1)
        ]
        path_in_bucket = f"{folder.name}/{shard_path.name}"
        file_ranges += [
            (path_in_bucket, range_start, range_stop)
            for range_start, range_stop in pairwise(range_offsets)
        ]
    return file_ranges


def read_by_obstore(address: str, ranges: list[tuple[str, int, int]], readers: int) -> int:
    """Reads ranges with obstore, and accesses every byte once.

    Args:
        address: The address of the bucket's server, "HOST:PORT".
        ranges: A tuple for each range: the path of the file in the bucket, the offset of the first
            byte, and the offset after the last byte.
        readers: The number of ranges that are read at a time.

    Returns:
        The number of bytes that were read.
    """

    def no_credentials() -> Any:
        return {"token": "", "expires_at": None}

    bucket_store = GCSStore(
        BUCKET,
        base_url=f"http://{address}",
        credential_provider=no_credentials,
        client_options={"allow_http": True},
    )

    def read_range(file_range: tuple[str, int, int]) -> int:
        path_in_bucket, start_offset, stop_offset = file_range
        range_content = obstore.get_range(
            bucket_store, path_in_bucket, start=start_offset, end=stop_offset
        )
        byte_values = np.frombuffer(memoryview(range_content), np.uint8)
        # The maximum is computed only because this accesses every byte.
        byte_values.max()
        return byte_values.nbytes

    with ThreadPoolExecutor(readers) as thread_pool:
        return sum(thread_pool.map(read_range, ranges))


def read_by_sockets(address: str, ranges: list[tuple[str, int, int]], readers: int) -> int:
    """Reads ranges into reused buffers, in threads that each use one connection of `http.client`.

    Args:
        address: The address of the bucket's server, "HOST:PORT".
        ranges: The ranges, as `ranges_of_hook` returns them.
        readers: The number of threads, each of which reads one range at a time.

    Returns:
        The number of bytes that were read.

    Raises:
        SystemExit: If a response is shorter than its range.
    """
    # All threads share this iterator, which is safe because `next` is atomic.
    remaining_ranges = iter(ranges)
    largest_range_bytes = max(range_stop - range_start for _, range_start, range_stop in ranges)

    def read_remaining_ranges(_: int) -> int:
        reused_buffer = memoryview(bytearray(largest_range_bytes))
        total_received_bytes = 0
        with closing(http.client.HTTPConnection(address)) as connection:
            for path_in_bucket, range_start, range_stop in remaining_ranges:
                request_headers = {"Range": f"bytes={range_start}-{range_stop - 1}"}
                connection.request("GET", f"/{BUCKET}/{path_in_bucket}", headers=request_headers)
                range_response = connection.getresponse()
                range_bytes = range_stop - range_start
                received_bytes = 0
                while received_bytes < range_bytes:
                    num_new_bytes = range_response.readinto(
                        reused_buffer[received_bytes:range_bytes]
                    )
                    if not num_new_bytes:
                        break
                    received_bytes += num_new_bytes
                range_response.read()
                if received_bytes < range_bytes:
                    raise SystemExit(
                        f"{path_in_bucket}: received {received_bytes:,} of {range_bytes:,} bytes"
                    )
                total_received_bytes += received_bytes
        return total_received_bytes

    with ThreadPoolExecutor(readers) as thread_pool:
        return sum(thread_pool.map(read_remaining_ranges, range(readers)))


def bytes_of(batches: Iterable[Any], arrays_of: Callable[[Any], list[Any]]) -> int:
    """Reads all batches, and returns the number of bytes of their activations.

    Args:
        batches: The batches.
        arrays_of: A function that takes a batch and returns its arrays of activations.
    """
    return sum(array.nbytes for batch in batches for array in arrays_of(batch))


def step_of(hook_name: str, width: int, features: int) -> Callable[[Any], None]:
    """Makes an autoencoder, and returns the training step of the example in README.md.

    Args:
        hook_name: The name of the hook on whose activations an autoencoder is trained.
        width: The width of the activations.
        features: The number of features of the autoencoder.

    Returns:
        The training step: a function that takes a batch, and updates the weights of the autoencoder
        once with the gradient on this batch.
    """
    encoder, decoder = torch.nn.Linear(width, features), torch.nn.Linear(features, width)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)

    def step(batch: Any) -> None:
        activations = batch[hook_name]
        features_of_tokens = encoder(activations).relu()
        loss = (
            decoder(features_of_tokens) - activations
        ).square().mean() + 1e-3 * features_of_tokens.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def train(dataset: ActivationDataset, hook: str, features: int) -> int:
    """Trains an autoencoder in one pass over a run, with the training loop of the README.

    Args:
        dataset: The run whose activations are read.
        hook: The name of the hook on whose activations an autoencoder is trained.
        features: The number of features of the autoencoder.

    Returns:
        The number of bytes that the activations take in the files, which store bfloat16.
    """
    activation_width = dataset.hooks[hook]
    num_tokens = 0
    train_on_batch = step_of(hook, activation_width, features)
    batches = dataset.batches(BATCH, hooks=[hook], shuffle=0, skip_first=1, dtype="float32")
    for batch in batches.torch():
        train_on_batch(batch)
        num_tokens += len(batch[hook])
    return num_tokens * activation_width * 2


def step_alone(width: int, features: int, steps: int = 20) -> float:
    """Measures the speed of training steps on a single batch in memory, without reading a run.

    Args:
        width: The width of the activations.
        features: The number of features of the autoencoder.
        steps: The number of steps.

    Returns:
        The MB of activations per second. They are counted as if they were bfloat16, as in `train`.
    """
    batch_in_memory = {"x": torch.randn(BATCH, width)}
    train_on_batch = step_of("x", width, features)
    train_on_batch(batch_in_memory)
    start_time = time.perf_counter()
    for _ in range(steps):
        train_on_batch(batch_in_memory)
    return steps * BATCH * width * 2 / 1e6 / (time.perf_counter() - start_time)


class Scenario(NamedTuple):
    """A way to read one run or several runs.

    Attributes:
        runs: Runs that are read.
        prepare: Function without arguments that opens the runs and returns the function to measure.
            The returned function takes no arguments either. It reads all activations, and returns
            the number of bytes that it has read.
    """

    runs: list[Run]
    prepare: Callable[[], Callable[[], int]]


def scenarios(
    plain: Run, fourteen: Run, chat: Run, larger_shards: Run, features: int
) -> dict[str, Scenario]:
    """Returns the scenarios that are measured, each of which is a way to read runs.

    Args:
        plain: A run with one hook.
        fourteen: A run with fourteen hooks.
        chat: A run of conversations.
        larger_shards: A run of the same data as `plain` with larger shards.
        features: The number of features of the trained autoencoder.

    Returns:
        Name of a scenario -> scenario.
    """

    def batches_of(run: Run, **options: Any) -> Scenario:
        def prepare() -> Callable[[], int]:
            dataset = ActivationDataset(f"gs://{BUCKET}/{run.folder}", [run.name_of_read_hook])
            return lambda: bytes_of(
                dataset.batches(BATCH, **options), lambda batch: [batch[run.name_of_read_hook]]
            )

        return Scenario([run], prepare)

    def pairs() -> Callable[[], int]:
        paired_runs = paired(*(f"gs://{BUCKET}/{run.folder}" for run in (plain, larger_shards)))
        batches = paired_runs.batches(BATCH, shuffle=0)
        return lambda: bytes_of(
            batches,
            lambda batch: [
                batch.first[plain.name_of_read_hook],
                batch.second[plain.name_of_read_hook],
            ],
        )

    def training() -> Callable[[], int]:
        dataset = ActivationDataset(f"gs://{BUCKET}/{plain.folder}")
        return lambda: train(dataset, plain.name_of_read_hook, features)

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
    address: str, scenario: Scenario, root: Path, single_process_pool: ProcessPoolExecutor
) -> dict[str, float]:
    """Measures the speed of a scenario, and the speed of three simple readers of the same bytes.

    The simple readers run in another process. The readers and the scenario each make two passes, of
    which the second one is measured.

    Args:
        address: The address of the bucket's server, "HOST:PORT".
        scenario: The way to read runs that is measured.
        root: The local folder of all runs.
        single_process_pool: A pool of one process, which runs the simple readers.

    Returns:
        A dict with these figures.
        bare: The MB/s of a simple reader that reads 32 ranges of at most 8 MiB at a time with
            obstore.
        of_16: The MB/s of a simple reader that reads 16 ranges of at most 2 MiB at a time with
            obstore.
        sockets: The MB/s of a simple reader that reads the same ranges as `bare` with HTTP
            connections of Python.
        read: The MB/s of the scenario.
        share, share_of_16, share_of_sockets: The speed of the scenario, divided by the speed of the
            reader `bare`, `of_16` or `sockets`.
        core_seconds_per_gb: The CPU seconds of the scenario for each GB.
        core_seconds_per_gb_bare, core_seconds_per_gb_of_16, core_seconds_per_gb_sockets: The CPU
            seconds of each simple reader for each GB.
        requests_per_gb: The scenario's requests for each GB of activations.
        downloaded: The bytes that the scenario downloads for each byte of activations.
    """

    def reading_speed_in_other_process(
        read: Callable[..., int], readers: int, max_bytes: int
    ) -> ReadingSpeed:
        file_ranges = []
        for run in scenario.runs:
            file_ranges += ranges_of_hook(root / run.folder, run.name_of_read_hook, max_bytes)
        # The first pass is not measured, because the first pass of the scenario is not, either.
        single_process_pool.submit(
            measure_reading_speed, read, address, file_ranges, readers
        ).result()
        return single_process_pool.submit(
            measure_reading_speed, read, address, file_ranges, readers
        ).result()

    obstore_speed_for_32_ranges = reading_speed_in_other_process(
        read_by_obstore, *REQUESTS_OF_32_RANGES
    )
    obstore_speed_for_16_ranges = reading_speed_in_other_process(
        read_by_obstore, *REQUESTS_OF_16_RANGES
    )
    socket_speed_for_32_ranges = reading_speed_in_other_process(
        read_by_sockets, *REQUESTS_OF_32_RANGES
    )
    # The first pass over the runs is not measured, because buffers may be allocated in it.
    first_pass_reader = scenario.prepare()
    first_pass_reader()
    second_pass_reader = scenario.prepare()
    traffic_before_second_pass = counts(address)
    reading_speed_of_scenario = measure_reading_speed(second_pass_reader)
    traffic_after_second_pass = counts(address)
    num_requests = traffic_after_second_pass.requests - traffic_before_second_pass.requests
    downloaded_bytes = traffic_after_second_pass.bytes - traffic_before_second_pass.bytes
    return {
        "bare": obstore_speed_for_32_ranges.mb_per_second,
        "of_16": obstore_speed_for_16_ranges.mb_per_second,
        "sockets": socket_speed_for_32_ranges.mb_per_second,
        "read": reading_speed_of_scenario.mb_per_second,
        "share": reading_speed_of_scenario.mb_per_second
        / obstore_speed_for_32_ranges.mb_per_second,
        "share_of_16": reading_speed_of_scenario.mb_per_second
        / obstore_speed_for_16_ranges.mb_per_second,
        "share_of_sockets": reading_speed_of_scenario.mb_per_second
        / socket_speed_for_32_ranges.mb_per_second,
        "core_seconds_per_gb_bare": obstore_speed_for_32_ranges.cpu_seconds_per_gb,
        "core_seconds_per_gb_of_16": obstore_speed_for_16_ranges.cpu_seconds_per_gb,
        "core_seconds_per_gb_sockets": socket_speed_for_32_ranges.cpu_seconds_per_gb,
        "core_seconds_per_gb": reading_speed_of_scenario.cpu_seconds_per_gb,
        "requests_per_gb": num_requests / reading_speed_of_scenario.num_bytes * 1e9,
        "downloaded": downloaded_bytes / reading_speed_of_scenario.num_bytes,
    }


class ReadingSpeed(NamedTuple):
    """The speed of a reader in one pass.

    Attributes:
        mb_per_second: MB that were read per second.
        cpu_seconds_per_gb: CPU seconds of the reading process for each GB that was read.
        num_bytes: Number of bytes that were read.
    """

    mb_per_second: float
    cpu_seconds_per_gb: float
    num_bytes: int


def measure_reading_speed(read: Callable[..., int], *arguments: Any) -> ReadingSpeed:
    """Measures the speed of a function that reads bytes, by calling it once.

    Args:
        read: The function, which returns the number of bytes that it has read.
        arguments: The arguments of the function.

    Returns:
        The MB per second, the CPU seconds for each GB, and the number of bytes that were read.
    """
    cpu_start_time, start_time = time.process_time(), time.perf_counter()
    num_read_bytes = read(*arguments)
    reading_seconds = time.perf_counter() - start_time
    cpu_seconds = time.process_time() - cpu_start_time
    return ReadingSpeed(
        num_read_bytes / 1e6 / reading_seconds, cpu_seconds / num_read_bytes * 1e9, num_read_bytes
    )


def summarise(rounds: list[dict[str, float]]) -> dict[str, list[float]]:
    """Summarises the figures of several rounds.

    Args:
        rounds: For each round, a dict: name of a figure -> figure.

    Returns:
        Name of a figure -> list of its median, its smallest and its largest value.
    """
    summary_by_figure_name = {}
    for figure_name in rounds[0]:
        values_of_rounds = [figures_of_round[figure_name] for figures_of_round in rounds]
        median_min_and_max = (
            statistics.median(values_of_rounds),
            min(values_of_rounds),
            max(values_of_rounds),
        )
        summary_by_figure_name[figure_name] = [
            round(statistic, 3) for statistic in median_min_and_max
        ]
    return summary_by_figure_name


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
        default=LATENCIES_MS,
        help="ms before each response (default: 0 10 30 100)",
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
    parsed_flags = parser.parse_args(argv)
    torch.set_num_threads(1)
    bytes_of_single_hook = int(parsed_flags.mb * 1e6)
    plain_run, chat_run = (
        Run(bytes_of_single_hook),
        Run(bytes_of_single_hook, has_conversations=True),
    )
    run_of_fourteen_hooks = Run(
        int(parsed_flags.mb_of_fourteen * 1e6), num_hooks=14, activation_width=896
    )
    run_of_larger_shards = Run(bytes_of_single_hook, max_shard_bytes=200_000_000)
    summary_by_latency_and_scenario: dict[float, dict[str, Any]] = defaultdict(dict)
    with tempfile.TemporaryDirectory() as temporary_folder:
        root_folder = parsed_flags.folder or Path(temporary_folder)
        chosen_scenarios = scenarios(
            plain_run, run_of_fourteen_hooks, chat_run, run_of_larger_shards, parsed_flags.features
        )
        for scenario_name in [
            scenario_name
            for scenario_name in chosen_scenarios
            if parsed_flags.only not in scenario_name
        ]:
            del chosen_scenarios[scenario_name]
        for run in {run for scenario in chosen_scenarios.values() for run in scenario.runs}:
            run.store(root_folder / run.folder)
        print(
            "   ms  bare MB/s  of 16  MB/s  share (least to largest)  of 16  of sockets  s/GB  "
            "bare s/GB  requests/GB  downloaded"
        )
        for latency_ms in parsed_flags.latency:
            with (
                bucket_server(root_folder, latency_ms, parsed_flags.rate) as server_address,
                ProcessPoolExecutor(1, get_context("spawn")) as single_process_pool,
            ):
                for scenario_name, scenario in chosen_scenarios.items():
                    if scenario_name == "training" and latency_ms != TRAINED_AT:
                        continue
                    figures_of_rounds = [
                        measure(server_address, scenario, root_folder, single_process_pool)
                        for _ in range(1 + parsed_flags.rounds)
                    ]
                    # The first round is left out, because buffers may be allocated in it.
                    summary_by_latency_and_scenario[latency_ms][scenario_name] = summarise(
                        figures_of_rounds[1:]
                    )
                    print(
                        table_line(
                            latency_ms,
                            scenario_name,
                            summary_by_latency_and_scenario[latency_ms][scenario_name],
                        ),
                        flush=True,
                    )
    training_mb_per_second = round(step_alone(plain_run.activation_width, parsed_flags.features), 1)
    print(f"training alone, on data in memory: {training_mb_per_second:.0f} MB/s")
    print_result(
        {"latency": summary_by_latency_and_scenario, "training_alone": training_mb_per_second}
    )


def table_line(latency_ms: float, name: str, figures: dict[str, list[float]]) -> str:
    """Returns the line of the table for one scenario at one latency.

    Args:
        latency_ms: The time in milliseconds by which the server delays each response.
        name: The name of the scenario, such as "one hook of one, shuffled".
        figures: Name of a figure -> list of its median, its smallest and its largest value over
            several rounds (see `summarise`).

    Returns:
        A line of text without a line break. It shows the medians, for the figure "share" also the
        smallest and the largest value, and ends with the name.
    """
    speed_ratio_text = "{:.2f} ({:.2f} to {:.2f})".format(*figures["share"])
    # `summarise` returns a list for each figure, whose first element is the median.
    median_by_figure_name = {
        figure_name: figure_summary[0] for figure_name, figure_summary in figures.items()
    }
    return (
        f"{latency_ms:>5g} {median_by_figure_name['bare']:>10.0f} "
        f"{median_by_figure_name['of_16']:>6.0f} "
        f"{median_by_figure_name['read']:>5.0f}  "
        f"{speed_ratio_text:<24} {median_by_figure_name['share_of_16']:>6.2f} "
        f"{median_by_figure_name['share_of_sockets']:>11.2f} "
        f"{median_by_figure_name['core_seconds_per_gb']:>5.2f} "
        f"{median_by_figure_name['core_seconds_per_gb_bare']:>10.2f} "
        f"{median_by_figure_name['requests_per_gb']:>12.0f} "
        f"{median_by_figure_name['downloaded']:>11.2f}  {name}"
    )


if __name__ == "__main__":
    main()
