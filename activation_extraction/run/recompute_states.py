"""Computes hidden states for samples that another program has stored, for --verify.

inspect/verify_states.py compares the results with the stored states. recompute.py does the
same for runs of this program, which record their model, dtype and hooks.
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
from activation_extraction.model.forward import Step, compile_step
from activation_extraction.model.model_setup import choose_hooks, prepare_model
from activation_extraction.run.prepare import step_request
from activation_extraction.store.chosen_samples import RecomputeStates
from activation_extraction.text.packing import pack, samples_of

LENGTH_STEP = 128  # rows of a step have a multiple of so many tokens, which any mesh can divide


def load_for_hidden_states(
    config: Config, token_ids: Sequence[np.ndarray], width: int
) -> RecomputeStates:
    """Prepares the model that the flags name, to compute hidden states.

    The weights are read when the first states are computed.

    Args:
        config: The configuration of --verify. It contains the model, the adapter, the dtype and the
            options of computing and, if the user gives them, the hooks that the files should hold.
        token_ids: Token ids of all samples that may be computed, (tokens,) each.
        width: Number of values of a stored hidden state.

    Returns:
        An object with a function that computes hidden states.

    Raises:
        InputError: If the model cannot be read or has no such hooks, or its width, its vocabulary
            or its number of positions does not fit the stored samples.
    """
    model_path = config.model.model_path
    if config.hooks.encode:
        raise InputError("--encode: hidden states of other programs are not encoded; leave it out")
    model = read_model_config(
        Checkpoint(model_path, config.model.model_revision).file("config.json")
    )
    if width != model.hidden_size:
        raise InputError(
            f"--model_path {model_path}: its hidden states have {model.hidden_size} values, the "
            f"stored ones have {width}"
        )
    largest_id = max((int(ids.max()) for ids in token_ids if len(ids)), default=0)
    smallest_id = min((int(ids.min()) for ids in token_ids if len(ids)), default=0)
    if smallest_id < 0 or largest_id >= model.vocab_size:
        wrong_id = smallest_id if smallest_id < 0 else largest_id
        raise InputError(
            f"--model_path {model_path}: has {model.vocab_size} tokens; a stored sample has the "
            f"token id {wrong_id}"
        )
    longest = max(map(len, token_ids), default=1)
    positions, reason = model.longest_row
    if longest > positions:
        raise InputError(
            f"--model_path {model_path}: {reason}; a stored sample has {longest} tokens"
        )
    length = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, positions)
    computed_hooks = (
        "blocks.0.hook_resid_pre",
        *(f"blocks.{block}.hook_resid_post" for block in range(model.num_hidden_layers)),
        "ln_final.hook_out",
    )
    computing = config.computing
    if not isinstance(computing.batch_size, int):
        # All hooks of a row take much memory, so there are as few rows as the devices allow.
        devices = devices_of_this_host(usable_devices(computing.use_data_parallel))
        computing = replace(computing, batch_size=len(devices))
    of_step = replace(
        config,
        hooks=replace(
            config.hooks,
            layers_to_extract=None,
            hook_names=computed_hooks,
            activation_dtype="float32",
        ),
        computing=computing,
        text=replace(config.text, max_seq_length=length),
    )
    requested_hooks = None
    if config.hooks.hook_names is not None or config.hooks.layers_to_extract is not None:
        hooks, _ = choose_hooks(step_request(config), model)
        requested_hooks = [hook.name for hook in hooks.values()]
    with device_errors():
        forward = prepare_model(step_request(of_step))

    @functools.cache
    def step() -> Step:
        """Reads the weights and compiles the step, when the first states are computed."""
        with device_errors():
            return compile_step(forward)

    def states(
        token_ids: Sequence[np.ndarray],
    ) -> Iterator[tuple[int, Mapping[str, np.ndarray]]]:
        for batch in pack(samples_of(token_ids), *forward.shape):
            with device_errors():
                activations = forward.receive(step()(batch, [False] * 3)[0])
            for placed in batch.samples:
                tokens = placed.row, slice(placed.start, placed.stop)
                yield (
                    placed.sample.number,
                    {name: activations[name][tokens] for name in computed_hooks},
                )

    return RecomputeStates(
        model.num_hidden_layers,
        str(forward.model.dtype),
        "E" in model.sizes,
        requested_hooks,
        states,
    )
