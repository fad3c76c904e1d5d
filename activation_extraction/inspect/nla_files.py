"""Writes the file with which the pipeline of natural language autoencoders continues.

The pipeline (kitft/natural_language_autoencoders) begins with stage 0, which extracts activations.
This module writes the same Parquet file as stage 0. The file has a row for each stored token, with
the text of the sample up to and including the token, and the residual stream after one block. The
text is decoded from all token ids of the sample up to this token. If the run does not store all of
them, a `TextFunctions` reads them again from the data set.
"""

import hashlib
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow

import activation_extraction
from activation_extraction.common.errors import InputError, RunError
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.token_batch import TokenBatch, piece_of
from activation_extraction.inspect.export_format import Exported, ExportFormat
from activation_extraction.store.chosen_samples import TextFunctions, read_tokens
from activation_extraction.store.folder import Folder
from activation_extraction.store.run_log import RunLog
from activation_extraction.store.shard_check import file_path

# The name of the exported hook. The group matches the number of its block, from 0.
STREAM_PATTERN = re.compile(r"blocks\.(\d+)\.hook_resid_post")
FILE_NAME = "base.parquet"
# Rows in a row group, which needs 160 MiB if the width is 8,192 and a text has 8 KB.
ROW_GROUP = 4096
# Names of the columns of the table of samples that determine the id of a sample's document.
DOCUMENT_ID_COLUMNS = ("doc_id", "row")
# Name of the column that `with_texts` adds to batches of tokens. It contains, for each token, the
# text of its sample up to and including this token.
TEXT_COLUMN = "text"


def with_texts(
    chunks: Iterable[TokenBatch],
    root: Folder,
    log_by_folder: Mapping[str, RunLog],
    dataset: ActivationDataset,
    text_functions: TextFunctions,
) -> Iterator[TokenBatch]:
    """Yields chunks of tokens with the text of the sample up to and including each token.

    The texts are in the additional column TEXT_COLUMN.

    Args:
        chunks: All tokens of the run, in stored order.
        root: The folder with the output of all hosts.
        log_by_folder: The run log of each folder of the run, by the folder's name.
        dataset: The run.
        text_functions: The functions that read the token ids again and decode them.

    Raises:
        RunError: If the text of a sample cannot be read again, or a shard is damaged or missing.
    """
    sample_numbers_and_token_ids = _token_ids(root, log_by_folder, dataset, text_functions)
    # Number of the sample with `token_ids_of_current_sample`. -1 before the first sample.
    current_sample_number = -1
    token_ids_of_current_sample = np.empty(0, np.int32)
    for token_batch in chunks:
        text_up_to_each_token = np.empty(len(token_batch), object)
        sample_numbers_and_positions = zip(
            token_batch.sample_idx.tolist(), token_batch.position.tolist(), strict=True
        )
        for token_index, (sample_number, token_position) in enumerate(sample_numbers_and_positions):
            while current_sample_number != sample_number:
                current_sample_number, token_ids_of_current_sample = next(
                    sample_numbers_and_token_ids
                )
            text_up_to_each_token[token_index] = text_functions.decode_token_ids(
                token_ids_of_current_sample[: token_position + 1]
            )
        yield replace(
            token_batch, columns={**token_batch.columns, TEXT_COLUMN: text_up_to_each_token}
        )


