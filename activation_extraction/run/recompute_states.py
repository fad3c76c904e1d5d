"""Computes hidden states for samples that another program has stored, for --verify.

inspect/verify_states.py compares the results with the stored states. recompute.py computes values
again for runs of this program, which record their model, dtype and hooks.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from activation_extraction.cli.flags import Config
from activation_extraction.common.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.devices import (
    device_errors,
    devices_of_this_host,
    usable_devices,
)
from activation_extraction.model.family import read_model_config
from activation_extraction.model.forward import StepFunction, compile_step
from activation_extraction.model.model_setup import choose_hooks, prepare_model
from activation_extraction.run.prepare import step_request
from activation_extraction.store.chosen_samples import StatesRecomputer
from activation_extraction.text.packing import pack, samples_of

# The length of a row is rounded up to a multiple of this number of tokens, so that every mesh can
# divide the row among its devices. If the model's longest possible row is shorter than this
# multiple, the row has the length of the longest possible row.
LENGTH_STEP = 128


def load_for_hidden_states(
    config: Config, token_ids: Sequence[np.ndarray], width: int
) -> StatesRecomputer:
    """Prepares the model that the flags name, to compute hidden states.

    The weights are read when the first states are computed.

    Args:
        config: The configuration of --verify. It contains the model, the adapter, the dtype and the
            options of the computation and, if flags name them, the hooks whose values the stored
            files are expected to contain.
        token_ids: Token ids of all samples that may be computed, (tokens,) each.
        width: Number of values of a stored hidden state.

    Returns:
        A `StatesRecomputer`. It contains facts about the model, and also the function that computes
        the hidden states of samples.

    Raises:
        InputError: If the model cannot be read, if it lacks a hook that the flags name, or if the
            stored samples do not fit the model: its width, its vocabulary or its longest possible
            row.
    """
    model_path = config.model_options.model_path
    if config.hook_options.encode:
        raise InputError("--encode: hidden states of other programs are not encoded; leave it out")
    model_config = read_model_config(
        Checkpoint(model_path, config.model_options.model_revision).file("config.json")
    )
    if width != model_config.hidden_size:
        raise InputError(
            f"--model_path {model_path}: its hidden states have {model_config.hidden_size} values, "
            f"the stored ones have {width}"
        )
    largest_token_id = max(
        (int(ids_of_sample.max()) for ids_of_sample in token_ids if len(ids_of_sample)), default=0
    )
    smallest_token_id = min(
        (int(ids_of_sample.min()) for ids_of_sample in token_ids if len(ids_of_sample)), default=0
    )
    if smallest_token_id < 0 or largest_token_id >= model_config.vocab_size:
        token_id_out_of_range = smallest_token_id if smallest_token_id < 0 else largest_token_id
        raise InputError(
            f"--model_path {model_path}: has {model_config.vocab_size} tokens; a stored sample has "
            f"the token id {token_id_out_of_range}"
        )
    max_sample_tokens = max(map(len, token_ids), default=1)
    max_tokens_per_row, reason_of_limit = model_config.longest_row
    if max_sample_tokens > max_tokens_per_row:
        raise InputError(
            f"--model_path {model_path}: {reason_of_limit}; a stored sample has "
            f"{max_sample_tokens} tokens"
        )
    row_length = min(-(-max_sample_tokens // LENGTH_STEP) * LENGTH_STEP, max_tokens_per_row)
    computed_hook_names = (
        "blocks.0.hook_resid_pre",
        *(
            f"blocks.{layer_number}.hook_resid_post"
            for layer_number in range(model_config.num_hidden_layers)
        ),
        "ln_final.hook_out",
    )
    computing_options = config.computing_options
    if not isinstance(computing_options.batch_size, int):
        # The values at all hooks of a row take much memory, so a batch has one row for each device.
        devices_of_host = devices_of_this_host(usable_devices(computing_options.use_data_parallel))
        computing_options = replace(computing_options, batch_size=len(devices_of_host))
    step_config = replace(
        config,
        hook_options=replace(
            config.hook_options,
            layers_to_extract=None,
            hook_names=computed_hook_names,
            activation_dtype="float32",
        ),
        computing_options=computing_options,
        text_options=replace(config.text_options, max_seq_length=row_length),
    )
    requested_hook_names = None
    if (
        config.hook_options.hook_names is not None
        or config.hook_options.layers_to_extract is not None
    ):
        requested_hook_by_key, _ = choose_hooks(step_request(config), model_config)
        requested_hook_names = [
            requested_hook.name for requested_hook in requested_hook_by_key.values()
        ]
    with device_errors():
        prepared_model = prepare_model(step_request(step_config))

    @functools.cache
    def compiled_step() -> StepFunction:
        """Returns the compiled step. The first call reads the weights and compiles the step."""
        with device_errors():
            return compile_step(prepared_model)

    def compute_states(
        token_ids: Sequence[np.ndarray],
    ) -> Iterator[tuple[int, Mapping[str, np.ndarray]]]:
        for batch in pack(samples_of(token_ids), *prepared_model.batch_shape):
            with device_errors():
                activations = prepared_model.receive(compiled_step()(batch, [False] * 3)[0])
            for placed_sample in batch.samples:
                place_in_batch = (
                    placed_sample.row_index,
                    slice(placed_sample.start_in_row, placed_sample.stop),
                )
                yield (
                    placed_sample.sample.number,
                    {
                        hook_name: activations[hook_name][place_in_batch]
                        for hook_name in computed_hook_names
                    },
                )

    return StatesRecomputer(
        model_config.num_hidden_layers,
        str(prepared_model.model.dtype),
        "E" in model_config.sizes,
        requested_hook_names,
        compute_states,
    )
