"""The loop of a run: batches in, activations out, on all hosts in step."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np
from jax import Array

from activation_extraction.cli.console import Clock, Progress
from activation_extraction.cli.errors import for_the_user
from activation_extraction.model.step import Step
from activation_extraction.output.shard import Key
from activation_extraction.output.storage import ActivationStorage
from activation_extraction.run.hosts import Host, Watchdog, any_host, elsewhere
from activation_extraction.text.packing import Batch
from activation_extraction.text.tokens import Prefetch

log = logging.getLogger("extract_activations")


def extract(
    host: Host,
    batches: Prefetch[Batch],
    step: Step,
    receive: Callable[[dict[int, Array]], Mapping[Key, np.ndarray]],
    storage: ActivationStorage,
    flops: Callable[[Iterable[int]], float],
    progress: Progress,
    clock: Clock,
    watchdog: Watchdog,
    stopped: Callable[[], int],
) -> tuple[bool, Exception | None]:
    """Runs every batch; while one computes, the one before is copied and stored.

    All hosts take the same number of steps: until none has data, or any must stop. A host without
    a batch feeds empty rows. With step n goes what a host knows of step n + 2, so that the answer
    is there when it is needed and nobody waits for it. `receive` copies a step's activations to
    this host, under their keys in the shards; `flops` counts the operations of samples of given
    lengths. Returns whether the data came to its end, and what failed on this host or, as far
    as it knows by then, on another one.
    """
    failure: Exception | None = None
    complete = storing = True
    batches.stopped = stopped

    def fetch() -> Batch | None:
        nonlocal failure
        if failure is None and not stopped():
            try:
                with clock.measure("data"):
                    return next(batches, None)
            except Exception as error:  # reported in the end, when all hosts have stopped
                failure = for_the_user(error)
        return None

    def settle(batch: Batch | None, activations: dict[int, Array], votes: Array) -> bool:
        """Stores a step's activations; returns whether the step after the next one is wanted."""
        nonlocal failure, complete, storing
        with clock.measure("compute"):
            jax.block_until_ready(activations)
        if batch is not None and storing:
            with clock.measure("copy"):
                on_host = receive(activations)
            try:
                with clock.measure("store"):
                    added = storage.add_batch(batch, on_host)
                lengths = [len(placed.sample.token_ids) for placed in batch.samples]
                progress.advance(added, batch.num_tokens, flops(lengths))
                log.debug("step %d: %d samples", progress.steps, len(batch.samples))
            except Exception as error:  # as in fetch
                failure = failure or for_the_user(error)
                storing = False  # after a gap nothing may follow
        watchdog.alive()
        with_data, stopping, failed = np.asarray(votes)
        if failed and failure is None:
            failure = elsewhere()
        complete = complete and not stopping
        return bool(with_data) and not stopping and not failed

    upcoming = deque([fetch(), fetch()])
    state = [*(batch is not None for batch in upcoming), bool(stopped()), failure is not None]
    *some_data, stopping, failed = any_host(host, state)
    complete = not stopping
    wanted = deque([] if stopping or failed and not any(some_data) else some_data)
    in_flight: deque[tuple[Batch | None, dict[int, Array], Array]] = deque()
    try:
        while wanted and wanted.popleft():
            batch = upcoming.popleft()
            upcoming.append(fetch())
            flags = upcoming[-1] is not None, bool(stopped()), failure is not None
            in_flight.append((batch, *step(batch, flags)))
            if len(in_flight) > 1:
                wanted.append(settle(*in_flight.popleft()))
        while in_flight:
            settle(*in_flight.popleft())
    finally:
        try:
            progress.close()
        except Exception as error:  # the last line of metrics; the other hosts must know
            failure = failure or for_the_user(error)
    return complete, failure
