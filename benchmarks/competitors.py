"""Extracts activations with transformers by three methods, for comparison with this tool.

end_to_end.py runs this script in one process for each method, with the Python of a separate
environment (benchmarks/requirements.txt). The script does not import JAX. The methods are:

padded  the usual loop: batches padded to their longest document, an attention mask,
        output_hidden_states, values widened to float32, pickle, and gzip at its default level
sorted  as padded, but with documents sorted by length, and with the faster gzip of isal
alone   one document at a time, without padding and mask, with values in the model's dtype, and
        with the gzip of isal

Every method writes gzipped pickles, and waits until each file is on the disk. A pickle maps each
hook to a list of records {sample_idx, hook, activation, shape, text_preview, token_ids, doc_id}. A
hook is the residual stream after a layer, or the numbers of the experts to which a layer routes
each token. The last line printed is one JSON object.
"""

import argparse
import gzip
import json
import os
import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from isal import igzip

# A function that computes a batch from the token ids of its documents. It returns a tensor
# (documents, tokens, width) for each hook.
ComputeBatch = Callable[[Sequence[Sequence[int]]], list[torch.Tensor]]
# The largest size of a shard before compression, which is the default of extract_activations.py.
SHARD_BYTES = 10**9
# The compression level of isal, from 0 (fastest) to 3 (smallest files). This tool uses the same
# level.
ISAL_LEVEL = 1


@dataclass(frozen=True)
class ExtractionMethod:
    """A method of extracting activations with transformers: how documents are batched and written.

    Attributes:
        pads_batches: Whether a batch contains several documents, which are padded to the longest
            document of the batch. Otherwise, a batch is a single document.
        sorts_by_length: Whether documents are sorted by length before they are batched.
        stores_float32: Whether all floating-point values are stored in float32. Otherwise, they
            are stored in the model's dtype.
        uses_isal: Whether isal compresses the files instead of Python's gzip module.
    """

    pads_batches: bool = False
    sorts_by_length: bool = False
    stores_float32: bool = False
    uses_isal: bool = True


# Name of an extraction method, as the command line of this script takes it -> the settings of the
# method.
EXTRACTION_METHODS = {
    "padded": ExtractionMethod(pads_batches=True, stores_float32=True, uses_isal=False),
    "sorted": ExtractionMethod(pads_batches=True, sorts_by_length=True, stores_float32=True),
    "alone": ExtractionMethod(),
}


def batches_of(
    lengths: Sequence[int],
    method: ExtractionMethod,
    batch_size: int,
    computed_batch_stride: int,
) -> list[list[int]]:
    """Divides documents into batches, and selects the batches that are computed.

    A number above 1 as `computed_batch_stride` saves time, because only a part of the batches is
    selected.

    Args:
        lengths: The number of tokens of each document.
        method: The extraction method, which determines how documents are batched.
        batch_size: The number of documents of a batch. Ignored if the method does not pad batches,
            because each batch is then a single document.
        computed_batch_stride: The number of successive batches of which the middle one is selected.

    Returns:
        For each selected batch, the indices of its documents in `lengths`.
    """
    document_indices = list(range(len(lengths)))
    if method.sorts_by_length:
        document_indices.sort(key=lambda document_index: lengths[document_index])
    if not method.pads_batches:
        batch_size = 1
    batch_starts = range(0, len(document_indices), batch_size)
    document_indices_of_batches = [
        document_indices[batch_start : batch_start + batch_size] for batch_start in batch_starts
    ]
    index_of_first_selected_batch = min(
        computed_batch_stride // 2, len(document_indices_of_batches) - 1
    )
    return document_indices_of_batches[index_of_first_selected_batch::computed_batch_stride]


