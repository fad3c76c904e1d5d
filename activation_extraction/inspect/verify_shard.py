"""Checks a shard: compares its bytes, samples and statistics with its JSON file.

It also returns digests of the rows and ids of the samples, 40 bytes per sample, from which rows
that occur more than once in the run are found.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import isclose
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.common.encodings import fits
from activation_extraction.common.errors import RunError
from activation_extraction.common.visible import counted
from activation_extraction.store.commit import Commit
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Identity
from activation_extraction.store.metadata import Stored
from activation_extraction.store.pickle_file import ContentError
from activation_extraction.store.shard import SampleRow, Shard, with_table
from activation_extraction.store.shard_reader import read_shard, read_sums, read_table
from activation_extraction.store.statistics import STATISTICS, Statistics, Sums, hook_sums
from activation_extraction.text.batch import Cursor, Worker

MAX_TOKENS = 2**31  # of a sample whose run records no limit
DIGEST = np.dtype([("high", "<u8"), ("low", "<u8")])  # 0 if a sample has no row or no id


@dataclass(frozen=True)
class ChosenSample:
    """A stored sample that is to be recomputed. activations: in the order of the hooks, decoded.

    worker: the host that stored it. shard: the number of its shard. start: where in the data a run
    continues that stores the shard; None at the beginning of the data.
    """

    where: str
    row: SampleRow
    activations: list[np.ndarray]
    worker: Worker
    shard: int
    start: Cursor | None


class Origins(NamedTuple):
    """The origins of samples. rows, ids: DIGESTs of their rows and ids; shape (samples,) each."""

    sample_idx: np.ndarray
    rows: np.ndarray
    ids: np.ndarray


NO_ORIGINS = Origins(np.zeros(0, np.int64), np.zeros(0, DIGEST), np.zeros(0, DIGEST))


class CheckedShard(NamedTuple):
    """The result of checking a shard. chosen: the samples that are to be recomputed. origins: None
    if the shard cannot be read."""

    commit: Commit
    problems: list[str]
    chosen: list[ChosenSample]
    origins: Origins | None = None


def file_path(folder: str, name: str) -> str:
    """Returns the path of a file in the output. folder: its folder; "" is the output itself."""
    return f"{folder}/{name}" if folder else name


def statistics_problems(computed: Statistics, recorded: dict[str, Any]) -> Iterator[str]:
    """Yields how computed statistics differ from those that a JSON file records."""
    expected = Statistics.from_json(recorded)
    for name in STATISTICS:
        value = getattr(computed, name)
        if not isclose(value, getattr(expected, name), rel_tol=1e-6, abs_tol=1e-9):
            yield f"its {name} is {value}, its JSON says {getattr(expected, name)}"


def check_shard(
    store: Folder, folder: str, stored: Stored, commit: Commit, wanted: list[int], scratch: Path
) -> CheckedShard:
    """Checks a shard. wanted: the positions in the shard of the samples to recompute. scratch: a
    folder for downloads.
    """
    where, identity = file_path(folder, commit.file), stored.identity
    if problem := _check_size(store, stored, commit):
        return CheckedShard(commit, [f"{where}: {problem}"], [])
    if identity is None:
        return CheckedShard(commit, [], [])
    if tuple(commit.names.values()) != identity.hooks:
        return CheckedShard(commit, [f"{where}: has other hooks than its run"], [])
    downloads = scratch / (folder or "all")
    downloads.mkdir(exist_ok=True)
    try:
        shard, problems, sums = read_shard(store, commit, downloads), [], None
        try:
            sums = read_sums(store, commit, {h["name"]: h["width"] for h in commit.hooks})
        except RunError as error:
            problems.append(f"{where}: {error}")
        of_samples = _check_samples(shard, identity, stored.metadata or {}, commit, sums)
        problems += [f"{where}: {problem}" for problem in of_samples]
        if not problems:
            shard = with_table(shard, read_table(store, commit), commit.table_file)
        before = stored.commits.get(commit.number - 1)
        chosen = [
            ChosenSample(
                where=f"{where}: sample {shard.samples[i].sample_idx}",
                row=shard.samples[i],
                activations=[shard.activation(key, i) for key in shard.slices],
                worker=identity.worker,
                shard=commit.number,
                start=None if before is None else before.position,
            )
            for i in (wanted if not problems else ())
        ]
        return CheckedShard(commit, problems, chosen, _origins(shard.samples))
    except ContentError as error:
        problems = [f"{where}: {problem}" for problem in error.problems]
    except (RunError, OSError) as error:
        problems = [f"{where}: {error}".replace(f"{where}: {commit.file}: ", f"{where}: ")]
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError) as error:
        problems = [f"{where}: its content is malformed: {error!r:.200}"]
    return CheckedShard(commit, problems, [])


def _check_size(store: Folder, stored: Stored, commit: Commit) -> str | None:
    """Returns what is wrong with the size of the shard's file; None if nothing is."""
    size = stored.files.get(commit.file)
    if size is None:
        moved = (stored.metadata or {}).get("remote")
        hint = f" here, it was uploaded to {moved}" if moved and store.local else ""
        return f"is missing{hint}"
    return None if size == commit.bytes else f"has {size} bytes, its JSON says {commit.bytes}"


