"""What the user sees of a run: the progress bar, the breakdown of time, the summary."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm


class Clock:
    """Seconds spent per named activity of one thread."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Adds the time inside the `with` block to `activity`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[activity] += time.perf_counter() - began

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began


class Progress:
    """A bar over samples (with a total when `max_samples` is known) that also shows tokens."""

    def __init__(self, max_samples: int | None) -> None:
        self.samples = self.tokens = self.steps = 0
        known = "{l_bar}{bar}| {n_fmt}/{total_fmt} samples [{elapsed}<{remaining}{postfix}]"
        unknown = "{desc}: {n_fmt} samples [{elapsed}{postfix}]"
        self._bar = tqdm(
            total=max_samples, desc="extracting", bar_format=known if max_samples else unknown
        )

    def advance(self, samples: int, tokens: int) -> None:
        """Counts one step."""
        self.samples += samples
        self.tokens += tokens
        self.steps += 1
        rate = self.tokens / self._bar.format_dict["elapsed"] if self.steps else 0.0
        self._bar.set_postfix_str(f"{self.tokens:,} tokens, {rate:,.0f} tokens/s", refresh=False)
        self._bar.update(samples)

    def close(self) -> None:
        self._bar.close()
