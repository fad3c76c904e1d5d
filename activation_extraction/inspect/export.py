"""--export: turns a finished run into the files of a trainer, in one pass and bounded memory.

An export that was killed continues where it stood: `export.json` in its folder says which chunks
are complete and where the reading of the run goes on.
"""

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from activation_extraction.common.choices import SHARD_FORMATS
from activation_extraction.common.errors import InputError, RunError, one_line
from activation_extraction.common.visible import counted, say
from activation_extraction.dataset.batches import Batches
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.folders import read_folders
from activation_extraction.inspect.export_formats import FORMATS, Contents
from activation_extraction.inspect.export_run import export_run
from activation_extraction.inspect.export_target import check_space, local_folder, locked
from activation_extraction.inspect.status import host_states
from activation_extraction.store.folder import Folder
from activation_extraction.store.formats import chosen_format, lines_of_dataset
from activation_extraction.store.local_files import write_bytes
from activation_extraction.store.metadata import Stored
from activation_extraction.store.sealed_json import seal, unseal
from activation_extraction.store.statistics import Statistics

STATE = "export.json"
CHUNK_BYTES = 256 * 2**20  # of all hooks together; four times that is in memory
COMPARED = ("mean", "variance", "mean_norm", "max_norm")


@dataclass
class Progress:
    """How far an export is. reading: the state of the batches; statistics: of what is exported."""

    chunks: int = 0
    finished: bool = False
    reading: dict[str, Any] | None = None
    statistics: dict[str, dict[str, Any]] = field(default_factory=dict)


def export(
    root: Folder, form: str, target: str, patterns: Sequence[str] | None, compress: bool = True
) -> None:
    """Exports the run at `root` to the folder `target`, and says how to read it.

    patterns: names or globs of the hooks; None: all. compress: of pickles. Raises InputError for
    what cannot be exported, and RunError for what fails on the way: the same call then continues.
    """
    folders = _finished(root)
    try:
        dataset = ActivationDataset(root.given)
    except ValueError as error:
        raise InputError(one_line(error)) from error
    except OSError as error:
        raise RunError(one_line(error)) from error
    hooks = _chosen(dataset, patterns)
    if form in SHARD_FORMATS:
        return _export_run(root, folders, form, target, compress, dataset, hooks)
    contents = _contents(dataset, form, _digest(folders), hooks)
    folder = local_folder(target)
    with locked(folder):
        try:
            progress = _take_up(folder, contents)
            if not progress.finished:
                _check_space(folder, contents, progress.chunks)
                _copy(dataset, contents, progress, folder)
                _finish(dataset, contents, progress, folder)
            FORMATS[form].clean_up(folder)
        except OSError as error:
            raise RunError(
                one_line(error), remedy="to continue, run the same command again"
            ) from error
    _print_summary(contents, folder)


def _finished(root: Folder) -> dict[str, Stored]:
    """What the run has stored. Raises InputError unless all hosts have finished."""
    folders = read_folders(root)
    for host in host_states(folders):
        if host.state != "complete":
            where = f"{root.url}/{host.name}".rstrip("/")
            raise InputError(f"--export: {where} is {host.state}; expected a finished run")
    return folders


def _digest(folders: dict[str, Stored]) -> str:
    """Of the run's shards."""
    every = [commit.sha256 for stored in folders.values() for commit in stored.in_order]
    return hashlib.sha256("".join(every).encode()).hexdigest()


def _export_run(
    root: Folder,
    folders: dict[str, Stored],
    form: str,
    target: str,
    compress: bool,
    dataset: ActivationDataset,
    hooks: dict[str, int],
) -> None:
    """--export pickle and --export safetensors: the same run in another format."""
    compress = compress and form == "pickle"
    changes = {"shard_format": form, "compress_shards": compress}
    sizes = {name: width * dataset.dtype.itemsize for name, width in hooks.items()}
    export_run(root, folders, local_folder(target), chosen_format(form, compress), changes, sizes)
    say(
        f"exported: {counted(len(dataset), 'sample')}, {counted(dataset.tokens, 'token')}, "
        f"{counted(len(hooks), 'hook')}, as {form} in {target}"
    )
    say("read it with:", *(f"  {line}" for line in lines_of_dataset(target)))


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


