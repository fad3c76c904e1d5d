"""BatchOptions: what batches are asked for, of a run or of several that are read as one."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from activation_extraction.common.visible import counted

BUFFER_BATCHES, BUFFER_BYTES = 64, 2**30  # the default buffer, whichever is less
BUCKET_BUFFER_BYTES = 2**28  # at least, if it is filled from elsewhere than this machine
FLOATING = "float16", "bfloat16", "float32", "float64"  # dtypes that activations are read as


@dataclass(frozen=True)
class BatchOptions:
    """The arguments of `ActivationDataset.batches`, which describes them. Raises ValueError for
    values that make no sense for any run.

    A TokenSource has them complete: hooks by their canonical names, a limit for each hook in
    `max_norm`, the name of the dtype, and of `where` a digest of its mask.
    """

    size: int
    hooks: Any = None
    shuffle: int | None = None
    buffer: Any = None
    skip_first: int = 0
    max_norm: Any = None
    dtype: Any = None
    worker: int = 0
    workers: int = 1
    where: Any = None
    roles: Any = None
    columns: Any = ()

    def __post_init__(self) -> None:
        limits = self.max_norm.values() if isinstance(self.max_norm, Mapping) else [self.max_norm]
        no_seed = isinstance(self.shuffle, bool) or (self.shuffle or 0) < 0
        no_buffer = self.buffer is not None and self.buffer < 2 * self.size
        workers = f"expected 0 to {self.workers - 1}, of {self.workers} workers"
        for wrong, told in (
            (self.size < 1, f"size {self.size}: expected 1 or more tokens"),
            (no_buffer, f"buffer {self.buffer}: it must hold two batches of {self.size} tokens"),
            (self.skip_first < 0, f"skip_first {self.skip_first}: expected 0 or more tokens"),
            (not 0 <= self.worker < self.workers, f"worker {self.worker}: {workers}"),
            (no_seed, f"shuffle {self.shuffle}: expected a seed, 0 or larger, or None"),
            (
                self.dtype is not None and dtype_of(self.dtype).name not in FLOATING,
                f"dtype {self.dtype!r:.40}: expected {', '.join(FLOATING)}",
            ),
            (
                not all(limit is None or limit >= 0 for limit in limits),
                f"max_norm {self.max_norm}: expected 0 or more",
            ),
        ):
            if wrong:
                raise ValueError(told)

    @property
    def filters(self) -> list[str]:
        """The arguments that leave out tokens."""
        given = {name: getattr(self, name) for name in ("skip_first", "max_norm", "roles")}
        found = [f"{name}={value!r}" for name, value in given.items() if value]
        return found + ["where"] * (self.where is not None)

    @property
    def setting(self) -> dict[str, Any]:
        """All that the order of the tokens depends on."""
        return {name: value for name, value in asdict(self).items() if name != "columns"}


def dtype_of(name: Any) -> np.dtype:
    """Returns the dtype of this name. Raises ValueError if there is none."""
    try:
        return np.dtype(name)
    except TypeError as error:
        raise ValueError(f"dtype {name!r}: {error}") from error


def default_buffer(size: int, row: int, local: bool) -> int:
    """Returns how many tokens of `row` bytes are kept in memory for batches of `size`.

    local: of files on this machine; from elsewhere, large ranges are read, which need more room.
    """
    least, most = BUCKET_BUFFER_BYTES // max(row, 1), BUFFER_BYTES // max(row, 1)
    return max(min(BUFFER_BATCHES * size, most), 2 * size, 0 if local else least)


def as_mask(mask: Any, samples: int) -> np.ndarray:
    """Returns a mask over so many samples as an array. Raises ValueError for anything else."""
    found = values = np.asarray(mask)
    if found.dtype == object or not found.size:  # of pandas or pyarrow, where null is possible
        values = np.array([v for v in found.flat if isinstance(v, bool | np.bool_)], bool)
    if values.dtype != bool or not values.shape == found.shape == (samples,):
        raise ValueError(
            f"where: {found.dtype}, shape {found.shape}: expected true or false, never null, for "
            f"each of {counted(samples, 'sample')}"
        )
    return values