def _token_ids(
    root: Folder,
    log_by_folder: Mapping[str, RunLog],
    dataset: ActivationDataset,
    text_functions: TextFunctions,
) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the number of each sample and all its token ids, in stored order.

    Args:
        root: The folder with the output of all hosts.
        log_by_folder: The run log of each folder of the run, by the folder's name.
        dataset: The run.
        text_functions: The functions that get the text of samples. Only `read_samples_again` is
            called, which reads all token ids of samples again from the data set.
            `read_samples_again` is None if the run stores all token ids.

    Yields:
        A tuple of the number of the sample and its token ids, int32 (tokens,). If the run stores no
        tokens of a sample, its token ids are not needed: the array may be empty, and the sample is
        left out if it cannot be read again.

    Raises:
        RunError: If the text of a sample with stored tokens cannot be read again, or a shard is
            damaged or missing.
    """
    for folder_name, commit in dataset.shards.folder_names_and_commits:
        host_folder, run_log = root.child(folder_name), log_by_folder[folder_name]
        stored_tokens_of_samples = read_tokens(host_folder, run_log, commit, range(commit.count))
        token_ids_or_error_message_of_samples: Sequence[np.ndarray | str]
        if text_functions.read_samples_again is None:
            token_ids_or_error_message_of_samples = [
                stored_tokens.token_ids for stored_tokens in stored_tokens_of_samples
            ]
        else:
            token_ids_or_error_message_of_samples = text_functions.read_samples_again(
                stored_tokens_of_samples
            )
        for stored_tokens, token_ids_or_error_message in zip(
            stored_tokens_of_samples, token_ids_or_error_message_of_samples, strict=True
        ):
            if not isinstance(token_ids_or_error_message, str):
                yield stored_tokens.sample_idx, token_ids_or_error_message
            elif len(stored_tokens.positions):
                shard_path = file_path(folder_name, commit.file)
                raise RunError(
                    f"{shard_path}: sample {stored_tokens.sample_idx}: its text cannot be read "
                    f"again: {token_ids_or_error_message}"
                )


class NlaFormat(ExportFormat):
    """The files that stage 0 of the pipeline of natural language autoencoders writes.

    They are a Parquet file with activations and texts, and a YAML file that describes it. Parquet
    files cannot contain bfloat16, and the pipeline reads float32, so the activations are float32.
    """

    flag_value = "nla"  # value of --export that selects this format
    needed_package = "transformers"
    accepted_hooks_phrase = "one hook blocks.K.hook_resid_post, which --hook_names chooses"
    needs_sample_text = True
    sample_table_column_names = DOCUMENT_ID_COLUMNS
    max_tokens_per_chunk = ROW_GROUP

    def accepts(self, dataset: ActivationDataset, hook: str) -> bool:
        """Returns whether a hook can be exported: it must be the residual stream after a layer.

        Args:
            dataset: The run.
            hook: The name of the hook.
        """
        return STREAM_PATTERN.fullmatch(hook) is not None

    def choose_hooks(self, dataset: ActivationDataset, chosen_hooks: Sequence[str]) -> list[str]:
        """Returns a list with the name of the only chosen hook.

        Raises:
            InputError: If several hooks are chosen, or a hook that the format does not accept.
        """
        if len(chosen_hooks) != 1 or not self.accepts(dataset, chosen_hooks[0]):
            raise InputError(
                f"--export nla: takes {self.accepted_hooks_phrase}; of {dataset.url} it chooses "
                f"{', '.join(chosen_hooks)}"
            )
        return [*chosen_hooks]

    def token_bytes(self, dataset: ActivationDataset, hook: str) -> int:
        """Returns the number of bytes of a token's activation in float32, as in the files."""
        return dataset.hooks[hook] * np.dtype(np.float32).itemsize

    def write(
        self,
        folder: Path,
        dataset: ActivationDataset,
        hooks: Sequence[str],
        chunks: Iterable[TokenBatch],
    ) -> Exported:
        """Writes the Parquet file, with a row group for each chunk, and the YAML file.

        `ExportFormat.write` documents the arguments and the result.
        """
        import yaml
        from pyarrow.parquet import ParquetWriter

        (hook_name,) = hooks
        width = dataset.hooks[hook_name]
        layer_number = _layer_of(hook_name)
        type_by_column_name: dict[str, pyarrow.DataType] = {
            "n_raw_tokens": pyarrow.int64(),
            "detokenized_text_truncated": pyarrow.string(),
            "activation_vector": pyarrow.list_(pyarrow.float32(), width),
            "activation_layer": pyarrow.int64(),
            "doc_id": pyarrow.string(),
        }
        arrow_schema = pyarrow.schema(type_by_column_name)
        written_row_count = 0
        with ParquetWriter(folder / FILE_NAME, arrow_schema) as parquet_writer:
            for token_batch in chunks:
                flat_vectors = np.asarray(token_batch[hook_name], np.float32).reshape(-1)
                doc_ids_and_rows = zip(
                    token_batch.columns["doc_id"], token_batch.columns["row"], strict=True
                )
                values_by_column = {
                    "n_raw_tokens": token_batch.position.astype(np.int64) + 1,
                    "detokenized_text_truncated": token_batch.columns[TEXT_COLUMN],
                    "activation_vector": pyarrow.FixedSizeListArray.from_arrays(
                        flat_vectors, width
                    ),
                    "activation_layer": np.full(len(token_batch), layer_number),
                    "doc_id": [
                        _document_id(doc_id, row_position)
                        for doc_id, row_position in doc_ids_and_rows
                    ],
                }
                parquet_writer.write_table(pyarrow.table(values_by_column, arrow_schema))
                written_row_count += len(token_batch)
        yaml_text = yaml.safe_dump(
            _description(dataset, hook_name, written_row_count), sort_keys=False
        )
        (folder / f"{FILE_NAME}.nla_meta.yaml").write_text(yaml_text)
        return Exported(written_row_count)

    def usage_lines(
        self, folder: str, dataset: ActivationDataset, hooks: Sequence[str]
    ) -> list[str]:
        """Returns the lines of the shell command with which the package nla reads the export.

        Args:
            folder: The folder of the export.
            dataset: The run that was exported.
            hooks: The names of the exported hooks.
        """
        quoted_path = f"{shlex.quote(folder)}/{FILE_NAME}"
        return [f"python -m nla.datagen.stage1_split --base {quoted_path} --output-dir FOLDER"]


