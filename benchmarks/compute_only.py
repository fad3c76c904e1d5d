"""Measures how fast an extraction computes activations, without storing them.

The compiled step, which computes the values at the hooks for one batch, is measured on two inputs:
first on the packed batches of the run's documents, then on batches of full rows. A full row is one
document of --max_seq_length tokens, so there is no padding, and attention takes as long as
possible.

This script takes the flags of extract_activations.py. end_to_end.py and gpu.py run it in a separate
process. The last line printed is one JSON object.
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
from activation_extraction.model.forward import Activations, StepFunction, compile_step
from activation_extraction.model.model_setup import prepare_model
from activation_extraction.run.prepare import step_request
from activation_extraction.text.batch import Batch
from activation_extraction.text.packing import pack, samples_of
from benchmarks.inputs import tokenise

# The batches of full rows (rows without padding) are computed again and again until this number of
# seconds is over, because there are only a few such batches.
MIN_SECONDS = 2


def mean_seconds(step: StepFunction, batches: Sequence[Batch], min_seconds: float = 0) -> float:
    """Returns the mean number of seconds that it takes to compute all batches once.

    As in a run, a batch is submitted to the device before the result of the previous one is ready.

    Args:
        step: The compiled step.
        batches: The batches to compute.
        min_seconds: The time in seconds after which no further round begins, where a round computes
            all batches once. 0 for a single round.
    """
    activations_in_flight: deque[Activations] = deque()
    start_time = time.perf_counter()
    num_rounds = 0
    while num_rounds == 0 or time.perf_counter() - start_time < min_seconds:
        for batch in batches:
            activations_in_flight.append(step(batch, (False, False, False))[0])
            if len(activations_in_flight) > 1:
                jax.block_until_ready(activations_in_flight.popleft())
        num_rounds += 1
    jax.block_until_ready(list(activations_in_flight))
    return (time.perf_counter() - start_time) / num_rounds


def main() -> None:
    config = parse_args(sys.argv[1:])
    logging.getLogger("extract_activations").addHandler(logging.StreamHandler())
    prepared_model = prepare_model(step_request(config))
    num_rows, row_length = prepared_model.batch_shape
    token_ids_of_documents = tokenise(
        Path(config.model_options.model_path),
        Path(str(config.text_options.dataset_path)),
        row_length,
    )
    packed_batches = list(pack(samples_of(token_ids_of_documents), num_rows, row_length))
    documents_of_full_rows = [[token_id] * row_length for token_id in range(max(num_rows, 8))]
    full_batches = list(pack(samples_of(documents_of_full_rows), num_rows, row_length))
    start_time = time.perf_counter()
    compiled_step = compile_step(prepared_model)
    # The first call of the step takes longer, because it also allocates memory. So it is not
    # measured with the other calls.
    mean_seconds(compiled_step, packed_batches[:1])
    step_figures = {
        "load_and_compile_seconds": time.perf_counter() - start_time,
        "steps": len(packed_batches),
        "tokens": sum(batch.num_tokens for batch in packed_batches),
        "seconds": mean_seconds(compiled_step, packed_batches),
        "full_rows_tokens": sum(batch.num_tokens for batch in full_batches),
        "full_rows_seconds": mean_seconds(compiled_step, full_batches, MIN_SECONDS),
        "full_rows_flops_per_token": prepared_model.model.flops([row_length]) / row_length,
        "kernels": list(prepared_model.kernel_choice_by_operation),
    }
    print(json.dumps(step_figures))


if __name__ == "__main__":
    main()
