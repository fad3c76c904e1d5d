"""transformers on torch on gpu.py's inputs, in a process of its own; no JAX in here.

Batches of documents, padded to the longest, as they come and sorted by length, and full rows; the
residual stream of some layers is copied to pinned memory. Random token ids, scaled dot-product
attention. The last line printed is one JSON object.
"""

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

from benchmarks.inputs import evenly_spaced

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def hooked(model: Any, layers: Sequence[int], kept: dict[int, torch.Tensor]) -> None:
    """Makes the model put what these layers give into `kept`."""

    def keep(layer: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            kept[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    for layer in layers:
        model.layers[layer].register_forward_hook(keep(layer))


@torch.inference_mode()
def tokens_per_second(
    model: Any,
    batches: Sequence[Sequence[int]],
    kept: dict[int, torch.Tensor],
    on_host: torch.Tensor,
    seconds: float,
) -> float:
    """Real tokens per second of batches of documents of these lengths, for at least `seconds`.

    The host runs ahead of the GPU by at most four batches. on_host: (hooks, tokens, width).
    """

    def compute(lengths: Sequence[int]) -> None:
        longest = max(lengths)
        tokens = torch.randint(model.config.vocab_size, (len(lengths), longest), device=DEVICE)
        ends = torch.tensor(lengths, device=DEVICE)[:, None]
        mask = (torch.arange(longest, device=DEVICE) < ends).long()
        model(tokens, attention_mask=None if min(lengths) == longest else mask, use_cache=False)
        for number, values in enumerate(kept.values()):
            place = on_host[number, : len(lengths) * longest]
            place.copy_(values.flatten(0, 1), non_blocking=True)

    for lengths in batches[:3]:
        compute(lengths)
    synchronize()
    began, done, number = time.perf_counter(), 0, 0
    while time.perf_counter() - began < seconds or number < 2:
        lengths = batches[number % len(batches)]
        compute(lengths)
        done, number = done + sum(lengths), number + 1
        if number % 4 == 0:
            synchronize()
    synchronize()
    return done / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a folder")
    parser.add_argument("--documents", type=Path, required=True, help="of text, a byte per token")
    parser.add_argument("--rows", type=int, required=True, help="documents per batch")
    parser.add_argument("--length", type=int, required=True, help="tokens per full row")
    parser.add_argument("--hooks", type=int, required=True, help="layers kept")
    parser.add_argument("--seconds", type=float, required=True, help="per figure")
    given = parser.parse_args()
    with torch.device(DEVICE):
        model = AutoModel.from_pretrained(given.model, dtype=torch.bfloat16).eval()
    kept: dict[int, torch.Tensor] = {}
    config = model.config
    hooked(model, evenly_spaced(given.hooks, config.num_hidden_layers), kept)
    shape = given.hooks, given.rows * given.length, config.hidden_size
    on_host = torch.empty(shape, dtype=torch.bfloat16, pin_memory=DEVICE == "cuda")
    texts = (json.loads(line)["text"] for line in given.documents.open())
    lengths = [min(len(text), given.length) for text in texts]
    found = {}
    for name, order in {"as they come": lengths, "by length": sorted(lengths)}.items():
        batches = [order[i : i + given.rows] for i in range(0, len(order), given.rows)]
        random.Random(0).shuffle(batches)  # the time may be over before all are done
        found[name] = tokens_per_second(model, batches, kept, on_host, given.seconds)
    full = [[given.length] * given.rows]
    found["full rows"] = tokens_per_second(model, full, kept, on_host, given.seconds)
    versions = {name: version(name) for name in ("torch", "transformers")}
    print(json.dumps({"tokens_per_second": found, "versions": versions}))


if __name__ == "__main__":
    main()
