"""Chooses the kernels of a run: of each kind, the first candidate that is accurate.

Before a run loads its weights, each candidate of the platform (kernels.py) computes small inputs,
with the sizes of one device in the run, and is compared with a function that defines the result.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from activation_extraction.common.errors import RunError, one_line
from activation_extraction.common.log import log
from activation_extraction.model.attention import Segments, dense_attention
from activation_extraction.model.delta_net import token_by_token
from activation_extraction.model.experts import Stacks, one_expert_after_the_other
from activation_extraction.model.kernels import candidates_for
from activation_extraction.model.mesh import Layout

# Dtype -> the largest value of `largest_error` that is allowed. A row is the output of a head for a
# token, or the sum of a token's experts. bfloat16 rounds two factors by at most 2**-9 each, which
# adds up to less than 2**-7. float32 sums of some hundred products are accurate to 2**-18; products
# of TF32 or bfloat16 are not accurate to 2**-14. A kernel that sees one key too many or too few of
# n keys changes a row by about 0.4 * n**-0.5, which is 2**-5 for the segments of a trial.
TOLERANCE = {"bfloat16": 2.0**-6, "float32": 2.0**-15}
ALIKE_MODULO = 128  # kernels treat rows alike if their lengths are equal modulo this number
MOST_EXPERTS, MOST_KEY_HEADS = 4, 2  # the largest numbers in a trial
DELTA_TOKENS = (
    300  # the tokens per row in a trial of the delta rule: several chunks and a part of one
)


class Trial(NamedTuple):
    """A computation in which a candidate is compared with its definition.

    Attributes:
        definition: Function that defines the result.
        arguments: Arguments of the candidate and of the definition. The definition gets
            floating-point arrays in float32. Integers are fixed when the candidate is compiled.
        counts: Mask of the rows of the result to compare, bool, with all axes but the last one.
    """

    definition: Callable[..., Any]
    arguments: tuple[Any, ...]
    counts: Array


@dataclass(frozen=True)
class Choice:
    """The kernel that was chosen for a run.

    Attributes:
        name: Name of the kernel.
        function: Kernel.
        passed_over: Name of an earlier candidate -> reason why it is not used.
    """

    name: str
    function: Callable[..., Array]
    passed_over: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Returns the choice as it is stored in metadata.json."""
        return {"name": self.name, "passed_over": self.passed_over}


def try_kernels(config: Any, layout: Layout, length: int, dtype: jnp.dtype) -> dict[str, Choice]:
    """Chooses the kernels of the run, and logs the choice.

    Each host tries the candidates on its first device.

    Args:
        config: The configuration of the model.
        layout: The mesh.
        length: The number of tokens per row.
        dtype: The dtype of the computation.

    Returns:
        The choice for each field of `Kernels` that the model needs.

    Raises:
        RunError: All candidates of a kind compute wrong numbers on this device.
    """
    trials = {"attention": partial(attention_trials, config, layout, length, dtype)}
    if config.experts is not None:
        trials["experts"] = partial(expert_trials, config, layout, dtype)
    if config.delta is not None:
        trials["delta_rule"] = partial(delta_trials, config, layout, dtype)
    candidates = candidates_for(jax.default_backend())
    tolerance = TOLERANCE[dtype.name]
    return {
        kind: choose_kernel(kind, candidates[kind], make_trials, tolerance)
        for kind, make_trials in trials.items()
    }


def choose_kernel(
    kind: str,
    candidates: Mapping[str, Callable[..., Array]],
    trials: Callable[[], Iterable[Trial]],
    tolerance: float,
) -> Choice:
    """Returns the first candidate that is accurate on the first device of this process.

    If there is only one candidate, as on the CPU, it is chosen without a trial.

    Args:
        kind: The field of `Kernels`, for messages.
        candidates: Name -> function, in the order of preference.
        trials: A function that returns the trials.
        tolerance: The largest value of `largest_error` that is allowed.

    Raises:
        RunError: None of several candidates is accurate, so the device computes wrong numbers.
    """
    passed_over: dict[str, str] = {}
    for name, candidate in candidates.items():
        if len(candidates) == 1:
            return Choice(name, candidate)
        try:
            with jax.default_device(jax.local_devices()[0]):
                error = largest_error(candidate, trials())
            if error <= tolerance:
                log.info("%s: %s, which agrees with its definition on this device", kind, name)
                return Choice(name, candidate, passed_over)
            why = f"it differs from the definition by {error:.2g} (allowed: {tolerance:.2g})"
        except Exception as failure:  # a kernel or its compiler may raise anything
            why = f"it fails: {one_line(failure):.300}"
        passed_over[name] = why
        log.warning("%s: %s is not used: %s", kind, name, why)
    reasons = "; ".join(f"{name}: {why}" for name, why in passed_over.items())
    raise RunError(f"no kernel for {kind} is right on this device: {reasons}")


def largest_error(candidate: Callable[..., Array], trials: Iterable[Trial]) -> float:
    """Returns the largest relative error of a row in several trials.

    The relative error of a row is the norm of the difference between the candidate's row and the
    row that the definition computes in float32, divided by the norm of the latter. The definition
    is computed on the CPU if JAX has it, because a GPU's compiler would try many programs for each
    of its products.

    Args:
        candidate: The kernel.
        trials: The trials.
    """
    errors = []
    device = jax.local_devices()[0]
    with suppress(RuntimeError):  # if JAX_PLATFORMS excludes the CPU
        device = jax.local_devices(backend="cpu")[0]
    for definition, arguments, counts in trials:
        fixed = [number for number, argument in enumerate(arguments) if isinstance(argument, int)]
        computed = jax.jit(candidate, static_argnums=fixed)(*arguments)
        with jax.default_device(device):
            exact = definition(*jax.tree.map(partial(_as_float32, device), arguments))
        compared = np.asarray(counts)
        rows = np.asarray(computed)[compared].astype(float)
        exact_rows = np.asarray(exact)[compared].astype(float)
        norms = np.linalg.norm(exact_rows, axis=-1)
        norms[norms == 0] = 1  # the row of a token without experts is zeros
        errors.append(np.max(np.linalg.norm(rows - exact_rows, axis=-1) / norms))
    return float(np.max(errors))


