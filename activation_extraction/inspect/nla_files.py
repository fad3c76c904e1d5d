"""The file that the pipeline of natural language autoencoders continues from.

The pipeline (kitft/natural_language_autoencoders) begins with stage 0, which extracts activations.
This module writes what stage 0 would write: a row for each stored token, with the text of the
sample up to the token and the residual stream after one block. The text takes all token ids before
the token, also those that the run does not store; a `RunText` reads them again and decodes them.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

import activation_extraction
from activation_extraction.common.errors import RunError
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.token_batch import TokenBatch, piece_of
from activation_extraction.inspect.exported import Exported
from activation_extraction.store.chosen_samples import RunText, read_tokens
from activation_extraction.store.folder import Folder
from activation_extraction.store.run_log import RunLog
from activation_extraction.store.shard_check import file_path

STREAM = re.compile(r"blocks\.(\d+)\.hook_resid_post")  # the hook, with the index of its block
FILE = "base.parquet"
ROW_GROUP = 4096  # rows; with a width of 8,192 and texts of 8 KB, a group has 160 MiB
FACTS = ("doc_id", "row")  # columns of the table of samples from which a document gets its id
TEXT = "text"  # column of a chunk: the text of the sample up to and including the token


def with_texts(
    chunks: Iterable[TokenBatch],
    root: Folder,
    folders: Mapping[str, RunLog],
    dataset: ActivationDataset,
    text: RunText,
) -> Iterator[TokenBatch]:
    """Yields chunks of tokens with a further column TEXT.

    Args:
        chunks: All tokens of the run, in stored order.
        root: The output of the run.
        folders: The content of each folder of the run, by the folder's name.
        dataset: The run.
        text: The text of the run.

    Raises:
        RunError: The text of a sample cannot be read again, or a shard is damaged or missing.
    """
    samples = _token_ids(root, folders, dataset, text)
    sample_idx, token_ids = -1, np.empty(0, np.int32)
    for batch in chunks:
        texts = np.empty(len(batch), object)
        tokens = zip(batch.sample_idx.tolist(), batch.position.tolist(), strict=True)
        for index, (number, position) in enumerate(tokens):
            while sample_idx != number:
                sample_idx, token_ids = next(samples)
            texts[index] = text.decode(token_ids[: position + 1])
        yield replace(batch, columns={**batch.columns, TEXT: texts})


def _token_ids(
    root: Folder, folders: Mapping[str, RunLog], dataset: ActivationDataset, text: RunText
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the number and all token ids of each sample, in stored order, shard by shard.

    A sample without stored tokens may have no token ids.
    """
    for name, commit in dataset.shards.shards:
        stored = read_tokens(root.child(name), folders[name], commit, range(commit.count))
        results: Sequence[np.ndarray | str] = [tokens.token_ids for tokens in stored]
        if text.reread is not None:
            results = text.reread(stored)
        for tokens, token_ids in zip(stored, results, strict=True):
            if not isinstance(token_ids, str):
                yield tokens.sample_idx, token_ids
            elif len(tokens.positions):
                where = f"{file_path(name, commit.file)}: sample {tokens.sample_idx}"
                raise RunError(f"{where}: its text cannot be read again: {token_ids}")


def write_nla(
    folder: Path, dataset: ActivationDataset, hooks: Sequence[str], chunks: Iterable[TokenBatch]
) -> Exported:
    """Writes the Parquet file of stage 0, and the YAML file that describes it beside it.

    Args:
        folder: The folder of the export.
        dataset: The run.
        hooks: The name of the one hook, which STREAM matches.
        chunks: All tokens of the run, in stored order, with the columns FACTS and TEXT. Each chunk
            becomes a row group.

    Returns:
        How many tokens are in the file.
    """
    import yaml
    from pyarrow.parquet import ParquetWriter

    (hook,) = hooks
    width = dataset.hooks[hook]
    layer = _layer_of(hook)
    columns: dict[str, pyarrow.DataType] = {
        "n_raw_tokens": pyarrow.int64(),
        "detokenized_text_truncated": pyarrow.string(),
        "activation_vector": pyarrow.list_(pyarrow.float32(), width),
        "activation_layer": pyarrow.int64(),
        "doc_id": pyarrow.string(),
    }
    schema = pyarrow.schema(columns)
    rows = 0
    with ParquetWriter(folder / FILE, schema) as file:
        for batch in chunks:
            vectors = np.asarray(batch[hook], np.float32).reshape(-1)
            facts = zip(batch.columns["doc_id"], batch.columns["row"], strict=True)
            values = {
                "n_raw_tokens": batch.position.astype(np.int64) + 1,
                "detokenized_text_truncated": batch.columns[TEXT],
                "activation_vector": pyarrow.FixedSizeListArray.from_arrays(vectors, width),
                "activation_layer": np.full(len(batch), layer),
                "doc_id": [_document_id(doc_id, row) for doc_id, row in facts],
            }
            file.write_table(pyarrow.table(values, schema))
            rows += len(batch)
    description = yaml.safe_dump(_description(dataset, hook, rows), sort_keys=False)
    (folder / f"{FILE}.nla_meta.yaml").write_text(description)
    return Exported(rows)


def _layer_of(hook: str) -> int:
    """Returns the index of the block of a hook that STREAM matches."""
    match = STREAM.fullmatch(hook)
    assert match is not None
    return int(match[1])


def _document_id(doc_id: Any, row: Mapping[str, Any] | None) -> str:
    """Returns the id of a document, which is the same for all its pieces.

    Stage 1 divides the documents by their ids, so every document needs one. A document to which the
    data set gives no id is known by its row.
    """
    if doc_id is not None:
        return str(doc_id)
    piece = piece_of(row)
    return json.dumps(row if piece is None else piece[2], ensure_ascii=False)


def _description(dataset: ActivationDataset, hook: str, rows: int) -> dict[str, Any]:
    """Returns the content of the YAML file.

    `merge_base` of the pipeline merges files if their models, layers, corpora and positions_per_doc
    are equal. So positions_per_doc must follow from the settings of the run alone: it is the number
    of tokens that --positions keeps of a sample of full length, on average if it is random.
    """
    layer = _layer_of(hook)
    flags = dataset.metadata["configuration"]
    model = flags["model_path"]
    corpus = flags.get("dataset_path") or dataset.identity.data
    pieces = [piece_of(row) for row in dataset.shards.columns(["row"])["row"]]
    documents = sum(piece is None or piece[0] == 0 for piece in pieces)
    corpus_slice = {"start": 0, "length": documents}
    options = dataset.identity.text
    positions = max(math.ceil(options.positions.expected(options.max_seq_length)), 1)
    # The formula of stage 0.
    text = f"{model}|{layer}|{corpus}|{corpus_slice}"
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return {
        "kind": "nla_dataset",
        "schema_version": 1,
        "dataset_id": f"base_{model.split('/')[-1]}_L{layer}_{digest}",
        "stage": "base",
        "row_count": rows,
        "extraction": {
            "base_model": model,
            "d_model": dataset.hooks[hook],
            "layer_index": layer,
            "norm": "none",
            "corpus": corpus,
            "corpus_slice": corpus_slice,
            "positions_per_doc": positions,
        },
        "created_by": f"activation_extraction {activation_extraction.__version__}",
    }
