"""Measures the tool's compiled step over the batches of a run, without storing anything.

end_to_end.py and gpu.py run it in a separate process. It takes the tool's flags; the last line
printed is one JSON object. It measures the documents first, and then full rows: one document of
--max_seq_length tokens in each row, so without padding and with the longest attention.
"""

import json
import logging
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import jax

from activation_extraction.cli.config import parse_args
from activation_extraction.model.forward import Activations, Step, compile_step
from activation_extraction.model.model_setup import prepare_model
from activation_extraction.run.prepare import step_request
from activation_extraction.text.batch import Batch
from activation_extraction.text.packing import pack, samples_of
from benchmarks.inputs import tokenise

LEAST_SECONDS = 2  # for which the full rows are repeated


def seconds_of(step: Step, batches: Sequence[Batch], least: float = 0) -> float:
    """Returns the mean time of computing all batches once, in seconds.

    As in a run, the next batch is handed over while one computes.

    Args:
        step: The compiled step.
        batches: The batches to compute.
        least: The seconds for which all batches are repeated, at least. 0 to compute them once.
    """
    in_flight: deque[Activations] = deque()
    began, rounds = time.perf_counter(), 0
    while not rounds or time.perf_counter() - began < least:
        for batch in batches:
            in_flight.append(step(batch, (False, False, False))[0])
            if len(in_flight) > 1:
                jax.block_until_ready(in_flight.popleft())
        rounds += 1
    jax.block_until_ready(list(in_flight))
    return (time.perf_counter() - began) / rounds


def main() -> None:
    config = parse_args(sys.argv[1:])
    logging.getLogger("extract_activations").addHandler(logging.StreamHandler())
    forward = prepare_model(step_request(config))
    rows, length = forward.shape
    documents = tokenise(Path(config.model.model_path), Path(str(config.text.dataset_path)), length)
    packed = list(pack(samples_of(documents), rows, length))
    full = list(pack(samples_of([[n] * length for n in range(max(rows, 8))]), rows, length))
    began = time.perf_counter()
    step = compile_step(forward)
    seconds_of(step, packed[:1])  # a warm-up: the first call does work that later ones do not
    figures = {
        "load_and_compile_seconds": time.perf_counter() - began,
        "steps": len(packed),
        "tokens": sum(batch.num_tokens for batch in packed),
        "seconds": seconds_of(step, packed),
        "full_rows_tokens": sum(batch.num_tokens for batch in full),
        "full_rows_seconds": seconds_of(step, full, LEAST_SECONDS),
        "full_rows_flops_per_token": forward.model.flops([length]) / length,
        "kernels": list(forward.kernels),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
