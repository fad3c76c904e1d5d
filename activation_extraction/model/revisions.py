"""Which commit of a hub model a run uses: the one with which the extraction began, on all hosts.

The first start records it in metadata.json, so that a commit upstream does not stop a long run.
"""

from typing import Any

from activation_extraction.cli.config import Config
from activation_extraction.cli.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.output.resume import OPTIONS
from activation_extraction.output.run_folders import find_metadata, output_roots
from activation_extraction.run.hosts import Host, gather

RECORDED, NEW = "recorded", "new"


def choose_commit(config: Config) -> tuple[str, str] | None:
    """The commit of the hub model as this host sees it, and whether it is RECORDED or NEW.

    None for a local folder. Raises InputError when another revision is asked for than recorded.
    """
    if config.demo:
        return None
    where, metadata = _earlier(config)
    recorded = recorded_commit(config.model_path, metadata)
    asked = config.model_revision
    # The name of a branch may have moved on; the command that began the extraction continues it.
    if recorded and asked in (None, metadata["configuration"].get("model_revision")):
        return RECORDED, recorded
    commit = Checkpoint(config.model_path, asked).commit
    if commit is None:
        return None
    if recorded and commit != recorded:
        raise InputError(
            f"--model_revision {asked}: is commit {commit}, and {where} holds an extraction of "
            f"commit {recorded}; {OPTIONS}"
        )
    return (RECORDED if recorded else NEW), commit


def recorded_commit(model_path: str, metadata: dict[str, Any]) -> str | None:
    """The commit that an extraction used; None when its model was another or is a local one."""
    theirs = metadata.get("configuration", {}).get("model_path")
    if theirs != model_path or Checkpoint(model_path).local:
        return None
    return metadata.get("model_commit")


def _earlier(config: Config) -> tuple[str, dict[str, Any]]:
    """Where the output holds metadata already, and these; empty when the run starts anew."""
    found = None if config.overwrite else map(find_metadata, (r for r, _ in output_roots(config)))
    return next(filter(None, found or ()), ("", {}))


def same_commit(host: Host, chosen: tuple[str, str] | None) -> str | None:
    """One commit for all hosts: a recorded one, else the first host's. All hosts must call it."""
    every = [text.split() for text in gather(host, " ".join(chosen or ())) if text]
    if chosen is None:
        return None
    return min(every, key=lambda found: found[0] != RECORDED)[1]
