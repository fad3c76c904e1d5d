"""Makes a table of the features of an autoencoder, with the tokens on which they are strongest.

One pass over the codes counts the tokens on which each feature is active, and keeps the tokens on
which its values are largest. Memory therefore grows with the number of features and not with the
size of the run. The tokens around the kept tokens are read afterwards. `find_decoder` returns a
function that decodes token ids with the vocabulary files of a tokenizer (tokenizer.json, or
vocab.json and merges.txt), for which transformers need not be installed.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow

from activation_extraction.common.errors import install_advice, one_line
from activation_extraction.common.tokenizer_files import (
    MERGES_TXT,
    TOKENIZER_JSON,
    VOCAB_JSON,
    VOCABULARY_FILES,
    vocabulary_file,
)

if TYPE_CHECKING:  # dataset.py imports this module, so a real import would be circular
    from activation_extraction.dataset.dataset import ActivationDataset

BATCH_TOKENS = 2**14  # number of tokens whose codes are in memory together, as one batch
# Fields of a context. A context consists of a token on which a feature has one of its largest
# values, and of the tokens around this token. `ActivationDataset.features` describes the fields.
CONTEXT = pyarrow.schema(
    {
        "value": pyarrow.float32(),
        "sample_idx": pyarrow.int64(),
        "position": pyarrow.int32(),
        "token_ids": pyarrow.list_(pyarrow.int32()),
        "token": pyarrow.int32(),
        "text": pyarrow.string(),
    }
)


class StrongestTokens:
    """The tokens on which each feature has its largest values.

    Args:
        feature_count: Number of features, F.
        tokens_per_feature: Number of tokens to keep for each feature, K.

    Attributes:
        largest_values_of_features: Largest values of each feature, float32 (F, K), in descending
            order. If a feature is active on fewer than K tokens, -inf fills the rest of its K
            values.
        token_indices: Indices of the tokens with these values, counted from 0 over all shards of a
            dataset, int64 (F, K). The index is 0 where the value is -inf.
    """

    def __init__(self, feature_count: int, tokens_per_feature: int) -> None:
        self.largest_values_of_features = np.full(
            (feature_count, tokens_per_feature), -np.inf, np.float32
        )
        self.token_indices = np.zeros((feature_count, tokens_per_feature), np.int64)

    def add(self, feature_ids: np.ndarray, values: np.ndarray, token_indices: np.ndarray) -> None:
        """Adds n values of features, and keeps only the K largest values of each feature.

        K is the argument `tokens_per_feature` of this class. Among equal values, the values that
        were added first are kept.

        Args:
            feature_ids: Number of the feature of each value, int32 (n,).
            values: Values of the features, float32 (n,).
            token_indices: Index of the token of each value, counted from 0 over all shards of the
                dataset, int64 (n,).
        """
        tokens_per_feature = self.largest_values_of_features.shape[1]
        large_enough_mask = values > self.largest_values_of_features[feature_ids, -1]
        # The indices that sort by feature, and then by descending value.
        sorting_indices = np.lexsort((-values[large_enough_mask], feature_ids[large_enough_mask]))
        feature_ids = feature_ids[large_enough_mask][sorting_indices]
        added_values = values[large_enough_mask][sorting_indices]
        token_indices = token_indices[large_enough_mask][sorting_indices]
        updated_feature_ids, first_indices, value_counts = np.unique(
            feature_ids, return_index=True, return_counts=True
        )
        # Rank of each added value among the added values of its feature, 0 for the largest value.
        value_ranks_within_feature = np.arange(len(feature_ids)) - np.repeat(
            first_indices, value_counts
        )
        updated_feature_indices_of_values = np.repeat(
            np.arange(len(updated_feature_ids)), value_counts
        )
        candidate_mask = value_ranks_within_feature < tokens_per_feature
        # Each updated feature has 2 K candidates: first the K values that were kept so far, and
        # then up to K added values. Among equal values, a stable sort prefers the values that were
        # kept so far.
        candidate_values = np.full(
            (len(updated_feature_ids), 2 * tokens_per_feature), -np.inf, np.float32
        )
        candidate_token_indices = np.zeros(candidate_values.shape, np.int64)
        candidate_values[:, :tokens_per_feature] = self.largest_values_of_features[
            updated_feature_ids
        ]
        candidate_token_indices[:, :tokens_per_feature] = self.token_indices[updated_feature_ids]
        rows_of_added_candidates = updated_feature_indices_of_values[candidate_mask]
        columns_of_added_candidates = (
            tokens_per_feature + value_ranks_within_feature[candidate_mask]
        )
        candidate_values[rows_of_added_candidates, columns_of_added_candidates] = added_values[
            candidate_mask
        ]
        candidate_token_indices[rows_of_added_candidates, columns_of_added_candidates] = (
            token_indices[candidate_mask]
        )
        indices_of_largest_candidates = np.argsort(-candidate_values, axis=1, kind="stable")[
            :, :tokens_per_feature
        ]
        self.largest_values_of_features[updated_feature_ids] = np.take_along_axis(
            candidate_values, indices_of_largest_candidates, 1
        )
        self.token_indices[updated_feature_ids] = np.take_along_axis(
            candidate_token_indices, indices_of_largest_candidates, 1
        )


def feature_table(
    dataset: "ActivationDataset", hook: str, contexts: int, around: int
) -> pyarrow.Table:
    """Lists how often each feature of an autoencoder is active, and where its values are largest.

    Args:
        dataset: Dataset of the run.
        hook: Any name of the hook that holds the codes.
        contexts: Number of tokens to list for each feature: the tokens with its largest values.
        around: Number of tokens of the sample to include on each side of a listed token.

    Returns:
        A table with a row for each feature, whose columns `ActivationDataset.features` describes.

    Raises:
        ValueError: If the hook has no codes or is not read, if `contexts` is less than 1, or if
            `around` is less than 0.
        OSError: If a shard is damaged.
    """
    from tqdm import tqdm  # imported late, because other readers of a run do not need tqdm

    canonical_hook_name = dataset.hooks.canonical_name_by_alias.get(hook, hook)
    names_of_code_hooks = [
        hook_name
        for hook_name, stored_hook in dataset.shards.stored_hook_by_name.items()
        if not stored_hook.values_are_array
    ]
    if not dataset.identity.code_hooks:
        raise ValueError(f"{dataset.url}: has no codes, which --encode stores")
    if canonical_hook_name not in names_of_code_hooks:
        raise ValueError(
            f"hook {canonical_hook_name!r} has no codes or is not read; codes are read at "
            f"{', '.join(names_of_code_hooks) or 'no hook'}"
        )
    if contexts < 1 or around < 0:
        raise ValueError(f"contexts {contexts}, around {around}: expected at least 1 and 0")
    feature_count = dataset.hooks[canonical_hook_name]
    num_earlier_tokens = 0  # number of tokens in earlier batches
    active_token_counts_of_features = np.zeros(feature_count, np.int64)
    value_sums_of_features = np.zeros(feature_count)
    strongest_tokens = StrongestTokens(feature_count, contexts)
    progress_settings = dict(unit=" tokens", unit_scale=True, desc="reading codes", disable=None)
    with tqdm(total=dataset.tokens, **progress_settings) as progress_bar:
        for batch in dataset.batches(BATCH_TOKENS, [canonical_hook_name]):
            codes = batch[canonical_hook_name]
            token_indices_of_values = np.repeat(
                np.arange(num_earlier_tokens, num_earlier_tokens + len(batch)),
                np.diff(codes.indptr),
            )
            active_token_counts_of_features += np.bincount(codes.indices, minlength=feature_count)
            value_sums_of_features += np.bincount(
                codes.indices, codes.data, minlength=feature_count
            )
            strongest_tokens.add(codes.indices, codes.data, token_indices_of_values)
            num_earlier_tokens += len(batch)
            progress_bar.update(len(batch))
    active_feature_mask = active_token_counts_of_features > 0
    mean_values_of_features = np.divide(
        value_sums_of_features,
        active_token_counts_of_features,
        where=active_feature_mask,
        out=np.zeros(feature_count),
    )
    columns_by_name: dict[str, Any] = {
        "feature": np.arange(feature_count, dtype=np.int32),
        "tokens": active_token_counts_of_features,
        "frequency": active_token_counts_of_features / max(num_earlier_tokens, 1),
        "mean": pyarrow.array(mean_values_of_features, mask=~active_feature_mask),
        "maximum": pyarrow.array(
            strongest_tokens.largest_values_of_features[:, 0], mask=~active_feature_mask
        ),
        "contexts": _contexts(dataset, strongest_tokens, around),
    }
    return pyarrow.table(columns_by_name)


def _contexts(
    dataset: "ActivationDataset", strongest_tokens: StrongestTokens, around: int
) -> pyarrow.Array:
    """Returns the column `contexts` of a table of features.

    Args:
        dataset: Dataset with the codes.
        strongest_tokens: Strongest tokens of every feature.
        around: Number of tokens of the sample to include on each side of a token.

    Returns:
        An array with a list for each feature. The list contains a struct for each token of the
        feature in `strongest_tokens`, the strongest token first. The struct has the fields of
        CONTEXT: the feature's value, the place of the token, and the tokens around it.
    """
    # Mask of shape (F, K). It is True for every token that was found, and False where -inf fills up
    # the values of a feature that is active on fewer than K tokens.
    filled_context_mask = np.isfinite(strongest_tokens.largest_values_of_features)
    values_of_contexts = strongest_tokens.largest_values_of_features[filled_context_mask]
    token_indices_of_contexts = strongest_tokens.token_indices[filled_context_mask]
    token_offsets_of_shards = np.cumsum([0, *(commit.tokens for commit in dataset.shards.commits)])
    shard_indices_of_contexts = (
        np.searchsorted(token_offsets_of_shards, token_indices_of_contexts, "right") - 1
    )
    token_id_decoder: Callable[[np.ndarray], str] | None = None
    with suppress(LookupError):
        token_id_decoder = find_decoder(dataset)
    # The contexts of a shard are made together. `context_tables_of_shards` contains a table of the
    # contexts of each shard, and `context_indices_of_shards` contains the indices of these contexts
    # among all contexts. Both begin with an empty item, for the case that there are no contexts.
    context_indices_of_shards = [np.arange(0)]
    context_tables_of_shards = [CONTEXT.empty_table()]
    for shard_index in np.unique(shard_indices_of_contexts).tolist():
        shard_reader = dataset.shards.get(shard_index)
        context_indices_of_this_shard = np.flatnonzero(shard_indices_of_contexts == shard_index)
        token_array_by_field_name = shard_reader.begin_tokens(
            0, dataset.shards.commits[shard_index].tokens
        )()
        token_indices_in_shard = (
            token_indices_of_contexts[context_indices_of_this_shard]
            - token_offsets_of_shards[shard_index]
        )
        sample_indices_of_tokens = (
            np.searchsorted(shard_reader.sample_offsets, token_indices_in_shard, "right") - 1
        )
        context_starts = np.maximum(
            shard_reader.sample_offsets[sample_indices_of_tokens], token_indices_in_shard - around
        )
        context_stops = np.minimum(
            shard_reader.sample_offsets[sample_indices_of_tokens + 1],
            token_indices_in_shard + around + 1,
        )
        token_ids_of_contexts = [
            token_array_by_field_name["token_ids"][context_start:context_stop]
            for context_start, context_stop in zip(context_starts, context_stops, strict=True)
        ]
        context_columns = {
            "value": values_of_contexts[context_indices_of_this_shard],
            "sample_idx": shard_reader.sample_numbers[sample_indices_of_tokens],
            "position": token_array_by_field_name["position"][token_indices_in_shard],
            "token_ids": token_ids_of_contexts,
            "token": token_indices_in_shard - context_starts,
            "text": [
                token_id_decoder and token_id_decoder(context_token_ids)
                for context_token_ids in token_ids_of_contexts
            ],
        }
        context_indices_of_shards.append(context_indices_of_this_shard)
        context_tables_of_shards.append(pyarrow.table(context_columns, CONTEXT))
    context_table = pyarrow.concat_tables(context_tables_of_shards).take(
        np.argsort(np.concatenate(context_indices_of_shards))
    )
    context_offsets_of_features = np.cumsum([0, *filled_context_mask.sum(axis=1)], dtype=np.int32)
    return pyarrow.ListArray.from_arrays(
        context_offsets_of_features, context_table.to_struct_array().combine_chunks()
    )


def find_decoder(dataset: "ActivationDataset") -> Callable[[np.ndarray], str]:
    """Returns a function that decodes token ids with the vocabulary of the run's model.

    The vocabulary is in tokenizer.json, or in vocab.json and merges.txt. Added tokens that these
    files lack are taken from metadata.json, in which the run recorded them.

    Args:
        dataset: Dataset of the run.

    Returns:
        A function that takes token ids, int32 (n,), and returns their text. An id without a token
        becomes the id in brackets, such as "[151999]".

    Raises:
        LookupError: If the package tokenizers or the vocabulary is not on this machine, or if the
            vocabulary cannot be read. The message names the missing package or file.
    """
    try:
        from tokenizers import Tokenizer, decoders, models
    except ImportError:
        raise LookupError(f"needs the package tokenizers; {install_advice('tokenizers')}") from None
    metadata = dataset.metadata
    try:
        tokenizer_path = dataset.tokenizer_path
    except ValueError:
        raise LookupError("needs the name of the model, which metadata.json lacks") from None
    vocabulary_path = vocabulary_file(_local_files(tokenizer_path, metadata))
    if vocabulary_path is None:
        raise LookupError(
            f"needs {TOKENIZER_JSON}, or {VOCAB_JSON} and {MERGES_TXT}, of {tokenizer_path} on "
            "this machine"
        )
    try:
        if vocabulary_path.name == TOKENIZER_JSON:
            tokenizer = Tokenizer.from_file(str(vocabulary_path))
        else:
            tokenizer = Tokenizer(
                models.BPE.from_file(
                    str(vocabulary_path), str(vocabulary_path.with_name(MERGES_TXT))
                )
            )
            tokenizer.decoder = decoders.ByteLevel()
    except Exception as error:  # tokenizers raises plain Exception
        raise LookupError(
            f"needs {vocabulary_path}, which cannot be read: {one_line(error)}"
        ) from error
    text_by_added_token_id = {
        int(token_id): token_text
        for token_id, token_text in metadata.get("added_tokens", {}).items()
    }
    text_by_missing_token_id = {
        token_id: token_text
        for token_id, token_text in text_by_added_token_id.items()
        if tokenizer.id_to_token(token_id) != token_text
    }

    def is_in_vocabulary(token_id: int) -> bool:
        return (
            token_id not in text_by_missing_token_id
            and token_id >= 0
            and tokenizer.id_to_token(token_id) is not None
        )

    def decode(token_ids: np.ndarray) -> str:
        decoded_texts: list[str] = []
        for are_in_vocabulary, consecutive_ids in groupby(token_ids.tolist(), is_in_vocabulary):
            if are_in_vocabulary:
                decoded_texts.append(
                    tokenizer.decode(list(consecutive_ids), skip_special_tokens=False)
                )
            else:
                decoded_texts += [
                    text_by_missing_token_id.get(token_id, f"[{token_id}]")
                    for token_id in consecutive_ids
                ]
        return "".join(decoded_texts)

    return decode


def _local_files(tokenizer_path: str, metadata: Mapping[str, Any]) -> list[Path]:
    """Returns the paths of the files on this machine that contain the vocabulary of a tokenizer.

    The files are tokenizer.json, vocab.json and merges.txt, either in a folder or in the local
    cache of the Hugging Face hub.

    Args:
        tokenizer_path: Folder, URL or hub name of the model or adapter.
        metadata: Metadata of the run. It may name the git commit or another revision of the model
            on the hub.

    Returns:
        Paths of the files that exist; an empty list if `tokenizer_path` is neither a folder with
        such files nor the hub name of a model or adapter whose files are in the cache.
    """
    configuration = metadata["configuration"]
    model_revision = None
    if tokenizer_path == configuration["model_path"]:
        model_revision = metadata.get("model_commit") or configuration.get("model_revision")
    try:
        tokenizer_folder = Path(tokenizer_path).expanduser()
        vocabulary_paths = [
            tokenizer_folder / file_name
            for file_name in VOCABULARY_FILES
            if (tokenizer_folder / file_name).is_file()
        ]
        if not vocabulary_paths:
            from huggingface_hub import try_to_load_from_cache

            cached_paths = (
                try_to_load_from_cache(tokenizer_path, file_name, revision=model_revision)
                for file_name in VOCABULARY_FILES
            )
            vocabulary_paths = [Path(path) for path in cached_paths if isinstance(path, str)]
    except (ImportError, OSError, RuntimeError, ValueError):
        # The package huggingface_hub is not installed, or `tokenizer_path` is neither a local path
        # nor a hub name, but a URL, for example.
        return []
    return vocabulary_paths
