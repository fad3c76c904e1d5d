"""transformers on torch at one of gpu.py's shapes, in a process of its own; no JAX in here.

Every attention that is installed (sdpa, flash attention) is measured: full rows without padding or
mask, bfloat16, the residual stream of some layers kept, and then also copied to the host. The last
line printed is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoModel, Qwen2Config

from benchmarks.peak import CPU_PRODUCTS, GPU_PRODUCTS, best, measure
from benchmarks.shapes import SHAPES, evenly_spaced

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def time_steps(step: Callable[[], Any], seconds: float) -> float:
    """Seconds per step. The host runs ahead of the GPU by at most four steps."""
    step()
    synchronize()
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or steps < 2:
        step()
        steps += 1
        if steps % 4 == 0:
            synchronize()
    synchronize()
    return (time.perf_counter() - began) / steps


@torch.inference_mode()
def measure_attention(attention: str, given: argparse.Namespace) -> dict[str, float]:
    """Tokens per second of the forward pass alone, and with copies to pinned memory."""
    config = Qwen2Config(**SHAPES[given.shape])
    with torch.device(DEVICE):
        model = AutoModel.from_config(
            config, dtype=torch.bfloat16, attn_implementation=attention
        ).eval()
        tokens = torch.ones((given.rows, given.length), dtype=torch.long)
    layers = evenly_spaced(given.hooks, config.num_hidden_layers)
    shape = (len(layers), given.rows, given.length, config.hidden_size)
    on_host = torch.empty(shape, dtype=torch.bfloat16, pin_memory=DEVICE == "cuda")
    kept: dict[int, torch.Tensor] = {}

    def keep(layer: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            kept[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    for layer in layers:
        model.layers[layer].register_forward_hook(keep(layer))

    def forward() -> None:
        model(tokens, use_cache=False)

    def with_copies() -> None:
        forward()
        for number, layer in enumerate(layers):
            on_host[number].copy_(kept[layer], non_blocking=True)

    done = given.rows * given.length
    return {
        "tokens_per_second": done / time_steps(forward, given.seconds),
        "tokens_per_second_with_copies": done / time_steps(with_copies, given.seconds),
        "peak_bytes": torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--rows", type=int, required=True)
    parser.add_argument("--length", type=int, required=True)
    parser.add_argument("--hooks", type=int, required=True, help="layers kept")
    parser.add_argument("--seconds", type=float, required=True, help="per figure")
    given = parser.parse_args()
    products = GPU_PRODUCTS if DEVICE == "cuda" else CPU_PRODUCTS[:1]
    peak = best(measure("torch", products, ["bfloat16"], min(given.seconds, 1)))["bfloat16"]
    found: dict[str, Any] = {"sdpa": measure_attention("sdpa", given)}
    if DEVICE == "cuda" and find_spec("flash_attn"):
        found["flash_attention_2"] = measure_attention("flash_attention_2", given)
    versions = {name: version(name) for name in ("torch", "transformers")}
    print(json.dumps({**found, "peak_flops_per_second": peak, "versions": versions}))


if __name__ == "__main__":
    main()
