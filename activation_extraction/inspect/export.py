"""Copies a finished run to a local folder of files for another program, for --export.

`export_format_of` makes the format that --export names; export_format.py declares what a format has
to implement. The files are written to a temporary folder, which gets the name in --export_dir when
it is complete. So a folder with this name always contains a whole export.
"""

import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tqdm import tqdm

from activation_extraction.common.errors import (
    InputError,
    RunError,
    install_advice,
    one_line,
    reason_of,
)
from activation_extraction.common.interrupts import raise_on_ctrl_c
from activation_extraction.common.visible import counted, say
from activation_extraction.dataset.dataset import ActivationDataset
from activation_extraction.dataset.token_batch import TokenBatch
from activation_extraction.inspect.draft_files import SpecForgeFormat, SpeculatorsFormat
from activation_extraction.inspect.export_format import ExportFormat
from activation_extraction.inspect.latent_files import DelphiFormat
from activation_extraction.inspect.nla_files import NlaFormat, with_texts
from activation_extraction.inspect.sae_lens_files import SaeLensFormat
from activation_extraction.inspect.status import host_states
from activation_extraction.store.chosen_samples import TextFunctions
from activation_extraction.store.folder import Folder
from activation_extraction.store.run_folders import read_folders
from activation_extraction.store.run_log import RunLog

# Approximate size of a chunk (the tokens that are written at a time) over all exported hooks. The
# size is limited because a few chunks are in memory at the same time.
CHUNK_BYTES = 256 * 2**20
# Names of hooks that may become names of folders, such as "blocks.4.hook_resid_post". A run that
# somebody else stored may contain any text as the name of a hook, such as "../x".
FOLDER_NAME = re.compile(r"(?!\.)[\w .:+@-]{1,200}")
# A function that takes the content of metadata.json. It returns a `TextFunctions`, whose functions
# decode token ids, and read samples from the data set again.
TextFunctionsLoader = Callable[[dict[str, Any]], TextFunctions]


def export_format_of(name: str, export_dtype: str | None = None) -> ExportFormat:
    """Returns the format that --export names.

    Args:
        name: The value of --export.
        export_dtype: The value of --export_dtype, which only the format speculators accepts. None
            for the default.

    Raises:
        InputError: If `export_dtype` is given for a format other than speculators.
    """
    if name == SpeculatorsFormat.flag_value:
        return SpeculatorsFormat(export_dtype)
    if export_dtype is not None:
        raise InputError(
            f"--export_dtype {export_dtype}: needs --export {SpeculatorsFormat.flag_value}, found "
            f"--export {name}"
        )
    formats_without_dtype_choice = SaeLensFormat(), SpecForgeFormat(), DelphiFormat(), NlaFormat()
    format_by_flag_value = {
        export_format.flag_value: export_format for export_format in formats_without_dtype_choice
    }
    return format_by_flag_value[name]


