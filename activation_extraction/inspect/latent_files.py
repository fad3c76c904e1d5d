"""Writes delphi's cache of latents: the files from which delphi explains features.

delphi says "latent" for what this project calls a feature of an autoencoder.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import counted
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.token_batch import TokenBatch
from activation_extraction.inspect.exported import Exported

ROW = 64  # tokens per row; an example of delphi's is half a row
SPLITS = 5  # files per hook, delphi's default; there are more if files would exceed SPLIT_BYTES
SPLIT_BYTES = 2**30
LEAST = 1e-5  # values up to this magnitude are left out, as delphi does
# A value of a code. `row` and `position` say where its token is in the table of all rows.
ENTRY = np.dtype([("row", "u4"), ("position", "u4"), ("latent", "u4"), ("value", "f4")])


def write_delphi(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> Exported:
    """Writes the cache of latents that delphi 0.1 reads, in a folder for each hook.

    A row contains ROW consecutive tokens of one sample. Tokens at the end of a sample that do not
    fill a row are left out. A file START_END.safetensors covers the features START to END,
    inclusive, and contains these tensors:

    - `locations`, uint32 (values, 3): the row, the position in the row, and feature - START of each
      value, sorted by feature.
    - `activations`, float32 (values,).
    - `tokens`: the token ids of all rows, (rows, ROW).

    Args:
        folder: The folder of the export, which has an empty folder for each hook.
        dataset: The run, which stores all tokens of its samples.
        hooks: The names of hooks with codes.
        chunks: All tokens of the run, in stored order.

    Returns:
        The number of tokens in the files, and the number of small values left out at each hook in
        words.

    Raises:
        InputError: No sample has ROW tokens.
    """
    from safetensors.numpy import save

    lengths = dataset.samples["tokens"].to_numpy()
    if not (lengths >= ROW).any():
        raise InputError(
            f"--export delphi: no sample of {dataset.url} has {ROW} tokens, which a row needs"
        )
    begins = np.cumsum([0, *lengths])  # offset of each sample among all tokens of the run
    tokens_read = 0
    tokens_kept = 0  # tokens in whole rows
    small_values = dict.fromkeys(hooks, 0)  # number of values in whole rows that are left out
    token_ids: list[np.ndarray] = []
    # The files of each hook by their range of features (first, stop). At first a file gets its
    # entries in the order of the tokens; when all are written, it is replaced by the tensors.
    files: dict[str, dict[tuple[int, int], Path]] = {}
    for hook in hooks:
        files[hook] = {
            (first, stop): folder / hook / f"{first}_{stop - 1}.safetensors"
            for first, stop in pairwise(_edges(dataset, hook))
        }
    for batch in chunks:
        offsets = np.arange(tokens_read, tokens_read + len(batch))
        sample = np.searchsorted(begins, offsets, "right") - 1
        in_row = batch.position < lengths[sample] // ROW * ROW
        kept_index = tokens_kept + np.cumsum(in_row) - 1  # index of a token among the kept ones
        token_ids.append(batch.token_ids[in_row])
        for hook, codes in batch.items():
            token = np.repeat(np.arange(len(batch)), np.diff(codes.indptr))
            is_small = np.abs(codes.data) <= LEAST
            small_values[hook] += int(np.count_nonzero(in_row[token] & is_small))
            chosen = in_row[token] & ~is_small
            row, position = np.divmod(kept_index[token[chosen]], ROW)
            columns = [row, position, codes.indices[chosen], codes.data[chosen]]
            entries = np.rec.fromarrays(columns, dtype=ENTRY)
            for (first, stop), path in files[hook].items():
                in_file = (entries["latent"] >= first) & (entries["latent"] < stop)
                with open(path, "ab") as file:
                    entries[in_file].tofile(file)
        tokens_read += len(batch)
        tokens_kept += int(in_row.sum())
    tokens = np.concatenate(token_ids).reshape(-1, ROW)
    for hook in hooks:
        for (first, _), path in files[hook].items():
            stored = np.fromfile(path, ENTRY)
            stored = stored[np.argsort(stored["latent"], kind="stable")]
            stored["latent"] -= first
            locations = [stored["row"], stored["position"], stored["latent"]]
            tensors = {
                "locations": np.stack(locations, axis=1),
                "activations": stored["value"].copy(),
                "tokens": tokens,
            }
            path.write_bytes(save(tensors))
        config = {
            "model_name": dataset.tokenizer_path,
            "dataset_repo": dataset.identity.data,
            "dataset_column": dataset.identity.text.text_column,
            "cache_ctx_len": ROW,
            "ctx_len": ROW,
            "n_tokens": tokens.size,
            "n_splits": len(files[hook]),
        }
        (folder / hook / "config.json").write_text(json.dumps(config, indent=2))
    left_out = [
        f"{counted(count, 'code')} of at most {LEAST:g} at {hook}, as by delphi itself"
        for hook, count in small_values.items()
        if count
    ]
    return Exported(tokens.size, tuple(left_out))


def _edges(dataset: ActivationDataset, hook: str) -> list[int]:
    """Returns the boundaries between the files of a hook.

    Args:
        dataset: The run.
        hook: The name of a hook with codes.

    Returns:
        The first feature of each file, then the number of all features.
    """
    features = dataset.hooks[hook]
    most_values = dataset.tokens * dataset.shards.hooks[hook].most_values
    splits = max(SPLITS, -(-most_values * ENTRY.itemsize // SPLIT_BYTES))  # rounded up
    return np.linspace(0, features, min(splits, features) + 1).astype(int).tolist()
