"""Makes an ActivationStorage from keywords, and leaves one as if its process was killed."""

from dataclasses import fields
from pathlib import Path
from typing import Any

from activation_extraction.cli.flags import StorageOptions
from activation_extraction.store.identity import RunFacts
from activation_extraction.store.storage import ActivationStorage

OPTIONS = {field.name for field in fields(StorageOptions)}
FACTS = {"metadata": "metadata", "hook_facts": "facts_by_hook_key", "sources": "sources"}


def open_storage(folder: str | Path, hooks: dict[Any, str], **arguments: Any) -> ActivationStorage:
    """Makes a storage from keywords.

    Args:
        folder: The local folder.
        hooks: Key -> the name of a hook.
        arguments: Arguments of ActivationStorage, fields of StorageOptions, and `metadata`,
            `hook_facts` and `sources` for RunFacts.
    """
    options = StorageOptions(**{name: arguments.pop(name) for name in OPTIONS & set(arguments)})
    facts = RunFacts(**{FACTS[name]: arguments.pop(name) for name in FACTS.keys() & set(arguments)})
    return ActivationStorage(folder, hooks, options, facts=facts, **arguments)


def kill(storage: ActivationStorage) -> None:
    """Ends a storage as SIGKILL does: only committed shards remain, and the status is unchanged."""
    storage._shard_writer.queue.wait()
    storage.close()
