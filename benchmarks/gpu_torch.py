"""Measures transformers with torch on the inputs of gpu.py, which runs it in a separate process.

It computes batches of documents padded to the longest one, in the order of the file and sorted by
length, and full rows. The residual stream of some layers is copied to pinned memory. Token ids are
random; attention is torch's scaled dot-product. It imports no JAX. The last line printed is one
JSON object.
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
    """Makes the model store the outputs of these layers in `kept`, by layer, in each pass."""

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
    """Measures the computing and copying of batches, for at least `seconds`.

    The host runs ahead of the GPU by at most four batches.

    Args:
        model: The model, with the hooks of `hooked`.
        batches: The lengths of the documents of each batch.
        kept: The tensors that the hooks store, by layer.
        on_host: Memory for their copies, (hooks, tokens, width).
        seconds: The seconds to measure.

    Returns:
        Tokens per second, without padding.
    """

    def compute(lengths: Sequence[int]) -> None:
        longest = max(lengths)
        tokens = torch.randint(model.config.vocab_size, (len(lengths), longest), device=DEVICE)
        ends = torch.tensor(lengths, device=DEVICE)[:, None]
        mask = (torch.arange(longest, device=DEVICE) < ends).long()
        model(tokens, attention_mask=None if min(lengths) == longest else mask, use_cache=False)
        for index, values in enumerate(kept.values()):
            target = on_host[index, : len(lengths) * longest]
            target.copy_(values.flatten(0, 1), non_blocking=True)

    for lengths in batches[:3]:
        compute(lengths)
    synchronize()
    began, tokens_done, index = time.perf_counter(), 0, 0
    while time.perf_counter() - began < seconds or index < 2:
        lengths = batches[index % len(batches)]
        compute(lengths)
        tokens_done, index = tokens_done + sum(lengths), index + 1
        if index % 4 == 0:
            synchronize()
    synchronize()
    return tokens_done / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument(
        "--documents", type=Path, required=True, help="JSON Lines with text, one token per byte"
    )
    parser.add_argument("--rows", type=int, required=True, help="documents per batch")
    parser.add_argument("--length", type=int, required=True, help="tokens per full row")
    parser.add_argument("--hooks", type=int, required=True, help="layers to copy to the host")
    parser.add_argument("--seconds", type=float, required=True, help="to measure each figure")
    options = parser.parse_args()
    with torch.device(DEVICE):
        model = AutoModel.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    kept: dict[int, torch.Tensor] = {}
    config = model.config
    hooked(model, evenly_spaced(options.hooks, config.num_hidden_layers), kept)
    shape = options.hooks, options.rows * options.length, config.hidden_size
    on_host = torch.empty(shape, dtype=torch.bfloat16, pin_memory=DEVICE == "cuda")
    texts = (json.loads(line)["text"] for line in options.documents.open())
    lengths = [min(len(text), options.length) for text in texts]
    speeds = {}
    for name, order in {"as they come": lengths, "by length": sorted(lengths)}.items():
        batches = [order[i : i + options.rows] for i in range(0, len(order), options.rows)]
        # The time may be over before all batches are computed; these should be a random sample.
        random.Random(0).shuffle(batches)
        speeds[name] = tokens_per_second(model, batches, kept, on_host, options.seconds)
    full = [[options.length] * options.rows]
    speeds["full rows"] = tokens_per_second(model, full, kept, on_host, options.seconds)
    versions = {name: version(name) for name in ("torch", "transformers")}
    print(json.dumps({"tokens_per_second": speeds, "versions": versions}))


if __name__ == "__main__":
    main()
