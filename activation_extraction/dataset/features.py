"""The table of an autoencoder's features: how often each is active, and on which tokens most.

One pass over the codes counts the tokens of every feature and keeps its strongest tokens, so that
memory grows with the number of features and not with the run. The tokens around the strongest ones
are read afterwards. `find_decoder` turns token ids into text without the tokenizer of the run.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow

from activation_extraction.common.errors import install, one_line
from activation_extraction.common.tokenizer_files import (
    MERGES_TXT,
    TOKENIZER_JSON,
    VOCAB_JSON,
    VOCABULARY_FILES,
    vocabulary_file,
)

if TYPE_CHECKING:  # dataset.py imports this module, so a real import would be circular
    from activation_extraction.dataset.dataset import ActivationDataset

SIZE = 2**14  # tokens of a batch of codes
# Columns of a context: a token on which a feature is strong, and the tokens around this token.
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


class Strongest:
    """The tokens on which each feature has its largest values.

    Args:
        features: Number of features, F.
        count: Number of tokens to keep for each feature.

    Attributes:
        values: Largest values of each feature, float32 (F, count), in descending order; -inf after
            the last token on which the feature is active.
        tokens: Numbers of the tokens with these values, int64 (F, count).
    """

    def __init__(self, features: int, count: int) -> None:
        self.values = np.full((features, count), -np.inf, np.float32)
        self.tokens = np.zeros((features, count), np.int64)

    def add(self, ids: np.ndarray, values: np.ndarray, tokens: np.ndarray) -> None:
        """Adds values of features. Among equal values, those that were added first are kept.

        Args:
            ids: Number of the feature of each value, int32 (n,).
            values: Values of the features, float32 (n,).
            tokens: Number of the token of each value, int64 (n,).
        """
        count = self.values.shape[1]
        large = values > self.values[ids, -1]
        order = np.lexsort((-values[large], ids[large]))
        ids = ids[large][order]
        values = values[large][order]
        tokens = tokens[large][order]
        features, first, number = np.unique(ids, return_index=True, return_counts=True)
        rank = np.arange(len(ids)) - np.repeat(first, number)  # among the values of the feature
        row = np.repeat(np.arange(len(features)), number)
        largest = rank < count
        # The left half of the candidates are the values kept so far; a stable sort prefers these.
        candidates = np.full((len(features), 2 * count), -np.inf, np.float32)
        candidate_tokens = np.zeros(candidates.shape, np.int64)
        candidates[:, :count] = self.values[features]
        candidate_tokens[:, :count] = self.tokens[features]
        right_half = row[largest], count + rank[largest]
        candidates[right_half] = values[largest]
        candidate_tokens[right_half] = tokens[largest]
        best = np.argsort(-candidates, axis=1, kind="stable")[:, :count]
        self.values[features] = np.take_along_axis(candidates, best, 1)
        self.tokens[features] = np.take_along_axis(candidate_tokens, best, 1)


def feature_table(
    dataset: "ActivationDataset", hook: str, contexts: int, around: int
) -> pyarrow.Table:
    """Returns the table of the features of an autoencoder (see `ActivationDataset.features`).

    Args:
        dataset: Dataset of the run.
        hook: Any name of the hook that holds the codes.
        contexts: Number of tokens to list for each feature.
        around: Number of tokens of the sample to show on each side of a listed token.

    Returns:
        A table with a row for each feature.

    Raises:
        ValueError: The hook has no codes or is not read, `contexts` is less than 1, or `around` is
            less than 0.
        OSError: A shard is damaged.
    """
    from tqdm import tqdm  # imported late, because other readers of a run do not need tqdm

    hook = dataset.hooks.aliases.get(hook, hook)
    code_hooks = [name for name, values in dataset.shards.hooks.items() if not values.is_array]
    if not dataset.identity.code_hooks:
        raise ValueError(f"{dataset.url}: has no codes, which --encode stores")
    if hook not in code_hooks:
        raise ValueError(
            f"hook {hook!r} has no codes or is not read; codes are read at "
            f"{', '.join(code_hooks) or 'no hook'}"
        )
    if contexts < 1 or around < 0:
        raise ValueError(f"contexts {contexts}, around {around}: expected at least 1 and 0")
    features = dataset.hooks[hook]
    seen = 0  # number of tokens of earlier batches
    tokens = np.zeros(features, np.int64)
    total = np.zeros(features)
    strongest = Strongest(features, contexts)
    settings = dict(unit=" tokens", unit_scale=True, desc="reading codes", disable=None)
    with tqdm(total=dataset.tokens, **settings) as bar:
        for batch in dataset.batches(SIZE, [hook]):
            codes = batch[hook]
            numbers = np.repeat(np.arange(seen, seen + len(batch)), np.diff(codes.indptr))
            tokens += np.bincount(codes.indices, minlength=features)
            total += np.bincount(codes.indices, codes.data, minlength=features)
            strongest.add(codes.indices, codes.data, numbers)
            seen += len(batch)
            bar.update(len(batch))
    active = tokens > 0
    mean = np.divide(total, tokens, where=active, out=np.zeros(features))
    table: dict[str, Any] = {
        "feature": np.arange(features, dtype=np.int32),
        "tokens": tokens,
        "frequency": tokens / max(seen, 1),
        "mean": pyarrow.array(mean, mask=~active),
        "maximum": pyarrow.array(strongest.values[:, 0], mask=~active),
        "contexts": _contexts(dataset, strongest, around),
    }
    return pyarrow.table(table)


def _contexts(dataset: "ActivationDataset", strongest: Strongest, around: int) -> pyarrow.Array:
    """Returns the column `contexts` of a table of features: a list of CONTEXT for each feature.

    Args:
        dataset: Dataset with the codes.
        strongest: Strongest tokens of every feature, by their numbers in the dataset.
        around: Number of tokens of the sample to show on each side of a token.

    Returns:
        The column, with the strongest token of each feature first.
    """
    kept = np.isfinite(strongest.values)
    values = strongest.values[kept]
    numbers = strongest.tokens[kept]
    begins = np.cumsum([0, *(commit.tokens for commit in dataset.shards.commits)])
    of_shard = np.searchsorted(begins, numbers, "right") - 1
    decode = None
    with suppress(LookupError):
        decode = find_decoder(dataset)
    places = [np.arange(0)]
    tables = [CONTEXT.empty_table()]
    for shard in np.unique(of_shard).tolist():
        reader = dataset.shards.get(shard)
        place = np.flatnonzero(of_shard == shard)
        tokens = reader.begin_tokens(0, dataset.shards.commits[shard].tokens)()
        in_shard = numbers[place] - begins[shard]
        samples = np.searchsorted(reader.offsets, in_shard, "right") - 1
        starts = np.maximum(reader.offsets[samples], in_shard - around)
        stops = np.minimum(reader.offsets[samples + 1], in_shard + around + 1)
        ids = [tokens["token_ids"][start:stop] for start, stop in zip(starts, stops, strict=True)]
        columns = {
            "value": values[place],
            "sample_idx": reader.sample_idx[samples],
            "position": tokens["position"][in_shard],
            "token_ids": ids,
            "token": in_shard - starts,
            "text": [decode and decode(tokens_around) for tokens_around in ids],
        }
        places.append(place)
        tables.append(pyarrow.table(columns, CONTEXT))
    contexts = pyarrow.concat_tables(tables).take(np.argsort(np.concatenate(places)))
    offsets = np.cumsum([0, *kept.sum(axis=1)], dtype=np.int32)
    return pyarrow.ListArray.from_arrays(offsets, contexts.to_struct_array().combine_chunks())


def find_decoder(dataset: "ActivationDataset") -> Callable[[np.ndarray], str]:
    """Returns a function that decodes token ids with the vocabulary of the run's model.

    Tokens that the files of the vocabulary lack are taken from metadata.json, in which the run has
    recorded them. An id without a token is shown as a number in brackets.

    Args:
        dataset: Dataset of the run.

    Raises:
        LookupError: The package tokenizers or the vocabulary is not on this machine, or the
            vocabulary cannot be read. The message says what is needed.
    """
    try:
        from tokenizers import Tokenizer, decoders, models
    except ImportError:
        raise LookupError(f"needs the package tokenizers; {install('tokenizers')}") from None
    metadata = dataset.metadata
    try:
        home = dataset.tokenizer_path
    except ValueError:
        raise LookupError("needs the name of the model, which metadata.json lacks") from None
    path = vocabulary_file(_local_files(home, metadata))
    if path is None:
        raise LookupError(
            f"needs {TOKENIZER_JSON}, or {VOCAB_JSON} and {MERGES_TXT}, of {home} on this machine"
        )
    try:
        if path.name == TOKENIZER_JSON:
            tokenizer = Tokenizer.from_file(str(path))
        else:
            tokenizer = Tokenizer(models.BPE.from_file(str(path), str(path.with_name(MERGES_TXT))))
            tokenizer.decoder = decoders.ByteLevel()
    except Exception as error:  # tokenizers raises no other type
        raise LookupError(f"needs {path}, which cannot be read: {one_line(error)}") from error
    added = {int(number): text for number, text in metadata.get("added_tokens", {}).items()}
    beside = {n: text for n, text in added.items() if tokenizer.id_to_token(n) != text}

    def is_in_vocabulary(token: int) -> bool:
        return token not in beside and token >= 0 and tokenizer.id_to_token(token) is not None

    def decode(ids: np.ndarray) -> str:
        texts: list[str] = []
        for in_vocabulary, tokens in groupby(ids.tolist(), is_in_vocabulary):
            if in_vocabulary:
                texts.append(tokenizer.decode(list(tokens), skip_special_tokens=False))
            else:
                texts += [beside.get(token, f"[{token}]") for token in tokens]
        return "".join(texts)

    return decode


def _local_files(home: str, metadata: Mapping[str, Any]) -> list[Path]:
    """Returns the files of a vocabulary, from its folder or from this machine's cache of the hub.

    Args:
        home: Folder, URL or hub name of the model or adapter.
        metadata: Metadata of the run, which may name the commit of its model.

    Returns:
        Paths of the files; none if `home` is neither a folder with such files nor a name that the
        cache contains.
    """
    configuration = metadata["configuration"]
    commit = None
    if home == configuration["model_path"]:
        commit = metadata.get("model_commit") or configuration.get("model_revision")
    try:
        folder = Path(home).expanduser()
        files = [folder / name for name in VOCABULARY_FILES if (folder / name).is_file()]
        if not files:
            from huggingface_hub import try_to_load_from_cache

            cached = (
                try_to_load_from_cache(home, name, revision=commit) for name in VOCABULARY_FILES
            )
            files = [Path(path) for path in cached if isinstance(path, str)]
    except (ImportError, OSError, RuntimeError, ValueError):  # neither a path nor a hub name
        return []
    return files
