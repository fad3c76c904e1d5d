"""A checkpoint that notes what is read of it."""

import math
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np

from activation_extraction.model.checkpoint import Checkpoint


class Watched(Checkpoint):
    """`before` is called with a tensor's name before any of it is read."""

    def __init__(self, folder: Path, before: Callable[[str], None] = lambda _: None) -> None:
        super().__init__(str(folder))
        self._before = before
        self.sizes: dict[str, list[int]] = {}  # tensor -> bytes of each read
        self.parts: Counter[tuple[str, str]] = Counter()  # tensor and index -> reads
        self.threads: set[int] = set()

    def read(self, tensor, index, dtype=np.float32):
        self.threads.add(threading.get_ident())
        self._before(tensor)
        part = super().read(tensor, index, dtype)
        self.sizes.setdefault(tensor, []).append(part.nbytes)
        self.parts[tensor, str(index)] += 1
        return part

    def check_read_once(self, table):
        """Every byte of the tensors of these weights (a table of WeightSpecs), in float32."""
        whole = {name: 4 * math.prod(s.hf_shape) for s in table.values() for name in s.hf_names}
        assert {name: sum(sizes) for name, sizes in self.sizes.items()} == whole
