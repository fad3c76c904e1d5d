"""Loads the model of a stored extraction again, so that --verify can recompute samples.

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

from activation_extraction.common.errors import InputError
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
from activation_extraction.run.host_text import (
    Dataset,
    load_text_files,
    open_dataset,
    row_form,
    sample_form,
)
from activation_extraction.run.prepare import recorded_commit
from activation_extraction.store.commit import METADATA
from activation_extraction.store.identity import Identity
from activation_extraction.store.metadata import identity_of
from activation_extraction.text.packing import pack, samples_of
from activation_extraction.text.rows import RowForm
from activation_extraction.text.samples import samples

OTHER_TEXT = "the data set now gives other tokens than those that are stored"


def load_again(
    families: Families,
    request: ModelRequest,
    dataset_path: str | None,
    metadata: dict[str, Any],
) -> Recompute:
    """Returns what recomputes samples.

    request: how to compute; the metadata says what to compute. dataset_path: where the data set is
    now; None: where the run had it. It is opened only if the run did not keep all tokens. Raises
    InputError if the model is not the one that the stored activations came from.
    """
    identity = identity_of(metadata, METADATA)
    request = replace(
        request,
        revision=request.revision or recorded_commit(request.model_path, metadata),
        layers=None,
        hook_names=identity.hooks,
        dtype=identity.dtype,
        activation_dtype=identity.activation_dtype,
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
        whole = stored if texts is None else texts.whole(chosen)
        computed = _compute(forward, step, [ids for ids in whole if ids is not None])
        return [
            OTHER_TEXT
            if ids is None
            else {name: values[sample.row.positions] for name, values in next(computed).items()}
            for sample, ids in zip(chosen, whole, strict=True)
        ]

    return Recompute(jax.default_backend(), recompute)


def _compute(
    forward: Forward, step: Step, token_ids: Sequence[np.ndarray]
) -> Iterator[dict[str, np.ndarray]]:
    """The activations of samples, name of a hook -> (tokens, width)."""
    for batch in pack(samples_of(token_ids), *forward.shape):
        with device_errors():
            activations = forward.receive(step(batch, [False] * 3)[0])
        for at in batch.samples:
            yield {
                str(name): values[at.row, at.start : at.stop]
                for name, values in activations.items()
            }


@dataclass(frozen=True)
class _Texts:
    """The data set and the tokenizer of a run, both checked to be the run's.

    limits: the most samples and tokens of a host, by name.
    """

    dataset: Dataset
    rows: RowForm
    tokenizer: Tokenizer | None
    identity: Identity
    limits: Mapping[str, int | None]
    shuffle: int | None

    def whole(self, chosen: Sequence[ChosenSample]) -> list[np.ndarray | None]:
        """All token ids of every sample; None where the kept ones are not those that are stored."""
        groups: dict[Any, list[ChosenSample]] = defaultdict(list)
        for sample in chosen:
            groups[sample.worker, sample.shard].append(sample)
        token_ids: dict[int, np.ndarray] = {}
        for group in groups.values():
            token_ids |= self._read(group)
        return [token_ids.get(sample.row.sample_idx) for sample in chosen]

    def _read(self, group: Sequence[ChosenSample]) -> dict[int, np.ndarray]:
        """Token ids by `sample_idx`, of samples of one shard."""
        identity, wanted = self.identity, {sample.row.sample_idx: sample.row for sample in group}
        worker, start = group[0].worker, group[0].start
        documents = self.dataset.documents(self.rows, worker, identity.skip_bad_rows, self.shuffle)
        found = {}
        form = sample_form(identity)
        for sample in samples(documents, self.tokenizer, form, start=start, **self.limits):
            if (row := wanted.get(sample.sample_idx)) is not None:
                positions = sample.kept_positions
                same = np.array_equal(sample.token_ids[positions], np.asarray(row.token_ids))
                if same and np.array_equal(positions, row.positions):
                    found[sample.sample_idx] = sample.token_ids
            if sample.sample_idx >= max(wanted):
                break
        return found


def _open_texts(
    metadata: Mapping[str, Any], checkpoint: Checkpoint, vocabulary: int, dataset_path: str | None
) -> _Texts:
    """dataset_path: where the data set is now; None: where the run had it.

    Raises InputError when the tokenizer or the data set is not the run's.
    """
    identity, asked = identity_of(metadata, METADATA), metadata["configuration"]
    files = checkpoint.tokenizer_files()
    if identity.tokenizer_digest and digest_files(files) != identity.tokenizer_digest:
        raise InputError(
            f"--model_path {checkpoint.model_path}: its tokenizer is not the one of the stored "
            "activations"
        )
    tokenizer, template = load_text_files(asked, checkpoint, vocabulary)
    if (template.digest if template else "") != identity.chat_template:
        raise InputError(f"{template and template.where}: is not the template of the run")
    rows = row_form(asked, template, vocabulary)
    path = dataset_path or asked["dataset_path"]
    dataset = open_dataset({**asked, "dataset_path": path}, rows.columns, own=[metadata])
    if (dataset.name, dataset.content) != (identity.data, identity.data_revision):
        raise InputError(f"--dataset_path {path}: is not the data set that the run has read")
    limits = {name: metadata.get(name) for name in ("max_samples", "max_tokens")}
    seed = asked.get("shuffle_documents")
    return _Texts(dataset, rows, tokenizer, identity, limits, seed)
