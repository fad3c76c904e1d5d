"""What the user sees of a run and how the user stops it: log, progress bar, clock, signals."""

import logging
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import _TqdmLoggingHandler as TqdmLoggingHandler

log = logging.getLogger("extract_activations")


def start_logging(verbose: bool) -> None:
    """Our own lines to stderr, above the progress bar; other libraries keep their settings."""
    handler = TqdmLoggingHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(logging.DEBUG if verbose else logging.INFO)


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], int]]:
    """Within it, SIGTERM and the first Ctrl-C only ask to stop; the second Ctrl-C interrupts.

    Yields the function that gives the number of the signal that asked, 0 when none did.
    """
    received = 0

    def handle(number: int, _: Any) -> None:
        nonlocal received
        received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log.warning("stopping after this step; what is complete will be stored")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
    """A bar over samples (with a total when `max_samples` is known) that also shows tokens.

    stored: samples of earlier runs, with which the bar begins.
    """

    def __init__(self, max_samples: int | None, stored: int = 0) -> None:
        self.samples = self.tokens = self.steps = 0
        known = "{l_bar}{bar}| {n_fmt}/{total_fmt} samples [{elapsed}<{remaining}{postfix}]"
        unknown = "{desc}: {n_fmt} samples [{elapsed}{postfix}]"
        self._bar = tqdm(
            total=max_samples,
            initial=stored,
            desc="extracting",
            bar_format=known if max_samples else unknown,
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
