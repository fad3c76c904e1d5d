"""--export: copies a finished run to a local folder in another format, in bounded memory.

`pickle` and `safetensors` make a run like its source, with the same folders, samples and shards;
export_tokens.py makes the other formats. An export that was killed continues after its last
complete file. Every file is read back.
"""

import hashlib
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.encodings import token_bytes
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
from activation_extraction.store.metadata import EMPTY_TOTALS, Stored, read_stored
from activation_extraction.store.patience import scratch_folder
from activation_extraction.store.pickle_file import ContentError
from activation_extraction.store.sealed_json import seal
from activation_extraction.store.shard import Shard, pack_table, same_content, with_table
from activation_extraction.store.shard_reader import read_shard, read_table
from activation_extraction.store.statistics import hook_sums, pack_sums


def export(
    root: Folder, form: str, target: str, patterns: Sequence[str] | None, compress: bool = True
) -> None:
    """Exports the run at `root` to the folder `target`, and prints how to read it.

    patterns: names or globs of the hooks; None means all. compress: whether to gzip pickles. Raises
    InputError for a run that cannot be exported, and RunError if anything fails on the way; the
    same call then continues.
    """
    if form == "sae_lens" and find_spec("pyarrow") is None:
        raise InputError("--export sae_lens: needs pyarrow; run: pip install pyarrow")
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
    hooks = _choose_hooks(dataset, patterns)
    if "://" in target:
        raise InputError(f"--export_dir {target}: is a URL; expected a local folder")
    if form in SHARD_FORMATS:
        names = set(folders) - {""}
        others = set(os.listdir(target)) - names if names and os.path.isdir(target) else set()
        for other in sorted(others):
            raise InputError(f"--export_dir {target}: holds {other}; expected an empty folder")
        shard_format = chosen_format(form, compress)
        copies = [
            RunCopy(root.child(name), stored, Path(target, name), shard_format, hooks)
            for name, stored in folders.items()
        ]
        _write(copies)
        say(
            f"exported: {counted(len(dataset), 'sample')}, {counted(dataset.tokens, 'token')}, "
            f"{counted(len(hooks), 'hook')}, as {form} in {target}",
            *("read it with:", *(f"  {line}" for line in lines_of_dataset(target))),
        )
    else:
        commits = [commit for stored in folders.values() for commit in stored.in_order]
        tokens = TokenExport(dataset, form, _digest(commits), hooks, Path(target))
        _write([tokens])
        tokens.say_summary()


def _choose_hooks(dataset: ActivationDataset, patterns: Sequence[str] | None) -> dict[str, int]:
    """Returns the widths of the hooks to export, by name."""
    hooks = dataset.hooks
    try:
        chosen = hooks if patterns is None else hooks.matching(patterns)
    except KeyError as error:
        raise InputError(
            f"--hook_names {error.args[0]}: no such hook; the run has {', '.join(hooks)}"
        ) from None
    return {name: width for name, width in hooks.items() if name in chosen}


def _digest(commits: Sequence[Commit]) -> str:
    """Returns a digest of the content of several shards."""
    return hashlib.sha256("".join(commit.sha256 for commit in commits).encode()).hexdigest()