def _check_samples(
    shard: Shard,
    identity: Identity,
    metadata: dict[str, Any],
    commit: Commit,
    sums: dict[str, Sums] | None,
) -> Iterator[str]:
    """Yields what is wrong with the samples of a shard, and with their activations.

    It compares only with what the run records: another program may record no model, data set, dtype
    or longest sample. sums: the stored sums by hook; None if they cannot be read.
    """
    indices = [row.sample_idx for row in shard.samples]
    sound = [*indices[:1], *indices[-1:], len(indices)] == [commit.first, commit.last, commit.count]
    sound &= all(before < after for before, after in pairwise(indices))
    if identity.without_gaps:
        sound &= indices == [*range(commit.first, commit.last + 1, identity.worker.stride)]
    if not sound:
        yield "its samples are not those of its JSON"
        return
    if shard.tokens != commit.tokens:
        yield f"has {counted(shard.tokens, 'token')}, its JSON says {commit.tokens}"
    vocabulary = metadata["model"]["vocab_size"] if identity.model_digest else None
    problems = [
        f"sample {row.sample_idx}: {problem}"
        for row in shard.samples
        for problem in _check_row(row, identity, vocabulary)
    ]
    yield from problems
    for hook in commit.hooks if not problems else ():
        recorded = None if sums is None else sums[hook["name"]]
        yield from _check_hook(shard, identity, hook, recorded)


def _check_row(row: SampleRow, identity: Identity, vocabulary: int | None) -> Iterator[str]:
    """Yields what is wrong with the token ids, positions and labels of a sample.

    vocabulary: its size; None if the run records no model.
    """
    ids, positions = np.asarray(row.token_ids), row.positions
    longest = identity.max_seq_length or MAX_TOKENS
    if vocabulary is None and row.token_ids is None:
        ids = np.zeros_like(positions)  # another program need not give any
    if ids.dtype != np.int32 or ids.ndim != 1:
        yield f"token ids of dtype {ids.dtype}, shape {ids.shape}"
    elif len(ids) != len(positions):
        yield f"{counted(len(ids), 'token id')}, {counted(len(positions), 'activation')}"
    elif len(ids) > longest or (vocabulary and identity.every_token and not len(ids)):
        yield counted(len(ids), "token")
    elif vocabulary and len(ids) and (ids.min() < 0 or ids.max() >= vocabulary):
        yield "token ids outside the vocabulary"
    elif np.isin(ids, identity.drop_token_ids).any():
        yield "token ids that the run drops"
    for name, values in row.labels.items():
        if (values.dtype, values.shape) != (np.int32, positions.shape):
            yield f"{name} of dtype {values.dtype}, shape {values.shape}"
    if identity.every_token:
        if not np.array_equal(positions, np.arange(len(positions))):
            yield "its positions do not count from 0"
    elif (np.diff(positions, prepend=-1, append=longest) <= 0).any():
        yield f"its positions do not ascend from 0 to {longest - 1}"