def _contents(
    dataset: ActivationDataset, form: str, source: str, hooks: dict[str, int]
) -> Contents:
    if not dataset.tokens:
        raise InputError(f"--export: {dataset.url} holds no tokens")
    dtype = dataset.metadata["identity"]["activation_dtype"]
    whole = Contents(form, source, hooks, dtype, dataset.tokens, 1)
    per_chunk = max(1, CHUNK_BYTES // sum(map(whole.row_bytes, hooks)))
    return Contents(form, source, hooks, dtype, dataset.tokens, per_chunk)


def _take_up(folder: Path, contents: Contents) -> Progress:
    """What the folder holds of this export. Raises InputError when it holds anything else."""
    path = folder / STATE
    if not path.exists():
        if any(name != f".{STATE}.tmp" for name in os.listdir(folder)):
            raise InputError(f"--export_dir {folder}: holds other files; expected an empty folder")
        progress = Progress()
        _record(folder, contents, progress)
        return progress
    try:
        state = unseal(path.read_bytes(), str(path))
    except RunError as error:
        raise InputError(f"{path}: is damaged; delete {folder} and export again") from error
    for name, wanted in asdict(contents).items():
        if (found := state["contents"].get(name)) != wanted:
            what = f"{name} {found}, not {wanted}" if name != "source" else "other shards"
            raise InputError(f"--export_dir {folder}: holds another export, with {what:.200}")
    progress = Progress(**state["progress"])
    for chunk in range(progress.chunks):
        for hook in contents.hooks:
            _check_size(folder, contents, hook, chunk)
    return progress


def _check_size(folder: Path, contents: Contents, hook: str, chunk: int) -> None:
    form = FORMATS[contents.form]
    path = folder / form.path(hook, chunk)
    if not path.exists() or path.stat().st_size != form.size(contents, hook, chunk):
        raise InputError(
            f"{path}: is missing or has another size; delete {folder} and export again"
        )


def _check_space(folder: Path, contents: Contents, done: int) -> None:
    """Raises InputError when the disk has too little room for what is left."""
    left = contents.tokens - done * contents.per_chunk
    needed = left * (sum(map(contents.row_bytes, contents.hooks)) + 16 * len(contents.hooks))
    check_space(folder, needed)


def _record(folder: Path, contents: Contents, progress: Progress) -> None:
    state = {"contents": asdict(contents), "progress": asdict(progress)}
    write_bytes(folder / STATE, seal(state))


def _copy(dataset: ActivationDataset, contents: Contents, progress: Progress, folder: Path) -> None:
    """Writes the chunks that are left; each is complete before the state counts it."""
    batches = dataset.batches(
        contents.per_chunk, list(contents.hooks), buffer=2 * contents.per_chunk
    )
    if progress.reading is not None:
        batches.restore(progress.reading)
    total, done = contents.tokens, min(progress.chunks * contents.per_chunk, contents.tokens)
    with tqdm(
        total=total, initial=done, unit=" tokens", unit_scale=True, desc="exporting", disable=None
    ) as bar:
        try:
            _copy_chunks(batches, contents, progress, folder, bar)
        finally:
            batches.close()


def _copy_chunks(
    batches: Batches, contents: Contents, progress: Progress, folder: Path, bar: Any
) -> None:
    for chunk in range(progress.chunks, contents.chunks):
        batch = next(batches)
        FORMATS[contents.form].write(folder, chunk, batch)
        for hook, values in batch.activations.items():
            before = progress.statistics.get(hook)
            found = Statistics.of(values)
            merged = Statistics.from_json(before).merge(found) if before else found
            progress.statistics[hook] = merged.to_json()
        progress.chunks, progress.reading = chunk + 1, batches.state()
        _record(folder, contents, progress)
        bar.update(len(batch))


def _finish(
    dataset: ActivationDataset, contents: Contents, progress: Progress, folder: Path
) -> None:
    """Compares what was exported with the run's own statistics, and completes the export."""
    for hook in contents.hooks:
        found = Statistics.from_json(progress.statistics[hook])
        recorded = dataset.statistics[hook]
        for name in COMPARED:
            value, expected = getattr(found, name), getattr(recorded, name)
            if not math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-9):
                raise RunError(
                    f"{folder}: {hook}: the {name} of what was exported is {value}, the run's is "
                    f"{expected}",
                    remedy="run --verify on the run",
                )
    FORMATS[contents.form].finish(folder, contents)
    progress.finished = True
    _record(folder, contents, progress)


def _print_summary(contents: Contents, folder: Path) -> None:
    size = contents.tokens * sum(map(contents.row_bytes, contents.hooks))
    say(
        f"exported: {counted(contents.tokens, 'token')}, {counted(len(contents.hooks), 'hook')}, "
        f"{counted(contents.chunks, 'chunk')}, {size / 1e9:,.3f} GB of activations in {folder}"
    )
    hook = next(iter(contents.hooks))
    say("read it with:", f"  {FORMATS[contents.form].how_to_read(folder, hook)}")
