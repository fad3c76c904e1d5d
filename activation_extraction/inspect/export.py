"""Copies a finished run to a local folder of files for another program, for --export.

trainer_files.py lists the forms, and names the modules that write the files. They are written to a
temporary folder, which is renamed once it is complete, so a folder with the final name always holds
a whole export.
"""

import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from activation_extraction.common.errors import InputError, RunError, install, one_line, reason_of
from activation_extraction.common.interrupts import raise_on_ctrl_c
from activation_extraction.common.visible import counted, say
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.token_batch import TokenBatch
from activation_extraction.inspect.draft_files import layer_ids, specforge_config
from activation_extraction.inspect.nla_files import FACTS, ROW_GROUP, with_texts
from activation_extraction.inspect.status import host_states
from activation_extraction.inspect.trainer_files import EXPORT_FORMS
from activation_extraction.store.chosen_samples import RunText
from activation_extraction.store.folder import Folder
from activation_extraction.store.run_folders import read_folders
from activation_extraction.store.run_log import RunLog

CHUNK_BYTES = 256 * 2**20  # bytes of a chunk, all hooks together; memory holds a few chunks
# Hook names that may name a folder. In a run by somebody else, a hook name may be any text.
FOLDER_NAME = re.compile(r"(?!\.)[\w .:+@-]{1,200}")
LoadText = Callable[[dict[str, Any]], RunText]


