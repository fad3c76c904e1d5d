"""Measures how fast activations are stored, without a model: `python -m benchmarks.writing`.

A case is a kind of values, a number of hooks and a file format. In every case, `ActivationStorage`
stores the same values in two places: in files in memory ("ours, to files"), and in a bucket on a
server that discards the bytes ("ours, to the server"). For comparison, "bare threads" do the least
that storing needs: as many threads as there are cores gather the values of a shard, encode them as
this tool does, and write one file, by safetensors or by pickle and isal. They compute no
statistics, no checksums of tensors and no table of samples, and they commit nothing.

Each of `--rounds` rounds measures these three methods of storing once. The medians over the rounds
are printed as a table, with each speed as a fraction of the bare threads' speed, and the last line
is one JSON object. MB and GB are the bytes that values take in shards before compression. `--quick`
stores fewer bytes in one round.

The activations are normally distributed with a different scale in each dimension, and a few
dimensions and the first token of every document are 100 times as large. A token has codes of
`CODE_FEATURES` active features.
"""

import argparse
import math
import os
import pickle
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import safetensors.numpy
from isal import igzip

from activation_extraction.cli.flags import StorageOptions
from activation_extraction.common.codes import Codes, code_bytes
from activation_extraction.common.encodings import FLOAT8, Float8Array, token_bytes
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Identity, RunFacts
from activation_extraction.store.storage import ActivationStorage
from activation_extraction.text.batch import Batch
from activation_extraction.text.packing import pack, samples_of
from benchmarks.null_bucket import null_bucket
from benchmarks.processes import medians, print_result, print_table

# The width of the activations, the number of rows of a batch, and the number of tokens of a row.
HIDDEN, ROWS, LENGTH = 896, 8, 1024
# The number of all features of an autoencoder, and the number of active features of a token.
FEATURES, CODE_FEATURES = 16384, 64
# The largest size of a shard in 10^9 bytes, as --shard_size_gb takes it.
SHARD_GB = 0.43
CODES = "codes"
VALUE_KINDS = ("bfloat16", "float32", FLOAT8, CODES)
FORMATS = ("safetensors", "pickle")
NUMBERS_OF_HOOKS = (1, 14)
BARE_THREADS = "bare threads"

# The results of one measurement: name of a metric, such as "mb_per_second" -> value of the metric.
ValueByMetricName = dict[str, float]


