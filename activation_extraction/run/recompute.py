"""Recomputes samples with the model of a stored run, for --verify.

Recomputing a token needs all tokens before it. If a run stores only some tokens, reread.py reads
the others again. inspect/verify.py compares the results with the stored values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from activation_extraction.cli.flags import Config, HookOptions, ModelOptions
from activation_extraction.common.codes import CODES
from activation_extraction.common.encodings import FLOAT8
from activation_extraction.model.devices import device_errors
from activation_extraction.model.forward import compile_step
from activation_extraction.model.model_setup import prepare_model
from activation_extraction.run.inputs import check_model_inputs
from activation_extraction.run.prepare import recorded_commit, step_request
from activation_extraction.run.reread import load_for_rereading
from activation_extraction.store.chosen_samples import ChosenSample, Recompute, Reread
from activation_extraction.store.hook_values import Values
from activation_extraction.store.identity import Identity
from activation_extraction.store.run_log import METADATA, identity_of
from activation_extraction.text.packing import pack, samples_of


def load_for_recomputing(config: Config, metadata: dict[str, Any]) -> Recompute:
    """Loads the model of a stored run, to recompute samples.

    Args:
        config: The configuration of --verify. It names the model and the adapter, the options of
            computing, and the path of the data set if it has moved. The data set is opened only if
            the run does not store all tokens.
        metadata: The content of metadata.json, which determines the hooks and dtypes.

    Returns:
        A function that recomputes samples, and the platform that it uses.

    Raises:
        InputError: An input cannot be read, or is not the one that the stored activations came
            from.
    """
    identity = identity_of(metadata, METADATA)
    config = replace(
        config,
        model=_model_as_stored(config.model, identity, metadata),
        hooks=_hooks_as_stored(config.hooks, identity, metadata),
        text=replace(config.text, max_seq_length=identity.text.max_seq_length),
    )
    with device_errors():
        forward = prepare_model(step_request(config))
        check_model_inputs(forward, config, identity)
        reread: Reread | None = None
        if not identity.every_token:
            reread = load_for_rereading(
                metadata, forward.checkpoint, forward.adapter_files, config.text.dataset_path
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
                columns = placed.start + np.asarray(stored[index].positions, int)
                results[index] = {
                    hook.name: hook.for_user(by_name[hook.name][placed.row, columns])
                    for hook in chosen[index].hooks
                }
        return results

    return Recompute(jax.default_backend(), recompute)


def _model_as_stored(
    options: ModelOptions, identity: Identity, metadata: Mapping[str, Any]
) -> ModelOptions:
    """Returns the options of the model with the revision and dtype of a stored run.

    Args:
        options: The options of --verify.
        identity: The identity of the run.
        metadata: The content of metadata.json.
    """
    revision = options.model_revision or recorded_commit(options.model_path, metadata)
    return replace(options, model_revision=revision, dtype=identity.dtype)


def _hooks_as_stored(
    options: HookOptions, identity: Identity, metadata: Mapping[str, Any]
) -> HookOptions:
    """Returns the options about hooks that compute the hooks of a stored run.

    Args:
        options: The options of --verify.
        identity: The identity of the run.
        metadata: The content of metadata.json.
    """
    recorded = Config.from_json(metadata.get("configuration", {}))
    # Stored float8 is decoded to float32 before it is compared.
    encoded = identity.activation_dtype == FLOAT8
    sources = {name.removesuffix(CODES) for name in identity.code_hooks}
    activation_hooks = tuple(name for name in identity.hooks if name not in identity.code_hooks)
    return replace(
        options,
        layers_to_extract=None,
        hook_names=activation_hooks or None,
        encode_most=recorded.hooks.encode_most,
        keep_activations=not sources.isdisjoint(activation_hooks),
        top_logits=identity.top_logits or options.top_logits,
        activation_dtype="float32" if encoded else identity.activation_dtype,
    )
