"""The files from which delphi explains features, its cache of latents."""

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

ROW = 64  # tokens of a context, of which delphi's examples have half
SPLITS = 5  # files of a hook, as delphi makes by default; more where one would be too large
SPLIT_BYTES = 2**30
LEAST = 1e-5  # delphi leaves out smaller values
ENTRY = np.dtype([("row", "u4"), ("position", "u4"), ("latent", "u4"), ("value", "f4")])


def write_delphi(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> Exported:
    """Writes the cache of latents that delphi 0.1 reads, a folder for each hook.

    Its contexts all have ROW tokens: tokens at the end of a sample that do not fill one are left
    out. A file START_END.safetensors has the active features START to END, inclusive: `locations`
    (row, position, feature - START), sorted by feature, `activations`, and `tokens`, of all rows.

    Args:
        folder: The folder of the export, which has an empty folder for each hook.
        dataset: The run, which stores all tokens of its samples.
        hooks: The names of hooks with codes.
        chunks: All tokens of the run, in stored order.

    Returns:
        How many tokens are in the files, and which codes are left out.

    Raises:
        InputError: No sample has ROW tokens.
    """
    from safetensors.numpy import save

    lengths = dataset.samples["tokens"].to_numpy()
    if not (lengths >= ROW).any():
        raise InputError(
            f"--export delphi: no sample of {dataset.url} has {ROW} tokens, which a row needs"
        )
    begins = np.cumsum([0, *lengths])
    seen = 0
    kept = 0  # tokens in whole rows
    small = dict.fromkeys(hooks, 0)  # values in whole rows that are left out
    token_ids: list[np.ndarray] = []
    # By the first feature and the one after the last. Until all entries are there, a file has them
    # as they come, row by row.
    files: dict[str, dict[tuple[int, int], Path]] = {}
    for hook in hooks:
        ends = pairwise(_edges(dataset, hook))
        files[hook] = {(a, b): folder / hook / f"{a}_{b - 1}.safetensors" for a, b in ends}
    for batch in chunks:
        sample = np.searchsorted(begins, np.arange(seen, seen + len(batch)), "right") - 1
        whole = batch.position < lengths[sample] // ROW * ROW
        place = kept + np.cumsum(whole) - 1
        token_ids.append(batch.token_ids[whole])
        for hook, codes in batch.items():
            token = np.repeat(np.arange(len(batch)), np.diff(codes.indptr))
            is_small = np.abs(codes.data) <= LEAST
            small[hook] += int(np.count_nonzero(whole[token] & is_small))
            chosen = whole[token] & ~is_small
            where = np.divmod(place[token[chosen]], ROW)
            arrays = [*where, codes.indices[chosen], codes.data[chosen]]
            added = np.rec.fromarrays(arrays, dtype=ENTRY)
            for (first, stop), path in files[hook].items():
                in_file = (added["latent"] >= first) & (added["latent"] < stop)
                with open(path, "ab") as file:
                    added[in_file].tofile(file)
        seen, kept = seen + len(batch), kept + int(whole.sum())
    tokens = np.concatenate(token_ids).reshape(-1, ROW)
    for hook in hooks:
        for (first, _), path in files[hook].items():
            entries = np.fromfile(path, ENTRY)
            entries = entries[np.argsort(entries["latent"], kind="stable")]
            entries["latent"] -= first
            locations = np.stack([entries[n] for n in ("row", "position", "latent")], axis=1)
            values = entries["value"].copy()
            tensors = {"locations": locations, "activations": values, "tokens": tokens}
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
        for hook, count in small.items()
        if count
    ]
    return Exported(tokens.size, tuple(left_out))


def _edges(dataset: ActivationDataset, hook: str) -> list[int]:
    """Returns the first feature of each file, and the number of all features."""
    most, features = dataset.shards.hooks[hook].most_values, dataset.hooks[hook]
    splits = max(SPLITS, -(-dataset.tokens * most * ENTRY.itemsize // SPLIT_BYTES))
    return np.linspace(0, features, min(splits, features) + 1).astype(int).tolist()
