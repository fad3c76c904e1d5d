"""Which commit of a hub model a run uses: the one with which the extraction began, on all hosts.

The first start records it in metadata.json, so a new commit on the hub does not stop a long run.
"""

from collections.abc import Mapping
from typing import Any

from activation_extraction.cli.errors import InputError
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.output.resume import OPTIONS
from activation_extraction.run.hosts import Host, gather

RECORDED, NEW = "recorded", "new"


def choose_commit(
    model_path: str, revision: str | None, where: str, metadata: Mapping[str, Any]
) -> tuple[str, str] | None:
    """The commit of the hub model as this host sees it, and whether it is RECORDED or NEW.

    revision: what was asked for, None for nothing; metadata: what the output holds already, and
    `where`; empty when the run starts anew. None for a local folder. Raises InputError when another
    revision is asked for than the recorded one.
    """
    recorded = recorded_commit(model_path, metadata)
    # A branch may have moved on: the command that began the extraction continues it all the same.
    if recorded and revision in (None, metadata["configuration"].get("model_revision")):
        return RECORDED, recorded
    commit = Checkpoint(model_path, revision).commit
    if commit is None:
        return None
    if recorded and commit != recorded:
        raise InputError(
            f"--model_revision {revision}: is commit {commit}, but {where} holds an extraction "
            f"with commit {recorded}; {OPTIONS}"
        )
    return (RECORDED if recorded else NEW), commit


def recorded_commit(model_path: str, metadata: Mapping[str, Any]) -> str | None:
    """The commit that an extraction used; None when its model was another one, or a local one."""
    theirs = metadata.get("configuration", {}).get("model_path")
    if theirs != model_path or Checkpoint(model_path).local:
        return None
    return metadata.get("model_commit")


def same_commit(host: Host, chosen: tuple[str, str] | None) -> str | None:
    """One commit for all hosts: a recorded one, else the first host's. All hosts must call it."""
    every = [text.split() for text in gather(host, " ".join(chosen or ())) if text]
    if chosen is None:
        return None
    return min(every, key=lambda found: found[0] != RECORDED)[1]
