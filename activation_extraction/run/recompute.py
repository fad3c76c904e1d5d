"""The model of a stored extraction, loaded again: how --verify gets the activations of samples.

Comparing them with what is stored is the part of reading/verify.py.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from activation_extraction.cli.errors import InputError
from activation_extraction.model.devices import device_errors
from activation_extraction.model.family import Families
from activation_extraction.model.forward import ModelRequest, prepare_model
from activation_extraction.model.step import compile_step
from activation_extraction.output.metadata import METADATA, identity_of
from activation_extraction.run.agreement import Votes
from activation_extraction.run.digests import digest_files
from activation_extraction.run.revision import recorded_commit
from activation_extraction.text.packing import pack, samples_of

NO_VOTES = Votes(with_data=False, stopping=False, failed=False)


def load_again(
    families: Families, request: ModelRequest, metadata: dict[str, Any]
) -> Callable[[list[np.ndarray]], list[dict[str, np.ndarray]]]:
    """The function that recomputes samples: their token ids -> name of a hook -> (tokens, width).

    request: how to compute; what to compute is read from the metadata. Raises InputError when the
    model is not the one that was extracted from.
    """
    identity = identity_of(metadata, METADATA)
    request = replace(
        request,
        revision=request.revision or recorded_commit(request.model_path, metadata),
        layers=None,
        hook_names=identity.hooks,
        dtype=identity.dtype,
        activation_dtype=identity.activation_dtype,
        length=identity.max_seq_length,
    )
    with device_errors():
        forward = prepare_model(families, request)
        if digest_files(forward.checkpoint.weight_files()) != identity.model_digest:
            raise InputError(
                f"--model_path {request.model_path}: is not the model of the stored activations"
            )
        step = compile_step(forward)

    def recompute(token_ids: list[np.ndarray]) -> list[dict[str, np.ndarray]]:
        found = []
        for batch in pack(samples_of(token_ids), request.rows, request.length):
            with device_errors():
                activations = forward.receive(step(batch, NO_VOTES)[0])
            found += [
                {
                    str(name): values[at.row, at.start : at.stop]
                    for name, values in activations.items()
                }
                for at in batch.samples
            ]
        return found

    return recompute
