"""--export: copies a finished run to a local folder, in bounded memory, in another format.

`pickle` and `safetensors` make a run like its source, with the same folders, samples and shards;
the other formats are in export_tokens.py. An export that was killed continues: whatever is counted
is complete, and everything is read back.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.common.visible import counted, say
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.folders import read_folders
from activation_extraction.inspect.export_tokens import TokenExport
from activation_extraction.inspect.status import host_states
from activation_extraction.store.commit import FORMAT_VERSION, METADATA, METRICS, Commit
from activation_extraction.store.folder import Folder
from activation_extraction.store.formats import (
    SAFETENSORS,
    ShardFormat,
    chosen_format,
    lines_of_dataset,
    write_shard,
)
from activation_extraction.store.local_files import lock_folder, running_system, unlock, write_bytes
from activation_extraction.store.metadata import NOTHING, Stored, read_stored
from activation_extraction.store.patience import scratch_folder
from activation_extraction.store.pickle_file import ContentError
from activation_extraction.store.sealed_json import seal
from activation_extraction.store.shard import Shard, pack_table, same_content, with_table
from activation_extraction.store.shard_reader import read_shard, read_table
from activation_extraction.store.statistics import Sums, pack_sums, sums_of


def export(
    root: Folder, form: str, target: str, patterns: Sequence[str] | None, compress: bool = True
) -> None:
    """Exports the run at `root` to the folder `target`, and says how to read it.

    patterns: names or globs of the hooks; None: all. compress: of pickles. Raises InputError for
    what cannot be exported, and RunError for what fails on the way: the same call then continues.
    """
    folders = read_folders(root)
    for host in host_states(folders):
        if host.state != "complete":
            where = f"{root.url}/{host.name}".rstrip("/")
            raise InputError(f"--export: {where} is {host.state}; expected a finished run")
    try:
        dataset = ActivationDataset(root.given)
    except ValueError as error:
        raise InputError(one_line(error)) from error
    except OSError as error:
        raise RunError(one_line(error)) from error
    hooks = _chosen(dataset, patterns)
    if "://" in target:
        raise InputError(f"--export_dir {target}: is a URL; expected a local folder")
    if form in SHARD_FORMATS:
        made, known = chosen_format(form, compress), set(folders) - {""}
        others = set(os.listdir(target)) - known if known and os.path.isdir(target) else set()
        for other in sorted(others):
            raise InputError(f"--export_dir {target}: holds {other}; expected an empty folder")
        copies = [
            RunCopy(root.child(name), stored, Path(target), name, made, hooks)
            for name, stored in folders.items()
        ]
        _write(copies)
        say(
            f"exported: {counted(len(dataset), 'sample')}, {counted(dataset.tokens, 'token')}, "
            f"{counted(len(hooks), 'hook')}, as {form} in {target}",
            *("read it with:", *(f"  {line}" for line in lines_of_dataset(target))),
        )
    else:
        every = [commit for stored in folders.values() for commit in stored.in_order]
        tokens = TokenExport(dataset, form, _digest(every), hooks, Path(target))
        _write([tokens])
        tokens.say_summary()


def _chosen(dataset: ActivationDataset, patterns: Sequence[str] | None) -> dict[str, int]:
    """Name -> width of the hooks to export."""
    hooks = dataset.hooks
    try:
        wanted = hooks if patterns is None else hooks.matching(patterns)
    except KeyError as error:
        known = ", ".join(hooks)
        raise InputError(
            f"--hook_names {error.args[0]}: no such hook; the run has {known}"
        ) from None
    return {name: width for name, width in hooks.items() if name in wanted}


def _digest(commits: Sequence[Commit]) -> str:
    """Digest of shards."""
    return hashlib.sha256("".join(commit.sha256 for commit in commits).encode()).hexdigest()


def _write(parts: "Sequence[TokenExport] | Sequence[RunCopy]") -> None:
    """Writes the folders of an export, each of which may be there in part."""
    total, unit = sum(part.size for part in parts), parts[0].unit
    with tqdm(total=total, unit=unit, unit_scale=True, desc="exporting", disable=None) as bar:
        for part in parts:
            with _locked(part.folder):
                try:
                    if part.take_up():
                        bar.update(part.size)
                        continue
                    bar.update(part.size - part.left)
                    _check_space(part.folder, part.needed)
                    for size in part.write():
                        bar.update(size)
                except OSError as error:
                    remedy = "to continue, run the same command again"
                    raise RunError(one_line(error), remedy=remedy) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Inside the block no other process may write to the folder, which is made if necessary."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_folder(folder)
    except OSError as error:
        reason = error.strerror or one_line(error)
        raise InputError(f"--export_dir {folder}: cannot be written to: {reason}") from error
    except RunError as error:
        raise RunError(f"--export_dir {folder}: another process is writing to it") from error
    try:
        yield
    finally:
        unlock(lock)


def _check_space(folder: Path, needed: int) -> None:
    """Raises InputError when the disk of `folder` has less room than `needed` bytes."""
    if needed > (free := shutil.disk_usage(folder).free):
        raise InputError(
            f"--export_dir {folder}: has {free / 1e9:,.1f} GB free, needs {needed / 1e9:,.1f} GB"
        )


class RunCopy:
    """A copy of one folder of a finished run in another format. A shard with a JSON is complete.

    size: in bytes of the source. hooks: name -> width of those to copy.
    """

    unit = "B"

    def __init__(
        self,
        source: Folder,
        stored: Stored,
        target: Path,
        name: str,
        shard_format: ShardFormat,
        hooks: Mapping[str, int],
    ) -> None:
        identity = stored.identity
        assert identity is not None
        self.folder, self.size = target / name, sum(commit.bytes for commit in stored.in_order)
        self._source, self._stored, self._format, self._hooks = source, stored, shard_format, hooks
        self._found = Stored()
        keyed_by, chosen = identity.keyed_by, [hook in hooks for hook in identity.hooks]
        if isinstance(keyed_by, list):
            keyed_by = [key for key, kept in zip(keyed_by, chosen, strict=True) if kept]
        form = "safetensors" if shard_format is SAFETENSORS else "pickle"
        self._changes: dict[str, Any] = {
            "shard_format": form,
            "compress_shards": shard_format.compressed,
        }
        names, integers = (
            tuple(hook for hook in each if hook in hooks)
            for each in (identity.hooks, identity.integer_hooks)
        )
        identity = replace(identity, hooks=names, integer_hooks=integers, keyed_by=keyed_by)
        self._identity = replace(identity, **self._changes)
        self._token_bytes = sum(
            width * np.dtype(identity.dtype_of(hook)).itemsize for hook, width in hooks.items()
        )
        self._copy_of = _digest(stored.in_order)

    def take_up(self) -> bool:
        """Finds what is there already; returns whether it is all.

        Raises InputError when the folder holds anything else.
        """
        self._found = found = read_stored(Folder(str(self.folder)))
        where = f"--export_dir {self.folder}"
        for why in found.damaged.values():
            raise InputError(f"{why}; delete {self.folder} and export again")
        if found.metadata is None:
            if any(not name.startswith(".") for name in found.files):
                raise InputError(f"{where}: holds other files; expected an empty folder")
            return False
        if (found.metadata.get("copy_of"), found.identity) != (self._copy_of, self._identity):
            raise InputError(f"{where}: holds another run; expected an empty folder")
        return not self._missing and found.metadata["status"] == "complete"

    @property
    def _missing(self) -> list[Commit]:
        done = {number for number, commit in self._found.commits.items() if self._found.has(commit)}
        return [commit for commit in self._stored.in_order if commit.number not in done]

    @property
    def left(self) -> int:
        """The bytes of the shards that are left to copy."""
        return sum(commit.bytes for commit in self._missing)

    @property
    def needed(self) -> int:
        """How many bytes the activations that are left take."""
        return self._token_bytes * sum(commit.tokens for commit in self._missing)

    def write(self) -> Iterator[int]:
        """Copies the shards that are left, and yields the bytes of each when it is complete."""
        missing, before = self._missing, self._stored.metadata or {}
        content = {
            **before,
            "format_version": FORMAT_VERSION,
            "written": round(time.time(), 3),
            "system": running_system(),
            "remote": None,
            "hooks": [hook for hook in before["hooks"] if hook["name"] in self._hooks],
            "identity": self._identity.to_json(),
            "configuration": {**before.get("configuration", {}), **self._changes},
            "copy_of": self._copy_of,
        }
        running = {**content, "status": "running", **NOTHING}
        write_bytes(self.folder / METADATA, seal(running))
        size = sum(c.bytes for n, c in self._found.commits.items() if self._found.has(c))
        for commit in missing:
            size += self._copy_shard(commit).bytes
            yield commit.bytes
        if (metrics := self._source.read(METRICS)) is not None:
            write_bytes(self.folder / METRICS, metrics)
        write_bytes(self.folder / METADATA, seal({**content, "bytes": size}))

    def _copy_shard(self, commit: Commit) -> Commit:
        """Writes one shard, reads it back, and then writes its JSON."""
        try:
            with scratch_folder() as scratch:
                shard = _read(self._source, commit, scratch)
        except RunError as error:
            at = f"{self._source.url}/{commit.file}: " if isinstance(error, ContentError) else ""
            raise RunError(f"{at}{error}", remedy="run --verify on the run") from error
        if self._format is SAFETENSORS and any(row.token_ids is None for row in shard.samples):
            raise InputError("--export safetensors: the run has no token ids")
        hooks = [hook for hook in commit.hooks if hook["name"] in self._hooks]
        keys = {hook["key"]: hook["name"] for hook in hooks}
        slices = {key: shard.slices[key] for key in keys}
        shard = replace(shard, slices=slices, chosen=not self._identity.every_token)
        path = self.folder / self._format.file_name(commit.number)
        outdated = partial((self.folder / commit.name).unlink, missing_ok=True)
        written = write_shard(path, shard, keys, self._format, outdated)
        sums = {
            name: Sums.zeros(self._hooks[name])
            if name in self._identity.integer_hooks
            else sums_of(shard.slices[key], shard.positions)
            for key, name in keys.items()
        }
        made = replace(
            commit,
            file=path.name,
            sha256=written.sha256,
            bytes=written.bytes,
            unpacked=written.unpacked,
            hooks=hooks,
            run=self._identity.run,
            statistics=write_bytes(self.folder / commit.statistics_file, pack_sums(sums)),
            table=write_bytes(self.folder / commit.table_file, pack_table(shard.samples)),
        )
        try:
            same = same_content(_read(Folder(str(self.folder)), made, self.folder), shard)
        except RunError:
            same = False
        if not same:
            raise RunError(f"{path}: the disk does not hold what was written to it")
        write_bytes(self.folder / made.name, seal(made.to_json()))
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