class Case(NamedTuple):
    """A case to measure: the kind of the stored values, the number of hooks, and the file format.

    Attributes:
        value_kind: CODES for codes, otherwise the dtype in which activations are stored:
            "bfloat16", "float32" or FLOAT8. For FLOAT8, the model's activations are bfloat16.
        num_hooks: Number of hooks.
        shard_format: File format of the shards, "safetensors" or "pickle".
    """

    value_kind: str
    num_hooks: int
    shard_format: str

    @property
    def hook_name_by_key(self) -> dict[int | str, str]:
        """The hooks that this case stores: key of a hook -> name of the hook.

        The key of each hook is the number of its layer.
        """
        return {
            layer_number: f"blocks.{layer_number}.hook_resid_post"
            for layer_number in range(self.num_hooks)
        }

    @property
    def identity(self) -> Identity:
        """The identity of a run that stores the values of the case."""
        if self.value_kind == CODES:
            return Identity(
                activation_dtype="bfloat16", code_hooks=tuple(self.hook_name_by_key.values())
            )
        return Identity(activation_dtype=self.value_kind)

    @property
    def value_bytes_per_token(self) -> int:
        """The bytes that the values of a token at all hooks take in a shard."""
        if self.value_kind == CODES:
            return self.num_hooks * code_bytes(CODE_FEATURES, "bfloat16")
        return self.num_hooks * token_bytes(HIDDEN, self.value_kind)

    def batch_values(self) -> np.ndarray:
        """Returns random values of one batch, as a step of the model returns them.

        Returns:
            Activations, (num_hooks, ROWS, LENGTH, HIDDEN), in float32 if `value_kind` is "float32"
            and in bfloat16 otherwise. If `value_kind` is CODES, the codes of each token in the
            layout of common/codes.py instead, int32 (num_hooks, ROWS, LENGTH, numbers per token).
        """
        rng = np.random.default_rng(0)
        if self.value_kind == CODES:
            return self._records(rng)
        hidden_scales = rng.lognormal(0.0, 0.5, HIDDEN).astype(np.float32)
        hidden_scales[rng.choice(HIDDEN, 4, replace=False)] *= 100
        activations = rng.standard_normal((self.num_hooks, ROWS, LENGTH, HIDDEN), np.float32)
        activations *= hidden_scales
        activations[:, :, 0] *= 100
        return (
            activations if self.value_kind == "float32" else activations.astype(ml_dtypes.bfloat16)
        )

    def _records(self, rng: np.random.Generator) -> np.ndarray:
        """Returns random codes, as one record for each token and hook.

        common/codes.py defines the layout of a record.

        Args:
            rng: The generator of random numbers.

        Returns:
            The records, int32 (num_hooks, ROWS, LENGTH, numbers per record).
        """
        num_records = self.num_hooks * ROWS * LENGTH
        feature_ids_shape = (num_records, CODE_FEATURES)
        # Each feature is chosen from a range of its own, so that the ids are ascending.
        features_per_range = FEATURES // CODE_FEATURES
        first_feature_ids_of_ranges = np.arange(CODE_FEATURES) * features_per_range
        feature_ids = first_feature_ids_of_ranges + rng.integers(
            0, features_per_range, feature_ids_shape
        )
        codes = Codes(
            indptr=np.arange(num_records + 1) * CODE_FEATURES,
            indices=feature_ids.reshape(-1),
            data=rng.random(feature_ids.size, np.float32),
            error=1 + rng.random(num_records, np.float32),
            norm=1 + rng.random(num_records, np.float32),
            features=FEATURES,
        )
        records = codes.records(CODE_FEATURES)
        return records.reshape(self.num_hooks, ROWS, LENGTH, -1)

    def store(
        self, folder: Path, remote: Folder | None, batch_values: np.ndarray, batches: list[Batch]
    ) -> None:
        """Stores batches as a new run, in which all batches have the same values.

        Args:
            folder: The local folder of the run.
            remote: The folder of the run in a bucket. None to store locally.
            batch_values: The values of a batch at all hooks. If `value_kind` is CODES, they are the
                codes of each token in the layout of common/codes.py, int32 (num_hooks, ROWS,
                LENGTH, numbers per token); otherwise activations, (num_hooks, ROWS, LENGTH,
                HIDDEN).
            batches: The batches, each with the token ids and samples of its rows.
        """
        values_by_hook_key: dict[int | str, np.ndarray] = dict(enumerate(batch_values))
        storage_options = StorageOptions(
            SHARD_GB, self.shard_format, overwrite=True, waiting_shards_gb=8 * SHARD_GB
        )
        run_facts = RunFacts()
        if self.value_kind == CODES:
            run_facts = RunFacts(
                facts_by_hook_key={
                    hook_key: {"width": FEATURES} for hook_key in self.hook_name_by_key
                }
            )
        with ActivationStorage(
            folder, self.hook_name_by_key, storage_options, self.identity, remote, run_facts
        ) as storage:
            for batch in batches:
                storage.add_batch(batch, values_by_hook_key)

    def write_bare_file(self, path: Path, batch_values: np.ndarray, num_batches: int) -> None:
        """Writes one file with the values of a shard, without `ActivationStorage`.

        The threads that call this method do the least that storing needs, and their speed is
        compared with the speed of `ActivationStorage`. The results name them "bare threads".

        Args:
            path: The path of the file.
            batch_values: The values of a batch at all hooks. If `value_kind` is CODES, they are the
                codes of each token in the layout of common/codes.py, int32 (num_hooks, ROWS,
                LENGTH, numbers per token); otherwise activations, (num_hooks, ROWS, LENGTH,
                HIDDEN).
            num_batches: The number of batches in the file, which all have these values.
        """
        tensor_by_name: dict[str, np.ndarray] = {}
        for hook_key, hook_name in self.hook_name_by_key.items():
            values_of_tokens = np.concatenate([*batch_values[hook_key]] * num_batches)
            hook_width = FEATURES if self.value_kind == CODES else HIDDEN
            stored_hook = self.identity.stored_hook(hook_key, hook_name, hook_width)
            # `StoredHook.encode` is not used, because it also measures the errors of encoding.
            if self.value_kind == FLOAT8:
                stored_values = Float8Array.of(values_of_tokens)
            else:
                stored_values = stored_hook.for_shard(values_of_tokens)
            for tensor_name, (tensor,) in stored_hook.tensors([stored_values]).items():
                tensor_by_name[tensor_name] = tensor
        if self.shard_format == "safetensors":
            safetensors.numpy.save_file(tensor_by_name, path)
        else:
            pickled_bytes = pickle.dumps(tensor_by_name, protocol=pickle.HIGHEST_PROTOCOL)
            path.write_bytes(igzip.compress(pickled_bytes, 1))


