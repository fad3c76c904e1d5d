"""--verify recomputes samples with the model of a stored run, which this module loads.

To recompute a token takes all tokens before it. Where a run stores only some tokens, reread.py
reads the others again. inspect/verify.py compares the results with what is stored.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from activation_extraction.cli.flags import Config
from activation_extraction.common.codes import CODES
from activation_extraction.common.encodings import FLOAT8
from activation_extraction.model.devices import device_errors
from activation_extraction.model.forward import compile_step
from activation_extraction.model.model_setup import ModelRequest, prepare_model
from activation_extraction.run.inputs import check_model_inputs
from activation_extraction.run.prepare import recorded_commit
from activation_extraction.run.reread import load_for_rereading
from activation_extraction.store.chosen_samples import ChosenSample, Recompute, Reread
from activation_extraction.store.hook_values import Values
from activation_extraction.store.run_log import METADATA, identity_of
from activation_extraction.text.packing import pack, samples_of


def load_for_recomputing(
    request: ModelRequest, dataset_path: str | None, metadata: dict[str, Any]
) -> Recompute:
    """Loads the model of a stored run, to recompute samples.

    Args:
        request: How to compute. The metadata says what to compute.
        dataset_path: The path or URL of the data set now. None for where the run had it. It is
            opened only if the run does not store all tokens.
        metadata: The content of metadata.json.

    Returns:
        A function that recomputes samples, and the platform that it uses.

    Raises:
        InputError: An input is not the one that the stored activations came from.
    """
    identity = identity_of(metadata, METADATA)
    configuration = Config.from_json(metadata.get("configuration", {}))
    encoded = identity.activation_dtype == FLOAT8  # and decoded to float32
    codes = {name.removesuffix(CODES) for name in identity.code_hooks}
    activation_hooks = tuple(name for name in identity.hooks if name not in identity.code_hooks)
    request = replace(
        request,
        model_revision=request.model_revision or recorded_commit(request.model_path, metadata),
        layers_to_extract=None,
        hook_names=activation_hooks or None,
        encode_most=configuration.encode_most,
        keep_activations=not codes.isdisjoint(activation_hooks),
        top_logits=identity.top_logits or request.top_logits,
        dtype=identity.dtype,
        activation_dtype="float32" if encoded else identity.activation_dtype,
        max_seq_length=identity.max_seq_length,
    )
    with device_errors():
        forward = prepare_model(request)
        check_model_inputs(forward, request, identity)
        reread: Reread | None = None
        if not identity.every_token:
            reread = load_for_rereading(
                metadata, forward.checkpoint, forward.adapter_files, dataset_path
            )
        step = compile_step(forward)

    def recompute(chosen: list[ChosenSample]) -> list[dict[str, Values] | str]:
        stored = [sample.tokens for sample in chosen]
        token_ids: Sequence[np.ndarray | str] = [tokens.token_ids for tokens in stored]
        if reread is not None:
            token_ids = reread(stored)
        results: list[dict[str, Values] | str] = []
        readable: list[int] = []  # indices of the samples whose token ids are known
        for index, ids in enumerate(token_ids):
            if isinstance(ids, str):
                results.append(ids)
            else:
                results.append({})
                readable.append(index)
        rows = [np.asarray(token_ids[index]) for index in readable]
        for batch in pack(samples_of(rows), *forward.shape):
            with device_errors():
                activations = forward.receive(step(batch, [False] * 3)[0])
            by_name = {str(key): values for key, values in activations.items()}
            for placed in batch.samples:
                index = readable[placed.sample.number]
                where = placed.row, placed.start + np.asarray(stored[index].positions, int)
                results[index] = {
                    hook.name: hook.for_user(by_name[hook.name][where])
                    for hook in chosen[index].hooks
                }
        return results

    return Recompute(jax.default_backend(), recompute)
