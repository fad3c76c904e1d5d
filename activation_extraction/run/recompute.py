"""Loads the model of a stored extraction again, so that --verify can recompute samples.

reading/verify.py compares the results with what is stored.
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
from activation_extraction.run.digests import model_digest
from activation_extraction.run.lockstep import Votes
from activation_extraction.run.revision import recorded_commit
from activation_extraction.text.packing import pack, samples_of

NO_VOTES = Votes(with_data=False, stopping=False, failed=False)


def load_again(
    families: Families, request: ModelRequest, metadata: dict[str, Any]
) -> Callable[[list[np.ndarray]], list[dict[str, np.ndarray]]]:
    """Returns a function: token ids of samples -> for each sample {hook name: (tokens, width)}.

    request: how to compute; the metadata says what to compute. Raises InputError if the model is
    not the one that the stored activations came from.
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
        if model_digest(forward.checkpoint) != identity.model_digest:
            raise InputError(
                f"--model_path {request.model_path}: is not the model that the stored activations "
                "came from; give that one"
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