def _write(exports: "Sequence[TokenExport | RunCopy]") -> None:
    """Writes the folders of an export, or what is left of them."""
    total, unit = sum(export.size for export in exports), exports[0].unit
    with tqdm(total=total, unit=unit, unit_scale=True, desc="exporting", disable=None) as bar:
        for export in exports:
            with _locked(export.folder):
                try:
                    if export.resume():
                        bar.update(export.size)
                        continue
                    bar.update(export.size - export.left)
                    _check_space(export.folder, export.bytes_needed)
                    for size in export.write():
                        bar.update(size)
                except OSError as error:
                    remedy = "to continue, run the same command again"
                    raise RunError(one_line(error), remedy=remedy) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks the folder while the block runs, and creates it if necessary."""
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
    """Raises InputError if the disk of `folder` has less free space than `needed` bytes."""
    if needed > (free := shutil.disk_usage(folder).free):
        raise InputError(
            f"--export_dir {folder}: has {free / 1e9:,.1f} GB free, needs {needed / 1e9:,.1f} GB"
        )


class RunCopy:
    """A copy of one folder of a finished run in another format. A shard with a JSON is complete.

    folder: where the copy goes. size: the bytes of the source. hooks: the widths of the hooks to
    copy, by name.
    """

    unit = "B"

    def __init__(
        self,
        source: Folder,
        stored: Stored,
        folder: Path,
        shard_format: ShardFormat,
        hooks: Mapping[str, int],
    ) -> None:
        identity = stored.identity
        assert identity is not None
        self.folder, self.size = folder, sum(commit.bytes for commit in stored.in_order)
        self._source, self._stored, self._format, self._hooks = source, stored, shard_format, hooks
        self._copied = Stored()
        keyed_by = identity.keyed_by
        if isinstance(keyed_by, list):
            pairs = zip(keyed_by, identity.hooks, strict=True)
            keyed_by = [key for key, hook in pairs if hook in hooks]
        self._changes: dict[str, Any] = {
            "shard_format": "safetensors" if shard_format is SAFETENSORS else "pickle",
            "compress_shards": shard_format.compressed,
        }
        names, integers, floats = (
            tuple(hook for hook in each if hook in hooks)
            for each in (identity.hooks, identity.integer_hooks, identity.float32_hooks)
        )
        identity = replace(
            identity,
            hooks=names,
            integer_hooks=integers,
            float32_hooks=floats,
            keyed_by=keyed_by,
        )
        self._identity = replace(identity, **self._changes)
        self._token_bytes = sum(
            token_bytes(hook["width"], hook["dtype"])
            for commit in stored.in_order[-1:]
            for hook in commit.hooks
            if hook["name"] in hooks
        )
        self._copy_of = _digest(stored.in_order)

    def resume(self) -> bool:
        """Finds out what was copied already, and returns whether that is everything.

        Raises InputError if the folder holds anything else.
        """
        self._copied = copied = read_stored(Folder(str(self.folder)))
        where = f"--export_dir {self.folder}"
        for reason in copied.damaged.values():
            raise InputError(f"{reason}; delete {self.folder} and export again")
        if copied.metadata is None:
            if any(not name.startswith(".") for name in copied.files):
                raise InputError(f"{where}: holds other files; expected an empty folder")
            return False
        if (copied.metadata.get("copy_of"), copied.identity) != (self._copy_of, self._identity):
            raise InputError(f"{where}: holds another run; expected an empty folder")
        return not self._missing and copied.metadata["status"] == "complete"

    @property
    def _missing(self) -> list[Commit]:
        copied = {commit.number for commit in self._copied.in_order if self._copied.has(commit)}
        return [commit for commit in self._stored.in_order if commit.number not in copied]

    @property
    def left(self) -> int:
        """The bytes of the shards that are left to copy."""
        return sum(commit.bytes for commit in self._missing)

    @property
    def bytes_needed(self) -> int:
        """The bytes of the activations that are left to copy, before compression."""
        return self._token_bytes * sum(commit.tokens for commit in self._missing)

    def write(self) -> Iterator[int]:
        """Copies the shards that are left, and yields the bytes of each source after its copy."""
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
        running = {**content, "status": "running", **EMPTY_TOTALS}
        write_bytes(self.folder / METADATA, seal(running))
        copied = self._copied
        size = sum(commit.bytes for commit in copied.in_order if copied.has(commit))
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
            where = f"{self._source.url}/{commit.file}: " if isinstance(error, ContentError) else ""
            raise RunError(f"{where}{error}", remedy="run --verify on the run") from error
        if self._format is SAFETENSORS and any(row.token_ids is None for row in shard.samples):
            raise InputError("--export safetensors: the run has no token ids")
        hooks = [hook for hook in commit.hooks if hook["name"] in self._hooks]
        keys = {hook["key"]: hook["name"] for hook in hooks}
        slices, scales = (
            {key: arrays[key] for key in keys if key in arrays}
            for arrays in (shard.slices, shard.scales)
        )
        some_tokens = not self._identity.every_token
        shard = replace(shard, slices=slices, scales=scales, some_tokens=some_tokens)
        path = self.folder / self._format.file_name(commit.number)
        (self.folder / commit.name).unlink(missing_ok=True)  # of an earlier copy that is damaged
        written = write_shard(path, shard, keys, self._format)
        sums = {
            name: hook_sums(
                self._identity, name, shard.slices[key], shard.positions, shard.scales.get(key)
            )
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
    """Reads a shard and its table of samples. Raises RunError if either is damaged."""
    table = read_table(folder, commit)
    shard = with_table(read_shard(folder, commit, scratch), table, commit.table_file)
    for sample, *values in zip(shard.samples, *shard.slices.values(), strict=True):
        if sample.token_ids is not None:
            values.append(sample.token_ids)
        values += sample.labels.values()
        if any(len(each) != len(sample.positions) for each in values):
            problem = f"sample {sample.sample_idx}: its arrays have different numbers of tokens"
            raise RunError(f"{folder.url}/{commit.file}: {problem}")
    return shard
