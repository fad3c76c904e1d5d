"""Recomputes samples with the model of a stored run, for --verify.

The activations of a token depend on all tokens before it in its sample. If a run stores only some
tokens, reread.py reads the samples again from the data set. inspect/verify.py compares the results
with the stored values.
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
from activation_extraction.run.prepare import recorded_model_commit, step_request
from activation_extraction.run.reread import load_for_rereading
from activation_extraction.store.chosen_samples import ChosenSample, Recomputer, Reread
from activation_extraction.store.identity import Identity
from activation_extraction.store.run_log import METADATA, identity_of
from activation_extraction.store.stored_hook import Values
from activation_extraction.text.packing import pack, samples_of


def load_for_recomputing(config: Config, metadata: dict[str, Any]) -> Recomputer:
    """Loads the model of a stored run, to recompute samples.

    Args:
        config: The configuration of --verify. It contains the paths of the model and the adapter,
            the options of the computation and, if the data set has been moved, its new path. The
            data set is opened only if the run does not store all tokens, because the ids of the
            missing tokens are read from it.
        metadata: The content of metadata.json, which determines the hooks and dtypes.

    Returns:
        A `Recomputer`, which contains a function that recomputes samples, and the name of JAX's
        platform on which this function runs.

    Raises:
        InputError: If an input cannot be read, or if it differs from the input of the stored run.
    """
    identity = identity_of(metadata, METADATA)
    config = replace(
        config,
        model_options=_model_as_stored(config.model_options, identity, metadata),
        hook_options=_hooks_as_stored(config.hook_options, identity, metadata),
        text_options=replace(config.text_options, max_seq_length=identity.text.max_seq_length),
    )
    with device_errors():
        prepared_model = prepare_model(step_request(config))
        check_model_inputs(prepared_model, config, identity)
        sample_rereader: Reread | None = None
        if not identity.every_token:
            sample_rereader = load_for_rereading(
                metadata,
                prepared_model.checkpoint,
                prepared_model.adapter_files,
                config.text_options.dataset_path,
            )
        compiled_step = compile_step(prepared_model)

    def recompute(chosen_samples: list[ChosenSample]) -> list[dict[str, Values] | str]:
        stored_tokens_of_samples = [sample.tokens for sample in chosen_samples]
        token_ids_or_error_messages_of_samples: Sequence[np.ndarray | str] = [
            stored_tokens.token_ids for stored_tokens in stored_tokens_of_samples
        ]
        if sample_rereader is not None:
            token_ids_or_error_messages_of_samples = sample_rereader(stored_tokens_of_samples)
        # For each sample, either the recomputed values by the name of the hook, or the reason why
        # the sample cannot be recomputed.
        values_or_error_messages_of_samples: list[dict[str, Values] | str] = []
        # Indices in `chosen_samples` of the samples whose token ids are known.
        indices_of_readable_samples: list[int] = []
        for index_in_chosen_samples, token_ids_or_error_message in enumerate(
            token_ids_or_error_messages_of_samples
        ):
            if isinstance(token_ids_or_error_message, str):
                values_or_error_messages_of_samples.append(token_ids_or_error_message)
            else:
                values_or_error_messages_of_samples.append({})
                indices_of_readable_samples.append(index_in_chosen_samples)
        token_ids_of_readable_samples = [
            np.asarray(token_ids_or_error_messages_of_samples[index_in_chosen_samples])
            for index_in_chosen_samples in indices_of_readable_samples
        ]
        for batch in pack(samples_of(token_ids_of_readable_samples), *prepared_model.batch_shape):
            with device_errors():
                activations = prepared_model.receive(compiled_step(batch, [False] * 3)[0])
            values_by_hook_name = {
                str(hook_key): activation_values
                for hook_key, activation_values in activations.items()
            }
            for placed_sample in batch.samples:
                index_in_chosen_samples = indices_of_readable_samples[placed_sample.sample.number]
                kept_positions = np.asarray(
                    stored_tokens_of_samples[index_in_chosen_samples].positions, int
                )
                indices_in_row = placed_sample.start_in_row + kept_positions
                values_or_error_messages_of_samples[index_in_chosen_samples] = {
                    stored_hook.name: stored_hook.for_user(
                        values_by_hook_name[stored_hook.name][
                            placed_sample.row_index, indices_in_row
                        ]
                    )
                    for stored_hook in chosen_samples[index_in_chosen_samples].hooks
                }
        return values_or_error_messages_of_samples

    return Recomputer(jax.default_backend(), recompute)


def _model_as_stored(
    options: ModelOptions, identity: Identity, metadata: Mapping[str, Any]
) -> ModelOptions:
    """Returns the options of the model with which samples are recomputed.

    They contain the dtype of the run and, if --verify names no revision, the model's commit that
    the run has recorded.

    Args:
        options: The options of the model that are given to --verify.
        identity: The identity of the run.
        metadata: The content of metadata.json.
    """
    model_revision = options.model_revision or recorded_model_commit(options.model_path, metadata)
    return replace(options, model_revision=model_revision, dtype=identity.dtype)


def _hooks_as_stored(
    options: HookOptions, identity: Identity, metadata: Mapping[str, Any]
) -> HookOptions:
    """Returns the hook options for recomputing samples at all hooks that the run stores.

    Args:
        options: The hook options that were given with --verify, for fields that the run does not
            determine.
        identity: The identity of the run.
        metadata: The content of metadata.json.
    """
    recorded_config = Config.from_json(metadata.get("configuration", {}))
    # Stored float8 values are decoded to float32 before they are compared.
    stores_float8 = identity.activation_dtype == FLOAT8
    encoded_hook_names = {hook_name.removesuffix(CODES) for hook_name in identity.code_hooks}
    activation_hook_names = tuple(
        hook_name for hook_name in identity.hooks if hook_name not in identity.code_hooks
    )
    return replace(
        options,
        layers_to_extract=None,
        hook_names=activation_hook_names or None,
        encode_most=recorded_config.hook_options.encode_most,
        keep_activations=not encoded_hook_names.isdisjoint(activation_hook_names),
        top_logits=identity.top_logits or options.top_logits,
        activation_dtype="float32" if stores_float8 else identity.activation_dtype,
    )
