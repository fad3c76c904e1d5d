"""Reads the text of a stored run again, for token ids that the run does not store.

Recomputing a token, or showing the text before it, needs all earlier tokens of its sample. A run
with --positions, --roles or a similar flag does not store all of them. All tokens of the sample are
made again from the data set, starting at a mark before the sample, and the kept ones are compared
with the stored tokens. inputs.py checks that tokenizer, chat template and data are still the same.
To show a text, the tokenizer of the run decodes token ids.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from activation_extraction.cli.flags import Config, ModelOptions
from activation_extraction.model.repository import Repository
from activation_extraction.model.repository_files import ADAPTER
from activation_extraction.run.host_text import Text
from activation_extraction.run.inputs import check_text_inputs, check_tokenizer
from activation_extraction.run.prepare import recorded_commit
from activation_extraction.run.tokenizer_choice import choose_tokenizer
from activation_extraction.store.chosen_samples import Reread, RunText, StoredTokens
from activation_extraction.store.run_log import METADATA, identity_of
from activation_extraction.text.batch import Sample
from activation_extraction.text.samples import samples

OTHER_TOKENS = "the data set now gives other tokens than those that are stored"
NO_SAMPLE = "the data set now ends before this sample"


def recorded_repositories(metadata: Mapping[str, Any]) -> tuple[Repository, Repository | None]:
    """Returns the model and the adapter of a stored run, at the paths that the run used.

    No weights are read.

    Args:
        metadata: The content of metadata.json.

    Returns:
        The model, at the commit on the hub that the run used, and the adapter. The adapter is None
        if the run had none.

    Raises:
        InputError: A path is neither a folder nor the name of a repository.
    """
    options = Config.from_json(metadata["configuration"]).model
    commit = recorded_commit(options.model_path, metadata)
    model = Repository(options.model_path, commit)
    if options.lora is None:
        return model, None
    return model, Repository(options.lora, kind=ADAPTER)


def load_for_rereading(
    metadata: Mapping[str, Any],
    model: Repository,
    adapter: Repository | None,
    dataset_path: str | None = None,
) -> Reread:
    """Opens the text of a stored run again, and checks that its inputs are those of the run.

    Args:
        metadata: The content of metadata.json of one of the run's hosts.
        model: The files of the model at their present path. Only the tokenizer and the chat
            template are read.
        adapter: The files of the LoRA adapter at their present path. None without an adapter.
        dataset_path: The present path or URL of the data set. None for the path, the data set on
            the hub or the mixture that the run used.

    Returns:
        A function that reads samples again.

    Raises:
        InputError: An input cannot be read, or is not the one that the stored tokens came from. The
            message names the flag and the input: the tokenizer, the chat template, the data set or
            the file.
    """
    text, present = _text_of_run(metadata, model, adapter, dataset_path)
    check_text_inputs(text, present, identity_of(metadata, METADATA))
    return partial(_read_again, text)


def load_text(config: Config, metadata: Mapping[str, Any]) -> RunText:
    """Loads the tokenizer of a stored run, and opens its data set if tokens are to be read again.

    Args:
        config: The configuration. Its model, adapter and path of the data set are used if the flags
            name them, otherwise those that the run recorded.
        metadata: The content of metadata.json of one of the run's hosts.

    Returns:
        The text of the run. The data set is opened only if the run does not store all tokens.

    Raises:
        InputError: An input cannot be read, or is not the one that the stored tokens came from. The
            message names the flag and the input.
    """
    identity = identity_of(metadata, METADATA)
    model, adapter = recorded_repositories(metadata)
    if config.model.model_path != ModelOptions.model_path:
        model = Repository(config.model.model_path, config.model.model_revision)
    if config.model.lora is not None:
        adapter = Repository(config.model.lora, kind=ADAPTER)
    text, present = _text_of_run(metadata, model, adapter, config.text.dataset_path)
    reread: Reread | None = None
    if identity.every_token:
        check_tokenizer(text, present, identity)
    else:
        check_text_inputs(text, present, identity)
        reread = partial(_read_again, text)
    # If the data set has token ids, the text has no tokenizer.
    tokenizer = text.chosen_tokenizer or choose_tokenizer(model, adapter, text.vocabulary)

    def decode(token_ids: np.ndarray) -> str:
        decoded: str = tokenizer.pretrained.decode(token_ids.tolist(), skip_special_tokens=True)
        return decoded

    return RunText(decode, reread)


def _text_of_run(
    metadata: Mapping[str, Any],
    model: Repository,
    adapter: Repository | None,
    dataset_path: str | None,
) -> tuple[Text, Config]:
    """Returns the text of a stored run, and the configuration that names its present inputs.

    `load_for_rereading` describes the arguments. No input is opened yet.
    """
    identity = identity_of(metadata, METADATA)
    recorded = Config.from_json(metadata.get("configuration", {}))
    options = recorded.text
    if dataset_path is not None:
        options = replace(options, dataset_path=dataset_path, mix=())
    # Without a record of them, the run added none: earlier versions ignored those of the tokenizer.
    if not identity.special_tokens:
        options = replace(options, special_tokens="none")
    vocabulary = metadata["model"]["vocab_size"]
    text = Text(options, model, vocabulary, earlier=[metadata], adapter=adapter)
    lora = None if adapter is None else adapter.path
    present = replace(
        recorded, model=replace(recorded.model, model_path=model.path, lora=lora), text=options
    )
    return text, present


def _read_again(text: Text, stored: Sequence[StoredTokens]) -> list[np.ndarray | str]:
    """Reads samples again; see `Reread`.

    Args:
        text: The text, whose inputs have been checked.
        stored: The stored tokens of the samples to read.

    Returns:
        For each sample all its token ids, or a message if they differ from the stored ones or the
        data ends before it.
    """
    results: list[np.ndarray | str] = [NO_SAMPLE] * len(stored)
    # Indices into `stored`, by the host and the start of the pass that reads the sample, and then
    # by the number of the sample.
    passes: dict[Any, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, tokens in enumerate(stored):
        first = 0 if tokens.start is None else tokens.start.samples
        passes[tokens.worker, first][tokens.sample_idx].append(index)
    for (worker, _), indices in passes.items():
        any_index = next(iter(indices.values()))[0]  # all have the same start
        stream = samples(
            text.documents(worker),
            text.tokenizer,
            text.sample_form,
            start=stored[any_index].start,
            until=worker.number_of(max(indices)) + 1,
        )
        for sample in stream:
            for index in indices.get(sample.facts.sample_idx, ()):
                results[index] = _token_ids(sample, stored[index])
    return results


def _token_ids(sample: Sample, stored: StoredTokens) -> np.ndarray | str:
    """Returns all token ids of a sample, or a message if they differ from the stored ones.

    Args:
        sample: The sample as it was read again. No limit has cut it.
        stored: The stored tokens. If a limit of the run had cut the sample, they are its first kept
            tokens.
    """
    positions = sample.kept_positions[: len(stored.positions)]
    same = np.array_equal(positions, stored.positions)
    if same and np.array_equal(sample.token_ids[positions], stored.token_ids):
        return sample.token_ids
    return f"{OTHER_TOKENS}; its row is {json.dumps(sample.facts.row, ensure_ascii=False)}"