def _layer_of(hook: str) -> int:
    """Returns the number of the block whose output is at a hook.

    Args:
        hook: The name of the hook, such as blocks.7.hook_resid_post.
    """
    hook_match = STREAM_PATTERN.fullmatch(hook)
    assert hook_match is not None
    return int(hook_match[1])


def _document_id(doc_id: Any, row: Mapping[str, Any] | None) -> str:
    """Returns the id of a sample's document, which is the same for all pieces of the document.

    The exported file is read by stage 1 of the pipeline of natural language autoencoders. Stage 1
    divides the documents by their ids, so every document needs an id. If the data set contains no
    ids, the id is the position of the document's row as JSON.

    Args:
        doc_id: The document's id in the data set. None if the data set contains no ids.
        row: The position of the sample's row in the data set (`SampleFacts.row`). If the sample is
            a piece of a document, it also contains the number and the start of the piece, which
            the id does not contain. None if the program that stored the sample gave no position.
    """
    if doc_id is not None:
        return str(doc_id)
    piece_number_start_and_row = piece_of(row)
    document_row = row
    if piece_number_start_and_row is not None:
        _, _, document_row = piece_number_start_and_row
    return json.dumps(document_row, ensure_ascii=False)


def _begins_document(row: Mapping[str, Any] | None) -> bool:
    """Returns whether a sample begins a document: it is a whole document or the first piece of one.

    Args:
        row: The position of the sample's row in the data set (`SampleFacts.row`), which also
            contains the number of the piece if the sample is a piece of a document. None if the
            position is not stored; the sample then counts as a whole document.
    """
    piece_number_start_and_row = piece_of(row)
    if piece_number_start_and_row is None:
        return True
    piece_number, _, _ = piece_number_start_and_row
    return piece_number == 0


def _description(dataset: ActivationDataset, hook: str, rows: int) -> dict[str, Any]:
    """Returns the content of the YAML file that describes the Parquet file.

    The pipeline that trains natural language autoencoders reads both files. Its script `merge_base`
    merges the Parquet files of several runs if the YAML files contain the same model, layer, corpus
    and positions_per_doc. positions_per_doc is the number of tokens that --positions keeps of a
    sample with --max_seq_length tokens, or the mean number if the choice is random. So it depends
    only on the settings of the run.

    Args:
        dataset: The run.
        hook: The name of the exported hook.
        rows: The number of rows in the Parquet file.
    """
    layer_number = _layer_of(hook)
    recorded_flags = dataset.metadata["configuration"]
    model_path = recorded_flags["model_path"]
    data_path_or_name = recorded_flags.get("dataset_path") or dataset.identity.data
    document_count = sum(
        _begins_document(row_position) for row_position in dataset.shards.columns(["row"])["row"]
    )
    corpus_slice_fields = {"start": 0, "length": document_count}
    text_options = dataset.identity.text
    expected_token_count = text_options.positions.expected(text_options.max_seq_length)
    num_positions_per_document = max(math.ceil(expected_token_count), 1)
    # The program that usually writes this file is stage 0 of the pipeline of natural language
    # autoencoders. It computes the id of its data set from a text of the same form.
    identifying_text = f"{model_path}|{layer_number}|{data_path_or_name}|{corpus_slice_fields}"
    dataset_digest = hashlib.sha256(identifying_text.encode()).hexdigest()[:8]
    return {
        "kind": "nla_dataset",
        "schema_version": 1,
        "dataset_id": f"base_{model_path.split('/')[-1]}_L{layer_number}_{dataset_digest}",
        "stage": "base",
        "row_count": rows,
        "extraction": {
            "base_model": model_path,
            "d_model": dataset.hooks[hook],
            "layer_index": layer_number,
            "norm": "none",
            "corpus": data_path_or_name,
            "corpus_slice": corpus_slice_fields,
            "positions_per_doc": num_positions_per_document,
        },
        "created_by": f"activation_extraction {activation_extraction.__version__}",
    }
