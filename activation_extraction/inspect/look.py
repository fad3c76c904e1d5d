"""Calls the function that belongs to --status, --verify, --report or --export.

These flags look at a stored run. --verify also looks at hidden states of another program. The
callers provide the functions that load the model or the text, because this package imports no JAX.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from activation_extraction.cli.flags import Config
from activation_extraction.common.errors import InputError
from activation_extraction.inspect.export import TextFunctionsLoader, export, export_format_of
from activation_extraction.inspect.hidden_states import StatesFolder, find_states_folder
from activation_extraction.inspect.report import show_report
from activation_extraction.inspect.status import show_status
from activation_extraction.inspect.verify import verify
from activation_extraction.inspect.verify_states import StatesRecomputerLoader, verify_hidden_states
from activation_extraction.store.chosen_samples import Recomputer
from activation_extraction.store.folder import UPLOAD_TIMEOUT, Folder, FolderError, local_path
from activation_extraction.store.run_folders import host_folders
from activation_extraction.store.run_log import own_files

# Seconds after which --status stops trying to reach the output folder or bucket, unless
# --upload_timeout is shorter.
STATUS_PATIENCE = 20.0


def look(
    config: Config,
    load_model: Callable[[dict[str, Any]], Recomputer] | None = None,
    load_text: TextFunctionsLoader | None = None,
    load_states_recomputer: StatesRecomputerLoader | None = None,
) -> int:
    """Carries out --status, --report, --export or --verify on a stored run.

    Args:
        config: The configuration, in which one of the four flags is set.
        load_model: A function that takes the content of metadata.json, loads the model for
            --verify, and returns a `Recomputer`. None to recompute no samples.
        load_text: A function that takes the content of metadata.json, loads the tokenizer for
            --export, and returns a `TextFunctions`, which also reads samples from the data set
            again if the run does not store all tokens. None if the flag needs no text.
        load_states_recomputer: A function for --verify on hidden states that another program has
            stored. It takes the token ids of all samples that may be computed, (tokens,) each, and
            the number of values of a hidden state, checks that the model fits them, and returns a
            `StatesRecomputer`. None if the flags name no model.

    Returns:
        The exit status: 1 if --status or --verify found a problem, otherwise 0.

    Raises:
        InputError: If there is no run, or the flag cannot be applied to this run.
        RunError: If --report or --export fails, for example because a shard is damaged.
        FolderError: If a request to a folder of the run fails, and a later attempt may succeed.
    """
    output_options, inspection_options = config.output_options, config.inspection_options
    try:
        if inspection_options.status and output_options.upload_timeout > STATUS_PATIENCE:
            output_root = Folder(output_options.location, STATUS_PATIENCE)
        else:
            output_root = Folder(
                output_options.location, output_options.upload_timeout, flag=UPLOAD_TIMEOUT
            )
        if inspection_options.status:
            return show_status(output_root, inspection_options.aggregate, inspection_options.json)
        if inspection_options.report is not None:
            return show_report(output_root, inspection_options.report)
        if inspection_options.export is not None and inspection_options.export_dir is not None:
            hook_patterns = config.hook_options.hook_names
            export_format = export_format_of(
                inspection_options.export, inspection_options.export_dtype
            )
            export(
                output_root, export_format, inspection_options.export_dir, hook_patterns, load_text
            )
            return 0
        states_folder = _states_of_another_program(output_root)
        if states_folder is not None:
            return verify_hidden_states(
                states_folder, load_states_recomputer, inspection_options.verify_samples
            )
        return verify(output_root, load_model, inspection_options.verify_samples)
    except FolderError as error:
        if error.is_permanent:
            raise InputError(str(error)) from error
        raise


def _states_of_another_program(root: Folder) -> StatesFolder | None:
    """Returns the hidden states of another program in a folder that contains no run.

    Args:
        root: The folder.

    Returns:
        The folder with hidden states, or None if there are none or if the folder is in a bucket.
    """
    root_listing = root.listing()
    if not root.is_local or own_files(root_listing) or host_folders(root_listing):
        return None
    return find_states_folder(Path(local_path(root.full_url)))
