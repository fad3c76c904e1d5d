"""Measures the speed of transformers with PyTorch, for gpu.py.

gpu.py runs this script in a separate process, with its own inputs. The script computes batches of
documents that are padded to the longest one. It measures three orders: the order of the file,
sorted by length, and full rows, in which all documents have the same length. The residual stream of
some layers is copied to pinned memory. Token ids are random, and attention is PyTorch's scaled
dot-product attention. The script does not import JAX. The last line printed is one JSON object.
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


def add_hooks(model: Any, layers: Sequence[int], outputs: dict[int, torch.Tensor]) -> None:
    """Adds hooks to a model that store the outputs of some layers in every forward pass.

    Args:
        model: The model of transformers.
        layers: The numbers of the layers.
        outputs: The dict that receives the outputs: layer -> tensor (documents, tokens, width).
    """

    def hook_of(layer: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            outputs[layer] = output[0] if isinstance(output, tuple) else output

        return hook

    for layer in layers:
        model.layers[layer].register_forward_hook(hook_of(layer))


@torch.inference_mode()
def tokens_per_second(
    model: Any,
    batches: Sequence[Sequence[int]],
    outputs: dict[int, torch.Tensor],
    host_memory: torch.Tensor,
    seconds: float,
) -> float:
    """Measures how fast batches are computed and the outputs of layers are copied to the host.

    The host submits at most four batches before it waits for the GPU.

    Args:
        model: The model, with hooks (see `add_hooks`).
        batches: For each batch, the lengths of its documents in tokens.
        outputs: The dict in which the hooks store the outputs of layers.
        host_memory: Memory on the host for the copies of the outputs, (hooks, tokens, width).
        seconds: The time in seconds after which no further batch begins.

    Returns:
        The number of tokens per second, without padding.
    """

    def compute(lengths: Sequence[int]) -> None:
        longest_length = max(lengths)
        padded_ids = torch.randint(
            model.config.vocab_size, (len(lengths), longest_length), device=DEVICE
        )
        length_column = torch.tensor(lengths, device=DEVICE)[:, None]
        is_token = (torch.arange(longest_length, device=DEVICE) < length_column).long()
        model(
            padded_ids,
            attention_mask=None if min(lengths) == longest_length else is_token,
            use_cache=False,
        )
        for hook_number, output in enumerate(outputs.values()):
            memory_of_hook = host_memory[hook_number, : len(lengths) * longest_length]
            memory_of_hook.copy_(output.flatten(0, 1), non_blocking=True)

    for lengths in batches[:3]:
        compute(lengths)
    synchronize()
    start_time = time.perf_counter()
    num_tokens = num_batches = 0
    while time.perf_counter() - start_time < seconds or num_batches < 2:
        lengths = batches[num_batches % len(batches)]
        compute(lengths)
        num_tokens += sum(lengths)
        num_batches += 1
        if num_batches % 4 == 0:
            synchronize()
    synchronize()
    return num_tokens / (time.perf_counter() - start_time)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument(
        "--documents", type=Path, required=True, help="JSON Lines with text, one token per byte"
    )
    parser.add_argument("--rows", type=int, required=True, help="documents per batch")
    parser.add_argument("--length", type=int, required=True, help="tokens per full row")
    parser.add_argument("--hooks", type=int, required=True, help="layers to copy to the host")
    parser.add_argument("--seconds", type=float, required=True, help="for each figure")
    options = parser.parse_args()
    with torch.device(DEVICE):
        model = AutoModel.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    outputs: dict[int, torch.Tensor] = {}
    config = model.config
    add_hooks(model, evenly_spaced(options.hooks, config.num_hidden_layers), outputs)
    memory_shape = options.hooks, options.rows * options.length, config.hidden_size
    host_memory = torch.empty(memory_shape, dtype=torch.bfloat16, pin_memory=DEVICE == "cuda")
    texts = (json.loads(line)["text"] for line in options.documents.open())
    document_lengths = [min(len(text), options.length) for text in texts]
    speed_of_order = {}
    for order_name, ordered_lengths in (
        ("as they come", document_lengths),
        ("by length", sorted(document_lengths)),
    ):
        batch_starts = range(0, len(document_lengths), options.rows)
        batches = [ordered_lengths[start : start + options.rows] for start in batch_starts]
        # The batches are computed in random order, so that a random sample of them is measured if
        # the time is over before all of them are computed.
        random.Random(0).shuffle(batches)
        speed_of_order[order_name] = tokens_per_second(
            model, batches, outputs, host_memory, options.seconds
        )
    full_rows = [[options.length] * options.rows]
    speed_of_order["full rows"] = tokens_per_second(
        model, full_rows, outputs, host_memory, options.seconds
    )
    versions = {package: version(package) for package in ("torch", "transformers")}
    print(json.dumps({"tokens_per_second": speed_of_order, "versions": versions}))


if __name__ == "__main__":
    main()