def _as_float32(device: jax.Device, argument: Any) -> Any:
    """Puts an argument on a device, floating-point arrays in float32; leaves integers as such."""
    if not isinstance(argument, Array):
        return argument
    is_float = jnp.issubdtype(argument.dtype, jnp.floating)
    return jax.device_put(argument.astype(jnp.float32) if is_float else argument, device)


def attention_trials(config: Any, layout: Layout, length: int, dtype: jnp.dtype) -> Iterator[Trial]:
    """Yields trials of attention, with and without the window if the model has one.

    If devices share the queries of a row, there is a trial for the queries of each device. Long
    rows are replaced by shorter ones that kernels treat alike, and the window is made so short that
    it hides some keys. See `try_kernels` for the arguments.
    """
    parts, model = layout.size("query"), layout.size("model")
    queries = length // parts
    if queries > 2 * ALIKE_MODULO:
        queries = 2 * ALIKE_MODULO + queries % ALIKE_MODULO
    keys, size = queries * parts, config.head_dim
    normal, segments = partial(_normal, np.random.default_rng(0), dtype, 2, keys), _segments(keys)
    # The scores are scaled to a narrow range, so that all keys contribute to the result.
    q = normal(config.num_attention_heads // model, size, scale=size**-0.5)
    k, v = (normal(config.num_key_value_heads // model, size) for _ in range(2))
    windows: list[tuple[int, ...]] = [()]
    if config.sliding_window is not None:
        windows.append((min(config.sliding_window, max(keys // 6, 1)),))
    for window in windows:
        for first in range(0, keys, queries):
            of_device = slice(first, first + queries)
            first_query = first if parts == 1 else jnp.int32(first)
            arrays = q[:, of_device], k, v, Segments(segments[:, of_device], segments)
            arguments = (*arrays, first_query, *window)
            yield Trial(dense_attention, arguments, segments[:, of_device] > 0)


def expert_trials(config: Any, layout: Layout, dtype: jnp.dtype) -> Iterator[Trial]:
    """Yields a trial of the experts of a layer, the second of two layers.

    One expert has no rows, the rows of some experts fill several tiles, and some tokens have no
    expert. See `try_kernels` for the arguments.
    """
    sizes = config.experts.count, config.hidden_size, config.experts.width
    experts, hidden, width = layout.shard_shape(("experts", "hidden", "mlp"), sizes)
    rng, experts = np.random.default_rng(0), min(experts, MOST_EXPERTS)
    counts = [0 if expert == 2 else (expert + 1) * 67 % 300 for expert in range(experts)]
    numbers = np.repeat([*range(experts), experts, -1], [*counts, 70, 70 + sum(counts) % 2])
    chosen = rng.permutation(numbers).reshape(-1, 2).astype(np.int32)
    weights = rng.uniform(0.2, 1, chosen.shape).astype(np.float32)
    normal = partial(_normal, rng, dtype)
    x = normal(len(chosen), hidden)
    gate, up = (normal(2, experts, hidden, width, scale=hidden**-0.5) for _ in range(2))
    down = normal(2, experts, width, hidden, scale=width**-0.5)
    stacks = Stacks(jnp.int32(1), gate, up, down)
    arrays = x, jnp.asarray(weights), jnp.asarray(chosen), stacks
    yield Trial(one_expert_after_the_other, arrays, jnp.ones(len(x), bool))


def delta_trials(config: Any, layout: Layout, dtype: jnp.dtype) -> Iterator[Trial]:
    """Yields a trial of the gated delta rule.

    Samples end within chunks, and heads forget at different rates. See `try_kernels` for the
    arguments.
    """
    delta, segments = config.delta, _segments(DELTA_TOKENS)
    (key_heads,) = layout.shard_shape(("key_heads",), (delta.key_heads,))
    heads, rng = (min(key_heads, MOST_KEY_HEADS), delta.values_per_key), np.random.default_rng(0)
    normal = partial(_normal, rng, dtype, *segments.shape)
    exact = partial(_normal, rng, jnp.float32, *segments.shape)
    q, k = (normal(heads[0], delta.key_size) for _ in range(2))
    v = normal(*heads, delta.value_size)
    slopes = np.geomspace(0.01, 1, math.prod(heads), dtype=np.float32).reshape(heads)
    log_decay, beta = -slopes * jax.nn.softplus(exact(*heads)), jax.nn.sigmoid(exact(*heads))
    yield Trial(token_by_token, (q, k, v, log_decay, beta, segments), segments > 0)


def _normal(rng: np.random.Generator, dtype: Any, *shape: int, scale: float = 1) -> Array:
    return jnp.asarray(scale * rng.standard_normal(shape, np.float32), dtype)


def _segments(length: int) -> Array:
    """Returns segments (2, T) of two rows with three samples each, the second one padded."""
    segments = np.ones((2, length), np.int32)
    segments[:, length // 3 :], segments[:, length // 2 :] = 2, 3
    segments[1, length - length // 5 :] = 0
    return jnp.asarray(segments)
