"""Shows the progress of a run to the user, measures its time, and stops it on signals.

`Progress` is a bar on a terminal, and otherwise lines in the log. It also makes the metrics, which
the caller stores. `Clock` measures how long a thread spends on each activity.
"""

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

    After the first signal, a Ctrl-C raises KeyboardInterrupt as usual.

    Yields:
        A function that returns the number of the last signal that was received; 0 if no signal was
        received.
    """
    signal_number = 0

    def handle(number: int, _: Any) -> None:
        nonlocal signal_number
        signal_number = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log.warning("stopping after this step; complete samples will be stored")

    previous_handlers = {
        number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: signal_number
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


class Clock:
    """Measures the time that a thread spends on each of its activities.

    Attributes:
        seconds: Seconds that were spent on each activity, by its name.
    """

    def __init__(self) -> None:
        self.restart()
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def measure(self, activity: str) -> Iterator[None]:
        """Adds the duration of a `with` block to the seconds of an activity.

        Args:
            activity: Name of the activity.
        """
        start_time = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[activity] += time.perf_counter() - start_time

    def restart(self) -> None:
        """Restarts `elapsed` at 0, without changing `seconds`."""
        self._start_time = time.perf_counter()

    @property
    def elapsed(self) -> float:
        """The seconds since the clock was created or restarted."""
        return time.perf_counter() - self._start_time


class Progress:
    """Reports the progress of a run with a bar on a terminal or lines in the log, and with metrics.

    The bar, the lines and the metrics count the samples and tokens of this host in the whole run,
    including those of earlier processes. Some metrics only count since the start of this process;
    their names end in "since_start".

    Args:
        max_samples: Largest number of samples that this host stores; None for no limit.
        max_tokens: Largest number of tokens that this host stores; None for no limit.
        stored: Numbers of samples and of tokens that earlier processes have stored.
        interval: Seconds between two reports.
        chips: Number of devices of this host.
        peak_flops: Peak speed of these devices together, in FLOP/s; None if it is unknown.
        gauges: Function that returns the metrics of the storage and of the data, by name.
        record: Function that stores the metrics of an interval, which are a JSON object.

    Attributes:
        samples: Number of samples that were computed since the start of this process.
        tokens: Number of tokens that were computed since the start of this process, whether or not
            they are kept.
        steps: Number of steps since the start of this process.
        kept: Number of tokens that were kept since the beginning of the run.
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
        self._stored_samples, self.kept = stored
        self._counts_tokens = max_tokens is not None  # otherwise the bar counts samples
        self._limit = max_tokens if self._counts_tokens else max_samples
        self._interval = interval
        self._chips = chips
        self._peak_flops = peak_flops
        self._gauges = gauges
        self._record = record
        # The time, the number of tokens and the FLOPs at the last report.
        self._last_report = time.perf_counter(), 0, 0.0
        if self._limit:
            unit = "tokens" if self._counts_tokens else "samples"
            bar_format = (
                "{l_bar}{bar}| {n_fmt}/{total_fmt} UNIT [{elapsed}<{remaining}{postfix}]"
            ).replace("UNIT", unit)
        else:
            bar_format = "{desc}: {n_fmt} samples [{elapsed}{postfix}]"
        self._bar = tqdm(
            total=self._limit,
            initial=stored[self._counts_tokens],
            desc="extracting",
            bar_format=bar_format,
            disable=not (on_terminal() and log.isEnabledFor(logging.INFO)),
        )

    def advance(self, samples: int, tokens: int, flops: float, kept: int = 0) -> None:
        """Counts a step, and makes a report if the interval since the last report is over.

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
            tokens_per_second = self.tokens / self._bar.format_dict["elapsed"]
            bar_postfix = f"{counted(self.kept, 'token')}, {tokens_per_second:,.0f} tokens/s"
            self._bar.set_postfix_str(bar_postfix, refresh=False)
            self._bar.update(kept if self._counts_tokens else samples)
        if time.perf_counter() - self._last_report[0] >= self._interval:
            self._report()

    def _report(self) -> None:
        """Stores the metrics since the last report, and logs a line if there is no bar."""
        current_time = time.perf_counter()
        last_time, last_tokens, last_flops = self._last_report
        self._last_report = current_time, self.tokens, self._flops
        elapsed_seconds = current_time - last_time
        tokens_per_second = (self.tokens - last_tokens) / elapsed_seconds
        flops_per_second = (self._flops - last_flops) / elapsed_seconds
        peak_fraction = None
        if self._peak_flops is not None:
            peak_fraction = round(flops_per_second / self._peak_flops, 4)
        metrics = {
            "time": round(time.time(), 3),
            "samples": self._stored_samples + self.samples,
            "tokens": self.kept,
            "tokens_computed_since_start": self.tokens,
            "steps_since_start": self.steps,
            "tokens_per_second": round(tokens_per_second, 1),
            "tokens_per_second_per_chip": round(tokens_per_second / self._chips, 1),
            "tflops_per_second_per_chip": round(flops_per_second / self._chips / 1e12, 4),
            "model_flops_utilisation": peak_fraction,
            **self._gauges(),
        }
        self._record(metrics)
        if self._bar.disable:
            samples_text = counted(metrics["samples"], "sample")
            tokens_text = counted(self.kept, "token")
            if self._counts_tokens:
                tokens_text = f"{self.kept:,} of {counted(self._limit or 0, 'token')}"
            elif self._limit is not None:
                samples_text = f"{metrics['samples']:,} of {counted(self._limit, 'sample')}"
            log.info(
                "%s, %s, %.0f tokens/s%s; stored %s, %.2f GB, %d being written, retries: %d",
                samples_text,
                tokens_text,
                tokens_per_second,
                "" if peak_fraction is None else f", {peak_fraction:.0%} of peak",
                counted(metrics["shards_stored"], "shard"),
                metrics["bytes_stored"] / 1e9,
                metrics["shards_writing"],
                metrics["upload_retries_since_start"],
            )

    def close(self) -> None:
        """Reports the tokens since the last report, and ends the bar."""
        if self._last_report[1] < self.tokens:
            self._report()
        self._bar.close()
