"""--export: copies a finished run to a local folder, as files that a trainer of autoencoders or of
draft models reads.

trainer_files.py and draft_files.py write the files. They go to a temporary folder, which is renamed
once it is complete, so a folder of the final name holds a whole export.
"""

import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path

from tqdm import tqdm

from activation_extraction.common.errors import InputError, RunError, install, one_line, reason_of
from activation_extraction.common.interrupts import raise_on_ctrl_c
from activation_extraction.common.visible import counted, say
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.token_batch import TokenBatch
from activation_extraction.inspect.draft_files import layer_ids, specforge_config
from activation_extraction.inspect.status import host_states
from activation_extraction.inspect.trainer_files import EXPORT_FORMS
from activation_extraction.store.folder import Folder
from activation_extraction.store.run_folders import read_folders

CHUNK_BYTES = 256 * 2**20  # of all hooks together; a few times as much is in memory
FOLDER_NAME = re.compile(r"(?!\.)[\w .:+@-]{1,200}")  # a hook of a stranger's run may be any text


def export(root: Folder, name: str, target: str, patterns: Sequence[str] | None) -> None:
    """Exports a run to a new folder, and prints how to read it.

    Args:
        root: Output of the run.
        name: Value of --export.
        target: Path of the folder to make.
        patterns: Names or globs of the hooks to export. None for all hooks.

    Raises:
        InputError: The run cannot be exported in this form, or the folder cannot be made.
        RunError: Something fails on the way. Nothing is left of the export then.
    """
    form = EXPORT_FORMS[name]
    if find_spec(form.library) is None:
        needed = f"needs {form.library}; {install(form.library)}"
        raise InputError(f"--export {name}: {needed}")
    if "://" in target:
        raise InputError(f"--export_dir {target}: is a URL; expected a local folder")
    target = os.path.normpath(target)
    dataset = _finished_run(root)
    hooks = _choose_hooks(dataset, patterns, name)
    if (form.of_codes or form.streams) and not dataset.identity.every_token:
        why = "stores some tokens only; expected all of them"
        raise InputError(f"--export {name}: {dataset.url} {why}")
    for hook in hooks:
        if not FOLDER_NAME.fullmatch(hook):
            raise InputError(f"--export {name}: hook {hook!r:.80} cannot name a folder")
    if dataset.tokens < form.row:
        raise InputError(
            f"--export {name}: {dataset.url} holds {counted(dataset.tokens, 'token')}; "
            f"expected at least {form.row}"
        )
    token_bytes = sum(form.token_bytes(dataset, hook) for hook in hooks)
    chunk = max(CHUNK_BYTES // token_bytes // form.row, 1) * form.row
    # Beside activations, the files have up to 16 bytes per token and hook: token ids and masks.
    most_bytes = dataset.tokens * (token_bytes + 16 * len(hooks))
    with raise_on_ctrl_c(), _new_folder(target, most_bytes) as folder:
        for hook in () if form.streams else hooks:
            (folder / hook).mkdir()
        written = form.write(folder, dataset, hooks, _chunks(dataset, hooks, chunk))
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    exported = counted(written.tokens, "token"), counted(len(hooks), "hook")
    say(f"exported: {', '.join(exported)}, {size / 1e9:,.3f} GB in {target}")
    if rest := dataset.tokens - written.tokens:
        where = ", at the ends of their samples" if form.of_codes else ""
        say(f"left out: {counted(rest, 'token')}, too few for a row of {form.row}{where}")
    for left_out in written.left_out:
        say(f"left out: {left_out}")
    names = {"folder": target, "hook": hooks[0], "path": os.path.join(target, hooks[0])}
    if form.streams:
        names["quoted_folder"] = shlex.quote(target)
        names["model"] = shlex.quote(dataset.tokenizer_path)
        names["layers"] = " ".join(map(str, [*layer_ids(hooks)][:-1]))
        names["config"] = shlex.quote(specforge_config(target, dataset, hooks))
    say("read it with:", *f"  {form.read_with.format(**names, row=form.row)}".split("\n"))


def _finished_run(root: Folder) -> ActivationDataset:
    """Returns the dataset of a run of which every host has finished."""
    for host in host_states(read_folders(root)):
        if host.state != "complete":
            where = f"{root.url}/{host.name}".rstrip("/")
            raise InputError(f"--export: {where} is {host.state}; expected a finished run")
    try:
        return ActivationDataset(root.given)
    except ValueError as error:
        raise InputError(one_line(error)) from error
    except OSError as error:
        raise RunError(one_line(error)) from error


def _choose_hooks(
    dataset: ActivationDataset, patterns: Sequence[str] | None, name: str
) -> list[str]:
    """Returns the names of the hooks to export, in the run's order: those that a form can take."""
    form = EXPORT_FORMS[name]
    try:
        chosen = dataset.hooks.chosen(dataset.url, patterns)
    except ValueError as error:
        raise InputError(f"--hook_names: {error}") from None
    kind = "codes, which --encode stores" if form.of_codes else "activations, no codes"
    taken = [h for h in dataset.hooks if dataset.shards.hooks[h].is_array != form.of_codes]
    found = [hook for hook in taken if hook in chosen]
    if form.streams:
        kind = " and ".join(form.streams)
        found = [hook for hook in found if any(fnmatchcase(hook, glob) for glob in form.streams)]
    if not found:
        raise InputError(f"--export {name}: takes {kind}; {dataset.url} has {', '.join(chosen)}")
    if others := [hook for hook in chosen if hook not in found]:
        say(f"left out: {', '.join(others)}; {name} takes {kind}")
    return found


@contextmanager
def _new_folder(target: str, needed: int) -> Iterator[Path]:
    """Makes a temporary folder, which is renamed after the block. If the block fails, the folder is
    deleted, and an OSError becomes a RunError.

    Args:
        target: Final path of the folder.
        needed: Most bytes that its files can have.
    """
    where, temporary = f"--export_dir {target}", Path(f"{target}.unfinished")
    if os.path.lexists(target):
        raise InputError(f"{where}: exists; expected the name of a new folder")
    try:
        temporary.mkdir(parents=True)
    except FileExistsError as error:
        raise InputError(
            f"{where}: {temporary} exists, so another export is running or was killed; delete it "
            "if none is running"
        ) from error
    except OSError as error:
        raise InputError(f"{where}: cannot be written to: {reason_of(error)}") from error
    try:
        if needed > (free := shutil.disk_usage(temporary).free):
            room = f"{free / 1e9:,.3f} GB free, needs {needed / 1e9:,.3f} GB"
            raise InputError(f"{where}: has {room}")
        yield temporary
        os.sync()  # the files must be on the disk before their folder has its name
        temporary.rename(target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(one_line(error), remedy="nothing is left of the export") from error
        raise


def _chunks(dataset: ActivationDataset, hooks: Sequence[str], size: int) -> Iterator[TokenBatch]:
    """Yields all tokens in stored order, `size` at a time, with a progress bar."""
    settings = dict(unit=" tokens", unit_scale=True, desc="exporting", disable=None)
    with (
        closing(dataset.batches(size, hooks, buffer=2 * size)) as batches,
        tqdm(total=dataset.tokens, **settings) as bar,
    ):
        for batch in batches:
            bar.update(len(batch))
            yield batch
