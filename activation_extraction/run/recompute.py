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

from activation_extraction.cli.flags import Config
from activation_extraction.common.encodings import FLOAT8
from activation_extraction.common.errors import InputError
from activation_extraction.inspect.verify import Recompute
from activation_extraction.inspect.verify_shard import ChosenSample
from activation_extraction.model.devices import device_errors
from activation_extraction.model.family import Families
from activation_extraction.model.forward import (
    Forward,
    ModelRequest,
    Step,
    compile_step,
    prepare_model,
)
from activation_extraction.run.host_text import sample_form
from activation_extraction.run.inputs import Inputs, check_inputs
from activation_extraction.run.open_data import TextRequest
from activation_extraction.run.prepare import recorded_commit
from activation_extraction.store.commit import METADATA
from activation_extraction.store.identity import Identity
from activation_extraction.store.metadata import identity_of
from activation_extraction.text.packing import pack, samples_of
from activation_extraction.text.rows import ATTENTION_MASK
from activation_extraction.text.samples import samples

OTHER_TEXT = "the data set now gives other tokens than those that are stored"


def load_for_recomputing(
    families: Families, request: ModelRequest, dataset_path: str | None, metadata: dict[str, Any]
) -> Recompute:
    """Returns a function that recomputes samples, in a `Recompute`.

    request: how to compute; the metadata says what to compute. dataset_path: where the data set is
    now; None: where the run had it. It is opened only if the run did not keep all tokens. Raises
    InputError if an input that it takes is not the one that the stored activations came from.
    """
    identity = identity_of(metadata, METADATA)
    encoded = identity.activation_dtype == FLOAT8  # and decoded to float32
    request = replace(
        request,
        model_revision=request.model_revision or recorded_commit(request.model_path, metadata),
        layers_to_extract=None,
        hook_names=identity.hooks,
        top_logits=identity.top_logits or request.top_logits,
        dtype=identity.dtype,
        activation_dtype="float32" if encoded else identity.activation_dtype,
        max_seq_length=identity.max_seq_length,
    )
    with device_errors():
        forward = prepare_model(families, request)
        text = Config.from_json(metadata.get("configuration", {})).part(TextRequest)
        if dataset_path is not None:
            text = replace(text, dataset_path=dataset_path, mix=())
        inputs = Inputs(request, text, forward, own=[metadata])
        check_inputs(inputs, identity, of_text=False)
        texts = None if identity.every_token else _open_texts(inputs, identity, metadata)
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
    """Reads the text of a run again.

    inputs: those of the run, which has been checked. limits: the most samples and tokens of a host,
    by name.
    """

    inputs: Inputs
    limits: Mapping[str, int | None]

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
        inputs, wanted = self.inputs, {sample.row.sample_idx: sample.row for sample in group}
        worker, start, text = group[0].worker, group[0].start, inputs.text
        documents = inputs.dataset.documents(
            inputs.rows, worker, text.skip_bad_rows, text.shuffle_documents
        )
        token_ids, form = {}, sample_form(text)
        for sample in samples(documents, inputs.tokenizer, form, start=start, **self.limits):
            if (row := wanted.get(sample.sample_idx)) is not None:
                positions = sample.kept_positions
                same = np.array_equal(sample.token_ids[positions], np.asarray(row.token_ids))
                if same and np.array_equal(positions, row.positions):
                    token_ids[sample.sample_idx] = sample.token_ids
            if sample.sample_idx >= max(wanted):
                break
        return token_ids


def _open_texts(inputs: Inputs, identity: Identity, metadata: Mapping[str, Any]) -> _Texts:
    """Opens the data set and the tokenizer. Raises InputError if they are not those of the run."""
    if identity.mask_column == ATTENTION_MASK:
        raise InputError(
            f"--model_path: this run is of a version for which zeros in {ATTENTION_MASK} were "
            "context, which the model read; it cannot be recomputed; leave --model_path out"
        )
    check_inputs(inputs, identity, of_text=True)
    return _Texts(inputs, {name: metadata.get(name) for name in ("max_samples", "max_tokens")})
