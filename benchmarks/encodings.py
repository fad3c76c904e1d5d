"""What a byte per value costs: `python -m benchmarks.encodings`.

It prints, for float8 beside bfloat16,

- the relative error of tokens that look like those of a residual stream: dimensions of very
  different sizes, a few that are always large, and now and then an attention sink, whose norm is
  100 times that of others and lies in two dimensions; and the bytes per token;
- how many GB/s of activations are encoded, and are decoded, beside a copy in memory;
- how well a top-k autoencoder (https://arxiv.org/abs/2406.04093) trained on what is read from the
  demo's run reconstructs tokens of other samples, which were stored as float32. All trainings have
  the same seeds, initial weights and batches. The loss is the share of the variance that is not
  reconstructed.

The last line is one JSON object.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import Array

from activation_extraction import ActivationDataset
from activation_extraction.common.encodings import (
    FLOAT8,
    decode,
    encode,
    relative_errors,
    token_bytes,
)
from benchmarks.processes import extract, machine

TOKENS, WIDTH, SINK_EVERY = 16_384, 896, 256
STORED = ("float32", "bfloat16", FLOAT8)
HOOK = "blocks.10.hook_resid_post"
LATENTS, ACTIVE, BATCH, RATE = 1024, 16, 512, 1e-3

Params = dict[str, Array]


def tokens_like_a_stream(seed: int = 0) -> np.ndarray:
    """Returns tokens, float32 (TOKENS, WIDTH); every SINK_EVERY-th of them is a sink."""
    chance = np.random.default_rng(seed)
    x = chance.standard_normal((TOKENS, WIDTH), np.float32)
    x *= chance.lognormal(0, 0.5, WIDTH).astype(np.float32)
    large = chance.choice(WIDTH, 5, replace=False)
    x[:, large[:3]] += np.array([30, -20, 15], np.float32)
    x[::SINK_EVERY, large[3:]] += np.array([5000, -3000], np.float32)
    return x


def errors_of(x: np.ndarray, decoded: np.ndarray) -> dict[str, float]:
    """Returns the mean and the largest relative error of usual tokens, and the mean of sinks."""
    errors = relative_errors(x, decoded)
    sinks = np.arange(len(x)) % SINK_EVERY == 0
    found = errors[~sinks].mean(), errors[~sinks].max(), errors[sinks].mean()
    return dict(zip(("mean", "worst", "sinks"), map(float, found), strict=True))


def measure_errors() -> dict[str, Any]:
    """Returns the errors and the bytes per token of every way to store."""
    x = tokens_like_a_stream()
    read = {
        "bfloat16": x.astype(ml_dtypes.bfloat16).astype(np.float32),
        FLOAT8: decode(*encode(x)),
    }
    return {
        name: {**errors_of(x, values), "bytes": token_bytes(WIDTH, name)}
        for name, values in read.items()
    }


def rate(work: Callable[[], Any], size: int, rounds: int = 7) -> float:
    """Returns the median GB/s of what handles `size` bytes."""
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return size / 1e9 / statistics.median(seconds)


def measure_speed() -> dict[str, float]:
    """Returns GB/s of activations that are encoded or decoded, beside a copy of as many bytes."""
    x = tokens_like_a_stream()
    target = np.empty_like(x)
    found = {"copy": rate(lambda: np.copyto(target, x), x.nbytes)}
    encoded = encode(x)
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
        values, name = x.astype(dtype), np.dtype(dtype).name
        found[f"{name} to float8"] = rate(partial(encode, values), values.nbytes)
        found[f"float8 to {name}"] = rate(partial(decode, *encoded, dtype), values.nbytes)
    return found


def read(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Returns all tokens of the demo's run, float32, and the sample of each."""
    dataset = ActivationDataset(folder, hooks=[HOOK])
    parts = [(batch[HOOK], batch.sample_idx) for batch in dataset.batches(4096, dtype="float32")]
    values, samples = zip(*parts, strict=True)
    return np.concatenate(values), np.concatenate(samples)


def reconstruct(params: Params, x: Array) -> Array:
    """Returns what the autoencoder makes of x, (B, D)."""
    latents = (x - params["bias"]) @ params["encoder"] + params["threshold"]
    largest, where = jax.lax.top_k(latents, ACTIVE)
    rows = params["decoder"][where]  # (B, ACTIVE, D)
    return jnp.einsum("bk,bkd->bd", jax.nn.relu(largest), rows) + params["bias"]