def export(
    root: Folder,
    name: str,
    target: str,
    patterns: Sequence[str] | None,
    load_text: LoadText | None = None,
) -> None:
    """Exports a run to a new folder, and prints how to read it.

    Args:
        root: The output of the run.
        name: The value of --export, a key of EXPORT_FORMS.
        target: The path of the folder, which must not exist.
        patterns: Names or globs of the hooks to export. None for all hooks that the form can take.
        load_text: The function that returns the text of a run, given the metadata of one of its
            hosts. None if the form needs no text.

    Raises:
        InputError: The run cannot be exported in this form, a package is missing, or the folder
            exists or cannot be made. `load_text` raises it, too.
        RunError: Reading or writing failed. Nothing is left of the export then.
    """
    form = EXPORT_FORMS[name]
    if find_spec(form.library) is None:
        raise InputError(f"--export {name}: needs {form.library}; {install(form.library)}")
    if "://" in target:
        raise InputError(f"--export_dir {target}: is a URL; expected a local folder")
    target = os.path.normpath(target)
    folders = read_folders(root)
    dataset = _finished_run(root, folders)
    hooks = _choose_hooks(dataset, patterns, name)
    if (form.takes_codes or form.streams) and not dataset.identity.every_token:
        raise InputError(
            f"--export {name}: {dataset.url} stores only some of its tokens; expected all of them"
        )
    for hook in hooks:
        if not FOLDER_NAME.fullmatch(hook):
            raise InputError(f"--export {name}: hook {hook!r:.80} cannot name a folder")
    if dataset.tokens < form.row:
        raise InputError(
            f"--export {name}: {dataset.url} holds {counted(dataset.tokens, 'token')}; "
            f"expected at least {form.row}"
        )
    token_bytes = sum(form.token_bytes(dataset, hook) for hook in hooks)
    size = max(CHUNK_BYTES // token_bytes // form.row, 1) * form.row
    chunks: Iterable[TokenBatch]
    if form.text_hook is None:
        chunks = _chunks(dataset, hooks, size)
    else:
        text = _load_text(dataset, name, load_text)
        chunks = _chunks(dataset, hooks, min(size, ROW_GROUP), FACTS)
        chunks = with_texts(chunks, root, folders, dataset, text)
    # Besides activations, the files have up to 16 bytes per token and hook: token ids and masks.
    # How long texts are is not known before they are decoded.
    most_bytes = dataset.tokens * (token_bytes + 16 * len(hooks))
    with raise_on_ctrl_c(), _new_folder(target, most_bytes) as folder:
        if form.hook_folders:
            for hook in hooks:
                (folder / hook).mkdir()
        written = form.write(folder, dataset, hooks, chunks)
        file_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    say(
        f"exported: {counted(written.tokens, 'token')}, {counted(len(hooks), 'hook')}, "
        f"{file_bytes / 1e9:,.3f} GB in {target}"
    )
    if left_out := dataset.tokens - written.tokens:
        where = ", at the ends of their samples" if form.takes_codes else ""
        say(f"left out: {counted(left_out, 'token')}, too few for a row of {form.row}{where}")
    for phrase in written.left_out:
        say(f"left out: {phrase}")
    names = {"folder": target, "hook": hooks[0], "path": os.path.join(target, hooks[0])}
    names["quoted_folder"] = shlex.quote(target)
    if form.streams:
        names["model"] = shlex.quote(dataset.tokenizer_path)
        names["layers"] = " ".join(map(str, [*layer_ids(hooks)][:-1]))
        names["config"] = shlex.quote(specforge_config(target, dataset, hooks))
    say("read it with:", *f"  {form.read_with.format(**names, row=form.row)}".split("\n"))


def _finished_run(root: Folder, folders: dict[str, RunLog]) -> ActivationDataset:
    """Returns the dataset of a run.

    Args:
        root: The output of the run.
        folders: The content of each folder of the run, by the folder's name.

    Raises:
        InputError: A host has not finished, or the run cannot be read as a dataset.
        RunError: A file of the run is damaged or cannot be read.
    """
    for host in host_states(folders):
        if host.state != "complete":
            where = f"{root.url}/{host.name}".rstrip("/")
            raise InputError(f"--export: {where} is {host.state}; expected a finished run")
    try:
        return ActivationDataset(root.full_url)
    except ValueError as error:
        raise InputError(one_line(error)) from error
    except OSError as error:
        raise RunError(one_line(error)) from error


def _load_text(dataset: ActivationDataset, name: str, load_text: LoadText | None) -> RunText:
    """Returns the text of a run.

    Raises:
        InputError: Another program has stored the run. `load_text` raises it, too.
    """
    assert load_text is not None
    if not dataset.identity.from_dataset:
        why = "records no data set, because another program stored it"
        raise InputError(f"--export {name}: {dataset.url} {why}")
    return load_text(dataset.metadata)


def _choose_hooks(
    dataset: ActivationDataset, patterns: Sequence[str] | None, name: str
) -> list[str]:
    """Returns the names of the hooks to export, in the run's order.

    Chosen hooks that the form cannot take are left out, with a message.

    Args:
        dataset: The run.
        patterns: Names or globs of the chosen hooks. None for all.
        name: The value of --export.

    Raises:
        InputError: A pattern matches no hook, the form can take none of the chosen hooks, or the
            form takes one hook and another or several hooks are chosen.
    """
    form = EXPORT_FORMS[name]
    try:
        chosen = dataset.hooks.chosen(dataset.url, patterns)
    except ValueError as error:
        raise InputError(f"--hook_names: {error}") from None
    if form.text_hook is not None:
        if len(chosen) != 1 or form.text_hook.fullmatch(chosen[0]) is None:
            raise InputError(
                f"--export {name}: takes one hook blocks.K.hook_resid_post, which --hook_names "
                f"chooses; of {dataset.url} it chooses {', '.join(chosen)}"
            )
        return chosen
    if form.streams:
        kind = " and ".join(form.streams)
    else:
        kind = "codes, which --encode stores" if form.takes_codes else "activations, no codes"

    def can_take(hook: str) -> bool:
        if dataset.shards.hooks[hook].is_array == form.takes_codes:
            return False
        return not form.streams or any(fnmatchcase(hook, glob) for glob in form.streams)

    exported = [hook for hook in dataset.hooks if hook in chosen and can_take(hook)]
    if not exported:
        raise InputError(f"--export {name}: takes {kind}; {dataset.url} has {', '.join(chosen)}")
    if left_out := [hook for hook in chosen if hook not in exported]:
        say(f"left out: {', '.join(left_out)}; {name} takes {kind}")
    return exported


@contextmanager
def _new_folder(target: str, needed: int) -> Iterator[Path]:
    """Makes a temporary folder, which is renamed to `target` after the `with` block.

    If the block fails, the folder is deleted.

    Args:
        target: The path of the final folder.
        needed: The largest number of bytes that the files can have.

    Yields:
        The path of the temporary folder.

    Raises:
        InputError: The final or the temporary folder exists or cannot be made, or the disk has too
            little space.
        RunError: The block raised an OSError.
    """
    where = f"--export_dir {target}"
    temporary = Path(f"{target}.unfinished")
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
            raise InputError(
                f"{where}: has {free / 1e9:,.3f} GB free, needs {needed / 1e9:,.3f} GB"
            )
        yield temporary
        os.sync()  # the files must be on the disk before their folder has its name
        temporary.rename(target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(one_line(error), remedy="nothing is left of the export") from error
        raise


def _chunks(
    dataset: ActivationDataset, hooks: Sequence[str], size: int, columns: Sequence[str] = ()
) -> Iterator[TokenBatch]:
    """Yields all tokens in stored order, `size` at a time, and shows a progress bar.

    Args:
        dataset: The run.
        hooks: The names of the hooks.
        size: The number of tokens of every chunk but the last.
        columns: The names of the columns of the table of samples that chunks have.
    """
    settings = dict(unit=" tokens", unit_scale=True, desc="exporting", disable=None)
    with (
        closing(dataset.batches(size, hooks, buffer=2 * size, columns=columns)) as batches,
        tqdm(total=dataset.tokens, **settings) as bar,
    ):
        for batch in batches:
            bar.update(len(batch))
            yield batch
