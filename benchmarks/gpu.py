"""The forward pass on a GPU: `python -m benchmarks.gpu`. Without one it ends with status 2.

Random bfloat16 weights of the Qwen2.5 shapes made on the device, full rows of 2048 tokens, 8
residual layers evenly spaced. TFLOP/s of the step alone, and with the activations copied to the
host, with every attention that there is for GPUs; their share of the fastest bfloat16 matrix
product measured here; and transformers on torch, on the same GPU and at the same shapes
(gpu_torch.py, a process of its own). `--shapes tiny` runs anywhere: it tries this script out. The
last line printed is one JSON object.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import Any

# JAX would take most of the memory, and leave too little to the other process.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jax import Array

from activation_extraction.cli.config import parse_args
from activation_extraction.common.errors import one_line
from activation_extraction.model.family import HookedModel
from activation_extraction.model.forward import build_model
from activation_extraction.model.hooks import Form
from activation_extraction.model.kernels import candidates_for
from activation_extraction.model.mesh import HostRows
from activation_extraction.run.prepare import model_request
from benchmarks.peak import CPU_PRODUCTS, GPU_PRODUCTS, measure
from benchmarks.processes import ROOT, machine
from benchmarks.shapes import SHAPES, evenly_spaced
from qwen2_jax_with_hooks import FAMILIES

HOOKS = 8
ATTENTIONS = candidates_for("gpu")["attention"]
Row = dict[str, Any]


def random_params(model: HookedModel) -> dict[str, Any]:
    """Weights made on the device: norms near 1, matrices scaled by their fan-in."""

    def make(number: int, path: tuple[str, ...], shape: tuple[int, ...]) -> Array:
        values = jax.random.normal(jax.random.key(number), shape, model.dtype)
        if "norm" in path[-2]:
            return values * 0.1 + 1
        return values * jnp.asarray(shape[-1] ** -0.5, model.dtype)

    made = jax.jit(make, static_argnums=(1, 2))
    table = FAMILIES.by_model_type(model.config.model_type).weight_table(model)
    return unflatten_dict(
        {path: made(number, path, spec.shape) for number, (path, spec) in enumerate(table.items())}
    )


def run_ours(shape: str, given: argparse.Namespace) -> dict[str, Row]:
    """Name of the attention -> what its step does, or why it failed."""
    found: dict[str, Row] = {}
    for name in given.attention:
        try:
            found[name] = run_attention(name, shape, given)
        except Exception as error:  # whatever a kernel fails with, the others are to be measured
            found[name] = {"failed": one_line(error)[:500]}
            print(f"{shape:5} {name}: failed: {found[name]['failed']}", file=sys.stderr)
    return found


def run_attention(name: str, shape: str, given: argparse.Namespace) -> Row:
    """The step as the tool would compile it: seconds of compiling, TFLOP/s, with copies and not."""
    family, config = FAMILIES.parse_config(SHAPES[shape])
    layers = evenly_spaced(HOOKS, config.num_hidden_layers)
    flags = ["--dtype", "bfloat16", "--batch_size", str(given.rows), "--no_data_parallel"]
    flags += ["--max_seq_length", str(given.length), "--layers_to_extract", *map(str, layers)]
    model, rows = build_model(family, model_request(parse_args(flags)), config)
    model = model.clone(kernels=model.kernels._replace(attention=ATTENTIONS[name]))
    params = random_params(model)
    ones = jnp.ones((given.rows, given.length), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(given.length, dtype=jnp.int32), ones.shape)
    inputs = [jax.device_put(x, rows.incoming()) for x in (ones, ones, positions)]

    def apply(params: Any, *batch: Array) -> dict[Form, Array]:
        return model.apply({"params": params}, *batch)

    began = time.perf_counter()
    outgoing = rows.outgoing(given.length, model.layout)
    compiled = jax.jit(apply, out_shardings=outgoing).lower(params, *inputs).compile()
    compiling = time.perf_counter() - began
    tokens = given.rows * given.length
    flops = model.flops([given.length] * given.rows)
    step = time_steps(lambda: compiled(params, *inputs), rows, given.seconds, copy=False)
    copied = time_steps(lambda: compiled(params, *inputs), rows, given.seconds, copy=True)
    return {
        "compile_seconds": compiling,
        "flops_per_second": flops / step,
        "tokens_per_second": tokens / step,
        "flops_per_second_with_copies": flops / copied,
        "tokens_per_second_with_copies": tokens / copied,
        "bytes_to_host_per_step": len(layers) * tokens * config.hidden_size * 2,
        "peak_bytes": (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"),
    }


def time_steps(
    step: Callable[[], dict[Form, Array]], rows: HostRows, seconds: float, copy: bool
) -> float:
    """Seconds per step; as in a run, one computes while the one before is copied."""

    def settle(activations: dict[Form, Array]) -> None:
        if copy:
            rows.receive(activations)
        else:
            jax.block_until_ready(activations)

    settle(step())
    in_flight, steps = deque([step()]), 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or steps < 2:
        in_flight.append(step())
        settle(in_flight.popleft())
        steps += 1
    settle(in_flight.popleft())
    return (time.perf_counter() - began) / (steps + 1)


def run_torch(shape: str, given: argparse.Namespace) -> Row | None:
    """transformers' fastest attention of gpu_torch.py; None when torch is not here."""
    if not (find_spec("torch") and find_spec("transformers")):
        return None
    command = [sys.executable, "-m", "benchmarks.gpu_torch", "--shape", shape]
    command += ["--rows", str(given.rows), "--length", str(given.length)]
    command += ["--seconds", str(given.seconds), "--hooks", str(HOOKS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-2000:], file=sys.stderr)
        return {"failed": done.stderr.strip().splitlines()[-1:]}
    return json.loads(done.stdout.splitlines()[-1])


