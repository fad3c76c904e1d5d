"""Reads the text of a stored run again, to get token ids that the run does not store.

Recomputing a token, or showing the text before it, needs all earlier tokens of its sample. A run
with --positions, --roles or a similar flag does not store all of them. This module makes all tokens
of the sample again from the data set, starting at a mark before the sample. It compares the tokens
that these flags keep with the stored tokens. inputs.py checks that the tokenizer, the chat template
and the data are still the same. recompute.py uses the token ids, and inspect/nla_files.py the
decoded text.
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
from activation_extraction.run.prepare import recorded_model_commit
from activation_extraction.run.tokenizer_choice import choose_tokenizer
from activation_extraction.store.chosen_samples import Reread, StoredTokens, TextFunctions
from activation_extraction.store.run_log import METADATA, identity_of
from activation_extraction.text.batch import Sample, Worker
from activation_extraction.text.samples import samples

# Messages for samples that cannot be read again.
OTHER_TOKENS = "the data set now gives other tokens than those that are stored"
NO_SAMPLE = "the data set now ends before this sample"


def recorded_repositories(metadata: Mapping[str, Any]) -> tuple[Repository, Repository | None]:
    """Returns the files of the model and the adapter at the paths that a stored run used.

    No weights are read.

    Args:
        metadata: The content of metadata.json.

    Returns:
        A tuple of:
            The files of the model. If the model is on the hub, they are from the commit that the
            run used.
            The files of the adapter. None if the run had no adapter.

    Raises:
        InputError: If a path is neither a folder nor the name of a repository.
    """
    model_options = Config.from_json(metadata["configuration"]).model_options
    model_commit = recorded_model_commit(model_options.model_path, metadata)
    model_repository = Repository(model_options.model_path, model_commit)
    if model_options.lora is None:
        return model_repository, None
    return model_repository, Repository(model_options.lora, kind=ADAPTER)


def load_for_rereading(
    metadata: Mapping[str, Any],
    model: Repository,
    adapter: Repository | None,
    dataset_path: str | None = None,
) -> Reread:
    """Prepares to read samples of a stored run again from its data set.

    This includes a check that the tokenizer, the chat template and the data set have not changed.

    Args:
        metadata: The content of metadata.json of one of the run's hosts.
        model: The files of the model at their present path. Only the tokenizer and the chat
            template are read.
        adapter: The files of the LoRA adapter at their present path. None without an adapter.
        dataset_path: The present path or URL of the data set. None if it is still where the run
            read it.

    Returns:
        A function that reads samples again; see `Reread`.

    Raises:
        InputError: If the tokenizer, the chat template, the data set or a file cannot be read, or
            if it differs from the input of the run. The message names the input and its flag.
    """
    text_pipeline, config_with_paths_to_read = _text_pipeline_of_run(
        metadata, model, adapter, dataset_path
    )
    check_text_inputs(text_pipeline, config_with_paths_to_read, identity_of(metadata, METADATA))
    return partial(_read_again, text_pipeline)


def load_text(config: Config, metadata: Mapping[str, Any]) -> TextFunctions:
    """Loads the tokenizer of a stored run, and opens the run's data set if that is needed.

    The data set is needed only if the run does not store all tokens of its samples.

    Args:
        config: The configuration. Its model, its adapter and its path of the data set are used if
            the flags name them. Otherwise, the inputs that the run recorded are used.
        metadata: The content of metadata.json of one of the run's hosts.

    Returns:
        A `TextFunctions`, which contains a function that decodes token ids, and a function that
        reads samples again. The second function is None if the run stores all tokens.

    Raises:
        InputError: If the tokenizer, the chat template, the data set or a file cannot be read, or
            if it differs from the input of the run. The message names the input and its flag.
    """
    identity = identity_of(metadata, METADATA)
    model_repository, adapter_repository = recorded_repositories(metadata)
    if config.model_options.model_path != ModelOptions.model_path:
        model_repository = Repository(
            config.model_options.model_path, config.model_options.model_revision
        )
    if config.model_options.lora is not None:
        adapter_repository = Repository(config.model_options.lora, kind=ADAPTER)
    text_pipeline, config_with_paths_to_read = _text_pipeline_of_run(
        metadata, model_repository, adapter_repository, config.text_options.dataset_path
    )
    sample_rereader: Reread | None = None
    if identity.every_token:
        check_tokenizer(text_pipeline, config_with_paths_to_read, identity)
    else:
        check_text_inputs(text_pipeline, config_with_paths_to_read, identity)
        sample_rereader = partial(_read_again, text_pipeline)
    # If the data set contains token ids, it is read without a tokenizer. A tokenizer is needed here
    # to decode the ids.
    chosen_tokenizer = text_pipeline.chosen_tokenizer or choose_tokenizer(
        model_repository, adapter_repository, text_pipeline.vocabulary_size
    )

    def decode(token_ids: np.ndarray) -> str:
        decoded_text: str = chosen_tokenizer.pretrained_tokenizer.decode(
            token_ids.tolist(), skip_special_tokens=True
        )
        return decoded_text

    return TextFunctions(decode, sample_rereader)


def _text_pipeline_of_run(
    metadata: Mapping[str, Any],
    model: Repository,
    adapter: Repository | None,
    dataset_path: str | None,
) -> tuple[Text, Config]:
    """Returns a `Text` that makes the samples of a stored run again, and the run's configuration.

    The samples are made from the run's data set. The model, the adapter and the data set may have
    been moved since the run. No file is opened yet.

    Args:
        metadata: The content of metadata.json of one of the run's hosts.
        model: The files of the model at their present path.
        adapter: The files of the LoRA adapter at their present path. None without an adapter.
        dataset_path: The present path or URL of the data set. None if it is still where the run
            read it.

    Returns:
        A tuple of:
            The `Text`, with the settings of the run.
            The configuration of the run, in which the present paths replace the recorded paths.
    """
    identity = identity_of(metadata, METADATA)
    recorded_config = Config.from_json(metadata.get("configuration", {}))
    text_options = recorded_config.text_options
    if dataset_path is not None:
        text_options = replace(text_options, dataset_path=dataset_path, mix=())
    # A run that records no special tokens added none to its texts, so none are added now. Earlier
    # versions of this program ignored the special tokens of the tokenizer.
    if not identity.special_tokens:
        text_options = replace(text_options, special_tokens="none")
    vocabulary_size = metadata["model"]["vocab_size"]
    text_pipeline = Text(
        text_options,
        model,
        vocabulary_size,
        metadata_of_earlier_outputs=[metadata],
        adapter_repository=adapter,
    )
    lora_path = None if adapter is None else adapter.path
    config_with_paths_to_read = replace(
        recorded_config,
        model_options=replace(recorded_config.model_options, model_path=model.path, lora=lora_path),
        text_options=text_options,
    )
    return text_pipeline, config_with_paths_to_read


def _read_again(
    text_pipeline: Text, stored_samples: Sequence[StoredTokens]
) -> list[np.ndarray | str]:
    """Makes all tokens of some stored samples again from the data set.

    Args:
        text_pipeline: The text pipeline of the run, whose inputs have been checked.
        stored_samples: The stored tokens of the samples.

    Returns:
        For each sample, all its token ids, int32 (tokens,). A message instead if these tokens
        differ from the stored tokens, or if the data set ends before the sample.
    """
    token_ids_or_error_messages_of_samples: list[np.ndarray | str] = [NO_SAMPLE] * len(
        stored_samples
    )
    # Samples of one worker with the same mark before them are read in one pass over the worker's
    # share of the data. The keys are the worker and the number of samples before the mark. The
    # values are indices in `stored_samples`.
    stored_sample_indices_by_worker_and_mark: dict[tuple[Worker, int], list[int]] = defaultdict(
        list
    )
    for stored_sample_index, stored_sample in enumerate(stored_samples):
        mark_before_sample = stored_sample.mark_before_sample
        num_samples_before_mark = 0 if mark_before_sample is None else mark_before_sample.samples
        stored_sample_indices_by_worker_and_mark[
            stored_sample.worker, num_samples_before_mark
        ].append(stored_sample_index)
    for (worker, _), stored_sample_indices in stored_sample_indices_by_worker_and_mark.items():
        # The same sample may be in `stored_samples` several times.
        stored_sample_indices_by_sample_idx: dict[int, list[int]] = defaultdict(list)
        for stored_sample_index in stored_sample_indices:
            stored_sample_indices_by_sample_idx[
                stored_samples[stored_sample_index].sample_idx
            ].append(stored_sample_index)
        sample_stream = samples(
            text_pipeline.documents(worker),
            text_pipeline.tokenizer,
            text_pipeline.sample_settings,
            start=stored_samples[stored_sample_indices[0]].mark_before_sample,
            until=worker.number_of(max(stored_sample_indices_by_sample_idx)) + 1,
        )
        for reread_sample in sample_stream:
            sample_idx = reread_sample.facts.sample_idx
            for stored_sample_index in stored_sample_indices_by_sample_idx.get(sample_idx, ()):
                token_ids_or_error_messages_of_samples[stored_sample_index] = _token_ids(
                    reread_sample, stored_samples[stored_sample_index]
                )
    return token_ids_or_error_messages_of_samples


def _token_ids(sample: Sample, stored: StoredTokens) -> np.ndarray | str:
    """Returns all token ids of a sample, or a message if its tokens differ from the stored tokens.

    The ids and positions of tokens are compared. If the sample has more kept tokens than are
    stored, only its first kept tokens are compared, because --max_tokens may have cut the sample
    when it was stored.

    Args:
        sample: The sample, made again from the data set without the limit of --max_tokens.
        stored: The tokens of the same sample that the run has stored.

    Returns:
        The ids of all tokens of `sample`, int32 (tokens,), also of tokens that are not kept. A
        message for the user if the compared tokens differ.
    """
    kept_positions = sample.kept_positions[: len(stored.positions)]
    has_same_positions = np.array_equal(kept_positions, stored.positions)
    if has_same_positions and np.array_equal(sample.token_ids[kept_positions], stored.token_ids):
        return sample.token_ids
    return f"{OTHER_TOKENS}; its row is {json.dumps(sample.facts.row, ensure_ascii=False)}"