def load_transformers(folder: str, dtype: torch.dtype, hook_names: Sequence[str]) -> ComputeBatch:
    """Loads a model with transformers, without its head and with scaled dot-product attention.

    Args:
        folder: The folder of the checkpoint.
        dtype: The dtype of weights and computation.
        hook_names: The names of the hooks whose values are computed.

    Returns:
        The function that computes the values at the hooks for a batch (see `ComputeBatch`).
    """
    import transformers

    model = transformers.AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    model.eval()
    # The last hidden state of transformers is the output of the final norm, but the residual stream
    # after the last layer is needed. If the norm does nothing, the last hidden state is this
    # residual stream.
    model.norm = torch.nn.Identity()
    # Number of a layer -> numbers of the experts that each token of the batch is routed to,
    # (tokens, experts of a token).
    expert_numbers_by_layer: dict[int, torch.Tensor] = {}
    for layer in map(layer_of, filter(is_expert_hook, hook_names)):

        def hook_gate(_: Any, _inputs: Any, gate_output: Any, layer: int = layer) -> None:
            _logits, _routing_weights, expert_numbers = gate_output
            expert_numbers_by_layer[layer] = expert_numbers

        model.layers[layer].mlp.gate.register_forward_hook(hook_gate)

    def compute_batch(documents: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        padded_token_ids, attention_mask = pad(documents)
        model_output = model(
            padded_token_ids,
            attention_mask=attention_mask,
            output_hidden_states=True,
            use_cache=False,
        )
        values_of_hooks = []
        for hook_name in hook_names:
            layer = layer_of(hook_name)
            if is_expert_hook(hook_name):
                values_of_hooks.append(
                    expert_numbers_by_layer[layer]
                    .to(torch.int16)
                    .reshape(*padded_token_ids.shape, -1)
                )
            else:
                values_of_hooks.append(model_output.hidden_states[layer + 1])
        return values_of_hooks

    return compute_batch


def layer_of(hook_name: str) -> int:
    return int(hook_name.split(".")[1])


def is_expert_hook(hook_name: str) -> bool:
    """Returns whether a hook stores the expert numbers of each token, not the residual stream."""
    return hook_name.endswith("mlp.hook_expert_indices")


def pad(documents: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Pads documents to the length of the longest one.

    Args:
        documents: The token ids of each document.

    Returns:
        A tuple of the token ids, (documents, longest length), and the attention mask in the same
        shape, which is 1 for tokens and 0 for padding. The mask is None for a single document,
        which has no padding.
    """
    if len(documents) == 1:
        return torch.tensor([documents[0]]), None
    longest_length = max(map(len, documents))
    padded_token_ids = torch.zeros(len(documents), longest_length, dtype=torch.int64)
    attention_mask = torch.zeros(len(documents), longest_length, dtype=torch.int64)
    for row_number, token_ids in enumerate(documents):
        padded_token_ids[row_number, : len(token_ids)] = torch.tensor(token_ids)
        attention_mask[row_number, : len(token_ids)] = 1
    return padded_token_ids, attention_mask


def as_numpy(values: torch.Tensor, widen: bool) -> np.ndarray:
    """Converts a tensor to a NumPy array.

    Args:
        values: The tensor.
        widen: Whether bfloat16 values become float32. Otherwise, they become ml_dtypes.bfloat16.
            Values of other dtypes keep their dtype.
    """
    if not values.is_floating_point():
        return values.numpy()
    if widen or values.dtype == torch.float32:
        return values.float().numpy()
    # PyTorch cannot convert bfloat16 to NumPy, so the bytes are converted as int16.
    return values.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)


@dataclass
class Shards:
    """Writes documents to shard_0001.pkl.gz, shard_0002.pkl.gz, ... in a folder.

    Each document becomes one record for each hook. Records are collected in memory until they fill
    a shard.

    Attributes:
        folder: Folder of the shards.
        hook_names: Names of the hooks, in the order of the values that `add` takes.
        method: Extraction method, which determines the dtype of stored values and the compression.
        written_bytes: Total size in bytes of the files written so far.
    """

    folder: Path
    hook_names: Sequence[str]
    method: ExtractionMethod
    written_bytes: int = 0
    _num_written_shards: int = 0
    _num_collected_array_bytes: int = 0  # bytes of the values that are not written yet
    # Name of a hook -> records that are not written yet, one for each document.
    _document_records_by_hook_name: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def add(
        self, document_number: int, token_ids: Sequence[int], values: Sequence[torch.Tensor]
    ) -> None:
        """Adds the values of one document, as a record for each hook.

        A record is a dict with the values of the document at one hook, its token ids and its
        number. If the arrays of all collected records would become larger than SHARD_BYTES, the
        records of earlier documents are first written as a shard.

        Args:
            document_number: The number of the document in the data set, from 0.
            token_ids: The token ids of the document.
            values: The values at each hook, (tokens, width), in the order of `hook_names`.
        """
        hook_arrays = [as_numpy(tensor, self.method.stores_float32) for tensor in values]
        num_array_bytes = sum(array.nbytes for array in hook_arrays)
        if (
            self._num_collected_array_bytes
            and self._num_collected_array_bytes + num_array_bytes > SHARD_BYTES
        ):
            self.flush()
        for hook_name, hook_array in zip(self.hook_names, hook_arrays, strict=True):
            document_hook_record = {
                "sample_idx": document_number,
                "hook": hook_name,
                "activation": hook_array,
                "shape": hook_array.shape,
                "text_preview": "",
                "token_ids": np.array(token_ids, np.int32),
                "doc_id": None,
            }
            self._document_records_by_hook_name.setdefault(hook_name, []).append(
                document_hook_record
            )
        self._num_collected_array_bytes += num_array_bytes

    def flush(self) -> None:
        """Writes the collected records as a shard, and waits until it is on the disk.

        Does nothing if no records have been collected.
        """
        if not self._num_collected_array_bytes:
            return
        self._num_written_shards += 1
        shard_path = self.folder / f"shard_{self._num_written_shards:04d}.pkl.gz"
        with open(shard_path, "wb") as shard_file:
            with self._compressed(shard_file) as compressed_stream:
                pickle.dump(self._document_records_by_hook_name, compressed_stream)
            shard_file.flush()
            os.fsync(shard_file.fileno())
        self.written_bytes += shard_path.stat().st_size
        self._document_records_by_hook_name = {}
        self._num_collected_array_bytes = 0

    def _compressed(self, file: Any) -> Any:
        """Returns a binary stream that compresses its input with gzip and writes it to a file.

        Args:
            file: The binary file to write.
        """
        if self.method.uses_isal:
            return igzip.IGzipFile(fileobj=file, mode="wb", compresslevel=ISAL_LEVEL)
        # Like users' scripts, this gives no level, so gzip uses its default, which is the slowest.
        return gzip.GzipFile(fileobj=file, mode="wb")


@torch.inference_mode()
def run(
    compute_batch: ComputeBatch,
    documents: Sequence[Sequence[int]],
    batches: Sequence[Sequence[int]],
    shards: Shards,
    written_document_stride: int,
) -> dict[str, float]:
    """Computes all batches, writes some of their documents, and measures the seconds of both.

    Of every `written_document_stride` successive documents, the first one is written.
    Computing and writing alternate in one thread.

    Args:
        compute_batch: The function that computes a batch.
        documents: The token ids of each document.
        batches: For each batch, the indices of its documents in `documents`.
        shards: The shards to which documents are written.
        written_document_stride: The number of successive computed documents of which one is
            written.

    Returns:
        A dict with these figures.
        tokens, documents: The numbers of tokens and of documents that were computed.
        written_tokens: The number of written tokens.
        bytes: The total size of the files in bytes.
        compute_seconds, store_seconds: The seconds of computing and of writing.
    """
    run_total_by_name = {"tokens": 0, "written_tokens": 0, "documents": 0, "compute_seconds": 0.0}
    start_time = time.perf_counter()
    for document_numbers_of_batch in batches:
        batch_start_time = time.perf_counter()
        values_of_hooks = compute_batch(
            [documents[document_number] for document_number in document_numbers_of_batch]
        )
        run_total_by_name["compute_seconds"] += time.perf_counter() - batch_start_time
        for row_index_in_batch, document_number in enumerate(document_numbers_of_batch):
            num_tokens = len(documents[document_number])
            run_total_by_name["tokens"] += num_tokens
            if run_total_by_name["documents"] % written_document_stride == 0:
                document_values_of_hooks = [
                    hook_values[row_index_in_batch, :num_tokens] for hook_values in values_of_hooks
                ]
                shards.add(document_number, documents[document_number], document_values_of_hooks)
                run_total_by_name["written_tokens"] += num_tokens
            run_total_by_name["documents"] += 1
    shards.flush()
    run_total_by_name["store_seconds"] = (
        time.perf_counter() - start_time - run_total_by_name["compute_seconds"]
    )
    return run_total_by_name | {"bytes": shards.written_bytes}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", choices=EXTRACTION_METHODS, help="see above")
    parser.add_argument("--model", required=True, help="folder of the checkpoint")
    parser.add_argument(
        "--token_ids", type=Path, required=True, help="JSON file: a list per document"
    )
    parser.add_argument("--output", type=Path, required=True, help="empty folder for the shards")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), required=True)
    parser.add_argument("--hooks", nargs="+", required=True, help="TransformerLens's names")
    parser.add_argument("--batch_size", type=int, default=8, help="documents (default: 8)")
    parser.add_argument(
        "--every", type=int, default=1, help="compute one of every N batches (default: 1)"
    )
    parser.add_argument(
        "--written_every",
        type=int,
        default=1,
        help="write one of every N computed documents (default: 1)",
    )
    parsed_flags = parser.parse_args()
    method = EXTRACTION_METHODS[parsed_flags.method]
    dtype = getattr(torch, parsed_flags.dtype)
    token_ids_of_documents = json.loads(parsed_flags.token_ids.read_text())
    start_time = time.perf_counter()
    compute_batch = load_transformers(parsed_flags.model, dtype, parsed_flags.hooks)
    with torch.inference_mode():
        # The first call takes longer than the others. It is not measured, just as compiling is not
        # measured for this tool.
        compute_batch([token_ids_of_documents[0][:16]])
    load_seconds = time.perf_counter() - start_time
    document_lengths = [len(token_ids) for token_ids in token_ids_of_documents]
    batches = batches_of(document_lengths, method, parsed_flags.batch_size, parsed_flags.every)
    parsed_flags.output.mkdir(parents=True, exist_ok=True)
    shards = Shards(parsed_flags.output, parsed_flags.hooks, method)
    run_total_by_name = run(
        compute_batch, token_ids_of_documents, batches, shards, parsed_flags.written_every
    )
    version_by_package = {
        package_name: version(package_name) for package_name in ("torch", "transformers", "isal")
    }
    print(
        json.dumps(
            run_total_by_name | {"load_seconds": load_seconds, "versions": version_by_package}
        )
    )


if __name__ == "__main__":
    main()