def loss_of(params: Params, x: Array) -> Array:
    return jnp.mean(jnp.sum((reconstruct(params, x) - x) ** 2, axis=1))


@jax.jit
def train_step(params: Params, moments: tuple[Params, Params], step: Array, x: Array) -> Any:
    """Returns the parameters and moments after a step of Adam."""
    gradients = jax.grad(loss_of)(params, x)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradients)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, moments[1], gradients)
    scale = jnp.sqrt(1 - 0.999**step) / (1 - 0.9**step)
    params = jax.tree.map(
        lambda p, m, v: p - RATE * scale * m / (jnp.sqrt(v) + 1e-8), params, first, second
    )
    return params, (first, second)


def train(x: np.ndarray, seed: int, steps: int) -> Params:
    """Trains an autoencoder on tokens x, (N, D)."""
    chance = np.random.default_rng(seed)
    decoder = chance.standard_normal((LATENTS, x.shape[1])).astype(np.float32)
    decoder /= np.linalg.norm(decoder, axis=1, keepdims=True)
    params = {
        "encoder": jnp.asarray(decoder.T),
        "decoder": jnp.asarray(decoder),
        "bias": jnp.zeros(x.shape[1]),
        "threshold": jnp.zeros(LATENTS),
    }
    zeros = jax.tree.map(jnp.zeros_like, params)
    moments = zeros, zeros
    for step in range(1, steps + 1):
        batch = x[chance.integers(len(x), size=BATCH)]
        params, moments = train_step(params, moments, jnp.float32(step), batch)
    return params


def measure_training(max_samples: int, seeds: int, steps: int) -> dict[str, Any]:
    """Returns the held-out losses after training on each way to store, and their ratio to that of
    bfloat16."""
    data = {}
    with tempfile.TemporaryDirectory() as root:
        for dtype in STORED:
            folder = Path(root, dtype)
            flags = ["--demo", "--max_samples", str(max_samples), "--layers_to_extract", "10"]
            flags += ["--activation_dtype", dtype, "--shard_format", "safetensors"]
            extract(folder, flags)
            data[dtype] = read(folder)
    exact, samples = data["float32"]
    held_out = samples % 5 == 0
    centre = exact[~held_out].mean(axis=0)
    size = np.float32(np.sqrt(((exact[~held_out] - centre) ** 2).sum(axis=1).mean()))
    test = (exact[held_out] - centre) / size
    variance = float(np.sum((test - test.mean(axis=0)) ** 2, axis=1).mean())
    losses: dict[str, list[float]] = {}
    for dtype, (values, _) in data.items():
        x = (values[~held_out] - centre) / size
        losses[dtype] = [
            float(loss_of(train(x, seed, steps), test)) / variance for seed in range(seeds)
        ]
    means = {dtype: statistics.mean(values) for dtype, values in losses.items()}
    return {
        "tokens": int((~held_out).sum()),
        "held_out": int(held_out.sum()),
        "losses": losses,
        "to_bfloat16": {dtype: mean / means["bfloat16"] for dtype, mean in means.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max_samples", type=int, default=300, help="of the demo (default: 300)")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each (default: 3)")
    parser.add_argument("--steps", type=int, default=1500, help="of a training (default: 1500)")
    args = parser.parse_args()
    errors, speeds = measure_errors(), measure_speed()
    for name, found in errors.items():
        print(
            f"{name}: relative error {found['mean']:.3%} on average, at most {found['worst']:.3%}, "
            f"of sinks {found['sinks']:.3%}; {found['bytes']} bytes per token"
        )
    for name, speed in speeds.items():
        print(f"{name}: {speed:.2f} GB/s")
    training = measure_training(args.max_samples, args.seeds, args.steps)
    for name, ratio in training["to_bfloat16"].items():
        each = ", ".join(f"{loss:.5f}" for loss in training["losses"][name])
        print(f"trained on {name}: held-out loss {each}; {ratio:.5f} of that of bfloat16")
    figures = {"errors": errors, "speeds": speeds, "training": training, "machine": machine()}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