def export(
    root: Folder,
    export_format: ExportFormat,
    target_folder: str,
    patterns: Sequence[str] | None,
    load_text: TextFunctionsLoader | None = None,
) -> None:
    """Exports a run to a new folder in the format of another program, such as SAELens.

    Prints how that program reads the folder.

    Args:
        root: The folder with the output of all hosts.
        export_format: The format of the files.
        target_folder: The path of the new folder, which must not exist.
        patterns: Names or globs of the hooks to export. None for all hooks that the format accepts.
        load_text: The function that takes the content of metadata.json, and returns the functions
            with which the export gets the text of the run's samples. None if the format needs no
            text.

    Raises:
        InputError: If the run cannot be exported in this format, a package is missing, or the
            folder exists or cannot be made. `load_text` may raise it, too.
        RunError: If reading or writing fails. In this case, the unfinished folder is deleted.
    """
    flag_and_format = f"--export {export_format.flag_value}"
    needed_package = export_format.needed_package
    if find_spec(needed_package) is None:
        raise InputError(
            f"{flag_and_format}: needs {needed_package}; {install_advice(needed_package)}"
        )
    if "://" in target_folder:
        raise InputError(f"--export_dir {target_folder}: is a URL; expected a local folder")
    target_folder = os.path.normpath(target_folder)
    log_by_folder = read_folders(root)
    finished_dataset = _finished_run(root, log_by_folder)
    try:
        chosen_hook_names = finished_dataset.hooks.chosen(finished_dataset.url, patterns)
    except ValueError as error:
        raise InputError(f"--hook_names: {error}") from None
    if export_format.needs_every_token and not finished_dataset.identity.every_token:
        raise InputError(
            f"{flag_and_format}: {finished_dataset.url} stores only some of its tokens; expected "
            "all of them, which a run without --positions, --roles and --drop_token_ids stores"
        )
    exported_hook_names = export_format.choose_hooks(finished_dataset, chosen_hook_names)
    for hook_name in exported_hook_names:
        if not FOLDER_NAME.fullmatch(hook_name):
            raise InputError(f"{flag_and_format}: hook {hook_name!r:.80} cannot name a folder")
    tokens_per_row = export_format.tokens_per_row
    if finished_dataset.tokens < tokens_per_row:
        raise InputError(
            f"{flag_and_format}: {finished_dataset.url} holds "
            f"{counted(finished_dataset.tokens, 'token')}; expected at least "
            f"{tokens_per_row}, which fill a row"
        )
    bytes_per_token = sum(
        export_format.token_bytes(finished_dataset, hook_name) for hook_name in exported_hook_names
    )
    tokens_per_chunk = max(CHUNK_BYTES // bytes_per_token // tokens_per_row, 1) * tokens_per_row
    tokens_per_chunk = min(tokens_per_chunk, export_format.max_tokens_per_chunk or tokens_per_chunk)
    token_chunks = _chunks(
        finished_dataset,
        exported_hook_names,
        tokens_per_chunk,
        export_format.sample_table_column_names,
    )
    if export_format.needs_sample_text:
        assert load_text is not None  # all callers pass it if the format needs text
        sample_text_functions = _load_text_functions(finished_dataset, flag_and_format, load_text)
        token_chunks = with_texts(
            token_chunks, root, log_by_folder, finished_dataset, sample_text_functions
        )
    # In addition to the activations, the files contain token ids, masks and scales. They need up to
    # 24 bytes per token and hook, such as two token ids and a mask of 8 bytes each. Texts are not
    # counted, because their lengths are unknown before decoding.
    max_export_bytes = finished_dataset.tokens * (bytes_per_token + 24 * len(exported_hook_names))
    with raise_on_ctrl_c(), _new_folder(target_folder, max_export_bytes) as temporary_folder:
        export_result = export_format.write(
            temporary_folder, finished_dataset, exported_hook_names, token_chunks
        )
        exported_bytes = sum(
            written_path.stat().st_size
            for written_path in temporary_folder.rglob("*")
            if written_path.is_file()
        )
    say(
        f"exported: {counted(export_result.num_tokens, 'token')}, "
        f"{counted(len(exported_hook_names), 'hook')}, "
        f"{exported_bytes / 1e9:,.3f} GB in {target_folder}"
    )
    if num_omitted_tokens := finished_dataset.tokens - export_result.num_tokens:
        place_of_left_out_tokens_phrase = (
            ", at the ends of their samples" if export_format.each_row_has_one_sample else ""
        )
        say(
            f"left out: {counted(num_omitted_tokens, 'token')}, too few for a row of "
            f"{tokens_per_row}"
            f"{place_of_left_out_tokens_phrase}"
        )
    for omission_phrase in export_result.omission_phrases:
        say(f"left out: {omission_phrase}")
    say("read it with:")
    for instruction_line in export_format.usage_lines(
        target_folder, finished_dataset, exported_hook_names
    ):
        say(f"  {instruction_line}")


def _finished_run(root: Folder, log_by_folder: dict[str, RunLog]) -> ActivationDataset:
    """Opens the dataset of a run, and checks that all hosts have finished.

    Args:
        root: The folder with the output of all hosts.
        log_by_folder: The run log of each folder of the run, by the folder's name.

    Raises:
        InputError: If a host has not finished, or the run cannot be read as a dataset.
        RunError: If a file of the run is damaged or cannot be read.
    """
    for host_state in host_states(log_by_folder):
        if host_state.state != "complete":
            host_folder_url = f"{root.url}/{host_state.name}".rstrip("/")
            raise InputError(
                f"--export: {host_folder_url} is {host_state.state}; expected a finished run"
            )
    try:
        return ActivationDataset(root.full_url)
    except ValueError as error:
        raise InputError(one_line(error)) from error
    except OSError as error:
        raise RunError(one_line(error)) from error


def _load_text_functions(
    dataset: ActivationDataset, flag: str, load_text: TextFunctionsLoader
) -> TextFunctions:
    """Returns the functions with which an export gets the text of a run's samples.

    Args:
        dataset: The run.
        flag: The flag --export with its value, for the message.
        load_text: The function that takes the content of metadata.json and returns these functions.

    Returns:
        A function that decodes token ids and, unless the run stores all tokens, a function that
        reads samples from the data set again.

    Raises:
        InputError: If another program has stored the run, so that it has no data set to read again.
            `load_text` may raise InputError, too.
    """
    if not dataset.identity.from_dataset:
        raise InputError(
            f"{flag}: {dataset.url} records no data set, because another program stored it"
        )
    return load_text(dataset.metadata)


@contextmanager
def _new_folder(target_folder: str, needed_bytes: int) -> Iterator[Path]:
    """Makes a temporary folder, which is renamed to `target_folder` after the `with` block.

    If the `with` block fails, the temporary folder is deleted.

    Args:
        target_folder: The path of the final folder.
        needed_bytes: The largest possible size of all files in the folder, in bytes.

    Yields:
        The path of the temporary folder.

    Raises:
        InputError: If the final or the temporary folder exists or cannot be made, or the disk has
            too little free space.
        RunError: If the `with` block raises an OSError.
    """
    flag_and_folder_text = f"--export_dir {target_folder}"
    temporary_folder = Path(f"{target_folder}.unfinished")
    if os.path.lexists(target_folder):
        raise InputError(f"{flag_and_folder_text}: exists; expected the name of a new folder")
    try:
        temporary_folder.mkdir(parents=True)
    except FileExistsError as error:
        raise InputError(
            f"{flag_and_folder_text}: {temporary_folder} exists, so another export is running or "
            "was killed; delete it if none is running"
        ) from error
    except OSError as error:
        raise InputError(
            f"{flag_and_folder_text}: cannot be written to: {reason_of(error)}"
        ) from error
    try:
        if needed_bytes > (free_bytes := shutil.disk_usage(temporary_folder).free):
            raise InputError(
                f"{flag_and_folder_text}: has {free_bytes / 1e9:,.3f} GB free, needs "
                f"{needed_bytes / 1e9:,.3f} GB"
            )
        yield temporary_folder
        os.sync()  # the files must be on the disk before the folder gets its final name
        temporary_folder.rename(target_folder)
    except BaseException as error:
        shutil.rmtree(temporary_folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise RunError(one_line(error), remedy="nothing is left of the export") from error
        raise


def _chunks(
    dataset: ActivationDataset,
    hooks: Sequence[str],
    tokens_per_chunk: int,
    columns: Sequence[str] = (),
) -> Iterator[TokenBatch]:
    """Yields all tokens of a run in stored order, in chunks, and shows a progress bar.

    Args:
        dataset: The run.
        hooks: The names of the hooks whose values the chunks contain.
        tokens_per_chunk: The number of tokens of each chunk but the last.
        columns: The names of the columns of the table of samples that the chunks contain. Empty
            for none.
    """
    progress_bar_settings = dict(unit=" tokens", unit_scale=True, desc="exporting", disable=None)
    with (
        closing(
            dataset.batches(tokens_per_chunk, hooks, buffer=2 * tokens_per_chunk, columns=columns)
        ) as batch_iterator,
        tqdm(total=dataset.tokens, **progress_bar_settings) as progress_bar,
    ):
        for token_batch in batch_iterator:
            progress_bar.update(len(token_batch))
            yield token_batch
