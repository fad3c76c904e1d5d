"""Keeps a plan where the run will store its shards; the run shows it beside its real speed."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from activation_extraction.cli.flags import Config
from activation_extraction.common.log import log
from activation_extraction.store.folder import Folder
from activation_extraction.store.metadata import PLAN
from activation_extraction.store.patience import STATUS_PATIENCE, FolderError
from activation_extraction.store.sealed_json import (
    DamagedError,
    check_fields,
    digest_of,
    seal,
    unseal,
)

NAME = "plan.json"
MOST_BYTES = 2**16
# Flags in which a run may differ from its plan: they change neither what it computes nor its speed.
APART = {
    *("plan", "plan_png", "chips_per_host", "chip_hour_dollars", "json", "verbose", "log_every"),
    *("multihost", "coordinator_address", "host_id", "num_hosts", "machine_id", "machine_from"),
    *("connect_timeout", "heartbeat_timeout", "stall_timeout", "upload_timeout"),
    *("output_dir", "min_free_gb", "compilation_cache", "overwrite"),
}


def flags_of(config: Config) -> str:
    """Returns a digest of the flags that a run and its plan must have in common."""
    shared = {name: value for name, value in config.to_json().items() if name not in APART}
    return digest_of(shared)


def keep_plan(config: Config, plan: Mapping[str, Any]) -> None:
    """Writes a plan, which has the fields of `PLAN`. Logs a warning if that fails."""
    try:
        folder = Folder(config.location, STATUS_PATIENCE)
        folder.write(NAME, seal({**plan, "flags": flags_of(config)}))
    except FolderError as error:
        log.warning("the plan could not be kept for the run: %s", error)
        return
    log.info("the plan is kept for the run: %s/%s", folder.url, NAME)


def kept_plan(config: Config, root: Folder) -> dict[str, Any] | None:
    """Returns the plan that was made with the same flags as this run; None if there is none.

    root: the folder that holds those of all machines and hosts. A damaged plan is a warning.
    """
    if root.local and not root.fetch(NAME, Path()).is_file():
        return None
    try:
        data = Folder(root.given, STATUS_PATIENCE).read(NAME, 0, MOST_BYTES)
        if data is None:
            return None
        content = unseal(data, f"{root.url}/{NAME}")
        check_fields({"plan": content}, {"plan": PLAN}, f"{root.url}/{NAME}")
    except (DamagedError, FolderError) as error:
        log.warning("%s; the run is not compared with a plan", error)
        return None
    return content if content.get("flags") == flags_of(config) else None
