"""How fast one core of this machine packs activations: statistics, conversion, gzip and SHA-256."""

import time
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.store.formats import Threads, chosen_format
from activation_extraction.store.shard import SampleRow, Shard
from activation_extraction.store.statistics import sums_of

SAMPLES, TOKENS, WIDTH = 16, 512, 1024  # of the shard that is packed, at one hook
SECONDS = 0.6  # the shortest measurement


class PackRate(NamedTuple):
    """How fast one core packs activations, and how small they become.

    bytes_per_second: of activations; ratio: a file's bytes divided by theirs.
    """

    bytes_per_second: float
    ratio: float


def pack_rate(dtype: Any, shard_format: str, compress: bool) -> PackRate:
    """Packs activations of this dtype in memory for SECONDS, and returns how fast that was.

    dtype: NumPy's; of encoded activations, that of the values without their scales. It counts the
    CPU time of all threads of this process, which should do nothing else meanwhile.
    """
    shard, sizes = _shard(np.dtype(dtype)), list[int]()
    form, threads = chosen_format(shard_format, compress), Threads(1)
    size = sum(values.nbytes for values in shard.slices[0])
    with threads.pool:
        seconds = -time.process_time()
        while not sizes or seconds + time.process_time() < SECONDS:
            sums_of(shard.slices[0], [row.positions for row in shard.samples])
            sizes.append(form.write(shard, {0: "blocks.0.hook_resid_post"}, threads, []).bytes)
        seconds += time.process_time()
    return PackRate(len(sizes) * size / seconds, sizes[0] / size)


def _shard(dtype: np.dtype) -> Shard:
    """Returns a shard of values like activations: normal, with a scale for each dimension."""
    chance = np.random.default_rng(0)
    scale = chance.lognormal(0.0, 0.5, WIDTH).astype(np.float32)
    values = chance.standard_normal((SAMPLES, TOKENS, WIDTH), np.float32) * scale
    if dtype.itemsize == 1:  # encoded values use the whole range
        values *= 127 / np.abs(values).max(axis=2, keepdims=True)
    positions = np.arange(TOKENS, dtype=np.int32)
    rows = [SampleRow(number, positions, positions, "", None) for number in range(SAMPLES)]
    return Shard(rows, {0: list(values.astype(dtype))})
