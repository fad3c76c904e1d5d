"""Shows the progress of a run to the user, writes its metrics, and stops it on signals."""

import logging
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from activation_extraction.common.log import log, on_terminal
from activation_extraction.common.visible import counted


@contextmanager
def stop_on_signals() -> Iterator[Callable[[], int]]:
    """Turns SIGTERM and Ctrl-C in a `with` block into requests to stop.

    After the first signal, a Ctrl-C raises KeyboardInterrupt.

    Yields:
        A function that returns the number of the last signal, or 0 if there was none.
    """
    received = 0

    def handle(number: int, _: Any) -> None:
        nonlocal received
        received = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log.warning("stopping after this step; complete samples will be stored")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Clock:
    """The seconds that one thread spends on each of its activities."""

    def __init__(self) -> None:
        self.restart()
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Adds the duration of a `with` block to the seconds of an activity."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[activity] += time.perf_counter() - began

    def restart(self) -> None:
        """Sets `elapsed` to 0. The seconds of activities stay."""
        self._began = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """The seconds since the clock was made or restarted."""
        return time.perf_counter() - self._began


class Progress:
    """Reports the progress of a run: a bar on a terminal, otherwise lines in the log, and metrics.

    The bar, the lines and the metrics count samples and tokens of the whole run, including those of
    earlier processes. The names of metrics that count from the start of this process say so.

    Args:
        max_samples: Limit of this host's samples; None for no such limit.
        max_tokens: Limit of the tokens that this host stores; None for no such limit.
        stored: Numbers of samples and of tokens that earlier processes have stored.
        interval: Seconds between two reports.
        chips: Number of this host's devices.
        peak_flops: Peak FLOP/s of these devices together; None if unknown.
        gauges: Function that returns the metrics of the storage and of the data, by name.
        record: Function that stores the metrics of an interval, a JSON object.

    Attributes:
        samples: Number of samples computed since the start of this process.
        tokens: Number of tokens computed since the start, whether or not they are kept.
        steps: Number of steps since the start.
        kept: Number of tokens that the whole run has kept.
    """

    def __init__(
        self,
        max_samples: int | None,
        max_tokens: int | None,
        stored: tuple[int, int],
        interval: float,
        chips: int,
        peak_flops: float | None,
        gauges: Callable[[], dict[str, Any]],
        record: Callable[[dict[str, Any]], None],
    ) -> None:
        self.samples = self.tokens = self.steps = 0
        self._flops = 0.0
        self._stored, self.kept = stored
        self._in_tokens = max_tokens is not None
        self._most = max_tokens if self._in_tokens else max_samples
        self._interval = interval
        self._chips, self._peak_flops = chips, peak_flops
        self._gauges, self._record = gauges, record
        self._reported = time.perf_counter(), 0, 0.0  # when, tokens, FLOPs
        unit = "tokens" if self._in_tokens else "samples"
        with_limit = "{l_bar}{bar}| {n_fmt}/{total_fmt} UNIT [{elapsed}<{remaining}{postfix}]"
        without_limit = "{desc}: {n_fmt} samples [{elapsed}{postfix}]"
        self._bar = tqdm(
            total=self._most,
            initial=stored[self._in_tokens],
            desc="extracting",
            bar_format=with_limit.replace("UNIT", unit) if self._most else without_limit,
            disable=not (on_terminal() and log.isEnabledFor(logging.INFO)),
        )

    def advance(self, samples: int, tokens: int, flops: float, kept: int = 0) -> None:
        """Counts one step, and reports if the interval is over.

        Args:
            samples: Number of samples that the step completed.
            tokens: Number of tokens that the step computed.
            flops: FLOPs of the step on this host's devices together.
            kept: Number of tokens of the step that are stored.
        """
        self.samples += samples
        self.tokens += tokens
        self._flops += flops
        self.kept += kept
        self.steps += 1
        if not self._bar.disable:
            rate = self.tokens / self._bar.format_dict["elapsed"]
            text = f"{counted(self.kept, 'token')}, {rate:,.0f} tokens/s"
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(kept if self._in_tokens else samples)
        if time.perf_counter() - self._reported[0] >= self._interval:
            self._report()

    def _report(self) -> None:
        now = time.perf_counter()
        began, tokens, flops = self._reported
        self._reported = now, self.tokens, self._flops
        rate = (self.tokens - tokens) / (now - began)
        used = (self._flops - flops) / (now - began)
        share = None if self._peak_flops is None else round(used / self._peak_flops, 4)
        metrics = {
            "time": round(time.time(), 3),
            "samples": self._stored + self.samples,
            "tokens": self.kept,
            "tokens_computed_since_start": self.tokens,
            "steps_since_start": self.steps,
            "tokens_per_second": round(rate, 1),
            "tokens_per_second_per_chip": round(rate / self._chips, 1),
            "tflops_per_second_per_chip": round(used / self._chips / 1e12, 4),
            "model_flops_utilisation": share,
            **self._gauges(),
        }
        self._record(metrics)
        if self._bar.disable:
            samples, kept = counted(metrics["samples"], "sample"), counted(self.kept, "token")
            if self._in_tokens:
                kept = f"{self.kept:,} of {counted(self._most or 0, 'token')}"
            elif self._most is not None:
                samples = f"{metrics['samples']:,} of {counted(self._most, 'sample')}"
            log.info(
                "%s, %s, %.0f tokens/s%s; stored %s, %.2f GB, %d being written, retries: %d",
                samples,
                kept,
                rate,
                "" if share is None else f", {share:.0%} of peak",
                counted(metrics["shards_stored"], "shard"),
                metrics["bytes_stored"] / 1e9,
                metrics["shards_writing"],
                metrics["upload_retries_since_start"],
            )

    def close(self) -> None:
        """Reports the last interval and ends the bar."""
        if self._reported[1] < self.tokens:
            self._report()
        self._bar.close()
