"""--export pickle and --export safetensors: a copy of a finished run in that shard format.

The copy is a run like its source, with the same folders, samples and shards. Every shard is read
back and compared with its source. An export that was killed continues: a shard whose JSON is there
is complete.
"""

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.inspect.export_target import check_space, locked
from activation_extraction.store.commit import FORMAT_VERSION, Commit
from activation_extraction.store.folder import Folder
from activation_extraction.store.formats import SAFETENSORS, ShardFormat, write_shard
from activation_extraction.store.identity import Identity
from activation_extraction.store.local_files import running_system, write_bytes
from activation_extraction.store.metadata import METADATA, METRICS, NOTHING, Stored, read_stored
from activation_extraction.store.patience import scratch_folder
from activation_extraction.store.pickle_file import ContentError
from activation_extraction.store.sealed_json import seal
from activation_extraction.store.shard import Shard, pack_table, same_content, with_table
from activation_extraction.store.shard_reader import read_shard, read_table
from activation_extraction.store.statistics import pack_sums, sums_of


@dataclass(frozen=True)
class _Copy:
    """One folder of a run, and the folder that it is copied to.

    hooks: names of those to copy. changes: fields of the identity that the copy has instead.
    """

    source: Folder
    stored: Stored
    target: Path
    shard_format: ShardFormat
    hooks: tuple[str, ...]
    changes: Mapping[str, Any]

    @cached_property
    def identity(self) -> Identity:
        """Of the copy: that of a run which has stored these hooks alone, in this format."""
        source = self.stored.identity
        assert source is not None
        kept = [number for number, name in enumerate(source.hooks) if name in self.hooks]
        keyed_by = source.keyed_by
        if isinstance(keyed_by, list):
            keyed_by = [keyed_by[number] for number in kept]
        hooks = tuple(source.hooks[number] for number in kept)
        return replace(source, hooks=hooks, keyed_by=keyed_by, **self.changes)

    @property
    def digest(self) -> str:
        """Of the shards that are copied."""
        digests = "".join(commit.sha256 for commit in self.stored.in_order)
        return hashlib.sha256(digests.encode()).hexdigest()

    @property
    def metadata(self) -> dict[str, Any]:
        """Of the copy when it is complete, without the number of its bytes."""
        told = dict(self.stored.metadata or {})
        return {
            **told,
            "format_version": FORMAT_VERSION,
            "written": round(time.time(), 3),
            "system": running_system(),
            "remote": None,
            "hooks": self.wanted(told["hooks"]),
            "identity": self.identity.to_json(),
            "configuration": {**told.get("configuration", {}), **self.changes},
            "copy_of": self.digest,
        }

    def wanted(self, hooks: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of the hooks, as JSON files describe them, that are copied."""
        return [hook for hook in hooks if hook["name"] in self.hooks]


def export_run(
    root: Folder,
    folders: Mapping[str, Stored],
    target: Path,
    shard_format: ShardFormat,
    changes: Mapping[str, Any],
    hooks: Mapping[str, int],
) -> None:
    """Copies a finished run to the folder `target`.

    folders: what the run has stored. changes: fields of the identity that the copy has instead of
    the run's. hooks: name -> bytes of a token, of those to copy. Raises InputError for a target
    that is in use, RunError for what fails on the way.
    """
    copies = [
        _Copy(root.child(name), stored, target / name, shard_format, tuple(hooks), changes)
        for name, stored in folders.items()
    ]
    with tqdm(unit="B", unit_scale=True, desc="exporting", disable=None) as bar:
        bar.total = sum(commit.bytes for each in copies for commit in each.stored.in_order)
        for each in copies:
            _check_others(target, list(folders))
            with locked(each.target):
                try:
                    _copy_folder(each, sum(hooks.values()), bar)
                except OSError as error:
                    raise RunError(one_line(error), remedy="the same command continues") from error


def _check_others(target: Path, names: list[str]) -> None:
    """Raises InputError when the folder holds something beside the folders of the copy."""
    others = [] if names == [""] or not target.is_dir() else os.listdir(target)
    if unknown := sorted(set(others) - set(names)):
        raise InputError(f"--export_dir {target}: holds {unknown[0]}; expected an empty folder")


def _copy_folder(copy: _Copy, token_bytes: int, bar: Any) -> None:
    """Copies the shards that are left, and describes the whole."""
    found = _take_up(copy)
    done = {number: commit for number, commit in found.commits.items() if found.has(commit)}
    missing = [commit for commit in copy.stored.in_order if commit.number not in done]
    if not missing and found.metadata is not None and found.metadata["status"] == "complete":
        return
    check_space(copy.target, token_bytes * sum(commit.tokens for commit in missing))
    content = copy.metadata
    write_bytes(copy.target / METADATA, seal({**content, "status": "running", **NOTHING}))
    for commit in copy.stored.in_order:
        if commit.number not in done:
            done[commit.number] = _copy_shard(copy, commit)
        bar.update(commit.bytes)
    metrics = copy.source.read(METRICS)
    if metrics is not None:
        write_bytes(copy.target / METRICS, metrics)
    size = sum(commit.bytes for commit in done.values())
    write_bytes(copy.target / METADATA, seal({**content, "bytes": size}))


def _take_up(copy: _Copy) -> Stored:
    """What the target holds of this copy. Raises InputError when it holds anything else."""
    found = read_stored(Folder(str(copy.target)))
    where = f"--export_dir {copy.target}"
    for why in found.damaged.values():
        raise InputError(f"{why}; delete {copy.target} and export again")
    if found.metadata is None:
        if any(not name.startswith(".") for name in found.files):
            raise InputError(f"{where}: holds other files; expected an empty folder")
    elif (found.metadata.get("copy_of"), found.identity) != (copy.digest, copy.identity):
        raise InputError(f"{where}: holds another run; expected an empty folder")
    return found


def _check_fits(copy: _Copy, commit: Commit, shard: Shard) -> None:
    """Raises InputError for a shard that the copy's format cannot hold."""
    if any(row.token_ids is None for row in shard.samples) and copy.shard_format is SAFETENSORS:
        raise InputError("--export safetensors: the run has no token ids")


def _copy_shard(copy: _Copy, commit: Commit) -> Commit:
    """Writes one shard, reads it back, and then writes its JSON."""
    try:
        with scratch_folder() as scratch:
            shard = _read(copy.source, commit, scratch)
    except RunError as error:
        at = f"{copy.source.url}/{commit.file}: " if isinstance(error, ContentError) else ""
        raise RunError(f"{at}{error}", remedy="run --verify on the run") from error
    keys = {hook["key"]: hook["name"] for hook in copy.wanted(commit.hooks)}
    slices = {key: shard.slices[key] for key in keys}
    shard = replace(shard, slices=slices, chosen=not copy.identity.every_token)
    _check_fits(copy, commit, shard)
    path = copy.target / copy.shard_format.file_name(commit.number)
    outdated = partial((copy.target / commit.name).unlink, missing_ok=True)
    written = write_shard(path, shard, keys, copy.shard_format, outdated)
    sums = {keys[key]: sums_of(shard.slices[key], shard.positions) for key in keys}
    made = replace(
        commit,
        file=path.name,
        sha256=written.sha256,
        bytes=written.bytes,
        unpacked=written.unpacked,
        hooks=copy.wanted(commit.hooks),
        run=copy.identity.run,
        statistics=write_bytes(copy.target / commit.statistics_file, pack_sums(sums)),
        table=write_bytes(copy.target / commit.table_file, pack_table(shard.samples)),
    )
    try:
        same = same_content(_read(Folder(str(copy.target)), made, copy.target), shard)
    except RunError:
        same = False
    if not same:
        raise RunError(f"{path}: the disk does not hold what was written to it")
    write_bytes(copy.target / made.name, seal(made.to_json()))
    return made


def _read(folder: Folder, commit: Commit, scratch: Path) -> Shard:
    """A shard and its table of samples. Raises RunError if either is not what it should be."""
    table = read_table(folder, commit)
    shard = with_table(read_shard(folder, commit, scratch), table, commit.table_file)
    for sample, *values in zip(shard.samples, *shard.slices.values(), strict=True):
        if sample.token_ids is not None:
            values.append(sample.token_ids)
        if any(len(each) != len(sample.positions) for each in values):
            what = f"sample {sample.sample_idx}: its arrays have different numbers of tokens"
            raise RunError(f"{folder.url}/{commit.file}: {what}")
    return shard
