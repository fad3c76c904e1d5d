"""Which tokens a report looks at, and reading them: a bounded sample, spread over the whole run.

Of every token that is read the norm at each hook is kept; of a smaller, random share of them the
activations as well. A run of any size costs about the same time and memory.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from tqdm import tqdm

from activation_extraction.dataset.dataset import ActivationDataset, SampleActivations
from activation_extraction.dataset.token_batch import ByHook
from activation_extraction.store.commit import Commit
from activation_extraction.store.shard_reader import read_by_ranges

READ_BYTES = 1e9  # of activations, about
FEWEST_TOKENS, MOST_TOKENS = 1000, 200_000
SHARDS = 16  # that the sample is taken from, where a part of a shard can be read
WHOLE_SHARD_BYTES = 4e9  # of shards that have to be read whole, before compression, about
KEPT_BYTES = 512e6  # of activations that stay in memory
MOST_KEPT = 4096  # tokens of a single hook: finding the directions of all takes some ten seconds
LARGEST_NORM = 1e16  # the squares of larger ones overflow
THREADS, THREAD_BYTES = 8, 256e6  # of samples that are read at the same time
SEED = 0  # the same run gives the same report


@dataclass(frozen=True)
class TokenSample:
    """The tokens that were read, in order, with the documents that they come from.

    documents: without activations. document: the number of each token's. token_ids, position: int32
    (tokens,). norms: hook -> float64 (tokens,). kept: the tokens whose activations are here, int64
    (kept,). vectors: hook -> (kept, width), in the stored dtype. shards: how many were looked at.
    """

    documents: list[SampleActivations]
    document: np.ndarray
    token_ids: np.ndarray
    position: np.ndarray
    norms: dict[str, np.ndarray]
    kept: np.ndarray
    vectors: dict[str, np.ndarray]
    shards: int

    def around(self, token: int, most: int) -> slice:
        """Returns the token and up to `most` neighbours on each side, as far as they were kept."""
        start, stop = max(token - most, 0), min(token + most + 1, len(self.position))
        apart = self.position[start:stop] - np.arange(start, stop)
        same = apart == apart[token - start]  # no token between them is missing
        same &= self.document[start:stop] == self.document[token]
        return slice(start + int(same.argmax()), stop - int(same[::-1].argmax()))


def read_sample(dataset: ActivationDataset, commits: Sequence[Commit]) -> TokenSample:
    """Reads a sample of the tokens. commits: the dataset's shards, in its order.

    Raises OSError when a shard cannot be read, or holds activations that are no usable numbers.
    """
    token_bytes = sum(dataset.hooks.values()) * dataset.dtype.itemsize
    by_ranges = all(map(read_by_ranges, commits))
    mean = sum(commit.unpacked for commit in commits) / len(commits)
    most = SHARDS if by_ranges else int(np.clip(WHOLE_SHARD_BYTES / mean, 1, SHARDS))
    shards = np.linspace(0, len(commits) - 1, min(most, len(commits)), dtype=int).tolist()
    tokens = float(np.clip(READ_BYTES / token_bytes, FEWEST_TOKENS, MOST_TOKENS))
    numbers = choose_samples(commits, shards, tokens)
    most_kept = min(KEPT_BYTES / token_bytes, MOST_KEPT / len(dataset.hooks) ** (1 / 3))
    share = most_kept / max(min(tokens, sum(commits[shard].tokens for shard in shards)), 1)
    longest = max(max(commit.tokens / commit.count, 1) for commit in commits) * token_bytes
    threads = int(np.clip(THREAD_BYTES / longest, 1, THREADS)) if by_ranges else 1
    with ThreadPoolExecutor(threads) as pool:
        found = pool.map(partial(_read, dataset, share), [n for n in numbers if n < len(dataset)])
        bar = tqdm(found, "reading", len(numbers), unit=" samples", disable=None)
        samples, kept, norms = zip(*bar, strict=True)
    if not any(len(sample.token_ids) for sample in samples):
        raise ValueError(f"{dataset.url}: no token is in the shards that were looked at")
    return TokenSample(
        [replace(sample, activations=ByHook({})) for sample in samples],
        np.repeat(np.arange(len(samples)), [len(sample.token_ids) for sample in samples]),
        np.concatenate([sample.token_ids for sample in samples]),
        np.concatenate([sample.position for sample in samples]),
        {hook: np.concatenate([each[hook] for each in norms]) for hook in dataset.hooks},
        np.flatnonzero(np.concatenate(kept)),
        {hook: np.concatenate([sample[hook] for sample in samples]) for hook in dataset.hooks},
        len(shards),
    )


def choose_samples(commits: Sequence[Commit], shards: Sequence[int], tokens: float) -> list[int]:
    """Picks samples of some shards, as numbers in the dataset; together about `tokens` tokens."""
    first = np.cumsum([0, *(commit.count for commit in commits)])
    chosen: list[int] = []
    for shard in shards:
        count, stored = commits[shard].count, max(commits[shard].tokens, 1)
        wanted = int(np.clip(round(tokens / len(shards) * count / stored), 1, count))
        picks = np.random.default_rng([SEED, shard]).choice(count, wanted, replace=False)
        chosen += sorted((first[shard] + picks).tolist())
    return chosen


def _read(
    dataset: ActivationDataset, share: float, number: int
) -> tuple[SampleActivations, np.ndarray, ByHook[np.ndarray]]:
    """Returns a sample with the activations of a share of its tokens, these tokens, all norms."""
    sample = dataset[number]
    kept = np.random.default_rng([SEED, number]).random(len(sample.token_ids)) < share
    norms = sample.activations.map(lambda a: np.linalg.norm(a.astype(np.float64), axis=1))
    for hook, values in norms.items():
        if not (values < LARGEST_NORM).all():
            raise OSError(f"{dataset.url}: sample {sample.sample_idx}, {hook}: NaN or huge values")
    return replace(sample, activations=sample.activations.map(lambda a: a[kept])), kept, norms
