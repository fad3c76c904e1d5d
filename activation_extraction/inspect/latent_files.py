"""The files from which delphi explains features, its cache of latents."""

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.token_batch import TokenBatch

ROW = 64  # tokens of a context, of which delphi's examples have half
SPLITS = 5  # files of a hook, as delphi makes by default; more where one would be too large
SPLIT_BYTES = 2**30
LEAST = 1e-5  # delphi leaves out smaller values
ENTRY = np.dtype([("row", "u4"), ("position", "u4"), ("latent", "u4"), ("value", "f4")])


def write_delphi(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> int:
    """Writes the cache of latents that delphi 0.1 reads, a folder for each hook.

    Its contexts all have ROW tokens: what is left at the end of a sample is left out. A file
    START_END.safetensors has the active features START to END, END included: `locations` (row,
    position, feature - START), sorted by feature, `activations`, and `tokens`, of all rows.
    """
    lengths = dataset.samples["tokens"].to_numpy()
    begins, rows = (np.cumsum([0, *each]) for each in (lengths, lengths // ROW))
    edges = {hook: _edges(dataset, hook) for hook in hooks}
    token_ids = np.empty((int(rows[-1]), ROW), np.int32)  # which every file has whole
    seen = 0
    with ExitStack() as stack:
        files = {
            hook: [
                stack.enter_context(open(_part(folder, hook, first), "wb"))
                for first in edges[hook][:-1]
            ]
            for hook in hooks
        }
        for batch in chunks:
            tokens = np.arange(seen, seen + len(batch))
            sample = np.searchsorted(begins, tokens, "right") - 1
            index = tokens - begins[sample]
            row, position = rows[sample] + index // ROW, index % ROW
            whole = index < lengths[sample] // ROW * ROW
            token_ids[row[whole], position[whole]] = batch.token_ids[whole]
            for hook, codes in batch.items():
                token = np.repeat(np.arange(len(batch)), np.diff(codes.indptr))
                kept = whole[token] & (np.abs(codes.data) > LEAST)
                entries = np.zeros(int(kept.sum()), ENTRY)
                token, entries["latent"] = token[kept], codes.indices[kept]
                entries["row"], entries["position"] = row[token], position[token]
                entries["value"] = codes.data[kept]
                split = np.searchsorted(edges[hook], entries["latent"], "right") - 1
                for number in np.unique(split).tolist():
                    entries[split == number].tofile(files[hook][number])
            seen += len(batch)
    for hook in hooks:
        _finish(folder, hook, edges[hook], token_ids)
        config = {
            "model_name": dataset.tokenizer_path,
            "dataset_repo": dataset.identity.data,
            "dataset_column": dataset.identity.text_column,
            "cache_ctx_len": ROW,
            "ctx_len": ROW,
            "n_tokens": int(rows[-1]) * ROW,
            "n_splits": len(edges[hook]) - 1,
        }
        (folder / hook / "config.json").write_text(json.dumps(config, indent=2))
    return int(rows[-1]) * ROW


def _edges(dataset: ActivationDataset, hook: str) -> list[int]:
    """Returns the first feature of each file, and the number of all features."""
    most, features = dataset.shards.hooks[hook].most, dataset.hooks[hook]
    splits = max(SPLITS, -(-dataset.tokens * most * ENTRY.itemsize // SPLIT_BYTES))
    return np.linspace(0, features, min(splits, features) + 1).astype(int).tolist()


def _part(folder: Path, hook: str, first: int) -> Path:
    return folder / hook / f"{first}.part"


def _finish(folder: Path, hook: str, edges: Sequence[int], tokens: np.ndarray) -> None:
    """Makes the files of a hook from their entries, which are in the order of the rows."""
    from safetensors.numpy import save

    for first, stop in zip(edges, edges[1:], strict=False):
        part = _part(folder, hook, first)
        entries = np.fromfile(part, ENTRY)
        entries = entries[np.argsort(entries["latent"], kind="stable")]
        columns = entries["row"], entries["position"], entries["latent"] - np.uint32(first)
        found = {"locations": np.stack(columns, axis=1), "activations": entries["value"].copy()}
        path = folder / hook / f"{first}_{stop - 1}.safetensors"
        path.write_bytes(save({**found, "tokens": tokens}))
        part.unlink()