def full_batches(count: int) -> list[Batch]:
    """Returns batches in which every row is one document of LENGTH tokens.

    Args:
        count: The number of batches.
    """
    token_ids_of_documents = [np.arange(LENGTH, dtype=np.int32)] * (count * ROWS)
    return list(pack(samples_of(token_ids_of_documents), ROWS, LENGTH))


def measure_storing(store_function: Callable[[], object], num_bytes: int) -> ValueByMetricName:
    """Measures the speed of a function that stores values, by calling it once.

    Args:
        store_function: The function, which takes no arguments.
        num_bytes: The number of bytes of values that the function stores.

    Returns:
        A dict with these metrics.
        mb_per_second: MB of values per second.
        core_seconds_per_gb: CPU seconds of this process for each GB of values.
    """
    start_time, cpu_start_time = time.perf_counter(), time.process_time()
    store_function()
    storing_seconds = time.perf_counter() - start_time
    cpu_seconds = time.process_time() - cpu_start_time
    return {
        "mb_per_second": num_bytes / 1e6 / storing_seconds,
        "core_seconds_per_gb": cpu_seconds / num_bytes * 1e9,
    }


def measure(folder: Path, case: Case, num_rounds: int, gigabytes: float) -> list[Any]:
    """Measures how fast the values of a case are stored by each of three storing methods.

    - "ours, to files": This tool stores the values in local files.
    - "ours, to the server": This tool stores the values in a bucket, on a server that discards the
      bytes.
    - "bare threads": Threads only encode the values and write local files (see
      `Case.write_bare_file`).

    Args:
        folder: The folder for the local files. The runs of this tool are deleted after they are
            measured. A file of bare threads may replace an earlier one.
        case: The kind of the values, the number of hooks and the file format.
        num_rounds: The number of rounds. Each round measures each method once.
        gigabytes: The size of the values that a method stores in a round, in 10^9 bytes. It is
            rounded up to whole batches.

    Returns:
        The rows of the printed table, one for each storing method. Each row is a dict: title of a
        column -> cell. The columns are the fields of the case, the name of the method (with the
        title "way"), the median of each metric over the rounds, and the speed of the method divided
        by the speed of bare threads.
    """
    batch_bytes = ROWS * LENGTH * case.value_bytes_per_token
    num_batches = math.ceil(gigabytes * 1e9 / batch_bytes)
    num_stored_bytes = num_batches * batch_bytes
    batch_values, batches = case.batch_values(), full_batches(num_batches)
    batches_per_file = min(math.ceil(SHARD_GB * 1e9 / batch_bytes), num_batches)

    def measure_this_tool(remote: Folder | None) -> ValueByMetricName:
        value_by_metric_name = measure_storing(
            lambda: case.store(folder / "out", remote, batch_values, batches), num_stored_bytes
        )
        shutil.rmtree(folder / "out")
        return value_by_metric_name

    def write_bare_files() -> None:
        # The files are in memory by default. So that they do not fill the memory, there are only as
        # many paths as threads, and a new file replaces the earlier file with its path.
        num_threads = len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(num_threads) as thread_pool:
            write_futures = [
                thread_pool.submit(
                    case.write_bare_file,
                    folder / f"bare_{file_number % num_threads}",
                    batch_values,
                    min(batches_per_file, num_batches - first_batch_number),
                )
                for file_number, first_batch_number in enumerate(
                    range(0, num_batches, batches_per_file)
                )
            ]
            for write_future in write_futures:
                write_future.result()

    measure_function_by_method_name: dict[str, Callable[[], ValueByMetricName]] = {
        "ours, to files": partial(measure_this_tool, None),
        "ours, to the server": partial(measure_this_tool, Folder("gs://bucket/run")),
        BARE_THREADS: partial(measure_storing, write_bare_files, num_stored_bytes),
    }
    measurements_by_method_name: dict[str, list[ValueByMetricName]] = {
        storing_method_name: [] for storing_method_name in measure_function_by_method_name
    }
    for _ in range(num_rounds):
        for storing_method_name, measure_function in measure_function_by_method_name.items():
            measurements_by_method_name[storing_method_name].append(measure_function())
    medians_by_method_name = {
        storing_method_name: medians(measurements_of_rounds)
        for storing_method_name, measurements_of_rounds in measurements_by_method_name.items()
    }
    bare_threads_mb_per_second = medians_by_method_name[BARE_THREADS]["mb_per_second"]
    table_rows: list[dict[str, Any]] = []
    for storing_method_name, median_by_metric_name in medians_by_method_name.items():
        median_mb_per_second = median_by_metric_name["mb_per_second"]
        table_rows.append(
            {
                "kind": case.value_kind,
                "num_hooks": case.num_hooks,
                "shard_format": case.shard_format,
                "way": storing_method_name,
                **median_by_metric_name,
                "share_of_bare_threads": median_mb_per_second / bare_threads_mb_per_second,
            }
        )
    return table_rows


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=VALUE_KINDS,
        default=VALUE_KINDS,
        help="of values: a dtype of activations, or codes of autoencoders (default: all)",
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument(
        "--hooks",
        nargs="+",
        type=int,
        default=NUMBERS_OF_HOOKS,
        metavar="N",
        help="numbers of hooks (default: 1 14)",
    )
    parser.add_argument("--rounds", type=int, default=3, help="how many (default: 3)")
    parser.add_argument(
        "--gb",
        type=float,
        default=3.0,
        help="size of the values that are stored in a round, in 10^9 bytes. With few bytes, the "
        "beginning and the end of a round distort the figures, because only one shard is being "
        "stored then (default: 3)",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("/dev/shm"),
        help="in which a temporary folder is made (default: /dev/shm)",
    )
    parser.add_argument("--quick", action="store_true", help="one round of 0.6 GB")
    parsed_flags = parser.parse_args(argv)
    if parsed_flags.quick:
        parsed_flags.rounds, parsed_flags.gb = 1, 0.6
    result_table_rows = []
    with tempfile.TemporaryDirectory(dir=parsed_flags.folder) as temporary_folder, null_bucket():
        for value_kind in parsed_flags.kinds:
            for shard_format in parsed_flags.formats:
                if value_kind == FLOAT8 and shard_format == "pickle":
                    continue  # pickles cannot contain float8
                for num_hooks in parsed_flags.hooks:
                    result_table_rows += measure(
                        Path(temporary_folder),
                        Case(value_kind, num_hooks, shard_format),
                        parsed_flags.rounds,
                        parsed_flags.gb,
                    )
    print_table(result_table_rows)
    print_result({"rows": result_table_rows})


if __name__ == "__main__":
    main()
