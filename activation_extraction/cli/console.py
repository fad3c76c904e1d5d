"""Shows the progress of a run to the user, measures its time, and stops it on signals.

`Progress` shows a bar on a terminal; without a terminal, it writes lines to the log. It also
computes the metrics of the run, such as tokens per second, which the caller stores. `Clock`
measures how long a thread spends on each activity.
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
    received_signal_number = 0

    def handle(signal_number: int, _: Any) -> None:
        nonlocal received_signal_number
        received_signal_number = signal_number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        log.warning("stopping after this step; complete samples will be stored")

    previous_handler_by_signal_number = {
        signal_number: signal.signal(signal_number, handle)
        for signal_number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: received_signal_number
    finally:
        for signal_number, previous_handler in previous_handler_by_signal_number.items():
            signal.signal(signal_number, previous_handler)


class Clock:
    """Measures the time that a thread spends on each of its activities.

    Attributes:
        seconds_by_activity: Seconds that were spent on each activity, by its name.
    """

    def __init__(self) -> None:
        self.restart()
        self.seconds_by_activity: dict[str, float] = defaultdict(float)

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
            self.seconds_by_activity[activity] += time.perf_counter() - start_time

    def restart(self) -> None:
        """Sets `elapsed` to 0, without changing `seconds_by_activity`."""
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
        stored: A tuple of the number of samples and the number of tokens of this host that earlier
            processes have stored.
        interval: Seconds between two reports.
        chips: Number of devices of this host.
        peak_flops: Peak speed of these devices together, in FLOP/s; None if it is unknown.
        gauges: Function that returns the metrics of the storage and of the data, by name.
        record: Function that stores the metrics of an interval, which are a JSON object.

    Attributes:
        num_samples: Number of samples that were computed since the start of this process.
        num_tokens: Number of tokens that were computed since the start of this process, whether or
            not they are stored.
        num_steps: Number of steps since the start of this process.
        num_stored_tokens: Number of tokens that are stored since the beginning of the run.
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
        self.num_samples = self.num_tokens = self.num_steps = 0
        self._num_flops = 0.0
        self._num_stored_samples, self.num_stored_tokens = stored
        # With a limit of tokens, the bar counts tokens. Otherwise it counts samples.
        self._has_token_limit = max_tokens is not None
        self._sample_or_token_limit = max_tokens if self._has_token_limit else max_samples
        self._report_interval_seconds = interval
        self._num_chips = chips
        self._peak_flops = peak_flops  # FLOP/s of all devices together; None if it is unknown
        self._gauge_reader = gauges
        self._store_metrics = record
        self._last_report_time = time.perf_counter()
        self._num_tokens_at_last_report = 0
        self._flops_at_last_report = 0.0
        if self._sample_or_token_limit:
            unit_of_progress = "tokens" if self._has_token_limit else "samples"
            bar_format = (
                "{l_bar}{bar}| {n_fmt}/{total_fmt} UNIT [{elapsed}<{remaining}{postfix}]"
            ).replace("UNIT", unit_of_progress)
        else:
            bar_format = "{desc}: {n_fmt} samples [{elapsed}{postfix}]"
        self._progress_bar = tqdm(
            total=self._sample_or_token_limit,
            initial=self.num_stored_tokens if self._has_token_limit else self._num_stored_samples,
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
        self.num_samples += samples
        self.num_tokens += tokens
        self._num_flops += flops
        self.num_stored_tokens += kept
        self.num_steps += 1
        if not self._progress_bar.disable:
            tokens_per_second = self.num_tokens / self._progress_bar.format_dict["elapsed"]
            bar_postfix = (
                f"{counted(self.num_stored_tokens, 'token')}, {tokens_per_second:,.0f} tokens/s"
            )
            self._progress_bar.set_postfix_str(bar_postfix, refresh=False)
            self._progress_bar.update(kept if self._has_token_limit else samples)
        if time.perf_counter() - self._last_report_time >= self._report_interval_seconds:
            self._report()

    def _report(self) -> None:
        """Stores the metrics since the last report, and logs a line if there is no progress bar."""
        current_time = time.perf_counter()
        seconds_since_last_report = current_time - self._last_report_time
        tokens_per_second = (
            self.num_tokens - self._num_tokens_at_last_report
        ) / seconds_since_last_report
        flops_per_second = (
            self._num_flops - self._flops_at_last_report
        ) / seconds_since_last_report
        self._last_report_time = current_time
        self._num_tokens_at_last_report = self.num_tokens
        self._flops_at_last_report = self._num_flops
        fraction_of_peak_flops = None
        if self._peak_flops is not None:
            fraction_of_peak_flops = round(flops_per_second / self._peak_flops, 4)
        metrics_of_interval = {
            "time": round(time.time(), 3),
            "samples": self._num_stored_samples + self.num_samples,
            "tokens": self.num_stored_tokens,
            "tokens_computed_since_start": self.num_tokens,
            "steps_since_start": self.num_steps,
            "tokens_per_second": round(tokens_per_second, 1),
            "tokens_per_second_per_chip": round(tokens_per_second / self._num_chips, 1),
            "tflops_per_second_per_chip": round(flops_per_second / self._num_chips / 1e12, 4),
            "model_flops_utilisation": fraction_of_peak_flops,
            **self._gauge_reader(),
        }
        self._store_metrics(metrics_of_interval)
        if self._progress_bar.disable:
            samples_phrase = counted(metrics_of_interval["samples"], "sample")
            tokens_phrase = counted(self.num_stored_tokens, "token")
            if self._has_token_limit:
                limit_phrase = counted(self._sample_or_token_limit or 0, "token")
                tokens_phrase = f"{self.num_stored_tokens:,} of {limit_phrase}"
            elif self._sample_or_token_limit is not None:
                limit_phrase = counted(self._sample_or_token_limit, "sample")
                samples_phrase = f"{metrics_of_interval['samples']:,} of {limit_phrase}"
            log.info(
                "%s, %s, %.0f tokens/s%s; stored %s, %.2f GB, %d being written, retries: %d",
                samples_phrase,
                tokens_phrase,
                tokens_per_second,
                "" if fraction_of_peak_flops is None else f", {fraction_of_peak_flops:.0%} of peak",
                counted(metrics_of_interval["shards_stored"], "shard"),
                metrics_of_interval["bytes_stored"] / 1e9,
                metrics_of_interval["shards_writing"],
                metrics_of_interval["upload_retries_since_start"],
            )

    def close(self) -> None:
        """Reports tokens that were added since the last report, and ends the progress bar."""
        if self._num_tokens_at_last_report < self.num_tokens:
            self._report()
        self._progress_bar.close()