def describe(shape: str, ours: dict[str, Row], others: Row | None, peak: float) -> Iterator[str]:
    """Lines of the table."""
    for name, row in ours.items():
        if "failed" not in row:
            yield (
                f"{shape:5} {name:8} {row['flops_per_second'] / 1e12:8.3f} TFLOP/s, "
                f"{row['flops_per_second'] / peak:.0%} of the peak, "
                f"{row['tokens_per_second']:.0f} tokens/s; with copies "
                f"{row['tokens_per_second_with_copies']:.0f}; "
                f"compiled in {row['compile_seconds']:.1f} s"
            )
    for name, row in (others or {}).items():
        if isinstance(row, dict) and "tokens_per_second" in row:
            yield (
                f"{shape:5} transformers {name} {row['tokens_per_second']:.0f} tokens/s, with "
                f"copies {row['tokens_per_second_with_copies']:.0f}"
            )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.5B", "1.5B", "7B"])
    parser.add_argument("--rows", type=int, default=8, help="per step (default: 8)")
    parser.add_argument("--length", type=int, default=2048, help="tokens per row (default: 2048)")
    parser.add_argument("--seconds", type=float, default=5, help="per figure (default: 5)")
    parser.add_argument(
        "--attention", nargs="+", choices=ATTENTIONS, help="(default: all; without GPU blocked)"
    )
    given = parser.parse_args(argv)
    on_gpu = jax.default_backend() == "gpu"
    given.attention = given.attention or (list(ATTENTIONS) if on_gpu else ["blocked"])
    if not on_gpu and given.shapes != ["tiny"]:
        print(f"no GPU: JAX finds only {jax.default_backend()}", file=sys.stderr)
        return 2
    products = GPU_PRODUCTS if on_gpu else CPU_PRODUCTS[:1]
    peaks = measure("jax", products, ["bfloat16"], min(given.seconds, 1))["bfloat16"]
    found: Row = {}
    for shape in given.shapes:
        others = run_torch(shape, given)  # first: its process leaves the GPU empty
        peak = max(*peaks.values(), (others or {}).get("peak_flops_per_second", 0.0))
        found[shape] = {
            "ours": run_ours(shape, given),
            "transformers": others,
            "peak_flops_per_second": peak,
        }
        print(*describe(shape, found[shape]["ours"], others, peak), sep="\n", flush=True)
    device = jax.local_devices()[0].device_kind
    result = {"device": device, "products": peaks, "shapes": found}
    print(json.dumps({"machine": machine(), "jax": jax.__version__, **result}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
