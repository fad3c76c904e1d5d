"""--verify recomputes samples with the model of a stored extraction, which this module loads.

To recompute a kept token takes all tokens in front of it. Where only some tokens are stored, they
are read again from the data set, from where the shard's samples begin. inspect/verify.py compares
the results with what is stored.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from tokenizers import Tokenizer

from activation_extraction.common.encodings import FLOAT8
from activation_extraction.common.errors import InputError
from activation_extraction.common.positions import parse_positions
from activation_extraction.inspect.verify import Recompute
from activation_extraction.inspect.verify_shard import ChosenSample
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.model.devices import device_errors
from activation_extraction.model.family import Families
from activation_extraction.model.forward import (
    Forward,
    ModelRequest,
    Step,
    compile_step,
    prepare_model,
)
from activation_extraction.run.digests import digest_files, model_digest
from activation_extraction.run.host_text import load_text_files, row_form, sample_form
from activation_extraction.run.open_data import Dataset, open_dataset
from activation_extraction.run.prepare import recorded_commit
from activation_extraction.store.commit import METADATA
from activation_extraction.store.identity import Identity
from activation_extraction.store.metadata import identity_of
from activation_extraction.text.packing import pack, samples_of
from activation_extraction.text.rows import ATTENTION_MASK, RowForm
from activation_extraction.text.samples import samples

OTHER_TEXT = "the data set now gives other tokens than those that are stored"


def load_for_recomputing(
    families: Families, request: ModelRequest, dataset_path: str | None, metadata: dict[str, Any]
) -> Recompute:
    """Returns a function that recomputes samples, in a `Recompute`.

    request: how to compute; the metadata says what to compute. dataset_path: where the data set is
    now; None: where the run had it. It is opened only if the run did not keep all tokens. Raises
    InputError if the model is not the one that the stored activations came from.
    """
    identity = identity_of(metadata, METADATA)
    encoded = identity.activation_dtype == FLOAT8  # and decoded to float32
    request = replace(
        request,
        revision=request.revision or recorded_commit(request.model_path, metadata),
        layers=None,
        hook_names=identity.hooks,
        top_logits=identity.top_logits or request.top_logits,
        dtype=identity.dtype,
        activation_dtype="float32" if encoded else identity.activation_dtype,
        length=identity.max_seq_length,
    )
    with device_errors():
        forward = prepare_model(families, request)
        if model_digest(forward.checkpoint) != identity.model_digest:
            raise InputError(
                f"--model_path {request.model_path}: is not the model that the stored activations "
                "came from; give that one"
            )
        texts = None
        if not identity.every_token:
            vocabulary = forward.model.config.vocab_size
            texts = _open_texts(metadata, forward.checkpoint, vocabulary, dataset_path)
        step = compile_step(forward)

    def recompute(chosen: list[ChosenSample]) -> list[dict[str, np.ndarray] | str]:
        stored = [np.asarray(sample.row.token_ids) for sample in chosen]
        token_ids = stored if texts is None else texts.all_token_ids(chosen)
        results: list[dict[str, np.ndarray] | str] = [OTHER_TEXT] * len(chosen)
        known = {item: ids for item, ids in enumerate(token_ids) if ids is not None}
        items = list(known)
        for number, activations in _compute(forward, step, list(known.values())):
            positions = chosen[items[number]].row.positions
            results[items[number]] = {name: each[positions] for name, each in activations.items()}
        return results

    return Recompute(jax.default_backend(), recompute)


def _compute(
    forward: Forward, step: Step, token_ids: Sequence[np.ndarray]
) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yields the number of each sample, in any order, and its activations: name of a hook ->
    (tokens, width)."""
    for batch in pack(samples_of(token_ids), *forward.shape):
        with device_errors():
            activations = forward.receive(step(batch, [False] * 3)[0])
        for placed in batch.samples:
            where = placed.row, slice(placed.start, placed.stop)
            of_sample = {str(name): values[where] for name, values in activations.items()}
            yield placed.sample.number, of_sample


@dataclass(frozen=True)
class _Texts:
    """The data set and the tokenizer have been checked to be those of the run.

    limits: the most samples and tokens of a host, by name. shuffle: the seed of the documents'
    order; None for the order of the data set.
    """

    dataset: Dataset
    rows: RowForm
    tokenizer: Tokenizer | None
    identity: Identity
    limits: Mapping[str, int | None]
    shuffle: int | None

    def all_token_ids(self, chosen: Sequence[ChosenSample]) -> list[np.ndarray | None]:
        """Returns all token ids of every sample; None if its kept ones are not the stored ones."""
        groups: dict[Any, list[ChosenSample]] = defaultdict(list)
        for sample in chosen:
            groups[sample.worker, sample.shard].append(sample)
        token_ids: dict[int, np.ndarray] = {}
        for group in groups.values():
            token_ids |= self._read(group)
        return [token_ids.get(sample.row.sample_idx) for sample in chosen]

    def _read(self, group: Sequence[ChosenSample]) -> dict[int, np.ndarray]:
        """Returns token ids by `sample_idx` for samples of one shard."""
        identity, wanted = self.identity, {sample.row.sample_idx: sample.row for sample in group}
        worker, start = group[0].worker, group[0].start
        documents = self.dataset.documents(self.rows, worker, identity.skip_bad_rows, self.shuffle)
        token_ids, form = {}, sample_form(identity, parse_positions(identity.positions))
        for sample in samples(documents, self.tokenizer, form, start=start, **self.limits):
            if (row := wanted.get(sample.sample_idx)) is not None:
                positions = sample.kept_positions
                same = np.array_equal(sample.token_ids[positions], np.asarray(row.token_ids))
                if same and np.array_equal(positions, row.positions):
                    token_ids[sample.sample_idx] = sample.token_ids
            if sample.sample_idx >= max(wanted):
                break
        return token_ids


def _open_texts(
    metadata: Mapping[str, Any], checkpoint: Checkpoint, vocabulary: int, dataset_path: str | None
) -> _Texts:
    """Opens the data set and the tokenizer. Raises InputError if they are not those of the run.

    dataset_path: where the data set is now; None: where the run had it.
    """
    identity, configuration = identity_of(metadata, METADATA), metadata["configuration"]
    if identity.mask_column == ATTENTION_MASK:
        raise InputError(
            f"--model_path: this run is of a version for which zeros in {ATTENTION_MASK} were "
            "context, which the model read; it cannot be recomputed; leave --model_path out"
        )
    files = checkpoint.tokenizer_files()
    if identity.tokenizer_digest and digest_files(files) != identity.tokenizer_digest:
        raise InputError(
            f"--model_path {checkpoint.model_path}: its tokenizer is not the one that the stored "
            "activations came from"
        )
    tokenizer, template = load_text_files(configuration, checkpoint, vocabulary)
    if template is not None and template.digest != identity.chat_template:
        raise InputError(f"{template.where}: is not the template that the run used")
    rows = row_form(configuration, template, vocabulary)
    path = dataset_path or configuration["dataset_path"]
    configuration = {**configuration, "dataset_path": path}
    dataset = open_dataset(configuration, rows.columns, own=[metadata])
    if (dataset.name, dataset.content) != (identity.data, identity.data_revision):
        raise InputError(f"--dataset_path {path}: is not the data set that the run read")
    limits = {name: metadata.get(name) for name in ("max_samples", "max_tokens")}
    seed = configuration.get("shuffle_documents")
    return _Texts(dataset, rows, tokenizer, identity, limits, seed)
