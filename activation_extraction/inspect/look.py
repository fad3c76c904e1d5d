"""Starts --status, --verify, --report or --export: the flags that look at a stored run."""

from collections.abc import Callable
from typing import Any

from activation_extraction.cli.flags import Config
from activation_extraction.common.errors import InputError
from activation_extraction.inspect.export import export
from activation_extraction.inspect.report import show_report
from activation_extraction.inspect.status import show_status
from activation_extraction.inspect.verify import verify
from activation_extraction.store.chosen_samples import Recompute
from activation_extraction.store.folder import UPLOAD_TIMEOUT, Folder, FolderError

STATUS_PATIENCE = 20.0  # seconds


def look(config: Config, load: Callable[[dict[str, Any]], Recompute] | None = None) -> int:
    """Does what the flag asks for, and returns the exit status. load: see `verify`."""
    try:
        if config.status and config.upload_timeout > STATUS_PATIENCE:
            root = Folder(config.location, STATUS_PATIENCE)
        else:
            root = Folder(config.location, config.upload_timeout, flag=UPLOAD_TIMEOUT)
        if config.status:
            return show_status(root, config.aggregate, config.json)
        if config.report is not None:
            return show_report(root, config.report)
        if config.export is not None and config.export_dir is not None:
            export(root, config.export, config.export_dir, config.hook_names)
            return 0
        return verify(root, load, config.verify_samples)
    except FolderError as error:
        if error.final:
            raise InputError(str(error)) from error
        raise
