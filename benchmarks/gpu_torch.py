"""Measures the speed of transformers with PyTorch, for gpu.py.

gpu.py runs this script in a separate process, with the model and the lengths of the documents that
it also gives to this tool. The script computes batches of documents, padded to the longest one, and
copies the residual stream of some layers to pinned memory. It measures three speeds: with documents
in the order of the file, with documents sorted by length, and with full rows, in which all
documents have the same length. Token ids are random, and attention is PyTorch's scaled dot-product
attention. The script does not import JAX. The last line printed is one JSON object.
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


def add_hooks(
    model: Any, layer_numbers: Sequence[int], output_by_layer: dict[int, torch.Tensor]
) -> None:
    """Adds hooks to a model that store the outputs of some layers in every forward pass.

    Args:
        model: The model of transformers.
        layer_numbers: The numbers of the layers.
        output_by_layer: The dict that receives the outputs: layer -> tensor (documents, tokens,
            width).
    """

    def hook_of(layer_number: int) -> Callable[..., None]:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            output_by_layer[layer_number] = output[0] if isinstance(output, tuple) else output

        return hook

    for layer_number in layer_numbers:
        model.layers[layer_number].register_forward_hook(hook_of(layer_number))


@torch.inference_mode()
def tokens_per_second(
    model: Any,
    document_lengths_of_batches: Sequence[Sequence[int]],
    output_by_layer: dict[int, torch.Tensor],
    host_buffer: torch.Tensor,
    seconds: float,
) -> float:
    """Measures how fast batches are computed and the outputs of layers are copied to the host.

    First, three batches are computed without being measured. Then all batches are computed in
    order, again and again. The host submits at most four batches before it waits for the GPU.

    Args:
        model: The model, with hooks (see `add_hooks`).
        document_lengths_of_batches: For each batch, the lengths of its documents in tokens.
        output_by_layer: The dict in which the hooks store the outputs of layers.
        host_buffer: Tensor on the host into which the outputs are copied, (hooks, tokens, width).
        seconds: The time in seconds after which no further batch begins, except that at least two
            batches are computed.

    Returns:
        The number of tokens per second, without padding.
    """

    def compute(document_lengths_of_batch: Sequence[int]) -> None:
        longest_length = max(document_lengths_of_batch)
        padded_ids = torch.randint(
            model.config.vocab_size, (len(document_lengths_of_batch), longest_length), device=DEVICE
        )
        length_column = torch.tensor(document_lengths_of_batch, device=DEVICE)[:, None]
        attention_mask = (torch.arange(longest_length, device=DEVICE) < length_column).long()
        model(
            padded_ids,
            attention_mask=None
            if min(document_lengths_of_batch) == longest_length
            else attention_mask,
            use_cache=False,
        )
        for hook_number, layer_output in enumerate(output_by_layer.values()):
            buffer_of_hook = host_buffer[
                hook_number, : len(document_lengths_of_batch) * longest_length
            ]
            buffer_of_hook.copy_(layer_output.flatten(0, 1), non_blocking=True)

    for document_lengths_of_batch in document_lengths_of_batches[:3]:
        compute(document_lengths_of_batch)
    synchronize()
    start_time = time.perf_counter()
    num_tokens = num_batches = 0
    while time.perf_counter() - start_time < seconds or num_batches < 2:
        document_lengths_of_batch = document_lengths_of_batches[
            num_batches % len(document_lengths_of_batches)
        ]
        compute(document_lengths_of_batch)
        num_tokens += sum(document_lengths_of_batch)
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
    parsed_flags = parser.parse_args()
    with torch.device(DEVICE):
        model = AutoModel.from_pretrained(parsed_flags.model, dtype=torch.bfloat16).eval()
    output_by_layer: dict[int, torch.Tensor] = {}
    model_config = model.config
    add_hooks(
        model, evenly_spaced(parsed_flags.hooks, model_config.num_hidden_layers), output_by_layer
    )
    host_buffer_shape = (
        parsed_flags.hooks,
        parsed_flags.rows * parsed_flags.length,
        model_config.hidden_size,
    )
    host_buffer = torch.empty(host_buffer_shape, dtype=torch.bfloat16, pin_memory=DEVICE == "cuda")
    document_texts = (json.loads(json_line)["text"] for json_line in parsed_flags.documents.open())
    document_lengths = [min(len(text), parsed_flags.length) for text in document_texts]
    tokens_per_second_by_document_order = {}
    for order_phrase, ordered_lengths in (
        ("as they come", document_lengths),
        ("by length", sorted(document_lengths)),
    ):
        batch_starts = range(0, len(document_lengths), parsed_flags.rows)
        document_lengths_of_batches = [
            ordered_lengths[batch_start : batch_start + parsed_flags.rows]
            for batch_start in batch_starts
        ]
        # The batches are computed in random order, so that a random sample of them is measured if
        # the time is over before all of them are computed.
        random.Random(0).shuffle(document_lengths_of_batches)
        tokens_per_second_by_document_order[order_phrase] = tokens_per_second(
            model, document_lengths_of_batches, output_by_layer, host_buffer, parsed_flags.seconds
        )
    document_lengths_of_full_batch = [parsed_flags.length] * parsed_flags.rows
    tokens_per_second_by_document_order["full rows"] = tokens_per_second(
        model, [document_lengths_of_full_batch], output_by_layer, host_buffer, parsed_flags.seconds
    )
    version_by_package = {package: version(package) for package in ("torch", "transformers")}
    print(
        json.dumps(
            {
                "tokens_per_second": tokens_per_second_by_document_order,
                "versions": version_by_package,
            }
        )
    )


if __name__ == "__main__":
    main()
