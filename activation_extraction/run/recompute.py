"""--verify recomputes samples with the model of a stored extraction, which this module loads.

To recompute a kept token takes all tokens in front of it. Where only some tokens are stored, they
are read again from the data set, from a position before them. inspect/verify.py compares
the results with what is stored.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from activation_extraction.cli.flags import Config
from activation_extraction.common.codes import CODES
from activation_extraction.common.encodings import FLOAT8
from activation_extraction.model.devices import device_errors
from activation_extraction.model.forward import compile_step
from activation_extraction.model.model_setup import ModelRequest, prepare_model
from activation_extraction.run.host_text import Text
from activation_extraction.run.inputs import Inputs, check_inputs
from activation_extraction.run.prepare import recorded_commit
from activation_extraction.store.chosen_samples import ChosenSample, Recompute
from activation_extraction.store.hook_values import Values
from activation_extraction.store.run_log import METADATA, identity_of
from activation_extraction.text.packing import pack, samples_of
from activation_extraction.text.samples import samples

OTHER_TEXT = "the data set now gives other tokens than those that are stored"


def load_for_recomputing(
    request: ModelRequest, dataset_path: str | None, metadata: dict[str, Any]
) -> Recompute:
    """Returns a function that recomputes samples, in a `Recompute`.

    request: how to compute; the metadata says what to compute. dataset_path: where the data set is
    now; None: where the run had it. It is opened only if the run did not keep all tokens. Raises
    InputError if an input that it takes is not the one that the stored activations came from.
    """
    identity = identity_of(metadata, METADATA)
    configuration = Config.from_json(metadata.get("configuration", {}))
    encoded = identity.activation_dtype == FLOAT8  # and decoded to float32
    codes = {name.removesuffix(CODES) for name in identity.code_hooks}
    asked = tuple(name for name in identity.hooks if name not in identity.code_hooks)
    request = replace(
        request,
        model_revision=request.model_revision or recorded_commit(request.model_path, metadata),
        layers_to_extract=None,
        hook_names=asked or None,
        encode_most=configuration.encode_most,
        keep_activations=not codes.isdisjoint(asked),
        top_logits=identity.top_logits or request.top_logits,
        dtype=identity.dtype,
        activation_dtype="float32" if encoded else identity.activation_dtype,
        max_seq_length=identity.max_seq_length,
    )
    with device_errors():
        forward = prepare_model(request)
        if dataset_path is not None:
            configuration = replace(configuration, dataset_path=dataset_path, mix=())
        if not identity.special_tokens:  # earlier versions added none, whatever the tokenizer says
            configuration = replace(configuration, special_tokens="none")
        vocabulary = forward.model.config.vocab_size
        text = Text(configuration, forward.checkpoint, vocabulary, [metadata])
        inputs = Inputs(request, forward, text)
        check_inputs(inputs, identity, of_text=False)
        if not identity.every_token:
            check_inputs(inputs, identity, of_text=True)
        step = compile_step(forward)

    def recompute(chosen: list[ChosenSample]) -> list[dict[str, Values] | str]:
        results: list[dict[str, Values] | str] = [OTHER_TEXT] * len(chosen)
        known = {item: np.asarray(sample.stored.token_ids) for item, sample in enumerate(chosen)}
        if not identity.every_token:
            known = _all_token_ids(text, chosen)
        items = list(known)
        for batch in pack(samples_of(known.values()), *forward.shape):
            with device_errors():
                activations = forward.receive(step(batch, [False] * 3)[0])
            by_name = {str(key): rows for key, rows in activations.items()}
            for placed in batch.samples:
                item = items[placed.sample.number]
                where = placed.row, placed.start + np.asarray(chosen[item].stored.positions, int)
                results[item] = {
                    hook.name: hook.for_user(by_name[hook.name][where])
                    for hook in chosen[item].hooks
                }
        return results

    return Recompute(jax.default_backend(), recompute)


def _all_token_ids(text: Text, chosen: Sequence[ChosenSample]) -> dict[int, np.ndarray]:
    """Reads the text of a run again, which has been checked.

    Returns all token ids of each sample, by its place in `chosen`, but of those whose kept tokens
    are not the stored ones. No limit cuts samples here: one that a limit had cut has the first of
    its kept tokens stored.
    """
    groups: dict[Any, dict[int, int]] = defaultdict(dict)
    for item, sample_chosen in enumerate(chosen):
        sample_idx = sample_chosen.stored.facts.sample_idx
        groups[sample_chosen.worker, sample_chosen.shard][sample_idx] = item
    token_ids = {}
    for (worker, _), items in groups.items():
        start = chosen[next(iter(items.values()))].start
        for sample in samples(text.documents(worker), text.tokenizer, text.form, start=start):
            sample_idx = sample.facts.sample_idx
            if sample_idx in items:
                item = items[sample_idx]
                stored = chosen[item].stored
                positions = sample.kept_positions[: len(stored.positions)]
                same = np.array_equal(sample.token_ids[positions], np.asarray(stored.token_ids))
                if same and np.array_equal(positions, stored.positions):
                    token_ids[item] = sample.token_ids
            if sample_idx >= max(items):
                break
    return token_ids
