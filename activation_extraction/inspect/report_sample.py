"""Which tokens a report looks at, and reading them: a bounded sample, spread over the whole run.

Of every token that is read the norm at each hook is kept; of a smaller, random share of them the
activations as well. A run of any size costs about the same time and memory.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from tqdm import tqdm

from activation_extraction.dataset.dataset import ActivationDataset, SampleActivations
from activation_extraction.store.commit import Commit

READ_BYTES = 1e9  # of activations, about
FEWEST_TOKENS = 1000
SHARDS = 16  # that the sample is taken from, where a part of a shard can be read
WHOLE_SHARD_BYTES = 4e9  # of shards that have to be read whole, before compression, about
KEPT_BYTES = 512e6  # of activations that stay in memory
MOST_KEPT = 4096  # tokens
THREAD_BYTES = 256e6  # of samples that are read at the same time
THREADS = 8
SEED = 0  # the same run gives the same report


@dataclass(frozen=True)
class Document:
    """A sample that was read. Its tokens are `start` to `stop` of the report's sample."""

    sample_idx: int
    doc_id: Any
    text_preview: str
    start: int
    stop: int


@dataclass(frozen=True)
class TokenSample:
    """The tokens that were read, in order, with the documents that they come from.

    token_ids, position: int32 (tokens,). norms: hook -> float32 (tokens,). kept: the tokens whose
    activations are here, int64 (kept,). vectors: hook -> (kept, width), in the stored dtype.
    shards: how many of the run's shards were looked at.
    """

    documents: list[Document]
    token_ids: np.ndarray
    position: np.ndarray
    norms: dict[str, np.ndarray]
    kept: np.ndarray
    vectors: dict[str, np.ndarray]
    shards: int

    def document_of(self, token: int) -> Document:
        starts = [document.start for document in self.documents]
        return self.documents[int(np.searchsorted(starts, token, "right")) - 1]


@dataclass(frozen=True)
class _Read:
    """What stays of one sample: as in TokenSample, `kept` counted from the sample's first token."""

    sample_idx: int
    doc_id: Any
    text_preview: str
    token_ids: np.ndarray
    position: np.ndarray
    norms: dict[str, np.ndarray]
    kept: np.ndarray
    vectors: dict[str, np.ndarray]


def read_sample(dataset: ActivationDataset, commits: Sequence[Commit]) -> TokenSample:
    """Reads a sample of the tokens. commits: the dataset's shards, in its order.

    Raises OSError when a shard cannot be read.
    """
    token_bytes = sum(dataset.hooks.values()) * _itemsize(dataset)
    tokens = max(READ_BYTES / token_bytes, FEWEST_TOKENS)
    shards = _choose_shards(commits)
    chosen = choose_samples(commits, shards, tokens)
    expected = sum(commits[s].tokens / commits[s].count * len(chosen[s]) for s in shards)
    share = min(KEPT_BYTES / token_bytes, MOST_KEPT) / max(expected, 1)
    numbers = [number for shard in shards for number in chosen[shard]]
    longest = max(max(commit.tokens / commit.count, 1) for commit in commits) * token_bytes
    threads = int(np.clip(THREAD_BYTES / longest, 1, THREADS)) if _in_ranges(commits) else 1

    def read(number: int) -> _Read:
        return _reduce(dataset[number], share, np.random.default_rng([SEED, number]))

    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(read, [number for number in numbers if number < len(dataset)])
        bar = tqdm(found, "reading", len(numbers), unit=" samples", disable=None)
        return _joined(list(bar), list(dataset.hooks), len(shards))


def _itemsize(dataset: ActivationDataset) -> int:
    return 4 if dataset.metadata["identity"]["activation_dtype"] == "float32" else 2


def _in_ranges(commits: Sequence[Commit]) -> bool:
    """Whether a sample can be read without the rest of its shard."""
    return all(commit.file.endswith(".safetensors") for commit in commits)


def _choose_shards(commits: Sequence[Commit]) -> list[int]:
    """Shards at even distances, the first and the last included where there are two or more."""
    mean = sum(commit.unpacked for commit in commits) / len(commits)
    most = SHARDS if _in_ranges(commits) else int(np.clip(WHOLE_SHARD_BYTES / mean, 1, SHARDS))
    count = min(most, len(commits))
    return sorted(set(np.linspace(0, len(commits) - 1, count).round().astype(int).tolist()))


def choose_samples(
    commits: Sequence[Commit], shards: Sequence[int], tokens: float
) -> dict[int, list[int]]:
    """Shard -> random samples of it, as numbers in the dataset; together about `tokens` tokens."""
    first = [0, *accumulate(commit.count for commit in commits)]
    chosen = {}
    for shard in shards:
        commit = commits[shard]
        wanted = tokens / len(shards) / max(commit.tokens / commit.count, 1e-9)
        count = int(np.clip(round(wanted), 1, commit.count))
        picks = np.random.default_rng([SEED, shard]).choice(commit.count, count, replace=False)
        chosen[shard] = sorted((first[shard] + picks).tolist())
    return chosen


def _reduce(sample: SampleActivations, share: float, chance: np.random.Generator) -> _Read:
    """share: of the tokens, whose activations are kept."""
    kept = np.flatnonzero(chance.random(len(sample.token_ids)) < share)
    return _Read(
        sample.sample_idx,
        sample.doc_id,
        sample.text_preview,
        sample.token_ids,
        sample.position,
        {hook: norms_of(values) for hook, values in sample.activations.items()},
        kept,
        {hook: values[kept] for hook, values in sample.activations.items()},
    )


def norms_of(values: np.ndarray) -> np.ndarray:
    """The Euclidean norm of every row, float32."""
    wide = values.astype(np.float32, copy=False)
    return np.sqrt(np.einsum("td,td->t", wide, wide))


def _joined(read: list[_Read], hooks: list[str], shards: int) -> TokenSample:
    ends = [0, *accumulate(len(one.token_ids) for one in read)]
    return TokenSample(
        list(_documents(read, ends)),
        np.concatenate([one.token_ids for one in read]),
        np.concatenate([one.position for one in read]),
        {hook: np.concatenate([one.norms[hook] for one in read]) for hook in hooks},
        np.concatenate([one.kept + start for one, start in zip(read, ends, strict=False)]),
        {hook: np.concatenate([one.vectors[hook] for one in read]) for hook in hooks},
        shards,
    )


def _documents(read: list[_Read], ends: list[int]) -> Iterator[Document]:
    for one, (start, stop) in zip(read, pairwise(ends), strict=True):
        yield Document(one.sample_idx, one.doc_id, one.text_preview, start, stop)
