"""The step of a run: weights are read and the forward pass is compiled, once for all batches.

What the step computes is forward.py's part, and what happens between steps the loop's.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from activation_extraction.cli.console import log, on_terminal
from activation_extraction.model.compilation import watch_compiling
from activation_extraction.model.forward import Forward
from activation_extraction.model.kept import KeptTokens, take_kept
from activation_extraction.model.weights import load_params
from activation_extraction.text.batch import Batch

# {width: (hooks of that width, rows of all hosts, T, width)}, or of the batch's kept tokens alone
Activations = dict[int, Array] | KeptTokens
# (batch or None, flags of this host) -> (activations, number of hosts that set each flag); does not
# wait for the devices.
Step = Callable[[Batch | None, Sequence[bool]], tuple[Activations, Array]]


def compile_step(forward: Forward) -> Step:
    """Loads the weights and compiles the forward pass."""
    model, rows, shape = forward.model, forward.rows, forward.shape
    params = read_weights(forward)
    began = time.perf_counter()

    def apply(params: Any, tokens: Array, segments: Array, positions: Array, flags: Array) -> Any:
        return model.apply({"params": params}, tokens, segments, positions), flags.sum(axis=0)

    def abstract(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        whole = (shape[0] * rows.hosts, *shape[1:])
        return jax.ShapeDtypeStruct(whole, jnp.int32, sharding=rows.incoming())

    outgoing = rows.outgoing(shape[1]), rows.everywhere()
    inputs = [abstract(shape)] * 3 + [abstract((1, 3))]
    with watch_compiling() as from_cache:
        compiled = jax.jit(apply, out_shardings=outgoing).lower(params, *inputs).compile()
    where = ", from the cache" if from_cache() else ""
    log.info("compiled in %.1f s%s", time.perf_counter() - began, where)
    nothing = np.zeros(shape, np.int32)

    def step(batch: Batch | None, flags: Sequence[bool]) -> tuple[Activations, Array]:
        arrays = [nothing] * 3
        if batch is not None:
            arrays = [batch.token_ids, batch.segment_ids, batch.positions]
        votes = np.array([flags], np.int32)
        activations, votes = compiled(params, *map(rows.feed, (*arrays, votes)))
        if batch is not None and batch.kept is not None:  # now, before the next step is in line
            activations = take_kept(activations, batch.kept)
        return activations, votes

    return step


def read_weights(forward: Forward) -> dict[str, Any]:
    """The parameters, each in its shards, with a progress bar."""
    model = forward.model
    total = sum(math.prod(spec.shape) for spec in forward.weights.values())
    _log_model(forward, total)
    with tqdm(
        total=total * model.dtype.itemsize,
        unit="B",
        unit_scale=True,
        desc="loading weights",
        leave=False,
        disable=not on_terminal(),
    ) as bar:
        return load_params(
            forward.weights,
            forward.checkpoint,
            model.dtype,
            model.layout,
            as_bits=model.dtype == jnp.bfloat16 and jax.default_backend() == "cpu",
            progress=bar.update,
        )


def _log_model(forward: Forward, parameters: int) -> None:
    model = forward.model
    log.info(
        "model: layers 0 to %d of %d, %.3g M parameters, %s; %s mesh: %s",
        model.num_layers - 1,
        model.config.num_hidden_layers,
        parameters / 1e6,
        model.dtype,
        jax.default_backend(),
        " x ".join(f"{name} {size}" for name, size in model.layout.shape.items()),
    )
    if model.stages > 1:
        count = model.micro_batches(forward.shape[0] * forward.rows.hosts)
        idle = (model.stages - 1) / (count + model.stages - 1)
        log.info(
            "pipeline: %d stages, %d micro-batches per step, bubble %.0f %%",
            model.stages,
            count,
            100 * idle,
        )
