"""Which commit of a hub model a run uses: on all hosts, the one that the extraction began with.

The first start records it in metadata.json, so a new commit on the hub does not stop a long run.
"""

from collections.abc import Mapping
from typing import Any

from activation_extraction.common.errors import InputError
from activation_extraction.common.visible import plain_url
from activation_extraction.model.checkpoint import Checkpoint
from activation_extraction.run.hosts import Host, gather
from activation_extraction.store.resume import OPTIONS

RECORDED, NEW = "recorded", "new"


def choose_commit(
    model_path: str, revision: str | None, where: str, metadata: Mapping[str, Any]
) -> tuple[str, str] | None:
    """The hub model's commit as this host sees it, and whether it is RECORDED or NEW.

    None for a local folder. revision: the one asked for, if any; metadata: what the output at
    `where` has recorded, empty when the run starts anew. Raises InputError if the revision asked
    for is not the recorded commit.
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
    """The commit that an extraction used; None if its model is another one, or a local one."""
    theirs = metadata.get("configuration", {}).get("model_path")
    if theirs != plain_url(model_path) or Checkpoint(model_path).local:
        return None
    return metadata.get("model_commit")


def same_commit(host: Host, chosen: tuple[str, str] | None) -> str | None:
    """One commit for all hosts: a recorded one, else the first host's. All hosts must call this."""
    every = [text.split() for text in gather(host, " ".join(chosen or ())) if text]
    if chosen is None:
        return None
    return min(every, key=lambda found: found[0] != RECORDED)[1]