def _check_hook(
    shard: Shard, identity: Identity, hook: dict[str, Any], recorded: Sums | None
) -> Iterator[str]:
    """Yields what is wrong with the activations at one hook. hook: its entry in the commit."""
    name, slices = f"hook {hook['key']}", shard.slices[hook["key"]]
    dtype, sound = identity.dtype_of(hook["name"]) or hook["dtype"], True
    for row, activation in zip(shard.samples, slices, strict=True):
        at, shape = f"{name}, sample {row.sample_idx}", (len(row.positions), hook["width"])
        if activation.shape != shape:
            yield f"{at}: shape {activation.shape}, expected {shape}"
        if str(activation.dtype) != dtype:
            yield f"{at}: dtype {activation.dtype}, expected {dtype}"
        sound &= activation.shape == shape and str(activation.dtype) == dtype
    scales = shard.scales.get(hook["key"])
    for problem in _encoding_problems(identity, hook, slices, scales) if sound else ():
        yield f"{name}: {problem}"
        sound = False
    if sound:
        sums = hook_sums(identity, hook["name"], slices, shard.positions, scales)
        yield from (f"{name}: {problem}" for problem in _error_problems(identity, hook, sums))
        yield from (f"{name}: {problem}" for problem in statistics_problems(sums.statistics, hook))
        if recorded is not None and not recorded.close_to(sums):
            yield f"{name}: its statistics of every dimension are not those of its activations"


def _encoding_problems(
    identity: Identity,
    hook: Mapping[str, Any],
    slices: Sequence[np.ndarray],
    scales: Sequence[np.ndarray] | None,
) -> Iterator[str]:
    """Yields how the encoding of a hook differs from that of its run. slices, scales: of each
    sample; None if the hook has no scales."""
    encoded = identity.is_encoded(hook["name"])
    scale = hook["width"] if encoded else None
    if encoded != (scales is not None):
        yield f"has {'no ' if scales is None else ''}scales"
    elif scales is not None and not all(map(fits, slices, scales)):
        yield "its scales do not belong to its values"
    if hook["scale"] != scale:
        yield f"its scale is for {scale} values, its JSON says {hook['scale']}"


def _error_problems(identity: Identity, hook: Mapping[str, Any], sums: Sums) -> Iterator[str]:
    """Yields why the recorded errors of an encoding cannot be right. sums: of the hook."""
    error, encoded = Statistics.from_json(hook).error, identity.is_encoded(hook["name"])
    if error is None or not encoded:
        if encoded or error is not None:
            yield f"its JSON has {'no' if error is None else 'an'} error of an encoding"
        return
    tokens = int(sums.counts[0]), int(sums.counts[1:].sum())
    for kind, recorded, count in zip(
        ("sinks", "others"), vars(error).values(), tokens, strict=True
    ):
        if recorded.tokens > count or recorded.mean > recorded.worst * (1 + 1e-6):
            yield f"its JSON has an impossible error of {kind}: {asdict(recorded)}"


def _origins(samples: Sequence[SampleRow]) -> Origins:
    """Where samples come from. Of the pieces of a document, the first one stands for its id."""
    return Origins(
        np.array([sample.sample_idx for sample in samples], np.int64),
        _digests(sample.row for sample in samples),
        _digests(None if (sample.row or {}).get("piece") else sample.doc_id for sample in samples),
    )


def _digests(values: Iterable[Any]) -> np.ndarray:
    def digest(value: Any) -> bytes:
        if value is None:
            return bytes(DIGEST.itemsize)
        text = json.dumps(value, sort_keys=True, default=repr)
        return hashlib.blake2b(text.encode(), digest_size=DIGEST.itemsize).digest()

    return np.frombuffer(b"".join(map(digest, values)), DIGEST)


def equal_pairs(sample_idx: np.ndarray, digests: np.ndarray) -> np.ndarray:
    """Returns the `sample_idx` of pairs with equal digests, (pairs, 2), in ascending order."""
    order = np.lexsort((digests["low"], digests["high"]))
    values = digests[order]
    same = (values[1:] == values[:-1]) & (values[1:] != np.zeros((), DIGEST))
    return np.stack([sample_idx[order[:-1][same]], sample_idx[order[1:][same]]], axis=1)
