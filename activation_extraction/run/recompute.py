"""Loads the model of a stored extraction again, so that --verify can recompute samples.

inspect/verify.py compares the results with what is stored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from activation_extraction.common.errors import InputError
from activation_extraction.inspect.verify import Recompute
from activation_extraction.inspect.verify_shard import Chosen
from activation_extraction.model.devices import device_errors
from activation_extraction.model.family import Families
from activation_extraction.model.forward import (
    Forward,
    ModelRequest,
    Step,
    compile_step,
    prepare_model,
)
from activation_extraction.run.digests import model_digest
from activation_extraction.run.lockstep import Votes
from activation_extraction.run.reread import OTHER_TEXT, open_texts
from activation_extraction.run.revision import recorded_commit
from activation_extraction.store.metadata import METADATA, identity_of
from activation_extraction.text.packing import pack, samples_of

NO_VOTES = Votes(with_data=False, stopping=False, failed=False)


def load_again(
    families: Families,
    request: ModelRequest,
    dataset_path: str | None,
    metadata: dict[str, Any],
) -> Recompute:
    """Returns a function that recomputes samples.

    request: how to compute; the metadata says what to compute. dataset_path: where the data set is
    now; None: where the run had it. It is opened only if the run did not keep all tokens. Raises
    InputError if the model is not the one that the stored activations came from.
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
        texts = None
        if not identity.every_token:
            vocabulary = forward.model.config.vocab_size
            texts = open_texts(metadata, forward.checkpoint, vocabulary, dataset_path)
        step = compile_step(forward)

    def recompute(chosen: list[Chosen]) -> list[dict[str, np.ndarray] | str]:
        stored = [sample.token_ids for sample in chosen]
        whole = stored if texts is None else texts.whole(chosen)
        known = [ids for ids in whole if ids is not None]
        found = iter([*_compute(forward, step, known)])
        return [
            OTHER_TEXT
            if ids is None
            else {name: values[sample.positions] for name, values in next(found).items()}
            for sample, ids in zip(chosen, whole, strict=True)
        ]

    return recompute


def _compute(
    forward: Forward, step: Step, token_ids: Sequence[np.ndarray]
) -> Iterator[dict[str, np.ndarray]]:
    """The activations of samples, name of a hook -> (tokens, width)."""
    for batch in pack(samples_of(token_ids), *forward.shape):
        with device_errors():
            activations = forward.receive(step(batch, NO_VOTES)[0])
        for at in batch.samples:
            yield {
                str(name): values[at.row, at.start : at.stop]
                for name, values in activations.items()
            }
