"""What a shard holds: its bytes, records and statistics, compared with its JSON file."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from activation_extraction.common.errors import RunError
from activation_extraction.common.visible import counted
from activation_extraction.inspect.verify_folder import differing, file_path
from activation_extraction.inspect.verify_rows import RowDigests
from activation_extraction.store.commit import Commit
from activation_extraction.store.folder import Folder
from activation_extraction.store.identity import Identity
from activation_extraction.store.metadata import Stored
from activation_extraction.store.pickle_file import ContentError
from activation_extraction.store.shard import SampleRow, Shard, with_table
from activation_extraction.store.shard_reader import read_shard, read_sums, read_table
from activation_extraction.store.statistics import Sums, sums_of
from activation_extraction.text.batch import Cursor
from activation_extraction.text.workers import Worker


@dataclass(frozen=True)
class Chosen:
    """A stored sample that is to be recomputed.

    token_ids, positions: of its stored tokens. activations: in the order of the hooks. worker: the
    host that stored it; shard: in which of its shards. start: where in the data that begins, None
    for the beginning of the data.
    """

    where: str
    sample_idx: int
    token_ids: np.ndarray
    positions: np.ndarray
    activations: list[np.ndarray]
    worker: Worker
    shard: int
    start: Cursor | None


class Checked(NamedTuple):
    """A shard that has been read: what is wrong with it, those of its samples that are to be
    recomputed, and digests of what all of them come from (None if it cannot be read)."""

    commit: Commit
    problems: list[str]
    chosen: list[Chosen]
    digests: RowDigests | None = None


def check_shard(
    store: Folder, folder: str, stored: Stored, commit: Commit, wanted: list[int], scratch: Path
) -> Checked:
    """Reads a shard. wanted: the positions of the samples to be recomputed. scratch: a folder for
    downloads.
    """
    where = file_path(folder, commit.file)
    if problem := _check_size(store, stored, commit):
        return Checked(commit, [f"{where}: {problem}"], [])
    if stored.identity is None:
        return Checked(commit, [], [])
    if tuple(commit.names.values()) != stored.identity.hooks:
        return Checked(commit, [f"{where}: has other hooks than its run"], [])
    own = scratch / (folder or "all")
    own.mkdir(exist_ok=True)
    try:
        shard, problems, sums = read_shard(store, commit, own), [], None
        try:
            sums = read_sums(store, commit, {h["name"]: h["width"] for h in commit.hooks})
        except RunError as error:
            problems.append(f"{where}: {error}")
        problems += [f"{where}: {what}" for what in _check_samples(shard, stored, commit, sums)]
        if not problems:
            shard = with_table(shard, read_table(store, commit), commit.table_file)
        chosen = [] if problems else _choose(shard, wanted, where, stored, commit)
        return Checked(commit, problems, chosen, RowDigests.of(shard.samples))
    except ContentError as error:
        problems = [f"{where}: {problem}" for problem in error.problems]
    except (RunError, OSError) as error:
        problems = [f"{where}: {error}".replace(f"{where}: {commit.file}: ", f"{where}: ")]
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError) as error:
        problems = [f"{where}: its content is not as it should be: {error!r:.200}"]
    return Checked(commit, problems, [])


def _check_size(store: Folder, stored: Stored, commit: Commit) -> str | None:
    """What is wrong with the file as it is listed."""
    size = stored.files.get(commit.file)
    if size is None:
        moved = (stored.metadata or {}).get("remote")
        hint = f" here, it was uploaded to {moved}" if moved and store.local else ""
        return f"is missing{hint}"
    return None if size == commit.bytes else f"has {size} bytes, its JSON says {commit.bytes}"


def _choose(
    shard: Shard, wanted: list[int], where: str, stored: Stored, commit: Commit
) -> list[Chosen]:
    identity, before = stored.identity, stored.commits.get(commit.number - 1)
    assert identity is not None
    worker = Worker(identity.machine, identity.total_machines, identity.host, identity.num_hosts)
    return [
        Chosen(
            where=f"{where}: sample {shard.samples[i].sample_idx}",
            sample_idx=shard.samples[i].sample_idx,
            token_ids=np.asarray(shard.samples[i].token_ids),
            positions=shard.samples[i].positions,
            activations=[slices[i] for slices in shard.slices.values()],
            worker=worker,
            shard=commit.number,
            start=None if before is None else before.position,
        )
        for i in wanted
    ]


def _check_samples(
    shard: Shard, stored: Stored, commit: Commit, sums: dict[str, Sums] | None
) -> Iterator[str]:
    """What is wrong with the samples of a shard, and with their activations.

    sums: those that are stored, by hook.
    """
    identity, metadata = stored.identity, stored.metadata or {}
    assert identity is not None
    stride = Worker(machines=identity.total_machines, hosts=identity.num_hosts).stride
    indices = range(commit.first, commit.last + 1, stride)
    found = [row.sample_idx for row in shard.samples]
    if len(found) != len(indices) or any(map(ne, found, indices)):
        yield "its samples are not those of its JSON"
        return
    if shard.tokens != commit.tokens:
        yield f"has {counted(shard.tokens, 'token')}, its JSON says {commit.tokens}"
    problems = [
        f"sample {row.sample_idx}: {problem}"
        for row in shard.samples
        for problem in _check_row(row, identity, metadata["model"]["vocab_size"])
    ]
    yield from problems
    for hook in commit.hooks if not problems else ():
        recorded = None if sums is None else sums[hook["name"]]
        yield from _check_hook(shard, identity.activation_dtype, metadata, hook, recorded)


def _check_row(row: SampleRow, identity: Identity, vocabulary: int) -> Iterator[str]:
    """What is wrong with the token ids and positions of a sample."""
    ids, positions, longest = np.asarray(row.token_ids), row.positions, identity.max_seq_length
    if ids.dtype != np.int32 or ids.ndim != 1:
        yield f"token ids of dtype {ids.dtype}, shape {ids.shape}"
    elif len(ids) != len(positions):
        yield f"{counted(len(ids), 'token id')}, {counted(len(positions), 'activation')}"
    elif len(ids) > longest or (identity.every_token and not len(ids)):
        yield counted(len(ids), "token")
    elif len(ids) and (ids.min() < 0 or ids.max() >= vocabulary):
        yield "token ids outside the vocabulary"
    elif np.isin(ids, identity.drop_token_ids).any():
        yield "token ids that the run drops"
    if identity.every_token:
        if not np.array_equal(positions, np.arange(len(positions))):
            yield "its positions do not count from 0"
    elif (np.diff(positions, prepend=-1, append=longest) <= 0).any():
        yield f"its positions do not ascend from 0 to {longest - 1}"


def _check_hook(
    shard: Shard,
    dtype: str,
    metadata: dict[str, Any],
    hook: dict[str, Any],
    recorded: Sums | None,
) -> Iterator[str]:
    """What is wrong with the activations at one hook. hook: as the commit describes it."""
    name, slices = f"hook {hook['key']}", shard.slices[hook["key"]]
    width = hook["width"]
    problems = []
    for row, activation in zip(shard.samples, slices, strict=True):
        shape = (len(row.positions), width)
        if activation.shape != shape:
            problems.append(f"sample {row.sample_idx}: shape {activation.shape}, expected {shape}")
        if str(activation.dtype) != dtype:
            problems.append(f"sample {row.sample_idx}: dtype {activation.dtype}, expected {dtype}")
    if not problems:
        sums = sums_of(slices, shard.positions)
        problems += differing(sums.statistics, hook)
        if recorded is not None and not recorded.close_to(sums):
            problems.append("its statistics of every dimension are not those of its activations")
    for problem in problems:
        yield f"{name}, {problem}" if problem.startswith("sample") else f"{name}: {problem}"
